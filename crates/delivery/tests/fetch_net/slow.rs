//! Sources that refuse, hang or drip, beside one that is good.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use super::server::{Asked, Files, Reply, Server};
use sterna_delivery::{
    fetch::{Cancel, Limits, fetch_small},
    pull::{Event, PullError, PullOptions, Pulled, Warning, pull},
    sign::TrustList,
    source::{HttpOptions, HttpSource, Source, Url},
    store::Store,
};

/// A source and what is wrong with it.
type Slow = (&'static str, fn(Reply) -> Reply);

const SLOW: [Slow; 4] = [
    ("refuses", |_| Reply::status(503)),
    ("hangs", |reply| {
        thread::sleep(Duration::from_secs(60));
        reply
    }),
    ("stops in the middle", |reply| Reply {
        pause: Duration::from_secs(60),
        ..reply
    }),
    ("drips", |reply| Reply {
        drip: true,
        ..reply
    }),
];

/// What a source is slow with.
const EVERYTHING: fn(&Asked) -> bool = |_| true;
const SHARDS: fn(&Asked) -> bool = |asked| asked.path.contains("shard_");

/// Far less than one silence of a source, and than one wait for a busy one.
const SOON: Duration = Duration::from_secs(30);

/// Short, but long enough for a server of a machine that has much else to do.
fn limits() -> Limits {
    Limits {
        grace: Duration::from_millis(700),
        least_rate_over: Duration::from_secs(2),
        stall_timeout: Duration::from_secs(3),
        ..Limits::default()
    }
}

fn package() -> Files {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/rdrr-samples/v1-gemma3-q4k");
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    });
    Arc::new(files.collect())
}

fn slow_server(files: &Files, what: fn(Reply) -> Reply, is_slow: fn(&Asked) -> bool) -> Server {
    Server::start(files, move |asked, reply| match is_slow(asked) {
        true => what(reply),
        false => reply,
    })
}

/// Pulls from `first`, with `second` as a mirror; gives the warnings too.
fn pull_from(first: &Server, second: &Server) -> (Result<Pulled, PullError>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let options = PullOptions {
        name: Some("m".into()),
        mirrors: vec![second.url()],
        limits: limits(),
        ..PullOptions::default()
    };
    let warnings = Mutex::new(Vec::new());
    let notify = |event: Event<'_>| {
        if let Event::Warning(warning @ (Warning::Silent { .. } | Warning::NotUsed { .. })) = event
        {
            warnings.lock().unwrap().push(warning.to_string());
        }
    };
    let pulled = pull(
        &store,
        &first.url(),
        &options,
        &TrustList::default(),
        &notify,
    );
    if pulled.is_ok() {
        assert_eq!(store.verify("m").unwrap(), []);
    }
    (pulled, warnings.into_inner().unwrap())
}

#[test]
fn a_small_file_comes_from_a_mirror_while_the_first_source_is_slow() {
    let files: Files = Arc::new(BTreeMap::from([("f.json".to_owned(), vec![b'x'; 500])]));
    for (what, slow) in SLOW {
        let (slow, good) = (slow_server(&files, slow, |_| true), Server::honest(&files));
        let sources = [&slow, &good].map(|server| {
            let options = HttpOptions {
                proxy_from_env: false,
                ..HttpOptions::default()
            };
            HttpSource::new(Url::parse(&server.url()).unwrap(), options)
        });
        let sources = sources.each_ref().map(|source| source as &dyn Source);
        let began = Instant::now();
        let found = fetch_small("f.json", 1000, &sources, &limits(), &Cancel::new());
        let found = found.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!((found.0.len(), found.1), (500, 1), "{what}");
        assert!(began.elapsed() < SOON, "{what}: {:?}", began.elapsed());
    }
}

#[test]
fn a_small_file_that_drips_is_given_up() {
    let files: Files = Arc::new(BTreeMap::from([("f.json".to_owned(), vec![b'x'; 5000])]));
    let server = slow_server(&files, SLOW[3].1, |_| true);
    let source = HttpSource::new(Url::parse(&server.url()).unwrap(), HttpOptions::default());
    let limits = Limits {
        retries: 1,
        backoff_base: Duration::from_millis(1),
        ..limits()
    };
    let error = fetch_small("f.json", 9000, &[&source], &limits, &Cancel::new()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("next to nothing came for too long"), "{text}");
}

#[test]
fn a_package_comes_from_a_mirror_while_the_first_source_is_slow() {
    let files = &package();
    thread::scope(|scope| {
        for (what, slow) in SLOW {
            for is_slow in [EVERYTHING, SHARDS] {
                scope.spawn(move || {
                    let good = Server::honest(files);
                    let slow = slow_server(files, slow, is_slow);
                    let began = Instant::now();
                    let (pulled, warnings) = pull_from(&slow, &good);
                    pulled.unwrap_or_else(|e| panic!("{what}: {e}"));
                    let took = began.elapsed();
                    assert!(took < SOON, "{what}: {took:?} {warnings:?}");
                    let has_manifest = !is_slow(&slow.log.lock().unwrap()[0]);
                    let is_named = warnings.iter().any(|text| text.contains(&slow.url()));
                    assert!(is_named || has_manifest, "{what}: {warnings:?}");
                    let is_good_named = warnings.iter().any(|text| text.contains(&good.url()));
                    assert!(!is_good_named, "{what}: {warnings:?}");
                });
            }
            // The other way round: a slow mirror is waited for no longer than the grace.
            scope.spawn(move || {
                let good = Server::honest(files);
                let slow = slow_server(files, slow, EVERYTHING);
                let began = Instant::now();
                let (pulled, _) = pull_from(&good, &slow);
                pulled.unwrap_or_else(|e| panic!("{what}: {e}"));
                assert!(began.elapsed() < SOON, "{what}: {:?}", began.elapsed());
            });
        }
    });
}

#[test]
fn the_first_source_is_believed_if_it_answers_within_the_grace() {
    let files = package();
    let mut other = (*files).clone();
    other.get_mut("manifest.json").unwrap().push(b'\n');
    let other = Server::honest(&Arc::new(other));
    let slow = Server::start(&files, |asked, reply| {
        if asked.path.ends_with("manifest.json") {
            thread::sleep(Duration::from_millis(20));
        }
        reply
    });
    let (pulled, warnings) = pull_from(&slow, &other);
    assert_eq!(pulled.unwrap().dropped[0].0, format!("{}/", other.url()));
    assert!(warnings[0].contains("is not that of"), "{warnings:?}");
}

#[test]
fn a_source_without_a_manifest_is_said_to_be_none_once() {
    let none: Files = Arc::default();
    let (first, second) = (Server::honest(&none), Server::honest(&none));
    let (pulled, _) = pull_from(&first, &second);
    let text = pulled.unwrap_err().to_string();
    let line = |server: &Server| {
        format!(
            "\n  {0}/: expected a package, found no manifest.json",
            server.url()
        )
    };
    assert_eq!(
        text,
        format!("no source has a package:{}{}", line(&first), line(&second))
    );
    let page: Files = Arc::new(BTreeMap::from([(
        "manifest.json".to_owned(),
        b"<html>".to_vec(),
    )]));
    let (first, second) = (
        Server::honest(&page),
        Server::start(&page, |_, _| Reply::status(403)),
    );
    let (pulled, _) = pull_from(&first, &second);
    let text = pulled.unwrap_err().to_string();
    assert_eq!(text.matches(&first.url()).count(), 1, "{text}");
    assert_eq!(text.matches(&second.url()).count(), 1, "{text}");
}
