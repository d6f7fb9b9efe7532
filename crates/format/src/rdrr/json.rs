//! JSON of strangers as a tree of bounded size, and typed access that notes everything wrong.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::problem::{Notes, quoted};
use crate::budget::Budget;

/// The largest file that is parsed: the tensor map of a model of 200,000 tensors has about 50 MB.
const MAX_BYTES: usize = 64 << 20;
/// What the tree may take: three million members of objects. A model of 100,000 tensors has a million.
const MAX_MEMORY: u64 = 256 << 20;
/// The most values that are kept though nothing here knows what they mean.
pub(super) const MAX_UNKNOWN: usize = 200_000;

/// A parsed value; strings without escapes stay where they are in the file.
#[derive(Debug)]
pub(super) enum Json<'a> {
    Null,
    Bool(bool),
    Unsigned(u64),
    /// Below zero.
    Signed(i64),
    Float(f64),
    String(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    Object(Vec<Member<'a>>),
}

/// A member of an object.
pub(super) type Member<'a> = (Cow<'a, str>, Json<'a>);

impl<'a> Json<'a> {
    /// Parses `bytes`; what is wrong with them goes to `notes`.
    pub(super) fn parse(bytes: &'a [u8], notes: &mut Notes) -> Option<Json<'a>> {
        if bytes.len() > MAX_BYTES {
            let expected = format_args!("at most {MAX_BYTES} bytes");
            notes.add(Path::Root, expected, bytes.len());
            return None;
        }
        let memory = RefCell::new(Budget::new(MAX_MEMORY));
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let json = Tree(&memory).deserialize(&mut deserializer);
        match json.and_then(|json| deserializer.end().map(|()| json)) {
            Ok(json) => Some(json),
            Err(error) => {
                notes.add(Path::Root, "JSON without duplicate keys", error);
                None
            }
        }
    }

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

    pub(super) fn f64(&self) -> Option<f64> {
        match *self {
            Json::Unsigned(n) => Some(n as f64),
            Json::Signed(n) => Some(n as f64),
            Json::Float(x) => Some(x),
            _ => None,
        }
    }

    /// The value in the form that is kept; `left` counts down how many more may be.
    fn to_value(&self, left: &mut usize) -> Option<Value> {
        *left = left.checked_sub(1)?;
        Some(match self {
            Json::Null => Value::Null,
            Json::Bool(b) => (*b).into(),
            Json::Unsigned(n) => (*n).into(),
            Json::Signed(n) => (*n).into(),
            Json::Float(x) => (*x).into(),
            Json::String(s) => s.as_ref().into(),
            Json::Array(items) => {
                let items: Option<_> = items.iter().map(|item| item.to_value(left)).collect();
                Value::Array(items?)
            }
            Json::Object(members) => {
                let member = |(key, json): &Member<'_>| {
                    Some((key.as_ref().to_owned(), json.to_value(left)?))
                };
                let members: Option<_> = members.iter().map(member).collect();
                Value::Object(members?)
            }
        })
    }
}

/// Builds a [`Json`], charging for what it takes.
#[derive(Clone, Copy)]
struct Tree<'m>(&'m RefCell<Budget>);

impl Tree<'_> {
    fn charge<E: serde::de::Error>(self, bytes: usize) -> Result<(), E> {
        let charged = self.0.borrow_mut().charge(bytes as u64);
        charged.map_err(|over| {
            E::custom(format_args!(
                "{} bytes of memory are needed, the limit is {}",
                over.need, over.limit
            ))
        })
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Json<'de>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Json<'de>, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Json<'de>, E> {
        Ok(Json::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Json<'de>, E> {
        Ok(Json::Unsigned(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Json<'de>, E> {
        Ok(u64::try_from(v).map_or(Json::Signed(v), Json::Unsigned))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Json<'de>, E> {
        Ok(Json::Float(v))
    }

    fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Json<'de>, E> {
        Ok(Json::String(Cow::Borrowed(v)))
    }

    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Json<'de>, E> {
        self.charge(v.len())?;
        Ok(Json::String(Cow::Owned(v.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json<'de>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            // A growing list has room for twice its items, and three times while it grows.
            self.charge(3 * size_of::<Json<'_>>() / 2)?;
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json<'de>, A::Error> {
        let mut members: Vec<Member<'de>> = Vec::new();
        while let Some(key) = map.next_key_seed(Key(self))? {
            self.charge(3 * size_of::<Member<'_>>() / 2)?;
            members.push((key, map.next_value_seed(self)?));
        }
        if let Some(twice) = repeated(&members) {
            let twice = quoted(twice);
            return Err(A::Error::custom(format_args!("{twice} stands twice")));
        }
        Ok(Json::Object(members))
    }
}

/// A name that stands twice.
fn repeated<'m>(members: &'m [Member<'_>]) -> Option<&'m str> {
    let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_ref()).collect();
    names.sort_unstable();
    let pair = names.windows(2).find(|pair| pair[0] == pair[1])?;
    Some(pair[0])
}

/// The name of a member.
#[derive(Clone, Copy)]
struct Key<'m>(Tree<'m>);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Cow<'de, str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Cow<'de, str>, D::Error> {
        d.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, v: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(v))
    }

    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Cow<'de, str>, E> {
        self.0.charge(v.len())?;
        Ok(Cow::Owned(v.to_owned()))
    }
}

/// The place of a value, written only when something is wrong there.
#[derive(Debug, Clone, Copy)]
pub(super) enum Path<'p> {
    Root,
    Key(&'p Path<'p>, &'p str),
    Index(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Index(parent, i) => write!(f, "{parent}[{i}]"),
            Path::Key(parent, key) => {
                // Names with dots of their own, such as those of tensors, stand in brackets.
                let is_plain =
                    !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                match (parent, is_plain) {
                    (Path::Root, true) => f.write_str(key),
                    (_, true) => write!(f, "{parent}.{key}"),
                    (_, false) => write!(f, "{parent}[{}]", quoted(key)),
                }
            }
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

    /// Members that nobody took, to be written again.
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

    fn keep(&mut self, key: &str, json: &Json<'_>) -> Option<Value> {
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

fn bool(json: &Json<'_>) -> Option<bool> {
    match json {
        Json::Bool(b) => Some(*b),
        _ => None,
    }
}
