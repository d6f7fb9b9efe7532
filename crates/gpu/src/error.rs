//! Errors of operations on a GPU.

/// Why an operation of this crate failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no adapter that fits the options.
    #[error("no GPU: {reason}")]
    NoAdapter {
        /// The requested and the available adapters.
        reason: String,
    },
    /// The adapter could not open a device.
    #[error("GPU `{adapter}` could not open a device: {reason}")]
    NoDevice {
        /// Name of the adapter.
        adapter: String,
        /// The driver's message.
        reason: String,
    },
    /// The device is gone: reset, unplugged, or lost on request ([`Device::lose`](crate::Device::lose)).
    ///
    /// All its buffers and pipelines are gone with it; a new [`Device`](crate::Device) is needed.
    #[error("GPU device was lost: {reason}")]
    Lost {
        /// The driver's message.
        reason: String,
    },
    /// Memory on the device, or the budget, is exhausted.
    #[error(
        "GPU memory: {what} needs {need} bytes, where {used} of {budget} are in use{driver}",
        driver = if *.refused { "; the driver refused" } else { "" }
    )]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes requested.
        need: u64,
        /// Bytes in use.
        used: u64,
        /// The limit in bytes; `u64::MAX` if there is no budget.
        budget: u64,
        /// Whether it was the driver that refused, not the budget.
        refused: bool,
    },
    /// A shape mismatch: a length, a width, a number of rows.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// What has the shape.
        what: &'static str,
        /// What was expected.
        expected: u64,
        /// What was found.
        found: u64,
    },
    /// Something this device, or this crate, does not support.
    #[error("{what}: not supported on this GPU: {reason}")]
    Unsupported {
        /// What was requested.
        what: String,
        /// Why it isn't supported.
        reason: String,
    },
    /// The device's validation rejected a command: a defect of this crate, or of a driver.
    #[error("GPU: {what}: {reason}")]
    Refused {
        /// The operation.
        what: String,
        /// The device's message.
        reason: String,
    },
    /// The device didn't finish in time.
    #[error("GPU didn't finish within {seconds} s")]
    Timeout {
        /// The time limit.
        seconds: u64,
    },
}

impl GpuError {
    /// Whether the device is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, GpuError::Lost { .. })
    }
}

/// [`GpuError::Shape`] unless `found` equals `expected`.
pub(crate) fn expect(what: &'static str, expected: usize, found: usize) -> Result<(), GpuError> {
    if expected == found {
        return Ok(());
    }
    Err(GpuError::Shape {
        what,
        expected: expected as u64,
        found: found as u64,
    })
}

/// [`GpuError::Shape`] unless `found` is at most `most`.
pub(crate) fn expect_most(what: &'static str, most: usize, found: usize) -> Result<(), GpuError> {
    expect(what, found.min(most), found)
}
