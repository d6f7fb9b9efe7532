//! Whether a device computes what it should: each family of kernels once, compared with the CPU.
//!
//! Drivers give wrong numbers without an error, in browsers above all. What is computed here takes milliseconds
//! and is of made-up weights and activations: it finds a kernel that is wrong, not one that is a little less
//! exact.

mod latent;
mod layerwise;
mod rwkv;
mod states;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use sterna_format::DType;
use sterna_format::model::RopeLayout;
use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::attention::AttentionShape;
use sterna_kernels::experts::Routing;
use sterna_kernels::hadamard;
use sterna_kernels::quant::Encoder;
use sterna_kernels::rwkv::Generation;
use sterna_kernels::{Exec, Isa};

use crate::backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, CachedValues, ExpertInput,
    ExpertMatrices, ExpertProduct, KvCache, KvHeads, LinearSource, OutputLayout, Product, Rotation,
    Rounding, Sequence, TernaryPacking, WeightData,
};
use crate::cpu::Cpu;
use crate::rope::Angles;
use crate::stage::{LinearLayer, Operation, Stage};

/// Form of the weights of a matrix, which decides by what kernel it is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightForm {
    /// Trits with one scale.
    Ternary,
    /// Rows of blocks.
    Blocks(DType),
}

impl fmt::Display for WeightForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightForm::Ternary => f.write_str("ternary"),
            WeightForm::Blocks(dtype) => dtype.fmt(f),
        }
    }
}

/// Why a device isn't trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelfTestError {
    /// A kernel gave other results than the CPU.
    #[error("{kernel}: expected results within {bound} of the CPU's, found {found}")]
    Wrong {
        /// The family of kernels.
        kernel: String,
        /// The bound on the relative error.
        bound: f64,
        /// The relative error; NaN if some results are not finite.
        found: f64,
    },
    /// A kernel failed.
    #[error("{kernel}: failed")]
    Failed {
        /// The family of kernels.
        kernel: String,
        /// Why.
        source: BackendError,
    },
}

/// Relative error (root of the squares) that is tolerated. Both sides round activations to 8 bits, which a
/// device may do the other way round where a value is halfway between two steps: a few thousandths. A wrong
/// kernel is off by tenths.
const BOUND: f64 = 0.02;

/// Rows and columns of the made-up matrices: a few workgroups, and whole blocks of every type.
const N: usize = 96;
const K: usize = 512;

/// Rows and columns of the matrices of a feed-forward block.
const BLOCK_WIDTH: usize = 256;

/// Experts of the made-up mixture, of which each row is sent to as many as the model's rows are.
const MOST_EXPERTS: usize = 8;

/// The families of kernels that a model needs ([`ModelPlan::kernels`]).
///
/// [`ModelPlan::kernels`]: crate::ModelPlan::kernels
#[derive(Debug, Clone, Default)]
pub struct KernelFamilies {
    /// Products with matrices in these forms.
    pub forms: BTreeSet<WeightForm>,
    /// Those of a mixture of experts.
    pub experts: Option<Routing>,
    /// Whether layers have states other than those of time mixing.
    pub has_states: bool,
    /// The generation of RWKV whose layers there are.
    pub rwkv: Option<Generation>,
    /// Whether matrices are in a rotated basis.
    pub is_rotated: bool,
    /// Whether what attention gives is gated.
    pub has_gates: bool,
    /// Whether it reads whole texts.
    pub is_encoder: bool,
    /// Whether keys and values follow from a latent vector.
    pub is_latent: bool,
    /// Whether heads and inputs differ from layer to layer, and some have the keys and values of others.
    pub is_layerwise: bool,
}

/// Runs every family of kernels in `kernels` on `tested`, once with one row and once with several, and attention with a
/// cache of type `cache`.
///
/// Errors: [`SelfTestError`] for the first kernel that fails or gives other results than the CPU.
pub async fn self_test<T: Backend>(
    tested: &T,
    kernels: &KernelFamilies,
    cache: CacheType,
) -> Result<(), SelfTestError> {
    let KernelFamilies {
        forms,
        experts,
        has_states,
        rwkv,
        is_rotated,
        has_gates,
        is_encoder,
        is_latent,
        is_layerwise,
    } = kernels;
    let reference = Cpu::new(1, Isa::detect());
    let want = elements(&reference).await;
    check("norms and activations", want, elements(tested).await)?;
    if *has_states {
        let want = states::states(&reference).await;
        check("layers with states", want, states::states(tested).await)?;
    }
    if let Some(generation) = *rwkv {
        let want = rwkv::layers(&reference, generation).await;
        check("time mixing", want, rwkv::layers(tested, generation).await)?;
    }
    for &form in forms {
        let square = |seed| matrix(form, seed, BLOCK_WIDTH, BLOCK_WIDTH);
        let (Some(source), Some(gate), Some(up)) = (matrix(form, 5, N, K), square(31), square(37))
        else {
            continue;
        };
        let source = LinearSource {
            rotation: is_rotated.then(rotation),
            ..source
        };
        for rows in [1, 3, 40] {
            let kernel = format!("{form} product of {rows} rows");
            let want = product(&reference, source.clone(), rows).await;
            check(&kernel, want, product(tested, source.clone(), rows).await)?;
        }
        for rows in [1, 3, 40] {
            let kernel = format!("{form} feed-forward blocks of {rows} rows");
            let want = feed_forward(&reference, &gate, &up, rows).await;
            check(&kernel, want, feed_forward(tested, &gate, &up, rows).await)?;
        }
        if let Some(routing) = &experts {
            for rows in [1, 3, 40] {
                let kernel = format!("{form} experts of {rows} rows");
                let want = routed(&reference, &gate, &up, routing, rows).await;
                let got = routed(tested, &gate, &up, routing, rows).await;
                check(&kernel, want, got)?;
            }
        }
        let kernel = format!("{form} embedding");
        let want = embedding(&reference, source.clone()).await;
        check(&kernel, want, embedding(tested, source).await)?;
    }
    if *is_latent {
        for form in forms.iter().copied().chain([latent::FORM]) {
            let Some(sources) = latent::sources(form) else {
                continue;
            };
            let kernel = format!("latent attention with {form} matrices");
            let want = latent::attention(&reference, &sources, cache, &[40, 1]).await;
            let got = latent::attention(tested, &sources, cache, &[40, 1]).await;
            check(&kernel, want, got)?;
        }
    }
    if *is_layerwise {
        for head_dim in layerwise::HEAD_DIMS {
            for steps in [&[40][..], &[40, 1]] {
                let kernel = format!("layers with heads of {head_dim} elements");
                let want = layerwise::layers(&reference, head_dim, cache, steps).await;
                let got = layerwise::layers(tested, head_dim, cache, steps).await;
                check(&kernel, want, got)?;
            }
        }
    }
    let attending = Attending {
        dtype: cache,
        gated: *has_gates,
        is_causal: !is_encoder,
    };
    let prompt = attention(&reference, attending, &[40]).await;
    check(
        "attention of a prompt",
        prompt,
        attention(tested, attending, &[40]).await,
    )?;
    if *is_encoder {
        let want = encoder(&reference).await;
        return check(
            "norms and functions of encoders",
            want,
            encoder(tested).await,
        );
    }
    let token = attention(&reference, attending, &[40, 1]).await;
    check(
        "attention of a token",
        token,
        attention(tested, attending, &[40, 1]).await,
    )
}

/// Compares both results of a family of kernels.
fn check(
    kernel: &str,
    want: Result<Vec<f32>, BackendError>,
    got: Result<Vec<f32>, BackendError>,
) -> Result<(), SelfTestError> {
    let failed = |source| SelfTestError::Failed {
        kernel: kernel.to_owned(),
        source,
    };
    let (want, got) = (want.map_err(failed)?, got.map_err(failed)?);
    let found = relative_error(&want, &got);
    if found <= BOUND {
        return Ok(());
    }
    Err(SelfTestError::Wrong {
        kernel: kernel.to_owned(),
        bound: BOUND,
        found,
    })
}

fn relative_error(want: &[f32], got: &[f32]) -> f64 {
    if want.len() != got.len() {
        return f64::NAN;
    }
    let (mut errors, mut squares) = (0.0, 0.0);
    for (&want, &got) in want.iter().zip(got) {
        let (want, got) = (f64::from(want), f64::from(got));
        errors += (got - want) * (got - want);
        squares += want * want;
    }
    // NaN if a result is: that is within no bound.
    (errors / squares).sqrt()
}

/// Values between −1 and 1 that look random and are always the same.
fn values(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// A matrix `[n, k]`; `None` for types that nothing is encoded as.
fn matrix(form: WeightForm, seed: u32, n: usize, k: usize) -> Option<LinearSource> {
    let weights = match form {
        WeightForm::Ternary => {
            let codes = values(seed, n * k / 4).into_iter().map(|value| {
                // Four codes of 0, 1 and 2.
                let mut rest = ((value + 1.0) * 40.0) as u8;
                (0..4).fold(0, |byte, _| {
                    let code = rest % 3;
                    rest /= 3;
                    byte << 2 | code
                })
            });
            WeightData::Ternary {
                codes: codes.collect(),
                packing: TernaryPacking::I2s,
                scale: 0.05,
            }
        }
        WeightForm::Blocks(dtype) => {
            let mut bytes = vec![0; n * k / dtype.block_len() * dtype.block_bytes()];
            let encoder = Encoder::quick(dtype, k).ok()?;
            let exec = Exec::new(1, Isa::detect());
            encoder
                .encode(&exec, 0, &values(seed, n * k), &mut bytes)
                .ok()?;
            WeightData::Blocks {
                dtype,
                bytes: Bytes::from(bytes),
                rounding: Rounding::Blocks,
            }
        }
    };
    Some(LinearSource {
        n,
        k,
        weights,
        rotation: None,
    })
}

/// One of rows of matrices that products are tested with.
fn rotation() -> Arc<hadamard::Rotation> {
    let signs = values(97, K).iter().map(|value| value.signum()).collect();
    let rotation = hadamard::Rotation::new(K / 2, signs, None);
    Arc::new(rotation.expect("runs fill a row"))
}

/// The stage that operations are told.
fn stage(operation: Operation) -> Stage {
    Stage {
        layer: Some(0),
        operation,
    }
}

async fn product<B: Backend>(
    b: &B,
    source: LinearSource,
    rows: usize,
) -> Result<Vec<f32>, BackendError> {
    let w = b.load_linear(source)?;
    let (mut x, mut out) = (b.buffer(), b.buffer());
    b.begin_step()?;
    b.write(&values(7, rows * K), K, &mut x)?;
    let product = of_layer(LinearLayer::Q, &w, &mut out);
    b.linear(&x, OutputLayout::Separate, &mut [product])?;
    b.submit(&mut out)?.await
}

async fn embedding<B: Backend>(b: &B, source: LinearSource) -> Result<Vec<f32>, BackendError> {
    let table = b.load_linear(source)?;
    let mut out = b.buffer();
    b.begin_step()?;
    b.embed(&table, &[0, 17, N as u32 - 1], 1.0, &mut out)?;
    b.submit(&mut out)?.await
}

/// The product of a layer, with its stage.
fn of_layer<'a, B: Backend>(
    layer: LinearLayer,
    w: &'a B::Linear,
    out: &'a mut B::Buffer,
) -> Product<'a, B> {
    Product {
        stage: stage(Operation::Product(layer)),
        w,
        out,
    }
}

/// Feed-forward blocks, as models have them: devices fuse norm, gate and residual with their products. The matrix
/// of the gate is that of the last product, too.
async fn feed_forward<B: Backend>(
    b: &B,
    gate: &LinearSource,
    up: &LinearSource,
    rows: usize,
) -> Result<Vec<f32>, BackendError> {
    let is_ternary = matches!(gate.weights, WeightData::Ternary { .. });
    let down = b.load_linear(gate.clone())?;
    let (mut gate, mut up) = (b.load_linear(gate.clone())?, b.load_linear(up.clone())?);
    b.join(&mut [&mut gate, &mut up])?;
    // What the block adds is to be about as large as what it is added to: neither may be lost in the bound.
    let size = if is_ternary { 2.7 } else { 0.05 };
    let norm = values(11, BLOCK_WIDTH).into_iter();
    let norm = b.load_vector(norm.map(|value| size * (1.0 + value / 2.0)).collect())?;

    let (mut x, mut h) = (b.buffer(), b.buffer());
    let (mut gated, mut upward) = (b.buffer(), b.buffer());
    let separate = OutputLayout::Separate;
    b.begin_step()?;
    b.write(&values(13, rows * BLOCK_WIDTH), BLOCK_WIDTH, &mut x)?;
    // Of two, since nothing is fused whose result might yet be read: that of the first is overwritten.
    for _ in 0..2 {
        b.rms_norm(stage(Operation::FfnNorm), &x, &norm, 1e-5, &mut h)?;
        let both = &mut [
            of_layer(LinearLayer::Gate, &gate, &mut gated),
            of_layer(LinearLayer::Up, &up, &mut upward),
        ];
        b.linear(&h, separate, both)?;
        let activation = stage(Operation::Activation);
        b.gate(activation, Activation::Silu, &mut gated, &upward)?;
        let downward = &mut [of_layer(LinearLayer::Down, &down, &mut h)];
        b.linear(&gated, separate, downward)?;
        b.add(stage(Operation::FfnResidual), &mut x, &h)?;
    }
    b.submit(&mut x)?.await
}

/// Blocks that are mixtures of experts, with every other matrix of two for each. Scores are far apart: both sides
/// choose the same experts.
async fn routed<B: Backend>(
    b: &B,
    first: &LinearSource,
    second: &LinearSource,
    routing: &Routing,
    rows: usize,
) -> Result<Vec<f32>, BackendError> {
    let n_experts = routing.n_experts.min(MOST_EXPERTS);
    let routing = Routing {
        gating: routing.gating,
        n_experts,
        n_used: routing.n_used.min(n_experts),
        renormalised: routing.renormalised,
        groups: None,
        scale: 1.0,
    };
    let of_all = |turn: usize| {
        let sources = (turn..turn + n_experts).map(|i| [first, second][i % 2].clone());
        let matrices = sources.map(|source| b.load_linear(source));
        matrices.collect::<Result<Vec<_>, _>>()
    };
    let (mut gate, mut up, mut down) = (of_all(0)?, of_all(1)?, of_all(0)?);
    b.join_experts(&mut ExpertMatrices {
        gate: gate.iter_mut().collect(),
        up: up.iter_mut().collect(),
        down: down.iter_mut().collect(),
    })?;
    let scores: Vec<f32> = (0..rows * n_experts)
        .map(|i| ((i / n_experts + 3 * (i % n_experts)) % 7) as f32 / 4.0)
        .collect();
    let (mut x, mut h, mut s) = (b.buffer(), b.buffer(), b.buffer());
    let (mut gated, mut upward, mut given) = (b.buffer(), b.buffer(), b.buffer());
    let mut routes = b.routes();
    b.begin_step()?;
    let width = BLOCK_WIDTH;
    // As large as a norm would make it.
    let size = match &first.weights {
        WeightData::Ternary { .. } => 2.7,
        WeightData::Blocks { .. } => 0.05,
    };
    let input = values(13, rows * width).into_iter();
    let input: Vec<f32> = input.map(|value| size * value).collect();
    b.write(&input, width, &mut x)?;
    b.write(&scores, n_experts, &mut s)?;
    // Of two, as for blocks of one network.
    for _ in 0..2 {
        b.choose_experts(&s, None, &routing, &mut routes)?;
        let both = &mut [
            of_experts(LinearLayer::Gate, &gate, &mut gated),
            of_experts(LinearLayer::Up, &up, &mut upward),
        ];
        b.linear_experts(&routes, &x, ExpertInput::Tokens, both)?;
        let activation = stage(Operation::Activation);
        b.gate(activation, Activation::Silu, &mut gated, &upward)?;
        let downward = &mut [of_experts(LinearLayer::Down, &down, &mut given)];
        b.linear_experts(&routes, &gated, ExpertInput::Routes, downward)?;
        b.combine_experts(&routes, &given, &mut h)?;
        b.add(stage(Operation::FfnResidual), &mut x, &h)?;
    }
    b.submit(&mut x)?.await
}

/// A product of the experts of a layer, with its stage.
fn of_experts<'a, B: Backend>(
    layer: LinearLayer,
    w: &'a [B::Linear],
    out: &'a mut B::Buffer,
) -> ExpertProduct<'a, B> {
    ExpertProduct {
        stage: stage(Operation::Product(layer)),
        w: w.iter().collect(),
        bias: None,
        out,
    }
}

/// Norm, gate and residual of a feed-forward block, apart from products.
async fn elements<B: Backend>(b: &B) -> Result<Vec<f32>, BackendError> {
    let rows = 3;
    let weight = b.load_vector(values(11, K))?;
    let (mut x, mut y, mut up) = (b.buffer(), b.buffer(), b.buffer());
    b.begin_step()?;
    b.write(&values(13, rows * K), K, &mut x)?;
    b.write(&values(17, rows * K), K, &mut up)?;
    b.rms_norm(stage(Operation::FfnNorm), &x, &weight, 1e-5, &mut y)?;
    b.gate(stage(Operation::Activation), Activation::Silu, &mut y, &up)?;
    b.add(stage(Operation::FfnResidual), &mut x, &y)?;
    b.submit(&mut x)?.await
}

/// What encoders have between their products: their input by itself, biases, functions and norms.
async fn encoder<B: Backend>(b: &B) -> Result<Vec<f32>, BackendError> {
    let rows = 3;
    let (weight, bias) = (b.load_vector(values(11, K))?, b.load_vector(values(17, K))?);
    let (mut x, mut h, mut out) = (b.buffer(), b.buffer(), b.buffer());
    b.begin_step()?;
    b.write(&values(13, rows * K), K, &mut x)?;
    b.columns(stage(Operation::FfnNorm), &x, 0..K, &mut h)?;
    b.add_bias(stage(Operation::Bias(LinearLayer::Up)), &mut h, &bias)?;
    let function = Function::Activation(Activation::GeluErf);
    b.apply(stage(Operation::Activation), function, &mut h)?;
    b.add(stage(Operation::FfnResidual), &mut x, &h)?;
    let norm = stage(Operation::FfnNorm);
    b.layer_norm(norm, &x, (&weight, &bias), 1e-5, &mut out)?;
    b.submit(&mut out)?.await
}

/// How attention is tested.
#[derive(Clone, Copy)]
struct Attending {
    dtype: CacheType,
    gated: bool,
    is_causal: bool,
}

/// Attention in `steps` of so many tokens each: the results of the last.
async fn attention<B: Backend>(
    b: &B,
    Attending {
        dtype,
        gated,
        is_causal,
    }: Attending,
    steps: &[usize],
) -> Result<Vec<f32>, BackendError> {
    let (n_heads, n_kv_heads, head_dim) = (4, 2, 64);
    let heads = KvHeads {
        n_kv_heads,
        head_dim,
        values: CachedValues::Own,
    };
    let mut cache = b.cache(&CacheShape {
        layers: [heads].into(),
        dtype,
    })?;
    let mut results = Vec::new();
    for &rows in steps {
        let at = cache.len();
        let angles = angles(at, rows, head_dim);
        let (mut q, mut k, mut v) = (b.buffer(), b.buffer(), b.buffer());
        let mut out = b.buffer();
        b.begin_step()?;
        let q_width = if gated { 2 } else { 1 } * n_heads * head_dim;
        b.write(&values(19, rows * q_width), q_width, &mut q)?;
        b.write(
            &values(23, rows * n_kv_heads * head_dim),
            n_kv_heads * head_dim,
            &mut k,
        )?;
        b.write(
            &values(29, rows * n_kv_heads * head_dim),
            n_kv_heads * head_dim,
            &mut v,
        )?;
        let inputs = Attention {
            layer: 0,
            shape: AttentionShape {
                n_heads,
                n_kv_heads,
                head_dim,
                scale: 0.125,
                softcap: None,
                window: None,
            },
            q: &mut q,
            gated,
            k: &mut k,
            v: Some(&v),
            q_norm: None,
            k_norm: None,
            eps: 1e-5,
            rope: Some(Rotation {
                index: 0,
                angles: &angles,
            }),
            sinks: None,
            shared: None,
            is_causal,
        };
        let sequence = Sequence {
            cache: &mut cache,
            n_rows: rows,
            n_angles: rows,
        };
        b.attention(inputs, &mut [sequence], &mut out)?;
        results = b.submit(&mut out)?.await?;
        cache.advance(rows);
    }
    Ok(results)
}

/// By which `dim` elements of the rows from position `at` on are rotated.
fn angles(at: usize, rows: usize, dim: usize) -> Angles {
    let turns = (0..rows * dim / 2).map(|i| {
        let (row, pair) = (i / (dim / 2), i % (dim / 2));
        (at + row) as f32 / (1.0 + pair as f32)
    });
    let turns: Vec<f32> = turns.collect();
    Angles {
        cos: turns.iter().map(|&turn| libm::cosf(turn)).collect(),
        sin: turns.iter().map(|&turn| libm::sinf(turn)).collect(),
        dim,
        layout: RopeLayout::Halves,
    }
}

#[cfg(test)]
mod tests {
    use Generation::{V4, V5, V6, V7};
    use sterna_kernels::experts::Gating;

    use super::*;

    fn forms() -> BTreeSet<WeightForm> {
        let blocks = [
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::Q8_0,
            DType::Q4_0,
            DType::Q4_K,
            DType::Q6_K,
            DType::Q1_0,
        ];
        let blocks = blocks.map(WeightForm::Blocks);
        blocks.into_iter().chain([WeightForm::Ternary]).collect()
    }

    #[test]
    fn the_cpu_passes_with_any_instructions() {
        for isa in Isa::available() {
            let cpu = Cpu::new(1, isa);
            let routing = Routing {
                gating: Gating::Softmax,
                n_experts: 5,
                n_used: 2,
                renormalised: true,
                groups: None,
                scale: 1.0,
            };
            for rwkv in [None, Some(V4), Some(V5), Some(V6), Some(V7)] {
                let is_plain = rwkv.is_none();
                let kernels = KernelFamilies {
                    forms: match rwkv {
                        None | Some(V4) => forms(),
                        Some(_) => BTreeSet::new(),
                    },
                    experts: Some(routing),
                    has_states: !is_plain,
                    rwkv,
                    is_rotated: !is_plain,
                    has_gates: !is_plain,
                    is_encoder: rwkv == Some(V5),
                    is_latent: is_plain,
                    is_layerwise: is_plain,
                };
                let tested = cpu.wait(self_test(&cpu, &kernels, CacheType::F16));
                tested.unwrap().unwrap();
            }
        }
    }

    #[test]
    fn results_that_differ_or_are_not_finite_are_refused() {
        let want = vec![1.0, 2.0, -3.0];
        assert!(check("k", Ok(want.clone()), Ok(want.clone())).is_ok());
        for got in [
            vec![1.0, 2.0, 3.0],
            vec![1.0, f32::NAN, -3.0],
            vec![1.0],
            vec![0.0; 3],
        ] {
            let error = check("k", Ok(want.clone()), Ok(got)).unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with("k: expected results within 0.02")
            );
        }
        assert!(check("k", Ok(want), Err(BackendError::CannotWait)).is_err());
    }
}
