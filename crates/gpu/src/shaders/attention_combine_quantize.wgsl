// attention_combine.wgsl, of one row a sequence, and its results quantized as quantize.wgsl does it: blocks of 256 for
// SCALING 1, of 32 for 2
//
// Agrees with `sterna_kernels::attention` as attention_split_kv.wgsl does, and with the bits of quantize.wgsl for the same floats.
// Shapes: states, sequences, sinks and out as attention_combine.wgsl has them; q and steps of the rows of `out`, which are
// multiples of 256. Heads of 64, 128 or 256 elements.
// A workgroup of 1024 per block of 256 columns of a row: 256 invocations to every fourth state.

override SINKS: u32 = 0u;
override SCALING: u32 = 1u;

@group(0) @binding(0) var<storage, read> states: array<f32>;
@group(0) @binding(1) var<storage, read> sequences: array<u32>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read_write> q: array<u32>;
@group(0) @binding(5) var<storage, read_write> steps: array<vec2<u32>>;

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

// The largest score and the weight of each state, of which a head has room for 72.
var<workgroup> splits: array<vec2<f32>, 288>;
// The partial results of the invocations of a column, and their weight.
var<workgroup> partial: array<vec2<f32>, 1024>;
// The results, and their codes.
var<workgroup> values: array<f32, 256>;
var<workgroup> codes: array<i32, 256>;
// The largest magnitude of each four, and of each 32; the sum of each four codes.
var<workgroup> fours: array<f32, 64>;
var<workgroup> tops: array<f32, 8>;
var<workgroup> sums_of_fours: array<i32, 64>;

// The largest magnitude among those that share a scale with column `c`.
fn top_of(c: u32) -> f32 {
    if SCALING == 2u {
        return tops[c / 32u];
    }
    var top = tops[0];
    for (var i = 1u; i < 8u; i++) {
        top = max(top, tops[i]);
    }
    return top;
}

@compute @workgroup_size(1024)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let d = params.head_dim;
    let c = thread % 256u;
    let part = thread / 256u;
    let n_own = 256u / d;
    let own_head = c / d;
    let head = group.x * n_own + own_head;
    let e = c % d;
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
    var sums: array<f32, 18>;
    for (var i = 0u; i < 18u; i++) {
        let s = i * 4u + part;
        if (s >= begin && s < end) || (s >= params.n_splits && s < n_states) {
            sums[i] = states[(state + s) * (d + 2u) + e];
        }
    }
    if thread < 72u * n_own {
        let s = thread % 72u;
        var own = vec2<f32>(-3.0e38, 0.0);
        if (s >= begin && s < end) || (s >= params.n_splits && s < n_states) {
            let of_head = (group.y * params.n_heads + group.x * n_own + thread / 72u) * n_states;
            let at = (of_head + s) * (d + 2u) + d;
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
        top = max(top, splits[own_head * 72u + i].x);
    }
    var both = vec2<f32>();
    for (var i = 0u; i < 18u; i++) {
        let own = splits[own_head * 72u + i * 4u + part];
        both += vec2<f32>(sums[i], own.y) * exp(own.x - top);
    }
    partial[thread] = both;
    workgroupBarrier();
    let row = sequence.first_row + t;
    if thread < 256u {
        var all = partial[c] + partial[c + 256u] + partial[c + 512u] + partial[c + 768u];
        if SINKS == 1u {
            all.y += exp(sinks[head] - top);
        }
        values[c] = all.x / all.y;
        out[params.out_offset + row * params.out_stride + group.x * 256u + c] = values[c];
    }
    workgroupBarrier();
    if thread < 64u {
        let a = max(abs(values[thread * 4u]), abs(values[thread * 4u + 1u]));
        fours[thread] = max(a, max(abs(values[thread * 4u + 2u]), abs(values[thread * 4u + 3u])));
    }
    workgroupBarrier();
    if thread < 8u {
        var most = fours[thread * 8u];
        for (var i = 1u; i < 8u; i++) {
            most = max(most, fours[thread * 8u + i]);
        }
        tops[thread] = most;
    }
    workgroupBarrier();
    if thread < 256u {
        let scale = divide(1.0, max(top_of(c), 1e-20)) * 127.0;
        codes[c] = i32(round(values[c] * scale));
    }
    workgroupBarrier();
    let block = row * (params.n_heads * d / 256u) + group.x;
    if thread < 64u {
        let at = thread * 4u;
        let four = vec4<i32>(codes[at], codes[at + 1u], codes[at + 2u], codes[at + 3u]);
        let bytes = bitcast<vec4<u32>>(four) & vec4<u32>(255u);
        q[block * 64u + thread] = bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
        sums_of_fours[thread] = four.x + four.y + four.z + four.w;
    }
    workgroupBarrier();
    if thread < 8u {
        var sum = sums_of_fours[thread * 8u];
        for (var i = 1u; i < 8u; i++) {
            sum += sums_of_fours[thread * 8u + i];
        }
        let scale = divide(1.0, max(top_of(thread * 32u), 1e-20)) * 127.0;
        steps[block * 8u + thread] = vec2<u32>(bitcast<u32>(divide(1.0, scale)), bitcast<u32>(sum));
    }
}
