//! Filling in between two texts: how models that are trained for it are asked.

use sterna_text::{Encode, Tokenizer, TokenizerError};

/// A part of such a prompt.
#[derive(Debug, Clone, Copy)]
enum Part {
    Token(&'static str),
    /// What is before the gap.
    Prefix,
    /// What is after it.
    Suffix,
}

use Part::{Prefix, Suffix, Token};

/// How a family of models is asked, and tokens that end what it fills in, beside those that end a text.
struct Form {
    parts: &'static [Part],
    ends: &'static [&'static str],
}

const FORMS: &[Form] = &[
    // Qwen, CodeGemma, Granite and others.
    Form {
        parts: &[
            Token("<|fim_prefix|>"),
            Prefix,
            Token("<|fim_suffix|>"),
            Suffix,
            Token("<|fim_middle|>"),
        ],
        ends: &[
            "<|fim_pad|>",
            "<|file_sep|>",
            "<|file_separator|>",
            "<|repo_name|>",
        ],
    },
    // StarCoder.
    Form {
        parts: &[
            Token("<fim_prefix>"),
            Prefix,
            Token("<fim_suffix>"),
            Suffix,
            Token("<fim_middle>"),
        ],
        ends: &["<fim_pad>", "<file_sep>", "<repo_name>"],
    },
    // DeepSeek.
    Form {
        parts: &[
            Token("<｜fim▁begin｜>"),
            Prefix,
            Token("<｜fim▁hole｜>"),
            Suffix,
            Token("<｜fim▁end｜>"),
        ],
        ends: &[],
    },
    // Codestral.
    Form {
        parts: &[Token("[SUFFIX]"), Suffix, Token("[PREFIX]"), Prefix],
        ends: &[],
    },
];

/// A model's way of being asked to fill in.
#[derive(Debug, Clone)]
pub(crate) struct Infill {
    parts: Vec<(Part, u32)>,
    pub(crate) stop_ids: Vec<u32>,
}

impl Infill {
    /// That of the model with this tokenizer, if it has the tokens of one.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Infill> {
        FORMS.iter().find_map(|form| {
            let parts = form.parts.iter().map(|part| match part {
                Token(name) => Some((*part, tokenizer.token_id(name)?)),
                _ => Some((*part, 0)),
            });
            let ends = form.ends.iter().filter_map(|name| tokenizer.token_id(name));
            Some(Infill {
                parts: parts.collect::<Option<_>>()?,
                stop_ids: ends.collect(),
            })
        })
    }

    /// The prompt for what is between `prefix` and `suffix`.
    pub(crate) fn prompt(
        &self,
        prefix: &[u32],
        suffix: &str,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, TokenizerError> {
        let begin = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let mut ids: Vec<u32> = begin.into_iter().collect();
        for (part, id) in &self.parts {
            match part {
                Token(_) => ids.push(*id),
                Prefix => ids.extend(prefix),
                Suffix => ids.extend(tokenizer.encode(suffix, Encode::PLAIN)?),
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The one in which every byte is a token, with these control tokens.
    fn tokenizer(names: &[&str]) -> Tokenizer {
        let added = names.iter().enumerate().map(|(index, name)| {
            json!({
                "id": 300 + index, "content": name, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        });
        let vocab: serde_json::Map<String, serde_json::Value> = ["a", "b", "c"]
            .iter()
            .zip(0..)
            .map(|(text, id)| ((*text).to_owned(), json!(id)))
            .collect();
        let json = json!({
            "model": {"type": "BPE", "merges": [], "vocab": vocab},
            "added_tokens": added.collect::<Vec<_>>(),
        });
        Tokenizer::from_hf_json(json.to_string().as_bytes(), None).unwrap()
    }

    #[test]
    fn models_are_asked_as_they_are_trained() {
        let qwen = tokenizer(&[
            "<|fim_middle|>",
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_pad|>",
        ]);
        let infill = Infill::of(&qwen).unwrap();
        let prompt = infill.prompt(&[0, 1], "c", &qwen).unwrap();
        assert_eq!(prompt, [301, 0, 1, 302, 2, 300]);
        assert_eq!(infill.stop_ids, [303]);
        // What clients write are no control tokens.
        let prompt = infill.prompt(&[], "<|fim_middle|>", &qwen).unwrap();
        assert_eq!(prompt.iter().filter(|id| **id == 300).count(), 1);
        let codestral = tokenizer(&["[PREFIX]", "[SUFFIX]"]);
        let infill = Infill::of(&codestral).unwrap();
        let prompt = infill.prompt(&[0], "b", &codestral).unwrap();
        assert_eq!(prompt, [301, 1, 300, 0]);
        assert!(Infill::of(&tokenizer(&["<|fim_prefix|>"])).is_none());
    }
}
