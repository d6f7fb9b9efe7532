//! The tensor map: which bytes of which shards each tensor is made of.

use std::collections::HashMap;
use std::fmt;

use serde_json::{Map, Value, json};

use super::fields::{self, Fields, members};
use super::problem::{Notes, Path, Problems};
use crate::DType;
use crate::catalog::n_elements;
use crate::json::{Json, pretty, quoted};

/// The largest models have about 100,000 tensors.
pub(super) const MAX_TENSORS: usize = 300_000;
/// 6.4 TB in shards of the usual size.
pub(super) const MAX_SHARDS: usize = 100_000;

/// The most dimensions of a tensor.
const MAX_DIMS: usize = 8;
/// The longest name of a tensor, in bytes.
const MAX_NAME: usize = 1024;

/// One stored tensor, under the name the package gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// Id of the component group it belongs to; packages without groups need none.
    pub group: Option<String>,
    /// Encoding of the stored bytes.
    pub dtype: TensorType,
    /// Dimensions of the matrix as it is stored, outermost first.
    pub shape: Vec<usize>,
    /// Bytes of all pieces together.
    pub size: u64,
    /// Orientation, where the package says it.
    pub layout: Option<Layout>,
    /// The pieces, at least one, in the order of the tensor's bytes.
    pub spans: Vec<Span>,
    /// What the tensor is for, where the package says it.
    pub role: Option<Role>,
    /// Dimensions before the matrix was transposed, of column layout.
    pub original_shape: Option<Vec<usize>>,
    /// Members of unknown meaning, such as `storage` and `sourceTransform`.
    pub extra: Map<String, Value>,
}

/// A piece of a tensor: bytes of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// Index in the manifest's list of shards.
    pub shard: usize,
    /// First byte, from the start of the shard.
    pub offset: u64,
    /// Number of bytes.
    pub size: u64,
}

/// How a tensor is encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorType {
    /// A type that is known here.
    Known(DType),
    /// The name of another: such packages can be shown, verified and moved, not run.
    Other(String),
}

/// The layout of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Outputs by inputs, as in the checkpoint.
    Row,
    /// Transposed.
    Column,
}

/// How blocks follow the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Blocks run over all elements in row-major order, the last one padded if need be.
    Flat,
    /// Every row is padded with zeros to whole blocks.
    PaddedRows,
}

/// What a tensor is for, in the words that the JavaScript runtime demands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Role {
    Embedding,
    LmHead,
    Norm,
    Matmul,
    Expert,
    Router,
    Conv,
    Other,
    /// A word not known here.
    Unknown(String),
}

impl TensorType {
    /// Reads the name of a type in any case; `Q4_K_M` is plain Q4_K, as everywhere in packages.
    pub fn parse(name: &str) -> TensorType {
        let upper = name.to_ascii_uppercase();
        let known = match upper.as_str() {
            "Q4_K_M" | "Q4K" => Some(DType::Q4_K),
            "Q6K" => Some(DType::Q6_K),
            "FLOAT32" | "FP32" => Some(DType::F32),
            "FLOAT16" | "FP16" => Some(DType::F16),
            "BFLOAT16" => Some(DType::BF16),
            upper => DType::ALL.into_iter().find(|dtype| dtype.name() == upper),
        };
        known.map_or_else(|| TensorType::Other(name.to_owned()), TensorType::Known)
    }

    /// The type, if it is known here.
    pub fn known(&self) -> Option<DType> {
        match self {
            TensorType::Known(dtype) => Some(*dtype),
            TensorType::Other(_) => None,
        }
    }
}

impl From<DType> for TensorType {
    fn from(dtype: DType) -> TensorType {
        TensorType::Known(dtype)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorType::Known(DType::Q4_K) => f.write_str("Q4_K_M"),
            TensorType::Known(dtype) => dtype.fmt(f),
            TensorType::Other(name) => f.write_str(name),
        }
    }
}

impl Layout {
    fn parse(name: &str) -> Option<Layout> {
        match name {
            "row" => Some(Layout::Row),
            "column" | "col" => Some(Layout::Column),
            _ => None,
        }
    }

    /// The spelling in files.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Row => "row",
            Layout::Column => "column",
        }
    }
}

impl Role {
    fn parse(name: &str) -> Role {
        match name {
            "embedding" => Role::Embedding,
            "lm_head" => Role::LmHead,
            "norm" => Role::Norm,
            "matmul" => Role::Matmul,
            "expert" => Role::Expert,
            "router" => Role::Router,
            "conv" => Role::Conv,
            "other" => Role::Other,
            unknown => Role::Unknown(unknown.to_owned()),
        }
    }

    /// The spelling in files.
    pub fn name(&self) -> &str {
        match self {
            Role::Embedding => "embedding",
            Role::LmHead => "lm_head",
            Role::Norm => "norm",
            Role::Matmul => "matmul",
            Role::Expert => "expert",
            Role::Router => "router",
            Role::Conv => "conv",
            Role::Other => "other",
            Role::Unknown(name) => name,
        }
    }
}

impl Tensor {
    /// The pieces, at least one, in the order of the tensor's bytes.
    pub fn pieces(&self) -> &[Span] {
        &self.spans
    }

    /// Where the tensor begins.
    pub fn first(&self) -> Span {
        self.spans[0]
    }

    /// Dimensions of the matrix as a checkpoint has it: the other way round where it is stored
    /// transposed.
    pub fn logical_shape(&self) -> Vec<usize> {
        match (&self.layout, &self.original_shape) {
            (Some(Layout::Column), Some(original)) => original.clone(),
            (Some(Layout::Column), None) => self.shape.iter().rev().copied().collect(),
            _ => self.shape.clone(),
        }
    }

    /// How blocks are arranged in rows, which follows from the size; `None` if it matches neither way, or
    /// the type is unknown.
    ///
    /// Where both ways take the same bytes and yet differ, a layout that is given means padded rows:
    /// writers that let blocks run over the ends of rows give none.
    pub fn packing(&self) -> Option<Packing> {
        let dtype = self.dtype.known()?;
        let block_len = dtype.block_len();
        let n = n_elements(self.shape.iter().map(|&d| d as u64))?;
        let columns = self.shape.last().copied().unwrap_or(1);
        let flat = match dtype {
            DType::I2_S => dtype.tensor_bytes(n),
            _ => dtype.tensor_bytes(n.checked_next_multiple_of(block_len as u64)?),
        };
        if dtype == DType::I2_S || columns.is_multiple_of(block_len) {
            return (flat == Some(self.size)).then_some(Packing::Flat);
        }
        let rows = n / columns as u64;
        let padded = rows
            .checked_mul(columns.div_ceil(block_len) as u64)?
            .checked_mul(dtype.block_bytes() as u64);
        match (flat == Some(self.size), padded == Some(self.size)) {
            (true, true) if self.layout.is_some() => Some(Packing::PaddedRows),
            (true, _) => Some(Packing::Flat),
            (false, true) => Some(Packing::PaddedRows),
            (false, false) => None,
        }
    }

    fn read(name: &str, json: &Json<'_>, path: Path<'_>, notes: &mut Notes) -> Option<Tensor> {
        let mut fields = Fields::of(json, path, notes)?;
        let fields = &mut fields;
        if name.is_empty() || name.len() > MAX_NAME || name.contains(|c: char| c.is_control()) {
            let expected = format_args!("a printable name of 1 to {MAX_NAME} bytes");
            fields.notes.add(path, expected, quoted(name));
            return None;
        }
        let group = fields.string("group");
        let dtype = fields.required_string("dtype");
        let shape = match fields.take("shape") {
            Some(json) => dims(json, Path::Key(&path, "shape"), fields.notes),
            None => {
                fields.missing("shape", "a list of dimensions");
                None
            }
        };
        let original_shape = fields
            .take("originalShape")
            .map(|json| dims(json, Path::Key(&path, "originalShape"), fields.notes));
        let size = fields.required("size", "a number of bytes above 0", |json| {
            json.u64().filter(|&size| size > 0)
        });
        let spans = spans(fields, size);
        let layout = fields.optional("layout", "row or column", |json| match json {
            Json::String(name) => Layout::parse(name),
            _ => None,
        });
        let role = fields.string("role").map(|name| Role::parse(&name));
        let tensor = Tensor {
            name: name.to_owned(),
            group,
            dtype: TensorType::parse(&dtype?),
            shape: shape?,
            size: size?,
            layout,
            spans: spans?,
            role,
            original_shape: match original_shape {
                Some(shape) => Some(shape?),
                None => None,
            },
            extra: fields.rest(),
        };
        tensor.check(path, fields.notes);
        Some(tensor)
    }

    /// Checks what dimensions, type and size say of each other.
    fn check(&self, path: Path<'_>, notes: &mut Notes) {
        if self.dtype.known().is_some() && self.packing().is_none() {
            notes.add(
                Path::Key(&path, "size"),
                format_args!("the bytes of {} of shape {:?}", self.dtype, self.shape),
                self.size,
            );
        }
        if self.layout == Some(Layout::Column) && self.shape.len() != 2 {
            let expected = "two dimensions, with column layout";
            notes.add(Path::Key(&path, "shape"), expected, self.shape.len());
        }
        if let Some(original) = &self.original_shape
            && self.layout == Some(Layout::Column)
            && !original.iter().rev().eq(&self.shape)
        {
            let expected = format_args!("`shape`, {:?}, the other way round", self.shape);
            notes.add(
                Path::Key(&path, "originalShape"),
                expected,
                format_args!("{original:?}"),
            );
        }
    }

    /// The tensor's entry in a tensor map.
    fn to_json(&self) -> Value {
        let mut entry = Map::new();
        let mut put = |key: &str, value: Value| {
            entry.insert(key.to_owned(), value);
        };
        let first = self.first();
        if let Some(group) = &self.group {
            put("group", json!(group));
        }
        put("shard", json!(first.shard));
        put("offset", json!(first.offset));
        put("size", json!(self.size));
        put("shape", json!(self.shape));
        put("dtype", json!(self.dtype.to_string()));
        if let Some(role) = &self.role {
            put("role", json!(role.name()));
        }
        if let Some(layout) = self.layout {
            put("layout", json!(layout.name()));
        }
        if let Some(shape) = &self.original_shape {
            put("originalShape", json!(shape));
        }
        if self.spans.len() > 1 {
            let span = |span: &Span| json!({ "shardIndex": span.shard, "offset": span.offset, "size": span.size });
            put("spans", self.spans.iter().map(span).collect());
        }
        entry.extend(self.extra.clone());
        Value::Object(entry)
    }
}

fn dims(json: &Json<'_>, path: Path<'_>, notes: &mut Notes) -> Option<Vec<usize>> {
    const EXPECTED: &str = "a list of up to 8 dimensions";
    let Json::Array(items) = json else {
        notes.add(path, EXPECTED, json.shown());
        return None;
    };
    if items.len() > MAX_DIMS {
        notes.add(path, EXPECTED, items.len());
        return None;
    }
    let dim = |(i, item): (usize, &Json<'_>)| {
        let dim = item.u64().and_then(|dim| usize::try_from(dim).ok());
        if dim.is_none() {
            notes.add(Path::Index(&path, i), "a dimension", item.shown());
        }
        dim
    };
    items.iter().enumerate().map(dim).collect()
}

/// The pieces of a tensor of `size` bytes: `spans`, or else one at `shard` and `offset`.
fn spans(fields: &mut Fields<'_>, size: Option<u64>) -> Option<Vec<Span>> {
    const SHARD: &str = "the index of a shard";
    let index = |json: &Json<'_>| json.u64().and_then(|i| usize::try_from(i).ok());
    let shard_key = fields.take_any(&["shard", "shardIndex"]);
    let shard = shard_key.map(|(key, json)| {
        let shard = index(json);
        if shard.is_none() {
            fields.wrong(key, SHARD, json.shown());
        }
        shard
    });
    let offset = fields.optional("offset", "a number of bytes", Json::u64);
    let spans = fields.list("spans", MAX_SHARDS, |json, path, notes| {
        let mut span = Fields::of(json, path, notes)?;
        let shard = match span.take_any(&["shardIndex", "shard"]) {
            Some((key, json)) => {
                let shard = index(json);
                if shard.is_none() {
                    span.wrong(key, SHARD, json.shown());
                }
                shard
            }
            None => {
                span.missing("shardIndex", SHARD);
                None
            }
        };
        let offset = span.required_count("offset");
        let size = span.required("size", "a number of bytes above 0", |json| {
            json.u64().filter(|&size| size > 0)
        });
        Some(Span {
            shard: shard?,
            offset: offset?,
            size: size?,
        })
    });
    let size = size?;
    let Some(spans) = spans.filter(|spans| !spans.is_empty()) else {
        if shard.is_none() {
            fields.missing("shard", "the index of a shard, or spans");
        }
        let offset = offset.or_else(|| {
            fields.missing("offset", "a number of bytes");
            None
        });
        return Some(vec![Span {
            shard: shard??,
            offset: offset?,
            size,
        }]);
    };
    let total = (spans.iter()).try_fold(0_u64, |total, span| total.checked_add(span.size));
    if total != Some(size) {
        let found = total.map_or("more than can be counted".to_owned(), |n| n.to_string());
        let expected = format_args!("pieces of {size} bytes together, as `size` says");
        fields.wrong("spans", expected, found);
        return None;
    }
    let repeated = (shard.flatten(), offset);
    let first = spans[0];
    if repeated.0.is_some_and(|shard| shard != first.shard)
        || repeated.1.is_some_and(|offset| offset != first.offset)
    {
        fields.wrong(
            "spans",
            "a first piece where `shard` and `offset` say",
            format_args!("one in shard {} at {}", first.shard, first.offset),
        );
        return None;
    }
    Some(spans)
}

/// The tensors of a package in the order of the file, each name once.
#[derive(Debug, Clone, Default)]
pub struct TensorMap {
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

impl PartialEq for TensorMap {
    fn eq(&self, other: &TensorMap) -> bool {
        self.tensors == other.tensors
    }
}

impl TensorMap {
    /// Parses an external tensor map, `tensors.json`.
    ///
    /// What shards there are isn't known here; [`Package::new`](super::Package::new) checks pieces
    /// against them.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the file: what isn't JSON, names that occur twice, sizes that
    /// don't fit types and dimensions, pieces that don't add up.
    pub fn parse(bytes: &[u8]) -> Result<TensorMap, Problems> {
        let mut notes = Notes::new();
        let map = fields::parse(bytes, &mut notes)
            .and_then(|json| TensorMap::read(&json, Path::Root, &mut notes));
        notes.or(map.unwrap_or_default())
    }

    pub(super) fn read(json: &Json<'_>, path: Path<'_>, notes: &mut Notes) -> Option<TensorMap> {
        let tensors = members(json, path, MAX_TENSORS, notes, &mut Tensor::read)?;
        let mut map = TensorMap::default();
        for tensor in tensors {
            map.push(tensor).expect(
                "members of an object differ in name, and a tensor that is read has a piece",
            );
        }
        Some(map)
    }

    /// Adds `tensor`; gives it back if its name is taken or it has no piece.
    pub fn push(&mut self, tensor: Tensor) -> Result<(), Box<Tensor>> {
        if self.by_name.contains_key(&tensor.name) || tensor.spans.is_empty() {
            return Err(Box::new(tensor));
        }
        self.by_name.insert(tensor.name.clone(), self.tensors.len());
        self.tensors.push(tensor);
        Ok(())
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.index_of(name).map(|i| &self.tensors[i])
    }

    /// The place of the tensor called `name` in the order of the file.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Every tensor, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Tensor> + Clone {
        self.tensors.iter()
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The text of `tensors.json`: the same map gives the same bytes.
    pub fn to_json(&self) -> Vec<u8> {
        pretty(&self.to_value())
    }

    pub(super) fn to_value(&self) -> Value {
        let entry = |tensor: &Tensor| (tensor.name.clone(), tensor.to_json());
        Value::Object(self.tensors.iter().map(entry).collect())
    }
}
