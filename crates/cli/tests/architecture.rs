//! Which crate may import which: what ARCHITECTURE.md says is what the manifests do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// For each crate, the crates of ours that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The crates' names begin with this in manifests.
const PREFIX: &str = "sterna-";

/// What marks an import that a feature turns on.
const FEATURE: &str = " (a feature)";

/// The column of the table in `page` that is called `may import`, by the first one.
fn said(page: &str) -> Imports {
    let cells = |line: &str| -> Vec<String> {
        let line = line.trim().trim_matches('|');
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let mut lines = page
        .lines()
        .skip_while(|line| !line.contains("| may import |"));
    let header = cells(lines.next().expect("a table with a column `may import`"));
    let column = header.iter().position(|cell| cell == "may import");
    let column = column.expect("it was found");
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|line| {
        let cells = cells(line);
        let imports = cells[column].split(", ").filter(|cell| *cell != "none");
        let imports = imports.map(|import| import.replace('`', "")).collect();
        (cells[0].replace('`', ""), imports)
    })
    .collect()
}

/// What the manifests say, without what only tests import.
fn done(root: &Path) -> Imports {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = |of: &Value| {
        let name = of["name"].as_str().unwrap();
        name.strip_prefix(PREFIX).unwrap_or(name).to_owned()
    };
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .map(|package| {
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let ours = dependencies.filter(|d| d["path"].is_string() && d["kind"] != "dev");
            let imports = ours.map(|d| {
                let mark = if d["optional"] == true { FEATURE } else { "" };
                name(d) + mark
            });
            (name(package), imports.collect())
        })
        .collect()
}

#[test]
fn crates_import_what_the_page_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    assert_eq!(
        said(&page),
        done(&root),
        "ARCHITECTURE.md, column `may import`, against the manifests"
    );
}
