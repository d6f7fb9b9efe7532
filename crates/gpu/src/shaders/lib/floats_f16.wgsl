// F16 weights: `codes` [n, k padded to 32] of f16.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// Eight consecutive weights.
fn eight_floats(row: u32, eighth: u32) -> array<vec4<f32>, 2> {
    let w = codes[row * params.row_blocks * 4u + eighth];
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)),
        vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w)),
    );
}
