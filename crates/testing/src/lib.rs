//! Shared by the tests of several crates: `gpu` decides whether a test that needs a GPU runs, `fuzz` has the
//! fuzzers' findings, `stores` runs servers that packages are kept on.
#![forbid(unsafe_code)]

#[cfg(feature = "fuzz")]
pub mod fuzz;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "stores")]
pub mod stores;
