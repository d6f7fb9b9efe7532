//! Blocking calls for native programs, which may wait for an adapter.

use super::{AdapterCaps, Device, adapter};
use crate::{AdapterInfo, DeviceOptions, GpuError, wgpu};

impl Device {
    /// All adapters, best first.
    pub fn adapters() -> Vec<AdapterInfo> {
        let adapters = pollster::block_on(adapter::adapters(&DeviceOptions::default()));
        let infos = adapters.iter().map(adapter::describe);
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

    /// Waits for a submission, or for all of them.
    pub(crate) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
        let polled = self.inner.wgpu.poll(wgpu::PollType::Wait {
            submission_index: submission,
            timeout: Some(self.inner.timeout),
        });
        self.check("waiting")?;
        match polled {
            Ok(_) => Ok(()),
            Err(wgpu::PollError::Timeout) => Err(GpuError::Timeout {
                seconds: self.inner.timeout.as_secs(),
            }),
            Err(error) => Err(GpuError::Refused {
                what: "waiting".into(),
                reason: error.to_string(),
            }),
        }
    }

    /// Runs callbacks, without waiting.
    pub(crate) fn poll(&self) -> Result<(), GpuError> {
        let polled = self.inner.wgpu.poll(wgpu::PollType::Poll);
        self.check("polling")?;
        polled.map(|_| ()).map_err(|error| GpuError::Refused {
            what: "polling".into(),
            reason: error.to_string(),
        })
    }
}
