//! Reading the test data that several test files share.
#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::path::PathBuf;

/// A path under `testdata/`.
pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata")).join(name)
}

/// The bytes of a file under `testdata/`.
pub(crate) fn bytes(name: &str) -> Vec<u8> {
    fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The text of a file under `testdata/`.
pub(crate) fn text(name: &str) -> String {
    String::from_utf8(bytes(name)).unwrap()
}

/// The ids of each line of a file that separates them with commas.
pub(crate) fn id_lists(name: &str) -> Vec<Vec<u32>> {
    let ids = |line: &str| {
        let ids = line.split(',').map(str::trim).filter(|id| !id.is_empty());
        ids.map(|id| id.parse().unwrap()).collect()
    };
    text(name).lines().map(ids).collect()
}
