//! The library as other programs use it.

mod answers;
mod common;
mod constraint;
mod embedding;
mod experts;
mod receipts;
mod scheduler;
