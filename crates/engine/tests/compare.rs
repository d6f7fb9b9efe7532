//! Two backends side by side: where they agree, and that a fault is found where it is.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{cpu, load_on, plan_gguf, plan_hf, testdata};
use bytes::Bytes;
use sterna_engine::backend::{
    Attention, CacheShape, CausalConvolution, DeltaNet, ExpertInput, ExpertMatrices, ExpertProduct,
    LatentInputs, LinearSource, LowRank, OutputLayout, PendingRows, Product, ScreenedRows,
    SelectiveScan, Sequence, Ssm, TimeMix, TokenShift, WeightData,
};
use sterna_engine::compare::{Compare, Comparison, Measured};
use sterna_engine::config::LatentConfig;
use sterna_engine::stage::Stage;
use sterna_engine::{
    Backend, BackendError, CacheType, Cpu, Loader, Logits, Model, ModelPlan, Session,
    SessionOptions, Step,
};
use sterna_format::DType;
use sterna_kernels::Exec;
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::experts::Routing;

/// A backend with a fault: in the matrix whose bytes are at an address, or in the attention of a layer; or whose
/// convolutions fail, once.
struct Faulty<B> {
    inner: B,
    spoil: Arc<AtomicUsize>,
    layer: Option<usize>,
    /// Convolutions up to the one that fails; none does at zero.
    n_left: AtomicUsize,
}

impl<B> Faulty<B> {
    fn new(inner: B, layer: Option<usize>) -> Faulty<B> {
        Faulty {
            inner,
            spoil: Arc::default(),
            layer,
            n_left: AtomicUsize::new(0),
        }
    }
}

/// The models here have none.
const OTHERS: Result<(), BackendError> = Err(BackendError::Unsupported("other layers"));

/// What is wrong with the attention of a layer: one value.
const AT: usize = 5;

impl<B: Backend> Backend for Faulty<B> {
    type Linear = B::Linear;
    type Vector = B::Vector;
    type Screen = B::Screen;
    type Buffer = B::Buffer;
    type Cache = B::Cache;
    type Routes = B::Routes;
    type Readback = B::Readback;

    fn host(&self) -> &Exec {
        self.inner.host()
    }

    fn load_linear(&self, mut source: LinearSource) -> Result<B::Linear, BackendError> {
        let (WeightData::Ternary { codes: bytes, .. } | WeightData::Blocks { bytes, .. }) =
            &source.weights;
        if bytes.as_ptr().addr() == self.spoil.load(Ordering::Relaxed) {
            match &mut source.weights {
                WeightData::Ternary { scale, .. } => *scale = -*scale,
                WeightData::Blocks { dtype, bytes, .. } => {
                    assert_eq!(*dtype, DType::F32);
                    let mut values = bytes.to_vec();
                    // The sign is in the last byte of four.
                    values
                        .iter_mut()
                        .skip(3)
                        .step_by(4)
                        .for_each(|b| *b ^= 0x80);
                    *bytes = values.into();
                }
            }
        }
        self.inner.load_linear(source)
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<B::Vector, BackendError> {
        self.inner.load_vector(values)
    }

    fn has_screen_of(&self, linear: &B::Linear) -> bool {
        self.inner.has_screen_of(linear)
    }

    fn load_screen(&self, linear: &B::Linear, dtype: DType) -> Result<B::Screen, BackendError> {
        self.inner.load_screen(linear, dtype)
    }

    fn buffer(&self) -> B::Buffer {
        self.inner.buffer()
    }

    fn routes(&self) -> B::Routes {
        self.inner.routes()
    }

    fn join_experts(&self, experts: &mut ExpertMatrices<'_, Self>) -> Result<(), BackendError> {
        let [gate, up, down] = [&mut experts.gate, &mut experts.up, &mut experts.down]
            .map(|set| set.iter_mut().map(|matrix| &mut **matrix).collect());
        self.inner
            .join_experts(&mut ExpertMatrices { gate, up, down })
    }

    fn cache(&self, shape: &CacheShape) -> Result<B::Cache, BackendError> {
        self.inner.cache(shape)
    }

    fn embed(
        &self,
        table: &B::Linear,
        ids: &[u32],
        scale: f32,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.embed(table, ids, scale, out)
    }

    fn begin_step(&self) -> Result<(), BackendError> {
        self.inner.begin_step()
    }

    fn rms_norm(
        &self,
        stage: Stage,
        x: &B::Buffer,
        weight: &B::Vector,
        eps: f32,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.rms_norm(stage, x, weight, eps, out)
    }

    fn rms_norm_in_place(
        &self,
        stage: Stage,
        x: &mut B::Buffer,
        weight: &B::Vector,
        eps: f32,
    ) -> Result<(), BackendError> {
        self.inner.rms_norm_in_place(stage, x, weight, eps)
    }

    fn linear(
        &self,
        x: &B::Buffer,
        layout: OutputLayout,
        products: &mut [Product<'_, Faulty<B>>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::new();
        for Product { stage, w, out } in products {
            own.push(Product {
                stage: *stage,
                w: *w,
                out: &mut **out,
            });
        }
        self.inner.linear(x, layout, &mut own)
    }

    fn linear_top(
        &self,
        stage: Stage,
        x: &B::Buffer,
        w: &B::Linear,
        screen: &B::Screen,
        tops: &[usize],
        out: &mut B::Buffer,
    ) -> Result<ScreenedRows, BackendError> {
        self.inner.linear_top(stage, x, w, screen, tops, out)
    }

    fn add_low_rank(
        &self,
        x: &B::Buffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Faulty<B>>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::new();
        for LowRank {
            stage,
            a,
            b,
            scale,
            out,
        } in updates
        {
            own.push(LowRank {
                stage: *stage,
                a: *a,
                b: *b,
                scale: *scale,
                out: &mut **out,
            });
        }
        self.inner.add_low_rank(x, rows, &mut own)
    }

    fn add_bias(
        &self,
        stage: Stage,
        x: &mut B::Buffer,
        bias: &B::Vector,
    ) -> Result<(), BackendError> {
        self.inner.add_bias(stage, x, bias)
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
        }: Attention<'_, Faulty<B>>,
        sequences: &mut [Sequence<'_, B::Cache>],
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        let attention = Attention {
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
        };
        (self.inner).attention(attention, sequences, out)?;
        if self.layer == Some(layer) {
            let n_rows: usize = sequences.iter().map(|s| s.n_rows).sum();
            let mut values = self.inner.read(out)?;
            values[AT] = 2.0 * values[AT] + 1.0;
            let width = values.len() / n_rows;
            self.inner.write(&values, width, out)?;
        }
        Ok(())
    }

    fn latent_queries(
        &self,
        _: Stage,
        _: LatentInputs<'_, Self>,
        _: &mut B::Buffer,
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn latent_values(
        &self,
        _: Stage,
        _: &LatentConfig,
        _: &B::Buffer,
        _: &[&B::Linear],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn gate(
        &self,
        stage: Stage,
        activation: Activation,
        gate: &mut B::Buffer,
        up: &B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.gate(stage, activation, gate, up)
    }

    fn convolution(
        &self,
        stage: Stage,
        taps: &B::Vector,
        input: &B::Buffer,
        sequences: &mut [Sequence<'_, B::Cache>],
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        (self.inner).convolution(stage, taps, input, sequences, out)?;
        match self.n_left.load(Ordering::Relaxed) {
            0 => Ok(()),
            n => {
                self.n_left.store(n - 1, Ordering::Relaxed);
                if n > 1 { Ok(()) } else { OTHERS }
            }
        }
    }

    fn delta_net(
        &self,
        _: Stage,
        _: DeltaNet<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn ssm(
        &self,
        _: Stage,
        _: Ssm<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn causal_convolution(
        &self,
        _: Stage,
        _: CausalConvolution<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn selective_scan(
        &self,
        _: Stage,
        _: SelectiveScan<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn layer_norm(
        &self,
        _: Stage,
        _: &B::Buffer,
        _: (&B::Vector, &B::Vector),
        _: f32,
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn apply(&self, _: Stage, _: Function, _: &mut B::Buffer) -> Result<(), BackendError> {
        OTHERS
    }

    fn multiply(&self, _: Stage, _: &mut B::Buffer, _: &B::Buffer) -> Result<(), BackendError> {
        OTHERS
    }

    fn token_shift(
        &self,
        _: Stage,
        _: TokenShift<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn time_mix(
        &self,
        _: Stage,
        _: TimeMix<'_, Faulty<B>>,
        _: &mut [Sequence<'_, B::Cache>],
        _: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        OTHERS
    }

    fn scale(&self, stage: Stage, x: &mut B::Buffer, factor: f32) -> Result<(), BackendError> {
        self.inner.scale(stage, x, factor)
    }

    fn normalize_heads(
        &self,
        stage: Stage,
        x: &mut B::Buffer,
        head_dim: usize,
        eps: f32,
    ) -> Result<(), BackendError> {
        self.inner.normalize_heads(stage, x, head_dim, eps)
    }

    fn columns(
        &self,
        stage: Stage,
        x: &B::Buffer,
        columns: Range<usize>,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.columns(stage, x, columns, out)
    }

    fn scale_by(
        &self,
        stage: Stage,
        x: &mut B::Buffer,
        factor: &B::Vector,
    ) -> Result<(), BackendError> {
        self.inner.scale_by(stage, x, factor)
    }

    fn add_gated(
        &self,
        stage: Stage,
        x: &mut B::Buffer,
        y: &B::Buffer,
        gate: &B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.add_gated(stage, x, y, gate)
    }

    fn choose_experts(
        &self,
        scores: &B::Buffer,
        bias: Option<&B::Vector>,
        routing: &Routing,
        routes: &mut B::Routes,
    ) -> Result<(), BackendError> {
        self.inner.choose_experts(scores, bias, routing, routes)
    }

    fn linear_experts(
        &self,
        routes: &B::Routes,
        x: &B::Buffer,
        input: ExpertInput,
        products: &mut [ExpertProduct<'_, Faulty<B>>],
    ) -> Result<(), BackendError> {
        let mut own = Vec::new();
        for ExpertProduct {
            stage,
            w,
            bias,
            out,
        } in products
        {
            own.push(ExpertProduct {
                stage: *stage,
                w: w.clone(),
                bias: *bias,
                out: &mut **out,
            });
        }
        self.inner.linear_experts(routes, x, input, &mut own)
    }

    fn combine_experts(
        &self,
        routes: &B::Routes,
        y: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        self.inner.combine_experts(routes, y, out)
    }

    fn add(&self, stage: Stage, x: &mut B::Buffer, y: &B::Buffer) -> Result<(), BackendError> {
        self.inner.add(stage, x, y)
    }

    fn softcap(&self, stage: Stage, x: &mut B::Buffer, cap: f32) -> Result<(), BackendError> {
        self.inner.softcap(stage, x, cap)
    }

    fn keep_rows(&self, x: &mut B::Buffer, rows: &[usize]) -> Result<(), BackendError> {
        self.inner.keep_rows(x, rows)
    }

    fn submit(&self, x: &mut B::Buffer) -> Result<B::Readback, BackendError> {
        self.inner.submit(x)
    }

    fn submit_apart(
        &self,
        x: &mut B::Buffer,
        n_rows: &[usize],
    ) -> Result<PendingRows, BackendError> {
        self.inner.submit_apart(x, n_rows)
    }

    fn wait<F: Future>(&self, future: F) -> Result<F::Output, BackendError> {
        self.inner.wait(future)
    }

    fn write(&self, values: &[f32], width: usize, x: &mut B::Buffer) -> Result<(), BackendError> {
        self.inner.write(values, width, x)
    }
}

type Compared<T> = Arc<Model<Compare<Cpu, T>>>;

/// A prompt and two tokens after it, compared so.
fn compare<T: Backend>(
    model: &Compared<T>,
    comparison: Comparison,
    cache: CacheType,
) -> Vec<Measured> {
    let n_vocab = model.config().n_vocab as u32;
    let ids: Vec<u32> = (0..12).map(|i| (1 + i * 37) % n_vocab).collect();
    model.backend().begin(comparison);
    let options = SessionOptions {
        cache: Some(cache),
        ..SessionOptions::new(64)
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(&ids[..10], Logits::All).unwrap();
    session.forward(&ids[10..11], Logits::Last).unwrap();
    session.forward(&ids[11..], Logits::Last).unwrap();
    model.backend().take()
}

/// The places where the two parted, each once.
fn parted(measured: &[Measured]) -> Vec<String> {
    let outside = measured.iter().filter(|m| !m.is_within());
    let mut stages: Vec<String> = outside.map(|m| m.stage.to_string()).collect();
    stages.sort();
    stages.dedup();
    stages
}

fn ternary() -> (ModelPlan, Vec<Bytes>) {
    plan_gguf(&[testdata().join("bitllama-3M/bitllama-3M-tq2_0.gguf")])
}

fn floats() -> (ModelPlan, Vec<Bytes>) {
    plan_hf(&testdata().join("stories260K/hf"))
}

/// Loads a model of which the tensor called `name` is spoiled on one side.
fn spoiled<B: Backend>(
    inner: B,
    name: &str,
    (plan, files): (ModelPlan, Vec<Bytes>),
) -> Compared<Faulty<B>> {
    let faulty = Faulty::new(inner, None);
    let spoil = Arc::clone(&faulty.spoil);
    let mut loader = Loader::new(plan, Compare::new(cpu(), faulty));
    let mut n_spoiled = 0;
    while let Some(want) = loader.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let bytes = files[want.file].slice(range);
        if want.name == name {
            // Bytes are kept as they are fed.
            spoil.store(bytes.as_ptr().addr(), Ordering::Relaxed);
            n_spoiled += 1;
        }
        loader.feed(bytes).unwrap();
    }
    assert_eq!(n_spoiled, 1, "{name}");
    loader.finish().unwrap()
}

fn check_faults<B: Backend>(backend: impl Fn() -> B) {
    for (name, stage, layer) in [
        ("blk.0.attn_q.weight", "layer 0, q", "layer 0"),
        ("blk.1.attn_output.weight", "layer 1, o", "layer 1"),
        ("blk.2.ffn_up.weight", "layer 2, up", "layer 2"),
        ("blk.1.ffn_down.weight", "layer 1, down", "layer 1"),
    ] {
        for plan in [ternary(), floats()] {
            let model = spoiled(backend(), name, plan);
            let measured = compare(&model, Comparison::Operations, CacheType::F32);
            assert_eq!(parted(&measured), [stage]);
            let found = measured.iter().find(|m| !m.is_within()).unwrap();
            assert!((found.relative_error - 2.0).abs() < 1e-3, "{found:?}");
            let largest = found.largest.unwrap();
            let sum = largest.tested + largest.reference;
            assert!(sum.abs() < 1e-3 * largest.tested.abs(), "{largest:?}");
            let measured = compare(&model, Comparison::Layers, CacheType::F32);
            assert_eq!(parted(&measured), [layer]);
            let measured = compare(&model, Comparison::Drift, CacheType::F32);
            assert_eq!(parted(&measured), ["logits"]);
        }
    }
    let (plan, files) = floats();
    let faulty = Compare::new(cpu(), Faulty::new(backend(), Some(3)));
    let model = load_on(plan, &files, faulty).unwrap();
    let measured = compare(&model, Comparison::Operations, CacheType::F32);
    assert_eq!(parted(&measured), ["layer 3, attention"]);
    let found = measured.iter().find(|m| !m.is_within()).unwrap();
    let largest = found.largest.unwrap();
    assert_eq!((largest.row, largest.column), (0, AT));
}

#[test]
fn a_fault_is_found_where_it_is() {
    check_faults(cpu);
}

#[test]
fn stages_are_named_in_order() {
    let (plan, files) = ternary();
    let model = load_on(plan, &files, Compare::new(cpu(), cpu())).unwrap();
    let measured = compare(&model, Comparison::Operations, CacheType::F32);
    assert!(
        measured
            .iter()
            .all(|m| m.relative_error == 0.0 && m.largest.is_none())
    );
    let n_layers = model.config().n_layers;
    let step = measured.len() / 3;
    let names: Vec<String> = measured[..step]
        .iter()
        .map(|m| m.stage.to_string())
        .collect();
    assert_eq!(names[0], "embedding");
    assert_eq!(names[names.len() - 2..], ["output_norm", "logits"]);
    let per_layer = (step - 3) / n_layers;
    let first: Vec<&str> = names[1..=per_layer].iter().map(|n| &n[9..]).collect();
    let expected = "attn_norm q k v attention attn_sub_norm o attn_residual ffn_norm gate up activation \
                    ffn_sub_norm down ffn_residual";
    assert_eq!(first.join(" "), expected);
    assert!(names[step - 3].starts_with(&format!("layer {}, ", n_layers - 1)));
    // The second and third step are of one row each.
    assert_eq!((measured[0].n_rows, measured[step].n_rows), (10, 1));
    assert_eq!(measured[0].stage, measured[step].stage);
    let logits = &measured[step - 1];
    assert_eq!((logits.n_rows, logits.agreement.n_same), (10, 10));

    let layers = compare(&model, Comparison::Layers, CacheType::F32);
    assert_eq!(layers.len(), 3 * (n_layers + 1));
    assert_eq!(layers[n_layers].stage.to_string(), "logits");
}

#[cfg(feature = "gpu")]
mod gpu {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use sterna_engine::Gpu;
    use sterna_kernels::Isa;

    use super::*;

    fn gpu() -> Option<Gpu> {
        Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
    }

    #[test]
    fn a_fault_on_the_gpu_is_found_where_it_is() {
        let Some(gpu) = gpu() else { return };
        check_faults(|| gpu.clone());
    }

    #[test]
    fn gpu_and_cpu_do_not_part_over_experts() {
        let Some(gpu) = gpu() else { return };
        for name in ["mixtral", "qwen3-moe", "olmoe", "deepseek-v3"] {
            let (plan, files) = plan_hf(&testdata().join("reference-mixtures/hf").join(name));
            let model = load_on(plan, &files, Compare::new(cpu(), gpu.clone())).unwrap();
            for comparison in [
                Comparison::Operations,
                Comparison::Layers,
                Comparison::Drift,
            ] {
                let measured = compare(&model, comparison, CacheType::F32);
                assert_eq!(parted(&measured), [""; 0], "{name}, {comparison:?}");
                let names = measured.iter().map(|m| m.stage.to_string());
                let has_down = names.into_iter().any(|name| name == "layer 0, down");
                assert_eq!(has_down, comparison == Comparison::Operations);
            }
        }
    }

    /// Layers with states, and those of models that have nothing else.
    #[test]
    fn gpu_and_cpu_do_not_part_over_states() {
        let Some(gpu) = gpu() else { return };
        for name in [
            "lfm2", "qwen3.5", "jamba", "rwkv4", "rwkv5", "rwkv6", "rwkv7",
        ] {
            let (plan, files) = plan_hf(&testdata().join("reference-states/hf").join(name));
            let model = load_on(plan, &files, Compare::new(cpu(), gpu.clone())).unwrap();
            for comparison in [
                Comparison::Operations,
                Comparison::Layers,
                Comparison::Drift,
            ] {
                let measured = compare(&model, comparison, CacheType::F32);
                assert_eq!(parted(&measured), [""; 0], "{name}, {comparison:?}");
                let names = measured.iter().map(|m| m.stage.to_string());
                let n_mixed = names.filter(|name| name == "layer 0, time_mix").count();
                let has_mixed = comparison == Comparison::Operations && name.starts_with("rwkv");
                assert_eq!(n_mixed > 0, has_mixed, "{name}, {comparison:?}");
            }
        }
    }

    /// Layers with inputs of their own, and those that attend to the keys and values of others.
    #[test]
    fn gpu_and_cpu_do_not_part_over_layers_that_differ() {
        let Some(gpu) = gpu() else { return };
        for name in ["gemma4", "gemma4-sharing"] {
            let (plan, files) = plan_hf(&testdata().join("reference-layers/hf").join(name));
            let model = load_on(plan, &files, Compare::new(cpu(), gpu.clone())).unwrap();
            for cache in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
                for comparison in [
                    Comparison::Operations,
                    Comparison::Layers,
                    Comparison::Drift,
                ] {
                    // Scores aren't scaled: how far rounded keys drift is the model's own.
                    if comparison == Comparison::Drift && cache != CacheType::F32 {
                        continue;
                    }
                    let measured = compare(&model, comparison, cache);
                    assert_eq!(parted(&measured), [""; 0], "{name}, {comparison:?}");
                    let names: Vec<_> = measured.iter().map(|m| m.stage.to_string()).collect();
                    let last = model.config().n_layers - 1;
                    for (stage, is_there) in [
                        ("layer 0, value_norm".to_owned(), true),
                        (format!("layer {last}, value_norm"), name == "gemma4"),
                        (format!("layer {last}, layer_scale"), true),
                    ] {
                        let is_there = is_there && comparison == Comparison::Operations;
                        assert_eq!(names.contains(&stage), is_there, "{name}, {stage}");
                    }
                }
            }
        }
    }

    type Source = (PathBuf, (ModelPlan, Vec<Bytes>));

    fn models(folder: &str, file: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(testdata().join(folder)).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
        paths.retain(|path| path.join(file).exists());
        paths.sort();
        paths
    }

    #[test]
    fn gpu_and_cpu_do_not_part() {
        let mut sources = Vec::new();
        for dir in models("reference-gguf", "model.gguf") {
            let plan = plan_gguf(&[dir.join("model.gguf")]);
            sources.push((dir, plan));
        }
        sources.push((testdata().join("bitllama-3M"), ternary()));
        sources.push((testdata().join("stories260K"), floats()));
        check_all(sources);
    }

    #[test]
    fn gpu_and_cpu_do_not_part_in_variants() {
        let mut sources = Vec::new();
        for folder in ["reference-logits", "reference-variants"] {
            let dirs = models(folder, "config.json");
            sources.extend(dirs.into_iter().map(|dir| (dir.clone(), plan_hf(&dir))));
        }
        check_all(sources);
    }

    /// With one kind of cache after the other: nothing is further off than it may be.
    fn check_all(sources: Vec<Source>) {
        let Some(gpu) = gpu() else { return };
        assert!(sources.len() > 25, "{}", sources.len());
        let caches = [CacheType::F32, CacheType::F16, CacheType::Q8_0];
        // The share of what is allowed that was used, by kind.
        let mut used: BTreeMap<String, (f64, String)> = BTreeMap::new();
        let mut failed = Vec::new();
        for (i, (path, (plan, files))) in sources.into_iter().enumerate() {
            let model = load_on(plan, &files, Compare::new(cpu(), gpu.clone())).unwrap();
            for comparison in [
                Comparison::Operations,
                Comparison::Layers,
                Comparison::Drift,
            ] {
                for measured in compare(&model, comparison, caches[i % caches.len()]) {
                    let what = format!(
                        "{}, {}: {:.1e} of {:.1e}",
                        path.display(),
                        measured.stage,
                        measured.relative_error,
                        measured.bound
                    );
                    if !measured.is_within() {
                        failed.push(what.clone());
                    }
                    let share = measured.relative_error / measured.bound;
                    let kind = format!(
                        "{comparison:?} {:.0e} {}",
                        measured.bound, measured.stage.operation
                    );
                    let worst = used.entry(kind).or_default();
                    if share > worst.0 {
                        *worst = (share, what);
                    }
                }
            }
        }
        for (kind, (share, what)) in used {
            eprintln!("{kind}: {:.0} %: {what}", share * 100.0);
        }
        assert!(failed.is_empty(), "{failed:#?}");
    }
}

#[test]
fn a_step_that_fails_in_the_middle_takes_a_sequence_to_where_it_is_whole() {
    let (plan, files) = plan_hf(&testdata().join("reference-states/hf/lfm2"));
    let model = load_on(plan, &files, Faulty::new(cpu(), None)).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| 1 + i * 37 % 200).collect();
    let new = || Session::new(Arc::clone(&model), SessionOptions::new(64)).unwrap();
    let want = new().forward(&ids, Logits::Last).unwrap();
    let fail = |n_left| model.backend().n_left.store(n_left, Ordering::Relaxed);
    // After a prompt the end is remembered; between tokens, the prompt's.
    for (n_tokens, kept) in [(0, 10), (1, 10), (5, 10), (20, 26)] {
        let begin = || {
            let mut session = new();
            session.forward(&ids[..10], Logits::None).unwrap();
            for id in &ids[10..10 + n_tokens] {
                session.forward(&[*id], Logits::None).unwrap();
            }
            session
        };
        let (mut one, mut other) = (begin(), begin());
        fail(2);
        let next = &ids[10 + n_tokens..11 + n_tokens];
        one.forward(next, Logits::Last).unwrap_err();
        assert_eq!(one.len(), kept, "{n_tokens}");
        assert_eq!(one.forward(&ids[kept..], Logits::Last).unwrap(), want);
        // Of a batch, all.
        let mut another = begin();
        fail(2);
        let mut steps = [&mut other, &mut another].map(|session| Step {
            session,
            ids: next,
            logits: Logits::Last,
        });
        Session::forward_together(&mut steps).unwrap_err();
        for mut session in [other, another] {
            assert_eq!(session.len(), kept);
            assert_eq!(session.forward(&ids[kept..], Logits::Last).unwrap(), want);
        }
    }
}
