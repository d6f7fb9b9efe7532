//! Shell completions and manual pages, made from the description of the command line.

use std::fs;

use crate::common::{stdout, sterna};

/// The verbs that `--help` lists.
fn verbs() -> Vec<String> {
    let help = stdout(&["--help"]);
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let lines = commands.lines().take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let verbs: Vec<String> = names
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .filter(|verb| verb != "help")
        .collect();
    assert!(verbs.len() > 20, "{verbs:?}");
    verbs
}

#[test]
fn shells_complete_every_verb() {
    for (shell, part) in [
        ("bash", "complete -F _sterna"),
        ("zsh", "#compdef sterna"),
        ("fish", "complete -c sterna"),
        ("powershell", "Register-ArgumentCompleter"),
        ("elvish", "edit:completion"),
    ] {
        let script = stdout(&["completions", shell]);
        assert!(script.contains(part), "{shell}");
        for verb in verbs() {
            assert!(script.contains(&verb), "{shell}: {verb}");
        }
        assert!(script.contains("max-tokens"), "{shell}");
    }
    let refused = sterna(&["completions", "cmd"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn every_verb_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a/man1");
    assert_eq!(stdout(&["man", folder.to_str().unwrap()]), "");
    for verb in verbs() {
        let page = fs::read_to_string(folder.join(format!("sterna-{verb}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains("NAME"), "{verb}");
    }
    let page = stdout(&["man"]);
    assert_eq!(page, fs::read_to_string(folder.join("sterna.1")).unwrap());
    assert!(page.contains("low\\-bit"), "{page}");
}
