//! Running the program on the test data.

// Each test file uses its own part of this module.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use sterna_format::safetensors::SafeTensors;

/// A path in the test data of the workspace.
pub(crate) fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(path)
}

/// The JSON file at `path` in the test data.
pub(crate) fn testdata_json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(testdata(path)).unwrap()).unwrap()
}

/// What the model makers' implementation says about the built-in model.
pub(crate) fn tales() -> Vec<Value> {
    serde_json::from_str(include_str!(
        "../../../sterna/models/tiny-tales/expected.json"
    ))
    .unwrap()
}

/// Numbers in a JSON array.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// Ids as the command line takes them.
pub(crate) fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Runs `sterna` with `args`, given `stdin`.
pub(crate) fn sterna_with_input(args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that fails early doesn't read all of it.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

/// Runs `sterna` with `args`.
pub(crate) fn sterna(args: &[&str]) -> Output {
    sterna_with_input(args, "")
}

/// What `sterna` prints with `args`; it must succeed.
pub(crate) fn stdout(args: &[&str]) -> String {
    success(args, sterna(args))
}

/// What was printed, by a run that must have succeeded.
pub(crate) fn success(args: &[&str], output: Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "sterna {args:?} failed: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// The JSON that `sterna` prints with `args`.
pub(crate) fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(args)).unwrap()
}

/// The message with which `sterna` refuses `args`.
pub(crate) fn refusal(args: &[&str]) -> String {
    let output = sterna(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "sterna {args:?} should fail: {stderr}"
    );
    assert_eq!(output.stdout, b"", "sterna {args:?}");
    stderr
}

/// What `sterna` does with `args`, which ask for a GPU; `None` where there is none, and it says so.
#[track_caller]
pub(crate) fn on_gpu(args: &[&str]) -> Option<Output> {
    let output = sterna(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if cfg!(feature = "gpu") && sterna_testing::gpu::is_there() {
        assert!(output.status.success(), "sterna {args:?} failed: {stderr}");
        return Some(output);
    }
    assert!(!output.status.success(), "sterna {args:?} should fail");
    assert!(stderr.contains("--backend gpu: no GPU"), "{stderr}");
    None
}

/// The logits that `sterna logits model` writes for `ids`, one row a token.
pub(crate) fn logits(model: &str, ids: &[u32], more: &[&str]) -> Vec<Vec<f32>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits.safetensors");
    let ids = join(ids);
    let mut args = vec!["logits", model, "--ids", &ids, "-o", path.to_str().unwrap()];
    args.extend(more);
    assert_eq!(stdout(&args), "");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    let [tensor] = file.tensors() else {
        panic!("one tensor, found {:?}", file.tensors())
    };
    assert_eq!(tensor.name, "logits");
    let data = bytes[tensor.offset as usize..].as_chunks::<4>().0;
    let values: Vec<f32> = data.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let [n_rows, n_vocab] = tensor.shape[..] else {
        panic!("two dimensions")
    };
    assert_eq!(values.len(), n_rows * n_vocab);
    values.chunks_exact(n_vocab).map(<[f32]>::to_vec).collect()
}

/// The id of the largest logit.
pub(crate) fn best(row: &[f32]) -> u32 {
    let best = row
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .unwrap();
    best.0 as u32
}

/// The models of the test data: files and folders.
pub(crate) fn models() -> Vec<PathBuf> {
    let mut models = Vec::new();
    for set in ["reference-gguf", "reference-logits", "reference-variants"] {
        for dir in std::fs::read_dir(testdata(set)).unwrap() {
            let dir = dir.unwrap().path();
            if dir.is_dir() {
                models.push(dir);
            }
        }
    }
    for file in ["f16.gguf", "tq1_0.gguf", "tq2_0.gguf"] {
        models.push(testdata(&format!("bitllama-3M/bitllama-3M-{file}")));
    }
    models.push(testdata("bitllama-3M/hf-packed"));
    models.retain(|model| model.exists());
    models.sort();
    models
}

/// The bytes of a model's logits for a few ids.
pub(crate) fn logit_bytes(model: &str, dir: &Path) -> Vec<u8> {
    let out = dir.join("logits.safetensors");
    let ids = "5,42,79,116,3,40,77,114";
    stdout(&[
        "logits",
        model,
        "--ids",
        ids,
        "-o",
        out.to_str().unwrap(),
        "--threads",
        "1",
    ]);
    std::fs::read(out).unwrap()
}

/// Starts a server by `command`; its process, and its host and port, behind `https://` if it encrypts.
pub(crate) fn listening(command: &mut Command) -> (Child, String) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let address = line.trim().strip_suffix('/').and_then(|address| {
        let is_encrypted = address.starts_with("https://").then_some(address);
        address.strip_prefix("http://").or(is_encrypted)
    });
    let address = address.expect("the first line is the address").to_owned();
    (child, address)
}

/// A server that runs until this is dropped.
pub(crate) struct Serving {
    pub(crate) child: Child,
    /// As [`listening`] has it.
    pub(crate) address: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Serving {
    /// Starts `command`, whose errors nobody reads.
    pub(crate) fn start(command: &mut Command) -> Serving {
        let (child, address) = listening(command.stderr(Stdio::null()));
        Serving { child, address }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        let patience = Duration::from_secs(120);
        stream.set_read_timeout(Some(patience)).unwrap();
        stream
    }

    /// The response to a request, whole. `headers` end with their lines.
    pub(crate) fn ask(&self, head: &str, headers: &str, body: &str) -> String {
        let mut stream = self.connect();
        send(&mut stream, head, headers, body);
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    /// Tells it to stop.
    #[cfg(unix)]
    pub(crate) fn terminate(&self) {
        let id = self.child.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &id]).status().unwrap();
        assert!(killed.success());
    }

    /// Told to stop, it ends well.
    #[cfg(unix)]
    pub(crate) fn stop(mut self) {
        self.terminate();
        assert!(self.child.wait().unwrap().success());
    }
}

/// Sends a request for one response.
pub(crate) fn send(stream: &mut TcpStream, head: &str, headers: &str, body: &str) {
    let length = body.len();
    let text = format!(
        "{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(text.as_bytes()).unwrap();
}

/// `path`, which has to be text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Whether `command` succeeds, and what it prints.
pub(crate) fn outcome(command: &mut Command) -> (bool, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.success(), text(stdout), text(stderr))
}
