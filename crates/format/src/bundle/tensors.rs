//! `qmodel.tensors`: the weights of a model as an engine computes with them.

use super::error::ensure;
use super::extent::{ALIGNMENT, Extent, Owner};
use super::manifest::ensure_at_most;
use super::read::{Cursor, MAX_TENSORS, header};
use super::{Action, ArchType, BundleError, Location, SourceType, tensor_names};
use crate::gguf::type_id;
use crate::{DType, TensorCatalog, TensorEntry};

const MAGIC: &[u8; 4] = b"TRLM";
/// Version of what follows the header.
const BODY_VERSION: u32 = 1;
/// Bytes before the first record.
const FIXED_BYTES: u64 = 64;
/// Bytes of a record.
const RECORD_BYTES: u64 = 40;
/// The embedding table is the output head too.
const TIED: u32 = 1;

/// What `qmodel.tensors` says, checked: every tensor is within the file, aligned, and doesn't overlap others.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorFile {
    /// What it says about the model.
    pub model: ModelFacts,
    /// Its tensors, in the order of the manifest that they were made from.
    pub tensors: Vec<StoredTensor>,
}

/// What `qmodel.tensors` says about its model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelFacts {
    /// The architecture.
    pub arch: ArchType,
    /// Whether the embedding table is the output head too.
    pub tied_embeddings: bool,
    /// Width of the residual stream, rounded up to what engines compute with.
    pub hidden_dim: u32,
    /// Width of the FFN, rounded up likewise.
    pub intermediate_dim: u32,
    /// Width of the residual stream in the model.
    pub hidden_dim_orig: u32,
    /// Width of the FFN in the model.
    pub intermediate_dim_orig: u32,
    /// Epsilon of the norms.
    pub norm_eps: f64,
}

/// A tensor and its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredTensor {
    /// What it is.
    pub form: TensorForm,
    /// First byte, from the start of the file; a multiple of 64.
    pub offset: u64,
    /// Number of bytes, the trailer of I2_S included.
    pub size: u64,
}

/// What a tensor is, and how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorForm {
    /// What it was made by.
    pub action: Action,
    /// Type of its blocks.
    pub dtype: DType,
    /// Rows in the model. A vector has rows of one element.
    pub rows: u32,
    /// Elements of a row in the model.
    pub cols: u32,
    /// Rows that the manifest asked for; none beyond `rows` is stored.
    pub padded_rows: u32,
    /// Elements of a row that the manifest asked for.
    pub padded_cols: u32,
}

impl TensorForm {
    /// Bytes of a stored row, which is padded to whole blocks with zeros.
    pub fn row_bytes(&self) -> u64 {
        let blocks = u64::from(self.cols).div_ceil(self.dtype.block_len() as u64);
        // No overflow: fewer than 2^32 blocks of at most 210 bytes.
        blocks * self.dtype.block_bytes() as u64
    }

    /// Bytes of all rows and of what belongs to the tensor as a whole; `None` if 64 bits can't say.
    pub fn bytes(&self) -> Option<u64> {
        let rows = u64::from(self.rows).checked_mul(self.row_bytes())?;
        rows.checked_add(self.dtype.trailer_bytes() as u64)
    }

    /// Its shape, outermost first, as a Hugging Face checkpoint has it.
    pub fn shape(&self) -> Vec<usize> {
        // Lossless: no machine that runs models has a narrower usize.
        match self.cols {
            1 => vec![self.rows as usize],
            cols => vec![self.rows as usize, cols as usize],
        }
    }

    fn check(&self, place: Location, arch: ArchType) -> Result<(), BundleError> {
        let known = self.action.code(arch).is_some();
        let expected = format_args!("one of architecture {arch}");
        ensure(known, place, "action", expected, self.action)?;
        let makes = |source: SourceType| self.action.stored_type(source) == Some(self.dtype);
        ensure(
            SourceType::ALL.into_iter().any(makes),
            place,
            "stored type",
            format_args!("a type that action {} makes", self.action),
            self.dtype,
        )?;
        for (field, dim, padded_field, padded) in [
            ("rows", self.rows, "padded rows", self.padded_rows),
            ("columns", self.cols, "padded columns", self.padded_cols),
        ] {
            ensure(dim > 0, place, field, "at least 1", dim)?;
            let expected = format_args!("at least {dim}");
            ensure(padded >= dim, place, padded_field, expected, padded)?;
        }
        Ok(())
    }
}

impl ModelFacts {
    fn check(&self) -> Result<(), BundleError> {
        for (field, padded, dim) in [
            ("hidden dimension", self.hidden_dim, self.hidden_dim_orig),
            (
                "intermediate dimension",
                self.intermediate_dim,
                self.intermediate_dim_orig,
            ),
        ] {
            let expected = format_args!("at least the model's own, {dim}");
            ensure(padded >= dim, Location::Header, field, expected, padded)?;
        }
        let eps = self.norm_eps;
        ensure(
            eps.is_finite() && eps >= 0.0,
            Location::Header,
            "epsilon of the norms",
            "a number not below 0",
            eps,
        )
    }
}

impl TensorFile {
    /// Parses the part before the data of a file of `file_len` bytes that begins with `prefix`.
    ///
    /// Memory stays within 8 MiB, whatever the file says.
    ///
    /// # Errors
    ///
    /// [`BundleError::NeedMore`] if the records continue after the prefix; every other error means that
    /// the file is bad, and says where and why.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<TensorFile, BundleError> {
        let mut cursor = Cursor::new(prefix, file_len);
        let place = Location::Header;
        cursor.magic(MAGIC)?;
        let arch = cursor.u32(place)?;
        let arch = ArchType::from_code(arch).ok_or_else(|| {
            BundleError::field(place, "architecture", "a number from 0 to 7", arch)
        })?;
        cursor.fixed(place, "reserved field", 0)?;
        cursor.fixed(place, "version of the body", BODY_VERSION)?;
        let n = cursor.u32(place)?;
        ensure_at_most(n, MAX_TENSORS, Location::Tensors)?;
        let flags = cursor.u32(place)?;
        ensure(flags & !TIED == 0, place, "flags", "0 or 1", flags)?;
        let mut dims = [0; 4];
        for dim in &mut dims {
            *dim = cursor.u32(place)?;
        }
        let [
            hidden_dim,
            intermediate_dim,
            hidden_dim_orig,
            intermediate_dim_orig,
        ] = dims;
        cursor.fixed(place, "reserved field", 0)?;
        let model = ModelFacts {
            arch,
            tied_embeddings: flags & TIED != 0,
            hidden_dim,
            intermediate_dim,
            hidden_dim_orig,
            intermediate_dim_orig,
            norm_eps: cursor.f64(place)?,
        };
        model.check()?;
        for _ in 0..2 {
            cursor.fixed(place, "reserved field", 0)?;
        }
        let n = cursor.ensure_items(n, RECORD_BYTES, Location::Tensors)?;
        let mut tensors = Vec::with_capacity(n);
        let mut free = data_offset(n);
        for i in 0..n {
            let tensor = read_record(&mut cursor, Location::Tensor(i), arch)?;
            let StoredTensor { form, offset, size } = tensor;
            free = Extent { offset, size }.check(owner(i), form.bytes(), free, file_len)?;
            tensors.push(tensor);
        }
        match file_len.saturating_sub(free) {
            0 => Ok(TensorFile { model, tensors }),
            n => Err(BundleError::Trailing { at: free, n }),
        }
    }

    /// Lays a file out with tensors of these forms, one after the other.
    ///
    /// # Errors
    ///
    /// [`BundleError`] if [`TensorFile::parse`] would refuse what comes of it.
    pub fn layout(model: ModelFacts, forms: &[TensorForm]) -> Result<TensorFile, BundleError> {
        model.check()?;
        let n = u32::try_from(forms.len()).unwrap_or(u32::MAX);
        ensure_at_most(n, MAX_TENSORS, Location::Tensors)?;
        let mut tensors = Vec::with_capacity(forms.len());
        let mut free = data_offset(forms.len());
        for (i, &form) in forms.iter().enumerate() {
            form.check(Location::Tensor(i), model.arch)?;
            let (Extent { offset, size }, end) = Extent::next(owner(i), form.bytes(), free)?;
            tensors.push(StoredTensor { form, offset, size });
            free = end;
        }
        Ok(TensorFile { model, tensors })
    }

    /// Everything before the data of the first tensor. Bytes between tensors are zero, and the file
    /// ends with the last one.
    pub fn header(&self) -> Vec<u8> {
        let model = &self.model;
        let mut out = header(MAGIC);
        for word in [
            model.arch.code(),
            0,
            BODY_VERSION,
            self.tensors.len() as u32,
            u32::from(model.tied_embeddings) * TIED,
            model.hidden_dim,
            model.intermediate_dim,
            model.hidden_dim_orig,
            model.intermediate_dim_orig,
            0,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&model.norm_eps.to_le_bytes());
        out.resize(FIXED_BYTES as usize, 0);
        for StoredTensor { form, offset, size } in &self.tensors {
            let code = form.action.code(model.arch);
            let code = code.expect("laid out or parsed, so that the architecture has it");
            let id = type_id(form.dtype).expect("every type that an action makes has an id");
            for word in [
                code.into(),
                id,
                form.rows,
                form.cols,
                form.padded_rows,
                form.padded_cols,
            ] {
                out.extend_from_slice(&word.to_le_bytes());
            }
            out.extend_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&size.to_le_bytes());
        }
        out.resize(data_offset(self.tensors.len()) as usize, 0);
        out
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        match self.tensors.last() {
            Some(last) => last.offset + last.size,
            None => data_offset(0),
        }
    }

    /// The tensors under the names of a Hugging Face checkpoint, in file 0 of the catalog.
    ///
    /// The rows of a block type are padded to whole blocks, so that [`TensorEntry::len`] can be more
    /// than the shape's elements take.
    ///
    /// # Errors
    ///
    /// Those of [`tensor_names`], which is asked for `n_layers`.
    pub fn catalog(&self, n_layers: Option<usize>) -> Result<TensorCatalog, BundleError> {
        let shapes: Vec<_> = (self.tensors.iter())
            .map(|tensor| (tensor.form.rows, tensor.form.cols))
            .collect();
        let model = &self.model;
        let names = tensor_names(model.arch, model.tied_embeddings, n_layers, &shapes)?;
        let mut catalog = TensorCatalog::default();
        for (tensor, name) in self.tensors.iter().zip(names.names) {
            let entry = TensorEntry {
                name,
                renamed_from: None,
                dtype: tensor.form.dtype,
                shape: tensor.form.shape(),
                file: 0,
                offset: tensor.offset,
                len: tensor.size,
            };
            (catalog.insert(entry)).expect("no name is given to two tensors");
        }
        Ok(catalog)
    }
}

/// What the bytes of tensor `i` belong to.
fn owner(i: usize) -> Owner {
    Owner {
        place: Location::Tensor(i),
        offset_field: "offset",
        size_field: "size",
    }
}

/// Where data may begin after `n` records.
fn data_offset(n: usize) -> u64 {
    (FIXED_BYTES + n as u64 * RECORD_BYTES).next_multiple_of(ALIGNMENT)
}

fn read_record(
    cursor: &mut Cursor<'_>,
    place: Location,
    arch: ArchType,
) -> Result<StoredTensor, BundleError> {
    let code = cursor.u32(place)?;
    let action = u8::try_from(code).ok();
    let action = action.and_then(|code| Action::from_code(code, arch));
    let action =
        action.ok_or_else(|| BundleError::field(place, "action", "a number from 0 to 7", code))?;
    let id = cursor.u32(place)?;
    let makes = |source| action.stored_type(source);
    let stored = SourceType::ALL.into_iter().filter_map(makes);
    let dtype = { stored }.find(|&dtype| type_id(dtype) == Some(id));
    let dtype = dtype.ok_or_else(|| {
        let expected = format_args!("the id of a type that action {action} makes").to_string();
        BundleError::field(place, "stored type", expected, id)
    })?;
    let mut dims = [0; 4];
    for dim in &mut dims {
        *dim = cursor.u32(place)?;
    }
    let [rows, cols, padded_rows, padded_cols] = dims;
    let form = TensorForm {
        action,
        dtype,
        rows,
        cols,
        padded_rows,
        padded_cols,
    };
    form.check(place, arch)?;
    Ok(StoredTensor {
        form,
        offset: cursor.u64(place)?,
        size: cursor.u64(place)?,
    })
}
