//! Device memory: buffers, pools of them, and how bytes get in and out.

pub(crate) mod parallel;
mod pool;
#[cfg(not(target_arch = "wasm32"))]
mod ring;
mod staging;
mod upload;

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{NoUninit, Pod};

pub use pool::Pool;
pub(crate) use staging::Staging;
pub use upload::{Upload, UploadPart};

use crate::device::Account;
use crate::error::expect_most;
use crate::record::ReadRange;
use crate::{Device, GpuError, wgpu};

/// Memory on a device. Clones share the memory, which is freed with the last of them and with the last
/// command that uses it.
#[derive(Debug, Clone)]
pub struct Buffer {
    inner: Arc<Memory>,
}

#[derive(Debug)]
struct Memory {
    wgpu: wgpu::Buffer,
    bytes: u64,
    account: Arc<Account>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.account.give(self.bytes);
    }
}

/// Kernels read whole vectors of four words.
const GRAIN: u64 = 16;

impl Buffer {
    /// Its size, at least what was requested.
    pub fn bytes(&self) -> u64 {
        self.inner.bytes
    }

    pub(crate) fn wgpu(&self) -> &wgpu::Buffer {
        &self.inner.wgpu
    }
}

/// Whether two are the same memory.
impl PartialEq for Buffer {
    fn eq(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Buffer {}

impl Device {
    /// `bytes` of zeros, rounded up to a multiple of 16.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if the budget, the device's limit for a buffer, or its memory
    /// is exhausted.
    pub fn buffer(&self, what: &str, bytes: u64) -> Result<Buffer, GpuError> {
        let bytes = bytes.max(1).checked_next_multiple_of(GRAIN);
        let bytes = bytes.filter(|bytes| *bytes <= self.limits().buffer_bytes);
        let Some(bytes) = bytes else {
            return Err(GpuError::Unsupported {
                what: what.into(),
                reason: format!("a buffer has at most {} bytes", self.limits().buffer_bytes),
            });
        };
        let account = self.account();
        account.take(what, bytes)?;
        let made = self.checked(what, || {
            self.wgpu().create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes,
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        });
        match made {
            Ok(wgpu) => Ok(Buffer {
                inner: Arc::new(Memory {
                    wgpu,
                    bytes,
                    account: account.clone(),
                }),
            }),
            Err(GpuError::OutOfMemory { .. }) => {
                account.give(bytes);
                Err(account.exhausted(what, bytes, true))
            }
            Err(error) => {
                account.give(bytes);
                Err(error)
            }
        }
    }

    /// A buffer with these values; for more than a few megabytes see [`Upload`].
    ///
    /// Errors: as [`Device::buffer`].
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer, GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = self.buffer("values", bytes.len() as u64)?;
        self.write(&buffer, 0, bytes)?;
        Ok(buffer)
    }

    /// Writes `values` at `offset`, in bytes, a multiple of 4, before anything submitted later. The rest of the last
    /// word, if they end within one, becomes 0.
    ///
    /// Errors: [`GpuError::Shape`] if they don't fit.
    pub fn write<T: NoUninit>(
        &self,
        buffer: &Buffer,
        offset: u64,
        values: &[T],
    ) -> Result<(), GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let end = offset.saturating_add(bytes.len() as u64);
        expect_most("bytes of a buffer", buffer.bytes() as usize, end as usize)?;
        let whole = bytes.len() / 4 * 4;
        self.noted("writing a buffer", || {
            let queue = self.queue();
            queue.write_buffer(buffer.wgpu(), offset, &bytes[..whole]);
            if whole < bytes.len() {
                let mut last = [0; 4];
                last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
                queue.write_buffer(buffer.wgpu(), offset + whole as u64, &last);
            }
        })
    }

    /// The elements `range` of a buffer of `T`, once everything submitted before is done.
    ///
    /// Errors: [`GpuError::Shape`] if the range is outside the buffer; [`GpuError::Lost`].
    pub fn read<T: Pod>(&self, buffer: &Buffer, range: Range<usize>) -> Result<Vec<T>, GpuError> {
        let read = ReadRange::of::<T>(buffer, range);
        let mut read = self.submit(&[], &[read])?.wait()?;
        let bytes = read.pop().unwrap_or_default();
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Copies `bytes` from one buffer to another; offsets and length are multiples of 4.
    ///
    /// Errors: [`GpuError::Shape`] if they don't fit; [`GpuError::Refused`] if the two are the same.
    pub fn copy(
        &self,
        from: (&Buffer, u64),
        to: (&Buffer, u64),
        bytes: u64,
    ) -> Result<(), GpuError> {
        self.copy_all(&[BufferCopy { from, to, bytes }])
    }

    /// Several copies, one after the other.
    ///
    /// Errors: as [`Device::copy`].
    pub fn copy_all(&self, copies: &[BufferCopy<'_>]) -> Result<(), GpuError> {
        for &BufferCopy { from, to, bytes } in copies {
            for (buffer, offset) in [from, to] {
                let end = offset.saturating_add(bytes);
                expect_most("bytes of a buffer", buffer.bytes() as usize, end as usize)?;
            }
        }
        if copies.is_empty() {
            return Ok(());
        }
        self.checked("copying a buffer", || {
            let mut encoder = self.wgpu().create_command_encoder(&Default::default());
            for BufferCopy { from, to, bytes } in copies {
                let [source, target] = [from, to].map(|(buffer, _)| buffer.wgpu());
                encoder.copy_buffer_to_buffer(source, from.1, target, to.1, *bytes);
            }
            self.queue().submit([encoder.finish()]);
        })
    }
}

/// Bytes to be copied from one buffer to another.
#[derive(Debug, Clone, Copy)]
pub struct BufferCopy<'a> {
    /// The buffer, and from which byte on: a multiple of 4.
    pub from: (&'a Buffer, u64),
    /// Where they go, also a multiple of 4.
    pub to: (&'a Buffer, u64),
    /// How many, a multiple of 4.
    pub bytes: u64,
}
