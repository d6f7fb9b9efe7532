//! Encoders on a GPU: hidden states of whole texts, against the reference's and the CPU's. Skipped, with a message, where
//! there is no adapter; a software one will do.
#![cfg(feature = "gpu")]

use std::sync::Arc;

use crate::common::compare::{MAX_ERROR_FLOAT, Source, error};
use crate::common::{cpu, in_f32, load_on, max_difference, read, testdata};
use sterna_engine::compare::{Compare, Comparison};
use sterna_engine::hybrid::{Hybrid, OffloadPlan};
use sterna_engine::{Backend, Gpu, Logits, Model, Session, SessionOptions, Step};
use sterna_format::safetensors::SafeTensors;
use sterna_kernels::Isa;

/// The bound on differences from the reference, as for the CPU.
const MAX_DIFFERENCE: f32 = 1e-3;

fn gpu() -> Option<Gpu> {
    Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
}

fn sources() -> [Source; 2] {
    let folder = testdata().join("embeddings");
    [
        Source::Hf(folder.join("bert")),
        Source::Gguf(folder.join("bert.gguf")),
    ]
}

/// The texts of the reference, and their hidden states.
fn texts() -> Vec<(Vec<u32>, Vec<f32>)> {
    let file = read(&testdata().join("embeddings/bert/reference.safetensors"));
    let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
    let words = |name: String| {
        let tensor = header.tensors().iter().find(|t| t.name == name).unwrap();
        let bytes = &file[tensor.offset as usize..(tensor.offset + tensor.len) as usize];
        bytes.as_chunks::<4>().0.to_vec()
    };
    let texts = (0..3).map(|text| {
        let ids = words(format!("input_ids.{text}")).into_iter();
        let hidden = words(format!("hidden.{text}")).into_iter();
        (
            ids.map(u32::from_le_bytes).collect(),
            hidden.map(f32::from_le_bytes).collect(),
        )
    });
    texts.collect()
}

/// Hidden states of every text, one after the other in one session.
fn hidden<B: Backend>(model: &Arc<Model<B>>, chunk: usize) -> Vec<Vec<f32>> {
    let options = SessionOptions {
        chunk,
        ..in_f32(64)
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    let hidden = texts().into_iter().map(|(ids, _)| {
        session.truncate(0);
        let hidden = session.hidden(&ids).unwrap();
        assert_eq!(session.len(), ids.len());
        hidden
    });
    hidden.collect()
}

/// The same, of all texts in one batch.
fn hidden_together<B: Backend>(model: &Arc<Model<B>>) -> Vec<Vec<f32>> {
    let texts = texts();
    let session = |_| Session::new(Arc::clone(model), in_f32(64)).unwrap();
    let mut sessions: Vec<Session<B>> = texts.iter().map(session).collect();
    let steps = sessions
        .iter_mut()
        .zip(&texts)
        .map(|(session, (ids, _))| Step {
            session,
            ids,
            logits: Logits::All,
        });
    let mut steps: Vec<Step<'_, B>> = steps.collect();
    let hidden = Session::hidden_together_async(&mut steps);
    model.backend().wait(hidden).unwrap().unwrap()
}

fn check(what: &str, got: &[Vec<f32>], on_cpu: &[Vec<f32>]) {
    for (i, (_, want)) in texts().iter().enumerate() {
        let difference = max_difference(&got[i], want);
        let error = error(&got[i], &on_cpu[i]);
        eprintln!("{what}, {i}: {difference:.1e} from the reference, error {error:.1e}");
        assert!(difference < MAX_DIFFERENCE, "{what}, {i}: {difference}");
        assert!(error < MAX_ERROR_FLOAT, "{what}, {i}: {error}");
    }
}

#[test]
fn hidden_states_are_the_references() {
    let Some(gpu) = gpu() else { return };
    for source in sources() {
        let (on_cpu, on_gpu) = (source.load(cpu()), source.load(gpu.clone()));
        let want = hidden(&on_cpu, 64);
        for chunk in [64, 7] {
            check(&source.name(), &hidden(&on_gpu, chunk), &want);
        }
        check("together", &hidden_together(&on_gpu), &want);
        assert!(hidden_together(&on_cpu) == want);
    }
}

/// A text of one token attends to itself.
#[test]
fn texts_of_every_length_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let [source, _] = sources();
    let (on_cpu, on_gpu) = (source.load(cpu()), source.load(gpu));
    let options = in_f32(64);
    let mut a = Session::new(on_cpu, options).unwrap();
    let mut b = Session::new(on_gpu, options).unwrap();
    for n in [1, 2, 8, 9, 31, 32, 33, 64] {
        let ids: Vec<u32> = (0..n).map(|i| (i * 7919 + 13) % 380).collect();
        let (want, got) = (a.hidden(&ids).unwrap(), b.hidden(&ids).unwrap());
        let error = error(&got, &want);
        assert!(error < MAX_ERROR_FLOAT, "{n}: {error}");
        a.truncate(0);
        b.truncate(0);
    }
}

#[test]
fn layers_on_either_side() {
    let Some(gpu) = gpu() else { return };
    for source in sources() {
        let want = hidden(&source.load(cpu()), 64);
        for n in 0..=3 {
            let (plan, files) = source.plan();
            let share = OffloadPlan::new(&plan, &SessionOptions::new(64), &gpu).with_layers(n);
            let hybrid = Hybrid::split(gpu.clone(), cpu(), share);
            let model = load_on(plan, &files, hybrid).unwrap();
            assert_eq!(model.backend().n_gpu_layers(), n);
            check(&format!("{n} layers"), &hidden(&model, 64), &want);
            check("together", &hidden_together(&model), &want);
        }
    }
}

#[test]
fn gpu_and_cpu_do_not_part() {
    let Some(gpu) = gpu() else { return };
    for source in sources() {
        let (plan, files) = source.plan();
        let model = load_on(plan, &files, Compare::new(cpu(), gpu.clone())).unwrap();
        for comparison in [
            Comparison::Operations,
            Comparison::Layers,
            Comparison::Drift,
        ] {
            model.backend().begin(comparison);
            hidden(&model, 64);
            let measured = model.backend().take();
            assert!(measured.len() >= 9, "{comparison:?}: {}", measured.len());
            for measured in measured {
                assert!(measured.is_within(), "{comparison:?}: {measured:?}");
            }
        }
    }
}
