//! Q5_K: Q4_K with a fifth bit for each code.

use super::nibbles::{self, HEADER_BYTES, Header, WORD};
#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across};
use crate::isa::{Isa, multiversion};

/// Columns whose fifth bits are together in a row: four bytes.
pub(super) const HIGH_WORD: usize = 32;

/// Bytes of a block as it is stored: a header, then `high: [u8; 32]` and `codes: [u8; 128]`. Bit `s` of byte `l` of `high`
/// belongs to column `32 s + l`; codes are stored as in Q4_K.
const BLOCK_BYTES: usize = HEADER_BYTES + HIGH_BYTES + 128;
const HIGH_BYTES: usize = 32;

/// One block of each row.
///
/// The fifth bit of column `32 s + 4 i + j` is bit `i` of byte `j` of word `s`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Q5K {
    pub(super) header: Header,
    /// `[word][row]`.
    pub(super) high: [[u32; ROWS]; SPAN / HIGH_WORD],
    /// `[word][row]`.
    pub(super) codes: [[u32; ROWS]; SPAN / WORD],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Q5K {}

impl Span for Q5K {
    const STORED: usize = BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Q5K> {
        Kernels {
            one: x86::one::<Q5K, NEAREST>,
            several: x86::several::<Q5K, NEAREST>,
        }
    }

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let (header, rest) = stored.split_at_mut(HEADER_BYTES);
        let (high, codes) = rest.split_at_mut(HIGH_BYTES);
        self.header.write_row(r, header);
        for (i, to) in high.as_chunks_mut().0.iter_mut().enumerate() {
            let bits = self.high.iter().map(|word| word[r] >> i & FIRST);
            let joined = bits.enumerate().fold(0, |all, (s, bits)| all | bits << s);
            *to = joined.to_le_bytes();
        }
        nibbles::write_row(&self.codes, r, codes);
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        unpack(isa, self, panel);
    }
}

/// The first bits of four bytes.
const FIRST: u32 = 0x0101_0101;

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q5K) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        let mut highs = [[0; SPAN / HIGH_WORD]; ROWS];
        for (r, stored) in rows.iter().enumerate() {
            let (header, rest) = stored.split_at(HEADER_BYTES);
            let (high, codes) = rest.split_at(HIGH_BYTES);
            span.header.set_row(r, header);
            for (s, word) in highs[r].iter_mut().enumerate() {
                for (i, stored) in high.as_chunks().0.iter().enumerate() {
                    *word |= (u32::from_le_bytes(*stored) >> s & FIRST) << i;
                }
            }
            nibbles::read_row(codes, &mut words[r]);
        }
        across(&highs, &mut span.high);
        across(&words, &mut span.codes);
    }
}

multiversion! {
    fn unpack(span: &Q5K, panel: &mut Panel) {
        nibbles::unpack(&span.codes, panel);
        let subs = panel.codes.as_chunks_mut::<{ HIGH_WORD / 4 }>().0.iter_mut();
        for (quads, word) in subs.zip(&span.high) {
            for (i, quad) in quads.iter_mut().enumerate() {
                for (codes, word) in quad.iter_mut().zip(word) {
                    let fifth = (word >> i & FIRST) << 4;
                    *codes = (u32::from_le_bytes(*codes) | fifth).to_le_bytes();
                }
            }
        }
        span.header.unpack(panel);
    }
}
