//! Small and sparse files that claim much: an error within a second of processor time and 64 MiB
//! of memory.
//!
//! Alone in its file, because the system tells time and memory of all programs that a test ran.
#![cfg(target_os = "linux")]

mod common;

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use common::{sterna, testdata};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// Most memory that a refusal may take, in KiB.
const MAX_KIB: i64 = 64 << 10;
/// Most processor time that it may take. Time of the clock tells of the machine: what else runs,
/// and whether the program has been read from the disk.
const MAX_TIME: Duration = Duration::from_secs(1);

/// A GGUF header that claims `n_tensors` and `n_keys`, followed by `rest`.
fn gguf(n_tensors: u64, n_keys: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(n_tensors.to_le_bytes());
    bytes.extend(n_keys.to_le_bytes());
    bytes.extend(rest);
    bytes
}

/// A metadata key `k` that is an array of `len` elements of type `kind`.
fn array(kind: u32, len: u64) -> Vec<u8> {
    let mut bytes = 1u64.to_le_bytes().to_vec();
    bytes.push(b'k');
    bytes.extend(9u32.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes
}

/// Writes a file that begins with `start` and is `len` bytes long, nearly all of them a hole.
fn sparse(path: &Path, start: &[u8], len: u64) {
    fs::write(path, start).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(len.max(start.len() as u64)).unwrap();
}

#[test]
fn claims_are_refused_soon_and_cheaply() {
    const TEN_GB: u64 = 10_000_000_000;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let safetensors = |claim: u64| [&claim.to_le_bytes()[..], b"{"].concat();
    for (name, start, len) in [
        ("tensors.gguf", gguf(u64::MAX, 0, &[]), 0),
        ("keys.gguf", gguf(0, u64::MAX, &[]), 0),
        ("sparse-tensors.gguf", gguf(1 << 32, 0, &[]), TEN_GB),
        ("sparse-keys.gguf", gguf(0, 1 << 32, &[]), TEN_GB),
        ("strings.gguf", gguf(0, 1, &array(8, 1 << 30)), TEN_GB),
        ("bytes.gguf", gguf(0, 1, &array(0, 9_000_000_000)), TEN_GB),
        ("header.safetensors", safetensors(9_000_000_000), TEN_GB),
        ("longer.safetensors", safetensors(u64::MAX), TEN_GB),
        ("blank.safetensors", safetensors(99_000_000), TEN_GB),
    ] {
        sparse(&path(name), &start, len);
        check(&path(name), name);
    }
    // The JSON files of good weights.
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(testdata("stories260K/hf").join(name), folder.join(name)).unwrap();
    }
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
    ] {
        let file = folder.join(name);
        let good = fs::read(&file).ok();
        sparse(&file, b"{\"x\": ", TEN_GB);
        check(&folder, name);
        fs::write(&file, good.unwrap_or(b"{}".to_vec())).unwrap();
    }
}

/// Runs the model at `path`, which must be refused for what the file called `name` says.
fn check(path: &Path, name: &str) {
    let before = processor_time(&children());
    let output = sterna(&["run", path.to_str().unwrap(), "-p", "x"]);
    let usage = children();
    let time = processor_time(&usage) - before;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{name}: {stderr}");
    assert!(stderr.contains(name), "{name}: {stderr}");
    assert!(time < MAX_TIME, "{name}: refused after {time:?}: {stderr}");
    let peak = usage.max_rss();
    assert!(peak < MAX_KIB, "{name}: {peak} KiB: {stderr}");
}

/// What the programs that ran and ended have used, all together.
fn children() -> Usage {
    getrusage(UsageWho::RUSAGE_CHILDREN).unwrap()
}

fn processor_time(usage: &Usage) -> Duration {
    let duration = |time: TimeVal| {
        Duration::from_secs(time.tv_sec() as u64) + Duration::from_micros(time.tv_usec() as u64)
    };
    duration(usage.user_time()) + duration(usage.system_time())
}
