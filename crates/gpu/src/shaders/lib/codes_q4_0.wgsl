// Q4_0: `codes` [n, k / 32] of 16 bytes, elements 0 to 15 in the low and 16 to 31 in the high nibbles;
// `scales` [n, k / 32] of f16. An element is worth scale · (code - 8).
const HALVES: bool = false;

fn minus_8(x: vec4<u32>) -> vec4<u32> {
    return (x + vec4<u32>(0x78787878u)) ^ vec4<u32>(0x80808080u);
}

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let w = codes[row * params.row_blocks + run];
    let mask = vec4<u32>(0x0f0f0f0fu);
    return array<vec4<u32>, 2>(minus_8(w & mask), minus_8((w >> vec4<u32>(4u)) & mask));
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let d = half_at(row * params.row_blocks + run);
    return vec3<f32>(d, d, 0.0);
}
