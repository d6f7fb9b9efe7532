//! JSON as Python writes it, read into a tree of bounded size, and typed access by path.
//!
//! Python's `json` writes `NaN`, `Infinity` and `-Infinity`, which JSON doesn't have. They are
//! replaced by the form that newer Transformers write, `{"__float__": "Infinity"}`.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};

use super::ConfigError;

/// The largest file that is parsed. `tokenizer_config.json` with thousands of added tokens has 1 MB.
const MAX_BYTES: usize = 8 << 20;
/// The most values in one file; a tree of so many stays below 40 MiB.
const MAX_NODES: usize = 250_000;
/// The most values that [`parse_json`] takes: its trees are larger, up to 20 MiB for so many.
const MAX_SHOWN_NODES: usize = 50_000;

/// The most numbers that JSON doesn't have: replacing them makes the text longer. What is left
/// behind the last one is refused as bad JSON.
const MAX_BARE_FLOATS: usize = 4096;

/// A parsed value. Objects keep their order; of two equal keys the last counts, as in Python.
#[derive(Debug)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Int(i64),
    /// Any other number, integers beyond i64 included.
    Float(f64),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(super) fn parse(bytes: &[u8]) -> Result<Json, ConfigError> {
        Json::parse_nodes(bytes, MAX_NODES)
    }

    fn parse_nodes(bytes: &[u8], max_nodes: usize) -> Result<Json, ConfigError> {
        if bytes.len() > MAX_BYTES {
            return Err(ConfigError::TooLarge {
                found: bytes.len(),
                limit: MAX_BYTES,
            });
        }
        let bytes = without_bare_floats(bytes);
        let mut deserializer = serde_json::Deserializer::from_slice(&bytes);
        let left = Cell::new(max_nodes);
        let tree = Tree {
            left: &left,
            max_nodes,
        };
        let json = tree.deserialize(&mut deserializer);
        json.and_then(|json| deserializer.end().map(|()| json))
            .map_err(ConfigError::Json)
    }

    fn into_value(self) -> serde_json::Value {
        match self {
            Json::Null => serde_json::Value::Null,
            Json::Bool(b) => b.into(),
            Json::Int(n) => n.into(),
            Json::Float(x) => x.into(),
            Json::String(s) => s.into(),
            Json::Array(items) => items.into_iter().map(Json::into_value).collect(),
            Json::Object(members) => {
                let members = members.into_iter().map(|(k, v)| (k, v.into_value()));
                serde_json::Value::Object(members.collect())
            }
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Int(_) | Json::Float(_) => "a number",
            Json::String(_) => "a string",
            Json::Array(_) => "a list",
            Json::Object(_) => "an object",
        }
    }

    fn member(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(members) => members.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }
}

/// Parses a configuration file whole, to show it; [`super::Config`] and its like are for using it.
///
/// `NaN` and infinities, which Python writes, become `{"__float__": "NaN"}` and so on. Of two equal
/// keys the last counts.
///
/// # Errors
///
/// [`ConfigError`] if it isn't JSON, nests deeper than 128, or has more than 8 MiB or 50,000 values.
pub fn parse_json(bytes: &[u8]) -> Result<serde_json::Value, ConfigError> {
    Json::parse_nodes(bytes, MAX_SHOWN_NODES).map(Json::into_value)
}

/// Replaces `NaN`, `Infinity` and `-Infinity` outside of strings, up to [`MAX_BARE_FLOATS`] times.
fn without_bare_floats(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    let mut left = MAX_BARE_FLOATS;
    let mut in_string = false;
    while let [first, tail @ ..] = rest {
        let bare = ["NaN", "Infinity", "-Infinity"]
            .into_iter()
            .find(|name| !in_string && left > 0 && rest.starts_with(name.as_bytes()));
        if let Some(name) = bare {
            left -= 1;
            out.extend(br#"{"__float__":""#);
            out.extend(name.as_bytes());
            out.extend(br#""}"#);
            rest = &rest[name.len()..];
            continue;
        }
        let taken = match first {
            b'"' => {
                in_string = !in_string;
                1
            }
            b'\\' if in_string => 1 + tail.len().min(1),
            _ => 1,
        };
        out.extend(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// Builds a [`Json`] while counting its values down to zero.
#[derive(Clone, Copy)]
struct Tree<'a> {
    left: &'a Cell<usize>,
    max_nodes: usize,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Json;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Json, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => {
                return Err(D::Error::custom(format_args!(
                    "more than {} values",
                    self.max_nodes
                )));
            }
        }
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Json, E> {
        Ok(Json::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Json, E> {
        Ok(Json::Int(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Json, E> {
        Ok(i64::try_from(v).map_or(Json::Float(v as f64), Json::Int))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Json, E> {
        Ok(Json::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Json, E> {
        Ok(Json::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Json, E> {
        Ok(Json::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(key) = map.next_key()? {
            members.push((key, map.next_value_seed(self)?));
        }
        Ok(Json::Object(members))
    }
}

/// A value and the path to it, for messages.
#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    json: &'a Json,
    path: String,
}

impl<'a> Node<'a> {
    pub(super) fn root(json: &'a Json) -> Node<'a> {
        Node {
            json,
            path: String::new(),
        }
    }

    fn wrong<T>(&self, expected: &'static str) -> Result<T, ConfigError> {
        self.refuse(expected, self.json.kind().to_owned())
    }

    /// The error that a member isn't there.
    pub(super) fn missing<T>(&self, key: &'static str) -> Result<T, ConfigError> {
        match self.json {
            Json::Object(_) => self.refuse("an object", format!("one without `{key}`")),
            _ => self.wrong("an object"),
        }
    }

    pub(super) fn refuse<T>(
        &self,
        expected: &'static str,
        found: String,
    ) -> Result<T, ConfigError> {
        let path = match self.path.as_str() {
            "" => "the file".to_owned(),
            path => format!("`{path}`"),
        };
        Err(ConfigError::Value {
            path,
            expected,
            found,
        })
    }

    fn child(&self, key: &str, json: &'a Json) -> Node<'a> {
        let path = match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        Node { json, path }
    }

    pub(super) fn is_string(&self) -> bool {
        matches!(self.json, Json::String(_))
    }

    pub(super) fn is_list(&self) -> bool {
        matches!(self.json, Json::Array(_))
    }

    pub(super) fn is_object(&self) -> bool {
        matches!(self.json, Json::Object(_))
    }

    pub(super) fn is_bool(&self) -> bool {
        matches!(self.json, Json::Bool(_))
    }

    /// Whether it is what leaves a feature unused: false, an empty list, object or string.
    pub(super) fn is_off(&self) -> bool {
        match self.json {
            Json::Null | Json::Bool(false) => true,
            Json::String(s) => s.is_empty(),
            Json::Array(items) => items.is_empty(),
            Json::Object(members) => members.is_empty(),
            Json::Bool(true) | Json::Int(_) | Json::Float(_) => false,
        }
    }

    /// The value in a few words, for messages.
    pub(super) fn summary(&self) -> String {
        match self.json {
            Json::Bool(b) => b.to_string(),
            Json::Int(n) => n.to_string(),
            Json::String(s) => format!("`{s}`"),
            Json::Array(items) => match &items[..] {
                [Json::String(only)] => format!("[`{only}`]"),
                [Json::String(first), ..] => format!("[`{first}`, ...]"),
                _ => self.json.kind().to_owned(),
            },
            _ => self.json.kind().to_owned(),
        }
    }

    /// The member called `key`; absent and null are the same.
    pub(super) fn get(&self, key: &str) -> Option<Node<'a>> {
        match self.json.member(key)? {
            Json::Null => None,
            json => Some(self.child(key, json)),
        }
    }

    /// Every member that isn't null.
    pub(super) fn members(&self) -> Result<impl Iterator<Item = (&'a str, Node<'a>)>, ConfigError> {
        match self.json {
            Json::Object(members) => Ok(members
                .iter()
                .filter(|(_, json)| !matches!(json, Json::Null))
                .map(|(key, json)| (key.as_str(), self.child(key, json)))),
            _ => self.wrong("an object"),
        }
    }

    /// The error that this isn't an object, if so.
    pub(super) fn expect_object(&self) -> Result<(), ConfigError> {
        self.members().map(drop)
    }

    /// Reads every item of a list.
    pub(super) fn list<T>(
        &self,
        item: impl Fn(&Node<'a>) -> Result<T, ConfigError>,
    ) -> Result<Vec<T>, ConfigError> {
        let Json::Array(items) = self.json else {
            return self.wrong("a list");
        };
        let node = |(i, json)| Node {
            json,
            path: format!("{}[{i}]", self.path),
        };
        items.iter().enumerate().map(|x| item(&node(x))).collect()
    }

    pub(super) fn str(&self) -> Result<String, ConfigError> {
        match self.json {
            Json::String(s) => Ok(s.clone()),
            _ => self.wrong("a string"),
        }
    }

    pub(super) fn bool(&self) -> Result<bool, ConfigError> {
        match self.json {
            Json::Bool(b) => Ok(*b),
            _ => self.wrong("a boolean"),
        }
    }

    /// A whole number from 0 to 2^31 - 1: no width or length of a model is larger.
    pub(super) fn count(&self) -> Result<usize, ConfigError> {
        const EXPECTED: &str = "a whole number from 0 to 2147483647";
        let n = match *self.json {
            Json::Int(n) => n,
            Json::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => x as i64,
            Json::Float(x) => return self.refuse(EXPECTED, x.to_string()),
            _ => return self.wrong(EXPECTED),
        };
        match i32::try_from(n).ok().and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(n),
            None => self.refuse(EXPECTED, n.to_string()),
        }
    }

    /// A token id. Transformers writes -1 for a token that doesn't exist.
    pub(super) fn token_id(&self) -> Result<Option<u32>, ConfigError> {
        match *self.json {
            Json::Int(-1) => Ok(None),
            _ => self.count().map(|n| u32::try_from(n).ok()),
        }
    }

    /// A finite number.
    pub(super) fn f64(&self) -> Result<f64, ConfigError> {
        let x = self.any_f64()?;
        match x.is_finite() {
            true => Ok(x),
            false => self.refuse("a finite number", x.to_string()),
        }
    }

    /// A number, infinite ones included.
    pub(super) fn any_f64(&self) -> Result<f64, ConfigError> {
        match *self.json {
            Json::Int(n) => Ok(n as f64),
            Json::Float(x) => Ok(x),
            _ => match self.json.member("__float__") {
                Some(Json::String(s)) if s == "Infinity" => Ok(f64::INFINITY),
                Some(Json::String(s)) if s == "-Infinity" => Ok(f64::NEG_INFINITY),
                Some(Json::String(s)) if s == "NaN" => Ok(f64::NAN),
                _ => self.wrong("a number"),
            },
        }
    }
}
