// Weights that are blocks of integers, in two planes. Runs are of 32 elements. Of the `codes_*.wgsl` that
// follows, `run_codes` gives a run as eight words of int8, `run_scales` the scales of its first and of its
// second half, and what is subtracted from every element.
// UNIT runs share their words: number i of unit u is run `run_in(u, i)`, and run r is in `unit_of(r)` at
// index `place_in_unit(r)`. For kernels that take all of them, `unit_at` loads the words, `unit_codes` gives
// codes that are ZERO too large, and `unit_scales` scales. With AHEAD such a kernel loads a unit in advance
// even for a single row of activations that is there.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// An f16 of the plane of scales.
fn half_at(i: u32) -> f32 {
    let pair = unpack2x16float(scales[i / 2u]);
    return select(pair.x, pair.y, i % 2u == 1u);
}
