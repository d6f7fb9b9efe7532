//! I2_S: two-bit trits in 128-element interleaved blocks. See `docs/formats/i2_s.md`.
//!
//! The scale stands behind the whole tensor and is no part of a block. The other layouts that
//! share the type id are read by [`super::ternary`].

/// −1, 0 or +1; block: byte `p` holds elements `p`, `32 + p`, `64 + p` and `96 + p` at bits 7:6,
/// 5:4, 3:2 and 1:0.
///
/// Code 3 never occurs in a sound file and decodes as 0, as in the writer's own decoder.
#[inline(always)]
pub(super) fn decode(block: &[u8; 32], out: &mut [f32; 128]) {
    for (quarter, xs) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (x, byte) in xs.iter_mut().zip(block) {
            let code = byte >> (6 - 2 * quarter) & 3;
            // Zero for the odd codes, 1 and 3.
            let is_even = (code & 1 ^ 1) as i8;
            *x = f32::from((code as i8 - 1) * is_even);
        }
    }
}
