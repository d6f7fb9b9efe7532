//! Peers that talk to each other, on this machine.

use std::{collections::BTreeMap, io::Read as _, net::SocketAddr, time::Duration};

use bytes::Bytes;
use iroh::{Endpoint, EndpointAddr, TransportAddr, endpoint::presets};
use iroh_relay::server::{RelayConfig, Server, ServerConfig};

use super::{Network, PeerOptions, PeerSource, ShareOptions, SharedPackage, Sharing, Ticket};
use crate::{
    fetch::Fault,
    hash::{Algorithm, digest_of},
    source::Source,
};

const MANIFEST: &[u8] = b"{\"a\": \"manifest\"}";

fn package() -> SharedPackage {
    let files = [("manifest.json", MANIFEST), ("shard.bin", b"0123456789")];
    let files = files.map(|(name, bytes)| (name.to_owned(), Bytes::from_static(bytes)));
    SharedPackage::new(BTreeMap::from(files)).unwrap()
}

fn share(package: SharedPackage, options: ShareOptions) -> (Sharing, Ticket) {
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let options = ShareOptions {
        address: Some(address),
        ..options
    };
    let sharing = Sharing::start(vec![package], &options).unwrap();
    let ticket = sharing.tickets().remove(0);
    // As it is given from one to another.
    let ticket = Ticket::parse(&ticket.to_string()).unwrap();
    (sharing, ticket)
}

fn source_of(network: &Network, ticket: &Ticket) -> PeerSource {
    let peer = ticket.peer().unwrap().clone();
    let source = network.source(peer, ticket.manifest());
    source.map_err(|(_, liar)| liar).unwrap()
}

fn network() -> Network {
    Network::join(&PeerOptions::default(), &[]).unwrap()
}

fn text(
    source: &PeerSource,
    name: &str,
    range: Option<std::ops::Range<u64>>,
) -> Result<String, Fault> {
    let mut answer = source.open(name, range)?;
    let mut text = String::new();
    answer.body.read_to_string(&mut text).unwrap();
    assert_eq!(answer.head.content_length, Some(text.len() as u64));
    Ok(text)
}

#[test]
fn files_of_a_shared_package_are_read_whole_and_in_ranges_and_no_others() {
    let (sharing, ticket) = share(package(), ShareOptions::default());
    let network = network();
    let source = source_of(&network, &ticket);
    let manifest = text(&source, "manifest.json", None).unwrap();
    assert_eq!(manifest.as_bytes(), MANIFEST);
    assert_eq!(text(&source, "shard.bin", None).unwrap(), "0123456789");
    assert_eq!(text(&source, "shard.bin", Some(2..5)).unwrap(), "234");
    let head = source.open("shard.bin", Some(2..5)).unwrap().head;
    assert_eq!(head.content_range.as_deref(), Some("bytes 2-4/10"));
    let missing = |name: &str, range| match text(&source, name, range) {
        Err(Fault::Missing { message }) => message,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing("other.bin", None), "the peer doesn't share it");
    assert!(missing("../shard.bin", None).contains(".."));
    let long = format!("{}.bin", vec!["x".repeat(150); 6].join("/"));
    assert_eq!(missing(&long, None), "the peer doesn't share it");
    let beyond = missing("shard.bin", Some(5..11));
    assert_eq!(beyond, "the peer doesn't have these bytes");
    // Another package of the same peer.
    let other = digest_of(Algorithm::Sha256, b"other");
    let other = Ticket::new(other, ticket.peer().cloned());
    let other = source_of(&network, &other).open("manifest.json", None);
    assert!(matches!(other.err(), Some(Fault::Missing { .. })));
    assert!(sharing.sent() >= 10 + 3 + MANIFEST.len() as u64);
}

#[test]
fn a_manifest_of_another_digest_is_a_lie() {
    let mut wrong = package();
    wrong.manifest = digest_of(Algorithm::Sha256, b"what was asked for");
    let (_sharing, ticket) = share(wrong, ShareOptions::default());
    let dir = tempfile::tempdir().unwrap();
    let options = PeerOptions {
        liars: Some(dir.path().join("peers.json")),
        ..PeerOptions::default()
    };
    let network = Network::join(&options, &[]).unwrap();
    let source = source_of(&network, &ticket);
    let fault = text(&source, "manifest.json", None).unwrap_err();
    assert!(matches!(fault, Fault::WrongBytes(_)), "{fault}");
    assert_eq!(source.lied(&fault.to_string()), None);
    let (peer, later) = (
        ticket.peer().unwrap(),
        Network::join(&options, &[]).unwrap(),
    );
    let again = later.source(peer.clone(), ticket.manifest());
    assert!(again.err().unwrap().1.why.contains("expected sha256"));
}

#[test]
fn limits_hold() {
    let (_sharing, ticket) = share(
        package(),
        ShareOptions {
            requests: 0,
            ..ShareOptions::default()
        },
    );
    let network = network();
    let busy = text(&source_of(&network, &ticket), "shard.bin", None).unwrap_err();
    assert!(
        busy.may_pass() && busy.to_string().contains("busy"),
        "{busy}"
    );
    let (_sharing, ticket) = share(
        package(),
        ShareOptions {
            bytes_per_peer: Some(12),
            ..ShareOptions::default()
        },
    );
    let source = source_of(&network, &ticket);
    assert_eq!(text(&source, "shard.bin", None).unwrap(), "0123456789");
    // Also over another connection and by another key.
    let (other_network, quota) = (self::network(), "the peer gives no more to this machine");
    for source in [source, source_of(&other_network, &ticket)] {
        let refused = text(&source, "shard.bin", Some(0..3)).unwrap_err();
        assert!(refused.to_string().contains(quota), "{refused}");
        assert_eq!(text(&source, "shard.bin", Some(0..0)).unwrap(), "");
    }
}

#[test]
fn one_machine_has_four_connections_and_others_are_refused() {
    let (_sharing, ticket) = share(package(), ShareOptions::default());
    let networks: Vec<_> = (0..5).map(|_| network()).collect();
    let sources = networks.iter().map(|network| source_of(network, &ticket));
    let sources: Vec<_> = sources.collect();
    for source in &sources[..4] {
        assert_eq!(text(source, "shard.bin", Some(0..1)).unwrap(), "0");
    }
    let refused = text(&sources[4], "shard.bin", Some(0..1)).unwrap_err();
    assert!(refused.may_pass(), "{refused}");
}

#[test]
fn waiting_for_a_peer_that_is_not_there_can_be_interrupted() {
    let (sharing, ticket) = share(package(), ShareOptions::default());
    drop(sharing);
    let network = network();
    let source = source_of(&network, &ticket);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| text(&source, "shard.bin", None));
        while !asking.is_finished() {
            source.interrupt();
            std::thread::sleep(Duration::from_millis(20));
        }
        let fault = asking.join().unwrap().unwrap_err();
        assert!(fault.may_pass(), "{fault}");
    });
}

/// One has addresses of this machine alone, and the other none at all.
#[test]
fn peers_that_cannot_reach_each_other_meet_at_a_relay() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut config = ServerConfig::default();
    config.relay = Some(RelayConfig::new(([127, 0, 0, 1], 0)));
    let relay = runtime.block_on(Server::spawn(config)).unwrap();
    let url = format!("http://{}/", relay.http_addr().unwrap());
    let shard: Vec<u8> = (0..3_000_000_u32)
        .map(|i| (i.wrapping_mul(i) >> 7) as u8)
        .collect();
    let files = [("manifest.json", MANIFEST.to_vec()), ("shard.bin", shard)];
    let files = files.map(|(name, bytes)| (name.to_owned(), Bytes::from(bytes)));
    let files = BTreeMap::from(files);
    let options = ShareOptions {
        relays: vec![url.clone()],
        ..ShareOptions::default()
    };
    let (sharing, ticket) = share(SharedPackage::new(files.clone()).unwrap(), options);
    assert!(ticket.to_string().contains("relay=http"), "{ticket}");
    let peer = ticket.peer().unwrap();
    let addresses = |relay: bool| {
        let kept = peer.addrs.iter().filter(|addr| addr.is_relay() == relay);
        let kept: Vec<TransportAddr> = kept.cloned().collect();
        Ticket::new(
            ticket.manifest(),
            Some(EndpointAddr::from_parts(peer.id, kept)),
        )
    };
    let join = |relays: &[String], ticket: &Ticket| {
        let options = PeerOptions {
            relays: relays.to_vec(),
            ..PeerOptions::default()
        };
        let builder = Endpoint::builder(presets::Minimal).clear_ip_transports();
        Network::join_by(builder, &options, std::slice::from_ref(ticket)).unwrap()
    };
    // By the relay of the ticket, and by one that is named beside it.
    for (relays, ticket) in [
        (Vec::new(), addresses(true)),
        (vec![url.clone()], addresses(false)),
    ] {
        let before = relay.metrics().server.bytes_sent.get();
        let network = join(&relays, &ticket);
        let source = source_of(&network, &ticket);
        for (name, expected) in &files {
            let mut answer = source.open(name, None).unwrap();
            let mut bytes = Vec::new();
            answer.body.read_to_end(&mut bytes).unwrap();
            assert!(bytes == expected[..], "{name}");
        }
        let n_relayed = relay.metrics().server.bytes_sent.get() - before;
        assert!(n_relayed > 3_000_000, "{n_relayed}");
    }
    // One that doesn't say so isn't there.
    let (_absent, ticket) = share(package(), ShareOptions::default());
    let bare = EndpointAddr::new(ticket.peer().unwrap().id);
    let ticket = Ticket::new(ticket.manifest(), Some(bare));
    let network = join(std::slice::from_ref(&url), &ticket);
    let absent = source_of(&network, &ticket).open("shard.bin", None);
    assert!(absent.is_err_and(|fault| fault.may_pass()));
    assert!(sharing.sent() >= 6_000_000);
    runtime.block_on(relay.shutdown()).unwrap();
}
