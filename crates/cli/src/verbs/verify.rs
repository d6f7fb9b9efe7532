//! `sterna verify`: every byte of a package against what its manifest says.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use clap::Args;
use serde::Serialize;
use sterna::native::{
    BUILTIN, FileSet, LocalFolder, SourceFile, StoredFiles, expect_file, read_package,
};
use sterna_delivery::hash::{
    Algorithm, BlockDigests, BlockHasher, Digest, Expected, Hasher, Verified,
};
use sterna_delivery::package::{Contents, SignatureState, hashed_files, shard_blocks};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_delivery::store::StoreError;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest, Package, Tensor};

use crate::output;
use crate::progress::Progress;
use crate::{model, pull, trust};

/// Check every hash of a package, and its signature
///
/// Shards, their blocks, groups, tensor trees, the hash of the whole and the files beside the shards, as the
/// manifest gives them. All files of a model in the store are also compared with what they were when they
/// were fetched, its manifest too.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sterna verify llama-rdrr")]
pub(crate) struct Verify {
    /// Folder with a manifest.json, or the name of a model in the store
    #[arg(value_name = "PACKAGE")]
    package: PathBuf,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Findings {
    pub(crate) ok: bool,
    pub(crate) n_shards: usize,
    pub(crate) n_groups: usize,
    /// Files that are no shards, of which hashes are known.
    pub(crate) n_files: usize,
    /// Bytes of shards and these files.
    pub(crate) n_bytes: u64,
    /// The name of the key it is signed with.
    pub(crate) signer: Option<String>,
    /// Problems, with their places.
    pub(crate) problems: Vec<String>,
    /// Oddities that are not problems.
    pub(crate) remarks: Vec<String>,
    /// Whether fetching the package again helps.
    #[serde(skip)]
    is_repairable: bool,
    /// Whether there is a manifest to compare it with.
    #[serde(skip)]
    is_package: bool,
}

impl Verify {
    pub(crate) fn run(self) -> Result<()> {
        let name = self.package.to_str().filter(|_| !self.package.exists());
        let findings = match name {
            Some(name) => verify_stored(name)?,
            None => {
                let place = self.package.display().to_string();
                verify(&place, &LocalFolder::new(&self.package))?
            }
        };
        if self.json {
            output::json(&findings)?;
        } else {
            for remark in &findings.remarks {
                output::note(format_args!("note: {remark}"));
            }
            for problem in &findings.problems {
                output::line(problem)?;
            }
        }
        if !findings.ok {
            let repair = match name {
                Some(name) if findings.is_repairable => {
                    format!("; `sterna pull {name}` fetches what is wrong again")
                }
                _ => String::new(),
            };
            bail!(
                "{}: {}{repair}",
                self.package.display(),
                match findings.problems.len() {
                    1 => "1 problem".to_owned(),
                    n => format!("{n} problems"),
                }
            );
        }
        if !self.json {
            output::line(format_args!(
                "{}: {}",
                self.package.display(),
                findings.summary()
            ))?;
        }
        Ok(())
    }
}

/// Reads all files of a model in the store again, and checks a package as if it lay in a folder. Files that have
/// changed are put aside, so that the next pull fetches them.
fn verify_stored(name: &str) -> Result<Findings> {
    if name == BUILTIN {
        bail!("{BUILTIN}: expected a package, found the model inside this program");
    }
    let store = pull::store()?;
    let damage = store.verify(name).map_err(|error| match error {
        StoreError::NoSuchModel { .. } | StoreError::Name { .. } => anyhow!(model::absent(name)),
        error => pull::with_mending(error),
    })?;
    if damage.is_empty() {
        let model = store.model(name).map_err(pull::with_mending)?;
        if model.entry().files.contains_key(MANIFEST_FILE) {
            return verify(name, &StoredFiles::new(Arc::new(model)));
        }
        return Ok(Findings {
            ok: true,
            n_files: model.entry().files.len(),
            n_bytes: model.entry().size(),
            ..Findings::default()
        });
    }
    let mut findings = Findings {
        is_repairable: true,
        ..Findings::default()
    };
    let problems = damage
        .iter()
        .map(|damage| format!("{}: {}", damage.file, damage.problem));
    findings.problems.extend(problems);
    let is_damaged = |file: &str| damage.iter().any(|damage| damage.file == file);
    if !is_damaged(MANIFEST_FILE) && !is_damaged(SIGNATURE_FILE) {
        let models = store.list()?;
        if let Some(model) = models.iter().find(|model| model.name == name) {
            let signature = SignatureState::of(&store, &trust::list()?, name, &model.entry);
            findings.signer = signature.signer().map(str::to_owned);
            let refusal = signature.refusal().map(trust::refusal_text);
            findings.problems.extend(refusal);
        }
    }
    Ok(findings)
}

/// Checks the package at `place`, which has `files`. A manifest that can't be believed at all is an error.
fn verify(place: &str, files: &dyn FileSet) -> Result<Findings> {
    let bytes = expect_file(files, MANIFEST_FILE)?.read_small()?;
    let package = read_package(place, files)?;
    let manifest = package.manifest();
    let mut findings = Findings {
        is_package: true,
        remarks: package.warnings(),
        ..Findings::default()
    };
    let signature = match files.file(SIGNATURE_FILE)? {
        Some(file) => Some(file.read_small()?),
        None => None,
    };
    let signature = match &signature {
        Some(bytes) => Some(std::str::from_utf8(bytes).context("the signature: expected text")?),
        None => None,
    };
    match trust::check_signature(place, &bytes, signature) {
        Ok(signer) => findings.signer = signer,
        Err(error) => findings.problems.push(format!("{error:#}")),
    }
    for (name, hashed) in hashed_files(manifest) {
        findings.n_files += 1;
        match expect_file(files, name) {
            Ok(file) => {
                findings.n_bytes += hashed.size;
                findings.check(name, &file, hashed.size, Expected::Digest(hashed.hash))?;
            }
            Err(error) => findings.problems.push(format!("{error:#}")),
        }
    }
    for name in Contents::of(place, manifest)?.unverified() {
        findings
            .remarks
            .push(format!("{name}: the manifest has no hash of it"));
    }
    let shards = findings.check_shards(manifest, files)?;
    findings.check_groups(&package, &shards);
    findings.check_trees(&package, &shards)?;
    findings.ok = findings.problems.is_empty();
    Ok(findings)
}

/// The bytes of a tensor, piece by piece; `None` if a shard with some of them is missing.
fn bytes_of<'a>(tensor: &Tensor, shards: &'a [Option<Bytes>]) -> Option<Vec<&'a [u8]>> {
    let pieces = tensor.pieces().iter().map(|span| {
        let shard = shards[span.shard].as_ref()?;
        // A package's pieces are within its shards, whose sizes were compared.
        Some(&shard[span.offset as usize..][..span.size as usize])
    });
    pieces.collect()
}

/// Whether a digest that is labelled SHA-256 is the BLAKE3 of `pieces`.
fn is_labelled<'a>(digest: &Digest, pieces: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut hasher = Hasher::new(Algorithm::Blake3);
    pieces.for_each(|piece| hasher.update(piece));
    digest.algorithm() == Algorithm::Sha256 && hasher.finish().as_bytes() == digest.as_bytes()
}

impl Findings {
    /// What was found right, in one line.
    fn summary(&self) -> String {
        let size = output::Bytes(self.n_bytes);
        if !self.is_package {
            let files = output::counted(self.n_files, "file");
            return format!("{size} in {files}, as they were fetched; no package, so not signed");
        }
        let mut parts = vec![
            output::counted(self.n_shards, "shard"),
            output::counted(self.n_groups, "group"),
        ];
        if self.n_files > 0 {
            parts.push(output::counted(self.n_files, "other file"));
        }
        let last = parts.pop().unwrap_or_default();
        let signed = match &self.signer {
            Some(name) => format!("signed by {name}"),
            None => "not signed".to_owned(),
        };
        format!(
            "{size} in {} and {last} are as the manifest says; {signed}",
            parts.join(", ")
        )
    }

    /// Checks all shards, their blocks, and the hash of the whole; gives their bytes, `None` for those that
    /// aren't there in their size.
    fn check_shards(
        &mut self,
        manifest: &Manifest,
        files: &dyn FileSet,
    ) -> Result<Vec<Option<Bytes>>> {
        let progress = Progress::bytes("verifying", manifest.total_size);
        let mut shards = Vec::with_capacity(manifest.shards.len());
        let mut whole = Hasher::new(Algorithm::Blake3);
        for (i, shard) in manifest.shards.iter().enumerate() {
            self.n_shards += 1;
            let name = &shard.file_name;
            let file = match expect_file(files, name) {
                Ok(file) => file,
                Err(error) => {
                    self.problems.push(format!("{error:#}"));
                    shards.push(None);
                    continue;
                }
            };
            let expected = Expected::Digest(shard.hash);
            self.check(name, &file, shard.size, expected)?;
            if file.len() != shard.size {
                shards.push(None);
                continue;
            }
            let bytes = file.bytes()?;
            if let Some(said) = shard_blocks(manifest, i)? {
                let found = BlockDigests::of(Algorithm::Blake3, said.block_size(), &bytes)?;
                let mut pairs = found.digests().iter().zip(said.digests());
                if let Some(block) = pairs.position(|(found, said)| found != said) {
                    let problem = format!("{name}: block {block} isn't as its hash says");
                    self.problems.push(problem);
                }
            }
            whole.update(&bytes);
            self.n_bytes += shard.size;
            progress.add(shard.size);
            shards.push(Some(bytes));
        }
        if let Some(said) = &manifest.blake3_full
            && shards.iter().all(Option::is_some)
            && whole.finish() != *said
        {
            self.problems
                .push("blake3Full: the shards together have another hash".to_owned());
        }
        Ok(shards)
    }

    /// Checks the hash of every group that is there.
    fn check_groups(&mut self, package: &Package, shards: &[Option<Bytes>]) {
        let algorithm = package.manifest().hash_algorithm;
        for group in &package.manifest().groups {
            self.n_groups += 1;
            let tensors = package.group_tensors(group);
            let pieces: Option<Vec<_>> = tensors.map(|t| bytes_of(t, shards)).collect();
            let Some(pieces) = pieces else {
                continue;
            };
            let mut hasher = Hasher::new(algorithm);
            let all = pieces.iter().flatten();
            all.for_each(|piece| hasher.update(piece));
            let (expected, found) = (group.hash, hasher.finish());
            if found == expected {
                continue;
            }
            let id = &group.id;
            match is_labelled(&expected, pieces.iter().flatten().copied()) {
                true => self.remarks.push(format!(
                    "group `{id}`: the manifest calls its hash SHA-256, and it is BLAKE3"
                )),
                false => self.problems.push(format!(
                    "group `{id}`: expected {algorithm} {expected}, found {found}"
                )),
            }
        }
    }

    /// Checks the root of the hash tree of every tensor that is there and has one.
    fn check_trees(&mut self, package: &Package, shards: &[Option<Bytes>]) -> Result<()> {
        let integrity = package.manifest().integrity.as_ref();
        let Some(merkle) = integrity.and_then(|i| i.block_merkle.as_ref()) else {
            return Ok(());
        };
        for (name, root) in &merkle.roots {
            let tensor = package.tensors().get(name);
            let Some(pieces) = tensor.and_then(|t| bytes_of(t, shards)) else {
                continue;
            };
            let mut blocks = BlockHasher::new(Algorithm::Sha256, merkle.block_size)?;
            pieces.iter().for_each(|piece| blocks.update(piece));
            if blocks.finish().merkle_root() != *root {
                self.problems
                    .push(format!("tensor `{name}`: its hash tree has another root"));
            }
        }
        Ok(())
    }

    /// Checks one file.
    fn check(
        &mut self,
        name: &str,
        file: &SourceFile,
        size: u64,
        expected: Expected,
    ) -> Result<()> {
        if file.len() != size {
            let found = file.len();
            self.problems
                .push(format!("{name}: expected {size} bytes, found {found}"));
            return Ok(());
        }
        match expected.verify(&file.bytes()?) {
            Ok(Verified::Blake3Variant) => self.remarks.push(format!(
                "{name}: its hash is not BLAKE3 but the variant that the existing JavaScript runtime computes"
            )),
            Ok(Verified::LabelledSha256) => self.remarks.push(format!(
                "{name}: the manifest calls its hash SHA-256, and it is BLAKE3"
            )),
            Ok(_) => {}
            Err(mismatch) => self.problems.push(format!("{name}: {mismatch}")),
        }
        Ok(())
    }
}
