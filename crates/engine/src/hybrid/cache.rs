//! Keys and values on the CPU and a GPU.

use crate::backend::KvCache;
use crate::cpu::CpuCache;
use crate::gpu::GpuCache;

/// Keys and values of one sequence: those of a layer are stored where its attention is computed. Either side
/// has memory only for layers that were appended to there.
#[derive(Debug)]
pub struct HybridCache {
    pub(super) cpu: CpuCache,
    pub(super) gpu: Option<GpuCache>,
}

impl KvCache for HybridCache {
    fn len(&self) -> usize {
        self.cpu.len()
    }

    fn advance(&mut self, n: usize) {
        self.cpu.advance(n);
        if let Some(gpu) = &mut self.gpu {
            gpu.advance(n);
        }
    }

    fn pin(&mut self) {
        self.cpu.pin();
        if let Some(gpu) = &mut self.gpu {
            gpu.pin();
        }
    }

    fn truncate(&mut self, len: usize) {
        self.cpu.truncate(len);
        let len = self.cpu.len();
        if let Some(gpu) = &mut self.gpu {
            gpu.truncate(len);
        }
    }

    fn fork(&self, len: usize) -> HybridCache {
        let cpu = self.cpu.fork(len);
        HybridCache {
            gpu: self.gpu.as_ref().map(|gpu| gpu.fork(cpu.len())),
            cpu,
        }
    }
}
