//! The sides of a [`Hybrid`], for operations that are the same on both.

use std::ops::Deref;

use super::{Hybrid, HybridBuffer, HybridCache, OfLinear, OfVector};
use crate::backend::{Backend, BackendError};
use crate::cpu::{Cpu, CpuBuffer, CpuCache};
use crate::gpu::{Gpu, GpuBuffer, GpuCache};
use crate::halves::Half;

pub(super) struct OnCpu;
pub(super) struct OnGpu;

impl Half<Hybrid> for OnCpu {
    type On = Cpu;

    fn backend(hybrid: &Hybrid) -> Result<&Cpu, BackendError> {
        Ok(&hybrid.cpu)
    }

    fn linear(linear: &OfLinear) -> Result<&<Cpu as Backend>::Linear, BackendError> {
        linear.cpu().ok_or(BackendError::WrongDevice)
    }

    fn vector(vector: &OfVector) -> Result<&<Cpu as Backend>::Vector, BackendError> {
        vector.cpu().ok_or(BackendError::WrongDevice)
    }

    fn cache(cache: &mut HybridCache) -> Result<&mut CpuCache, BackendError> {
        Ok(&mut cache.cpu)
    }

    fn on(
        hybrid: &Hybrid,
        x: &HybridBuffer,
    ) -> Result<impl Deref<Target = CpuBuffer>, BackendError> {
        hybrid.on_cpu(x)
    }

    fn change<'a>(
        hybrid: &Hybrid,
        x: &'a mut HybridBuffer,
    ) -> Result<&'a mut CpuBuffer, BackendError> {
        hybrid.change_on_cpu(x)
    }

    fn fill(x: &mut HybridBuffer) -> &mut CpuBuffer {
        x.fill_on_cpu()
    }
}

impl Half<Hybrid> for OnGpu {
    type On = Gpu;

    fn backend(hybrid: &Hybrid) -> Result<&Gpu, BackendError> {
        hybrid.gpu()
    }

    fn linear(linear: &OfLinear) -> Result<&<Gpu as Backend>::Linear, BackendError> {
        linear.gpu().ok_or(BackendError::WrongDevice)
    }

    fn vector(vector: &OfVector) -> Result<&<Gpu as Backend>::Vector, BackendError> {
        vector.gpu().ok_or(BackendError::WrongDevice)
    }

    fn cache(cache: &mut HybridCache) -> Result<&mut GpuCache, BackendError> {
        cache.gpu.as_mut().ok_or(BackendError::WrongDevice)
    }

    fn on(
        hybrid: &Hybrid,
        x: &HybridBuffer,
    ) -> Result<impl Deref<Target = GpuBuffer>, BackendError> {
        hybrid.on_gpu(x)
    }

    fn change<'a>(
        hybrid: &Hybrid,
        x: &'a mut HybridBuffer,
    ) -> Result<&'a mut GpuBuffer, BackendError> {
        hybrid.change_on_gpu(x)
    }

    fn fill(x: &mut HybridBuffer) -> &mut GpuBuffer {
        x.fill_on_gpu()
    }
}
