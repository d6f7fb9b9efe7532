//! The JSON header, streamed into placed tensors: nothing the file doesn't need is kept.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::budget::{Budget, OverBudget};
use crate::{DType, TensorEntry};

use super::{SafeTensorsError, dtype_of, place_tensor};

/// NumPy's limit as well.
const MAX_DIMS: usize = 64;
const MAX_NAME_BYTES: usize = 65_535;
/// About 120,000 tensors with names of 80 bytes.
const MAX_MEMORY: u64 = 32 << 20;
/// A tensor without its name and dimensions: its entry in a list that grows, places in two orders.
const TENSOR_MEMORY: u64 = 160;
/// An entry of a map from strings to strings, without the strings.
const STRING_MEMORY: u64 = 160;

/// What a header says. Tensors are in file order; their names may repeat.
#[derive(Default)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<TensorEntry>,
}

/// A tensor as the header describes it.
#[derive(Deserialize)]
pub(super) struct Described {
    pub(super) dtype: Spelling,
    #[serde(deserialize_with = "shape")]
    pub(super) shape: Vec<usize>,
    /// First byte and byte after the last, from the start of the data section.
    pub(super) data_offsets: (u64, u64),
}

/// An element type, or the start of a spelling that isn't known.
pub(super) enum Spelling {
    Known(DType),
    Unknown(String),
}

/// Parses the JSON text of a header and places its tensors in a data section of `data_len` bytes
/// at `data_offset`.
pub(super) fn parse(
    json: &[u8],
    data_offset: u64,
    data_len: u64,
) -> Result<Header, SafeTensorsError> {
    let mut refused = None;
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let seed = HeaderSeed {
        data_offset,
        data_len,
        memory: Budget::new(MAX_MEMORY),
        refused: &mut refused,
    };
    let header = seed.deserialize(&mut deserializer);
    let header = header.and_then(|header| deserializer.end().map(|()| header));
    header.map_err(|error| refused.unwrap_or(SafeTensorsError::Header(error)))
}

/// Reads a header. An error that isn't about JSON is left in `refused`.
struct HeaderSeed<'a> {
    data_offset: u64,
    data_len: u64,
    memory: Budget,
    refused: &'a mut Option<SafeTensorsError>,
}

impl HeaderSeed<'_> {
    fn charge<E: Error>(&mut self, bytes: u64) -> Result<(), E> {
        self.memory.charge(bytes).map_err(|over| self.refuse(over))
    }

    /// Keeps `error` while a stand-in travels through the JSON parser.
    fn refuse<E: Error>(&mut self, error: impl Into<SafeTensorsError>) -> E {
        *self.refused = Some(error.into());
        E::custom("refused")
    }

    /// The value of `__metadata__`.
    fn metadata<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<BTreeMap<String, String>, A::Error> {
        // MLX writes null.
        map.next_value_seed(MetadataSeed(self))
    }

    /// The value of a tensor, placed.
    fn tensor<'de, A: MapAccess<'de>>(
        &mut self,
        name: String,
        map: &mut A,
    ) -> Result<TensorEntry, A::Error> {
        if name.len() > MAX_NAME_BYTES {
            return Err(self.refuse(SafeTensorsError::NameTooLong {
                found: name.len(),
                limit: MAX_NAME_BYTES,
            }));
        }
        let described: Described = map.next_value()?;
        self.charge(TENSOR_MEMORY + name.len() as u64 + 8 * described.shape.len() as u64)?;
        place_tensor(name, described, self.data_offset, self.data_len).map_err(|e| self.refuse(e))
    }
}

impl From<OverBudget> for SafeTensorsError {
    fn from(over: OverBudget) -> SafeTensorsError {
        SafeTensorsError::TooMuchMemory {
            need: over.need,
            limit: over.limit,
        }
    }
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Header, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Header, A::Error> {
        let mut metadata = None;
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name != "__metadata__" {
                tensors.push(self.tensor(name, &mut map)?);
            } else if metadata.is_none() {
                metadata = Some(self.metadata(&mut map)?);
            } else {
                return Err(A::Error::custom("`__metadata__` occurs twice"));
            }
        }
        Ok(Header {
            metadata: metadata.unwrap_or_default(),
            tensors,
        })
    }
}

/// Reads an object of strings, or null.
struct MetadataSeed<'a, 'b>(&'a mut HeaderSeed<'b>);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_, '_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_, '_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from strings to strings")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value: String = map.next_value()?;
            // Twice, because the JSON parser holds a string with escapes as well.
            let text = 2 * (key.len() + value.len()) as u64;
            self.0.charge(STRING_MEMORY + text)?;
            strings.insert(key, value);
        }
        Ok(strings)
    }
}

impl<'de> Deserialize<'de> for Spelling {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Spelling, D::Error> {
        struct SpellingVisitor;

        impl Visitor<'_> for SpellingVisitor {
            type Value = Spelling;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an element type")
            }

            fn visit_str<E: Error>(self, spelling: &str) -> Result<Spelling, E> {
                Ok(match dtype_of(spelling) {
                    Some(dtype) => Spelling::Known(dtype),
                    None => Spelling::Unknown(spelling.chars().take(32).collect()),
                })
            }
        }

        d.deserialize_str(SpellingVisitor)
    }
}

/// A list of at most [`MAX_DIMS`] sizes.
fn shape<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<usize>, D::Error> {
    struct ShapeVisitor;

    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of sizes")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(size) = seq.next_element()? {
                if shape.len() == MAX_DIMS {
                    return Err(A::Error::custom(format_args!(
                        "tensors of more than {MAX_DIMS} dimensions aren't supported"
                    )));
                }
                shape.push(size);
            }
            shape.shrink_to_fit();
            Ok(shape)
        }
    }

    d.deserialize_seq(ShapeVisitor)
}
