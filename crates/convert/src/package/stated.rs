//! What a manifest says besides what was converted: what the user wants in it, and what a package that is
//! converted said.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::{Map, Value};
use sterna::{Error, Result, bail};
use sterna_format::rdrr::groups::is_semantic_version;
use sterna_format::rdrr::{Architecture, Manifest, RuntimeOptimizations};

/// How much a manifest has besides what is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ManifestDetail {
    /// The tensor map inline, and hashes of blocks and tensors.
    #[default]
    Full,
    /// Neither: the tensor map is in its own file alone, and shards are verified whole.
    Compact,
}

/// Versions of component groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupVersions {
    /// Of all groups that have none of their own.
    all: Option<String>,
    /// By the groups' ids.
    by_id: BTreeMap<String, String>,
}

/// The version of one group, or of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupVersion {
    /// The group's id; `None` for all of them.
    pub group: Option<String>,
    /// The version.
    pub version: String,
}

impl FromStr for GroupVersion {
    type Err = Error;

    /// Reads `GROUP=VERSION`, or a version for all groups.
    fn from_str(text: &str) -> Result<GroupVersion> {
        let (group, version) = match text.split_once('=') {
            Some((group, version)) => (Some(group), version),
            None => (None, text),
        };
        if !is_semantic_version(version) || group == Some("") {
            bail!(
                InvalidRequest,
                "expected GROUP=VERSION or VERSION, a semantic version such as 1.2.0, found `{}`",
                text.escape_debug()
            );
        }
        Ok(GroupVersion {
            group: group.map(str::to_owned),
            version: version.to_owned(),
        })
    }
}

impl GroupVersions {
    /// These versions; of several for one group the last counts.
    pub fn new(versions: impl IntoIterator<Item = GroupVersion>) -> GroupVersions {
        let mut out = GroupVersions::default();
        for GroupVersion { group, version } in versions {
            match group {
                Some(group) => drop(out.by_id.insert(group, version)),
                None => out.all = Some(version),
            }
        }
        out
    }

    /// The version of the group with this id, if one is given.
    fn of(&self, id: &str) -> Option<&String> {
        self.by_id.get(id).or(self.all.as_ref())
    }

    /// Fails if a version is for another group than `ids`.
    pub(super) fn check<'a>(&self, ids: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
        for named in self.by_id.keys() {
            if !ids.clone().any(|id| id == named) {
                let ids: Vec<&str> = ids.collect();
                bail!(
                    InvalidRequest,
                    "version of a group: expected one of {}, found `{}`",
                    ids.join(", "),
                    named.escape_debug()
                );
            }
        }
        Ok(())
    }
}

/// Precisions that a package recommends for what isn't stored in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Precisions {
    /// Of the key-value cache: f32, f16 or q8_0.
    pub kv_cache: Option<String>,
    /// Of activations: int8 or f32.
    pub activations: Option<String>,
    /// Of arithmetic.
    pub compute: Option<String>,
}

/// Everything that a manifest states by request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statements {
    /// Hints, which take precedence over those of a package that is converted.
    pub hints: RuntimeOptimizations,
    /// Versions of groups; others are those of a package that is converted, or 1.0.0.
    pub versions: GroupVersions,
    /// Precisions; others are those of a package that is converted.
    pub precisions: Precisions,
}

/// Members of manifests that describe the stored bytes, which are others once they are converted.
const OF_THE_BYTES: [&str; 3] = ["artifactIdentity", "weightsRef", "defaultWeightLayout"];

/// Puts into `manifest` what `statements` ask for, and what `source`, the manifest of a package that is
/// converted, says besides.
pub(super) fn state(manifest: &mut Manifest, statements: &Statements, source: Option<&Manifest>) {
    if let Some(source) = source {
        keep(manifest, source);
    }
    let hints = manifest.runtime_optimizations.take().unwrap_or_default();
    let hints = hints.overridden_by(&statements.hints);
    manifest.runtime_optimizations = (!hints.is_empty()).then_some(hints);
    for group in &mut manifest.groups {
        if let Some(version) = statements.versions.of(&group.id) {
            group.version.clone_from(version);
        }
    }
    if let Some(info) = &mut manifest.quantization_info {
        let Precisions {
            kv_cache,
            activations,
            compute,
        } = &statements.precisions;
        for (said, wanted) in [
            (&mut info.kv_cache, kv_cache),
            (&mut info.activations, activations),
            (&mut info.compute, compute),
        ] {
            if wanted.is_some() {
                said.clone_from(wanted);
            }
        }
    }
}

/// Keeps what `source` says that isn't about its bytes.
fn keep(manifest: &mut Manifest, source: &Manifest) {
    manifest
        .runtime_optimizations
        .clone_from(&source.runtime_optimizations);
    manifest.moe_config.clone_from(&source.moe_config);
    for group in &mut manifest.groups {
        if let Some(before) = source.groups.iter().find(|before| before.id == group.id) {
            group.version.clone_from(&before.version);
            group.extra.clone_from(&before.extra);
        }
    }
    if let (Some(info), Some(before)) = (&mut manifest.quantization_info, &source.quantization_info)
    {
        info.kv_cache.clone_from(&before.kv_cache);
        info.activations.clone_from(&before.activations);
        info.compute.clone_from(&before.compute);
        info.extra.clone_from(&before.extra);
    }
    if let (Some(Architecture::Shape(shape)), Some(Architecture::Shape(before))) =
        (&mut manifest.architecture, &source.architecture)
    {
        shape.extra.clone_from(&before.extra);
    }
    let of_the_bytes = |key: &str| OF_THE_BYTES.contains(&key);
    let kept = source.extra.iter().filter(|(key, _)| !of_the_bytes(key));
    manifest.extra = kept
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if let Some(before) = &source.metadata {
        let own = manifest.metadata.get_or_insert_with(Map::new);
        for (key, value) in before {
            let value = || Value::clone(value);
            own.entry(key.clone()).or_insert_with(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let read = |text: &str| text.parse::<GroupVersion>();
        let version = read("1.2.0").unwrap();
        assert_eq!((version.group, &*version.version), (None, "1.2.0"));
        let version = read("layer.0.expert.3=2.0.0-rc.1").unwrap();
        assert_eq!(version.group.as_deref(), Some("layer.0.expert.3"));
        assert_eq!(version.version, "2.0.0-rc.1");
        for text in ["", "1.2", "embed=", "=1.0.0", "embed=abc", "embed=v1.0.0"] {
            let error = read(text).unwrap_err().to_string();
            let expected =
                "expected GROUP=VERSION or VERSION, a semantic version such as 1.2.0, found";
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_group_s_own_version_counts() {
        let read = |text: &str| text.parse::<GroupVersion>().unwrap();
        let versions = GroupVersions::new(["embed=2.0.0", "3.0.0", "embed=2.1.0"].map(read));
        assert_eq!(versions.of("embed").unwrap(), "2.1.0");
        assert_eq!(versions.of("head").unwrap(), "3.0.0");
        versions.check(["embed", "head"].into_iter()).unwrap();
        let error = versions.check(["head", "layer.0"].into_iter()).unwrap_err();
        let expected = "version of a group: expected one of head, layer.0, found `embed`";
        assert_eq!(error.to_string(), expected);
        assert_eq!(GroupVersions::default().of("embed"), None);
    }
}
