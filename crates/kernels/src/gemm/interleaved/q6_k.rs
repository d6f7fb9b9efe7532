//! Q6_K: six-bit codes with eight-bit scales.

#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across, widen};
use crate::isa::{Isa, multiversion};

/// Columns that share an integer scale.
pub(super) const SUB: usize = 16;

/// Columns whose lower four bits are together in a row, and those whose upper two are: four bytes.
pub(super) const LOW_WORD: usize = 8;
pub(super) const HIGH_WORD: usize = 16;

/// Bytes of a block as it is stored: `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`. Column `32 i + l` of each
/// half has its lower bits in nibble `i / 2` of byte `32 (i % 2) + l`, its upper ones at bits `2i` of byte `l`.
const BLOCK_BYTES: usize = 210;

/// One block of each row.
///
/// The lower bits of column `8w + j` are the low nibble of byte `j` of word `w`, those of column `8w + 4 + j` the high one;
/// the upper bits of column `16w + 4s + j` are at bits `2s` of byte `j` of word `w`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Q6K {
    /// `[word][row]`.
    pub(super) low: [[u32; ROWS]; SPAN / LOW_WORD],
    /// `[word][row]`.
    pub(super) high: [[u32; ROWS]; SPAN / HIGH_WORD],
    /// `[sub-block][row]`.
    pub(super) scales: [[i8; ROWS]; SPAN / SUB],
    /// `[row]`, f16.
    pub(super) d: [u16; ROWS],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Q6K {}

impl Span for Q6K {
    const STORED: usize = BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Q6K> {
        Kernels {
            one: x86::one::<Q6K, NEAREST>,
            several: x86::several::<Q6K, NEAREST>,
        }
    }

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let nibbles = |quad: usize| self.low[quad / 2][r] >> (quad % 2 * 4) & NIBBLES;
        let crumbs = |quad: usize| self.high[quad / 4][r] >> (quad % 4 * 2) & CRUMBS;
        let (low, rest) = stored.split_at_mut(SPAN / 2);
        let (high, rest) = rest.split_at_mut(SPAN / 4);
        for (w, to) in low.as_chunks_mut().0.iter_mut().enumerate() {
            let quad = quad_of(w / 16, w % 16 / 8, w % 8);
            *to = (nibbles(quad) | nibbles(quad + 16) << 4).to_le_bytes();
        }
        for (w, to) in high.as_chunks_mut().0.iter_mut().enumerate() {
            let upper = |i: usize| crumbs(quad_of(w / 8, i, w % 8)) << (2 * i);
            *to = (upper(0) | upper(1) | upper(2) | upper(3)).to_le_bytes();
        }
        let (scales, d) = rest.split_at_mut(SPAN / SUB);
        for (to, scales) in scales.iter_mut().zip(&self.scales) {
            *to = scales[r] as u8;
        }
        d.copy_from_slice(&self.d[r].to_le_bytes());
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        unpack(isa, self, panel);
    }
}

/// The low four, and the low two, bits of four bytes.
const NIBBLES: u32 = 0x0f0f_0f0f;
const CRUMBS: u32 = 0x0303_0303;

/// Four columns that follow each other: which half they are in, which 32 columns of it, and which of their words.
#[inline(always)]
fn place_of(quad: usize) -> (usize, usize, usize) {
    (quad / 32, quad / 8 % 4, quad % 8)
}

/// The other way round.
#[inline(always)]
fn quad_of(half: usize, i: usize, word: usize) -> usize {
    half * 32 + i * 8 + word
}

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q6K) {
        let (mut lows, mut highs) = ([[0; SPAN / LOW_WORD]; ROWS], [[0; SPAN / HIGH_WORD]; ROWS]);
        for (r, stored) in rows.iter().enumerate() {
            let (low, rest) = stored.split_at(SPAN / 2);
            let (high, rest) = rest.split_at(SPAN / 4);
            let (scales, d) = rest.split_at(SPAN / SUB);
            let word = |bytes: &[u8], at: usize| {
                let word = bytes[4 * at..].first_chunk();
                u32::from_le_bytes(*word.expect("four bytes"))
            };
            let nibbles = |quad: usize| {
                let (half, i, l) = place_of(quad);
                word(low, half * 16 + 8 * (i % 2) + l) >> (i / 2 * 4) & NIBBLES
            };
            let crumbs = |quad: usize| {
                let (half, i, l) = place_of(quad);
                word(high, half * 8 + l) >> (2 * i) & CRUMBS
            };
            for (w, word) in lows[r].iter_mut().enumerate() {
                *word = nibbles(2 * w) | nibbles(2 * w + 1) << 4;
            }
            for (w, word) in highs[r].iter_mut().enumerate() {
                let upper = |s: usize| crumbs(4 * w + s) << (2 * s);
                *word = upper(0) | upper(1) | upper(2) | upper(3);
            }
            for (to, scale) in span.scales.iter_mut().zip(scales) {
                to[r] = *scale as i8;
            }
            span.d[r] = u16::from_le_bytes([d[0], d[1]]);
        }
        across(&lows, &mut span.low);
        across(&highs, &mut span.high);
    }
}

multiversion! {
    fn unpack(span: &Q6K, panel: &mut Panel) {
        let pairs = span.low.as_chunks::<2>().0.iter().zip(&span.high);
        for ((lows, high), quads) in pairs.zip(panel.codes.as_chunks_mut::<4>().0) {
            let [first, second, third, fourth] = quads;
            let [low, next] = lows;
            for r in 0..ROWS {
                let (low, next, high) = (low[r], next[r], high[r]);
                first[r] = (low & NIBBLES | (high & CRUMBS) << 4).to_le_bytes();
                second[r] = (low >> 4 & NIBBLES | (high >> 2 & CRUMBS) << 4).to_le_bytes();
                third[r] = (next & NIBBLES | (high >> 4 & CRUMBS) << 4).to_le_bytes();
                fourth[r] = (next >> 4 & NIBBLES | (high >> 6 & CRUMBS) << 4).to_le_bytes();
            }
        }
        for (to, scales) in panel.scales.iter_mut().zip(&span.scales) {
            for (to, scale) in to.iter_mut().zip(scales) {
                *to = i32::from(*scale);
            }
        }
        let pairs = span.scales.as_chunks::<2>().0.iter();
        for (offsets, [first, second]) in panel.offsets.iter_mut().zip(pairs) {
            for ((to, first), second) in offsets.iter_mut().zip(first).zip(second) {
                *to = [i16::from(*first), i16::from(*second)];
            }
        }
        widen(&span.d, &mut panel.d[0]);
        panel.dmin.fill(0.0);
    }
}
