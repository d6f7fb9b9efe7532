//! That neither drafts, nor tokens computed in advance, nor lost devices change an answer.

use std::collections::HashSet;
use std::path::Path;

use clap::Parser;
use sterna_engine::SamplerConfig;
use sterna_text::Tokenizer;

use super::*;
use crate::args::ReportFlags;
use crate::model;

#[derive(Parser)]
struct TestFlags {
    #[command(flatten)]
    flags: ReportFlags,
}

/// Tokens of an answer at most.
const MAX_TOKENS: usize = 40;

/// Answers a series of prompts, one after the other, as a chat does.
struct Answering {
    runtime: Runtime,
    tokenizer: Tokenizer,
    speculate: Option<usize>,
}

/// All that a caller sees of an answer, but for its time.
#[derive(Debug, PartialEq)]
struct Told {
    pieces: Vec<String>,
    ids: Vec<u32>,
    stop: Option<StopReason>,
    stats: [usize; 5],
    cached: Vec<u32>,
}

impl Answering {
    /// In a context where the longest of `prompts` leaves room for `room` tokens.
    fn new(
        model: &str,
        sampling: SamplerConfig,
        prompts: &[String],
        room: usize,
        speculate: Option<usize>,
    ) -> Answering {
        Answering::on("cpu", model, sampling, prompts, (room, speculate))
    }

    fn on(
        backend: &str,
        model: &str,
        sampling: SamplerConfig,
        prompts: &[String],
        (room, speculate): (usize, Option<usize>),
    ) -> Answering {
        let flags = ["test", "--threads", "1", "--backend", backend];
        let TestFlags { flags } = TestFlags::parse_from(flags);
        let files = model::open(model).unwrap();
        let tokenizer = files.require_tokenizer().unwrap();
        let plan = model::plan(&files, &flags.files).unwrap();
        let sampler = Sampler::new(sampling, plan.config().n_vocab).unwrap();
        let lens = prompts.iter().map(|text| encode(&tokenizer, text).len());
        let ctx_len = lens.max().unwrap() + room;
        let session = model::session(&files, plan, &flags.engine, ctx_len).unwrap();
        Answering {
            runtime: Runtime::new(session, sampler),
            tokenizer,
            speculate,
        }
    }

    /// The answer to `prompt`, of which `n_pieces` are pulled at most.
    fn answer(&mut self, prompt: &str, stop: &str, n_pieces: usize) -> (Told, Stats) {
        let request = Request {
            prompt: encode(&self.tokenizer, prompt),
            max_tokens: MAX_TOKENS,
            stop_ids: self.tokenizer.end_ids(),
            speculate: self.speculate,
        };
        let answer = self.runtime.start(request).unwrap();
        let stop_strings = vec![stop.to_owned()];
        let mut answer = Generation::new(answer, &self.tokenizer, stop_strings);
        let pieces = answer.by_ref().take(n_pieces).map(Result::unwrap).collect();
        let (ids, stats) = (answer.ids().to_vec(), answer.stats());
        if stats.stop.is_some() {
            let n_computed = self.runtime.session.len();
            assert_eq!(n_computed, self.runtime.cached.len(), "{prompt}");
        }
        let answer = Told {
            pieces,
            ids,
            stop: stats.stop,
            stats: [
                stats.n_prompt,
                stats.n_reused,
                stats.n_prefilled,
                stats.n_generated,
                stats.n_decoded,
            ],
            cached: self.runtime.cached.clone(),
        };
        (answer, stats)
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let options = sterna_text::Encode {
        add_special: true,
        parse_special: true,
    };
    tokenizer.encode(text, options).unwrap()
}

/// 200 prompts: 25 times 8 forms, in which more or less is to be found of what the answer says.
fn prompts() -> Vec<String> {
    let heroes = ["Lily", "Max", "Ruby", "Theo", "Hazel"];
    let kinds = ["fox", "rabbit", "girl", "duck", "otter"];
    let mut prompts = Vec::new();
    for (i, hero) in heroes.into_iter().enumerate() {
        for (j, kind) in kinds.into_iter().enumerate() {
            let pal = heroes[(i + j + 1) % heroes.len()];
            let tale = format!(
                "Once upon a time, a shy {kind} named {hero} lived near the old barn. {hero} had a silver \
                 key. One day, the silver key was gone. {pal} came by and said, \"I will help you look.\" \
                 At last, they found the silver key under a bench."
            );
            let chat = |text: &str| format!("<|begin_of_text|>User: {text}<|eot_id|>Assistant:");
            prompts.extend([
                chat(&format!("Tell me a story about a {kind} named {hero}.")),
                chat(&format!("Summarize this text:\n{tale}")),
                chat(&format!("{tale}\n\nQuestion: What did {hero} lose?")),
                chat(&format!("What is {i} plus {j}?")),
                // What is said a second time may go on as it did the first time.
                format!("{tale} {}", &tale[..40 + 9 * i + j]),
                format!("The {kind} sat. ").repeat(i + 2) + "The",
                format!("{hero} said: {}", "no ".repeat(3 + i + j)),
                format!("One day, {hero} the {kind}"),
            ]);
        }
    }
    prompts
}

fn sampled(seed: u64) -> SamplerConfig {
    SamplerConfig {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        seed,
        ..SamplerConfig::default()
    }
}

/// On whatever GPU there is, a software one too: answers one after the other, whose tokens the GPU
/// chooses, and the same ones chosen here; with stop strings, contexts that fill up, and interruptions.
#[test]
fn tokens_computed_in_advance_change_no_answer() {
    if sterna_gpu::Device::adapters().is_empty() {
        eprintln!("SKIPPED: no GPU; see scripts/software-gpu.sh");
        return;
    }
    let stops = ["no such text", ".", "the silver", "\n"];
    let prompts: Vec<String> = prompts().into_iter().step_by(19).collect();
    let mut reasons = HashSet::new();
    for (repeat_penalty, room) in [(1.0, MAX_TOKENS), (1.3, 12)] {
        let ahead = SamplerConfig {
            repeat_penalty,
            ..SamplerConfig::default()
        };
        // A bias that is given twice is for the host, if it is none.
        let by_host = SamplerConfig {
            logit_bias: vec![(0, 0.0); 2],
            ..ahead.clone()
        };
        let [mut ahead, mut by_host] = [ahead, by_host]
            .map(|config| Answering::on("gpu", "builtin", config, &prompts, (room, None)));
        for (i, prompt) in prompts.iter().enumerate() {
            let stop = stops[i % stops.len()];
            let n_pieces = if i % 4 == 3 { 9 } else { usize::MAX };
            let (expected, _) = by_host.answer(prompt, stop, n_pieces);
            let (found, stats) = ahead.answer(prompt, stop, n_pieces);
            assert_eq!(found, expected, "{prompt}");
            reasons.insert(stats.stop.map(StopReason::describe));
        }
    }
    // Else this shows less than it says.
    assert!(reasons.len() >= 4, "{reasons:?}");
}

/// Every prompt with the built-in model and some with others, one after the other as in a chat: greedily and sampled, with penalties,
/// stop strings and contexts that fill up, and some of the answers interrupted.
#[test]
fn speculation_changes_no_answer() {
    let path = |name| {
        let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        testdata.join(name).to_str().unwrap().to_owned()
    };
    let greedy = SamplerConfig::default();
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..greedy.clone()
    };
    // How to sample, the room for the answer, and drafts at most.
    let settings = [
        (greedy.clone(), MAX_TOKENS, 8),
        (greedy, 20, 3),
        (sampled(1), MAX_TOKENS, 64),
        (penalised.clone(), 12, 8),
        (
            SamplerConfig {
                temperature: 1.5,
                min_p: 0.05,
                ..sampled(2)
            },
            MAX_TOKENS,
            1,
        ),
        (
            SamplerConfig {
                temperature: 0.4,
                ..penalised
            },
            MAX_TOKENS,
            16,
        ),
        (
            SamplerConfig {
                frequency_penalty: 0.2,
                presence_penalty: 0.4,
                repeat_last_n: 20,
                ..sampled(3)
            },
            15,
            5,
        ),
    ];
    let stops = ["no such text", ".", "the silver", "sat. The", "\n"];
    let prompts = prompts();
    assert_eq!(prompts.len(), 200);
    let (mut n_drafted, mut n_accepted) = (0, 0);
    let mut reasons = HashSet::new();
    for (model, every) in [
        ("builtin".to_owned(), 1),
        (path("stories260K/hf"), 2),
        (path("bitllama-3M/bitllama-3M-tq2_0.gguf"), 3),
    ] {
        for (i, (sampling, room, max)) in settings.iter().enumerate() {
            let mut plain = Answering::new(&model, sampling.clone(), &prompts, *room, None);
            let mut drafting =
                Answering::new(&model, sampling.clone(), &prompts, *room, Some(*max));
            // The number of settings has no factor in common with those of forms and stops: each meets all.
            for (j, prompt) in prompts
                .iter()
                .enumerate()
                .skip(i)
                .step_by(settings.len() * every)
            {
                let stop = stops[j % stops.len()];
                let n_pieces = if j % 11 == 3 { 17 } else { usize::MAX };
                let (expected, _) = plain.answer(prompt, stop, n_pieces);
                let (found, stats) = drafting.answer(prompt, stop, n_pieces);
                assert_eq!(found, expected, "{model}, {sampling:?}, {prompt}");
                n_drafted += stats.n_drafted;
                n_accepted += stats.n_accepted;
                reasons.insert(stats.stop.map(StopReason::describe));
            }
        }
    }
    // Else this shows nothing.
    assert!(
        n_accepted > 200 && n_drafted > n_accepted,
        "{n_accepted} of {n_drafted}"
    );
    assert_eq!(reasons.len(), 5, "{reasons:?}");
}

/// Answers on a GPU that is lost before, in the midst of, and behind the prompt, and between tokens, as
/// often as is made up for: all that a caller sees is the same.
#[test]
#[cfg(feature = "gpu")]
fn an_answer_goes_on_when_its_device_is_lost() {
    let TestFlags { flags } = TestFlags::parse_from(["test", "--backend", "gpu", "--threads", "1"]);
    let files = model::open("builtin").unwrap();
    let tokenizer = files.require_tokenizer().unwrap();
    let plan = model::plan(&files, &flags.files).unwrap();
    let n_vocab = plan.config().n_vocab;
    let open = move || model::session(&files, plan.clone(), &flags.engine, 256);
    let session = match open() {
        Ok(session) => session,
        Err(error) if std::env::var_os("STERNA_REQUIRE_GPU").is_none() => {
            eprintln!("SKIPPED: {error:#}; see scripts/software-gpu.sh");
            return;
        }
        Err(error) => panic!("{error:#}"),
    };
    fn lose(runtime: &Runtime) {
        let gpu = runtime.session.model().backend().device();
        gpu.expect("a model on a GPU").device().lose();
    }
    let prompt = encode(&tokenizer, &"Once upon a time, there was a fox. ".repeat(9));
    assert!(prompt.len() > PREFILL_CHUNK, "{}", prompt.len());
    // Loses the device before the tokens with these numbers, and after so many parts of the prompt.
    let answer = |runtime: &mut Runtime, speculate, prefilled: Option<usize>, at: &[usize]| {
        runtime.reset();
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: 12,
            stop_ids: &[],
            speculate,
        };
        let mut answer = runtime.start(request).unwrap();
        if let Some(n) = prefilled {
            for _ in 0..n {
                answer.prefill().unwrap();
            }
            lose(answer.runtime);
        }
        let mut n = 0;
        loop {
            if at.contains(&n) {
                lose(answer.runtime);
            }
            match answer.next_id()? {
                None => break,
                Some(_) => n += 1,
            }
        }
        let Stats {
            n_prefilled,
            n_generated,
            n_decoded,
            stop,
            ..
        } = answer.stats();
        let told = (
            answer.ids.clone(),
            n_prefilled,
            n_generated,
            n_decoded,
            stop,
        );
        anyhow::Ok((told, runtime.cached.clone()))
    };
    let penalised = SamplerConfig {
        repeat_penalty: 1.3,
        ..sampled(7)
    };
    let mut runtime = Runtime::new(session, Sampler::new(penalised.clone(), n_vocab).unwrap())
        .recovering(Recovery::by(open));
    for speculate in [None, Some(4)] {
        // What is drawn depends on what was drawn before.
        let sampler = || Sampler::new(penalised.clone(), n_vocab).unwrap();
        runtime.set_sampler(sampler());
        let expected = answer(&mut runtime, speculate, None, &[]).unwrap();
        assert_eq!(expected.0.0.len(), 12);
        for (prefilled, at) in [
            (Some(0), &[][..]),
            (Some(1), &[1, 2]),
            (None, &[0]),
            (None, &[5, 6, 11]),
        ] {
            runtime.set_sampler(sampler());
            let found = answer(&mut runtime, speculate, prefilled, at).unwrap();
            assert_eq!(found, expected, "{speculate:?}, {prefilled:?}, {at:?}");
        }
    }
    let error = answer(&mut runtime, None, None, &[1, 2, 3, 4]).unwrap_err();
    assert!(
        error.to_string().contains("GPU device was lost"),
        "{error:#}"
    );
    // The next answer is not held to it.
    answer(&mut runtime, None, None, &[]).unwrap();

    runtime.recovery = Recovery::by(|| bail!("no such file"));
    let error = format!("{:#}", answer(&mut runtime, None, None, &[3]).unwrap_err());
    assert!(
        error.contains("GPU device was lost")
            && error.contains("cannot be loaded again: no such file"),
        "{error}"
    );
}
