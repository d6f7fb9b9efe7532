//! Errors of a device: those of a call, uncaptured ones, and device loss.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{GpuError, wgpu};

/// What has gone wrong with a device so far.
#[derive(Debug, Default)]
pub(crate) struct Health {
    is_lost: AtomicBool,
    lost: Mutex<Option<String>>,
    /// The first uncaptured error.
    stray: Mutex<Option<Fault>>,
}

/// An error that a device reports for a call.
#[derive(Debug)]
pub(crate) enum Fault {
    OutOfMemory,
    /// With the driver's message.
    Refused(String),
}

impl From<wgpu::Error> for Fault {
    fn from(error: wgpu::Error) -> Fault {
        match error {
            wgpu::Error::OutOfMemory { .. } => Fault::OutOfMemory,
            error => Fault::Refused(error.to_string()),
        }
    }
}

impl Health {
    /// Installs error handlers on `device`: from now on none of its errors is a panic.
    pub(super) fn watch(device: &wgpu::Device) -> Arc<Health> {
        let health = Arc::new(Health::default());
        let of_loss = health.clone();
        device.set_device_lost_callback(move |reason, message| {
            of_loss.lose(format!("{reason:?}: {message}"));
        });
        let of_errors = health.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let mut stray = of_errors
                .stray
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            stray.get_or_insert(error.into());
        }));
        health
    }

    pub(super) fn lose(&self, reason: String) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get_or_insert(reason);
        self.is_lost.store(true, Ordering::Release);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Takes the uncaptured error, which is reported once; an error if the device is lost.
    pub(super) fn check(&self) -> Result<Option<Fault>, GpuError> {
        if self.is_lost() {
            let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            return Err(GpuError::Lost {
                reason: lost.clone().unwrap_or_default(),
            });
        }
        let mut stray = self.stray.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(stray.take())
    }
}
