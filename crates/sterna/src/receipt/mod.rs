//! Receipts of answers, which anyone can check.
//!
//! On CPUs an answer has the same bits whatever the instruction set, the number of threads, and what shares its steps.
//! So a [`Receipt`] that says what computed an answer ([`Setup`]), what was asked, which tokens came, and a digest of
//! the logits before each of them can be computed again: all tokens are known, so in batched passes.
//!
//! A [`Generator`](crate::generate::Generator) writes one where its request
//! [says so](crate::generate::Request::receipt); [`Receipt::check`] computes it again. `docs/receipts.md` has the form,
//! and what a receipt proves.

mod check;
mod document;
mod record;

use std::sync::Arc;

use sterna_delivery::hash::Digest;
use sterna_engine::compare::logits_bound;
use sterna_engine::{Activations, Backend, CacheType, ModelPlan};

use crate::adapted::Adapted;
use crate::error::{Result, bail};

pub use check::{Checked, Difference};
pub use document::{AdapterId, Hex, MAX_RECEIPT_BYTES, Machine, ModelId, Receipt, Settings};
pub(crate) use record::Recorder;

/// What an answer is computed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A processor, by the instruction set of that name.
    Cpu(String),
    /// A GPU of that name, alone or beside the processor.
    Gpu(String),
}

/// What answers are computed by: a model, its adapters, and all settings that change a bit.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    machine: Machine,
    model: ModelId,
    adapters: Vec<AdapterId>,
    settings: Settings,
    n_vocab: usize,
    /// The largest relative error of logits on a GPU.
    bound: f64,
}

impl Setup {
    /// The model of `plan`, called `name`, whose files have the [digest](crate::ModelFiles::digest) `digest`, in
    /// sessions of `ctx_len` tokens with a cache of type `cache`, on `device`. No adapters yet.
    pub fn new(
        name: &str,
        digest: Digest,
        plan: &ModelPlan,
        activations: Activations,
        ctx_len: usize,
        cache: CacheType,
        device: Device,
    ) -> Setup {
        Setup {
            machine: Machine::of(device),
            model: ModelId {
                name: name.to_owned(),
                blake3: digest.into(),
            },
            adapters: Vec::new(),
            settings: Settings::of(plan, activations, ctx_len, cache),
            n_vocab: plan.config().n_vocab,
            bound: logits_bound(plan, cache),
        }
    }

    /// The same on another device.
    #[must_use]
    pub fn on(self, device: Device) -> Setup {
        Setup {
            machine: Machine::of(device),
            ..self
        }
    }

    /// The same with the adapters of `adapted`.
    ///
    /// Errors: groups of its weights were replaced, so that they aren't those of the model's files.
    pub fn with_adapters<B: Backend>(mut self, adapted: &Adapted<B>) -> Result<Setup> {
        let n = adapted.model().generation();
        if n > 0 {
            bail!(
                Unsupported,
                "a receipt: expected a model with the weights of its files, found one whose weights were replaced"
            );
        }
        self.adapters.extend(adapted.adapter_ids());
        Ok(self)
    }

    /// Adds `adapters`, which are applied after those that it has.
    pub fn extend_adapters(&mut self, adapters: impl IntoIterator<Item = AdapterId>) {
        self.adapters.extend(adapters);
    }

    /// Refuses what can't be checked.
    fn expect_checkable(&self, request: &Asking<'_>) -> Result<()> {
        let sampler = request.sampler;
        if request.has_constraint {
            bail!(
                Unsupported,
                "a receipt: expected an answer that needn't match anything, found a schema, a grammar, or a limit of \
                 thoughts"
            );
        }
        if !sampler.is_fresh() {
            bail!(
                Unsupported,
                "a receipt: expected a random sequence at its beginning, found one that an answer before has drawn from"
            );
        }
        let temperature = sampler.config().temperature;
        if self.machine.is_gpu() && temperature != 0.0 {
            bail!(
                Unsupported,
                "a receipt of an answer of a GPU, whose logits are checked within a margin: expected temperature 0, \
                 found {temperature}"
            );
        }
        Ok(())
    }
}

/// What a receipt has to know of a request.
pub(crate) struct Asking<'a> {
    pub(crate) setup: &'a Arc<Setup>,
    pub(crate) sampler: &'a sterna_engine::Sampler,
    pub(crate) max_tokens: usize,
    pub(crate) stop_ids: &'a [u32],
    pub(crate) prompt: &'a [u32],
    pub(crate) has_constraint: bool,
}
