//! Output heads with a screen: the tokens of the whole head, while little of it is read.

use std::path::Path;

use crate::common::{cpu, load, plan_gguf, plan_hf, testdata};
use bytes::Bytes;
use sterna_engine::plan::{HeadOptions, HeadScreen};
use sterna_engine::screening::HeadUse;
use sterna_engine::{
    Cpu, Logits, ModelPlan, Sampler, SamplerConfig, Session, SessionOptions, Step,
};
use sterna_format::DType;

type Planned = (ModelPlan, Vec<Bytes>);

fn session(model: Planned, screen: HeadScreen) -> Session<Cpu> {
    let (plan, files) = model;
    let options = HeadOptions {
        screen,
        ..HeadOptions::default()
    };
    let plan = plan.with_head(options).unwrap();
    let max_ctx = plan.config().max_ctx;
    let model = load(plan, &files, cpu()).unwrap();
    Session::new(model, SessionOptions::new(max_ctx.min(128))).unwrap()
}

fn tiny_tales() -> Planned {
    plan_hf(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales"))
}

fn bitllama() -> Planned {
    plan_gguf(&[testdata().join("bitllama-3M/bitllama-3M-f16.gguf")])
}

fn stories(file: &str) -> Planned {
    plan_gguf(&[testdata().join("stories260K").join(file)])
}

/// The tokens that `sampling` chooses after `prompt`. With `all`, from all logits, whatever it asks for.
fn generate(
    session: &mut Session<Cpu>,
    prompt: &[u32],
    sampling: &SamplerConfig,
    all: bool,
) -> Vec<u32> {
    let n_vocab = session.model().config().n_vocab;
    let mut sampler = Sampler::new(sampling.clone(), n_vocab).unwrap();
    let wanted = match sampler.top() {
        Some(top) if !all => Logits::Top(top),
        _ => Logits::Last,
    };
    session.truncate(0);
    let mut ids = Vec::new();
    let mut logits = session.forward(prompt, wanted).unwrap();
    while ids.len() < 50 {
        let id = sampler.sample(&logits);
        sampler.accept(id);
        ids.push(id);
        logits = session.forward(&[id], wanted).unwrap();
    }
    ids
}

fn sampled(top_k: usize, seed: u64) -> SamplerConfig {
    SamplerConfig {
        temperature: 0.9,
        top_k,
        top_p: 0.95,
        min_p: 0.02,
        seed,
        ..SamplerConfig::default()
    }
}

/// Generates with and without a screen after many prompts; how much of the head was read.
fn check(model: fn() -> Planned, screen: DType) -> HeadUse {
    let mut plain = session(model(), HeadScreen::Off);
    let mut screened = session(model(), HeadScreen::As(screen));
    assert_eq!(plain.head_use(), None);
    let n_vocab = plain.model().config().n_vocab as u32;
    let penalised = SamplerConfig {
        repeat_penalty: 1.2,
        ..sampled(40, 4)
    };
    let mut n_top = 0;
    for sampling in [
        SamplerConfig::default(),
        sampled(1, 1),
        sampled(5, 2),
        sampled(40, 3),
        penalised,
        sampled(0, 5),
    ] {
        for start in 0..4 {
            let prompt: Vec<u32> = (0..1 + start)
                .map(|i| (3 + start * 101 + i * 37) % n_vocab)
                .collect();
            let want = generate(&mut plain, &prompt, &sampling, true);
            let got = generate(&mut screened, &prompt, &sampling, false);
            assert_eq!(want, got, "{sampling:?} after {prompt:?}");
            let tops = Sampler::new(sampling.clone(), n_vocab as usize).unwrap();
            n_top += tops.top().map_or(0, |_| 1 + want.len() as u64);
        }
    }
    let used = screened.head_use().unwrap();
    assert_eq!(used.n_tokens, n_top);
    used
}

/// Rows computed for a token, as a share of all.
fn share(used: &HeadUse, n_vocab: u64) -> f64 {
    used.n_rows as f64 / (used.n_tokens * n_vocab) as f64
}

#[test]
fn a_trained_model_says_the_same_and_reads_little() {
    for (screen, most) in [
        (DType::Q8_0, 0.02),
        (DType::Q6_K, 0.02),
        (DType::Q5_K, 0.03),
        (DType::Q4_K, 0.06),
    ] {
        let used = check(tiny_tales, screen);
        let share = share(&used, 1728);
        assert!(share < most, "{screen}: {share}");
        assert!(used.n_bytes < used.n_bytes_unscreened * 3 / 5);
    }
}

#[test]
fn narrow_models_say_the_same() {
    // Narrow models with few tokens have bounds that are wide beside their logits; the screen is given up
    // where it doesn't pay.
    for (screen, most) in [(DType::Q8_0, 0.3), (DType::Q6_K, 0.3), (DType::Q4_K, 0.7)] {
        let used = check(bitllama, screen);
        let share = share(&used, 512);
        assert!(share < most, "{screen}: {share}");
    }
    check(|| stories("stories260K-f32.gguf"), DType::Q8_0);
    check(|| stories("stories260K-f16.gguf"), DType::Q4_0);
}

#[test]
fn the_largest_logits_are_those_of_the_whole_head() {
    let mut plain = session(tiny_tales(), HeadScreen::Off);
    let mut screened = session(tiny_tales(), HeadScreen::As(DType::Q5_K));
    assert!(screened.head_use().is_some());
    let ids: Vec<u32> = (0..40).map(|i| 100 + i * 29).collect();
    for top in [0, 1, 7, 40, 1000, 1728, usize::MAX] {
        for ids in ids.chunks(8) {
            let want = plain.forward(ids, Logits::Last).unwrap();
            // Without a screen, all are given.
            plain.truncate(plain.len() - ids.len());
            let unscreened = plain.forward(ids, Logits::Top(top)).unwrap();
            assert_eq!(want, unscreened);
            let got = screened.forward(ids, Logits::Top(top)).unwrap();
            expect_largest(&want, &got, top);
        }
        plain.truncate(0);
        screened.truncate(0);
    }
    // The other kinds have all logits.
    let want = plain.forward(&ids, Logits::All).unwrap();
    assert_eq!(screened.forward(&ids, Logits::All).unwrap(), want);
    let mut other = screened.fork(0);
    let before = screened.head_use();
    screened.truncate(0);
    let want_all = want.clone();
    let last = &want[want.len() - 1728..];
    // One of several sequences that needs all logits has the others get them.
    let wanted = [Logits::Top(1), Logits::Last];
    for found in together([&mut screened, &mut other], &ids, wanted) {
        assert_eq!(found, last);
    }
    assert_eq!(screened.head_use(), before);
    // Each of several has its largest.
    screened.truncate(0);
    other.truncate(0);
    let wanted = [Logits::Top(1), Logits::Top(40)];
    let found = together([&mut screened, &mut other], &ids, wanted);
    for (top, found) in [1, 40].into_iter().zip(found) {
        expect_largest(last, &found, top);
        assert!(found.contains(&f32::NEG_INFINITY));
    }
    let used = screened.head_use().unwrap().since(&before.unwrap());
    assert_eq!((used.n_tokens, used.n_screened), (2, 2));
    // Beside a part of a prompt, which wants none, and beside one that wants all of each token.
    for wanted in [
        [Logits::None, Logits::Top(7)],
        [Logits::Top(7), Logits::None],
        [Logits::All, Logits::Top(7)],
        [Logits::Top(7), Logits::All],
    ] {
        screened.truncate(0);
        other.truncate(0);
        let found = together([&mut screened, &mut other], &ids, wanted);
        for (wanted, found) in wanted.into_iter().zip(found) {
            match wanted {
                Logits::None => assert!(found.is_empty()),
                Logits::All => assert!(found == want_all),
                _ => expect_largest(last, &found, 7),
            }
        }
    }
}

/// `got` are the logits `all`, or −∞ where they aren't among the `top` largest.
fn expect_largest(all: &[f32], got: &[f32], top: usize) {
    let mut sorted = all.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let n = if top == 0 {
        all.len()
    } else {
        top.min(all.len())
    };
    for (all, got) in all.iter().zip(got) {
        assert!(all == got || *got == f32::NEG_INFINITY && *all < sorted[n - 1]);
    }
}

/// The logits of two sequences after `ids`, computed together.
fn together(sessions: [&mut Session<Cpu>; 2], ids: &[u32], wanted: [Logits; 2]) -> Vec<Vec<f32>> {
    let steps = sessions.into_iter().zip(wanted);
    let mut steps: Vec<Step<'_, Cpu>> = steps
        .map(|(session, logits)| Step {
            session,
            ids,
            logits,
        })
        .collect();
    Session::forward_together(&mut steps).unwrap()
}

#[test]
fn heads_that_can_have_no_screen_are_refused_or_left_alone() {
    let screened = |model: Planned, screen| {
        let options = HeadOptions {
            screen,
            ..HeadOptions::default()
        };
        let plan = model.0.with_head(options).map_err(|e| e.to_string())?;
        Ok(plan.made_bytes() > 0)
    };
    let variant = |name: &str| plan_hf(&testdata().join("reference-variants").join(name));
    let q8_0 = HeadScreen::As(DType::Q8_0);
    for (model, screen, message) in [
        (
            variant("llama-bitlinear-ternary-head"),
            q8_0,
            "screen of the output head: expected weights that are floats or blocks, found trits",
        ),
        (
            variant("gemma2-caps"),
            q8_0,
            "screen of the output head: expected logits that are the product with the head alone, found a \
             cap",
        ),
        (
            plan_hf(&testdata().join("reference-states/hf/granite-hybrid")),
            q8_0,
            "screen of the output head: expected logits that are the product with the head alone, found a \
             scale",
        ),
        (
            stories("stories260K-f16.gguf"),
            HeadScreen::As(DType::Q5_K),
            "screen of the output head, Q5_K: expected a width that is a multiple of 256, found 64",
        ),
        (
            stories("stories260K-q8_0.gguf"),
            q8_0,
            "screen of the output head as Q8_0: expected fewer bits a weight than 8.5, found 8.5",
        ),
    ] {
        assert_eq!(screened(model, screen), Err(message.to_owned()));
    }
    for model in [variant("gemma2-caps"), stories("stories260K-f16.gguf")] {
        assert_eq!(screened(model, HeadScreen::Auto), Ok(false));
    }
    // It wouldn't pay.
    assert_eq!(screened(bitllama(), HeadScreen::Auto), Ok(false));
}

#[test]
fn memory_counts_the_screen() {
    let with = |screen, dtype| {
        let options = HeadOptions { dtype, screen };
        let plan = bitllama().0.with_head(options).unwrap();
        (
            plan.memory_bytes(),
            plan.bytes_per_token(),
            plan.made_bytes(),
        )
    };
    let (n_vocab, k) = (512, 256);
    let (held, read, _) = with(HeadScreen::Off, None);
    let screen = HeadScreen::As(DType::Q5_K);
    let q5_k = n_vocab * (176 + 8);
    assert_eq!(
        with(screen, None),
        (held + q5_k, read - n_vocab * k * 2 + q5_k, q5_k)
    );
    let q6_k = n_vocab * 210;
    assert_eq!(
        with(screen, Some(DType::Q6_K)),
        (
            held + q5_k + q6_k,
            read - n_vocab * k * 2 + q5_k,
            q5_k + q6_k
        )
    );
    assert_eq!(with(HeadScreen::Auto, Some(DType::Q4_K)).2, n_vocab * 144);
}
