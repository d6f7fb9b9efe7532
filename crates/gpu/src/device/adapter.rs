//! Choosing an adapter and negotiating features and limits.

use wgpu::{Adapter, Backend, Backends, DeviceType};

use crate::{AdapterInfo, AdapterKind, Api, DeviceOptions, Features, GpuError, Limits};

/// All adapters, the best for `options` first.
pub(super) async fn adapters(options: &DeviceOptions) -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = match cfg!(target_arch = "wasm32") {
        true => Backends::BROWSER_WEBGPU,
        false => Backends::VULKAN | Backends::METAL | Backends::DX12,
    };
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters = instance.enumerate_adapters(Backends::all()).await;
    adapters.sort_by_key(|adapter| {
        let info = describe(&adapter.get_info());
        (rank(info.kind, options.software), info.api == Api::Dx12)
    });
    adapters
}

/// Lower is better.
fn rank(kind: AdapterKind, software: bool) -> u8 {
    match kind {
        AdapterKind::Software if software => 0,
        AdapterKind::Discrete => 1,
        AdapterKind::Integrated => 2,
        AdapterKind::Virtual => 3,
        AdapterKind::Unknown => 4,
        AdapterKind::Software => 5,
    }
}

/// The adapter that `options` ask for.
pub(super) async fn choose(options: &DeviceOptions) -> Result<Adapter, GpuError> {
    let mut seen = Vec::new();
    for adapter in adapters(options).await {
        let info = describe(&adapter.get_info());
        let name = info.name.to_lowercase();
        let named =
            (options.adapter.as_ref()).is_none_or(|part| name.contains(&part.to_lowercase()));
        let kind = !options.software || info.kind == AdapterKind::Software;
        if named && kind {
            return Ok(adapter);
        }
        seen.push(format!("`{}`", info.name));
    }
    let wanted = match (&options.adapter, options.software) {
        (Some(part), _) => format!("expected an adapter named like `{part}`"),
        (None, true) => String::from("expected a software adapter"),
        (None, false) if cfg!(target_arch = "wasm32") => String::from("expected a WebGPU adapter"),
        (None, false) => String::from("expected a Vulkan, Metal or DX12 adapter"),
    };
    let found = match seen.as_slice() {
        [] => String::from("none"),
        names => names.join(", "),
    };
    Err(GpuError::NoAdapter {
        reason: format!("{wanted}, found {found}"),
    })
}

/// Describes an adapter in this crate's types.
pub(super) fn describe(info: &wgpu::AdapterInfo) -> AdapterInfo {
    AdapterInfo {
        name: info.name.clone(),
        driver: format!("{} {}", info.driver, info.driver_info)
            .trim()
            .into(),
        api: match info.backend {
            Backend::Vulkan => Api::Vulkan,
            Backend::Metal => Api::Metal,
            Backend::Dx12 => Api::Dx12,
            _ => Api::Other,
        },
        kind: match info.device_type {
            DeviceType::DiscreteGpu => AdapterKind::Discrete,
            DeviceType::IntegratedGpu => AdapterKind::Integrated,
            DeviceType::VirtualGpu => AdapterKind::Virtual,
            DeviceType::Cpu => AdapterKind::Software,
            DeviceType::Other => AdapterKind::Unknown,
        },
    }
}

/// What was negotiated with an adapter.
pub(super) struct Negotiated {
    pub(super) features: Features,
    pub(super) limits: Limits,
    /// The same as a device descriptor.
    pub(super) wgpu_features: wgpu::Features,
    pub(super) wgpu_limits: wgpu::Limits,
}

/// Size in bytes of the largest kernel parameters.
const IMMEDIATE_BYTES: u32 = 128;

/// Negotiates what `options` allow and the adapter supports.
pub(super) fn negotiate(adapter: &Adapter, options: &DeviceOptions) -> Negotiated {
    let (has, most, info) = (adapter.features(), adapter.limits(), adapter.get_info());
    let timestamps =
        wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
    let matrix = |p: &wgpu::CooperativeMatrixProperties| {
        let sizes = (p.m_size, p.n_size, p.k_size);
        sizes == (16, 16, 16)
            && p.ab_type == wgpu::CooperativeScalarType::F16
            && p.cr_type == wgpu::CooperativeScalarType::F32
    };
    let f16 = options.features.f16 && has.contains(wgpu::Features::SHADER_F16);
    let features = options.features.and(Features {
        // Kernels exchange values among at least eight invocations.
        subgroups: has.contains(wgpu::Features::SUBGROUP) && info.subgroup_min_size >= 8,
        f16,
        dot4: true,
        timestamps: has.contains(timestamps),
        immediates: has.contains(wgpu::Features::IMMEDIATES)
            && most.max_immediate_size >= IMMEDIATE_BYTES,
        pipeline_cache: has.contains(wgpu::Features::PIPELINE_CACHE),
        // These kernels read their subgroup id.
        cooperative_matrix: f16
            && has.contains(wgpu::Features::SUBGROUP)
            && options.features.subgroups
            && has.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
            && adapter.cooperative_matrix_properties().iter().any(matrix),
    });
    let mut wgpu_features = wgpu::Features::empty();
    for (wanted, feature) in [
        (features.subgroups, wgpu::Features::SUBGROUP),
        (features.f16, wgpu::Features::SHADER_F16),
        (features.timestamps, timestamps),
        (features.immediates, wgpu::Features::IMMEDIATES),
        (features.pipeline_cache, wgpu::Features::PIPELINE_CACHE),
        (
            features.cooperative_matrix,
            wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX,
        ),
    ] {
        if wanted {
            wgpu_features |= feature;
        }
    }
    let wgpu_limits = wgpu::Limits {
        max_buffer_size: most.max_buffer_size,
        max_storage_buffer_binding_size: most.max_storage_buffer_binding_size,
        max_compute_workgroup_storage_size: most.max_compute_workgroup_storage_size,
        max_compute_invocations_per_workgroup: most.max_compute_invocations_per_workgroup,
        max_compute_workgroup_size_x: most.max_compute_workgroup_size_x,
        max_immediate_size: if features.immediates {
            IMMEDIATE_BYTES
        } else {
            0
        },
        ..wgpu::Limits::default()
    };
    let binding_bytes = most.max_storage_buffer_binding_size.min(options.max_binding_bytes.unwrap_or(u64::MAX))
        // Kernels index in 32-bit words.
        / 256
        * 256;
    let limits = Limits {
        buffer_bytes: wgpu_limits.max_buffer_size,
        binding_bytes,
        binding_align: u64::from(wgpu_limits.min_storage_buffer_offset_alignment),
        workgroup_bytes: wgpu_limits.max_compute_workgroup_storage_size,
        workgroup_len: wgpu_limits
            .max_compute_invocations_per_workgroup
            .min(wgpu_limits.max_compute_workgroup_size_x),
        grid: wgpu_limits.max_compute_workgroups_per_dimension,
        min_subgroup: if features.subgroups {
            info.subgroup_min_size
        } else {
            1
        },
        max_subgroup: if features.subgroups {
            info.subgroup_max_size
        } else {
            1
        },
    };
    Negotiated {
        features,
        limits,
        wgpu_features,
        wgpu_limits,
    }
}
