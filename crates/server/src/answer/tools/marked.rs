//! Calls that are names and JSON objects between control tokens: those of DeepSeek and Kimi K2.
//!
//! DeepSeek V3 and R1 (the line breaks are theirs):
//!
//! ```text
//! <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
//! ```json
//! {…}
//! ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! ```
//!
//! V3.1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`
//!
//! Kimi K2, where the name is in the id of the call:
//!
//! ```text
//! <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
//! <|tool_calls_section_end|>
//! ```

use super::{CallEvent, MAX_HEAD};
use crate::answer::scan::ObjectScanner;

/// What is around calls and their parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) calls: &'static str,
    pub(super) calls_end: &'static str,
    pub(super) call: &'static str,
    pub(super) call_end: &'static str,
    /// After the name, or between the kind of a call and its name.
    pub(super) separator: &'static str,
}

pub(super) const DEEPSEEK: Marks = Marks {
    calls: "<｜tool▁calls▁begin｜>",
    calls_end: "<｜tool▁calls▁end｜>",
    call: "<｜tool▁call▁begin｜>",
    call_end: "<｜tool▁call▁end｜>",
    separator: "<｜tool▁sep｜>",
};

pub(super) const KIMI: Marks = Marks {
    calls: "<|tool_calls_section_begin|>",
    calls_end: "<|tool_calls_section_end|>",
    call: "<|tool_call_begin|>",
    call_end: "<|tool_call_end|>",
    separator: "<|tool_call_argument_begin|>",
};

/// What is before the name in the id of a call of Kimi K2. After it come a colon and its number, of all calls of a
/// conversation.
pub(super) const ID_BEGIN: &str = "functions.";

impl Marks {
    /// All of them.
    pub(super) fn all(&self) -> [&'static str; 5] {
        [
            self.calls,
            self.calls_end,
            self.call,
            self.call_end,
            self.separator,
        ]
    }

    /// The name of the function in what is before the arguments.
    fn name<'a>(&self, head: &'a str) -> &'a str {
        let name = match head.split_once(self.separator) {
            // After the kind of a call is its name, after its name nothing.
            Some((first, second)) => match second.trim().trim_end_matches("```json").trim() {
                "" => first.trim(),
                second => second,
            },
            None => head.trim(),
        };
        if *self != KIMI {
            return name;
        }
        let name = name.strip_prefix(ID_BEGIN).unwrap_or(name);
        let number = name.rsplit_once(':').filter(|(_, number)| {
            !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
        });
        number.map_or(name, |(name, _)| name)
    }
}

/// Reads calls, piece by piece, from what follows the mark that begins all of them.
#[derive(Debug, Clone)]
pub(super) struct MarkedReader {
    marks: Marks,
    state: State,
    /// Text that isn't read yet.
    held: String,
    scanner: ObjectScanner,
    has_calls: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a call, or the end of all.
    Before,
    /// Before its arguments.
    Head,
    Arguments,
    /// Before its end.
    Tail,
    Over,
}

impl MarkedReader {
    /// Of calls between `marks`.
    pub(super) fn new(marks: Marks) -> MarkedReader {
        MarkedReader {
            marks,
            state: State::Before,
            held: String::new(),
            scanner: ObjectScanner::default(),
            has_calls: false,
        }
    }

    /// Reads `text`; returns what of it doesn't belong to calls any more, if they are over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        while self.advance(events) {}
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Before if !self.has_calls => self.give_up("", events),
            State::Head if !self.has_calls => self.give_up(self.marks.call, events),
            State::Arguments => events.push(CallEvent::Ended),
            _ => {}
        }
        self.state = State::Over;
    }

    /// What was held is text, after the mark of all calls and this `mark`.
    fn give_up(&mut self, mark: &str, events: &mut Vec<CallEvent>) {
        let text = std::mem::take(&mut self.held);
        let calls = self.marks.calls;
        events.push(CallEvent::Text(format!("{calls}{mark}{text}")));
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, events: &mut Vec<CallEvent>) -> bool {
        match self.state {
            State::Before => self.before(events),
            State::Head => self.head(events),
            State::Arguments => self.arguments(events),
            State::Tail => {
                let Marks {
                    call,
                    call_end,
                    calls_end,
                    ..
                } = self.marks;
                let ends = [call_end, call, calls_end];
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
                let n_end = if end == call_end { end.len() } else { 0 };
                self.held.drain(..at + n_end);
                self.state = State::Before;
                true
            }
            State::Over => false,
        }
    }

    fn before(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let Marks {
            calls,
            calls_end,
            call,
            ..
        } = self.marks;
        let word = self.held.trim_start();
        if let Some(rest) = word.strip_prefix(call) {
            self.held = rest.to_owned();
            self.state = State::Head;
            return true;
        }
        if let Some(rest) = word.strip_prefix(calls_end).filter(|_| self.has_calls) {
            self.held = rest.to_owned();
        } else if call.starts_with(word) || (self.has_calls && calls_end.starts_with(word)) {
            return false;
        } else if !self.has_calls {
            events.push(CallEvent::Text(calls.to_owned()));
        }
        self.state = State::Over;
        false
    }

    fn head(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let end = self.held.find(self.marks.call_end);
        let object = self
            .held
            .find('{')
            .filter(|at| end.is_none_or(|end| *at < end));
        let Some(at) = object.or(end) else {
            if self.held.len() > MAX_HEAD {
                self.give_up(self.marks.call, events);
                self.state = State::Over;
            }
            return false;
        };
        let name = self.marks.name(&self.held[..at]);
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
