//! Rotary position embedding.

pub use sterna_format::model::RopeLayout;

use crate::shape::{ShapeError, expect_len};

/// Rotates the first `rope_dim` elements of every head, in place.
///
/// Pairs are reordered as halves: elements `2 i` and `2 i + 1` move to `i` and `i + rope_dim / 2`. So the
/// products of queries with keys are summed in one order, and a model gives the same bits in either layout.
///
/// Shapes: `x` is `[m, n_heads, head_dim]`; `cos` and `sin` are `[m, rope_dim / 2]`: the angles of
/// each row's position.
/// Errors: [`ShapeError`] if the lengths don't match or `rope_dim` exceeds `head_dim`.
pub fn rope(
    x: &mut [f32],
    head_dim: usize,
    rope_dim: usize,
    cos: &[f32],
    sin: &[f32],
    layout: RopeLayout,
) -> Result<(), ShapeError> {
    let half = rope_dim / 2;
    if half == 0 || x.is_empty() {
        return Ok(());
    }
    let m = cos.len() / half;
    expect_len("rope: cosines", m * half, cos.len())?;
    expect_len("rope: sines", cos.len(), sin.len())?;
    expect_len(
        "rope: rotated elements of a head",
        rope_dim.min(head_dim),
        rope_dim,
    )?;
    let row = x.len() / m.max(1);
    let n_heads = row / head_dim;
    expect_len("rope: input", m * n_heads * head_dim, x.len())?;
    let mut pairs = match layout {
        RopeLayout::Halves => Vec::new(),
        RopeLayout::Pairs => vec![[0.0; 2]; half],
    };
    for (t, x) in x.chunks_exact_mut(row).enumerate() {
        let cos = &cos[t * half..][..half];
        let sin = &sin[t * half..][..half];
        for head in x.chunks_exact_mut(head_dim) {
            let (a, b) = head[..2 * half].split_at_mut(half);
            if layout == RopeLayout::Pairs {
                pairs.as_flattened_mut()[..half].copy_from_slice(a);
                pairs.as_flattened_mut()[half..].copy_from_slice(b);
                for ((a, b), pair) in a.iter_mut().zip(b.iter_mut()).zip(&pairs) {
                    [*a, *b] = *pair;
                }
            }
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_swaps_the_partners() {
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(&mut x, 5, 4, &cos, &sin, RopeLayout::Halves).unwrap();
        assert_eq!(x, [-3.0, -4.0, 1.0, 2.0, 9.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(&mut x, 5, 4, &cos, &sin, RopeLayout::Pairs).unwrap();
        assert_eq!(x, [-2.0, -4.0, 1.0, 3.0, 9.0]);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let mut x = [0.0; 8];
        let angles = [0.0; 2];
        assert!(rope(&mut x, 3, 4, &angles, &angles, RopeLayout::Halves).is_err());
        assert!(rope(&mut x, 4, 4, &angles, &angles[..1], RopeLayout::Halves).is_err());
        assert!(rope(&mut x[..7], 4, 4, &angles, &angles, RopeLayout::Halves).is_err());
    }
}
