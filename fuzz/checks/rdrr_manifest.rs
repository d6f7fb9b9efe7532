//! `manifest.json` of packages, alone and joined with its own inline tensor map.

use sterna_format::rdrr::{Manifest, Package, hf_config, is_plain_file_name};

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    let manifest = match Manifest::parse(data) {
        Ok(manifest) => manifest,
        Err(problems) => {
            assert!(!problems.is_empty() && !problems.to_string().is_empty());
            return;
        }
    };
    let total: u64 = manifest.shards.iter().map(|shard| shard.size).sum();
    assert_eq!(total, manifest.total_size);
    assert!(
        manifest
            .shards
            .iter()
            .all(|shard| is_plain_file_name(&shard.file_name))
    );
    let files = manifest.hashed_files();
    assert!(files.iter().all(|file| is_plain_file_name(&file.name)));
    if let Ok(hf) = hf_config(&manifest) {
        let _ = hf.parsed();
    }
    if let Some(hints) = &manifest.runtime_optimizations {
        for hint in hints.iter() {
            let _ = (hint.name(), hint.value());
        }
    }
    let text = manifest.to_json();
    let again = Manifest::parse(&text).expect("what was written");
    assert_eq!(again, manifest);
    assert_eq!(again.to_json(), text);
    if let Ok(package) = Package::new(manifest, None) {
        let _ = package.warnings();
        if let Ok(hf) = package.hf_config(None) {
            let _ = hf.parsed();
        }
        let shards = &package.manifest().shards;
        for tensor in package.tensors().iter() {
            let pieces = tensor.pieces();
            assert!(
                pieces
                    .iter()
                    .all(|p| p.offset + p.size <= shards[p.shard].size)
            );
            assert_eq!(pieces.iter().map(|p| p.size).sum::<u64>(), tensor.size);
        }
    }
}
