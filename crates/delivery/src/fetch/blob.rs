//! What to fetch, and limits for it.

use std::{collections::HashSet, sync::Arc, time::Duration};

use crate::hash::{BlockDigests, Expected};

/// A named run of bytes to fetch: a shard, a model file, a tokenizer.
#[derive(Debug, Clone)]
pub struct Blob {
    name: String,
    size: u64,
    expected: Expected,
    blocks: Option<Arc<BlockDigests>>,
    etag: Option<String>,
}

/// Why blobs can't be planned for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A name that is not a plain relative path of portable parts.
    #[error("file name {name:?}: {why}")]
    Name {
        /// The name, cut to 200 characters.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Two blobs with the same name, or with names that differ only in case.
    #[error("file name {name:?} is there twice, or differs from another only in case")]
    Duplicate {
        /// The second of them.
        name: String,
    },
    /// Digests of blocks for another size.
    #[error("`{name}` has {size} bytes, but its block digests are for {blocks}")]
    BlockDigests {
        /// The blob.
        name: String,
        /// Its bytes.
        size: u64,
        /// Bytes the digests cover.
        blocks: u64,
    },
    /// Sizes that overflow.
    #[error("the files together have more bytes than 64 bits can count")]
    TooLarge,
}

impl Blob {
    /// A blob of `size` bytes. `name` is its path below every source, with `/` between parts.
    ///
    /// Errors: [`PlanError::Name`] for a name that could escape its folder, or that some system can't store.
    pub fn new(name: &str, size: u64, expected: Expected) -> Result<Self, PlanError> {
        check_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            size,
            expected,
            blocks: None,
            etag: None,
        })
    }

    /// The same, which every source must answer with this strong ETag if with any. Bytes without a digest that
    /// an earlier fetch stored under it are then continued, as nothing else shows that they belong together.
    pub fn with_etag(mut self, etag: String) -> Self {
        self.etag = Some(etag);
        self
    }

    /// The same with digests of its blocks, so that a wrong block is found when it arrives and only that is
    /// fetched again. Errors: [`PlanError::BlockDigests`].
    pub fn with_blocks(mut self, blocks: BlockDigests) -> Result<Self, PlanError> {
        if blocks.size() != self.size {
            return Err(PlanError::BlockDigests {
                name: self.name,
                size: self.size,
                blocks: blocks.size(),
            });
        }
        self.blocks = Some(Arc::new(blocks));
        Ok(self)
    }

    /// Its path below every source.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// How its bytes are verified.
    pub fn expected(&self) -> Expected {
        self.expected
    }

    /// The ETag that every source must answer with, if it is known.
    pub fn etag(&self) -> Option<&String> {
        self.etag.as_ref()
    }

    /// A line that tells it from other blobs of its name, for what notes how much of it has arrived.
    pub fn identity(&self) -> String {
        let etag = self.etag.as_ref().map(|etag| format!(" {etag:?}"));
        let etag = etag.unwrap_or_default();
        format!("{:?} {}{etag}\n", self.expected, self.size)
    }

    /// The digests of its blocks, if they are known.
    pub fn blocks(&self) -> Option<&Arc<BlockDigests>> {
        self.blocks.as_ref()
    }
}

/// Checks that a path read from a manifest stays below the folder it is joined to, on every system.
///
/// Errors: [`PlanError::Name`].
pub fn check_name(name: &str) -> Result<(), PlanError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > 1024 {
        "it is longer than 1024 bytes"
    } else if name.contains(['\\', ':']) || name.chars().any(char::is_control) {
        "it has a backslash, a colon or a control character"
    } else if name.starts_with('/') {
        "it is an absolute path"
    } else if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "it has an empty part, `.` or `..`"
    } else if name.split('/').any(|part| part.len() > 200) {
        "a part of it is longer than 200 bytes"
    } else if name.split('/').any(|part| part.ends_with(['.', ' '])) {
        "a part of it ends in a dot or a space"
    } else if name.split('/').any(is_device) {
        "a part of it is the name of a device on Windows"
    } else if name.ends_with(".part") || name.ends_with(".part-map") {
        "its ending is kept for files that are not complete"
    } else {
        return Ok(());
    };
    Err(PlanError::Name {
        name: name.chars().take(200).collect(),
        why,
    })
}

fn is_device(part: &str) -> bool {
    let stem = part.split('.').next().unwrap_or(part).trim_end();
    let stem = stem.to_ascii_uppercase();
    matches!(stem.as_str(), "CON" | "PRN" | "AUX" | "NUL")
        || (stem.len() == 4
            && (stem.starts_with("COM") || stem.starts_with("LPT"))
            && stem.ends_with(|c: char| c.is_ascii_digit()))
}

/// Checks that blobs are consistent with one another.
pub(super) fn check_all(blobs: &[Blob]) -> Result<(), PlanError> {
    let mut names = HashSet::new();
    let mut total = 0u64;
    for blob in blobs {
        if !names.insert(blob.name.to_lowercase()) {
            return Err(PlanError::Duplicate {
                name: blob.name.clone(),
            });
        }
        total = total.checked_add(blob.size).ok_or(PlanError::TooLarge)?;
    }
    Ok(())
}

/// Parallelism, rate and patience.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Parallel requests.
    pub parallel: usize,
    /// Bytes per request; with block digests, whole blocks.
    pub segment_bytes: u64,
    /// Bytes per second over all requests.
    pub bytes_per_second: Option<u64>,
    /// Consecutive failures of a source that are tolerated; with one more, it is dropped.
    pub retries: u32,
    /// The wait after a source's first failure; each further one doubles it.
    pub backoff_base: Duration,
    /// The longest such wait.
    pub backoff_cap: Duration,
    /// The longest wait that a server may ask for; a source that asks for more is dropped.
    pub retry_after_cap: Duration,
    /// How long a request may go without its first byte.
    pub stall_timeout: Duration,
    /// Bytes per second that a request must bring from then on. One that brings fewer counts as stalled.
    pub least_rate: u64,
    /// The time over which that is measured.
    pub least_rate_over: Duration,
    /// How long a source that says nothing is waited for before another is asked beside it, for files of which
    /// any source's will do.
    pub grace: Duration,
    /// Seed of the waits' jitter, so that many clients don't come back at one moment.
    pub seed: u64,
}

impl Default for Limits {
    /// Four requests of 32 MiB at a time, at any speed; five retries, from half a second doubling to
    /// half a minute; five minutes for servers that ask; half a minute of silence, then 1 KiB a second over
    /// ten seconds; five seconds of grace.
    fn default() -> Self {
        Self {
            parallel: 4,
            segment_bytes: 32 << 20,
            bytes_per_second: None,
            retries: 5,
            backoff_base: Duration::from_millis(500),
            backoff_cap: Duration::from_secs(30),
            retry_after_cap: Duration::from_secs(300),
            stall_timeout: Duration::from_secs(30),
            least_rate: 1 << 10,
            least_rate_over: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            seed: 0,
        }
    }
}

impl Limits {
    /// Bytes that must come in [`least_rate_over`](Self::least_rate_over).
    pub(super) fn trickle(&self) -> u64 {
        let bytes = self.least_rate as f64 * self.least_rate_over.as_secs_f64();
        (bytes as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Algorithm;

    #[test]
    fn names_stay_below_their_folder() {
        for good in [
            "a",
            "shard_00000.bin",
            "tokenizer/vocab.json",
            "a b/…",
            ".gitattributes",
            "a..b",
        ] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        let long = "x".repeat(201);
        for bad in [
            "",
            "/a",
            "../a",
            "a/../b",
            "a//b",
            "a/",
            "./a",
            "a\\b",
            "C:a",
            "a\0",
            "a\n",
            "a.part",
            "a.part-map",
            "nul",
            "COM1.txt",
            "dir/aux.",
            "a ",
            &long,
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let blob = |name, size| Blob::new(name, size, Expected::SizeOnly).unwrap();
        assert_eq!(check_all(&[blob("a", 1), blob("b", 2)]), Ok(()));
        let error = check_all(&[blob("a", 1), blob("A", 2)]).unwrap_err();
        assert!(matches!(error, PlanError::Duplicate { .. }), "{error}");
        assert_eq!(
            check_all(&[blob("a", u64::MAX), blob("b", 1)]),
            Err(PlanError::TooLarge)
        );
        let blocks = BlockDigests::of(Algorithm::Blake3, 4, b"0123456789").unwrap();
        let error = blob("a", 11).with_blocks(blocks).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`a` has 11 bytes, but its block digests are for 10"
        );
    }
}
