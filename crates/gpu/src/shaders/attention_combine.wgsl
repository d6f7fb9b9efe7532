// out[t, h] ← the combined partial results of the splits of attention_split_kv.wgsl
//
// Agrees with `sterna_kernels::attention` as attention_split_kv.wgsl does.
// Shapes: states [rows, n_heads, n_splits + n_new, HEAD_DIM + 2]; out rows of [n_heads, HEAD_DIM]. There are
// at most 64 splits, and a state of a new position. Rows are those of sequences as `sequences.wgsl` says, in the states
// `n_rows` for each.
// A workgroup of 256 per 32 elements of a head of a row: 32 invocations to every eighth state.

// Whether each head has a score that has no value, in `sinks`.
override SINKS: u32 = 0u;
override HEAD_DIM: u32 = 64u;
// Eighths of the states: how many of them an invocation takes, at most 9.
override TURNS: u32 = 9u;

@group(0) @binding(0) var<storage, read> states: array<f32>;
@group(0) @binding(1) var<storage, read> sequences: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    // The most rows of a sequence.
    n_rows: u32,
    n_heads: u32,
    out_offset: u32,
    out_stride: u32,
    sequences: u32,
    window: u32,
    n_splits: u32,
    // 1 if the row's own position has a state of its own, after those of splits.
    n_new: u32,
    split_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Below all scores.
const LOWEST: f32 = -3.0e38;

// What an eighth of the states comes to, for each element: the sum, its weight, and the largest score.
var<workgroup> partial: array<vec3<f32>, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let pieces = (HEAD_DIM + 31u) / 32u;
    let head = group.x / pieces;
    let e = group.x % pieces * 32u + thread % 32u;
    let n_states = params.n_splits + params.n_new;
    let state = (group.y * params.n_heads + head) * n_states;
    // All loads are issued together, also of states that were not written, which are left out afterwards.
    var sums: array<f32, 9>;
    var weights: array<f32, 9>;
    var tops: array<f32, 9>;
    for (var i = 0u; i < TURNS; i++) {
        let at = (state + min(i * 8u + thread / 32u, n_states - 1u)) * (HEAD_DIM + 2u);
        sums[i] = states[at + min(e, HEAD_DIM - 1u)];
        weights[i] = states[at + HEAD_DIM];
        tops[i] = states[at + HEAD_DIM + 1u];
    }
    var sink = LOWEST;
    if SINKS == 1u {
        sink = sinks[head];
    }
    let sequence = sequence_of(group.y / params.n_rows);
    let t = group.y % params.n_rows;
    if t >= sequence.n_rows {
        return;
    }
    let last = sequence.position + t;
    let first = last + 1u - min(params.window, last + 1u);
    let len = min(last + 1u - params.n_new, sequence.capacity);
    // Splits with visible positions: others were not written.
    let begin = first / params.split_len;
    let len_splits = min((len + params.split_len - 1u) / params.split_len, params.n_splits);
    let end = select(0u, len_splits, first < len);
    var top = LOWEST;
    for (var i = 0u; i < TURNS; i++) {
        let s = i * 8u + thread / 32u;
        let is_there = (s >= begin && s < end) || (s >= params.n_splits && s < n_states);
        sums[i] = select(0.0, sums[i], is_there);
        weights[i] = select(0.0, weights[i], is_there);
        tops[i] = select(LOWEST, tops[i], is_there);
        top = max(top, tops[i]);
    }
    var both = vec2<f32>();
    for (var i = 0u; i < TURNS; i++) {
        both += vec2<f32>(sums[i], weights[i]) * exp(tops[i] - top);
    }
    partial[thread] = vec3<f32>(both, top);
    workgroupBarrier();
    if thread < 32u && e < HEAD_DIM {
        var highest = sink;
        for (var i = 0u; i < 8u; i++) {
            highest = max(highest, partial[thread + i * 32u].z);
        }
        var all = vec2<f32>();
        if SINKS == 1u {
            all.y = exp(sink - highest);
        }
        for (var i = 0u; i < 8u; i++) {
            let eighth = partial[thread + i * 32u];
            all += eighth.xy * exp(eighth.z - highest);
        }
        out[params.out_offset + (sequence.first_row + t) * params.out_stride + head * HEAD_DIM + e] = all.x / all.y;
    }
}
