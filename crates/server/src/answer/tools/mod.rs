//! Calls of tools: how each family of models writes them, as a grammar and as a parser of text that streams.

mod deepseek;
mod json;
mod named;
mod parameters;
mod python;
mod values;

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna::constraint::bounded;
use sterna_text::{ChatInput, DateTime, Tokenizer};

use super::channels;
use deepseek::{CALL, CALL_END, CALLS, CALLS_END, DeepSeekReader, SEPARATOR};
use json::{Frame, JsonReader};
use named::NamedReader;
use parameters::ParameterReader;
use python::PythonReader;

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, and whoever has no form of its own.
    #[default]
    Tagged,
    /// `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen3.5, Qwen3-Coder.
    Parameters,
    /// The answer is `{"name": …, "parameters": {…}}`: Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`: Mistral.
    List,
    /// `[TOOL_CALLS]…[ARGS]{…}`: newer Mistrals.
    Named,
    /// `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`: Jamba.
    TaggedList,
    /// Between control tokens, with JSON in a block of code: DeepSeek V3 and R1.
    DeepSeek,
    /// The same without the block: DeepSeek V3.1.
    DeepSeekPlain,
    /// `<|tool_call_start|>[…(…=…), …]<|tool_call_end|>`: LFM2.
    Python,
    /// Messages on a channel: gpt-oss. All that such a model writes is [read](super::channels) as messages.
    Channels,
}

const TAG: &str = "<tool_call>";
const TAG_END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const ARRAY: &str = "<tool_calls>";
const ARRAY_END: &str = "</tool_calls>";
const PYTHON: &str = "<|python_tag|>";

/// Bytes of the rules of a call: with more, the grammar is refused.
const MAX_RULES: usize = 1 << 20;

/// Calls in an answer at most, where a grammar says what may come.
const MAX_CALLS: usize = 8;

impl ToolFormat {
    /// The format of the call of `probe_call` that `text` has, if it is one of these.
    fn of(text: &str) -> Option<ToolFormat> {
        let at = text.find(PROBE)?;
        let (before, after) = text.split_at(at);
        // The newest mark before the call: instructions may name several.
        let marks = [TAG, LIST, ARRAY, CALL, python::CALLS].into_iter();
        let newest = marks
            .filter_map(|mark| Some((before.rfind(mark)? + mark.len(), mark)))
            .max();
        let Some((end, mark)) = newest else {
            return (after.contains("\"parameters\"")).then_some(ToolFormat::Bare);
        };
        match (mark, before[end..].trim_start()) {
            (TAG, "<function=") => Some(ToolFormat::Parameters),
            (_, between) if between.contains(TAG_END) => None,
            (TAG, between) if between.starts_with('{') => Some(ToolFormat::Tagged),
            (LIST, between) if between.starts_with('[') => Some(ToolFormat::List),
            (LIST, "") => Some(ToolFormat::Named),
            (ARRAY, between) if between.starts_with('[') => Some(ToolFormat::TaggedList),
            (CALL, between) if between.ends_with(SEPARATOR) => Some(ToolFormat::DeepSeek),
            (CALL, "") => Some(ToolFormat::DeepSeekPlain),
            // Some templates write JSON, which models weren't trained on.
            (python::CALLS, between) if between.starts_with('[') => Some(ToolFormat::Python),
            _ => None,
        }
    }

    /// What the model writes before a call; without one, a call begins the answer.
    pub(crate) fn mark(self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged | ToolFormat::Parameters => Some(TAG),
            ToolFormat::Bare | ToolFormat::Channels => None,
            ToolFormat::List | ToolFormat::Named => Some(LIST),
            ToolFormat::TaggedList => Some(ARRAY),
            ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => Some(CALLS),
            ToolFormat::Python => Some(python::CALLS),
        }
    }

    /// How a call is written, for models whose templates don't say.
    pub(crate) fn example(self) -> String {
        let object = |arguments: &str| format!("{{\"name\": NAME, \"{arguments}\": OBJECT}}");
        match self {
            ToolFormat::Tagged => format!("{TAG}\n{}\n{TAG_END}", object("arguments")),
            ToolFormat::Parameters => parameters::EXAMPLE.to_owned(),
            ToolFormat::Bare => object("parameters"),
            ToolFormat::List => format!("{LIST}[{}]", object("arguments")),
            ToolFormat::Named => format!("{LIST}NAME{}OBJECT", named::ARGUMENTS),
            ToolFormat::TaggedList => format!("{ARRAY}[{}]{ARRAY_END}", object("arguments")),
            ToolFormat::DeepSeek => format!(
                "{CALLS}{CALL}function{SEPARATOR}NAME\n```json\nOBJECT\n```{CALL_END}{CALLS_END}"
            ),
            ToolFormat::DeepSeekPlain => {
                format!("{CALLS}{CALL}NAME{SEPARATOR}OBJECT{CALL_END}{CALLS_END}")
            }
            ToolFormat::Python => {
                format!("{}[NAME(KEY=VALUE, …)]{}", python::CALLS, python::CALLS_END)
            }
            ToolFormat::Channels => {
                "OBJECT on the channel commentary, to=functions.NAME".to_owned()
            }
        }
    }

    /// What is around calls that are objects of JSON.
    fn frame(self) -> Frame {
        let mark = self.mark().unwrap_or_default();
        let is_list = matches!(
            self,
            ToolFormat::List | ToolFormat::TaggedList | ToolFormat::Python
        );
        let end = match self {
            ToolFormat::Tagged => Some(TAG_END),
            ToolFormat::TaggedList => Some(ARRAY_END),
            ToolFormat::Python => Some(python::CALLS_END),
            _ => None,
        };
        Frame { mark, is_list, end }
    }

    /// Control tokens that stand for marks, with what they mean: they are in no text.
    pub(crate) fn tokens(self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let marks = [
            TAG,
            TAG_END,
            LIST,
            named::ARGUMENTS,
            named::ID,
            ARRAY,
            ARRAY_END,
            PYTHON,
            CALLS,
            CALLS_END,
            CALL,
            CALL_END,
            SEPARATOR,
            python::CALLS,
            python::CALLS_END,
        ];
        let marks = match self {
            ToolFormat::Channels => &channels::MARKS[..],
            _ => &marks[..],
        };
        let marks = marks.iter().copied();
        marks
            .filter_map(|mark| Some((tokenizer.token_id(mark)?, mark)))
            .filter(|(id, _)| tokenizer.is_special(*id))
            .collect()
    }

    /// The rule `calls` of a Lark grammar: calls of `tools`, one alone unless `parallel`; and, where there is a mark,
    /// `after_mark`: what follows the first.
    pub(crate) fn grammar(self, tools: &[Tool], parallel: bool, tokenizer: &Tokenizer) -> String {
        let mark = |mark: &str| match tokenizer.token_id(mark) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => quoted(mark),
        };
        if self == ToolFormat::Channels {
            // A call ends the message, and a message the answer.
            return channels::calls(tokenizer, tools);
        }
        // Calls after the first, with what separates them.
        let more = |separated: &str| match parallel {
            true => format!(" ({separated}){{0,{}}}", MAX_CALLS - 1),
            false => String::new(),
        };
        let calls = match self {
            ToolFormat::Tagged | ToolFormat::Parameters => format!(
                "calls: tagged{}\ntagged: {} after_mark\nafter_mark: \"\\n\" call \"\\n\" {}\n",
                more("\"\\n\" tagged"),
                mark(TAG),
                mark(TAG_END)
            ),
            ToolFormat::Bare | ToolFormat::Channels => "calls: call\n".to_owned(),
            ToolFormat::List => format!(
                "calls: {} after_mark\nafter_mark: \"[\" call{} \"]\"\n",
                mark(LIST),
                more("\", \" call")
            ),
            ToolFormat::Named => format!(
                "calls: marked{}\nmarked: {} after_mark\nafter_mark: call\n",
                more("marked"),
                mark(LIST)
            ),
            ToolFormat::TaggedList => format!(
                "calls: {} after_mark\nafter_mark: \"[\\n    \" call{} \"\\n]\" {}\n",
                mark(ARRAY),
                more("\",\\n    \" call"),
                mark(ARRAY_END)
            ),
            ToolFormat::DeepSeek => format!(
                "calls: {} after_mark\nafter_mark: marked{} {}\nmarked: {} \"function\" {} call {}\n",
                mark(CALLS),
                more("\"\\n\" marked"),
                mark(CALLS_END),
                mark(CALL),
                mark(SEPARATOR),
                mark(CALL_END)
            ),
            ToolFormat::Python => format!(
                "calls: {} after_mark\nafter_mark: \"[\" call{} \"]\" {}\n",
                mark(python::CALLS),
                more("\", \" call"),
                mark(python::CALLS_END)
            ),
            ToolFormat::DeepSeekPlain => format!(
                "calls: {} after_mark\nafter_mark: marked{} {}\nmarked: {} call {}\n",
                mark(CALLS),
                more("marked"),
                mark(CALLS_END),
                mark(CALL),
                mark(CALL_END)
            ),
        };
        let names: Vec<String> = (0..tools.len())
            .map(|index| format!("call_{index}"))
            .collect();
        // Definitions of several tools may have the same names, so each is a rule of its own.
        let rules = names.iter().zip(tools).map(|(name, tool)| match self {
            ToolFormat::Parameters => parameters::rules(name, tool),
            ToolFormat::Python => python::rules(name, tool),
            ToolFormat::Bare | ToolFormat::Channels => json_rule(name, tool.call("parameters")),
            ToolFormat::Tagged | ToolFormat::List | ToolFormat::TaggedList => {
                json_rule(name, tool.call("arguments"))
            }
            ToolFormat::DeepSeek => {
                let head = quoted(&format!("{}\n```json\n", tool.name));
                let arguments = json_rule(&format!("{name}_arguments"), tool.parameters.clone());
                format!("{name}: {head} {name}_arguments \"\\n```\"\n{arguments}")
            }
            ToolFormat::DeepSeekPlain | ToolFormat::Named => {
                let separator = match self {
                    ToolFormat::Named => mark(named::ARGUMENTS),
                    _ => mark(SEPARATOR),
                };
                let head = quoted(&tool.name);
                let arguments = json_rule(&format!("{name}_arguments"), tool.parameters.clone());
                format!("{name}: {head} {separator} {name}_arguments\n{arguments}")
            }
        });
        let rules: String = rules.collect();
        let shared = match self {
            ToolFormat::Parameters => parameters::SHARED_RULES.to_owned(),
            ToolFormat::Python => python::shared_rules(),
            _ => String::new(),
        };
        format!("{calls}call: {}\n{rules}{shared}", names.join(" | "))
    }
}

/// How past calls are written: by a template, and so by its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CallStyle {
    /// The format of calls, if it is one that is known.
    pub(crate) format: Option<ToolFormat>,
    /// The template wants arguments as JSON text, not as a mapping.
    text_arguments: bool,
    /// The template writes calls of messages that have no content, not even an empty one.
    no_content: bool,
}

/// What is before tools in the prompt of an LFM2.
const TOOL_LIST: &str = "<|tool_list_start|>";

/// The name of the function in a call that is rendered to see how that is done.
const PROBE: &str = "probe_call";

impl CallStyle {
    /// How `render` writes a call of an earlier turn.
    pub(crate) fn probe(render: impl Fn(&ChatInput) -> Option<String>) -> CallStyle {
        let call = json!({"id": "abcdefghi", "type": "function", "function": {
            "name": PROBE, "arguments": {"probe_key": 1},
        }});
        let tool = json!({"type": "function", "function": {
            "name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}},
        }});
        let messages = [
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "name": PROBE, "tool_call_id": "abcdefghi", "content": "1"}),
        ];
        let mut tells_list = false;
        let styles = [(false, false), (false, true), (true, false), (true, true)];
        for (text_arguments, no_content) in styles {
            let style = CallStyle {
                format: None,
                text_arguments,
                no_content,
            };
            let mut messages = messages.to_vec();
            messages.iter_mut().for_each(|message| style.apply(message));
            let input = ChatInput {
                messages,
                tools: Some(vec![tool.clone()]),
                now: Some(DateTime::from_unix(0, 0)),
                ..ChatInput::default()
            };
            let text = render(&input).unwrap_or_default();
            // These templates leave it to the model's answer to have its calls.
            tells_list |= text.contains(TOOL_LIST);
            // A template that wants text writes a mapping as Python does.
            if [PROBE, "probe_key"].iter().all(|word| text.contains(word))
                && !text.contains("{'probe_key'")
            {
                return CallStyle {
                    format: ToolFormat::of(&text),
                    ..style
                };
            }
        }
        CallStyle {
            format: tells_list.then_some(ToolFormat::Python),
            ..CallStyle::default()
        }
    }

    /// Gives the template `message` as it wants it.
    pub(crate) fn apply(&self, message: &mut Value) {
        let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else {
            return;
        };
        for call in calls.iter_mut().filter(|_| self.text_arguments) {
            let arguments = &mut call["function"]["arguments"];
            if !arguments.is_string() {
                *arguments = arguments.to_string().into();
            }
        }
        if self.no_content && !calls.is_empty() {
            message["content"] = Value::Null;
        }
    }
}

/// A rule of a Lark grammar: JSON that `schema` describes.
pub(super) fn json_rule(name: &str, mut schema: Value) -> String {
    // Of several schemas for the same object, none may be closed.
    if !mentions(&schema, "allOf") {
        close(&mut schema);
    }
    format!("{name}: %json {}\n", bounded(schema))
}

/// Lets objects have the members that they are said to have, where a schema leaves others open: what matches is valid
/// all the same, and no model invents members.
fn close(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(close),
        Value::Object(members) => {
            // What is put together of several schemas has the members of all.
            let combined = ["allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties"];
            let is_plain = !combined.iter().any(|name| members.contains_key(*name));
            let properties = members.get("properties").and_then(Value::as_object);
            let required = members.get("required").and_then(Value::as_array);
            let has_all = properties.is_some_and(|properties| {
                let mut names = required.into_iter().flatten().filter_map(Value::as_str);
                names.all(|name| properties.contains_key(name))
            });
            if has_all && is_plain {
                members
                    .entry("additionalProperties")
                    .or_insert(Value::Bool(false));
            }
            let inner = members.iter_mut();
            let inner = inner.filter(|(name, _)| {
                !matches!(name.as_str(), "const" | "enum" | "allOf" | "default")
            });
            inner.for_each(|(_, value)| close(value));
        }
        _ => {}
    }
}

/// `text` as a literal of a Lark grammar.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// They match it in every call, not only in one that is required.
    pub(crate) strict: bool,
}

impl Tool {
    /// With the schema `parameters`; without one, any object will do.
    pub(crate) fn new(name: &str, parameters: Option<&Value>) -> Tool {
        let mut parameters = parameters.cloned().unwrap_or_else(|| json!({}));
        if let Value::Object(members) = &mut parameters {
            // A meta-schema is of no use here, and its address isn't looked up.
            members.remove("$schema");
            if !members.contains_key("type") {
                members.insert("type".to_owned(), "object".into());
            }
        }
        Tool {
            name: name.to_owned(),
            parameters,
            strict: false,
        }
    }

    /// The schema of a call that is an object, with `arguments` under this name.
    fn call(&self, arguments: &str) -> Value {
        let mut parameters = self.parameters.clone();
        if let Value::Object(members) = &mut parameters {
            members.retain(|name, _| !DEFINITIONS.contains(&name.as_str()));
        }
        self.with_definitions(json!({
            "type": "object",
            "properties": {"name": {"const": self.name}, arguments: parameters},
            "required": ["name", arguments],
            "additionalProperties": false,
        }))
    }

    /// `schema`, with the definitions of the tool's where its references, if it has any, look for them.
    fn with_definitions(&self, mut schema: Value) -> Value {
        let refers = mentions(&schema, "$ref");
        for name in DEFINITIONS.into_iter().filter(|_| refers) {
            if let (Some(found), Value::Object(members)) = (self.parameters.get(name), &mut schema)
            {
                members.entry(name).or_insert_with(|| found.clone());
            }
        }
        schema
    }
}

/// Whether an object in `schema` has a member called `name`.
fn mentions(schema: &Value, name: &str) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(|item| mentions(item, name)),
        Value::Object(members) => {
            members.contains_key(name) || members.values().any(|value| mentions(value, name))
        }
        _ => false,
    }
}

/// Where schemas have definitions that they refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// What is said of calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// One begins.
    Begun { name: String },
    /// More of its arguments, as JSON text.
    Arguments(String),
    /// It is complete.
    Ended,
    /// It is no call, but this text.
    Text(String),
}

/// Reads calls from text that follows a mark, piece by piece.
#[derive(Debug)]
pub(crate) struct CallReader {
    format: ToolFormat,
    tools: Arc<[Tool]>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// After a mark and this text: the first characters say how calls are written, for not every model keeps to its
    /// template.
    Unsure(String),
    Json(JsonReader),
    Named(NamedReader),
    Parameters(ParameterReader),
    DeepSeek(DeepSeekReader),
    Python(PythonReader),
}

impl CallReader {
    /// Of calls of `tools` in `format`.
    pub(crate) fn new(format: ToolFormat, tools: &Arc<[Tool]>) -> CallReader {
        CallReader {
            format,
            tools: tools.clone(),
            kind: match format {
                ToolFormat::Tagged
                | ToolFormat::Parameters
                | ToolFormat::Named
                | ToolFormat::Python => Kind::Unsure(String::new()),
                ToolFormat::Bare
                | ToolFormat::List
                | ToolFormat::TaggedList
                | ToolFormat::Channels => Kind::Json(JsonReader::new(format.frame())),
                ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => {
                    Kind::DeepSeek(DeepSeekReader::default())
                }
            },
        }
    }

    /// Reads `text`; returns what of it doesn't belong to calls any more, if they are over.
    pub(crate) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        match &mut self.kind {
            Kind::Unsure(held) => {
                let text = std::mem::take(held) + text;
                let Some(kind) = self.kind_of(&text) else {
                    self.kind = Kind::Unsure(text);
                    return None;
                };
                self.kind = kind;
                self.push(&text, events)
            }
            Kind::Json(reader) => reader.push(text, events),
            Kind::Named(reader) => reader.push(text, events),
            Kind::Parameters(reader) => reader.push(text, events),
            Kind::DeepSeek(reader) => reader.push(text, events),
            Kind::Python(reader) => reader.push(text, events),
        }
    }

    /// How calls are written that begin with `text`, once that is known.
    fn kind_of(&self, text: &str) -> Option<Kind> {
        let mut chars = text.chars().filter(|c| !c.is_whitespace());
        let frame = self.format.frame();
        let json = |frame: Frame| Kind::Json(JsonReader::new(frame));
        let is_python = self.format == ToolFormat::Python;
        let is_named = self.format == ToolFormat::Named;
        Some(match chars.next()? {
            '[' | '{' if is_named => json(ToolFormat::List.frame()),
            _ if is_named => Kind::Named(NamedReader::default()),
            '[' if is_python => match chars.next()? {
                '{' => json(frame),
                _ => Kind::Python(PythonReader::default()),
            },
            '{' if is_python => json(Frame {
                is_list: false,
                ..frame
            }),
            _ if is_python => Kind::Python(PythonReader::default()),
            '<' => Kind::Parameters(ParameterReader::new(self.tools.clone())),
            _ => json(ToolFormat::Tagged.frame()),
        })
    }

    /// The end of the answer.
    pub(crate) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match &mut self.kind {
            Kind::Unsure(text) if text.trim().is_empty() => {}
            Kind::Unsure(text) => {
                let mark = self.format.mark().unwrap_or_default();
                events.push(CallEvent::Text(format!("{mark}{text}")));
            }
            Kind::Json(reader) => reader.finish(events),
            Kind::Named(reader) => reader.finish(events),
            Kind::Parameters(reader) => reader.finish(events),
            Kind::DeepSeek(reader) => reader.finish(events),
            Kind::Python(reader) => reader.finish(events),
        }
    }
}

/// The arguments of a call as templates want them: a mapping, not its text.
pub(crate) fn as_mapping(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(value @ Value::Object(_)) => value,
        _ if arguments.trim().is_empty() => Value::Object(Map::new()),
        _ => Value::from(arguments),
    }
}

#[cfg(test)]
mod tests {
    use sterna_text::{ChatTemplate, SpecialTokens};

    use super::*;

    /// The calls in `text`, cut into pieces of `n` characters; arguments joined.
    fn read(format: ToolFormat, text: &str, n: usize) -> (Vec<CallEvent>, Option<String>) {
        let weather =
            json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
        let tools: Arc<[Tool]> = [Tool::new("weather", Some(&weather))].into();
        let mut reader = CallReader::new(format, &tools);
        let (mut events, mut rest) = (Vec::new(), None::<String>);
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(n) {
            let piece: String = piece.iter().collect();
            match &mut rest {
                Some(rest) => rest.push_str(&piece),
                None => rest = reader.push(&piece, &mut events),
            }
        }
        if rest.is_none() {
            reader.finish(&mut events);
        }
        let mut joined: Vec<CallEvent> = Vec::new();
        for event in events {
            match (joined.last_mut(), event) {
                (Some(CallEvent::Arguments(said)), CallEvent::Arguments(more)) => *said += &more,
                (_, event) => joined.push(event),
            }
        }
        (joined, rest)
    }

    fn call(name: &str, arguments: &str) -> Vec<CallEvent> {
        vec![
            CallEvent::Begun {
                name: name.to_owned(),
            },
            CallEvent::Arguments(arguments.to_owned()),
            CallEvent::Ended,
        ]
    }

    #[test]
    fn calls_are_read_however_they_are_cut() {
        use ToolFormat::{
            Bare, DeepSeek, DeepSeekPlain, List, Named, Parameters, Python, Tagged, TaggedList,
        };
        let text = |text: &str| vec![CallEvent::Text(text.to_owned())];
        for (format, input, expected, rest) in [
            (
                Tagged,
                "\n{\"name\": \"a\", \"arguments\": {\"x\": [1, \"}\\\"\"]}}\n</tool_call>\nyes",
                call("a", "{\"x\": [1, \"}\\\"\"]}"),
                Some("\nyes"),
            ),
            // The other way round, with more, and without arguments.
            (
                Tagged,
                "{\"arguments\":{\"x\":1},\"id\":\"7\",\"name\":\"a\"}</tool_call>",
                call("a", "{\"x\":1}"),
                Some(""),
            ),
            (
                Tagged,
                "{\"name\": \"a\"}</tool_call>",
                call("a", "{}"),
                Some(""),
            ),
            // Arguments in a string.
            (
                Tagged,
                "{\"name\": \"a\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>",
                call("a", "{\"x\": 1}"),
                Some(""),
            ),
            // Cut off.
            (
                Tagged,
                "{\"name\": \"a\", \"arguments\": {\"x\": ",
                call("a", "{\"x\": "),
                None,
            ),
            // No calls.
            (
                Tagged,
                "nonsense</tool_call>",
                text("<tool_call>n"),
                Some("onsense</tool_call>"),
            ),
            (
                Tagged,
                "{\"x\": 1} no",
                text("<tool_call>{\"x\": 1}"),
                Some(" no"),
            ),
            (
                List,
                "[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": {\"y\": 2}}]",
                [call("a", "{}"), call("b", "{\"y\": 2}")].concat(),
                Some(""),
            ),
            (
                Bare,
                "{\"name\": \"a\", \"parameters\": {\"x\": 1}}",
                call("a", "{\"x\": 1}"),
                Some(""),
            ),
            (Bare, "{\"x\": 1}", text("{\"x\": 1}"), Some("")),
            (
                Named,
                "a[ARGS]{\"x\": {\"y\": \"}\"}}[TOOL_CALLS]b[ARGS]{}",
                call("a", "{\"x\": {\"y\": \"}\"}}"),
                Some("[TOOL_CALLS]b[ARGS]{}"),
            ),
            (
                Named,
                " a[CALL_ID]123[ARGS]{\"x\": 1}</s>",
                call("a", "{\"x\": 1}"),
                Some("</s>"),
            ),
            (Named, "a[ARGS]", call("a", "{}"), None),
            (
                Named,
                "a[ARGS][TOOL_CALLS]b",
                call("a", "{}"),
                Some("[TOOL_CALLS]b"),
            ),
            (Named, "a[ARGS]{\"x\": ", call("a", "{\"x\": "), None),
            (Named, "a", text("[TOOL_CALLS]a"), None),
            (Named, "no name {", text("[TOOL_CALLS]"), Some("no name {")),
            (
                Named,
                "[{\"name\": \"a\", \"arguments\": {}}]",
                call("a", "{}"),
                Some(""),
            ),
            (
                TaggedList,
                "[\n    {\"name\": \"a\", \"arguments\": {\"x\": 1}},\n    {\"name\": \"b\"}\n]</tool_calls>yes",
                [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
                Some("yes"),
            ),
            (
                DeepSeek,
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": {\"y\": \"}\"}}\n```<｜tool▁call▁end｜>\n\
                 <｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>yes",
                [call("a", "{\"x\": {\"y\": \"}\"}}"), call("b", "{}")].concat(),
                Some("yes"),
            ),
            (
                DeepSeekPlain,
                "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>\
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
                Some(""),
            ),
            // Without the end of a call, then cut off.
            (
                DeepSeek,
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": 1}\n<｜tool▁call▁begin｜>function\
                 <｜tool▁sep｜>b\n```json\n{\"y\": ",
                [call("a", "{\"x\": 1}"), call("b", "{\"y\": ")].concat(),
                None,
            ),
            (
                DeepSeek,
                "<｜tool▁call▁begin｜>func",
                text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>func"),
                None,
            ),
            (DeepSeek, "no", text("<｜tool▁calls▁begin｜>"), Some("no")),
            (
                Python,
                "[a(x=1, y='it\\'s \"x\"'), b(), c(z=[True, None, {'k': (1.5, -2)}], w=\"\\n\\u00e9\\x41\")]<|tool_call_end|>yes",
                [
                    call("a", "{\"x\": 1, \"y\": \"it's \\\"x\\\"\"}"),
                    call("b", "{}"),
                    call(
                        "c",
                        "{\"z\": [true, null, {\"k\": [1.5, -2]}], \"w\": \"\\né\u{41}\"}",
                    ),
                ]
                .concat(),
                Some("yes"),
            ),
            // A quote inside that nobody escaped, a word without quotes, and no end of the list.
            (
                Python,
                "[a(x='it's' , y=word)",
                call("a", "{\"x\": \"it's\", \"y\": \"word\"}"),
                None,
            ),
            // JSON, alone and in a list.
            (
                Python,
                "[{\"name\": \"a\", \"arguments\": {\"x\": 1}}, {\"name\": \"b\"}]<|tool_call_end|>",
                [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
                Some(""),
            ),
            (
                Python,
                "{\"name\": \"a\", \"arguments\": {}}<|tool_call_end|>",
                call("a", "{}"),
                Some(""),
            ),
            // Cut off.
            // What isn't quoted, isn't there, or isn't in a list.
            (
                Python,
                "[a(x=New York , y=, z=[1, b])]<|tool_call_end|>!",
                call("a", "{\"x\": \"New York\", \"y\": null, \"z\": [1, \"b\"]}"),
                Some("!"),
            ),
            (
                Python,
                "a(x=1)<|tool_call_end|>!",
                call("a", "{\"x\": 1}"),
                Some("!"),
            ),
            (Python, "[a(x='b c", call("a", "{\"x\": \"b c"), None),
            (Python, "[a(x=12", call("a", "{\"x\": 12"), None),
            (Python, "[a(x='b'", call("a", "{\"x\": \"b\""), None),
            (Python, "[a", text("<|tool_call_start|>[a"), None),
            (Python, "[", text("<|tool_call_start|>["), None),
            (Python, "[a!b]", text("<|tool_call_start|>[a!"), Some("b]")),
            // Cut off after a call.
            (
                List,
                "[{\"name\": \"a\", \"arguments\": {}}, ",
                call("a", "{}"),
                None,
            ),
            (
                Parameters,
                "\n<function=weather>\n<parameter=city>\nNew\n\n\"York\"\n</parameter>\n<parameter=days>\n3\n\
                 </parameter>\n</function>\n</tool_call>\nyes",
                call(
                    "weather",
                    "{\"city\": \"New\\n\\n\\\"York\\\"\", \"days\": 3}",
                ),
                Some("\nyes"),
            ),
            (
                Parameters,
                "<function=weather></function></tool_call>",
                call("weather", "{}"),
                Some(""),
            ),
            // On one line, with tags in a value, text between parameters, and no end of the function.
            (
                Parameters,
                "<function=weather><parameter=city></p><</parameter> and <b> <parameter=days>x</parameter></tool_call>",
                call("weather", "{\"city\": \"</p><\", \"days\": \"x\"}"),
                Some(""),
            ),
            // Nobody knows these.
            (
                Parameters,
                "<function=other>\n<parameter=a>\n[1]\n</parameter>\n<parameter=b>\n\n</parameter>\n</function>",
                call("other", "{\"a\": [1], \"b\": \"\"}"),
                None,
            ),
            // The tags of the other form.
            (
                Parameters,
                "\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>",
                call("a", "{\"x\": 1}"),
                Some(""),
            ),
            (
                Tagged,
                "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
                call("weather", "{\"city\": \"Rome\"}"),
                Some(""),
            ),
            // Cut off.
            (
                Parameters,
                "<function=weather>\n<parameter=city>\nRome\n</param",
                call("weather", "{\"city\": \"Rome"),
                None,
            ),
            (
                Parameters,
                "<function=weather>\n<parameter=days>\n1",
                call("weather", "{\"days\": 1"),
                None,
            ),
            (
                Parameters,
                "<function=weather>\n<parameter=da",
                call("weather", "{"),
                None,
            ),
            (
                Parameters,
                "<function=wea",
                text("<tool_call><function=wea"),
                None,
            ),
            // No calls.
            (
                Parameters,
                "<b>no</b></tool_call>",
                text("<tool_call>"),
                Some("<b>no</b></tool_call>"),
            ),
            (
                Parameters,
                "<function=a\nb></tool_call>",
                text("<tool_call>"),
                Some("<function=a\nb></tool_call>"),
            ),
        ] {
            for n in 1..=input.chars().count() {
                let found = read(format, input, n);
                assert_eq!(found.0, expected, "{input} by {n}");
                assert_eq!(found.1.as_deref(), rest, "{input} by {n}");
            }
        }
    }

    #[test]
    fn formats_are_told_by_what_a_template_writes() {
        let probe = |text: &str| CallStyle::probe(|_| Some(format!("{text} probe_key"))).format;
        for (text, format) in [
            (
                "<tool_call>\n{\"name\": \"probe_call\"",
                Some(ToolFormat::Tagged),
            ),
            (
                "<tool_call>\n<function=probe_call>",
                Some(ToolFormat::Parameters),
            ),
            (
                "[TOOL_CALLS][{\"name\": \"probe_call\"",
                Some(ToolFormat::List),
            ),
            (
                "{\"name\": \"probe_call\", \"parameters\": {}",
                Some(ToolFormat::Bare),
            ),
            (
                "<|tool_call_start|>[probe_call(probe_key=1)]<|tool_call_end|>",
                Some(ToolFormat::Python),
            ),
            (
                "<|tool_call_start|>[{\"name\": \"probe_call\"",
                Some(ToolFormat::Python),
            ),
            (
                "List of tools: <|tool_list_start|>[",
                Some(ToolFormat::Python),
            ),
            // Instructions in one form, calls in another.
            (
                "<tool_call>\n{\"name\": NAME}\n</tool_call> >>>probe_call",
                None,
            ),
            ("probe_call", None),
            ("", None),
        ] {
            assert_eq!(probe(text), format, "{text}");
        }
    }

    /// Each template of `testdata/chat-templates`, by name.
    fn templates() -> Vec<(String, String)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/chat-templates");
        let recorded = std::fs::read(format!("{folder}/huggingface-jinja-e2e.json")).unwrap();
        let recorded: Vec<Value> = serde_json::from_slice(&recorded).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mut templates: Vec<_> = recorded
            .iter()
            .map(|case| (text(&case["name"]), text(&case["chat_template"])))
            .collect();
        let files = std::fs::read_dir(format!("{folder}/llama.cpp-templates")).unwrap();
        for path in files.map(|file| file.unwrap().path()) {
            if path.extension().is_some_and(|ending| ending == "jinja") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                templates.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
        templates.sort();
        templates
    }

    #[test]
    fn calls_of_real_templates_are_in_these_formats() {
        use ToolFormat::{DeepSeek, List, Parameters, Tagged, TaggedList};
        let mut found = Vec::new();
        for (name, source) in templates() {
            let mut specials = SpecialTokens::default();
            specials.bos = Some("<s>".to_owned());
            specials.eos = Some("</s>".to_owned());
            let template = ChatTemplate::new(&source, &specials).unwrap();
            let is_written = std::cell::Cell::new(false);
            let style = CallStyle::probe(|input| {
                let text = template.render(input).ok()?;
                is_written.set(is_written.get() || text.contains(PROBE));
                Some(text)
            });
            let wants = match (style.text_arguments, style.no_content) {
                (false, false) => "",
                (true, false) => "text",
                (false, true) => "no content",
                (true, true) => "text, no content",
            };
            if is_written.get() {
                found.push((name, style.format, wants));
            }
        }
        let expected = [
            ("CISCai/Mistral-7B-Instruct-v0.3-SOTA-GGUF", Some(List), ""),
            (
                "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
                Some(Tagged),
                "",
            ),
            (
                "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
                Some(Tagged),
                "",
            ),
            (
                "NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)",
                Some(Tagged),
                "",
            ),
            ("Qwen-Qwen2.5-7B-Instruct", Some(Tagged), ""),
            ("Qwen/Qwen3-0.6B", Some(Tagged), ""),
            ("Qwen/Qwen3.5-4B", Some(Parameters), ""),
            ("ai21labs/AI21-Jamba-Large-1.6", Some(TaggedList), ""),
            (
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                Some(DeepSeek),
                "text, no content",
            ),
            (
                "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                Some(DeepSeek),
                "text, no content",
            ),
            ("deepseek-ai/DeepSeek-R1", Some(DeepSeek), "text"),
            ("llama-cpp-deepseek-r1", Some(DeepSeek), "text, no content"),
            ("meetkai-functionary-medium-v3.1", None, "text"),
            ("meetkai-functionary-medium-v3.2", None, "text"),
            ("mistralai-Mistral-Nemo-Instruct-2407", Some(List), ""),
            (
                "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)",
                Some(List),
                "",
            ),
            ("moonshotai/Kimi-K2-Thinking", None, ""),
            ("openbmb/MiniCPM3-4B", None, ""),
            ("zai-org/GLM-5.1", None, ""),
        ];
        // Those that write no calls aren't here; those without a format write calls that are read as text.
        let expected = expected.map(|(name, format, wants)| (name.to_owned(), format, wants));
        assert_eq!(found, expected);
    }
}
