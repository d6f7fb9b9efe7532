//! Where bytes come from: web servers, folders, object stores and registries.

#[cfg(all(feature = "stores", not(target_family = "wasm")))]
pub(crate) mod artifact;
#[cfg(all(feature = "object-store", not(target_family = "wasm")))]
pub(crate) mod bucket;
#[cfg(not(target_family = "wasm"))]
mod folder;
#[cfg(all(feature = "http", not(target_family = "wasm")))]
mod http;
pub mod hugging_face;
#[cfg(not(target_family = "wasm"))]
mod open;
#[cfg(all(feature = "oci", not(target_family = "wasm")))]
pub(crate) mod registry;
mod url;

#[cfg(all(feature = "object-store", not(target_family = "wasm")))]
pub use self::bucket::{Bucket, BucketError};
#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub use self::http::{HttpOptions, HttpSource};
#[cfg(not(target_family = "wasm"))]
pub(crate) use self::open::{asked_for, body_fault};
#[cfg(all(feature = "oci", not(target_family = "wasm")))]
pub use self::registry::{Registry, RegistryAddress, RegistryError};
#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub(crate) use self::url::percent_decoded;
pub use self::url::{Url, UrlError};
#[cfg(not(target_family = "wasm"))]
pub use self::{
    folder::FolderSource,
    open::{Answer, Source},
};

/// An error and its causes in one line, each once, and not longer than people read.
#[cfg(all(any(feature = "stores", feature = "p2p"), not(target_family = "wasm")))]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    match text.char_indices().nth(600) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
