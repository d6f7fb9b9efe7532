// Q6_K: `codes` [n, k / 256] of 208 bytes: low nibbles (128), upper two bits (64), sixteen int8 scales;
// `scales` [n, k / 256] of f16. An element is worth d · scale · (code - 32); see docs/formats/k-quants.md
// for the order.
const HALVES: bool = true;

const UNIT: u32 = 4u;
const DEPTH: u32 = 1u;

// Half a block: elements 0 to 31 and 64 to 95 share words of low nibbles, and so do the others; all share
// those of upper bits.
struct Unit {
    low: array<vec4<u32>, 4>,
    high: array<vec4<u32>, 2>,
    // Of the whole block.
    scales: vec4<u32>,
    d: f32,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let block = row * params.row_blocks + unit / 2u;
    let low = block * 13u + unit % 2u * 4u;
    let high = block * 13u + 8u + unit % 2u * 2u;
    return Unit(
        array<vec4<u32>, 4>(codes[low], codes[low + 1u], codes[low + 2u], codes[low + 3u]),
        array<vec4<u32>, 2>(codes[high], codes[high + 1u]),
        codes[block * 13u + 12u],
        half_at(block),
    );
}

fn unit_codes(unit: Unit, i: u32) -> array<vec4<u32>, 2> {
    let low = i % 2u * 2u;
    return array<vec4<u32>, 2>(
        joined(unit.low[low], unit.high[0], i),
        joined(unit.low[low + 1u], unit.high[1], i),
    );
}

fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    return halves(unit.scales, unit.d, at % 2u * 4u + i);
}

// Four words of quarter `quarter` of half a block.
fn joined(low: vec4<u32>, high: vec4<u32>, quarter: u32) -> vec4<u32> {
    let bits = (low >> vec4<u32>(quarter / 2u * 4u)) & vec4<u32>(0x0f0f0f0fu);
    let upper = ((high >> vec4<u32>(quarter * 2u)) & vec4<u32>(0x03030303u)) << vec4<u32>(4u);
    // Minus 32, byte by byte.
    return ((bits | upper) + vec4<u32>(0x60606060u)) ^ vec4<u32>(0x80808080u);
}

// Scales of the halves of run `run` of a block.
fn halves(scales: vec4<u32>, d: f32, run: u32) -> vec3<f32> {
    let pair = scales[run / 2u] >> (run % 2u * 16u);
    let s = vec2<f32>(vec2<i32>(vec2<u32>(pair << 24u, pair << 16u)) >> vec2<u32>(24u));
    return vec3<f32>(d * s, 0.0);
}

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let block = (row * params.row_blocks + run / 8u) * 13u;
    let half = run % 8u / 4u;
    let quarter = run % 4u;
    let low = block + half * 4u + quarter % 2u * 2u;
    let high = block + 8u + half * 2u;
    return array<vec4<u32>, 2>(
        joined(codes[low], codes[high], quarter),
        joined(codes[low + 1u], codes[high + 1u], quarter),
    );
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let block = row * params.row_blocks + run / 8u;
    return halves(codes[block * 13u + 12u], half_at(block), run % 8u);
}
