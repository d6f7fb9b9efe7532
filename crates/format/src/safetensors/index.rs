//! Checkpoints of several files: `model.safetensors.index.json`, and joining what it lists.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::TensorCatalog;
use crate::budget::Budget;
use crate::file_name::is_plain_file_name;

use super::{SafeTensors, SafeTensorsError};

/// About 170,000 tensors; the largest checkpoints have 140,000.
const MAX_INDEX_BYTES: usize = 16 << 20;
const MAX_MEMORY: u64 = 32 << 20;
/// A tensor or a file, in a map that grows, without its name.
const ENTRY_MEMORY: u64 = 96;

/// Which file of a checkpoint holds which tensor.
#[derive(Debug, Clone, Deserialize)]
pub struct Index {
    weight_map: WeightMap,
}

#[derive(Debug, Clone, Default)]
struct WeightMap {
    /// Names of files, numbered as they appear.
    files: BTreeMap<String, usize>,
    /// Tensors, and the numbers of their files.
    tensors: BTreeMap<String, usize>,
}

impl Index {
    /// Parses `model.safetensors.index.json`.
    ///
    /// # Errors
    ///
    /// If it isn't JSON of the right shape, or a file name isn't plain: names with separators or
    /// drive colons, `.` and `..` could reach outside the model's folder.
    pub fn parse(json: &[u8]) -> Result<Index, SafeTensorsError> {
        if json.len() > MAX_INDEX_BYTES {
            return Err(SafeTensorsError::IndexTooLarge {
                found: json.len(),
                limit: MAX_INDEX_BYTES,
            });
        }
        let index: Index = serde_json::from_slice(json).map_err(SafeTensorsError::Index)?;
        let files = &index.weight_map.files;
        match files.iter().find(|(file, _)| !is_plain_file_name(file)) {
            Some((file, &number)) => Err(SafeTensorsError::FileName {
                tensor: index.tensor_in(number),
                file: file.clone(),
            }),
            None => Ok(index),
        }
    }

    /// The files, each once, sorted by name.
    pub fn files(&self) -> Vec<&str> {
        self.weight_map.files.keys().map(String::as_str).collect()
    }

    /// The file that holds `tensor`.
    fn file_of(&self, tensor: &str) -> Option<&str> {
        let number = self.weight_map.tensors.get(tensor)?;
        let mut files = self.weight_map.files.iter();
        files
            .find(|(_, n)| *n == number)
            .map(|(file, _)| file.as_str())
    }

    /// A tensor in the file of that number, for messages.
    fn tensor_in(&self, number: usize) -> String {
        let mut tensors = self.weight_map.tensors.iter();
        let (tensor, _) = tensors
            .find(|(_, n)| **n == number)
            .expect("a file is numbered when a tensor in it appears");
        tensor.clone()
    }
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<WeightMap, D::Error> {
        struct WeightMapVisitor;

        impl<'de> Visitor<'de> for WeightMapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensors to files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut memory = Budget::new(MAX_MEMORY);
                let mut charge = |name: &str| {
                    let bytes = ENTRY_MEMORY + name.len() as u64;
                    memory.charge(bytes).map_err(|over| {
                        A::Error::custom(format_args!(
                            "{} bytes of memory are needed, the limit is {}",
                            over.need, over.limit
                        ))
                    })
                };
                let mut out = WeightMap::default();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    charge(&tensor)?;
                    let number = match out.files.get(&file) {
                        Some(&number) => number,
                        None => {
                            charge(&file)?;
                            let number = out.files.len();
                            out.files.insert(file, number);
                            number
                        }
                    };
                    if out.tensors.contains_key(&tensor) {
                        let twice = format_args!("`{tensor}` occurs twice");
                        return Err(A::Error::custom(twice));
                    }
                    out.tensors.insert(tensor, number);
                }
                Ok(out)
            }
        }

        d.deserialize_map(WeightMapVisitor)
    }
}

/// Joins the files of a checkpoint, given with their names; `file` is the index in `files`.
///
/// Tensors keep the names that the files give them; [`crate::names`] translates.
///
/// Published indices have stale lines, so a listed tensor may be absent and a tensor unlisted: what
/// a model lacks is for its plan to say.
///
/// # Errors
///
/// If a name occurs twice, a listed file isn't given, or a tensor isn't in the file that `index`
/// says.
pub fn merge(
    files: Vec<(&str, SafeTensors)>,
    index: Option<&Index>,
) -> Result<TensorCatalog, SafeTensorsError> {
    for (file, &number) in index.iter().flat_map(|index| &index.weight_map.files) {
        if files.iter().all(|(name, _)| name != file) {
            return Err(SafeTensorsError::MissingFile {
                tensor: index.map_or_else(String::new, |index| index.tensor_in(number)),
                file: file.clone(),
            });
        }
    }
    let mut catalog = TensorCatalog::default();
    for (i, (file, part)) in files.into_iter().enumerate() {
        let number = index.and_then(|index| index.weight_map.files.get(file));
        for mut entry in part.tensors {
            let listed = index.and_then(|index| index.weight_map.tensors.get(&entry.name));
            if listed.is_some() && listed != number {
                let listed = index.and_then(|index| index.file_of(&entry.name));
                return Err(SafeTensorsError::Misplaced {
                    listed: listed.unwrap_or_default().to_owned(),
                    tensor: entry.name,
                    file: file.to_owned(),
                });
            }
            entry.file = i;
            catalog
                .insert(entry)
                .map_err(|entry| SafeTensorsError::DuplicateTensor { name: entry.name })?;
        }
    }
    let listed = index
        .iter()
        .flat_map(|index| index.weight_map.tensors.keys());
    let mut missing = listed.filter(|name| catalog.get(name).is_none() && !is_stale(name));
    if let (Some(index), Some(tensor)) = (index, missing.next()) {
        return Err(SafeTensorsError::MissingTensor {
            file: index.file_of(tensor).unwrap_or_default().to_owned(),
            tensor: tensor.clone(),
        });
    }
    Ok(catalog)
}

/// Whether an index may name a tensor that is no longer there: a buffer that older versions saved, and the head
/// of a model that uses its embedding table.
fn is_stale(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::safetensors::Writer;

    fn file(tensors: &[&str]) -> SafeTensors {
        let mut writer = Writer::new(BTreeMap::new());
        for &name in tensors {
            writer.tensor(name, DType::F32, &[2]).unwrap();
        }
        let layout = writer.finish();
        SafeTensors::parse(&layout.header, layout.file_len).unwrap()
    }

    fn index(map: &str) -> Result<Index, SafeTensorsError> {
        Index::parse(format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{map}}}"#).as_bytes())
    }

    #[test]
    fn an_index_and_its_files() {
        let index = index(r#"{"b":"2.st","a":"1.st","c":"2.st"}"#).unwrap();
        assert_eq!(index.files(), ["1.st", "2.st"]);
        let files = vec![("1.st", file(&["a"])), ("2.st", file(&["c", "b"]))];
        let catalog = merge(files, Some(&index)).unwrap();
        let found: Vec<_> = catalog.iter().map(|t| (&*t.name, t.file)).collect();
        assert_eq!(found, [("a", 0), ("c", 1), ("b", 1)]);
    }

    #[test]
    fn stale_lines_are_no_error() {
        let index = index(r#"{"a":"1.st","rotary_emb.inv_freq":"2.st"}"#).unwrap();
        let files = vec![("1.st", file(&["a", "unlisted"])), ("2.st", file(&["b"]))];
        let catalog = merge(files, Some(&index)).unwrap();
        let found: Vec<_> = catalog.iter().map(|t| (&*t.name, t.file)).collect();
        assert_eq!(found, [("a", 0), ("unlisted", 0), ("b", 1)]);
    }

    #[test]
    fn disagreement_is_refused() {
        let index = index(r#"{"a":"1.st","b":"2.st"}"#).unwrap();
        for (files, message) in [
            (
                vec![("1.st", file(&["a"]))],
                "the index places tensor `b` in `2.st`, which isn't among the files",
            ),
            (
                vec![("1.st", file(&["a", "b"])), ("2.st", file(&[]))],
                "the index places tensor `b` in `2.st`, but it is in `1.st`",
            ),
            (
                vec![
                    ("1.st", file(&[])),
                    ("2.st", file(&[])),
                    ("3.st", file(&["b"])),
                ],
                "the index places tensor `b` in `2.st`, but it is in `3.st`",
            ),
            (
                vec![
                    ("1.st", file(&["a"])),
                    ("1.st", file(&["a"])),
                    ("2.st", file(&[])),
                ],
                "tensor `a` occurs twice",
            ),
            (
                vec![("1.st", file(&["a"])), ("2.st", file(&["c"]))],
                "the index places tensor `b` in `2.st`, which doesn't have it",
            ),
        ] {
            assert_eq!(merge(files, Some(&index)).unwrap_err().to_string(), message);
        }
        assert!(merge(vec![("1.st", file(&["a"]))], None).is_ok());
    }

    #[test]
    fn file_names_stay_in_the_folder() {
        for name in [
            "",
            ".",
            "..",
            "../a",
            "/etc/passwd",
            "a/b",
            "a\\\\b",
            "C:a",
            "a\\u0000",
        ] {
            let error = index(&format!(r#"{{"t":"{name}"}}"#)).unwrap_err();
            assert!(
                matches!(error, SafeTensorsError::FileName { .. }),
                "{name}: {error}"
            );
        }
        assert!(index(r#"{"t":"model..x.safetensors"}"#).is_ok());
        assert!(matches!(index("[]"), Err(SafeTensorsError::Index(_))));
    }
}
