
// Units with a scale and nothing else.
fn unit_scales(unit: Unit, at: u32, i: u32) -> vec3<f32> {
    return vec3<f32>(unit.d, unit.d, 0.0);
}
