//! The GPU backend, on top of `sterna-gpu`.
//!
//! Operations are collected, and submitted when something is read or the next step begins. A step
//! that consists of the same operations as an earlier one is not recorded again: what differs from token to
//! token (ids, positions, rotations) is in buffers that are written before it runs.

mod buffer;
mod cache;
mod decode;
mod latent;
mod numbers;
mod pages;
#[cfg(not(target_arch = "wasm32"))]
mod part;
mod places;
mod recurrent;
mod rotations;
mod routes;
mod rwkv;
mod states;
mod weights;

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use sterna_format::DType;
use sterna_gpu::graph::{
    ExpertOutput, HeadInputs, Matrix, Norm, Op, Output, SharedGraph, View, join, stack,
};
use sterna_gpu::kernels::experts::Routing as RoutingOnGpu;
use sterna_gpu::kernels::linear::{Epilogue, Stack};
use sterna_gpu::kernels::recurrent::{ScanShape, StepWeights};
use sterna_gpu::kernels::rotate::Rotation;
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::tuning::Sample;
use sterna_gpu::{AdapterKind, Device, GpuError, ReadRange, Submission, Timing};
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::delta::HeadOrder;
use sterna_kernels::experts::{Gating, Routing};
use sterna_kernels::{Exec, Isa};

use crate::backend::{
    Attention, Backend, BackendError, BlockMatrix, CacheShape, CacheType, CausalConvolution,
    Continued, Decoding, DeltaNet, DeviceError, DeviceErrorKind, ExpertInput, ExpertMatrices,
    ExpertProduct, LatentInputs, LayerContents, LinearSource, LowRank, OutputLayout, PendingRows,
    Product, ROTATIONS, RowsRead, RowsWanted, Sampled, ScreenedRows, SelectiveScan, Sequence,
    SnapshotError, SnapshotSink, SnapshotSource, Ssm, TimeMix, TokenShift, WeightData,
};
use crate::config::LatentConfig;
use crate::cpu::Activations;
use crate::stage::Stage;

pub use buffer::GpuBuffer;
use buffer::heads;
pub use cache::GpuCache;
use cache::Samples;
use decode::{Choice, SampleKind, Steps, sample_together};
use pages::{PagePools, lock};
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use part::{LayerNeeds, Reserve};
use recurrent::{ScanLayer, ScanRows, silu_gate};
use rotations::{Rotations, rotated};
pub use routes::GpuRoutes;
pub use sterna_gpu::graph::Work as GpuWork;

/// Runs models on a GPU. Clones share the device and its work queue.
///
/// Ternary layers have the same sums as [`Cpu`](crate::Cpu) for equal activations; everything else differs in
/// the last places.
#[derive(Clone)]
pub struct Gpu {
    device: Device,
    host: Arc<Exec>,
    activations: Activations,
    graph: SharedGraph,
    /// Held by the thread whose operations are in the graph.
    step: Arc<Mutex<()>>,
    /// The staging buffers for uploading weights, while there are any to upload.
    upload: Arc<Mutex<Option<Upload>>>,
    /// Those for restoring sequences, once one was restored.
    restoring: Arc<Mutex<Option<Upload>>>,
    rotations: Rotations,
    pools: PagePools,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("adapter", &self.device.info())
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Uses `device`; `n_threads` threads of this machine, counting the caller, use `isa` to repack weights.
    pub fn new(device: Device, n_threads: usize, isa: Isa) -> Gpu {
        Gpu {
            graph: SharedGraph::new(&device),
            step: Arc::default(),
            device,
            host: Arc::new(Exec::new(n_threads, isa)),
            activations: Activations::default(),
            upload: Arc::default(),
            restoring: Arc::default(),
            rotations: Rotations::default(),
            pools: PagePools::default(),
        }
    }

    /// The same with other activations. Matrices keep the kind they were loaded with.
    pub fn with_activations(self, activations: Activations) -> Gpu {
        Gpu {
            activations,
            ..self
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Counters of work done on the device so far.
    pub fn work(&self) -> GpuWork {
        self.graph.lock().work()
    }

    /// The matrix multiplications of the most recent steps, four at most, each in order: what a
    /// [`Tuner`](sterna_gpu::tuning::Tuner) measures. Empty before the first step.
    pub fn products(&self) -> Vec<Sample> {
        self.graph.lock().products()
    }

    /// Runs `run`, and returns how long each dispatch on the device took, in order; including those of clones
    /// in the meantime. Dispatches don't overlap: the whole takes longer than usual.
    ///
    /// Errors: those of `run`; [`GpuError::Unsupported`], also from operations within, where the device has
    /// no timestamps; [`GpuError::Lost`] and the like from earlier operations that were not waited for.
    pub fn timed<T, E: From<GpuError>>(
        &self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Vec<Timing>), E> {
        let timed = self.graph.time()?;
        let done = run()?;
        Ok((done, timed.timings()?))
    }
}

/// A weight matrix on the device.
#[derive(Debug, Clone)]
pub struct GpuLinear {
    matrix: Matrix,
    /// What inputs of products are rotated by first.
    rotation: Option<Rotation>,
    /// With those of the other experts: of the first expert's matrices.
    stack: Option<Stack>,
}

/// A vector of weights on the device.
#[derive(Debug, Clone)]
pub struct GpuVector {
    buffer: Buffer,
    /// Elements.
    len: usize,
    /// The first of them.
    first: f32,
    /// Of the taps of a layer with a scan, once they are used: all of its vectors together, and which those were.
    steps: Arc<Mutex<Option<(LayerVectors, StepWeights)>>>,
}

/// The vectors of a layer with a scan.
type LayerVectors = [Option<Buffer>; 5];

impl GpuVector {
    fn norm(&self, eps: f32) -> Norm {
        (self.buffer.clone(), eps)
    }
}

/// A pending read-back. Natively the device has to be polled ([`Backend::wait`]).
#[derive(Debug)]
pub struct GpuReadback(Submission);

impl Future for GpuReadback {
    type Output = Result<Vec<f32>, BackendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let read = ready!(Pin::new(&mut self.0).poll(cx))?;
        Poll::Ready(Ok(read
            .into_iter()
            .next()
            .map_or_else(Vec::new, |mut bytes| floats_of(&mut bytes))))
    }
}

impl From<GpuError> for BackendError {
    fn from(error: GpuError) -> BackendError {
        let kind = match error {
            GpuError::Lost { .. } => DeviceErrorKind::Lost,
            GpuError::OutOfMemory { .. } => DeviceErrorKind::OutOfMemory,
            _ => DeviceErrorKind::Other,
        };
        BackendError::Device(DeviceError::new(kind, error))
    }
}

/// What is read to have these rows, which are one after the other.
fn range_of(rows: &View) -> ReadRange {
    let range = rows.offset..rows.offset + rows.n_rows * rows.width;
    ReadRange::of::<f32>(&rows.buffer, range)
}

/// The values that were read, whose bytes are let go.
fn floats_of(bytes: &mut Vec<u8>) -> Vec<f32> {
    let bytes = std::mem::take(bytes);
    let values = bytes.as_chunks::<4>().0.iter();
    values.map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

/// What one of the parts of a [`PendingRows`] becomes.
enum RowsKind {
    /// Of the part with this number.
    Logits(usize),
    /// Of a step at a position, by how it was sampled.
    Token {
        group: usize,
        member: usize,
        position: usize,
        /// Of its logits.
        row: usize,
    },
    Undecided,
}

/// There are no screens on GPUs: the whole output head is read.
#[derive(Debug)]
pub enum GpuScreen {}

/// Up to this many rows of a sequence, split-KV is used, so that the device is fully occupied.
const MAX_SPLIT_KV_ROWS: usize = 8;

impl Backend for Gpu {
    type Routes = GpuRoutes;
    type Linear = GpuLinear;
    type Vector = GpuVector;
    type Screen = GpuScreen;
    type Buffer = GpuBuffer;
    type Cache = GpuCache;
    type Readback = GpuReadback;

    fn host(&self) -> &Exec {
        &self.host
    }

    /// All weights are copied to the device.
    fn rewrites(&self, _dtype: DType, _k: usize) -> bool {
        true
    }

    /// Half of the bytes, and what prompts by matrix units read. Software gains nothing by it.
    fn usual_cache(&self) -> CacheType {
        match self.device.info().kind {
            AdapterKind::Software => CacheType::F32,
            _ => CacheType::F16,
        }
    }

    fn load_linear(&self, source: LinearSource) -> Result<GpuLinear, BackendError> {
        let mut upload = lock(&self.upload);
        let (device, host) = (&self.device, &*self.host);
        let linear = weights::load(device, host, &mut upload, &source, self.activations)?;
        Ok(GpuLinear {
            matrix: Matrix::new(linear),
            rotation: self.rotations.get(device, source.rotation)?,
            stack: None,
        })
    }

    fn loads_rows(&self) -> bool {
        true
    }

    fn begin_linear(&self, shape: BlockMatrix) -> Result<GpuLinear, BackendError> {
        let BlockMatrix {
            n,
            k,
            dtype,
            rotation,
        } = shape;
        let linear = weights::begin(&self.device, (n, k), dtype, self.activations)?;
        Ok(GpuLinear {
            matrix: Matrix::new(linear),
            rotation: self.rotations.get(&self.device, rotation)?,
            stack: None,
        })
    }

    fn load_rows(
        &self,
        linear: &mut GpuLinear,
        rows: Range<usize>,
        weights: &WeightData,
    ) -> Result<(), BackendError> {
        let mut upload = lock(&self.upload);
        let (device, host, linear) = (&self.device, &*self.host, linear.matrix.linear());
        weights::load_rows(
            device,
            host,
            &mut upload,
            &linear,
            rows,
            weights,
            self.activations,
        )
    }

    fn join(&self, matrices: &mut [&mut GpuLinear]) -> Result<(), BackendError> {
        let mut parts: Vec<&mut Matrix> = matrices.iter_mut().map(|m| &mut m.matrix).collect();
        join(&self.device, &mut parts)?;
        Ok(())
    }

    fn join_experts(&self, experts: &mut ExpertMatrices<'_, Gpu>) -> Result<(), BackendError> {
        let ExpertMatrices { gate, up, down } = experts;
        // What is multiplied together is stored together.
        for sets in [&mut [gate, up][..], &mut [down]] {
            let matrices = sets.iter_mut().map(|set| {
                let matrices = set.iter_mut().map(|linear| &mut linear.matrix);
                matrices.collect()
            });
            let stacks = stack(&self.device, &mut matrices.collect::<Vec<_>>())?;
            for (set, stack) in sets.iter_mut().zip(stacks) {
                if let Some(first) = set.first_mut() {
                    first.stack = Some(stack);
                }
            }
        }
        Ok(())
    }

    fn join_heads(&self, matrices: &mut [&mut GpuLinear]) -> Result<(), BackendError> {
        let own = matrices.iter_mut().map(|linear| &mut linear.matrix);
        let stacks = stack(&self.device, &mut [own.collect()])?;
        if let Some(first) = matrices.first_mut() {
            first.stack = stacks.into_iter().next();
        }
        Ok(())
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<GpuVector, BackendError> {
        Ok(GpuVector {
            buffer: self.device.upload(&values)?,
            len: values.len(),
            first: values.first().copied().unwrap_or(0.0),
            steps: Arc::default(),
        })
    }

    fn has_screen_of(&self, _: &GpuLinear) -> bool {
        false
    }

    fn load_screen(&self, _: &GpuLinear, _: DType) -> Result<GpuScreen, BackendError> {
        Err(BackendError::from(GpuError::Unsupported {
            what: "a screen of the output head".into(),
            reason: "GPUs read the whole head".into(),
        }))
    }

    fn buffer(&self) -> GpuBuffer {
        GpuBuffer::default()
    }

    fn routes(&self) -> GpuRoutes {
        GpuRoutes::default()
    }

    fn cache(&self, shape: &CacheShape) -> Result<GpuCache, BackendError> {
        // Weights are loaded before sessions begin: the staging buffers are no longer needed.
        *lock(&self.upload) = None;
        Ok(GpuCache::new(shape, &self.graph, &self.pools))
    }

    fn save_layer(
        &self,
        cache: &mut GpuCache,
        layer: usize,
        to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        // What is saved may not have been computed yet.
        self.graph.lock().flush().map_err(BackendError::from)?;
        cache.save(&self.device, &mut self.graph.lock(), layer, to)
    }

    fn restore_layer(
        &self,
        cache: &mut GpuCache,
        layer: usize,
        held: LayerContents,
        from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        let mut staging = lock(&self.restoring);
        let upload = weights::staging(&self.device, &mut staging).map_err(BackendError::from)?;
        let device = (&self.device, upload);
        let restored = cache.restore(device, &mut self.graph.lock(), layer, held, from);
        if restored.is_err() {
            // Of uploads that failed, slots may be missing.
            *staging = None;
        }
        restored
    }

    /// Submits what is pending of the previous step: its inputs are about to be replaced.
    fn flush(&self) -> Result<(), BackendError> {
        Ok(self.graph.lock().flush()?)
    }

    fn exclusive(&self) -> Option<MutexGuard<'_, ()>> {
        Some(lock(&self.step))
    }

    fn begin_step(&self) -> Result<(), BackendError> {
        Ok(self.graph.lock().begin_step()?)
    }

    fn embed(
        &self,
        table: &GpuLinear,
        ids: &[u32],
        scale: f32,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let n_rows = ids.len();
        let ids = out.write_ids(&self.device, ids)?;
        let out = out.shape(&self.device, n_rows, table.matrix.k())?;
        self.graph.lock().push(Op::Embed {
            table: table.matrix.clone(),
            ids,
            factor: scale,
            out: out.clone(),
        });
        if let Some(rotation) = &table.rotation {
            self.graph.lock().push(Op::Rotate {
                rotation: rotation.clone(),
                inverse: true,
                x: out.clone(),
                out,
            });
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        _: Stage,
        x: &GpuBuffer,
        weight: &GpuVector,
        eps: f32,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        let out = out.shape(&self.device, x.n_rows, x.width)?;
        let norm = weight.norm(eps);
        self.graph.lock().push(Op::RmsNorm {
            x,
            norm,
            n_groups: 1,
            out,
        });
        Ok(())
    }

    fn rms_norm_in_place(
        &self,
        _: Stage,
        x: &mut GpuBuffer,
        weight: &GpuVector,
        eps: f32,
    ) -> Result<(), BackendError> {
        let rows = x.view()?;
        let n_runs = rows.width.checked_div(weight.len).unwrap_or(1);
        let rows = if n_runs > 1 {
            heads(rows, n_runs)?
        } else {
            rows.clone()
        };
        self.graph.lock().push(Op::RmsNorm {
            x: rows.clone(),
            norm: weight.norm(eps),
            n_groups: 1,
            out: rows,
        });
        Ok(())
    }

    fn linear(
        &self,
        x: &GpuBuffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Gpu>],
    ) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        // With adjacent columns, the memory of the first output holds all.
        let mut joined: Option<(View, usize)> = None;
        if layout == OutputLayout::SideBySide {
            let width = products.iter().map(|product| product.w.matrix.n()).sum();
            if let Some(first) = products.first_mut() {
                joined = Some((first.out.shape(&self.device, x.n_rows, width)?, 0));
            }
        }
        // Those with one rotation are computed together.
        let mut groups: Vec<(Option<&Rotation>, Vec<Output>)> = Vec::new();
        for Product { w, out, .. } in products {
            let n = w.matrix.n();
            let own = match &mut joined {
                Some((all, column)) => {
                    let own = all.columns(*column, n);
                    *column += n;
                    out.set(own.clone());
                    own
                }
                None => out.shape(&self.device, x.n_rows, n)?,
            };
            let output = Output {
                w: w.matrix.clone(),
                out: own,
                epilogue: Epilogue::Store,
            };
            let rotation = w.rotation.as_ref();
            match groups.iter_mut().find(|(of, _)| *of == rotation) {
                Some((_, outputs)) => outputs.push(output),
                None => groups.push((rotation, vec![output])),
            }
        }
        let mut graph = self.graph.lock();
        for (rotation, outputs) in groups {
            let x = rotated(&mut graph, rotation, &x)?;
            let norm = None;
            graph.push(Op::Linear { x, norm, outputs });
        }
        Ok(())
    }

    fn linear_top(
        &self,
        _: Stage,
        _: &GpuBuffer,
        _: &GpuLinear,
        screen: &GpuScreen,
        _: &[usize],
        _: &mut GpuBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        match *screen {}
    }

    fn add_low_rank(
        &self,
        x: &GpuBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Gpu>],
    ) -> Result<(), BackendError> {
        let x = x.view()?.rows(rows.start, rows.len());
        let mut graph = self.graph.lock();
        for LowRank {
            a, b, scale, out, ..
        } in updates
        {
            let out = out.view()?.rows(rows.start, rows.len());
            let inner = graph.scratch(rows.len() * a.matrix.n())?;
            let inner = View::new(&inner, rows.len(), a.matrix.n());
            let product = |x: View, w: &GpuLinear, out: View, epilogue| Op::Linear {
                x,
                norm: None,
                outputs: vec![Output {
                    w: w.matrix.clone(),
                    out,
                    epilogue,
                }],
            };
            graph.push(product(x.clone(), a, inner.clone(), Epilogue::Store));
            graph.push(Op::Scale {
                x: inner.clone(),
                factor: *scale,
            });
            graph.push(product(inner, b, out, Epilogue::Add));
        }
        Ok(())
    }

    fn add_bias(&self, _: Stage, x: &mut GpuBuffer, bias: &GpuVector) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        let bias = bias.buffer.clone();
        self.graph.lock().push(Op::AddBias { x, bias });
        Ok(())
    }

    fn attention(
        &self,
        Attention {
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
        }: Attention<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let mut graph = self.graph.lock();
        let device = &self.device;
        let qkv = match shared {
            None => {
                let parts: Vec<&GpuBuffer> = [&*q, &*k].into_iter().chain(v).collect();
                out.side_by_side(device, &mut graph, &parts)?
            }
            Some(_) => q.view()?.clone(),
        };
        let (q_width, n_rows) = (q.view()?.width, qkv.n_rows);
        let width = if gated { q_width / 2 } else { q_width };
        let out = out.shape(device, n_rows, width)?;
        let keys = shared.unwrap_or(layer);
        let groups = cache::groups(device, &mut graph, sequences, keys)?;
        let rope = match (rope, sequences.first_mut()) {
            (Some(rope), Some(first)) => Some(first.cache.rope_table(device, rope)?),
            _ => None,
        };
        for group in groups {
            let is_few = group.sequences.n_rows <= MAX_SPLIT_KV_ROWS;
            graph.push(Op::Heads {
                heads: HeadInputs {
                    qkv: qkv.clone(),
                    has_keys: shared.is_none(),
                    n_heads: shape.n_heads,
                    whole_norms: false,
                    q_norm: q_norm.map(|weight| weight.norm(eps)),
                    k_norm: k_norm.map(|weight| weight.norm(eps)),
                    rope: rope.clone(),
                    sequences: group.sequences.clone(),
                },
                cache: group.memory.clone(),
            });
            graph.push(Op::Attention {
                shape,
                sinks: sinks.map(|sinks| sinks.buffer.clone()),
                q: qkv.columns(0, q_width),
                sequences: group.sequences,
                cache: group.memory,
                most_len: (is_causal && is_few).then_some(group.most_len),
                is_causal,
                out: out.clone(),
            });
        }
        if gated {
            graph.push(Op::GateHeads {
                x: out,
                q: qkv.columns(0, q_width),
                head_dim: shape.head_dim,
            });
        }
        Ok(())
    }

    fn latent_queries(
        &self,
        _: Stage,
        inputs: LatentInputs<'_, Gpu>,
        q: &mut GpuBuffer,
        k: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        self.queries_of_latent(inputs, q, k)
    }

    fn latent_values(
        &self,
        _: Stage,
        shape: &LatentConfig,
        x: &GpuBuffer,
        w: &[&GpuLinear],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        self.values_of_latent(shape, x, w, out)
    }

    fn gate(
        &self,
        _: Stage,
        activation: Activation,
        gate: &mut GpuBuffer,
        up: &GpuBuffer,
    ) -> Result<(), BackendError> {
        let (gate, up) = (gate.view()?.clone(), up.view()?.clone());
        self.graph.lock().push(Op::Gate {
            activation,
            gate,
            up,
        });
        Ok(())
    }

    fn convolution(
        &self,
        stage: Stage,
        taps: &GpuVector,
        input: &GpuBuffer,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let input = input.view()?.clone();
        let out = out.shape(&self.device, input.n_rows, input.width / 3)?;
        let n_state = taps.len.saturating_sub(out.width);
        self.for_states(stage, n_state, sequences, |graph, state| {
            graph.push(Op::Convolve {
                convolution: taps.convolution(out.width, None, true),
                x: input.clone(),
                state,
                out: out.clone(),
            });
        })
    }

    fn delta_net(
        &self,
        stage: Stage,
        DeltaNet {
            shape,
            taps,
            a,
            dt_bias,
            norm,
            eps,
            qkv,
            gate,
            alpha,
            beta,
        }: DeltaNet<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let scan = ScanShape {
            n_heads: shape.n_value_heads,
            n_key_heads: shape.n_key_heads,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            is_tiled: shape.order == HeadOrder::Tiled,
            is_delta: true,
        };
        let layer = ScanLayer {
            shape: scan,
            taps,
            conv_bias: None,
            a,
            dt_bias,
            last: norm,
            eps,
        };
        let rows = ScanRows {
            x: qkv,
            gate,
            steps: alpha,
            beta: Some(beta),
        };
        self.recurrent(stage, &layer, rows, sequences, out)?;
        Ok(())
    }

    fn ssm(
        &self,
        stage: Stage,
        Ssm {
            shape,
            taps,
            conv_bias,
            a,
            d,
            dt_bias,
            norm,
            eps,
            gate,
            xbc,
            dt,
        }: Ssm<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let scan = ScanShape {
            n_heads: shape.n_heads,
            n_key_heads: shape.n_groups,
            key_dim: shape.state_dim,
            value_dim: shape.head_dim,
            is_tiled: false,
            is_delta: false,
        };
        let layer = ScanLayer {
            shape: scan,
            taps,
            conv_bias,
            a,
            dt_bias,
            last: d,
            eps,
        };
        let rows = ScanRows {
            x: xbc,
            gate,
            steps: dt,
            beta: None,
        };
        let rows = self.recurrent(stage, &layer, rows, sequences, out)?;
        if let Some(norm) = norm {
            self.graph.lock().push(Op::RmsNorm {
                x: rows.clone(),
                norm: norm.norm(eps),
                n_groups: shape.n_groups,
                out: rows,
            });
        }
        Ok(())
    }

    fn causal_convolution(
        &self,
        stage: Stage,
        CausalConvolution {
            shape,
            taps,
            bias,
            input,
        }: CausalConvolution<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let input = input.view()?.clone();
        let out = out.shape(&self.device, input.n_rows, input.width)?;
        let n_state = taps.len.saturating_sub(input.width) + shape.state();
        self.for_states(stage, n_state, sequences, |graph, state| {
            graph.push(Op::Convolve {
                convolution: taps.convolution(input.width, bias, false),
                x: input.clone(),
                state,
                out: out.clone(),
            });
        })
    }

    fn selective_scan(
        &self,
        stage: Stage,
        scan: SelectiveScan<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let [x, dt, b, c] = [scan.x, scan.dt, scan.b, scan.c].map(GpuBuffer::view);
        let (x, dt, b, c) = (x?, dt?, b?, c?);
        let out = out.shape(&self.device, x.n_rows, x.width)?;
        let n_window = scan.n_taps.saturating_sub(1) * scan.shape.inner;
        let n_state = n_window + scan.shape.state();
        // Its outputs replace its inputs.
        self.graph.lock().push(Op::Copy {
            x: out.clone(),
            y: x.clone(),
        });
        self.for_states(stage, n_state, sequences, |graph, state| {
            graph.push(Op::Mamba {
                x: out.clone(),
                dt: dt.clone(),
                b: b.clone(),
                c: c.clone(),
                a: scan.a.buffer.clone(),
                d: scan.d.buffer.clone(),
                state: state.part(n_window),
            });
        })?;
        let gate = scan.gate.view()?.clone();
        self.graph.lock().push(silu_gate(out, gate));
        Ok(())
    }

    fn layer_norm(
        &self,
        _: Stage,
        x: &GpuBuffer,
        (weight, bias): (&GpuVector, &GpuVector),
        eps: f32,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        let out = out.shape(&self.device, x.n_rows, x.width)?;
        self.graph.lock().push(Op::LayerNorm {
            x,
            weight: weight.buffer.clone(),
            bias: bias.buffer.clone(),
            eps,
            out,
        });
        Ok(())
    }

    fn apply(&self, _: Stage, function: Function, x: &mut GpuBuffer) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        let function = rwkv::function(function);
        self.graph.lock().push(Op::Apply { function, x });
        Ok(())
    }

    fn multiply(&self, _: Stage, x: &mut GpuBuffer, y: &GpuBuffer) -> Result<(), BackendError> {
        let (x, y) = (x.view()?.clone(), y.view()?.clone());
        self.graph.lock().push(Op::Multiply { x, y });
        Ok(())
    }

    fn token_shift(
        &self,
        stage: Stage,
        shift: TokenShift<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        self.shift(stage, shift, sequences, out)
    }

    fn time_mix(
        &self,
        stage: Stage,
        mix: TimeMix<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        self.mix(stage, mix, sequences, out)
    }

    fn normalize_heads(
        &self,
        _: Stage,
        x: &mut GpuBuffer,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        let n_groups = x.width / head_dim.max(1);
        self.graph.lock().push(Op::Normalize { x, n_groups, eps });
        Ok(())
    }

    fn columns(
        &self,
        _: Stage,
        x: &GpuBuffer,
        columns: Range<usize>,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let y = x.view()?.columns(columns.start, columns.len());
        let x = out.shape(&self.device, y.n_rows, y.width)?;
        self.graph.lock().push(Op::Copy { x, y });
        Ok(())
    }

    fn scale(&self, _: Stage, x: &mut GpuBuffer, factor: f32) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        self.graph.lock().push(Op::Scale { x, factor });
        Ok(())
    }

    fn scale_by(
        &self,
        stage: Stage,
        x: &mut GpuBuffer,
        factor: &GpuVector,
    ) -> Result<(), BackendError> {
        self.scale(stage, x, factor.first)
    }

    fn add_gated(
        &self,
        _: Stage,
        x: &mut GpuBuffer,
        y: &GpuBuffer,
        gate: &GpuBuffer,
    ) -> Result<(), BackendError> {
        let [x, y, gate] = [x, y, gate].map(|rows| rows.view().cloned());
        let (x, y, gate) = (x?, y?, gate?);
        self.graph.lock().push(Op::AddGated { x, y, gate });
        Ok(())
    }

    fn choose_experts(
        &self,
        scores: &GpuBuffer,
        bias: Option<&Self::Vector>,
        routing: &Routing,
        routes: &mut GpuRoutes,
    ) -> Result<(), BackendError> {
        let scores = scores.view()?.clone();
        let routes = routes.shape(&self.device, scores.n_rows, routing.n_used)?;
        self.graph.lock().push(Op::Route {
            scores,
            bias: bias.map(|bias| bias.buffer.clone()),
            routing: RoutingOnGpu {
                is_sigmoid: routing.gating == Gating::Sigmoid,
                renormalised: routing.renormalised,
                groups: routing
                    .groups
                    .map(|groups| (groups.n_groups, groups.n_used)),
                scale: routing.scale,
            },
            routes,
        });
        Ok(())
    }

    fn linear_experts(
        &self,
        routes: &GpuRoutes,
        x: &GpuBuffer,
        _: ExpertInput,
        products: &mut [ExpertProduct<'_, Gpu>],
    ) -> Result<(), BackendError> {
        let (x, routes) = (x.view()?.clone(), routes.get()?.clone());
        let n_routes = routes.n_rows * routes.n_used;
        let mut outputs = Vec::with_capacity(products.len());
        let mut biases = Vec::new();
        let mut rotations = products.iter().flat_map(|p| &p.w).map(|w| &w.rotation);
        let rotation = rotations.next().and_then(Option::as_ref);
        if rotations.any(|other| other.as_ref() != rotation) {
            return Err(BackendError::Unsupported(ROTATIONS));
        }
        for ExpertProduct { w, bias, out, .. } in products {
            let Some(stack) = w.first().and_then(|first| first.stack.clone()) else {
                return Err(BackendError::from(GpuError::Unsupported {
                    what: "a product with matrices of experts".into(),
                    reason: "they weren't joined".into(),
                }));
            };
            let out = out.shape(&self.device, n_routes, stack.n())?;
            if let Some(bias) = bias {
                biases.push(Op::ExpertBias {
                    x: out.clone(),
                    routes: routes.clone(),
                    bias: bias.buffer.clone(),
                });
            }
            outputs.push(ExpertOutput {
                out,
                w: stack,
                epilogue: Epilogue::Store,
            });
        }
        let mut graph = self.graph.lock();
        let x = rotated(&mut graph, rotation, &x)?;
        graph.push(Op::Experts {
            x,
            norm: None,
            choice: None,
            routes,
            outputs,
        });
        for bias in biases {
            graph.push(bias);
        }
        Ok(())
    }

    fn combine_experts(
        &self,
        routes: &GpuRoutes,
        y: &GpuBuffer,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let (y, routes) = (y.view()?.clone(), routes.get()?.clone());
        let out = out.shape(&self.device, routes.n_rows, y.width)?;
        self.graph.lock().push(Op::Combine {
            routes,
            y,
            adds: false,
            out,
        });
        Ok(())
    }

    fn add(&self, _: Stage, x: &mut GpuBuffer, y: &GpuBuffer) -> Result<(), BackendError> {
        let (x, y) = (x.view()?.clone(), y.view()?.clone());
        self.graph.lock().push(Op::Add { x, y });
        Ok(())
    }

    fn softcap(&self, _: Stage, x: &mut GpuBuffer, cap: f32) -> Result<(), BackendError> {
        let x = x.view()?.clone();
        self.graph.lock().push(Op::Softcap { x, cap });
        Ok(())
    }

    fn keep_rows(&self, x: &mut GpuBuffer, rows: &[usize]) -> Result<(), BackendError> {
        x.keep_rows(&self.device, &mut self.graph.lock(), rows)
    }

    fn submit(&self, x: &mut GpuBuffer) -> Result<GpuReadback, BackendError> {
        let mut graph = self.graph.lock();
        let rows = x.dense(&self.device, &mut graph)?;
        let range = rows.offset..rows.offset + rows.n_rows * rows.width;
        let submission = graph.submit(&[ReadRange::of::<f32>(&rows.buffer, range)])?;
        Ok(GpuReadback(submission))
    }

    fn submit_apart(
        &self,
        x: &mut GpuBuffer,
        n_rows: &[usize],
    ) -> Result<PendingRows, BackendError> {
        let wanted = n_rows.iter().map(|n_rows| RowsWanted::Logits(*n_rows));
        self.read_rows(x, wanted.collect())
    }

    fn submit_all(&self) -> Result<Option<GpuReadback>, BackendError> {
        self.graph.lock().flush()?;
        Ok(Some(GpuReadback(self.device.submit(&[], &[])?)))
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn wait<F: Future>(&self, future: F) -> Result<F::Output, BackendError> {
        Ok(self.device.block_on(future)?)
    }

    fn write(&self, values: &[f32], width: usize, x: &mut GpuBuffer) -> Result<(), BackendError> {
        // Earlier operations still read the current contents.
        self.graph.lock().flush()?;
        x.overwrite(&self.device, values, width)
    }

    fn samples(&self) -> bool {
        true
    }

    fn max_lookahead(
        &self,
        sequences: &mut [Continued<'_, GpuCache>],
    ) -> Result<usize, BackendError> {
        if !decode::are_alike(sequences) {
            return Ok(0);
        }
        // Commands are recorded for contexts as long as the longest.
        let longest = sequences.iter().map(|of| of.position).max().unwrap_or(0);
        let most = cache::most_len(longest + 1) - longest;
        let mut n_steps = most.min(decode::most_steps(sequences.len()));
        for of in &mut *sequences {
            let can = decode::steps_from(of.position, &of.sampling);
            if can == 0 {
                return Ok(0);
            }
            // Copies as memory grows would split the step in two. What each needs comes before what more there is.
            of.cache.prepare(&self.device, &mut self.graph.lock())?;
            n_steps = n_steps.min(can);
        }
        for of in sequences {
            n_steps = n_steps.min(of.cache.n_steps());
            if of.sampling.window > 0 {
                // There is room for as many tokens.
                n_steps = n_steps.min(cache::most_len(of.position + 1) - of.position);
            }
        }
        Ok(n_steps)
    }

    fn decode(
        &self,
        logits: &mut GpuBuffer,
        sequences: &mut [Continued<'_, GpuCache>],
        n_steps: usize,
    ) -> Result<Option<Box<dyn Decoding>>, BackendError> {
        let mut graph = self.graph.lock();
        let logits = logits.dense(&self.device, &mut graph)?;
        let step = graph.step();
        let samples = cache::continue_from(&self.device, step, &logits, sequences)?;
        let Some(Samples {
            ops,
            reads,
            masks,
            current,
        }) = samples
        else {
            return Ok(None);
        };
        let commands = graph.repeatable(ops)?;
        let positions: Vec<usize> = sequences.iter().map(|of| of.position).collect();
        let are_forked: Vec<_> = sequences
            .iter()
            .filter_map(|of| of.cache.states())
            .collect();
        Ok(commands.zip(sequences.first()).map(|(commands, first)| {
            let (positions, moves) = ((positions, n_steps), first.cache.moves());
            let read = (reads, masks.map(|masks| (masks, current)));
            let steps = Steps::new(&self.graph, commands, read, positions, are_forked, moves);
            Box::new(steps) as Box<dyn Decoding>
        }))
    }

    fn read_rows(
        &self,
        logits: &mut GpuBuffer,
        wanted: Vec<RowsWanted<'_, GpuCache>>,
    ) -> Result<PendingRows, BackendError> {
        let mut graph = self.graph.lock();
        let rows = logits.dense(&self.device, &mut graph)?;
        let (mut reads, mut kinds) = (Vec::new(), Vec::new());
        // Those that are sampled for in the same way are together.
        let mut groups: Vec<(SampleKind, Vec<Choice<'_>>)> = Vec::new();
        let mut row = 0;
        for wanted in wanted {
            let first = row;
            kinds.push(match wanted {
                RowsWanted::Logits(n_rows) => {
                    row += n_rows;
                    reads.push(range_of(&rows.rows(first, n_rows)));
                    RowsKind::Logits(reads.len() - 1)
                }
                RowsWanted::Token(sequence) => {
                    row += 1;
                    let position = sequence.position;
                    match SampleKind::of(&sequence.sampling) {
                        None => RowsKind::Undecided,
                        Some(kind) => {
                            let known = groups.iter().position(|(of, _)| *of == kind);
                            let group = known.unwrap_or_else(|| {
                                groups.push((kind, Vec::new()));
                                groups.len() - 1
                            });
                            let members = &mut groups[group].1;
                            members.push((sequence, first));
                            RowsKind::Token {
                                group,
                                member: members.len() - 1,
                                position,
                                row: first,
                            }
                        }
                    }
                }
            });
        }
        let n_logits = reads.len();
        let mut samples = Vec::with_capacity(groups.len());
        for (kind, mut choices) in groups {
            let (sample, own) = sample_together(&self.device, &rows, kind, &mut choices)?;
            let before = sample.logits_before().cloned();
            let first = reads.len();
            reads.extend_from_slice(own.ranges());
            samples.push((own, first..reads.len(), before));
            graph.push(Op::Sample(sample));
        }
        let submission = graph.submit(&reads)?;
        let (host, device) = (Arc::clone(&self.host), self.device.clone());
        Ok(Box::pin(async move {
            let mut read = submission.await?;
            let logits = &mut read[..n_logits];
            // In a browser threads are for what a CPU computes.
            let mut logits = match cfg!(target_arch = "wasm32") {
                true => logits.iter_mut().map(floats_of).collect(),
                false => host.map_mut(logits, floats_of),
            };
            let mut of_host = Vec::new();
            let parts = kinds.into_iter().enumerate().map(|(i, kind)| match kind {
                RowsKind::Logits(i) => RowsRead::Logits(std::mem::take(&mut logits[i])),
                RowsKind::Token {
                    group,
                    member,
                    position,
                    row,
                } => {
                    let (own, ranges, before) = &samples[group];
                    match own.sampled(&read[ranges.clone()], member, position) {
                        Sampled::Token(chosen) => RowsRead::Token(chosen),
                        Sampled::Undecided => {
                            let before = before.as_ref();
                            of_host.extend(before.map(|rows| (i, range_of(&rows.rows(row, 1)))));
                            RowsRead::Undecided
                        }
                    }
                }
                RowsKind::Undecided => RowsRead::Undecided,
            });
            let mut parts: Vec<RowsRead> = parts.collect();
            if !of_host.is_empty() {
                // They are still there: whoever waits for this has what the sequences compute with.
                let (undecided, ranges): (Vec<_>, Vec<_>) = of_host.into_iter().unzip();
                let read = device.submit(&[], &ranges)?.await?;
                for (i, mut read) in undecided.into_iter().zip(read) {
                    parts[i] = RowsRead::Logits(floats_of(&mut read));
                }
            }
            Ok(parts)
        }))
    }
}
