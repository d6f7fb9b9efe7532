//! Groups of weights that are replaced while the model runs: exactly as a fresh load, never in part.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use crate::common::{cpu, files, load, read, testdata};
use bytes::Bytes;
use sterna_engine::plan::{HeadOptions, HeadScreen, PlanOptions};
use sterna_engine::swap::{Group, Swap, SwapError, WeightVersions};
use sterna_engine::{Cpu, LoadError, Logits, Model, ModelPlan, Session, SessionOptions, Step};
use sterna_format::gguf::{self, Gguf, Metadata};
use sterna_format::names::{Name, translate};
use sterna_format::safetensors::{self, SafeTensors};
use sterna_format::{DType, TensorCatalog, TensorEntry, hf};
use sterna_kernels::Isa;

/// The files of a model, to be changed and planned.
#[derive(Clone)]
struct Revision {
    header: Header,
    catalog: TensorCatalog,
    files: Vec<Bytes>,
    head: HeadOptions,
}

#[derive(Clone)]
enum Header {
    Gguf(Metadata),
    Hf(Box<hf::Config>),
}

impl Revision {
    fn hf(folder: &str) -> Revision {
        let dir = testdata().join(folder);
        let config = hf::Config::parse(&read(&dir.join("config.json"))).unwrap();
        let file = read(&dir.join("model.safetensors"));
        let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
        Revision {
            header: Header::Hf(Box::new(config)),
            catalog: safetensors::merge(vec![("model.safetensors", header)], None).unwrap(),
            files: vec![file],
            head: HeadOptions::default(),
        }
    }

    fn gguf(folder: &str) -> Revision {
        let paths = files(&testdata().join(folder), "gguf");
        let files: Vec<Bytes> = paths.iter().map(|path| read(path)).collect();
        let headers = files
            .iter()
            .map(|f| Gguf::parse(f, f.len() as u64).unwrap());
        let (metadata, catalog) = gguf::Model::from_parts(headers.collect())
            .unwrap()
            .into_parts();
        Revision {
            header: Header::Gguf(metadata),
            catalog,
            files,
            head: HeadOptions::default(),
        }
    }

    fn plan(&self) -> ModelPlan {
        let options = PlanOptions::default();
        let plan = match &self.header {
            Header::Gguf(metadata) => ModelPlan::from_gguf(metadata, &self.catalog, &options),
            Header::Hf(config) => ModelPlan::from_hf(config, &self.catalog, &options),
        };
        plan.unwrap().with_head(self.head).unwrap()
    }

    fn load(&self) -> Arc<Model<Cpu>> {
        load(self.plan(), &self.files, cpu()).unwrap()
    }

    /// Swaps `groups` of `model` for this revision's.
    fn swap(&self, model: &Arc<Model<Cpu>>, groups: &[Group]) -> Result<u64, SwapError> {
        let mut swap = Swap::new(model, self.plan(), groups)?;
        while let Some(want) = swap.wanted() {
            let range = want.offset as usize..(want.offset + want.len) as usize;
            let bytes = self.files[want.file].slice(range);
            swap.feed(bytes)?;
        }
        swap.finish()
    }

    /// The tensors of `group`, scales of single numbers left out.
    fn tensors(&self, group: Group) -> Vec<TensorEntry> {
        let of = |entry: &TensorEntry| match &self.header {
            Header::Gguf(_) => entry.name.clone(),
            Header::Hf(config) => {
                match translate(config.model_type.as_deref().unwrap(), &entry.name) {
                    Name::Known(name) => name,
                    other => panic!("{}: {other:?}", entry.name),
                }
            }
        };
        let belongs = |name: &str| match group {
            Group::Embedding => name.starts_with("token_embd."),
            Group::Layer(i) => name.starts_with(&format!("blk.{i}.")),
            _ => name.starts_with("output"),
        };
        let entries = self.catalog.iter();
        entries
            .filter(|e| belongs(&of(e)) && e.shape.iter().product::<usize>() > 1)
            .cloned()
            .collect()
    }

    /// With `change` made to the bytes of a tensor.
    fn with(mut self, tensor: &TensorEntry, change: impl FnOnce(&mut [u8])) -> Revision {
        let mut file = self.files[tensor.file].to_vec();
        change(&mut file[tensor.offset as usize..(tensor.offset + tensor.len) as usize]);
        self.files[tensor.file] = file.into();
        self
    }

    /// Another revision, in which the rows of each tensor of `group` come one place later.
    fn revised(self, group: Group) -> Revision {
        let tensors = self.tensors(group);
        assert!(!tensors.is_empty(), "{group:?}");
        tensors.iter().fold(self, |revision, tensor| {
            let trailer = tensor.dtype.trailer_bytes();
            let row = (tensor.len as usize - trailer) / tensor.shape[0];
            let rows = tensor.len as usize - trailer;
            revision.with(tensor, |bytes| bytes[..rows].rotate_right(row))
        })
    }

    fn groups(&self) -> Vec<Group> {
        let n_layers = self.plan().config().n_layers;
        let layers = (0..n_layers).map(Group::Layer);
        [Group::Embedding, Group::Head]
            .into_iter()
            .chain(layers)
            .collect()
    }
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + i * 37 % 100).collect()
}

fn logits(model: &Arc<Model<Cpu>>) -> Vec<f32> {
    let mut session = Session::new(Arc::clone(model), SessionOptions::new(64)).unwrap();
    session.forward(&ids(24), Logits::All).unwrap()
}

/// Another revision, in which the rows of the matrices of an expert come some places later.
fn with_other_expert(first: &Revision, group: Group) -> Revision {
    let mut swap = Swap::new(&first.load(), first.plan(), &[group]).unwrap();
    let mut revision = first.clone();
    while let Some(want) = swap.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let file = &mut revision.files[want.file];
        let (bytes, mut changed) = (file.slice(range.clone()), file.to_vec());
        // Whole rows: there are multiples of eight of them.
        changed[range.clone()].rotate_right(range.len() / 8);
        *file = changed.into();
        swap.feed(bytes).unwrap();
    }
    revision
}

#[test]
fn experts_are_replaced_one_by_one() {
    for first in [
        Revision::hf("reference-mixtures/hf/mixtral"),
        Revision::hf("reference-mixtures/hf/deepseek-v3"),
        Revision::gguf("reference-mixtures/gguf/olmoe"),
        Revision::gguf("reference-mixtures/gguf/gpt-oss"),
    ] {
        let plain = logits(&first.load());
        let model = first.load();
        let [a, b] = [1, 3].map(|expert| Group::Expert { layer: 1, expert });
        let (of_a, of_b) = (with_other_expert(&first, a), with_other_expert(&first, b));
        assert_eq!(of_a.swap(&model, &[a]).unwrap(), 1);
        let fresh = logits(&of_a.load());
        assert!(fresh != plain);
        assert!(logits(&model) == fresh);
        assert_eq!(model.versions().groups.last(), Some(&(Group::Head, 0)));
        assert!(model.versions().groups.contains(&(a, 1)));
        // The other one leaves the first alone.
        of_b.swap(&model, &[b]).unwrap();
        let both = logits(&with_other_expert(&of_a, b).load());
        assert!(logits(&model) == both);
        // A layer has its experts with it.
        assert_eq!(first.swap(&model, &[a, Group::Layer(1)]).unwrap(), 3);
        assert!(logits(&model) == plain);
        let groups = model.versions().groups;
        assert!(groups.iter().all(|(group, _)| *group != a && *group != b));
        assert!(groups.contains(&(Group::Layer(1), 3)));

        let none = Group::Expert {
            layer: 1,
            expert: 64,
        };
        let error = Swap::new(&model, first.plan(), &[none]).err().unwrap();
        assert!(
            error
                .to_string()
                .starts_with("expert 64 of layer 1: expected one below")
        );
    }
}

/// Each group in turn, then all that changed back at once.
fn check_each_group(name: &str, first: &Revision) {
    let old = first.load();
    let plain = logits(&old);
    let model = first.load();
    let mut generation = 0;
    for group in first.groups() {
        let revision = first.clone().revised(group);
        generation += 1;
        assert_eq!(revision.swap(&model, &[group]).unwrap(), generation);
        let fresh = logits(&revision.load());
        assert!(fresh != plain, "{name}: {group:?} does not show");
        assert!(logits(&model) == fresh, "{name}: {group:?}");
        let versions = model.versions();
        assert_eq!(versions.generation, generation);
        assert!(versions.groups.contains(&(group, generation)));
        // Back again.
        generation += 1;
        assert_eq!(first.swap(&model, &[group]).unwrap(), generation);
        assert!(logits(&model) == plain, "{name}: back from {group:?}");
    }
    let [a, b] = [Group::Layer(0), Group::Head];
    let revision = first.clone().revised(a).revised(b);
    assert_eq!(revision.swap(&model, &[b, a, b]).unwrap(), generation + 1);
    assert!(
        logits(&model) == logits(&revision.load()),
        "{name}: two groups"
    );
    for group in [a, b] {
        assert!(model.versions().groups.contains(&(group, generation + 1)));
    }
    assert!(logits(&old) == plain, "{name}: another model");
}

#[test]
fn a_swapped_group_is_as_freshly_loaded() {
    for folder in [
        "llama",
        "gemma3",
        "phi3",
        "qwen2",
        "bitnet-packed",
        "bitnet-bf16-online",
    ] {
        let folder = format!("reference-logits/{folder}");
        check_each_group(&folder, &Revision::hf(&folder));
    }
    for folder in [
        "llama-q4-k-m",
        "bitnet-25-i2-s",
        "phi3-longrope-long",
        "bitnet-b1.58-tq2-0",
    ] {
        let folder = format!("reference-gguf/{folder}");
        check_each_group(&folder, &Revision::gguf(&folder));
    }
}

/// Heads that loading makes and screens are made anew, whichever group the head's matrix is in.
#[test]
fn made_heads_follow() {
    for folder in [
        "reference-logits/qwen3",
        "reference-variants/qwen3-yarn-tied",
    ] {
        let mut revision = Revision::hf(folder);
        revision.head = HeadOptions {
            dtype: Some(DType::F16),
            screen: HeadScreen::Off,
        };
        check_each_group(folder, &revision);
    }
    // Wide enough for a screen.
    let mut revision = Revision::hf("bitllama-3M/hf-packed");
    revision.head = HeadOptions {
        dtype: None,
        screen: HeadScreen::As(DType::Q5_K),
    };
    check_each_group("bitllama", &revision);
    let model = revision.load();
    let top = |model: &Arc<Model<Cpu>>| {
        let mut session = Session::new(Arc::clone(model), SessionOptions::new(64)).unwrap();
        let top = session.forward(&ids(10), Logits::Top(3)).unwrap();
        (top, session.head_use().unwrap().n_screened)
    };
    for group in [Group::Embedding, Group::Head] {
        let changed = revision.clone().revised(group);
        changed.swap(&model, &[group]).unwrap();
        let (got, n_screened) = top(&model);
        assert!(
            got == top(&changed.load()).0 && n_screened == 1,
            "{group:?}"
        );
        revision.swap(&model, &[group]).unwrap();
    }
}

/// What is replaced in a fork stays as it was in the model that it is of, whose adapters it takes.
#[test]
fn forks_share_what_is_not_replaced() {
    let first = Revision::hf("reference-logits/llama");
    let group = Group::Layer(0);
    let revision = first.clone().revised(group);
    let model = first.load();
    let (before, after) = (logits(&model), logits(&revision.load()));
    assert!(before != after);
    let fork = model.fork();
    assert!(logits(&fork) == before);
    assert_eq!(revision.swap(&fork, &[group]).unwrap(), 1);
    assert!(logits(&fork) == after && logits(&model) == before);
    // The next one goes on from there, and outlives both.
    let next = fork.fork();
    drop((model, fork));
    assert_eq!(next.versions().generation, 1);
    assert!(logits(&next) == after);
    assert_eq!(first.swap(&next, &[group]).unwrap(), 2);
    assert!(logits(&next) == before);
}

/// Of two revisions with other types, a mixture is what a load of mixed files is.
#[test]
fn types_may_differ() {
    for other in ["llama-q6-k", "llama-q8-0"] {
        check_mixture(
            &Revision::gguf("reference-gguf/llama-q4-k-m"),
            &Revision::gguf(&format!("reference-gguf/{other}")),
        );
    }
}

fn check_mixture(a: &Revision, b: &Revision) {
    let Header::Gguf(metadata) = &a.header else {
        unreachable!("it is a GGUF model")
    };
    for group in a.groups() {
        let theirs = b.tensors(group);
        let mut catalog = TensorCatalog::default();
        for entry in a.catalog.iter() {
            let entry = match theirs.iter().find(|e| e.name == entry.name) {
                Some(theirs) => TensorEntry {
                    file: a.files.len(),
                    ..theirs.clone()
                },
                None => entry.clone(),
            };
            catalog.insert(entry).unwrap();
        }
        let mixed = Revision {
            header: Header::Gguf(metadata.clone()),
            catalog,
            files: [a.files.clone(), b.files.clone()].concat(),
            head: HeadOptions::default(),
        };
        let model = a.load();
        b.swap(&model, &[group]).unwrap();
        assert!(logits(&model) == logits(&mixed.load()), "{group:?}");
        if matches!(group, Group::Layer(_)) {
            assert!(logits(&model) != logits(&a.load()), "{group:?}");
        }
    }
}

/// The cache keeps what the old weights made; a session that begins anew has no part of them.
#[test]
fn sessions_take_the_new_weights_at_their_next_step() {
    let first = Revision::hf("reference-logits/llama");
    let second = first.clone().revised(Group::Layer(1));
    let model = first.load();
    let mut session = Session::new(Arc::clone(&model), SessionOptions::new(64)).unwrap();
    session.forward(&ids(10), Logits::None).unwrap();
    second.swap(&model, &[Group::Layer(1)]).unwrap();
    let mixed = session.forward(&[7], Logits::Last).unwrap();
    let fresh = |revision: &Revision, n| {
        let mut session = Session::new(revision.load(), SessionOptions::new(64)).unwrap();
        session.forward(&ids(n), Logits::None).unwrap();
        session.forward(&[7], Logits::Last).unwrap()
    };
    let (old, new) = (fresh(&first, 10), fresh(&second, 10));
    assert!(mixed != old && mixed != new);
    session.truncate(0);
    session.forward(&ids(10), Logits::None).unwrap();
    assert!(session.forward(&[7], Logits::Last).unwrap() == new);
}

#[test]
fn readers_see_one_revision_or_the_other() {
    const N_SWAPS: usize = 150;
    let groups = [Group::Layer(0), Group::Layer(2), Group::Head];
    let first = Revision::hf("reference-logits/llama");
    let second = groups
        .iter()
        .fold(first.clone(), |r, group| r.revised(*group));
    let expected = [&first, &second].map(|revision| logits(&revision.load()));
    let n_vocab = first.plan().config().n_vocab;
    let model = load(first.plan(), &first.files, Cpu::new(2, Isa::detect())).unwrap();
    let (done, seen) = (
        AtomicBool::new(false),
        [AtomicUsize::new(0), AtomicUsize::new(0)],
    );
    let which = |got: &[f32], rows: std::ops::Range<usize>| {
        let values = rows.start * n_vocab..rows.end * n_vocab;
        let found = expected
            .iter()
            .position(|want| want[values.clone()] == *got);
        seen[found.expect("logits of one of the revisions")].fetch_add(1, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (model, which, done) = (&model, &which, &done);
            scope.spawn(move || {
                // Prompts of several chunks, which one generation computes.
                let options = SessionOptions {
                    chunk: 5 + thread,
                    ..SessionOptions::new(64)
                };
                let new = || Session::new(Arc::clone(model), options).unwrap();
                let (mut a, mut b) = (new(), new());
                while !done.load(Ordering::Relaxed) {
                    a.truncate(0);
                    which(&a.forward(&ids(24), Logits::All).unwrap(), 0..24);
                    a.truncate(0);
                    b.truncate(0);
                    let all = ids(24);
                    let mut steps = [(&mut a, 24), (&mut b, 9)].map(|(session, n)| Step {
                        session,
                        ids: &all[..n],
                        logits: Logits::Last,
                    });
                    let got = Session::forward_together(&mut steps).unwrap();
                    which(&got[0], 23..24);
                    which(&got[1], 8..9);
                }
            });
        }
        for i in 0..N_SWAPS {
            let revision = [&second, &first][i % 2];
            assert_eq!(revision.swap(&model, &groups).unwrap(), i as u64 + 1);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        done.store(true, Ordering::Relaxed);
    });
    let [of_first, of_second] = seen.map(AtomicUsize::into_inner);
    assert!(of_first > 0 && of_second > 0, "{of_first} and {of_second}");
    assert!(logits(&model) == expected[0]);
}

/// Two swaps at the same time each leave their group.
#[test]
fn swaps_of_different_groups_do_not_undo_each_other() {
    let first = Revision::hf("reference-logits/llama");
    let model = first.load();
    std::thread::scope(|scope| {
        for group in [
            Group::Layer(0),
            Group::Layer(1),
            Group::Layer(2),
            Group::Head,
        ] {
            let (first, model) = (&first, &model);
            scope.spawn(move || {
                let revision = first.clone().revised(group);
                for _ in 0..10 {
                    revision.swap(model, &[group]).unwrap();
                }
            });
        }
    });
    let groups = [
        Group::Layer(0),
        Group::Layer(1),
        Group::Layer(2),
        Group::Head,
    ];
    let all = groups.iter().fold(first, |r, group| r.revised(*group));
    assert!(logits(&model) == logits(&all.load()));
    assert_eq!(model.versions().generation, 40);
}

/// What `swap` fails with, which must leave the model as it was.
fn failure(model: &Arc<Model<Cpu>>, swap: impl FnOnce() -> Result<u64, SwapError>) -> String {
    let (before, versions): (_, WeightVersions) = (logits(model), model.versions());
    let error = swap().unwrap_err();
    assert!(logits(model) == before, "{error}");
    assert_eq!(model.versions(), versions);
    error.to_string()
}

#[test]
fn failed_swaps_leave_the_model_as_it_was() {
    let first = Revision::hf("reference-logits/llama");
    let model = first.load();
    let layer = [Group::Layer(1)];
    let matrix = |revision: &Revision, part: &str| {
        let tensors = revision.tensors(Group::Layer(1));
        tensors.into_iter().find(|t| t.name.contains(part)).unwrap()
    };

    // Other shapes, and none.
    let other = Revision::hf("reference-logits/qwen3");
    let message = failure(&model, || other.swap(&model, &layer));
    assert_eq!(
        message,
        "head_dim of the revision: expected 32 as in the running model, found 48"
    );
    let message = failure(&model, || first.swap(&model, &[Group::Layer(3)]));
    assert_eq!(message, "layer 3: expected one below 3");
    let message = failure(&model, || first.swap(&model, &[]));
    assert_eq!(message, "expected groups of weights to replace, found none");

    // A matrix and a norm with a value that is no number.
    let up = matrix(&first, "up_proj");
    let nan = first.clone().with(&up, |bytes| {
        bytes[2 * 1000..2 * 1001].copy_from_slice(&0x7fc0u16.to_le_bytes());
    });
    let message = failure(&model, || nan.swap(&model, &layer));
    assert_eq!(
        message,
        "tensor `model.layers.1.mlp.up_proj.weight`: expected numbers, found NaN at index 1000"
    );
    // In a group that isn't swapped it does no harm.
    let other_model = first.load();
    nan.swap(&other_model, &[Group::Layer(0)]).unwrap();
    assert!(logits(&other_model) == logits(&model));
    let norm = matrix(&first, "input_layernorm");
    let infinite = first.clone().with(&norm, |bytes| {
        bytes[4..6].copy_from_slice(&0x7f80u16.to_le_bytes());
    });
    let message = failure(&model, || infinite.swap(&model, &layer));
    assert_eq!(
        message,
        "tensor `model.layers.1.input_layernorm.weight`: expected numbers, found inf at index 2"
    );

    // Bytes that end too soon, and too late.
    for change in [-2i64, 2] {
        let message = failure(&model, || {
            let mut swap = Swap::new(&model, first.plan(), &layer)?;
            let want = swap.wanted().unwrap().clone();
            swap.feed(Bytes::from(vec![0; (want.len as i64 + change) as usize]))?;
            swap.finish()
        });
        assert!(
            message.contains("expected 256 bytes, found 25"),
            "{message}"
        );
    }
    let message = failure(&model, || {
        let mut swap = Swap::new(&model, first.plan(), &layer)?;
        let want = swap.wanted().unwrap().clone();
        swap.feed(first.files[0].slice(want.offset as usize..(want.offset + want.len) as usize))?;
        swap.finish()
    });
    assert_eq!(
        message,
        "tensor `model.layers.1.self_attn.q_proj.weight` has not been loaded"
    );
    // Nothing that is left undone is missed.
    drop(Swap::new(&model, first.plan(), &layer).unwrap());

    // A type that no weights have.
    let mut odd = first.clone();
    let mut catalog = TensorCatalog::default();
    for entry in first.catalog.iter() {
        let dtype = if entry.name == up.name {
            DType::I16
        } else {
            entry.dtype
        };
        catalog
            .insert(TensorEntry {
                dtype,
                ..entry.clone()
            })
            .unwrap();
    }
    odd.catalog = catalog;
    let message = failure(&model, || odd.swap(&model, &layer));
    assert!(
        message.contains("mlp.up_proj.weight") && message.contains("I16"),
        "{message}"
    );

    // Blocks with a scale that is infinite, and ternary weights with one that is none.
    let first = Revision::gguf("reference-gguf/llama-q4-k-m");
    let model = first.load();
    let q = first
        .tensors(Group::Layer(0))
        .into_iter()
        .find(|t| t.name.contains("attn_q.weight"));
    let bad = first
        .clone()
        .with(&q.unwrap(), |bytes| bytes[..2].copy_from_slice(&[0, 0x7c]));
    let message = failure(&model, || bad.swap(&model, &[Group::Layer(0)]));
    assert!(
        message.starts_with("tensor `blk.0.attn_q.weight`: expected numbers, found "),
        "{message}"
    );
    let first = Revision::gguf("reference-gguf/bitnet-25-i2-s");
    let model = first.load();
    let q = first
        .tensors(Group::Layer(0))
        .into_iter()
        .find(|t| t.name.contains("attn_q.weight"));
    let bad = first.clone().with(&q.unwrap(), |bytes| {
        let scale = bytes.len() - DType::I2_S.trailer_bytes();
        bytes[scale..scale + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let message = failure(&model, || bad.swap(&model, &[Group::Layer(0)]));
    assert_eq!(
        message,
        "tensor `blk.0.attn_q.weight`: expected a positive scale, found NaN"
    );
}

/// A head of its own can't become the table's, or the other way about.
#[test]
fn ties_must_be_the_same() {
    let first = Revision::hf("reference-logits/llama");
    let Header::Hf(config) = &first.header else {
        unreachable!("it is a Hugging Face model")
    };
    let mut config = config.clone();
    config.tie_word_embeddings = Some(true);
    let mut catalog = TensorCatalog::default();
    for entry in first.catalog.iter().filter(|e| e.name != "lm_head.weight") {
        catalog.insert(entry.clone()).unwrap();
    }
    let tied = Revision {
        header: Header::Hf(config),
        catalog,
        ..first.clone()
    };
    let message = failure(&first.load(), || tied.swap(&first.load(), &[Group::Head]));
    assert!(message.contains("output head of the revision"), "{message}");
}

/// Bytes whose end can be seen.
struct Tracked(Bytes, #[allow(dead_code)] Arc<()>);

impl AsRef<[u8]> for Tracked {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn old_weights_are_freed() {
    // On a level that multiplies blocks as they are given, the model holds on to the bytes it was fed.
    let revision = Revision::gguf("reference-gguf/llama-q8-0");
    let mut held: Vec<(String, Weak<()>)> = Vec::new();
    let mut fed = |want: &sterna_engine::plan::TensorRequest| {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let token = Arc::new(());
        held.push((want.name.clone(), Arc::downgrade(&token)));
        Bytes::from_owner(Tracked(revision.files[want.file].slice(range), token))
    };
    let mut loader = sterna_engine::Loader::new(revision.plan(), Cpu::new(2, Isa::SCALAR));
    while let Some(want) = loader.wanted() {
        let bytes = fed(want);
        loader.feed(bytes).unwrap();
    }
    let model = loader.finish().unwrap();
    let alive = |held: &[(String, Weak<()>)], part: &str| {
        let of_part = held.iter().filter(|(name, _)| name.starts_with(part));
        of_part
            .filter(|(_, token)| token.strong_count() > 0)
            .count()
    };
    let (ours, others) = (alive(&held, "blk.0."), alive(&held, "token_embd."));
    assert_eq!((ours, others), (7, 1));
    let mut session = Session::new(Arc::clone(&model), SessionOptions::new(64)).unwrap();
    session.forward(&ids(5), Logits::Last).unwrap();
    // While it is being loaded, and when it fails, all is there.
    let swap = Swap::new(&model, revision.plan(), &[Group::Layer(0)]).unwrap();
    assert!(matches!(
        swap.finish(),
        Err(SwapError::Load(LoadError::Incomplete { .. }))
    ));
    assert_eq!(alive(&held, "blk.0."), ours);
    revision
        .clone()
        .revised(Group::Layer(0))
        .swap(&model, &[Group::Layer(0)])
        .unwrap();
    assert_eq!(alive(&held, "blk.0."), 0);
    assert_eq!(alive(&held, "token_embd."), others);
    session.forward(&ids(5), Logits::Last).unwrap();
    drop((session, model));
    assert_eq!(alive(&held, ""), 0);
}
