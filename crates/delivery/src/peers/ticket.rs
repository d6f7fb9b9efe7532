//! Addresses of packages that peers have.

use std::{fmt, net::SocketAddr, str::FromStr};

use iroh::{EndpointAddr, EndpointId, RelayUrl, TransportAddr};

use crate::{
    hash::{Algorithm, Digest},
    source::UrlError,
};

/// The scheme of these addresses.
const SCHEME: &str = "p2p://";

/// Addresses that one ticket may have.
const MAX_ADDRESSES: usize = 32;

/// Whether `address` is that of a package that peers have.
pub fn is_peer_address(address: &str) -> bool {
    let start = address.get(..SCHEME.len());
    start.is_some_and(|start| start.eq_ignore_ascii_case(SCHEME))
}

/// Which package, by the SHA-256 of its manifest, and perhaps which peer has it and where that is:
/// `p2p://DIGEST` or `p2p://DIGEST@PEER?at=IP:PORT&relay=URL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    manifest: Digest,
    peer: Option<EndpointAddr>,
}

impl Ticket {
    pub(super) fn new(manifest: Digest, peer: Option<EndpointAddr>) -> Self {
        Self { manifest, peer }
    }

    /// The package whose manifest has this digest, whoever has it.
    pub fn of(manifest: Digest) -> Self {
        Self::new(manifest, None)
    }

    /// The digest of the package's manifest.
    pub fn manifest(&self) -> Digest {
        self.manifest
    }

    /// The peer that has it, if the ticket names one.
    pub(crate) fn peer(&self) -> Option<&EndpointAddr> {
        self.peer.as_ref()
    }

    /// Reads an address. Errors: [`UrlError`].
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let error = |why| UrlError {
            text: text.chars().take(200).collect(),
            why,
        };
        if !is_peer_address(text) {
            return Err(error("expected p2p://"));
        }
        let rest = text[SCHEME.len()..].trim_end_matches('/');
        let (place, query) = match rest.split_once('?') {
            Some((place, query)) => (place, Some(query)),
            None => (rest, None),
        };
        let (digest, peer) = match place.split_once('@') {
            Some((digest, peer)) => (digest, Some(peer)),
            None => (place, None),
        };
        let manifest = Digest::from_hex(Algorithm::Sha256, digest)
            .map_err(|_| error("expected the SHA-256 of a manifest, in 64 hexadecimal digits"))?;
        let Some(peer) = peer else {
            return match query {
                None => Ok(Self::new(manifest, None)),
                Some(_) => Err(error("it has an address, and names no peer")),
            };
        };
        let id = EndpointId::from_str(peer)
            .map_err(|_| error("expected the key of a peer behind the @"))?;
        let mut addresses = Vec::new();
        for part in query
            .unwrap_or_default()
            .split('&')
            .filter(|p| !p.is_empty())
        {
            if addresses.len() == MAX_ADDRESSES {
                return Err(error("it has more than 32 addresses"));
            }
            addresses.push(match part.split_once('=') {
                Some(("at", address)) => SocketAddr::from_str(address)
                    .map(TransportAddr::Ip)
                    .map_err(|_| error("expected at=IP:PORT"))?,
                Some(("relay", url)) => {
                    TransportAddr::Relay(relay(url).map_err(|_| error("expected relay=URL"))?)
                }
                _ => return Err(error("expected at=IP:PORT or relay=URL behind the ?")),
            });
        }
        Ok(Self::new(
            manifest,
            Some(EndpointAddr::from_parts(id, addresses)),
        ))
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.manifest)?;
        let Some(peer) = &self.peer else {
            return Ok(());
        };
        write!(f, "@{}", peer.id)?;
        let addresses = peer.ip_addrs().map(|address| format!("at={address}"));
        let relays = peer.relay_urls().map(|relay| format!("relay={relay}"));
        for (i, part) in addresses.chain(relays).enumerate() {
            write!(f, "{}{part}", if i == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

/// The address of a relay: of a web server. Errors: why it is none.
pub(super) fn relay(text: &str) -> Result<RelayUrl, String> {
    let url = RelayUrl::from_str(text).map_err(|error| error.to_string())?;
    let is_web = matches!(url.scheme(), "http" | "https");
    match is_web && url.host_str().is_some() && url.query().is_none() {
        true => Ok(url),
        false => Err("another kind of address".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn tickets_are_read_as_they_are_written() {
        let key = iroh::SecretKey::from_bytes(&[7; 32]).public();
        for text in [
            format!("p2p://{DIGEST}"),
            format!("p2p://{DIGEST}@{key}"),
            format!("p2p://{DIGEST}@{key}?at=127.0.0.1:80&at=[::1]:7&relay=https://r.example.org/"),
        ] {
            let ticket = Ticket::parse(&text).unwrap();
            assert_eq!(ticket.to_string(), text);
            assert_eq!(ticket.manifest().to_string(), DIGEST);
        }
        assert!(is_peer_address("P2P://x") && !is_peer_address("p2p:/") && !is_peer_address("é"));
    }

    #[test]
    fn what_is_wrong_with_a_ticket_is_said() {
        let key = iroh::SecretKey::from_bytes(&[7; 32]).public();
        let many = "at=1.2.3.4:5&".repeat(33);
        for (text, why) in [
            ("https://x".to_owned(), "expected p2p://"),
            (
                "p2p://abc".to_owned(),
                "expected the SHA-256 of a manifest, in 64 hexadecimal digits",
            ),
            (
                format!("p2p://{DIGEST}?at=1.2.3.4:5"),
                "it has an address, and names no peer",
            ),
            (
                format!("p2p://{DIGEST}@me"),
                "expected the key of a peer behind the @",
            ),
            (
                format!("p2p://{DIGEST}@{key}?at=here"),
                "expected at=IP:PORT",
            ),
            (
                format!("p2p://{DIGEST}@{key}?relay=ftp://x"),
                "expected relay=URL",
            ),
            (
                format!("p2p://{DIGEST}@{key}?x"),
                "expected at=IP:PORT or relay=URL behind the ?",
            ),
            (
                format!("p2p://{DIGEST}@{key}?{many}"),
                "it has more than 32 addresses",
            ),
        ] {
            assert_eq!(Ticket::parse(&text).unwrap_err().why, why, "{text}");
        }
    }
}
