// out[t, c] ← finish(Σ_j taps[c, j] · u[t + j − (n_taps − 1), c]), and the state after the last row: the last
// n_taps − 1 of u
//
// Agrees with `sterna_kernels::conv`.
// Shapes: rows of x [dim], or [3, dim], and of out [dim], those of a sequence as `sequences.wgsl` says; taps
// [dim, n_taps]; states as `states.wgsl` says, [n_taps − 1, dim] from `first` on.
// One channel per invocation, of ROWS rows or of the state; workgroups of 64, as many for each sequence.

// 1: u is B · x, and sums are multiplied with C. 0: u is x, and silu(bias + sum) is taken.
override GATED: u32 = 0u;
override BIAS: u32 = 0u;
// 0: outputs and state of one row. 1: outputs. 2: the state.
override PART: u32 = 0u;
// Positions that it covers.
override TAPS: u32 = 4u;
override ROWS: u32 = 1u;

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

// A sequence: its rows, whether it begins with them, and its state before.
struct Own {
    first_row: u32,
    is_first: bool,
    before: u32,
}

// u of channel c in row t.
fn of_row(own: Own, t: u32, c: u32) -> f32 {
    let at = params.x_offset + (own.first_row + t) * params.x_stride + c;
    if GATED == 1u {
        return x[at] * x[at + 2u * params.dim];
    }
    return x[at];
}

// u of channel c, `ahead` positions after the first that the state before the first row has.
fn input(own: Own, ahead: u32, c: u32) -> f32 {
    if ahead + 1u >= TAPS {
        return of_row(own, ahead + 1u - TAPS, c);
    }
    return select(states[own.before + params.first + ahead * params.dim + c], 0.0, own.is_first);
}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let most = select((params.n_rows + ROWS - 1u) / ROWS, 1u, PART == 2u);
    let n_groups = (most * params.dim + 63u) / 64u;
    let i = group.y * groups.x + group.x;
    let s = i / n_groups;
    if s >= params.n_sequences {
        return;
    }
    let sequence = sequence_of(s);
    let at = i % n_groups * 64u + thread;
    let t = at / params.dim * ROWS;
    let c = at % params.dim;
    if t >= select(sequence.n_rows, 1u, PART == 2u) {
        return;
    }
    let states_at = states_of(s);
    let own = Own(
        sequence.first_row,
        sequence.position == 0u,
        state_at(states_at, sequence.position),
    );
    if PART < 2u {
        // Loads are issued before anything waits: rows beyond the last are not used.
        var u = array<f32, 16>();
        for (var j = 0u; j + 1u < TAPS; j++) {
            if t == 0u {
                u[j] = input(own, j, c);
            } else {
                u[j] = of_row(own, t + j + 1u - TAPS, c);
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            u[r + TAPS - 1u] = of_row(own, min(t + r, sequence.n_rows - 1u), c);
        }
        for (var r = 0u; r < ROWS; r++) {
            var sum = 0.0;
            for (var j = 0u; j < TAPS; j++) {
                sum += taps[c * TAPS + j] * u[r + j];
            }
            let row = own.first_row + t + r;
            if GATED == 1u {
                sum *= x[params.x_offset + min(row, own.first_row + sequence.n_rows - 1u) * params.x_stride + params.dim + c];
            } else {
                if BIAS == 1u {
                    sum += bias[c];
                }
                sum = activate(sum);
            }
            if t + r < sequence.n_rows {
                out[params.out_offset + row * params.out_stride + c] = sum;
            }
        }
    }
    if PART != 1u {
        // All is read before any of it is written.
        var after = array<f32, 8>();
        for (var j = 0u; j + 1u < TAPS; j++) {
            after[j] = input(own, sequence.n_rows + j, c);
        }
        let slot = state_at(states_at, sequence.position + sequence.n_rows);
        for (var j = 0u; j + 1u < TAPS; j++) {
            states[slot + params.first + j * params.dim + c] = after[j];
        }
    }
}
