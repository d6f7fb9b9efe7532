//! Latent attention: the products of heads with matrices of their own, around attention to latent vectors.

use sterna_gpu::GpuError;
use sterna_gpu::graph::{ExpertOutput, Op, Routes, View};
use sterna_gpu::kernels::linear::Epilogue;

use super::buffer::{self, heads};
use super::{Gpu, GpuBuffer, GpuLinear};
use crate::backend::{BackendError, LatentInputs, ROTATIONS};
use crate::config::LatentConfig;

impl Gpu {
    pub(super) fn queries_of_latent(
        &self,
        inputs: LatentInputs<'_, Gpu>,
        q: &mut GpuBuffer,
        k: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let device = &self.device;
        let (shape, n_heads) = (inputs.shape, inputs.w.len());
        let (head_dim, rope_dim) = (shape.head_dim(), shape.rope_dim);
        let queries = inputs.q.view()?;
        let m = queries.n_rows;
        // Of one row, what attention reads side by side is there from the beginning.
        let [all, keys] = if m == 1 {
            let all = q.shape(device, 1, (n_heads + 1) * head_dim)?;
            let keys = all.columns(n_heads * head_dim, head_dim);
            let all = all.columns(0, n_heads * head_dim);
            q.set(all.clone());
            k.set(keys.clone());
            [all, keys]
        } else {
            [
                q.shape(device, m, n_heads * head_dim)?,
                k.shape(device, m, head_dim)?,
            ]
        };
        let heads = heads(queries, n_heads)?;
        let out = buffer::heads(&all, n_heads)?;
        let plain = heads.columns(0, shape.nope_dim);
        let absorbed = out.columns(rope_dim, shape.kv_rank);
        self.multiply_heads(plain, inputs.w, absorbed, q)?;
        let mut graph = self.graph.lock();
        graph.push(Op::Copy {
            x: out.columns(0, rope_dim),
            y: heads.columns(shape.nope_dim, rope_dim),
        });
        for (first, part) in [(0, inputs.k_rope), (rope_dim, inputs.latent)] {
            let part = part.view()?.clone();
            graph.push(Op::Copy {
                x: keys.columns(first, part.width),
                y: part,
            });
        }
        Ok(())
    }

    pub(super) fn values_of_latent(
        &self,
        shape: &LatentConfig,
        x: &GpuBuffer,
        w: &[&GpuLinear],
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let x = x.view()?;
        let latent = heads(x, w.len())?.columns(shape.rope_dim, shape.kv_rank);
        let values = out.shape(&self.device, x.n_rows, w.len() * shape.value_dim)?;
        self.multiply_heads(latent, w, heads(&values, w.len())?, out)
    }

    /// Products of heads with the matrix of each, as those of rows that are sent to one expert each. `ids` keeps to which.
    fn multiply_heads(
        &self,
        x: View,
        w: &[&GpuLinear],
        out: View,
        ids: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        if w.iter().any(|w| w.rotation.is_some()) {
            return Err(BackendError::Unsupported(ROTATIONS));
        }
        let Some(stack) = w.first().and_then(|first| first.stack.clone()) else {
            return Err(BackendError::from(GpuError::Unsupported {
                what: "a product with matrices of heads".into(),
                reason: "they weren't joined".into(),
            }));
        };
        let own: Vec<u32> = (0..w.len() as u32).cycle().take(x.n_rows).collect();
        let experts = ids.write_ids(&self.device, &own)?.buffer;
        self.graph.lock().push(Op::Experts {
            routes: Routes {
                // Nothing is summed.
                weights: experts.clone(),
                experts,
                n_rows: x.n_rows,
                n_used: 1,
            },
            x,
            norm: None,
            choice: None,
            outputs: vec![ExpertOutput {
                out,
                w: stack,
                epilogue: Epilogue::Store,
            }],
        });
        Ok(())
    }
}
