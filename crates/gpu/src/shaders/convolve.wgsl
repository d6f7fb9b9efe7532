// out[t, c] ← finish(Σ_j taps[c, j] · u[t + j − (n_taps − 1), c]), and the state after the last row: the last
// n_taps − 1 of u
//
// Agrees with `sterna_kernels::conv`.
// Shapes: rows of x [dim], or [3, dim], and of out [dim], those of a sequence as `sequences.wgsl` says; taps
// [dim, n_taps]; states as `states.wgsl` says, [n_taps − 1, dim] from `first` on.
// One channel per invocation, of one row or of the state; workgroups of 64, as many for each sequence.

// 1: u is B · x, and sums are multiplied with C. 0: u is x, and silu(bias + sum) is taken.
override GATED: u32 = 0u;
override BIAS: u32 = 0u;
// 0: outputs and state of one row. 1: outputs. 2: the state.
override PART: u32 = 0u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> taps: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> sequences: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    dim: u32,
    n_sequences: u32,
    // The most of a sequence.
    n_rows: u32,
    n_taps: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    sequences: u32,
    places: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// u of channel c, `ahead` positions after the first that the state before the first row has, which begins at `before`.
fn input(own: Sequence, before: u32, ahead: u32, c: u32) -> f32 {
    let n_before = params.n_taps - 1u;
    if ahead >= n_before {
        let row = params.x_offset + (own.first_row + ahead - n_before) * params.x_stride + c;
        if GATED == 1u {
            return x[row] * x[row + 2u * params.dim];
        }
        return x[row];
    }
    if own.position == 0u {
        return 0.0;
    }
    return states[before + params.first + ahead * params.dim + c];
}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let most = select(params.n_rows, 1u, PART == 2u);
    let n_groups = (most * params.dim + 63u) / 64u;
    let i = group.y * groups.x + group.x;
    let s = i / n_groups;
    if s >= params.n_sequences {
        return;
    }
    let own = sequence_of(s);
    let at = i % n_groups * 64u + thread;
    let t = at / params.dim;
    let c = at % params.dim;
    if t >= select(own.n_rows, 1u, PART == 2u) {
        return;
    }
    let states_at = states_of(s);
    let before = state_at(states_at, own.position);
    let row = own.first_row + t;
    if PART < 2u {
        var sum = 0.0;
        for (var j = 0u; j < params.n_taps; j++) {
            sum += taps[c * params.n_taps + j] * input(own, before, t + j, c);
        }
        if GATED == 1u {
            sum *= x[params.x_offset + row * params.x_stride + params.dim + c];
        } else {
            if BIAS == 1u {
                sum += bias[c];
            }
            sum = activate(sum);
        }
        out[params.out_offset + row * params.out_stride + c] = sum;
    }
    if PART != 1u {
        // All is read before any of it is written.
        var after = array<f32, 8>();
        for (var j = 0u; j + 1u < params.n_taps; j++) {
            after[j] = input(own, before, own.n_rows + j, c);
        }
        let slot = state_at(states_at, own.position + own.n_rows);
        for (var j = 0u; j + 1u < params.n_taps; j++) {
            states[slot + params.first + j * params.dim + c] = after[j];
        }
    }
}
