//! Calls as DeepSeek writes them: a name and a JSON object between control tokens.
//!
//! V3 and R1 (the line breaks are theirs):
//!
//! ```text
//! <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
//! ```json
//! {…}
//! ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! ```
//!
//! V3.1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`

use super::{CallEvent, MAX_HEAD};
use crate::answer::scan::ObjectScanner;

pub(super) const CALLS: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";

/// Reads calls, piece by piece, from what follows the mark that begins all of them.
#[derive(Debug, Default, Clone)]
pub(super) struct DeepSeekReader {
    state: State,
    /// Text that isn't read yet.
    held: String,
    scanner: ObjectScanner,
    has_calls: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a call, or the end of all.
    #[default]
    Before,
    /// Before its arguments.
    Head,
    Arguments,
    /// Before its end.
    Tail,
    Over,
}

impl DeepSeekReader {
    /// Reads `text`; returns what of it doesn't belong to calls any more, if they are over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        while self.advance(events) {}
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Before if !self.has_calls => self.give_up(CALLS, events),
            State::Head if !self.has_calls => self.give_up(&format!("{CALLS}{CALL}"), events),
            State::Arguments => events.push(CallEvent::Ended),
            _ => {}
        }
        self.state = State::Over;
    }

    /// What was held is text, after `marks`.
    fn give_up(&mut self, marks: &str, events: &mut Vec<CallEvent>) {
        let text = std::mem::take(&mut self.held);
        events.push(CallEvent::Text(format!("{marks}{text}")));
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, events: &mut Vec<CallEvent>) -> bool {
        match self.state {
            State::Before => self.before(events),
            State::Head => self.head(events),
            State::Arguments => self.arguments(events),
            State::Tail => {
                let ends = [CALL_END, CALL, CALLS_END];
                let found = ends
                    .iter()
                    .filter_map(|end| Some((self.held.find(end)?, *end)));
                let Some((at, end)) = found.min() else {
                    // What may be the beginning of a mark is enough.
                    let longest = ends.iter().map(|end| end.len()).max().unwrap_or(0);
                    let n_over = self.held.len().saturating_sub(longest);
                    self.held.drain(..self.held.floor_char_boundary(n_over));
                    return false;
                };
                let n_end = if end == CALL_END { end.len() } else { 0 };
                self.held.drain(..at + n_end);
                self.state = State::Before;
                true
            }
            State::Over => false,
        }
    }

    fn before(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let word = self.held.trim_start();
        if let Some(rest) = word.strip_prefix(CALL) {
            self.held = rest.to_owned();
            self.state = State::Head;
            return true;
        }
        if let Some(rest) = word.strip_prefix(CALLS_END).filter(|_| self.has_calls) {
            self.held = rest.to_owned();
        } else if CALL.starts_with(word) || (self.has_calls && CALLS_END.starts_with(word)) {
            return false;
        } else if !self.has_calls {
            events.push(CallEvent::Text(CALLS.to_owned()));
        }
        self.state = State::Over;
        false
    }

    fn head(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let end = self.held.find(CALL_END);
        let object = self
            .held
            .find('{')
            .filter(|at| end.is_none_or(|end| *at < end));
        let Some(at) = object.or(end) else {
            if self.held.len() > MAX_HEAD {
                self.give_up(&format!("{CALLS}{CALL}"), events);
                self.state = State::Over;
            }
            return false;
        };
        let name = match self.held[..at].split_once(SEPARATOR) {
            // After the kind of a call is its name, after its name nothing.
            Some((first, second)) => match second.trim().trim_end_matches("```json").trim() {
                "" => first.trim(),
                second => second,
            },
            None => self.held[..at].trim(),
        };
        events.push(CallEvent::Begun {
            name: name.to_owned(),
        });
        self.has_calls = true;
        self.held.drain(..at);
        self.scanner = ObjectScanner::default();
        self.state = State::Arguments;
        if object.is_none() {
            events.push(CallEvent::Arguments("{}".to_owned()));
            events.push(CallEvent::Ended);
            self.state = State::Tail;
        }
        true
    }

    fn arguments(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let text = self.scanner.take(&mut self.held);
        if !text.is_empty() {
            events.push(CallEvent::Arguments(text));
        }
        if self.scanner.is_over() {
            events.push(CallEvent::Ended);
            self.state = State::Tail;
            return true;
        }
        false
    }
}
