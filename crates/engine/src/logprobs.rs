//! Log-probabilities of tokens.

use sterna_kernels::logits as kernels;

/// The log-probability of a token that was chosen, and those of the most probable ones: the log-softmax of
/// the model's logits, before bias, penalties and temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// Of the most probable tokens, with their ids: the best first, lower ids first among equals.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Those of token `id` and of the `n` most probable ones, by `logits`, `[n_vocab]`. NaN counts as −∞.
    pub fn new(logits: &[f32], id: u32, n: usize) -> Logprobs {
        let max = kernels::largest(logits).map_or(f32::NEG_INFINITY, |(_, max)| max);
        let log_total = kernels::log_sum(logits, max);
        let logprob = |logit| logprob(logit, max, log_total);
        let mut best = kernels::best(logits, n);
        let others = (0..logits.len() as u32).filter(|id| {
            logits[*id as usize].is_nan() || logits[*id as usize] == f32::NEG_INFINITY
        });
        best.extend(others.take(n.saturating_sub(best.len())));
        Logprobs {
            chosen: logits
                .get(id as usize)
                .map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
            top: best
                .into_iter()
                .map(|id| (id, logprob(logits[id as usize])))
                .collect(),
        }
    }

    /// The same where a device has found the logit of the token, the largest ones with their ids, best first, and the
    /// logarithm of the sum of `exp(logit − largest)` over all. `None` if the largest isn't finite, or there is none.
    #[cfg(feature = "gpu")]
    pub(crate) fn of_largest(
        chosen: f32,
        largest: &[(u32, f32)],
        log_total: f32,
        n: usize,
    ) -> Option<Logprobs> {
        let (_, max) = *largest.first().filter(|(_, max)| max.is_finite())?;
        let logprob = |logit| logprob(logit, max, f64::from(log_total));
        let top = largest
            .iter()
            .take(n)
            .map(|&(id, logit)| (id, logprob(logit)));
        Some(Logprobs {
            chosen: logprob(chosen),
            top: top.collect(),
        })
    }
}

/// The log-probability of `logit` where `max` is the largest, and `log_total` the logarithm of the sum of weights relative
/// to that.
fn logprob(logit: f32, max: f32, log_total: f64) -> f32 {
    // Several that are infinite are equal.
    let below = match logit {
        logit if logit == max => 0.0,
        logit if logit.is_nan() => f64::NEG_INFINITY,
        logit => f64::from(logit) - f64::from(max),
    };
    (below - log_total) as f32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax() {
        let logits = [1.0, 3.0, f32::NAN, 3.0, f32::NEG_INFINITY];
        let found = Logprobs::new(&logits, 0, 4);
        let total = 2.0 + (-2f64).exp();
        let best = -(total.ln()) as f32;
        let least = (-2.0 - total.ln()) as f32;
        assert_eq!(found.chosen, least);
        let top = [(1, best), (3, best), (0, least), (2, f32::NEG_INFINITY)];
        assert_eq!(found.top, top);
        assert_eq!(Logprobs::new(&logits, 4, 0).chosen, f32::NEG_INFINITY);
        assert_eq!(Logprobs::new(&[f32::INFINITY, 0.0], 0, 9).top[0], (0, 0.0));
    }

    proptest! {
        /// Against the definition, written with a full sort.
        #[test]
        fn as_computed_directly(
            logits in prop::collection::vec(-30f32..30.0, 1..200),
            n in 0usize..220,
            id in any::<prop::sample::Index>(),
        ) {
            let id = id.index(logits.len()) as u32;
            let found = Logprobs::new(&logits, id, n);
            let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            let direct = |id: u32| f64::from(logits[id as usize]) - total.ln();
            prop_assert!((f64::from(found.chosen) - direct(id)).abs() < 1e-4);
            let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
            ids.sort_by(|&a, &b| direct(b).total_cmp(&direct(a)).then(a.cmp(&b)));
            ids.truncate(n);
            let found_ids: Vec<u32> = found.top.iter().map(|top| top.0).collect();
            prop_assert_eq!(found_ids, ids);
            for (id, logprob) in found.top {
                prop_assert!((f64::from(logprob) - direct(id)).abs() < 1e-4);
            }
        }
    }
}
