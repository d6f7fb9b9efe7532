// Q2_0 and variants: `codes` [n, k / 32] of 32 two-bit codes, the first lowest; `scales` of f16, one for
// every 2 * BLOCK_UNITS runs of 32. An element is scale · (code - 1).
const HALVES: bool = false;

// 1 in Q2_0, 2 in Q2_0_G128 and PQ2_0.
override BLOCK_UNITS: u32 = 1u;

// A byte of four codes, each in a byte of its own.
fn crumbs(x: vec4<u32>) -> vec4<u32> {
    let b = x & vec4<u32>(255u);
    let spread = b | (b << vec4<u32>(6u)) | (b << vec4<u32>(12u)) | (b << vec4<u32>(18u));
    return spread & vec4<u32>(0x03030303u);
}

const UNIT: u32 = 2u;
const AHEAD: bool = false;
const ZERO: i32 = 1;

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let words = select(unit.codes.xy, unit.codes.zw, i == 1u);
    let shifts = vec4<u32>(0u, 8u, 16u, 24u);
    return array<vec4<u32>, 2>(
        crumbs(vec4<u32>(words.x) >> shifts),
        crumbs(vec4<u32>(words.y) >> shifts),
    );
}
