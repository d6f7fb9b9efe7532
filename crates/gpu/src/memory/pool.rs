//! Buffers that are reused.

use std::collections::BTreeMap;

use super::Buffer;
use crate::{Device, GpuError};

/// Buffers reused by size, so that a run of steps allocates only in its first step.
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

    /// A buffer of at least `bytes`, with arbitrary contents: the smallest free one of less than twice the
    /// size, or a new one.
    ///
    /// Errors: as [`Device::buffer`].
    pub fn take(&mut self, bytes: u64) -> Result<Buffer, GpuError> {
        // Size classes a quarter of a power of two apart, so that similar sizes match.
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

    /// Takes a buffer back. Commands that use it stay ordered with those of its next user.
    pub fn give(&mut self, buffer: Buffer) {
        self.free.entry(buffer.bytes()).or_default().push(buffer);
    }

    /// Frees all unused buffers.
    pub fn clear(&mut self) {
        self.free.clear();
    }
}
