//! Shared by the tests of several crates: `gpu` decides whether a test that needs a GPU runs, `fuzz` has the
//! fuzzers' findings, `stores` runs servers that packages are kept on, `schemas` makes up what answers are to match.
#![forbid(unsafe_code)]

#[cfg(feature = "fuzz")]
pub mod fuzz;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "schemas")]
pub mod schemas;
#[cfg(feature = "stores")]
pub mod stores;
