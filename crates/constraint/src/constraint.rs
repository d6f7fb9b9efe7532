//! Output that follows a grammar, token by token.

use std::fmt;

use llguidance::Matcher;

use crate::error::ConstraintError;
use crate::grammar::Grammar;
use crate::vocabulary::Vocabulary;

/// What may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed {
    /// A bit for each token, the lowest first: whether it may.
    pub tokens: Vec<u32>,
    /// The output may end here.
    pub end: bool,
}

/// Output that is to match a grammar, as far as it goes.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    vocabulary: Vocabulary,
    /// Of JSON, where it ends.
    number: Option<Number>,
}

impl Constraint {
    /// The empty output, which is to become one that matches `grammar`.
    ///
    /// Errors: a grammar that isn't valid, isn't supported, or takes more than the limits allow.
    pub fn new(vocabulary: &Vocabulary, grammar: &Grammar) -> Result<Constraint, ConstraintError> {
        let refused = |error: &dyn fmt::Display| {
            let message = in_short(&error.to_string());
            ConstraintError::NotCompiled {
                kind: grammar.kind(),
                message: match grammar.place(&message) {
                    Some(place) => format!("{place}: {message}"),
                    None => message,
                },
            }
        };
        let parsed = grammar.parse()?;
        let mut matcher = with_stack(|| Matcher::new(vocabulary.parsers.create_parser(parsed)));
        // A grammar that nothing matches is found by its first step.
        if let Err(error) = matcher.compute_mask_or_eos() {
            let message = error.to_string();
            return Err(match message.contains("NoExtension") {
                true => refused(&"expected one that some text matches, found one that none does"),
                false => refused(&message),
            });
        }
        let is_json = matches!(grammar, Grammar::JsonSchema(_) | Grammar::JsonObject);
        Ok(Constraint {
            matcher,
            vocabulary: vocabulary.clone(),
            number: is_json.then(Number::default),
        })
    }

    /// What may come next. A number in JSON that has 24 digits in a row has no more, unless nothing else may come.
    ///
    /// Errors: finding it takes more than the limits allow.
    pub fn allowed(&mut self) -> Result<Allowed, ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(step)?;
        let n_tokens = self.vocabulary.n_tokens();
        let end = mask.is_allowed(n_tokens as u32);
        let mut tokens = mask.as_slice()[..n_tokens.div_ceil(32)].to_vec();
        // The end of the output is one more token.
        if let Some(last) = tokens.get_mut(n_tokens / 32) {
            *last &= !(1 << (n_tokens % 32));
        }
        if self.number.is_some_and(Number::is_long) {
            let others = tokens.iter().zip(self.vocabulary.digits());
            let others: Vec<u32> = others.map(|(tokens, digits)| tokens & !digits).collect();
            if end || others.iter().any(|tokens| *tokens != 0) {
                tokens = others;
            }
        }
        Ok(Allowed { tokens, end })
    }

    /// Appends the token `id`.
    ///
    /// Errors: it isn't allowed; taking it takes more than the limits allow.
    pub fn accept(&mut self, id: u32) -> Result<(), ConstraintError> {
        if self.n_matching(&[id]) == 0 {
            return Err(ConstraintError::NotAllowed { id });
        }
        self.matcher.consume_token(id).map_err(step)?;
        if let Some(number) = &mut self.number {
            number.push(self.vocabulary.spelling(id));
        }
        Ok(())
    }

    /// How many of `ids` could follow, one after the other; fewer where a long number has to go on.
    pub fn n_allowed(&mut self, ids: &[u32]) -> usize {
        let n = self.n_matching(ids);
        let Some(mut number) = self.number else {
            return n;
        };
        let goes_on = |id: &u32| {
            let spelling = self.vocabulary.spelling(*id);
            let is_longer = number.is_long() && spelling.first().is_some_and(u8::is_ascii_digit);
            number.push(spelling);
            !is_longer
        };
        ids[..n].iter().copied().take_while(goes_on).count()
    }

    /// How many of `ids` the grammar lets follow.
    fn n_matching(&mut self, ids: &[u32]) -> usize {
        let n_tokens = self.vocabulary.n_tokens();
        let known = ids.iter().position(|&id| id as usize >= n_tokens);
        let ids = &ids[..known.unwrap_or(ids.len())];
        if ids.is_empty() || self.matcher.is_stopped() {
            return 0;
        }
        self.matcher.validate_tokens(ids).unwrap_or(0)
    }

    /// Tokens that spell what certainly comes next, which others may spell too.
    pub fn forced(&mut self) -> Vec<u32> {
        let bytes = self.matcher.compute_ff_bytes();
        self.vocabulary.trie().greedy_tokenize(&bytes)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint")
            .field("vocabulary", &self.vocabulary)
            .finish_non_exhaustive()
    }
}

/// The most digits in a row: a double has 17 that matter, and a model that repeats itself would never end a number.
const MOST_DIGITS: usize = 24;

/// Where in JSON its end is.
#[derive(Debug, Clone, Copy, Default)]
struct Number {
    is_in_string: bool,
    /// Behind a backslash.
    is_escaped: bool,
    /// Digits at the end, outside of strings.
    n_digits: usize,
}

impl Number {
    fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.n_digits = match byte.is_ascii_digit() && !self.is_in_string {
                true => self.n_digits + 1,
                false => 0,
            };
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ => {}
            }
        }
    }

    fn is_long(self) -> bool {
        self.n_digits >= MOST_DIGITS
    }
}

fn step(error: impl fmt::Display) -> ConstraintError {
    ConstraintError::Step(in_short(&error.to_string()))
}

/// Calls `make` with a stack that the deepest grammar fits in.
#[cfg(not(target_family = "wasm"))]
fn with_stack<T: Send>(make: impl FnOnce() -> T + Send) -> T {
    use std::panic::resume_unwind;
    use std::thread::{Builder, scope};

    /// 8 KiB for each of the most levels that a grammar may have.
    const STACK_BYTES: usize = 64 << 20;

    scope(|scope| {
        let thread = Builder::new().stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, make);
        let thread = thread.expect("a thread begins");
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Calls `make`. Where the stack overflows, WebAssembly traps.
#[cfg(target_family = "wasm")]
fn with_stack<T>(make: impl FnOnce() -> T) -> T {
    make()
}

/// A message of llguidance's without the text that it quotes, on one line.
fn in_short(message: &str) -> String {
    let mut lines = message.lines();
    // Regular expressions are parts of a grammar that nobody wrote.
    let first = lines.next().unwrap_or_default();
    let first = match first.split_once("(in regex): ") {
        Some((_, problem)) => problem,
        None => first,
    };
    let rest = lines.filter_map(|line| {
        let line = line.trim();
        let is_place = line.starts_with("while processing");
        line.strip_prefix("error: ").or(is_place.then_some(line))
    });
    let parts: Vec<&str> = std::iter::once(first.trim()).chain(rest).collect();
    let message = parts.join(" ");
    // These speak of settings of llguidance's.
    for (said, meant) in [
        (
            "'coerce_one_of'",
            "expected schemas in `oneOf` of which no value matches two (of other types, or with a property that is \
             required and of other values), or `anyOf`",
        ),
        (
            "'referencing'",
            "expected references within the schema, found one to somewhere else",
        ),
    ] {
        if message.contains(said) {
            return meant.to_owned();
        }
    }
    message
}
