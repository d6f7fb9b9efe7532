//! Inputs of the fuzzers, which tests replay without one.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use flate2::read::GzDecoder;

/// Calls `check` with all inputs of a fuzz target.
///
/// The name of each is printed first, for the harness to show when `check` panics.
pub fn replay(target: &str, check: fn(&[u8])) {
    for (name, input) in inputs(target) {
        println!("{name}");
        check(&input);
    }
}

/// Names and contents of all inputs of a fuzz target: those in `fuzz/regressions`, and its corpus, which is
/// an archive in `fuzz/corpora`. There is at least one.
pub fn inputs(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut inputs = Vec::new();
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    // A target without regressions has no folder for them.
    match fs::read_dir(fuzz.join("regressions").join(target)) {
        Ok(files) => {
            for file in files {
                let path = file.expect("a folder that can be read").path();
                let input = fs::read(&path).expect("a regression");
                inputs.push((path.display().to_string(), input));
            }
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
    }
    let archive = fuzz.join("corpora").join(format!("{target}.tar.gz"));
    let file = File::open(&archive).unwrap_or_else(|e| panic!("{}: {e}", archive.display()));
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    for entry in archive.entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a name").display().to_string();
        let mut input = Vec::new();
        entry.read_to_end(&mut input).expect("an input");
        inputs.push((name, input));
    }
    assert!(!inputs.is_empty(), "no inputs for {target}");
    inputs
}
