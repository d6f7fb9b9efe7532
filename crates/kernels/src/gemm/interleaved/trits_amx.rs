//! Sixteen rows of trits with few rows of activations, in tiles of AMX.
//!
//! A block of sixteen rows is two tiles of codes. They are unpacked while the tiles of the blocks before are multiplied:
//! nothing waits for a result, as each product in turn has one of four registers for sums, and the processor has memory,
//! unpacking and products in sight at once.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::trits::{BLOCK, Block, WORDS};
use super::x86::prefetch_part;
use super::{Columns, InterleavedMatrix, Order, QuantizedRows, ROWS, Tiles};
use crate::amx::{self, tiles};
use crate::gemm::activations::LINES;

const _: () = assert!(LINES == amx::ROWS && ROWS == amx::ROWS && BLOCK == 2 * amx::ROW_BYTES);

/// The most rows of activations: two tiles, which registers for sums are enough for.
pub(super) const MOST_ROWS: usize = 2 * LINES;

/// Blocks whose products are summed before codes' places are taken out of the sums: in a lane each adds at most
/// 64 · 48 · 128 (codes are 3 at most, at the highest bits but two).
const BLOCKS: usize = 1 << 11;
const _: () = assert!(BLOCKS * (BLOCK / 2) * 48 * 128 <= i32::MAX as usize);

/// The sums of a tile.
type Sums = [[i32; ROWS]; LINES];

/// Codes of two blocks: of each, those of columns 0 to 63, times 16, and those of columns 64 to 127, times 4.
#[repr(C, align(64))]
struct Codes([[[u8; amx::ROW_BYTES]; BLOCK / 4]; 2]);

/// Bytes of the codes of a block.
const CODES_BYTES: usize = size_of::<Codes>() / 2;
const _: () = assert!(CODES_BYTES == 2048);

/// As [`super::multiply`], of two to [`MOST_ROWS`] rows of activations in [`Order::Lines`]. `write` is given the sums of codes
/// of sixteen rows with each row of activations.
///
/// # Safety
/// The machine has AMX and the instructions of [`multiply_tile`].
pub(super) unsafe fn multiply(
    w: &InterleavedMatrix,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
    finish: impl Fn(usize, &[i32], &mut [f32]),
) {
    let m = x.m();
    assert!(m <= MOST_ROWS && x.tiles().order() == Order::Lines);
    // SAFETY: the caller's promise.
    unsafe { amx::begin::<64>() };
    for tile in rows.start / ROWS..rows.end.div_ceil(ROWS) {
        let first = tile * ROWS;
        let wanted = rows.start.max(first)..rows.end.min(first + ROWS);
        let mut sums = [[[0; ROWS]; LINES]; 2];
        let blocks = w.blocks(tile);
        // SAFETY: as above; tiles have shapes.
        unsafe {
            match m > LINES {
                false => multiply_tile::<1>(blocks, x.tiles(), &mut sums),
                true => multiply_tile::<2>(blocks, x.tiles(), &mut sums),
            }
        }
        for (t, sums) in sums.as_flattened().iter().enumerate().take(m) {
            // SAFETY: no other task has these rows, so none writes these columns.
            let out = unsafe { out.row_mut(t, wanted.clone()) };
            finish(t, &sums[wanted.start - first..wanted.end - first], out);
        }
    }
    // SAFETY: as above.
    unsafe { amx::end() };
}

/// Adds the products of codes with `T` tiles of activations.
///
/// # Safety
/// The machine has AMX and these instructions, and tiles have the shapes for 64 columns.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn multiply_tile<const T: usize>(tile: &[Block], x: &Tiles, sums: &mut [Sums; 2]) {
    assert!(tile.len() * BLOCK <= x.k() && T * LINES < x.m() + LINES);
    let mut codes = [const { MaybeUninit::<Codes>::uninit() }; 2];
    for (c, blocks) in tile.chunks(BLOCKS).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            tiles!(;
                "tilezero " => "tmm0",
                "tilezero " => "tmm1",
                "tilezero " => "tmm2",
                "tilezero " => "tmm3"
            );
        }
        let pairs = blocks.chunks(2);
        if let Some(pair) = pairs.clone().next() {
            unpack(pair, &mut codes[0]);
        }
        for (i, pair) in pairs.enumerate() {
            if let Some(next) = blocks.chunks(2).nth(i + 1) {
                unpack(next, &mut codes[(i + 1) % 2]);
            }
            let codes = codes[i % 2].as_ptr().cast::<u8>();
            // 256 columns of activations.
            let acts = x.lines(0, (c * BLOCKS + 2 * i) * BLOCK).as_ptr();
            for b in 0..pair.len() {
                // SAFETY: as above; the codes were written, and activations are padded to pairs of blocks.
                unsafe {
                    let acts = acts.cast::<u8>().add(b * 2 * LINES * amx::ROW_BYTES);
                    let codes = codes.add(b * CODES_BYTES);
                    match (T, b) {
                        (1, 0) => one_even(acts, codes),
                        (1, _) => one_odd(acts, codes),
                        _ => two(acts, codes),
                    }
                }
            }
        }
        let mut registers = [MaybeUninit::<Sums>::uninit(); 4];
        // SAFETY: as above; four tiles are there, and are read after they were written.
        let registers = unsafe {
            tiles!(
                sums = registers.as_mut_ptr();
                "tilestored " => "[{sums} + {row}], tmm0",
                "tilestored " => "[{sums} + {row} + 1024], tmm1",
                "tilestored " => "[{sums} + {row} + 2048], tmm2",
                "tilestored " => "[{sums} + {row} + 3072], tmm3"
            );
            &*registers.as_ptr().cast::<[Sums; 4]>()
        };
        // With one tile of activations even and odd blocks have two registers each.
        for (i, pair) in registers.as_chunks::<2>().0.iter().enumerate() {
            let [high, low] = pair.each_ref().map(|sums| sums.as_flattened());
            let to = sums[if T == 1 { 0 } else { i }].as_flattened_mut();
            for ((to, high), low) in to.iter_mut().zip(high).zip(low) {
                // Exact: every term is a multiple of that power.
                *to += (high >> 4) + (low >> 2);
            }
        }
    }
}

/// Writes the codes of one or two blocks.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn unpack(blocks: &[Block], codes: &mut MaybeUninit<Codes>) {
    let (high, low) = (_mm512_set1_epi8(0x30), _mm512_set1_epi8(0x0c));
    for (b, block) in blocks.iter().enumerate().take(2) {
        for (i, word) in block.words.iter().enumerate() {
            prefetch_part(block, i);
            // SAFETY: sixteen words fill a register, and so do four codes of sixteen rows.
            unsafe {
                let words = _mm512_load_si512(word.as_ptr().cast());
                let to = codes.as_mut_ptr().cast::<__m512i>().add(b * BLOCK / 4 + i);
                let store = |g: usize, codes, mask| {
                    _mm512_store_si512(to.add(g * WORDS), _mm512_and_si512(codes, mask));
                };
                store(0, _mm512_srli_epi32::<2>(words), high);
                store(1, words, high);
                store(2, words, low);
                store(3, _mm512_slli_epi32::<2>(words), low);
            }
        }
    }
}

/// Multiplies activations of 128 columns with the codes of a block.
macro_rules! multiply_block {
    ($(#[$meta:meta])* $name:ident: $($operation:ident $operands:literal),*) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The machine has AMX, tiles have the shapes for 64 columns, and the operands are there.
        #[inline]
        unsafe fn $name(acts: *const u8, codes: *const u8) {
            // SAFETY: the caller's promise.
            unsafe {
                tiles!(
                    acts = acts, codes = codes;
                    "tileloadd " => "tmm6, [{codes} + {row}]",
                    "tileloadd " => "tmm7, [{codes} + {row} + 1024]",
                    "tileloadd " => "tmm4, [{acts} + {row}]",
                    "tileloadd " => "tmm5, [{acts} + {row} + 1024]",
                    $(multiply_block!(@$operation) => $operands),*
                );
            }
        }
    };
    (@load) => { "tileloadd " };
    (@dot) => { "tdpbsud " };
}

multiply_block!(
    /// Sums are in registers 0 and 1.
    one_even: dot "tmm0, tmm4, tmm6", dot "tmm1, tmm5, tmm7"
);
multiply_block!(
    /// Sums are in registers 2 and 3.
    one_odd: dot "tmm2, tmm4, tmm6", dot "tmm3, tmm5, tmm7"
);
multiply_block!(
    /// Sums are in registers 0 and 1, those of the second tile of activations in 2 and 3.
    two:
    dot "tmm0, tmm4, tmm6",
    dot "tmm1, tmm5, tmm7",
    load "tmm4, [{acts} + {row} + 4096]",
    load "tmm5, [{acts} + {row} + 5120]",
    dot "tmm2, tmm4, tmm6",
    dot "tmm3, tmm5, tmm7"
);
