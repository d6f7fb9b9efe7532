//! Reading `tokenizer.json`, the file of the Hugging Face `tokenizers` library.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use hashbrown::{HashMap, HashSet};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use sterna_format::hf::TokenizerConfig;

use super::added::{AddedToken, AddedTokens};
use super::bpe::{Bpe, Merges, Unknown};
use super::charsmap::Charsmap;
use super::decode::{Decoder, PieceStep, TextStep};
use super::model::{Model, byte_tokens};
use super::normalize::{self, Normalizer};
use super::pattern::{GPT2, Pattern};
use super::prefix::PrefixIndex;
use super::pretokenize::{Behavior, PreTokenizer, Prepend};
use super::unigram::Unigram;
use super::vocab::Vocab;
use super::wordpiece::{WordLevel, WordPiece};
use super::{Parts, Tokenizer, TokenizerError};

/// How the file spells the word mark of SentencePiece.
const WORD_MARK: char = '▁';

impl Tokenizer {
    /// Reads `tokenizer.json`, with the roles of special tokens from `tokenizer_config.json` if there is one.
    ///
    /// # Errors
    ///
    /// If the file is not such JSON, contradicts itself, or names a component this crate does not know.
    pub fn from_hf_json(
        json: &[u8],
        config: Option<&TokenizerConfig>,
    ) -> Result<Self, TokenizerError> {
        let text = std::str::from_utf8(json)
            .map_err(|source| TokenizerError::invalid("file", format!("is not UTF-8: {source}")))?;
        let file: File<'_> = serde_json::from_str(text)?;
        let mut vocab = Vocab::new(json.len());
        for (Text(piece), id) in &file.model.vocab.entries {
            vocab.insert(piece, *id)?;
        }
        let normalizer = file.normalizer.map(normalizer).transpose()?;
        let mut listed = file.added_tokens;
        if let Some(config) = config {
            let missing = missing_tokens(&listed, config);
            listed.extend(missing);
        }
        let added = added_tokens(listed, &vocab, normalizer.as_ref(), json.len())?;
        let model = file.model.build(&vocab, &added)?;
        let pre_tokenizer = file.pre_tokenizer.map(pre_tokenizer).transpose()?;
        let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
        if let Some(processor) = file.post_processor {
            processor.surround(&mut prefix, &mut suffix)?;
        }
        let decoder = match file.decoder {
            Some(json) => decoder(json)?,
            None => Decoder {
                spaced: true,
                ..Decoder::default()
            },
        };
        let mut parts = Parts {
            normalizer,
            pre_tokenizer,
            prefix,
            suffix,
            ..Parts::new(vocab, AddedTokens::new(added)?, model, decoder)
        };
        if let Some(config) = config {
            parts.apply(config);
        }
        Ok(Self::assemble(parts))
    }
}

impl Parts {
    /// Adds what `config` knows of a tokenizer whose own file says less than a `tokenizer.json` would.
    pub(super) fn complete(&mut self, config: &TokenizerConfig) -> Result<(), TokenizerError> {
        let listed: BTreeMap<u32, AddedToken> = config
            .added_tokens_decoder
            .iter()
            .map(|(&id, token)| {
                let flags = AddedToken {
                    lstrip: token.lstrip,
                    rstrip: token.rstrip,
                    single_word: token.single_word,
                    ..AddedToken::plain(&token.content, token.special)
                };
                (id, flags)
            })
            .collect();
        self.added = std::mem::take(&mut self.added).extended(listed)?;
        self.bos = self.id(&config.bos_token).or(self.bos);
        self.eos = self.id(&config.eos_token).or(self.eos);
        self.apply(config);
        Ok(())
    }

    /// The id of a token by its spelling.
    pub(super) fn id(&self, token: &Option<String>) -> Option<u32> {
        let token = token.as_deref()?;
        let in_vocab = || self.vocab.id(token.as_bytes());
        self.added.id(token).or_else(in_vocab)
    }

    /// Takes roles from `config`, and whether texts begin and end with special tokens where it says so outright.
    fn apply(&mut self, config: &TokenizerConfig) {
        for (role, named) in [
            (&mut self.specials.bos, &config.bos_token),
            (&mut self.specials.eos, &config.eos_token),
            (&mut self.specials.unk, &config.unk_token),
            (&mut self.specials.pad, &config.pad_token),
        ] {
            if named.is_some() {
                role.clone_from(named);
            }
        }
        let bos = self.id(&config.bos_token).or(self.bos);
        if let (Some(adds), Some(bos)) = (config.add_bos_token, bos) {
            self.prefix.retain(|id| *id != bos);
            if adds {
                self.prefix.insert(0, bos);
            }
        }
        let eos = self.id(&config.eos_token).or(self.eos);
        if let (Some(adds), Some(eos)) = (config.add_eos_token, eos) {
            self.suffix.retain(|id| *id != eos);
            if adds {
                self.suffix.push(eos);
            }
        }
    }
}

/// The added tokens of a `tokenizer_config.json` that are not `listed` in `tokenizer.json`.
fn missing_tokens(listed: &[AddedTokenJson], config: &TokenizerConfig) -> Vec<AddedTokenJson> {
    let known: HashSet<&str> = listed.iter().map(|token| token.content.as_str()).collect();
    let missing = config
        .added_tokens_decoder
        .iter()
        .filter(|(_, token)| !known.contains(token.content.as_str()));
    let as_listed = missing.map(|(&id, token)| AddedTokenJson {
        id,
        content: token.content.clone(),
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        normalized: token.normalized,
        special: token.special,
    });
    as_listed.collect()
}

#[derive(Deserialize)]
struct File<'a> {
    #[serde(default)]
    added_tokens: Vec<AddedTokenJson>,
    normalizer: Option<NormalizerJson>,
    pre_tokenizer: Option<PreTokenizerJson>,
    post_processor: Option<PostProcessorJson>,
    decoder: Option<DecoderJson>,
    #[serde(borrow)]
    model: ModelJson<'a>,
}

#[derive(Deserialize)]
struct AddedTokenJson {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default = "yes")]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

fn yes() -> bool {
    true
}

fn added_tokens(
    tokens: Vec<AddedTokenJson>,
    vocab: &Vocab,
    normalizer: Option<&Normalizer>,
    file_bytes: usize,
) -> Result<BTreeMap<u32, AddedToken>, TokenizerError> {
    let mut added = BTreeMap::new();
    for token in tokens.into_iter().filter(|token| !token.content.is_empty()) {
        // A token that the model knows keeps the model's id, whatever this list says.
        let id = vocab.id(token.content.as_bytes()).unwrap_or(token.id);
        if id as usize >= Vocab::max_ids(file_bytes) {
            return Err(TokenizerError::invalid(
                "added_tokens",
                format!(
                    "id {id} of {:?} is far beyond the size of the vocabulary",
                    token.content
                ),
            ));
        }
        let spelling = match normalizer {
            Some(normalizer) if token.normalized => {
                normalizer.normalize(&token.content, true)?.into_owned()
            }
            _ => token.content.clone(),
        };
        let AddedTokenJson {
            content,
            special,
            normalized,
            lstrip,
            rstrip,
            single_word,
            ..
        } = token;
        added.insert(
            id,
            AddedToken {
                content,
                spelling,
                special,
                normalized,
                lstrip,
                rstrip,
                single_word,
            },
        );
    }
    Ok(added)
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum NormalizerJson {
    Sequence {
        normalizers: Vec<NormalizerJson>,
    },
    #[serde(rename = "NFC")]
    Nfc,
    #[serde(rename = "NFD")]
    Nfd,
    #[serde(rename = "NFKC")]
    Nfkc,
    #[serde(rename = "NFKD")]
    Nfkd,
    Nmt,
    Lowercase,
    StripAccents,
    Strip {
        strip_left: bool,
        strip_right: bool,
    },
    Prepend {
        prepend: String,
    },
    Replace {
        pattern: PatternJson,
        content: String,
    },
    ByteLevel,
    BertNormalizer {
        clean_text: bool,
        handle_chinese_chars: bool,
        strip_accents: Option<bool>,
        lowercase: bool,
    },
    Precompiled {
        precompiled_charsmap: Option<String>,
    },
}

fn normalizer(json: NormalizerJson) -> Result<Normalizer, TokenizerError> {
    Ok(match json {
        NormalizerJson::Sequence { normalizers } => Normalizer::Sequence(
            normalizers
                .into_iter()
                .map(normalizer)
                .collect::<Result<_, _>>()?,
        ),
        NormalizerJson::Nfc => Normalizer::Nfc,
        NormalizerJson::Nfd => Normalizer::Nfd,
        NormalizerJson::Nfkc => Normalizer::Nfkc,
        NormalizerJson::Nfkd => Normalizer::Nfkd,
        NormalizerJson::Nmt => Normalizer::Nmt,
        NormalizerJson::Lowercase => Normalizer::Lowercase,
        NormalizerJson::StripAccents => Normalizer::StripAccents,
        NormalizerJson::Strip {
            strip_left: left,
            strip_right: right,
        } => Normalizer::Strip { left, right },
        NormalizerJson::Prepend { prepend } => Normalizer::Prepend(prepend),
        NormalizerJson::Replace {
            pattern: json,
            content: with,
        } => Normalizer::Replace {
            pattern: pattern(json)?,
            with,
        },
        NormalizerJson::ByteLevel => Normalizer::ByteLevel,
        NormalizerJson::BertNormalizer {
            clean_text,
            handle_chinese_chars,
            strip_accents,
            lowercase,
        } => Normalizer::Bert(normalize::Bert {
            clean_text,
            handle_chinese_chars,
            strip_accents: strip_accents.unwrap_or(lowercase),
            lowercase,
        }),
        NormalizerJson::Precompiled {
            precompiled_charsmap,
        } => match precompiled_charsmap.as_deref() {
            None | Some("") => Normalizer::Sequence(Vec::new()),
            Some(text) => {
                let blob = base64::engine::general_purpose::STANDARD
                    .decode(text)
                    .map_err(|source| {
                        TokenizerError::invalid("precompiled_charsmap", source.to_string())
                    })?;
                Normalizer::PrecompiledByGrapheme(Charsmap::parse(&blob)?)
            }
        },
    })
}

#[derive(Deserialize)]
enum PatternJson {
    String(String),
    Regex(String),
}

fn pattern(json: PatternJson) -> Result<Pattern, TokenizerError> {
    match json {
        PatternJson::String(text) => Pattern::literal(&text),
        PatternJson::Regex(expression) => Pattern::oniguruma(&expression),
    }
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizerJson {
    Sequence {
        pretokenizers: Vec<PreTokenizerJson>,
    },
    Split {
        pattern: PatternJson,
        behavior: BehaviorJson,
        #[serde(default)]
        invert: bool,
    },
    ByteLevel {
        add_prefix_space: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
    Metaspace(MetaspaceJson),
    Whitespace,
    WhitespaceSplit,
    BertPreTokenizer,
    Punctuation {
        behavior: Option<BehaviorJson>,
    },
    Digits {
        individual_digits: bool,
    },
    CharDelimiterSplit {
        delimiter: char,
    },
    FixedLength {
        length: usize,
    },
    UnicodeScripts,
}

#[derive(Deserialize, Clone, Copy)]
enum BehaviorJson {
    Removed,
    Isolated,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

impl From<BehaviorJson> for Behavior {
    fn from(json: BehaviorJson) -> Self {
        match json {
            BehaviorJson::Removed => Self::Removed,
            BehaviorJson::Isolated => Self::Isolated,
            BehaviorJson::MergedWithPrevious => Self::MergedWithPrevious,
            BehaviorJson::MergedWithNext => Self::MergedWithNext,
            BehaviorJson::Contiguous => Self::Contiguous,
        }
    }
}

/// The same settings serve the pre-tokenizer and the decoder.
#[derive(Deserialize)]
struct MetaspaceJson {
    #[serde(default = "word_mark")]
    replacement: char,
    add_prefix_space: Option<bool>,
    prepend_scheme: Option<PrependJson>,
    split: Option<bool>,
}

fn word_mark() -> char {
    WORD_MARK
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum PrependJson {
    Always,
    First,
    Never,
}

impl MetaspaceJson {
    fn prepend(&self) -> Prepend {
        match (self.prepend_scheme, self.add_prefix_space) {
            (Some(PrependJson::Never), _) | (_, Some(false)) => Prepend::Never,
            (Some(PrependJson::First), _) => Prepend::First,
            (Some(PrependJson::Always) | None, _) => Prepend::Always,
        }
    }
}

fn pre_tokenizer(json: PreTokenizerJson) -> Result<PreTokenizer, TokenizerError> {
    Ok(match json {
        PreTokenizerJson::Sequence { pretokenizers } => PreTokenizer::Sequence(
            pretokenizers
                .into_iter()
                .map(pre_tokenizer)
                .collect::<Result<_, _>>()?,
        ),
        PreTokenizerJson::Split {
            pattern: json,
            behavior,
            invert,
        } => PreTokenizer::Split {
            pattern: pattern(json)?,
            behavior: behavior.into(),
            invert,
        },
        PreTokenizerJson::ByteLevel {
            add_prefix_space,
            use_regex,
        } => {
            let split = if use_regex {
                Some(Pattern::regex(GPT2)?)
            } else {
                None
            };
            PreTokenizer::ByteLevel {
                add_prefix_space,
                split,
            }
        }
        PreTokenizerJson::Metaspace(json) => PreTokenizer::Metaspace {
            replacement: json.replacement,
            prepend: json.prepend(),
            split: json.split.unwrap_or(true),
        },
        PreTokenizerJson::Whitespace => PreTokenizer::Split {
            pattern: Pattern::regex(r"\w+|[^\w\s]+")?,
            behavior: Behavior::Removed,
            invert: true,
        },
        PreTokenizerJson::WhitespaceSplit => PreTokenizer::WhitespaceSplit,
        PreTokenizerJson::BertPreTokenizer => PreTokenizer::Bert,
        PreTokenizerJson::Punctuation { behavior } => {
            PreTokenizer::Punctuation(behavior.map_or(Behavior::Isolated, Behavior::from))
        }
        PreTokenizerJson::Digits { individual_digits } => PreTokenizer::Digits {
            individual: individual_digits,
        },
        PreTokenizerJson::CharDelimiterSplit { delimiter } => PreTokenizer::Delimiter(delimiter),
        PreTokenizerJson::FixedLength { length: 0 } => {
            return Err(TokenizerError::invalid(
                "pre_tokenizer",
                "pieces of length 0",
            ));
        }
        PreTokenizerJson::FixedLength { length } => PreTokenizer::FixedLength(length),
        PreTokenizerJson::UnicodeScripts => PreTokenizer::Scripts,
    })
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PostProcessorJson {
    Sequence {
        processors: Vec<PostProcessorJson>,
    },
    ByteLevel,
    BertProcessing {
        sep: (String, u32),
        cls: (String, u32),
    },
    RobertaProcessing {
        sep: (String, u32),
        cls: (String, u32),
    },
    TemplateProcessing {
        single: Vec<TemplateItem>,
        special_tokens: BTreeMap<String, TemplateToken>,
    },
}

#[derive(Deserialize)]
enum TemplateItem {
    SpecialToken { id: String },
    Sequence { id: SequenceId },
}

#[derive(Deserialize, PartialEq)]
enum SequenceId {
    A,
    B,
}

#[derive(Deserialize)]
struct TemplateToken {
    ids: Vec<u32>,
}

impl PostProcessorJson {
    /// Puts the ids this adds to a single text around those that are there.
    fn surround(self, prefix: &mut Vec<u32>, suffix: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match self {
            Self::Sequence { processors } => {
                for processor in processors {
                    processor.surround(prefix, suffix)?;
                }
            }
            Self::ByteLevel => {}
            Self::BertProcessing { sep, cls } | Self::RobertaProcessing { sep, cls } => {
                prefix.insert(0, cls.1);
                suffix.push(sep.1);
            }
            Self::TemplateProcessing {
                single,
                special_tokens,
            } => {
                let bad = |problem: String| TokenizerError::invalid("post_processor", problem);
                let mut before = Vec::new();
                let mut text_seen = false;
                for item in &single {
                    match item {
                        TemplateItem::SpecialToken { id } => {
                            let token = special_tokens.get(id).ok_or_else(|| {
                                bad(format!(
                                    "the template uses {id:?}, which it does not define"
                                ))
                            })?;
                            if text_seen { &mut *suffix } else { &mut before }.extend(&token.ids);
                        }
                        TemplateItem::Sequence { id } if text_seen || *id == SequenceId::B => {
                            return Err(
                                bad("the template for one text names more than one".into()),
                            );
                        }
                        TemplateItem::Sequence { .. } => text_seen = true,
                    }
                }
                if !text_seen {
                    return Err(bad("the template for one text does not name it".into()));
                }
                prefix.splice(0..0, before);
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum DecoderJson {
    Sequence {
        decoders: Vec<DecoderJson>,
    },
    ByteLevel,
    ByteFallback,
    Fuse,
    Replace {
        pattern: PatternJson,
        content: String,
    },
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    Metaspace(MetaspaceJson),
    WordPiece {
        prefix: String,
        cleanup: bool,
    },
    #[serde(rename = "BPEDecoder")]
    Bpe {
        suffix: String,
    },
    #[serde(rename = "CTC")]
    Ctc {
        pad_token: String,
        word_delimiter_token: String,
        cleanup: bool,
    },
}

fn decoder(json: DecoderJson) -> Result<Decoder, TokenizerError> {
    let mut out = Decoder::default();
    let mut fused = false;
    let mut rest = vec![json];
    while let Some(json) = rest.pop() {
        let step = match json {
            DecoderJson::Sequence { decoders } => {
                rest.extend(decoders.into_iter().rev());
                continue;
            }
            DecoderJson::Fuse => {
                fused = true;
                continue;
            }
            DecoderJson::Strip {
                content,
                start,
                stop,
            } if fused => {
                out.text.push(TextStep::Strip {
                    content,
                    start,
                    stop,
                });
                continue;
            }
            DecoderJson::Replace {
                pattern: json,
                content: with,
            } => {
                let pattern = pattern(json)?;
                // A single character is in a single piece, so that replacing it need not wait for the whole text.
                let single =
                    matches!(&pattern, Pattern::Literal(text) if text.chars().count() == 1);
                if fused && !(single && out.text.is_empty()) {
                    out.text.push(TextStep::Replace { pattern, with });
                    continue;
                }
                PieceStep::Replace { pattern, with }
            }
            _ if fused => {
                return Err(TokenizerError::invalid(
                    "decoder",
                    "a step on single pieces follows one that joins them",
                ));
            }
            DecoderJson::ByteLevel => {
                fused = true;
                PieceStep::ByteLevel
            }
            DecoderJson::ByteFallback => PieceStep::ByteFallback,
            DecoderJson::Strip {
                content,
                start,
                stop,
            } => PieceStep::Strip {
                content,
                start,
                stop,
            },
            DecoderJson::Metaspace(json) => PieceStep::Metaspace {
                replacement: json.replacement,
                strip_first: json.prepend() != Prepend::Never,
            },
            DecoderJson::WordPiece { prefix, cleanup } => {
                out.pieces.push(PieceStep::WordPiece { prefix });
                if !cleanup {
                    continue;
                }
                PieceStep::CleanUp
            }
            DecoderJson::Bpe { suffix } => PieceStep::EndOfWord { suffix },
            DecoderJson::Ctc {
                pad_token: pad,
                word_delimiter_token: delimiter,
                cleanup,
            } => PieceStep::Ctc {
                pad,
                delimiter,
                cleanup,
            },
        };
        out.pieces.push(step);
    }
    Ok(out)
}

#[derive(Deserialize)]
struct ModelJson<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(borrow)]
    vocab: VocabJson<'a>,
    #[serde(borrow)]
    merges: Option<Vec<MergeJson<'a>>>,
    unk_token: Option<String>,
    unk_id: Option<u32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    max_input_chars_per_word: Option<usize>,
    #[serde(default)]
    fuse_unk: Option<bool>,
    #[serde(default)]
    byte_fallback: Option<bool>,
    #[serde(default)]
    ignore_merges: Option<bool>,
}

impl ModelJson<'_> {
    fn build(
        self,
        vocab: &Vocab,
        added: &BTreeMap<u32, AddedToken>,
    ) -> Result<Model, TokenizerError> {
        let kind = match (&self.kind, &self.merges) {
            (Some(kind), _) => kind.as_str(),
            (None, Some(_)) => "BPE",
            (None, None) if !self.vocab.scores.is_empty() => "Unigram",
            (None, None) if self.continuing_subword_prefix.is_some() => "WordPiece",
            (None, None) => "WordLevel",
        };
        let unknown = self
            .unk_token
            .as_deref()
            .and_then(|token| vocab.id(token.as_bytes()));
        let bytes = if self.byte_fallback == Some(true) {
            byte_tokens(vocab)
        } else {
            None
        };
        // Text must not become a control token by way of the model either.
        let in_text = |id: u32| !added.get(&id).is_some_and(|token| token.special);
        match kind {
            "BPE" => {
                let continuing_subword_prefix = self.continuing_subword_prefix.unwrap_or_default();
                Ok(Model::Bpe(Bpe {
                    merges: merges(
                        self.merges.unwrap_or_default(),
                        vocab,
                        &continuing_subword_prefix,
                    )?,
                    ignore_merges: self.ignore_merges == Some(true),
                    unknown: Unknown {
                        bytes,
                        id: unknown,
                        fuse: self.fuse_unk == Some(true),
                    },
                    continuing_subword_prefix,
                    end_of_word_suffix: self.end_of_word_suffix.unwrap_or_default(),
                    forbidden: added
                        .iter()
                        .filter(|(_, token)| token.special)
                        .map(|(id, _)| *id)
                        .collect(),
                }))
            }
            "Unigram" => {
                if let Some(id) = self.unk_id.filter(|id| vocab.piece(*id).is_none()) {
                    return Err(TokenizerError::invalid(
                        "unk_id",
                        format!("{id} is not in the vocabulary"),
                    ));
                }
                Ok(Model::Unigram(Unigram::new(
                    vocab,
                    self.vocab.scores,
                    self.unk_id,
                    bytes,
                    in_text,
                )?))
            }
            "WordPiece" => Ok(Model::WordPiece(WordPiece {
                continuing_subword_prefix: self
                    .continuing_subword_prefix
                    .unwrap_or_else(|| "##".into()),
                max_chars: self.max_input_chars_per_word.unwrap_or(100),
                unknown,
                pieces: PrefixIndex::new(vocab, in_text),
            })),
            "WordLevel" => Ok(Model::WordLevel(WordLevel { unknown })),
            other => Err(TokenizerError::Unsupported {
                place: "model",
                found: other.to_owned(),
            }),
        }
    }
}

fn merges(list: Vec<MergeJson<'_>>, vocab: &Vocab, prefix: &str) -> Result<Merges, TokenizerError> {
    let mut table = HashMap::with_capacity(list.len());
    let mut merged = String::new();
    for (rank, MergeJson(left, right)) in (0..).zip(&list) {
        let bad = |what: &str| {
            TokenizerError::invalid(
                "merges",
                format!("entry {rank}, {left:?} and {right:?}: {what} is no token"),
            )
        };
        let tail = right
            .get(prefix.len()..)
            .ok_or_else(|| bad("the right part without its prefix"))?;
        merged.clear();
        merged.push_str(left);
        merged.push_str(tail);
        let id = |piece: &str| vocab.id(piece.as_bytes()).ok_or_else(|| bad(piece));
        table.insert((id(left)?, id(right)?), (rank, id(&merged)?));
    }
    Ok(Merges::Table(table))
}

/// A vocabulary, either `{piece: id}` or, for unigram models, `[[piece, score], …]`.
struct VocabJson<'a> {
    entries: Vec<(Text<'a>, u32)>,
    scores: Vec<f64>,
}

/// A string that is borrowed from the file unless it is written with escapes; serde on its own would always copy.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for VocabJson<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = VocabJson<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from pieces to ids or a list of pieces with scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(VocabJson {
                    entries,
                    scores: Vec::new(),
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let (mut entries, mut scores) = (Vec::new(), Vec::new());
                while let Some((piece, score)) = seq.next_element::<(Text<'de>, f64)>()? {
                    let id = u32::try_from(entries.len()).map_err(de::Error::custom)?;
                    entries.push((piece, id));
                    scores.push(score);
                }
                Ok(VocabJson { entries, scores })
            }
        }

        deserializer.deserialize_any(Read)
    }
}

/// A merge, either `"left right"` or `["left", "right"]`.
struct MergeJson<'a>(Cow<'a, str>, Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for MergeJson<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        fn halves<E: de::Error>(text: &str) -> Result<(&str, &str), E> {
            match text.split_once(' ') {
                Some((left, right)) if !right.contains(' ') => Ok((left, right)),
                _ => Err(E::invalid_value(de::Unexpected::Str(text), &Read)),
            }
        }

        impl<'de> Visitor<'de> for Read {
            type Value = MergeJson<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two pieces to merge")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                halves(text).map(|(left, right)| MergeJson(left.into(), right.into()))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                halves(text)
                    .map(|(left, right)| MergeJson(left.to_owned().into(), right.to_owned().into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let missing = |found| de::Error::invalid_length(found, &"two pieces to merge");
                let Text(left) = seq.next_element()?.ok_or_else(|| missing(0))?;
                let Text(right) = seq.next_element()?.ok_or_else(|| missing(1))?;
                match seq.next_element::<de::IgnoredAny>()? {
                    None => Ok(MergeJson(left, right)),
                    Some(_) => Err(missing(3)),
                }
            }
        }

        deserializer.deserialize_any(Read)
    }
}
