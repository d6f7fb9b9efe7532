//! Futures of a device, and how native programs wait for them.

use std::cell::RefCell;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::{Device, GpuError, wgpu};

/// Outstanding callbacks of a submission, and whom to wake when they have run.
#[derive(Debug, Clone)]
pub(crate) struct Arrivals(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    n_missing: usize,
    failed: bool,
    waker: Option<Waker>,
}

impl Arrivals {
    /// With `n` callbacks.
    pub(crate) fn new(n: usize) -> Arrivals {
        Arrivals(Arc::new(Mutex::new(State {
            n_missing: n,
            failed: false,
            waker: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of the callbacks has run.
    pub(crate) fn arrive(&self, ok: bool) {
        let mut state = self.lock();
        state.n_missing = state.n_missing.saturating_sub(1);
        state.failed |= !ok;
        let waker = match state.n_missing {
            0 => state.waker.take(),
            _ => None,
        };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether all have run.
    pub(crate) fn are_complete(&self) -> bool {
        self.lock().n_missing == 0
    }

    /// Ready once all have run: whether none has failed.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<bool> {
        let mut state = self.lock();
        if state.n_missing == 0 {
            return Poll::Ready(!state.failed);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            waker => *waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

/// What a future of this thread that isn't ready waits for.
#[derive(Debug, Clone)]
pub(crate) enum Awaited {
    /// A submission.
    Submission(wgpu::SubmissionIndex),
    /// Everything submitted so far.
    All,
}

thread_local! {
    /// Set by futures as they are polled, for [`Device::block_on`] on the same thread.
    static AWAITED: RefCell<Option<Awaited>> = const { RefCell::new(None) };
}

impl Awaited {
    /// Records what the poller on this thread has to wait for.
    pub(crate) fn tell(self) {
        AWAITED.set(Some(self));
    }
}

impl Device {
    /// Blocks on a future that becomes ready once something submitted to this device is done: polls it, and
    /// drives the device while it isn't.
    ///
    /// A device that is lost meanwhile is left to the future to report, as [`Submission`](crate::Submission)
    /// does.
    /// Errors: [`GpuError::Timeout`]; [`GpuError::Lost`] if the device is, and the future still isn't ready;
    /// [`GpuError::Unsupported`] in a browser, if the future isn't ready, and anywhere if it waits for
    /// something else.
    pub fn block_on<F: Future>(&self, future: F) -> Result<F::Output, GpuError> {
        let mut future = pin!(future);
        let mut cx = Context::from_waker(Waker::noop());
        let mut is_lost = false;
        loop {
            AWAITED.set(None);
            if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                return Ok(output);
            }
            let waited = match AWAITED.take() {
                Some(Awaited::Submission(index)) => self.wait(Some(index)),
                Some(Awaited::All) => self.wait(None),
                None => Err(GpuError::Unsupported {
                    what: "waiting for a future".into(),
                    reason: "it doesn't belong to this device".into(),
                }),
            };
            match waited {
                Err(error) if error.is_lost() && !is_lost => is_lost = true,
                waited => waited?,
            }
        }
    }
}
