//! Which sequence a prompt continues.
//!
//! Sequences that were computed by the same are in a tree over their tokens. It says what a prompt has most in common
//! with in the time that reading the prompt takes, however many there are, and has what several begin with once.
//! Whoever continues a sequence compares its tokens nevertheless: the tree decides what is computed again, and no answer.

mod tree;

use std::collections::HashMap;
use std::hash::Hash;

use tree::Tree;

/// Tokens that are worth keeping: with fewer in common a sequence isn't forked, and with more that a prompt
/// doesn't continue it isn't taken away from its conversation.
pub(super) const WORTH: usize = 8;

/// A sequence that a prompt may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate<Id> {
    pub(super) id: Id,
    /// Its tokens.
    pub(super) len: usize,
    /// Those that the prompt begins with.
    pub(super) n_common: usize,
    /// It answers another request.
    pub(super) is_busy: bool,
}

/// What to begin an answer on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice<Id> {
    /// This sequence, which nobody else needs as it is.
    Take(Id),
    /// A fork of this one, of so many tokens.
    Fork(Id, usize),
    /// An empty one.
    New,
}

/// The choice among `candidates`; of equals, the last.
pub(super) fn choose<Id: Copy>(candidates: impl Iterator<Item = Candidate<Id>>) -> Choice<Id> {
    // What would be lost by taking one counts against it.
    let best = candidates.max_by_key(|c| (c.n_common, !c.is_busy, usize::MAX - c.len));
    match best {
        Some(c) if !c.is_busy && c.len - c.n_common <= WORTH => Choice::Take(c.id),
        Some(c) if c.n_common > WORTH => Choice::Fork(c.id, c.n_common),
        _ => Choice::New,
    }
}

/// A sequence that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Near<Id> {
    pub(super) id: Id,
    /// Its tokens.
    pub(super) len: usize,
    /// Those that the prompt begins with.
    pub(super) n_common: usize,
}

/// Sequences by what computed them, `K`, and their tokens.
pub(super) struct Prefixes<K, Id> {
    /// Each has sequences.
    trees: HashMap<K, Tree<Id>>,
}

impl<K, Id> Default for Prefixes<K, Id> {
    fn default() -> Prefixes<K, Id> {
        Prefixes {
            trees: HashMap::new(),
        }
    }
}

impl<K: Eq + Hash, Id: Copy + Ord + Hash> Prefixes<K, Id> {
    /// Adds the sequence `id` of `ids`, which no other of `key` may be called.
    pub(super) fn insert(&mut self, key: K, id: Id, ids: &[u32]) {
        self.trees.entry(key).or_default().insert(id, ids);
    }

    /// The sequence `id`, which may be new, is `ids` now: what it was, and what has followed since, which alone takes
    /// time.
    pub(super) fn grow(&mut self, key: K, id: Id, ids: &[u32]) {
        self.trees.entry(key).or_default().grow(id, ids);
    }

    /// Removes the sequence `id`, if there is one.
    pub(super) fn remove(&mut self, key: &K, id: Id) {
        if let Some(tree) = self.trees.get_mut(key) {
            tree.remove(id);
            if tree.is_empty() {
                self.trees.remove(key);
            }
        }
    }

    /// The sequence that has most in common with `prompt`; of equals the shortest, and of these the one with the greatest
    /// id.
    pub(super) fn nearest(&self, key: &K, prompt: &[u32]) -> Option<Near<Id>> {
        self.trees.get(key)?.nearest(prompt)
    }

    /// The sequences that `prompt` begins with, the longest first.
    pub(super) fn beginnings(&self, key: &K, prompt: &[u32]) -> impl Iterator<Item = Near<Id>> {
        let tree = self.trees.get(key);
        tree.into_iter().flat_map(|tree| tree.beginnings(prompt))
    }

    /// The sequences from which most of `prompt` can be taken: the nearest, or, of those that can only be taken whole, the
    /// longest that it begins with.
    pub(super) fn continued(
        &self,
        key: &K,
        prompt: &[u32],
        is_whole: bool,
    ) -> impl Iterator<Item = Near<Id>> {
        let (nearest, beginnings) = match is_whole {
            true => (None, Some(self.beginnings(key, prompt))),
            false => (self.nearest(key, prompt), None),
        };
        let mut longest = None;
        let is_longest = move |near: &Near<Id>| *longest.get_or_insert(near.len) == near.len;
        let whole = beginnings.into_iter().flatten().take_while(is_longest);
        nearest.into_iter().chain(whole)
    }

    /// The keys of all sequences.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.trees.keys()
    }
}

/// The length of the common prefix of `a` and `b`.
pub(super) fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
