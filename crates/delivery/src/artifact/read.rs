//! Reading manifests.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;
use sterna_format::rdrr::MANIFEST_FILE;

use super::{
    ArtifactError, DOCKER_INDEX_TYPE, FILE_PATH, INDEX_TYPE, MAX_LAYERS, MAX_MANIFEST_BYTES, TITLE,
    parse_digest, write::ARTIFACT_TYPE,
};
use crate::hash::Digest;

/// What ModelPack's media types of layers begin with.
const MODELPACK: &str = "application/vnd.cncf.model.";

/// What a manifest turned out to be.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    /// The layers of an artifact.
    Artifact(Artifact),
    /// A list: the manifest in it that is meant.
    Listed {
        /// Its digest.
        digest: Digest,
    },
}

/// The files of an artifact.
#[derive(Debug, Clone, Default)]
pub(crate) struct Artifact {
    layers: Vec<Layer>,
}

/// A file of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    /// Its path.
    pub(crate) name: String,
    /// The SHA-256 of its bytes.
    pub(crate) digest: Digest,
    /// Their number.
    pub(crate) size: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    artifact_type: Option<String>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    fn annotation(&self, key: &str) -> Option<&str> {
        let annotations = self.annotations.as_ref();
        annotations.and_then(|all| all.get(key)).map(String::as_str)
    }

    /// The file that the layer is; `None` for an archive, and for one without a name.
    fn file_name(&self) -> Option<&str> {
        let kind = self.media_type.as_str();
        // ORAS calls any file an uncompressed archive, and says of folders that they are to be unpacked.
        let is_modelpack_archive = kind.starts_with(MODELPACK) && !kind.ends_with(".raw");
        let is_compressed = ["+gzip", "+zstd", ".gzip"]
            .iter()
            .any(|end| kind.ends_with(end));
        let is_folder = self.annotation("io.deis.oras.content.unpack") == Some("true");
        if is_modelpack_archive || is_compressed || is_folder {
            return None;
        }
        let name = (self.annotation(FILE_PATH)).or_else(|| self.annotation(TITLE))?;
        Some(name.strip_prefix("./").unwrap_or(name))
    }
}

/// Reads a manifest or a list of them.
///
/// Errors: [`ArtifactError`].
pub(crate) fn parse(bytes: &[u8]) -> Result<Found, ArtifactError> {
    if bytes.len() > MAX_MANIFEST_BYTES {
        return Err(ArtifactError::TooLarge { found: bytes.len() });
    }
    let not_a_manifest = |problem: String| ArtifactError::NotAManifest { problem };
    let manifest: Manifest =
        serde_json::from_slice(bytes).map_err(|error| not_a_manifest(error.to_string()))?;
    if manifest.schema_version != 2 {
        let found = manifest.schema_version;
        return Err(not_a_manifest(format!(
            "schemaVersion: expected 2, found {found}"
        )));
    }
    let is_list = match manifest.media_type.as_deref() {
        Some(INDEX_TYPE | DOCKER_INDEX_TYPE) => true,
        Some(_) => false,
        None => manifest.layers.is_none(),
    };
    if is_list {
        return listed(&manifest.manifests.unwrap_or_default());
    }
    let layers = manifest
        .layers
        .ok_or_else(|| not_a_manifest("it has no layers".to_owned()))?;
    artifact(&layers).map(Found::Artifact)
}

/// The manifest that is meant by a list: the only one, or else the only one of a model.
fn listed(manifests: &[Descriptor]) -> Result<Found, ArtifactError> {
    let models: Vec<_> = (manifests.iter())
        .filter(|entry| entry.artifact_type.as_deref() == Some(ARTIFACT_TYPE))
        .collect();
    let one = match (manifests, &models[..]) {
        ([one], _) => one,
        (_, [one]) => one,
        _ => {
            return Err(ArtifactError::Ambiguous {
                found: manifests.len(),
            });
        }
    };
    Ok(Found::Listed {
        digest: parse_digest("manifests", &one.digest)?,
    })
}

fn artifact(descriptors: &[Descriptor]) -> Result<Artifact, ArtifactError> {
    if descriptors.len() > MAX_LAYERS {
        let found = descriptors.len();
        return Err(ArtifactError::TooManyLayers { found });
    }
    let mut layers = Vec::new();
    let mut names = HashSet::new();
    for (i, descriptor) in descriptors.iter().enumerate() {
        let Some(name) = descriptor.file_name() else {
            continue;
        };
        let digest = parse_digest(&format!("layers[{i}].digest"), &descriptor.digest)?;
        if !names.insert(name) {
            return Err(ArtifactError::Twice {
                place: format!("layers[{i}]"),
                name: name.chars().take(100).collect(),
            });
        }
        layers.push(Layer {
            name: name.to_owned(),
            digest,
            size: descriptor.size,
        });
    }
    // A folder that was pushed whole has its name before that of each file.
    let is_package = |name: &str| name == MANIFEST_FILE;
    if !layers.iter().any(|layer| is_package(&layer.name)) {
        let folder = layers.iter().find_map(|layer| {
            let (folder, name) = layer.name.rsplit_once('/')?;
            is_package(name).then(|| format!("{folder}/"))
        });
        if let Some(folder) = folder {
            layers.retain(|layer| layer.name.starts_with(&folder));
            for layer in &mut layers {
                layer.name.drain(..folder.len());
            }
        }
    }
    Ok(Artifact { layers })
}

impl Artifact {
    /// The file called `name`.
    pub(crate) fn file(&self, name: &str) -> Option<&Layer> {
        self.layers.iter().find(|layer| layer.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn layer(kind: &str, key: &str, name: &str) -> String {
        format!(
            r#"{{"mediaType": "{kind}", "digest": "{A}", "size": 3, "annotations": {{"{key}": "{name}"}}}}"#
        )
    }

    fn names(layers: &[String]) -> Result<Vec<String>, String> {
        let text = format!(
            r#"{{"schemaVersion": 2, "config": {{}}, "layers": [{}]}}"#,
            layers.join(",")
        );
        match parse(text.as_bytes()).map_err(|e| e.to_string())? {
            Found::Artifact(artifact) => Ok(artifact.layers.into_iter().map(|l| l.name).collect()),
            Found::Listed { .. } => Err("a list".to_owned()),
        }
    }

    #[test]
    fn files_are_found_by_either_name_and_archives_are_none() {
        let found = names(&[
            layer("application/vnd.cncf.model.weight.v1.raw", FILE_PATH, "a"),
            layer("application/octet-stream", TITLE, "./b"),
            layer("application/vnd.cncf.model.weight.v1.tar", FILE_PATH, "c"),
            layer("application/vnd.oci.image.layer.v1.tar+gzip", TITLE, "d"),
            layer("application/octet-stream", "other", "e"),
            layer("application/vnd.oci.image.layer.v1.tar", TITLE, "f"),
        ]);
        assert_eq!(found.unwrap(), ["a", "b", "f"]);
    }

    #[test]
    fn a_folder_that_was_pushed_whole_is_a_package() {
        let found = names(&[
            layer("x", TITLE, "out/tiny/s.bin"),
            layer("x", TITLE, "out/tiny/manifest.json"),
            layer("x", TITLE, "README.md"),
        ]);
        assert_eq!(found.unwrap(), ["s.bin", "manifest.json"]);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let twice = names(&[layer("x", TITLE, "a"), layer("x", FILE_PATH, "a")]);
        assert_eq!(
            twice.unwrap_err(),
            "layers[1]: expected another name than that of an earlier layer, found \"a\""
        );
        let bad = layer("x", TITLE, "a").replace("sha256:00", "sha256:zz");
        let error = names(&[bad]).unwrap_err();
        assert!(
            error.starts_with("layers[0].digest: expected sha256:"),
            "{error}"
        );
        for (text, expected) in [
            ("{", "expected an OCI manifest: "),
            (
                "{}",
                "expected an OCI manifest: missing field `schemaVersion`",
            ),
            (
                r#"{"schemaVersion": 1}"#,
                "expected an OCI manifest: schemaVersion: expected 2, found 1",
            ),
            (
                r#"{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}"#,
                "expected an OCI manifest: it has no layers",
            ),
            (
                r#"{"schemaVersion": 2}"#,
                "expected one model, found a list of 0 manifests",
            ),
        ] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let many = vec![layer("x", "y", "z"); MAX_LAYERS + 1];
        let error = names(&many).unwrap_err();
        assert!(
            error.starts_with("layers: expected at most 16384, found 16385"),
            "{error}"
        );
        let large = vec![b' '; MAX_MANIFEST_BYTES + 1];
        assert!(matches!(parse(&large), Err(ArtifactError::TooLarge { .. })));
    }

    #[test]
    fn of_a_list_the_only_model_is_meant() {
        let b = A.replace("00", "11");
        let entry = |digest: &str, kind: &str| {
            format!(r#"{{"mediaType": "m", "digest": "{digest}", "size": 9{kind}}}"#)
        };
        let model = format!(r#", "artifactType": "{ARTIFACT_TYPE}""#);
        let meant = |entries: &[String]| -> Result<String, ArtifactError> {
            let entries = entries.join(",");
            let text = format!(
                r#"{{"schemaVersion": 2, "mediaType": "{INDEX_TYPE}", "manifests": [{entries}]}}"#
            );
            match parse(text.as_bytes())? {
                Found::Listed { digest } => Ok(format!("sha256:{digest}")),
                Found::Artifact(_) => panic!("it is a list"),
            }
        };
        assert_eq!(meant(&[entry(A, "")]).unwrap(), A);
        assert_eq!(meant(&[entry(A, ""), entry(&b, &model)]).unwrap(), b);
        let error = meant(&[entry(A, ""), entry(&b, "")]).unwrap_err();
        assert_eq!(error, ArtifactError::Ambiguous { found: 2 });
    }

    proptest::proptest! {
        /// Nothing that a registry sends ends in a panic.
        #[test]
        fn any_bytes_are_an_artifact_or_an_error(
            cuts in proptest::collection::vec((0_usize..2000, proptest::prelude::any::<u8>()), 0..8),
            end in 0_usize..2000,
        ) {
            let layers = [
                layer("application/vnd.cncf.model.weight.v1.raw", FILE_PATH, "a/s.bin"),
                layer("x", TITLE, "a/manifest.json"),
            ];
            let text = format!(
                r#"{{"schemaVersion": 2, "layers": [{}], "manifests": []}}"#,
                layers.join(",")
            );
            let mut bytes = text.into_bytes();
            for (at, byte) in cuts {
                let n = bytes.len();
                bytes[at % n] = byte;
            }
            bytes.truncate(end);
            if let Ok(Found::Artifact(artifact)) = parse(&bytes) {
                proptest::prop_assert!(artifact.layers.len() <= 2);
            }
        }
    }
}
