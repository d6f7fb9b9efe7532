// out[t, h] ← what the spans of attention_spans.wgsl come to together
//
// Agrees with `sterna_kernels::attention` as attention_spans.wgsl does.
// Shapes: states [rows, n_heads, n_spans, head_dim + 2]; out rows of [n_heads, head_dim]. There are at
// most 64 spans.
// A workgroup of 256 to 32 elements of a head of a row: 32 invocations to every eighth span.

@group(0) @binding(0) var<storage, read> states: array<f32>;
@group(0) @binding(1) var<storage, read> position: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    head_dim: u32,
    out_offset: u32,
    out_stride: u32,
    position: u32,
    window: u32,
    n_spans: u32,
    span_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// The largest score and the weight of each span.
var<workgroup> spans: array<vec2<f32>, 64>;
// What the spans of 32 invocations come to, and their weight, for each element.
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
    let t = group.y;
    let last = position[params.position] + t;
    let first = last + 1u - min(params.window, last + 1u);
    // Those of others were not written.
    let begin = min(first / params.span_len, params.n_spans);
    let end = min(last / params.span_len + 1u, params.n_spans);
    let state = (t * params.n_heads + head) * params.n_spans;
    // All that is read is asked for together.
    var sums: array<f32, 8>;
    for (var i = 0u; i < 8u; i++) {
        let span = i * 8u + thread / 32u;
        if span >= begin && span < end && e < d {
            sums[i] = states[(state + span) * (d + 2u) + e];
        }
    }
    if thread < 64u {
        var own = vec2<f32>(-3.0e38, 0.0);
        if thread >= begin && thread < end {
            let at = (state + thread) * (d + 2u) + d;
            own = vec2<f32>(states[at + 1u], states[at]);
        }
        spans[thread] = own;
    }
    workgroupBarrier();
    var top = -3.0e38;
    for (var i = begin; i < end; i++) {
        top = max(top, spans[i].x);
    }
    var both = vec2<f32>();
    for (var i = 0u; i < 8u; i++) {
        let own = spans[i * 8u + thread / 32u];
        both += vec2<f32>(sums[i], own.y) * exp(own.x - top);
    }
    partial[thread] = both;
    workgroupBarrier();
    if thread < 32u && e < d {
        var all = partial[thread];
        for (var i = 1u; i < 8u; i++) {
            all += partial[thread + i * 32u];
        }
        out[params.out_offset + t * params.out_stride + head * d + e] = all.x / all.y;
    }
}
