//! Rotations of the inputs of products, whose matrices are stored in a rotated basis.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use sterna_gpu::graph::{Graph, Op, View};
use sterna_gpu::kernels::rotate::Rotation;
use sterna_gpu::{Device, GpuError};
use sterna_kernels::hadamard;

/// The rotations of the matrices that there are: equal ones are one on the device, so that matrices can be multiplied
/// together. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Rotations(Arc<Mutex<Vec<Known>>>);

/// A rotation while there are matrices with it, and the same on the device.
type Known = (Weak<hadamard::Rotation>, Rotation);

impl Rotations {
    /// `rotation` on the device.
    pub(super) fn get(
        &self,
        device: &Device,
        rotation: Option<Arc<hadamard::Rotation>>,
    ) -> Result<Option<Rotation>, GpuError> {
        let Some(rotation) = rotation else {
            return Ok(None);
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(of, _)| of.strong_count() > 0);
        let same = |of: &Weak<hadamard::Rotation>| of.upgrade().is_some_and(|of| of == rotation);
        if let Some((_, known)) = known.iter().find(|(of, _)| same(of)) {
            return Ok(Some(known.clone()));
        }
        let regroup = rotation.regroup();
        let on_device = Rotation {
            signs: device.upload(rotation.signs())?,
            width: rotation.width(),
            block: rotation.block(),
            regroup: regroup.map(|heads| [heads.n_groups, heads.n_each, heads.head_dim]),
        };
        known.push((Arc::downgrade(&rotation), on_device.clone()));
        Ok(Some(on_device))
    }
}

/// `x`, rotated if there is a `rotation`, until the next operation that needs scratch memory.
pub(super) fn rotated(
    graph: &mut Graph,
    rotation: Option<&Rotation>,
    x: &View,
) -> Result<View, GpuError> {
    let Some(rotation) = rotation else {
        return Ok(x.clone());
    };
    let scratch = graph.scratch(x.n_rows * x.width)?;
    let out = View::new(&scratch, x.n_rows, x.width);
    graph.push(Op::Rotate {
        rotation: rotation.clone(),
        inverse: false,
        x: x.clone(),
        out: out.clone(),
    });
    Ok(out)
}
