// out[t, h] ← what the spans of attention.wgsl come to together
//
// Agrees with `sterna_kernels::attention` as attention.wgsl does: spans are merged in order.
// Shapes: states [rows, n_heads, n_spans, head_dim + 2]; out rows of [n_heads, head_dim].
// A workgroup of 64 to a head of a row.

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
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let head = group.x;
    let t = group.y;
    let d = params.head_dim;
    let last = position[params.position] + t;
    let first = last + 1u - min(params.window, last + 1u);
    let states_of_row = (t * params.n_heads + head) * params.n_spans;
    let begin = min(first / 128u, params.n_spans);
    let end = min(last / 128u + 1u, params.n_spans);
    var top = -3.0e38;
    for (var span = begin; span < end; span++) {
        top = max(top, states[(states_of_row + span) * (d + 2u) + d + 1u]);
    }
    var weight = 0.0;
    for (var span = begin; span < end; span++) {
        let at = (states_of_row + span) * (d + 2u) + d;
        weight += states[at] * exp(states[at + 1u] - top);
    }
    for (var e = thread; e < d; e += 64u) {
        var sum = 0.0;
        for (var span = begin; span < end; span++) {
            let at = (states_of_row + span) * (d + 2u);
            sum += states[at + e] * exp(states[at + d + 1u] - top);
        }
        out[params.out_offset + t * params.out_stride + head * d + e] = sum / weight;
    }
}
