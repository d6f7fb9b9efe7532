//! Two-bit codes in blocks of 128.

#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across, widen};
use crate::isa::{Isa, multiversion};

/// Columns that share a scale of weights, and of activations.
pub(super) const BLOCK: usize = 128;
pub(super) const GROUP: usize = 32;

/// Columns whose codes are together in a row: four bytes.
pub(super) const WORD: usize = 16;

/// Bytes of a block as it is stored: its scale, then element `4j + i` at bits `2i` of byte `j`.
const BLOCK_BYTES: usize = 34;

/// Two blocks of each row.
///
/// Column `16w + 4s + j` is at bits `2s` of byte `j` of word `w`, so that a shift and a mask give four adjacent columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Crumbs {
    /// `[block][row]`, f16.
    pub(super) scales: [[u16; ROWS]; SPAN / BLOCK],
    /// `[word][row]`.
    pub(super) codes: [[u32; ROWS]; SPAN / WORD],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Crumbs {}

impl Span for Crumbs {
    const STORED: usize = SPAN / BLOCK * BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Crumbs> {
        Kernels {
            one: x86::crumbs::<NEAREST>,
            several: x86::several::<Crumbs, NEAREST>,
        }
    }

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let blocks = stored.as_chunks_mut::<BLOCK_BYTES>().0;
        for (b, block) in blocks.iter_mut().enumerate() {
            let (scale, codes) = block.split_at_mut(2);
            scale.copy_from_slice(&self.scales[b][r].to_le_bytes());
            let words = &self.codes[b * BLOCK / WORD..];
            for (to, word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
                *to = transposed(word[r]).to_le_bytes();
            }
        }
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        unpack(isa, self, panel);
    }
}

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Crumbs) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            for (b, block) in stored.as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
                span.scales[b][r] = u16::from_le_bytes([block[0], block[1]]);
                let of_block = words[b * BLOCK / WORD..].iter_mut();
                for (to, word) in of_block.zip(block[2..].as_chunks().0) {
                    *to = u32::from_le_bytes(*word);
                }
            }
        }
        for word in words.as_flattened_mut() {
            *word = transposed(*word);
        }
        across(&words, &mut span.codes);
    }
}

/// Sixteen codes of two bits as a matrix of four by four, transposed.
#[inline(always)]
fn transposed(codes: u32) -> u32 {
    // The quadrants off the diagonal change places, then within each the codes off its diagonal.
    let swap = |x: u32, mask: u32, by: u32| {
        let different = (x ^ x >> by) & mask;
        x ^ different ^ different << by
    };
    swap(swap(codes, 0x0000_f0f0, 12), 0x00cc_00cc, 6)
}

/// The first codes of four bytes.
const CODES: u32 = 0x0303_0303;

multiversion! {
    fn unpack(span: &Crumbs, panel: &mut Panel) {
        for (word, quads) in span.codes.iter().zip(panel.codes.as_chunks_mut::<4>().0) {
            let [first, second, third, fourth] = quads;
            for r in 0..ROWS {
                first[r] = (word[r] & CODES).to_le_bytes();
                second[r] = (word[r] >> 2 & CODES).to_le_bytes();
                third[r] = (word[r] >> 4 & CODES).to_le_bytes();
                fourth[r] = (word[r] >> 6 & CODES).to_le_bytes();
            }
        }
        for (g, d) in panel.d.iter_mut().enumerate() {
            widen(&span.scales[g * GROUP / BLOCK], d);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::Random;

    #[test]
    fn codes_are_transposed() {
        let code = |x: u32, i: usize| x >> (2 * i) & 3;
        let mut random = Random::new(6);
        for _ in 0..100 {
            let x = random.next();
            for i in 0..16 {
                assert_eq!(code(transposed(x), i), code(x, i % 4 * 4 + i / 4));
            }
        }
    }
}
