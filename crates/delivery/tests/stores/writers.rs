//! Two who push different packages to one place.

use std::{collections::BTreeMap, path::Path, thread};

use sterna_delivery::hash::Algorithm;

use crate::{
    client::{Client, Kind, Place, at_each, bytes, check_stored, package, told, write},
    proxy::{Act, Proxy},
};

fn some_packages<const N: usize>(folder: &Path) -> [BTreeMap<String, Vec<u8>>; N] {
    std::array::from_fn(|i| i as u64 + 1).map(|seed| {
        let shards = [
            bytes(100_000, seed),
            bytes(200_000, 10 * seed),
            bytes(3_000, 3),
        ];
        let files = package("tiny", Algorithm::Sha256, &shards);
        write(&folder.join(seed.to_string()), &files);
        files
    })
}

/// Which of the packages is there, as a whole.
fn check_whole(store: &Path, place: &Place, packages: &[BTreeMap<String, Vec<u8>>]) -> usize {
    Client::pull(store, place).run().value("size");
    let model = sterna_delivery::store::Store::open(store)
        .unwrap()
        .model("tiny")
        .unwrap();
    let manifest = std::fs::read(&model.paths()["manifest.json"]).unwrap();
    let one = packages
        .iter()
        .position(|files| files["manifest.json"] == manifest);
    let one = one.expect("one of those that were pushed");
    check_stored(store, "tiny", &packages[one]);
    one
}

/// One is held just before it would make its package visible, until the other has done so.
#[test]
fn who_comes_second_hears_of_the_first() {
    at_each("second", |place| {
        let dir = tempfile::tempdir().unwrap();
        let packages = some_packages::<3>(dir.path());
        let folder = |i: usize| dir.path().join((i + 1).to_string());
        let (slow, quick, earlier) = (0, 1, 2);
        for has_earlier in [false, true] {
            let place = Place {
                name: format!("{}-{has_earlier}", place.name),
                ..place.clone()
            };
            if has_earlier {
                Client::push(&folder(earlier), &place).run().value("digest");
            }
            let n_looks = std::sync::atomic::AtomicUsize::new(0);
            let kind = place.kind;
            let proxy = Proxy::start(&place.server, move |_, asked| {
                let is_commit = match kind {
                    Kind::S3 | Kind::Azure | Kind::Google => {
                        asked.starts_with("PUT") && asked.contains("/index.json")
                    }
                    // The look before it: registries have no conditions.
                    Kind::Registry => {
                        let is_look = asked.starts_with("GET") && asked.contains("/manifests/");
                        is_look && n_looks.fetch_add(1, std::sync::atomic::Ordering::SeqCst) > 0
                    }
                };
                if is_commit { Act::Hold } else { Act::Pass }
            });
            let mut child = Client::push(&folder(slow), &place.by(&proxy.address)).start();
            let is_held = proxy.wait_for_hold(|| child.try_wait().unwrap().is_some());
            assert!(is_held, "{:?}", told(child.wait_with_output().unwrap()));
            let first = Client::push(&folder(quick), &place).run();
            let digest = first.value("digest");
            proxy.release();
            let second = told(child.wait_with_output().unwrap());
            let error = second.error();
            assert!(
                error.contains("another push ended there meanwhile"),
                "{error}"
            );
            assert!(error.contains(&digest), "{error}");
            let store = dir.path().join("store");
            assert_eq!(check_whole(&store, &place, &packages), quick);
            // As the message says.
            let again = Client::push(&folder(slow), &place).run();
            assert_eq!(
                (again.number("n_sent"), again.value("replaced")),
                (0, digest)
            );
            assert_eq!(check_whole(&store, &place, &packages), slow);
        }
    });
}

#[test]
fn of_two_at_once_one_is_there_whole() {
    at_each("at-once", |place| {
        let dir = tempfile::tempdir().unwrap();
        let packages = some_packages::<2>(dir.path());
        for _ in 0..5 {
            let pushes = [1, 2].map(|i| {
                let (folder, place) = (dir.path().join(i.to_string()), place.clone());
                thread::spawn(move || Client::push(&folder, &place).run())
            });
            let outcomes = pushes.map(|push| push.join().unwrap());
            let there = check_whole(&dir.path().join("store"), &place, &packages);
            assert!(outcomes[there].ok, "{}", outcomes[there].text);
            let other = &outcomes[1 - there];
            if !other.ok {
                let error = other.error();
                assert!(
                    error.contains("another push ended there meanwhile"),
                    "{error}"
                );
            }
        }
    });
}
