//! Layers with states: convolutions, delta rules, and state spaces of both kinds, of small shapes.

use sterna_kernels::delta::{DeltaShape, HeadOrder};
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::ssm::SsmShape;

use super::{stage, values};
use crate::backend::{
    Backend, BackendError, CacheShape, CacheType, CachedValues, CausalConvolution, DeltaNet,
    KvCache, KvHeads, SelectiveScan, Sequence, Ssm,
};
use crate::stage::Operation;

/// Positions that convolutions cover.
const TAPS: usize = 4;
/// Rows of the steps, each of which goes on with the state of the one before: the last in place, where a backend does that.
const STEPS: [usize; 3] = [9, 1, 1];
const DIM: usize = 96;

#[derive(Clone, Copy)]
enum Kind {
    Convolution,
    DeltaNet,
    Heads,
    Channels,
}

/// What every kind of layer gives for the steps.
pub(super) async fn states<B: Backend>(b: &B) -> Result<Vec<f32>, BackendError> {
    let heads = KvHeads {
        n_kv_heads: 1,
        head_dim: 8,
        values: CachedValues::Own,
    };
    let mut all = Vec::new();
    for kind in [
        Kind::Convolution,
        Kind::DeltaNet,
        Kind::Heads,
        Kind::Channels,
    ] {
        let mut cache = b.cache(&CacheShape {
            layers: [heads].into(),
            dtype: CacheType::F32,
        })?;
        for rows in STEPS {
            let mut out = b.buffer();
            b.begin_step()?;
            step(b, kind, rows, &mut cache, &mut out)?;
            all.extend(b.submit(&mut out)?.await?);
            cache.advance(rows);
        }
    }
    Ok(all)
}

fn step<B: Backend>(
    b: &B,
    kind: Kind,
    rows: usize,
    cache: &mut B::Cache,
    out: &mut B::Buffer,
) -> Result<(), BackendError> {
    let vector = |seed, n| b.load_vector(values(seed, n));
    // Decays are below one.
    let decays = |n| b.load_vector(values(43, n).iter().map(|x| -x.abs()).collect());
    let buffer = |seed, width| {
        let mut x = b.buffer();
        b.write(&values(seed, rows * width), width, &mut x)?;
        Ok::<_, BackendError>(x)
    };
    let sequences = &mut [Sequence {
        cache,
        n_rows: rows,
        n_angles: rows,
    }];
    match kind {
        Kind::Convolution => {
            let (taps, input) = (vector(41, TAPS * DIM)?, buffer(47, 3 * DIM)?);
            b.convolution(stage(Operation::Convolution), &taps, &input, sequences, out)
        }
        Kind::DeltaNet => {
            let shape = DeltaShape {
                n_key_heads: 2,
                n_value_heads: 4,
                key_dim: 16,
                value_dim: 24,
                order: HeadOrder::Grouped,
            };
            let net = DeltaNet {
                shape,
                taps: &vector(41, TAPS * shape.channels())?,
                a: &decays(4)?,
                dt_bias: &vector(53, 4)?,
                norm: &vector(59, shape.value_dim)?,
                eps: 1e-5,
                qkv: &mut buffer(47, shape.channels())?,
                gate: &mut buffer(61, shape.values())?,
                alpha: &mut buffer(67, 4)?,
                beta: &mut buffer(71, 4)?,
            };
            b.delta_net(stage(Operation::DeltaNet), net, sequences, out)
        }
        Kind::Heads => {
            let shape = SsmShape {
                n_heads: 4,
                head_dim: 24,
                state_dim: 16,
                n_groups: 2,
            };
            let ssm = Ssm {
                shape,
                taps: &vector(41, TAPS * shape.channels())?,
                conv_bias: Some(&vector(73, shape.channels())?),
                a: &decays(4)?,
                d: &vector(79, 4)?,
                dt_bias: &vector(53, 4)?,
                norm: Some(&vector(59, shape.inner())?),
                eps: 1e-5,
                gate: &mut buffer(61, shape.inner())?,
                xbc: &mut buffer(47, shape.channels())?,
                dt: &mut buffer(67, 4)?,
            };
            b.ssm(stage(Operation::Ssm), ssm, sequences, out)
        }
        Kind::Channels => {
            let shape = MambaShape {
                inner: DIM,
                state_dim: 16,
                dt_rank: 1,
            };
            let mut convolved = b.buffer();
            let convolution = CausalConvolution {
                shape,
                taps: &vector(41, TAPS * DIM)?,
                bias: Some(&vector(73, DIM)?),
                input: &buffer(47, DIM)?,
            };
            let at = stage(Operation::Ssm);
            b.causal_convolution(at, convolution, sequences, &mut convolved)?;
            let scan = SelectiveScan {
                shape,
                n_taps: TAPS,
                a: &decays(shape.state())?,
                d: &vector(79, DIM)?,
                x: &convolved,
                dt: &buffer(67, DIM)?,
                b: &buffer(83, shape.state_dim)?,
                c: &buffer(89, shape.state_dim)?,
                gate: &mut buffer(61, DIM)?,
            };
            b.selective_scan(at, scan, sequences, out)
        }
    }
}
