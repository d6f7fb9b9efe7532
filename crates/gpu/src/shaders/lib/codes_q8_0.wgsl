// Q8_0: `codes` [n, k / 32] of 32 int8, `scales` [n, k / 32] of f16.
const HALVES: bool = false;

const UNIT: u32 = 1u;
const AHEAD: bool = false;
const ZERO: i32 = 0;

struct Unit {
    codes: array<vec4<u32>, 2>,
    d: f32,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let i = row * params.row_blocks + unit;
    return Unit(array<vec4<u32>, 2>(codes[2u * i], codes[2u * i + 1u]), half_at(i));
}

fn unit_codes(unit: Unit, at: u32, i: u32) -> array<vec4<u32>, 2> {
    return unit.codes;
}
