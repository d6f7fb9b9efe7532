//! The files of a manifest, and what they and their neighbours say about scales.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use sterna::native::{LocalFolder, read_small};
use sterna::{Context, Result, bail};
use sterna_delivery::LocalFile;
use sterna_engine::plan::TernaryRules;
use sterna_format::DType;
use sterna_format::bundle::ShardRange;
use sterna_format::hf;
use sterna_format::safetensors::SafeTensors;
use sterna_kernels::quant::decode_row;

use crate::event::{Event, Notify, Warning};

/// The files of a manifest, mapped.
pub(super) struct Shards {
    files: Vec<LocalFile>,
    /// The headers of those whose types of scales were needed; `None` for what isn't safetensors.
    headers: HashMap<u16, Option<SafeTensors>>,
    /// The configurations next to them, by folder; `None` where there is none.
    rules: HashMap<PathBuf, Option<TernaryRules>>,
}

impl Shards {
    /// Opens the files at `paths` as they are given.
    pub(super) fn open(paths: &[String]) -> Result<Shards> {
        let files = paths.iter().enumerate().map(|(i, path)| {
            let file = LocalFile::open(path);
            file.with_context(|| format!("shard {i} of the manifest"))
        });
        Ok(Shards {
            files: files.collect::<Result<_>>()?,
            headers: HashMap::new(),
            rules: HashMap::new(),
        })
    }

    /// The bytes of `range`; an error if they are not in the file.
    pub(super) fn bytes(&self, range: &ShardRange) -> Result<Bytes> {
        let file = &self.files[usize::from(range.shard)];
        Ok(file.slice(range.offset, range.size)?)
    }

    /// The scale of trits whose stored scale is at `scale`, in a model whose weights are in shard `weights`.
    ///
    /// A scale of four bytes is F32, one of two is of the type that the file says, or BF16. Whether it
    /// multiplies or divides is determined by the configuration next to the weights; without one, a scale
    /// above 1 divides, because no weight is that large.
    pub(super) fn scale(
        &mut self,
        scale: &ShardRange,
        weights: u16,
        notify: &Notify<'_>,
    ) -> Result<f32> {
        let bytes = self.bytes(scale)?;
        let dtype = match bytes.len() {
            4 => DType::F32,
            _ => self.float_of_two_bytes(scale),
        };
        let mut value = [0.0];
        decode_row(dtype, &bytes, &mut value)?;
        let [value] = value;
        let divides = match self.rules(weights, notify) {
            Some(rules) => rules.scales_divide,
            None => value > 1.0,
        };
        let worth = if divides { 1.0 / value } else { value };
        if !(worth.is_finite() && worth > 0.0) {
            bail!(
                InvalidFile,
                "scale: expected a number above 0, found {value}"
            );
        }
        Ok(worth)
    }

    /// What the configuration next to shard `index` says about ternary weights.
    pub(super) fn rules(&mut self, index: u16, notify: &Notify<'_>) -> Option<TernaryRules> {
        let path = self.files[usize::from(index)].path();
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let read = |folder: &PathBuf| {
            rules_in(folder).unwrap_or_else(|error| {
                // Models of unsupported families can be quantized all the same.
                notify(Event::Warning(Warning::UnknownConfig {
                    reason: format!("{error:#}"),
                }));
                None
            })
        };
        *self.rules.entry(folder).or_insert_with_key(read)
    }

    /// The type of the tensor at `range` in the header of its file.
    fn float_of_two_bytes(&mut self, range: &ShardRange) -> DType {
        let file = &self.files[usize::from(range.shard)];
        let header = self.headers.entry(range.shard).or_insert_with(|| {
            // All bytes are available, so more can't be needed.
            SafeTensors::parse(&file.prefix(u64::MAX), file.len()).ok()
        });
        let tensors = header.iter().flat_map(SafeTensors::tensors);
        let at = tensors
            .filter(|tensor| tensor.offset == range.offset && tensor.dtype == DType::F16)
            .count();
        if at > 0 { DType::F16 } else { DType::BF16 }
    }
}

/// What `config.json` in `folder` says; `None` if there is no such file.
fn rules_in(folder: &Path) -> Result<Option<TernaryRules>> {
    const NAME: &str = "config.json";
    let Some(json) = read_small(&LocalFolder::new(folder), NAME)? else {
        return Ok(None);
    };
    let name = || folder.join(NAME).display().to_string();
    let config = hf::Config::parse(&json).with_context(name)?;
    TernaryRules::of(&config).with_context(name).map(Some)
}
