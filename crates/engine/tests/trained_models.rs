//! Small trained models in every form they come in, against what they are known to give.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{self, best, load_gguf, load_hf, logits, nll, read, testdata};
use serde_json::Value;
use sterna_engine::{Cpu, Model};

fn json(path: &Path) -> Value {
    serde_json::from_slice(&read(path)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    let values = value.as_array().unwrap().iter();
    values.map(|v| v.as_f64().unwrap() as f32).collect()
}

/// Mean negative log-likelihood over the windows of `expected/perplexity.json`.
fn check_likelihood(model: &Arc<Model<Cpu>>, expected: &Path, bound: f64, name: &str) {
    let expected = json(&expected.join("perplexity.json"));
    let (mut got, mut n) = (0.0, 0);
    for window in expected["windows"].as_array().unwrap() {
        let ids = ids(&window["text_ids"]);
        let logits = logits(model, &ids, 1000);
        got += nll(&logits, &ids, model.config().n_vocab) * (ids.len() - 1) as f64;
        n += ids.len() - 1;
    }
    let (got, want) = (got / n as f64, expected["mean_nll"].as_f64().unwrap());
    assert!((got - want).abs() < bound, "{name}: {got}, not {want}");
}

/// Fed the expected text, the best id is the next expected one wherever the margin is `sure`.
fn check_choices(
    model: &Arc<Model<Cpu>>,
    prompt: &[u32],
    next: &[u32],
    margins: &[f32],
    sure: f32,
) {
    let mut ids = prompt.to_vec();
    ids.extend(&next[..next.len() - 1]);
    let logits = logits(model, &ids, 1000);
    let rows = logits.chunks_exact(model.config().n_vocab);
    let rows = rows.skip(prompt.len() - 1);
    for (i, ((row, &want), &margin)) in rows.zip(next).zip(margins).enumerate() {
        if margin > sure {
            assert_eq!(best(row).0, want, "step {i}, margin {margin}");
        }
    }
}

fn check_greedy(model: &Arc<Model<Cpu>>, expected: &Path, sure: f32) {
    let expected = json(&expected.join("greedy.json"));
    for case in expected["greedy"].as_array().unwrap() {
        check_choices(
            model,
            &ids(&case["prompt_ids"]),
            &ids(&case["generated_ids"]),
            &floats(&case["top1_minus_top2"]),
            sure,
        );
    }
}

fn forms(dir: &Path, hf: &str) -> Vec<(PathBuf, Arc<Model<Cpu>>)> {
    let gguf = common::files(dir, "gguf").into_iter();
    let mut forms: Vec<_> = gguf.map(|path| (path.clone(), load_gguf(&path))).collect();
    forms.push((dir.join(hf), load_hf(&dir.join(hf))));
    assert_eq!(forms.len(), 4);
    forms
}

#[test]
fn stories260k_in_every_form() {
    let dir = testdata().join("stories260K");
    for (path, model) in forms(&dir, "hf") {
        let name = path.display().to_string();
        // f32 forms differ from the reference by rounding, stored types by what they lose.
        let (bound, sure) = match name.as_str() {
            n if n.ends_with("f16.gguf") => (1e-4, 0.01),
            n if n.ends_with("q8_0.gguf") => (5e-3, 0.3),
            _ => (1e-6, 1e-4),
        };
        check_likelihood(&model, &dir.join("expected"), bound, &name);
        check_greedy(&model, &dir.join("expected"), sure);
    }
}

#[test]
fn bitllama_in_every_form() {
    let dir = testdata().join("bitllama-3M");
    for (path, model) in forms(&dir, "hf-packed") {
        let name = path.display().to_string();
        check_likelihood(&model, &dir.join("expected"), 5e-3, &name);
        check_greedy(&model, &dir.join("expected"), 0.5);
    }
}

#[test]
fn tiny_tales_tells_the_expected_tales() {
    let dir = testdata().join("../crates/sterna/models/tiny-tales");
    let model = load_hf(&dir);
    for case in json(&dir.join("expected.json")).as_array().unwrap() {
        check_choices(
            &model,
            &ids(&case["prompt_ids"]),
            &ids(&case["greedy_ids"]),
            &floats(&case["margins"]),
            0.5,
        );
    }
}
