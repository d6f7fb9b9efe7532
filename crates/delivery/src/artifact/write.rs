//! Describing a package as an artifact.

use std::collections::BTreeMap;

use serde::Serialize;
use sterna_format::rdrr::Manifest;

use super::{
    ArtifactError, FILE_PATH, INDEX_TYPE, MANIFEST_TYPE, MAX_LAYERS, MAX_MANIFEST_BYTES, TITLE,
};
use crate::hash::{Algorithm, Digest, digest_of};
use crate::sign::SIGNATURE_FILE;

/// What ModelPack calls an artifact of a model.
pub(super) const ARTIFACT_TYPE: &str = "application/vnd.cncf.model.manifest.v1+json";
/// The media type of what it says of the model.
const CONFIG_TYPE: &str = "application/vnd.cncf.model.config.v1+json";
/// That of a file with weights.
const WEIGHT_TYPE: &str = "application/vnd.cncf.model.weight.v1.raw";
/// That of a file which says how to use them.
const WEIGHT_CONFIG_TYPE: &str = "application/vnd.cncf.model.weight.config.v1.raw";
/// That of a file about the model.
const DOC_TYPE: &str = "application/vnd.cncf.model.doc.v1.raw";

/// A file of a package that is to be described.
#[derive(Debug, Clone)]
pub(crate) struct File {
    pub(crate) name: String,
    /// The SHA-256 of its bytes.
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    /// Whether it has weights, or what makes some of others.
    pub(crate) is_shard: bool,
}

/// The two documents of an artifact that aren't files of its package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Described {
    /// What the model is.
    pub(crate) config: Vec<u8>,
    /// The manifest, which names everything.
    pub(crate) manifest: Vec<u8>,
}

// The order of fields is that of the bytes, whatever `serde_json` does with maps.

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    schema_version: u32,
    media_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<Descriptor<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<Vec<Descriptor<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    manifests: Option<Vec<Descriptor<'a>>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor<'a> {
    media_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact_type: Option<&'static str>,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, &'a str>,
}

#[derive(Serialize)]
struct ModelConfig<'a> {
    descriptor: ModelName<'a>,
    config: ModelKind<'a>,
    modelfs: ModelFiles,
}

#[derive(Serialize)]
struct ModelName<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct ModelKind<'a> {
    architecture: &'a str,
    format: &'static str,
    quantization: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ModelFiles {
    r#type: &'static str,
    diff_ids: Vec<String>,
}

impl Descriptor<'_> {
    fn of(media_type: &'static str, bytes: &[u8]) -> Self {
        Self {
            media_type,
            artifact_type: None,
            digest: oci(&digest_of(Algorithm::Sha256, bytes)),
            size: bytes.len() as u64,
            annotations: BTreeMap::new(),
        }
    }
}

/// A digest as OCI writes it.
fn oci(digest: &Digest) -> String {
    format!("sha256:{digest}")
}

fn json_of(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).expect("structs of text and numbers are JSON")
}

/// Describes the package with this `manifest` and these `files`, in their order. The same package is always described
/// with the same bytes.
///
/// Errors: [`ArtifactError`] for more than registries have to accept.
pub(crate) fn describe(manifest: &Manifest, files: &[File]) -> Result<Described, ArtifactError> {
    if files.len() > MAX_LAYERS {
        let found = files.len();
        return Err(ArtifactError::TooManyLayers { found });
    }
    let config = json_of(&ModelConfig {
        descriptor: ModelName {
            name: &manifest.model_id,
        },
        config: ModelKind {
            architecture: &manifest.model_type,
            format: "rdrr",
            quantization: &manifest.quantization,
        },
        modelfs: ModelFiles {
            r#type: "layers",
            diff_ids: files.iter().map(|file| oci(&file.digest)).collect(),
        },
    });
    let layers = files.iter().map(|file| Descriptor {
        media_type: match file.name.as_str() {
            SIGNATURE_FILE => DOC_TYPE,
            _ if file.is_shard => WEIGHT_TYPE,
            _ => WEIGHT_CONFIG_TYPE,
        },
        artifact_type: None,
        digest: oci(&file.digest),
        size: file.size,
        annotations: [(FILE_PATH, &*file.name), (TITLE, &*file.name)].into(),
    });
    let manifest = json_of(&Document {
        schema_version: 2,
        media_type: MANIFEST_TYPE,
        artifact_type: Some(ARTIFACT_TYPE),
        config: Some(Descriptor::of(CONFIG_TYPE, &config)),
        layers: Some(layers.collect()),
        manifests: None,
    });
    if manifest.len() > MAX_MANIFEST_BYTES {
        let found = manifest.len();
        return Err(ArtifactError::TooLarge { found });
    }
    Ok(Described { config, manifest })
}

/// The index of an image layout that has this manifest and no other.
pub(crate) fn index_of(manifest: &[u8]) -> Vec<u8> {
    json_of(&Document {
        schema_version: 2,
        media_type: INDEX_TYPE,
        artifact_type: None,
        config: None,
        layers: None,
        manifests: Some(vec![Descriptor {
            artifact_type: Some(ARTIFACT_TYPE),
            ..Descriptor::of(MANIFEST_TYPE, manifest)
        }]),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Found, parse};
    use super::*;

    const MANIFEST: &str = r#"{"version": 1, "modelId": "tiny", "modelType": "transformer",
        "quantization": "F32", "hashAlgorithm": "sha256", "totalSize": 32, "tensorsFile": "t.json",
        "groups": {}, "architecture": "x", "config": {}, "shards": [{"index": 0, "fileName": "s.bin", "size": 32,
        "hash": "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"}]}"#;

    fn files(n: usize) -> Vec<File> {
        let file = |i: usize| File {
            name: match i {
                0 => "manifest.json".to_owned(),
                1 => SIGNATURE_FILE.to_owned(),
                i => format!("shard_{i:05}.bin"),
            },
            digest: digest_of(Algorithm::Sha256, &i.to_le_bytes()),
            size: i as u64,
            is_shard: i > 1,
        };
        (0..n).map(file).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let manifest = Manifest::parse(MANIFEST.as_bytes()).unwrap();
        let files = files(4);
        let described = describe(&manifest, &files).unwrap();
        assert_eq!(described, describe(&manifest, &files).unwrap());
        let Found::Artifact(artifact) = parse(&described.manifest).unwrap() else {
            panic!("expected an artifact")
        };
        for file in &files {
            let layer = artifact.file(&file.name).unwrap();
            assert_eq!((layer.digest, layer.size), (file.digest, file.size));
        }
        let found: serde_json::Value = serde_json::from_slice(&described.manifest).unwrap();
        let kinds: Vec<_> = (found["layers"].as_array().unwrap().iter())
            .map(|layer| layer["mediaType"].as_str().unwrap())
            .collect();
        assert_eq!(
            kinds,
            [WEIGHT_CONFIG_TYPE, DOC_TYPE, WEIGHT_TYPE, WEIGHT_TYPE]
        );
        let Found::Listed { digest } = parse(&index_of(&described.manifest)).unwrap() else {
            panic!("expected a list")
        };
        assert_eq!(digest, digest_of(Algorithm::Sha256, &described.manifest));
    }

    #[test]
    fn no_more_is_written_than_registries_take() {
        let manifest = Manifest::parse(MANIFEST.as_bytes()).unwrap();
        let error = describe(&manifest, &files(MAX_LAYERS + 1)).unwrap_err();
        assert!(
            matches!(error, ArtifactError::TooManyLayers { .. }),
            "{error}"
        );
        let error = describe(&manifest, &files(MAX_LAYERS)).unwrap_err();
        assert!(matches!(error, ArtifactError::TooLarge { .. }), "{error}");
    }
}
