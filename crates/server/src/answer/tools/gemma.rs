//! Calls in Gemma's notation: JSON whose keys have no quotes, and whose strings have marks in the place of theirs.
//!
//! Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,true]}<tool_call|>`
//!
//! FunctionGemma: `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>`

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::tool::in_order;
use super::values::escaped;
use super::{CallEvent, MAX_HEAD, MAX_RULES, Tool, json_rule, quoted};
use crate::answer::scan::n_beginning;

/// What is around calls and strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) call: &'static str,
    pub(super) call_end: &'static str,
    /// Before a string, and after it.
    pub(super) quote: &'static str,
}

pub(super) const GEMMA4: Marks = Marks {
    call: "<|tool_call>",
    call_end: "<tool_call|>",
    quote: "<|\"|>",
};

pub(super) const FUNCTION_GEMMA: Marks = Marks {
    call: "<start_function_call>",
    call_end: "<end_function_call>",
    quote: "<escape>",
};

/// What is before the name.
pub(super) const BEGIN: &str = "call:";

impl Marks {
    /// All of them.
    pub(super) fn all(&self) -> [&'static str; 3] {
        [self.call, self.call_end, self.quote]
    }

    /// How a call is written.
    pub(super) fn example(&self) -> String {
        let Marks {
            call,
            call_end,
            quote,
        } = self;
        format!("{call}{BEGIN}NAME{{KEY:{quote}TEXT{quote},KEY:VALUE}}{call_end}")
    }

    /// Rules of a Lark grammar that those of all tools share. `mark` says how a mark is spelled, which may be a control
    /// token.
    pub(super) fn shared_rules(&self, mark: &dyn Fn(&str) -> String) -> String {
        let quote = mark(self.quote);
        // Control tokens are in no text.
        let string = match quote == quoted(self.quote) {
            true => format!(
                "string: {quote} text\ntext[lazy]: /(?s:.*){}/\n",
                self.quote.replace('|', "\\|")
            ),
            false => format!("string: {quote} text {quote}\ntext: /(?s:.*)/\n"),
        };
        let scalar = json_rule("scalar", json!({"type": ["number", "boolean", "null"]}));
        format!(
            "any_value: string | scalar | any_list | any_map\n\
             any_list: \"[\" (any_value (\",\" any_value){{0,{MAX_ITEMS}}})? \"]\"\n\
             any_map: \"{{\" (any_member (\",\" any_member){{0,{MAX_ITEMS}}})? \"}}\"\n\
             any_member: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/ \":\" any_value\n\
             {string}{scalar}"
        )
    }
}

/// Values after the first in a list or an object that may have any, where a grammar says what may come.
const MAX_ITEMS: usize = 63;

/// Schemas of a tool that have rules of their own.
const MAX_SCHEMAS: usize = 1000;

/// The rules of a Lark grammar for a call of `tool` up to its closing bracket, the first of which is `rule`.
pub(super) fn rules(
    rule: &str,
    tool: &Tool,
    marks: Marks,
    mark: &dyn Fn(&str) -> String,
) -> String {
    let mut writer = Writer {
        tool,
        quote: mark(marks.quote),
        references: HashMap::new(),
        n_left: MAX_SCHEMAS,
        rules: format!("{rule}: {} {rule}_arguments\n", quoted(&tool.name)),
    };
    let arguments = format!("{rule}_arguments");
    match tool.properties() {
        Some(properties) => writer.object(&arguments, properties, tool.required()),
        None => writer.rule(&arguments, "any_map"),
    }
    writer.rules
}

/// Writes rules for values that match schemas. What schemas say of strings but `enum` and `const`, and of how many
/// members there are, isn't held to.
struct Writer<'a> {
    tool: &'a Tool,
    quote: String,
    /// The rules of what references lead to, which may be in it.
    references: HashMap<String, String>,
    /// Schemas that may still have rules.
    n_left: usize,
    rules: String,
}

impl Writer<'_> {
    fn rule(&mut self, rule: &str, body: &str) {
        self.rules += &format!("{rule}: {body}\n");
    }

    /// The rule `rule`, for values that match `schema`, and those that it needs.
    fn value(&mut self, rule: &str, schema: &Value) {
        if self.n_left == 0 || self.rules.len() > MAX_RULES {
            return self.rule(rule, "any_value");
        }
        self.n_left -= 1;
        let list = |name: &str| {
            let list = schema.get(name).and_then(Value::as_array);
            list.filter(|list| !list.is_empty())
        };
        if let Some(value) = schema.get("const") {
            let literal = self.literal(value);
            return self.rule(rule, &literal);
        }
        if let Some(values) = list("enum") {
            let all: Vec<String> = values.iter().map(|value| self.literal(value)).collect();
            return self.rule(rule, &all.join(" | "));
        }
        if let Some(at) = schema.get("$ref").and_then(Value::as_str) {
            let known = self.references.get(at).cloned();
            return match (known, self.tool.at(at)) {
                (Some(known), _) if known != rule => self.rule(rule, &known),
                (None, Some(schema)) => {
                    self.references.insert(at.to_owned(), rule.to_owned());
                    self.value(rule, schema)
                }
                // It leads nowhere, or back to itself.
                _ => self.rule(rule, "any_value"),
            };
        }
        if let Some(schemas) = list("anyOf").or_else(|| list("oneOf")) {
            return self.one_of(rule, schemas.iter());
        }
        if let Some(kinds) = list("type") {
            let schemas: Vec<Value> = (kinds.iter())
                .map(|kind| {
                    let mut schema = schema.clone();
                    schema["type"] = kind.clone();
                    schema
                })
                .collect();
            return self.one_of(rule, schemas.iter());
        }
        let properties = schema.get("properties").and_then(Value::as_object);
        let kind = schema.get("type").and_then(Value::as_str);
        match (kind, properties) {
            (Some("string"), _) => self.rule(rule, "string"),
            (Some("array"), _) => self.list(rule, schema),
            (Some("object") | None, Some(properties)) => {
                let required = list("required").into_iter().flatten();
                let required = required.filter_map(Value::as_str).collect();
                self.object(rule, properties, required);
            }
            (Some("object"), None) => self.rule(rule, "any_map"),
            (Some("number" | "integer" | "boolean" | "null"), _) => {
                self.rules += &json_rule(rule, self.tool.with_definitions(schema.clone()));
            }
            _ => self.rule(rule, "any_value"),
        }
    }

    fn one_of<'s>(&mut self, rule: &str, schemas: impl Iterator<Item = &'s Value>) {
        let mut all = Vec::new();
        for (index, schema) in schemas.enumerate() {
            let one = format!("{rule}_{index}");
            self.value(&one, schema);
            all.push(one);
        }
        self.rule(rule, &all.join(" | "));
    }

    fn list(&mut self, rule: &str, schema: &Value) {
        let item = format!("{rule}_item");
        match schema.get("items") {
            Some(items) => self.value(&item, items),
            None => self.rule(&item, "any_value"),
        }
        let count = |name: &str| schema.get(name).and_then(Value::as_u64);
        let min = count("minItems").unwrap_or(0);
        let most = count("maxItems").unwrap_or(min.saturating_add(MAX_ITEMS as u64));
        let body = match (min, most.checked_sub(1)) {
            (_, None) => "\"[\" \"]\"".to_owned(),
            (0, Some(more)) => format!("\"[\" ({item} (\",\" {item}){{0,{more}}})? \"]\""),
            (min, Some(more)) => {
                format!("\"[\" {item} (\",\" {item}){{{},{more}}} \"]\"", min - 1)
            }
        };
        self.rule(rule, &body);
    }

    /// Members come in the order of their names, as templates write them.
    fn object<'s>(
        &mut self,
        rule: &str,
        properties: &'s Map<String, Value>,
        required: HashSet<&'s str>,
    ) {
        let mut members: Vec<(&String, &Value)> = properties.iter().collect();
        members.sort_by_key(|(name, _)| name.to_lowercase());
        let mut all = Vec::with_capacity(members.len());
        for (index, (name, schema)) in members.into_iter().enumerate() {
            let member = format!("{rule}_{index}");
            let value = format!("{member}_value");
            self.rule(&member, &format!("{} {value}", quoted(&format!("{name}:"))));
            self.value(&value, schema);
            all.push((member, required.contains(name.as_str())));
        }
        self.rule(rule, &format!("\"{{\" {rule}_members \"}}\""));
        self.rules += &in_order(&format!("{rule}_members"), &all, "\",\"");
    }

    /// `value` and nothing else.
    fn literal(&self, value: &Value) -> String {
        let joined = |all: Vec<String>| all.join(" \",\" ");
        match value {
            Value::String(text) => format!("({0} {1} {0})", self.quote, quoted(text)),
            Value::Array(items) => {
                let items = items.iter().map(|item| self.literal(item));
                format!("(\"[\" {} \"]\")", joined(items.collect()))
            }
            Value::Object(members) => {
                let members = members.iter().map(|(name, value)| {
                    format!("{} {}", quoted(&format!("{name}:")), self.literal(value))
                });
                format!("(\"{{\" {} \"}}\")", joined(members.collect()))
            }
            scalar => quoted(&scalar.to_string()),
        }
    }
}

/// Reads one call, piece by piece, from what follows its mark.
#[derive(Debug, Clone)]
pub(super) struct GemmaReader {
    marks: Marks,
    state: State,
    /// Text that isn't read yet.
    held: String,
    /// Brackets that are open, and whether there is something in them.
    open: Vec<(char, bool)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the arguments.
    Head,
    /// Before a key, or in it.
    Key,
    /// Before a value, or in one that is no string.
    Value,
    /// In a string.
    Text,
    /// After a value.
    After,
    /// Before what ends the call.
    Tail,
    Over,
}

impl GemmaReader {
    /// Of a call with `marks`.
    pub(super) fn new(marks: Marks) -> GemmaReader {
        GemmaReader {
            marks,
            state: State::Head,
            held: String::new(),
            open: Vec::new(),
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
            State::Head => {
                let text = std::mem::take(&mut self.held);
                events.push(CallEvent::Text(format!("{}{text}", self.marks.call)));
            }
            State::Text => {
                let n_end = n_beginning(&self.held, self.marks.quote);
                say(&escaped(&self.held[..self.held.len() - n_end]), events);
                events.push(CallEvent::Ended);
            }
            State::Value => {
                let word = std::mem::take(&mut self.held);
                if !word.trim().starts_with('<') {
                    say(word.trim(), events);
                }
                events.push(CallEvent::Ended);
            }
            State::Key | State::After => events.push(CallEvent::Ended),
            State::Tail | State::Over => {}
        }
        self.state = State::Over;
    }

    /// Reads as much as is certain; true if there may be more.
    fn advance(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.state != State::Text {
            let n_blank = self.held.len() - self.held.trim_start().len();
            self.held.drain(..n_blank);
        }
        if self.held.is_empty() {
            return false;
        }
        match self.state {
            State::Head => self.head(events),
            State::Key => self.key(events),
            State::Value => self.value(events),
            State::Text => self.text(events),
            State::After => self.after(events),
            State::Tail => {
                let end = self.marks.call_end;
                if self.held.starts_with(end) {
                    self.held.drain(..end.len());
                } else if end.starts_with(&self.held) {
                    return false;
                }
                self.state = State::Over;
                false
            }
            State::Over => false,
        }
    }

    fn head(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let found = match self.held.strip_prefix(BEGIN) {
            None if BEGIN.starts_with(&self.held) => return false,
            None => None,
            Some(rest) => match rest.split_once('{') {
                None if rest.len() <= MAX_HEAD && rest.trim_end().chars().all(is_name) => {
                    return false;
                }
                None => None,
                Some((name, rest)) => Some((name.trim().to_owned(), rest.to_owned())),
            },
        };
        let found = found.filter(|(name, _)| !name.is_empty() && name.chars().all(is_name));
        let Some((name, rest)) = found else {
            // It is no call.
            events.push(CallEvent::Text(self.marks.call.to_owned()));
            self.state = State::Over;
            return false;
        };
        events.push(CallEvent::Begun { name });
        self.held = rest;
        self.begin('{', events);
        true
    }

    /// A list or an object begins.
    fn begin(&mut self, open: char, events: &mut Vec<CallEvent>) {
        say(if open == '{' { "{" } else { "[" }, events);
        self.open.push((open, false));
        self.state = match open {
            '{' => State::Key,
            _ => State::Value,
        };
    }

    /// The innermost of them ends, or with the outermost the call.
    fn end(&mut self, events: &mut Vec<CallEvent>) {
        let open = self.open.pop();
        let is_list = open.is_some_and(|(open, _)| open == '[');
        say(if is_list { "]" } else { "}" }, events);
        self.state = State::After;
        if self.open.is_empty() {
            events.push(CallEvent::Ended);
            self.state = State::Tail;
        }
    }

    fn key(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.ends(events) {
            return true;
        }
        let Some(at) = self.held.find([':', '}', '{', '[', ']']) else {
            // No key is that long.
            if self.held.len() > MAX_HEAD {
                self.held.clear();
            }
            return false;
        };
        if !self.held[at..].starts_with(':') {
            // Without a value, it says nothing; other brackets aren't there.
            let n_wrong = usize::from(!self.held[at..].starts_with('}'));
            self.held.drain(..at + n_wrong);
            return true;
        }
        let key = self.held[..at].replace(self.marks.quote, "");
        let key = Value::from(key.trim().trim_matches('"'));
        self.separate(events);
        say(&format!("{key}: "), events);
        self.held.drain(..=at);
        self.state = State::Value;
        true
    }

    /// What comes next follows others.
    fn separate(&mut self, events: &mut Vec<CallEvent>) {
        if let Some((_, has_some)) = self.open.last_mut()
            && std::mem::replace(has_some, true)
        {
            say(", ", events);
        }
    }

    fn value(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let quote = self.marks.quote;
        let in_list = self.open.last().is_some_and(|(open, _)| *open == '[');
        if self.held.starts_with(quote) {
            self.held.drain(..quote.len());
            self.begin_value(in_list, events);
            say("\"", events);
            self.state = State::Text;
            return true;
        }
        if quote.starts_with(&self.held) {
            return false;
        }
        let first = self.held.chars().next();
        if let Some(open @ ('{' | '[')) = first {
            self.held.drain(..1);
            self.begin_value(in_list, events);
            self.begin(open, events);
            return true;
        }
        if in_list && first == Some(']') {
            self.held.drain(..1);
            self.end(events);
            return true;
        }
        let ends = [",", "]", "}", quote, self.marks.call_end];
        let Some(at) = ends.iter().filter_map(|end| self.held.find(end)).min() else {
            return false;
        };
        let word: String = self.held.drain(..at).collect();
        self.begin_value(in_list, events);
        match word.trim() {
            "" | "None" | "none" => say("null", events),
            "True" => say("true", events),
            "False" => say("false", events),
            word if serde_json::from_str::<Value>(word).is_ok() => say(word, events),
            word => say(&Value::from(word).to_string(), events),
        }
        self.state = State::After;
        true
    }

    /// Values of a list are separated, those of an object are with their keys.
    fn begin_value(&mut self, in_list: bool, events: &mut Vec<CallEvent>) {
        if in_list {
            self.separate(events);
        }
    }

    fn text(&mut self, events: &mut Vec<CallEvent>) -> bool {
        let quote = self.marks.quote;
        if let Some(at) = self.held.find(quote) {
            say(&(escaped(&self.held[..at]) + "\""), events);
            self.held.drain(..at + quote.len());
            self.state = State::After;
            return true;
        }
        let n_certain = self.held.len() - n_beginning(&self.held, quote);
        let certain: String = self.held.drain(..n_certain).collect();
        say(&escaped(&certain), events);
        false
    }

    fn after(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.ends(events) {
            return true;
        }
        if self.marks.call_end.starts_with(&self.held) {
            return false;
        }
        let is_comma = self.held.starts_with(',');
        let n = self.held.chars().next().map_or(0, char::len_utf8);
        self.held.drain(..n);
        if is_comma {
            self.state = match self.open.last() {
                Some(('[', _)) => State::Value,
                _ => State::Key,
            };
        }
        // Anything else isn't there.
        true
    }

    /// Ends what a bracket ends, or what is left open at the end of the call.
    fn ends(&mut self, events: &mut Vec<CallEvent>) -> bool {
        if self.held.starts_with(self.marks.call_end) {
            while self.state != State::Tail {
                self.end(events);
            }
            return true;
        }
        if self.held.starts_with(['}', ']']) {
            self.held.drain(..1);
            self.end(events);
            return true;
        }
        false
    }
}

fn say(text: &str, events: &mut Vec<CallEvent>) {
    if !text.is_empty() {
        events.push(CallEvent::Arguments(text.to_owned()));
    }
}
