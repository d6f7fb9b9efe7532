//! Log-probabilities of tokens.

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
        let value = |logit: f32| {
            if logit.is_nan() {
                f32::NEG_INFINITY
            } else {
                logit
            }
        };
        let values = || logits.iter().map(|&logit| value(logit));
        let max = values().fold(f32::NEG_INFINITY, f32::max);
        // Relative to the best; several that are infinite are equal.
        let below = |logit: f32| match value(logit) {
            logit if logit == max => 0.0,
            logit => f64::from(logit) - f64::from(max),
        };
        let total: f64 = logits.iter().map(|&logit| below(logit).exp()).sum();
        let log_total = total.ln();
        let logprob = |logit: f32| (below(logit) - log_total) as f32;
        let mut best: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |&a: &u32, &b: &u32| {
            let [a_value, b_value] = [a, b].map(|id| value(logits[id as usize]) + 0.0);
            b_value.total_cmp(&a_value).then(a.cmp(&b))
        };
        let n = n.min(best.len());
        if n > 0 && n < best.len() {
            best.select_nth_unstable_by(n - 1, order);
        }
        best.truncate(n);
        best.sort_unstable_by(order);
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
