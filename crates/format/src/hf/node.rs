//! Typed access to the values of a configuration file, by path; the first that is wrong is an error.

use super::ConfigError;
use crate::json::{Duplicates, Json, JsonError, Policy};

/// How configuration files are read. `tokenizer_config.json` with thousands of added tokens has 1 MB;
/// a tree of so many values stays below 40 MiB.
const POLICY: Policy = Policy {
    max_bytes: 8 << 20,
    max_values: 250_000,
    max_memory: u64::MAX,
    bare_floats: true,
    duplicates: Duplicates::LastCounts,
};

/// The most values that [`parse_json`] takes: its trees are larger, up to 20 MiB for so many.
const MAX_SHOWN_VALUES: usize = 50_000;

/// Parses a configuration file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Json<'_>, ConfigError> {
    Ok(Json::parse(bytes, &POLICY)?)
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
    let policy = Policy {
        max_values: MAX_SHOWN_VALUES,
        ..POLICY
    };
    let mut left = MAX_SHOWN_VALUES;
    let value = Json::parse(bytes, &policy)?.to_value(&mut left);
    Ok(value.expect("a tree has no more values than its policy takes"))
}

impl From<JsonError> for ConfigError {
    fn from(error: JsonError) -> ConfigError {
        match error {
            JsonError::TooLarge { found, limit } => ConfigError::TooLarge { found, limit },
            JsonError::Syntax(error) => ConfigError::Json(error),
        }
    }
}

fn kind(json: &Json<'_>) -> &'static str {
    match json {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Unsigned(_) | Json::Signed(_) | Json::Float(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// A value and the path to it, for messages.
#[derive(Debug, Clone)]
pub(crate) struct Node<'a> {
    json: &'a Json<'a>,
    path: String,
}

impl<'a> Node<'a> {
    pub(crate) fn root(json: &'a Json<'a>) -> Node<'a> {
        Node {
            json,
            path: String::new(),
        }
    }

    fn wrong<T>(&self, expected: &'static str) -> Result<T, ConfigError> {
        self.refuse(expected, kind(self.json).to_owned())
    }

    /// The error that a member isn't there.
    pub(crate) fn missing<T>(&self, key: &'static str) -> Result<T, ConfigError> {
        match self.json {
            Json::Object(_) => self.refuse("an object", format!("one without `{key}`")),
            _ => self.wrong("an object"),
        }
    }

    pub(crate) fn refuse<T>(
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

    fn child(&self, key: &str, json: &'a Json<'a>) -> Node<'a> {
        let path = match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        Node { json, path }
    }

    pub(crate) fn is_string(&self) -> bool {
        matches!(self.json, Json::String(_))
    }

    pub(crate) fn is_list(&self) -> bool {
        matches!(self.json, Json::Array(_))
    }

    pub(crate) fn is_object(&self) -> bool {
        matches!(self.json, Json::Object(_))
    }

    pub(crate) fn is_bool(&self) -> bool {
        matches!(self.json, Json::Bool(_))
    }

    /// Whether it is what leaves a feature unused: false, an empty list, object or string.
    pub(crate) fn is_off(&self) -> bool {
        match self.json {
            Json::Null | Json::Bool(false) => true,
            Json::String(s) => s.is_empty(),
            Json::Array(items) => items.is_empty(),
            Json::Object(members) => members.is_empty(),
            Json::Bool(true) | Json::Unsigned(_) | Json::Signed(_) | Json::Float(_) => false,
        }
    }

    /// The value in a few words, for messages.
    pub(crate) fn summary(&self) -> String {
        match self.json {
            Json::Bool(b) => b.to_string(),
            Json::Unsigned(n) => n.to_string(),
            Json::Signed(n) => n.to_string(),
            Json::String(s) => format!("`{s}`"),
            Json::Array(items) => match &items[..] {
                [Json::String(only)] => format!("[`{only}`]"),
                [Json::String(first), ..] => format!("[`{first}`, ...]"),
                _ => kind(self.json).to_owned(),
            },
            _ => kind(self.json).to_owned(),
        }
    }

    /// The member called `key`; absent and null are the same.
    pub(crate) fn get(&self, key: &str) -> Option<Node<'a>> {
        match self.json.member(key)? {
            Json::Null => None,
            json => Some(self.child(key, json)),
        }
    }

    /// Every member that isn't null.
    pub(crate) fn members(&self) -> Result<impl Iterator<Item = (&'a str, Node<'a>)>, ConfigError> {
        match self.json {
            Json::Object(members) => Ok(members
                .iter()
                .filter(|(_, json)| !matches!(json, Json::Null))
                .map(|(key, json)| (key.as_ref(), self.child(key, json)))),
            _ => self.wrong("an object"),
        }
    }

    /// The error that this isn't an object, if so.
    pub(crate) fn expect_object(&self) -> Result<(), ConfigError> {
        self.members().map(drop)
    }

    /// Reads every item of a list.
    pub(crate) fn list<T>(
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

    pub(crate) fn str(&self) -> Result<String, ConfigError> {
        match self.json {
            Json::String(s) => Ok(s.as_ref().to_owned()),
            _ => self.wrong("a string"),
        }
    }

    pub(crate) fn bool(&self) -> Result<bool, ConfigError> {
        match self.json {
            Json::Bool(b) => Ok(*b),
            _ => self.wrong("a boolean"),
        }
    }

    /// A whole number from 0 to 2^31 - 1: no width or length of a model is larger.
    pub(crate) fn count(&self) -> Result<usize, ConfigError> {
        const EXPECTED: &str = "a whole number from 0 to 2147483647";
        let n = match *self.json {
            Json::Unsigned(n) => i128::from(n),
            Json::Signed(n) => i128::from(n),
            Json::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => x as i128,
            Json::Float(x) => return self.refuse(EXPECTED, x.to_string()),
            _ => return self.wrong(EXPECTED),
        };
        match i32::try_from(n).ok().and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(n),
            None => self.refuse(EXPECTED, n.to_string()),
        }
    }

    /// A token id. Transformers writes -1 for a token that doesn't exist.
    pub(crate) fn token_id(&self) -> Result<Option<u32>, ConfigError> {
        match *self.json {
            Json::Signed(-1) => Ok(None),
            _ => self.count().map(|n| u32::try_from(n).ok()),
        }
    }

    /// A finite number.
    pub(crate) fn f64(&self) -> Result<f64, ConfigError> {
        let x = self.any_f64()?;
        match x.is_finite() {
            true => Ok(x),
            false => self.refuse("a finite number", x.to_string()),
        }
    }

    /// A number, infinite ones included.
    pub(crate) fn any_f64(&self) -> Result<f64, ConfigError> {
        match *self.json {
            Json::Unsigned(n) => Ok(n as f64),
            Json::Signed(n) => Ok(n as f64),
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
