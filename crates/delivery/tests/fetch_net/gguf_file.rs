//! GGUF files at plain addresses.

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use sterna_delivery::{
    fetch::{FetchError, Limits},
    pull::{Event, PullError, PullOptions, Pulled, Warning, pull},
    sign::TrustList,
    store::Store,
};

use crate::server::{Files, Reply, Server, bytes};

const NAME: &str = "models/a tiny-Q4_0.gguf";

/// Bytes that begin as a GGUF file does.
fn gguf(seed: u64, len: usize) -> Vec<u8> {
    let mut file = bytes(seed, len);
    file[..4].copy_from_slice(b"GGUF");
    file
}

fn files() -> Files {
    Arc::new(BTreeMap::from([(NAME.to_owned(), gguf(3, 3 << 20))]))
}

fn limits() -> Limits {
    Limits {
        backoff_base: Duration::from_millis(1),
        retries: 2,
        ..Limits::default()
    }
}

fn fetch(store: &Store, address: &str) -> (Result<Pulled, PullError>, Vec<String>) {
    let options = PullOptions {
        limits: limits(),
        ..PullOptions::default()
    };
    let warnings = Mutex::new(Vec::new());
    let pulled = pull(store, address, &options, &TrustList::default(), &|event| {
        if let Event::Warning(warning) = event {
            if let Warning::Unverified { .. } = &warning {
                warnings.lock().unwrap().push("unverified".to_owned());
            } else {
                warnings.lock().unwrap().push(warning.to_string());
            }
        }
    });
    (pulled, warnings.into_inner().unwrap())
}

fn stored(store: &Store, name: &str, file: &str) -> Vec<u8> {
    let model = store.model(name).unwrap();
    fs::read(&model.paths()[file]).unwrap()
}

#[test]
fn a_gguf_file_arrives_once_and_again_when_it_has_changed() {
    let first = Server::honest(&files());
    let address = format!("{}/models/a%20tiny-Q4_0.gguf?key=1", first.url());
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (pulled, warnings) = fetch(&store, &address);
    let pulled = pulled.unwrap();
    assert_eq!(warnings, ["unverified"], "http vouches for nothing");
    assert_eq!(
        (pulled.name.as_str(), pulled.size),
        ("a-tiny-Q4_0", 3 << 20)
    );
    assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == files()[NAME]);
    let asked = first.log.lock().unwrap();
    assert!(
        asked
            .iter()
            .all(|asked| asked.path.ends_with(".gguf?key=1"))
    );
    drop(asked);
    // The same ETag stands for the same bytes.
    let (again, _) = fetch(&store, &address);
    assert_eq!(again.unwrap().received, 0);
    assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == files()[NAME]);
    // Somewhere else there is another one of the name.
    let changed = Arc::new(BTreeMap::from([(NAME.to_owned(), gguf(4, 3 << 20))]));
    let second = Server::honest(&changed);
    let other = format!("{}/models/a%20tiny-Q4_0.gguf?key=1", second.url());
    let (refused, _) = fetch(&store, &other);
    assert!(matches!(refused, Err(PullError::NameInUse { .. })));
    let mut entry = store.model("a-tiny-Q4_0").unwrap().entry().clone();
    entry.source.clone_from(&other);
    store.pull("a-tiny-Q4_0").unwrap().publish(&entry).unwrap();
    let (pulled, _) = fetch(&store, &other);
    assert_eq!(pulled.unwrap().received, 3 << 20);
    assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == changed[NAME]);
    let swept = store.gc(sterna_delivery::store::Interrupted::Keep).unwrap();
    assert_eq!((swept.n_blobs, swept.unknown.len()), (1, 0));
}

#[test]
fn an_interrupted_one_goes_on_only_where_it_is_the_same_file() {
    for has_etag in [true, false] {
        let broken = Arc::new(AtomicBool::new(true));
        let breaks = broken.clone();
        let server = Server::start(&files(), move |asked, mut reply| {
            if !has_etag {
                reply.headers.retain(|(name, _)| name != "ETag");
            }
            let is_second_half = asked.range.as_ref().is_some_and(|r| r.start >= 1 << 20);
            match breaks.load(Ordering::Relaxed) && is_second_half {
                true => Reply::status(404),
                false => reply,
            }
        });
        let address = format!("{}/models/a%20tiny-Q4_0.gguf", server.url());
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let options = PullOptions {
            limits: Limits {
                segment_bytes: 1 << 20,
                parallel: 1,
                ..limits()
            },
            ..PullOptions::default()
        };
        let fetch = || pull(&store, &address, &options, &TrustList::default(), &|_| {});
        fetch().unwrap_err();
        assert_eq!(
            store.interrupted().unwrap(),
            [("a-tiny-q4_0".to_owned(), 1 << 20)]
        );
        broken.store(false, Ordering::Relaxed);
        let received = if has_etag { 2 << 20 } else { 3 << 20 };
        assert_eq!(fetch().unwrap().received, received);
        assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == files()[NAME]);
        assert!(store.interrupted().unwrap().is_empty());
    }
}

#[test]
fn a_cancelled_one_goes_on_however_little_has_arrived() {
    const LEN: usize = 100_000;
    let files: Files = Arc::new(BTreeMap::from([(NAME.to_owned(), gguf(7, LEN))]));
    let stuck = Arc::new(AtomicBool::new(true));
    let is_stuck = stuck.clone();
    let server = Server::start(&files, move |asked, mut reply| {
        // Asked for more than its length.
        if is_stuck.load(Ordering::Relaxed) && asked.range != Some(0..1) {
            reply.pause = Duration::from_secs(60);
        }
        reply
    });
    let address = format!("{}/models/a%20tiny-Q4_0.gguf", server.url());
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let options = PullOptions {
        limits: limits(),
        ..PullOptions::default()
    };
    let error = pull(
        &store,
        &address,
        &options,
        &TrustList::default(),
        &|event| {
            if let Event::Progress(so_far) = event
                && so_far.done_bytes >= LEN as u64 / 2
            {
                options.cancel.cancel();
            }
        },
    );
    assert!(matches!(
        error,
        Err(PullError::Fetch(FetchError::Cancelled))
    ));
    let left = LEN as u64 / 2;
    assert_eq!(
        store.interrupted().unwrap(),
        [("a-tiny-q4_0".to_owned(), left)]
    );
    stuck.store(false, Ordering::Relaxed);
    let (pulled, _) = fetch(&store, &address);
    assert_eq!(pulled.unwrap().received, LEN as u64 - left);
    assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == files[NAME]);
}

#[test]
fn a_name_in_capitals_and_a_slash_too_many_are_understood() {
    let files: Files = Arc::new(BTreeMap::from([("x.GGUF".to_owned(), gguf(8, 1000))]));
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (pulled, _) = fetch(&store, &format!("{}/x.GGUF/", server.url()));
    assert_eq!(pulled.unwrap().name, "x");
    assert!(stored(&store, "x", "x.gguf") == files["x.GGUF"]);
}

#[test]
fn a_file_is_chosen_of_repositories_only() {
    let server = Server::honest(&files());
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let options = PullOptions {
        file: Some("Q4_0".to_owned()),
        ..PullOptions::default()
    };
    for path in ["/models/a%20tiny-Q4_0.gguf", "/models"] {
        let address = format!("{}{path}", server.url());
        let error = pull(&store, &address, &options, &TrustList::default(), &|_| {});
        assert!(matches!(error, Err(PullError::Choice { .. })), "{error:?}");
    }
    assert_eq!(server.n_requests(), 0);
}

#[test]
fn where_nothing_listens_is_soon_given_up() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/x.gguf", gone.local_addr().unwrap());
    drop(gone);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let pull_with = |retries| {
        let options = PullOptions {
            limits: Limits {
                retries,
                ..Limits::default()
            },
            ..PullOptions::default()
        };
        let error = pull(&store, &address, &options, &TrustList::default(), &|_| {});
        error.unwrap_err().to_string()
    };
    let began = Instant::now();
    let error = pull_with(5);
    // Half a second and a second at most are waited; machines that run tests are busy.
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(error.contains("no better after 2 retries"), "{error}");
    let error = pull_with(1);
    assert!(error.contains("no better after 1 retry)"), "{error}");
}

#[test]
fn all_parts_of_a_set_arrive_and_a_part_that_is_missing_is_named() {
    let parts = [1, 2].map(|no| format!("big-{no:05}-of-00002.gguf"));
    let both: BTreeMap<_, _> = (parts.iter().cloned())
        .zip([gguf(5, 1000), gguf(6, 2000)])
        .collect();
    let server = Server::honest(&Arc::new(both.clone()));
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (pulled, _) = fetch(&store, &format!("{}/{}", server.url(), parts[0]));
    assert_eq!(pulled.unwrap().name, "big");
    for part in &parts {
        assert!(stored(&store, "big", part) == both[part]);
    }
    let (error, _) = fetch(&store, &format!("{}/{}", server.url(), parts[1]));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("give the first one") || error.contains("big"),
        "{error}"
    );
    let one = BTreeMap::from([(parts[0].clone(), gguf(5, 1000))]);
    let server = Server::honest(&Arc::new(one));
    let other = Store::open(dir.path().join("other")).unwrap();
    let (error, _) = fetch(&other, &format!("{}/{}", server.url(), parts[0]));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains(&parts[1]) && error.contains("404"),
        "{error}"
    );
}

#[test]
fn a_file_that_changes_on_its_way_is_refused() {
    let server = Server::start(&files(), |asked, mut reply| {
        if asked.index >= 2 {
            reply.set("ETag", format!("\"other-{}\"", 1));
        }
        reply
    });
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let address = format!("{}/models/a%20tiny-Q4_0.gguf", server.url());
    let options = PullOptions {
        limits: Limits {
            segment_bytes: 1 << 20,
            parallel: 1,
            ..limits()
        },
        ..PullOptions::default()
    };
    let error = pull(&store, &address, &options, &TrustList::default(), &|_| {}).unwrap_err();
    let error = format!("{error:?} {error}");
    assert!(error.contains("the file changed"), "{error}");
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn what_is_no_gguf_file_replaces_nothing() {
    let page = Arc::new(AtomicBool::new(false));
    let is_page = page.clone();
    let server = Server::start(&files(), move |_, mut reply| {
        if is_page.load(Ordering::Relaxed) {
            reply.status = 200;
            reply.body = b"sign in first".to_vec();
            reply.headers.clear();
            reply.set("Content-Length", 13);
        }
        reply
    });
    let address = format!("{}/models/a%20tiny-Q4_0.gguf", server.url());
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    fetch(&store, &address).0.unwrap();
    page.store(true, Ordering::Relaxed);
    let error = fetch(&store, &address).0.unwrap_err();
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    assert!(
        cause.unwrap_or_default().contains("found `sign`"),
        "{error}"
    );
    assert!(stored(&store, "a-tiny-Q4_0", "a-tiny-Q4_0.gguf") == files()[NAME]);
}
