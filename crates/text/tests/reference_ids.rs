//! Ids and texts of real tokenizers against those recorded from the reference implementations.

mod common;

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
fn check(folder: &str, name: &str, tokenizer: &Tokenizer) {
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
            let found = tokenizer.encode(input, Encode::TEMPLATE).unwrap();
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
        );
    }
}
