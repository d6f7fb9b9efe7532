//! Deltas from the groups of one package to those of another, as files to be beside the latter.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde::Serialize;
use sterna::native::{FileSet, expect_file, read_package};
use sterna_delivery::hash::{Algorithm, Expected, Verifier, digest_of};
use sterna_delivery::write_whole;
use sterna_format::delta::{
    DELTAS_FILE, DeltaList, DeltaWriter, ListedDelta, MAX_DELTA_BYTES, MAX_LIST_BYTES, MAX_PARTS,
};
use sterna_format::digest::Digest;
use sterna_format::rdrr::{Group, Package, Tensor};

use crate::model::PackagePlace;
use crate::progress::Progress;

/// A package whose files are on this machine.
pub(super) struct Local {
    name: String,
    files: Box<dyn FileSet>,
    package: Package,
    /// Bytes of the shards that were needed so far.
    shards: Vec<Option<Bytes>>,
}

/// A group that changed, and what an update of it takes.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct GroupDelta {
    pub(super) group: String,
    /// Bytes of its tensors.
    pub(super) bytes: u64,
    /// Bytes of its delta, if one was made that is smaller.
    pub(super) delta_bytes: Option<u64>,
}

impl Local {
    pub(super) fn open(name: &str) -> Result<Local> {
        if name.contains("://") {
            bail!("{name}: expected a package on this machine to make deltas of, found an address");
        }
        let files = PackagePlace::find(name)?.files();
        let package = read_package(name, &*files)?;
        Ok(Local {
            name: name.to_owned(),
            shards: vec![None; package.manifest().shards.len()],
            files,
            package,
        })
    }

    pub(super) fn package(&self) -> &Package {
        &self.package
    }

    /// The bytes of each tensor of `group`, which are as its hash says.
    fn tensors(&mut self, group: &Group) -> Result<Vec<Vec<u8>>> {
        let tensors: Vec<Tensor> = self.package.group_tensors(group).cloned().collect();
        let size = tensors.iter().map(|tensor| tensor.size).sum();
        let mut verifier = Verifier::new(Expected::Digest(group.hash), size);
        let mut all = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let mut bytes = Vec::new();
            for span in tensor.pieces() {
                let shard = self.shard(span.shard)?;
                // A package's pieces are within its shards, whose sizes were compared.
                bytes.extend_from_slice(&shard[span.offset as usize..][..span.size as usize]);
            }
            verifier.update(&bytes);
            all.push(bytes);
        }
        (verifier.finish()).with_context(|| format!("{}: group `{}`", self.name, group.id))?;
        Ok(all)
    }

    fn shard(&mut self, index: usize) -> Result<Bytes> {
        if let Some(bytes) = &self.shards[index] {
            return Ok(bytes.clone());
        }
        let shard = &self.package.manifest().shards[index];
        let file = expect_file(&*self.files, &shard.file_name)?;
        if file.len() != shard.size {
            bail!(
                "{file}: expected {} bytes, found {}",
                shard.size,
                file.len()
            );
        }
        let bytes = file.bytes()?;
        self.shards[index] = Some(bytes.clone());
        Ok(bytes)
    }
}

/// Whether the tensors of two groups differ in nothing but their bytes, and aren't too many for a delta.
fn are_alike(a: &Package, old: &Group, b: &Package, new: &Group) -> bool {
    let key = |tensor: &Tensor| (tensor.name.clone(), tensor.dtype.clone(), tensor.size);
    let old = a.group_tensors(old).map(key);
    new.tensors.len() <= MAX_PARTS as usize && old.eq(b.group_tensors(new).map(key))
}

/// Lists a delta instead of one between the same groups.
fn put(list: &mut DeltaList, old: &Group, new: &Group, size: u64, hash: Digest) -> String {
    let name = |hash: Digest| hash.to_string()[..16].to_owned();
    let file = format!("delta_{}_{}.bin", name(old.hash), name(new.hash));
    (list.deltas).retain(|delta| (delta.base, delta.target) != (old.hash, new.hash));
    list.deltas.push(ListedDelta {
        group: new.id.clone(),
        base: old.hash,
        target: new.hash,
        file: file.clone(),
        size,
        hash,
    });
    file
}

/// Writes a delta for each group of `b` that isn't in `a` where it is smaller than the group, and lists them in
/// `folder`, beside those that are listed there.
pub(super) fn write(a: &mut Local, b: &mut Local, folder: &Path) -> Result<Vec<GroupDelta>> {
    let list_path = folder.join(DELTAS_FILE);
    let mut list = match fs::read(&list_path) {
        Ok(bytes) => DeltaList::parse(&bytes).with_context(|| folder.display().to_string())?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => DeltaList::default(),
        Err(error) => return Err(error).with_context(|| list_path.display().to_string()),
    };
    let old_groups: HashMap<String, Group> = (a.package.manifest().groups.iter())
        .map(|group| (group.id.clone(), group.clone()))
        .collect();
    let is_new = |group: &&Group| !old_groups.values().any(|old| old.hash == group.hash);
    let changed: Vec<Group> = (b.package.manifest().groups.iter().filter(is_new))
        .cloned()
        .collect();
    let size_of = |group: &Group| {
        let tensors = b.package.group_tensors(group);
        tensors.map(|tensor| tensor.size).sum::<u64>()
    };
    let sizes: Vec<u64> = changed.iter().map(size_of).collect();
    let alike = |group: &Group| {
        let old = old_groups.get(&group.id);
        old.filter(|old| are_alike(&a.package, old, &b.package, group))
    };
    let olds: Vec<Option<&Group>> = changed.iter().map(alike).collect();
    // As long as it can become, before anything is written.
    let mut longest = list.clone();
    for ((group, size), old) in changed.iter().zip(&sizes).zip(&olds) {
        if let Some(old) = old {
            put(&mut longest, old, group, *size, group.hash);
        }
    }
    let n_bytes = longest.to_json().len();
    if n_bytes > MAX_LIST_BYTES {
        bail!(
            "{}: expected at most {MAX_LIST_BYTES} bytes with the new deltas, found up to {n_bytes}; take deltas out \
             of it that nobody needs any more",
            list_path.display()
        );
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let progress = Progress::bytes("comparing", sizes.iter().sum());
    let mut made = Vec::new();
    for ((group, size), old) in changed.iter().zip(sizes).zip(olds) {
        let mut delta_bytes = None;
        if let Some(old) = old {
            let delta = delta(a, old, b, group)?;
            let n_bytes = delta.len() as u64;
            if n_bytes < size && n_bytes <= MAX_DELTA_BYTES {
                let hash = digest_of(Algorithm::Sha256, &delta);
                let path = folder.join(put(&mut list, old, group, n_bytes, hash));
                write_whole(&path, &delta).with_context(|| path.display().to_string())?;
                delta_bytes = Some(n_bytes);
            }
        }
        progress.add(size);
        made.push(GroupDelta {
            group: group.id.clone(),
            bytes: size,
            delta_bytes,
        });
    }
    let text = list.to_json();
    write_whole(&list_path, &text).with_context(|| list_path.display().to_string())?;
    Ok(made)
}

/// What makes the group `new` of `old`.
fn delta(a: &mut Local, old: &Group, b: &mut Local, new: &Group) -> Result<Vec<u8>> {
    let (before, after) = (a.tensors(old)?, b.tensors(new)?);
    let mut writer = DeltaWriter::new(old.hash, new.hash);
    let tensors = b.package.group_tensors(new);
    for ((tensor, before), after) in tensors.zip(before).zip(after) {
        writer.tensor(&tensor.dtype, &before, &after)?;
    }
    Ok(writer.finish())
}
