//! sterna-text.
#![forbid(unsafe_code)]
