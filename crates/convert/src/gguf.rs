//! From a model in any form to one GGUF file.
//!
//! A header contains the offsets of tensors, and a tensor's type is known only once its values are. But the
//! length of a header doesn't depend on types: the tensors are written after the space reserved for it, one
//! after another, and it is written last.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::native::LocalModel;
use sterna::{Context, Header, Result, bail};
use sterna_engine::export::{Exported, Exporter, GgufHead};
use sterna_engine::plan::PlanOptions;
use sterna_format::gguf::{Metadata, Value, Writer};
use sterna_format::{DType, FileLayout};
use sterna_kernels::Exec;

use crate::event::{self, Event, Notify, Step, Warning};
use crate::package::{warn_of_inexact, warn_of_types};
use crate::staging::Staging;
use crate::types::{Encoding, Targets, most_used};

/// Alignment of tensors.
const ALIGNMENT: u32 = 32;
/// The version of the block types, for readers that check it.
const QUANTIZATION_VERSION: u32 = 2;

/// Options for a GGUF file.
#[derive(Debug, Clone)]
pub struct GgufOptions {
    /// How the source is read.
    pub plan: PlanOptions,
    /// Types of the tensors.
    pub targets: Targets,
    /// Name of the model; by default that of the source.
    pub name: Option<String>,
    /// Threads that verify the source, if it is a package.
    pub n_verify_threads: usize,
}

impl Default for GgufOptions {
    /// Default names and types.
    fn default() -> GgufOptions {
        GgufOptions {
            plan: PlanOptions::default(),
            targets: Targets::KEEP,
            name: None,
            n_verify_threads: 1,
        }
    }
}

/// A summary of a conversion to a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GgufSummary {
    /// The file.
    pub file: PathBuf,
    /// Its architecture.
    pub architecture: String,
    /// Tensors in it.
    pub n_tensors: usize,
    /// Bytes of it.
    pub size: u64,
}

/// Writes the model in `files` to the GGUF file `out`, which must not exist.
///
/// The same model and options give the same bytes, on any number of threads.
/// Errors: a model that can't be read or run here, a package whose hashes don't match, a model that GGUF
/// can't describe, or a file that can't be written.
pub fn to_gguf(
    files: &LocalModel,
    out: &Path,
    options: &GgufOptions,
    exec: Arc<Exec>,
    notify: &Notify<'_>,
) -> Result<GgufSummary> {
    // Wrong bytes must not become a file that looks valid.
    event::verify(files, options.n_verify_threads, notify)?;
    let plan = files.plan(&options.plan)?;
    let n_bytes = plan.weight_bytes();
    let head = plan.to_gguf().with_context(|| files.name().to_owned())?;
    let architecture = head.metadata.architecture()?.unwrap_or_default().to_owned();
    let metadata = metadata(files, options, &head, notify)?;
    let mut exporter = Exporter::for_gguf(plan, exec.clone());
    let shapes = (head.tensors.iter())
        .map(|tensor| (tensor.name.as_str(), tensor.shape.clone()))
        .chain(exporter.tensors());
    let room = layout(
        &metadata,
        DType::F32,
        shapes.map(|(name, shape)| (name, DType::F32, shape)),
    )?;

    let tied = exporter.is_tied();
    options.targets.warn_if_tied(tied, notify);
    let staging = Staging::begin(out)?;
    let mut file = DataSection::create(&staging.path, room.header.len() as u64)?;
    let mut remarks = Vec::new();
    let mut put = |tensor: &Exported| -> Result<()> {
        let encoding = Encoding::of(tensor, &options.targets, tied)?;
        file.tensor(tensor, &encoding, &exec)?;
        remarks.extend(encoding.remark);
        Ok(())
    };
    for tensor in &head.tensors {
        put(tensor)?;
    }
    export(files, &mut exporter, n_bytes, notify, |exported| {
        put(&exported)
    })?;
    warn_of_types(remarks, notify);
    warn_of_inexact(
        files,
        head.remarks.iter().chain(exporter.warnings()),
        notify,
    );
    if let Some(what) = not_for_llama_cpp(&architecture, &file.written) {
        let model = files.name().to_owned();
        notify(Event::Warning(Warning::NotForLlamaCpp { model, what }));
    }
    let (n_tensors, size) = file.finish(&metadata)?;
    staging.finish(out)?;
    files.settle()?;
    Ok(GgufSummary {
        file: out.to_owned(),
        architecture,
        n_tensors,
        size,
    })
}

/// Feeds `exporter` with everything it needs from `files`, which is `n_bytes`, and passes each tensor to
/// `take`.
fn export(
    files: &LocalModel,
    exporter: &mut Exporter,
    n_bytes: u64,
    notify: &Notify<'_>,
    mut take: impl FnMut(Exported) -> Result<()>,
) -> Result<()> {
    notify(Event::Started {
        step: Step::Converting,
        n_bytes,
    });
    while let Some(want) = exporter.wanted() {
        let (bytes, len) = (files.bytes_of(want)?, want.len);
        let exported = exporter
            .feed(bytes)
            .with_context(|| files.name().to_owned())?;
        if let Some(exported) = exported {
            take(exported)?;
        }
        notify(Event::Advanced { n_bytes: len });
    }
    Ok(())
}

/// The metadata of the file, without its type.
fn metadata(
    files: &LocalModel,
    options: &GgufOptions,
    head: &GgufHead,
    notify: &Notify<'_>,
) -> Result<Metadata> {
    let mut metadata = Metadata::new();
    let mut own = head.metadata.iter();
    let name = options.name.clone();
    let set = [
        ("general.type", Value::String("model".to_owned())),
        ("general.alignment", Value::U32(ALIGNMENT)),
        (
            "general.quantization_version",
            Value::U32(QUANTIZATION_VERSION),
        ),
    ];
    // The architecture comes first, as required by the specification.
    if let Some((key, value)) = own.next() {
        metadata.insert(key, value.clone())?;
    }
    for (key, value) in set {
        metadata.insert(key, value)?;
    }
    if let Some(name) = name {
        metadata.insert(NAME, Value::String(name))?;
    }
    // A GGUF file's statement of its origin.
    if let Header::Gguf {
        metadata: source, ..
    } = files.header()
    {
        for (key, value) in source.iter() {
            let is_general = key.starts_with("general.") && key != FILE_TYPE;
            if is_general && metadata.get(key).is_none() {
                metadata.insert(key, value.clone())?;
            }
        }
    }
    let pooling = event::pooling(files, notify);
    if let (Some(pooling), Some(architecture)) = (pooling, head.metadata.architecture()?) {
        let (key, kind) = pooling.to_gguf(architecture);
        metadata.insert(key, Value::U32(kind))?;
    }
    if metadata.get(NAME).is_none() {
        metadata.insert(NAME, Value::String(files.stem().to_owned()))?;
    }
    for (key, value) in own {
        metadata.insert(key, value.clone())?;
    }
    put_text(files, &mut metadata, notify)?;
    Ok(metadata)
}

const NAME: &str = "general.name";
const FILE_TYPE: &str = "general.file_type";

/// Tokenizer and template. Those of a GGUF file are kept unchanged.
fn put_text(files: &LocalModel, metadata: &mut Metadata, notify: &Notify<'_>) -> Result<()> {
    const KIND: &str = "tokenizer.ggml.model";
    if let Some(source) = files.gguf_text() {
        let text = source
            .iter()
            .filter(|(key, _)| key.starts_with("tokenizer."));
        for (key, value) in text {
            metadata.insert(key, value.clone())?;
        }
    } else if let Some(tokenizer) = files.tokenizer()? {
        let architecture = metadata.architecture()?.unwrap_or_default().to_owned();
        let n_vocab = metadata.require_u64(&format!("{architecture}.vocab_size"))?;
        let written = tokenizer
            .to_gguf(&architecture, n_vocab as usize)
            .with_context(|| files.name().to_owned())?;
        for (key, value) in written.entries {
            metadata.insert(key, value)?;
        }
        for what in written.remarks {
            notify(Event::Warning(Warning::Tokenizer {
                model: files.name().to_owned(),
                what,
            }));
        }
        if let Some(template) = files.template_source()? {
            metadata.insert("tokenizer.chat_template", Value::String(template))?;
        }
    }
    if metadata.get(KIND).is_none() {
        metadata.insert(KIND, Value::String("none".to_owned()))?;
    }
    Ok(())
}

/// Why llama.cpp can't load a file of this architecture with these tensors, if it can't.
fn not_for_llama_cpp(
    architecture: &str,
    tensors: &[(String, DType, Vec<usize>)],
) -> Option<String> {
    // Its `bitnet` has SiLU.
    if architecture == "bitnet-b1.58" {
        let what = "it doesn't know the architecture bitnet-b1.58, which is BitNet with ReLU²";
        return Some(what.to_owned());
    }
    let (name, ..) = tensors.iter().find(|(_, dtype, _)| *dtype == DType::I2_S)?;
    Some(format!(
        "`{name}` is I2_S, a type of the BitNet fork; --quantize f32 has the same values in a type that it loads"
    ))
}

/// Header and offsets of a file with these tensors, most of whose bytes are of type `most`.
fn layout<'a>(
    metadata: &Metadata,
    most: DType,
    tensors: impl Iterator<Item = (&'a str, DType, Vec<usize>)>,
) -> Result<FileLayout> {
    let mut metadata = metadata.clone();
    metadata.insert(FILE_TYPE, Value::U32(file_type(most)))?;
    let mut writer = Writer::new(metadata)?;
    for (name, dtype, shape) in tensors {
        writer.tensor(name, dtype, &shape)?;
    }
    Ok(writer.finish())
}

/// llama.cpp's number for files whose weights are mostly of this type.
fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        DType::Q2_K => 10,
        DType::Q3_K => 12,
        DType::Q4_K => 15,
        DType::Q5_K => 17,
        DType::Q6_K => 18,
        DType::BF16 => 32,
        DType::TQ1_0 => 36,
        DType::TQ2_0 => 37,
        DType::MXFP4 => 38,
        // In the fork that has the type.
        DType::I2_S => 40,
        // Unspecified.
        _ => 1024,
    }
}

/// The tensors of a file, written one after another.
struct DataSection {
    path: PathBuf,
    file: File,
    /// Bytes before the section.
    header_bytes: u64,
    /// Bytes of the section so far.
    len: u64,
    written: Vec<(String, DType, Vec<usize>)>,
}

impl DataSection {
    fn create(path: &Path, header_bytes: u64) -> Result<DataSection> {
        let what = || format!("{}: cannot write", path.display());
        let mut file = File::create(path).with_context(what)?;
        file.seek(SeekFrom::Start(header_bytes))
            .with_context(what)?;
        Ok(DataSection {
            path: path.to_owned(),
            file,
            header_bytes,
            len: 0,
            written: Vec::new(),
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let what = || format!("{}: cannot write", self.path.display());
        self.file.write_all(bytes).with_context(what)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn tensor(&mut self, tensor: &Exported, encoding: &Encoding<'_>, exec: &Exec) -> Result<()> {
        encoding.write(exec, |bytes| self.write(&bytes))?;
        let padding = self.len.next_multiple_of(u64::from(ALIGNMENT)) - self.len;
        self.write(&[0; ALIGNMENT as usize][..padding as usize])?;
        let entry = (tensor.name.clone(), encoding.dtype, tensor.shape.clone());
        self.written.push(entry);
        Ok(())
    }

    /// Writes the header. Returns the number of tensors and the size of the file.
    fn finish(mut self, metadata: &Metadata) -> Result<(usize, u64)> {
        let in_layers = (self.written.iter())
            .filter(|(name, _, _)| name.starts_with("blk."))
            .map(|(_, dtype, shape)| (*dtype, &shape[..]));
        let most = most_used(in_layers).unwrap_or(DType::F32);
        let tensors = self.written.iter();
        let tensors = tensors.map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.clone()));
        let layout = layout(metadata, most, tensors)?;
        let size = self.header_bytes + self.len;
        if layout.header.len() as u64 != self.header_bytes || layout.file_len != size {
            bail!(
                InvalidFile,
                "{}: expected {} bytes behind a header of {}, wrote {} behind {}",
                self.path.display(),
                layout.file_len - layout.header.len() as u64,
                layout.header.len(),
                self.len,
                self.header_bytes
            );
        }
        let mut write = || -> std::io::Result<()> {
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&layout.header)?;
            self.file.sync_all()
        };
        write().with_context(|| format!("{}: cannot write", self.path.display()))?;
        Ok((self.written.len(), size))
    }
}
