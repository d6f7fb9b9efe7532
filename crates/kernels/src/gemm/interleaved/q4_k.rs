//! Q4_K: four-bit codes with six-bit scales and minimums.

use super::nibbles::{self, HEADER_BYTES, Header, WORD};
#[cfg(target_arch = "x86_64")]
use super::{Kernels, x86};
use super::{Panel, Plain, ROWS, SPAN, Span, across};
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
unsafe impl Plain for Q4K {}

impl Span for Q4K {
    const STORED: usize = BLOCK_BYTES;
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Q4K> {
        Kernels {
            one: x86::q4_k::<NEAREST>,
            several: x86::several::<Q4K, NEAREST>,
        }
    }

    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]) {
        interleave(isa, rows, self);
    }

    fn write_row(&self, r: usize, stored: &mut [u8]) {
        let (header, codes) = stored.split_at_mut(HEADER_BYTES);
        self.header.write_row(r, header);
        nibbles::write_row(&self.codes, r, codes);
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

multiversion! {
    fn interleave(rows: &[&[u8]; ROWS], span: &mut Q4K) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (stored, words)) in rows.iter().zip(&mut words).enumerate() {
            let (header, codes) = stored.split_at(HEADER_BYTES);
            span.header.set_row(r, header);
            nibbles::read_row(codes, words);
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
