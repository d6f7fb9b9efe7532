// Weights that are blocks of integers, in two planes. Runs are of 32 elements: `run_codes` of the
// `codes_*.wgsl` behind this gives one as eight words of int8, `run_scales` what a unit of its first and
// its second half is worth, and what is subtracted from every element.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// An f16 of the plane of scales.
fn half_at(i: u32) -> f32 {
    let pair = unpack2x16float(scales[i / 2u]);
    return select(pair.x, pair.y, i % 2u == 1u);
}
