// What sums of blocks times quantized activations come to, for x_of_sums.wgsl. Needs `half_range.wgsl`.

fn result_of_sums(token: u32, row: u32, sums: vec4<f32>) -> vec4<f32> {
    return sums * (SHRINK / GROW);
}
