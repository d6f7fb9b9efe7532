// The sequences that are sampled for: `states` has eight words for each: the position of its last token,
// the token, the row of its logits, three of others, and the seed, its low half first. Those of `Params` begin with number `sampler`.

struct Sampler {
    position: u32,
    row: u32,
    seed: vec2<u32>,
}

fn sampler_of(s: u32) -> Sampler {
    let at = 8u * (params.sampler + s);
    return Sampler(states[at], states[at + 2u], vec2<u32>(states[at + 6u], states[at + 7u]));
}
