// out[t, i] ← (x[t, i] − mean) / √(variance + eps) · weight[i] + bias[i]
//
// Agrees with `sterna_kernels::norm::layer_norm_groups` of one group, except for the order of sums.
// Shapes: x and out [n_rows, width]; weight and bias [width]. One workgroup of WG per row.

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    n_rows: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    eps: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let row = group_of(group);
    let begin = params.x_offset + min(row, params.n_rows - 1u) * params.x_stride;
    var sum = 0.0;
    for (var i = thread_of(at); i < params.width; i += WG) {
        sum += x[begin + i];
    }
    let mean = workgroup_sum_f32(at, sum) / f32(params.width);
    var squares = 0.0;
    for (var i = thread_of(at); i < params.width; i += WG) {
        let difference = x[begin + i] - mean;
        squares += difference * difference;
    }
    let variance = workgroup_sum_f32(at, squares) / f32(params.width);
    let inverse = 1.0 / sqrt(variance + params.eps);
    if row >= params.n_rows {
        return;
    }
    let to = params.out_offset + row * params.out_stride;
    for (var i = thread_of(at); i < params.width; i += WG) {
        out[to + i] = (x[begin + i] - mean) * inverse * weight[i] + bias[i];
    }
}
