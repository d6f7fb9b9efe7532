//! The positions of a sequence where the states of its layers are remembered, so that it can be truncated to them.

/// Checkpoints of a sequence at most.
const MAX_CHECKPOINTS: usize = 16;
/// Bytes of checkpoints at most, unless that leaves fewer than [`MIN_CHECKPOINTS`].
const MAX_BYTES: usize = 256 << 20;
/// What is always kept: the pin and the latest.
const MIN_CHECKPOINTS: usize = 2;
/// Of positions that are passed token by token, one stays in so many.
const INTERVAL: usize = 16;

/// Positions, and what a backend remembers there. There is none at the beginning, where all states are zeros.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoints<S> {
    /// By ascending position.
    all: Vec<Checkpoint<S>>,
    /// The position that has to stay a checkpoint.
    pinned: usize,
    /// The last that was to stay, though it may have been one too many since.
    kept: usize,
}

#[derive(Debug, Clone)]
struct Checkpoint<S> {
    position: usize,
    states: S,
    /// Whether it goes as one token follows, unless it is pinned, or the one before is far away.
    is_passing: bool,
}

impl<S> Default for Checkpoints<S> {
    fn default() -> Checkpoints<S> {
        Checkpoints {
            all: Vec::new(),
            pinned: 0,
            kept: 0,
        }
    }
}

impl<S> Checkpoints<S> {
    /// Adds one at `position`, which is after all others, and returns those that are one too many with it. Each has
    /// `bytes`.
    pub(crate) fn push(&mut self, position: usize, states: S, bytes: usize) -> Vec<S> {
        self.add(position, states, false);
        self.kept = position;
        self.remove_too_many(bytes)
    }

    /// As [`Checkpoints::push`], of a position that one token led to: most of these go as the next token follows, since
    /// what many states take of memory and time is more than what they save.
    pub(crate) fn push_passing(&mut self, position: usize, states: S, bytes: usize) -> Vec<S> {
        let is_passing = self.is_end_passing();
        let passed = self.all.pop_if(|_| is_passing);
        if passed.is_none() {
            self.kept = self.end();
            if let Some(kept) = self.all.last_mut() {
                kept.is_passing = false;
            }
        }
        self.add(position, states, true);
        let mut removed: Vec<S> = passed.into_iter().map(|one| one.states).collect();
        removed.extend(self.remove_too_many(bytes));
        removed
    }

    /// Whether the last one goes as one token follows.
    pub(crate) fn is_end_passing(&self) -> bool {
        let Some(last) = self.all.last() else {
            return false;
        };
        last.is_passing && last.position - self.kept < INTERVAL && !self.is_pinned(last.position)
    }

    /// What the last one remembers, to be changed.
    pub(crate) fn last_mut(&mut self) -> Option<&mut S> {
        self.all.last_mut().map(|one| &mut one.states)
    }

    /// Removes the last one.
    pub(crate) fn pop(&mut self) {
        self.all.pop();
        self.limit();
    }

    fn add(&mut self, position: usize, states: S, is_passing: bool) {
        self.all.push(Checkpoint {
            position,
            states,
            is_passing,
        });
    }

    fn remove_too_many(&mut self, bytes: usize) -> Vec<S> {
        let mut removed = Vec::new();
        while self.is_too_much(bytes) {
            let least = self.least_useful();
            removed.push(self.all.remove(least).states);
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

    /// Removes those after the first `len` positions, and returns them.
    pub(crate) fn truncate(&mut self, len: usize) -> Vec<S> {
        let kept = self.all.partition_point(|one| one.position <= len);
        let removed = self.all.drain(kept..).map(|one| one.states).collect();
        self.limit();
        removed
    }

    /// Nothing is remembered beyond the end.
    fn limit(&mut self) {
        self.pinned = self.pinned.min(self.end());
        self.kept = self.kept.min(self.end());
    }

    /// The position of the last one within the first `len`; zero if there is none.
    pub(crate) fn end_within(&self, len: usize) -> usize {
        let n = self.all.partition_point(|one| one.position <= len);
        self.before(n)
    }

    /// What the last one remembers.
    pub(crate) fn last(&self) -> Option<&S> {
        self.all.last().map(|one| &one.states)
    }

    /// The position of the last one; zero if there is none.
    pub(crate) fn end(&self) -> usize {
        self.all.last().map_or(0, |one| one.position)
    }

    /// All positions.
    #[cfg(test)]
    pub(crate) fn positions(&self) -> Vec<usize> {
        self.all.iter().map(|one| one.position).collect()
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
            let gap = self.all[i + 1].position - self.before(*i);
            gap as f64 / (end - self.all[*i].position) as f64
        };
        let inner = 0..self.all.len() - 1;
        let inner = inner.filter(|&i| !self.is_pinned(self.all[i].position));
        inner.min_by(|a, b| gap(a).total_cmp(&gap(b))).unwrap_or(0)
    }

    /// The position before that of the checkpoint `i`.
    fn before(&self, i: usize) -> usize {
        i.checked_sub(1).map_or(0, |i| self.all[i].position)
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
            let mut shorter = checkpoints.clone();
            let within = checkpoints.end_within(len);
            shorter.truncate(len);
            let kept = shorter.end();
            assert_eq!(within, kept);
            assert!(5100 - kept <= 2 * (5100 - len) + 2, "{len}: {kept}");
        }
        checkpoints.truncate(100);
        assert_eq!(checkpoints.end(), 100);
    }

    #[test]
    fn large_states_leave_few() {
        let mut checkpoints = Checkpoints::default();
        for at in 1..6 {
            checkpoints.push(at, at, MAX_BYTES / 2);
        }
        assert_eq!(checkpoints.positions(), [4, 5]);
        assert_eq!((checkpoints.end(), checkpoints.last()), (5, Some(&5)));
        // Those that tokens pass go nevertheless.
        checkpoints.pin(5);
        for at in 6..30 {
            assert_eq!(checkpoints.is_end_passing(), at > 6 && at != 22);
            checkpoints.push_passing(at, at, MAX_BYTES / 2);
        }
        assert_eq!(checkpoints.positions(), [5, 29]);
    }

    #[test]
    fn of_those_that_tokens_pass_the_last_stays_and_one_in_an_interval() {
        let mut checkpoints = Checkpoints::default();
        checkpoints.push(100, 100, 1);
        for at in 101..=150 {
            let gone = checkpoints.push_passing(at, at, 1);
            assert!(gone.is_empty() || gone == [at - 1]);
        }
        assert_eq!(checkpoints.positions(), [100, 116, 132, 148, 150]);
        // A pin stays, and what several tokens follow, until then.
        checkpoints.pin(150);
        for at in 151..160 {
            checkpoints.push_passing(at, at, 1);
        }
        assert_eq!(checkpoints.positions(), [100, 116, 132, 148, 150, 159]);
        checkpoints.push(163, 163, 1);
        assert_eq!(checkpoints.truncate(161), [163]);
        assert_eq!(checkpoints.end(), 159);
        assert_eq!(checkpoints.push_passing(160, 160, 1), [159]);
    }
}
