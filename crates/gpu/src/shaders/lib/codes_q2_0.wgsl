// Q2_0 and its kin: `codes` [n, k / 32] of 32 two-bit codes, the first lowest; `scales` of f16, one for
// every BLOCK_RUNS runs of 32. An element is worth scale · (code - 1).
const HALVES: bool = false;

// Runs that share a scale: 2 in Q2_0, 4 in Q2_0_G128 and PQ2_0.
override BLOCK_RUNS: u32 = 2u;

// A byte of four codes, each in a byte of its own, minus 1.
fn crumbs(x: vec4<u32>) -> vec4<u32> {
    let b = x & vec4<u32>(255u);
    let spread = b | (b << vec4<u32>(6u)) | (b << vec4<u32>(12u)) | (b << vec4<u32>(18u));
    return ((spread & vec4<u32>(0x03030303u)) + vec4<u32>(0x7f7f7f7fu)) ^ vec4<u32>(0x80808080u);
}

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let i = row * params.row_blocks * BLOCK_RUNS + run;
    let w = codes[i / 2u];
    let words = select(w.xy, w.zw, i % 2u == 1u);
    let shifts = vec4<u32>(0u, 8u, 16u, 24u);
    return array<vec4<u32>, 2>(
        crumbs(vec4<u32>(words.x) >> shifts),
        crumbs(vec4<u32>(words.y) >> shifts),
    );
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let d = half_at(row * params.row_blocks + run / BLOCK_RUNS);
    return vec3<f32>(d, d, 0.0);
}
