//! Numbers of what sequences share in a device's memory: pages of keys and values, and places for states.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::pages::lock;

/// The number of a page or a place of one sequence, or of several that have it in common. It can be taken again once the
/// last of them drops it.
#[derive(Debug)]
pub(super) struct Number {
    value: u32,
    free: Arc<Mutex<Vec<u32>>>,
}

impl Number {
    pub(super) fn get(&self) -> u32 {
        self.value
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        lock(&self.free).push(self.value);
    }
}

/// Numbers that nobody has.
#[derive(Debug, Default)]
pub(super) struct FreeNumbers(Arc<Mutex<Vec<u32>>>);

impl FreeNumbers {
    /// How many they are.
    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Adds `new` ones, which are taken after the others.
    pub(super) fn add(&self, new: Range<u32>) {
        lock(&self.0).splice(0..0, new.rev());
    }

    /// `n` of them, or as many as there are.
    pub(super) fn take(&self, n: usize) -> Vec<Arc<Number>> {
        let mut free = lock(&self.0);
        let left = free.len().saturating_sub(n);
        let taken = free.drain(left..).rev().map(|value| Number {
            value,
            free: Arc::clone(&self.0),
        });
        taken.map(Arc::new).collect()
    }
}
