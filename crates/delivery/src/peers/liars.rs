//! Peers that sent something false, remembered from run to run.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::durable::write_whole;

/// How many are remembered; then the oldest is forgotten.
const MAX_LIARS: usize = 1000;

/// Bytes of the file, at most.
const MAX_BYTES: u64 = 4 << 20;

/// Characters that are kept of a reason.
const MAX_WHY: usize = 300;

/// A peer that is not asked any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Liar {
    /// Its key.
    pub peer: String,
    /// What it sent.
    pub why: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// Why the file of liars can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LiarsError {
    /// It can't be read or written.
    #[error("{file}: cannot be read or written")]
    Io {
        /// The file.
        file: String,
        /// The system's message.
        source: io::Error,
    },
    /// It isn't what was written.
    #[error("{file}: expected a list of peers that lied, found something else: {problem}")]
    Content {
        /// The file.
        file: String,
        /// The parser's message.
        problem: String,
    },
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct File {
    liars: Vec<Liar>,
}

/// The peers that lied, in a file. Without a file they are remembered as long as this lives.
#[derive(Debug)]
pub struct Liars {
    path: Option<PathBuf>,
    known: Mutex<File>,
}

impl Liars {
    /// Those in the file at `path`, none if it isn't there.
    ///
    /// Errors: [`LiarsError`].
    pub fn open(path: Option<&Path>) -> Result<Self, LiarsError> {
        let known = match path {
            None => File::default(),
            Some(path) => read(path)?,
        };
        Ok(Self {
            path: path.map(Path::to_owned),
            known: Mutex::new(known),
        })
    }

    /// What is known of `peer`, if it lied.
    pub fn find(&self, peer: &str) -> Option<Liar> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.liars.iter().find(|liar| liar.peer == peer).cloned()
    }

    /// Remembers that `peer` lied.
    ///
    /// Errors: [`LiarsError`]: it isn't remembered for later runs.
    pub fn add(&self, peer: &str, why: &str) -> Result<(), LiarsError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let liar = Liar {
            peer: peer.to_owned(),
            why: why.chars().take(MAX_WHY).collect(),
            at: now.map_or(0, |now| now.as_secs()),
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.liars.iter().any(|known| known.peer == liar.peer) {
            return Ok(());
        }
        known.liars.push(liar.clone());
        let Some(path) = &self.path else {
            return Ok(());
        };
        // Others may have written meanwhile.
        let mut file = read(path)?;
        if !file.liars.iter().any(|known| known.peer == liar.peer) {
            file.liars.push(liar);
        }
        let n_over = file.liars.len().saturating_sub(MAX_LIARS);
        file.liars.drain(..n_over);
        let json = serde_json::to_vec_pretty(&file).expect("it has neither maps nor floats");
        let written = match path.parent() {
            Some(folder) => fs::create_dir_all(folder).and_then(|()| write_whole(path, &json)),
            None => write_whole(path, &json),
        };
        written.map_err(|source| io_error(path, source))
    }
}

fn io_error(path: &Path, source: io::Error) -> LiarsError {
    LiarsError::Io {
        file: path.display().to_string(),
        source,
    }
}

fn read(path: &Path) -> Result<File, LiarsError> {
    let content = |problem: String| LiarsError::Content {
        file: path.display().to_string(),
        problem,
    };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(File::default()),
        Err(error) => return Err(io_error(path, error)),
        Ok(metadata) if metadata.len() > MAX_BYTES => {
            return Err(content(format!("{} bytes", metadata.len())));
        }
        Ok(_) => {}
    }
    let bytes = fs::read(path).map_err(|error| io_error(path, error))?;
    serde_json::from_slice(&bytes).map_err(|error| content(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn liars_are_remembered_with_the_reason_and_the_oldest_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/peers.json");
        let (one, other) = (
            Liars::open(Some(&path)).unwrap(),
            Liars::open(Some(&path)).unwrap(),
        );
        one.add("a", "wrong block").unwrap();
        one.add("a", "again").unwrap();
        other.add("b", &"x".repeat(1000)).unwrap();
        let later = Liars::open(Some(&path)).unwrap();
        assert_eq!(later.find("a").unwrap().why, "wrong block");
        assert_eq!(later.find("b").unwrap().why.len(), MAX_WHY);
        assert!(later.find("c").is_none() && other.find("a").is_none());
        for i in 0..MAX_LIARS {
            let mut known = later.known.lock().unwrap();
            known.liars.push(Liar {
                peer: format!("p{i}"),
                why: String::new(),
                at: 0,
            });
        }
        let many = serde_json::to_vec(&*later.known.lock().unwrap()).unwrap();
        fs::write(&path, many).unwrap();
        later.add("last", "").unwrap();
        let read = Liars::open(Some(&path)).unwrap();
        assert_eq!(read.known.lock().unwrap().liars.len(), MAX_LIARS);
        assert!(read.find("a").is_none() && read.find("last").is_some());
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("peers.json");
        fs::write(&path, "{").unwrap();
        let error = Liars::open(Some(&path)).unwrap_err().to_string();
        assert!(
            error.contains("peers.json: expected a list of peers that lied"),
            "{error}"
        );
        let without = Liars::open(None).unwrap();
        without.add("a", "b").unwrap();
        assert!(without.find("a").is_some());
    }
}
