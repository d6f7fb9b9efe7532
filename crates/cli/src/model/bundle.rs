//! Engine bundles as models: `qmodel.tensors`, `rope.cache`, and what stands beside them.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_engine::ModelConfig;
use sterna_format::TensorCatalog;
use sterna_format::bundle::{
    BundleKind, BundleMetadata, METADATA_FILE, METADATA_VERSION, ModelFacts, ROPE_FILE, RopeFile,
    TENSORS_FILE, TensorFile, identity,
};
use sterna_format::hf::Config;

use super::assemble;
use super::source::Folder;
use super::{Header, ModelFiles};

/// A bundle and the folder it is in.
#[derive(Debug)]
pub(crate) struct BundleHeader {
    pub(super) folder: Folder,
    /// What the weight file says about the model.
    pub(crate) model: ModelFacts,
    rope: RopeFile,
}

/// The newest version of the metadata that is taken.
const NEWEST_VERSION: u64 = METADATA_VERSION + 1;

impl ModelFiles {
    /// Opens the bundle in `folder`.
    pub(super) fn open_bundle(name: &str, folder: Folder) -> Result<ModelFiles> {
        if let Some(metadata) = read_metadata(&folder)?
            && metadata.kind != BundleKind::Model
        {
            bail!(
                "{name}: expected a model, found an adapter; apply it to its base model (--lora)"
            );
        }
        let file = folder.shard(TENSORS_FILE)?;
        let parsed = TensorFile::parse(&file.bytes()?, file.len());
        let parsed = parsed.with_context(|| file.to_string())?;
        let rope = folder.file(ROPE_FILE)?;
        let rope = rope
            .with_context(|| format!("{name}: expected {ROPE_FILE} in the folder, found none"))?;
        // A page more than any that are written, for the parser to say what is wrong.
        let bytes = rope.prefix(MAX_ROPE_BYTES)?;
        let rope = RopeFile::parse(&bytes).with_context(|| rope.to_string())?;
        let n_layers = match folder.file("config.json")? {
            Some(config) => {
                Config::parse(&config.bytes()?)
                    .with_context(|| config.to_string())?
                    .num_hidden_layers
            }
            None => None,
        };
        let stored = parsed.catalog(n_layers).with_context(|| file.to_string())?;
        let files = vec![file];
        let mut tensors = TensorCatalog::default();
        let mut assembled = Vec::new();
        for entry in stored.iter() {
            let (entry, made) =
                assemble::place_padded(entry.clone(), files.len() + assembled.len());
            assembled.extend(made);
            let added = tensors.insert(entry);
            added.expect("names in a catalog are unique");
        }
        let header = BundleHeader {
            folder,
            model: parsed.model,
            rope,
        };
        Ok(ModelFiles {
            name: name.to_owned(),
            files,
            assembled,
            tensors,
            header: Header::Bundle(Box::new(header)),
            told: None,
        })
    }
}

/// The longest `rope.cache` there is, and a byte.
const MAX_ROPE_BYTES: u64 = (1 << 20) + 4096;

/// What a bundle says about itself, if it does.
pub(super) fn read_metadata(folder: &Folder) -> Result<Option<BundleMetadata>> {
    let Some(file) = folder.file(METADATA_FILE)? else {
        return Ok(None);
    };
    let metadata: BundleMetadata =
        serde_json::from_slice(&file.bytes()?).with_context(|| file.to_string())?;
    let version = metadata.format_version;
    if !(METADATA_VERSION..=NEWEST_VERSION).contains(&version) {
        bail!(
            "{file}: format_version: expected {METADATA_VERSION} or {NEWEST_VERSION}, found {version}"
        );
    }
    Ok(Some(metadata))
}

/// SHA-256 of what a configuration says about the shape of its model, in hexadecimal: what tells whether an
/// adapter in a bundle fits.
pub(crate) fn identity_hash(config: &Value) -> Result<String> {
    let identity = identity(config).context("config.json: expected an object")?;
    Ok(digest_of(Algorithm::Sha256, identity.as_bytes()).to_string())
}

impl BundleHeader {
    /// What `told`, a Hugging Face configuration, and the bundle's own files amount to. Widths in it may
    /// be rounded up as engines compute with them.
    ///
    /// Fails if the files say otherwise.
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

    /// Whether `config`, made of the bundle's own `config.json`, says what its other files say.
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
                bail!("config.json: {what}: expected {stored} by {file}, found {found}");
            }
        }
        let (stored, found) = (self.rope.rope_theta, config.ropes[0].base);
        if stored != found {
            bail!("config.json: rope_theta: expected {stored} by {ROPE_FILE}, found {found}");
        }
        let (stored, found) = (self.rope.rope_dim, config.ropes[0].dim);
        if stored != found {
            bail!(
                "config.json: rotated elements of a head: expected {stored} by {ROPE_FILE}, found {found}"
            );
        }
        Ok(())
    }

    /// Whether `config` is about the model in the files.
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
                bail!("{key}: expected {padded} by {TENSORS_FILE}, found {given}");
            }
        }
        let tied = config.get("tie_word_embeddings").and_then(Value::as_bool);
        if let Some(tied) = tied
            && tied != tied_embeddings
        {
            bail!(
                "tie_word_embeddings: expected {tied_embeddings} by {TENSORS_FILE}, found {tied}"
            );
        }
        let head_dim = config.get("head_dim").and_then(Value::as_u64);
        if let Some(head_dim) = head_dim
            && head_dim != self.rope.head_dim as u64
        {
            bail!(
                "head_dim: expected {} by {ROPE_FILE}, found {head_dim}",
                self.rope.head_dim
            );
        }
        Ok(())
    }
}
