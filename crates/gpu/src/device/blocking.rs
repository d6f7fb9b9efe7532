//! Blocking calls for native programs, which may wait for an adapter.

use super::{AdapterCaps, Device, adapter};
use crate::{AdapterInfo, DeviceOptions, GpuError};

impl Device {
    /// All adapters, best first.
    pub fn adapters() -> Vec<AdapterInfo> {
        let adapters = pollster::block_on(adapter::adapters(&DeviceOptions::default()));
        let infos = adapters.iter().map(|a| adapter::describe(&a.get_info()));
        infos.collect()
    }

    /// What each adapter offers a device with `options`, best first. None is opened.
    pub fn all_caps(options: &DeviceOptions) -> Vec<AdapterCaps> {
        let adapters = pollster::block_on(adapter::adapters(options));
        adapters
            .iter()
            .map(|a| AdapterCaps::of(a, options))
            .collect()
    }

    /// What the adapter selected by `options` offers. It is not opened.
    ///
    /// Errors: [`GpuError::NoAdapter`].
    pub fn caps(options: &DeviceOptions) -> Result<AdapterCaps, GpuError> {
        let adapter = pollster::block_on(adapter::choose(options))?;
        Ok(AdapterCaps::of(&adapter, options))
    }

    /// Opens the device selected by `options`.
    ///
    /// Errors: [`GpuError::NoAdapter`], [`GpuError::NoDevice`].
    pub fn open(options: &DeviceOptions) -> Result<Device, GpuError> {
        Device::open_with(options, |_, _| {})
    }

    /// Blocking form of [`Device::open_async`].
    ///
    /// Errors: [`GpuError::NoAdapter`], [`GpuError::NoDevice`].
    pub fn open_with(
        options: &DeviceOptions,
        adjust: impl FnOnce(&AdapterCaps, &mut DeviceOptions),
    ) -> Result<Device, GpuError> {
        pollster::block_on(Device::open_async(options, adjust))
    }
}
