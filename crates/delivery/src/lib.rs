//! Where the bytes of a model come from.
//!
//! For opening the files of a model and providing ranges of their bytes, so that an engine which requests
//! ranges can be fed without knowing their source; for fetching and verifying packages ([`package`],
//! [`fetch`]), and for storing them. Not for parsing what the bytes mean (`sterna-format` does that). Nothing
//! here prints, and the keys to trust are an argument.
//!
//! ```no_run
//! # fn main() -> Result<(), sterna_delivery::LocalFileError> {
//! let file = sterna_delivery::LocalFile::open("model.gguf")?;
//! let magic = file.slice(0, 4)?;
//! # let _ = magic;
//! # Ok(())
//! # }
//! ```

#[cfg(all(feature = "stores", not(target_family = "wasm")))]
// Either of the two features that need it uses a part.
#[cfg_attr(
    not(all(feature = "oci", feature = "object-store")),
    allow(dead_code, unused_imports)
)]
mod artifact;
#[cfg(all(any(feature = "stores", feature = "p2p"), not(target_family = "wasm")))]
// Each of the features that need it uses a part.
#[cfg_attr(
    not(all(feature = "oci", feature = "object-store")),
    allow(dead_code, unused_imports)
)]
mod blocking;
#[cfg(not(target_family = "wasm"))]
mod durable;
pub mod fetch;
pub mod hash;
#[cfg(not(target_family = "wasm"))]
mod local;
#[cfg(not(target_family = "wasm"))]
mod mmap;
pub mod package;
#[cfg(any(feature = "p2p", target_family = "wasm"))]
pub mod peers;
#[cfg(not(target_family = "wasm"))]
mod positioned;
#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub mod pull;
#[cfg(all(feature = "stores", not(target_family = "wasm")))]
pub mod push;
pub mod sign;
pub mod source;
#[cfg(not(target_family = "wasm"))]
pub mod store;

#[cfg(not(target_family = "wasm"))]
pub use durable::{PartialFile, remove_temporaries, sync_folder, write_whole};
#[cfg(not(target_family = "wasm"))]
pub use local::{LocalFile, LocalFileError};
