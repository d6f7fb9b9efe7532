//! Models spread over several GGUF files, as `gguf-split` writes them.
//!
//! Each part carries `split.no` (from 0), `split.count` and `split.tensors.count`; the first one
//! carries the model's metadata as well. Part 1 of 3 is called `name-00001-of-00003.gguf`.

use crate::TensorCatalog;

use super::{Gguf, GgufError, Metadata};

/// More parts than this are taken for a mistake; the largest models have about a hundred.
const MAX_PARTS: usize = 4096;

/// A whole model: the metadata and tensors of one file, or of all parts of a split set.
#[derive(Debug, Clone)]
pub struct Model {
    metadata: Metadata,
    tensors: TensorCatalog,
}

impl Model {
    /// Merges the headers of all parts, given in order. A file that isn't split is a list of one.
    ///
    /// In the catalog, `file` is the index in `parts`. Metadata is the first part's, followed by
    /// keys that only later parts have; the `split.*` keys are left out.
    ///
    /// # Errors
    ///
    /// If parts are missing, repeated or out of order, or disagree about metadata or tensors.
    pub fn from_parts(parts: Vec<Gguf>) -> Result<Model, GgufError> {
        let n_parts = parts.len();
        let mut total = None;
        let mut metadata = Metadata::new();
        let mut tensors = TensorCatalog::default();
        for (i, part) in parts.into_iter().enumerate() {
            check_numbers(&part.metadata, i, n_parts)?;
            let claimed = part.metadata.get_u64(TENSORS_COUNT)?;
            total = total.or(claimed.map(|n| (i, n)));
            if i == 0 {
                for (key, value) in part.metadata.into_entries() {
                    if !is_split_key(&key) {
                        metadata.insert(key, value)?;
                    }
                }
            } else {
                for (key, value) in part.metadata.into_entries() {
                    match metadata.get(&key) {
                        // The alignment is a property of the file, not of the model.
                        _ if is_split_key(&key) || key == super::ALIGNMENT_KEY => {}
                        Some(earlier) if *earlier == value => {}
                        Some(_) => return Err(GgufError::SplitConflict { part: i + 1, key }),
                        None => metadata.insert(key, value)?,
                    }
                }
            }
            for mut entry in part.tensors {
                entry.file = i;
                tensors
                    .insert(entry)
                    .map_err(|entry| GgufError::DuplicateTensor { name: entry.name })?;
            }
        }
        match total {
            Some((i, n)) if n != tensors.len() as u64 => Err(GgufError::SplitPart {
                part: i + 1,
                key: TENSORS_COUNT,
                expected: tensors.len() as u64,
                found: n.to_string(),
            }),
            _ if n_parts == 0 => Err(GgufError::NoParts),
            _ => Ok(Model { metadata, tensors }),
        }
    }

    /// What the files say about the model.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Every tensor, under its GGUF name.
    pub fn tensors(&self) -> &TensorCatalog {
        &self.tensors
    }

    /// Both, for a caller that keeps them apart.
    pub fn into_parts(self) -> (Metadata, TensorCatalog) {
        (self.metadata, self.tensors)
    }
}

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS_COUNT: &str = "split.tensors.count";

fn is_split_key(key: &str) -> bool {
    [NO, COUNT, TENSORS_COUNT].contains(&key)
}

/// Checks that part `i` of `n_parts` calls itself that. A file that isn't split needn't say.
fn check_numbers(metadata: &Metadata, i: usize, n_parts: usize) -> Result<(), GgufError> {
    let split = n_parts > 1;
    for (key, expected, optional) in [(COUNT, n_parts, !split), (NO, i, !split)] {
        let found = metadata.get_u64(key)?;
        // A count of 0 is how some writers say that a file isn't split.
        let fits = match found {
            None => optional,
            Some(0) if key == COUNT => optional,
            Some(n) => n == expected as u64,
        };
        if !fits {
            return Err(GgufError::SplitPart {
                part: i + 1,
                key,
                expected: expected as u64,
                found: found.map_or("nothing".to_owned(), |n| n.to_string()),
            });
        }
    }
    Ok(())
}

/// The names of all parts of a split set, from the name (or path, or URL) of its first part.
///
/// `Ok(None)` if `first` isn't named like a part of a set.
///
/// ```
/// let names = sterna_format::gguf::split_names("m-00001-of-00002.gguf")?;
/// assert_eq!(names.unwrap(), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
/// # Ok::<(), sterna_format::gguf::GgufError>(())
/// ```
///
/// # Errors
///
/// [`GgufError::SplitName`] if it is another part than the first, or the count is absurd.
pub fn split_names(first: &str) -> Result<Option<Vec<String>>, GgufError> {
    let Some((stem, no, count)) = parse_split_name(first) else {
        return Ok(None);
    };
    let refuse = |reason: String| GgufError::SplitName {
        name: first.to_owned(),
        reason,
    };
    if count == 0 || count > MAX_PARTS {
        return Err(refuse(format!(
            "a set of {count} parts, expected 1 to {MAX_PARTS}"
        )));
    }
    if no != 1 {
        let name = split_name(stem, 1, count);
        return Err(refuse(format!(
            "part {no} of a split set, give the first one: `{name}`"
        )));
    }
    Ok(Some(
        (1..=count).map(|no| split_name(stem, no, count)).collect(),
    ))
}

fn split_name(stem: &str, no: usize, count: usize) -> String {
    format!("{stem}-{no:05}-of-{count:05}.gguf")
}

/// Cuts `stem-00001-of-00003.gguf` into stem, number and count; `None` if `name` isn't named like a part of a set.
pub fn parse_split_name(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse().ok()).flatten()
    };
    Some((stem, number(no)?, number(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::gguf::{Value, Writer};

    /// A part with one tensor, calling itself `no` of `count`.
    fn part(no: u16, count: u16, tensor: &str, extra: &[(&str, u32)]) -> Gguf {
        let mut m = Metadata::new();
        if no == 0 {
            m.insert("general.architecture", Value::String("llama".into()))
                .unwrap();
        }
        m.insert(NO, Value::U16(no)).unwrap();
        m.insert(COUNT, Value::U16(count)).unwrap();
        m.insert(TENSORS_COUNT, Value::I32(count.into())).unwrap();
        for &(key, value) in extra {
            m.insert(key, Value::U32(value)).unwrap();
        }
        let mut writer = Writer::new(m).unwrap();
        writer.tensor(tensor, DType::F32, &[2, 3]).unwrap();
        let layout = writer.finish();
        Gguf::parse(&layout.header, layout.file_len).unwrap()
    }

    #[test]
    fn parts_merge_in_order() {
        let parts = vec![
            part(0, 3, "a", &[("x", 1)]),
            part(1, 3, "b", &[("x", 1), ("general.alignment", 64)]),
            part(2, 3, "c", &[("y", 2)]),
        ];
        let model = Model::from_parts(parts).unwrap();
        let keys: Vec<_> = model.metadata().iter().map(|(k, _)| k).collect();
        assert_eq!(keys, ["general.architecture", "x", "y"]);
        let files: Vec<_> = model.tensors().iter().map(|t| (&*t.name, t.file)).collect();
        assert_eq!(files, [("a", 0), ("b", 1), ("c", 2)]);
        assert_eq!(model.tensors().get("b").unwrap().shape, [2, 3]);
    }

    #[test]
    fn wrong_sets_are_refused() {
        for (parts, message) in [
            (vec![], "a model needs at least one GGUF file"),
            (
                vec![part(0, 2, "a", &[])],
                "part 1 of the split set: `split.count` should be 1, found 2",
            ),
            (
                vec![part(0, 2, "a", &[]), part(0, 2, "a", &[])],
                "part 2 of the split set: `split.no` should be 1, found 0",
            ),
            (
                vec![part(1, 2, "a", &[]), part(0, 2, "b", &[])],
                "part 1 of the split set: `split.no` should be 0, found 1",
            ),
            (
                vec![part(0, 2, "a", &[]), part(1, 3, "b", &[])],
                "part 2 of the split set: `split.count` should be 2, found 3",
            ),
            (
                vec![part(0, 2, "a", &[]), part(1, 2, "a", &[])],
                "tensor `a` occurs twice",
            ),
            (
                vec![part(0, 2, "a", &[("x", 1)]), part(1, 2, "b", &[("x", 2)])],
                "part 2 of the split set: metadata key `x` differs from an earlier part",
            ),
        ] {
            assert_eq!(Model::from_parts(parts).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn a_file_alone_needs_no_numbers() {
        let layout = Writer::new(Metadata::new()).unwrap().finish();
        let gguf = Gguf::parse(&layout.header, layout.file_len).unwrap();
        let model = Model::from_parts(vec![gguf.clone()]).unwrap();
        assert!(model.tensors().is_empty());
        let error = Model::from_parts(vec![gguf.clone(), gguf]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "part 1 of the split set: `split.count` should be 2, found nothing"
        );
    }

    #[test]
    fn names_of_a_set() {
        for name in [
            "model.gguf",
            "a-1-of-2.gguf",
            "a-00001-of-0000x.gguf",
            "00001-of-00002.gguf",
        ] {
            assert_eq!(split_names(name), Ok(None), "{name}");
        }
        assert_eq!(
            split_names("d/a-00001-of-00300.gguf").unwrap().unwrap()[299],
            "d/a-00300-of-00300.gguf"
        );
        for (name, reason) in [
            (
                "a-00002-of-00002.gguf",
                "part 2 of a split set, give the first one: `a-00001-of-00002.gguf`",
            ),
            (
                "a-00001-of-00000.gguf",
                "a set of 0 parts, expected 1 to 4096",
            ),
            (
                "a-00001-of-99999.gguf",
                "a set of 99999 parts, expected 1 to 4096",
            ),
        ] {
            let error = split_names(name).unwrap_err();
            assert_eq!(error.to_string(), format!("`{name}`: {reason}"));
        }
    }
}
