//! Packages from peers: real processes on this machine, without a server of others.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::common::{outcome, testdata, text};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use sterna_delivery::peers::{ShareOptions, SharedPackage, Sharing};

/// Runs `sterna` with its own folders in `home`: whether it succeeded, and what it printed.
fn sterna(home: &Path, args: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let command = command.args(args).env("STERNA_HOME", home);
    outcome(command.env("NO_PROXY", "127.0.0.1"))
}

/// What a command that succeeds prints, and what it says of how it went.
fn done(home: &Path, args: &[&str]) -> (String, String) {
    let (ok, out, error) = sterna(home, args);
    assert!(ok, "{args:?}: {error}");
    (out, error)
}

fn refusal(home: &Path, args: &[&str]) -> String {
    let (ok, out, error) = sterna(home, args);
    assert!(!ok, "{args:?} should fail: {out}");
    error
}

/// A package of 3 million parameters in many shards.
fn package(home: &Path) -> PathBuf {
    let (folder, model) = (
        home.join("package"),
        testdata("bitllama-3M/bitllama-3M-f16.gguf"),
    );
    let to = text(&folder);
    done(
        home,
        &["convert", text(&model), to, "--shard-size", "192KiB"],
    );
    assert!(shards(&folder).len() >= 6, "few shards");
    folder
}

fn shards(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_shard = |path: &PathBuf| path.extension().is_some_and(|end| end == "bin");
    paths.filter(is_shard).collect()
}

fn copy(from: &Path, to: PathBuf) -> PathBuf {
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    to
}

/// The digest of a package's manifest, and the address of the package by it.
fn address_of(folder: &Path) -> String {
    let manifest = fs::read(folder.join("manifest.json")).unwrap();
    let digest = Sha256::digest(manifest);
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("p2p://{digits}")
}

/// The package called `name` in the store of `home` is the one in `folder`, and all its bytes are there.
fn expect_whole(home: &Path, name: &str, folder: &Path) {
    done(home, &["verify", name]);
    let here = done(home, &["inspect", name, "--json"]).0;
    let there = done(home, &["inspect", text(folder), "--json"]).0;
    let (here, there): (Value, Value) = (
        serde_json::from_str(&here).unwrap(),
        serde_json::from_str(&there).unwrap(),
    );
    assert_eq!(here["modelHash"], there["modelHash"]);
}

/// A peer: a server that shares a package until this is dropped.
struct Peer {
    child: Child,
    ticket: String,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(home: &Path, folder: &Path, more: &[&str]) -> Peer {
        let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["serve", text(folder), "--share", "--no-api", "--port", "0"])
            .args(more)
            .env("STERNA_HOME", home)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut peer = Peer {
            child,
            ticket: String::new(),
        };
        let lines = BufReader::new(peer.child.stderr.take().unwrap()).lines();
        let (sender, said) = mpsc::channel();
        // To the end, so that it never waits for its reader.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut all = Vec::new();
        while peer.ticket.is_empty() {
            let line = said.recv_timeout(Duration::from_secs(120));
            let line = line.unwrap_or_else(|_| panic!("no ticket: {all:?}"));
            if let Some((_, ticket)) = line.split_once("shared with peers: ") {
                peer.ticket = ticket.to_owned();
            }
            all.push(line);
        }
        peer
    }

    /// One that only this machine reaches.
    fn here(home: &Path, folder: &Path, more: &[&str]) -> Peer {
        let here = ["--share-address", "127.0.0.1:0"];
        Peer::start(home, folder, &[&here, more].concat())
    }

    fn name(&self) -> String {
        name_of(&self.ticket)
    }
}

/// The name of a ticket's peer where sources are named.
fn name_of(ticket: &str) -> String {
    let (_, peer) = ticket.split_once('@').unwrap();
    format!("peer {}", peer.split('?').next().unwrap())
}

/// The variable that names the folder which [`a_peer_that_counts`] shares.
const COUNTED: &str = "STERNA_TEST_COUNTED";

/// A peer in a process of its own, which says how much it has sent.
struct CountedPeer {
    child: Child,
    ticket: String,
    lines: Lines<BufReader<ChildStdout>>,
}

impl CountedPeer {
    fn start(folder: &Path) -> CountedPeer {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "peers::a_peer_that_counts",
                "--ignored",
                "--nocapture",
            ])
            .env(COUNTED, folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ticket = lines.find_map(|line| {
            let line = line.unwrap();
            Some(line.split_once("ticket ")?.1.to_owned())
        });
        let ticket = ticket.expect("it says its ticket");
        CountedPeer {
            child,
            ticket,
            lines,
        }
    }

    /// Bytes that it has sent, as it says next.
    fn sent(&mut self) -> u64 {
        let line = self.lines.next().expect("it goes on").unwrap();
        line.parse().unwrap()
    }
}

impl Drop for CountedPeer {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "a process of another test"]
fn a_peer_that_counts() {
    let folder = PathBuf::from(env::var_os(COUNTED).expect("the other test sets it"));
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(&path).unwrap().into())
    });
    let package = SharedPackage::new(files.collect()).unwrap();
    let options = ShareOptions {
        address: Some("127.0.0.1:0".parse().unwrap()),
        bytes_per_second: Some(64 << 10),
        ..ShareOptions::default()
    };
    let sharing = Sharing::start(vec![package], &options).unwrap();
    println!("ticket {}", sharing.tickets()[0]);
    // Until it is killed, or nobody listens.
    let mut out = std::io::stdout();
    while writeln!(out, "{}", sharing.sent()).is_ok() {
        thread::sleep(Duration::from_millis(20));
    }
}

/// The address of a web server for the files in a folder, which sends 8 KiB of a shard each `pause`.
fn mirror(folder: &Path, pause: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/m", listener.local_addr().unwrap());
    let folder = folder.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let folder = folder.clone();
            thread::spawn(move || answer(stream.unwrap(), &folder, pause));
        }
    });
    url
}

fn answer(mut stream: TcpStream, folder: &Path, pause: Duration) {
    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else {
        return;
    };
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let range = head.iter().find_map(|line| {
        let line = line.to_lowercase();
        let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some(first.parse::<usize>().ok()?..last.parse::<usize>().ok()? + 1)
    });
    let name = first.split(' ').nth(1).unwrap().trim_start_matches("/m/");
    let (status, bytes, range) = match (fs::read(folder.join(name)), range) {
        (Ok(bytes), None) => (200, bytes, String::new()),
        (Ok(bytes), Some(range)) => {
            let (last, size) = (range.end - 1, bytes.len());
            let line = format!("Content-Range: bytes {}-{last}/{size}\r\n", range.start);
            (206, bytes[range].to_vec(), line)
        }
        (Err(_), _) => (404, Vec::new(), String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status} X\r\nConnection: close\r\n{range}Content-Length: {}\r\n\r\n",
        bytes.len()
    );
    // Whoever asked may have gone.
    let mut is_there = stream.write_all(head.as_bytes()).is_ok();
    for piece in bytes.chunks(8 << 10) {
        is_there = is_there && stream.write_all(piece).is_ok();
        if name.ends_with(".bin") {
            thread::sleep(pause);
        }
    }
}

fn received(report: &Value, source: &str) -> Option<u64> {
    let sources = report["received_by"].as_array().unwrap();
    let found = sources.iter().find(|pair| pair[0] == source)?;
    found[1].as_u64()
}

#[test]
fn a_package_arrives_whole_from_a_liar_one_that_is_killed_an_honest_one_and_a_slow_mirror() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = package(dir);
    let wrong = copy(&folder, dir.join("wrong"));
    for shard in shards(&wrong) {
        let mut bytes = fs::read(&shard).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&shard, bytes).unwrap();
    }
    let honest = Peer::here(&dir.join("honest"), &folder, &["--share-rate", "128KiB"]);
    let liar = Peer::here(&dir.join("liar"), &wrong, &[]);
    let mut killed = CountedPeer::start(&folder);
    let url = mirror(&folder, Duration::from_millis(100));
    let home = dir.join("home");
    let pulling = thread::spawn({
        let (url, home) = (url.clone(), home.clone());
        let tickets = [&honest.ticket, &liar.ticket, &killed.ticket].map(String::clone);
        move || {
            let [honest, liar, killed] = &tickets;
            let mirrors = ["--mirror", honest, "--mirror", liar, "--mirror", killed];
            let args = [&["pull", &url, "tiny", "--json"][..], &mirrors].concat();
            sterna(&home, &args)
        }
    });
    // It has sent all small files, if it was asked for them, and the beginning of a shard, which takes it seconds.
    let sizes = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap());
    let small = sizes.filter(|entry| entry.path().extension() != Some("bin".as_ref()));
    let small: u64 = small.map(|entry| entry.metadata().unwrap().len()).sum();
    while killed.sent() < small + (32 << 10) {}
    killed.child.kill().unwrap();
    let (ok, out, error) = pulling.join().unwrap();
    assert!(ok, "{error}");
    expect_whole(&home, "tiny", &folder);

    let report: Value = serde_json::from_str(&out).unwrap();
    let dropped = report["dropped"].as_array().unwrap();
    let why = dropped.iter().find(|pair| pair[0] == liar.name().as_str());
    let why = why.unwrap_or_else(|| panic!("{out}"))[1].as_str().unwrap();
    assert!(why.contains("expected") && why.contains("found"), "{why}");
    assert!(
        error.contains(&format!("{}: given up: ", liar.name())),
        "{error}"
    );
    assert!(!dropped.iter().any(|pair| pair[0] == honest.name().as_str()));

    // Each has sent something.
    let by = |source: &str| received(&report, source).unwrap();
    let killed = name_of(&killed.ticket);
    let sources = [&url, &honest.name(), &liar.name(), &killed];
    assert!(sources.iter().all(|source| by(source) > 0), "{out}");
    let all = report["received_by"].as_array().unwrap();
    let sum: u64 = all.iter().map(|pair| pair[1].as_u64().unwrap()).sum();
    assert_eq!(report["received"].as_u64(), Some(sum));

    // The liar is remembered: another pull doesn't ask it, and without another source it fails.
    let remembered = fs::read_to_string(home.join("peers.json")).unwrap();
    assert!(
        remembered.contains(&liar.name()["peer ".len()..]),
        "{remembered}"
    );
    assert!(!remembered.contains(&honest.name()["peer ".len()..]));
    let told = format!("{}: not asked: it lied before: ", liar.name());
    let args = ["pull", &honest.ticket, "again", "--mirror", &liar.ticket];
    let (out, error) = done(&home, &[&args[..], &["--json"]].concat());
    assert!(error.contains(&told), "{error}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(received(&report, &liar.name()), None);
    assert!(refusal(&home, &["pull", &liar.ticket, "third"]).contains(&told));
}

#[test]
fn only_the_package_that_is_shared_is_given_and_by_the_same_key_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = package(dir);
    let (sharing, home) = (dir.join("peer"), dir.join("home"));
    let peer = Peer::here(&sharing, &folder, &[]);
    let (out, _) = done(&home, &["pull", &peer.ticket]);
    assert!(out.starts_with("p2p-"), "{out}");
    let listed = done(&home, &["list", "--json"]).0;
    assert!(
        listed.contains(&address_of(&folder)) && !listed.contains('@'),
        "{listed}"
    );

    // Another package, which this machine has as well.
    let other = dir.join("other");
    done(&sharing, &["convert", "builtin", text(&other)]);
    let (_, peer_part) = peer.ticket.split_once('@').unwrap();
    let unknown = format!("{}@{peer_part}", address_of(&other));
    let error = refusal(&home, &["pull", &unknown, "other"]);
    let told = format!(
        "{}: expected a package, found no manifest.json",
        peer.name()
    );
    assert!(error.contains(&told), "{error}");

    // A mirror with another package than the address says is not believed.
    let error = refusal(
        &home,
        &["pull", &unknown, "other", "--mirror", text(&folder)],
    );
    assert!(error.contains("manifest.json: expected sha256"), "{error}");

    let before = peer.name();
    drop(peer);
    let peer = Peer::here(&sharing, &folder, &[]);
    assert_eq!(peer.name(), before);
}

#[test]
fn a_peer_gives_no_more_than_its_quota() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = package(dir);
    let quota = ["--share-quota", "200KiB"];
    let peer = Peer::here(&dir.join("peer"), &folder, &quota);
    let error = refusal(&dir.join("a"), &["pull", &peer.ticket, "tiny"]);
    assert!(
        error.contains("the peer gives no more to this machine"),
        "{error}"
    );
    drop(peer);

    let peer = Peer::here(&dir.join("other"), &folder, &quota);
    let home = dir.join("b");
    let args = ["pull", text(&folder), "tiny", "--mirror", &peer.ticket];
    let (out, _) = done(&home, &[&args[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&out).unwrap();
    let n = received(&report, &peer.name()).unwrap();
    assert!(n <= 200 << 10, "{out}");
    expect_whole(&home, "tiny", &folder);
    let home = dir.join("c");
    let (out, _) = done(&home, &args);
    assert!(out.contains(&format!("from {}", peer.name())), "{out}");
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let digest = "0".repeat(64);
    for (args, expected) in [
        (
            vec!["pull", "p2p://abc"],
            "expected the SHA-256 of a manifest, in 64 hexadecimal digits".to_owned(),
        ),
        (
            vec!["pull", "https://example.org/x", "--mirror", "p2p://abc@x"],
            "expected the SHA-256 of a manifest".to_owned(),
        ),
        (
            vec!["pull", &format!("p2p://{digest}@me"), "x"],
            "expected the key of a peer behind the @".to_owned(),
        ),
        (
            vec!["pull", &format!("p2p://{digest}"), "--relay", "ftp://x"],
            "relay \"ftp://x\": expected an address such as".to_owned(),
        ),
        (
            vec!["serve", "builtin", "--share-rate", "1MiB"],
            "--share".to_owned(),
        ),
        (
            vec!["serve", "builtin", "--share", "--no-files"],
            "cannot be used with".to_owned(),
        ),
    ] {
        let error = refusal(dir, &args);
        assert!(error.contains(&expected), "{args:?}: {error}");
    }
    fs::write(dir.join("peers.json"), "[").unwrap();
    let error = refusal(dir, &["pull", &format!("p2p://{digest}"), "x"]);
    assert!(
        error.contains("peers.json: expected a list of peers that lied"),
        "{error}"
    );
    fs::write(dir.join("peer.key"), "secret").unwrap();
    let share = [
        "serve",
        "builtin",
        "--share",
        "--share-address",
        "127.0.0.1:0",
    ];
    let error = refusal(dir, &[&share[..], &["--port", "0"]].concat());
    assert!(
        error.contains("peer.key: expected a key of 64 hexadecimal digits"),
        "{error}"
    );
}

/// Whether what this machine sends to a group of addresses arrives at this machine.
fn multicast_works() -> bool {
    let probe = || {
        let group = Ipv4Addr::new(224, 0, 0, 251);
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.join_multicast_v4(&group, &Ipv4Addr::UNSPECIFIED)?;
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        let port = socket.local_addr()?.port();
        socket.send_to(b"probe", (group, port))?;
        socket.recv_from(&mut [0; 16])
    };
    probe().is_ok()
}

#[test]
fn a_package_is_found_on_the_local_network_by_the_hash_of_its_manifest() {
    if !multicast_works() {
        println!("skipped: multicast doesn't reach this machine itself");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let folder = package(dir);
    let other = dir.join("other");
    done(dir, &["convert", "builtin", text(&other)]);
    let address = address_of(&folder);
    let peer = Peer::start(&dir.join("peer"), &folder, &[]);
    let unrelated = Peer::start(&dir.join("unrelated"), &other, &[]);
    let home = dir.join("home");
    let (out, _) = done(&home, &["pull", &address, "tiny", "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert!(received(&report, &peer.name()).unwrap() > 0, "{out}");
    assert_eq!(received(&report, &unrelated.name()), None);
    expect_whole(&home, "tiny", &folder);

    // Beside another source, only if it is asked for.
    let url = mirror(&folder, Duration::from_millis(20));
    let home = dir.join("beside");
    let (out, _) = done(&home, &["pull", &url, "alone", "--json"]);
    assert!(!out.contains(&peer.name()), "{out}");
    let home = dir.join("with");
    let (out, _) = done(&home, &["pull", &url, "tiny", "--peers", "--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert!(received(&report, &peer.name()).unwrap() > 0, "{out}");
    assert!(received(&report, &url).is_some(), "{out}");
}
