//! safetensors headers, as whole files and as the start of a longer one, and index files.

use sterna_format::names;
use sterna_format::safetensors::{Index, SafeTensors, SafeTensorsError, Writer, merge};

/// Long enough that the tensors a mutated header describes are often within the file.
const LONG: u64 = 1 << 40;

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    if let Ok(index) = Index::parse(data) {
        let files = index.files();
        assert!(files.iter().all(|f| !f.contains(['/', '\\'])));
        let _ = merge(Vec::new(), Some(&index));
    }
    let whole = SafeTensors::parse(data, data.len() as u64);
    assert!(!matches!(whole, Err(SafeTensorsError::NeedMore { .. })));

    match SafeTensors::parse(data, LONG) {
        Err(SafeTensorsError::NeedMore { at_least }) => assert!(at_least > data.len() as u64),
        // Nothing is wrong but the length: the tensors end before the file does.
        Err(SafeTensorsError::Hole { begin, end: LONG }) => {
            let file = SafeTensors::parse(data, begin).expect("a file of the right length");
            rewrite(file, begin);
        }
        Err(_) => {}
        Ok(file) => rewrite(file, LONG),
    }
}

/// What can be read can be written, and reads the same.
fn rewrite(file: SafeTensors, file_len: u64) {
    let mut writer = Writer::new(file.metadata().clone());
    for t in file.tensors() {
        assert!(t.offset + t.len <= file_len);
        writer
            .tensor(t.name.clone(), t.dtype, &t.shape)
            .expect("a tensor that was read");
    }
    let layout = writer.finish();
    let again = SafeTensors::parse(&layout.header, layout.file_len).expect("what was written");
    assert_eq!(again.tensors(), layout.tensors);
    assert_eq!(again.metadata(), file.metadata());
    let catalog = merge(vec![("a", file)], None).expect("names that are unique");
    let _ = names::translate_catalog("gemma3", &catalog);
}
