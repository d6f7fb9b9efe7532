//! Features and limits of devices, and options for opening one.

use std::path::PathBuf;
use std::time::Duration;

use crate::Tuning;

/// What kernels may use beyond the baseline of every device.
///
/// Each has a fallback, which is the reference for its kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Features {
    /// Reductions and exchanges within a subgroup, of at least [`Limits::min_subgroup`] invocations.
    pub subgroups: bool,
    /// 16-bit floats in shaders.
    pub f16: bool,
    /// Dot products of four packed bytes in one instruction.
    pub dot4: bool,
    /// Timestamps on the device, within a pass.
    pub timestamps: bool,
    /// Parameters of a dispatch as immediates, without a buffer.
    pub immediates: bool,
    /// Compiled pipelines cached on disk.
    pub pipeline_cache: bool,
    /// Cooperative matrices: 16×16 products of f16 with f32 accumulators, by a subgroup. Needs `f16`.
    pub cooperative_matrix: bool,
    /// The kernels that use cooperative matrices run without them, natively: to test these kernels, which are slow then.
    /// Not one of [`Features::ALL`]; devices with cooperative matrices don't have it.
    pub emulated_matrix: bool,
}

impl Features {
    /// All but those that only tests ask for.
    pub const ALL: Features = Features {
        subgroups: true,
        f16: true,
        dot4: true,
        timestamps: true,
        immediates: true,
        pipeline_cache: true,
        cooperative_matrix: true,
        emulated_matrix: false,
    };

    /// None of them: the baseline of every device.
    pub const NONE: Features = Features {
        subgroups: false,
        f16: false,
        dot4: false,
        timestamps: false,
        immediates: false,
        pipeline_cache: false,
        cooperative_matrix: false,
        emulated_matrix: false,
    };

    /// Those that both have.
    #[must_use]
    pub const fn and(self, other: Features) -> Features {
        Features {
            subgroups: self.subgroups && other.subgroups,
            f16: self.f16 && other.f16,
            dot4: self.dot4 && other.dot4,
            timestamps: self.timestamps && other.timestamps,
            immediates: self.immediates && other.immediates,
            pipeline_cache: self.pipeline_cache && other.pipeline_cache,
            cooperative_matrix: self.cooperative_matrix && other.cooperative_matrix,
            emulated_matrix: self.emulated_matrix && other.emulated_matrix,
        }
    }

    /// Those that `other` lacks.
    #[must_use]
    pub const fn without(self, other: Features) -> Features {
        self.and(Features {
            subgroups: !other.subgroups,
            f16: !other.f16,
            dot4: !other.dot4,
            timestamps: !other.timestamps,
            immediates: !other.immediates,
            pipeline_cache: !other.pipeline_cache,
            cooperative_matrix: !other.cooperative_matrix,
            emulated_matrix: !other.emulated_matrix,
        })
    }

    /// Each on its own, with its name.
    const NAMED: [(&'static str, Features); 7] = {
        const NONE: Features = Features::NONE;
        [
            (
                "subgroups",
                Features {
                    subgroups: true,
                    ..NONE
                },
            ),
            ("f16", Features { f16: true, ..NONE }),
            ("dot4", Features { dot4: true, ..NONE }),
            (
                "timestamps",
                Features {
                    timestamps: true,
                    ..NONE
                },
            ),
            (
                "immediates",
                Features {
                    immediates: true,
                    ..NONE
                },
            ),
            (
                "pipeline-cache",
                Features {
                    pipeline_cache: true,
                    ..NONE
                },
            ),
            (
                "cooperative-matrix",
                Features {
                    cooperative_matrix: true,
                    ..NONE
                },
            ),
        ]
    };

    /// The names of those enabled, for display.
    pub fn names(&self) -> Vec<&'static str> {
        let has = |feature: Features| self.and(feature) == feature;
        let named = Features::NAMED.into_iter();
        named
            .filter_map(|(name, feature)| has(feature).then_some(name))
            .collect()
    }

    /// The single feature with that name.
    pub fn named(name: &str) -> Option<Features> {
        let mut named = Features::NAMED.into_iter();
        named.find_map(|(known, feature)| (known == name).then_some(feature))
    }
}

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a buffer.
    pub buffer_bytes: u64,
    /// Maximum bytes of a binding. Larger matrices are split by rows.
    pub binding_bytes: u64,
    /// Alignment of binding offsets.
    pub binding_align: u64,
    /// Bytes of shared memory per workgroup.
    pub workgroup_bytes: u32,
    /// Invocations per workgroup.
    pub workgroup_len: u32,
    /// Workgroups of a dispatch, per dimension.
    pub grid: u32,
    /// The smallest possible subgroup; 1 without [`Features::subgroups`].
    pub min_subgroup: u32,
    /// The largest possible subgroup.
    pub max_subgroup: u32,
}

/// The graphics API through which a GPU is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
#[non_exhaustive]
pub enum Api {
    Vulkan,
    Metal,
    Dx12,
    Other,
}

/// The kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdapterKind {
    /// Discrete: with memory of its own.
    Discrete,
    /// Integrated: sharing the processor's memory.
    Integrated,
    /// Virtual: a part of a GPU, given to a virtual machine.
    Virtual,
    /// Software, on the processor.
    Software,
    /// Not reported by the driver.
    Unknown,
}

/// An adapter, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInfo {
    /// Name of the device.
    pub name: String,
    /// Name and version of the driver.
    pub driver: String,
    /// The API it is accessed through.
    pub api: Api,
    /// Its kind.
    pub kind: AdapterKind,
    /// Where it is plugged in, as `0000:41:00.0`, where the driver tells.
    pub bus: Option<String>,
}

/// Options for selecting and using a device.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Only adapters whose name contains this, case-insensitively.
    pub adapter: Option<String>,
    /// Only the adapter at this place among all of them, best first.
    pub adapter_index: Option<usize>,
    /// Prefer a software adapter. Otherwise one is used only if there is no other.
    pub software: bool,
    /// Prefer an integrated adapter to a discrete one.
    pub low_power: bool,
    /// Features that may be used if the adapter has them. Tests mask features to reach the kernels without.
    pub features: Features,
    /// Limits the bytes of a binding, to test what happens beyond.
    pub max_binding_bytes: Option<u64>,
    /// Limits the total bytes of device memory of buffers.
    pub memory_budget: Option<u64>,
    /// A folder for compiled pipelines, private to this user: its contents are handed to the driver. It is
    /// written to when the device is dropped.
    pub pipeline_cache: Option<PathBuf>,
    /// Launch configurations of products, unless a recorder overrides them.
    pub tuning: Tuning,
    /// How long to wait for the device before it is considered hung.
    pub timeout: Duration,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            adapter: None,
            adapter_index: None,
            software: false,
            low_power: false,
            features: Features::ALL,
            max_binding_bytes: None,
            memory_budget: None,
            pipeline_cache: None,
            tuning: Tuning::default(),
            timeout: Duration::from_secs(60),
        }
    }
}
