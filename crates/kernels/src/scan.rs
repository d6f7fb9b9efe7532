//! States of heads that are updated position by position, columns of each independently.
//!
//! A head has a matrix `[rows, columns]`. A task has some columns of one head and goes through all positions with them
//! in its nearest cache: a prompt takes as many operations as the sum of its tokens, on all cores, and has their bits,
//! which forms that take positions together would not.

use std::ops::Range;

use crate::Exec;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};
use crate::state::State;

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
        state: State<'_>,
        out: &mut [f32],
        step: impl Fn(usize, &Range<usize>, usize, &mut [f32], &mut [f32]) + Sync,
    ) -> Result<(), ShapeError> {
        let Heads { n, rows, columns } = *self;
        expect_len("scan: output", m * n * columns, out.len())?;
        let (n_before, n_after) = state.lens();
        expect_len("scan: state", n * rows * columns, n_before)?;
        expect_len("scan: next state", n_before, n_after)?;
        let (before, after) = state.parts();
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
                if let Some(before) = before {
                    after.copy_from_slice(&before[state]);
                }
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

/// One position of some columns, `[rows, COLUMNS]`.
///
/// Not a closure: that would be compiled for the least of processors wherever the compiler doesn't inline it, and
/// implementations say `#[inline(always)]`.
pub(crate) trait Step {
    fn step(&self, state: &mut [[f32; COLUMNS]], values: &[f32; COLUMNS], out: &mut [f32; COLUMNS]);
}

/// Takes a step of columns as [`COLUMNS`] of them; where there are fewer, padded, and what is added there is dropped.
#[inline(always)]
pub(crate) fn padded(
    state: &mut [f32],
    rows: usize,
    values: &[f32],
    out: &mut [f32],
    whole: &impl Step,
) {
    match (
        state.as_chunks_mut(),
        values.try_into(),
        (&mut *out).try_into(),
    ) {
        ((state, []), Ok(values), Ok(out)) => whole.step(state, values, out),
        _ => {
            let n = values.len();
            let mut copy = vec![[0.0; COLUMNS]; rows];
            for (copy, row) in copy.iter_mut().zip(state.chunks_exact(n)) {
                copy[..n].copy_from_slice(row);
            }
            let (mut own, mut answers) = ([0.0; COLUMNS], [0.0; COLUMNS]);
            own[..n].copy_from_slice(values);
            whole.step(&mut copy, &own, &mut answers);
            for (copy, row) in copy.iter().zip(state.chunks_exact_mut(n)) {
                row.copy_from_slice(&copy[..n]);
            }
            out.copy_from_slice(&answers[..n]);
        }
    }
}

/// `S ← decay · S + k ⊗ change`, `out = Sᵀ q`. Sums over rows are those of [`sum_rows`].
#[inline(always)]
pub(crate) fn update(
    state: &mut [[f32; COLUMNS]],
    decay: f32,
    (k, change): (&[f32], &[f32; COLUMNS]),
    q: &[f32],
    out: &mut [f32; COLUMNS],
) {
    struct Update<'a>(f32, &'a [f32; COLUMNS]);
    impl Row<2> for Update<'_> {
        #[inline(always)]
        fn add(&self, row: &mut [f32; COLUMNS], [k, q]: [f32; 2], sum: &mut [f32; COLUMNS]) {
            let Update(decay, change) = self;
            for ((s, change), sum) in row.iter_mut().zip(*change).zip(sum) {
                *s = decay * *s + k * change;
                *sum += q * *s;
            }
        }
    }
    *out = sum_rows(state, [k, q], &Update(decay, change));
}

/// `Sᵀ k`.
#[inline(always)]
pub(crate) fn look_up(state: &mut [[f32; COLUMNS]], k: &[f32]) -> [f32; COLUMNS] {
    struct LookUp;
    impl Row<1> for LookUp {
        #[inline(always)]
        fn add(&self, row: &mut [f32; COLUMNS], [k]: [f32; 1], sum: &mut [f32; COLUMNS]) {
            for (sum, s) in sum.iter_mut().zip(row) {
                *sum += k * *s;
            }
        }
    }
    sum_rows(state, [k], &LookUp)
}

/// What a row of a state, which it may change, adds to a sum, given its elements of `N` vectors.
///
/// Not a closure for the same reason as [`Step`].
pub(crate) trait Row<const N: usize> {
    fn add(&self, row: &mut [f32; COLUMNS], of_row: [f32; N], sum: &mut [f32; COLUMNS]);
}

/// The sum over the even rows, and that over the odd ones, added. `vectors` have an element for each row.
#[inline(always)]
pub(crate) fn sum_rows<const N: usize>(
    state: &mut [[f32; COLUMNS]],
    vectors: [&[f32]; N],
    each: &impl Row<N>,
) -> [f32; COLUMNS] {
    let vectors = vectors.map(|vector| &vector[..state.len()]);
    let (mut even, mut odd) = ([0.0; COLUMNS], [0.0; COLUMNS]);
    let (pairs, last) = state.as_chunks_mut();
    // Named for each, and not indexed, so that they stay in registers.
    for ([first, second], i) in pairs.iter_mut().zip((0..).step_by(2)) {
        each.add(first, vectors.map(|vector| vector[i]), &mut even);
        each.add(second, vectors.map(|vector| vector[i + 1]), &mut odd);
    }
    if let [last] = last {
        each.add(
            last,
            vectors.map(|vector| vector[vector.len() - 1]),
            &mut even,
        );
    }
    for (even, odd) in even.iter_mut().zip(odd) {
        *even += odd;
    }
    even
}
