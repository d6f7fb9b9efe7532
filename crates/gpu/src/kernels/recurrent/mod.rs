//! Layers that remember a state of fixed size instead of keys and values: short convolutions, scans of
//! matrices that heads remember, and time mixing.

mod conv;
mod rwkv;
mod scan;
mod step;

use super::attention::Position;
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::{Device, GpuError, ReadRange};

pub use conv::{Convolution, MAX_TAPS, convolve};
pub use rwkv::{
    Shift, Wkv, Wkv4, WkvFinish, WkvInputs, WkvShape, previous, token_shift, wkv, wkv_finish,
    wkv_prepare, wkv4,
};
pub use scan::{MAX_ROWS, Mamba, Recurrence, Scan, ScanShape, mamba, scan};
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

/// The latest states of a layer.
///
/// Memory: `[SLOTS, len]` of f32. At position zero a state is zeros, whatever the memory holds.
#[derive(Debug, Clone)]
pub struct StateLayer {
    len: usize,
    slots: Buffer,
}

impl StateLayer {
    /// Room for states of `len` values.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] if they exceed the device's binding size.
    pub fn new(device: &Device, len: usize) -> Result<StateLayer, GpuError> {
        let bytes = (len as u64).saturating_mul(4 * SLOTS as u64);
        let limits = device.limits();
        if bytes > limits.binding_bytes {
            return Err(GpuError::Unsupported {
                what: format!("states of {len} values"),
                reason: format!("their {bytes} bytes exceed {}", limits.binding_bytes),
            });
        }
        Ok(StateLayer {
            len,
            slots: device.buffer("states", bytes)?,
        })
    }

    /// Values of a state.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether states have no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies all states to other memory of the same shape.
    ///
    /// Errors: [`GpuError::Shape`] if the shapes differ.
    pub fn copy_to(&self, device: &Device, to: &StateLayer) -> Result<(), GpuError> {
        expect("copying states: values", self.len, to.len)?;
        let bytes = self.bytes(SLOTS);
        device.copy((&self.slots, 0), (&to.slots, 0), bytes)
    }

    /// A copy of the state at `position`.
    ///
    /// Errors: as [`StateLayer::new`].
    pub fn keep(&self, device: &Device, position: usize) -> Result<KeptState, GpuError> {
        let kept = device.buffer("checkpoints", self.bytes(1))?;
        let from = self.bytes(position % SLOTS);
        device.copy((&self.slots, from), (&kept, 0), self.bytes(1))?;
        Ok(KeptState {
            len: self.len,
            values: kept,
        })
    }

    /// Makes what [`StateLayer::keep`] gave the state at `position`.
    ///
    /// Errors: [`GpuError::Shape`] if it has another number of values.
    pub fn put_back(
        &self,
        device: &Device,
        position: usize,
        kept: &KeptState,
    ) -> Result<(), GpuError> {
        expect("a kept state: values", self.len, kept.len)?;
        let to = self.bytes(position % SLOTS);
        device.copy((&kept.values, 0), (&self.slots, to), self.bytes(1))
    }

    /// The values of the state at `position`.
    ///
    /// Errors: [`GpuError::Lost`].
    pub fn read(&self, device: &Device, position: usize) -> Result<Vec<u8>, GpuError> {
        let first = position % SLOTS * self.len;
        let range = ReadRange::of::<u32>(&self.slots, first..first + self.len);
        Ok(device.submit(&[], &[range])?.wait()?.concat())
    }

    fn bytes(&self, n_slots: usize) -> u64 {
        (n_slots * self.len) as u64 * 4
    }
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

/// A part of a layer's state, read at the position of the first row of a batch and written at that after its last.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    /// The layer's states.
    pub layer: &'a StateLayer,
    /// Where the part begins, in values.
    pub first: usize,
    /// The position of the first row.
    pub position: Position<'a>,
}

impl State<'_> {
    /// Errors unless `len` values are within the layer's states.
    fn check(&self, what: &'static str, len: usize) -> Result<(), GpuError> {
        expect_most(what, self.layer.len, self.first.saturating_add(len))
    }
}
