//! Headers of `qmodel.lora`, alone and before a file's data.

use sterna_format::bundle::{BundleError, LoraFile};

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    for file_len in [data.len() as u64, 1 << 40] {
        match LoraFile::parse(data, file_len) {
            Err(BundleError::NeedMore { at_least }) => {
                assert!(at_least > data.len() as u64 && at_least <= file_len);
            }
            Err(_) => {}
            Ok(file) => check_file(&file, file_len),
        }
    }
}

fn check_file(file: &LoraFile, file_len: u64) {
    let header = file.header();
    let mut free = header.len() as u64;
    for matrix in file.pairs.iter().flat_map(|pair| [&pair.a, &pair.b]) {
        assert!(matrix.offset >= free && matrix.offset.is_multiple_of(64));
        free = matrix.offset + matrix.size;
    }
    assert!(free <= file_len);
    assert_eq!(
        &LoraFile::parse(&header, file_len).expect("as it was"),
        file
    );

    let dense = LoraFile::layout(file.n_layers, file.scale, file.pairs.clone());
    let dense = dense.expect("it fits with gaps");
    assert!(dense.file_len() <= file_len);
    let again = LoraFile::parse(&dense.header(), dense.file_len());
    assert_eq!(again.expect("what was written"), dense);
}
