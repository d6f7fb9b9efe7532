//! Options for opening a GPU: its features, without those that a package disables, and launch configurations.
//!
//! Device capabilities take precedence, then flags, then measurements of `sterna tune`, then a package's
//! hints, then the defaults.

mod file;

use sterna_format::rdrr::RuntimeOptimizations;
use sterna_gpu::tuning::LaunchConfig;
use sterna_gpu::tuning::hints::{self, Capabilities, Decision, Sizing};
use sterna_gpu::{AdapterCaps, DeviceOptions, Features, Tuning};

pub(crate) use file::{Found, Key, check, kept, remove, save};

use crate::output;

/// The result of a package's hints, and of measurements, for an adapter.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The features kernels may use.
    pub(crate) features: Features,
    /// The launch configurations of products.
    pub(crate) tuning: Tuning,
    /// The resolution of each hint.
    pub(crate) decisions: Vec<Decision>,
}

impl Settings {
    /// For the adapter of `offer`. Launch configurations are the defaults unless `is_tunable`.
    pub(crate) fn new(
        offer: &AdapterCaps,
        hints: &RuntimeOptimizations,
        is_tunable: bool,
    ) -> Settings {
        let resolve = |sizing| hints::resolve(hints, Some(&Capabilities::new(offer, sizing)));
        // Masked features don't depend on measurements; measurements depend on features.
        let features = resolve(Sizing::Rules).choices.mask(offer.features);
        let measured = match is_tunable {
            true => measured(&Key::new(&offer.info, features)),
            false => Tuning::default(),
        };
        let resolved = resolve(match (is_tunable, measured.n_products()) {
            (false, _) => Sizing::Rules,
            (true, 0) => Sizing::Hints,
            (true, _) => Sizing::Measured,
        });
        Settings {
            features,
            tuning: measured.with_others(LaunchConfig {
                workgroup: resolved.choices.gemv_workgroup,
                ..LaunchConfig::default()
            }),
            decisions: resolved.decisions,
        }
    }

    /// Applies them to the options of a device.
    pub(crate) fn apply(self, options: &mut DeviceOptions) {
        options.features = options.features.and(self.features);
        options.tuning = self.tuning;
    }
}

/// The valid measurements for the adapter as it is now; prints a note about an invalid file.
fn measured(key: &Key) -> Tuning {
    match kept(key) {
        Found::Kept(kept) => Tuning::default().with(kept.configs()),
        Found::Damaged(reason) => {
            output::note(format_args!(
                "note: {reason}; not used, `sterna tune` measures again"
            ));
            Tuning::default()
        }
        Found::Nothing | Found::Stale(_) => Tuning::default(),
    }
}

#[cfg(test)]
mod tests {
    use sterna_format::DType;
    use sterna_gpu::tuning::{Product, RowClass};
    use sterna_gpu::{AdapterInfo, AdapterKind, Api, Limits, WeightKind};

    use super::*;

    #[test]
    fn every_feature_that_hints_know_is_one() {
        for name in hints::FEATURES {
            assert!(hints::feature(name).is_some(), "{name}");
        }
        assert_eq!(hints::feature("f32"), None);
    }

    #[test]
    fn hints_count_where_nothing_was_measured() {
        let offer = AdapterCaps {
            info: AdapterInfo {
                name: "An adapter that nobody measured".into(),
                driver: "none".into(),
                api: Api::Other,
                kind: AdapterKind::Unknown,
                bus: None,
            },
            features: Features::ALL,
            limits: Limits {
                buffer_bytes: 1 << 30,
                binding_bytes: 1 << 30,
                binding_align: 256,
                workgroup_bytes: 48 << 10,
                workgroup_len: 1024,
                grid: 65_535,
                min_subgroup: 32,
                max_subgroup: 32,
            },
        };
        let product = Product {
            weights: WeightKind::Blocks(DType::Q4_K),
            n: 8,
            k: 256,
            rows: RowClass::One,
        };
        let hints = RuntimeOptimizations {
            preferred_kernels: vec![("matmul".into(), "f32".into())],
            workgroup_overrides: vec![("gemv_f16".into(), [32, 2, 1])],
            disable_features: vec!["shader-f16".into()],
            ..RuntimeOptimizations::default()
        };
        for (is_tunable, workgroup) in [(true, Some(64)), (false, None)] {
            let settings = Settings::new(&offer, &hints, is_tunable);
            assert_eq!(settings.tuning.config(&product).workgroup, workgroup);
            assert_eq!(settings.decisions.len(), 3);
            let mut options = DeviceOptions::default();
            settings.apply(&mut options);
            let masked = Features::ALL.without(options.features);
            assert_eq!(masked.names(), ["f16", "cooperative-matrix"]);
        }
        let plain = Settings::new(&offer, &RuntimeOptimizations::default(), true);
        assert_eq!(
            (plain.features, plain.tuning),
            (offer.features, Tuning::default())
        );
    }
}
