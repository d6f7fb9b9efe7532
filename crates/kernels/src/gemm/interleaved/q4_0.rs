//! Q4_0: four-bit codes in blocks of 32.

use super::nibbles::{self, WORD};
#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across, widen};
use crate::isa::{Isa, multiversion};

/// Columns of a block.
const BLOCK: usize = 32;

/// Bytes of a block as it is stored: its scale, then bytes with the first 16 columns in their low bits and the others in the
/// high ones.
const BLOCK_BYTES: usize = 18;

/// Eight blocks of each row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Q4_0 {
    /// `[block][row]`, f16.
    pub(super) scales: [[u16; ROWS]; SPAN / BLOCK],
    /// `[word][row]`.
    pub(super) codes: [[u32; ROWS]; SPAN / WORD],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Q4_0 {}

impl Span for Q4_0 {
    const STORED: usize = SPAN / BLOCK * BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Q4_0> {
        Kernels {
            one: x86::one::<Q4_0, NEAREST>,
            several: x86::several::<Q4_0, NEAREST>,
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
            for (i, to) in codes.as_chunks_mut().0.iter_mut().enumerate() {
                *to = nibbles::stored((words[i][r], words[2 + i][r]));
            }
        }
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        unpack(isa, self, panel);
    }
}

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q4_0) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            let blocks = stored.as_chunks::<BLOCK_BYTES>().0.iter().zip(&mut span.scales);
            let words = words.as_chunks_mut::<{ BLOCK / WORD }>().0;
            for ((block, scales), [a, b, c, d]) in blocks.zip(words) {
                scales[r] = u16::from_le_bytes([block[0], block[1]]);
                let [first, second] = block[2..].as_chunks().0 else {
                    unreachable!("sixteen bytes are twice eight");
                };
                (*a, *c) = nibbles::words(*first);
                (*b, *d) = nibbles::words(*second);
            }
        }
        across(&words, &mut span.codes);
    }
}

multiversion! {
    fn unpack(span: &Q4_0, panel: &mut Panel) {
        nibbles::unpack(&span.codes, panel);
        for (d, scales) in panel.d.iter_mut().zip(&span.scales) {
            widen(scales, d);
        }
    }
}
