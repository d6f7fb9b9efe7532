//! What devices offer, and what is asked of them.

use std::path::PathBuf;
use std::time::Duration;

use crate::Tuning;

/// What kernels may use beyond the least that every device has.
///
/// Each has a fallback, which is what its kernels are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Features {
    /// Reductions and exchanges within a subgroup, of at least [`Limits::min_subgroup`] invocations.
    pub subgroups: bool,
    /// 16-bit floats in shaders.
    pub f16: bool,
    /// Products of four packed bytes in one instruction.
    pub dot4: bool,
    /// Times on the device, within a pass.
    pub timestamps: bool,
    /// Parameters of a dispatch in its command, without a buffer.
    pub immediates: bool,
    /// Compiled pipelines kept on disk.
    pub pipeline_cache: bool,
    /// Products of 16×16 matrices of f16 with sums in f32, by a subgroup. Needs `f16`.
    pub cooperative_matrix: bool,
}

impl Features {
    /// All of them.
    pub const ALL: Features = Features {
        subgroups: true,
        f16: true,
        dot4: true,
        timestamps: true,
        immediates: true,
        pipeline_cache: true,
        cooperative_matrix: true,
    };

    /// None of them: the least that every device has.
    pub const NONE: Features = Features {
        subgroups: false,
        f16: false,
        dot4: false,
        timestamps: false,
        immediates: false,
        pipeline_cache: false,
        cooperative_matrix: false,
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
        }
    }

    /// Those that `other` hasn't.
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
        })
    }

    /// Each by itself, with its name.
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

    /// The names of those there are, for people to read.
    pub fn names(&self) -> Vec<&'static str> {
        let has = |feature: Features| self.and(feature) == feature;
        let named = Features::NAMED.into_iter();
        named
            .filter_map(|(name, feature)| has(feature).then_some(name))
            .collect()
    }

    /// The feature of that name alone.
    pub fn named(name: &str) -> Option<Features> {
        let mut named = Features::NAMED.into_iter();
        named.find_map(|(known, feature)| (known == name).then_some(feature))
    }
}

/// What a device can hold and do at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a buffer.
    pub buffer_bytes: u64,
    /// Bytes of a buffer that a kernel sees at once. Larger matrices are cut by rows.
    pub binding_bytes: u64,
    /// What offsets of bindings are multiples of.
    pub binding_align: u64,
    /// Bytes of a workgroup's shared memory.
    pub workgroup_bytes: u32,
    /// Invocations of a workgroup.
    pub workgroup_len: u32,
    /// Workgroups of a dispatch, in each dimension.
    pub grid: u32,
    /// The smallest subgroup there may be; 1 without [`Features::subgroups`].
    pub min_subgroup: u32,
    /// The largest.
    pub max_subgroup: u32,
}

/// The interface through which a GPU is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
#[non_exhaustive]
pub enum Api {
    Vulkan,
    Metal,
    Dx12,
    Other,
}

/// What kind of device an adapter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdapterKind {
    /// With memory of its own.
    Discrete,
    /// Sharing the processor's memory.
    Integrated,
    /// A part of a GPU, given to a virtual machine.
    Virtual,
    /// The processor, pretending.
    Software,
    /// The driver doesn't say.
    Unknown,
}

/// An adapter, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInfo {
    /// Name of the device.
    pub name: String,
    /// Name and version of the driver.
    pub driver: String,
    /// How it is reached.
    pub api: Api,
    /// What it is.
    pub kind: AdapterKind,
}

/// Which device is wanted, and what it may be used for.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Only adapters whose name contains this, whatever the case.
    pub adapter: Option<String>,
    /// Take a software adapter even if there is another. Without, one is taken where there is no other.
    pub software: bool,
    /// What may be used if the adapter has it. Tests mask features to reach the kernels without.
    pub features: Features,
    /// Most bytes that a kernel may see of a buffer, to test what lies beyond.
    pub max_binding_bytes: Option<u64>,
    /// Most bytes of device memory that buffers may take together.
    pub memory_budget: Option<u64>,
    /// A folder for compiled pipelines, of this user's own: what lies there is handed to the driver. It
    /// is written to when the device is dropped.
    pub pipeline_cache: Option<PathBuf>,
    /// How products share out their work, unless a recorder is told otherwise.
    pub tuning: Tuning,
    /// How long to wait for the device before it counts as hanging.
    pub timeout: Duration,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            adapter: None,
            software: false,
            features: Features::ALL,
            max_binding_bytes: None,
            memory_budget: None,
            pipeline_cache: None,
            tuning: Tuning::default(),
            timeout: Duration::from_secs(60),
        }
    }
}
