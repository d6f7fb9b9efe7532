//! Uploading weights to the device through a ring of mapped buffers of fixed size.

use super::Buffer;
#[cfg(not(target_arch = "wasm32"))]
use super::ring::Ring;
use crate::error::{expect, expect_most};
use crate::{Device, GpuError};

/// Where in a slot parts begin, as mapping it requires.
pub(super) const PART_ALIGN: usize = 8;

/// Bytes, and where they go.
#[derive(Debug, Clone, Copy)]
pub struct UploadPart<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// The buffer.
    pub to: &'a Buffer,
    /// Where in the buffer, a multiple of 4.
    pub offset: u64,
}

/// A ring of staging buffers: while one is filled, the device copies from the others.
///
/// Memory is bounded by the ring, however much is uploaded.
#[derive(Debug)]
pub struct Upload {
    device: Device,
    slot_bytes: usize,
    /// A browser's queue has buffers of its own, and can't be waited for.
    #[cfg(not(target_arch = "wasm32"))]
    ring: Ring,
}

impl Upload {
    /// A ring of `n_slots` of `slot_bytes`, a multiple of 4, each.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Shape`] if there are no slots or slots are empty.
    pub fn new(device: &Device, slot_bytes: usize, n_slots: usize) -> Result<Upload, GpuError> {
        expect("slots of an upload", n_slots.max(1), n_slots)?;
        let rounded = slot_bytes.max(4).next_multiple_of(4);
        expect("bytes of an upload's slot", rounded, slot_bytes)?;
        Ok(Upload {
            device: device.clone(),
            slot_bytes,
            #[cfg(not(target_arch = "wasm32"))]
            ring: Ring::new(device, slot_bytes, n_slots)?,
        })
    }

    /// Bytes per slot: the most that is sent at once.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Writes `bytes` to `buffer` from `offset` on, a multiple of 4. Up to the next multiple of 4, zeros follow them.
    ///
    /// Returns when everything has been enqueued; commands that are submitted later see it.
    ///
    /// Errors: [`GpuError::Shape`] if the bytes don't fit; [`GpuError::Lost`].
    pub fn write(&mut self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        let part = UploadPart {
            bytes,
            to: buffer,
            offset,
        };
        self.write_all(std::iter::once(part))
    }

    /// Writes several parts; otherwise as [`Upload::write`].
    pub fn write_all<'a>(
        &mut self,
        parts: impl Iterator<Item = UploadPart<'a>>,
    ) -> Result<(), GpuError> {
        let (mut filled, mut n_bytes) = (Vec::new(), 0);
        for UploadPart { bytes, to, offset } in parts {
            let end = offset.saturating_add(bytes.len() as u64);
            expect_most("bytes of a buffer", to.bytes() as usize, end as usize)?;
            let (mut words, rest) = bytes.split_at(bytes.len() / 4 * 4);
            let mut offset = offset;
            while !words.is_empty() {
                let (bytes, others) = words.split_at(words.len().min(self.slot_bytes - n_bytes));
                filled.push(UploadPart { bytes, to, offset });
                (words, offset) = (others, offset + bytes.len() as u64);
                n_bytes = (n_bytes + bytes.len()).next_multiple_of(PART_ALIGN);
                if n_bytes >= self.slot_bytes {
                    self.send(&std::mem::take(&mut filled))?;
                    n_bytes = 0;
                }
            }
            if !rest.is_empty() {
                self.device.write(to, offset, rest)?;
            }
        }
        match filled.is_empty() {
            true => Ok(()),
            false => self.send(&filled),
        }
    }

    /// Sends parts of whole words that fit a slot, each from a multiple of [`PART_ALIGN`] on.
    fn send(&mut self, parts: &[UploadPart<'_>]) -> Result<(), GpuError> {
        #[cfg(not(target_arch = "wasm32"))]
        self.ring.send(&self.device, parts)?;
        #[cfg(target_arch = "wasm32")]
        for part in parts {
            self.device.write(part.to, part.offset, part.bytes)?;
        }
        Ok(())
    }
}
