//! Every family and storage type as a GGUF file, against Transformers on the same weights.

mod common;

use std::path::{Path, PathBuf};

use common::{Reference, best, load_gguf_parts, logits, max_difference, nll, testdata};

/// Float activations: the reference is f32 in another order of summation.
const MAX_DIFFERENCE: f32 = 1e-3;
/// Int8 activations: one flipped rounding moves the logits of so narrow a model by some tenths.
const MAX_NLL_DIFFERENCE: f64 = 0.02;
const TERNARY_MARGIN: f32 = 0.5;

fn check(dir: &Path) {
    let reference = Reference::read(&dir.join("reference.safetensors"));
    let name = dir.file_name().unwrap().to_str().unwrap();
    let int8 = name == "falcon-e-i2-s" || name.starts_with("bitnet");
    let model = load_gguf_parts(&common::files(dir, "gguf"));
    let n_vocab = reference.n_vocab();
    let whole = logits(&model, &reference.ids, 1000);
    for chunk in [7, 1] {
        assert_eq!(
            whole,
            logits(&model, &reference.ids, chunk),
            "chunks of {chunk}"
        );
    }
    if !int8 {
        let difference = max_difference(&whole, &reference.logits);
        assert!(difference < MAX_DIFFERENCE, "differs by {difference}");
        return;
    }
    let got = nll(&whole, &reference.ids, n_vocab);
    let want = nll(&reference.logits, &reference.ids, n_vocab);
    assert!(
        (got - want).abs() < MAX_NLL_DIFFERENCE,
        "mean negative log-likelihood {got}, not {want}"
    );
    for (got, want) in whole
        .chunks_exact(n_vocab)
        .zip(reference.logits.chunks_exact(n_vocab))
    {
        let (id, margin) = best(want);
        if margin > TERNARY_MARGIN {
            assert_eq!(best(got).0, id);
        }
    }
}

#[test]
fn every_file() {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(testdata().join("reference-gguf"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|dir| dir.is_dir())
        .collect();
    dirs.sort();
    assert!(!dirs.is_empty());
    let failures: Vec<String> = dirs
        .iter()
        .filter_map(|dir| {
            let result = std::panic::catch_unwind(|| check(dir));
            result.err().map(|e| {
                let message = e.downcast_ref::<String>().cloned().unwrap_or_default();
                format!("{}: {message}", dir.display())
            })
        })
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}
