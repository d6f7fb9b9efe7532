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
