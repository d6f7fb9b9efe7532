//! Q4_K: four-bit codes with six-bit scales and minimums.

use super::nibbles::{self, HEADER_BYTES, Header, WORD};
#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, ROWS, SPAN, Span, across};
use crate::isa::{Isa, multiversion};

/// Bytes of a block as it is stored: a header, then `codes: [u8; 128]`, of which each 32 have the first 32 of 64 columns in
/// their low bits and the others in the high ones.
const BLOCK_BYTES: usize = HEADER_BYTES + 128;

/// One block of each row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Q4K {
    pub(super) header: Header,
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
        let (header, codes) = stored.split_at_mut(HEADER_BYTES);
        self.header.write_row(r, header);
        write_codes(&self.codes, r, codes);
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

/// The words of a row's stored codes.
#[inline(always)]
pub(super) fn read_codes(stored: &[u8], words: &mut [u32; SPAN / WORD]) {
    let groups = words.as_chunks_mut::<8>().0.iter_mut();
    for (group, stored) in groups.zip(stored.as_chunks::<32>().0) {
        let (low, high) = group.split_at_mut(4);
        let pairs = low.iter_mut().zip(high);
        for ((low, high), stored) in pairs.zip(stored.as_chunks().0) {
            (*low, *high) = nibbles::words(*stored);
        }
    }
}

/// Writes the codes of row `r` as they are stored.
pub(super) fn write_codes(codes: &[[u32; ROWS]; SPAN / WORD], r: usize, stored: &mut [u8]) {
    let groups = codes.as_chunks::<8>().0.iter();
    for (group, to) in groups.zip(stored.as_chunks_mut::<32>().0) {
        for (i, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
            *to = nibbles::stored((group[i][r], group[4 + i][r]));
        }
    }
}

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q4K) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            let (header, codes) = stored.split_at(HEADER_BYTES);
            span.header.set_row(r, header);
            read_codes(codes, words);
        }
        across(&words, &mut span.codes);
    }
}

multiversion! {
    fn unpack(span: &Q4K, panel: &mut Panel) {
        nibbles::unpack(&span.codes, panel);
        span.header.unpack(panel);
    }
}
