//! The positions of a sequence where the states of its layers are remembered, so that it can be truncated to them.

/// Checkpoints of a sequence at most.
const MAX_CHECKPOINTS: usize = 16;
/// Bytes of checkpoints at most, unless that leaves fewer than [`MIN_CHECKPOINTS`].
const MAX_BYTES: usize = 256 << 20;
/// What is always kept: the pin and the latest.
const MIN_CHECKPOINTS: usize = 2;

/// Positions, and what a backend remembers there. There is none at the beginning, where all states are zeros.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints<S> {
    /// Ascending.
    all: Vec<(usize, S)>,
    /// The position that has to stay a checkpoint.
    pinned: usize,
}

impl<S> Default for Checkpoints<S> {
    fn default() -> Checkpoints<S> {
        Checkpoints {
            all: Vec::new(),
            pinned: 0,
        }
    }
}

impl<S> Checkpoints<S> {
    /// Adds one at `position`, which is after all others, and returns those that are one too many with it. Each has
    /// `bytes`.
    pub(crate) fn push(&mut self, position: usize, states: S, bytes: usize) -> Vec<S> {
        self.all.push((position, states));
        let mut removed = Vec::new();
        while self.is_too_much(bytes) {
            let least = self.least_useful();
            removed.push(self.all.remove(least).1);
        }
        removed
    }

    /// Keeps the checkpoint at `position`, which may follow, until the next call.
    pub(crate) fn pin(&mut self, position: usize) {
        self.pinned = position;
    }

    /// Whether `position` is the one that is kept.
    pub(crate) fn is_pinned(&self, position: usize) -> bool {
        position == self.pinned
    }

    /// Forgets those after the first `len` positions, and returns where the last one is.
    pub(crate) fn truncate(&mut self, len: usize) -> usize {
        self.all.retain(|(at, _)| *at <= len);
        self.pinned = self.pinned.min(self.end());
        self.end()
    }

    /// What the last one remembers.
    pub(crate) fn last(&self) -> Option<&S> {
        self.all.last().map(|(_, states)| states)
    }

    /// The position of the last one; zero if there is none.
    pub(crate) fn end(&self) -> usize {
        self.all.last().map_or(0, |(at, _)| *at)
    }

    /// All positions.
    #[cfg(test)]
    pub(crate) fn positions(&self) -> Vec<usize> {
        self.all.iter().map(|(at, _)| *at).collect()
    }

    fn is_too_much(&self, bytes: usize) -> bool {
        let n = self.all.len();
        n > MAX_CHECKPOINTS || n > MIN_CHECKPOINTS && n.saturating_mul(bytes) > MAX_BYTES
    }

    /// The checkpoint that is missed least: the gap that it would leave is the smallest for its distance from the
    /// end, so that the latest positions are remembered densely and earlier ones sparsely.
    fn least_useful(&self) -> usize {
        let end = self.end();
        let gap = |i: &usize| {
            let before = i.checked_sub(1).map_or(0, |i| self.all[i].0);
            let gap = self.all[i + 1].0 - before;
            gap as f64 / (end - self.all[*i].0) as f64
        };
        let inner = 0..self.all.len() - 1;
        let inner = inner.filter(|&i| !self.is_pinned(self.all[i].0));
        inner.min_by(|a, b| gap(a).total_cmp(&gap(b))).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_bounded_dense_at_the_end_and_pinned() {
        let mut checkpoints = Checkpoints::default();
        checkpoints.push(100, (), 1);
        checkpoints.pin(100);
        for at in 101..=5100 {
            checkpoints.push(at, (), 1);
            assert!(checkpoints.all.len() <= MAX_CHECKPOINTS);
        }
        let at = checkpoints.positions();
        assert!(at.contains(&100), "{at:?}");
        assert!(at.ends_with(&[5099, 5100]), "{at:?}");
        // Whatever has to go, no more than about as much again is computed twice.
        for len in [5098, 5050, 4800, 4000, 2500, 200] {
            let kept = checkpoints.clone().truncate(len);
            assert!(5100 - kept <= 2 * (5100 - len) + 2, "{len}: {kept}");
        }
        assert_eq!(checkpoints.truncate(100), 100);
    }

    #[test]
    fn large_states_leave_few() {
        let mut checkpoints = Checkpoints::default();
        for at in 1..6 {
            checkpoints.push(at, at, MAX_BYTES / 2);
        }
        assert_eq!(checkpoints.positions(), [4, 5]);
        assert_eq!((checkpoints.end(), checkpoints.last()), (5, Some(&5)));
    }
}
