// Draws the next token from the top candidates, and advances the sequence by it
//
// Agrees with the CPU's sampler in which tokens may be drawn and with what probabilities, except for weights
// at the very edge of top-p and min-p; its random numbers are its own.
// Where it can't decide, the sequence stays where it is: if the best logit is not finite, or if more tokens
// than the candidates might be kept.
// Shapes: best [samplers, k] of value and id, best first, k at most 256; sums [samplers, n_sums] of weights of all
// tokens, as `weigh.wgsl` has them; states as `samplers.wgsl` says: position and token become those of the next
// step; of a single sampler tokens by position, `capacity` of them.
// A workgroup of 256 per sampler, one invocation per candidate.

@group(0) @binding(0) var<storage, read> best: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read> weighed: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> states: array<u32>;
@group(0) @binding(3) var<storage, read_write> tokens: array<u32>;

struct Params {
    sampler: u32,
    k: u32,
    capacity: u32,
    // 1 if tokens beyond the candidates may be kept.
    of_all: u32,
    n_sums: u32,
    // 0 is greedy.
    temperature: f32,
    top_p: f32,
    min_p: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Weights, then their prefix sums.
var<workgroup> sums: array<f32, 256>;
var<workgroup> others: array<f32, 256>;
var<workgroup> chosen: atomic<u32>;
var<workgroup> kept: atomic<u32>;
// The weight of the last candidate.
var<workgroup> least: f32;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let own = sampler_of(group.x);
    let position = own.position;
    let first = group.x * params.k;
    let top = bitcast<f32>(best[first].x);
    var weight = 0.0;
    if thread < params.k && best[first + thread].y != 0xffffffffu {
        weight = exp((bitcast<f32>(best[first + thread].x) - top) / params.temperature);
    }
    // Tokens less probable than 2^-36 of the best are never drawn.
    weight = select(0.0, weight, weight >= 1.4551915e-11);
    sums[thread] = weight;
    var all = 0.0;
    for (var i = thread; i < params.n_sums; i += 256u) {
        let part = weighed[group.x * params.n_sums + i];
        all += part.y * exp((part.x - top) / params.temperature);
    }
    others[thread] = all;
    if thread + 1u == params.k {
        least = weight;
    }
    if thread == 0u {
        atomicStore(&chosen, 255u);
        atomicStore(&kept, 0u);
    }
    workgroupBarrier();
    for (var reach = 1u; reach < 256u; reach *= 2u) {
        var before = vec2<f32>(0.0);
        if thread >= reach {
            before = vec2<f32>(sums[thread - reach], others[thread - reach]);
        }
        workgroupBarrier();
        sums[thread] += before.x;
        others[thread] += before.y;
        workgroupBarrier();
    }
    // The fewest that reach top-p together: those whose predecessors add up to less.
    let whole = select(sums[255], others[255], params.n_sums > 0u);
    let target_sum = params.top_p * whole;
    let before = sums[thread] - weight;
    if weight > 0.0 && weight >= params.min_p && (thread == 0u || params.top_p >= 1.0 || before < target_sum) {
        atomicMax(&kept, thread);
    }
    workgroupBarrier();
    // Weights decrease, so the kept tokens are a prefix.
    let total = sums[atomicLoad(&kept)];
    let point = f32(random(own.seed, position, 0xffffffffu) >> 8u) * 5.9604645e-8 * total;
    if weight > 0.0 && sums[thread] > point {
        atomicMin(&chosen, thread);
    }
    workgroupBarrier();
    if thread == 0u {
        let greedy = params.temperature == 0.0;
        let reached = params.n_sums > 0u && target_sum <= sums[255];
        let within = greedy || params.of_all == 0u || least == 0.0 || least < params.min_p || reached;
        let is_number = (best[first].x & 0x7fffffffu) < 0x7f800000u;
        if within && is_number {
            let id = best[first + select(min(atomicLoad(&chosen), atomicLoad(&kept)), 0u, greedy)].y;
            let at = 8u * (params.sampler + group.x);
            states[at] = position + 1u;
            states[at + 1u] = id;
            if position + 1u < params.capacity {
                tokens[position + 1u] = id;
            }
        }
    }
}
