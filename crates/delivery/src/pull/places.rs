//! The sources that a pull is given, and the peers that it finds.

#[cfg(feature = "p2p")]
use super::Warning;
use super::{Notify, PullError, PullOptions, refs, source};
use crate::fetch::Cancel;
use crate::hash::Digest;
use crate::source::Source;

#[cfg(feature = "p2p")]
use {
    super::{Event, WarnOnce},
    crate::fetch::FetchError,
    crate::peers::{Network, PeersError, Shunned, Ticket, is_peer_address},
};

/// Where the files of a package may come from.
pub(super) struct Places<'a> {
    given: Vec<Box<dyn Source + 'a>>,
    /// The digest of the manifest, if the address says it.
    manifest: Option<Digest>,
    #[cfg(feature = "p2p")]
    peers: Option<Peers<'a>>,
}

#[cfg(feature = "p2p")]
struct Peers<'a> {
    network: Network,
    tickets: Vec<Ticket>,
    notify: &'a Notify<'a>,
}

impl<'a> Places<'a> {
    /// The package at `address`, and the mirrors and peers of `options`.
    ///
    /// Errors: [`PullError`] for an address that means nothing, or that can't be opened.
    pub(super) fn open(
        address: &str,
        options: &PullOptions,
        notify: &'a Notify<'a>,
    ) -> Result<Self, PullError> {
        let addresses = std::iter::once(address).chain(options.mirrors.iter().map(String::as_str));
        #[cfg(feature = "p2p")]
        {
            let (peers, others): (Vec<&str>, Vec<&str>) =
                addresses.partition(|a| is_peer_address(a));
            let tickets = peers.iter().map(|address| Ticket::parse(address));
            let tickets = tickets.collect::<Result<Vec<Ticket>, _>>()?;
            let is_first = is_peer_address(address);
            let manifest = tickets.first().filter(|_| is_first).map(Ticket::manifest);
            let mut given = Vec::new();
            for address in others {
                given.push(source(address, notify)?);
            }
            let peers = match tickets.is_empty() && !options.peers.find_local {
                true => None,
                false => Some(Peers::join(options, tickets, notify)?),
            };
            if let Some(peers) = &peers {
                peers.open(&mut given)?;
            }
            Ok(Self {
                given,
                manifest,
                peers,
            })
        }
        #[cfg(not(feature = "p2p"))]
        {
            let given = addresses.map(|address| source(address, notify));
            let given = given.collect::<Result<_, _>>()?;
            let manifest = None;
            Ok(Self { given, manifest })
        }
    }

    /// The digest of the manifest, if the address says it.
    pub(super) fn manifest(&self) -> Option<Digest> {
        self.manifest
    }

    /// The places that were named.
    pub(super) fn given(&self) -> Vec<&dyn Source> {
        refs(&self.given)
    }

    /// The peers on the local network that have the package whose manifest has this digest, if they are wanted.
    ///
    /// Errors: [`PullError`], if it was cancelled or there is no source at all.
    #[cfg(feature = "p2p")]
    pub(super) fn near(
        &self,
        manifest: Digest,
        cancel: &Cancel,
    ) -> Result<Vec<Box<dyn Source + 'a>>, PullError> {
        let Some(peers) = &self.peers else {
            return Ok(Vec::new());
        };
        let is_needed = self.given.is_empty();
        let known = peers.tickets.iter().filter_map(|ticket| ticket.peer());
        let known: Vec<_> = known.map(|peer| peer.id).collect();
        let found = peers.network.find(manifest, &known, is_needed, cancel);
        let found = found.map_err(|_| FetchError::Cancelled)?;
        found.shunned.iter().for_each(|shunned| peers.warn(shunned));
        if is_needed && found.sources.is_empty() {
            let package = Ticket::of(manifest).to_string();
            let n_found = found.n_found;
            return Err(PeersError::NotFound { package, n_found }.into());
        }
        let sources = found.sources.into_iter();
        let sources = sources.map(|source| Box::new(WarnOnce::new(source, peers.notify)) as Box<_>);
        Ok(sources.collect())
    }

    /// There are no peers.
    #[cfg(not(feature = "p2p"))]
    pub(super) fn near(
        &self,
        _manifest: Digest,
        _cancel: &Cancel,
    ) -> Result<Vec<Box<dyn Source + 'a>>, PullError> {
        Ok(Vec::new())
    }
}

#[cfg(feature = "p2p")]
impl<'a> Peers<'a> {
    fn join(
        options: &PullOptions,
        tickets: Vec<Ticket>,
        notify: &'a Notify<'a>,
    ) -> Result<Self, PullError> {
        let network = Network::join(&options.peers, &tickets)?;
        if let Some(why) = network.problem() {
            let why = why.to_owned();
            notify(Event::Warning(Warning::NoPeers { why }));
        }
        Ok(Self {
            network,
            tickets,
            notify,
        })
    }

    /// Adds the peers that tickets name to `given`.
    fn open(&self, given: &mut Vec<Box<dyn Source + 'a>>) -> Result<(), PullError> {
        let mut lied = None;
        for ticket in &self.tickets {
            let Some(peer) = ticket.peer() else {
                continue;
            };
            match self.network.source(peer.clone(), ticket.manifest()) {
                Ok(source) => given.push(Box::new(WarnOnce::new(source, self.notify))),
                Err(shunned) => {
                    self.warn(&shunned);
                    lied = Some(shunned);
                }
            }
        }
        match lied {
            Some((peer, liar)) if given.is_empty() && !self.network.looks_around() => {
                Err(PeersError::Lied { peer, liar }.into())
            }
            _ => Ok(()),
        }
    }

    fn warn(&self, (source, liar): &Shunned) {
        (self.notify)(Event::Warning(Warning::Liar {
            source: source.clone(),
            why: liar.why.clone(),
        }));
    }
}
