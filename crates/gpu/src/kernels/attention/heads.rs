//! Preparing heads: normalising queries and keys, rotating them, and caching keys and values.

use sterna_format::model::{CacheType, RopeLayout};

use super::cache::{CacheLayer, PAGE_LEN, row_shape};
use super::query_step;
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, Sequences};
use crate::memory::Buffer;
use crate::shader::{self, params};
use crate::{GpuError, Recorder};

/// Rotary embedding: cosine and sine of each pair of elements, `[rows, pairs, 2]`. Which row a sequence's first is for
/// is in its table ([`SequenceRows::first_angle`](crate::kernels::SequenceRows::first_angle)).
#[derive(Debug, Clone, Copy)]
pub struct Angles<'a> {
    /// The table.
    pub table: &'a Buffer,
    /// Pairs of elements that are rotated, half of the rotated elements. 0 disables rotation.
    pub pairs: usize,
    /// Which elements are a pair.
    pub layout: RopeLayout,
}

impl Angles<'_> {
    /// How many rows the table holds. Kernels clamp to the last.
    pub(super) fn n_rows(&self) -> u32 {
        let row = self.pairs.max(1) as u64 * 8;
        (self.table.bytes() / row).clamp(1, u64::from(u32::MAX)) as u32
    }
}

/// Where the first row of a batch is in its sequence: a `u32` on the device, so that commands can be replayed
/// as the sequence grows.
#[derive(Debug, Clone, Copy)]
pub struct Position<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// The element's index.
    pub index: usize,
}

impl Position<'_> {
    pub(in crate::kernels) fn check(&self) -> Result<(), GpuError> {
        let most = (self.buffer.bytes() / 4) as usize;
        expect_most("position: element of its buffer", most, self.index + 1)
    }
}

/// Norms of query and key heads, `[head_dim]` each, or of all heads of a row together, `[n_heads · head_dim]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadNorms<'a> {
    /// Whether all heads of a row are normalised together, which only [`decode`](super::decode) does.
    pub whole: bool,
    /// Of queries.
    pub q: Option<&'a Buffer>,
    /// Of keys.
    pub k: Option<&'a Buffer>,
    /// Epsilon, added to mean squares.
    pub eps: f32,
}

/// Rows of queries, then keys, then values if the cache has those, as the projections computed them, and how to prepare
/// them.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// The rows of the batch.
    pub qkv: Rows<'a>,
    /// Whether there are keys and values, which go to the cache. Without them it has those of the same positions.
    pub has_keys: bool,
    /// What normalises queries and keys.
    pub norms: HeadNorms<'a>,
    /// Rotation angles.
    pub angles: Angles<'a>,
    /// The sequences whose rows they are.
    pub sequences: Sequences<'a>,
}

/// Invocations of a workgroup that prepares heads.
const WORKGROUP: u32 = 64;

/// Those that share a head in vectors, and the most pairs of vectors that the kernel has room for in each.
const VECTOR_LANES: usize = 8;
const VECTOR_UNITS: usize = 8;

impl Heads<'_> {
    /// Whether heads can be prepared in vectors of four elements; blocks of int8, which have a scale to be found, aren't.
    fn in_vectors(&self, q_step: usize, cache: &CacheLayer) -> bool {
        let d = cache.head_dim;
        self.qkv.in_vectors()
            && q_step.is_multiple_of(4)
            && d.is_multiple_of(8)
            && d <= 8 * VECTOR_LANES * VECTOR_UNITS
            && self.angles.pairs.is_multiple_of(4)
            && cache.dtype != CacheType::Q8_0
    }

    /// Keys, and values of their own, of a row that go to the cache.
    fn n_cached(&self, cache: &CacheLayer) -> usize {
        if self.has_keys { cache.n_vectors() } else { 0 }
    }

    /// Errors unless the rows hold `n_heads` queries, with keys and values for `cache` where there are any.
    /// Returns how far apart queries are.
    pub(super) fn check(&self, n_heads: usize, cache: &CacheLayer) -> Result<usize, GpuError> {
        let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
        self.qkv.check("heads: queries, keys and values")?;
        self.sequences.check(&self.qkv)?;
        let of_keys = self.n_cached(cache) * d;
        expect_most("heads: width of a row", self.qkv.width, of_keys)?;
        let q_step = query_step(self.qkv.width - of_keys, n_heads, d)?;
        expect_most("heads: rotated pairs", d / 2, self.angles.pairs)?;
        let angles = (self.angles.table.bytes() / 8) as usize;
        expect_most("heads: angles of a position", angles, self.angles.pairs)?;
        let HeadNorms { whole, q, k, .. } = self.norms;
        for (norm, n_heads) in [(q, n_heads), (k, n_kv_heads)] {
            if let Some(norm) = norm {
                let n = if whole { n_heads * d } else { d };
                expect_most("heads: weights of a norm", (norm.bytes() / 4) as usize, n)?;
            }
        }
        if whole {
            expect("heads: elements from query to query", d, q_step)?;
        }
        Ok(q_step)
    }

    /// Constants that say which norms there are, and how elements are paired.
    pub(super) fn constants(&self) -> [(&'static str, f64); 3] {
        let kind = |norm: Option<&Buffer>| match norm {
            None => 0.0,
            Some(_) if self.norms.whole => 2.0,
            Some(_) => 1.0,
        };
        let is_paired = self.angles.layout == RopeLayout::Pairs;
        [
            ("Q_NORM", kind(self.norms.q)),
            ("K_NORM", kind(self.norms.k)),
            ("PAIRS", f64::from(u8::from(is_paired))),
        ]
    }
}

params! {
    HeadsParams {
        n_rows: u32,
        n_heads: u32,
        n_kv_heads: u32,
        head_dim: u32,
        half: u32,
        offset: u32,
        stride: u32,
        q_step: u32,
        keys: u32,
        values: u32,
        sequences: u32,
        pages: u32,
        page_stride: u32,
        row_len: u32,
        row_scales: u32,
        scales: u32,
        n_angles: u32,
        eps: f32,
    }
}

/// Prepares queries, keys and values of a batch: `n_heads` queries and the keys are normalised where there
/// are norms, and rotated; queries are updated in place, keys and values go to the pages of each sequence,
/// starting at its position. What they have no room for is dropped. Without keys and values only queries are
/// prepared.
///
/// Errors: [`GpuError::Shape`] if shapes don't fit one another; [`GpuError::Unsupported`] if heads are normalised together.
/// Exactness: rotations within two units in the last place of their products, as devices may fuse them; norms
/// as [`rms_norm`](crate::kernels::norm::rms_norm). The cache holds what `sterna_kernels` would hold for
/// these inputs, an f16 or a code off by one where the value was close to a half.
pub fn prepare_heads(
    recorder: &mut Recorder,
    heads: &Heads<'_>,
    n_heads: usize,
    cache: &CacheLayer,
) -> Result<(), GpuError> {
    if heads.norms.whole {
        return Err(GpuError::Unsupported {
            what: "heads of a row that are normalised together".into(),
            reason: "each is prepared by itself".into(),
        });
    }
    heads.check(n_heads, cache)?;
    for sequences in heads.sequences.runs(recorder, n_heads) {
        let heads = Heads {
            sequences,
            ..*heads
        };
        record(recorder, &heads, n_heads, cache)?;
    }
    Ok(())
}

fn record(
    recorder: &mut Recorder,
    heads: &Heads<'_>,
    n_heads: usize,
    cache: &CacheLayer,
) -> Result<(), GpuError> {
    let q_step = heads.check(n_heads, cache)?;
    let Heads {
        qkv,
        has_keys: _,
        norms,
        angles,
        sequences,
    } = *heads;
    let (d, n_kv_heads) = (cache.head_dim, cache.n_kv_heads);
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let params = HeadsParams {
        n_rows: sequences.n_rows as u32,
        n_heads: n_heads as u32,
        n_kv_heads: n_kv_heads as u32,
        head_dim: d as u32,
        half: angles.pairs as u32,
        offset: qkv.offset as u32,
        stride: qkv.stride as u32,
        q_step: q_step as u32,
        keys: (n_heads * q_step) as u32,
        values: (n_heads * q_step + n_kv_heads * d) as u32,
        sequences: sequences.header(),
        pages: sequences.pages(),
        page_stride: sequences.page_stride as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        n_angles: angles.n_rows(),
        eps: norms.eps,
    };
    let mut constants = vec![
        ("WG", f64::from(WORKGROUP)),
        ("PAGE", PAGE_LEN as f64),
        ("CACHE", f64::from(cache.dtype as u8)),
    ];
    constants.extend(heads.constants());
    let bindings = [
        qkv.buffer.into(),
        angles.table.into(),
        sequences.table.into(),
        norms.q.unwrap_or(angles.table).into(),
        norms.k.unwrap_or(angles.table).into(),
        (&cache.keys).into(),
        (&cache.values).into(),
    ];
    let most = recorder.device().limits().grid as usize;
    expect_most("heads: rows of a batch", most, sequences.all_rows())?;
    let n_prepared = n_heads + heads.n_cached(cache);
    let n_rows = sequences.all_rows() as u32;
    if heads.in_vectors(q_step, cache) {
        constants.extend([
            ("LANES", VECTOR_LANES as f64),
            ("N_PREPARED", n_prepared as f64),
            ("UNITS", d.div_ceil(8 * VECTOR_LANES) as f64),
        ]);
        let heads_at_once = WORKGROUP as usize / VECTOR_LANES;
        let grid = [n_prepared.div_ceil(heads_at_once) as u32, n_rows];
        return recorder.dispatch(
            &shader::HEADS_IN_VECTORS,
            &constants,
            &bindings,
            &params,
            grid,
        );
    }
    let room = d.next_power_of_two().max(256);
    constants.push(("HEAD_LEN", room as f64));
    let grid = [n_prepared as u32, n_rows];
    recorder.dispatch(&shader::HEADS, &constants, &bindings, &params, grid)
}
