//! GGUF files as models.

use sterna_format::gguf::{self, Gguf, GgufError};

use super::{Companions, Header, ModelFiles, OpenOptions, WeightFile};
use crate::error::{Context, Result, bail};
use crate::want::Files;

/// Opens the file called `name`, and the rest of the split set that it begins.
pub(super) async fn open(name: &str, options: OpenOptions, files: &Files) -> Result<ModelFiles> {
    // Errors about a later part use the name that the user gave.
    gguf::split_names(&options.label(name))?;
    let names = gguf::split_names(name)?.unwrap_or_else(|| vec![name.to_owned()]);
    let (mut parts, mut opened) = (Vec::new(), Vec::new());
    for name in names {
        let label = options.label(&name);
        let Some(len) = files.len(&name).await else {
            bail!(NotFound, "{label}: cannot open: no such file");
        };
        parts.push(header(&name, len, files).await.with_context(|| &*label)?);
        opened.push(WeightFile { name, label, len });
    }
    let version = parts.first().map_or(0, Gguf::version);
    let model = gguf::Model::from_parts(parts).with_context(|| options.name.clone())?;
    let (metadata, tensors) = model.into_parts();
    Ok(ModelFiles {
        options,
        files: opened,
        assembled: Vec::new(),
        tensors,
        companions: Companions::default(),
        header: Header::Gguf { version, metadata },
    })
}

async fn header(name: &str, len: u64, files: &Files) -> Result<Gguf, GgufError> {
    let needs_more = |error: &GgufError| match error {
        GgufError::NeedMore { at_least } => Some(*at_least),
        _ => None,
    };
    files.header(name, len, Gguf::parse, needs_more).await
}
