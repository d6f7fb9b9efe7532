// Channels that remember a mean of values v, which e^k weighs and which decays by e^(−e^decay); at its own position a
// value counts e^(first + k). out = sigmoid(r) · mean
//
// Agrees with `sterna_kernels::rwkv::wkv4`.
// Shapes: rows of r, k, v and out [inner], those of a sequence as `sequences.wgsl` says; decay and first [inner]; states
// as `states.wgsl` says, [3, inner] from `first_value` on: sums of values and of weights, and the logarithm of what both
// are multiplied with.
// One channel per invocation; workgroups of 64, as many for each sequence.

// What a weight of nothing has as its logarithm.
const NOTHING = -1e38;

@group(0) @binding(0) var<storage, read> r: array<f32>;
@group(0) @binding(1) var<storage, read> k: array<f32>;
@group(0) @binding(2) var<storage, read> v: array<f32>;
@group(0) @binding(3) var<storage, read> decay: array<f32>;
@group(0) @binding(4) var<storage, read> first: array<f32>;
@group(0) @binding(5) var<storage, read> sequences: array<u32>;
@group(0) @binding(6) var<storage, read_write> states: array<f32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;

struct Params {
    inner: u32,
    n_sequences: u32,
    r_offset: u32,
    r_stride: u32,
    k_offset: u32,
    k_stride: u32,
    v_offset: u32,
    v_stride: u32,
    out_offset: u32,
    out_stride: u32,
    sequences: u32,
    places: u32,
    first_value: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let n_groups = (params.inner + 63u) / 64u;
    let at = group.y * groups.x + group.x;
    let s = at / n_groups;
    let i = at % n_groups * 64u + thread;
    if s >= params.n_sequences || i >= params.inner {
        return;
    }
    let sequence = sequence_of(s);
    let states_at = states_of(s) + params.first_value + i;
    var sum = 0.0;
    var weight = 0.0;
    var exponent = 0.0;
    if sequence.position > 0u {
        let before = state_at(states_at, sequence.position);
        sum = states[before];
        weight = states[before + params.inner];
        exponent = states[before + 2u * params.inner];
    }
    // Exponentials that would overflow are bounded.
    let rate = exp(min(decay[i], 80.0));
    for (var t = sequence.first_row; t < sequence.first_row + sequence.n_rows; t++) {
        let key = k[params.k_offset + t * params.k_stride + i];
        let value = v[params.v_offset + t * params.v_stride + i];
        let receptance = r[params.r_offset + t * params.r_stride + i];
        let gate = 1.0 / (1.0 + exp(min(-receptance, 80.0)));
        // This position and those before, both divided by the larger weight.
        let before = select(exponent, NOTHING, weight == 0.0);
        let own = first[i] + key;
        let most = max(before, own);
        let old = exp(before - most);
        let newest = exp(own - most);
        let mean = (old * sum + newest * value) / (old * weight + newest);
        out[params.out_offset + t * params.out_stride + i] = gate * mean;
        exponent = max(before - rate, key);
        let kept = exp(before - rate - exponent);
        let added = exp(key - exponent);
        sum = kept * sum + added * value;
        weight = kept * weight + added;
    }
    let after = state_at(states_at, sequence.position + sequence.n_rows);
    states[after] = sum;
    states[after + params.inner] = weight;
    states[after + 2u * params.inner] = exponent;
}
