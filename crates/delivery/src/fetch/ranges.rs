//! Sets of byte positions, kept as ranges.

use std::{iter, ops::Range};

/// Positions as ranges that are sorted, not empty, and neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet(Vec<Range<u64>>);

impl RangeSet {
    /// No positions.
    pub fn new() -> Self {
        Self::default()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// True if there are no positions.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of positions.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Adds every position of `range`.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end < range.start);
        let last = self.0.partition_point(|r| r.start <= range.end);
        let start = (self.0[first..last].first()).map_or(range.start, |r| r.start.min(range.start));
        let end = (self.0[first..last].last()).map_or(range.end, |r| r.end.max(range.end));
        self.0.splice(first..last, iter::once(start..end));
    }

    /// Removes every position of `range`.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end <= range.start);
        let last = self.0.partition_point(|r| r.start < range.end);
        let rest: Vec<_> = (self.0[first..last].iter())
            .flat_map(|r| {
                [
                    r.start..range.start.min(r.end),
                    range.end.max(r.start)..r.end,
                ]
            })
            .filter(|r| !r.is_empty())
            .collect();
        self.0.splice(first..last, rest);
    }

    /// The end of the range that contains `position`.
    pub fn end_of_run(&self, position: u64) -> Option<u64> {
        let index = self.0.partition_point(|r| r.end <= position);
        (self.0.get(index)).and_then(|r| r.contains(&position).then_some(r.end))
    }

    /// The first range of `0..end` that is not in the set.
    pub fn first_gap(&self, end: u64) -> Option<Range<u64>> {
        let start = self.end_of_run(0).unwrap_or(0);
        let next = self.0.partition_point(|r| r.start <= start);
        let gap_end = self.0.get(next).map_or(end, |r| r.start.min(end));
        (start < gap_end).then_some(start..gap_end)
    }

    /// Positions in either.
    pub fn union(&self, other: &Self) -> Self {
        let mut union = self.clone();
        other.iter().for_each(|range| union.insert(range));
        union
    }
}

impl FromIterator<Range<u64>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut set = Self::new();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let set: RangeSet = [5..7, 0..2, 2..3, 9..9, 7..8].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0..3, 5..8]);
        assert_eq!((set.len(), set.is_empty()), (6, false));
        assert_eq!((set.end_of_run(1), set.end_of_run(3)), (Some(3), None));
        assert_eq!(set.first_gap(20), Some(3..5));
        assert_eq!(set.first_gap(4), Some(3..4));
        assert_eq!(set.first_gap(3), None);
        assert_eq!(RangeSet::new().first_gap(4), Some(0..4));
    }

    proptest! {
        #[test]
        fn it_is_the_set_of_its_positions(steps in prop::collection::vec((any::<bool>(), 0u64..40, 0u64..12), 0..40)) {
            let (mut set, mut model) = (RangeSet::new(), [false; 60]);
            for (add, start, len) in steps {
                let range = start..start + len;
                model[range.start as usize..range.end as usize].fill(add);
                if add { set.insert(range) } else { set.remove(range) }
                for at in 0..60 {
                    prop_assert_eq!(set.end_of_run(at).is_some(), model[at as usize]);
                }
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.iter().all(|r| r.start < r.end));
                prop_assert!(ranges.windows(2).all(|w| w[0].end < w[1].start));
                let gap = model.iter().position(|held| !held).unwrap_or(60) as u64;
                prop_assert_eq!(set.first_gap(60).map_or(60, |g| g.start), gap);
            }
        }
    }
}
