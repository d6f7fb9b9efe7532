//! Headers of `qmodel.tensors`, alone and before a file's data; the same bytes as `rope.cache`.

use sterna_format::bundle::{BundleError, RopeFile, TensorFile};

/// Panics if a promise of the parsers is broken.
pub(crate) fn check(data: &[u8]) {
    for file_len in [data.len() as u64, 1 << 40] {
        match TensorFile::parse(data, file_len) {
            Err(BundleError::NeedMore { at_least }) => {
                assert!(at_least > data.len() as u64 && at_least <= file_len);
            }
            Err(_) => {}
            Ok(file) => check_file(&file, file_len),
        }
    }
    if let Ok(rope) = RopeFile::parse(data) {
        let bytes = rope.to_bytes().expect("what was read is in order");
        assert_eq!(RopeFile::parse(&bytes).expect("what was written"), rope);
    }
}

fn check_file(file: &TensorFile, file_len: u64) {
    let header = file.header();
    let mut free = header.len() as u64;
    for tensor in &file.tensors {
        assert!(tensor.offset >= free && tensor.offset.is_multiple_of(64));
        assert_eq!(tensor.form.bytes(), Some(tensor.size));
        free = tensor.offset + tensor.size;
    }
    assert!(free <= file_len);
    assert_eq!(
        &TensorFile::parse(&header, file_len).expect("as it was"),
        file
    );

    let forms: Vec<_> = file.tensors.iter().map(|tensor| tensor.form).collect();
    let dense = TensorFile::layout(file.model, &forms).expect("it fits with gaps");
    assert!(dense.file_len() <= file_len);
    let again = TensorFile::parse(&dense.header(), dense.file_len());
    assert_eq!(again.expect("what was written"), dense);
    if let Ok(catalog) = file.catalog(None) {
        assert_eq!(catalog.len(), file.tensors.len());
    }
}
