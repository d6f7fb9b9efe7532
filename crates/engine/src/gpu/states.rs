//! The states of layers on the device, and the positions where they are remembered.
//!
//! Kernels read and write them in slots by position ([`SLOTS`]), so that steps can run ahead of the host. What is to
//! be remembered for longer is copied as the next step begins.

use std::sync::Arc;

use sterna_gpu::graph::{Graph, Shared};
use sterna_gpu::kernels::recurrent::{KeptState, StateLayer};
use sterna_gpu::{Device, GpuError};

use crate::checkpoints::Checkpoints;

/// While tokens follow one by one, a checkpoint is made every so many.
const INTERVAL: usize = 64;

/// The state of each layer at one position; none for layers without.
type Snapshot = Vec<Option<KeptState>>;

/// The states of a sequence.
#[derive(Debug, Clone)]
pub(super) struct States {
    /// `None` before the first token, and for layers without.
    layers: Vec<Option<Layer>>,
    checkpoints: Checkpoints<Snapshot>,
    /// Whether the state at the end is that of the last checkpoint, and not in the slots.
    is_rewound: bool,
    /// Whether the last step had several rows.
    had_rows: bool,
    /// The end that everything is prepared for.
    ready: Option<usize>,
    /// What was restored, until the sequence has its tokens.
    restored: Snapshot,
}

#[derive(Debug, Clone)]
struct Layer {
    memory: Shared<StateLayer>,
    /// Has as many owners as there are sequences with this memory.
    owners: Arc<()>,
}

impl Layer {
    fn new(device: &Device, len: usize) -> Result<Layer, GpuError> {
        Ok(Layer {
            memory: Shared::new(StateLayer::new(device, len)?),
            owners: Arc::new(()),
        })
    }

    fn is_shared(&self) -> bool {
        Arc::strong_count(&self.owners) > 1
    }
}

impl States {
    pub(super) fn new(n_layers: usize) -> States {
        States {
            layers: vec![None; n_layers],
            checkpoints: Checkpoints::default(),
            is_rewound: false,
            had_rows: false,
            ready: None,
            restored: Vec::new(),
        }
    }

    /// Whether there are none, so that the sequence can be truncated anywhere.
    pub(super) fn is_empty(&self) -> bool {
        self.layers.iter().all(Option::is_none) && self.checkpoints.last().is_none()
    }

    /// Memory for the states of `layer`, `n` values each, not shared with other sequences. It has that at `len`, the end.
    pub(super) fn layer(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        (layer, n): (usize, usize),
        len: usize,
    ) -> Result<Shared<StateLayer>, GpuError> {
        self.prepare(device, graph, len)?;
        let own = match &self.layers[layer] {
            Some(own) if !own.is_shared() => return Ok(own.memory.clone()),
            Some(shared) => {
                let own = Layer::new(device, n)?;
                // What is copied may not have been computed yet, and recorded commands would keep the old memory.
                graph.flush()?;
                graph.forget();
                shared.memory.copy_to(device, &own.memory)?;
                own
            }
            None => Layer::new(device, n)?,
        };
        Ok(self.layers[layer].insert(own).memory.clone())
    }

    /// Brings the state at `len`, the end, into the slots, or remembers it, before a step.
    pub(super) fn prepare(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        len: usize,
    ) -> Result<(), GpuError> {
        // A model without states has no checkpoints either, and can be truncated anywhere.
        if self.ready == Some(len) || self.is_empty() {
            return Ok(());
        }
        if self.is_rewound {
            self.rewind(device, graph, len)?;
        } else if self.is_due(len) {
            // What is copied may not have been computed yet.
            graph.flush()?;
            let memories = self.layers.iter().map(Option::as_ref);
            let kept = memories.map(|layer| layer.map(|own| own.memory.keep(device, len)));
            match kept.map(Option::transpose).collect() {
                Ok(kept) => self.remember(len, kept),
                // Without it, more is computed again where the sequence is truncated.
                Err(GpuError::OutOfMemory { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.ready = Some(len);
        Ok(())
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

    /// Makes the last checkpoint, which is at `len`, the state in the slots.
    fn rewind(&mut self, device: &Device, graph: &mut Graph, len: usize) -> Result<(), GpuError> {
        // What is overwritten may not have been read yet.
        graph.flush()?;
        let kept = self.checkpoints.last().into_iter().flatten();
        for (layer, kept) in self.layers.iter_mut().zip(kept) {
            let Some(kept) = kept else { continue };
            let own = match layer.take() {
                Some(own) if !own.is_shared() => own,
                _ => {
                    graph.forget();
                    Layer::new(device, kept.len())?
                }
            };
            own.memory.put_back(device, len, kept)?;
            *layer = Some(own);
        }
        self.is_rewound = false;
        Ok(())
    }

    /// The values of `layer` at `len`, the end; none if it has no state.
    pub(super) fn read(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        layer: usize,
        len: usize,
    ) -> Result<Vec<u8>, GpuError> {
        self.prepare(device, graph, len)?;
        match &self.layers[layer] {
            Some(own) => own.memory.read(device, len),
            None => Ok(Vec::new()),
        }
    }

    /// Takes `values` as the state of `layer` at the position that the sequence advances to.
    pub(super) fn restore(
        &mut self,
        device: &Device,
        layer: usize,
        values: &[u8],
    ) -> Result<(), GpuError> {
        let state = KeptState::new(device, values)?;
        self.restored.resize(self.layers.len(), None);
        self.restored[layer] = Some(state);
        Ok(())
    }

    /// The sequence is `n` tokens longer, and ends at `len`.
    pub(super) fn advance(&mut self, n: usize, len: usize) {
        self.had_rows = n > 1;
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

    /// Truncates to the last checkpoint within the first `len` positions, and returns where that is.
    pub(super) fn truncate(&mut self, len: usize) -> usize {
        self.checkpoints.truncate(len);
        let len = self.checkpoints.end();
        // At the beginning kernels take zeros.
        self.is_rewound = len > 0;
        self.had_rows = false;
        self.ready = None;
        len
    }
}
