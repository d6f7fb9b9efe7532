//! The library in WebAssembly, as the Worker of the npm package drives it.
//!
//! JavaScript provides bytes and keeps them (`js`): a `Download` fetches a model's files and verifies them, a
//! `Model` is loaded from them and generates, on the CPU or on WebGPU. A `Conversion` makes a package of a model; an
//! `Offer` says what of one other tabs are given.
//! `packages/sterna/src/engine.d.ts` has the types of all exports; every failure is an `Error` with a `code`.

#![cfg(target_family = "wasm")]

mod convert;
mod download;
mod files;
mod js;
mod model;
mod offer;
mod options;
mod remote;
#[cfg(target_feature = "atomics")]
pub mod threads;

use sterna_delivery::hash::{Algorithm, digest_of};
use wasm_bindgen::prelude::wasm_bindgen;

/// The SHA-256 of `bytes`, in hexadecimal digits.
#[wasm_bindgen]
pub fn sha256(bytes: &[u8]) -> String {
    digest_of(Algorithm::Sha256, bytes).to_string()
}

/// The version of this library.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}
