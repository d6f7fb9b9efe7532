//! Shared by the tests of kernels: devices with features on and off, and numbers.

// Each test is its own crate, and uses what it needs.
#![allow(dead_code)]

use std::cell::OnceCell;
use std::time::Duration;

use sterna_gpu::kernels::Rows;
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, DeviceOptions, Features, GpuError, Recorder};
use sterna_kernels::{Exec, Isa};

/// A device with all that the adapter supports and one with no features; with `STERNA_EVERY_VARIANT` in the environment
/// those without one feature that kernels have variants for, too. None if the machine has no adapter.
///
/// Each test, which is a thread, has its own: a software device computes in one thread.
pub(crate) fn devices() -> &'static [Device] {
    thread_local! {
        static DEVICES: OnceCell<&'static [Device]> = const { OnceCell::new() };
    }
    DEVICES.with(|devices| *devices.get_or_init(|| open_devices().leak()))
}

fn open_devices() -> Vec<Device> {
    let without = |mask: fn(&mut Features)| {
        let mut features = Features::ALL;
        mask(&mut features);
        features
    };
    let mut masks = vec![Features::ALL, Features::NONE];
    // What depends on one of them doesn't on the other, and pipelines take longer to compile than to run.
    if std::env::var_os("STERNA_EVERY_VARIANT").is_some() {
        masks.push(without(|f| f.subgroups = false));
        masks.push(without(|f| f.dot4 = false));
    }
    let mut devices = Vec::new();
    for features in masks {
        let options = DeviceOptions {
            features,
            ..DeviceOptions::default()
        };
        match sterna_testing::gpu::device_with(&options) {
            Some(device) => devices.push(device),
            None => break,
        }
    }
    devices
}

/// A device like the first of them.
pub(crate) fn device() -> Option<&'static Device> {
    thread_local! {
        static DEVICE: OnceCell<Option<&'static Device>> = const { OnceCell::new() };
    }
    let open = || sterna_testing::gpu::device().map(|device| &*Box::leak(Box::new(device)));
    DEVICE.with(|device| *device.get_or_init(open))
}

/// A device that emulates matrix units, for the kernels that use them; `None`, too, where there are some: other tests reach
/// these kernels then.
pub(crate) fn emulated() -> Option<Device> {
    let features = Features {
        emulated_matrix: true,
        ..Features::ALL
    };
    let options = DeviceOptions {
        features,
        timeout: Duration::from_secs(600),
        ..DeviceOptions::default()
    };
    let device = sterna_testing::gpu::device_with(&options)?;
    if device.features().cooperative_matrix {
        return None;
    }
    assert!(device.has_matrix_units(), "{:?}", device.features());
    Some(device)
}

/// Runs what `record` records, and reads `len` floats of `out`.
pub(crate) fn run(
    device: &Device,
    out: &Buffer,
    len: usize,
    record: impl FnOnce(&mut Recorder) -> Result<(), GpuError>,
) -> Vec<f32> {
    let mut recorder = Recorder::new(device);
    record(&mut recorder).unwrap();
    let commands = recorder.finish().unwrap();
    device.submit(&[&commands], &[]).unwrap().wait().unwrap();
    device.read(out, 0..len).unwrap()
}

/// One thread, no special instructions: the definition.
pub(crate) fn scalar() -> Exec {
    Exec::new(1, Isa::SCALAR)
}

/// Numbers that are the same on every platform.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }
}

/// `n` values within ±1.
pub(crate) fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut value = || (random.below(2_000_001) as f32 - 1_000_000.0) / 1_000_000.0;
    (0..n).map(|_| value()).collect()
}

/// Mean squared error relative to the mean square of what is expected.
pub(crate) fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut error, mut power) = (0.0, 0.0);
    for (got, want) in got.iter().zip(want) {
        error += (f64::from(*got) - f64::from(*want)).powi(2);
        power += f64::from(*want).powi(2);
    }
    if power == 0.0 { error } else { error / power }
}

/// A buffer of rows `stride` apart after `offset` other values, with the rows in it.
pub(crate) fn spread(
    device: &Device,
    values: &[f32],
    width: usize,
    offset: usize,
    stride: usize,
) -> Buffer {
    let n_rows = values.len().checked_div(width).unwrap_or(0);
    let mut all = vec![7.5; offset + n_rows * stride];
    for (row, values) in values.chunks(width.max(1)).enumerate() {
        all[offset + row * stride..][..values.len()].copy_from_slice(values);
    }
    device.upload(&all).unwrap()
}

/// The rows of [`spread`].
pub(crate) fn spread_rows(
    buffer: &Buffer,
    n_rows: usize,
    width: usize,
    offset: usize,
    stride: usize,
) -> Rows<'_> {
    Rows {
        offset,
        stride,
        ..Rows::new(buffer, n_rows, width)
    }
}
