//! When to read the screen of the output head.
//!
//! A screen that rules out nearly all rows saves the time of reading them; where the logits are close it
//! rules out too few, and reading it was wasted. So reading a screen is limited to a budget earned by earlier
//! savings.

use sterna_kernels::gemm::{SCATTERED, ScreenedRows};

/// The screen of a model's output head.
pub(crate) struct Screening<S> {
    pub(crate) screen: S,
    /// Bytes of the head.
    pub(crate) head_bytes: u64,
    /// Bytes of the screen.
    pub(crate) screen_bytes: u64,
}

/// How much of an output head with a screen was read, where only the largest logits were wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeadUse {
    /// Tokens whose largest logits were computed.
    pub n_tokens: u64,
    /// Those of them for which the screen was read.
    pub n_screened: u64,
    /// Rows of the head that were computed, once for all tokens of a batch.
    pub n_rows: u64,
    /// Bytes read, of the head and of the screen.
    pub n_bytes: u64,
    /// Bytes that would have been read without the screen.
    pub n_bytes_unscreened: u64,
}

impl HeadUse {
    /// The difference from `earlier` counters.
    pub fn since(&self, earlier: &HeadUse) -> HeadUse {
        HeadUse {
            n_tokens: self.n_tokens - earlier.n_tokens,
            n_screened: self.n_screened - earlier.n_screened,
            n_rows: self.n_rows - earlier.n_rows,
            n_bytes: self.n_bytes - earlier.n_bytes,
            n_bytes_unscreened: self.n_bytes_unscreened - earlier.n_bytes_unscreened,
        }
    }

    /// The share of the bytes that was read, including the screen; `None` if no token was computed.
    pub fn share(&self) -> Option<f64> {
        let all = self.n_bytes_unscreened;
        (all > 0).then(|| self.n_bytes as f64 / all as f64)
    }
}

/// What the screen may waste per token, as a share of the time of the whole head.
const ALLOWANCE: f64 = 0.005;

/// What may be wasted initially.
const START: f64 = 2.0;

/// Savings are capped, so that a change of the text is noticed.
const MOST: f64 = 4.0;

/// Tracks what the screen saves, in units of the cost of computing the whole head.
#[derive(Debug, Clone)]
pub(crate) struct ScreenBudget {
    savings: f64,
    used: HeadUse,
}

impl Default for ScreenBudget {
    fn default() -> ScreenBudget {
        ScreenBudget {
            savings: START,
            used: HeadUse::default(),
        }
    }
}

impl ScreenBudget {
    /// How much was read so far.
    pub(crate) fn used(&self) -> HeadUse {
        self.used
    }

    /// Whether to read the screen for the next tokens.
    pub(crate) fn can_spend<S>(&mut self, screening: &Screening<S>) -> bool {
        self.savings = (self.savings + ALLOWANCE).min(MOST);
        self.savings >= screening.screen_bytes as f64 / screening.head_bytes as f64
    }

    /// Records `n_tokens` of a batch, for which `rows` of the `n_vocab` were read.
    pub(crate) fn record<S>(
        &mut self,
        screening: &Screening<S>,
        rows: ScreenedRows,
        n_tokens: usize,
        n_vocab: usize,
    ) {
        let ScreenedRows { screened, computed } = rows;
        let Screening {
            head_bytes,
            screen_bytes,
            ..
        } = *screening;
        let used = &mut self.used;
        used.n_tokens += n_tokens as u64;
        used.n_rows += computed as u64;
        used.n_bytes += head_bytes / n_vocab as u64 * computed as u64;
        used.n_bytes_unscreened += head_bytes;
        if screened > 0 {
            used.n_screened += n_tokens as u64;
            used.n_bytes += screen_bytes;
            let rows = computed as f64 / n_vocab as f64;
            // Rows are capped at the cost of the whole head, which is computed instead beyond that.
            let cost = screen_bytes as f64 / head_bytes as f64 + (SCATTERED as f64 * rows).min(1.0);
            self.savings += 1.0 - cost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_VOCAB: usize = 1000;

    fn screening() -> Screening<()> {
        Screening {
            screen: (),
            head_bytes: 1_000_000,
            screen_bytes: 700_000,
        }
    }

    /// Tokens for which the screen is read among `n`, each leaving `n_rows` rows; and the total cost.
    fn run(budget: &mut ScreenBudget, n: usize, n_rows: impl Fn(usize) -> usize) -> (usize, f64) {
        let screening = screening();
        let (mut n_screened, mut cost) = (0, 0.0);
        for i in 0..n {
            let mut rows = ScreenedRows {
                screened: 0,
                computed: N_VOCAB,
            };
            cost += 1.0;
            if budget.can_spend(&screening) {
                n_screened += 1;
                (rows.screened, rows.computed) = (N_VOCAB, n_rows(i));
                cost += n_rows(i) as f64 / N_VOCAB as f64 - 0.3;
            }
            budget.record(&screening, rows, 1, N_VOCAB);
        }
        (n_screened, cost)
    }

    #[test]
    fn a_screen_that_rules_rows_out_is_read_for_every_token() {
        let mut budget = ScreenBudget::default();
        assert_eq!(run(&mut budget, 500, |_| 5).0, 500);
        let used = budget.used();
        assert_eq!(
            (used.n_tokens, used.n_screened, used.n_rows),
            (500, 500, 2500)
        );
        assert_eq!(used.n_bytes, 500 * (700_000 + 5000));
        assert_eq!(used.n_bytes_unscreened, 500_000_000);
        assert_eq!(used.share(), Some(0.705));
        assert_eq!(used.since(&HeadUse::default()), used);
        assert_eq!(used.since(&used).share(), None);
        // Losses in between are covered by savings.
        assert_eq!(
            run(&mut budget, 500, |i| if i % 5 == 0 { N_VOCAB } else { 5 }).0,
            500
        );
    }

    #[test]
    fn losses_are_bounded() {
        for n in [1, 10, 100, 1000, 10_000] {
            let (n_screened, cost) = run(&mut ScreenBudget::default(), n, |_| N_VOCAB);
            assert!(n_screened >= 1);
            let lost = cost - n as f64;
            assert!(lost <= START + n as f64 * ALLOWANCE + 1e-6, "{lost} of {n}");
        }
        // However much was saved before.
        let mut budget = ScreenBudget::default();
        run(&mut budget, 10_000, |_| 1);
        let (_, cost) = run(&mut budget, 1000, |_| N_VOCAB);
        assert!(cost <= 1000.0 + MOST + 1000.0 * ALLOWANCE + 1e-6);
        // And it is tried again.
        let (n_screened, _) = run(&mut budget, 1000, |_| 1);
        assert!(n_screened > 800, "{n_screened}");
    }
}
