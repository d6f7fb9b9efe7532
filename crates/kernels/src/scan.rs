//! States of heads that are updated position by position, columns of each independently.
//!
//! A head has a matrix `[rows, columns]`. A task has some columns of one head and goes through all positions with them
//! in its nearest cache: a prompt takes as many operations as the sum of its tokens, on all cores, and has their bits,
//! which forms that take positions together would not.

use std::ops::Range;

use crate::Exec;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};

/// Columns per task. In a state, those of each task are together: `[rows, COLUMNS]`, fewer in the last of a head.
pub(crate) const COLUMNS: usize = 32;

/// The heads of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) n: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Heads {
    /// Goes through `m` positions. `step` is given a head, a range of its columns, a position, the state of these
    /// columns `[rows, columns.len()]`, which it updates, and their part of the output `[m, n, columns]`.
    ///
    /// Errors: [`ShapeError`] if a state or the output has another length.
    pub(crate) fn scan(
        &self,
        exec: &Exec,
        m: usize,
        (before, after): (&[f32], &mut [f32]),
        out: &mut [f32],
        step: impl Fn(usize, &Range<usize>, usize, &mut [f32], &mut [f32]) + Sync,
    ) -> Result<(), ShapeError> {
        let Heads { n, rows, columns } = *self;
        expect_len("scan: output", m * n * columns, out.len())?;
        expect_len("scan: state", n * rows * columns, before.len())?;
        expect_len("scan: next state", before.len(), after.len())?;
        let blocks = columns.div_ceil(COLUMNS);
        let (out, after) = (SharedSlice::new(out), SharedSlice::new(after));
        exec.pool.for_ranges(n * blocks, 1, |tasks| {
            for task in tasks {
                let (head, first) = (task / blocks, task % blocks * COLUMNS);
                let own = first..columns.min(first + COLUMNS);
                let state = (head * columns + first) * rows;
                let state = state..state + own.len() * rows;
                // SAFETY: the columns of a task are no other's.
                let after = unsafe { after.range_mut(state.clone()) };
                after.copy_from_slice(&before[state]);
                for t in 0..m {
                    let at = (t * n + head) * columns;
                    // SAFETY: as above.
                    let out = unsafe { out.range_mut(at + own.start..at + own.end) };
                    step(head, &own, t, after, out);
                }
            }
        });
        Ok(())
    }
}

/// Calls `whole` with columns as [`COLUMNS`] of them; where there are fewer, padded, and what is added there is dropped.
#[inline(always)]
pub(crate) fn padded(
    state: &mut [f32],
    rows: usize,
    values: &[f32],
    out: &mut [f32],
    whole: impl FnOnce(&mut [[f32; COLUMNS]], &[f32; COLUMNS], &mut [f32; COLUMNS]),
) {
    match (
        state.as_chunks_mut(),
        values.try_into(),
        (&mut *out).try_into(),
    ) {
        ((state, []), Ok(values), Ok(out)) => whole(state, values, out),
        _ => {
            let n = values.len();
            let mut copy = vec![[0.0; COLUMNS]; rows];
            for (copy, row) in copy.iter_mut().zip(state.chunks_exact(n)) {
                copy[..n].copy_from_slice(row);
            }
            let (mut own, mut answers) = ([0.0; COLUMNS], [0.0; COLUMNS]);
            own[..n].copy_from_slice(values);
            whole(&mut copy, &own, &mut answers);
            for (copy, row) in copy.iter().zip(state.chunks_exact_mut(n)) {
                row.copy_from_slice(&copy[..n]);
            }
            out.copy_from_slice(&answers[..n]);
        }
    }
}

/// `S ← decay · S + k ⊗ change`, `out = Sᵀ q`. Sums over rows are those of the even ones and of the odd ones, added.
#[inline(always)]
pub(crate) fn update(
    state: &mut [[f32; COLUMNS]],
    decay: f32,
    (k, change): (&[f32], &[f32; COLUMNS]),
    q: &[f32],
    out: &mut [f32; COLUMNS],
) {
    let mut sums = [[0.0; COLUMNS]; 2];
    for (((row, k), q), i) in state.iter_mut().zip(k).zip(q).zip(0..) {
        let sum: &mut [f32; COLUMNS] = &mut sums[i % 2];
        for ((s, change), sum) in row.iter_mut().zip(change).zip(sum) {
            *s = decay * *s + k * change;
            *sum += q * *s;
        }
    }
    for (j, out) in out.iter_mut().enumerate() {
        *out = sums[0][j] + sums[1][j];
    }
}
