//! What a GPU needs to compute a part of a model: the shape of activations, and reserved memory.

use sterna_gpu::GpuError;
use sterna_gpu::kernels::attention::CacheLayer;
use sterna_gpu::kernels::recurrent::SLOTS;
use sterna_gpu::memory::Buffer;

use super::{Gpu, GpuBuffer, pages};
use crate::backend::{BackendError, CacheType, KvHeads};

impl GpuBuffer {
    /// Elements of a row.
    pub(crate) fn width(&self) -> Result<usize, BackendError> {
        Ok(self.view()?.width)
    }
}

/// Device memory reserved for sessions, which weights must not take. Dropping it frees the memory.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    buffers: Vec<Buffer>,
    layers: Vec<(Option<CacheLayer>, Option<Buffer>)>,
}

/// What a layer needs of a session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerNeeds {
    /// Heads of its keys and values, if it has any.
    pub(crate) heads: Option<KvHeads>,
    /// Values of its state.
    pub(crate) state: usize,
}

/// States of a layer: those in the slots, and as many checkpoints as there always may be.
const STATES: u64 = SLOTS as u64 + 2;

impl Reserve {
    /// Reserves `bytes` more.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if that much isn't available.
    pub(crate) fn keep(&mut self, gpu: &Gpu, bytes: u64) -> Result<(), GpuError> {
        let most = gpu.device.limits().buffer_bytes;
        let mut left = bytes;
        while left > 0 {
            let piece = left.min(most);
            self.buffers.push(gpu.device.buffer("activations", piece)?);
            left -= piece;
        }
        Ok(())
    }

    /// Reserves the memory of a layer's keys and values at `ctx_len` positions, and of its states.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if that much isn't available, [`GpuError::Unsupported`] if the
    /// device doesn't support such a layer at all.
    pub(crate) fn keep_layer(
        &mut self,
        gpu: &Gpu,
        needs: &LayerNeeds,
        dtype: CacheType,
        ctx_len: usize,
    ) -> Result<(), GpuError> {
        let keys = needs
            .heads
            .map(|heads| pages::memory(&gpu.device, heads, dtype, ctx_len));
        let states = (needs.state > 0).then(|| {
            let bytes = 4 * needs.state as u64 * STATES;
            gpu.device.buffer("states", bytes)
        });
        self.layers.push((keys.transpose()?, states.transpose()?));
        Ok(())
    }

    /// Releases the reservation of one layer.
    pub(crate) fn release_layer(&mut self) {
        self.layers.pop();
    }
}
