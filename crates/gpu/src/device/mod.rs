//! Devices: an adapter, what was agreed on with it, and everything that is made from it.

mod adapter;
#[cfg(not(target_arch = "wasm32"))]
mod blocking;
mod caps;
mod health;
mod pipelines;
mod scopes;
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
use crate::{AdapterInfo, DeviceOptions, Features, GpuError, Limits, Tuning};
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
    /// Nanoseconds of a unit of timestamps.
    timestamp_ns: f32,
    health: Arc<Health>,
    memory: Arc<Account>,
    pipelines: Pipelines,
    staging: Staging,
    /// Bound where a kernel has no use for a buffer.
    nothing: OnceLock<Buffer>,
    scopes: Scopes,
}

/// Device memory in use by a device's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use now.
    pub used: u64,
    /// The most that were in use at once.
    pub peak: u64,
    /// The most that may be in use, if there is a bound.
    pub budget: Option<u64>,
}

/// Counts bytes of buffers.
#[derive(Debug)]
pub(crate) struct Account {
    used: AtomicU64,
    peak: AtomicU64,
    budget: u64,
}

impl Account {
    /// Counts in `bytes` for `what`, if they fit.
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

    /// Counts `bytes` out again.
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
    /// Keeps the pipelines for the next start.
    fn drop(&mut self) {
        if !self.health.is_lost() {
            // Where they can't be written, they are compiled again: nothing else is lost, and there is
            // no one left to tell.
            let _ = self.pipelines.save();
        }
    }
}

impl Device {
    /// Opens the device that `options` ask for, after `adjust` has changed what may depend on the adapter:
    /// features are to be masked, and a tuning belongs to one.
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
        let info = adapter::describe(&adapter.get_info());
        let negotiated = adapter::negotiate(&adapter, options);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("sterna"),
            required_features: negotiated.wgpu_features,
            required_limits: negotiated.wgpu_limits,
            experimental_features: if negotiated.features.cooperative_matrix {
                trusted::experimental_features()
            } else {
                wgpu::ExperimentalFeatures::disabled()
            },
            ..Default::default()
        };
        let opened = adapter.request_device(&descriptor).await;
        let (wgpu, queue) = opened.map_err(|error| GpuError::NoDevice {
            adapter: info.name.clone(),
            reason: error.to_string(),
        })?;
        let health = Health::watch(&wgpu);
        let pipelines = Pipelines::new(&wgpu, &adapter, negotiated.features, options);
        let inner = Inner {
            timestamp_ns: queue.get_timestamp_period(),
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

    /// What kernels use on it.
    pub fn features(&self) -> Features {
        self.inner.features
    }

    /// What it can hold and do at once.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Whether products with many rows are computed by matrix units.
    pub fn has_matrix_units(&self) -> bool {
        has_matrix_units(self.inner.features, &self.inner.limits)
    }

    /// How products share out their work.
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

    /// Whether the device is gone. Everything that was made from it is of no more use then; a new one
    /// may be opened.
    pub fn is_lost(&self) -> bool {
        self.inner.health.is_lost()
    }

    /// Loses the device, as a driver's reset would: for tests of what comes after.
    #[doc(hidden)]
    pub fn lose(&self) {
        self.inner.health.lose("a test asked for it".into());
        self.inner.wgpu.destroy();
    }

    /// Writes the compiled pipelines to the folder the device was opened with, if there is one and
    /// something new; returns whether it did.
    ///
    /// This is done when the device is dropped, too. Programs call it that don't end by themselves, once
    /// their kernels have run, and those that want to know how it went.
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

    pub(crate) fn timestamp_ns(&self) -> f32 {
        self.inner.timestamp_ns
    }

    /// A buffer to bind where a kernel has no use for one.
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

    /// The layout of parameters in a buffer; `None` if they come with the commands.
    pub(crate) fn params_layout(&self) -> Option<&wgpu::BindGroupLayout> {
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

    /// An error if the device is lost, or if one came that no one was waiting for.
    pub(crate) fn check(&self, what: &str) -> Result<(), GpuError> {
        match self.inner.health.check()? {
            None => Ok(()),
            Some(error) => Err(self.error(what, &error)),
        }
    }

    /// Does `f`, which makes something small. What the device has against it is told now, or, in a browser,
    /// by a later check.
    pub(crate) fn noted<T>(&self, what: &str, f: impl FnOnce() -> T) -> Result<T, GpuError> {
        self.check(what)?;
        let made = f();
        self.check(what)?;
        Ok(made)
    }

    /// Does `f`, and turns what the device has against it into an error: of this call or, in a browser, of
    /// the next submission.
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
            // A lost device refuses everything; that is the error to tell.
            _ if self.is_lost() => self.check(what).map(|()| made),
            None => Ok(made),
            Some(error) => Err(self.error(what, &error.into())),
        }
    }

    /// What the device has against `what`, in this crate's words.
    pub(crate) fn error(&self, what: &str, error: &Fault) -> GpuError {
        match error {
            Fault::OutOfMemory => self.inner.memory.exhausted(what, 0, true),
            Fault::Refused(reason) => GpuError::Refused {
                what: what.into(),
                reason: reason.clone(),
            },
        }
    }

    /// Errors that browsers have not told yet.
    pub(crate) fn take_scopes(&self) -> Vec<OpenScope> {
        self.inner.scopes.take()
    }

    /// Waits for a submission, or for all of them.
    ///
    /// Errors: [`GpuError::Unsupported`] in a browser, where nobody can.
    pub(crate) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
        if cfg!(target_arch = "wasm32") {
            return Err(GpuError::Unsupported {
                what: "waiting for the device".into(),
                reason: "a browser lets nobody wait: await the result instead".into(),
            });
        }
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

    /// Lets callbacks run, without waiting.
    pub(crate) fn poll(&self) -> Result<(), GpuError> {
        let polled = self.inner.wgpu.poll(wgpu::PollType::Poll);
        self.check("polling")?;
        polled.map(|_| ()).map_err(|error| GpuError::Refused {
            what: "polling".into(),
            reason: error.to_string(),
        })
    }
}
