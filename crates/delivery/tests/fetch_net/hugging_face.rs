//! Repositories laid out as on Hugging Face.

use std::{collections::BTreeMap, fs, sync::Arc};

use sterna_delivery::{
    fetch::{Cancel, FolderSink, Limits, fetch, fetch_small},
    hash::{Algorithm, Verified, digest_of},
    pull::{Event, IncomingPackage, PullOptions},
    sign::TrustList,
    source::{HttpOptions, HttpSource, Source, Url, hugging_face::Hub},
    store::Store,
};

use crate::server::{Reply, Server, bytes};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Names, bytes and git object ids.
fn contents() -> (Vec<u8>, &'static [u8], &'static str) {
    // The object id is from `git hash-object`.
    (
        bytes(1, 200_000),
        b"hello\n",
        "ce013625030ba8dba906f756967f9e9ca394464a",
    )
}

fn hub(server: &Server) -> Hub {
    let options = HttpOptions {
        token: Some("hf_secret".into()),
        proxy_from_env: false,
        ..HttpOptions::default()
    };
    Hub::new(Url::parse(&server.url()).unwrap(), options)
}

fn listing(extra: &str) -> String {
    let (weights, small, id) = contents();
    let sha256 = digest_of(Algorithm::Sha256, &weights);
    format!(
        r#"{{"id": "o/r", "sha": "{COMMIT}", "unknown": [1], "siblings": [
            {{"rfilename": "README.md", "size": 3, "blobId": "{id}"}},
            {{"rfilename": "config.json", "size": {}, "blobId": "{id}"}},
            {{"rfilename": "model.safetensors", "size": {1}, "blobId": "{id}",
              "lfs": {{"sha256": "{sha256}", "size": {1}, "pointerSize": 134}}}}{extra}
        ]}}"#,
        small.len(),
        weights.len(),
    )
}

/// A server of the repository's files, which sends the large one from elsewhere.
fn servers(extra: &'static str) -> (Server, Server) {
    let (weights, small, _) = contents();
    let cdn = Server::honest(&Arc::new(BTreeMap::from([("cdn/1".to_owned(), weights)])));
    let large = cdn.url() + "/cdn/1";
    let front = Server::start(&Arc::default(), move |asked, _| {
        let answer = |body: Vec<u8>| {
            let len = body.len();
            Reply {
                status: 200,
                body,
                ..Reply::default()
            }
            .with("Content-Length", len)
        };
        if asked.headers.get("authorization").map(String::as_str) != Some("Bearer hf_secret") {
            return Reply::status(401);
        }
        if asked.path == "/api/models/o/r/revision/v%2F1?blobs=true" {
            return answer(listing(extra).into_bytes()).with("Content-Type", "application/json");
        }
        match asked.path.strip_prefix(&format!("/o/r/resolve/{COMMIT}/")) {
            Some("config.json") => answer(small.to_vec()),
            Some("model.safetensors") => Reply::status(302).with("Location", &large),
            _ => Reply::status(404),
        }
    });
    (front, cdn)
}

#[test]
fn a_repository_is_listed_and_its_model_fetched() {
    let (front, cdn) = servers("");
    let hub = hub(&front);
    let url = Url::parse(&format!("{}/o/r/tree/v%2F1", front.url())).unwrap();
    let repository = hub.repository(&url).unwrap();
    assert_eq!((repository.id(), repository.revision()), ("o/r", "v/1"));
    let (limits, cancel) = (Limits::default(), Cancel::new());
    let listing = hub.list(&repository, &limits, &cancel).unwrap();
    assert_eq!((listing.commit.as_str(), listing.files.len()), (COMMIT, 3));
    let blobs = hub.select(&repository, &listing, None).unwrap();
    let source = hub.source(&repository, &listing.commit).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let sink = FolderSink::new(dir.path());
    let report = fetch(blobs, &[&source], &sink, limits, &cancel, &mut |_| {}).unwrap();
    let how = [
        Some(Verified::GitBlob),
        Some(Verified::Digest(Algorithm::Sha256)),
    ];
    assert_eq!(report.verified, how);
    let (weights, small, _) = contents();
    assert_eq!(fs::read(dir.path().join("config.json")).unwrap(), small);
    assert!(fs::read(dir.path().join("model.safetensors")).unwrap() == weights);
    // The other host has not seen the token.
    let log = cdn.log.lock().unwrap();
    assert!(
        !log.is_empty()
            && log
                .iter()
                .all(|asked| !asked.headers.contains_key("authorization"))
    );
}

#[test]
fn what_nothing_vouches_for_is_refused_without_https() {
    let (front, _cdn) = servers(r#", {"rfilename": "tokenizer.json", "size": 9}"#);
    let hub = hub(&front);
    let url = Url::parse(&format!("{}/o/r/tree/v%2F1", front.url())).unwrap();
    let repository = hub.repository(&url).unwrap();
    let listing = hub
        .list(&repository, &Limits::default(), &Cancel::new())
        .unwrap();
    let error = hub
        .select(&repository, &listing, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("`tokenizer.json`: the listing gives no digest"),
        "{error}"
    );
    assert!(
        hub.select(&repository, &listing, Some("config.json"))
            .is_ok()
    );
}

#[test]
fn listings_that_make_no_sense_are_errors() {
    let answers = [
        (200, "<html>", "not JSON"),
        (
            200,
            r#"{"sha": "main", "siblings": []}"#,
            "names the commit \"main\"",
        ),
        (
            200,
            r#"{"sha": "0123456789abcdef0123456789abcdef01234567", "siblings": [{"rfilename": "x", "blobId": "zz"}]}"#,
            "bad digest",
        ),
        (403, "", "cannot list"),
    ];
    for (status, body, reason) in answers {
        let server = Server::start(&Arc::default(), move |_, _| {
            let body = body.as_bytes().to_vec();
            let len = body.len();
            Reply {
                status,
                body,
                ..Reply::default()
            }
            .with("Content-Length", len)
        });
        let hub = hub(&server);
        let repository = hub.repository(&Url::parse(&format!("{}/o/r", server.url())).unwrap());
        let limits = Limits {
            retries: 0,
            ..Limits::default()
        };
        let error = hub
            .list(&repository.unwrap(), &limits, &Cancel::new())
            .unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn small_files_come_from_the_first_source_that_has_them() {
    let files = Arc::new(BTreeMap::from([(
        "manifest.json".to_owned(),
        b"{}".to_vec(),
    )]));
    let missing = Server::start(&files, |_, _| Reply::status(404));
    let page = Server::start(&files, |_, reply| reply.with("Content-Type", "text/html"));
    let slow = Server::start(&files, |asked, reply| match asked.index {
        0 => Reply::status(503).with("Retry-After", "0"),
        1 => Reply {
            cut: Some(1),
            ..reply
        },
        _ => reply,
    });
    let source = |server: &Server| {
        let options = HttpOptions {
            proxy_from_env: false,
            ..HttpOptions::default()
        };
        HttpSource::new(Url::parse(&server.url()).unwrap(), options)
    };
    let sources = [source(&missing), source(&page), source(&slow)];
    let sources: Vec<&dyn Source> = sources.iter().map(|s| s as &dyn Source).collect();
    let limits = Limits {
        backoff_base: std::time::Duration::from_millis(1),
        ..Limits::default()
    };
    let cancel = Cancel::new();
    let found = fetch_small("manifest.json", 100, &sources, &limits, &cancel).unwrap();
    assert_eq!(found, (b"{}".to_vec(), 2));
    let error = fetch_small("manifest.json", 1, &sources, &limits, &cancel)
        .unwrap_err()
        .to_string();
    for reason in [
        "HTTP status 404",
        "expected data, found `text/html`",
        "expected at most 1 bytes, found 2",
    ] {
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_repository_arrives_as_a_package_does() {
    let (front, _cdn) = servers("");
    let address = format!("{}/o/r/tree/v%2F1", front.url());
    let options = PullOptions {
        hub: Some(hub(&front)),
        ..PullOptions::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let incoming = IncomingPackage::begin(
        store.clone(),
        address.clone(),
        options,
        TrustList::default(),
        |event| assert!(!matches!(event, Event::Warning(_)), "{event:?}"),
    );
    let (weights, small, _) = contents();
    let files: Vec<_> = incoming.files().unwrap().into_iter().collect();
    let expected = [
        ("config.json".to_owned(), small.len() as u64),
        ("model.safetensors".to_owned(), weights.len() as u64),
    ];
    assert_eq!(files, expected);
    let path = incoming.path("model.safetensors").unwrap();
    assert!(fs::read(path).unwrap() == weights);
    incoming.finish().unwrap();
    assert_eq!(store.model("r").unwrap().entry().source, address);
}
