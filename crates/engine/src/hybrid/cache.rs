//! Keys and values on the CPU and a GPU, and states.

use crate::backend::KvCache;
use crate::cpu::CpuCache;
use crate::gpu::GpuCache;
use crate::halves;

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

    fn share(&self) -> usize {
        // A half without layers that have keys and values knows of no others.
        let of_gpu = self.gpu.as_ref().map(KvCache::share);
        of_gpu.map_or(self.cpu.share(), |n| n.min(self.cpu.share()))
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

    fn len_within(&self, len: usize) -> usize {
        match &self.gpu {
            Some(gpu) => halves::len_within(&self.cpu, gpu, len),
            None => self.cpu.len_within(len),
        }
    }

    fn truncate(&mut self, len: usize) {
        match &mut self.gpu {
            Some(gpu) => halves::truncate(&mut self.cpu, gpu, len),
            None => self.cpu.truncate(len),
        }
    }

    fn fork(&self, len: usize) -> HybridCache {
        let mut fork = HybridCache {
            cpu: self.cpu.fork(len),
            gpu: self.gpu.as_ref().map(|gpu| gpu.fork(len)),
        };
        fork.truncate(len);
        fork
    }
}
