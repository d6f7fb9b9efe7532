//! Speculation by prompt lookup: what followed the last tokens when they occurred before is drafted,
//! and checked by computing all drafts in one batch.
//!
//! A batch costs less than its tokens one by one, as weights are read once for all of them. The engine
//! gives each token of a batch the logits it would have alone, so a draft is right exactly if it is what
//! the sampler chooses from the logits before it: the answer is the same with and without drafts, and
//! only the time differs.

use std::collections::HashMap;

/// Lengths of the runs of last tokens that are looked for, the most telling first.
const RUNS: [usize; 2] = [3, 2];

/// What a draft adds to the cost of a batch, as a share of what decoding a token costs: a careful figure,
/// as it depends on the model, the machine and the number of threads.
const COST: f32 = 0.25;

/// What may be lost to drafts for every token that is decoded.
const ALLOWANCE: f32 = 0.015;

/// Drafts tried at first, and again after some were wrong.
const SHORT: usize = 2;

/// Drafts of what comes next, from the text so far, as long as they are worth their cost.
///
/// Drafts are paid for out of savings, in units of what decoding a token costs: each costs [`COST`], each
/// that was right saves one token, and each token decoded adds [`ALLOWANCE`]. Where nothing repeats, that
/// bounds what is lost; where much does, the savings let a change of the text be tried out.
#[derive(Debug)]
pub(crate) struct Drafter {
    text: Vec<u32>,
    /// Where the token is that followed the latest occurrence of a run, the run at the end of the text
    /// excepted. Runs shorter than the longest are filled up with a number that is no token.
    followers: HashMap<Run, usize>,
    /// Drafts at most.
    max: usize,
    /// Drafts tried at a time.
    len: usize,
    savings: f32,
    /// Drafts that were last given out.
    n_drafts: usize,
    /// How many of them were right.
    n_right: usize,
}

type Run = [u32; RUNS[0]];

impl Drafter {
    /// A drafter that knows no text yet and drafts up to `max` tokens at a time.
    pub(crate) fn new(max: usize) -> Drafter {
        Drafter {
            text: Vec::new(),
            followers: HashMap::new(),
            max,
            len: SHORT,
            savings: SHORT as f32 * COST,
            n_drafts: 0,
            n_right: 0,
        }
    }

    /// Appends a token to the text.
    pub(crate) fn push(&mut self, id: u32) {
        for n in RUNS {
            if let Some(run) = self.last_run(n) {
                self.followers.insert(run, self.text.len());
            }
        }
        self.text.push(id);
    }

    /// The last `n` tokens, if there are so many.
    fn last_run(&self, n: usize) -> Option<Run> {
        let start = self.text.len().checked_sub(n)?;
        let mut run = [u32::MAX; RUNS[0]];
        run[..n].copy_from_slice(&self.text[start..]);
        Some(run)
    }

    /// What may come next: at most `limit` tokens, and none if nothing is known or worth trying.
    pub(crate) fn draft(&mut self, limit: usize) -> &[u32] {
        if self.n_right < self.n_drafts {
            self.len = (self.n_right + 1).max(SHORT);
        } else if self.n_drafts > 0 {
            self.len *= 2;
        }
        self.len = self.len.min(self.max);
        self.savings = (self.savings + ALLOWANCE).min(self.max as f32 * COST);
        let affordable = (self.savings / COST) as usize;
        let found = RUNS
            .into_iter()
            .find_map(|n| self.followers.get(&self.last_run(n)?).copied());
        // Without a match, the end of the text: nothing.
        let start = found.unwrap_or(self.text.len());
        let len = (self.text.len() - start)
            .min(self.len)
            .min(limit)
            .min(affordable);
        (self.n_drafts, self.n_right) = (len, 0);
        self.savings -= len as f32 * COST;
        &self.text[start..start + len]
    }

    /// Takes note that the next of the last drafts was right.
    pub(crate) fn confirm(&mut self) {
        self.n_right += 1;
        self.savings += 1.0;
    }
}

/// Drafts that were computed, and are not known to be right yet.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    drafts: Vec<u32>,
    /// Those that turned out to be right.
    n_right: usize,
    /// What follows each, `[drafts.len(), n_vocab]`.
    logits: Vec<f32>,
}

impl Ahead {
    /// Keeps `drafts` and the `logits` that follow each, `[drafts.len(), n_vocab]`.
    pub(crate) fn new(drafts: Vec<u32>, logits: Vec<f32>) -> Ahead {
        Ahead {
            drafts,
            n_right: 0,
            logits,
        }
    }

    /// True if no draft is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.n_right == self.drafts.len()
    }

    /// The logits that follow `id`, `[n_vocab]`, if it was drafted to come next.
    pub(crate) fn take(&mut self, id: u32) -> Option<Vec<f32>> {
        if self.drafts.get(self.n_right) != Some(&id) {
            return None;
        }
        let n_vocab = self.logits.len() / self.drafts.len();
        let logits = self.logits[self.n_right * n_vocab..][..n_vocab].to_vec();
        self.n_right += 1;
        Some(logits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drafter(max: usize, text: &[u32]) -> Drafter {
        let mut drafter = Drafter::new(max);
        text.iter().for_each(|&id| drafter.push(id));
        drafter
    }

    #[test]
    fn what_followed_before_is_drafted() {
        for (text, expected) in [
            (&[][..], &[][..]),
            (&[1], &[]),
            (&[1, 2, 3, 4], &[]),
            // A run of two, and its latest occurrence.
            (&[1, 2, 3, 4, 1, 2], &[3, 4]),
            (&[1, 2, 3, 4, 1, 2, 5, 6, 1, 2], &[5, 6]),
            // A run of three says more than a later one of two.
            (&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], &[4, 9]),
            // A run that overlaps its own beginning.
            (&[7, 7, 7], &[7]),
            // One token says too little.
            (&[1, 2, 3, 1], &[]),
        ] {
            assert_eq!(drafter(8, text).draft(100), expected, "{text:?}");
        }
    }

    #[test]
    fn drafts_grow_while_they_are_right() {
        let text: Vec<u32> = (0..50).chain(0..2).collect();
        let mut drafter = drafter(8, &text);
        let mut lens = Vec::new();
        let mut next = 2;
        while next < 40 {
            let drafts = drafter.draft(100).to_vec();
            lens.push(drafts.len());
            for id in drafts {
                assert_eq!(id, next);
                drafter.confirm();
                drafter.push(id);
                next += 1;
            }
            drafter.push(next);
            next += 1;
        }
        assert_eq!(lens, [2, 4, 8, 8, 8, 8]);
        assert_eq!(drafter.draft(3).len(), 3);
        // None was right.
        assert_eq!(drafter.draft(100).len(), SHORT);
    }

    proptest! {
        /// However text and drafts turn out: no more is lost than was allowed, and every draft is what
        /// followed the last two tokens somewhere before.
        #[test]
        fn losses_are_bounded(
            ids in prop::collection::vec(0u32..6, 0..400),
            start in 0usize..20,
            max in 1usize..20,
        ) {
            let start = start.min(ids.len());
            let mut drafter = drafter(max, &ids[..start]);
            let (mut n_drafted, mut n_right) = (0, 0);
            let mut at = start;
            while at < ids.len() {
                let drafts = drafter.draft(ids.len() - at).to_vec();
                prop_assert!(drafts.len() <= max);
                if !drafts.is_empty() {
                    let (text, last) = (&ids[..at], &ids[at - 2..at]);
                    let known = [last, &drafts].concat();
                    prop_assert!((0..at - 2).any(|i| text[i..].starts_with(&known)));
                }
                n_drafted += drafts.len();
                let right = drafts.iter().zip(&ids[at..]).take_while(|(a, b)| a == b).count();
                for &id in &drafts[..right] {
                    drafter.confirm();
                    drafter.push(id);
                }
                n_right += right;
                at += right;
                if at < ids.len() {
                    drafter.push(ids[at]);
                    at += 1;
                }
            }
            let lost = n_drafted as f32 * COST - n_right as f32;
            let allowed = SHORT as f32 * COST + (at - start) as f32 * ALLOWANCE;
            prop_assert!(lost <= allowed + 1e-3, "{lost} of {allowed}");
        }
    }

    #[test]
    fn logits_are_given_out_as_long_as_drafts_are_right() {
        let mut ahead = Ahead::new(vec![5, 6, 7], vec![0.5, 0.0, 0.6, 0.0, 0.7, 0.0]);
        assert_eq!(ahead.take(6), None);
        assert_eq!(ahead.take(5), Some(vec![0.5, 0.0]));
        assert_eq!(ahead.take(6), Some(vec![0.6, 0.0]));
        assert!(!ahead.is_empty());
        assert_eq!(ahead.take(9), None);
        assert_eq!(ahead.take(7), Some(vec![0.7, 0.0]));
        assert!(ahead.is_empty());
        assert_eq!(ahead.take(7), None);
        assert_eq!(Ahead::default().take(0), None);
    }
}
