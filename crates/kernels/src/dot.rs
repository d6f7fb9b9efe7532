//! Dot products with one fixed order of summation.

/// Partial sums of a dot product. Element `i` is added to sum `i % LANES`, in order of `i`.
///
/// The number is part of the definition: with it, every instruction set, tile and thread count
/// rounds the same way.
pub(crate) const LANES: usize = 16;

/// The dot product of two rows of one length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, b) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut acc = [0.0f32; LANES];
    for (a, b) in a.0.iter().zip(b.0) {
        for (acc, (a, b)) in acc.iter_mut().zip(a.iter().zip(b)) {
            *acc += a * b;
        }
    }
    for (acc, (a, b)) in acc.iter_mut().zip(a.1.iter().zip(b.1)) {
        *acc += a * b;
    }
    sum_lanes(acc)
}

/// Adds the lanes pairwise, halves upon halves.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_close_to_exact_ones() {
        for k in [0, 1, 15, 16, 17, 100, 257] {
            let row =
                |r: usize| -> Vec<f32> { (0..k).map(|i| ((i * 7 + r) as f32).sin()).collect() };
            let (a, b) = (row(0), row(13));
            let products = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b));
            assert!((f64::from(dot(&a, &b)) - products.sum::<f64>()).abs() < 1e-4);
        }
    }
}
