//! What belongs to a package, and what of it is here already.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use sterna_delivery::fetch;
use sterna_delivery::hash::{Digest, Expected};
use sterna_delivery::store::{Blob, Group, Piece, Pull, Store};
use sterna_format::rdrr::{Manifest, Package, TensorMap};

use crate::hashes::{algorithm, digest, shard_blocks};

/// Bytes that a file beside the shards may have.
pub(super) const MAX_SMALL: usize = 256 << 20;

/// The files of a package besides its manifest.
pub(crate) struct PackageContents {
    /// Files with digests: first the shards, in their order.
    pub(crate) blobs: Vec<fetch::Blob>,
    /// Files that the manifest names without a digest.
    pub(crate) unverified: Vec<String>,
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
            blobs.push(fetch::Blob::new(name, *size, Expected::Digest(*digest))?);
        }
        let tokenizer = manifest.tokenizer.as_ref();
        let named = [
            manifest.tensor_map_file(),
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
            n_shards,
        })
    }

    /// Where the tensors are: `read` fetches the external map, which must be as its hash says.
    pub(crate) fn tensor_map(
        &self,
        manifest: &Manifest,
        read: impl FnOnce(&str, Option<Expected>) -> Result<Vec<u8>>,
    ) -> Result<Package> {
        Package::open(manifest.clone(), |name| {
            // Until the rest has come, what is inline is enough.
            if manifest.tensors.is_some() {
                return Ok(None);
            }
            let blob = self.blobs.iter().find(|blob| blob.name() == name);
            let bytes = read(name, blob.map(fetch::Blob::expected))?;
            let map = TensorMap::parse(&bytes).with_context(|| name.to_owned())?;
            Ok(Some(map))
        })
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
