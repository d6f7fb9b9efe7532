//! Arm instructions on bytes for which the standard library has no stable functions yet.
//!
//! They are inlined into functions that enable the features which they name.

use std::arch::aarch64::{int8x16_t, int32x4_t};
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
