// x ← norm(x) · silu(gate), or of generation 7 (norm(x) + (r · (k ∘ r_k)) v) · gate; each head by itself, with mean and
// variance
//
// Agrees with `sterna_kernels::rwkv`, except for the order of sums.
// Shapes: x, gate, r and v [n_rows, n_heads, head_dim]; prepared as r, of which k is the first; weight, bias and r_k
// [n_heads, head_dim].
// A workgroup of WG per head and row.

override SEVENTH: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> gate: array<f32>;
@group(0) @binding(4) var<storage, read> r: array<f32>;
@group(0) @binding(5) var<storage, read> prepared: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> v: array<f32>;
@group(0) @binding(7) var<storage, read> r_k: array<f32>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    head_dim: u32,
    x_offset: u32,
    x_stride: u32,
    gate_offset: u32,
    gate_stride: u32,
    r_offset: u32,
    r_stride: u32,
    v_offset: u32,
    v_stride: u32,
    prepared: u32,
    eps: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let i = group_of(group);
    let is_own = i < params.n_rows * params.n_heads;
    let t = min(i / params.n_heads, params.n_rows - 1u);
    let head = i % params.n_heads * params.head_dim;
    let row = params.x_offset + t * params.x_stride + head;
    let r_row = params.r_offset + t * params.r_stride;
    let given = params.prepared + t * params.n_heads * params.head_dim;
    var sum = 0.0;
    var bonus = 0.0;
    for (var e = thread_of(at); e < params.head_dim; e += WG) {
        let c = head + e;
        sum += x[row + e];
        if SEVENTH == 1u {
            bonus += r[r_row + c] * prepared[given + c].x * r_k[c];
        }
    }
    let mean = workgroup_sum_f32(at, sum) / f32(params.head_dim);
    bonus = workgroup_sum_f32(at, bonus);
    var squares = 0.0;
    for (var e = thread_of(at); e < params.head_dim; e += WG) {
        let difference = x[row + e] - mean;
        squares += difference * difference;
    }
    let variance = workgroup_sum_f32(at, squares) / f32(params.head_dim);
    let inverse = 1.0 / sqrt(variance + params.eps);
    if !is_own {
        return;
    }
    for (var e = thread_of(at); e < params.head_dim; e += WG) {
        let c = head + e;
        let y = (x[row + e] - mean) * inverse * weight[c] + bias[c];
        let by = gate[params.gate_offset + t * params.gate_stride + c];
        if SEVENTH == 1u {
            x[row + e] = (y + bonus * v[params.v_offset + t * params.v_stride + c]) * by;
        } else {
            x[row + e] = y * activate(by);
        }
    }
}
