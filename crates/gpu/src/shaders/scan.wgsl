// Heads that remember a matrix S, from position to position: the delta rule
//   S ← keep · S + k ⊗ adds · (v − keep · Sᵀ k),  out = Sᵀ q
// or the state space
//   S ← keep · S + k ⊗ adds · v,  out = Sᵀ q + d · v
//
// Agrees with `sterna_kernels::delta` and `sterna_kernels::ssm`. Both outputs are taken from the S before, with q · k.
// Shapes: rows, those of a sequence as `sequences.wgsl` says: of x queries and keys [n_key_heads, key_dim] and values
// [n_heads, value_dim] at offsets of their own, of gates [n_heads] of (keep, adds, q · k), of out [n_heads, value_dim];
// d [n_heads]; states as `states.wgsl` says, [n_heads, key_dim / 8, value_dim, 8] from `first` on.
// Eight invocations per column, each with four adjacent ones of every 32 of its rows, VECTORS times; workgroups of WG, as
// many for each sequence.

// 1: the delta rule. 0: a state space.
override DELTA: u32 = 1u;
// 1 if the heads of a key head are n_key_heads apart, 0 if they are adjacent.
override TILED: u32 = 0u;
override VECTORS: u32 = 4u;
// 1 if key_dim is a multiple of 32, so that there are as many rows for all.
override EVEN: u32 = 0u;
// 1 if queries and keys of all positions begin at multiples of four elements.
override ALIGNED: u32 = 0u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> d: array<f32>;
@group(0) @binding(3) var<storage, read> sequences: array<u32>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
// The same memory as x.
@group(0) @binding(6) var<storage, read> x_vectors: array<vec4<f32>>;

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

// Where a row of a column is in the head's matrix.
fn element(row: u32, column: u32) -> u32 {
    let first = row / LANES * LANES;
    let n_lanes = min(LANES, params.key_dim - first);
    return first * params.value_dim + column * n_lanes + row - first;
}

// Of a head's column: where positions have what it reads, and the last of them.
struct Column {
    k: u32,
    q: u32,
    v: u32,
    head: u32,
    last: u32,
    // The invocation's first row.
    row: u32,
}

// What a position has for it.
struct Inputs {
    k: array<vec4<f32>, 8>,
    q: array<vec4<f32>, 8>,
    v: f32,
    gate: vec4<f32>,
}

// Four elements of x from `row` on, of those that begin at `first`; zero from row key_dim on.
fn four(first: u32, row: u32) -> vec4<f32> {
    if ALIGNED == 1u && EVEN == 1u {
        return x_vectors[(first + row) / 4u];
    }
    let end = params.key_dim - 1u;
    let found = vec4<f32>(
        x[first + min(row, end)],
        x[first + min(row + 1u, end)],
        x[first + min(row + 2u, end)],
        x[first + min(row + 3u, end)],
    );
    return select(vec4<f32>(0.0), found, row + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.key_dim));
}

// Those of position t; beyond the last, what changes nothing.
fn inputs_at(column: Column, t: u32) -> Inputs {
    var inputs: Inputs;
    let known = min(t, column.last);
    let begin = known * params.x_stride;
    for (var j = 0u; j < VECTORS; j++) {
        let row = column.row + j * 4u * LANES;
        inputs.k[j] = four(column.k + begin, row);
        inputs.q[j] = four(column.q + begin, row);
    }
    inputs.v = x[column.v + begin];
    let gate = gates[known * params.n_heads + column.head];
    inputs.gate = select(vec4<f32>(1.0, 0.0, 0.0, 0.0), gate, t <= column.last);
    return inputs;
}

// Keys and queries times the state before a position; the invocation's part.
fn products(inputs: ptr<function, Inputs>, s: ptr<function, array<vec4<f32>, 8>>) -> vec2<f32> {
    var sums = vec2<f32>(0.0);
    for (var j = 0u; j < VECTORS; j++) {
        sums += vec2<f32>(dot((*inputs).k[j], (*s)[j]), dot((*inputs).q[j], (*s)[j]));
    }
    return sums;
}

// The state after a position that adds `change` times its key.
fn advance(inputs: ptr<function, Inputs>, change: f32, s: ptr<function, array<vec4<f32>, 8>>) {
    for (var j = 0u; j < VECTORS; j++) {
        (*s)[j] = (*inputs).gate.x * (*s)[j] + (*inputs).k[j] * change;
    }
}

// Takes the state past a position of the delta rule; what it gives.
fn after_delta(at: Invocation, inputs: ptr<function, Inputs>, s: ptr<function, array<vec4<f32>, 8>>) -> f32 {
    let gate = (*inputs).gate;
    let sums = segment_sum_f32(at, products(inputs, s));
    let change = gate.y * ((*inputs).v - gate.x * sums.x);
    advance(inputs, change, s);
    return gate.x * sums.y + change * gate.z;
}

// Takes the state past a position of a state space; the invocation's part of query times the state before.
fn after_ssm(inputs: ptr<function, Inputs>, s: ptr<function, array<vec4<f32>, 8>>) -> f32 {
    let part = products(inputs, s).y;
    advance(inputs, (*inputs).gate.y * (*inputs).v, s);
    return part;
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
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + matrix;
    var s: array<vec4<f32>, 8>;
    for (var j = 0u; j < VECTORS; j++) {
        for (var i = 0u; i < 4u; i++) {
            let row = (4u * j * LANES) + 4u * lane + i;
            s[j][i] = 0.0;
            if own.position > 0u && (EVEN == 1u || row < params.key_dim) {
                s[j][i] = states[before + element(row, column)];
            }
        }
    }
    let last = own.first_row + max(own.n_rows, 1u) - 1u;
    let of_column = Column(
        params.x_offset + params.k + key,
        params.x_offset + params.q + key,
        params.x_offset + params.v + head * params.value_dim + column,
        head,
        last,
        4u * lane,
    );
    let out_at = params.out_offset + head * params.value_dim + column;
    let stores = is_own && lane == 0u;
    // What positions have is loaded four ahead of those that are computed with.
    var a = inputs_at(of_column, own.first_row);
    var b = inputs_at(of_column, own.first_row + 1u);
    var c = inputs_at(of_column, own.first_row + 2u);
    var e = inputs_at(of_column, own.first_row + 3u);
    if DELTA == 1u {
        var y = 0.0;
        for (var t = own.first_row; t <= last; t += 4u) {
            y = after_delta(at, &a, &s);
            if stores {
                out[out_at + t * params.out_stride] = y;
            }
            a = inputs_at(of_column, t + 4u);
            y = after_delta(at, &b, &s);
            if stores && t + 1u <= last {
                out[out_at + (t + 1u) * params.out_stride] = y;
            }
            b = inputs_at(of_column, t + 5u);
            y = after_delta(at, &c, &s);
            if stores && t + 2u <= last {
                out[out_at + (t + 2u) * params.out_stride] = y;
            }
            c = inputs_at(of_column, t + 6u);
            y = after_delta(at, &e, &s);
            if stores && t + 3u <= last {
                out[out_at + (t + 3u) * params.out_stride] = y;
            }
            e = inputs_at(of_column, t + 7u);
        }
    } else {
        let own_d = d[head];
        // Nothing waits for sums: those of eight positions are added at once.
        for (var t = own.first_row; t <= last; t += 8u) {
            let y0 = after_ssm(&a, &s);
            a = inputs_at(of_column, t + 4u);
            let y1 = after_ssm(&b, &s);
            b = inputs_at(of_column, t + 5u);
            let y2 = after_ssm(&c, &s);
            c = inputs_at(of_column, t + 6u);
            let y3 = after_ssm(&e, &s);
            e = inputs_at(of_column, t + 7u);
            let y4 = after_ssm(&a, &s);
            a = inputs_at(of_column, t + 8u);
            let y5 = after_ssm(&b, &s);
            b = inputs_at(of_column, t + 9u);
            let y6 = after_ssm(&c, &s);
            c = inputs_at(of_column, t + 10u);
            let y7 = after_ssm(&e, &s);
            e = inputs_at(of_column, t + 11u);
            let sum = segment_sum_of_eight(at, vec4<f32>(y0, y1, y2, y3), vec4<f32>(y4, y5, y6, y7));
            let row = t + lane;
            if is_own && row <= last {
                let gate = gates[row * params.n_heads + head];
                let v = x[of_column.v + row * params.x_stride];
                out[out_at + row * params.out_stride] = gate.x * sum + gate.y * v * gate.z + own_d * v;
            }
        }
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + matrix;
    for (var j = 0u; j < VECTORS; j++) {
        for (var i = 0u; i < 4u; i++) {
            let row = (4u * j * LANES) + 4u * lane + i;
            if EVEN == 1u || row < params.key_dim {
                states[after + element(row, column)] = s[j][i];
            }
        }
    }
}
