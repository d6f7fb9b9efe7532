//! `sterna verify`: every byte of a package against what its manifest says.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_delivery::LocalFile;
use sterna_delivery::hash::{Algorithm, BlockDigests, Expected, Hasher, Verified};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest, Package, TensorMap};

use crate::convert::{Blocks, merkle_root};
use crate::output::{self, Bytes};
use crate::progress::Progress;
use crate::pull::{self, algorithm, check_signature, contents::hashed_files, digest};

/// Check every hash of a package, and its signature
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

/// What was found.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Findings {
    pub(crate) ok: bool,
    pub(crate) n_shards: usize,
    pub(crate) n_groups: usize,
    pub(crate) n_bytes: u64,
    /// The name of the key it is signed with.
    pub(crate) signer: Option<String>,
    /// What is wrong, with the place.
    pub(crate) problems: Vec<String>,
    /// What is odd, but not wrong.
    pub(crate) remarks: Vec<String>,
}

impl Verify {
    pub(crate) fn run(self) -> Result<()> {
        let name = self.package.to_str().filter(|_| !self.package.exists());
        let findings = match name {
            Some(name) => verify_stored(name)?,
            None => verify(&self.package)?,
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
                Some(name) => format!("; `sterna pull {name}` fetches what is wrong again"),
                None => String::new(),
            };
            bail!(
                "{}: {} problems{repair}",
                self.package.display(),
                findings.problems.len()
            );
        }
        if !self.json {
            let signed = match &findings.signer {
                Some(name) => format!("signed by {name}"),
                None => "not signed".to_owned(),
            };
            output::line(format_args!(
                "{}: {} in {} shards and {} groups are as the manifest says; {signed}",
                self.package.display(),
                Bytes(findings.n_bytes),
                findings.n_shards,
                findings.n_groups,
            ))?;
        }
        Ok(())
    }
}

/// Reads all files of a model in the store again. Those that have changed are put aside, so that the next
/// pull fetches them.
fn verify_stored(name: &str) -> Result<Findings> {
    let store = pull::store()?;
    let model = store.model(name)?;
    let (n_bytes, signer) = (model.entry().size(), model.entry().signer.clone());
    let n_shards = model.paths().len();
    let n_groups = model.entry().groups.len();
    drop(model);
    let damage = store.verify(name)?;
    let problems: Vec<_> = (damage.iter())
        .map(|damage| format!("{}: {}", damage.file, damage.problem))
        .collect();
    Ok(Findings {
        ok: problems.is_empty(),
        n_shards,
        n_groups,
        n_bytes,
        signer,
        problems,
        remarks: Vec::new(),
    })
}

/// Checks the package in `folder`. A manifest that can't be believed at all is an error.
pub(crate) fn verify(folder: &Path) -> Result<Findings> {
    let read = |name: &str| -> Result<LocalFile> { Ok(LocalFile::open(folder.join(name))?) };
    let place = folder.display().to_string();
    let bytes = read(MANIFEST_FILE)?.prefix(u64::MAX);
    let manifest = Manifest::parse(&bytes).with_context(|| format!("{place}: {MANIFEST_FILE}"))?;
    let mut findings = Findings::default();
    let signature = match folder.join(SIGNATURE_FILE).exists() {
        true => Some(read(SIGNATURE_FILE)?.prefix(u64::MAX)),
        false => None,
    };
    let signature = match &signature {
        Some(bytes) => Some(std::str::from_utf8(bytes).context("the signature: expected text")?),
        None => None,
    };
    match check_signature(&place, &bytes, signature) {
        Ok(signer) => findings.signer = signer,
        Err(error) => findings.problems.push(format!("{error:#}")),
    }
    let external = match &manifest.tensors_file {
        Some(name) if folder.join(name).exists() || manifest.tensors.is_none() => {
            let bytes = read(name)?.prefix(u64::MAX);
            Some(TensorMap::parse(&bytes).with_context(|| format!("{place}: {name}"))?)
        }
        _ => None,
    };
    let package = Package::new(manifest.clone(), external).with_context(|| place.clone())?;
    let algorithm = algorithm(&manifest);
    for (name, (size, expected)) in hashed_files(&manifest)? {
        match read(&name) {
            Ok(file) => findings.check(&name, &file, size, Expected::Digest(expected)),
            Err(error) => findings.problems.push(format!("{error:#}")),
        }
    }
    let progress = Progress::bytes("verifying", manifest.total_size);
    let mut shards = Vec::new();
    let mut whole = Hasher::new(Algorithm::Blake3);
    for (i, shard) in manifest.shards.iter().enumerate() {
        let file = match read(&shard.file_name) {
            Ok(file) if file.len() == shard.size => file,
            Ok(file) => {
                findings.problems.push(format!(
                    "{}: expected {} bytes, found {}",
                    shard.file_name,
                    shard.size,
                    file.len()
                ));
                shards.push(None);
                continue;
            }
            Err(error) => {
                findings.problems.push(format!("{error:#}"));
                shards.push(None);
                continue;
            }
        };
        let expected = Expected::Digest(digest(algorithm, &shard.hash));
        findings.check(&shard.file_name, &file, shard.size, expected);
        let bytes = file.prefix(u64::MAX);
        if let Some(blocks) = manifest
            .integrity
            .as_ref()
            .and_then(|i| i.shard_blocks.as_ref())
            && let Some(hashes) = blocks.hashes.get(i)
        {
            let found = BlockDigests::of(Algorithm::Blake3, blocks.block_size, &bytes)?;
            let differs = (found.digests().iter().zip(hashes))
                .position(|(found, said)| *found != digest(Algorithm::Blake3, said));
            if let Some(block) = differs {
                findings.problems.push(format!(
                    "{}: block {block} isn't as its hash says",
                    shard.file_name
                ));
            }
        }
        whole.update(&bytes);
        findings.n_bytes += shard.size;
        progress.add(shard.size);
        shards.push(Some(bytes));
    }
    drop(progress);
    findings.n_shards = manifest.shards.len();
    let complete = shards.iter().all(Option::is_some);
    if let Some(said) = &manifest.blake3_full
        && complete
        && whole.finish() != digest(Algorithm::Blake3, said)
    {
        findings
            .problems
            .push("blake3Full: the shards together have another hash".to_owned());
    }
    for group in &manifest.groups {
        let mut hasher = Hasher::new(algorithm);
        let mut missing = false;
        for span in package.group_tensors(group).flat_map(|t| t.pieces()) {
            match &shards[span.shard] {
                Some(bytes) => hasher.update(&bytes[span.offset as usize..][..span.size as usize]),
                None => missing = true,
            }
        }
        findings.n_groups += 1;
        let found = hasher.finish();
        if !missing && found != digest(algorithm, &group.hash) {
            findings.problems.push(format!(
                "group `{}`: expected {algorithm} {}, found {found}",
                group.id,
                digest(algorithm, &group.hash),
            ));
        }
    }
    if let Some(merkle) = manifest
        .integrity
        .as_ref()
        .and_then(|i| i.block_merkle.as_ref())
    {
        for (name, root) in &merkle.roots {
            let Some(tensor) = package.tensors().get(name) else {
                continue;
            };
            if tensor
                .pieces()
                .iter()
                .any(|span| shards[span.shard].is_none())
            {
                continue;
            }
            let mut blocks = Blocks::new(Algorithm::Sha256, merkle.block_size);
            for span in tensor.pieces() {
                let bytes = shards[span.shard].as_ref().expect("checked above");
                blocks.update(&bytes[span.offset as usize..][..span.size as usize]);
            }
            if merkle_root(blocks.finish()) != digest(Algorithm::Sha256, root) {
                findings
                    .problems
                    .push(format!("tensor `{name}`: its hash tree has another root"));
            }
        }
    }
    findings.ok = findings.problems.is_empty();
    Ok(findings)
}

impl Findings {
    fn check(&mut self, name: &str, file: &LocalFile, size: u64, expected: Expected) {
        if file.len() != size {
            let found = file.len();
            self.problems
                .push(format!("{name}: expected {size} bytes, found {found}"));
            return;
        }
        match expected.verify(&file.prefix(u64::MAX)) {
            Ok(Verified::Blake3Variant) => self.remarks.push(format!(
                "{name}: its hash is not BLAKE3 but the variant that the existing JavaScript runtime computes"
            )),
            Ok(_) => {}
            Err(mismatch) => self.problems.push(format!("{name}: {mismatch}")),
        }
    }
}
