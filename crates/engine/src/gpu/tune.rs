//! What a model multiplies, for measuring how it is done best.

use sterna_gpu::kernels::linear::Form;
use sterna_gpu::tuning::Sample;

use super::Gpu;
use super::fuse::fuse;
use super::op::Op;

impl Gpu {
    /// The products of the steps that were run last, four of them at most, each in its order: what a
    /// [`Tuner`](sterna_gpu::tuning::Tuner) measures. None before the first step.
    pub fn products(&self) -> Vec<Sample> {
        let tape = self.tape.lock();
        let samples = tape.steps().flat_map(fuse).flat_map(|op| match op {
            Op::Linear { x, norm, outputs } => {
                let of_output = |output: super::op::Output| Sample {
                    weights: output.w.linear(),
                    n_rows: x.n_rows,
                    is_normed: norm.is_some() && matches!(output.w.kind().form(), Form::Int8(_)),
                    epilogue: output.epilogue,
                };
                outputs.into_iter().map(of_output).collect()
            }
            _ => Vec::new(),
        });
        samples.collect()
    }
}
