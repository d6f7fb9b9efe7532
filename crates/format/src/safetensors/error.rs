//! What can be wrong with safetensors files and their index.

use crate::DType;

/// Why a safetensors file, an index, or a set of files was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafeTensorsError {
    /// The given bytes end inside the header, but the file continues.
    #[error(
        "the safetensors header goes on after the bytes at hand: at least {at_least} are needed"
    )]
    NeedMore {
        /// Bytes from the start of the file without which parsing can't get further.
        at_least: u64,
    },
    /// The file itself ends too early.
    #[error("the file ends in {place}: {need} bytes needed, {have} left")]
    Truncated {
        /// What was being read.
        place: &'static str,
        /// Bytes needed from there on.
        need: u64,
        /// Bytes left in the file.
        have: u64,
    },
    /// The header is larger than the format allows, or this isn't a safetensors file.
    #[error("a header of {found} bytes, the limit is {limit}")]
    HeaderTooLarge {
        /// Bytes claimed.
        found: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// Reading the header or the index would take more memory than any real one does.
    #[error("{need} bytes of memory are needed, the limit is {limit}")]
    TooMuchMemory {
        /// Bytes of memory for everything up to where reading ended.
        need: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A tensor's name is longer than names may be.
    #[error("the name of a tensor takes {found} bytes, the limit is {limit}")]
    NameTooLong {
        /// Its length in bytes.
        found: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// The header isn't JSON, or not the JSON it should be.
    #[error("the header isn't as expected: {0}")]
    Header(#[source] serde_json::Error),
    /// A tensor's element type can't be read.
    #[error("tensor `{name}`: element type `{dtype}` isn't supported")]
    UnsupportedDType {
        /// The tensor.
        name: String,
        /// The type as the file spells it.
        dtype: String,
    },
    /// A tensor's bytes aren't where the file has data.
    #[error("tensor `{name}`: bytes {begin} to {end} of the data section, which has {have} bytes")]
    OutOfFile {
        /// The tensor.
        name: String,
        /// First byte, from the start of the data section.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Length of the data section.
        have: u64,
    },
    /// A tensor's bytes aren't as many as its shape and type take.
    #[error("tensor `{name}`: {dtype} of shape {shape:?} doesn't take {found} bytes")]
    WrongSize {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
        /// Its shape, outermost first.
        shape: Vec<usize>,
        /// Bytes it has.
        found: u64,
    },
    /// Two tensors share bytes.
    #[error(
        "tensors `{first}` and `{second}` overlap: one ends at byte {end}, the other starts at {start}"
    )]
    Overlap {
        /// The tensor that starts earlier.
        first: String,
        /// The other one.
        second: String,
        /// End of the first, from the start of the file.
        end: u64,
        /// Start of the second, from the start of the file.
        start: u64,
    },
    /// Bytes of the data section belong to no tensor, which the format forbids.
    #[error("bytes {begin} to {end} of the file belong to no tensor")]
    Hole {
        /// First such byte, from the start of the file.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The index isn't JSON, or not the JSON it should be.
    #[error("the index isn't as expected: {0}")]
    Index(#[source] serde_json::Error),
    /// The index is larger than any real one.
    #[error("an index of {found} bytes, the limit is {limit}")]
    IndexTooLarge {
        /// Bytes given.
        found: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// A file name in the index could reach outside the model's folder.
    #[error("the index places tensor `{tensor}` in `{file}`, which isn't a plain file name")]
    FileName {
        /// The tensor.
        tensor: String,
        /// The name found.
        file: String,
    },
    /// The index names a file that wasn't given.
    #[error("the index places tensor `{tensor}` in `{file}`, which isn't among the files")]
    MissingFile {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// The index names a tensor that its file doesn't have.
    #[error("the index places tensor `{tensor}` in `{file}`, which doesn't have it")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// A tensor is in another file than the index says.
    #[error("the index places tensor `{tensor}` in `{listed}`, but it is in `{file}`")]
    Misplaced {
        /// The tensor.
        tensor: String,
        /// Where it should be.
        listed: String,
        /// Where it is.
        file: String,
    },
    /// Two files have a tensor of the same name.
    #[error("tensor `{name}` occurs twice")]
    DuplicateTensor {
        /// The tensor.
        name: String,
    },
    /// A type that safetensors has no name for was to be written.
    #[error("tensor `{name}`: safetensors has no element type {dtype}")]
    UnwritableType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
    },
    /// A tensor to be written is too large to count.
    #[error("tensor `{name}`: the size of shape {shape:?} overflows")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}
