//! Connection handling: limits, timeouts and graceful shutdown.

use std::future;
use std::io;
use std::net::{self, SocketAddr};
use std::num::NonZero;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time;
use tokio_io_timeout::TimeoutStream;

use super::stdin::Stdin;
use super::tls::Tls;
use crate::output;

/// Maximum connections; more wait until one ends.
const MAX_CONNECTIONS: usize = 256;
/// Timeout for the head of a request, and between requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for a client that reads none of the available bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest head of a request.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// How long transfers may continue after the server was told to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait when the system is out of connections.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);
/// Threads: files come from memory, and the network is slower than one of them.
const MAX_THREADS: usize = 4;

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

    /// Serves `router`, by `tls` if there is one, until Ctrl-C or the end of `stdin` if there is one, of which `stopping`
    /// is told. Before that, `tell` is told its address; `finish` is called when all connections have ended, on a thread
    /// of its own.
    pub(super) fn serve(
        self,
        router: Router,
        tls: Option<Tls>,
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
                () = accept(&listener, &router, tls.as_ref(), &connections) => {}
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
    tls: Option<&Tls>,
    connections: &GracefulShutdown,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places)
            .acquire_owned()
            .await
            .expect("it is never closed");
        match listener.accept().await {
            Ok((stream, _)) => spawn(stream, place, router, tls, connections),
            // From one client that went away, or out of file descriptors; the others continue.
            Err(error) if is_of_client(&error) => {}
            Err(error) => {
                output::warning(format_args!("cannot take a connection: {error}"));
                time::sleep(RETRY_ACCEPT).await;
            }
        }
    }
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
    place: OwnedSemaphorePermit,
    router: &Router,
    tls: Option<&Tls>,
    connections: &GracefulShutdown,
) {
    // A small response shouldn't wait for the next. Without this, everything still works, later.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
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
async fn serve<S>(stream: S, place: OwnedSemaphorePermit, router: Router, watcher: Watcher)
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
