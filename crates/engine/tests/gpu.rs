//! Models on a GPU against the same models on the CPU. Skipped, with a message, where there is no
//! adapter; a software one will do.
#![cfg(feature = "gpu")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::compare::{
    MAX_ERROR_FLOAT, MAX_ERROR_HELD, MAX_ERROR_INT8, Source, check_logits, error, logits,
};
use crate::common::{
    self, Reference, cpu, in_f32, load_on, load_with_prompt, plan_gguf, plan_hf, read, testdata,
};
use bytes::Bytes;
use serde_json::Value;
use sterna_engine::lora::{
    ActiveAdapter, AdapterOptions, AdapterSource, LoraMatrix, LoraPair, Module, Orientation,
};
use sterna_engine::plan::{HeadOptions, HeadScreen, PlanOptions, TensorRequest};
use sterna_engine::swap::{Group, Swap};
use sterna_engine::{
    Activations, Backend, CacheType, Gpu, Loader, Logits, Model, ModelConfig, ModelPlan, Session,
    SessionOptions, Step,
};
use sterna_format::safetensors::{self, SafeTensors};
use sterna_format::{DType, hf};
use sterna_gpu::DeviceOptions;
use sterna_kernels::Isa;

/// Each test has a device of its own: a software one computes in one thread.
fn gpu() -> Option<Gpu> {
    Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
}

/// Logits of all `ids`: the first and the last ones computed alone, the others in small chunks.
fn logits_in_parts(model: &Arc<Model<Gpu>>, ids: &[u32]) -> Vec<f32> {
    let options = SessionOptions {
        chunk: 7,
        ..in_f32(ids.len())
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    let (chunks, last) = ids[1..].split_at(ids.len() - 5);
    let alone = last.chunks(1);
    [&ids[..1], chunks]
        .into_iter()
        .chain(alone)
        .flat_map(|ids| session.forward(ids, Logits::All).unwrap())
        .collect()
}

fn check_model(gpu: &Gpu, source: &Source, ids: &[u32], bound: f64) {
    let on_cpu = source.load(cpu());
    let on_gpu = source.load(gpu.clone());
    let n_vocab = on_cpu.config().n_vocab;
    let options = SessionOptions {
        chunk: 1000,
        ..in_f32(ids.len())
    };
    let want = logits(&on_cpu, ids, options);
    let got = logits(&on_gpu, ids, options);
    check_logits(&source.name(), &got, &want, n_vocab, bound);
    let got = logits_in_parts(&on_gpu, ids);
    let name = format!("{}, in parts", source.name());
    check_logits(&name, &got, &want, n_vocab, bound);
}

fn reference_ids(dir: &Path) -> Vec<u32> {
    Reference::read(&dir.join("reference.safetensors")).ids
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&read(path)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check_kind(kind: &str) {
    let Some(gpu) = gpu() else { return };
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(testdata().join(kind))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists())
        .collect();
    dirs.sort();
    for dir in dirs {
        let name = dir.file_name().unwrap().to_str().unwrap();
        let words = ["bitnet", "bitlinear", "online"];
        let ternary = words.iter().any(|word| name.contains(word));
        let bound = if ternary {
            MAX_ERROR_INT8
        } else {
            MAX_ERROR_FLOAT
        };
        check_model(&gpu, &Source::Hf(dir.clone()), &reference_ids(&dir), bound);
    }
}

#[test]
fn reference_models() {
    check_kind("reference-logits");
}

#[test]
fn variants_of_reference_models() {
    check_kind("reference-variants");
}

/// A safetensors file with the tensors `names` of `file` repeated `times` times.
fn with_repeated(file: &[u8], names: &[&str], times: usize) -> Bytes {
    let (len, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let mut repeated = Vec::new();
    for (name, tensor) in header.as_object_mut().unwrap() {
        let Some(offsets) = tensor.get("data_offsets") else {
            continue;
        };
        let [start, end] = [0, 1].map(|i| offsets[i].as_u64().unwrap() as usize);
        let times = if names.contains(&&name[..]) { times } else { 1 };
        let rows = tensor["shape"][0].as_u64().unwrap() as usize;
        tensor["shape"][0] = (rows * times).into();
        let first = repeated.len();
        repeated.extend(data[start..end].repeat(times));
        tensor["data_offsets"] = serde_json::json!([first, repeated.len()]);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let len = header.len() as u64;
    [&len.to_le_bytes()[..], &header, &repeated].concat().into()
}

/// Tables of 10 MB: what a device doesn't need to have in memory as a whole. A swap loads them so, too.
#[test]
fn large_tables_are_loaded_by_rows() {
    let Some(gpu) = gpu() else { return };
    let dir = testdata().join("reference-logits/llama");
    let on_cpu = Source::Hf(dir.clone()).load(cpu());
    let n_vocab = on_cpu.config().n_vocab;
    let times = 40_000 / n_vocab;
    let names = ["model.embed_tokens.weight", "lm_head.weight"];
    let file = with_repeated(&read(&dir.join("model.safetensors")), &names, times);
    let mut config = json(&dir.join("config.json"));
    config["vocab_size"] = (n_vocab * times).into();
    let plan = || {
        let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
        let catalog = safetensors::merge(vec![("model.safetensors", header)], None).unwrap();
        let config = hf::Config::from_value(&config).unwrap();
        ModelPlan::from_hf(&config, &catalog, &PlanOptions::default()).unwrap()
    };
    let mut loader = Loader::new(plan(), gpu);
    let mut of_tables = Vec::new();
    while let Some(want) = loader.wanted() {
        if names.contains(&want.name_in_file()) {
            of_tables.push(want.len);
        }
        loader.feed(slice(&file, want)).unwrap();
    }
    let whole = (n_vocab * times * 128 * 2) as u64;
    assert_eq!(of_tables, [8 << 20, whole - (8 << 20)].repeat(2));
    let on_gpu = loader.finish().unwrap();

    let ids = reference_ids(&dir);
    let others: Vec<u32> = (ids.iter().zip(0..))
        .map(|(id, i)| id + (i % times * n_vocab) as u32)
        .collect();
    let options = in_f32(ids.len());
    let want = logits(&on_cpu, &ids, options);
    let check = || {
        let got = logits(&on_gpu, &others, options);
        for got in got.chunks(n_vocab * times) {
            assert!(got.chunks(n_vocab).all(|part| part == &got[..n_vocab]));
        }
        let first = |row: &[f32]| row[..n_vocab].to_vec();
        let got: Vec<f32> = got.chunks(n_vocab * times).flat_map(first).collect();
        check_logits("llama", &got, &want, n_vocab, MAX_ERROR_FLOAT);
    };
    check();

    let mut swap = Swap::new(&on_gpu, plan(), &[Group::Embedding]).unwrap();
    while let Some(want) = swap.wanted() {
        swap.feed(slice(&file, want)).unwrap();
    }
    swap.finish().unwrap();
    check();

    let mut swap = Swap::new(&on_gpu, plan(), &[Group::Embedding]).unwrap();
    swap.feed(slice(&file, swap.wanted().unwrap())).unwrap();
    let mut second = slice(&file, swap.wanted().unwrap()).to_vec();
    second[14..16].copy_from_slice(&[0xc0, 0x7f]);
    let error = swap.feed(second.into()).unwrap_err().to_string();
    let at = (8 << 20) / 2 + 7;
    assert!(
        error.ends_with(&format!("found NaN at index {at}")),
        "{error}"
    );
}

/// A device has the experts of a layer next to each other: one is replaced in a copy of all.
#[test]
fn an_expert_is_replaced_alone() {
    let Some(gpu) = gpu() else { return };
    for name in ["hf/mixtral", "gguf/olmoe"] {
        let at = testdata().join("reference-mixtures").join(name);
        let (plan, files) = match name.starts_with("hf") {
            true => plan_hf(&at),
            false => plan_gguf(&[at.join("model.gguf")]),
        };
        let model = load_on(plan.clone(), &files, gpu.clone()).unwrap();
        let ids: Vec<u32> = (3..30).collect();
        let options = in_f32(64);
        let before = logits(&model, &ids, options);
        let mut revision: Vec<Vec<u8>> = files.iter().map(|file| file.to_vec()).collect();
        let expert = Group::Expert {
            layer: 1,
            expert: 2,
        };
        let mut swap = Swap::new(&model, plan.clone(), &[expert]).unwrap();
        while let Some(want) = swap.wanted() {
            let range = want.offset as usize..(want.offset + want.len) as usize;
            let bytes = &mut revision[want.file][range];
            bytes.rotate_right(bytes.len() / 8);
            let bytes = bytes.to_vec();
            swap.feed(bytes.into()).unwrap();
        }
        swap.finish().unwrap();
        let revision: Vec<Bytes> = revision.into_iter().map(Bytes::from).collect();
        let fresh = load_on(plan, &revision, gpu.clone()).unwrap();
        let (got, want) = (logits(&model, &ids, options), logits(&fresh, &ids, options));
        assert!(error(&got, &want) < 1e-12, "{name}");
        assert!(error(&before, &want) > 1e-6, "{name}");
    }
}

/// A model and its fork, which has other weights, take turns on a device: each has what it has alone.
#[test]
fn a_fork_and_its_model_take_turns() {
    let Some(gpu) = gpu() else { return };
    let at = testdata().join("reference-logits/qwen3");
    let (plan, files) = plan_hf(&at);
    let model = load_on(plan.clone(), &files, gpu).unwrap();
    let fork = model.fork();
    let mut swap = Swap::new(&fork, plan, &[Group::Layer(1)]).unwrap();
    while let Some(want) = swap.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let mut bytes = files[want.file][range].to_vec();
        let n = bytes.len() / 4 * 2;
        bytes.rotate_right(n);
        swap.feed(bytes.into()).unwrap();
    }
    swap.finish().unwrap();
    let ids: Vec<u32> = (3..30).collect();
    let options = in_f32(64);
    let [want, want_of_fork] = [&model, &fork].map(|model| logits(model, &ids, options));
    assert!(error(&want, &want_of_fork) > 1e-6);
    let mut sessions =
        [&model, &fork].map(|model| Session::new(Arc::clone(model), options).unwrap());
    let mut got = [Vec::new(), Vec::new()];
    for part in ids.chunks(5).flat_map(|part| [&part[..1], &part[1..]]) {
        for (session, got) in sessions.iter_mut().zip(&mut got) {
            got.extend(session.forward(part, Logits::All).unwrap());
        }
    }
    assert!(error(&got[0], &want) < 1e-9 && error(&got[1], &want_of_fork) < 1e-9);
}

fn slice(file: &Bytes, want: &TensorRequest) -> Bytes {
    file.slice(want.offset as usize..(want.offset + want.len) as usize)
}

#[test]
fn mixtures_of_experts() {
    let Some(gpu) = gpu() else { return };
    for name in [
        "mixtral",
        "qwen3-moe",
        "olmoe",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
    ] {
        let dirs = testdata().join("reference-mixtures");
        let hf = dirs.join("hf").join(name);
        let gguf = dirs.join("gguf").join(name).join("model.gguf");
        let ids = reference_ids(&hf);
        for source in [Source::Hf(hf), Source::Gguf(gguf)] {
            check_model(&gpu, &source, &ids, MAX_ERROR_FLOAT);
        }
    }
}

/// Wider heads in layers without a window, values that are keys, layers that share keys and values, inputs of layers.
#[test]
fn layers_that_differ() {
    check_kind("reference-layers/hf");
}

#[test]
fn every_stored_type() {
    let Some(gpu) = gpu() else { return };
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(testdata().join("reference-gguf"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("model.gguf").exists())
        .collect();
    dirs.sort();
    assert!(dirs.len() > 30);
    for dir in dirs {
        let name = dir.file_name().unwrap().to_str().unwrap();
        let held = ["mxfp4", "q2-k", "q3-k", "q4-1", "q5-0", "q5-1", "q5-k"];
        let bound = match held.iter().any(|held| name.contains(held)) {
            true => MAX_ERROR_HELD,
            false => MAX_ERROR_INT8,
        };
        let source = Source::Gguf(dir.join("model.gguf"));
        let ids = reference_ids(&dir);
        check_model(&gpu, &source, &ids, bound);

        // Without rounding, whatever the type, there is nothing to differ by.
        if !["bitnet", "falcon-e"]
            .iter()
            .any(|word| name.contains(word))
        {
            let options = in_f32(ids.len());
            let on_cpu = source.load(cpu().with_activations(Activations::F32));
            let on_gpu = source.load(gpu.clone().with_activations(Activations::F32));
            let want = logits(&on_cpu, &ids, options);
            let got = logits(&on_gpu, &ids, options);
            let n_vocab = on_cpu.config().n_vocab;
            check_logits(
                &format!("{name} in f32"),
                &got,
                &want,
                n_vocab,
                MAX_ERROR_FLOAT,
            );
        }
    }
}

/// Feeds the expected texts of every third of `cases`, from one on, to both, and compares choices.
fn check_tales(gpu: &Gpu, source: &Source, (cases, from): (&Value, usize), next: &str, bound: f64) {
    let on_cpu = source.load(cpu());
    let on_gpu = source.load(gpu.clone());
    for case in cases.as_array().unwrap().iter().skip(from % 3).step_by(3) {
        let mut ids = self::ids(&case["prompt_ids"]);
        ids.extend(self::ids(&case[next]));
        let options = in_f32(ids.len());
        let want = logits(&on_cpu, &ids, options);
        let got = logits(&on_gpu, &ids, options);
        let n_vocab = on_cpu.config().n_vocab;
        check_logits(&source.name(), &got, &want, n_vocab, bound);
    }
}

/// Every form of a model with some texts, and every text with some form.
fn check_forms(folder: &str, hf: &str, bound: f64) {
    let Some(gpu) = gpu() else { return };
    let dir = testdata().join(folder);
    let expected = json(&dir.join("expected/greedy.json"));
    let mut forms: Vec<Source> = common::files(&dir, "gguf")
        .into_iter()
        .map(Source::Gguf)
        .collect();
    forms.push(Source::Hf(dir.join(hf)));
    assert!(forms.len() >= 3);
    for (i, source) in forms.iter().enumerate() {
        let bound = match source.name().contains("q8_0") {
            true => MAX_ERROR_INT8,
            false => bound,
        };
        let cases = (&expected["greedy"], i);
        check_tales(&gpu, source, cases, "generated_ids", bound);
    }
}

#[test]
fn stories_in_every_form() {
    check_forms("stories260K", "hf", MAX_ERROR_FLOAT);
}

#[test]
fn bitllama_in_every_form() {
    check_forms("bitllama-3M", "hf-packed", MAX_ERROR_INT8);
}

#[test]
fn tiny_tales() {
    let Some(gpu) = gpu() else { return };
    let dir = testdata().join("../crates/sterna/models/tiny-tales");
    let expected = json(&dir.join("expected.json"));
    let source = Source::Hf(dir);
    // The last is with a long prompt.
    let cases = (&expected, 0);
    check_tales(&gpu, &source, cases, "greedy_ids", MAX_ERROR_INT8);
}

fn stories() -> Source {
    Source::Hf(testdata().join("stories260K/hf"))
}

/// Models whose caches differ in kind: keys and values of heads, latent vectors, and what layers share. With how far a
/// sequence may be from itself where its rows are computed in another way: scores of the last aren't scaled, so that
/// small errors grow.
fn with_any_cache() -> [(Source, f64); 3] {
    let latent = testdata().join("reference-mixtures/hf/deepseek-v3");
    let shared = testdata().join("reference-layers/hf/gemma4-sharing");
    [
        (stories(), 1e-9),
        (Source::Hf(latent), 1e-9),
        (Source::Hf(shared), MAX_ERROR_FLOAT),
    ]
}

fn story_ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 1 + i * 37 % 500).collect()
}

fn ids_for(model: &Model<Gpu>, n: usize) -> Vec<u32> {
    let n_vocab = model.config().n_vocab as u32;
    story_ids(n).into_iter().map(|id| id % n_vocab).collect()
}

#[test]
fn caches_of_every_type_grow() {
    let Some(gpu) = gpu() else { return };
    let (on_cpu, on_gpu) = (stories().load(cpu()), stories().load(gpu));
    // Beyond the first memory of a layer, and beyond a span.
    let ids = story_ids(266);
    for cache in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
        let options = SessionOptions {
            cache: Some(cache),
            chunk: 64,
            ..in_f32(512)
        };
        let want = logits(&on_cpu, &ids, options);
        let mut session = Session::new(Arc::clone(&on_gpu), options).unwrap();
        let mut got = session.forward(&ids[..250], Logits::All).unwrap();
        for id in &ids[250..] {
            got.extend(session.forward(&[*id], Logits::Last).unwrap());
        }
        let bound = match cache {
            CacheType::F32 => MAX_ERROR_FLOAT,
            _ => 1e-5,
        };
        check_logits(&format!("{cache:?}"), &got, &want, 512, bound);
    }
}

#[test]
fn a_prompt_computed_while_weights_arrive_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    for name in ["stories260K/hf", "reference-states/hf/qwen3.5"] {
        let (plan, files) = plan_hf(&testdata().join(name));
        let ids: Vec<u32> = story_ids(40).iter().map(|id| id % 380).collect();
        let options = in_f32(64);
        let model = load_on(plan.clone(), &files, gpu.clone()).unwrap();
        let n_vocab = model.config().n_vocab;
        let mut straight = Session::new(model, options).unwrap();
        let mut want = straight.forward(&ids, Logits::Last).unwrap();
        want.extend(straight.forward(&[7], Logits::Last).unwrap());
        for from in [0.0, 0.5] {
            let prompt = (&ids[..39], options);
            let early = load_with_prompt(plan.clone(), &files, gpu.clone(), from, prompt);
            let mut early = early.unwrap();
            let mut found = early.forward(&ids[39..], Logits::Last).unwrap();
            found.extend(early.forward(&[7], Logits::Last).unwrap());
            check_logits(name, &found, &want, n_vocab, MAX_ERROR_FLOAT);
        }
    }
}

#[test]
fn sequences_fork_and_go_back() {
    let Some(gpu) = gpu() else { return };
    for (source, bound) in with_any_cache() {
        forks(&source.load(gpu.clone()), bound);
    }
}

fn forks(model: &Arc<Model<Gpu>>, bound: f64) {
    let options = in_f32(512);
    let ids = ids_for(model, 40);
    let other: Vec<u32> = ids.iter().rev().copied().collect();
    let last =
        |session: &mut Session<Gpu>, ids: &[u32]| session.forward(ids, Logits::Last).unwrap();
    let fresh = |ids: &[u32]| last(&mut Session::new(Arc::clone(model), options).unwrap(), ids);
    let same = |got: &[f32], want: &[f32]| assert!(error(got, want) < bound);

    let mut first = Session::new(Arc::clone(model), options).unwrap();
    // What is not read is computed all the same.
    first.forward(&ids[..20], Logits::None).unwrap();
    let mut second = first.fork(10);
    assert_eq!((first.len(), second.len()), (20, 10));
    let joined = |a: &[u32], b: &[u32]| [a, b].concat();
    same(
        &last(&mut second, &other[..9]),
        &fresh(&joined(&ids[..10], &other[..9])),
    );
    same(&last(&mut first, &ids[20..]), &fresh(&ids));
    let within = first.len_within(5);
    first.truncate(5);
    assert_eq!(first.len(), within);
    same(
        &last(&mut first, &other[..3]),
        &fresh(&joined(&ids[..5], &other[..3])),
    );
    same(
        &last(&mut second, &ids[..2]),
        &fresh(&joined(&joined(&ids[..10], &other[..9]), &ids[..2])),
    );
    drop(first);
    same(
        &last(&mut second, &ids[5..6]),
        &fresh(&[&ids[..10], &other[..9], &ids[..2], &ids[5..6]].concat()),
    );
}

#[test]
fn sequences_run_together() {
    let Some(gpu) = gpu() else { return };
    for (source, bound) in with_any_cache() {
        together(&source.load(gpu.clone()), bound);
    }
}

fn together(model: &Arc<Model<Gpu>>, bound: f64) {
    let options = in_f32(128);
    let ids = ids_for(model, 60);
    let starts = [&ids[..1], &ids[..30], &ids[10..17]];
    let steps: [&[u32]; 3] = [&ids[20..25], &ids[3..4], &ids[40..60]];
    let mut sessions: Vec<Session<Gpu>> = Vec::new();
    let mut want = Vec::new();
    for (start, step) in starts.iter().zip(&steps) {
        let mut session = Session::new(Arc::clone(model), options).unwrap();
        session.forward(start, Logits::None).unwrap();
        let mut alone = session.fork(session.len());
        want.push(alone.forward(step, Logits::Last).unwrap());
        sessions.push(session);
    }
    let mut together: Vec<Step<'_, Gpu>> = sessions
        .iter_mut()
        .zip(steps)
        .map(|(session, ids)| Step {
            session,
            ids,
            logits: Logits::Last,
        })
        .collect();
    let got = Session::forward_together(&mut together).unwrap();
    for (got, want) in got.iter().zip(&want) {
        assert!(error(got, want) < bound, "{}", error(got, want));
    }
}

#[test]
fn tokens_are_decoded_by_the_same_commands() {
    // Of its own, as its memory is counted.
    let Some(device) = sterna_testing::gpu::device() else {
        return;
    };
    let gpu = Gpu::new(device, 2, Isa::detect());
    let source = Source::Hf(testdata().join("bitllama-3M/hf-packed"));
    let model = source.load(gpu.clone());
    let mut session = Session::new(Arc::clone(&model), in_f32(512)).unwrap();
    session.forward(&story_ids(130), Logits::Last).unwrap();
    session.forward(&[5], Logits::Last).unwrap();
    let before = (gpu.work(), gpu.device().memory().used);
    for id in 0..20 {
        session.forward(&[id], Logits::Last).unwrap();
    }
    let after = (gpu.work(), gpu.device().memory().used);
    assert_eq!(after.0.n_submits - before.0.n_submits, 20);
    assert_eq!(after.0.n_recorded, before.0.n_recorded);
    assert_eq!(after.1, before.1);
    let per_token = (after.0.n_dispatches - before.0.n_dispatches) / 20;
    let n_layers = model.config().n_layers as u64;
    eprintln!("{per_token} dispatches a token, {n_layers} layers");
    // And the embedding, norm and head; what the last layer leaves may be read, so it is in more parts.
    assert_eq!(per_token, 6 * n_layers + 7);
}

#[test]
fn a_prompt_is_submitted_in_pieces_and_replayed_in_the_same() {
    let Some(gpu) = gpu() else { return };
    let source = Source::Hf(testdata().join("bitllama-3M/hf-packed"));
    let model = source.load(gpu.clone());
    let ids = story_ids(40);
    let mut session = Session::new(Arc::clone(&model), in_f32(64)).unwrap();
    let mut read = || {
        let before = gpu.work();
        session.truncate(0);
        let logits = session.forward(&ids, Logits::Last).unwrap();
        let after = gpu.work();
        let counts = [
            after.n_submits - before.n_submits,
            after.n_dispatches - before.n_dispatches,
            after.n_recorded - before.n_recorded,
        ];
        (logits, counts)
    };
    let (first, [n_submits, n_dispatches, n_recorded]) = read();
    // 16, 32 and so on, and what the last operation of each adds.
    assert!(n_submits > 1 && n_recorded == 1, "{n_submits} {n_recorded}");
    assert!(n_dispatches > 16 * n_submits, "{n_dispatches} {n_submits}");
    let replayed = read();
    assert_eq!(replayed.0, first);
    assert_eq!(replayed.1, [n_submits, n_dispatches, 0]);
    let options = SessionOptions {
        chunk: 4,
        ..in_f32(64)
    };
    let by_four = alone(&model, &ids, options);
    assert!(error(&first, &by_four) < MAX_ERROR_INT8);
}

/// Logits of the last of `ids` in a sequence of its own.
fn alone(model: &Arc<Model<Gpu>>, ids: &[u32], options: SessionOptions) -> Vec<f32> {
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(ids, Logits::Last).unwrap()
}

#[test]
fn forks_share_pages_until_they_are_written_to() {
    // Of its own, as its memory is counted.
    let Some(device) = sterna_testing::gpu::device() else {
        return;
    };
    let gpu = Gpu::new(device, 2, Isa::detect());
    let model = stories().load(gpu.clone());
    for cache in [CacheType::F32, CacheType::Q8_0] {
        let options = SessionOptions {
            cache: Some(cache),
            ..in_f32(512)
        };
        let ids = story_ids(400);
        let mut first = Session::new(Arc::clone(&model), options).unwrap();
        // There is memory for 512 positions: eight pages.
        first.forward(&ids[..300], Logits::None).unwrap();
        first.truncate(100);
        let used = gpu.device().memory().used;
        let mut forks: Vec<_> = [100, 100, 64, 3].map(|len| first.fork(len)).into();
        forks.push(forks[0].fork(90));
        assert_eq!(gpu.device().memory().used, used);
        forks.push(first);
        // Each continues in its own way, at first one by one, over the end of a page, and from one another's end.
        let mut texts: Vec<Vec<u32>> = [100, 100, 64, 3, 90, 100]
            .map(|len| ids[..len].to_vec())
            .into();
        for round in 0..3 {
            for (i, (session, text)) in forks.iter_mut().zip(&mut texts).enumerate() {
                assert_eq!(session.len(), text.len());
                let more = [1, 45, 20][round];
                let more: Vec<u32> = (0..more).map(|j| ids[7 * i + j] + 1).collect();
                text.extend(&more);
                let got = session.forward(&more, Logits::Last).unwrap();
                let want = alone(&model, text, options);
                let bound = if cache == CacheType::F32 { 1e-9 } else { 1e-5 };
                assert!(error(&got, &want) < bound, "{cache:?} {i} {round}");
            }
            // Of two that go on from a page in common, one goes back into it.
            forks[1].truncate(80);
            texts[1].truncate(80);
            let again = forks[1].fork(70);
            drop(std::mem::replace(&mut forks[4], again));
            texts[4] = texts[1][..70].to_vec();
        }
    }
}

#[test]
fn sequences_that_no_buffer_holds_together_are_in_several() {
    let options = DeviceOptions {
        // Pages are of 8 KiB.
        max_binding_bytes: Some(20 * 8192),
        ..DeviceOptions::default()
    };
    let Some(device) = sterna_testing::gpu::device_with(&options) else {
        return;
    };
    let model = stories().load(Gpu::new(device, 2, Isa::detect()));
    let options = SessionOptions {
        chunk: 64,
        ..in_f32(512)
    };
    let ids = story_ids(512);
    let mut sessions = Vec::new();
    let mut texts: Vec<Vec<u32>> = Vec::new();
    // Of eight pages each; one of them shares its own at first.
    for i in 0..5 {
        let text: Vec<u32> = ids[i..450 + i].to_vec();
        let mut session = match i {
            1 => {
                let fork: &Session<Gpu> = &sessions[0];
                texts.push([&texts[0][..200], &text[200..]].concat());
                fork.fork(200)
            }
            _ => {
                texts.push(text);
                Session::new(Arc::clone(&model), options).unwrap()
            }
        };
        let rest = &texts[i][session.len()..];
        session.forward(rest, Logits::None).unwrap();
        sessions.push(session);
    }
    for id in &ids[..2] {
        let id = std::slice::from_ref(id);
        let mut steps: Vec<Step<'_, Gpu>> = sessions
            .iter_mut()
            .map(|session| Step {
                session,
                ids: id,
                logits: Logits::Last,
            })
            .collect();
        let got = Session::forward_together(&mut steps).unwrap();
        for (got, text) in got.iter().zip(&mut texts) {
            text.extend(id);
            let want = alone(&model, text, options);
            assert!(error(got, &want) < 1e-9, "{} tokens", text.len());
        }
    }
    // What one sequence alone has no room for is refused.
    let options = SessionOptions {
        ctx_len: 2048,
        ..options
    };
    let mut long = Session::new(Arc::clone(&model), options).unwrap();
    let refused = long
        .forward(&ids.repeat(4)[..2000], Logits::None)
        .unwrap_err();
    assert!(refused.to_string().contains("1280"), "{refused}");
    assert!(long.is_empty());
}

/// An adapter of rank 4 of some modules of every layer, with small weights.
fn adapter(c: &ModelConfig) -> AdapterSource {
    let matrix = |name: &str, rows: usize, columns: usize, seed: usize| LoraMatrix {
        name: name.into(),
        shape: vec![rows, columns],
        dtype: DType::F32,
        bytes: (0..rows * columns)
            .flat_map(|i| (((i * 7919 + seed * 104_729) % 201) as f32 / 1000.0 - 0.1).to_le_bytes())
            .collect::<Vec<u8>>()
            .into(),
    };
    let q_dim = c.n_heads * c.head_dim;
    let kv_dim = c.n_kv_heads * c.head_dim;
    let modules = [
        (Module::Q, c.model_dim, q_dim),
        (Module::V, c.model_dim, kv_dim),
        (Module::O, q_dim, c.model_dim),
        (Module::Gate, c.model_dim, c.ffn_dim),
        (Module::Down, c.ffn_dim, c.model_dim),
    ];
    let pairs = (0..c.n_layers).flat_map(|layer| {
        modules.map(|(module, k, n)| LoraPair {
            layer,
            module,
            scaling: 0.5,
            a: matrix("a", 4, k, layer),
            b: matrix("b", n, 4, layer + 1),
        })
    });
    AdapterSource {
        name: "synthetic".into(),
        orientation: Orientation::RankFirst,
        pairs: pairs.collect(),
    }
}

fn adapted<B: Backend>(model: &Arc<Model<B>>, ids: &[u32], chunk: usize) -> Vec<f32> {
    let source = adapter(model.config());
    let adapter = model
        .load_adapter(source, AdapterOptions::default())
        .unwrap();
    let options = SessionOptions {
        chunk,
        ..in_f32(ids.len())
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session
        .set_adapters(vec![ActiveAdapter {
            adapter,
            scale: 20.0,
        }])
        .unwrap();
    session.forward(ids, Logits::All).unwrap()
}

#[test]
fn adapters_change_the_same() {
    let Some(gpu) = gpu() else { return };
    let dir = testdata().join("bitllama-3M/hf-packed");
    for (source, bound) in [
        (stories(), MAX_ERROR_FLOAT),
        (Source::Hf(dir), MAX_ERROR_INT8),
    ] {
        let ids = story_ids(24);
        let on_cpu = source.load(cpu());
        let on_gpu = source.load(gpu.clone());
        let n_vocab = on_cpu.config().n_vocab;
        let want = adapted(&on_cpu, &ids, 1000);
        let plain = logits(&on_cpu, &ids, in_f32(ids.len()));
        // The change is more than what is let pass.
        assert!(
            error(&want, &plain) > 10.0 * bound,
            "{}",
            error(&want, &plain)
        );
        for chunk in [1000, 1] {
            let got = adapted(&on_gpu, &ids, chunk);
            check_logits("adapted", &got, &want, n_vocab, bound);
        }
    }
}

#[test]
fn a_screen_of_the_head_is_refused() {
    let Some(gpu) = gpu() else { return };
    let source = Source::Gguf(testdata().join("reference-gguf/llama-q8-0/model.gguf"));
    let (plan, files) = source.plan();
    let screen = |screen| HeadOptions {
        screen,
        ..HeadOptions::default()
    };
    let plan = plan.with_head(screen(HeadScreen::As(DType::Q4_K))).unwrap();
    let error = load_on(plan, &files, gpu).err().unwrap().to_string();
    assert!(error.contains("screen of the output head"), "{error}");
}

#[test]
fn a_restored_sequence_goes_on_as_the_saved_one() {
    let Some(gpu) = gpu() else { return };
    for (source, _) in with_any_cache() {
        saved(&source.load(gpu.clone()));
    }
}

fn saved(model: &Arc<Model<Gpu>>) {
    for cache in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
        let options = SessionOptions {
            cache: Some(cache),
            ..in_f32(512)
        };
        let new = || Session::new(Arc::clone(model), options).unwrap();
        let ids = ids_for(model, 300);
        let mut first = new();
        first.forward(&ids[..290], Logits::None).unwrap();
        let mut file = Vec::new();
        first.save(&mut file).unwrap();
        let mut second = new();
        second.restore(&mut &file[..]).unwrap();
        let rest = |session: &mut Session<Gpu>| session.forward(&ids[290..], Logits::All).unwrap();
        assert_eq!(rest(&mut first), rest(&mut second));
        let cut = &file[..file.len() / 2];
        assert!(second.restore(&mut &cut[..]).is_err());
        assert!(second.is_empty());
    }
}
