//! A peer as a source.

use std::{io::Cursor, ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use iroh::{
    Endpoint, EndpointAddr, EndpointId,
    endpoint::{Connection, ReadError, RecvStream},
};
use sterna_format::rdrr::MANIFEST_FILE;
use tokio::{sync::Mutex, time};

use super::{
    Liars,
    protocol::{ALPN, Reply, Request},
};
use crate::{
    blocking::{Activity, Bridge},
    fetch::Fault,
    hash::{Digest, Expected},
    package::MAX_FILE_BYTES,
    source::{Answer, Source, asked_for, chain},
};

/// How long a peer may be silent.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long it may take to connect again.
const AGAIN_WITHIN: Duration = Duration::from_secs(5);

/// Bytes that are read at once.
const PIECE: usize = 128 << 10;

/// The files of one package that a peer has.
pub(crate) struct PeerSource {
    name: String,
    address: EndpointAddr,
    manifest: Digest,
    endpoint: Endpoint,
    bridge: Arc<Bridge>,
    liars: Arc<Liars>,
    link: Mutex<Link>,
}

/// The connection to a peer.
enum Link {
    /// There was none yet.
    New,
    /// One that may have been lost meanwhile.
    Made(Connection),
    /// It was lost, and there is no other.
    Gone(String),
}

impl PeerSource {
    pub(super) fn new(
        address: EndpointAddr,
        manifest: Digest,
        endpoint: Endpoint,
        bridge: Arc<Bridge>,
        liars: Arc<Liars>,
    ) -> Self {
        Self {
            name: Self::name_of(address.id),
            address,
            manifest,
            endpoint,
            bridge,
            liars,
            link: Mutex::new(Link::New),
        }
    }

    pub(super) fn name_of(id: EndpointId) -> String {
        format!("peer {id}")
    }

    /// Whether it says that it has the package.
    pub(super) async fn has_it(&self) -> bool {
        let asked = self.ask(MANIFEST_FILE, Some(0..0)).await;
        asked.is_ok()
    }

    /// A connection; a lost one is made again once, since peers come and go.
    async fn connection(&self) -> Result<Connection, Fault> {
        let mut link = self.link.lock().await;
        let connect = self.endpoint.connect(self.address.clone(), ALPN);
        let made = match &*link {
            Link::Made(connection) if connection.close_reason().is_none() => {
                return Ok(connection.clone());
            }
            Link::Gone(message) => {
                let message = message.clone();
                return Err(Fault::Missing { message });
            }
            Link::New => connect.await.map_err(|error| Fault::Unreachable {
                message: chain(&error),
            }),
            Link::Made(_) => {
                let again = match time::timeout(AGAIN_WITHIN, connect).await {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(error)) => Err(chain(&error)),
                    Err(_) => Err("timed out".to_owned()),
                };
                again.map_err(|why| {
                    let message = format!("the peer is gone: {why}");
                    *link = Link::Gone(message.clone());
                    Fault::Missing { message }
                })
            }
        };
        let connection = made?;
        *link = Link::Made(connection.clone());
        Ok(connection)
    }

    /// Asks for bytes of a file: its size, and what they are read from.
    async fn ask(&self, name: &str, range: Option<Range<u64>>) -> Result<(u64, RecvStream), Fault> {
        let connection = self.connection().await?;
        let lost = |error: &dyn std::error::Error| Fault::Unreachable {
            message: chain(error),
        };
        let (mut send, mut receive) = connection.open_bi().await.map_err(|e| lost(&e))?;
        let request = Request::new(self.manifest, name, range).to_json();
        (send.write_all(request.as_bytes()).await).map_err(|e| lost(&e))?;
        // One that answers before it has read all has closed it.
        let _ = send.finish();
        let mut length = [0; 2];
        (receive.read_exact(&mut length).await).map_err(|e| lost(&e))?;
        let length = usize::from(u16::from_be_bytes(length));
        Reply::check_len(length)?;
        let mut answer = vec![0; length];
        (receive.read_exact(&mut answer).await).map_err(|e| lost(&e))?;
        Ok((Reply::read(&answer)?.size()?, receive))
    }

    /// The manifest, whose digest is known.
    async fn read_manifest(&self) -> Result<Vec<u8>, Fault> {
        let (size, mut receive) = self.ask(MANIFEST_FILE, None).await?;
        let limit = MAX_FILE_BYTES;
        if size > limit {
            return Err(Fault::TooLarge { limit, found: size });
        }
        let bytes = receive.read_to_end(limit as usize).await;
        let bytes = bytes.map_err(|error| Fault::Unreachable {
            message: chain(&error),
        })?;
        match Expected::Digest(self.manifest).verify(&bytes) {
            Ok(_) => Ok(bytes),
            Err(mismatch) => Err(Fault::WrongBytes(mismatch)),
        }
    }
}

impl Source for PeerSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        asked_for(name)?;
        let activity = Activity::new();
        if name == MANIFEST_FILE && range.is_none() {
            let read = self.read_manifest();
            let bytes = (self.bridge).wait(PATIENCE, &activity, None, read)??;
            let head = Reply::head(bytes.len() as u64, None);
            let body = Box::new(Cursor::new(bytes));
            return Ok(Answer { head, body });
        }
        let asked = self.ask(name, range.clone());
        let (size, receive) = self.bridge.wait(PATIENCE, &activity, None, asked)??;
        let pieces = stream::unfold(receive, |mut receive| async move {
            let mut piece = vec![0; PIECE];
            match receive.read(&mut piece).await {
                Ok(Some(n)) => {
                    piece.truncate(n);
                    Some((Ok::<_, ReadError>(Bytes::from(piece)), receive))
                }
                Ok(None) => None,
                Err(error) => Some((Err(error), receive)),
            }
        });
        Ok(Answer {
            head: Reply::head(size, range),
            body: Box::new(self.bridge.reader(pieces.boxed(), PATIENCE)),
        })
    }

    fn interrupt(&self) {
        self.bridge.interrupt();
    }

    fn is_stranger(&self) -> bool {
        true
    }

    fn lied(&self, why: &str) -> Option<String> {
        let added = self.liars.add(&self.address.id.to_string(), why);
        added.err().map(|error| chain(&error))
    }
}
