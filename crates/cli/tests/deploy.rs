//! What `deploy/` has is true of the program: its command lines are taken, its metrics exist, its health check works.
#![cfg(unix)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::Serving;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn text(path: &str) -> String {
    fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The list in JSON that follows `marker`, each time it is in `text`.
fn lists(text: &str, marker: &str) -> Vec<Vec<String>> {
    let after = text.split(marker).skip(1);
    let lists = after.filter(|rest| rest.starts_with('['));
    lists
        .map(|rest| {
            let mut all = serde_json::Deserializer::from_str(rest).into_iter();
            all.next().expect("a list").expect("a list of texts")
        })
        .collect()
}

/// The command lines of the server, without the program's name.
fn command_lines() -> Vec<(&'static str, Vec<String>)> {
    let mut all = Vec::new();
    for (path, marker) in [
        ("deploy/docker/Dockerfile", "\nCMD "),
        ("deploy/kubernetes/sterna.yaml", " args: "),
        ("deploy/kserve/serving-runtime.yaml", " args: "),
    ] {
        let lists = lists(&text(path), marker);
        assert_eq!(lists.len(), 1, "{path}");
        all.extend(lists.into_iter().map(|list| (path, list)));
    }
    let path = "deploy/systemd/sterna.service";
    let unit = text(path);
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let words = line.expect("a line that starts it").split(' ').skip(1);
    all.push((path, words.map(str::to_owned).collect()));
    all
}

/// The text after `flag`.
fn value<'a>(words: &'a [String], flag: &str) -> Option<&'a str> {
    let at = words.iter().position(|word| word == flag)?;
    words.get(at + 1).map(String::as_str)
}

#[test]
fn command_lines_are_taken() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys");
    fs::write(&keys, format!("ann {} rpm=60 tpm=1000\n", "0".repeat(64))).unwrap();
    let model = repository("crates/sterna/models/tiny-tales");
    let put = |text: &str| -> String {
        let keys = keys.to_str().unwrap();
        let model = model.to_str().unwrap();
        [
            ("${CREDENTIALS_DIRECTORY}/keys", keys),
            ("/etc/sterna/keys", keys),
            ("/models/model.gguf", model),
            ("/var/lib/sterna/model.gguf", model),
            ("/mnt/models", model),
        ]
        .iter()
        .fold(text.to_owned(), |text, (name, path)| {
            text.replace(name, path)
        })
    };
    let config = home.path().join("serve.toml");
    fs::write(&config, put(&text("deploy/systemd/serve.toml"))).unwrap();
    let lines = command_lines();
    assert_eq!(lines.len(), 4);
    for (path, words) in lines {
        let words = words.iter().map(|word| match word.as_str() {
            "/etc/sterna/serve.toml" => config.to_str().unwrap().to_owned(),
            word => put(word),
        });
        let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(words)
            .arg("--check")
            .env("STERNA_HOME", home.path())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{path}: {stderr}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(stdout.ends_with(": ok\nsettings: ok\n"), "{path}: {stdout}");
    }
}

#[test]
fn ports_and_times_fit_together() {
    for (path, words) in command_lines() {
        if let Some(port) = value(&words, "--port") {
            let declared = format!("containerPort: {port}\n");
            assert!(text(path).contains(&declared), "{path}: {declared}");
        }
    }
    let number = |path: &str, before: &str| -> u64 {
        let text = text(path);
        let (_, rest) = text
            .split_once(before)
            .unwrap_or_else(|| panic!("{path}: no {before}"));
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    // What is answered has 30 seconds to end.
    assert!(number("deploy/systemd/sterna.service", "TimeoutStopSec=") > 30);
    for pod in [
        "deploy/kubernetes/sterna.yaml",
        "deploy/kserve/serving-runtime.yaml",
    ] {
        let waits = number(pod, "command: [\"sleep\", \"");
        let grace = number(pod, "terminationGracePeriodSeconds: ");
        assert!(grace > 30 + waits, "{pod}: {grace}");
    }
    let runtime = "deploy/kserve/serving-runtime.yaml";
    let scraped = number(runtime, "prometheus.kserve.io/port: \"");
    assert_eq!(scraped, number(runtime, "containerPort: "));
}

/// A server, and a header with a key that may send one request a minute.
fn start(home: &Path) -> (Serving, String) {
    let made = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", "--new-api-key", "ann"])
        .output()
        .unwrap();
    let made = String::from_utf8(made.stdout).unwrap();
    let (key, line) = made.trim().split_once('\n').unwrap();
    let keys = home.join("keys");
    fs::write(&keys, format!("{line} rpm=1\n")).unwrap();
    let server = Serving::start(
        Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["serve", "builtin", "--no-files", "--port", "0"])
            .args(["--public-metrics", "--api-keys"])
            .arg(&keys)
            .env("STERNA_HOME", home),
    );
    (server, format!("Authorization: Bearer {key}\r\n"))
}

/// Words of `text` that name a metric.
fn named(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
    let words = text.split(|c: char| !is_part(c));
    let metrics = words.filter(|word| word.starts_with("sterna_") || word.starts_with("vllm:"));
    metrics.map(str::to_owned).collect()
}

#[test]
fn metrics_that_are_named_exist() {
    let home = tempfile::tempdir().unwrap();
    let (server, key) = start(home.path());
    // Those with labels are there once there is something to count.
    for status in ["200", "429"] {
        let body = r#"{"model": "builtin", "prompt": "Once", "max_tokens": 2}"#;
        let answer = server.ask("POST /v1/completions", &key, body);
        let expected = format!("HTTP/1.1 {status}");
        assert!(answer.starts_with(&expected), "{expected}: {answer}");
    }
    let metrics = server.ask("GET /metrics", &key, "");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    let mut there = BTreeSet::new();
    for line in metrics.lines() {
        let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let endings: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["", "_bucket", "_sum", "_count"],
            "info" => &["_info"],
            _ => &[""],
        };
        there.extend(endings.iter().map(|ending| format!("{name}{ending}")));
    }
    assert!(there.contains("sterna_requests_total"), "{there:?}");
    let dashboard = text("deploy/grafana/sterna.json");
    let parsed: Value = serde_json::from_str(&dashboard).unwrap();
    let mut ids = BTreeSet::new();
    for panel in parsed["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        assert!(!named(&panel["targets"].to_string()).is_empty(), "{panel}");
    }
    for (path, text) in [
        ("deploy/grafana/sterna.json", dashboard),
        (
            "deploy/prometheus/alerts.yml",
            text("deploy/prometheus/alerts.yml"),
        ),
        ("docs/server.md", text("docs/server.md")),
    ] {
        let named = named(&text);
        assert!(named.len() > 5, "{path}: {named:?}");
        let missing: Vec<_> = named.difference(&there).collect();
        assert!(missing.is_empty(), "{path}: {missing:?} of {there:?}");
    }
}

#[test]
fn the_health_check_of_the_image_tells_a_server_from_none() {
    let home = tempfile::tempdir().unwrap();
    let (server, _) = start(home.path());
    let dockerfile = text("deploy/docker/Dockerfile");
    // The list is on a line of its own.
    let lists = lists(&dockerfile, "    CMD ");
    let [command] = &lists[..] else {
        panic!("{lists:?}");
    };
    let healthy = |port: &str| {
        let words: Vec<String> = command
            .iter()
            .map(|word| word.replace("8765", port))
            .collect();
        let status = Command::new(&words[0])
            .args(&words[1..])
            .stderr(Stdio::null())
            .status();
        status.unwrap().success()
    };
    let (_, port) = server.address.rsplit_once(':').unwrap();
    let port = port.to_owned();
    assert!(healthy(&port));
    drop(server);
    assert!(!healthy(&port));
}
