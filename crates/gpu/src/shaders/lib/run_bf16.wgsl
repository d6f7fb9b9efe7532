// BF16 weights: `codes` [n, k padded to 32] of bf16, the upper halves of f32. A run of 32 as floats.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

fn run_floats(row: u32, run: u32) -> array<vec4<f32>, 8> {
    let i = (row * params.row_blocks + run) * 4u;
    var values: array<vec4<f32>, 8>;
    for (var j = 0u; j < 4u; j++) {
        let w = codes[i + j];
        let low = bitcast<vec4<f32>>(w << vec4<u32>(16u));
        let high = bitcast<vec4<f32>>(w & vec4<u32>(0xffff0000u));
        values[2u * j] = vec4<f32>(low.x, high.x, low.y, high.y);
        values[2u * j + 1u] = vec4<f32>(low.z, high.z, low.w, high.w);
    }
    return values;
}
