//! Pushes and pulls whose process is killed at any of their requests, and connections that break.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::Mutex,
};

use sterna_delivery::hash::Algorithm;

use crate::{
    client::{Client, Kind, Place, at_each, bytes, check_stored, package, told, write},
    proxy::{Act, Proxy},
};

/// Shards of which the last is sent in parts to an object store.
fn some_package() -> BTreeMap<String, Vec<u8>> {
    let shards = [bytes(300_000, 1), bytes(9 << 20, 2)];
    package("tiny", Algorithm::Sha256, &shards)
}

/// Starts a client that the proxy lets make `n` requests, and kills it at the next; returns whether it got that far,
/// and what it said otherwise.
fn kill_after(n: usize, upstream: &str, client: impl FnOnce(&str) -> Client) -> bool {
    let proxy = Proxy::start(upstream, move |i, _| match i < n {
        true => Act::Pass,
        false => Act::Hold,
    });
    let mut child = client(&proxy.address).start();
    let is_held = proxy.wait_for_hold(|| child.try_wait().unwrap().is_some());
    if is_held {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    if !is_held {
        told(output).value("size");
    }
    is_held
}

/// How many of these requests send the bytes of a file.
fn n_uploads(kind: Kind, asked: &[String]) -> usize {
    let is_upload = |asked: &&String| match kind {
        Kind::Registry => asked.starts_with("PUT") && asked.contains("/blobs/uploads/"),
        Kind::S3 | Kind::Google => {
            asked.starts_with("PUT") && asked.contains("/blobs/") && !asked.contains("partNumber=")
                || asked.starts_with("POST") && asked.contains("uploadId=")
        }
        Kind::Azure => {
            asked.starts_with("PUT") && asked.contains("/blobs/") && !asked.contains("blockid=")
        }
    };
    asked.iter().filter(is_upload).count()
}

#[test]
fn a_push_killed_at_any_request_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let files = some_package();
    write(&folder, &files);
    at_each("killed-push", |place| {
        let mut n = 0;
        loop {
            let place = Place {
                name: format!("{}-{n}", place.name),
                ..place.clone()
            };
            let proxy = |at: &str| Client::push(&folder, &place.by(at));
            let is_killed = kill_after(n, &place.server, proxy);
            let store = dir.path().join(format!("store-{:?}-{n}", place.kind));
            let seen = Client::pull(&store, &place).run();
            if seen.ok {
                // It is there as a whole.
                check_stored(&store, "tiny", &files);
            } else {
                let error = seen.error();
                assert!(
                    error.contains("found no manifest.json"),
                    "after {n}: {error}"
                );
            }
            let counted = Proxy::start(&place.server, |_, _| Act::Pass);
            let again = Client::push(&folder, &place.by(&counted.address)).run();
            let n_sent = again.number("n_sent");
            // One after another is sent: what was answered before is there.
            let asked = counted.asked();
            assert!(
                n_uploads(place.kind, &asked) as u64 <= n_sent + 2,
                "{asked:?}"
            );
            if !seen.ok {
                check_pulled(&store, &place, &files);
            }
            match is_killed {
                true => n += 1,
                false => {
                    assert_eq!(n_sent, 0, "it was whole");
                    break;
                }
            }
        }
        // Something was begun, each file sent, and the whole made visible.
        assert!(n > files.len() * 2, "only {n} requests");
    });
}

/// Sent after the kill and before it: together what there is, and a file at most twice.
#[test]
fn a_push_that_goes_on_sends_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let files = some_package();
    write(&folder, &files);
    at_each("missing", |place| {
        // Held at the first byte of the last shard.
        let proxy = Proxy::start(&place.server, {
            let n_done = Mutex::new(0);
            move |_, asked| {
                let mut n_done = n_done.lock().unwrap();
                let is_begun = asked.starts_with("POST");
                let is_put = asked.starts_with("PUT") && asked.contains("/blobs/");
                *n_done += usize::from(is_put);
                match *n_done == 3 && is_begun || *n_done > 3 {
                    true => Act::Hold,
                    false => Act::Pass,
                }
            }
        });
        let mut child = Client::push(&folder, &place.by(&proxy.address)).start();
        let is_held = proxy.wait_for_hold(|| child.try_wait().unwrap().is_some());
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(is_held, "{:?}", told(output));
        let again = Client::push(&folder, &place).run();
        assert_eq!((again.number("n_sent"), again.number("sent")), (1, 9 << 20));
    });
}

#[test]
fn a_pull_killed_at_any_request_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let shards = [bytes(300_000, 1), bytes(5 << 20, 2)];
    let files = package("tiny", Algorithm::Sha256, &shards);
    write(&folder, &files);
    at_each("killed-pull", |place| {
        Client::push(&folder, &place).run().value("digest");
        let store = dir.path().join(format!("{:?}", place.kind));
        let mut n = 0;
        while kill_after(n, &place.server, |at| Client::pull(&store, &place.by(at))) {
            n += 1;
            // It is another source by its address, and what has arrived is anyone's.
            assert!(n < 100, "it never ends");
        }
        check_stored(&store, "tiny", &files);
        assert!(n > 3, "only {n} requests");
    });
}

/// Each request fails once, before it is heard or after.
#[test]
fn connections_that_break_are_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let files = some_package();
    write(&folder, &files);
    at_each("broken", |place| {
        for act in [Act::Cut, Act::Lose] {
            let place = Place {
                name: format!("{}-{act:?}", place.name).to_lowercase(),
                ..place.clone()
            };
            let breaks = || {
                let seen = Mutex::new(HashSet::new());
                Proxy::start(&place.server, move |_, asked| {
                    // Uploads of a registry have an id of their own each time.
                    let key = asked.split(['?', '_']).next().unwrap().to_owned();
                    let key = match asked.contains("/uploads/") {
                        true => key.split("/uploads/").next().unwrap().to_owned() + &asked[..4],
                        false => key,
                    };
                    match seen.lock().unwrap().insert(key) {
                        true => act,
                        false => Act::Pass,
                    }
                })
            };
            let proxy = breaks();
            let pushed = Client::push(&folder, &place.by(&proxy.address)).run();
            pushed.value("digest");
            check_pulled(&dir.path().join(&place.name), &place, &files);
            let proxy = breaks();
            let store = dir.path().join(format!("{}-again", place.name));
            check_pulled(&store, &place.by(&proxy.address), &files);
        }
    });
}

fn check_pulled(store: &Path, place: &Place, files: &BTreeMap<String, Vec<u8>>) {
    Client::pull(store, place).run().value("size");
    check_stored(store, "tiny", files);
}
