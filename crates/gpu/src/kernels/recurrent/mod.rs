//! Layers that remember a state of fixed size instead of keys and values: short convolutions, scans of
//! matrices that heads remember, and time mixing.

mod conv;
mod rwkv;
mod scan;
mod step;

use super::{Rows, Sequences};
use crate::error::{expect, expect_most};
use crate::memory::{Buffer, BufferCopy};
use crate::{Device, GpuError, ReadRange};

pub use conv::{Convolution, MAX_TAPS, convolve};
pub use rwkv::{
    Shift, Wkv, Wkv4, WkvFinish, WkvInputs, WkvShape, previous, token_shift, wkv, wkv_finish,
    wkv_prepare, wkv4,
};
pub use scan::{Gates, MAX_ROWS, Mamba, Scan, ScanShape, mamba, scan, scan_prepare};
pub use step::{Step, StepVectors, StepWeights, can_step, step};

pub(crate) use conv::ConvParams;
pub(crate) use rwkv::{
    PreviousParams, ShiftParams, Wkv4Params, WkvFinishParams, WkvParams, WkvPrepareParams,
};
pub(crate) use scan::{MambaParams, PrepareParams, ScanParams};
pub(crate) use step::StepParams;

/// The states that a layer's memory holds: those of as many consecutive positions, each in the slot of its position
/// modulo this number. A step may run this many positions less one ahead of the last state that is still needed.
pub const SLOTS: usize = 4;

/// The latest states of a layer, of several sequences. Which place is a sequence's is in a table
/// ([`sequence_table`](super::sequence_table)).
///
/// Memory: `[n_places, SLOTS, len]` of f32. At position zero a state is zeros, whatever the memory holds.
#[derive(Debug, Clone)]
pub struct StateLayer {
    len: usize,
    n_places: usize,
    slots: Buffer,
}

impl StateLayer {
    /// Room for states of `len` values of each of `n_places` sequences.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] if there are more places than
    /// [`StateLayer::most_places`].
    pub fn new(device: &Device, len: usize, n_places: usize) -> Result<StateLayer, GpuError> {
        let most = StateLayer::most_places(device, len);
        if n_places > most {
            return Err(GpuError::Unsupported {
                what: format!("states of {len} values of {n_places} sequences"),
                reason: format!("a buffer of the device holds those of {most}"),
            });
        }
        Ok(StateLayer {
            len,
            n_places,
            slots: device.buffer("states", bytes(len, SLOTS) * n_places as u64)?,
        })
    }

    /// The most sequences whose states of `len` values the device has room for in a buffer.
    pub fn most_places(device: &Device, len: usize) -> usize {
        let limits = device.limits();
        let most = limits.binding_bytes.min(limits.buffer_bytes);
        // Kernels number values by 32 bits.
        (most.min(1 << 34) / bytes(len, SLOTS).max(1)) as usize
    }

    /// Values of a state.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether states have no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sequences that there is room for.
    pub fn n_places(&self) -> usize {
        self.n_places
    }

    /// What copies all states of `n` places from `from` on to those from `into` on in other memory of the same shape.
    ///
    /// Errors: [`GpuError::Shape`] if there are no such places, or the shapes differ.
    pub fn copy<'a>(
        &'a self,
        to: &'a StateLayer,
        [from, into]: [u32; 2],
        n: usize,
    ) -> Result<BufferCopy<'a>, GpuError> {
        expect("copying states: values", self.len, to.len)?;
        Ok(BufferCopy {
            bytes: bytes(self.len, SLOTS) * n as u64,
            from: (&self.slots, self.at(from, 0, n)?),
            to: (&to.slots, to.at(into, 0, n)?),
        })
    }

    /// A copy of the state at `position` of the sequence at `place`.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Shape`] if there is no such place.
    pub fn keep(
        &self,
        device: &Device,
        place: u32,
        position: usize,
    ) -> Result<KeptState, GpuError> {
        let from = self.at(place, position, 1)?;
        let kept = device.buffer("checkpoints", bytes(self.len, 1))?;
        device.copy((&self.slots, from), (&kept, 0), bytes(self.len, 1))?;
        Ok(KeptState {
            len: self.len,
            values: kept,
        })
    }

    /// Makes what [`StateLayer::keep`] gave the state at `position` of the sequence at `place`.
    ///
    /// Errors: [`GpuError::Shape`] if it has another number of values, or there is no such place.
    pub fn put_back(
        &self,
        device: &Device,
        place: u32,
        position: usize,
        kept: &KeptState,
    ) -> Result<(), GpuError> {
        expect("a kept state: values", self.len, kept.len)?;
        let to = self.at(place, position, 1)?;
        device.copy((&kept.values, 0), (&self.slots, to), bytes(self.len, 1))
    }

    /// The values of the state at `position` of the sequence at `place`.
    ///
    /// Errors: [`GpuError::Lost`]; [`GpuError::Shape`] if there is no such place.
    pub fn read(&self, device: &Device, place: u32, position: usize) -> Result<Vec<u8>, GpuError> {
        let first = (self.at(place, position, 1)? / 4) as usize;
        let range = ReadRange::of::<u32>(&self.slots, first..first + self.len);
        Ok(device.submit(&[], &[range])?.wait()?.concat())
    }

    /// The byte where the state at `position` begins, of the first of `n` places.
    fn at(&self, place: u32, position: usize, n: usize) -> Result<u64, GpuError> {
        let place = place as usize;
        expect_most("places of states", self.n_places, place.saturating_add(n))?;
        Ok(bytes(self.len, place * SLOTS + position % SLOTS))
    }
}

/// Bytes of `n` states of `len` values.
fn bytes(len: usize, n: usize) -> u64 {
    (len as u64).saturating_mul(4 * n as u64)
}

/// A copy of a state.
#[derive(Debug, Clone)]
pub struct KeptState {
    len: usize,
    values: Buffer,
}

impl KeptState {
    /// The state that [`StateLayer::read`] gave as `bytes`.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, bytes: &[u8]) -> Result<KeptState, GpuError> {
        let values = device.buffer("checkpoints", bytes.len() as u64)?;
        device.write(&values, 0, bytes)?;
        Ok(KeptState {
            len: bytes.len() / 4,
            values,
        })
    }

    /// Its values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A part of a layer's states: that of each of some sequences is read at the position of its first row, and written at
/// that after its last.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// The layer's states.
    pub layer: &'a StateLayer,
    /// Where the part begins, in values.
    pub first: usize,
    /// Whose states they are, each with a row at least.
    pub sequences: Sequences<'a>,
}

impl State<'_> {
    /// Errors unless `len` values are within the layer's states, and `rows` are enough for one of the sequences.
    fn check(&self, what: &'static str, len: usize, rows: &Rows<'_>) -> Result<(), GpuError> {
        self.sequences.check(rows)?;
        expect_most(what, self.layer.len, self.first.saturating_add(len))
    }
}

/// A condition as a constant of a kernel.
fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}
