//! What is wrong with a package: everything at once, each with its place.

use std::fmt;

use crate::json::quoted;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where, such as `shards[3].size`; empty for the file as a whole.
    pub path: String,
    /// What was expected there.
    pub expected: String,
    /// What does.
    pub found: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = match self.path.as_str() {
            "" => "the file",
            path => path,
        };
        write!(
            f,
            "{path}: expected {}, found {}",
            self.expected, self.found
        )
    }
}

/// Everything that is wrong with a manifest, a tensor map or a package, in the order it was met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    listed: Vec<Problem>,
    more: usize,
}

/// Problems that are kept; of a file with more, the others are counted.
const MAX_LISTED: usize = 100;

impl Problems {
    pub(super) const fn new() -> Problems {
        Problems {
            listed: Vec::new(),
            more: 0,
        }
    }

    /// The problems, up to the first hundred.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Problem> {
        self.listed.iter()
    }

    /// How many there are, those beyond the first hundred included.
    pub fn len(&self) -> usize {
        self.listed.len() + self.more
    }

    /// True if nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The place of a value, written only when something is wrong there.
#[derive(Debug, Clone, Copy)]
pub(super) enum Path<'p> {
    Root,
    Key(&'p Path<'p>, &'p str),
    Index(&'p Path<'p>, usize),
    /// One that is written out already.
    Raw(&'p str),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Raw(text) => f.write_str(text),
            Path::Index(parent, i) => write!(f, "{parent}[{i}]"),
            Path::Key(parent, key) => {
                // Names with dots of their own, such as those of tensors, are in brackets.
                let is_plain =
                    !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                match (parent, is_plain) {
                    (Path::Root, true) => f.write_str(key),
                    (_, true) => write!(f, "{parent}.{key}"),
                    (_, false) => write!(f, "{parent}[{}]", quoted(key)),
                }
            }
        }
    }
}

/// The most values that are kept though nothing here knows what they mean.
pub(super) const MAX_UNKNOWN: usize = 200_000;

/// Problems while they are being found, and what else a reader counts.
#[derive(Debug)]
pub(super) struct Notes {
    problems: Problems,
    /// How many more values of unknown meaning may be kept.
    pub(super) unknown_left: usize,
}

impl Notes {
    pub(super) fn new() -> Notes {
        Notes {
            problems: Problems::new(),
            unknown_left: MAX_UNKNOWN,
        }
    }

    /// Records that `found` is at `path` where `expected` should be.
    pub(super) fn add(
        &mut self,
        path: Path<'_>,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) {
        if self.problems.listed.len() == MAX_LISTED {
            self.problems.more += 1;
            return;
        }
        self.problems.listed.push(Problem {
            path: path.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        });
    }

    /// True if something is wrong.
    pub(super) fn is_bad(&self) -> bool {
        !self.problems.is_empty()
    }

    /// `value`, or what is wrong if something is.
    pub(super) fn or<T>(self, value: T) -> Result<T, Problems> {
        match self.is_bad() {
            false => Ok(value),
            true => Err(self.problems),
        }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.listed.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        match self.more {
            0 => Ok(()),
            n => write!(f, "\nand {n} more"),
        }
    }
}

impl std::error::Error for Problems {}
