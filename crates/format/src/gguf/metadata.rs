//! The metadata of a GGUF file: typed values under string keys, in file order.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::GgufError;
use super::read::Location;
use super::value::{Array, Strings, Value};

/// Metadata entries in file order, found by key.
///
/// The getters distinguish three cases: `Ok(Some(_))`, `Ok(None)` if the key is absent, and
/// [`GgufError::WrongType`] if it holds something else. The `require_*` forms turn absence into
/// [`GgufError::MissingKey`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Indices into `entries`.
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// No entries.
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// No entries, and room for `n`.
    pub(super) fn with_capacity(n: usize) -> Metadata {
        Metadata {
            entries: Vec::with_capacity(n),
            by_key: HashMap::with_capacity(n),
        }
    }

    pub(super) fn into_entries(self) -> impl Iterator<Item = (String, Value)> {
        self.entries.into_iter()
    }

    /// Appends an entry.
    ///
    /// # Errors
    ///
    /// [`GgufError::DuplicateKey`] if the key is taken, [`GgufError::EmptyName`] if it is empty.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> Result<(), GgufError> {
        let key = key.into();
        if key.is_empty() {
            let place = Location::Key(self.entries.len() as u64).to_string();
            return Err(GgufError::EmptyName { place });
        }
        match self.by_key.entry(key) {
            Entry::Occupied(taken) => Err(GgufError::DuplicateKey {
                key: taken.key().clone(),
            }),
            Entry::Vacant(free) => {
                self.entries.push((free.key().clone(), value));
                free.insert(self.entries.len() - 1);
                Ok(())
            }
        }
    }

    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// Every entry, in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// `general.architecture`, such as `llama`.
    pub fn architecture(&self) -> Result<Option<&str>, GgufError> {
        self.get_str("general.architecture")
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(v) => Ok(Some(v)),
            None => Err(GgufError::WrongType {
                key: key.to_owned(),
                expected,
                found: value.to_string(),
            }),
        }
    }

    /// An integer of any width that isn't negative.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, UNSIGNED, |v| u64::try_from(v.as_int()?).ok())
    }

    /// An integer of any width that isn't negative and fits 32 bits, such as a token id.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, UNSIGNED_32, |v| u32::try_from(v.as_int()?).ok())
    }

    /// An integer of any width.
    pub fn get_i64(&self, key: &str) -> Result<Option<i64>, GgufError> {
        self.typed(key, "integer", |v| i64::try_from(v.as_int()?).ok())
    }

    /// A float; an f64 is rounded.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, FLOAT, |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    /// A boolean.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "bool", |v| match *v {
            Value::Bool(x) => Some(x),
            _ => None,
        })
    }

    /// A string.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, STRING, |v| match v {
            Value::String(x) => Some(x.as_str()),
            _ => None,
        })
    }

    /// An array of any type.
    pub fn get_array(&self, key: &str) -> Result<Option<&Array>, GgufError> {
        self.typed(key, "array", array)
    }

    /// An array of strings.
    pub fn get_strings(&self, key: &str) -> Result<Option<&Strings>, GgufError> {
        self.typed(key, STRINGS, |v| match array(v)? {
            Array::String(x) => Some(x),
            _ => None,
        })
    }

    /// An array of integers of any width, none negative or above 32 bits. Borrowed if stored so.
    pub fn get_u32s(&self, key: &str) -> Result<Option<Cow<'_, [u32]>>, GgufError> {
        self.typed(key, "array of unsigned integers", |v| match array(v)? {
            Array::U32(x) => Some(Cow::Borrowed(x.as_slice())),
            other => narrow(other).map(Cow::Owned),
        })
    }

    /// An array of integers of any width that fit 32 bits. Borrowed if stored so.
    pub fn get_i32s(&self, key: &str) -> Result<Option<Cow<'_, [i32]>>, GgufError> {
        self.typed(key, "array of integers", |v| match array(v)? {
            Array::I32(x) => Some(Cow::Borrowed(x.as_slice())),
            other => narrow(other).map(Cow::Owned),
        })
    }

    /// An array of floats; f64 elements are rounded. Borrowed if stored as f32.
    pub fn get_f32s(&self, key: &str) -> Result<Option<Cow<'_, [f32]>>, GgufError> {
        self.typed(key, "array of floats", |v| match array(v)? {
            Array::F32(x) => Some(Cow::Borrowed(x.as_slice())),
            Array::F64(x) => Some(Cow::Owned(x.iter().map(|&x| x as f32).collect())),
            _ => None,
        })
    }

    /// An array of booleans.
    pub fn get_bools(&self, key: &str) -> Result<Option<&[bool]>, GgufError> {
        self.typed(key, "array of bools", |v| match array(v)? {
            Array::Bool(x) => Some(x.as_slice()),
            _ => None,
        })
    }

    /// [`Metadata::get_u64`] of a key that must be there.
    pub fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.get_u64(key)?.ok_or_else(|| missing(key, UNSIGNED))
    }

    /// [`Metadata::get_u32`] of a key that must be there.
    pub fn require_u32(&self, key: &str) -> Result<u32, GgufError> {
        self.get_u32(key)?.ok_or_else(|| missing(key, UNSIGNED_32))
    }

    /// [`Metadata::get_f32`] of a key that must be there.
    pub fn require_f32(&self, key: &str) -> Result<f32, GgufError> {
        self.get_f32(key)?.ok_or_else(|| missing(key, FLOAT))
    }

    /// [`Metadata::get_str`] of a key that must be there.
    pub fn require_str(&self, key: &str) -> Result<&str, GgufError> {
        self.get_str(key)?.ok_or_else(|| missing(key, STRING))
    }

    /// [`Metadata::get_strings`] of a key that must be there.
    pub fn require_strings(&self, key: &str) -> Result<&Strings, GgufError> {
        self.get_strings(key)?.ok_or_else(|| missing(key, STRINGS))
    }
}

const UNSIGNED: &str = "unsigned integer";
const UNSIGNED_32: &str = "unsigned integer of 32 bits";
const FLOAT: &str = "float";
const STRING: &str = "string";
const STRINGS: &str = "array of strings";

fn missing(key: &str, expected: &'static str) -> GgufError {
    GgufError::MissingKey {
        key: key.to_owned(),
        expected,
    }
}

fn array(value: &Value) -> Option<&Array> {
    match value {
        Value::Array(array) => Some(array),
        _ => None,
    }
}

fn narrow<T: TryFrom<i128>>(array: &Array) -> Option<Vec<T>> {
    array.ints()?.map(|x| T::try_from(x).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        let mut m = Metadata::new();
        for (key, value) in [
            ("u8", Value::U8(7)),
            ("i32", Value::I32(-1)),
            ("u64", Value::U64(1 << 40)),
            ("f32", Value::F32(0.5)),
            ("bool", Value::Bool(true)),
            ("str", Value::String("llama".into())),
            ("u16s", Value::Array(Array::U16(vec![1, 2]))),
            ("i32s", Value::Array(Array::I32(vec![-1, 2]))),
            (
                "strs",
                Value::Array(Array::String(["a", "", "c"].iter().collect())),
            ),
        ] {
            m.insert(key, value).unwrap();
        }
        m
    }

    #[test]
    fn integers_of_any_width_are_counts() {
        let m = sample();
        assert_eq!(m.get_u64("u8"), Ok(Some(7)));
        assert_eq!(m.get_i64("i32"), Ok(Some(-1)));
        assert_eq!(m.get_u64("u64"), Ok(Some(1 << 40)));
        assert_eq!(m.get_u32s("u16s").unwrap().unwrap().as_ref(), [1, 2]);
        assert_eq!(m.get_i32s("i32s").unwrap().unwrap().as_ref(), [-1, 2]);
    }

    #[test]
    fn absent_and_wrong_are_told_apart() {
        let m = sample();
        assert_eq!(m.get_u64("nothing"), Ok(None));
        for (result, message) in [
            (
                m.get_u64("i32").err(),
                "metadata key `i32`: expected unsigned integer, found i32 -1",
            ),
            (
                m.get_u32("u64").err(),
                "metadata key `u64`: expected unsigned integer of 32 bits, found u64 1099511627776",
            ),
            (
                m.get_f32("str").err(),
                "metadata key `str`: expected float, found string",
            ),
            (
                m.get_bool("u8").err(),
                "metadata key `u8`: expected bool, found u8 7",
            ),
            (
                m.get_u32s("i32s").err(),
                "metadata key `i32s`: expected array of unsigned integers, found array of 2 i32",
            ),
            (
                m.get_strings("bool").err(),
                "metadata key `bool`: expected array of strings, found bool",
            ),
            (
                m.require_str("nothing").err(),
                "metadata key `nothing` is missing, expected string",
            ),
        ] {
            assert_eq!(result.unwrap().to_string(), message);
        }
    }

    #[test]
    fn strings_share_a_buffer() {
        let m = sample();
        let strings = m.require_strings("strs").unwrap();
        assert_eq!(strings.iter().collect::<Vec<_>>(), ["a", "", "c"]);
        assert_eq!(strings.get(3), None);
    }

    #[test]
    fn a_key_stands_once() {
        let mut m = sample();
        assert_eq!(
            m.insert("u8", Value::U8(1)),
            Err(GgufError::DuplicateKey { key: "u8".into() })
        );
    }
}
