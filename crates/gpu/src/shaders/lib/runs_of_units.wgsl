// Single runs of weights that are stored in units.

// Bytes minus ZERO.
fn signed(codes: vec4<u32>) -> vec4<u32> {
    if ZERO == 0 {
        return codes;
    }
    return (codes + vec4<u32>((128u - u32(ZERO)) * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let unit = unit_of(run);
    let words = unit_codes(unit_at(row, unit), unit, place_in_unit(run));
    return array<vec4<u32>, 2>(signed(words[0]), signed(words[1]));
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let unit = unit_of(run);
    return unit_scales(unit_at(row, unit), unit, place_in_unit(run));
}
