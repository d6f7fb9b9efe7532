//! Attention over a cache of keys and values, and how the cache is filled.

mod cache;
mod heads;
mod split_kv;

pub use cache::{CacheLayer, MAX_HEAD_DIM, PAGE_LEN};
pub(crate) use heads::HeadsParams;
pub use heads::{Angles, HeadNorms, Heads, Position, prepare_heads};
pub(crate) use split_kv::{CombineParams, SplitKvParams, can_add, decode_sums, decodes};
pub use split_kv::{SplitKv, SplitKvStates, decode};
pub use sterna_format::model::{AttentionShape, CacheType, CachedValues, RopeLayout};

use super::{Rows, Sequences};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{self, Shader, params};
use crate::{Device, GpuError, Recorder};
use cache::row_shape;

/// The window as a kernel parameter.
fn window(shape: &AttentionShape) -> u32 {
    let window = shape.window.and_then(|w| u32::try_from(w).ok());
    window.unwrap_or(u32::MAX)
}

/// Errors unless `shape` matches the cache, as many query heads share each of keys, and `out` are rows of such heads.
fn check_heads(shape: &AttentionShape, cache: &CacheLayer, out: &Rows<'_>) -> Result<(), GpuError> {
    out.check("attention: output")?;
    expect(
        "attention: heads of keys",
        cache.n_kv_heads,
        shape.n_kv_heads,
    )?;
    expect(
        "attention: elements of a head",
        cache.head_dim,
        shape.head_dim,
    )?;
    let width = shape.n_heads * cache.head_dim;
    expect("attention: width of the output", width, out.width)?;
    let share = shape.n_heads / cache.n_kv_heads.max(1);
    expect(
        "attention: query heads",
        share * cache.n_kv_heads,
        shape.n_heads,
    )
}

/// From one query of a row to the next, in elements: queries may be followed by as many elements of something else. Errors
/// unless `width` elements are `n_heads` queries of `head_dim`.
fn query_step(width: usize, n_heads: usize, head_dim: usize) -> Result<usize, GpuError> {
    let step = match width == 2 * n_heads * head_dim {
        true => 2 * head_dim,
        false => head_dim,
    };
    expect("attention: width of queries", n_heads * step, width)?;
    Ok(step)
}

/// Query-head pairs, positions, and elements of a head that `attention.wgsl` takes at a time.
const TILE: usize = 32;

/// Tiles of a head's values that one of its workgroups sums.
const MAX_CHUNKS: usize = 8;

/// Query-head pairs that `attention_coop.wgsl` takes at a time, and elements of a head at most.
const COOP_TILE: usize = 64;
const COOP_HEAD_DIM: usize = 128;

params! {
    AttentionParams {
        n_rows: u32,
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
        q_offset: u32,
        q_stride: u32,
        q_step: u32,
        out_offset: u32,
        out_stride: u32,
        sequences: u32,
        n_sequences: u32,
        pages: u32,
        page_stride: u32,
        row_len: u32,
        row_scales: u32,
        scales: u32,
        window: u32,
        n_splits: u32,
        split_len: u32,
        scale: f32,
        softcap: f32,
    }
}

/// How the work of [`attention`] is divided.
#[derive(Debug, Clone, Copy)]
pub enum Split<'a> {
    /// Each query iterates over all positions: for many queries.
    Queries,
    /// Split-KV (flash-decoding): positions are divided among workgroups, and a second dispatch combines
    /// their partial results: for few queries.
    Kv(SplitKv<'a>),
}

/// How scores become weights.
#[derive(Debug, Clone, Copy)]
pub struct Scores<'a> {
    /// Heads, scale, cap and window.
    pub shape: &'a AttentionShape,
    /// Of each query head, the score of a position whose value is zero, `[n_heads]`.
    pub sinks: Option<&'a Buffer>,
    /// Whether queries attend to no positions after their own; else they attend to those of the queries after them too.
    pub is_causal: bool,
}

impl<'a> From<&'a AttentionShape> for Scores<'a> {
    /// Without sinks, causal.
    fn from(shape: &'a AttentionShape) -> Scores<'a> {
        Scores {
            shape,
            sinks: None,
            is_causal: true,
        }
    }
}

impl Scores<'_> {
    /// Errors if there are fewer sinks than heads.
    fn check(&self) -> Result<(), GpuError> {
        match self.sinks {
            Some(sinks) => expect_most(
                "attention: heads with a sink",
                (sinks.bytes() / 4) as usize,
                self.shape.n_heads,
            ),
            None => Ok(()),
        }
    }

    fn constant(&self) -> (&'static str, f64) {
        ("SINKS", f64::from(u8::from(self.sinks.is_some())))
    }
}

/// `out[t, h] ← Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h']` over the positions `j` that query `t`
/// attends to in its sequence: up to its own, or to the last query's if attention isn't causal, and no further back than the
/// window. Keys and values are already cached.
///
/// Shapes: `q` and `out` are rows of `[n_heads, head_dim]` in different buffers; or `q` of `[n_heads, 2, head_dim]`, of
/// which the second are something else.
/// Errors: [`GpuError::Shape`] if shapes don't match, or the states are too small; [`GpuError::Unsupported`] if attention
/// isn't causal and positions are divided.
/// Exactness: against `sterna_kernels::attention`, see `docs/gpu.md`.
pub fn attention<'a>(
    recorder: &mut Recorder,
    scores: impl Into<Scores<'a>>,
    q: Rows<'_>,
    sequences: Sequences<'_>,
    cache: &CacheLayer,
    split: Split<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let scores = scores.into();
    let shape = scores.shape;
    scores.check()?;
    q.check("attention: queries")?;
    sequences.check(&q)?;
    check_heads(shape, cache, &out)?;
    let d = cache.head_dim;
    let q_step = query_step(q.width, shape.n_heads, d)?;
    expect("attention: rows of the output", q.n_rows, out.n_rows)?;
    if let Split::Kv(split_kv) = split
        && split_kv::decodes(d)
    {
        return split_kv::attention(recorder, scores, q, sequences, cache, split_kv, out);
    }
    for sequences in sequences.runs(recorder, shape.n_heads) {
        record(recorder, scores, (q, q_step), sequences, cache, split, out)?;
    }
    Ok(())
}

/// The kernel that uses cooperative matrices, where there is one: it rounds to f16, which an f32 cache is there to avoid.
fn coop_kernel(device: &Device, cache: &CacheLayer) -> Option<&'static Shader> {
    if !device.has_matrix_units() || cache.head_dim > COOP_HEAD_DIM {
        return None;
    }
    match cache.dtype {
        CacheType::F32 => None,
        CacheType::F16 => Some(&shader::ATTENTION_F16_COOP),
        CacheType::Q8_0 => Some(&shader::ATTENTION_Q8_0_COOP),
    }
}

/// [`attention`] of sequences that one dispatch takes; queries of a row are `q_step` apart.
fn record(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    (q, q_step): (Rows<'_>, usize),
    sequences: Sequences<'_>,
    cache: &CacheLayer,
    split: Split<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let shape = scores.shape;
    let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
    let share = shape.n_heads / n_kv_heads.max(1);
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let (mut states, mut split_len, mut n_splits) = (None, 0, 1);
    if let Split::Kv(SplitKv {
        states: room,
        most_len,
    }) = split
    {
        (split_len, n_splits) = split_kv::splits(
            most_len.min(sequences.capacity()),
            sequences.n,
            shape.n_heads,
        );
        states = Some(room.of(sequences.all_rows() * shape.n_heads * n_splits, d)?);
    }
    let params = AttentionParams {
        n_rows: sequences.n_rows as u32,
        n_heads: shape.n_heads as u32,
        n_kv_heads: n_kv_heads as u32,
        head_dim: d as u32,
        q_offset: q.offset as u32,
        q_stride: q.stride as u32,
        q_step: q_step as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        sequences: sequences.header(),
        n_sequences: sequences.n as u32,
        pages: sequences.pages(),
        page_stride: sequences.page_stride as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        window: window(shape),
        n_splits: n_splits as u32,
        split_len: split_len as u32,
        scale: shape.scale,
        softcap: shape.softcap.unwrap_or(0.0),
    };
    let n_pairs = sequences.n_rows * share;
    // Sequences share a dispatch whose rows are as many up to the next power of two: which kernel it is doesn't depend on
    // who is there.
    let enough = sequences.n_rows.next_power_of_two() * share >= COOP_TILE;
    let coop = coop_kernel(recorder.device(), cache).filter(|_| states.is_none() && enough);
    let tile = if coop.is_some() { COOP_TILE } else { TILE };
    let units = n_pairs.div_ceil(tile) * sequences.n * n_kv_heads;
    let limits = recorder.device().limits();
    let most = limits.grid as usize;
    expect_most("attention: heads of queries in a batch", most, units)?;
    let chunks = d.div_ceil(TILE);
    let constants = [
        ("CHUNKS", chunks as f64),
        ("PAGE", PAGE_LEN as f64),
        ("SOFTCAP", f64::from(u8::from(shape.softcap.is_some()))),
        scores.constant(),
        ("CAUSAL", f64::from(u8::from(scores.is_causal))),
        cache.constant(),
    ];
    let bindings = [
        q.buffer.into(),
        (&cache.keys).into(),
        (&cache.values).into(),
        sequences.table.into(),
        scores.sinks.unwrap_or(sequences.table).into(),
        states.unwrap_or(out.buffer).into(),
    ];
    if let Some(kernel) = coop {
        // A scale of int8 may be the largest f16.
        let beyond = (
            "BEYOND_F16",
            f64::from(u8::from(cache.dtype == CacheType::Q8_0)),
        );
        let constants = [&constants[..], &[beyond]].concat();
        return recorder.dispatch(kernel, &constants, &bindings, &params, [units as u32, 1]);
    }
    let kernel = match cache.dtype {
        CacheType::F32 => &shader::ATTENTION_F32,
        CacheType::F16 => &shader::ATTENTION_F16,
        CacheType::Q8_0 => &shader::ATTENTION_Q8_0,
    };
    // Rows of a tile are nine vectors apart. Shared memory also holds a tile of keys and weights.
    let all = chunks * TILE * 9 * 16 + 9216;
    let kept = if all <= limits.workgroup_bytes as usize {
        chunks
    } else {
        1
    };
    let n_pieces = chunks.div_ceil(MAX_CHUNKS);
    let tiles = [
        ("PIECE", chunks.div_ceil(n_pieces) as f64),
        ("SPLIT", f64::from(u8::from(states.is_some()))),
        ("KEPT", kept as f64),
    ];
    let constants = [&constants[..], &tiles].concat();
    let grid = [units as u32, (n_pieces * n_splits) as u32];
    recorder.dispatch(kernel, &constants, &bindings, &params, grid)?;
    let Some(states) = states else {
        return Ok(());
    };
    let params = CombineParams {
        n_rows: params.n_rows,
        n_heads: params.n_heads,
        out_offset: params.out_offset,
        out_stride: params.out_stride,
        sequences: params.sequences,
        window: params.window,
        n_splits: params.n_splits,
        n_new: 0,
        split_len: params.split_len,
    };
    split_kv::combine(recorder, scores, states, sequences, &params, out)
}
