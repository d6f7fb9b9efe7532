//! Matrix products: weights `[n, k]` with activations `[m, k]`, giving `[m, n]`.

mod block;
mod ternary;
#[cfg(target_arch = "x86_64")]
mod ternary_avx2;

pub use block::{BlockMatrix, gemm_block_f32};
pub use ternary::{QuantizedRows, TernaryMatrix, gemm_ternary_q8};

/// Rows of weights that a thread takes at a time, when each costs `k · m` multiplications.
///
/// Handing out a task costs about a microsecond, more if a thread has to be woken: a task should be
/// worth several. Small matrices then stay on one thread.
fn rows_per_task(k: usize, m: usize, work_per_task: usize) -> usize {
    work_per_task.div_ceil((k * m).max(1)).max(8)
}
