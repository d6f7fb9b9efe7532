//! Calls that match their tools' schemas, in answers that may be anything else.

use sterna::Result;
use sterna::generate::{Allowed, TokenConstraint};
use sterna_text::{Encode, Tokenizer};

use super::anything;
use super::thoughts::Thoughts;
use super::tools::control_id;

/// Leaves an answer alone up to the mark of a call, and then has the call match a grammar.
#[derive(Debug, Clone)]
pub(super) struct StrictCalls {
    watch: Watch,
    /// What follows the mark has to match this.
    call: Box<dyn TokenConstraint>,
    /// What the current call has to match, and what that allows next.
    open: Option<(Box<dyn TokenConstraint>, Allowed)>,
}

/// Waits for the mark of a call.
#[derive(Debug, Clone)]
struct Watch {
    tokenizer: Tokenizer,
    /// What begins a call.
    mark: &'static str,
    thoughts: &'static Thoughts,
    /// Control tokens that mean something, which are in no text.
    marks: Vec<(u32, &'static str)>,
    place: Place,
    /// The end of the text so far.
    tail: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before the first word, which may begin a thought.
    Begin,
    /// In a thought: marks mean nothing.
    Thought,
    Answer,
}

impl StrictCalls {
    /// Calls after `mark` match `call`. What the model thinks has none: that may begin the answer, or comes first.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        mark: &'static str,
        call: Box<dyn TokenConstraint>,
        (thoughts, (may_think, opens_thinking)): (&'static Thoughts, (bool, bool)),
    ) -> StrictCalls {
        let mut marks = thoughts.tokens(tokenizer);
        marks.extend(control_id(tokenizer, mark).map(|id| (id, mark)));
        let watch = Watch {
            mark,
            thoughts,
            marks,
            tokenizer: tokenizer.clone(),
            place: match (opens_thinking, may_think) {
                (true, _) => Place::Thought,
                (false, true) => Place::Begin,
                (false, false) => Place::Answer,
            },
            tail: Vec::new(),
        };
        StrictCalls {
            watch,
            call,
            open: None,
        }
    }

    /// The constraint of a call that begins with `text`, if it can: otherwise it is none, or can't become right.
    fn begun(&self, text: &[u8]) -> Result<Option<Box<dyn TokenConstraint>>> {
        let mut call = self.call.clone();
        if text.is_empty() {
            return Ok(Some(call));
        }
        let text = String::from_utf8_lossy(text);
        let ids = self.watch.tokenizer.encode(&text, Encode::PLAIN)?;
        if call.n_allowed(&ids) < ids.len() {
            return Ok(None);
        }
        for id in ids {
            call.accept(id)?;
        }
        Ok(Some(call))
    }
}

impl Watch {
    /// Takes the next token. Returns what it has after a mark that it ends.
    fn read(&mut self, id: u32) -> Option<Vec<u8>> {
        match self.tokenizer.is_special(id) {
            true => {
                let mut marks = self.marks.iter();
                let mark = marks.find(|(mark, _)| *mark == id);
                self.tail.extend(mark.map_or("", |(_, mark)| mark).bytes());
            }
            false => {
                let text = self.tokenizer.token_bytes(id);
                self.tail.extend(text.unwrap_or_default());
            }
        }
        let Thoughts { begin, end, .. } = self.thoughts;
        if self.place == Place::Begin {
            let word = self.tail.trim_ascii_start();
            if word.starts_with(begin.as_bytes()) {
                self.place = Place::Thought;
            } else if !begin.as_bytes().starts_with(word) {
                self.place = Place::Answer;
            }
        }
        if self.place == Place::Thought
            && let Some(end) = end_of(end, &self.tail)
        {
            self.tail.drain(..end);
            self.place = Place::Answer;
        }
        if self.place == Place::Answer
            && let Some(end) = end_of(self.mark, &self.tail)
        {
            let rest = self.tail.split_off(end);
            self.tail.clear();
            return Some(rest);
        }
        if self.place != Place::Begin {
            let longest = self.mark.len().max(end.len());
            let n_old = self.tail.len().saturating_sub(longest);
            self.tail.drain(..n_old);
        }
        None
    }
}

impl TokenConstraint for StrictCalls {
    fn allowed(&mut self) -> Result<Allowed> {
        Ok(match &self.open {
            Some((_, allowed)) => allowed.clone(),
            None => anything(self.watch.tokenizer.n_vocab()),
        })
    }

    fn is_free(&self) -> bool {
        self.open.is_none()
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        self.open = match self.open.take() {
            Some((mut call, _)) => {
                call.accept(id)?;
                let allowed = call.allowed()?;
                let is_over = allowed.end && allowed.tokens.iter().all(|bits| *bits == 0);
                (!is_over).then_some((call, allowed))
            }
            None => {
                let rest = self.watch.read(id);
                let call = rest.map(|rest| self.begun(&rest)).transpose()?.flatten();
                let open = call.map(|mut call| {
                    let allowed = call.allowed()?;
                    Ok::<_, sterna::Error>((call, allowed))
                });
                open.transpose()?
            }
        };
        Ok(())
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        if let Some((call, _)) = &mut self.open {
            return call.n_allowed(ids);
        }
        let mut watch = self.watch.clone();
        for (n, id) in ids.iter().enumerate() {
            let Some(rest) = watch.read(*id) else {
                continue;
            };
            let n = n + 1;
            return match self.begun(&rest) {
                Ok(Some(mut call)) => n + call.n_allowed(&ids[n..]),
                _ => n,
            };
        }
        ids.len()
    }

    fn forced(&mut self) -> Vec<u32> {
        match &mut self.open {
            Some((call, _)) => call.forced(),
            None => Vec::new(),
        }
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

/// Where `mark` ends in `text`.
fn end_of(mark: &str, text: &[u8]) -> Option<usize> {
    let mark = mark.as_bytes();
    let mut windows = text.windows(mark.len());
    Some(windows.position(|window| window == mark)? + mark.len())
}
