//! RWKV: layer norms, mixes of positions, time mixing of a generation, and functions of single values.

use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::rwkv::{Generation, Part, RwkvShape};

use super::{stage, values};
use crate::backend::{
    Backend, BackendError, CacheShape, CacheType, CachedValues, HeadNorm, KvCache, KvHeads,
    Recurrence, Sequence, TimeMix, TokenShift,
};
use crate::stage::{LinearLayer, Operation};

/// Rows of the steps: each goes on with the state of the one before.
const STEPS: [usize; 4] = [8, 1, 1, 3];

/// What layers of `generation` give for the steps.
pub(super) async fn layers<B: Backend>(
    b: &B,
    generation: Generation,
) -> Result<Vec<f32>, BackendError> {
    let shape = RwkvShape {
        generation,
        n_heads: 3,
        head_dim: 32,
    };
    let heads = KvHeads {
        n_kv_heads: 1,
        head_dim: 8,
        values: CachedValues::Own,
    };
    let mut cache = b.cache(&CacheShape {
        layers: [heads].into(),
        dtype: CacheType::F32,
    })?;
    let mut all = Vec::new();
    for rows in STEPS {
        let mut out = b.buffer();
        b.begin_step()?;
        step(b, shape, rows, &mut cache, &mut out)?;
        all.extend(b.submit(&mut out)?.await?);
        cache.advance(rows);
    }
    Ok(all)
}

fn step<B: Backend>(
    b: &B,
    shape: RwkvShape,
    rows: usize,
    cache: &mut B::Cache,
    out: &mut B::Buffer,
) -> Result<(), BackendError> {
    let inner = shape.inner();
    let vector = |seed| b.load_vector(values(seed, inner));
    let buffer = |seed| {
        let mut x = b.buffer();
        b.write(&values(seed, rows * inner), inner, &mut x)?;
        Ok::<_, BackendError>(x)
    };
    let sequences = &mut [Sequence {
        cache,
        n_rows: rows,
        n_angles: rows,
    }];
    let (weight, bias) = (vector(101)?, vector(103)?);
    let mut h = b.buffer();
    let norm = stage(Operation::AttnNorm);
    b.layer_norm(norm, &buffer(107)?, (&weight, &bias), 1e-5, &mut h)?;
    let (mut k, mut v, mut up) = (b.buffer(), b.buffer(), b.buffer());
    let (factors, added) = (vector(109)?, buffer(113)?);
    for (linear, part, added, out) in [
        (LinearLayer::TimeK, Part::TimeMix, None, &mut k),
        (LinearLayer::TimeV, Part::TimeMix, Some(&added), &mut v),
        (LinearLayer::Up, Part::ChannelMix, None, &mut up),
    ] {
        let shift = TokenShift {
            shape,
            part,
            x: &h,
            factors: &factors,
            added,
        };
        b.token_shift(stage(Operation::Shift(linear)), shift, sequences, out)?;
    }
    let (mut decay, mut rate) = (buffer(127)?, buffer(131)?);
    b.apply(stage(Operation::TimeMix), Function::Tanh, &mut decay)?;
    let (first_values, shares, gate) = (buffer(137)?, buffer(139)?, buffer(149)?);
    let [a, c, d] = [vector(151)?, vector(157)?, vector(163)?];
    let mix = TimeMix {
        shape,
        r: &buffer(167)?,
        k: &mut k,
        v: &mut v,
        recurrence: match shape.generation {
            Generation::V4 | Generation::V5 => Recurrence::Fixed {
                decay: &a,
                first: &c,
            },
            Generation::V6 => Recurrence::Six {
                decay: &mut decay,
                first: &c,
            },
            Generation::V7 => Recurrence::Seven {
                decay: &mut decay,
                rate: &mut rate,
                residual: Some((&first_values, &shares)),
                k_k: &a,
                k_a: &c,
                r_k: &d,
            },
        },
        finish: (shape.generation != Generation::V4).then_some(HeadNorm {
            weight: &weight,
            bias: &bias,
            eps: 1e-3,
            gate: &gate,
        }),
    };
    b.time_mix(stage(Operation::TimeMix), mix, sequences, out)?;
    let activation = stage(Operation::Activation);
    b.apply(activation, Function::Activation(Activation::Relu2), &mut up)?;
    b.apply(activation, Function::Sigmoid, &mut h)?;
    b.multiply(activation, &mut up, &h)?;
    b.add(stage(Operation::FfnResidual), out, &up)
}
