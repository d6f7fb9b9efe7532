//! `sterna inspect`: the contents of a model's files.

mod adapter;
mod package;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Error, Result, bail};
use clap::Args;
use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use sterna_engine::ModelPlan;
use sterna_format::gguf::{Array, Gguf, Metadata, Value};
use sterna_format::rdrr::Tensor;
use sterna_format::{TensorCatalog, TensorEntry};

use crate::args::{EngineFlags, ReportFlags};
use sterna::Header;
use sterna::native::{LocalModel, SourceFile};

use crate::device;
use crate::model;
use crate::output::{self, Bytes, Count};
use adapter::AdapterReport;
use package::PackageReport;

const EXAMPLE: &str = "Example:
  sterna inspect model.gguf
  sterna inspect builtin --json";

/// Show what a model's files contain
///
/// Reads headers only. Works for files of any architecture, and for files without weights; of a GGUF file that is
/// cut off it shows what the header says, and fails.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Inspect {
    /// GGUF file, safetensors file, folder, package, adapter, or `builtin`
    #[arg(value_name = "PATH")]
    model: String,

    /// List every tensor; JSON always does
    #[arg(long)]
    tensors: bool,

    #[command(flatten)]
    flags: ReportFlags,
}

#[derive(Debug, Serialize)]
struct Report {
    path: String,
    format: String,
    architecture: Option<String>,
    files: Vec<FileReport>,
    bytes: u64,
    n_tensors: usize,
    /// Number of values in the tensors, packed ones unpacked.
    n_parameters: u64,
    types: BTreeMap<String, TypeReport>,
    /// The engine's configuration; `None` if it can't run the model.
    model: Option<ModelReport>,
    /// Why the engine can't run the model.
    not_runnable: Option<String>,
    /// What else a package contains.
    #[serde(skip_serializing_if = "Option::is_none")]
    package: Option<PackageReport>,
    metadata: Map<String, Json>,
    tensors: Vec<TensorReport>,
}

#[derive(Debug, Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
}

#[derive(Debug, Default, Serialize)]
struct TypeReport {
    n_tensors: usize,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    family: String,
    n_layers: usize,
    model_dim: usize,
    ffn_dim: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    n_vocab: usize,
    max_ctx: usize,
    memory: MemoryReport,
    /// Whether any layer has attention, and with it heads.
    #[serde(skip)]
    attends: bool,
}

#[derive(Debug, Serialize)]
struct MemoryReport {
    weight_bytes: u64,
    cache_bytes: u64,
    cache_type: &'static str,
    ctx_len: usize,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    #[serde(rename = "type")]
    dtype: String,
    shape: Vec<usize>,
    file: usize,
    offset: u64,
    bytes: u64,
}

impl Inspect {
    pub(crate) fn run(self) -> Result<()> {
        if !self.flags.engine.lora().is_empty() {
            bail!("--lora: expected a verb that runs the model, found inspect");
        }
        let path = Path::new(&self.model);
        if adapter::is_one(path) {
            let report = AdapterReport::new(path)?;
            return match self.flags.json {
                true => output::json(&report),
                false => output::line(report.text()),
            };
        }
        let files = match model::open(&self.model) {
            Ok(files) => files,
            Err(error) => {
                if let Some(report) = Report::of_truncated(path, &error) {
                    report.print(&self)?;
                }
                return Err(error);
            }
        };
        let engine = self.flags.engine.clone().for_model(&files);
        let plan = model::plan(&files, &self.flags.files);
        let memory_bytes = plan.as_ref().map_or(0, ModelPlan::memory_bytes);
        let (model, not_runnable) = match plan {
            Ok(plan) => (Some(ModelReport::new(&plan, &engine)), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let tensors: Vec<TensorReport> = match files.header() {
            // As stored, not as the engine uses them.
            Header::Package(header) => (header.package.tensors().iter())
                .map(TensorReport::of_package)
                .collect(),
            _ => files.tensors().iter().map(TensorReport::new).collect(),
        };
        let package = match files.header() {
            Header::Package(header) => {
                let place = engine.device();
                let hints = place.hints(files.hints());
                let decisions = device::decisions(place, &hints, memory_bytes)?;
                Some(PackageReport::new(header, decisions))
            }
            _ => None,
        };
        let (metadata, unreadable) = metadata(&files);
        let not_runnable = not_runnable.or(unreadable.map(|error| format!("{error:#}")));
        let report = Report {
            path: files.name().to_owned(),
            format: format_name(files.header()),
            architecture: architecture(&files),
            files: (files.sources().iter())
                .map(|file| FileReport {
                    path: file.to_string(),
                    bytes: file.len(),
                })
                .collect(),
            bytes: files.sources().iter().map(|file| file.len()).sum(),
            n_tensors: tensors.len(),
            n_parameters: files.tensors().n_parameters(),
            types: types(&tensors),
            model,
            not_runnable,
            package,
            metadata,
            tensors,
        };
        report.print(&self)
    }
}

fn format_name(header: &Header) -> String {
    match header {
        Header::Gguf { version, .. } => format!("GGUF v{version}"),
        Header::SafeTensors { .. } => "safetensors".to_owned(),
        Header::Package(header) => format!("RDRR {}", header.package.manifest().version),
        Header::Bundle(header) => format!("engine bundle ({})", header.model.arch),
    }
}

/// The model's kind, by its files. A file that says nothing, or nonsense, has none.
fn architecture(files: &LocalModel) -> Option<String> {
    match files.header() {
        Header::Gguf { metadata, .. } => metadata.architecture().ok()?.map(str::to_owned),
        Header::SafeTensors { .. } | Header::Package(_) | Header::Bundle(_) => {
            let config = files.config().ok()??;
            config
                .architectures
                .into_iter()
                .next()
                .or(config.model_type)
        }
    }
}

fn types(tensors: &[TensorReport]) -> BTreeMap<String, TypeReport> {
    let mut types = BTreeMap::<_, TypeReport>::new();
    for tensor in tensors {
        let entry = types.entry(tensor.dtype.clone()).or_default();
        entry.n_tensors += 1;
        entry.bytes += tensor.bytes;
    }
    types
}

/// Everything else in the files besides tensors, long arrays abbreviated; and why some of it is left out.
fn metadata(files: &LocalModel) -> (Map<String, Json>, Option<Error>) {
    match files.header() {
        Header::Gguf { metadata, .. } => (gguf_metadata(metadata), None),
        Header::SafeTensors { metadata, .. } => {
            let own = metadata
                .iter()
                .map(|(key, value)| (key.clone(), json!(value)));
            let mut all: Map<String, Json> = own.collect();
            let error = match files.config_json() {
                Ok(config) => {
                    all.extend(config.map(|config| ("config.json".to_owned(), config)));
                    None
                }
                Err(error) => Some(error),
            };
            (all, error.map(Error::from))
        }
        Header::Package(_) | Header::Bundle(_) => match files.config_json() {
            Ok(config) => {
                let config = config.map(|config| ("config.json".to_owned(), config));
                (config.into_iter().collect(), None)
            }
            Err(error) => (Map::new(), Some(error.into())),
        },
    }
}

fn gguf_metadata(metadata: &Metadata) -> Map<String, Json> {
    let rows = metadata.iter();
    let rows = rows.map(|(key, value)| (key.to_owned(), value_to_json(value)));
    rows.collect()
}

/// More than any file has.
const MAX_FILE_BYTES: u64 = 1 << 50;

/// Elements of an array that are shown; the rest is counted.
const SHOWN: usize = 6;

/// `value` as JSON; a long array becomes its length, its element type and its first elements.
fn value_to_json(value: &Value) -> Json {
    match value {
        Value::Bool(value) => json!(value),
        Value::String(value) => json!(value),
        Value::F32(value) => json!(shortest(*value)),
        Value::F64(value) => json!(value),
        Value::Array(array) => array_to_json(array),
        Value::U8(value) => json!(value),
        Value::I8(value) => json!(value),
        Value::U16(value) => json!(value),
        Value::I16(value) => json!(value),
        Value::U32(value) => json!(value),
        Value::I32(value) => json!(value),
        Value::U64(value) => json!(value),
        Value::I64(value) => json!(value),
        other => json!(other.to_string()),
    }
}

fn array_to_json(array: &Array) -> Json {
    fn numbers<T: Copy + Serialize>(values: &[T]) -> Vec<Json> {
        values
            .iter()
            .take(SHOWN)
            .map(|&value| json!(value))
            .collect()
    }
    let (kind, first) = match array {
        Array::String(strings) => (
            "string",
            strings.iter().take(SHOWN).map(|s| json!(s)).collect(),
        ),
        Array::Bool(values) => ("bool", numbers(values)),
        Array::F32(values) => (
            "f32",
            values
                .iter()
                .take(SHOWN)
                .map(|&value| json!(shortest(value)))
                .collect(),
        ),
        Array::F64(values) => ("f64", numbers(values)),
        Array::U8(values) => ("u8", numbers(values)),
        Array::I8(values) => ("i8", numbers(values)),
        Array::U16(values) => ("u16", numbers(values)),
        Array::I16(values) => ("i16", numbers(values)),
        Array::U32(values) => ("u32", numbers(values)),
        Array::I32(values) => ("i32", numbers(values)),
        Array::U64(values) => ("u64", numbers(values)),
        Array::I64(values) => ("i64", numbers(values)),
        Array::Array(arrays) => (
            "array",
            arrays.iter().take(SHOWN).map(array_to_json).collect(),
        ),
        _ => ("value", Vec::new()),
    };
    match array.len() {
        n if n == first.len() => Json::Array(first),
        n => json!({ "array_of": kind, "len": n, "first": first }),
    }
}

/// The f64 that prints like `value`: 1e-6 rather than 9.999999974752427e-7.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

impl ModelReport {
    fn new(plan: &ModelPlan, flags: &EngineFlags) -> ModelReport {
        let config = plan.config();
        let ctx_len = flags.ctx_len(config.max_ctx);
        let cache = flags.expected_cache(plan);
        ModelReport {
            family: config.family.name.to_owned(),
            n_layers: config.n_layers,
            attends: config.n_attention_layers() > 0,
            model_dim: config.model_dim,
            ffn_dim: config.ffn_dim,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            n_vocab: config.n_vocab,
            max_ctx: config.max_ctx,
            memory: MemoryReport {
                weight_bytes: plan.memory_bytes(),
                cache_bytes: plan.cache_bytes(ctx_len, cache),
                cache_type: cache.name(),
                ctx_len,
            },
        }
    }

    fn shape(&self) -> String {
        let heads = match self.attends {
            true => format!(
                "feed-forward {}, {} heads of {} ({} key-value)",
                self.ffn_dim, self.n_heads, self.head_dim, self.n_kv_heads
            ),
            false => "no attention".to_owned(),
        };
        format!(
            "{}: {} layers, width {}, {heads}, vocabulary {}, context {}",
            self.family, self.n_layers, self.model_dim, self.n_vocab, self.max_ctx
        )
    }
}

impl MemoryReport {
    fn text(&self) -> String {
        format!(
            "{}: weights {}, cache {} for {} tokens in {}",
            Bytes(self.weight_bytes + self.cache_bytes),
            Bytes(self.weight_bytes),
            Bytes(self.cache_bytes),
            self.ctx_len,
            self.cache_type
        )
    }
}

impl TensorReport {
    fn new(tensor: &TensorEntry) -> TensorReport {
        TensorReport {
            name: tensor.name.clone(),
            dtype: tensor.dtype.name().to_owned(),
            shape: tensor.shape.clone(),
            file: tensor.file,
            offset: tensor.offset,
            bytes: tensor.len,
        }
    }

    /// A tensor of a package; `file` and `offset` are where it begins.
    fn of_package(tensor: &Tensor) -> TensorReport {
        let first = tensor.first();
        TensorReport {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.logical_shape(),
            file: first.shard,
            offset: first.offset,
            bytes: tensor.size,
        }
    }
}

impl Report {
    /// What the header of the GGUF file at `path` says, if that is whole and what it describes isn't, which is
    /// why opening it failed with `error`.
    fn of_truncated(path: &Path, error: &Error) -> Option<Report> {
        if !path.is_file() {
            return None;
        }
        let file = SourceFile::open(path).ok()?;
        let bytes = file.bytes().ok()?;
        if Gguf::parse(&bytes, file.len()).is_ok() {
            return None;
        }
        let gguf = Gguf::parse(&bytes, MAX_FILE_BYTES).ok()?;
        let metadata = gguf.metadata();
        let mut catalog = TensorCatalog::default();
        let mut tensors = gguf.tensors().iter().cloned();
        tensors.try_for_each(|tensor| catalog.insert(tensor)).ok()?;
        let tensors: Vec<TensorReport> = catalog.iter().map(TensorReport::new).collect();
        Some(Report {
            path: path.display().to_string(),
            format: format!("GGUF v{}", gguf.version()),
            architecture: metadata.architecture().ok().flatten().map(str::to_owned),
            files: vec![FileReport {
                path: file.to_string(),
                bytes: file.len(),
            }],
            bytes: file.len(),
            n_tensors: tensors.len(),
            n_parameters: catalog.n_parameters(),
            types: types(&tensors),
            model: None,
            not_runnable: Some(format!("{error:#}")),
            package: None,
            metadata: gguf_metadata(metadata),
            tensors,
        })
    }

    fn print(&self, verb: &Inspect) -> Result<()> {
        match verb.flags.json {
            true => output::json(self),
            false => output::line(self.text(verb.tensors)),
        }
    }

    fn text(&self, lists_tensors: bool) -> String {
        let n_files = self.files.len();
        let files = if n_files == 1 {
            String::new()
        } else {
            format!(" in {n_files} files")
        };
        let types: Vec<_> = (self.types.iter())
            .map(|(name, t)| format!("{} {name} ({})", t.n_tensors, Bytes(t.bytes)))
            .collect();
        let mut rows = vec![
            ("path", self.path.clone()),
            (
                "format",
                format!("{}, {}{files}", self.format, Bytes(self.bytes)),
            ),
            (
                "architecture",
                self.architecture
                    .clone()
                    .unwrap_or_else(|| "not named".to_owned()),
            ),
            ("parameters", Count(self.n_parameters).to_string()),
            (
                "tensors",
                if types.is_empty() {
                    "none".to_owned()
                } else {
                    types.join(", ")
                },
            ),
        ];
        if let Some(package) = &self.package {
            rows.extend(package.rows());
        }
        if let Some(model) = &self.model {
            rows.push(("model", model.shape()));
            rows.push(("memory", model.memory.text()));
        }
        if let Some(reason) = &self.not_runnable {
            rows.push(("can't run", reason.clone()));
        }
        let mut text = output::table(&rows);
        for (title, rows) in self.package.iter().flat_map(PackageReport::sections) {
            text += &format!("\n\n{title}\n{}", indent(&rows));
        }
        if !self.metadata.is_empty() {
            let mut rows = Vec::new();
            flatten("", &self.metadata, &mut rows);
            let rows: Vec<_> = rows
                .iter()
                .map(|(key, value)| (key.as_str(), value.clone()))
                .collect();
            text += &format!("\n\nmetadata\n{}", indent(&output::table(&rows)));
        }
        if lists_tensors && !self.tensors.is_empty() {
            let rows: Vec<_> = self
                .tensors
                .iter()
                .map(|t| (t.name.as_str(), t.text()))
                .collect();
            text += &format!("\n\ntensors\n{}", indent(&output::table(&rows)));
        }
        text
    }
}

impl TensorReport {
    fn text(&self) -> String {
        let shape: Vec<_> = self.shape.iter().map(usize::to_string).collect();
        format!(
            "{:5} {:>10}  [{}]",
            self.dtype,
            Bytes(self.bytes),
            shape.join(", ")
        )
    }
}

fn indent(text: &str) -> String {
    text.lines()
        .map(|line| format!("  {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Longest value that is shown.
const MAX_VALUE_CHARS: usize = 100;

/// One row for each value in `object`, nested keys joined by dots.
fn flatten(prefix: &str, object: &Map<String, Json>, rows: &mut Vec<(String, String)>) {
    for (key, value) in object {
        let key = format!("{prefix}{key}");
        match value {
            Json::Object(nested) => match (
                nested.get("array_of"),
                nested.get("len"),
                nested.get("first"),
            ) {
                (Some(Json::String(kind)), Some(len), Some(first)) => {
                    let first = first.to_string();
                    let first = first.strip_suffix(']').unwrap_or(&first);
                    rows.push((key, shorten(&format!("{len} × {kind}: {first}, …]"))));
                }
                _ => flatten(&format!("{key}."), nested, rows),
            },
            Json::String(text) => rows.push((key, shorten(&text.escape_debug().to_string()))),
            other => rows.push((key, shorten(&other.to_string()))),
        }
    }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_arrays_are_cut_short() {
        let short = Value::Array(Array::U32(vec![1, 2]));
        assert_eq!(value_to_json(&short), json!([1, 2]));
        let long = Value::Array(Array::F32(vec![0.1; 100]));
        let expected =
            json!({ "array_of": "f32", "len": 100, "first": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1] });
        assert_eq!(value_to_json(&long), expected);
    }

    #[test]
    fn values_become_rows() {
        let object = json!({
            "a": { "b": 1, "c": "two\nlines" },
            "d": { "array_of": "u8", "len": 9, "first": [1, 2] },
            "e": "x".repeat(200),
            "f": { "array_of": "array", "len": 9, "first": [[1], [2]] },
        });
        let mut rows = Vec::new();
        flatten("", object.as_object().unwrap(), &mut rows);
        let rows: Vec<_> = rows.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let long = "x".repeat(100) + "…";
        let expected = [
            ("a.b", "1"),
            ("a.c", "two\\nlines"),
            ("d", "9 × u8: [1,2, …]"),
            ("e", long.as_str()),
            ("f", "9 × array: [[1],[2], …]"),
        ];
        assert_eq!(rows, expected);
    }
}
