//! I2_S: two-bit trits in 128-element interleaved blocks. See `docs/formats/i2_s.md`.
//!
//! The scale is stored after the whole tensor and is not part of a block. The other layouts that share the
//! type id are read by [`super::ternary`].

use super::bits::crumbs;

/// Elements in a quarter of a block, which share the position of their two bits.
const QUARTER: usize = 32;

/// −1, 0 or +1; block: byte `p` holds elements `p`, `32 + p`, `64 + p` and `96 + p` at bits 7:6,
/// 5:4, 3:2 and 1:0.
///
/// Code 3 never occurs in a valid file and decodes as 0, as in the writer's own decoder.
#[inline(always)]
pub(super) fn decode(block: &[u8; 32], out: &mut [f32; 128]) {
    let [last, third, second, first] = crumbs(block);
    let codes = [first, second, third, last];
    for (x, code) in out.iter_mut().zip(codes.as_flattened()) {
        // Zero for the odd codes, 1 and 3.
        let is_even = i32::from(code & 1 ^ 1);
        *x = ((i32::from(*code) - 1) * is_even) as f32;
    }
}

/// Codes for −`scale`, 0 and `scale`; `false` if there are other values, with unspecified output.
#[inline(always)]
pub(super) fn encode(values: &[f32; 128], scale: f32, block: &mut [u8; 32]) -> bool {
    let mut others = false;
    let mut codes = [0; 128];
    for (code, &v) in codes.iter_mut().zip(values) {
        others |= (v != 0.0) & (v.abs() != scale);
        *code = 1 + u8::from(v > 0.0) - u8::from(v < 0.0);
    }
    for (p, byte) in block.iter_mut().enumerate() {
        *byte = codes[p] << 6
            | codes[QUARTER + p] << 4
            | codes[2 * QUARTER + p] << 2
            | codes[3 * QUARTER + p];
    }
    !others
}
