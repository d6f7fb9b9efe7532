// What sums of blocks times quantized activations come to.

// Weights times the one and activations over the other are f16 over the whole range of either: weights from
// 2^-22 on and up to 255, activations up to 4 million.
const GROW: f32 = 256.0;
const SHRINK: f32 = 64.0;

// The products of two rows with a token.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    return sums * (SHRINK / GROW);
}
