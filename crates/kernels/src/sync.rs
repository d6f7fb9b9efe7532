//! Threads, locks, atomics and the clock, as [`crate::pool`] uses them. `tests/pool_orders.rs` has a pool
//! that uses others.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread;
pub(crate) use std::time::Instant;

/// Whether this is a model-checking build, in which no thread is worth waiting for.
pub(crate) const IS_MODEL: bool = false;
