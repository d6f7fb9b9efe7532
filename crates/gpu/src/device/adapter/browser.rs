//! What a browser says of its adapter, and what is asked of it.

use super::{IMMEDIATE_BYTES, Negotiated, index_in_words};
use crate::browser::{Adapter, Device, Queue};
use crate::{AdapterInfo, AdapterKind, Api, DeviceOptions, Features, Limits};

/// The one that the browser has chosen.
pub(in crate::device) async fn all(options: &DeviceOptions) -> Vec<Adapter> {
    Adapter::request(options.low_power)
        .await
        .into_iter()
        .collect()
}

/// Describes an adapter in this crate's types. Browsers don't name theirs in full.
pub(in crate::device) fn describe(adapter: &Adapter) -> AdapterInfo {
    let [vendor, architecture, device, description] =
        ["vendor", "architecture", "device", "description"].map(|name| adapter.info_text(name));
    let name = match description {
        empty if empty.is_empty() => [vendor, architecture, device].join(" "),
        description => description,
    };
    let is_software = adapter.is_fallback() || {
        let name = name.to_lowercase();
        let known = ["swiftshader", "llvmpipe", "basic render"];
        known.iter().any(|software| name.contains(software))
    };
    AdapterInfo {
        name: name.trim().to_owned(),
        driver: String::new(),
        api: Api::Other,
        kind: match is_software {
            true => AdapterKind::Software,
            false => AdapterKind::Unknown,
        },
        bus: None,
    }
}

/// Negotiates what `options` allow and the adapter supports.
pub(in crate::device) fn negotiate(adapter: &Adapter, options: &DeviceOptions) -> Negotiated {
    let immediate_bytes = adapter.limit("maxImmediateSize");
    let immediate_bytes = immediate_bytes.min(u64::from(IMMEDIATE_BYTES)) as u32;
    let (min_subgroup, max_subgroup) = (
        adapter.info_number("subgroupMinSize"),
        adapter.info_number("subgroupMaxSize"),
    );
    let features = options.features.and(Features {
        // Kernels exchange values among at least eight invocations.
        subgroups: adapter.has("subgroups") && min_subgroup >= 8,
        f16: adapter.has("shader-f16"),
        dot4: adapter.speaks("packed_4x8_integer_dot_product"),
        immediates: adapter.speaks("immediate_address_space") && immediate_bytes > 0,
        // Passes can be timed, dispatches can't.
        timestamps: false,
        pipeline_cache: false,
        cooperative_matrix: false,
        emulated_matrix: false,
    });
    let word = |name| u32::try_from(adapter.limit(name)).unwrap_or(u32::MAX);
    let (min_subgroup, max_subgroup) = match features.subgroups {
        true => (min_subgroup, max_subgroup),
        false => (1, 1),
    };
    let limits = Limits {
        buffer_bytes: adapter.limit("maxBufferSize"),
        binding_bytes: index_in_words(adapter.limit("maxStorageBufferBindingSize"), options),
        binding_align: u64::from(word("minStorageBufferOffsetAlignment")),
        workgroup_bytes: word("maxComputeWorkgroupStorageSize"),
        workgroup_len: word("maxComputeInvocationsPerWorkgroup")
            .min(word("maxComputeWorkgroupSizeX")),
        grid: word("maxComputeWorkgroupsPerDimension"),
        min_subgroup,
        max_subgroup,
    };
    Negotiated {
        features,
        limits,
        immediate_bytes,
    }
}

/// Opens a device with what was negotiated.
///
/// Errors: the browser's message.
pub(in crate::device) async fn open(
    adapter: &Adapter,
    negotiated: &Negotiated,
) -> Result<(Device, Queue), String> {
    let Negotiated { features, .. } = negotiated;
    let features = [
        (features.subgroups, "subgroups"),
        (features.f16, "shader-f16"),
    ];
    let features: Vec<&str> = features
        .into_iter()
        .filter_map(|(wanted, name)| wanted.then_some(name))
        .collect();
    // What is said of the adapter is asked of the device.
    let mut limits: Vec<(&str, u64)> = [
        "maxBufferSize",
        "maxStorageBufferBindingSize",
        "minStorageBufferOffsetAlignment",
        "maxComputeWorkgroupStorageSize",
        "maxComputeInvocationsPerWorkgroup",
        "maxComputeWorkgroupSizeX",
        "maxComputeWorkgroupsPerDimension",
    ]
    .map(|name| (name, adapter.limit(name)))
    .into();
    if negotiated.features.immediates {
        limits.push(("maxImmediateSize", u64::from(negotiated.immediate_bytes)));
    }
    adapter.open(&features, &limits).await
}
