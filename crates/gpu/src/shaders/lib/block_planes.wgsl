// Weights that are blocks of integers, in two planes. Runs are of 32 elements. Of the `codes_*.wgsl` behind
// this, `run_codes` gives one as eight words of int8, `run_scales` what 1 is worth in its first and in its
// second half, and what is subtracted from every element.
// UNIT runs in a row lie in the same words, or next to one another. `unit_at` asks for them, and
// `unit_codes` and `unit_scales` give those of run i of a unit: for kernels that take all of them.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// An f16 of the plane of scales.
fn half_at(i: u32) -> f32 {
    let pair = unpack2x16float(scales[i / 2u]);
    return select(pair.x, pair.y, i % 2u == 1u);
}
