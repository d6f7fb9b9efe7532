//! The states of layers that have those in place of keys and values.

use std::ops::Range;

/// The state of a layer of one sequence over the positions of a call.
#[derive(Debug)]
pub enum State<'a> {
    /// What it is before the first position, and where that after the last goes, of the same length: for a sequence that
    /// may have to go back.
    Copied(&'a [f32], &'a mut [f32]),
    /// Updated where it is, which takes half of the time where states are more than caches hold.
    InPlace(&'a mut [f32]),
}

impl<'a> State<'a> {
    /// The values in `part` alone.
    ///
    /// Panics if there are fewer.
    pub fn part(self, part: Range<usize>) -> State<'a> {
        match self {
            State::Copied(before, after) => State::Copied(&before[part.clone()], &mut after[part]),
            State::InPlace(state) => State::InPlace(&mut state[part]),
        }
    }

    /// The first `n` values, and the others.
    ///
    /// Panics if there are fewer.
    pub fn split_at(self, n: usize) -> (State<'a>, State<'a>) {
        match self {
            State::Copied(before, after) => {
                let (before, after) = (before.split_at(n), after.split_at_mut(n));
                (
                    State::Copied(before.0, after.0),
                    State::Copied(before.1, after.1),
                )
            }
            State::InPlace(state) => {
                let (first, second) = state.split_at_mut(n);
                (State::InPlace(first), State::InPlace(second))
            }
        }
    }

    /// The values before, which are copied to `copy` if they are in place, and where those after go.
    pub fn copied<'b>(self, copy: &'b mut Vec<f32>) -> (&'b [f32], &'b mut [f32])
    where
        'a: 'b,
    {
        match self {
            State::Copied(before, after) => (before, after),
            State::InPlace(state) => {
                copy.clear();
                copy.extend_from_slice(state);
                (copy, state)
            }
        }
    }

    /// The values before, unless they are in place, and where those after go.
    pub(crate) fn parts(self) -> (Option<&'a [f32]>, &'a mut [f32]) {
        match self {
            State::Copied(before, after) => (Some(before), after),
            State::InPlace(state) => (None, state),
        }
    }

    /// How many values there are before and after.
    pub(crate) fn lens(&self) -> (usize, usize) {
        match self {
            State::Copied(before, after) => (before.len(), after.len()),
            State::InPlace(state) => (state.len(), state.len()),
        }
    }
}

/// Lets `call` change `state`, every other time in place, as counted by `i`.
#[cfg(test)]
pub(crate) fn change(state: &mut Vec<f32>, i: usize, call: impl FnOnce(State<'_>)) {
    if i.is_multiple_of(2) {
        let mut after = vec![f32::NAN; state.len()];
        call(State::Copied(state, &mut after));
        *state = after;
    } else {
        call(State::InPlace(state));
    }
}
