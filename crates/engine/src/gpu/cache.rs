//! Keys and values on the device, and states.

use std::io::{Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_gpu::graph::{Graph, RopeTable, SampleOp, Shared, SharedGraph, View};
use sterna_gpu::kernels::attention::CacheLayer;
use sterna_gpu::kernels::recurrent::StateLayer;
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, GpuError};

use super::buffer::room;
use super::decode::SampleScratch;
use super::states::States;
use crate::backend::{
    BackendError, CacheShape, CacheType, KvCache, KvHeads, LayerContents, Rotation, SnapshotError,
    read_form, read_saved,
};
use crate::sampling::Sampling;

/// Keys and values of one sequence, and its states.
///
/// The memory of a layer doubles as the sequence grows. Forks share it; it is copied when one of its owners
/// writes to it.
#[derive(Debug)]
pub struct GpuCache {
    graph: SharedGraph,
    shape: CacheShape,
    len: usize,
    /// `None` before the first token.
    layers: Vec<Option<Layer>>,
    states: States,
    /// Set for whoever repeats steps ahead once others share the memory that they write to.
    is_forked: Arc<AtomicBool>,
    /// The sequence's position, as kernels read it.
    position: Option<(Buffer, Option<usize>)>,
    tables: Vec<Table>,
    /// The position before the first of a step, as mixes of positions read it, and of which layer and part of its state
    /// it was taken last in this step.
    previous: (Option<Buffer>, Option<(usize, usize)>),
    /// For sampling tokens.
    sampling: SampleScratch,
}

#[derive(Debug, Clone)]
struct Layer {
    memory: Shared<CacheLayer>,
    /// Has as many owners as there are sequences with this memory.
    owners: Arc<()>,
}

/// How keys and values are saved: rows of heads.
const ROWS: &[u8; 4] = b"rows";

/// Rotations by position; those of a step's rows are filled in for it.
#[derive(Debug)]
struct Table {
    buffer: Buffer,
    /// Allocated positions.
    capacity: usize,
    pairs: usize,
    /// What was filled in last: in which step, of which rotary embedding which rows, and for which position.
    step: u64,
    index: usize,
    rows: Range<usize>,
    first: usize,
}

/// Initially allocated positions of a layer.
const FIRST_CAPACITY: usize = 256;

/// Memory of a layer for at least `need` positions.
pub(super) fn memory(
    device: &Device,
    heads: KvHeads,
    dtype: CacheType,
    need: usize,
) -> Result<CacheLayer, GpuError> {
    let capacity = need.next_power_of_two().max(FIRST_CAPACITY);
    let KvHeads {
        n_kv_heads,
        head_dim,
    } = heads;
    CacheLayer::new(device, n_kv_heads, head_dim, dtype, capacity)
}

/// The shortest context length that commands are recorded for.
const MIN_LEN: usize = 256;

/// The longest context that commands for `len` positions are recorded for.
pub(super) fn most_len(len: usize) -> usize {
    // In powers of two, so that commands can be replayed for as many steps.
    len.next_power_of_two().max(MIN_LEN)
}

impl GpuCache {
    pub(super) fn new(shape: &CacheShape, graph: &SharedGraph) -> GpuCache {
        GpuCache {
            graph: graph.clone(),
            shape: shape.clone(),
            len: 0,
            layers: vec![None; shape.layers.len()],
            states: States::new(shape.layers.len()),
            is_forked: Arc::default(),
            position: None,
            tables: Vec::new(),
            previous: (None, None),
            sampling: SampleScratch::default(),
        }
    }

    /// The memory of `layer`, not shared with other sequences, with room for `more` tokens.
    pub(super) fn layer(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        layer: usize,
        more: usize,
    ) -> Result<Shared<CacheLayer>, GpuError> {
        let need = self.len + more;
        let old = self.layers[layer].as_ref();
        if let Some(Layer { memory, owners }) = old
            && memory.capacity() >= need
            && Arc::strong_count(owners) == 1
        {
            return Ok(memory.clone());
        }
        let memory = memory(device, self.shape.layers[layer], self.shape.dtype, need)?;
        if let Some(old) = old {
            // What is copied may not have been computed yet.
            graph.flush()?;
            // Recorded commands would keep the old memory alive.
            graph.forget();
            old.memory.copy_to(device, &memory, self.len)?;
        }
        let memory = Shared::new(memory);
        self.layers[layer] = Some(Layer {
            memory: memory.clone(),
            owners: Arc::new(()),
        });
        Ok(memory)
    }

    /// The memory of the states of `layer`, `n` values each, not shared with other sequences.
    pub(super) fn state(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        layer: usize,
        n: usize,
    ) -> Result<Shared<StateLayer>, GpuError> {
        self.states.layer(device, graph, (layer, n), self.len)
    }

    /// Memory for the position before the first of a step, `width` values, and whether that of `at` (layer and part of its
    /// state) is in it already.
    pub(super) fn previous(
        &mut self,
        device: &Device,
        width: usize,
        at: (usize, usize),
    ) -> Result<(Buffer, bool), GpuError> {
        let (memory, of) = &mut self.previous;
        let memory = room(device, memory, width)?;
        Ok((memory, of.replace(at) == Some(at)))
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
        to: &mut dyn Write,
    ) -> Result<(), SnapshotError> {
        to.write_all(ROWS)?;
        if let Some(layer) = &self.layers[layer] {
            let saved = layer.memory.read(device, self.len);
            to.write_all(&saved.map_err(BackendError::from)?)?;
        }
        let state = self.states.read(device, graph, layer, self.len);
        Ok(to.write_all(&state.map_err(BackendError::from)?)?)
    }

    /// Reads what was saved.
    pub(super) fn restore(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        layer: usize,
        held: LayerContents,
        from: &mut dyn Read,
    ) -> Result<(), SnapshotError> {
        let LayerContents {
            n_keys: len,
            n_state,
        } = held;
        read_form(from, ROWS)?;
        if len > 0 {
            let memory = (self.layer(device, graph, layer, len)).map_err(BackendError::from)?;
            let mut saved = vec![0; memory.saved_bytes(len)];
            read_saved(from, &mut saved)?;
            (memory.write(device, len, &saved)).map_err(BackendError::from)?;
        }
        if n_state > 0 {
            let mut saved = vec![0; 4 * n_state];
            read_saved(from, &mut saved)?;
            let restored = self.states.restore(device, layer, &saved);
            restored.map_err(BackendError::from)?;
        }
        Ok(())
    }

    /// The buffer with the next position.
    pub(super) fn position(&mut self, device: &Device) -> Result<Buffer, GpuError> {
        let (buffer, written) = match self.position.take() {
            Some(known) => known,
            // Followed by the token, where steps are repeated.
            None => (device.buffer("position", 8)?, None),
        };
        if written != Some(self.len) {
            device.write(&buffer, 0, &(self.len as u32).to_ne_bytes())?;
        }
        self.position = Some((buffer.clone(), Some(self.len)));
        Ok(buffer)
    }

    /// Makes room for the next step; returns how many steps it lasts for.
    pub(super) fn n_steps(
        &mut self,
        device: &Device,
        graph: &mut Graph,
    ) -> Result<usize, GpuError> {
        self.states.prepare(device, graph, self.len)?;
        let mut end = most_len(self.len + 1);
        for layer in 0..self.layers.len() {
            // Others have no keys and values, or theirs are computed elsewhere.
            if self.layers[layer].is_some() {
                end = end.min(self.layer(device, graph, layer, 1)?.capacity());
            }
        }
        Ok(end - self.len)
    }

    /// Position and token of the current step, for `last` in it, which the step's sampling updates; and the
    /// sampling operation, as `sampling` specifies. `None` if there are no kernels for that.
    pub(super) fn continue_from(
        &mut self,
        device: &Device,
        last: u32,
        logits: View,
        sampling: &Sampling<'_>,
    ) -> Result<Option<(Buffer, SampleOp)>, GpuError> {
        let state = self.position(device)?;
        let capacities = self.layers.iter().flatten();
        let capacity = capacities.map(|layer| layer.memory.capacity()).max();
        let size = (self.len, capacity.unwrap_or(FIRST_CAPACITY));
        let sample = self.sampling.op(device, size, logits, &state, sampling)?;
        let Some(sample) = sample else {
            return Ok(None);
        };
        self.is_forked = Arc::default();
        device.write(&state, 4, &last.to_ne_bytes())?;
        self.position = Some((state.clone(), None));
        Ok(Some((state, sample)))
    }

    /// The rotations `rows` of `rope`, written where kernels look up the next positions.
    pub(super) fn rope_table(
        &mut self,
        device: &Device,
        graph: &Graph,
        Rotation { index, angles }: Rotation<'_>,
        rows: Range<usize>,
    ) -> Result<RopeTable, GpuError> {
        let (step, first) = (graph.step(), self.len);
        let pairs = angles.dim / 2;
        let rope_table = |table: &Table| RopeTable {
            table: table.buffer.clone(),
            pairs,
            layout: angles.layout,
        };
        let filled =
            |t: &&Table| (t.step, t.index, t.first, &t.rows) == (step, index, first, &rows);
        if let Some(table) = self.tables.iter().find(filled) {
            return Ok(rope_table(table));
        }
        let end = first + rows.len();
        let fits = |t: &Table| t.step != step && t.pairs == pairs && t.capacity >= end;
        let i = match self.tables.iter().position(fits) {
            Some(i) => i,
            None => {
                // Smaller ones are unused once this step is over.
                self.tables.retain(|t| t.step == step || t.capacity >= end);
                let capacity = end.next_power_of_two().max(FIRST_CAPACITY);
                let bytes = capacity as u64 * pairs.max(1) as u64 * 8;
                self.tables.push(Table {
                    buffer: device.buffer("rotations", bytes)?,
                    capacity,
                    pairs,
                    step,
                    index,
                    rows: rows.clone(),
                    first,
                });
                self.tables.len() - 1
            }
        };
        let table = &mut self.tables[i];
        let values = rows.start * pairs..rows.end * pairs;
        let both = angles.cos[values.clone()].iter().zip(&angles.sin[values]);
        let bytes: Vec<u8> = both
            .flat_map(|(cos, sin)| [cos.to_ne_bytes(), sin.to_ne_bytes()])
            .flatten()
            .collect();
        device.write(&table.buffer, (first * pairs * 8) as u64, &bytes)?;
        (table.step, table.index, table.rows, table.first) = (step, index, rows, first);
        Ok(rope_table(table))
    }
}

impl KvCache for GpuCache {
    fn len(&self) -> usize {
        self.len
    }

    fn advance(&mut self, n: usize) {
        self.len += n;
        self.states.advance(n, self.len);
        self.previous.1 = None;
    }

    fn pin(&mut self) {
        self.states.pin(self.len);
    }

    fn truncate(&mut self, len: usize) {
        self.previous.1 = None;
        if len < self.len {
            self.len = match self.states.is_empty() {
                true => len,
                false => self.states.truncate(len),
            };
        }
    }

    fn fork(&self, len: usize) -> GpuCache {
        let mut fork = GpuCache::new(&self.shape, &self.graph);
        fork.len = self.len;
        fork.layers.clone_from(&self.layers);
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
