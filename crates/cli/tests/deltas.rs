//! `sterna diff --delta`, and `sterna pull` of a package that has deltas.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::pull::{Server, json_of, sterna};

/// A package of the built-in model in which every `every`-th byte of trits has another one, or the model itself.
pub(crate) fn revision(dir: &Path, name: &str, every: Option<usize>) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    let folder = dir.join(format!("{name}-source"));
    fs::create_dir(&folder).unwrap();
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(source.join(file), folder.join(file)).unwrap();
    }
    let mut bytes = fs::read(source.join("model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    for tensor in header.as_object().unwrap().values() {
        let Some(every) = every else {
            break;
        };
        let place = |i: usize| tensor["data_offsets"][i].as_u64().unwrap() as usize;
        if tensor["dtype"] == "U8" {
            for byte in bytes[8 + header_len..][place(0)..place(1)]
                .iter_mut()
                .step_by(every)
            {
                // Another trit at the top: a zero becomes one of two, others a zero.
                let trit = match *byte >> 6 {
                    1 => *byte & 2,
                    _ => 1,
                };
                *byte = *byte & 0x3f | trit << 6;
            }
        }
        // A norm whose every other value is the next one.
        if tensor["shape"] == json!([768]) {
            for value in bytes[8 + header_len..][place(0)..place(1)].chunks_mut(4) {
                value[0] ^= 1;
            }
        }
    }
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let package = dir.join(name);
    let (ok, _, error) = sterna(
        dir,
        &[
            "convert",
            folder.to_str().unwrap(),
            package.to_str().unwrap(),
        ],
    );
    assert!(ok, "{error}");
    package
}

/// Replaces the files in `to` by those of `from`.
fn publish(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A server with the package `v1`, and a store that has it as `tale`.
fn pulled(dir: &Path, v1: &Path) -> (PathBuf, Server, PathBuf) {
    let (served, home) = (dir.join("served"), dir.join("home"));
    publish(v1, &served);
    let server = Server::start(&served);
    let first = json_of(&home, &["pull", &server.url, "tale", "--json"]);
    assert_eq!((&first["made"], &first["deltas"]), (&json!(0), &json!(0)));
    assert_eq!(server.sent("deltas.json"), 0);
    (served, server, home)
}

/// The store has the package that is served, and its answers.
fn assert_is_served(home: &Path, served: &Path) {
    let (ok, out, error) = sterna(home, &["verify", "tale"]);
    assert!(ok, "{out}{error}");
    let answer = |model: &str| {
        let (ok, out, error) = sterna(
            home,
            &[
                "run",
                model,
                "-p",
                "Hello!",
                "--temperature",
                "0",
                "--max-tokens",
                "12",
            ],
        );
        assert!(ok, "{error}");
        out
    };
    assert_eq!(answer("tale"), answer(text(served)));
    let differs = json_of(home, &["diff", "tale", text(served), "--json"]);
    assert_eq!(differs["fetch_bytes"], 0, "{differs}");
}

#[test]
fn a_revision_comes_as_deltas_and_is_exact() {
    let dir = tempfile::tempdir().unwrap();
    let v1 = revision(dir.path(), "v1", None);
    let v2 = revision(dir.path(), "v2", Some(50));
    let v3 = revision(dir.path(), "v3", Some(31));
    let (served, server, home) = pulled(dir.path(), &v1);

    // Deltas are made beside the package, and are listed with those from another version.
    let diff = |a: &Path| {
        json_of(
            &home,
            &["diff", text(a), text(&v2), "--delta", text(&v2), "--json"],
        )
    };
    let report = diff(&v1);
    let deltas = report["deltas"].as_array().unwrap();
    assert_eq!(deltas.len(), 8, "{report}");
    // Of one shard, without the groups that are the same, and with zeros between tensors.
    let sum: u64 = deltas.iter().map(|d| d["bytes"].as_u64().unwrap()).sum();
    let fetched = report["fetch_bytes"].as_u64().unwrap();
    let total = report["total_bytes"].as_u64().unwrap();
    assert!(sum <= fetched && fetched < total * 3 / 4, "{report}");
    let (mut whole, mut small) = (0, 0);
    for delta in deltas {
        assert!(delta["group"].as_str().unwrap().starts_with("layer."));
        whole += delta["bytes"].as_u64().unwrap();
        small += delta["delta_bytes"].as_u64().unwrap();
    }
    assert!(small * 5 < whole, "{small} of {whole}");
    let list =
        || -> Value { serde_json::from_slice(&fs::read(v2.join("deltas.json")).unwrap()).unwrap() };
    diff(&v3);
    diff(&v1);
    assert_eq!(list()["deltas"].as_array().unwrap().len(), 16);
    let (ok, out, error) = sterna(
        &home,
        &[
            "diff",
            text(&v1),
            text(&v2),
            "--delta",
            text(&dir.path().join("d")),
        ],
    );
    assert!(ok, "{error}");
    assert!(out.contains("of 8 groups"), "{out}");

    // Only they are fetched, and what else changed.
    publish(&v2, &served);
    let result = json_of(&home, &["pull", "tale", "--json"]);
    assert_eq!(result["made"], whole);
    assert_eq!(result["deltas"], small);
    assert_eq!(server.sent("delta_"), small as usize);
    let received = result["received"].as_u64().unwrap();
    assert!(received < whole / 2, "{result}");
    assert_eq!(result["received_by"][0][1], received, "{result}");
    assert_is_served(&home, &served);

    // Once more there is nothing to fetch.
    let result = json_of(&home, &["pull", "tale", "--json"]);
    assert_eq!(
        (&result["received"], &result["made"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(server.sent("delta_"), small as usize);

    // Elsewhere, under another name: it is the groups that count.
    let second = Server::start(&served);
    let other = dir.path().join("other");
    let from_v3 = Server::start(&v3);
    json_of(&other, &["pull", &from_v3.url, "three", "--json"]);
    let (ok, out, error) = sterna(&other, &["pull", &second.url, "tale"]);
    assert!(ok, "{error}");
    assert!(out.contains("made of models here by"), "{out}");
    assert_is_served(&other, &served);

    // From a mirror, where the first source has the package and no deltas.
    let (bare, mirrored) = (dir.path().join("bare"), dir.path().join("mirrored"));
    publish(&v2, &bare);
    fs::remove_file(bare.join("deltas.json")).unwrap();
    let bare = Server::start(&bare);
    json_of(&mirrored, &["pull", &from_v3.url, "three", "--json"]);
    let result = json_of(
        &mirrored,
        &["pull", &bare.url, "tale", "--mirror", &second.url, "--json"],
    );
    assert_eq!(result["made"], whole, "{result}");
    assert_is_served(&mirrored, &served);
}

#[test]
fn what_no_delta_fits_is_fetched_whole() {
    let dir = tempfile::tempdir().unwrap();
    let v1 = revision(dir.path(), "v1", None);
    let v2 = revision(dir.path(), "v2", Some(50));
    let v3 = revision(dir.path(), "v3", Some(31));
    let (served, server, home) = pulled(dir.path(), &v1);
    let made = json_of(
        &home,
        &["diff", text(&v3), text(&v2), "--delta", text(&v2), "--json"],
    );
    assert_eq!(made["deltas"].as_array().unwrap().len(), 8);

    // Deltas of another version: none is asked for.
    publish(&v2, &served);
    let result = json_of(&home, &["pull", "tale", "--json"]);
    assert_eq!((&result["made"], &result["deltas"]), (&json!(0), &json!(0)));
    assert_eq!(server.sent("delta_"), 0);
    assert_is_served(&home, &served);

    // A list that says they are of the version that is here: refused by name.
    publish(&v1, &served);
    json_of(&home, &["pull", "tale", "--json"]);
    json_of(&home, &["gc", "--json"]);
    publish(&v2, &served);
    let groups = |package: &Path| -> Value {
        let manifest = fs::read(package.join("manifest.json")).unwrap();
        serde_json::from_slice::<Value>(&manifest).unwrap()["groups"].clone()
    };
    let (one, three) = (groups(&v1), groups(&v3));
    let list_path = served.join("deltas.json");
    let mut list: Value = serde_json::from_slice(&fs::read(&list_path).unwrap()).unwrap();
    for delta in list["deltas"].as_array_mut().unwrap() {
        let hash = &one[delta["group"].as_str().unwrap()]["hash"];
        delta["base"] = json!(format!("sha256:{}", hash.as_str().unwrap()));
    }
    fs::write(&list_path, list.to_string()).unwrap();
    let (ok, out, error) = sterna(&home, &["pull", "tale", "--json"]);
    assert!(ok, "{error}");
    let hash = |groups: &Value| groups["layer.0"]["hash"].as_str().unwrap().to_owned();
    let expected = format!(
        "expected the group sha256 {} to apply it to, found sha256 {}; the group layer.0 is fetched whole",
        hash(&three),
        hash(&one)
    );
    assert!(error.contains(&expected), "{error}");
    let result: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(result["made"], 0);
    // What came in vain is counted, too.
    assert_eq!(result["deltas"], server.sent("delta_"));
    assert_is_served(&home, &served);
}

#[test]
fn broken_deltas_are_named_and_left() {
    let dir = tempfile::tempdir().unwrap();
    let v1 = revision(dir.path(), "v1", None);
    let v2 = revision(dir.path(), "v2", Some(50));
    let (served, _, home) = pulled(dir.path(), &v1);
    json_of(
        &home,
        &["diff", text(&v1), text(&v2), "--delta", text(&v2), "--json"],
    );
    publish(&v2, &served);
    let list_path = served.join("deltas.json");
    let mut list: Value = serde_json::from_slice(&fs::read(&list_path).unwrap()).unwrap();
    let file = |list: &Value, i: usize| served.join(list["deltas"][i]["file"].as_str().unwrap());
    // Not the bytes that the list names; gone; bytes that make another group; short; no delta; too large.
    let mut bytes = fs::read(file(&list, 0)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file(&list, 0), &bytes).unwrap();
    fs::remove_file(file(&list, 1)).unwrap();
    let mut put = |i: usize, change: fn(&mut Vec<u8>)| {
        let path = file(&list, i);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, &bytes).unwrap();
        let hash =
            sterna_delivery::hash::digest_of(sterna_delivery::hash::Algorithm::Sha256, &bytes);
        list["deltas"][i]["hash"] = json!(format!("sha256:{hash}"));
        list["deltas"][i]["size"] = json!(bytes.len());
    };
    put(2, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
    });
    put(3, |bytes| bytes.truncate(300));
    put(4, |bytes| bytes[..7].copy_from_slice(b"NODELTA"));
    put(5, |bytes| {
        bytes[74..82].copy_from_slice(&u64::MAX.to_le_bytes())
    });
    fs::write(&list_path, list.to_string()).unwrap();
    let (ok, out, error) = sterna(&home, &["pull", "tale", "--json"]);
    assert!(ok, "{error}");
    for i in 0..6 {
        let group = list["deltas"][i]["group"].as_str().unwrap();
        let line = format!("the group {group} is fetched whole");
        assert!(error.contains(&line), "{i}: {error}");
    }
    assert_eq!(error.matches("is fetched whole").count(), 6, "{error}");
    for part in [
        "HTTP status 404",
        "expected the first bytes",
        "sum of its parts",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let result: Value = serde_json::from_str(&out).unwrap();
    assert!(result["made"].as_u64().unwrap() > 0, "{result}");
    assert_is_served(&home, &served);

    // No list at all.
    publish(&v1, &served);
    json_of(&home, &["pull", "tale", "--json"]);
    json_of(&home, &["gc", "--json"]);
    publish(&v2, &served);
    fs::write(&list_path, "deltas").unwrap();
    let (ok, _, error) = sterna(&home, &["pull", "tale"]);
    assert!(ok, "{error}");
    assert!(
        error.contains(
            "deltas.json: expected value at line 1 column 1; changed groups are fetched whole"
        ),
        "{error}"
    );
    assert_is_served(&home, &served);
}

#[test]
fn deltas_are_made_of_packages_that_are_here_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let v1 = revision(dir.path(), "v1", None);
    let v2 = revision(dir.path(), "v2", Some(50));
    let refused = |a: &str, expected: &str| {
        let args = ["diff", a, text(&v2), "--delta", text(&v2)];
        let (ok, out, error) = sterna(&home, &args);
        assert!(!ok, "{out}");
        assert!(error.contains(expected), "{error}");
    };
    refused(
        "http://127.0.0.1:1/m",
        "expected a package on this machine to make deltas of, found an address",
    );
    // A list that nobody would read any more.
    let list_path = v2.join("deltas.json");
    let digest = |hex: &str| format!("sha256:{}", hex.repeat(32));
    let list = json!({ "version": 1, "deltas": [{
        "group": "x".repeat((4 << 20) - 1000),
        "base": digest("0a"),
        "target": digest("0b"),
        "file": "delta_0a_0b.bin",
        "size": 7,
        "hash": digest("0c"),
    }] });
    fs::write(&list_path, list.to_string()).unwrap();
    refused(
        text(&v1),
        "deltas.json: expected at most 4194304 bytes with the new deltas, found up to 4",
    );
    let is_delta = |name: &str| name.starts_with("delta_");
    let mut entries = fs::read_dir(&v2).unwrap();
    assert!(!entries.any(|entry| is_delta(&entry.unwrap().file_name().to_string_lossy())));
    fs::remove_file(&list_path).unwrap();
    let shard = v1.join("shard_00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    let end = bytes.len() - 5000;
    bytes[end - 300_000..end].fill(0);
    fs::write(&shard, bytes).unwrap();
    refused(text(&v1), "group `layer.");
    assert!(!list_path.exists());
}
