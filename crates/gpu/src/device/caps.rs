//! What adapters offer, before one is opened.

use super::adapter;
use crate::kernels::linear::has_matrix_units;
use crate::wgpu::Adapter;
use crate::{AdapterInfo, DeviceOptions, Features, Limits};

/// An adapter, and what is negotiated with it if it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterCaps {
    /// The adapter.
    pub info: AdapterInfo,
    /// The features kernels would use on it.
    pub features: Features,
    /// Its limits.
    pub limits: Limits,
}

impl AdapterCaps {
    /// What `adapter` offers a device with `options`.
    pub(super) fn of(adapter: &Adapter, options: &DeviceOptions) -> AdapterCaps {
        let negotiated = adapter::negotiate(adapter, options);
        AdapterCaps {
            info: adapter::describe(adapter),
            features: negotiated.features,
            limits: negotiated.limits,
        }
    }

    /// Whether matrix multiplications and attention of many rows use cooperative matrices.
    pub fn has_matrix_units(&self) -> bool {
        has_matrix_units(self.features, &self.limits)
    }

    /// Which kernel variants would run: purpose and variant.
    pub fn variants(&self) -> [(&'static str, &'static str); 5] {
        let one_of = |has, with, without| if has { with } else { without };
        let has = self.features;
        let units = self.has_matrix_units();
        [
            ("sums", one_of(has.subgroups, "subgroups", "shared memory")),
            ("products", one_of(has.dot4, "dot4", "byte by byte")),
            (
                "many rows",
                one_of(units, "cooperative matrix", "tiles of packed bytes"),
            ),
            (
                "parameters",
                one_of(has.immediates, "immediates", "uniform buffer"),
            ),
            (
                "pipelines",
                one_of(
                    has.pipeline_cache,
                    "kept on disk",
                    "compiled at every start",
                ),
            ),
        ]
    }
}
