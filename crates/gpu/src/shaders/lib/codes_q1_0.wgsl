// Q1_0: `codes` [n, k / 128] of 128 bits, the first lowest; `scales` [n, k / 128] of f16. An element is
// worth the scale where its bit is 1, minus the scale where it is 0.
const HALVES: bool = false;

// Four bits, the lowest of each byte: 1 becomes 1, 0 becomes -1.
fn signs(bits: vec4<u32>) -> vec4<u32> {
    let spread = ((bits & vec4<u32>(15u)) * vec4<u32>(0x00204081u)) & vec4<u32>(0x01010101u);
    return (spread + spread + vec4<u32>(0x7f7f7f7fu)) ^ vec4<u32>(0x80808080u);
}

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let w = codes[row * params.row_blocks + run / 4u][run % 4u];
    let bits = vec4<u32>(w) >> vec4<u32>(0u, 4u, 8u, 12u);
    return array<vec4<u32>, 2>(signs(bits), signs(bits >> vec4<u32>(16u)));
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let d = half_at(row * params.row_blocks + run / 4u);
    return vec3<f32>(d, d, 0.0);
}
