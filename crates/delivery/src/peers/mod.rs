//! Packages from other machines, and for them: peers.
//!
//! A peer is one more kind of source. It is found by a [`Ticket`], or on the local network by the digest of a
//! package's manifest, and asked over an encrypted connection of QUIC, by iroh, whose other end is known by its
//! key. Nothing that it sends counts but by the hashes of the manifest, and the manifest by its digest. One that
//! sent something false is not asked again, and [`Liars`] remembers it.
//!
//! [`Sharing`] is the other side: it gives the packages that it was given, and nothing else, within limits.
//!
//! No server of anybody takes part: neither relays nor directories, unless they are named.
//!
//! In a browser tabs are peers, over connections that JavaScript makes: only what is said is here, [`Request`] and
//! [`Reply`].

#[cfg(not(target_family = "wasm"))]
mod liars;
#[cfg(not(target_family = "wasm"))]
mod network;
mod protocol;
#[cfg(not(target_family = "wasm"))]
mod share;
#[cfg(not(target_family = "wasm"))]
mod source;
#[cfg(all(test, not(target_family = "wasm")))]
mod tests;
#[cfg(not(target_family = "wasm"))]
mod ticket;

#[cfg(not(target_family = "wasm"))]
use std::io;

pub use self::protocol::{Reply, Request};
#[cfg(not(target_family = "wasm"))]
pub use self::{
    liars::{Liar, Liars, LiarsError},
    network::PeerOptions,
    share::{ShareOptions, SharedPackage, Sharing},
    ticket::{Ticket, is_peer_address},
};
#[cfg(not(target_family = "wasm"))]
pub(crate) use self::{
    network::{Network, Shunned},
    source::PeerSource,
};

/// Why there is no connection to peers.
#[cfg(not(target_family = "wasm"))]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeersError {
    /// A relay whose address is none.
    #[error(
        "relay {relay:?}: expected an address such as https://relay.example.org, found {problem}"
    )]
    Relay {
        /// What was given.
        relay: String,
        /// The library's message.
        problem: String,
    },
    /// The system is out of threads.
    #[error("peers: cannot start a thread")]
    Thread(#[source] io::Error),
    /// No socket of this machine can be had.
    #[error("peers: cannot use the network: {0}")]
    Bind(String),
    /// The local network can't be asked.
    #[error("peers: cannot look on the local network: {0}")]
    Local(String),
    /// The file with the key of this machine can't be used.
    #[error("{file}: {problem}")]
    Key {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// What was said of liars can't be read.
    #[error(transparent)]
    Liars(#[from] LiarsError),
    /// Nobody on the local network has the package.
    #[error(
        "{package}: expected a peer on the local network that has it, found none among {n_found}"
    )]
    NotFound {
        /// The package's address.
        package: String,
        /// Peers that were found.
        n_found: usize,
    },
    /// The only peer lied before.
    #[error("{peer}: not asked: it lied before: {}", liar.why)]
    Lied {
        /// The peer.
        peer: String,
        /// What it sent.
        liar: Liar,
    },
}
