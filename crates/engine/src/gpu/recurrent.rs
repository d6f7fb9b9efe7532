//! What layers with states have in common: a convolution and a scan over the rows of each sequence.

use std::ops::Range;
use std::sync::PoisonError;

use sterna_gpu::graph::{Convolution, Graph, Op, ScanGates, StateRef, View};
use sterna_gpu::kernels::recurrent::{ScanShape, StepVectors, StepWeights, can_step};
use sterna_gpu::{Device, GpuError};
use sterna_kernels::activation::Activation;

use super::{Gpu, GpuBuffer, GpuCache, GpuVector, cache};
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
    /// Calls `push` with the layer's states, `n` values each, of those of `sequences` that kernels take together.
    pub(super) fn for_states(
        &self,
        stage: Stage,
        n: usize,
        sequences: &mut [Sequence<'_, GpuCache>],
        mut push: impl FnMut(&mut Graph, StateRef),
    ) -> Result<(), BackendError> {
        let mut graph = self.graph.lock();
        let layer = (stage.layer.unwrap_or(0), n);
        for state in cache::states(&self.device, &mut graph, sequences, layer)? {
            push(&mut graph, state);
        }
        Ok(())
    }

    /// A layer with a scan: a convolution of its input, the scan of what that gives, and the norm and gate of its output.
    /// The state is that of the convolution, and then that of the scan. Returns the rows of `out`.
    pub(super) fn recurrent(
        &self,
        stage: Stage,
        layer: &ScanLayer<'_>,
        ScanRows {
            x,
            gate,
            steps,
            beta,
        }: ScanRows<'_>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<View, BackendError> {
        let (device, shape) = (&self.device, layer.shape);
        let channels = shape.channels();
        let (input, gate) = (x.view()?.clone(), gate.view()?.clone());
        let given = steps.view()?.clone();
        let beta = beta.map(|beta| beta.view().cloned()).transpose()?;
        let out = out.shape(device, input.n_rows, shape.n_heads * shape.value_dim)?;
        let convolution = layer.taps.convolution(channels, layer.conv_bias, false);
        let n_window = convolution.n_taps.saturating_sub(1) * channels;
        let n_state = n_window + shape.state();
        let is_step = |n_rows| n_rows == 1 && can_step(device.limits(), &shape);
        let weights = match sequences.iter().any(|sequence| is_step(sequence.n_rows)) {
            true => Some(layer.step_weights(device, convolution.n_taps)?),
            false => None,
        };
        let are_all_steps = sequences.iter().all(|sequence| is_step(sequence.n_rows));
        let memory = match are_all_steps {
            true => None,
            false => Some((
                x.scratch(device, input.n_rows, channels)?,
                (steps.scratch(device, given.n_rows, 4 * given.width)?).buffer,
            )),
        };
        // Until all is in it nobody else may have the graph: others that need more places move states to other memory.
        let mut graph = self.graph.lock();
        let own = (stage.layer.unwrap_or(0), n_state);
        let mut scans = Vec::new();
        for state in cache::states(device, &mut graph, sequences, own)? {
            match &weights {
                Some(weights) if is_step(state.sequences.n_rows) => graph.push(Op::Step {
                    weights: weights.clone(),
                    x: input.clone(),
                    gate: gate.clone(),
                    steps: given.clone(),
                    beta: beta.clone(),
                    eps: layer.eps,
                    state,
                    out: out.clone(),
                }),
                _ => scans.push(state),
            }
        }
        let Some((convolved, gates)) = memory else {
            return Ok(out);
        };
        for state in &scans {
            graph.push(Op::Convolve {
                convolution: convolution.clone(),
                x: input.clone(),
                state: state.clone(),
                out: convolved.clone(),
            });
        }
        graph.push(Op::ScanPrepare {
            shape,
            x: convolved.clone(),
            gates: ScanGates {
                steps: given,
                beta,
                a: layer.a.buffer.clone(),
                dt_bias: layer.dt_bias.buffer.clone(),
            },
            out: gates.clone(),
        });
        for state in scans {
            graph.push(Op::Scan {
                shape,
                x: convolved.clone(),
                gates: gates.clone(),
                d: (!shape.is_delta).then(|| layer.last.buffer.clone()),
                state: state.part(n_window),
                out: out.clone(),
            });
        }
        // Steps have normalised their rows, and multiplied them with gates.
        for rows in runs_of_rows(sequences, |n_rows| !is_step(n_rows)) {
            let own = |view: &View| view.rows(rows.start, rows.len());
            if shape.is_delta {
                let heads = View {
                    n_rows: rows.len() * shape.n_heads,
                    width: shape.value_dim,
                    stride: shape.value_dim,
                    ..own(&out)
                };
                graph.push(Op::RmsNorm {
                    x: heads.clone(),
                    norm: layer.last.norm(layer.eps),
                    n_groups: 1,
                    out: heads,
                });
            }
            graph.push(silu_gate(own(&out), own(&gate)));
        }
        Ok(out)
    }
}

/// The rows of adjacent sequences that `are_wanted`, by how many they have.
fn runs_of_rows(
    sequences: &[Sequence<'_, GpuCache>],
    are_wanted: impl Fn(usize) -> bool,
) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut end = 0;
    for Sequence { n_rows, .. } in sequences {
        let first = end;
        end += n_rows;
        match runs.last_mut() {
            _ if !are_wanted(*n_rows) => {}
            Some(run) if run.end == first => run.end = end,
            _ => runs.push(first..end),
        }
    }
    runs
}

/// The weights of a layer with a scan.
pub(super) struct ScanLayer<'a> {
    pub(super) shape: ScanShape,
    pub(super) taps: &'a GpuVector,
    pub(super) conv_bias: Option<&'a GpuVector>,
    pub(super) a: &'a GpuVector,
    pub(super) dt_bias: &'a GpuVector,
    /// Of the delta rule the norm of what heads give, of a state space `d`.
    pub(super) last: &'a GpuVector,
    /// Of that norm.
    pub(super) eps: f32,
}

/// What it reads of each position, as the projections computed it.
pub(super) struct ScanRows<'a> {
    pub(super) x: &'a mut GpuBuffer,
    pub(super) gate: &'a GpuBuffer,
    /// `alpha` of the delta rule, or time steps.
    pub(super) steps: &'a mut GpuBuffer,
    /// Of the delta rule.
    pub(super) beta: Option<&'a GpuBuffer>,
}

impl ScanLayer<'_> {
    /// The weights as steps of one row read them, copied the first time.
    fn step_weights(&self, device: &Device, n_taps: usize) -> Result<StepWeights, GpuError> {
        let ScanLayer {
            taps,
            conv_bias,
            a,
            dt_bias,
            last,
            ..
        } = self;
        let vectors = [Some(*taps), *conv_bias, Some(a), Some(dt_bias), Some(last)];
        let of = vectors.map(|vector| vector.map(|vector| vector.buffer.clone()));
        let mut known = taps.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, weights)) = known.as_ref().filter(|(known, _)| *known == of) {
            return Ok(weights.clone());
        }
        let vectors = StepVectors {
            taps: &taps.buffer,
            n_taps,
            bias: conv_bias.map(|bias| &bias.buffer),
            a: &a.buffer,
            dt_bias: &dt_bias.buffer,
            last: &last.buffer,
        };
        let weights = StepWeights::new(device, &self.shape, &vectors)?;
        *known = Some((of, weights.clone()));
        Ok(weights)
    }
}

/// `x ← x · silu(gate)`.
pub(super) fn silu_gate(x: View, gate: View) -> Op {
    Op::GateBy {
        activation: Activation::Silu,
        x,
        gate,
    }
}
