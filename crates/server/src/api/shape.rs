//! What requests may have. Each dialect has its fields in a table, by which bodies are checked before anything is
//! read, and of which the OpenAPI document is made: neither can say what the other doesn't.

use serde_json::{Map, Value, json};

use super::error::ApiError;

/// What a value may be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shape {
    /// Anything.
    Any,
    Flag,
    /// So many characters.
    Text(usize, usize),
    /// The name of a function.
    Name,
    /// A word of these; who sends another is told of these, and then why.
    Word(&'static [&'static str], &'static str),
    /// Text that is none of these.
    OtherThan(&'static [&'static str]),
    /// The name of a served model.
    Model,
    Number(f32, f32),
    Whole(i64, u64),
    /// The id of a token.
    Id,
    /// So many elements, which errors call so.
    Items(&'static Shape, &'static str, usize, usize),
    /// An object with the fields of all of these lists, and any others.
    Object(&'static [&'static [Field]]),
    /// An object whose names are ids of tokens.
    ById(&'static Shape),
    /// A JSON schema: an object, true or false, or one of them as text.
    Schema,
    /// What one of these is.
    OneOf(&'static [Shape]),
}

/// What schemas are of.
#[derive(Debug)]
pub(crate) struct Served {
    /// What the models are called.
    pub(crate) models: Vec<String>,
    /// Tokens that each of them has.
    pub(crate) n_vocab: usize,
}

/// A field of an object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) shape: Shape,
    pub(crate) is_required: bool,
}

impl Field {
    /// Whether `object` has it as it has to be.
    fn fits(&self, object: &Value) -> bool {
        match object.get(self.name) {
            None | Some(Value::Null) if !self.is_required => true,
            None => self.shape.fits(&Value::Null),
            Some(member) => self.shape.fits(member),
        }
    }
}

/// A field that may be left out, or null.
pub(crate) const fn field(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        is_required: false,
    }
}

/// A field that has to be there.
pub(crate) const fn required(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        is_required: true,
    }
}

pub(crate) const TEXT: Shape = Shape::Text(0, usize::MAX);
/// Text that isn't empty.
pub(crate) const SAID: Shape = Shape::Text(1, usize::MAX);
/// A number of tokens, of which there is one at least.
pub(crate) const COUNT: Shape = Shape::Whole(1, u64::MAX);
/// An object with any fields.
pub(crate) const OBJECT: Shape = Shape::Object(&[]);

/// A word of these.
pub(crate) const fn word(words: &'static [&'static str]) -> Shape {
    Shape::Word(words, "")
}

/// Elements of an array, which errors call so.
pub(crate) const fn items(shape: &'static Shape, called: &'static str) -> Shape {
    Shape::Items(shape, called, 0, usize::MAX)
}

/// The same, of which there is one at least.
pub(crate) const fn some(shape: &'static Shape, called: &'static str) -> Shape {
    Shape::Items(shape, called, 1, usize::MAX)
}

/// Characters of the name of a function at most.
const MAX_NAME: usize = 128;

impl Shape {
    /// Whether `value` is so.
    pub(crate) fn fits(self, value: &Value) -> bool {
        match self {
            Shape::Any => true,
            Shape::Flag => value.is_boolean(),
            Shape::Text(min, max) => value.as_str().is_some_and(|text| {
                (min == 0 || !text.is_empty()) && (max == usize::MAX || text.chars().count() <= max)
            }),
            Shape::Model => value.is_string(),
            Shape::Name => value.as_str().is_some_and(|name| {
                let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
                !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(fits)
            }),
            Shape::Word(words, _) => value.as_str().is_some_and(|word| words.contains(&word)),
            Shape::OtherThan(words) => value.as_str().is_some_and(|word| !words.contains(&word)),
            Shape::Number(min, max) => value
                .as_f64()
                .is_some_and(|number| (f64::from(min)..=f64::from(max)).contains(&number)),
            Shape::Whole(min, max) => {
                whole(value).is_some_and(|n| (i128::from(min)..=i128::from(max)).contains(&n))
            }
            Shape::Id => whole(value).is_some_and(|n| (0..=i128::from(u32::MAX)).contains(&n)),
            Shape::Schema => value.is_object() || value.is_boolean() || value.is_string(),
            Shape::Items(shape, _, min, max) => value.as_array().is_some_and(|all| {
                (min..=max).contains(&all.len()) && all.iter().all(|item| shape.fits(item))
            }),
            Shape::ById(shape) => value.as_object().is_some_and(|members| {
                let mut members = members.iter();
                members.all(|(name, member)| is_id(name) && shape.fits(member))
            }),
            Shape::Object(lists) => {
                let mut fields = lists.iter().copied().flatten();
                value.is_object() && fields.all(|field| field.fits(value))
            }
            Shape::OneOf(shapes) => shapes.iter().any(|shape| shape.fits(value)),
        }
    }

    /// What is wrong with `value`, which is at `path` and isn't so.
    pub(crate) fn error(self, value: &Value, path: &str) -> ApiError {
        match (self, value) {
            (Shape::Items(shape, _, min, max), Value::Array(all))
                if (min..=max).contains(&all.len()) =>
            {
                let mut items = all.iter().enumerate();
                let found = items.find(|(_, item)| !shape.fits(item));
                let found = found.map(|(index, item)| (item, format!("{path}[{index}]")));
                found.map_or_else(
                    || wrong(value, path, ""),
                    |(item, at)| shape.error(item, &at),
                )
            }
            (Shape::ById(shape), Value::Object(members)) => {
                let mut members = members.iter();
                let found = members.find(|(name, member)| !(is_id(name) && shape.fits(member)));
                match found {
                    Some((name, member)) if is_id(name) => shape.error(member, &join(path, name)),
                    found => {
                        let name = found.map_or("", |(name, _)| name);
                        let message = "expected the id of a token as its name";
                        refused(&join(path, name), message)
                    }
                }
            }
            (Shape::Object(lists), Value::Object(_)) => {
                let mut fields = lists.iter().copied().flatten();
                match fields.find(|field| !field.fits(value)) {
                    Some(field) => {
                        let member = value.get(field.name).unwrap_or(&Value::Null);
                        field.shape.error(member, &join(path, field.name))
                    }
                    None => wrong(value, path, &self.expected()),
                }
            }
            (Shape::OneOf(shapes), _) => {
                // The one that was meant knows best what is wrong.
                let of_kind: Vec<Shape> = (shapes.iter().copied())
                    .filter(|shape| shape.is_of_kind(value))
                    .collect();
                let mut meant = of_kind.iter().filter(|shape| shape.has_words(value));
                let complete = meant.clone().find(|shape| shape.has_needed(value));
                match (complete.or_else(|| meant.next()), of_kind.is_empty()) {
                    (Some(shape), _) => shape.error(value, path),
                    (None, false) => no_such_word(&of_kind, value, path),
                    (None, true) => wrong(value, path, &self.expected()),
                }
            }
            _ => wrong(value, path, &self.expected()),
        }
    }

    /// Whether `value` is of the kind: an object, text, ...
    fn is_of_kind(self, value: &Value) -> bool {
        match self {
            Shape::Object(_) | Shape::ById(_) => value.is_object(),
            Shape::Items(..) => value.is_array(),
            Shape::Number(..) | Shape::Whole(..) | Shape::Id => value.is_number(),
            Shape::Text(..) | Shape::Name | Shape::Word(..) | Shape::OtherThan(_) => {
                value.is_string()
            }
            Shape::OneOf(shapes) => shapes.iter().any(|shape| shape.is_of_kind(value)),
            _ => false,
        }
    }

    /// Whether the words of an object, by which it is told from others, are those of this shape.
    fn has_words(self, value: &Value) -> bool {
        match self {
            Shape::Object(lists) => lists.iter().copied().flatten().all(|field| {
                let is_word = matches!(field.shape, Shape::Word(..) | Shape::OtherThan(_));
                let member = value.get(field.name).unwrap_or(&Value::Null);
                let is_left_out = member.is_null() && !field.is_required;
                !is_word || is_left_out || field.shape.fits(member)
            }),
            // What the elements are is their own matter.
            _ => true,
        }
    }

    /// Whether an object has all that it needs, whatever it is.
    fn has_needed(self, value: &Value) -> bool {
        let Shape::Object(lists) = self else {
            return true;
        };
        let mut fields = lists.iter().copied().flatten();
        fields.all(|field| !field.is_required || value.get(field.name).is_some())
    }

    /// What errors say that was expected.
    fn expected(self) -> String {
        match self {
            Shape::Any => "something".to_owned(),
            Shape::Flag => "true or false".to_owned(),
            Shape::Text(1, usize::MAX) => "text that isn't empty".to_owned(),
            Shape::Text(_, usize::MAX) | Shape::Model => "text".to_owned(),
            Shape::Text(_, max) => format!("text of at most {max} characters"),
            Shape::Name => format!("1 to {MAX_NAME} letters, digits, - and _"),
            Shape::Word(words, why) => listed(words.iter().map(|word| (*word).to_owned())) + why,
            Shape::OtherThan(_) => "another word".to_owned(),
            Shape::Number(f32::MIN, f32::MAX) => "a number".to_owned(),
            Shape::Number(min, f32::MAX) => format!("a number of at least {min}"),
            Shape::Number(min, max) => format!("a number from {min} to {max}"),
            Shape::Whole(i64::MIN, u64::MAX) => "a whole number".to_owned(),
            Shape::Whole(min, u64::MAX) => format!("a whole number of at least {min}"),
            Shape::Whole(min, max) => format!("a whole number from {min} to {max}"),
            Shape::Id => "the id of a token".to_owned(),
            Shape::Items(_, called, 0, usize::MAX) => format!("an array of {called}"),
            Shape::Items(_, called, min, usize::MAX) => {
                format!("an array of {called}, {min} at least")
            }
            Shape::Items(_, called, min, max) => format!("an array of {called}, {min} to {max}"),
            Shape::Object(_) | Shape::ById(_) => "an object".to_owned(),
            Shape::Schema => "a JSON schema".to_owned(),
            Shape::OneOf(shapes) => {
                let mut all: Vec<String> = shapes.iter().map(|shape| shape.expected()).collect();
                all.dedup();
                listed(all.into_iter())
            }
        }
    }

    /// Which of the shapes that this may be `value` has.
    pub(crate) fn found(self, value: &Value) -> Shape {
        match self {
            Shape::OneOf(shapes) => {
                let found = shapes.iter().find(|shape| shape.fits(value));
                found.map_or(self, |shape| shape.found(value))
            }
            shape => shape,
        }
    }

    /// The shape of the field called `name`, if objects of this shape may have it.
    pub(crate) fn field(self, name: &str) -> Option<Shape> {
        match self {
            Shape::Object(lists) => {
                let mut fields = lists.iter().copied().flatten();
                let found = fields.find(|field| field.name == name);
                found.map(|field| field.shape)
            }
            Shape::ById(shape) => Some(*shape),
            Shape::OneOf(shapes) => shapes.iter().find_map(|shape| shape.field(name)),
            _ => None,
        }
    }

    /// The shape of the elements, if this may be an array.
    pub(crate) fn item(self) -> Option<Shape> {
        match self {
            Shape::Items(shape, ..) => Some(*shape),
            Shape::OneOf(shapes) => shapes.iter().find_map(|shape| shape.item()),
            _ => None,
        }
    }

    /// Whether this, or one of what it may be, is what `is` says.
    pub(crate) fn may_be(self, is: fn(Shape) -> bool) -> bool {
        match self {
            Shape::OneOf(shapes) => shapes.iter().any(|shape| shape.may_be(is)),
            shape => is(shape),
        }
    }

    /// The same as a JSON schema, of what is `served`.
    pub(crate) fn schema(self, served: &Served) -> Value {
        match self {
            Shape::Any => json!({}),
            Shape::Flag => json!({"type": "boolean"}),
            Shape::Text(0, usize::MAX) => json!({"type": "string"}),
            Shape::Text(min, usize::MAX) => json!({"type": "string", "minLength": min}),
            Shape::Text(min, max) => json!({"type": "string", "minLength": min, "maxLength": max}),
            Shape::Name => json!({
                "type": "string", "pattern": "^[A-Za-z0-9_.-]+$", "minLength": 1, "maxLength": MAX_NAME,
            }),
            Shape::Word(words, _) => json!({"type": "string", "enum": words}),
            Shape::OtherThan(words) => json!({"type": "string", "not": {"enum": words}}),
            Shape::Model => json!({"type": "string", "enum": served.models}),
            Shape::Id => {
                let most = served.n_vocab.saturating_sub(1);
                json!({"type": "integer", "minimum": 0, "maximum": most})
            }
            Shape::Number(min, max) => bounded("number", (min, f32::MIN), (max, f32::MAX)),
            Shape::Whole(min, max) => bounded("integer", (min, i64::MIN), (max, u64::MAX)),
            Shape::Schema => json!({"type": ["object", "boolean", "string"]}),
            Shape::Items(shape, _, min, max) => {
                let mut schema = json!({"type": "array", "items": shape.schema(served)});
                if min > 0 {
                    schema["minItems"] = min.into();
                }
                if max < usize::MAX {
                    schema["maxItems"] = max.into();
                }
                schema
            }
            Shape::ById(shape) => json!({
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": shape.schema(served),
            }),
            Shape::Object(lists) => {
                let (mut properties, mut needed) = (Map::new(), Vec::new());
                for field in lists.iter().copied().flatten() {
                    let schema = field.shape.schema(served);
                    let schema = match field.is_required {
                        true => schema,
                        false => or_null(schema),
                    };
                    properties.insert(field.name.to_owned(), schema);
                    if field.is_required {
                        needed.push(field.name);
                    }
                }
                let mut schema = json!({"type": "object"});
                if !properties.is_empty() {
                    schema["properties"] = properties.into();
                }
                if !needed.is_empty() {
                    schema["required"] = needed.into();
                }
                schema
            }
            Shape::OneOf(shapes) => {
                let all: Vec<Value> = shapes.iter().map(|shape| shape.schema(served)).collect();
                json!({ "anyOf": all })
            }
        }
    }
}

/// What is wrong with an object whose word, which would tell which of `shapes` it is, is unknown.
fn no_such_word(shapes: &[Shape], value: &Value, path: &str) -> ApiError {
    let fields = shapes.iter().flat_map(|shape| match shape {
        Shape::Object(lists) => *lists,
        _ => &[],
    });
    let fields: Vec<&Field> = fields.copied().flatten().collect();
    let member = |name: &str| value.get(name).unwrap_or(&Value::Null);
    let wrong_word = fields.iter().find(|field| {
        matches!(field.shape, Shape::Word(..)) && !field.shape.fits(member(field.name))
    });
    let Some(Field { name, .. }) = wrong_word else {
        return wrong(
            value,
            path,
            &listed(shapes.iter().map(|shape| shape.expected())),
        );
    };
    let (mut all, mut why) = (Vec::new(), "");
    for field in fields.iter().filter(|field| field.name == *name) {
        if let Shape::Word(words, own) = field.shape {
            let new = words.iter().map(|word| (*word).to_owned());
            all.extend(new.filter(|word| !all.contains(word)).collect::<Vec<_>>());
            why = if own.is_empty() { why } else { own };
        }
    }
    let expected = listed(all.into_iter()) + why;
    wrong(member(name), &join(path, name), &expected)
}

/// A number whose bounds are said where they aren't those of its type.
fn bounded<A, B>(kind: &str, (min, least): (A, A), (max, most): (B, B)) -> Value
where
    A: PartialEq + Into<Value>,
    B: PartialEq + Into<Value>,
{
    let mut schema = json!({ "type": kind });
    // Numbers are kept in 32 bits, so that their greatest is a bound.
    if min != least || kind == "number" {
        schema["minimum"] = min.into();
    }
    if max != most || kind == "number" {
        schema["maximum"] = max.into();
    }
    schema
}

/// `schema`, or null.
fn or_null(mut schema: Value) -> Value {
    if schema.as_object().is_some_and(Map::is_empty) {
        return schema;
    }
    if let Some(Value::Array(all)) = schema.get_mut("anyOf") {
        all.push(json!({"type": "null"}));
        return schema;
    }
    match schema["type"].take() {
        Value::Array(mut kinds) => {
            kinds.push("null".into());
            schema["type"] = kinds.into();
        }
        kind => schema["type"] = json!([kind, "null"]),
    }
    if let Some(Value::Array(words)) = schema.get_mut("enum") {
        words.push(Value::Null);
    }
    schema
}

/// The whole number that `value` is. Some clients write whole numbers with a fraction.
pub(crate) fn whole(value: &Value) -> Option<i128> {
    const LIMIT: f64 = 2e19;
    let float = || {
        let float = value.as_f64()?;
        (float.fract() == 0.0 && float.abs() < LIMIT).then_some(float as i128)
    };
    let signed = || value.as_i64().map(i128::from);
    value
        .as_u64()
        .map(i128::from)
        .or_else(signed)
        .or_else(float)
}

/// Whether this is the id of a token.
fn is_id(name: &str) -> bool {
    name.parse::<u32>().is_ok()
}

/// `a, b or c`.
fn listed(words: impl Iterator<Item = String>) -> String {
    let mut words: Vec<String> = words.collect();
    let last = words.pop().unwrap_or_default();
    match words.is_empty() {
        true => last,
        false => format!("{} or {last}", words.join(", ")),
    }
}

/// The path of the field `name` of what is at `path`.
pub(crate) fn join(path: &str, name: &str) -> String {
    match path.is_empty() {
        true => name.to_owned(),
        false => format!("{path}.{name}"),
    }
}

/// The error `message`, of the place `path`.
pub(crate) fn refused(path: &str, message: impl std::fmt::Display) -> ApiError {
    match path.is_empty() {
        true => ApiError::invalid(message.to_string()),
        false => ApiError::invalid(format!("{path}: {message}")).at(path),
    }
}

/// What is wrong with `value`, which is at `path`.
pub(crate) fn wrong(value: &Value, path: &str, expected: &str) -> ApiError {
    let found = match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::String(text) if text.len() <= 40 => format!("{text:?}"),
        Value::String(_) => "text".to_owned(),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
    };
    refused(path, format!("expected {expected}, found {found}"))
}

/// Where the JSON schema `schema`, which is at `path`, has an `enum` without values, which nothing can match.
pub(crate) fn empty_enum(schema: &Value, path: &str) -> Option<String> {
    match schema {
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.find_map(|(index, item)| empty_enum(item, &format!("{path}[{index}]")))
        }
        Value::Object(members) => members.iter().find_map(|(name, value)| {
            let path = join(path, name);
            match (name.as_str(), value) {
                ("enum", Value::Array(values)) if values.is_empty() => Some(path),
                ("enum" | "const" | "default" | "examples", _) => None,
                // Their members are schemas, whatever these are called.
                (
                    "properties" | "patternProperties" | "$defs" | "definitions",
                    Value::Object(schemas),
                ) => {
                    let mut schemas = schemas.iter();
                    schemas.find_map(|(name, schema)| empty_enum(schema, &join(&path, name)))
                }
                _ => empty_enum(value, &path),
            }
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Shape = Shape::OneOf(&[
        Shape::Object(&[&[required("type", word(&["text"])), required("text", TEXT)]]),
        Shape::Object(&[&[required("type", Shape::OtherThan(&["text"]))]]),
    ]);
    const BODY: Shape = Shape::Object(&[&[
        required("model", Shape::Model),
        field("t", Shape::Number(0.0, 2.0)),
        field("n", Shape::Whole(1, u64::MAX)),
        field("parts", Shape::OneOf(&[TEXT, items(&PART, "parts")])),
        field("bias", Shape::ById(&Shape::Number(-100.0, 100.0))),
        field(
            "stop",
            Shape::OneOf(&[SAID, Shape::Items(&SAID, "texts", 0, 2)]),
        ),
    ]]);

    #[test]
    fn errors_name_the_place_and_what_was_found() {
        for (more, expected) in [
            (
                json!({"t": 2.5}),
                "t: expected a number from 0 to 2, found 2.5",
            ),
            (
                json!({"n": 0.0}),
                "n: expected a whole number of at least 1, found 0.0",
            ),
            (
                json!({"n": 1.5}),
                "n: expected a whole number of at least 1, found 1.5",
            ),
            (
                json!({"parts": 3}),
                "parts: expected text or an array of parts, found 3",
            ),
            (
                json!({"parts": [{"type": "text", "text": 4}]}),
                "parts[0].text: expected text, found 4",
            ),
            (
                json!({"parts": [3]}),
                "parts[0]: expected an object, found 3",
            ),
            (
                json!({"parts": [{}]}),
                "parts[0].type: expected text, found nothing",
            ),
            (
                json!({"bias": {"x": 1}}),
                "bias.x: expected the id of a token as its name",
            ),
            (
                json!({"bias": {"1": 101}}),
                "bias.1: expected a number from -100 to 100, found 101",
            ),
            (
                json!({"stop": ["a", "b", "c"]}),
                "stop: expected an array of texts, 0 to 2, found an array of 3",
            ),
            (
                json!({"stop": ""}),
                "stop: expected text that isn't empty, found \"\"",
            ),
            (
                json!({"model": null}),
                "model: expected text, found nothing",
            ),
        ] {
            let mut body = json!({"model": "m"});
            let members = body.as_object_mut().unwrap();
            members.extend(more.as_object().unwrap().clone());
            assert!(!BODY.fits(&body), "{body}");
            assert_eq!(BODY.error(&body, "").message(), expected);
        }
        let all = json!({
            "model": "m", "t": null, "n": 3.0, "parts": [{"type": "image"}, {"type": "text", "text": ""}],
            "stop": ["a"], "other": {},
        });
        assert!(BODY.fits(&all));
        assert!(!BODY.fits(&json!([])));
        assert_eq!(
            BODY.error(&json!([]), "").message(),
            "expected an object, found an array of 0"
        );
    }

    #[test]
    fn schemas_say_the_same() {
        let served = Served {
            models: vec!["m".to_owned()],
            n_vocab: 9,
        };
        let schema = BODY.schema(&served);
        let ids = items(&Shape::Id, "ids").schema(&served);
        assert_eq!(ids["items"]["maximum"], 8);
        assert_eq!(schema["required"], json!(["model"]));
        let of = |name: &str| schema["properties"][name].clone();
        assert_eq!(of("model"), json!({"type": "string", "enum": ["m"]}));
        assert_eq!(
            of("t"),
            json!({"type": ["number", "null"], "minimum": 0.0, "maximum": 2.0})
        );
        assert_eq!(of("n"), json!({"type": ["integer", "null"], "minimum": 1}));
        let parts = of("parts");
        assert_eq!(parts["anyOf"][2], json!({"type": "null"}));
        assert_eq!(
            parts["anyOf"][1]["items"]["anyOf"][0]["required"],
            json!(["type", "text"])
        );
    }

    #[test]
    fn whole_numbers_may_have_a_fraction_of_nothing() {
        assert_eq!(whole(&json!(3.0)), Some(3));
        assert_eq!(whole(&json!(-7)), Some(-7));
        assert_eq!(whole(&json!(u64::MAX)), Some(i128::from(u64::MAX)));
        assert_eq!(whole(&json!(1e300)), None);
        assert_eq!(whole(&json!("3")), None);
    }

    #[test]
    fn enums_without_values_are_found() {
        let nothing = json!({"enum": []});
        for (schema, found) in [
            (
                json!({"properties": {"a": {}, "b": nothing}}),
                Some("p.properties.b.enum"),
            ),
            (
                json!({"anyOf": [{"enum": [[]]}, {"items": nothing}]}),
                Some("p.anyOf[1].items.enum"),
            ),
            (
                json!({"$defs": {"enum": nothing}}),
                Some("p.$defs.enum.enum"),
            ),
            // A parameter of that name, and values that look like schemas.
            (json!({"properties": {"enum": []}}), None),
            (json!({"const": nothing, "default": nothing}), None),
            (json!({"enum": ["a"]}), None),
        ] {
            let path = empty_enum(&schema, "p");
            assert_eq!(path.as_deref(), found, "{schema}");
        }
    }
}
