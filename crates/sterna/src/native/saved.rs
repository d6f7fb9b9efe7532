//! A folder of saved sequences, which several processes may share.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sterna_delivery::hash::{Algorithm, DIGEST_BYTES, Hasher};
use sterna_delivery::{PartialFile, remove_temporaries};

use crate::error::{Context, Error, ErrorCode, Result, bail};
use crate::sequence::{SavedSequence, read_ids};

/// What the files begin with.
const MAGIC: &[u8; 16] = b"sterna kept seq\n";
/// How their names end.
const SUFFIX: &str = ".sequence";
/// Bytes of a digest in a name.
const NAME_BYTES: usize = 16;
/// What is left by processes that were killed is this old at least.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes that are read or written at once, and those of a file that is only looked at.
const BUFFER: usize = 1 << 20;
const GLANCE: usize = 1 << 14;

/// Whose a saved sequence is: only who has the same may go on with it.
pub type SequenceLabel = [u8; DIGEST_BYTES];

/// A folder of saved sequences, each in a file of its own with the label of what computed it. Files appear and
/// disappear as wholes, whichever process does it; other files in the folder are left alone.
///
/// The name of a file is made of its label and its tokens, so that neither can be another's; a digest covers the rest.
#[derive(Debug)]
pub struct SequenceFolder {
    path: PathBuf,
}

/// A file of a [`SequenceFolder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSequence {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub n_bytes: u64,
    /// When it was last written or [used](SequenceFolder::touch).
    pub used: SystemTime,
}

impl SequenceFolder {
    /// The folder at `path`, which is made if there is none; only this user may read it then.
    ///
    /// Errors: it can't be made or read.
    pub fn open(path: impl Into<PathBuf>) -> Result<SequenceFolder> {
        let path = path.into();
        let name = || path.display().to_string();
        let mut folder = fs::DirBuilder::new();
        folder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
        folder.create(&path).with_context(name)?;
        remove_temporaries(&path, ABANDONED).with_context(name)?;
        Ok(SequenceFolder { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All files, those first that were used least recently.
    ///
    /// Errors: the folder can't be read.
    pub fn list(&self) -> Result<Vec<StoredSequence>> {
        let name = || self.path.display().to_string();
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.path).with_context(name)? {
            let entry = entry.with_context(name)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            // Another process may have removed it.
            let Some(metadata) = entry.metadata().ok().filter(fs::Metadata::is_file) else {
                continue;
            };
            if is_name(&name) {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let n_bytes = metadata.len();
                all.push(StoredSequence {
                    name,
                    n_bytes,
                    used,
                });
            }
        }
        all.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
        Ok(all)
    }

    /// SequenceLabel and tokens of a file. Only [`SequenceFolder::read`] finds out whether the rest is what was written.
    ///
    /// Errors: it is gone ([`ErrorCode::NotFound`]), or is no saved sequence.
    pub fn peek(&self, name: &str) -> Result<(SequenceLabel, Vec<u32>)> {
        let (label, ids) = self.labelled(name, GLANCE, |from, n| read_ids(from, n / 4))?;
        match name == name_of(&label, &ids) {
            true => Ok((label, ids)),
            false => bail!(HashMismatch, "{name}: it is damaged, or has another's name"),
        }
    }

    /// The sequence in a file of the label `label`.
    ///
    /// Errors: it is gone ([`ErrorCode::NotFound`]); it is damaged, or another's.
    pub fn read(&self, name: &str, label: &SequenceLabel) -> Result<SavedSequence> {
        let (own, saved) = self.labelled(name, BUFFER, SavedSequence::read)?;
        if own != *label || name != name_of(label, saved.ids()) {
            bail!(HashMismatch, "{name}: it is damaged, or another's");
        }
        Ok(saved)
    }

    fn labelled<T>(
        &self,
        name: &str,
        buffer: usize,
        read: impl FnOnce(&mut (dyn Read + Send), u64) -> Result<T>,
    ) -> Result<(SequenceLabel, T)> {
        let context = || name.to_owned();
        let file = File::open(self.path.join(name)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::new(ErrorCode::NotFound, "it is gone"),
            _ => error.into(),
        });
        let file = file.with_context(context)?;
        let n_bytes = file.metadata().with_context(context)?.len();
        let mut from = BufReader::with_capacity(buffer, file);
        let (mut magic, mut label) = ([0; MAGIC.len()], [0; DIGEST_BYTES]);
        from.read_exact(&mut magic).with_context(context)?;
        if magic != *MAGIC {
            bail!(
                InvalidFile,
                "{name}: expected a saved sequence, found another file"
            );
        }
        from.read_exact(&mut label).with_context(context)?;
        let n_left = n_bytes.saturating_sub((MAGIC.len() + DIGEST_BYTES) as u64);
        Ok((label, read(&mut from, n_left).with_context(context)?))
    }

    /// Bytes of the file of `saved`.
    pub fn file_bytes(saved: &SavedSequence) -> u64 {
        (MAGIC.len() + DIGEST_BYTES) as u64 + saved.file_bytes()
    }

    /// Writes `saved` of the label `label`, durably; the name of the file.
    ///
    /// Errors: it can't be written; nothing is left then.
    pub fn write(&self, label: &SequenceLabel, saved: &SavedSequence) -> Result<String> {
        let context = || self.path.display().to_string();
        let name = name_of(label, saved.ids());
        let file = PartialFile::create_private(&self.path.join(&name)).with_context(context)?;
        let mut to = BufWriter::with_capacity(BUFFER, file);
        to.write_all(MAGIC).with_context(context)?;
        to.write_all(label).with_context(context)?;
        saved.write(&mut to).with_context(context)?;
        let file = to.into_inner().map_err(io::IntoInnerError::into_error);
        file.and_then(PartialFile::finish).with_context(context)?;
        Ok(name)
    }

    /// Records that a file was used. One that is gone is none.
    ///
    /// Errors: the system refuses.
    pub fn touch(&self, name: &str) -> Result<()> {
        let file = match File::options().append(true).open(self.path.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file.with_context(|| name.to_owned())?,
        };
        let touched = file.set_modified(SystemTime::now());
        touched.with_context(|| name.to_owned())
    }

    /// Removes a file, unless it is gone already.
    ///
    /// Errors: the system refuses.
    pub fn remove(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| name.to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Whether files of ours are called so.
fn is_name(name: &str) -> bool {
    let stem = name.strip_suffix(SUFFIX);
    stem.is_some_and(|stem| {
        stem.len() == 2 * NAME_BYTES && stem.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// The name of the file of a sequence of these tokens.
fn name_of(label: &SequenceLabel, ids: &[u32]) -> String {
    let mut hasher = Hasher::new(Algorithm::Blake3);
    hasher.update(label);
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    hasher.update(&ids);
    let mut name = String::new();
    for byte in &hasher.finish().as_bytes()[..NAME_BYTES] {
        // Writing to a string does not fail.
        let _ = write!(name, "{byte:02x}");
    }
    name + SUFFIX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(n: u32) -> SavedSequence {
        SavedSequence::new((0..n).collect(), vec![n as u8; 3000])
    }

    fn code<T: std::fmt::Debug>(result: Result<T>) -> ErrorCode {
        result.unwrap_err().code()
    }

    #[test]
    fn what_was_written_is_read_by_whom_it_belongs_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/folder");
        let folder = SequenceFolder::open(&path).unwrap();
        let (a, b) = ([1; 32], [2; 32]);
        let names: Vec<String> = [(&a, 5), (&a, 6), (&b, 5)]
            .map(|(label, n)| folder.write(label, &saved(n)).unwrap())
            .into();
        // The same again is the same file.
        assert_eq!(folder.write(&a, &saved(5)).unwrap(), names[0]);
        let listed = folder.list().unwrap();
        assert_eq!(listed.len(), 3);
        for stored in &listed {
            let n = if stored.name == names[1] { 6 } else { 5 };
            assert_eq!(stored.n_bytes, SequenceFolder::file_bytes(&saved(n)));
        }
        // Another process sees the same.
        let folder = SequenceFolder::open(&path).unwrap();
        let (read, want) = (folder.read(&names[1], &a).unwrap(), saved(6));
        assert_eq!((read.ids(), read.contents()), (want.ids(), want.contents()));
        assert_eq!(folder.peek(&names[2]).unwrap(), (b, vec![0, 1, 2, 3, 4]));
        assert_eq!(code(folder.read(&names[2], &a)), ErrorCode::HashMismatch);
        // What was used is the last to go.
        let first = names[0].clone();
        folder.touch(&first).unwrap();
        assert_eq!(folder.list().unwrap()[2].name, first);
        folder.remove(&first).unwrap();
        folder.remove(&first).unwrap();
        folder.touch(&first).unwrap();
        assert_eq!(code(folder.read(&first, &a)), ErrorCode::NotFound);
        assert_eq!(folder.list().unwrap().len(), 2);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&path), 0o700);
            assert_eq!(mode(&path.join(&names[2])), 0o600);
        }
    }

    #[test]
    fn damaged_and_foreign_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = SequenceFolder::open(dir.path()).unwrap();
        let label = [7; 32];
        let name = folder.write(&label, &saved(9)).unwrap();
        let path = dir.path().join(&name);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            fs::write(&path, &changed).unwrap();
            assert!(folder.read(&name, &label).is_err(), "{at}");
            // What is looked up by it is covered, too.
            let head = 16 + 32 + 16 + 8 + 4 * 9;
            assert_eq!(folder.peek(&name).is_err(), at < head, "{at}");
        }
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert!(folder.read(&name, &label).is_err(), "{len}");
        }
        fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
        assert_eq!(code(folder.read(&name, &label)), ErrorCode::HashMismatch);
        // A number of tokens that no file has.
        let mut long = whole.clone();
        long[64..72].fill(0xff);
        fs::write(&path, &long).unwrap();
        assert_eq!(code(folder.peek(&name)), ErrorCode::ContextFull);
        // Another's name.
        let other = folder.write(&label, &saved(8)).unwrap();
        fs::rename(dir.path().join(&other), &path).unwrap();
        assert_eq!(code(folder.read(&name, &label)), ErrorCode::HashMismatch);
        assert_eq!(code(folder.peek(&name)), ErrorCode::HashMismatch);
        // What isn't called so isn't looked at.
        for foreign in ["notes.txt", "mine.sequence", "x.sequence.bak"] {
            fs::write(dir.path().join(foreign), "mine").unwrap();
        }
        fs::create_dir(dir.path().join("folder.sequence")).unwrap();
        let listed = folder.list().unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].name, name);
    }
}
