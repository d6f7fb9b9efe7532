//! Mapped buffers in which uploads wait for the device.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use super::parallel;
use super::upload::{PART_ALIGN, UploadPart};
use crate::{Device, GpuError, wgpu};

/// Slots, in the order in which they become free.
#[derive(Debug)]
pub(super) struct Ring {
    slots: VecDeque<Slot>,
}

#[derive(Debug)]
struct Slot {
    buffer: wgpu::Buffer,
    /// The copy that reads it, and where its remapping is reported; `None` if it is mapped.
    mapping: Option<(wgpu::SubmissionIndex, Receiver<bool>)>,
}

/// Threads fill multiples of this.
const SHARE_ALIGN: usize = 4096;

impl Ring {
    pub(super) fn new(
        device: &Device,
        slot_bytes: usize,
        n_slots: usize,
    ) -> Result<Ring, GpuError> {
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
        Ok(Ring { slots })
    }

    /// Sends parts of whole words that fit a slot, each from a multiple of [`PART_ALIGN`] on.
    pub(super) fn send(
        &mut self,
        device: &Device,
        parts: &[UploadPart<'_>],
    ) -> Result<(), GpuError> {
        let Some(mut slot) = self.slots.pop_front() else {
            // Only if an earlier piece failed in this function.
            return Err(refused("an earlier upload failed"));
        };
        if let Some((copied, mapping)) = slot.mapping.take() {
            let mapped = loop {
                match mapping.try_recv() {
                    Ok(mapped) => break mapped,
                    Err(TryRecvError::Empty) => device.wait(Some(copied.clone()))?,
                    Err(TryRecvError::Disconnected) => break false,
                }
            };
            if !mapped {
                return Err(refused("a staging buffer could not be mapped"));
            }
        }
        let all = parts.iter().map(|part| part.bytes.len()).sum();
        let n_parts = parallel::n_parts(all);
        let share = all.div_ceil(n_parts).next_multiple_of(SHARE_ALIGN);
        let (mut at, mut firsts, mut shares) = (0_u64, Vec::new(), Vec::new());
        for part in parts {
            at = at.next_multiple_of(PART_ALIGN as u64);
            firsts.push(at);
            for bytes in part.bytes.chunks(share) {
                let end = at + bytes.len() as u64;
                let view = slot.buffer.get_mapped_range_mut(at..end);
                shares.push((view.map_err(|error| refused(&error.to_string()))?, bytes));
                at = end;
            }
        }
        parallel::for_each(n_parts, shares, |(mut view, bytes)| {
            view.copy_from_slice(bytes);
        });
        let copied = device.checked("uploading", || {
            slot.buffer.unmap();
            let mut encoder = device.wgpu().create_command_encoder(&Default::default());
            for (part, first) in parts.iter().zip(firsts) {
                let (to, bytes) = (part.to.wgpu(), part.bytes.len() as u64);
                encoder.copy_buffer_to_buffer(&slot.buffer, first, to, part.offset, bytes);
            }
            device.queue().submit([encoder.finish()])
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
