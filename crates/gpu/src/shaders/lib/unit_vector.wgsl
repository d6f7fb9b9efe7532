
// Units of one vector, of which BLOCK_UNITS share a scale.
struct Unit {
    codes: vec4<u32>,
    d: f32,
}

fn unit_at(row: u32, unit: u32) -> Unit {
    let i = row * params.row_blocks;
    return Unit(codes[i * BLOCK_UNITS + unit], half_at(i + unit / BLOCK_UNITS));
}
