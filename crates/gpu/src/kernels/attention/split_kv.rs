//! Split-KV attention (flash-decoding) for few rows: positions are divided among workgroups, so that the
//! device is fully occupied.

use super::cache::{CacheLayer, PAGE_LEN, row_shape};
use super::heads::Heads;
use super::{AttentionShape, CacheType, Scores, check_heads, query_step, window};
use crate::error::{expect, expect_most};
use crate::kernels::quantize::{Parts, QuantizedRows};
use crate::kernels::{Rows, Sequences};
use crate::memory::Buffer;
use crate::shader::{self, Shader, params};
use crate::{Device, GpuError, Limits, Recorder};

/// Maximum number of splits of a context: what `attention_combine.wgsl` has room for.
const MAX_SPLITS: usize = 64;

/// The least that there may be, if the context is long enough.
const MIN_SPLITS: usize = 8;

/// Splits of all heads of several sequences that occupy any device: more only cost something.
const SPLITS_OF_MANY: usize = 8192;

/// From so many heads of keys of all sequences on, contexts of up to so many positions aren't split: of so many for each of
/// these heads, of fewer at any rate, of more in no case. Wider heads are in workgroups of their own, which all read the
/// same keys. Found on an H100, with contexts of 16 to 1,900.
const MIN_ALONE: usize = 16;
const ALONE_LEN: usize = 13;
const MIN_ALONE_LEN: usize = 512;
const MAX_ALONE_LEN: usize = 2048;
const MAX_ALONE_DIM: usize = 128;

/// Positions that a segment of invocations processes at a time.
const AT_ONCE: usize = 4;

/// Segments that share the positions of a split.
const SEGMENTS: usize = 8;

/// Elements of the largest heads: their invocations have registers for four runs each.
const MAX_HEAD_DIM: usize = 256;

/// Whether there are kernels of split-KV attention for heads of `head_dim` elements, and [`decode`]. Wider ones are split
/// by the kernel for many rows.
pub(crate) fn decodes(head_dim: usize) -> bool {
    head_dim <= MAX_HEAD_DIM
}

/// Maximum workgroup size, so that each invocation has registers enough; and from [`MANY`] workgroups on, if lanes permit.
const MAX_WORKGROUP: usize = 256;
const MAX_WORKGROUP_OF_MANY: usize = 128;

/// Workgroups, if each had all pairs that share keys, that occupy a large device; and from which on, where contexts are split,
/// invocations have two of these pairs, which take less to compute than one after the other. Found on an H200.
const MANY: usize = 160;
const ENOUGH_TO_SHARE: usize = 256;

/// Memory for split contexts: the partial results of each row and head in each split.
#[derive(Debug, Clone)]
pub struct SplitKvStates {
    buffer: Buffer,
}

impl SplitKvStates {
    /// Room for `len` values.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, len: usize) -> Result<SplitKvStates, GpuError> {
        let bytes = (len as u64).saturating_mul(4);
        Ok(SplitKvStates {
            buffer: device.buffer("split-KV attention", bytes)?,
        })
    }

    /// Values for `n_sequences` of up to `n_rows` rows, of `n_heads` heads of `head_dim` elements, over contexts of up to
    /// `most_len` positions.
    pub fn len(
        (n_sequences, n_rows): (usize, usize),
        (n_heads, head_dim): (usize, usize),
        most_len: usize,
    ) -> usize {
        // Longer contexts use longer splits, not more than this: the maximum for any context up to this
        // length, and one for a new position.
        let n_splits = most_len.div_ceil(AT_ONCE * SEGMENTS);
        let n_splits = n_splits.clamp(1, most_splits(n_sequences, n_heads)) + 1;
        let states = n_sequences.saturating_mul(n_rows).saturating_mul(n_heads);
        states.saturating_mul(n_splits).saturating_mul(head_dim + 2)
    }

    /// The memory, if it has room for `n_states` partial results of heads of `head_dim` elements.
    pub(super) fn of(&self, n_states: usize, head_dim: usize) -> Result<&Buffer, GpuError> {
        let room = (self.buffer.bytes() / 4) as usize;
        let need = n_states.saturating_mul(head_dim + 2);
        expect_most("attention: split-KV states", room, need)?;
        Ok(&self.buffer)
    }
}

/// How to split a context.
#[derive(Debug, Clone, Copy)]
pub struct SplitKv<'a> {
    /// Room for partial results.
    pub states: &'a SplitKvStates,
    /// The longest context, including the rows in question, for which the commands will be run. Cached
    /// positions beyond it may be ignored.
    pub most_len: usize,
}

/// How the work is divided.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Invocations per position, each processing runs of eight elements.
    lanes: usize,
    /// Runs per lane.
    units: usize,
    /// Pairs of a row and a head that share keys, per workgroup; a multiple of the next.
    heads: usize,
    /// Such pairs per invocation.
    shared: usize,
    /// Workgroups that cover all pairs, for one key-value head and one split.
    n_groups: usize,
    split_len: usize,
    n_splits: usize,
    /// Whether the workgroups of the only split have all that there is, also of the new position, and store results.
    alone: bool,
}

impl Plan {
    /// For `n_pairs` that share keys, if a workgroup for all of these would be one of `n_busy`, of all heads of keys, sequences
    /// and splits.
    fn of(
        limits: &Limits,
        head_dim: usize,
        (n_pairs, n_busy): (usize, usize),
        (split_len, n_splits): (usize, usize),
        alone: bool,
    ) -> Plan {
        let runs = head_dim.div_ceil(8).max(1);
        // Reductions through shared memory take more barriers with more lanes.
        let most_lanes = (limits.min_subgroup as usize).clamp(8, 32);
        let lanes = runs.next_power_of_two().min(most_lanes);
        let units = runs.div_ceil(lanes);
        let workgroup = match n_busy {
            ..MANY => MAX_WORKGROUP,
            _ => MAX_WORKGROUP_OF_MANY,
        };
        let teams = (limits.workgroup_len as usize).min(workgroup) / (SEGMENTS * lanes);
        // Per head: its query and sums; what reductions exchange, at most 12 bytes per invocation; a state
        // per segment; the inverse root of a query. Those of a key and a value, and their blocks' scales, are
        // needed once.
        let sums = (1 + SEGMENTS) * head_len(units, lanes) * 16;
        let bytes = sums + 12 * SEGMENTS * lanes + 8 * SEGMENTS + 4;
        let others = 2 * 4 + 16 * 4 + 2 * head_len(units, lanes) * 16;
        let room = (limits.workgroup_bytes as usize).saturating_sub(others) / bytes;
        let can_share = n_pairs > 1 && room > 1 && lanes >= 8 && units <= 2;
        let shared = match can_share && !alone && n_busy >= ENOUGH_TO_SHARE {
            true => 2,
            false => 1,
        };
        let most = (teams.max(1) * shared).min(room).max(1) / shared * shared;
        let n_groups = n_pairs.div_ceil(most).max(1);
        let heads = n_pairs
            .div_ceil(n_groups)
            .next_multiple_of(shared)
            .max(shared);
        Plan {
            lanes,
            units,
            heads,
            shared,
            n_groups: n_pairs.div_ceil(heads),
            split_len,
            n_splits,
            alone,
        }
    }

    fn constants(&self, cache: &CacheLayer, softcap: bool) -> [(&'static str, f64); 15] {
        let &Plan {
            lanes,
            units,
            heads,
            shared,
            n_groups,
            alone,
            ..
        } = self;
        let new = if alone { cache.cached.per_head() } else { 0 };
        let slots = heads * (1 + SEGMENTS) + new;
        [
            ("WG", (heads / shared * SEGMENTS * lanes) as f64),
            ("LANES", lanes as f64),
            ("SEGMENTS", SEGMENTS as f64),
            ("UNITS", units as f64),
            ("HEADS", heads as f64),
            ("SHARED", shared as f64),
            ("SLOTS", (heads + cache.cached.per_head()) as f64),
            ("GROUPS", n_groups as f64),
            ("STATES", (heads * SEGMENTS) as f64),
            ("ROOM", (slots * head_len(units, lanes)) as f64),
            ("ALONE", f64::from(u8::from(alone))),
            ("PAGE", PAGE_LEN as f64),
            ("CACHE", f64::from(cache.dtype as u8)),
            cache.constant(),
            ("SOFTCAP", f64::from(u8::from(softcap))),
        ]
    }
}

/// Maximum number of splits of each of `n_sequences` with `n_heads` query heads.
fn most_splits(n_sequences: usize, n_heads: usize) -> usize {
    match n_sequences {
        0 | 1 => MAX_SPLITS,
        n => (SPLITS_OF_MANY / (n * n_heads.max(1))).clamp(MIN_SPLITS, MAX_SPLITS),
    }
}

/// The length and number of the splits of contexts of up to `most_len` positions, of each of `n_sequences`.
pub(super) fn splits(most_len: usize, n_sequences: usize, n_heads: usize) -> (usize, usize) {
    let mut split_len = AT_ONCE * SEGMENTS;
    while most_len.div_ceil(split_len) > most_splits(n_sequences, n_heads) {
        split_len *= 2;
    }
    (split_len, most_len.div_ceil(split_len).max(1))
}

/// Whether contexts of up to `most_len` positions aren't split: that saves a dispatch, and pays where there are many
/// heads of keys in all sequences together, which aren't wide, and contexts are short.
fn is_alone(most_len: usize, n_kv_heads: usize, head_dim: usize) -> bool {
    let most = (ALONE_LEN * n_kv_heads).clamp(MIN_ALONE_LEN, MAX_ALONE_LEN);
    head_dim <= MAX_ALONE_DIM && n_kv_heads >= MIN_ALONE && most_len <= most
}

/// Vectors of a head in shared memory.
fn head_len(units: usize, lanes: usize) -> usize {
    2 * units * lanes
}

params! {
    SplitKvParams {
        n_rows: u32,
        n_kv_heads: u32,
        offset: u32,
        stride: u32,
        q_step: u32,
        key_column: u32,
        value_column: u32,
        half: u32,
        sequences: u32,
        pages: u32,
        page_stride: u32,
        row_len: u32,
        row_scales: u32,
        scales: u32,
        window: u32,
        n_splits: u32,
        split_len: u32,
        n_angles: u32,
        eps: f32,
        scale: f32,
        softcap: f32,
        out_offset: u32,
        out_stride: u32,
        begin: u32,
        part_len: u32,
    }
}

params! {
    CombineParams {
        n_rows: u32,
        n_heads: u32,
        out_offset: u32,
        out_stride: u32,
        sequences: u32,
        window: u32,
        n_splits: u32,
        n_new: u32,
        split_len: u32,
    }
}

/// [`prepare_heads`](super::prepare_heads) and [`attention`](super::attention) for one new position of each
/// sequence, in two dispatches instead of three, or one: each workgroup prepares the queries that it needs, and those
/// of the new position store key and value in the cache, if there are any. The queries in `heads.qkv` are left
/// unchanged.
///
/// Shapes: `heads.qkv` and `out` are rows of the same batch, in different buffers.
/// Errors: [`GpuError::Shape`] if shapes don't match, or the states are too small; [`GpuError::Unsupported`] if attention
/// isn't causal.
/// Exactness: as those two, with sums in a different order.
pub fn decode<'a>(
    recorder: &mut Recorder,
    scores: impl Into<Scores<'a>>,
    heads: &Heads<'_>,
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    record_decode(recorder, scores.into(), (heads, None), cache, split_kv, out)
}

/// The sums of the parts of a product by trits, and the quantized rows that were multiplied, whose scratch memory has them.
type Sums<'a> = (&'a Parts, &'a QuantizedRows);

/// [`decode`] of rows that are computed in parts, which are added up as they are read, and not stored.
pub(crate) fn decode_sums(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    heads: &Heads<'_>,
    sums: Sums<'_>,
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let rows = (heads, Some(sums));
    record_decode(recorder, scores, rows, cache, split_kv, out)
}

/// Whether [`decode_sums`] can, and should: heads without norms, where contexts aren't split among workgroups that would all add
/// up the same.
pub(crate) fn can_add(
    shape: &AttentionShape,
    heads: &Heads<'_>,
    cache: &CacheLayer,
    most_len: usize,
) -> bool {
    let Sequences { n, .. } = heads.sequences;
    let most_len = most_len.min(heads.sequences.capacity());
    heads.has_keys
        && (heads.norms.q, heads.norms.k) == (None, None)
        && is_alone(most_len, n * shape.n_kv_heads, cache.head_dim)
}

fn record_decode(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    (heads, sums): (&Heads<'_>, Option<Sums<'_>>),
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let shape = scores.shape;
    scores.check()?;
    check_heads(shape, cache, &out)?;
    expect_most(
        "attention of one position: elements of a head",
        MAX_HEAD_DIM,
        cache.head_dim,
    )?;
    expect("attention: rows of one position", 1, heads.sequences.n_rows)?;
    expect(
        "attention: rows of the output",
        heads.qkv.n_rows,
        out.n_rows,
    )?;
    let rows = Source {
        rows: heads.qkv,
        sequences: heads.sequences,
        prepare: Some(heads),
        sums,
    };
    record(recorder, scores, rows, cache, split_kv, out)
}

/// Attention of prepared rows. The caller has checked shapes.
pub(super) fn attention(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    q: Rows<'_>,
    sequences: Sequences<'_>,
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let rows = Source {
        rows: q,
        sequences,
        prepare: None,
        sums: None,
    };
    record(recorder, scores, rows, cache, split_kv, out)
}

/// The queries.
#[derive(Clone, Copy)]
struct Source<'a> {
    rows: Rows<'a>,
    sequences: Sequences<'a>,
    /// How to prepare them first.
    prepare: Option<&'a Heads<'a>>,
    /// What they are the sums of.
    sums: Option<Sums<'a>>,
}

fn record(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    source: Source<'_>,
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    for sequences in source.sequences.runs(recorder, scores.shape.n_heads) {
        let run = Source {
            sequences,
            ..source
        };
        record_run(recorder, scores, run, cache, split_kv, out)?;
    }
    Ok(())
}

fn record_run(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    source: Source<'_>,
    cache: &CacheLayer,
    split_kv: SplitKv<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Source {
        rows,
        sequences,
        prepare,
        sums,
    } = source;
    if !scores.is_causal {
        return Err(GpuError::Unsupported {
            what: "split-KV attention to positions of later queries".into(),
            reason: "its kernels are for causal attention".into(),
        });
    }
    let shape = scores.shape;
    let (d, n_heads, n_kv_heads) = (cache.head_dim, shape.n_heads, cache.n_kv_heads);
    let q_step = match prepare {
        Some(heads) => heads.check(n_heads, cache)?,
        None => query_step(rows.width, n_heads, d)?,
    };
    let n_pairs = sequences.n_rows * n_heads / n_kv_heads.max(1);
    let limits = recorder.device().limits();
    let most_len = split_kv.most_len.min(sequences.capacity());
    let alone = scores.sinks.is_none() && is_alone(most_len, sequences.n * n_kv_heads, d);
    let splits = match alone {
        true => (most_len.max(1), 1),
        false => splits(most_len, sequences.n, n_heads),
    };
    // Splits before a window have nothing to do.
    let in_window = (window(shape) as usize).div_ceil(splits.0) + 1;
    let n_busy = sequences.n * n_kv_heads * splits.1.min(in_window);
    let plan = Plan::of(limits, d, (n_pairs, n_busy), splits, alone);
    let n_new = usize::from(prepare.is_some_and(|heads| heads.has_keys));
    let n_states = plan.n_splits + n_new;
    let states = (split_kv.states).of(sequences.all_rows() * n_heads * n_states, d)?;
    let states = if alone { out.buffer } else { states };
    let groups = n_kv_heads * plan.n_groups * sequences.n;
    let most = limits.grid as usize;
    expect_most("attention: heads of queries in a batch", most, groups)?;
    let (row_len, row_scales) = row_shape(cache.dtype, d);
    let mut params = SplitKvParams {
        n_rows: sequences.n_rows as u32,
        n_kv_heads: n_kv_heads as u32,
        offset: rows.offset as u32,
        stride: rows.stride as u32,
        q_step: q_step as u32,
        key_column: (n_heads * q_step) as u32,
        value_column: (n_heads * q_step + n_kv_heads * d) as u32,
        half: prepare.map_or(0, |heads| heads.angles.pairs as u32),
        sequences: sequences.header(),
        pages: sequences.pages(),
        page_stride: sequences.page_stride as u32,
        row_len: row_len as u32,
        row_scales: row_scales as u32,
        scales: cache.scales_at() as u32,
        window: window(shape),
        n_splits: plan.n_splits as u32,
        split_len: plan.split_len as u32,
        n_angles: prepare.map_or(1, |heads| heads.angles.n_rows()),
        eps: prepare.map_or(0.0, |heads| heads.norms.eps),
        scale: shape.scale,
        softcap: shape.softcap.unwrap_or(0.0),
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        begin: 0,
        part_len: 0,
    };
    let kernel: &'static Shader = match (cache.dtype, sums.is_some()) {
        (CacheType::F32, false) => &shader::ATTENTION_SPLIT_KV_F32,
        (CacheType::F16, false) => &shader::ATTENTION_SPLIT_KV_F16,
        (CacheType::Q8_0, false) => &shader::ATTENTION_SPLIT_KV_Q8_0,
        (CacheType::F32, true) => &shader::ATTENTION_OF_SUMS_F32,
        (CacheType::F16, true) => &shader::ATTENTION_OF_SUMS_F16,
        (CacheType::Q8_0, true) => &shader::ATTENTION_OF_SUMS_Q8_0,
    };
    let mut constants = plan.constants(cache, shape.softcap.is_some()).to_vec();
    constants.extend([
        ("KV_HEADS", n_kv_heads as f64),
        ("SHARE", (n_heads / n_kv_heads.max(1)) as f64),
        ("HEAD_DIM", d as f64),
    ]);
    // Unused bindings get a buffer that is read anyway.
    let (mut table, mut norms) = (sequences.table, [None; 2]);
    if let Some(heads) = prepare {
        constants.extend([("PREPARE", 1.0), ("NEW", n_new as f64)]);
        constants.extend(heads.constants());
        (table, norms) = (heads.angles.table, [heads.norms.q, heads.norms.k]);
    }
    let [q_norm, k_norm] = norms.map(|norm| norm.unwrap_or(table));
    let mut bindings = [
        rows.buffer.into(),
        table.into(),
        sequences.table.into(),
        q_norm.into(),
        k_norm.into(),
        (&cache.keys).into(),
        (&cache.values).into(),
        states.into(),
    ];
    if let Some((parts, x)) = sums
        && let Some((scales, begin)) = &parts.scales
    {
        (bindings[0], bindings[3], bindings[4]) =
            ((&x.scratch).into(), scales.into(), (&x.steps).into());
        constants.push(("ADDED", parts.n as f64));
        (params.offset, params.stride) = (0, rows.width as u32);
        params.begin = *begin as u32;
        params.part_len = (rows.n_rows * rows.width) as u32;
    }
    let grid = [
        if sequences.n_rows == 0 {
            0
        } else {
            groups as u32
        },
        (plan.n_splits + if alone { 0 } else { n_new }) as u32,
    ];
    recorder.dispatch(kernel, &constants, &bindings, &params, grid)?;
    if alone {
        return Ok(());
    }
    let params = CombineParams {
        n_rows: params.n_rows,
        n_heads: n_heads as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        sequences: params.sequences,
        window: params.window,
        n_splits: params.n_splits,
        n_new: n_new as u32,
        split_len: params.split_len,
    };
    combine(recorder, scores, states, sequences, &params, out)
}

/// Combines the partial results of splits.
pub(super) fn combine(
    recorder: &mut Recorder,
    scores: Scores<'_>,
    states: &Buffer,
    sequences: Sequences<'_>,
    params: &CombineParams,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let pieces = scores.shape.n_heads * scores.shape.head_dim.div_ceil(32);
    let most = recorder.device().limits().grid as usize;
    expect_most("attention: pieces of heads", most, pieces)?;
    let bindings = [
        states.into(),
        sequences.table.into(),
        scores.sinks.unwrap_or(sequences.table).into(),
        out.buffer.into(),
    ];
    let grid = [pieces as u32, sequences.all_rows() as u32];
    expect_most("attention: rows of a batch", most, sequences.all_rows())?;
    // At most nine pipelines as a context grows, and few: numbers of splits are mostly powers of two.
    let turns = (params.n_splits + params.n_new).div_ceil(8);
    let constants = [
        scores.constant(),
        ("HEAD_DIM", scores.shape.head_dim as f64),
        ("TURNS", f64::from(turns)),
    ];
    recorder.dispatch(
        &shader::ATTENTION_COMBINE,
        &constants,
        &bindings,
        params,
        grid,
    )
}
