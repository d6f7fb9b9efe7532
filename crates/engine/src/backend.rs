//! The interface between what a model computes and where it is computed.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::{Arc, MutexGuard};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use sterna_format::DType;
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::attention::AttentionShape;
pub use sterna_kernels::attention::{CacheType, CachedValues};
use sterna_kernels::delta::DeltaShape;
use sterna_kernels::experts::Routing;
pub use sterna_kernels::gemm::Rounding;
pub use sterna_kernels::gemm::ScreenedRows;
pub use sterna_kernels::gemm::TernaryPacking;
use sterna_kernels::hadamard;
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::quant::QuantError;
use sterna_kernels::rwkv::{Part, RwkvShape};
use sterna_kernels::ssm::SsmShape;
use sterna_kernels::{Exec, ShapeError};

use crate::config::LatentConfig;
use crate::rope::Angles;
use crate::sampling::{Chosen, Sampling};
use crate::stage::{Operation, Stage};
use crate::weights::Group;

/// A compute backend: buffers, and the operations that forward passes are made of.
///
/// A forward pass is written once against this trait ([`crate::Session::forward`]). Operations take
/// effect in the order they are called; only [`Backend::submit`] needs their results, so a device may
/// record them and run them together. Buffers hold rows of f32, one for each token of the batch.
///
/// Errors: shapes were checked when the model was planned, so operations fail only if the device itself does
/// (device lost, out of memory).
pub trait Backend: Sized {
    /// A weight matrix. Clones share its memory.
    type Linear: Clone;
    /// A vector of weights: a norm or a bias.
    type Vector: Clone;
    /// A screen that rules out rows of a weight matrix that can't give one of the largest results.
    type Screen;
    /// Activations, `[n_tokens, width]`. The operation that fills one sets its shape.
    type Buffer;
    /// Keys and values of the tokens so far, for all layers.
    type Cache: KvCache;
    /// Which rows are sent to which experts.
    type Routes;
    /// A pending read-back of a buffer's rows: ready once every earlier operation is done. It may be dropped.
    type Readback: Future<Output = Result<Vec<f32>, BackendError>> + MaybeSend + 'static;

    /// Threads of this machine, for repacking weights before they are loaded.
    fn host(&self) -> &Exec;

    /// The data type of cached keys and values where none is asked for.
    fn usual_cache(&self) -> CacheType {
        CacheType::F32
    }

    /// Whether blocks of `dtype` in rows of `k` columns, or packed trits (I2_S), are rewritten when they are loaded, so that
    /// the bytes they are given in needn't stay in memory.
    fn rewrites(&self, _dtype: DType, _k: usize) -> bool {
        false
    }
    /// Loads a weight matrix.
    fn load_linear(&self, source: LinearSource) -> Result<Self::Linear, BackendError>;
    /// Whether large matrices of blocks may be loaded by rows, with [`Backend::begin_linear`], so that they needn't be
    /// in memory as a whole.
    fn loads_rows(&self) -> bool {
        false
    }
    /// A matrix whose rows follow, by [`Backend::load_rows`].
    fn begin_linear(&self, _shape: BlockMatrix) -> Result<Self::Linear, BackendError> {
        Err(BackendError::Unsupported(ROWS))
    }
    /// Loads the rows `rows`, whose start is a multiple of [`ROW_GRAIN`], of a matrix that was begun.
    fn load_rows(
        &self,
        _linear: &mut Self::Linear,
        _rows: Range<usize>,
        _weights: &WeightData,
    ) -> Result<(), BackendError> {
        Err(BackendError::Unsupported(ROWS))
    }
    /// Loads a vector of weights.
    fn load_vector(&self, values: Vec<f32>) -> Result<Self::Vector, BackendError>;
    /// Whether [`Backend::load_screen`] can make a screen of `linear`.
    fn has_screen_of(&self, linear: &Self::Linear) -> bool;

    /// Makes a screen of `linear`, whose weights are blocks: a copy of it as blocks of `dtype`, with bounds.
    fn load_screen(
        &self,
        linear: &Self::Linear,
        dtype: DType,
    ) -> Result<Self::Screen, BackendError>;
    /// Whether the weights of a group are loaded together by [`Backend::load_group`]; if not, each is loaded as soon as
    /// it has arrived.
    fn loads_by_group(&self) -> bool {
        false
    }
    /// Loads the weights of `group`, which are used together: `load` loads them all with the backend it is
    /// called with, from the beginning each time.
    ///
    /// A backend that consists of several calls it with the selected one, and with another if that one is out
    /// of memory.
    /// Errors: those of `load`.
    fn load_group<T>(
        &self,
        _group: Group,
        mut load: impl FnMut(&Self) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        load(self)
    }

    /// Tells the backend that `matrices` always read the same input, so that it may store them where they can
    /// be multiplied together.
    fn join(&self, _matrices: &mut [&mut Self::Linear]) -> Result<(), BackendError> {
        Ok(())
    }

    /// Tells the backend that `experts` are all matrices of a mixture, before the first product with them, so
    /// that it may store them where it finds that of any expert.
    fn join_experts(&self, _experts: &mut ExpertMatrices<'_, Self>) -> Result<(), BackendError> {
        Ok(())
    }

    /// Bounds how many experts are in memory, from the next that are loaded on. Nothing changes where weights are no
    /// longer in the bytes that they were loaded from, as on GPUs.
    fn bound_experts(&self, _memory: &Arc<dyn ExpertMemory>) {}

    /// Tells the backend that `matrices` are those of the heads of latent attention, one for each, before the first
    /// product with them, as for experts.
    fn join_heads(&self, _matrices: &mut [&mut Self::Linear]) -> Result<(), BackendError> {
        Ok(())
    }

    /// An empty buffer.
    fn buffer(&self) -> Self::Buffer;
    /// No routes.
    fn routes(&self) -> Self::Routes;
    /// An empty cache.
    fn cache(&self, shape: &CacheShape) -> Result<Self::Cache, BackendError>;

    /// Writes what `cache` holds for `layer`, in a form of the backend's own: [`Backend::restore_layer`] reads it.
    fn save_layer(
        &self,
        _cache: &mut Self::Cache,
        _layer: usize,
        _to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        Err(BackendError::Unsupported(SNAPSHOTS).into())
    }

    /// Reads what was saved of `layer` into `cache`, which is empty and of the same shape. It has the tokens once
    /// every layer is restored and it [advances](KvCache::advance) by their number.
    fn restore_layer(
        &self,
        _cache: &mut Self::Cache,
        _layer: usize,
        _held: LayerContents,
        _from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        Err(BackendError::Unsupported(SNAPSHOTS).into())
    }

    /// Begins to compute all operations so far, without waiting for them.
    fn flush(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Held from the first operation of a step until it is submitted, where steps of several threads would mix.
    fn exclusive(&self) -> Option<MutexGuard<'_, ()>> {
        None
    }

    /// Begins a step: the operations from here to the next call are one forward pass over one batch.
    fn begin_step(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// `out[t] ← scale · table[ids[t]]`.
    fn embed(
        &self,
        table: &Self::Linear,
        ids: &[u32],
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `out ← rms_norm(x) · weight`, row by row.
    fn rms_norm(
        &self,
        stage: Stage,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← rms_norm(x) · weight`, row by row, or each run of a row that has as many elements as there are weights.
    fn rms_norm_in_place(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
    ) -> Result<(), BackendError>;

    /// `out ← x · wᵀ` for each of `products`; all read the same `x`.
    fn linear(
        &self,
        x: &Self::Buffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Self>],
    ) -> Result<(), BackendError>;

    /// [`Backend::linear`] of rows that first go through `prologue`: row by row, where a backend can. `x` becomes what
    /// products read.
    fn linear_after(
        &self,
        prologue: Prologue<'_, Self>,
        x: &mut Self::Buffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Self>],
    ) -> Result<(), BackendError> {
        prologue.run(self, x)?;
        self.linear(x, layout, products)
    }

    /// `out ← x · wᵀ`, of which the `tops[t]` largest of each row `t` are needed, with all that equal the least
    /// of them; others may be −∞ instead. `screen` was made of `w`.
    ///
    /// Returns how many rows were read. Computed values have the same bits as those of [`Backend::linear`].
    fn linear_top(
        &self,
        stage: Stage,
        x: &Self::Buffer,
        w: &Self::Linear,
        screen: &Self::Screen,
        tops: &[usize],
        out: &mut Self::Buffer,
    ) -> Result<ScreenedRows, BackendError>;

    /// `out[t] ← out[t] + scale · (x[t] · aᵀ) · bᵀ` for each of `updates` and the rows `t` in `rows`; all
    /// read the same `x`. Results don't depend on which updates share a call.
    fn add_low_rank(
        &self,
        x: &Self::Buffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Self>],
    ) -> Result<(), BackendError>;

    /// `x[t] ← x[t] + bias`.
    fn add_bias(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        bias: &Self::Vector,
    ) -> Result<(), BackendError>;

    /// Normalises and rotates the heads of queries and keys, appends keys and values to a layer of each
    /// sequence's cache, and attends to it: `out ← attention(q, cache)`.
    ///
    /// Rows are grouped by sequence. Positions start at the cache's length, which is unchanged until
    /// [`KvCache::advance`]. The contents of the buffers of queries and keys are unspecified afterwards.
    fn attention(
        &self,
        attention: Attention<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Queries and keys of latent attention: `q` becomes `[n_tokens, n_heads, rope_dim + kv_rank]`, of every head the
    /// rotated part and, of the other, the product with the head's matrix; `k` becomes `[n_tokens, rope_dim + kv_rank]`,
    /// the rotated part, before it is, and the latent vector. Keys are the values, too: what attention gives for the
    /// rotated part is not read.
    fn latent_queries(
        &self,
        stage: Stage,
        inputs: LatentInputs<'_, Self>,
        q: &mut Self::Buffer,
        k: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// The values of latent attention: of every head of `x`, `[n_tokens, n_heads, rope_dim + kv_rank]`, the product of
    /// the latent part with the head's matrix `[value_dim, kv_rank]`. `out` becomes `[n_tokens, n_heads · value_dim]`.
    fn latent_values(
        &self,
        stage: Stage,
        shape: &LatentConfig,
        x: &Self::Buffer,
        w: &[&Self::Linear],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `gate ← activation(gate) · up`.
    fn gate(
        &self,
        stage: Stage,
        activation: Activation,
        gate: &mut Self::Buffer,
        up: &Self::Buffer,
    ) -> Result<(), BackendError>;

    /// A gated short convolution over the positions of each sequence, whose state in the cache becomes that after
    /// the batch once the cache [advances](KvCache::advance): [`sterna_kernels::conv::gated`].
    ///
    /// Shapes: `input` is `[n_tokens, 3 · dim]`, `taps` is `[dim, n_taps]`, `out` becomes `[n_tokens, dim]`.
    fn convolution(
        &self,
        stage: Stage,
        taps: &Self::Vector,
        input: &Self::Buffer,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// A gated delta net over the positions of each sequence, whose state in the cache becomes that after the batch
    /// once the cache advances: a convolution of queries, keys and values ([`sterna_kernels::conv::silu`]), the rule
    /// ([`sterna_kernels::delta`]), and for each head the norm of what it gives, times `silu(gate)`.
    ///
    /// `out` becomes `[n_tokens, values]`. The other buffers of `net` are unspecified afterwards.
    fn delta_net(
        &self,
        stage: Stage,
        net: DeltaNet<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// A selective state space over the positions of each sequence, whose state in the cache becomes that after the
    /// batch once the cache advances: a convolution of inputs, `B` and `C` ([`sterna_kernels::conv::silu`]), the scan
    /// ([`sterna_kernels::ssm`]), times `silu(gate)`, and the norm of each group.
    ///
    /// `out` becomes `[n_tokens, inner]`. The other buffers of `ssm` are unspecified afterwards.
    fn ssm(
        &self,
        stage: Stage,
        ssm: Ssm<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// A convolution over the positions of each sequence, channel by channel, and its activation
    /// ([`sterna_kernels::conv::silu`]): the first part of a layer whose state [`Backend::selective_scan`] has the rest
    /// of. The state in the cache becomes that after the batch once the cache advances.
    ///
    /// `out` becomes `[n_tokens, inner]`.
    fn causal_convolution(
        &self,
        stage: Stage,
        convolution: CausalConvolution<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// The selective state space of the first Mamba ([`sterna_kernels::mamba`]) over the positions of each sequence,
    /// times `silu(gate)`.
    ///
    /// `out` becomes `[n_tokens, inner]`. The gates are unspecified afterwards.
    fn selective_scan(
        &self,
        stage: Stage,
        scan: SelectiveScan<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `out ← (x − mean) / √(variance + eps) · weight + bias`, row by row.
    fn layer_norm(
        &self,
        stage: Stage,
        x: &Self::Buffer,
        weights: (&Self::Vector, &Self::Vector),
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← function(x)`, value by value.
    fn apply(
        &self,
        stage: Stage,
        function: Function,
        x: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← x ∘ y`.
    fn multiply(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Mixes each position of each sequence with the one before ([`sterna_kernels::rwkv::token_shift`]), which the state
    /// in the cache has at the beginning. That becomes the last one once the cache advances.
    ///
    /// `out` becomes `[n_tokens, inner]`.
    fn token_shift(
        &self,
        stage: Stage,
        shift: TokenShift<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Time mixing of RWKV over the positions of each sequence, with the norm and gates of what heads give
    /// ([`sterna_kernels::rwkv`]). The state in the cache becomes that after the batch once the cache advances.
    ///
    /// `out` becomes `[n_tokens, inner]`. Keys and what is given for decays and rates are unspecified afterwards, and values
    /// where there is a `residual`; without one they are kept.
    fn time_mix(
        &self,
        stage: Stage,
        mix: TimeMix<'_, Self>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← factor · x`.
    fn scale(&self, stage: Stage, x: &mut Self::Buffer, factor: f32) -> Result<(), BackendError>;

    /// `x ← rms_norm(x)`, each head of `head_dim` elements by itself.
    fn normalize_heads(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError>;

    /// `out ← x[:, columns]`.
    fn columns(
        &self,
        stage: Stage,
        x: &Self::Buffer,
        columns: Range<usize>,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← factor · x`. `factor` is `[1]`.
    fn scale_by(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        factor: &Self::Vector,
    ) -> Result<(), BackendError>;

    /// `x[t] ← x[t] + sigmoid(gate[t]) · y[t]`. `gate` is `[n_tokens, 1]`.
    fn add_gated(
        &self,
        stage: Stage,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
        gate: &Self::Buffer,
    ) -> Result<(), BackendError>;

    /// Chooses the experts of each row by their scores, `[n_tokens, n_experts]`, which are those of the router,
    /// and by `bias`, `[n_experts]`.
    fn choose_experts(
        &self,
        scores: &Self::Buffer,
        bias: Option<&Self::Vector>,
        routing: &Routing,
        routes: &mut Self::Routes,
    ) -> Result<(), BackendError>;

    /// `out[r] ← x[r] · wᵀ + bias` for each of `products` and every route `r`, with those of its expert; all
    /// read the same `x`, which has a row as `input` says. The order of routes is the backend's own.
    fn linear_experts(
        &self,
        routes: &Self::Routes,
        x: &Self::Buffer,
        input: ExpertInput,
        products: &mut [ExpertProduct<'_, Self>],
    ) -> Result<(), BackendError>;

    /// `out[t] ← Σ weight(r) · y[r]` over the routes `r` of row `t`. `y` has a row for each route.
    fn combine_experts(
        &self,
        routes: &Self::Routes,
        y: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), BackendError>;

    /// `x ← x + y`.
    fn add(&self, stage: Stage, x: &mut Self::Buffer, y: &Self::Buffer)
    -> Result<(), BackendError>;

    /// `x ← cap · tanh(x / cap)`.
    fn softcap(&self, stage: Stage, x: &mut Self::Buffer, cap: f32) -> Result<(), BackendError>;

    /// Keeps only the rows `rows` of `x`, in ascending order.
    fn keep_rows(&self, x: &mut Self::Buffer, rows: &[usize]) -> Result<(), BackendError>;

    /// Submits all operations so far, and moves the values out of `x`.
    fn submit(&self, x: &mut Self::Buffer) -> Result<Self::Readback, BackendError>;

    /// Submits all operations so far, to be awaited without a value; `None` where operations are done once they are called.
    fn submit_all(&self) -> Result<Option<Self::Readback>, BackendError> {
        Ok(None)
    }

    /// [`Backend::submit`], with the rows of `x` divided as `n_rows` says, for each of which there is a
    /// [`RowsRead::Logits`].
    ///
    /// Threads should copy what is in their caches: one that takes all values apart, as it does by default, waits for the
    /// caches of the others, and for memory that the system clears.
    fn submit_apart(
        &self,
        x: &mut Self::Buffer,
        n_rows: &[usize],
    ) -> Result<PendingRows, BackendError> {
        let values = self.submit(x)?;
        let n_rows = n_rows.to_vec();
        Ok(Box::pin(async move {
            let mut rest = values.await?;
            let width = rest.len() / n_rows.iter().sum::<usize>().max(1);
            let mut parts: Vec<RowsRead> = (n_rows.iter().skip(1).rev())
                .map(|n_rows| RowsRead::Logits(rest.split_off(rest.len() - n_rows * width)))
                .collect();
            parts.push(RowsRead::Logits(rest));
            parts.reverse();
            Ok(parts)
        }))
    }

    /// Blocks on a future that needs nothing but this backend to become ready, and drives the device
    /// meanwhile.
    ///
    /// Errors: [`BackendError::CannotWait`] if it isn't ready and the platform can't block, as in a browser.
    fn wait<F: Future>(&self, future: F) -> Result<F::Output, BackendError> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Ok(output),
            Poll::Pending => Err(BackendError::CannotWait),
        }
    }

    /// [`Backend::submit`], blocking until the values are there.
    fn read(&self, x: &mut Self::Buffer) -> Result<Vec<f32>, BackendError> {
        self.wait(self.submit(x)?)?
    }

    /// Writes rows of `width` values to `x`: in place if it has as many rows of the same width.
    fn write(&self, values: &[f32], width: usize, x: &mut Self::Buffer)
    -> Result<(), BackendError>;

    /// Whether it may sample, and decode on its own ([`Backend::max_lookahead`]).
    fn samples(&self) -> bool {
        false
    }

    /// Prepares to sample tokens of all of `sequences`, and to decode on its own; returns how many steps of all together
    /// can be taken ahead, from the positions of their last tokens on. 0, the default, leaves sampling to the host.
    fn max_lookahead(
        &self,
        _sequences: &mut [Continued<'_, Self::Cache>],
    ) -> Result<usize, BackendError> {
        Ok(0)
    }

    /// Samples the token that follows each row of `logits`, and repeats the step that led to them with these
    /// tokens, and so on, without the host: `n_steps` times at most, no more than [`Backend::max_lookahead`] said.
    ///
    /// That step has one row of each of `sequences`, in this order, and none of it has been read; [`Attention::rope`]
    /// had the angles of all positions ahead, `n_steps` of each sequence. `None` if the step can't be repeated: the
    /// logits can still be read then.
    fn decode(
        &self,
        _logits: &mut Self::Buffer,
        _sequences: &mut [Continued<'_, Self::Cache>],
        _n_steps: usize,
    ) -> Result<Option<Box<dyn Decoding>>, BackendError> {
        Ok(None)
    }

    /// Submits all operations so far, and reads what `wanted` says of the rows of `logits`, in their order: tokens that
    /// are sampled as in [`Backend::decode`], or logits.
    ///
    /// Tokens are wanted only of sequences of each of which [`Backend::max_lookahead`] wasn't 0 before the step.
    fn read_rows(
        &self,
        _logits: &mut Self::Buffer,
        _wanted: Vec<RowsWanted<'_, Self::Cache>>,
    ) -> Result<PendingRows, BackendError> {
        Err(BackendError::Unsupported(SAMPLING))
    }
}

/// Rows that are loaded one after the other begin at multiples of this many.
pub const ROW_GRAIN: usize = 8;

/// What [`BackendError::Unsupported`] calls matrices that are loaded by rows.
const ROWS: &str = "matrices by rows";
/// What it calls sampling.
const SAMPLING: &str = "sampling";
/// What it calls saving a sequence.
const SNAPSHOTS: &str = "saved sequences";
/// What it calls matrices that are stored rotated.
pub(crate) const ROTATIONS: &str = "rotated matrices";

/// Decoding steps that a device takes on its own, each with the token sampled by the previous step.
///
/// They belong to the same sequences. Results of tokens that are never taken are stored beyond a sequence's end,
/// where later steps overwrite them.
pub trait Decoding: MaybeSend {
    /// The result of the next step, once it is done, for each sequence; `None` if there is none. Later steps are in
    /// flight, so that in all no more than `wanted` are computed, besides those that are in flight already.
    ///
    /// `allowed` has the [`Sampling::allowed`] of each sequence; only those may have one that had one when decoding began.
    fn poll_next(
        &mut self,
        wanted: usize,
        allowed: &[Option<&[u32]>],
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<Sampled>>, BackendError>>;
}

/// [`Send`], except in browsers, whose devices belong to one thread.
#[cfg(not(target_arch = "wasm32"))]
pub trait MaybeSend: Send {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + ?Sized> MaybeSend for T {}

/// [`Send`], except in browsers, whose devices belong to one thread.
#[cfg(target_arch = "wasm32")]
pub trait MaybeSend {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> MaybeSend for T {}

/// The result of a step of [`Decoding`].
#[derive(Debug, Clone, PartialEq)]
pub enum Sampled {
    /// The next token.
    Token(Chosen),
    /// The device can't decide which token comes next, or the logits are not finite. The step has to be
    /// recomputed, for the host to sample from its logits. Later steps would end the same.
    Undecided,
}

/// A sequence that a token is sampled for.
#[derive(Debug)]
pub struct Continued<'a, C> {
    /// Its keys and values. The cache's length doesn't include the tokens of the step yet.
    pub cache: &'a mut C,
    /// The last token of the step.
    pub last: u32,
    /// Its position.
    pub position: usize,
    /// How to sample.
    pub sampling: Sampling<'a>,
}

/// What is read of the next rows of logits ([`Backend::read_rows`]).
#[derive(Debug)]
pub enum RowsWanted<'a, C> {
    /// So many rows of logits.
    Logits(usize),
    /// A token sampled from one row.
    Token(Continued<'a, C>),
}

/// What was read of rows of logits.
#[derive(Debug, Clone, PartialEq)]
pub enum RowsRead {
    /// The logits, `[n_rows, n_vocab]`.
    Logits(Vec<f32>),
    /// The token.
    Token(Chosen),
    /// The device can't decide which token comes next, or the logits are not finite. Logits come instead where they are
    /// still there, as they always are behind several tokens.
    Undecided,
}

/// A pending read-back of [`Backend::read_rows`]: what was wanted, in order. It may be dropped.
pub type PendingRows = Pin<Box<dyn ReadingRows>>;

/// What is in a [`PendingRows`].
pub trait ReadingRows: Future<Output = Result<Vec<RowsRead>, BackendError>> + MaybeSend {}
impl<T> ReadingRows for T where T: Future<Output = Result<Vec<RowsRead>, BackendError>> + MaybeSend {}

/// A product of [`Backend::linear`].
pub struct Product<'a, B: Backend> {
    /// Which linear layer it is.
    pub stage: Stage,
    /// `[n, k]`.
    pub w: &'a B::Linear,
    /// `[n_tokens, n]`.
    pub out: &'a mut B::Buffer,
}

/// What rows `x` go through before products read them.
pub enum Prologue<'a, B: Backend> {
    /// `x ← rms_norm(x)`.
    Norm(RmsNorm<'a, B>),
    /// `x ← rms_norm(sum)`, after `sum ← sum + x` if that has a stage: the entry to a block.
    Residual {
        /// The residual stream.
        sum: &'a mut B::Buffer,
        /// That of the sum; `None` if `x` has nothing to add.
        add: Option<Stage>,
        /// Of the block.
        norm: RmsNorm<'a, B>,
    },
    /// `x ← activation(x) · up`, and the norm of that if there is one.
    Gate {
        /// Of the product of both.
        stage: Stage,
        /// Of the gates, `x`.
        activation: Activation,
        /// The other factor.
        up: &'a B::Buffer,
        /// Of the products.
        norm: Option<RmsNorm<'a, B>>,
    },
}

/// A norm of [`Backend::rms_norm_in_place`].
pub struct RmsNorm<'a, B: Backend> {
    /// Of the norm.
    pub stage: Stage,
    /// As many as a row has elements, or a run of it.
    pub weight: &'a B::Vector,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl<B: Backend> Prologue<'_, B> {
    /// Its operations on `x`, one by one.
    pub fn run(self, backend: &B, x: &mut B::Buffer) -> Result<(), BackendError> {
        let norm = match self {
            Prologue::Residual { sum, add, norm } => {
                if let Some(stage) = add {
                    backend.add(stage, sum, x)?;
                }
                return backend.rms_norm(norm.stage, sum, norm.weight, norm.eps, x);
            }
            Prologue::Norm(norm) => Some(norm),
            Prologue::Gate {
                stage,
                activation,
                up,
                norm,
            } => {
                backend.gate(stage, activation, x, up)?;
                norm
            }
        };
        match norm {
            Some(RmsNorm { stage, weight, eps }) => {
                backend.rms_norm_in_place(stage, x, weight, eps)
            }
            None => Ok(()),
        }
    }
}

/// A product of [`Backend::linear_experts`].
pub struct ExpertProduct<'a, B: Backend> {
    /// Which linear layer it is.
    pub stage: Stage,
    /// `[n, k]` for each expert.
    pub w: Vec<&'a B::Linear>,
    /// Added to the outputs, `[n_experts, n]`.
    pub bias: Option<&'a B::Vector>,
    /// `[n_routes, n]`.
    pub out: &'a mut B::Buffer,
}

/// The matrices of a mixture of experts: of each kind one for every expert, in order.
pub struct ExpertMatrices<'a, B: Backend> {
    /// Of gates.
    pub gate: Vec<&'a mut B::Linear>,
    /// What gates are multiplied with, of the same shape.
    pub up: Vec<&'a mut B::Linear>,
    /// Of outputs.
    pub down: Vec<&'a mut B::Linear>,
}

/// Memory of experts, of which not all are in it at once: those of mapped files. Whether they are makes no difference
/// to what they hold.
pub trait ExpertMemory: fmt::Debug + Send + Sync {
    /// `matrices` are those of all experts of a layer, and have been loaded.
    fn loaded(&self, matrices: &[&[u8]]);
    /// `matrices`, of one layer, are about to be read.
    fn read(&self, matrices: &[&[u8]]);
    /// They have been.
    fn done(&self, matrices: &[&[u8]]);
}

/// What the rows of an input of [`Backend::linear_experts`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertInput {
    /// Those of the batch; a row is the input of all of its routes.
    Tokens,
    /// One for each route.
    Routes,
}

/// How the outputs of one [`Backend::linear`] are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputLayout {
    /// Separately.
    Separate,
    /// As columns of the same rows, in order, if the backend benefits from that: queries, keys and values,
    /// which attention reads together.
    SideBySide,
}

/// The inputs of [`Backend::attention`], as the projections computed them.
pub struct Attention<'a, B: Backend> {
    /// The layer of the caches.
    pub layer: usize,
    /// Heads, scale, cap and window.
    pub shape: AttentionShape,
    /// Queries, `[n_tokens, n_heads · head_dim]`; with gates `[n_tokens, n_heads, 2, head_dim]`.
    pub q: &'a mut B::Buffer,
    /// Whether each query is followed by a gate, with whose sigmoid the output for it is multiplied.
    pub gated: bool,
    /// Keys, `[n_tokens, n_kv_heads · head_dim]`.
    pub k: &'a mut B::Buffer,
    /// Values, `[n_tokens, n_kv_heads · head_dim]`; `None` where the layer's keys are its values
    /// ([`CachedValues::Keys`]).
    pub v: Option<&'a B::Buffer>,
    /// Normalises each head of the queries, `[head_dim]`.
    pub q_norm: Option<&'a B::Vector>,
    /// Normalises each head of the keys, `[head_dim]`.
    pub k_norm: Option<&'a B::Vector>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// Rotates the heads of queries and keys, after the norms.
    pub rope: Option<Rotation<'a>>,
    /// Of each query head, the score of a position whose value is zero, `[n_heads]`.
    pub sinks: Option<&'a B::Vector>,
    /// The earlier layer whose keys and values it attends to. `k` and `v` are unspecified then.
    pub shared: Option<usize>,
    /// Whether queries attend to no positions after their own; else to those of all queries of their sequence.
    pub is_causal: bool,
}

/// The inputs of [`Backend::latent_queries`], as the projections computed them.
pub struct LatentInputs<'a, B: Backend> {
    /// The parts of heads.
    pub shape: &'a LatentConfig,
    /// `[n_tokens, n_heads, nope_dim + rope_dim]`.
    pub q: &'a B::Buffer,
    /// The rotated part of keys, `[n_tokens, rope_dim]`.
    pub k_rope: &'a B::Buffer,
    /// `[n_tokens, kv_rank]`.
    pub latent: &'a B::Buffer,
    /// Of each head, `[kv_rank, nope_dim]`.
    pub w: &'a [&'a B::Linear],
}

/// The inputs of [`Backend::delta_net`], as the projections computed them, and its parameters.
pub struct DeltaNet<'a, B: Backend> {
    /// Its heads.
    pub shape: DeltaShape,
    /// `[channels, n_taps]`.
    pub taps: &'a B::Vector,
    /// `[n_value_heads]`.
    pub a: &'a B::Vector,
    /// `[n_value_heads]`.
    pub dt_bias: &'a B::Vector,
    /// Normalises what each head gives, `[value_dim]`.
    pub norm: &'a B::Vector,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Queries, keys and values, `[n_tokens, channels]`.
    pub qkv: &'a mut B::Buffer,
    /// `[n_tokens, values]`.
    pub gate: &'a mut B::Buffer,
    /// `[n_tokens, n_value_heads]`.
    pub alpha: &'a mut B::Buffer,
    /// `[n_tokens, n_value_heads]`.
    pub beta: &'a mut B::Buffer,
}

/// The inputs of [`Backend::ssm`], as the projections computed them, and its parameters.
pub struct Ssm<'a, B: Backend> {
    /// Its heads.
    pub shape: SsmShape,
    /// `[channels, n_taps]`.
    pub taps: &'a B::Vector,
    /// `[channels]`.
    pub conv_bias: Option<&'a B::Vector>,
    /// `[n_heads]`.
    pub a: &'a B::Vector,
    /// `[n_heads]`.
    pub d: &'a B::Vector,
    /// `[n_heads]`.
    pub dt_bias: &'a B::Vector,
    /// Normalises what all heads give, each group by itself, `[inner]`.
    pub norm: Option<&'a B::Vector>,
    /// Epsilon of the norm.
    pub eps: f32,
    /// `[n_tokens, inner]`.
    pub gate: &'a mut B::Buffer,
    /// Inputs, `B` and `C`, `[n_tokens, channels]`.
    pub xbc: &'a mut B::Buffer,
    /// `[n_tokens, n_heads]`.
    pub dt: &'a mut B::Buffer,
}

/// The inputs of [`Backend::causal_convolution`].
pub struct CausalConvolution<'a, B: Backend> {
    /// The channels, and the state that is behind the convolution's.
    pub shape: MambaShape,
    /// `[inner, n_taps]`.
    pub taps: &'a B::Vector,
    /// `[inner]`.
    pub bias: Option<&'a B::Vector>,
    /// `[n_tokens, inner]`.
    pub input: &'a B::Buffer,
}

/// The inputs of [`Backend::selective_scan`], and its parameters.
pub struct SelectiveScan<'a, B: Backend> {
    /// Its channels.
    pub shape: MambaShape,
    /// Positions that the convolution before it covers.
    pub n_taps: usize,
    /// `[inner, state_dim]`.
    pub a: &'a B::Vector,
    /// `[inner]`.
    pub d: &'a B::Vector,
    /// What the convolution gave, `[n_tokens, inner]`.
    pub x: &'a B::Buffer,
    /// What time steps follow from, `[n_tokens, inner]`.
    pub dt: &'a B::Buffer,
    /// `[n_tokens, state_dim]`.
    pub b: &'a B::Buffer,
    /// `[n_tokens, state_dim]`.
    pub c: &'a B::Buffer,
    /// `[n_tokens, inner]`.
    pub gate: &'a mut B::Buffer,
}

/// The inputs of [`Backend::token_shift`].
pub struct TokenShift<'a, B: Backend> {
    /// The heads of the layer.
    pub shape: RwkvShape,
    /// The part of the state that has the position before.
    pub part: Part,
    /// `[n_tokens, inner]`.
    pub x: &'a B::Buffer,
    /// `[inner]`.
    pub factors: &'a B::Vector,
    /// Added to the factors, `[n_tokens, inner]`.
    pub added: Option<&'a B::Buffer>,
}

/// The inputs of [`Backend::time_mix`], as the projections computed them, and its parameters.
pub struct TimeMix<'a, B: Backend> {
    /// Its heads.
    pub shape: RwkvShape,
    /// Receptances, `[n_tokens, inner]`.
    pub r: &'a B::Buffer,
    /// Keys, `[n_tokens, inner]`.
    pub k: &'a mut B::Buffer,
    /// Values, `[n_tokens, inner]`.
    pub v: &'a mut B::Buffer,
    /// What the generation has besides.
    pub recurrence: Recurrence<'a, B>,
    /// What becomes of what heads give, in generations from the fifth on.
    pub finish: Option<HeadNorm<'a, B>>,
}

/// The norm of what each head gives, and its gates.
pub struct HeadNorm<'a, B: Backend> {
    /// `[inner]`.
    pub weight: &'a B::Vector,
    /// `[inner]`.
    pub bias: &'a B::Vector,
    /// Epsilon of the norm.
    pub eps: f32,
    /// `[n_tokens, inner]`.
    pub gate: &'a B::Buffer,
}

/// What generations of RWKV have besides receptances, keys and values.
pub enum Recurrence<'a, B: Backend> {
    /// The fourth and fifth, `[inner]` each.
    Fixed {
        /// Of decays, which are `e^(−e^x)`, `x`.
        decay: &'a B::Vector,
        /// What keys of a position are multiplied with at that position.
        first: &'a B::Vector,
    },
    /// The sixth.
    Six {
        /// The same, `[n_tokens, inner]`.
        decay: &'a mut B::Buffer,
        /// The same, `[inner]`.
        first: &'a B::Vector,
    },
    /// The seventh.
    Seven {
        /// Of decays, `[n_tokens, inner]`.
        decay: &'a mut B::Buffer,
        /// How much of what keys hold is taken away, `[n_tokens, inner]`.
        rate: &'a mut B::Buffer,
        /// Values of the first layer, and how far those here are these, before a sigmoid, `[n_tokens, inner]` each.
        residual: Option<(&'a B::Buffer, &'a B::Buffer)>,
        /// Factors on keys in directions that are forgotten, `[inner]`.
        k_k: &'a B::Vector,
        /// How far rates change keys, `[inner]`.
        k_a: &'a B::Vector,
        /// What a position adds of its own values, `[inner]`.
        r_k: &'a B::Vector,
    },
}

/// The rotary embedding of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Which of the model's rotary embeddings it is. The angles for one index are the same throughout a step.
    pub index: usize,
    /// The angles of each row's position; with one sequence, those of later positions may follow.
    pub angles: &'a Angles,
}

impl<B: Backend> Attention<'_, B> {
    /// Its position in the forward pass.
    pub fn stage(&self) -> Stage {
        Stage {
            layer: Some(self.layer),
            operation: Operation::Attention,
        }
    }
}

/// A low-rank update to the output of a matrix ([`Backend::add_low_rank`]).
pub struct LowRank<'a, B: Backend> {
    /// Which linear layer it belongs to.
    pub stage: Stage,
    /// `[rank, k]`.
    pub a: &'a B::Linear,
    /// `[n, rank]`.
    pub b: &'a B::Linear,
    /// Scale of the update.
    pub scale: f32,
    /// What is updated, `[n_tokens, n]`.
    pub out: &'a mut B::Buffer,
}

/// A sequence's part of a batch.
#[derive(Debug)]
pub struct Sequence<'a, C> {
    /// Its keys and values.
    pub cache: &'a mut C,
    /// How many rows of the batch belong to it.
    pub n_rows: usize,
    /// How many of the batch's rotations do: those of its rows, or, of its one row, those of later steps, too.
    pub n_angles: usize,
}

/// Keys and values of a sequence, and the states of layers that have those instead.
///
/// Keys and values can be truncated anywhere, states only to positions where they are remembered: checkpoints,
/// which a cache keeps at some ends of earlier steps, and at its [pin](KvCache::pin).
pub trait KvCache: Sized {
    /// Tokens in the cache.
    fn len(&self) -> usize;
    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Tokens that it takes memory for, where others share what they have in common: those of a page are divided among the
    /// caches that have it.
    fn share(&self) -> usize {
        self.len()
    }
    /// Advances the length by `n` tokens that every layer has now appended. After a step that was begun, and that the cache
    /// doesn't advance by, [`KvCache::truncate`] has to follow, if only to its length: states may have changed.
    fn advance(&mut self, n: usize);
    /// Makes the current length a checkpoint that stays one until the next call or a truncation before it.
    fn pin(&mut self) {}
    /// Truncates to the first `len` tokens; to fewer, if there are states and none is remembered there.
    fn truncate(&mut self, len: usize);
    /// How many tokens [`KvCache::truncate`] to the first `len` leaves, where no step was begun that it didn't advance by.
    fn len_within(&self, len: usize) -> usize {
        len.min(self.len())
    }
    /// A cache of the first `len` tokens, sharing memory with this one; of fewer, as [`KvCache::truncate`].
    fn fork(&self, len: usize) -> Self;
}

/// The [share](KvCache::share) of a cache of `len` tokens, in pages of `page_len` that so many caches have.
pub(crate) fn share(
    len: usize,
    page_len: usize,
    n_owners: impl IntoIterator<Item = usize>,
) -> usize {
    let firsts = (0..len).step_by(page_len);
    let shares = firsts.zip(n_owners).map(|(first, n_owners)| {
        let n_tokens = page_len.min(len - first);
        n_tokens as f64 / n_owners.max(1) as f64
    });
    shares.sum::<f64>().round() as usize
}

/// What a cache holds for a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerContents {
    /// Tokens whose keys and values it has.
    pub n_keys: usize,
    /// Values of a state.
    pub n_state: usize,
}

/// A weight matrix `[n, k]` as passed to a backend.
#[derive(Debug, Clone)]
pub struct LinearSource {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// The weights.
    pub weights: WeightData,
    /// What rows of the matrix were rotated by: inputs of products have to be too, and rows that are looked up
    /// rotated back.
    pub rotation: Option<Arc<hadamard::Rotation>>,
}

/// A weight matrix `[n, k]` of blocks whose rows follow.
#[derive(Debug, Clone)]
pub struct BlockMatrix {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Type of the blocks.
    pub dtype: DType,
    /// As in [`LinearSource`].
    pub rotation: Option<Arc<hadamard::Rotation>>,
}

/// The form of the weights of a [`LinearSource`].
#[derive(Debug, Clone)]
pub enum WeightData {
    /// Rows of whole blocks.
    Blocks {
        /// Type of the blocks.
        dtype: DType,
        /// The blocks.
        bytes: Bytes,
        /// How activations are rounded first: [`Rounding::Row`] in a BitLinear layer whose weights don't share one
        /// scale.
        rounding: Rounding,
    },
    /// Trits with one scale; activations are int8.
    Ternary {
        /// The codes.
        codes: Bytes,
        /// Where in `codes` they start.
        packing: TernaryPacking,
        /// The value of a code of +1.
        scale: f32,
    },
}

/// Shape of a [`KvCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    /// Key and value heads of each layer.
    pub layers: Arc<[KvHeads]>,
    /// Data type.
    pub dtype: CacheType,
}

/// Heads of keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHeads {
    /// Heads.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Where the values are.
    pub values: CachedValues,
}

impl KvHeads {
    /// Elements that a position has in the cache.
    pub fn width(&self) -> usize {
        self.values.per_head() * self.n_kv_heads * self.head_dim
    }
}

/// Errors of a backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Buffers whose shapes don't match.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Weights that can't be used in the given form.
    #[error(transparent)]
    Weights(#[from] QuantError),
    /// An error of a device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Weights or activations on another device than the operation.
    #[error("an operand is on another device than the operation")]
    WrongDevice,
    /// What the backend doesn't have.
    #[error("this backend has no {0}")]
    Unsupported(&'static str),
    /// A result that isn't ready, where the platform can't block on it.
    #[error("the result isn't ready yet, and this platform can't block: await it instead")]
    CannotWait,
}

/// Where what sequences hold is saved: whatever can be written to, or memory that keeps pieces as they come.
pub trait SnapshotSink {
    /// Takes the next piece.
    fn put(&mut self, piece: Vec<u8>) -> io::Result<()>;
}

impl<W: Write> SnapshotSink for W {
    fn put(&mut self, piece: Vec<u8>) -> io::Result<()> {
        self.write_all(&piece)
    }
}

/// From where it is restored.
pub trait SnapshotSource {
    /// The next `n` bytes.
    ///
    /// Errors: [`io::ErrorKind::UnexpectedEof`] if there are fewer.
    fn take(&mut self, n: usize) -> io::Result<Cow<'_, [u8]>>;
}

impl<R: Read> SnapshotSource for R {
    fn take(&mut self, n: usize) -> io::Result<Cow<'_, [u8]>> {
        let mut bytes = vec![0; n];
        self.read_exact(&mut bytes)?;
        Ok(bytes.into())
    }
}

/// Why a sequence can't be saved or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It can't be written or read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What was saved doesn't fit.
    #[error("saved sequence: {what}: expected {expected}, found {found}")]
    Unfit {
        /// Which part of it.
        what: &'static str,
        /// What would fit.
        expected: String,
        /// What it has.
        found: String,
    },
    /// The backend failed, or can't save sequences.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl SnapshotError {
    pub(crate) fn unfit(
        what: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> SnapshotError {
        SnapshotError::Unfit {
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// The next `n` bytes of a saved sequence.
pub(crate) fn take_saved(
    from: &mut dyn SnapshotSource,
    n: usize,
) -> Result<Cow<'_, [u8]>, SnapshotError> {
    from.take(n).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => SnapshotError::unfit("end", "more bytes", "none"),
        _ => error.into(),
    })
}

/// Takes what says how a layer was saved, which should be `expected`.
pub(crate) fn take_form(
    from: &mut dyn SnapshotSource,
    expected: &[u8; 4],
) -> Result<(), SnapshotError> {
    let found = take_saved(from, expected.len())?;
    if *found == *expected {
        return Ok(());
    }
    let text = |form: &[u8]| form.escape_ascii().to_string();
    Err(SnapshotError::unfit(
        "form of a layer",
        text(expected),
        text(&found),
    ))
}

impl BackendError {
    /// Whether the device itself is lost: what was loaded there has to be loaded again, elsewhere or on the
    /// same device opened anew.
    pub fn is_lost(&self) -> bool {
        matches!(self, BackendError::Device(error) if error.kind() == DeviceErrorKind::Lost)
    }

    /// Whether the device is out of memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, BackendError::Device(error) if error.kind() == DeviceErrorKind::OutOfMemory)
    }
}

/// An error of a device, as reported by its driver.
#[derive(Debug)]
pub struct DeviceError {
    kind: DeviceErrorKind,
    error: Box<dyn Error + Send + Sync>,
}

/// What an error of a device means for its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// The device is gone, with everything on it.
    Lost,
    /// It is out of memory.
    OutOfMemory,
    /// Anything else.
    Other,
}

impl DeviceError {
    /// `error`, which means `kind`.
    pub fn new(
        kind: DeviceErrorKind,
        error: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> DeviceError {
        DeviceError {
            kind,
            error: error.into(),
        }
    }

    /// What it means.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for DeviceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}
