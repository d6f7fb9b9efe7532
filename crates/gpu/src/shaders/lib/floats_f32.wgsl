// F32 weights: `codes` [n, k padded to 32] of f32.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// Eight consecutive weights.
fn eight_floats(row: u32, eighth: u32) -> array<vec4<f32>, 2> {
    let i = row * params.row_blocks * 8u + eighth * 2u;
    return array<vec4<f32>, 2>(bitcast<vec4<f32>>(codes[i]), bitcast<vec4<f32>>(codes[i + 1u]));
}
