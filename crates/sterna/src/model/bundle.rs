//! Engine bundles as models: `qmodel.tensors`, `rope.cache`, and the other files of their folder.

use bytes::Bytes;
use serde_json::{Map, Value, json};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_engine::ModelConfig;
use sterna_format::TensorCatalog;
use sterna_format::bundle::{
    BundleError, BundleKind, BundleMetadata, METADATA_FILE, METADATA_VERSION, ModelFacts,
    ROPE_FILE, RopeFile, TENSORS_FILE, TensorFile, identity,
};
use sterna_format::hf::Config;

use super::companions::{self, Companions, read_one};
use super::{Header, ModelFiles, OpenOptions, WeightFile, assemble};
use crate::error::{Context, Result, bail};
use crate::want::Files;

/// An engine bundle, as described by its files.
#[derive(Debug)]
pub struct BundleHeader {
    /// What the weight file says about the model.
    pub model: ModelFacts,
    rope: RopeFile,
}

/// The newest supported version of the metadata.
const NEWEST_VERSION: u64 = METADATA_VERSION + 1;

/// One byte more than the longest `rope.cache`.
const MAX_ROPE_BYTES: u64 = (1 << 20) + 4096;

/// Opens the bundle in a folder.
pub(super) async fn open(options: OpenOptions, files: &Files) -> Result<ModelFiles> {
    let name = &options.name;
    if let Some(metadata) = read_metadata(&options, files).await?
        && metadata.kind != BundleKind::Model
    {
        bail!(
            InvalidRequest,
            "{name}: expected a model, found an adapter; apply it to its base model (--lora)"
        );
    }
    let label = options.label(TENSORS_FILE);
    let Some(len) = files.len(TENSORS_FILE).await else {
        bail!(NotFound, "{label}: cannot open: no such file");
    };
    let parsed = (files
        .header(TENSORS_FILE, len, TensorFile::parse, needs_more)
        .await)
        .with_context(|| &*label)?;
    let rope = options.label(ROPE_FILE);
    let Some(rope_len) = files.len(ROPE_FILE).await else {
        bail!(
            NotFound,
            "{name}: expected {ROPE_FILE} in the folder, found none"
        );
    };
    // A page more than any writer writes, so that the parser can report what is wrong.
    let bytes = match rope_len.min(MAX_ROPE_BYTES) {
        0 => Bytes::new(),
        len => files.bytes(ROPE_FILE, 0..len).await,
    };
    let rope = RopeFile::parse(&bytes).with_context(|| rope)?;
    let companions = Companions::read(companions::NAMES, &options, files).await;
    let n_layers = match companions.get("config.json")? {
        Some(config) => {
            Config::parse(&config)
                .with_context(|| options.label("config.json"))?
                .num_hidden_layers
        }
        None => None,
    };
    let stored = parsed.catalog(n_layers).with_context(|| &*label)?;
    let opened = vec![WeightFile {
        name: TENSORS_FILE.to_owned(),
        label,
        len,
    }];
    let mut tensors = TensorCatalog::default();
    let mut assembled = Vec::new();
    for entry in stored.iter() {
        let (entry, made) = assemble::place_padded(entry.clone(), opened.len() + assembled.len());
        assembled.extend(made);
        let added = tensors.insert(entry);
        added.expect("names in a catalog are unique");
    }
    let header = BundleHeader {
        model: parsed.model,
        rope,
    };
    Ok(ModelFiles {
        options,
        files: opened,
        assembled,
        tensors,
        companions,
        header: Header::Bundle(Box::new(header)),
    })
}

/// How many more bytes the header of a bundle's file needs.
pub(super) fn needs_more(error: &BundleError) -> Option<u64> {
    match error {
        BundleError::NeedMore { at_least } => Some(*at_least),
        _ => None,
    }
}

/// A bundle's own description, if it has one.
pub(super) async fn read_metadata(
    options: &OpenOptions,
    files: &Files,
) -> Result<Option<BundleMetadata>> {
    let Some(bytes) = read_one(METADATA_FILE, options, files).await? else {
        return Ok(None);
    };
    let label = || options.label(METADATA_FILE);
    let metadata: BundleMetadata = serde_json::from_slice(&bytes).with_context(label)?;
    let version = metadata.format_version;
    if !(METADATA_VERSION..=NEWEST_VERSION).contains(&version) {
        bail!(
            InvalidFile,
            "{}: format_version: expected {METADATA_VERSION} or {NEWEST_VERSION}, found {version}",
            label()
        );
    }
    Ok(Some(metadata))
}

/// SHA-256 of the part of a configuration that describes the shape of its model, in hexadecimal: determines
/// whether an adapter in a bundle fits.
///
/// Errors: it is not an object.
pub fn identity_hash(config: &Value) -> Result<String> {
    let identity = identity(config).context("config.json: expected an object")?;
    Ok(digest_of(Algorithm::Sha256, identity.as_bytes()).to_string())
}

impl BundleHeader {
    /// The configuration from `told`, a Hugging Face configuration, and the bundle's own files. Widths in it
    /// may be rounded up as engines compute with them.
    ///
    /// Fails if the files contradict it.
    pub(super) fn complete(&self, told: &Value) -> Result<Value> {
        let told = told.as_object();
        let mut config = told
            .context("expected a configuration, found no object")?
            .clone();
        self.check(&config)?;
        let model = &self.model;
        for (key, value) in [
            ("hidden_size", json!(model.hidden_dim_orig)),
            ("intermediate_size", json!(model.intermediate_dim_orig)),
            ("rms_norm_eps", json!(model.norm_eps)),
            ("tie_word_embeddings", json!(model.tied_embeddings)),
        ] {
            config.insert(key.to_owned(), value);
        }
        config.extend(self.rope.to_config());
        Ok(config.into())
    }

    /// Whether `config`, from the bundle's own `config.json`, agrees with its other files.
    pub(super) fn check_config(&self, config: &ModelConfig) -> Result<()> {
        let facts = &self.model;
        for (what, file, stored, found) in [
            (
                "hidden_size",
                TENSORS_FILE,
                facts.hidden_dim_orig as usize,
                config.model_dim,
            ),
            (
                "intermediate_size",
                TENSORS_FILE,
                facts.intermediate_dim_orig as usize,
                config.ffn_dim,
            ),
            ("head_dim", ROPE_FILE, self.rope.head_dim, config.head_dim),
        ] {
            if stored != found {
                bail!(
                    InvalidFile,
                    "config.json: {what}: expected {stored} by {file}, found {found}"
                );
            }
        }
        let (stored, found) = (self.rope.rope_theta, config.ropes[0].base);
        if stored != found {
            bail!(
                InvalidFile,
                "config.json: rope_theta: expected {stored} by {ROPE_FILE}, found {found}"
            );
        }
        let (stored, found) = (self.rope.rope_dim, config.ropes[0].dim);
        if stored != found {
            bail!(
                InvalidFile,
                "config.json: rotated elements of a head: expected {stored} by {ROPE_FILE}, found {found}"
            );
        }
        Ok(())
    }

    /// Whether `config` describes the model in the files.
    fn check(&self, config: &Map<String, Value>) -> Result<()> {
        let ModelFacts {
            hidden_dim,
            intermediate_dim,
            hidden_dim_orig,
            intermediate_dim_orig,
            tied_embeddings,
            ..
        } = self.model;
        for (key, stored) in [
            ("hidden_size", [hidden_dim, hidden_dim_orig]),
            (
                "intermediate_size",
                [intermediate_dim, intermediate_dim_orig],
            ),
        ] {
            let given = config.get(key).and_then(Value::as_u64);
            if let Some(given) = given
                && !stored.map(u64::from).contains(&given)
            {
                let [padded, _] = stored;
                bail!(
                    InvalidFile,
                    "{key}: expected {padded} by {TENSORS_FILE}, found {given}"
                );
            }
        }
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool);
        if let Some(tied) = tied
            && tied != tied_embeddings
        {
            bail!(
                InvalidFile,
                "tie_word_embeddings: expected {tied_embeddings} by {TENSORS_FILE}, found {tied}"
            );
        }
        let head_dim = config.get("head_dim").and_then(Value::as_u64);
        if let Some(head_dim) = head_dim
            && head_dim != self.rope.head_dim as u64
        {
            bail!(
                InvalidFile,
                "head_dim: expected {} by {ROPE_FILE}, found {head_dim}",
                self.rope.head_dim
            );
        }
        Ok(())
    }
}
