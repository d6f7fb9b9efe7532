// Q8_0: `codes` [n, k / 32] of 32 int8, `scales` [n, k / 32] of f16.
const HALVES: bool = false;

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let i = (row * params.row_blocks + run) * 2u;
    return array<vec4<u32>, 2>(codes[i], codes[i + 1u]);
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let d = half_at(row * params.row_blocks + run);
    return vec3<f32>(d, d, 0.0);
}
