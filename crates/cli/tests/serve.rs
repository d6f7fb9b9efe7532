//! `sterna serve`, over real sockets.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_delivery::hash::{Algorithm, digest_of};

use crate::common::listening;

struct Server {
    child: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let header = self
            .headers
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name));
        header.map(|(_, value)| value.as_str())
    }
}

fn shard_bytes() -> Vec<u8> {
    (0..3_000_000u32)
        .map(|i| (i.wrapping_mul(2654435761) >> 24) as u8)
        .collect()
}

fn shard_etag() -> String {
    format!(
        "\"sha256-{}\"",
        digest_of(Algorithm::Sha256, &shard_bytes())
    )
}

fn start() -> Server {
    start_with(&[])
}

fn start_with(flags: &[&str]) -> Server {
    start_with_stdin(flags, Stdio::inherit())
}

fn start_with_stdin(flags: &[&str], stdin: Stdio) -> Server {
    let dir = tempfile::tempdir().unwrap();
    let shard = shard_bytes();
    let manifest = json!({
        "version": 1,
        "modelId": "tiny <model>",
        "modelType": "transformer",
        "quantization": "F32",
        "architecture": {
            "numLayers": 1, "hiddenSize": 2, "intermediateSize": 4, "numAttentionHeads": 1,
            "vocabSize": 3, "maxSeqLen": 8,
        },
        "totalSize": shard.len(),
        "hashAlgorithm": "sha256",
        "shards": [{
            "index": 0,
            "fileName": "shard_00000.bin",
            "size": shard.len(),
            "hash": digest_of(Algorithm::Sha256, &shard).to_string(),
        }],
        "tensorsFile": "tensors.json",
    });
    fs::write(dir.path().join("manifest.json"), manifest.to_string()).unwrap();
    fs::write(dir.path().join("tensors.json"), "{}").unwrap();
    fs::write(dir.path().join("shard_00000.bin"), shard).unwrap();
    fs::write(dir.path().join("private.txt"), "secret").unwrap();
    let (child, address) = listening(
        Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["serve", "--port", "0"])
            .args(flags)
            .arg(dir.path())
            .stdin(stdin)
            .stderr(Stdio::null()),
    );
    Server {
        address,
        child,
        _dir: dir,
    }
}

/// A connection that is kept.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(server: &Server) -> Client {
        let stream = TcpStream::connect(&server.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        Client(BufReader::new(stream))
    }

    fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n");
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        self.0
            .get_mut()
            .write_all((text + "\r\n").as_bytes())
            .unwrap();
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<_> = lines[1..]
            .iter()
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let mut answer = Answer {
            status,
            headers,
            body: Vec::new(),
        };
        let has_body = method != "HEAD" && status != 101 && status != 204 && status != 304;
        let len = answer
            .header("content-length")
            .map_or(0, |len| len.parse().unwrap());
        answer.body = vec![0; if has_body { len } else { 0 }];
        self.0.read_exact(&mut answer.body).unwrap();
        answer
    }
}

fn get(server: &Server, path: &str, headers: &[(&str, &str)]) -> Answer {
    Client::connect(server).request("GET", path, headers)
}

/// What asks for a WebSocket.
const UPGRADE: [(&str, &str); 4] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

#[test]
fn tabs_find_each_other_if_that_is_asked_for() {
    let room = format!("/signal/{}", "ab".repeat(32));
    // Without the flag it is a file that isn't there.
    assert_eq!(get(&start(), &room, &UPGRADE).status, 404);
    let server = start_with(&["--signal", "--no-api", "--cors", "https://example.org"]);
    let mut member = Client::connect(&server);
    assert_eq!(member.request("GET", &room, &UPGRADE).status, 101);
    // A text of less than 126 bytes, not masked.
    let mut head = [0; 2];
    member.0.read_exact(&mut head).unwrap();
    assert_eq!(head[0], 0x81);
    let mut text = vec![0; head[1].into()];
    member.0.read_exact(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with(r#"{"id":""#), "{text}");
    for (origin, status) in [("https://example.org", 101), ("https://example.com", 403)] {
        let headers = [&UPGRADE[..], &[("Origin", origin)]].concat();
        assert_eq!(get(&server, &room, &headers).status, status, "{origin}");
    }
    // Files are served beside it.
    assert_eq!(get(&server, "/manifest.json", &[]).status, 200);
    let refused = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args([
            "serve", "--port", "0", "--host", "0.0.0.0", "--signal", "--no-api",
        ])
        .arg(server._dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    let expected = "0.0.0.0: signal on an address that others can reach: expected --api-key";
    assert!(
        !refused.status.success() && stderr.contains(expected),
        "{stderr}"
    );
}

#[test]
fn files_come_whole_with_what_caches_and_other_sites_need() {
    let server = start();
    let shard = shard_bytes();
    // One connection for all.
    let mut client = Client::connect(&server);
    let answer = client.request("GET", "/shard_00000.bin", &[]);
    assert_eq!(answer.status, 200);
    assert!(answer.body == shard);
    for (name, value) in [
        ("etag", shard_etag().as_str()),
        ("cache-control", "public, max-age=31536000, immutable"),
        ("accept-ranges", "bytes"),
        ("content-type", "application/octet-stream"),
        ("access-control-allow-origin", "*"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-embedder-policy", "require-corp"),
        ("cross-origin-resource-policy", "cross-origin"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
    let exposed = answer.header("access-control-expose-headers").unwrap();
    assert!(
        exposed.contains("ETag") && exposed.contains("Content-Range"),
        "{exposed}"
    );

    let head = client.request("HEAD", "/shard_00000.bin", &[("Range", "bytes=0-9")]);
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("3000000"))
    );

    let manifest = client.request("GET", "/manifest.json", &[]);
    assert_eq!(manifest.header("cache-control"), Some("no-cache"));
    assert_eq!(manifest.header("content-type"), Some("application/json"));
    let etag = format!(
        "\"sha256-{}\"",
        digest_of(Algorithm::Sha256, &manifest.body)
    );
    assert_eq!(manifest.header("etag"), Some(etag.as_str()));
    assert_eq!(
        serde_json::from_slice::<Value>(&manifest.body).unwrap()["version"],
        1
    );
}

#[test]
fn ranges_are_exact() {
    let server = start();
    let shard = shard_bytes();
    let mut client = Client::connect(&server);
    for (range, start, end) in [
        ("bytes=0-0", 0, 1),
        ("bytes=100-2000000", 100, 2_000_001),
        ("bytes=2999999-", 2_999_999, 3_000_000),
        ("bytes=-5", 2_999_995, 3_000_000),
        ("bytes=2999000-9999999", 2_999_000, 3_000_000),
    ] {
        let answer = client.request("GET", "/shard_00000.bin", &[("Range", range)]);
        assert_eq!(answer.status, 206, "{range}");
        let content_range = format!("bytes {start}-{}/3000000", end - 1);
        assert_eq!(answer.header("content-range"), Some(content_range.as_str()));
        assert!(answer.body == shard[start..end], "{range}");
        assert_eq!(answer.header("etag"), Some(shard_etag().as_str()));
    }
    let answer = client.request("GET", "/shard_00000.bin", &[("Range", "bytes=3000000-")]);
    assert_eq!(
        (answer.status, answer.header("content-range")),
        (416, Some("bytes */3000000"))
    );
    for ignored in ["bytes=0-1,5-6", "bytes=x", "lines=0-1"] {
        let answer = client.request("GET", "/shard_00000.bin", &[("Range", ignored)]);
        assert_eq!(
            (answer.status, answer.body.len()),
            (200, 3_000_000),
            "{ignored}"
        );
    }
}

#[test]
fn conditions_are_kept() {
    let server = start();
    let etag = shard_etag();
    let mut client = Client::connect(&server);
    let (weak, list) = (format!("W/{etag}"), format!("\"x\", {etag}"));
    for tag in [etag.as_str(), &weak, &list, "*"] {
        let answer = client.request("GET", "/shard_00000.bin", &[("If-None-Match", tag)]);
        assert_eq!((answer.status, answer.body.len()), (304, 0), "{tag}");
        assert_eq!(answer.header("etag"), Some(etag.as_str()));
    }
    let answer = client.request("GET", "/shard_00000.bin", &[("If-None-Match", "\"x\"")]);
    assert_eq!(answer.status, 200);
    // A range only of the version that the client has.
    let date = "Wed, 21 Oct 2015 07:28:00 GMT";
    for (tag, status) in [
        (etag.as_str(), 206),
        ("\"x\"", 200),
        (&weak, 200),
        (date, 200),
    ] {
        let headers = [("Range", "bytes=0-9"), ("If-Range", tag)];
        assert_eq!(
            client.request("GET", "/shard_00000.bin", &headers).status,
            status,
            "{tag}"
        );
    }
    for (tag, status) in [
        (etag.as_str(), 200),
        ("*", 200),
        ("\"x\"", 412),
        (&weak, 412),
    ] {
        let answer = client.request("HEAD", "/shard_00000.bin", &[("If-Match", tag)]);
        assert_eq!(answer.status, status, "{tag}");
    }
}

#[test]
fn only_what_the_package_names_can_be_had() {
    let server = start();
    for path in [
        "/private.txt",
        "/../private.txt",
        "/..%2fprivate.txt",
        "/./private.txt",
        "/shard_00000.bin/",
        "//etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/none",
        "/shard_00000.bin%00",
        "/%ff",
    ] {
        let answer = get(&server, path, &[]);
        assert!(
            matches!(answer.status, 400 | 404),
            "{path}: {}",
            answer.status
        );
        assert!(!answer.body.windows(6).any(|w| w == b"secret"));
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    }
    // An escaped letter is the letter.
    assert_eq!(get(&server, "/tensors%2Ejson", &[]).status, 200);
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let answer = Client::connect(&server).request(method, "/manifest.json", &[]);
        assert_eq!(answer.status, 405, "{method}");
        assert!(
            answer
                .header("allow")
                .is_some_and(|allow| allow.contains("GET")),
            "{method}"
        );
    }
    let headers = [
        ("Origin", "https://example.org"),
        ("Access-Control-Request-Method", "GET"),
        ("Access-Control-Request-Headers", "range"),
    ];
    let answer = Client::connect(&server).request("OPTIONS", "/manifest.json", &headers);
    assert_eq!(answer.status, 204);
    let allowed = answer.header("access-control-allow-headers").unwrap();
    assert!(allowed.contains("Range"), "{allowed}");
}

#[test]
fn the_folder_is_shown_to_people_and_programs() {
    let server = start();
    let index: Value = serde_json::from_slice(&get(&server, "/", &[]).body).unwrap();
    let again: Value = serde_json::from_slice(&get(&server, "/index.json", &[]).body).unwrap();
    assert_eq!(index, again);
    let files = index["files"].as_array().unwrap();
    let names: Vec<_> = files
        .iter()
        .map(|file| file["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["manifest.json", "shard_00000.bin", "tensors.json"]);
    assert_eq!(
        (files[1]["size"].as_u64(), files[1]["etag"].as_str()),
        (Some(3_000_000), Some(shard_etag().as_str()))
    );
    let page = get(&server, "/index.html", &[]);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let page = String::from_utf8(page.body).unwrap();
    assert!(
        page.contains("tiny &lt;model&gt;") && page.contains("href=\"shard_00000.bin\""),
        "{page}"
    );
}

#[test]
fn clients_that_are_slow_or_speak_nonsense_disturb_nobody() {
    let server = start_with(&["--write-timeout", "1"]);
    // Heads that never end, and a reader that never reads: what it asks for fits in no buffer.
    let mut idle = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream
            .write_all(b"GET /manifest.json HTTP/1.1\r\nHost: te")
            .unwrap();
        idle.push(stream);
    }
    let mut deaf = TcpStream::connect(&server.address).unwrap();
    let request = "GET /shard_00000.bin HTTP/1.1\r\nHost: test\r\n\r\n";
    deaf.write_all(request.repeat(20).as_bytes()).unwrap();
    let mut nonsense = TcpStream::connect(&server.address).unwrap();
    nonsense
        .write_all(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    nonsense.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert_eq!(get(&server, "/manifest.json", &[]).status, 200);
    // A head that takes too long ends the connection.
    let begun = Instant::now();
    let stream = &mut idle[0];
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(begun.elapsed() < Duration::from_secs(40));
    // By now the reader that never read was cut off: what it was sent is there, the rest isn't.
    deaf.set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut sent = Vec::new();
    if let Err(error) = deaf.read_to_end(&mut sent) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    assert!(sent.len() < 20 * 3_000_000, "{}", sent.len());
}

#[test]
fn floods_of_headers_are_refused() {
    let server = start();
    let many = "X-A: b\r\n".repeat(1_000);
    let names: String = (0..1_000).map(|i| format!("X-{i}: b\r\n")).collect();
    let long = format!("X-A: {}\r\n", "b".repeat(1 << 20));
    let path = format!(
        "GET /{} HTTP/1.1\r\nHost: test\r\n\r\n",
        "x".repeat(1 << 20)
    );
    let lines = [&many, &names, &long]
        .map(|headers| format!("GET /manifest.json HTTP/1.1\r\nHost: test\r\n{headers}\r\n"));
    // Folded lines, and one that never ends.
    let others = [
        "GET / HTTP/1.1\r\nHost: test\r\nX-A: b\r\n c\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\n{}", "X".repeat(1 << 20)),
    ];
    for head in lines.into_iter().chain([path]).chain(others) {
        let begin = head[..head.len().min(60)].to_owned();
        let mut stream = TcpStream::connect(&server.address).unwrap();
        // The server may hang up before it has read all.
        let _ = stream.write_all(head.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let is_refused = ["HTTP/1.1 400", "HTTP/1.1 414", "HTTP/1.1 431"]
            .iter()
            .any(|status| answer.starts_with(status));
        // What was said may be lost with the connection.
        assert!(is_refused || answer.is_empty(), "{begin}: {answer}");
        assert_eq!(get(&server, "/manifest.json", &[]).status, 200, "{begin}");
    }
}

/// A connection to `server` from the address `ip` of this machine.
#[cfg(target_os = "linux")]
fn connect_from(ip: &str, server: &str) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(format!("{ip}:0").parse().unwrap()).unwrap();
        let stream = socket.connect(server.parse().unwrap()).await.unwrap();
        stream.into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

#[cfg(target_os = "linux")]
#[test]
fn one_address_cannot_take_all_connections() {
    let limits = [
        "--max-connections",
        "8",
        "--max-connections-per-address",
        "6",
    ];
    let (server, _) = start_builtin(&[&["builtin", "--no-files"], &limits[..]].concat());
    let idle: Vec<TcpStream> = (0..6)
        .map(|_| connect_from("127.0.0.1", &server.address))
        .collect();
    // The next one is closed, unread.
    let mut more = connect_from("127.0.0.1", &server.address);
    let closed = more.read(&mut [0]);
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    let health = |ip| {
        let mut client = Client(BufReader::new(connect_from(ip, &server.address)));
        client.request("GET", "/health", &[]).status
    };
    assert_eq!(health("127.0.0.2"), 200);
    // Whoever goes leaves the place to others of the address.
    drop(idle);
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let mut stream = connect_from("127.0.0.1", &server.address);
        let asked = stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let mut answer = [0; 12];
        if asked.is_ok() && stream.read_exact(&mut answer).is_ok() {
            assert_eq!(&answer, b"HTTP/1.1 200");
            break;
        }
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(10));
    }
}

/// Asks `server` to end by `ask` while a part of a shard is on its way, which has to arrive.
fn ends_transfers_first(mut server: Server, ask: impl FnOnce(&mut Child)) {
    let mut idle = Client::connect(&server);
    assert_eq!(idle.request("GET", "/manifest.json", &[]).status, 200);
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream
        .write_all(b"GET /shard_00000.bin HTTP/1.1\r\nHost: test\r\n\r\n")
        .unwrap();
    let mut first = [0; 1000];
    stream.read_exact(&mut first).unwrap();
    ask(&mut server.child);
    std::thread::sleep(Duration::from_millis(200));
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(
        rest.ends_with(&shard_bytes()[2_999_000..]),
        "the transfer came to its end"
    );
    let status = server.child.wait().unwrap();
    assert!(status.success(), "{status:?}");
}

#[cfg(unix)]
#[test]
fn told_to_stop_it_ends_transfers_first() {
    ends_transfers_first(start(), |child| {
        let pid = child.id().to_string();
        let told = Command::new("kill").args(["-INT", &pid]).status().unwrap();
        assert!(told.success());
    });
}

#[test]
fn it_ends_with_who_holds_its_standard_input() {
    let end = |child: &mut Child| drop(child.stdin.take().expect("it is a pipe"));
    let start = || start_with_stdin(&["--exit-on-stdin-close"], Stdio::piped());
    ends_transfers_first(start(), end);
    // What comes by it changes nothing.
    let mut server = start();
    let stdin = server.child.stdin.as_mut().expect("it is a pipe");
    stdin.write_all(b"still there\n").unwrap();
    assert_eq!(get(&server, "/manifest.json", &[]).status, 200);
    // Before there is an address, too.
    let told = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", "builtin", "--no-files", "--port", "0"])
        .arg("--exit-on-stdin-close")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(told.status.success(), "{told:?}");
    // Only where it was asked for: others have no standard input.
    let server = start_with_stdin(&[], Stdio::null());
    assert_eq!(get(&server, "/manifest.json", &[]).status, 200);
}

#[test]
fn what_cannot_be_served_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for (manifest, message) in [
        (None, "manifest.json"),
        (Some("{"), "manifest.json"),
        (
            Some(r#"{"shards": [{"fileName": "../x", "size": 1}]}"#),
            "shards[0]",
        ),
    ] {
        if let Some(text) = manifest {
            fs::write(dir.path().join("manifest.json"), text).unwrap();
        }
        let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["serve", "--port", "0"])
            .arg(dir.path())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.contains(message),
            "{stderr}"
        );
    }
}

/// A server of the built-in model, which `model` names, and what it says on standard error first.
fn start_builtin(model: &[&str]) -> (Server, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, address) = listening(
        Command::new(env!("CARGO_BIN_EXE_sterna"))
            .arg("serve")
            .args(model)
            .args(["--port", "0"])
            .env("STERNA_HOME", dir.path().join("home"))
            .stderr(Stdio::piped()),
    );
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let last = match cfg!(has_pages) && !model.contains(&"--no-pages") {
        true => "chat in a browser: ",
        false => "API: ",
    };
    let mut told: Vec<String> = Vec::new();
    while !told.last().is_some_and(|line| line.starts_with(last)) {
        let mut line = String::new();
        let n_read = stderr.read_line(&mut line).unwrap();
        assert!(n_read > 0, "{told:?}");
        told.push(line.trim_end().to_owned());
    }
    let server = Server {
        child,
        address,
        _dir: dir,
    };
    (server, told)
}

#[test]
fn the_built_in_model_is_served_as_a_package() {
    let (server, told) = start_builtin(&["builtin"]);
    let is_told = |text: &str| told.iter().any(|line| line.contains(text));
    assert!(is_told("into the store, as builtin-rdrr"), "{told:?}");
    assert!(is_told("serving tiny-tales: "), "{told:?}");
    let manifest = get(&server, "/manifest.json", &[]);
    let manifest: Value = serde_json::from_slice(&manifest.body).unwrap();
    assert_eq!(manifest["modelId"], "tiny-tales");
}

#[cfg(not(has_pages))]
#[test]
fn without_pages_a_model_has_to_be_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", "--port", "0"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        stderr.starts_with("error: expected a model, found none; ")
            && stderr.contains("built outside of its repository"),
        "{stderr}"
    );
    let server = start();
    for path in ["/chat", "/chat/", "/tldr/", "/models.json"] {
        assert_eq!(get(&server, path, &[]).status, 404, "{path}");
    }
}

#[cfg(has_pages)]
#[test]
fn the_chat_is_at_the_root_of_every_server() {
    let html = [("Accept", "text/html")];
    for flags in [&[][..], &["builtin", "--no-files"]] {
        let (server, told) = start_builtin(flags);
        let chat = format!("chat in a browser: http://{}/", server.address);
        assert_eq!(told.last(), Some(&chat), "{flags:?}");
        let root = get(&server, "/", &html);
        assert_eq!(
            (root.status, root.header("location")),
            (307, Some("/chat/")),
            "{flags:?}"
        );
        assert_eq!(get(&server, "/chat/", &[]).status, 200, "{flags:?}");
        assert_eq!(get(&server, "/v1/models", &[]).status, 200, "{flags:?}");
    }
    let (server, _) = start_builtin(&["builtin", "--no-files", "--no-pages"]);
    assert_eq!(get(&server, "/", &html).status, 404);
    assert_eq!(get(&server, "/chat/", &[]).status, 404);
    assert_eq!(get(&server, "/v1/models", &[]).status, 200);
}

#[cfg(has_npm_package)]
#[test]
fn pages_run_the_built_in_model() {
    let (server, told) = start_builtin(&[]);
    let chat = format!("chat in a browser: http://{}/", server.address);
    assert_eq!(told.last(), Some(&chat));
    let mut client = Client::connect(&server);
    let redirect = client.request("GET", "/chat", &[]);
    assert_eq!(
        (redirect.status, redirect.header("location")),
        (307, Some("/chat/"))
    );
    for (path, content_type) in [
        ("/chat/", "text/html; charset=utf-8"),
        ("/chat/app.js", "text/javascript"),
        ("/chat/icon.svg", "image/svg+xml"),
        ("/chat/manifest.webmanifest", "application/manifest+json"),
        ("/chat/style.css", "text/css"),
        ("/chat/sw.js", "text/javascript"),
        ("/chat/sterna.js", "text/javascript"),
        ("/chat/sterna/index.js", "text/javascript"),
        ("/chat/sterna/worker/main.js", "text/javascript"),
        ("/chat/sterna/wasm/sterna_web_bg.wasm", "application/wasm"),
        ("/tldr/", "text/html; charset=utf-8"),
        ("/tldr/sterna-tldr.js", "text/javascript"),
        ("/tldr/sterna.js", "text/javascript"),
        ("/tldr/sterna/worker/main.js", "text/javascript"),
        ("/tldr/sterna/wasm/sterna_web_bg.wasm", "application/wasm"),
    ] {
        let answer = client.request("GET", path, &[]);
        assert_eq!(answer.status, 200, "{path}");
        assert!(!answer.body.is_empty(), "{path}");
        for (name, value) in [
            ("content-type", content_type),
            ("cache-control", "no-cache"),
            ("access-control-allow-origin", "*"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-embedder-policy", "require-corp"),
            ("cross-origin-resource-policy", "cross-origin"),
            ("x-content-type-options", "nosniff"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{path}: {name}");
        }
    }
    // What is in the folders and isn't for browsers.
    for path in [
        "/chat/README.md",
        "/chat/tsconfig.json",
        "/chat/test/run.mjs",
        "/chat/sterna/index.d.ts",
        "/sterna/index.js",
    ] {
        assert_eq!(client.request("GET", path, &[]).status, 404, "{path}");
    }
    let offers = client.request("GET", "/models.json", &[]);
    let offers: Value = serde_json::from_slice(&offers.body).unwrap();
    let index = client.request("GET", "/index.json", &[]);
    let index: Value = serde_json::from_slice(&index.body).unwrap();
    let files = index["files"].as_array().unwrap().iter();
    let size: u64 = files.map(|file| file["size"].as_u64().unwrap()).sum();
    let offer = json!({"name": "tiny-tales", "address": "models/tiny-tales/", "size": size});
    assert_eq!(offers, json!([offer]));
    let there = client.request("GET", "/models/tiny-tales/manifest.json", &[]);
    assert_eq!(there.status, 200);
    let root = client.request("GET", "/manifest.json", &[]);
    assert!(there.body == root.body);
}

#[cfg(has_npm_package)]
#[test]
fn pages_are_served_with_any_model() {
    let server = start();
    assert_eq!(get(&server, "/chat/", &[]).status, 200);
    let offers = get(&server, "/models.json", &[]);
    let offers: Value = serde_json::from_slice(&offers.body).unwrap();
    assert_eq!(offers[0]["name"], "tiny <model>");
    let address = offers[0]["address"].as_str().unwrap();
    assert_eq!(address, "models/tiny--model-/");
    let shard = format!("/{address}shard_00000.bin");
    let part = get(&server, &shard, &[("Range", "bytes=5-9")]);
    assert!(part.status == 206 && part.body == shard_bytes()[5..10]);
}

#[test]
fn another_model_is_converted_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("tale");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../sterna/models/tiny-tales");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
        }
    }
    let served = || -> (Value, String) {
        let (mut child, address) = listening(
            Command::new(env!("CARGO_BIN_EXE_sterna"))
                .args(["serve", "--port", "0"])
                .arg(&model)
                .env("STERNA_HOME", dir.path().join("home"))
                .stderr(Stdio::piped()),
        );
        let mut stream = TcpStream::connect(&address).unwrap();
        let request =
            format!("GET /manifest.json HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let body = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        child.kill().unwrap();
        let mut told = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut told)
            .unwrap();
        child.wait().unwrap();
        (serde_json::from_slice(&answer[body..]).unwrap(), told)
    };
    // Where the package of another model of this name is being made.
    let other = dir.path().join("home/converting/tale");
    fs::create_dir_all(&other).unwrap();
    // Two at once convert it once.
    let mut both = thread::scope(|scope| {
        let both = [scope.spawn(served), scope.spawn(served)];
        both.map(|served| served.join().unwrap())
    });
    both.sort_by_key(|(_, told)| told.contains("into the store"));
    let [(manifest, waited), (same, told)] = both;
    assert!(!waited.contains("into the store"), "{waited}");
    assert!(told.contains("into the store, as "), "{told}");
    assert_eq!(manifest, same);
    assert!(other.exists());
    let (again, told) = served();
    assert!(!told.contains("into the store"), "{told}");
    assert_eq!(manifest, again);
    // A damaged package is made again.
    let blobs = dir.path().join("home/store/blobs/sha256");
    for folder in fs::read_dir(&blobs).unwrap() {
        fs::remove_dir_all(folder.unwrap().path()).unwrap();
    }
    let (again, told) = served();
    assert!(told.contains("into the store, as "), "{told}");
    assert_eq!(manifest, again);
    // Changed files are another model.
    let config = model.join("generation_config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text}\n")).unwrap();
    let (_, told) = served();
    assert!(told.contains("into the store, as "), "{told}");
}

#[test]
fn the_name_of_a_converted_model_is_settled_first() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let gguf = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/stories260K/stories260K-q8_0.gguf"
    );
    let model = |folder: &str| {
        let folder = dir.path().join(folder);
        fs::create_dir(&folder).unwrap();
        let model = folder.join("model (1).gguf");
        fs::copy(gguf, &model).unwrap();
        model
    };
    let serve = |model: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.args(["serve", "--port", "0"]).arg(model);
        command.env("STERNA_HOME", &home).stderr(Stdio::piped());
        command
    };
    let (mut child, _) = listening(&mut serve(&model("a")));
    child.kill().unwrap();
    let told = child.wait_with_output().unwrap().stderr;
    let told = String::from_utf8(told).unwrap();
    assert!(told.contains("into the store, as model--1--rdrr"), "{told}");
    // The name is taken, which needs no conversion to be found out.
    let other = model("b");
    let refused = serve(&other).output().unwrap();
    let told = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success());
    let message = format!(
        "model--1--rdrr: the store has another model of that name, converted from {}; `sterna serve {} \
         --name model--1--rdrr-2` serves this one",
        fs::canonicalize(dir.path().join("a/model (1).gguf"))
            .unwrap()
            .display(),
        other.display()
    );
    assert!(told.contains(&message), "{told}");
    let left = fs::read_dir(home.join("converting")).unwrap();
    let left: Vec<_> = left
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    assert_eq!(left, [] as [std::path::PathBuf; 0]);
    // Under a name of its own, also when it is served again without.
    for flags in [&["--name", "other"][..], &[]] {
        let (mut child, _) = listening(serve(&other).args(flags));
        child.kill().unwrap();
        let told = child.wait_with_output().unwrap().stderr;
        let told = String::from_utf8(told).unwrap();
        let is_converted = told.contains("into the store, as other\n");
        assert_eq!(is_converted, !flags.is_empty(), "{told}");
    }
    let listed = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .arg("list")
        .env("STERNA_HOME", &home)
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.contains("converted from /") && !listed.contains('#'),
        "{listed}"
    );
    for (model, name, message) in [
        (
            other.as_path(),
            "model--1--rdrr",
            "another model of that name",
        ),
        (&other, "a b", "expected a name such as a-b"),
        (Path::new("other"), "x", "found the package other"),
    ] {
        let refused = serve(model).args(["--name", name]).output().unwrap();
        let told = String::from_utf8(refused.stderr).unwrap();
        assert!(
            !refused.status.success() && told.contains(message),
            "{told}"
        );
    }
}

#[test]
fn a_port_that_is_taken_is_found_out_before_anything_is_converted() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", "builtin", "--port", &port])
        .env("STERNA_HOME", dir.path())
        .output()
        .unwrap();
    let told = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        told.starts_with(&format!("error: cannot listen on 127.0.0.1, port {port}")),
        "{told}"
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
