// Single runs of weights whose units have little more in them.

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    return unit_codes(unit_at(row, run / UNIT), run % UNIT);
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    return unit_scales(unit_at(row, run / UNIT), run / UNIT, run % UNIT);
}
