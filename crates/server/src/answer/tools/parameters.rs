//! Calls whose parameters are written one by one, as text: Qwen3.5's and Qwen3-Coder's, and GLM's.
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
//!
//! GLM-4.5 and 4.6, whose line breaks later ones leave out:
//!
//! ```text
//! <tool_call>NAME
//! <arg_key>KEY</arg_key>
//! <arg_value>VALUE</arg_value>
//! </tool_call>
//! ```

use std::sync::Arc;

use serde_json::Value;

use super::values::{Kinds, escaped, value};
use super::{CallEvent, MAX_NAME, MAX_RULES, TAG, TAG_END, Tool, is_name, json_rule, quoted, say};
use crate::answer::scan::n_beginning;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// Marks of GLM's, which may be control tokens.
pub(super) const MARKS: [&str; 4] = [KEY, KEY_END, VALUE, VALUE_END];

/// How names and values are marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// In the names of tags; values have lines of their own.
    Tags,
    /// The function first, then keys and values in tags.
    Pairs,
}

impl Form {
    /// How a call is written.
    pub(super) fn example(self) -> &'static str {
        match self {
            Form::Tags => {
                "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
            }
            Form::Pairs => {
                "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
            }
        }
    }

    /// In a grammar, what begins a call of the function `name`, and what ends it.
    fn function(self, name: &str) -> (String, String) {
        match self {
            Form::Tags => (
                quoted(&format!("{FUNCTION}{name}>\n")),
                quoted(FUNCTION_END),
            ),
            Form::Pairs => (quoted(name) + MAYBE_LINE, String::new()),
        }
    }

    /// In a grammar, what is before the value of the parameter `name`, what ends that, and what comes after. `mark` says
    /// how a mark is spelled, which may be a control token.
    fn parameter(
        self,
        name: &str,
        mark: &dyn Fn(&str) -> String,
    ) -> (String, String, &'static str) {
        match self {
            Form::Tags => (
                quoted(&format!("{PARAMETER}{name}>\n")),
                quoted("\n</parameter>"),
                LINE,
            ),
            Form::Pairs => (
                format!(
                    "{} {} {}{MAYBE_LINE} {}",
                    mark(KEY),
                    quoted(name),
                    mark(KEY_END),
                    mark(VALUE)
                ),
                mark(VALUE_END),
                MAYBE_LINE,
            ),
        }
    }

    /// The tags that may end a value, with and without a line of their own.
    fn ends(self) -> [&'static str; 2] {
        match self {
            Form::Tags => ["\n</parameter>", PARAMETER_END],
            Form::Pairs => [VALUE_END; 2],
        }
    }

    /// Rules that those of all tools share: `text` is one up to the end of a value.
    pub(super) fn shared_rules(self, mark: &dyn Fn(&str) -> String) -> String {
        match self {
            Form::Tags => concat!(
                "any_parameter: /<parameter=[^<>\\n]{1,64}>\\n/ text \"\\n\"\n",
                "text[lazy]: /(?s:.*)<\\/parameter>/\n",
            )
            .to_owned(),
            Form::Pairs => {
                let (key, key_end, value) = (mark(KEY), mark(KEY_END), mark(VALUE));
                let end = mark(VALUE_END);
                // Control tokens are in no text.
                let text = match end == quoted(VALUE_END) {
                    true => "text[lazy]: /(?s:.*)<\\/arg_value>/\n".to_owned(),
                    false => format!("text: any_text {end}\nany_text: /(?s:.*)/\n"),
                };
                format!(
                    "any_parameter: {key} /[^<>\\n]{{1,64}}/ {key_end}{MAYBE_LINE} {value} text{MAYBE_LINE}\n{text}"
                )
            }
        }
    }
}

/// A line break in a grammar, and one that may be left out.
const LINE: &str = " \"\\n\"";
const MAYBE_LINE: &str = " \"\\n\"?";

/// Parameters of a function that doesn't say which it has, where a grammar says what may come.
const MAX_PARAMETERS: usize = 16;

/// The rules of a Lark grammar for what is inside the tags: `rule` for a call of `tool`. Parameters come in the order
/// of the schema, as in JSON.
pub(super) fn rules(rule: &str, tool: &Tool, form: Form, mark: &dyn Fn(&str) -> String) -> String {
    let (begin, end) = form.function(&tool.name);
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
        let (begin, end, after) = form.parameter(name, mark);
        let Some(choices) = tool.choices(name) else {
            rules += &format!("{parameter}: {begin} text{after}\n");
            continue;
        };
        let mut all: Vec<String> = choices.texts.iter().map(|text| quoted(text)).collect();
        for (index, schema) in choices.schemas.into_iter().enumerate() {
            let value = format!("{parameter}_value_{index}");
            rules += &json_rule(&value, tool.with_definitions(schema.clone()));
            all.push(value);
        }
        rules += &format!("{parameter}: {begin} ({}) {end}{after}\n", all.join(" | "));
    }
    format!("{rule}: {begin}{names} {end}\n{rules}")
}

/// Reads one call, piece by piece, from what follows the opening tag.
#[derive(Debug, Clone)]
pub(super) struct ParameterReader {
    form: Form,
    tools: Arc<[Tool]>,
    state: State,
    /// Text that isn't read yet.
    held: String,
    /// How much of it was searched for the end of a value.
    searched: usize,
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
    pub(super) fn new(form: Form, tools: Arc<[Tool]>) -> ParameterReader {
        ParameterReader {
            form,
            tools,
            state: State::Function,
            held: String::new(),
            searched: 0,
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
                if self.form == Form::Tags && self.held.starts_with('\n') {
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
        let found = match self.form {
            Form::Tags => tag(FUNCTION, word),
            Form::Pairs => function_before_pairs(word),
        };
        let is_function = match found {
            Named::Not => None,
            Named::Partly => return false,
            Named::By(name, rest) => Some((name.to_owned(), rest.to_owned())),
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
        let found = match self.form {
            Form::Tags => tag(PARAMETER, word),
            Form::Pairs => key_and_value(word),
        };
        if let Named::By(name, rest) = found {
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
        if word.starts_with(FUNCTION_END) || word.starts_with(TAG_END) {
            say("}".to_owned(), events);
            events.push(CallEvent::Ended);
            let n = match word.starts_with(FUNCTION_END) {
                true => FUNCTION_END.len(),
                false => 0,
            };
            self.held.drain(..n);
            self.state = State::After;
            return true;
        }
        let may_end = [FUNCTION_END, TAG_END]
            .iter()
            .any(|tag| tag.starts_with(word));
        if may_end || matches!(found, Named::Partly) {
            return false;
        }
        self.held.drain(..'<'.len_utf8());
        true
    }

    fn value(&mut self, kinds: Kinds, events: &mut Vec<CallEvent>) -> bool {
        let [_, end] = self.form.ends();
        let from = self.searched.saturating_sub(end.len());
        let from = self.held.floor_char_boundary(from);
        if let Some(at) = self.held[from..].find(end) {
            let at = from + at;
            let text = &self.held[..at];
            // What ends it may have a line of its own, too.
            let line = text.strip_suffix('\n').filter(|_| self.form == Form::Tags);
            let text = line.unwrap_or(text);
            let text = match kinds.is_text() {
                true => escaped(text) + "\"",
                false => value(kinds, text),
            };
            say(text, events);
            self.held.drain(..at + end.len());
            self.searched = 0;
            self.state = State::Parameter;
            return true;
        }
        if kinds.is_text() {
            let n_certain = self.held.len() - self.n_end();
            let certain: String = self.held.drain(..n_certain).collect();
            say(escaped(&certain), events);
        }
        self.searched = self.held.len();
        false
    }

    /// How many bytes at the end of the held text may belong to what ends a value.
    fn n_end(&self) -> usize {
        let [line, tag] = self.form.ends().map(|end| n_beginning(&self.held, end));
        line.max(tag)
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

/// The name in a tag that begins with `begin`.
fn tag<'a>(begin: &str, word: &'a str) -> Named<'a> {
    let Some(text) = word.strip_prefix(begin) else {
        return match begin.starts_with(word) {
            true => Named::Partly,
            false => Named::Not,
        };
    };
    let end = text.find(['>', '<', '\n']);
    match end {
        Some(at) if at > MAX_NAME || !text[at..].starts_with('>') => Named::Not,
        Some(at) if text[..at].trim().is_empty() => Named::Not,
        Some(at) => Named::By(text[..at].trim(), &text[at + 1..]),
        None if text.len() > MAX_NAME => Named::Not,
        None => Named::Partly,
    }
}

/// The name of a function before keys and values, or the end of the call.
fn function_before_pairs(word: &str) -> Named<'_> {
    let end = word.find(|c| !is_name(c)).unwrap_or(word.len());
    let (name, rest) = word.split_at(end);
    let next = rest.trim_start();
    let is_there = [KEY, TAG_END].iter().any(|tag| next.starts_with(tag));
    let may_come = [KEY, TAG_END].iter().any(|tag| tag.starts_with(next));
    match (name.is_empty() && !rest.is_empty(), is_there, may_come) {
        _ if name.len() > MAX_NAME => Named::Not,
        (false, true, _) => Named::By(name, rest),
        (false, _, true) => Named::Partly,
        _ => Named::Not,
    }
}

/// The name in a key, up to the beginning of its value.
fn key_and_value(word: &str) -> Named<'_> {
    let Some(text) = word.strip_prefix(KEY) else {
        return match KEY.starts_with(word) {
            true => Named::Partly,
            false => Named::Not,
        };
    };
    let Some((name, rest)) = text.split_once(KEY_END) else {
        return match text.len() > MAX_NAME + KEY_END.len() {
            true => Named::Not,
            false => Named::Partly,
        };
    };
    let rest = rest.trim_start();
    match rest.strip_prefix(VALUE) {
        Some(rest) if !name.trim().is_empty() => Named::By(name.trim(), rest),
        None if VALUE.starts_with(rest) => Named::Partly,
        _ => Named::Not,
    }
}
