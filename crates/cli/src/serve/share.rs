//! Sharing the package that is served with peers.

use std::net::SocketAddr;
use std::num::NonZero;

use anyhow::{Context, Result};
use clap::Args;
use sterna_delivery::peers::{ShareOptions, SharedPackage, Sharing};

use super::package::{Package, ServedFile};
use crate::size::n_bytes;
use crate::{folders, output};

/// Whether and how the package is shared.
#[derive(Debug, Args)]
pub(super) struct ShareFlags {
    /// Give the package whose files are served, and nothing else, to peers as well: on the local network, which is told
    /// that this machine is there, and by the address that is printed, for `sterna pull`
    #[arg(long, conflicts_with = "no_files")]
    share: bool,

    /// Address and port for peers, with UDP; port 0 is a free one. One of this machine alone, such as 127.0.0.1:0, isn't
    /// told to the local network [default: all addresses, a free port]
    #[arg(long, value_name = "IP:PORT", requires = "share")]
    share_address: Option<SocketAddr>,

    /// Maximum bytes per second to all peers together, such as 20MiB
    #[arg(long, value_name = "SIZE", requires = "share", value_parser = n_bytes)]
    share_rate: Option<NonZero<u64>>,

    /// Maximum bytes to one peer, until the server ends: to one IP address, or one network of 64 bits of IPv6
    #[arg(long, value_name = "SIZE", requires = "share", value_parser = n_bytes)]
    share_quota: Option<NonZero<u64>>,

    /// Maximum requests of peers at a time
    #[arg(long, value_name = "N", requires = "share", default_value = "32")]
    share_requests: NonZero<u16>,

    /// Relay that peers may reach this machine by; may be given several times. Without one no server of others is used
    #[arg(long, value_name = "URL", requires = "share")]
    relay: Vec<String>,
}

impl ShareFlags {
    /// Shares `package` as long as what is returned lives, if that is wanted, and says by which address.
    pub(super) fn start(&self, package: &Package) -> Result<Option<Sharing>> {
        if !self.share {
            return Ok(None);
        }
        let files = package.files();
        let files = files.map(|file: &ServedFile| (file.name().to_owned(), file.bytes()));
        let shared = SharedPackage::new(files.collect()).context("the package has no manifest")?;
        let options = ShareOptions {
            address: self.share_address,
            relays: self.relay.clone(),
            key: Some(folders::peer_key()?),
            bytes_per_second: self.share_rate.map(NonZero::get),
            bytes_per_peer: self.share_quota.map(NonZero::get),
            requests: self.share_requests.get().into(),
        };
        let sharing = Sharing::start(vec![shared], &options)?;
        if let Some(why) = sharing.unannounced() {
            output::warning(format_args!("the local network isn't told of it: {why}"));
        }
        for ticket in sharing.tickets() {
            output::note(format_args!("shared with peers: {ticket}"));
        }
        Ok(Some(sharing))
    }
}
