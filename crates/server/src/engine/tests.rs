//! The engine alone, in token ids: what is kept of earlier prompts changes no answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::generate::Request;
use sterna::native::{LoadFrom, LocalFolder, LocalModel, Located, Weights, open_adapter};
use sterna::{Adapted, AdapterFiles};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Cpu, Sampler, SamplerConfig, SessionOptions};
use sterna_kernels::Isa;

use super::*;

/// A transformer, and models whose layers have states.
const MODELS: [(&str, bool); 6] = [
    ("reference-logits/qwen3", false),
    ("reference-states/hf/qwen3.5", true),
    ("reference-states/hf/lfm2", true),
    ("reference-states/hf/falcon-h1", true),
    ("reference-states/hf/mamba2", true),
    ("reference-states/hf/rwkv7", true),
];

/// The size of the vocabulary that prompts are made of: every model has more.
const N_IDS: u32 = 90;

struct Tested {
    engine: Engine,
    n_vocab: usize,
    adapters: Arc<Adapters<Cpu>>,
}

fn testdata(folder: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    root.join(folder)
}

/// The adapter in this folder of test data.
fn adapter(folder: &str) -> AdapterFiles {
    let files = LocalFolder::new(testdata(folder));
    open_adapter(folder, &files, None).unwrap()
}

/// An engine for the model in this folder of test data.
fn engine(folder: &str, options: EngineOptions) -> Tested {
    engine_of(folder, None, options)
}

/// The same, all of whose sequences have this adapter.
fn engine_of(folder: &str, own: Option<&str>, options: EngineOptions) -> Tested {
    let path = testdata(folder);
    let files = LocalModel::open(folder, Located::at(&path).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let n_vocab = plan.config().n_vocab;
    let load_from = LoadFrom {
        weights: Weights::Mapped,
        experts: None,
        n_threads: 1,
        progress: &|_| {},
    };
    let loaded = files.load_on(plan.clone(), Cpu::new(1, Isa::detect()), &load_from);
    let session = SessionOptions::new(400);
    let mut adapted = Adapted::new(loaded.unwrap().model);
    if let Some(own) = own {
        let added = adapted.add(adapter(own), &files, (1.0, None), &mut Vec::new());
        added.unwrap();
    }
    let adapters = Arc::new(Adapters::new(Arc::clone(adapted.model())));
    let model = EngineModel {
        adapters: Arc::clone(&adapters),
        adapted,
        session,
        cache_bytes: Box::new(move |len| plan.cache_bytes(len, session.cache)),
    };
    let metrics = Arc::new(Metrics::new(options.cache_bytes, 1));
    Tested {
        engine: Engine::start(vec![model], options, metrics).unwrap(),
        n_vocab,
        adapters,
    }
}

fn options(cache_bytes: u64, parallel: usize) -> EngineOptions {
    EngineOptions {
        parallel,
        queue: 64,
        cache_bytes,
        chunk: 16,
    }
}

/// An answer, and how much of its prompt was there.
#[derive(Debug, Default, PartialEq)]
struct Answered {
    ids: Vec<u32>,
    n_cached: usize,
}

impl Tested {
    fn request(&self, prompt: &[u32], seed: u64) -> Request {
        let config = SamplerConfig {
            temperature: 0.8,
            seed,
            ..SamplerConfig::default()
        };
        Request {
            max_tokens: 12,
            ..Request::new(prompt.to_vec(), Sampler::new(config, self.n_vocab).unwrap())
        }
    }

    /// The answers to `prompts`, all asked at once.
    fn answers(&self, prompts: &[Vec<u32>]) -> Vec<Answered> {
        let prompts: Vec<_> = prompts
            .iter()
            .map(|prompt| (prompt.clone(), None))
            .collect();
        self.answers_by(&prompts)
    }

    /// The same, each by an adapter.
    fn answers_by(&self, prompts: &[(Vec<u32>, Option<Arc<AdapterKey>>)]) -> Vec<Answered> {
        let (replies, mut outputs) = replies(prompts.len());
        let jobs = prompts.iter().zip(replies).enumerate();
        let jobs = jobs.map(|(i, ((prompt, adapter), reply))| Job {
            model: 0,
            adapter: adapter.clone(),
            key: i % 3,
            work: Work::Generate(Box::new(self.request(prompt, i as u64))),
            reply,
        });
        self.engine.submit(jobs.collect()).unwrap();
        let mut all: Vec<Answered> = prompts.iter().map(|_| Answered::default()).collect();
        let mut n_left = prompts.len();
        while n_left > 0 {
            let (choice, output) = outputs.blocking_recv().unwrap();
            match output {
                Output::Begun { n_cached, .. } => all[choice].n_cached = n_cached,
                Output::Token(token) => all[choice].ids.push(token.id),
                Output::Ended { stats, .. } => {
                    assert_eq!(stats.n_reused, all[choice].n_cached);
                    n_left -= 1;
                }
                other => panic!("{other:?}"),
            }
        }
        all
    }

    fn answer(&self, prompt: &[u32]) -> Answered {
        self.answers(&[prompt.to_vec()]).remove(0)
    }
}

fn prompt(n: usize, salt: u32) -> Vec<u32> {
    (0..n as u32)
        .map(|i| 3 + (i * 37 + salt * 11 + i * i * salt) % (N_IDS - 3))
        .collect()
}

#[test]
fn two_with_the_same_beginning_are_answered_as_without_a_cache() {
    for (folder, has_states) in MODELS {
        let cached = engine(folder, options(1 << 30, 4));
        let fresh = engine(folder, options(0, 1));
        let beginning = prompt(70, 1);
        let tails = [prompt(9, 2), prompt(30, 3), prompt(1, 4), prompt(9, 2)];
        let mut n_cached = Vec::new();
        for tail in &tails {
            let prompt = [&beginning[..], tail].concat();
            let (with, without) = (cached.answer(&prompt), fresh.answer(&prompt));
            assert_eq!(with.ids, without.ids, "{folder}");
            assert_eq!(without.n_cached, 0, "{folder}");
            n_cached.push(with.n_cached);
            // The next turn goes on where the answer ended.
            let next = [&prompt[..], &with.ids, &self::prompt(5, 7)].concat();
            let (with, without) = (cached.answer(&next), fresh.answer(&next));
            assert_eq!(with.ids, without.ids, "{folder}, the next turn");
            assert!(with.n_cached >= prompt.len() - 16, "{folder}: {with:?}");
        }
        assert_eq!(n_cached[0], 0, "{folder}");
        match has_states {
            false => assert_eq!(n_cached[1..3], [70, 70], "{folder}"),
            true => assert!(
                n_cached[1..].iter().all(|n| *n <= 78),
                "{folder}: {n_cached:?}"
            ),
        }
    }
}

#[test]
fn many_at_once_are_answered_as_alone() {
    for (folder, _) in MODELS {
        let together = engine(folder, options(1 << 30, 5));
        let alone = engine(folder, options(0, 1));
        let beginning = prompt(50, 1);
        let prompts: Vec<Vec<u32>> = (0..12)
            .map(|i| match i % 3 {
                0 => prompt(20 + i as usize, i),
                _ => [&beginning[..], &prompt(2 + i as usize, i)].concat(),
            })
            .collect();
        for _ in 0..2 {
            let found = together.answers(&prompts);
            for (i, found) in found.iter().enumerate() {
                // Seeds are by place.
                let mut padded = vec![prompts[0].clone(); i];
                padded.push(prompts[i].clone());
                let expected = alone.answers(&padded);
                assert_eq!(found.ids, expected[i].ids, "{folder}, {i}");
            }
        }
    }
}

#[test]
fn adapters_are_by_request_and_share_nothing() {
    const MODEL: &str = "reference-logits/llama";
    let folders = [
        None,
        Some("adapters/llama/all"),
        Some("adapters/llama/stabilised"),
    ];
    let together = engine(MODEL, options(1 << 30, 6));
    let keys = folders.map(|folder| {
        let loaded = folder.map(|folder| together.adapters.load(folder, adapter(folder), 1.0));
        loaded.transpose().unwrap()
    });
    let prompt = prompt(40, 3);
    // Each adapter four times, all at once, and again with all that was kept.
    let asked: Vec<_> = (0..12)
        .map(|i| (prompt.clone(), keys[i % 3].clone()))
        .collect();
    let first = together.answers_by(&asked);
    let again = together.answers_by(&asked);
    let alone = folders.map(|folder| engine_of(MODEL, folder, options(0, 1)));
    let expected = alone.map(|alone| alone.answers(&vec![prompt.clone(); 12]));
    for (i, (first, again)) in first.iter().zip(&again).enumerate() {
        // Seeds are by place.
        assert_eq!(first.ids, expected[i % 3][i].ids, "{i}");
        assert_eq!(again.ids, first.ids, "{i}");
        assert_eq!(again.n_cached, 39, "{i}");
    }
    assert_ne!(expected[0], expected[1]);
    assert_ne!(expected[1], expected[2]);
    // Nothing of another's was taken.
    let n_fresh = first.iter().filter(|answer| answer.n_cached == 0).count();
    assert!(n_fresh >= 3, "{first:?}");
    // What nobody can name is kept no more, once something was computed.
    let [_, gone, _] = keys;
    drop((gone, asked));
    together.answer(&prompt);
    while together.adapters.keep_named().len() > 1 {
        thread::yield_now();
    }
}

#[test]
fn the_cache_is_bounded_and_forgets_what_was_used_least_recently() {
    let (folder, _) = MODELS[0];
    let files =
        LocalModel::open(folder, Located::at(&testdata(folder)).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    // Room for two conversations of this length.
    let room = plan.cache_bytes(2 * 115, SessionOptions::new(400).cache);
    let tested = engine(folder, options(room, 1));
    let prompts: Vec<Vec<u32>> = (1..4).map(|salt| prompt(100, salt * 5)).collect();
    let ask = |i: usize| tested.answer(&prompts[i]).n_cached;
    assert_eq!([ask(0), ask(1)], [0, 0]);
    // The first is used again, so the third takes the place of the second.
    assert_eq!(ask(0), 99);
    assert_eq!(ask(2), 0);
    assert_eq!(ask(0), 99);
    assert_eq!(ask(1), 0);
}

#[test]
fn who_does_not_read_is_given_up() {
    let (folder, _) = MODELS[0];
    let tested = engine(folder, options(1 << 30, 1));
    let (sender, mut outputs) = tokio::sync::mpsc::channel(3);
    let job = Job {
        model: 0,
        adapter: None,
        key: 0,
        work: Work::Generate(Box::new(tested.request(&prompt(9, 1), 1))),
        reply: Reply { choice: 0, sender },
    };
    tested.engine.submit(vec![job]).unwrap();
    // Others are answered, before and after.
    assert_eq!(tested.answer(&prompt(9, 2)).ids.len(), 12);
    let mut n_read = 0;
    while let Some((_, output)) = outputs.blocking_recv() {
        assert!(!matches!(output, Output::Ended { .. }));
        n_read += 1;
    }
    assert_eq!(n_read, 3);
}

#[test]
fn no_more_wait_than_may() {
    let (folder, _) = MODELS[0];
    let tested = engine(
        folder,
        EngineOptions {
            queue: 1,
            ..options(0, 1)
        },
    );
    let job = |reply: Reply, max_tokens| Job {
        model: 0,
        adapter: None,
        key: 0,
        work: Work::Generate(Box::new(Request {
            max_tokens,
            ..tested.request(&prompt(9, 1), 1)
        })),
        reply,
    };
    let (all, mut outputs) = replies(3);
    let jobs: Vec<Job> = all.into_iter().map(|reply| job(reply, 300)).collect();
    assert_eq!(
        tested.engine.submit(jobs),
        Err(Refused::TooMany { limit: 2 })
    );
    assert!(outputs.blocking_recv().is_none());
    let (all, outputs) = replies(2);
    tested
        .engine
        .submit(all.into_iter().map(|reply| job(reply, 300)).collect())
        .unwrap();
    let (one, _) = replies(1);
    let refused = tested
        .engine
        .submit(one.into_iter().map(|reply| job(reply, 1)).collect());
    assert!(matches!(refused, Err(Refused::Full { retry_after }) if retry_after.as_secs() >= 1));
    // Once nobody waits for them, there is room again.
    drop(outputs);
    loop {
        let (one, mut outputs) = replies(1);
        let jobs: Vec<Job> = one.into_iter().map(|reply| job(reply, 1)).collect();
        if tested.engine.submit(jobs).is_ok() {
            while outputs.blocking_recv().is_some() {}
            return;
        }
        thread::yield_now();
    }
}
