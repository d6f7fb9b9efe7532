//! The CPU, a GPU, or both, chosen at run time.
//!
//! Weights are on one side or the other, group by group (`offload`). An operation runs where its weights are,
//! or where its operand is if it has none; activations follow (`buffer`). Attention of a layer runs where the
//! layer was loaded first, as its keys and values are there (`cache`); if they are another layer's, where that was.

mod buffer;
mod cache;
mod half;
mod offload;

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use sterna_format::DType;
use sterna_kernels::Exec;
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::experts::Routing;

use crate::backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, CausalConvolution, Continued,
    Decoding, DeltaNet, ExpertInput, ExpertMatrices, ExpertMemory, ExpertProduct, LatentInputs,
    LayerContents, LinearSource, LowRank, OutputLayout, PendingRows, Product, Prologue, Recurrence,
    RmsNorm, RowsWanted, ScreenedRows, SelectiveScan, Sequence, SnapshotError, SnapshotSink,
    SnapshotSource, Ssm, TimeMix, TokenShift,
};
use crate::config::LatentConfig;
use crate::cpu::{Cpu, CpuBuffer};
use crate::gpu::Gpu;
use crate::halves::{self, Half};
use crate::stage::Stage;
use crate::weights::Group;

pub use buffer::HybridBuffer;
pub use cache::HybridCache;
use half::{OnCpu, OnGpu};
pub use offload::OffloadPlan;
use offload::{Placement, Side};

/// Computes a model on the CPU, or on a GPU as far as its memory allows and on the CPU beyond that, for
/// programs that let their users choose. One is for one model.
#[derive(Debug)]
pub struct Hybrid {
    cpu: Arc<Cpu>,
    gpu: Option<Arc<Offload>>,
    /// Where weights are loaded.
    loads: Side,
}

/// A GPU and the groups of the model it has.
#[derive(Debug)]
struct Offload {
    gpu: Gpu,
    placement: Mutex<Placement>,
}

impl Offload {
    fn placement(&self) -> MutexGuard<'_, Placement> {
        self.placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A value of one of the sides of a [`Hybrid`].
#[derive(Debug, Clone)]
pub enum Either<C, G> {
    /// The CPU's value.
    Cpu(C),
    /// A GPU's value.
    Gpu(G),
}

impl<C, G> Either<C, G> {
    fn cpu(&self) -> Option<&C> {
        match self {
            Either::Cpu(own) => Some(own),
            Either::Gpu(_) => None,
        }
    }

    fn gpu(&self) -> Option<&G> {
        match self {
            Either::Gpu(own) => Some(own),
            Either::Cpu(_) => None,
        }
    }
}

/// The value of the side that `get` is of, where there is one. Errors: [`BackendError::WrongDevice`] if it is another
/// side's.
fn of_side<'a, C, G, T>(
    value: Option<&'a Either<C, G>>,
    get: impl Fn(&'a Either<C, G>) -> Option<&'a T>,
) -> Result<Option<&'a T>, BackendError> {
    let own = value.map(|value| get(value).ok_or(BackendError::WrongDevice));
    own.transpose()
}

impl Hybrid {
    /// The CPU alone.
    pub fn cpu(cpu: Cpu) -> Hybrid {
        Hybrid {
            cpu: Arc::new(cpu),
            gpu: None,
            loads: Side::Cpu,
        }
    }

    /// `gpu` for what `share` assigns to it, `cpu` for the rest.
    pub fn split(gpu: Gpu, cpu: Cpu, share: OffloadPlan) -> Hybrid {
        let placement = Mutex::new(Placement::new(share));
        Hybrid {
            cpu: Arc::new(cpu),
            gpu: Some(Arc::new(Offload { gpu, placement })),
            loads: Side::Gpu,
        }
    }

    /// The GPU, if there is one.
    pub fn device(&self) -> Option<&Gpu> {
        self.gpu.as_ref().map(|part| &part.gpu)
    }

    /// How many layers of the model are offloaded to the GPU.
    pub fn n_gpu_layers(&self) -> usize {
        let part = self.gpu.as_ref();
        part.map_or(0, |part| part.placement().n_layers())
    }

    fn gpu(&self) -> Result<&Gpu, BackendError> {
        self.device().ok_or(BackendError::WrongDevice)
    }

    /// The same backend, loading weights to `side`.
    fn loading_to(&self, side: Side) -> Hybrid {
        Hybrid {
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

/// What `compute` gives for products after a prologue where all that they read is on the CPU; `None` if something isn't.
fn after_on_cpu<T>(
    prologue: &mut Prologue<'_, Hybrid>,
    x: &mut HybridBuffer,
    products: &mut [Product<'_, Hybrid>],
    compute: impl FnOnce(Prologue<'_, Cpu>, &mut CpuBuffer, Vec<Product<'_, Cpu>>) -> T,
) -> Option<T> {
    let on_cpu = |buffer: &HybridBuffer| buffer.is_on(Side::Cpu);
    if products.iter().any(|of| matches!(of.w, Either::Gpu(_))) {
        return None;
    }
    let ups;
    let prologue = match prologue {
        Prologue::Residual { sum, add, norm } if on_cpu(sum) && (add.is_none() || on_cpu(x)) => {
            let norm = norm_on_cpu(norm)?;
            Prologue::Residual {
                sum: sum.fill_on_cpu(),
                add: *add,
                norm,
            }
        }
        Prologue::Norm(norm) if on_cpu(x) => Prologue::Norm(norm_on_cpu(norm)?),
        Prologue::Gate {
            stage,
            activation,
            up,
            norm,
        } if on_cpu(x) && on_cpu(up) => {
            ups = up.as_is_on_cpu();
            let norm = match norm {
                Some(norm) => Some(norm_on_cpu(norm)?),
                None => None,
            };
            Prologue::Gate {
                stage: *stage,
                activation: *activation,
                up: &*ups,
                norm,
            }
        }
        _ => return None,
    };
    let products = products.iter_mut();
    let products = products.filter_map(|Product { stage, w, out }| match w {
        Either::Cpu(w) => Some(Product {
            stage: *stage,
            w,
            out: out.fill_on_cpu(),
        }),
        Either::Gpu(_) => None,
    });
    Some(compute(prologue, x.fill_on_cpu(), products.collect()))
}

/// The norm of a prologue, if it is on the CPU.
fn norm_on_cpu<'a>(norm: &RmsNorm<'a, Hybrid>) -> Option<RmsNorm<'a, Cpu>> {
    let RmsNorm { stage, weight, eps } = *norm;
    match weight {
        Either::Cpu(weight) => Some(RmsNorm { stage, weight, eps }),
        Either::Gpu(_) => None,
    }
}

/// The experts of each row, on the side where they were chosen.
#[derive(Debug)]
pub struct HybridRoutes {
    cpu: <Cpu as Backend>::Routes,
    gpu: Option<<Gpu as Backend>::Routes>,
    at: Side,
}

/// Where to compute an operation on `x` and `y`: where both are, or where `y` was computed.
fn side_of_both(x: &HybridBuffer, y: &HybridBuffer) -> Side {
    if y.is_on(x.side()) {
        x.side()
    } else {
        y.side()
    }
}

/// A pending read-back from either side.
pub type HybridReadback = Either<<Cpu as Backend>::Readback, <Gpu as Backend>::Readback>;

impl<C, G> Future for Either<C, G>
where
    C: Future + Unpin,
    G: Future<Output = C::Output> + Unpin,
{
    type Output = C::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<C::Output> {
        match self.get_mut() {
            Either::Cpu(future) => Pin::new(future).poll(cx),
            Either::Gpu(future) => Pin::new(future).poll(cx),
        }
    }
}

type OfLinear = Either<<Cpu as Backend>::Linear, <Gpu as Backend>::Linear>;
/// The matrices on the GPU; `None` if one isn't there.
fn all_on_gpu<'a>(
    matrices: &'a mut [&mut OfLinear],
) -> Option<Vec<&'a mut <Gpu as Backend>::Linear>> {
    let matrices = matrices.iter_mut().map(|matrix| match &mut **matrix {
        Either::Gpu(matrix) => Some(matrix),
        Either::Cpu(_) => None,
    });
    matrices.collect()
}

/// The matrices on the CPU; `None` if one isn't there.
fn all_on_cpu<'a>(
    matrices: &'a mut [&mut OfLinear],
) -> Option<Vec<&'a mut <Cpu as Backend>::Linear>> {
    let matrices = matrices.iter_mut().map(|matrix| match &mut **matrix {
        Either::Cpu(matrix) => Some(matrix),
        Either::Gpu(_) => None,
    });
    matrices.collect()
}

type OfVector = Either<<Cpu as Backend>::Vector, <Gpu as Backend>::Vector>;
/// GPUs have none.
type OfScreen = <Cpu as Backend>::Screen;

impl Backend for Hybrid {
    type Routes = HybridRoutes;
    type Linear = OfLinear;
    type Vector = OfVector;
    type Screen = OfScreen;
    type Buffer = HybridBuffer;
    type Cache = HybridCache;
    type Readback = HybridReadback;

    fn host(&self) -> &Exec {
        self.cpu.host()
    }

    fn usual_cache(&self) -> CacheType {
        match &self.gpu {
            Some(part) => part.gpu.usual_cache(),
            None => self.cpu.usual_cache(),
        }
    }

    fn rewrites(&self, dtype: DType, k: usize) -> bool {
        match &self.gpu {
            None => self.cpu.rewrites(dtype, k),
            // Which layers a GPU takes isn't known before they are loaded. Where not all are to be there, weights of the
            // others are to be in memory.
            Some(part) => {
                let has_limit = part.gpu.device().memory().budget.is_some();
                !has_limit && part.placement().is_for_all() && part.gpu.rewrites(dtype, k)
            }
        }
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

    fn has_screen_of(&self, linear: &OfLinear) -> bool {
        matches!(linear, Either::Cpu(_))
    }

    fn load_screen(&self, linear: &OfLinear, dtype: DType) -> Result<OfScreen, BackendError> {
        match linear {
            Either::Cpu(linear) => self.cpu.load_screen(linear, dtype),
            Either::Gpu(linear) => match self.gpu()?.load_screen(linear, dtype)? {},
        }
    }

    /// Where the device is out of memory, a group is loaded again, to the CPU.
    fn loads_by_group(&self) -> bool {
        self.gpu.is_some()
    }

    fn load_group<T>(
        &self,
        group: Group,
        mut load: impl FnMut(&Hybrid) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let Some(part) = &self.gpu else {
            return load(self);
        };
        // An expert stays where the others are.
        if group.whole() != group {
            let side = part.placement().side(group.whole());
            return load(&self.loading_to(side.unwrap_or(Side::Cpu)));
        }
        let known = part.placement().side(group).is_some();
        let side = part.placement().decide(&part.gpu, group);
        match load(&self.loading_to(side)) {
            Err(error) if error.is_out_of_memory() && side == Side::Gpu => {
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
                // On the CPU there is nothing to gain.
                Either::Cpu(_) => return Ok(()),
            }
        }
        self.gpu()?.join(&mut on_gpu)
    }

    fn bound_experts(&self, memory: &Arc<dyn ExpertMemory>) {
        self.cpu.bound_experts(memory);
    }

    fn join_experts(&self, experts: &mut ExpertMatrices<'_, Hybrid>) -> Result<(), BackendError> {
        let ExpertMatrices { gate, up, down } = experts;
        if let (Some(gate), Some(up), Some(down)) =
            (all_on_gpu(gate), all_on_gpu(up), all_on_gpu(down))
        {
            let mut experts = ExpertMatrices { gate, up, down };
            return self.gpu()?.join_experts(&mut experts);
        }
        match (all_on_cpu(gate), all_on_cpu(up), all_on_cpu(down)) {
            (Some(gate), Some(up), Some(down)) => {
                let mut experts = ExpertMatrices { gate, up, down };
                self.cpu.join_experts(&mut experts)
            }
            // A group is loaded to one side.
            _ => Ok(()),
        }
    }

    fn join_heads(&self, matrices: &mut [&mut OfLinear]) -> Result<(), BackendError> {
        match all_on_gpu(matrices) {
            Some(mut matrices) => self.gpu()?.join_heads(&mut matrices),
            // On the CPU there is nothing to gain.
            None => Ok(()),
        }
    }

    fn buffer(&self) -> HybridBuffer {
        HybridBuffer::default()
    }

    fn routes(&self) -> HybridRoutes {
        HybridRoutes {
            cpu: self.cpu.routes(),
            gpu: self.device().map(Gpu::routes),
            at: Side::Cpu,
        }
    }

    fn cache(&self, shape: &CacheShape) -> Result<HybridCache, BackendError> {
        let gpu = match &self.gpu {
            Some(part) => {
                // Weights are loaded before sessions begin.
                part.placement().release();
                Some(part.gpu.cache(shape)?)
            }
            None => None,
        };
        let cpu = self.cpu.cache(shape)?;
        Ok(HybridCache { cpu, gpu })
    }

    fn save_layer(
        &self,
        cache: &mut HybridCache,
        layer: usize,
        to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        match (self.side_of_layer(layer, Side::Cpu), &mut cache.gpu) {
            (Side::Gpu, Some(cache)) => self.gpu()?.save_layer(cache, layer, to),
            _ => self.cpu.save_layer(&mut cache.cpu, layer, to),
        }
    }

    fn restore_layer(
        &self,
        cache: &mut HybridCache,
        layer: usize,
        held: LayerContents,
        from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        match (self.side_of_layer(layer, Side::Cpu), &mut cache.gpu) {
            (Side::Gpu, Some(cache)) => self.gpu()?.restore_layer(cache, layer, held, from),
            _ => self.cpu.restore_layer(&mut cache.cpu, layer, held, from),
        }
    }

    fn flush(&self) -> Result<(), BackendError> {
        self.device().map_or(Ok(()), Gpu::flush)
    }

    fn exclusive(&self) -> Option<MutexGuard<'_, ()>> {
        self.device().and_then(Gpu::exclusive)
    }

    fn begin_step(&self) -> Result<(), BackendError> {
        self.device().map_or(Ok(()), Gpu::begin_step)
    }

    fn embed(
        &self,
        table: &OfLinear,
        ids: &[u32],
        scale: f32,
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match table {
            Either::Cpu(table) => self.cpu.embed(table, ids, scale, out.fill_on_cpu()),
            Either::Gpu(table) => self.gpu()?.embed(table, ids, scale, out.fill_on_gpu()),
        }
    }

    fn rms_norm(
        &self,
        stage: Stage,
        x: &HybridBuffer,
        weight: &OfVector,
        eps: f32,
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match weight {
            Either::Cpu(weight) => {
                let x = &self.on_cpu(x)?;
                (self.cpu).rms_norm(stage, x, weight, eps, out.fill_on_cpu())
            }
            Either::Gpu(weight) => {
                let x = &self.on_gpu(x)?;
                (self.gpu()?).rms_norm(stage, x, weight, eps, out.fill_on_gpu())
            }
        }
    }

    fn rms_norm_in_place(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        weight: &OfVector,
        eps: f32,
    ) -> Result<(), BackendError> {
        match weight {
            Either::Cpu(weight) => {
                let x = self.change_on_cpu(x)?;
                self.cpu.rms_norm_in_place(stage, x, weight, eps)
            }
            Either::Gpu(weight) => {
                let x = self.change_on_gpu(x)?;
                self.gpu()?.rms_norm_in_place(stage, x, weight, eps)
            }
        }
    }

    fn linear_after(
        &self,
        prologue: Prologue<'_, Hybrid>,
        x: &mut HybridBuffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Hybrid>],
    ) -> Result<(), BackendError> {
        let mut prologue = prologue;
        let on_cpu = after_on_cpu(&mut prologue, x, products, |prologue, x, mut products| {
            self.cpu.linear_after(prologue, x, layout, &mut products)
        });
        on_cpu.unwrap_or_else(|| {
            prologue.run(self, x)?;
            self.linear(x, layout, products)
        })
    }

    fn linear(
        &self,
        x: &HybridBuffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Hybrid>],
    ) -> Result<(), BackendError> {
        let n_products = products.len();
        let (mut on_cpu, mut on_gpu) = (Vec::new(), Vec::new());
        for Product { stage, w, out } in products {
            let stage = *stage;
            match w {
                Either::Cpu(w) => on_cpu.push(Product {
                    stage,
                    w,
                    out: out.fill_on_cpu(),
                }),
                Either::Gpu(w) => on_gpu.push(Product {
                    stage,
                    w,
                    out: out.fill_on_gpu(),
                }),
            }
        }
        if !on_cpu.is_empty() {
            self.cpu.linear(&*self.on_cpu(x)?, layout, &mut on_cpu)?;
        }
        if !on_gpu.is_empty() {
            let layout = match on_gpu.len() == n_products {
                true => layout,
                false => OutputLayout::Separate,
            };
            self.gpu()?.linear(&*self.on_gpu(x)?, layout, &mut on_gpu)?;
        }
        Ok(())
    }

    fn linear_top(
        &self,
        stage: Stage,
        x: &HybridBuffer,
        w: &OfLinear,
        screen: &OfScreen,
        tops: &[usize],
        out: &mut HybridBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        let Either::Cpu(w) = w else {
            return Err(BackendError::WrongDevice);
        };
        let x = &self.on_cpu(x)?;
        (self.cpu).linear_top(stage, x, w, screen, tops, out.fill_on_cpu())
    }

    fn add_low_rank(
        &self,
        x: &HybridBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Hybrid>],
    ) -> Result<(), BackendError> {
        let sides: Vec<Side> = updates.iter().map(|update| update.out.side()).collect();
        let (mut on_cpu, mut on_gpu) = (Vec::new(), Vec::new());
        for LowRank {
            stage,
            a,
            b,
            scale,
            out,
        } in &mut *updates
        {
            let (stage, scale) = (*stage, *scale);
            match (a, b) {
                (Either::Cpu(a), Either::Cpu(b)) => {
                    let out = self.change_on_cpu(out)?;
                    on_cpu.push(LowRank {
                        stage,
                        a,
                        b,
                        scale,
                        out,
                    });
                }
                (Either::Gpu(a), Either::Gpu(b)) => {
                    let out = self.change_on_gpu(out)?;
                    on_gpu.push(LowRank {
                        stage,
                        a,
                        b,
                        scale,
                        out,
                    });
                }
                _ => return Err(BackendError::WrongDevice),
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

    fn add_bias(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        bias: &OfVector,
    ) -> Result<(), BackendError> {
        match bias {
            Either::Cpu(bias) => self.cpu.add_bias(stage, self.change_on_cpu(x)?, bias),
            Either::Gpu(bias) => self.gpu()?.add_bias(stage, self.change_on_gpu(x)?, bias),
        }
    }

    fn attention(
        &self,
        attention: Attention<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        let Attention {
            layer,
            shape,
            q,
            gated,
            k,
            v,
            q_norm,
            k_norm,
            eps,
            rope,
            sinks,
            shared,
            is_causal,
        } = attention;
        match self.side_of_layer(shared.unwrap_or(layer), q.side()) {
            Side::Cpu => {
                if let (Some(Either::Gpu(_)), _) | (_, Some(Either::Gpu(_))) = (q_norm, k_norm) {
                    return Err(BackendError::WrongDevice);
                }
                let own = &mut OnCpu::caches(sequences)?[..];
                let v = v.map(|v| match shared {
                    None => self.on_cpu(v),
                    Some(_) => Ok(v.as_is_on_cpu()),
                });
                let v = v.transpose()?;
                let attention = Attention {
                    layer,
                    shape,
                    q: self.change_on_cpu(q)?,
                    gated,
                    k: match shared {
                        None => self.change_on_cpu(k)?,
                        Some(_) => k.fill_on_cpu(),
                    },
                    v: v.as_deref(),
                    q_norm: q_norm.and_then(Either::cpu),
                    k_norm: k_norm.and_then(Either::cpu),
                    eps,
                    rope,
                    sinks: of_side(sinks, Either::cpu)?,
                    shared,
                    is_causal,
                };
                self.cpu.attention(attention, own, out.fill_on_cpu())
            }
            Side::Gpu => {
                // Replaced weights may not have fitted in memory next to the keys and values.
                for (x, norm) in [(&mut *q, q_norm), (&mut *k, k_norm)] {
                    if let Some(Either::Cpu(norm)) = norm {
                        let x = self.change_on_cpu(x)?;
                        self.cpu.norm_heads(x, norm, eps)?;
                    }
                }
                let own = &mut OnGpu::caches(sequences)?[..];
                let v = v.map(|v| match shared {
                    None => self.on_gpu(v),
                    Some(_) => Ok(v.as_is_on_gpu()),
                });
                let v = v.transpose()?;
                let attention = Attention {
                    layer,
                    shape,
                    q: self.change_on_gpu(q)?,
                    gated,
                    k: match shared {
                        None => self.change_on_gpu(k)?,
                        Some(_) => k.fill_on_gpu(),
                    },
                    v: v.as_deref(),
                    q_norm: q_norm.and_then(Either::gpu),
                    k_norm: k_norm.and_then(Either::gpu),
                    eps,
                    rope,
                    sinks: of_side(sinks, Either::gpu)?,
                    shared,
                    is_causal,
                };
                self.gpu()?.attention(attention, own, out.fill_on_gpu())
            }
        }
    }

    fn latent_queries(
        &self,
        stage: Stage,
        inputs: LatentInputs<'_, Hybrid>,
        q: &mut HybridBuffer,
        k: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match inputs.w.first() {
            Some(Either::Gpu(_)) => {
                halves::latent_queries::<_, OnGpu>(self, stage, &inputs, [q, k])
            }
            _ => halves::latent_queries::<_, OnCpu>(self, stage, &inputs, [q, k]),
        }
    }

    fn latent_values(
        &self,
        stage: Stage,
        shape: &LatentConfig,
        x: &HybridBuffer,
        w: &[&OfLinear],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match w.first() {
            Some(Either::Gpu(_)) => {
                halves::latent_values::<_, OnGpu>(self, stage, shape, (x, w), out)
            }
            _ => halves::latent_values::<_, OnCpu>(self, stage, shape, (x, w), out),
        }
    }

    fn gate(
        &self,
        stage: Stage,
        activation: Activation,
        gate: &mut HybridBuffer,
        up: &HybridBuffer,
    ) -> Result<(), BackendError> {
        match side_of_both(gate, up) {
            Side::Cpu => {
                let (gate, up) = (self.change_on_cpu(gate)?, &self.on_cpu(up)?);
                self.cpu.gate(stage, activation, gate, up)
            }
            Side::Gpu => {
                let (gate, up) = (self.change_on_gpu(gate)?, &self.on_gpu(up)?);
                self.gpu()?.gate(stage, activation, gate, up)
            }
        }
    }

    fn convolution(
        &self,
        stage: Stage,
        taps: &OfVector,
        input: &HybridBuffer,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match taps {
            Either::Cpu(_) => {
                halves::convolution::<_, OnCpu>(self, stage, (taps, input), sequences, out)
            }
            Either::Gpu(_) => {
                halves::convolution::<_, OnGpu>(self, stage, (taps, input), sequences, out)
            }
        }
    }

    fn delta_net(
        &self,
        stage: Stage,
        mut net: DeltaNet<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match net.taps {
            Either::Cpu(_) => halves::delta_net::<_, OnCpu>(self, stage, &mut net, sequences, out),
            Either::Gpu(_) => halves::delta_net::<_, OnGpu>(self, stage, &mut net, sequences, out),
        }
    }

    fn ssm(
        &self,
        stage: Stage,
        mut ssm: Ssm<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match ssm.taps {
            Either::Cpu(_) => halves::ssm::<_, OnCpu>(self, stage, &mut ssm, sequences, out),
            Either::Gpu(_) => halves::ssm::<_, OnGpu>(self, stage, &mut ssm, sequences, out),
        }
    }

    fn causal_convolution(
        &self,
        stage: Stage,
        convolution: CausalConvolution<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match convolution.taps {
            Either::Cpu(_) => {
                halves::causal_convolution::<_, OnCpu>(self, stage, &convolution, sequences, out)
            }
            Either::Gpu(_) => {
                halves::causal_convolution::<_, OnGpu>(self, stage, &convolution, sequences, out)
            }
        }
    }

    fn selective_scan(
        &self,
        stage: Stage,
        mut scan: SelectiveScan<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match scan.a {
            Either::Cpu(_) => {
                halves::selective_scan::<_, OnCpu>(self, stage, &mut scan, sequences, out)
            }
            Either::Gpu(_) => {
                halves::selective_scan::<_, OnGpu>(self, stage, &mut scan, sequences, out)
            }
        }
    }

    fn layer_norm(
        &self,
        stage: Stage,
        x: &HybridBuffer,
        weights: (&OfVector, &OfVector),
        eps: f32,
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match weights.0 {
            Either::Cpu(_) => halves::layer_norm::<_, OnCpu>(self, stage, x, weights, eps, out),
            Either::Gpu(_) => halves::layer_norm::<_, OnGpu>(self, stage, x, weights, eps, out),
        }
    }

    fn apply(
        &self,
        stage: Stage,
        function: Function,
        x: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.apply(stage, function, x.fill_on_cpu()),
            Side::Gpu => self.gpu()?.apply(stage, function, x.fill_on_gpu()),
        }
    }

    fn multiply(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        y: &HybridBuffer,
    ) -> Result<(), BackendError> {
        match side_of_both(x, y) {
            Side::Cpu => {
                let (x, y) = (self.change_on_cpu(x)?, &self.on_cpu(y)?);
                self.cpu.multiply(stage, x, y)
            }
            Side::Gpu => {
                let (x, y) = (self.change_on_gpu(x)?, &self.on_gpu(y)?);
                self.gpu()?.multiply(stage, x, y)
            }
        }
    }

    fn token_shift(
        &self,
        stage: Stage,
        shift: TokenShift<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match shift.factors {
            Either::Cpu(_) => halves::token_shift::<_, OnCpu>(self, stage, &shift, sequences, out),
            Either::Gpu(_) => halves::token_shift::<_, OnGpu>(self, stage, &shift, sequences, out),
        }
    }

    fn time_mix(
        &self,
        stage: Stage,
        mut mix: TimeMix<'_, Hybrid>,
        sequences: &mut [Sequence<'_, HybridCache>],
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        let parameter = match &mix.recurrence {
            Recurrence::Fixed { first, .. } | Recurrence::Six { first, .. } => first,
            Recurrence::Seven { k_k, .. } => k_k,
        };
        match parameter {
            Either::Cpu(_) => halves::time_mix::<_, OnCpu>(self, stage, &mut mix, sequences, out),
            Either::Gpu(_) => halves::time_mix::<_, OnGpu>(self, stage, &mut mix, sequences, out),
        }
    }

    fn scale(&self, stage: Stage, x: &mut HybridBuffer, factor: f32) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.scale(stage, x.fill_on_cpu(), factor),
            Side::Gpu => self.gpu()?.scale(stage, x.fill_on_gpu(), factor),
        }
    }

    fn add_gated(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        y: &HybridBuffer,
        gate: &HybridBuffer,
    ) -> Result<(), BackendError> {
        match side_of_both(x, y) {
            Side::Cpu => {
                let (y, gate) = (&*self.on_cpu(y)?, &*self.on_cpu(gate)?);
                (self.cpu).add_gated(stage, self.change_on_cpu(x)?, y, gate)
            }
            Side::Gpu => {
                let (y, gate) = (&*self.on_gpu(y)?, &*self.on_gpu(gate)?);
                (self.gpu()?).add_gated(stage, self.change_on_gpu(x)?, y, gate)
            }
        }
    }

    fn normalize_heads(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => {
                let x = x.fill_on_cpu();
                self.cpu.normalize_heads(stage, x, head_dim, eps)
            }
            Side::Gpu => {
                let x = x.fill_on_gpu();
                self.gpu()?.normalize_heads(stage, x, head_dim, eps)
            }
        }
    }

    /// Where the layer is: the others have all of `x` there.
    fn columns(
        &self,
        stage: Stage,
        x: &HybridBuffer,
        columns: Range<usize>,
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        let side = stage.layer.map(|layer| self.side_of_layer(layer, x.side()));
        match side.unwrap_or(x.side()) {
            Side::Cpu => {
                let x = &*self.on_cpu(x)?;
                self.cpu.columns(stage, x, columns, out.fill_on_cpu())
            }
            Side::Gpu => {
                let x = &*self.on_gpu(x)?;
                self.gpu()?.columns(stage, x, columns, out.fill_on_gpu())
            }
        }
    }

    fn scale_by(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        factor: &OfVector,
    ) -> Result<(), BackendError> {
        match factor {
            Either::Cpu(factor) => self.cpu.scale_by(stage, self.change_on_cpu(x)?, factor),
            Either::Gpu(factor) => (self.gpu()?).scale_by(stage, self.change_on_gpu(x)?, factor),
        }
    }

    /// Where the scores were computed: experts are where their router is.
    fn choose_experts(
        &self,
        scores: &HybridBuffer,
        bias: Option<&OfVector>,
        routing: &Routing,
        routes: &mut HybridRoutes,
    ) -> Result<(), BackendError> {
        routes.at = scores.side();
        match (routes.at, &mut routes.gpu) {
            (Side::Cpu, _) => {
                let bias = of_side(bias, Either::cpu)?;
                let (cpu, scores) = (&self.cpu, &self.on_cpu(scores)?);
                cpu.choose_experts(scores, bias, routing, &mut routes.cpu)
            }
            (Side::Gpu, Some(routes)) => {
                let bias = of_side(bias, Either::gpu)?;
                let scores = &self.on_gpu(scores)?;
                self.gpu()?.choose_experts(scores, bias, routing, routes)
            }
            (Side::Gpu, None) => Err(BackendError::WrongDevice),
        }
    }

    fn linear_experts(
        &self,
        routes: &HybridRoutes,
        x: &HybridBuffer,
        input: ExpertInput,
        products: &mut [ExpertProduct<'_, Hybrid>],
    ) -> Result<(), BackendError> {
        let wrong = || BackendError::WrongDevice;
        match (routes.at, &routes.gpu) {
            (Side::Cpu, _) => {
                let mut own = Vec::with_capacity(products.len());
                for ExpertProduct {
                    stage,
                    w,
                    bias,
                    out,
                } in products
                {
                    let w: Option<Vec<_>> = w.iter().map(|w| w.cpu()).collect();
                    own.push(ExpertProduct {
                        stage: *stage,
                        w: w.ok_or_else(wrong)?,
                        bias: of_side(*bias, Either::cpu)?,
                        out: out.fill_on_cpu(),
                    });
                }
                (self.cpu).linear_experts(&routes.cpu, &*self.on_cpu(x)?, input, &mut own)
            }
            (Side::Gpu, Some(routes)) => {
                let mut own = Vec::with_capacity(products.len());
                for ExpertProduct {
                    stage,
                    w,
                    bias,
                    out,
                } in products
                {
                    let w: Option<Vec<_>> = w.iter().map(|w| w.gpu()).collect();
                    own.push(ExpertProduct {
                        stage: *stage,
                        w: w.ok_or_else(wrong)?,
                        bias: of_side(*bias, Either::gpu)?,
                        out: out.fill_on_gpu(),
                    });
                }
                (self.gpu()?).linear_experts(routes, &*self.on_gpu(x)?, input, &mut own)
            }
            (Side::Gpu, None) => Err(wrong()),
        }
    }

    fn combine_experts(
        &self,
        routes: &HybridRoutes,
        y: &HybridBuffer,
        out: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match (routes.at, &routes.gpu) {
            (Side::Cpu, _) => {
                let y = &self.on_cpu(y)?;
                self.cpu.combine_experts(&routes.cpu, y, out.fill_on_cpu())
            }
            (Side::Gpu, Some(routes)) => {
                let y = &self.on_gpu(y)?;
                self.gpu()?.combine_experts(routes, y, out.fill_on_gpu())
            }
            (Side::Gpu, None) => Err(BackendError::WrongDevice),
        }
    }

    fn add(
        &self,
        stage: Stage,
        x: &mut HybridBuffer,
        y: &HybridBuffer,
    ) -> Result<(), BackendError> {
        match side_of_both(x, y) {
            Side::Cpu => {
                let (x, y) = (self.change_on_cpu(x)?, &self.on_cpu(y)?);
                self.cpu.add(stage, x, y)
            }
            Side::Gpu => {
                let (x, y) = (self.change_on_gpu(x)?, &self.on_gpu(y)?);
                self.gpu()?.add(stage, x, y)
            }
        }
    }

    fn softcap(&self, stage: Stage, x: &mut HybridBuffer, cap: f32) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.softcap(stage, x.fill_on_cpu(), cap),
            Side::Gpu => self.gpu()?.softcap(stage, x.fill_on_gpu(), cap),
        }
    }

    fn keep_rows(&self, x: &mut HybridBuffer, rows: &[usize]) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.keep_rows(x.fill_on_cpu(), rows),
            Side::Gpu => self.gpu()?.keep_rows(x.fill_on_gpu(), rows),
        }
    }

    fn submit(&self, x: &mut HybridBuffer) -> Result<HybridReadback, BackendError> {
        Ok(match x.side() {
            Side::Cpu => Either::Cpu(self.cpu.submit(x.fill_on_cpu())?),
            Side::Gpu => Either::Gpu(self.gpu()?.submit(x.fill_on_gpu())?),
        })
    }

    fn submit_all(&self) -> Result<Option<HybridReadback>, BackendError> {
        let submitted = self.device().map(Gpu::submit_all).transpose()?;
        Ok(submitted.flatten().map(Either::Gpu))
    }

    fn submit_apart(
        &self,
        x: &mut HybridBuffer,
        n_rows: &[usize],
    ) -> Result<PendingRows, BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.submit_apart(x.fill_on_cpu(), n_rows),
            Side::Gpu => self.gpu()?.submit_apart(x.fill_on_gpu(), n_rows),
        }
    }

    fn wait<F: Future>(&self, future: F) -> Result<F::Output, BackendError> {
        match self.device() {
            Some(gpu) => gpu.wait(future),
            None => self.cpu.wait(future),
        }
    }

    fn write(
        &self,
        values: &[f32],
        width: usize,
        x: &mut HybridBuffer,
    ) -> Result<(), BackendError> {
        match x.side() {
            Side::Cpu => self.cpu.write(values, width, x.fill_on_cpu()),
            Side::Gpu => self.gpu()?.write(values, width, x.fill_on_gpu()),
        }
    }

    /// A GPU that has the whole model may: only then does it decode on its own.
    fn samples(&self) -> bool {
        (self.gpu.as_ref()).is_some_and(|part| part.placement().is_whole() && part.gpu.samples())
    }

    fn max_lookahead(
        &self,
        sequences: &mut [Continued<'_, HybridCache>],
    ) -> Result<usize, BackendError> {
        match (self.device(), sequences_on_gpu(sequences)) {
            (Some(gpu), Some(mut sequences)) if self.samples() => gpu.max_lookahead(&mut sequences),
            _ => Ok(0),
        }
    }

    fn decode(
        &self,
        logits: &mut HybridBuffer,
        sequences: &mut [Continued<'_, HybridCache>],
        n_steps: usize,
    ) -> Result<Option<Box<dyn Decoding>>, BackendError> {
        let (Some(gpu), Some(mut sequences)) = (self.device(), sequences_on_gpu(sequences)) else {
            return Ok(None);
        };
        // The logits are only inspected, and can still be read afterwards.
        gpu.decode(self.change_on_gpu(logits)?, &mut sequences, n_steps)
    }

    fn read_rows(
        &self,
        logits: &mut HybridBuffer,
        wanted: Vec<RowsWanted<'_, HybridCache>>,
    ) -> Result<PendingRows, BackendError> {
        let wanted = wanted.into_iter().map(|wanted| match wanted {
            RowsWanted::Logits(n_rows) => Ok(RowsWanted::Logits(n_rows)),
            RowsWanted::Token(sequence) => match on_gpu(sequence) {
                Some(sequence) => Ok(RowsWanted::Token(sequence)),
                None => Err(BackendError::Unsupported("sampling on the CPU")),
            },
        });
        let wanted = wanted.collect::<Result<_, _>>()?;
        self.gpu()?.read_rows(self.change_on_gpu(logits)?, wanted)
    }
}

/// The part of `sequence` that is on a GPU.
fn on_gpu<'a>(
    sequence: Continued<'a, HybridCache>,
) -> Option<Continued<'a, <Gpu as Backend>::Cache>> {
    Some(Continued {
        cache: sequence.cache.gpu.as_mut()?,
        last: sequence.last,
        position: sequence.position,
        sampling: sequence.sampling,
    })
}

/// [`on_gpu`] of each.
fn sequences_on_gpu<'a>(
    sequences: &'a mut [Continued<'_, HybridCache>],
) -> Option<Vec<Continued<'a, <Gpu as Backend>::Cache>>> {
    let sequences = sequences.iter_mut().map(|of| Continued {
        cache: &mut *of.cache,
        last: of.last,
        position: of.position,
        sampling: of.sampling,
    });
    sequences.map(on_gpu).collect()
}
