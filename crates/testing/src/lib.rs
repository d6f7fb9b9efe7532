//! Shared by the tests of several crates: `gpu` decides whether a test that needs a GPU runs, `fuzz` has the
//! fuzzers' findings.
#![forbid(unsafe_code)]

#[cfg(feature = "fuzz")]
pub mod fuzz;
#[cfg(feature = "gpu")]
pub mod gpu;
