//! A model with the adapters that its sessions begin with.

use std::sync::Arc;

use sterna_delivery::hash::{Algorithm, Digest, Hasher};
use sterna_engine::lora::{ActiveAdapter, AdapterOptions};
use sterna_engine::{Backend, Model, Session, SessionOptions};
use sterna_format::DType;

use crate::error::{Context, Result};
use crate::model::{AdapterFiles, ModelFiles};
use crate::receipt::AdapterId;
use crate::warning::Warning;

/// A model, and the adapters that its sessions begin with.
pub struct Adapted<B: Backend> {
    model: Arc<Model<B>>,
    adapters: Vec<ActiveAdapter<B>>,
    /// Of each, the digest, the scale, and what it was converted to.
    forms: Vec<(Digest, f32, Option<DType>)>,
}

impl<B: Backend> Clone for Adapted<B> {
    fn clone(&self) -> Adapted<B> {
        Adapted {
            model: Arc::clone(&self.model),
            adapters: self.adapters.clone(),
            forms: self.forms.clone(),
        }
    }
}

impl<B: Backend> Adapted<B> {
    /// `model` without adapters.
    pub fn new(model: Arc<Model<B>>) -> Adapted<B> {
        Adapted {
            model,
            adapters: Vec::new(),
            forms: Vec::new(),
        }
    }

    /// Loads `adapter` for the model, which was made from `files`; its updates are scaled by `scale`, its
    /// matrices converted to `dtype` where possible.
    ///
    /// One that was made for a model of another name is accepted with a warning, as the same model has many
    /// names.
    /// Errors: its matrices don't fit the model.
    pub fn add(
        &mut self,
        adapter: AdapterFiles,
        files: &ModelFiles,
        (scale, dtype): (f32, Option<DType>),
        warnings: &mut Vec<Warning>,
    ) -> Result<()> {
        adapter.check_base(files, warnings)?;
        let refusal = adapter.refusal();
        let form = (adapter.digest(), scale, dtype);
        let options = AdapterOptions { dtype };
        let adapter = self.model.load_adapter(adapter.source, options);
        let adapter = adapter.with_context(|| refusal)?;
        self.adapters.push(ActiveAdapter { adapter, scale });
        self.forms.push(form);
        Ok(())
    }

    /// The same adapters, on a [fork](Model::fork) of the model.
    #[must_use]
    pub fn fork(&self) -> Adapted<B> {
        Adapted {
            model: self.model.fork(),
            adapters: self.adapters.clone(),
            forms: self.forms.clone(),
        }
    }

    /// What the adapters are, beside the model: models of the same files whose sessions compute the same have the same.
    pub fn adapters_digest(&self) -> Digest {
        let mut hasher = Hasher::new(Algorithm::Blake3);
        for (digest, scale, dtype) in &self.forms {
            let form = format!("{digest} {scale:?} {dtype:?}\n");
            hasher.update(form.as_bytes());
        }
        hasher.finish()
    }

    /// The adapters, as receipts name them.
    pub(crate) fn adapter_ids(&self) -> impl Iterator<Item = AdapterId> + '_ {
        let all = self.adapters.iter().zip(&self.forms);
        all.map(|(active, (digest, scale, dtype))| AdapterId {
            name: active.adapter.name().to_owned(),
            blake3: (*digest).into(),
            scale: *scale,
            dtype: dtype.map(|dtype| dtype.name().to_owned()),
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model<B>> {
        &self.model
    }

    /// An empty sequence, with the adapters applied.
    ///
    /// Errors: out of memory.
    pub fn session(&self, options: SessionOptions) -> Result<Session<B>> {
        let mut session = Session::new(Arc::clone(&self.model), options)?;
        session.set_adapters(self.adapters.clone())?;
        Ok(session)
    }
}
