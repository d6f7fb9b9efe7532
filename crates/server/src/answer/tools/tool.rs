//! Functions that may be called, and the schemas of their arguments.

use serde_json::{Map, Value, json};
use sterna::constraint::bounded;
use sterna_text::Tokenizer;

/// A rule of a Lark grammar: JSON that `schema` describes.
pub(in crate::answer) fn json_rule(name: &str, mut schema: Value) -> String {
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

/// Rules of a Lark grammar for some of what the rules `all` are, in order, all that are required at least, with
/// `comma`s between: the first of them is `rule`.
pub(super) fn in_order(rule: &str, all: &[(String, bool)], comma: &str) -> String {
    let mut rules = format!("{rule}: {rule}_first_0\n");
    for (index, (this, is_required)) in all.iter().enumerate() {
        let next = index + 1;
        // Commas are only between those that are there.
        for (place, before) in [("first", ""), ("more", comma)] {
            let without = match is_required {
                true => String::new(),
                false => format!(" | {rule}_{place}_{next}"),
            };
            rules +=
                &format!("{rule}_{place}_{index}: {before} {this} {rule}_more_{next}{without}\n");
        }
    }
    let end = all.len();
    rules + &format!("{rule}_first_{end}: \"\"\n{rule}_more_{end}: \"\"\n")
}

/// `text` as a literal of a Lark grammar, in which nothing is taken for brackets or rules, which are counted.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    for c in Value::from(text).to_string().chars() {
        match c {
            '(' | ')' | '[' | ']' | '{' | '}' | ':' | '\u{7f}' => {
                quoted += &format!("\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted
}

/// The control token that is `mark`, if there is one: it is in no text.
pub(in crate::answer) fn control_id(tokenizer: &Tokenizer, mark: &str) -> Option<u32> {
    let id = tokenizer.token_id(mark);
    id.filter(|id| tokenizer.is_special(*id))
}

/// Those of `marks` that are control tokens, with what they mean.
pub(in crate::answer) fn control_ids(
    tokenizer: &Tokenizer,
    marks: impl IntoIterator<Item = &'static str>,
) -> Vec<(u32, &'static str)> {
    let marks = marks.into_iter();
    marks
        .filter_map(|mark| Some((control_id(tokenizer, mark)?, mark)))
        .collect()
}

/// `mark` in a Lark grammar: the control token, or the text.
pub(in crate::answer) fn in_grammar(tokenizer: &Tokenizer, mark: &str) -> String {
    match control_id(tokenizer, mark) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(mark),
    }
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

    /// The schema of a call that is an object with the `id`, if there is one, the name and the arguments under these
    /// names.
    pub(super) fn call(&self, id: Option<&str>, name: &str, arguments: &str) -> Value {
        let mut parameters = self.parameters.clone();
        if let Value::Object(members) = &mut parameters {
            members.retain(|name, _| !DEFINITIONS.contains(&name.as_str()));
        }
        let number = json!({"type": "string", "pattern": "^[0-9]{1,3}$"});
        let properties: Map<String, Value> = (id.map(|id| (id.to_owned(), number)).into_iter())
            .chain([
                (name.to_owned(), json!({"const": self.name})),
                (arguments.to_owned(), parameters),
            ])
            .collect();
        let required: Vec<&String> = properties.keys().collect();
        self.with_definitions(json!({
            "type": "object",
            "required": required,
            "properties": properties,
            "additionalProperties": false,
        }))
    }

    /// `schema`, with the definitions of the tool's where its references, if it has any, look for them.
    pub(super) fn with_definitions(&self, mut schema: Value) -> Value {
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
