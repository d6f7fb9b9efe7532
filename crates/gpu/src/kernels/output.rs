//! From logits to the next token.

use super::Rows;
use super::attention::Position;
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{LOG_PROBABILITY, MASK, PENALIZE, PERTURB, SAMPLE, TOP_K, WEIGH, params};
use crate::{Device, GpuError, Recorder};

/// Maximum `k` of [`top_k`].
pub const MAX_TOP_K: usize = 256;

/// Candidates that are sorted at a time.
const TILE: usize = 1024;

/// Words of the state of a sampler: the position of the sequence's last token, the token, the row of its logits, three
/// that are ignored, and the low and the high half of its seed. Draws at equal positions with equal seeds from equal
/// logits are equal, on one device.
pub const STATE_LEN: usize = 8;

/// Sequences that are sampled for together.
#[derive(Debug, Clone, Copy)]
pub struct Samplers<'a> {
    /// Rows of logits, among which are those of each.
    pub logits: Rows<'a>,
    /// The states of these, among others: `[n_states, STATE_LEN]`.
    pub states: &'a Buffer,
    /// The number of the first of them.
    pub first: usize,
    /// How many there are.
    pub n: usize,
}

impl Samplers<'_> {
    /// Errors if there are fewer states, or results of fewer.
    fn check(&self, n_results: usize) -> Result<(), GpuError> {
        self.logits.check("sampling: logits")?;
        let n_states = (self.states.bytes() / 4) as usize / STATE_LEN;
        expect_most(
            "sampling: states",
            n_states,
            self.first.saturating_add(self.n),
        )?;
        expect_most("sampling: sequences", n_results, self.n)
    }
}

params! {
    TopKParams {
        sampler: u32,
        n: u32,
        offset: u32,
        stride: u32,
        k: u32,
    }
}

/// Memory for [`top_k`], and its result.
#[derive(Debug, Clone)]
pub struct TopK {
    k: usize,
    /// For so many samplers.
    n: usize,
    /// The output of each round: pairs of value and id, best first.
    rounds: Vec<Buffer>,
}

impl TopK {
    /// Room for the `k` largest of `n_vocab` logits, of each of `n_samplers`.
    ///
    /// Errors: [`GpuError::Shape`] if `k` is 0 or more than [`MAX_TOP_K`];
    /// [`GpuError::OutOfMemory`].
    pub fn new(
        device: &Device,
        n_vocab: usize,
        k: usize,
        n_samplers: usize,
    ) -> Result<TopK, GpuError> {
        expect("top-k: k", k.clamp(1, MAX_TOP_K), k)?;
        let mut rounds = Vec::new();
        let mut n = n_vocab;
        loop {
            n = n.div_ceil(TILE).max(1) * k;
            rounds.push(device.buffer("best tokens", (n * n_samplers) as u64 * 8)?);
            if n == k {
                break Ok(TopK {
                    k,
                    n: n_samplers,
                    rounds,
                });
            }
        }
    }

    /// The value of `k`.
    pub fn k(&self) -> usize {
        self.k
    }

    /// For how many samplers there is room.
    pub fn n_samplers(&self) -> usize {
        self.n
    }

    /// The result: `[n_samplers, k]` pairs of a logit (the bits of an f32) and its id, best first. If there are fewer
    /// logits, the rest have −∞ and the id `u32::MAX`.
    pub fn best(&self) -> &Buffer {
        self.rounds.last().expect("`new` makes one round at least")
    }
}

/// The largest of each sampler's logits, in order; of equal ones those with lower ids first. NaN comes last. With
/// room for one, this is argmax.
///
/// Errors: [`GpuError::Shape`] if `into` was made for fewer logits or samplers.
/// Exactness: exact.
pub fn top_k(recorder: &mut Recorder, samplers: Samplers<'_>, into: &TopK) -> Result<(), GpuError> {
    samplers.check(into.n)?;
    let logits = samplers.logits;
    let mut n = logits.width;
    let mut from = logits.buffer;
    for (i, round) in into.rounds.iter().enumerate() {
        let groups = n.div_ceil(TILE).max(1);
        let room = (round.bytes() / 8) as usize;
        expect_most("top-k: logits", room, groups * into.k * into.n)?;
        let params = TopKParams {
            sampler: samplers.first as u32,
            n: n as u32,
            offset: logits.offset as u32,
            stride: logits.stride as u32,
            k: into.k as u32,
        };
        let first = [("FIRST", f64::from(u8::from(i == 0)))];
        let bindings = [from.into(), samplers.states.into(), round.into()];
        let grid = [groups as u32, samplers.n as u32];
        recorder.dispatch(&TOP_K, &first, &bindings, &params, grid)?;
        n = groups * into.k;
        from = round;
    }
    expect("top-k: logits left", into.k, n)
}

/// Penalties for recent tokens, and logit biases.
#[derive(Debug, Clone, Copy)]
pub struct Penalties<'a> {
    /// Repetition penalty: divides positive and multiplies negative logits; 1 disables it.
    pub repeat: f32,
    /// Frequency penalty: subtracted once for every time a token occurs in the window.
    pub frequency: f32,
    /// Presence penalty: subtracted once if a token occurs in the window.
    pub presence: f32,
    /// The window: how many of the last tokens are penalised. The time it takes grows quadratically.
    pub window: usize,
    /// Pairs of an id and the bits of an f32 that is added to its logit, each id once.
    pub biases: Option<&'a Buffer>,
}

params! {
    PenalizeParams {
        n_vocab: u32,
        offset: u32,
        position: u32,
        n_tokens: u32,
        window: u32,
        n_biases: u32,
        repeat: f32,
        frequency: f32,
        presence: f32,
    }
}

/// Applies biases and penalties to `logits`, one row. `tokens` has the ids of the sequence by position, up to
/// `position`; ids outside the vocabulary are ignored.
///
/// Errors: [`GpuError::Shape`] if there isn't one row.
/// Exactness: that of the CPU's sampler, where quotients are normal numbers.
pub fn penalize(
    recorder: &mut Recorder,
    logits: Rows<'_>,
    penalties: &Penalties<'_>,
    tokens: &Buffer,
    position: Position<'_>,
) -> Result<(), GpuError> {
    logits.check("penalties: logits")?;
    position.check()?;
    expect("penalties: rows", 1, logits.n_rows)?;
    let nothing = recorder.device().nothing()?;
    let n_tokens = (tokens.bytes() / 4).min(u64::from(u32::MAX)) as usize;
    let places = penalties.window.min(n_tokens);
    // Biases first: logits biased by one invocation are penalised by another.
    for (biases, window) in [(penalties.biases, 0), (None, places)] {
        let groups = match biases {
            Some(_) => 1,
            None => window.div_ceil(256) as u32,
        };
        let params = PenalizeParams {
            n_vocab: logits.width as u32,
            offset: logits.offset as u32,
            position: position.index as u32,
            n_tokens: n_tokens as u32,
            window: window as u32,
            n_biases: biases.map_or(0, |biases| (biases.bytes() / 8) as u32),
            repeat: penalties.repeat,
            frequency: penalties.frequency,
            presence: penalties.presence,
        };
        let bindings = [
            logits.buffer.into(),
            tokens.into(),
            biases.unwrap_or(&nothing).into(),
            position.buffer.into(),
        ];
        recorder.dispatch(&PENALIZE, &[], &bindings, &params, [groups, 1])?;
    }
    Ok(())
}

params! {
    MaskParams {
        sampler: u32,
        n: u32,
        offset: u32,
        stride: u32,
    }
}

/// Words of the mask of `n_vocab` tokens, for [`mask`].
pub fn mask_len(n_vocab: usize) -> usize {
    n_vocab.div_ceil(32)
}

/// The logits of tokens that may not be drawn become −∞: those whose bits in `masks` are 0. These are
/// `[n_states, mask_len]`, of each state a bit for every token, the lowest first.
///
/// Errors: [`GpuError::Shape`] if there are fewer states or masks than samplers.
/// Exactness: exact.
pub fn mask(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    masks: &Buffer,
) -> Result<(), GpuError> {
    samplers.check(samplers.n)?;
    let logits = samplers.logits;
    let n_masks = (masks.bytes() / 4) as usize / mask_len(logits.width).max(1);
    expect_most(
        "sampling: masks",
        n_masks,
        samplers.first.saturating_add(samplers.n),
    )?;
    let params = MaskParams {
        sampler: samplers.first as u32,
        n: logits.width as u32,
        offset: logits.offset as u32,
        stride: logits.stride as u32,
    };
    let bindings = [logits.buffer.into(), samplers.states.into(), masks.into()];
    let grid = [logits.width.div_ceil(256) as u32, samplers.n as u32];
    recorder.dispatch(&MASK, &[], &bindings, &params, grid)
}

/// How a token is drawn from the top tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The temperature, which divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Top-p: keeps the fewest top tokens whose probabilities add up to it; 1 keeps all.
    pub top_p: f32,
    /// Min-p: keeps tokens at least this many times as probable as the best.
    pub min_p: f32,
}

params! {
    PerturbParams {
        sampler: u32,
        n: u32,
        offset: u32,
        stride: u32,
        temperature: f32,
    }
}

/// `logits ← logits / temperature + noise` of each sampler, so that argmax samples from all tokens with their
/// probabilities (Gumbel-max).
///
/// Errors: [`GpuError::Shape`] if there are fewer states than samplers.
/// Exactness: probabilities within a millionth of the largest.
pub fn perturb(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    temperature: f32,
) -> Result<(), GpuError> {
    samplers.check(samplers.n)?;
    let logits = samplers.logits;
    let params = PerturbParams {
        sampler: samplers.first as u32,
        n: logits.width as u32,
        offset: logits.offset as u32,
        stride: logits.stride as u32,
        temperature,
    };
    let bindings = [logits.buffer.into(), samplers.states.into()];
    let grid = [logits.width.div_ceil(256) as u32, samplers.n as u32];
    recorder.dispatch(&PERTURB, &[], &bindings, &params, grid)
}

/// Memory for [`weigh`], and its result: sums of the softmax weights of all tokens.
#[derive(Debug, Clone)]
pub struct Weights {
    /// `[n, n_sums, 2]`: the largest logit of a piece, and the sum of its weights relative to that.
    sums: Buffer,
    n_sums: usize,
    /// For so many samplers.
    n: usize,
}

impl Weights {
    /// Room for `n_vocab` tokens, of each of `n_samplers`.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, n_vocab: usize, n_samplers: usize) -> Result<Weights, GpuError> {
        let n_sums = n_vocab.div_ceil(TILE);
        let bytes = (n_sums * n_samplers) as u64 * 8;
        Ok(Weights {
            sums: device.buffer("weights of tokens", bytes)?,
            n_sums,
            n: n_samplers,
        })
    }

    /// For how many samplers there is room.
    pub fn n_samplers(&self) -> usize {
        self.n
    }
}

params! {
    WeighParams {
        sampler: u32,
        n: u32,
        offset: u32,
        stride: u32,
        temperature: f32,
    }
}

/// Sums `exp(logit / temperature)` of each sampler's logits, in pieces.
///
/// Errors: [`GpuError::Shape`] if `into` is for another number of logits, or fewer samplers.
/// Exactness: within a few units in the last place for each doubling of the number of logits.
pub fn weigh(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    temperature: f32,
    into: &Weights,
) -> Result<(), GpuError> {
    samplers.check(into.n)?;
    let logits = samplers.logits;
    expect("weights: sums", into.n_sums, logits.width.div_ceil(TILE))?;
    let params = WeighParams {
        sampler: samplers.first as u32,
        n: logits.width as u32,
        offset: logits.offset as u32,
        stride: logits.stride as u32,
        temperature,
    };
    let bindings = [
        logits.buffer.into(),
        samplers.states.into(),
        (&into.sums).into(),
    ];
    let grid = [into.n_sums as u32, samplers.n as u32];
    recorder.dispatch(&WEIGH, &[], &bindings, &params, grid)
}

params! {
    LogProbabilityParams {
        sampler: u32,
        n: u32,
        offset: u32,
        stride: u32,
        n_sums: u32,
    }
}

/// What the log-probability of each sampler's token follows from, that its state has: `out` becomes `[n, 2]`, the logit
/// of the token among `samplers.logits`, and the logarithm of the sum of `exp(logit − largest)` over these, of which
/// `weights` are those at temperature 1.
///
/// Errors: [`GpuError::Shape`] if there are fewer states or weights than samplers, or too little room.
/// Exactness: the logarithm as its sum ([`weigh`]), and within a unit of 2⁻²¹ besides.
pub fn log_probability(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    weights: &Weights,
    out: &Buffer,
) -> Result<(), GpuError> {
    samplers.check(weights.n.min((out.bytes() / 8) as usize))?;
    let logits = samplers.logits;
    expect("weights: sums", weights.n_sums, logits.width.div_ceil(TILE))?;
    let params = LogProbabilityParams {
        sampler: samplers.first as u32,
        n: logits.width as u32,
        offset: logits.offset as u32,
        stride: logits.stride as u32,
        n_sums: weights.n_sums as u32,
    };
    let bindings = [
        logits.buffer.into(),
        samplers.states.into(),
        (&weights.sums).into(),
        out.into(),
    ];
    recorder.dispatch(
        &LOG_PROBABILITY,
        &[],
        &bindings,
        &params,
        [samplers.n as u32, 1],
    )
}

params! {
    SampleParams {
        sampler: u32,
        k: u32,
        capacity: u32,
        of_all: u32,
        n_sums: u32,
        temperature: f32,
        top_p: f32,
        min_p: f32,
    }
}

/// Draws the next token of each sampler from `best`, and advances its state: afterwards position and token are those
/// of the new token, for the next replay of the same commands. Of a single sampler, the token is also written to
/// `tokens` at its position, if there is room.
///
/// If the best logit is not finite, nothing is drawn and nothing changes.
///
/// Errors: [`GpuError::Shape`] if there are fewer states or results than samplers.
pub fn sample(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    best: &TopK,
    draw: &Draw,
    tokens: Option<&Buffer>,
) -> Result<(), GpuError> {
    sample_with(recorder, samplers, best, (false, None), draw, tokens)
}

/// [`sample`] from all tokens, of which `best` are the top ones. `weights` are those of all, which top-p is
/// relative to; without them, only `min_p` limits what is kept.
///
/// Where more tokens might be kept than `best` has room for, nothing is drawn and nothing changes.
///
/// Errors: as [`sample`].
pub fn sample_of_all(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    best: &TopK,
    weights: Option<&Weights>,
    draw: &Draw,
    tokens: Option<&Buffer>,
) -> Result<(), GpuError> {
    sample_with(recorder, samplers, best, (true, weights), draw, tokens)
}

fn sample_with(
    recorder: &mut Recorder,
    samplers: Samplers<'_>,
    best: &TopK,
    (of_all, weights): (bool, Option<&Weights>),
    draw: &Draw,
    tokens: Option<&Buffer>,
) -> Result<(), GpuError> {
    samplers.check(weights.map_or(best.n, |weights| best.n.min(weights.n)))?;
    let nothing = recorder.device().nothing()?;
    let tokens = tokens.filter(|_| samplers.n == 1);
    let capacity = tokens.map_or(0, |tokens| tokens.bytes() / 4);
    let params = SampleParams {
        sampler: samplers.first as u32,
        k: best.k as u32,
        capacity: capacity.min(u64::from(u32::MAX)) as u32,
        of_all: u32::from(of_all),
        n_sums: weights.map_or(0, |weights| weights.n_sums as u32),
        temperature: draw.temperature,
        top_p: draw.top_p,
        min_p: draw.min_p,
    };
    let bindings = [
        best.best().into(),
        weights.map_or(best.best(), |weights| &weights.sums).into(),
        samplers.states.into(),
        tokens.unwrap_or(&nothing).into(),
    ];
    recorder.dispatch(&SAMPLE, &[], &bindings, &params, [samplers.n as u32, 1])
}
