//! Arm instructions for which the standard library has no stable functions yet.
//!
//! Those that need a feature are inlined into functions that enable it.

use std::arch::aarch64::{float32x4_t, int8x16_t, int32x4_t, uint16x4_t};
use std::arch::asm;

/// `sums[i] + Σ_j a[4i + j] · b[4i + j]` for each of the four lanes; the sums wrap.
///
/// # Safety
/// The machine has the feature `dotprod`, and the caller enables it.
#[inline(always)]
pub(crate) unsafe fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction exists by the caller's promise, and touches nothing but its registers.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// `sums[i] + Σ_j a[4i + j] · b[4 · LANE + j]` for each of the four lanes; the sums wrap.
///
/// # Safety
/// The machine has the feature `dotprod`, and the caller enables it.
#[inline(always)]
pub(crate) unsafe fn sdot_lane<const LANE: usize>(
    mut sums: int32x4_t,
    a: int8x16_t,
    b: int8x16_t,
) -> int32x4_t {
    // SAFETY: the instruction exists by the caller's promise, and touches nothing but its registers.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// `sums[2i + j] + Σ_l a[8i + l] · b[8j + l]`: `a` and `b` are `[2, 8]`, the sums `[2, 2]` and wrap.
///
/// # Safety
/// The machine has the feature `i8mm`, and the caller enables it.
#[inline(always)]
pub(crate) unsafe fn smmla(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction exists by the caller's promise, and touches nothing but its registers.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Four f16, given as their bits, exactly.
#[inline(always)]
pub(crate) fn widen_halves(bits: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: every machine of this target has the instruction, which touches nothing but registers.
    unsafe {
        asm!(
            "fcvtl {floats:v}.4s, {bits:v}.4h",
            floats = lateout(vreg) floats,
            bits = in(vreg) bits,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    floats
}

/// Prefetches the line of `at` into the nearest cache. It need not be in any allocation.
#[inline(always)]
pub(crate) fn prefetch_first(at: *const u8) {
    // SAFETY: every machine of this target has the instruction, which touches nothing.
    unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
}

/// Prefetches the line of `at` into the second-level cache. It need not be in any allocation.
#[inline(always)]
pub(crate) fn prefetch_second(at: *const u8) {
    // SAFETY: every machine of this target has the instruction, which touches nothing.
    unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
}
