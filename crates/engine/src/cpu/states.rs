//! The states of layers that have no keys and values, and the positions where they are remembered.

use std::sync::Arc;

use sterna_kernels::State;

use crate::checkpoints::Checkpoints;

/// The state of each layer at one position; empty for layers without.
type Snapshot = Vec<Arc<Vec<f32>>>;

/// The states of a sequence.
#[derive(Debug)]
pub(super) struct States {
    n_layers: usize,
    /// The last is the end of the sequence.
    checkpoints: Checkpoints<Snapshot>,
    /// States after the tokens that are being computed, of the layers that have been.
    next: Vec<Option<Next>>,
    /// The state at the beginning, for layers that have the largest.
    zeros: Vec<f32>,
    /// Memory of states that aren't remembered any more.
    spare: Vec<Vec<f32>>,
}

#[derive(Debug, Clone)]
struct Next {
    values: Vec<f32>,
    /// Whether they were taken from the last checkpoint, which has them no more.
    is_in_place: bool,
}

impl States {
    pub(super) fn new(n_layers: usize) -> States {
        States {
            n_layers,
            checkpoints: Checkpoints::default(),
            next: vec![None; n_layers],
            zeros: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// The `n` values of the state of `layer`, those at the end to begin with, for the next positions: in place if `may_be`
    /// and the end isn't to be remembered.
    pub(super) fn next(&mut self, layer: usize, n: usize, may_be: bool) -> State<'_> {
        // The operations of a layer in one step go on with what the first of them took.
        let is_begun = |next: &Next| next.values.len() == n;
        if !self.next[layer].as_ref().is_some_and(is_begun) {
            let end = may_be.then(|| self.take_end(layer, n)).flatten();
            self.next[layer] = Some(end.unwrap_or_else(|| self.copy(n)));
        }
        let States {
            checkpoints,
            next,
            zeros,
            ..
        } = self;
        let Next {
            values,
            is_in_place,
        } = next[layer].as_mut().expect("it was set");
        if *is_in_place {
            return State::InPlace(values);
        }
        let last = checkpoints.last().map(|states| &states[layer]);
        let before = match last.filter(|last| last.len() == n) {
            Some(last) => &last[..],
            None => {
                if zeros.len() < n {
                    zeros.resize(n, 0.0);
                }
                &zeros[..n]
            }
        };
        State::Copied(before, values)
    }

    /// The state of `layer` at the end, if that goes as one token follows and is no other sequence's.
    fn take_end(&mut self, layer: usize, n: usize) -> Option<Next> {
        if !self.checkpoints.is_end_passing() {
            return None;
        }
        let end = Arc::get_mut(self.checkpoints.last_mut()?.get_mut(layer)?)?;
        if end.len() != n {
            return None;
        }
        Some(Next {
            values: std::mem::take(end),
            is_in_place: true,
        })
    }

    /// Memory for a state after the next positions.
    fn copy(&mut self, n: usize) -> Next {
        let spare = self.spare.iter().position(|state| state.len() == n);
        Next {
            values: spare.map_or_else(|| vec![0.0; n], |i| self.spare.swap_remove(i)),
            is_in_place: false,
        }
    }

    /// The state of `layer` at the end, if there is one.
    pub(super) fn last(&self, layer: usize) -> Option<&[f32]> {
        let states = self.checkpoints.last()?;
        Some(&states[layer][..]).filter(|state| !state.is_empty())
    }

    /// Makes the states that were computed for `n` tokens those at position `len`.
    pub(super) fn advance(&mut self, n: usize, len: usize) {
        self.drop_torn();
        let states = self.next.iter_mut();
        let states: Snapshot = states
            .map(|next| Arc::new(next.take().map(|next| next.values).unwrap_or_default()))
            .collect();
        let bytes = states.iter().map(|state| size_of_val(&state[..])).sum();
        let unused = match n {
            1 => self.checkpoints.push_passing(len, states, bytes),
            _ => self.checkpoints.push(len, states, bytes),
        };
        self.reuse(unused);
    }

    /// Forgets the end if it isn't whole.
    fn drop_torn(&mut self) {
        if self.next.iter().flatten().any(|next| next.is_in_place) {
            self.checkpoints.pop();
        }
    }

    /// Keeps the memory of one of the positions that aren't remembered any more for the next.
    fn reuse(&mut self, unused: Vec<Snapshot>) {
        if let Some(last) = unused.into_iter().next_back() {
            // Forks may remember some of them.
            self.spare = last.into_iter().filter_map(Arc::into_inner).collect();
        }
    }

    /// The same positions, for another sequence.
    pub(super) fn fork(&self) -> States {
        States {
            checkpoints: self.checkpoints.clone(),
            ..States::new(self.n_layers)
        }
    }

    /// Keeps the last position until the next call.
    pub(super) fn pin(&mut self) {
        self.checkpoints.pin(self.checkpoints.end());
    }

    /// Where the last checkpoint within the first `len` positions is.
    pub(super) fn len_within(&self, len: usize) -> usize {
        self.checkpoints.end_within(len)
    }

    /// Truncates to the last checkpoint within the first `len` positions, and returns where that is. It is whole: what a
    /// step left that was begun, and by which the sequence didn't advance, is dropped.
    pub(super) fn truncate(&mut self, len: usize) -> usize {
        self.drop_torn();
        self.next = vec![None; self.n_layers];
        let unused = self.checkpoints.truncate(len);
        self.reuse(unused);
        self.checkpoints.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins a step of `n` tokens; the state counts them.
    fn begin(states: &mut States, n: usize) {
        match states.next(1, 1, n == 1) {
            State::Copied(before, after) => after[0] = before[0] + n as f32,
            State::InPlace(state) => state[0] += n as f32,
        }
    }

    fn append(states: &mut States, n: usize) {
        let end = states.checkpoints.end() + n;
        begin(states, n);
        states.advance(n, end);
    }

    fn count(states: &States) -> f32 {
        states.last(1).map_or(0.0, |state| state[0])
    }

    #[test]
    fn a_state_is_that_of_its_position() {
        let mut states = States::new(2);
        assert_eq!(count(&states), 0.0);
        for n in [5, 3, 1] {
            append(&mut states, n);
        }
        assert_eq!(count(&states), 9.0);
        let mut fork = states.fork();
        assert_eq!(fork.truncate(8), 8);
        append(&mut fork, 2);
        assert_eq!((count(&fork), count(&states)), (10.0, 9.0));
        // What was computed and not taken is gone.
        begin(&mut states, 77);
        assert_eq!(states.truncate(7), 5);
        assert_eq!(count(&states), 5.0);
        assert_eq!(states.truncate(4), 0);
        assert_eq!(count(&states), 0.0);
    }

    #[test]
    fn token_by_token_a_state_stays_in_its_place_until_it_is_to_be_remembered() {
        let mut states = States::new(2);
        append(&mut states, 5);
        let mut places = Vec::new();
        for len in 6..60 {
            append(&mut states, 1);
            assert_eq!(count(&states), len as f32);
            let place = states.last(1).unwrap().as_ptr();
            if places.last() != Some(&place) {
                places.push(place);
            }
        }
        assert_eq!(states.checkpoints.positions(), [5, 21, 37, 53, 59]);
        assert_eq!(places.len(), 4);
        // What another sequence has, too, stays as it is.
        let mut fork = states.fork();
        append(&mut fork, 1);
        assert_eq!((count(&fork), count(&states)), (60.0, 59.0));
        // A step that ended in the middle costs what follows the last that was remembered.
        begin(&mut fork, 1);
        assert_eq!(fork.truncate(60), 53);
        assert_eq!(count(&fork), 53.0);
        assert_eq!(count(&states), 59.0);
    }
}
