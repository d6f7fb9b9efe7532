//! The text of an answer, told apart: what the model thinks, what it says, what it calls.

use std::sync::Arc;

use sterna::generate::FirstWord;

use super::channels::{Body, ChannelReader};
use super::recipients::RecipientReader;
use super::scan::n_beginning;
use super::thoughts::Thoughts;
use super::tools::{CallEvent, CallReader, Tool, ToolFormat};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Text(String),
    /// It calls this function.
    CallBegun { index: usize, name: String },
    /// More of the arguments of the newest call, as JSON text.
    CallArguments { index: usize, text: String },
    /// The newest call is complete.
    CallEnded { index: usize },
}

/// What an answer is expected to have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    /// The prompt ends where the model begins to think.
    pub(crate) opens_thinking: bool,
    /// It may begin with what the model thinks.
    pub(crate) may_think: bool,
    /// What is around that.
    pub(crate) thoughts: &'static Thoughts,
    /// Calls, in this format.
    pub(crate) calls: Option<ToolFormat>,
    /// There is one at most, which ends the answer.
    pub(crate) is_single: bool,
    /// What may be called.
    pub(crate) tools: Arc<[Tool]>,
    /// White space before the first word is the template's doing.
    pub(crate) trims: bool,
    /// The answer is messages, and begins with the header of one unless it was begun.
    pub(crate) messages: Option<Messages>,
    pub(crate) is_begun: bool,
}

/// Answers that are messages, each with a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Messages {
    /// On channels: gpt-oss.
    Channels,
    /// To recipients: Functionary v3.2.
    Recipients,
}

/// Tells the parts of an answer apart, piece by piece.
#[derive(Debug, Clone)]
pub(crate) struct Splitter {
    expected: Expected,
    state: State,
    /// Text that may be the beginning of a mark.
    held: String,
    first_word: FirstWord,
    /// Something was said.
    has_text: bool,
    /// Something was thought.
    has_thought: bool,
    n_calls: usize,
    /// Its only call is complete: nothing follows.
    is_over: bool,
}

#[derive(Debug, Clone)]
enum State {
    /// Before the first word.
    Begin,
    Reasoning,
    Text,
    Calls(Box<CallReader>),
    Channels(Box<ChannelReader>),
    Recipients(Box<RecipientReader>),
}

impl Splitter {
    pub(crate) fn new(expected: Expected) -> Splitter {
        Splitter {
            state: match (expected.messages, expected.opens_thinking) {
                (Some(Messages::Channels), is_thought) => {
                    let begun = expected.is_begun.then_some(Body::Text);
                    let body = if is_thought {
                        Some(Body::Thought)
                    } else {
                        begun
                    };
                    let reader = ChannelReader::new(body, expected.calls.is_some());
                    State::Channels(Box::new(reader))
                }
                (Some(Messages::Recipients), _) => {
                    let tools = expected.calls.map(|_| &expected.tools);
                    let reader = RecipientReader::new(expected.is_begun, tools);
                    State::Recipients(Box::new(reader))
                }
                (None, true) => State::Reasoning,
                (None, false) => State::Begin,
            },
            held: String::new(),
            first_word: FirstWord::new(expected.trims),
            has_text: false,
            has_thought: false,
            n_calls: 0,
            is_over: false,
            expected,
        }
    }

    /// Whether what comes next is what the model thinks.
    pub(crate) fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Channels(reader) => reader.is_reasoning(),
            state => matches!(state, State::Reasoning),
        }
    }

    /// How many calls there were.
    pub(crate) fn n_calls(&self) -> usize {
        match &self.state {
            State::Channels(reader) => reader.n_calls(),
            State::Recipients(reader) => reader.n_calls(),
            _ => self.n_calls,
        }
    }

    /// Whether the answer's only call is complete, so that nothing follows.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The parts that `text` completes.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        if !self.is_over {
            self.held += text;
            while self.advance(&mut parts, false) {}
            self.is_over = self.cut(&mut parts);
        }
        parts
    }

    /// Leaves out what follows the only call; whether it is complete.
    fn cut(&self, parts: &mut Vec<Part>) -> bool {
        let is_end = |part: &Part| matches!(part, Part::CallEnded { .. });
        let end = parts.iter().position(is_end);
        let end = end.filter(|_| self.expected.is_single);
        parts.truncate(end.map_or(parts.len(), |at| at + 1));
        end.is_some()
    }

    /// What was held back, at the end of the answer.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if self.is_over {
            return parts;
        }
        while self.advance(&mut parts, true) {}
        match &mut self.state {
            State::Calls(reader) => {
                let mut events = Vec::new();
                reader.finish(&mut events);
                self.called(events, &mut parts);
            }
            State::Channels(reader) => reader.finish(&mut parts),
            State::Recipients(reader) => reader.finish(&mut parts),
            State::Begin | State::Reasoning | State::Text => {}
        }
        self.cut(&mut parts);
        parts
    }

    /// Takes what is certain out of the held text; true if the state changed, so that there may be more.
    fn advance(&mut self, parts: &mut Vec<Part>, is_end: bool) -> bool {
        match &mut self.state {
            State::Begin => {
                let word = self.held.trim_start();
                if word.is_empty() && !is_end {
                    return false;
                }
                let Thoughts { begin, said, .. } = self.expected.thoughts;
                let think = self.expected.may_think.then_some(*begin);
                let say = said.map(|[begin, _]| begin);
                let begins = |mark: &&str| mark.starts_with(word) && *mark != word;
                if !is_end && [think, say].iter().flatten().any(begins) {
                    return false;
                }
                let after = |mark: Option<&str>| Some(word.strip_prefix(mark?)?.to_owned());
                if let Some(rest) = after(think) {
                    self.held = rest;
                    self.state = State::Reasoning;
                } else if let Some(rest) = after(say) {
                    self.held = rest;
                    self.state = State::Text;
                } else if self.expected.calls == Some(ToolFormat::Bare) && word.starts_with('{') {
                    self.held = word.to_owned();
                    let tools = &self.expected.tools;
                    self.state = State::Calls(CallReader::new(ToolFormat::Bare, tools).into());
                } else {
                    self.state = State::Text;
                }
                true
            }
            State::Reasoning => {
                let end = self.expected.thoughts.end;
                if let Some(at) = self.held.find(end) {
                    let rest = self.held.split_off(at);
                    let thought = std::mem::take(&mut self.held);
                    let thought = thought.trim_end();
                    if !thought.is_empty() {
                        parts.push(Part::Reasoning(self.thought(thought)));
                    }
                    self.held = rest[end.len()..].trim_start().to_owned();
                    self.first_word = FirstWord::new(true);
                    self.state = State::Begin;
                    self.expected.may_think = false;
                    return true;
                }
                let n_held = match is_end {
                    true => 0,
                    false => {
                        // White space before the end isn't part of it.
                        let mark = n_beginning(&self.held, end);
                        let before = &self.held[..self.held.len() - mark];
                        mark + before.len() - before.trim_end().len()
                    }
                };
                let rest = self.held.split_off(self.held.len() - n_held);
                let thought = std::mem::replace(&mut self.held, rest);
                if !thought.is_empty() {
                    parts.push(Part::Reasoning(self.thought(&thought)));
                }
                false
            }
            State::Text => {
                let call = self.expected.calls.and_then(ToolFormat::mark);
                let end = self.expected.thoughts.said.map(|[_, end]| end);
                let marks = [call, end];
                let marks = || marks.iter().flatten().copied();
                let found = marks().filter_map(|mark| Some((self.held.find(mark)?, mark)));
                if let Some((at, mark)) = found.min() {
                    let rest = self.held.split_off(at);
                    let text = std::mem::take(&mut self.held);
                    self.held = rest[mark.len()..].to_owned();
                    if Some(mark) != call {
                        self.say(&text, parts);
                        return true;
                    }
                    // White space before a call separates it from what was said, if anything was.
                    self.say(text.trim_end(), parts);
                    let format = self.expected.calls.unwrap_or_default();
                    let tools = &self.expected.tools;
                    self.state = State::Calls(CallReader::new(format, tools).into());
                    return true;
                }
                let mark = marks().map(|mark| n_beginning(&self.held, mark)).max();
                let n_held = match mark.filter(|_| !is_end) {
                    None => 0,
                    Some(mark) => {
                        let before = &self.held[..self.held.len() - mark];
                        mark + before.len() - before.trim_end().len()
                    }
                };
                let rest = self.held.split_off(self.held.len() - n_held);
                let text = std::mem::replace(&mut self.held, rest);
                match is_end && self.n_calls > 0 && text.trim().is_empty() {
                    true => {}
                    false => self.say(&text, parts),
                }
                false
            }
            State::Channels(reader) => {
                reader.push(&std::mem::take(&mut self.held), parts);
                false
            }
            State::Recipients(reader) => {
                reader.push(&std::mem::take(&mut self.held), parts);
                false
            }
            State::Calls(reader) => {
                let text = std::mem::take(&mut self.held);
                let mut events = Vec::new();
                let rest = reader.push(&text, &mut events);
                self.called(events, parts);
                let Some(rest) = rest else { return false };
                self.held = rest;
                self.state = State::Text;
                // After calls, white space isn't said.
                if self.n_calls > 0 && !self.has_text {
                    self.first_word = FirstWord::new(true);
                }
                true
            }
        }
    }

    /// A piece of what the model thinks, the first of which begins on a line of its own.
    fn thought(&mut self, text: &str) -> String {
        let text = match std::mem::replace(&mut self.has_thought, true) {
            false => text.trim_start_matches(['\r', '\n']),
            true => text,
        };
        text.to_owned()
    }

    fn say(&mut self, text: &str, parts: &mut Vec<Part>) {
        let text = self.first_word.push(text);
        if !text.is_empty() {
            self.has_text = true;
            parts.push(Part::Text(text));
        }
    }

    fn called(&mut self, events: Vec<CallEvent>, parts: &mut Vec<Part>) {
        for event in events {
            let index = self.n_calls.saturating_sub(1);
            match event {
                CallEvent::Begun { name } => {
                    let index = self.n_calls;
                    self.n_calls += 1;
                    parts.push(Part::CallBegun { index, name });
                }
                CallEvent::Arguments(text) => parts.push(Part::CallArguments { index, text }),
                CallEvent::Ended => parts.push(Part::CallEnded { index }),
                CallEvent::Text(text) => self.say(&text, parts),
            }
        }
    }
}

/// `parts` with neighbours joined.
#[cfg(test)]
pub(super) fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(Part::Text(said)), Part::Text(more))
            | (Some(Part::Reasoning(said)), Part::Reasoning(more))
            | (
                Some(Part::CallArguments { text: said, .. }),
                Part::CallArguments { text: more, .. },
            ) => *said += &more,
            (_, part) => joined.push(part),
        }
    }
    joined
}

/// A whole call.
#[cfg(test)]
pub(super) fn call(index: usize, name: &str, arguments: &str) -> [Part; 3] {
    let (name, text) = (name.to_owned(), arguments.to_owned());
    [
        Part::CallBegun { index, name },
        Part::CallArguments { index, text },
        Part::CallEnded { index },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::thoughts::{COMMAND, GEMMA, MINICPM};

    /// The parts of `text` in pieces of `n` characters, neighbours joined.
    fn split(expected: &Expected, text: &str, n: usize) -> Vec<Part> {
        let mut splitter = Splitter::new(expected.clone());
        let chars: Vec<char> = text.chars().collect();
        let pieces = chars
            .chunks(n)
            .map(|piece| piece.iter().collect::<String>());
        let mut parts: Vec<Part> = pieces.flat_map(|piece| splitter.push(&piece)).collect();
        parts.extend(splitter.finish());
        joined(parts)
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn thought(text: &str) -> Part {
        Part::Reasoning(text.to_owned())
    }

    #[test]
    fn nothing_follows_the_only_call() {
        let list = "[TOOL_CALLS][{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\"}] so";
        let channels = "<|channel|>commentary to=functions.a<|message|>{}<|end|><|start|>assistant<|channel|>\
                        commentary to=functions.b<|message|>{}<|end|>";
        for (format, input) in [
            (ToolFormat::List, list),
            (ToolFormat::Channels, channels),
            (
                ToolFormat::Bare,
                "{\"name\": \"a\", \"parameters\": {}}\n{\"name\": \"b\"}",
            ),
        ] {
            let expected = Expected {
                calls: Some(format),
                messages: (format == ToolFormat::Channels).then_some(Messages::Channels),
                is_single: true,
                ..Expected::default()
            };
            for n in 1..=input.chars().count() {
                assert_eq!(split(&expected, input, n), call(0, "a", "{}"), "by {n}");
            }
            let cut = split(&expected, &input[..input.len() / 3], 1);
            assert!(cut.len() <= 3, "{cut:?}");
        }
    }

    #[test]
    fn parts_are_told_apart_however_the_text_is_cut() {
        let plain = Expected {
            trims: true,
            ..Expected::default()
        };
        let thinks = Expected {
            may_think: true,
            ..plain.clone()
        };
        let opened = Expected {
            opens_thinking: true,
            ..thinks.clone()
        };
        let calls = |format| Expected {
            calls: Some(format),
            ..thinks.clone()
        };
        let family = |thoughts, calls| Expected {
            thoughts,
            calls,
            ..thinks.clone()
        };
        let tagged = calls(ToolFormat::Tagged);
        let one = "<tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        let parameters = "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n\
                          <parameter=y>\nb\n</parameter>\n</function>\n</tool_call>";
        for (expected, input, parts) in [
            (
                &plain,
                " Hello <b> there\n",
                vec![text("Hello <b> there\n")],
            ),
            (&plain, "<think>a</think>", vec![text("<think>a</think>")]),
            (
                &thinks,
                "<think>\nso\n\nit is\n</think>\n\nYes",
                vec![thought("so\n\nit is"), text("Yes")],
            ),
            (&thinks, "<thing>", vec![text("<thing>")]),
            (&thinks, "<think>\n\n</think>\n\nYes", vec![text("Yes")]),
            (&opened, "\nso</think>Yes", vec![thought("so"), text("Yes")]),
            (&opened, "so", vec![thought("so")]),
            (
                &tagged,
                &format!("Look: {one}"),
                [&[text("Look:")], &call(0, "a", "{\"x\": 1}")[..]].concat(),
            ),
            (
                &tagged,
                &format!("<think>h</think>\n{one}\n{one}\n"),
                [
                    &[thought("h")],
                    &call(0, "a", "{\"x\": 1}")[..],
                    &call(1, "a", "{\"x\": 1}")[..],
                ]
                .concat(),
            ),
            (&tagged, "a <tool b", vec![text("a <tool b")]),
            (
                &tagged,
                "<tool_call>no</tool_call>",
                vec![text("<tool_call>no</tool_call>")],
            ),
            (
                &calls(ToolFormat::Parameters),
                &format!("<think>h</think>Look:\n\n{parameters}\n{parameters}<|x|>"),
                [
                    &[thought("h"), text("Look:")],
                    &call(0, "a", "{\"x\": 1, \"y\": \"b\"}")[..],
                    &call(1, "a", "{\"x\": 1, \"y\": \"b\"}")[..],
                    &[text("<|x|>")],
                ]
                .concat(),
            ),
            (
                &calls(ToolFormat::List),
                "[TOOL_CALLS][{\"name\": \"a\", \"arguments\": {}}]",
                call(0, "a", "{}").to_vec(),
            ),
            (
                &calls(ToolFormat::Bare),
                "\n\n{\"name\": \"a\", \"parameters\": {}}",
                call(0, "a", "{}").to_vec(),
            ),
            (
                &calls(ToolFormat::Bare),
                "{\"a\": 1}",
                vec![text("{\"a\": 1}")],
            ),
            (&calls(ToolFormat::Bare), "So: {}", vec![text("So: {}")]),
            (
                &family(&COMMAND, None),
                "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>Yes <|<|END_RESPONSE|>",
                vec![thought("so"), text("Yes <|")],
            ),
            (
                &family(&COMMAND, None),
                "<|START_RESPONSE|>Yes \n<|END_RESPONSE|>",
                vec![text("Yes \n")],
            ),
            (&family(&COMMAND, None), "Yes\n", vec![text("Yes\n")]),
            (&family(&COMMAND, None), "<|START_", vec![text("<|START_")]),
            (
                &family(&COMMAND, Some(ToolFormat::Actions)),
                "<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \
                 \"a\", \"parameters\": {\"x\": 1}}\n]<|END_ACTION|>",
                [&[thought("so")], &call(0, "a", "{\"x\": 1}")[..]].concat(),
            ),
            (
                &family(&MINICPM, Some(ToolFormat::PythonBlock)),
                "<|thought_start|>\nso\n<|thought_end|>\n<|tool_call_start|>\n```python\na(x=1)\n```\n<|tool_call_end|>\n",
                [&[thought("so")], &call(0, "a", "{\"x\": 1}")[..]].concat(),
            ),
            (
                &family(&GEMMA, Some(ToolFormat::Gemma)),
                "<|channel>thought\nso <channel\n<channel|><|tool_call>call:a{x:1}<tool_call|>",
                [&[thought("so <channel")], &call(0, "a", "{\"x\": 1}")[..]].concat(),
            ),
            (
                &family(&GEMMA, None),
                "<|channel>thought\n<channel|>Yes",
                vec![text("Yes")],
            ),
        ] {
            for n in 1..=input.chars().count() {
                assert_eq!(split(expected, input, n), parts, "{input:?} by {n}");
            }
        }
    }
}
