//! From logits to the next token.

use super::Rows;
use super::attention::Position;
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{PENALIZE, PERTURB, SAMPLE, TOP_K, WEIGH, params};
use crate::{Device, GpuError, Recorder};

/// Maximum `k` of [`top_k`].
pub const MAX_TOP_K: usize = 256;

/// Candidates that are sorted at a time.
const TILE: usize = 1024;

params! {
    TopKParams {
        n: u32,
        offset: u32,
        k: u32,
    }
}

/// Memory for [`top_k`], and its result.
#[derive(Debug, Clone)]
pub struct TopK {
    k: usize,
    /// The output of each round: pairs of value and id, best first.
    rounds: Vec<Buffer>,
}

impl TopK {
    /// Room for the `k` largest of `n_vocab` logits.
    ///
    /// Errors: [`GpuError::Shape`] if `k` is 0 or more than [`MAX_TOP_K`];
    /// [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, n_vocab: usize, k: usize) -> Result<TopK, GpuError> {
        expect("top-k: k", k.clamp(1, MAX_TOP_K), k)?;
        let mut rounds = Vec::new();
        let mut n = n_vocab;
        loop {
            n = n.div_ceil(TILE).max(1) * k;
            rounds.push(device.buffer("best tokens", n as u64 * 8)?);
            if n == k {
                break Ok(TopK { k, rounds });
            }
        }
    }

    /// The value of `k`.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The result: `[k]` pairs of a logit (the bits of an f32) and its id, best first. If there are fewer
    /// logits, the rest have −∞ and the id `u32::MAX`.
    pub fn best(&self) -> &Buffer {
        self.rounds.last().expect("`new` makes one round at least")
    }
}

/// The largest of `logits`, one row, in order; of equal ones those with lower ids first. NaN comes last. With
/// room for one, this is argmax.
///
/// Errors: [`GpuError::Shape`] if there isn't one row, or `into` was made for fewer logits.
/// Exactness: exact.
pub fn top_k(recorder: &mut Recorder, logits: Rows<'_>, into: &TopK) -> Result<(), GpuError> {
    logits.check("top-k: logits")?;
    expect("top-k: rows", 1, logits.n_rows)?;
    let mut n = logits.width;
    let mut from = (logits.buffer, logits.offset);
    for (i, round) in into.rounds.iter().enumerate() {
        let groups = n.div_ceil(TILE).max(1);
        let room = (round.bytes() / 8) as usize;
        expect_most("top-k: logits", room, groups * into.k)?;
        let params = TopKParams {
            n: n as u32,
            offset: from.1 as u32,
            k: into.k as u32,
        };
        let first = [("FIRST", f64::from(u8::from(i == 0)))];
        let bindings = [from.0.into(), round.into()];
        recorder.dispatch(&TOP_K, &first, &bindings, &params, [groups as u32, 1])?;
        n = groups * into.k;
        from = (round, 0);
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

/// How a token is drawn from the top tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The temperature, which divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Top-p: keeps the fewest top tokens whose probabilities add up to it; 1 keeps all.
    pub top_p: f32,
    /// Min-p: keeps tokens at least this many times as probable as the best.
    pub min_p: f32,
    /// Equal seeds draw equal tokens at equal positions from equal logits, on one device.
    pub seed: u64,
}

params! {
    PerturbParams {
        n: u32,
        offset: u32,
        position: u32,
        temperature: f32,
        seed_low: u32,
        seed_high: u32,
    }
}

/// `logits ← logits / temperature + noise`, one row, so that argmax samples from all tokens with their
/// probabilities (Gumbel-max). Draws at equal positions with equal seeds are equal, on one device.
///
/// Errors: [`GpuError::Shape`] if there isn't one row.
/// Exactness: probabilities within a millionth of the largest.
pub fn perturb(
    recorder: &mut Recorder,
    logits: Rows<'_>,
    temperature: f32,
    seed: u64,
    position: Position<'_>,
) -> Result<(), GpuError> {
    logits.check("noise: logits")?;
    position.check()?;
    expect("noise: rows", 1, logits.n_rows)?;
    let params = PerturbParams {
        n: logits.width as u32,
        offset: logits.offset as u32,
        position: position.index as u32,
        temperature,
        seed_low: seed as u32,
        seed_high: (seed >> 32) as u32,
    };
    let bindings = [logits.buffer.into(), position.buffer.into()];
    let groups = logits.width.div_ceil(256) as u32;
    recorder.dispatch(&PERTURB, &[], &bindings, &params, [groups, 1])
}

/// Memory for [`weigh`], and its result: sums of the softmax weights of all tokens.
#[derive(Debug, Clone)]
pub struct Weights {
    /// `[n_sums, 2]`: the largest logit of a piece, and the sum of its weights relative to that.
    sums: Buffer,
    n_sums: usize,
}

impl Weights {
    /// Room for `n_vocab` tokens.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, n_vocab: usize) -> Result<Weights, GpuError> {
        let n_sums = n_vocab.div_ceil(TILE);
        Ok(Weights {
            sums: device.buffer("weights of tokens", n_sums as u64 * 8)?,
            n_sums,
        })
    }
}

params! {
    WeighParams {
        n: u32,
        offset: u32,
        temperature: f32,
    }
}

/// Sums `exp(logit / temperature)` of `logits`, one row, in pieces.
///
/// Errors: [`GpuError::Shape`] if there isn't one row, or `into` is for another number of logits.
/// Exactness: within a few units in the last place for each doubling of the number of logits.
pub fn weigh(
    recorder: &mut Recorder,
    logits: Rows<'_>,
    temperature: f32,
    into: &Weights,
) -> Result<(), GpuError> {
    logits.check("weights: logits")?;
    expect("weights: rows", 1, logits.n_rows)?;
    expect("weights: sums", into.n_sums, logits.width.div_ceil(TILE))?;
    let params = WeighParams {
        n: logits.width as u32,
        offset: logits.offset as u32,
        temperature,
    };
    let bindings = [logits.buffer.into(), (&into.sums).into()];
    recorder.dispatch(&WEIGH, &[], &bindings, &params, [into.n_sums as u32, 1])
}

params! {
    SampleParams {
        k: u32,
        state: u32,
        capacity: u32,
        of_all: u32,
        n_sums: u32,
        temperature: f32,
        top_p: f32,
        min_p: f32,
        seed_low: u32,
        seed_high: u32,
    }
}

/// Draws the next token from `best`, and advances the sequence: `state` is the position of the last token
/// and, in the next element, the token. Afterwards both are those of the new token, for the next replay of
/// the same commands. The token is also written to `tokens` at its position, if there is room.
///
/// If the best logit is not finite, nothing is drawn and nothing changes.
///
/// Errors: [`GpuError::Shape`] if `state` has no element after the position.
pub fn sample(
    recorder: &mut Recorder,
    best: &TopK,
    draw: &Draw,
    state: Position<'_>,
    tokens: &Buffer,
) -> Result<(), GpuError> {
    sample_with(recorder, best, (false, None), draw, state, tokens)
}

/// [`sample`] from all tokens, of which `best` are the top ones. `weights` are those of all, which top-p is
/// relative to; without them, only `min_p` limits what is kept.
///
/// Where more tokens might be kept than `best` has room for, nothing is drawn and nothing changes.
///
/// Errors: as [`sample`].
pub fn sample_of_all(
    recorder: &mut Recorder,
    best: &TopK,
    weights: Option<&Weights>,
    draw: &Draw,
    state: Position<'_>,
    tokens: &Buffer,
) -> Result<(), GpuError> {
    sample_with(recorder, best, (true, weights), draw, state, tokens)
}

fn sample_with(
    recorder: &mut Recorder,
    best: &TopK,
    (of_all, weights): (bool, Option<&Weights>),
    draw: &Draw,
    state: Position<'_>,
    tokens: &Buffer,
) -> Result<(), GpuError> {
    let behind = Position {
        index: state.index + 1,
        ..state
    };
    behind.check()?;
    let nothing = recorder.device().nothing()?;
    let params = SampleParams {
        k: best.k as u32,
        state: state.index as u32,
        capacity: (tokens.bytes() / 4).min(u64::from(u32::MAX)) as u32,
        of_all: u32::from(of_all),
        n_sums: weights.map_or(0, |weights| weights.n_sums as u32),
        temperature: draw.temperature,
        top_p: draw.top_p,
        min_p: draw.min_p,
        seed_low: draw.seed as u32,
        seed_high: (draw.seed >> 32) as u32,
    };
    let bindings = [
        best.best().into(),
        weights.map_or(&nothing, |weights| &weights.sums).into(),
        state.buffer.into(),
        tokens.into(),
    ];
    recorder.dispatch(&SAMPLE, &[], &bindings, &params, [1, 1])
}
