//! Connection handling: limits, timeouts and graceful shutdown.

use std::future;
use std::io;
use std::net::{self, SocketAddr};
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time;
use tokio_io_timeout::TimeoutStream;

use super::places::{Place, Places};
use super::stdin::Stdin;
use super::tls::Tls;
use crate::output;

/// Timeout for the head of a request, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest head of a request.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// How long transfers may continue after the server was told to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait when the system is out of connections.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);
/// Threads: files come from memory, and the network is slower than one of them.
const MAX_THREADS: usize = 4;
/// How often it is told that an address has all connections that it may.
const TELL_FULL_EVERY: Duration = Duration::from_secs(60);
/// Files that the program has open beside connections: models, the log, the cache's folder.
const OTHER_FILES: usize = 512;

/// How many connections there may be, and how long their clients may be slow.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionLimits {
    /// Connections at a time; more wait until one ends.
    pub(super) connections: usize,
    /// Those of one address; more are closed.
    pub(super) per_address: usize,
    /// How long a client may read none of the available bytes.
    pub(super) write_timeout: Duration,
}

impl ConnectionLimits {
    /// As many of them as there may be with `n_files` open: with more, none would be left for who has none yet.
    fn within(self, n_files: usize) -> ConnectionLimits {
        let room = n_files.saturating_sub(OTHER_FILES).max(n_files / 2).max(1);
        if self.connections <= room {
            return self;
        }
        output::warning(format_args!(
            "{room} connections at most, not {}: the system lets this program have {n_files} files open",
            self.connections
        ));
        ConnectionLimits {
            connections: room,
            per_address: self.per_address.min(room - room / 4),
            ..self
        }
    }
}

/// A port of this machine that nobody else can have.
pub(super) struct Listener(net::TcpListener);

impl Listener {
    /// The one at `host` and `port`. Who connects waits until it [serves](Self::serve).
    pub(super) fn bind(host: &str, port: u16) -> Result<Listener> {
        let listener = net::TcpListener::bind((host, port))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .with_context(|| format!("cannot listen on {host}, port {port}"))?;
        Ok(Listener(listener))
    }

    /// Serves `router` within `limits`, by `tls` if there is one, until Ctrl-C or the end of `stdin` if there is one, of
    /// which `stopping` is told. Before that, `tell` is told its address; `finish` is called when all connections have
    /// ended, on a thread of its own.
    pub(super) fn serve(
        self,
        router: Router,
        (limits, tls): (ConnectionLimits, Option<Tls>),
        stdin: Option<Stdin>,
        tell: impl FnOnce(SocketAddr) -> Result<()>,
        stopping: impl FnOnce(),
        finish: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let n_threads = thread::available_parallelism()
            .map_or(1, NonZero::get)
            .min(MAX_THREADS);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(n_threads)
            .enable_all()
            .build()
            .context("cannot start the server's threads")?;
        let limits = limits.within(allow_files(limits.connections.saturating_add(OTHER_FILES)));
        runtime.block_on(async {
            let listener = TcpListener::from_std(self.0).context("cannot wait for connections")?;
            let address = listener
                .local_addr()
                .context("cannot tell the server's address")?;
            tell(address)?;
            let connections = GracefulShutdown::new();
            let closed = async {
                match stdin {
                    Some(stdin) => stdin.closed().await,
                    None => future::pending().await,
                }
            };
            tokio::select! {
                () = accept(&listener, &router, limits, tls.as_ref(), &connections) => {}
                () = closed => {}
                stopped = stop_asked() => stopped?,
            }
            drop(listener);
            stopping();
            output::note("stopping when the transfers have ended; Ctrl-C stops at once");
            tokio::select! {
                () = connections.shutdown() => {}
                () = time::sleep(STOP_TIMEOUT) => {}
                stopped = stop_asked() => return stopped,
            }
            let (sender, finished) = oneshot::channel();
            let finish = move || {
                finish();
                // Whoever is gone needn't be told.
                let _ = sender.send(());
            };
            thread::Builder::new()
                .name("finish".to_owned())
                .spawn(finish)
                .context("cannot end the engines")?;
            tokio::select! {
                _ = finished => {}
                stopped = stop_asked() => stopped?,
            }
            Ok(())
        })
    }
}

/// Accepts connections, forever.
async fn accept(
    listener: &TcpListener,
    router: &Router,
    limits: ConnectionLimits,
    tls: Option<&Tls>,
    connections: &GracefulShutdown,
) {
    let places = Places::new(limits.connections, limits.per_address);
    let mut told: Option<Instant> = None;
    loop {
        let free = places.wait().await;
        match listener.accept().await {
            Ok((stream, address)) => match places.take(free, address.ip()) {
                Some(place) => {
                    let wait = limits.write_timeout;
                    spawn(stream, place, wait, router, tls, connections);
                }
                None if told.is_some_and(|told| told.elapsed() < TELL_FULL_EVERY) => {}
                None => {
                    told = Some(Instant::now());
                    output::warning(format_args!(
                        "{}: it has {} connections, and may have no more (--max-connections-per-address)",
                        address.ip(),
                        limits.per_address
                    ));
                }
            },
            // From one client that went away, or out of file descriptors; the others continue.
            Err(error) if is_of_client(&error) => {}
            Err(error) => {
                output::warning(format_args!("cannot take a connection: {error}"));
                time::sleep(RETRY_ACCEPT).await;
            }
        }
    }
}

/// Lets this program have `n` files open, or as many as the system lets it; how many those are.
fn allow_files(n: usize) -> usize {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let most = maximum.map_or(n as u64, |maximum| maximum.min(n as u64));
        let Some(current) = current.filter(|current| *current < most) else {
            return n.min(current.map_or(n, |current| current as usize));
        };
        let raised = Rlimit {
            current: Some(most),
            maximum,
        };
        let allowed = setrlimit(Resource::Nofile, raised).map_or(current, |()| most);
        allowed.try_into().unwrap_or(usize::MAX)
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    n
}

fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset
    )
}

fn spawn(
    stream: TcpStream,
    place: Place,
    write_timeout: Duration,
    router: &Router,
    tls: Option<&Tls>,
    connections: &GracefulShutdown,
) {
    // A small response shouldn't wait for the next. Without this, everything still works, later.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(write_timeout));
    let stream = Box::pin(stream);
    let (router, watcher) = (router.clone(), connections.watcher());
    match tls {
        None => {
            tokio::spawn(serve(stream, place, router, watcher));
        }
        #[cfg(feature = "tls")]
        Some(Tls(acceptor)) => {
            let accepted = time::timeout(HEAD_TIMEOUT, acceptor.accept(stream));
            tokio::spawn(async move {
                // Errors of a connection concern only its client.
                if let Ok(Ok(stream)) = accepted.await {
                    serve(stream, place, router, watcher).await;
                }
            });
        }
        #[cfg(not(feature = "tls"))]
        Some(tls) => match *tls {},
    }
}

/// Answers what comes by `stream`, which has a place until it ends.
async fn serve<S>(stream: S, place: Place, router: Router, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    // Errors of a connection concern only its client. One that became a WebSocket has other limits, and no place here.
    let _ = watcher.watch(connection).await;
    drop(place);
}

/// Waits for a signal to stop the server.
async fn stop_asked() -> Result<()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).context("cannot watch for SIGTERM")?;
        tokio::select! {
            asked = tokio::signal::ctrl_c() => asked.context("cannot watch for Ctrl-C"),
            _ = terminate.recv() => Ok(()),
        }
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c()
        .await
        .context("cannot watch for Ctrl-C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_rest() {
        let limits = ConnectionLimits {
            connections: 1168,
            per_address: 876,
            write_timeout: Duration::from_secs(1),
        };
        let within = |n_files| {
            let limits = limits.within(n_files);
            (limits.connections, limits.per_address)
        };
        assert_eq!(within(1168 + OTHER_FILES), (1168, 876));
        assert_eq!(within(1024), (512, 384));
        assert_eq!(within(64), (32, 24));
        assert_eq!(within(0), (1, 1));
    }
}
