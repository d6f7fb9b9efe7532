// What time mixing reads of each channel of a position, besides receptances and values:
//   (k, e^(−e^x), first · k, 0), or of generation 7
//   (k · (1 + (a − 1) · k_a), e^(−0.606531 · sigmoid(x)), κ, κ · a), with a = sigmoid(rate) and κ = k · k_k, normed
//
// Agrees with `sterna_kernels::rwkv`.
// Shapes: k, decays x and rates [n_rows, n_heads, head_dim]; factors [n_heads, head_dim]; out as k.
// A workgroup of WG per head and row.

override SEVENTH: u32 = 0u;

@group(0) @binding(0) var<storage, read> k: array<f32>;
@group(0) @binding(1) var<storage, read> decays: array<f32>;
@group(0) @binding(2) var<storage, read> rates: array<f32>;
// `first`, or k_k.
@group(0) @binding(3) var<storage, read> first: array<f32>;
@group(0) @binding(4) var<storage, read> k_a: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    head_dim: u32,
    k_offset: u32,
    k_stride: u32,
    decay_offset: u32,
    decay_stride: u32,
    rate_offset: u32,
    rate_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Exponentials that would overflow are bounded.
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-x, 80.0)));
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let i = group_of(group);
    let is_own = i < params.n_rows * params.n_heads;
    let t = min(i / params.n_heads, params.n_rows - 1u);
    let head = i % params.n_heads * params.head_dim;
    let row = params.k_offset + t * params.k_stride;
    var squares = 0.0;
    for (var e = thread_of(at); e < params.head_dim && SEVENTH == 1u; e += WG) {
        let x = k[row + head + e] * first[head + e];
        squares += x * x;
    }
    let inverse = 1.0 / max(sqrt(workgroup_sum_f32(at, squares)), 1e-12);
    if !is_own {
        return;
    }
    for (var e = thread_of(at); e < params.head_dim; e += WG) {
        let c = head + e;
        let key = k[row + c];
        let x = decays[params.decay_offset + t * params.decay_stride + c];
        var prepared = vec4<f32>(key, exp(-exp(min(x, 80.0))), first[c] * key, 0.0);
        if SEVENTH == 1u {
            let rate = sigmoid(rates[params.rate_offset + t * params.rate_stride + c]);
            let direction = key * first[c] * inverse;
            let changed = key * (1.0 + (rate - 1.0) * k_a[c]);
            prepared = vec4<f32>(changed, exp(-0.606531 * sigmoid(x)), direction, direction * rate);
        }
        out[t * params.n_heads * params.head_dim + c] = prepared;
    }
}
