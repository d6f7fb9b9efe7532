//! CPU arithmetic of language models.
//!
//! For decoding block formats ([`quant`]), matrix products ([`gemm`]), attention, normalisation,
//! rotary embedding and activation functions, on all cores and with the widest instructions that
//! the machine has. Not for deciding what to compute: shapes, order and weights come from
//! `sterna-engine`.
//!
//! Every function gives the same bits for any thread count and instruction set, and a row of a batch
//! gives the same bits as the row alone.
//!
//! ```
//! use sterna_kernels::{Exec, Isa, gemm::{BlockMatrix, Matrix, Rounding, Scratch, linear}};
//! use sterna_format::DType;
//!
//! let weights: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! let matrix = BlockMatrix::new(DType::F32, 2, 2, Rounding::None, &weights)?;
//! let mut out = [0.0; 2];
//! let exec = Exec::new(1, Isa::detect());
//! let outputs = &mut [(Matrix::Blocks(matrix), &mut out[..])];
//! linear(&exec, &[10.0, 1.0], 2, &mut Scratch::default(), outputs)?;
//! assert_eq!(out, [12.0, 34.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Instruction sets and threads are used here and nowhere else.
#![allow(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "aarch64")]
mod arm;
pub mod attention;
pub mod conv;
pub mod delta;
mod dot;
mod exact;
pub mod experts;
mod finite;
pub mod gemm;
#[cfg(test)]
mod golden;
pub mod hadamard;
mod isa;
pub mod logits;
pub mod mamba;
mod math;
mod memory;
pub mod norm;
pub mod peak;
mod pool;
pub mod quant;
pub mod repack;
mod requantize;
pub mod rope;
pub mod rwkv;
mod scan;
mod shape;
mod simd;
#[cfg(target_arch = "aarch64")]
mod sme;
pub mod ssm;
mod state;
mod sync;
#[cfg(test)]
mod test_data;
pub mod vector;

/// Threads that a program in a browser lends to pools: WebAssembly can't start any.
#[cfg(all(target_family = "wasm", target_feature = "atomics"))]
pub mod threads {
    pub use crate::sync::lent::{lend, n_idle, set_clock};
}

pub use finite::check_finite;
pub use isa::Isa;
pub use requantize::requantize;
pub use shape::ShapeError;
pub use state::State;

use std::sync::Arc;

use gemm::Lookahead;
use pool::{Pool, SharedSlice};

/// The execution resources of every operation: threads and instruction set.
#[derive(Debug)]
pub struct Exec {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) lookahead: Arc<Lookahead>,
}

impl Exec {
    /// `n_threads` threads, counting the caller, using `isa`.
    pub fn new(n_threads: usize, isa: Isa) -> Exec {
        let lookahead = Arc::new(Lookahead::new(n_threads));
        Exec {
            pool: Pool::new(n_threads, Arc::clone(&lookahead)),
            isa,
            lookahead,
        }
    }

    /// What `f` gives for each number below `n`, on all threads. It mustn't use this `Exec`'s threads itself: it would wait for
    /// itself.
    pub fn map<T: Send>(&self, n: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let mut results: Vec<Option<T>> = std::iter::repeat_with(|| None).take(n).collect();
        let shared = SharedSlice::new(&mut results);
        self.pool.for_ranges(n, 1, |range| {
            // SAFETY: ranges don't overlap.
            let results = unsafe { shared.range_mut(range.clone()) };
            for (result, i) in results.iter_mut().zip(range) {
                *result = Some(f(i));
            }
        });
        let done = |result: Option<T>| result.expect("every number is in a range");
        results.into_iter().map(done).collect()
    }

    /// What `f` gives for each of `items`, as in [`Exec::map`].
    pub fn map_mut<T: Send, R: Send>(
        &self,
        items: &mut [T],
        f: impl Fn(&mut T) -> R + Sync,
    ) -> Vec<R> {
        let (n, items) = (items.len(), SharedSlice::new(items));
        // SAFETY: each number has an item of its own.
        self.map(n, |i| f(unsafe { &mut items.range_mut(i..i + 1)[0] }))
    }

    /// Calls `f` with the rows of `x`, of `width` values, several at a time, and the place of the first value, on all
    /// threads: what one thread alone would go through, it would have to get from the caches of the others.
    pub(crate) fn for_rows(
        &self,
        x: &mut [f32],
        width: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        /// Values that justify a task.
        const PER_TASK: usize = 4096;
        let width = width.max(1);
        let (len, x) = (x.len(), SharedSlice::new(x));
        self.pool
            .for_ranges(len.div_ceil(width), PER_TASK.div_ceil(width), |rows| {
                let places = rows.start * width..len.min(rows.end * width);
                // SAFETY: ranges don't overlap.
                f(places.start, unsafe { x.range_mut(places) });
            });
    }
}
