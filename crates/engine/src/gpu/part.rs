//! What a GPU needs to compute a part of a model: the shape of activations, and reserved memory.

use sterna_gpu::GpuError;
use sterna_gpu::kernels::attention::CacheLayer;
use sterna_gpu::memory::Buffer;

use super::{Gpu, GpuBuffer, cache};
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
    layers: Vec<CacheLayer>,
}

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

    /// Reserves the memory of a layer's keys and values at `ctx_len` positions.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if that much isn't available, [`GpuError::Unsupported`] if the
    /// device doesn't support such a layer at all.
    pub(crate) fn keep_layer(
        &mut self,
        gpu: &Gpu,
        heads: KvHeads,
        dtype: CacheType,
        ctx_len: usize,
    ) -> Result<(), GpuError> {
        let layer = cache::memory(&gpu.device, heads, dtype, ctx_len)?;
        self.layers.push(layer);
        Ok(())
    }

    /// Releases the reservation of one layer.
    pub(crate) fn release_layer(&mut self) {
        self.layers.pop();
    }
}
