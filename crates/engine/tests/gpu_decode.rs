//! Decoding that a GPU does by itself against steps that the host takes one by one. Skipped, with a
//! message, where there is no adapter; a software one will do.
#![cfg(feature = "gpu")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::common::{cpu, in_f32, load_on, plan_hf, testdata};
use sterna_engine::lora::{
    ActiveAdapter, AdapterOptions, AdapterSource, LoraMatrix, LoraPair, Module, Orientation,
};
use sterna_engine::{
    Backend, CacheType, Decoded, EngineError, Gpu, Logits, Logprobs, Model, Sampler, SamplerConfig,
    Sampling, Session, SessionOptions, Step,
};
use sterna_format::DType;
use sterna_gpu::GpuError;
use sterna_kernels::Isa;

/// Each test has a device of its own: a software one computes in one thread.
fn gpu() -> Option<Gpu> {
    Some(Gpu::new(sterna_testing::gpu::device()?, 2, Isa::detect()))
}

fn load<B: Backend>(dir: &Path, backend: B) -> Arc<Model<B>> {
    let (plan, files) = plan_hf(dir);
    load_on(plan, &files, backend).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

fn stories() -> PathBuf {
    testdata().join("stories260K/hf")
}

/// A session that holds all of `prompt` but the last token, and a sampler that has accepted all of it.
fn start<B: Backend>(
    model: &Arc<Model<B>>,
    prompt: &[u32],
    config: &SamplerConfig,
    options: SessionOptions,
) -> (Session<B>, Sampler) {
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    let (_, before) = prompt.split_last().unwrap();
    if !before.is_empty() {
        session.forward(before, Logits::None).unwrap();
    }
    let n_vocab = model.config().n_vocab;
    let mut sampler = Sampler::new(config.clone(), n_vocab).unwrap();
    prompt.iter().for_each(|&id| sampler.accept(id));
    (session, sampler)
}

/// `n` tokens after `last`, chosen by the host.
fn by_host<B: Backend>(
    session: &mut Session<B>,
    mut last: u32,
    sampler: &mut Sampler,
    n: usize,
) -> Vec<u32> {
    let step = |_| {
        let logits = session.forward(&[last], Logits::Last).unwrap();
        last = sampler.sample(&logits);
        sampler.accept(last);
        last
    };
    (0..n).map(step).collect()
}

/// The token that a device has chosen.
fn token(decoded: Decoded) -> u32 {
    match decoded {
        Decoded::Token(chosen) => chosen.id,
        Decoded::Logits(_) => panic!("left to the host"),
    }
}

/// `n` tokens after `last`, chosen where they can be, and how many of them on the device.
fn by_device<B: Backend>(
    session: &mut Session<B>,
    mut last: u32,
    sampler: &mut Sampler,
    n: usize,
) -> (Vec<u32>, usize) {
    let mut n_drawn = 0;
    let step = |i| {
        let len = session.len();
        last = match session.decode(&[last], sampler.sampling(), n - i).unwrap() {
            Decoded::Token(chosen) => {
                n_drawn += 1;
                chosen.id
            }
            Decoded::Logits(logits) => sampler.sample(&logits),
        };
        assert_eq!(session.len(), len + 1);
        sampler.accept(last);
        last
    };
    let ids = (0..n).map(step).collect();
    (ids, n_drawn)
}

/// The `n` tokens after `prompt`, for which both choose the same, the device all of its own.
fn check(
    name: &str,
    model: &Arc<Model<Gpu>>,
    prompt: &[u32],
    config: &SamplerConfig,
    options: SessionOptions,
    n: usize,
) -> Vec<u32> {
    let last = *prompt.last().unwrap();
    let (mut session, mut sampler) = start(model, prompt, config, options);
    let want = by_host(&mut session, last, &mut sampler, n);
    let (mut session, mut sampler) = start(model, prompt, config, options);
    let (got, n_drawn) = by_device(&mut session, last, &mut sampler, n);
    assert_eq!(got, want, "{name}, {config:?}");
    assert_eq!(n_drawn, n, "{name}, {config:?}");
    want
}

/// Small models of every kind: soft caps, windows, several rotary embeddings or none, tied heads.
fn check_kind(kind: &str) {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplerConfig::default();
    let dirs = std::fs::read_dir(testdata().join(kind)).unwrap();
    let dirs = dirs.map(|entry| entry.unwrap().path());
    for dir in dirs.filter(|path| path.join("config.json").exists()) {
        let model = load(&dir, gpu.clone());
        let name = dir.display().to_string();
        let options = in_f32(64);
        // From the first position, where all rotations are alike, too; and past all windows.
        check(&name, &model, &[1], &greedy, options, 4);
        check(&name, &model, &[1, 5, 3, 7, 2], &greedy, options, 14);
    }
}

#[test]
fn greedy_tokens_are_the_hosts() {
    check_kind("reference-logits");
}

#[test]
fn greedy_tokens_of_variants_are_the_hosts() {
    check_kind("reference-variants");
}

#[test]
fn greedy_tokens_of_layers_that_differ_are_the_hosts() {
    check_kind("reference-layers/hf");
}

#[test]
fn greedy_tokens_of_trained_models_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplerConfig::default();
    // As memory grows from 256 positions to 512, and to 1024, where commands are recorded again.
    let model = load(&stories(), gpu.clone());
    let prompt: Vec<u32> = (0..505).map(|i| 1 + i * 37 % 500).collect();
    for (cache, lens) in [
        (CacheType::F32, &[1, 249, 505][..]),
        (CacheType::F16, &[1, 249]),
        (CacheType::Q8_0, &[1, 249]),
    ] {
        let options = SessionOptions {
            cache: Some(cache),
            ..in_f32(600)
        };
        for len in lens {
            check("stories260K", &model, &prompt[..*len], &greedy, options, 16);
        }
    }
    let tales = testdata().join("../crates/sterna/models/tiny-tales");
    let model = load(&tales, gpu);
    let options = in_f32(200);
    check("tiny-tales", &model, &[1, 300, 4], &greedy, options, 40);
}

#[test]
fn greedy_tokens_of_mixtures_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    for name in [
        "mixtral",
        "qwen3-moe",
        "olmoe",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
    ] {
        let model = load(
            &testdata().join("reference-mixtures/hf").join(name),
            gpu.clone(),
        );
        let greedy = SamplerConfig::default();
        check(name, &model, &[1, 5, 3, 7, 2], &greedy, in_f32(64), 20);
    }
}

#[test]
fn penalties_and_biases_choose_the_same() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let mut prompt = vec![1, 403, 407, 261, 378, 403];
    let options = in_f32(400);
    let greedy = SamplerConfig::default();
    let repeat = SamplerConfig {
        repeat_penalty: 1.3,
        ..greedy.clone()
    };
    let by_host_from = |prompt: &[u32], n| {
        let (mut session, mut sampler) = start(&model, prompt, &greedy, options);
        by_host(&mut session, prompt[prompt.len() - 1], &mut sampler, n)
    };
    // Nearly as long as what is remembered, so that some of it is forgotten.
    let text = by_host_from(&prompt, 50);
    prompt.extend(text);
    assert!((greedy.repeat_last_n - 10..greedy.repeat_last_n).contains(&prompt.len()));
    let plain = by_host_from(&prompt, 40);
    for config in [
        repeat.clone(),
        SamplerConfig {
            repeat_penalty: 1.1,
            repeat_last_n: usize::MAX,
            ..greedy.clone()
        },
        SamplerConfig {
            repeat_last_n: 3,
            ..repeat.clone()
        },
        SamplerConfig {
            frequency_penalty: 0.7,
            presence_penalty: 0.2,
            ..greedy.clone()
        },
        SamplerConfig {
            logit_bias: vec![(plain[0], f32::NEG_INFINITY), (plain[5], -20.0), (9, 1.5)],
            ..greedy.clone()
        },
        SamplerConfig {
            logit_bias: vec![(plain[2], -3.0)],
            frequency_penalty: -0.1,
            ..repeat
        },
    ] {
        let chosen = check("stories260K", &model, &prompt, &config, options, 40);
        assert_ne!(chosen, plain);
    }
}

/// Settings that draw by chance, and whether the device always can.
fn chances() -> Vec<(SamplerConfig, bool)> {
    let warm = SamplerConfig {
        temperature: 0.8,
        seed: 7,
        ..SamplerConfig::default()
    };
    let with = |top_k, top_p, min_p| SamplerConfig {
        top_k,
        top_p,
        min_p,
        ..warm.clone()
    };
    vec![
        (with(40, 0.95, 0.05), true),
        (with(256, 1.0, 0.0), true),
        (with(0, 1.0, 0.0), true),
        (with(0, 0.9, 0.0), false),
        (with(0, 1.0, 0.02), true),
        (with(300, 1.0, 0.02), true),
        (
            SamplerConfig {
                repeat_penalty: 1.2,
                ..with(0, 0.9, 0.01)
            },
            false,
        ),
    ]
}

#[test]
fn seeds_repeat() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let options = in_f32(200);
    let prompt = [1, 403];
    for (config, always) in chances() {
        let draw = |seed, parts: &[usize]| {
            let config = SamplerConfig {
                seed,
                ..config.clone()
            };
            let (mut session, mut sampler) = start(&model, &prompt, &config, options);
            let (mut ids, mut n_all) = (vec![403], 0);
            for &n in parts {
                let last = ids[ids.len() - 1];
                let (more, n_drawn) = by_device(&mut session, last, &mut sampler, n);
                ids.extend(more);
                n_all += n_drawn;
            }
            assert!(n_all == 24 || !always && n_all > 12, "{config:?}: {n_all}");
            ids
        };
        let first = draw(3, &[24]);
        assert_eq!(draw(3, &[24]), first);
        // However far the device goes in one go.
        assert_eq!(draw(3, &[1, 2, 13, 8]), first);
        assert_ne!(draw(4, &[24]), first);
    }
}

/// Over many first tokens, shares of what is drawn are those of the host's sampler.
#[test]
fn chances_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let n_vocab = model.config().n_vocab;
    let n = 200;
    for (config, _) in chances() {
        let count = |on_device: bool| {
            let (mut session, mut sampler) = start(&model, &[1, 403, 407], &config, in_f32(64));
            let logits = session.forward(&[407], Logits::Last).unwrap();
            let mut counts = vec![0.0; n_vocab];
            for seed in 0..n {
                let id = if on_device {
                    let config = SamplerConfig {
                        seed,
                        ..config.clone()
                    };
                    let mut sampler = Sampler::new(config, n_vocab).unwrap();
                    [1, 403, 407].iter().for_each(|&id| sampler.accept(id));
                    session.truncate(2);
                    match session.decode(&[407], sampler.sampling(), 1).unwrap() {
                        Decoded::Token(chosen) => chosen.id,
                        Decoded::Logits(logits) => sampler.sample(&logits),
                    }
                } else {
                    sampler.sample(&logits)
                };
                counts[id as usize] += 1.0 / n as f64;
            }
            counts
        };
        let (device, host) = (count(true), count(false));
        for (id, (device, host)) in device.iter().zip(&host).enumerate() {
            // Four standard deviations of the difference of two shares.
            let p: f64 = (device + host) / 2.0;
            let most = 4.0 * (2.0 * p * (1.0 - p) / n as f64).sqrt();
            assert!(
                (device - host).abs() <= most.max(0.01),
                "{config:?}, {id}: {device} {host}"
            );
        }
    }
}

#[test]
fn the_host_chooses_what_the_device_cannot() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let n_vocab = model.config().n_vocab;
    let hot = SamplerConfig {
        temperature: 50.0,
        ..SamplerConfig::default()
    };
    let all: Vec<(u32, f32)> = (0..n_vocab as u32)
        .map(|id| (id, f32::NEG_INFINITY))
        .collect();
    for config in [
        SamplerConfig {
            top_k: 300,
            ..hot.clone()
        },
        // More than 256 tokens are nearly as likely as the best.
        SamplerConfig {
            min_p: 0.05,
            ..hot.clone()
        },
        SamplerConfig {
            top_p: 0.99,
            ..hot.clone()
        },
        // None is left.
        SamplerConfig {
            logit_bias: all,
            ..SamplerConfig::default()
        },
        SamplerConfig {
            logit_bias: vec![(3, 1.0), (3, 1.0)],
            ..SamplerConfig::default()
        },
    ] {
        let (mut session, mut sampler) = start(&model, &[1, 403], &config, in_f32(64));
        let (got, n_drawn) = by_device(&mut session, 403, &mut sampler, 30);
        assert_eq!(n_drawn, 0, "{config:?}");
        let (mut session, mut sampler) = start(&model, &[1, 403], &config, in_f32(64));
        assert_eq!(by_host(&mut session, 403, &mut sampler, 30), got);
        // Behind a prompt, too, where others are.
        let mut sessions: Vec<_> = (0..3)
            .map(|_| Session::new(Arc::clone(&model), in_f32(64)).unwrap())
            .collect();
        let greedy = Sampler::new(SamplerConfig::default(), n_vocab).unwrap();
        let mut sampler = Sampler::new(config.clone(), n_vocab).unwrap();
        [1, 403].iter().for_each(|&id| sampler.accept(id));
        let samplings = [&greedy, &sampler, &greedy].map(|of| Some(of.sampling()));
        let mut steps: Vec<_> = (sessions.iter_mut())
            .map(|session| Step {
                session,
                ids: &[1, 403],
                logits: Logits::Last,
            })
            .collect();
        let decoded = Session::decode_together(&mut steps, &samplings, 1).unwrap();
        let [
            Decoded::Token(a),
            Decoded::Logits(logits),
            Decoded::Token(b),
        ] = &decoded[..]
        else {
            panic!("{config:?}: {decoded:?}");
        };
        assert_eq!((a, sampler.sample(logits)), (b, got[0]));
    }
}

#[test]
fn the_cpu_leaves_it_to_the_host() {
    let model = load(&stories(), cpu());
    let config = SamplerConfig::default();
    let options = in_f32(64);
    let (mut session, mut sampler) = start(&model, &[1, 403], &config, options);
    let (got, n_drawn) = by_device(&mut session, 403, &mut sampler, 20);
    let (mut session, mut sampler) = start(&model, &[1, 403], &config, options);
    assert_eq!(by_host(&mut session, 403, &mut sampler, 20), got);
    assert_eq!(n_drawn, 0);
}

/// Logits after `ids`, by a session that has computed nothing else.
fn fresh(model: &Arc<Model<Gpu>>, ids: &[u32]) -> Vec<f32> {
    let mut session = Session::new(Arc::clone(model), in_f32(600)).unwrap();
    session.forward(ids, Logits::Last).unwrap()
}

fn assert_near(got: &[f32], want: &[f32]) {
    let differences = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    let largest = differences.fold(0.0, f32::max);
    assert!(largest < 1e-3, "{largest}");
}

#[test]
fn what_was_computed_in_advance_is_taken_back() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let config = SamplerConfig::default();
    let prompt: Vec<u32> = (0..120).map(|i| 1 + i * 37 % 500).collect();
    let last = prompt[prompt.len() - 1];
    let options = in_f32(600);
    let (mut session, mut sampler) = start(&model, &prompt, &config, options);
    let decode = |session: &mut Session<Gpu>, last, sampler: &mut Sampler, n| {
        let mut last = last;
        let mut ids = Vec::new();
        for _ in 0..n {
            let decoded = session.decode(&[last], sampler.sampling(), 100).unwrap();
            last = token(decoded);
            sampler.accept(last);
            ids.push(last);
        }
        ids
    };
    // Of the last token drawn nothing is computed yet, as far as shows.
    let ids = decode(&mut session, last, &mut sampler, 20);
    assert_eq!(session.len(), prompt.len() + 19);
    let so_far = [&prompt, &ids[..19]].concat();
    let mut fork = session.fork(session.len());
    let after = |more: &[u32]| fresh(&model, &[&so_far, more].concat());

    // Another token than was drawn, and others after it.
    let other = ids[19] ^ 1;
    assert_near(
        &session.forward(&[other], Logits::Last).unwrap(),
        &after(&[other]),
    );
    let more = decode(&mut session, 7, &mut sampler, 5);
    let text = [&[other, 7], &more[..5]].concat();
    assert_near(
        &session.forward(&more[4..], Logits::Last).unwrap(),
        &after(&text),
    );

    // A fork goes its own way.
    let (mut own, mut fork_sampler) = (Vec::new(), sampler.clone());
    own.extend(decode(&mut fork, ids[19], &mut fork_sampler, 9));
    assert_near(
        &fork.forward(&own[8..], Logits::Last).unwrap(),
        &after(&[&ids[19..], &own[..]].concat()),
    );

    // Back to the beginning, and on from there.
    decode(&mut session, 9, &mut sampler, 6);
    session.truncate(prompt.len() - 1);
    let again = decode(&mut session, last, &mut sampler, 20);
    assert_eq!(again, ids);

    // Another way to choose, from one token to the next.
    let warm = SamplerConfig {
        temperature: 1.0,
        ..config
    };
    let other_sampler = Sampler::new(warm, model.config().n_vocab).unwrap();
    let first = session
        .decode(&[ids[19]], other_sampler.sampling(), 50)
        .unwrap();
    let first = token(first);
    decode(&mut session, first, &mut sampler, 1);
    assert_near(
        &session.forward(&[3], Logits::Last).unwrap(),
        &after(&[ids[19], first, 3]),
    );
}

/// In one batch with others, with a part of a prompt, and with logits that the host samples from.
#[test]
fn sequences_choose_together_what_each_would_alone() {
    let Some(gpu) = gpu() else { return };
    let states = testdata().join("reference-states/hf/qwen3.5");
    for model in [load(&stories(), gpu.clone()), load(&states, gpu)] {
        let n_vocab = model.config().n_vocab;
        let greedy = SamplerConfig::default();
        let configs = [
            greedy.clone(),
            SamplerConfig {
                repeat_penalty: 1.2,
                frequency_penalty: 0.1,
                repeat_last_n: 16,
                logit_bias: vec![(7, 2.0)],
                ..greedy.clone()
            },
            SamplerConfig {
                temperature: 0.9,
                top_k: 40,
                top_p: 0.9,
                seed: 5,
                ..greedy.clone()
            },
            SamplerConfig {
                temperature: 1.0,
                seed: 6,
                ..greedy.clone()
            },
        ];
        let options = in_f32(96);
        let prompts: Vec<Vec<u32>> = (0..configs.len() as u32)
            .map(|i| {
                (0..3 + 7 * i)
                    .map(|j| 1 + (i * 31 + j * 17) % 250)
                    .collect()
            })
            .collect();
        const N: usize = 24;
        let alone: Vec<Vec<u32>> = (prompts.iter().zip(&configs))
            .map(|(prompt, config)| {
                let (mut session, mut sampler) = start(&model, prompt, config, options);
                by_device(&mut session, *prompt.last().unwrap(), &mut sampler, N).0
            })
            .collect();

        let mut started: Vec<_> = (prompts.iter().zip(&configs))
            .map(|(prompt, config)| start(&model, prompt, config, options))
            .collect();
        let mut last: Vec<u32> = prompts.iter().map(|ids| *ids.last().unwrap()).collect();
        let mut together = vec![Vec::new(); configs.len()];
        let mut long = Session::new(Arc::clone(&model), options).unwrap();
        let mut by_host = Session::new(Arc::clone(&model), options).unwrap();
        for i in 0..N as u32 {
            let (mut steps, mut samplers) = (Vec::new(), Vec::new());
            let piece = [1 + i, 2 + i];
            steps.push(Step {
                session: &mut long,
                ids: &piece,
                logits: Logits::None,
            });
            samplers.push(None);
            for ((session, sampler), id) in started.iter_mut().zip(&last) {
                steps.push(Step {
                    session,
                    ids: std::slice::from_ref(id),
                    logits: Logits::Last,
                });
                samplers.push(Some(sampler.sampling()));
            }
            steps.push(Step {
                session: &mut by_host,
                ids: &piece[..1],
                logits: Logits::Last,
            });
            samplers.push(None);
            let decoded = Session::decode_together(&mut steps, &samplers, usize::MAX).unwrap();
            assert_eq!(decoded[0], Decoded::Logits(Vec::new()));
            assert!(matches!(&decoded[5], Decoded::Logits(logits) if logits.len() == n_vocab));
            for (j, (_, sampler)) in started.iter_mut().enumerate() {
                let id = match &decoded[1 + j] {
                    Decoded::Token(chosen) => chosen.id,
                    Decoded::Logits(logits) => sampler.sample(logits),
                };
                sampler.accept(id);
                together[j].push(id);
                last[j] = id;
            }
        }
        assert_eq!(together, alone);
        assert_eq!((long.len(), by_host.len()), (2 * N, N));
        for (prompt, (session, _)) in prompts.iter().zip(&started) {
            assert_eq!(session.len(), prompt.len() - 1 + N);
        }
    }
}

/// What follows a prompt is chosen in the step that ends it, as it would be after its last token alone: of one prompt, of
/// several, and where some of a prompt was there before.
#[test]
fn what_follows_a_prompt_is_chosen_with_it() {
    let Some(gpu) = gpu() else { return };
    let states = testdata().join("reference-states/hf/qwen3.5");
    for model in [load(&stories(), gpu.clone()), load(&states, gpu)] {
        let greedy = SamplerConfig::default();
        let configs = [
            greedy.clone(),
            SamplerConfig {
                repeat_penalty: 1.3,
                repeat_last_n: 6,
                logit_bias: vec![(7, 2.0)],
                ..greedy.clone()
            },
            SamplerConfig {
                temperature: 0.9,
                top_k: 40,
                seed: 5,
                ..greedy.clone()
            },
            SamplerConfig {
                temperature: 1.0,
                seed: 6,
                ..greedy.clone()
            },
        ];
        let options = in_f32(64);
        let prompts: Vec<Vec<u32>> = (0..configs.len() as u32)
            .map(|i| {
                (0..3 + 7 * i)
                    .map(|j| 1 + (i * 31 + j * 17) % 250)
                    .collect()
            })
            .collect();
        let want: Vec<Vec<u32>> = (prompts.iter().zip(&configs))
            .map(|(prompt, config)| {
                let (mut session, mut sampler) = start(&model, prompt, config, options);
                let (ids, n_drawn) =
                    by_device(&mut session, *prompt.last().unwrap(), &mut sampler, 3);
                assert_eq!(n_drawn, 3);
                ids
            })
            .collect();
        for n_before in [0, 2] {
            for n_together in [1, 2, configs.len()] {
                let mut sequences: Vec<Together> = (prompts.iter().zip(&configs))
                    .map(|(prompt, config)| {
                        let mut of = Together::new(&model, prompt, config);
                        of.session.truncate(0);
                        if n_before > 0 {
                            of.session
                                .forward(&prompt[..n_before], Logits::None)
                                .unwrap();
                        }
                        of
                    })
                    .collect();
                for (members, prompts) in
                    (sequences.chunks_mut(n_together)).zip(prompts.chunks(n_together))
                {
                    let (mut steps, mut samplings) = (Vec::new(), Vec::new());
                    for (
                        Together {
                            session, sampler, ..
                        },
                        prompt,
                    ) in members.iter_mut().zip(prompts)
                    {
                        steps.push(Step {
                            session,
                            ids: &prompt[n_before..],
                            logits: Logits::Last,
                        });
                        samplings.push(Some(sampler.sampling()));
                    }
                    let decoded = Session::decode_together(&mut steps, &samplings, 1).unwrap();
                    for (of, decoded) in members.iter_mut().zip(decoded) {
                        of.last = token(decoded);
                        of.sampler.accept(of.last);
                        of.ids = vec![of.last];
                    }
                }
                for of in &mut sequences {
                    let (more, _) = by_device(&mut of.session, of.last, &mut of.sampler, 2);
                    of.ids.extend(more);
                }
                let got: Vec<Vec<u32>> = sequences.into_iter().map(|of| of.ids).collect();
                assert_eq!(got, want, "{n_before} before, {n_together} together");
            }
        }
    }
}

/// Where the device can't decide what follows a prompt, the logits that it had come back, whatever penalties made of them:
/// the step isn't computed again, for which states would be those behind it.
#[test]
fn what_cannot_be_decided_behind_a_prompt_is_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let states = testdata().join("reference-states/hf/qwen3.5");
    let model = load(&states, gpu);
    let n_vocab = model.config().n_vocab;
    // More tokens are nearly as likely as the best than a device looks at, one of which is biased.
    let config = SamplerConfig {
        temperature: 50.0,
        top_p: 0.99,
        logit_bias: vec![(7, 2.0)],
        ..SamplerConfig::default()
    };
    let options = in_f32(64);
    let ids: Vec<u32> = (0..20).map(|i| 1 + i * 17 % 250).collect();
    for (n_before, n_after) in [(0, 8), (3, 4), (5, 8), (4, 3)] {
        let (before, after) = ids[..n_before + n_after].split_at(n_before);
        let mut want = Session::new(Arc::clone(&model), options).unwrap();
        let mut got = Session::new(Arc::clone(&model), options).unwrap();
        for session in [&mut want, &mut got] {
            if n_before > 0 {
                session.forward(before, Logits::None).unwrap();
            }
        }
        let logits = want.forward(after, Logits::Last).unwrap();
        let mut sampler = Sampler::new(config.clone(), n_vocab).unwrap();
        ids[..n_before + n_after]
            .iter()
            .for_each(|&id| sampler.accept(id));
        let Decoded::Logits(found) = got.decode(after, sampler.sampling(), 9).unwrap() else {
            panic!("decided");
        };
        assert_near(&found, &logits);
        assert_eq!(got.len(), want.len());
        let [got, want] = [got, want].map(|mut of| of.forward(&[9], Logits::Last).unwrap());
        assert_near(&got, &want);
    }
}

/// What was computed ahead of a token isn't what follows it behind others, also if it is a chunk of its own.
#[test]
fn nothing_ahead_is_taken_behind_more_tokens() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let greedy = SamplerConfig::default();
    let options = SessionOptions {
        chunk: 4,
        ..in_f32(64)
    };
    let (mut session, sampler) = start(&model, &[1, 403], &greedy, options);
    let first = token(session.decode(&[403], sampler.sampling(), 20).unwrap());
    let more = [261, 378, 407, 403, first];
    let got = token(session.decode(&more, sampler.sampling(), 20).unwrap());
    let (mut session, mut sampler) =
        start(&model, &[&[1, 403], &more[..]].concat(), &greedy, options);
    let want = by_host(&mut session, first, &mut sampler, 1);
    assert_eq!(got, want[0]);
}

/// A prompt whose future is dropped while it is sampled for leaves its sequence as it was, states included.
#[test]
fn a_dropped_prompt_leaves_no_states() {
    let Some(gpu) = gpu() else { return };
    let states = testdata().join("reference-states/hf/qwen3.5");
    let model = load(&states, gpu);
    let n_vocab = model.config().n_vocab;
    let sampler = Sampler::new(SamplerConfig::default(), n_vocab).unwrap();
    let (before, after, next) = (&[5, 6, 7, 8, 9][..], &[10, 11, 12, 13][..], &[20, 21][..]);
    let mut session = Session::new(Arc::clone(&model), in_f32(64)).unwrap();
    session.forward(before, Logits::None).unwrap();
    {
        let decoding = session.decode_async(after, sampler.sampling(), 9);
        let mut decoding = std::pin::pin!(decoding);
        let waker = std::task::Waker::noop();
        let mut cx = std::task::Context::from_waker(waker);
        assert!(decoding.as_mut().poll(&mut cx).is_pending());
    }
    // States may only be remembered farther back.
    let n_left = session.len();
    assert!(n_left <= before.len());
    let rest = [&before[n_left..], next].concat();
    let got = session.forward(&rest, Logits::Last).unwrap();
    assert_near(&got, &fresh(&model, &[before, next].concat()));
}

/// A sequence that is decoded together with others.
struct Together {
    session: Session<Gpu>,
    sampler: Sampler,
    last: u32,
    ids: Vec<u32>,
}

impl Together {
    fn new(model: &Arc<Model<Gpu>>, prompt: &[u32], config: &SamplerConfig) -> Together {
        let (session, sampler) = start(model, prompt, config, in_f32(300));
        Together {
            session,
            sampler,
            last: *prompt.last().unwrap(),
            ids: Vec::new(),
        }
    }

    /// The host goes back to `n` tokens after `prompt`; returns the others.
    fn take_back(&mut self, prompt: &[u32], n: usize) -> Vec<u32> {
        let others = self.ids.split_off(n);
        let (config, n_vocab) = (
            self.sampler.config().clone(),
            self.session.model().config().n_vocab,
        );
        self.sampler = Sampler::new(config, n_vocab).unwrap();
        let before = prompt.iter().chain(&self.ids);
        before.for_each(|&id| self.sampler.accept(id));
        self.last = self.ids[n - 1];
        others
    }

    fn decode_alone(&mut self) {
        let id = match self
            .session
            .decode(&[self.last], self.sampler.sampling(), 3)
            .unwrap()
        {
            Decoded::Token(chosen) => chosen.id,
            Decoded::Logits(logits) => self.sampler.sample(&logits),
        };
        self.choose(id);
    }

    /// The host goes on with `id`.
    fn choose(&mut self, id: u32) {
        self.sampler.accept(id);
        self.ids.push(id);
        self.last = id;
    }
}

/// A token more for each of `sequences`, chosen by the device.
fn decode_together<'a>(sequences: impl IntoIterator<Item = &'a mut Together>) {
    let mut sequences: Vec<_> = sequences.into_iter().collect();
    let (mut steps, mut samplers) = (Vec::new(), Vec::new());
    for of in &mut sequences {
        steps.push(Step {
            session: &mut of.session,
            ids: std::slice::from_ref(&of.last),
            logits: Logits::Last,
        });
        samplers.push(Some(of.sampler.sampling()));
    }
    let decoded = Session::decode_together(&mut steps, &samplers, usize::MAX).unwrap();
    for (of, decoded) in sequences.into_iter().zip(decoded) {
        of.choose(token(decoded));
    }
}

/// Sequences that come and go, are taken back, forked and told other tokens, have the tokens of each alone.
#[test]
fn several_sequences_are_decoded_ahead() {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplerConfig::default();
    let drawn = SamplerConfig {
        temperature: 0.9,
        top_k: 40,
        logit_bias: vec![(7, 2.0)],
        ..greedy.clone()
    };
    let of_all = SamplerConfig {
        temperature: 1.0,
        ..greedy.clone()
    };
    let penalized = SamplerConfig {
        repeat_penalty: 1.2,
        repeat_last_n: 16,
        ..greedy.clone()
    };
    let mixed = [&penalized, &of_all, &greedy, &drawn, &penalized];
    let model = load(&stories(), gpu.clone());
    for configs in [
        [&greedy; 5],
        [&drawn; 5],
        [&of_all; 5],
        [&greedy, &penalized, &drawn, &greedy, &drawn],
        mixed,
    ] {
        // Some cross from one page to the next, all of them contexts that commands are recorded for.
        check_decoded_ahead(&gpu, &model, 215, configs);
    }
    // Layers that remember states: delta nets, the first Mamba, short convolutions, time mixing.
    for (name, configs) in [
        ("qwen3.5", [&greedy; 5]),
        ("qwen3.5", mixed),
        ("jamba", [&greedy; 5]),
        ("lfm2", [&greedy; 5]),
        ("rwkv7", [&greedy; 5]),
    ] {
        let dir = testdata().join("reference-states/hf").join(name);
        check_decoded_ahead(&gpu, &load(&dir, gpu.clone()), 15, configs);
    }
}

/// What may follow `last`, as a bit for each token: two thirds of the vocabulary, which ends early for some.
fn allowed_after(last: u32, n_vocab: usize) -> Vec<u32> {
    let is_allowed = |id: u32| !(id * 7 + last).is_multiple_of(3);
    let word = |at: u32| (0..32).fold(0, |bits, i| bits | u32::from(is_allowed(at * 32 + i)) << i);
    let n_words = n_vocab.div_ceil(32) as u32;
    let is_short = !last.is_multiple_of(2);
    (0..if is_short { n_words * 2 / 3 } else { n_words })
        .map(word)
        .collect()
}

/// How a sequence is sampled for besides its settings: whether its tokens are restricted, and the log-probabilities.
type Asked = (bool, Option<usize>);

/// A sequence that a device samples for, and one that the host computes behind it.
struct Followed {
    session: Session<Gpu>,
    host: Session<Gpu>,
    sampler: Sampler,
    asked: Asked,
    last: u32,
    allowed: Option<Vec<u32>>,
    /// The device can't always decide.
    may_be_left: bool,
}

impl Followed {
    fn new(model: &Arc<Model<Gpu>>, prompt: &[u32], config: &SamplerConfig, asked: Asked) -> Self {
        let (session, sampler) = start(model, prompt, config, in_f32(300));
        let last = *prompt.last().unwrap();
        Followed {
            session,
            host: start(model, prompt, config, in_f32(300)).0,
            sampler,
            asked,
            last,
            may_be_left: config.temperature > 2.0,
            allowed: asked.0.then(|| allowed_after(last, model.config().n_vocab)),
        }
    }

    /// The device has chosen: among those that may come next, the best if there is no chance, and with the host's
    /// log-probabilities.
    fn follow(&mut self, decoded: Decoded) {
        let logits = self.host.forward(&[self.last], Logits::Last).unwrap();
        let chosen = match decoded {
            Decoded::Token(chosen) => chosen,
            Decoded::Logits(left) => {
                assert!(self.may_be_left, "left to the host");
                let allowed = self.allowed.as_deref().unwrap();
                self.sampler.sample_allowed(&left, allowed).unwrap().into()
            }
        };
        let id = chosen.id;
        let all = vec![u32::MAX; logits.len().div_ceil(32)];
        let allowed = self.allowed.as_deref().unwrap_or(&all);
        assert!(allowed[id as usize / 32] >> (id % 32) & 1 == 1, "{id}");
        if self.sampler.config().temperature == 0.0 {
            assert_eq!(self.sampler.sample_allowed(&logits, allowed), Some(id));
        }
        let want = self.asked.1.map(|n| Logprobs::new(&logits, id, n));
        match (chosen.logprobs, want) {
            (None, None) => {}
            (Some(got), Some(want)) => {
                let ids = |of: &Logprobs| of.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
                assert_eq!(ids(&got), ids(&want));
                let pairs = got.top.iter().zip(&want.top).map(|(a, b)| (a.1, b.1));
                for (got, want) in pairs.chain([(got.chosen, want.chosen)]) {
                    assert!((got - want).abs() < 1e-3, "{got} {want}");
                }
            }
            (got, want) => panic!("{got:?} {want:?}"),
        }
        self.sampler.accept(id);
        self.last = id;
        self.allowed = (self.asked.0).then(|| allowed_after(id, logits.len()));
    }
}

/// A token more for each of `sequences`.
fn follow_together<'a>(sequences: impl IntoIterator<Item = &'a mut Followed>) {
    let mut sequences: Vec<_> = sequences.into_iter().collect();
    let (mut steps, samplings) = together(&mut sequences);
    let decoded = Session::decode_together(&mut steps, &samplings, usize::MAX).unwrap();
    for (of, decoded) in sequences.into_iter().zip(decoded) {
        of.follow(decoded);
    }
}

/// Their steps in one batch, and how to sample after each.
fn together<'a>(
    sequences: &'a mut [&mut Followed],
) -> (Vec<Step<'a, Gpu>>, Vec<Option<Sampling<'a>>>) {
    let (mut steps, mut samplings) = (Vec::new(), Vec::new());
    for of in sequences {
        let Followed {
            session,
            sampler,
            asked,
            last,
            allowed,
            ..
        } = &mut **of;
        samplings.push(Some(Sampling {
            logprobs: asked.1,
            allowed: allowed.as_deref(),
            ..sampler.sampling()
        }));
        steps.push(Step {
            session,
            ids: std::slice::from_ref(last),
            logits: Logits::Last,
        });
    }
    (steps, samplings)
}

/// Tokens that something else restricts, and that are told about, are chosen on the device, of one sequence and of several.
#[test]
fn restricted_tokens_and_log_probabilities_are_the_hosts() {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplerConfig::default();
    let of_all = SamplerConfig {
        temperature: 1.0,
        seed: 3,
        ..greedy.clone()
    };
    let best = SamplerConfig {
        top_k: 20,
        top_p: 0.9,
        ..of_all.clone()
    };
    let share = SamplerConfig {
        top_p: 0.5,
        temperature: 0.4,
        ..of_all.clone()
    };
    let penalized = SamplerConfig {
        repeat_penalty: 1.3,
        logit_bias: vec![(9, 3.0)],
        ..greedy.clone()
    };
    let qwen = testdata().join("reference-states/hf/qwen3.5");
    let all = [&greedy, &of_all, &best, &share, &penalized];
    for (dir, asked, configs) in [
        (stories(), [(true, None), (false, Some(5))], &all[..]),
        (stories(), [(true, Some(0)), (true, Some(3))], &all[..]),
        (qwen, [(true, None), (true, Some(20))], &all[..2]),
    ] {
        let model = load(&dir, gpu.clone());
        let prompt: Vec<u32> = (0..40).map(|i| 1 + i * 37 % 250).collect();
        for (config, asked) in configs.iter().flat_map(|of| asked.map(|asked| (of, asked))) {
            let mut of = Followed::new(&model, &prompt, config, asked);
            for n in (1..=12).rev() {
                let last = of.last;
                let before = gpu.work();
                let sampling = Sampling {
                    logprobs: of.asked.1,
                    allowed: of.allowed.as_deref(),
                    ..of.sampler.sampling()
                };
                let decoded = of.session.decode(&[last], sampling, n).unwrap();
                // The next step is computed before it is known what may follow.
                let n_submits = gpu.work().n_submits - before.n_submits;
                let expected = if n == 1 { 1 } else { 2 };
                assert!(
                    !asked.0 || n == 12 || n_submits == expected,
                    "{n} {n_submits}"
                );
                of.follow(decoded);
            }
        }
        let mut several: Vec<Followed> = (0..6usize)
            .map(|i| {
                let asked = if i == 4 { (false, None) } else { asked[i % 2] };
                let config = SamplerConfig {
                    seed: i as u64,
                    ..configs[i % configs.len()].clone()
                };
                Followed::new(&model, &prompt[..30 + i], &config, asked)
            })
            .collect();
        let mut late = several.pop().unwrap();
        follow_together(&mut several);
        let before = gpu.work();
        (0..5).for_each(|_| follow_together(&mut several));
        // Only steps that the host is to choose after are recorded: the device repeats its own.
        assert_eq!(gpu.work().n_recorded - before.n_recorded, 5 * 5);
        // One comes, two leave: what the others have in flight isn't computed again.
        follow_together(several.iter_mut().chain([&mut late]));
        (0..3).for_each(|_| follow_together(several.iter_mut().chain([&mut late])));
        several.drain(1..3);
        (0..3).for_each(|_| follow_together(&mut several));
        // One that was restricted isn't for a while.
        several[0].asked.0 = false;
        several[0].allowed = None;
        (0..3).for_each(|_| follow_together(&mut several));
        several[0].asked.0 = true;
        several[0].allowed = Some(allowed_after(several[0].last, model.config().n_vocab));
        (0..3).for_each(|_| follow_together(&mut several));
    }
}

/// The first of several takes steps on its own while the others' next is computed: that it can't be decided what follows it,
/// or nobody waits for it any more.
#[test]
fn what_is_computed_ahead_isnt_sampled_from_once_it_is_overwritten() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let greedy = SamplerConfig::default();
    let undecided = SamplerConfig {
        temperature: 50.0,
        top_p: 0.999,
        ..greedy.clone()
    };
    let prompt: Vec<u32> = (0..200).map(|i| 1 + i * 37 % 450).collect();
    for first in [&undecided, &greedy] {
        let mut all: Vec<Followed> = [first, &undecided, &greedy, &greedy]
            .into_iter()
            .enumerate()
            .map(|(i, config)| Followed::new(&model, &prompt[..140 + 13 * i], config, (true, None)))
            .collect();
        (0..24).for_each(|_| follow_together(&mut all));
        // Two of them, of which one is dropped while its token is on its way.
        let mut pair: Vec<Followed> = (0..2)
            .map(|i| Followed::new(&model, &prompt[..140 + 13 * i], &greedy, (true, Some(2))))
            .collect();
        (0..3).for_each(|_| follow_together(&mut pair));
        let polled = {
            let mut both: Vec<&mut Followed> = pair.iter_mut().collect();
            let (mut steps, samplings) = together(&mut both);
            let decoding = Session::decode_together_async(&mut steps, &samplings, usize::MAX);
            std::pin::pin!(decoding).poll(&mut Context::from_waker(Waker::noop()))
        };
        // A quick device has it already.
        if let Poll::Ready(decoded) = polled {
            let decoded = decoded.unwrap().into_iter();
            pair.iter_mut()
                .zip(decoded)
                .for_each(|(of, decoded)| of.follow(decoded));
        }
        let len = pair[0].session.len();
        pair[0]
            .session
            .forward(&prompt[..20], Logits::Last)
            .unwrap();
        pair[0].session.truncate(len);
        (0..2).for_each(|_| follow_together(&mut pair[1..]));
        (0..3).for_each(|_| follow_together(&mut pair));
    }
}

/// With prompts of `len` tokens and a few more.
fn check_decoded_ahead(gpu: &Gpu, model: &Arc<Model<Gpu>>, len: u32, configs: [&SamplerConfig; 5]) {
    let is_greedy = configs.iter().all(|config| config.temperature == 0.0);
    let config = |i: usize| SamplerConfig {
        seed: i as u64,
        ..configs[i].clone()
    };
    let prompts: Vec<Vec<u32>> = (0..5u32)
        .map(|i| {
            (0..len + 7 * i)
                .map(|j| 1 + (i * 31 + j * 17) % 250)
                .collect()
        })
        .collect();
    let alone = |i: usize, more: &[u32], n| {
        let prompt = [&prompts[i], more].concat();
        let (mut session, mut sampler) = start(model, &prompt, &config(i), in_f32(300));
        by_device(&mut session, *prompt.last().unwrap(), &mut sampler, n).0
    };
    let mut all: Vec<Together> = (0..5)
        .map(|i| Together::new(model, &prompts[i], &config(i)))
        .collect();
    let mut late = all.pop().unwrap();
    decode_together(&mut all);
    let before = gpu.work();
    for _ in 0..10 {
        decode_together(&mut all);
    }
    // Steps are in flight that nobody has asked for yet, and each repeats the first.
    let after = gpu.work();
    assert!(after.n_submits > before.n_submits + 10);
    assert_eq!(after.n_recorded, before.n_recorded);

    // One leaves: the others get what is in flight with it.
    let left = all.pop().unwrap();
    decode_together(&mut all);
    assert_eq!(gpu.work().n_submits, after.n_submits);
    for _ in 0..4 {
        decode_together(&mut all);
    }
    // Another comes, and one isn't there for a step.
    decode_together(all.iter_mut().chain([&mut late]));
    decode_together(all[1..].iter_mut().chain([&mut late]));
    decode_together(&mut all);
    let mut fork = Together {
        session: all[2].session.fork(all[2].session.len()),
        sampler: all[2].sampler.clone(),
        last: all[2].last,
        ids: all[2].ids.clone(),
    };
    for _ in 0..3 {
        decode_together(all.iter_mut().chain([&mut late]));
        decode_together([&mut fork]);
    }
    // The host chooses otherwise, and takes another back, to compute the same once more.
    let n = all[0].ids.len();
    let other = all[0].ids[n - 1] ^ 1;
    all[0].take_back(&prompts[0], n - 1);
    all[0].choose(other);
    let taken_back = all[1].take_back(&prompts[1], 20);
    let end = prompts[1].len() - 1 + 20;
    all[1].session.truncate(end);
    // Where there are states, a sequence may have to go back further.
    let kept = all[1].session.len();
    if kept < end {
        let known = [&prompts[1][..], &all[1].ids].concat();
        let again = &known[kept..end];
        all[1].session.forward(again, Logits::None).unwrap();
    }
    for _ in 0..12 {
        decode_together(all.iter_mut().chain([&mut late]));
        decode_together([&mut fork]);
    }
    // From here on each in a thread of its own, of which one gets what is in flight. The host may have to choose, as it
    // does alike where there is no chance.
    if is_greedy {
        std::thread::scope(|scope| {
            for of in &mut all[1..3] {
                scope.spawn(|| (0..6).for_each(|_| of.decode_alone()));
            }
        });
    }
    let found = &all[0].ids;
    assert_eq!(found[..n - 1], alone(0, &[], n)[..n - 1]);
    assert_eq!(found[n..], alone(0, &found[..n], 12));
    for (i, of) in [
        (1, &all[1]),
        (2, &all[2]),
        (3, &left),
        (4, &late),
        (2, &fork),
    ] {
        assert_eq!(of.ids, alone(i, &[], of.ids.len()), "{i}");
        assert_eq!(of.session.len(), prompts[i].len() - 1 + of.ids.len());
    }
    assert!(all[1].ids[20..].starts_with(&taken_back));
}

/// How many dispatches, and commands submitted, a step of this many sequences takes.
fn work_of_a_shared_step(gpu: &Gpu, model: &Arc<Model<Gpu>>, n_sequences: u32) -> (u64, u64) {
    let config = SamplerConfig::default();
    let mut started: Vec<_> = (0..n_sequences)
        .map(|i| {
            let prompt: Vec<u32> = (0..5 + i).map(|j| 1 + (i * 31 + j * 17) % 250).collect();
            start(model, &prompt, &config, in_f32(64))
        })
        .collect();
    let mut step = |id: u32| {
        let (mut steps, mut samplers) = (Vec::new(), Vec::new());
        for (session, sampler) in &mut started {
            steps.push(Step {
                session,
                ids: std::slice::from_ref(&id),
                logits: Logits::Last,
            });
            samplers.push(Some(sampler.sampling()));
        }
        let decoded = Session::decode_together(&mut steps, &samplers, usize::MAX).unwrap();
        assert!(decoded.iter().all(|of| matches!(of, Decoded::Token(_))));
    };
    // Where buffers take turns, a step is the same as one of the three before.
    [1, 3, 4].into_iter().for_each(&mut step);
    let before = gpu.work();
    step(2);
    let after = gpu.work();
    assert_eq!(after.n_recorded, before.n_recorded);
    (
        after.n_dispatches - before.n_dispatches,
        after.n_submits - before.n_submits,
    )
}

#[test]
fn more_sequences_take_no_more_dispatches() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu.clone());
    // Of a layer four products, with its norms, and attention, whose contexts aren't split. The embedding, the head, the
    // best logits, and the choice. A product takes eight rows at a time.
    let n_layers = model.config().n_layers as u64;
    for n_sequences in [5, 8] {
        let work = work_of_a_shared_step(&gpu, &model, n_sequences);
        assert_eq!(work, (5 * n_layers + 4, 1), "{n_sequences}");
    }
    // Nor of layers with states.
    for name in ["lfm2", "mamba", "mamba2", "qwen3.5", "rwkv4", "rwkv7"] {
        let dir = testdata().join("reference-states/hf").join(name);
        let model = load(&dir, gpu.clone());
        let [five, eight] = [5, 8].map(|n| work_of_a_shared_step(&gpu, &model, n));
        assert!(eight.0 <= five.0, "{name}: {eight:?} {five:?}");
        assert_eq!((five.1, eight.1), (1, 1), "{name}");
    }
}

/// Steps under way write to memory that is copied in the meantime, and pages of others become a sequence's own.
#[test]
fn others_may_grow_while_a_sequence_decodes_ahead() {
    let Some(gpu) = gpu() else { return };
    let states = testdata().join("reference-states/hf/qwen3.5");
    for model in [load(&stories(), gpu.clone()), load(&states, gpu)] {
        let config = SamplerConfig::default();
        let options = in_f32(512);
        let prompts: [Vec<u32>; 2] =
            [1, 7].map(|i| (0..50).map(|j| 1 + (i * j * 31) % 250).collect());
        const N: usize = 100;
        let alone = prompts.each_ref().map(|prompt| {
            let (mut session, mut sampler) = start(&model, prompt, &config, options);
            by_device(&mut session, prompt[49], &mut sampler, N).0
        });
        // The pool has just been made.
        let mut started = prompts
            .each_ref()
            .map(|prompt| start(&model, prompt, &config, options));
        let mut others = Vec::new();
        let mut found = [prompts[0][49..].to_vec(), prompts[1][49..].to_vec()];
        for i in 0..N {
            for ((session, sampler), found) in started.iter_mut().zip(&mut found) {
                let last = found[found.len() - 1];
                let id = match session.decode(&[last], sampler.sampling(), N - i).unwrap() {
                    Decoded::Token(chosen) => chosen.id,
                    Decoded::Logits(logits) => sampler.sample(&logits),
                };
                sampler.accept(id);
                found.push(id);
            }
            if i % 9 == 0 {
                let ids: Vec<u32> = (0..3 * i as u32 + 5).map(|j| 1 + j % 200).collect();
                let mut other = Session::new(Arc::clone(&model), options).unwrap();
                other.forward(&ids, Logits::None).unwrap();
                others.push(other);
            }
            if i % 20 == 0 {
                others.truncate(i / 20);
            }
        }
        for (found, alone) in found.iter().zip(&alone) {
            assert_eq!(found[1..], *alone);
        }
    }
}

#[test]
fn a_context_ends() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let config = SamplerConfig::default();
    let (mut session, mut sampler) = start(&model, &[1, 403], &config, in_f32(24));
    let (ids, n_drawn) = by_device(&mut session, 403, &mut sampler, 23);
    assert_eq!((n_drawn, session.len()), (23, 24));
    let full = session
        .decode(&[ids[22]], sampler.sampling(), 5)
        .unwrap_err();
    assert!(matches!(full, EngineError::ContextFull { .. }), "{full}");
    let unknown = session
        .decode(&[100_000], sampler.sampling(), 5)
        .unwrap_err();
    assert!(
        matches!(unknown, EngineError::UnknownToken { .. }),
        "{unknown}"
    );
    assert_eq!(session.len(), 24);
}

#[test]
fn adapters_apply() {
    let Some(gpu) = gpu() else { return };
    let model = load(&stories(), gpu);
    let c = model.config();
    let matrix = |rows: usize, columns: usize, seed: usize| LoraMatrix {
        name: "matrix".into(),
        shape: vec![rows, columns],
        dtype: DType::F32,
        bytes: (0..rows * columns)
            .flat_map(|i| (((i * 7919 + seed * 104_729) % 201) as f32 / 200.0 - 0.5).to_le_bytes())
            .collect::<Vec<u8>>()
            .into(),
    };
    let pair = |layer| LoraPair {
        layer,
        module: Module::Down,
        scaling: 0.5,
        a: matrix(4, c.ffn_dim, layer),
        b: matrix(c.model_dim, 4, layer + 1),
    };
    let source = AdapterSource {
        name: "synthetic".into(),
        orientation: Orientation::RankFirst,
        pairs: (0..c.n_layers).map(pair).collect(),
    };
    let adapter = model
        .load_adapter(source, AdapterOptions::default())
        .unwrap();
    let config = SamplerConfig::default();
    let decode = |scale: f32, on_device: bool| {
        let (mut session, mut sampler) = start(&model, &[1, 403], &config, in_f32(64));
        // What was computed in advance was computed without.
        by_device(&mut session, 403, &mut sampler, 4);
        session.decode(&[9], sampler.sampling(), 9).unwrap();
        let adapter = Arc::clone(&adapter);
        session
            .set_adapters(vec![ActiveAdapter { adapter, scale }])
            .unwrap();
        match on_device {
            true => by_device(&mut session, 7, &mut sampler, 30),
            false => (by_host(&mut session, 7, &mut sampler, 30), 30),
        }
    };
    assert_eq!(decode(1.0, true), decode(1.0, false));
    assert_ne!(decode(1.0, true), decode(0.0, true));
}

#[test]
fn what_is_timed_is_what_is_done_meanwhile() {
    let Some(gpu) = gpu() else { return };
    if !gpu.device().features().timestamps {
        return;
    }
    let model = load(&stories(), gpu.clone());
    let mut session = Session::new(Arc::clone(&model), in_f32(64)).unwrap();
    let n_done = || gpu.work().n_dispatches;
    let mut step = || -> Result<(), GpuError> {
        // Whose operations are handed over by what comes next.
        session.forward(&[403], Logits::None).unwrap();
        Ok(())
    };
    step().unwrap();
    step().unwrap();
    let before = n_done();
    let ((), times) = gpu.timed(|| Ok::<_, GpuError>(())).unwrap();
    assert!(n_done() > before, "what was done before is handed over");
    assert_eq!(times, [], "and not timed");
    let before = n_done();
    let (inner, times) = gpu
        .timed(|| {
            step()?;
            let ((), inner) = gpu.timed(&mut step)?;
            step()?;
            Ok::<_, GpuError>(inner)
        })
        .unwrap();
    assert_eq!(times.len() as u64, n_done() - before);
    assert_eq!(times.len(), 3 * inner.len());
    assert_eq!(times[inner.len()..2 * inner.len()], inner);
    // Whatever goes wrong within, what follows is as ever.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        gpu.timed(|| -> Result<(), GpuError> { panic!("on purpose") })
    }));
    assert!(panicked.is_err());
    step().unwrap();
    let ((), times) = gpu.timed(&mut step).unwrap();
    assert_eq!(times.len(), inner.len());
}

#[test]
fn one_submit_a_token_and_no_more_memory() {
    // Of its own, as its memory is counted.
    let Some(device) = sterna_testing::gpu::device() else {
        return;
    };
    let gpu = Gpu::new(device, 2, Isa::detect());
    let model = load(&testdata().join("bitllama-3M/hf-packed"), gpu.clone());
    let config = SamplerConfig {
        temperature: 0.9,
        top_k: 40,
        repeat_penalty: 1.1,
        seed: 5,
        ..SamplerConfig::default()
    };
    let options = in_f32(512);
    let prompt: Vec<u32> = (0..130).map(|i| 1 + i * 37 % 500).collect();
    let last = prompt[prompt.len() - 1];
    let (mut session, mut sampler) = start(&model, &prompt, &config, options);
    by_device(&mut session, last, &mut sampler, 2);
    session.truncate(prompt.len() - 1);
    let before = (gpu.work(), gpu.device().memory().used);
    let (_, n_drawn) = by_device(&mut session, last, &mut sampler, 20);
    let after = (gpu.work(), gpu.device().memory().used);
    assert_eq!(n_drawn, 20);
    assert_eq!(after.0.n_submits - before.0.n_submits, 20);
    assert_eq!(after.0.n_recorded, before.0.n_recorded);
    assert_eq!(after.1, before.1);
    // Queries, keys and values; two for attention, and what it comes to; gate and up; down. Then the
    // embedding, head, penalties, best logits, and the choice.
    let n_dispatches = after.0.n_dispatches - before.0.n_dispatches;
    let n_layers = model.config().n_layers as u64;
    assert_eq!(n_dispatches, 20 * (6 * n_layers + 5));

    // Answers of many lengths, some of them left in the middle.
    let mut used = Vec::new();
    for round in 0..12 {
        session.truncate(0);
        let n = 10 + round * 37 % 120;
        session.forward(&prompt[..n - 1], Logits::None).unwrap();
        let mut last = prompt[n - 1];
        for _ in 0..3 + round * 13 % 9 {
            last = match session.decode(&[last], sampler.sampling(), 100).unwrap() {
                Decoded::Token(chosen) => chosen.id,
                Decoded::Logits(logits) => sampler.sample(&logits),
            };
            sampler.accept(last);
        }
        used.push(gpu.device().memory().used);
    }
    assert!(used.iter().all(|used| *used <= after.1), "{used:?}");
}

#[test]
fn inputs_of_layers_are_read_where_they_are() {
    let Some(gpu) = gpu() else { return };
    let model = load(&testdata().join("reference-layers/hf/gemma4"), gpu.clone());
    let greedy = SamplerConfig::default();
    let (mut session, mut sampler) = start(&model, &[1, 5], &greedy, in_f32(64));
    by_device(&mut session, 5, &mut sampler, 2);
    let before = gpu.work().n_dispatches;
    by_device(&mut session, 7, &mut sampler, 20);
    let n_dispatches = gpu.work().n_dispatches - before;
    // Projections, norm of values; two for attention, and its output; norm and residual. Gate and up, down; norm and
    // residual. Gate, input, output; norm and residual; the factor. One more for wide heads, and two for the last gate,
    // whose memory the next step uses otherwise. Then the embedding, six for inputs, head, cap, best logits, and the
    // choice.
    let n_layers = model.config().n_layers as u64;
    assert_eq!(n_dispatches, 20 * (17 * n_layers + 3 + 11));
}
