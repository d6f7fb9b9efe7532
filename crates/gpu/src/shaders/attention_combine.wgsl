// out[t, h] ← the combined partial results of the splits of attention_split_kv.wgsl
//
// Agrees with `sterna_kernels::attention` as attention_split_kv.wgsl does.
// Shapes: states [rows, n_heads, n_splits + n_new, head_dim + 2]; out rows of [n_heads, head_dim]. There are
// at most 64 splits, and a state of a new position; there is room for 72, nine iterations of eight. Rows are
// those of sequences as `sequences.wgsl` says, in the states `n_rows` for each.
// A workgroup of 256 per 32 elements of a head of a row: 32 invocations to every eighth state.

// Whether each head has a score that has no value, in `sinks`.
override SINKS: u32 = 0u;

@group(0) @binding(0) var<storage, read> states: array<f32>;
@group(0) @binding(1) var<storage, read> sequences: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    // The most rows of a sequence.
    n_rows: u32,
    n_heads: u32,
    head_dim: u32,
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

// The largest score and the weight of each state.
var<workgroup> splits: array<vec2<f32>, 72>;
// The partial results of 32 invocations, and their weight, for each element.
var<workgroup> partial: array<vec2<f32>, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let d = params.head_dim;
    let pieces = (d + 31u) / 32u;
    let head = group.x / pieces;
    let e = group.x % pieces * 32u + thread % 32u;
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
    let n_states = params.n_splits + params.n_new;
    let state = (group.y * params.n_heads + head) * n_states;
    // All loads are issued together.
    var sums: array<f32, 9>;
    for (var i = 0u; i < 9u; i++) {
        let s = i * 8u + thread / 32u;
        let is_there = (s >= begin && s < end) || (s >= params.n_splits && s < n_states);
        if is_there && e < d {
            sums[i] = states[(state + s) * (d + 2u) + e];
        }
    }
    if thread < 72u {
        var own = vec2<f32>(-3.0e38, 0.0);
        if (thread >= begin && thread < end) || (thread >= params.n_splits && thread < n_states) {
            let at = (state + thread) * (d + 2u) + d;
            own = vec2<f32>(states[at + 1u], states[at]);
        }
        splits[thread] = own;
    }
    workgroupBarrier();
    var top = -3.0e38;
    if SINKS == 1u {
        top = sinks[head];
    }
    for (var i = 0u; i < n_states; i++) {
        top = max(top, splits[i].x);
    }
    var both = vec2<f32>();
    for (var i = 0u; i < 9u; i++) {
        let own = splits[i * 8u + thread / 32u];
        both += vec2<f32>(sums[i], own.y) * exp(own.x - top);
    }
    partial[thread] = both;
    workgroupBarrier();
    if thread < 32u && e < d {
        var all = partial[thread];
        for (var i = 1u; i < 8u; i++) {
            all += partial[thread + i * 32u];
        }
        if SINKS == 1u {
            all.y += exp(sinks[head] - top);
        }
        out[params.out_offset + (sequence.first_row + t) * params.out_stride + head * d + e] = all.x / all.y;
    }
}
