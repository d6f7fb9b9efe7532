//! Layers with heads and inputs of their own, that attend to the keys and values of others.

use sterna_kernels::activation::Activation;
use sterna_kernels::attention::AttentionShape;

use super::{angles, stage, values};
use crate::backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, CachedValues, KvCache, KvHeads,
    Rotation, Sequence,
};
use crate::stage::Operation;

/// Elements of the heads of layers with a window, and of layers without one, as such models have them.
pub(super) const HEAD_DIMS: [usize; 2] = [256, 512];

const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
/// How many layers there are inputs for.
const N_INPUTS: usize = 3;

/// What two layers with heads of `head_dim` elements give in the last of `steps`, each of so many rows: the second
/// attends to the keys and values of the first.
pub(super) async fn layers<B: Backend>(
    b: &B,
    head_dim: usize,
    dtype: CacheType,
    steps: &[usize],
) -> Result<Vec<f32>, BackendError> {
    let heads = KvHeads {
        n_kv_heads: N_KV_HEADS,
        head_dim,
        values: CachedValues::Own,
    };
    let mut cache = b.cache(&CacheShape {
        layers: [heads; 2].into(),
        dtype,
    })?;
    let q_norm = b.load_vector(values(71, head_dim))?;
    let factor = b.load_vector(vec![0.7])?;
    let width = N_HEADS * head_dim;
    let mut results = Vec::new();
    for &rows in steps {
        let angles = angles(cache.len(), rows, head_dim);
        let mut buffers = [(); 7].map(|()| b.buffer());
        let [q, k, v, a, sum, inputs, input] = &mut buffers;
        b.begin_step()?;
        for (buffer, seed, width) in [
            (&mut *k, 23, N_KV_HEADS * head_dim),
            (&mut *v, 29, N_KV_HEADS * head_dim),
            (&mut *inputs, 73, N_INPUTS * width),
        ] {
            b.write(&values(seed, rows * width), width, buffer)?;
        }
        b.normalize_heads(stage(Operation::ValueNorm), v, head_dim, 1e-6)?;
        for (layer, out) in [&mut *sum, &mut *a].into_iter().enumerate() {
            b.write(&values(19 + layer as u32, rows * width), width, q)?;
            let inputs = Attention {
                layer,
                shape: AttentionShape {
                    n_heads: N_HEADS,
                    n_kv_heads: N_KV_HEADS,
                    head_dim,
                    scale: 0.1,
                    softcap: None,
                    window: None,
                },
                q,
                gated: false,
                k,
                v: Some(v),
                q_norm: Some(&q_norm),
                k_norm: None,
                eps: 1e-6,
                rope: Some(Rotation {
                    index: 0,
                    angles: &angles,
                }),
                sinks: None,
                shared: (layer > 0).then_some(0),
                is_causal: true,
            };
            let sequence = Sequence {
                cache: &mut cache,
                n_rows: rows,
                n_angles: rows,
            };
            b.attention(inputs, &mut [sequence], out)?;
        }
        b.add(stage(Operation::AttnResidual), sum, a)?;
        let of_layer = stage(Operation::LayerInput);
        b.columns(of_layer, inputs, width..2 * width, input)?;
        b.gate(of_layer, Activation::GeluTanh, sum, input)?;
        b.scale_by(stage(Operation::LayerScale), sum, &factor)?;
        results = b.submit(sum)?.await?;
        cache.advance(rows);
    }
    Ok(results)
}
