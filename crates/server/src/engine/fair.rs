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

    /// Adds `item` of `key`, before all others of all keys.
    pub(super) fn push_front(&mut self, key: usize, item: T) {
        let at = self.keys.iter().position(|(own, _)| *own == key);
        let own = at.and_then(|at| self.keys.remove(at));
        let mut items = own.map_or_else(VecDeque::new, |(_, items)| items);
        items.push_front(item);
        self.keys.push_front((key, items));
    }

    /// Takes the first item of the next key that has one which `may` lets go; that key is the last one then.
    pub(super) fn next(&mut self, mut may: impl FnMut(&T) -> bool) -> Option<T> {
        let first = |(at, (_, items)): (usize, &(usize, VecDeque<T>))| {
            Some((at, items.iter().position(&mut may)?))
        };
        let (at, index) = self.keys.iter().enumerate().find_map(first)?;
        let (key, mut items) = self.keys.remove(at)?;
        let item = items.remove(index);
        if !items.is_empty() {
            self.keys.push_back((key, items));
        }
        item
    }

    /// Takes all items.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> {
        let keys = std::mem::take(&mut self.keys);
        keys.into_iter().flat_map(|(_, items)| items)
    }

    /// Keeps what `keep` says.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for (_, items) in &mut self.keys {
            items.retain(&mut keep);
        }
        self.keys.retain(|(_, items)| !items.is_empty());
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
        queue.push(1, "b2");
        let may = |item: &&str| *item != "a1";
        assert_eq!(queue.next(may), Some("a2"));
        assert_eq!(queue.next(may), Some("b1"));
        assert_eq!(queue.next(may), Some("b2"));
        assert_eq!(queue.next(may), None);
        assert_eq!(drained(&mut queue), ["a1"]);
    }

    #[test]
    fn what_comes_back_is_before_all_others() {
        let mut queue = FairQueue::default();
        for (key, item) in [(0, "a2"), (1, "b2"), (1, "b3")] {
            queue.push(key, item);
        }
        for (key, item) in [(2, "c1"), (1, "b1"), (0, "a1")] {
            queue.push_front(key, item);
        }
        queue.retain(|item| *item != "b3");
        let order = ["a1", "b1", "c1", "a2", "b2"];
        assert_eq!(drained(&mut queue), order);
    }
}
