//! Two backends side by side: the results of one compared with those of the other.
//!
//! Every operation runs on both, and the results are compared. By default the backend under test is then
//! given the reference's values, so that each stage has the same input and an error is located where it
//! arises, not where it surfaces.

mod half;
mod measure;

use std::future::{Ready, ready};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_format::DType;
use sterna_kernels::Exec;
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::experts::Routing;
use sterna_kernels::quant::QuantError;

use crate::backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, CausalConvolution, DeltaNet,
    ExpertInput, ExpertMatrices, ExpertProduct, KvCache, LatentInputs, LinearSource, LowRank,
    OutputLayout, Product, ScreenedRows, SelectiveScan, Sequence, Ssm, TimeMix, TokenShift,
};
use crate::config::LatentConfig;
use crate::halves;
use crate::plan::{ModelPlan, Stored, multiplied_as};
use crate::stage::{Operation, Stage};
use half::{Reference, Tested};
use measure::Work;
pub use measure::{Agreement, Difference, Measured};

/// A backend that runs everything on `R`, whose results are used, and on `T`, whose results are compared with
/// those.
///
/// A model is loaded onto it as onto any other, and run by sessions; logits are those of the reference.
/// [`Compare::take`] returns the measurements. It supports one session at a time.
#[derive(Debug)]
pub struct Compare<R, T> {
    reference: R,
    tested: T,
    state: Mutex<State>,
}

/// What is compared, and which values the backend under test continues with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Comparison {
    /// Each operation, from the reference's values: finds the wrong kernel. Norms and rotations of heads are
    /// a part of attention.
    #[default]
    Operations,
    /// Each layer, from the reference's values: operations are fused as they are without comparisons.
    Layers,
    /// Each layer, from the previous layer's own values: shows how errors accumulate.
    Drift,
}

/// How far apart the logits of two correct backends may be, errors of all layers accumulated: the Euclidean norm of the
/// differences over that of the reference's values, for the weights of `plan` and a cache of `cache`. The table in
/// docs/gpu.md has it by type.
pub fn logits_bound(plan: &ModelPlan, cache: CacheType) -> f64 {
    let work = plan.stored().map(|stored| match stored {
        Stored::Blocks(dtype) => Work::blocks(multiplied_as(dtype)),
        // Blocks may turn out to be other than trits.
        Stored::BitLinear(dtype) => Work::Ternary.max(Work::blocks(dtype)),
        Stored::Masters(_) | Stored::I2s(_) | Stored::Packed => Work::Ternary,
    });
    let head = plan.head_dtype().map(Work::blocks);
    let all = work.chain(head).chain([Work::attention(cache)]);
    all.fold(Work::Elements, Work::max).in_model()
}

#[derive(Debug, Default)]
struct State {
    comparison: Comparison,
    attention: Work,
    /// Operations since the last comparison.
    work: Work,
    measured: Vec<Measured>,
}

/// State shared by both backends.
#[derive(Debug, Clone)]
pub struct Both<R, T> {
    reference: R,
    tested: T,
}

/// A weight matrix on both.
#[derive(Debug, Clone)]
pub struct ComparedLinear<R, T> {
    both: Both<R, T>,
    n: usize,
    k: usize,
    work: Work,
}

/// Activations on both.
#[derive(Debug)]
pub struct ComparedBuffer<R, T> {
    both: Both<R, T>,
    width: usize,
    /// The last operation that filled it.
    stage: Stage,
    /// Whether rows are those of routes, which each backend has in an order of its own.
    by_route: bool,
}

/// What fills the first buffer of a step.
const EMBEDDING: Stage = Stage {
    layer: None,
    operation: Operation::Embedding,
};

/// There are no screens here: they rule out rows that have to be compared.
#[derive(Debug)]
pub enum NoScreen {}

type Buffer<R, T> = ComparedBuffer<<R as Backend>::Buffer, <T as Backend>::Buffer>;
type Linear<R, T> = ComparedLinear<<R as Backend>::Linear, <T as Backend>::Linear>;

impl<R: Backend, T: Backend> Compare<R, T> {
    /// Compares `tested` with `reference`.
    pub fn new(reference: R, tested: T) -> Compare<R, T> {
        Compare {
            reference,
            tested,
            state: Mutex::default(),
        }
    }

    /// The reference.
    pub fn reference(&self) -> &R {
        &self.reference
    }

    /// The backend under test.
    pub fn tested(&self) -> &T {
        &self.tested
    }

    /// Sets the mode of comparison. Sessions begun before keep the values of the previous mode.
    pub fn begin(&self, comparison: Comparison) {
        self.state().comparison = comparison;
    }

    /// The measurements since the last call, in the order of computation.
    pub fn take(&self) -> Vec<Measured> {
        std::mem::take(&mut self.state().measured)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held left some measurements, each complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares the output `out` of an operation, if operations are compared.
    fn compare(
        &self,
        work: Work,
        stage: Stage,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let comparison = {
            let mut state = self.state();
            state.work = state.work.max(work);
            state.comparison
        };
        if out.by_route {
            return Ok(());
        }
        match comparison {
            Comparison::Operations => self.measure(work.alone(), stage, out),
            Comparison::Layers | Comparison::Drift => Ok(()),
        }
    }

    /// Compares `x`, and copies the reference's values over unless errors should accumulate.
    fn measure(&self, bound: f64, stage: Stage, x: &mut Buffer<R, T>) -> Result<(), BackendError> {
        let width = x.width;
        let want = self.reference.read(&mut x.both.reference)?;
        (self.reference).write(&want, width, &mut x.both.reference)?;
        let got = self.tested.read(&mut x.both.tested)?;
        let mut state = self.state();
        let drifts = state.comparison == Comparison::Drift;
        (self.tested).write(if drifts { &got } else { &want }, width, &mut x.both.tested)?;
        let measured = Measured::new(stage, &want, &got, width, bound);
        state.measured.push(measured);
        if !drifts {
            state.work = Work::default();
        }
        Ok(())
    }
}

impl<R: KvCache, T: KvCache> KvCache for Both<R, T> {
    fn len(&self) -> usize {
        self.reference.len()
    }

    fn advance(&mut self, n: usize) {
        self.reference.advance(n);
        self.tested.advance(n);
    }

    fn pin(&mut self) {
        self.reference.pin();
        self.tested.pin();
    }

    fn len_within(&self, len: usize) -> usize {
        halves::len_within(&self.reference, &self.tested, len)
    }

    fn truncate(&mut self, len: usize) {
        halves::truncate(&mut self.reference, &mut self.tested, len);
    }

    fn fork(&self, len: usize) -> Both<R, T> {
        let mut fork = Both {
            reference: self.reference.fork(len),
            tested: self.tested.fork(len),
        };
        fork.truncate(len);
        fork
    }
}

impl<R: Backend, T: Backend> Backend for Compare<R, T> {
    type Routes = Both<R::Routes, T::Routes>;
    type Linear = Linear<R, T>;
    type Vector = Both<R::Vector, T::Vector>;
    type Screen = NoScreen;
    type Buffer = Buffer<R, T>;
    type Cache = Both<R::Cache, T::Cache>;
    /// Every operation is synchronous, so nothing is left to wait for.
    type Readback = Ready<Result<Vec<f32>, BackendError>>;

    fn host(&self) -> &Exec {
        self.reference.host()
    }

    fn usual_cache(&self) -> CacheType {
        self.tested.usual_cache()
    }

    fn load_linear(&self, source: LinearSource) -> Result<Linear<R, T>, BackendError> {
        Ok(ComparedLinear {
            n: source.n,
            k: source.k,
            work: Work::product(&source.weights),
            both: Both {
                tested: self.tested.load_linear(source.clone())?,
                reference: self.reference.load_linear(source)?,
            },
        })
    }

    fn join(&self, matrices: &mut [&mut Linear<R, T>]) -> Result<(), BackendError> {
        let (mut reference, mut tested) = (Vec::new(), Vec::new());
        for matrix in matrices {
            reference.push(&mut matrix.both.reference);
            tested.push(&mut matrix.both.tested);
        }
        self.reference.join(&mut reference)?;
        self.tested.join(&mut tested)
    }

    fn join_experts(&self, experts: &mut ExpertMatrices<'_, Self>) -> Result<(), BackendError> {
        let mut sets = [&mut experts.gate, &mut experts.up, &mut experts.down].map(|set| {
            let both = set.iter_mut().map(|matrix| &mut matrix.both);
            both.map(|both| (&mut both.reference, &mut both.tested))
                .unzip::<_, _, Vec<_>, Vec<_>>()
        });
        let [gate, up, down] = sets.each_mut().map(|(own, _)| std::mem::take(own));
        (self.reference).join_experts(&mut ExpertMatrices { gate, up, down })?;
        let [gate, up, down] = sets.map(|(_, own)| own);
        (self.tested).join_experts(&mut ExpertMatrices { gate, up, down })
    }

    fn join_heads(&self, matrices: &mut [&mut Linear<R, T>]) -> Result<(), BackendError> {
        let both = matrices.iter_mut().map(|matrix| &mut matrix.both);
        let (mut reference, mut tested) = both
            .map(|both| (&mut both.reference, &mut both.tested))
            .unzip::<_, _, Vec<_>, Vec<_>>();
        self.reference.join_heads(&mut reference)?;
        self.tested.join_heads(&mut tested)
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<Self::Vector, BackendError> {
        Ok(Both {
            tested: self.tested.load_vector(values.clone())?,
            reference: self.reference.load_vector(values)?,
        })
    }

    fn has_screen_of(&self, _: &Linear<R, T>) -> bool {
        false
    }

    fn load_screen(&self, _: &Linear<R, T>, dtype: DType) -> Result<NoScreen, BackendError> {
        let op = "comparing with a screen of the output head";
        Err(BackendError::Weights(QuantError::Unsupported { op, dtype }))
    }

    fn buffer(&self) -> Buffer<R, T> {
        ComparedBuffer {
            both: Both {
                reference: self.reference.buffer(),
                tested: self.tested.buffer(),
            },
            width: 0,
            stage: EMBEDDING,
            by_route: false,
        }
    }

    fn routes(&self) -> Self::Routes {
        Both {
            reference: self.reference.routes(),
            tested: self.tested.routes(),
        }
    }

    fn cache(&self, shape: &CacheShape) -> Result<Self::Cache, BackendError> {
        self.state().attention = Work::attention(shape.dtype);
        Ok(Both {
            reference: self.reference.cache(shape)?,
            tested: self.tested.cache(shape)?,
        })
    }

    fn flush(&self) -> Result<(), BackendError> {
        self.reference.flush()?;
        self.tested.flush()
    }

    fn begin_step(&self) -> Result<(), BackendError> {
        self.state().work = Work::default();
        self.reference.begin_step()?;
        self.tested.begin_step()
    }

    fn embed(
        &self,
        table: &Linear<R, T>,
        ids: &[u32],
        scale: f32,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let (w, to) = (&table.both, &mut out.both);
        (self.reference).embed(&w.reference, ids, scale, &mut to.reference)?;
        (self.tested).embed(&w.tested, ids, scale, &mut to.tested)?;
        out.fill(EMBEDDING, table.k);
        self.compare(Work::Lookup, EMBEDDING, out)
    }

    fn rms_norm(
        &self,
        stage: Stage,
        x: &Buffer<R, T>,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let (from, to) = (&x.both, &mut out.both);
        let (w, out_r) = (&weight.reference, &mut to.reference);
        (self.reference).rms_norm(stage, &from.reference, w, eps, out_r)?;
        (self.tested).rms_norm(stage, &from.tested, &weight.tested, eps, &mut to.tested)?;
        out.fill(stage, x.width);
        self.compare(Work::Elements, stage, out)
    }

    fn rms_norm_in_place(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        weight: &Self::Vector,
        eps: f32,
    ) -> Result<(), BackendError> {
        let to = &mut x.both;
        (self.reference).rms_norm_in_place(stage, &mut to.reference, &weight.reference, eps)?;
        (self.tested).rms_norm_in_place(stage, &mut to.tested, &weight.tested, eps)?;
        self.compare(Work::Elements, stage, x)
    }

    fn linear(
        &self,
        x: &Buffer<R, T>,
        layout: OutputLayout,
        products: &mut [Product<'_, Compare<R, T>>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::with_capacity(products.len());
        for Product { stage, w, out } in products.iter_mut() {
            own.push(Product {
                stage: *stage,
                w: &w.both.reference,
                out: &mut out.both.reference,
            });
        }
        self.reference.linear(&x.both.reference, layout, &mut own)?;
        let mut own = Vec::with_capacity(products.len());
        for Product { stage, w, out } in products.iter_mut() {
            own.push(Product {
                stage: *stage,
                w: &w.both.tested,
                out: &mut out.both.tested,
            });
        }
        self.tested.linear(&x.both.tested, layout, &mut own)?;
        for Product { stage, w, out } in products {
            out.fill(*stage, w.n);
            self.compare(w.work, *stage, out)?;
        }
        Ok(())
    }

    fn linear_top(
        &self,
        _: Stage,
        _: &Buffer<R, T>,
        _: &Linear<R, T>,
        screen: &NoScreen,
        _: &[usize],
        _: &mut Buffer<R, T>,
    ) -> Result<ScreenedRows, BackendError> {
        match *screen {}
    }

    fn add_low_rank(
        &self,
        x: &Buffer<R, T>,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Compare<R, T>>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::with_capacity(updates.len());
        for LowRank {
            stage,
            a,
            b,
            scale,
            out,
        } in updates.iter_mut()
        {
            own.push(LowRank {
                stage: *stage,
                a: &a.both.reference,
                b: &b.both.reference,
                scale: *scale,
                out: &mut out.both.reference,
            });
        }
        (self.reference).add_low_rank(&x.both.reference, rows.clone(), &mut own)?;
        let mut own = Vec::with_capacity(updates.len());
        for LowRank {
            stage,
            a,
            b,
            scale,
            out,
        } in updates.iter_mut()
        {
            own.push(LowRank {
                stage: *stage,
                a: &a.both.tested,
                b: &b.both.tested,
                scale: *scale,
                out: &mut out.both.tested,
            });
        }
        (self.tested).add_low_rank(&x.both.tested, rows, &mut own)?;
        for LowRank {
            stage, a, b, out, ..
        } in updates
        {
            self.compare(a.work.max(b.work), *stage, out)?;
        }
        Ok(())
    }

    fn add_bias(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        bias: &Self::Vector,
    ) -> Result<(), BackendError> {
        let to = &mut x.both;
        (self.reference).add_bias(stage, &mut to.reference, &bias.reference)?;
        (self.tested).add_bias(stage, &mut to.tested, &bias.tested)?;
        self.compare(Work::Elements, stage, x)
    }

    fn attention(
        &self,
        attention: Attention<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let stage = attention.stage();
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
        let width = if gated { q.width / 2 } else { q.width };
        let to = &mut out.both;
        let mut own = Vec::with_capacity(sequences.len());
        for Sequence {
            cache,
            n_rows,
            n_angles,
        } in sequences.iter_mut()
        {
            own.push(Sequence {
                cache: &mut cache.reference,
                n_rows: *n_rows,
                n_angles: *n_angles,
            });
        }
        let of_reference = Attention {
            layer,
            shape,
            q: &mut q.both.reference,
            gated,
            k: &mut k.both.reference,
            v: v.map(|v| &v.both.reference),
            q_norm: q_norm.map(|norm| &norm.reference),
            k_norm: k_norm.map(|norm| &norm.reference),
            eps,
            rope,
            sinks: sinks.map(|sinks| &sinks.reference),
            shared,
            is_causal,
        };
        (self.reference).attention(of_reference, &mut own, &mut to.reference)?;
        let mut own = Vec::with_capacity(sequences.len());
        for Sequence {
            cache,
            n_rows,
            n_angles,
        } in sequences.iter_mut()
        {
            own.push(Sequence {
                cache: &mut cache.tested,
                n_rows: *n_rows,
                n_angles: *n_angles,
            });
        }
        let of_tested = Attention {
            layer,
            shape,
            q: &mut q.both.tested,
            gated,
            k: &mut k.both.tested,
            v: v.map(|v| &v.both.tested),
            q_norm: q_norm.map(|norm| &norm.tested),
            k_norm: k_norm.map(|norm| &norm.tested),
            eps,
            rope,
            sinks: sinks.map(|sinks| &sinks.tested),
            shared,
            is_causal,
        };
        (self.tested).attention(of_tested, &mut own, &mut to.tested)?;
        out.fill(stage, width);
        let work = self.state().attention;
        self.compare(work, stage, out)
    }

    fn latent_queries(
        &self,
        stage: Stage,
        inputs: LatentInputs<'_, Self>,
        q: &mut Buffer<R, T>,
        k: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        halves::latent_queries::<_, Reference>(self, stage, &inputs, [&mut *q, &mut *k])?;
        halves::latent_queries::<_, Tested>(self, stage, &inputs, [&mut *q, &mut *k])?;
        let head_dim = inputs.shape.head_dim();
        q.fill(stage, inputs.w.len() * head_dim);
        self.compare(most_work(inputs.w), stage, q)?;
        k.fill(stage, head_dim);
        self.compare(Work::Elements, stage, k)
    }

    fn latent_values(
        &self,
        stage: Stage,
        shape: &LatentConfig,
        x: &Buffer<R, T>,
        w: &[&Linear<R, T>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        halves::latent_values::<_, Reference>(self, stage, shape, (x, w), out)?;
        halves::latent_values::<_, Tested>(self, stage, shape, (x, w), out)?;
        out.fill(stage, w.len() * shape.value_dim);
        self.compare(most_work(w), stage, out)
    }

    fn gate(
        &self,
        stage: Stage,
        activation: Activation,
        gate: &mut Buffer<R, T>,
        up: &Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let to = &mut gate.both;
        (self.reference).gate(stage, activation, &mut to.reference, &up.both.reference)?;
        (self.tested).gate(stage, activation, &mut to.tested, &up.both.tested)?;
        self.compare(Work::Elements, stage, gate)
    }

    fn convolution(
        &self,
        stage: Stage,
        taps: &Self::Vector,
        input: &Buffer<R, T>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, input.width / 3);
        halves::convolution::<_, Reference>(self, stage, (taps, input), sequences, out)?;
        halves::convolution::<_, Tested>(self, stage, (taps, input), sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn delta_net(
        &self,
        stage: Stage,
        mut net: DeltaNet<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, net.shape.values());
        halves::delta_net::<_, Reference>(self, stage, &mut net, sequences, out)?;
        halves::delta_net::<_, Tested>(self, stage, &mut net, sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn ssm(
        &self,
        stage: Stage,
        mut ssm: Ssm<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, ssm.shape.inner());
        halves::ssm::<_, Reference>(self, stage, &mut ssm, sequences, out)?;
        halves::ssm::<_, Tested>(self, stage, &mut ssm, sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn causal_convolution(
        &self,
        stage: Stage,
        convolution: CausalConvolution<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, convolution.input.width);
        halves::causal_convolution::<_, Reference>(self, stage, &convolution, sequences, out)?;
        halves::causal_convolution::<_, Tested>(self, stage, &convolution, sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn selective_scan(
        &self,
        stage: Stage,
        mut scan: SelectiveScan<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, scan.x.width);
        halves::selective_scan::<_, Reference>(self, stage, &mut scan, sequences, out)?;
        halves::selective_scan::<_, Tested>(self, stage, &mut scan, sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn layer_norm(
        &self,
        stage: Stage,
        x: &Buffer<R, T>,
        weights: (&Self::Vector, &Self::Vector),
        eps: f32,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, x.width);
        halves::layer_norm::<_, Reference>(self, stage, x, weights, eps, out)?;
        halves::layer_norm::<_, Tested>(self, stage, x, weights, eps, out)?;
        self.compare(Work::Elements, stage, out)
    }

    fn apply(
        &self,
        stage: Stage,
        function: Function,
        x: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        (self.reference).apply(stage, function, &mut x.both.reference)?;
        (self.tested).apply(stage, function, &mut x.both.tested)?;
        self.compare(Work::Elements, stage, x)
    }

    fn multiply(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        y: &Buffer<R, T>,
    ) -> Result<(), BackendError> {
        (self.reference).multiply(stage, &mut x.both.reference, &y.both.reference)?;
        (self.tested).multiply(stage, &mut x.both.tested, &y.both.tested)?;
        self.compare(Work::Elements, stage, x)
    }

    fn token_shift(
        &self,
        stage: Stage,
        shift: TokenShift<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, shift.x.width);
        halves::token_shift::<_, Reference>(self, stage, &shift, sequences, out)?;
        halves::token_shift::<_, Tested>(self, stage, &shift, sequences, out)?;
        self.compare(Work::Elements, stage, out)
    }

    fn time_mix(
        &self,
        stage: Stage,
        mut mix: TimeMix<'_, Compare<R, T>>,
        sequences: &mut [Sequence<'_, Self::Cache>],
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, mix.r.width);
        halves::time_mix::<_, Reference>(self, stage, &mut mix, sequences, out)?;
        halves::time_mix::<_, Tested>(self, stage, &mut mix, sequences, out)?;
        self.compare(Work::Floats, stage, out)
    }

    fn normalize_heads(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError> {
        (self.reference).normalize_heads(stage, &mut x.both.reference, head_dim, eps)?;
        (self.tested).normalize_heads(stage, &mut x.both.tested, head_dim, eps)?;
        self.compare(Work::Elements, stage, x)
    }

    fn columns(
        &self,
        stage: Stage,
        x: &Buffer<R, T>,
        columns: Range<usize>,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        out.fill(stage, columns.len());
        let (from, to) = (&x.both, &mut out.both);
        (self.reference).columns(stage, &from.reference, columns.clone(), &mut to.reference)?;
        (self.tested).columns(stage, &from.tested, columns, &mut to.tested)?;
        self.compare(Work::Elements, stage, out)
    }

    fn scale(&self, stage: Stage, x: &mut Buffer<R, T>, factor: f32) -> Result<(), BackendError> {
        (self.reference).scale(stage, &mut x.both.reference, factor)?;
        (self.tested).scale(stage, &mut x.both.tested, factor)?;
        self.compare(Work::Elements, stage, x)
    }

    fn scale_by(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        factor: &Self::Vector,
    ) -> Result<(), BackendError> {
        let to = &mut x.both;
        (self.reference).scale_by(stage, &mut to.reference, &factor.reference)?;
        (self.tested).scale_by(stage, &mut to.tested, &factor.tested)?;
        self.compare(Work::Elements, stage, x)
    }

    fn add_gated(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        y: &Buffer<R, T>,
        gate: &Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let (to, y, gate) = (&mut x.both, &y.both, &gate.both);
        (self.reference).add_gated(stage, &mut to.reference, &y.reference, &gate.reference)?;
        (self.tested).add_gated(stage, &mut to.tested, &y.tested, &gate.tested)?;
        self.compare(Work::Elements, stage, x)
    }

    fn choose_experts(
        &self,
        scores: &Buffer<R, T>,
        bias: Option<&Self::Vector>,
        routing: &Routing,
        routes: &mut Self::Routes,
    ) -> Result<(), BackendError> {
        let from = &scores.both;
        let (reference, tested) = bias.map(|bias| (&bias.reference, &bias.tested)).unzip();
        let routes_of = &mut routes.reference;
        (self.reference).choose_experts(&from.reference, reference, routing, routes_of)?;
        (self.tested).choose_experts(&from.tested, tested, routing, &mut routes.tested)
    }

    /// What experts give is compared once it is combined.
    fn linear_experts(
        &self,
        routes: &Self::Routes,
        x: &Buffer<R, T>,
        input: ExpertInput,
        products: &mut [ExpertProduct<'_, Self>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::with_capacity(products.len());
        for ExpertProduct {
            stage,
            w,
            bias,
            out,
        } in products.iter_mut()
        {
            own.push(ExpertProduct {
                stage: *stage,
                w: w.iter().map(|w| &w.both.reference).collect(),
                bias: bias.map(|bias| &bias.reference),
                out: &mut out.both.reference,
            });
        }
        (self.reference).linear_experts(&routes.reference, &x.both.reference, input, &mut own)?;
        let mut own = Vec::with_capacity(products.len());
        for ExpertProduct {
            stage,
            w,
            bias,
            out,
        } in products.iter_mut()
        {
            own.push(ExpertProduct {
                stage: *stage,
                w: w.iter().map(|w| &w.both.tested).collect(),
                bias: bias.map(|bias| &bias.tested),
                out: &mut out.both.tested,
            });
        }
        (self.tested).linear_experts(&routes.tested, &x.both.tested, input, &mut own)?;
        for ExpertProduct { stage, w, out, .. } in products {
            out.fill(*stage, w.first().map_or(0, |w| w.n));
            out.by_route = true;
            let mut state = self.state();
            state.work = w.iter().fold(state.work, |work, w| work.max(w.work));
        }
        Ok(())
    }

    /// Of errors of several products, bounds are those of a layer.
    fn combine_experts(
        &self,
        routes: &Self::Routes,
        y: &Buffer<R, T>,
        out: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        let (from, to) = (&y.both, &mut out.both);
        (self.reference).combine_experts(&routes.reference, &from.reference, &mut to.reference)?;
        (self.tested).combine_experts(&routes.tested, &from.tested, &mut to.tested)?;
        out.fill(y.stage, y.width);
        let (comparison, bound) = {
            let state = self.state();
            (state.comparison, state.work.in_layer())
        };
        match comparison {
            Comparison::Operations => self.measure(bound, y.stage, out),
            Comparison::Layers | Comparison::Drift => Ok(()),
        }
    }

    fn add(
        &self,
        stage: Stage,
        x: &mut Buffer<R, T>,
        y: &Buffer<R, T>,
    ) -> Result<(), BackendError> {
        (self.reference).add(stage, &mut x.both.reference, &y.both.reference)?;
        (self.tested).add(stage, &mut x.both.tested, &y.both.tested)?;
        let (comparison, bound) = {
            let state = self.state();
            (state.comparison, state.work.in_layer())
        };
        // A layer ends with the residual after the feed-forward network; what follows is compared with the next.
        let ends_layer = stage.operation == Operation::FfnResidual;
        let layer = Stage {
            operation: Operation::Layer,
            ..stage
        };
        match comparison {
            Comparison::Operations => self.compare(Work::Elements, stage, x),
            Comparison::Layers if ends_layer => self.measure(bound, layer, x),
            Comparison::Drift if ends_layer => self.measure(f64::INFINITY, layer, x),
            Comparison::Layers | Comparison::Drift => Ok(()),
        }
    }

    fn softcap(&self, stage: Stage, x: &mut Buffer<R, T>, cap: f32) -> Result<(), BackendError> {
        (self.reference).softcap(stage, &mut x.both.reference, cap)?;
        (self.tested).softcap(stage, &mut x.both.tested, cap)?;
        self.compare(Work::Elements, stage, x)
    }

    fn keep_rows(&self, x: &mut Buffer<R, T>, rows: &[usize]) -> Result<(), BackendError> {
        self.reference.keep_rows(&mut x.both.reference, rows)?;
        self.tested.keep_rows(&mut x.both.tested, rows)
    }

    /// The reference's values. Where layers are compared, this compares them too.
    fn submit(&self, x: &mut Buffer<R, T>) -> Result<Self::Readback, BackendError> {
        let (comparison, work) = {
            let state = self.state();
            (state.comparison, state.work)
        };
        let bound = match comparison {
            Comparison::Operations => None,
            Comparison::Layers => Some(work.in_layer()),
            Comparison::Drift => Some(work.in_model()),
        };
        if let Some(bound) = bound {
            self.measure(bound, x.stage, x)?;
        }
        Ok(ready(self.reference.read(&mut x.both.reference)))
    }

    fn write(
        &self,
        values: &[f32],
        width: usize,
        x: &mut Buffer<R, T>,
    ) -> Result<(), BackendError> {
        self.reference.write(values, width, &mut x.both.reference)?;
        self.tested.write(values, width, &mut x.both.tested)?;
        (x.width, x.by_route) = (width, false);
        Ok(())
    }
}

/// Of products with `w`, the work whose bound is the largest.
fn most_work<R, T>(w: &[&ComparedLinear<R, T>]) -> Work {
    (w.iter()).fold(Work::Elements, |work, w| work.max(w.work))
}

impl<R, T> ComparedBuffer<R, T> {
    fn fill(&mut self, stage: Stage, width: usize) {
        (self.stage, self.width, self.by_route) = (stage, width, false);
    }
}
