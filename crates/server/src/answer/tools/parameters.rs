//! Calls whose parameters are written one by one, as text: Qwen3.5's and Qwen3-Coder's.
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```

use std::sync::Arc;

use serde_json::Value;

use super::values::{Kinds, value};
use super::{CallEvent, MAX_RULES, TAG, TAG_END, Tool, json_rule, quoted};
use crate::answer::scan::n_beginning;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// How a call is written.
pub(super) const EXAMPLE: &str = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n\
                                  </tool_call>";

/// Names of functions and parameters in bytes at most: what is longer is none.
const MAX_NAME: usize = 256;

/// Parameters of a function that doesn't say which it has, where a grammar says what may come.
const MAX_PARAMETERS: usize = 16;

/// The rules of a Lark grammar for what is inside the tags: `rule` for a call of `tool`. Parameters come in the order
/// of the schema, as in JSON.
pub(super) fn rules(rule: &str, tool: &Tool) -> String {
    let begin = quoted(&format!("{FUNCTION}{}>\n", tool.name));
    let end = quoted(FUNCTION_END);
    let Some(properties) = tool.properties() else {
        return format!("{rule}: {begin} any_parameter{{0,{MAX_PARAMETERS}}} {end}\n");
    };
    let mut rules = String::new();
    let mut names = String::new();
    let required = tool.required();
    for (index, name) in properties.keys().enumerate() {
        if rules.len() > MAX_RULES {
            break;
        }
        let parameter = format!("{rule}_{index}");
        let maybe = if required.contains(&name[..]) {
            ""
        } else {
            "?"
        };
        names += &format!(" {parameter}{maybe}");
        let begin = quoted(&format!("{PARAMETER}{name}>\n"));
        let end = quoted(&format!("\n{PARAMETER_END}\n"));
        let Some(choices) = tool.choices(name) else {
            rules += &format!("{parameter}: {begin} text \"\\n\"\n");
            continue;
        };
        let mut all: Vec<String> = (choices.texts.iter())
            .map(|choice| quoted(&format!("{choice}\n{PARAMETER_END}\n")))
            .collect();
        for (index, schema) in choices.schemas.into_iter().enumerate() {
            let value = format!("{parameter}_value_{index}");
            rules += &json_rule(&value, tool.with_definitions(schema.clone()));
            all.push(format!("{value} {end}"));
        }
        rules += &format!("{parameter}: {begin} ({})\n", all.join(" | "));
    }
    format!("{rule}: {begin}{names} {end}\n{rules}")
}

/// Rules that those of all tools share.
pub(super) const SHARED_RULES: &str = concat!(
    "any_parameter: /<parameter=[^<>\\n]{1,64}>\\n/ text \"\\n\"\n",
    "text[lazy]: /(?s:.*)<\\/parameter>/\n",
);

/// Reads one call, piece by piece, from what follows the opening tag.
#[derive(Debug, Clone)]
pub(super) struct ParameterReader {
    tools: Arc<[Tool]>,
    state: State,
    /// Text that isn't read yet.
    held: String,
    name: String,
    n_parameters: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the function, or in its tag.
    Function,
    /// Before a parameter, or in its tag.
    Parameter,
    /// In the value of one, at its beginning.
    Begin(Kinds),
    /// In a value of these kinds.
    Value(Kinds),
    /// After the function.
    After,
    Over,
}

impl ParameterReader {
    /// Of a call of one of `tools`.
    pub(super) fn new(tools: Arc<[Tool]>) -> ParameterReader {
        ParameterReader {
            tools,
            state: State::Function,
            held: String::new(),
            name: String::new(),
            n_parameters: 0,
        }
    }

    /// Reads `text`; returns what of it doesn't belong to the call any more, if that is over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        self.held += text;
        while self.advance(events) {}
        (self.state == State::Over).then(|| std::mem::take(&mut self.held))
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Function => events.push(CallEvent::Text(format!("{TAG}{}", self.held))),
            State::Parameter | State::Begin(_) => events.push(CallEvent::Ended),
            State::Value(kinds) => {
                let end = self.n_end();
                let text = &self.held[..self.held.len() - end];
                let text = match kinds.is_text() {
                    true => escaped(text),
                    false => text.trim().to_owned(),
                };
                say(text, events);
                events.push(CallEvent::Ended);
            }
            State::After | State::Over => {}
        }
        self.state = State::Over;
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, events: &mut Vec<CallEvent>) -> bool {
        match self.state {
            State::Function => self.function(events),
            State::Parameter => self.parameter(events),
            State::Begin(kinds) => {
                if self.held.is_empty() {
                    return false;
                }
                // A value begins on a line of its own.
                if self.held.starts_with('\n') {
                    self.held.remove(0);
                }
                self.state = State::Value(kinds);
                true
            }
            State::Value(kinds) => self.value(kinds, events),
            State::After => {
                let rest = self.held.trim_start();
                if let Some(rest) = rest.strip_prefix(TAG_END) {
                    self.held = rest.to_owned();
                } else if TAG_END.starts_with(rest) {
                    return false;
                }
                self.state = State::Over;
                false
            }
            State::Over => false,
        }
    }

    fn function(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let word = self.held.trim_start();
        let is_function = match word.strip_prefix(FUNCTION) {
            None if FUNCTION.starts_with(word) => return false,
            None => None,
            Some(rest) => match name(rest) {
                Named::Not => None,
                Named::Partly => return false,
                Named::By(name, rest) => Some((name.to_owned(), rest.to_owned())),
            },
        };
        let Some((name, rest)) = is_function else {
            // It is no call.
            events.push(CallEvent::Text(TAG.to_owned()));
            self.state = State::Over;
            return false;
        };
        events.push(CallEvent::Begun { name: name.clone() });
        say("{".to_owned(), events);
        (self.name, self.held) = (name, rest);
        self.state = State::Parameter;
        true
    }

    fn parameter(&mut self, events: &mut Vec<CallEvent>) -> bool {
        // Whatever is between them means nothing.
        let at = self.held.find('<').unwrap_or(self.held.len());
        self.held.drain(..at);
        let word = self.held.as_str();
        if let Some(rest) = word.strip_prefix(PARAMETER) {
            match name(rest) {
                Named::Not => {}
                Named::Partly => return false,
                Named::By(name, rest) => {
                    let separator = if self.n_parameters > 0 { ", " } else { "" };
                    let key = Value::from(name);
                    let tool = self.tools.iter().find(|tool| tool.name == self.name);
                    let kinds = tool.map_or(Kinds::ALL, |tool| tool.kinds(name));
                    let quote = if kinds.is_text() { "\"" } else { "" };
                    say(format!("{separator}{key}: {quote}"), events);
                    self.n_parameters += 1;
                    self.held = rest.to_owned();
                    self.state = State::Begin(kinds);
                    return true;
                }
            }
        } else if word.starts_with(FUNCTION_END) || word.starts_with(TAG_END) {
            say("}".to_owned(), events);
            events.push(CallEvent::Ended);
            let n = match word.starts_with(FUNCTION_END) {
                true => FUNCTION_END.len(),
                false => 0,
            };
            self.held.drain(..n);
            self.state = State::After;
            return true;
        } else if [PARAMETER, FUNCTION_END, TAG_END]
            .iter()
            .any(|tag| tag.starts_with(word))
        {
            return false;
        }
        self.held.drain(..'<'.len_utf8());
        true
    }

    fn value(&mut self, kinds: Kinds, events: &mut Vec<CallEvent>) -> bool {
        if let Some(at) = self.held.find(PARAMETER_END) {
            let text = &self.held[..at];
            // What ends it has a line of its own, too.
            let text = text.strip_suffix('\n').unwrap_or(text);
            let text = match kinds.is_text() {
                true => escaped(text) + "\"",
                false => value(kinds, text),
            };
            say(text, events);
            self.held.drain(..at + PARAMETER_END.len());
            self.state = State::Parameter;
            return true;
        }
        if kinds.is_text() {
            let n_certain = self.held.len() - self.n_end();
            let certain: String = self.held.drain(..n_certain).collect();
            say(escaped(&certain), events);
        }
        false
    }

    /// How many bytes at the end of the held text may belong to what ends a value.
    fn n_end(&self) -> usize {
        const LINE_END: &str = "\n</parameter>";
        let n = n_beginning(&self.held, LINE_END);
        n.max(n_beginning(&self.held, PARAMETER_END))
    }
}

/// What follows the beginning of a tag.
enum Named<'a> {
    /// A name, and this after the tag.
    By(&'a str, &'a str),
    /// Maybe a name, once there is more.
    Partly,
    /// No name.
    Not,
}

fn name(text: &str) -> Named<'_> {
    let end = text.find(['>', '<', '\n']);
    match end {
        Some(at) if at > MAX_NAME || !text[at..].starts_with('>') => Named::Not,
        Some(at) if text[..at].trim().is_empty() => Named::Not,
        Some(at) => Named::By(text[..at].trim(), &text[at + 1..]),
        None if text.len() > MAX_NAME => Named::Not,
        None => Named::Partly,
    }
}

/// `text` inside a string of JSON.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

fn say(text: String, events: &mut Vec<CallEvent>) {
    if !text.is_empty() {
        events.push(CallEvent::Arguments(text));
    }
}
