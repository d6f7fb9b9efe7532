//! The JSON header, streamed into entries: nothing the file doesn't need is kept.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::SafeTensorsError;

/// NumPy's limit as well.
const MAX_DIMS: usize = 64;

pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    /// In file order; names are unique.
    pub(super) tensors: Vec<(String, Described)>,
}

/// A tensor as the header describes it.
#[derive(Deserialize)]
pub(super) struct Described {
    pub(super) dtype: String,
    #[serde(deserialize_with = "shape")]
    pub(super) shape: Vec<usize>,
    /// First byte and byte behind the last, from the start of the data section.
    pub(super) data_offsets: (u64, u64),
}

pub(super) fn parse(json: &[u8]) -> Result<Header, SafeTensorsError> {
    serde_json::from_slice(json).map_err(SafeTensorsError::Header)
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Header, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from names to tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut metadata = None;
                let mut tensors = Vec::new();
                let mut names = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if metadata.is_some() {
                            return Err(A::Error::custom("`__metadata__` stands twice"));
                        }
                        // MLX writes null.
                        let strings: Option<BTreeMap<String, String>> = map.next_value()?;
                        metadata = Some(strings.unwrap_or_default());
                        continue;
                    }
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format_args!("`{name}` stands twice")));
                    }
                    tensors.push((name, map.next_value()?));
                }
                Ok(Header {
                    metadata: metadata.unwrap_or_default(),
                    tensors,
                })
            }
        }

        d.deserialize_map(HeaderVisitor)
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
            Ok(shape)
        }
    }

    d.deserialize_seq(ShapeVisitor)
}
