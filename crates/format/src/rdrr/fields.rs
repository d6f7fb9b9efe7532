//! Typed access to what a package's JSON files say, noting everything that is wrong.

use std::fmt;

use serde_json::{Map, Value};

use super::problem::{MAX_UNKNOWN, Notes, Path};
use crate::json::{Duplicates, Json, JsonError, Member, Policy, quoted};

/// How manifests and tensor maps are read. The tensor map of a model of 200,000 tensors has about
/// 50 MB; a tree of so much memory has three million members of objects, where a model of 100,000
/// tensors has a million.
const POLICY: Policy = Policy {
    max_bytes: 64 << 20,
    max_values: usize::MAX,
    max_memory: 256 << 20,
    bare_floats: false,
    duplicates: Duplicates::Refused,
};

/// Parses `bytes`; what is wrong with them goes to `notes`.
pub(super) fn parse<'a>(bytes: &'a [u8], notes: &mut Notes) -> Option<Json<'a>> {
    match Json::parse(bytes, &POLICY) {
        Ok(json) => return Some(json),
        Err(JsonError::TooLarge { found, limit }) => {
            notes.add(Path::Root, format_args!("at most {limit} bytes"), found);
        }
        Err(JsonError::Syntax(error)) => {
            notes.add(Path::Root, "JSON without duplicate keys", error);
        }
    }
    None
}

impl Json<'_> {
    /// What a message calls the value.
    pub(super) fn shown(&self) -> String {
        match self {
            Json::Null => "null".into(),
            Json::Bool(b) => b.to_string(),
            Json::Unsigned(n) => n.to_string(),
            Json::Signed(n) => n.to_string(),
            Json::Float(x) => x.to_string(),
            Json::String(s) => quoted(s),
            Json::Array(_) => "a list".into(),
            Json::Object(_) => "an object".into(),
        }
    }

    /// The whole number from 0 on that this is. JavaScript doesn't tell 1.0 from 1.
    pub(super) fn u64(&self) -> Option<u64> {
        const EXACT: f64 = 9_007_199_254_740_992.0;
        match *self {
            Json::Unsigned(n) => Some(n),
            Json::Float(x) if x.fract() == 0.0 && (0.0..=EXACT).contains(&x) => Some(x as u64),
            _ => None,
        }
    }

    /// The number that this is.
    pub(super) fn f64(&self) -> Option<f64> {
        match *self {
            Json::Unsigned(n) => Some(n as f64),
            Json::Signed(n) => Some(n as f64),
            Json::Float(x) => Some(x),
            _ => None,
        }
    }
}

/// Reads the members of an object, each once; what is left over is unknown.
pub(super) struct Fields<'r> {
    members: &'r [Member<'r>],
    taken: Vec<bool>,
    pub(super) path: Path<'r>,
    pub(super) notes: &'r mut Notes,
}

impl<'r> Fields<'r> {
    /// The members of `json`; notes a problem if it isn't an object.
    pub(super) fn of(
        json: &'r Json<'r>,
        path: Path<'r>,
        notes: &'r mut Notes,
    ) -> Option<Fields<'r>> {
        let Json::Object(members) = json else {
            notes.add(path, "an object", json.shown());
            return None;
        };
        Some(Fields {
            taken: vec![false; members.len()],
            members,
            path,
            notes,
        })
    }

    /// The member called `key`; absent and null are the same.
    pub(super) fn take(&mut self, key: &str) -> Option<&'r Json<'r>> {
        let i = self.members.iter().position(|(name, _)| name == key)?;
        self.taken[i] = true;
        match &self.members[i].1 {
            Json::Null => None,
            json => Some(json),
        }
    }

    /// The first of `keys` that is there; all of them count as read.
    pub(super) fn take_any(
        &mut self,
        keys: &[&'static str],
    ) -> Option<(&'static str, &'r Json<'r>)> {
        let mut first = None;
        for key in keys {
            if let Some(json) = self.take(key) {
                first = first.or(Some((*key, json)));
            }
        }
        first
    }

    /// Notes that the member called `key` isn't as it should be.
    pub(super) fn wrong(
        &mut self,
        key: &str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) {
        self.notes.add(Path::Key(&self.path, key), expected, found);
    }

    /// Notes that a member isn't there.
    pub(super) fn missing(&mut self, key: &str, expected: impl fmt::Display) {
        self.wrong(key, expected, "nothing");
    }

    /// A member that `read` understands, if it is there.
    pub(super) fn optional<T>(
        &mut self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'r Json<'r>) -> Option<T>,
    ) -> Option<T> {
        let json = self.take(key)?;
        let value = read(json);
        if value.is_none() {
            self.wrong(key, expected, json.shown());
        }
        value
    }

    /// A member that `read` understands; notes a problem if it isn't there.
    pub(super) fn required<T>(
        &mut self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'r Json<'r>) -> Option<T>,
    ) -> Option<T> {
        match self.take(key) {
            None => {
                self.missing(key, expected);
                None
            }
            Some(_) => self.optional(key, expected, read),
        }
    }

    pub(super) fn string(&mut self, key: &str) -> Option<String> {
        self.optional(key, "a string", string)
    }

    pub(super) fn required_string(&mut self, key: &str) -> Option<String> {
        self.required(key, "a string that isn't empty", |json| {
            string(json).filter(|s| !s.is_empty())
        })
    }

    pub(super) fn count(&mut self, key: &str) -> Option<u64> {
        self.optional(key, COUNT, Json::u64)
    }

    pub(super) fn required_count(&mut self, key: &str) -> Option<u64> {
        self.required(key, COUNT, Json::u64)
    }

    pub(super) fn bool(&mut self, key: &str) -> Option<bool> {
        self.optional(key, "true or false", bool)
    }

    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        self.optional(key, "a number", Json::f64)
    }

    /// An object of any content.
    pub(super) fn map(&mut self, key: &str) -> Option<Map<String, Value>> {
        let json = self.take(key)?;
        match self.keep(key, json)? {
            Value::Object(map) => Some(map),
            _ => {
                self.wrong(key, "an object", json.shown());
                None
            }
        }
    }

    /// An object that `read` reads. What it doesn't take is lost unless it asks for the rest.
    pub(super) fn object<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&mut Fields<'_>) -> T,
    ) -> Option<T> {
        let json = self.take(key)?;
        let mut fields = Fields::of(json, Path::Key(&self.path, key), self.notes)?;
        Some(read(&mut fields))
    }

    /// A list whose items `read` reads; notes a problem if it is none or has more than `max` items.
    pub(super) fn list<T>(
        &mut self,
        key: &str,
        max: usize,
        mut read: impl FnMut(&Json<'_>, Path<'_>, &mut Notes) -> Option<T>,
    ) -> Option<Vec<T>> {
        let json = self.take(key)?;
        let path = Path::Key(&self.path, key);
        let Json::Array(items) = json else {
            self.notes.add(path, "a list", json.shown());
            return None;
        };
        if items.len() > max {
            let expected = format_args!("at most {max} items");
            self.notes.add(path, expected, items.len());
            return None;
        }
        let mut read = |(i, item)| read(item, Path::Index(&path, i), self.notes);
        Some(items.iter().enumerate().filter_map(&mut read).collect())
    }

    /// The members of an object in their order, read by `read`.
    pub(super) fn members<T>(
        &mut self,
        key: &str,
        max: usize,
        mut read: impl FnMut(&str, &Json<'_>, Path<'_>, &mut Notes) -> Option<T>,
    ) -> Option<Vec<T>> {
        let json = self.take(key)?;
        let path = Path::Key(&self.path, key);
        members(json, path, max, self.notes, &mut read)
    }

    /// A list of strings.
    pub(super) fn strings(&mut self, key: &str, max: usize) -> Option<Vec<String>> {
        self.list(key, max, |json, path, notes| {
            let text = string(json);
            if text.is_none() {
                notes.add(path, "a string", json.shown());
            }
            text
        })
    }

    /// Members that weren't taken, to be written again.
    pub(super) fn rest(&mut self) -> Map<String, Value> {
        let mut rest = Map::new();
        for (i, (key, json)) in self.members.iter().enumerate() {
            if !self.taken[i]
                && let Some(value) = self.keep(key, json)
            {
                rest.insert(key.as_ref().to_owned(), value);
            }
        }
        rest
    }

    /// A value of any content; notes a problem if there are too many of unknown meaning.
    pub(super) fn keep(&mut self, key: &str, json: &Json<'_>) -> Option<Value> {
        let kept = json.to_value(&mut self.notes.unknown_left);
        if kept.is_none() {
            let expected =
                format_args!("at most {MAX_UNKNOWN} values of unknown meaning in a file");
            self.wrong(key, expected, "more");
        }
        kept
    }
}

/// Reads the members of `json` in their order.
pub(super) fn members<T>(
    json: &Json<'_>,
    path: Path<'_>,
    max: usize,
    notes: &mut Notes,
    read: &mut impl FnMut(&str, &Json<'_>, Path<'_>, &mut Notes) -> Option<T>,
) -> Option<Vec<T>> {
    let Json::Object(members) = json else {
        notes.add(path, "an object", json.shown());
        return None;
    };
    if members.len() > max {
        let expected = format_args!("at most {max} members");
        notes.add(path, expected, members.len());
        return None;
    }
    let read = |(key, json): &Member<'_>| read(key, json, Path::Key(&path, key), notes);
    Some(members.iter().filter_map(read).collect())
}

const COUNT: &str = "a whole number from 0 on";

pub(super) fn string(json: &Json<'_>) -> Option<String> {
    match json {
        Json::String(s) => Some(s.as_ref().to_owned()),
        _ => None,
    }
}

pub(super) fn bool(json: &Json<'_>) -> Option<bool> {
    match json {
        Json::Bool(b) => Some(*b),
        _ => None,
    }
}
