//! Uploading weights to the device through a ring of mapped buffers of fixed size.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use super::Buffer;
use crate::error::{expect, expect_most};
use crate::{Device, GpuError};

/// A ring of staging buffers: while one is filled, the device copies from the others.
///
/// Memory is bounded by the ring, however much is uploaded.
#[derive(Debug)]
pub struct Upload {
    device: Device,
    slot_bytes: usize,
    /// In the order in which they become free.
    slots: VecDeque<Slot>,
}

#[derive(Debug)]
struct Slot {
    buffer: wgpu::Buffer,
    /// The copy that reads it, and where its remapping is reported; `None` if it is mapped.
    mapping: Option<(wgpu::SubmissionIndex, Receiver<bool>)>,
}

impl Upload {
    /// A ring of `n_slots` of `slot_bytes`, a multiple of 4, each.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Shape`] if there are no slots or slots are empty.
    pub fn new(device: &Device, slot_bytes: usize, n_slots: usize) -> Result<Upload, GpuError> {
        expect("slots of an upload", n_slots.max(1), n_slots)?;
        let rounded = slot_bytes.max(4).next_multiple_of(4);
        expect("bytes of an upload's slot", rounded, slot_bytes)?;
        let mut slots = VecDeque::with_capacity(n_slots);
        for _ in 0..n_slots {
            let buffer = device.checked("a staging buffer", || {
                device.wgpu().create_buffer(&wgpu::BufferDescriptor {
                    label: Some("upload"),
                    size: slot_bytes as u64,
                    usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
                    mapped_at_creation: true,
                })
            })?;
            slots.push_back(Slot {
                buffer,
                mapping: None,
            });
        }
        Ok(Upload {
            device: device.clone(),
            slot_bytes,
            slots,
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

    /// [`Upload::write_with`] for bytes that are already in memory.
    ///
    /// Errors: likewise.
    pub fn write(&mut self, buffer: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        self.write_with(buffer, offset, bytes.len(), 4, |start, piece| {
            piece.copy_from_slice(&bytes[start..][..piece.len()]);
            Ok(())
        })
    }

    /// Sends one piece, whole words that fit a slot.
    fn send(&mut self, to: &Buffer, offset: u64, piece: &[u8]) -> Result<(), GpuError> {
        // A browser can't block on a slot; its queue has buffers of its own.
        if cfg!(target_arch = "wasm32") {
            return self.device.write(to, offset, piece);
        }
        let Some(mut slot) = self.slots.pop_front() else {
            // Only if an earlier piece failed in this function.
            return Err(refused("an earlier upload failed"));
        };
        if let Some((copied, mapping)) = slot.mapping.take() {
            let mapped = loop {
                match mapping.try_recv() {
                    Ok(mapped) => break mapped,
                    Err(TryRecvError::Empty) => self.device.wait(Some(copied.clone()))?,
                    Err(TryRecvError::Disconnected) => break false,
                }
            };
            if !mapped {
                return Err(refused("a staging buffer could not be mapped"));
            }
        }
        let bytes = piece.len() as u64;
        let view = slot.buffer.get_mapped_range_mut(..bytes);
        let mut view = view.map_err(|error| refused(&error.to_string()))?;
        view.copy_from_slice(piece);
        drop(view);
        let copied = self.device.checked("uploading", || {
            slot.buffer.unmap();
            let mut encoder = self
                .device
                .wgpu()
                .create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(&slot.buffer, 0, to.wgpu(), offset, bytes);
            self.device.queue().submit([encoder.finish()])
        })?;
        let (sender, receiver) = channel();
        slot.buffer
            .map_async(wgpu::MapMode::Write, .., move |result| {
                // The receiver is gone if the upload was dropped.
                let _ = sender.send(result.is_ok());
            });
        slot.mapping = Some((copied, receiver));
        self.slots.push_back(slot);
        Ok(())
    }
}

fn refused(reason: &str) -> GpuError {
    GpuError::Refused {
        what: "uploading".into(),
        reason: reason.into(),
    }
}
