//! Ids and texts of real tokenizers against those recorded from the reference implementations.

use crate::common;
use sterna_format::gguf::Gguf;
use sterna_format::hf::TokenizerConfig;
use sterna_text::{Decode, Encode, Tokenizer};

/// The cases of a file of kitoken's: `small` has one a line with line breaks and final spaces escaped, `utf8` is one case.
fn cases(size: &str, file: &str) -> Vec<String> {
    let text = common::text(&format!("tokenizers/kitoken/{file}"));
    match size {
        "small" => text
            .lines()
            .map(|line| line.replace("\\n", "\n").replace("\\s", " "))
            .collect(),
        _ => vec![text],
    }
}

/// Checks the small and the large case file of kitoken: every case, both ways.
fn check(folder: &str, name: &str, tokenizer: &Tokenizer, options: Encode) {
    for size in ["small", "utf8"] {
        let inputs = cases(size, &format!("{size}_input.txt"));
        let expected = common::id_lists(&format!(
            "tokenizers/kitoken/{folder}/{size}_tokens_{name}.txt"
        ));
        let recorded = format!("{folder}/{size}_output_{name}.txt");
        let has_recorded = common::path(&format!("tokenizers/kitoken/{recorded}")).exists();
        let outputs = if has_recorded {
            cases(size, &recorded)
        } else {
            inputs.clone()
        };
        assert_eq!(
            (inputs.len(), inputs.len()),
            (expected.len(), outputs.len()),
            "{name} {size}"
        );
        for (line, (input, ids)) in inputs.iter().zip(&expected).enumerate() {
            let found = tokenizer.encode(input, options).unwrap();
            assert_eq!(&found, ids, "{name} {size} line {}: {input:?}", line + 1);
            assert_eq!(
                tokenizer.decode(ids, Decode::default()),
                outputs[line],
                "{name} {size} line {}",
                line + 1
            );
        }
    }
}

#[test]
fn hugging_face_json() {
    for name in ["gpt2", "gpt_neox", "mistral01", "mistral03", "modernbert"] {
        let json = common::bytes(&format!("tokenizers/kitoken/tokenizers/{name}.json"));
        check(
            "tokenizers",
            name,
            &Tokenizer::from_hf_json(&json, None).unwrap(),
            Encode::TEMPLATE,
        );
    }
}

#[test]
fn sentencepiece_models() {
    for name in ["mistral01", "mistral03"] {
        let model = common::bytes(&format!("tokenizers/kitoken/sentencepiece/{name}.model"));
        check(
            "sentencepiece",
            name,
            &Tokenizer::from_sentencepiece(&model, None).unwrap(),
            Encode::PLAIN,
        );
    }
}

#[test]
fn tiktoken_files() {
    for name in ["cl100k_base", "o200k_base", "p50k_base"] {
        let file = common::bytes(&format!("tokenizers/kitoken/tiktoken/{name}.tiktoken"));
        check(
            "tiktoken",
            name,
            &Tokenizer::from_tiktoken(&file, None, None).unwrap(),
            Encode::TEMPLATE,
        );
    }
}

fn from_gguf(name: &str) -> Tokenizer {
    let file = common::bytes(name);
    Tokenizer::from_gguf(Gguf::parse(&file, file.len() as u64).unwrap().metadata()).unwrap()
}

/// llama.cpp's own vocabulary tests: inputs separated by a line, ids one list a line.
#[test]
fn gguf_vocabularies() {
    for name in ["gpt-2", "falcon", "phi-3", "mpt", "bert-bge"] {
        let tokenizer = from_gguf(&format!(
            "tokenizers/llama.cpp-vocab/ggml-vocab-{name}.gguf"
        ));
        let file = format!("tokenizers/llama.cpp-vocab/ggml-vocab-{name}.gguf");
        let inputs = common::text(&format!("{file}.inp"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs = common::text(&format!("{file}.out"));
        let outputs: Vec<&str> = outputs.lines().collect();
        assert!(
            inputs.len() > 40 && outputs.len() >= inputs.len() - 1,
            "{name}"
        );
        for (input, output) in inputs.iter().zip(&outputs) {
            let ids: Vec<u32> = output
                .split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect();
            assert_eq!(
                tokenizer.encode(input, Encode::PLAIN).unwrap(),
                ids,
                "{name}: {input:?}"
            );
            if name != "bert-bge" {
                assert_eq!(tokenizer.decode(&ids, Decode::default()), *input, "{name}");
            }
        }
    }
}

/// One vocabulary in three files: SentencePiece, GGUF and `tokenizer.json`.
#[test]
fn forms_of_one_tokenizer_agree() {
    let config =
        TokenizerConfig::parse(&common::bytes("stories260K/hf/tokenizer_config.json")).unwrap();
    let json = common::bytes("stories260K/hf/tokenizer.json");
    let forms = [
        Tokenizer::from_sentencepiece(&common::bytes("stories260K/tok512.model"), None).unwrap(),
        from_gguf("stories260K/stories260K-f32.gguf"),
        Tokenizer::from_hf_json(&json, Some(&config)).unwrap(),
    ];
    // SentencePiece itself also drops spaces at the ends and all but one between words, so the texts have no such.
    let texts = common::text("tokenizers/kitoken/utf8_input.txt");
    let texts = texts
        .lines()
        .filter(|text| text.trim() == *text && !text.contains("  "));
    for text in texts.chain(["", "Once upon a time", "a b\n\tc", "😀é\0"]) {
        let ids = forms[0].encode(text, Encode::TEXT).unwrap();
        for form in &forms {
            assert_eq!(form.encode(text, Encode::TEXT).unwrap(), ids, "{text:?}");
            assert_eq!(form.decode(&ids, Decode { skip_special: true }), text);
            assert_eq!(
                (form.bos(), form.eos(), form.adds_bos()),
                (Some(1), Some(2), true)
            );
        }
    }
}

#[test]
fn prompts_of_the_built_in_model() {
    let json = common::bytes("../crates/sterna/models/tiny-tales/tokenizer.json");
    let config = common::bytes("../crates/sterna/models/tiny-tales/tokenizer_config.json");
    let config = TokenizerConfig::parse(&config).unwrap();
    let tokenizer = Tokenizer::from_hf_json(&json, Some(&config)).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&common::bytes(
        "../crates/sterna/models/tiny-tales/expected.json",
    ))
    .unwrap();
    for case in expected.as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, Encode::TEMPLATE).unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids, Decode::default()), text);
    }
    assert_eq!(tokenizer.end_ids(), [1, 2]);
}

/// A folder with `tokenizer.model` says the rest in `tokenizer_config.json`.
#[test]
fn a_configuration_completes_a_sentencepiece_model() {
    let model = common::bytes("stories260K/tok512.model");
    let config = TokenizerConfig::parse(
        br#"{"add_bos_token": false, "eos_token": "<|user|>", "added_tokens_decoder": {
            "512": {"content": "<|user|>", "special": true}}}"#,
    )
    .unwrap();
    let plain = Tokenizer::from_sentencepiece(&model, None).unwrap();
    let tokenizer = Tokenizer::from_sentencepiece(&model, Some(&config)).unwrap();
    let text = "Once<|user|>";
    assert_eq!(
        tokenizer.encode(text, Encode::TEMPLATE).unwrap().last(),
        Some(&512)
    );
    assert_eq!(
        tokenizer.encode(text, Encode::TEXT).unwrap(),
        plain.encode(text, Encode::PLAIN).unwrap()
    );
    assert_eq!(tokenizer.eos(), Some(512));
    assert_eq!(tokenizer.bos(), plain.bos());
}
