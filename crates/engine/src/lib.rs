//! sterna-engine.
#![forbid(unsafe_code)]
