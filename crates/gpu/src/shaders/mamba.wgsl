// Channels that remember a vector s, from position to position:
//   s ← exp(a · dt) · s + B · dt · x,  x ← s · C + d · x, with dt = softplus of what is given
//
// Agrees with `sterna_kernels::mamba`.
// Shapes: rows, those of a sequence as `sequences.wgsl` says: of dt and x [inner], of b and c [state_dim]; a
// [inner, state_dim]; d [inner]; states as `states.wgsl` says, [inner, state_dim] from `first` on.
// Eight invocations per channel, each with ROWS of its elements; workgroups of WG, as many for each sequence.

override ROWS: u32 = 2u;

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
    let vector = channel * params.state_dim + lane;
    let states_at = states_of(s_of);
    let before = state_at(states_at, own.position) + params.first + vector;
    var s: array<f32, 32>;
    var rate: array<f32, 32>;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        rate[j] = 0.0;
        if j * LANES + lane < params.state_dim {
            rate[j] = a[vector + j * LANES];
            if own.position > 0u {
                s[j] = states[before + j * LANES];
            }
        }
    }
    for (var t = own.first_row; t < own.first_row + own.n_rows; t++) {
        let step = softplus(dt[params.dt_offset + t * params.dt_stride + channel]);
        let at_channel = params.x_offset + t * params.x_stride + channel;
        let input = x[at_channel];
        let b_at = params.b_offset + t * params.b_stride + lane;
        let c_at = params.c_offset + t * params.c_stride + lane;
        var sum = 0.0;
        for (var j = 0u; j < ROWS; j++) {
            if j * LANES + lane < params.state_dim {
                s[j] = exp(rate[j] * step) * s[j] + b[b_at + j * LANES] * (step * input);
                sum += c[c_at + j * LANES] * s[j];
            }
        }
        sum = segment_sum_f32(at, vec2<f32>(sum, 0.0)).x;
        if is_own && lane == 0u {
            x[at_channel] = sum + d[channel] * input;
        }
    }
    if !is_own {
        return;
    }
    let after = state_at(states_at, own.position + own.n_rows) + params.first + vector;
    for (var j = 0u; j < ROWS; j++) {
        if j * LANES + lane < params.state_dim {
            states[after + j * LANES] = s[j];
        }
    }
}
