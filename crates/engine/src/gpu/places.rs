//! Places for states, which the sequences of a model share as they do pages: kernels find those of several sequences in
//! one buffer of each layer.
//!
//! A place has one number in all layers, whose memory has as many. It grows by copying, all layers at once, as long as
//! a buffer of the device may be that large.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use sterna_gpu::graph::{Graph, Shared};
use sterna_gpu::kernels::recurrent::{KeptState, StateLayer};
use sterna_gpu::{Device, GpuError};

use super::numbers::{FreeNumbers, Number};
use super::pages::lock;

/// The state of each layer at one position; none for layers without.
pub(super) type Snapshot = Vec<Option<KeptState>>;

/// Memory that sequences have their states in.
#[derive(Debug)]
pub(super) struct Places {
    /// Counts how often memory has become other memory.
    n_moves: Arc<AtomicU64>,
    free: FreeNumbers,
    memory: Mutex<Memory>,
}

#[derive(Debug)]
struct Memory {
    n_places: usize,
    /// Of at least as many places; `None` before the layer's first token, and for layers without.
    layers: Vec<Option<Shared<StateLayer>>>,
    /// Where states are copied to, on their way to another place of the same layer.
    between: Vec<Option<StateLayer>>,
}

/// How many places to allocate where `need` are needed and there is room for `most`.
fn with_reserve(need: usize, most: usize) -> usize {
    // States are large, and copied faster than they are computed.
    let step = (need.next_power_of_two() / 8).max(1);
    need.next_multiple_of(step).min(most)
}

impl Memory {
    /// Values of a layer's states at most.
    fn longest(&self) -> usize {
        let known = self.layers.iter().flatten();
        known.map(|layer| layer.len()).max().unwrap_or(0)
    }
}

impl Places {
    /// Values of a layer's states at most.
    pub(super) fn longest(&self) -> usize {
        lock(&self.memory).longest()
    }

    /// None, of `n_layers`; counts moves in `n_moves`.
    pub(super) fn new(n_layers: usize, n_moves: &Arc<AtomicU64>) -> Places {
        Places {
            n_moves: Arc::clone(n_moves),
            free: FreeNumbers::default(),
            memory: Mutex::new(Memory {
                n_places: 0,
                layers: vec![None; n_layers],
                between: vec![None; n_layers],
            }),
        }
    }

    /// Makes room for `n` more sequences at once, or for as many as there can be, with states of up to `len` values besides
    /// those of the layers that are known.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub(super) fn reserve(
        &self,
        device: &Device,
        graph: &mut Graph,
        n: usize,
        len: usize,
    ) -> Result<(), GpuError> {
        let mut memory = lock(&self.memory);
        let missing = n.saturating_sub(self.free.len());
        self.grow(device, graph, &mut memory, (missing, len))
    }

    /// A place with unspecified contents, for states of up to `len` values besides those of the layers that are known.
    ///
    /// Errors: [`GpuError::Unsupported`] if there is no room for more; [`GpuError::OutOfMemory`].
    pub(super) fn take(
        &self,
        device: &Device,
        graph: &mut Graph,
        len: usize,
    ) -> Result<Arc<Number>, GpuError> {
        let mut memory = lock(&self.memory);
        let missing = usize::from(self.free.len() == 0);
        self.grow(device, graph, &mut memory, (missing, len))?;
        let n_places = memory.n_places;
        let place = self.free.take(1).pop();
        place.ok_or_else(|| GpuError::Unsupported {
            what: format!("states of {} sequences together", n_places + 1),
            reason: format!("a buffer of the device holds those of {n_places}"),
        })
    }

    /// Makes room for at least `more`, as far as a buffer has it, where states have up to `len` values.
    fn grow(
        &self,
        device: &Device,
        graph: &mut Graph,
        memory: &mut Memory,
        (more, len): (usize, usize),
    ) -> Result<(), GpuError> {
        let most = StateLayer::most_places(device, memory.longest().max(len));
        let first = memory.n_places;
        let n_places = with_reserve(first + more, most);
        if more == 0 || n_places <= first {
            return Ok(());
        }
        if memory.layers.iter().any(Option::is_some) {
            // What is copied may not have been computed yet, and recorded commands would keep the old memory alive.
            // Whoever repeats steps on the old memory stops: the graph is locked.
            graph.flush()?;
            graph.forget();
            self.n_moves.fetch_add(1, Ordering::Relaxed);
        }
        for of in &mut memory.layers {
            let Some(old) = of else { continue };
            if old.n_places() < n_places {
                let new = StateLayer::new(device, old.len(), n_places)?;
                device.copy_all(&[old.copy(&new, [0, 0], old.n_places())?])?;
                *of = Some(Shared::new(new));
            }
        }
        memory.n_places = n_places;
        self.free.add(first as u32..n_places as u32);
        Ok(())
    }

    /// The memory of `layer`, whose states have `n` values.
    pub(super) fn layer(
        &self,
        device: &Device,
        layer: usize,
        n: usize,
    ) -> Result<Shared<StateLayer>, GpuError> {
        let mut memory = lock(&self.memory);
        let n_places = memory.n_places;
        match &memory.layers[layer] {
            Some(known) if known.len() == n => Ok(known.clone()),
            Some(known) => Err(GpuError::Shape {
                what: "values of a layer's states",
                expected: known.len() as u64,
                found: n as u64,
            }),
            None => {
                let new = Shared::new(StateLayer::new(device, n, n_places)?);
                Ok(memory.layers[layer].insert(new).clone())
            }
        }
    }

    /// Copies the states at `from` to `to`, a place of `other` or another one of these, after everything that was submitted.
    pub(super) fn copy(
        &self,
        device: &Device,
        from: &Number,
        other: &Places,
        to: &Number,
    ) -> Result<(), GpuError> {
        if !std::ptr::eq(self, other) {
            let layers = lock(&self.memory).layers.clone();
            for (i, own) in layers.iter().enumerate() {
                let Some(own) = own else { continue };
                let into = other.layer(device, i, own.len())?;
                device.copy_all(&[own.copy(&into, [from.get(), to.get()], 1)?])?;
            }
            return Ok(());
        }
        let mut memory = lock(&self.memory);
        let Memory {
            layers, between, ..
        } = &mut *memory;
        for (own, between) in layers.iter().zip(&mut *between) {
            if let (Some(own), None) = (own, &between) {
                *between = Some(StateLayer::new(device, own.len(), 1)?);
            }
        }
        // A device doesn't copy within a buffer.
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for (own, between) in layers.iter().zip(&*between) {
            if let (Some(own), Some(between)) = (own, between) {
                out.push(own.copy(between, [from.get(), 0], 1)?);
                back.push(between.copy(own, [0, to.get()], 1)?);
            }
        }
        out.extend(back);
        device.copy_all(&out)
    }

    /// Copies of the states at `position`, which have been submitted, of all layers.
    pub(super) fn keep(
        &self,
        device: &Device,
        place: &Number,
        position: usize,
    ) -> Result<Snapshot, GpuError> {
        let layers = lock(&self.memory).layers.clone();
        let kept = layers.iter().map(|of| {
            let kept = of.as_ref();
            kept.map(|layer| layer.keep(device, place.get(), position))
                .transpose()
        });
        kept.collect()
    }

    /// Makes what [`Places::keep`] gave the states at `position`.
    pub(super) fn put_back(
        &self,
        device: &Device,
        place: &Number,
        position: usize,
        kept: &Snapshot,
    ) -> Result<(), GpuError> {
        for (i, kept) in kept.iter().enumerate() {
            if let Some(kept) = kept {
                let layer = self.layer(device, i, kept.len())?;
                layer.put_back(device, place.get(), position, kept)?;
            }
        }
        Ok(())
    }

    /// The values of `layer` at `position`, which have been computed; none if it has no states.
    pub(super) fn read(
        &self,
        device: &Device,
        layer: usize,
        place: &Number,
        position: usize,
    ) -> Result<Vec<u8>, GpuError> {
        let known = lock(&self.memory).layers[layer].clone();
        match known {
            Some(layer) => layer.read(device, place.get(), position),
            None => Ok(Vec::new()),
        }
    }
}
