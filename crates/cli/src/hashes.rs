//! Hashes as manifests write them, and as they are computed.
//!
//! `sterna-format` spells hashes and computes none; `sterna-delivery` computes them and reads no
//! manifest. Neither knows the other; here one becomes the other.

use sterna_delivery::hash::{Algorithm, BlockDigests, BlockDigestsError, Digest};
use sterna_format::rdrr::{self, HashAlgorithm, Manifest};

/// What the hashes of a manifest are computed with.
pub(crate) fn algorithm(manifest: &Manifest) -> Algorithm {
    match manifest.hash_algorithm {
        HashAlgorithm::Sha256 => Algorithm::Sha256,
        HashAlgorithm::Blake3 => Algorithm::Blake3,
    }
}

/// `algorithm` as manifests name it.
pub(crate) fn manifest_algorithm(algorithm: Algorithm) -> HashAlgorithm {
    match algorithm {
        Algorithm::Sha256 => HashAlgorithm::Sha256,
        Algorithm::Blake3 => HashAlgorithm::Blake3,
    }
}

/// A digest of a manifest as one that can be computed.
pub(crate) fn digest(algorithm: Algorithm, digest: &rdrr::Digest) -> Digest {
    Digest::new(algorithm, digest.0)
}

/// A computed digest as manifests have it.
pub(crate) fn manifest_digest(digest: &Digest) -> rdrr::Digest {
    rdrr::Digest(*digest.as_bytes())
}

/// What the blocks of shard `index` must be, where the manifest says it.
pub(crate) fn shard_blocks(
    manifest: &Manifest,
    index: usize,
) -> Result<Option<BlockDigests>, BlockDigestsError> {
    let blocks = (manifest.integrity.as_ref()).and_then(|i| i.shard_blocks.as_ref());
    let hashes = blocks.and_then(|blocks| Some((blocks.block_size, blocks.hashes.get(index)?)));
    let Some((block_size, hashes)) = hashes else {
        return Ok(None);
    };
    let of_block = |hash| digest(Algorithm::Blake3, hash);
    let digests = hashes.iter().map(of_block).collect();
    BlockDigests::new(manifest.shards[index].size, block_size, digests).map(Some)
}
