//! Values of parameters that models write as plain text: which values a schema lets through, and what a text becomes.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Tool;

/// Schemas that are looked at to find what a parameter may be: references may go in circles, with forks.
const MAX_SCHEMAS: usize = 256;

/// Values of which a parameter may be one, as texts; where there are more, any text may be, or JSON that matches.
const MAX_CHOICES: usize = 1000;

/// What a parameter may be.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Choices<'a> {
    /// One of these values, as texts,
    pub(super) texts: Vec<String>,
    /// or JSON that matches one of these, which are of no text.
    pub(super) schemas: Vec<&'a Value>,
}

/// Kinds of JSON values, a bit for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kinds(u8);

impl Kinds {
    const NONE: Kinds = Kinds(0);
    pub(super) const ALL: Kinds = Kinds(63);
    const STRING: Kinds = Kinds(1);

    fn of(value: &Value) -> Kinds {
        Kinds::named(match value {
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "boolean",
            Value::Null => "null",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    /// The kind that schemas call `name`.
    fn named(name: &str) -> Kinds {
        match name {
            "string" => Kinds::STRING,
            "number" | "integer" => Kinds(2),
            "boolean" => Kinds(4),
            "null" => Kinds(8),
            "array" => Kinds(16),
            "object" => Kinds(32),
            _ => Kinds::ALL,
        }
    }

    fn or(self, other: Kinds) -> Kinds {
        Kinds(self.0 | other.0)
    }

    fn and(self, other: Kinds) -> Kinds {
        Kinds(self.0 & other.0)
    }

    fn has(self, other: Kinds) -> bool {
        self.and(other) == other
    }

    /// Strings and nothing else.
    pub(super) fn is_text(self) -> bool {
        self == Kinds::STRING
    }

    /// Whether there are booleans, and null, if there is nothing else.
    pub(super) fn words(self) -> Option<(bool, bool)> {
        let (boolean, null) = (Kinds::named("boolean"), Kinds::named("null"));
        let words = boolean.or(null);
        words.has(self).then(|| (self.has(boolean), self.has(null)))
    }

    /// Strings, maybe beside other values.
    pub(super) fn has_text(self) -> bool {
        self.has(Kinds::STRING)
    }
}

impl Tool {
    /// The schemas of its parameters, by name, if it says which there are.
    pub(super) fn properties(&self) -> Option<&Map<String, Value>> {
        let found = self.resolved(&self.parameters);
        found.get("properties")?.as_object()
    }

    /// The parameters that have to be there.
    pub(super) fn required(&self) -> HashSet<&str> {
        let required = self.resolved(&self.parameters).get("required");
        let names = required.and_then(Value::as_array);
        names
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    }

    /// The kinds of values that the parameter `name` may have.
    pub(super) fn kinds(&self, name: &str) -> Kinds {
        match self.properties().and_then(|schemas| schemas.get(name)) {
            Some(schema) => self.kinds_of(schema, &mut { MAX_SCHEMAS }),
            None => Kinds::ALL,
        }
    }

    /// The kinds of values that match `schema`, for which `n_left` schemas may be looked at.
    fn kinds_of(&self, schema: &Value, n_left: &mut usize) -> Kinds {
        let Some(members) = schema.as_object().filter(|_| *n_left > 0) else {
            return Kinds::ALL;
        };
        *n_left -= 1;
        let any = |kinds: &mut dyn Iterator<Item = Kinds>| kinds.fold(Kinds::NONE, Kinds::or);
        let named = |name: &Value| Kinds::named(name.as_str().unwrap_or_default());
        let mut found = Kinds::ALL;
        for (name, value) in members {
            let told = match (name.as_str(), value) {
                ("type", Value::Array(names)) => any(&mut names.iter().map(named)),
                ("type", name) => named(name),
                ("const", value) => Kinds::of(value),
                ("enum", Value::Array(values)) => any(&mut values.iter().map(Kinds::of)),
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    any(&mut schemas.iter().map(|schema| self.kinds_of(schema, n_left)))
                }
                ("allOf", Value::Array(schemas)) => {
                    let each = schemas.iter().map(|schema| self.kinds_of(schema, n_left));
                    each.fold(Kinds::ALL, Kinds::and)
                }
                ("$ref", Value::String(at)) => match self.at(at) {
                    Some(schema) => self.kinds_of(schema, n_left),
                    None => Kinds::ALL,
                },
                _ => Kinds::ALL,
            };
            found = found.and(told);
        }
        match found {
            // Nothing matches: any value is as wrong as another.
            Kinds::NONE => Kinds::ALL,
            kinds => kinds,
        }
    }

    /// What the parameter `name` may be, if not any text.
    pub(super) fn choices(&self, name: &str) -> Option<Choices<'_>> {
        let schema = self.properties()?.get(name)?;
        let mut choices = Choices::default();
        self.choose(schema, &mut { MAX_SCHEMAS }, &mut choices)?;
        Some(choices)
    }

    /// Adds what `schema` lets through to `choices`; `None` if that is any text.
    fn choose<'a>(
        &'a self,
        schema: &'a Value,
        n_left: &mut usize,
        choices: &mut Choices<'a>,
    ) -> Option<()> {
        *n_left = n_left.checked_sub(1)?;
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let room = MAX_CHOICES - choices.texts.len();
        let values = schema.get("enum").and_then(Value::as_array);
        if let Some(value) = schema.get("const").filter(|_| room > 0) {
            choices.texts.push(text(value));
        } else if let Some(values) = values.filter(|values| values.len() <= room) {
            choices.texts.extend(values.iter().map(text));
        } else if schema.get("type").is_some_and(|name| name == "null") && room > 0 {
            choices.texts.push("null".to_owned());
        } else if !self.kinds_of(schema, &mut { MAX_SCHEMAS }).has_text() {
            choices.schemas.push(schema);
        } else if let Some(at) = schema.get("$ref").and_then(Value::as_str) {
            self.choose(self.at(at)?, n_left, choices)?;
        } else {
            let schemas = schema.get("anyOf").or_else(|| schema.get("oneOf"));
            for schema in schemas.and_then(Value::as_array)? {
                self.choose(schema, n_left, choices)?;
            }
        }
        Some(())
    }

    /// `schema`, or what it refers to.
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let at = schema.get("$ref").and_then(Value::as_str);
        at.and_then(|at| self.at(at)).unwrap_or(schema)
    }

    /// The schema that the reference `at` leads to.
    pub(super) fn at(&self, at: &str) -> Option<&Value> {
        self.parameters.pointer(at.strip_prefix('#')?)
    }
}

/// `text` inside a string of JSON.
pub(super) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// The value that `text` is, as JSON: of one of `kinds` if it can be, and a string if it can be nothing else.
pub(super) fn value(kinds: Kinds, text: &str) -> String {
    let word = text.trim();
    // As Python writes them, and templates that leave it to Python.
    let word = match word {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        word => word,
    };
    let found: Option<Value> = serde_json::from_str(word).ok();
    // In quotes, a string would be one that begins and ends with them.
    let found = found.filter(|value| match kinds.has_text() {
        true => !value.is_string() && kinds.has(Kinds::of(value)),
        false => true,
    });
    match found {
        Some(_) => word.to_owned(),
        None => Value::from(text).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool() -> Tool {
        let schema = json!({
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
                "unit": {"$ref": "#/$defs/unit"},
                "unit or count": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "integer"}]},
                "level": {"enum": [1, "high", null]},
                "list": {"type": "array"},
                "any": {},
                "loop": {"$ref": "#/properties/loop"},
                "forks": {"anyOf": vec![json!({"$ref": "#/properties/forks"}); 99]},
                "never": {"allOf": [{"type": "string"}, {"type": "null"}]},
                "numbers": {"type": "integer", "enum": (0..2000).collect::<Vec<_>>()},
                "countries": {"oneOf": (0..200).map(|i| json!({"const": format!("C{i}"), "title": "x"})).collect::<Vec<_>>()},
                "words": {"enum": (0..2000).map(|i| i.to_string()).collect::<Vec<_>>()},
                "many": {"anyOf": vec![json!({"$ref": "#/properties/words"}); 99]},
            },
            "required": ["text"],
            "$defs": {"unit": {"enum": ["C", "F"]}},
        });
        Tool::new("a", Some(&schema))
    }

    #[test]
    fn texts_become_values_by_their_schema() {
        let tool = tool();
        for (name, text, expected) in [
            ("text", "12", "\"12\""),
            ("text", " a\n\"b\" ", "\" a\\n\\\"b\\\" \""),
            ("count", " 12 ", "12"),
            (
                "count",
                "12345678901234567890123",
                "12345678901234567890123",
            ),
            ("count", "twelve", "\"twelve\""),
            ("count", "[1]", "[1]"),
            ("maybe", "null", "null"),
            ("maybe", "None", "null"),
            ("maybe", "true", "\"true\""),
            ("maybe", "\"x\"", "\"\\\"x\\\"\""),
            ("either", "7", "7"),
            ("either", "7 up", "\"7 up\""),
            ("unit", "C", "\"C\""),
            ("level", "1", "1"),
            ("level", "high", "\"high\""),
            ("list", "[1, \"a\"]", "[1, \"a\"]"),
            ("list", "\"a\"", "\"a\""),
            ("any", "True", "true"),
            ("any", "{\"x\": 1}", "{\"x\": 1}"),
            ("any", "{x}", "\"{x}\""),
            ("unknown", "1.5", "1.5"),
            ("loop", "x", "\"x\""),
            ("never", "x", "\"x\""),
            ("forks", "x", "\"x\""),
        ] {
            assert_eq!(value(tool.kinds(name), text), expected, "{name}: {text}");
        }
        assert_eq!(tool.required(), HashSet::from(["text"]));
    }

    #[test]
    fn few_values_are_choices() {
        let tool = tool();
        let (integer, list) = (json!({"type": "integer"}), json!({"type": "array"}));
        // More are JSON, where that is of no text.
        let numbers = tool.properties().unwrap()["numbers"].clone();
        assert_eq!(tool.choices("numbers").unwrap().schemas, [&numbers]);
        assert_eq!(tool.choices("countries").unwrap().texts.len(), 200);
        for (name, texts, schemas) in [
            ("unit", &["C", "F"][..], &[][..]),
            ("level", &["1", "high", "null"], &[]),
            ("unit or count", &["C", "F"], &[&integer]),
            ("count", &[], &[&integer]),
            ("list", &[], &[&list]),
        ] {
            let choices = Choices {
                texts: texts.iter().map(|text| text.to_string()).collect(),
                schemas: schemas.to_vec(),
            };
            assert_eq!(tool.choices(name), Some(choices), "{name}");
        }
        for name in [
            "text", "maybe", "either", "any", "loop", "forks", "words", "many", "unknown",
        ] {
            assert_eq!(tool.choices(name), None, "{name}");
        }
    }
}
