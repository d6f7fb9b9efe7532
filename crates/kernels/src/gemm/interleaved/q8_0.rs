//! Q8_0: eight-bit codes in blocks of 32.

#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across, widen};
use crate::isa::{Isa, multiversion};

/// Columns of a block.
const BLOCK: usize = 32;

/// Columns whose codes are together in a row: four bytes.
const WORD: usize = 4;

/// Bytes of a block as it is stored: its scale, then signed codes.
const BLOCK_BYTES: usize = 34;

/// What codes are too large by, in each of four bytes: that makes them unsigned.
const BIAS: u32 = 0x8080_8080;

/// Eight blocks of each row, with codes that are too large by 128.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Q8_0 {
    /// `[block][row]`, f16.
    pub(super) scales: [[u16; ROWS]; SPAN / BLOCK],
    /// `[word][row]`.
    pub(super) codes: [[u32; ROWS]; SPAN / WORD],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Q8_0 {}

impl Span for Q8_0 {
    const STORED: usize = SPAN / BLOCK * BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Q8_0> {
        Kernels {
            one: x86::one::<Q8_0, NEAREST>,
            several: x86::several::<Q8_0, NEAREST>,
        }
    }

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let blocks = stored.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut();
        let words = self.codes.as_chunks::<{ BLOCK / WORD }>().0;
        for ((block, scales), words) in blocks.zip(&self.scales).zip(words) {
            let (scale, codes) = block.split_at_mut(2);
            scale.copy_from_slice(&scales[r].to_le_bytes());
            for (to, word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
                *to = (word[r] ^ BIAS).to_le_bytes();
            }
        }
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        unpack(isa, self, panel);
    }
}

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q8_0) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            let blocks = stored.as_chunks::<BLOCK_BYTES>().0.iter().zip(&mut span.scales);
            for ((block, scales), words) in blocks.zip(words.as_chunks_mut::<8>().0) {
                scales[r] = u16::from_le_bytes([block[0], block[1]]);
                for (word, stored) in words.iter_mut().zip(block[2..].as_chunks().0) {
                    *word = u32::from_le_bytes(*stored) ^ BIAS;
                }
            }
        }
        across(&words, &mut span.codes);
    }
}

multiversion! {
    fn unpack(span: &Q8_0, panel: &mut Panel) {
        for (word, quad) in span.codes.iter().zip(&mut panel.codes) {
            for (word, codes) in word.iter().zip(quad) {
                *codes = word.to_le_bytes();
            }
        }
        for (d, scales) in panel.d.iter_mut().zip(&span.scales) {
            widen(scales, d);
        }
    }
}
