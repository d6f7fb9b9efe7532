//! GGUF, versions 2 and 3, little-endian; see `docs/formats/gguf.md` for the byte layout.
//!
//! [`Gguf::parse`] turns the first bytes of a file into a validated index, from which everything
//! else is a view that can't fail. [`Model::from_parts`] joins the parts of a split set, or takes
//! the one file there is. [`Writer`] is the inverse.

mod error;
mod layout;
mod metadata;
mod read;
mod split;
mod types;
mod value;
mod write;

pub use error::GgufError;
pub use metadata::Metadata;
pub use split::{Model, parse_split_name, split_names};
pub(crate) use types::type_id;
pub use value::{Array, Strings, Value};
pub use write::Writer;

use std::collections::HashSet;

use crate::TensorEntry;
use layout::RawTensor;
use read::{Cursor, Location};

const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// The largest vocabularies in use (256 thousand tokens, 515 thousand merges) take half of this.
const MAX_HEADER_BYTES: u64 = 32 << 20;
/// What a header may take in memory. The same vocabularies take less than two thirds.
const MAX_HEADER_MEMORY: u64 = 24 << 20;
/// A metadata entry in memory without its key and what its value holds: list and table, grown.
const ENTRY_MEMORY: u64 = 384;
/// The specification's limit for keys; tensor names are shorter.
const MAX_NAME_BYTES: u64 = 65_535;

/// The header of one GGUF file, checked.
///
/// Every tensor in it is aligned, within the file and doesn't overlap others.
#[derive(Debug, Clone)]
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorEntry>,
    data_offset: u64,
}

impl Gguf {
    /// Parses the header at the start of `prefix`, the first bytes of a file of `file_len` bytes.
    ///
    /// The prefix may be the whole file or any part of it from the start. Memory stays within
    /// 24 MiB, whatever the file claims.
    ///
    /// # Errors
    ///
    /// [`GgufError::NeedMore`] if the header continues after the prefix; every other error means
    /// that the file is bad or not supported, and says where and why.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<Gguf, GgufError> {
        let mut cursor = Cursor::new(prefix, file_len);
        let version = read_version(&mut cursor)?;
        let n_tensors = cursor.u64(Location::Start)?;
        let n_entries = cursor.u64(Location::Start)?;

        // The shortest entry: a key of one byte, a type and one byte.
        let place = Location::Entries(n_entries);
        let n = cursor.ensure_items(n_entries, 8 + 1 + 4 + 1, ENTRY_MEMORY, place)?;
        let mut metadata = Metadata::with_capacity(n);
        for i in 0..n_entries {
            let key = cursor.name(MAX_NAME_BYTES, Location::Key(i))?;
            // In the list, and as the key of the table.
            cursor.charge(2 * key.len() as u64, Location::Key(i))?;
            let value = Value::read(&mut cursor, key)?;
            metadata.insert(key, value)?;
        }
        let alignment = alignment_of(&metadata)?;

        let place = Location::Tensors(n_tensors);
        let n = cursor.ensure_items(n_tensors, RawTensor::MIN_BYTES, RawTensor::MEMORY, place)?;
        let mut raw = Vec::with_capacity(n);
        let mut names = HashSet::with_capacity(n);
        for i in 0..n_tensors {
            let tensor = RawTensor::read(&mut cursor, i)?;
            if !names.insert(tensor.name) {
                let name = tensor.name.to_owned();
                return Err(GgufError::DuplicateTensor { name });
            }
            raw.push(tensor);
        }
        let data_offset = cursor.pos().next_multiple_of(alignment);
        let architecture = metadata.architecture()?;
        let tensors = layout::place_tensors(&raw, data_offset, alignment, file_len, architecture)?;
        Ok(Gguf {
            version,
            metadata,
            tensors,
            data_offset,
        })
    }

    /// The version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// What the file says about the model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in header order; `file` is 0.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Where the tensor data starts, in bytes from the start of the file. A file without tensors
    /// may end before.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let magic: [u8; 4] = cursor.array(Location::Start)?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf { found: magic });
    }
    match cursor.u32(Location::Start)? {
        version @ (2 | 3) => Ok(version),
        version if (1..=3).contains(&version.swap_bytes()) => Err(GgufError::BigEndian),
        found => Err(GgufError::Version { found }),
    }
}

fn alignment_of(metadata: &Metadata) -> Result<u64, GgufError> {
    let found = metadata
        .get_u64(ALIGNMENT_KEY)?
        .unwrap_or(DEFAULT_ALIGNMENT);
    if !found.is_power_of_two() || found > MAX_ALIGNMENT {
        return Err(GgufError::Alignment {
            found,
            limit: MAX_ALIGNMENT,
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn sample() -> crate::FileLayout {
        let mut metadata = Metadata::new();
        metadata.insert(ALIGNMENT_KEY, Value::U32(64)).unwrap();
        let mut writer = Writer::new(metadata).unwrap();
        writer.tensor("scalar", DType::F32, &[]).unwrap();
        writer.tensor("empty", DType::F16, &[0, 3]).unwrap();
        writer.tensor("packed", DType::I2_S, &[2, 64]).unwrap();
        writer.finish()
    }

    #[test]
    fn version_2_has_the_same_layout() {
        let crate::FileLayout {
            mut header,
            tensors,
            file_len,
        } = sample();
        for version in [2, 3] {
            header[4] = version;
            let gguf = Gguf::parse(&header, file_len).unwrap();
            assert_eq!(gguf.version(), u32::from(version));
            assert_eq!(gguf.tensors(), tensors);
        }
    }

    #[test]
    fn tensors_stand_at_aligned_offsets_with_their_trailers() {
        let layout = sample();
        let data = layout.header.len() as u64;
        let places: Vec<_> = layout
            .tensors
            .iter()
            .map(|t| (t.offset - data, t.len))
            .collect();
        // An empty tensor takes no space, so the next one starts where it does.
        assert_eq!(places, [(0, 4), (64, 0), (64, 128 / 4 + 32)]);
        assert_eq!(layout.file_len, data + 128);
    }

    #[test]
    fn the_writer_refuses_what_no_reader_takes() {
        let mut writer = Writer::new(Metadata::new()).unwrap();
        for (dtype, shape, message) in [
            (
                DType::Bool,
                &[1][..],
                "tensor `t`: GGUF has no type id for BOOL",
            ),
            (
                DType::F32,
                &[1; 5],
                "tensor `t`: 5 dimensions, the limit is 4",
            ),
            (
                DType::Q8_0,
                &[33],
                "tensor `t`: 33 elements in a row don't fill Q8_0 blocks of 32",
            ),
            (
                DType::F32,
                &[usize::MAX, 4],
                "tensor `t`: the size of shape [18446744073709551615, 4] overflows",
            ),
        ] {
            let error = writer.tensor("t", dtype, shape).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        writer.tensor("t", DType::F32, &[1]).unwrap();
        let error = writer.tensor("t", DType::F32, &[1]).unwrap_err();
        assert_eq!(error.to_string(), "tensor `t` occurs twice");
    }
}
