// Q1_0: `codes` [n, k / 128] of 128 bits, the first lowest; `scales` [n, k / 128] of f16. An element is the
// scale where its bit is 1, minus the scale where it is 0.
const HALVES: bool = false;

// Four bits, the lowest of each byte: 1 becomes 1, 0 becomes -1.
fn signs(bits: vec4<u32>) -> vec4<u32> {
    let spread = ((bits & vec4<u32>(15u)) * vec4<u32>(0x00204081u)) & vec4<u32>(0x01010101u);
    return (spread + spread + vec4<u32>(0x7f7f7f7fu)) ^ vec4<u32>(0x80808080u);
}

const UNIT: u32 = 4u;
const AHEAD: bool = false;
const BLOCK_UNITS: u32 = 1u;
const ZERO: i32 = 0;

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let bits = vec4<u32>(unit.codes[i]) >> vec4<u32>(0u, 4u, 8u, 12u);
    return array<vec4<u32>, 2>(signs(bits), signs(bits >> vec4<u32>(16u)));
}
