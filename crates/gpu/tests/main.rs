//! Kernels against their definitions, and the device.

mod attention;
mod blocks;
mod common;
mod device;
mod elementwise;
mod experts;
mod graph;
mod output;
mod recurrent;
mod shaders;
mod ternary;
mod tuning;
