//! Rotary position embedding.

pub use sterna_format::model::RopeLayout;

use crate::Exec;
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
    exec: &Exec,
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
    exec.for_rows(x, row, |first, x| {
        let mut pairs = match layout {
            RopeLayout::Halves => Vec::new(),
            RopeLayout::Pairs => vec![[0.0; 2]; half],
        };
        for (t, x) in x.chunks_exact_mut(row).enumerate() {
            let t = first / row + t;
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
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn rows_are_rotated_by_any_number_of_threads() {
        // More rows than a task has.
        let (m, n_heads, head_dim, half) = (300, 3, 20, 8);
        let (x, cos, sin) = (
            floats(m * n_heads * head_dim, 1),
            floats(m * half, 2),
            floats(m * half, 3),
        );
        let rotated = |exec: &Exec| {
            let mut x = x.clone();
            rope(
                exec,
                &mut x,
                head_dim,
                2 * half,
                &cos,
                &sin,
                RopeLayout::Halves,
            )
            .unwrap();
            x
        };
        let expected = rotated(&Exec::new(1, Isa::detect()));
        let (row, at) = (299 * n_heads * head_dim, 299 * half);
        let turned = x[row] * cos[at] - x[row + half] * sin[at];
        assert_eq!(expected[row], turned);
        for exec in exec_matrix() {
            assert_eq!(rotated(&exec), expected, "{exec:?}");
        }
    }

    #[test]
    fn a_quarter_turn_swaps_the_partners() {
        let exec = Exec::new(1, Isa::detect());
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(&exec, &mut x, 5, 4, &cos, &sin, RopeLayout::Halves).unwrap();
        assert_eq!(x, [-3.0, -4.0, 1.0, 2.0, 9.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(&exec, &mut x, 5, 4, &cos, &sin, RopeLayout::Pairs).unwrap();
        assert_eq!(x, [-2.0, -4.0, 1.0, 3.0, 9.0]);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let exec = Exec::new(1, Isa::detect());
        let mut x = [0.0; 8];
        let angles = [0.0; 2];
        assert!(rope(&exec, &mut x, 3, 4, &angles, &angles, RopeLayout::Halves).is_err());
        assert!(
            rope(
                &exec,
                &mut x,
                4,
                4,
                &angles,
                &angles[..1],
                RopeLayout::Halves
            )
            .is_err()
        );
        assert!(
            rope(
                &exec,
                &mut x[..7],
                4,
                4,
                &angles,
                &angles,
                RopeLayout::Halves
            )
            .is_err()
        );
    }
}
