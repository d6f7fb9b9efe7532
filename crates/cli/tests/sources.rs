//! What `docs/sources.md` names exists, and each of its rows has a state.

use std::fs;
use std::path::{Path, PathBuf};

const STATES: [&str; 4] = ["holds", "otherwise", "not yet", "PENDING"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rows of the tables of requirements, by cells.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let mut rows = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if line == "| line | requirement | state | held by |" {
            let table = lines.by_ref().skip(1);
            let table = table.take_while(|line| line.starts_with('|'));
            rows.extend(table.map(|line| {
                let line = line.trim_matches('|').split('|');
                line.map(str::trim).collect::<Vec<_>>()
            }));
        }
    }
    rows
}

/// What stands in backticks and names a file, or a test in one.
fn names(page: &str) -> impl Iterator<Item = &str> {
    let code = page.split('`').skip(1).step_by(2);
    code.filter(|code| {
        let file = code.split_once("::").map_or(*code, |(file, _)| file);
        code.contains("::") || file.contains('/') && !file.contains(' ') && file.contains('.')
    })
}

#[test]
fn every_file_and_test_exists() {
    let root = root();
    let page = fs::read_to_string(root.join("docs/sources.md")).unwrap();
    let mut missing = Vec::new();
    let mut n = 0;
    for name in names(&page) {
        n += 1;
        let (file, test) = name
            .split_once("::")
            .map_or((name, None), |(f, t)| (f, Some(t)));
        let places = [root.join("crates").join(file), root.join(file)];
        let Some(path) = places.iter().find(|path| path.exists()) else {
            missing.push(name);
            continue;
        };
        if let Some(test) = test {
            let text = fs::read_to_string(path).unwrap();
            let is_there = match path.extension().is_some_and(|ending| ending == "mjs") {
                true => text
                    .replace('\\', "")
                    .contains(&format!("async '{test}'()")),
                false => ["", "    "]
                    .iter()
                    .any(|indent| text.contains(&format!("{indent}#[test]\n{indent}fn {test}("))),
            };
            if !is_there {
                missing.push(name);
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n > 150, "{n}");
}

#[test]
fn every_row_has_a_state_with_its_reason() {
    let page = fs::read_to_string(root().join("docs/sources.md")).unwrap();
    let rows = rows(&page);
    assert!(rows.len() > 250, "{}", rows.len());
    for row in rows {
        let [line, _, state, held] = row[..] else {
            panic!("{row:?}");
        };
        let (word, reason) = state.split_once(": ").unwrap_or((state, ""));
        assert!(STATES.contains(&word), "{row:?}");
        assert!(word == "holds" || !reason.is_empty(), "{row:?}");
        assert!(word != "holds" || !held.is_empty(), "{row:?}");
        assert!(!line.is_empty(), "{row:?}");
    }
}
