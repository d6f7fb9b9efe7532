//! Choosing an adapter and negotiating features and limits.

#[cfg(target_arch = "wasm32")]
mod browser;
#[cfg(not(target_arch = "wasm32"))]
mod native;

#[cfg(target_arch = "wasm32")]
use browser as platform;
#[cfg(not(target_arch = "wasm32"))]
use native as platform;

pub(super) use platform::{describe, negotiate, open};

use crate::wgpu::Adapter;
use crate::{AdapterKind, Api, DeviceOptions, Features, GpuError, Limits};

/// All adapters, the best for `options` first.
pub(super) async fn adapters(options: &DeviceOptions) -> Vec<Adapter> {
    let mut adapters = platform::all(options).await;
    adapters.sort_by_key(|adapter| {
        let info = describe(adapter);
        (rank(info.kind, options), info.api == Api::Dx12)
    });
    adapters
}

/// Lower is better.
fn rank(kind: AdapterKind, options: &DeviceOptions) -> u8 {
    match kind {
        AdapterKind::Software if options.software => 0,
        AdapterKind::Integrated if options.low_power => 1,
        AdapterKind::Discrete => 2,
        AdapterKind::Integrated => 3,
        AdapterKind::Virtual => 4,
        AdapterKind::Unknown => 5,
        AdapterKind::Software => 6,
    }
}

/// The adapter that `options` ask for.
pub(super) async fn choose(options: &DeviceOptions) -> Result<Adapter, GpuError> {
    let mut seen = Vec::new();
    for (index, adapter) in adapters(options).await.into_iter().enumerate() {
        let info = describe(&adapter);
        let name = info.name.to_lowercase();
        let named =
            (options.adapter.as_ref()).is_none_or(|part| name.contains(&part.to_lowercase()));
        let kind = !options.software || info.kind == AdapterKind::Software;
        let placed = options.adapter_index.is_none_or(|place| place == index);
        if named && kind && placed {
            return Ok(adapter);
        }
        seen.push(format!("`{}`", info.name));
    }
    let wanted = match (&options.adapter, options.adapter_index, options.software) {
        (Some(part), _, _) => format!("expected an adapter named like `{part}`"),
        (None, Some(index), _) => format!("expected an adapter {index}, counted from 0"),
        (None, None, true) => String::from("expected a software adapter"),
        _ if cfg!(target_arch = "wasm32") => String::from("expected a WebGPU adapter"),
        _ => String::from("expected a Vulkan, Metal or DX12 adapter"),
    };
    let found = match seen.as_slice() {
        [] => String::from("none"),
        names => names.join(", "),
    };
    Err(GpuError::NoAdapter {
        reason: format!("{wanted}, found {found}"),
    })
}

/// What was negotiated with an adapter.
pub(super) struct Negotiated {
    pub(super) features: Features,
    pub(super) limits: Limits,
    /// Bytes of immediates, if there are any.
    pub(super) immediate_bytes: u32,
}

/// Bytes of immediates that are asked for: those of the largest kernel parameters.
const IMMEDIATE_BYTES: u32 = 128;

/// Bytes of a binding, of which `most` are possible: kernels index in 32-bit words.
fn index_in_words(most: u64, options: &DeviceOptions) -> u64 {
    most.min(options.max_binding_bytes.unwrap_or(u64::MAX)) / 256 * 256
}
