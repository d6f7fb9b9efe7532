//! That an answer's receipt checks on every instruction set, and that a changed one doesn't.
#![cfg(feature = "native")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(feature = "gpu")]
use crate::common;
use crate::common::sampled;
use proptest::prelude::*;
use serde_json::{Value, json};
use sterna::generate::{Event, Request};
use sterna::native::{LoadFrom, LocalFolder, LocalModel, Located, Weights, open_adapter};
use sterna::receipt::{Checked, Device, Difference, Receipt, Setup};
use sterna::scheduler::{Scheduler, SchedulerOptions};
use sterna::sequence::Sequence;
use sterna::swap::Group;
use sterna::{Adapted, ErrorCode};
use sterna_delivery::sign::{SecretKey, SignatureError, TrustList, Verdict};
use sterna_engine::plan::{HeadOptions, PlanOptions};
use sterna_engine::{
    Activations, Backend, CacheType, Cpu, ModelPlan, Sampler, SamplerConfig, SessionOptions,
};
use sterna_format::DType;
use sterna_kernels::Isa;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// A model in files, and how it is computed.
#[derive(Clone)]
struct Case {
    path: PathBuf,
    adapter: Option<PathBuf>,
    head: Option<DType>,
    activations: Activations,
    session: SessionOptions,
}

impl Case {
    fn of(path: &str) -> Case {
        Case {
            path: at(path),
            adapter: None,
            head: None,
            activations: Activations::Int8,
            session: SessionOptions::new(96),
        }
    }

    fn open(&self) -> (LocalModel, ModelPlan) {
        let files = LocalModel::open("tiny", Located::at(&self.path).unwrap(), None, None);
        let files = files.unwrap();
        let head = HeadOptions {
            dtype: self.head,
            ..HeadOptions::default()
        };
        let plan = files.plan(&PlanOptions::default()).unwrap();
        (files, plan.with_head(head).unwrap())
    }

    fn load_on<B: Backend>(&self, backend: B, device: Device) -> (Adapted<B>, Setup) {
        let (files, plan) = self.open();
        let options = LoadFrom {
            weights: Weights::Mapped,
            experts: None,
            n_threads: 1,
            progress: &|_| {},
        };
        let loaded = files.load_on(plan.clone(), backend, &options).unwrap();
        let mut adapted = Adapted::new(loaded.model);
        if let Some(folder) = &self.adapter {
            let adapter = open_adapter("red", &LocalFolder::new(folder), None).unwrap();
            let added = adapted.add(adapter, &files, (0.5, None), &mut Vec::new());
            added.unwrap();
        }
        let digest = files.digest(&|_| {}).unwrap();
        let (activations, session) = (self.activations, self.session);
        let cache = session.cache_on(adapted.model().backend());
        let ctx_len = session.ctx_len;
        let setup = Setup::new("tiny", digest, &plan, activations, ctx_len, cache, device);
        let setup = setup.with_adapters(&adapted).unwrap();
        (adapted, setup)
    }

    fn load(&self, n_threads: usize, isa: Isa) -> (Adapted<Cpu>, Setup) {
        let cpu = Cpu::new(n_threads, isa).with_activations(self.activations);
        self.load_on(cpu, Device::Cpu(isa.name().to_owned()))
    }

    fn check_at(&self, receipt: &Receipt, isa: Isa) -> sterna::Result<Checked> {
        let (adapted, setup) = self.load(1, isa);
        let mut session = adapted.session(self.session).unwrap();
        receipt.check(&setup, &mut session)
    }

    fn check(&self, receipt: &Receipt) -> Checked {
        self.check_at(receipt, Isa::detect()).unwrap()
    }

    fn differs(&self, receipt: &Receipt) -> Difference {
        match self.check(receipt) {
            Checked::Differs(difference) => difference,
            checked => panic!("{checked:?}"),
        }
    }
}

const PROMPT: [u32; 6] = [1, 303, 307, 261, 378, 295];

fn request(config: SamplerConfig, n_vocab: usize, max_tokens: usize) -> Request {
    let sampler = Sampler::new(config, n_vocab).unwrap();
    Request {
        max_tokens,
        stop_ids: vec![2],
        ..Request::new(PROMPT.to_vec(), sampler)
    }
}

/// The receipt of the answer to `request`.
fn answered<B: Backend>(
    (adapted, setup): &(Adapted<B>, Setup),
    session: SessionOptions,
    request: Request,
) -> Receipt {
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let id = scheduler.add(Sequence::new(adapted.session(session).unwrap()));
    let request = Request {
        receipt: Some(Arc::new(setup.clone())),
        ..request
    };
    scheduler.start(id, request).unwrap();
    assert_eq!(scheduler.generator(id).unwrap().receipt(), None);
    while !scheduler.is_idle() {
        for (_, event) in scheduler.step().unwrap() {
            if let Event::Failed(error) = event {
                panic!("{error:#}");
            }
        }
    }
    let receipt = scheduler.finish(id).unwrap().receipt().unwrap();
    assert_eq!(
        Receipt::parse(receipt.to_json().as_bytes()).unwrap(),
        receipt
    );
    receipt
}

fn answer(case: &Case, config: SamplerConfig, max_tokens: usize) -> Receipt {
    let model = case.load(2, Isa::detect());
    let n_vocab = model.0.model().config().n_vocab;
    answered(&model, case.session, request(config, n_vocab, max_tokens))
}

/// The receipt with the value at `path` changed to `value`.
fn with(receipt: &Receipt, path: &str, value: impl Into<Value>) -> Receipt {
    let mut json: Value = serde_json::from_str(&receipt.to_json()).unwrap();
    *json.pointer_mut(path).expect("a field") = value.into();
    Receipt::parse(json.to_string().as_bytes()).unwrap()
}

/// The digest that a receipt has of what was asked, if that is changed.
fn asked_again(case: &Case, receipt: &Receipt) -> Receipt {
    match case.differs(receipt) {
        Difference::Asked { expected, .. } => with(receipt, "/logits/begin", expected),
        other => panic!("{other}"),
    }
}

const BITLLAMA: &str = "testdata/bitllama-3M/bitllama-3M-tq2_0.gguf";
const STORIES: &str = "testdata/stories260K/stories260K-q8_0.gguf";

#[test]
fn receipts_check_on_every_instruction_set() {
    let penalties = SamplerConfig {
        repeat_penalty: 1.3,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        min_p: 0.02,
        logit_bias: vec![(5, f32::NEG_INFINITY), (300, 1.5)],
        ..sampled(u64::MAX - 3)
    };
    let cache = |cache| SessionOptions {
        cache,
        ..SessionOptions::new(80)
    };
    let cases = [
        Case::of(BITLLAMA),
        Case::of("testdata/stories260K/hf"),
        Case {
            session: cache(Some(CacheType::Q8_0)),
            ..Case::of(STORIES)
        },
        Case {
            session: cache(Some(CacheType::F16)),
            activations: Activations::F32,
            ..Case::of(STORIES)
        },
        Case {
            head: Some(DType::Q8_0),
            ..Case::of("testdata/stories260K/stories260K-f32.gguf")
        },
        Case {
            adapter: Some(at("testdata/adapters/llama/all")),
            ..Case::of("testdata/reference-logits/llama")
        },
        Case {
            adapter: Some(at("testdata/adapters/bitnet/stabilised")),
            ..Case::of("testdata/reference-logits/bitnet-packed")
        },
    ];
    for case in cases {
        for config in [SamplerConfig::default(), sampled(7), penalties.clone()] {
            let receipt = answer(&case, config, 40);
            assert!(!receipt.answer().is_empty());
            for isa in Isa::available() {
                let checked = case.check_at(&receipt, isa).unwrap();
                assert_eq!(
                    checked,
                    Checked::Same,
                    "{} {}",
                    case.path.display(),
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn drafts_and_what_shares_steps_leave_a_receipt_as_it_is() {
    let case = Case::of(BITLLAMA);
    let model = case.load(1, Isa::detect());
    let n_vocab = model.0.model().config().n_vocab;
    let alone = answered(&model, case.session, request(sampled(3), n_vocab, 60));
    let drafting = Request {
        speculate: Some(6),
        logprobs: Some(2),
        ..request(sampled(3), n_vocab, 60)
    };
    assert_eq!(answered(&model, case.session, drafting), alone);
    // The head is read as a whole, also where a screen would do.
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let ids: Vec<_> = [3, 4, 5]
        .into_iter()
        .map(|seed| {
            let id = scheduler.add(Sequence::new(model.0.session(case.session).unwrap()));
            let request = Request {
                receipt: Some(Arc::new(model.1.clone())),
                ..request(sampled(seed), n_vocab, 60)
            };
            scheduler.start(id, request).unwrap();
            id
        })
        .collect();
    while !scheduler.is_idle() {
        scheduler.step().unwrap();
    }
    assert_eq!(scheduler.finish(ids[0]).unwrap().receipt().unwrap(), alone);
}

#[test]
fn what_was_changed_is_named() {
    let case = Case::of(BITLLAMA);
    let receipt = answer(&case, sampled(11), 30);
    let n = receipt.answer().len();
    assert!(n > 12);
    // A token: the first that isn't what is sampled.
    for index in [0, 7, n - 1] {
        let token = receipt.answer()[index];
        let other = if token == 100 { 101 } else { 100 };
        let changed = with(&receipt, &format!("/answer/{index}"), other);
        let expected = Difference::Token {
            index,
            expected: token,
            found: other,
        };
        assert_eq!(case.differs(&changed), expected);
    }
    // The digest of a step.
    let changed = with(&receipt, "/logits/steps/4", "0123456789abcdef");
    assert_eq!(case.differs(&changed).index(), Some(4));
    assert!(matches!(case.differs(&changed), Difference::Logits { .. }));
    let changed = with(&receipt, "/logits/end", "00".repeat(32));
    assert!(matches!(case.differs(&changed), Difference::Digest { .. }));
    // What was asked, and the same with the digest that belongs to it.
    for (path, value) in [
        ("/sampling/seed", json!("12")),
        ("/sampling/temperature", json!(0.81)),
        ("/sampling/top_k", json!(41)),
        ("/sampling/repeat_penalty", json!(1.01)),
        ("/sampling/logit_bias", json!([[17, null]])),
        ("/prompt/2", json!(300)),
        ("/max_tokens", json!(31)),
        ("/stop_ids", json!([2, 3])),
    ] {
        let changed = with(&receipt, path, value);
        let again = asked_again(&case, &changed);
        let difference = case.differs(&again);
        match path {
            // There is no such end.
            "/max_tokens" => assert!(matches!(difference, Difference::End { .. })),
            _ => assert!(difference.index().is_some(), "{path}: {difference}"),
        }
    }
    // Names and machines aren't what was asked.
    for (path, value) in [("/model/name", "other"), ("/machine/arch", "z80")] {
        assert_eq!(case.check(&with(&receipt, path, value)), Checked::Same);
    }
}

#[test]
fn a_seed_counts_where_nothing_is_drawn() {
    let case = Case::of(STORIES);
    let receipt = answer(&case, SamplerConfig::default(), 10);
    let changed = with(&receipt, "/sampling/seed", "1");
    // The digests of a receipt are those of one seed.
    let difference = case.differs(&asked_again(&case, &changed));
    assert_eq!(difference.index(), Some(0));
}

#[test]
fn settings_are_part_of_it() {
    let case = Case::of(STORIES);
    let receipt = answer(&case, sampled(1), 20);
    for other in [
        Case {
            session: SessionOptions::new(97),
            ..case.clone()
        },
        Case {
            session: SessionOptions {
                cache: Some(CacheType::F16),
                ..case.session
            },
            ..case.clone()
        },
        Case {
            activations: Activations::F32,
            ..case.clone()
        },
    ] {
        let difference = other.differs(&receipt);
        assert!(
            matches!(difference, Difference::Settings { .. }),
            "{difference}"
        );
    }
}

#[test]
fn a_changed_weight_does_not_check() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = Case::of(STORIES);
    let receipt = answer(&case, sampled(5), 30);
    let bytes = fs::read(&case.path).unwrap();
    case.path = folder.path().join("changed.gguf");
    // In layers, and in the embeddings, which are the head.
    for place in [0.3, 0.5, 0.7, 0.9, 0.99] {
        let mut changed = bytes.clone();
        let at = (changed.len() as f64 * place) as usize;
        changed[at] ^= 1;
        fs::write(&case.path, &changed).unwrap();
        let difference = case.differs(&receipt);
        let Difference::Model { expected, .. } = &difference else {
            panic!("{difference}");
        };
        // Whoever says that it is this model's is found out by the answer.
        let claimed = with(&receipt, "/model/blake3", expected.clone());
        let claimed = asked_again(&case, &claimed);
        assert!(case.differs(&claimed).index().is_some());
    }
}

#[test]
fn packages_are_known_by_their_manifests() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(at("testdata/rdrr-samples/v1-gemma3-q4k")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let digest = || {
        let located = Located::at(folder.path()).unwrap();
        let files = LocalModel::open("tiny", located, None, None).unwrap();
        files.digest(&|_| panic!("shards needn't be read")).unwrap()
    };
    let before = digest();
    assert_eq!(digest(), before);
    let manifest = folder.path().join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text + " ").unwrap();
    assert_ne!(digest(), before);
}

#[test]
fn adapters_are_part_of_it() {
    let plain = Case::of("testdata/reference-logits/llama");
    let adapted = Case {
        adapter: Some(at("testdata/adapters/llama/all")),
        ..plain.clone()
    };
    let receipt = answer(&adapted, sampled(2), 20);
    let difference = plain.differs(&receipt);
    assert!(
        matches!(difference, Difference::Adapters { .. }),
        "{difference}"
    );
    assert!(
        difference
            .to_string()
            .contains("expected none, found \"red\"")
    );
    let scaled = with(&receipt, "/adapters/0/scale", 0.25);
    let difference = adapted.differs(&scaled);
    assert!(
        matches!(difference, Difference::Adapters { .. }),
        "{difference}"
    );
    // Without it, the same tokens don't come.
    let without = asked_again(&plain, &with(&receipt, "/adapters", json!([])));
    assert!(plain.differs(&without).index().is_some());
}

#[test]
fn answers_end_as_they_are_said_to() {
    let case = Case {
        session: SessionOptions::new(20),
        ..Case::of(STORIES)
    };
    let config = SamplerConfig::default();
    let full = answer(&case, config.clone(), usize::MAX);
    assert_eq!(full.prompt().len() + full.answer().len(), 21);
    assert_eq!(case.check(&full), Checked::Same);
    let limited = answer(&case, config.clone(), 5);
    assert_eq!(limited.answer().len(), 5);
    assert_eq!(case.check(&limited), Checked::Same);
    let none = answer(&case, config.clone(), 0);
    assert_eq!(case.check(&none), Checked::Same);
    // With a token that comes as the end.
    let model = case.load(1, Isa::detect());
    let n_vocab = model.0.model().config().n_vocab;
    let end = full.answer()[4];
    let request = Request {
        stop_ids: vec![end],
        ..request(config, n_vocab, usize::MAX)
    };
    let stopped = answered(&model, case.session, request);
    assert!(stopped.answer().len() <= 4);
    assert_eq!(case.check(&stopped), Checked::Same);
    let json: Value = serde_json::from_str(&stopped.to_json()).unwrap();
    assert_eq!(json["end"], json!({"reason": "stop_token", "id": end}));
    // Cut short, and said to be whole.
    let cut = |reason: &str| {
        let mut json: Value = serde_json::from_str(&full.to_json()).unwrap();
        for field in ["/answer", "/logits/steps"] {
            json.pointer_mut(field)
                .unwrap()
                .as_array_mut()
                .unwrap()
                .truncate(3);
        }
        json["end"] = json!({"reason": reason});
        let receipt = Receipt::parse(json.to_string().as_bytes()).unwrap();
        case.differs(&receipt)
    };
    for reason in ["max_tokens", "context_full"] {
        assert!(matches!(cut(reason), Difference::End { .. }));
    }
    // Stop strings can't be seen in it, but the last digest can.
    assert!(matches!(cut("stop_string"), Difference::Digest { .. }));
    // A stop token in an answer.
    let through = with(&stopped, "/stop_ids", json!([end, full.answer()[0]]));
    let through = match stopped.answer() {
        [] => return,
        _ => asked_again(&case, &through),
    };
    assert!(matches!(case.differs(&through), Difference::End { .. }));
}

#[test]
fn signatures_are_of_all_of_it() {
    let case = Case::of(STORIES);
    let mut receipt = answer(&case, sampled(1), 8);
    let key = SecretKey::generate().unwrap();
    let mut trust = TrustList::default();
    assert_eq!(receipt.signer(&trust), Ok(Verdict::Unsigned));
    receipt.sign(&key).unwrap();
    assert!(matches!(
        receipt.signer(&trust),
        Err(SignatureError::UnknownKey { .. })
    ));
    trust.insert("me", key.public());
    // Through JSON as others write it.
    let value: Value = serde_json::from_str(&receipt.to_json()).unwrap();
    let pretty = serde_json::to_string_pretty(&value).unwrap();
    let read = Receipt::parse(pretty.as_bytes()).unwrap();
    assert_eq!(read, receipt);
    assert!(matches!(read.signer(&trust), Ok(Verdict::Signed(who)) if who.name == "me"));
    assert_eq!(case.check(&read), Checked::Same);
    for (path, value) in [
        ("/machine/name", json!("scalar")),
        ("/program", json!("other 1.0")),
        ("/answer/0", json!(9)),
        ("/logits/end", json!("00".repeat(32))),
    ] {
        let changed = with(&receipt, path, value);
        assert!(
            matches!(changed.signer(&trust), Err(SignatureError::Bad { .. })),
            "{path}"
        );
    }
}

#[test]
fn what_nobody_could_check_is_refused() {
    let case = Case::of(STORIES);
    let (adapted, setup) = case.load(1, Isa::detect());
    let n_vocab = adapted.model().config().n_vocab;
    let start = |request: Request| {
        let mut scheduler = Scheduler::new(SchedulerOptions::default());
        let id = scheduler.add(Sequence::new(adapted.session(case.session).unwrap()));
        let error = scheduler.start(id, request).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unsupported);
        error.to_string()
    };
    // Its random sequence isn't that of a seed.
    let mut used = request(sampled(1), n_vocab, 5);
    used.sampler.sample(&vec![1.0; n_vocab]);
    used.receipt = Some(Arc::new(setup.clone()));
    assert!(start(used).contains("random sequence at its beginning"));
    let on_gpu = setup.clone().on(Device::Gpu("some".to_owned()));
    let random = Request {
        receipt: Some(Arc::new(on_gpu.clone())),
        ..request(sampled(1), n_vocab, 5)
    };
    assert!(start(random).contains("expected temperature 0, found 0.8"));
    // A GPU's bits say nothing of those of others.
    let receipt = answer(&case, sampled(1), 5);
    let mut session = adapted.session(case.session).unwrap();
    let error = receipt.check(&on_gpu, &mut session).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unsupported);
    // Tokens that the model doesn't have.
    let changed = with(&receipt, "/answer/3", 512);
    let error = receipt_error(&case, &changed);
    assert_eq!(
        error,
        "receipt: answer: token 3: expected an id below 512, found 512"
    );
}

fn receipt_error(case: &Case, receipt: &Receipt) -> String {
    case.check_at(receipt, Isa::detect())
        .unwrap_err()
        .to_string()
}

#[test]
fn what_is_no_receipt_is_refused_by_place() {
    let receipt = answer(&Case::of(STORIES), sampled(1), 5).to_json();
    let json: Value = serde_json::from_str(&receipt).unwrap();
    let refused = |path: &str, value: Value| {
        let mut json = json.clone();
        let (parent, field) = path.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[field] = value;
        let text = serde_json::to_string_pretty(&json).unwrap();
        Receipt::parse(text.as_bytes()).unwrap_err().to_string()
    };
    for (path, value, message) in [
        ("/receipt", json!(2), "receipt: expected version 1, found 2"),
        ("/other", json!(2), "receipt: unknown field `other`"),
        ("/sampling/seed", json!(7), "expected a string at line"),
        (
            "/sampling/seed",
            json!("+7"),
            "expected a whole number below 2^64",
        ),
        (
            "/sampling/min_p",
            json!(1e39),
            "number out of range at line",
        ),
        (
            "/sampling/logit_bias",
            json!([[1, -1e39]]),
            "number out of range at line",
        ),
        (
            "/prompt",
            json!([]),
            "receipt: prompt: expected tokens, found none",
        ),
        (
            "/answer",
            json!([-1]),
            "invalid value: integer `-1`, expected u32 at line",
        ),
        (
            "/answer",
            json!([1]),
            "logits.steps: expected 1, one for each token, found 5",
        ),
        (
            "/settings/context",
            json!(7),
            "expected at most 8 tokens, one more than its context, found 11",
        ),
        (
            "/settings/cache",
            json!("f8"),
            "unknown variant `f8`, expected one of `f32`, `f16`, `q8_0`",
        ),
        (
            "/logits/end",
            json!("ab"),
            "digest: expected 64 hexadecimal digits, found 2 characters",
        ),
        (
            "/logits/end",
            json!("AB".repeat(32)),
            "in lower case, found upper case",
        ),
        (
            "/model/name",
            json!("x".repeat(1025)),
            "names of at most 1024 bytes, found one of 1025",
        ),
        (
            "/end",
            json!({"reason": "complete"}),
            "unknown variant `complete`",
        ),
        (
            "/machine/device",
            json!("gpu"),
            "expected temperature 0, found 0.8",
        ),
    ] {
        let found = refused(path, value);
        assert!(found.contains(message), "{path}: {found}");
    }
    let long = " ".repeat(sterna::receipt::MAX_RECEIPT_BYTES + 1);
    let error = Receipt::parse(long.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("expected at most 33554432 bytes"));
    let twice = receipt.replacen("\"program\"", "\"receipt\":1,\"program\"", 1);
    let error = Receipt::parse(twice.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("duplicate field `receipt`"), "{error}");
}

/// A receipt to be changed.
fn sample() -> &'static str {
    static SAMPLE: std::sync::LazyLock<String> =
        std::sync::LazyLock::new(|| answer(&Case::of(STORIES), sampled(1), 6).to_json());
    &SAMPLE
}

proptest! {
    #[test]
    fn changed_bytes_are_refused_or_read_as_they_are_written(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let mut bytes = sample().as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(receipt) = Receipt::parse(&bytes) {
            let again = Receipt::parse(receipt.to_json().as_bytes()).unwrap();
            prop_assert_eq!(again, receipt);
        }
    }
}

/// The receipt with a penalty that nobody asked for, and the digest that belongs to it.
#[cfg(feature = "gpu")]
fn asked_of_gpu(case: &Case, receipt: &Receipt) -> Receipt {
    let bias = json!([[receipt.answer()[0], -50.0]]);
    let changed = with(receipt, "/sampling/logit_bias", bias);
    asked_again(case, &with(&changed, "/sampling/repeat_penalty", 1e-30))
}

#[cfg(feature = "gpu")]
#[test]
fn answers_of_a_gpu_are_checked_within_a_margin() {
    let Some(gpu) = common::gpu() else { return };
    let case = Case::of(BITLLAMA);
    let model = case.load_on(gpu, Device::Gpu("some".to_owned()));
    let n_vocab = model.0.model().config().n_vocab;
    let receipt = answered(
        &model,
        case.session,
        request(SamplerConfig::default(), n_vocab, 30),
    );
    assert!(receipt.machine().is_gpu());
    let n = receipt.answer().len();
    assert!(n > 5);
    for isa in Isa::available() {
        let checked = case.check_at(&receipt, isa).unwrap();
        let Checked::WithinMargin { n_others } = checked else {
            panic!("{checked:?}");
        };
        assert!(n_others <= n / 5, "{n_others} of {n}");
    }
    // No penalty makes the margin wide enough for any token.
    let Checked::Differs(_) = case.check(&asked_of_gpu(&case, &receipt)) else {
        panic!("it is within the margin");
    };
    // The least probable token there is.
    let mut session = case.load(1, Isa::detect()).0.session(case.session).unwrap();
    let logits = session
        .forward(&PROMPT, sterna_engine::Logits::Last)
        .unwrap();
    let worst = (0..n_vocab)
        .min_by(|a, b| logits[*a].total_cmp(&logits[*b]))
        .unwrap();
    let changed = with(&receipt, "/answer/0", worst);
    let difference = case.differs(&changed);
    assert!(
        matches!(difference, Difference::Margin { index: 0, .. }),
        "{difference}"
    );
}

#[test]
fn replaced_weights_are_not_those_of_the_files() {
    let case = Case::of(STORIES);
    let (adapted, setup) = case.load(1, Isa::detect());
    let (files, plan) = case.open();
    let swapped = files.swap_into(adapted.model(), plan, &[Group::Layer(1)]);
    assert_eq!(swapped.unwrap().0, 1);
    let error = setup.with_adapters(&adapted).unwrap_err();
    assert!(
        error.to_string().contains("whose weights were replaced"),
        "{error}"
    );
}

/// Receipts of the built-in model, written with AVX-512. `sterna-testing` checks them on other machines.
#[test]
fn receipts_of_the_built_in_model_check_everywhere() {
    for name in ["drawn", "greedy"] {
        let path = at("testdata/receipts").join(name).with_extension("json");
        let receipt = Receipt::parse(&fs::read(path).unwrap()).unwrap();
        assert_eq!(receipt.machine().name, "avx512");
        let mut case = Case::of("crates/sterna/models/tiny-tales");
        case.session = receipt.settings().session();
        for isa in Isa::available() {
            let checked = case.check_at(&receipt, isa).unwrap();
            assert_eq!(checked, Checked::Same, "{name} {}", isa.name());
        }
    }
}

#[path = "../../../fuzz/checks/receipt.rs"]
mod check;

#[test]
fn inputs_of_the_fuzzer() {
    sterna_testing::fuzz::replay("receipt", check::check);
}

/// Inputs with bytes and whole parts exchanged, `STERNA_MUTATIONS` of them.
#[test]
fn mutations_of_inputs_of_the_fuzzer() {
    let n = std::env::var("STERNA_MUTATIONS").map_or(3000, |n| n.parse().unwrap());
    let inputs = sterna_testing::fuzz::inputs("receipt");
    let mut state = 1u64;
    let mut below = |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n.max(1)
    };
    for _ in 0..n {
        let mut input = inputs[below(inputs.len())].1.clone();
        let other = &inputs[below(inputs.len())].1;
        for _ in 0..1 + below(3) {
            let at = below(input.len());
            match below(4) {
                0 => input[at] = other[below(other.len())],
                1 => input[at] = below(256) as u8,
                2 => drop(input.drain(at..(at + below(40)).min(input.len()))),
                _ => {
                    let from = below(other.len());
                    let part = other[from..(from + below(60)).min(other.len())].to_vec();
                    input.splice(at..at, part);
                }
            }
            if input.is_empty() {
                break;
            }
        }
        check::check(&input);
    }
}
