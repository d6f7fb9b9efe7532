//! What layers with states have in common: a convolution and a scan over the rows of each sequence.

use std::ops::Range;

use sterna_gpu::graph::{Convolution, Graph, Op, ScanGates, StateRef, View};
use sterna_gpu::kernels::recurrent::ScanShape;
use sterna_kernels::activation::Activation;

use super::{Gpu, GpuBuffer, GpuCache, GpuVector};
use crate::backend::{BackendError, Sequence};
use crate::stage::Stage;

impl GpuVector {
    /// The convolution of `dim` channels that has these taps.
    pub(super) fn convolution(
        &self,
        dim: usize,
        bias: Option<&GpuVector>,
        is_gated: bool,
    ) -> Convolution {
        Convolution {
            taps: self.buffer.clone(),
            n_taps: self.len.checked_div(dim).unwrap_or(0),
            bias: bias.map(|bias| bias.buffer.clone()),
            is_gated,
        }
    }
}

impl Gpu {
    /// Calls `push` with the rows of each sequence, and what makes the part of the layer's state, `n` values, that begins
    /// at a value.
    pub(super) fn for_states(
        &self,
        stage: Stage,
        n: usize,
        sequences: &mut [Sequence<'_, GpuCache>],
        mut push: impl FnMut(&mut Graph, Range<usize>, &dyn Fn(usize) -> StateRef),
    ) -> Result<(), BackendError> {
        let mut graph = self.graph.lock();
        let mut end = 0;
        for Sequence { cache, n_rows } in sequences {
            let layer = cache.state(&self.device, &mut graph, stage.layer.unwrap_or(0), n)?;
            let position = cache.position(&self.device)?;
            let part = |first| StateRef {
                layer: layer.clone(),
                first,
                position: position.clone(),
            };
            push(&mut graph, end..end + *n_rows, &part);
            end += *n_rows;
        }
        Ok(())
    }

    /// A convolution of `x` and a scan of what it gives, with `gates` of all rows. The state is that of the one, and then
    /// of the other. Returns the rows of `out`.
    pub(super) fn recurrent(
        &self,
        stage: Stage,
        (shape, convolution): (ScanShape, Convolution),
        (x, gates): (&mut GpuBuffer, &ScanGates),
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<View, BackendError> {
        let (device, channels) = (&self.device, shape.channels());
        let input = x.view()?.clone();
        let convolved = x.scratch(device, input.n_rows, channels)?;
        let out = out.shape(device, input.n_rows, shape.n_heads * shape.value_dim)?;
        let n_window = convolution.n_taps.saturating_sub(1) * channels;
        let n_state = n_window + shape.state();
        self.for_states(stage, n_state, sequences, |graph, rows, state| {
            let own = |view: &View| view.rows(rows.start, rows.len());
            graph.push(Op::Convolve {
                convolution: convolution.clone(),
                x: own(&input),
                state: state(0),
                out: own(&convolved),
            });
            graph.push(Op::Scan {
                shape,
                x: own(&convolved),
                gates: gates.rows(rows.start, rows.len()),
                state: state(n_window),
                out: own(&out),
            });
        })?;
        Ok(out)
    }
}

/// `x ← x · silu(gate)`.
pub(super) fn silu_gate(x: View, gate: &GpuBuffer) -> Result<Op, BackendError> {
    Ok(Op::GateBy {
        activation: Activation::Silu,
        x,
        gate: gate.view()?.clone(),
    })
}
