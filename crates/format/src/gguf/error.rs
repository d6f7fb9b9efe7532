//! What can be wrong with a GGUF file.

use crate::DType;

/// Why a GGUF file, or a set of split files, was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The given bytes end inside the header, but the file continues.
    ///
    /// `at_least` is more than was given and no more than the file holds. A reader over a network
    /// should fetch the larger of `at_least` and twice what it has, and parse again.
    #[error("the GGUF header goes on after the bytes at hand: at least {at_least} are needed")]
    NeedMore {
        /// Bytes from the start of the file without which parsing can't get further.
        at_least: u64,
    },
    /// The file itself ends too early.
    #[error("the file ends in {place}: {need} bytes needed, {have} left")]
    Truncated {
        /// What was being read.
        place: String,
        /// Bytes needed from there on; saturated if the claim overflows.
        need: u64,
        /// Bytes left in the file.
        have: u64,
    },
    /// The first four bytes aren't `GGUF`.
    #[error("not a GGUF file: it starts with {found:02x?}, expected 47 47 55 46 (\"GGUF\")")]
    NotGguf {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A version that isn't read.
    #[error("GGUF version {found} isn't supported, expected 2 or 3; convert the file again")]
    Version {
        /// The version the file states.
        found: u32,
    },
    /// A file for big-endian machines.
    #[error("big-endian GGUF files aren't supported; convert the file to little-endian")]
    BigEndian,
    /// The header is larger than any real one.
    #[error("{place}: the header would reach {need} bytes, the limit is {limit}")]
    HeaderTooLarge {
        /// What was being read.
        place: String,
        /// Where it would end, in bytes from the start of the file.
        need: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// Reading the header would take more memory than any real one does.
    #[error("{place}: the header would take {need} bytes of memory, the limit is {limit}")]
    TooMuchMemory {
        /// What was being read.
        place: String,
        /// Bytes of memory for everything up to there; saturated if the claim overflows.
        need: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A key or a tensor has an empty name.
    #[error("{place} is empty")]
    EmptyName {
        /// What was being read.
        place: String,
    },
    /// A name is longer than names may be.
    #[error("{place}: a name of {found} bytes, the limit is {limit}")]
    NameTooLong {
        /// What was being read.
        place: String,
        /// Bytes claimed.
        found: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A string isn't UTF-8.
    #[error("{place}: the string isn't UTF-8 (first bad byte at {at} of {len})")]
    NotUtf8 {
        /// What was being read; names the key or tensor.
        place: String,
        /// Offset of the first bad byte in the string.
        at: usize,
        /// Length of the string in bytes.
        len: usize,
    },
    /// A metadata value has a type id that GGUF doesn't define.
    #[error("metadata key `{key}`: value type {id} isn't one of 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// The id found.
        id: u32,
    },
    /// A boolean is neither 0 nor 1.
    #[error("metadata key `{key}`: a boolean of {found}, expected 0 or 1")]
    InvalidBool {
        /// The key.
        key: String,
        /// The byte found.
        found: u8,
    },
    /// Arrays inside arrays, too deep.
    #[error("metadata key `{key}`: arrays nested deeper than {limit}")]
    Nesting {
        /// The key.
        key: String,
        /// The deepest nesting that is accepted.
        limit: usize,
    },
    /// A key occurs twice.
    #[error("metadata key `{key}` occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// `general.alignment` is unusable.
    #[error("metadata key `general.alignment`: {found} isn't a power of two from 1 to {limit}")]
    Alignment {
        /// The value found.
        found: u64,
        /// The largest that is accepted.
        limit: u64,
    },
    /// A key that is needed is absent.
    #[error("metadata key `{key}` is missing, expected {expected}")]
    MissingKey {
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A key holds another type than requested.
    #[error("metadata key `{key}`: expected {expected}, found {found}")]
    WrongType {
        /// The key.
        key: String,
        /// What was requested.
        expected: &'static str,
        /// What it holds.
        found: String,
    },
    /// A tensor has more dimensions than GGUF allows.
    #[error("tensor `{name}`: {found} dimensions, the limit is 4")]
    TensorDims {
        /// The tensor.
        name: String,
        /// Dimensions claimed.
        found: u32,
    },
    /// A tensor's size overflows.
    #[error("tensor `{name}`: the size of shape {shape:?} overflows")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its dimensions, outermost first.
        shape: Vec<u64>,
    },
    /// A tensor type that isn't defined.
    #[error("tensor `{name}`: unknown type id {id}")]
    UnknownTensorType {
        /// The tensor.
        name: String,
        /// The id found.
        id: u32,
    },
    /// A tensor type that is known but can't be read.
    #[error("tensor `{name}`: type {kind} (id {id}) isn't supported; {advice}")]
    RefusedTensorType {
        /// The tensor.
        name: String,
        /// The id found.
        id: u32,
        /// The type's name.
        kind: &'static str,
        /// Why, and what to do instead.
        advice: &'static str,
    },
    /// A tensor's elements don't fill whole blocks.
    #[error("tensor `{name}`: {found} elements in {unit} don't fill {dtype} blocks of {block}")]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
        /// "a row", or "the tensor" for types whose blocks run across rows.
        unit: &'static str,
        /// Elements found.
        found: u64,
        /// Elements of one block.
        block: usize,
    },
    /// A tensor name occurs twice, in one file or in two parts.
    #[error("tensor `{name}` occurs twice")]
    DuplicateTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor's offset isn't aligned.
    #[error("tensor `{name}`: offset {offset} isn't a multiple of the alignment {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor reaches beyond the end of the file.
    #[error("tensor `{name}`: needs {need} bytes at offset {offset}, the file has {have} bytes")]
    OutOfFile {
        /// The tensor.
        name: String,
        /// Its first byte, from the start of the file.
        offset: u64,
        /// Its size in bytes.
        need: u64,
        /// The length of the file.
        have: u64,
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
    /// A list of no files was given.
    #[error("a model needs at least one GGUF file")]
    NoParts,
    /// A part of a split set says something else than its place demands.
    #[error("part {part} of the split set: `{key}` should be {expected}, found {found}")]
    SplitPart {
        /// Position in the list given, counted from 1.
        part: usize,
        /// The key.
        key: &'static str,
        /// What the key must say.
        expected: u64,
        /// What it says, "nothing" if absent.
        found: String,
    },
    /// Two parts disagree.
    #[error("part {part} of the split set: metadata key `{key}` differs from an earlier part")]
    SplitConflict {
        /// Position in the list given, counted from 1.
        part: usize,
        /// The key.
        key: String,
    },
    /// A file name that looks like a part of a split set but isn't a usable first part.
    #[error("`{name}`: {reason}")]
    SplitName {
        /// The name given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A type that GGUF has no id for was to be written.
    #[error("tensor `{name}`: GGUF has no type id for {dtype}")]
    UnwritableType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: DType,
    },
}
