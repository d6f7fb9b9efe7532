//! What is asked of the logits of a whole vocabulary: the largest, and what all come to.
//!
//! NaN counts as −∞. Results are the same with every instruction set.

use std::cmp::Ordering;

use crate::isa::{Isa, multiversion};
use crate::math;

/// Logits that are looked at together: most such runs have none of the largest.
pub(crate) const RUN: usize = 64;
/// Logits that are compared, or added, side by side.
const LANES: usize = 16;

/// The largest of `logits`, the first of several, and its value; `None` if all are −∞.
pub fn largest(logits: &[f32]) -> Option<(usize, f32)> {
    let at = first_of_largest(Isa::detect(), logits)?;
    Some((at, logits[at]))
}

/// Where the `n` largest of `logits` are, the best first, of equals the first; fewer if others are −∞.
pub fn best(logits: &[f32], n: usize) -> Vec<u32> {
    if n == 0 {
        return Vec::new();
    }
    let mut found = candidates(Isa::detect(), logits, n, None);
    found.sort_unstable_by(best_first);
    found.into_iter().map(|(_, at)| at).collect()
}

/// Where the `n` largest of `values` are, at least one, in ascending order; fewer if others are −∞ or NaN. `maxima`, if they
/// are known, are the largest of each [`RUN`] values, or a NaN among them.
pub(crate) fn places_of_largest(
    isa: Isa,
    values: &[f32],
    n: usize,
    maxima: Option<&[f32]>,
) -> Vec<u32> {
    let found = candidates(isa, values, n, maxima);
    let mut places: Vec<u32> = found.into_iter().map(|(_, at)| at).collect();
    places.sort_unstable();
    places
}

/// `ln Σ e^(x − max)` over `logits`, of which `max` is the largest: terms within 2 ulp of f32, added as f64 in an order that
/// their number defines.
pub fn log_sum(logits: &[f32], max: f32) -> f64 {
    libm::log(sum(Isa::detect(), logits, max))
}

/// The larger of two, `b` if one is NaN: one instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn largest_of_run(run: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = run.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*x, *lane);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |max, x| larger(*x, max))
}

/// A value, and its place.
type Candidate = (f32, u32);

fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

multiversion! {
    fn first_of_largest(logits: &[f32]) -> Option<usize> {
        let mut best = (None, f32::NEG_INFINITY);
        for (i, run) in logits.chunks(RUN).enumerate() {
            let max = largest_of_run(run);
            if max > best.1 {
                best = (Some(i), max);
            }
        }
        let first = best.0? * RUN;
        let at = logits[first..].iter().position(|x| *x == best.1)?;
        Some(first + at)
    }
}

multiversion! {
    /// The `n` largest of `values` with their places, of equals the first, in no order; fewer if others are −∞.
    fn candidates(values: &[f32], n: usize, maxima: Option<&[f32]>) -> Vec<Candidate> {
        // They accumulate until there are several times `n`, of which the `n` best stay: whatever isn't above the least of
        // these can be left out from then on, as those before it come first among equals.
        let full = n.saturating_mul(4).max(256);
        let mut found: Vec<Candidate> = Vec::with_capacity(full.min(values.len()));
        let mut bar = f32::NEG_INFINITY;
        for (i, run) in values.chunks(RUN).enumerate() {
            let is_below = match maxima {
                Some(maxima) => maxima[i] <= bar,
                None => !run.iter().fold(false, |any, &x| any | (x > bar)),
            };
            if is_below {
                continue;
            }
            for (at, &x) in run.iter().enumerate() {
                if x > bar {
                    // −0 equals 0, but not in the total order of floats.
                    found.push((x + 0.0, (i * RUN + at) as u32));
                    if found.len() == full {
                        bar = found.select_nth_unstable_by(n - 1, best_first).1.0;
                        found.truncate(n);
                    }
                }
            }
        }
        if found.len() > n {
            found.select_nth_unstable_by(n - 1, best_first);
            found.truncate(n);
        }
        found
    }
}

multiversion! {
    fn sum(logits: &[f32], max: f32) -> f64 {
        let term = |x: f32| {
            // Several that are infinite are equal.
            let below = if x == max { 0.0 } else { x - max };
            if below <= 0.0 { math::exp(below) } else { 0.0 }
        };
        let mut lanes = [0.0f64; LANES];
        let (chunks, rest) = logits.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(term(*x));
            }
        }
        let rest: f64 = rest.iter().map(|x| f64::from(term(*x))).sum();
        lanes.iter().sum::<f64>() + rest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => -9f32..9.0,
            2 => (-3i8..3).prop_map(f32::from),
            1 => prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, 0.0, -0.0]),
        ]
    }

    proptest! {
        /// Against a full sort, with every instruction set.
        #[test]
        fn the_best_are_those_of_a_sort(
            logits in prop::collection::vec(logit(), 0..1500),
            n in 0usize..400,
        ) {
            let mut sorted: Vec<u32> = (0..logits.len() as u32)
                .filter(|at| logits[*at as usize] > f32::NEG_INFINITY)
                .collect();
            sorted.sort_by(|a, b| {
                let [x, y] = [a, b].map(|at| logits[*at as usize]);
                y.partial_cmp(&x).unwrap().then(a.cmp(b))
            });
            let first = sorted.first().map(|at| *at as usize);
            sorted.truncate(n);
            prop_assert_eq!(&best(&logits, n), &sorted);
            prop_assert_eq!(largest(&logits).map(|(at, _)| at), first);
            sorted.sort_unstable();
            for isa in Isa::available() {
                prop_assert_eq!(first_of_largest(isa, &logits), first);
                if n > 0 {
                    prop_assert_eq!(&places_of_largest(isa, &logits, n, None), &sorted);
                    let maxima: Vec<f32> = logits.chunks(RUN).map(|run| {
                        let max = run.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                        if run.iter().any(|x| x.is_nan()) { f32::NAN } else { max }
                    }).collect();
                    let maxima = Some(&maxima[..]);
                    prop_assert_eq!(&places_of_largest(isa, &logits, n, maxima), &sorted);
                }
            }
        }

        #[test]
        fn sums_are_those_of_f64_with_every_instruction_set(logits in prop::collection::vec(logit(), 1..500)) {
            let Some((_, max)) = largest(&logits) else { return Ok(()) };
            let finite = logits.iter().filter(|x| !x.is_nan());
            let want: f64 = finite.map(|x| (f64::from(*x) - f64::from(max)).exp()).sum();
            let got = log_sum(&logits, max);
            prop_assert!((got - want.ln()).abs() <= 4e-7, "{} {}", got, want.ln());
            for isa in Isa::available() {
                prop_assert_eq!(libm::log(sum(isa, &logits, max)).to_bits(), got.to_bits());
            }
        }
    }

    #[test]
    fn several_that_are_infinite_are_equal() {
        let logits = [f32::INFINITY, 1.0, f32::INFINITY, f32::NAN];
        assert_eq!(largest(&logits), Some((0, f32::INFINITY)));
        assert_eq!(log_sum(&logits, f32::INFINITY), 2f64.ln());
        assert_eq!(largest(&[f32::NAN, f32::NEG_INFINITY]), None);
    }
}
