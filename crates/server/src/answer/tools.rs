//! Calls of tools: how each family of models writes them, as a grammar and as a parser of text that streams.

use serde_json::{Map, Value, json};
use sterna_text::{ChatInput, Tokenizer};

use super::scan::{Member, ObjectScanner};

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, and whoever has no form of its own.
    #[default]
    Tagged,
    /// The answer is `{"name": …, "parameters": {…}}`: Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`: Mistral.
    List,
}

const TAG: &str = "<tool_call>";
const TAG_END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";

/// Calls in an answer at most, where a grammar says what may come.
const MAX_CALLS: usize = 8;

/// White space in arguments: with more, a model that prefers it to an answer would never end one.
const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,20}";

impl ToolFormat {
    /// The format in which `render` writes a call of an earlier turn, if it does.
    pub(crate) fn probe(render: impl FnOnce(&ChatInput) -> Option<String>) -> Option<ToolFormat> {
        let call = json!({"id": "abcdefghi", "type": "function", "function": {
            "name": "probe_call", "arguments": {"probe_key": 1},
        }});
        let tool = json!({"type": "function", "function": {
            "name": "probe_tool", "description": "", "parameters": {"type": "object", "properties": {}},
        }});
        let input = ChatInput {
            messages: vec![
                json!({"role": "user", "content": "x"}),
                json!({"role": "assistant", "content": "", "tool_calls": [call]}),
                json!({"role": "tool", "name": "probe_call", "tool_call_id": "abcdefghi", "content": "1"}),
            ],
            tools: Some(vec![tool]),
            ..ChatInput::default()
        };
        let text = render(&input)?;
        let at = text.find("probe_call")?;
        let before = &text[..at];
        // The newest mark before the call: instructions may name several.
        let found = [(TAG, ToolFormat::Tagged), (LIST, ToolFormat::List)];
        let found = found
            .into_iter()
            .filter_map(|(mark, format)| Some((before.rfind(mark)?, format)));
        match found.max_by_key(|(at, _)| *at) {
            Some((_, format)) => Some(format),
            None if text[at..].contains("\"parameters\"") => Some(ToolFormat::Bare),
            None => None,
        }
    }

    /// What the model writes before a call; without one, a call begins the answer.
    pub(crate) fn mark(self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged => Some(TAG),
            ToolFormat::Bare => None,
            ToolFormat::List => Some(LIST),
        }
    }

    /// Control tokens that stand for marks, with what they mean: they are in no text.
    pub(crate) fn tokens(self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let marks = [TAG, TAG_END, LIST, PYTHON].into_iter();
        marks
            .filter_map(|mark| Some((tokenizer.token_id(mark)?, mark)))
            .filter(|(id, _)| tokenizer.is_special(*id))
            .collect()
    }

    /// The rule `calls` of a Lark grammar: calls of `tools`, one alone unless `parallel`.
    pub(crate) fn grammar(self, tools: &[Tool], parallel: bool, tokenizer: &Tokenizer) -> String {
        let mark = |mark: &str| match tokenizer.token_id(mark) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => quoted(mark),
        };
        let arguments = match self {
            ToolFormat::Bare => "parameters",
            ToolFormat::Tagged | ToolFormat::List => "arguments",
        };
        let call = |tool: &Tool| {
            json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, arguments: tool.parameters},
                "required": ["name", arguments],
                "additionalProperties": false,
            })
        };
        let mut schemas: Vec<Value> = tools.iter().map(call).collect();
        let options = json!({"whitespace_pattern": WHITESPACE});
        for schema in &mut schemas {
            hoist_definitions(schema, arguments);
            close(schema);
        }
        // Definitions of several tools may have the same names, so each is a rule of its own.
        let mut rules = String::new();
        let mut names = Vec::new();
        for (index, mut schema) in schemas.into_iter().enumerate() {
            schema["x-guidance"] = options.clone();
            rules += &format!("call_{index}: %json {schema}\n");
            names.push(format!("call_{index}"));
        }
        // Calls after the first, with what separates them.
        let more = |separated: &str| match parallel {
            true => format!(" ({separated}){{0,{}}}", MAX_CALLS - 1),
            false => String::new(),
        };
        let calls = match self {
            ToolFormat::Tagged => format!(
                "calls: tagged{}\ntagged: {} \"\\n\" call \"\\n\" {}\n",
                more("\"\\n\" tagged"),
                mark(TAG),
                mark(TAG_END)
            ),
            ToolFormat::Bare => "calls: call\n".to_owned(),
            ToolFormat::List => format!(
                "calls: {} \"[\" call{} \"]\"\n",
                mark(LIST),
                more("\", \" call")
            ),
        };
        format!("{calls}call: {}\n{rules}", names.join(" | "))
    }
}

/// Moves definitions from the schema of arguments to the whole, where references look for them.
fn hoist_definitions(schema: &mut Value, arguments: &str) {
    for name in ["$defs", "definitions"] {
        let parameters = schema["properties"][arguments].as_object_mut();
        if let Some(definitions) = parameters.and_then(|p| p.remove(name)) {
            schema[name] = definitions;
        }
    }
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
            if members.get("properties").is_some_and(Value::is_object) && is_plain {
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
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
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
        }
    }
}

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

impl CallReader {
    /// Of calls in `format`.
    pub(crate) fn new(format: ToolFormat) -> CallReader {
        CallReader {
            format,
            state: State::Before,
            raw: String::new(),
            scanner: ObjectScanner::default(),
            name: None,
            early: String::new(),
            text: None,
            has_arguments: false,
        }
    }

    /// Reads `text`; returns what it doesn't belong to calls any more, if they are over.
    pub(crate) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        for (at, c) in text.char_indices() {
            if self.state == State::After {
                self.raw.push(c);
                let rest = self.raw.trim_start();
                if !TAG_END.starts_with(rest) {
                    // No closing tag: what follows is text.
                    let before = std::mem::take(&mut self.raw);
                    self.state = State::Over;
                    return Some(before + &text[at + c.len_utf8()..]);
                }
                if rest == TAG_END {
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
    pub(crate) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Inside if self.name.is_some() => self.end_call(events),
            State::Inside => self.give_up(events),
            State::Before if !self.raw.trim().is_empty() => self.give_up(events),
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
                    '[' | ',' if self.format == ToolFormat::List => {}
                    ']' if self.format == ToolFormat::List => self.state = State::Over,
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
        let told = match self.scanner.push(c) {
            Member::Piece(key) if is_arguments(key) => Told::Argument,
            Member::Value("name", value) => Told::Name(serde_json::from_str(value).ok()),
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
        self.state = match self.format {
            ToolFormat::Tagged => State::After,
            ToolFormat::List => State::Before,
            ToolFormat::Bare => State::Over,
        };
        self.reset();
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
        let mark = self.format.mark().unwrap_or_default();
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
    use super::*;

    /// The calls in `text`, cut into pieces of `n` characters; arguments joined.
    fn read(format: ToolFormat, text: &str, n: usize) -> (Vec<CallEvent>, Option<String>) {
        let mut reader = CallReader::new(format);
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
        use ToolFormat::{Bare, List, Tagged};
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
        let probe = |text: &str| ToolFormat::probe(|_| Some(text.to_owned()));
        assert_eq!(
            probe("<tool_call>\n{\"name\": \"probe_call\""),
            Some(ToolFormat::Tagged)
        );
        assert_eq!(
            probe("[TOOL_CALLS][{\"name\": \"probe_call\""),
            Some(ToolFormat::List)
        );
        assert_eq!(
            probe("{\"name\": \"probe_call\", \"parameters\": {}"),
            Some(ToolFormat::Bare)
        );
        assert_eq!(probe("probe_call"), None);
        assert_eq!(probe(""), None);
    }
}
