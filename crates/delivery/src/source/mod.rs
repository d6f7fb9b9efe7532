//! Where bytes come from: web servers and folders.

#[cfg(not(target_family = "wasm"))]
mod folder;
#[cfg(all(feature = "http", not(target_family = "wasm")))]
mod http;
pub mod hugging_face;
#[cfg(not(target_family = "wasm"))]
mod open;
mod url;

#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub use self::http::{HttpOptions, HttpSource};
#[cfg(not(target_family = "wasm"))]
pub(crate) use self::open::body_fault;
#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub(crate) use self::url::percent_decoded;
pub use self::url::{Url, UrlError};
#[cfg(not(target_family = "wasm"))]
pub use self::{
    folder::FolderSource,
    open::{Answer, Source},
};
