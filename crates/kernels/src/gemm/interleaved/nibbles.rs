//! Codes of four bits, and the header of blocks that have scales and minimums of their own: what types share.

use super::{Panel, ROWS, SPAN, widen};

/// Columns whose codes are together in a row: four bytes. Column `8w + j` is in the low bits of byte `j` of word `w`, column
/// `8w + 4 + j` in its high bits.
pub(super) const WORD: usize = 8;

/// The low four bits of four bytes, the low six, and the upper two of those.
const LOW: u32 = 0x0f0f_0f0f;
const SIX: u32 = 0x3f3f_3f3f;
const UPPER: u32 = 0x3030_3030;

/// Eight stored bytes as two words: that of their low codes, and that of their high ones.
#[inline(always)]
pub(super) fn words(stored: [u8; 8]) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = stored;
    let (first, second) = (
        u32::from_le_bytes([a, b, c, d]),
        u32::from_le_bytes([e, f, g, h]),
    );
    (
        first & LOW | (second & LOW) << 4,
        first >> 4 & LOW | second & !LOW,
    )
}

/// The stored bytes of two words.
pub(super) fn stored((low, high): (u32, u32)) -> [u8; 8] {
    let mut stored = [0; 8];
    stored[..4].copy_from_slice(&(low & LOW | (high & LOW) << 4).to_le_bytes());
    stored[4..].copy_from_slice(&(low >> 4 & LOW | high & !LOW).to_le_bytes());
    stored
}

/// The words of a row's codes, as Q4_K and Q5_K store them: each 32 bytes have the first 32 of 64 columns in their low bits
/// and the others in the high ones.
#[inline(always)]
pub(super) fn read_row(stored: &[u8], to: &mut [u32; SPAN / WORD]) {
    let groups = to.as_chunks_mut::<8>().0.iter_mut();
    for (group, stored) in groups.zip(stored.as_chunks::<32>().0) {
        let (low, high) = group.split_at_mut(4);
        let pairs = low.iter_mut().zip(high);
        for ((low, high), stored) in pairs.zip(stored.as_chunks().0) {
            (*low, *high) = words(*stored);
        }
    }
}

/// Writes the codes of row `r` as [`read_row`] reads them.
pub(super) fn write_row(codes: &[[u32; ROWS]; SPAN / WORD], r: usize, stored: &mut [u8]) {
    let groups = codes.as_chunks::<8>().0.iter();
    for (group, to) in groups.zip(stored.as_chunks_mut::<32>().0) {
        for (i, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
            *to = self::stored((group[i][r], group[4 + i][r]));
        }
    }
}

/// Writes the codes of words into a panel, from its first on.
#[inline(always)]
pub(super) fn unpack(words: &[[u32; ROWS]], panel: &mut Panel) {
    for (word, quads) in words.iter().zip(panel.codes.as_chunks_mut::<2>().0) {
        let [low, high] = quads;
        for r in 0..ROWS {
            low[r] = (word[r] & LOW).to_le_bytes();
            high[r] = (word[r] >> 4 & LOW).to_le_bytes();
        }
    }
}

/// What precedes the codes in a block of Q4_K and Q5_K, of each row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Header {
    /// `d` and `dmin`, f16.
    pub(super) scales: [[u16; ROWS]; 2],
    /// The scales and minimums as they are packed, `[third][row]`.
    pub(super) packed: [[u32; ROWS]; 3],
}

/// Bytes of a [`Header`] as it is stored: `d, dmin: f16, packed: [u8; 12]`.
pub(super) const HEADER_BYTES: usize = 16;

impl Header {
    /// Takes in that of row `r`.
    #[inline(always)]
    pub(super) fn set_row(&mut self, r: usize, stored: &[u8]) {
        for (scales, half) in self.scales.iter_mut().zip(stored.as_chunks().0) {
            scales[r] = u16::from_le_bytes(*half);
        }
        for (packed, third) in self.packed.iter_mut().zip(stored[4..].as_chunks().0) {
            packed[r] = u32::from_le_bytes(*third);
        }
    }

    /// Writes that of row `r` as it is stored.
    pub(super) fn write_row(&self, r: usize, stored: &mut [u8]) {
        let halves = self.scales.iter().map(|scales| scales[r].to_le_bytes());
        for (to, half) in stored.as_chunks_mut().0.iter_mut().zip(halves) {
            *to = half;
        }
        let thirds = self.packed.iter().map(|packed| packed[r].to_le_bytes());
        for (to, third) in stored[4..].as_chunks_mut().0.iter_mut().zip(thirds) {
            *to = third;
        }
    }

    /// Writes the scales and minimums into a panel.
    #[inline(always)]
    pub(super) fn unpack(&self, panel: &mut Panel) {
        // A register at a time: first four scales and four minimums of each row, then each of them.
        let (mut scales, mut mins) = ([[0; ROWS]; 2], [[0; ROWS]; 2]);
        for r in 0..ROWS {
            let [a, b, c] = [self.packed[0][r], self.packed[1][r], self.packed[2][r]];
            scales[0][r] = a & SIX;
            scales[1][r] = c & LOW | a >> 2 & UPPER;
            mins[0][r] = b & SIX;
            mins[1][r] = c >> 4 & LOW | b >> 2 & UPPER;
        }
        let subs = panel.scales.as_chunks_mut::<2>().0.iter_mut();
        for (sub, (halves, offsets)) in subs.zip(&mut panel.offsets).enumerate() {
            let shift = 8 * (sub % 4);
            for half in halves {
                for (to, scales) in half.iter_mut().zip(&scales[sub / 4]) {
                    *to = (scales >> shift & 0xff) as i32;
                }
            }
            for (to, mins) in offsets.iter_mut().zip(&mins[sub / 4]) {
                let min = (mins >> shift & 0xff) as i16;
                *to = [min, min];
            }
        }
        widen(&self.scales[0], &mut panel.d[0]);
        widen(&self.scales[1], &mut panel.dmin);
    }
}
