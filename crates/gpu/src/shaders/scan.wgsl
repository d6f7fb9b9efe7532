// Heads that remember a matrix S, from position to position: the delta rule
//   S ← keep · S + k ⊗ adds · (v − keep · Sᵀ k),  out = Sᵀ q
// or the state space
//   S ← keep · S + k ⊗ adds · v,  out = Sᵀ q + d · v
//
// Agrees with `sterna_kernels::delta` and `sterna_kernels::ssm`. Both outputs are taken from the S before, with q · k.
// Shapes: rows, those of a sequence as `sequences.wgsl` says: of x queries and keys [n_key_heads, key_dim] and values
// [n_heads, value_dim] at offsets of their own, of gates [n_heads] of (keep, adds, q · k), of out [n_heads, value_dim];
// d [n_heads]; states as `states.wgsl` says, [n_heads, key_dim / 8, value_dim, 8] from `first` on.
// Eight invocations per column, each with ROWS of its rows; workgroups of WG, as many for each sequence.

// 1: the delta rule. 0: a state space.
override DELTA: u32 = 1u;
// 1 if the heads of a key head are n_key_heads apart, 0 if they are adjacent.
override TILED: u32 = 0u;
override ROWS: u32 = 16u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> d: array<f32>;
@group(0) @binding(3) var<storage, read> sequences: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    n_sequences: u32,
    n_heads: u32,
    n_key_heads: u32,
    key_dim: u32,
    value_dim: u32,
    x_offset: u32,
    x_stride: u32,
    q: u32,
    k: u32,
    v: u32,
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
    let n_lanes = min(LANES, params.key_dim - i * LANES);
    return i * LANES * params.value_dim + column * n_lanes + lane;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let lane = thread % LANES;
    let n_columns = WG / LANES;
    let n_of_head = (params.value_dim + n_columns - 1u) / n_columns;
    let n_groups = n_of_head * params.n_heads;
    let s_of = group_of(group) / n_groups;
    if s_of >= params.n_sequences {
        return;
    }
    let own = sequence_of(s_of);
    let i = group_of(group) % n_groups;
    let head = i / n_of_head;
    let at_column = i % n_of_head * n_columns + thread / LANES;
    let is_own = at_column < params.value_dim;
    let column = min(at_column, params.value_dim - 1u);
    let n_of_key = params.n_heads / params.n_key_heads;
    let key = select(head / n_of_key, head % params.n_key_heads, TILED == 1u) * params.key_dim;
    let matrix = params.first + head * params.key_dim * params.value_dim;
    var s: array<f32, 32>;
    var k: array<f32, 32>;
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + matrix;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        if own.position > 0u && j * LANES + lane < params.key_dim {
            s[j] = states[before + place(j, column, lane)];
        }
    }
    for (var t = own.first_row; t < own.first_row + own.n_rows; t++) {
        let row = params.x_offset + t * params.x_stride;
        let gate = gates[t * params.n_heads + head];
        let v = x[row + params.v + head * params.value_dim + column];
        let k_at = row + params.k + key + lane;
        let q_at = row + params.q + key + lane;
        var sums = vec2<f32>(0.0);
        for (var j = 0u; j < ROWS; j++) {
            k[j] = 0.0;
            if j * LANES + lane < params.key_dim {
                k[j] = x[k_at + j * LANES];
                sums += vec2<f32>(k[j], x[q_at + j * LANES]) * s[j];
            }
        }
        sums = segment_sum_f32(at, sums);
        var change = gate.y * v;
        if DELTA == 1u {
            change = gate.y * (v - gate.x * sums.x);
        }
        for (var j = 0u; j < ROWS; j++) {
            s[j] = gate.x * s[j] + k[j] * change;
        }
        if is_own && lane == 0u {
            var y = gate.x * sums.y + change * gate.z;
            if DELTA == 0u {
                y += d[head] * v;
            }
            out[params.out_offset + t * params.out_stride + head * params.value_dim + column] = y;
        }
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + matrix;
    for (var j = 0u; j < ROWS; j++) {
        if j * LANES + lane < params.key_dim {
            states[after + place(j, column, lane)] = s[j];
        }
    }
}
