//! What a GPU needs to compute a part of a model: the shape of activations, and memory kept free.

use sterna_gpu::GpuError;
use sterna_gpu::kernels::attention::CacheLayer;
use sterna_gpu::memory::Buffer;

use super::{Gpu, GpuBuffer, cache};
use crate::backend::{BackendError, CacheShape};

impl GpuBuffer {
    /// Elements of a row.
    pub(crate) fn width(&self) -> Result<usize, BackendError> {
        Ok(self.view()?.width)
    }
}

/// Device memory that weights are not to take, as sessions will want it. It is free again once this is
/// dropped.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    buffers: Vec<Buffer>,
    layers: Vec<CacheLayer>,
}

impl Reserve {
    /// Keeps `bytes` more.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if there aren't as many.
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

    /// Keeps the memory of a layer's keys and values at `ctx_len` positions.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if there isn't as much, [`GpuError::Unsupported`] if the device
    /// can't have such a layer at all.
    pub(crate) fn keep_layer(
        &mut self,
        gpu: &Gpu,
        shape: &CacheShape,
        ctx_len: usize,
    ) -> Result<(), GpuError> {
        let layer = cache::memory(&gpu.device, shape, ctx_len)?;
        self.layers.push(layer);
        Ok(())
    }

    /// Gives back what was kept for one layer.
    pub(crate) fn release_layer(&mut self) {
        self.layers.pop();
    }
}
