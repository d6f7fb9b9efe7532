//! JSON of strangers as a tree of bounded size.
//!
//! What a reader takes is a [`Policy`]. The tree is read by `hf::node`, which stops at the first thing
//! wrong, and by `rdrr::fields`, which notes all of them.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::budget::Budget;

/// What a reader of JSON takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// The largest text, in bytes.
    pub(crate) max_bytes: usize,
    /// The most values.
    pub(crate) max_values: usize,
    /// The most memory that the tree may take, in bytes.
    pub(crate) max_memory: u64,
    /// Whether `NaN`, `Infinity` and `-Infinity` may occur as values, as Python writes
    /// them. They become the object that newer Transformers write, `{"__float__": "Infinity"}`.
    pub(crate) bare_floats: bool,
    /// What two members of one name in an object are.
    pub(crate) duplicates: Duplicates,
}

/// What two members of one name in an object are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Duplicates {
    /// Kept; [`Json::member`] gives the last, as Python does.
    LastCounts,
    /// An error.
    Refused,
}

/// Why a text wasn't read.
#[derive(Debug)]
pub(crate) enum JsonError {
    /// It is larger than the policy takes.
    TooLarge {
        /// Its bytes.
        found: usize,
        /// The most that are taken.
        limit: usize,
    },
    /// It isn't JSON as the policy takes it.
    Syntax(serde_json::Error),
}

/// A parsed value. Objects keep their order; strings without escapes stay where they are in the text.
#[derive(Debug)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    Unsigned(u64),
    /// Below zero.
    Signed(i64),
    /// Any other number, integers beyond 64 bits included.
    Float(f64),
    String(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    Object(Vec<Member<'a>>),
}

/// A member of an object.
pub(crate) type Member<'a> = (Cow<'a, str>, Json<'a>);

impl<'a> Json<'a> {
    /// Parses `bytes` as far as `policy` takes them.
    pub(crate) fn parse(bytes: &'a [u8], policy: &Policy) -> Result<Json<'a>, JsonError> {
        if bytes.len() > policy.max_bytes {
            return Err(JsonError::TooLarge {
                found: bytes.len(),
                limit: policy.max_bytes,
            });
        }
        match policy.bare_floats.then(|| without_bare_floats(bytes)) {
            Some(Some(text)) => Json::read(&text, policy).map(Json::into_owned),
            _ => Json::read(bytes, policy),
        }
        .map_err(JsonError::Syntax)
    }

    fn read(bytes: &'a [u8], policy: &Policy) -> Result<Json<'a>, serde_json::Error> {
        let used = Used {
            policy,
            values: Cell::new(0),
            memory: RefCell::new(Budget::new(policy.max_memory)),
        };
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let json = Tree(&used).deserialize(&mut deserializer)?;
        deserializer.end().map(|()| json)
    }

    fn into_owned(self) -> Json<'static> {
        let owned = |s: Cow<'a, str>| Cow::Owned(s.into_owned());
        match self {
            Json::Null => Json::Null,
            Json::Bool(b) => Json::Bool(b),
            Json::Unsigned(n) => Json::Unsigned(n),
            Json::Signed(n) => Json::Signed(n),
            Json::Float(x) => Json::Float(x),
            Json::String(s) => Json::String(owned(s)),
            Json::Array(items) => Json::Array(items.into_iter().map(Json::into_owned).collect()),
            Json::Object(members) => {
                let members = members.into_iter().map(|(k, v)| (owned(k), v.into_owned()));
                Json::Object(members.collect())
            }
        }
    }

    /// The value in the form that `serde_json` has for it; of two equal names the last counts.
    ///
    /// `left` counts down how many values may still be made; `None` if there are more.
    pub(crate) fn to_value(&self, left: &mut usize) -> Option<Value> {
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

    /// The last member called `name`.
    pub(crate) fn member(&self, name: &str) -> Option<&Json<'a>> {
        match self {
            Json::Object(members) => {
                let mut found = members.iter().rev().filter(|(key, _)| key == name);
                found.next().map(|(_, json)| json)
            }
            _ => None,
        }
    }
}

impl<'a> From<&'a Value> for Json<'a> {
    fn from(value: &'a Value) -> Json<'a> {
        match value {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Number(n) => match (n.as_u64(), n.as_i64()) {
                (Some(n), _) => Json::Unsigned(n),
                (None, Some(n)) => Json::Signed(n),
                (None, None) => Json::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(s) => Json::String(s.into()),
            Value::Array(items) => Json::Array(items.iter().map(Json::from).collect()),
            Value::Object(members) => members.into(),
        }
    }
}

impl<'a> From<&'a Map<String, Value>> for Json<'a> {
    fn from(members: &'a Map<String, Value>) -> Json<'a> {
        let members = members.iter().map(|(k, v)| (k.into(), v.into()));
        Json::Object(members.collect())
    }
}

/// The most numbers that JSON doesn't have: replacing them makes the text longer. What is left
/// after the last one is refused as bad JSON.
const MAX_BARE_FLOATS: usize = 4096;

/// `bytes` with `NaN`, `Infinity` and `-Infinity` outside of strings replaced, up to
/// [`MAX_BARE_FLOATS`] times; `None` if there are none.
fn without_bare_floats(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let (mut at, mut copied, mut n_replaced) = (0, 0, 0);
    let mut in_string = false;
    while let Some(first) = bytes.get(at) {
        let bare = ["NaN", "Infinity", "-Infinity"]
            .into_iter()
            .find(|name| bytes[at..].starts_with(name.as_bytes()))
            .filter(|_| !in_string && n_replaced < MAX_BARE_FLOATS);
        if let Some(name) = bare {
            n_replaced += 1;
            out.extend(&bytes[copied..at]);
            out.extend(br#"{"__float__":""#);
            out.extend(name.as_bytes());
            out.extend(br#""}"#);
            at += name.len();
            copied = at;
            continue;
        }
        match first {
            b'"' => in_string = !in_string,
            b'\\' if in_string => at += 1,
            _ => {}
        }
        at += 1;
    }
    out.extend(&bytes[copied..]);
    (n_replaced > 0).then_some(out)
}

/// What a tree has taken so far of what its policy gives.
struct Used<'p> {
    policy: &'p Policy,
    values: Cell<usize>,
    memory: RefCell<Budget>,
}

impl Used<'_> {
    fn value<E: serde::de::Error>(&self) -> Result<(), E> {
        let max = self.policy.max_values;
        if self.values.get() == max {
            return Err(E::custom(format_args!("more than {max} values")));
        }
        self.values.set(self.values.get() + 1);
        Ok(())
    }

    fn memory<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        let charged = self.memory.borrow_mut().charge(bytes as u64);
        charged.map_err(|over| {
            E::custom(format_args!(
                "{} bytes of memory are needed, the limit is {}",
                over.need, over.limit
            ))
        })
    }
}

/// Builds a [`Json`], charging for what it takes.
#[derive(Clone, Copy)]
struct Tree<'u>(&'u Used<'u>);

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Json<'de>;

    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Json<'de>, D::Error> {
        self.0.value()?;
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
        self.0.memory(v.len())?;
        Ok(Json::String(Cow::Owned(v.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json<'de>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            // A growing list has room for twice its items, and three times while it grows.
            self.0.memory(3 * size_of::<Json<'_>>() / 2)?;
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json<'de>, A::Error> {
        let mut members: Vec<Member<'de>> = Vec::new();
        while let Some(key) = map.next_key_seed(Key(self))? {
            self.0.memory(3 * size_of::<Member<'_>>() / 2)?;
            members.push((key, map.next_value_seed(self)?));
        }
        if self.0.policy.duplicates == Duplicates::Refused
            && let Some(twice) = repeated(&members)
        {
            let twice = quoted(twice);
            return Err(A::Error::custom(format_args!("{twice} occurs twice")));
        }
        Ok(Json::Object(members))
    }
}

/// A name that occurs twice.
fn repeated<'m>(members: &'m [Member<'_>]) -> Option<&'m str> {
    let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_ref()).collect();
    names.sort_unstable();
    let pair = names.windows(2).find(|pair| pair[0] == pair[1])?;
    Some(pair[0])
}

/// The name of a member.
#[derive(Clone, Copy)]
struct Key<'u>(Tree<'u>);

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
        self.0.0.memory(v.len())?;
        Ok(Cow::Owned(v.to_owned()))
    }
}

/// The longest value that a message repeats, in characters.
const MAX_SHOWN: usize = 80;

/// `text` in backquotes as a message shows it: escaped, and cut short if it is long.
pub(crate) fn quoted(text: &str) -> String {
    let mut shown: String = text.chars().take(MAX_SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    format!("`{}`", shown.escape_debug())
}

/// The text of `value`, indented by two spaces, with a line feed at the end.
pub(crate) fn pretty(value: &Value) -> Vec<u8> {
    let mut text =
        serde_json::to_vec_pretty(value).expect("names are strings, and memory can be written to");
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRICT: Policy = Policy {
        max_bytes: 100,
        max_values: 5,
        max_memory: 1 << 10,
        bare_floats: false,
        duplicates: Duplicates::Refused,
    };
    const PYTHON: Policy = Policy {
        bare_floats: true,
        duplicates: Duplicates::LastCounts,
        ..STRICT
    };

    fn shown(json: &str, policy: &Policy) -> String {
        match Json::parse(json.as_bytes(), policy) {
            Ok(json) => json.to_value(&mut 100).unwrap().to_string(),
            Err(JsonError::TooLarge { found, limit }) => format!("{found} > {limit}"),
            Err(JsonError::Syntax(error)) => error.to_string(),
        }
    }

    #[test]
    fn what_a_policy_takes() {
        let long = format!("[{}]", " ".repeat(99));
        for (json, strict, python) in [
            (
                r#"[1,-2,0.5,"\u00e9"]"#,
                r#"[1,-2,0.5,"é"]"#,
                r#"[1,-2,0.5,"é"]"#,
            ),
            (
                r#"[18446744073709551615,null]"#,
                "[18446744073709551615,null]",
                "[18446744073709551615,null]",
            ),
            (
                r#"{"a":1,"a":2}"#,
                "`a` occurs twice at line 1 column 13",
                r#"{"a":2}"#,
            ),
            (
                r#"[-Infinity,"NaN \" Infinity"]"#,
                "invalid number at line 1 column 3",
                r#"[{"__float__":"-Infinity"},"NaN \" Infinity"]"#,
            ),
            (
                "[0,0,0,0,0]",
                "more than 5 values at line 1 column 9",
                "more than 5 values at line 1 column 9",
            ),
            (&long, "101 > 100", "101 > 100"),
        ] {
            assert_eq!(shown(json, &STRICT), strict, "{json}");
            assert_eq!(shown(json, &PYTHON), python, "{json}");
        }
        let small = Policy {
            max_memory: 10,
            ..STRICT
        };
        let message = shown("[0]", &small);
        assert!(
            message.contains("memory are needed, the limit is 10"),
            "{message}"
        );
    }

    #[test]
    fn values_are_read_as_their_text_is() {
        let text = r#"{"a":[1,-1,0.5,18446744073709551615,null,true,"x"]}"#;
        let value: Value = serde_json::from_str(text).unwrap();
        assert_eq!(Json::from(&value).to_value(&mut 100), Some(value.clone()));
        assert_eq!(Json::from(&value).to_value(&mut 8), None);
    }
}
