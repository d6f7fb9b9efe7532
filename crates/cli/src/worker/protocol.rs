//! The token protocol: from the bytes of standard input to requests, and back from tokens to lines.
//!
//! This does no I/O, and no allocation is chosen by the input: bytes come in pieces of any size, lists grow
//! as they are read, and everything has a limit. `docs/worker.md` describes both forms.

use std::fmt;
use std::io::{self, Write};
use std::mem;
use std::str::FromStr;

/// Raised when a driver of the version before could misunderstand a reply, or be misunderstood.
pub(crate) const PROTOCOL_VERSION: u32 = 1;

/// The two forms of the protocol, chosen by how the process is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Version 1: lines in a fixed order. The configuration is among the arguments of the process.
    Positional,
    /// Blocks of lines `key=value`, each begun by their number. The first one is the configuration.
    Keyed,
}

/// Maximum length of a line: usually enough for [`MAX_IDS`] ids in one line.
const MAX_LINE_BYTES: usize = 32 << 20;
/// Maximum ids in a request: many times what any context holds.
const MAX_IDS: usize = 4 << 20;
/// Maximum lines in a block.
const MAX_PAIRS: usize = 1024;
/// Maximum bytes in the lines of the first block.
const MAX_INIT_BYTES: usize = 64 << 10;

/// A message of the driver.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Message {
    /// The block that begins the keyed form.
    Init(Pairs),
    /// Tokens to compute and to continue.
    Request(Request),
    /// Weights to replace.
    Swap(Swap),
    /// The end of the input.
    Quit,
}

/// Lines `key=value`, no key twice.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Pairs(Vec<(String, String)>);

impl Pairs {
    /// The value of `key`.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let pair = self.0.iter().find(|pair| pair.0 == key)?;
        Some(&pair.1)
    }
}

/// Tokens to compute, and how to choose those that follow.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    /// The line it begins in, from 1; for messages.
    pub(crate) line: u64,
    /// What remains of the tokens in the cache.
    pub(crate) keep: Keep,
    /// The tokens after those.
    pub(crate) ids: Vec<u32>,
    /// Maximum tokens to generate; 0 for as many as the context holds.
    pub(crate) max_tokens: usize,
    /// How to sample them.
    pub(crate) sampling: Sampling,
}

/// Groups of weights to replace by those of another model, in the keyed form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Swap {
    /// The other model.
    pub(crate) model: String,
    /// Ids of the groups; none for all that differ.
    pub(crate) groups: Vec<String>,
}

/// How much of the cache a request keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Everything, as version 1 does unless it resets.
    All,
    /// This many tokens, from the first on.
    First(usize),
}

/// How tokens are sampled. Every value is in the given range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    /// The temperature; 0 is greedy. Finite, at least 0.
    pub(crate) temperature: f32,
    /// Keeps this many of the best tokens; 0 keeps all.
    pub(crate) top_k: usize,
    /// Keeps the fewest best tokens whose probabilities add up to this, but at least one. From 0 to 1.
    pub(crate) top_p: f32,
    /// Divides the logits of recent tokens; 1 disables it. Finite, above 0.
    pub(crate) repetition_penalty: f32,
    /// How many of the last tokens are recent.
    pub(crate) rep_penalty_lookback: usize,
}

impl Default for Sampling {
    /// The defaults of the keyed form.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.6,
            top_k: 50,
            top_p: 0.9,
            repetition_penalty: 1.1,
            rep_penalty_lookback: 64,
        }
    }
}

/// A violation of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: expected {expected}, found {found}")]
pub(crate) struct ProtocolError {
    place: String,
    expected: String,
    found: String,
}

impl ProtocolError {
    /// At `place`, `expected` was required, but `found` was found. All three are short.
    pub(crate) fn new(
        place: impl fmt::Display,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> ProtocolError {
        ProtocolError {
            place: place.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// `text` for a message: truncated if long, with escapes for what isn't printable.
pub(crate) fn quoted(text: &[u8]) -> String {
    const SHOWN: usize = 40;
    let shown = &text[..text.len().min(SHOWN)];
    let more = if text.len() > SHOWN { "…" } else { "" };
    format!("`{}{more}`", shown.escape_ascii())
}

/// The number in `text`; `expected` says which numbers `is_valid` takes.
pub(crate) fn number<T: FromStr>(
    place: impl fmt::Display,
    text: &[u8],
    expected: &str,
    is_valid: impl FnOnce(&T) -> bool,
) -> Result<T, ProtocolError> {
    let text = text.trim_ascii();
    let parsed = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    parsed
        .filter(is_valid)
        .ok_or_else(|| ProtocolError::new(place, expected, quoted(text)))
}

/// Numbers that count something.
pub(crate) const COUNT: &str = "a whole number";
const TOKEN_ID: &str = "a token id";

/// Reads messages from bytes.
#[derive(Debug)]
pub(crate) struct Parser {
    form: Form,
    /// The current, incomplete line.
    line: Vec<u8>,
    /// Number of complete lines.
    n_lines: u64,
    block: Block,
}

/// What the next line belongs to.
#[derive(Debug)]
enum Block {
    /// The number that begins the configuration.
    InitStart,
    /// The configuration; `left` of its lines are to come.
    Init {
        pairs: Pairs,
        n_bytes: usize,
        left: usize,
    },
    /// The number that begins a request.
    Start,
    /// A request of version 1 with `n_ids` ids; the next line is that of `FIELDS[field]`.
    Fields {
        request: Request,
        n_ids: usize,
        field: usize,
    },
    /// The ids of a request of version 1; `left` of them are to come.
    Ids { request: Request, left: usize },
    /// A request of the keyed form; `left` of its lines are to come.
    Keyed { block: Keyed, left: usize },
}

/// What was read of a block of the keyed form after the first.
#[derive(Debug)]
struct Keyed {
    request: Request,
    given: Vec<Key>,
    swap: Swap,
}

/// The effect of a line on a block.
enum Step {
    More(Block),
    Done(Message),
}

/// A part of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    ResetFlag,
    KvPosition,
    Tokens,
    Temperature,
    TopK,
    TopP,
    RepetitionPenalty,
    Lookback,
    MaxTokens,
}

/// What a line of the keyed form says, after the first block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Request(Field),
    Swap,
    Groups,
}

/// The lines of a request of version 1 between the number of its ids and the ids.
const FIELDS: [Field; 7] = [
    Field::ResetFlag,
    Field::Temperature,
    Field::TopK,
    Field::TopP,
    Field::RepetitionPenalty,
    Field::Lookback,
    Field::MaxTokens,
];

/// The keys of the keyed form, after the first block.
const KEYS: [Key; 10] = [
    Key::Request(Field::KvPosition),
    Key::Request(Field::Tokens),
    Key::Request(Field::Temperature),
    Key::Request(Field::TopK),
    Key::Request(Field::TopP),
    Key::Request(Field::RepetitionPenalty),
    Key::Request(Field::Lookback),
    Key::Request(Field::MaxTokens),
    Key::Swap,
    Key::Groups,
];

impl Field {
    const fn name(self) -> &'static str {
        match self {
            Field::ResetFlag => "reset_flag",
            Field::KvPosition => "kv_position",
            Field::Tokens => "tokens",
            Field::Temperature => "temperature",
            Field::TopK => "top_k",
            Field::TopP => "top_p",
            Field::RepetitionPenalty => "repetition_penalty",
            Field::Lookback => "rep_penalty_lookback",
            Field::MaxTokens => "max_tokens",
        }
    }
}

impl Key {
    const TOKENS: Key = Key::Request(Field::Tokens);

    const fn name(self) -> &'static str {
        match self {
            Key::Request(field) => field.name(),
            Key::Swap => "swap",
            Key::Groups => "groups",
        }
    }
}

impl Parser {
    /// A parser of the first message in `form`.
    pub(crate) fn new(form: Form) -> Parser {
        Parser {
            form,
            line: Vec::new(),
            n_lines: 0,
            block: match form {
                Form::Positional => Block::Start,
                Form::Keyed => Block::InitStart,
            },
        }
    }

    /// Takes `bytes` up to the end of the next message, which it returns, or all of them.
    ///
    /// Errors: [`ProtocolError`] names the line. After one, the rest is meaningless.
    pub(crate) fn push(&mut self, bytes: &mut &[u8]) -> Result<Option<Message>, ProtocolError> {
        while !bytes.is_empty() {
            let end = bytes.iter().position(|&byte| byte == b'\n');
            let piece = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + piece.len() > MAX_LINE_BYTES {
                let expected = format!("at most {MAX_LINE_BYTES} bytes");
                return Err(self.error(expected, "more"));
            }
            self.line.extend_from_slice(piece);
            let Some(end) = end else {
                *bytes = &[];
                break;
            };
            *bytes = &bytes[end + 1..];
            let line = mem::take(&mut self.line);
            let step = self.take_line(line.strip_suffix(b"\r").unwrap_or(&line))?;
            self.n_lines += 1;
            match step {
                Step::More(block) => self.block = block,
                Step::Done(message) => return Ok(Some(message)),
            }
        }
        Ok(None)
    }

    /// Ends the input. It may end with a line without its line end; returns the message that this completes.
    ///
    /// Errors: [`ProtocolError`] for that line, or if something is left unfinished.
    pub(crate) fn end(&mut self) -> Result<Option<Message>, ProtocolError> {
        let message = match self.line.is_empty() {
            true => None,
            false => self.push(&mut &b"\n"[..])?,
        };
        let expected = match &self.block {
            Block::InitStart | Block::Start => return Ok(message),
            Block::Init { left, .. } | Block::Keyed { left, .. } => {
                format!("{left} more of the lines `key=value`")
            }
            Block::Fields { field, .. } => format!("`{}`", FIELDS[*field].name()),
            Block::Ids { left, .. } => format!("{left} more of the token ids"),
        };
        Err(self.error(expected, "the end of the input"))
    }

    /// An error in the line that is being read.
    fn error(&self, expected: impl fmt::Display, found: impl fmt::Display) -> ProtocolError {
        ProtocolError::new(self.place(), expected, found)
    }

    fn place(&self) -> String {
        format!("line {}", self.n_lines + 1)
    }

    fn take_line(&mut self, text: &[u8]) -> Result<Step, ProtocolError> {
        match mem::replace(&mut self.block, Block::Start) {
            Block::InitStart => {
                let place = format!("{}: number of settings", self.place());
                let expected = format!("1 to {MAX_PAIRS}");
                let left = number(place, text, &expected, |n| (1..=MAX_PAIRS).contains(n))?;
                let (pairs, n_bytes) = (Pairs::default(), 0);
                Ok(Step::More(Block::Init {
                    pairs,
                    n_bytes,
                    left,
                }))
            }
            Block::Init {
                pairs,
                n_bytes,
                left,
            } => self.init_line(text, pairs, n_bytes, left - 1),
            Block::Start => self.start(text),
            Block::Fields {
                mut request,
                n_ids,
                field,
            } => {
                self.set(&mut request, FIELDS[field], text)?;
                let field = field + 1;
                Ok(Step::More(if field < FIELDS.len() {
                    Block::Fields {
                        request,
                        n_ids,
                        field,
                    }
                } else {
                    let left = n_ids;
                    Block::Ids { request, left }
                }))
            }
            Block::Ids { mut request, left } => {
                request.ids.push(number(self.place(), text, TOKEN_ID, any)?);
                Ok(match left - 1 {
                    0 => Step::Done(Message::Request(request)),
                    left => Step::More(Block::Ids { request, left }),
                })
            }
            Block::Keyed { block, left } => self.keyed_line(text, block, left - 1),
        }
    }

    /// The number that begins a request, or ends everything.
    fn start(&self, text: &[u8]) -> Result<Step, ProtocolError> {
        let (what, max) = match self.form {
            Form::Positional => ("number of tokens", MAX_IDS),
            Form::Keyed => ("number of settings", MAX_PAIRS),
        };
        let place = format!("{}: {what}", self.place());
        let n = number(place, text, &format!("0 to {max}"), |n| *n <= max)?;
        let request = Request {
            line: self.n_lines + 1,
            keep: Keep::First(0),
            ids: Vec::new(),
            max_tokens: 0,
            sampling: Sampling::default(),
        };
        Ok(match (n, self.form) {
            (0, _) => Step::Done(Message::Quit),
            (n_ids, Form::Positional) => Step::More(Block::Fields {
                request,
                n_ids,
                field: 0,
            }),
            (left, Form::Keyed) => Step::More(Block::Keyed {
                block: Keyed {
                    request,
                    given: Vec::new(),
                    swap: Swap::default(),
                },
                left,
            }),
        })
    }

    /// A line of the configuration, followed by `left` more.
    fn init_line(
        &self,
        text: &[u8],
        mut pairs: Pairs,
        n_bytes: usize,
        left: usize,
    ) -> Result<Step, ProtocolError> {
        let (key, value) = self.pair(text)?;
        let n_bytes = n_bytes + text.len();
        if n_bytes > MAX_INIT_BYTES {
            let expected = format!("at most {MAX_INIT_BYTES} bytes of settings");
            return Err(self.error(expected, "more"));
        }
        let text = |bytes: &[u8]| match str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.error("UTF-8", quoted(bytes))),
        };
        let (key, value) = (text(key)?, text(value)?);
        if pairs.get(&key).is_some() {
            return Err(self.twice(&key));
        }
        pairs.0.push((key, value));
        Ok(match left {
            0 => Step::Done(Message::Init(pairs)),
            left => Step::More(Block::Init {
                pairs,
                n_bytes,
                left,
            }),
        })
    }

    /// A line of a block of the keyed form, followed by `left` more.
    fn keyed_line(
        &self,
        text: &[u8],
        mut block: Keyed,
        left: usize,
    ) -> Result<Step, ProtocolError> {
        let (key, value) = self.pair(text)?;
        if let Some(key) = KEYS
            .into_iter()
            .find(|known| known.name().as_bytes() == key)
        {
            if block.given.contains(&key) {
                return Err(self.twice(key.name()));
            }
            match key {
                Key::Request(field) => self.set(&mut block.request, field, value)?,
                Key::Swap => block.swap.model = self.short_text(value)?,
                Key::Groups => {
                    let ids = self.short_text(value)?;
                    let ids = ids.split(',').map(str::trim).filter(|id| !id.is_empty());
                    block.swap.groups = ids.map(str::to_owned).collect();
                }
            }
            block.given.push(key);
        }
        if left > 0 {
            return Ok(Step::More(Block::Keyed { block, left }));
        }
        let (is_swap, is_request) = (
            block.given.contains(&Key::Swap),
            block.given.contains(&Key::TOKENS),
        );
        match (is_swap, is_request) {
            (true, false) => Ok(Step::Done(Message::Swap(block.swap))),
            (false, true) => Ok(Step::Done(Message::Request(block.request))),
            _ => {
                let place = format!("lines {} to {}", block.request.line, self.n_lines + 1);
                let found = if is_swap { "both" } else { "none" };
                let (tokens, swap) = (Key::TOKENS.name(), Key::Swap.name());
                let expected = match is_swap {
                    true => format!("one of the keys `{tokens}` and `{swap}`"),
                    false => format!("key `{tokens}`"),
                };
                Err(ProtocolError::new(place, expected, found))
            }
        }
    }

    /// `text` as text that is kept.
    fn short_text(&self, text: &[u8]) -> Result<String, ProtocolError> {
        if text.len() > MAX_INIT_BYTES {
            return Err(self.error(format!("at most {MAX_INIT_BYTES} bytes"), text.len()));
        }
        let text = str::from_utf8(text).map_err(|_| self.error("UTF-8", quoted(text)))?;
        Ok(text.trim().to_owned())
    }

    /// Key and value, a line being `key=value`.
    fn pair<'a>(&self, text: &'a [u8]) -> Result<(&'a [u8], &'a [u8]), ProtocolError> {
        let at = text.iter().position(|&byte| byte == b'=');
        let at = at.ok_or_else(|| self.error("`key=value`", quoted(text)))?;
        Ok((text[..at].trim_ascii(), &text[at + 1..]))
    }

    fn twice(&self, key: &str) -> ProtocolError {
        self.error("each key once", format!("{} again", quoted(key.as_bytes())))
    }

    /// Sets `field` from `text`.
    fn set(&self, request: &mut Request, field: Field, text: &[u8]) -> Result<(), ProtocolError> {
        let name = field.name();
        let line = self.n_lines + 1;
        let place = format_args!("line {line}: `{name}`");
        let sampling = &mut request.sampling;
        match field {
            Field::ResetFlag => {
                let reset: u8 = number(place, text, "0 or 1", |flag| *flag <= 1)?;
                request.keep = if reset == 1 {
                    Keep::First(0)
                } else {
                    Keep::All
                };
            }
            Field::KvPosition => request.keep = Keep::First(number(place, text, COUNT, any)?),
            Field::Tokens => request.ids = ids(line, text)?,
            Field::Temperature => {
                let expected = "a number of at least 0";
                sampling.temperature =
                    number(place, text, expected, |t: &f32| *t >= 0.0 && t.is_finite())?;
            }
            Field::TopK => sampling.top_k = number(place, text, COUNT, any)?,
            Field::TopP => {
                let expected = "a number from 0 to 1";
                sampling.top_p = number(place, text, expected, |p| (0.0..=1.0).contains(p))?;
            }
            Field::RepetitionPenalty => {
                let expected = "a number above 0";
                sampling.repetition_penalty =
                    number(place, text, expected, |p: &f32| *p > 0.0 && p.is_finite())?;
            }
            Field::Lookback => sampling.rep_penalty_lookback = number(place, text, COUNT, any)?,
            Field::MaxTokens => request.max_tokens = number(place, text, COUNT, any)?,
        }
        Ok(())
    }
}

/// Any number that its type holds.
fn any<T>(_: &T) -> bool {
    true
}

/// Ids separated by commas, or none; in line `line`, for messages.
fn ids(line: u64, text: &[u8]) -> Result<Vec<u32>, ProtocolError> {
    let mut ids = Vec::new();
    if text.trim_ascii().is_empty() {
        return Ok(ids);
    }
    for (i, word) in text.split(|&byte| byte == b',').enumerate() {
        let place = format_args!("line {line}: `tokens`, id {i}");
        if i == MAX_IDS {
            let expected = format!("at most {MAX_IDS}");
            return Err(ProtocolError::new(place, expected, "more"));
        }
        ids.push(number(place, word, TOKEN_ID, any)?);
    }
    Ok(ids)
}

/// Writes a reply: ids, then the number of tokens in the cache, each in a line that is flushed.
pub(crate) struct Reply<W> {
    out: W,
    line: Vec<u8>,
}

impl<W: Write> Reply<W> {
    /// Replies on `out`.
    pub(crate) fn new(out: W) -> Reply<W> {
        let line = Vec::new();
        Reply { out, line }
    }

    /// Writes `number` and a line end, in one piece.
    pub(crate) fn line(&mut self, number: impl fmt::Display) -> io::Result<()> {
        self.line.clear();
        writeln!(self.line, "{number}")?;
        self.out.write_all(&self.line)?;
        self.out.flush()
    }
}
