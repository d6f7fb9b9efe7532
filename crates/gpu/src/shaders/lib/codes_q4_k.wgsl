// Q4_K: `codes` [n, k / 256] of 144 bytes as files have them: d and dmin as f16, twelve bytes of 6-bit
// scales and minimums, then 32 bytes for every 64 elements, the first 32 in the low nibbles.
// An element is worth d · scale · code - dmin · min. `scales` isn't used.
const HALVES: bool = false;

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let block = (row * params.row_blocks + run / 8u) * 9u;
    let i = block + 1u + run % 8u / 2u * 2u;
    let shift = vec4<u32>(run % 2u * 4u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    return array<vec4<u32>, 2>((codes[i] >> shift) & mask, (codes[i + 1u] >> shift) & mask);
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let header = codes[(row * params.row_blocks + run / 8u) * 9u];
    let d = unpack2x16float(header.x);
    let shift = run % 4u * 8u;
    let a = (header.y >> shift) & 255u;
    let b = (header.z >> shift) & 255u;
    let c = (header.w >> shift) & 255u;
    let late = run % 8u >= 4u;
    let scale = select(a & 63u, (c & 15u) | (a >> 6u << 4u), late);
    let least = select(b & 63u, (c >> 4u) | (b >> 6u << 4u), late);
    let s = d.x * f32(scale);
    return vec3<f32>(s, s, d.y * f32(least));
}
