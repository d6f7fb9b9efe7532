//! The products of a panel, in terms of [`Dots`].

use std::ops::Range;

use sterna_format::DType;

use super::dots::{Acts, Dots};
use super::{Kernel, Lanes, Panel, Products, ROWS};
use crate::gemm::activations::{Order, TILE, Tiles};
use crate::isa::{Isa, Level};
use crate::quant::integers::SUPER_LEN;
use crate::simd::{Floats, Ints, Portable};

/// A kind of weights.
trait Family {
    /// What is accumulated from panel to panel.
    type Sum;

    /// Columns of a panel that are unpacked at a time.
    const COLUMNS: usize;

    /// The kernel for activations in [`Order::Lines`].
    #[cfg(target_arch = "x86_64")]
    const AMX: Kernel<Self::Sum>;

    /// The kernel for activations in [`Order::Sixteens`], which trits have.
    #[cfg(target_arch = "aarch64")]
    const SME: Option<Kernel<Self::Sum>> = None;

    /// Adds the products of a panel and `T` activation rows, whole tiles from `tile` on.
    ///
    /// # Safety
    /// As [`Products`].
    unsafe fn add<S: Dots, const T: usize>(
        simd: S,
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        sums: &mut [Lanes<Self::Sum>; T],
    );
}

/// Takes as many rows at a time as there are registers for the sums, `T`, and then the rest.
///
/// # Safety
/// As [`Products`].
#[inline(always)]
unsafe fn all<F: Family, S: Dots, const T: usize>(
    simd: S,
    panel: &Panel,
    x: &Tiles,
    columns: Range<usize>,
    sums: &mut [Lanes<F::Sum>],
) {
    assert!(sums.len() == x.m() && columns.end <= x.k());
    let mut tile = 0;
    let (most, rest) = sums.as_chunks_mut::<T>();
    let (eights, rest) = rest.as_chunks_mut::<8>();
    let (fours, _) = rest.as_chunks_mut::<4>();
    // SAFETY: the caller's promise; there are as many sums as rows.
    unsafe {
        for sums in most {
            F::add::<S, T>(simd, panel, x, tile, columns.clone(), sums);
            tile += T / TILE;
        }
        for sums in eights {
            F::add::<S, 8>(simd, panel, x, tile, columns.clone(), sums);
            tile += 2;
        }
        for sums in fours {
            F::add::<S, 4>(simd, panel, x, tile, columns.clone(), sums);
            tile += 1;
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
        #[cfg(target_arch = "aarch64")]
        Order::Sixteens => F::SME.expect("activations of blocks are in another order"),
    }
}

/// # Safety
/// Always safe.
pub(super) unsafe fn nothing() {}

fn products<F: Family>(isa: Isa) -> Products<F::Sum> {
    #[cfg(target_arch = "aarch64")]
    use crate::simd::neon::{Neon, NeonDot};
    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
    use crate::simd::wasm::Relaxed;
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    use crate::simd::wasm::Simd128;
    #[cfg(target_arch = "x86_64")]
    use crate::simd::x86::{Avx2, Avx512, AvxVnni};

    /// # Safety
    /// As [`Products`].
    unsafe fn portable<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Portable, 4>(Portable, p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn avx2<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Avx2, 4>(Avx2::new(), p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn avxvnni<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, AvxVnni, 4>(AvxVnni::new(), p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn avx512<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Avx512, 12>(Avx512::new(), p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "aarch64")]
    unsafe fn neon<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Neon, 4>(Neon::new(), p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(target_arch = "aarch64")]
    #[target_feature(enable = "dotprod")]
    unsafe fn neon_dot<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, NeonDot, 4>(NeonDot::new(), p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    unsafe fn simd128<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Simd128, 4>(Simd128, p, x, c, s) }
    }

    /// # Safety
    /// As [`Products`].
    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
    unsafe fn relaxed<F: Family>(p: &Panel, x: &Tiles, c: Range<usize>, s: &mut [Lanes<F::Sum>]) {
        // SAFETY: the caller's promise.
        unsafe { all::<F, Relaxed, 4>(Relaxed, p, x, c, s) }
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
        Level::NeonDot | Level::I8mm | Level::Sme => neon_dot::<F>,
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

    #[cfg(target_arch = "aarch64")]
    const SME: Option<Kernel<i32>> = Some(super::sme::TERNARY);

    #[inline(always)]
    unsafe fn add<S: Dots, const T: usize>(
        simd: S,
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: &mut [Lanes<i32>; T],
    ) {
        let acts = Acts::new(x, tile, columns.start);
        let mut sums = [simd.zero(); T];
        for (sum, out) in sums.iter_mut().zip(&*out) {
            *sum = simd.load_i(out);
        }
        let codes = &panel.codes[..columns.len() / 4];
        // SAFETY: the caller's promise.
        unsafe { simd.add_dots::<T, 2>(&mut sums, codes, acts) };
        for (sum, out) in sums.into_iter().zip(out) {
            sum.store(out);
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
    unsafe fn add<S: Dots, const T: usize>(
        simd: S,
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: &mut [Lanes<f32>; T],
    ) {
        let acts = Acts::new(x, tile, columns.start);
        let mut sums = [simd.zero(); T];
        let codes = panel.codes[..SUPER_LEN / 4].chunks_exact(QUADS);
        for (sub, codes) in codes.enumerate() {
            // SAFETY: the caller's promise; a block of 256 is 64 times four columns.
            unsafe {
                let (acts, scales) = (acts.skip(sub * QUADS), &panel.scales[sub * QUADS / 4]);
                simd.add_scaled_dots::<T, MAX>(&mut sums, codes, acts, scales);
            }
        }
        if BIAS != 0 {
            for (t, sum) in sums.iter_mut().enumerate() {
                let offset = offset(simd, panel, x, tile, t, columns.start);
                *sum = *sum - offset.shift_left::<BIAS>();
            }
        }
        scale_super(simd, BIAS == 0, panel, x, tile, columns.start, sums, out);
    }
}

/// The sum of activations times what belongs to the codes' offsets, of row `t` from a tile on.
#[inline(always)]
fn offset<S: Dots>(simd: S, panel: &Panel, x: &Tiles, tile: usize, t: usize, start: usize) -> S::I {
    let pairs = &x.pairs(tile + t / TILE, start)[..panel.offsets.len()];
    let mut offset = simd.zero();
    for (offsets, pairs) in panel.offsets.iter().zip(pairs) {
        offset = simd.add_pairs(offset, offsets, pairs[t % TILE]);
    }
    offset
}

/// Scales the sums of `T` rows over the block of 256 from column `start` on, and adds them to `out`; less the sums of
/// minimums, if the type has them.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn scale_super<S: Dots, const T: usize>(
    simd: S,
    has_minimums: bool,
    panel: &Panel,
    x: &Tiles,
    tile: usize,
    start: usize,
    sums: [S::I; T],
    out: &mut [Lanes<f32>; T],
) {
    let (d, dmin) = (simd.load(&panel.d[0]), simd.load(&panel.dmin));
    for ((t, sum), out) in sums.into_iter().enumerate().zip(out) {
        let scales = x.scales(tile + t / TILE, start / SUPER_LEN);
        let dx = simd.splat(scales[0][t % TILE]);
        let mut product = sum.to_f() * (d * dx);
        if has_minimums {
            let offset = offset(simd, panel, x, tile, t, start).to_f();
            product = product - offset * (dmin * dx);
        }
        (simd.load(out) + product).store(out);
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
    unsafe fn add<S: Dots, const T: usize>(
        simd: S,
        panel: &Panel,
        x: &Tiles,
        tile: usize,
        columns: Range<usize>,
        out: &mut [Lanes<f32>; T],
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
        let mut totals = [simd.splat(0.0); T];
        for (total, out) in totals.iter_mut().zip(&*out) {
            *total = simd.load(out);
        }
        let codes = panel.codes[..n_groups * 8].chunks_exact(8);
        for (group, codes) in codes.enumerate() {
            let mut sums = [simd.zero(); T];
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = simd.add_pairs(*sum, &bias, pairs[t / TILE][group][t % TILE]);
            }
            // SAFETY: the caller's promise.
            unsafe { simd.add_dots::<T, MAX>(&mut sums, codes, acts.skip(group * 8)) };
            let d = simd.load(&panel.d[group]);
            for (t, total) in totals.iter_mut().enumerate() {
                let dx = simd.splat(scales[t / TILE][group][t % TILE]);
                *total = *total + sums[t].to_f() * (d * dx);
            }
        }
        for (total, out) in totals.into_iter().zip(out) {
            total.store(out);
        }
    }
}
