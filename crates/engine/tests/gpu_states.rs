//! Models whose layers have states on a GPU, against the same on the CPU and against themselves. Skipped, with a message,
//! where there is no adapter; a software one will do.
#![cfg(feature = "gpu")]

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::common::compare::{
    MAX_ERROR_FLOAT, MAX_ERROR_INT8, Source, check_logits, error, logits,
};
use crate::common::{Reference, cpu, in_f32, load_on, max_difference, testdata};
use sterna_engine::hybrid::{Hybrid, OffloadPlan};
use sterna_engine::{
    Backend, Decoded, Gpu, Logits, Model, Sampler, SamplerConfig, Session, SessionOptions, Step,
};
use sterna_gpu::DeviceOptions;
use sterna_kernels::Isa;

/// The bound on differences from reference logits, as for the CPU.
const MAX_DIFFERENCE: f32 = 1e-3;

/// Of every kind of state, and of layers around them.
const MODELS: [&str; 16] = [
    "lfm2",
    "lfm2-moe",
    "mamba",
    "mamba2",
    "jamba",
    "falcon-h1",
    "granite-hybrid",
    "granite-hybrid-dense",
    "qwen3.5",
    "qwen3.5-tied",
    "qwen3.5-moe",
    "qwen3-next",
    "rwkv4",
    "rwkv5",
    "rwkv6",
    "rwkv7",
];

/// One of each kind of state: short convolutions, state spaces with and without attention, delta nets, time mixing.
const KINDS: [&str; 8] = [
    "lfm2",
    "jamba",
    "falcon-h1",
    "qwen3.5",
    "rwkv4",
    "rwkv5",
    "rwkv6",
    "rwkv7",
];

/// Each test has a device of its own: a software one computes in one thread.
fn gpu() -> Option<Gpu> {
    Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
}

fn dir(name: &str) -> PathBuf {
    testdata().join("reference-states/hf").join(name)
}

fn load<B: Backend>(name: &str, backend: B) -> Arc<Model<B>> {
    Source::Hf(dir(name)).load(backend)
}

fn session<B: Backend>(model: &Arc<Model<B>>) -> Session<B> {
    Session::new(Arc::clone(model), in_f32(256)).unwrap()
}

/// Ids of all vocabularies.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7919 + 13) % 380).collect()
}

fn last<B: Backend>(session: &mut Session<B>, ids: &[u32]) -> Vec<f32> {
    session.forward(ids, Logits::Last).unwrap()
}

fn assert_near(what: &str, got: &[f32], want: &[f32]) {
    let error = error(got, want);
    assert!(error < 1e-8, "{what}: {error}");
}

#[test]
fn logits_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    for name in MODELS {
        let gguf = testdata().join("reference-states/gguf").join(name);
        let reference = Reference::read(&dir(name).join("reference.safetensors"));
        let ids = &reference.ids;
        let gguf = gguf.join("model.gguf");
        let mut sources = vec![Source::Hf(dir(name))];
        if gguf.exists() {
            sources.push(Source::Gguf(gguf));
        }
        for source in sources {
            let (on_cpu, on_gpu) = (source.load(cpu()), source.load(gpu.clone()));
            let n_vocab = on_cpu.config().n_vocab;
            let whole = SessionOptions {
                chunk: 1000,
                ..in_f32(ids.len())
            };
            let want = logits(&on_cpu, ids, whole);
            for chunk in [1000, 7, 1] {
                let got = logits(&on_gpu, ids, SessionOptions { chunk, ..whole });
                let name = format!("{}, {chunk} at once", source.name());
                check_logits(&name, &got, &want, n_vocab, MAX_ERROR_FLOAT);
                if let Source::Hf(_) = source {
                    let difference = max_difference(&got, &reference.logits);
                    eprintln!("{name}: {difference:.1e} from the reference");
                    assert!(difference < MAX_DIFFERENCE, "{name}: {difference}");
                }
            }
        }
    }
}

/// Ternary weights in a rotated basis, activations rounded to int8.
#[test]
fn rotated_models_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    for name in ["bonsai2-identity-signs", "bonsai2-pq2_0", "bonsai2-ptq1_0"] {
        let file = testdata().join("reference-states/gguf").join(name);
        let source = Source::Gguf(file.join("model.gguf"));
        let (on_cpu, on_gpu) = (source.load(cpu()), source.load(gpu.clone()));
        let (ids, n_vocab) = (ids(40), on_cpu.config().n_vocab);
        let options = in_f32(64);
        let want = logits(&on_cpu, &ids, options);
        for chunk in [64, 7, 1] {
            let got = logits(&on_gpu, &ids, SessionOptions { chunk, ..options });
            check_logits(
                &format!("{name}, {chunk}"),
                &got,
                &want,
                n_vocab,
                MAX_ERROR_INT8,
            );
        }
    }
}

#[test]
fn sequences_go_back_to_checkpoints_fork_and_never_meet() {
    let Some(gpu) = gpu() else { return };
    for name in KINDS {
        let model = load(name, gpu.clone());
        let ids = ids(130);
        let want = last(&mut session(&model), &ids);
        for parts in [&[130][..], &[50, 40, 40]] {
            for kept in [50, 89, 130] {
                let mut again = session(&model);
                let mut rest = &ids[..];
                for &n in parts {
                    let part;
                    (part, rest) = rest.split_at(n);
                    again.forward(part, Logits::Last).unwrap();
                }
                let within = again.len_within(kept);
                again.truncate(kept);
                assert_eq!(again.len(), within);
                let n = again.len();
                assert!(n <= kept, "{name}: {parts:?}, {kept}: {n}");
                // The ends of calls are remembered.
                if [50, 90, 130].contains(&kept) && parts.len() == 3 {
                    assert_eq!(n, kept, "{name}");
                }
                let mut fork = again.fork(n);
                again.forward(&[5, 6, 7], Logits::Last).unwrap();
                assert_eq!(fork.len(), n);
                again.truncate(n);
                assert_eq!(again.len(), n, "{name}: where the last call began");
                for session in [&mut again, &mut fork] {
                    if n < ids.len() {
                        assert_near(name, &last(session, &ids[n..]), &want);
                    }
                }
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_have_their_own() {
    let Some(gpu) = gpu() else { return };
    for name in KINDS {
        let model = load(name, gpu.clone());
        let parts = [ids(40), ids(61)[30..].to_vec(), vec![9, 9]];
        let mut sessions: Vec<_> = parts.iter().map(|_| session(&model)).collect();
        for chunk in 0..2 {
            let mut steps: Vec<_> = (sessions.iter_mut().zip(&parts))
                .map(|(session, ids)| {
                    let (first, second) = ids.split_at(ids.len() / 2);
                    Step {
                        session,
                        ids: [first, second][chunk],
                        logits: Logits::Last,
                    }
                })
                .collect();
            let got = Session::forward_together(&mut steps).unwrap();
            for (got, ids) in got.iter().zip(&parts) {
                let end = [ids.len() / 2, ids.len()][chunk];
                assert_near(name, got, &last(&mut session(&model), &ids[..end]));
            }
        }
    }
}

/// Threads that share a device take turns, operation by operation.
#[test]
fn sequences_of_two_threads_have_their_own() {
    let Some(gpu) = gpu() else { return };
    for name in ["rwkv6", "qwen3.5"] {
        let model = load(name, gpu.clone());
        let parts = [ids(48), ids(96)[48..].to_vec()];
        let want = parts.each_ref().map(|ids| last(&mut session(&model), ids));
        let options = SessionOptions {
            chunk: 8,
            ..in_f32(256)
        };
        std::thread::scope(|scope| {
            for (ids, want) in parts.iter().zip(&want) {
                let model = &model;
                scope.spawn(move || {
                    for _ in 0..3 {
                        let mut session = Session::new(Arc::clone(model), options).unwrap();
                        assert_near(name, &last(&mut session, ids), want);
                    }
                });
            }
        });
    }
}

/// Decodes `n` tokens after `last`, as the backend does it.
fn decode<B: Backend>(session: &mut Session<B>, mut last: u32, n: usize) -> Vec<u32> {
    let n_vocab = session.model().config().n_vocab;
    let mut sampler = Sampler::new(SamplerConfig::default(), n_vocab).unwrap();
    let mut ids = Vec::new();
    while ids.len() < n {
        last = match session
            .decode(&[last], sampler.sampling(), n - ids.len())
            .unwrap()
        {
            Decoded::Token(chosen) => chosen.id,
            Decoded::Logits(logits) => sampler.sample(&logits),
        };
        sampler.accept(last);
        ids.push(last);
    }
    ids
}

#[test]
fn steps_ahead_leave_the_state_where_the_sequence_ends() {
    let Some(gpu) = gpu() else { return };
    for name in KINDS {
        let (on_cpu, on_gpu) = (load(name, cpu()), load(name, gpu.clone()));
        let prompt = ids(20);
        let (mut a, mut b) = (session(&on_cpu), session(&on_gpu));
        a.forward(&prompt[..19], Logits::None).unwrap();
        b.forward(&prompt[..19], Logits::None).unwrap();
        let want = decode(&mut a, prompt[19], 100);
        let submits = gpu.work().n_recorded;
        assert_eq!(decode(&mut b, prompt[19], 100), want, "{name}");
        let recorded = gpu.work().n_recorded - submits;
        assert!(
            recorded < 10,
            "{name}: {recorded} steps of 100 were recorded"
        );
        // More is on its way than was taken: stop, fork, and go on with something else.
        let mut b = session(&on_gpu);
        b.forward(&prompt[..19], Logits::None).unwrap();
        let mut got = Vec::new();
        let mut sampler = Sampler::new(SamplerConfig::default(), on_gpu.config().n_vocab).unwrap();
        let mut id = prompt[19];
        let mut forks = Vec::new();
        for i in 0..40 {
            id = match b.decode(&[id], sampler.sampling(), 60).unwrap() {
                Decoded::Token(chosen) => chosen.id,
                Decoded::Logits(logits) => sampler.sample(&logits),
            };
            sampler.accept(id);
            got.push(id);
            if [11, 26].contains(&i) {
                let fork = b.fork(b.len());
                assert_eq!(fork.len(), b.len(), "{name}");
                forks.push(fork);
            }
        }
        assert_eq!(got, want[..40], "{name}");
        let all = [&prompt[..], &got].concat();
        for session in forks.iter_mut().chain([&mut b]) {
            let n = session.len();
            let fresh = last(
                &mut self::session(&on_gpu),
                &[&all[..n], &[5, 6, 7]].concat(),
            );
            assert_near(name, &last(session, &[5, 6, 7]), &fresh);
        }
    }
}

#[test]
fn restored_sequences_go_on_as_the_saved_ones() {
    let Some(gpu) = gpu() else { return };
    for name in KINDS {
        let model = load(name, gpu.clone());
        let ids = ids(60);
        let mut first = session(&model);
        first.forward(&ids[..50], Logits::None).unwrap();
        for truncated in [false, true] {
            if truncated {
                // What is saved is that of a checkpoint.
                first.forward(&[1, 2, 3], Logits::None).unwrap();
                first.truncate(50);
            }
            let mut file = Vec::new();
            first.save(&mut file).unwrap();
            let mut second = session(&model);
            second.restore(&mut &file[..]).unwrap();
            assert_eq!(second.len(), 50);
            let mut fork = first.fork(50);
            let want = fork.forward(&ids[50..], Logits::All).unwrap();
            assert_eq!(second.forward(&ids[50..], Logits::All).unwrap(), want);
            second.truncate(50);
            assert_eq!(second.len(), 50);
            assert_eq!(second.forward(&ids[50..], Logits::All).unwrap(), want);
        }
    }
}

/// A device with no memory left for checkpoints computes the same, and more of it again.
#[test]
fn checkpoints_take_no_memory_that_there_is_not() {
    let ids = ids(60);
    let mut budget = None;
    let mut results = Vec::new();
    for _ in 0..2 {
        let options = DeviceOptions {
            memory_budget: budget,
            ..DeviceOptions::default()
        };
        let Some(device) = sterna_testing::gpu::device_with(&options) else {
            return;
        };
        let gpu = Gpu::new(device, 2, Isa::detect());
        let model = load("qwen3.5", gpu.clone());
        let mut session = session(&model);
        session.forward(&ids[..50], Logits::Last).unwrap();
        budget = Some(gpu.device().memory().used);
        results.push(last(&mut session, &ids[50..]));
        session.truncate(50);
        assert_eq!(session.len(), if results.len() == 1 { 50 } else { 0 });
    }
    assert_eq!(results[0], results[1]);
}

/// Some layers on the CPU, and their states with them.
#[test]
fn layers_on_either_side() {
    let Some(gpu) = gpu() else { return };
    for name in KINDS {
        let source = Source::Hf(dir(name));
        let (plan, _) = source.plan();
        let on_cpu = source.load(cpu());
        let ids = ids(60);
        let want = last(&mut session(&on_cpu), &ids);
        let n_layers = plan.config().n_layers;
        for n in [0, 1, n_layers / 2 + 1, n_layers] {
            let (plan, files) = source.plan();
            let share = OffloadPlan::new(&plan, &SessionOptions::new(256), &gpu).with_layers(n);
            let hybrid = Hybrid::split(gpu.clone(), cpu(), share);
            let model = load_on(plan, &files, hybrid).unwrap();
            let mut session = session(&model);
            session.forward(&ids[..30], Logits::None).unwrap();
            session.forward(&[3, 4, 5], Logits::None).unwrap();
            session.truncate(30);
            assert_eq!(session.len(), 30, "{name}: {n}");
            let mut fork = session.fork(30);
            assert_near(name, &last(&mut session, &ids[30..]), &want);
            assert_near(name, &last(&mut fork, &ids[30..]), &want);
        }
    }
}

/// Where a buffer has room for the states of few sequences, others are in another.
#[test]
fn states_of_more_sequences_than_a_buffer_holds() {
    let mut all = Vec::new();
    for max_binding_bytes in [None, Some(96 << 10)] {
        let options = DeviceOptions {
            max_binding_bytes,
            ..DeviceOptions::default()
        };
        let Some(device) = sterna_testing::gpu::device_with(&options) else {
            return;
        };
        let gpu = Gpu::new(device, 2, Isa::detect());
        let model = load("qwen3.5", gpu.clone());
        let parts: Vec<Vec<u32>> = (0..7).map(|i| ids(20 + i)[i..].to_vec()).collect();
        let mut sessions: Vec<_> = parts.iter().map(|_| session(&model)).collect();
        let mut together = |ids: &[&[u32]]| {
            let steps = sessions.iter_mut().zip(ids).map(|(session, ids)| Step {
                session,
                ids,
                logits: Logits::Last,
            });
            Session::forward_together(&mut steps.collect::<Vec<_>>()).unwrap()
        };
        together(&parts.iter().map(|ids| &ids[..]).collect::<Vec<_>>());
        let before = gpu.work().n_dispatches;
        let got = together(&[&[7][..]; 7]);
        let n_dispatches = gpu.work().n_dispatches - before;
        for (got, ids) in got.iter().zip(&parts) {
            let alone = last(&mut session(&model), &[&ids[..], &[7]].concat());
            assert_near("qwen3.5", got, &alone);
        }
        all.push((n_dispatches, got));
    }
    let [(one, whole), (more, parted)] = &all[..] else {
        panic!("two devices");
    };
    assert!(more > one, "{more} dispatches, {one} without a limit");
    for (a, b) in whole.iter().zip(parted) {
        assert_near("qwen3.5", a, b);
    }
}

/// A step that nobody waits for leaves a sequence as it was, or where its last checkpoint is: its states may have replaced
/// those at the end.
#[test]
fn steps_that_are_dropped_leave_no_states() {
    let Some(gpu) = gpu() else { return };
    let ids = ids(60);
    for name in KINDS {
        let model = load(name, gpu.clone());
        let want = last(&mut session(&model), &ids);
        for n in [1, 4, 8] {
            let mut session = session(&model);
            session.forward(&ids[..30], Logits::None).unwrap();
            for id in &ids[30..50] {
                session.forward(&[*id], Logits::None).unwrap();
            }
            {
                let step = pin!(session.forward_async(&[9; 8][..n], Logits::Last));
                let mut context = Context::from_waker(Waker::noop());
                // That it is begun is enough.
                drop(step.poll(&mut context).map(Result::unwrap));
            }
            session.truncate(50);
            let kept = session.len();
            assert!(kept <= 50 && (n > 1 || kept == 50), "{name}: {n}: {kept}");
            assert_near(name, &last(&mut session, &ids[kept..]), &want);
        }
    }
}
