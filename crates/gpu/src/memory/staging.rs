//! Staging buffers for reading values back, reused by size.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::{Device, GpuError, wgpu};

/// Buffers that can be mapped for reading, by size.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    free: Mutex<BTreeMap<u64, Vec<wgpu::Buffer>>>,
}

/// How many buffers of a size are kept: the logits of as many sequences; and how many bytes of them.
const KEPT: usize = 64;
const KEPT_BYTES: u64 = 1 << 26;

/// Larger buffers are not kept: they are for inspecting weights and caches, not for a step's results.
const MAX_KEPT_BYTES: u64 = 1 << 24;

impl Staging {
    /// A buffer of at least `bytes`; `None` if there is nothing to read.
    pub(crate) fn take(
        &self,
        device: &Device,
        bytes: u64,
    ) -> Result<Option<wgpu::Buffer>, GpuError> {
        if bytes == 0 {
            return Ok(None);
        }
        let size = match bytes {
            0..=MAX_KEPT_BYTES => bytes.next_power_of_two().max(256),
            _ => bytes,
        };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = free.get_mut(&size).and_then(Vec::pop) {
            return Ok(Some(buffer));
        }
        drop(free);
        let buffer = device.checked("a buffer to read back", || {
            device.wgpu().create_buffer(&wgpu::BufferDescriptor {
                label: Some("read back"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })?;
        Ok(Some(buffer))
    }

    /// Takes back a buffer that is no longer mapped.
    pub(crate) fn give(&self, buffer: wgpu::Buffer) {
        if buffer.size() > MAX_KEPT_BYTES {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let of_size = free.entry(buffer.size()).or_default();
        if of_size.len() < KEPT && (of_size.len() as u64 + 1) * buffer.size() <= KEPT_BYTES {
            of_size.push(buffer);
        }
    }
}
