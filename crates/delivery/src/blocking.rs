//! Asynchronous libraries for callers that block.

use std::{
    future::Future,
    io::{self, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream::BoxStream};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

use crate::fetch::{Cancel, Fault};

/// How often it is looked whether a future was cancelled or is stuck.
const TICK: Duration = Duration::from_millis(100);

/// Runs futures to their end, from any thread that may block.
pub(crate) struct Bridge {
    runtime: Arc<Shared>,
    /// How often all that is under way was interrupted.
    interrupts: watch::Sender<u64>,
}

/// The runtime of one bridge, or of several.
struct Shared(Option<Runtime>);

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Without waiting for what nobody needs, such as the look-up of a name.
            runtime.shutdown_background();
        }
    }
}

/// Why a future was not waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUp {
    /// Nothing moved for too long.
    Stalled,
    /// It was cancelled on this side.
    Interrupted,
}

impl From<GivenUp> for Fault {
    fn from(why: GivenUp) -> Self {
        match why {
            GivenUp::Stalled => Self::Stalled,
            GivenUp::Interrupted => Self::Unreachable {
                message: "interrupted".to_owned(),
            },
        }
    }
}

/// When something last moved.
#[derive(Debug)]
pub(crate) struct Activity {
    began: Instant,
    last_ms: AtomicU64,
}

impl Activity {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            last_ms: AtomicU64::new(0),
        }
    }

    /// Something moves now.
    pub(crate) fn note(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(last)
    }
}

impl Bridge {
    /// Errors: the system is out of threads.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        #[cfg(feature = "stores")]
        {
            static PROVIDER: std::sync::Once = std::sync::Once::new();
            PROVIDER.call_once(|| {
                // The program may have chosen one already.
                let _ = rustls::crypto::ring::default_provider().install_default();
            });
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("network")
            .enable_all()
            .build()?;
        Ok(Arc::new(Self {
            runtime: Arc::new(Shared(Some(runtime))),
            interrupts: watch::Sender::new(0),
        }))
    }

    /// Another with the same runtime, which is interrupted by itself.
    #[cfg(feature = "p2p")]
    pub(crate) fn beside(&self) -> Arc<Self> {
        Arc::new(Self {
            runtime: Arc::clone(&self.runtime),
            interrupts: watch::Sender::new(0),
        })
    }

    /// Runs `future` in the background, until its end or that of the runtime.
    #[cfg(feature = "p2p")]
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(future);
    }

    fn runtime(&self) -> &Runtime {
        (self.runtime.0.as_ref()).expect("it is there until it is dropped")
    }

    /// Waits for `future`, as long as `activity` isn't idle for more than `patience`, nobody cancels it and nobody
    /// interrupts.
    ///
    /// Errors: [`GivenUp`].
    pub(crate) fn wait<T>(
        &self,
        patience: Duration,
        activity: &Activity,
        cancel: Option<&Cancel>,
        future: impl Future<Output = T>,
    ) -> Result<T, GivenUp> {
        let interrupts = self.interrupts.subscribe();
        self.wait_from(interrupts, patience, activity, cancel, future)
    }

    fn wait_from<T>(
        &self,
        mut interrupts: watch::Receiver<u64>,
        patience: Duration,
        activity: &Activity,
        cancel: Option<&Cancel>,
        future: impl Future<Output = T>,
    ) -> Result<T, GivenUp> {
        self.runtime().block_on(async {
            tokio::pin!(future);
            loop {
                tokio::select! {
                    biased;
                    outcome = &mut future => return Ok(outcome),
                    _ = interrupts.changed() => return Err(GivenUp::Interrupted),
                    () = tokio::time::sleep(TICK) => {}
                }
                if cancel.is_some_and(Cancel::is_cancelled) {
                    return Err(GivenUp::Interrupted);
                }
                if activity.idle() > patience {
                    return Err(GivenUp::Stalled);
                }
            }
        })
    }

    /// Ends the waiting for everything under way; what comes later is waited for.
    pub(crate) fn interrupt(&self) {
        self.interrupts.send_modify(|n| *n += 1);
    }

    /// `stream` as a reader that waits for at most `patience`.
    pub(crate) fn reader<E: std::error::Error + Send + Sync + 'static>(
        self: &Arc<Self>,
        stream: BoxStream<'static, Result<Bytes, E>>,
        patience: Duration,
    ) -> impl Read + Send + 'static {
        StreamReader {
            bridge: Arc::clone(self),
            interrupts: self.interrupts.subscribe(),
            stream: stream.map(|piece| piece.map_err(io::Error::other)).boxed(),
            piece: Bytes::new(),
            patience,
        }
    }
}

struct StreamReader {
    bridge: Arc<Bridge>,
    interrupts: watch::Receiver<u64>,
    stream: BoxStream<'static, io::Result<Bytes>>,
    /// What came last and isn't read yet.
    piece: Bytes,
    patience: Duration,
}

impl Read for StreamReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            let (interrupts, activity) = (self.interrupts.clone(), Activity::new());
            let next = self.stream.next();
            let next = (self.bridge).wait_from(interrupts, self.patience, &activity, None, next);
            match next {
                Ok(Some(piece)) => self.piece = piece?,
                Ok(None) => return Ok(0),
                Err(GivenUp::Stalled) => return Err(io::ErrorKind::TimedOut.into()),
                Err(GivenUp::Interrupted) => return Err(io::Error::other("interrupted")),
            }
        }
        let n = buffer.len().min(self.piece.len());
        buffer[..n].copy_from_slice(&self.piece.split_to(n));
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use futures_util::stream;

    use super::*;

    #[test]
    fn futures_are_waited_for_until_they_stall_or_are_interrupted() {
        let bridge = Bridge::new().unwrap();
        let (long, activity) = (Duration::from_secs(60), Activity::new());
        let wait = |patience, cancel| {
            let never = std::future::pending::<()>();
            bridge.wait(patience, &activity, cancel, never)
        };
        assert_eq!(bridge.wait(long, &activity, None, async { 7 }), Ok(7));
        assert_eq!(wait(Duration::ZERO, None), Err(GivenUp::Stalled));
        let cancel = Cancel::new();
        cancel.cancel();
        assert_eq!(wait(long, Some(&cancel)), Err(GivenUp::Interrupted));
        let waiting = thread::spawn({
            let bridge = Arc::clone(&bridge);
            move || {
                let never = std::future::pending::<()>();
                bridge.wait(long, &Activity::new(), None, never)
            }
        });
        while bridge.interrupts.receiver_count() == 0 {
            thread::yield_now();
        }
        bridge.interrupt();
        assert_eq!(waiting.join().unwrap(), Err(GivenUp::Interrupted));
        assert_eq!(bridge.wait(long, &activity, None, async { 8 }), Ok(8));
    }

    #[test]
    fn streams_are_read_to_their_end_or_error() {
        let bridge = Bridge::new().unwrap();
        let pieces = |last: io::Result<Bytes>| {
            let pieces = vec![
                Ok(Bytes::from("ab")),
                Ok(Bytes::new()),
                Ok("cde".into()),
                last,
            ];
            stream::iter(pieces).boxed()
        };
        let mut text = String::new();
        let patience = Duration::from_secs(60);
        let mut reader = bridge.reader(pieces(Ok("f".into())), patience);
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "abcdef");
        let mut reader = bridge.reader(pieces(Err(io::Error::other("cut"))), patience);
        let error = reader.read_to_string(&mut text).unwrap_err();
        assert_eq!(error.to_string(), "cut");
        let pending = stream::pending::<io::Result<Bytes>>().boxed();
        let mut reader = bridge.reader(pending, patience);
        bridge.interrupt();
        let error = reader.read(&mut [0]).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
    }
}
