//! The products of a panel, in terms of [`Lanes`].

use std::ops::Range;

use sterna_format::DType;

use super::lanes::{Acts, Lanes};
use super::portable::Portable;
use super::{Kernel, Lanes as Array, Panel, Products, ROWS};
use crate::gemm::activations::{Order, TILE, Tiles};
use crate::isa::{Isa, Level};
use crate::quant::integers::SUPER_LEN;

/// A kind of weights.
trait Family {
    /// What is accumulated from panel to panel.
    type Sum;

    /// Columns of a panel that are unpacked at a time.
    const COLUMNS: usize;

    /// The kernel for activations in [`Order::Lines`].
    #[cfg(target_arch = "x86_64")]
    const AMX: Kernel<Self::Sum>;

    /// Adds the products of a panel and `T` activation rows, whole tiles from `tile` on.
    ///
    /// # Safety
    /// As [`Products`]; `sums` are those of the `T` rows.
    unsafe fn add<S: Lanes, const T: usize>(
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        sums: *mut Array<Self::Sum>,
    );
}

/// Takes as many rows at a time as there are registers for the sums, `T`, and then the rest.
///
/// # Safety
/// As [`Products`].
#[inline(always)]
unsafe fn all<F: Family, S: Lanes, const T: usize>(
    panel: &Panel,
    x: &Tiles,
    columns: Range<usize>,
    sums: &mut [Array<F::Sum>],
) {
    assert!(sums.len() == x.m() && columns.end <= x.k());
    let n_tiles = x.m() / TILE;
    let mut tile = 0;
    while tile < n_tiles {
        let columns = columns.clone();
        let left = (n_tiles - tile) * TILE;
        // SAFETY: the caller's promise; there are as many sums as rows.
        unsafe {
            let sums = sums.as_mut_ptr().add(tile * TILE);
            if left >= T {
                F::add::<S, T>(panel, x, tile, columns, sums);
                tile += T / TILE;
            } else if left >= 8 {
                F::add::<S, 8>(panel, x, tile, columns, sums);
                tile += 2;
            } else {
                F::add::<S, 4>(panel, x, tile, columns, sums);
                tile += 1;
            }
        }
    }
}

fn kernel<F: Family>(isa: Isa, order: Order) -> Kernel<F::Sum> {
    match order {
        Order::Quads => Kernel {
            columns: F::COLUMNS,
            begin: nothing,
            end: nothing,
            add: products::<F>(isa),
        },
        #[cfg(target_arch = "x86_64")]
        Order::Lines => F::AMX,
    }
}

/// # Safety
/// Always safe.
unsafe fn nothing() {}

fn products<F: Family>(isa: Isa) -> Products<F::Sum> {
    #[cfg(target_arch = "aarch64")]
    use super::neon::{Neon, NeonDot};
    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
    use super::wasm::Relaxed;
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    use super::wasm::Simd128;
    #[cfg(target_arch = "x86_64")]
    use super::x86::{Avx2, Avx512, AvxVnni};

    /// # Safety
    /// As [`Products`].
    unsafe fn portable<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Portable, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Avx2, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,avxvnni")]
    unsafe fn avxvnni<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, AvxVnni, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
    unsafe fn avx512<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Avx512, 12>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "aarch64")]
    unsafe fn neon<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Neon, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn neon_dot<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, NeonDot, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    unsafe fn simd128<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Simd128, 4>(p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
    unsafe fn relaxed<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Array<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Relaxed, 4>(p, x, c, s) }
    }

    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::<F>,
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => avxvnni::<F>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Amx => avx512::<F>,
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::<F>,
        #[cfg(target_arch = "aarch64")]
        Level::NeonDot | Level::I8mm => neon_dot::<F>,
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Level::Simd128 => simd128::<F>,
        #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
        Level::Relaxed => relaxed::<F>,
        Level::Baseline => portable::<F>,
    }
}

/// The kernel for codes that are trits plus one.
pub(super) fn ternary(isa: Isa, order: Order) -> Kernel<i32> {
    kernel::<Ternary>(isa, order)
}

/// The kernel for blocks of integers; `None` if `dtype` has none.
pub(super) fn blocks(isa: Isa, order: Order, dtype: DType) -> Option<Kernel<f32>> {
    Some(match dtype {
        DType::Q2_K => kernel::<Super<3, 4, 0>>(isa, order),
        DType::Q3_K => kernel::<Super<7, 4, 2>>(isa, order),
        DType::Q4_K => kernel::<Super<15, 8, 0>>(isa, order),
        DType::Q5_K => kernel::<Super<31, 8, 0>>(isa, order),
        DType::Q6_K => kernel::<Super<63, 4, 5>>(isa, order),
        DType::Q4_0 => kernel::<Small<15, 8>>(isa, order),
        DType::Q5_0 => kernel::<Small<31, 16>>(isa, order),
        DType::Q8_0 => kernel::<Small<255, 128>>(isa, order),
        DType::Q1_0 => kernel::<Small<2, 1>>(isa, order),
        DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => kernel::<Small<3, 1>>(isa, order),
        _ => return None,
    })
}

/// What is added to the signed codes of a type to make them unsigned.
pub(super) fn bias(dtype: DType) -> i8 {
    match dtype {
        DType::Q3_K => 4,
        DType::Q6_K => 32,
        DType::Q4_0 => 8,
        DType::Q5_0 => 16,
        // Equivalent to 128: the bytes that wrap around are the same.
        DType::Q8_0 => -128,
        DType::Q1_0 | DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => 1,
        _ => 0,
    }
}

/// Exact sums over all columns.
struct Ternary;

impl Family for Ternary {
    type Sum = i32;

    const COLUMNS: usize = super::COLUMNS;

    #[cfg(target_arch = "x86_64")]
    const AMX: Kernel<i32> = super::amx::TERNARY;

    #[inline(always)]
    unsafe fn add<S: Lanes, const T: usize>(
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: *mut Array<i32>,
    ) {
        let acts = Acts::new(x, tile, columns.start);
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [S::zero(); T];
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = S::load_i(out.add(t));
            }
            S::add_dots::<T, 2>(&mut sums, panel.codes.as_ptr(), acts, columns.len() / 4);
            for (t, sum) in sums.into_iter().enumerate() {
                S::store_i(out.add(t), sum);
            }
        }
    }
}

/// One block of 256, of codes up to `MAX` whose every `QUADS` times four share an integer scale.
///
/// Codes are too large by 2^`BIAS`, or, if that is 0, have a minimum.
struct Super<const MAX: usize, const QUADS: usize, const BIAS: u32>;

impl<const MAX: usize, const QUADS: usize, const BIAS: u32> Family for Super<MAX, QUADS, BIAS> {
    type Sum = f32;

    const COLUMNS: usize = SUPER_LEN;

    #[cfg(target_arch = "x86_64")]
    const AMX: Kernel<f32> = super::amx::super_blocks::<MAX, QUADS, BIAS>();

    #[inline(always)]
    unsafe fn add<S: Lanes, const T: usize>(
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: *mut Array<f32>,
    ) {
        let acts = Acts::new(x, tile, columns.start);
        // SAFETY: the caller's promise; a block of 256 is 64 times four columns.
        unsafe {
            let mut sums = [S::zero(); T];
            for sub in 0..SUPER_LEN / 4 / QUADS {
                S::add_scaled_dots::<T, MAX>(
                    &mut sums,
                    panel.codes.as_ptr().add(sub * QUADS),
                    acts.skip(sub * QUADS),
                    QUADS,
                    &panel.scales[sub * QUADS / 4],
                );
            }
            if BIAS != 0 {
                for (t, sum) in sums.iter_mut().enumerate() {
                    let offset = offset::<S>(panel, x, tile, t, columns.start);
                    *sum = S::sub_shifted::<BIAS>(*sum, offset);
                }
            }
            scale_super::<S, T>(BIAS == 0, panel, x, tile, columns.start, sums, out);
        }
    }
}

/// The sum of activations times what belongs to the codes' offsets, of row `t` from a tile on.
///
/// # Safety
/// As [`Lanes`]; the rows and columns are there.
#[inline(always)]
unsafe fn offset<S: Lanes>(panel: &Panel, x: &Tiles, tile: usize, t: usize, start: usize) -> S::I {
    let pairs = &x.pairs(tile + t / TILE, start)[..panel.offsets.len()];
    // SAFETY: the caller's promise.
    unsafe {
        let mut offset = S::zero();
        for (offsets, pairs) in panel.offsets.iter().zip(pairs) {
            offset = S::add_pairs(offset, offsets, pairs[t % TILE]);
        }
        offset
    }
}

/// Scales the sums of `T` rows over the block of 256 from column `start` on, and adds them to `out`; less the sums of
/// minimums, if the type has them.
///
/// # Safety
/// As [`Products`]; `out` are the sums of the `T` rows.
#[inline(always)]
unsafe fn scale_super<S: Lanes, const T: usize>(
    has_minimums: bool,
    panel: &Panel,
    x: &Tiles,
    tile: usize,
    start: usize,
    sums: [S::I; T],
    out: *mut Array<f32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (d, dmin) = (S::load_f(&panel.d[0]), S::load_f(&panel.dmin));
        for (t, sum) in sums.into_iter().enumerate() {
            let scales = x.scales(tile + t / TILE, start / SUPER_LEN);
            let dx = S::splat(scales[0][t % TILE]);
            let mut product = S::mul(S::to_f(sum), S::mul(d, dx));
            if has_minimums {
                let offset = S::to_f(offset::<S>(panel, x, tile, t, start));
                product = S::sub(product, S::mul(offset, S::mul(dmin, dx)));
            }
            let out = out.add(t);
            S::store_f(out, S::add(S::load_f(out), product));
        }
    }
}

/// Groups of 32 codes up to `MAX`, which are too large by `BIAS`, with one scale.
struct Small<const MAX: usize, const BIAS: i16>;

impl<const MAX: usize, const BIAS: i16> Family for Small<MAX, BIAS> {
    type Sum = f32;

    const COLUMNS: usize = SUPER_LEN;

    #[cfg(target_arch = "x86_64")]
    const AMX: Kernel<f32> = super::amx::small_blocks::<BIAS>();

    #[inline(always)]
    unsafe fn add<S: Lanes, const T: usize>(
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: *mut Array<f32>,
    ) {
        let acts = Acts::new(x, tile, columns.start);
        let signed = MAX == 255 && S::SIGNED_BYTES;
        let bias = [[if signed { 0 } else { -BIAS }; 2]; ROWS];
        let n_groups = columns.len() / 32;
        // At most twelve rows are computed at a time.
        let (mut pairs, mut scales) = ([&[][..]; 3], [&[][..]; 3]);
        for i in 0..T / TILE {
            pairs[i] = &x.pairs(tile + i, columns.start)[..n_groups];
            scales[i] = &x.scales(tile + i, columns.start / 32)[..n_groups];
        }
        // SAFETY: the caller's promise.
        unsafe {
            let mut totals = [S::splat(0.0); T];
            for (t, total) in totals.iter_mut().enumerate() {
                *total = S::load_f(out.add(t));
            }
            for group in 0..n_groups {
                let mut sums = [S::zero(); T];
                for (t, sum) in sums.iter_mut().enumerate() {
                    *sum = S::add_pairs(*sum, &bias, pairs[t / TILE][group][t % TILE]);
                }
                let codes = panel.codes.as_ptr().add(group * 8);
                S::add_dots::<T, MAX>(&mut sums, codes, acts.skip(group * 8), 8);
                let d = S::load_f(&panel.d[group]);
                for (t, total) in totals.iter_mut().enumerate() {
                    let dx = S::splat(scales[t / TILE][group][t % TILE]);
                    *total = S::add(*total, S::mul(S::to_f(sums[t]), S::mul(d, dx)));
                }
            }
            for (t, total) in totals.into_iter().enumerate() {
                S::store_f(out.add(t), total);
            }
        }
    }
}
