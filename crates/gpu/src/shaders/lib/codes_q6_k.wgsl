// Q6_K: `codes` [n, k / 256] of 208 bytes: low nibbles (128), upper two bits (64), sixteen int8 scales;
// `scales` [n, k / 256] of f16. An element is d · scale · (code - 32); see docs/formats/k-quants.md for the
// order.
const HALVES: bool = true;

const UNIT: u32 = 2u;
const AHEAD: bool = true;
const ZERO: i32 = 32;

// Elements 0 to 31 and 64 to 95 of half a block share words of low nibbles, and so do the others.
struct Unit {
    low: array<vec4<u32>, 2>,
    // Of all of the half.
    high: array<vec4<u32>, 2>,
    // Of the whole block.
    scales: vec4<u32>,
    d: f32,
}

fn run_in(unit: u32, i: u32) -> u32 {
    return unit / 2u * 4u + unit % 2u + 2u * i;
}

fn unit_of(run: u32) -> u32 {
    return run / 4u * 2u + run % 2u;
}

fn place_in_unit(run: u32) -> u32 {
    return run / 2u % 2u;
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let block = row * params.row_blocks + unit / 4u;
    let low = block * 13u + unit % 4u * 2u;
    let high = block * 13u + 8u + unit % 4u / 2u * 2u;
    return Unit(
        array<vec4<u32>, 2>(codes[low], codes[low + 1u]),
        array<vec4<u32>, 2>(codes[high], codes[high + 1u]),
        codes[block * 13u + 12u],
        half_at(block),
    );
}

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    let low = vec4<u32>(4u * i);
    // Two bits to the left of the low ones.
    let high = vec4<u32>(at % 2u * 2u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    let above = vec4<u32>(0x30303030u);
    var upper = array<vec4<u32>, 2>(unit.high[0] >> high, unit.high[1] >> high);
    if i == 0u {
        upper = array<vec4<u32>, 2>(upper[0] << vec4<u32>(4u), upper[1] << vec4<u32>(4u));
    }
    return array<vec4<u32>, 2>(
        ((unit.low[0] >> low) & mask) | (upper[0] & above),
        ((unit.low[1] >> low) & mask) | (upper[1] & above),
    );
}

fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    let run = run_in(at, i) % 8u;
    let pair = unit.scales[run / 2u] >> (run % 2u * 16u);
    let s = vec2<f32>(vec2<i32>(vec2<u32>(pair << 24u, pair << 16u)) >> vec2<u32>(24u));
    return vec3<f32>(unit.d * s, 0.0);
}
