//! Whose turn it is: keys in turn, and of each key what came first.

use std::collections::VecDeque;

/// What waits, by key.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    /// Keys for which something waits, the next one first.
    keys: VecDeque<(usize, VecDeque<T>)>,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        FairQueue {
            keys: VecDeque::new(),
        }
    }
}

impl<T> FairQueue<T> {
    /// Adds `item` of `key`, after all others of it.
    pub(super) fn push(&mut self, key: usize, item: T) {
        match self.keys.iter_mut().find(|(own, _)| *own == key) {
            Some((_, items)) => items.push_back(item),
            None => self.keys.push_back((key, VecDeque::from([item]))),
        }
    }

    /// Takes the next item of the next key for which `may` lets it go; that key is the last one then.
    pub(super) fn next(&mut self, mut may: impl FnMut(&T) -> bool) -> Option<T> {
        let at = self
            .keys
            .iter()
            .position(|(_, items)| items.front().is_some_and(&mut may))?;
        let (key, mut items) = self.keys.remove(at)?;
        let item = items.pop_front();
        if !items.is_empty() {
            self.keys.push_back((key, items));
        }
        item
    }

    /// Keeps what `keep` says; returns how many are gone.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) -> usize {
        let before = self.len();
        for (_, items) in &mut self.keys {
            items.retain(&mut keep);
        }
        self.keys.retain(|(_, items)| !items.is_empty());
        before - self.len()
    }

    /// All that wait.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.keys.iter().flat_map(|(_, items)| items)
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.keys.iter().map(|(_, items)| items.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(queue: &mut FairQueue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.next(|_| true)).collect()
    }

    #[test]
    fn keys_take_turns_and_keep_their_order() {
        let mut queue = FairQueue::default();
        for item in ["a1", "a2", "a3", "a4"] {
            queue.push(0, item);
        }
        queue.push(1, "b1");
        queue.push(2, "c1");
        queue.push(1, "b2");
        assert_eq!(queue.len(), 7);
        let order = ["a1", "b1", "c1", "a2", "b2", "a3", "a4"];
        assert_eq!(drained(&mut queue), order);
        assert!(queue.is_empty());
    }

    #[test]
    fn who_may_not_yet_is_passed_over_and_not_forgotten() {
        let mut queue = FairQueue::default();
        queue.push(0, "a1");
        queue.push(0, "a2");
        queue.push(1, "b1");
        assert_eq!(queue.next(|item| *item != "a1"), Some("b1"));
        assert_eq!(queue.next(|item| *item != "a1"), None);
        assert_eq!(queue.retain(|item| *item != "a1"), 1);
        assert_eq!(drained(&mut queue), ["a2"]);
    }
}
