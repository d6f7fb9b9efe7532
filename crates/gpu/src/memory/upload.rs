//! Uploading weights to the device through a ring of mapped buffers of fixed size.

use super::Buffer;
#[cfg(not(target_arch = "wasm32"))]
use super::ring::Ring;
use crate::error::{expect, expect_most};
use crate::{Device, GpuError};

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
        let end = offset.saturating_add(bytes.len() as u64);
        expect_most("bytes of a buffer", buffer.bytes() as usize, end as usize)?;
        let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
        let mut at = offset;
        for piece in words.chunks(self.slot_bytes) {
            self.send(buffer, at, piece)?;
            at += piece.len() as u64;
        }
        if !rest.is_empty() {
            self.device.write(buffer, at, rest)?;
        }
        Ok(())
    }

    /// Sends one piece, whole words that fit a slot.
    fn send(&mut self, to: &Buffer, offset: u64, piece: &[u8]) -> Result<(), GpuError> {
        #[cfg(not(target_arch = "wasm32"))]
        return self.ring.send(&self.device, to, offset, piece);
        #[cfg(target_arch = "wasm32")]
        return self.device.write(to, offset, piece);
    }
}
