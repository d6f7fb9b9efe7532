//! What belongs to a package, and what of it is here already.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use sterna_delivery::fetch;
use sterna_delivery::hash::{Digest, Expected};
use sterna_delivery::store::{Blob, Group, Piece, Pull, Store};
use sterna_format::rdrr::{Manifest, Package};

use super::MAX_FILE_BYTES;
use crate::hashes::{algorithm, digest, shard_blocks};

/// The files of a package besides its manifest.
pub(crate) struct PackageContents {
    /// Files with digests: first the shards, in their order.
    pub(crate) blobs: Vec<fetch::Blob>,
    /// Files that the manifest names without a digest.
    pub(crate) unverified: Vec<String>,
    /// The file that says where the tensors are, unless only the manifest does.
    pub(crate) tensors_file: Option<String>,
    n_shards: usize,
}

/// The files beside the shards that a manifest gives hashes of, by name: sizes and digests.
pub(crate) fn hashed_files(manifest: &Manifest) -> BTreeMap<String, (u64, Digest)> {
    let algorithm = algorithm(manifest);
    let files = manifest.hashed_files().iter();
    files
        .map(|file| {
            (
                file.name.clone(),
                (file.size, digest(algorithm, &file.hash)),
            )
        })
        .collect()
}

impl PackageContents {
    /// Those that `manifest` names.
    pub(crate) fn of(manifest: &Manifest) -> Result<PackageContents> {
        let algorithm = algorithm(manifest);
        let mut blobs = Vec::new();
        for (i, shard) in manifest.shards.iter().enumerate() {
            let expected = Expected::Digest(digest(algorithm, &shard.hash));
            let mut blob = fetch::Blob::new(&shard.file_name, shard.size, expected)?;
            let blocks = shard_blocks(manifest, i).with_context(|| shard.file_name.clone())?;
            if let Some(digests) = blocks {
                blob = blob.with_blocks(digests)?;
            }
            blobs.push(blob);
        }
        let n_shards = blobs.len();
        let hashed = hashed_files(manifest);
        for (name, (size, digest)) in &hashed {
            if *size > MAX_FILE_BYTES {
                bail!(
                    "integrityExtensions.files.{name}.size: expected at most {MAX_FILE_BYTES} bytes, found {size}"
                );
            }
            blobs.push(fetch::Blob::new(name, *size, Expected::Digest(*digest))?);
        }
        let tokenizer = manifest.tokenizer.as_ref();
        let tensors_file = manifest.tensor_map_file().map(str::to_owned);
        let named = [
            tensors_file.as_deref(),
            tokenizer.and_then(|entry| entry.file.as_deref()),
            tokenizer.and_then(|entry| entry.sentencepiece_model.as_deref()),
        ];
        let mut unverified: Vec<String> = (named.into_iter().flatten())
            .filter(|name| !hashed.contains_key(*name))
            .map(str::to_owned)
            .collect();
        unverified.dedup();
        Ok(PackageContents {
            blobs,
            unverified,
            tensors_file,
            n_shards,
        })
    }

    /// What the bytes of the file called `name` must be, where the manifest says it.
    pub(crate) fn blob(&self, name: &str) -> Option<&fetch::Blob> {
        self.blobs.iter().find(|blob| blob.name() == name)
    }

    fn shard(&self, index: usize) -> Blob {
        let blob = &self.blobs[..self.n_shards][index];
        super::stored(blob).expect("shards have digests")
    }

    /// Where the groups will lie once the package is in the store.
    pub(crate) fn groups(&self, manifest: &Manifest, package: &Package) -> Vec<Group> {
        let algorithm = algorithm(manifest);
        let group = |group: &sterna_format::rdrr::Group| Group {
            digest: digest(algorithm, &group.hash),
            pieces: package
                .group_tensors(group)
                .flat_map(|tensor| tensor.pieces())
                .map(|span| Piece {
                    blob: self.shard(span.shard),
                    offset: span.offset,
                    len: span.size,
                })
                .collect(),
        };
        manifest.groups.iter().map(group).collect()
    }

    /// Copies the groups that other models in `store` have too, and zeros between tensors of one group,
    /// into the shards of `pull` that aren't there yet; gives the number of bytes. Whether they are right
    /// is found when the shards are verified.
    pub(crate) fn copy_groups(
        &self,
        store: &Store,
        pull: &Pull,
        manifest: &Manifest,
        package: &Package,
    ) -> Result<u64> {
        let known = store.groups()?;
        let algorithm = algorithm(manifest);
        let mut missing = Vec::with_capacity(self.n_shards);
        for i in 0..self.n_shards {
            let shard = self.shard(i);
            missing.push(pull.present(&shard)? == 0 && shard.size > 0);
        }
        let mut copied = 0;
        for group in &manifest.groups {
            let Some(pieces) = known.find(&digest(algorithm, &group.hash)) else {
                continue;
            };
            let mut from = Pieces::new(pieces);
            let mut end_of_last = None;
            for span in package
                .group_tensors(group)
                .flat_map(|tensor| tensor.pieces())
            {
                let shard = self.shard(span.shard);
                let mut at = span.offset;
                for piece in from.take(span.size) {
                    if missing[span.shard] && pull.copy_from(&shard, at, &piece)? {
                        copied += piece.len;
                    }
                    at += piece.len;
                }
                if let Some((before, end)) = end_of_last
                    && before == span.shard
                    && missing[span.shard]
                    && end < span.offset
                    && span.offset - end < sterna_format::rdrr::TENSOR_ALIGNMENT
                {
                    pull.write_at(&shard, end, &vec![0; (span.offset - end) as usize])?;
                }
                end_of_last = Some((span.shard, span.offset + span.size));
            }
        }
        Ok(copied)
    }
}

/// Pieces that are taken from the front.
struct Pieces<'a> {
    pieces: &'a [Piece],
    /// Bytes taken of the first.
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
