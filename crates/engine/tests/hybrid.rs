//! Models with their layers split between a GPU and the CPU, against the same models on the CPU. Skipped,
//! with a message, where there is no adapter; a software one will do.
#![cfg(feature = "gpu")]

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::compare::{
    MAX_ERROR_FLOAT, MAX_ERROR_INT8, Source, check_logits, error, logits,
};
use crate::common::{best, cpu, in_f32, load_on, testdata};
use sterna_engine::hybrid::OffloadPlan;
use sterna_engine::lora::{
    ActiveAdapter, AdapterOptions, AdapterSource, LoraMatrix, LoraPair, Module, Orientation,
};
use sterna_engine::swap::{Group, Swap};
use sterna_engine::{
    CacheType, Gpu, Hybrid, Logits, Model, ModelConfig, Session, SessionOptions, Step,
};
use sterna_format::DType;
use sterna_gpu::{AdapterKind, Device, DeviceOptions};
use sterna_kernels::Isa;

/// Each test has a device of its own: a software one computes in one thread.
fn device() -> Option<Device> {
    sterna_testing::gpu::device()
}

/// Most tokens of the sessions here.
const CTX_LEN: usize = 64;

fn options(chunk: usize) -> SessionOptions {
    SessionOptions {
        chunk,
        ..in_f32(CTX_LEN)
    }
}

/// `source` with at most `layers` layers on `device`.
fn split(source: &Source, device: &Device, layers: usize) -> Arc<Model<Hybrid>> {
    split_for(source, device, layers, &options(32))
}

/// The same with room for a session with these `options`.
fn split_for(
    source: &Source,
    device: &Device,
    layers: usize,
    options: &SessionOptions,
) -> Arc<Model<Hybrid>> {
    let (plan, files) = source.plan();
    let gpu = Gpu::new(device.clone(), 2, Isa::detect());
    let share = OffloadPlan::new(&plan, options, &gpu).with_layers(layers);
    load_on(plan, &files, Hybrid::split(gpu, cpu(), share)).unwrap()
}

fn hf(folder: &str) -> Source {
    Source::Hf(testdata().join(folder))
}

fn gguf(folder: &str) -> Source {
    let dir: PathBuf = testdata().join("reference-gguf").join(folder);
    Source::Gguf(dir.join("model.gguf"))
}

fn ids(n: usize, n_vocab: usize) -> Vec<u32> {
    let n_vocab = n_vocab as u32;
    (0..n as u32).map(|i| 1 + i * 37 % (n_vocab - 1)).collect()
}

/// Ternary and block types, tied and untied heads, norms of heads, biases, windows, soft caps.
fn sources() -> Vec<(Source, f64)> {
    vec![
        (hf("reference-logits/bitnet-packed"), MAX_ERROR_INT8),
        (hf("reference-logits/gemma2"), MAX_ERROR_FLOAT),
        (hf("reference-logits/gemma3"), MAX_ERROR_FLOAT),
        (hf("reference-logits/qwen3"), MAX_ERROR_FLOAT),
        (hf("reference-variants/mistral-window-7"), MAX_ERROR_FLOAT),
        (hf("reference-variants/qwen2-window-tied"), MAX_ERROR_FLOAT),
        (
            hf("reference-variants/llama-autobitlinear-norm"),
            MAX_ERROR_INT8,
        ),
        (
            hf("reference-variants/bitnet-packed-silu-untied"),
            MAX_ERROR_INT8,
        ),
        (gguf("llama-q8-0"), MAX_ERROR_INT8),
        (gguf("llama-q4-k-m"), MAX_ERROR_INT8),
        (hf("bitllama-3M/hf-packed"), MAX_ERROR_INT8),
    ]
}

/// Prefill at once, and in chunks with decode steps after them.
fn check(name: &str, model: &Arc<Model<Hybrid>>, want: &[f32], ids: &[u32], bound: f64) {
    let n_vocab = model.config().n_vocab;
    let got = logits(model, ids, options(32));
    check_logits(&format!("{name}, at once"), &got, want, n_vocab, bound);
    let mut session = Session::new(Arc::clone(model), options(7)).unwrap();
    let (prompt, rest) = ids.split_at(ids.len() - 4);
    let mut got = session.forward(prompt, Logits::All).unwrap();
    for id in rest {
        got.extend(session.forward(&[*id], Logits::Last).unwrap());
    }
    check_logits(&format!("{name}, decoding"), &got, want, n_vocab, bound);
}

#[test]
fn layers_are_split_anywhere() {
    check_splits(sources());
}

#[test]
fn layers_of_experts_are_split_anywhere() {
    check_splits(vec![
        (hf("reference-mixtures/hf/mixtral"), MAX_ERROR_FLOAT),
        (hf("reference-mixtures/hf/olmoe"), MAX_ERROR_FLOAT),
        (hf("reference-mixtures/hf/deepseek-v2"), MAX_ERROR_FLOAT),
        (hf("reference-mixtures/hf/deepseek-v3"), MAX_ERROR_FLOAT),
    ]);
}

/// On either side of the layers whose keys and values they attend to.
#[test]
fn layers_that_share_keys_are_split_anywhere() {
    check_splits(vec![
        (hf("reference-layers/hf/gemma4"), MAX_ERROR_FLOAT),
        (hf("reference-layers/hf/gemma4-sharing"), MAX_ERROR_FLOAT),
    ]);
}

fn check_splits(sources: Vec<(Source, f64)>) {
    let Some(device) = device() else { return };
    for (source, bound) in sources {
        let on_cpu = source.load(cpu());
        let c = on_cpu.config();
        let ids = ids(24, c.n_vocab);
        let want = logits(&on_cpu, &ids, options(1000));
        // Of many layers, those in the middle are alike.
        let n = c.n_layers;
        let some = |layers: &usize| [0, 1, n / 2, n.saturating_sub(2), n - 1, n].contains(layers);
        for layers in (0..=n).filter(some) {
            let model = split(&source, &device, layers);
            assert_eq!(model.backend().n_gpu_layers(), layers);
            let name = format!("{}, {layers} layers on the GPU", source.name());
            check(&name, &model, &want, &ids, bound);
            if layers == 0 {
                assert_eq!(logits(&model, &ids, options(7)), want, "{name}");
            }
        }
    }
}

/// A device of its own, as its memory is counted.
fn limited(options: DeviceOptions) -> Option<Device> {
    sterna_testing::gpu::device_with(&options)
}

#[test]
fn models_larger_than_the_budget_are_split() {
    for (source, bound) in [
        (hf("stories260K/hf"), MAX_ERROR_FLOAT),
        (hf("bitllama-3M/hf-packed"), MAX_ERROR_INT8),
        (gguf("llama-q8-0"), MAX_ERROR_INT8),
        (hf("reference-layers/hf/gemma4-sharing"), MAX_ERROR_FLOAT),
    ] {
        let Some(whole) = limited(DeviceOptions::default()) else {
            return;
        };
        let on_cpu = source.load(cpu());
        let c = on_cpu.config();
        let ids = ids(40, c.n_vocab);
        let want = logits(&on_cpu, &ids, options(1000));
        let model = split(&source, &whole, usize::MAX);
        assert_eq!(model.backend().n_gpu_layers(), c.n_layers);
        check(&source.name(), &model, &want, &ids, bound);
        let need = whole.memory().peak;
        drop(model);

        let mut counts = Vec::new();
        for sixteenths in [0, 6, 10, 13, 15, 16] {
            let budget = need * sixteenths / 16;
            let device = limited(DeviceOptions {
                memory_budget: Some(budget),
                ..DeviceOptions::default()
            });
            let device = device.unwrap();
            let model = split(&source, &device, usize::MAX);
            let n_layers = model.backend().n_gpu_layers();
            let name = format!("{}, {budget} bytes, {n_layers} layers", source.name());
            check(&name, &model, &want, &ids, bound);
            assert!(device.memory().peak <= budget, "{name}");
            counts.push(n_layers);
        }
        assert!(counts.is_sorted(), "{counts:?}");
        assert_eq!((counts[0], counts[5]), (0, c.n_layers), "{counts:?}");
    }
}

#[test]
fn what_is_kept_is_enough_for_the_whole_context() {
    let source = hf("stories260K/hf");
    let on_cpu = source.load(cpu());
    let c = on_cpu.config();
    let ids = ids(600, c.n_vocab);
    let options = SessionOptions {
        chunk: 64,
        ..in_f32(ids.len())
    };
    let want = logits(&on_cpu, &ids, options);
    let mut counts = Vec::new();
    for budget in [2_200_000, 3_000_000] {
        let device = limited(DeviceOptions {
            memory_budget: Some(budget),
            ..DeviceOptions::default()
        });
        let Some(device) = device else { return };
        let model = split_for(&source, &device, usize::MAX, &options);
        counts.push(model.backend().n_gpu_layers());
        let mut session = Session::new(Arc::clone(&model), options).unwrap();
        // One by one where a cache grows.
        let mut got = session.forward(&ids[..500], Logits::All).unwrap();
        for id in &ids[500..520] {
            got.extend(session.forward(&[*id], Logits::Last).unwrap());
        }
        got.extend(session.forward(&ids[520..], Logits::All).unwrap());
        let name = format!("{budget} bytes, {counts:?} layers, {:?}", device.memory());
        check_logits(&name, &got, &want, c.n_vocab, MAX_ERROR_FLOAT);
    }
    assert!(0 < counts[0] && counts[0] < counts[1] && counts[1] < c.n_layers);
}

#[test]
fn models_larger_than_a_binding_are_cut() {
    let source = hf("stories260K/hf");
    let on_cpu = source.load(cpu());
    let ids = ids(24, on_cpu.config().n_vocab);
    let want = logits(&on_cpu, &ids, options(1000));
    // All matrices of a layer are larger than the second, and its cache is.
    for (binding, n_layers) in [(65536, on_cpu.config().n_layers), (4096, 0)] {
        let device = limited(DeviceOptions {
            max_binding_bytes: Some(binding),
            ..DeviceOptions::default()
        });
        let Some(device) = device else { return };
        let model = split(&source, &device, usize::MAX);
        assert_eq!(model.backend().n_gpu_layers(), n_layers);
        check(&format!("{binding}"), &model, &want, &ids, MAX_ERROR_FLOAT);
    }
}

#[test]
fn sequences_fork_go_back_and_run_together() {
    let Some(device) = device() else { return };
    for (source, bound) in [
        (hf("stories260K/hf"), 1e-9),
        // Attends to another layer's keys, on the other side too.
        (hf("reference-layers/hf/gemma4-sharing"), MAX_ERROR_FLOAT),
    ] {
        forks(&source, &device, bound);
    }
}

fn forks(source: &Source, device: &Device, bound: f64) {
    let on_cpu = source.load(cpu());
    let c = on_cpu.config();
    let n_layers = c.n_layers;
    for layers in [0, 1, n_layers - 1, n_layers] {
        let model = split(source, device, layers);
        let ids = ids(30, c.n_vocab);
        let last = |session: &mut Session<Hybrid>, ids: &[u32]| {
            session.forward(ids, Logits::Last).unwrap()
        };
        let new = || Session::new(Arc::clone(&model), options(8)).unwrap();
        let fresh = |ids: &[u32]| last(&mut new(), ids);
        let same = |got: &[f32], want: &[f32]| assert!(error(got, want) < bound);

        let mut first = new();
        first.forward(&ids[..20], Logits::None).unwrap();
        let mut second = first.fork(10);
        assert_eq!((first.len(), second.len()), (20, 10));
        let joined = [&ids[..10], &ids[5..12]].concat();
        same(&last(&mut second, &ids[5..12]), &fresh(&joined));
        same(&last(&mut first, &ids[20..]), &fresh(&ids));
        let within = first.len_within(5);
        first.truncate(5);
        assert_eq!(first.len(), within);
        let back = [&ids[..5], &ids[17..19]].concat();
        same(&last(&mut first, &ids[17..19]), &fresh(&back));

        let mut sessions = [first, second];
        let starts = [back, joined];
        let mut steps: Vec<Step<'_, Hybrid>> = sessions
            .iter_mut()
            .zip([&ids[3..4], &ids[7..12]])
            .map(|(session, ids)| Step {
                session,
                ids,
                logits: Logits::Last,
            })
            .collect();
        let got = Session::forward_together(&mut steps).unwrap();
        for ((got, start), more) in got.iter().zip(&starts).zip([&ids[3..4], &ids[7..12]]) {
            same(got, &fresh(&[start, more].concat()));
        }
    }
}

/// An adapter of rank 4 of some modules of every layer.
fn adapter(c: &ModelConfig) -> AdapterSource {
    let matrix = |rows: usize, columns: usize, seed: usize| LoraMatrix {
        name: "matrix".into(),
        shape: vec![rows, columns],
        dtype: DType::F32,
        bytes: (0..rows * columns)
            .flat_map(|i| (((i * 7919 + seed * 104_729) % 201) as f32 / 1000.0 - 0.1).to_le_bytes())
            .collect::<Vec<u8>>()
            .into(),
    };
    let modules = [
        (Module::Q, c.model_dim, c.n_heads * c.head_dim),
        (Module::Down, c.ffn_dim, c.model_dim),
    ];
    let pairs = (0..c.n_layers).flat_map(|layer| {
        modules.map(|(module, k, n)| LoraPair {
            layer,
            module,
            scaling: 10.0,
            a: matrix(4, k, layer),
            b: matrix(n, 4, layer + 1),
        })
    });
    AdapterSource {
        name: "synthetic".into(),
        orientation: Orientation::RankFirst,
        pairs: pairs.collect(),
    }
}

fn adapted<B: sterna_engine::Backend>(model: &Arc<Model<B>>, ids: &[u32]) -> Vec<f32> {
    let source = adapter(model.config());
    let adapter = model.load_adapter(source, AdapterOptions::default());
    let (adapter, scale) = (adapter.unwrap(), 1.0);
    let mut session = Session::new(Arc::clone(model), options(7)).unwrap();
    session
        .set_adapters(vec![ActiveAdapter { adapter, scale }])
        .unwrap();
    session.forward(ids, Logits::All).unwrap()
}

#[test]
fn adapters_lie_beside_their_layers() {
    let Some(device) = device() else { return };
    let source = hf("stories260K/hf");
    let on_cpu = source.load(cpu());
    let c = on_cpu.config();
    let ids = ids(24, c.n_vocab);
    let want = adapted(&on_cpu, &ids);
    let plain = logits(&on_cpu, &ids, options(7));
    assert!(error(&want, &plain) > 10.0 * MAX_ERROR_FLOAT);
    for layers in [0, 2, c.n_layers] {
        let got = adapted(&split(&source, &device, layers), &ids);
        check_logits("adapted", &got, &want, c.n_vocab, MAX_ERROR_FLOAT);
    }
}

/// Replaces `groups` of `model` by those of `source`.
fn swap(source: &Source, model: &Arc<Model<Hybrid>>, groups: &[Group]) {
    let (plan, files) = source.plan();
    let mut swap = Swap::new(model, plan, groups).unwrap();
    while let Some(want) = swap.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let bytes = files[want.file].slice(range);
        swap.feed(bytes).unwrap();
    }
    swap.finish().unwrap();
}

/// Device memory for what the test below brings to the GPU.
const FOR_ACTIVATIONS: u64 = 64 << 10;

#[test]
fn groups_are_swapped_where_they_lie_or_on_the_cpu() {
    swaps(&hf("bitllama-3M/hf-packed"), MAX_ERROR_INT8);
    swaps(&hf("reference-layers/hf/gemma4-sharing"), MAX_ERROR_FLOAT);
}

fn swaps(source: &Source, bound: f64) {
    let on_cpu = source.load(cpu());
    let c = on_cpu.config();
    let ids = ids(24, c.n_vocab);
    let want = logits(&on_cpu, &ids, options(1000));
    let groups = [
        Group::Embedding,
        Group::Layer(0),
        Group::Layer(c.n_layers - 1),
        Group::Head,
    ];
    for layers in [1, c.n_layers] {
        let Some(device) = limited(DeviceOptions::default()) else {
            return;
        };
        let model = split(source, &device, layers);
        let mut session = Session::new(Arc::clone(&model), options(7)).unwrap();
        session.forward(&ids[..12], Logits::Last).unwrap();
        swap(source, &model, &groups);
        let got = session.forward(&ids[12..], Logits::All).unwrap();
        let rest = &want[12 * c.n_vocab..];
        check_logits("swapped", &got, rest, c.n_vocab, bound);

        // Where there is room for the old weights only, the new ones go to the CPU; keys and values stay.
        let device = limited(DeviceOptions {
            memory_budget: Some(device.memory().peak * 3 / 4),
            ..DeviceOptions::default()
        });
        let device = device.unwrap();
        let model = split(source, &device, layers);
        let mut session = Session::new(Arc::clone(&model), options(7)).unwrap();
        session.forward(&ids[..12], Logits::Last).unwrap();
        let memory = device.memory();
        // What comes from the CPU needs memory on the GPU, for a few rows.
        let left = memory.budget.unwrap() - memory.used - FOR_ACTIVATIONS;
        let _full = device.upload(&vec![0u8; left as usize / 16 * 16]).unwrap();
        let used = device.memory().used;
        for group in groups {
            swap(source, &model, &[group]);
        }
        assert!(device.memory().used <= used);
        let got = session.forward(&ids[12..], Logits::All).unwrap();
        check_logits("swapped, full", &got, rest, c.n_vocab, bound);
    }
}

#[test]
fn the_same_tokens_are_chosen() {
    let Some(device) = device() else { return };
    let source = hf("bitllama-3M/hf-packed");
    let on_cpu = source.load(cpu());
    let mut session = Session::new(Arc::clone(&on_cpu), options(32)).unwrap();
    let model = split(&source, &device, 2);
    let mut on_both = Session::new(model, options(32)).unwrap();
    let mut next = vec![1, 5, 9];
    for _ in 0..30 {
        let want = session.forward(&next, Logits::Last).unwrap();
        let got = on_both.forward(&next, Logits::Last).unwrap();
        let (id, margin) = best(&want);
        if margin > 0.5 {
            assert_eq!(best(&got).0, id);
        }
        next = vec![id];
    }
}

#[test]
fn a_cache_is_as_asked_for_or_as_the_device_has_it() {
    let (plain, asked) = (SessionOptions::new(8), in_f32(8));
    let both = |backend: &Hybrid| (plain.cache_on(backend), asked.cache_on(backend));
    let f32 = CacheType::F32;
    assert_eq!(both(&Hybrid::cpu(cpu())), (f32, f32));
    let Some(device) = device() else { return };
    let usual = match device.info().kind {
        AdapterKind::Software => f32,
        _ => CacheType::F16,
    };
    let gpu = Gpu::new(device, 2, Isa::detect());
    let (plan, _) = hf("reference-logits/bitnet-packed").plan();
    let share = OffloadPlan::new(&plan, &plain, &gpu);
    assert_eq!(both(&Hybrid::split(gpu, cpu(), share)), (usual, f32));
}
