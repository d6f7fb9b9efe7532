//! Calls with a mark, a name and a JSON object each: those of newer Mistrals, `[TOOL_CALLS]NAME[ARGS]{…}`, and of
//! Functionary v3.1, `<function=NAME>{…}</function>`.

use super::{CallEvent, LIST, MAX_HEAD, is_name};
use crate::answer::scan::ObjectScanner;

pub(super) const ARGUMENTS: &str = "[ARGS]";
/// Before the id of a call, which some write after its name.
pub(super) const ID: &str = "[CALL_ID]";

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_NAMED: &str = ">";
pub(super) const FUNCTION_END: &str = "</function>";

/// What is around the parts of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    call: &'static str,
    /// One of these is after the name.
    named: &'static [&'static str],
    /// What ends it, beside its arguments.
    end: Option<&'static str>,
}

pub(super) const MISTRAL: Marks = Marks {
    call: LIST,
    named: &[ARGUMENTS, ID],
    end: None,
};

pub(super) const FUNCTIONARY: Marks = Marks {
    call: FUNCTION,
    named: &[FUNCTION_NAMED],
    end: Some(FUNCTION_END),
};

/// Reads one call, piece by piece, from what follows its mark.
#[derive(Debug, Clone)]
pub(super) struct NamedReader {
    marks: Marks,
    state: State,
    /// Text that isn't read yet.
    held: String,
    scanner: ObjectScanner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the arguments.
    Head,
    Arguments,
    /// Before what ends it.
    Tail,
    Over,
}

impl NamedReader {
    /// Of a call with `marks`.
    pub(super) fn new(marks: Marks) -> NamedReader {
        NamedReader {
            marks,
            state: State::Head,
            held: String::new(),
            scanner: ObjectScanner::default(),
        }
    }

    /// Reads `text`; returns what of it doesn't belong to the call any more, if that is over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        if self.state == State::Head && self.is_text() {
            self.give_up(events);
        }
        if self.state == State::Head {
            // Without arguments, the end comes, or the next call.
            let next = self.held.find(self.marks.end.unwrap_or(self.marks.call));
            let end = match (self.held.find('{'), next) {
                (Some(object), Some(next)) => Some(object.min(next)),
                (object, next) => object.or(next),
            };
            match end {
                Some(at) => self.head(at, events),
                None if self.held.len() > MAX_HEAD => self.give_up(events),
                None => {}
            }
        }
        if self.state == State::Arguments {
            self.arguments(events);
        }
        if self.state == State::Tail {
            self.tail();
        }
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Head if self.marks.named.iter().any(|mark| self.held.contains(mark)) => {
                self.head(self.held.len(), events);
            }
            State::Head => {
                let text = std::mem::take(&mut self.held);
                events.push(CallEvent::Text(format!("{}{text}", self.marks.call)));
            }
            State::Arguments => events.push(CallEvent::Ended),
            State::Tail | State::Over => {}
        }
        self.state = State::Over;
    }

    /// Whether what is held can't be a call: between the name and what ends the call there are its arguments alone.
    fn is_text(&self) -> bool {
        let (Some(end), [named]) = (self.marks.end, self.marks.named) else {
            return false;
        };
        let Some((_, rest)) = self.held.split_once(named) else {
            return false;
        };
        let rest = rest.trim_start();
        !(rest.starts_with('{') || rest.starts_with(end) || end.starts_with(rest))
    }

    /// What is held is text, after the mark.
    fn give_up(&mut self, events: &mut Vec<CallEvent>) {
        events.push(CallEvent::Text(self.marks.call.to_owned()));
        self.state = State::Over;
    }

    /// The name and what is around it ends at `at`, where arguments begin, if there are any.
    fn head(&mut self, at: usize, events: &mut Vec<CallEvent>) {
        let head = &self.held[..at];
        let ends = self.marks.named.iter();
        let name = ends.filter_map(|mark| head.find(mark)).min();
        let name = head[..name.unwrap_or(at)].trim().to_owned();
        if name.is_empty() || !name.chars().all(is_name) {
            return self.give_up(events);
        }
        events.push(CallEvent::Begun { name });
        self.held.drain(..at);
        self.state = State::Arguments;
        if !self.held.starts_with('{') {
            events.push(CallEvent::Arguments("{}".to_owned()));
            self.end(events);
        }
    }

    fn end(&mut self, events: &mut Vec<CallEvent>) {
        events.push(CallEvent::Ended);
        self.state = State::Tail;
    }

    /// What ends the call isn't part of what follows.
    fn tail(&mut self) {
        let Some(end) = self.marks.end else {
            self.state = State::Over;
            return;
        };
        let word = self.held.trim_start();
        if let Some(rest) = word.strip_prefix(end) {
            self.held = rest.to_owned();
        } else if end.starts_with(word) {
            return;
        }
        self.state = State::Over;
    }

    fn arguments(&mut self, events: &mut Vec<CallEvent>) {
        let text = self.scanner.take(&mut self.held);
        if !text.is_empty() {
            events.push(CallEvent::Arguments(text));
        }
        if self.scanner.is_over() {
            self.end(events);
        }
    }
}
