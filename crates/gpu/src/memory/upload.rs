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

    /// Writes `len` bytes to `buffer` from `offset` on, a multiple of 4; `fill` provides them piece by piece:
    /// it is called with the offset of a piece and the memory for it. Pieces begin at multiples of `grain`
    /// bytes and, all but the last, are multiples of it: a whole block, or a row.
    ///
    /// Returns when everything has been enqueued; commands that are submitted later see it.
    ///
    /// Errors: [`GpuError::Shape`] if the bytes don't fit, or a slot is smaller than `grain`; errors of
    /// `fill`; [`GpuError::Lost`].
    pub fn write_with<E: From<GpuError>>(
        &mut self,
        buffer: &Buffer,
        offset: u64,
        len: usize,
        grain: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let end = offset.saturating_add(len as u64);
        expect_most("bytes of a buffer", buffer.bytes() as usize, end as usize)?;
        let grain = grain.max(1);
        let mut piece_bytes = self.slot_bytes / grain * grain;
        while !piece_bytes.is_multiple_of(4) && piece_bytes > 0 {
            piece_bytes -= grain;
        }
        expect(
            "bytes of an upload's slot",
            piece_bytes.max(grain),
            piece_bytes,
        )?;
        let mut piece = Vec::new();
        for start in (0..len).step_by(piece_bytes) {
            let bytes = piece_bytes.min(len - start);
            // Pads with zeros to whole words.
            piece.clear();
            piece.resize(bytes.next_multiple_of(4), 0);
            fill(start, &mut piece[..bytes])?;
            self.send(buffer, offset + start as u64, &piece)?;
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

    /// [`Upload::write_with`] for bytes that are already in memory.
    ///
    /// Errors: likewise.
    pub fn write(&mut self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        self.write_with(buffer, offset, bytes.len(), 4, |start, piece| {
            piece.copy_from_slice(&bytes[start..][..piece.len()]);
            Ok(())
        })
    }
}
