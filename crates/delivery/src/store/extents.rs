//! Which bytes of a blob have arrived.

use std::ops::Range;

/// Ranges that neither overlap nor touch, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Extents(Vec<Range<u64>>);

impl Extents {
    /// Adds a range; what was there already stays.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        // Those that `range` touches are adjacent.
        let first = self.0.partition_point(|r| r.end < range.start);
        let last = self.0.partition_point(|r| r.start <= range.end);
        let merged = match self.0.get(first..last) {
            Some([a, .., b]) => a.start.min(range.start)..b.end.max(range.end),
            Some([a]) => a.start.min(range.start)..a.end.max(range.end),
            _ => range,
        };
        self.0.splice(first..last, [merged]);
    }

    /// Removes a range.
    pub(super) fn remove(&mut self, range: &Range<u64>) {
        let kept = |r: &Range<u64>| {
            let before = r.start..r.end.min(range.start);
            let after = r.start.max(range.end)..r.end;
            [before, after].into_iter().filter(|part| !part.is_empty())
        };
        if !range.is_empty() {
            self.0 = self.0.iter().flat_map(kept).collect();
        }
    }

    /// The end of the last of them.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, |r| r.end)
    }

    /// Contiguous bytes from the first on.
    pub(super) fn prefix(&self) -> u64 {
        self.0.first().filter(|r| r.start == 0).map_or(0, |r| r.end)
    }

    /// Total bytes.
    pub(super) fn len(&self) -> u64 {
        self.0.iter().map(|r| r.end - r.start).sum()
    }

    pub(super) fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut extents = Extents::default();
        for range in [20..30, 0..5, 40..41, 5..10, 3..3] {
            extents.insert(range);
        }
        assert_eq!(extents.ranges(), [0..10, 20..30, 40..41]);
        assert_eq!((extents.prefix(), extents.len()), (10, 21));
        extents.insert(8..40);
        assert_eq!(extents.ranges(), slice::from_ref(&(0..41)));
        extents.remove(&(7..10));
        extents.remove(&(40..50));
        assert_eq!(extents.ranges(), [0..7, 10..40]);
        extents.remove(&(5..5));
        extents.remove(&(0..20));
        assert_eq!(extents.ranges(), slice::from_ref(&(20..40)));
        assert_eq!(
            (extents.prefix(), extents.len(), extents.end()),
            (0, 20, 40)
        );
    }

    #[test]
    fn any_order_gives_the_set_of_bytes() {
        // A small random generator, so that failures are reproducible.
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let (mut extents, mut bytes) = (Extents::default(), [false; 64]);
            for _ in 0..12 {
                let start = next(64);
                let end = start + next(64 - start + 1);
                extents.insert(start..end);
                bytes[start as usize..end as usize].fill(true);
                if next(8) == 0 {
                    let start = next(64);
                    let end = start + next(64 - start + 1);
                    extents.remove(&(start..end));
                    bytes[start as usize..end as usize].fill(false);
                }
                let mut found = [false; 64];
                for r in extents.ranges() {
                    found[r.start as usize..r.end as usize].fill(true);
                }
                assert_eq!(found, bytes);
                assert!(extents.ranges().windows(2).all(|w| w[0].end < w[1].start));
            }
        }
    }
}
