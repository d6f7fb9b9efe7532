//! Keys and values on the device, and states.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_gpu::graph::{
    Graph, PenaltyOp, RopeTable, SampleOp, SequencesRef, Shared, SharedGraph, StateRef, View,
};
use sterna_gpu::kernels::attention::{CacheLayer, PAGE_LEN};
use sterna_gpu::kernels::output::STATE_LEN;
use sterna_gpu::kernels::{SequenceRows, sequence_table};
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::{Device, GpuError};

use super::MAX_SPLIT_KV_ROWS;
use super::buffer::room;
use super::decode::{
    self, MOST_STEPS, Masks, ReadSamples, Run, SEED_AT, SampleKind, SampleScratch, most_of,
    seed_words,
};
use super::numbers::Number;
use super::pages::{Moves, PagePool, PagePools};
use super::states::States;
use crate::backend::{
    BackendError, CacheShape, CachedValues, Continued, KvCache, KvHeads, LayerContents, Rotation,
    Sequence, SnapshotError, SnapshotSink, SnapshotSource, share, take_form, take_saved,
};
use crate::sampling::Sampling;

/// Keys and values of one sequence, and its states.
///
/// Pages of keys and values are in memory that it shares with other sequences. Forks share pages, too; one is copied
/// when one of its owners writes to it.
#[derive(Debug)]
pub struct GpuCache {
    graph: SharedGraph,
    shape: CacheShape,
    len: usize,
    pools: PagePools,
    pool: Arc<PagePool>,
    pages: Vec<Arc<Number>>,
    states: States,
    /// Set for whoever repeats steps ahead once others share the memory that they write to.
    is_forked: Arc<AtomicBool>,
    /// Of batches whose first sequence this is.
    batch: BatchTable,
    /// For sampling tokens.
    sampling: SampleScratch,
}

/// What kernels read about the sequences of a step, and the rotations of its rows.
#[derive(Debug, Default)]
struct BatchTable {
    buffer: Option<Buffer>,
    /// Its words, as far as they are known.
    words: Vec<Option<u32>>,
    /// How often it was filled: each time for other rows of logits.
    version: Arc<AtomicU64>,
    /// The step that it is for, and length, rows and rotations of each sequence then.
    step: (u64, Vec<(usize, usize, usize)>),
    parts: Vec<Part>,
    ropes: Vec<Rope>,
    /// The position before the first of each sequence, as mixes of positions read it, and of which layer and part of its
    /// state it was taken last in the step.
    previous: (Option<Buffer>, Option<(usize, usize)>),
}

/// Sequences that kernels take together.
#[derive(Debug, Clone)]
struct Part {
    /// One of them.
    member: usize,
    sequences: SequencesRef,
    most_len: usize,
}

/// The same for a layer with keys and values.
pub(super) struct Group {
    /// Where these are.
    pub(super) memory: Shared<CacheLayer>,
    pub(super) sequences: SequencesRef,
    /// The longest context that commands are for.
    pub(super) most_len: usize,
}

/// Rotations of one rotary embedding.
#[derive(Debug)]
struct Rope {
    index: usize,
    buffer: Option<Buffer>,
    /// Whether those of the step are filled in.
    is_filled: bool,
}

/// How keys and values are saved: as pages are on the device, or those that have keys alone.
fn form(heads: KvHeads) -> &'static [u8; 4] {
    match heads.values {
        CachedValues::Own => b"gpag",
        CachedValues::Keys => b"gkey",
    }
}

/// The shortest context length that commands are recorded for.
const MIN_LEN: usize = 256;

/// The longest context that commands for `len` positions are recorded for.
pub(super) fn most_len(len: usize) -> usize {
    // In powers of two, so that commands can be replayed for as many steps.
    len.next_power_of_two().max(MIN_LEN)
}

/// Places for the pages of a sequence in a table for contexts of `most_len`.
fn page_stride(most_len: usize) -> usize {
    most_len.div_ceil(PAGE_LEN)
}

impl BatchTable {
    /// Memory for `n` sequences in contexts of up to `most_len`. What is known of it is lost if there has to be more.
    fn room(&mut self, device: &Device, n: usize, most_len: usize) -> Result<Buffer, GpuError> {
        let len = (n * SequencesRef::words(page_stride(most_len))).next_power_of_two();
        let buffer = room(device, &mut self.buffer, len)?;
        if self.words.len() < len {
            self.words = vec![None; len];
        }
        Ok(buffer)
    }

    /// Writes what differs from what is there.
    fn write(&mut self, device: &Device, buffer: &Buffer, words: &[u32]) -> Result<(), GpuError> {
        let mut at = 0;
        while let Some(first) = (at..words.len()).find(|&i| self.words[i] != Some(words[i])) {
            // Runs with little in between are written at once.
            let (mut end, mut i) = (first + 1, first + 1);
            while i < words.len() && i - end < NEAR {
                if self.words[i] != Some(words[i]) {
                    end = i + 1;
                }
                i += 1;
            }
            device.write(buffer, first as u64 * 4, &words[first..end])?;
            for (known, word) in self.words[first..end].iter_mut().zip(&words[first..end]) {
                *known = Some(*word);
            }
            at = end;
        }
        Ok(())
    }

    /// Writes token and seed of each sequence, the only things that sampling reads besides, to `buffer`, and forgets what
    /// sampling changes.
    fn choose(
        &mut self,
        device: &Device,
        buffer: &Buffer,
        chosen: &[(u32, u64)],
    ) -> Result<(), GpuError> {
        let known = &self.words[..chosen.len() * STATE_LEN];
        let mut words: Vec<u32> = known.iter().map(|word| word.unwrap_or(0)).collect();
        for (state, (last, seed)) in words.chunks_exact_mut(STATE_LEN).zip(chosen) {
            state[1] = *last;
            state[SEED_AT..].copy_from_slice(&seed_words(*seed));
        }
        self.write(device, buffer, &words)?;
        for state in self.words.chunks_exact_mut(STATE_LEN).take(chosen.len()) {
            state[..2].fill(None);
            state[SEED_AT..].fill(None);
        }
        Ok(())
    }

    /// Writes a table for `sequences`, each with its rows and rotations, with a part for those that kernels take together.
    fn fill(
        &mut self,
        device: &Device,
        sequences: &[(&GpuCache, usize, usize)],
    ) -> Result<(), GpuError> {
        self.version.fetch_add(1, Ordering::Relaxed);
        let most_len = |of: &(&GpuCache, usize, usize)| most_len(of.0.len + of.1);
        let longest = sequences.iter().map(most_len).max().unwrap_or(MIN_LEN);
        let page_stride = page_stride(longest);
        // Those in one pool with one row, few rows, or about as many.
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for (i, &(cache, n_rows, _)) in sequences.iter().enumerate() {
            let class = match n_rows {
                2..=MAX_SPLIT_KV_ROWS => MAX_SPLIT_KV_ROWS,
                _ => n_rows.next_power_of_two(),
            };
            let fits = |(other, members): &&mut (usize, Vec<usize>)| {
                let is_same_pool = Arc::ptr_eq(&sequences[members[0]].0.pool, &cache.pool);
                *other == class && is_same_pool
            };
            match groups.iter_mut().find(fits) {
                Some((_, members)) => members.push(i),
                None => groups.push((class, vec![i])),
            }
        }
        // The first row and rotation of each.
        let mut firsts = Vec::with_capacity(sequences.len());
        let (mut row, mut angle) = (0, 0);
        for &(_, n_rows, n_angles) in sequences {
            firsts.push((row, angle));
            row += n_rows;
            angle += n_angles;
        }
        let members = groups.iter().flat_map(|(_, members)| members);
        let pages: Vec<Vec<u32>> = sequences.iter().map(|of| of.0.page_numbers()).collect();
        let rows: Vec<SequenceRows<'_>> = members
            .map(|&i| SequenceRows {
                position: sequences[i].0.len,
                first_row: firsts[i].0,
                n_rows: sequences[i].1,
                first_angle: firsts[i].1,
                pages: &pages[i],
                place: sequences[i].0.states.place().unwrap_or(0),
            })
            .collect();
        let table = self.room(device, sequences.len(), longest)?;
        self.write(device, &table, &sequence_table(&rows, page_stride))?;
        self.parts.clear();
        let mut first = 0;
        for (_, members) in groups {
            let of = |i: &usize| &sequences[*i];
            self.parts.push(Part {
                member: members[0],
                sequences: SequencesRef {
                    table: table.clone(),
                    n_all: sequences.len(),
                    page_stride,
                    first,
                    n: members.len(),
                    n_rows: members.iter().map(|i| of(i).1).max().unwrap_or(0),
                },
                most_len: members
                    .iter()
                    .map(|i| most_len(of(i)))
                    .max()
                    .unwrap_or(MIN_LEN),
            });
            first += members.len();
        }
        Ok(())
    }
}

/// Words between others that are written together with them.
const NEAR: usize = 64;

/// The sequences of a step, by what kernels take together, and where they have the keys and values of `layer`: room for
/// those of the step, in memory that no other sequence has.
pub(super) fn groups(
    device: &Device,
    graph: &mut Graph,
    sequences: &mut [Sequence<'_, GpuCache>],
    layer: usize,
) -> Result<Vec<Group>, GpuError> {
    let mut has_changed = false;
    for Sequence { cache, n_rows, .. } in &mut *sequences {
        has_changed |= cache.reserve(device, graph, *n_rows)?;
    }
    let parts = tabulate(device, graph, sequences, has_changed)?;
    let groups = parts.into_iter().map(|part| {
        Ok(Group {
            memory: sequences[part.member].cache.pool.layer(device, layer)?,
            sequences: part.sequences,
            most_len: part.most_len,
        })
    });
    groups.collect()
}

/// The sequences of a step, by what kernels take together, and where they have the states of `layer`, `n` values each, at
/// their ends, in memory that no other sequence has.
pub(super) fn states(
    device: &Device,
    graph: &mut Graph,
    sequences: &mut [Sequence<'_, GpuCache>],
    (layer, n): (usize, usize),
) -> Result<Vec<StateRef>, GpuError> {
    if let Some(first) = sequences.first() {
        let n_new = sequences.iter().filter(|of| of.cache.states.needs_place());
        let places = &first.cache.pool.places;
        places.reserve(device, graph, n_new.count(), n)?;
    }
    let mut has_changed = false;
    for Sequence { cache, n_rows, .. } in &mut *sequences {
        has_changed |= cache.reserve(device, graph, *n_rows)?;
        has_changed |= cache.prepare_states(device, graph, n)?;
    }
    let parts = tabulate(device, graph, sequences, has_changed)?;
    for Sequence { cache, n_rows, .. } in &mut *sequences {
        cache.states.begin(*n_rows);
    }
    let states = parts.into_iter().map(|part| {
        let places = &sequences[part.member].cache.pool.places;
        Ok(StateRef {
            layer: places.layer(device, layer, n)?,
            first: 0,
            sequences: part.sequences,
        })
    });
    states.collect()
}

/// Fills the table of the first of `sequences` for the current step, unless it is already and nothing `has_changed`. Returns
/// those that kernels take together.
fn tabulate(
    device: &Device,
    graph: &Graph,
    sequences: &mut [Sequence<'_, GpuCache>],
    has_changed: bool,
) -> Result<Vec<Part>, GpuError> {
    let lens = (sequences.iter()).map(|of| (of.cache.len, of.n_rows, of.n_angles));
    let step = (graph.step(), lens.collect::<Vec<_>>());
    let Some(first) = sequences.first_mut() else {
        return Ok(Vec::new());
    };
    if has_changed || first.cache.batch.step != step {
        let mut batch = std::mem::take(&mut first.cache.batch);
        let all: Vec<(&GpuCache, usize, usize)> = (sequences.iter())
            .map(|of| (&*of.cache, of.n_rows, of.n_angles))
            .collect();
        let filled = batch.fill(device, &all);
        batch.step = step;
        batch.previous.1 = None;
        batch
            .ropes
            .iter_mut()
            .for_each(|rope| rope.is_filled = false);
        sequences[0].cache.batch = batch;
        if let Err(error) = filled {
            sequences[0].cache.batch.step = Default::default();
            return Err(error);
        }
    }
    Ok(sequences[0].cache.batch.parts.clone())
}

/// How to sample for several sequences, again and again.
pub(super) struct Samples {
    pub(super) ops: Vec<SampleOp>,
    /// What the operations leave to be read.
    pub(super) reads: ReadSamples,
    /// Which tokens may come next, to be written before each.
    pub(super) masks: Option<Masks>,
    /// Of what they read.
    pub(super) current: Current,
}

/// Whether the rows of logits of a step, and the table of its sequences, are still those of that step: others overwrite them
/// that begin with the same sequence.
#[derive(Debug)]
pub(super) struct Current {
    version: Arc<AtomicU64>,
    known: u64,
}

impl Current {
    fn new(table: &BatchTable) -> Current {
        Current {
            version: Arc::clone(&table.version),
            known: table.version.load(Ordering::Relaxed),
        }
    }

    pub(super) fn is_current(&self) -> bool {
        self.version.load(Ordering::Relaxed) == self.known
    }
}

/// How to sample for `sequences`, whose `logits`, a row of each, the current step computes. Positions and tokens of
/// the step are in the operations' states, which they update, so that the step can be repeated. `None` if there are no kernels
/// for that, or the step isn't one of these sequences alone.
pub(super) fn continue_from(
    device: &Device,
    step: u64,
    logits: &View,
    sequences: &mut [Continued<'_, GpuCache>],
) -> Result<Option<Samples>, GpuError> {
    let Some(table) = sequences.first().map(|of| &of.cache.batch) else {
        return Ok(None);
    };
    let lens = sequences.iter().map(|of| (of.cache.len, 1));
    let rows = table.step.1.iter().map(|of| (of.0, of.1));
    let is_filled = table.step.0 == step && table.parts.len() == 1 && rows.eq(lens);
    let states = table.buffer.clone().filter(|_| is_filled);
    let (Some(states), true) = (states, decode::are_alike(sequences)) else {
        return Ok(None);
    };
    let chosen = sequences.iter().map(|of| (of.last, of.sampling.seed));
    let chosen: Vec<_> = chosen.collect();
    (sequences[0].cache.batch).choose(device, &states, &chosen)?;
    let n_top: Vec<_> = sequences.iter().map(|of| of.sampling.logprobs).collect();
    let allowed: Vec<_> = sequences.iter().map(|of| of.sampling.allowed).collect();
    let masks = (sequences[0].cache.sampling).masks(device, logits.width, &allowed)?;
    let mut ops = Vec::new();
    for members in decode::runs(sequences) {
        let mut penalties = Vec::new();
        for (i, of) in members.clone().zip(&mut sequences[members.clone()]) {
            penalties.extend(
                of.cache
                    .penalty(device, of.position, (i, i), &of.sampling)?,
            );
            of.cache.is_forked = Arc::default();
        }
        let first = &mut sequences[members.start];
        let Some(kind) = SampleKind::of(&first.sampling) else {
            return Ok(None);
        };
        let is_masked = allowed[members.clone()].iter().any(Option::is_some);
        let run = Run {
            kind,
            n_top: most_of(&n_top[members.clone()]),
            penalties,
            masks: masks.as_ref().filter(|_| is_masked),
            keeps_logits: false,
            members,
        };
        let scratch = &mut first.cache.sampling;
        ops.push(scratch.op(device, logits.clone(), states.clone(), run)?);
    }
    Ok(Some(Samples {
        reads: ReadSamples::new(&ops, n_top),
        ops,
        masks,
        current: Current::new(&sequences[0].cache.batch),
    }))
}

impl GpuCache {
    pub(super) fn new(shape: &CacheShape, graph: &SharedGraph, pools: &PagePools) -> GpuCache {
        GpuCache {
            graph: graph.clone(),
            shape: shape.clone(),
            len: 0,
            pools: pools.clone(),
            pool: pools.get(shape),
            pages: Vec::new(),
            states: States::default(),
            is_forked: Arc::default(),
            batch: BatchTable::default(),
            sampling: SampleScratch::default(),
        }
    }

    /// Makes room for `more` tokens, in pages that are this sequence's alone. Returns whether they are others than before.
    fn reserve(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        more: usize,
    ) -> Result<bool, GpuError> {
        let first = self.len / PAGE_LEN;
        let end = (self.len + more).div_ceil(PAGE_LEN);
        let is_shared = |i: &usize| Arc::strong_count(&self.pages[*i]) > 1;
        let shared: Vec<usize> = (first..end.min(self.pages.len()))
            .filter(is_shared)
            .collect();
        let missing = end.saturating_sub(self.pages.len());
        if shared.is_empty() && missing == 0 {
            return Ok(false);
        }
        let taken = match self.pool.take(device, graph, shared.len() + missing) {
            // There is no more room for all.
            Err(GpuError::Unsupported { .. }) if Arc::strong_count(&self.pool) > 1 => {
                self.split(device, graph, missing)?;
                return Ok(true);
            }
            taken => taken?,
        };
        let mut taken = taken.into_iter();
        for (i, own) in shared.into_iter().zip(&mut taken) {
            if i * PAGE_LEN < self.len {
                // What is copied may not have been computed yet.
                graph.flush()?;
                self.pool.copy(device, &self.pages[i], &own)?;
            }
            self.pages[i] = own;
        }
        self.pages.extend(taken);
        Ok(true)
    }

    /// Moves to a pool of its own, with room for `more` pages.
    fn split(&mut self, device: &Device, graph: &mut Graph, more: usize) -> Result<(), GpuError> {
        let (pool, pages) = (self.pool).split(device, graph, &self.pools, &self.pages, more)?;
        (self.states).move_to(device, graph, &self.pool.places, &pool.places)?;
        (self.pool, self.pages) = (pool, pages);
        Ok(())
    }

    /// Brings the states at the end into a place that is this sequence's alone, with room for those of a layer, `n` values.
    /// Returns whether that is another one than before.
    fn prepare_states(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        n: usize,
    ) -> Result<bool, GpuError> {
        let has_moved = match (self.states).own_place(device, graph, &self.pool.places, n) {
            // There is no more room for all.
            Err(GpuError::Unsupported { .. }) if Arc::strong_count(&self.pool) > 1 => {
                self.split(device, graph, 0)?;
                (self.states).own_place(device, graph, &self.pool.places, n)?;
                true
            }
            has_moved => has_moved?,
        };
        (self.states).prepare(device, graph, &self.pool.places, self.len)?;
        Ok(has_moved)
    }

    /// Positions that there are pages for.
    fn capacity(&self) -> usize {
        self.pages.len() * PAGE_LEN
    }

    fn page_numbers(&self) -> Vec<u32> {
        self.pages.iter().map(|page| page.get()).collect()
    }

    /// Memory for the positions before the first of the sequences of the batch whose first sequence this is, `len` values
    /// in all, and whether those of `at` (layer and part of its state) are in it already, after [`states`].
    pub(super) fn previous(
        &mut self,
        device: &Device,
        len: usize,
        at: (usize, usize),
    ) -> Result<(Buffer, bool), GpuError> {
        let (memory, of) = &mut self.batch.previous;
        let memory = room(device, memory, len)?;
        Ok((memory, of.replace(at) == Some(at)))
    }

    /// How to learn that keys and values, or states, are in other memory.
    pub(super) fn moves(&self) -> Moves {
        self.pool.moves()
    }

    /// Whether layers remember states, and how to learn that others share their memory.
    pub(super) fn states(&self) -> Option<Arc<AtomicBool>> {
        (!self.states.is_empty()).then(|| Arc::clone(&self.is_forked))
    }

    /// Writes the keys and values of `layer`, which have been computed, and its state.
    pub(super) fn save(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        layer: usize,
        to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        to.put(form(self.shape.layers[layer]).to_vec())?;
        if let Some(memory) = self.pool.known_layer(layer) {
            let saved = memory.read(device, &self.page_numbers(), self.len);
            for piece in saved.map_err(BackendError::from)? {
                to.put(piece)?;
            }
        }
        self.prepare_known_states(device, graph)
            .map_err(BackendError::from)?;
        let state = (self.states).read(device, &self.pool.places, layer, self.len);
        Ok(to.put(state.map_err(BackendError::from)?)?)
    }

    /// Reads what was saved, by way of `upload`.
    pub(super) fn restore(
        &mut self,
        (device, upload): (&Device, &mut Upload),
        graph: &mut Graph,
        layer: usize,
        held: LayerContents,
        from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        let LayerContents {
            n_keys: len,
            n_state,
        } = held;
        take_form(from, form(self.shape.layers[layer]))?;
        if len > 0 {
            // Pages may have been those of sequences whose last commands write to them.
            graph.flush().map_err(BackendError::from)?;
            (self.reserve(device, graph, len)).map_err(BackendError::from)?;
            let memory = (self.pool.layer(device, layer)).map_err(BackendError::from)?;
            let pages = self.page_numbers();
            for piece in memory.pieces(len) {
                let saved = take_saved(from, piece.bytes())?;
                let written = memory.write(upload, &pages, &piece, &saved);
                written.map_err(BackendError::from)?;
            }
        }
        if n_state > 0 {
            let saved = take_saved(from, 4 * n_state)?;
            let layer = (layer, self.shape.layers.len());
            let restored = self.states.restore(device, layer, &saved);
            restored.map_err(BackendError::from)?;
        }
        Ok(())
    }

    /// Makes room for the next step.
    pub(super) fn prepare(&mut self, device: &Device, graph: &mut Graph) -> Result<(), GpuError> {
        self.prepare_known_states(device, graph)?;
        self.reserve(device, graph, 1)?;
        Ok(())
    }

    /// As [`GpuCache::prepare_states`], if layers have any.
    fn prepare_known_states(&mut self, device: &Device, graph: &mut Graph) -> Result<(), GpuError> {
        if !self.states.is_empty() {
            self.prepare_states(device, graph, 0)?;
        }
        Ok(())
    }

    /// How many steps there are pages for; takes more where they are few.
    pub(super) fn n_steps(&mut self) -> usize {
        if self.capacity() - self.len <= PAGE_LEN {
            // As much more as there is anyway, for a sequence that may grow by half.
            let ahead = (self.len / 2).clamp(PAGE_LEN, MOST_STEPS);
            let end = (self.len + ahead).div_ceil(PAGE_LEN);
            let more = self.pool.take_free(end.saturating_sub(self.pages.len()));
            self.pages.extend(more);
        }
        self.capacity() - self.len
    }

    /// Whether kernels can take both sequences together: keys and values, and states, are in the same memory.
    pub(super) fn is_beside(&self, other: &GpuCache) -> bool {
        Arc::ptr_eq(&self.pool, &other.pool)
    }

    /// Memory for sampling.
    pub(super) fn sampling(&mut self) -> &mut SampleScratch {
        &mut self.sampling
    }

    /// What `sampling` does to this sequence's logits, row `at.1`, before a token is drawn; it is number `at.0` of those
    /// that are sampled for.
    pub(super) fn penalty(
        &mut self,
        device: &Device,
        position: usize,
        at: (usize, usize),
        sampling: &Sampling<'_>,
    ) -> Result<Option<PenaltyOp>, GpuError> {
        let size = (position, most_len(position + 1));
        self.sampling.penalty(device, size, at, sampling)
    }

    /// The rotations of the rows of the batch whose first sequence this is, after [`groups`].
    pub(super) fn rope_table(
        &mut self,
        device: &Device,
        Rotation { index, angles }: Rotation<'_>,
    ) -> Result<RopeTable, GpuError> {
        let ropes = &mut self.batch.ropes;
        let known = ropes.iter().position(|rope| rope.index == index);
        let known = known.unwrap_or_else(|| {
            ropes.push(Rope {
                index,
                buffer: None,
                is_filled: false,
            });
            ropes.len() - 1
        });
        let rope = &mut ropes[known];
        let pairs = angles.dim / 2;
        let len = 2 * angles.cos.len();
        let table = room(
            device,
            &mut rope.buffer,
            len.next_power_of_two().max(2 * MIN_LEN * pairs),
        )?;
        if !rope.is_filled {
            let both = angles.cos.iter().zip(&angles.sin);
            let both: Vec<[f32; 2]> = both.map(|(cos, sin)| [*cos, *sin]).collect();
            device.write(&table, 0, &both)?;
            rope.is_filled = true;
        }
        Ok(RopeTable {
            table,
            pairs,
            layout: angles.layout,
        })
    }
}

impl KvCache for GpuCache {
    fn len(&self) -> usize {
        self.len
    }

    fn share(&self) -> usize {
        match self.pages.is_empty() {
            true => self.len,
            false => share(self.len, PAGE_LEN, self.pages.iter().map(Arc::strong_count)),
        }
    }

    fn advance(&mut self, n: usize) {
        self.len += n;
        self.states.advance(n, self.len);
    }

    fn pin(&mut self) {
        self.states.pin(self.len);
    }

    fn len_within(&self, len: usize) -> usize {
        match len < self.len && !self.states.is_empty() {
            true => self.states.len_within(len),
            false => len.min(self.len),
        }
    }

    fn truncate(&mut self, len: usize) {
        if len < self.len || self.states.are_overwritten() {
            let len = len.min(self.len);
            self.len = match self.states.is_empty() {
                true => len,
                false => self.states.truncate(len),
            };
            self.pages.truncate(self.len.div_ceil(PAGE_LEN));
        }
    }

    fn fork(&self, len: usize) -> GpuCache {
        let mut fork = GpuCache::new(&self.shape, &self.graph, &self.pools);
        fork.len = self.len;
        fork.pool = Arc::clone(&self.pool);
        let n_pages = self.len.div_ceil(PAGE_LEN);
        fork.pages = self.pages.iter().take(n_pages).cloned().collect();
        fork.states = self.states.clone();
        fork.truncate(len);
        self.is_forked.store(true, Ordering::Relaxed);
        fork
    }
}

/// Recorded commands would keep the memory alive.
impl Drop for GpuCache {
    fn drop(&mut self) {
        self.graph.lock().forget();
    }
}
