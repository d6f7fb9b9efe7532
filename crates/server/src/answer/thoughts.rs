//! How models mark what they think: a table of families.

use sterna_text::Tokenizer;

use super::tools::{control_id, control_ids, in_grammar};

/// What is around what a model thinks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Thoughts {
    pub(crate) begin: &'static str,
    pub(crate) end: &'static str,
    /// What a template writes before a thought, and between that and what is said.
    pub(crate) written: [&'static str; 2],
    /// What may be around what is said.
    pub(crate) said: Option<[&'static str; 2]>,
}

/// Qwen, DeepSeek R1, GLM, and most others.
pub(super) const THINK: Thoughts = Thoughts {
    begin: "<think>",
    end: "</think>",
    written: ["<think>\n", "\n</think>\n\n"],
    said: None,
};

/// Command R7B, Command A.
pub(super) const COMMAND: Thoughts = Thoughts {
    begin: "<|START_THINKING|>",
    end: "<|END_THINKING|>",
    written: ["<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"],
    said: Some(["<|START_RESPONSE|>", "<|END_RESPONSE|>"]),
};

/// MiniCPM3, MiniCPM4.
pub(super) const MINICPM: Thoughts = Thoughts {
    begin: "<|thought_start|>",
    end: "<|thought_end|>",
    written: ["<|thought_start|>\n", "\n<|thought_end|>\n"],
    said: None,
};

/// Gemma 4.
pub(super) const GEMMA: Thoughts = Thoughts {
    begin: "<|channel>thought\n",
    end: "<channel|>",
    written: ["<|channel>thought\n", "\n<channel|>"],
    said: None,
};

impl Default for &'static Thoughts {
    fn default() -> &'static Thoughts {
        &THINK
    }
}

pub(super) const ALL: [&Thoughts; 4] = [&THINK, &COMMAND, &MINICPM, &GEMMA];

impl Thoughts {
    /// Those of the model of `tokenizer`, which has a token for their end, or whose template tells of it in `told`, a
    /// prompt with tools.
    pub(crate) fn of(tokenizer: &Tokenizer, told: &str) -> Option<&'static Thoughts> {
        let has_token = |thoughts: &&&Thoughts| tokenizer.token_id(thoughts.end).is_some();
        let is_told = |thoughts: &&&Thoughts| told.contains(thoughts.end);
        let found = ALL.iter().find(has_token);
        found.or_else(|| ALL.iter().find(is_told)).copied()
    }

    /// Whether an answer to the prompt `text` begins with what the model thinks.
    pub(crate) fn are_opened_by(&self, text: &str) -> bool {
        text.trim_end().ends_with(self.begin.trim_end())
    }

    /// What begins a thought, as far as a token may have it, and what is behind that.
    pub(super) fn begin_mark(&self) -> (&'static str, &'static str) {
        let end = self.begin.find('>').map_or(0, |at| at + 1);
        self.begin.split_at(end)
    }

    /// The tokens that begin and end a thought, if there is one of the end, and the text that belongs to the former.
    pub(super) fn ids(&self, tokenizer: &Tokenizer) -> Option<(Option<u32>, u32, &'static str)> {
        let end = tokenizer.token_id(self.end)?;
        let (mark, label) = self.begin_mark();
        Some((tokenizer.token_id(mark), end, label))
    }

    /// Control tokens that stand for marks, with what they mean: they are in no text.
    pub(super) fn tokens(&self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let marks = [self.begin_mark().0, self.end].into_iter();
        control_ids(tokenizer, marks.chain(self.said.into_iter().flatten()))
    }

    /// Rules of a Lark grammar: `thought` is what the model thinks, with its end, `blank` is between that and what
    /// comes then, and `said_begin` before what is said.
    pub(super) fn rules(&self, tokenizer: &Tokenizer) -> String {
        let thought = match control_id(tokenizer, self.end) {
            Some(id) => format!("thought: thought_text <[{id}]>\nthought_text: /(?s:.*)/\n"),
            None => {
                let end = self.end.replace('/', "\\/").replace('|', "\\|");
                format!("thought[lazy]: /(?s:.*){end}/\n")
            }
        };
        let said = match self.said {
            Some([begin, _]) => format!("{}?", in_grammar(tokenizer, begin)),
            None => "\"\"".to_owned(),
        };
        format!("{thought}blank: /\\n{{0,2}}/\nsaid_begin: {said}\n")
    }
}
