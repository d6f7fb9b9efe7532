//! Packages in the store, or being fetched into it.

use sterna_format::rdrr::{self, MANIFEST_FILE, Manifest, Package, Span, TENSOR_ALIGNMENT};

use super::{Contents, MAX_FILE_BYTES, PackageError, check_signature, signature_text};
use crate::sign::{SIGNATURE_FILE, SignatureError, TrustList};
use crate::store::{Entry, Group, Piece, Pull, Store, StoreError};

/// The signature state of a model in the store, by the current trust list.
#[derive(Debug)]
pub enum SignatureState {
    /// It is not a package, so there is nothing to sign.
    NoPackage,
    /// An unsigned package.
    Unsigned,
    /// Signed with the key that is trusted under this name.
    Signed(String),
    /// Signed by a key that isn't trusted, or wrongly, or one of the two files has changed. The model is not
    /// used.
    Refused(SignatureRefusal),
}

/// Why a model in the store is refused for its signature.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureRefusal {
    /// The signature is not trusted.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The manifest or the signature can't be read.
    #[error("{name}: {file}: {problem}")]
    Store {
        /// The model.
        name: String,
        /// The file.
        file: &'static str,
        /// Why not.
        problem: Box<StoreError>,
    },
}

impl SignatureRefusal {
    /// True if the signature may be right, but its key is not on the trust list.
    pub fn is_unknown_key(&self) -> bool {
        matches!(
            self,
            Self::Package(PackageError::Signature {
                problem: SignatureError::UnknownKey { .. },
                ..
            })
        )
    }
}

impl SignatureState {
    /// That of the model `name` in `store`, with the files of `entry`.
    pub fn of(store: &Store, trust: &TrustList, name: &str, entry: &Entry) -> Self {
        if !entry.files.contains_key(MANIFEST_FILE) {
            return Self::NoPackage;
        }
        match signer(store, trust, name, entry) {
            Ok(Some(signer)) => Self::Signed(signer),
            Ok(None) => Self::Unsigned,
            Err(refusal) => Self::Refused(refusal),
        }
    }

    /// The name of the key, if it is trusted.
    pub fn signer(&self) -> Option<&str> {
        match self {
            Self::Signed(name) => Some(name),
            _ => None,
        }
    }

    /// Why the model is not used, if so.
    pub fn refusal(&self) -> Option<&SignatureRefusal> {
        match self {
            Self::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }
}

fn signer(
    store: &Store,
    trust: &TrustList,
    name: &str,
    entry: &Entry,
) -> Result<Option<String>, SignatureRefusal> {
    let read = |file: &'static str| match entry.files.get(file) {
        Some(blob) => {
            let bytes = store.read(blob, MAX_FILE_BYTES).map(Some);
            bytes.map_err(|problem| SignatureRefusal::Store {
                name: name.to_owned(),
                file,
                problem: Box::new(problem),
            })
        }
        None => Ok(None),
    };
    let Some(signature) = read(SIGNATURE_FILE)? else {
        return Ok(None);
    };
    let signature = signature_text(name, signature)?;
    let Some(manifest) = read(MANIFEST_FILE)? else {
        return Ok(None);
    };
    Ok(check_signature(name, trust, &manifest, Some(&signature))?)
}

impl Contents {
    /// Where the groups will be once the package is in the store.
    pub fn groups(&self, manifest: &Manifest, package: &Package) -> Vec<Group> {
        let group = |group: &rdrr::Group| Group {
            digest: group.hash,
            pieces: group_spans(package, group)
                .map(|span| Piece {
                    blob: self.shards()[span.shard].stored(),
                    offset: span.offset,
                    len: span.size,
                })
                .collect(),
        };
        manifest.groups.iter().map(group).collect()
    }

    /// Copies the groups that other models in `store` also have into the shards of `pull` that aren't there yet;
    /// returns the number of bytes. They are verified with the shards.
    pub fn copy_groups(
        &self,
        store: &Store,
        pull: &Pull,
        manifest: &Manifest,
        package: &Package,
    ) -> Result<u64, StoreError> {
        let known = store.groups()?;
        let shards: Vec<_> = self.shards().iter().map(|file| file.stored()).collect();
        let mut missing = Vec::with_capacity(shards.len());
        for shard in &shards {
            missing.push(pull.present(shard)? == 0 && shard.size > 0);
        }
        let mut copied = 0;
        for group in &manifest.groups {
            let Some(pieces) = known.find(&group.hash) else {
                continue;
            };
            let mut from = Pieces::new(pieces);
            for span in group_spans(package, group) {
                let mut at = span.offset;
                for piece in from.take(span.size) {
                    if missing[span.shard] && pull.copy_from(&shards[span.shard], at, &piece)? {
                        copied += piece.len;
                    }
                    at += piece.len;
                }
            }
        }
        Ok(copied)
    }

    /// Writes the zeros between tensors into the shards of `pull`, where what is around them has been copied or made.
    /// They are verified with the shards.
    pub fn fill_gaps(&self, pull: &Pull, package: &Package) -> Result<(), StoreError> {
        let mut spans = vec![Vec::new(); self.shards().len()];
        for tensor in package.tensors().iter() {
            for span in tensor.pieces() {
                spans[span.shard].push(span.offset..span.offset + span.size);
            }
        }
        for (shard, mut spans) in self.shards().iter().zip(spans) {
            let shard = shard.stored();
            let arrived = pull.extents(&shard)?;
            let is_here = |at: u64| arrived.iter().any(|range| range.contains(&at));
            spans.sort_by_key(|span| span.start);
            // What is behind the last tensor, too.
            spans.push(shard.size..shard.size);
            for pair in spans.windows(2) {
                let (start, end) = (pair[0].end, pair[1].start);
                let Some(len) = end.checked_sub(start).filter(|len| *len < TENSOR_ALIGNMENT) else {
                    continue;
                };
                let is_around =
                    is_here(start.saturating_sub(1)) && (end == shard.size || is_here(end));
                if len > 0 && is_around && !is_here(start) {
                    pull.write_at(&shard, start, &vec![0; len as usize])?;
                }
            }
        }
        Ok(())
    }
}

/// Where the bytes of `group` are, in their order.
pub(crate) fn group_spans<'a>(
    package: &'a Package,
    group: &'a rdrr::Group,
) -> impl Iterator<Item = Span> + 'a {
    let tensors = package.group_tensors(group);
    tensors.flat_map(|tensor| tensor.pieces()).copied()
}

/// Pieces that are taken from the front.
struct Pieces<'a> {
    pieces: &'a [Piece],
    /// Bytes consumed of the first.
    taken: u64,
}

impl<'a> Pieces<'a> {
    fn new(pieces: &'a [Piece]) -> Pieces<'a> {
        Pieces { pieces, taken: 0 }
    }

    /// The next `len` bytes, or all there are.
    fn take(&mut self, mut len: u64) -> Vec<Piece> {
        let mut out = Vec::new();
        while len > 0
            && let [first, rest @ ..] = self.pieces
        {
            let n = len.min(first.len - self.taken);
            if n > 0 {
                out.push(Piece {
                    offset: first.offset + self.taken,
                    len: n,
                    ..*first
                });
            }
            self.taken += n;
            len -= n;
            if self.taken == first.len {
                (self.pieces, self.taken) = (rest, 0);
            }
        }
        out
    }
}
