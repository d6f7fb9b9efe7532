//! A manifest and a tensor map that fit together.

use std::collections::{BTreeSet, HashMap};

use super::lora;
use super::manifest::{Group, Manifest};
use super::problem::{Notes, Path, Problems};
use super::tensors::{Tensor, TensorMap};
use crate::json::quoted;

/// A consistent package: every tensor's pieces are within shards, no byte belongs to two,
/// and every tensor is in one component group where there are groups.
#[derive(Debug, Clone)]
pub struct Package {
    manifest: Manifest,
    tensors: TensorMap,
    /// Index of each tensor's group, where there are groups.
    group_of: Vec<Option<usize>>,
    /// Groups whose list of shards isn't the usual one, and what it should be.
    odd_shards: Option<OddShards>,
}

/// Lists of shards that name more than a group needs, or in another order.
#[derive(Debug, Clone)]
struct OddShards {
    /// The first.
    first: String,
    n_more: usize,
}

impl Package {
    /// Joins a manifest and its tensor map, of which `external` reads the file with the given name;
    /// `None` if there is no such file.
    ///
    /// A copy of a package that has lost the file is as good as long as the inline map is there.
    ///
    /// # Errors
    ///
    /// Those of `external`, and everything that doesn't fit ([`Package::new`]).
    pub fn open<E: From<Problems>>(
        manifest: Manifest,
        external: impl FnOnce(&str) -> Result<Option<TensorMap>, E>,
    ) -> Result<Package, E> {
        let external = match manifest.tensor_map_file() {
            Some(name) => external(name)?,
            None => None,
        };
        Ok(Package::new(manifest, external)?)
    }

    /// Joins a manifest and the external tensor map that it names.
    ///
    /// Without the latter, the inline map counts; with both, they must say the same.
    ///
    /// # Errors
    ///
    /// Everything that doesn't fit.
    pub fn new(mut manifest: Manifest, external: Option<TensorMap>) -> Result<Package, Problems> {
        let mut notes = Notes::new();
        let tensors = match (external, &manifest.tensors) {
            (Some(external), inline) => {
                if let Some(inline) = inline {
                    check_same(inline, &external, &mut notes);
                }
                external
            }
            (None, Some(inline)) => inline.clone(),
            (None, None) => {
                let path = Path::Key(&Path::Root, "tensors");
                let file = manifest.tensor_map_file().map(quoted).unwrap_or_default();
                notes.add(
                    path,
                    format_args!("a tensor map, inline or in {file}"),
                    "none",
                );
                TensorMap::default()
            }
        };
        if let Some(count) = manifest.tensor_count
            && count != tensors.len() as u64
        {
            let expected = format_args!("{}, the number of tensors", tensors.len());
            notes.add(Path::Key(&Path::Root, "tensorCount"), expected, count);
        }
        check_pieces(&manifest, &tensors, &mut notes);
        let group_of = check_groups(&manifest, &tensors, &mut notes);
        let odd_shards = order_shards(&mut manifest, &tensors, &mut notes);
        check_roots(&manifest, &tensors, &mut notes);
        notes.or(Package {
            manifest,
            tensors,
            group_of,
            odd_shards,
        })
    }

    /// What is odd about the package and was accepted, each with its place.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.manifest.warnings();
        warnings.extend(self.odd_shards.iter().map(|odd| match odd.n_more {
            0 => odd.first.clone(),
            n => format!("{} (and {n} more like it)", odd.first),
        }));
        warnings.extend(self.odd_targets());
        warnings
    }

    /// What differs between the modules that an adapter says it changes and those that it has matrices of.
    fn odd_targets(&self) -> Option<String> {
        let targets = &self.manifest.lora_config.as_ref()?.target_modules;
        if targets.is_empty() {
            return None;
        }
        let usual = |name: &String| match lora::module_of(name) {
            Some(module) => module.to_owned(),
            None => name.clone(),
        };
        let said: BTreeSet<String> = targets.iter().map(usual).collect();
        let names = self
            .tensors
            .iter()
            .map(|tensor| lora::parse_name(&tensor.name));
        let has: BTreeSet<String> = names.flatten().map(|name| name.module).collect();
        let list = |names: &BTreeSet<String>| {
            let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
            names.join(", ")
        };
        (said != has).then(|| {
            format!(
                "loraConfig.targetModules: expected {}, the modules that there are matrices of, found {}",
                list(&has),
                list(&said)
            )
        })
    }

    /// What the package says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its tensors.
    pub fn tensors(&self) -> &TensorMap {
        &self.tensors
    }

    /// The component group of the tensor called `name`, where the package has groups.
    pub fn group_of(&self, name: &str) -> Option<&Group> {
        let index = self.group_of[self.tensors.index_of(name)?]?;
        Some(&self.manifest.groups[index])
    }

    /// The tensors of `group`, in its order.
    pub fn group_tensors<'a>(&'a self, group: &'a Group) -> impl Iterator<Item = &'a Tensor> {
        group
            .tensors
            .iter()
            .filter_map(|name| self.tensors.get(name))
    }
}

/// Notes where two maps of one package differ.
fn check_same(inline: &TensorMap, external: &TensorMap, notes: &mut Notes) {
    let list = Path::Key(&Path::Root, "tensors");
    if inline.len() != external.len() {
        let expected = format_args!("{} tensors, as the external map has", external.len());
        notes.add(list, expected, inline.len());
    }
    for tensor in inline.iter() {
        let path = Path::Key(&list, &tensor.name);
        let same = |other: &Tensor| {
            (&tensor.dtype, &tensor.shape, &tensor.spans)
                == (&other.dtype, &other.shape, &other.spans)
                && tensor.logical_shape() == other.logical_shape()
        };
        match external.get(&tensor.name) {
            None => notes.add(path, "a tensor that the external map has too", "none there"),
            Some(other) if !same(other) => {
                notes.add(path, "what the external map says of it", "something else");
            }
            Some(_) => {}
        }
    }
}

/// Checks that pieces are within their shards and don't overlap.
fn check_pieces(manifest: &Manifest, tensors: &TensorMap, notes: &mut Notes) {
    let list = Path::Key(&Path::Root, "tensors");
    let n_shards = manifest.shards.len();
    let mut pieces = Vec::with_capacity(tensors.len());
    for tensor in tensors.iter() {
        let path = Path::Key(&list, &tensor.name);
        for span in tensor.pieces() {
            let Some(shard) = manifest.shards.get(span.shard) else {
                let expected = format_args!("the index of one of {n_shards} shards");
                notes.add(Path::Key(&path, "shard"), expected, span.shard);
                continue;
            };
            match span.offset.checked_add(span.size) {
                Some(end) if end <= shard.size => pieces.push((*span, &tensor.name)),
                _ => notes.add(
                    path,
                    format_args!("bytes of shard {}, which has {}", span.shard, shard.size),
                    format_args!("{} bytes at offset {}", span.size, span.offset),
                ),
            }
        }
    }
    pieces.sort_unstable();
    for pair in pieces.windows(2) {
        let ((before, first), (after, second)) = (&pair[0], &pair[1]);
        if before.shard == after.shard && before.offset + before.size > after.offset {
            notes.add(
                Path::Key(&list, second),
                format_args!(
                    "bytes of its own: {} ends at byte {} of shard {}",
                    quoted(first),
                    before.offset + before.size,
                    before.shard
                ),
                format_args!("a start at byte {}", after.offset),
            );
        }
    }
}

/// Checks that every tensor is in one group and that groups say where their tensors are; gives the
/// group of each tensor.
fn check_groups(manifest: &Manifest, tensors: &TensorMap, notes: &mut Notes) -> Vec<Option<usize>> {
    let mut group_of = vec![None; tensors.len()];
    if manifest.groups.is_empty() {
        return group_of;
    }
    let groups = Path::Key(&Path::Root, "groups");
    let mut by_id = HashMap::new();
    for (i, group) in manifest.groups.iter().enumerate() {
        let path = Path::Key(&groups, &group.id);
        by_id.insert(group.id.as_str(), i);
        let members = Path::Key(&path, "tensors");
        for (place, name) in group.tensors.iter().enumerate() {
            let at = Path::Index(&members, place);
            let Some(t) = tensors.index_of(name) else {
                notes.add(at, "the name of a tensor", quoted(name));
                continue;
            };
            if let Some(other) = group_of[t].replace(i) {
                let other = quoted(&manifest.groups[other].id);
                let expected = "a tensor that no group has yet";
                notes.add(at, expected, format_args!("{}, of {other}", quoted(name)));
            }
        }
    }
    let list = Path::Key(&Path::Root, "tensors");
    for (tensor, group) in tensors.iter().zip(&group_of) {
        let path = Path::Key(&list, &tensor.name);
        match (group, &tensor.group) {
            (None, _) => notes.add(path, "a tensor that a group lists", "one that none does"),
            (Some(group), Some(named)) if manifest.groups[*group].id != *named => {
                let listed = quoted(&manifest.groups[*group].id);
                let expected = format_args!("{listed}, which lists it");
                notes.add(Path::Key(&path, "group"), expected, quoted(named));
            }
            (Some(_), _) => {}
        }
    }
    group_of
}

/// Checks that groups list the shards that their tensors are in, and brings lists to the usual form that name
/// more, or in another order.
fn order_shards(
    manifest: &mut Manifest,
    tensors: &TensorMap,
    notes: &mut Notes,
) -> Option<OddShards> {
    let groups = Path::Key(&Path::Root, "groups");
    let n_shards = manifest.shards.len();
    let mut odd: Option<OddShards> = None;
    for group in &mut manifest.groups {
        let members = group.tensors.iter().filter_map(|name| tensors.get(name));
        let spans = members.flat_map(Tensor::pieces);
        let needed: BTreeSet<usize> = spans.map(|span| span.shard).collect();
        if needed.iter().eq(&group.shards) {
            continue;
        }
        let said: BTreeSet<usize> = group.shards.iter().copied().collect();
        let needed_list: Vec<usize> = needed.iter().copied().collect();
        let path = Path::Key(&groups, &group.id);
        let path = Path::Key(&path, "shards");
        let expected = format!("{}, where its tensors are", shown(&needed_list));
        if !said.is_superset(&needed) || said.iter().any(|&shard| shard >= n_shards) {
            notes.add(path, expected, shown(&group.shards));
            continue;
        }
        match &mut odd {
            Some(odd) => odd.n_more += 1,
            None => {
                let found = shown(&group.shards);
                odd = Some(OddShards {
                    first: format!("{path}: expected {expected}, found {found}"),
                    n_more: 0,
                });
            }
        }
        group.shards = needed_list;
    }
    odd
}

/// Checks that the roots of hash trees are those of tensors.
fn check_roots(manifest: &Manifest, tensors: &TensorMap, notes: &mut Notes) {
    let roots = manifest
        .integrity
        .as_ref()
        .and_then(|i| i.block_merkle.as_ref());
    let outer = Path::Key(&Path::Root, "integrityExtensions");
    let outer = Path::Key(&outer, "blockMerkle");
    let list = Path::Key(&outer, "roots");
    for (name, _) in roots.iter().flat_map(|merkle| &merkle.roots) {
        if tensors.get(name).is_none() {
            notes.add(Path::Key(&list, name), "the name of a tensor", quoted(name));
        }
    }
}

/// A list of indices, cut short if it is long.
fn shown(indices: &[usize]) -> String {
    const SHOWN: usize = 12;
    let first: Vec<_> = indices.iter().take(SHOWN).map(usize::to_string).collect();
    match indices.len() > SHOWN {
        true => format!("[{}, …]", first.join(", ")),
        false => format!("[{}]", first.join(", ")),
    }
}
