//! Time mixing of RWKV, and mixes of positions.

use sterna_gpu::graph::{Op, TimeInputs, TimeViews, View};
use sterna_gpu::kernels::elementwise;
use sterna_gpu::kernels::recurrent::WkvShape;
use sterna_kernels::activation::Function;
use sterna_kernels::rwkv::{Generation, Part, RwkvShape};

use super::{Gpu, GpuBuffer, GpuCache, cache};
use crate::backend::{BackendError, HeadNorm, Recurrence, Sequence, TimeMix, TokenShift};
use crate::stage::Stage;

/// The same function on the device.
pub(super) fn function(function: Function) -> elementwise::Function {
    match function {
        Function::Tanh => elementwise::Function::Tanh,
        Function::Sigmoid => elementwise::Function::Sigmoid,
        Function::Activation(activation) => elementwise::Function::Activation(activation),
    }
}

impl Gpu {
    /// Several mixes of a step read the same position before, which the first of them takes out of the state, as both
    /// states may be in one slot.
    pub(super) fn shift(
        &self,
        stage: Stage,
        shift: TokenShift<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let (shape, x) = (shift.shape, shift.x.view()?);
        let added = shift.added.map(GpuBuffer::view).transpose()?;
        let out = out.shape(&self.device, x.n_rows, x.width)?;
        let part = shape.part(shift.part).start;
        let layer = stage.layer.unwrap_or(0);
        let mut graph = self.graph.lock();
        let states = cache::states(&self.device, &mut graph, sequences, (layer, shape.state()))?;
        let n = sequences.len();
        let Some(first) = sequences.first_mut() else {
            return Ok(());
        };
        let (previous, is_known) =
            (first.cache).previous(&self.device, n * x.width, (layer, part))?;
        for state in states {
            let sequences = state.sequences.clone();
            if !is_known {
                graph.push(Op::Previous {
                    x: x.clone(),
                    state: state.part(part),
                    out: previous.clone(),
                });
            }
            graph.push(Op::TokenShift {
                x: x.clone(),
                sequences,
                previous: previous.clone(),
                factors: shift.factors.buffer.clone(),
                added: added.cloned(),
                of_itself: matches!(shape.generation, Generation::V4 | Generation::V5),
                out: out.clone(),
            });
        }
        Ok(())
    }

    pub(super) fn mix(
        &self,
        stage: Stage,
        mix: TimeMix<'_, Gpu>,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let shape = mix.shape;
        let (r, v) = (mix.r.view()?.clone(), mix.v.view()?.clone());
        let k = mix.k.view()?.clone();
        let out = out.shape(&self.device, r.n_rows, shape.inner())?;
        let (inputs, r_k) = match mix.recurrence {
            Recurrence::Fixed { decay, first } => {
                let (decay, first) = (decay.buffer.clone(), first.buffer.clone());
                if shape.generation == Generation::V4 {
                    let n_state = shape.state();
                    let memory = shape.part(Part::Memory).start;
                    return self.for_states(stage, n_state, sequences, |graph, state| {
                        graph.push(Op::Wkv4 {
                            r: r.clone(),
                            k: k.clone(),
                            v: v.clone(),
                            decay: decay.clone(),
                            first: first.clone(),
                            state: state.part(memory),
                            out: out.clone(),
                        });
                    });
                }
                (TimeInputs::Fixed(decay, first), None)
            }
            Recurrence::Six { decay, first } => {
                let decay = decay.view()?.clone();
                (TimeInputs::Given(decay, first.buffer.clone()), None)
            }
            Recurrence::Seven {
                decay,
                rate,
                residual,
                k_k,
                k_a,
                r_k,
            } => {
                if let Some((first, share)) = residual {
                    let (y, shares) = (first.view()?.clone(), share.view()?.clone());
                    let x = v.clone();
                    self.graph.lock().push(Op::Blend { x, y, shares });
                }
                let inputs = TimeInputs::Seventh {
                    decay: decay.view()?.clone(),
                    rate: rate.view()?.clone(),
                    k_k: k_k.buffer.clone(),
                    k_a: k_a.buffer.clone(),
                };
                (inputs, Some(r_k.buffer.clone()))
            }
        };
        let prepared = (mix.k).scratch(&self.device, r.n_rows, 4 * shape.inner())?;
        let views = TimeViews { r, prepared, v };
        self.heads(stage, shape, (k, inputs), &views, sequences, &out)?;
        if let Some(finish) = mix.finish {
            let HeadNorm {
                weight,
                bias,
                eps,
                gate,
            } = finish;
            self.graph.lock().push(Op::WkvFinish {
                shape: heads_of(&shape),
                inputs: views,
                weight: weight.buffer.clone(),
                bias: bias.buffer.clone(),
                eps,
                gate: gate.view()?.clone(),
                r_k,
                x: out,
            });
        }
        Ok(())
    }

    /// What heads of generations 5 to 7 give, before the norm.
    fn heads(
        &self,
        stage: Stage,
        shape: RwkvShape,
        (k, inputs): (View, TimeInputs),
        views: &TimeViews,
        sequences: &mut [Sequence<'_, GpuCache>],
        out: &View,
    ) -> Result<(), BackendError> {
        self.graph.lock().push(Op::WkvPrepare {
            shape: heads_of(&shape),
            k,
            inputs,
            out: views.prepared.clone(),
        });
        let memory = shape.part(Part::Memory).start;
        self.for_states(stage, shape.state(), sequences, |graph, state| {
            graph.push(Op::Wkv {
                shape: heads_of(&shape),
                inputs: views.clone(),
                state: state.part(memory),
                out: out.clone(),
            });
        })
    }
}

fn heads_of(shape: &RwkvShape) -> WkvShape {
    WkvShape {
        n_heads: shape.n_heads,
        head_dim: shape.head_dim,
        is_seventh: shape.generation == Generation::V7,
    }
}
