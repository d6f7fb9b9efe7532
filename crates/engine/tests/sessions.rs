//! What must never change a logit: threads, instruction sets, chunks, forks, rollbacks.

use std::path::Path;
use std::sync::Arc;

use crate::common::{
    self, cpu, load, load_hf, load_with_prompt, logits, plan_gguf, plan_hf, testdata,
};
use sterna_engine::{CacheType, Cpu, EngineError, Logits, Model, Session, SessionOptions, Step};
use sterna_kernels::Isa;

const N_CTX: usize = 200;

fn bitllama() -> Arc<Model<Cpu>> {
    load_hf(&testdata().join("bitllama-3M/hf-packed"))
}

fn session(model: &Arc<Model<Cpu>>) -> Session<Cpu> {
    Session::new(Arc::clone(model), SessionOptions::new(N_CTX)).unwrap()
}

/// Ids that a model of 512 tokens knows, and that pages of the cache don't hold evenly.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + i * 37 % 500).collect()
}

#[test]
fn threads_and_instruction_sets_change_no_bit() {
    for dir in ["bitllama-3M/hf-packed", "stories260K/hf"] {
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            for n_threads in 1..=3 {
                let (plan, files) = plan_hf(&testdata().join(dir));
                let model = load(plan, &files, Cpu::new(n_threads, isa)).unwrap();
                let got = logits(&model, &ids(90), 64);
                assert_eq!(
                    *first.get_or_insert_with(|| got.clone()),
                    got,
                    "{dir}, {isa}, {n_threads} threads"
                );
            }
        }
    }
}

#[test]
fn chunks_change_no_bit() {
    let model = bitllama();
    let whole = logits(&model, &ids(130), 1000);
    for chunk in [1, 7, 64] {
        assert_eq!(whole, logits(&model, &ids(130), chunk), "chunks of {chunk}");
    }
}

/// Models whose layers have states, experts, latent attention and rotations that depend on the context's length.
#[test]
fn a_prompt_computed_while_weights_arrive_changes_no_bit() {
    let models = [
        "bitllama-3M/hf-packed",
        "reference-logits/bitnet-packed",
        "reference-logits/gemma3",
        "reference-logits/llama3-rope-scaled",
        "reference-logits/phi3",
        "reference-mixtures/hf/deepseek-v3",
        "reference-mixtures/hf/gpt-oss",
        "reference-states/hf/jamba",
        "reference-states/hf/mamba2",
        "reference-states/hf/qwen3.5",
        "reference-states/hf/rwkv7",
    ];
    let ids = few_ids(50);
    for name in models {
        let (plan, files) = plan_hf(&testdata().join(name));
        let model = load(plan.clone(), &files, cpu()).unwrap();
        let mut straight = session(&model);
        let want = straight.forward(&ids, Logits::Last).unwrap();
        let next = straight.forward(&[7, 8], Logits::All).unwrap();
        for (from, n_early, chunk) in [(0.0, 49, 512), (0.0, 1, 512), (0.6, 40, 30), (1.0, 49, 64)]
        {
            let options = SessionOptions {
                chunk,
                ..SessionOptions::new(N_CTX)
            };
            let prompt = (&ids[..n_early], options);
            let early = load_with_prompt(plan.clone(), &files, cpu(), from, prompt);
            let mut early = early.unwrap_or_else(|e| panic!("{name}: {e}"));
            let n = early.len();
            assert_eq!(n, n_early.min(chunk), "{name}");
            let found = early.forward(&ids[n..], Logits::Last).unwrap();
            assert_eq!(found, want, "{name}, {from}, {n_early}");
            let found = early.forward(&[7, 8], Logits::All).unwrap();
            assert_eq!(found, next, "{name}, {from}, {n_early}");
        }
    }
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_while_weights_arrive() {
    let (plan, files) = plan_hf(&testdata().join("bitllama-3M/hf-packed"));
    let error = |ids: &[u32]| {
        let prompt = (ids, SessionOptions::new(4));
        let early = load_with_prompt(plan.clone(), &files, cpu(), 0.0, prompt);
        early.map(|_| ()).unwrap_err().to_string()
    };
    for (ids, expected) in [
        (&[][..], "no tokens"),
        (&[1, 9999], "token id 9999 at index 1"),
        (&[1; 5], "context"),
    ] {
        let error = error(ids);
        assert!(
            error.starts_with("prompt: ") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn the_last_row_is_the_last_of_all_rows() {
    let model = bitllama();
    let ids = ids(70);
    let all = session(&model).forward(&ids, Logits::All).unwrap();
    let last = session(&model).forward(&ids, Logits::Last).unwrap();
    assert_eq!(last, all[all.len() - last.len()..]);
}

#[test]
fn truncation_forgets_exactly_the_tail() {
    let model = bitllama();
    let ids = ids(130);
    let mut once = session(&model);
    let want = once.forward(&ids, Logits::Last).unwrap();
    for kept in [0, 1, 63, 64, 65, 100] {
        let mut again = session(&model);
        again.forward(&ids, Logits::Last).unwrap();
        again.truncate(kept);
        assert_eq!(again.len(), kept);
        // A detour that must leave no trace.
        again.forward(&[5, 6, 7], Logits::Last).unwrap();
        again.truncate(kept);
        assert_eq!(again.forward(&ids[kept..], Logits::Last).unwrap(), want);
    }
}

#[test]
fn forks_share_a_prefix_and_nothing_else() {
    let model = bitllama();
    let ids = ids(130);
    let mut trunk = session(&model);
    trunk.forward(&ids[..100], Logits::Last).unwrap();
    let mut fork = trunk.fork(90);
    assert_eq!(fork.len(), 90);
    fork.forward(&[9, 8, 7], Logits::Last).unwrap();
    let other = fork.forward(&[6], Logits::Last).unwrap();
    // The trunk doesn't see what the fork wrote into pages they shared.
    let mut alone = session(&model);
    assert_eq!(
        trunk.forward(&ids[100..], Logits::Last).unwrap(),
        alone.forward(&ids, Logits::Last).unwrap()
    );
    // Nor the other way about.
    let mut straight = session(&model);
    straight.forward(&ids[..90], Logits::Last).unwrap();
    let want = straight.forward(&[9, 8, 7, 6], Logits::Last).unwrap();
    assert_eq!(other, want);
}

/// Models most of whose layers have a state, one for each kind.
fn stateful() -> [Arc<Model<Cpu>>; 8] {
    [
        "lfm2-moe",
        "qwen3.5-moe",
        "granite-hybrid",
        "jamba",
        "falcon-h1",
        "rwkv4",
        "rwkv6",
        "rwkv7",
    ]
    .map(|name| {
        let dir = testdata().join("reference-states/hf").join(name);
        load_hf(&dir)
    })
}

/// Ids of its vocabulary.
fn few_ids(n: usize) -> Vec<u32> {
    ids(n).into_iter().map(|id| id % 380).collect()
}

#[test]
fn states_are_truncated_to_a_checkpoint_and_give_the_bits_of_a_fresh_computation() {
    for model in stateful() {
        check_truncation(&model);
    }
}

fn check_truncation(model: &Arc<Model<Cpu>>) {
    let ids = few_ids(130);
    let want = session(model).forward(&ids, Logits::Last).unwrap();
    // Of tokens that follow one by one, the last stays, and one in sixteen.
    let one_by_one = [&[90][..], &[1; 20], &[20]].concat();
    for (parts, ends) in [
        (&[130][..], &[0, 130][..]),
        (&[50, 40, 40], &[0, 50, 90, 130]),
        (&[1, 1, 1, 60, 67], &[0, 3, 63, 130]),
        (&one_by_one, &[0, 90, 106, 110, 130]),
    ] {
        for kept in [0, 1, 50, 63, 89, 90, 108, 129, 130] {
            let mut again = session(model);
            let mut rest = &ids[..];
            for &n in parts {
                let part;
                (part, rest) = rest.split_at(n);
                again.forward(part, Logits::Last).unwrap();
            }
            let within = again.len_within(kept);
            again.truncate(kept);
            assert_eq!(again.len(), within);
            let checkpoint = ends.iter().filter(|end| **end <= kept).max();
            assert_eq!(Some(&again.len()), checkpoint, "{parts:?}, {kept}");
            let n = again.len();
            let mut fork = again.fork(n);
            again.forward(&[5, 6, 7], Logits::Last).unwrap();
            again.truncate(n);
            for session in [&mut again, &mut fork] {
                if n < ids.len() {
                    assert_eq!(session.forward(&ids[n..], Logits::Last).unwrap(), want);
                }
            }
        }
    }
}

#[test]
fn states_of_sequences_in_a_batch_are_their_own() {
    for model in stateful() {
        check_batches(&model);
    }
}

fn check_batches(model: &Arc<Model<Cpu>>) {
    let parts = [few_ids(40), few_ids(61)[30..].to_vec(), vec![9, 9]];
    let mut sessions: Vec<_> = parts.iter().map(|_| session(model)).collect();
    for chunk in 0..2 {
        let mut steps: Vec<_> = (sessions.iter_mut().zip(&parts))
            .map(|(session, ids)| {
                let (first, second) = ids.split_at(ids.len() / 2);
                Step {
                    session,
                    ids: [first, second][chunk],
                    logits: Logits::Last,
                }
            })
            .collect();
        let got = Session::forward_together(&mut steps).unwrap();
        for (got, ids) in got.iter().zip(&parts) {
            let end = [ids.len() / 2, ids.len()][chunk];
            let want = session(model).forward(&ids[..end], Logits::Last).unwrap();
            assert_eq!(*got, want);
        }
    }
}

/// However many chunks a call computes, and checkpoints with them, the sequence can go back to where it began.
#[test]
fn where_a_call_began_stays_a_checkpoint() {
    for model in stateful() {
        check_beginning(&model);
    }
}

fn check_beginning(model: &Arc<Model<Cpu>>) {
    let options = SessionOptions {
        chunk: 3,
        ..SessionOptions::new(N_CTX)
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(&few_ids(10), Logits::None).unwrap();
    // Dropped before it has begun.
    drop(session.forward_async(&few_ids(100), Logits::Last));
    assert_eq!(session.len(), 10);
    session.forward(&few_ids(100), Logits::None).unwrap();
    session.truncate(10);
    assert_eq!(session.len(), 10, "where the last call began");
}

#[test]
fn a_half_precision_cache_stays_close() {
    let model = load_hf(&testdata().join("stories260K/hf"));
    let mut half = Session::new(
        Arc::clone(&model),
        SessionOptions {
            cache: Some(CacheType::F16),
            ..SessionOptions::new(N_CTX)
        },
    )
    .unwrap();
    let ids = ids(130);
    let half = half.forward(&ids, Logits::All).unwrap();
    let full = session(&model).forward(&ids, Logits::All).unwrap();
    // Keys and values lose up to 2^-11 of themselves; logits here are within ±15.
    let difference = common::max_difference(&half, &full);
    assert!(difference > 0.0 && difference < 0.05, "{difference}");
}

#[test]
fn bad_input_is_named_and_leaves_the_session_as_it_was() {
    let model = bitllama();
    let mut session = session(&model);
    session.forward(&ids(10), Logits::Last).unwrap();
    assert!(matches!(
        session.forward(&[], Logits::Last),
        Err(EngineError::Empty)
    ));
    assert!(matches!(
        session.forward(&[1, 512], Logits::Last),
        Err(EngineError::UnknownToken {
            id: 512,
            index: 1,
            n_vocab: 512
        })
    ));
    assert!(matches!(
        session.forward(&ids(191), Logits::Last),
        Err(EngineError::ContextFull {
            len: 10,
            more: 191,
            ctx_len: 200
        })
    ));
    assert_eq!(session.len(), 10);
    assert!(session.forward(&ids(190), Logits::Last).is_ok());
}

/// Every storage of one ternary model gives the same bits where the stored scales are the same. Of these
/// one is repacked, the other is used in place.
#[test]
fn storage_of_the_same_trits_does_not_matter() {
    let path = |name: &str| testdata().join("bitllama-3M").join(name);
    let run = |path: &Path| {
        let (plan, files) = plan_gguf(&[path.to_owned()]);
        let model = load(plan, &files, common::cpu()).unwrap();
        logits(&model, &ids(60), 1000)
    };
    assert_eq!(
        run(&path("bitllama-3M-tq1_0.gguf")),
        run(&path("bitllama-3M-tq2_0.gguf"))
    );
}

/// What a plan says a model will hold is what decoding reads, whatever the file holds.
#[test]
fn memory_is_counted_in_the_form_that_is_computed_with() {
    let dir = testdata().join("bitllama-3M");
    let held = |plan: sterna_engine::ModelPlan| plan.memory_bytes();
    let packed = held(plan_hf(&dir.join("hf-packed")).0);
    let gguf = |name| plan_gguf(&[dir.join(format!("bitllama-3M-{name}.gguf"))]).0;
    for name in ["f16", "tq1_0"] {
        let plan = gguf(name);
        assert_ne!(plan.weight_bytes(), plan.memory_bytes(), "{name}");
        // The embedding table is f16 in these and f32 there.
        let table = 512 * 256 * 2;
        assert_eq!(held(plan) + table, packed, "{name}");
    }
    // Blocks of TQ2_0 stay where they are.
    let plan = gguf("tq2_0");
    assert_eq!(plan.weight_bytes(), plan.memory_bytes());
}

/// The keys of latent attention are its values: a cache has one vector of a rotated part and a latent one for each
/// position and layer.
#[test]
fn latent_vectors_are_kept_once() {
    for name in ["deepseek-v2", "deepseek-v3"] {
        let dir = testdata().join("reference-mixtures/hf").join(name);
        let (plan, _) = plan_hf(&dir);
        let model = load_hf(&dir);
        let (n_layers, head_dim) = (3, 16 + 32);
        for cache in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
            let of_position = n_layers * cache.head_bytes(head_dim);
            assert_eq!(plan.cache_bytes(100, cache), 100 * of_position as u64);
            // What is saved is what is there, in pages of 64 positions.
            let options = SessionOptions {
                cache: Some(cache),
                ..SessionOptions::new(N_CTX)
            };
            let mut session = Session::new(Arc::clone(&model), options).unwrap();
            let empty = saved(&mut session).len();
            session.forward(&few_ids(65), Logits::None).unwrap();
            let file = saved(&mut session);
            assert_eq!(file.len() - empty, 128 * of_position);
            // One with values beside the keys, as there was before, isn't taken for it.
            let at = 6 * 8;
            assert_eq!(file[at..at + 4], *b"kpag");
            let mut former = file.clone();
            former[at..at + 4].copy_from_slice(b"page");
            let error = session.restore(&mut &former[..]).unwrap_err().to_string();
            assert!(
                error.contains("form of a layer: expected kpag, found page"),
                "{error}"
            );
            assert!(session.is_empty());
            session.restore(&mut &file[..]).unwrap();
        }
    }
}

/// Several sequences of different lengths, run in batches with one another and each by itself.
fn check_together(model: &Arc<Model<Cpu>>, name: &str) {
    let n_vocab = model.config().n_vocab as u32;
    let ids: Vec<u32> = (0..90u32).map(|i| (3 + i * 37) % n_vocab).collect();
    let prompts = [&ids[..70], &ids[5..6], &ids[20..83], &ids[..3]];
    let options = SessionOptions::new(N_CTX);
    let new = || Session::new(Arc::clone(model), options).unwrap();
    let mut alone: Vec<_> = prompts.iter().map(|_| new()).collect();
    let mut together: Vec<_> = prompts.iter().map(|_| new()).collect();
    // Prompts with prompts, then single tokens, then a part of a prompt among single tokens.
    let next = [[80u32, 81, 82, 83], [9, 10, 11, 12]].map(|row| row.map(|id| id % n_vocab));
    let rounds: [Vec<(&[u32], Logits)>; 3] = [
        prompts.iter().map(|ids| (*ids, Logits::All)).collect(),
        next[0].chunks(1).map(|id| (id, Logits::Last)).collect(),
        vec![
            (&next[1][..1], Logits::Last),
            (&ids[..9], Logits::None),
            (&next[1][..3], Logits::Last),
            (&next[1][1..], Logits::All),
        ],
    ];
    for (round, inputs) in rounds.iter().enumerate() {
        let steps = together.iter_mut().zip(inputs);
        let mut steps: Vec<_> = steps
            .map(|(session, &(ids, logits))| Step {
                session,
                ids,
                logits,
            })
            .collect();
        let found = Session::forward_together(&mut steps).unwrap();
        for (i, (&(ids, logits), session)) in inputs.iter().zip(&mut alone).enumerate() {
            let expected = session.forward(ids, logits).unwrap();
            assert!(found[i] == expected, "{name}: round {round}, sequence {i}");
            assert_eq!(together[i].len(), session.len());
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_meet() {
    for folder in [
        "reference-logits",
        "reference-variants",
        "reference-layers/hf",
    ] {
        for entry in std::fs::read_dir(testdata().join(folder)).unwrap() {
            let dir = entry.unwrap().path();
            if dir.join("config.json").exists() {
                check_together(&load_hf(&dir), &dir.display().to_string());
            }
        }
    }
    check_together(&bitllama(), "bitllama");
    for name in [
        "llama-q4-k-m",
        "llama-q6-k",
        "llama-q8-0",
        "qwen3-q1-0",
        "bitnet-25-i2-s",
    ] {
        let files = common::files(&testdata().join("reference-gguf").join(name), "gguf");
        check_together(&common::load_gguf_parts(&files), name);
    }
}

#[test]
fn a_batch_that_fails_changes_no_sequence() {
    let (model, other) = (bitllama(), bitllama());
    let (mut a, mut b) = (session(&model), session(&model));
    a.forward(&ids(10), Logits::None).unwrap();
    let mut try_with = |b: &mut Session<Cpu>, ids: &[u32]| {
        let mut steps = [(&mut a, &[5u32][..]), (b, ids)].map(|(session, ids)| Step {
            session,
            ids,
            logits: Logits::Last,
        });
        let result = Session::forward_together(&mut steps);
        assert_eq!(a.len(), 10);
        result.unwrap_err()
    };
    assert!(matches!(
        try_with(&mut session(&other), &[1]),
        EngineError::OtherModel { index: 1 }
    ));
    assert!(matches!(try_with(&mut b, &[]), EngineError::Empty));
    assert!(matches!(
        try_with(&mut b, &[512]),
        EngineError::UnknownToken { id: 512, .. }
    ));
    assert!(matches!(
        try_with(&mut b, &ids(201)),
        EngineError::ContextFull { more: 201, .. }
    ));
    assert!(b.is_empty());
    assert!(
        Session::<Cpu>::forward_together(&mut [])
            .unwrap()
            .is_empty()
    );
}

#[test]
fn forks_share_the_memory_of_what_they_have_in_common() {
    for model in [bitllama(), load_hf(&testdata().join("stories260K/hf"))] {
        let mut first = session(&model);
        first.forward(&ids(100), Logits::None).unwrap();
        assert_eq!(first.share(), 100);
        let mut forks: Vec<_> = (0..3).map(|_| first.fork(90)).collect();
        // Two pages of 64 tokens that all four have.
        let all = |forks: &[Session<Cpu>]| forks.iter().map(Session::share).sum::<usize>();
        assert_eq!((first.share(), forks[0].share()), (16 + 9, 16 + 7));
        for (i, fork) in forks.iter_mut().enumerate() {
            fork.forward(&ids(10 + i), Logits::None).unwrap();
        }
        // Each has a second page of its own now.
        assert_eq!(first.share() + all(&forks), 64 + 36 + (36 + 37 + 38));
        drop(first);
        forks.truncate(1);
        assert_eq!(all(&forks), 100);
    }
}

/// What a session writes of itself.
fn saved(session: &mut Session<Cpu>) -> Vec<u8> {
    let mut file = Vec::new();
    session.save(&mut file).unwrap();
    file
}

#[test]
fn a_restored_sequence_goes_on_with_the_bits_of_the_saved_one() {
    let attending = [
        bitllama(),
        load_hf(&testdata().join("stories260K/hf")),
        load_hf(&testdata().join("reference-mixtures/hf/deepseek-v3")),
        load_hf(&testdata().join("reference-layers/hf/gemma4-sharing")),
    ];
    for model in attending.iter().chain(&stateful()) {
        for cache in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
            let options = SessionOptions {
                cache: Some(cache),
                ..SessionOptions::new(N_CTX)
            };
            let new = || Session::new(Arc::clone(model), options).unwrap();
            for len in [0, 1, 64, 129] {
                let ids = few_ids(len + 5);
                let mut first = new();
                // The last ones by themselves, as answers are.
                let (prompt, answer) = ids[..len].split_at(len.saturating_sub(5));
                for ids in std::iter::once(prompt).chain(answer.chunks(1)) {
                    if !ids.is_empty() {
                        first.forward(ids, Logits::None).unwrap();
                    }
                }
                let file = saved(&mut first);
                assert_eq!(first.len(), len);
                let mut second = new();
                // What it held before is gone.
                second.forward(&[1, 2, 3], Logits::None).unwrap();
                second.restore(&mut &file[..]).unwrap();
                assert_eq!(second.len(), len);
                let mut fork = second.fork(len);
                let want = first.forward(&ids[len..], Logits::All).unwrap();
                for session in [&mut second, &mut fork] {
                    assert_eq!(session.forward(&ids[len..], Logits::All).unwrap(), want);
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_not_restored() {
    let model = bitllama();
    let mut first = session(&model);
    first.forward(&ids(70), Logits::None).unwrap();
    let file = saved(&mut first);
    let refusal = |into: &mut Session<Cpu>, file: &[u8]| {
        let error = into.restore(&mut &file[..]).unwrap_err();
        assert!(into.is_empty());
        error.to_string()
    };
    // Cut off, or changed, anywhere.
    for len in (0..file.len()).step_by(997).chain([file.len() - 1]) {
        let message = refusal(&mut session(&model), &file[..len]);
        assert!(message.contains("expected more bytes"), "{len}: {message}");
    }
    for i in [0, 8, 16, 24, 32, 40, 48, 55, file.len() - 1] {
        let mut changed = file.clone();
        changed[i] ^= 0x40;
        let message = refusal(&mut session(&model), &changed);
        assert!(message.contains("expected"), "{i}: {message}");
    }
    // Of another type, for another context, for another model of the same shape.
    let options = SessionOptions {
        cache: Some(CacheType::F16),
        ..SessionOptions::new(N_CTX)
    };
    let mut other = Session::new(Arc::clone(&model), options).unwrap();
    let message = refusal(&mut other, &file);
    assert!(
        message.contains("type of the cache: expected 1, found 0"),
        "{message}"
    );
    let mut small = Session::new(Arc::clone(&model), SessionOptions::new(70)).unwrap();
    let message = refusal(&mut small, &file);
    assert!(
        message.contains("tokens: expected at most 69, found 70"),
        "{message}"
    );
    let message = refusal(
        &mut session(&load_hf(&testdata().join("stories260K/hf"))),
        &file,
    );
    assert!(message.contains("expected"), "{message}");
    let (plan, files) = plan_gguf(&[testdata().join("bitllama-3M/bitllama-3M-f16.gguf")]);
    let floats = load(plan, &files, Cpu::new(1, Isa::detect())).unwrap();
    let message = refusal(&mut session(&floats), &file);
    assert!(
        message.contains("another model, revision or adapter"),
        "{message}"
    );
    // A sequence without room for the token of the proof.
    let mut full = Session::new(Arc::clone(&model), SessionOptions::new(70)).unwrap();
    full.forward(&ids(70), Logits::None).unwrap();
    let error = full.save(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("context is full"), "{error}");
    assert_eq!(full.len(), 70);
}
