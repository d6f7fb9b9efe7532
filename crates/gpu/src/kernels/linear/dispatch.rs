//! Kernel selection and launch configuration of matrix multiplications.

use sterna_format::DType;

use super::planes::FLOAT_PADDING;
use super::{Epilogue, Form, Linear, WeightKind};
use crate::kernels::quantize::{PADDING, Parts, QuantizedRows, Scaling, can_halve};
use crate::kernels::{Rows, fold, max_workgroup};
use crate::memory::Buffer;
use crate::record::Binding;
use crate::shader::{self, Param, Shader, params};
use crate::tuning::{LaunchConfig, RowClass};
use crate::{Device, Features, GpuError, Limits, Recorder};

/// Rows of activations that the GEMV kernels take at a time.
const GEMV_TOKENS: usize = 8;

/// Tile sizes of the GEMM kernels in rows of weights and of activations per workgroup: integer and float
/// kernels, and cooperative-matrix kernels.
const GEMM_TILE: [usize; 2] = [64, 64];
const COOP_TILE: [usize; 2] = [128, 128];

/// Cooperative matrices in fewer workgroups than this, of [`COOP_TILE`], use smaller tiles: these rows of weights, and
/// as many of activations or half as many. Found on an H200, the next on an H100.
const ENOUGH_COOP_TILES: usize = 80;
pub(super) const COOP_FEW_TILE: usize = 64;

/// Where even those are fewer workgroups than this, the columns are divided into parts, of so many times 64 at least.
const ENOUGH_COOP_PARTS: usize = 256;
const LEAST_COOP_CHUNKS: usize = 4;

/// Trits are multiplied by cooperative matrices with this many rows of activations or more. Blocks, which take few rows
/// faster, are with more than [`GEMV_TOKENS`].
pub(crate) const LEAST_COOP_TRITS: usize = 5;

/// Bytes of the sums of all parts at most.
pub(crate) const COOP_SUMS_BYTES: usize = ENOUGH_COOP_PARTS * COOP_FEW_TILE * COOP_FEW_TILE * 4;

/// Elements of activations that share a scale and a sum.
const RUN: usize = 32;

/// Maximum columns of trits whose sums are exact with cooperative matrices, see `coop_ternary.wgsl`.
const MAX_COOP_K: usize = 22_000;

/// Shared memory of the cooperative-matrix kernels, of whichever takes more.
const COOP_BYTES: u32 = (2304 + 2304) * 8 + 2560 * 4;
const _: () = assert!(COOP_BYTES >= (1152 + 1152) * 8 + 1280 * 4);
// Of attention_coop.wgsl.
const _: () = assert!(COOP_BYTES >= (1086 + 640) * 8 + 576 * 16 + (64 + 4) * 4);

params! {
    LinearParams {
        n: u32,
        first: u32,
        begin: u32,
        k: u32,
        row_blocks: u32,
        q_len: u32,
        runs: u32,
        token: u32,
        m: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        out_stride: u32,
        eps: f32,
        parts: u32,
    }
}

params! {
    SecondParams {
        second_n: u32,
        second_begin: u32,
        second_out_offset: u32,
        first_groups: u32,
    }
}

/// Parameters of two products of the same activations: those of the first, and what is the second's own.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
pub(crate) struct TwoLinearParams {
    first: LinearParams,
    second: SecondParams,
}

impl shader::Params for TwoLinearParams {
    const FIELDS: &'static [Param] = {
        const FIRST: &[Param] = LinearParams::FIELDS;
        const SECOND: &[Param] = SecondParams::FIELDS;
        const ALL: [Param; FIRST.len() + SECOND.len()] = {
            let mut all = [FIRST[0]; FIRST.len() + SECOND.len()];
            let mut i = 0;
            while i < all.len() {
                all[i] = if i < FIRST.len() {
                    FIRST[i]
                } else {
                    let mut field = SECOND[i - FIRST.len()];
                    field.offset += size_of::<LinearParams>();
                    field
                };
                i += 1;
            }
            all
        };
        &ALL
    };
}

/// Activations as kernels take them.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// Quantized beforehand.
    Stored(&'a QuantizedRows),
    /// Not quantized, and stored as f16 beforehand, for matrix units.
    Halves(&'a QuantizedRows),
    /// Few rows, or that of a route, quantized by every workgroup for itself.
    Own {
        x: Rows<'a>,
        norm: Option<(&'a Buffer, f32)>,
        scaling: Scaling,
    },
    /// Not quantized, normalised if there is a norm.
    Floats(Rows<'a>, Option<(&'a Buffer, f32)>),
}

/// Whether a product of `w` with `n_rows` quantized rows reads them as f16.
pub(crate) fn reads_halves(recorder: &Recorder, w: &Linear, n_rows: usize) -> bool {
    is_tiled_by_units(recorder, w, n_rows)
        && (w.pieces.iter()).any(|piece| CoopLaunch::of(piece.n, w.k, n_rows).reads_halves(w.kind))
}

/// Whether matrix units multiply `w` by the rows `x` of floats, as f16.
pub(super) fn halves_floats(recorder: &Recorder, w: &Linear, x: &Rows<'_>) -> bool {
    w.kind == WeightKind::Blocks(DType::F16)
        && is_tiled_by_units(recorder, w, x.n_rows)
        && can_halve(recorder.device(), x)
}

/// The kernels for one kind of weights.
struct Kernels {
    /// For few rows of activations.
    gemv: &'static Shader,
    /// For few rows that the kernel quantizes itself; the same as `gemv` for floats.
    rounding: &'static Shader,
    /// For many rows.
    gemm: &'static Shader,
    /// For many rows, by cooperative matrices, where they can be used.
    coop: Option<Coop>,
    /// For many rows of floats, as f16.
    float_coop: Option<&'static Shader>,
}

/// The kernels that use cooperative matrices.
#[derive(Clone, Copy)]
struct Coop {
    wide: &'static Shader,
    few: &'static Shader,
    /// Adds up what `few` gives for parts of the columns.
    sum: &'static Shader,
}

/// How cooperative matrices are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CoopLaunch {
    /// In tiles of [`COOP_TILE`].
    Wide,
    /// In tiles of [`COOP_FEW_TILE`] rows of weights by `tokens` of activations, the columns in `parts`.
    Few { tokens: usize, parts: usize },
}

impl CoopLaunch {
    /// Rows of activations of a small tile for `m`.
    fn few_tokens(m: usize) -> usize {
        match m {
            ..=32 => COOP_FEW_TILE / 2,
            _ => COOP_FEW_TILE,
        }
    }

    /// For `n` rows of weights of `k` columns and `m` rows of activations.
    fn of(n: usize, k: usize, m: usize) -> CoopLaunch {
        let tiles = |rows, tokens| n.div_ceil(rows) * m.div_ceil(tokens);
        let [rows, tokens] = COOP_TILE;
        if m > COOP_FEW_TILE && tiles(rows, tokens) >= ENOUGH_COOP_TILES {
            return CoopLaunch::Wide;
        }
        let tokens = CoopLaunch::few_tokens(m);
        let most = k.div_ceil(64) / LEAST_COOP_CHUNKS;
        let parts = ENOUGH_COOP_PARTS / tiles(COOP_FEW_TILE, tokens).max(1);
        CoopLaunch::Few {
            tokens,
            parts: parts.min(most).max(1),
        }
    }

    /// Whether quantized rows are read as f16. Trits in large tiles are multiplied with codes, which are half as large.
    fn reads_halves(self, kind: WeightKind) -> bool {
        match kind {
            WeightKind::Ternary => matches!(self, CoopLaunch::Few { .. }),
            WeightKind::Blocks(_) => true,
        }
    }
}

pub(super) fn unsupported(dtype: DType) -> GpuError {
    GpuError::Unsupported {
        what: format!("{dtype} weights"),
        reason: "there are no kernels for them".into(),
    }
}

/// Blocks of a row, as kernels count them.
pub(super) fn row_blocks(kind: WeightKind, k: usize) -> usize {
    match kind {
        WeightKind::Ternary => k.div_ceil(128),
        WeightKind::Blocks(dtype) if dtype.block_len() == 1 => k.div_ceil(FLOAT_PADDING),
        WeightKind::Blocks(dtype) => k / dtype.block_len(),
    }
}

/// Runs of a type that a GEMV kernel processes together, `UNIT` of `codes_*.wgsl`.
fn unit_runs(dtype: DType) -> usize {
    match dtype {
        DType::Q4_K | DType::Q6_K | DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => 2,
        DType::Q1_0 => 4,
        _ => 1,
    }
}

/// Constants that distinguish types that share kernels.
pub(super) fn constants_of(kind: WeightKind) -> Option<(&'static str, f64)> {
    match kind {
        WeightKind::Blocks(DType::Q2_0) => Some(("BLOCK_UNITS", 1.0)),
        WeightKind::Blocks(DType::Q2_0_G128 | DType::PQ2_0) => Some(("BLOCK_UNITS", 2.0)),
        _ => None,
    }
}

impl Kernels {
    fn of(
        recorder: &Recorder,
        config: LaunchConfig,
        w: &Linear,
        source: &Source<'_>,
    ) -> Result<Kernels, GpuError> {
        let floats = |vectors: [&'static Shader; 2], elements: [&'static Shader; 2]| {
            let [gemv, gemm] = match in_vectors(source) {
                true => vectors,
                false => elements,
            };
            (gemv, gemv, gemm, None)
        };
        let (gemv, rounding, gemm, coop) = match w.kind {
            WeightKind::Ternary => (
                &shader::TERNARY_GEMV,
                &shader::TERNARY_GEMV_ROUNDING,
                &shader::TERNARY_GEMM,
                Some([&shader::TERNARY_GEMM_COOP, &shader::TERNARY_GEMM_COOP_FEW]),
            ),
            WeightKind::Blocks(dtype) => match dtype {
                DType::Q8_0 => (
                    &shader::GEMV_Q8_0,
                    &shader::GEMV_Q8_0_ROUNDING,
                    &shader::GEMM_Q8_0,
                    Some([&shader::GEMM_Q8_0_COOP, &shader::GEMM_Q8_0_COOP_FEW]),
                ),
                DType::Q4_0 => (
                    &shader::GEMV_Q4_0,
                    &shader::GEMV_Q4_0_ROUNDING,
                    &shader::GEMM_Q4_0,
                    Some([&shader::GEMM_Q4_0_COOP, &shader::GEMM_Q4_0_COOP_FEW]),
                ),
                DType::Q4_K => (
                    &shader::GEMV_Q4_K,
                    &shader::GEMV_Q4_K_ROUNDING,
                    &shader::GEMM_Q4_K,
                    Some([&shader::GEMM_Q4_K_COOP, &shader::GEMM_Q4_K_COOP_FEW]),
                ),
                DType::Q6_K => (
                    &shader::GEMV_Q6_K,
                    &shader::GEMV_Q6_K_ROUNDING,
                    &shader::GEMM_Q6_K,
                    Some([&shader::GEMM_Q6_K_COOP, &shader::GEMM_Q6_K_COOP_FEW]),
                ),
                DType::Q1_0 => (
                    &shader::GEMV_Q1_0,
                    &shader::GEMV_Q1_0_ROUNDING,
                    &shader::GEMM_Q1_0,
                    Some([&shader::GEMM_Q1_0_COOP, &shader::GEMM_Q1_0_COOP_FEW]),
                ),
                DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => (
                    &shader::GEMV_Q2_0,
                    &shader::GEMV_Q2_0_ROUNDING,
                    &shader::GEMM_Q2_0,
                    Some([&shader::GEMM_Q2_0_COOP, &shader::GEMM_Q2_0_COOP_FEW]),
                ),
                DType::F32 => floats(
                    [&shader::GEMV_F32, &shader::GEMM_F32],
                    [&shader::GEMV_F32_ELEMENTS, &shader::GEMM_F32_ELEMENTS],
                ),
                DType::F16 => floats(
                    [&shader::GEMV_F16, &shader::GEMM_F16],
                    [&shader::GEMV_F16_ELEMENTS, &shader::GEMM_F16_ELEMENTS],
                ),
                DType::BF16 => floats(
                    [&shader::GEMV_BF16, &shader::GEMM_BF16],
                    [&shader::GEMV_BF16_ELEMENTS, &shader::GEMM_BF16_ELEMENTS],
                ),
                _ => return Err(unsupported(dtype)),
            },
        };
        let units =
            matches!(source, Source::Stored(_)) && by_matrix_units(recorder.device(), config, w);
        let sum = match w.kind {
            WeightKind::Ternary => &shader::TERNARY_GEMM_COOP_SUM,
            WeightKind::Blocks(_) => &shader::GEMM_BLOCKS_COOP_SUM,
        };
        let coop = coop.filter(|_| units);
        Ok(Kernels {
            gemv,
            rounding,
            gemm,
            coop: coop.map(|[wide, few]| Coop { wide, few, sum }),
            float_coop: matches!(source, Source::Halves(_)).then_some(&shader::GEMM_F16_COOP),
        })
    }
}

/// Whether rows of floats can be read as vectors.
pub(super) fn in_vectors(source: &Source<'_>) -> bool {
    match source {
        Source::Floats(x, _) => x.in_vectors(),
        Source::Stored(_) | Source::Halves(_) | Source::Own { .. } => false,
    }
}

/// Whether cooperative-matrix kernels run: in subgroups of 32, with shared memory for their tiles; or, for tests, emulated,
/// for which software has as much as it takes, whatever it says.
pub(crate) fn has_matrix_units(features: Features, limits: &Limits) -> bool {
    let of_32 = limits.min_subgroup == 32 && limits.max_subgroup == 32;
    features.emulated_matrix
        || features.cooperative_matrix && of_32 && limits.workgroup_bytes >= COOP_BYTES
}

/// Whether cooperative matrices multiply `w` by many rows.
pub(super) fn by_matrix_units(device: &Device, config: LaunchConfig, w: &Linear) -> bool {
    let can = match w.kind {
        WeightKind::Ternary => w.k <= MAX_COOP_K,
        // Activations become f16, too, with one scale for all: of magnitudes below 2^-8 that keeps less than 11 bits, of
        // which a head, that follows a norm, has none that matter.
        WeightKind::Blocks(DType::F16) => w.n >= VERY_MANY_ROWS,
        // F16 doesn't hold what they may be.
        WeightKind::Blocks(DType::F32 | DType::BF16) => false,
        WeightKind::Blocks(_) => true,
    };
    can && config.matrix_units.unwrap_or(true) && device.has_matrix_units()
}

/// The launch configuration for a product of `w` and `n_rows` rows of activations when `config` is requested:
/// open choices are made by heuristics, and all are brought within the device's limits.
pub(crate) fn settled(
    device: &Device,
    config: LaunchConfig,
    w: &Linear,
    n_rows: usize,
) -> LaunchConfig {
    let rounds = matches!(w.kind.form(), Form::Int8(_));
    match RowClass::of(n_rows) {
        RowClass::Many => LaunchConfig {
            matrix_units: (rounds || w.kind == WeightKind::Blocks(DType::F16))
                .then(|| by_matrix_units(device, config, w)),
            ..LaunchConfig::default()
        },
        rows => {
            let one = rounds && rows == RowClass::One;
            let own = one && pays_to_round(config, w) && can_round(device.limits(), w.k, 1, 0);
            let shape = GemvShape::of(device.limits(), config, w, n_rows, own);
            LaunchConfig {
                lanes: Some(shape.lanes),
                workgroup: Some(shape.workgroup),
                rounds_itself: one.then_some(own),
                matrix_units: None,
            }
        }
    }
}

/// How a GEMV is divided among invocations.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemvShape {
    pub(super) workgroup: u32,
    /// Invocations that share two rows.
    pub(super) lanes: u32,
    /// Invocations that quantize a row together, where several are.
    team: u32,
}

impl GemvShape {
    /// Workgroups that keep a large device busy: of one row and of several, which are of twice as many invocations; and
    /// fewer where each has to quantize the input first: for blocks, and for trits, whose rows are read quickly.
    const ENOUGH_OF_ONE: usize = 512;
    const ENOUGH: usize = 256;
    const ENOUGH_ROUNDING: usize = 200;
    const ENOUGH_TERNARY: usize = 80;

    /// For the rows of `w`, each of so many steps of one vector of weights: eight lanes read 128 bytes of a
    /// row together, a cache line. More lanes share a row of floats, which is long, and a row where there
    /// would be few workgroups otherwise, down to one step per lane, because a few workgroups mostly wait for
    /// memory. One row of activations that is there leaves nothing to do but wait: two steps per lane.
    ///
    /// `own` is whether every workgroup quantizes the input for itself.
    pub(super) fn of(
        limits: &Limits,
        config: LaunchConfig,
        w: &Linear,
        n_rows: usize,
        own: bool,
    ) -> GemvShape {
        let steps = steps(w);
        let most = limits.min_subgroup.clamp(8, 32);
        let one = own && n_rows == 1;
        let least = if one { workgroup_to_round(w.k) } else { 0 }.max(64);
        // Large workgroups quantize blocks less often, for tall matrices, and faster, for wide ones.
        let (usual, enough) = match (own, w.kind) {
            (_, WeightKind::Ternary) if n_rows > 1 => (128, Self::ENOUGH),
            _ if n_rows > 1 => (256, Self::ENOUGH),
            (false, _) => (128, Self::ENOUGH_OF_ONE),
            (true, WeightKind::Ternary) => (256, Self::ENOUGH_TERNARY),
            (true, _) if w.n > MANY_ROWS || w.k > WIDE => (512, Self::ENOUGH_ROUNDING),
            (true, _) => (256, Self::ENOUGH_ROUNDING),
        };
        let are_long = w.kind.form() == Form::Float;
        let workgroup = power_of_two(
            config.workgroup.unwrap_or(usual),
            least,
            max_workgroup(limits),
        );
        let shape = |lanes| GemvShape {
            workgroup,
            lanes,
            team: most,
        };
        let lanes = config.lanes.unwrap_or_else(|| {
            let mut lanes = 8;
            let share_more = |lanes| {
                let only_waits = !own && n_rows == 1 && steps as u32 >= 4 * lanes;
                are_long || only_waits || w.n / shape(lanes).rows() < enough
            };
            while share_more(lanes) && steps as u32 >= 2 * lanes && lanes < most {
                lanes *= 2;
            }
            lanes
        });
        shape(power_of_two(lanes, 8, most))
    }

    /// Rows per workgroup.
    pub(super) fn rows(self) -> usize {
        2 * (self.workgroup / self.lanes) as usize
    }
}

/// `n` or the next power of two above it, clamped to the two others.
fn power_of_two(n: u32, least: u32, most: u32) -> u32 {
    n.min(most).next_power_of_two().clamp(least, most)
}

/// Steps per row: sixteen bytes of trits, the runs of codes that share words, or eight floats.
fn steps(w: &Linear) -> usize {
    match (w.kind, w.kind.form()) {
        (WeightKind::Ternary, _) => w.k / 64,
        (_, Form::Float) => w.k / 8,
        (WeightKind::Blocks(dtype), Form::Int8(_)) => w.k / RUN / unit_runs(dtype),
    }
}

/// Vectors of four floats that an invocation of a quantizing kernel holds in registers.
const MAX_ROUNDING_TURNS: usize = 8;

/// Vectors of four floats of a row that is quantized.
fn vectors(width: usize) -> usize {
    width.next_multiple_of(PADDING) / 4
}

/// Invocations of a workgroup that quantizes a row of `width`: a power of two.
fn workgroup_to_round(width: usize) -> u32 {
    let invocations = vectors(width).div_ceil(MAX_ROUNDING_TURNS);
    u32::try_from(invocations.next_power_of_two()).unwrap_or(u32::MAX)
}

/// From these rows of weights and columns on, quantizing takes large workgroups. These and the next were
/// found on an H200, like the numbers of workgroups above.
const MANY_ROWS: usize = 8192;
const WIDE: usize = 4096;

/// From this many rows on, which heads have, a quantizing dispatch costs less than quantizing in every workgroup.
const VERY_MANY_ROWS: usize = 65_536;

/// Whether a workgroup has shared memory for `n_rows` of `width` that it quantizes, besides `others` bytes.
fn can_round(limits: &Limits, width: usize, n_rows: usize, others: usize) -> bool {
    let padded = width.next_multiple_of(PADDING);
    let most = max_workgroup(limits);
    // Codes; steps, sums and maxima of runs; of a row two numbers; and what reductions need.
    let rows = n_rows * (padded + 128 + padded / RUN * 12) + 2 * GEMV_TOKENS * 4;
    let bytes = rows + 12 * most as usize + others;
    let in_vectors = width.is_multiple_of(4) && width > 0;
    let turns = n_rows > 1 || workgroup_to_round(width) <= most;
    in_vectors && bytes <= limits.workgroup_bytes as usize && turns
}

/// Whether quantizing in every workgroup is faster than in a separate dispatch, which it isn't for blocks of
/// many columns.
pub(super) fn pays_to_round(config: LaunchConfig, w: &Linear) -> bool {
    config
        .rounds_itself
        .unwrap_or_else(|| w.n < VERY_MANY_ROWS && (w.kind == WeightKind::Ternary || w.k < WIDE))
}

/// The same for an expert's matrix: what quantizes in every workgroup may choose the experts, too.
pub(super) fn pays_to_round_for_experts(config: LaunchConfig, w: &Linear) -> bool {
    pays_to_round(config, w) || config.rounds_itself.is_none() && w.k == WIDE
}

/// Whether a product of `w` and `n_rows` rows of activations is computed in tiles of them.
fn is_tiled(device: &Device, config: LaunchConfig, w: &Linear, n_rows: usize) -> bool {
    let few_trits = w.kind == WeightKind::Ternary && n_rows >= LEAST_COOP_TRITS;
    RowClass::of(n_rows) == RowClass::Many || few_trits && by_matrix_units(device, config, w)
}

/// Whether the tiles of such a product are multiplied by matrix units.
fn is_tiled_by_units(recorder: &Recorder, w: &Linear, n_rows: usize) -> bool {
    let config = recorder.tuning().config(&w.product(n_rows));
    let device = recorder.device();
    is_tiled(device, config, w, n_rows) && by_matrix_units(device, config, w)
}

/// Whether every workgroup of the product should quantize the rows `x` for itself: if they are few, if vectors and
/// shared memory permit, and if it pays.
pub(crate) fn rounds_itself(recorder: &Recorder, w: &Linear, x: &Rows<'_>) -> bool {
    let config = recorder.tuning().config(&w.product(x.n_rows));
    // Blocks, which have a step for each run, take longer.
    let few = match w.kind {
        WeightKind::Ternary => !is_tiled(recorder.device(), config, w, x.n_rows),
        WeightKind::Blocks(_) => x.n_rows == 1,
    };
    few && pays_to_round(config, w) && can_round_rows(recorder, w.k, x, x.n_rows, 0)
}

/// Whether a workgroup can quantize `at_once` of the rows `x` of `k` elements, whichever they are, with shared memory for
/// `others` bytes besides.
pub(super) fn can_round_rows(
    recorder: &Recorder,
    k: usize,
    x: &Rows<'_>,
    at_once: usize,
    others: usize,
) -> bool {
    x.in_vectors() && can_round(recorder.device().limits(), k, at_once, others)
}

/// What a kernel that quantizes `n_rows` of `k` elements for itself has to know.
pub(super) fn rounding(
    scaling: Scaling,
    is_normed: bool,
    k: usize,
    n_rows: usize,
    shape: GemvShape,
) -> [(&'static str, f64); 7] {
    let q_len = k.next_multiple_of(PADDING) / 16;
    let runs = match scaling {
        Scaling::Row => 1,
        Scaling::Blocks256 | Scaling::Blocks32 => q_len / 2,
    };
    let turns = vectors(k).div_ceil(shape.workgroup as usize);
    [
        ("SCALING", f64::from(scaling as u8)),
        ("NORM", f64::from(u8::from(is_normed))),
        ("Q_LEN", q_len as f64),
        ("Q_ROOM", (n_rows * (q_len + 8)) as f64),
        ("RUNS", (n_rows * runs) as f64),
        ("TURNS", turns as f64),
        ("TEAM", f64::from(shape.team)),
    ]
}

/// What depends on the columns of `w` alone.
pub(super) fn linear_params(w: &Linear) -> LinearParams {
    LinearParams {
        n: 0,
        first: 0,
        begin: 0,
        k: w.k as u32,
        row_blocks: row_blocks(w.kind, w.k) as u32,
        q_len: (w.k.next_multiple_of(PADDING) / 16) as u32,
        runs: w.k.div_ceil(RUN) as u32,
        token: 0,
        m: 0,
        x_offset: 0,
        x_stride: 0,
        out_offset: 0,
        out_stride: 0,
        eps: 0.0,
        parts: 1,
    }
}

/// The parts that a product of `w` with `n_rows` quantized rows is computed in, if there are several, of all its rows.
pub(crate) fn parts_of(recorder: &Recorder, w: &Linear, n_rows: usize) -> Option<Parts> {
    let [piece] = &w.pieces[..] else { return None };
    match CoopLaunch::of(piece.n, w.k, n_rows) {
        CoopLaunch::Few { parts, .. } if parts > 1 && is_tiled_by_units(recorder, w, n_rows) => {
            Some(Parts {
                n: parts,
                scales: (w.kind == WeightKind::Ternary)
                    .then(|| (piece.scales.clone(), piece.begin)),
            })
        }
        _ => None,
    }
}

/// What the dispatches of a product have in common.
struct Given<'a> {
    params: LinearParams,
    constants: Vec<(&'static str, f64)>,
    /// Activations.
    inputs: Vec<Binding<'a>>,
    /// What kernels for few rows have after the output.
    norms: Option<(Binding<'a>, (&'static str, f64))>,
}

impl<'a> Given<'a> {
    /// `nothing` is bound where there is nothing to read.
    fn new(
        w: &Linear,
        source: &Source<'a>,
        shape: GemvShape,
        epilogue: Epilogue,
        out: &Rows<'_>,
        nothing: &'a Buffer,
    ) -> Given<'a> {
        let mut params = LinearParams {
            m: out.n_rows as u32,
            out_offset: out.offset as u32,
            out_stride: out.stride as u32,
            ..linear_params(w)
        };
        let mut constants = epilogue.constants().to_vec();
        constants.extend(constants_of(w.kind));
        let mut inputs: Vec<Binding<'_>> = Vec::with_capacity(2);
        let mut norms = None;
        match *source {
            Source::Stored(x) => {
                inputs.extend([Binding::from(&x.q), Binding::from(&x.steps)]);
            }
            Source::Halves(x) => inputs.push((&x.halves).into()),
            Source::Floats(x, norm) => {
                (params.x_offset, params.x_stride) = (x.offset as u32, x.stride as u32);
                inputs.push(x.buffer.into());
                params.eps = norm.map_or(0.0, |(_, eps)| eps);
                norms = Some((
                    norm.map_or(nothing, |(weight, _)| weight).into(),
                    ("NORM", f64::from(u8::from(norm.is_some()))),
                ));
            }
            Source::Own { x, norm, scaling } => {
                params.x_offset = x.offset as u32;
                params.eps = norm.map_or(0.0, |(_, eps)| eps);
                let weight = norm.map_or(nothing, |(weight, _)| weight);
                inputs.extend([Binding::from(x.buffer), Binding::from(weight)]);
                params.x_stride = x.stride as u32;
                constants.extend(rounding(scaling, norm.is_some(), w.k, x.n_rows, shape));
            }
        }
        Given {
            params,
            constants,
            inputs,
            norms,
        }
    }
}

/// Records the dispatches of all pieces. Shapes have been checked.
pub(super) fn multiply(
    recorder: &mut Recorder,
    w: &Linear,
    source: Source<'_>,
    epilogue: Epilogue,
    out: Rows<'_>,
    leaves_parts: bool,
) -> Result<(), GpuError> {
    let config = recorder.tuning().config(&w.product(out.n_rows));
    let kernels = Kernels::of(recorder, config, w, &source)?;
    let is_tiled = is_tiled(recorder.device(), config, w, out.n_rows);
    let nothing = recorder.device().nothing()?;
    let own = matches!(source, Source::Own { .. });
    let shape = GemvShape::of(recorder.device().limits(), config, w, out.n_rows, own);
    let Given {
        mut params,
        constants,
        inputs,
        norms,
    } = Given::new(w, &source, shape, epilogue, &out, &nothing);
    for piece in &w.pieces {
        (params.n, params.first) = (piece.n as u32, piece.first as u32);
        params.begin = piece.begin as u32;
        let mut bindings = vec![(&piece.codes).into(), (&piece.scales).into()];
        bindings.extend_from_slice(&inputs);
        bindings.push(out.buffer.into());
        if is_tiled {
            if let (Some(coop), Source::Stored(x)) = (&kernels.coop, &source) {
                let launch = CoopLaunch::of(piece.n, w.k, out.n_rows);
                if launch.reads_halves(w.kind) {
                    bindings[2] = (&x.halves).into();
                }
                let given = (&constants[..], &bindings[..], Binding::from(&x.scratch));
                let epilogue = (!leaves_parts).then_some(epilogue);
                multiply_by_units(recorder, coop, launch, epilogue, given, &mut params)?;
                continue;
            }
            if let Some(kernel) = kernels.float_coop {
                let tokens = CoopLaunch::few_tokens(out.n_rows);
                let constants = [&constants[..], &[("TOKENS", tokens as f64)]].concat();
                let tiles = [out.n_rows.div_ceil(tokens), piece.n.div_ceil(COOP_FEW_TILE)];
                let grid = tiles.map(|n| n as u32);
                recorder.dispatch(kernel, &constants, &bindings, &params, grid)?;
                continue;
            }
            let [rows, tokens] = GEMM_TILE;
            let grid = [
                piece.n.div_ceil(rows) as u32,
                out.n_rows.div_ceil(tokens) as u32,
            ];
            recorder.dispatch(kernels.gemm, &constants, &bindings, &params, grid)?;
            continue;
        }
        bindings.extend(norms.map(|(binding, _)| binding));
        for token in (0..out.n_rows).step_by(GEMV_TOKENS) {
            params.token = token as u32;
            let tokens = GEMV_TOKENS.min(out.n_rows - token);
            let mut constants = constants.clone();
            constants.extend(norms.map(|(_, constant)| constant));
            constants.extend([
                ("TOKENS", tokens as f64),
                ("WG", f64::from(shape.workgroup)),
                ("LANES", f64::from(shape.lanes)),
            ]);
            let kernel = if own { kernels.rounding } else { kernels.gemv };
            let grid = fold(piece.n.div_ceil(shape.rows()));
            recorder.dispatch(kernel, &constants, &bindings, &params, grid)?;
        }
    }
    Ok(())
}

/// Records two products of a row in one dispatch, which write different columns of it: queries and keys beside values in another
/// format, which alone leave most of a large device idle. Returns whether there is a kernel for that. Shapes have been checked.
pub(super) fn multiply_beside(
    recorder: &mut Recorder,
    [(first, out), (second, second_out)]: [(&Linear, Rows<'_>); 2],
    source: Source<'_>,
    epilogue: Epilogue,
) -> Result<bool, GpuError> {
    let kernel = match ([first.kind, second.kind].map(dtype_of), &source) {
        ([Some(DType::Q4_K), Some(DType::Q6_K)], Source::Own { .. }) => {
            &shader::GEMV_Q4_K_AND_Q6_K_ROUNDING
        }
        ([Some(DType::Q4_K), Some(DType::Q6_K)], Source::Stored(_)) => &shader::GEMV_Q4_K_AND_Q6_K,
        _ => return Ok(false),
    };
    let ([piece], [second_piece]) = (&first.pieces[..], &second.pieces[..]) else {
        return Ok(false);
    };
    let config = recorder.tuning().config(&first.product(1));
    let own = matches!(source, Source::Own { .. });
    let shape = GemvShape::of(recorder.device().limits(), config, first, 1, own);
    let [first_groups, second_groups] = [piece.n, second_piece.n].map(|n| n.div_ceil(shape.rows()));
    let grid = fold(first_groups + second_groups);
    let are_alike = first.k == second.k && out.buffer == second_out.buffer;
    if !are_alike || grid[1] != 1 {
        return Ok(false);
    }
    let nothing = recorder.device().nothing()?;
    let given = Given::new(first, &source, shape, epilogue, &out, &nothing);
    let params = TwoLinearParams {
        first: LinearParams {
            n: piece.n as u32,
            begin: piece.begin as u32,
            ..given.params
        },
        second: SecondParams {
            second_n: second_piece.n as u32,
            second_begin: second_piece.begin as u32,
            second_out_offset: second_out.offset as u32,
            first_groups: first_groups as u32,
        },
    };
    let mut constants = given.constants;
    constants.extend([
        ("TOKENS", 1.0),
        ("WG", f64::from(shape.workgroup)),
        ("LANES", f64::from(shape.lanes)),
    ]);
    let mut bindings: Vec<Binding<'_>> = vec![(&piece.codes).into(), (&piece.scales).into()];
    bindings.extend(given.inputs);
    for buffer in [out.buffer, &second_piece.codes, &second_piece.scales] {
        bindings.push(buffer.into());
    }
    recorder.dispatch(kernel, &constants, &bindings, &params, grid)?;
    Ok(true)
}

/// The type of blocks.
fn dtype_of(kind: WeightKind) -> Option<DType> {
    match kind {
        WeightKind::Ternary => None,
        WeightKind::Blocks(dtype) => Some(dtype),
    }
}

/// Records the products of a piece by cooperative matrices, given the constants and bindings that other kernels have, and
/// scratch. Without an epilogue, sums of parts are left there.
fn multiply_by_units(
    recorder: &mut Recorder,
    coop: &Coop,
    launch: CoopLaunch,
    epilogue: Option<Epilogue>,
    (constants, bindings, scratch): (&[(&'static str, f64)], &[Binding<'_>], Binding<'_>),
    params: &mut LinearParams,
) -> Result<(), GpuError> {
    let (n, m) = (params.n as usize, params.m as usize);
    let (tokens, parts) = match launch {
        CoopLaunch::Wide => {
            let [rows, tokens] = COOP_TILE;
            let grid = [n.div_ceil(rows) as u32, m.div_ceil(tokens) as u32];
            return recorder.dispatch(coop.wide, constants, bindings, params, grid);
        }
        CoopLaunch::Few { tokens, parts } => (tokens, parts),
    };
    params.parts = parts as u32;
    let few = [constants, &[("TOKENS", tokens as f64)]].concat();
    let bindings = [bindings, &[scratch]].concat();
    let tiles = [n.div_ceil(COOP_FEW_TILE), m.div_ceil(tokens) * parts];
    let grid = tiles.map(|n| n as u32);
    recorder.dispatch(coop.few, &few, &bindings, params, grid)?;
    let Some(epilogue) = epilogue.filter(|_| parts > 1) else {
        return Ok(());
    };
    let grid = fold((n.div_ceil(2) * m).div_ceil(64));
    // It reads no weights: their constants aren't its.
    recorder.dispatch(coop.sum, &epilogue.constants(), &bindings, params, grid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shader::Target;

    #[test]
    fn parts_fit_the_memory_for_their_sums() {
        for n in [1, 64, 65, 2048, 3072, 16_384, 128_256] {
            for k in [1, 64, 256, 2048, 8192] {
                for m in [9, 32, 33, 64, 65, 200, 512, 5000] {
                    let launch = CoopLaunch::of(n, k, m);
                    let CoopLaunch::Few { tokens, parts } = launch else {
                        continue;
                    };
                    assert!(
                        parts == 1 || parts * m * n * 4 <= COOP_SUMS_BYTES,
                        "{n} {k} {m}"
                    );
                    assert!(parts == 1 || parts * LEAST_COOP_CHUNKS * 64 <= k + 63);
                    assert!(tokens == 32 || tokens == 64);
                }
            }
        }
        let few = |tokens, parts| CoopLaunch::Few { tokens, parts };
        assert_eq!(CoopLaunch::of(2048, 8192, 32), few(32, 8));
        assert_eq!(CoopLaunch::of(2048, 2048, 512), few(64, 1));
        assert_eq!(CoopLaunch::of(16_384, 2048, 512), CoopLaunch::Wide);
    }

    #[test]
    fn units_are_those_of_the_kernels() {
        for (dtype, kernel) in [
            (DType::Q8_0, &shader::GEMV_Q8_0),
            (DType::Q4_0, &shader::GEMV_Q4_0),
            (DType::Q4_K, &shader::GEMV_Q4_K),
            (DType::Q6_K, &shader::GEMV_Q6_K),
            (DType::Q1_0, &shader::GEMV_Q1_0),
            (DType::Q2_0, &shader::GEMV_Q2_0),
            (DType::Q2_0_G128, &shader::GEMV_Q2_0),
            (DType::PQ2_0, &shader::GEMV_Q2_0),
        ] {
            let text = kernel.assemble(Target::Native, Features::NONE);
            let (_, text) = text.split_once("const UNIT: u32 = ").unwrap();
            let (unit, _) = text.split_once("u;").unwrap();
            assert_eq!(unit.parse(), Ok(unit_runs(dtype)), "{dtype}");
        }
    }
}
