//! Packages whose configuration is a file of its own, which has no hash.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use sterna_delivery::{
    fetch::Limits,
    hash::{Algorithm, digest_of},
    pull::{Event, PullOptions, pull},
    sign::TrustList,
    store::Store,
};

use crate::server::{Asked, Files, Reply, Server};

/// A package of one tensor.
fn files() -> Files {
    let shard = vec![0; 32];
    let digest = digest_of(Algorithm::Sha256, &shard);
    let manifest = format!(
        r#"{{"version": 1, "modelId": "m", "modelType": "transformer", "quantization": "F32",
        "hashAlgorithm": "sha256", "totalSize": 32, "tensorsFile": "tensors.json", "groups": {{}},
        "architecture": {{"numLayers": 1, "hiddenSize": 2, "intermediateSize": 4, "numAttentionHeads": 1,
        "vocabSize": 4, "maxSeqLen": 8}},
        "shards": [{{"index": 0, "fileName": "s.bin", "size": 32, "hash": "{digest}"}}]}}"#
    );
    let tensors = r#"{"model.embed_tokens.weight":
        {"shard": 0, "offset": 0, "size": 32, "shape": [4, 2], "dtype": "F32"}}"#;
    Arc::new(BTreeMap::from([
        ("manifest.json".to_owned(), manifest.into_bytes()),
        ("tensors.json".to_owned(), tensors.into()),
        ("s.bin".to_owned(), shard),
        ("config.json".to_owned(), b"{}".to_vec()),
    ]))
}

/// Whether the package has its configuration after it was fetched from a server that answers like this when asked
/// for that, and the warnings; or the error.
fn fetched(
    behave: impl Fn(Reply) -> Reply + Send + Sync + 'static,
) -> Result<(bool, String), String> {
    let server = Server::start(&files(), move |asked: &Asked, reply| {
        match asked.path.as_str() {
            "/config.json" => behave(reply),
            _ => reply,
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let options = PullOptions {
        name: Some("tiny".to_owned()),
        limits: Limits {
            backoff_base: Duration::from_millis(1),
            retries: 2,
            ..Limits::default()
        },
        ..PullOptions::default()
    };
    let warnings = Mutex::new(String::new());
    let notify = |event: Event<'_>| {
        if let Event::Warning(warning) = event {
            *warnings.lock().unwrap() += &format!("{warning}\n");
        }
    };
    match pull(
        &store,
        &server.url(),
        &options,
        &TrustList::default(),
        &notify,
    ) {
        Ok(_) => {
            let model = store.model("tiny").unwrap();
            let has_config = model.paths().contains_key("config.json");
            Ok((has_config, warnings.into_inner().unwrap()))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn a_configuration_without_a_hash_is_named() {
    let (has_config, warnings) = fetched(|reply| reply).unwrap();
    assert!(has_config);
    assert!(
        warnings.contains("no hashes for tensors.json, config.json;"),
        "{warnings}"
    );
}

#[test]
fn a_configuration_may_be_missing_and_must_not_fail() {
    for status in [404, 410] {
        let (has_config, warnings) = fetched(move |_| Reply::status(status)).unwrap();
        assert!(!has_config);
        assert!(
            warnings.contains("no hashes for tensors.json;"),
            "{warnings}"
        );
    }
    let (has_config, _) = fetched(|reply| reply.with("Content-Type", "text/html")).unwrap();
    assert!(!has_config);
    for status in [403, 503] {
        let error = fetched(move |_| Reply::status(status)).unwrap_err();
        let expected = format!("HTTP status {status}");
        assert!(
            error.contains("`config.json`") && error.contains(&expected),
            "{error}"
        );
    }
}
