//! Products of panels in tiles of AMX: sixteen rows of activations with the sixteen rows of weights of a panel, 64 columns
//! at a time.
//!
//! A panel has the layout that the second operand needs; activations are in [`Order::Lines`](Order).
//! A tile's sums are integers, so integer scales within a block of 256 can't be applied in between. Instead, codes are
//! multiplied by the digits of their scales beforehand, once for all activations, and each digit has a product of its
//! own; that is exact, and so the bits are those of other instructions.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::kernels::scale_super;
use super::lanes::Lanes as _;
use super::x86::Avx512;
use super::{Kernel, Lanes, Panel};
use crate::amx;
use crate::gemm::activations::{LINES, TILE, Tiles};
use crate::quant::integers::SUPER_LEN;

const _: () = assert!(LINES == amx::ROWS && super::ROWS == amx::ROWS);

/// Bytes of a tile of activations or codes.
const TILE_BYTES: usize = amx::ROWS * amx::ROW_BYTES;

/// The sums of a tile.
type Sums<T> = [Lanes<T>; LINES];

/// Exact sums over all columns.
pub(super) const TERNARY: Kernel<i32> = Kernel {
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
        begin: amx::begin::<64>,
        end: amx::end,
        add: add_super::<MAX, QUADS, BIAS>,
    }
}

/// Groups of 32 codes, which are too large by `BIAS`, with one scale.
pub(super) const fn small_blocks<const BIAS: i16>() -> Kernel<f32> {
    Kernel {
        begin: amx::begin::<32>,
        end: amx::end,
        add: add_small::<BIAS>,
    }
}

/// # Safety
/// As [`Products`](super::Products).
unsafe fn ternary(panel: &Panel, x: &Tiles, columns: Range<usize>, sums: &mut [Lanes<i32>]) {
    assert!(sums.len() == x.m() && columns.end <= x.k() && columns.len().is_multiple_of(64));
    let n_steps = columns.len() / 64;
    let codes = panel.codes.as_ptr().cast();
    let acts = |t| x.lines(t, columns.start).as_ptr().cast();
    let (whole, rest) = sums.as_chunks_mut::<LINES>();
    let mut t = 0;
    for tiles in whole.chunks_mut(4) {
        let sums = tiles.as_mut_ptr();
        // SAFETY: there are as many activations and sums as that; the rest is the caller's promise.
        unsafe {
            if tiles.len() == 4 {
                let acts = [0, 1, 2, 3].map(|i| acts(t + i * LINES));
                add_four(codes, acts, n_steps, sums);
            } else {
                for i in 0..tiles.len() {
                    add_one(codes, acts(t + i * LINES), n_steps, sums.add(i));
                }
            }
        }
        t += tiles.len() * LINES;
    }
    if !rest.is_empty() {
        let mut tile = [[0; super::ROWS]; LINES];
        tile[..rest.len()].copy_from_slice(rest);
        // SAFETY: as above.
        unsafe { add_one(codes, acts(t), n_steps, &mut tile) };
        rest.copy_from_slice(&tile[..rest.len()]);
    }
}

/// Adds the products of codes and four tiles of activations over `n_steps` times 64 columns.
///
/// # Safety
/// Tiles have the shapes for 64 columns. There are `n_steps` tiles of codes and of each of the activations, at least
/// one, and four tiles of sums.
unsafe fn add_four(codes: *const u8, acts: [*const i8; 4], n_steps: usize, sums: *mut Sums<i32>) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {row}]",
            "tileloadd tmm1, [{sums} + {row} + 1024]",
            "tileloadd tmm2, [{sums} + {row} + 2048]",
            "tileloadd tmm3, [{sums} + {row} + 3072]",
            "2:",
            "tileloadd tmm6, [{codes} + {row}]",
            "tileloadd tmm4, [{a} + {row}]",
            "tdpbsud tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{b} + {row}]",
            "tdpbsud tmm1, tmm5, tmm6",
            "tileloadd tmm4, [{c} + {row}]",
            "tdpbsud tmm2, tmm4, tmm6",
            "tileloadd tmm5, [{d} + {row}]",
            "tdpbsud tmm3, tmm5, tmm6",
            "add {codes}, 1024",
            "add {a}, 1024",
            "add {b}, 1024",
            "add {c}, 1024",
            "add {d}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilestored [{sums} + {row} + 1024], tmm1",
            "tilestored [{sums} + {row} + 2048], tmm2",
            "tilestored [{sums} + {row} + 3072], tmm3",
            sums = in(reg) sums,
            codes = inout(reg) codes => _,
            a = inout(reg) acts[0] => _,
            b = inout(reg) acts[1] => _,
            c = inout(reg) acts[2] => _,
            d = inout(reg) acts[3] => _,
            steps = inout(reg) n_steps => _,
            row = in(reg) amx::ROW_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// As [`add_four`], for one tile of activations.
///
/// # Safety
/// As [`add_four`].
unsafe fn add_one(codes: *const u8, acts: *const i8, n_steps: usize, sums: *mut Sums<i32>) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {row}]",
            "2:",
            "tileloadd tmm4, [{acts} + {row}]",
            "tileloadd tmm6, [{codes} + {row}]",
            "tdpbsud tmm0, tmm4, tmm6",
            "add {codes}, 1024",
            "add {acts}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            sums = in(reg) sums,
            codes = inout(reg) codes => _,
            acts = inout(reg) acts => _,
            steps = inout(reg) n_steps => _,
            row = in(reg) amx::ROW_BYTES,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// Codes of a block of 256 in the layout of a panel.
#[repr(C, align(64))]
struct Codes([[u8; amx::ROW_BYTES]; SUPER_LEN / 4]);

/// Sums of a tile in memory.
#[repr(C, align(64))]
struct Aligned(Sums<i32>);

/// The most digits that a scale has.
const DIGITS: usize = 3;

/// Tiles of activations that are multiplied before their sums are scaled.
const TILES: usize = 4;

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
    assert!(sums.len() == x.m() && columns.end <= x.k() && columns.len() == SUPER_LEN);
    let n_digits = const { n_digits(MAX, BIAS) };
    let mut codes = [const { MaybeUninit::<Codes>::uninit() }; DIGITS];
    scale_codes::<QUADS, BIAS>(panel, &mut codes[..n_digits]);
    for (i, sums) in sums.chunks_mut(TILES * LINES).enumerate() {
        let first = i * TILES * (LINES / TILE);
        let codes = codes.as_ptr().cast();
        let mut products = MaybeUninit::<[Aligned; TILES * DIGITS]>::uninit();
        let to = products.as_mut_ptr().cast::<Aligned>();
        for t in 0..sums.len().div_ceil(LINES) {
            let acts = x
                .lines((i * TILES + t) * LINES, columns.start)
                .as_ptr()
                .cast();
            // SAFETY: tiles have the shapes for 64 columns; a block of 256 is four tiles.
            unsafe {
                let to = to.add(t * DIGITS);
                match (n_digits, BIAS, t % 2) {
                    (1, 0, _) => multiply_one_unsigned(codes, acts, to),
                    (2, 0, 0) => multiply_two_unsigned(codes, acts, to),
                    (2, 0, _) => multiply_next_two_unsigned(codes, acts, to),
                    (2, _, _) => multiply_two(codes, acts, to),
                    _ => multiply_three(codes, acts, to),
                }
            }
        }
        for (tile, sums) in sums.chunks_mut(TILE).enumerate() {
            // SAFETY: this function's features; rows come in whole tiles of four, and their products are there.
            unsafe {
                let mut totals = [Avx512::zero(); TILE];
                for (t, total) in totals.iter_mut().enumerate() {
                    let row = tile * TILE + t;
                    let products = to.add(row / LINES * DIGITS);
                    let product = |digit| Avx512::load_i(&(*products.add(digit)).0[row % LINES]);
                    *total = product(0);
                    if n_digits > 1 {
                        let scaled = _mm512_slli_epi32::<DIGIT_BITS>(product(1));
                        *total = _mm512_add_epi32(*total, scaled);
                    }
                    if n_digits > 2 {
                        let scaled = _mm512_slli_epi32::<{ 2 * DIGIT_BITS }>(product(2));
                        *total = _mm512_add_epi32(*total, scaled);
                    }
                }
                let (has_minimums, sums) = (BIAS == 0, sums.as_mut_ptr());
                let tile = first + tile;
                scale_super::<Avx512, TILE>(
                    has_minimums,
                    panel,
                    x,
                    tile,
                    columns.start,
                    totals,
                    sums,
                );
            }
        }
    }
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

/// The products of a tile of activations with codes, `digits` times four tiles: sums of each digit over all columns. Each
/// digit has a register for its sums; those of a tile and the next differ where there are enough, so that neither waits.
macro_rules! multiply {
    ($(#[$meta:meta])* $name:ident, $dot:literal, $acts:tt, $codes:tt, $($digit:literal: $sum:tt),*) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Tiles have the shapes for 64 columns; the operands are there.
        unsafe fn $name(codes: *const u8, acts: *const i8, sums: *mut Aligned) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    $(concat!("tilezero ", $sum),)*
                    "2:",
                    concat!("tileloadd ", $acts, ", [{acts} + {row}]"),
                    $(
                        concat!("tileloadd ", $codes, ", [{codes} + {row} + ", $digit, " * 4096]"),
                        concat!($dot, " ", $sum, ", ", $acts, ", ", $codes),
                    )*
                    "add {acts}, 1024",
                    "add {codes}, 1024",
                    "dec {steps}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {row} + ", $digit, " * 1024], ", $sum),)*
                    sums = in(reg) sums,
                    codes = inout(reg) codes => _,
                    acts = inout(reg) acts => _,
                    steps = inout(reg) SUPER_LEN * LINES / TILE_BYTES => _,
                    row = in(reg) amx::ROW_BYTES,
                    $(out($sum) _,)*
                    out($acts) _, out($codes) _,
                    options(nostack),
                );
            }
        }
    };
}

multiply!(
    /// One digit, unsigned codes.
    multiply_one_unsigned, "tdpbsud", "tmm4", "tmm6", 0: "tmm0"
);
multiply!(
    /// Two digits, unsigned codes.
    multiply_two_unsigned, "tdpbsud", "tmm4", "tmm6", 0: "tmm0", 1: "tmm1"
);
multiply!(
    /// The same for the next tile.
    multiply_next_two_unsigned, "tdpbsud", "tmm5", "tmm7", 0: "tmm2", 1: "tmm3"
);
multiply!(
    /// Two digits, signed codes.
    multiply_two, "tdpbssd", "tmm4", "tmm6", 0: "tmm0", 1: "tmm1"
);
multiply!(
    /// Three digits, signed codes.
    multiply_three, "tdpbssd", "tmm4", "tmm6", 0: "tmm0", 1: "tmm1", 2: "tmm2"
);

/// Groups of 32 in a panel at most.
const GROUPS: usize = SUPER_LEN / 32;

/// # Safety
/// As [`Products`](super::Products).
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn add_small<const BIAS: i16>(
    panel: &Panel,
    x: &Tiles,
    columns: Range<usize>,
    sums: &mut [Lanes<f32>],
) {
    assert!(sums.len() == x.m() && columns.end <= x.k() && columns.len() <= SUPER_LEN);
    assert!(columns.start.is_multiple_of(64) && columns.len().is_multiple_of(32));
    let n_groups = columns.len() / 32;
    let mut codes = MaybeUninit::<Codes>::uninit();
    for quad in 0..8 * n_groups {
        // SAFETY: a quad of sixteen rows has 64 bytes, in the panel and in the result.
        unsafe {
            let biased = _mm512_loadu_si512(panel.codes[quad].as_ptr().cast());
            let signed = _mm512_sub_epi8(biased, _mm512_set1_epi8(BIAS as i8));
            _mm512_store_si512(codes.as_mut_ptr().cast::<__m512i>().add(quad), signed);
        }
    }
    let codes: *const u8 = codes.as_ptr().cast();
    let mut products = MaybeUninit::<[Aligned; GROUPS]>::uninit();
    let products = products.as_mut_ptr().cast::<Aligned>();
    for (i, sums) in sums.chunks_mut(LINES).enumerate() {
        let acts: *const i8 = x.lines(i * LINES, columns.start).as_ptr().cast();
        for first in (0..n_groups).step_by(2) {
            // SAFETY: tiles have the shapes for 32 columns, which are half of the line of a row; behind an odd number
            // of groups there is memory for one more.
            unsafe {
                let codes = codes.add(first * (TILE_BYTES / 2));
                let acts = acts.add(first / 2 * TILE_BYTES);
                match first % 4 {
                    0 => multiply_groups(codes, acts, products.add(first)),
                    _ => multiply_next_groups(codes, acts, products.add(first)),
                }
            }
        }
        for (tile, sums) in sums.chunks_mut(TILE).enumerate() {
            let scales = x.scales(i * (LINES / TILE) + tile, columns.start / 32);
            // SAFETY: this function's features; rows come in whole tiles of four, and their products are there.
            unsafe {
                let mut totals = [Avx512::splat(0.0); TILE];
                for (total, sums) in totals.iter_mut().zip(&*sums) {
                    *total = Avx512::load_f(sums);
                }
                for (group, scales) in scales[..n_groups].iter().enumerate() {
                    let d = Avx512::load_f(&panel.d[group]);
                    for (t, total) in totals.iter_mut().enumerate() {
                        let sum = Avx512::load_i(&(*products.add(group)).0[tile * TILE + t]);
                        let scale = Avx512::mul(d, Avx512::splat(scales[t]));
                        *total = Avx512::add(*total, Avx512::mul(Avx512::to_f(sum), scale));
                    }
                }
                for (total, sums) in totals.into_iter().zip(sums) {
                    Avx512::store_f(sums, total);
                }
            }
        }
    }
}

/// The products of a tile of activations with two groups of 32 columns of codes. Functions with other registers don't wait
/// for each other.
macro_rules! multiply_groups {
    ($name:ident, $first:tt, $second:tt) => {
        /// # Safety
        /// Tiles have the shapes for 32 columns; the operands are there.
        unsafe fn $name(codes: *const u8, acts: *const i8, sums: *mut Aligned) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    concat!("tilezero ", $first),
                    concat!("tilezero ", $second),
                    "tileloadd tmm4, [{acts} + {row}]",
                    "tileloadd tmm6, [{codes} + {row}]",
                    concat!("tdpbssd ", $first, ", tmm4, tmm6"),
                    "tileloadd tmm5, [{acts} + {row} + 32]",
                    "tileloadd tmm7, [{codes} + {row} + 512]",
                    concat!("tdpbssd ", $second, ", tmm5, tmm7"),
                    concat!("tilestored [{sums} + {row}], ", $first),
                    concat!("tilestored [{sums} + {row} + 1024], ", $second),
                    sums = in(reg) sums,
                    codes = in(reg) codes,
                    acts = in(reg) acts,
                    row = in(reg) amx::ROW_BYTES,
                    out($first) _, out($second) _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags),
                );
            }
        }
    };
}

multiply_groups!(multiply_groups, "tmm0", "tmm1");
multiply_groups!(multiply_next_groups, "tmm2", "tmm3");

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
