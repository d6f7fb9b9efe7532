//! Answers that are messages on channels: gpt-oss's form, which its makers call harmony.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! ```
//!
//! The prompt ends with `<|start|>assistant`. A recipient may also come before the channel.

use sterna_text::Tokenizer;

use super::scan::n_beginning;
use super::split::Part;
use super::tools::{Tool, control_id, json_rule, quoted};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// Control tokens that mean something.
pub(super) const MARKS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN];

/// What is before what the model thinks.
pub(crate) const THINK: &str = "<|channel|>analysis<|message|>";
/// What is between that and what it says, and before that alone.
pub(crate) const THOUGHT: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";
pub(crate) const SAY: &str = "<|channel|>final<|message|>";

/// What a message's header has in bytes at most.
const MAX_HEADER: usize = 512;

/// Whether the model of `tokenizer` answers on channels.
pub(crate) fn has(tokenizer: &Tokenizer) -> bool {
    let is_control = |mark| control_id(tokenizer, mark).is_some();
    [START, CHANNEL, MESSAGE, END].into_iter().all(is_control)
}

/// Tokens that end an answer.
pub(super) fn ends(tokenizer: &Tokenizer) -> impl Iterator<Item = u32> {
    [CALL, RETURN]
        .into_iter()
        .filter_map(|mark| tokenizer.token_id(mark))
}

/// Rules of a Lark grammar: `analysis` is a message of what the model thinks, and the beginning of the next,
/// `analysis_rest` the same without its beginning, and `final_header` what is before what it says.
pub(super) fn rules(tokenizer: &Tokenizer) -> String {
    let mark = |mark| token(tokenizer, mark);
    let (start, channel, message, end) = (mark(START), mark(CHANNEL), mark(MESSAGE), mark(END));
    format!(
        "analysis: {channel} \"analysis\" {message} analysis_rest\n\
         analysis_rest: thought {end} {start} \"assistant\"\n\
         thought: /(?s:.*)/\n\
         final_header: {channel} \"final\" {message}\n"
    )
}

/// The rules of a Lark grammar for a call of `tool`, the first of which is `rule`.
pub(super) fn call_rules(rule: &str, tool: &Tool, tokenizer: &Tokenizer) -> String {
    let mark = |mark| token(tokenizer, mark);
    let (channel, constrain, message) = (mark(CHANNEL), mark(CONSTRAIN), mark(MESSAGE));
    let header = quoted(&format!("commentary to=functions.{} ", tool.name));
    let arguments = json_rule(&format!("{rule}_arguments"), tool.parameters.clone());
    format!(
        "{rule}: {channel} {header} {constrain} \"json\" {message} {rule}_arguments\n{arguments}"
    )
}

fn token(tokenizer: &Tokenizer, mark: &str) -> String {
    match tokenizer.token_id(mark) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(mark),
    }
}

/// Where an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Body {
    /// In what the model thinks.
    Thought,
    /// In what it says.
    #[default]
    Text,
    /// In the arguments of a call.
    Call,
}

/// Tells the parts of an answer apart, piece by piece.
#[derive(Debug, Clone)]
pub(super) struct ChannelReader {
    /// What the current message is; `None` before it, or in its header.
    body: Option<Body>,
    /// Text that isn't read yet.
    held: String,
    /// There may be calls.
    has_tools: bool,
    n_calls: usize,
    /// Something was thought; something was said.
    told: [bool; 2],
    /// Something was said in this message.
    is_told: bool,
}

impl ChannelReader {
    /// Of an answer that begins in a `body`, or with the header of a message.
    pub(super) fn new(body: Option<Body>, has_tools: bool) -> ChannelReader {
        ChannelReader {
            body,
            held: String::new(),
            has_tools,
            n_calls: 0,
            told: [false; 2],
            is_told: false,
        }
    }

    /// Whether what comes next is what the model thinks.
    pub(super) fn is_reasoning(&self) -> bool {
        self.body == Some(Body::Thought)
    }

    pub(super) fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// The parts that `text` completes.
    pub(super) fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.held += text;
        while self.advance(parts) {}
    }

    /// What was held back, at the end of the answer.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        let text = std::mem::take(&mut self.held);
        match self.body {
            Some(body) => {
                self.say(body, &text, parts);
                self.end(body, parts);
            }
            // A header alone says nothing.
            None if is_header(&text) => {}
            None => self.say(Body::Text, &text, parts),
        }
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(body) = self.body else {
            let Some(at) = self.held.find(MESSAGE) else {
                if self.held.len() > MAX_HEADER || !is_header(&self.held) {
                    // A message without one; a mark that it begins with would begin another header.
                    let marks = [START, CHANNEL].into_iter();
                    let mut marks = marks.filter(|mark| self.held.starts_with(mark));
                    let n_mark = marks.next().map_or(0, str::len);
                    self.held.drain(..n_mark);
                    self.body = Some(Body::Text);
                    return true;
                }
                return false;
            };
            let rest = self.held.split_off(at + MESSAGE.len());
            let header = std::mem::replace(&mut self.held, rest);
            self.begin(&header[..at], parts);
            return true;
        };
        let ends = [END, CALL, RETURN, START, CHANNEL];
        let found = ends
            .iter()
            .filter_map(|end| Some((self.held.find(end)?, *end)));
        if let Some((at, end)) = found.min() {
            let rest = self.held.split_off(at);
            let text = std::mem::take(&mut self.held);
            self.say(body, &text, parts);
            self.end(body, parts);
            // What begins a header is part of it.
            let is_header = matches!(end, START | CHANNEL);
            self.held = rest[if is_header { 0 } else { end.len() }..].to_owned();
            self.body = None;
            return true;
        }
        let n_held = ends.iter().map(|end| n_beginning(&self.held, end)).max();
        let rest = self.held.split_off(self.held.len() - n_held.unwrap_or(0));
        let text = std::mem::replace(&mut self.held, rest);
        self.say(body, &text, parts);
        false
    }

    /// A message with this header begins.
    fn begin(&mut self, header: &str, parts: &mut Vec<Part>) {
        let word = |text: &str| {
            let end = text.find(|c: char| c.is_whitespace() || c == '<');
            text[..end.unwrap_or(text.len())].to_owned()
        };
        let recipient = header.split_once("to=").map(|(_, text)| word(text));
        let function = recipient
            .as_deref()
            .and_then(|to| to.strip_prefix("functions."));
        let channel = header
            .split_once(CHANNEL)
            .map(|(_, text)| word(text.trim_start()));
        self.is_told = false;
        self.body = Some(match (function, channel.as_deref()) {
            (Some(name), _) if self.has_tools => {
                let (index, name) = (self.n_calls, name.to_owned());
                self.n_calls += 1;
                parts.push(Part::CallBegun { index, name });
                Body::Call
            }
            (None, Some("analysis")) => Body::Thought,
            _ => Body::Text,
        });
    }

    fn say(&mut self, body: Body, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let is_first = !std::mem::replace(&mut self.is_told, true);
        let index = match body {
            Body::Call => {
                let (index, text) = (self.n_calls.saturating_sub(1), text.to_owned());
                return parts.push(Part::CallArguments { index, text });
            }
            Body::Thought => 0,
            Body::Text => 1,
        };
        // Several messages on one channel are paragraphs.
        let is_more = std::mem::replace(&mut self.told[index], true);
        let text = match is_first && is_more {
            true => format!("\n\n{text}"),
            false => text.to_owned(),
        };
        parts.push(match body {
            Body::Thought => Part::Reasoning(text),
            _ => Part::Text(text),
        });
    }

    /// A message is over.
    fn end(&mut self, body: Body, parts: &mut Vec<Part>) {
        if body == Body::Call {
            let index = self.n_calls.saturating_sub(1);
            if !self.is_told {
                let text = "{}".to_owned();
                parts.push(Part::CallArguments { index, text });
            }
            parts.push(Part::CallEnded { index });
        }
        self.is_told = false;
    }
}

/// Whether `text` may be a header, or begin one.
fn is_header(text: &str) -> bool {
    let word = text.trim_start();
    [START, CHANNEL, "assistant", "to="]
        .iter()
        .any(|begin| begin.starts_with(word) || word.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::super::split::{call, joined};
    use super::*;

    /// The parts of `text` in pieces of `n` characters, neighbours joined.
    fn read(body: Option<Body>, text: &str, n: usize) -> Vec<Part> {
        let mut reader = ChannelReader::new(body, true);
        let mut parts = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(n) {
            reader.push(&piece.iter().collect::<String>(), &mut parts);
        }
        reader.finish(&mut parts);
        joined(parts)
    }

    #[test]
    fn messages_are_told_apart_however_they_are_cut() {
        let text = |text: &str| Part::Text(text.to_owned());
        let thought = |text: &str| Part::Reasoning(text.to_owned());
        let call = |index, name, arguments| call(index, name, arguments).to_vec();
        for (body, input, parts) in [
            (
                None,
                "<|channel|>analysis<|message|>So <|it is<|end|><|start|>assistant<|channel|>final<|message|>4<5.<|return|>",
                vec![thought("So <|it is"), text("4<5.")],
            ),
            (
                None,
                "<|channel|>analysis<|message|>h<|end|><|start|>assistant<|channel|>commentary<|message|>Plan.<|end|>\
                 <|start|>assistant<|channel|>commentary to=functions.a <|constrain|>json<|message|>{\"x\": 1}<|call|>",
                [
                    vec![thought("h"), text("Plan.")],
                    call(0, "a", "{\"x\": 1}"),
                ]
                .concat(),
            ),
            // The recipient before the channel, two calls, no arguments, the end left out.
            (
                None,
                " to=functions.a<|channel|>commentary json<|message|><|end|><|start|>assistant to=functions.b\
                 <|channel|>commentary<|constrain|>json<|message|>{\"y\": ",
                [call(0, "a", "{}"), call(1, "b", "{\"y\": ")].concat(),
            ),
            // Twice on one channel, with no end of a message.
            (
                None,
                "<|channel|>analysis<|message|>a<|channel|>analysis<|message|>b<|start|>assistant<|channel|>final\
                 <|message|>c",
                vec![thought("a\n\nb"), text("c")],
            ),
            // For no function.
            (
                None,
                "<|channel|>commentary to=browser.open<|message|>x<|call|>",
                vec![text("x")],
            ),
            (None, "<|channel|>analy", vec![]),
            (None, "{\"x\": 1}", vec![text("{\"x\": 1}")]),
            (
                Some(Body::Thought),
                "so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
                vec![thought("so"), text("Yes")],
            ),
            (
                Some(Body::Text),
                " and so on<|retu",
                vec![text(" and so on<|retu")],
            ),
        ] {
            for n in 1..=input.chars().count() {
                assert_eq!(read(body, input, n), parts, "{input} by {n}");
            }
        }
    }

    #[test]
    fn headers_without_an_end_are_text() {
        for mark in [START, CHANNEL] {
            let long = "x".repeat(2 * MAX_HEADER);
            for n in [1, 7, 4 * MAX_HEADER] {
                let parts = read(None, &format!("{mark}{long}"), n);
                assert_eq!(parts, [Part::Text(long.clone())], "{mark} by {n}");
            }
        }
    }
}
