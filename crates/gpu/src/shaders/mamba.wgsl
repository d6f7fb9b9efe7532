// Channels that remember a vector s, from position to position:
//   s ← exp(a · dt) · s + B · dt · x,  x ← s · C + d · x, with dt = softplus of what is given
//
// Agrees with `sterna_kernels::mamba`.
// Shapes: rows, those of a sequence as `sequences.wgsl` says: of dt and x [inner], of b and c [state_dim]; a
// [inner, state_dim]; d [inner]; states as `states.wgsl` says, [inner, state_dim] from `first` on.
// Eight invocations per channel, each with ROWS of its elements; workgroups of WG, as many for each sequence.

override ROWS: u32 = 2u;
// 1 if state_dim is a multiple of LANES: loads without a branch around them.
override EVEN: u32 = 0u;
// 1 if a sequence may have several rows.
override SEVERAL: u32 = 1u;

@group(0) @binding(0) var<storage, read> dt: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read> c: array<f32>;
@group(0) @binding(3) var<storage, read> a: array<f32>;
@group(0) @binding(4) var<storage, read> d: array<f32>;
@group(0) @binding(5) var<storage, read> sequences: array<u32>;
@group(0) @binding(6) var<storage, read_write> states: array<f32>;
@group(0) @binding(7) var<storage, read_write> x: array<f32>;

struct Params {
    inner: u32,
    n_sequences: u32,
    state_dim: u32,
    dt_offset: u32,
    dt_stride: u32,
    b_offset: u32,
    b_stride: u32,
    c_offset: u32,
    c_stride: u32,
    x_offset: u32,
    x_stride: u32,
    sequences: u32,
    places: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

struct Column {
    channel: u32,
    // The invocation's first element.
    lane: u32,
    // The last position.
    last: u32,
}

// What a position has for a channel.
struct Inputs {
    step: f32,
    x: f32,
    b: array<f32, 32>,
    c: array<f32, 32>,
}

// Those of position t; beyond the last, what changes nothing: a step of no length.
fn inputs_at(column: Column, t: u32) -> Inputs {
    var inputs: Inputs;
    let known = min(t, column.last);
    let step = softplus(dt[params.dt_offset + known * params.dt_stride + column.channel]);
    inputs.step = select(0.0, step, t <= column.last);
    inputs.x = x[params.x_offset + known * params.x_stride + column.channel];
    for (var j = 0u; j < ROWS; j++) {
        inputs.b[j] = 0.0;
        inputs.c[j] = 0.0;
        if EVEN == 1u || j * LANES + column.lane < params.state_dim {
            inputs.b[j] = b[params.b_offset + known * params.b_stride + column.lane + j * LANES];
            inputs.c[j] = c[params.c_offset + known * params.c_stride + column.lane + j * LANES];
        }
    }
    return inputs;
}

// Takes the state past a position; the invocation's part of what it gives.
fn after_position(
    s: ptr<function, array<f32, 32>>,
    rate: ptr<function, array<f32, 32>>,
    inputs: ptr<function, Inputs>,
) -> f32 {
    let step = (*inputs).step;
    let adds = step * (*inputs).x;
    var sum = 0.0;
    for (var j = 0u; j < ROWS; j++) {
        (*s)[j] = exp((*rate)[j] * step) * (*s)[j] + (*inputs).b[j] * adds;
        sum += (*inputs).c[j] * (*s)[j];
    }
    return sum;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let lane = thread % LANES;
    let n_channels = WG / LANES;
    let n_groups = (params.inner + n_channels - 1u) / n_channels;
    let s_of = group_of(group) / n_groups;
    if s_of >= params.n_sequences {
        return;
    }
    let own = sequence_of(s_of);
    let own_channel = group_of(group) % n_groups * n_channels + thread / LANES;
    let is_own = own_channel < params.inner;
    let channel = min(own_channel, params.inner - 1u);
    let stores = is_own && lane == 0u;
    let vector = channel * params.state_dim + lane;
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + params.first + vector;
    var s: array<f32, 32>;
    var rate: array<f32, 32>;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        rate[j] = 0.0;
        if EVEN == 1u || j * LANES + lane < params.state_dim {
            rate[j] = a[vector + j * LANES];
            if own.position > 0u {
                s[j] = states[before + j * LANES];
            }
        }
    }
    let last = own.first_row + max(own.n_rows, 1u) - 1u;
    let column = Column(channel, lane, last);
    let own_d = d[channel];
    // Of several positions, what they have is loaded four ahead of those that are computed with.
    var p = inputs_at(column, own.first_row);
    var q: Inputs;
    var r: Inputs;
    var u: Inputs;
    if SEVERAL == 1u {
        q = inputs_at(column, own.first_row + 1u);
        r = inputs_at(column, own.first_row + 2u);
        u = inputs_at(column, own.first_row + 3u);
    }
    for (var t = own.first_row; t <= last; t += 4u) {
        let y0 = segment_sum_f32(at, vec2<f32>(after_position(&s, &rate, &p), 0.0)).x;
        if stores {
            x[params.x_offset + t * params.x_stride + channel] = y0 + own_d * p.x;
        }
        if SEVERAL == 0u {
            break;
        }
        p = inputs_at(column, t + 4u);
        let y1 = segment_sum_f32(at, vec2<f32>(after_position(&s, &rate, &q), 0.0)).x;
        if stores && t + 1u <= last {
            x[params.x_offset + (t + 1u) * params.x_stride + channel] = y1 + own_d * q.x;
        }
        q = inputs_at(column, t + 5u);
        let y2 = segment_sum_f32(at, vec2<f32>(after_position(&s, &rate, &r), 0.0)).x;
        if stores && t + 2u <= last {
            x[params.x_offset + (t + 2u) * params.x_stride + channel] = y2 + own_d * r.x;
        }
        r = inputs_at(column, t + 6u);
        let y3 = segment_sum_f32(at, vec2<f32>(after_position(&s, &rate, &u), 0.0)).x;
        if stores && t + 3u <= last {
            x[params.x_offset + (t + 3u) * params.x_stride + channel] = y3 + own_d * u.x;
        }
        u = inputs_at(column, t + 7u);
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + params.first + vector;
    for (var j = 0u; j < ROWS; j++) {
        if EVEN == 1u || j * LANES + lane < params.state_dim {
            states[after + j * LANES] = s[j];
        }
    }
}
