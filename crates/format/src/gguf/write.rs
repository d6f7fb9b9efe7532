//! Writing GGUF headers, version 3.

use crate::catalog::n_elements;
use crate::{DType, FileLayout, TensorCatalog, TensorEntry};

use super::layout::stored_bytes;
use super::read::Location;
use super::value::write_str;
use super::{GgufError, Metadata, alignment_of, types};

/// Lays out a GGUF file: metadata first, then tensors one by one, then [`Writer::finish`].
///
/// It does no I/O; the caller writes the header and puts each tensor's bytes where the layout says.
///
/// ```
/// use sterna_format::{DType, gguf::{Gguf, Metadata, Value, Writer}};
///
/// let mut metadata = Metadata::new();
/// metadata.insert("general.architecture", Value::String("llama".into()))?;
/// let mut writer = Writer::new(metadata)?;
/// writer.tensor("output_norm.weight", DType::F32, &[4])?;
/// let layout = writer.finish();
///
/// let gguf = Gguf::parse(&layout.header, layout.file_len)?;
/// assert_eq!(gguf.tensors(), layout.tensors);
/// # Ok::<(), sterna_format::gguf::GgufError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Writer {
    metadata: Metadata,
    alignment: u64,
    /// Offsets are from the start of the data section until the header's length is known.
    tensors: TensorCatalog,
    data_len: u64,
}

impl Writer {
    /// Starts a file. Tensors are aligned to `general.alignment`, 32 if absent.
    ///
    /// # Errors
    ///
    /// [`GgufError::Alignment`] if that key holds something unusable.
    pub fn new(metadata: Metadata) -> Result<Writer, GgufError> {
        Ok(Writer {
            alignment: alignment_of(&metadata)?,
            metadata,
            tensors: TensorCatalog::default(),
            data_len: 0,
        })
    }

    /// Appends a tensor; `shape` is row-major, outermost first.
    ///
    /// [`DType::Q2_0_G128`] is written as [`DType::PQ2_0`], the same block under an id of its own,
    /// because readers can't always tell it from [`DType::Q2_0`].
    ///
    /// # Errors
    ///
    /// If GGUF has no id for the type, the name is empty or taken, the shape has more than 4 dimensions or
    /// doesn't fill whole blocks, or a size overflows.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<(), GgufError> {
        let name = name.into();
        if name.is_empty() {
            let place = Location::TensorName(self.tensors.len() as u64).to_string();
            return Err(GgufError::EmptyName { place });
        }
        let dtype = match dtype {
            DType::Q2_0_G128 => DType::PQ2_0,
            other => other,
        };
        if types::type_id(dtype).is_none() {
            return Err(GgufError::UnwritableType { name, dtype });
        }
        if shape.len() > 4 {
            let found = u32::try_from(shape.len()).unwrap_or(u32::MAX);
            return Err(GgufError::TensorDims { name, found });
        }
        let dims: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        let too_large = || GgufError::TensorTooLarge {
            name: name.clone(),
            shape: dims.clone(),
        };
        let n_elements = n_elements(dims.iter().copied()).ok_or_else(too_large)?;
        let k = dims.last().map_or(1, |&k| k);
        let len = stored_bytes(&name, dtype, k, n_elements)?.ok_or_else(too_large)?;
        let end = self
            .data_len
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(self.alignment))
            .ok_or_else(too_large)?;
        self.tensors
            .insert(TensorEntry {
                name,
                renamed_from: None,
                dtype,
                shape: shape.to_vec(),
                file: 0,
                offset: self.data_len,
                len,
            })
            .map_err(|entry| GgufError::DuplicateTensor { name: entry.name })?;
        self.data_len = end;
        Ok(())
    }

    /// Writes the header and says where the tensors go.
    pub fn finish(self) -> FileLayout {
        let mut header = Vec::new();
        header.extend(super::MAGIC);
        header.extend(3_u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            write_str(key, &mut header);
            value.write(&mut header);
        }
        for tensor in self.tensors.iter() {
            write_str(&tensor.name, &mut header);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                header.extend((dim as u64).to_le_bytes());
            }
            let id = types::type_id(tensor.dtype).expect("checked when the tensor was added");
            header.extend(id.to_le_bytes());
            header.extend(tensor.offset.to_le_bytes());
        }
        let alignment = usize::try_from(self.alignment).expect("at most 1 MiB");
        header.resize(header.len().next_multiple_of(alignment), 0);
        let data_offset = header.len() as u64;
        let mut tensors: Vec<TensorEntry> = self.tensors.iter().cloned().collect();
        for tensor in &mut tensors {
            tensor.offset += data_offset;
        }
        FileLayout {
            header,
            tensors,
            file_len: data_offset + self.data_len,
        }
    }
}
