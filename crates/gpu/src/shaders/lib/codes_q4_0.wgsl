// Q4_0: `codes` [n, k / 32] of 16 bytes, elements 0 to 15 in the low and 16 to 31 in the high nibbles;
// `scales` [n, k / 32] of f16. An element is scale · (code - 8).
const HALVES: bool = false;

const UNIT: u32 = 1u;
const AHEAD: bool = false;
const BLOCK_UNITS: u32 = 1u;
const ZERO: i32 = 8;

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let mask = vec4<u32>(0x0f0f0f0fu);
    return array<vec4<u32>, 2>(unit.codes & mask, (unit.codes >> vec4<u32>(4u)) & mask);
}
