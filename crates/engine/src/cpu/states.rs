//! The states of layers that have no keys and values, and the positions where they are remembered.

use std::sync::Arc;

/// Checkpoints of a sequence at most.
const MAX_CHECKPOINTS: usize = 16;
/// Bytes of checkpoints at most, unless that leaves fewer than [`MIN_CHECKPOINTS`].
const MAX_BYTES: usize = 256 << 20;
/// What is always kept: the pin and the latest.
const MIN_CHECKPOINTS: usize = 2;

/// The state of each layer at one position; empty for layers without.
type Snapshot = Vec<Arc<Vec<f32>>>;

/// The states of a sequence.
#[derive(Debug, Clone)]
pub(super) struct States {
    n_layers: usize,
    /// Positions and the states there, ascending; the last is the end of the sequence. There is none at its
    /// beginning, where all states are zeros.
    checkpoints: Vec<(usize, Snapshot)>,
    /// The position that has to stay a checkpoint.
    pinned: usize,
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
            checkpoints: Vec::new(),
            pinned: 0,
            next: vec![None; n_layers],
            zeros: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// The `n` values of the state of `layer` at the end, and where those of the next position go, which are
    /// unspecified.
    pub(super) fn next(&mut self, layer: usize, n: usize) -> (&[f32], &mut [f32]) {
        let last = self.checkpoints.last().map(|(_, states)| &states[layer]);
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
        let (_, states) = self.checkpoints.last()?;
        Some(&states[layer][..]).filter(|state| !state.is_empty())
    }

    /// Makes the states that were computed those at position `len`.
    pub(super) fn advance(&mut self, len: usize) {
        let states = self
            .next
            .iter_mut()
            .map(|state| Arc::new(state.take().unwrap_or_default()));
        self.checkpoints.push((len, states.collect()));
        while self.is_too_much() {
            let least = self.least_useful();
            let (_, states) = self.checkpoints.remove(least);
            // Forks may remember some of them.
            self.spare = states.into_iter().filter_map(Arc::into_inner).collect();
        }
    }

    /// Keeps the last position until the next call.
    pub(super) fn pin(&mut self) {
        self.pinned = self.end();
    }

    /// Truncates to the last checkpoint within the first `len` positions, and returns where that is.
    pub(super) fn truncate(&mut self, len: usize) -> usize {
        self.checkpoints.retain(|(at, _)| *at <= len);
        self.next = vec![None; self.n_layers];
        self.pinned = self.pinned.min(self.end());
        self.end()
    }

    fn end(&self) -> usize {
        self.checkpoints.last().map_or(0, |(at, _)| *at)
    }

    fn is_too_much(&self) -> bool {
        let n = self.checkpoints.len();
        let bytes = |(_, states): &(usize, Snapshot)| -> usize {
            states.iter().map(|state| size_of_val(&state[..])).sum()
        };
        let each = self.checkpoints.last().map_or(0, bytes);
        n > MAX_CHECKPOINTS || n > MIN_CHECKPOINTS && n * each > MAX_BYTES
    }

    /// The checkpoint that is missed least: the gap that it would leave is the smallest for its distance from the
    /// end, so that the latest positions are remembered densely and earlier ones sparsely.
    fn least_useful(&self) -> usize {
        let end = self.end();
        let gap = |i: &usize| {
            let before = i.checked_sub(1).map_or(0, |i| self.checkpoints[i].0);
            let gap = self.checkpoints[i + 1].0 - before;
            gap as f64 / (end - self.checkpoints[*i].0) as f64
        };
        let inner = 0..self.checkpoints.len() - 1;
        let inner = inner.filter(|&i| self.checkpoints[i].0 != self.pinned);
        inner.min_by(|a, b| gap(a).total_cmp(&gap(b))).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends `n` tokens; the state counts them.
    fn append(states: &mut States, n: usize) {
        let end = states.end() + n;
        let (before, after) = states.next(1, 1);
        after[0] = before[0] + n as f32;
        states.advance(end);
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
        let mut fork = states.clone();
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

    #[test]
    fn checkpoints_are_bounded_dense_at_the_end_and_pinned() {
        let mut states = States::new(2);
        append(&mut states, 100);
        states.pin();
        for _ in 0..5000 {
            append(&mut states, 1);
            assert!(states.checkpoints.len() <= MAX_CHECKPOINTS);
        }
        let at: Vec<usize> = states.checkpoints.iter().map(|(at, _)| *at).collect();
        assert!(at.contains(&100), "{at:?}");
        assert!(at.ends_with(&[5099, 5100]), "{at:?}");
        // Whatever has to go, no more than about as much again is computed twice.
        for len in [5098, 5050, 4800, 4000, 2500, 200] {
            let kept = states.clone().truncate(len);
            assert!(5100 - kept <= 2 * (5100 - len) + 2, "{len}: {kept}");
        }
        assert_eq!(states.truncate(100), 100);
    }

    #[test]
    fn large_states_leave_few_checkpoints() {
        let mut states = States::new(1);
        for at in 1..6 {
            states.next(0, MAX_BYTES / 8);
            states.advance(at);
        }
        assert_eq!(states.checkpoints.len(), 2);
        assert_eq!(states.end(), 5);
    }
}
