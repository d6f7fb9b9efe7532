// out[t, i] ← Σ_j weights[t, j] · y[t · n_used + j, i], added to out[t, i] if ADD is 1
//
// Agrees with `sterna_kernels::experts`, except for products that a device fuses with sums.
// Shapes: weights [n_rows, n_used]; y a row of `width` f32 for each route; out [n_rows, width].
// One element per invocation; workgroups of 256.

override ADD: u32 = 0u;

@group(0) @binding(0) var<storage, read> y: array<f32>;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    len: u32,
    n_used: u32,
    y_offset: u32,
    y_stride: u32,
    out_offset: u32,
    out_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let at = (group.y * groups.x + group.x) * 256u + thread;
    if at >= params.len {
        return;
    }
    let row = at / params.width;
    let column = at % params.width;
    var sum = 0.0;
    for (var j = 0u; j < params.n_used; j++) {
        let route = row * params.n_used + j;
        sum += weights[route] * y[params.y_offset + route * params.y_stride + column];
    }
    let i = params.out_offset + row * params.out_stride + column;
    out[i] = select(sum, out[i] + sum, ADD == 1u);
}
