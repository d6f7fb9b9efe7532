// Trits as f16.

// The codes of quarter `quarter` of a word: code c as 1 + c / 4, whose f16 has c in bits 8 and 9.
fn quarter_of(word: u32, quarter: u32) -> vec4<f16> {
    let even = ((word << (2u + 2u * quarter)) & 0x03000300u) | 0x3c003c00u;
    let odd = ((word >> (6u - 2u * quarter)) & 0x03000300u) | 0x3c003c00u;
    return vec4<f16>(pair_of(even), pair_of(odd));
}
