//! Calls that are JSON objects, in whatever is around them.

use super::CallEvent;
use crate::answer::scan::{Member, ObjectScanner};

/// What is around the objects of calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    /// What comes before.
    pub(super) mark: &'static str,
    /// The key of a call's name.
    pub(super) name: &'static str,
    /// They are in an array.
    pub(super) is_list: bool,
    /// What comes after, if anything.
    pub(super) end: Option<&'static str>,
}

/// Reads calls from text that follows a mark, piece by piece.
#[derive(Debug, Clone)]
pub(super) struct JsonReader {
    frame: Frame,
    state: State,
    /// All of the current call, in case it is none.
    raw: String,
    scanner: ObjectScanner,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
    /// Arguments that are a JSON text in a string, as some models write them.
    text: Option<String>,
    /// Something was said of the arguments.
    has_arguments: bool,
    /// There was a call.
    has_calls: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before an object.
    Before,
    /// In one.
    Inside,
    /// After one; the rest of the mark that ends it is awaited.
    After,
    /// All are read.
    Over,
}

impl JsonReader {
    /// Of calls in `frame`.
    pub(super) fn new(frame: Frame) -> JsonReader {
        JsonReader {
            frame,
            state: State::Before,
            raw: String::new(),
            scanner: ObjectScanner::default(),
            name: None,
            early: String::new(),
            text: None,
            has_arguments: false,
            has_calls: false,
        }
    }

    /// Reads `text`; returns what it doesn't belong to calls any more, if they are over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        for (at, c) in text.char_indices() {
            if self.state == State::After {
                self.raw.push(c);
                let rest = self.raw.trim_start();
                let end = self.frame.end.unwrap_or_default();
                if !end.starts_with(rest) {
                    // It isn't there: what follows is text.
                    let before = std::mem::take(&mut self.raw);
                    self.state = State::Over;
                    return Some(before + &text[at + c.len_utf8()..]);
                }
                if rest == end {
                    self.state = State::Over;
                }
                continue;
            }
            if self.state == State::Over {
                return Some(text[at..].to_owned());
            }
            self.char(c, events);
        }
        (self.state == State::Over).then(String::new)
    }

    /// The end of the answer.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Inside if self.name.is_some() => self.end_call(events),
            State::Inside => self.give_up(events),
            State::Before if !self.has_calls && !self.raw.trim().is_empty() => self.give_up(events),
            _ => {}
        }
        self.state = State::Over;
    }

    fn char(&mut self, c: char, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Before => {
                self.raw.push(c);
                match c {
                    '{' => {
                        self.state = State::Inside;
                        self.scanner = ObjectScanner::default();
                        self.scanner.push(c);
                    }
                    '[' | ',' if self.frame.is_list => {}
                    ']' if self.frame.is_list => self.end(),
                    c if c.is_whitespace() => {}
                    _ => self.give_up(events),
                }
            }
            State::Inside => {
                self.raw.push(c);
                self.inside(c, events);
            }
            State::After | State::Over => {}
        }
    }

    fn inside(&mut self, c: char, events: &mut Vec<CallEvent>) {
        enum Told {
            Argument,
            Name(Option<String>),
            Arguments,
            Other,
            Over,
        }
        let name = self.frame.name;
        let told = match self.scanner.push(c) {
            Member::Piece(key) if is_arguments(key) => Told::Argument,
            Member::Value(key, value) if key == name => {
                Told::Name(serde_json::from_str(value).ok())
            }
            Member::Value(key, _) if is_arguments(key) => Told::Arguments,
            Member::None | Member::Piece(_) | Member::Value(..) => Told::Other,
            Member::End | Member::Malformed => Told::Over,
        };
        match told {
            Told::Argument => self.argument(c, events),
            Told::Name(Some(name)) => self.named(name, events),
            Told::Name(None) => return self.give_up(events),
            Told::Arguments => self.end_arguments(events),
            Told::Other | Told::Over => {}
        }
        if self.scanner.is_over() {
            self.end_object(events);
        }
    }

    fn end_object(&mut self, events: &mut Vec<CallEvent>) {
        match self.name.is_some() {
            true => self.end_call(events),
            false => self.give_up(events),
        }
    }

    fn named(&mut self, name: String, events: &mut Vec<CallEvent>) {
        if self.name.is_some() {
            return;
        }
        events.push(CallEvent::Begun { name: name.clone() });
        self.name = Some(name);
        if !self.early.is_empty() {
            events.push(CallEvent::Arguments(std::mem::take(&mut self.early)));
        }
    }

    /// A character of the arguments.
    fn argument(&mut self, c: char, events: &mut Vec<CallEvent>) {
        if !self.has_arguments && self.text.is_none() {
            if c.is_whitespace() {
                return;
            }
            if c == '"' {
                self.text = Some(String::new());
            }
        }
        if let Some(text) = &mut self.text {
            text.push(c);
            return;
        }
        self.has_arguments = true;
        self.say(&c.to_string(), events);
    }

    fn end_arguments(&mut self, events: &mut Vec<CallEvent>) {
        if let Some(text) = self.text.take() {
            let inner = serde_json::from_str::<String>(text.trim());
            self.has_arguments = true;
            self.say(&inner.unwrap_or(text), events);
        }
    }

    fn say(&mut self, text: &str, events: &mut Vec<CallEvent>) {
        match (&self.name, events.last_mut()) {
            (None, _) => self.early += text,
            (Some(_), Some(CallEvent::Arguments(said))) => said.push_str(text),
            (Some(_), _) => events.push(CallEvent::Arguments(text.to_owned())),
        }
    }

    fn end_call(&mut self, events: &mut Vec<CallEvent>) {
        self.end_arguments(events);
        if !self.has_arguments {
            events.push(CallEvent::Arguments("{}".to_owned()));
        }
        events.push(CallEvent::Ended);
        self.has_calls = true;
        self.reset();
        match self.frame.is_list {
            true => self.state = State::Before,
            false => self.end(),
        }
    }

    /// After all calls; what ends them may be awaited.
    fn end(&mut self) {
        self.raw.clear();
        self.state = match self.frame.end {
            Some(_) => State::After,
            None => State::Over,
        };
    }

    fn reset(&mut self) {
        self.raw.clear();
        self.name = None;
        self.early.clear();
        self.text = None;
        self.has_arguments = false;
    }

    /// What looked like a call is text.
    fn give_up(&mut self, events: &mut Vec<CallEvent>) {
        let mark = if self.has_calls { "" } else { self.frame.mark };
        events.push(CallEvent::Text(format!(
            "{mark}{}",
            std::mem::take(&mut self.raw)
        )));
        self.reset();
        self.state = State::Over;
    }
}

fn is_arguments(key: &str) -> bool {
    matches!(key, "arguments" | "parameters")
}
