//! From the tensor list of a header to entries whose bytes are known to be within the file.

use crate::catalog::n_elements;
use crate::{DType, TensorEntry};

use super::read::{Cursor, Location};
use super::types::{self, Site};
use super::{GgufError, MAX_NAME_BYTES};

/// A tensor as the header describes it.
pub(super) struct RawTensor<'a> {
    pub(super) name: &'a str,
    /// Innermost first, as stored.
    dims: [u64; 4],
    n_dims: usize,
    type_id: u32,
    /// From the start of the data section.
    offset: u64,
}

impl<'a> RawTensor<'a> {
    /// Bytes of the shortest description: a name of one byte, no dimensions.
    pub(super) const MIN_BYTES: u64 = 8 + 1 + 4 + 4 + 8;

    /// Memory of a tensor while a header is read and files are joined, without its name: this, its
    /// entry, room to grow into, and two tables by name.
    pub(super) const MEMORY: u64 = 512;

    pub(super) fn read(cursor: &mut Cursor<'a>, index: u64) -> Result<RawTensor<'a>, GgufError> {
        let name = cursor.name(MAX_NAME_BYTES, Location::TensorName(index))?;
        // In the entry, and as the key of a table.
        cursor.charge(2 * name.len() as u64, Location::TensorName(index))?;
        let place = Location::Tensor(name);
        let n_dims = cursor.u32(place)?;
        if n_dims > 4 {
            return Err(GgufError::TensorDims {
                name: name.to_owned(),
                found: n_dims,
            });
        }
        let n_dims = n_dims as usize;
        let mut dims = [1; 4];
        for dim in &mut dims[..n_dims] {
            *dim = cursor.u64(place)?;
        }
        Ok(RawTensor {
            dims,
            n_dims,
            type_id: cursor.u32(place)?,
            offset: cursor.u64(place)?,
            name,
        })
    }

    fn too_large(&self) -> GgufError {
        GgufError::TensorTooLarge {
            name: self.name.to_owned(),
            shape: self.dims[..self.n_dims].iter().rev().copied().collect(),
        }
    }

    /// Elements, if they and every dimension can be counted on this machine.
    fn n_elements(&self) -> Result<u64, GgufError> {
        n_elements(self.dims.into_iter()).ok_or_else(|| self.too_large())
    }

    fn shape(&self) -> Vec<usize> {
        let dims = self.dims[..self.n_dims].iter().rev();
        dims.map(|&d| usize::try_from(d).expect("checked with the element count"))
            .collect()
    }
}

/// Resolves types, computes sizes, and checks that each tensor is aligned, in the file and alone.
///
/// Entries come in the order of `raw`. `data_offset` is where the data section starts.
pub(super) fn place_tensors(
    raw: &[RawTensor<'_>],
    data_offset: u64,
    alignment: u64,
    file_len: u64,
    architecture: Option<&str>,
) -> Result<Vec<TensorEntry>, GgufError> {
    let mut n_elements = Vec::with_capacity(raw.len());
    for tensor in raw {
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned {
                name: tensor.name.to_owned(),
                offset: tensor.offset,
                alignment,
            });
        }
        n_elements.push(tensor.n_elements()?);
    }

    // Empty tensors sort before the one that starts at the same byte.
    let mut order: Vec<usize> = (0..raw.len()).collect();
    order.sort_unstable_by_key(|&i| (raw[i].offset, n_elements[i]));
    let data_len = file_len.saturating_sub(data_offset);
    let mut space = vec![0; raw.len()];
    let mut end = data_len;
    for &i in order.iter().rev() {
        space[i] = end.saturating_sub(raw[i].offset);
        end = raw[i].offset;
    }

    let site = |i: usize| Site {
        name: raw[i].name,
        id: raw[i].type_id,
        n_elements: n_elements[i],
        k: raw[i].dims[0],
        space: space[i],
        alignment,
    };
    let q2_0 = types::q2_0_of_file((0..raw.len()).map(site));
    let mut entries = Vec::with_capacity(raw.len());
    for (i, tensor) in raw.iter().enumerate() {
        let dtype = types::resolve(&site(i), architecture, q2_0)?;
        let len = stored_bytes(tensor.name, dtype, tensor.dims[0], n_elements[i])?
            .ok_or_else(|| tensor.too_large())?;
        let out_of_file = |offset| GgufError::OutOfFile {
            name: tensor.name.to_owned(),
            offset,
            need: len,
            have: file_len,
        };
        let offset = data_offset
            .checked_add(tensor.offset)
            .ok_or_else(|| out_of_file(tensor.offset))?;
        if offset.checked_add(len).is_none_or(|end| end > file_len) {
            return Err(out_of_file(offset));
        }
        entries.push(TensorEntry {
            name: tensor.name.to_owned(),
            renamed_from: None,
            dtype,
            shape: tensor.shape(),
            file: 0,
            offset,
            len,
        });
    }

    for pair in order.windows(2) {
        let (first, second) = (&entries[pair[0]], &entries[pair[1]]);
        let end = first.offset + first.len;
        if end > second.offset {
            return Err(GgufError::Overlap {
                first: first.name.clone(),
                second: second.name.clone(),
                end,
                start: second.offset,
            });
        }
    }
    Ok(entries)
}

/// Bytes a tensor takes; `Ok(None)` if the size overflows.
///
/// The blocks of every type but I2_S stay within a row of `k` elements; I2_S runs over the tensor
/// as if it were flat.
pub(super) fn stored_bytes(
    name: &str,
    dtype: DType,
    k: u64,
    n_elements: u64,
) -> Result<Option<u64>, GgufError> {
    let (unit, found) = match dtype {
        DType::I2_S => ("the tensor", n_elements),
        _ => ("a row", k),
    };
    if !found.is_multiple_of(dtype.block_len() as u64) {
        return Err(GgufError::PartialBlock {
            name: name.to_owned(),
            dtype,
            unit,
            found,
            block: dtype.block_len(),
        });
    }
    Ok(dtype.tensor_bytes(n_elements))
}
