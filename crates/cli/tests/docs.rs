//! The examples in `docs/cli.md` are true, and links lead somewhere.
#![cfg(unix)]

use std::env;
use std::path::Path;
use std::process::Command;

/// A command, and the lines that should follow it. A line `…` stands for any number of lines.
struct Example<'a> {
    command: &'a str,
    output: Vec<&'a str>,
}

fn examples(markdown: &str) -> Vec<Example<'_>> {
    let mut examples: Vec<Example<'_>> = Vec::new();
    for block in markdown.split("```console\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        for line in block.lines() {
            match (line.strip_prefix("$ "), examples.last_mut()) {
                (Some(command), _) => examples.push(Example {
                    command,
                    output: Vec::new(),
                }),
                (None, Some(example)) => example.output.push(line),
                (None, None) => panic!("`{line}` follows no command"),
            }
        }
    }
    examples
}

#[test]
fn examples_print_what_they_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let markdown = std::fs::read_to_string(path).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let programs = Path::new(env!("CARGO_BIN_EXE_sterna")).parent().unwrap();
    let search = format!("{}:{}", programs.display(), env::var("PATH").unwrap());
    let examples = examples(&markdown);
    assert!(examples.len() > 10);
    for Example { command, output } in examples {
        let found = Command::new("sh")
            .args(["-c", command])
            .current_dir(&dir)
            .env("PATH", &search)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&found.stderr);
        assert!(found.status.success(), "{command}: {stderr}");
        let stdout = String::from_utf8(found.stdout).unwrap();
        let lines: Vec<&str> = stdout.lines().collect();
        match output.split_last() {
            Some((&"…", start)) => assert_eq!(&lines[..start.len()], start, "{command}"),
            _ => assert_eq!(lines, output, "{command}"),
        }
    }
}

/// Where the links of `markdown` lead, anchors cut off.
fn links(markdown: &str) -> impl Iterator<Item = &str> {
    let targets = markdown.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets.map(|target| target.split_once('#').map_or(target, |(file, _)| file))
}

#[test]
fn relative_links_lead_to_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    for folder in ["docs", "docs/formats"] {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        pages.extend(entries.map(|entry| entry.unwrap().path()));
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    let mut missing = Vec::new();
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        for link in links(&text).filter(|link| !link.contains("://") && !link.is_empty()) {
            if !page.parent().unwrap().join(link).exists() {
                missing.push(format!("{} -> {link}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
