//! The states of layers that have no keys and values, and the positions where they are remembered.

use std::sync::Arc;

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
    next: Vec<Option<Vec<f32>>>,
    /// The state at the beginning, for layers that have the largest.
    zeros: Vec<f32>,
    /// Memory of states that aren't remembered any more.
    spare: Vec<Vec<f32>>,
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

    /// The `n` values of the state of `layer` at the end, and where those of the next position go, which are
    /// unspecified.
    pub(super) fn next(&mut self, layer: usize, n: usize) -> (&[f32], &mut [f32]) {
        let last = self.checkpoints.last().map(|states| &states[layer]);
        let before = match last.filter(|last| last.len() == n) {
            Some(last) => &last[..],
            None => {
                if self.zeros.len() < n {
                    self.zeros.resize(n, 0.0);
                }
                &self.zeros[..n]
            }
        };
        let unused = self.next[layer].take().filter(|state| state.len() == n);
        let state = unused.unwrap_or_else(|| {
            let spare = self.spare.iter().position(|state| state.len() == n);
            spare.map_or_else(|| vec![0.0; n], |i| self.spare.swap_remove(i))
        });
        (before, self.next[layer].insert(state))
    }

    /// The state of `layer` at the end, if there is one.
    pub(super) fn last(&self, layer: usize) -> Option<&[f32]> {
        let states = self.checkpoints.last()?;
        Some(&states[layer][..]).filter(|state| !state.is_empty())
    }

    /// Makes the states that were computed for `n` tokens those at position `len`.
    pub(super) fn advance(&mut self, n: usize, len: usize) {
        let states = self.next.iter_mut();
        let states: Snapshot = states
            .map(|state| Arc::new(state.take().unwrap_or_default()))
            .collect();
        let bytes = states.iter().map(|state| size_of_val(&state[..])).sum();
        let unused = match n {
            1 => self.checkpoints.push_passing(len, states, bytes),
            _ => self.checkpoints.push(len, states, bytes),
        };
        self.reuse(unused);
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

    /// Truncates to the last checkpoint within the first `len` positions, and returns where that is.
    pub(super) fn truncate(&mut self, len: usize) -> usize {
        self.next = vec![None; self.n_layers];
        let unused = self.checkpoints.truncate(len);
        self.reuse(unused);
        self.checkpoints.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends `n` tokens; the state counts them.
    fn append(states: &mut States, n: usize) {
        let end = states.checkpoints.end() + n;
        let (before, after) = states.next(1, 1);
        after[0] = before[0] + n as f32;
        states.advance(n, end);
    }

    fn count(states: &mut States) -> f32 {
        states.next(1, 1).0[0]
    }

    #[test]
    fn a_state_is_that_of_its_position() {
        let mut states = States::new(2);
        assert_eq!(count(&mut states), 0.0);
        for n in [5, 3, 1] {
            append(&mut states, n);
        }
        assert_eq!(count(&mut states), 9.0);
        let mut fork = states.fork();
        assert_eq!(fork.truncate(8), 8);
        append(&mut fork, 2);
        assert_eq!((count(&mut fork), count(&mut states)), (10.0, 9.0));
        // What was computed and not taken is gone.
        states.next(1, 1).1[0] = 77.0;
        assert_eq!(states.truncate(7), 5);
        assert_eq!(count(&mut states), 5.0);
        assert_eq!(states.truncate(4), 0);
        assert_eq!(count(&mut states), 0.0);
    }
}
