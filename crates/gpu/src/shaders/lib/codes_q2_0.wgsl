// Q2_0 and its kin: `codes` [n, k / 32] of 32 two-bit codes, the first lowest; `scales` of f16, one for
// every BLOCK_RUNS runs of 32. An element is worth scale · (code - 1).
const HALVES: bool = false;

// Runs that share a scale: 2 in Q2_0, 4 in Q2_0_G128 and PQ2_0.
override BLOCK_RUNS: u32 = 2u;

// A byte of four codes, each in a byte of its own, minus 1.
fn crumbs(x: vec4<u32>) -> vec4<u32> {
    let b = x & vec4<u32>(255u);
    let spread = b | (b << vec4<u32>(6u)) | (b << vec4<u32>(12u)) | (b << vec4<u32>(18u));
    return ((spread & vec4<u32>(0x03030303u)) + vec4<u32>(0x7f7f7f7fu)) ^ vec4<u32>(0x80808080u);
}

const UNIT: u32 = 2u;
const DEPTH: u32 = 2u;
const ZERO: i32 = 0;

struct Unit {
    codes: vec4<u32>,
    d: f32,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let i = row * params.row_blocks;
    return Unit(codes[i * BLOCK_RUNS / 2u + unit], half_at(i + 2u * unit / BLOCK_RUNS));
}

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let words = select(unit.codes.xy, unit.codes.zw, i == 1u);
    let shifts = vec4<u32>(0u, 8u, 16u, 24u);
    return array<vec4<u32>, 2>(
        crumbs(vec4<u32>(words.x) >> shifts),
        crumbs(vec4<u32>(words.y) >> shifts),
    );
}

fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    return vec3<f32>(unit.d, unit.d, 0.0);
}
