//! `sterna sign` and `sterna trust`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use sterna_delivery::sign::{PublicKey, TrustList, Verdict};

fn sterna(home: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(args)
        .env("STERNA_HOME", home)
        .current_dir(home)
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn failure(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_package_is_signed_and_believed() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let manifest = br#"{"version": 1, "modelId": "tiny model"}"#;
    fs::write(home.join("manifest.json"), manifest).unwrap();
    let made = sterna(
        home,
        &[
            "sign",
            "--generate",
            "--no-password",
            "--key",
            "k",
            "--json",
        ],
    );
    let key = json(&made)["public_key"].as_str().unwrap().to_owned();
    let signed = json(&sterna(home, &["sign", ".", "--key", "k", "--json"]));
    assert_eq!(signed["public_key"], key);
    assert_eq!(
        signed["trusted_comment"],
        "file:manifest.json\tmodel:tiny_model"
    );
    let signature = fs::read_to_string(home.join("manifest.json.minisig")).unwrap();
    let mut list = TrustList::default();
    list.insert("me", PublicKey::parse(&key).unwrap());
    let verdict = list.check(manifest, Some(&signature)).unwrap();
    assert!(matches!(verdict, Verdict::Signed(signer) if signer.name == "me"));

    // The key by its file and by itself.
    assert_eq!(
        json(&sterna(home, &["trust", "--json"])),
        Value::Array(Vec::new())
    );
    let by_file = json(&sterna(home, &["trust", "file", "k.pub", "--json"]));
    assert_eq!(
        (by_file[0]["key"].as_str(), by_file[0]["id"].as_str()),
        (Some(key.as_str()), signed["key_id"].as_str())
    );
    assert_eq!(
        json(&sterna(home, &["trust", "text", &key, "--json"]))
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(
        json(&sterna(home, &["trust", "--remove", "file", "--json"]))[0]["name"],
        "text"
    );
    assert!(home.join("trust.json").exists());
    let error = failure(&sterna(home, &["trust", "--remove", "file"]));
    assert!(error.contains("no key is named \"file\""), "{error}");
    let error = failure(&sterna(home, &["trust", "x", "none.pub"]));
    assert!(error.contains("is no file either"), "{error}");
}

#[test]
fn keys_are_neither_lost_nor_left_open() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    fs::write(home.join("manifest.json"), r#"{"modelId": "m"}"#).unwrap();
    fs::write(home.join("password"), "open sesame\n").unwrap();
    fs::write(home.join("wrong"), "open simsim\n").unwrap();
    let made = sterna(
        home,
        &[
            "sign",
            "--generate",
            "--key",
            "k",
            "--password-file",
            "password",
            "--json",
        ],
    );
    json(&made);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(home.join("k")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let error = failure(&sterna(
        home,
        &["sign", "--generate", "--key", "k", "--no-password"],
    ));
    assert!(error.contains("exists"), "{error}");
    let error = failure(&sterna(
        home,
        &["sign", ".", "--key", "k", "--password-file", "wrong"],
    ));
    assert!(error.contains("password"), "{error}");
    let error = failure(&sterna(home, &["sign", ".", "--key", "k"]));
    assert!(error.contains("--password-file"), "{error}");
    assert!(!home.join("manifest.json.minisig").exists());
    json(&sterna(
        home,
        &[
            "sign",
            ".",
            "--key",
            "k",
            "--password-file",
            "password",
            "--json",
        ],
    ));
    let error = failure(&sterna(home, &["sign", "none", "--key", "k"]));
    assert!(error.contains("none: no such file or folder"), "{error}");
    let error = failure(&sterna(home, &["sign", ".", "--key", "password"]));
    assert!(error.contains("minisign secret key"), "{error}");
}

/// A package in a folder of its own.
fn package(home: &Path) -> String {
    let folder = home.join("package");
    fs::create_dir(&folder).unwrap();
    let sample =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/rdrr-samples/v1-gemma3-q4k");
    for entry in fs::read_dir(sample).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    folder.to_str().unwrap().to_owned()
}

/// What `verify`, `list` and what opens the model `m` say of its signature: who signed it, the word for
/// programs, and whether it is refused.
fn standing(home: &Path) -> (Option<String>, String, bool) {
    let list = json(&sterna(home, &["list", "--json"]));
    let row = &list[0];
    let signer = row["signer"].as_str().map(str::to_owned);
    let verified = sterna(home, &["verify", "m", "--json"]);
    let opened = sterna(home, &["inspect", "m"]);
    let found: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!(found["signer"].as_str().map(str::to_owned), signer);
    assert_eq!(found["ok"], verified.status.success());
    assert_eq!(verified.status.success(), opened.status.success());
    let refused = !opened.status.success();
    if refused {
        let why = failure(&opened);
        assert!(found["problems"][0].as_str().unwrap().contains("refused"));
        assert!(why.contains("sterna trust NAME KEY"), "{why}");
        // Fetching it again would change nothing.
        assert!(!failure(&verified).contains("sterna pull"));
    }
    (
        signer,
        row["signature"].as_str().unwrap().to_owned(),
        refused,
    )
}

#[test]
fn what_a_signature_in_the_store_is_worth_changes_with_the_trust_list() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let package = package(home);
    for key in ["k", "other"] {
        json(&sterna(
            home,
            &[
                "sign",
                "--generate",
                "--no-password",
                "--key",
                key,
                "--json",
            ],
        ));
    }
    json(&sterna(home, &["pull", &package, "m", "--json"]));
    assert_eq!(standing(home), (None, "none".into(), false));
    let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text(&sterna(home, &["list"])).contains("not signed"));

    // Signed with a key that isn't trusted yet.
    let signed = sterna(home, &["sign", "m", "--key", "k"]);
    assert!(text(&signed).contains("`sterna verify m`"), "{signed:?}");
    let note = String::from_utf8_lossy(&signed.stderr).into_owned();
    assert!(
        note.contains("not trusted here") && note.contains("sterna trust NAME RW"),
        "{note}"
    );
    assert_eq!(standing(home), (None, "unknown_key".into(), true));
    let list = text(&sterna(home, &["list"]));
    assert!(list.contains("signed by an unknown key"), "{list}");

    json(&sterna(home, &["trust", "me", "k.pub", "--json"]));
    assert_eq!(standing(home), (Some("me".into()), "trusted".into(), false));
    // Under another name by now.
    json(&sterna(home, &["trust", "--remove", "me", "--json"]));
    assert_eq!(standing(home), (None, "unknown_key".into(), true));
    json(&sterna(home, &["trust", "I", "k.pub", "--json"]));
    assert_eq!(standing(home), (Some("I".into()), "trusted".into(), false));
    let verified = text(&sterna(home, &["verify", "m"]));
    assert!(verified.contains("signed by I"), "{verified}");

    let again = sterna(home, &["sign", "m", "--key", "other"]);
    assert!(again.status.success());
    assert_eq!(standing(home), (None, "unknown_key".into(), true));
    let back = sterna(home, &["sign", "m", "--key", "k"]);
    assert!(back.status.success() && back.stderr.is_empty(), "{back:?}");
    assert_eq!(standing(home), (Some("I".into()), "trusted".into(), false));
}

#[cfg(unix)]
#[test]
fn files_without_end_are_no_keys() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let package = package(home);
    for args in [
        &["sign", &package, "--key", "/dev/zero"][..],
        &["trust", "x", "/dev/zero"],
    ] {
        let error = failure(&sterna(home, args));
        assert!(
            error.contains("/dev/zero: expected at most 65536 bytes, found more"),
            "{error}"
        );
    }
}
