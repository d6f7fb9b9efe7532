//! What `wgpu` says of adapters, and what is asked of them.

use wgpu::{Adapter, Backend, Backends, Device, DeviceType, Queue};

use super::{IMMEDIATE_BYTES, Negotiated, index_in_words};
use crate::device::trusted;
use crate::{AdapterInfo, AdapterKind, Api, DeviceOptions, Features, Limits};

/// All adapters.
pub(in crate::device) async fn all(_: &DeviceOptions) -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    let instance = wgpu::Instance::new(descriptor);
    instance.enumerate_adapters(Backends::all()).await
}

/// Describes an adapter in this crate's types.
pub(in crate::device) fn describe(adapter: &Adapter) -> AdapterInfo {
    let info = adapter.get_info();
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
        bus: Some(info.device_pci_bus_id.to_lowercase()).filter(|bus| !bus.is_empty()),
    }
}

/// The combined features of `wgpu` for timestamps within a pass.
const TIMESTAMPS: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES);

/// Negotiates what `options` allow and the adapter supports.
pub(in crate::device) fn negotiate(adapter: &Adapter, options: &DeviceOptions) -> Negotiated {
    let (has, most, info) = (adapter.features(), adapter.limits(), adapter.get_info());
    let matrix = |p: &wgpu::CooperativeMatrixProperties| {
        let sizes = (p.m_size, p.n_size, p.k_size);
        sizes == (16, 16, 16)
            && p.ab_type == wgpu::CooperativeScalarType::F16
            && p.cr_type == wgpu::CooperativeScalarType::F32
    };
    let f16 = options.features.f16 && has.contains(wgpu::Features::SHADER_F16);
    let subgroups = options.features.subgroups && has.contains(wgpu::Features::SUBGROUP);
    // These kernels read their subgroup id.
    let cooperative_matrix = f16
        && subgroups
        && has.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
        && adapter.cooperative_matrix_properties().iter().any(matrix);
    let features = options.features.and(Features {
        // Kernels exchange values among at least eight invocations.
        subgroups: has.contains(wgpu::Features::SUBGROUP) && info.subgroup_min_size >= 8,
        f16,
        dot4: true,
        timestamps: has.contains(TIMESTAMPS),
        immediates: has.contains(wgpu::Features::IMMEDIATES)
            && most.max_immediate_size >= IMMEDIATE_BYTES,
        pipeline_cache: has.contains(wgpu::Features::PIPELINE_CACHE),
        cooperative_matrix,
        emulated_matrix: f16 && subgroups && !cooperative_matrix,
    });
    let defaults = wgpu::Limits::default();
    let limits = Limits {
        buffer_bytes: most.max_buffer_size,
        binding_bytes: index_in_words(most.max_storage_buffer_binding_size, options),
        binding_align: u64::from(defaults.min_storage_buffer_offset_alignment),
        workgroup_bytes: most.max_compute_workgroup_storage_size,
        workgroup_len: most
            .max_compute_invocations_per_workgroup
            .min(most.max_compute_workgroup_size_x),
        grid: defaults.max_compute_workgroups_per_dimension,
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
        immediate_bytes: IMMEDIATE_BYTES,
    }
}

/// Opens a device with what was negotiated.
///
/// Errors: the driver's message.
pub(in crate::device) async fn open(
    adapter: &Adapter,
    negotiated: &Negotiated,
) -> Result<(Device, Queue), String> {
    let (features, most) = (negotiated.features, adapter.limits());
    let mut wgpu_features = wgpu::Features::empty();
    for (wanted, feature) in [
        (features.subgroups, wgpu::Features::SUBGROUP),
        (features.f16, wgpu::Features::SHADER_F16),
        (features.timestamps, TIMESTAMPS),
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
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("sterna"),
        required_features: wgpu_features,
        required_limits: wgpu_limits,
        experimental_features: if features.cooperative_matrix {
            trusted::experimental_features()
        } else {
            wgpu::ExperimentalFeatures::disabled()
        },
        ..Default::default()
    };
    let opened = adapter.request_device(&descriptor).await;
    opened.map_err(|error| error.to_string())
}
