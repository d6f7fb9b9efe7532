//! Threads, locks, atomics and the clock, as [`crate::pool`] uses them. `tests/pool_orders.rs` has a pool
//! that uses others.

#[cfg(all(target_family = "wasm", target_feature = "atomics"))]
pub(crate) mod lent;

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

#[cfg(all(target_family = "wasm", target_feature = "atomics"))]
pub(crate) use lent::{Instant, thread};
#[cfg(not(all(target_family = "wasm", target_feature = "atomics")))]
pub(crate) use std::{thread, time::Instant};

/// Whether this is a model-checking build, in which no thread is worth waiting for.
pub(crate) const IS_MODEL: bool = false;
