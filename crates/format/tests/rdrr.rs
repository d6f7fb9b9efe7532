//! Packages that other implementations wrote.

use std::fs;
use std::path::{Path, PathBuf};

use sterna_format::DType;
use sterna_format::rdrr::{Manifest, Package, Packing, TensorMap};

const SAMPLES: [&str; 4] = [
    "dec2025-llama-bf16-row",
    "tiny-gemma3-q4k",
    "tiny-llama-f16",
    "v1-gemma3-q4k",
];

fn folder(sample: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/rdrr-samples")
        .join(sample)
}

fn manifest(sample: &str) -> Manifest {
    let bytes = fs::read(folder(sample).join("manifest.json")).unwrap();
    Manifest::parse(&bytes).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
}

fn package(sample: &str) -> Package {
    let manifest = manifest(sample);
    let tensors = manifest.tensors_file.as_ref().map(|name| {
        let bytes = fs::read(folder(sample).join(name)).unwrap();
        TensorMap::parse(&bytes).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
    });
    Package::new(manifest, tensors).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
}

#[test]
fn samples_are_read() {
    for (sample, n_tensors, n_shards, n_groups) in [
        ("dec2025-llama-bf16-row", 21, 7, 0),
        ("tiny-gemma3-q4k", 28, 8, 0),
        ("tiny-llama-f16", 21, 6, 0),
        ("v1-gemma3-q4k", 28, 10, 4),
    ] {
        let package = package(sample);
        let manifest = package.manifest();
        assert_eq!(package.tensors().len(), n_tensors, "{sample}");
        assert_eq!(manifest.shards.len(), n_shards, "{sample}");
        assert_eq!(manifest.groups.len(), n_groups, "{sample}");
        for (i, shard) in manifest.shards.iter().enumerate() {
            let len = fs::metadata(folder(sample).join(&shard.file_name))
                .unwrap()
                .len();
            assert_eq!(shard.size, len, "{sample}: shard {i}");
        }
    }
}

#[test]
fn what_is_read_is_written() {
    for sample in SAMPLES {
        let manifest = manifest(sample);
        let text = manifest.to_json();
        let again = Manifest::parse(&text).unwrap_or_else(|p| panic!("{sample}:\n{p}"));
        assert_eq!(again, manifest, "{sample}");
        assert_eq!(again.to_json(), text, "{sample}");
        let package = package(sample);
        let text = package.tensors().to_json();
        let again = TensorMap::parse(&text).unwrap_or_else(|p| panic!("{sample}:\n{p}"));
        assert_eq!(again, *package.tensors(), "{sample}");
    }
}

#[test]
fn padded_rows_are_told_by_size() {
    for sample in ["tiny-gemma3-q4k", "v1-gemma3-q4k"] {
        let package = package(sample);
        let packing = |name: &str| {
            let tensor = package.tensors().get(name).unwrap();
            assert_eq!(tensor.dtype.known(), Some(DType::Q4_K));
            tensor.packing()
        };
        // 320 columns are a block and a quarter; 512 are two.
        let q = packing("model.layers.0.self_attn.q_proj.weight");
        assert_eq!(q, Some(Packing::PaddedRows), "{sample}");
        let down = packing("model.layers.0.mlp.down_proj.weight");
        assert_eq!(down, Some(Packing::Flat), "{sample}");
    }
}
