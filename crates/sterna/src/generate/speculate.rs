//! Speculative decoding by prompt lookup: what followed earlier occurrences of the last tokens is drafted,
//! and verified by computing all drafts in one batch.
//!
//! A batch costs less than its tokens one by one, as weights are read once for all of them. The engine gives
//! each token of a batch the same logits as alone, so a draft is accepted exactly if the sampler chooses it
//! from the logits before it: the answer is the same with and without drafts, and only the time differs.

use std::collections::HashMap;

/// Lengths of the suffixes that are looked up, the most informative first.
const RUNS: [usize; 2] = [3, 2];

/// Beyond this length, a longer match is no more informative.
const MAX_MATCH: usize = 16;

/// The fixed extra cost of a batch with drafts over decoding one token, in units of the latter.
const BATCH_COST: f32 = 0.35;

/// The cost of each draft. Both were measured (`sterna bench -b`) and depend on the model, the machine and
/// the number of threads: a batch of two took 1.3 to 1.6 times as long as one token, of four 1.4 to 1.7, of
/// eight 2.0 to 2.4.
const DRAFT_COST: f32 = 0.1;

/// How much drafts may waste per decoded token.
const ALLOWANCE: f32 = 0.015;

/// How much may be wasted initially: a draft of one token.
const ADVANCE: f32 = BATCH_COST + DRAFT_COST;

/// Drafts of what comes next, from the text so far, as long as they are worth their cost.
///
/// The acceptance rate is estimated for each length of match, by comparing what would have been drafted with
/// the actual tokens: that requires no computation, so the prompt contributes to it too, and so do stretches
/// where drafting doesn't pay. The number of drafts maximises the expected gain.
///
/// Drafts are limited to a budget earned by savings: each accepted draft saves one token, and each token
/// decoded adds [`ALLOWANCE`]. That bounds the loss for any text.
#[derive(Debug)]
pub(super) struct Drafter {
    text: Vec<u32>,
    /// The index of the token after the latest occurrence of each run, except for the run at the end of the
    /// text. Runs shorter than the longest are padded with an invalid token.
    followers: HashMap<Run, usize>,
    /// An earlier occurrence of the end of the text.
    found: Option<Match>,
    rates: Rates,
    /// Maximum number of drafts.
    max: usize,
    savings: f32,
    /// The latest drafts.
    drafts: Vec<u32>,
}

type Run = [u32; RUNS[0]];

/// An earlier occurrence of the tokens at the end of a text.
#[derive(Debug, Clone, Copy)]
struct Match {
    /// The index of the token that followed them.
    next: usize,
    /// How many tokens are equal, at most [`MAX_MATCH`].
    len: usize,
}

impl Drafter {
    /// A drafter without text that drafts up to `max` tokens at a time.
    pub(super) fn new(max: usize) -> Drafter {
        Drafter {
            text: Vec::new(),
            followers: HashMap::new(),
            found: None,
            rates: Rates::new(),
            max,
            savings: ADVANCE,
            drafts: Vec::new(),
        }
    }

    /// Appends a token to the text.
    pub(super) fn push(&mut self, id: u32) {
        if let Some(found) = self.found {
            self.rates.learn(found.len, self.text[found.next] == id);
        }
        for n in RUNS {
            if let Some(run) = self.last_run(n) {
                self.followers.insert(run, self.text.len());
            }
        }
        self.text.push(id);
        self.found = self.find();
    }

    /// The last `n` tokens, if there are as many.
    fn last_run(&self, n: usize) -> Option<Run> {
        let start = self.text.len().checked_sub(n)?;
        let mut run = [u32::MAX; RUNS[0]];
        run[..n].copy_from_slice(&self.text[start..]);
        Some(run)
    }

    fn find(&self) -> Option<Match> {
        let next = RUNS
            .into_iter()
            .find_map(|n| self.followers.get(&self.last_run(n)?).copied())?;
        let earlier = self.text[..next].iter().rev();
        let len = earlier
            .zip(self.text.iter().rev())
            .take(MAX_MATCH)
            .take_while(|(a, b)| a == b)
            .count();
        Some(Match { next, len })
    }

    /// Drafts the next tokens: at most `limit`, and none if there is no match or it doesn't pay. What is
    /// `forced` takes precedence over what the text suggests.
    pub(super) fn draft(&mut self, limit: usize, forced: &[u32]) -> &[u32] {
        let cost = |n: usize| BATCH_COST + DRAFT_COST * n as f32;
        self.savings = (self.savings + ALLOWANCE).min(cost(self.max));
        self.drafts.clear();
        if !forced.is_empty() {
            let most = self.max.min(limit).min(forced.len());
            let len = (1..=most).take_while(|&n| self.savings >= cost(n)).count();
            if len > 0 {
                self.savings -= cost(len);
            }
            self.drafts.extend(&forced[..len]);
            return &self.drafts;
        }
        let Some(found) = self.found else {
            return &self.drafts;
        };
        let (mut right, mut expected) = (1.0, 0.0);
        let (mut len, mut gain) = (0, 0.0);
        for n in 1..=self.max.min(limit) {
            right *= self.rates.of(found.len + n - 1);
            expected += right;
            if right < DRAFT_COST || self.savings < cost(n) {
                break;
            }
            if expected - cost(n) > gain {
                (len, gain) = (n, expected - cost(n));
            }
        }
        if len > 0 {
            self.savings -= cost(len);
        }
        // A match that overlaps the end of the text continues periodically.
        let behind = &self.text[found.next..];
        self.drafts.extend(behind.iter().cycle().take(len));
        &self.drafts
    }

    /// Records that the next of the latest drafts was accepted.
    pub(super) fn confirm(&mut self) {
        self.savings += 1.0;
    }
}

/// Acceptance rates, for lengths of match of 2, 4, 8 and [`MAX_MATCH`] on.
#[derive(Debug)]
struct Rates([f32; 4]);

impl Rates {
    /// Typical for texts that repeat something.
    fn new() -> Rates {
        Rates([0.4, 0.7, 0.85, 0.9])
    }

    fn index(match_len: usize) -> usize {
        match_len.clamp(2, MAX_MATCH).ilog2() as usize - 1
    }

    fn of(&self, match_len: usize) -> f32 {
        self.0[Rates::index(match_len)]
    }

    /// Records one more case; older cases have exponentially less weight.
    fn learn(&mut self, match_len: usize, right: bool) {
        let rate = &mut self.0[Rates::index(match_len)];
        *rate += (f32::from(u8::from(right)) - *rate) / 16.0;
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
            (&[1, 2, 3, 4, 1, 2], &[3, 4, 1]),
            (&[1, 2, 3, 4, 1, 2, 5, 6, 1, 2], &[5, 6, 1]),
            // A run of three takes precedence over a later one of two.
            (&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], &[4, 9, 2]),
            // A run that overlaps its own beginning continues.
            (&[7, 7, 7], &[7, 7, 7]),
            (&[5, 6, 5, 6], &[5, 6, 5]),
            // One token is not informative enough.
            (&[1, 2, 3, 1], &[]),
        ] {
            let mut drafter = drafter(3, text);
            drafter.rates = Rates([1.0; 4]);
            drafter.savings = 3.0;
            assert_eq!(drafter.draft(100, &[]), expected, "{text:?}");
        }
    }

    /// Drafts `text` from token `start` on; returns the lengths of the drafts, and how many were accepted.
    fn follow(drafter: &mut Drafter, text: &[u32], start: usize) -> (Vec<usize>, usize) {
        let (mut lens, mut n_right) = (Vec::new(), 0);
        let mut at = start;
        while at < text.len() {
            let drafts = drafter.draft(text.len() - at, &[]).to_vec();
            lens.push(drafts.len());
            let pairs = drafts.iter().zip(&text[at..]);
            let right = pairs.take_while(|(a, b)| a == b).count();
            for &id in &text[at..at + right] {
                drafter.confirm();
                drafter.push(id);
            }
            n_right += right;
            at += right;
            if let Some(&id) = text.get(at) {
                drafter.push(id);
                at += 1;
            }
        }
        (lens, n_right)
    }

    #[test]
    fn drafts_grow_while_they_are_right() {
        let text: Vec<u32> = (0..100).chain(0..100).collect();
        let mut drafter = drafter(8, &text[..104]);
        let (lens, n_right) = follow(&mut drafter, &text, 104);
        assert!(
            lens[0] > 0 && lens.is_sorted_by(|a, b| a <= b || *b < 8),
            "{lens:?}"
        );
        assert!(
            lens.iter().filter(|&&len| len == 8).count() >= 8,
            "{lens:?}"
        );
        assert_eq!(n_right, lens.iter().sum::<usize>());
    }

    #[test]
    fn what_is_never_right_is_not_drafted_for_long() {
        // Each pair recurs, followed by another token each time.
        let text: Vec<u32> = (0..3000).flat_map(|i| [1, 2, 10 + i]).collect();
        let mut drafter = drafter(8, &[]);
        let (lens, n_right) = follow(&mut drafter, &text, 0);
        assert_eq!(n_right, 0);
        assert!(lens.iter().sum::<usize>() <= 10, "{lens:?}");
        // It takes the prompt to learn it.
        let (lens, _) = follow(&mut drafter, &[text, vec![1, 2, 5, 1, 2, 6]].concat(), 9000);
        assert_eq!(lens.iter().sum::<usize>(), 0);
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
            let (mut balance, mut n_decoded) = (0.0, 0);
            let mut at = start;
            while at < ids.len() {
                let drafts = drafter.draft(ids.len() - at, &[]).to_vec();
                n_decoded += 1;
                prop_assert!(drafts.len() <= max);
                if !drafts.is_empty() {
                    balance -= BATCH_COST + DRAFT_COST * drafts.len() as f32;
                    let text = [&ids[..at], &drafts].concat();
                    let known = &text[at - 2..];
                    prop_assert!((0..at - 2).any(|i| text[i..].starts_with(known)));
                }
                let right = drafts.iter().zip(&ids[at..]).take_while(|(a, b)| a == b).count();
                for &id in &drafts[..right] {
                    drafter.confirm();
                    drafter.push(id);
                    balance += 1.0;
                }
                at += right;
                if at < ids.len() {
                    drafter.push(ids[at]);
                    at += 1;
                }
                let allowed = ADVANCE + ALLOWANCE * n_decoded as f32;
                prop_assert!(balance >= -allowed - 1e-3, "{balance} of {allowed}");
            }
        }
    }
}
