//! What output can be constrained to.

use std::collections::HashSet;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::error::ConstraintError;

/// The longest grammar, in bytes.
const MAX_LEN: usize = 1 << 20;

/// The most brackets inside one another in a regular expression or a Lark grammar, which are read recursively.
const MAX_DEPTH: usize = 64;

/// The most rules of a Lark grammar, and the most schemas inside one another: those are read recursively too.
const MAX_LEVELS: usize = match cfg!(target_family = "wasm") {
    // Browsers choose the stack.
    true => 800,
    false => 8_000,
};

macro_rules! date {
    () => {
        concat!(
            r"([0-9]{4}-(0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(0[1-9]|1[0-9]|2[0-8])",
            r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
        )
    };
}

macro_rules! time {
    () => {
        r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+-][0-9:]{5})"
    };
}

/// White space between two tokens of JSON: a space, or a line break with indentation. A model that prefers white space
/// to an answer would otherwise never end it.
const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,20}";

/// What else texts match whose formats have no end, or let through what there isn't, by the name of the format: a fraction of a
/// second has nine digits at most, the name of a mailbox 64 bytes, a label 63, and all of it 253; seconds end at 59, and only leap
/// years have a 29 February.
const BOUNDS: [Bound; 5] = [
    ("date", concat!("^", date!(), "$"), None),
    (
        "date-time",
        concat!("^", date!(), "[tT]", time!(), "$"),
        None,
    ),
    ("time", concat!("^", time!(), "$"), None),
    (
        "email",
        r"^[^@]{1,64}@([^.@]{1,63}\.)*[^.@]{1,63}$",
        Some(253),
    ),
    ("hostname", r"^([^.]{1,63}\.)*[^.]{1,63}$", Some(253)),
];

/// A format, a pattern, and the longest text.
type Bound = (&'static str, &'static str, Option<usize>);

/// What output matches, from its first byte to its last.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that this schema, itself JSON, describes.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression, in Rust's syntax without look-around, for the whole text.
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
}

impl Grammar {
    /// What messages call it.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Grammar::JsonSchema(_) | Grammar::JsonObject => "JSON schema",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "Lark grammar",
        }
    }

    /// Where in a schema is what `message` complains of: a JSON pointer to what its last part names.
    pub(crate) fn place(&self, message: &str) -> Option<String> {
        let Grammar::JsonSchema(text) = self else {
            return None;
        };
        let schema: Value = serde_json::from_str(text).ok()?;
        let (_, problem) = message.rsplit_once(": ")?;
        let words = problem.split(|c: char| !c.is_alphanumeric() && c != '$' && c != '_');
        words
            .filter(|word| !word.is_empty())
            .find_map(|word| find(&schema, word))
    }

    pub(crate) fn parse(&self) -> Result<TopLevelGrammar, ConstraintError> {
        let kind = self.kind();
        let text = match self {
            Grammar::JsonObject => return Ok(of_schema(json!({ "type": "object" }))),
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text,
        };
        if text.len() > MAX_LEN {
            return Err(ConstraintError::TooLong {
                kind,
                len: text.len(),
                limit: MAX_LEN,
            });
        }
        if let Grammar::JsonSchema(text) = self {
            return match serde_json::from_str(text).map_err(ConstraintError::NotJson)? {
                schema @ Value::Object(_) if levels(&schema) > MAX_LEVELS => {
                    Err(ConstraintError::NotCompiled {
                        kind,
                        message: format!(
                            "expected at most {MAX_LEVELS} schemas inside one another, counting the depth of \
                             the whole for each `$ref`, found {}",
                            levels(&schema)
                        ),
                    })
                }
                schema @ Value::Object(_) => Ok(of_schema(schema)),
                Value::Bool(true) => Ok(of_schema(json!({}))),
                Value::Bool(false) => Err(ConstraintError::NotCompiled {
                    kind,
                    message: "expected one that some value matches, found false".into(),
                }),
                other => Err(ConstraintError::NotASchema {
                    found: name(&other),
                }),
            };
        }
        if let Some(at) = too_deep(text) {
            return Err(ConstraintError::TooDeep {
                kind,
                at,
                limit: MAX_DEPTH,
            });
        }
        let n_rules = text.matches(':').count();
        if matches!(self, Grammar::Lark(_)) && n_rules > MAX_LEVELS {
            return Err(ConstraintError::NotCompiled {
                kind,
                message: format!("expected at most {MAX_LEVELS} rules, found {n_rules}"),
            });
        }
        Ok(match self {
            Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
            _ => TopLevelGrammar::from_lark(text.clone()),
        })
    }
}

fn of_schema(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_grammar(GrammarWithLexer::from_json_schema(bounded(schema)))
}

/// `schema`, with bounded white space unless it has options of its own, and bounded texts in formats that have no end: a model
/// that repeats itself ends them.
pub fn bounded(mut schema: Value) -> Value {
    bound_formats(&mut schema);
    join_apart(&mut schema);
    if let Value::Object(schema) = &mut schema {
        let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
        if let Value::Object(options) = options
            && !options.contains_key("whitespace_flexible")
        {
            let pattern = options.entry("whitespace_pattern");
            pattern.or_insert_with(|| WHITESPACE.into());
        }
    }
    schema
}

/// Has what is `oneOf` several that exclude one another be `anyOf` them: the constraint can't count how many match.
fn join_apart(schema: &mut Value) {
    fn visit(schema: &mut Value, root: &Value, steps: &mut usize) {
        match schema {
            Value::Array(schemas) => {
                schemas
                    .iter_mut()
                    .for_each(|schema| visit(schema, root, steps));
            }
            Value::Object(members) => {
                let is_free = !members.contains_key("anyOf");
                let all = members.get("oneOf").and_then(Value::as_array);
                let are_apart = |all: &Vec<Value>| {
                    let mut pairs = all.iter().enumerate();
                    pairs.all(|(i, one)| {
                        let mut before = all[..i].iter();
                        before.all(|other| exclude((one, other), root, MAX_REFS, steps))
                    })
                };
                if is_free
                    && all.is_some_and(are_apart)
                    && let Some(all) = members.remove("oneOf")
                {
                    members.insert("anyOf".to_owned(), all);
                }
                let inner = members.iter_mut();
                let inner = inner.filter(|(name, _)| !matches!(name.as_str(), "const" | "enum"));
                inner.for_each(|(_, value)| visit(value, root, steps));
            }
            _ => {}
        }
    }
    if find(schema, "oneOf").is_some() {
        let root = schema.clone();
        visit(schema, &root, &mut MAX_STEPS.clone());
    }
}

/// Members and values of a schema that are compared at most, all together.
const MAX_STEPS: usize = 1 << 18;

/// References that are followed, and properties inside one another, at most.
const MAX_REFS: usize = 8;

/// Whether certainly nothing matches both schemas, whose references are within `root`: they are of other types, or one of
/// other values, or have a property that tells them apart. Takes what it compares from `steps`; once none are left, nothing is
/// certain.
fn exclude((a, b): (&Value, &Value), root: &Value, n_left: usize, steps: &mut usize) -> bool {
    let size = |schema: &Value, name: &str| match schema.get(name) {
        Some(Value::Array(items)) => items.len(),
        Some(Value::Object(members)) => members.len(),
        _ => 0,
    };
    let both = |name| (1 + size(a, name)).saturating_mul(1 + size(b, name));
    let required = size(a, "required") + size(b, "required");
    let members = (1 + size(a, "properties")).saturating_mul(1 + required);
    let cost = both("enum")
        .saturating_add(both("type"))
        .saturating_add(members);
    let Some(left) = steps.checked_sub(cost) else {
        *steps = 0;
        return false;
    };
    *steps = left;
    let Some(n_left) = n_left.checked_sub(1) else {
        return false;
    };
    let followed = |schema: &Value| {
        let path = schema.get("$ref")?.as_str()?.strip_prefix('#')?;
        root.pointer(path)
    };
    if let Some(a) = followed(a) {
        return exclude((a, b), root, n_left, steps);
    }
    if let Some(b) = followed(b) {
        return exclude((a, b), root, n_left, steps);
    }
    let values = |schema: &Value| match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, Some(Value::Array(values))) => Some(values.clone()),
        _ => None,
    };
    let kinds = |schema: &Value| -> Option<Vec<String>> {
        if let Some(values) = values(schema) {
            return Some(values.iter().map(|value| kind(value).to_owned()).collect());
        }
        let one = |kind: &Value| {
            let kind = kind.as_str()?;
            Some(if kind == "integer" { "number" } else { kind }.to_owned())
        };
        match schema.get("type")? {
            Value::Array(kinds) => kinds.iter().map(one).collect(),
            kind => Some(vec![one(kind)?]),
        }
    };
    if let (Some(a), Some(b)) = (kinds(a), kinds(b))
        && !a.iter().any(|kind| b.contains(kind))
    {
        return true;
    }
    if let (Some(a), Some(b)) = (values(a), values(b)) {
        // 1 and 1.0 are one value, and so are what has them.
        let is_plain = |value: &Value| !value.is_array() && !value.is_object();
        let is = |a: &Value, b: &Value| match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => a == b,
        };
        return a.iter().chain(&b).all(is_plain) && !a.iter().any(|a| b.iter().any(|b| is(a, b)));
    }
    let requires = |schema: &Value, name: &str| {
        let is_object = schema.get("type").is_some_and(|kind| kind == "object");
        let required = schema.get("required").and_then(Value::as_array);
        is_object && required.is_some_and(|all| all.iter().any(|other| other == name))
    };
    let properties = a.get("properties").and_then(Value::as_object);
    properties.is_some_and(|properties| {
        properties.iter().any(|(name, of_a)| {
            let of_b = b.get("properties").and_then(|all| all.get(name));
            requires(a, name)
                && requires(b, name)
                && of_b.is_some_and(|of_b| exclude((of_a, of_b), root, n_left, steps))
        })
    })
}

/// Has texts in formats that have no end match a pattern, too, unless something else says what they are.
fn bound_formats(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(bound_formats),
        Value::Object(members) => {
            let format = members.get("format").and_then(Value::as_str);
            let bound = BOUNDS.iter().find(|bound| Some(bound.0) == format);
            let mut said = ["pattern", "const", "enum"].into_iter();
            if let Some((_, pattern, most)) = bound
                && !said.any(|name| members.contains_key(name))
            {
                if let Some(most) = *most {
                    members.entry("maxLength").or_insert(most.into());
                }
                members.insert("pattern".to_owned(), (*pattern).into());
            }
            let inner = members.iter_mut();
            let inner = inner.filter(|(name, _)| !matches!(name.as_str(), "const" | "enum"));
            inner.for_each(|(_, value)| bound_formats(value));
        }
        _ => {}
    }
}

/// How many schemas of `schema` are inside one another at most: each `$ref` may lead to one as deep as the whole.
fn levels(schema: &Value) -> usize {
    fn visit<'a>(value: &'a Value, refs: &mut HashSet<&'a str>) -> usize {
        let inner = match value {
            Value::Array(values) => values.iter().map(|value| visit(value, refs)).max(),
            Value::Object(members) => {
                refs.extend(members.get("$ref").and_then(Value::as_str));
                members.values().map(|value| visit(value, refs)).max()
            }
            _ => return 0,
        };
        1 + inner.unwrap_or(0)
    }
    let mut refs = HashSet::new();
    let depth = visit(schema, &mut refs);
    depth * (1 + refs.len())
}

/// A JSON pointer to the first keyword or text `word` in `value`.
fn find(value: &Value, word: &str) -> Option<String> {
    let inside = |step: &str, value: &Value| match value {
        Value::String(text) if text == word => Some(format!("/{step}")),
        value => find(value, word).map(|rest| format!("/{step}{rest}")),
    };
    match value {
        Value::Object(members) if members.contains_key(word) => Some(format!("/{word}")),
        Value::Object(members) => members.iter().find_map(|(key, value)| inside(key, value)),
        Value::Array(values) => {
            let mut values = values.iter().enumerate();
            values.find_map(|(i, value)| inside(&i.to_string(), value))
        }
        _ => None,
    }
}

/// The type of `value`, in the words of schemas.
fn kind(value: &Value) -> &'static str {
    let name = name(value);
    name.split_once(' ').map_or(name, |(_, kind)| kind)
}

/// The same in a sentence.
fn name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The byte at which brackets are nested deeper than [`MAX_DEPTH`]; those in strings count too.
fn too_deep(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    text.bytes().position(|byte| {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_DEPTH
    })
}
