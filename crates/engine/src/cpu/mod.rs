//! The CPU backend, on top of `sterna-kernels`.

mod cache;
mod states;

use std::future::{Ready, ready};
use std::ops::Range;
use std::slice::ChunksExact;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use sterna_format::DType;
use sterna_kernels::activation::{self, Activation, Function};
use sterna_kernels::attention::{self, Queries, attention_of_each};
use sterna_kernels::delta::{DeltaWeights, Projections, delta_net};
use sterna_kernels::experts::{Routes, Routing};
use sterna_kernels::gemm::{
    self, BlockMatrix, InterleavedMatrix, Matrix, Rounding, RowOp, Screen, TernaryMatrix,
};
use sterna_kernels::hadamard::Rotation;
use sterna_kernels::mamba::{self, MambaInputs};
use sterna_kernels::quant::QuantError;
use sterna_kernels::rwkv::{self, Decay, Finish, Generation, Part, Rkv, Shift, Wkv7Inputs};
use sterna_kernels::ssm::{self, SsmInputs};
use sterna_kernels::{Exec, Isa, ShapeError, State, conv, norm, rope, vector};

pub use cache::CpuCache;

use crate::backend::{
    self, Attention, Backend, BackendError, CacheShape, DeltaNet, ExpertInput, ExpertMatrices,
    ExpertMemory, ExpertProduct, KvCache, LayerContents, LinearSource, LowRank, OutputLayout,
    PendingRows, Product, Prologue, ROTATIONS, RmsNorm, RowsRead, ScreenedRows, Sequence,
    SnapshotError, SnapshotSink, SnapshotSource, Ssm, WeightData,
};
use crate::config::LatentConfig;
use crate::rope::Angles;
use crate::stage::Stage;

/// How activations are represented for weights that are blocks of integers (Q8_0, Q4_K and the like).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// Quantized to int8, block by block: sums within a block are integers. Several times as fast, at the
    /// price of an error in the range of 8-bit weights.
    #[default]
    Int8,
    /// Floats, with weights dequantized to floats: what the reference implementations of the models compute,
    /// for comparisons.
    F32,
}

/// Runs models on the processor's cores.
///
/// Results depend on neither the number of threads nor the instruction set.
#[derive(Debug)]
pub struct Cpu {
    exec: Exec,
    /// The calling thread alone: for operations within a task.
    alone: Exec,
    activations: Activations,
    /// Quantized activations, reused across layers.
    scratch: Mutex<gemm::Scratch>,
    /// Partial results of attention, likewise.
    spans: Mutex<attention::Scratch>,
    /// Intermediate results of adapters, likewise.
    low_rank: Mutex<LowRankScratch>,
    /// Rows of experts, likewise.
    experts: Mutex<ExpertScratch>,
    expert_memory: OnceLock<Arc<dyn ExpertMemory>>,
    /// Rotated activations, likewise.
    rotated: Mutex<RotatedScratch>,
    /// Gates of attention, likewise.
    gates: Mutex<Vec<f32>>,
    /// Queries, keys and values after their convolution, or directions that time mixing forgets, likewise.
    convolved: Mutex<Vec<f32>>,
}

/// Memory for inputs of matrices that are stored rotated.
#[derive(Debug, Default)]
struct RotatedScratch {
    /// The input, for each rotation.
    rows: Vec<Vec<f32>>,
    /// Quantized activations, likewise.
    forms: Vec<gemm::Scratch>,
}

/// Memory for [`Backend::linear_experts`].
#[derive(Debug, Default)]
struct ExpertScratch {
    /// The input, a row for each route.
    rows: Vec<f32>,
    /// Quantized activations of each expert.
    forms: Vec<gemm::Scratch>,
}

/// Memory for [`Backend::add_low_rank`].
#[derive(Debug, Default)]
struct LowRankScratch {
    /// `x · aᵀ` of each update, `[n_rows, rank]`.
    inner: Vec<Vec<f32>>,
    /// The output of one of them, `[n_rows, n]`.
    change: Vec<f32>,
}

impl Cpu {
    /// `n_threads` threads, counting the caller, using `isa`.
    pub fn new(n_threads: usize, isa: Isa) -> Cpu {
        Cpu {
            exec: Exec::new(n_threads, isa),
            alone: Exec::new(1, isa),
            activations: Activations::default(),
            scratch: Mutex::default(),
            spans: Mutex::default(),
            low_rank: Mutex::default(),
            experts: Mutex::default(),
            expert_memory: OnceLock::new(),
            rotated: Mutex::default(),
            gates: Mutex::default(),
            convolved: Mutex::default(),
        }
    }

    /// The same with other activations. Matrices keep the kind they were loaded with.
    pub fn with_activations(self, activations: Activations) -> Cpu {
        Cpu {
            activations,
            ..self
        }
    }
}

impl Cpu {
    /// Appends keys and values of each sequence to its cache.
    fn store(
        &self,
        layer: usize,
        k: &CpuBuffer,
        v: Option<&CpuBuffer>,
        sequences: &mut [Sequence<'_, CpuCache>],
    ) -> Result<(), BackendError> {
        // All threads clear the pages that are missing.
        let missing = sequences.iter().enumerate().flat_map(|(i, of)| {
            let n_missing = of.cache.n_missing(layer, of.n_rows);
            std::iter::repeat_n(i, n_missing)
        });
        let missing: Vec<_> = missing.collect();
        let new = match missing.is_empty() {
            true => Vec::new(),
            false => (self.exec).map(missing.len(), |i| sequences[missing[i]].cache.page(layer)),
        };
        for (i, page) in missing.into_iter().zip(new) {
            sequences[i].cache.add(layer, page);
        }
        let mut first = 0;
        let mut rooms = Vec::with_capacity(sequences.len());
        for Sequence { cache, n_rows, .. } in sequences {
            rooms.push((Some(&mut **cache), first, *n_rows));
            first += *n_rows;
        }
        // Of many sequences what says where pages are is in no cache: threads wait for it together.
        let stores = self.exec.map_mut(&mut rooms, |(cache, first, n_rows)| {
            let pages = cache.take().map(|cache| cache.room(layer, *n_rows));
            let of_batch = |(page, at, rows): (_, _, Range<usize>)| {
                (page, at, *first + rows.start..*first + rows.end)
            };
            pages.into_iter().flatten().map(of_batch).collect()
        });
        let mut stores: Vec<_> = stores.into_iter().flat_map(|of: Vec<_>| of).collect();
        let stored = self.exec.map_mut(&mut stores, |(page, at, rows)| {
            let v = v.map_or(&[][..], |v| v.rows(rows));
            page.store(&self.exec, *at, k.rows(rows), v)
        });
        Ok(stored.into_iter().collect::<Result<(), _>>()?)
    }

    /// [`place_heads`] and [`Cpu::store`] of sequences of few rows each, a task for each sequence.
    fn store_few(
        &self,
        layer: usize,
        heads: &Heads<'_>,
        [q, k]: [&mut CpuBuffer; 2],
        v: Option<&CpuBuffer>,
        sequences: &mut [Sequence<'_, CpuCache>],
    ) -> Result<(), BackendError> {
        let mut first = 0;
        let (mut q_rest, mut k_rest) = (&mut q.values[..], &mut k.values[..]);
        let mut parts = Vec::with_capacity(sequences.len());
        for Sequence { cache, n_rows, .. } in sequences {
            let (q_rows, k_rows);
            (q_rows, q_rest) = q_rest.split_at_mut(*n_rows * q.width);
            (k_rows, k_rest) = k_rest.split_at_mut(*n_rows * k.width);
            parts.push((&mut **cache, first..first + *n_rows, q_rows, k_rows));
            first += *n_rows;
        }
        let k_width = k.width;
        let stored = self.exec.map_mut(&mut parts, |(cache, rows, q, k)| {
            place_heads(&self.alone, heads, rows.start, [&mut **q, &mut **k])?;
            let v = v.map_or(&[][..], |v| v.rows(rows));
            let v_width = v.len() / rows.len().max(1);
            for _ in 0..cache.n_missing(layer, rows.len()) {
                cache.add(layer, cache.page(layer));
            }
            for (page, at, own) in cache.room(layer, rows.len()) {
                let k = &k[own.start * k_width..own.end * k_width];
                let v = &v[own.start * v_width..own.end * v_width];
                page.store(&self.alone, at, k, v)?;
            }
            Ok(())
        });
        stored.into_iter().collect()
    }

    /// Normalises each head of `x`; heads are as long as the weight.
    #[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
    pub(crate) fn norm_heads(
        &self,
        x: &mut CpuBuffer,
        weight: &[f32],
        eps: f32,
    ) -> Result<(), BackendError> {
        Ok(norm::rms_norm(&self.exec, &mut x.values, weight, eps)?)
    }
}

/// What queries and keys go through before attention.
struct Heads<'a> {
    /// Elements of a row of queries.
    q_width: usize,
    head_dim: usize,
    /// Weights of the norms of each.
    norms: [Option<&'a [f32]>; 2],
    eps: f32,
    angles: Option<&'a Angles>,
    /// Whether keys are these rows' own.
    has_keys: bool,
}

/// Norms and rotations of queries and keys, `[m, …]` each, from row `first` of the batch on.
fn place_heads(
    exec: &Exec,
    heads: &Heads<'_>,
    first: usize,
    [q, k]: [&mut [f32]; 2],
) -> Result<(), BackendError> {
    let Heads {
        head_dim,
        norms,
        eps,
        angles,
        has_keys,
        q_width,
    } = *heads;
    let m = q.len().checked_div(q_width).unwrap_or(0);
    for (i, x) in [q, k].into_iter().enumerate() {
        if let Some(weight) = norms[i] {
            norm::rms_norm(exec, x, weight, eps)?;
        }
        if let Some(angles) = angles
            && (i == 0 || has_keys)
        {
            let half = angles.dim / 2;
            let rows = first * half..(first + m) * half;
            let (cos, sin) = (&angles.cos[rows.clone()], &angles.sin[rows]);
            rope::rope(exec, x, head_dim, angles.dim, cos, sin, angles.layout)?;
        }
    }
    Ok(())
}

/// The operations of a prologue of `x`, which has the rows of what it begins with afterwards.
fn row_ops<'a>(prologue: Prologue<'a, Cpu>, x: &mut CpuBuffer) -> Vec<RowOp<'a>> {
    let mut ops = Vec::with_capacity(2);
    let norm = match prologue {
        Prologue::Norm(norm) => Some(norm),
        Prologue::Residual { sum, add, norm } => {
            let (n_rows, width) = (sum.n_rows(), sum.width);
            ops.push(match add {
                Some(_) => RowOp::AddTo(&mut sum.values),
                None => {
                    x.shape(n_rows, width);
                    RowOp::Copy(&sum.values)
                }
            });
            Some(norm)
        }
        Prologue::Gate {
            activation,
            up,
            norm,
            ..
        } => {
            ops.push(RowOp::Gate(activation, &up.values));
            norm
        }
    };
    if let Some(RmsNorm { weight, eps, .. }) = norm {
        ops.push(RowOp::RmsNorm { weight, eps });
    }
    ops
}

/// Values of a row whose gates are worth sharing out.
const WIDE_ROW: usize = 16 << 10;

/// The most rows of a sequence that one thread places and stores for all heads, beside other sequences.
const FEW_ROWS: usize = 4;

/// Calls `compute` with the range of rows of each sequence, and the state of the layer, `n` values: in place only where one
/// token follows, and each value `is_read_once` by the operations of the layer. Token shifts read some several times.
fn for_states(
    stage: Stage,
    (n, is_read_once): (usize, bool),
    sequences: &mut [Sequence<'_, CpuCache>],
    mut compute: impl FnMut(&Range<usize>, State<'_>) -> Result<(), ShapeError>,
) -> Result<(), BackendError> {
    let mut first = 0;
    for Sequence { cache, n_rows, .. } in sequences {
        let rows = first..first + *n_rows;
        first = rows.end;
        let state = cache.state(stage.layer.unwrap_or(0), n, rows.len() == 1 && is_read_once);
        compute(&rows, state)?;
    }
    Ok(())
}

impl Cpu {
    /// Multiplies `part` of every head of each row with the matrix of the head, and calls `then` with the products of each
    /// head, row after row.
    fn multiply_heads(
        &self,
        w: &[&CpuLinear],
        (heads, part): (ChunksExact<'_, f32>, Range<usize>),
        then: impl FnOnce(&[Vec<f32>]),
    ) -> Result<(), BackendError> {
        let k = part.len();
        let mut inputs = vec![Vec::with_capacity(heads.len() / w.len().max(1) * k); w.len()];
        for (i, head) in heads.enumerate() {
            inputs[i % w.len()].extend_from_slice(&head[part.clone()]);
        }
        let mut products: Vec<Vec<f32>> = Vec::with_capacity(w.len());
        for (w, x) in w.iter().zip(&inputs) {
            products.push(vec![0.0; x.len() / k.max(1) * w.n]);
        }
        let batches = w.iter().zip(&inputs).zip(&mut products);
        let batches = batches.map(|((w, x), out)| {
            Ok(gemm::Batch {
                x,
                outputs: vec![(w.matrix()?, &mut out[..])],
            })
        });
        let mut batches = batches.collect::<Result<Vec<_>, BackendError>>()?;
        let mut scratch = self.experts.lock().unwrap_or_else(PoisonError::into_inner);
        gemm::linear_batches(&self.exec, k, &mut scratch.forms, &mut batches)?;
        drop(batches);
        then(&products);
        Ok(())
    }

    /// Whether weights may be kept in another form than they are given in.
    fn may_rewrite(&self) -> bool {
        // Experts of which not all are to be in memory stay in their files.
        self.activations == Activations::Int8 && self.expert_memory.get().is_none()
    }
}

/// A weight matrix in memory, usually a piece of a mapped file.
#[derive(Debug, Clone)]
pub struct CpuLinear {
    n: usize,
    k: usize,
    weights: CpuWeights,
    /// What its rows were rotated by.
    rotation: Option<Arc<Rotation>>,
    activations: Activations,
}

/// The form in which they are multiplied.
#[derive(Debug, Clone)]
enum CpuWeights {
    /// As they were given.
    Given(WeightData),
    Interleaved(Arc<InterleavedMatrix>),
}

impl CpuLinear {
    fn matrix(&self) -> Result<Matrix<'_>, BackendError> {
        let CpuLinear { n, k, .. } = self;
        let weights = match &self.weights {
            CpuWeights::Given(weights) => weights,
            CpuWeights::Interleaved(matrix) => return Ok(Matrix::Interleaved(matrix)),
        };
        Ok(match weights {
            WeightData::Blocks {
                dtype,
                bytes,
                rounding,
            } => {
                let rounding = match self.activations {
                    // The model was trained this way, whatever its weights are stored as.
                    _ if *rounding == Rounding::Row => Rounding::Row,
                    Activations::Int8 => *rounding,
                    Activations::F32 => Rounding::None,
                };
                Matrix::Blocks(BlockMatrix::new(*dtype, *n, *k, rounding, bytes)?)
            }
            WeightData::Ternary {
                codes,
                packing,
                scale,
            } => Matrix::Ternary(TernaryMatrix::packed(*packing, *n, *k, *scale, codes)?),
        })
    }

    /// The bytes that it was given in and is in still; `None` if it was rewritten.
    fn given_bytes(&self) -> Option<&[u8]> {
        match &self.weights {
            CpuWeights::Given(WeightData::Blocks { bytes, .. }) => Some(bytes),
            CpuWeights::Given(WeightData::Ternary { codes, .. }) => Some(codes),
            CpuWeights::Interleaved(_) => None,
        }
    }

    /// What its rows were rotated by.
    fn rotation(&self) -> Option<&Rotation> {
        self.rotation.as_deref()
    }
}

/// Rows of activations.
#[derive(Debug, Default)]
pub struct CpuBuffer {
    width: usize,
    values: Vec<f32>,
}

impl CpuBuffer {
    /// Makes room for `n_rows` of `width`; the contents are unspecified.
    fn shape(&mut self, n_rows: usize, width: usize) -> &mut [f32] {
        self.width = width;
        self.values.resize(n_rows * width, 0.0);
        &mut self.values
    }

    /// Elements of a row, and all rows.
    #[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
    pub(crate) fn get(&self) -> (usize, &[f32]) {
        (self.width, &self.values)
    }

    fn n_rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    fn rows(&self, rows: &Range<usize>) -> &[f32] {
        &self.values[rows.start * self.width..rows.end * self.width]
    }

    fn rows_mut(&mut self, rows: &Range<usize>) -> &mut [f32] {
        &mut self.values[rows.start * self.width..rows.end * self.width]
    }
}

impl Backend for Cpu {
    type Linear = CpuLinear;
    type Vector = Vec<f32>;
    type Screen = Screen;
    type Buffer = CpuBuffer;
    type Cache = CpuCache;
    type Routes = Routes;
    /// The CPU computes synchronously: its values are there.
    type Readback = Ready<Result<Vec<f32>, BackendError>>;

    fn host(&self) -> &Exec {
        &self.exec
    }

    fn rewrites(&self, dtype: DType, k: usize) -> bool {
        self.may_rewrite() && InterleavedMatrix::is_faster(&self.exec, dtype, k)
    }

    fn load_linear(&self, source: LinearSource) -> Result<CpuLinear, BackendError> {
        let LinearSource {
            n,
            k,
            weights,
            rotation,
        } = source;
        let mut linear = CpuLinear {
            n,
            k,
            weights: CpuWeights::Given(weights),
            rotation,
            activations: self.activations,
        };
        if self.may_rewrite()
            && let Some(interleaved) = InterleavedMatrix::new(&self.exec, &linear.matrix()?)
        {
            linear.weights = CpuWeights::Interleaved(Arc::new(interleaved));
        }
        if let Some(rotation) = linear.rotation() {
            rotation.expect_width(linear.k)?;
        }
        Ok(linear)
    }

    fn bound_experts(&self, memory: &Arc<dyn ExpertMemory>) {
        // That of the first call stays.
        self.expert_memory.get_or_init(|| Arc::clone(memory));
    }

    fn join_experts(&self, experts: &mut ExpertMatrices<'_, Cpu>) -> Result<(), BackendError> {
        if let Some(memory) = self.expert_memory.get() {
            let all = [&experts.gate, &experts.up, &experts.down];
            let all = all
                .into_iter()
                .flatten()
                .filter_map(|linear| linear.given_bytes());
            memory.loaded(&all.collect::<Vec<_>>());
        }
        Ok(())
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<Vec<f32>, BackendError> {
        Ok(values)
    }

    fn has_screen_of(&self, _: &CpuLinear) -> bool {
        true
    }

    fn load_screen(&self, linear: &CpuLinear, dtype: DType) -> Result<Screen, BackendError> {
        let stored;
        let blocks = match linear.matrix()? {
            Matrix::Blocks(blocks) => blocks,
            Matrix::Interleaved(matrix) if matrix.dtype() != DType::I2_S => {
                stored = matrix.stored(&self.exec);
                let dtype = matrix.dtype();
                BlockMatrix::new(dtype, matrix.n(), matrix.k(), Rounding::Blocks, &stored)?
            }
            Matrix::Interleaved(_) | Matrix::Ternary(_) => {
                return Err(BackendError::Weights(QuantError::Unsupported {
                    op: "screen",
                    dtype: DType::TQ2_0,
                }));
            }
        };
        Ok(Screen::new(&self.exec, &blocks, dtype)?)
    }

    fn buffer(&self) -> CpuBuffer {
        CpuBuffer::default()
    }

    fn routes(&self) -> Routes {
        Routes::default()
    }

    fn cache(&self, shape: &CacheShape) -> Result<CpuCache, BackendError> {
        Ok(CpuCache::new(shape))
    }

    fn save_layer(
        &self,
        cache: &mut CpuCache,
        layer: usize,
        to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        cache.save(layer, to)
    }

    fn restore_layer(
        &self,
        cache: &mut CpuCache,
        layer: usize,
        held: LayerContents,
        from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        cache.restore(layer, held, from)
    }

    fn embed(
        &self,
        table: &CpuLinear,
        ids: &[u32],
        scale: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let width = table.k;
        let out = out.shape(ids.len(), width);
        let rows = table.matrix()?;
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
            rows.decode_row(&self.exec, id as usize, out);
            if let Some(rotation) = table.rotation() {
                rotation.undo(&self.exec, out)?;
            }
        }
        if scale != 1.0 {
            vector::scale(&self.exec, out, scale);
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        _: Stage,
        x: &CpuBuffer,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let out = out.shape(x.n_rows(), x.width);
        Ok(norm::rms_norm_into(
            &self.exec, &x.values, weight, eps, out,
        )?)
    }

    fn rms_norm_in_place(
        &self,
        _: Stage,
        x: &mut CpuBuffer,
        weight: &Vec<f32>,
        eps: f32,
    ) -> Result<(), BackendError> {
        Ok(norm::rms_norm(&self.exec, &mut x.values, weight, eps)?)
    }

    fn linear_after(
        &self,
        prologue: Prologue<'_, Cpu>,
        x: &mut CpuBuffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Cpu>],
    ) -> Result<(), BackendError> {
        let is_rotated = (products.iter()).any(|Product { w, .. }| w.rotation().is_some());
        let is_gate = matches!(prologue, Prologue::Gate { .. });
        if is_rotated || is_gate && x.n_rows() == 1 && x.width >= WIDE_ROW {
            prologue.run(self, x)?;
            return self.linear(x, layout, products);
        }
        let ops = row_ops(prologue, x);
        let n_rows = x.n_rows();
        let mut outputs = Vec::with_capacity(products.len());
        for Product { w, out, .. } in products {
            outputs.push((w.matrix()?, out.shape(n_rows, w.n)));
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let (width, x) = (x.width, &mut x.values);
        let linear = gemm::linear_after(&self.exec, ops, x, width, &mut scratch, &mut outputs);
        Ok(linear?)
    }

    fn linear(
        &self,
        x: &CpuBuffer,
        _: OutputLayout,
        products: &mut [Product<'_, Cpu>],
    ) -> Result<(), BackendError> {
        // Matrices that read the input as it is, and those that read it rotated in one way.
        let mut groups: Vec<(Option<&Rotation>, Vec<_>)> = Vec::with_capacity(1);
        for Product { w, out, .. } in products {
            let matrix = (w.matrix()?, out.shape(x.n_rows(), w.n));
            let rotation = w.rotation();
            match groups.iter_mut().find(|(of, _)| *of == rotation) {
                Some((_, matrices)) => matrices.push(matrix),
                None => groups.push((rotation, vec![matrix])),
            }
        }
        if let [(None, matrices)] = &mut groups[..] {
            let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
            let linear = gemm::linear(&self.exec, &x.values, x.width, &mut scratch, matrices);
            return Ok(linear?);
        }
        let mut rotated = self.rotated.lock().unwrap_or_else(PoisonError::into_inner);
        let RotatedScratch { rows, forms } = &mut *rotated;
        rows.resize_with(groups.len().max(rows.len()), Vec::new);
        let mut batches = Vec::with_capacity(groups.len());
        for ((rotation, outputs), rows) in groups.into_iter().zip(rows) {
            let x = match rotation {
                None => &x.values[..],
                Some(rotation) => {
                    rows.resize(x.values.len(), 0.0);
                    rotation.rotate(&self.exec, &x.values, rows)?;
                    rows
                }
            };
            batches.push(gemm::Batch { x, outputs });
        }
        let linear = gemm::linear_batches(&self.exec, x.width, forms, &mut batches);
        Ok(linear?)
    }

    fn linear_top(
        &self,
        _: Stage,
        x: &CpuBuffer,
        w: &CpuLinear,
        screen: &Screen,
        tops: &[usize],
        out: &mut CpuBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        let out = out.shape(tops.len(), w.n);
        let mut rotated = Vec::new();
        let x = match w.rotation() {
            None => &x.values,
            Some(rotation) => {
                rotated.resize(x.values.len(), 0.0);
                rotation.rotate(&self.exec, &x.values, &mut rotated)?;
                &rotated
            }
        };
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(screen.top(&self.exec, w.matrix()?, x, tops, &mut scratch, out)?)
    }

    fn add_low_rank(
        &self,
        x: &CpuBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Cpu>],
    ) -> Result<(), BackendError> {
        let n_rows = rows.len();
        let mut low_rank = self.low_rank.lock().unwrap_or_else(PoisonError::into_inner);
        let LowRankScratch { inner, change } = &mut *low_rank;
        inner.resize_with(updates.len().max(inner.len()), Vec::new);
        let mut matrices = Vec::with_capacity(updates.len());
        for (LowRank { a, .. }, inner) in updates.iter().zip(&mut *inner) {
            inner.resize(n_rows * a.n, 0.0);
            matrices.push((a.matrix()?, &mut inner[..]));
        }
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let own = x.rows(&rows);
        gemm::linear(&self.exec, own, x.width, &mut scratch, &mut matrices)?;
        for (LowRank { b, scale, out, .. }, inner) in updates.iter_mut().zip(inner) {
            vector::scale(&self.exec, inner, *scale);
            change.resize(n_rows * b.n, 0.0);
            let product = &mut [(b.matrix()?, &mut change[..])];
            gemm::linear(&self.exec, inner, b.k, &mut scratch, product)?;
            vector::add(&self.exec, out.rows_mut(&rows), change)?;
        }
        Ok(())
    }

    fn add_bias(&self, _: Stage, x: &mut CpuBuffer, bias: &Vec<f32>) -> Result<(), BackendError> {
        Ok(vector::add_bias(&self.exec, &mut x.values, bias)?)
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
        }: Attention<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        if gated {
            vector::split_runs(shape.head_dim, &mut q.values, &mut gates)?;
            q.width /= 2;
        }
        let heads = Heads {
            q_width: q.width,
            head_dim: shape.head_dim,
            norms: [q_norm, k_norm].map(|norm| norm.map(Vec::as_slice)),
            eps,
            angles: rope.map(|rope| rope.angles),
            has_keys: shared.is_none(),
        };
        let are_few = |of: &Sequence<'_, CpuCache>| of.n_rows <= FEW_ROWS;
        if sequences.len() > 1 && shared.is_none() && sequences.iter().all(are_few) {
            self.store_few(layer, &heads, [q, k], v, sequences)?;
        } else {
            let rows = [&mut q.values[..], &mut k.values];
            place_heads(&self.exec, &heads, 0, rows)?;
            if shared.is_none() {
                self.store(layer, k, v, sequences)?;
            }
        }
        let mut first = 0;
        let queries = sequences.iter().map(|Sequence { cache, n_rows, .. }| {
            let rows = first..first + *n_rows;
            first = rows.end;
            let queries = Queries {
                shape: &shape,
                q: q.rows(&rows),
                pos: cache.len(),
                sinks: sinks.map(Vec::as_slice),
                is_causal,
            };
            (queries, cache.pages(shared.unwrap_or(layer)))
        });
        let queries: Vec<_> = queries.collect();
        let mut scratch = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let out_rows = out.shape(q.n_rows(), q.width);
        attention_of_each(&self.exec, &queries, &mut scratch, out_rows)?;
        if gated {
            vector::gate(&self.exec, &mut out.values, &gates)?;
        }
        Ok(())
    }

    fn latent_queries(
        &self,
        _: Stage,
        inputs: backend::LatentInputs<'_, Cpu>,
        q: &mut CpuBuffer,
        k: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let LatentConfig {
            kv_rank,
            nope_dim,
            rope_dim,
            ..
        } = *inputs.shape;
        let (m, n_heads) = (inputs.q.n_rows(), inputs.w.len());
        let own = nope_dim..nope_dim + rope_dim;
        let heads = (inputs.q.values.chunks_exact(own.end), 0..nope_dim);
        self.multiply_heads(inputs.w, heads, |products| {
            q.shape(m, n_heads * (rope_dim + kv_rank));
            let out = q.values.chunks_exact_mut(rope_dim + kv_rank);
            for (i, (out, head)) in out.zip(inputs.q.values.chunks_exact(own.end)).enumerate() {
                out[..rope_dim].copy_from_slice(&head[own.clone()]);
                out[rope_dim..]
                    .copy_from_slice(&products[i % n_heads][i / n_heads * kv_rank..][..kv_rank]);
            }
        })?;
        let k = k.shape(m, rope_dim + kv_rank);
        let rows = (inputs.k_rope.values.chunks_exact(rope_dim))
            .zip(inputs.latent.values.chunks_exact(kv_rank));
        for (k, (rope, latent)) in k.chunks_exact_mut(rope_dim + kv_rank).zip(rows) {
            k[..rope_dim].copy_from_slice(rope);
            k[rope_dim..].copy_from_slice(latent);
        }
        Ok(())
    }

    fn latent_values(
        &self,
        _: Stage,
        shape: &LatentConfig,
        x: &CpuBuffer,
        w: &[&CpuLinear],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let (m, n_heads) = (x.n_rows(), w.len());
        let (head_dim, value_dim) = (shape.head_dim(), shape.value_dim);
        let heads = (x.values.chunks_exact(head_dim), shape.rope_dim..head_dim);
        self.multiply_heads(w, heads, |products| {
            out.shape(m, n_heads * value_dim);
            for (i, out) in out.values.chunks_exact_mut(value_dim).enumerate() {
                out.copy_from_slice(&products[i % n_heads][i / n_heads * value_dim..][..value_dim]);
            }
        })
    }

    fn gate(
        &self,
        _: Stage,
        activation: Activation,
        gate: &mut CpuBuffer,
        up: &CpuBuffer,
    ) -> Result<(), BackendError> {
        Ok(activation::gate(
            &self.exec,
            activation,
            &mut gate.values,
            &up.values,
        )?)
    }

    fn convolution(
        &self,
        stage: Stage,
        taps: &Vec<f32>,
        input: &CpuBuffer,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let dim = input.width / 3;
        let n_state = taps.len().saturating_sub(dim);
        out.shape(input.n_rows(), dim);
        let mut copy = Vec::new();
        for_states(stage, (n_state, true), sequences, |rows, state| {
            let state = state.copied(&mut copy);
            let (input, out) = (input.rows(rows), out.rows_mut(rows));
            conv::gated(&self.exec, dim, taps, input, state, out)
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
        }: DeltaNet<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        out.shape(qkv.n_rows(), shape.values());
        let n_window = taps.len().saturating_sub(shape.channels());
        let weights = DeltaWeights {
            taps,
            a,
            dt_bias,
            norm,
            eps,
        };
        for_states(
            stage,
            (n_window + shape.state(), true),
            sequences,
            |rows, state| {
                let inputs = Projections {
                    qkv: qkv.rows(rows),
                    gate: gate.rows(rows),
                    alpha: alpha.rows(rows),
                    beta: beta.rows(rows),
                };
                delta_net(
                    &self.exec,
                    &shape,
                    &weights,
                    &inputs,
                    state,
                    out.rows_mut(rows),
                )
            },
        )
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
        }: Ssm<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let exec = &self.exec;
        let weights = (&taps[..], conv_bias.map(|bias| &bias[..]));
        out.shape(xbc.n_rows(), shape.inner());
        let channels = xbc.width;
        let n_window = taps.len().saturating_sub(channels);
        let mut convolved = (self.convolved.lock()).unwrap_or_else(PoisonError::into_inner);
        let mut copy = Vec::new();
        for_states(
            stage,
            (n_window + shape.state(), true),
            sequences,
            |rows, state| {
                let (window, state) = state.split_at(n_window);
                let (input, window) = (xbc.rows(rows), window.copied(&mut copy));
                convolved.resize(input.len(), 0.0);
                conv::silu(exec, channels, weights, input, window, &mut convolved)?;
                let inputs = SsmInputs {
                    xbc: &convolved,
                    dt: dt.rows_mut(rows),
                    a,
                    d,
                    dt_bias,
                };
                ssm::scan(exec, &shape, inputs, state, out.rows_mut(rows))
            },
        )?;
        activation::gate(exec, Activation::Silu, &mut gate.values, &out.values)?;
        std::mem::swap(&mut gate.values, &mut out.values);
        if let Some(norm) = norm {
            let n_groups = shape.n_groups;
            norm::rms_norm_groups(exec, &mut out.values, norm, n_groups, eps)?;
        }
        Ok(())
    }

    fn causal_convolution(
        &self,
        stage: Stage,
        backend::CausalConvolution {
            shape,
            taps,
            bias,
            input,
        }: backend::CausalConvolution<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let weights = (&taps[..], bias.map(|bias| &bias[..]));
        let inner = input.width;
        let n_window = taps.len().saturating_sub(inner);
        out.shape(input.n_rows(), inner);
        // The scan fills in the rest.
        let mut copy = Vec::new();
        for_states(
            stage,
            (n_window + shape.state(), true),
            sequences,
            |rows, state| {
                let window = state.part(0..n_window).copied(&mut copy);
                let (input, out) = (input.rows(rows), out.rows_mut(rows));
                conv::silu(&self.exec, inner, weights, input, window, out)
            },
        )
    }

    fn selective_scan(
        &self,
        stage: Stage,
        scan: backend::SelectiveScan<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let shape = scan.shape;
        let n_window = scan.n_taps.saturating_sub(1) * shape.inner;
        out.shape(scan.x.n_rows(), shape.inner);
        for_states(
            stage,
            (n_window + shape.state(), true),
            sequences,
            |rows, state| {
                let inputs = MambaInputs {
                    x: scan.x.rows(rows),
                    dt: scan.dt.rows(rows),
                    b: scan.b.rows(rows),
                    c: scan.c.rows(rows),
                    a: scan.a,
                    d: scan.d,
                };
                let (_, state) = state.split_at(n_window);
                mamba::scan(&self.exec, &shape, &inputs, state, out.rows_mut(rows))
            },
        )?;
        let gate = scan.gate;
        activation::gate(&self.exec, Activation::Silu, &mut gate.values, &out.values)?;
        std::mem::swap(&mut gate.values, &mut out.values);
        Ok(())
    }

    fn layer_norm(
        &self,
        _: Stage,
        x: &CpuBuffer,
        (weight, bias): (&Vec<f32>, &Vec<f32>),
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        out.shape(x.n_rows(), x.width).copy_from_slice(&x.values);
        let norm = norm::layer_norm_groups(&self.exec, &mut out.values, (weight, bias), 1, eps);
        Ok(norm?)
    }

    fn apply(&self, _: Stage, function: Function, x: &mut CpuBuffer) -> Result<(), BackendError> {
        activation::apply(&self.exec, function, &mut x.values);
        Ok(())
    }

    fn multiply(&self, _: Stage, x: &mut CpuBuffer, y: &CpuBuffer) -> Result<(), BackendError> {
        Ok(vector::multiply(&self.exec, &mut x.values, &y.values)?)
    }

    fn token_shift(
        &self,
        stage: Stage,
        shift: backend::TokenShift<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let (shape, x) = (shift.shape, shift.x);
        let part = shape.part(shift.part);
        out.shape(x.n_rows(), x.width);
        let mut copy = Vec::new();
        for_states(stage, (shape.state(), false), sequences, |rows, state| {
            let state = state.part(part.clone()).copied(&mut copy);
            let shift = Shift {
                factors: shift.factors,
                added: shift.added.map(|added| added.rows(rows)),
                of_itself: matches!(shape.generation, Generation::V4 | Generation::V5),
            };
            rwkv::token_shift(&self.exec, &shift, x.rows(rows), state, out.rows_mut(rows))
        })
    }

    fn time_mix(
        &self,
        stage: Stage,
        mix: backend::TimeMix<'_, Cpu>,
        sequences: &mut [Sequence<'_, CpuCache>],
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let backend::TimeMix {
            shape,
            r,
            k,
            v,
            mut recurrence,
            finish,
        } = mix;
        let exec = &self.exec;
        out.shape(r.n_rows(), shape.inner());
        if let backend::Recurrence::Seven {
            residual: Some((first, share)),
            ..
        } = &recurrence
        {
            vector::blend(exec, &mut v.values, &first.values, &share.values)?;
        }
        let mut forgotten = self
            .convolved
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let part = shape.part(Part::Memory);
        let mut copy = Vec::new();
        for_states(stage, (shape.state(), false), sequences, |rows, state| {
            let state = state.part(part.clone());
            let out = out.rows_mut(rows);
            let norm = finish.as_ref().map(|finish| Finish {
                weight: finish.weight,
                bias: finish.bias,
                eps: finish.eps,
                gate: finish.gate.rows(rows),
            });
            let norm = norm.unwrap_or(Finish::NONE);
            let rkv = Rkv {
                r: r.rows(rows),
                k: k.rows(rows),
                v: v.rows(rows),
            };
            match &mut recurrence {
                backend::Recurrence::Fixed { decay, first } => match shape.generation {
                    Generation::V4 => {
                        let state = state.copied(&mut copy);
                        rwkv::wkv4(exec, &rkv, (decay, first), state, out)
                    }
                    _ => {
                        let decay = (Decay::Fixed(decay), &first[..]);
                        rwkv::wkv6(exec, &shape, &rkv, decay, &norm, state, out)
                    }
                },
                backend::Recurrence::Six { decay, first } => {
                    let decay = (Decay::Given(decay.rows_mut(rows)), &first[..]);
                    rwkv::wkv6(exec, &shape, &rkv, decay, &norm, state, out)
                }
                backend::Recurrence::Seven {
                    decay,
                    rate,
                    k_k,
                    k_a,
                    r_k,
                    ..
                } => {
                    forgotten.resize(out.len(), 0.0);
                    let inputs = Wkv7Inputs {
                        decay: decay.rows_mut(rows),
                        rate: rate.rows_mut(rows),
                        forgotten: &mut forgotten,
                        r: r.rows(rows),
                        v: v.rows(rows),
                        k: k.rows_mut(rows),
                        k_k,
                        k_a,
                        r_k,
                    };
                    rwkv::wkv7(exec, &shape, inputs, &norm, state, out)
                }
            }
        })
    }

    fn scale(&self, _: Stage, x: &mut CpuBuffer, factor: f32) -> Result<(), BackendError> {
        vector::scale(&self.exec, &mut x.values, factor);
        Ok(())
    }

    fn add_gated(
        &self,
        _: Stage,
        x: &mut CpuBuffer,
        y: &CpuBuffer,
        gate: &CpuBuffer,
    ) -> Result<(), BackendError> {
        Ok(vector::add_gated(
            &self.exec,
            &mut x.values,
            &y.values,
            &gate.values,
        )?)
    }

    fn normalize_heads(
        &self,
        _: Stage,
        x: &mut CpuBuffer,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError> {
        let ones = vec![1.0; head_dim];
        Ok(norm::rms_norm(&self.exec, &mut x.values, &ones, eps)?)
    }

    fn columns(
        &self,
        _: Stage,
        x: &CpuBuffer,
        columns: Range<usize>,
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let width = columns.len();
        let out = out.shape(x.n_rows(), width).chunks_exact_mut(width);
        for (out, row) in out.zip(x.values.chunks_exact(x.width)) {
            out.copy_from_slice(&row[columns.clone()]);
        }
        Ok(())
    }

    fn scale_by(&self, _: Stage, x: &mut CpuBuffer, factor: &Vec<f32>) -> Result<(), BackendError> {
        vector::scale(&self.exec, &mut x.values, factor[0]);
        Ok(())
    }

    fn choose_experts(
        &self,
        scores: &CpuBuffer,
        bias: Option<&Vec<f32>>,
        routing: &Routing,
        routes: &mut Routes,
    ) -> Result<(), BackendError> {
        let bias = bias.map(Vec::as_slice);
        Ok(routes.choose(routing, &scores.values, bias)?)
    }

    fn linear_experts(
        &self,
        routes: &Routes,
        x: &CpuBuffer,
        input: ExpertInput,
        products: &mut [ExpertProduct<'_, Cpu>],
    ) -> Result<(), BackendError> {
        let mut scratch = self.experts.lock().unwrap_or_else(PoisonError::into_inner);
        let ExpertScratch { rows, forms } = &mut *scratch;
        let (width, n_routes) = (x.width, routes.rows().len());
        let mut rotations = products.iter().flat_map(|p| &p.w).map(|w| w.rotation());
        let rotation = rotations.next().flatten();
        if rotations.any(|other| other != rotation) {
            return Err(BackendError::Unsupported(ROTATIONS));
        }
        let rotated;
        let x = match rotation {
            None => x,
            Some(rotation) => {
                let mut values = vec![0.0; x.values.len()];
                rotation.rotate(&self.exec, &x.values, &mut values)?;
                rotated = CpuBuffer { width, values };
                &rotated
            }
        };
        // All experts of a single row read it where it is.
        let shared = input == ExpertInput::Tokens && routes.m() == 1;
        let mut input = match input {
            ExpertInput::Tokens if !shared => {
                rows.resize(n_routes * width, 0.0);
                routes.gather(width, &x.values, rows)?;
                &rows[..]
            }
            _ => &x.values,
        };
        let memory = self.expert_memory.get();
        let mut chosen = Vec::new();
        if let Some(memory) = memory {
            let experts = routes.experts().map(|(expert, _)| expert);
            let own = experts.flat_map(|expert| products.iter().map(move |p| p.w[expert]));
            chosen.extend(own.filter_map(CpuLinear::given_bytes));
            memory.read(&chosen);
        }
        let mut outputs: Vec<_> = (products.iter_mut())
            .map(|ExpertProduct { w, out, .. }| {
                let n = w.first().map_or(0, |w| w.n);
                (&w[..], n, out.shape(n_routes, n))
            })
            .collect();
        let mut batches: Vec<gemm::Batch<'_>> = Vec::with_capacity(routes.experts().len());
        for (expert, n_rows) in routes.experts() {
            let x;
            (x, input) = match shared {
                true => (input, input),
                false => input.split_at(n_rows * width),
            };
            let mut own = Vec::with_capacity(outputs.len());
            for (w, n, rest) in &mut outputs {
                let (out, after) = std::mem::take(rest).split_at_mut(n_rows * *n);
                *rest = after;
                own.push((w[expert].matrix()?, out));
            }
            match batches.last_mut().filter(|_| shared) {
                Some(batch) => batch.outputs.extend(own),
                None => batches.push(gemm::Batch { x, outputs: own }),
            }
        }
        gemm::linear_batches(&self.exec, width, forms, &mut batches)?;
        if let Some(memory) = memory {
            memory.done(&chosen);
        }
        for ExpertProduct { bias, out, .. } in products {
            if let Some(bias) = bias {
                routes.add_bias(&self.exec, out.width, bias, &mut out.values)?;
            }
        }
        Ok(())
    }

    fn combine_experts(
        &self,
        routes: &Routes,
        y: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), BackendError> {
        let out = out.shape(routes.m(), y.width);
        Ok(routes.combine(&self.exec, y.width, &y.values, out)?)
    }

    fn add(&self, _: Stage, x: &mut CpuBuffer, y: &CpuBuffer) -> Result<(), BackendError> {
        Ok(vector::add(&self.exec, &mut x.values, &y.values)?)
    }

    fn softcap(&self, _: Stage, x: &mut CpuBuffer, cap: f32) -> Result<(), BackendError> {
        vector::softcap(&self.exec, &mut x.values, cap);
        Ok(())
    }

    fn keep_rows(&self, x: &mut CpuBuffer, rows: &[usize]) -> Result<(), BackendError> {
        for (to, &from) in rows.iter().enumerate() {
            let from = from * x.width..(from + 1) * x.width;
            x.values.copy_within(from, to * x.width);
        }
        x.values.truncate(rows.len() * x.width);
        Ok(())
    }

    fn submit(&self, x: &mut CpuBuffer) -> Result<Self::Readback, BackendError> {
        Ok(ready(Ok(std::mem::take(&mut x.values))))
    }

    fn submit_apart(
        &self,
        x: &mut CpuBuffer,
        n_rows: &[usize],
    ) -> Result<PendingRows, BackendError> {
        // Of one step there is nothing to take apart.
        if n_rows.len() == 1 {
            let values = std::mem::take(&mut x.values);
            return Ok(Box::pin(ready(Ok(vec![RowsRead::Logits(values)]))));
        }
        let copy = |i: usize| {
            let first = n_rows[..i].iter().sum();
            RowsRead::Logits(x.rows(&(first..first + n_rows[i])).to_vec())
        };
        let copies = self.exec.map(n_rows.len(), copy);
        Ok(Box::pin(ready(Ok(copies))))
    }

    fn write(&self, values: &[f32], width: usize, x: &mut CpuBuffer) -> Result<(), BackendError> {
        x.width = width;
        x.values.clear();
        x.values.extend_from_slice(values);
        Ok(())
    }
}
