//! Attention over a cache of keys and values, and how they get there.

mod cache;
mod heads;
mod spans;

pub use cache::{CacheLayer, MAX_HEAD_DIM};
pub(crate) use heads::HeadsParams;
pub use heads::{Angles, HeadNorms, Heads, Position, prepare_heads};
pub(crate) use spans::{CombineParams, SpansParams};
pub use spans::{SplitKv, SplitKvStates, decode};
pub use sterna_format::model::{AttentionShape, CacheType, RopeLayout};

use super::Rows;
use crate::error::{expect, expect_most};
use crate::shader::{self, Shader, params};
use crate::{GpuError, Recorder};
use cache::row_shape;

/// The window as kernels take it.
fn window(shape: &AttentionShape) -> u32 {
    let window = shape.window.and_then(|w| u32::try_from(w).ok());
    window.unwrap_or(u32::MAX)
}

/// Query heads for each of the cache's. Errors unless `shape` is that of the cache, they are a whole
/// number, and `out` are rows of such heads.
fn share(shape: &AttentionShape, cache: &CacheLayer, out: &Rows<'_>) -> Result<usize, GpuError> {
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
    )?;
    Ok(share)
}

/// Pairs of a query and a head, positions, and elements of a head, that `attention.wgsl` takes at a time.
const TILE: usize = 32;

params! {
    AttentionParams {
        n_rows: u32,
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
        q_offset: u32,
        q_stride: u32,
        out_offset: u32,
        out_stride: u32,
        position: u32,
        capacity: u32,
        row_len: u32,
        row_scales: u32,
        scales: u32,
        window: u32,
        scale: f32,
        softcap: f32,
    }
}

/// How the work of [`attention`] is cut.
#[derive(Debug, Clone, Copy)]
pub enum Split<'a> {
    /// Each query passes over all positions: for many queries.
    Queries,
    /// Positions are shared out in spans, and put together in a second dispatch: for few queries.
    Kv(SplitKv<'a>),
}

/// `out[t, h] ← Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h']` over the positions `j` that query `t`
/// sees: up to its own, and no further back than the window. Keys and values are in the cache already.
///
/// Shapes: `q` and `out` are rows of `[n_heads, head_dim]` in different buffers.
/// Errors: [`GpuError::Shape`] if shapes don't fit one another, or the states have too little room.
/// Exactness: against `sterna_kernels::attention`, see `docs/gpu.md`.
pub fn attention(
    recorder: &mut Recorder,
    shape: &AttentionShape,
    q: Rows<'_>,
    position: Position<'_>,
    cache: &CacheLayer,
    split: Split<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    q.check("attention: queries")?;
    position.check()?;
    let share = share(shape, cache, &out)?;
    let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
    expect("attention: width of queries", out.width, q.width)?;
    expect("attention: rows of the output", q.n_rows, out.n_rows)?;
    if let Split::Kv(spans) = split {
        return spans::attention(recorder, shape, q, position, cache, spans, out);
    }
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let params = AttentionParams {
        n_rows: q.n_rows as u32,
        n_heads: shape.n_heads as u32,
        n_kv_heads: n_kv_heads as u32,
        head_dim: d as u32,
        q_offset: q.offset as u32,
        q_stride: q.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        position: position.index as u32,
        capacity: cache.capacity() as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        window: window(shape),
        scale: shape.scale,
        softcap: shape.softcap.unwrap_or(0.0),
    };
    let kernel: &'static Shader = match cache.dtype {
        CacheType::F32 => &shader::ATTENTION_F32,
        CacheType::F16 => &shader::ATTENTION_F16,
        CacheType::Q8_0 => &shader::ATTENTION_Q8_0,
    };
    let units = (q.n_rows * share).div_ceil(TILE) * n_kv_heads;
    let limits = recorder.device().limits();
    let most = limits.grid as usize;
    expect_most("attention: heads of queries in a batch", most, units)?;
    let chunks = d.div_ceil(TILE);
    // Rows of a tile are nine vectors apart. A tile of keys and weights are in shared memory beside.
    let all = chunks * TILE * 9 * 16 + 9216;
    let kept = if all <= limits.workgroup_bytes as usize {
        chunks
    } else {
        1
    };
    let constants = [
        ("CHUNKS", chunks as f64),
        ("KEPT", kept as f64),
        ("SOFTCAP", f64::from(u8::from(shape.softcap.is_some()))),
    ];
    let bindings = [
        q.buffer.into(),
        (&cache.keys).into(),
        (&cache.values).into(),
        position.buffer.into(),
        out.buffer.into(),
    ];
    let grid = [units as u32, u32::from(q.n_rows > 0)];
    recorder.dispatch(kernel, &constants, &bindings, &params, grid)
}
