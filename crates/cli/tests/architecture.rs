//! What ARCHITECTURE.md says is true: which crate may import which, and where things are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
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

/// The folder and the text of the module called `name` in `folder`, if there is one.
fn module(folder: &Path, name: &str) -> Option<(PathBuf, String)> {
    let inner = folder.join(name);
    let text = fs::read_to_string(inner.with_extension("rs"));
    let text = text.or_else(|_| fs::read_to_string(inner.join("mod.rs")));
    Some((inner, text.ok()?))
}

/// Whether a module with this `text`, whose modules are in `folder`, has what `path` names. Members of its items
/// aren't looked up.
fn has((folder, text): (PathBuf, String), path: &[&str]) -> bool {
    const ITEMS: [&str; 6] = ["const", "enum", "fn", "struct", "trait", "type"];
    let Some((first, rest)) = path.split_first() else {
        return true;
    };
    if let Some(inner) = module(&folder, first) {
        return has(inner, rest);
    }
    let words = |text: &str| -> Vec<String> {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        let words = words.filter(|word| !word.is_empty());
        words.map(str::to_owned).collect()
    };
    let is_made = |pair: &[String]| ITEMS.contains(&&*pair[0]) && pair[1] == *first;
    let mut uses = text
        .split(';')
        .filter_map(|text| Some(text.split_once("pub use ")?.1));
    words(&text).windows(2).any(is_made)
        || uses.any(|names| words(names).iter().any(|name| name == first))
}

/// All folders below `folder`, and it.
fn folders(folder: PathBuf) -> Vec<PathBuf> {
    let entries = fs::read_dir(&folder).unwrap();
    let inner = entries.map(|entry| entry.unwrap().path());
    let inner: Vec<_> = inner.filter(|path| path.is_dir()).collect();
    let inner = inner.into_iter().flat_map(folders);
    std::iter::once(folder).chain(inner).collect()
}

#[test]
fn modules_are_where_the_page_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let crates: Vec<_> = fs::read_dir(root.join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let sources = crates.iter().map(|path| path.join("src"));
    let sources: Vec<_> = sources.flat_map(folders).collect();
    let paths = page.split(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | ':'));
    let mut n_found = 0;
    for path in paths.filter(|path| path.contains("::")) {
        let names: Vec<_> = path.split("::").collect();
        if names[0].starts_with(char::is_uppercase) {
            continue;
        }
        let is_there = match crates.iter().find(|path| path.ends_with(names[0])) {
            Some(path) => {
                let source = path.join("src");
                let (_, text) = module(&source, "lib")
                    .or_else(|| module(&source, "main"))
                    .unwrap();
                has((source, text), &names[1..])
            }
            // A module of some crate.
            None => (sources.iter()).any(|folder| {
                module(folder, names[0]).is_some_and(|inner| has(inner, &names[1..]))
            }),
        };
        assert!(
            is_there,
            "ARCHITECTURE.md: expected `{path}`, found no such module"
        );
        n_found += 1;
    }
    assert!(n_found > 50, "{n_found}");
}

/// The files of the crates' tests whose tests would not run: neither a module of `tests/main.rs` nor a target.
fn forgotten(tests: &Path, manifest: &str) -> Vec<PathBuf> {
    let Ok(main) = fs::read_to_string(tests.join("main.rs")) else {
        return Vec::new();
    };
    let entries = fs::read_dir(tests).unwrap().map(|e| e.unwrap().path());
    let files = entries.filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let runs = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let target = format!("[[test]]\nname = \"{name}\"\n");
        name == "main" || main.contains(&format!("\nmod {name};\n")) || manifest.contains(&target)
    };
    files.filter(|path| !runs(path)).collect()
}

#[test]
fn every_file_of_tests_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut n = 0;
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        if manifest.contains("autotests = false\n") {
            n += 1;
            assert!(folder.join("tests/main.rs").is_file(), "{folder:?}");
            let forgotten = forgotten(&folder.join("tests"), &manifest);
            assert!(
                forgotten.is_empty(),
                "neither in tests/main.rs nor a target of Cargo.toml: {forgotten:?}"
            );
        }
    }
    assert_eq!(n, 10);
}

#[test]
fn a_forgotten_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("main.rs", "//! Tests.\n\nmod here;\n"),
        ("here.rs", ""),
        ("target.rs", ""),
        ("forgotten.rs", ""),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let found = forgotten(dir.path(), "[[test]]\nname = \"target\"\n");
    assert_eq!(found, [dir.path().join("forgotten.rs")]);
}
