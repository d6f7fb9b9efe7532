// out[t, c] ← finish(Σ_j taps[c, j] · u[t + j − (n_taps − 1), c]), and the state after the last row: the last
// n_taps − 1 of u
//
// Agrees with `sterna_kernels::conv`.
// Shapes: x [n_rows, dim], or [n_rows, 3, dim]; out [n_rows, dim]; taps [dim, n_taps]; states [SLOTS, state_len],
// of which [n_taps − 1, dim] from `first` on; position[0] is that of the first row.
// One channel per invocation, of one row or of the state; workgroups of 64.

// 1: u is B · x, and sums are multiplied with C. 0: u is x, and silu(bias + sum) is taken.
override GATED: u32 = 0u;
override BIAS: u32 = 0u;
// 0: outputs and state of one row. 1: outputs. 2: the state.
override PART: u32 = 0u;
override SLOTS: u32 = 4u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> position: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    dim: u32,
    n_rows: u32,
    n_taps: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    position: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// u of channel c, `ahead` positions after the first that the state before the first row has.
fn input(ahead: u32, c: u32) -> f32 {
    let n_before = params.n_taps - 1u;
    if ahead >= n_before {
        let row = params.x_offset + (ahead - n_before) * params.x_stride + c;
        if GATED == 1u {
            return x[row] * x[row + 2u * params.dim];
        }
        return x[row];
    }
    let now = position[params.position];
    if now == 0u {
        return 0.0;
    }
    let slot = now % SLOTS * params.state_len;
    return states[slot + params.first + ahead * params.dim + c];
}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let at = (group.y * groups.x + group.x) * 64u + thread;
    let t = at / params.dim;
    let c = at % params.dim;
    if t >= select(params.n_rows, 1u, PART == 2u) {
        return;
    }
    if PART < 2u {
        var sum = 0.0;
        for (var j = 0u; j < params.n_taps; j++) {
            sum += taps[c * params.n_taps + j] * input(t + j, c);
        }
        if GATED == 1u {
            sum *= x[params.x_offset + t * params.x_stride + params.dim + c];
        } else {
            if BIAS == 1u {
                sum += bias[c];
            }
            sum = activate(sum);
        }
        out[params.out_offset + t * params.out_stride + c] = sum;
    }
    if PART != 1u {
        // All is read before any of it is written.
        var after = array<f32, 8>();
        for (var j = 0u; j + 1u < params.n_taps; j++) {
            after[j] = input(params.n_rows + j, c);
        }
        let slot = (position[params.position] + params.n_rows) % SLOTS * params.state_len;
        for (var j = 0u; j + 1u < params.n_taps; j++) {
            states[slot + params.first + j * params.dim + c] = after[j];
        }
    }
}
