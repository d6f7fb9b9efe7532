//! Calls with a mark, a name and a JSON object each: those of newer Mistrals, `[TOOL_CALLS]NAME[ARGS]{…}`.

use super::{CallEvent, LIST, MAX_HEAD};
use crate::answer::scan::ObjectScanner;

pub(super) const ARGUMENTS: &str = "[ARGS]";
/// Before the id of a call, which some write after its name.
pub(super) const ID: &str = "[CALL_ID]";

/// Reads one call, piece by piece, from what follows its mark.
#[derive(Debug, Default, Clone)]
pub(super) struct NamedReader {
    state: State,
    /// Text that isn't read yet.
    held: String,
    scanner: ObjectScanner,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the arguments.
    #[default]
    Head,
    Arguments,
    Over,
}

impl NamedReader {
    /// Reads `text`; returns what of it doesn't belong to the call any more, if that is over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        if self.state == State::Head {
            let end = match (self.held.find('{'), self.held.find(LIST)) {
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
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Head if self.held.contains(ARGUMENTS) => self.head(self.held.len(), events),
            State::Head => {
                let text = std::mem::take(&mut self.held);
                events.push(CallEvent::Text(format!("{LIST}{text}")));
            }
            State::Arguments => events.push(CallEvent::Ended),
            State::Over => {}
        }
        self.state = State::Over;
    }

    /// What is held is text, after the mark.
    fn give_up(&mut self, events: &mut Vec<CallEvent>) {
        events.push(CallEvent::Text(LIST.to_owned()));
        self.state = State::Over;
    }

    /// The name and what is around it ends at `at`, where arguments begin, if there are any.
    fn head(&mut self, at: usize, events: &mut Vec<CallEvent>) {
        let head = &self.held[..at];
        let name = [ARGUMENTS, ID]
            .iter()
            .filter_map(|mark| head.find(mark))
            .min();
        let name = head[..name.unwrap_or(at)].trim().to_owned();
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        if name.is_empty() || !name.chars().all(is_name) {
            return self.give_up(events);
        }
        events.push(CallEvent::Begun { name });
        self.held.drain(..at);
        self.state = State::Arguments;
        if !self.held.starts_with('{') {
            events.push(CallEvent::Arguments("{}".to_owned()));
            events.push(CallEvent::Ended);
            self.state = State::Over;
        }
    }

    fn arguments(&mut self, events: &mut Vec<CallEvent>) {
        let text = self.scanner.take(&mut self.held);
        if !text.is_empty() {
            events.push(CallEvent::Arguments(text));
        }
        if self.scanner.is_over() {
            events.push(CallEvent::Ended);
            self.state = State::Over;
        }
    }
}
