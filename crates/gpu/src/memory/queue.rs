//! Uploads through a browser's queue, which has buffers of its own and can't be waited for.

use super::Buffer;
use crate::{Device, GpuError};

/// Stands for the slots that native uploads have.
#[derive(Debug)]
pub(super) struct Ring;

impl Ring {
    #[allow(clippy::unnecessary_wraps)] // natively it can fail
    pub(super) fn new(_: &Device, _: usize, _: usize) -> Result<Ring, GpuError> {
        Ok(Ring)
    }

    /// Sends one piece, whole words.
    #[allow(clippy::unused_self)]
    pub(super) fn send(
        &mut self,
        device: &Device,
        to: &Buffer,
        offset: u64,
        piece: &[u8],
    ) -> Result<(), GpuError> {
        device.write(to, offset, piece)
    }
}
