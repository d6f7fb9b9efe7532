//! Writing a receipt while an answer is generated.

use std::sync::Arc;

use sterna_delivery::hash::{Algorithm, DIGEST_BYTES, Hasher};

use super::document::{Beginning, End, Hex, Logits, Receipt, STEP_BYTES, Sampling, limited};
use super::{Asking, Setup};
use crate::error::Result;

/// Digests of logits, one after the other.
pub(super) struct Chain {
    digest: [u8; DIGEST_BYTES],
    /// Kept to save the allocation.
    bytes: Vec<u8>,
}

impl Chain {
    pub(super) fn new(begin: [u8; DIGEST_BYTES]) -> Chain {
        Chain {
            digest: begin,
            bytes: Vec::new(),
        }
    }

    /// Adds `id`, which was sampled from `logits`; the beginning of the digest of all so far.
    pub(super) fn push(&mut self, id: u32, logits: &[f32]) -> Hex<STEP_BYTES> {
        self.bytes.clear();
        self.bytes.extend_from_slice(&self.digest);
        self.bytes.extend_from_slice(&id.to_le_bytes());
        let logits = logits.iter().flat_map(|logit| logit.to_le_bytes());
        self.bytes.extend(logits);
        let mut hasher = Hasher::new(Algorithm::Blake3);
        hasher.update(&self.bytes);
        self.digest = *hasher.finish().as_bytes();
        let mut step = [0; STEP_BYTES];
        step.copy_from_slice(&self.digest[..STEP_BYTES]);
        Hex(step)
    }

    /// The digest of all.
    pub(super) fn digest(&self) -> [u8; DIGEST_BYTES] {
        self.digest
    }
}

/// A receipt that is being written.
pub(crate) struct Recorder {
    setup: Arc<Setup>,
    sampling: Sampling,
    max_tokens: Option<u64>,
    stop_ids: Vec<u32>,
    begin: [u8; DIGEST_BYTES],
    steps: Vec<Hex<STEP_BYTES>>,
    chain: Chain,
}

impl Recorder {
    /// Of the answer to `asking`.
    ///
    /// Errors: it is one that nobody could check.
    pub(crate) fn new(asking: &Asking<'_>) -> Result<Recorder> {
        asking.setup.expect_checkable(asking)?;
        let mut recorder = Recorder {
            setup: Arc::clone(asking.setup),
            sampling: Sampling::of(asking.sampler.config()),
            max_tokens: limited(asking.max_tokens),
            stop_ids: asking.stop_ids.to_vec(),
            begin: [0; DIGEST_BYTES],
            steps: Vec::new(),
            chain: Chain::new([0; DIGEST_BYTES]),
        };
        recorder.begin = recorder.beginning(asking.prompt).asked().digest();
        recorder.chain = Chain::new(recorder.begin);
        Ok(recorder)
    }

    fn beginning<'a>(&'a self, prompt: &'a [u32]) -> Beginning<'a> {
        let Setup {
            machine,
            model,
            adapters,
            settings,
            ..
        } = &*self.setup;
        Beginning {
            machine,
            model,
            adapters,
            settings,
            sampling: &self.sampling,
            max_tokens: self.max_tokens,
            stop_ids: &self.stop_ids,
            prompt,
        }
    }

    /// Records that `id` was sampled from `logits`, `[n_vocab]`.
    pub(crate) fn push(&mut self, id: u32, logits: &[f32]) {
        let step = self.chain.push(id, logits);
        self.steps.push(step);
    }

    /// The receipt of `answer`, which ended for `reason`, at the token `stop_id` if that is one.
    pub(crate) fn receipt(
        &self,
        prompt: &[u32],
        answer: &[u32],
        reason: crate::generate::StopReason,
        stop_id: Option<u32>,
    ) -> Option<Receipt> {
        let logits = Logits {
            begin: Hex(self.begin),
            steps: self.steps.clone(),
            end: Hex(self.chain.digest()),
        };
        let end = End::of(reason, stop_id)?;
        Some(self.beginning(prompt).receipt(answer, end, logits))
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Recorder({} steps)", self.steps.len())
    }
}
