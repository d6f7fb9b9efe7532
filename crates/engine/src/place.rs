//! The CPU or a GPU, decided at run time.

use std::ops::Range;

use sterna_format::DType;
use sterna_kernels::Exec;
use sterna_kernels::activation::Activation;
use sterna_kernels::attention::AttentionShape;

use crate::backend::{
    Backend, BackendError, CacheShape, KvCache, LinearSource, LowRank, ScreenedRows, Sequence,
};
use crate::cpu::Cpu;
use crate::gpu::Gpu;
use crate::rope::Angles;

/// Where a model is computed, for programs that let their users choose: one backend that is one of two.
#[derive(Debug)]
// There is one of them in a program.
#[allow(clippy::large_enum_variant)]
pub enum Place {
    /// The processor.
    Cpu(Cpu),
    /// A GPU.
    Gpu(Gpu),
}

/// What belongs to one of the backends of a [`Place`].
#[derive(Debug)]
pub enum Either<C, G> {
    /// The CPU's.
    Cpu(C),
    /// A GPU's.
    Gpu(G),
}

impl<C, G> Either<C, G> {
    fn cpu(&self) -> Result<&C, BackendError> {
        match self {
            Either::Cpu(c) => Ok(c),
            Either::Gpu(_) => Err(BackendError::Elsewhere),
        }
    }

    fn cpu_mut(&mut self) -> Result<&mut C, BackendError> {
        match self {
            Either::Cpu(c) => Ok(c),
            Either::Gpu(_) => Err(BackendError::Elsewhere),
        }
    }

    fn gpu(&self) -> Result<&G, BackendError> {
        match self {
            Either::Gpu(g) => Ok(g),
            Either::Cpu(_) => Err(BackendError::Elsewhere),
        }
    }

    fn gpu_mut(&mut self) -> Result<&mut G, BackendError> {
        match self {
            Either::Gpu(g) => Ok(g),
            Either::Cpu(_) => Err(BackendError::Elsewhere),
        }
    }
}

impl<C: KvCache, G: KvCache> KvCache for Either<C, G> {
    fn len(&self) -> usize {
        match self {
            Either::Cpu(cache) => cache.len(),
            Either::Gpu(cache) => cache.len(),
        }
    }

    fn advance(&mut self, n: usize) {
        match self {
            Either::Cpu(cache) => cache.advance(n),
            Either::Gpu(cache) => cache.advance(n),
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Either::Cpu(cache) => cache.truncate(len),
            Either::Gpu(cache) => cache.truncate(len),
        }
    }

    fn fork(&self, len: usize) -> Either<C, G> {
        match self {
            Either::Cpu(cache) => Either::Cpu(cache.fork(len)),
            Either::Gpu(cache) => Either::Gpu(cache.fork(len)),
        }
    }
}

type OfLinear = Either<<Cpu as Backend>::Linear, <Gpu as Backend>::Linear>;
type OfVector = Either<<Cpu as Backend>::Vector, <Gpu as Backend>::Vector>;
type OfScreen = Either<<Cpu as Backend>::Screen, <Gpu as Backend>::Screen>;
type OfBuffer = Either<<Cpu as Backend>::Buffer, <Gpu as Backend>::Buffer>;
type OfCache = Either<<Cpu as Backend>::Cache, <Gpu as Backend>::Cache>;

impl Backend for Place {
    type Linear = OfLinear;
    type Vector = OfVector;
    type Screen = OfScreen;
    type Buffer = OfBuffer;
    type Cache = OfCache;

    fn host(&self) -> &Exec {
        match self {
            Place::Cpu(be) => be.host(),
            Place::Gpu(be) => be.host(),
        }
    }

    fn load_linear(&self, source: LinearSource) -> Result<OfLinear, BackendError> {
        Ok(match self {
            Place::Cpu(be) => Either::Cpu(be.load_linear(source)?),
            Place::Gpu(be) => Either::Gpu(be.load_linear(source)?),
        })
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<OfVector, BackendError> {
        Ok(match self {
            Place::Cpu(be) => Either::Cpu(be.load_vector(values)?),
            Place::Gpu(be) => Either::Gpu(be.load_vector(values)?),
        })
    }

    fn load_screen(&self, linear: &OfLinear, dtype: DType) -> Result<OfScreen, BackendError> {
        Ok(match self {
            Place::Cpu(be) => Either::Cpu(be.load_screen(linear.cpu()?, dtype)?),
            Place::Gpu(be) => Either::Gpu(be.load_screen(linear.gpu()?, dtype)?),
        })
    }

    fn buffer(&self) -> OfBuffer {
        match self {
            Place::Cpu(be) => Either::Cpu(be.buffer()),
            Place::Gpu(be) => Either::Gpu(be.buffer()),
        }
    }

    fn cache(&self, shape: &CacheShape) -> Result<OfCache, BackendError> {
        Ok(match self {
            Place::Cpu(be) => Either::Cpu(be.cache(shape)?),
            Place::Gpu(be) => Either::Gpu(be.cache(shape)?),
        })
    }

    fn embed(
        &self,
        table: &OfLinear,
        ids: &[u32],
        scale: f32,
        out: &mut OfBuffer,
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.embed(table.cpu()?, ids, scale, out.cpu_mut()?),
            Place::Gpu(be) => be.embed(table.gpu()?, ids, scale, out.gpu_mut()?),
        }
    }

    fn rms_norm(
        &self,
        x: &OfBuffer,
        weight: &OfVector,
        eps: f32,
        out: &mut OfBuffer,
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.rms_norm(x.cpu()?, weight.cpu()?, eps, out.cpu_mut()?),
            Place::Gpu(be) => be.rms_norm(x.gpu()?, weight.gpu()?, eps, out.gpu_mut()?),
        }
    }

    fn rms_norm_in_place(
        &self,
        x: &mut OfBuffer,
        weight: &OfVector,
        eps: f32,
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.rms_norm_in_place(x.cpu_mut()?, weight.cpu()?, eps),
            Place::Gpu(be) => be.rms_norm_in_place(x.gpu_mut()?, weight.gpu()?, eps),
        }
    }

    fn linear(
        &self,
        x: &OfBuffer,
        outputs: &mut [(&OfLinear, &mut OfBuffer)],
    ) -> Result<(), BackendError> {
        let outputs = outputs.iter_mut();
        match self {
            Place::Cpu(be) => {
                let outputs = outputs.map(|(w, out)| Ok((w.cpu()?, out.cpu_mut()?)));
                let mut outputs = outputs.collect::<Result<Vec<_>, BackendError>>()?;
                be.linear(x.cpu()?, &mut outputs)
            }
            Place::Gpu(be) => {
                let outputs = outputs.map(|(w, out)| Ok((w.gpu()?, out.gpu_mut()?)));
                let mut outputs = outputs.collect::<Result<Vec<_>, BackendError>>()?;
                be.linear(x.gpu()?, &mut outputs)
            }
        }
    }

    fn linear_top(
        &self,
        x: &OfBuffer,
        w: &OfLinear,
        screen: &OfScreen,
        top: usize,
        out: &mut OfBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        match self {
            Place::Cpu(be) => be.linear_top(x.cpu()?, w.cpu()?, screen.cpu()?, top, out.cpu_mut()?),
            Place::Gpu(be) => be.linear_top(x.gpu()?, w.gpu()?, screen.gpu()?, top, out.gpu_mut()?),
        }
    }

    fn add_low_rank(
        &self,
        x: &OfBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Place>],
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => {
                let mut own = Vec::with_capacity(updates.len());
                for LowRank { a, b, scale, out } in updates {
                    own.push(LowRank {
                        a: a.cpu()?,
                        b: b.cpu()?,
                        scale: *scale,
                        out: out.cpu_mut()?,
                    });
                }
                be.add_low_rank(x.cpu()?, rows, &mut own)
            }
            Place::Gpu(be) => {
                let mut own = Vec::with_capacity(updates.len());
                for LowRank { a, b, scale, out } in updates {
                    own.push(LowRank {
                        a: a.gpu()?,
                        b: b.gpu()?,
                        scale: *scale,
                        out: out.gpu_mut()?,
                    });
                }
                be.add_low_rank(x.gpu()?, rows, &mut own)
            }
        }
    }

    fn add_bias(&self, x: &mut OfBuffer, bias: &OfVector) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.add_bias(x.cpu_mut()?, bias.cpu()?),
            Place::Gpu(be) => be.add_bias(x.gpu_mut()?, bias.gpu()?),
        }
    }

    fn rope(&self, x: &mut OfBuffer, head_dim: usize, angles: &Angles) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.rope(x.cpu_mut()?, head_dim, angles),
            Place::Gpu(be) => be.rope(x.gpu_mut()?, head_dim, angles),
        }
    }

    fn attention(
        &self,
        sequences: &mut [Sequence<'_, OfCache>],
        layer: usize,
        shape: &AttentionShape,
        q: &OfBuffer,
        k: &OfBuffer,
        v: &OfBuffer,
        out: &mut OfBuffer,
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => {
                let mut own = Vec::with_capacity(sequences.len());
                for Sequence { cache, n_rows } in sequences {
                    own.push(Sequence {
                        cache: cache.cpu_mut()?,
                        n_rows: *n_rows,
                    });
                }
                let (q, k, v) = (q.cpu()?, k.cpu()?, v.cpu()?);
                be.attention(&mut own, layer, shape, q, k, v, out.cpu_mut()?)
            }
            Place::Gpu(be) => {
                let mut own = Vec::with_capacity(sequences.len());
                for Sequence { cache, n_rows } in sequences {
                    own.push(Sequence {
                        cache: cache.gpu_mut()?,
                        n_rows: *n_rows,
                    });
                }
                let (q, k, v) = (q.gpu()?, k.gpu()?, v.gpu()?);
                be.attention(&mut own, layer, shape, q, k, v, out.gpu_mut()?)
            }
        }
    }

    fn gate(
        &self,
        activation: Activation,
        gate: &mut OfBuffer,
        up: &OfBuffer,
    ) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.gate(activation, gate.cpu_mut()?, up.cpu()?),
            Place::Gpu(be) => be.gate(activation, gate.gpu_mut()?, up.gpu()?),
        }
    }

    fn add(&self, x: &mut OfBuffer, y: &OfBuffer) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.add(x.cpu_mut()?, y.cpu()?),
            Place::Gpu(be) => be.add(x.gpu_mut()?, y.gpu()?),
        }
    }

    fn softcap(&self, x: &mut OfBuffer, cap: f32) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.softcap(x.cpu_mut()?, cap),
            Place::Gpu(be) => be.softcap(x.gpu_mut()?, cap),
        }
    }

    fn keep_rows(&self, x: &mut OfBuffer, rows: &[usize]) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.keep_rows(x.cpu_mut()?, rows),
            Place::Gpu(be) => be.keep_rows(x.gpu_mut()?, rows),
        }
    }

    fn read(&self, x: &mut OfBuffer) -> Result<Vec<f32>, BackendError> {
        match self {
            Place::Cpu(be) => be.read(x.cpu_mut()?),
            Place::Gpu(be) => be.read(x.gpu_mut()?),
        }
    }

    fn write(&self, values: &[f32], width: usize, x: &mut OfBuffer) -> Result<(), BackendError> {
        match self {
            Place::Cpu(be) => be.write(values, width, x.cpu_mut()?),
            Place::Gpu(be) => be.write(values, width, x.gpu_mut()?),
        }
    }
}
