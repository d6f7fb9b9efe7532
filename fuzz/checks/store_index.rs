//! Index files of the store.

use std::path::Path;

use sterna_delivery::store::Entry;

/// Panics if a promise of the reader is broken.
pub(crate) fn check(data: &[u8]) {
    let Ok((name, entry)) = Entry::parse(data, Path::new("index")) else {
        return;
    };
    let largest = entry.files.values().map(|blob| blob.size).max();
    assert!(entry.size() >= largest.unwrap_or(0));
    for piece in entry.groups.iter().flat_map(|group| &group.pieces) {
        assert!(entry.files.values().any(|blob| *blob == piece.blob));
        let end = piece.offset.checked_add(piece.len);
        assert!(end.is_some_and(|end| end <= piece.blob.size));
    }
    // What can be read can be written, and reads the same.
    let again = entry.to_json(&name).expect("what was read");
    let again = Entry::parse(&again, Path::new("index")).expect("what was written");
    assert_eq!(again, (name, entry));
}
