//! safetensors headers and `model.safetensors.index.json`; see `docs/formats/safetensors.md`.
//!
//! [`SafeTensors::parse`] turns the first bytes of a file into a validated index; [`merge`] joins
//! the files of a sharded checkpoint, checked against its [`Index`]; [`Writer`] is the inverse.

mod error;
mod header;
mod index;
mod write;

use std::collections::BTreeMap;

pub use error::SafeTensorsError;
pub use index::{Index, merge};
pub use write::Writer;

use crate::catalog::n_elements;
use crate::{DType, TensorEntry};
use header::{Described, Header, Spelling};

/// A header of 100,000 tensors takes 15 MB. The reference implementation allows 100 MB.
const MAX_HEADER_BYTES: u64 = 18 << 20;

/// The header of one safetensors file, checked.
///
/// The tensors fill the data section: each is within the file, and no byte belongs to two or to none.
/// A tensor may start at any byte, whatever its element type: alignment is the reader's matter.
#[derive(Debug, Clone)]
pub struct SafeTensors {
    metadata: BTreeMap<String, String>,
    tensors: Vec<TensorEntry>,
    data_offset: u64,
}

impl SafeTensors {
    /// Parses the header at the start of `prefix`, the first bytes of a file of `file_len` bytes.
    ///
    /// The prefix may be the whole file or any part of it from the start. Memory stays within
    /// 32 MiB, whatever the file describes.
    ///
    /// # Errors
    ///
    /// [`SafeTensorsError::NeedMore`] if the header continues after the prefix; every other error
    /// means that the file is bad or not supported, and says where and why.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<SafeTensors, SafeTensorsError> {
        let (json, data_offset) = header_json(prefix, file_len)?;
        let Header { metadata, tensors } =
            header::parse(json, data_offset, file_len - data_offset)?;
        check_names(&tensors)?;
        check_cover(&tensors, data_offset, file_len)?;
        Ok(SafeTensors {
            metadata,
            tensors,
            data_offset,
        })
    }

    /// The strings under `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors in header order, under the names the file gives them; `file` is 0.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Where the tensor data starts, in bytes from the start of the file.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }
}

/// The JSON text of the header, and where the data section starts.
fn header_json(prefix: &[u8], file_len: u64) -> Result<(&[u8], u64), SafeTensorsError> {
    if file_len < 8 {
        return Err(SafeTensorsError::Truncated {
            place: "the header length",
            need: 8,
            have: file_len,
        });
    }
    let Some((len, rest)) = prefix.split_first_chunk::<8>() else {
        return Err(SafeTensorsError::NeedMore { at_least: 8 });
    };
    let len = u64::from_le_bytes(*len);
    if len > MAX_HEADER_BYTES {
        return Err(SafeTensorsError::HeaderTooLarge {
            found: len,
            limit: MAX_HEADER_BYTES,
        });
    }
    if len > file_len - 8 {
        return Err(SafeTensorsError::Truncated {
            place: "the header",
            need: len,
            have: file_len - 8,
        });
    }
    let at_least = 8 + len;
    let json = usize::try_from(len).ok().and_then(|len| rest.get(..len));
    let json = json.ok_or(SafeTensorsError::NeedMore { at_least })?;
    Ok((json, at_least))
}

fn place_tensor(
    name: String,
    described: Described,
    data_offset: u64,
    data_len: u64,
) -> Result<TensorEntry, SafeTensorsError> {
    let dtype = match described.dtype {
        Spelling::Known(dtype) => dtype,
        Spelling::Unknown(dtype) => {
            return Err(SafeTensorsError::UnsupportedDType { name, dtype });
        }
    };
    let (begin, end) = described.data_offsets;
    if begin > end || end > data_len {
        return Err(SafeTensorsError::OutOfFile {
            name,
            begin,
            end,
            have: data_len,
        });
    }
    let expected =
        n_elements(described.shape.iter().map(|&d| d as u64)).and_then(|n| dtype.tensor_bytes(n));
    if expected != Some(end - begin) {
        return Err(SafeTensorsError::WrongSize {
            name,
            dtype,
            shape: described.shape,
            found: end - begin,
        });
    }
    Ok(TensorEntry {
        name,
        renamed_from: None,
        dtype,
        shape: described.shape,
        file: 0,
        offset: data_offset + begin,
        len: end - begin,
    })
}

/// Checks that no name occurs twice.
fn check_names(tensors: &[TensorEntry]) -> Result<(), SafeTensorsError> {
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SafeTensorsError::DuplicateTensor {
            name: pair[0].to_owned(),
        }),
        None => Ok(()),
    }
}

/// Checks that the tensors are contiguous and fill the data section.
fn check_cover(
    tensors: &[TensorEntry],
    data_offset: u64,
    file_len: u64,
) -> Result<(), SafeTensorsError> {
    let mut order: Vec<&TensorEntry> = tensors.iter().collect();
    order.sort_unstable_by_key(|t| (t.offset, t.len));
    let mut end = data_offset;
    let mut previous = None;
    for tensor in order {
        if tensor.offset < end {
            return Err(SafeTensorsError::Overlap {
                first: previous
                    .map_or("the header", |t: &TensorEntry| &t.name)
                    .to_owned(),
                second: tensor.name.clone(),
                end,
                start: tensor.offset,
            });
        }
        if tensor.offset > end {
            return Err(SafeTensorsError::Hole {
                begin: end,
                end: tensor.offset,
            });
        }
        end += tensor.len;
        previous = Some(tensor);
    }
    if end != file_len {
        return Err(SafeTensorsError::Hole {
            begin: end,
            end: file_len,
        });
    }
    Ok(())
}

/// Types that files spell and [`DType`] has.
const DTYPES: [DType; 20] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
    DType::Bool,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::C64,
    DType::F8_E4M3,
    DType::F8_E5M2,
    DType::F8_E8M0,
    DType::F6_E2M3,
    DType::F6_E3M2,
    DType::F4,
];

fn dtype_of(spelling: &str) -> Option<DType> {
    DTYPES.into_iter().find(|d| d.name() == spelling)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with this header text and `data_len` bytes of data.
    fn file(header: &str, data_len: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data_len, 0);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<SafeTensors, SafeTensorsError> {
        SafeTensors::parse(bytes, bytes.len() as u64)
    }

    #[test]
    fn a_good_file() {
        let bytes = file(
            r#"{"__metadata__":{"format":"pt"},
                "b":{"dtype":"BF16","shape":[2,1],"data_offsets":[3,7]},
                "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3],"later":[{}]},
                "s":{"dtype":"F32","shape":[],"data_offsets":[7,11]},
                "z":{"dtype":"F32","shape":[0,5],"data_offsets":[7,7]}}   "#,
            11,
        );
        let st = parse(&bytes).unwrap();
        assert_eq!(st.metadata()["format"], "pt");
        let names: Vec<_> = st.tensors().iter().map(|t| &*t.name).collect();
        assert_eq!(names, ["b", "a", "s", "z"]);
        assert_eq!(st.tensors()[0].offset, st.data_offset() + 3);
        assert_eq!(st.tensors()[0].shape, [2, 1]);
        for n in 0..bytes.len() - 11 {
            match SafeTensors::parse(&bytes[..n], bytes.len() as u64) {
                Err(SafeTensorsError::NeedMore { at_least }) => {
                    assert!(at_least > n as u64 && at_least <= st.data_offset());
                }
                other => panic!("{n}: {other:?}"),
            }
        }
    }

    #[test]
    fn bad_files_say_what_and_where() {
        let long = format!(
            r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#,
            "1,".repeat(70)
        );
        for (header, data_len, message) in [
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
                1,
                "tensor `a`: bytes 0 to 2 of the data section, which has 1 bytes",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#,
                2,
                "tensor `a`: bytes 2 to 0 of the data section, which has 2 bytes",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
                4,
                "tensor `a`: F32 of shape [2] doesn't take 4 bytes",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}"#,
                0,
                "tensor `a`: U8 of shape [4294967296, 4294967296, 0] doesn't take 0 bytes",
            ),
            (
                r#"{"a":{"dtype":"F9","shape":[1],"data_offsets":[0,1]}}"#,
                1,
                "tensor `a`: element type `F9` isn't supported",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
                3,
                "tensors `a` and `b` overlap: one ends at byte 115, the other starts at 114",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
                "bytes 61 to 62 of the file belong to no tensor",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
                2,
                "bytes 62 to 63 of the file belong to no tensor",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
                "tensor `a` occurs twice",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
                1,
                "the header isn't as expected: invalid value: integer `-1`, expected usize at line 1 column 30",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1]}}"#,
                1,
                "the header isn't as expected: missing field `data_offsets` at line 1 column 31",
            ),
            (
                &*long,
                1,
                "the header isn't as expected: tensors of more than 64 dimensions aren't supported at line 1 column 158",
            ),
            (
                "[]",
                0,
                "the header isn't as expected: invalid type: sequence, expected a map from names to tensors at line 1 column 0",
            ),
            (
                "{} x",
                0,
                "the header isn't as expected: trailing characters at line 1 column 4",
            ),
        ] {
            assert_eq!(
                parse(&file(header, data_len)).unwrap_err().to_string(),
                message
            );
        }
        let mut not_utf8 = file(r#"{"__metadata__":{"a":"?"}}"#, 0);
        let at = not_utf8.iter().position(|&b| b == b'?').unwrap();
        not_utf8[at] = 0xff;
        assert!(
            parse(&not_utf8)
                .unwrap_err()
                .to_string()
                .contains("invalid unicode")
        );
    }

    #[test]
    fn lengths_are_checked_before_anything_is_read() {
        for (len, file_len, message) in [
            (
                u64::MAX,
                1 << 40,
                "a header of 18446744073709551615 bytes, the limit is 18874368",
            ),
            (
                100,
                50,
                "the file ends in the header: 100 bytes needed, 42 left",
            ),
            (
                0,
                4,
                "the file ends in the header length: 8 bytes needed, 4 left",
            ),
            (
                100,
                500,
                "the safetensors header goes on after the bytes at hand: at least 108 are needed",
            ),
        ] {
            let error = SafeTensors::parse(&len.to_le_bytes(), file_len).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
