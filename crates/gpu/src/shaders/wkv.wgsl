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
// 1 if head_dim is a multiple of LANES: loads without a branch around them.
override EVEN: u32 = 0u;
// 1 if a sequence may have several rows.
override SEVERAL: u32 = 1u;

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
fn element(i: u32, column: u32, lane: u32) -> u32 {
    let n_lanes = min(LANES, params.head_dim - i * LANES);
    return i * LANES * params.head_dim + column * n_lanes + lane;
}

struct Column {
    // Where the invocation's first row is in rows of r and what is prepared, and the column in those of v.
    row: u32,
    v: u32,
    lane: u32,
    // The last position.
    last: u32,
}

// What a position has for a column.
struct Inputs {
    prepared: array<vec4<f32>, 32>,
    r: array<f32, 32>,
    v: f32,
}

// Those of position t; beyond the last, what changes nothing: decays of one, and keys of zero.
fn inputs_at(column: Column, t: u32) -> Inputs {
    var inputs: Inputs;
    let known = min(t, column.last);
    let is_there = t <= column.last;
    let given = params.prepared + known * params.n_heads * params.head_dim + column.row;
    for (var j = 0u; j < ROWS; j++) {
        inputs.prepared[j] = vec4<f32>(0.0);
        inputs.r[j] = 0.0;
        if EVEN == 1u || j * LANES + column.lane < params.head_dim {
            inputs.prepared[j] = select(vec4<f32>(0.0, 1.0, 0.0, 0.0), prepared[given + j * LANES], is_there);
            inputs.r[j] = r[params.r_offset + known * params.r_stride + column.row + j * LANES];
        }
    }
    inputs.v = v[params.v_offset + known * params.v_stride + column.v];
    return inputs;
}

// What the state has in the direction that the seventh generation forgets.
fn forgotten(at: Invocation, s: ptr<function, array<f32, 32>>, inputs: ptr<function, Inputs>) -> f32 {
    if SEVENTH == 0u {
        return 0.0;
    }
    var sum = 0.0;
    for (var j = 0u; j < ROWS; j++) {
        sum += (*inputs).prepared[j].z * (*s)[j];
    }
    return segment_sum_f32(at, vec2<f32>(sum, 0.0)).x;
}

// Takes the state past a position; the invocation's part of what it gives.
fn after_position(s: ptr<function, array<f32, 32>>, inputs: ptr<function, Inputs>, known: f32) -> f32 {
    var sum = 0.0;
    for (var j = 0u; j < ROWS; j++) {
        let p = (*inputs).prepared[j];
        if SEVENTH == 1u {
            (*s)[j] = p.y * (*s)[j] - p.w * known + p.x * (*inputs).v;
            sum += (*inputs).r[j] * (*s)[j];
        } else {
            sum += (*inputs).r[j] * ((*s)[j] + p.z * (*inputs).v);
            (*s)[j] = p.y * (*s)[j] + p.x * (*inputs).v;
        }
    }
    return sum;
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
    let stores = is_own && lane == 0u;
    let matrix = params.first + head * params.head_dim;
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + matrix;
    var s: array<f32, 32>;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        if own.position > 0u && (EVEN == 1u || j * LANES + lane < params.head_dim) {
            s[j] = states[before + element(j, column, lane)];
        }
    }
    let last = own.first_row + max(own.n_rows, 1u) - 1u;
    let of_column = Column(head + lane, head + column, lane, last);
    // Of several positions, what they have is loaded two ahead of those that are computed with.
    var a = inputs_at(of_column, own.first_row);
    var b: Inputs;
    if SEVERAL == 1u {
        b = inputs_at(of_column, own.first_row + 1u);
    }
    for (var t = own.first_row; t <= last; t += 2u) {
        var known = forgotten(at, &s, &a);
        var y = segment_sum_f32(at, vec2<f32>(after_position(&s, &a, known), 0.0)).x;
        if stores {
            out[params.out_offset + t * params.out_stride + head + column] = y;
        }
        if SEVERAL == 0u {
            break;
        }
        a = inputs_at(of_column, t + 2u);
        known = forgotten(at, &s, &b);
        y = segment_sum_f32(at, vec2<f32>(after_position(&s, &b, known), 0.0)).x;
        if stores && t + 1u <= last {
            out[params.out_offset + (t + 1u) * params.out_stride + head + column] = y;
        }
        b = inputs_at(of_column, t + 3u);
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + matrix;
    for (var j = 0u; j < ROWS; j++) {
        if EVEN == 1u || j * LANES + lane < params.head_dim {
            states[after + element(j, column, lane)] = s[j];
        }
    }
}
