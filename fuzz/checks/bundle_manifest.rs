//! Quantize manifests, in both forms.

use sterna_format::bundle::{ArchType, Manifest};

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    for arch in [ArchType::BitNet, ArchType::BonsaiImage] {
        let Ok(manifest) = Manifest::parse(data, arch) else {
            continue;
        };
        for tensor in &manifest.tensors {
            let data = &tensor.data;
            assert!(usize::from(data.shard) < manifest.shards.len());
            assert!(data.offset.checked_add(data.size).is_some());
            assert!(tensor.padded_rows >= tensor.rows && tensor.padded_cols >= tensor.cols);
            assert!(tensor.action.stored_type(tensor.dtype).is_some());
        }
        for section in manifest.sections.iter().flatten() {
            let end = u64::from(section.first) + u64::from(section.len);
            assert!(end <= manifest.tensors.len() as u64);
        }
        let bytes = manifest.to_bytes(arch).expect("what was read is in order");
        assert_eq!(bytes.len(), data.len());
        let again = Manifest::parse(&bytes, arch).expect("what was written");
        assert_eq!(again, manifest);
        assert_eq!(again.to_bytes(arch).expect("the same again"), bytes);
    }
}
