// logits ← -∞ where the bit of a token isn't set
//
// Shapes: logits rows of [n] f32, in place; masks [n_states, ceil(n / 32)], those of a sequence in the row of its state,
// a bit for each token, the lowest first; states as `samplers.wgsl` says.
// One logit of a sampler per invocation; workgroups of 256.

@group(0) @binding(0) var<storage, read_write> logits: array<u32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;
@group(0) @binding(2) var<storage, read> masks: array<u32>;

struct Params {
    sampler: u32,
    n: u32,
    offset: u32,
    stride: u32,
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
    let n_words = (params.n + 31u) / 32u;
    let bits = masks[(params.sampler + group.y) * n_words + id / 32u];
    if ((bits >> (id % 32u)) & 1u) == 0u {
        logits[params.offset + sampler_of(group.y).row * params.stride + id] = 0xff800000u;
    }
}
