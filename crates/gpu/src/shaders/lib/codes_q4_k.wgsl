// Q4_K: `codes` [n, k / 256] of 144 bytes as files have them: d and dmin as f16, twelve bytes of 6-bit
// scales and minimums, then 32 bytes for every 64 elements, the first 32 in the low nibbles.
// An element is d · scale · code - dmin · min. `scales` isn't used.
const HALVES: bool = false;

const UNIT: u32 = 2u;
const AHEAD: bool = false;
const ZERO: i32 = 0;

struct Unit {
    header: vec4<u32>,
    codes: array<vec4<u32>, 2>,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let block = (row * params.row_blocks + unit / 4u) * 9u;
    let i = block + 1u + unit % 4u * 2u;
    return Unit(codes[block], array<vec4<u32>, 2>(codes[i], codes[i + 1u]));
}

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let shift = vec4<u32>(i * 4u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    return array<vec4<u32>, 2>((unit.codes[0] >> shift) & mask, (unit.codes[1] >> shift) & mask);
}

fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    let header = unit.header;
    let d = unpack2x16float(header.x);
    let shift = (at % 2u * 2u + i) * 8u;
    let a = (header.y >> shift) & 255u;
    let b = (header.z >> shift) & 255u;
    let c = (header.w >> shift) & 255u;
    let late = at % 4u >= 2u;
    let scale = select(a & 63u, (c & 15u) | ((a >> 6u) << 4u), late);
    let least = select(b & 63u, (c >> 4u) | ((b >> 6u) << 4u), late);
    let s = d.x * f32(scale);
    return vec3<f32>(s, s, d.y * f32(least));
}
