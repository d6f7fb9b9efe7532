//! Int8 activations, as BitLinear layers were trained: one scale per row.

/// Smallest divisor; keeps rows of zeros finite.
const MIN_ABSMAX: f32 = 1e-5;

/// Adding this rounds to an integer, halves to even, and leaves the integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Number of maxima, because the compiler doesn't split a maximum of floats by itself.
const LANES: usize = 32;

/// Quantises one row, `q = clamp(round_half_even(x · scale), −128, 127)`, and returns `scale` and
/// `Σ q`.
///
/// The scale is `127 / max(absmax, 1e-5)`, computed as 127 times the reciprocal; dividing by it dequantizes.
/// The sum turns a dot product with codes 0, 1, 2 into one with −1, 0, +1.
///
/// Shapes: `x` and `q` are `[k]`; the shorter one decides if they differ, and the rest of `q` is
/// left alone. All arithmetic is in f32 and gives the bits that PyTorch gives for
/// `s = 127 / absmax.clamp(min=1e-5); (x * s).round().clamp(-128, 127)`, which divides a number by a
/// tensor by way of the reciprocal. Every order of evaluation gives the same bits.
///
/// Never panics. NaN quantises to 0 and does not count towards the maximum. An infinite value makes
/// the scale 0 and every code 0: there is no step that could represent it.
///
/// Inlined, so that a caller compiled for wider instructions gets a loop that uses them.
#[inline(always)]
pub fn quantize_row(x: &[f32], q: &mut [i8]) -> (f32, i32) {
    quantize_above(MIN_ABSMAX, x, q)
}

/// [`quantize_row`] with another smallest divisor than 1e-5, at least 1e-36.
#[inline(always)]
pub(crate) fn quantize_above(min_absmax: f32, x: &[f32], q: &mut [i8]) -> (f32, i32) {
    let k = x.len().min(q.len());
    let (x, q) = (&x[..k], &mut q[..k]);

    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut maxima = [min_absmax; LANES];
    for chunk in chunks {
        for (max, x) in maxima.iter_mut().zip(chunk) {
            // A comparison with NaN is false, which skips it.
            *max = if x.abs() > *max { x.abs() } else { *max };
        }
    }
    let absmax =
        maxima.iter().chain(rest).fold(
            min_absmax,
            |max, x| if x.abs() > max { x.abs() } else { max },
        );
    let scale = (1.0 / absmax) * 127.0;

    let mut sum = 0;
    for (q, x) in q.iter_mut().zip(x) {
        let rounded = round(x * scale);
        *q = rounded as i8;
        sum += rounded;
    }
    (scale, sum)
}

/// Rounds half to even; NaN gives 0.
///
/// There is nothing to clamp: no finite value is larger than the maximum that the scale was made
/// from, so a product is at most 127 and a few units in its last place, which rounds to 127.
#[inline(always)]
fn round(v: f32) -> i32 {
    let v = if v.is_nan() { 0.0 } else { v };
    // The sum is between 2²³ and 2²⁴, where f32 has steps of one: its low bits are the integer.
    (v + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, one value at a time.
    fn reference(x: &[f32]) -> (Vec<i8>, (f32, i32)) {
        let absmax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let scale = (1.0 / absmax.max(1e-5)) * 127.0;
        let q: Vec<i8> = x
            .iter()
            .map(|x| (x * scale).round_ties_even().clamp(-128.0, 127.0) as i8)
            .collect();
        let sum = q.iter().map(|&q| i32::from(q)).sum();
        (q, (scale, sum))
    }

    #[test]
    fn equals_the_definition() {
        for k in [0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 1000] {
            let x: Vec<f32> = (0..k)
                .map(|i| ((i * 7919 + 3) % 1009) as f32 / 97.0 - 5.0)
                .collect();
            let mut q = vec![0; k];
            let row = quantize_row(&x, &mut q);
            assert_eq!((q, row), reference(&x), "k = {k}");
        }
    }

    #[test]
    fn halves_round_to_even() {
        // The maximum of 127 makes the scale exactly 1.
        let x = [
            127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 0.49999997,
        ];
        let mut q = [0; 10];
        let (scale, _) = quantize_row(&x, &mut q);
        assert_eq!(scale, 1.0);
        assert_eq!(q, [127, 0, 2, 2, 0, -2, -2, 126, -126, 0]);
    }

    #[test]
    fn values_that_are_no_numbers() {
        let mut q = [1; 4];
        let row = quantize_row(&[f32::NAN, 2.0, -1.0, f32::NAN], &mut q);
        assert_eq!((q, row), ([0, 127, -64, 0], (63.5, 63)));
        let row = quantize_row(&[f32::INFINITY, 2.0, f32::NEG_INFINITY, 0.0], &mut q);
        assert_eq!((q, row), ([0; 4], (0.0, 0)));
        let (_, sum) = quantize_row(&[0.0; 4], &mut q);
        assert_eq!((q, sum), ([0; 4], 0));
    }
}
