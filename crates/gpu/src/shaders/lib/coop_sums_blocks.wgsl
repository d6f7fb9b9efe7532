// What sums of blocks times quantized activations come to. Needs `half_range.wgsl`.

// The products of two rows with a token.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    return sums * (SHRINK / GROW);
}
