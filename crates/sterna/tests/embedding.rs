//! Vectors of texts against those of Transformers and Sentence Transformers (`testdata/embeddings`).

use crate::common;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::embedding::{Embedder, Pooling, embed};
use sterna_engine::{Backend, Cpu, Model, Session, SessionOptions};
use sterna_format::TensorCatalog;
use sterna_format::safetensors::{self, SafeTensors};

fn data(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/embeddings");
    root.join(name)
}

/// What the reference gave.
struct Reference {
    catalog: TensorCatalog,
    bytes: Vec<u8>,
}

impl Reference {
    fn of(model: &str) -> Reference {
        let bytes = fs::read(data(model).join("reference.safetensors")).unwrap();
        let header = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
        let catalog = safetensors::merge(vec![("reference", header)], None).unwrap();
        Reference { catalog, bytes }
    }

    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let entry = self.catalog.get(name).unwrap_or_else(|| panic!("{name}"));
        let range = entry.offset as usize..(entry.offset + entry.len) as usize;
        self.bytes[range].as_chunks().0.to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name)
            .into_iter()
            .map(f32::from_le_bytes)
            .collect()
    }

    fn ids(&self, text: usize) -> Vec<u32> {
        let words = self.words(&format!("input_ids.{text}"));
        words.into_iter().map(u32::from_le_bytes).collect()
    }
}

fn session(model: &Arc<Model<Cpu>>, chunk: usize) -> Session<Cpu> {
    let options = SessionOptions {
        chunk,
        ..SessionOptions::new(64)
    };
    Session::new(Arc::clone(model), options).unwrap()
}

fn vector(session: &mut Session<Cpu>, ids: &[u32], pooling: Pooling) -> Vec<f32> {
    let model = Arc::clone(session.model());
    let vector = embed(session, ids, pooling, true);
    model.backend().wait(vector).unwrap().unwrap()
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn hidden_states_and_vectors_are_those_of_the_reference() {
    agrees_with_reference("qwen3", Pooling::Last, &[64, 7, 1]);
}

/// Every position attends to all, so texts are one chunk whatever is asked for.
#[test]
fn encoders_give_what_the_reference_gives() {
    agrees_with_reference("bert", Pooling::First, &[64, 7]);
}

fn agrees_with_reference(name: &str, pooling: Pooling, chunks: &[usize]) {
    let reference = Reference::of(name);
    let folder = data(name);
    let said = fs::read(folder.join("pooling.json")).unwrap();
    assert_eq!(Pooling::of_checkpoint(&said).unwrap(), pooling);
    for model in [
        common::checkpoint(&folder),
        common::gguf(&data(&format!("{name}.gguf"))),
    ] {
        let dim = model.config().model_dim;
        for &chunk in chunks {
            let mut session = session(&model, chunk);
            for text in 0..3 {
                let ids = reference.ids(text);
                session.truncate(0);
                let hidden = session.hidden(&ids).unwrap();
                assert_eq!(session.len(), ids.len());
                let want = reference.floats(&format!("hidden.{text}"));
                let difference = max_difference(&hidden, &want);
                assert!(difference < 1e-3, "{chunk}, {text}: {difference}");
                for (name, pooling) in Pooling::NAMES {
                    let want = reference.floats(&format!("embeddings.{name}"));
                    let vector = vector(&mut session, &ids, pooling);
                    let difference = max_difference(&vector, &want[text * dim..][..dim]);
                    assert!(difference < 1e-3, "{chunk}, {text}, {name}: {difference}");
                }
            }
        }
    }
}

/// Every linear layer has a norm of its own, and int8 activations.
#[test]
fn vectors_of_ternary_models_point_where_those_of_the_reference_do() {
    let reference = Reference::of("bitnet-qwen3");
    let folder = data("bitnet-qwen3");
    for model in [
        common::checkpoint(&folder),
        common::gguf(&data("bitnet-qwen3.gguf")),
    ] {
        let dim = model.config().model_dim;
        let mut session = session(&model, 64);
        for text in 0..3 {
            let ids = reference.ids(text);
            for (name, pooling) in Pooling::NAMES {
                let want = reference.floats(&format!("embeddings.{name}"));
                let vector = vector(&mut session, &ids, pooling);
                let of_reference = &want[text * dim..][..dim];
                let cosine: f32 = vector.iter().zip(of_reference).map(|(a, b)| a * b).sum();
                assert!(cosine > 0.999, "{text}, {name}: {cosine}");
            }
        }
    }
}

/// Encoders read whole texts, as many positions as they have embeddings of, and continue none.
#[test]
fn encoders_refuse_what_they_cannot_do() {
    let model = common::checkpoint(&data("bert"));
    let mut session = session(&model, 64);
    let error = session.forward(&[1, 2], sterna_engine::Logits::Last);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("found an encoder (bert)"), "{error}");
    session.hidden(&[1, 2]).unwrap();
    let error = session.hidden(&[3]).unwrap_err().to_string();
    assert!(error.contains("found one of 2 tokens"), "{error}");
    session.truncate(0);
    let long = SessionOptions::new(4096);
    let mut long = Session::new(Arc::clone(&model), long).unwrap();
    assert_eq!(long.ctx_len(), model.config().max_ctx);
    assert!(long.hidden(&vec![1; 65]).is_err());
    let batch = |session| sterna_engine::Step {
        session,
        ids: &[1],
        logits: sterna_engine::Logits::None,
    };
    assert!(Session::forward_together(&mut [batch(&mut session)]).is_err());
    assert_eq!(session.len(), 0);
}

/// Parts of long texts, several short texts, and both of them: the vectors are those of each text alone.
#[test]
fn texts_in_parts_and_together_have_the_same_vectors() {
    for name in ["qwen3", "bitnet-qwen3", "bert"] {
        let model = common::checkpoint(&data(name));
        let reference = Reference::of(name);
        let texts = [0, 1, 2, 1, 0].map(|text| reference.ids(text));
        for (_, pooling) in Pooling::NAMES {
            let mut alone = session(&model, 64);
            let expected = texts.each_ref().map(|ids| vector(&mut alone, ids, pooling));
            for n_tokens in [1, 2, 7, 16, 30, 500] {
                let mut embedder = Embedder::new(session(&model, 64), pooling, true);
                let (mut left, mut vectors) = (&texts[..], Vec::new());
                let (mut n_parts, mut n_tokens_left) = (0, usize::MAX);
                while !left.is_empty() {
                    let part = embedder.advance(left, n_tokens);
                    let new = model.backend().wait(part).unwrap().unwrap();
                    left = &left[new.len()..];
                    vectors.extend(new);
                    n_parts += 1;
                    let n_left = left.iter().map(Vec::len).sum::<usize>() - embedder.n_begun();
                    assert!(n_left < n_tokens_left, "each part is some of it");
                    n_tokens_left = n_left;
                }
                assert!(
                    vectors == expected,
                    "{name}, {}, {n_tokens}",
                    pooling.name()
                );
                match n_tokens {
                    1 if name != "bert" => {
                        assert_eq!(n_parts, texts.iter().map(Vec::len).sum::<usize>());
                    }
                    500 => assert_eq!(n_parts, 1),
                    _ => {}
                }
            }
        }
    }
}

/// Texts of several, of which each has its own pooling: all that there is room for are computed at once.
#[test]
fn several_have_the_vectors_of_their_texts() {
    for name in ["qwen3", "bert"] {
        let model = common::checkpoint(&data(name));
        let reference = Reference::of(name);
        let texts = [0, 1, 2].map(|text| reference.ids(text));
        let [a, b, c] = texts.each_ref().map(Clone::clone);
        let of_each = [
            (Pooling::Mean, vec![a.clone(), b.clone()]),
            (Pooling::Last, vec![c.clone()]),
            (Pooling::First, vec![b, a, c]),
        ];
        for n_tokens in [1, 12, 30, 500] {
            let mut embedders = of_each
                .each_ref()
                .map(|(pooling, _)| Embedder::new(session(&model, 64), *pooling, true));
            let mut left = of_each.each_ref().map(|(_, texts)| texts.clone());
            let mut vectors: [Vec<Vec<f32>>; 3] = Default::default();
            let mut n_parts = 0;
            while let Some(first) = left.iter().position(|texts| !texts.is_empty()) {
                let of = embedders.iter_mut().zip(&left).skip(first);
                let mut of: Vec<_> = of.map(|(embedder, texts)| (embedder, &texts[..])).collect();
                let part = Embedder::advance_together(&mut of, n_tokens);
                let part = model.backend().wait(part).unwrap().unwrap();
                for (i, new) in part.into_iter().enumerate() {
                    left[first + i].drain(..new.len());
                    vectors[first + i].extend(new);
                }
                n_parts += 1;
            }
            for ((pooling, texts), vectors) in of_each.iter().zip(vectors) {
                let mut alone = session(&model, 64);
                let expected: Vec<_> = (texts.iter())
                    .map(|ids| vector(&mut alone, ids, *pooling))
                    .collect();
                assert!(vectors == expected, "{name} {n_tokens}");
            }
            assert!(n_tokens < 500 || n_parts == 1, "{name}: {n_parts}");
        }
    }
}

/// What is wrong is told, and the text begins anew.
#[test]
fn texts_begin_anew_after_an_error() {
    let model = common::checkpoint(&data("qwen3"));
    let ids = Reference::of("qwen3").ids(1);
    let expected = vector(&mut session(&model, 64), &ids, Pooling::Mean);
    let mut embedder = Embedder::new(session(&model, 64), Pooling::Mean, true);
    let mut advance = |ids: &[u32], n_tokens| {
        let texts = [ids.to_vec()];
        let backend = model.backend();
        backend.wait(embedder.advance(&texts, n_tokens)).unwrap()
    };
    assert!(advance(&ids, 2).unwrap().is_empty());
    let mut wrong = ids.clone();
    wrong[3] = u32::MAX;
    assert!(advance(&wrong, 2).is_err());
    assert!(advance(&[], 2).is_err());
    let mut vectors = Vec::new();
    while vectors.is_empty() {
        vectors = advance(&ids, 3).unwrap();
    }
    assert_eq!(vectors, [expected]);
}

/// After hidden states were asked for, logits are those of a fresh sequence.
#[test]
fn hidden_states_leave_the_session_usable() {
    let model = common::checkpoint(&data("qwen3"));
    let ids = Reference::of("qwen3").ids(1);
    let mut fresh = session(&model, 64);
    let want = fresh.forward(&ids, sterna_engine::Logits::Last).unwrap();
    let mut used = session(&model, 64);
    used.hidden(&ids[..5]).unwrap();
    let got = used
        .forward(&ids[5..], sterna_engine::Logits::Last)
        .unwrap();
    assert_eq!(got, want);
    assert!(used.hidden(&[]).is_err());
    assert!(used.hidden(&[0; 64]).is_err());
    assert_eq!(used.len(), ids.len());
}
