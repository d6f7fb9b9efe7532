// How products of blocks stay within the range of f16.

// Weights times the one and activations over the other are f16 over the whole range of either: weights from
// 2^-22 on and up to 255, activations up to 4 million.
const GROW: f32 = 256.0;
const SHRINK: f32 = 64.0;
