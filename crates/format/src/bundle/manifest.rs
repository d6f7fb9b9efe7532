//! The quantize manifest: which ranges of which files become which tensors of an engine's file.

use super::error::ensure;
use super::read::{Cursor, MAX_LAYERS, MAX_TENSORS};
use super::{Action, ArchType, BundleError, Location, LoraTarget, SourceType};

/// Bytes of a tensor's entry.
const TENSOR_BYTES: u64 = 55;
/// Bytes of a section's entry.
const SECTION_BYTES: u64 = 9;

/// A quantize manifest, checked: every range is that of its type and shape, every index in range.
/// Whether the ranges are within their files is checked by the reader of those.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// Paths of the files that hold the tensors.
    pub shards: Vec<String>,
    /// The tensors in the order of the engine's file.
    pub tensors: Vec<ManifestTensor>,
    /// Which tensors make up which part of the model; `None` in version 1, which has no table of them.
    pub sections: Option<Vec<Section>>,
    /// The matrices of an adapter.
    pub lora: Option<LoraBlock>,
}

/// A tensor and what is to be made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestTensor {
    /// What is to be done.
    pub action: Action,
    /// Type of the elements.
    pub dtype: SourceType,
    /// Rows as they are stored, of packed trits a quarter of the model's. A vector has rows of one.
    pub rows: u32,
    /// Elements of a row.
    pub cols: u32,
    /// Rows that an engine computes with, at least `rows`.
    pub padded_rows: u32,
    /// Elements of a row that an engine computes with, at least `cols`.
    pub padded_cols: u32,
    /// Where the elements are.
    pub data: ShardRange,
    /// Where the scale is: one float of 2 or 4 bytes.
    pub scale: Option<ShardRange>,
}

/// Bytes of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardRange {
    /// Index into [`Manifest::shards`].
    pub shard: u16,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub size: u64,
}

/// Tensors that make up a part of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    /// The part: 1 is a language model; 4, 5 and 6 are text encoder, transformer and image decoder
    /// of an image model.
    pub kind: u8,
    /// Its first tensor.
    pub first: u32,
    /// How many there are.
    pub len: u32,
}

impl Section {
    /// The language model.
    pub const TEXT: u8 = 1;
    /// The largest kind there is.
    const MAX_KIND: u8 = 6;
}

/// The matrices of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraBlock {
    /// Layers of the model.
    pub n_layers: u32,
    /// Factor on the products of the matrices.
    pub scale: f64,
    /// The projections that the adapter changes, by layer and in each in the order of
    /// [`LoraTarget::ALL`].
    pub pairs: Vec<LoraSource>,
}

/// The two matrices of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraSource {
    /// The layer.
    pub layer: u32,
    /// The projection.
    pub target: LoraTarget,
    /// `[rank, in]`
    pub a: MatrixSource,
    /// `[out, rank]`
    pub b: MatrixSource,
}

/// A matrix of floats in a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSource {
    /// Type of the elements.
    pub dtype: SourceType,
    /// Its rows.
    pub rows: u32,
    /// Elements of a row.
    pub cols: u32,
    /// Where the elements are.
    pub data: ShardRange,
}

impl Manifest {
    /// Parses the whole of a manifest that is about a model of `arch`.
    ///
    /// It has a table of sections if parsing it that way leaves no byte over; no manifest can be parsed
    /// both ways. Memory stays within four times the bytes given.
    ///
    /// # Errors
    ///
    /// [`BundleError`] names the entry and the field at fault.
    pub fn parse(bytes: &[u8], arch: ArchType) -> Result<Manifest, BundleError> {
        let mut cursor = Cursor::new(bytes, bytes.len() as u64);
        let shards = read_shards(&mut cursor)?;
        let n = cursor.u32(Location::Tensors)?;
        ensure_at_most(n, MAX_TENSORS, Location::Tensors)?;
        let n = cursor.ensure_items(n, TENSOR_BYTES, Location::Tensors)?;
        let mut tensors = Vec::with_capacity(n);
        for i in 0..n {
            let tensor = read_tensor(&mut cursor, Location::Tensor(i), arch)?;
            check_tensor(&tensor, Location::Tensor(i), arch, shards.len())?;
            tensors.push(tensor);
        }
        let tail = |mut cursor: Cursor<'_>, with_sections| {
            let sections = match with_sections {
                true => Some(read_sections(&mut cursor, tensors.len())?),
                false => None,
            };
            let lora = match cursor.left() {
                0 => None,
                _ => Some(read_lora(&mut cursor, shards.len())?),
            };
            cursor.finish()?;
            Ok((sections, lora))
        };
        let (sections, lora) = tail(cursor.clone(), true).or_else(|newer: BundleError| {
            tail(cursor, false).map_err(|plain| BundleError::NeitherForm {
                sections: Box::new(newer),
                plain: Box::new(plain),
            })
        })?;
        Ok(Manifest {
            shards,
            tensors,
            sections,
            lora,
        })
    }

    /// The manifest as bytes, for a model of `arch`.
    ///
    /// # Errors
    ///
    /// [`BundleError`] if [`Manifest::parse`] would refuse it, or lengths don't fit their fields.
    pub fn to_bytes(&self, arch: ArchType) -> Result<Vec<u8>, BundleError> {
        let mut out = Vec::new();
        let n_shards = length(self.shards.len(), Location::Header, "number of shards")?;
        put(&mut out, &u16::to_le_bytes(n_shards));
        for (i, path) in self.shards.iter().enumerate() {
            let len: u16 = length(path.len(), Location::Shard(i), "length of the path")?;
            put(&mut out, &len.to_le_bytes());
            put(&mut out, path.as_bytes());
        }
        let n: u32 = length(self.tensors.len(), Location::Tensors, "number of tensors")?;
        ensure_at_most(n, MAX_TENSORS, Location::Tensors)?;
        put(&mut out, &n.to_le_bytes());
        for (i, tensor) in self.tensors.iter().enumerate() {
            check_tensor(tensor, Location::Tensor(i), arch, self.shards.len())?;
            let code = tensor.action.code(arch);
            out.push(code.expect("actions without a number have just been refused"));
            out.push(tensor.dtype.code());
            for dim in [
                tensor.rows,
                tensor.cols,
                tensor.padded_rows,
                tensor.padded_cols,
            ] {
                put(&mut out, &dim.to_le_bytes());
            }
            put_range(&mut out, &tensor.data);
            out.push(u8::from(tensor.scale.is_some()));
            put_range(&mut out, &tensor.scale.unwrap_or(NOWHERE));
        }
        if let Some(sections) = &self.sections {
            let n: u32 = length(sections.len(), Location::Sections, "number of sections")?;
            put(&mut out, &n.to_le_bytes());
            for (i, section) in sections.iter().enumerate() {
                check_section(section, Location::Section(i), self.tensors.len())?;
                out.push(section.kind);
                put(&mut out, &section.first.to_le_bytes());
                put(&mut out, &section.len.to_le_bytes());
            }
        }
        if let Some(lora) = &self.lora {
            lora.write(&mut out, self.shards.len())?;
        }
        Ok(out)
    }
}

impl LoraBlock {
    fn write(&self, out: &mut Vec<u8>, n_shards: usize) -> Result<(), BundleError> {
        check_lora_head(self.n_layers, self.scale)?;
        put(out, &self.n_layers.to_le_bytes());
        put(out, &(LoraTarget::ALL.len() as u32).to_le_bytes());
        put(out, &self.scale.to_le_bytes());
        let mut pairs = self.pairs.iter().peekable();
        for layer in 0..self.n_layers {
            for target in LoraTarget::ALL {
                let is_next = |pair: &&LoraSource| (pair.layer, pair.target) == (layer, target);
                let Some(pair) = pairs.next_if(is_next) else {
                    out.push(0);
                    continue;
                };
                check_pair(pair, n_shards)?;
                out.push(1);
                for matrix in [&pair.a, &pair.b] {
                    out.push(matrix.dtype.code());
                    put(out, &matrix.rows.to_le_bytes());
                    put(out, &matrix.cols.to_le_bytes());
                    put_range(out, &matrix.data);
                }
            }
        }
        match pairs.next() {
            None => Ok(()),
            Some(pair) => Err(out_of_order(pair.layer, pair.target, self.n_layers)),
        }
    }
}

/// The error that a pair of matrices isn't where its layer and projection belong.
pub(super) fn out_of_order(layer: u32, target: LoraTarget, n_layers: u32) -> BundleError {
    BundleError::field(
        Location::Pair(layer, target),
        "place",
        format_args!("pairs in order, each once, of layers below {n_layers}"),
        "another",
    )
}

/// What stands in the place of a range that there isn't.
const NOWHERE: ShardRange = ShardRange {
    shard: 0,
    offset: 0,
    size: 0,
};

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(bytes);
}

fn put_range(out: &mut Vec<u8>, range: &ShardRange) {
    put(out, &range.shard.to_le_bytes());
    put(out, &range.offset.to_le_bytes());
    put(out, &range.size.to_le_bytes());
}

/// A length in the type of its field.
fn length<T: TryFrom<usize>>(
    len: usize,
    place: Location,
    field: &'static str,
) -> Result<T, BundleError> {
    let bits = 8 * size_of::<T>();
    T::try_from(len)
        .map_err(|_| BundleError::field(place, field, format_args!("a number of {bits} bits"), len))
}

pub(super) fn ensure_at_most(n: u32, max: u32, place: Location) -> Result<(), BundleError> {
    ensure(n <= max, place, "length", format_args!("at most {max}"), n)
}

fn read_shards(cursor: &mut Cursor<'_>) -> Result<Vec<String>, BundleError> {
    let n = cursor.u16(Location::Header)?;
    // A path takes two bytes at least.
    let n = cursor.ensure_items(n.into(), 2, Location::Header)?;
    let mut shards = Vec::with_capacity(n);
    for i in 0..n {
        let place = Location::Shard(i);
        let len = cursor.u16(place)?;
        let path = cursor.bytes(len.into(), place)?;
        let path = str::from_utf8(path).map_err(|error| {
            let at = error.valid_up_to();
            let found = format_args!("other bytes after the first {at}").to_string();
            BundleError::field(place, "path", "UTF-8 text", found)
        })?;
        shards.push(path.to_owned());
    }
    Ok(shards)
}

fn read_tensor(
    cursor: &mut Cursor<'_>,
    place: Location,
    arch: ArchType,
) -> Result<ManifestTensor, BundleError> {
    let code = cursor.u8(place)?;
    let action = Action::from_code(code, arch)
        .ok_or_else(|| BundleError::field(place, "action", "a number from 0 to 7", code))?;
    let dtype = read_dtype(cursor, place, "element type")?;
    let mut dims = [0; 4];
    for dim in &mut dims {
        *dim = cursor.u32(place)?;
    }
    let [rows, cols, padded_rows, padded_cols] = dims;
    let data = read_range(cursor, place)?;
    let has_scale = cursor.flag(place, "has scale")?;
    let scale = read_range(cursor, place)?;
    Ok(ManifestTensor {
        action,
        dtype,
        rows,
        cols,
        padded_rows,
        padded_cols,
        data,
        scale: has_scale.then_some(scale),
    })
}

fn read_dtype(
    cursor: &mut Cursor<'_>,
    place: Location,
    field: &'static str,
) -> Result<SourceType, BundleError> {
    let code = cursor.u8(place)?;
    SourceType::from_code(code)
        .ok_or_else(|| BundleError::field(place, field, "a number from 0 to 4", code))
}

fn read_range(cursor: &mut Cursor<'_>, place: Location) -> Result<ShardRange, BundleError> {
    Ok(ShardRange {
        shard: cursor.u16(place)?,
        offset: cursor.u64(place)?,
        size: cursor.u64(place)?,
    })
}

fn read_sections(cursor: &mut Cursor<'_>, n_tensors: usize) -> Result<Vec<Section>, BundleError> {
    let n = cursor.u32(Location::Sections)?;
    let n = cursor.ensure_items(n, SECTION_BYTES, Location::Sections)?;
    let mut sections = Vec::with_capacity(n);
    for i in 0..n {
        let place = Location::Section(i);
        let section = Section {
            kind: cursor.u8(place)?,
            first: cursor.u32(place)?,
            len: cursor.u32(place)?,
        };
        check_section(&section, place, n_tensors)?;
        sections.push(section);
    }
    Ok(sections)
}

fn read_lora(cursor: &mut Cursor<'_>, n_shards: usize) -> Result<LoraBlock, BundleError> {
    let n_layers = cursor.u32(Location::Lora)?;
    let n_targets = LoraTarget::ALL.len() as u32;
    cursor.fixed(Location::Lora, "targets of a layer", n_targets)?;
    let scale = cursor.f64(Location::Lora)?;
    check_lora_head(n_layers, scale)?;
    cursor.ensure_items(n_layers * n_targets, 1, Location::Lora)?;
    let mut pairs = Vec::new();
    for layer in 0..n_layers {
        for target in LoraTarget::ALL {
            let place = Location::Pair(layer, target);
            if !cursor.flag(place, "present")? {
                continue;
            }
            let pair = LoraSource {
                layer,
                target,
                a: read_matrix(cursor, place, "A: element type")?,
                b: read_matrix(cursor, place, "B: element type")?,
            };
            check_pair(&pair, n_shards)?;
            pairs.push(pair);
        }
    }
    Ok(LoraBlock {
        n_layers,
        scale,
        pairs,
    })
}

fn read_matrix(
    cursor: &mut Cursor<'_>,
    place: Location,
    field: &'static str,
) -> Result<MatrixSource, BundleError> {
    Ok(MatrixSource {
        dtype: read_dtype(cursor, place, field)?,
        rows: cursor.u32(place)?,
        cols: cursor.u32(place)?,
        data: read_range(cursor, place)?,
    })
}

fn check_tensor(
    tensor: &ManifestTensor,
    place: Location,
    arch: ArchType,
    n_shards: usize,
) -> Result<(), BundleError> {
    let ManifestTensor { action, dtype, .. } = *tensor;
    let known = action.code(arch).is_some();
    let expected = format_args!("one of architecture {arch}");
    ensure(known, place, "action", expected, action)?;
    let takes = action.stored_type(dtype).is_some();
    let expected = match action {
        Action::RepackTernary => format!("I8 or U8, with action {action}"),
        _ => format!("F32, F16 or BF16, with action {action}"),
    };
    ensure(takes, place, "element type", expected, dtype.dtype())?;
    check_matrix(
        &MatrixSource {
            dtype,
            rows: tensor.rows,
            cols: tensor.cols,
            data: tensor.data,
        },
        place,
        ["rows", "columns", "data"],
        n_shards,
    )?;
    for (field, dim, padded) in [
        ("padded rows", tensor.rows, tensor.padded_rows),
        ("padded columns", tensor.cols, tensor.padded_cols),
    ] {
        let expected = format_args!("at least {dim}");
        ensure(padded >= dim, place, field, expected, padded)?;
    }
    let Some(scale) = &tensor.scale else {
        return Ok(());
    };
    check_range(scale, place, "scale", n_shards)?;
    let is_one = matches!(scale.size, 2 | 4);
    let expected = "one float of 2 or 4 bytes";
    ensure(is_one, place, "size of the scale", expected, scale.size)
}

/// `fields` are the names of rows, columns and data.
fn check_matrix(
    matrix: &MatrixSource,
    place: Location,
    fields: [&'static str; 3],
    n_shards: usize,
) -> Result<(), BundleError> {
    let MatrixSource {
        dtype,
        rows,
        cols,
        data,
    } = *matrix;
    let [rows_field, cols_field, data_field] = fields;
    ensure(rows > 0, place, rows_field, "at least 1", rows)?;
    ensure(cols > 0, place, cols_field, "at least 1", cols)?;
    check_range(&data, place, data_field, n_shards)?;
    let dtype = dtype.dtype();
    // The product of two u32 fits; that times the size of an element may not.
    let size = dtype.tensor_bytes(u64::from(rows) * u64::from(cols));
    let expected = || match size {
        Some(size) => format!("{size} bytes for {rows} times {cols} of {dtype}"),
        None => format!("a size that fits 64 bits, with {rows} times {cols} of {dtype}"),
    };
    ensure(
        size == Some(data.size),
        place,
        data_field,
        expected(),
        data.size,
    )
}

fn check_range(
    range: &ShardRange,
    place: Location,
    field: &'static str,
    n_shards: usize,
) -> Result<(), BundleError> {
    let (shard, end) = (range.shard, range.offset.checked_add(range.size));
    let expected = format_args!("a shard below {n_shards}");
    ensure(usize::from(shard) < n_shards, place, field, expected, shard)?;
    let found = format_args!("{} from {} on", range.size, range.offset);
    ensure(end.is_some(), place, field, "bytes of a file", found)
}

fn check_section(section: &Section, place: Location, n_tensors: usize) -> Result<(), BundleError> {
    let Section { kind, first, len } = *section;
    let known = (1..=Section::MAX_KIND).contains(&kind);
    ensure(known, place, "kind", "a number from 1 to 6", kind)?;
    let end = u64::from(first) + u64::from(len);
    ensure(
        end <= n_tensors as u64,
        place,
        "tensors",
        format_args!("some of the {n_tensors} there are"),
        format_args!("{first} to {end}"),
    )
}

pub(super) fn check_lora_head(n_layers: u32, scale: f64) -> Result<(), BundleError> {
    let expected = format_args!("at most {MAX_LAYERS}");
    ensure(
        n_layers <= MAX_LAYERS,
        Location::Lora,
        "layers",
        expected,
        n_layers,
    )?;
    ensure(
        scale.is_finite(),
        Location::Lora,
        "scale",
        "a finite number",
        scale,
    )
}

fn check_pair(pair: &LoraSource, n_shards: usize) -> Result<(), BundleError> {
    let place = Location::Pair(pair.layer, pair.target);
    for (matrix, fields, type_field) in [
        (
            &pair.a,
            ["A: rows", "A: columns", "A: data"],
            "A: element type",
        ),
        (
            &pair.b,
            ["B: rows", "B: columns", "B: data"],
            "B: element type",
        ),
    ] {
        let dtype = matrix.dtype;
        let expected = "F32, F16 or BF16";
        ensure(dtype.is_float(), place, type_field, expected, dtype.dtype())?;
        check_matrix(matrix, place, fields, n_shards)?;
    }
    let expected = format_args!("the {} rows of A", pair.a.rows);
    ensure(
        pair.a.rows == pair.b.cols,
        place,
        "B: columns",
        expected,
        pair.b.cols,
    )
}
