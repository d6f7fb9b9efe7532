//! GGUF headers, as whole files and as the start of a longer one.

use sterna_format::gguf::{Gguf, GgufError, Model, Writer, split_names};

/// Long enough that the tensors a mutated header describes are often within the file.
const LONG: u64 = 1 << 40;

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    if let Ok(name) = std::str::from_utf8(data) {
        let _ = split_names(name);
    }
    let whole = Gguf::parse(data, data.len() as u64);
    assert!(!matches!(whole, Err(GgufError::NeedMore { .. })));

    match Gguf::parse(data, LONG) {
        Err(GgufError::NeedMore { at_least }) => assert!(at_least > data.len() as u64),
        Err(_) => {}
        Ok(gguf) => {
            for tensor in gguf.tensors() {
                assert!(tensor.offset + tensor.len <= LONG);
            }
            rewrite(&gguf);
            let _ = Model::from_parts(vec![gguf.clone(), gguf.clone()]);
            let _ = Model::from_parts(vec![gguf]);
        }
    }
}

/// What can be read can be written, and reads the same.
fn rewrite(gguf: &Gguf) {
    let mut writer = Writer::new(gguf.metadata().clone()).expect("an alignment that was read");
    for t in gguf.tensors() {
        if writer.tensor(t.name.clone(), t.dtype, &t.shape).is_err() {
            // Padding can make the data section of many huge tensors overflow.
            return;
        }
    }
    let layout = writer.finish();
    let again = Gguf::parse(&layout.header, layout.file_len).expect("what was written");
    assert_eq!(again.tensors(), layout.tensors);
    assert_eq!(again.metadata().len(), gguf.metadata().len());
}
