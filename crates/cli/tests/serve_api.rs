//! `sterna serve` with the API of a model: the whole program, from its settings to the signal that ends it.
#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Serving, outcome, send};

fn sterna(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("serve").env("STERNA_HOME", home);
    command
}

fn start(command: &mut Command) -> Server {
    Server(Serving::start(command.args(["--port", "0"])))
}

/// A server, whose answers are read.
struct Server(Serving);

impl Server {
    /// Status and body.
    fn ask(&self, head: &str, headers: &str, body: &str) -> (u16, String) {
        let text = self.0.ask(head, headers, body);
        let status = text.split(' ').nth(1).expect("a status").parse().unwrap();
        let (_, body) = text.split_once("\r\n\r\n").expect("a body");
        (status, body.to_owned())
    }

    fn chat(&self, headers: &str) -> (u16, String) {
        let body = chat(&json!({"max_tokens": 4}));
        self.ask("POST /v1/chat/completions", headers, &body)
    }
}

fn chat(more: &Value) -> String {
    let mut body =
        json!({"model": "builtin", "messages": [{"role": "user", "content": "Tell me a story."}]});
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body.to_string()
}

#[test]
fn a_model_is_answered_for_beside_its_files() {
    let home = tempfile::tempdir().unwrap();
    let server = start(sterna(home.path()).arg("builtin"));
    let (status, body) = server.chat("");
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let (status, list) = server.ask("GET /v1/models", "", "");
    assert!(status == 200 && list.contains("\"builtin\""), "{list}");
    let (status, manifest) = server.ask("GET /manifest.json", "", "");
    assert!(status == 200 && manifest.contains("tiny-tales"));
    assert_eq!(server.ask("GET /health", "", "").0, 200);
}

#[test]
fn told_to_stop_it_ends_answers_first() {
    let home = tempfile::tempdir().unwrap();
    let mut server = start(sterna(home.path()).args(["builtin", "--no-files"]));
    let mut stream = server.0.connect();
    let body = chat(&json!({"stream": true, "seed": 1}));
    send(&mut stream, "POST /v1/chat/completions", "", &body);
    // Once the answer has begun.
    stream.read_exact(&mut [0; 400]).unwrap();
    server.0.terminate();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    assert!(server.0.child.wait().unwrap().success());
}

#[test]
fn other_machines_need_a_key() {
    let home = tempfile::tempdir().unwrap();
    let (made, key, line) = {
        let (ok, stdout, _) = outcome(sterna(home.path()).args(["--new-api-key", "ann"]));
        let mut lines = stdout.lines().map(str::to_owned);
        (ok, lines.next().unwrap(), lines.next().unwrap())
    };
    assert!(made && line.starts_with("ann "), "{line}");
    let keys = home.path().join("keys.txt");
    fs::write(&keys, format!("{line}\n")).unwrap();
    let all = ["builtin", "--no-files", "--host", "0.0.0.0"];
    let (ok, _, stderr) = outcome(sterna(home.path()).args(all));
    assert!(
        !ok && stderr.contains("--api-keys or --allow-anyone"),
        "{stderr}"
    );
    let mut server = start(sterna(home.path()).args(all).arg("--api-keys").arg(&keys));
    let (_, port) = server.0.address.rsplit_once(':').unwrap();
    server.0.address = format!("127.0.0.1:{port}");
    assert_eq!(server.chat("").0, 401);
    assert_eq!(
        server.chat(&format!("Authorization: Bearer {key}\r\n")).0,
        200
    );
}

#[test]
fn conversations_go_on_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let serve = |more: &[&str]| {
        let mut command = sterna(home.path());
        command.args(["builtin", "--no-files"]).args(more);
        command.args(["--backend", "cpu"]);
        start(&mut command)
    };
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let ask = |server: &Server, messages: &[Value]| {
        let body = chat(&json!({"messages": messages, "max_tokens": 90, "seed": 5}));
        let (status, body) = server.ask("POST /v1/chat/completions", "", &body);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()
    };
    let content = |answer: &Value| {
        let content = answer["choices"][0]["message"]["content"].as_str();
        content.unwrap().to_owned()
    };
    let count = |answer: &Value, name: &str| answer["usage"][name].as_u64().unwrap();
    let kept = ["--cache-folder", folder.to_str().unwrap()];
    let mut messages = vec![said("user", "Tell me a story about a fox named Ruby.")];
    let mut held = 0;
    for turn in 0..3 {
        let mut server = serve(&kept);
        let answer = ask(&server, &messages);
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        // Its last token was never computed, unless that is one that ended it.
        let cached = cached.as_u64().unwrap();
        let all = if turn == 0 { 0..=0 } else { held..=held + 1 };
        assert!(all.contains(&cached), "{turn}: {held}: {answer}");
        assert_eq!(content(&answer), content(&ask(&serve(&[]), &messages)));
        held = count(&answer, "prompt_tokens") + count(&answer, "completion_tokens") - 1;
        messages.push(said("assistant", &content(&answer)));
        messages.push(said("user", "And then?"));
        server.0.terminate();
        assert!(server.0.child.wait().unwrap().success());
        // What a longer one begins with is gone.
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "{turn}");
    }
}

/// An adapter of the bundled reference model is none of the built-in one.
#[test]
fn adapters_have_to_fit() {
    let home = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let other = root.join("adapters/llama/all");
    let all = ["builtin", "--no-files", "--port", "0"];
    let with = |flag: String| outcome(sterna(home.path()).args(all).args(["--adapter", &flag]));
    let (ok, _, stderr) = with(format!("red={}", other.display()));
    assert!(
        !ok && stderr.contains("not an adapter of this model"),
        "{stderr}"
    );
    let (ok, _, stderr) = with("red=/no/such/folder".to_owned());
    assert!(!ok && stderr.contains("/no/such/folder"), "{stderr}");
    let (ok, _, stderr) = with(format!("other:red={}", other.display()));
    assert!(
        !ok && stderr.contains("expected one of the models builtin"),
        "{stderr}"
    );
    let (ok, _, stderr) = with("red".to_owned());
    assert!(!ok && stderr.contains("expected NAME=DIR"), "{stderr}");
}

#[cfg(feature = "tls")]
#[test]
fn connections_are_encrypted() {
    use std::net::TcpStream;
    use std::sync::Arc;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::CertificateDer;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

    let home = tempfile::tempdir().unwrap();
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tls");
    let (cert, key) = (files.join("cert.pem"), files.join("key.pem"));
    let mut command = sterna(home.path());
    let server = start(
        command
            .args(["builtin", "--no-files", "--tls-cert"])
            .arg(&cert)
            .env("STERNA_SERVE_TLS_KEY", &key),
    );
    let address = server.0.address.trim_start_matches("https://").to_owned();
    assert_ne!(address, server.0.address);
    let ask = |trusts: bool| {
        let mut roots = RootCertStore::empty();
        if trusts {
            roots
                .add(CertificateDer::from_pem_file(&cert).unwrap())
                .unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let name = "localhost".try_into().unwrap();
        let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut socket = TcpStream::connect(&address).unwrap();
        let mut stream = Stream::new(&mut connection, &mut socket);
        let body = chat(&json!({"max_tokens": 4, "stream": true}));
        let length = body.len();
        stream.write_all(
            format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: \
                 application/json\r\nContent-Length: {length}\r\n\r\n{body}"
            )
            .as_bytes(),
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok::<String, std::io::Error>(text)
    };
    let answer = ask(true).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("[DONE]"),
        "{answer}"
    );
    assert!(ask(false).is_err());
    // Who speaks plainly is not understood, and nobody is stalled.
    let mut plain = TcpStream::connect(&address).unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let mut bytes = Vec::new();
    // The connection may be reset.
    let _ = plain.read_to_end(&mut bytes);
    assert!(!bytes.starts_with(b"HTTP"));
    assert!(ask(true).is_ok());
}

#[test]
fn clients_that_stall_are_cut_off() {
    let home = tempfile::tempdir().unwrap();
    let timeouts = ["--body-timeout", "1", "--write-timeout", "1"];
    let server = start(
        sterna(home.path())
            .args(["builtin", "--no-files"])
            .args(timeouts),
    );
    // A body of which nothing comes after its first byte.
    let mut stalled = server.0.connect();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{";
    stalled.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stalled.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // A stream that nobody reads any more. It has more than the system keeps for a reader.
    let body = chat(&json!({
        "stream": true, "n": 8, "max_tokens": 4000, "logprobs": true, "top_logprobs": 20,
        "logit_bias": {"1": -100, "2": -100},
    }));
    let mut deaf = server.0.connect();
    send(&mut deaf, "POST /v1/chat/completions", "", &body);
    deaf.read_exact(&mut [0; 2000]).unwrap();
    let figure = |name: &str| {
        let metrics = server.ask("GET /metrics", "", "").1;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.map_or(0, |value| value.trim().parse::<u64>().unwrap())
    };
    // Generous, as machines may be slow.
    let until = Instant::now() + Duration::from_secs(120);
    while figure("sterna_cancelled_answers_total") == 0 {
        assert!(Instant::now() < until, "nobody was cut off");
        thread::sleep(Duration::from_millis(50));
    }
    let mut rest = Vec::new();
    // The connection may be reset.
    let _ = deaf.read_to_end(&mut rest);
    let text = String::from_utf8_lossy(&rest);
    assert!(!text.contains("[DONE]"), "the stream came to its end");
    assert_eq!(server.chat("").0, 200);
}

#[test]
fn pages_of_other_sites_get_nothing_by_names_of_their_own() {
    let home = tempfile::tempdir().unwrap();
    let ask = |server: &Server, path: &str, host: &str| {
        let mut stream = server.0.connect();
        let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let room = format!("/signal/{}", "ab".repeat(32));
    let command = || {
        let mut command = sterna(home.path());
        command.args(["builtin", "--no-files", "--signal"]);
        command
    };
    let server = start(command().args(["--allow-host", "sterna.example"]));
    for host in [&server.0.address[..], "localhost:1", "sterna.example"] {
        assert_eq!(ask(&server, "/v1/models", host), 200, "{host}");
    }
    for path in ["/v1/models", "/metrics", &room] {
        assert_eq!(ask(&server, path, "example.org"), 403, "{path}");
    }
    drop(server);
    // Pages have no key, and who lets anyone in has other names.
    let key = "a key that is long enough";
    for flags in [["--api-key", key], ["--allow-anyone", "--no-pages"]] {
        let server = start(command().args(flags));
        assert_eq!(ask(&server, "/health", "example.org"), 200, "{flags:?}");
    }
}

#[test]
fn settings_come_from_flags_the_environment_and_a_file() {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("serve.toml");
    fs::write(
        &config,
        "models = [\"builtin\"]\nparallel = 1\nqueue = 0\ngrammars = false\npages = false\nmax-body = \"1KiB\"\n",
    )
    .unwrap();
    let command = || {
        let mut command = sterna(home.path());
        command.args(["--no-files", "--config"]).arg(&config);
        command
    };
    // Two at once are one too many, unless something says otherwise.
    let two = chat(&json!({"n": 2, "max_tokens": 1}));
    let server = start(&mut command());
    let of = |server: &Server, body: &str| server.ask("POST /v1/chat/completions", "", body).0;
    assert_eq!(of(&server, &two), 400);
    assert_eq!(server.ask("GET /chat/", "", "").0, 404);
    assert_eq!(of(&server, &chat(&json!({"regex": "a"}))), 400);
    assert_eq!(of(&server, &chat(&json!({"user": "x".repeat(2000)}))), 413);
    drop(server);
    let server = start(command().env("STERNA_SERVE_QUEUE", "5"));
    assert_eq!(of(&server, &two), 200);
    drop(server);
    let server = start(
        command()
            .env("STERNA_SERVE_QUEUE", "5")
            .args(["--queue", "0"]),
    );
    assert_eq!(of(&server, &two), 400);
    drop(server);
    // Flags that are given or not, and those of the engine.
    fs::write(
        &config,
        "models = [\"builtin\"]\nctx = 40\nthreads = 1\nbackend = \"cpu\"\ngateway-metrics = false\n",
    )
    .unwrap();
    let server = start(&mut command());
    let (status, body) = server.ask("POST /tokenize", "", r#"{"content": "x"}"#);
    assert_eq!(status, 200, "{body}");
    let tokens: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(tokens["max_model_len"], 40);
    assert!(!server.ask("GET /metrics", "", "").1.contains("vllm:"));
    drop(server);
    // What the file has on or off, the environment may have the other way round, and flags both.
    fs::write(
        &config,
        "models = [\"builtin\"]\nsignal = true\ngrammars = false\npages = false\ngateway-metrics = false\n",
    )
    .unwrap();
    let reversed = || {
        let mut command = command();
        for name in ["SIGNAL", "NO_GRAMMARS", "NO_PAGES", "NO_GATEWAY_METRICS"] {
            command.env(format!("STERNA_SERVE_{name}"), "false");
        }
        command
    };
    let found = |server: &Server| {
        let (_, metrics) = server.ask("GET /metrics", "", "");
        [
            server.ask("GET /signal/room", "", "").0 != 404,
            of(server, &chat(&json!({"regex": "a"}))) == 200,
            server.ask("GET /chat/", "", "").0 == 200,
            metrics.contains("vllm:"),
        ]
    };
    let server = start(&mut command());
    assert_eq!(found(&server), [true, false, false, false]);
    drop(server);
    let server = start(&mut reversed());
    assert_eq!(found(&server), [false, true, true, true]);
    drop(server);
    let server = start(reversed().args(["--signal", "--no-grammars", "--no-pages=true"]));
    assert_eq!(found(&server), [true, false, false, true]);
    drop(server);
    fs::write(&config, "models = [\"builtin\"]\nreceipts = true\n").unwrap();
    let server = start(
        command()
            .env("STERNA_SERVE_NO_GRAMMARS", "true")
            .env("STERNA_SERVE_RECEIPTS", "false")
            .env("STERNA_SERVE_CORS", "https://a.example,https://b.example"),
    );
    assert_eq!(of(&server, &chat(&json!({"regex": "a"}))), 400);
    assert_eq!(of(&server, &chat(&json!({"receipt": true}))), 400);
    let origin = "Origin: https://b.example\r\n";
    let answer = server.0.ask("GET /v1/models", origin, "");
    assert!(
        answer.contains("access-control-allow-origin: https://b.example"),
        "{answer}"
    );
}

#[test]
fn settings_are_checked() {
    let home = tempfile::tempdir().unwrap();
    let (ok, stdout, _) = outcome(sterna(home.path()).args(["builtin", "--check"]));
    assert!(ok);
    assert_eq!(stdout, "builtin: ok\nsettings: ok\n");
    let config = home.path().join("serve.toml");
    for (text, message) in [
        ("parallel = 0", "parallel"),
        ("frobnicate = 1", "frobnicate"),
        (
            "cache-memory = \"lots\"",
            "cache-memory: expected a number of bytes",
        ),
        (
            "cache-host-memory = \"lots\"",
            "cache-host-memory: expected a number of bytes",
        ),
        (
            "cache-folder-size = \"1GiB\"",
            "cache-folder-size: expected a cache-folder with it, found none",
        ),
        (
            "cache-folder = \"/dev/null\"",
            "cache-folder: expected a folder, found a file: /dev/null",
        ),
        ("api-keys = \"/no/such/file\"", "/no/such/file"),
        ("cors = [\"example.org\"]", "cors: expected an origin"),
        (
            "allow-hosts = [\"http://example.org\"]",
            "allow-host: expected a name such as sterna.example",
        ),
        ("max-connections = 0", "max-connections"),
        ("backend = \"npu\"", "backend: expected auto, cpu or gpu"),
        ("threads = 5000", "threads: expected a number of threads"),
        ("gpu-memory = \"lots\"", "gpu-memory: "),
        ("lora = [\"=1\"]", "lora: expected a folder"),
        (
            "host = \"0.0.0.0\"\nmodels = [\"no-such-model\"]",
            "no-such-model",
        ),
    ] {
        fs::write(&config, text).unwrap();
        let mut command = sterna(home.path());
        command.args(["--check", "--config"]).arg(&config);
        if !text.contains("models") {
            command.arg("builtin");
        }
        let (ok, _, stderr) = outcome(&mut command);
        assert!(!ok && stderr.contains(message), "{text}: {stderr}");
    }
    #[cfg(feature = "tls")]
    for (flags, message) in [
        (
            vec!["--tls-cert", "/no/such/file"],
            "expected a tls-key with it",
        ),
        (
            vec!["--tls-cert", "/no/such/file", "--tls-key", "x"],
            "/no/such/file",
        ),
        (
            vec!["--tls-cert", "Cargo.toml", "--tls-key", "Cargo.toml"],
            "expected a certificate in PEM",
        ),
    ] {
        let mut command = sterna(home.path());
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        let (ok, _, stderr) = outcome(command.args(["builtin", "--check"]).args(flags));
        assert!(!ok && stderr.contains(message), "{stderr}");
    }
    let (ok, _, stderr) =
        outcome(sterna(home.path()).args(["builtin", "--check", "--api-key", "short"]));
    assert!(!ok && stderr.contains("at least 16 characters"), "{stderr}");
}

#[test]
fn gpus_are_checked_before_anything_is_loaded() {
    let home = tempfile::tempdir().unwrap();
    let check = |flags: &[&str]| {
        let mut command = sterna(home.path());
        outcome(
            command
                .args(["builtin", "--no-files", "--check"])
                .args(flags),
        )
    };
    for (flags, message) in [
        (
            &["--gpus", "all", "--backend", "cpu"][..],
            "--gpus: expected --backend gpu or auto, found --backend cpu: the CPU is one device",
        ),
        (&["--gpus", "none"], "expected `all`, a number of GPUs"),
        (
            &["--gpus", "all", "--gpu", "x"],
            "expected no --gpu beside it",
        ),
        (
            &["--gpus", "all", "--gpu-layers", "0"],
            "expected layers on the GPUs",
        ),
    ] {
        let (ok, _, stderr) = check(flags);
        assert!(!ok && stderr.contains(message), "{flags:?}: {stderr}");
    }
    let config = home.path().join("serve.toml");
    fs::write(&config, "gpus = \"some\"").unwrap();
    let (ok, _, stderr) = check(&["--config", config.to_str().unwrap()]);
    assert!(!ok && stderr.contains("gpus: expected `all`"), "{stderr}");
    if !cfg!(feature = "gpu") || !sterna_testing::gpu::is_there() {
        let (ok, _, stderr) = check(&["--gpus", "1"]);
        assert!(!ok && stderr.contains("--gpus: "), "{stderr}");
        return;
    }
    let (ok, stdout, stderr) = check(&["--gpus", "0,0"]);
    assert!(ok, "{stderr}");
    let engines: Vec<&str> = stdout
        .lines()
        .filter(|line| line.starts_with("engine "))
        .collect();
    assert_eq!(engines.len(), 2, "{stdout}");
    assert_eq!(engines[0].replace("engine 0", "engine 1"), engines[1]);
    let (ok, _, stderr) = check(&["--gpus", "0,97"]);
    assert!(
        !ok && stderr.contains("--gpus: expected a GPU 97, found 0: "),
        "{stderr}"
    );
    // As many as there are, from the file.
    fs::write(&config, "gpus = 99").unwrap();
    let (ok, _, stderr) = check(&["--config", config.to_str().unwrap()]);
    assert!(
        !ok && stderr.contains("--gpus: expected 99 GPUs, found "),
        "{stderr}"
    );
}

#[test]
fn one_gpu_can_have_two_engines() {
    if !cfg!(feature = "gpu") || !sterna_testing::gpu::is_there() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let server = start(sterna(home.path()).args(["builtin", "--no-files", "--gpus", "0,0"]));
    let answers: Vec<(u16, String)> = std::thread::scope(|scope| {
        let asks: Vec<_> = (0..4).map(|_| scope.spawn(|| server.chat(""))).collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    });
    for (status, body) in &answers {
        assert_eq!(*status, 200, "{body}");
    }
    // Each has answered, and says so once it has put its sequences away.
    let has = |metrics: &str, figure: &str, engine: usize| {
        let figure = format!("{figure}{{engine=\"{engine}\"");
        let mut lines = metrics.lines();
        lines.any(|line| line.starts_with(&figure) && !line.ends_with(" 0"))
    };
    for engine in [0, 1] {
        for figure in ["sterna_engine_up", "sterna_cache_sequences"] {
            while !has(&server.ask("GET /metrics", "", "").1, figure, engine) {
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn models_are_called_as_they_are_to_be() {
    let home = tempfile::tempdir().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/stories260K/hf");
    let serve = |names: &str| {
        let mut command = sterna(home.path());
        command.arg("builtin").arg(&folder);
        command.args(["--no-files", "--model-name", names]);
        command
    };
    for (names, message) in [
        (
            "a,b,c",
            "expected names of 2 models at most, found \"c\" besides",
        ),
        ("hf", "found two models called \"hf\""),
        ("a:b", "expected a name without a colon"),
        ("", "expected a name without a colon"),
    ] {
        let (ok, _, stderr) = outcome(serve(names).arg("--check"));
        assert!(!ok && stderr.contains(message), "{names}: {stderr}");
    }
    // The second has its own name.
    let (ok, stdout, stderr) = outcome(serve("org/chat").arg("--check"));
    assert!(
        ok && stdout.starts_with("org/chat: ok\nhf: ok\n"),
        "{stdout}{stderr}"
    );
    let server = start(&mut serve("org/chat"));
    for (model, expected) in [("org/chat", 200), ("hf", 200), ("builtin", 404)] {
        let body = json!({"model": model, "prompt": "Once", "max_tokens": 2}).to_string();
        let (status, body) = server.ask("POST /v1/completions", "", &body);
        assert_eq!(status, expected, "{model}: {body}");
    }
    let (status, body) = server.ask("GET /v1/models/org%2Fchat", "", "");
    assert!(
        status == 200 && body.contains("\"id\":\"org/chat\""),
        "{status} {body}"
    );
}

#[test]
fn models_are_loaded_when_they_are_asked_for() {
    let home = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/stories260K");
    let (folder, gguf) = (root.join("hf"), root.join("stories260K-f32.gguf"));
    assert!(gguf.exists(), "{}", gguf.display());
    let (_, stdout, _) = outcome(sterna(home.path()).args(["--new-api-key", "ops"]));
    let (key, line) = stdout.trim().split_once('\n').unwrap();
    let keys = home.path().join("keys.txt");
    fs::write(&keys, format!("{line} admin\n")).unwrap();
    let serve = |memory: &str| {
        let mut command = sterna(home.path());
        command.arg("builtin").arg(&folder).arg("--no-files");
        command.args(["--models-memory", memory]);
        command.arg("--api-keys").arg(&keys);
        command
    };
    let (ok, _, stderr) = outcome(serve("1MiB").arg("--check"));
    let message = "models-memory: expected at least the 2.4 MiB of builtin, found 1.0 MiB";
    assert!(!ok && stderr.contains(message), "{stderr}");
    // Room for either of them.
    let server = start(&mut serve("3MiB"));
    let header = format!("x-api-key: {key}\r\n");
    let loaded = || {
        let (_, list) = server.ask("GET /v1/models", &header, "");
        let list: Value = serde_json::from_str(&list).unwrap();
        let models = list["data"].as_array().unwrap().clone().into_iter();
        let models = models.filter(|model| model["status"]["value"] == "loaded");
        models
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(loaded(), ["builtin"]);
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "Once", "max_tokens": 4}).to_string();
        server.ask("POST /v1/completions", &header, &body)
    };
    let (status, body) = ask("hf");
    assert_eq!(status, 200, "{body}");
    assert_eq!(loaded(), ["hf"]);
    let body = json!({"model": gguf, "pin": true}).to_string();
    let (status, body) = server.ask("POST /v1/models/load", &header, &body);
    assert!(
        status == 200 && body.contains("\"pinned\":true"),
        "{status} {body}"
    );
    assert_eq!(loaded(), ["hf", "stories260K-f32"]);
    // The pinned one leaves no room for it.
    let (status, body) = ask("builtin");
    assert!(
        status == 503 && body.contains("the model builtin has"),
        "{status} {body}"
    );
    let body = json!({"model": "stories260K-f32"}).to_string();
    let (status, body) = server.ask("POST /v1/models/unload", &header, &body);
    assert_eq!(status, 200, "{body}");
    assert_eq!(ask("builtin").0, 200);
    assert_eq!(loaded(), ["builtin"]);
}

#[test]
fn a_server_takes_the_weights_of_another_revision() {
    let home = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    let changed = home.path().join("changed");
    fs::create_dir(&changed).unwrap();
    for file in fs::read_dir(&root).unwrap() {
        let path = file.unwrap().path();
        if path.is_file() {
            fs::copy(&path, changed.join(path.file_name().unwrap())).unwrap();
        }
    }
    // The rows of a matrix of a layer come one place later.
    let path = changed.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let begin = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..begin]).unwrap();
    let tensor = &header["model.layers.3.self_attn.v_proj.weight"];
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let offsets = &tensor["data_offsets"];
    let data = begin + number(&offsets[0])..begin + number(&offsets[1]);
    file[data].rotate_right(number(&tensor["shape"][1]));
    fs::write(&path, file).unwrap();
    let package = |of: &Path, name: &str| {
        let package = home.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let (ok, _, stderr) = outcome(command.arg("convert").arg(of).arg(&package));
        assert!(ok, "{stderr}");
        package
    };
    let (tale, other) = (package(&root, "tale"), package(&changed, "other"));
    let (_, stdout, _) = outcome(sterna(home.path()).args(["--new-api-key", "ops"]));
    let (key, line) = stdout.trim().split_once('\n').unwrap();
    let keys = home.path().join("keys.txt");
    fs::write(&keys, format!("{line} admin\n")).unwrap();
    let config = home.path().join("config.toml");
    fs::write(&config, "models-idle = 3600\n").unwrap();
    let mut command = sterna(home.path());
    command.arg(&tale).arg("--no-files");
    command.arg("--config").arg(&config);
    command.arg("--api-keys").arg(&keys);
    let server = start(&mut command);
    let header = format!("x-api-key: {key}\r\n");
    let post = |path: &str, body: Value| {
        let (status, text) = server.ask(&format!("POST {path}"), &header, &body.to_string());
        (status, serde_json::from_str::<Value>(&text).unwrap())
    };
    // By its path, however that is written, it is the one that is there.
    let again = home.path().join("other/../tale");
    let (status, model) = post("/v1/models/load", json!({"model": again}));
    assert_eq!(status, 200, "{model}");
    let (name, hash) = (&model["id"], &model["hash"]);
    assert!(hash.is_string(), "{model}");
    let tell = || {
        let body =
            json!({"model": name, "prompt": "Once upon a time", "max_tokens": 24, "seed": 1});
        let (status, answer) = post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].clone()
    };
    let before = tell();
    let (status, swapped) = post("/v1/models/swap", json!({"model": name, "revision": other}));
    assert_eq!(status, 200, "{swapped}");
    // Of two packages, what has changed.
    let groups = swapped["swapped"].as_array().unwrap();
    assert_eq!(groups.len(), 1, "{swapped}");
    assert_eq!(groups[0]["group"], "layer.3");
    let (from, to) = (&groups[0]["from"]["hash"], &groups[0]["to"]["hash"]);
    assert!(from.is_string() && to.is_string() && from != to);
    assert_eq!(
        (&swapped["generation"], &swapped["hash"]),
        (&json!(1), &json!(null))
    );
    assert_ne!(tell(), before);
    let (status, refused) = post("/v1/models/swap", json!({"model": name, "revision": other}));
    assert!(
        status == 400 && refused.to_string().contains("found the same"),
        "{refused}"
    );
    assert_eq!(post("/v1/models/unload", json!({"model": name})).0, 200);
    let (_, loaded) = post("/v1/models/load", json!({"model": name}));
    assert_eq!((&loaded["generation"], &loaded["hash"]), (&json!(0), hash));
    assert_eq!(tell(), before);
    // What was swapped is known to be gone with it.
    let (_, swapped) = post("/v1/models/swap", json!({"model": name, "revision": other}));
    assert_eq!(swapped["generation"], 1, "{swapped}");
}

#[test]
fn receipts_of_a_server_are_checked_by_the_program() {
    let home = tempfile::tempdir().unwrap();
    let program = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let command = command.args(args).env("STERNA_HOME", home.path());
        outcome(command.current_dir(home.path()))
    };
    let made = program(&["sign", "--generate", "--no-password", "--key", "k"]);
    assert!(made.0, "{}", made.2);
    let trusted = program(&["trust", "us", "k.pub"]);
    assert!(trusted.0, "{}", trusted.2);
    let key = home.path().join("k");
    // As a file has it.
    let config = home.path().join("serve.toml");
    let settings = format!(
        "receipts = true\nreceipt-key = {:?}\ngrammars = true\n",
        key
    );
    fs::write(&config, settings).unwrap();
    let server = start(
        sterna(home.path())
            .args(["builtin", "--no-files", "--backend", "cpu", "--config"])
            .arg(&config),
    );
    let body = chat(&json!({"receipt": true, "max_tokens": 30, "seed": 4}));
    let (status, body) = server.ask("POST /v1/chat/completions", "", &body);
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    let receipt = &answer["choices"][0]["receipt"];
    let file = home.path().join("a.json");
    fs::write(&file, serde_json::to_string_pretty(receipt).unwrap()).unwrap();
    let n = receipt["answer"].as_array().unwrap().len();
    let (ok, said, error) = program(&["check", "a.json"]);
    assert!(ok, "{error}");
    let expected = format!("a.json: {n} tokens of builtin, the same bits; signed by us\n");
    assert_eq!(said, expected);
    let mut changed = receipt.clone();
    changed["sampling"]["seed"] = json!("5");
    fs::write(&file, changed.to_string()).unwrap();
    let (ok, _, error) = program(&["check", "a.json"]);
    assert!(!ok && error.contains("does not fit"), "{error}");
    // A key for nothing.
    let refused = outcome(
        sterna(home.path())
            .args(["builtin", "--check", "--receipt-key"])
            .arg(&key),
    );
    assert!(!refused.0);
    assert!(
        refused.2.contains("receipt-key: expected receipts with it"),
        "{}",
        refused.2
    );
    let (status, body) = {
        let plain = start(sterna(home.path()).args(["builtin", "--no-files"]));
        plain.ask(
            "POST /v1/chat/completions",
            "",
            &chat(&json!({"receipt": true})),
        )
    };
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("it was started without --receipts"), "{body}");
}
