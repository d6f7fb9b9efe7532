//! Comparing models on a GPU with the same models on the CPU.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use sterna_engine::{Backend, Logits, Model, ModelPlan, Session, SessionOptions};

use super::{best, load_on, max_difference, plan_gguf, plan_hf};

// Bounds on mean squared errors over mean squares.

/// Float models: sums in another order, and the rounding of f16 and bf16 in another place.
pub(crate) const MAX_ERROR_FLOAT: f64 = 1e-7;
/// Models that round activations: a difference in the last place flips a rounding now and then, which
/// these narrow models feel.
pub(crate) const MAX_ERROR_INT8: f64 = 2e-3;
/// Types that the GPU holds as another, and doesn't round the activations for: the CPU's own error.
pub(crate) const MAX_ERROR_HELD: f64 = 4e-3;
/// Best tokens are compared where the CPU is this sure.
const SURE: f32 = 0.5;

/// A model in `testdata/`, as often as wanted.
pub(crate) enum Source {
    Hf(PathBuf),
    Gguf(PathBuf),
}

impl Source {
    pub(crate) fn plan(&self) -> (ModelPlan, Vec<Bytes>) {
        match self {
            Source::Hf(dir) => plan_hf(dir),
            Source::Gguf(path) => plan_gguf(std::slice::from_ref(path)),
        }
    }

    pub(crate) fn load<B: Backend>(&self, backend: B) -> Arc<Model<B>> {
        let (plan, files) = self.plan();
        load_on(plan, &files, backend).unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }

    pub(crate) fn name(&self) -> String {
        let (Source::Hf(path) | Source::Gguf(path)) = self;
        path.display().to_string()
    }
}

pub(crate) fn logits<B: Backend>(
    model: &Arc<Model<B>>,
    ids: &[u32],
    options: SessionOptions,
) -> Vec<f32> {
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(ids, Logits::All).unwrap()
}

/// Mean squared error over mean square.
pub(crate) fn error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f32| f64::from(v) * f64::from(v);
    let errors: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    errors / want.iter().map(|v| square(*v)).sum::<f64>()
}

/// Compares logits at every position, and the best tokens where the CPU is sure.
pub(crate) fn check_logits(name: &str, got: &[f32], want: &[f32], n_vocab: usize, bound: f64) {
    let error = error(got, want);
    let difference = max_difference(got, want);
    eprintln!("{name}: error {error:.1e}, largest difference {difference:.1e}");
    assert!(
        error <= bound,
        "{name}: {error}, largest difference {difference}"
    );
    let sure = SURE.max(2.0 * difference);
    let rows = got.chunks_exact(n_vocab).zip(want.chunks_exact(n_vocab));
    for (i, (got, want)) in rows.enumerate() {
        let (id, margin) = best(want);
        if margin > sure {
            assert_eq!(best(got).0, id, "{name}, position {i}");
        }
    }
}
