// Heads that remember a matrix S, from position to position:
//   y = (S + (first ∘ k) ⊗ v)ᵀ r,  S ← diag(w) S + k ⊗ v, or of generation 7
//   S ← diag(w) S − (κ ∘ a) ⊗ (Sᵀ κ) + k ⊗ v,  y = Sᵀ r
//
// Agrees with `sterna_kernels::rwkv`, except for the order of sums.
// Shapes: rows of r, v and out [n_heads, head_dim], those of a sequence as `sequences.wgsl` says; prepared as r:
// (k, w, first ∘ k, 0), or (k, w, κ, κ ∘ a); states as `states.wgsl` says, [n_heads, head_dim / 8, head_dim, 8] from
// `first` on.
// Eight invocations per column, each with ROWS of its rows; workgroups of WG, as many for each sequence.

override SEVENTH: u32 = 0u;
override ROWS: u32 = 8u;

@group(0) @binding(0) var<storage, read> r: array<f32>;
@group(0) @binding(1) var<storage, read> prepared: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> v: array<f32>;
@group(0) @binding(3) var<storage, read> sequences: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    n_sequences: u32,
    n_heads: u32,
    head_dim: u32,
    r_offset: u32,
    r_stride: u32,
    prepared: u32,
    v_offset: u32,
    v_stride: u32,
    out_offset: u32,
    out_stride: u32,
    sequences: u32,
    places: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Where an invocation's i-th row of a column is in the head's matrix.
fn place(i: u32, column: u32, lane: u32) -> u32 {
    let n_lanes = min(LANES, params.head_dim - i * LANES);
    return i * LANES * params.head_dim + column * n_lanes + lane;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let lane = thread % LANES;
    let n_columns = WG / LANES;
    let n_of_head = (params.head_dim + n_columns - 1u) / n_columns;
    let n_groups = n_of_head * params.n_heads;
    let s_of = group_of(group) / n_groups;
    if s_of >= params.n_sequences {
        return;
    }
    let own = sequence_of(s_of);
    let i = group_of(group) % n_groups;
    let head = i / n_of_head * params.head_dim;
    let at_column = i % n_of_head * n_columns + thread / LANES;
    let is_own = at_column < params.head_dim;
    let column = min(at_column, params.head_dim - 1u);
    let matrix = params.first + head * params.head_dim;
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + matrix;
    var s: array<f32, 32>;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        if own.position > 0u && j * LANES + lane < params.head_dim {
            s[j] = states[before + place(j, column, lane)];
        }
    }
    for (var t = own.first_row; t < own.first_row + own.n_rows; t++) {
        let value = v[params.v_offset + t * params.v_stride + head + column];
        let r_at = params.r_offset + t * params.r_stride + head + lane;
        let given = params.prepared + t * params.n_heads * params.head_dim + head + lane;
        var known = 0.0;
        if SEVENTH == 1u {
            for (var j = 0u; j < ROWS; j++) {
                if j * LANES + lane < params.head_dim {
                    known += prepared[given + j * LANES].z * s[j];
                }
            }
            known = segment_sum_f32(at, vec2<f32>(known, 0.0)).x;
        }
        var sum = 0.0;
        for (var j = 0u; j < ROWS; j++) {
            if j * LANES + lane < params.head_dim {
                let p = prepared[given + j * LANES];
                let receptance = r[r_at + j * LANES];
                if SEVENTH == 1u {
                    s[j] = p.y * s[j] - p.w * known + p.x * value;
                    sum += receptance * s[j];
                } else {
                    sum += receptance * (s[j] + p.z * value);
                    s[j] = p.y * s[j] + p.x * value;
                }
            }
        }
        sum = segment_sum_f32(at, vec2<f32>(sum, 0.0)).x;
        if is_own && lane == 0u {
            out[params.out_offset + t * params.out_stride + head + column] = sum;
        }
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + matrix;
    for (var j = 0u; j < ROWS; j++) {
        if j * LANES + lane < params.head_dim {
            states[after + place(j, column, lane)] = s[j];
        }
    }
}
