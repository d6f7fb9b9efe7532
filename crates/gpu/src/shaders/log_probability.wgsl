// The logit of the token that was drawn, and the logarithm of the sum of exp(logit - largest) over all tokens
//
// Shapes: logits rows of [n] f32, as they were before any was changed; states as `samplers.wgsl` says, whose tokens are
// those drawn; sums [samplers, n_sums] of weights of all tokens at temperature 1, as `weigh.wgsl` has them;
// out [samplers, 2].
// A workgroup of 256 per sampler.

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;
@group(0) @binding(2) var<storage, read> weighed: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec2<f32>>;

struct Params {
    sampler: u32,
    n: u32,
    offset: u32,
    stride: u32,
    n_sums: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

const LEAST: f32 = -0x1.fffffep+127f;

var<workgroup> parts: array<f32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let first = group.x * params.n_sums;
    var largest = LEAST;
    for (var i = thread; i < params.n_sums; i += 256u) {
        largest = max(largest, weighed[first + i].x);
    }
    parts[thread] = largest;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            parts[thread] = max(parts[thread], parts[thread + half]);
        }
        workgroupBarrier();
    }
    largest = parts[0];
    workgroupBarrier();
    var sum = 0.0;
    for (var i = thread; i < params.n_sums; i += 256u) {
        let part = weighed[first + i];
        sum += part.y * exp(part.x - largest);
    }
    parts[thread] = sum;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            parts[thread] += parts[thread + half];
        }
        workgroupBarrier();
    }
    if thread == 0u {
        let id = min(states[8u * (params.sampler + group.x) + 1u], params.n - 1u);
        let logit = logits[params.offset + sampler_of(group.x).row * params.stride + id];
        out[group.x] = vec2<f32>(logit, log(parts[0]));
    }
}
