//! Tokenizers written in the words of GGUF encode as they did.

use crate::common;
use sterna_format::gguf::{Array, Metadata, Value};
use sterna_format::hf::TokenizerConfig;
use sterna_text::{Decode, Encode, GgufTokenizer, Tokenizer};

/// What a file of a model of `architecture` would be read as.
fn read(written: &GgufTokenizer, architecture: &str) -> Tokenizer {
    let mut metadata = Metadata::new();
    let architecture = Value::String(architecture.into());
    metadata
        .insert("general.architecture", architecture)
        .unwrap();
    for (key, value) in &written.entries {
        metadata.insert(key.as_str(), value.clone()).unwrap();
    }
    Tokenizer::from_gguf(&metadata).unwrap()
}

/// The value under a key that has one.
fn word<'a>(written: &'a GgufTokenizer, key: &str) -> &'a Value {
    let found = written.entries.iter().find(|(of, _)| of == key);
    &found.unwrap_or_else(|| panic!("{key}")).1
}

/// The texts that ids are recorded for.
fn texts() -> Vec<String> {
    let mut texts: Vec<String> = common::text("tokenizers/kitoken/small_input.txt")
        .lines()
        .map(|line| line.replace("\\n", "\n").replace("\\s", " "))
        .collect();
    texts.push(common::text("tokenizers/kitoken/utf8_input.txt"));
    let expected: serde_json::Value =
        serde_json::from_slice(&common::bytes("tokenizers/expected.json")).unwrap();
    let listed = expected["texts"].as_array().unwrap();
    texts.extend(listed.iter().map(|text| text.as_str().unwrap().to_owned()));
    texts
}

/// What the source does to texts that GGUF has no words for.
#[derive(Clone, Copy, PartialEq)]
enum Beyond {
    Nothing,
    /// It composes them first.
    Composing,
    /// A space that they begin with is the mark of their first word.
    FirstSpace,
}

fn check(name: &str, tokenizer: &Tokenizer, pre: &str, beyond: Beyond) {
    let n_vocab = tokenizer.n_vocab() + 3;
    let written = tokenizer.to_gguf("llama", n_vocab).unwrap();
    assert_eq!(
        word(&written, "tokenizer.ggml.pre"),
        &Value::String(pre.into()),
        "{name}"
    );
    let n_remarks = usize::from(beyond != Beyond::Nothing);
    assert_eq!(
        written.remarks.len(),
        n_remarks,
        "{name}: {:?}",
        written.remarks
    );
    let again = read(&written, "llama");
    assert_eq!(again.n_vocab(), n_vocab, "{name}");
    assert_eq!(
        (again.bos(), again.eos()),
        (tokenizer.bos(), tokenizer.eos()),
        "{name}"
    );
    let (mut n, mut other) = (0, 0);
    for text in texts() {
        for options in [Encode::TEXT, Encode::PLAIN] {
            let ids = tokenizer.encode(&text, options).unwrap();
            let found = again.encode(&text, options).unwrap();
            let is_same = match beyond {
                Beyond::Nothing => true,
                Beyond::Composing => false,
                Beyond::FirstSpace => !text.starts_with([' ', '▁']),
            };
            if is_same {
                assert_eq!(found, ids, "{name}: {text:?}");
            }
            other += usize::from(found != ids);
            let decode = Decode {
                skip_special: false,
            };
            if found == ids {
                assert_eq!(
                    again.decode(&ids, decode),
                    tokenizer.decode(&ids, decode),
                    "{name}"
                );
            }
            n += 1;
        }
    }
    println!("{name}: {other} of {n} texts differ");
    assert!(n > 150 && other * 2 < n, "{name}: {other} of {n}");
}

#[test]
fn hugging_face_files() {
    for (name, pre, beyond) in [
        ("gpt2", "gpt-2", Beyond::Nothing),
        ("gpt_neox", "gpt-2", Beyond::Composing),
        ("mistral01", "default", Beyond::FirstSpace),
        ("mistral03", "default", Beyond::FirstSpace),
    ] {
        let json = common::bytes(&format!("tokenizers/kitoken/tokenizers/{name}.json"));
        check(
            name,
            &Tokenizer::from_hf_json(&json, None).unwrap(),
            pre,
            beyond,
        );
    }
}

#[test]
fn sentencepiece_models() {
    for name in ["mistral01", "mistral03"] {
        let model = common::bytes(&format!("tokenizers/kitoken/sentencepiece/{name}.model"));
        check(
            name,
            &Tokenizer::from_sentencepiece(&model, None).unwrap(),
            "default",
            Beyond::Nothing,
        );
    }
}

#[test]
fn tiktoken_files() {
    for (name, pre) in [
        ("cl100k_base", "llama-bpe"),
        ("o200k_base", "gpt-4o"),
        ("p50k_base", "gpt-2"),
    ] {
        let file = common::bytes(&format!("tokenizers/kitoken/tiktoken/{name}.tiktoken"));
        check(
            name,
            &Tokenizer::from_tiktoken(&file, None, None).unwrap(),
            pre,
            Beyond::Nothing,
        );
    }
}

#[test]
fn roles_and_types() {
    let json = common::bytes("tokenizers/kitoken/tokenizers/mistral01.json");
    let config = r#"{"bos_token":"<s>","eos_token":"</s>","unk_token":"<unk>","pad_token":"</s>",
        "add_bos_token":false,"add_eos_token":true}"#;
    let config = TokenizerConfig::parse(config.as_bytes()).unwrap();
    let tokenizer = Tokenizer::from_hf_json(&json, Some(&config)).unwrap();
    // Fewer embeddings than tokens: what the model can't take is left out.
    let written = tokenizer.to_gguf("llama", 31_999).unwrap();
    for (key, value) in [
        ("model", Value::String("llama".into())),
        ("bos_token_id", Value::U32(1)),
        ("eos_token_id", Value::U32(2)),
        ("unknown_token_id", Value::U32(0)),
        ("padding_token_id", Value::U32(2)),
        ("add_bos_token", Value::Bool(false)),
        ("add_eos_token", Value::Bool(true)),
        ("add_space_prefix", Value::Bool(true)),
    ] {
        assert_eq!(word(&written, &format!("tokenizer.ggml.{key}")), &value);
    }
    let left_out = "1 ids that the model has no embeddings for are left out";
    assert_eq!(written.remarks.last().unwrap(), left_out);
    let again = read(&written, "llama");
    assert_eq!(again.n_vocab(), 31_999);
    assert_eq!(again.special_tokens(), tokenizer.special_tokens());
}

#[test]
fn what_gguf_has_no_words_for_is_refused() {
    for (json, expected) in [
        (
            r#"{"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#,
            "tokenizer model: GGUF can't express WordLevel",
        ),
        (
            r#"{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true},
                "model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
            "tokenizer pre_tokenizer: GGUF can't express ByteLevel { add_prefix_space: true",
        ),
        (
            r#"{"pre_tokenizer":{"type":"Sequence","pretokenizers":[
                {"type":"Split","pattern":{"Regex":"a+|b"},"behavior":"Isolated"},
                {"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},
                "model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
            "tokenizer pre_tokenizer: GGUF can't express `a+|b`",
        ),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
            "tokenizer pre_tokenizer: GGUF can't express text taken as it is",
        ),
    ] {
        let tokenizer = Tokenizer::from_hf_json(json.as_bytes(), None).unwrap();
        let error = tokenizer.to_gguf("llama", 10).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

/// Gemma 4's files have marked spaces and byte tokens as SentencePiece's, and a table of merges.
#[test]
fn marked_spaces_are_merged_by_a_table() {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let mut tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>"]
        .map(str::to_owned)
        .to_vec();
    tokens.extend(bytes);
    for piece in [
        "▁", "a", "b", "c", "\n", "ab", "bc", "▁a", "▁ab", "\n\n", "abc", "▁▁",
    ] {
        tokens.push(piece.to_owned());
    }
    // Not in the order of ids, and none that makes `▁ab` of `▁` and `ab`.
    let merges = ["b c", "a bc", "▁ ▁", "▁ a", "a b", "▁a b", "\n \n"];

    let vocab: serde_json::Map<String, serde_json::Value> = tokens
        .iter()
        .cloned()
        .zip((0..).map(serde_json::Value::from))
        .collect();
    let special = |id: u32| {
        serde_json::json!({"id": id, "content": tokens[id as usize], "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
    };
    let json = serde_json::json!({
        "added_tokens": (0..4).map(special).collect::<Vec<_>>(),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": merges},
    });
    let json = Tokenizer::from_hf_json(&serde_json::to_vec(&json).unwrap(), None).unwrap();

    let mut metadata = Metadata::new();
    let strings = |texts: Vec<String>| {
        Value::Array(Array::String(texts.iter().map(String::as_str).collect()))
    };
    let types = (0..tokens.len()).map(|id| match id {
        0..3 => 3,
        3 => 2,
        4..260 => 6,
        _ => 1,
    });
    for (key, value) in [
        ("general.architecture", Value::String("gemma4".into())),
        ("tokenizer.ggml.model", Value::String("gemma4".into())),
        (
            "tokenizer.ggml.token_type",
            Value::Array(Array::I32(types.collect())),
        ),
        (
            "tokenizer.ggml.scores",
            Value::Array(Array::F32(vec![-1000.0; tokens.len()])),
        ),
        (
            "tokenizer.ggml.merges",
            strings(merges.map(str::to_owned).to_vec()),
        ),
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.bos_token_id", Value::U32(2)),
        ("tokenizer.ggml.add_space_prefix", Value::Bool(false)),
    ] {
        metadata.insert(key, value).unwrap();
    }
    let gguf = Tokenizer::from_gguf(&metadata).unwrap();
    let plain = Encode {
        add_special: false,
        parse_special: false,
    };
    for text in [
        "abc",
        " abc",
        " ab",
        "  ab  c",
        "a\n\n\nb",
        "a b c",
        "héllo <eos>",
        "",
        " ",
    ] {
        let (found, expected) = (gguf.encode(text, plain), json.encode(text, plain));
        assert_eq!(found.unwrap(), expected.unwrap(), "{text:?}");
    }
    let ids = gguf.encode(" ab\n", plain).unwrap();
    assert_eq!(gguf.decode(&ids, Decode::default()), " ab\n");
}
