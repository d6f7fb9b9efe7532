//! What a model multiplies is known after its steps, and whatever way products go, the model stays the same.
//! Skipped, with a message, where there is no adapter.
#![cfg(feature = "gpu")]

use std::time::Duration;

use crate::common::compare::{MAX_ERROR_INT8, Source, check_logits, logits};
use crate::common::{cpu, in_f32, testdata};
use sterna_engine::{Gpu, Logits, Sampler, SamplerConfig, Session, SessionOptions};
use sterna_gpu::kernels::linear::{Epilogue, Form};
use sterna_gpu::tuning::{Effort, LaunchConfig, RowClass, Sample, Tuner, Tuning};
use sterna_gpu::{DeviceOptions, WeightKind};
use sterna_kernels::Isa;

const MODELS: [&str; 2] = ["bitnet-b1.58-i2-s", "llama-q4-k-m"];

fn source(name: &str) -> Source {
    Source::Gguf(
        testdata()
            .join("reference-gguf")
            .join(name)
            .join("model.gguf"),
    )
}

#[test]
fn the_products_of_steps_are_known_and_measured() {
    let Some(device) = sterna_testing::gpu::device() else {
        return;
    };
    let gpu = Gpu::new(device.clone(), 2, Isa::detect());
    assert!(gpu.products().is_empty());
    let model = source(MODELS[0]).load(gpu.clone());
    let (n_layers, n_vocab) = (model.config().n_layers, model.config().n_vocab);
    let mut session = Session::new(model, SessionOptions::new(32)).unwrap();
    session.forward(&[1, 2, 3, 4], Logits::Last).unwrap();
    let greedy = Sampler::new(SamplerConfig::default(), n_vocab).unwrap();
    session.decode(&[5], greedy.sampling(), 1).unwrap();
    let samples = gpu.products();
    let of = |rows| samples.iter().filter(move |s| s.product().rows == rows);
    // At least queries, keys and values, their output, gate and up, and down; and the head, of one row in
    // both steps.
    assert!(of(RowClass::One).count() >= 4 * n_layers + 2, "{samples:?}");
    assert!(of(RowClass::Few).count() >= 4 * n_layers);
    assert!(of(RowClass::Few).all(|sample| sample.n_rows == 4));
    let is_head = |sample: &&Sample| sample.weights.n() == n_vocab;
    assert_eq!(of(RowClass::One).filter(is_head).count(), 2);
    assert_eq!(of(RowClass::Few).filter(is_head).count(), 0);
    let is_fused = |s: &Sample| s.is_normed && matches!(s.epilogue, Epilogue::Gate(_));
    assert!(samples.iter().any(is_fused));
    let rounds = |s: &Sample| matches!(s.weights.kind().form(), Form::Int8(_));
    assert!(samples.iter().all(|s| !s.is_normed || rounds(s)));

    let tuner = Tuner::new(&device, samples.clone()).unwrap();
    let ternary = |sample: &&Sample| sample.weights.kind() == WeightKind::Ternary;
    let product = samples.iter().find(ternary).unwrap().product();
    let effort = Effort {
        rounds: 3,
        limit: Duration::from_secs(60),
    };
    let found = tuner.measure(&product, effort).unwrap().unwrap();
    assert!(found.wrong.is_empty() && found.n_matrices > 1, "{found:?}");
}

#[test]
fn a_model_stays_the_same_whatever_way_its_products_go() {
    let ids = [1, 5, 9, 3, 2, 7, 4, 8, 6, 10, 11];
    for name in MODELS {
        let source = source(name);
        let on_cpu = source.load(cpu());
        let n_vocab = on_cpu.config().n_vocab;
        let want = logits(&on_cpu, &ids, in_f32(ids.len()));
        for (lanes, workgroup, own) in [(8, 1024, true), (32, 64, false), (1, u32::MAX, true)] {
            let tuning = Tuning::all(LaunchConfig {
                lanes: Some(lanes),
                workgroup: Some(workgroup),
                rounds_itself: Some(own),
                matrix_units: Some(own),
            });
            let options = DeviceOptions {
                tuning,
                ..DeviceOptions::default()
            };
            let Some(device) = sterna_testing::gpu::device_with(&options) else {
                return;
            };
            let model = source.load(Gpu::new(device, 2, Isa::detect()));
            for chunk in [1, 4, 100] {
                let options = SessionOptions {
                    chunk,
                    ..in_f32(ids.len())
                };
                let got = logits(&model, &ids, options);
                let name = format!("{name} {lanes}x{workgroup}, chunks of {chunk}");
                check_logits(&name, &got, &want, n_vocab, MAX_ERROR_INT8);
            }
        }
    }
}
