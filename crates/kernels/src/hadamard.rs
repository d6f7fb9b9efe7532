//! Rotation of activations for weights that are stored in a rotated basis (PrismML's Bonsai 2).
//!
//! A row of weights is stored as `H(s ⊙ w)`, so that its product with `x` is the stored row's with `H(s ⊙ x)`. `s`
//! are signs and `H` the Walsh-Hadamard matrix in Sylvester's order, normalised: symmetric and its own inverse. It is
//! applied to runs of [`Rotation::block`] elements.

use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};

/// Elements per task.
const ELEMENTS_PER_TASK: usize = 8192;

/// The rotation of the rows of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// Elements of a run, a power of two.
    block: usize,
    /// 1 or −1 for every element of a row.
    signs: Vec<f32>,
    regroup: Option<Regroup>,
}

/// The order that heads of an input come in, and another that the columns of a matrix are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regroup {
    /// Groups: heads of keys.
    pub n_groups: usize,
    /// Heads of each group.
    pub n_each: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl Regroup {
    /// Where head `i` of the input, one of every group and then the next of each, is in the matrix, which has all
    /// of a group side by side.
    fn place_of(&self, i: usize) -> usize {
        i % self.n_groups * self.n_each + i / self.n_groups
    }

    fn width(&self) -> usize {
        self.n_groups * self.n_each * self.head_dim
    }
}

impl Rotation {
    /// A rotation of rows as long as `signs`, each 1 or −1, in runs of `block` elements; with `regroup`, heads of an
    /// input are first put in the order of the matrix.
    ///
    /// Errors: [`ShapeError`] if `block` isn't a power of two, or runs or heads don't fill a row.
    pub fn new(
        block: usize,
        signs: Vec<f32>,
        regroup: Option<Regroup>,
    ) -> Result<Rotation, ShapeError> {
        let power = block.max(1).next_power_of_two();
        expect_len("rotation: elements of a run", power, block)?;
        let width = signs.len().next_multiple_of(block);
        expect_len("rotation: signs", width, signs.len())?;
        if let Some(regroup) = regroup {
            expect_len("rotation: elements of heads", signs.len(), regroup.width())?;
        }
        Ok(Rotation {
            block,
            signs,
            regroup,
        })
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.signs.len()
    }

    /// An error if rows have another number of elements.
    pub fn expect_width(&self, k: usize) -> Result<(), ShapeError> {
        expect_len("rotation: elements of a row", k, self.width())
    }

    /// Elements of a run.
    pub fn block(&self) -> usize {
        self.block
    }

    /// 1 or −1 for every element of a row.
    pub fn signs(&self) -> &[f32] {
        &self.signs
    }

    /// The order of heads, if inputs have another.
    pub fn regroup(&self) -> Option<Regroup> {
        self.regroup
    }

    /// Rotates an input of the matrix: `out ← H(s ⊙ x)`.
    ///
    /// Shapes: `x` and `out` are `[m, width]`.
    /// Exactness: sums and differences of pairs in one order, in f32; the same bits on every machine.
    /// Errors: [`ShapeError`] if a slice has the wrong length.
    pub fn rotate(&self, exec: &Exec, x: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
        let m = shape::rows("rotation: input", x.len(), self.width())?;
        expect_len("rotation: output", x.len(), out.len())?;
        let (width, shared) = (self.width(), SharedSlice::new(out));
        let rows_per_task = ELEMENTS_PER_TASK.div_ceil(width.max(1));
        exec.pool.for_ranges(m, rows_per_task, |rows| {
            for row in rows {
                let x = &x[row * width..(row + 1) * width];
                // SAFETY: rows of different tasks don't overlap.
                let out = unsafe { shared.range_mut(row * width..(row + 1) * width) };
                match &self.regroup {
                    None => out.copy_from_slice(x),
                    Some(regroup) => {
                        for (i, head) in x.chunks_exact(regroup.head_dim).enumerate() {
                            let at = regroup.place_of(i) * regroup.head_dim;
                            out[at..at + regroup.head_dim].copy_from_slice(head);
                        }
                    }
                }
                sign(exec.isa, out, &self.signs);
                hadamard(exec.isa, out, self.block);
            }
        });
        Ok(())
    }

    /// Undoes the rotation of a stored row: `s ⊙ H(row)`, its heads in the order of inputs.
    ///
    /// Exactness: as [`Rotation::rotate`].
    /// Errors: [`ShapeError`] if the row has the wrong length.
    pub fn undo(&self, exec: &Exec, row: &mut [f32]) -> Result<(), ShapeError> {
        expect_len("rotation: row", self.width(), row.len())?;
        hadamard(exec.isa, row, self.block);
        sign(exec.isa, row, &self.signs);
        if let Some(regroup) = &self.regroup {
            let stored = row.to_vec();
            for (i, head) in row.chunks_exact_mut(regroup.head_dim).enumerate() {
                let at = regroup.place_of(i) * regroup.head_dim;
                head.copy_from_slice(&stored[at..at + regroup.head_dim]);
            }
        }
        Ok(())
    }
}

multiversion! {
    fn sign(x: &mut [f32], signs: &[f32]) {
        for (x, sign) in x.iter_mut().zip(signs) {
            *x *= sign;
        }
    }
}

multiversion! {
    /// Transforms runs of `block` elements.
    fn hadamard(x: &mut [f32], block: usize) {
        let scale = (1.0 / (block as f64).sqrt()) as f32;
        for run in x.chunks_exact_mut(block) {
            let mut half = 1;
            while half < block {
                match half {
                    1 => butterflies::<1>(run),
                    2 => butterflies::<2>(run),
                    4 => butterflies::<4>(run),
                    8 => butterflies::<8>(run),
                    _ => {
                        for pair in run.chunks_exact_mut(2 * half) {
                            let (a, b) = pair.split_at_mut(half);
                            for (a, b) in a.iter_mut().zip(b) {
                                (*a, *b) = (*a + *b, *a - *b);
                            }
                        }
                    }
                }
                half *= 2;
            }
            for x in run {
                *x *= scale;
            }
        }
    }
}

/// Sums and differences of elements that are `HALF` apart.
#[inline(always)]
fn butterflies<const HALF: usize>(run: &mut [f32]) {
    for pair in run.chunks_exact_mut(2 * HALF) {
        for i in 0..HALF {
            let (a, b) = (pair[i], pair[HALF + i]);
            (pair[i], pair[HALF + i]) = (a + b, a - b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    fn signs(width: usize) -> Vec<f32> {
        floats(width, 7).iter().map(|x| x.signum()).collect()
    }

    /// The definition, in f64.
    fn expected(block: usize, x: &[f64]) -> Vec<f64> {
        let runs = x.chunks(block).flat_map(|run| {
            (0..block).map(move |i| {
                let signed = run
                    .iter()
                    .enumerate()
                    .map(|(j, x)| match (i & j).count_ones() % 2 {
                        0 => *x,
                        _ => -x,
                    });
                signed.sum::<f64>() / (block as f64).sqrt()
            })
        });
        runs.collect()
    }

    #[test]
    fn every_machine_gives_the_definition_and_undoes_it() {
        for (block, width, m) in [
            (1, 3, 2),
            (2, 6, 1),
            (4, 4, 3),
            (128, 384, 5),
            (1024, 5120, 2),
        ] {
            let (x, signs) = (floats(m * width, 1), signs(width));
            let rotation = Rotation::new(block, signs.clone(), None).unwrap();
            let mut first = None;
            for exec in exec_matrix() {
                let mut got = vec![f32::NAN; x.len()];
                rotation.rotate(&exec, &x, &mut got).unwrap();
                for (got, x) in got.chunks(width).zip(x.chunks(width)) {
                    let signed = x.iter().zip(&signs).map(|(x, s)| f64::from(x * s));
                    let want = expected(block, &signed.collect::<Vec<_>>());
                    for (got, want) in got.iter().zip(want) {
                        assert!((f64::from(*got) - want).abs() < 1e-5);
                    }
                }
                assert_eq!(*first.get_or_insert_with(|| got.clone()), got);
                for (row, x) in got.chunks_mut(width).zip(x.chunks(width)) {
                    rotation.undo(&exec, row).unwrap();
                    for (row, x) in row.iter().zip(x) {
                        assert!((row - x).abs() < 1e-5);
                    }
                }
            }
        }
    }

    #[test]
    fn the_published_example() {
        let rotation = Rotation::new(4, vec![1.0, -1.0, -1.0, 1.0], None).unwrap();
        let exec = Exec::new(1, crate::Isa::SCALAR);
        let mut out = [0.0; 4];
        rotation
            .rotate(&exec, &[1.0, 2.0, 3.0, 4.0], &mut out)
            .unwrap();
        assert_eq!(out, [0.0, -2.0, -1.0, 5.0]);
        let mut row = [1.0, 2.0, 3.0, 4.0];
        rotation.undo(&exec, &mut row).unwrap();
        assert_eq!(row, [5.0, 1.0, 2.0, 0.0]);
    }

    #[test]
    fn heads_are_regrouped_first() {
        let regroup = Regroup {
            n_groups: 2,
            n_each: 3,
            head_dim: 2,
        };
        let exec = Exec::new(1, crate::Isa::SCALAR);
        let rotation = Rotation::new(1, vec![1.0; 12], Some(regroup)).unwrap();
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut out = vec![0.0; 12];
        rotation.rotate(&exec, &x, &mut out).unwrap();
        let want = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11].map(|i| i as f32);
        assert_eq!(out, want);
        rotation.undo(&exec, &mut out).unwrap();
        assert_eq!(out, x);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(Rotation::new(0, vec![1.0; 4], None).is_err());
        assert!(Rotation::new(3, vec![1.0; 6], None).is_err());
        assert!(Rotation::new(4, vec![1.0; 6], None).is_err());
        let regroup = Regroup {
            n_groups: 2,
            n_each: 2,
            head_dim: 2,
        };
        assert!(Rotation::new(4, vec![1.0; 4], Some(regroup)).is_err());
        let exec = Exec::new(1, crate::Isa::SCALAR);
        let rotation = Rotation::new(2, vec![1.0; 4], None).unwrap();
        assert!(rotation.rotate(&exec, &[0.0; 6], &mut [0.0; 6]).is_err());
        assert!(rotation.rotate(&exec, &[0.0; 8], &mut [0.0; 4]).is_err());
        assert!(rotation.undo(&exec, &mut [0.0; 8]).is_err());
    }
}
