//! This machine among its peers: the connection to them, and who is near.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures_util::StreamExt as _;
use iroh::{
    Endpoint, EndpointAddr, EndpointId, RelayMode, RelayUrl, TransportAddr,
    endpoint::{Builder, QuicTransportConfig, presets},
};
use iroh_mdns_address_lookup::{DiscoveryEvent, MdnsAddressLookup};
use tokio::task::JoinSet;

use super::{Liar, Liars, PeerSource, PeersError, Ticket, ticket};
use crate::{
    blocking::{Activity, Bridge, GivenUp},
    fetch::Cancel,
    hash::Digest,
    source::chain,
};

/// The service that peers announce and look for.
const SERVICE: &str = "sterna";

/// How often the local network is asked who is there.
const CADENCE: Duration = Duration::from_millis(300);

/// Peers of the local network that are asked, at most.
const MAX_FOUND: usize = 16;

/// How long peers are looked for where there is another source.
const LOOK_FOR: Duration = Duration::from_secs(2);

/// The same where there is none.
const LOOK_LONGER_FOR: Duration = Duration::from_secs(10);

/// How long one that was found may take to say whether it has a package.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How long a connection may be silent before it counts as lost.
const IDLE: Duration = Duration::from_secs(10);

/// How long it may take to open sockets.
const PATIENCE: Duration = Duration::from_secs(30);

/// How peers are found and reached.
#[derive(Debug, Clone, Default)]
pub struct PeerOptions {
    /// Whether peers are looked for on the local network, and asked for the package. They are without it, too, where
    /// the address of a package says nothing else.
    pub find_local: bool,
    /// Relays at which any peer may be, besides those of tickets.
    pub relays: Vec<String>,
    /// The file of peers that lied; without one they are remembered as long as a pull lasts.
    pub liars: Option<PathBuf>,
}

/// The peers of the local network, by key.
type Found = Arc<Mutex<BTreeMap<EndpointId, EndpointAddr>>>;

/// A connection to the network of peers.
pub(crate) struct Network {
    bridge: Arc<Bridge>,
    endpoint: Endpoint,
    /// Where any peer may be.
    relays: Vec<RelayUrl>,
    liars: Arc<Liars>,
    began: Instant,
    /// Who is near, or why that can't be known; `None` if nobody wanted to.
    near: Option<Result<Found, String>>,
}

/// What is known of a peer that is not asked.
pub(crate) type Shunned = (String, Liar);

/// What came of looking around.
#[derive(Default)]
pub(crate) struct Around {
    /// Those that say that they have the package.
    pub(crate) sources: Vec<PeerSource>,
    /// Those that aren't asked.
    pub(crate) shunned: Vec<Shunned>,
    /// How many were asked, or not.
    pub(crate) n_found: usize,
}

/// What peers have in common, whether they ask or are asked. `builder` has the rest.
pub(super) fn prepared(builder: Builder, relays: &[RelayUrl]) -> Builder {
    let idle = IDLE.try_into().expect("it is a few seconds");
    let transport = QuicTransportConfig::builder()
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(IDLE / 4)
        .max_concurrent_bidi_streams(super::share::MAX_STREAMS.into())
        .max_concurrent_uni_streams(0_u32.into())
        .build();
    let mode = match relays.is_empty() {
        true => RelayMode::Disabled,
        false => RelayMode::custom(relays.iter().cloned()),
    };
    builder
        .clear_address_lookup()
        .transport_config(transport)
        .relay_mode(mode)
}

/// The relays of these addresses. Errors: [`PeersError::Relay`].
pub(super) fn relays(addresses: &[String]) -> Result<Vec<RelayUrl>, PeersError> {
    let relay = |address: &String| {
        ticket::relay(address).map_err(|problem| PeersError::Relay {
            relay: address.chars().take(200).collect(),
            problem,
        })
    };
    addresses.iter().map(relay).collect()
}

/// Runs `future` on the runtime, and gives it half a minute.
pub(super) fn wait<T>(bridge: &Bridge, future: impl Future<Output = T>) -> Result<T, PeersError> {
    let waited = bridge.wait(PATIENCE, &Activity::new(), None, future);
    waited.map_err(|_| PeersError::Bind("it takes too long".to_owned()))
}

/// Finds peers on the local network; `advertise` shows `endpoint` to them as well. To be called on a runtime.
pub(super) fn local(endpoint: &Endpoint, advertise: bool) -> Result<MdnsAddressLookup, String> {
    let mdns = MdnsAddressLookup::builder()
        .service_name(SERVICE)
        .discovery_cadence(CADENCE)
        .advertise(advertise)
        .build(endpoint.id())
        .map_err(|error| chain(&error))?;
    let lookups = endpoint.address_lookup().map_err(|error| chain(&error))?;
    lookups.add(mdns.clone());
    Ok(mdns)
}

impl Network {
    /// Joins the network, and begins to look for who is near, if that is wanted.
    ///
    /// Errors: [`PeersError`]; nothing if only those near can't be found.
    pub(crate) fn join(options: &PeerOptions, tickets: &[Ticket]) -> Result<Self, PeersError> {
        Self::join_by(Endpoint::builder(presets::Minimal), options, tickets)
    }

    /// The same by what `builder` has.
    pub(super) fn join_by(
        builder: Builder,
        options: &PeerOptions,
        tickets: &[Ticket],
    ) -> Result<Self, PeersError> {
        let liars = Arc::new(Liars::open(options.liars.as_deref())?);
        let relays = relays(&options.relays)?;
        let peers = tickets.iter().filter_map(Ticket::peer);
        let theirs = peers.flat_map(EndpointAddr::relay_urls).cloned();
        let all: Vec<RelayUrl> = relays.iter().cloned().chain(theirs).collect();
        let bridge = Bridge::new().map_err(PeersError::Thread)?;
        let builder = prepared(builder, &all);
        let endpoint = wait(&bridge, builder.bind())?;
        let endpoint = endpoint.map_err(|error| PeersError::Bind(chain(&error)))?;
        let is_bare = |ticket: &Ticket| ticket.peer().is_none();
        let near = match options.find_local || tickets.iter().any(is_bare) {
            true => Some(wait(&bridge, look(&bridge, &endpoint))?),
            false => None,
        };
        Ok(Self {
            bridge,
            endpoint,
            relays,
            liars,
            began: Instant::now(),
            near,
        })
    }

    /// Why peers on the local network can't be found, if they should be and can't.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.near.as_ref()?.as_ref().err().map(String::as_str)
    }

    /// Whether peers on the local network are looked for.
    pub(crate) fn looks_around(&self) -> bool {
        matches!(self.near, Some(Ok(_)))
    }

    /// The peer at `address` as a source of the package whose manifest has this digest, or why it isn't asked.
    pub(crate) fn source(
        &self,
        mut address: EndpointAddr,
        manifest: Digest,
    ) -> Result<PeerSource, Shunned> {
        if let Some(liar) = self.liars.find(&address.id.to_string()) {
            return Err((PeerSource::name_of(address.id), liar));
        }
        let relays = self.relays.iter().cloned().map(TransportAddr::Relay);
        address.addrs.extend(relays);
        let (endpoint, bridge) = (self.endpoint.clone(), self.bridge.beside());
        let liars = Arc::clone(&self.liars);
        Ok(PeerSource::new(address, manifest, endpoint, bridge, liars))
    }

    /// The peers on the local network that have the package, besides `known`. Where there is no other source,
    /// `is_needed`, it waits longer for the first.
    ///
    /// Errors: it was cancelled.
    pub(crate) fn find(
        &self,
        manifest: Digest,
        known: &[EndpointId],
        is_needed: bool,
        cancel: &Cancel,
    ) -> Result<Around, GivenUp> {
        let mut around = Around::default();
        let Some(Ok(near)) = &self.near else {
            return Ok(around);
        };
        let mut asked: Vec<EndpointId> = known.to_vec();
        let look = async {
            let mut asking = JoinSet::new();
            loop {
                let found = near.lock().unwrap_or_else(PoisonError::into_inner).clone();
                for (id, address) in found {
                    if asked.contains(&id) || asked.len() >= known.len() + MAX_FOUND {
                        continue;
                    }
                    asked.push(id);
                    match self.source(address, manifest) {
                        Err(liar) => around.shunned.push(liar),
                        Ok(source) => {
                            asking.spawn(async move {
                                let answer = tokio::time::timeout(ANSWER_WITHIN, source.has_it());
                                matches!(answer.await, Ok(true)).then_some(source)
                            });
                        }
                    }
                }
                let now = self.began.elapsed();
                let is_late = match is_needed && around.sources.is_empty() {
                    true => now >= LOOK_LONGER_FOR,
                    false => now >= LOOK_FOR,
                };
                if is_late && asking.is_empty() {
                    break;
                }
                tokio::select! {
                    Some(answer) = asking.join_next() => {
                        // One that panicked has nothing.
                        around.sources.extend(answer.ok().flatten());
                    }
                    () = tokio::time::sleep(CADENCE / 6) => {}
                }
            }
        };
        let patience = LOOK_LONGER_FOR + ANSWER_WITHIN * 2;
        self.bridge
            .wait(patience, &Activity::new(), Some(cancel), look)?;
        around.n_found = asked.len() - known.len();
        Ok(around)
    }
}

/// Begins to note who is near.
async fn look(bridge: &Bridge, endpoint: &Endpoint) -> Result<Found, String> {
    let mdns = local(endpoint, false)?;
    let mut events = mdns.subscribe().await;
    let found = Found::default();
    let noted = Arc::clone(&found);
    bridge.spawn(async move {
        // Ends when nobody looks any more.
        let _mdns = mdns;
        while let Some(event) = events.next().await {
            let DiscoveryEvent::Discovered { endpoint_info, .. } = event else {
                continue;
            };
            let address = endpoint_info.into_endpoint_addr();
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            if noted.len() < MAX_FOUND || noted.contains_key(&address.id) {
                noted.insert(address.id, address);
            }
        }
    });
    Ok(found)
}
