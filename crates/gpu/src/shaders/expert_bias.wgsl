// x[r, i] ← x[r, i] + bias[experts[r], i]
//
// Agrees with `sterna_kernels::experts`, except for the order of routes.
// Shapes: x a row of `width` f32 for each route; experts [n_routes]; bias [n_experts, width].
// One element per invocation; workgroups of 256.

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> experts: array<u32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;

struct Params {
    width: u32,
    len: u32,
    x_offset: u32,
    x_stride: u32,
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
    let route = at / params.width;
    let column = at % params.width;
    x[params.x_offset + route * params.x_stride + column] += bias[experts[route] * params.width + column];
}
