//! The files of a package.

use std::collections::BTreeMap;

use sterna_format::rdrr::{FileHash, Manifest, Package, TensorMap};

use super::{MAX_FILE_BYTES, PackageError};
use crate::{
    fetch::{Blob, PlanError},
    hash::{BlockDigests, BlockDigestsError, Digest, Expected},
};

/// A file with a known digest.
#[derive(Debug, Clone)]
pub struct HashedFile {
    blob: Blob,
    digest: Digest,
}

impl HashedFile {
    /// A file of `size` bytes. `name` is its path below every source, with `/` between parts.
    ///
    /// Errors: [`PlanError::Name`].
    pub fn new(name: &str, size: u64, digest: Digest) -> Result<Self, PlanError> {
        let blob = Blob::new(name, size, Expected::Digest(digest))?;
        Ok(Self { blob, digest })
    }

    /// The same with digests of its blocks, see [`Blob::with_blocks`]. Errors:
    /// [`PlanError::BlockDigests`].
    pub fn with_blocks(self, blocks: BlockDigests) -> Result<Self, PlanError> {
        Ok(Self {
            blob: self.blob.with_blocks(blocks)?,
            digest: self.digest,
        })
    }

    /// Its path within the package.
    pub fn name(&self) -> &str {
        self.blob.name()
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.blob.size()
    }

    /// Their digest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// How it is fetched.
    pub fn blob(&self) -> &Blob {
        &self.blob
    }

    /// Its identity in the store.
    #[cfg(not(target_family = "wasm"))]
    pub fn stored(&self) -> crate::store::Blob {
        crate::store::Blob {
            digest: self.digest,
            size: self.size(),
        }
    }
}

/// A blob without a known digest is returned unchanged.
impl TryFrom<Blob> for HashedFile {
    type Error = Blob;

    fn try_from(blob: Blob) -> Result<Self, Blob> {
        match blob.expected() {
            Expected::Digest(digest) => Ok(Self { blob, digest }),
            _ => Err(blob),
        }
    }
}

/// The configuration of a checkpoint, which a package may have beside its manifest.
pub const CONFIG_FILE: &str = "config.json";

/// The files of a package besides its manifest.
#[derive(Debug, Clone)]
pub struct Contents {
    /// First the shards, in their order, then the others.
    files: Vec<HashedFile>,
    n_shards: usize,
    unverified: Vec<String>,
    tensor_map_file: Option<String>,
}

/// The files other than shards that a manifest has digests of, by name.
pub fn hashed_files(manifest: &Manifest) -> BTreeMap<&str, &FileHash> {
    let files = manifest.hashed_files().iter();
    files.map(|file| (file.name.as_str(), file)).collect()
}

/// How the blocks of shard `index` are verified, if the manifest says so.
///
/// Errors: [`BlockDigestsError`] unless there is one digest for each block.
pub fn shard_blocks(
    manifest: &Manifest,
    index: usize,
) -> Result<Option<BlockDigests>, BlockDigestsError> {
    let blocks = (manifest.integrity.as_ref()).and_then(|i| i.shard_blocks.as_ref());
    let (Some(blocks), Some(shard)) = (blocks, manifest.shards.get(index)) else {
        return Ok(None);
    };
    let Some(digests) = blocks.hashes.get(index) else {
        return Ok(None);
    };
    BlockDigests::new(shard.size, blocks.block_size, digests.clone()).map(Some)
}

impl Contents {
    /// Those of `manifest`; `from` is where the package is.
    ///
    /// Errors: [`PackageError`] for files that can't be fetched or are too large to be read.
    pub fn of(from: &str, manifest: &Manifest) -> Result<Self, PackageError> {
        let from = || from.to_owned();
        let bad_file = |problem| PackageError::File {
            from: from(),
            problem,
        };
        let mut files = Vec::new();
        for (i, shard) in manifest.shards.iter().enumerate() {
            let file = HashedFile::new(&shard.file_name, shard.size, shard.hash);
            let mut file = file.map_err(bad_file)?;
            let blocks = shard_blocks(manifest, i).map_err(|problem| PackageError::Blocks {
                from: from(),
                file: shard.file_name.clone(),
                problem,
            })?;
            if let Some(digests) = blocks {
                file = file.with_blocks(digests).map_err(bad_file)?;
            }
            files.push(file);
        }
        let n_shards = files.len();
        let hashed = hashed_files(manifest);
        for (name, file) in &hashed {
            if file.size > MAX_FILE_BYTES {
                return Err(PackageError::FileTooLarge {
                    from: from(),
                    name: (*name).to_owned(),
                    size: file.size,
                });
            }
            files.push(HashedFile::new(name, file.size, file.hash).map_err(bad_file)?);
        }
        let tokenizer = manifest.tokenizer.as_ref();
        let tensor_map_file = manifest.tensor_map_file().map(str::to_owned);
        let named = [
            tensor_map_file.as_deref(),
            tokenizer.and_then(|entry| entry.file.as_deref()),
            tokenizer.and_then(|entry| entry.sentencepiece_model.as_deref()),
        ];
        let mut unverified: Vec<String> = (named.into_iter().flatten())
            .filter(|name| !hashed.contains_key(name))
            .map(str::to_owned)
            .collect();
        unverified.dedup();
        Ok(Self {
            files,
            n_shards,
            unverified,
            tensor_map_file,
        })
    }

    /// All files with digests: first the shards, in their order.
    pub fn files(&self) -> &[HashedFile] {
        &self.files
    }

    /// The shards, in their order.
    pub fn shards(&self) -> &[HashedFile] {
        &self.files[..self.n_shards]
    }

    /// The files with digests that are not shards, by name.
    pub fn beside(&self) -> &[HashedFile] {
        &self.files[self.n_shards..]
    }

    /// Names of the files that the manifest names without a digest.
    pub fn unverified(&self) -> &[String] {
        &self.unverified
    }

    /// Whether [`CONFIG_FILE`] beside the manifest counts: that has neither a configuration nor what one can be
    /// made of, and no digests of files, without which others are ignored.
    pub fn may_have_config(&self, manifest: &Manifest) -> bool {
        manifest.config.is_none()
            && manifest.inference.is_none()
            && !manifest.is_lora()
            && self.beside().is_empty()
    }

    /// The file that contains the tensor map, unless it is part of the manifest.
    pub fn tensor_map_file(&self) -> Option<&str> {
        self.tensor_map_file.as_deref()
    }

    /// The file called `name`, if its digest is known.
    pub fn file(&self, name: &str) -> Option<&HashedFile> {
        self.files.iter().find(|file| file.name() == name)
    }

    /// Combines the manifest with the bytes of its tensor map file; `from` is where the package is.
    ///
    /// Errors: [`PackageError::TensorMap`], [`PackageError::Contradiction`].
    pub fn package(
        &self,
        from: &str,
        manifest: Manifest,
        tensor_map: Option<&[u8]>,
    ) -> Result<Package, PackageError> {
        let external = match (&self.tensor_map_file, tensor_map) {
            (Some(file), Some(bytes)) => {
                let map = TensorMap::parse(bytes).map_err(|problem| PackageError::TensorMap {
                    from: from.to_owned(),
                    file: file.clone(),
                    problem,
                })?;
                Some(map)
            }
            _ => None,
        };
        Package::new(manifest, external).map_err(|problem| PackageError::Contradiction {
            from: from.to_owned(),
            problem,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn manifest(files: &str) -> Manifest {
        let text = format!(
            r#"{{"version": 1, "modelId": "m", "modelType": "transformer", "quantization": "F32",
            "hashAlgorithm": "sha256", "totalSize": 32, "tensorsFile": "tensors.json", "groups": {{}},
            "architecture": "x", "config": {{}}, "tokenizer": {{"type": "bundled", "file": "tokenizer.json"}},
            "shards": [{{"index": 0, "fileName": "s.bin", "size": 32, "hash": "{HASH}"}}],
            "integrityExtensions": {{"contractVersion": 1, "files": {{{files}}}}}}}"#
        );
        Manifest::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn files_with_digests_and_without() {
        let manifest = manifest(&format!(
            r#""tokenizer.json": {{"size": 7, "hash": "{HASH}"}}, "a.txt": {{"size": 1, "hash": "{HASH}"}}"#
        ));
        let contents = Contents::of("here", &manifest).unwrap();
        let names: Vec<_> = contents.files().iter().map(HashedFile::name).collect();
        assert_eq!(names, ["s.bin", "a.txt", "tokenizer.json"]);
        assert_eq!(contents.shards().len(), 1);
        assert_eq!(contents.unverified(), ["tensors.json"]);
        assert_eq!(contents.tensor_map_file(), Some("tensors.json"));
        let file = contents.file("tokenizer.json").unwrap();
        assert_eq!((file.size(), file.digest().to_string()), (7, HASH.into()));
        assert!(contents.file("tensors.json").is_none());
    }

    #[test]
    fn files_that_nothing_would_read_are_refused() {
        let size = MAX_FILE_BYTES + 1;
        let files = format!(r#""tokenizer.json": {{"size": {size}, "hash": "{HASH}"}}"#);
        let error = Contents::of("here", &manifest(&files)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "here: integrityExtensions.files.tokenizer.json.size: expected at most 67108864 bytes, \
             found 67108865"
        );
    }
}
