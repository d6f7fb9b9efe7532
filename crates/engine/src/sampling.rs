//! Choosing the next token from logits.
//!
//! The stages follow the order of Hugging Face Transformers, whose recommended settings
//! (`generation_config.json`) models are published with:
//!
//! 1. logit bias;
//! 2. repeat, then frequency and presence penalties over the last tokens;
//! 3. temperature (0 takes the best token at once);
//! 4. top-k;
//! 5. top-p;
//! 6. min-p;
//! 7. a draw from what remains.
//!
//! (llama.cpp's default order puts temperature last instead; top-p and min-p keep fewer tokens
//! here when the temperature is below 1, more when it is above.)
//!
//! Weights are integers in units of 2⁻³⁶ of the best token's: their sums are exact in any order,
//! so selection may partition instead of sort, and the same seed draws the same tokens on every
//! platform.

use std::{
    cmp::Ordering,
    collections::{HashMap, VecDeque},
};

use sterna_kernels::logits;

use crate::logprobs::Logprobs;

/// How tokens are sampled. The default is greedy, with every other stage off.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// The temperature, which divides the logits; 0 is greedy, with the lowest id among equals. Finite, at
    /// least 0.
    pub temperature: f32,
    /// Keeps the `top_k` best tokens, lower ids first among equals; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest best tokens whose probabilities reach `top_p` together; 1 keeps all.
    /// Above 0, at most 1.
    pub top_p: f32,
    /// Keeps tokens at least `min_p` times as probable as the best; 0 keeps all. From 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window; 1 changes nothing.
    /// Finite, above 0.
    pub repeat_penalty: f32,
    /// Is subtracted once for every time a token occurs in the window. Finite.
    pub frequency_penalty: f32,
    /// Is subtracted once if a token occurs in the window. Finite.
    pub presence_penalty: f32,
    /// The window: how many of the last accepted tokens are penalised.
    pub repeat_last_n: usize,
    /// Is added to the logits of these ids; −∞ bans a token. Never NaN or +∞.
    pub logit_bias: Vec<(u32, f32)>,
    /// Equal seeds give equal choices for equal logits.
    pub seed: u64,
}

impl SamplerConfig {
    /// Whether both are the same but for the seed.
    pub(crate) fn is_alike(&self, other: &SamplerConfig) -> bool {
        let seed = other.seed;
        SamplerConfig {
            seed,
            ..self.clone()
        } == *other
    }
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repeat_last_n: 64,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// Why a [`SamplerConfig`] is invalid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A setting is outside its range.
    #[error("sampling: expected {name} {range}, found {found}")]
    OutOfRange {
        /// The field of [`SamplerConfig`].
        name: &'static str,
        /// The values it may have.
        range: &'static str,
        /// The value it has.
        found: f32,
    },
    /// A logit bias names a token that the vocabulary doesn't have.
    #[error("sampling: expected logit_bias ids below {n_vocab}, found {id}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },
}

/// How tokens are sampled from here on, for a device that samples on its own, and what is to be known of them.
#[derive(Debug, Clone, Copy)]
pub struct Sampling<'a> {
    /// The settings.
    pub config: &'a SamplerConfig,
    /// The accepted tokens that penalties depend on, the latest last.
    pub recent: &'a VecDeque<u32>,
    /// The maximum number of these.
    pub window: usize,
    /// A seed for the device's own random numbers: a different one for each state of the sampler's random
    /// sequence, which doesn't advance.
    pub seed: u64,
    /// Whether log-probabilities are wanted: of each token, and of this many most probable ones.
    pub logprobs: Option<usize>,
    /// Of the next token, what it may be: a bit for each, the lowest first; none beyond. `None` if it may be any.
    pub allowed: Option<&'a [u32]>,
}

impl Sampling<'_> {
    /// How many of the largest logits a choice depends on, with those that equal the least of them; `None` if
    /// on all. Others may be −∞ without changing a choice.
    pub fn top(&self) -> Option<usize> {
        let config = self.config;
        // Biases, penalties and masks change which logits are the largest.
        let are_changed =
            self.window > 0 || !config.logit_bias.is_empty() || self.allowed.is_some();
        if are_changed || self.logprobs.is_some() {
            return None;
        }
        match (config.temperature == 0.0, config.top_k) {
            (true, _) => Some(1),
            (false, 0) => None,
            (false, top_k) => Some(top_k),
        }
    }

    /// Whether `id` is among the [allowed](Sampling::allowed) tokens.
    pub(crate) fn allows(&self, id: u32) -> bool {
        self.allowed.is_none_or(|allowed| is_allowed(allowed, id))
    }

    /// Whether the other's tokens are chosen in the same way, but for the seed.
    pub(crate) fn is_alike(&self, other: &Sampling<'_>) -> bool {
        self.config.is_alike(other.config) && self.logprobs.is_some() == other.logprobs.is_some()
    }
}

/// Whether `id` is among tokens of which each has a bit, the lowest first, and none beyond, as [`Sampling::allowed`].
pub fn is_allowed(allowed: &[u32], id: u32) -> bool {
    let bits = allowed.get(id as usize / 32).copied().unwrap_or(0);
    bits >> (id % 32) & 1 == 1
}

/// A token that a device has chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// The token.
    pub id: u32,
    /// Its log-probability, if [wanted](Sampling::logprobs).
    pub logprobs: Option<Logprobs>,
}

impl From<u32> for Chosen {
    /// Without its log-probability.
    fn from(id: u32) -> Chosen {
        Chosen { id, logprobs: None }
    }
}

/// Picks tokens, remembering those accepted before for the penalties.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    rng: Xoshiro256PlusPlus,
    window: Window,
    /// Biased and penalised logits of the current call, kept to save the allocation.
    logits: Vec<f32>,
    /// Tokens still in the running during the current call.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for logits over `n_vocab` tokens; fails if a setting is out of its range.
    pub fn new(config: SamplerConfig, n_vocab: usize) -> Result<Self, SamplerError> {
        let c = &config;
        for (name, found, valid, range) in [
            (
                "temperature",
                c.temperature,
                c.temperature >= 0.0,
                "of at least 0",
            ),
            (
                "top_p",
                c.top_p,
                c.top_p > 0.0 && c.top_p <= 1.0,
                "above 0 and at most 1",
            ),
            (
                "min_p",
                c.min_p,
                (0.0..=1.0).contains(&c.min_p),
                "from 0 to 1",
            ),
            (
                "repeat_penalty",
                c.repeat_penalty,
                c.repeat_penalty > 0.0,
                "above 0",
            ),
            (
                "frequency_penalty",
                c.frequency_penalty,
                true,
                "to be finite",
            ),
            ("presence_penalty", c.presence_penalty, true, "to be finite"),
        ] {
            if !(valid && found.is_finite()) {
                return Err(SamplerError::OutOfRange { name, range, found });
            }
        }
        for &(id, bias) in &config.logit_bias {
            if id as usize >= n_vocab {
                return Err(SamplerError::UnknownToken { id, n_vocab });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                let (name, range) = ("logit_bias", "finite or -inf");
                return Err(SamplerError::OutOfRange {
                    name,
                    range,
                    found: bias,
                });
            }
        }
        let no_penalty = config.repeat_penalty == 1.0
            && config.frequency_penalty == 0.0
            && config.presence_penalty == 0.0;
        let window = Window::new(if no_penalty { 0 } else { config.repeat_last_n });
        let rng = Xoshiro256PlusPlus::from_seed(config.seed);
        Ok(Self {
            config,
            rng,
            window,
            logits: Vec::new(),
            candidates: Vec::new(),
        })
    }

    /// A sampler with the settings `config` that continues the random sequence of this one, whatever the seed;
    /// no tokens are accepted yet. Errors: as for [`Sampler::new`].
    pub fn with_config(&self, config: SamplerConfig, n_vocab: usize) -> Result<Self, SamplerError> {
        Ok(Self {
            rng: self.rng.clone(),
            ..Self::new(config, n_vocab)?
        })
    }

    /// What it was made with.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Whether its random sequence is at its beginning, which the seed alone decides.
    pub fn is_fresh(&self) -> bool {
        self.rng == Xoshiro256PlusPlus::from_seed(self.config.seed)
    }

    /// [`Sampling::top`].
    pub fn top(&self) -> Option<usize> {
        self.sampling().top()
    }

    /// What a device needs to sample as this sampler does.
    pub fn sampling(&self) -> Sampling<'_> {
        Sampling {
            config: &self.config,
            recent: &self.window.ids,
            window: self.window.size,
            seed: self.rng.clone().next_u64(),
            logprobs: None,
            allowed: None,
        }
    }

    /// Adds `id` to the penalty window. Call it for prompt tokens and chosen ones alike.
    pub fn accept(&mut self, id: u32) {
        self.window.push(id);
    }

    /// Forgets the accepted tokens; the random sequence continues.
    pub fn clear_history(&mut self) {
        self.window.clear();
    }

    /// Chooses a token for `logits`, `[n_vocab]`, without accepting it.
    ///
    /// NaN counts as −∞. If every logit is −∞, or there is none, the answer is 0; a logit of +∞ wins over all
    /// others.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.choose().unwrap_or(0)
    }

    /// The same among the tokens whose bits in `allowed` are set, the lowest first; `None` if all of these are
    /// at −∞.
    pub fn sample_allowed(&mut self, logits: &[f32], allowed: &[u32]) -> Option<u32> {
        self.logits.clear();
        self.logits.resize(logits.len(), f32::NEG_INFINITY);
        let words = self.logits.chunks_mut(32).zip(logits.chunks(32));
        for ((kept, logits), &bits) in words.zip(allowed) {
            // Most words are of tokens that are all alike.
            if bits == 0 {
                continue;
            }
            if bits == u32::MAX {
                kept.copy_from_slice(logits);
                continue;
            }
            for (bit, (kept, &logit)) in kept.iter_mut().zip(logits).enumerate() {
                if bits >> bit & 1 == 1 {
                    *kept = logit;
                }
            }
        }
        self.choose()
    }

    /// `logits` with biases and penalties: a greedy choice is the largest of these.
    pub fn adjusted(&mut self, logits: &[f32]) -> &[f32] {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.adjust();
        &self.logits
    }

    /// Chooses a token for `self.logits`; `None` if there is none above −∞.
    fn choose(&mut self) -> Option<u32> {
        self.adjust();
        let (best_id, best) = self.best();
        if best == f32::NEG_INFINITY {
            return None;
        }
        if self.config.temperature == 0.0 || best.is_infinite() {
            return Some(best_id);
        }
        self.keep_top_k();
        self.weigh(best);
        self.keep_top_p();
        self.keep_min_p();
        Some(self.draw())
    }

    /// Applies bias and penalties to `self.logits`. Penalties leave finite logits finite, so that of several
    /// far out of range none becomes the only candidate.
    fn adjust(&mut self) {
        let config = &self.config;
        for &(id, bias) in &config.logit_bias {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        for (&id, &count) in &self.window.counts {
            if let Some(logit) = self.logits.get_mut(id as usize) {
                if !logit.is_finite() {
                    continue;
                }
                let scaled = match *logit > 0.0 {
                    true => *logit / config.repeat_penalty,
                    false => *logit * config.repeat_penalty,
                };
                let more = count as f32 * config.frequency_penalty + config.presence_penalty;
                *logit = (scaled.clamp(f32::MIN, f32::MAX) - more).clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// The best token and its logit; token 0 at −∞ if there is no better one.
    fn best(&self) -> (u32, f32) {
        let best = logits::largest(&self.logits);
        best.map_or((0, f32::NEG_INFINITY), |(id, logit)| (id as u32, logit))
    }

    /// Fills `self.candidates` with the `top_k` best tokens above −∞, by id.
    fn keep_top_k(&mut self) {
        let k = if self.config.top_k == 0 {
            usize::MAX
        } else {
            self.config.top_k
        };
        let candidate = |id: u32| Candidate {
            // Makes −0 a 0, which it equals, but not in the total order of floats.
            logit: self.logits[id as usize] + 0.0,
            id,
            weight: 0,
        };
        self.candidates.clear();
        if k < self.logits.len() {
            let mut best = logits::best(&self.logits, k);
            best.sort_unstable();
            self.candidates.extend(best.into_iter().map(candidate));
        } else {
            let all = 0..self.logits.len() as u32;
            let possible = all.filter(|id| self.logits[*id as usize] > f32::NEG_INFINITY);
            self.candidates.extend(possible.map(candidate));
        }
    }

    /// Gives every candidate its weight, and drops those with none: below 2⁻³⁶ of the best.
    fn weigh(&mut self, best: f32) {
        let temperature = self.config.temperature;
        self.candidates.retain_mut(|c| {
            // `libm`, because the exponential functions of platforms differ in the last bit.
            c.weight = (libm::expf((c.logit - best) / temperature) * WEIGHT_OF_BEST as f32) as u64;
            c.weight > 0
        });
    }

    /// Keeps the fewest best candidates that hold `top_p` of the weight.
    fn keep_top_p(&mut self) {
        if self.config.top_p >= 1.0 {
            return;
        }
        let total = total_weight(&self.candidates);
        let target = (f64::from(self.config.top_p) * total as f64).ceil() as u64;
        // All candidates lighter than this, together, weigh less than what may be left out, so none of them
        // is among the best that reach the target.
        let floor = total.saturating_sub(target) / self.candidates.len() as u64;
        self.candidates.retain(|c| c.weight >= floor);
        let mut scratch = self.candidates.clone();
        let last = last_within(&mut scratch, target);
        self.candidates
            .retain(|c| best_first(c, &last) != Ordering::Greater);
    }

    /// Keeps candidates with at least `min_p` of the best one's weight.
    fn keep_min_p(&mut self) {
        let floor = (f64::from(self.config.min_p) * WEIGHT_OF_BEST as f64).ceil() as u64;
        self.candidates.retain(|c| c.weight >= floor);
    }

    /// Draws a candidate with probability proportional to its weight.
    fn draw(&mut self) -> u32 {
        let total = total_weight(&self.candidates);
        // Scales 64 random bits to [0, total); total is below 2⁶⁴, so the product fits.
        let mut point = ((u128::from(self.rng.next_u64()) * u128::from(total)) >> 64) as u64;
        for c in &self.candidates {
            if point < c.weight {
                return c.id;
            }
            point -= c.weight;
        }
        // Reached only without candidates: the point is below the sum of their weights.
        0
    }
}

/// Weight of the best token. Leaves room to add up 2²⁷ weights, a thousand times more than
/// vocabularies have tokens.
const WEIGHT_OF_BEST: u64 = 1 << 36;

/// A candidate token.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    /// Neither NaN nor −0.
    logit: f32,
    id: u32,
    /// `exp((logit − best) / temperature)` in units of 2⁻³⁶.
    weight: u64,
}

/// Orders by descending logit, then ascending id.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

fn total_weight(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|c| c.weight).sum()
}

/// The last of the fewest best candidates that weigh `target` together. Partitions, as quickselect
/// does, and follows the half in which the sum reaches the target: linear time on average.
///
/// `candidates` must not be empty, and must weigh `target` or more.
fn last_within(mut candidates: &mut [Candidate], mut target: u64) -> Candidate {
    while candidates.len() > 1 {
        let n_best = candidates.len().div_ceil(2);
        candidates.select_nth_unstable_by(n_best - 1, best_first);
        let (best, rest) = candidates.split_at_mut(n_best);
        let weight = total_weight(best);
        candidates = if weight >= target {
            best
        } else {
            target -= weight;
            rest
        };
    }
    candidates[0]
}

/// The last tokens accepted, with how often each occurs among them.
#[derive(Debug, Clone)]
struct Window {
    size: usize,
    ids: VecDeque<u32>,
    counts: HashMap<u32, u32>,
}

impl Window {
    fn new(size: usize) -> Self {
        Self {
            size,
            ids: VecDeque::new(),
            counts: HashMap::new(),
        }
    }

    fn push(&mut self, id: u32) {
        if self.size == 0 {
            return;
        }
        if self.ids.len() == self.size
            && let Some(oldest) = self.ids.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.ids.push_back(id);
        *self.counts.entry(id).or_default() += 1;
    }

    fn clear(&mut self) {
        self.ids.clear();
        self.counts.clear();
    }
}

/// The xoshiro256++ generator of Blackman and Vigna (<https://prng.di.unimi.it>), its state filled
/// by SplitMix64 as they recommend.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Xoshiro256PlusPlus {
    state: [u64; 4],
}

impl Xoshiro256PlusPlus {
    fn from_seed(mut seed: u64) -> Self {
        let state = std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Self { state }
    }

    fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let result = s0.wrapping_add(*s3).rotate_left(23).wrapping_add(*s0);
        let shifted = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= shifted;
        *s3 = s3.rotate_left(45);
        result
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(config: SamplerConfig) -> Sampler {
        Sampler::new(config, 1 << 20).unwrap()
    }

    /// The definition, written with full sorts: the tokens that may be drawn, with their weights.
    fn naive(config: &SamplerConfig, history: &[u32], logits: &[f32]) -> Vec<(u32, u64)> {
        let mut logits = logits.to_vec();
        for &(id, bias) in &config.logit_bias {
            logits[id as usize] += bias;
        }
        let window = &history[history.len().saturating_sub(config.repeat_last_n)..];
        for (id, logit) in logits.iter_mut().enumerate() {
            let count = window.iter().filter(|&&seen| seen == id as u32).count();
            if count > 0 {
                let penalty = config.repeat_penalty;
                *logit = if *logit > 0.0 {
                    *logit / penalty
                } else {
                    *logit * penalty
                };
                *logit -= count as f32 * config.frequency_penalty + config.presence_penalty;
            }
        }
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits).filter(|t| !t.1.is_nan()).collect();
        sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        if config.top_k > 0 {
            sorted.truncate(config.top_k);
        }
        let best = sorted[0].1;
        let weigh = |l: f32| (libm::expf((l - best) / config.temperature) * 2f32.powi(36)) as u64;
        let weighed: Vec<_> = sorted.iter().map(|&(id, l)| (id, weigh(l))).collect();
        let total: u64 = weighed.iter().map(|t| t.1).sum();
        let target = (f64::from(config.top_p) * total as f64).ceil() as u64;
        let mut before = 0;
        let mut kept: Vec<_> = weighed
            .into_iter()
            .take_while(|t| {
                let keep = before < target;
                before += t.1;
                keep
            })
            .filter(|t| t.1 as f64 >= f64::from(config.min_p) * 2f64.powi(36) && t.1 > 0)
            .collect();
        kept.sort_unstable();
        kept
    }

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        // Few distinct values, so that ties are common, mixed with values of every kind.
        let logit = prop_oneof![
            8 => (-20i32..20).prop_map(|l| l as f32 / 4.0),
            4 => -30f32..30.0,
            2 => Just(-0.0),
            1 => Just(f32::NEG_INFINITY),
            1 => Just(f32::NAN),
        ];
        prop::collection::vec(logit, 1..1500)
    }

    fn setting(off: f32, range: std::ops::Range<f32>) -> impl Strategy<Value = f32> {
        prop_oneof![Just(off), range]
    }

    prop_compose! {
        fn config()(
            temperature in 0.05f32..3.0,
            top_k in prop_oneof![Just(0usize), 1usize..20, 1usize..2000],
            top_p in setting(1.0, 0.001..1.0),
            min_p in setting(0.0, 0.0..1.0),
            repeat_penalty in setting(1.0, 0.5..2.0),
            frequency_penalty in setting(0.0, -1.0..1.0),
            presence_penalty in setting(0.0, -1.0..1.0),
            repeat_last_n in 0usize..12,
            bias in prop_oneof![Just(f32::NEG_INFINITY), Just(0.0), -3f32..3.0],
            seed in any::<u64>(),
        ) -> SamplerConfig {
            SamplerConfig {
                temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty,
                presence_penalty, repeat_last_n, logit_bias: vec![(0, bias)], seed,
            }
        }
    }

    proptest! {
        #[test]
        fn keeps_what_sorting_everything_would_keep(
            config in config(), logits in logits(), history in prop::collection::vec(0u32..9, 0..30),
        ) {
            let mut sampler = sampler(config.clone());
            history.iter().for_each(|&id| sampler.accept(id));
            let id = sampler.sample(&logits);
            // With no token above −∞ nothing is ever kept, and the answer is 0 by definition.
            if sampler.best().1 > f32::NEG_INFINITY {
                let mut kept: Vec<_> = sampler.candidates.iter().map(|c| (c.id, c.weight)).collect();
                kept.sort_unstable();
                let expected = naive(&config, &history, &logits);
                prop_assert!(expected.iter().any(|t| t.0 == id), "{id} should not be drawn");
                prop_assert_eq!(kept, expected);
            } else {
                prop_assert_eq!(id, 0);
            }
        }

        #[test]
        fn what_is_not_allowed_is_at_minus_infinity(
            config in config(), logits in logits(), bits in prop::collection::vec(any::<u32>(), 47),
        ) {
            let is_allowed = |id: usize| bits[id / 32] >> (id % 32) & 1 == 1;
            let masked = logits.iter().enumerate();
            let masked: Vec<f32> = masked
                .map(|(id, &logit)| if is_allowed(id) { logit } else { f32::NEG_INFINITY })
                .collect();
            let chosen = sampler(config.clone()).sample_allowed(&logits, &bits);
            prop_assert!(chosen.is_none_or(|id| is_allowed(id as usize)));
            prop_assert_eq!(chosen.unwrap_or(0), sampler(config).sample(&masked));
        }

        #[test]
        fn greedy_takes_the_first_of_the_best(logits in logits()) {
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|&l| l == best && l > f32::NEG_INFINITY);
            let id = sampler(SamplerConfig::default()).sample(&logits);
            prop_assert_eq!(id as usize, first.unwrap_or(0));
        }
    }

    #[test]
    fn penalties_leave_logits_finite() {
        // Neither a quotient nor a product nor a sum of these stays in the range of f32.
        for (repeat_penalty, frequency_penalty) in [
            (1e-40, 0.0),
            (f32::MAX, 0.0),
            (1.0, f32::MAX),
            (1.0, f32::MIN),
            (1e-40, f32::MAX),
        ] {
            for temperature in [0.0, 1.0] {
                let mut sampler = sampler(SamplerConfig {
                    temperature,
                    repeat_penalty,
                    frequency_penalty,
                    ..Default::default()
                });
                let logits = [f32::NEG_INFINITY, -3.0, 2.0, 5.0];
                [1, 1, 2, 2, 3, 3]
                    .into_iter()
                    .for_each(|id| sampler.accept(id));
                assert_ne!(
                    sampler.sample(&logits),
                    0,
                    "{repeat_penalty} {frequency_penalty}"
                );
                assert!(sampler.logits[1..].iter().all(|logit| logit.is_finite()));
            }
        }
    }

    #[test]
    fn generator_matches_the_published_sequence() {
        // First outputs of the authors' C code for the state 1, 2, 3, 4.
        let mut rng = Xoshiro256PlusPlus {
            state: [1, 2, 3, 4],
        };
        for expected in [41943041, 58720359, 3588806011781223, 3591011842654386] {
            assert_eq!(rng.next_u64(), expected);
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let probabilities = [0.5f32, 0.25, 0.15, 0.07, 0.03];
        let logits = probabilities.map(|p| p.ln() + 3.0);
        let mut sampler = sampler(SamplerConfig {
            temperature: 1.0,
            seed: 1,
            ..Default::default()
        });
        let n = 100_000;
        let mut counts = [0u32; 5];
        for _ in 0..n {
            counts[sampler.sample(&logits) as usize] += 1;
        }
        let chi_squared: f64 = (counts.iter().zip(probabilities))
            .map(|(&count, p)| {
                let expected = f64::from(p) * f64::from(n);
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        // The 99.9th percentile for four degrees of freedom.
        assert!(chi_squared < 18.47, "χ² = {chi_squared}, counts {counts:?}");
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 / 20.0).collect();
        let draw = |seed| {
            let config = SamplerConfig {
                temperature: 0.8,
                top_p: 0.95,
                seed,
                ..Default::default()
            };
            let mut sampler = sampler(config);
            std::array::from_fn::<u32, 12, _>(|_| sampler.sample(&logits))
        };
        assert_eq!(draw(42), draw(42));
        assert_ne!(draw(42), draw(43));
        // Recorded once, so that a change of generator or arithmetic doesn't go unnoticed.
        assert_eq!(
            draw(7),
            [57, 169, 723, 431, 966, 464, 726, 333, 985, 73, 117, 169]
        );
    }

    #[test]
    fn zeros_are_equal_whatever_their_sign() {
        for logits in [[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]] {
            for (temperature, top_k) in [(0.0, 0), (1.0, 1)] {
                let config = SamplerConfig {
                    temperature,
                    top_k,
                    ..Default::default()
                };
                assert_eq!(
                    sampler(config).sample(&logits),
                    0,
                    "{logits:?}, top_k {top_k}"
                );
            }
        }
    }

    #[test]
    fn hostile_logits_do_not_panic() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (logits, expected) in [
            (&[][..], 0),
            (&[nan, nan], 0),
            (&[-inf, -inf, -inf], 0),
            (&[nan, -inf, 1.0, nan], 2),
            (&[1.0, inf, inf], 1),
            (&[f32::MIN, f32::MAX, 0.0], 1),
        ] {
            for temperature in [0.0, 1e-30, 1.0, f32::MAX] {
                let config = SamplerConfig {
                    temperature,
                    top_k: 1,
                    top_p: 0.5,
                    min_p: 0.5,
                    ..Default::default()
                };
                let id = sampler(config).sample(logits);
                assert_eq!(id, expected, "{logits:?} at {temperature}");
            }
        }
    }

    #[test]
    fn penalties_see_the_window_only() {
        let config = SamplerConfig {
            presence_penalty: 5.0,
            repeat_last_n: 2,
            ..Default::default()
        };
        let mut sampler = sampler(config);
        let logits = [3.0, 2.0, 1.0];
        for (accepted, expected) in [(0, 1), (1, 2), (1, 0), (1, 0), (0, 2)] {
            sampler.accept(accepted);
            assert_eq!(sampler.sample(&logits), expected, "after {accepted}");
        }
        sampler.clear_history();
        assert_eq!(sampler.sample(&logits), 0);
    }

    #[test]
    fn choices_depend_on_the_largest_logits_unless_these_are_changed() {
        let ok = SamplerConfig::default;
        for (config, top) in [
            (ok(), Some(1)),
            (SamplerConfig { top_k: 9, ..ok() }, Some(1)),
            (
                SamplerConfig {
                    temperature: 0.5,
                    top_k: 9,
                    top_p: 0.5,
                    min_p: 0.1,
                    ..ok()
                },
                Some(9),
            ),
            (
                SamplerConfig {
                    temperature: 0.5,
                    top_p: 0.5,
                    ..ok()
                },
                None,
            ),
            (
                SamplerConfig {
                    repeat_penalty: 1.1,
                    ..ok()
                },
                None,
            ),
            (
                SamplerConfig {
                    logit_bias: vec![(1, 1.0)],
                    ..ok()
                },
                None,
            ),
        ] {
            assert_eq!(sampler(config.clone()).top(), top, "{config:?}");
        }
    }

    proptest! {
        #[test]
        fn other_logits_may_be_missing(
            logits in logits(),
            temperature in setting(0.0, 0.05..3.0),
            top_k in 1usize..60,
            seed in any::<u64>(),
            keep in prop::collection::vec(any::<bool>(), 1..1500),
        ) {
            let config = SamplerConfig { temperature, top_k, top_p: 0.9, seed, ..Default::default() };
            let top = sampler(config.clone()).top().unwrap();
            let mut sorted: Vec<f32> = logits.iter().copied().filter(|l| !l.is_nan()).collect();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let least = sorted.get(top - 1).copied().unwrap_or(f32::NEG_INFINITY);
            let largest: Vec<f32> = logits
                .iter()
                .zip(keep.iter().cycle())
                .map(|(&l, &keep)| if l < least && !keep { f32::NEG_INFINITY } else { l })
                .collect();
            let want = sampler(config.clone()).sample(&logits);
            prop_assert_eq!(sampler(config).sample(&largest), want);
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let ok = SamplerConfig::default;
        for (config, message) in [
            (
                SamplerConfig {
                    temperature: -1.0,
                    ..ok()
                },
                "expected temperature of at least 0, found -1",
            ),
            (
                SamplerConfig {
                    temperature: f32::INFINITY,
                    ..ok()
                },
                "temperature of at least 0, found inf",
            ),
            (
                SamplerConfig { top_p: 0.0, ..ok() },
                "top_p above 0 and at most 1, found 0",
            ),
            (
                SamplerConfig {
                    top_p: f32::NAN,
                    ..ok()
                },
                "top_p above 0 and at most 1, found NaN",
            ),
            (
                SamplerConfig { min_p: 1.5, ..ok() },
                "min_p from 0 to 1, found 1.5",
            ),
            (
                SamplerConfig {
                    repeat_penalty: 0.0,
                    ..ok()
                },
                "repeat_penalty above 0, found 0",
            ),
            (
                SamplerConfig {
                    presence_penalty: f32::NAN,
                    ..ok()
                },
                "presence_penalty to be finite",
            ),
            (
                SamplerConfig {
                    logit_bias: vec![(1, f32::NAN)],
                    ..ok()
                },
                "logit_bias finite or -inf",
            ),
            (
                SamplerConfig {
                    logit_bias: vec![(9, 1.0)],
                    ..ok()
                },
                "logit_bias ids below 9, found 9",
            ),
        ] {
            let error = Sampler::new(config, 9).unwrap_err().to_string();
            assert!(
                error.contains(message),
                "`{error}` does not say `{message}`"
            );
        }
    }
}
