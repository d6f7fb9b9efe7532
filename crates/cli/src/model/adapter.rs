//! Opening low-rank adapters (`--lora`), and the sessions that begin with them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use sterna_delivery::LocalFile;
use sterna_engine::{
    ActiveAdapter, AdapterOptions, AdapterSource, Backend, LoraMatrix, LoraPair, Model, Module,
    Orientation, Session, SessionOptions, TensorRequest,
};
use sterna_format::bundle::{
    self, BundleKind, LORA_FILE, LoraFile, LoraTarget, METADATA_FILE, StoredMatrix,
};
use sterna_format::hf::{AdapterConfig, AdapterTensor, LoraFactor};
use sterna_format::rdrr::{MANIFEST_FILE, lora};
use sterna_format::safetensors::SafeTensors;

use super::bundle::{identity_hash, read_metadata};
use super::called::warn_of_other_base;
use super::source::{Folder, in_store};
use super::{Header, ModelFiles};
use crate::args::LoraFlag;
use crate::place::Place;

/// A model, and the adapters that its sessions begin with.
pub(crate) struct Adapted<B: Backend = Place> {
    model: Arc<Model<B>>,
    adapters: Vec<ActiveAdapter<B>>,
}

impl<B: Backend> Clone for Adapted<B> {
    fn clone(&self) -> Adapted<B> {
        Adapted {
            model: Arc::clone(&self.model),
            adapters: self.adapters.clone(),
        }
    }
}

impl<B: Backend> Adapted<B> {
    /// Loads the adapters that `flags` name for `model`, which is made of `files`.
    ///
    /// One whose matrices don't fit is refused; one that was made for a model of another name is taken
    /// with a warning, as the same model has many.
    pub(crate) fn new(
        model: Arc<Model<B>>,
        files: &ModelFiles,
        flags: &[LoraFlag],
    ) -> Result<Adapted<B>> {
        let names = match flags {
            [] => Vec::new(),
            _ => files.names()?,
        };
        let adapters = flags.iter().map(|flag| {
            let LoraFlag {
                folder,
                scale,
                dtype,
            } = flag;
            let AdapterFiles {
                source,
                base,
                base_hash,
            } = open(folder)?;
            let made_for = base.as_ref();
            let made_for =
                made_for.map_or(String::new(), |base| format!("; it was made for `{base}`"));
            let refusal = || {
                format!(
                    "{}: not an adapter of this model{made_for}",
                    folder.display()
                )
            };
            if let Some(expected) = &base_hash
                && let Some(config) = files.config_json()?
                && *expected != identity_hash(&config)?
            {
                bail!(
                    "{}: {METADATA_FILE} has the hash of another configuration",
                    refusal()
                );
            }
            if let (Some(base), None) = (&base, &base_hash) {
                warn_of_other_base(folder, base, &names);
            }
            let options = AdapterOptions { dtype: *dtype };
            let adapter = model.load_adapter(source, options).with_context(refusal)?;
            let scale = *scale;
            Ok(ActiveAdapter { adapter, scale })
        });
        let adapters = adapters.collect::<Result<_>>()?;
        Ok(Adapted { model, adapters })
    }

    pub(crate) fn model(&self) -> &Arc<Model<B>> {
        &self.model
    }

    /// An empty sequence, with the adapters applied.
    pub(crate) fn session(&self, options: SessionOptions) -> Result<Session<B>> {
        let mut session = Session::new(Arc::clone(&self.model), options)?;
        session.set_adapters(self.adapters.clone())?;
        Ok(session)
    }
}

/// The file that makes a folder an adapter.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The matrices of such an adapter.
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";

/// Largest configuration that is read; the parser takes no larger one.
const MAX_CONFIG_BYTES: u64 = 8 << 20;

/// An adapter, and what it says about the model it was made for.
pub(crate) struct AdapterFiles {
    pub(crate) source: AdapterSource,
    /// What the adapter's maker called the model.
    pub(crate) base: Option<String>,
    /// Hash of what the model's configuration says about its shape ([`identity_hash`]).
    base_hash: Option<String>,
}

/// The adapter in a folder, at an address or in the store: PEFT's, of a package, or of an engine bundle.
pub(crate) fn open(folder: &Path) -> Result<AdapterFiles> {
    if let Some(name) = folder.to_str().filter(|_| !folder.exists())
        && (name.contains("://") || in_store(name)?.is_some())
    {
        return open_package(name);
    }
    if folder.join(LORA_FILE).exists() && !folder.join(WEIGHTS).exists() {
        return open_bundle(folder);
    }
    if folder.is_dir() && !folder.join(CONFIG).exists() {
        if folder.join(MANIFEST_FILE).exists() {
            return open_package(&folder.to_string_lossy());
        }
        bail!(
            "{}: expected an adapter as PEFT saves it, with {CONFIG} and {WEIGHTS}, a package with \
             {MANIFEST_FILE} or a bundle with {LORA_FILE}, found a folder without {CONFIG}",
            folder.display()
        );
    }
    let config = config(folder)?;
    let path = folder.join(WEIGHTS);
    if !path.exists() && folder.join("adapter_model.bin").exists() {
        bail!(
            "{}: expected {WEIGHTS}, found adapter_model.bin; PyTorch's own files can run code when \
             they are read: save the adapter as safetensors (save_pretrained)",
            folder.display()
        );
    }
    let weights = LocalFile::open(&path)?;
    let found = tensors(&weights).with_context(|| path.display().to_string())?;
    let pairs = pair_up(found, |module| {
        (config.rank(module), config.scaling(module))
    })
    .with_context(|| path.display().to_string())?;
    let source = AdapterSource {
        name: folder.display().to_string(),
        orientation: Orientation::RankFirst,
        pairs,
    };
    Ok(AdapterFiles {
        source,
        base: config.base_model,
        base_hash: None,
    })
}

/// The configuration of an adapter that PEFT saved.
pub(crate) fn config(folder: &Path) -> Result<AdapterConfig> {
    let path = folder.join(CONFIG);
    let file = LocalFile::open(&path)?;
    AdapterConfig::parse(&file.prefix(MAX_CONFIG_BYTES + 1))
        .with_context(|| path.display().to_string())
}

/// The adapter in an engine bundle, which may hold its base model too.
fn open_bundle(folder: &Path) -> Result<AdapterFiles> {
    let path = folder.join(LORA_FILE);
    let what = || path.display().to_string();
    let file = LocalFile::open(&path)?;
    let parsed = LoraFile::parse(&file.prefix(u64::MAX), file.len()).with_context(what)?;
    let matrix = |pair: &bundle::LoraPair, stored: &StoredMatrix, name: &str| -> Result<_> {
        Ok(LoraMatrix {
            name: format!("layers.{}.{}.{name}", pair.layer, pair.target.module()),
            shape: vec![stored.rows as usize, stored.cols as usize],
            dtype: stored.dtype,
            bytes: file.slice(stored.offset, stored.size)?,
        })
    };
    let pairs = parsed.pairs.iter().map(|pair| {
        Ok(LoraPair {
            layer: pair.layer as usize,
            module: match pair.target {
                LoraTarget::K => Module::K,
                LoraTarget::V => Module::V,
                LoraTarget::Q => Module::Q,
                LoraTarget::O => Module::O,
                LoraTarget::Gate => Module::Gate,
                LoraTarget::Up => Module::Up,
                LoraTarget::Down => Module::Down,
            },
            scaling: parsed.scale as f32,
            a: matrix(pair, &pair.a, "lora_A")?,
            b: matrix(pair, &pair.b, "lora_B")?,
        })
    });
    let source = AdapterSource {
        name: folder.display().to_string(),
        orientation: Orientation::RankFirst,
        pairs: pairs.collect::<Result<_>>()?,
    };
    let metadata = read_metadata(&Folder::Local(folder.to_owned()))?;
    let metadata = metadata.filter(|metadata| metadata.kind == BundleKind::LoraAdapter);
    let given = |text: &String| !text.is_empty();
    Ok(AdapterFiles {
        source,
        base: metadata
            .as_ref()
            .map(|m| m.source_model.clone())
            .filter(given),
        base_hash: metadata.map(|m| m.base_model_config_hash).filter(given),
    })
}

/// The adapter in an RDRR package.
fn open_package(name: &str) -> Result<AdapterFiles> {
    let files = ModelFiles::open(name)?;
    let Header::Package(header) = files.header() else {
        bail!(
            "{name}: expected the package of an adapter, found another model beside {MANIFEST_FILE}"
        );
    };
    let manifest = header.package.manifest();
    let Some(config) = manifest.lora_config.as_ref().filter(|_| manifest.is_lora()) else {
        bail!("{name}: expected an adapter, with `loraConfig` in {MANIFEST_FILE}, found none");
    };
    files.verify()?;
    let found = files.tensors().iter().map(|entry| {
        let Some(tensor) = lora::parse_name(&entry.name) else {
            bail!(
                "tensor `{}`: expected a name such as layers.0.q_proj.lora_a, found another",
                entry.name
            );
        };
        let bytes = files.bytes_of(&TensorRequest {
            name: entry.name.clone(),
            renamed_from: None,
            file: entry.file,
            offset: entry.offset,
            len: entry.len,
        })?;
        Ok(Found {
            path: format!("layers.{}.{}", tensor.layer, tensor.module),
            layer: tensor.layer as usize,
            module: tensor.module,
            factor: tensor.matrix,
            matrix: LoraMatrix {
                name: entry.name.clone(),
                shape: entry.shape.clone(),
                dtype: entry.dtype,
                bytes,
            },
        })
    });
    let found = found
        .collect::<Result<_>>()
        .with_context(|| name.to_owned())?;
    let rank = config.rank as f64;
    let scaling = match config.rank_stabilized {
        true => config.alpha / rank.sqrt(),
        false => config.alpha / rank,
    };
    let pairs = pair_up(found, |_| (config.rank as usize, scaling));
    let source = AdapterSource {
        name: name.to_owned(),
        orientation: Orientation::RankLast,
        pairs: pairs.with_context(|| name.to_owned())?,
    };
    Ok(AdapterFiles {
        source,
        base: manifest.base_model.clone(),
        base_hash: None,
    })
}

/// A tensor of an adapter, whatever the format.
struct Found {
    /// What its two matrices are both called.
    path: String,
    layer: usize,
    /// Name of the linear layer.
    module: String,
    factor: LoraFactor,
    matrix: LoraMatrix,
}

/// The tensors of a file that PEFT wrote.
fn tensors(file: &LocalFile) -> Result<Vec<Found>> {
    let header = SafeTensors::parse(&file.prefix(u64::MAX), file.len())?;
    let found = header.tensors().iter().map(|entry| {
        let AdapterTensor {
            path,
            layer,
            module,
            matrix: factor,
        } = AdapterTensor::parse(&entry.name)?;
        let matrix = LoraMatrix {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            dtype: entry.dtype,
            bytes: file.slice(entry.offset, entry.len)?,
        };
        Ok(Found {
            path,
            layer,
            module,
            factor,
            matrix,
        })
    });
    found.collect()
}

/// The two matrices of a module, as far as they have been found.
struct Halves {
    layer: usize,
    module: Module,
    a: Option<LoraMatrix>,
    b: Option<LoraMatrix>,
}

/// Puts tensors together by twos. Rank and scaling of a module are what `strength` says.
fn pair_up(found: Vec<Found>, strength: impl Fn(&str) -> (usize, f64)) -> Result<Vec<LoraPair>> {
    let mut modules: BTreeMap<String, Halves> = BTreeMap::new();
    for tensor in found {
        let Some(module) = Module::from_name(&tensor.module) else {
            let known: Vec<_> = Module::ALL.iter().map(|module| module.name()).collect();
            bail!(
                "tensor `{}`: expected a module among {}, found `{}`",
                tensor.matrix.name,
                known.join(", "),
                tensor.module
            );
        };
        let halves = modules.entry(tensor.path).or_insert(Halves {
            layer: tensor.layer,
            module,
            a: None,
            b: None,
        });
        let half = match tensor.factor {
            LoraFactor::A => &mut halves.a,
            LoraFactor::B => &mut halves.b,
        };
        match half {
            None => *half = Some(tensor.matrix),
            Some(other) => bail!(
                "tensor `{}`: expected one such matrix of its module, found `{}` too",
                tensor.matrix.name,
                other.name
            ),
        }
    }
    let pairs = modules.into_iter().map(|(path, halves)| {
        let Halves { layer, module, a, b } = halves;
        let (a, b) = match (a, b) {
            (Some(a), Some(b)) => (a, b),
            (Some(one), None) | (None, Some(one)) => bail!(
                "module `{path}`: expected both matrices, lora_A and lora_B, found only `{}`",
                one.name
            ),
            (None, None) => unreachable!("a module is entered with one of its matrices"),
        };
        let (rank, scaling) = strength(&path);
        if !a.shape.contains(&rank) {
            bail!(
                "tensor `{}`: expected rank {rank} by the adapter's configuration, found shape {:?}",
                a.name,
                a.shape
            );
        }
        Ok(LoraPair {
            layer,
            module,
            scaling: scaling as f32,
            a,
            b,
        })
    });
    pairs.collect()
}
