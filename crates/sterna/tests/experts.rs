//! That answers don't depend on how many experts are in memory.

use std::path::Path;
use std::sync::Arc;

use crate::common::cpu;
use sterna::native::{ExpertsInMemory, LoadFrom, LocalModel, Located, Weights};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Logits, Session, SessionOptions};

/// Logits of a prompt and of tokens after it, and what was odd.
fn logits(path: &Path, experts: Option<ExpertsInMemory>) -> (Vec<f32>, Vec<String>) {
    let files = LocalModel::open("model", Located::at(path).unwrap(), None, None).unwrap();
    let from = LoadFrom {
        weights: Weights::Read,
        experts,
        n_threads: 1,
        progress: &|_| {},
    };
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let loaded = files.load_on(plan, cpu(), &from).unwrap();
    let mut session = Session::new(Arc::clone(&loaded.model), SessionOptions::new(64)).unwrap();
    let mut all = session.forward(&[5, 300, 77, 9, 41], Logits::All).unwrap();
    for id in [8, 2, 310, 77] {
        all.extend(session.forward(&[id], Logits::Last).unwrap());
    }
    let warnings = loaded.warnings.iter().map(ToString::to_string).collect();
    (all, warnings)
}

#[test]
fn experts_that_stay_in_their_file_change_no_bit() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let mixtures = testdata.join("reference-mixtures");
    for (path, is_mixture) in [
        (mixtures.join("hf/mixtral"), true),
        (mixtures.join("hf/qwen3-moe"), true),
        (mixtures.join("hf/deepseek-v3"), true),
        (testdata.join("reference-states/hf/lfm2-moe"), true),
        (testdata.join("reference-logits/llama"), false),
    ] {
        let (expected, _) = logits(&path, None);
        for bound in [
            ExpertsInMemory::Share(0.0),
            ExpertsInMemory::Share(0.4),
            ExpertsInMemory::Bytes(10_000),
        ] {
            let (found, warnings) = logits(&path, Some(bound));
            assert_eq!(found, expected, "{}, {bound:?}", path.display());
            let is_odd = warnings
                .iter()
                .any(|warning| warning.contains("no experts"));
            assert_eq!(is_odd, !is_mixture, "{}: {warnings:?}", path.display());
            assert!(
                !warnings
                    .iter()
                    .any(|warning| warning.contains("bytes of experts"))
            );
        }
    }
}
