// x[t, i] ← f(x[t, i], y[i or t, i])
//
// Agrees with `sterna_kernels::vector` and, for OP 4 to 8, `sterna_kernels::activation`.
// Shapes: x [n_rows, width]; y [n_rows, width], or [width] where its stride is 0.
// One element per invocation; workgroups of 256.

// 0: x + y. 1: x · factor. 2: factor · tanh(x / factor). 3: y. 4: activation(x) · y. 5: x · activation(y).
// 6: tanh(x). 7: sigmoid(x). 8: activation(x), of a gate for 1. 9: x · y.
override OP: u32 = 0u;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> y: array<f32>;

struct Params {
    width: u32,
    len: u32,
    x_offset: u32,
    x_stride: u32,
    y_offset: u32,
    y_stride: u32,
    factor: f32,
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
    let i = params.x_offset + row * params.x_stride + column;
    let other = params.y_offset + row * params.y_stride + column;
    switch OP {
        case 0u: {
            x[i] += y[other];
        }
        case 1u: {
            x[i] *= params.factor;
        }
        case 2u: {
            x[i] = params.factor * tanh_of(x[i] / params.factor);
        }
        case 3u: {
            x[i] = y[other];
        }
        case 4u: {
            x[i] = gated(x[i], y[other]);
        }
        case 5u: {
            x[i] = gated(y[other], x[i]);
        }
        case 6u: {
            x[i] = tanh_of(x[i]);
        }
        case 7u: {
            // Bounded, as it would overflow.
            x[i] = 1.0 / (1.0 + exp(min(-x[i], 80.0)));
        }
        case 8u: {
            x[i] = gated(x[i], 1.0);
        }
        default: {
            x[i] *= y[other];
        }
    }
}
