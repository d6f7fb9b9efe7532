//! Dot products with one fixed order of summation.

/// Partial sums of a dot product. Element `i` is added to sum `i % LANES`, in order of `i`.
///
/// The number is part of the definition: with it, every instruction set, tile and thread count
/// rounds the same way.
pub(crate) const LANES: usize = 16;

/// Dot products of each of `R` rows of weights with each of `T` rows of activations.
///
/// All rows have the length of the first. Every product is summed in the same order whatever `R` and
/// `T` are, so a result doesn't depend on what it was computed beside.
#[inline(always)]
pub(crate) fn dot_tile<const R: usize, const T: usize>(
    w: [&[f32]; R],
    x: [&[f32]; T],
) -> [[f32; T]; R] {
    let k = w[0].len();
    let w = w.map(|row| row[..k].as_chunks::<LANES>());
    let x = x.map(|row| row[..k].as_chunks::<LANES>());
    let mut acc = [[[0.0f32; LANES]; T]; R];
    for i in 0..k / LANES {
        for r in 0..R {
            for t in 0..T {
                for (acc, (w, x)) in acc[r][t].iter_mut().zip(w[r].0[i].iter().zip(&x[t].0[i])) {
                    *acc += w * x;
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            for (acc, (w, x)) in acc[r][t].iter_mut().zip(w[r].1.iter().zip(x[t].1)) {
                *acc += w * x;
            }
        }
    }
    acc.map(|row| row.map(sum_lanes))
}

/// The dot product of two rows of one length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_tile([a], [b])[0][0]
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
    fn tiles_of_any_shape_give_the_same_bits() {
        for k in [0, 1, 15, 16, 17, 100, 257] {
            let rows: Vec<Vec<f32>> = (0..4)
                .map(|r| (0..k).map(|i| ((i * 7 + r * 13) as f32).sin()).collect())
                .collect();
            let tile = dot_tile([&rows[0], &rows[1]], [&rows[2], &rows[3]]);
            for (r, row) in tile.iter().enumerate() {
                for (t, &got) in row.iter().enumerate() {
                    assert_eq!(got.to_bits(), dot(&rows[r], &rows[2 + t]).to_bits());
                    let exact: f64 = (0..k)
                        .map(|i| f64::from(rows[r][i]) * f64::from(rows[2 + t][i]))
                        .sum();
                    assert!((f64::from(got) - exact).abs() < 1e-4);
                }
            }
        }
    }
}
