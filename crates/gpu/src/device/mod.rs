//! Devices: an adapter, what was negotiated with it, and everything that is made from it.

mod adapter;
#[cfg(not(target_arch = "wasm32"))]
mod blocking;
mod caps;
mod disk_cache;
mod health;
mod pipelines;
mod scopes;
#[cfg(not(target_arch = "wasm32"))]
mod trusted;
mod waiting;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use caps::AdapterCaps;
pub(crate) use pipelines::Pipeline;
pub(crate) use scopes::OpenScope;
pub(crate) use waiting::{Arrivals, Awaited};

use crate::kernels::linear::has_matrix_units;
use crate::memory::{Buffer, Staging};
use crate::shader::Shader;
use crate::{AdapterInfo, DeviceOptions, Features, GpuError, Limits, Tuning, wgpu};
use adapter::Negotiated;
use health::{Fault, Health};
use pipelines::Pipelines;
use scopes::Scopes;

/// A device with its queue. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    wgpu: wgpu::Device,
    queue: wgpu::Queue,
    info: AdapterInfo,
    features: Features,
    limits: Limits,
    tuning: Tuning,
    timeout: Duration,
    health: Arc<Health>,
    memory: Arc<Account>,
    pipelines: Pipelines,
    staging: Staging,
    /// Bound where a kernel does not use a buffer.
    nothing: OnceLock<Buffer>,
    scopes: Scopes,
}

/// Device memory in use by a device's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use now.
    pub used: u64,
    /// Peak usage.
    pub peak: u64,
    /// The limit on usage, if there is one.
    pub budget: Option<u64>,
}

/// Accounts for bytes of buffers.
#[derive(Debug)]
pub(crate) struct Account {
    used: AtomicU64,
    peak: AtomicU64,
    budget: u64,
}

impl Account {
    /// Reserves `bytes` for `what`, if they fit.
    pub(crate) fn take(&self, what: &str, bytes: u64) -> Result<(), GpuError> {
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let next = used.saturating_add(bytes);
            if next > self.budget {
                return Err(self.exhausted(what, bytes, false));
            }
            let swapped =
                (self.used).compare_exchange_weak(used, next, Ordering::Relaxed, Ordering::Relaxed);
            match swapped {
                Ok(_) => {
                    self.peak.fetch_max(next, Ordering::Relaxed);
                    return Ok(());
                }
                Err(now) => used = now,
            }
        }
    }

    /// Releases `bytes`.
    pub(crate) fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn exhausted(&self, what: &str, need: u64, refused: bool) -> GpuError {
        GpuError::OutOfMemory {
            what: what.into(),
            need,
            used: self.used.load(Ordering::Relaxed),
            budget: self.budget,
            refused,
        }
    }
}

impl Drop for Inner {
    /// Saves the pipelines for the next start.
    fn drop(&mut self) {
        if !self.health.is_lost() {
            // If they can't be written, they are compiled again: nothing else is lost, and errors in `drop`
            // can't be reported.
            let _ = self.pipelines.save();
        }
    }
}

impl Device {
    /// Opens the device selected by `options`, after `adjust` has changed what may depend on the adapter:
    /// masked features and the tuning.
    ///
    /// Errors: [`GpuError::NoAdapter`], [`GpuError::NoDevice`].
    pub async fn open_async(
        options: &DeviceOptions,
        adjust: impl FnOnce(&AdapterCaps, &mut DeviceOptions),
    ) -> Result<Device, GpuError> {
        let adapter = adapter::choose(options).await?;
        let mut options = options.clone();
        adjust(&AdapterCaps::of(&adapter, &options), &mut options);
        let options = &options;
        let info = adapter::describe(&adapter);
        let negotiated = adapter::negotiate(&adapter, options);
        let opened = adapter::open(&adapter, &negotiated).await;
        let (wgpu, queue) = opened.map_err(|reason| GpuError::NoDevice {
            adapter: info.name.clone(),
            reason,
        })?;
        let health = Health::watch(&wgpu);
        let pipelines = {
            let Negotiated {
                features,
                immediate_bytes,
                ..
            } = negotiated;
            Pipelines::new(&wgpu, &adapter, features, immediate_bytes, options)
        };
        let inner = Inner {
            wgpu,
            queue,
            info,
            features: negotiated.features,
            limits: negotiated.limits,
            tuning: options.tuning.clone(),
            timeout: options.timeout,
            health,
            memory: Arc::new(Account {
                used: AtomicU64::new(0),
                peak: AtomicU64::new(0),
                budget: options.memory_budget.unwrap_or(u64::MAX),
            }),
            pipelines,
            staging: Staging::default(),
            nothing: OnceLock::new(),
            scopes: Scopes::new(),
        };
        Ok(Device {
            inner: Arc::new(inner),
        })
    }

    /// The adapter it was opened on.
    pub fn info(&self) -> &AdapterInfo {
        &self.inner.info
    }

    /// The features kernels use on it.
    pub fn features(&self) -> Features {
        self.inner.features
    }

    /// Its limits.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Whether matrix multiplications with many rows use cooperative matrices.
    pub fn has_matrix_units(&self) -> bool {
        has_matrix_units(self.inner.features, &self.inner.limits)
    }

    /// The launch configurations of matrix multiplications.
    pub fn tuning(&self) -> &Tuning {
        &self.inner.tuning
    }

    /// Device memory in use.
    pub fn memory(&self) -> MemoryUse {
        let Account { used, peak, budget } = &*self.inner.memory;
        MemoryUse {
            used: used.load(Ordering::Relaxed),
            peak: peak.load(Ordering::Relaxed),
            budget: (*budget != u64::MAX).then_some(*budget),
        }
    }

    /// Whether the device is lost. Everything that was made from it is unusable then; a new one may be
    /// opened.
    pub fn is_lost(&self) -> bool {
        self.inner.health.is_lost()
    }

    /// Loses the device, as a driver reset would: for tests of recovery.
    #[doc(hidden)]
    pub fn lose(&self) {
        self.inner.health.lose("requested by a test".into());
        self.inner.wgpu.destroy();
    }

    /// Writes the compiled pipelines to the folder the device was opened with, if there is one and anything
    /// is new; returns whether it did.
    ///
    /// This also happens when the device is dropped. Programs that never exit by themselves call it once
    /// their kernels have run, as do those that need the result.
    ///
    /// Errors: those of the file system.
    pub fn save_pipelines(&self) -> std::io::Result<bool> {
        self.inner.pipelines.save()
    }

    /// How many pipelines have been made.
    pub fn n_pipelines(&self) -> usize {
        self.inner.pipelines.len()
    }

    pub(crate) fn wgpu(&self) -> &wgpu::Device {
        &self.inner.wgpu
    }

    pub(crate) fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.inner.memory
    }

    /// A buffer to bind where a kernel does not use one.
    pub(crate) fn nothing(&self) -> Result<Buffer, GpuError> {
        if let Some(buffer) = self.inner.nothing.get() {
            return Ok(buffer.clone());
        }
        let buffer = self.buffer("nothing", 16)?;
        Ok(self.inner.nothing.get_or_init(|| buffer).clone())
    }

    pub(crate) fn staging(&self) -> &Staging {
        &self.inner.staging
    }

    /// The layout of parameters in a buffer.
    pub(crate) fn params_layout(&self) -> &wgpu::BindGroupLayout {
        self.inner.pipelines.params_layout()
    }

    /// The pipeline of `shader` with `constants`, made if there is none yet.
    pub(crate) fn pipeline(
        &self,
        shader: &'static Shader,
        constants: &[(&'static str, f64)],
    ) -> Result<Arc<Pipeline>, GpuError> {
        self.inner.pipelines.get(self, shader, constants)
    }

    /// An error if the device is lost or an uncaptured error occurred.
    pub(crate) fn check(&self, what: &str) -> Result<(), GpuError> {
        match self.inner.health.check()? {
            None => Ok(()),
            Some(error) => Err(self.error(what, &error)),
        }
    }

    /// Runs `f`, which makes something small. Errors of the device are returned now or, in a browser, by a
    /// later check.
    pub(crate) fn noted<T>(&self, what: &str, f: impl FnOnce() -> T) -> Result<T, GpuError> {
        self.check(what)?;
        let made = f();
        self.check(what)?;
        Ok(made)
    }

    /// Runs `f`, and turns errors of the device into an error: of this call or, in a browser, of the next
    /// submission.
    pub(crate) fn checked<T>(&self, what: &str, f: impl FnOnce() -> T) -> Result<T, GpuError> {
        self.check(what)?;
        let filters = [
            wgpu::ErrorFilter::Internal,
            wgpu::ErrorFilter::OutOfMemory,
            wgpu::ErrorFilter::Validation,
        ];
        let scopes = filters.map(|filter| self.inner.wgpu.push_error_scope(filter));
        let made = f();
        let mut error = None;
        for scope in scopes.into_iter().rev() {
            error = error.or(self.inner.scopes.pop(what, scope));
        }
        match error {
            // A lost device refuses everything; report the loss.
            _ if self.is_lost() => self.check(what).map(|()| made),
            None => Ok(made),
            Some(error) => Err(self.error(what, &error.into())),
        }
    }

    /// The device's error about `what`, as this crate's error.
    pub(crate) fn error(&self, what: &str, error: &Fault) -> GpuError {
        match error {
            Fault::OutOfMemory => self.inner.memory.exhausted(what, 0, true),
            Fault::Refused(reason) => GpuError::Refused {
                what: what.into(),
                reason: reason.clone(),
            },
        }
    }

    /// Errors that the browser has not reported yet.
    pub(crate) fn take_scopes(&self) -> Vec<OpenScope> {
        self.inner.scopes.take()
    }

    /// Keeps these for the next submission.
    pub(crate) fn give_scopes(&self, scopes: &mut Vec<OpenScope>) {
        self.inner.scopes.give(scopes);
    }
}

#[cfg(target_arch = "wasm32")]
impl Device {
    /// Errors: browsers can't block.
    pub(crate) fn wait(&self, _: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
        Err(GpuError::Unsupported {
            what: "waiting for the device".into(),
            reason: "browsers can't block: await the result instead".into(),
        })
    }

    /// Stops waiting for a submission that isn't done in time: the device is taken for lost.
    pub(crate) fn time_out(&self) {
        let seconds = self.inner.timeout.as_secs_f64();
        let health = &self.inner.health;
        health.lose(format!("it didn't finish within {seconds} s"));
        self.inner.wgpu.destroy();
    }

    /// How long to wait for a submission.
    pub(crate) fn timeout(&self) -> Duration {
        self.inner.timeout
    }

    /// Browsers run callbacks by themselves.
    pub(crate) fn poll(&self) -> Result<(), GpuError> {
        self.check("polling")
    }
}
