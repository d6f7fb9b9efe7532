//! Replacing groups of a model's weights while it runs, by those in the files of another revision.

use std::fmt;
use std::sync::Arc;

pub use sterna_engine::swap::Group;
use sterna_engine::swap::Swap;
use sterna_engine::{Backend, Model, ModelPlan};
use sterna_format::digest::Digest;
use sterna_format::rdrr::groups::GroupId;

use crate::error::{Context, Result, bail};
use crate::model::{Header, LoadOptions, ModelFiles, Shards};
use crate::want::Machine;
use crate::warning::Warning;

/// A group of weights of some files, and its revision as far as they tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRevision {
    /// What packages call it: `embed`, `layer.3`, `layer.3.expert.0`, `head`.
    pub id: String,
    /// What it is replaced with; groups of a package that share it, or of which one includes the other, are replaced
    /// together.
    pub group: Group,
    /// Its semantic version, in packages.
    pub version: Option<String>,
    /// The hash of its stored bytes, in packages.
    pub hash: Option<Digest>,
}

/// The groups of a model's weights: of some files, or of a running model whose groups were replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revisions(Vec<GroupRevision>);

/// A group that was replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwappedGroup {
    /// What the model computed with before; `None` if its files had no such group.
    pub from: Option<GroupRevision>,
    /// What it computes with now.
    pub to: GroupRevision,
}

impl fmt::Display for GroupRevision {
    /// Version and beginning of the hash, as far as they are known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("unknown version");
        match self.hash {
            Some(hash) => write!(f, "{version} ({:.12})", hash.to_string()),
            None => f.write_str(version),
        }
    }
}

impl fmt::Display for SwappedGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to } = self;
        match from {
            Some(from) => write!(f, "{}: {from} -> {to}", to.id),
            None => write!(f, "{}: {to}", to.id),
        }
    }
}

impl Revisions {
    /// The groups of `files`, of which `plan` was made.
    pub fn of(files: &ModelFiles, plan: &ModelPlan) -> Revisions {
        let stated = match files.header() {
            Header::Package(header) => &header.package.manifest().groups[..],
            _ => &[],
        };
        let stated = stated.iter().filter_map(|group| {
            Some(GroupRevision {
                id: group.id.clone(),
                group: group_called(&group.id)?,
                version: Some(group.version.clone()),
                hash: Some(group.hash),
            })
        });
        let stated: Vec<_> = stated.collect();
        if !stated.is_empty() {
            return Revisions(stated);
        }
        let layers = (0..plan.config().n_layers).map(|i| (format!("layer.{i}"), Group::Layer(i)));
        let all = [("embed".to_owned(), Group::Embedding)]
            .into_iter()
            .chain(layers)
            .chain([("head".to_owned(), Group::Head)]);
        let unknown = all.map(|(id, group)| GroupRevision {
            id,
            group,
            version: None,
            hash: None,
        });
        Revisions(unknown.collect())
    }

    /// All groups, in the order of the files.
    pub fn iter(&self) -> impl Iterator<Item = &GroupRevision> {
        self.0.iter()
    }

    /// What to replace by `revision`: the groups called `ids`, or without any, all that aren't known to be
    /// the same.
    ///
    /// Errors: a group that `revision` doesn't have; nothing differs.
    pub fn choose(&self, revision: &Revisions, ids: &[String]) -> Result<Vec<Group>> {
        let mut groups = Vec::new();
        for id in ids {
            let found = revision.iter().find(|group| group.id == *id);
            let Some(found) = found else {
                let known: Vec<_> = revision.iter().map(|group| group.id.as_str()).collect();
                bail!(
                    InvalidRequest,
                    "group `{id}`: expected one of {}, found no such group",
                    known.join(", ")
                );
            };
            groups.push(found.group);
        }
        if ids.is_empty() {
            let differs = |group: &&GroupRevision| {
                let is_same = |own: &GroupRevision| own.hash.is_some() && own.hash == group.hash;
                !self.iter().any(|own| own.id == group.id && is_same(own))
            };
            groups.extend(revision.iter().filter(differs).map(|group| group.group));
            if groups.is_empty() {
                bail!(
                    InvalidRequest,
                    "expected groups that differ from the running model's, found the same"
                );
            }
        }
        groups.sort_unstable();
        groups.dedup();
        Ok(groups)
    }

    /// Records that `groups` were replaced by those of `revision`; what changed to what.
    pub fn replace(&mut self, revision: &Revisions, groups: &[Group]) -> Vec<SwappedGroup> {
        let mut swapped = Vec::new();
        let is_replaced = |to: &&GroupRevision| groups.iter().any(|group| group.includes(to.group));
        for to in revision.iter().filter(is_replaced) {
            let own = self.0.iter_mut().find(|own| own.id == to.id);
            let from = match own {
                Some(own) => Some(std::mem::replace(own, to.clone())),
                None => {
                    self.0.push(to.clone());
                    None
                }
            };
            swapped.push(SwappedGroup {
                from,
                to: to.clone(),
            });
        }
        swapped
    }
}

/// What a package's group `id` is replaced with.
fn group_called(id: &str) -> Option<Group> {
    let id: GroupId = id.parse().ok()?;
    if let (Some(layer), Some(expert)) = (id.layer_index(), id.expert_index()) {
        let [layer, expert] = [layer, expert].map(|index| index as usize);
        return Some(Group::Expert { layer, expert });
    }
    match (id, id.layer_index()) {
        (GroupId::Embed, _) => Some(Group::Embedding),
        (GroupId::Head, _) => Some(Group::Head),
        (_, layer) => layer.map(|layer| Group::Layer(layer as usize)),
    }
}

impl ModelFiles {
    /// Replaces `groups` of `running` by those of these files, of which `plan` was made; the number of the
    /// running model's new generation of weights, and oddities.
    ///
    /// Nothing changes before all of it is loaded and verified; then all groups change at once, between
    /// steps. Keys and values in caches stay as the old weights made them: reset sequences that should not
    /// depend on those.
    pub fn swap<'a, B: Backend + 'a>(
        &'a self,
        running: &'a Arc<Model<B>>,
        plan: ModelPlan,
        groups: &'a [Group],
        mut options: LoadOptions<'a>,
    ) -> Machine<'a, (u64, Vec<Warning>)> {
        Machine::new(move |files| async move {
            let mut shards = Shards::new(self, files, options.verification);
            let swap = Swap::new(running, plan, groups);
            let mut swap = swap.with_context(|| self.name())?;
            while let Some(want) = swap.wanted() {
                let bytes = shards.tensor(want).await?;
                let len = want.len;
                swap.feed(bytes).with_context(|| self.name())?;
                if let Some(progress) = &mut options.progress {
                    progress(len);
                }
            }
            let mut warnings = shards.into_warnings();
            warnings.extend(self.warnings());
            let oddity = swap.warnings().first().map(|what| Warning::Oddity {
                model: self.name().to_owned(),
                what: what.clone(),
            });
            warnings.extend(oddity);
            let generation = swap.finish().with_context(|| self.name())?;
            Ok((generation, warnings))
        })
    }
}

#[cfg(test)]
mod tests {
    use sterna_format::digest::Algorithm;

    use super::*;

    /// Groups with the letter of their hash.
    fn revisions(groups: &[(&str, char)]) -> Revisions {
        let group = |(id, letter): &(&str, char)| GroupRevision {
            id: (*id).to_owned(),
            group: group_called(id).unwrap(),
            version: None,
            hash: Digest::from_hex(Algorithm::Sha256, &letter.to_string().repeat(64)).ok(),
        };
        Revisions(groups.iter().map(group).collect())
    }

    #[test]
    fn an_expert_differs_and_is_replaced_without_its_layer() {
        let ids = ["embed", "layer.1", "layer.1.expert.0", "layer.1.expert.3"];
        let with = |letters: &str| {
            let groups: Vec<_> = ids.into_iter().zip(letters.chars()).collect();
            revisions(&groups)
        };
        let mut own = with("abcd");
        let expert = Group::Expert {
            layer: 1,
            expert: 3,
        };
        assert_eq!(own.choose(&with("abce"), &[]).unwrap(), [expert]);
        let swapped = own.replace(&with("abce"), &[expert]);
        assert_eq!(swapped.len(), 1);
        assert_eq!(swapped[0].to.id, "layer.1.expert.3");
        assert!(own.choose(&with("abce"), &[]).is_err());
        // A layer comes with its experts.
        let layer = Group::Layer(1);
        assert_eq!(own.choose(&with("afce"), &[]).unwrap(), [layer]);
        let swapped = own.replace(&with("afff"), &[layer]);
        let swapped: Vec<_> = swapped.iter().map(|group| &group.to.id[..]).collect();
        assert_eq!(swapped, ids[1..]);
    }
}
