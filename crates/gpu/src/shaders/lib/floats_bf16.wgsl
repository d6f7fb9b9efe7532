// BF16 weights: `codes` [n, k padded to 32] of bf16, the upper halves of f32.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

// Eight consecutive weights.
fn eight_floats(row: u32, eighth: u32) -> array<vec4<f32>, 2> {
    let w = codes[row * params.row_blocks * 4u + eighth];
    let low = bitcast<vec4<f32>>(w << vec4<u32>(16u));
    let high = bitcast<vec4<f32>>(w & vec4<u32>(0xffff0000u));
    return array<vec4<f32>, 2>(
        vec4<f32>(low.x, high.x, low.y, high.y),
        vec4<f32>(low.z, high.z, low.w, high.w),
    );
}
