//! Threads, locks, atomics and the clock, as [`crate::pool`] uses them. `tests/pool_orders.rs` has a pool
//! that uses others.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread;
pub(crate) use std::time::Instant;

/// Whether it is tried what threads can do, in which case none is worth waiting for.
pub(crate) const IS_MODEL: bool = false;
