//! Where byte-level tokenizers cut text into words, by the names that GGUF files give to these rules.
//!
//! GGUF does not hold the expressions themselves, only a name in `tokenizer.ggml.pre`; the names and what they stand
//! for are llama.cpp's.

use super::TokenizerError;
use super::pattern::{GPT2, Pattern};
use super::pretokenize::{Behavior, PreTokenizer};

/// Llama 3 and cl100k: contractions, words with one mark in front, three digits, marks with line breaks, spaces.
pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 2: as Llama 3, but one digit.
pub(super) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 3.5: as Qwen 2, with combining marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// GPT-4o and o200k: words split where a capital follows a small letter.
pub(super) const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Mistral's Tekken: as GPT-4o, without contractions and with single digits.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Bloom and the like: runs without spaces and sentence marks.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// The last of DeepSeek 3's three cuts.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The letters of DeepSeek's first tokenizer: the cased alphabets.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}",
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-",
    r"\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}",
    r"\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}",
    r"\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}",
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-",
    r"\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-",
    r"\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}",
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);

/// A rule for cutting text, and what goes with it in the models that use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Split {
    /// Applied in turn, each to the pieces that the one before left.
    expressions: &'static [&'static str],
    /// A word that is in the vocabulary is one token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether models begin texts with a token unless they say otherwise.
    pub(super) adds_bos: bool,
}

const fn plain(expressions: &'static [&'static str]) -> Split {
    Split {
        expressions,
        ignore_merges: false,
        adds_bos: false,
    }
}

const LLAMA3_SPLIT: Split = Split {
    expressions: &[LLAMA3],
    ignore_merges: true,
    adds_bos: true,
};
const GPT2_SPLIT: Split = plain(&[GPT2]);
const DIGIT_SPLIT: Split = plain(&[r"\p{N}", GPT2]);
const QWEN2_SPLIT: Split = plain(&[QWEN2]);

/// What llama.cpp does when a file names no rule.
const DEFAULT: Split = plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]);

/// The rule called `name`.
fn named(name: &str) -> Option<Split> {
    Some(match name {
        "default" => DEFAULT,
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "falcon_e" | "falcon-e"
        | "pixtral" | "midm-2.0" | "lfm2" | "jina-v5-nano" => LLAMA3_SPLIT,
        "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" | "cl100k" => plain(&[LLAMA3]),
        "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
        | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code"
        | "gigachat" | "roberta-bpe" | "mellum" | "modern-bert" | "exaone4" | "a.x-4.0" => {
            GPT2_SPLIT
        }
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" => {
            DIGIT_SPLIT
        }
        "qwen2" | "stablelm2" | "deepseek-r1-qwen" | "hunyuan" | "megrez" | "kormo"
        | "solar-open" => QWEN2_SPLIT,
        "qwen35" => plain(&[QWEN35]),
        "gpt-4o" | "llama4" | "minimax-m2" | "kanana2" => plain(&[O200K]),
        "tekken" => Split {
            ignore_merges: true,
            ..plain(&[TEKKEN])
        },
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "deepseek-llm" => plain(&[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ]),
        "deepseek-coder" => plain(&[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        ]),
        "deepseek-v3" | "hunyuan-dense" | "youtu" | "joyai-llm" => {
            plain(&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3])
        }
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, r"\p{N}"]),
        "chameleon" => plain(&[
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ]),
        "superbpe" => plain(&[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
        _ => return None,
    })
}

/// The rule for a GGUF file that names `pre`, or nothing or something unknown, which its architecture then decides.
pub(super) fn choose(pre: Option<&str>, architecture: &str, n_tokens: usize) -> Split {
    if let Some(split) = pre.filter(|name| *name != "default").and_then(named) {
        return split;
    }
    match architecture {
        // The official BitNet files leave the name out; their vocabulary is Llama 3's.
        name if name.starts_with("bitnet") => LLAMA3_SPLIT,
        "llama" if n_tokens == 128_256 => LLAMA3_SPLIT,
        "qwen2" | "qwen2moe" | "qwen2vl" | "qwen3" | "qwen3moe" => QWEN2_SPLIT,
        "gpt2" | "gptneox" | "mpt" | "phi2" | "olmo" => GPT2_SPLIT,
        "starcoder" | "starcoder2" | "refact" | "command-r" | "smollm3" => DIGIT_SPLIT,
        _ => DEFAULT,
    }
}

/// Names to write, of rules that differ.
const NAMES: [&str; 14] = [
    "llama-bpe",
    "dbrx",
    "gpt-2",
    "smollm",
    "qwen2",
    "qwen35",
    "gpt-4o",
    "tekken",
    "falcon",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "bloom",
    "viking",
];

/// The name of the rule that cuts at `expressions` in turn, and the rule. Whether whole words come before merges
/// must be as `ignore_merges` says, if it does.
pub(super) fn name_of(
    expressions: &[String],
    ignore_merges: Option<bool>,
) -> Option<(&'static str, Split)> {
    let rules = NAMES.iter().filter_map(|name| Some((*name, named(name)?)));
    let mut fitting = rules.filter(|(_, split)| {
        let same = split.expressions.iter().eq(expressions);
        same && ignore_merges.is_none_or(|ignored| ignored == split.ignore_merges)
    });
    fitting.next()
}

impl Split {
    /// The rule as a pre-tokenizer, ending with the spelling of bytes.
    pub(super) fn pre_tokenizer(self) -> Result<PreTokenizer, TokenizerError> {
        let mut steps = Vec::with_capacity(self.expressions.len() + 1);
        for expression in self.expressions {
            steps.push(PreTokenizer::Split {
                pattern: Pattern::regex(expression)?,
                behavior: Behavior::Isolated,
                invert: false,
            });
        }
        steps.push(PreTokenizer::ByteLevel {
            add_prefix_space: false,
            split: None,
        });
        Ok(PreTokenizer::Sequence(steps))
    }
}

/// A rule of one expression, for files that bring their own.
pub(super) const fn single(expression: &'static [&'static str]) -> Split {
    plain(expression)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expression_compiles() {
        let names = [
            "default",
            "llama-bpe",
            "dbrx",
            "gpt-2",
            "starcoder",
            "qwen2",
            "qwen35",
            "gpt-4o",
            "tekken",
            "falcon",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
            "bloom",
            "viking",
            "chameleon",
            "superbpe",
        ];
        for name in names {
            named(name).unwrap().pre_tokenizer().unwrap();
        }
    }

    #[test]
    fn the_architecture_decides_where_the_name_is_missing() {
        assert_eq!(choose(None, "bitnet-b1.58", 128_256), LLAMA3_SPLIT);
        assert_eq!(choose(Some("default"), "bitnet-25", 128_256), LLAMA3_SPLIT);
        assert_eq!(choose(None, "llama", 128_256), LLAMA3_SPLIT);
        assert_eq!(choose(None, "llama", 32_000), DEFAULT);
        assert_eq!(choose(Some("from-the-future"), "qwen3", 1), QWEN2_SPLIT);
        assert_eq!(choose(Some("falcon_e"), "llama", 1), LLAMA3_SPLIT);
    }
}
