//! Engines alone, in token ids: neither what is kept of earlier prompts nor which engine computes changes an answer.

mod losses;
mod tiers;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use sterna::generate::Request;
use sterna::native::{LoadFrom, LocalFolder, LocalModel, Located, Weights, open_adapter};
use sterna::{Adapted, AdapterFiles};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{CacheType, Cpu, Sampler, SamplerConfig, SessionOptions};
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
    engines: Engines,
    library: Arc<Library<Cpu>>,
    /// The model of each engine.
    models: Vec<Arc<Model<Cpu>>>,
    n_vocab: usize,
    adapters: Arc<dyn LoadAdapter>,
    metrics: Arc<Metrics>,
    /// Records of the log.
    log: Arc<Mutex<Vec<String>>>,
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

/// `n` engines for it.
fn engines(n: usize, folder: &str, options: EngineOptions) -> Tested {
    engines_of(n, folder, None, options)
}

/// An engine, all of whose sequences have this adapter.
fn engine_of(folder: &str, own: Option<&str>, options: EngineOptions) -> Tested {
    engines_of(1, folder, own, options)
}

fn engines_of(n: usize, folder: &str, own: Option<&str>, options: EngineOptions) -> Tested {
    let setup = Setup {
        n,
        own,
        ..Setup::new(folder, options)
    };
    setup.start()
}

/// What engines are started with.
struct Setup<'a> {
    n: usize,
    folder: &'a str,
    /// The adapter of all sequences.
    own: Option<&'a str>,
    options: EngineOptions,
    /// Where they keep what they have no room for.
    cache: Option<&'a CacheFolder>,
    /// Their devices are opened again when they are lost, once that has failed so often.
    reopens: Option<usize>,
}

impl<'a> Setup<'a> {
    fn new(folder: &'a str, options: EngineOptions) -> Setup<'a> {
        Setup {
            n: 1,
            folder,
            own: None,
            options,
            cache: None,
            reopens: None,
        }
    }

    fn start(self) -> Tested {
        let Setup {
            n,
            folder,
            own,
            options,
            cache,
            reopens,
        } = self;
        let path = testdata(folder);
        let files = LocalModel::open(folder, Located::at(&path).unwrap(), None, None).unwrap();
        let plan = files.plan(&PlanOptions::default()).unwrap();
        let n_vocab = plan.config().n_vocab;
        let session = SessionOptions::new(400);
        let cache_bytes = {
            let plan = plan.clone();
            Arc::new(move |len, cache| plan.cache_bytes(len, cache))
        };
        let own = own.map(str::to_owned);
        let load = move || {
            let load_from = LoadFrom {
                weights: Weights::Mapped,
                experts: None,
                n_threads: 1,
                progress: &|_| {},
            };
            let loaded = files.load_on(plan.clone(), Cpu::new(1, Isa::detect()), &load_from);
            let mut adapted = Adapted::new(loaded.unwrap().model);
            if let Some(own) = &own {
                let added = adapted.add(adapter(own), &files, (1.0, None), &mut Vec::new());
                added.unwrap();
            }
            adapted
        };
        let adapted: Vec<Adapted<Cpu>> = (0..n).map(|_| load()).collect();
        let models = adapted.iter().map(|own| Arc::clone(own.model())).collect();
        let load = reopens.map(|n_failures| {
            let n_left = AtomicUsize::new(n_failures);
            let less = |n: usize| n.checked_sub(1);
            let load = move |engines: &[usize]| {
                use std::sync::atomic::Ordering::SeqCst;
                match n_left.fetch_update(SeqCst, SeqCst, less) {
                    Ok(_) => Err(Error::new(ErrorCode::NotFound, "no such device")),
                    Err(_) => Ok(engines.iter().map(|_| load()).collect()),
                }
            };
            Box::new(load) as Box<models::LoadModel<Cpu>>
        });
        let devices: Vec<String> = (0..n).map(|number| format!("device {number}")).collect();
        let metrics = Arc::new(Metrics::new(&devices, options.cache_bytes).with_aliases(1));
        let log = Arc::new(Mutex::new(Vec::new()));
        let write = {
            let log = Arc::clone(&log);
            move |record: &serde_json::Map<String, serde_json::Value>| {
                let record = serde_json::to_string(record).unwrap();
                log.lock().unwrap().push(record);
            }
        };
        let adapters = Arc::new(Mutex::new(None));
        let tell = {
            let adapters = Arc::clone(&adapters);
            Box::new(move |_, loader| *adapters.lock().unwrap() = loader)
        };
        let (engines, library) =
            Engines::start(devices, (options, cache), &metrics, Arc::new(write), tell).unwrap();
        let added = library.add(ModelSource {
            name: folder.to_owned(),
            hash: Some(folder.to_owned()),
            bytes: 1,
            session,
            cache_bytes,
            describe: None,
            loaded: Some(adapted),
            load,
            // Equal weights, under another name.
            swap: Some(Box::new(|_: &[_], _: &str, _: &[String]| Ok(Vec::new()))),
            adapters: Vec::new(),
        });
        assert_eq!(added.unwrap(), 0);
        let adapters = adapters.lock().unwrap().take().unwrap();
        Tested {
            engines,
            library,
            models,
            n_vocab,
            adapters,
            metrics,
            log,
        }
    }
}

/// Generous, as machines may be slow.
const PATIENCE: Duration = Duration::from_secs(120);

fn options(cache_bytes: u64, parallel: usize) -> EngineOptions {
    EngineOptions {
        parallel,
        queue: 64,
        cache_bytes,
        host_bytes: 0,
        chunk: 16,
        chunk_beside: 16,
        models_bytes: None,
        models_idle: None,
    }
}

/// An answer, how much of its prompt was there, and which engine began it.
#[derive(Debug, Default, PartialEq)]
struct Answered {
    ids: Vec<u32>,
    n_cached: usize,
    engine: usize,
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
        self.answers_by(&plain(prompts))
    }

    /// The same, each by an adapter.
    fn answers_by(&self, prompts: &[(Vec<u32>, Option<Arc<AdapterKey>>)]) -> Vec<Answered> {
        let mut outputs = self.ask(prompts, 12);
        let mut all: Vec<Answered> = prompts.iter().map(|_| Answered::default()).collect();
        read(&mut outputs, &mut all, |_| false);
        all
    }

    /// Asks for answers to `prompts` of `n` tokens, all at once.
    fn ask(&self, prompts: &[(Vec<u32>, Option<Arc<AdapterKey>>)], n: usize) -> Outputs {
        let (replies, outputs) = replies(prompts.len());
        let jobs = prompts.iter().zip(replies).enumerate();
        let jobs = jobs.map(|(i, ((prompt, adapter), reply))| Job {
            model: 0,
            adapter: adapter.clone(),
            key: i % 3,
            work: Work::Generate(Box::new(Request {
                max_tokens: n,
                ..self.request(prompt, i as u64)
            })),
            receipt: false,
            reply,
        });
        self.engines.submit(jobs.collect()).unwrap();
        outputs
    }

    fn figure(&self, name: &str) -> u64 {
        let text = self.metrics.text();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let value = line.unwrap_or_else(|| panic!("{name}: {text}"));
        value.trim().parse().unwrap()
    }

    /// Waits until a figure is as `is_enough` says.
    fn wait_for(&self, name: &str, is_enough: impl Fn(u64) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_enough(self.figure(name)) {
            assert!(Instant::now() < until, "{name}: {}", self.metrics.text());
            thread::yield_now();
        }
    }

    fn answer(&self, prompt: &[u32]) -> Answered {
        self.answers(&[prompt.to_vec()]).remove(0)
    }
}

/// A job of the first model, without an adapter.
fn job(work: Work, reply: Reply) -> Job {
    Job {
        model: 0,
        adapter: None,
        key: 0,
        work,
        receipt: false,
        reply,
    }
}

/// Reads answers into `all` until the last has ended, or those so far are as `is_enough` says.
fn read(outputs: &mut Outputs, all: &mut [Answered], is_enough: impl Fn(&[Answered]) -> bool) {
    while !is_enough(all) {
        let Some((choice, output)) = outputs.blocking_recv() else {
            return;
        };
        match output {
            Output::Begun {
                engine, n_cached, ..
            } => {
                all[choice].n_cached = n_cached;
                all[choice].engine = engine;
            }
            Output::Token(token) => all[choice].ids.push(token.id),
            Output::Ended { stats, .. } => assert_eq!(stats.n_reused, all[choice].n_cached),
            other => panic!("{other:?}"),
        }
    }
}

/// The same prompts, by the model alone.
fn plain(prompts: &[Vec<u32>]) -> Vec<(Vec<u32>, Option<Arc<AdapterKey>>)> {
    let plain = |prompt: &Vec<u32>| (prompt.clone(), None);
    prompts.iter().map(plain).collect()
}

fn prompt(n: usize, salt: u32) -> Vec<u32> {
    (0..n as u32)
        .map(|i| 3 + (i * 37 + salt * 11 + i * i * salt) % (N_IDS - 3))
        .collect()
}

#[test]
fn texts_of_several_requests_have_the_vectors_that_each_has_alone() {
    for (folder, _) in MODELS {
        let texts: Vec<_> = (0..7).map(|i| prompt(4 + 6 * i, i as u32 + 1)).collect();
        let embed = |texts: &[Vec<u32>], pooling: Pooling| Work::Embed {
            texts: texts.to_vec(),
            pooling,
            normalised: true,
        };
        let ask = |works: Vec<Work>| {
            let tested = engine(folder, options(0, 3));
            let (replies, mut outputs) = replies(works.len());
            let jobs = works.into_iter().zip(replies);
            let jobs: Vec<_> = jobs.map(|(work, reply)| job(work, reply)).collect();
            let mut vectors = vec![Vec::new(); jobs.len()];
            let mut failed = vec![false; jobs.len()];
            tested.engines.submit(jobs).unwrap();
            while let Some((i, output)) = outputs.blocking_recv() {
                match output {
                    Output::Embedded(vector) => vectors[i].push(vector),
                    Output::Failed(_) => failed[i] = true,
                    _ => {}
                }
            }
            (vectors, failed)
        };
        let works = || {
            vec![
                embed(&texts[..1], Pooling::Mean),
                embed(&texts[1..4], Pooling::Last),
                embed(&texts[4..5], Pooling::Mean),
                embed(&texts[5..7], Pooling::Mean),
            ]
        };
        let expected: Vec<_> = works()
            .into_iter()
            .map(|work| ask(vec![work]).0.remove(0))
            .collect();
        let (together, failed) = ask(works());
        assert!(together == expected, "{folder}");
        assert_eq!(failed, [false; 4]);
        // One with a token that there isn't: the others have theirs.
        let mut works = works();
        works[2] = embed(&[vec![u32::MAX]], Pooling::Mean);
        let (mut together, failed) = ask(works);
        assert_eq!(failed, [false, false, true, false], "{folder}");
        together[2].clone_from(&expected[2]);
        assert!(together == expected, "{folder}");
    }
}

#[test]
fn answers_go_on_between_the_parts_of_a_long_text() {
    for (folder, _) in MODELS {
        let texts = vec![prompt(200, 3), prompt(5, 4), prompt(7, 5), prompt(40, 6)];
        let ask = |with_answer: bool| {
            let tested = engine(folder, options(0, 3));
            let (mut all, mut outputs) = replies(2);
            let embed = Work::Embed {
                texts: texts.clone(),
                pooling: Pooling::Mean,
                normalised: true,
            };
            let mut jobs = vec![job(embed, all.remove(1))];
            if with_answer {
                let request = Request {
                    max_tokens: 60,
                    ..tested.request(&prompt(9, 1), 1)
                };
                jobs.push(job(Work::Generate(Box::new(request)), all.remove(0)));
            }
            all.clear();
            tested.engines.submit(jobs).unwrap();
            let (mut ids, mut vectors, mut n_before) = (Vec::new(), Vec::new(), Vec::new());
            while let Some((_, output)) = outputs.blocking_recv() {
                match output {
                    Output::Token(token) => ids.push(token.id),
                    Output::Embedded(vector) => {
                        n_before.push(ids.len());
                        vectors.push(vector);
                    }
                    Output::Failed(error) => panic!("{error:#}"),
                    _ => {}
                }
            }
            (ids, vectors, n_before)
        };
        let (_, expected, _) = ask(false);
        let (ids, vectors, n_before) = ask(true);
        assert_eq!((ids.len(), vectors.len()), (60, 4));
        assert!(vectors == expected, "{folder}");
        // A chunk of 16 tokens before each step, and short texts together.
        assert!(n_before[0] >= 200 / 16 - 2, "{folder}: {n_before:?}");
        assert_eq!(n_before[1], n_before[2], "{folder}: {n_before:?}");
        let alone = engine(folder, options(0, 3));
        let seeded = Request {
            max_tokens: 60,
            ..alone.request(&prompt(9, 1), 1)
        };
        let (mut all, mut outputs) = replies(1);
        let seeded = job(Work::Generate(Box::new(seeded)), all.remove(0));
        alone.engines.submit(vec![seeded]).unwrap();
        let mut answer = [Answered::default()];
        read(&mut outputs, &mut answer, |_| false);
        assert_eq!(answer[0].ids, ids, "{folder}");
    }
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
fn a_prompt_goes_on_where_most_is_remembered() {
    for (folder, has_states) in MODELS {
        let cached = engine(folder, options(1 << 30, 4));
        let fresh = engine(folder, options(0, 1));
        let long = prompt(200, 1);
        // States are remembered at ends of chunks, and of prompts: the second has some at 86, the first hasn't.
        for beginning in [&long[..], &long[..86]] {
            let (with, without) = (cached.answer(beginning), fresh.answer(beginning));
            assert_eq!(with.ids, without.ids, "{folder}");
        }
        // With the first, it has more in common.
        let other = [&long[..90], &prompt(20, 5)].concat();
        let (with, without) = (cached.answer(&other), fresh.answer(&other));
        assert_eq!(with.ids, without.ids, "{folder}");
        let expected = if has_states { 86 } else { 90 };
        assert_eq!(with.n_cached, expected, "{folder}");
    }
}

#[test]
fn what_a_cancelled_answer_computed_is_kept() {
    for (folder, has_states) in MODELS {
        let beginning = prompt(70, 1);
        let (cached, n_read) = loop {
            let cached = engine(folder, options(1 << 30, 4));
            let mut outputs = cached.ask(&plain(std::slice::from_ref(&beginning)), 300);
            let mut begun = [Answered::default()];
            read(&mut outputs, &mut begun, |all| all[0].ids.len() >= 3);
            drop(outputs);
            cached.wait_for("sterna_requests_running{engine=\"0\"}", |n| n == 0);
            // Where this thread didn't get its turn, it may have come to its end.
            if cached.figure("sterna_cancelled_answers_total") == 1 {
                break (cached, begun[0].ids.len());
            }
        };
        assert_eq!(n_read, 3, "{folder}");
        let fresh = engine(folder, options(0, 1));
        let longer = [&beginning[..], &prompt(9, 2)].concat();
        let (with, without) = (cached.answer(&longer), fresh.answer(&longer));
        assert_eq!(with.ids, without.ids, "{folder}");
        // States are remembered at some places.
        let least = if has_states { 70 - 16 } else { 70 };
        assert!(with.n_cached >= least, "{folder}: {with:?}");
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
    for n in [1, 2] {
        adapters_of_engines(n, MODEL, folders);
    }
}

fn adapters_of_engines(n: usize, model: &str, folders: [Option<&str>; 3]) {
    let together = engines(n, model, options(1 << 30, 6));
    let keys = folders.map(|folder| {
        let folder = folder?;
        let key = AdapterKey::new(folder);
        let loaded = together.adapters.load_as(&key, adapter(folder), 1.0);
        loaded.unwrap();
        Some(key)
    });
    let prompt = prompt(40, 3);
    // Each adapter four times, all at once, and again with all that was kept.
    let asked: Vec<_> = (0..12)
        .map(|i| (prompt.clone(), keys[i % 3].clone()))
        .collect();
    let first = together.answers_by(&asked);
    let again = together.answers_by(&asked);
    let alone = folders.map(|folder| engine_of(model, folder, options(0, 1)));
    let expected = alone.map(|alone| alone.answers(&vec![prompt.clone(); 12]));
    let engine = |answers: &[Answered]| answers.iter().any(|answer| answer.engine == n - 1);
    assert!(engine(&first) && engine(&again), "{first:?} {again:?}");
    for (i, (first, again)) in first.iter().zip(&again).enumerate() {
        // Seeds are by place.
        assert_eq!(first.ids, expected[i % 3][i].ids, "{i}");
        assert_eq!(again.ids, first.ids, "{i}");
        if n == 1 {
            assert_eq!(again.n_cached, 39, "{i}");
        }
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
    while together.adapters.n_loaded() > 1 {
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
    let room = plan.cache_bytes(2 * 115, CacheType::F32);
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
    let work = Work::Generate(Box::new(tested.request(&prompt(9, 1), 1)));
    let reply = Reply {
        choice: 0,
        n_lost_with: 0,
        sender,
    };
    tested.engines.submit(vec![job(work, reply)]).unwrap();
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
    let job = |reply: Reply, max_tokens| {
        let request = Request {
            max_tokens,
            ..tested.request(&prompt(9, 1), 1)
        };
        job(Work::Generate(Box::new(request)), reply)
    };
    let (all, mut outputs) = replies(3);
    let jobs: Vec<Job> = all.into_iter().map(|reply| job(reply, 300)).collect();
    assert_eq!(
        tested.engines.submit(jobs),
        Err(Refused::TooMany { limit: 2 })
    );
    assert!(outputs.blocking_recv().is_none());
    // Until that is seen, nothing ends.
    tested.engines.hold(0, true);
    let (all, outputs) = replies(2);
    tested
        .engines
        .submit(all.into_iter().map(|reply| job(reply, 300)).collect())
        .unwrap();
    let (one, _) = replies(1);
    let refused = tested
        .engines
        .submit(one.into_iter().map(|reply| job(reply, 1)).collect());
    assert!(matches!(refused, Err(Refused::Full { retry_after }) if retry_after.as_secs() >= 1));
    // Once nobody waits for them, there is room again.
    tested.engines.hold(0, false);
    drop(outputs);
    loop {
        let (one, mut outputs) = replies(1);
        let jobs: Vec<Job> = one.into_iter().map(|reply| job(reply, 1)).collect();
        if tested.engines.submit(jobs).is_ok() {
            while outputs.blocking_recv().is_some() {}
            return;
        }
        thread::yield_now();
    }
}

#[test]
fn several_engines_answer_as_one() {
    for (folder, _) in MODELS {
        let several = engines(3, folder, options(1 << 30, 2));
        let alone = engine(folder, options(0, 1));
        let beginning = prompt(50, 1);
        let prompts: Vec<Vec<u32>> = (0..12)
            .map(|i| match i % 3 {
                0 => prompt(20 + i as usize, i),
                _ => [&beginning[..], &prompt(2 + i as usize, i)].concat(),
            })
            .collect();
        let expected = alone.answers(&prompts);
        for _ in 0..2 {
            let found = several.answers(&prompts);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.ids, expected.ids, "{folder}, {i}");
            }
            for engine in 0..3 {
                let is_used = found.iter().any(|answer| answer.engine == engine);
                assert!(is_used, "{folder}: {found:?}");
            }
        }
    }
}

#[test]
fn a_prompt_goes_to_the_engine_that_holds_its_beginning() {
    let (folder, _) = MODELS[0];
    let tested = engines(2, folder, options(1 << 30, 2));
    // Both at once: one on each engine.
    let beginnings = [prompt(100, 1), prompt(100, 2)];
    let first = tested.answers(&beginnings);
    assert_ne!(first[0].engine, first[1].engine);
    for round in 0..3 {
        for (at, beginning) in beginnings.iter().enumerate().rev() {
            let next = [&beginning[..], &prompt(20, 7 + round)].concat();
            let answer = tested.answer(&next);
            assert_eq!(answer.engine, first[at].engine, "{round}");
            assert!(answer.n_cached >= 100, "{round}: {answer:?}");
        }
    }
    // It has no room for a third: that is computed by the other one, as nobody waits while an engine is idle.
    let prompts: Vec<Vec<u32>> = (0..3)
        .map(|i| [&beginnings[0][..], &prompt(5, 20 + i)].concat())
        .collect();
    let answers = tested.answers(&prompts);
    let mut at_first: Vec<usize> = answers.iter().map(|answer| answer.engine).collect();
    at_first.sort_by_key(|engine| *engine != first[0].engine);
    assert_eq!(at_first[..2], [first[0].engine; 2], "{answers:?}");
    assert_eq!(at_first[2], first[1].engine, "{answers:?}");
}

#[test]
fn as_many_may_wait_as_before_and_each_engine_takes_its_own() {
    let (folder, _) = MODELS[0];
    let tested = engines(
        2,
        folder,
        EngineOptions {
            queue: 1,
            ..options(0, 1)
        },
    );
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| prompt(9, i)).collect();
    let (all, _outputs) = replies(4);
    let job = |(reply, prompt): (Reply, &Vec<u32>)| {
        let request = Request {
            max_tokens: 300,
            ..tested.request(prompt, 1)
        };
        job(Work::Generate(Box::new(request)), reply)
    };
    let refused = tested
        .engines
        .submit(all.into_iter().zip(&prompts).map(job).collect());
    assert_eq!(refused, Err(Refused::TooMany { limit: 3 }));
    // Until that is seen, nothing ends.
    for engine in [0, 1] {
        tested.engines.hold(engine, true);
    }
    let _taken = tested.ask(&plain(&prompts[..3]), 300);
    let (one, _outputs) = replies(1);
    let refused = tested
        .engines
        .submit(one.into_iter().zip(&prompts).map(job).collect());
    assert!(matches!(refused, Err(Refused::Full { .. })), "{refused:?}");
    let text = || tested.metrics.text();
    let running = [0, 1].map(|engine| format!("sterna_requests_running{{engine=\"{engine}\"}} 1"));
    while !running.iter().all(|figure| text().contains(figure)) {
        thread::yield_now();
    }
    assert!(text().contains("vllm:num_requests_running 2"), "{}", text());
    assert!(text().contains("vllm:num_requests_waiting 1"), "{}", text());
    for engine in [0, 1] {
        tested.engines.hold(engine, false);
    }
}
