// Penalises logits of recent tokens, and adds biases
//
// Agrees with the CPU's sampler: bias, then the repeat penalty (divides positive, multiplies negative
// logits), then frequency and presence penalties. Penalties leave finite logits finite, and others alone.
// Shapes: logits [n_vocab] f32; tokens [n_tokens] by position, of which those up to position[0] count, the
// last `window` of them; biases [n_biases] of id and bits of an f32, in any order, each id at most once.
// Biases: one workgroup of 256, and no window. Penalties: one invocation per position of the window.

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
@group(0) @binding(2) var<storage, read> biases: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> position: array<u32>;

struct Params {
    n_vocab: u32,
    offset: u32,
    position: u32,
    // Capacity of `tokens`.
    n_tokens: u32,
    window: u32,
    n_biases: u32,
    repeat: f32,
    frequency: f32,
    presence: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

const MOST: f32 = 0x1.fffffep+127f;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    for (var i = thread; i < params.n_biases; i += 256u) {
        let bias = biases[i];
        if bias.x < params.n_vocab {
            logits[params.offset + bias.x] += bitcast<f32>(bias.y);
        }
    }
    // Positions are clamped to the capacity.
    let end = min(position[params.position], params.n_tokens - 1u) + 1u;
    let begin = end - min(params.window, end);
    let own = begin + group.x * 256u + thread;
    if own >= end || tokens[own] >= params.n_vocab {
        return;
    }
    let id = tokens[own];
    // Each token once, by its last occurrence.
    for (var i = own + 1u; i < end; i++) {
        if tokens[i] == id {
            return;
        }
    }
    var count = 1u;
    for (var i = begin; i < own; i++) {
        count += u32(tokens[i] == id);
    }
    let at = params.offset + id;
    let logit = logits[at];
    if (bitcast<u32>(logit) & 0x7fffffffu) >= 0x7f800000u {
        return;
    }
    var repeated = logit * params.repeat;
    if logit > 0.0 {
        repeated = divide(logit, params.repeat);
    }
    // Clamps keep a device from fusing operations that are rounded one after the other.
    let often = clamp(f32(count) * params.frequency, -MOST, MOST);
    logits[at] = clamp(clamp(repeated, -MOST, MOST) - (often + params.presence), -MOST, MOST);
}
