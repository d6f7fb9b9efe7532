// out[t, i] ← x[t, i] · weight[i] / √(mean_i x[t, i]² + eps)
//
// Agrees with `sterna_kernels::norm::rms_norm`, except for the order of the sum.
// Shapes: rows of `n_groups` parts of `width` f32, each normalised by itself. One workgroup of WG per part. `io_*.wgsl` has `x` and `out`.

// 0: as if all weights were 1.
override WEIGHTED: u32 = 1u;

@group(0) @binding(0) var<storage, read> weight: array<f32>;

struct Params {
    width: u32,
    n_rows: u32,
    n_groups: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    eps: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let part = group_of(group);
    let row = part / params.n_groups;
    let first = part % params.n_groups * params.width;
    let begin = params.x_offset + min(row, params.n_rows - 1u) * params.x_stride + first;
    var squares = 0.0;
    for (var i = thread_of(at); i < params.width; i += WG) {
        let x = load(begin + i);
        squares += x * x;
    }
    let mean = workgroup_sum_f32(at, squares) / f32(params.width);
    let inverse = 1.0 / sqrt(mean + params.eps);
    if row >= params.n_rows {
        return;
    }
    let to = params.out_offset + row * params.out_stride + first;
    for (var i = thread_of(at); i < params.width; i += WG) {
        var factor = 1.0;
        if WEIGHTED == 1u {
            factor = weight[first + i];
        }
        out[to + i] = load(begin + i) * inverse * factor;
    }
}
