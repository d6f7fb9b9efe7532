//! Fetching from web servers that misbehave in every way known: the exact bytes or a clear error, never
//! an unverified byte under a final name, and little fetched twice.

use std::{
    fs, io,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::server::{Asked, Files, Reply, Server, files};
use sterna_delivery::{
    fetch::{
        Blob, Cancel, Event, Fault, FetchError, FolderSink, Limits, Present, Report, Sink,
        SinkError, fetch,
    },
    hash::{Algorithm, Blake3Variant, BlockDigests, Digest, Expected, Verified, digest_of},
    source::{Answer, FolderSource, HttpOptions, HttpSource, Source, Url},
    store::{self, Entry, Store},
};

const BLOCK: u64 = 16 << 10;

fn limits() -> Limits {
    Limits {
        segment_bytes: 100_000,
        backoff_base: Duration::from_millis(2),
        backoff_cap: Duration::from_millis(20),
        ..Limits::default()
    }
}

fn blobs(files: &Files, algorithm: Algorithm, blocks: bool) -> Vec<Blob> {
    (files.iter())
        .map(|(name, bytes)| {
            let expected = Expected::Digest(digest_of(algorithm, bytes));
            let blob = Blob::new(name, bytes.len() as u64, expected).unwrap();
            if !blocks {
                return blob;
            }
            let blocks = BlockDigests::of(Algorithm::Sha256, BLOCK, bytes).unwrap();
            blob.with_blocks(blocks).unwrap()
        })
        .collect()
}

fn source(server: &Server) -> HttpSource {
    source_that_waits(server, Duration::from_secs(30))
}

fn source_that_waits(server: &Server, silence: Duration) -> HttpSource {
    let options = HttpOptions {
        silence,
        proxy_from_env: false,
        ..HttpOptions::default()
    };
    HttpSource::new(Url::parse(&server.url()).unwrap(), options)
}

fn pull(
    blobs: Vec<Blob>,
    servers: &[&Server],
    folder: &Path,
    limits: Limits,
) -> Result<Report, FetchError> {
    let sources: Vec<HttpSource> = servers.iter().map(|server| source(server)).collect();
    let sources: Vec<&dyn Source> = sources.iter().map(|source| source as &dyn Source).collect();
    let sink = FolderSink::new(folder);
    fetch(blobs, &sources, &sink, limits, &Cancel::new(), &mut |_| {})
}

/// Checks that nothing but right bytes is visible, and whether everything is.
fn check(files: &Files, folder: &Path, all: bool) {
    for (name, bytes) in files.iter() {
        match fs::read(folder.join(name)) {
            Ok(found) => assert!(found == *bytes, "{name} is visible and wrong"),
            Err(error) => assert!(!all, "{name}: {error}"),
        }
    }
    if all {
        let left = fs::read_dir(folder).unwrap().count();
        assert_eq!(left, files.len(), "something is left over");
    }
}

fn total(files: &Files) -> u64 {
    files.values().map(|bytes| bytes.len() as u64).sum()
}

fn largest(files: &Files) -> u64 {
    files
        .values()
        .map(|bytes| bytes.len() as u64)
        .max()
        .unwrap()
}

fn some_files() -> Files {
    files(&[
        ("a.bin", 350_000),
        ("b.bin", 100_000),
        ("c.json", 17),
        ("empty", 0),
        ("z.bin", 612_345),
    ])
}

/// A number that looks random, and is the same for the same request.
fn dice(asked: &Asked) -> u64 {
    let mut x = asked
        .index
        .wrapping_add(77)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 20
}

#[test]
fn an_honest_server_sends_every_byte_once() {
    let files = some_files();
    for algorithm in Algorithm::ALL {
        for blocks in [false, true] {
            let server = Server::honest(&files);
            let dir = tempfile::tempdir().unwrap();
            let report = pull(
                blobs(&files, algorithm, blocks),
                &[&server],
                dir.path(),
                limits(),
            )
            .unwrap();
            check(&files, dir.path(), true);
            assert_eq!(
                report.verified,
                vec![Some(Verified::Digest(algorithm)); files.len()]
            );
            assert_eq!(report.progress.received_bytes, total(&files));
            assert_eq!(server.sent.load(Ordering::Relaxed), total(&files));
            // What is there is not asked for again, and what a crash left is removed.
            fs::write(dir.path().join("a.bin.part-map"), "left").unwrap();
            let before = server.n_requests();
            let report = pull(
                blobs(&files, algorithm, blocks),
                &[&server],
                dir.path(),
                limits(),
            )
            .unwrap();
            assert_eq!(report.verified, vec![None; files.len()]);
            assert_eq!(server.n_requests(), before);
            check(&files, dir.path(), true);
        }
    }
}

#[test]
fn answers_that_are_cut_are_gone_on_with_at_the_byte() {
    let files = some_files();
    let server = Server::start(&files, |asked, mut reply| {
        if dice(asked).is_multiple_of(2) && !reply.body.is_empty() {
            reply.cut = Some((dice(asked) as usize >> 3) % reply.body.len());
        }
        reply
    });
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        retries: 30,
        ..limits()
    };
    let report = pull(
        blobs(&files, Algorithm::Sha256, false),
        &[&server],
        dir.path(),
        limits,
    )
    .unwrap();
    check(&files, dir.path(), true);
    assert_eq!(
        report.progress.received_bytes,
        total(&files),
        "nothing is fetched twice"
    );
}

#[test]
fn busy_servers_are_waited_for_as_they_ask() {
    let files = files(&[("a.bin", 50_000), ("b.bin", 50_000)]);
    for (status, retry_after, least) in [(429, Some("1"), 1000), (503, None, 0), (500, None, 0)] {
        let server = Server::start(&files, move |asked, reply| {
            if asked.index >= 2 {
                return reply;
            }
            let mut busy = Reply::status(status);
            if let Some(seconds) = retry_after {
                busy.set("Retry-After", seconds);
            }
            busy
        });
        let dir = tempfile::tempdir().unwrap();
        let began = Instant::now();
        pull(
            blobs(&files, Algorithm::Blake3, false),
            &[&server],
            dir.path(),
            limits(),
        )
        .unwrap();
        assert!(began.elapsed() >= Duration::from_millis(least));
        check(&files, dir.path(), true);
    }
    let server = Server::start(&files, |_, _| {
        Reply::status(503).with("Retry-After", "86400")
    });
    let dir = tempfile::tempdir().unwrap();
    let error = pull(
        blobs(&files, Algorithm::Blake3, false),
        &[&server],
        dir.path(),
        limits(),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("HTTP status 503, asks to wait 86400 s"),
        "{error}"
    );
}

#[test]
fn stalled_answers_are_given_up_and_gone_on_with() {
    let files = files(&[("a.bin", 300_000)]);
    let server = Server::start(&files, |asked, mut reply| {
        if asked.index == 1 {
            reply.pause = Duration::from_secs(60);
        }
        reply
    });
    let began = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    let source = source_that_waits(&server, Duration::from_millis(400));
    let (sink, cancel) = (FolderSink::new(dir.path()), Cancel::new());
    let blobs = blobs(&files, Algorithm::Sha256, false);
    let report = fetch(blobs, &[&source], &sink, limits(), &cancel, &mut |_| {}).unwrap();
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(report.progress.received_bytes, total(&files));
    check(&files, dir.path(), true);
}

#[test]
fn answers_that_drip_are_given_up_like_silent_ones() {
    let files = files(&[("a.bin", 100_000)]);
    let dripping = Server::start(&files, |_, reply| Reply {
        drip: true,
        ..reply
    });
    let honest = Server::honest(&files);
    let limits = Limits {
        retries: 1,
        least_rate_over: Duration::from_millis(400),
        ..limits()
    };
    let dir = tempfile::tempdir().unwrap();
    let error = pull(
        blobs(&files, Algorithm::Sha256, false),
        &[&dripping],
        dir.path(),
        limits.clone(),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("next to nothing came for too long"),
        "{error}"
    );
    check(&files, dir.path(), false);
    let servers = [&dripping, &honest];
    let report = pull(
        blobs(&files, Algorithm::Sha256, false),
        &servers,
        dir.path(),
        limits,
    )
    .unwrap();
    check(&files, dir.path(), true);
    assert!(report.progress.received_bytes <= total(&files));
}

#[test]
fn several_mirrors_share_the_work() {
    let files = files(&[
        ("a.bin", 300_000),
        ("b.bin", 300_000),
        ("c.bin", 300_000),
        ("d.bin", 300_000),
    ]);
    let slowly = |_: &Asked, reply: Reply| Reply {
        pause: Duration::from_millis(5),
        ..reply
    };
    let servers = [Server::start(&files, slowly), Server::start(&files, slowly)];
    let dir = tempfile::tempdir().unwrap();
    let both = [&servers[0], &servers[1]];
    let limits = Limits {
        segment_bytes: 1 << 20,
        ..limits()
    };
    pull(
        blobs(&files, Algorithm::Sha256, false),
        &both,
        dir.path(),
        limits,
    )
    .unwrap();
    check(&files, dir.path(), true);
    let sent = servers
        .each_ref()
        .map(|server| server.sent.load(Ordering::Relaxed));
    assert_eq!(sent, [600_000, 600_000]);
}

type Lie = fn(&Asked, Reply) -> Reply;

/// Every lie, with the words by which it is reported.
const LIES: [(&str, Lie, &str); 10] = [
    (
        "wrong bytes",
        |_, mut r| {
            if let Some(b) = r.body.first_mut() {
                *b ^= 1
            }
            r
        },
        "expected sha256 ",
    ),
    (
        "web page",
        |_, _| {
            Reply {
                status: 200,
                body: b"<html>".to_vec(),
                ..Reply::default()
            }
            .with("Content-Type", "text/html")
            .with("Content-Length", 6)
        },
        "expected data, found `text/html`",
    ),
    (
        "too long",
        |_, r| {
            let n = r.body.len() + 5;
            let mut r = r.with("Content-Length", n);
            r.body.resize(n, 7);
            r
        },
        "expected a file of",
    ),
    (
        "too short",
        |_, r| {
            let n = r.body.len() / 2;
            let mut r = r.with("Content-Length", n);
            r.body.truncate(n);
            r
        },
        "expected a file of",
    ),
    (
        "other part",
        |a, r| match &a.range {
            Some(range) => r.with(
                "Content-Range",
                format!("bytes {}-{}/350000", range.start + 1, range.end),
            ),
            None => r.with("Content-Length", 1),
        },
        "was given `bytes",
    ),
    (
        "other size",
        |a, r| match &a.range {
            Some(range) => r.with(
                "Content-Range",
                format!("bytes {}-{}/999", range.start, range.end - 1),
            ),
            None => r.with("Content-Length", 999),
        },
        "bytes, found 999",
    ),
    (
        "no range",
        |a, mut r| {
            if a.range.is_some() {
                r.headers.retain(|(n, _)| n != "Content-Range");
            } else {
                r.set("Content-Length", 3);
            }
            r
        },
        "no Content-Range",
    ),
    (
        "compressed",
        |_, r| r.with("Content-Encoding", "gzip"),
        "the encoding `gzip`",
    ),
    (
        "ever new",
        |a, r| r.with("ETag", format!("\"{}\"", a.index)),
        "the file changed: its ETag was",
    ),
    ("gone", |_, _| Reply::status(404), "HTTP status 404"),
];

#[test]
fn a_source_that_lies_is_dropped_and_the_rest_carries_on() {
    let files = files(&[("a.bin", 350_000), ("b.bin", 350_000)]);
    for (name, lie, reason) in LIES {
        let (liar, honest) = (Server::start(&files, lie), Server::honest(&files));
        let dir = tempfile::tempdir().unwrap();
        let blobs = blobs(&files, Algorithm::Sha256, false);
        let report = pull(blobs.clone(), &[&liar, &honest], dir.path(), limits()).unwrap();
        check(&files, dir.path(), true);
        if name != "gone" {
            let [(source, why)] = &report.dropped[..] else {
                panic!("{name}: {:?}", report.dropped)
            };
            assert!(
                source.contains(&liar.url()) && why.contains(reason),
                "{name}: {why}"
            );
        }
        let extra = report.progress.received_bytes - total(&files);
        assert!(extra <= 2 * largest(&files), "{name}: {extra} bytes twice");
        // Alone, it is an error that says why.
        let dir = tempfile::tempdir().unwrap();
        let error = pull(blobs, &[&liar], dir.path(), limits())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(reason) && error.contains(&liar.url()),
            "{name}: {error}"
        );
        check(&files, dir.path(), false);
    }
}

/// A source that keeps what it is told of its lies.
struct Told(HttpSource, Mutex<Vec<String>>);

impl Source for Told {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        self.0.open(name, range)
    }

    fn lied(&self, why: &str) -> Option<String> {
        self.1.lock().unwrap().push(why.to_owned());
        None
    }
}

#[test]
fn a_liar_is_told_so_once_and_bytes_are_counted_by_source() {
    let files = files(&[("a.bin", 350_000), ("b.bin", 350_000)]);
    let flip = |_: &Asked, mut reply: Reply| {
        if let Some(byte) = reply.body.first_mut() {
            *byte ^= 1;
        }
        reply
    };
    let (liar, honest) = (Server::start(&files, flip), Server::honest(&files));
    // One that never answers is no liar.
    let gone = Server::honest(&files);
    let servers = [&liar, &honest, &gone];
    let sources = servers.map(|server| Told(source(server), Mutex::default()));
    drop(gone);
    let dir = tempfile::tempdir().unwrap();
    let report = fetch(
        blobs(&files, Algorithm::Blake3, true),
        &sources.each_ref().map(|source| source as &dyn Source),
        &FolderSink::new(dir.path()),
        limits(),
        &Cancel::new(),
        &mut |_| {},
    )
    .unwrap();
    check(&files, dir.path(), true);
    let told = sources
        .each_ref()
        .map(|told| told.1.lock().unwrap().clone());
    let [liar, honest, gone] = &told;
    assert!(
        liar.len() == 1 && liar[0].contains("expected sha256"),
        "{told:?}"
    );
    assert!(honest.is_empty() && gone.is_empty(), "{told:?}");
    let names = report.received_by.iter().map(|(name, _)| name.as_str());
    assert!(names.eq(sources.iter().map(Source::name)));
    let by: Vec<u64> = report.received_by.iter().map(|(_, n)| *n).collect();
    assert_eq!(by.iter().sum::<u64>(), report.progress.received_bytes);
    assert!(by[0] > 0 && by[1] >= total(&files) && by[2] == 0, "{by:?}");
}

#[test]
fn with_block_digests_a_lie_costs_a_block() {
    let files = files(&[("a.bin", 2_000_000)]);
    let liar = Server::start(&files, |asked, mut reply| {
        if asked.index == 2 {
            let at = reply.body.len() / 2;
            reply.body[at] ^= 1;
        }
        reply
    });
    let honest = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs(&files, Algorithm::Blake3, true);
    let report = pull(blobs, &[&liar, &honest], dir.path(), limits()).unwrap();
    check(&files, dir.path(), true);
    assert!(
        report.dropped[0].1.contains("expected sha256"),
        "{:?}",
        report.dropped
    );
    let extra = report.progress.received_bytes - total(&files);
    // What was read with the wrong block, and the requests of the liar that were given up with it.
    assert!(extra <= 4 * BLOCK + (256 << 10), "{extra} bytes twice");
}

#[test]
fn servers_without_ranges_are_used_from_the_start() {
    let files = some_files();
    let server_files = files.clone();
    let server = Server::start(&files, move |asked, reply| {
        if reply.status != 206 {
            return reply;
        }
        let body = server_files[asked.path.trim_start_matches('/')].clone();
        let len = body.len();
        Reply {
            status: 200,
            body,
            ..Reply::default()
        }
        .with("Content-Length", len)
    });
    let dir = tempfile::tempdir().unwrap();
    let report = pull(
        blobs(&files, Algorithm::Sha256, false),
        &[&server],
        dir.path(),
        limits(),
    )
    .unwrap();
    check(&files, dir.path(), true);
    assert_eq!(report.progress.received_bytes, total(&files));
    assert!(
        server
            .log
            .lock()
            .unwrap()
            .iter()
            .any(|asked| asked.range.is_none())
    );
}

#[test]
fn answers_of_unknown_length_end_where_they_should() {
    let files = files(&[("a.bin", 5000)]);
    for (extra, ok) in [(0, true), (1, false), (-1, false)] {
        let server = Server::start(&files, move |_, mut reply| {
            reply.headers.clear();
            reply.set("Connection", "close");
            reply
                .body
                .resize((reply.body.len() as i64 + extra) as usize, 0);
            reply.cut = Some(usize::MAX);
            reply
        });
        let dir = tempfile::tempdir().unwrap();
        let blob = vec![Blob::new("a.bin", 5000, Expected::SizeOnly).unwrap()];
        let outcome = pull(
            blob,
            &[&server],
            dir.path(),
            Limits {
                retries: 0,
                ..limits()
            },
        );
        assert_eq!(outcome.is_ok(), ok, "{outcome:?}");
        check(&files, dir.path(), ok);
    }
}

#[test]
fn redirects_are_followed_within_reason_and_without_the_token() {
    let files = files(&[("a.bin", 3000)]);
    let target = Server::honest(&files);
    let to = target.url();
    let front = Server::start(&files, move |asked, _| {
        Reply::status(302).with("Location", format!("{to}{}", asked.path))
    });
    let dir = tempfile::tempdir().unwrap();
    let options = HttpOptions {
        token: Some("secret".into()),
        proxy_from_env: false,
        ..HttpOptions::default()
    };
    let source = HttpSource::new(Url::parse(&front.url()).unwrap(), options);
    let sink = FolderSink::new(dir.path());
    let blobs = blobs(&files, Algorithm::Sha256, false);
    fetch(
        blobs.clone(),
        &[&source],
        &sink,
        limits(),
        &Cancel::new(),
        &mut |_| {},
    )
    .unwrap();
    check(&files, dir.path(), true);
    let sent = |server: &Server| {
        server.log.lock().unwrap()[0]
            .headers
            .get("authorization")
            .cloned()
    };
    assert_eq!(sent(&front).as_deref(), Some("Bearer secret"));
    assert_eq!(sent(&target), None);
    let asked = target.log.lock().unwrap()[0].headers["accept-encoding"].clone();
    assert_eq!(asked, "identity");

    let cases: [(&str, Lie, &str); 4] = [
        (
            "loop",
            |a, _| Reply::status(301).with("Location", &a.path),
            "more than ten redirects",
        ),
        (
            "garbage",
            |_, _| Reply::status(307).with("Location", "ht tp:\\"),
            "redirect to",
        ),
        ("nowhere", |_, _| Reply::status(308), "redirect to"),
        (
            "file",
            |_, _| Reply::status(302).with("Location", "file:///etc/passwd"),
            "expected http",
        ),
    ];
    for (name, lie, reason) in cases {
        let server = Server::start(&files, lie);
        let dir = tempfile::tempdir().unwrap();
        let error = pull(blobs.clone(), &[&server], dir.path(), limits())
            .unwrap_err()
            .to_string();
        assert!(error.contains(reason), "{name}: {error}");
        check(&files, dir.path(), false);
    }
}

#[test]
fn when_every_source_fails_each_is_named_with_its_reason() {
    let files = files(&[("a.bin", 3000)]);
    let missing = Server::start(&files, |_, _| Reply::status(403));
    let garbage = Server::start(&files, LIES[0].1);
    let closed = {
        let server = Server::honest(&files);
        server.address
    };
    let sources = [source(&missing), source(&garbage)];
    let nobody = HttpSource::new(
        Url::parse(&format!("http://{closed}")).unwrap(),
        HttpOptions {
            proxy_from_env: false,
            ..HttpOptions::default()
        },
    );
    let dir = tempfile::tempdir().unwrap();
    let sink = FolderSink::new(dir.path());
    // The port of a server that has stopped: refused, or closed at once.
    std::thread::sleep(Duration::from_millis(50));
    let blobs = blobs(&files, Algorithm::Sha256, false);
    let all: [&dyn Source; 3] = [&sources[0], &sources[1], &nobody];
    let error = fetch(blobs, &all, &sink, limits(), &Cancel::new(), &mut |_| {}).unwrap_err();
    let text = error.to_string();
    for part in [
        "`a.bin`",
        "HTTP status 403",
        "expected sha256",
        "after 5 retries",
        &missing.url(),
        &garbage.url(),
    ] {
        assert!(text.contains(part), "{text}");
    }
    check(&files, dir.path(), false);
}

#[test]
fn cancelled_fetches_stop_soon_and_go_on_later() {
    let files = files(&[("a.bin", 1_500_000), ("b.bin", 1_500_000)]);
    let server = Server::start(&files, |_, mut reply| {
        reply.pause = Duration::from_millis(150);
        reply
    });
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs(&files, Algorithm::Blake3, false);
    let mut received = 0;
    for _ in 0..3 {
        let (source, sink, cancel) = (source(&server), FolderSink::new(dir.path()), Cancel::new());
        let mut stopped = None;
        let outcome = fetch(
            blobs.clone(),
            &[&source],
            &sink,
            limits(),
            &cancel,
            &mut |event| {
                if let Event::Progress(progress) = event
                    && progress.received_bytes > 200_000
                {
                    received = received.max(progress.received_bytes);
                    stopped.get_or_insert_with(Instant::now);
                    cancel.cancel();
                }
            },
        );
        assert!(matches!(outcome, Err(FetchError::Cancelled)), "{outcome:?}");
        assert!(stopped.unwrap().elapsed() < Duration::from_secs(5));
        check(&files, dir.path(), false);
    }
    let report = pull(blobs, &[&server], dir.path(), limits()).unwrap();
    check(&files, dir.path(), true);
    assert!(
        report.progress.received_bytes < total(&files),
        "it began anew"
    );
}

#[test]
fn what_is_there_needs_no_source() {
    let files = some_files();
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let blobs = blobs(&files, Algorithm::Sha256, false);
    let error = pull(blobs.clone(), &[], dir.path(), limits())
        .unwrap_err()
        .to_string();
    assert_eq!(error, "`a.bin`: no source can deliver it: there is none");
    pull(blobs.clone(), &[&server], dir.path(), limits()).unwrap();
    pull(blobs, &[], dir.path(), limits()).unwrap();
}

#[test]
fn a_cancelled_fetch_does_not_wait_for_a_silent_server() {
    let files = files(&[("a.bin", 300_000)]);
    let server = Server::start(&files, |_, reply| Reply {
        pause: Duration::from_secs(300),
        ..reply
    });
    let dir = tempfile::tempdir().unwrap();
    let (source, sink, cancel) = (source(&server), FolderSink::new(dir.path()), Cancel::new());
    let began = Instant::now();
    let blobs = blobs(&files, Algorithm::Sha256, false);
    let outcome = fetch(blobs, &[&source], &sink, limits(), &cancel, &mut |event| {
        if let Event::Progress(progress) = event
            && progress.received_bytes > 0
        {
            cancel.cancel();
        }
    });
    assert!(matches!(outcome, Err(FetchError::Cancelled)), "{outcome:?}");
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "the silence would last thirty seconds"
    );
}

#[test]
fn bytes_come_no_faster_than_allowed() {
    let files = files(&[("a.bin", 300_000)]);
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        bytes_per_second: Some(400_000),
        ..limits()
    };
    let began = Instant::now();
    pull(
        blobs(&files, Algorithm::Sha256, false),
        &[&server],
        dir.path(),
        limits,
    )
    .unwrap();
    let took = began.elapsed().as_secs_f64();
    assert!((0.4..5.0).contains(&took), "{took} s");
    check(&files, dir.path(), true);
}

#[test]
fn chance_faults_of_every_kind_end_well_where_one_mirror_is_good() {
    let files = some_files();
    for seed in 0..12u64 {
        let faults = Arc::new(AtomicU64::new(0));
        let counted = faults.clone();
        let bad = Server::start(&files, move |asked, mut reply| {
            let dice = dice(asked).wrapping_add(seed.wrapping_mul(7919));
            let kind = dice % 16;
            if kind < 12 {
                counted.fetch_add(1, Ordering::Relaxed);
            }
            match kind {
                0..=2 => reply.cut = Some((dice as usize >> 5) % reply.body.len().max(1)),
                3 => return Reply::status(503),
                4 => return Reply::status(429).with("Retry-After", "0"),
                5 if asked.index > 6 => reply.body.fill(9),
                n @ 6..=11 if asked.index > 12 => return LIES[n as usize - 4].1(asked, reply),
                _ => {}
            }
            reply
        });
        let honest = Server::honest(&files);
        let dir = tempfile::tempdir().unwrap();
        let limits = Limits {
            seed,
            segment_bytes: 30_000,
            ..limits()
        };
        let blocks = seed % 2 == 1;
        let report = pull(
            blobs(&files, Algorithm::Blake3, blocks),
            &[&bad, &honest],
            dir.path(),
            limits,
        );
        let report = report.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        check(&files, dir.path(), true);
        let extra = report.progress.received_bytes - total(&files);
        let unit = if blocks {
            BLOCK + (64 << 10)
        } else {
            largest(&files)
        };
        let bound = (faults.load(Ordering::Relaxed) + 4) * unit;
        assert!(extra <= bound, "seed {seed}: {extra} bytes twice");
    }
}

#[test]
fn folders_are_verified_like_anybody() {
    let files = some_files();
    let (good, bad) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (name, bytes) in files.iter() {
        fs::write(good.path().join(name), bytes).unwrap();
        let mut bytes = bytes.clone();
        bytes.iter_mut().take(1).for_each(|b| *b ^= 1);
        fs::write(bad.path().join(name), bytes).unwrap();
    }
    let (good, bad) = (
        FolderSource::new(good.path()),
        FolderSource::new(bad.path()),
    );
    let blobs = blobs(&files, Algorithm::Sha256, false);
    let dir = tempfile::tempdir().unwrap();
    let sink = FolderSink::new(dir.path());
    let cancel = Cancel::new();
    let error = fetch(
        blobs.clone(),
        &[&bad],
        &sink,
        limits(),
        &cancel,
        &mut |_| {},
    )
    .unwrap_err();
    assert!(error.to_string().contains("expected sha256"), "{error}");
    check(&files, dir.path(), false);
    drop(sink);
    let sink = FolderSink::new(dir.path());
    let report = fetch(blobs, &[&bad, &good], &sink, limits(), &cancel, &mut |_| {}).unwrap();
    assert_eq!(report.dropped.len(), 1);
    check(&files, dir.path(), true);
}

#[test]
fn the_blake3_variant_is_told_from_blake3() {
    let files = files(&[("a.bin", 250_000), ("b.bin", 1)]);
    let blobs = |honest: bool| -> Vec<Blob> {
        (files.iter())
            .map(|(name, bytes)| {
                let mut variant = Blake3Variant::new();
                variant.update(bytes);
                if !honest {
                    variant.update(b"more");
                }
                let expected = Expected::Digest(Digest::new(Algorithm::Blake3, variant.finish()));
                Blob::new(name, bytes.len() as u64, expected).unwrap()
            })
            .collect()
    };
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let report = pull(blobs(true), &[&server], dir.path(), limits()).unwrap();
    assert_eq!(report.verified, [Some(Verified::Blake3Variant); 2]);
    check(&files, dir.path(), true);
    // Recognised again when it is there.
    let report = pull(blobs(true), &[&server], dir.path(), limits()).unwrap();
    assert_eq!(report.progress.received_bytes, 0);
    let dir = tempfile::tempdir().unwrap();
    let error = pull(blobs(false), &[&server], dir.path(), limits()).unwrap_err();
    assert!(error.to_string().contains("expected blake3"), "{error}");
    check(&files, dir.path(), false);
}

#[test]
fn digests_that_no_bytes_have_end_the_fetch() {
    let files = files(&[("a.bin", 50_000), ("empty", 0)]);
    let server = Server::honest(&files);
    let wrong = Expected::Digest(digest_of(Algorithm::Sha256, b"something"));
    let blocks = BlockDigests::of(Algorithm::Blake3, BLOCK, &files["a.bin"]).unwrap();
    let contradictory = [
        Blob::new("empty", 0, wrong).unwrap(),
        Blob::new("a.bin", 50_000, wrong)
            .unwrap()
            .with_blocks(blocks)
            .unwrap(),
    ];
    for blob in contradictory {
        let dir = tempfile::tempdir().unwrap();
        let error = pull(vec![blob], &[&server], dir.path(), limits())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("what is said of it contradicts itself"),
            "{error}"
        );
        check(&files, dir.path(), false);
    }
}

/// A folder that has room for so many bytes.
struct Full {
    folder: FolderSink,
    left: AtomicU64,
}

impl Sink for Full {
    fn present(&self, blob: &Blob) -> Result<Present, SinkError> {
        self.folder.present(blob)
    }

    fn write_at(&self, blob: &Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let n = bytes.len() as u64;
        let room = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(n)
            });
        room.map_err(|_| {
            let full = io::Error::from(io::ErrorKind::StorageFull);
            SinkError::of(&self.folder.path(blob), "write")(full)
        })?;
        self.folder.write_at(blob, offset, bytes)
    }

    fn read_at(&self, blob: &Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        self.folder.read_at(blob, offset, bytes)
    }

    fn discard(&self, blob: &Blob, range: Range<u64>) -> Result<(), SinkError> {
        self.folder.discard(blob, range)
    }

    fn commit(&self, blob: &Blob, verified: Verified) -> Result<(), SinkError> {
        self.folder.commit(blob, verified)
    }
}

#[test]
fn a_full_sink_ends_the_fetch_and_what_it_has_is_used_later() {
    let files = some_files();
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    let mut received = 0;
    for room in [0, 200_000, 300_000, 400_000] {
        let sink = Full {
            folder: FolderSink::new(dir.path()),
            left: room.into(),
        };
        let blobs = blobs(&files, Algorithm::Sha256, false);
        let source = source(&server);
        let error = fetch(
            blobs,
            &[&source],
            &sink,
            limits(),
            &Cancel::new(),
            &mut |_| {},
        )
        .unwrap_err();
        let FetchError::Sink(error) = error else {
            panic!("{error}")
        };
        // Files arrive at the same time: any of them may be the first that finds no room.
        let message = error.to_string();
        let named = files
            .iter()
            .any(|(name, _)| message.ends_with(&format!("{name}: cannot write")));
        assert!(named, "{message}");
        assert_eq!(error.source.kind(), io::ErrorKind::StorageFull);
        check(&files, dir.path(), false);
        received += room;
    }
    let report = pull(
        blobs(&files, Algorithm::Sha256, false),
        &[&server],
        dir.path(),
        limits(),
    )
    .unwrap();
    check(&files, dir.path(), true);
    let expected = total(&files) - received + 4 * 256 * 1024;
    assert!(
        report.progress.received_bytes <= expected,
        "{}",
        report.progress.received_bytes
    );
}

/// One server that has zeros for every byte and one that is honest, into the store: the liar is found
/// out while the other's bytes are coming, which must be none the worse for it.
#[test]
fn what_a_liar_leaves_is_forgotten_and_nothing_else_is() {
    let files = files(&[("a.bin", 1_000_000)]);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    for round in 0..100 {
        let (liar_waits, honest_waits) = [(0, 0), (1, 0), (0, 1), (1, 1)][round % 4];
        let server = |lies: bool, wait: u64| {
            Server::start(&files, move |_, mut reply| {
                reply.piece_pause = Duration::from_millis(wait);
                if lies {
                    reply.body.fill(0);
                }
                reply
            })
        };
        let (liar, honest) = (server(true, liar_waits), server(false, honest_waits));
        let sources = [source(&liar), source(&honest)];
        let pull = store.pull(&format!("m{round}")).unwrap();
        let blobs = blobs(&files, Algorithm::Sha256, true);
        let report = fetch(
            blobs,
            &[&sources[0], &sources[1]],
            &pull,
            limits(),
            &Cancel::new(),
            &mut |_| {},
        );
        let report = report.unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(report.dropped.len(), 1, "{:?}", report.dropped);
        let mut entry = Entry::new("test");
        for (name, bytes) in files.iter() {
            let blob = store::Blob::of(Algorithm::Sha256, bytes);
            // What was verified on its way is what is in the file.
            let path = pull.commit(&blob).unwrap();
            assert!(fs::read(path).unwrap() == *bytes, "round {round}: {name}");
            entry.files.insert(name.clone(), blob);
        }
        pull.publish(&entry).unwrap();
        store.remove(&format!("m{round}")).unwrap();
    }
}
