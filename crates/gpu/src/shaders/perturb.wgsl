// logits ← logits / temperature + noise, so that the largest is a draw by weights exp(logit / temperature)
//
// The noise is Gumbel's: -ln(-ln(u)) for u evenly distributed over 0 to 1, another u for each seed,
// position and id. Of the largest of such sums, each has the chance of its share in the sum of weights.
// Shapes: logits [n] f32 from an offset on, in place; position, an element of its buffer.
// An invocation to a logit; workgroups of 256.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> position: array<u32>;

struct Params {
    n: u32,
    offset: u32,
    position: u32,
    temperature: f32,
    seed_low: u32,
    seed_high: u32,
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
    let seed = vec2<u32>(params.seed_low, params.seed_high);
    let bits = random(seed, position[params.position], id);
    // -ln(u) by 1 - u, which is as exact for the smallest results, those that win, as for others.
    let rest = (f32(bits) + 0.5) * 2.3283064e-10;
    var exponential = rest + rest * rest * (0.5 + rest * 0.33333334);
    if rest > 0.01 {
        exponential = -log(1.0 - min(rest, 0.99999994));
    }
    let at = params.offset + id;
    logits[at] = logits[at] / params.temperature - log(exponential);
}
