//! What is pushed is pulled; versions share what they have in common; who lies is found out.

use std::{collections::BTreeMap, fs, path::Path};

use sterna_delivery::hash::Algorithm;
use sterna_testing::stores;

use crate::{
    client::{Client, Kind, Place, at_each, bytes, check_stored, package, write},
    proxy::{Act, Proxy},
};

fn sum(files: &BTreeMap<String, Vec<u8>>) -> u64 {
    files.values().map(|bytes| bytes.len() as u64).sum()
}

/// A package of three shards, with the files that are read whole.
fn some_package(seed: u64) -> BTreeMap<String, Vec<u8>> {
    let shards = [bytes(40_000, 1), bytes(2_500_000, seed), bytes(64, 3)];
    package("tiny", Algorithm::Sha256, &shards)
}

#[test]
fn packages_go_there_and_back_and_versions_share_files() {
    at_each("round-trip", |place| {
        let dir = tempfile::tempdir().unwrap();
        let (folder, store) = (dir.path().join("tiny"), dir.path().join("store"));
        let files = some_package(2);
        write(&folder, &files);
        let push = || Client::push(&folder, &place).run();
        let first = push();
        assert_eq!(first.number("sent"), sum(&files), "{place:?}");
        assert_eq!(
            (first.number("n_sent"), &*first.value("replaced")),
            (5, "none")
        );
        Client::pull(&store, &place).run().value("size");
        check_stored(&store, "tiny", &files);
        // Nothing again.
        let again = push();
        assert_eq!(
            (again.number("sent"), again.number("size")),
            (0, sum(&files))
        );
        assert_eq!(again.value("digest"), first.value("digest"));
        // A version in which one shard is another.
        let newer = some_package(4);
        write(&folder, &newer);
        let second = push();
        assert_eq!(second.number("n_sent"), 2, "a shard and the manifest");
        assert_eq!(second.value("replaced"), first.value("digest"));
        let pulled = Client::pull(&store, &place).run();
        check_stored(&store, "tiny", &newer);
        assert_eq!(pulled.number("received"), 2_500_000, "the others were here");
    });
}

/// An RDRR package may be hashed with BLAKE3, a registry names everything by SHA-256.
#[test]
fn packages_with_another_hash_go_there_and_back() {
    at_each("blake3", |place| {
        let dir = tempfile::tempdir().unwrap();
        let (folder, store) = (dir.path().join("tiny"), dir.path().join("store"));
        let files = package(
            "tiny",
            Algorithm::Blake3,
            &[bytes(100_000, 7), bytes(32, 8)],
        );
        write(&folder, &files);
        Client::push(&folder, &place).run().value("digest");
        Client::pull(&store, &place).run().value("size");
        check_stored(&store, "tiny", &files);
    });
}

/// Larger than what is sent at once to an object store.
#[test]
fn large_shards_go_in_parts() {
    at_each("large", |place| {
        let dir = tempfile::tempdir().unwrap();
        let (folder, store) = (dir.path().join("tiny"), dir.path().join("store"));
        let files = package("tiny", Algorithm::Sha256, &[bytes(20 << 20, 7)]);
        write(&folder, &files);
        let proxy = Proxy::start(&place.server, |_, _| Act::Pass);
        let pushed = Client::push(&folder, &place.by(&proxy.address)).run();
        assert_eq!(pushed.number("sent"), sum(&files));
        if place.kind != Kind::Registry {
            let asked = proxy.asked();
            let is_part =
                |asked: &&String| asked.contains("partNumber=") || asked.contains("blockid=");
            assert_eq!(asked.iter().filter(is_part).count(), 3, "{asked:?}");
        }
        Client::pull(&store, &place).run().value("size");
        check_stored(&store, "tiny", &files);
    });
}

#[test]
fn nothing_is_sent_of_a_damaged_package() {
    at_each("damaged", |place| {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tiny");
        let mut files = some_package(2);
        files.get_mut("shard_00001.bin").unwrap()[1_000_000] ^= 1;
        write(&folder, &files);
        let proxy = Proxy::start(&place.server, |_, _| Act::Pass);
        let told = Client::push(&folder, &place.by(&proxy.address)).run();
        let error = told.error();
        assert!(
            error.contains("shard_00001.bin: expected sha256 "),
            "{error}"
        );
        fs::remove_file(folder.join("shard_00002.bin")).unwrap();
        let told = Client::push(&folder, &place.by(&proxy.address)).run();
        let error = told.error();
        assert!(error.contains("shard_00002.bin: cannot read"), "{error}");
        assert_eq!(proxy.asked(), [""; 0]);
        let pulled = Client::pull(dir.path(), &place).run();
        let error = pulled.error();
        assert!(
            error.contains("expected a package, found no manifest.json"),
            "{error}"
        );
    });
}

/// The path of the blob with these bytes, at the end of what is asked for.
fn blob_of(place: &Place, bytes: &[u8]) -> String {
    let digest = sterna_delivery::hash::digest_of(Algorithm::Sha256, bytes);
    match place.kind {
        Kind::Registry => format!("blobs/sha256:{digest}"),
        Kind::S3 | Kind::Azure | Kind::Google => format!("blobs/sha256/{digest}"),
    }
}

#[test]
fn who_lies_is_found_out() {
    at_each("lies", |place| {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("tiny");
        let files = some_package(2);
        write(&folder, &files);
        Client::push(&folder, &place).run().value("digest");
        for name in ["manifest.json", "tensors.json", "shard_00001.bin"] {
            let blob = blob_of(&place, &files[name]);
            let proxy = Proxy::start(&place.server, move |_, asked| {
                match asked.starts_with("GET") && asked.contains(&blob) {
                    true => Act::Lie,
                    false => Act::Pass,
                }
            });
            let (liar, store) = (place.by(&proxy.address), dir.path().join(name));
            let told = Client::pull(&store, &liar).run();
            let error = told.error();
            assert!(
                error.contains("sha256") && error.contains("found"),
                "{name}: {error}"
            );
            if place.kind == Kind::Registry {
                // Another place has the same package, and nothing wrong gets through.
                let told = Client::pull(&store, &liar).mirror(&place.address()).run();
                told.value("size");
                assert!(told.text.contains("warning: "), "{}", told.text);
                check_stored(&store, "tiny", &files);
            }
        }
        // The manifest of the artifact, which everything hangs from, is compared where it is pinned.
        let pinned = Client::push(&folder, &place).run().value("digest");
        if place.kind == Kind::Registry {
            let proxy = Proxy::start(&place.server, |_, asked| {
                match asked.contains("/manifests/") {
                    true => Act::Lie,
                    false => Act::Pass,
                }
            });
            let address = format!("oci://{}/lies@sha256:{pinned}", proxy.address);
            let told = Client::pull(&dir.path().join("pinned"), &place)
                .env("STERNA_TEST_STORES_ADDRESS", address)
                .run();
            let error = told.error();
            assert!(error.contains("expected the manifest sha256:"), "{error}");
        }
    });
}

#[test]
fn credentials_are_used_and_their_lack_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let files = some_package(2);
    write(&folder, &files);
    if let Some(server) = stores::closed_registry() {
        let place = Place {
            kind: Kind::Registry,
            server: server.address.clone(),
            name: "closed".to_owned(),
        };
        let told = Client::push(&folder, &place).run();
        let error = told.error();
        assert!(
            error.contains("not allowed with what `docker login` keeps"),
            "{error}"
        );
        let config = dir.path().join("docker");
        fs::create_dir(&config).unwrap();
        // `docker login` keeps it like this: `me:pass` in base64.
        let text = format!(
            r#"{{"auths": {{"{}": {{"auth": "bWU6cGFzcw=="}}}}}}"#,
            server.address
        );
        fs::write(config.join("config.json"), text).unwrap();
        Client::push(&folder, &place)
            .env("DOCKER_CONFIG", &config)
            .run()
            .value("digest");
        let store = dir.path().join("store");
        let told = Client::pull(&store, &place).run();
        let error = told.error();
        assert!(error.contains("HTTP status 401"), "{error}");
        (Client::pull(&store, &place)
            .env("DOCKER_CONFIG", &config)
            .run())
        .value("size");
        check_stored(&store, "tiny", &files);
        fs::write(config.join("config.json"), "{").unwrap();
        let told = Client::pull(&store, &place)
            .env("DOCKER_CONFIG", &config)
            .run();
        let error = told.error();
        assert!(error.contains("config.json"), "{error}");
    }
    at_each("closed", |place| {
        // Google's stand-in asks nobody.
        let key = match place.kind {
            Kind::S3 => ("AWS_SECRET_ACCESS_KEY", "other"),
            Kind::Azure => ("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI="),
            Kind::Registry | Kind::Google => return,
        };
        let proxy = Proxy::start(&place.server, |_, _| Act::Pass);
        let wrong = |client: Client| client.env(key.0, key.1).run();
        let told = wrong(Client::push(&folder, &place.by(&proxy.address)));
        let error = told.error();
        assert!(
            error.contains("the credentials in the environment don't allow it"),
            "{error}"
        );
        assert_eq!(proxy.asked().len(), 1, "asking again doesn't help");
        let told = wrong(Client::pull(&dir.path().join("other"), &place));
        let error = told.error();
        assert!(error.contains("HTTP status 403"), "{error}");
    });
}

/// What is in a bucket as it is in a folder, put there by any tool, is read too.
#[test]
fn a_bucket_may_have_a_package_as_it_is() {
    let Some(python) = stores::python() else {
        return;
    };
    at_each("plain", |place| {
        let (place, script) = match place.kind {
            Kind::S3 => (place, PUT_BY_S3),
            // As it is, without what we add.
            Kind::Google => (place.by(&stores::gcs().unwrap().address), PUT_BY_JSON),
            Kind::Registry | Kind::Azure => return,
        };
        let dir = tempfile::tempdir().unwrap();
        let (folder, store) = (dir.path().join("tiny"), dir.path().join("store"));
        let files = some_package(2);
        write(&folder, &files);
        put_all(&python, script, &place, &folder);
        Client::pull(&store, &place).run().value("size");
        check_stored(&store, "tiny", &files);
    });
}

/// Google's JSON API.
const PUT_BY_JSON: &str = r#"
import os, sys, urllib.parse, urllib.request
host, bucket, prefix, folder, key, secret = sys.argv[1:]
for name in os.listdir(folder):
    body = open(os.path.join(folder, name), "rb").read()
    query = urllib.parse.urlencode({"uploadType": "media", "name": f"{prefix}/{name}"})
    url = f"http://{host}/upload/storage/v1/b/{bucket}/o?{query}"
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/octet-stream"}))
"#;

const PUT_BY_S3: &str = r#"
import datetime, hashlib, hmac, os, sys, urllib.request
host, bucket, prefix, folder, key, secret = sys.argv[1:]
def sign(key, text): return hmac.new(key, text.encode(), hashlib.sha256).digest()
for name in os.listdir(folder):
    body = open(os.path.join(folder, name), "rb").read()
    now = datetime.datetime.now(datetime.timezone.utc)
    day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    path, digest = f"/{bucket}/{prefix}/{name}", hashlib.sha256(body).hexdigest()
    head = f"host:{host}\nx-amz-content-sha256:{digest}\nx-amz-date:{stamp}\n"
    names = "host;x-amz-content-sha256;x-amz-date"
    request = f"PUT\n{path}\n\n{head}\n{names}\n{digest}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    k = ("AWS4" + secret).encode()
    for part in scope.split("/"): k = sign(k, part)
    signature = sign(k, text).hex()
    urllib.request.urlopen(urllib.request.Request(f"http://{host}{path}", body, {
        "x-amz-content-sha256": digest, "x-amz-date": stamp,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}",
    }, method="PUT"))
"#;

/// Puts the files of a folder into the bucket, with Python and nothing of ours.
fn put_all(python: &Path, script: &str, place: &Place, folder: &Path) {
    let done = std::process::Command::new(python)
        .args(["-c", script, &place.server, stores::BUCKET, &place.name])
        .arg(folder)
        .args([stores::KEY, stores::SECRET])
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}
