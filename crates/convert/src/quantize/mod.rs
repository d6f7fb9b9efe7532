//! From a quantize manifest to the files that a subprocess engine runs from.
//!
//! `docs/formats/engine-bundle.md` describes the manifest, the files, and the rules of conversion. [`shards`]
//! opens the files of a manifest, [`tensor`] decides how each tensor is converted and does it, [`adapter`]
//! checks and copies the matrices of an adapter, [`output`] publishes files only when they are complete.

mod adapter;
mod output;
mod shards;
mod tensor;

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use sterna::{Context, Result, bail};
use sterna_delivery::LocalFile;
use sterna_format::bundle::{ArchType, Manifest, ModelFacts, RopeFile, TensorFile, tensor_names};
use sterna_kernels::Exec;

pub use adapter::AdapterOutput;
use output::OutputFile;
use shards::Shards;
use tensor::Encoding;

use crate::event::{Event, Notify, Step};

/// Maximum size of a manifest: tens of thousands of tensors and an adapter of each.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// What to make, and where.
#[derive(Debug, Clone)]
pub struct QuantizeSettings {
    /// The model's description in `qmodel.tensors`.
    pub model: ModelFacts,
    /// Elements per head, if known.
    pub head_dim: Option<u32>,
    /// The file of tensors; `None` for a manifest that has only an adapter.
    pub output: Option<PathBuf>,
    /// The file of the rotary embedding, and its content.
    pub rope: Option<(PathBuf, RopeFile)>,
    /// The file of an adapter.
    pub adapter: Option<AdapterOutput>,
}

/// A summary of a quantization.
#[derive(Debug, Serialize)]
pub struct QuantizeSummary {
    /// The file of tensors.
    pub output: Option<PathBuf>,
    /// Tensors in it.
    pub n_tensors: usize,
    /// Bytes of all files.
    pub size: u64,
    /// The file of the rotary embedding.
    pub rope: Option<PathBuf>,
    /// The file of an adapter.
    pub lora: Option<PathBuf>,
    /// Projections that the adapter updates.
    pub n_lora_pairs: usize,
}

/// Carries out the manifest in the file at `path`, writing the files of `settings`. All of them appear, or
/// none.
///
/// Errors: a file that can't be read or isn't a manifest, tensors that can't be converted as requested, or
/// outputs that can't be written, or would overwrite inputs.
pub fn quantize(
    path: &Path,
    settings: &QuantizeSettings,
    exec: &Exec,
    notify: &Notify<'_>,
) -> Result<QuantizeSummary> {
    let manifest = read_manifest(path, settings.model.arch)?;
    settings.check_input(path)?;
    carry_out(&manifest, settings, exec, notify).with_context(|| path.display().to_string())
}

/// The manifest in the file at `path`, for a model of `arch`.
pub(crate) fn read_manifest(path: &Path, arch: ArchType) -> Result<Manifest> {
    let name = || path.display().to_string();
    let file = LocalFile::open(path)?;
    if file.len() > MAX_MANIFEST_BYTES {
        bail!(
            InvalidFile,
            "{}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found {}",
            name(),
            file.len()
        );
    }
    Manifest::parse(&file.slice(0, file.len())?, arch).with_context(name)
}

/// Carries out `manifest`, writing the files of `settings`.
pub(crate) fn carry_out(
    manifest: &Manifest,
    settings: &QuantizeSettings,
    exec: &Exec,
    notify: &Notify<'_>,
) -> Result<QuantizeSummary> {
    let mut shards = Shards::open(&manifest.shards)?;
    settings.check(manifest)?;
    let model = &settings.model;
    let shapes: Vec<_> = (manifest.tensors.iter())
        .map(|tensor| (tensor.rows, tensor.cols))
        .collect();
    // Where the order doesn't identify tensors, they are nameless, and that is all.
    let names = tensor_names(model.arch, model.tied_embeddings, None, &shapes).ok();
    let encodings = (manifest.tensors.iter().enumerate())
        .map(|(i, tensor)| {
            let name = names.as_ref().map(|names| names.names[i].as_str());
            Encoding::of(i, name, tensor, settings, &mut shards, notify)
        })
        .collect::<Result<Vec<_>>>()?;
    let forms: Vec<_> = encodings.iter().map(Encoding::form).collect();
    let layout = TensorFile::layout(*model, &forms)?;

    // Small outputs come first, so that their errors are reported at once.
    let mut files = Vec::new();
    if let Some((path, rope)) = &settings.rope {
        let mut file = OutputFile::create(path)?;
        file.write(&rope.to_bytes()?)?;
        files.push(file);
    }
    let mut n_lora_pairs = 0;
    if let (Some(adapter), Some(block)) = (&settings.adapter, &manifest.lora) {
        n_lora_pairs = block.pairs.len();
        files.push(adapter.write(block, settings, &shards)?);
    }
    if let Some(output) = &settings.output {
        let mut tensors = OutputFile::create(output)?;
        tensors.write(&layout.header())?;
        notify(Event::Started {
            step: Step::Quantizing,
            n_bytes: manifest.tensors.iter().map(|tensor| tensor.data.size).sum(),
        });
        for (encoding, stored) in encodings.iter().zip(&layout.tensors) {
            tensors.pad_to(stored.offset)?;
            encoding.write(exec, &shards, |bytes| tensors.write(bytes), notify)?;
            assert_eq!(
                tensors.len(),
                stored.offset + stored.size,
                "a tensor has as many bytes as its form takes"
            );
        }
        files.push(tensors);
    }
    let size = files.iter().map(OutputFile::len).sum();
    output::commit(files)?;
    Ok(QuantizeSummary {
        output: settings.output.clone(),
        n_tensors: manifest.tensors.len(),
        size,
        rope: settings.rope.as_ref().map(|(path, _)| path.clone()),
        lora: settings
            .adapter
            .as_ref()
            .map(|adapter| adapter.path.clone()),
        n_lora_pairs,
    })
}

impl QuantizeSettings {
    /// Checks that there is a file for everything, and that they are different.
    fn check(&self, manifest: &Manifest) -> Result<()> {
        match (&self.adapter, &manifest.lora) {
            (Some(_), None) => bail!(
                InvalidRequest,
                "expected a manifest with an adapter, found one without"
            ),
            (None, Some(_)) => bail!(
                InvalidRequest,
                "expected a file to write the manifest's adapter to, found none"
            ),
            _ => {}
        }
        if self.output.is_none() && !manifest.tensors.is_empty() {
            bail!(
                InvalidRequest,
                "expected a file to write the manifest's tensors to, found none"
            );
        }
        let mut places = Vec::new();
        for path in self.outputs() {
            output::check_replaceable(path)?;
            let place = output::place(path)?;
            if places.contains(&place) {
                bail!(
                    InvalidRequest,
                    "{}: expected another file for each output",
                    path.display()
                );
            }
            places.push(place);
        }
        (manifest.shards.iter()).try_for_each(|shard| self.check_input(Path::new(shard)))
    }

    /// Checks that no output overwrites the file `input`.
    fn check_input(&self, input: &Path) -> Result<()> {
        let name = || input.display().to_string();
        // By its path, and by its target, if links lead from one to the other.
        let places = [
            output::place(input)?,
            fs::canonicalize(input).with_context(name)?,
        ];
        for path in self.outputs() {
            if places.contains(&output::place(path)?) {
                bail!(
                    InvalidRequest,
                    "{}: expected another file to write than one that is read",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// The files to write.
    fn outputs(&self) -> impl Iterator<Item = &Path> {
        let rope = self.rope.iter().map(|(path, _)| path);
        let adapter = self.adapter.iter().map(|adapter| &adapter.path);
        (self.output.iter().chain(rope).chain(adapter)).map(PathBuf::as_path)
    }
}
