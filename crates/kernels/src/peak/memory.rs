//! The peak rate of reading memory sequentially: what decoding, which reads every weight for every token, is
//! measured against.

use crate::Isa;
use crate::isa::multiversion;

/// The kind of prefetching. Which is faster differs between machines, and between page sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadAhead {
    /// Hardware prefetching, which detects sequential lines.
    Hardware,
    /// A prefetch instruction for each line as well. Where there is none it is the same.
    Software,
}

/// Prefetch distance in bytes: across the end of a page of 4 KiB, where hardware prefetchers start over.
const AHEAD: usize = 2048;

/// Bytes summed in parallel: enough to hide the latency of dependent additions.
const BLOCK: usize = 128;

/// Reads `bytes` once, in order; returns the sum of its little-endian words of eight bytes, and of the
/// bytes that are left over, modulo 2^64. The caller takes the time.
pub fn read(isa: Isa, bytes: &[u8], ahead: ReadAhead) -> u64 {
    sum(isa, bytes, ahead == ReadAhead::Software)
}

multiversion! {
    fn sum(bytes: &[u8], prefetch: bool) -> u64 {
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        let mut sums = [0u64; BLOCK / 8];
        for block in blocks {
            if prefetch {
                ask(block.as_ptr().wrapping_add(AHEAD));
            }
            for (sum, word) in sums.iter_mut().zip(block.as_chunks().0) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        let (words, rest) = rest.as_chunks();
        let words = words.iter().map(|word| u64::from_le_bytes(*word));
        let rest = rest.iter().map(|&byte| u64::from(byte));
        sums.into_iter().chain(words).chain(rest).fold(0, u64::wrapping_add)
    }
}

/// Prefetches the lines of a block, which need not be in any allocation.
#[inline(always)]
fn ask(block: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..BLOCK).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of the target, and a prefetch touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = block;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        for len in [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 77] {
            let bytes: Box<[u8]> = (0..len).map(|i| (i * 37 + 11) as u8).collect();
            let (words, rest) = bytes.as_chunks();
            let expected = words.iter().map(|word| u64::from_le_bytes(*word));
            let expected = expected
                .chain(rest.iter().map(|&byte| byte.into()))
                .fold(0, u64::wrapping_add);
            for isa in Isa::available() {
                for ahead in [ReadAhead::Hardware, ReadAhead::Software] {
                    assert_eq!(read(isa, &bytes, ahead), expected, "{isa}, {len} bytes");
                }
            }
        }
    }
}
