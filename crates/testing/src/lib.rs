//! What the tests of several crates share: `gpu` decides whether a test that needs a GPU runs, `fuzz`
//! has what the fuzzers found.
#![forbid(unsafe_code)]

#[cfg(feature = "fuzz")]
pub mod fuzz;
#[cfg(feature = "gpu")]
pub mod gpu;
