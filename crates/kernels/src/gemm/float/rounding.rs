//! Activations for float products: rounded so that products are exact.
//!
//! # Why
//!
//! Some machines fuse a multiplication with the addition that follows, some can't, and the results
//! differ in the last bit, unless the product is exact: then fused and unfused both give the exact
//! sum rounded once. A product of numbers with `a` and `b` significant bits has at most `a + b`, and
//! f32 holds 24. So activations keep 13 bits with f16 weights, which have 11, and 16 bits with
//! bf16 weights, which have 8. (Engines that round activations to the type of the weights keep 11 and
//! 8.)
//!
//! That many bits are not enough if a product is too large for f32 or too small for its last bit. To
//! exclude both, a row of activations is first multiplied by a power of two that takes its largest
//! magnitude into [½, 1), and the result of the product by the inverse. After that:
//!
//! - Magnitudes are at most 1, also when rounded up, so a product is no larger than the weight.
//! - Magnitudes below 2^-32 become 0. They are too far below the largest one to be seen in a sum of
//!   24 bits. Those that are left are multiples of 2^-47 with 16 bits, of 2^-44 with 13.
//! - f16 weights are multiples of 2^-24, so all products are multiples of 2^-68.
//! - bf16 weights below 2^-95 count as 0 ([`MIN_BF16`]): the others are multiples of 2^-102, so all
//!   products are multiples of 2^-149, which f32 holds. Which weights these are is seen from the upper
//!   three bits of the exponent. Trained weights aren't that small.
//!
//! The sums may still overflow, and do so identically on all paths, because each step rounds the same exact
//! value. Activations that are NaN, infinite, or 2^127 and above make a whole row NaN, as 0 · ∞ would;
//! weights that are NaN or infinite go into their sums as such, identically with and without fusing.

use super::lanes::{Group, LANES};
use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError};

/// The bits that are set in a bf16 weight that isn't flushed: the upper three of the exponent.
pub(super) const BF16_EXPONENT: i16 = 0x7000;

/// Smaller bf16 weights are flushed to 0: 2^-95.
#[cfg(test)]
pub(super) const MIN_BF16: f32 = f32::from_bits(32 << 23);

/// The bf16 weight with these bits, after flushing.
#[inline(always)]
pub(super) fn bf16_weight(bits: u16) -> f32 {
    let counts = bits & BF16_EXPONENT as u16 != 0;
    f32::from_bits(if counts { u32::from(bits) << 16 } else { 0 })
}

/// The precision of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gemm) enum Precision {
    /// Unrounded.
    Full,
    /// 16 significant bits of values that are not negligible next to the largest: for bf16 weights.
    Bits16,
    /// 13 of them: for f16 weights.
    Bits13,
}

/// Activation rows in f32, padded to whole groups: `x[t, j] ≈ values[t, j] · scale[t]`.
#[derive(Debug, Default)]
pub(in crate::gemm) struct FloatRows {
    /// Groups of a row.
    n_groups: usize,
    /// `[m, n_groups]`, padded with zeros.
    groups: Vec<Group>,
    /// `[m]`; powers of two.
    scales: Vec<f32>,
}

/// Elements per task.
const ELEMENTS_PER_TASK: usize = 1 << 14;

impl FloatRows {
    /// Rounds `x`, `[m, k]`.
    ///
    /// Errors: [`ShapeError`] if `x` isn't whole rows.
    pub(in crate::gemm) fn round(
        &mut self,
        exec: &Exec,
        precision: Precision,
        x: &[f32],
        k: usize,
    ) -> Result<(), ShapeError> {
        let m = shape::rows("round: activations", x.len(), k)?;
        let n_groups = k.div_ceil(LANES);
        self.n_groups = n_groups;
        self.groups.resize(m * n_groups, Group::default());
        self.scales.resize(m, 1.0);
        let groups = SharedSlice::new(&mut self.groups);
        let scales = SharedSlice::new(&mut self.scales);
        let rows_per_task = ELEMENTS_PER_TASK.div_ceil(k.max(1));
        exec.pool.for_ranges(m, rows_per_task, |rows| {
            for t in rows {
                // SAFETY: each row belongs to one task.
                let (groups, scale) = unsafe {
                    (
                        groups.range_mut(t * n_groups..(t + 1) * n_groups),
                        scales.range_mut(t..t + 1),
                    )
                };
                scale[0] = round_row(exec.isa, precision, &x[t * k..][..k], groups);
            }
        });
        Ok(())
    }

    /// Rows.
    pub(super) fn m(&self) -> usize {
        self.scales.len()
    }

    /// Groups of a row.
    pub(super) fn n_groups(&self) -> usize {
        self.n_groups
    }

    /// The values of row `t`. Panics if there is none.
    pub(super) fn row(&self, t: usize) -> &[Group] {
        &self.groups[t * self.n_groups..][..self.n_groups]
    }

    /// Row `t` in the layout for products, without rounding, padded with zeros. Panics if there is none.
    pub(in crate::gemm) fn values(&self, t: usize) -> impl Iterator<Item = f64> {
        let scale = f64::from(self.scale(t));
        let values = self.row(t).iter().flat_map(|group| group.0);
        values.map(move |value| f64::from(value) * scale)
    }

    /// The scale of the values of row `t`. Panics if there is none.
    pub(super) fn scale(&self, t: usize) -> f32 {
        self.scales[t]
    }
}

multiversion! {
    /// Writes a row, and returns the scale of its values.
    fn round_row(precision: Precision, x: &[f32], out: &mut [Group]) -> f32 {
        let out = out.as_flattened_lanes();
        let (out, padding) = out.split_at_mut(x.len());
        padding.fill(0.0);
        match precision {
            Precision::Full => {
                out.copy_from_slice(x);
                1.0
            }
            Precision::Bits16 => round_to::<16>(x, out),
            Precision::Bits13 => round_to::<13>(x, out),
        }
    }
}

const EXPONENT_AT: u32 = 23;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Exponent field of the numbers in [½, 1).
const BELOW_ONE: u32 = 126;

/// How far below a row's largest exponent activations are kept: down to 2^-32.
const DEPTH: u32 = BELOW_ONE - (127 - 32);

/// Rounds to `BITS` significant bits and the largest magnitude into [½, 1); returns the inverse power of two.
#[inline(always)]
fn round_to<const BITS: u32>(x: &[f32], out: &mut [f32]) -> f32 {
    let dropped = 24 - BITS;
    let half = (1 << (dropped - 1)) - 1;
    // Magnitudes of floats compare like their bits, with NaN above infinity.
    let max = x
        .iter()
        .fold(0, |max: u32, x| max.max(x.to_bits() & MAGNITUDE));
    // Smaller rows are close to zero throughout: what is left of them is normal.
    let exponent = (max >> EXPONENT_AT).max(DEPTH + 1);
    if exponent > 253 {
        out.fill(f32::NAN);
        return 1.0;
    }
    let shift = exponent.wrapping_sub(BELOW_ONE) << EXPONENT_AT;
    let least = (exponent - DEPTH) << EXPONENT_AT;
    for (out, x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let magnitude = bits & MAGNITUDE;
        // Half a unit, or just below where the last bit kept is even: halves go to even. A carry into the
        // exponent is correct.
        let rounded = magnitude + half + ((magnitude >> dropped) & 1);
        let rounded = rounded >> dropped << dropped;
        let kept = if rounded >= least {
            rounded.wrapping_sub(shift)
        } else {
            0
        };
        *out = f32::from_bits(bits & !MAGNITUDE | kept);
    }
    f32::from_bits((exponent + 1) << EXPONENT_AT)
}

/// Groups as one slice of values.
trait Flatten {
    fn as_flattened_lanes(&mut self) -> &mut [f32];
}

impl Flatten for [Group] {
    #[inline(always)]
    fn as_flattened_lanes(&mut self) -> &mut [f32] {
        // SAFETY: a `Group` is `LANES` values and nothing else (`repr(C)`, and its size, a multiple
        // of its alignment, leaves no room).
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len() * LANES) }
    }
}

const _: () = assert!(size_of::<Group>() == LANES * size_of::<f32>());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{Random, exec_matrix, floats};

    /// Rounded values times their scale.
    fn rounded(exec: &Exec, precision: Precision, x: &[f32]) -> (Vec<f32>, f32) {
        let mut rows = FloatRows::default();
        rows.round(exec, precision, x, x.len()).unwrap();
        let values = rows.row(0).iter().flat_map(|g| g.0).collect::<Vec<f32>>();
        assert!(values[x.len()..].iter().all(|v| v.to_bits() == 0));
        (values[..x.len()].to_vec(), rows.scale(0))
    }

    #[test]
    fn values_are_the_nearest_of_so_many_bits() {
        for exec in exec_matrix() {
            for (precision, bits) in [(Precision::Bits16, 16), (Precision::Bits13, 13)] {
                let mut x = floats(1000, 3);
                x[0] = -1e-3;
                x[1] = 0.0;
                for exponent in [0, -90, 100] {
                    let factor = 2f32.powi(exponent);
                    let x: Vec<f32> = x.iter().map(|x| x * factor).collect();
                    let (values, scale) = rounded(&exec, precision, &x);
                    let max = values.iter().fold(0f32, |m, v| m.max(v.abs()));
                    assert!((0.5..=1.0).contains(&max));
                    for (&x, &value) in x.iter().zip(&values) {
                        // Rounding to a multiple of the last bit kept.
                        let mut want = f64::from(x);
                        if x != 0.0 {
                            let unit = 2f64.powi(want.abs().log2().floor() as i32 + 1 - bits);
                            want = (want / unit).round_ties_even() * unit;
                        }
                        assert_eq!(f64::from(value) * f64::from(scale), want, "{x}");
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_exact_for_all_weights() {
        let exec = Exec::new(1, crate::Isa::detect());
        let mut random = Random::new(11);
        for round in 0..200 {
            // Any bits at all, then rows of a few neighbouring exponents.
            let mut x: Vec<f32> = (0..64)
                .map(|_| {
                    let bits = random.next() << 1 ^ random.next();
                    let exponent = (random.below(40) + round) % 253;
                    f32::from_bits(if round % 2 == 0 {
                        bits % (253 << 23)
                    } else {
                        bits & 0x807f_ffff | exponent << 23
                    })
                })
                .collect();
            x[0] = f32::from_bits((random.below(253) << 23) | 0x7f_ffff);
            for (precision, decode) in [
                (Precision::Bits16, bf16_weight as fn(u16) -> f32),
                (Precision::Bits13, crate::quant::f16_to_f32),
            ] {
                let (values, _) = rounded(&exec, precision, &x);
                for &value in &values {
                    for _ in 0..50 {
                        let w = decode(random.next() as u16);
                        if !w.is_finite() {
                            continue;
                        }
                        let product = f64::from(w) * f64::from(value);
                        assert_eq!(f64::from(w * value), product, "{w:e} · {value:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_smallest_products_are_exact() {
        let exec = Exec::new(1, crate::Isa::detect());
        // One and a half units in the last place of the smallest value that is kept.
        let small = f32::from_bits(((127 - 32) << 23) + (1 << 8));
        let (values, _) = rounded(&exec, Precision::Bits16, &[0.75, small, small / 2.0]);
        assert_eq!(values, [0.75, small, 0.0]);
        let w = bf16_weight(32 << 7 | 1);
        assert!(w > MIN_BF16 && bf16_weight((32 << 7) - 1) == 0.0);
        assert_eq!(f64::from(w * small), f64::from(w) * f64::from(small));
    }

    #[test]
    fn rows_beyond_the_range_are_no_numbers_and_tiny_ones_are_zero() {
        let exec = Exec::new(1, crate::Isa::detect());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.8e38] {
            let (values, _) = rounded(&exec, Precision::Bits13, &[1.0, bad]);
            assert!(values.iter().all(|v| v.is_nan()));
        }
        let (values, scale) = rounded(&exec, Precision::Bits13, &[1e-40, -1e-38, 2e-29]);
        assert_eq!(values[..1], [0.0]);
        assert!((values[2] * scale - 2e-29).abs() < 1e-32);
        let (values, scale) = rounded(&exec, Precision::Full, &[1e-40, f32::INFINITY]);
        assert_eq!((values, scale), (vec![1e-40, f32::INFINITY], 1.0));
    }
}
