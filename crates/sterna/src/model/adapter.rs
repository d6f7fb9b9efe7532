//! Low-rank adapters: those that PEFT saves, RDRR packages, and those of engine bundles.

use std::collections::BTreeMap;

use bytes::Bytes;
use sterna_delivery::hash::{Algorithm, Digest, Hasher};
use sterna_engine::lora::{AdapterSource, LoraMatrix, LoraPair, Module, Orientation};
use sterna_engine::plan::TensorRequest;
use sterna_format::bundle::{
    self, BundleKind, LORA_FILE, LoraFile, LoraTarget, METADATA_FILE, StoredMatrix,
};
use sterna_format::hf::{AdapterConfig, AdapterTensor, LoraFactor};
use sterna_format::rdrr::{MANIFEST_FILE, lora};

use super::bundle::{identity_hash, needs_more, read_metadata};
use super::companions::read_one;
use super::load::{Shards, Verification};
use super::{Header, ModelFiles, OpenOptions, checkpoint, may_be_called, package};
use crate::error::{Context, Result, bail};
use crate::want::{Files, Machine};
use crate::warning::Warning;

/// The file that makes a folder an adapter as PEFT saves it.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The matrices of such an adapter.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// An adapter, and what it says about the model it was made for.
pub struct AdapterFiles {
    /// Its matrices.
    pub source: AdapterSource,
    /// What the adapter's maker called the model.
    pub base: Option<String>,
    /// Hash of what the model's configuration says about its shape ([`identity_hash`]).
    base_hash: Option<String>,
    /// What is odd about its files and was accepted.
    warnings: Vec<Warning>,
}

impl AdapterFiles {
    /// Opens the adapter in a folder, and reads its matrices: PEFT's, of a package, or of an engine bundle.
    pub fn open(
        options: OpenOptions,
        verification: Verification,
    ) -> Machine<'static, AdapterFiles> {
        Machine::new(move |files| async move {
            let has_weights = files.len(ADAPTER_WEIGHTS).await.is_some();
            if !has_weights && files.len(LORA_FILE).await.is_some() {
                return open_bundle(&options, &files).await;
            }
            if files.len(ADAPTER_CONFIG).await.is_some() {
                return open_peft(&options, &files).await;
            }
            if files.len(MANIFEST_FILE).await.is_some() {
                return open_package(options, verification, &files).await;
            }
            bail!(
                NotFound,
                "{}: expected an adapter as PEFT saves it, with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, a \
                 package with {MANIFEST_FILE} or a bundle with {LORA_FILE}, found a folder without \
                 {ADAPTER_CONFIG}",
                options.name
            )
        })
    }

    /// Says among `warnings` what is odd about the adapter, and whether it was made for a model of another name
    /// than `model`.
    ///
    /// Errors: it has the hash of another configuration.
    pub fn check_base(&self, model: &ModelFiles, warnings: &mut Vec<Warning>) -> Result<()> {
        warnings.extend(self.warnings.iter().cloned());
        if let Some(expected) = &self.base_hash
            && let Some(config) = model.config_json()?
            && *expected != identity_hash(&config)?
        {
            bail!(
                InvalidRequest,
                "{}: {METADATA_FILE} has the hash of another configuration",
                self.refusal()
            );
        }
        if let (Some(base), None) = (&self.base, &self.base_hash) {
            let names = model.names()?;
            if !may_be_called(base, &names) {
                warnings.push(Warning::OtherBase {
                    adapter: self.source.name.clone(),
                    base: base.clone(),
                    names,
                });
            }
        }
        Ok(())
    }

    /// A digest of all that changes what a model with it computes.
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::new(Algorithm::Blake3);
        let AdapterSource {
            orientation, pairs, ..
        } = &self.source;
        hasher.update(&[u8::from(*orientation == Orientation::RankFirst)]);
        for pair in pairs {
            let module = format!("{} {:?}\n", pair.layer, pair.module);
            hasher.update(module.as_bytes());
            hasher.update(&pair.scaling.to_le_bytes());
            for matrix in [&pair.a, &pair.b] {
                let form = format!("{:?} {:?}\n", matrix.shape, matrix.dtype);
                hasher.update(form.as_bytes());
                hasher.update(&matrix.bytes);
            }
        }
        hasher.finish()
    }

    /// How the refusal of a model begins that the adapter isn't for.
    pub fn refusal(&self) -> String {
        let made_for = self.base.as_ref();
        let made_for = made_for.map_or(String::new(), |base| format!("; it was made for `{base}`"));
        format!(
            "{}: not an adapter of this model{made_for}",
            self.source.name
        )
    }
}

async fn open_peft(options: &OpenOptions, files: &Files) -> Result<AdapterFiles> {
    let Some(config) = read_one(ADAPTER_CONFIG, options, files).await? else {
        bail!(
            NotFound,
            "{}: cannot open: no such file",
            options.label(ADAPTER_CONFIG)
        );
    };
    let config = AdapterConfig::parse(&config).with_context(|| options.label(ADAPTER_CONFIG))?;
    let label = options.label(ADAPTER_WEIGHTS);
    let Some(len) = files.len(ADAPTER_WEIGHTS).await else {
        if files.len("adapter_model.bin").await.is_some() {
            bail!(
                Unsupported,
                "{}: expected {ADAPTER_WEIGHTS}, found adapter_model.bin; PyTorch's own files can run code \
                 when they are read: save the adapter as safetensors (save_pretrained)",
                options.name
            );
        }
        bail!(NotFound, "{label}: cannot open: no such file");
    };
    let header = checkpoint::header(ADAPTER_WEIGHTS, len, files).await;
    let header = header.with_context(|| &*label)?;
    let mut found = Vec::new();
    for entry in header.tensors().iter() {
        let AdapterTensor {
            path,
            layer,
            module,
            matrix: factor,
        } = AdapterTensor::parse(&entry.name).with_context(|| &*label)?;
        let matrix = LoraMatrix {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            dtype: entry.dtype,
            bytes: range(files, ADAPTER_WEIGHTS, entry.offset, entry.len).await,
        };
        found.push(Found {
            path,
            layer,
            module,
            factor,
            matrix,
        });
    }
    let pairs = pair_up(found, |module| {
        (config.rank(module), config.scaling(module))
    });
    let source = AdapterSource {
        name: options.name.clone(),
        orientation: Orientation::RankFirst,
        pairs: pairs.with_context(|| &*label)?,
    };
    Ok(AdapterFiles {
        source,
        base: config.base_model,
        base_hash: None,
        warnings: Vec::new(),
    })
}

/// `len` bytes from `offset` on of a file that is known to have them.
async fn range(files: &Files, name: &str, offset: u64, len: u64) -> Bytes {
    match len {
        0 => Bytes::new(),
        len => files.bytes(name, offset..offset + len).await,
    }
}

/// The adapter in an engine bundle, which may hold its base model too.
async fn open_bundle(options: &OpenOptions, files: &Files) -> Result<AdapterFiles> {
    let label = options.label(LORA_FILE);
    let Some(len) = files.len(LORA_FILE).await else {
        bail!(NotFound, "{label}: cannot open: no such file");
    };
    let parsed = files
        .header(LORA_FILE, len, LoraFile::parse, needs_more)
        .await;
    let parsed = parsed.with_context(|| &*label)?;
    let mut pairs = Vec::new();
    for pair in &parsed.pairs {
        let module = match pair.target {
            LoraTarget::K => Module::K,
            LoraTarget::V => Module::V,
            LoraTarget::Q => Module::Q,
            LoraTarget::O => Module::O,
            LoraTarget::Gate => Module::Gate,
            LoraTarget::Up => Module::Up,
            LoraTarget::Down => Module::Down,
        };
        pairs.push(LoraPair {
            layer: pair.layer as usize,
            module,
            scaling: parsed.scale as f32,
            a: bundle_matrix(files, pair, &pair.a, "lora_A").await,
            b: bundle_matrix(files, pair, &pair.b, "lora_B").await,
        });
    }
    let source = AdapterSource {
        name: options.name.clone(),
        orientation: Orientation::RankFirst,
        pairs,
    };
    let metadata = read_metadata(options, files).await?;
    let metadata = metadata.filter(|metadata| metadata.kind == BundleKind::LoraAdapter);
    let given = |text: &String| !text.is_empty();
    Ok(AdapterFiles {
        source,
        base: metadata
            .as_ref()
            .map(|m| m.source_model.clone())
            .filter(given),
        base_hash: metadata.map(|m| m.base_model_config_hash).filter(given),
        warnings: Vec::new(),
    })
}

async fn bundle_matrix(
    files: &Files,
    pair: &bundle::LoraPair,
    stored: &StoredMatrix,
    name: &str,
) -> LoraMatrix {
    LoraMatrix {
        name: format!("layers.{}.{}.{name}", pair.layer, pair.target.module()),
        shape: vec![stored.rows as usize, stored.cols as usize],
        dtype: stored.dtype,
        bytes: range(files, LORA_FILE, stored.offset, stored.size).await,
    }
}

/// The adapter in an RDRR package.
async fn open_package(
    options: OpenOptions,
    verification: Verification,
    files: &Files,
) -> Result<AdapterFiles> {
    let name = options.name.clone();
    let model = package::open(options, files).await?;
    let Header::Package(header) = model.header() else {
        bail!(
            InvalidFile,
            "{name}: expected the package of an adapter, found another model beside {MANIFEST_FILE}"
        );
    };
    let manifest = header.package.manifest();
    let Some(config) = manifest.lora_config.as_ref().filter(|_| manifest.is_lora()) else {
        bail!(
            InvalidFile,
            "{name}: expected an adapter, with `loraConfig` in {MANIFEST_FILE}, found none"
        );
    };
    let mut shards = Shards::new(&model, files.clone(), verification);
    let mut found = Vec::new();
    for entry in model.tensors().iter() {
        let Some(tensor) = lora::parse_name(&entry.name) else {
            bail!(
                InvalidFile,
                "{name}: tensor `{}`: expected a name such as layers.0.q_proj.lora_a, found another",
                entry.name
            );
        };
        let want = TensorRequest {
            name: entry.name.clone(),
            file: entry.file,
            offset: entry.offset,
            len: entry.len,
            renamed_from: None,
        };
        found.push(Found {
            path: format!("layers.{}.{}", tensor.layer, tensor.module),
            layer: tensor.layer as usize,
            module: tensor.module,
            factor: tensor.matrix,
            matrix: LoraMatrix {
                name: entry.name.clone(),
                shape: entry.shape.clone(),
                dtype: entry.dtype,
                bytes: shards.tensor(&want).await?,
            },
        });
    }
    shards.verify_rest().await?;
    let mut warnings = shards.warnings;
    warnings.extend(model.warnings());
    let rank = config.rank as f64;
    let scaling = match config.rank_stabilized {
        true => config.alpha / rank.sqrt(),
        false => config.alpha / rank,
    };
    let pairs = pair_up(found, |_| (config.rank as usize, scaling));
    let source = AdapterSource {
        name: name.clone(),
        orientation: Orientation::RankLast,
        pairs: pairs.with_context(|| &*name)?,
    };
    Ok(AdapterFiles {
        source,
        base: manifest.base_model.clone(),
        base_hash: None,
        warnings,
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
                Unsupported,
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
                InvalidFile,
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
                InvalidFile,
                "module `{path}`: expected both matrices, lora_A and lora_B, found only `{}`",
                one.name
            ),
            (None, None) => unreachable!("a module is entered with one of its matrices"),
        };
        let (rank, scaling) = strength(&path);
        if !a.shape.contains(&rank) {
            bail!(
                InvalidFile,
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
