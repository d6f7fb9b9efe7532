//! The tensors of a Hugging Face folder in the order of an engine's file, and how each is converted.

use std::collections::HashSet;

use serde_json::{Map, Value};
use sterna::native::LocalModel;
use sterna::{Context, Header, Result, bail};
use sterna_engine::ModelConfig;
use sterna_engine::plan::PlanOptions;
use sterna_format::TensorEntry;
use sterna_format::bundle::{
    Action, ArchType, Manifest, ManifestTensor, ModelFacts, RopeFile, Section, ShardRange,
    SourceType, layer_order,
};
use sterna_format::hf::Config;
use sterna_format::names::{self, EMBEDDINGS, HEAD, OUTPUT_NORM};

use super::{ManifestForm, shard_path};
use crate::event::{Event, Notify, Warning};

/// Engines compute with multiples of this width.
const WIDTH: u32 = 128;

/// A Hugging Face folder as the source of a bundle.
pub(super) struct Source<'a> {
    files: &'a LocalModel,
    pub(super) arch: ArchType,
    hf: Config,
    /// The engine's plan for it.
    config: ModelConfig,
    /// File and offset of each tensor that the engine converts to trits.
    ternary: HashSet<(usize, u64)>,
}

impl<'a> Source<'a> {
    /// Checks that bundles support the model in `files`, of architecture `arch` if that is given.
    pub(super) fn of(
        files: &'a LocalModel,
        arch: Option<ArchType>,
        notify: &Notify<'_>,
    ) -> Result<Source<'a>> {
        let name = files.name();
        if !matches!(files.header(), Header::SafeTensors { .. }) {
            bail!(
                Unsupported,
                "{name}: expected a Hugging Face folder with safetensors files, found another form"
            );
        }
        let hf = files.config()?;
        let hf = hf.with_context(|| format!("{name}: expected config.json, found none"))?;
        // A model that can't be run here is not worth writing.
        let plan = files.plan(&PlanOptions::default())?;
        let arch = match arch {
            Some(arch) => arch,
            None => architecture(files, &hf, notify)?,
        };
        // Fails for an architecture whose tensors have no defined order.
        drop(layer_order(arch)?);
        Ok(Source {
            files,
            arch,
            hf,
            config: plan.config().clone(),
            ternary: (plan.ternary_weights())
                .map(|weight| (weight.file, weight.offset))
                .collect(),
        })
    }

    /// Shapes and constants of the model.
    pub(super) fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Whether the embedding table is also the output head.
    fn is_tied(&self) -> bool {
        self.find(HEAD).is_none()
    }

    pub(super) fn facts(&self) -> ModelFacts {
        // Widths are below 2^28: the engine accepts no others.
        let [hidden, intermediate] =
            [self.config.model_dim, self.config.ffn_dim].map(|dim| dim as u32);
        ModelFacts {
            arch: self.arch,
            tied_embeddings: self.is_tied(),
            hidden_dim: hidden.next_multiple_of(WIDTH),
            intermediate_dim: intermediate.next_multiple_of(WIDTH),
            hidden_dim_orig: hidden,
            intermediate_dim_orig: intermediate,
            norm_eps: self
                .hf
                .rms_norm_eps
                .unwrap_or_else(|| f64::from(self.config.norm_eps)),
        }
    }

    /// How the weights are quantized, in one word.
    pub(super) fn quantization(&self) -> &'static str {
        match self.arch {
            ArchType::Bonsai => "binary",
            ArchType::BonsaiTernary => "grouped-ternary",
            _ if !self.ternary.is_empty() => "ternary",
            _ => "bf16",
        }
    }

    /// The parameters of the rotary embedding.
    pub(super) fn rope(&self) -> Result<RopeFile> {
        let [rope] = &self.config.ropes[..] else {
            bail!(
                Unsupported,
                "{}: expected one rotary embedding for all layers, found {}",
                self.files.name(),
                self.config.ropes.len()
            );
        };
        let json = self.files.config_json()?.unwrap_or_default();
        Ok(RopeFile {
            rope_theta: rope.base,
            head_dim: self.config.head_dim,
            rope_dim: rope.dim,
            max_position_embeddings: self.config.max_ctx,
            rope_scaling: scaling(&json),
        })
    }

    /// A manifest without tensors.
    pub(super) fn empty_manifest(&self, form: ManifestForm) -> Manifest {
        Manifest {
            shards: Vec::new(),
            tensors: Vec::new(),
            sections: (form == ManifestForm::Sections).then(Vec::new),
            lora: None,
        }
    }

    /// How to convert every tensor.
    ///
    /// Fails if the folder has a tensor that isn't part of the engine's file.
    pub(super) fn manifest(&self, form: ManifestForm, embeddings_i8: bool) -> Result<Manifest> {
        let mut manifest = self.empty_manifest(form);
        for file in self.files.sources() {
            let path = file
                .path()
                .with_context(|| format!("{file}: expected a file in a folder"))?;
            manifest.shards.push(shard_path(path)?);
        }
        let mut used = HashSet::new();
        for name in self.names()? {
            let entry = self
                .find(&name)
                .with_context(|| format!("{}: tensor `{name}`: missing", self.files.name()))?;
            used.insert(entry.name.as_str());
            let scale = self.find(&format!("{}_scale", entry.name));
            used.extend(scale.map(|scale| scale.name.as_str()));
            let tensor = self.tensor(entry, scale, embeddings_i8);
            manifest
                .tensors
                .push(tensor.with_context(|| format!("tensor `{}`", entry.name))?);
        }
        let left = (self.files.tensors().iter()).find(|entry| {
            !used.contains(entry.name.as_str()) && !entry.name.ends_with("rotary_emb.inv_freq")
        });
        if let Some(entry) = left {
            bail!(
                Unsupported,
                "{}: tensor `{}`: files of architecture {} have no place for it",
                self.files.name(),
                entry.name,
                self.arch
            );
        }
        let section = Section {
            kind: Section::TEXT,
            first: 0,
            len: manifest.tensors.len() as u32,
        };
        if let Some(sections) = &mut manifest.sections {
            sections.push(section);
        }
        Ok(manifest)
    }

    /// The names of all tensors, in order.
    fn names(&self) -> Result<Vec<String>> {
        let mut names = vec![EMBEDDINGS.to_owned()];
        let mut push = |weight: &str| {
            names.push(weight.to_owned());
            let bias = format!("{}.bias", weight.trim_end_matches(".weight"));
            if self.find(&bias).is_some() {
                names.push(bias);
            }
        };
        if !self.is_tied() {
            push(HEAD);
        }
        push(OUTPUT_NORM);
        for layer in 0..self.config.n_layers {
            for part in layer_order(self.arch)? {
                push(&format!("model.layers.{layer}.{part}.weight"));
            }
        }
        Ok(names)
    }

    /// The tensor with this name, or with that of older checkpoints.
    fn find(&self, name: &str) -> Option<&'a TensorEntry> {
        let tensors = self.files.tensors();
        let older = || tensors.get(&names::older(name)?);
        tensors.get(name).or_else(older)
    }

    /// How to convert one tensor.
    fn tensor(
        &self,
        entry: &TensorEntry,
        scale: Option<&TensorEntry>,
        embeddings_i8: bool,
    ) -> Result<ManifestTensor> {
        let dtype = SourceType::from_dtype(entry.dtype)
            .with_context(|| format!("expected F32, F16, BF16, I8 or U8, found {}", entry.dtype))?;
        let (rows, cols) = match entry.shape[..] {
            [rows] => (rows, 1),
            [rows, cols] => (rows, cols),
            _ => bail!(
                InvalidFile,
                "expected one or two dimensions, found {:?}",
                entry.shape
            ),
        };
        let [rows, cols] = [rows, cols].map(|dim| dim as u32);
        let action = self.action(entry, dtype, embeddings_i8);
        Ok(ManifestTensor {
            action,
            dtype,
            rows,
            cols,
            padded_rows: self.padded(rows),
            padded_cols: self.padded(cols),
            data: range(entry)?,
            scale: scale.map(range).transpose()?,
        })
    }

    /// The engine's value for a dimension of the model: widths are rounded up.
    fn padded(&self, dim: u32) -> u32 {
        let ModelFacts {
            hidden_dim,
            intermediate_dim,
            hidden_dim_orig,
            intermediate_dim_orig,
            ..
        } = self.facts();
        match dim {
            dim if dim == intermediate_dim_orig => intermediate_dim,
            dim if dim == hidden_dim_orig => hidden_dim,
            dim => dim,
        }
    }

    fn action(&self, entry: &TensorEntry, dtype: SourceType, embeddings_i8: bool) -> Action {
        match self.arch {
            _ if entry.shape.len() < 2 => Action::Raw,
            ArchType::Bonsai => Action::Q1_0,
            ArchType::BonsaiTernary => Action::GroupedTernary,
            _ if self.ternary.contains(&(entry.file, entry.offset)) => match dtype.is_float() {
                true => Action::TernaryQuantize,
                false => Action::RepackTernary,
            },
            _ if entry.name == EMBEDDINGS && embeddings_i8 => Action::EmbeddingI8,
            _ => Action::Raw,
        }
    }
}

/// The architecture that a configuration names; for Qwen3, also considering its description.
fn architecture(files: &LocalModel, hf: &Config, notify: &Notify<'_>) -> Result<ArchType> {
    let named = hf.architectures.first().map_or("", String::as_str);
    let arch = ArchType::from_class(named).filter(|arch| layer_order(*arch).is_ok());
    let Some(arch) = arch else {
        bail!(
            Unsupported,
            "{}: config.json: architectures: expected BitNetForCausalLM, LlamaForCausalLM, \
             MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM, found `{named}`",
            files.name()
        );
    };
    if arch != ArchType::Qwen3 {
        return Ok(arch);
    }
    let readme = files.read_beside("README.md")?;
    let Some(arch) = readme.and_then(|readme| described(&String::from_utf8_lossy(&readme))) else {
        return Ok(ArchType::Qwen3);
    };
    notify(Event::Warning(Warning::Described {
        model: files.name().to_owned(),
        arch,
    }));
    Ok(arch)
}

/// Which kind of Bonsai a model is by its description: nothing else distinguishes them from Qwen3.
fn described(readme: &str) -> Option<ArchType> {
    let readme = readme.to_ascii_lowercase();
    let has = |word: &str| readme.contains(word);
    let one_bit = has("1-bit") || has("1 bit") || has("1bit");
    match (has("bonsai"), has("ternary"), one_bit) {
        (true, true, false) => Some(ArchType::BonsaiTernary),
        (true, _, true) => Some(ArchType::Bonsai),
        _ => None,
    }
}

/// How a configuration scales the context, if it does.
fn scaling(config: &Value) -> Option<Map<String, Value>> {
    let text = config.get("text_config").unwrap_or(config);
    let find = |key: &str| text.get(key).or_else(|| config.get(key))?.as_object();
    let set = find("rope_scaling").or_else(|| find("rope_parameters"))?;
    let kind = set.get("rope_type").or_else(|| set.get("type"));
    match kind.and_then(Value::as_str) {
        None | Some("default") => None,
        Some(_) => {
            let mut set = set.clone();
            // These have separate fields.
            set.remove("rope_theta");
            set.remove("partial_rotary_factor");
            Some(set)
        }
    }
}

/// The location of a tensor.
fn range(entry: &TensorEntry) -> Result<ShardRange> {
    Ok(ShardRange {
        shard: u16::try_from(entry.file)
            .ok()
            .context("more than 65535 files")?,
        offset: entry.offset,
        size: entry.len,
    })
}
