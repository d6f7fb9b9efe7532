//! Devices that are lost: whatever was under way ends with an error that says so.
#![cfg(feature = "gpu")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{in_f32, load_on, plan_gguf, testdata};
use bytes::Bytes;
use sterna_engine::{
    BackendError, EngineError, Gpu, LoadError, Loader, Logits, Model, ModelPlan, Session, Step,
};
use sterna_gpu::DeviceOptions;
use sterna_kernels::Isa;

/// A hang would be this long.
const TIMEOUT: Duration = Duration::from_secs(30);

fn gpu() -> Option<Gpu> {
    let options = DeviceOptions {
        timeout: TIMEOUT,
        ..DeviceOptions::default()
    };
    let device = sterna_testing::gpu::device_with(&options)?;
    Some(Gpu::new(device, 2, Isa::detect()))
}

fn plan() -> (ModelPlan, Vec<Bytes>) {
    plan_gguf(&[testdata().join("bitllama-3M/bitllama-3M-tq2_0.gguf")])
}

fn loaded(gpu: &Gpu) -> Arc<Model<Gpu>> {
    let (plan, files) = plan();
    load_on(plan, &files, gpu.clone()).unwrap()
}

fn session(model: &Arc<Model<Gpu>>) -> Session<Gpu> {
    Session::new(Arc::clone(model), in_f32(512)).unwrap()
}

#[track_caller]
fn expect_lost<T>(result: Result<T, EngineError>) {
    match result {
        Ok(_) => panic!("expected a lost device"),
        Err(error) => assert!(error.is_lost(), "{error}"),
    }
}

const IDS: [u32; 5] = [1, 7, 30, 200, 9];

#[test]
fn while_a_model_is_loaded() {
    let Some(first) = gpu() else { return };
    drop(first);
    for after in [0, 1, 2, 9, 30] {
        let gpu = gpu().unwrap();
        let (plan, files) = plan();
        let mut loader = Loader::new(plan, gpu.clone());
        let mut n = 0;
        let error = loop {
            if n == after {
                gpu.device().lose();
            }
            let want = loader.wanted().expect("a model of more tensors");
            let range = want.offset as usize..(want.offset + want.len) as usize;
            let bytes = files[want.file].slice(range);
            match loader.feed(bytes) {
                Ok(()) => n += 1,
                Err(error) => break error,
            }
        };
        match error {
            LoadError::Backend(error) => assert!(error.is_lost(), "{error}"),
            error => panic!("{error}"),
        }
    }
}

#[test]
fn between_steps() {
    let Some(first) = gpu() else { return };
    drop(first);
    // Before the first step, after a prompt that was not read, after one that was, and in decoding.
    for stage in 0..4 {
        let gpu = gpu().unwrap();
        let model = loaded(&gpu);
        let mut session = session(&model);
        if stage > 0 {
            let wanted = if stage == 1 {
                Logits::None
            } else {
                Logits::Last
            };
            session.forward(&IDS, wanted).unwrap();
        }
        if stage == 3 {
            session.forward(&[3], Logits::Last).unwrap();
            session.forward(&[4], Logits::Last).unwrap();
        }
        let len = session.len();
        gpu.device().lose();
        expect_lost(session.forward(&[5], Logits::Last));
        expect_lost(session.forward(&IDS, Logits::All));
        assert_eq!(session.len(), len);
        // What needs no device goes on.
        let mut fork = session.fork(len);
        expect_lost(fork.forward(&[5], Logits::Last));
        session.truncate(1);
        let mut steps = [&mut session, &mut fork].map(|session| Step {
            session,
            ids: &IDS[..1],
            logits: Logits::Last,
        });
        expect_lost(Session::forward_together(&mut steps));
        let mut late = match Session::new(Arc::clone(&model), in_f32(64)) {
            Ok(late) => late,
            Err(error) => {
                assert!(error.is_lost(), "{error}");
                continue;
            }
        };
        expect_lost(
            late.forward(&IDS, Logits::None)
                .and_then(|_| late.forward(&IDS, Logits::Last)),
        );
        // In an order that is not that in which they were made.
        drop((gpu, model));
        drop((late, session, fork));
    }
}

/// From another thread, at times that are not chosen: in the midst of recording, submitting or waiting.
#[test]
fn at_any_time() {
    let Some(first) = gpu() else { return };
    let model = loaded(&first);
    let mut undisturbed = session(&model);
    let start = Instant::now();
    undisturbed.forward(&IDS.repeat(20), Logits::Last).unwrap();
    let expected = undisturbed.forward(&[3], Logits::Last).unwrap();
    let once = start.elapsed();
    drop((undisturbed, model, first));
    let mut n_lost = 0;
    for trial in 0..12 {
        let gpu = gpu().unwrap();
        let model = loaded(&gpu);
        let mut session = session(&model);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(once * trial / 8);
                gpu.device().lose();
            });
            let results = [&IDS.repeat(20)[..], &[3], &[4], &[5]]
                .map(|ids| session.forward(ids, Logits::Last));
            let mut lost = false;
            for (i, result) in results.into_iter().enumerate() {
                match result {
                    Ok(logits) if i == 1 => assert!(!lost && logits == expected),
                    Ok(_) => assert!(!lost),
                    Err(EngineError::Backend(error @ BackendError::Device(_))) => {
                        assert!(error.is_lost(), "{error}");
                        lost = true;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            n_lost += usize::from(lost);
        });
        assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    }
    assert!(n_lost > 0);
}
