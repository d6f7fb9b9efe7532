// One position of heads that remember a matrix: the convolution of its queries, keys and values, its gates, the scan,
// and what becomes of the output: its norm and gate after the delta rule, its gate after a state space
//
// Agrees with convolve.wgsl, scan_prepare.wgsl, scan.wgsl and, after the delta rule, rms_norm.wgsl, one after the other,
// except for the order of sums.
// Shapes: a row of each sequence: of x queries and keys [n_key_heads, key_dim] and values [n_heads, value_dim] at offsets
// of their own, of gate and out [n_heads, value_dim], of steps and betas [n_heads]; weights, at offsets of their own:
// taps [channels, n_taps], bias [channels], a and dt_bias [n_heads], d [n_heads] or norm [value_dim]; states as
// `states.wgsl` says, [n_taps − 1, channels] from `window` on and [n_heads, key_dim / 8, value_dim, 8] from `first` on.
// Eight invocations per column, each with ROWS of its rows; workgroups of WG, each with TURNS times WG / 8 columns of a
// head: after the delta rule all of them.

// 1: the delta rule. 0: a state space.
override DELTA: u32 = 1u;
// 1 if the heads of a key head are n_key_heads apart, 0 if they are adjacent.
override TILED: u32 = 0u;
override BIAS: u32 = 0u;
override ROWS: u32 = 16u;
// 1 if key_dim is a multiple of LANES: loads without a branch around them.
override EVEN: u32 = 0u;
// Positions that the convolution covers.
override TAPS: u32 = 4u;
override TURNS: u32 = 1u;
// Elements of a query and a key.
override KEYS: u32 = 256u;
// Elements of a value, where it is normalised.
override VALUES: u32 = 1u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read> steps: array<f32>;
@group(0) @binding(3) var<storage, read> betas: array<f32>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;
@group(0) @binding(5) var<storage, read> sequences: array<u32>;
@group(0) @binding(6) var<storage, read_write> states: array<f32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;

struct Params {
    n_heads: u32,
    n_key_heads: u32,
    key_dim: u32,
    value_dim: u32,
    channels: u32,
    n_sequences: u32,
    x_offset: u32,
    x_stride: u32,
    q: u32,
    k: u32,
    v: u32,
    gate_offset: u32,
    gate_stride: u32,
    step_offset: u32,
    step_stride: u32,
    beta_offset: u32,
    beta_stride: u32,
    out_offset: u32,
    out_stride: u32,
    // Where these begin in `weights`; the last is d or norm.
    bias: u32,
    a: u32,
    dt_bias: u32,
    last: u32,
    sequences: u32,
    places: u32,
    window: u32,
    first: u32,
    state_len: u32,
    scale: f32,
    eps: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// The query, then the key, after the convolution.
var<workgroup> keys: array<f32, KEYS>;
// What the head gives.
var<workgroup> given: array<f32, VALUES>;

// Where an invocation's i-th row of a column is in the head's matrix.
fn element(i: u32, column: u32, lane: u32) -> u32 {
    let n_lanes = select(min(LANES, params.key_dim - i * LANES), LANES, EVEN == 1u);
    return i * LANES * params.value_dim + column * n_lanes + lane;
}

// A sequence: its row, whether it begins there, and its states before and after it.
struct Own {
    row: u32,
    is_first: bool,
    before: u32,
    after: u32,
}

// Channel c, j positions after the first that the state has.
fn input(own: Own, j: u32, c: u32) -> f32 {
    if j + 1u >= TAPS {
        return x[params.x_offset + own.row * params.x_stride + c];
    }
    return select(states[own.before + params.window + j * params.channels + c], 0.0, own.is_first);
}

// Channel c after the convolution. Puts what the next position needs into the state, if it `stores`.
fn convolved(own: Own, c: u32, stores: bool) -> f32 {
    let after = own.after + params.window + c;
    var sum = 0.0;
    for (var j = 0u; j < TAPS; j++) {
        let u = input(own, j, c);
        sum += weights[c * TAPS + j] * u;
        // The state before is in another slot.
        if stores && j > 0u {
            states[after + (j - 1u) * params.channels] = u;
        }
    }
    if BIAS == 1u {
        sum += weights[params.bias + c];
    }
    return activate(sum);
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let lane = thread % LANES;
    let n_columns = WG / LANES;
    let n_of_head = (params.value_dim + n_columns * TURNS - 1u) / (n_columns * TURNS);
    let n_groups = n_of_head * params.n_heads;
    let s_of = group_of(group) / n_groups;
    if s_of >= params.n_sequences {
        return;
    }
    let sequence = sequence_of(s_of);
    let states_at = states_of(s_of);
    let own = Own(
        sequence.first_row,
        sequence.position == 0u,
        state_at(states_at, sequence.position),
        state_at(states_at, sequence.position + 1u),
    );
    let i = group_of(group) % n_groups;
    let head = i / n_of_head;
    let block = i % n_of_head;
    let n_of_key = params.n_heads / params.n_key_heads;
    let key_head = select(head / n_of_key, head % params.n_key_heads, TILED == 1u);
    let place_of_head = select(head % n_of_key, head / params.n_key_heads, TILED == 1u);
    let matrix = params.first + head * params.key_dim * params.value_dim;
    let before = own.before + matrix;
    let after = own.after + matrix;
    let out_at = params.out_offset + own.row * params.out_stride + head * params.value_dim;
    let gate_at = params.gate_offset + own.row * params.gate_stride + head * params.value_dim;
    let step_at = params.step_offset + own.row * params.step_stride + head;
    let step = softplus(steps[step_at] + weights[params.dt_bias + head]);
    let keep = exp(weights[params.a + head] * step);
    var adds = step;
    if DELTA == 1u {
        adds = 1.0 / (1.0 + exp(-betas[params.beta_offset + own.row * params.beta_stride + head]));
    }
    var s: array<f32, 32>;
    for (var turn = 0u; turn < TURNS; turn++) {
        let at_column = (block * TURNS + turn) * n_columns + thread / LANES;
        let is_own = at_column < params.value_dim;
        let column = min(at_column, params.value_dim - 1u);
        // Loads are issued before anything waits.
        for (var j = 0u; j < ROWS; j++) {
            s[j] = 0.0;
            if EVEN == 1u || j * LANES + lane < params.key_dim {
                s[j] = select(states[before + element(j, column, lane)], 0.0, own.is_first);
            }
        }
        let v = convolved(own, params.v + head * params.value_dim + column, is_own && lane == 0u);
        if turn == 0u {
            let stores = block == 0u && place_of_head == 0u;
            for (var e = thread; e < 2u * params.key_dim; e += WG) {
                let is_key = e >= params.key_dim;
                let c = select(params.q + e, params.k + e - params.key_dim, is_key);
                keys[e] = convolved(own, c + key_head * params.key_dim, stores);
            }
            workgroupBarrier();
        }
        // Of key and query with the column, with one another, and with themselves.
        var sums = vec2<f32>(0.0);
        var product = vec2<f32>(0.0);
        var squares = vec2<f32>(0.0);
        for (var j = 0u; j < ROWS; j++) {
            if EVEN == 1u || j * LANES + lane < params.key_dim {
                let q = keys[j * LANES + lane];
                let k = keys[params.key_dim + j * LANES + lane];
                sums += vec2<f32>(k, q) * s[j];
                product.x += k * q;
                squares += vec2<f32>(k * k, q * q);
            }
        }
        sums = segment_sum_f32(at, sums);
        product = segment_sum_f32(at, product);
        var by = vec2<f32>(1.0);
        if DELTA == 1u {
            by = vec2<f32>(1.0, params.scale) / sqrt(segment_sum_f32(at, squares) + vec2<f32>(1e-6));
        }
        sums *= by;
        var change = adds * v;
        if DELTA == 1u {
            change = adds * (v - keep * sums.x);
        }
        for (var j = 0u; j < ROWS; j++) {
            if is_own && (EVEN == 1u || j * LANES + lane < params.key_dim) {
                let k = by.x * keys[params.key_dim + j * LANES + lane];
                states[after + element(j, column, lane)] = keep * s[j] + k * change;
            }
        }
        if is_own && lane == 0u {
            let y = keep * sums.y + change * product.x * by.x * by.y;
            if DELTA == 1u {
                given[column] = y;
            } else {
                let sum = y + weights[params.last + head] * v;
                out[out_at + column] = sum * activate(gate[gate_at + column]);
            }
        }
    }
    if DELTA == 1u {
        workgroupBarrier();
        var squares = 0.0;
        for (var e = thread; e < params.value_dim; e += WG) {
            squares += given[e] * given[e];
        }
        let mean = workgroup_sum_f32(at, squares) / f32(params.value_dim);
        let inverse = 1.0 / sqrt(mean + params.eps);
        for (var e = thread; e < params.value_dim; e += WG) {
            let normed = given[e] * inverse * weights[params.last + e];
            out[out_at + e] = normed * activate(gate[gate_at + e]);
        }
    }
}
