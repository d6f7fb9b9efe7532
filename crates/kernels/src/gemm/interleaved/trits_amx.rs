//! Sixteen rows of trits with few rows of activations, in tiles of AMX.
//!
//! A block of sixteen rows is two tiles of codes. They are unpacked while the tiles of the blocks before are multiplied:
//! nothing waits for a result, as each product in turn has one of four registers for sums, and the processor has memory,
//! unpacking and products in sight at once.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::trits::{BLOCK, Block, WORDS};
use super::{Columns, InterleavedMatrix, Order, QuantizedRows, ROWS, Tiles};
use crate::amx::{self, tiles};
use crate::gemm::activations::LINES;
use crate::gemm::prefetch::{self, Level};

const _: () = assert!(LINES == amx::ROWS && ROWS == amx::ROWS && BLOCK == 2 * amx::ROW_BYTES);

/// The most rows of activations: two tiles, which registers for sums are enough for.
pub(super) const MOST_ROWS: usize = 2 * LINES;

/// Blocks whose products are summed before codes' places are taken out of the sums: in a lane each adds at most
/// 64 · 48 · 128 (codes are 3 at most, at the highest bits but two).
const BLOCKS: usize = 1 << 11;
const _: () = assert!(BLOCKS * (BLOCK / 2) * 48 * 128 <= i32::MAX as usize);

/// Blocks from those that are unpacked to those that are prefetched, of all tiles of weights together.
const AHEAD: usize = 16;

/// The sums of a tile of weights with a tile of activations.
type Sums = [[i32; ROWS]; LINES];

/// Codes of two blocks: of each, those of columns 0 to 63, times 16, and those of columns 64 to 127, times 4.
#[repr(C, align(64))]
struct Codes([[[u8; amx::ROW_BYTES]; BLOCK / 4]; 2]);

/// Bytes of the codes of a block.
const CODES_BYTES: usize = size_of::<Codes>() / 2;

/// Bytes of 128 columns of a tile of activations.
const ACTS_BYTES: usize = 2 * LINES * amx::ROW_BYTES;
const _: () = assert!(CODES_BYTES == 2048 && ACTS_BYTES == 2048);

/// Whether two tiles of weights are multiplied with `m` rows of activations together.
pub(super) fn takes_two(m: usize) -> bool {
    m <= LINES
}

/// As [`super::multiply`], of two to [`MOST_ROWS`] rows of activations in [`Order::Lines`].
///
/// # Safety
/// The machine has AMX and the instructions of [`multiply_tiles`].
pub(super) unsafe fn multiply(
    w: &InterleavedMatrix,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    let m = x.m();
    assert!(m <= MOST_ROWS && x.tiles().order() == Order::Lines);
    let mut steps = [(0, 0.0); MOST_ROWS];
    for (t, step) in steps[..m].iter_mut().enumerate() {
        let row = x.row(t);
        *step = (row.sum, w.scale / row.scales[0]);
    }
    let steps = &steps[..m];
    // SAFETY: the caller's promise.
    unsafe { amx::begin::<64>() };
    let mut tiles = rows.start / ROWS..rows.end.div_ceil(ROWS);
    while let Some(first) = tiles.next() {
        let both = match takes_two(m) {
            true => tiles.next().map(|second| [first, second]),
            false => None,
        };
        let wanted = |tile: usize| {
            let columns = tile * ROWS..(tile + 1) * ROWS;
            rows.start.max(columns.start)..rows.end.min(columns.end)
        };
        // SAFETY: as above; tiles have shapes, and no other task has these columns.
        unsafe {
            match both {
                Some(both) => {
                    let sums = multiply_tiles::<2, 1>(both.map(|tile| w.blocks(tile)), x.tiles());
                    for (tile, sums) in both.into_iter().zip(&sums) {
                        write(wanted(tile), steps, std::slice::from_ref(sums), out);
                    }
                }
                None if takes_two(m) => {
                    let sums = multiply_tiles::<1, 1>([w.blocks(first)], x.tiles());
                    write(wanted(first), steps, &sums[..1], out);
                }
                None => {
                    let sums = multiply_tiles::<1, 2>([w.blocks(first)], x.tiles());
                    write(wanted(first), steps, &sums, out);
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { amx::end() };
}

/// The sums of `N` tiles of weights, of as many blocks, with `T` tiles of activations; with one of each, the first.
///
/// # Safety
/// The machine has AMX and these instructions, and tiles have the shapes for 64 columns.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn multiply_tiles<const N: usize, const T: usize>(
    weights: [&[Block]; N],
    x: &Tiles,
) -> [Sums; 2] {
    const { assert!(N * T <= 2 && N > 0 && T > 0) };
    let n_blocks = weights[0].len();
    assert!(weights.iter().all(|blocks| blocks.len() == n_blocks));
    assert!(n_blocks * BLOCK <= x.k() && T * LINES < x.m() + LINES);
    // Codes of a turn are those of a block of both tiles, or of two blocks of one.
    let mut totals = [[[0; ROWS]; LINES]; 2];
    let mut codes = [const { MaybeUninit::<Codes>::uninit() }; 2];
    for start in (0..n_blocks).step_by(BLOCKS) {
        let end = n_blocks.min(start + BLOCKS);
        // SAFETY: the caller's promise.
        unsafe { amx::clear() };
        // The `i`th block of a turn, if there is one.
        let place = |turn: usize, i: usize| match N {
            1 => (start + 2 * turn + i, 0),
            _ => (start + turn, i),
        };
        let unpack_one = |turn: usize, i: usize, codes: &mut MaybeUninit<Codes>| {
            let (b, tile) = place(turn, i);
            if b < end {
                // Where a tile ends, the next one that is unpacked in its place.
                let ahead = match b + AHEAD / N {
                    ahead if ahead < n_blocks => ahead,
                    beyond => beyond + (N - 1) * n_blocks,
                };
                let ahead = weights[tile].as_ptr().wrapping_add(ahead);
                unpack(&weights[tile][b], ahead, codes, i);
            }
        };
        unpack_one(0, 0, &mut codes[0]);
        unpack_one(0, 1, &mut codes[0]);
        for turn in 0..(end - start).div_ceil(2 / N) {
            for i in 0..2 {
                // What is unpacked between two products isn't waited for.
                unpack_one(turn + 1, i, &mut codes[(turn + 1) % 2]);
                let (b, _) = place(turn, i);
                if b >= end {
                    continue;
                }
                let codes = codes[turn % 2].as_ptr().cast::<u8>();
                let acts = x.lines(0, b / 2 * (2 * BLOCK)).as_ptr().cast::<u8>();
                // SAFETY: as above; the codes were written, and activations are padded to pairs of blocks.
                unsafe {
                    let acts = acts.add(b % 2 * ACTS_BYTES);
                    match (N, T, i) {
                        (2, _, 0) => first_half_of_both(acts, codes),
                        (2, ..) => second_half_of_both(acts, codes),
                        (_, 2, _) => two(acts, codes.add(i * CODES_BYTES)),
                        (.., 0) => one_even(acts, codes),
                        _ => one_odd(acts, codes.add(CODES_BYTES)),
                    }
                }
            }
        }
        let mut registers = [MaybeUninit::<Sums>::uninit(); 4];
        // SAFETY: as above; four tiles are there, and are read after they were written.
        let registers = unsafe {
            amx::store(registers.as_mut_ptr());
            &*registers.as_ptr().cast::<[Sums; 4]>()
        };
        for (i, pair) in registers.as_chunks::<2>().0.iter().enumerate() {
            let [high, low] = pair.each_ref().map(|sums| sums.as_flattened());
            // With one tile of each, even and odd blocks have two registers each.
            let to = totals[if N * T == 1 { 0 } else { i }].as_flattened_mut();
            for ((to, high), low) in to.iter_mut().zip(high).zip(low) {
                // Exact: every term is a multiple of that power.
                *to += (high >> 4) + (low >> 2);
            }
        }
    }
    totals
}

/// Writes results of some rows of weights, of the sixteen that they are among, for each row of activations, whose sum and
/// factor are `steps`.
///
/// # Safety
/// The machine has the instructions, and no other task has these columns.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn write(wanted: Range<usize>, steps: &[(i32, f32)], sums: &[Sums], out: &Columns<'_>) {
    let skipped = wanted.start % ROWS;
    let sums = sums.as_flattened().iter();
    for (t, ((total, scale), sums)) in steps.iter().zip(sums).enumerate() {
        let results = sums.map(|sum| (sum - total) as f32 * scale);
        // SAFETY: the caller's promise.
        let out = unsafe { out.row_mut(t, wanted.clone()) };
        match out.first_chunk_mut() {
            Some(out) => *out = results,
            None => out.copy_from_slice(&results[skipped..][..out.len()]),
        }
    }
}

/// Writes the codes of a block as the `i`th, and prefetches another.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn unpack(block: &Block, ahead: *const Block, codes: &mut MaybeUninit<Codes>, i: usize) {
    debug_assert!(i < 2);
    let (high, low) = (_mm512_set1_epi8(0x30), _mm512_set1_epi8(0x0c));
    for (word, words) in block.words.iter().enumerate() {
        let part = ahead.cast::<u8>().wrapping_add(word * size_of_val(words));
        prefetch::lines(Level::Second, part, size_of_val(words));
        // SAFETY: sixteen words fill a register, and so do four codes of sixteen rows.
        unsafe {
            let words = _mm512_load_si512(words.as_ptr().cast());
            let to = codes
                .as_mut_ptr()
                .cast::<__m512i>()
                .add(i * BLOCK / 4 + word);
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

/// Multiplies activations of 128 columns with the codes of a block, or of two.
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
    one_even:
    load "tmm4, [{acts} + {row}]",
    load "tmm6, [{codes} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 1024]",
    load "tmm7, [{codes} + {row} + 1024]",
    dot "tmm1, tmm5, tmm7"
);
multiply_block!(
    /// Sums are in registers 2 and 3.
    one_odd:
    load "tmm4, [{acts} + {row}]",
    load "tmm6, [{codes} + {row}]",
    dot "tmm2, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 1024]",
    load "tmm7, [{codes} + {row} + 1024]",
    dot "tmm3, tmm5, tmm7"
);
multiply_block!(
    /// Sums are in registers 0 and 1, those of the second tile of activations in 2 and 3.
    two:
    load "tmm6, [{codes} + {row}]",
    load "tmm4, [{acts} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 4096]",
    dot "tmm2, tmm5, tmm6",
    load "tmm7, [{codes} + {row} + 1024]",
    load "tmm4, [{acts} + {row} + 1024]",
    dot "tmm1, tmm4, tmm7",
    load "tmm5, [{acts} + {row} + 5120]",
    dot "tmm3, tmm5, tmm7"
);
multiply_block!(
    /// The first 64 columns; sums are in register 0, those of the second block in 2.
    first_half_of_both:
    load "tmm4, [{acts} + {row}]",
    load "tmm6, [{codes} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm7, [{codes} + {row} + 2048]",
    dot "tmm2, tmm4, tmm7"
);
multiply_block!(
    /// The other 64 columns; sums are in register 1, those of the second block in 3.
    second_half_of_both:
    load "tmm5, [{acts} + {row} + 1024]",
    load "tmm6, [{codes} + {row} + 1024]",
    dot "tmm1, tmm5, tmm6",
    load "tmm7, [{codes} + {row} + 3072]",
    dot "tmm3, tmm5, tmm7"
);
