//! Output heads held in another type than they are stored in.

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::{cpu, load, logits, max_difference, plan_gguf, plan_hf, testdata};
use bytes::Bytes;
use sterna_engine::plan::HeadOptions;
use sterna_engine::{Cpu, Model, ModelPlan};
use sterna_format::DType;

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 3 + i * 37 % 500).collect()
}

fn bitllama() -> (ModelPlan, Vec<Bytes>) {
    plan_gguf(&[testdata().join("bitllama-3M/bitllama-3M-f16.gguf")])
}

fn load_as(model: (ModelPlan, Vec<Bytes>), dtype: Option<DType>) -> Arc<Model<Cpu>> {
    let (plan, files) = model;
    let plan = plan.with_head(held_as(dtype)).unwrap();
    load(plan, &files, cpu()).unwrap()
}

fn held_as(dtype: Option<DType>) -> HeadOptions {
    HeadOptions {
        dtype,
        ..HeadOptions::default()
    }
}

#[test]
fn another_head_is_close_by_its_bits() {
    let want = logits(&load_as(bitllama(), None), &ids(60), 1000);
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (dtype, bound) in [
        (DType::F16, 0.0),
        (DType::Q8_0, 0.01),
        (DType::Q6_K, 0.02),
        (DType::Q4_K, 0.1),
    ] {
        let got = logits(&load_as(bitllama(), Some(dtype)), &ids(60), 1000);
        let difference = max_difference(&want, &got) / largest;
        assert!(difference <= bound, "{dtype}: {difference}");
        assert_eq!(difference == 0.0, dtype == DType::F16, "{dtype}");
    }
}

#[test]
fn memory_counts_the_copy_that_is_made() {
    let with = |model: &dyn Fn() -> ModelPlan, dtype| {
        let plan = model().with_head(held_as(dtype)).unwrap();
        (
            plan.memory_bytes(),
            plan.bytes_per_token(),
            plan.made_bytes(),
        )
    };
    let (n_vocab, k) = (512, 256);
    let q6_k = n_vocab * k / 256 * 210;
    // Tied: the table stays, and a copy is read instead of it.
    let tied = || bitllama().0;
    let (held, read, made) = with(&tied, None);
    assert_eq!(made, 0);
    assert_eq!(
        with(&tied, Some(DType::Q6_K)),
        (held + q6_k, read - n_vocab * k * 2 + q6_k, q6_k)
    );
    // A head of its own is replaced.
    let dir: PathBuf = testdata().join("bitllama-3M/hf-packed");
    let plan = || plan_hf(&dir).0;
    let (held, read, _) = with(&plan, None);
    let (held_q, read_q, made) = with(&plan, Some(DType::Q8_0));
    assert_eq!(made, n_vocab * k / 32 * 34);
    assert!(held_q >= held - n_vocab * k * 4 + made && read_q <= read);
}

#[test]
fn a_width_of_no_whole_blocks_is_refused() {
    let (plan, _) = plan_hf(&testdata().join("stories260K/hf"));
    let dtype = Some(DType::Q6_K);
    let error = plan.with_head(held_as(dtype)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "output head in another type, Q6_K: expected a width that is a multiple of 256, found 64"
    );
}
