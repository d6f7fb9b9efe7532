//! Latent attention, with heads of the width that DeepSeek's have in the cache.

use sterna_format::DType;
use sterna_kernels::attention::AttentionShape;

use super::{WeightForm, angles, matrix, stage, values};
use crate::backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, CachedValues, KvCache, KvHeads,
    LatentInputs, LinearSource, Rotation, Sequence,
};
use crate::config::LatentConfig;
use crate::stage::Operation;

/// What such matrices are in most files.
pub(super) const FORM: WeightForm = WeightForm::Blocks(DType::F16);

const SHAPE: LatentConfig = LatentConfig {
    q_rank: None,
    kv_rank: 512,
    nope_dim: 128,
    rope_dim: 64,
    value_dim: 32,
};
const N_HEADS: usize = 4;

/// The matrices of two heads: for queries and for values. `None` for forms that have no rows as short.
pub(super) fn sources(form: WeightForm) -> Option<[LinearSource; 4]> {
    if let WeightForm::Blocks(dtype) = form
        && !SHAPE.nope_dim.is_multiple_of(dtype.block_len())
    {
        return None;
    }
    let up = |seed| matrix(form, seed, SHAPE.kv_rank, SHAPE.nope_dim);
    let down = |seed| matrix(form, seed, SHAPE.value_dim, SHAPE.kv_rank);
    Some([up(41)?, up(43)?, down(47)?, down(53)?])
}

/// What the last of `steps`, each of so many rows, gives.
pub(super) async fn attention<B: Backend>(
    b: &B,
    sources: &[LinearSource; 4],
    dtype: CacheType,
    steps: &[usize],
) -> Result<Vec<f32>, BackendError> {
    let head_dim = SHAPE.head_dim();
    let of_heads = |first: usize| {
        let sources = (0..N_HEADS).map(|head| sources[first + head % 2].clone());
        let mut matrices =
            (sources.map(|source| b.load_linear(source))).collect::<Result<Vec<_>, _>>()?;
        b.join_heads(&mut matrices.iter_mut().collect::<Vec<_>>())?;
        Ok::<_, BackendError>(matrices)
    };
    let (k_up, v_up) = (of_heads(0)?, of_heads(2)?);
    let [k_up, v_up] = [&k_up, &v_up].map(|matrices| matrices.iter().collect::<Vec<_>>());
    let heads = KvHeads {
        n_kv_heads: 1,
        head_dim,
        values: CachedValues::Keys,
    };
    let mut cache = b.cache(&CacheShape {
        layers: [heads].into(),
        dtype,
    })?;
    let mut results = Vec::new();
    for &rows in steps {
        let angles = angles(cache.len(), rows, SHAPE.rope_dim);
        let mut buffers = [(); 6].map(|()| b.buffer());
        let [given, k_rope, latent, q, k, a] = &mut buffers;
        let mut out = b.buffer();
        b.begin_step()?;
        for (buffer, seed, width) in [
            (&mut *given, 59, N_HEADS * SHAPE.query_dim()),
            (&mut *k_rope, 61, SHAPE.rope_dim),
            (&mut *latent, 67, SHAPE.kv_rank),
        ] {
            b.write(&values(seed, rows * width), width, buffer)?;
        }
        let inputs = LatentInputs {
            shape: &SHAPE,
            q: given,
            k_rope,
            latent,
            w: &k_up,
        };
        b.latent_queries(stage(Operation::LatentQueries), inputs, q, k)?;
        let inputs = Attention {
            layer: 0,
            shape: AttentionShape {
                n_heads: N_HEADS,
                n_kv_heads: 1,
                head_dim,
                scale: 0.1,
                softcap: None,
                window: None,
            },
            q,
            gated: false,
            k,
            v: None,
            q_norm: None,
            k_norm: None,
            eps: 1e-5,
            rope: Some(Rotation {
                index: 0,
                angles: &angles,
            }),
            sinks: None,
            shared: None,
            is_causal: true,
        };
        let sequence = Sequence {
            cache: &mut cache,
            n_rows: rows,
            n_angles: rows,
        };
        b.attention(inputs, &mut [sequence], a)?;
        let values = stage(Operation::LatentValues);
        b.latent_values(values, &SHAPE, a, &v_up, &mut out)?;
        results = b.submit(&mut out)?.await?;
        cache.advance(rows);
    }
    Ok(results)
}
