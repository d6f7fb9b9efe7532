//! Checkpoints of several files: `model.safetensors.index.json`, and joining what it lists.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::TensorCatalog;

use super::{SafeTensors, SafeTensorsError};

/// About 170,000 tensors; the largest checkpoints have half of that.
const MAX_INDEX_BYTES: usize = 16 << 20;

/// Which file of a checkpoint holds which tensor.
#[derive(Debug, Clone, Deserialize)]
pub struct Index {
    weight_map: BTreeMap<String, String>,
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
        match index.weight_map.iter().find(|(_, file)| !is_plain(file)) {
            Some((tensor, file)) => Err(SafeTensorsError::FileName {
                tensor: tensor.clone(),
                file: file.clone(),
            }),
            None => Ok(index),
        }
    }

    /// The files, each once, sorted by name.
    pub fn files(&self) -> Vec<&str> {
        let files: BTreeSet<&str> = self.weight_map.values().map(String::as_str).collect();
        files.into_iter().collect()
    }

    /// The file that holds `tensor`.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name != "."
        && name != ".."
        && !name.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control())
}

/// Joins the files of a checkpoint, given with their names; `file` is the index in `files`.
///
/// Tensors keep the names that the files give them; [`crate::names`] translates.
///
/// # Errors
///
/// If a name stands twice, or `index` and files disagree about where a tensor is.
pub fn merge(
    files: Vec<(&str, SafeTensors)>,
    index: Option<&Index>,
) -> Result<TensorCatalog, SafeTensorsError> {
    let mut catalog = TensorCatalog::default();
    let mut names = Vec::with_capacity(files.len());
    for (i, (file, part)) in files.into_iter().enumerate() {
        names.push(file);
        for mut entry in part.tensors {
            if index.is_some_and(|index| index.file_of(&entry.name) != Some(file)) {
                return Err(SafeTensorsError::Unlisted {
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
    // Tensors found are where the index says, so only absent ones can still disagree.
    for (tensor, file) in index.iter().flat_map(|index| &index.weight_map) {
        if catalog.get(tensor).is_none() {
            let (tensor, file) = (tensor.clone(), file.clone());
            return Err(match names.contains(&file.as_str()) {
                true => SafeTensorsError::MissingTensor { tensor, file },
                false => SafeTensorsError::MissingFile { tensor, file },
            });
        }
    }
    Ok(catalog)
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
    fn disagreement_is_refused() {
        let index = index(r#"{"a":"1.st","b":"2.st"}"#).unwrap();
        for (files, message) in [
            (
                vec![("1.st", file(&["a"]))],
                "the index places tensor `b` in `2.st`, which isn't among the files",
            ),
            (
                vec![("1.st", file(&["a"])), ("2.st", file(&[]))],
                "the index places tensor `b` in `2.st`, which has no such tensor",
            ),
            (
                vec![("1.st", file(&["a", "b"]))],
                "`1.st` has tensor `b`, which the index doesn't place there",
            ),
            (
                vec![("1.st", file(&["a"])), ("1.st", file(&["a"]))],
                "tensor `a` stands twice",
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
