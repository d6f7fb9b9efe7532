// x[t, i] ← x[t, i] + sigmoid(gates[t]) · y[t, i], or x[t, h, e] ← x[t, h, e] · sigmoid(gates[t, h, 1, e]), or
// x[t, i] ← x[t, i] + sigmoid(gates[t, i]) · (y[t, i] − x[t, i])
//
// Agrees with `sterna_kernels::vector::add_gated`, `sterna_kernels::vector::gate` and `sterna_kernels::vector::blend`.
// Shapes: x and y [n_rows, width]; gates [n_rows, 1], or [n_rows, n_heads, 2, head_dim], or [n_rows, width].
// One element per invocation; workgroups of 256.

// 0: y is added with the gate of its row. 1: x is multiplied by gates of its elements. 2: by gates of its elements it
// becomes y.
override KIND: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> y: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<f32>;

struct Params {
    width: u32,
    len: u32,
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    gates_offset: u32,
    gates_stride: u32,
    head_dim: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-x));
}

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
    let i = params.x_offset + row * params.x_stride + column;
    let gate = params.gates_offset + row * params.gates_stride;
    let other = params.y_offset + row * params.y_stride + column;
    if KIND == 1u {
        let head = column / params.head_dim;
        x[i] *= sigmoid(gates[gate + column + (head + 1u) * params.head_dim]);
    } else if KIND == 2u {
        x[i] += sigmoid(gates[gate + column]) * (y[other] - x[i]);
    } else {
        x[i] += sigmoid(gates[gate]) * y[other];
    }
}
