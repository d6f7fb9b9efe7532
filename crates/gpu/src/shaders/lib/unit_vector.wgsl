
// A block of one vector.
struct Unit {
    codes: vec4<u32>,
    d: f32,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let i = row * params.row_blocks + unit;
    return Unit(codes[i], half_at(i));
}

fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    return vec3<f32>(unit.d, unit.d, 0.0);
}
