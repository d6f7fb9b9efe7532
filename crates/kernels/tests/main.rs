//! Block formats, encoders and sums, at every level that the machine has.

mod blocks;
mod bonsai2;
mod encoder;
mod extremes;
