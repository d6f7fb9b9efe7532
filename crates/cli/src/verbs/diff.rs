//! `sterna diff`: what differs between two packages.

mod deltas;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sterna_format::digest::Digest;
use sterna_format::rdrr::{Group, Manifest, Package, Shard, Span, Tensor};

use sterna::native::read_package;

use crate::model::PackagePlace;
use crate::output::{self, Bytes};
use crate::pull::read_remote_package;

use self::deltas::{GroupDelta, Local};

const EXAMPLE: &str = "Example:
  sterna diff model-v1 model-v2
  sterna diff tiny https://example.org/tiny-rdrr --json
  sterna diff model-v1 model-v2 --delta model-v2";

/// Show what differs between two packages
///
/// Which component groups, tensors and shards differ, and how many bytes someone who has A fetches to get B:
/// those of the shards that A doesn't contain under any name, without the groups in them that A has.
/// --delta writes what makes the changed groups of those of A, to be published with B: who has A in the store and
/// pulls B fetches the deltas instead of the groups, wherever they are smaller.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Diff {
    /// Package to start from: a folder, a URL, or a name in the store
    a: String,
    /// Package to compare it with
    b: String,
    /// Write deltas from A to B, and a list of them, into this folder: that of B, or one whose files go there
    #[arg(long, value_name = "FOLDER")]
    delta: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct Report {
    groups: Changes,
    tensors: Changes,
    shards: Changes,
    /// Groups that both have in other versions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    versions: Vec<VersionChange>,
    /// Bytes of the shards of B that are neither shards nor groups of A.
    fetch_bytes: u64,
    /// Bytes of all shards of B.
    total_bytes: u64,
    /// The groups that changed and their deltas, where deltas are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    deltas: Option<Vec<GroupDelta>>,
}

/// The versions of a group in A and B.
#[derive(Debug, Default, PartialEq, Serialize)]
struct VersionChange {
    group: String,
    from: String,
    to: String,
}

/// Names of what only B has, only A has, and what differs.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Changes {
    added: Vec<String>,
    removed: Vec<String>,
    changed: Vec<String>,
    same: usize,
}

impl Diff {
    pub(crate) fn run(self) -> Result<()> {
        if let Some(folder) = &self.delta {
            let (mut a, mut b) = (Local::open(&self.a)?, Local::open(&self.b)?);
            let mut report = Report::new(a.package(), b.package());
            report.deltas = Some(deltas::write(&mut a, &mut b, folder)?);
            return self.show(&report);
        }
        let read = |name: &str| match name.contains("://") {
            true => read_remote_package(name),
            false => Ok(read_package(name, &*PackagePlace::find(name)?.files())?),
        };
        self.show(&Report::new(&read(&self.a)?, &read(&self.b)?))
    }

    fn show(&self, report: &Report) -> Result<()> {
        if self.json {
            output::json(report)
        } else {
            output::line(report.text())
        }
    }
}

impl Report {
    fn new(a: &Package, b: &Package) -> Report {
        let groups = |package: &Package| -> Vec<(String, (Digest, String))> {
            let group = |group: &Group| (group.id.clone(), (group.hash, group.version.clone()));
            package.manifest().groups.iter().map(group).collect()
        };
        let shards = |package: &Package| -> Vec<(String, (Digest, u64))> {
            let shards = package.manifest().shards.iter();
            let shard = |shard: &Shard| (shard.file_name.clone(), (shard.hash, shard.size));
            shards.map(shard).collect()
        };
        let tensors = |package: &Package| -> Vec<(String, TensorId)> {
            let roots = Roots::of(package.manifest());
            let tensors = package.tensors().iter();
            let tensor = |tensor: &Tensor| {
                let id = TensorId::new(package.manifest(), &roots, tensor);
                (tensor.name.clone(), id)
            };
            tensors.map(tensor).collect()
        };
        let before: HashMap<&str, &str> = (a.manifest().groups.iter())
            .map(|group| (&*group.id, &*group.version))
            .collect();
        let versions = b.manifest().groups.iter().filter_map(|group| {
            let from = *before.get(&*group.id)?;
            (from != group.version).then(|| VersionChange {
                group: group.id.clone(),
                from: from.to_owned(),
                to: group.version.clone(),
            })
        });
        Report {
            versions: versions.collect(),
            groups: Changes::between(&groups(a), &groups(b)),
            tensors: Changes::between(&tensors(a), &tensors(b)),
            shards: Changes::between(&shards(a), &shards(b)),
            fetch_bytes: missing_bytes(a, b),
            total_bytes: b.manifest().total_size,
            deltas: None,
        }
    }

    fn text(&self) -> String {
        let mut rows = Vec::new();
        for (what, changes) in [
            ("groups", &self.groups),
            ("tensors", &self.tensors),
            ("shards", &self.shards),
        ] {
            rows.push((what, changes.summary()));
        }
        rows.push((
            "to fetch",
            format!("{} of {}", Bytes(self.fetch_bytes), Bytes(self.total_bytes)),
        ));
        if let Some(deltas) = &self.deltas {
            let used: Vec<_> = (deltas.iter())
                .filter_map(|delta| Some((delta.bytes, delta.delta_bytes?)))
                .collect();
            let (groups, bytes) = used.iter().fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
            rows.push((
                "deltas",
                format!(
                    "{} instead of {} of {}",
                    Bytes(bytes),
                    Bytes(groups),
                    output::counted(used.len(), "group")
                ),
            ));
        }
        let mut text = output::table(&rows);
        for (what, changes) in [
            ("groups", &self.groups),
            ("tensors", &self.tensors),
            ("shards", &self.shards),
        ] {
            for (sign, names) in [
                ("+", &changes.added),
                ("-", &changes.removed),
                ("~", &changes.changed),
            ] {
                for name in names {
                    text += &format!("\n{sign} {what}: {}", name.escape_debug());
                    let is_it = |change: &&VersionChange| what == "groups" && change.group == *name;
                    if let Some(VersionChange { from, to, .. }) = self.versions.iter().find(is_it) {
                        text +=
                            &format!(", version {} → {}", from.escape_debug(), to.escape_debug());
                    }
                }
            }
        }
        text
    }
}

/// The bytes of shards of `b` that someone with `a` lacks: those of shards that `a` hasn't, without the groups in them
/// that it has. Zeros between tensors count, though some needn't be fetched.
fn missing_bytes(a: &Package, b: &Package) -> u64 {
    let held = held_shards(a.manifest());
    let groups: HashSet<Digest> = a.manifest().groups.iter().map(|group| group.hash).collect();
    let shards = &b.manifest().shards;
    let is_missing = |shard: &Shard| !held.contains(&shard.hash);
    let missing: u64 = (shards.iter().filter(|shard| is_missing(shard)))
        .map(|shard| shard.size)
        .sum();
    let here = (b.manifest().groups.iter()).filter(|group| groups.contains(&group.hash));
    let here = here.flat_map(|group| b.group_tensors(group).flat_map(Tensor::pieces));
    // Groups may share tensors.
    let here: HashSet<&Span> = here
        .filter(|span| is_missing(&shards[span.shard]))
        .collect();
    missing - here.iter().map(|span| span.size).sum::<u64>()
}

/// Every hash under which `manifest` lists a shard.
fn held_shards(manifest: &Manifest) -> HashSet<Digest> {
    let mut held = HashSet::new();
    for shard in &manifest.shards {
        held.insert(shard.hash);
        held.extend(shard.blake3);
    }
    held
}

/// What distinguishes two tensors of one name without reading them.
#[derive(PartialEq)]
struct TensorId {
    dtype: String,
    shape: Vec<usize>,
    size: u64,
    content: Content,
}

/// What is known of a tensor's bytes, the most reliable first.
#[derive(PartialEq)]
enum Content {
    /// The root of its hash tree, and the size of the blocks.
    Root(u64, Digest),
    /// The same offset in shards of the same hashes.
    Place(Vec<(Digest, u64, u64)>),
}

/// Roots of hash trees by the names of their tensors, and the size of the blocks.
#[derive(Default)]
struct Roots<'a> {
    block_size: u64,
    by_name: HashMap<&'a str, Digest>,
}

impl Roots<'_> {
    fn of(manifest: &Manifest) -> Roots<'_> {
        let integrity = manifest.integrity.as_ref();
        let Some(merkle) = integrity.and_then(|integrity| integrity.block_merkle.as_ref()) else {
            return Roots::default();
        };
        Roots {
            block_size: merkle.block_size,
            by_name: (merkle.roots.iter())
                .map(|(name, root)| (name.as_str(), *root))
                .collect(),
        }
    }
}

impl TensorId {
    fn new(manifest: &Manifest, roots: &Roots<'_>, tensor: &Tensor) -> TensorId {
        let content = match roots.by_name.get(tensor.name.as_str()) {
            Some(root) => Content::Root(roots.block_size, *root),
            None => {
                let piece = |piece: &Span| {
                    let hash = manifest.shards[piece.shard].hash;
                    (hash, piece.offset, piece.size)
                };
                Content::Place(tensor.pieces().iter().map(piece).collect())
            }
        };
        TensorId {
            dtype: tensor.dtype.to_string(),
            shape: tensor.logical_shape(),
            size: tensor.size,
            content,
        }
    }
}

impl Changes {
    /// What differs between the named things of two packages.
    fn between<T: PartialEq>(a: &[(String, T)], b: &[(String, T)]) -> Changes {
        let before: HashMap<&str, &T> = a.iter().map(|(name, value)| (&**name, value)).collect();
        let after: HashSet<&str> = b.iter().map(|(name, _)| &**name).collect();
        let mut changes = Changes::default();
        for (name, value) in b {
            match before.get(&**name) {
                None => changes.added.push(name.clone()),
                Some(old) if *old != value => changes.changed.push(name.clone()),
                Some(_) => changes.same += 1,
            }
        }
        let gone = a.iter().filter(|(name, _)| !after.contains(&**name));
        changes.removed = gone.map(|(name, _)| name.clone()).collect();
        changes
    }

    fn summary(&self) -> String {
        format!(
            "{} changed, {} added, {} removed, {} the same",
            self.changed.len(),
            self.added.len(),
            self.removed.len(),
            self.same
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared() {
        let list = |items: &[(&str, u8)]| -> Vec<(String, u8)> {
            items
                .iter()
                .map(|&(name, value)| (name.to_owned(), value))
                .collect()
        };
        let a = list(&[("a", 1), ("b", 2), ("c", 3)]);
        let b = list(&[("c", 4), ("b", 2), ("d", 5)]);
        let expected = Changes {
            added: vec!["d".into()],
            removed: vec!["a".into()],
            changed: vec!["c".into()],
            same: 1,
        };
        assert_eq!(Changes::between(&a, &b), expected);
    }
}
