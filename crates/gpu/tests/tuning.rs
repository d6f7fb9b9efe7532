//! Launch configurations of products: all give the same results, and the measured one is among them.

use std::time::Duration;

use crate::common::{self, device, devices, floats, nmse, run};
use sterna_format::DType;
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::Activation;
use sterna_gpu::kernels::linear::{Epilogue, Input, Linear, WeightKind, multiply};
use sterna_gpu::kernels::quantize::QuantizedRows;
use sterna_gpu::memory::Upload;
use sterna_gpu::tuning::{Effort, LaunchConfig, RowClass, Sample, Tuner, Tuning};
use sterna_gpu::{Device, DeviceOptions, Features, shader};

const F32: WeightKind = WeightKind::Blocks(DType::F32);
const Q4_K: WeightKind = WeightKind::Blocks(DType::Q4_K);

/// Weights that look random, with scales that are numbers.
fn matrix(device: &Device, kind: WeightKind, n: usize, k: usize, seed: u64) -> Linear {
    let mut upload = Upload::new(device, 1 << 20, 2).unwrap();
    let mut random = common::Random::new(seed);
    let scales = match kind {
        WeightKind::Ternary => vec![0.5; n],
        WeightKind::Blocks(_) => Vec::new(),
    };
    let bytes = (0..n * kind.row_bytes(k)).map(|_| match kind {
        WeightKind::Ternary => (0..4).fold(0, |b, i| b | random.below(3) << (2 * i)) as u8,
        WeightKind::Blocks(_) => random.below(256) as u8,
    });
    let mut rows: Vec<u8> = bytes.collect();
    if kind == F32 {
        for value in rows.chunks_exact_mut(4) {
            value[3] = 0x3f;
        }
    }
    if kind == Q4_K {
        for block in rows.chunks_exact_mut(144) {
            for at in [1, 3] {
                block[at] = block[at] & 0x80 | 0x20;
            }
        }
    }
    Linear::upload(device, &mut upload, kind, (n, k), &scales, &rows).unwrap()
}

#[test]
fn every_way_gives_the_same_result() {
    let wishes = [
        (8, 64, true),
        (8, 1024, false),
        (16, 256, true),
        (32, 128, false),
        // Beyond the limits of any device.
        (3, 100, true),
        (u32::MAX, u32::MAX, false),
        (0, 0, true),
    ];
    for device in devices() {
        for (kind, n, k) in [(WeightKind::Ternary, 70, 512), (Q4_K, 48, 768)] {
            let w = matrix(device, kind, n, k, 1);
            let x = device.upload(&floats(k, 2)).unwrap();
            let out = device.buffer("out", n as u64 * 4).unwrap();
            let scratch = QuantizedRows::new(device, 1, k).unwrap();
            let product = |config: LaunchConfig| {
                run(device, &out, n, |r| {
                    r.set_tuning(Tuning::default().with([(w.product(1), config)]));
                    let x = Rows::new(&x, 1, k);
                    let input = Input::Round {
                        x,
                        norm: None,
                        scratch: &scratch,
                    };
                    multiply(r, &w, input, Epilogue::Store, Rows::new(&out, 1, n))
                })
            };
            let want = product(LaunchConfig::default());
            for (lanes, workgroup, own) in wishes {
                let got = product(LaunchConfig {
                    lanes: Some(lanes),
                    workgroup: Some(workgroup),
                    rounds_itself: Some(own),
                    matrix_units: Some(own),
                });
                let what = format!("{kind:?} {lanes}x{workgroup} {own}");
                match kind {
                    WeightKind::Ternary => assert_eq!(got, want, "{what}"),
                    WeightKind::Blocks(_) => assert!(nmse(&got, &want) < 1e-11, "{what}"),
                }
            }
        }
    }
}

#[test]
fn a_step_is_measured() {
    let Some(device) = device() else { return };
    let step = |n_rows| {
        let sample = move |kind, [n, k]: [usize; 2], seed, epilogue| Sample {
            weights: matrix(device, kind, n, k, seed),
            n_rows,
            is_normed: kind != F32,
            epilogue,
            is_alone: true,
        };
        (0..3).flat_map(move |i| {
            let ternary = |n, epilogue| sample(WeightKind::Ternary, [n, 256], i, epilogue);
            let mut layer = vec![
                ternary(96, Epilogue::Store),
                sample(Q4_K, [32, 512], i, Epilogue::Add),
            ];
            if n_rows == 1 {
                layer.push(ternary(64, Epilogue::Gate(Activation::Silu)));
                layer.push(sample(F32, [16, 64], i, Epilogue::Store));
            }
            layer
        })
    };
    let mut samples: Vec<Sample> = step(1).chain(step(3)).chain(step(20)).collect();
    // A matrix that occurs again is not another.
    samples.push(samples[0].clone());
    let alike = samples[0].clone();
    let shared = Sample {
        is_alone: false,
        ..samples[0].clone()
    };
    let tuner = Tuner::new(device, samples).unwrap();
    assert_eq!(tuner.products().len(), 8);
    let effort = Effort {
        rounds: 3,
        limit: Duration::from_secs(60),
    };
    for product in tuner.products() {
        let found = tuner.measure(product, effort).unwrap().unwrap();
        assert_eq!((found.product, found.n_matrices), (*product, 3));
        assert!(found.wrong.is_empty(), "{found:?}");
        assert!(found.best_us <= found.rule_us, "{found:?}");
        let few = product.rows != RowClass::Many;
        assert_eq!(found.best.workgroup.is_some(), few, "{found:?}");
        assert!(!few || found.n_configs > 1, "{found:?}");
    }
    // How a row is quantized that others read too is not measured.
    let product = &tuner.products()[0];
    let alone = tuner.measure(product, effort).unwrap().unwrap();
    // Another of its shape is alone.
    let both = vec![alike, shared];
    let tuner_of_shared = Tuner::new(device, both).unwrap();
    let found = tuner_of_shared.measure(product, effort).unwrap().unwrap();
    assert_eq!(found.best.rounds_itself, found.rule.rounds_itself);
    assert!(1 < found.n_configs && found.n_configs < alone.n_configs);
    // There is no time to compare any.
    let hasty = Effort {
        rounds: 3,
        limit: Duration::ZERO,
    };
    assert_eq!(tuner.measure(product, hasty).unwrap(), None);
    let strange = sterna_gpu::tuning::Product { n: 7, ..*product };
    assert!(tuner.measure(&strange, effort).is_err());
}

#[test]
fn features_and_tuning_follow_the_adapter() {
    let Some(device) = device() else { return };
    let config = LaunchConfig {
        workgroup: Some(64),
        ..LaunchConfig::default()
    };
    let opened = Device::open_with(&DeviceOptions::default(), |offer, options| {
        assert_eq!(&offer.info, device.info());
        assert_eq!(offer.features, device.features());
        options.features = options
            .features
            .without(Features::named("subgroups").unwrap());
        options.tuning = Tuning::all(config);
    });
    let opened = opened.unwrap();
    assert!(!opened.features().subgroups);
    assert_eq!(opened.tuning(), &Tuning::all(config));
    let offer = Device::caps(&DeviceOptions::default()).unwrap();
    assert_eq!(&offer.info, device.info());
}

#[test]
fn features_have_names() {
    for name in Features::ALL.names() {
        let feature = Features::named(name).unwrap();
        assert_eq!(feature.names(), [name]);
        assert!(!Features::ALL.without(feature).names().contains(&name));
    }
    assert_eq!(Features::ALL.names().len(), 7);
    assert_eq!(Features::ALL.without(Features::ALL), Features::NONE);
    assert_eq!(Features::named("magic"), None);
    assert_eq!(shader::fingerprint(), shader::fingerprint());
}
