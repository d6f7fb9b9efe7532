//! The documentation as a book: what `mdbook build` is given holds together.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Title and file of each chapter in `docs/SUMMARY.md`.
fn chapters() -> Vec<(String, String)> {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let lines = summary.lines().filter_map(|line| {
        let line = line.trim_start().trim_start_matches("- ");
        let (title, file) = line.strip_prefix('[')?.split_once("](")?;
        Some((title.to_owned(), file.strip_suffix(')')?.to_owned()))
    });
    lines.collect()
}

#[test]
fn the_summary_names_every_page_once() {
    let mut expected = vec!["../ARCHITECTURE.md".into(), "../CHANGELOG.md".into()];
    for page in ["../README.md", "../packages/sterna/README.md"] {
        expected.push(page.to_owned());
    }
    for folder in ["", "formats/"] {
        for entry in fs::read_dir(root().join("docs").join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".md") && name != "SUMMARY.md" {
                expected.push(format!("{folder}{name}"));
            }
        }
    }
    expected.sort();
    let mut found: Vec<String> = chapters().into_iter().map(|(_, file)| file).collect();
    found.sort();
    assert_eq!(found, expected);
}

/// The book as mdBook hands it to its preprocessors, in 0.4 with `list` called `sections`.
fn book(list: &str) -> Value {
    let items = chapters().into_iter().map(|(name, file)| {
        let content = fs::read_to_string(root().join("docs").join(&file)).unwrap();
        json!({ "Chapter": {
            "name": name, "content": content, "number": null, "sub_items": [],
            "path": file, "source_path": file, "parent_names": []
        } })
    });
    json!([{ "root": "." }, { (list): items.collect::<Vec<_>>() }])
}

/// Where the links of a page outside of code lead, anchors cut off.
fn links(markdown: &str) -> Vec<&str> {
    let mut code = false;
    let text = markdown.lines().filter(|line| {
        code ^= line.trim_start().starts_with("```");
        !code
    });
    let targets = text.flat_map(|line| line.split("](").skip(1));
    let targets = targets.filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let files = targets.map(|target| target.split_once('#').map_or(target, |(file, _)| file));
    files
        .filter(|file| !file.is_empty() && !file.contains("://"))
        .collect()
}

/// `path` without `.` and `..`; `None` if it leads out.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part.as_os_str().to_str()? {
            "." => {}
            ".." if !out.pop() => return None,
            ".." => {}
            part => out.push(part),
        }
    }
    Some(out)
}

#[test]
fn links_lead_to_pages_of_the_book() {
    let script = root().join("scripts/book.py");
    let python = ["python3", "python"]
        .into_iter()
        .find(|python| Command::new(python).arg("--version").output().is_ok());
    let Some(python) = python else {
        eprintln!("skipped: no Python");
        return;
    };
    for list in ["sections", "items"] {
        let mut child = Command::new(python)
            .arg(&script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(book(list).to_string().as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let book: Value = serde_json::from_slice(&output.stdout).unwrap();
        let pages: Vec<(&str, &str)> = (book[list].as_array().unwrap().iter())
            .map(|item| {
                let text = |key: &str| item["Chapter"][key].as_str().unwrap();
                (text("path"), text("content"))
            })
            .collect();
        let paths: BTreeSet<PathBuf> = pages.iter().map(|(path, _)| path.into()).collect();
        assert_eq!(paths.len(), pages.len(), "each page has a place");
        assert!(paths.contains(Path::new("index.md")));
        let (mut n, mut lost) = (0, Vec::new());
        for (path, content) in &pages {
            assert!(normal(Path::new(path)).is_some(), "{path}");
            for link in links(content) {
                n += 1;
                let target = Path::new(path).parent().unwrap().join(link);
                if !normal(&target).is_some_and(|target| paths.contains(&target)) {
                    lost.push(format!("{path} -> {link}"));
                }
            }
        }
        assert!(lost.is_empty(), "{lost:#?}");
        assert!(n > 30, "{n}");
    }
    let mut supports = Command::new(python);
    supports.arg(&script).args(["supports", "html"]);
    assert!(supports.status().unwrap().success());
}
