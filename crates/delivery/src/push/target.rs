//! Where packages are sent.

use super::body::Body;
use crate::{
    blocking::GivenUp,
    fetch::Cancel,
    hash::{Digest, Mismatch},
};

/// A place of blobs by their SHA-256, with one manifest that names those of a package.
pub(super) trait Target: Sync {
    /// Its address.
    fn name(&self) -> &str;

    /// What it has now. Errors: [`TargetError`].
    fn current(&self, cancel: &Cancel) -> Result<Current, TargetError>;

    /// Whether it has the blob with this digest. Errors: [`TargetError`].
    fn has(&self, digest: &Digest, size: u64, cancel: &Cancel) -> Result<bool, TargetError>;

    /// Stores a blob, whole or not at all. Errors: [`TargetError`].
    fn put(&self, body: &Body, cancel: &Cancel) -> Result<(), TargetError>;

    /// Makes `manifest` what the place has, if it still has what it had `before`. Errors: [`TargetError`].
    fn commit(
        &self,
        manifest: &[u8],
        digest: &Digest,
        before: &Current,
        cancel: &Cancel,
    ) -> Result<(), TargetError>;

    /// Fails unless the manifest that it has now has this digest. Errors: [`TargetError`].
    fn confirm(&self, digest: &Digest, cancel: &Cancel) -> Result<(), TargetError> {
        let now = self.current(cancel)?;
        match now.digest == Some(*digest) {
            true => Ok(()),
            false => Err(TargetError::Conflict(now.digest)),
        }
    }
}

/// What a place has at some moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Current {
    /// The digest of its manifest, if there is one.
    pub(super) digest: Option<Digest>,
    /// The ETag and the version by which the place tells its states apart, if it does.
    pub(super) state: Option<(Option<String>, Option<String>)>,
}

/// Why a place didn't do what it was asked.
#[derive(Debug)]
pub(super) enum TargetError {
    /// It refuses, and would again.
    Refused(String),
    /// It didn't answer, or can't now.
    Failed(String),
    /// It has another manifest than before.
    Conflict(Option<Digest>),
    /// The file isn't what it was when it was checked.
    Damaged(Mismatch),
    /// Cancelled on this side.
    Cancelled,
}

impl TargetError {
    /// Whether asking again may help.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl From<GivenUp> for TargetError {
    fn from(why: GivenUp) -> Self {
        match why {
            GivenUp::Stalled => Self::Failed("nothing moved for too long".to_owned()),
            GivenUp::Interrupted => Self::Cancelled,
        }
    }
}
