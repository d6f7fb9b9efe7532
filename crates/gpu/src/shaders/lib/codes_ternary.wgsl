// Trits in the working layout of `sterna_kernels::quant::ternary`: `codes` [n, k / 128] of 32 bytes, run r of
// a block at bits 7 - 2r : 6 - 2r; `scales` [n] of f32. An element is scale · (code - 1).
const HALVES: bool = false;

fn run_codes(row: u32, run: u32) -> array<vec4<u32>, 2> {
    let i = (row * params.row_blocks + run / 4u) * 2u;
    let shift = vec4<u32>(6u - run % 4u * 2u);
    let mask = vec4<u32>(0x03030303u);
    let low = (codes[i] >> shift) & mask;
    let high = (codes[i + 1u] >> shift) & mask;
    // Minus 1, byte by byte.
    let up = vec4<u32>(0x7f7f7f7fu);
    let sign = vec4<u32>(0x80808080u);
    return array<vec4<u32>, 2>((low + up) ^ sign, (high + up) ^ sign);
}

fn run_scales(row: u32, run: u32) -> vec3<f32> {
    let d = bitcast<f32>(scales[row]);
    return vec3<f32>(d, d, 0.0);
}
