//! Products of panels in tiles of AMX: sixteen rows of activations with the sixteen rows of weights of a panel, 64 columns
//! at a time.
//!
//! A panel has the layout that the second operand needs; activations are in [`Order::Lines`](Order).
//! A tile's sums are integers, so integer scales within a block of 256 can't be applied in between. Instead, codes are
//! multiplied by the digits of their scales beforehand, once for all activations, and each digit has a product of its
//! own; that is exact, and so the bits are those of other instructions.
//!
//! A product of tiles takes 16 cycles, in which two tiles can be loaded, so each is multiplied with several. Where every 256
//! columns have sums of their own, these are scaled while the next tiles are multiplied.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::{COLUMNS, Kernel, Lanes, Panel};
use crate::amx::{self, tiles};
use crate::gemm::activations::{LINES, TILE, Tiles};
use crate::quant::integers::SUPER_LEN;

const _: () = assert!(LINES == amx::ROWS && super::ROWS == amx::ROWS);

/// Bytes of a tile of activations or codes.
const TILE_BYTES: usize = amx::ROWS * amx::ROW_BYTES;

/// Tiles of a block of 256 columns.
const STEPS: usize = SUPER_LEN * LINES / TILE_BYTES;

/// Bytes of the activations that a block of 256 columns of a panel is multiplied with.
const ACTS_BYTES: usize = STEPS * TILE_BYTES;

/// The sums of a tile.
type Sums<T> = [Lanes<T>; LINES];

/// Exact sums over all columns.
pub(super) const TERNARY: Kernel<i32> = Kernel {
    columns: COLUMNS,
    begin: amx::begin::<64>,
    end: amx::end,
    add: ternary,
};

/// One block of 256, of codes up to `MAX` whose every `QUADS` times four share an integer scale.
///
/// Codes are too large by 2^`BIAS`, or, if that is 0, have a minimum.
pub(super) const fn super_blocks<const MAX: usize, const QUADS: usize, const BIAS: u32>()
-> Kernel<f32> {
    Kernel {
        columns: SUPER_LEN,
        begin: amx::begin::<64>,
        end: amx::end,
        add: add_super::<MAX, QUADS, BIAS>,
    }
}

/// Groups of 32 codes, which are too large by `BIAS`, with one scale.
pub(super) const fn small_blocks<const BIAS: i16>() -> Kernel<f32> {
    Kernel {
        columns: SUPER_LEN,
        begin: amx::begin::<32>,
        end: amx::end,
        add: add_small::<BIAS>,
    }
}

/// Multiplies tiles of activations with each of up to three matrices of codes, `n` times 64 columns of all. Tiles of
/// activations are [`ACTS_BYTES`] apart. Sums are added to what is in registers.
macro_rules! steps {
    (
        $(#[$meta:meta])*
        $name:ident, [$($codes:ident: $i:literal),*]:
        $($operation:ident $operands:literal),*
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Tiles have the shapes for 64 columns; the operands are there.
        #[inline]
        unsafe fn $name<const SIGNED: bool>(
            acts: *const i8,
            codes: [*const u8; [$($i),*].len()],
            n: usize,
        ) {
            for at in (0..n).map(|step| step * TILE_BYTES) {
                // SAFETY: the caller's promise.
                unsafe {
                    if SIGNED {
                        tiles!(
                            acts = acts.add(at) $(, $codes = codes[$i].add(at))*;
                            $(steps!(@$operation "tdpbssd ") => $operands),*
                        );
                    } else {
                        tiles!(
                            acts = acts.add(at) $(, $codes = codes[$i].add(at))*;
                            $(steps!(@$operation "tdpbsud ") => $operands),*
                        );
                    }
                }
            }
        }
    };
    (@load $dot:literal) => { "tileloadd " };
    (@dot $dot:literal) => { $dot };
}

steps!(
    /// Sums are in registers 0 and 1, those of the second tile in 2 and 3.
    two_by_two, [first: 0, second: 1]:
    load "tmm4, [{acts} + {row}]",
    load "tmm6, [{first} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm7, [{second} + {row}]",
    dot "tmm1, tmm4, tmm7",
    load "tmm5, [{acts} + {row} + 4096]",
    dot "tmm2, tmm5, tmm6",
    dot "tmm3, tmm5, tmm7"
);
steps!(
    /// Sums are in registers 0 and 1.
    one_by_two, [first: 0, second: 1]:
    load "tmm4, [{acts} + {row}]",
    load "tmm6, [{first} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm7, [{second} + {row}]",
    dot "tmm1, tmm4, tmm7"
);
steps!(
    /// Sums are in registers 0 to 3.
    four_by_one, [first: 0]:
    load "tmm6, [{first} + {row}]",
    load "tmm4, [{acts} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 4096]",
    dot "tmm1, tmm5, tmm6",
    load "tmm4, [{acts} + {row} + 8192]",
    dot "tmm2, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 12288]",
    dot "tmm3, tmm5, tmm6"
);
steps!(
    /// Sums are in register 0, those of the second tile in 2.
    two_by_one, [first: 0]:
    load "tmm6, [{first} + {row}]",
    load "tmm4, [{acts} + {row}]",
    dot "tmm0, tmm4, tmm6",
    load "tmm5, [{acts} + {row} + 4096]",
    dot "tmm2, tmm5, tmm6"
);
steps!(
    /// Sums are in register 0.
    one_by_one, [first: 0]:
    load "tmm6, [{first} + {row}]",
    load "tmm4, [{acts} + {row}]",
    dot "tmm0, tmm4, tmm6"
);
steps!(
    /// Sums are in registers 0 to 2.
    one_by_three, [first: 0, second: 1, third: 2]:
    load "tmm3, [{acts} + {row}]",
    load "tmm4, [{first} + {row}]",
    dot "tmm0, tmm3, tmm4",
    load "tmm5, [{second} + {row}]",
    dot "tmm1, tmm3, tmm5",
    load "tmm6, [{third} + {row}]",
    dot "tmm2, tmm3, tmm6"
);

const _: () = assert!(ACTS_BYTES == 4096 && TILE_BYTES == 1024);

/// # Safety
/// As [`Products`](super::Products).
unsafe fn ternary(panel: &Panel, x: &Tiles, columns: Range<usize>, sums: &mut [Lanes<i32>]) {
    assert!(sums.len() == x.m() && columns.end <= x.k() && columns.len() <= COLUMNS);
    assert!(columns.start.is_multiple_of(SUPER_LEN) && columns.len().is_multiple_of(64));
    // The activations from row `t` on, codes, and tiles of 64 columns of each block of 256.
    let blocks = |t| {
        let starts = columns.clone().step_by(SUPER_LEN);
        starts.map({
            let columns = columns.clone();
            move |start| {
                let first = (start - columns.start) / 4;
                let codes = panel.codes[first..].as_ptr().cast::<u8>();
                let n = STEPS.min((columns.end - start) / 64);
                (x.lines(t, start).as_ptr().cast::<i8>(), codes, n)
            }
        })
    };
    // SAFETY: there are as many activations as sums; the rest is the caller's promise.
    let one = |t, tile: &mut Sums<i32>| unsafe {
        load_one(tile);
        for (acts, codes, n) in blocks(t) {
            one_by_one::<false>(acts, [codes], n);
        }
        store_one(tile);
    };
    let (whole, rest) = sums.as_chunks_mut::<LINES>();
    let mut t = 0;
    for tiles in whole.chunks_mut(4) {
        // SAFETY: there are as many activations and sums as that; the rest is the caller's promise.
        unsafe {
            if tiles.len() == 4 {
                load_four(tiles.as_ptr());
                for (acts, codes, n) in blocks(t) {
                    four_by_one::<false>(acts, [codes], n);
                }
                amx::store(tiles.as_mut_ptr());
            } else {
                for (i, tile) in tiles.iter_mut().enumerate() {
                    one(t + i * LINES, tile);
                }
            }
        }
        t += tiles.len() * LINES;
    }
    if !rest.is_empty() {
        let mut tile = Aligned([[0; super::ROWS]; LINES]);
        let Aligned(tile) = &mut tile;
        tile[..rest.len()].copy_from_slice(rest);
        one(t, tile);
        rest.copy_from_slice(&tile[..rest.len()]);
    }
}

/// Fills registers 0 to 3 with four tiles that follow one another.
///
/// # Safety
/// As [`amx::store`].
#[inline]
unsafe fn load_four(sums: *const Sums<i32>) {
    // SAFETY: the caller's promise.
    unsafe {
        tiles!(
            sums = sums;
            "tileloadd " => "tmm0, [{sums} + {row}]",
            "tileloadd " => "tmm1, [{sums} + {row} + 1024]",
            "tileloadd " => "tmm2, [{sums} + {row} + 2048]",
            "tileloadd " => "tmm3, [{sums} + {row} + 3072]"
        );
    }
}

/// Fills register 0.
///
/// # Safety
/// The machine has AMX, and tiles have shapes.
#[inline]
unsafe fn load_one(sums: &Sums<i32>) {
    // SAFETY: the caller's promise.
    unsafe {
        tiles!(
            sums = sums as *const Sums<i32>;
            "tileloadd " => "tmm0, [{sums} + {row}]"
        );
    }
}

/// Writes register 0.
///
/// # Safety
/// The machine has AMX, and tiles have shapes.
#[inline]
unsafe fn store_one(sums: &mut Sums<i32>) {
    // SAFETY: the caller's promise.
    unsafe {
        tiles!(
            sums = sums as *mut Sums<i32>;
            "tilestored " => "[{sums} + {row}], tmm0"
        );
    }
}

/// Codes of a block of 256 in the layout of a panel.
#[repr(C, align(64))]
struct Codes([[u8; amx::ROW_BYTES]; SUPER_LEN / 4]);

/// Sums of a tile in memory.
#[repr(C, align(64))]
struct Aligned(Sums<i32>);

/// What is multiplied at a time: tiles of activations from row `t` on, `n_tiles` of them.
#[derive(Clone, Copy)]
struct Unit {
    t: usize,
    n_tiles: usize,
    /// Which half of the columns, for kernels that take halves.
    half: usize,
}

/// Multiplies units, the sums of each of which are scaled while the next is multiplied: a quarter after each quarter, so that
/// the processor has both in sight.
///
/// `multiply` adds to registers 0 to 3; `scale` reads what was in them after the last quarter of its unit.
///
/// # Safety
/// The machine has AMX, and tiles have shapes.
#[inline(always)]
unsafe fn overlapped(
    units: impl Iterator<Item = Unit>,
    mut multiply: impl FnMut(Unit, usize),
    mut scale: impl FnMut(Unit, *const Aligned, usize),
) {
    let mut buffers = [const { MaybeUninit::<[Aligned; 4]>::uninit() }; 2];
    let mut last = None;
    for (i, unit) in units.enumerate() {
        // SAFETY: the caller's promise.
        unsafe { amx::clear() };
        for quarter in 0..4 {
            multiply(unit, quarter);
            if let Some((unit, sums)) = last {
                scale(unit, sums, quarter);
            }
        }
        let sums = buffers[i % 2].as_mut_ptr().cast::<Aligned>();
        // SAFETY: as above; four tiles are there.
        unsafe { amx::store(sums) };
        last = Some((unit, sums.cast_const()));
    }
    if let Some((unit, sums)) = last {
        for quarter in 0..4 {
            scale(unit, sums, quarter);
        }
    }
}

/// The most digits that a scale has.
const DIGITS: usize = 3;

/// Bits of a digit.
const DIGIT_BITS: u32 = 3;

/// How many digits scales have, in base 8, such that codes times digits are bytes.
const fn n_digits(max: usize, bias: u32) -> usize {
    match (max, bias) {
        // Scales up to 15.
        (3, 0) => 1,
        // Scales up to 63: codes times 7 are at most 217.
        (15 | 31, 0) => 2,
        // Scales from -32 to 31, codes from -4 to 3.
        (7, 2) => 2,
        // Scales from -128 to 127, codes from -32 to 31: with digits from -3 to 4 products are at least -128.
        (63, 5) => 3,
        _ => panic!("no such type"),
    }
}

/// # Safety
/// As [`Products`](super::Products).
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn add_super<const MAX: usize, const QUADS: usize, const BIAS: u32>(
    panel: &Panel,
    x: &Tiles,
    columns: Range<usize>,
    sums: &mut [Lanes<f32>],
) {
    let (m, start) = (x.m(), columns.start);
    assert!(sums.len() == m && columns.end <= x.k());
    assert!(start.is_multiple_of(SUPER_LEN) && columns.len() == SUPER_LEN);
    let mut codes = [const { MaybeUninit::<Codes>::uninit() }; DIGITS];
    scale_codes::<QUADS, BIAS>(panel, &mut codes[..const { n_digits(MAX, BIAS) }]);
    let [first, second, third] = codes.each_ref().map(|codes| codes.as_ptr().cast::<u8>());
    // Registers for sums are four.
    let n_tiles = const { if n_digits(MAX, BIAS) > 2 { 1 } else { 2 } };
    let units = (0..m).step_by(n_tiles * LINES).map(|t| Unit {
        t,
        n_tiles: n_tiles.min((m - t).div_ceil(LINES)),
        half: 0,
    });
    let multiply = |unit: Unit, step: usize| {
        let acts = x.lines(unit.t, start)[step * LINES..].as_ptr().cast();
        let [first, second, third] =
            [first, second, third].map(|codes| codes.wrapping_add(step * TILE_BYTES));
        // SAFETY: tiles have the shapes for 64 columns; a block of 256 is four tiles. Codes have as many digits.
        unsafe {
            match (const { n_digits(MAX, BIAS) }, unit.n_tiles) {
                (1, 1) => one_by_one::<false>(acts, [first], 1),
                (1, _) => two_by_one::<false>(acts, [first], 1),
                (2, 1) if BIAS == 0 => one_by_two::<false>(acts, [first, second], 1),
                (2, _) if BIAS == 0 => two_by_two::<false>(acts, [first, second], 1),
                (2, 1) => one_by_two::<true>(acts, [first, second], 1),
                (2, _) => two_by_two::<true>(acts, [first, second], 1),
                _ => one_by_three::<true>(acts, [first, second, third], 1),
            }
        }
    };
    let scale = |unit: Unit, products: *const Aligned, quarter: usize| {
        let len = unit.n_tiles * LINES / 4;
        let rows = quarter * len..(m - unit.t).min((quarter + 1) * len);
        if rows.is_empty() {
            return;
        }
        let sums = &mut sums[unit.t..][rows.clone()];
        let (first, at) = (rows.start, (unit.t, start));
        // SAFETY: this function's features; the products of these rows are there.
        unsafe {
            match const { n_digits(MAX, BIAS) } {
                1 => scale_products::<1, QUADS, BIAS>(panel, x, at, first, products, sums),
                2 => scale_products::<2, QUADS, BIAS>(panel, x, at, first, products, sums),
                _ => scale_products::<3, QUADS, BIAS>(panel, x, at, first, products, sums),
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { overlapped(units, multiply, scale) };
}

/// Scales the sums of a block of 256 from row and column `at` on, those from row `first` of these on, and adds them to `sums`;
/// less the sums of minimums, if `BIAS` is 0; by the formula of the kernels for other instruction sets. The sums of a digit `d`
/// of tile `i` are `products[2i + d]`.
///
/// # Safety
/// The machine has the features; products are there.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn scale_products<const N_DIGITS: usize, const QUADS: usize, const BIAS: u32>(
    panel: &Panel,
    x: &Tiles,
    (t, start): (usize, usize),
    first: usize,
    products: *const Aligned,
    sums: &mut [Lanes<f32>],
) {
    // SAFETY: this function's features.
    let load = |from: &Lanes<f32>| unsafe { _mm512_loadu_ps(from.as_ptr()) };
    let (d, dmin) = (load(&panel.d[0]), load(&panel.dmin));
    let mut offsets = (panel.offsets.each_ref()).map(|offsets| {
        // SAFETY: sixteen pairs fill a register.
        unsafe { _mm512_loadu_si512(offsets.as_ptr().cast()) }
    });
    // Pairs of 32 columns where these have one minimum: the same twice.
    let is_wide = QUADS == 8;
    if is_wide {
        for i in 0..4 {
            let (low, high) = (offsets[2 * i], offsets[2 * i + 1]);
            offsets[i] = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
        }
    }
    let offsets = &offsets[..if is_wide { 4 } else { 8 }];
    for (i, sums) in sums.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
        let tile = (t + first) / TILE + i;
        let pairs = match (BIAS, is_wide) {
            (0, true) => &x.wide_pairs(tile, start)[..offsets.len()],
            (0, false) => &x.pairs(tile, start)[..offsets.len()],
            _ => &[],
        };
        let steps = &x.scales(tile, start / SUPER_LEN)[0];
        for (r, sums) in sums.iter_mut().enumerate() {
            let row = first + i * TILE + r;
            let product = |digit| {
                // SAFETY: the caller's promise; sixteen sums fill a register.
                unsafe {
                    let tile = products.add(row / LINES * 2 + digit);
                    _mm512_load_si512((&raw const (*tile).0[row % LINES]).cast())
                }
            };
            let mut sum = product(0);
            if N_DIGITS > 1 {
                sum = _mm512_add_epi32(sum, _mm512_slli_epi32::<DIGIT_BITS>(product(1)));
            }
            if N_DIGITS > 2 {
                let scaled = _mm512_slli_epi32::<{ 2 * DIGIT_BITS }>(product(2));
                sum = _mm512_add_epi32(sum, scaled);
            }
            let step = _mm512_set1_ps(steps[r]);
            let mut sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(d, step));
            if BIAS == 0 {
                let mut offset = _mm512_setzero_si512();
                for (offsets, pairs) in offsets.iter().zip(pairs) {
                    offset = add_pairs(offset, *offsets, &pairs[r]);
                }
                let offset = _mm512_mul_ps(_mm512_cvtepi32_ps(offset), _mm512_mul_ps(dmin, step));
                sum = _mm512_sub_ps(sum, offset);
            }
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(load(sums), sum)) };
        }
    }
}

/// `sum + weights[0] · pair[0] + weights[1] · pair[1]` in each lane.
///
/// The compiler would make two instructions of it, for the sake of a shorter wait.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_pairs(mut sum: __m512i, weights: __m512i, pair: &[i16; 2]) -> __m512i {
    // SAFETY: the pair is read.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {weights}, dword ptr [{pair}]{{1to16}}",
            sum = inout(zmm_reg) sum,
            weights = in(zmm_reg) weights,
            pair = in(reg) pair,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    sum
}

/// Writes the codes of a panel times the digits of their scales, the lowest first; less 2^`BIAS` if that isn't 0.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
fn scale_codes<const QUADS: usize, const BIAS: u32>(
    panel: &Panel,
    digits: &mut [MaybeUninit<Codes>],
) {
    let n_digits = digits.len();
    let high = _mm512_set1_epi16(0xff00u16 as i16);
    for first in (0..SUPER_LEN / 4).step_by(QUADS) {
        // SAFETY: there are sixteen scales.
        let mut scales = unsafe { _mm512_loadu_si512(panel.scales[first / 4].as_ptr().cast()) };
        let mut factors = [_mm512_setzero_si512(); DIGITS];
        for (i, factor) in factors[..n_digits].iter_mut().enumerate() {
            let mut digit = scales;
            if i + 1 < n_digits {
                // From 0 to 7, or from -3 to 4.
                let least = _mm512_set1_epi32(if BIAS == 0 { 0 } else { 3 });
                let mask = _mm512_set1_epi32((1 << DIGIT_BITS) - 1);
                digit = _mm512_and_si512(_mm512_add_epi32(scales, least), mask);
                digit = _mm512_sub_epi32(digit, least);
                scales = _mm512_srai_epi32::<DIGIT_BITS>(_mm512_sub_epi32(scales, digit));
            }
            // Twice in 16 bits.
            let upper = _mm512_slli_epi32::<16>(digit);
            *factor = _mm512_mask_blend_epi16(0xaaaa_aaaa, digit, upper);
        }
        for quad in first..first + QUADS {
            // SAFETY: a quad of sixteen rows has 64 bytes, in the panel and in the result.
            unsafe {
                let mut codes = _mm512_loadu_si512(panel.codes[quad].as_ptr().cast());
                if BIAS != 0 {
                    codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(1 << BIAS));
                }
                let odd = _mm512_and_si512(codes, high);
                for (digits, factor) in digits.iter_mut().zip(factors) {
                    // The low byte of a product depends on low bytes only.
                    let even = _mm512_mullo_epi16(codes, factor);
                    let odd = _mm512_mullo_epi16(odd, factor);
                    let both = _mm512_mask_blend_epi8(0xaaaa_aaaa_aaaa_aaaa, even, odd);
                    let to = digits.as_mut_ptr().cast::<__m512i>().add(quad);
                    _mm512_store_si512(to, both);
                }
            }
        }
    }
}

/// Groups of 32 columns that are multiplied at a time: half of a panel.
const GROUPS: usize = 4;

/// # Safety
/// As [`Products`](super::Products).
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn add_small<const BIAS: i16>(
    panel: &Panel,
    x: &Tiles,
    columns: Range<usize>,
    sums: &mut [Lanes<f32>],
) {
    let (m, start) = (x.m(), columns.start);
    assert!(sums.len() == m && columns.end <= x.k() && start.is_multiple_of(SUPER_LEN));
    assert!(columns.len() <= SUPER_LEN && columns.len().is_multiple_of(32));
    let n_groups = columns.len() / 32;
    let mut codes = MaybeUninit::<Codes>::uninit();
    for (quad, biased) in panel.codes[..8 * n_groups].iter().enumerate() {
        // SAFETY: a quad of sixteen rows has 64 bytes, in the panel and in the result.
        unsafe {
            let biased = _mm512_loadu_si512(biased.as_ptr().cast());
            let signed = _mm512_sub_epi8(biased, _mm512_set1_epi8(BIAS as i8));
            _mm512_store_si512(codes.as_mut_ptr().cast::<__m512i>().add(quad), signed);
        }
    }
    let codes: *const u8 = codes.as_ptr().cast();
    let units = (0..m).step_by(LINES).flat_map(|t| {
        (0..n_groups.div_ceil(GROUPS)).map(move |half| Unit {
            t,
            n_tiles: 1,
            half,
        })
    });
    let multiply = |unit: Unit, group: usize| {
        let of_panel = unit.half * GROUPS + group;
        if of_panel >= n_groups {
            return;
        }
        let acts = x.lines(unit.t, start)[of_panel / 2 * LINES..].as_ptr();
        let acts = acts.cast::<i8>().wrapping_add(of_panel % 2 * 32);
        let codes = codes.wrapping_add(of_panel * (TILE_BYTES / 2));
        // SAFETY: tiles have the shapes for 32 columns, which are half of the line of a row.
        unsafe {
            match group {
                0 => first_group(acts, codes),
                1 => second_group(acts, codes),
                2 => third_group(acts, codes),
                _ => fourth_group(acts, codes),
            }
        }
    };
    let scale = |unit: Unit, products: *const Aligned, quarter: usize| {
        let rows = quarter * TILE..(m - unit.t).min((quarter + 1) * TILE);
        if rows.is_empty() {
            return;
        }
        let sums = &mut sums[unit.t..][rows.clone()];
        let first = unit.half * GROUPS;
        let d = &panel.d[first..];
        let steps = x.scales((unit.t + rows.start) / TILE, start / 32 + first);
        // SAFETY: this function's features; the products of these rows are there.
        unsafe {
            match n_groups - first {
                1 => scale_groups::<1>(d, steps, rows.start, products, sums),
                2 => scale_groups::<2>(d, steps, rows.start, products, sums),
                3 => scale_groups::<3>(d, steps, rows.start, products, sums),
                _ => scale_groups::<GROUPS>(d, steps, rows.start, products, sums),
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { overlapped(units, multiply, scale) };
}

/// The product of a tile of activations with a group of 32 columns of codes. Four groups have a register for their sums each,
/// and two for operands in turns.
macro_rules! multiply_group {
    ($name:ident: $load_acts:literal, $load_codes:literal, $dot:literal) => {
        /// # Safety
        /// Tiles have the shapes for 32 columns; the operands are there.
        #[inline]
        unsafe fn $name(acts: *const i8, codes: *const u8) {
            // SAFETY: the caller's promise.
            unsafe {
                tiles!(
                    acts = acts, codes = codes;
                    "tileloadd " => $load_acts,
                    "tileloadd " => $load_codes,
                    "tdpbssd " => $dot
                );
            }
        }
    };
}

multiply_group!(first_group: "tmm4, [{acts} + {row}]", "tmm6, [{codes} + {row}]", "tmm0, tmm4, tmm6");
multiply_group!(second_group: "tmm5, [{acts} + {row}]", "tmm7, [{codes} + {row}]", "tmm1, tmm5, tmm7");
multiply_group!(third_group: "tmm4, [{acts} + {row}]", "tmm6, [{codes} + {row}]", "tmm2, tmm4, tmm6");
multiply_group!(fourth_group: "tmm5, [{acts} + {row}]", "tmm7, [{codes} + {row}]", "tmm3, tmm5, tmm7");

/// Scales the sums of `N` groups of a tile of activations, of the four rows from `row` on, and adds them to `sums`, one group
/// after the other. `d` and `steps` are the groups' scales, of weights and activations; the sums of group `g` are
/// `products[g]`.
///
/// # Safety
/// The machine has the features; products are there.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn scale_groups<const N: usize>(
    d: &[Lanes<f32>],
    steps: &[[f32; TILE]],
    row: usize,
    products: *const Aligned,
    sums: &mut [Lanes<f32>],
) {
    // SAFETY: this function's features.
    let load = |from: &Lanes<f32>| unsafe { _mm512_loadu_ps(from.as_ptr()) };
    let d: [_; N] = std::array::from_fn(|g| load(&d[g]));
    let steps = steps.first_chunk::<N>().expect("every group has a scale");
    for (r, sums) in sums.iter_mut().enumerate().take(TILE) {
        let mut total = load(sums);
        for (g, (d, steps)) in d.iter().zip(steps).enumerate() {
            // SAFETY: the caller's promise; sixteen sums fill a register.
            let product =
                unsafe { _mm512_load_si512((&raw const (*products.add(g)).0[row + r]).cast()) };
            let scale = _mm512_mul_ps(*d, _mm512_set1_ps(steps[r]));
            let product = _mm512_mul_ps(_mm512_cvtepi32_ps(product), scale);
            total = _mm512_add_ps(total, product);
        }
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), total) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::test_data::Random;

    /// Codes times digits are bytes, whatever the codes and scales: tested without AMX, which few machines have.
    fn check<const MAX: usize, const QUADS: usize, const BIAS: u32>(scales: Range<i32>) {
        let mut random = Random::new(3);
        let mut panel = Box::new(Panel::EMPTY);
        for round in 0..64 {
            for code in panel.codes[..SUPER_LEN / 4]
                .as_flattened_mut()
                .as_flattened_mut()
            {
                // The largest and smallest in turn with others.
                *code = match random.below(4) {
                    0 => 0,
                    1 => MAX as u8,
                    _ => random.below(MAX as u32 + 1) as u8,
                };
            }
            for scale in panel.scales.as_flattened_mut() {
                *scale = match (round, random.below(4)) {
                    (0, _) | (_, 0) => scales.start,
                    (1, _) | (_, 1) => scales.end - 1,
                    _ => scales.start + random.below(scales.len() as u32) as i32,
                };
            }
            let mut digits = [const { MaybeUninit::<Codes>::uninit() }; DIGITS];
            let n = n_digits(MAX, BIAS);
            // SAFETY: the test runs where there is AVX-512.
            unsafe { scale_codes::<QUADS, BIAS>(&panel, &mut digits[..n]) };
            for quad in 0..SUPER_LEN / 4 {
                for (i, &code) in panel.codes[quad].as_flattened().iter().enumerate() {
                    let code = i32::from(code) - if BIAS == 0 { 0 } else { 1 << BIAS };
                    let scale = panel.scales[quad / QUADS * QUADS / 4][i / 4];
                    let sum: i32 = (digits[..n].iter().enumerate())
                        .map(|(d, digits)| {
                            // SAFETY: as many as were asked for are there.
                            let byte = unsafe { digits.assume_init_ref() }.0[quad][i];
                            let product = if BIAS == 0 {
                                i32::from(byte)
                            } else {
                                i32::from(byte as i8)
                            };
                            product << (DIGIT_BITS * d as u32)
                        })
                        .sum();
                    assert_eq!(sum, code * scale, "{code} times {scale}");
                }
            }
        }
    }

    #[test]
    fn codes_times_digits_of_scales_are_bytes() {
        if Isa::limited_to("avx512").is_none() {
            println!("skipped: no AVX-512");
            return;
        }
        check::<3, 4, 0>(0..16);
        check::<7, 4, 2>(-32..32);
        check::<15, 8, 0>(0..64);
        check::<31, 8, 0>(0..64);
        check::<63, 4, 5>(-128..128);
    }
}
