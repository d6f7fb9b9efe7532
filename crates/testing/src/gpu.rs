//! Decides whether a test that needs a GPU runs.
//!
//! Where there is no adapter such a test is skipped, and says so. With `STERNA_REQUIRE_GPU` in the
//! environment none is skipped: a missing adapter is a failure. Mesa's software driver is an adapter
//! (`scripts/software-gpu.sh`).
//!
//! ```
//! let Some(device) = sterna_testing::gpu::device() else { return };
//! assert!(!device.is_lost());
//! ```
use std::io::Write;
use std::panic::Location;

use sterna_gpu::{Device, DeviceOptions, GpuError};

/// The environment variable with which a missing GPU fails the tests that need one.
pub const REQUIRE_GPU: &str = "STERNA_REQUIRE_GPU";

/// The best adapter's device; `None` if the test is to be skipped.
#[track_caller]
pub fn device() -> Option<Device> {
    device_with(&DeviceOptions::default())
}

/// The device for `options`; `None` if the test is to be skipped.
///
/// Panics if there is an adapter that can't be opened.
#[track_caller]
pub fn device_with(options: &DeviceOptions) -> Option<Device> {
    match Device::open(options) {
        Ok(device) => Some(device),
        Err(error @ GpuError::NoAdapter { .. }) => skip(&error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

/// Whether a test runs whose GPU is opened elsewhere, such as by a program that it starts.
#[track_caller]
pub fn is_there() -> bool {
    !Device::adapters().is_empty() || skip::<()>("no GPU").is_some()
}

/// Reports a skipped test as `None`, or fails.
#[track_caller]
fn skip<T>(reason: &str) -> Option<T> {
    assert!(std::env::var_os(REQUIRE_GPU).is_none(), "{reason}");
    let test = std::thread::current();
    let name = test.name().unwrap_or("a test");
    let place = Location::caller();
    // Not `eprintln`, whose output the test harness keeps to itself when a test passes.
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: {name} ({place}): {reason}; see scripts/software-gpu.sh"
    );
    None
}
