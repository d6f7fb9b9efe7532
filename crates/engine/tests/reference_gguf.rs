//! Every family and storage type as a GGUF file, against Transformers on the same weights.

use std::path::{Path, PathBuf};

use crate::common::{
    self, Reference, best, load_gguf_parts_on, logits, max_difference, nll, testdata,
};
use sterna_engine::Activations;

/// Float activations: the reference is f32 in another order of summation.
const MAX_DIFFERENCE: f32 = 1e-3;
/// Blocks of integers with int8 activations, as the share of the error in the spread of the logits.
///
/// Blocks of 256 normal values reach 2.9 deviations, so that rounding to 1/127 of the largest is off
/// by 2.9 / 127 / √12 = 0.7 % of one; what comes out of a dozen products in a row is off by four times
/// that. These models give 2 to 3 %, and largest differences of 0.3 to 1.7, which are llama.cpp's own
/// (0.4 to 1.7, in the README of the folder). A block read wrongly is off by tens of percent.
const MAX_ROUNDING_ERROR: f64 = 0.04;
/// The same of models with delta nets, which divide what a head gives by its size, however small that is.
const MAX_ROUNDING_ERROR_DELTA: f64 = 0.06;
/// Layers trained with int8 activations: one flipped rounding moves the logits of so narrow a model by some tenths.
const MAX_NLL_DIFFERENCE: f64 = 0.02;
const TERNARY_MARGIN: f32 = 0.5;

fn check(dir: &Path) {
    let reference = Reference::read(&dir.join("reference.safetensors"));
    let name = dir.file_name().unwrap().to_str().unwrap();
    let int8 = name == "falcon-e-i2-s" || name.starts_with("bitnet");
    let n_vocab = reference.n_vocab();
    let run = |activations| {
        let cpu = common::cpu().with_activations(activations);
        let model = load_gguf_parts_on(&common::files(dir, "gguf"), cpu);
        let whole = logits(&model, &reference.ids, 1000);
        for chunk in [7, 1] {
            let chunked = logits(&model, &reference.ids, chunk);
            assert_eq!(whole, chunked, "{activations:?}, chunks of {chunk}");
        }
        whole
    };
    let whole = run(Activations::F32);
    let error = error_share(&run(Activations::Int8), &whole);
    let bound = match name.starts_with("bonsai2") || name.starts_with("qwen3.5") {
        true => MAX_ROUNDING_ERROR_DELTA,
        false => MAX_ROUNDING_ERROR,
    };
    assert!(error < bound, "int8 is off by {error}");
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

/// The root mean square of `got − want`, as a share of the deviation of `want`.
fn error_share(got: &[f32], want: &[f32]) -> f64 {
    let mean = want.iter().sum::<f32>() / want.len() as f32;
    let power: f64 = want.iter().map(|v| f64::from(v - mean).powi(2)).sum();
    let pairs = got.iter().zip(want);
    let error: f64 = pairs.map(|(g, w)| f64::from(g - w).powi(2)).sum();
    (error / power).sqrt()
}

#[test]
fn every_file() {
    let folders = [
        "reference-gguf",
        "reference-mixtures/gguf",
        "reference-states/gguf",
    ];
    let entries = folders.map(|folder| std::fs::read_dir(testdata().join(folder)).unwrap());
    let mut dirs: Vec<PathBuf> = (entries.into_iter().flatten())
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
