// What a scan reads of each position: queries and keys of the delta rule, normalised in place, and for each head
// how much it keeps, how much it adds, and the product of query and key
//
// Agrees with `sterna_kernels::delta` and `sterna_kernels::ssm`.
// Shapes: x rows with queries and keys [n_key_heads, key_dim] at offsets of their own; time steps and betas
// [n_rows, n_heads]; a and dt_bias [n_heads]; gates [n_rows, n_heads].
// A workgroup of WG per key head and row.

// 1: the delta rule. 0: a state space.
override DELTA: u32 = 1u;
// 1 if the heads of a key head are n_key_heads apart, 0 if they are adjacent.
override TILED: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> steps: array<f32>;
@group(0) @binding(2) var<storage, read> betas: array<f32>;
@group(0) @binding(3) var<storage, read> a: array<f32>;
@group(0) @binding(4) var<storage, read> dt_bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> gates: array<vec4<f32>>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    n_key_heads: u32,
    key_dim: u32,
    x_offset: u32,
    x_stride: u32,
    q: u32,
    k: u32,
    step_offset: u32,
    step_stride: u32,
    beta_offset: u32,
    beta_stride: u32,
    scale: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let i = group_of(group);
    let is_own = i < params.n_rows * params.n_key_heads;
    let t = min(i / params.n_key_heads, params.n_rows - 1u);
    let key_head = i % params.n_key_heads;
    let row = params.x_offset + t * params.x_stride;
    let q = row + params.q + key_head * params.key_dim;
    let k = row + params.k + key_head * params.key_dim;
    var product = 0.0;
    var q_squares = 0.0;
    var k_squares = 0.0;
    for (var e = thread; e < params.key_dim; e += WG) {
        product += x[q + e] * x[k + e];
        if DELTA == 1u {
            q_squares += x[q + e] * x[q + e];
            k_squares += x[k + e] * x[k + e];
        }
    }
    product = workgroup_sum_f32(at, product);
    if DELTA == 1u {
        let by_q = params.scale / sqrt(workgroup_sum_f32(at, q_squares) + 1e-6);
        let by_k = 1.0 / sqrt(workgroup_sum_f32(at, k_squares) + 1e-6);
        product *= by_q * by_k;
        if is_own {
            for (var e = thread; e < params.key_dim; e += WG) {
                x[q + e] *= by_q;
                x[k + e] *= by_k;
            }
        }
    }
    let n_of_key = params.n_heads / params.n_key_heads;
    for (var j = thread; j < n_of_key && is_own; j += WG) {
        let head = select(key_head * n_of_key + j, j * params.n_key_heads + key_head, TILED == 1u);
        let step = softplus(steps[params.step_offset + t * params.step_stride + head] + dt_bias[head]);
        var adds = step;
        if DELTA == 1u {
            adds = 1.0 / (1.0 + exp(-betas[params.beta_offset + t * params.beta_stride + head]));
        }
        gates[t * params.n_heads + head] = vec4<f32>(exp(a[head] * step), adds, product, 0.0);
    }
}
