//! Pushes and pulls whose process is killed at any of their requests, and connections that break.

use std::{
    collections::{BTreeMap, HashSet},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use sterna_delivery::hash::Algorithm;

use crate::{
    client::{Client, Kind, Place, UPLOADS, at_each, bytes, check_stored, package, told, write},
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
            let push = |at: &str| {
                let notes = dir.path().join(format!("uploads-{:?}", place.kind));
                Client::push(&folder, &place.by(at)).env(UPLOADS, notes)
            };
            let is_killed = kill_after(n, &place.server, push);
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
            let again = push(&counted.address).run();
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

/// Parts of a large file that were sent before a push was killed aren't sent again, as far as stores have parts that can
/// be known; unless that is noted wrongly, or the store has another upload.
#[test]
fn a_push_goes_on_within_a_large_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    // Three parts, and one of 2 MiB.
    let files = package("tiny", Algorithm::Sha256, &[bytes(26 << 20, 3)]);
    write(&folder, &files);
    let is_part = |asked: &str| asked.contains("partNumber=") || asked.contains("blockid=");
    at_each("within", |place| {
        if place.kind == Kind::Registry {
            return;
        }
        let notes = dir.path().join(format!("uploads-{:?}", place.kind));
        // Leaves an upload of some parts at `place`; returns its notes, and the server that they are of.
        let leave = |place: &Place| {
            let (n_parts, is_left) = (Mutex::new(0), Arc::new(AtomicBool::new(false)));
            let is_over = Arc::clone(&is_left);
            let proxy = Proxy::start(&place.server, move |_, asked| {
                let mut n_parts = n_parts.lock().unwrap();
                *n_parts += usize::from(is_part(asked));
                match *n_parts > 3 && !is_over.load(Ordering::Relaxed) {
                    true => Act::Hold,
                    false => Act::Pass,
                }
            });
            let push = Client::push(&folder, &place.by(&proxy.address)).env(UPLOADS, &notes);
            let mut child = push.start();
            let is_held = proxy.wait_for_hold(|| child.try_wait().unwrap().is_some());
            if !is_held {
                panic!("it ended: {:?}", told(child.wait_with_output().unwrap()));
            }
            // Two are sent at a time, so that the one before may not have been answered yet.
            let note = std::fs::read_dir(&notes).unwrap().next().unwrap().unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let text = std::fs::read_to_string(note.path()).unwrap();
                if text.lines().count() >= 3 {
                    break;
                }
                let is_early = Instant::now() < deadline;
                assert!(is_early, "expected an upload and two parts, found {text:?}");
                thread::sleep(Duration::from_millis(10));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            is_left.store(true, Ordering::Relaxed);
            (note.path(), proxy)
        };
        // Pushes again; returns how many parts were sent.
        let go_on = |place: &Place, proxy: &Proxy| {
            let n_before = proxy.asked().len();
            let push = Client::push(&folder, &place.by(&proxy.address)).env(UPLOADS, &notes);
            let pushed = push.run();
            let asked = proxy.asked().split_off(n_before);
            let n_parts = asked.iter().filter(|asked| is_part(asked)).count();
            assert!(std::fs::read_dir(&notes).unwrap().next().is_none());
            let store = dir
                .path()
                .join(format!("store-{:?}-{}", place.kind, place.name));
            check_pulled(&store, place, &files);
            (n_parts, pushed.number("sent"))
        };
        let called = |name: &str| Place {
            name: format!("{}-{name}", place.name),
            ..place.clone()
        };
        let same = called("same");
        let (_, proxy) = leave(&same);
        let (n_parts, sent) = go_on(&same, &proxy);
        assert!((1..=2).contains(&n_parts), "{n_parts}");
        assert_eq!(sent, (8 * n_parts as u64 - 6) << 20);
        // A part with other bytes than are there now.
        let changed = called("changed");
        let (note, proxy) = leave(&changed);
        let text = std::fs::read_to_string(&note).unwrap();
        let (before, after) = text.split_once("\"blake3\":\"").unwrap();
        let wrong = format!("{before}\"blake3\":\"{}{}", "0".repeat(64), &after[64..]);
        std::fs::write(&note, wrong).unwrap();
        let (n_parts, _) = go_on(&changed, &proxy);
        assert!((2..=3).contains(&n_parts), "{n_parts}");
        // At another server nothing is known of it.
        let elsewhere = called("elsewhere");
        let (note, _) = leave(&elsewhere);
        let proxy = Proxy::start(&place.server, |_, _| Act::Pass);
        let push = Client::push(&folder, &elsewhere.by(&proxy.address)).env(UPLOADS, &notes);
        assert_eq!(push.run().number("n_sent"), 1);
        assert!(note.is_file(), "it is of another server");
        std::fs::remove_file(note).unwrap();
        let n_parts = proxy.asked().iter().filter(|asked| is_part(asked)).count();
        assert_eq!(n_parts, 4);
        // An upload that the store doesn't know. Azure's have no names.
        if place.kind != Kind::Azure {
            let ended = called("ended");
            let (note, proxy) = leave(&ended);
            let text = std::fs::read_to_string(&note).unwrap();
            let (first, _) = text.split_once('\n').unwrap();
            let id = first.strip_prefix("{\"upload\":\"").unwrap();
            let id = id.strip_suffix("\"}").unwrap();
            let other = "00000000000000000000000000000000";
            std::fs::write(&note, text.replace(id, other)).unwrap();
            let (n_parts, sent) = go_on(&ended, &proxy);
            assert!(n_parts > 4, "{n_parts}");
            // Parts of all attempts count.
            assert!(sent > 26 << 20, "{sent}");
        }
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
