//! Metadata values: thirteen types, arrays of them stored flat.

use std::fmt;

use super::GgufError;
use super::read::{Cursor, Location};

/// How deep arrays may hold arrays. No known file nests them at all.
const MAX_NESTING: usize = 4;

/// An [`Array`] in another, and what the allocator adds to its elements.
const ARRAY_MEMORY: u64 = 64;

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
// Variants are named like the types of the format.
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
// Variants are named like the types of the format.
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Strings),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Many strings in one buffer, because vocabularies have hundreds of thousands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    /// Where each string ends in `text`. `u32` suffices: headers are shorter than 4 GiB.
    ends: Vec<u32>,
}

impl Strings {
    /// How many strings there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1] as usize,
        };
        Some(&self.text[start..end])
    }

    /// Every string in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("an index below the length"))
    }

    /// Appends a string.
    ///
    /// # Panics
    ///
    /// If all strings together reach 4 GiB.
    pub fn push(&mut self, s: &str) {
        self.text.push_str(s);
        let end = u32::try_from(self.text.len()).expect("strings of less than 4 GiB in all");
        self.ends.push(end);
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut out = Strings::default();
        for s in strings {
            out.push(s.as_ref());
        }
        out
    }
}

/// The type of a [`Value`] or of an [`Array`]'s elements. Discriminants are the ids in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }

    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, GgufError> {
        let id = cursor.u32(Location::Value(key))?;
        usize::try_from(id)
            .ok()
            .and_then(|i| ValueType::ALL.get(i).copied())
            .ok_or_else(|| GgufError::ValueType {
                key: key.to_owned(),
                id,
            })
    }
}

impl Value {
    /// The value as an integer, whatever its width; `None` if it isn't an integer.
    pub(super) fn as_int(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    pub(super) fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// A type id and the value after it.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
        let place = Location::Value(key);
        Ok(match ValueType::read(cursor, key)? {
            ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(place)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(place)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(place)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(place)?)),
            ValueType::U32 => Value::U32(cursor.u32(place)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(place)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(place)?)),
            ValueType::Bool => {
                Value::Bool(bool_from(u8::from_le_bytes(cursor.array(place)?), key)?)
            }
            ValueType::String => {
                let text = cursor.str(place)?;
                cursor.charge(text.len() as u64, place)?;
                // Some writers count the terminator of a C string.
                Value::String(text.trim_end_matches('\0').to_owned())
            }
            ValueType::Array => Value::Array(Array::read(cursor, key, 1)?),
            ValueType::U64 => Value::U64(cursor.u64(place)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(place)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(place)?)),
        })
    }

    /// The inverse of [`Value::read`].
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend((self.value_type() as u32).to_le_bytes());
        match self {
            Value::U8(v) => out.extend(v.to_le_bytes()),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push((*v).into()),
            Value::String(v) => write_str(v, out),
            Value::Array(v) => v.write(out),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

/// What a message says was found: the type, and for integers the value.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Array(array) => {
                write!(f, "array of {} {}", array.len(), array.value_type().name())
            }
            _ => match self.as_int() {
                Some(v) => write!(f, "{} {v}", self.value_type().name()),
                None => f.write_str(self.value_type().name()),
            },
        }
    }
}

impl Array {
    /// How many elements there are.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers, whatever their width; `None` if they aren't integers.
    pub(super) fn ints(&self) -> Option<Box<dyn Iterator<Item = i128> + '_>> {
        Some(match self {
            Array::U8(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I8(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U16(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I16(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U32(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I32(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U64(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I64(v) => Box::new(v.iter().map(|&x| x.into())),
            _ => return None,
        })
    }

    fn value_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::Array(_) => ValueType::Array,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// An element type, a count and the elements; `depth` is 1 for an array in no other.
    fn read(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<Array, GgufError> {
        if depth > MAX_NESTING {
            return Err(GgufError::Nesting {
                key: key.to_owned(),
                limit: MAX_NESTING,
            });
        }
        let element = ValueType::read(cursor, key)?;
        let n = cursor.u64(Location::Value(key))?;
        Ok(match element {
            ValueType::U8 => Array::U8(scalars(cursor, n, key, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(scalars(cursor, n, key, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(scalars(cursor, n, key, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(scalars(cursor, n, key, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(scalars(cursor, n, key, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(scalars(cursor, n, key, i32::from_le_bytes)?),
            ValueType::F32 => Array::F32(scalars(cursor, n, key, f32::from_le_bytes)?),
            ValueType::U64 => Array::U64(scalars(cursor, n, key, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(scalars(cursor, n, key, i64::from_le_bytes)?),
            ValueType::F64 => Array::F64(scalars(cursor, n, key, f64::from_le_bytes)?),
            ValueType::Bool => {
                let bytes = cursor.items(n, Location::Value(key))?;
                let bools = bytes.iter().map(|&[byte]| bool_from(byte, key));
                Array::Bool(bools.collect::<Result<_, _>>()?)
            }
            ValueType::String => Array::String(read_strings(cursor, n, key)?),
            ValueType::Array => {
                // An empty inner array takes 12 bytes.
                let n = cursor.ensure_items(n, 12, ARRAY_MEMORY, Location::Value(key))?;
                let mut arrays = Vec::with_capacity(n);
                for _ in 0..n {
                    arrays.push(Array::read(cursor, key, depth + 1)?);
                }
                Array::Array(arrays)
            }
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend((self.value_type() as u32).to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        match self {
            Array::U8(v) => out.extend(v),
            Array::I8(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::U16(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::I16(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::U32(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::I32(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::F32(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
            Array::String(v) => v.iter().for_each(|s| write_str(s, out)),
            Array::Array(v) => v.iter().for_each(|a| a.write(out)),
            Array::U64(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::I64(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            Array::F64(v) => out.extend(v.iter().flat_map(|x| x.to_le_bytes())),
        }
    }
}

fn scalars<const N: usize, T>(
    cursor: &mut Cursor<'_>,
    n: u64,
    key: &str,
    from_le_bytes: fn([u8; N]) -> T,
) -> Result<Vec<T>, GgufError> {
    let items = cursor.items(n, Location::Value(key))?;
    Ok(items.iter().map(|&item| from_le_bytes(item)).collect())
}

fn read_strings(cursor: &mut Cursor<'_>, n: u64, key: &str) -> Result<Strings, GgufError> {
    let place = Location::Value(key);
    // An empty string takes 8 bytes in the file and 4 in `ends`.
    let n = cursor.ensure_items(n, 8, 4, place)?;
    let text = cursor.text_bytes(n, place)?;
    cursor.charge(text, place)?;
    let text = usize::try_from(text).expect("a length that lies in memory");
    let mut strings = Strings {
        text: String::with_capacity(text),
        ends: Vec::with_capacity(n),
    };
    for _ in 0..n {
        strings.push(cursor.str(place)?);
    }
    Ok(strings)
}

fn bool_from(byte: u8, key: &str) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(GgufError::InvalidBool {
            key: key.to_owned(),
            found,
        }),
    }
}

/// A length and the bytes.
pub(super) fn write_str(s: &str, out: &mut Vec<u8>) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}
