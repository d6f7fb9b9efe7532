//! Activations on the CPU and a GPU.

use std::cell::{Ref, RefCell};

use super::Hybrid;
use super::offload::Side;
use crate::backend::{Backend, BackendError};
use crate::cpu::CpuBuffer;
use crate::gpu::GpuBuffer;

/// Rows of activations, on the CPU, on a GPU, or on both after they were read on the other side.
#[derive(Debug, Default)]
pub struct HybridBuffer(RefCell<Copies>);

#[derive(Debug, Default)]
struct Copies {
    cpu: CpuBuffer,
    gpu: GpuBuffer,
    /// Where the values were computed.
    at: Side,
    /// The other side has a copy.
    both: bool,
}

impl HybridBuffer {
    /// Where the values were computed.
    pub(super) fn side(&self) -> Side {
        self.0.borrow().at
    }

    /// Whether the values are on `side`.
    pub(super) fn is_on(&self, side: Side) -> bool {
        let copies = self.0.borrow();
        copies.at == side || copies.both
    }

    /// For writing on the CPU.
    pub(super) fn fill_on_cpu(&mut self) -> &mut CpuBuffer {
        &mut self.settle(Side::Cpu).cpu
    }

    /// For writing on the GPU.
    pub(super) fn fill_on_gpu(&mut self) -> &mut GpuBuffer {
        &mut self.settle(Side::Gpu).gpu
    }

    /// What there is on the CPU, which nobody reads.
    pub(super) fn as_is_on_cpu(&self) -> Ref<'_, CpuBuffer> {
        Ref::map(self.0.borrow(), |copies| &copies.cpu)
    }

    /// What there is on the GPU, which nobody reads.
    pub(super) fn as_is_on_gpu(&self) -> Ref<'_, GpuBuffer> {
        Ref::map(self.0.borrow(), |copies| &copies.gpu)
    }

    /// From now on the values are those on `side`.
    fn settle(&mut self, side: Side) -> &mut Copies {
        let copies = self.0.get_mut();
        (copies.at, copies.both) = (side, false);
        copies
    }
}

/// Each of these copies the values to a side if they aren't there, which waits for the GPU if they come from
/// it.
impl Hybrid {
    pub(super) fn bring(&self, x: &HybridBuffer, to: Side) -> Result<(), BackendError> {
        if x.is_on(to) {
            return Ok(());
        }
        let gpu = self.gpu()?;
        let Copies {
            cpu,
            gpu: other,
            both,
            ..
        } = &mut *x.0.borrow_mut();
        match to {
            Side::Cpu => {
                let width = other.width()?;
                self.cpu.write(&gpu.read(other)?, width, cpu)?;
            }
            Side::Gpu => {
                let (width, values) = cpu.get();
                gpu.write(values, width, other)?;
            }
        }
        *both = true;
        Ok(())
    }

    /// For reading on the CPU.
    pub(super) fn on_cpu<'a>(
        &self,
        x: &'a HybridBuffer,
    ) -> Result<Ref<'a, CpuBuffer>, BackendError> {
        self.bring(x, Side::Cpu)?;
        Ok(x.as_is_on_cpu())
    }

    /// For reading on the GPU.
    pub(super) fn on_gpu<'a>(
        &self,
        x: &'a HybridBuffer,
    ) -> Result<Ref<'a, GpuBuffer>, BackendError> {
        self.bring(x, Side::Gpu)?;
        Ok(x.as_is_on_gpu())
    }

    /// For modifying on the CPU.
    pub(super) fn change_on_cpu<'a>(
        &self,
        x: &'a mut HybridBuffer,
    ) -> Result<&'a mut CpuBuffer, BackendError> {
        self.bring(x, Side::Cpu)?;
        Ok(x.fill_on_cpu())
    }

    /// For modifying on the GPU.
    pub(super) fn change_on_gpu<'a>(
        &self,
        x: &'a mut HybridBuffer,
    ) -> Result<&'a mut GpuBuffer, BackendError> {
        self.bring(x, Side::Gpu)?;
        Ok(x.fill_on_gpu())
    }

    /// Makes `side` the one that has the values, the other keeping a copy.
    pub(super) fn take_back(&self, x: &mut HybridBuffer, side: Side) -> Result<(), BackendError> {
        self.bring(x, side)?;
        x.0.get_mut().at = side;
        Ok(())
    }
}
