//! Uploads in parts, noted from push to push, so that what was sent of a large file isn't sent again.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use object_store::multipart::PartId;
use serde::{Deserialize, Serialize};

use crate::hash::{Algorithm, Digest, digest_of};

/// How long stores keep what was begun, at least: Azure a week. Notes that are older help nobody.
const KEPT: Duration = Duration::from_secs(6 * 24 * 60 * 60);

/// What is in a file of notes: first the upload, then its parts, a line of JSON for each.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    /// The store's name of it.
    Upload(String),
    Part(Part),
    /// All parts of the upload of this name were there, and weren't what the store has.
    Failed(String),
}

/// A part that the store has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Part {
    /// The store's name of the upload that it is of.
    upload: String,
    /// Its place, counted from 0.
    index: usize,
    /// The digest of its bytes.
    blake3: String,
    /// The store's name of it.
    id: String,
}

/// An upload under way. Where nothing can be noted it is one all the same, for this push alone.
pub(super) struct Upload {
    pub(super) id: String,
    parts: BTreeMap<usize, Part>,
    has_failed: bool,
    notes: Option<(PathBuf, File)>,
}

impl Upload {
    /// The one that is noted in `folder` of what `what` names; `None` if there is none.
    pub(super) fn find(folder: Option<&Path>, what: &str) -> Option<Self> {
        let path = path_of(folder?, what);
        let text = fs::read_to_string(&path).ok()?;
        // A process that was killed may have written half a line.
        let mut lines = (text.lines()).filter_map(|line| serde_json::from_str(line).ok());
        let Some(Line::Upload(id)) = lines.next() else {
            return None;
        };
        let (mut parts, mut has_failed) = (BTreeMap::new(), false);
        for line in lines {
            match line {
                Line::Part(part) if part.upload == id => drop(parts.insert(part.index, part)),
                Line::Failed(upload) if upload == id => has_failed = true,
                // Of another upload, whoever noted it.
                Line::Part(_) | Line::Failed(_) | Line::Upload(_) => {}
            }
        }
        let file = OpenOptions::new().append(true).open(&path).ok()?;
        let mut upload = Self {
            id,
            parts,
            has_failed,
            notes: Some((path, file)),
        };
        if !text.ends_with('\n') {
            upload.write(b"\n");
        }
        Some(upload)
    }

    /// A new one that the store calls `id`. It isn't noted if there are notes already, of a process that began one at the
    /// same time.
    pub(super) fn begin(folder: Option<&Path>, what: &str, id: String) -> Self {
        let notes = folder.and_then(|folder| new_notes(folder, what).ok());
        let mut upload = Self {
            id,
            parts: BTreeMap::new(),
            has_failed: false,
            notes,
        };
        upload.note(&Line::Upload(upload.id.clone()));
        upload
    }

    /// The part at `index`, if the store has it and it has these bytes.
    pub(super) fn part(&self, index: usize, digest: &Digest) -> Option<PartId> {
        let part = self.parts.get(&index)?;
        (part.blake3 == digest.to_string()).then(|| PartId {
            content_id: part.id.clone(),
        })
    }

    /// Notes that the store has the part at `index`, with these bytes.
    pub(super) fn add(&mut self, index: usize, digest: &Digest, id: &PartId) {
        self.note(&Line::Part(Part {
            upload: self.id.clone(),
            index,
            blake3: digest.to_string(),
            id: id.content_id.clone(),
        }));
    }

    /// Notes that its parts aren't what the store has; returns whether that has happened before.
    pub(super) fn could_not_end(&mut self) -> bool {
        self.note(&Line::Failed(self.id.clone()));
        self.has_failed
    }

    /// Whether another push may go on with it.
    pub(super) fn is_noted(&self) -> bool {
        self.notes.is_some()
    }

    /// It has ended, or can't go on.
    pub(super) fn forget(&mut self) {
        if let Some((path, _)) = self.notes.take()
            && upload_in(&path).is_none_or(|id| id == self.id)
        {
            // What stays is of an upload that the store doesn't know, which is found out.
            let _ = fs::remove_file(path);
        }
    }

    fn note(&mut self, line: &Line) {
        let mut line = serde_json::to_vec(line).expect("names and numbers are JSON");
        line.push(b'\n');
        self.write(&line);
    }

    fn write(&mut self, bytes: &[u8]) {
        // At once, so that lines of two processes don't mix. What can't be noted is sent again.
        if let Some((_, file)) = &mut self.notes
            && file.write_all(bytes).is_err()
        {
            self.forget();
        }
    }
}

/// The upload that the notes at `path` are of, if they say so.
fn upload_in(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    match serde_json::from_str(text.lines().next()?) {
        Ok(Line::Upload(id)) => Some(id),
        _ => None,
    }
}

/// Begins the notes of what `what` names, and ends those that help nobody any more.
fn new_notes(folder: &Path, what: &str) -> io::Result<(PathBuf, File)> {
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let age = entry.metadata()?.modified()?.elapsed().unwrap_or_default();
        if age > KEPT && entry.path().extension().is_some_and(|end| end == ENDING) {
            fs::remove_file(entry.path())?;
        }
    }
    let path = path_of(folder, what);
    // Another process may have begun them, and its lines stay.
    let file = (OpenOptions::new().append(true).create_new(true)).open(&path)?;
    Ok((path, file))
}

const ENDING: &str = "jsonl";

fn path_of(folder: &Path, what: &str) -> PathBuf {
    let name = digest_of(Algorithm::Blake3, what.as_bytes());
    folder.join(format!("{name}.{ENDING}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(upload: &Upload, index: usize, bytes: &[u8]) -> Option<String> {
        let part = upload.part(index, &digest_of(Algorithm::Blake3, bytes));
        part.map(|part| part.content_id)
    }

    #[test]
    fn parts_are_found_again_as_far_as_they_were_noted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("uploads");
        assert!(Upload::find(Some(&folder), "a").is_none());
        let mut upload = Upload::begin(Some(&folder), "a", "id".to_owned());
        assert!(upload.is_noted());
        for (index, bytes) in [(1, b"one"), (0, b"two")] {
            let id = PartId {
                content_id: format!("part \"{index}\""),
            };
            upload.add(index, &digest_of(Algorithm::Blake3, bytes), &id);
        }
        assert!(Upload::find(Some(&folder), "b").is_none());
        let found = Upload::find(Some(&folder), "a").unwrap();
        assert_eq!(found.id, "id");
        assert_eq!(part(&found, 1, b"one").as_deref(), Some("part \"1\""));
        assert_eq!(part(&found, 0, b"two").as_deref(), Some("part \"0\""));
        // Of other bytes, or of another place.
        assert_eq!(part(&found, 0, b"one"), None);
        assert_eq!(part(&found, 2, b"one"), None);
        // Cut off in the last line, and gone on with.
        let path = path_of(&folder, "a");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 5]).unwrap();
        let mut cut = Upload::find(Some(&folder), "a").unwrap();
        assert_eq!(part(&cut, 0, b"two"), None);
        let id = PartId {
            content_id: "again".to_owned(),
        };
        cut.add(0, &digest_of(Algorithm::Blake3, b"two"), &id);
        let mut found = Upload::find(Some(&folder), "a").unwrap();
        assert_eq!(part(&found, 1, b"one").as_deref(), Some("part \"1\""));
        assert!(!found.could_not_end());
        let mut found = Upload::find(Some(&folder), "a").unwrap();
        assert!(found.could_not_end());
        found.forget();
        assert!(!found.is_noted() && Upload::find(Some(&folder), "a").is_none());
    }

    #[test]
    fn two_uploads_of_one_thing_are_not_mixed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Some(dir.path());
        let digest = digest_of(Algorithm::Blake3, b"one");
        let id = |text: &str| PartId {
            content_id: text.to_owned(),
        };
        let mut first = Upload::begin(folder, "a", "first".to_owned());
        first.add(0, &digest, &id("0"));
        // Of a process that looked before the first began: it has no notes, and takes none away.
        let mut second = Upload::begin(folder, "a", "second".to_owned());
        assert!(!second.is_noted());
        second.add(1, &digest, &id("1"));
        second.forget();
        first.add(2, &digest, &id("2"));
        // Two that go on with it add to it.
        let mut third = Upload::find(folder, "a").unwrap();
        third.add(3, &digest, &id("3"));
        first.add(4, &digest, &id("4"));
        let found = Upload::find(folder, "a").unwrap();
        let parts: Vec<_> = (0..5).map(|i| found.part(i, &digest).is_some()).collect();
        assert_eq!(
            (found.id.as_str(), parts),
            ("first", vec![true, false, true, true, true])
        );
        // Parts of another upload aren't taken.
        let path = path_of(dir.path(), "a");
        let text = fs::read_to_string(&path).unwrap();
        let (_, parts) = text.split_once('\n').unwrap();
        fs::write(&path, format!("{{\"upload\":\"other\"}}\n{parts}")).unwrap();
        let found = Upload::find(folder, "a").unwrap();
        assert!(found.id == "other" && found.parts.is_empty());
        // Nor are its notes removed.
        first.forget();
        assert!(Upload::find(folder, "a").is_some());
    }

    #[test]
    fn where_nothing_can_be_noted_an_upload_is_for_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for folder in [None, Some(file.as_path())] {
            let upload = Upload::begin(folder, "a", "id".to_owned());
            assert!(!upload.is_noted() && Upload::find(folder, "a").is_none());
        }
    }
}
