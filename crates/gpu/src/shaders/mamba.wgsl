// Channels that remember a vector s, from position to position:
//   s ← exp(a · dt) · s + B · dt · x,  out = s · C + d · x, with dt = softplus of what is given and x = out before
//
// Agrees with `sterna_kernels::mamba`.
// Shapes: dt and out [n_rows, inner]; b and c [n_rows, state_dim]; a [inner, state_dim]; d [inner]; states
// [SLOTS, state_len], of which [inner, state_dim] from `first` on; position[0] is that of the first row.
// Eight invocations per channel, each with ROWS of its elements; workgroups of WG.

override ROWS: u32 = 2u;
override SLOTS: u32 = 4u;

@group(0) @binding(0) var<storage, read> dt: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read> c: array<f32>;
@group(0) @binding(3) var<storage, read> a: array<f32>;
@group(0) @binding(4) var<storage, read> d: array<f32>;
@group(0) @binding(5) var<storage, read> position: array<u32>;
@group(0) @binding(6) var<storage, read_write> states: array<f32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;

struct Params {
    inner: u32,
    n_rows: u32,
    state_dim: u32,
    dt_offset: u32,
    dt_stride: u32,
    b_offset: u32,
    b_stride: u32,
    c_offset: u32,
    c_stride: u32,
    out_offset: u32,
    out_stride: u32,
    position: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let lane = thread % LANES;
    let own = (group_of(group) * WG + thread) / LANES;
    let is_own = own < params.inner;
    let channel = min(own, params.inner - 1u);
    let now = position[params.position];
    let vector = channel * params.state_dim + lane;
    let before = now % SLOTS * params.state_len + params.first + vector;
    var s: array<f32, 32>;
    var rate: array<f32, 32>;
    for (var j = 0u; j < ROWS; j++) {
        s[j] = 0.0;
        rate[j] = 0.0;
        if j * LANES + lane < params.state_dim {
            rate[j] = a[vector + j * LANES];
            if now > 0u {
                s[j] = states[before + j * LANES];
            }
        }
    }
    for (var t = 0u; t < params.n_rows; t++) {
        let step = softplus(dt[params.dt_offset + t * params.dt_stride + channel]);
        let at_channel = params.out_offset + t * params.out_stride + channel;
        let input = out[at_channel];
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
            out[at_channel] = sum + d[channel] * input;
        }
    }
    if !is_own {
        return;
    }
    let after = (now + params.n_rows) % SLOTS * params.state_len + params.first + vector;
    for (var j = 0u; j < ROWS; j++) {
        if j * LANES + lane < params.state_dim {
            states[after + j * LANES] = s[j];
        }
    }
}
