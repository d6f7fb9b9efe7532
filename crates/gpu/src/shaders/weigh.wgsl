// Of every 1024 logits the largest, and the sum of the weights exp((logit - largest) / temperature)
//
// Shapes: logits rows of [n] f32; states as `samplers.wgsl` says; sums [samplers, ceil(n / 1024), 2]. NaN and -∞
// have no weight.
// Workgroups of 256, one per 1024 logits of a sampler.

@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;
@group(0) @binding(2) var<storage, read_write> sums: array<vec2<f32>>;

struct Params {
    sampler: u32,
    n: u32,
    offset: u32,
    stride: u32,
    temperature: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

const LEAST: f32 = -0x1.fffffep+127f;

var<workgroup> parts: array<f32, 256>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let first = params.offset + sampler_of(group.y).row * params.stride;
    var own: array<f32, 4>;
    var largest = LEAST;
    for (var i = 0u; i < 4u; i++) {
        let id = group.x * 1024u + i * 256u + thread;
        own[i] = LEAST;
        if id < params.n {
            let logit = logits[first + id];
            let bits = bitcast<u32>(logit);
            if (bits & 0x7fffffffu) < 0x7f800000u {
                own[i] = logit;
            }
        }
        largest = max(largest, own[i]);
    }
    parts[thread] = largest;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if thread < half {
            parts[thread] = max(parts[thread], parts[thread + half]);
        }
        workgroupBarrier();
    }
    let most = parts[0];
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 4u; i++) {
        if own[i] > LEAST {
            sum += exp((own[i] - most) / params.temperature);
        }
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
        sums[group.y * ((params.n + 1023u) / 1024u) + group.x] = vec2<f32>(most, parts[0]);
    }
}
