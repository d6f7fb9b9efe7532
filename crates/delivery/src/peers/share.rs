//! Giving packages to peers.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use iroh::{
    Endpoint, EndpointAddr, SecretKey, TransportAddr,
    endpoint::{Connection, Incoming, IncomingAddr, RecvStream, SendStream, presets},
};
use sterna_format::rdrr::MANIFEST_FILE;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time,
};

use super::{
    PeersError, Ticket, network,
    protocol::{ALPN, MAX_REQUEST, Reply, Request},
};
use crate::{
    blocking::Bridge,
    durable::PartialFile,
    fetch::RateLimit,
    hash::{Algorithm, Digest, digest_of},
    source::chain,
};

/// Requests of one connection at a time; more wait.
pub(super) const MAX_STREAMS: u32 = 16;

/// Connections at a time, and of one peer; more are refused.
const MAX_CONNECTIONS: usize = 64;
const MAX_CONNECTIONS_OF_ONE: usize = 4;

/// How long a connection, and a request, may take to be made.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// How long a peer may take nothing of what it asked for.
const TAKE_WITHIN: Duration = Duration::from_secs(30);

/// Peers whose bytes are counted; then those that are away and had least are forgotten.
const MAX_COUNTED: usize = 4096;

/// Bytes that are sent at once.
const PIECE: usize = 128 << 10;

/// A package that is shared: these files, and nothing else.
#[derive(Debug, Clone)]
pub struct SharedPackage {
    pub(super) manifest: Digest,
    files: BTreeMap<String, Bytes>,
}

impl SharedPackage {
    /// The package of these files, by name; `None` if its manifest isn't among them.
    pub fn new(files: BTreeMap<String, Bytes>) -> Option<Self> {
        let manifest = digest_of(Algorithm::Sha256, files.get(MANIFEST_FILE)?);
        Some(Self { manifest, files })
    }
}

/// How packages are shared.
#[derive(Debug, Clone)]
pub struct ShareOptions {
    /// Address and port, port 0 for a free one; all addresses of this machine if there is none.
    pub address: Option<SocketAddr>,
    /// Relays that this machine can be reached by.
    pub relays: Vec<String>,
    /// The file with the key of this machine, which is made if it isn't there; without one it has another key each time.
    pub key: Option<PathBuf>,
    /// Bytes per second, to all peers together.
    pub bytes_per_second: Option<u64>,
    /// Bytes that one peer gets, as long as this lives.
    pub bytes_per_peer: Option<u64>,
    /// Requests at a time, of all peers; more are told that it is busy.
    pub requests: usize,
}

impl Default for ShareOptions {
    /// On all addresses, without relays and a kept key, 32 requests at a time, and as much as anybody wants.
    fn default() -> Self {
        Self {
            address: None,
            relays: Vec::new(),
            key: None,
            bytes_per_second: None,
            bytes_per_peer: None,
            requests: 32,
        }
    }
}

/// Packages that peers get from this machine, until it is dropped.
pub struct Sharing {
    state: Arc<State>,
    addr: EndpointAddr,
    unannounced: Option<String>,
    // After what uses it.
    _bridge: Arc<Bridge>,
}

/// What all connections share.
struct State {
    packages: HashMap<Digest, SharedPackage>,
    requests: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    rate_limit: Option<Mutex<RateLimit>>,
    bytes_per_peer: Option<u64>,
    peers: Mutex<HashMap<Who, Use>>,
    began: Instant,
    sent: AtomicU64,
}

/// Whose bytes are counted together: keys cost nothing, addresses do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Who {
    Address(IpAddr),
    Key(String),
}

/// What a peer uses and has had.
#[derive(Debug, Default)]
struct Use {
    n_connections: usize,
    bytes: u64,
}

impl Sharing {
    /// Begins to share `packages`.
    ///
    /// Errors: [`PeersError`].
    pub fn start(packages: Vec<SharedPackage>, options: &ShareOptions) -> Result<Self, PeersError> {
        let relays = network::relays(&options.relays)?;
        let key = match &options.key {
            Some(path) => secret_key(path)?,
            None => SecretKey::generate(),
        };
        let bind_error = |problem: String| {
            PeersError::Bind(match options.address {
                Some(address) => format!("{address}: {problem}"),
                None => problem,
            })
        };
        let mut builder = network::prepared(Endpoint::builder(presets::Minimal), &relays)
            .secret_key(key)
            .alpns(vec![ALPN.to_vec()]);
        if let Some(address) = options.address {
            builder = (builder.clear_ip_transports().bind_addr(address))
                .map_err(|error| bind_error(chain(&error)))?;
        }
        let bridge = Bridge::new().map_err(PeersError::Thread)?;
        let endpoint = network::wait(&bridge, builder.bind())?;
        let endpoint = endpoint.map_err(|error| bind_error(chain(&error)))?;
        // Where only this machine can come, others needn't know of it.
        let is_loopback = options.address.is_some_and(|a| a.ip().is_loopback());
        let mut announcement = None;
        let mut unannounced = None;
        if !is_loopback {
            match network::wait(&bridge, async { network::local(&endpoint, true) })? {
                Ok(mdns) => announcement = Some(mdns),
                Err(problem) => unannounced = Some(problem),
            }
        }
        let mut addr = endpoint.addr();
        addr.addrs
            .extend(relays.into_iter().map(TransportAddr::Relay));
        let state = Arc::new(State {
            packages: (packages.into_iter())
                .map(|package| (package.manifest, package))
                .collect(),
            requests: Arc::new(Semaphore::new(options.requests)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            rate_limit: options
                .bytes_per_second
                .map(|rate| Mutex::new(RateLimit::new(rate))),
            bytes_per_peer: options.bytes_per_peer,
            peers: Mutex::default(),
            began: Instant::now(),
            sent: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&state);
        bridge.spawn(async move {
            let _announcement = announcement;
            while let Some(incoming) = endpoint.accept().await {
                accepting.take(incoming);
            }
        });
        Ok(Self {
            state,
            addr,
            unannounced,
            _bridge: bridge,
        })
    }

    /// A ticket for each package.
    pub fn tickets(&self) -> Vec<Ticket> {
        let manifests = self.state.packages.keys();
        let tickets = manifests.map(|manifest| Ticket::new(*manifest, Some(self.addr.clone())));
        tickets.collect()
    }

    /// Why this machine isn't found on the local network, if it should be and isn't.
    pub fn unannounced(&self) -> Option<&str> {
        self.unannounced.as_deref()
    }

    /// Bytes of files that were sent so far.
    pub fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::Relaxed)
    }
}

impl State {
    fn peers(&self) -> MutexGuard<'_, HashMap<Who, Use>> {
        // Consistent at any moment, even if a thread panicked while holding it.
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a peer that connects, if there is room for it.
    fn take(self: &Arc<Self>, incoming: Incoming) {
        // An address that may be somebody else's is asked to prove itself first.
        if matches!(incoming.remote_addr(), IncomingAddr::Ip(_))
            && !incoming.remote_addr_validated()
        {
            // It fails only for one that is validated.
            let _ = incoming.retry();
            return;
        }
        let who = match incoming.remote_addr() {
            IncomingAddr::Ip(address) => Who::Address(network_of(address.ip())),
            IncomingAddr::Relay { endpoint_id, .. } => Who::Key(endpoint_id.to_string()),
            // None is set up.
            _ => return incoming.refuse(),
        };
        let Ok(place) = Arc::clone(&self.connections).try_acquire_owned() else {
            return incoming.refuse();
        };
        let Some(visit) = Visit::begin(self, who) else {
            return incoming.refuse();
        };
        let Ok(accepting) = incoming.accept() else {
            return;
        };
        tokio::spawn(async move {
            if let Ok(Ok(connection)) = time::timeout(REQUEST_WITHIN, accepting).await {
                visit.serve(connection, place).await;
            }
        });
    }

    /// The bytes that a request asks for, and the size of their file.
    fn find(&self, request: &[u8]) -> Result<(Bytes, u64), Reply> {
        let (request, manifest) = Request::read(request)?;
        let package = self.packages.get(&manifest).ok_or(Reply::Unknown)?;
        let file = (package.files.get(request.file())).ok_or(Reply::Unknown)?;
        let size = file.len() as u64;
        let part = request.part(size)?;
        Ok((file.slice(part.start as usize..part.end as usize), size))
    }
}

/// What addresses that one subscriber has in common: IPv6 is given out in networks of 64 bits.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(network.into())
        }
        address => address,
    }
}

/// A connection of a peer, which is counted as long as this lives.
struct Visit {
    state: Arc<State>,
    who: Who,
}

impl Visit {
    /// `None` if the peer has too many already.
    fn begin(state: &Arc<State>, who: Who) -> Option<Self> {
        let mut peers = state.peers();
        if peers.len() >= MAX_COUNTED && !peers.contains_key(&who) {
            let away = peers.iter().filter(|(_, used)| used.n_connections == 0);
            let least = away.min_by_key(|(_, used)| used.bytes);
            let least = least.map(|(who, _)| who.clone())?;
            peers.remove(&least);
        }
        let used = peers.entry(who.clone()).or_default();
        if used.n_connections >= MAX_CONNECTIONS_OF_ONE {
            return None;
        }
        used.n_connections += 1;
        drop(peers);
        let state = Arc::clone(state);
        Some(Self { state, who })
    }

    /// Takes `n` bytes from what the peer may have. `false` if it isn't that much.
    fn pay(&self, n: u64) -> bool {
        let mut peers = self.state.peers();
        let Some(used) = peers.get_mut(&self.who) else {
            return false;
        };
        let total = used.bytes.saturating_add(n);
        if self.state.bytes_per_peer.is_some_and(|most| total > most) {
            return false;
        }
        used.bytes = total;
        true
    }

    /// Answers what the peer asks, until it goes.
    async fn serve(self, connection: Connection, place: OwnedSemaphorePermit) {
        let visit = Arc::new(self);
        while let Ok((send, receive)) = connection.accept_bi().await {
            let visit = Arc::clone(&visit);
            tokio::spawn(async move {
                // What fails concerns only the peer, which sees the stream end.
                let _ = visit.answer(send, receive).await;
            });
        }
        drop(place);
    }

    async fn answer(&self, mut send: SendStream, mut receive: RecvStream) -> io::Result<()> {
        let Ok(_request) = Arc::clone(&self.state.requests).try_acquire_owned() else {
            return end(send, &Reply::Busy).await;
        };
        let request = time::timeout(REQUEST_WITHIN, receive.read_to_end(MAX_REQUEST));
        let found = match request.await? {
            Ok(request) => self.state.find(&request),
            Err(_) => Err(Reply::Invalid),
        };
        let (mut bytes, size) = match found {
            Ok(found) => found,
            Err(answer) => return end(send, &answer).await,
        };
        if !self.pay(bytes.len() as u64) {
            return end(send, &Reply::Quota).await;
        }
        write(&mut send, Reply::Bytes { size }.encoded().into()).await?;
        while !bytes.is_empty() {
            let (piece, pause) = match &self.state.rate_limit {
                None => (bytes.split_to(bytes.len().min(PIECE)), Duration::ZERO),
                Some(limit) => {
                    let mut limit = limit.lock().unwrap_or_else(PoisonError::into_inner);
                    let piece = bytes.split_to(bytes.len().min(PIECE).min(limit.piece()));
                    let pause = limit.take(piece.len(), self.state.began.elapsed());
                    (piece, pause)
                }
            };
            let n = piece.len() as u64;
            write(&mut send, piece).await?;
            self.state.sent.fetch_add(n, Ordering::Relaxed);
            time::sleep(pause).await;
        }
        send.finish()?;
        Ok(())
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut peers = self.state.peers();
        if let Some(used) = peers.get_mut(&self.who) {
            used.n_connections -= 1;
        }
    }
}

async fn write(send: &mut SendStream, bytes: Bytes) -> io::Result<()> {
    Ok(time::timeout(TAKE_WITHIN, send.write_chunk(bytes)).await??)
}

/// Answers with nothing behind it.
async fn end(mut send: SendStream, answer: &Reply) -> io::Result<()> {
    write(&mut send, answer.encoded().into()).await?;
    send.finish()?;
    Ok(())
}

/// The key in the file at `path`, which is made if it isn't there.
fn secret_key(path: &Path) -> Result<SecretKey, PeersError> {
    let error = |problem: String| PeersError::Key {
        file: path.display().to_string(),
        problem,
    };
    match fs::read(path) {
        Ok(bytes) => {
            let bytes: [u8; 64] = bytes.trim_ascii().try_into().map_err(|_| {
                error("expected a key of 64 hexadecimal digits, found something else".to_owned())
            })?;
            let digits = String::from_utf8_lossy(&bytes);
            let key = Digest::from_hex(Algorithm::Sha256, &digits);
            let key = key.map_err(|problem| error(problem.to_string()))?;
            Ok(SecretKey::from_bytes(key.as_bytes()))
        }
        Err(problem) if problem.kind() == io::ErrorKind::NotFound => {
            let key = SecretKey::generate();
            let digits = Digest::new(Algorithm::Sha256, key.to_bytes()).to_string();
            let made = || {
                if let Some(folder) = path.parent() {
                    fs::create_dir_all(folder)?;
                }
                let mut file = PartialFile::create_private(path)?;
                file.write_all(digits.as_bytes())?;
                file.finish()
            };
            made().map_err(|problem| error(problem.to_string()))?;
            Ok(key)
        }
        Err(problem) => Err(error(problem.to_string())),
    }
}
