//! A tokenizer as the metadata of a GGUF file.
//!
//! GGUF has fewer words than `tokenizer.json`: a kind, typed pieces, merges or scores, the name of a rule for
//! splitting, and flags. What is written is read back and tried, so that a tokenizer that needs other words is
//! refused instead of changed.

use sterna_format::gguf::{Array, Metadata, Strings, Value};

use super::bpe::{Bpe, Merges};
use super::model::{Model, byte_tokens};
use super::normalize::Normalizer;
use super::pieces::PieceType;
use super::pretokenize::{Behavior, PreTokenizer, Prepend};
use super::{Decode, Encode, Parts, Tokenizer, TokenizerError, splits, world};

/// The metadata of a tokenizer, and what they don't say.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GgufTokenizer {
    /// Keys that begin with `tokenizer.ggml.`, and their values.
    pub entries: Vec<(String, Value)>,
    /// What GGUF has no words for, and files do without: nothing that changes how plain text is encoded.
    pub remarks: Vec<String>,
}

/// Texts that the written tokenizer is tried on: every class of characters that rules for splitting tell apart, in
/// composed form, and no space in front, which some tokenizers take for the mark of a word.
const PROBES: [&str; 10] = [
    "The quick (brown) fox's 3 dogs can't jump 12345 times, they'LL say: \"I've 1,000.50 left!\"",
    "one  two   three    \n\n\n  four\t\tfive \r\n six\n \n",
    "x=1;y+=2; for(i=0;i<n;++i){a[i]=b*i;} // HTTPServer fooBar snake_case #tag @user",
    "Größe naïve café Ärger señor Čeština ŁÓDŹ ﬁ ½ ² № €5",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם 123 مرحبا بالعالم",
    "中文字符，漢字。かなカナ、한국어 문장 ๑๒๓ नमस्ते दुनिया",
    "😀👩‍👩‍👧🇩🇪 … — “quoted” ‘single’ ±×÷ ∑∞ →",
    "....!!!??-- ___ *** ~~~ <<<>>> ||| $$$ %%% ^^^ ``` a.b.c www.x.org/y?z=1&q=2",
    "ǅ ʰ ⅷ ª \u{200b}\u{ad}\u{7f}\u{1}zero\u{a0}width\u{3000}space",
    "don't DON'T we're WE'RE I'm I'M he'd He'D",
];

/// What a reader doesn't do to texts; it takes them for composed, as nearly all are.
const UNCOMPOSED: &str = "texts aren't brought to NFC first";

impl Tokenizer {
    /// This tokenizer in the words of GGUF, for a model of `architecture` with `n_vocab` embeddings.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Inexpressible`] if texts would be encoded otherwise.
    pub fn to_gguf(
        &self,
        architecture: &str,
        n_vocab: usize,
    ) -> Result<GgufTokenizer, TokenizerError> {
        let parts = &*self.parts;
        let mut out = Entries::default();
        let (typed_bytes, default_bos) = match &parts.model {
            Model::Bpe(bpe) => out.bpe(parts, bpe, n_vocab)?,
            Model::WordPiece(model) if world::is_one(model) => {
                out.word("model", "rwkv");
                (false, false)
            }
            Model::Unigram(_) => return Err(inexpressible("model", "Unigram")),
            Model::WordPiece(_) => return Err(inexpressible("model", "WordPiece")),
            _ => return Err(inexpressible("model", "WordLevel")),
        };
        out.tokens(parts, n_vocab, typed_bytes);
        out.special_tokens(parts, default_bos)?;
        out.say_flags(parts, architecture);
        let written = GgufTokenizer {
            entries: out.entries,
            remarks: out.remarks,
        };
        self.try_out(&written, architecture)?;
        Ok(written)
    }

    /// That `written` encodes as this tokenizer does.
    fn try_out(&self, written: &GgufTokenizer, architecture: &str) -> Result<(), TokenizerError> {
        let mut metadata = Metadata::new();
        let architecture = Value::String(architecture.to_owned());
        metadata.insert("general.architecture", architecture)?;
        for (key, value) in &written.entries {
            metadata.insert(key.as_str(), value.clone())?;
        }
        let read = Self::from_gguf(&metadata)?;
        for text in PROBES {
            let ids = self.encode(text, Encode::TEXT)?;
            if read.encode(text, Encode::TEXT)? != ids {
                return Err(inexpressible("pieces", format!("how it encodes {text:?}")));
            }
            let skip = Decode { skip_special: true };
            if read.decode(&ids, skip) != self.decode(&ids, skip) {
                return Err(inexpressible("decoder", format!("how it spells {text:?}")));
            }
        }
        Ok(())
    }
}

/// Metadata under construction.
#[derive(Default)]
struct Entries {
    entries: Vec<(String, Value)>,
    remarks: Vec<String>,
}

impl Entries {
    fn put(&mut self, name: &str, value: Value) {
        self.entries.push((format!("tokenizer.ggml.{name}"), value));
    }

    fn word(&mut self, name: &str, word: &str) {
        self.put(name, Value::String(word.to_owned()));
    }

    /// What is said of byte pair encodings; whether their bytes are pieces of a type of their own, and whether readers
    /// add a BOS token.
    fn bpe(
        &mut self,
        parts: &Parts,
        bpe: &Bpe,
        n_vocab: usize,
    ) -> Result<(bool, bool), TokenizerError> {
        if !bpe.continuing_subword_prefix.is_empty() || !bpe.end_of_word_suffix.is_empty() {
            return Err(inexpressible("model", "marks at the ends of words"));
        }
        if parts.pre_tokenizer.as_ref().is_some_and(spells_bytes) {
            return Ok((false, self.byte_level(parts, bpe)?));
        }
        self.sentence_pieces(parts, bpe, n_vocab)?;
        Ok((true, true))
    }

    /// Kind, rule and merges of a byte-level tokenizer; whether readers of the rule add a BOS token.
    fn byte_level(&mut self, parts: &Parts, bpe: &Bpe) -> Result<bool, TokenizerError> {
        for step in parts.normalizer.iter().flat_map(steps_of) {
            match step {
                Normalizer::Nfc => self.remarks.push(UNCOMPOSED.into()),
                _ => return Err(inexpressible("normalizer", format!("{step:?}"))),
            }
        }
        let mut expressions = Vec::new();
        if let Some(pre_tokenizer) = &parts.pre_tokenizer {
            expressions_of(pre_tokenizer, &mut expressions)?;
        }
        // What tiktoken ranks reaches every token by merging.
        let ignore_merges = match bpe.merges {
            Merges::ById => None,
            _ => Some(bpe.ignore_merges),
        };
        let rule = splits::name_of(&expressions, ignore_merges);
        let Some((name, split)) = rule else {
            let expressions = expressions.join("`, `");
            return Err(inexpressible("pre_tokenizer", format!("`{expressions}`")));
        };
        self.word("model", "gpt2");
        self.word("pre", name);
        let mut pairs: Vec<(u32, u32, u32)> = match &bpe.merges {
            Merges::Table(table) => {
                let pair =
                    |(&(left, right), &(rank, _)): (&(u32, u32), &(u32, u32))| (rank, left, right);
                table.iter().map(pair).collect()
            }
            Merges::ById => pairs_by_id(parts),
            Merges::ByScore { .. } => return Err(inexpressible("model", "scores of bytes")),
        };
        pairs.sort_unstable();
        let mut merges = Strings::default();
        let mut merge = String::new();
        for (_, left, right) in pairs {
            let (Some(left), Some(right)) = (parts.vocab.piece(left), parts.vocab.piece(right))
            else {
                continue;
            };
            merge.clear();
            merge.extend([left, " ", right]);
            merges.push(&merge);
        }
        self.put("merges", Value::Array(Array::String(merges)));
        Ok(split.adds_bos)
    }

    /// Kind and scores of a tokenizer of SentencePiece's kind.
    fn sentence_pieces(
        &mut self,
        parts: &Parts,
        bpe: &Bpe,
        n_vocab: usize,
    ) -> Result<(), TokenizerError> {
        if parts.pre_tokenizer.is_none() && parts.normalizer.is_none() {
            return Err(inexpressible("pre_tokenizer", "text taken as it is"));
        }
        let mut scores = match &bpe.merges {
            Merges::ByScore { scores, .. } => scores.clone(),
            // Earlier merges make better pieces.
            Merges::Table(table) => {
                let mut scores = vec![-(table.len() as f32) - 1.0; n_vocab];
                for &(rank, id) in table.values() {
                    if let Some(score) = scores.get_mut(id as usize) {
                        *score = score.max(-(rank as f32));
                    }
                }
                scores
            }
            Merges::ById => return Err(inexpressible("model", "ranks without bytes")),
        };
        scores.resize(n_vocab, 0.0);
        let steps = || parts.normalizer.iter().flat_map(steps_of);
        let prepends = |step: &Normalizer| {
            matches!(step, Normalizer::Prepend(_) | Normalizer::PrependAtStart(_))
        };
        let marks = match &parts.pre_tokenizer {
            Some(PreTokenizer::Metaspace { prepend, .. }) => *prepend != Prepend::Never,
            _ => false,
        };
        if marks {
            let remark = "a space that a text begins with comes behind the mark of its first word";
            self.remarks.push(remark.into());
        }
        let prefixed = marks || steps().any(prepends);
        if steps().any(|step| matches!(step, Normalizer::Nfc)) {
            self.remarks.push(UNCOMPOSED.into());
        }
        let collapses = steps().any(|step| matches!(step, Normalizer::CollapseSpaces));
        self.word("model", "llama");
        self.word("pre", "default");
        self.put("scores", Value::Array(Array::F32(scores)));
        self.put("add_space_prefix", Value::Bool(prefixed));
        if collapses {
            self.put("remove_extra_whitespaces", Value::Bool(true));
        }
        Ok(())
    }

    /// Spellings and types of all ids; those that nothing uses get names of their own.
    fn tokens(&mut self, parts: &Parts, n_vocab: usize, typed_bytes: bool) {
        let bytes = match typed_bytes {
            true => byte_tokens(&parts.vocab),
            false => None,
        };
        let unknown = parts.id(&parts.specials.unk);
        let unused = |id: u32| match &parts.model {
            Model::Bpe(Bpe {
                merges: Merges::ByScore { unused, .. },
                ..
            }) => unused.get(id as usize) == Some(&true),
            _ => false,
        };
        let mut tokens = Strings::default();
        let mut types = Vec::with_capacity(n_vocab);
        for id in 0..n_vocab as u32 {
            let (spelling, kind) = match (parts.added.get(id), parts.vocab.piece(id)) {
                (Some(token), _) => {
                    let kind = match token.special {
                        true if typed_bytes && unknown == Some(id) => PieceType::Unknown,
                        true => PieceType::Control,
                        false => PieceType::UserDefined,
                    };
                    (token.content.as_str(), kind)
                }
                (None, Some(piece)) => {
                    let is_byte = bytes.as_ref().is_some_and(|bytes| bytes.contains(&id));
                    let kind = match (is_byte, unused(id)) {
                        (true, _) => PieceType::Byte,
                        (false, true) => PieceType::Unused,
                        (false, false) => PieceType::Normal,
                    };
                    (piece, kind)
                }
                (None, None) => ("", PieceType::Unused),
            };
            let escaped = match (&parts.model, kind) {
                (Model::WordPiece(_), PieceType::Normal) => world::escaped(spelling),
                _ => None,
            };
            match escaped.as_deref().unwrap_or(spelling) {
                "" => tokens.push(&format!("[PAD{id}]")),
                spelling => tokens.push(spelling),
            }
            types.push(kind.number());
        }
        self.put("tokens", Value::Array(Array::String(tokens)));
        self.put("token_type", Value::Array(Array::I32(types)));
        if parts.n_vocab > n_vocab {
            let n = parts.n_vocab - n_vocab;
            self.remarks.push(format!(
                "{n} ids that the model has no embeddings for are left out"
            ));
        }
    }

    /// Roles of special tokens, and what goes around a text.
    fn special_tokens(&mut self, parts: &Parts, default_bos: bool) -> Result<(), TokenizerError> {
        let specials = &parts.specials;
        for (name, id) in [
            ("bos", parts.bos),
            ("eos", parts.eos),
            ("unknown", parts.id(&specials.unk)),
            ("seperator", parts.id(&specials.sep)),
            ("padding", parts.id(&specials.pad)),
            ("cls", parts.id(&specials.cls)),
            ("mask", parts.id(&specials.mask)),
        ] {
            if let Some(id) = id {
                self.put(&format!("{name}_token_id"), Value::U32(id));
            }
        }
        for (key, around, id, default) in [
            ("add_bos_token", &parts.prefix, parts.bos, default_bos),
            ("add_eos_token", &parts.suffix, parts.eos, false),
        ] {
            let adds = match &around[..] {
                [] => false,
                [only] if Some(*only) == id => true,
                _ => {
                    return Err(inexpressible(
                        "post_processor",
                        "other tokens around a text",
                    ));
                }
            };
            if adds || default {
                self.put(key, Value::Bool(adds));
            }
        }
        Ok(())
    }

    /// Says which tokens lose flags.
    fn say_flags(&mut self, parts: &Parts, architecture: &str) {
        // Readers know that Phi-3's tokens take space along.
        let keeps_rstrip = architecture == "phi3";
        let mut flagged = parts.added.iter().filter(|(_, token)| {
            token.lstrip || token.single_word || (token.rstrip && !keeps_rstrip)
        });
        if let Some((_, first)) = flagged.next() {
            let more = flagged.count();
            let content = &first.content;
            self.remarks.push(format!(
                "how `{content}` and {more} other tokens go with what stands around them isn't said"
            ));
        }
    }
}

/// Every two tokens that spell a third, by its rank and theirs.
fn pairs_by_id(parts: &Parts) -> Vec<(u32, u32, u32)> {
    let id = |piece: &str| parts.vocab.id(piece.as_bytes());
    let pairs = parts.vocab.iter().flat_map(|(whole, piece)| {
        let cuts = piece
            .char_indices()
            .skip(1)
            .map(|(at, _)| piece.split_at(at));
        cuts.filter_map(move |(left, right)| Some((whole, id(left)?, id(right)?)))
    });
    pairs.collect()
}

/// A normalizer's steps, one by one.
fn steps_of(normalizer: &Normalizer) -> Vec<&Normalizer> {
    match normalizer {
        Normalizer::Sequence(steps) => steps.iter().flat_map(steps_of).collect(),
        step => vec![step],
    }
}

/// Whether words are output as spelled bytes.
fn spells_bytes(pre_tokenizer: &PreTokenizer) -> bool {
    match pre_tokenizer {
        PreTokenizer::Sequence(steps) => steps.last().is_some_and(spells_bytes),
        PreTokenizer::ByteLevel { .. } => true,
        _ => false,
    }
}

/// Appends the expressions that text is cut at, one after another.
fn expressions_of(step: &PreTokenizer, out: &mut Vec<String>) -> Result<(), TokenizerError> {
    match step {
        PreTokenizer::Sequence(steps) => {
            steps
                .iter()
                .try_for_each(|step| expressions_of(step, out))?;
        }
        // Where an expression matches everything, it makes no difference which parts are kept.
        PreTokenizer::Split {
            pattern,
            behavior: Behavior::Isolated,
            invert: false,
        }
        | PreTokenizer::Split {
            pattern,
            behavior: Behavior::Removed,
            invert: true,
        } => out.push(pattern.expression()),
        PreTokenizer::Digits { individual: true } => out.push(r"\p{N}".into()),
        PreTokenizer::ByteLevel {
            add_prefix_space: false,
            split,
        } => out.extend(split.as_ref().map(|pattern| pattern.expression())),
        other => return Err(inexpressible("pre_tokenizer", format!("{other:?}"))),
    }
    Ok(())
}

fn inexpressible(place: &'static str, found: impl Into<String>) -> TokenizerError {
    let found: String = found.into();
    TokenizerError::Inexpressible {
        place,
        found: found.chars().take(200).collect(),
    }
}
