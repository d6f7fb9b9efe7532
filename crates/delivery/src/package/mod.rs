//! Reading packages: their files, their signatures, and which of several sources to trust.
//!
//! What needs no I/O compiles for every target: [`Contents`] lists the files of a manifest with their sizes
//! and digests, and [`Offer`] decides over bytes, however they arrived. The keys to trust are an argument.

mod contents;
mod error;
mod offer;
#[cfg(not(target_family = "wasm"))]
mod stored;

#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub(crate) use self::stored::group_spans;
#[cfg(not(target_family = "wasm"))]
pub use self::stored::{SignatureRefusal, SignatureState};
pub use self::{
    contents::{CONFIG_FILE, Contents, HashedFile, hashed_files, shard_blocks},
    error::PackageError,
    offer::{Offer, Rejected, check_json, check_signature, signature_text},
};

/// The largest file other than weights that is fetched, read or served: no parser of ours takes a larger one,
/// and the largest `tokenizer.json` in use have about 35 MB.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
