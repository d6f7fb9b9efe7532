// Q6_K: `codes` [n, k / 256] of 208 bytes: low nibbles (128), upper two bits (64), sixteen int8 scales;
// `scales` [n, k / 256] of f16. An element is worth d · scale · (code - 32); see docs/formats/k-quants.md
// for the order.
const HALVES: bool = true;

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let block = (row * params.row_blocks + run / 8u) * 13u;
    let half = run % 8u / 4u;
    let quarter = run % 4u;
    let low = block + half * 4u + quarter % 2u * 2u;
    let high = block + 8u + half * 2u;
    let low_shift = vec4<u32>(quarter / 2u * 4u);
    let high_shift = vec4<u32>(quarter * 2u);
    var joined: array<vec4<u32>, 2>;
    for (var i = 0u; i < 2u; i++) {
        let bits = (codes[low + i] >> low_shift) & vec4<u32>(0x0f0f0f0fu);
        let upper = ((codes[high + i] >> high_shift) & vec4<u32>(0x03030303u)) << vec4<u32>(4u);
        // Minus 32, byte by byte.
        joined[i] = ((bits | upper) + vec4<u32>(0x60606060u)) ^ vec4<u32>(0x80808080u);
    }
    return joined;
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let block = row * params.row_blocks + run / 8u;
    let all = codes[block * 13u + 12u];
    let pair = all[run % 8u / 2u] >> (run % 2u * 16u);
    let d = half_at(block);
    let s = vec2<f32>(vec2<i32>(vec2<u32>(pair << 24u, pair << 16u)) >> vec2<u32>(24u));
    return vec3<f32>(d * s, 0.0);
}
