//! Ids and texts against those of the packages `tokenizers`, `sentencepiece` and `tiktoken`, written by
//! `testdata/tokenizers/make.py`.

use crate::common;
use serde::Deserialize;
use serde_json::Value;
use sterna_text::{Decode, Encode, Tokenizer};

#[derive(Deserialize)]
struct Expected {
    texts: Vec<String>,
    files: Vec<OfFile>,
    made_up: Vec<MadeUp>,
    n_short: usize,
    decoders: Vec<Decoder>,
}

#[derive(Deserialize)]
struct OfFile {
    file: String,
    ids: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct MadeUp {
    name: String,
    tokenizer: Value,
    ids: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Decoder {
    name: String,
    tokenizer: Value,
    ids: Vec<Vec<u32>>,
    texts: Vec<String>,
}

fn expected() -> Expected {
    serde_json::from_slice(&common::bytes("tokenizers/expected.json")).unwrap()
}

#[test]
fn real_tokenizers_on_awkward_random_and_plain_texts() {
    let expected = expected();
    let mut differences = Vec::new();
    for OfFile { file, ids } in &expected.files {
        let bytes = common::bytes(&format!("tokenizers/{file}"));
        let (tokenizer, options) = match file.rsplit('.').next() {
            Some("json") => (
                Tokenizer::from_hf_json(&bytes, None),
                Encode {
                    add_special: false,
                    parse_special: true,
                },
            ),
            Some("model") => (Tokenizer::from_sentencepiece(&bytes, None), Encode::PLAIN),
            _ => (Tokenizer::from_tiktoken(&bytes, None, None), Encode::PLAIN),
        };
        let tokenizer = tokenizer.unwrap();
        for (text, ids) in expected.texts.iter().zip(ids) {
            let found = tokenizer.encode(text, options).unwrap();
            if found != *ids {
                differences.push(format!(
                    "{file} {text:?}\n found    {found:?}\n expected {ids:?}"
                ));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differ\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[test]
fn every_component_of_tokenizer_json() {
    let expected = expected();
    let mut differences = Vec::new();
    for MadeUp {
        name,
        tokenizer,
        ids,
    } in &expected.made_up
    {
        let json = serde_json::to_vec(tokenizer).unwrap();
        let tokenizer =
            Tokenizer::from_hf_json(&json, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (text, ids) in expected.texts[..expected.n_short].iter().zip(ids) {
            let found = tokenizer.encode(
                text,
                Encode {
                    add_special: true,
                    parse_special: true,
                },
            );
            if found.as_ref().ok() != Some(ids) {
                differences.push(format!(
                    "{name} {text:?}\n found    {found:?}\n expected {ids:?}"
                ));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differ\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[test]
fn every_decoder_of_tokenizer_json() {
    let mut differences = Vec::new();
    for Decoder {
        name,
        tokenizer,
        ids,
        texts,
    } in expected().decoders
    {
        let json = serde_json::to_vec(&tokenizer).unwrap();
        let tokenizer =
            Tokenizer::from_hf_json(&json, None).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (ids, text) in ids.iter().zip(&texts) {
            let mut stream = tokenizer.stream(Decode::default());
            let mut streamed: String = ids.iter().map(|id| stream.push(*id)).collect();
            streamed.push_str(&stream.finish());
            let found = tokenizer.decode(ids, Decode::default());
            if found != *text || streamed != *text {
                differences.push(format!(
                    "{name} {ids:?}: {found:?}, streamed {streamed:?}, expected {text:?}"
                ));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differ\n{}",
        differences.len(),
        differences.join("\n")
    );
}
