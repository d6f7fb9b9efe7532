//! `sterna push`, and `convert` to where packages are pushed. What goes over the wire is in the tests of
//! `sterna-delivery`.
#![cfg(all(feature = "oci", feature = "object-store", target_os = "linux"))]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use sterna_testing::stores::{self, BUCKET, KEY, SECRET};

use crate::common::outcome;
use crate::deltas::revision;

/// Runs `sterna` with its own folders in `home`, and the S3 server at `s3`: whether it succeeded, and what it printed.
fn sterna(home: &Path, s3: &str, args: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command
        .args(args)
        .current_dir(home)
        .env("STERNA_HOME", home)
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_ENDPOINT_URL", format!("http://{s3}"))
        .env("DOCKER_CONFIG", home)
        .env("NO_PROXY", "127.0.0.1");
    outcome(&mut command)
}

fn done(home: &Path, s3: &str, args: &[&str]) -> String {
    let (ok, out, error) = sterna(home, s3, args);
    assert!(ok, "{args:?}: {error}");
    out
}

fn json_of(home: &Path, s3: &str, args: &[&str]) -> Value {
    serde_json::from_str(&done(home, s3, args)).unwrap()
}

fn refusal(home: &Path, args: &[&str]) -> String {
    let (ok, out, error) = sterna(home, "127.0.0.1:1", args);
    assert!(!ok, "{args:?} should fail: {out}");
    error
}

fn can_store(address: &str) -> bool {
    let home = tempfile::tempdir().unwrap();
    let target = format!("s3://{BUCKET}/probe");
    sterna(home.path(), address, &["convert", "builtin", &target]).0
}

#[test]
fn mistakes_are_named_before_anything_is_done() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    done(home, "", &["convert", "builtin", "tale"]);
    let digest = "0".repeat(64);
    for (target, expected) in [
        (
            "elsewhere",
            "expected oci://, s3://, gs:// or az:// to push to",
        ),
        (
            "https://example.org/tale",
            "expected oci://, s3://, gs:// or az:// to push to",
        ),
        (
            "oci://me/tale",
            "expected a host with a dot or a port before the repository",
        ),
        ("s3://", "it names no bucket"),
        (
            &format!("oci://localhost:1/tale@sha256:{digest}"),
            "expected a tag to push to",
        ),
    ] {
        let error = refusal(home, &["push", "tale", target]);
        assert!(error.contains(expected), "{target}: {error}");
        if target.contains("://") {
            let error = refusal(home, &["convert", "builtin", target]);
            assert!(error.contains(expected), "{target}: {error}");
        }
    }
    let error = refusal(home, &["push", "builtin", "s3://models/tale"]);
    assert!(error.contains("expected a package"), "{error}");
    let error = refusal(home, &["push", "nothing", "s3://models/tale"]);
    assert!(error.contains("nothing"), "{error}");
    let error = refusal(home, &["convert", "builtin", "s3://models/tale.gguf"]);
    assert!(error.contains("expected a package to push"), "{error}");
    // Nobody is there.
    let error = refusal(home, &["push", "tale", "oci://127.0.0.1:1/tale"]);
    assert!(
        error.contains("oci://127.0.0.1:1/tale: what is there: no answer"),
        "{error}"
    );
    fs::write(home.join("tale/tokenizer.json"), "{}").unwrap();
    let error = refusal(home, &["push", "tale", "oci://127.0.0.1:1/tale"]);
    assert!(error.contains("tokenizer.json: expected "), "{error}");
}

#[test]
fn a_registry_keeps_a_package_that_runs_from_there() {
    let Some(server) = stores::registry() else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let address = format!("oci://{}/me/tale:v1", server.address);
    done(home, "", &["convert", "builtin", "tale"]);
    let first = json_of(home, "", &["push", "tale", &address, "--json"]);
    assert_eq!(first["target"], *address);
    assert_eq!(
        (&first["sent"], &first["n_sent"]),
        (&first["size"], &first["n_files"])
    );
    let text = done(home, "", &["push", "tale", &address]);
    let digest = first["digest"].as_str().unwrap();
    assert_eq!(
        text.trim_end(),
        format!("{address}: {digest}, 2.8 MiB, 0 B sent, 2.8 MiB was there")
    );
    let pulled = done(home, "", &["pull", &address]);
    assert!(
        pulled.starts_with("tale-v1: 2.8 MiB, 2.8 MiB fetched"),
        "{pulled}"
    );
    let prompt = [
        "-p",
        "What is 3 plus 4?",
        "--temperature",
        "0",
        "--backend",
        "cpu",
    ];
    let pinned = format!("oci://{}/me/tale@{digest}", server.address);
    for model in ["tale-v1", &pinned] {
        let told = done(home, "", &[&["run", model], &prompt[..]].concat());
        assert_eq!(told.trim_end(), "3 plus 4 is 7.");
    }
    let inspected = json_of(home, "", &["inspect", &address, "--json"]);
    assert!(inspected.is_object());
    // From the store, and by the name that the pull gave it.
    let again = json_of(home, "", &["push", "tale-v1", &address, "--json"]);
    assert_eq!(
        (again["sent"].as_u64(), &again["digest"]),
        (Some(0), &first["digest"])
    );
}

#[test]
fn deltas_go_with_their_package_and_come_with_it() {
    let (Some(registry), Some(s3)) = (stores::registry(), stores::s3(can_store)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (home, s3) = (dir.path(), s3.address.as_str());
    let v1 = revision(home, "v1", None);
    let v2 = revision(home, "v2", Some(50));
    let (v1, v2) = (v1.to_str().unwrap(), v2.to_str().unwrap());
    let bare = json_of(
        home,
        s3,
        &["push", v2, &format!("s3://{BUCKET}/bare"), "--json"],
    );
    let diff = json_of(home, s3, &["diff", v1, v2, "--delta", v2, "--json"]);
    let deltas = diff["deltas"].as_array().unwrap();
    let sum = |key: &str| -> u64 { deltas.iter().map(|d| d[key].as_u64().unwrap()).sum() };
    for (name, address) in [
        ("one", format!("oci://{}/me/deltas:v1", registry.address)),
        ("other", format!("s3://{BUCKET}/deltas")),
    ] {
        done(home, s3, &["push", v1, &address]);
        let pushed = json_of(home, s3, &["push", v2, &address, "--json"]);
        let n_files = |report: &Value| report["n_files"].as_u64().unwrap();
        assert_eq!(n_files(&pushed), n_files(&bare) + 1 + deltas.len() as u64);
        let other = home.join(name);
        fs::create_dir(&other).unwrap();
        done(&other, s3, &["pull", v1, "tale"]);
        let pulled = json_of(
            &other,
            s3,
            &["pull", &address, "tale", "--replace", "--json"],
        );
        assert_eq!(pulled["made"], sum("bytes"), "{pulled}");
        assert_eq!(pulled["deltas"], sum("delta_bytes"), "{pulled}");
        done(&other, s3, &["verify", "tale"]);
    }
    let (target, list) = (
        format!("s3://{BUCKET}/refused"),
        Path::new(v2).join("deltas.json"),
    );
    let listed: Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    let first = listed["deltas"][0]["file"].as_str().unwrap();
    let delta = Path::new(v2).join(first);
    let mut bytes = fs::read(&delta).unwrap();
    bytes[100] ^= 1;
    fs::write(&delta, bytes).unwrap();
    let error = refusal(home, &["push", v2, &target]);
    assert!(error.contains(".bin: expected sha256 "), "{error}");
    fs::remove_file(&delta).unwrap();
    let error = refusal(home, &["push", v2, &target]);
    assert!(error.contains(".bin: cannot read"), "{error}");
    fs::write(&list, r#"{"version": 2, "deltas": []}"#).unwrap();
    let error = refusal(home, &["push", v2, &target]);
    assert!(error.contains("deltas.json: "), "{error}");
}

#[test]
fn a_model_is_converted_into_a_bucket() {
    let Some(server) = stores::s3(can_store) else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let (home, s3) = (home.path(), server.address.as_str());
    let target = format!("s3://{BUCKET}/converted/tale");
    let made = json_of(home, s3, &["convert", "builtin", &target, "--json"]);
    assert_eq!(
        (&made["package"], &made["pushed"]["target"]),
        (&target.clone().into(), &target.clone().into())
    );
    assert_eq!(made["pushed"]["n_sent"], made["pushed"]["n_files"]);
    // Nothing stays here.
    let left: Vec<_> = fs::read_dir(home.join("converting")).unwrap().collect();
    let left = left.into_iter().map(|entry| entry.unwrap().path());
    assert_eq!(left.filter(|path| path.is_dir()).count(), 0);
    // The same bytes again, and a folder has them too.
    let again = json_of(home, s3, &["convert", "builtin", &target, "--json"]);
    assert_eq!(
        (
            again["pushed"]["n_sent"].as_u64(),
            &again["pushed"]["digest"]
        ),
        (Some(0), &made["pushed"]["digest"])
    );
    done(home, s3, &["convert", "builtin", "tale"]);
    let same = json_of(home, s3, &["push", "tale", &target, "--json"]);
    assert_eq!(same["digest"], made["pushed"]["digest"]);
    done(home, s3, &["pull", &target]);
    done(home, s3, &["verify", "tale"]);
    let told = done(
        home,
        s3,
        &[
            "run",
            &target,
            "-p",
            "What is 3 plus 4?",
            "--temperature",
            "0",
            "--backend",
            "cpu",
        ],
    );
    assert_eq!(told.trim_end(), "3 plus 4 is 7.");
}
