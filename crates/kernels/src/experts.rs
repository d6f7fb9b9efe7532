//! Mixtures of experts: which experts a row is sent to, and what their outputs come to.
//!
//! A router gives each row a score for every expert. The row is computed by the experts with the best scores,
//! and their outputs are added, weighted by probabilities.

use crate::Exec;
use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};
use crate::vector;

/// How a row's experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts.
    pub n_experts: usize,
    /// Experts that a row is sent to; at most `n_experts`.
    pub n_used: usize,
    /// What makes probabilities of scores.
    pub gating: Gating,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub renormalised: bool,
    /// Groups of experts, of which a row is sent to few.
    pub groups: Option<ExpertGroups>,
    /// Factor on the weights of all.
    pub scale: f32,
}

/// Groups of adjacent experts of one size. Only experts of the best groups are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups; divides the number of experts.
    pub n_groups: usize,
    /// Groups that a row is sent to; at most `n_groups`.
    pub n_used: usize,
}

/// What makes probabilities of the scores of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// The softmax of all.
    Softmax,
    /// The logistic function of each.
    Sigmoid,
}

/// Added to the sum of sigmoids that probabilities are divided by.
const LEAST_SUM: f32 = 1e-6;

/// The experts of each row of a batch.
///
/// A *route* is a row and one of its experts. Routes are ordered by expert, and by row among those of one
/// expert, so that an expert's rows are adjacent.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Routes {
    n_used: usize,
    /// The row of each route, in order.
    rows: Vec<u32>,
    /// Experts with routes, ascending, and how many each has.
    experts: Vec<(u32, u32)>,
    /// `[m, n_used]`, best score first: the place of the route in the order.
    places: Vec<u32>,
    /// `[m, n_used]`: the weight of its output.
    weights: Vec<f32>,
    /// Scratch: scores of a row, with their experts.
    scores: Vec<(f32, u32)>,
    /// Scratch: `[m, n_used]`, the chosen experts.
    chosen: Vec<u32>,
}

impl Routes {
    /// Chooses experts by `scores`, `[m, n_experts]`.
    ///
    /// Experts with the largest sum of probability and `bias`, `[n_experts]`, are chosen, and weighted with their
    /// probability. Of equals, the lower expert is better; NaN is the least of all.
    /// Errors: [`ShapeError`] if `scores` isn't whole rows; if there are fewer experts than a row is sent to.
    pub fn choose(
        &mut self,
        routing: &Routing,
        scores: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<(), ShapeError> {
        let Routing {
            n_experts,
            n_used,
            gating,
            renormalised,
            groups,
            scale,
        } = *routing;
        if let Some(bias) = bias {
            expect_len("routes: bias", n_experts, bias.len())?;
        }
        let m = shape::rows("routes: scores", scores.len(), n_experts)?;
        expect_len("routes: experts of a row", n_used.min(n_experts), n_used)?;
        self.n_used = n_used;
        self.weights.clear();
        self.chosen.clear();
        for row in scores.chunks_exact(n_experts.max(1)) {
            // The order of probabilities is that of scores, and not blurred by rounding.
            let ranked = row
                .iter()
                .zip(0..)
                .map(|(&score, expert)| match (gating, bias) {
                    (Gating::Sigmoid, Some(bias)) => {
                        (math::sigmoid(score) + bias[expert as usize], expert)
                    }
                    _ => (score, expert),
                });
            self.scores.clear();
            self.scores.extend(ranked);
            if let Some(groups) = groups {
                self.keep_groups(&groups, gating);
            }
            self.scores
                .sort_unstable_by(|(a, i), (b, j)| rank(*b).total_cmp(&rank(*a)).then(i.cmp(j)));
            let ordered = self.scores.iter().map(|(_, expert)| row[*expert as usize]);
            let first = self.weights.len();
            match gating {
                Gating::Softmax => {
                    let first = ordered.clone().next().unwrap_or(0.0);
                    // The best of all may be in a group that isn't chosen.
                    let max = match groups {
                        Some(_) => ordered.clone().fold(first, f32::max),
                        None => first,
                    };
                    let exps = ordered.map(|score| math::exp(score - max));
                    let among = if renormalised { n_used } else { n_experts };
                    let total: f32 = exps.clone().take(among).sum();
                    self.weights.extend(exps.take(n_used).map(|e| e / total));
                }
                Gating::Sigmoid => {
                    self.weights.extend(ordered.take(n_used).map(math::sigmoid));
                    let chosen = &mut self.weights[first..];
                    if renormalised {
                        let total = chosen.iter().sum::<f32>() + LEAST_SUM;
                        chosen.iter_mut().for_each(|weight| *weight /= total);
                    }
                }
            }
            if scale != 1.0 {
                let chosen = &mut self.weights[first..];
                chosen.iter_mut().for_each(|weight| *weight *= scale);
            }
            let best = &self.scores[..n_used];
            self.chosen.extend(best.iter().map(|(_, expert)| *expert));
        }
        self.sort(m, n_experts);
        Ok(())
    }

    /// Makes the scores of experts outside of the best groups the least. A group is as good as its best expert, or, by
    /// sigmoids, its best two.
    fn keep_groups(&mut self, groups: &ExpertGroups, gating: Gating) {
        let size = (self.scores.len() / groups.n_groups.max(1)).max(1);
        let of_group = |scores: &[(f32, u32)]| {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for score in scores.iter().map(|(score, _)| rank(*score)) {
                second = second.max(score.min(first));
                first = first.max(score);
            }
            match gating {
                Gating::Sigmoid if size > 1 => first + second,
                _ => first,
            }
        };
        let mut ranked: Vec<(f32, usize)> =
            self.scores.chunks(size).map(of_group).zip(0..).collect();
        ranked.sort_unstable_by(|(a, i), (b, j)| b.total_cmp(a).then(i.cmp(j)));
        for (_, group) in ranked.iter().skip(groups.n_used) {
            for (score, _) in self.scores.iter_mut().skip(group * size).take(size) {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    /// Orders the routes of `chosen`.
    fn sort(&mut self, m: usize, n_experts: usize) {
        let mut next = vec![0_u32; n_experts];
        for &expert in &self.chosen {
            next[expert as usize] += 1;
        }
        self.experts.clear();
        let mut start = 0;
        for (expert, next) in (0..).zip(&mut next) {
            let n_routes = std::mem::replace(next, start);
            start += n_routes;
            if n_routes > 0 {
                self.experts.push((expert, n_routes));
            }
        }
        self.rows.clear();
        self.rows.resize(m * self.n_used, 0);
        self.places.clear();
        for (i, &expert) in self.chosen.iter().enumerate() {
            let place = &mut next[expert as usize];
            self.rows[*place as usize] = (i / self.n_used) as u32;
            self.places.push(*place);
            *place += 1;
        }
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.places.len().checked_div(self.n_used).unwrap_or(0)
    }

    /// The row of each route, in order.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The experts that rows are sent to, ascending, each with how many routes it has.
    pub fn experts(&self) -> impl ExactSizeIterator<Item = (usize, usize)> {
        let experts = self.experts.iter();
        experts.map(|&(expert, n_routes)| (expert as usize, n_routes as usize))
    }

    /// `out[r] = x[row(r)]` for every route `r`, in order.
    ///
    /// Shapes: `x` is `[m, width]`, `out` is `[m · n_used, width]`.
    /// Errors: [`ShapeError`] if a slice has the wrong length.
    pub fn gather(&self, width: usize, x: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
        expect_len("gather: rows", self.m() * width, x.len())?;
        expect_len("gather: output", self.rows.len() * width, out.len())?;
        for (out, &row) in out.chunks_exact_mut(width.max(1)).zip(&self.rows) {
            out.copy_from_slice(&x[row as usize * width..][..width]);
        }
        Ok(())
    }

    /// `y[r] ← y[r] + bias[expert(r)]` for every route `r`.
    ///
    /// Shapes: `y` is `[m · n_used, width]` in the order of routes, `bias` is `[n_experts, width]`.
    /// Errors: [`ShapeError`] if a slice has the wrong length.
    pub fn add_bias(
        &self,
        exec: &Exec,
        width: usize,
        bias: &[f32],
        y: &mut [f32],
    ) -> Result<(), ShapeError> {
        expect_len("expert bias: rows", self.rows.len() * width, y.len())?;
        let n_experts = shape::rows("expert bias: biases", bias.len(), width)?;
        let last = self
            .experts
            .last()
            .map_or(0, |(expert, _)| *expert as usize + 1);
        expect_len("expert bias: experts", n_experts.max(last), n_experts)?;
        let mut rest = y;
        for (expert, n_rows) in self.experts() {
            let (own, after) = rest.split_at_mut(n_rows * width);
            rest = after;
            vector::add_bias(exec, own, &bias[expert * width..][..width])?;
        }
        Ok(())
    }

    /// `out[t] = Σ weight(r) · y[r]` over the routes `r` of row `t`, best score first.
    ///
    /// Shapes: `y` is `[m · n_used, width]` in the order of routes, `out` is `[m, width]`.
    /// Errors: [`ShapeError`] if a slice has the wrong length.
    pub fn combine(
        &self,
        exec: &Exec,
        width: usize,
        y: &[f32],
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        expect_len("combine: outputs", self.rows.len() * width, y.len())?;
        expect_len("combine: rows", self.m() * width, out.len())?;
        let shared = SharedSlice::new(out);
        let per_task = ELEMENTS_PER_TASK.div_ceil((width * self.n_used).max(1));
        exec.pool.for_ranges(self.m(), per_task, |rows| {
            for t in rows {
                // SAFETY: each row belongs to one task.
                let out = unsafe { shared.range_mut(t * width..(t + 1) * width) };
                out.fill(0.0);
                let routes = t * self.n_used..(t + 1) * self.n_used;
                for (&place, &weight) in self.places[routes.clone()]
                    .iter()
                    .zip(&self.weights[routes])
                {
                    let y = &y[place as usize * width..][..width];
                    add_weighted(exec.isa, out, weight, y);
                }
            }
        });
        Ok(())
    }
}

/// Elements of outputs per task.
const ELEMENTS_PER_TASK: usize = 8192;

/// The score, NaN as the least.
fn rank(score: f32) -> f32 {
    if score.is_nan() {
        f32::NEG_INFINITY
    } else {
        score
    }
}

multiversion! {
    fn add_weighted(out: &mut [f32], weight: f32, y: &[f32]) {
        for (out, y) in out.iter_mut().zip(y) {
            *out += weight * y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    const ROUTING: Routing = Routing {
        n_experts: 4,
        n_used: 2,
        gating: Gating::Softmax,
        renormalised: true,
        groups: None,
        scale: 1.0,
    };

    fn routes(routing: &Routing, scores: &[f32]) -> Routes {
        let mut routes = Routes::default();
        routes.choose(routing, scores, None).unwrap();
        routes
    }

    #[test]
    fn the_best_are_chosen_and_ordered_by_expert() {
        let scores = [
            0.0,
            2.0,
            1.0,
            -1.0, //
            3.0,
            3.0,
            3.0,
            0.0, //
            f32::NAN,
            -5.0,
            0.0,
            f32::NEG_INFINITY,
        ];
        let routes = routes(&ROUTING, &scores);
        assert_eq!(routes.chosen, [1, 2, 0, 1, 2, 1]);
        let experts: Vec<_> = routes.experts().collect();
        assert_eq!(experts, [(0, 1), (1, 3), (2, 2)]);
        assert_eq!(routes.rows(), [1, 0, 1, 2, 0, 2]);
        let e = (1.0_f64).exp();
        assert!((f64::from(routes.weights[0]) - e / (1.0 + e)).abs() < 1e-6);
        assert_eq!(routes.weights[2..4], [0.5, 0.5]);
        for row in routes.weights.chunks_exact(2) {
            assert!((row[0] + row[1] - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn probabilities_may_be_those_among_all() {
        let routing = Routing {
            renormalised: false,
            ..ROUTING
        };
        let routes = routes(&routing, &[1.0; 4]);
        assert_eq!(routes.weights, [0.25, 0.25]);
    }

    #[test]
    fn a_bias_chooses_and_does_not_weigh() {
        let routing = Routing {
            gating: Gating::Sigmoid,
            ..ROUTING
        };
        let mut routes = Routes::default();
        let bias = [0.0, 0.0, 10.0, 0.0];
        routes
            .choose(&routing, &[0.0, 1.0, -1.0, 2.0], Some(&bias))
            .unwrap();
        assert_eq!(routes.chosen, [2, 3]);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let want = sigmoid(-1.0) / (sigmoid(-1.0) + sigmoid(2.0) + 1e-6);
        assert!((f64::from(routes.weights[0]) - want).abs() < 1e-6);
        assert!(routes.choose(&routing, &[0.0; 4], Some(&[0.0; 3])).is_err());
    }

    #[test]
    fn experts_of_other_groups_are_left_out() {
        let grouped = |gating, n_used| Routing {
            n_experts: 6,
            gating,
            groups: Some(ExpertGroups {
                n_groups: 3,
                n_used,
            }),
            scale: 2.5,
            ..ROUTING
        };
        let scores = [3.0, -9.0, 2.0, 2.0, 1.0, 2.5];
        // Groups are as good as their best expert.
        let first = routes(&grouped(Gating::Softmax, 1), &scores);
        assert_eq!(first.chosen, [0, 1]);
        let two = routes(&grouped(Gating::Softmax, 2), &scores);
        assert_eq!(two.chosen, [0, 5]);
        let e = |x: f64| x.exp();
        let want = 2.5 * e(3.0) / (e(3.0) + e(2.5));
        assert!((f64::from(two.weights[0]) - want).abs() < 1e-5);
        // By sigmoids, as their best two.
        let sigmoids = routes(&grouped(Gating::Sigmoid, 1), &scores);
        assert_eq!(sigmoids.chosen, [2, 3]);
        // Probabilities among all count experts of other groups.
        let routing = Routing {
            renormalised: false,
            scale: 1.0,
            ..grouped(Gating::Softmax, 1)
        };
        let bias = routes(&routing, &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert!((bias.weights[0] - 1.0 / 6.0).abs() < 1e-6);
        let last = routes(&routing, &[-1.0, f32::NEG_INFINITY, 9.0, 9.0, 10.0, 0.0]);
        assert_eq!(last.chosen, [4, 5]);
        assert!(last.weights.iter().all(|weight| *weight <= 1.0));
    }

    #[test]
    fn outputs_are_weighted_sums_for_every_machine() {
        let (m, width) = (37, 301);
        let routes = routes(&ROUTING, &floats(m * 4, 3));
        let x = floats(m * width, 4);
        let mut y = vec![f32::NAN; m * 2 * width];
        routes.gather(width, &x, &mut y).unwrap();
        let mut first: Option<Vec<f32>> = None;
        for exec in exec_matrix() {
            let mut out = vec![f32::NAN; m * width];
            routes.combine(&exec, width, &y, &mut out).unwrap();
            // Both outputs of a row are the row, and their weights add up to 1.
            for (out, x) in out.iter().zip(&x) {
                assert!((out - x).abs() <= 4.0 * f32::EPSILON * x.abs());
            }
            assert_eq!(first.get_or_insert(out.clone()), &out, "{exec:?}");
        }
    }

    #[test]
    fn a_row_is_routed_as_it_is_alone() {
        let scores = floats(9 * 4, 5);
        let all = routes(&ROUTING, &scores);
        for (t, row) in scores.chunks_exact(4).enumerate() {
            let alone = routes(&ROUTING, row);
            assert_eq!(alone.weights, all.weights[2 * t..2 * t + 2]);
            assert_eq!(alone.chosen, all.chosen[2 * t..2 * t + 2]);
        }
    }

    #[test]
    fn shapes_are_checked() {
        let mut routes = Routes::default();
        assert!(routes.choose(&ROUTING, &[0.0; 5], None).is_err());
        let routing = Routing {
            n_used: 5,
            ..ROUTING
        };
        assert!(routes.choose(&routing, &[0.0; 4], None).is_err());
        routes.choose(&ROUTING, &[], None).unwrap();
        assert_eq!((routes.m(), routes.experts().len()), (0, 0));
        assert!(routes.gather(3, &[0.0; 3], &mut []).is_err());
    }
}
