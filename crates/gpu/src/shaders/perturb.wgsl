// logits ← logits / temperature + noise, so that argmax samples by weights exp(logit / temperature)
//
// Gumbel-max sampling: the noise is -ln(-ln(u)) for u uniform over 0 to 1, another u for each seed, position
// and id. Each of these sums is the largest with the probability of its softmax weight.
// Shapes: logits rows of [n] f32, in place; states as `samplers.wgsl` says.
// One logit of a sampler per invocation; workgroups of 256.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;

struct Params {
    sampler: u32,
    n: u32,
    offset: u32,
    stride: u32,
    temperature: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let id = group.x * 256u + thread;
    if id >= params.n {
        return;
    }
    let own = sampler_of(group.y);
    let bits = random(own.seed, own.position, id);
    // -ln(u) by 1 - u, which is as exact for the smallest results, those that win, as for others.
    let rest = (f32(bits) + 0.5) * 2.3283064e-10;
    var exponential = rest + rest * rest * (0.5 + rest * 0.33333334);
    if rest > 0.01 {
        exponential = -log(1.0 - min(rest, 0.99999994));
    }
    let at = params.offset + own.row * params.stride + id;
    logits[at] = logits[at] / params.temperature - log(exponential);
}
