//! Writing safetensors headers.

use std::collections::BTreeMap;

use serde_json::json;

use crate::catalog::n_elements;
use crate::{DType, FileLayout, TensorCatalog, TensorEntry};

use super::{DTYPES, SafeTensorsError};

/// Lays out a safetensors file: tensors one by one, then [`Writer::finish`].
///
/// It does no I/O; the caller writes the header and then the tensors end to end.
///
/// ```
/// use sterna_format::{DType, safetensors::{SafeTensors, Writer}};
///
/// let mut writer = Writer::new([("format".to_owned(), "pt".to_owned())].into());
/// writer.tensor("logits", DType::F32, &[40, 384])?;
/// let layout = writer.finish();
///
/// let file = SafeTensors::parse(&layout.header, layout.file_len)?;
/// assert_eq!(file.tensors(), layout.tensors);
/// # Ok::<(), sterna_format::safetensors::SafeTensorsError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Writer {
    metadata: BTreeMap<String, String>,
    /// Offsets are from the start of the data section until the header's length is known.
    tensors: TensorCatalog,
    data_len: u64,
}

impl Writer {
    /// Starts a file with these strings under `__metadata__`.
    pub fn new(metadata: BTreeMap<String, String>) -> Writer {
        Writer {
            metadata,
            tensors: TensorCatalog::default(),
            data_len: 0,
        }
    }

    /// Appends a tensor; `shape` is row-major, outermost first.
    ///
    /// Readers that want aligned data get it if types are added from the widest to the narrowest.
    ///
    /// # Errors
    ///
    /// If safetensors doesn't have the type, the name is taken, or a size overflows.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<(), SafeTensorsError> {
        let name = name.into();
        if !DTYPES.contains(&dtype) {
            return Err(SafeTensorsError::UnwritableType { name, dtype });
        }
        let placed = n_elements(shape.iter().map(|&d| d as u64))
            .and_then(|n| dtype.tensor_bytes(n))
            .and_then(|len| Some((len, self.data_len.checked_add(len)?)));
        let Some((len, end)) = placed else {
            return Err(SafeTensorsError::TensorTooLarge {
                name,
                shape: shape.to_vec(),
            });
        };
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
            .map_err(|entry| SafeTensorsError::DuplicateTensor { name: entry.name })?;
        self.data_len = end;
        Ok(())
    }

    /// Writes the header and says where the tensors go.
    pub fn finish(self) -> FileLayout {
        let metadata = (!self.metadata.is_empty())
            .then(|| format!("{}:{}", json!("__metadata__"), json!(self.metadata)));
        let tensors = self.tensors.iter().map(|t| {
            let (name, dtype, shape) = (json!(t.name), json!(t.dtype.name()), json!(t.shape));
            let (begin, end) = (t.offset, t.offset + t.len);
            format!(r#"{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":[{begin},{end}]}}"#)
        });
        let entries: Vec<String> = metadata.into_iter().chain(tensors).collect();
        let mut text = format!("{{{}}}", entries.join(","));
        while !text.len().is_multiple_of(8) {
            text.push(' ');
        }
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text.as_bytes());
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
