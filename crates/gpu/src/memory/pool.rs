//! Buffers that are used again.

use std::collections::BTreeMap;

use super::Buffer;
use crate::{Device, GpuError};

/// Buffers to be had again by size, so that a run of steps allocates only in its first.
#[derive(Debug)]
pub struct Pool {
    device: Device,
    /// By size in bytes.
    free: BTreeMap<u64, Vec<Buffer>>,
}

impl Pool {
    /// An empty pool.
    pub fn new(device: &Device) -> Pool {
        Pool {
            device: device.clone(),
            free: BTreeMap::new(),
        }
    }

    /// A buffer of at least `bytes`, with whatever was in it: the smallest there is of less than twice
    /// the size, or a new one.
    ///
    /// Errors: as [`Device::buffer`].
    pub fn take(&mut self, bytes: u64) -> Result<Buffer, GpuError> {
        // A quarter of a power of two apart, so that sizes that differ by little meet.
        let step = (bytes.max(1024).next_power_of_two() / 8).max(256);
        let size = bytes.max(1).next_multiple_of(step);
        let fitting = self.free.range_mut(size..size.saturating_mul(2));
        for (_, buffers) in fitting {
            if let Some(buffer) = buffers.pop() {
                return Ok(buffer);
            }
        }
        self.device.buffer("activations", size)
    }

    /// Takes a buffer back. Commands that use it keep their order with those of its next user.
    pub fn give(&mut self, buffer: Buffer) {
        self.free.entry(buffer.bytes()).or_default().push(buffer);
    }

    /// Frees all that is not in use.
    pub fn clear(&mut self) {
        self.free.clear();
    }
}
