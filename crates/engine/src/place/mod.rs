//! The CPU, a GPU, or both, decided at run time.
//!
//! Weights lie on one side or the other, group by group ([`share`]). An operation takes place where its
//! weights are, or where its operand is if it has none; activations follow ([`buffer`]). A layer is attended
//! to where it was loaded first, as its keys and values are there ([`cache`]).

mod buffer;
mod cache;
mod share;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_format::DType;
use sterna_gpu::GpuError;
use sterna_kernels::Exec;
use sterna_kernels::activation::Activation;
use sterna_kernels::attention::AttentionShape;

use crate::ahead::Decoding;
use crate::backend::{
    Backend, BackendError, CacheShape, Continued, LinearSource, LowRank, ScreenedRows, Sequence,
};
use crate::cpu::Cpu;
use crate::generation::Group;
use crate::gpu::Gpu;
use crate::rope::Angles;
use crate::sampler::Sampler;

pub use buffer::PlaceBuffer;
pub use cache::PlaceCache;
pub use share::GpuShare;
use share::{Placement, Side};

/// Where a model is computed, for programs that let their users choose: the CPU, or a GPU as far as its
/// memory goes and the CPU from there. One is for one model.
#[derive(Debug)]
pub struct Place {
    cpu: Arc<Cpu>,
    gpu: Option<Arc<Part>>,
    /// Where weights are loaded to.
    loads: Side,
}

/// A GPU and what it has of the model.
#[derive(Debug)]
struct Part {
    gpu: Gpu,
    placement: Mutex<Placement>,
}

impl Part {
    fn placement(&self) -> MutexGuard<'_, Placement> {
        self.placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// What belongs to one of the sides of a [`Place`].
#[derive(Debug)]
pub enum Either<C, G> {
    /// The CPU's.
    Cpu(C),
    /// A GPU's.
    Gpu(G),
}

impl Place {
    /// The CPU alone.
    pub fn cpu(cpu: Cpu) -> Place {
        Place {
            cpu: Arc::new(cpu),
            gpu: None,
            loads: Side::Cpu,
        }
    }

    /// `gpu` for what `share` gives it, `cpu` for the rest.
    pub fn split(gpu: Gpu, cpu: Cpu, share: GpuShare) -> Place {
        let placement = Mutex::new(Placement::new(share));
        Place {
            cpu: Arc::new(cpu),
            gpu: Some(Arc::new(Part { gpu, placement })),
            loads: Side::Gpu,
        }
    }

    /// The GPU, if there is one.
    pub fn device(&self) -> Option<&Gpu> {
        self.gpu.as_ref().map(|part| &part.gpu)
    }

    /// How many layers of the model were loaded onto the GPU.
    pub fn n_gpu_layers(&self) -> usize {
        let part = self.gpu.as_ref();
        part.map_or(0, |part| part.placement().n_layers())
    }

    fn gpu(&self) -> Result<&Gpu, BackendError> {
        self.device().ok_or(BackendError::Elsewhere)
    }

    /// The same place, loading weights to `side`.
    fn loading_to(&self, side: Side) -> Place {
        Place {
            cpu: Arc::clone(&self.cpu),
            gpu: self.gpu.clone(),
            loads: side,
        }
    }

    /// Where the keys and values of `layer` are. `otherwise` if the layer was not loaded as a group.
    fn side_of_layer(&self, layer: usize, otherwise: Side) -> Side {
        let part = self.gpu.as_ref();
        let side = part.and_then(|part| part.placement().side(Group::Layer(layer)));
        side.unwrap_or(otherwise)
    }
}

/// Where to compute something of `x` and `y`: where both are, or where `y` was computed.
fn side_of_both(x: &PlaceBuffer, y: &PlaceBuffer) -> Side {
    if y.is_on(x.side()) {
        x.side()
    } else {
        y.side()
    }
}

type OfLinear = Either<<Cpu as Backend>::Linear, <Gpu as Backend>::Linear>;
type OfVector = Either<<Cpu as Backend>::Vector, <Gpu as Backend>::Vector>;
/// GPUs have none.
type OfScreen = <Cpu as Backend>::Screen;

impl Backend for Place {
    type Linear = OfLinear;
    type Vector = OfVector;
    type Screen = OfScreen;
    type Buffer = PlaceBuffer;
    type Cache = PlaceCache;

    fn host(&self) -> &Exec {
        self.cpu.host()
    }

    fn load_linear(&self, source: LinearSource) -> Result<OfLinear, BackendError> {
        Ok(match self.loads {
            Side::Cpu => Either::Cpu(self.cpu.load_linear(source)?),
            Side::Gpu => Either::Gpu(self.gpu()?.load_linear(source)?),
        })
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<OfVector, BackendError> {
        Ok(match self.loads {
            Side::Cpu => Either::Cpu(self.cpu.load_vector(values)?),
            Side::Gpu => Either::Gpu(self.gpu()?.load_vector(values)?),
        })
    }

    fn load_screen(&self, linear: &OfLinear, dtype: DType) -> Result<OfScreen, BackendError> {
        match linear {
            Either::Cpu(linear) => self.cpu.load_screen(linear, dtype),
            Either::Gpu(linear) => match self.gpu()?.load_screen(linear, dtype)? {},
        }
    }

    fn load_group<T>(
        &self,
        group: Group,
        mut load: impl FnMut(&Place) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let Some(part) = &self.gpu else {
            return load(self);
        };
        let known = part.placement().side(group).is_some();
        let side = part.placement().decide(&part.gpu, group);
        match load(&self.loading_to(side)) {
            Err(BackendError::Gpu(GpuError::OutOfMemory { .. })) if side == Side::Gpu => {
                if !known {
                    part.placement().refused(group);
                }
                load(&self.loading_to(Side::Cpu))
            }
            loaded => loaded,
        }
    }

    fn join(&self, matrices: &mut [&mut OfLinear]) -> Result<(), BackendError> {
        let mut on_gpu = Vec::with_capacity(matrices.len());
        for matrix in matrices.iter_mut() {
            match &mut **matrix {
                Either::Gpu(matrix) => on_gpu.push(matrix),
                // On the CPU there is nothing to be gained.
                Either::Cpu(_) => return Ok(()),
            }
        }
        self.gpu()?.join(&mut on_gpu)
    }

    fn buffer(&self) -> PlaceBuffer {
        PlaceBuffer::default()
    }

    fn cache(&self, shape: &CacheShape) -> Result<PlaceCache, BackendError> {
        let gpu = match &self.gpu {
            Some(part) => {
                // Weights come before sessions.
                part.placement().release();
                Some(part.gpu.cache(shape)?)
            }
            None => None,
        };
        let cpu = self.cpu.cache(shape)?;
        Ok(PlaceCache { cpu, gpu })
    }

    fn embed(
        &self,
        table: &OfLinear,
        ids: &[u32],
        scale: f32,
        out: &mut PlaceBuffer,
    ) -> Result<(), BackendError> {
        match table {
            Either::Cpu(table) => {
                if let Some(gpu) = self.device() {
                    gpu.begin_step()?;
                }
                self.cpu.embed(table, ids, scale, out.fill_on_cpu())
            }
            Either::Gpu(table) => self.gpu()?.embed(table, ids, scale, out.fill_on_gpu()),
        }
    }

    fn rms_norm(
        &self,
        x: &PlaceBuffer,
        weight: &OfVector,
        eps: f32,
        out: &mut PlaceBuffer,
    ) -> Result<(), BackendError> {
        match weight {
            Either::Cpu(weight) => {
                let x = &self.on_cpu(x)?;
                self.cpu.rms_norm(x, weight, eps, out.fill_on_cpu())
            }
            Either::Gpu(weight) => {
                let x = &self.on_gpu(x)?;
                self.gpu()?.rms_norm(x, weight, eps, out.fill_on_gpu())
            }
        }
    }

    fn rms_norm_in_place(
        &self,
        x: &mut PlaceBuffer,
        weight: &OfVector,
        eps: f32,
    ) -> Result<(), BackendError> {
        match weight {
            Either::Cpu(weight) => {
                let x = self.change_on_cpu(x)?;
                self.cpu.rms_norm_in_place(x, weight, eps)
            }
            Either::Gpu(weight) => {
                let x = self.change_on_gpu(x)?;
                self.gpu()?.rms_norm_in_place(x, weight, eps)
            }
        }
    }

    fn linear(
        &self,
        x: &PlaceBuffer,
        outputs: &mut [(&OfLinear, &mut PlaceBuffer)],
    ) -> Result<(), BackendError> {
        let (mut on_cpu, mut on_gpu) = (Vec::new(), Vec::new());
        for (w, out) in outputs {
            match w {
                Either::Cpu(w) => on_cpu.push((w, out.fill_on_cpu())),
                Either::Gpu(w) => on_gpu.push((w, out.fill_on_gpu())),
            }
        }
        if !on_cpu.is_empty() {
            self.cpu.linear(&*self.on_cpu(x)?, &mut on_cpu)?;
        }
        if !on_gpu.is_empty() {
            self.gpu()?.linear(&*self.on_gpu(x)?, &mut on_gpu)?;
        }
        Ok(())
    }

    fn linear_top(
        &self,
        x: &PlaceBuffer,
        w: &OfLinear,
        screen: &OfScreen,
        top: usize,
        out: &mut PlaceBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        let Either::Cpu(w) = w else {
            return Err(BackendError::Elsewhere);
        };
        let x = &self.on_cpu(x)?;
        self.cpu.linear_top(x, w, screen, top, out.fill_on_cpu())
    }

    fn add_low_rank(
        &self,
        x: &PlaceBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Place>],
    ) -> Result<(), BackendError> {
        let sides: Vec<Side> = updates.iter().map(|update| update.out.side()).collect();
        let (mut on_cpu, mut on_gpu) = (Vec::new(), Vec::new());
        for LowRank { a, b, scale, out } in &mut *updates {
            let scale = *scale;
            match (a, b) {
                (Either::Cpu(a), Either::Cpu(b)) => {
                    let out = self.change_on_cpu(out)?;
                    on_cpu.push(LowRank { a, b, scale, out });
                }
                (Either::Gpu(a), Either::Gpu(b)) => {
                    let out = self.change_on_gpu(out)?;
                    on_gpu.push(LowRank { a, b, scale, out });
                }
                _ => return Err(BackendError::Elsewhere),
            }
        }
        if !on_cpu.is_empty() {
            let x = &self.on_cpu(x)?;
            self.cpu.add_low_rank(x, rows.clone(), &mut on_cpu)?;
        }
        if !on_gpu.is_empty() {
            self.gpu()?
                .add_low_rank(&*self.on_gpu(x)?, rows, &mut on_gpu)?;
        }
        // Queries, keys and values stay together.
        for (update, side) in updates.iter_mut().zip(sides) {
            self.take_back(update.out, side)?;
        }
        Ok(())
    }

    fn add_bias(&self, x: &mut PlaceBuffer, bias: &OfVector) -> Result<(), BackendError> {
        match bias {
            Either::Cpu(bias) => self.cpu.add_bias(self.change_on_cpu(x)?, bias),
            Either::Gpu(bias) => self.gpu()?.add_bias(self.change_on_gpu(x)?, bias),
        }
    }

    fn rope(
        &self,
        x: &mut PlaceBuffer,
        head_dim: usize,
        angles: &Angles,
    ) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.rope(x.fill_on_cpu(), head_dim, angles),
            Side::Gpu => self.gpu()?.rope(x.fill_on_gpu(), head_dim, angles),
        }
    }

    fn attention(
        &self,
        sequences: &mut [Sequence<'_, PlaceCache>],
        layer: usize,
        shape: &AttentionShape,
        q: &PlaceBuffer,
        k: &PlaceBuffer,
        v: &PlaceBuffer,
        out: &mut PlaceBuffer,
    ) -> Result<(), BackendError> {
        match self.side_of_layer(layer, q.side()) {
            Side::Cpu => {
                let own = sequences.iter_mut().map(|s| Sequence {
                    cache: &mut s.cache.cpu,
                    n_rows: s.n_rows,
                });
                let (q, k, v) = (&self.on_cpu(q)?, &self.on_cpu(k)?, &self.on_cpu(v)?);
                let (own, out) = (&mut own.collect::<Vec<_>>()[..], out.fill_on_cpu());
                self.cpu.attention(own, layer, shape, q, k, v, out)
            }
            Side::Gpu => {
                let own = sequences.iter_mut().map(|s| {
                    let cache = s.cache.gpu.as_mut().ok_or(BackendError::Elsewhere)?;
                    let n_rows = s.n_rows;
                    Ok(Sequence { cache, n_rows })
                });
                let own = &mut own.collect::<Result<Vec<_>, BackendError>>()?[..];
                let (q, k, v) = (&self.on_gpu(q)?, &self.on_gpu(k)?, &self.on_gpu(v)?);
                let out = out.fill_on_gpu();
                self.gpu()?.attention(own, layer, shape, q, k, v, out)
            }
        }
    }

    fn gate(
        &self,
        activation: Activation,
        gate: &mut PlaceBuffer,
        up: &PlaceBuffer,
    ) -> Result<(), BackendError> {
        match side_of_both(gate, up) {
            Side::Cpu => {
                let (gate, up) = (self.change_on_cpu(gate)?, &self.on_cpu(up)?);
                self.cpu.gate(activation, gate, up)
            }
            Side::Gpu => {
                let (gate, up) = (self.change_on_gpu(gate)?, &self.on_gpu(up)?);
                self.gpu()?.gate(activation, gate, up)
            }
        }
    }

    fn add(&self, x: &mut PlaceBuffer, y: &PlaceBuffer) -> Result<(), BackendError> {
        match side_of_both(x, y) {
            Side::Cpu => self.cpu.add(self.change_on_cpu(x)?, &*self.on_cpu(y)?),
            Side::Gpu => self.gpu()?.add(self.change_on_gpu(x)?, &*self.on_gpu(y)?),
        }
    }

    fn softcap(&self, x: &mut PlaceBuffer, cap: f32) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.softcap(x.fill_on_cpu(), cap),
            Side::Gpu => self.gpu()?.softcap(x.fill_on_gpu(), cap),
        }
    }

    fn keep_rows(&self, x: &mut PlaceBuffer, rows: &[usize]) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.keep_rows(x.fill_on_cpu(), rows),
            Side::Gpu => self.gpu()?.keep_rows(x.fill_on_gpu(), rows),
        }
    }

    fn read(&self, x: &mut PlaceBuffer) -> Result<Vec<f32>, BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.read(x.fill_on_cpu()),
            Side::Gpu => self.gpu()?.read(x.fill_on_gpu()),
        }
    }

    fn write(&self, values: &[f32], width: usize, x: &mut PlaceBuffer) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.write(values, width, x.fill_on_cpu()),
            Side::Gpu => self.gpu()?.write(values, width, x.fill_on_gpu()),
        }
    }

    /// A GPU goes on by itself only with a model that it has all of.
    fn steps_ahead(
        &self,
        cache: &mut PlaceCache,
        sampler: &Sampler,
    ) -> Result<usize, BackendError> {
        match (&self.gpu, &mut cache.gpu) {
            (Some(part), Some(cache)) if part.placement().is_whole() => {
                part.gpu.steps_ahead(cache, sampler)
            }
            _ => Ok(0),
        }
    }

    fn decode(
        &self,
        logits: &mut PlaceBuffer,
        sequence: Continued<'_, PlaceCache>,
        sampler: &Sampler,
    ) -> Result<Option<Box<dyn Decoding>>, BackendError> {
        let Continued {
            cache,
            last,
            n_steps,
        } = sequence;
        let (Some(gpu), Some(cache)) = (self.device(), &mut cache.gpu) else {
            return Ok(None);
        };
        let sequence = Continued {
            cache,
            last,
            n_steps,
        };
        // The logits are only looked at, and can be read afterwards.
        gpu.decode(self.change_on_gpu(logits)?, sequence, sampler)
    }
}
