//! `sterna cp`, and what `remove` and `gc` say to programs.

use std::path::Path;
use std::process::{Command, Output};

use crate::common::{success, testdata};
use serde_json::Value;

const SAMPLE: &str = "rdrr-samples/v1-gemma3-q4k";

fn sterna(home: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(args)
        .env("STERNA_HOME", home)
        .output()
        .unwrap()
}

fn refusal(home: &Path, args: &[&str]) -> String {
    let output = sterna(home, args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_second_name_shares_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let stdout = |args: &[&str]| success(args, sterna(home, args));
    let json = |args: &[&str]| -> Value { serde_json::from_str(&stdout(args)).unwrap() };
    let package = testdata(SAMPLE);
    stdout(&["pull", package.to_str().unwrap(), "tiny"]);
    assert_eq!(
        stdout(&["cp", "tiny", "other"]),
        "other: the same as tiny\n"
    );
    let list = json(&["list", "--json"]);
    let names: Vec<_> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["name"])
        .collect();
    assert_eq!(names, ["other", "tiny"]);
    assert_eq!(list[0]["own"], 0);
    assert_eq!(list[0]["source"], list[1]["source"]);

    for (new, message) in [
        (
            "tiny",
            "tiny: expected a name that no model has, found the model tiny",
        ),
        ("Other", "differs in case only"),
        ("builtin", "builtin: expected another name"),
        ("a/b", "a/b"),
        ("", ""),
    ] {
        let found = refusal(home, &["cp", "tiny", new]);
        assert!(found.contains(message), "{new}: {found}");
    }
    let found = refusal(home, &["cp", "nothing", "new"]);
    assert!(found.contains("nothing"), "{found}");
    assert_eq!(json(&["list", "--json"]).as_array().unwrap().len(), 2);

    // Either may go.
    let removed = json(&["remove", "tiny", "--json"]);
    assert_eq!(removed["name"], "tiny");
    stdout(&["verify", "other"]);
    let freed = json(&["gc", "--json"])["freed_bytes"].as_u64().unwrap();
    assert!(freed < 1 << 16, "{freed}");
    let removed = json(&["remove", "other", "--json"]);
    assert!(
        removed["freed_bytes"].as_u64().unwrap() > 1 << 20,
        "{removed}"
    );
}
