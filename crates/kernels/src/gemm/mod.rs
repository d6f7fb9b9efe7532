//! Matrix products: weights `[n, k]` with activations `[m, k]`, giving `[m, n]`.

mod block;
mod ternary;
#[cfg(target_arch = "x86_64")]
mod ternary_avx2;

pub use block::{BlockMatrix, gemm_block_f32};
pub use ternary::{QuantizedRows, TernaryMatrix, gemm_ternary_q8};

/// Rows of weights that a thread takes at a time: enough to hide the hand-out, few enough that a
/// thread which lost its core doesn't hold up the rest.
const ROWS_PER_TASK: usize = 32;
