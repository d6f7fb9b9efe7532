//! Routes on the device.

use sterna_gpu::graph::Routes;
use sterna_gpu::{Device, GpuError};

use super::buffer::room;
use crate::backend::BackendError;

/// The experts of each row, on the device. Their memory is reused from step to step.
#[derive(Debug, Default)]
pub struct GpuRoutes(Option<Routes>);

impl GpuRoutes {
    /// Room for the routes of `n_rows` rows to `n_used` experts each, with unspecified contents.
    pub(super) fn shape(
        &mut self,
        device: &Device,
        n_rows: usize,
        n_used: usize,
    ) -> Result<Routes, GpuError> {
        let (mut experts, mut weights) = match self.0.take() {
            Some(known) => (Some(known.experts), Some(known.weights)),
            None => (None, None),
        };
        let len = n_rows * n_used;
        let routes = Routes {
            experts: room(device, &mut experts, len)?,
            weights: room(device, &mut weights, len)?,
            n_rows,
            n_used,
        };
        Ok(self.0.insert(routes).clone())
    }

    /// The routes.
    pub(super) fn get(&self) -> Result<&Routes, BackendError> {
        self.0.as_ref().ok_or_else(|| {
            BackendError::from(GpuError::Shape {
                what: "routes of an operand",
                expected: 1,
                found: 0,
            })
        })
    }
}
