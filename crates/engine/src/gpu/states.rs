//! The states of layers on the device, and the positions where they are remembered.
//!
//! Kernels read and write them in slots by position ([`SLOTS`]), so that steps can run ahead of the host. What is to
//! be remembered for longer is copied as the next step begins.

use std::sync::Arc;

use sterna_gpu::graph::Graph;
use sterna_gpu::kernels::recurrent::{KeptState, SLOTS};
use sterna_gpu::{Device, GpuError};

use super::numbers::Number;
use super::places::{Places, Snapshot};
use crate::checkpoints::Checkpoints;

/// While tokens follow one by one, a checkpoint is made every so many.
const INTERVAL: usize = 64;

/// The states of a sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct States {
    /// Where its latest are; `None` before the first token, and where layers have none.
    place: Option<Arc<Number>>,
    checkpoints: Checkpoints<Snapshot>,
    /// Whether the state at the end is that of the last checkpoint, and not in the slots.
    is_rewound: bool,
    /// Whether the last step had several rows.
    had_rows: bool,
    /// The end that everything is prepared for.
    ready: Option<usize>,
    /// What was restored, until the sequence has its tokens.
    restored: Snapshot,
    /// Whether a step that the sequence hasn't advanced by has put its states where those at the end were.
    is_overwritten: bool,
}

impl States {
    /// Whether there are none, so that the sequence can be truncated anywhere.
    pub(super) fn is_empty(&self) -> bool {
        self.place.is_none() && self.checkpoints.last().is_none()
    }

    /// The number of its place, if it has one.
    pub(super) fn place(&self) -> Option<u32> {
        self.place.as_ref().map(|place| place.get())
    }

    /// Whether its place is another one than before, now that it is this sequence's alone, with the latest states in it. New
    /// places are no more than a buffer has room for, of states of `len` values.
    pub(super) fn own_place(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        places: &Places,
        len: usize,
    ) -> Result<bool, GpuError> {
        if !self.needs_place() {
            return Ok(false);
        }
        let own = places.take(device, graph, self.longest().max(len))?;
        if let Some(shared) = self.place.as_ref().filter(|_| !self.is_rewound) {
            // What is copied may not have been computed yet.
            graph.flush()?;
            places.copy(device, shared, places, &own)?;
        }
        self.place = Some(own);
        Ok(true)
    }

    /// Whether it has no place that is its own.
    pub(super) fn needs_place(&self) -> bool {
        let is_own = |place: &Arc<Number>| Arc::strong_count(place) == 1;
        !self.place.as_ref().is_some_and(is_own)
    }

    /// Values of the largest state that is to come from a checkpoint.
    fn longest(&self) -> usize {
        let kept = self.checkpoints.last().into_iter().flatten().flatten();
        kept.map(KeptState::len).max().unwrap_or(0)
    }

    /// Moves from `places` to `others`.
    pub(super) fn move_to(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        places: &Places,
        others: &Places,
    ) -> Result<(), GpuError> {
        if let Some(place) = &self.place {
            let new = others.take(device, graph, places.longest().max(self.longest()))?;
            // What is copied may not have been computed yet.
            graph.flush()?;
            places.copy(device, place, others, &new)?;
            self.place = Some(new);
        }
        Ok(())
    }

    /// Brings the state at `len`, the end, into the slots of its place among `places`, which is its own, or remembers it,
    /// before a step.
    pub(super) fn prepare(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        places: &Places,
        len: usize,
    ) -> Result<(), GpuError> {
        let Some(place) = &self.place else {
            return Ok(());
        };
        if self.ready == Some(len) {
            return Ok(());
        }
        if let (true, Some(kept)) = (self.is_rewound, self.checkpoints.last()) {
            // What is overwritten may not have been read yet.
            graph.flush()?;
            places.put_back(device, place, len, kept)?;
            self.is_rewound = false;
        } else if self.is_due(len) {
            // What is copied may not have been computed yet.
            graph.flush()?;
            match places.keep(device, place, len) {
                Ok(kept) => self.remember(len, kept),
                // Without it, more is computed again where the sequence is truncated.
                Err(GpuError::OutOfMemory { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.ready = Some(len);
        Ok(())
    }

    /// A step of `n_rows` has begun.
    pub(super) fn begin(&mut self, n_rows: usize) {
        self.is_overwritten |= n_rows.is_multiple_of(SLOTS);
    }

    /// Whether the states at the end may be gone.
    pub(super) fn are_overwritten(&self) -> bool {
        self.is_overwritten
    }

    fn is_due(&self, len: usize) -> bool {
        let last = self.checkpoints.end();
        let is_asked = self.checkpoints.is_pinned(len) || self.had_rows;
        len > last && (is_asked || len - last >= INTERVAL)
    }

    fn remember(&mut self, position: usize, states: Snapshot) {
        let bytes = states.iter().flatten().map(|state| 4 * state.len());
        let bytes = bytes.sum();
        self.checkpoints.push(position, states, bytes);
    }

    /// The values of `layer` at `len`, the end, once everything is [prepared](States::prepare); none if it has no state.
    pub(super) fn read(
        &self,
        device: &Device,
        places: &Places,
        layer: usize,
        len: usize,
    ) -> Result<Vec<u8>, GpuError> {
        match &self.place {
            Some(place) => places.read(device, layer, place, len),
            None => Ok(Vec::new()),
        }
    }

    /// Takes `values` as the state of layer `layer.0` of `layer.1` at the position that the sequence advances to.
    pub(super) fn restore(
        &mut self,
        device: &Device,
        layer: (usize, usize),
        values: &[u8],
    ) -> Result<(), GpuError> {
        let state = KeptState::new(device, values)?;
        self.restored.resize(layer.1, None);
        self.restored[layer.0] = Some(state);
        Ok(())
    }

    /// The sequence is `n` tokens longer, and ends at `len`.
    pub(super) fn advance(&mut self, n: usize, len: usize) {
        self.had_rows = n > 1;
        self.is_overwritten = false;
        if !self.restored.is_empty() {
            let restored = std::mem::take(&mut self.restored);
            self.remember(len, restored);
            self.is_rewound = true;
        }
    }

    /// Keeps the state at `len`, the end, until the next call.
    pub(super) fn pin(&mut self, len: usize) {
        self.checkpoints.pin(len);
        self.ready = None;
    }

    /// Where the last checkpoint within the first `len` positions is.
    pub(super) fn len_within(&self, len: usize) -> usize {
        self.checkpoints.end_within(len)
    }

    /// Truncates to the last checkpoint within the first `len` positions, and returns where that is.
    pub(super) fn truncate(&mut self, len: usize) -> usize {
        self.checkpoints.truncate(len);
        let len = self.checkpoints.end();
        // What others share is theirs; at the beginning kernels take zeros.
        self.place.take_if(|place| Arc::strong_count(place) > 1);
        self.is_rewound = len > 0;
        self.had_rows = false;
        self.is_overwritten = false;
        self.ready = None;
        len
    }
}
