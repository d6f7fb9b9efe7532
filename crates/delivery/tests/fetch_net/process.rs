//! Fetches whose process is killed at any moment, or may write no more.

use std::{
    env, fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use crate::server::{Asked, Files, Reply, Server, files};
use sterna_delivery::{
    fetch::{Blob, Cancel, FetchError, FolderSink, Limits, fetch},
    hash::{Algorithm, BlockDigests, Expected, digest_of},
    source::{HttpOptions, HttpSource, Url},
};

const URL: &str = "STERNA_TEST_FETCH_URL";
const FOLDER: &str = "STERNA_TEST_FETCH_FOLDER";
const BLOCKS: &str = "STERNA_TEST_FETCH_BLOCKS";

fn some_files() -> Files {
    files(&[
        ("a.bin", 3_000_000),
        ("b.bin", 700_000),
        ("c.bin", 5_000_000),
        ("d.json", 100),
    ])
}

/// Bytes in a block; more than a file that is fetched may lack in its log.
const BLOCK: u64 = 1 << 20;

fn pull(url: &str, folder: &Path, blocks: bool) -> Result<u64, FetchError> {
    let blobs = (some_files().iter())
        .map(|(name, bytes)| {
            let expected = Expected::Digest(digest_of(Algorithm::Sha256, bytes));
            let blob = Blob::new(name, bytes.len() as u64, expected).unwrap();
            if !blocks {
                return blob;
            }
            let blocks = BlockDigests::of(Algorithm::Blake3, BLOCK, bytes).unwrap();
            blob.with_blocks(blocks).unwrap()
        })
        .collect();
    let options = HttpOptions {
        proxy_from_env: false,
        ..HttpOptions::default()
    };
    let source = HttpSource::new(Url::parse(url).unwrap(), options);
    let limits = Limits {
        segment_bytes: BLOCK,
        ..Limits::default()
    };
    let sink = FolderSink::new(folder);
    let report = fetch(
        blobs,
        &[&source],
        &sink,
        limits,
        &Cancel::new(),
        &mut |_| {},
    )?;
    Ok(report.progress.received_bytes)
}

/// Not a test, but the client that tests start and kill; as a test it does nothing.
#[test]
fn client() {
    let (Ok(url), Ok(folder)) = (env::var(URL), env::var(FOLDER)) else {
        return;
    };
    if let Err(error) = pull(&url, Path::new(&folder), env::var(BLOCKS).is_ok()) {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        panic!("client failed: {error}: {}", cause.unwrap_or_default());
    }
}

fn start(mut command: Command, server: &Server, folder: &Path, blocks: bool) -> Child {
    command.env(URL, server.url()).env(FOLDER, folder);
    if blocks {
        command.env(BLOCKS, "1");
    }
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn client_command() -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "process::client", "--nocapture"]);
    command
}

/// Nothing is visible under a final name but the right bytes.
fn check(folder: &Path, all: bool) -> usize {
    let mut n = 0;
    for (name, bytes) in some_files().iter() {
        match fs::read(folder.join(name)) {
            Ok(found) => {
                assert!(found == *bytes, "{name} is visible and wrong");
                n += 1;
            }
            Err(error) => assert!(!all, "{name}: {error}"),
        }
    }
    n
}

#[test]
fn a_killed_fetch_goes_on_where_it_was() {
    let files = some_files();
    let total: u64 = files.values().map(|bytes| bytes.len() as u64).sum();
    for blocks in [false, true] {
        let server = Server::start(&files, |_, mut reply| {
            reply.pause = Duration::from_millis(20);
            reply
        });
        let dir = tempfile::tempdir().unwrap();
        let kills = 12;
        for i in 0..kills {
            let mut child = start(client_command(), &server, dir.path(), blocks);
            thread::sleep(Duration::from_millis(10 + i * 37 % 120));
            child.kill().unwrap();
            child.wait().unwrap();
            check(dir.path(), false);
        }
        pull(&server.url(), dir.path(), blocks).unwrap();
        check(dir.path(), true);
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, files.len(), "something is left over");
        // A kill loses what no log line told of, and what was under way in the four requests.
        let again = server.sent.load(Ordering::Relaxed) - total;
        assert!(
            again <= kills * 4 * BLOCK,
            "{again} bytes twice in {kills} kills"
        );
    }
}

/// Bytes of the files that are in `folder`, under any name: in pages that are not all zeros, as pages that
/// were never written are.
fn written(folder: &Path) -> u64 {
    let mut n = 0;
    for name in some_files().keys() {
        let paths = [name.clone(), format!("{name}.part")].map(|name| folder.join(name));
        for bytes in paths.iter().filter_map(|path| fs::read(path).ok()) {
            let pages = bytes.chunks(4096);
            let written = pages.filter(|page| page.iter().any(|byte| *byte != 0));
            n += written.map(|page| page.len() as u64).sum::<u64>();
        }
    }
    n
}

#[test]
fn a_kill_costs_at_most_a_block() {
    let files = some_files();
    let total: u64 = files.values().map(|bytes| bytes.len() as u64).sum();
    let slowly = |_: &Asked, mut reply: Reply| {
        reply.piece_pause = Duration::from_millis(2);
        reply
    };
    let server = Server::start(&files, slowly);
    for i in 0..8 {
        let dir = tempfile::tempdir().unwrap();
        let mut child = start(client_command(), &server, dir.path(), true);
        thread::sleep(Duration::from_millis(30 + i * 17));
        child.kill().unwrap();
        child.wait().unwrap();
        let written = written(dir.path());
        let received = pull(&server.url(), dir.path(), true).unwrap();
        check(dir.path(), true);
        let again = (written + received).saturating_sub(total);
        assert!(
            again <= BLOCK,
            "{again} bytes again, of {written} that were written"
        );
    }
}

#[test]
fn a_full_disk_ends_a_fetch_and_loses_nothing() {
    let files = some_files();
    let server = Server::honest(&files);
    let dir = tempfile::tempdir().unwrap();
    // Files may have 4 MB: `c.bin` doesn't fit, the others do. With the signal ignored the write fails.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 7812; exec \"$0\" \"$@\""]);
    limited
        .arg(env::current_exe().unwrap())
        .args(["--exact", "process::client", "--nocapture"]);
    let output = start(limited, &server, dir.path(), false)
        .wait_with_output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("c.bin.part: cannot write: File too large"),
        "{text}"
    );
    check(dir.path(), false);
    assert!(!dir.path().join("c.bin").exists());
    let received = pull(&server.url(), dir.path(), false).unwrap();
    check(dir.path(), true);
    assert!(
        received < 5_000_000,
        "{received} bytes, though most were there"
    );
}
