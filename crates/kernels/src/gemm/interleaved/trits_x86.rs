//! Sixteen rows of trits with one row of activations, and with several at once, with AVX-512.

use std::arch::x86_64::*;

use super::super::activations::{Order, TILE, Tiles};
use super::super::panel::Acts;
use super::trits::{BLOCK, Block, Kernels, QUARTER, WORDS};
use super::x86::{prefetch_part, quad};
use super::{GROUP_LEN, Panel, ROWS, Sums};

/// Blocks whose products are summed before codes' places are taken out of the sums: in a lane each adds at most
/// 8 · 4 · 192 · 128 (codes are 3 at most, at the highest bits).
const BLOCKS: usize = 1 << 11;
const _: () = assert!(BLOCKS * WORDS * 4 * 192 * 128 <= i32::MAX as usize);

/// The kernels here, which prefetch weights to the `NEAREST` cache or to the second.
pub(super) fn kernels<const NEAREST: bool>() -> Kernels {
    Kernels {
        one: one::<NEAREST>,
        several: several::<NEAREST>,
    }
}

/// The sums of codes with a row of activations.
///
/// Codes are masked where they are: those of each quarter are too large by the same power of four, and so is the sum of
/// their products. Words take turns with two sums for each, so that none waits for another.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn one<const NEAREST: bool>(tile: &[Block], q: &[i8]) -> [i32; ROWS] {
    assert!(q.len() >= tile.len() * BLOCK);
    let masks: [__m512i; 4] = std::array::from_fn(|g| _mm512_set1_epi8((0xc0u8 >> (2 * g)) as i8));
    let mut total = _mm512_setzero_si512();
    for (blocks, q) in tile.chunks(BLOCKS).zip(q.chunks(BLOCKS * BLOCK)) {
        let mut sums = [[_mm512_setzero_si512(); 4]; 2];
        for (block, q) in blocks.iter().zip(q.as_chunks::<BLOCK>().0) {
            for (i, word) in block.words.iter().enumerate() {
                prefetch_part::<_, NEAREST>(block, i);
                // SAFETY: sixteen words fill a register; a block has four activations for each quarter of a word.
                unsafe {
                    let codes = _mm512_load_si512(word.as_ptr().cast());
                    for g in 0..4 {
                        let sum = &mut sums[i % 2][g];
                        let codes = _mm512_and_si512(codes, masks[g]);
                        let acts = quad(q.as_ptr().add(QUARTER * g + 4 * i));
                        *sum = _mm512_dpbusd_epi32(*sum, codes, acts);
                    }
                }
            }
        }
        // Exact: every term is a multiple of that power.
        let [a, b, c, d] = std::array::from_fn(|g| _mm512_add_epi32(sums[0][g], sums[1][g]));
        let first = _mm512_add_epi32(_mm512_srai_epi32::<6>(a), _mm512_srai_epi32::<4>(b));
        let second = _mm512_add_epi32(_mm512_srai_epi32::<2>(c), d);
        total = _mm512_add_epi32(total, _mm512_add_epi32(first, second));
    }
    lanes(total)
}

/// The sums of codes with `n` rows of activations, the first of which is the first of a tile.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn several<const NEAREST: bool>(
    tile: &[Block],
    x: &Tiles,
    first: usize,
    n: usize,
    sums: &mut Sums<i32>,
) {
    // Rows that fill a tile are there, and zeros.
    assert!(first.is_multiple_of(TILE) && n <= GROUP_LEN && first + n <= x.m());
    assert!(x.order() == Order::Quads && tile.len() * BLOCK <= x.k());
    // SAFETY: this function is compiled for the instructions, and rows and columns are there.
    unsafe {
        match n {
            0..=2 => group::<2, 2, NEAREST>(tile, x, first / TILE, sums),
            3..=4 => group::<4, 1, NEAREST>(tile, x, first / TILE, sums),
            5..=6 => group::<6, 1, NEAREST>(tile, x, first / TILE, sums),
            _ => group::<GROUP_LEN, 1, NEAREST>(tile, x, first / TILE, sums),
        }
    }
}

/// As [`several`], for `T` rows. Codes of a byte's halves are shifted, and those of its quarters masked where they are; words
/// take turns with `TURNS` sums of each.
///
/// # Safety
/// Inlined into code compiled for AVX-512; `x` has the rows from those of tile `first` on, and the columns.
#[inline(always)]
unsafe fn group<const T: usize, const TURNS: usize, const NEAREST: bool>(
    tile: &[Block],
    x: &Tiles,
    first: usize,
    sums: &mut Sums<i32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (one, four) = (_mm512_set1_epi8(0x03), _mm512_set1_epi8(0x0c));
        let mut totals = [_mm512_setzero_si512(); T];
        for (c, blocks) in tile.chunks(BLOCKS).enumerate() {
            let mut ones = [[_mm512_setzero_si512(); T]; TURNS];
            let mut fours = [[_mm512_setzero_si512(); T]; TURNS];
            for (b, block) in blocks.iter().enumerate() {
                let acts = Acts::new(x, first, (c * BLOCKS + b) * BLOCK);
                for (i, word) in block.words.iter().enumerate() {
                    if first == 0 {
                        prefetch_part::<_, NEAREST>(block, i);
                    }
                    let low = _mm512_load_si512(word.as_ptr().cast());
                    let high = _mm512_srli_epi16::<4>(low);
                    for (g, half) in [(0, high), (2, low)] {
                        let codes = [_mm512_and_si512(half, four), _mm512_and_si512(half, one)];
                        for t in 0..T {
                            let quad = |g: usize| {
                                let quad = acts.quad(QUARTER / 4 * g + i, t);
                                _mm512_set1_epi32(quad.read_unaligned())
                            };
                            let four = &mut fours[i % TURNS][t];
                            *four = _mm512_dpbusd_epi32(*four, codes[0], quad(g));
                            let one = &mut ones[i % TURNS][t];
                            *one = _mm512_dpbusd_epi32(*one, codes[1], quad(g + 1));
                        }
                    }
                }
            }
            for (t, total) in totals.iter_mut().enumerate() {
                for (ones, fours) in ones.iter().zip(&fours) {
                    let fours = _mm512_srai_epi32::<2>(fours[t]);
                    *total = _mm512_add_epi32(*total, _mm512_add_epi32(ones[t], fours));
                }
            }
        }
        for (sums, total) in sums.iter_mut().zip(totals) {
            *sums = lanes(total);
        }
    }
}

/// Writes the codes of blocks into a panel.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn unpack(blocks: &[Block], panel: &mut Panel) {
    let mask = _mm512_set1_epi8(3);
    for (block, quads) in blocks
        .iter()
        .zip(panel.codes.as_chunks_mut::<{ BLOCK / 4 }>().0)
    {
        for (i, word) in block.words.iter().enumerate() {
            // A panel is written to the nearest cache meanwhile.
            prefetch_part::<_, false>(block, i);
            // SAFETY: sixteen words fill a register, and so do four codes of sixteen rows.
            unsafe {
                let codes = _mm512_load_si512(word.as_ptr().cast());
                let mut store = |g: usize, codes| {
                    let codes = _mm512_and_si512(codes, mask);
                    _mm512_storeu_si512(quads[WORDS * g + i].as_mut_ptr().cast(), codes);
                };
                store(0, _mm512_srli_epi16::<6>(codes));
                store(1, _mm512_srli_epi16::<4>(codes));
                store(2, _mm512_srli_epi16::<2>(codes));
                store(3, codes);
            }
        }
    }
}

/// The sums of sixteen rows, whose registers they are.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(sums: __m512i) -> [i32; ROWS] {
    let mut out = [0; ROWS];
    // SAFETY: it is as long as a register.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sums) };
    out
}
