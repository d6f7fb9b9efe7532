//! Attention over a cache of keys and values, and how they get there.

use bytemuck::NoUninit;

use super::Rows;
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{self, Shader};
use crate::{Device, GpuError, Recorder};

/// Number format of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CacheType {
    /// As computed.
    #[default]
    F32,
    /// Half precision.
    F16,
    /// Bytes with a scale, rounded to f16, for every 32 elements of a head. Heads shorter than that are
    /// held as F16.
    Q8_0,
}

/// Positions that are attended to at a time; [`attention`] splits long contexts there.
pub const SPAN: usize = 128;

/// The longest heads there are kernels for.
pub const MAX_HEAD_DIM: usize = 256;

/// Elements that share a scale in [`CacheType::Q8_0`].
const BLOCK: usize = 32;

/// Keys and values of one layer, for so many positions.
///
/// Memory: `[n_kv_heads, capacity]` rows of whole 16 bytes, for keys and for values.
#[derive(Debug, Clone)]
pub struct CacheLayer {
    n_kv_heads: usize,
    head_dim: usize,
    dtype: CacheType,
    capacity: usize,
    keys: Buffer,
    values: Buffer,
}

impl CacheLayer {
    /// Room for `capacity` positions.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] if heads are longer than
    /// [`MAX_HEAD_DIM`], or keys are more than a kernel may see.
    pub fn new(
        device: &Device,
        n_kv_heads: usize,
        head_dim: usize,
        dtype: CacheType,
        capacity: usize,
    ) -> Result<CacheLayer, GpuError> {
        let dtype = match dtype {
            CacheType::Q8_0 if head_dim < BLOCK => CacheType::F16,
            dtype => dtype,
        };
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(GpuError::Unsupported {
                what: format!("heads of {head_dim} elements"),
                reason: format!("kernels take 1 to {MAX_HEAD_DIM}"),
            });
        }
        let rows = n_kv_heads.saturating_mul(capacity);
        let (vectors, scales) = row_shape(dtype, head_dim);
        let bytes = (rows as u64).saturating_mul(vectors as u64 * 16 + scales as u64 * 4);
        let limits = device.limits();
        if bytes > limits.binding_bytes {
            return Err(GpuError::Unsupported {
                what: format!("a cache of {capacity} positions"),
                reason: format!("its {bytes} bytes exceed {}", limits.binding_bytes),
            });
        }
        Ok(CacheLayer {
            n_kv_heads,
            head_dim,
            dtype,
            capacity,
            keys: device.buffer("cached keys", bytes)?,
            values: device.buffer("cached values", bytes)?,
        })
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of device memory it takes.
    pub fn bytes(&self) -> u64 {
        self.keys.bytes() + self.values.bytes()
    }

    /// Copies the first `len` positions to another cache of the same shape, of whatever capacity: to
    /// grow, or to go on in two ways.
    ///
    /// Errors: [`GpuError::Shape`] if they don't fit, or the shapes differ.
    pub fn copy_to(&self, device: &Device, to: &CacheLayer, len: usize) -> Result<(), GpuError> {
        expect("copying a cache: heads", self.n_kv_heads, to.n_kv_heads)?;
        expect(
            "copying a cache: elements of a head",
            self.head_dim,
            to.head_dim,
        )?;
        expect(
            "copying a cache: type",
            self.dtype as usize,
            to.dtype as usize,
        )?;
        expect_most(
            "copying a cache: positions",
            self.capacity.min(to.capacity),
            len,
        )?;
        if len == 0 {
            return Ok(());
        }
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        for head in 0..self.n_kv_heads {
            for (own, other) in [(&self.keys, &to.keys), (&self.values, &to.values)] {
                let row = vectors as u64 * 16;
                let at = |cache: &CacheLayer| (head * cache.capacity) as u64 * row;
                device.copy((own, at(self)), (other, at(to)), len as u64 * row)?;
                if scales > 0 {
                    let row = scales as u64 * 4;
                    let at = |cache: &CacheLayer| {
                        cache.scales_at() as u64 * 4 + (head * cache.capacity) as u64 * row
                    };
                    device.copy((own, at(self)), (other, at(to)), len as u64 * row)?;
                }
            }
        }
        Ok(())
    }

    /// The word at which scales begin.
    fn scales_at(&self) -> usize {
        self.n_kv_heads * self.capacity * row_shape(self.dtype, self.head_dim).0 * 4
    }
}

/// Vectors of 16 bytes of a cached head, and scales.
fn row_shape(dtype: CacheType, head_dim: usize) -> (usize, usize) {
    // Keys are read eight elements at a time.
    match dtype {
        CacheType::F32 => (head_dim.next_multiple_of(8) / 4, 0),
        CacheType::F16 => (head_dim.div_ceil(8), 0),
        CacheType::Q8_0 => (head_dim.div_ceil(16), head_dim.div_ceil(BLOCK)),
    }
}

/// Which elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// `i` with `i + rope_dim / 2`.
    Halves,
    /// `2 i` with `2 i + 1`; they leave as halves.
    Pairs,
}

/// Rotations: cosine and sine of each pair of elements, `[positions, pairs, 2]`.
#[derive(Debug, Clone, Copy)]
pub struct Angles<'a> {
    /// The table.
    pub table: &'a Buffer,
    /// Pairs of elements that are rotated, half of the rotated elements. 0 rotates nothing.
    pub pairs: usize,
    /// Which elements are a pair.
    pub layout: RopeLayout,
}

/// Where the first row of a batch is in its sequence: a `u32` on the device, so that commands can be
/// replayed as the sequence grows.
#[derive(Debug, Clone, Copy)]
pub struct Position<'a> {
    /// Where it is.
    pub buffer: &'a Buffer,
    /// The element.
    pub index: usize,
}

impl Position<'_> {
    pub(super) fn check(&self) -> Result<(), GpuError> {
        let most = (self.buffer.bytes() / 4) as usize;
        expect_most("position: element of its buffer", most, self.index + 1)
    }
}

/// Norms of the heads of queries and keys, `[head_dim]` each.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadNorms<'a> {
    /// Of queries.
    pub q: Option<&'a Buffer>,
    /// Of keys.
    pub k: Option<&'a Buffer>,
    /// What is added to mean squares.
    pub eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct HeadsParams {
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    half: u32,
    offset: u32,
    stride: u32,
    keys: u32,
    values: u32,
    position: u32,
    capacity: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    eps: f32,
}

/// Makes the queries, keys and values of a batch ready: `qkv` are rows of `n_heads` queries, then keys,
/// then values. Queries and keys are normalised where there are norms, and rotated; queries stay where
/// they are, keys and values go to the cache, from the position on. What would go behind its capacity is
/// dropped.
///
/// `angles` are indexed by positions.
///
/// Errors: [`GpuError::Shape`] if shapes don't fit one another.
/// Exactness: rotations within two units in the last place of their products, as devices may fuse them;
/// norms as [`rms_norm`](super::norm::rms_norm). The cache holds what `sterna_kernels` would hold for
/// these, an f16 or a code off by one where the value lay next to a half.
pub fn prepare_heads(
    recorder: &mut Recorder,
    qkv: Rows<'_>,
    n_heads: usize,
    norms: HeadNorms<'_>,
    angles: Angles<'_>,
    position: Position<'_>,
    cache: &CacheLayer,
) -> Result<(), GpuError> {
    qkv.check("heads: queries, keys and values")?;
    position.check()?;
    let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
    expect(
        "heads: width of a row",
        (n_heads + 2 * n_kv_heads) * d,
        qkv.width,
    )?;
    expect_most("heads: rotated pairs", d / 2, angles.pairs)?;
    for norm in [norms.q, norms.k].into_iter().flatten() {
        expect_most("heads: weights of a norm", (norm.bytes() / 4) as usize, d)?;
    }
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let params = HeadsParams {
        n_rows: qkv.n_rows as u32,
        n_heads: n_heads as u32,
        n_kv_heads: n_kv_heads as u32,
        head_dim: d as u32,
        half: angles.pairs as u32,
        offset: qkv.offset as u32,
        stride: qkv.stride as u32,
        keys: (n_heads * d) as u32,
        values: ((n_heads + n_kv_heads) * d) as u32,
        position: position.index as u32,
        capacity: cache.capacity as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        eps: norms.eps,
    };
    let flag = |is: bool| f64::from(u8::from(is));
    let constants = [
        ("WG", 64.0),
        ("CACHE", f64::from(cache.dtype as u8)),
        ("Q_NORM", flag(norms.q.is_some())),
        ("K_NORM", flag(norms.k.is_some())),
        ("PAIRS", flag(angles.layout == RopeLayout::Pairs)),
    ];
    let bindings = [
        qkv.buffer.into(),
        angles.table.into(),
        position.buffer.into(),
        norms.q.unwrap_or(angles.table).into(),
        norms.k.unwrap_or(angles.table).into(),
        (&cache.keys).into(),
        (&cache.values).into(),
    ];
    let most = recorder.device().limits().grid as usize;
    expect_most("heads: rows of a batch", most, qkv.n_rows)?;
    let grid = [(n_heads + 2 * n_kv_heads) as u32, qkv.n_rows as u32];
    recorder.dispatch(&shader::HEADS, &constants, &bindings, &params, grid)
}

/// What the attention of a layer looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads, a multiple of the cache's.
    pub n_heads: usize,
    /// Factor on query-key products.
    pub scale: f32,
    /// Bound on scores, applied as `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// How many positions a query sees, its own counted; all before it if `None`.
    pub window: Option<usize>,
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
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
    n_spans: u32,
    scale: f32,
    softcap: f32,
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct CombineParams {
    n_rows: u32,
    n_heads: u32,
    head_dim: u32,
    out_offset: u32,
    out_stride: u32,
    position: u32,
    window: u32,
    n_spans: u32,
}

/// Memory for contexts that are split: what the heads of some rows come to in each span.
#[derive(Debug, Clone)]
pub struct SpanStates {
    buffer: Buffer,
}

impl SpanStates {
    /// Room for `n_rows` rows of `n_heads` heads, over contexts of up to `most_len` positions.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(
        device: &Device,
        n_rows: usize,
        n_heads: usize,
        head_dim: usize,
        most_len: usize,
    ) -> Result<SpanStates, GpuError> {
        let states = n_rows * n_heads * most_len.div_ceil(SPAN);
        let bytes = (states as u64).saturating_mul((head_dim as u64 + 2) * 4);
        Ok(SpanStates {
            buffer: device.buffer("attention over spans", bytes)?,
        })
    }
}

/// How the work of [`attention`] is cut.
#[derive(Debug, Clone, Copy)]
pub enum Split<'a> {
    /// Each query passes over all positions: for many queries.
    Queries,
    /// Positions are shared out in spans, of contexts up to `most_len` positions with those of this
    /// batch, and put together in a second dispatch: for few queries. Later positions are not seen.
    Spans {
        /// Room for what the spans come to.
        states: &'a SpanStates,
        /// The longest context for which the commands will be run.
        most_len: usize,
    },
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
    out.check("attention: output")?;
    position.check()?;
    let AttentionShape { n_heads, .. } = *shape;
    let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
    expect("attention: width of queries", n_heads * d, q.width)?;
    expect("attention: width of the output", n_heads * d, out.width)?;
    expect("attention: rows of the output", q.n_rows, out.n_rows)?;
    let share = n_heads / n_kv_heads.max(1);
    expect("attention: query heads", share * n_kv_heads, n_heads)?;
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let window = shape
        .window
        .map_or(u32::MAX, |w| w.min(u32::MAX as usize) as u32);
    let n_spans = match split {
        Split::Queries => 1,
        Split::Spans { states, most_len } => {
            let n_spans = most_len.min(cache.capacity).div_ceil(SPAN);
            let need = (q.n_rows * n_heads * n_spans).saturating_mul(d + 2);
            let room = (states.buffer.bytes() / 4) as usize;
            expect_most("attention: states of spans", room, need)?;
            n_spans
        }
    };
    let params = Params {
        n_rows: q.n_rows as u32,
        n_heads: n_heads as u32,
        n_kv_heads: n_kv_heads as u32,
        head_dim: d as u32,
        q_offset: q.offset as u32,
        q_stride: q.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        position: position.index as u32,
        capacity: cache.capacity as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        window,
        n_spans: n_spans as u32,
        scale: shape.scale,
        softcap: shape.softcap.unwrap_or(0.0),
    };
    let kernel: &'static Shader = match cache.dtype {
        CacheType::F32 => &shader::ATTENTION_F32,
        CacheType::F16 => &shader::ATTENTION_F16,
        CacheType::Q8_0 => &shader::ATTENTION_Q8_0,
    };
    let units = (q.n_rows * share).div_ceil(8) * n_kv_heads;
    let grid = recorder.device().limits().grid as usize;
    expect_most("attention: heads of queries in a batch", grid, units)?;
    expect_most("attention: spans of a context", grid, n_spans)?;
    let softcap = ("SOFTCAP", f64::from(u8::from(shape.softcap.is_some())));
    let bindings = |out| {
        [
            q.buffer.into(),
            (&cache.keys).into(),
            (&cache.values).into(),
            position.buffer.into(),
            out,
        ]
    };
    let Split::Spans { states, .. } = split else {
        let grid = [units as u32, u32::from(q.n_rows > 0)];
        let bindings = bindings(out.buffer.into());
        return recorder.dispatch(kernel, &[("SPLIT", 0.0), softcap], &bindings, &params, grid);
    };
    let grid = [units as u32, n_spans as u32];
    let to_states = bindings((&states.buffer).into());
    recorder.dispatch(
        kernel,
        &[("SPLIT", 1.0), softcap],
        &to_states,
        &params,
        grid,
    )?;
    let params = CombineParams {
        n_rows: params.n_rows,
        n_heads: params.n_heads,
        head_dim: params.head_dim,
        out_offset: params.out_offset,
        out_stride: params.out_stride,
        position: params.position,
        window,
        n_spans: params.n_spans,
    };
    let bindings = [
        (&states.buffer).into(),
        position.buffer.into(),
        out.buffer.into(),
    ];
    let grid = [n_heads as u32, q.n_rows as u32];
    recorder.dispatch(&shader::ATTENTION_COMBINE, &[], &bindings, &params, grid)
}
