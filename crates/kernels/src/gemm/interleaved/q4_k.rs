//! Q4_K: four-bit codes with six-bit scales and minimums.

#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, ROWS, SPAN, Span, across};
use crate::isa::{Isa, multiversion};
use crate::quant::f16_to_f32;

/// Columns whose codes are together in a row: four bytes.
pub(super) const WORD: usize = 8;

/// Bytes of a block as it is stored: `d, dmin: f16, packed: [u8; 12], codes: [u8; 128]`, of which each 32 have the first
/// 32 of 64 columns in their low bits and the others in the high ones.
const BLOCK_BYTES: usize = 144;

/// One block of each row.
///
/// Column `8w + j` is in the low bits of byte `j` of word `w`, column `8w + 4 + j` in its high bits.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Q4K {
    /// `d` and `dmin` of each row, f16.
    pub(super) scales: [[u16; ROWS]; 2],
    /// The scales and minimums as they are packed, `[third][row]`.
    pub(super) packed: [[u32; ROWS]; 3],
    /// `[word][row]`.
    pub(super) codes: [[u32; ROWS]; SPAN / WORD],
}

// SAFETY: integers without room between them.
unsafe impl Span for Q4K {
    const STORED: usize = BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    const KERNELS: Kernels<Q4K> = Kernels {
        one: x86::q4_k,
        several: x86::several::<Q4K>,
    };

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let (header, codes) = stored.split_at_mut(16);
        let halves = self.scales.iter().map(|scales| scales[r].to_le_bytes());
        for (to, half) in header.as_chunks_mut().0.iter_mut().zip(halves) {
            *to = half;
        }
        let thirds = self.packed.iter().map(|packed| packed[r].to_le_bytes());
        for (to, third) in header[4..].as_chunks_mut().0.iter_mut().zip(thirds) {
            *to = third;
        }
        let words: [u32; SPAN / WORD] = std::array::from_fn(|w| self.codes[w][r]);
        let groups = words.as_chunks::<8>().0.iter();
        for (group, to) in groups.zip(codes.as_chunks_mut::<32>().0) {
            let (low, high) = group.split_at(4);
            let pairs = low.iter().zip(high);
            for ((low, high), to) in pairs.zip(to.as_chunks_mut::<8>().0) {
                to[..4].copy_from_slice(&(low & LOW | (high & LOW) << 4).to_le_bytes());
                to[4..].copy_from_slice(&(low >> 4 & LOW | high & !LOW).to_le_bytes());
            }
        }
    }

    fn unpack(&self, isa: Isa, panel: &mut Panel) {
        #[cfg(target_arch = "x86_64")]
        if x86::is_offered(isa) {
            // SAFETY: the instruction set has it.
            return unsafe { x86::unpack_q4_k(self, panel) };
        }
        unpack(isa, self, panel);
    }
}

/// The low four bits of four bytes, the low six, and the upper two of those.
const LOW: u32 = 0x0f0f_0f0f;
const SIX: u32 = 0x3f3f_3f3f;
const UPPER: u32 = 0x3030_3030;

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q4K) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            let (header, codes) = stored.split_at(16);
            for (scales, half) in span.scales.iter_mut().zip(header.as_chunks().0) {
                scales[r] = u16::from_le_bytes(*half);
            }
            for (packed, third) in span.packed.iter_mut().zip(header[4..].as_chunks().0) {
                packed[r] = u32::from_le_bytes(*third);
            }
            let groups = words.as_chunks_mut::<8>().0.iter_mut();
            for (group, stored) in groups.zip(codes.as_chunks::<32>().0) {
                let (low, high) = group.split_at_mut(4);
                let pairs = low.iter_mut().zip(high);
                for ((low, high), stored) in pairs.zip(stored.as_chunks::<8>().0) {
                    let first = u32::from_le_bytes([stored[0], stored[1], stored[2], stored[3]]);
                    let second = u32::from_le_bytes([stored[4], stored[5], stored[6], stored[7]]);
                    *low = first & LOW | (second & LOW) << 4;
                    *high = first >> 4 & LOW | second & !LOW;
                }
            }
        }
        across(&words, &mut span.codes);
    }
}

multiversion! {
    fn unpack(span: &Q4K, panel: &mut Panel) {
        for (word, quads) in span.codes.iter().zip(panel.codes.as_chunks_mut::<2>().0) {
            let [low, high] = quads;
            for r in 0..ROWS {
                low[r] = (word[r] & LOW).to_le_bytes();
                high[r] = (word[r] >> 4 & LOW).to_le_bytes();
            }
        }
        // A register at a time: first four scales and four minimums of each row, then each of them.
        let (mut scales, mut mins) = ([[0; ROWS]; 2], [[0; ROWS]; 2]);
        for r in 0..ROWS {
            let [a, b, c] = [span.packed[0][r], span.packed[1][r], span.packed[2][r]];
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
        for (d, scale) in panel.d[0].iter_mut().zip(&span.scales[0]) {
            *d = f16_to_f32(*scale);
        }
        for (dmin, scale) in panel.dmin.iter_mut().zip(&span.scales[1]) {
            *dmin = f16_to_f32(*scale);
        }
    }
}
