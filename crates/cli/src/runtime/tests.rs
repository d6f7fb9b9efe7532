//! That drafts change no answer.

use std::path::Path;

use clap::Parser;
use sterna_engine::SamplerConfig;

use super::*;
use crate::args::ReportFlags;
use crate::model::ModelFiles;

#[derive(Parser)]
struct TestFlags {
    #[command(flatten)]
    flags: ReportFlags,
}

/// Answers a series of prompts, one after the other, as a chat does.
struct Answering {
    runtime: Runtime,
    tokenizer: Tokenizer,
    speculate: Option<usize>,
}

/// All that a caller sees of an answer, but for its time.
#[derive(Debug, PartialEq)]
struct Answer {
    pieces: Vec<String>,
    ids: Vec<u32>,
    stop: Option<StopReason>,
    n_reused: usize,
    n_decoded: usize,
    cached: Vec<u32>,
}

impl Answering {
    fn new(model: &str, sampling: SamplerConfig, speculate: Option<usize>) -> Answering {
        let TestFlags { flags } = TestFlags::parse_from(["test", "--threads", "1"]);
        let files = ModelFiles::open(model).unwrap();
        let tokenizer = files.require_tokenizer().unwrap();
        let plan = files.plan(&flags.files).unwrap();
        let sampler = Sampler::new(sampling, plan.config().n_vocab).unwrap();
        let session = files.session(plan, &flags.engine, 128).unwrap();
        Answering {
            runtime: Runtime::new(session, sampler),
            tokenizer,
            speculate,
        }
    }

    /// The answer to `prompt`, of which `n_pieces` are pulled at most.
    fn answer(&mut self, prompt: &str, stop: &str, n_pieces: usize) -> (Answer, Stats) {
        let encode = sterna_text::Encode {
            add_special: true,
            parse_special: true,
        };
        let request = Request {
            prompt: self.tokenizer.encode(prompt, encode).unwrap(),
            max_tokens: 70,
            stop_ids: self.tokenizer.end_ids(),
            stop_strings: vec![stop.to_owned()],
            speculate: self.speculate,
        };
        let mut answer = self.runtime.start(request, &self.tokenizer).unwrap();
        let pieces = answer.by_ref().take(n_pieces).map(Result::unwrap).collect();
        let (ids, stats) = (answer.ids().to_vec(), answer.stats());
        if stats.stop.is_some() {
            let n_computed = self.runtime.session.len();
            assert_eq!(n_computed, self.runtime.cached.len(), "{prompt}");
        }
        let answer = Answer {
            pieces,
            ids,
            stop: stats.stop,
            n_reused: stats.n_reused,
            n_decoded: stats.n_decoded,
            cached: self.runtime.cached.clone(),
        };
        (answer, stats)
    }
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

/// 210 prompts: three models, five ways of sampling, and more or less to be found in the prompt.
#[test]
fn speculation_changes_no_answer() {
    let path = |name| {
        let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        testdata.join(name).to_str().unwrap().to_owned()
    };
    let sampling = [
        SamplerConfig::default(),
        sampled(1),
        SamplerConfig {
            temperature: 1.5,
            ..SamplerConfig::default()
        },
        SamplerConfig {
            repeat_penalty: 1.3,
            ..SamplerConfig::default()
        },
        SamplerConfig {
            frequency_penalty: 0.2,
            presence_penalty: 0.4,
            repeat_last_n: 20,
            ..sampled(2)
        },
    ];
    let tale = "Once upon a time, there was a little girl named Lily. She liked to play.";
    let prompts = [
        ("Once upon a time", "."),
        (tale, "no such text"),
        ("The cat sat. The cat sat. The cat sat. The", "cat sat. The"),
        ("He said: no no no no no no no no", "\n"),
        ("a b c a b c a b c a b c a", "park"),
        (&[tale, tale].concat()[..], "Tim and"),
        ("One day, the bird", "She"),
    ];
    let (mut n_drafted, mut n_accepted) = (0, 0);
    for model in [
        "builtin".to_owned(),
        path("stories260K/hf"),
        path("bitllama-3M/bitllama-3M-tq2_0.gguf"),
    ] {
        for (i, sampling) in sampling.iter().enumerate() {
            let mut plain = Answering::new(&model, sampling.clone(), None);
            let mut drafting = Answering::new(&model, sampling.clone(), Some(1 + 3 * i));
            for round in 0..2 {
                for (prompt, stop) in prompts {
                    // Some are interrupted.
                    let n_pieces = if round == 0 { usize::MAX } else { 23 };
                    let (expected, _) = plain.answer(prompt, stop, n_pieces);
                    let (found, stats) = drafting.answer(prompt, stop, n_pieces);
                    assert_eq!(found, expected, "{model}, {sampling:?}, {prompt}");
                    n_drafted += stats.n_drafted;
                    n_accepted += stats.n_accepted;
                }
            }
        }
    }
    // Else this shows nothing.
    assert!(
        n_accepted > 100 && n_drafted > n_accepted,
        "{n_accepted} of {n_drafted}"
    );
}
