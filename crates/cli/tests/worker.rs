//! `sterna worker`: what it says, in both forms of its protocol, and how it ends.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{self, best, ids, join, json, logits, stdout, success, testdata};

/// A session as it is written down, in `tests/golden/worker`.
///
/// Its lines begin with `$` for the arguments, `<` for what is said, `>` and `!` for what comes back on
/// standard output and error, and `=` for the exit code. `\xff` and the like stand for bytes, `\` at the
/// end for a line that doesn't end, and `*9 ` before a line for nine of them.
#[derive(Debug, Default, PartialEq)]
struct Transcript {
    args: Vec<String>,
    input: Vec<String>,
    output: Vec<String>,
    errors: Vec<String>,
    code: String,
}

impl Transcript {
    fn parse(text: &str) -> Transcript {
        let mut transcript = Transcript::default();
        for line in text.lines() {
            let (kind, rest) = line.split_at_checked(2).unwrap_or((line, ""));
            let rest = rest.to_owned();
            match kind.trim_end() {
                "$" => transcript.args = rest.split(' ').map(str::to_owned).collect(),
                "<" => transcript.input.push(rest),
                ">" => transcript.output.push(rest),
                "!" => transcript.errors.push(rest),
                "=" => transcript.code = rest,
                "#" | "" => {}
                _ => panic!("`{line}`"),
            }
        }
        transcript
    }

    /// The bytes that are said.
    fn input(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for line in &self.input {
            let (n, line) = match line.strip_prefix('*').and_then(|line| line.split_once(' ')) {
                Some((n, line)) => (n.parse().unwrap(), line),
                None => (1, line.as_str()),
            };
            let (line, end) = match line.strip_suffix('\\') {
                Some(line) => (line, ""),
                None => (line, "\n"),
            };
            let line = [unescaped(line), end.as_bytes().to_vec()].concat();
            bytes.extend(line.repeat(n));
        }
        bytes
    }

    /// The same with what really comes back.
    fn replayed(&self) -> Transcript {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        let output = talk(&args, &self.input());
        let lines = |bytes: &[u8]| -> Vec<String> {
            String::from_utf8_lossy(bytes)
                .lines()
                .map(str::to_owned)
                .collect()
        };
        Transcript {
            args: self.args.clone(),
            input: self.input.clone(),
            output: lines(&output.stdout),
            errors: lines(&output.stderr),
            code: output.status.code().unwrap().to_string(),
        }
    }
}

/// `\xff` and the like as bytes.
fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend(&part.as_bytes()[2..]);
    }
    bytes
}

/// A worker in the folder of the test data, started with `args`.
fn worker(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command
        .arg("worker")
        .args(args)
        .current_dir(testdata(""))
        .env("STERNA_SEED", "7")
        // A store that is empty, whatever the one of this machine holds.
        .env(
            "STERNA_HOME",
            concat!(env!("CARGO_TARGET_TMPDIR"), "/no-store"),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a worker with `args` says to `input`.
fn talk(args: &[&str], input: &[u8]) -> Output {
    let mut child = worker(args).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // A worker that refuses what it is told doesn't read all of it.
    let writing = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap();
    output
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/worker")
}

#[test]
fn transcripts_are_true() {
    let mut n = 0;
    for entry in fs::read_dir(golden()).unwrap() {
        let path = entry.unwrap().path();
        let transcript = Transcript::parse(&fs::read_to_string(&path).unwrap());
        let replayed = transcript.replayed();
        assert_eq!(replayed, transcript, "{}", path.display());
        n += 1;
    }
    assert!(n > 30, "{n}");
}

#[test]
fn the_session_in_the_documentation_is_true() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/worker.md");
    let page = fs::read_to_string(path).unwrap();
    let sessions: Vec<&str> = page
        .split("```transcript\n")
        .skip(1)
        .map(|rest| rest.split_once("```").unwrap().0)
        .collect();
    assert_eq!(sessions.len(), 2);
    for session in sessions {
        let transcript = Transcript::parse(session);
        assert_eq!(transcript.replayed(), transcript);
    }
}

#[test]
fn the_session_of_the_protocols_document_is_true() {
    let session = fs::read_to_string(testdata("source-examples/engine/session.txt")).unwrap();
    let transcript = Transcript::parse(&session);
    assert_eq!(transcript.replayed(), transcript);
}

/// The arguments after `--config` for `model`.
fn config(model: &str) -> Vec<String> {
    let line = stdout(&["worker", "--print-config", model]);
    line.split_whitespace().map(str::to_owned).collect()
}

/// The ids that end replies of `model`.
fn eos(model: &str) -> Vec<u32> {
    let ids = &config(model)[18..];
    ids.iter().map(|id| id.parse().unwrap()).collect()
}

/// The arguments that start a worker of version 1 for `model`.
fn positional(model: &str) -> Vec<String> {
    let mut args = vec![model.to_owned(), "--config".to_owned()];
    args.extend(config(model));
    args
}

/// A request of version 1.
fn request(reset: bool, temperature: &str, max_tokens: usize, ids: &[u32]) -> String {
    let ids: String = ids.iter().map(|id| format!("{id}\n")).collect();
    let n = ids.lines().count();
    format!(
        "{n}\n{}\n{temperature}\n40\n0.95\n1.1\n64\n{max_tokens}\n{ids}",
        u8::from(reset)
    )
}

/// A greedy request of version 1.
fn greedy(reset: bool, max_tokens: usize, ids: &[u32]) -> String {
    request(reset, "0", max_tokens, ids).replace("\n1.1\n", "\n1\n")
}

/// A worker that is spoken with.
struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// Ids that end a reply.
    eos: Vec<u32>,
}

impl Worker {
    /// Starts a worker whose replies end with one of `eos`.
    fn start(mut command: Command, eos: Vec<u32>) -> Worker {
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Worker {
            child,
            stdin,
            stdout,
            eos,
        }
    }

    /// A worker of version 1 for `model`.
    fn positional(model: &str) -> Worker {
        let args = positional(model);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Worker::start(worker(&args), eos(model))
    }

    fn say(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> u32 {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().parse().unwrap()
    }

    /// The answer to `request`, which ends after `max_tokens` or with an EOS id; and the position.
    fn reply(&mut self, request: &str, max_tokens: usize) -> (Vec<u32>, usize) {
        self.say(request);
        let mut ids = Vec::new();
        while ids.len() < max_tokens && !ids.last().is_some_and(|id| self.eos.contains(id)) {
            let id = self.line();
            ids.push(id);
        }
        (ids, self.line() as usize)
    }

    /// Waits for the end; the exit code.
    fn end(mut self) -> Option<i32> {
        drop(self.stdin.take());
        ended(&mut self.child)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // One that ended by itself can't be killed, and needn't.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The exit code of `child`, which should end soon.
fn ended(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "still running");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Models in every form, with the number of their tokens.
fn models() -> Vec<String> {
    let path = |name: &str| testdata(name).to_str().unwrap().to_owned();
    vec![
        "builtin".to_owned(),
        path("reference-logits/bitnet-packed"),
        path("reference-logits/llama"),
        path("reference-logits/llama-bitlinear-packed"),
        path("reference-gguf/bitnet-b1.58-i2-s/model.gguf"),
        path("reference-gguf/llama/model.gguf"),
        path("bitllama-3M/bitllama-3M-tq2_0.gguf"),
    ]
}

/// The beginning of a story, for the built-in model: it goes on for long.
const STORY: [u32; 8] = [693, 443, 260, 394, 14, 468, 309, 260];

#[test]
fn greedy_ids_are_those_of_the_logits() {
    for model in models() {
        let prompt = match model.as_str() {
            "builtin" => STORY,
            _ => [3, 17, 40, 5, 9, 100, 101, 102],
        };
        let mut worker = Worker::positional(&model);
        let (ids, position) = worker.reply(&greedy(true, 12, &prompt), 12);
        assert_eq!(worker.end(), Some(0), "{model}");
        let sequence = [&prompt[..], &ids].concat();
        let rows = logits(&model, &sequence, &[]);
        let expected: Vec<u32> = rows[prompt.len() - 1..]
            .iter()
            .map(|row| best(row))
            .collect();
        assert_eq!(ids, expected[..ids.len()], "{model}");
        // The last one chosen was not computed.
        assert_eq!(position, sequence.len() - 1, "{model}");
    }
}

#[test]
fn greedy_ids_are_those_of_run() {
    let story = "Once upon a time";
    for model in ["builtin".to_owned(), models().pop().unwrap()] {
        let run = json(&[
            "run",
            &model,
            "--raw",
            "-p",
            story,
            "--temperature",
            "0",
            "--max-tokens",
            "30",
            "--json",
        ]);
        let tokens = json(&["tokenize", &model, "--text", story, "--json"]);
        let prompt = ids(&tokens["ids"]);
        let mut worker = Worker::positional(&model);
        let (mut found, _) = worker.reply(&greedy(true, 30, &prompt), 30);
        found.retain(|id| !worker.eos.contains(id));
        assert_eq!(found, ids(&run["ids"]), "{model}");
    }
}

#[test]
fn what_is_cached_changes_no_reply() {
    let prompt = STORY;
    for temperature in ["0", "1.2"] {
        let fresh = |ids: &[u32]| {
            let mut worker = Worker::positional("builtin");
            let reply = worker.reply(&request(true, temperature, 10, ids), 10);
            assert_eq!(worker.end(), Some(0));
            reply
        };
        let (first, position) = fresh(&prompt);
        let mut worker = Worker::positional("builtin");
        let again = worker.reply(&request(true, temperature, 10, &prompt), 10);
        assert_eq!(again, (first.clone(), position));
        // Everything that was said, and more: the last id is not in the cache yet.
        let more = [*first.last().unwrap(), 7, 8];
        let continued = worker.reply(&request(false, temperature, 10, &more), 10);
        let whole = [&prompt[..], &first, &[7, 8]].concat();
        assert_eq!(continued, fresh(&whole), "{temperature}");
        // From the beginning, though it is cached.
        let again = worker.reply(&request(true, temperature, 10, &prompt), 10);
        assert_eq!(again, (first, position));
    }
}

/// The block that begins the keyed form for `model`.
fn init(model: &str) -> String {
    let names = [
        "arch_type",
        "activation",
        "hidden_dim",
        "intermediate_dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "vocab_size",
        "head_dim",
        "max_position_embeddings",
        "norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "has_qkv_bias",
        "has_attn_sub_norm",
        "has_ffn_sub_norm",
    ];
    let config = config(model);
    let pairs = names.iter().zip(&config);
    let pairs: String = pairs
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect();
    let eos = config[18..].join(",");
    let eos = if eos.is_empty() { "2".to_owned() } else { eos };
    format!("18\n{pairs}eos_tokens={eos}\nquantization=auto\n")
}

/// A greedy request of the keyed form.
fn keyed(kv_position: usize, ids: &[u32], max_tokens: usize) -> String {
    format!(
        "6\nkv_position={kv_position}\ntokens={}\ntemperature=0.0\nrepetition_penalty=1.0\n\
         max_tokens={max_tokens}\nlater=1\n",
        join(ids)
    )
}

#[test]
fn the_keyed_form_rolls_back_and_reuses() {
    let model = "builtin";
    let mut worker = Worker::start(worker(&[model]), eos(model));
    worker.say(&init(model));
    let prompt = STORY;
    let fresh = worker.reply(&keyed(0, &prompt, 6), usize::MAX);
    // Six ids, and one that ends them.
    assert_eq!((fresh.0.len(), fresh.1), (7, prompt.len() + 5));
    // Everything is cached already, or a part.
    for kept in [prompt.len(), 5, 1, 0] {
        let reply = worker.reply(&keyed(kept, &prompt[kept..], 6), usize::MAX);
        assert_eq!(reply, fresh, "{kept}");
    }
    // Another end, and back.
    let (_, position) = worker.reply(&keyed(3, &[334, 14], 4), usize::MAX);
    assert_eq!(position, 3 + 2 + 3);
    let reply = worker.reply(&keyed(3, &prompt[3..], 6), usize::MAX);
    assert_eq!(reply, fresh);
    assert_eq!(worker.end(), Some(0));
}

#[test]
fn the_end_of_the_context_ends_a_reply() {
    let model = testdata("reference-logits/llama")
        .to_str()
        .unwrap()
        .to_owned();
    let mut args = positional(&model);
    // A context of 20 tokens, and an EOS id that is never chosen.
    args[2 + 9] = "20".to_owned();
    args.truncate(2 + 17);
    args.extend(["1".to_owned(), "4000000000".to_owned()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut worker = Worker::start(worker(&args), vec![4_000_000_000]);
    let (ids, position) = worker.reply(&greedy(true, 0, &[1; 15]), usize::MAX);
    // The last one fits no more, but is chosen; then comes the one that says so.
    assert_eq!((ids.len(), position), (6 + 1, 20));
    let (ids, position) = worker.reply(&greedy(true, 3, &[1; 15]), 3);
    assert_eq!((ids.len(), position), (3, 17));
    assert_eq!(worker.end(), Some(0));
}

#[test]
fn seeds_repeat_and_differ() {
    let args = positional("builtin");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let sample = |seed: Option<&str>| {
        let mut command = worker(&args);
        match seed {
            Some(seed) => command.env("STERNA_SEED", seed),
            None => command.env_remove("STERNA_SEED"),
        };
        let mut worker = Worker::start(command, eos("builtin"));
        let request = request(true, "2", 20, &STORY);
        let first = worker.reply(&request, 20).0;
        let second = worker.reply(&request, 20).0;
        (first, second)
    };
    let (first, second) = sample(Some("1"));
    assert_eq!(first, second);
    assert_eq!(sample(Some("1")).0, first);
    assert_ne!(sample(Some("2")).0, first);
    let (third, fourth) = sample(None);
    assert_ne!(third, fourth);

    let mut command = worker(&args);
    let output = command.env("STERNA_SEED", "x").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: STERNA_SEED: expected a number from 0 to 18446744073709551615, found `x`: invalid digit \
         found in string\n"
    );
}

#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let mut worker = Worker::positional("builtin");
    worker.say(&request(true, "2", 0, &STORY).repeat(50));
    worker.line();
    let Worker { child, stdout, .. } = &mut worker;
    let mut stderr = child.stderr.take().unwrap();
    drop(std::mem::replace(stdout, {
        let mut other = Command::new(env!("CARGO_BIN_EXE_sterna"));
        let other = other.arg("--version").stdout(Stdio::piped()).spawn();
        BufReader::new(other.unwrap().stdout.unwrap())
    }));
    assert_eq!(ended(child), Some(0));
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
}

/// Whether a process of this id is there and not a zombie.
#[cfg(target_os = "linux")]
fn is_running(id: u32) -> bool {
    fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| {
        let state = stat
            .rsplit_once(") ")
            .map(|(_, rest)| rest.starts_with('Z'));
        state == Some(false)
    })
}

/// A parent that is killed while this process holds the other ends of the worker's pipes: only that
/// the parent is another shows it.
#[test]
#[cfg(target_os = "linux")]
fn a_parent_that_is_killed_ends_it() {
    // One that waits for a request in the end, and one that has much to do still.
    let waits = greedy(true, 1, &[3]);
    let works = request(true, "2", 0, &STORY).repeat(500);
    for requests in [waits, works] {
        let program = env!("CARGO_BIN_EXE_sterna");
        let config = config("builtin").join(" ");
        let script = format!(
            "exec 3<&0; {program} worker builtin --config {config} <&3 & echo $! >&2; wait"
        );
        let mut shell = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stderr = BufReader::new(shell.stderr.take().unwrap());
        stderr.read_line(&mut line).unwrap();
        let id = line.trim().parse().unwrap();
        let mut stdin = shell.stdin.take().unwrap();
        stdin.write_all(requests.as_bytes()).unwrap();
        let mut stdout = BufReader::new(shell.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        // Reading on, so that it never waits to be read.
        let reading = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        assert!(is_running(id));
        shell.kill().unwrap();
        shell.wait().unwrap();
        let start = Instant::now();
        while is_running(id) {
            assert!(start.elapsed() < Duration::from_secs(60), "still running");
            std::thread::sleep(Duration::from_millis(20));
        }
        reading.join().unwrap().unwrap();
    }
}

/// `scripts/worker-cycles.py` does it a thousand times.
#[test]
#[cfg(target_os = "linux")]
fn workers_that_are_killed_leave_nothing_behind() {
    let args = positional("builtin");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let scratch = tempfile::tempdir().unwrap();
    for _ in 0..100 {
        let mut command = worker(&args);
        command.env("TMPDIR", scratch.path());
        let mut worker = Worker::start(command, Vec::new());
        worker.say(&request(true, "1", 0, &STORY));
        worker.line();
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
        assert!(!is_running(worker.child.id()));
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn a_model_without_configuration_takes_that_of_the_driver() {
    let model = testdata("reference-logits/llama");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(
        model.join("model.safetensors"),
        folder.path().join("model.safetensors"),
    )
    .unwrap();
    let mut args = positional(model.to_str().unwrap());
    let mut worker = Worker::positional(model.to_str().unwrap());
    let expected = worker.reply(&greedy(true, 8, &[1, 2, 3]), 8);
    args[0] = folder.path().to_str().unwrap().to_owned();
    // The cache of so long a context would fill any memory, but grows only as it is used.
    args[2 + 9] = "16777216".to_owned();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut worker = Worker::start(self::worker(&args), worker.eos.clone());
    assert_eq!(worker.reply(&greedy(true, 8, &[1, 2, 3]), 8), expected);
    #[cfg(target_os = "linux")]
    {
        let status = fs::read_to_string(format!("/proc/{}/status", worker.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.unwrap().trim().strip_suffix(" kB").unwrap();
        assert!(kib.parse::<u64>().unwrap() < 200_000, "{kib}");
    }
    let refused = common::refusal(&["worker", "--print-config", folder.path().to_str().unwrap()]);
    assert!(refused.contains("expected config.json"), "{refused}");
}

#[test]
fn configurations_are_printed_in_one_line() {
    for model in models() {
        let args = ["worker", "--print-config", &model];
        let line = success(&args, common::sterna(&args));
        assert_eq!(line.lines().count(), 1);
        assert!(line.split(' ').count() >= 18, "{model}: {line}");
    }
}

/// The built-in model's checkpoint, a norm of layer 3 with its signs changed, in `folder`.
fn revision(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    fs::create_dir_all(folder).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
    }
    let path = folder.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).unwrap();
    let norm = &header["model.layers.3.post_attention_layernorm.weight"];
    let n_bytes = if norm["dtype"] == "F32" { 4 } else { 2 };
    let offset = |i: usize| 8 + header_len + norm["data_offsets"][i].as_u64().unwrap() as usize;
    let (start, end) = (offset(0), offset(1));
    for element in file[start..end].chunks_mut(n_bytes) {
        element[n_bytes - 1] ^= 0x80;
    }
    fs::write(path, file).unwrap();
}

/// The package of `model` in `folder`.
fn package(model: &Path, folder: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .arg("convert")
        .args([model, folder])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    folder.to_str().unwrap().to_owned()
}

#[test]
fn groups_are_replaced_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let changed = folder.path().join("checkpoint");
    revision(&changed);
    let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    let old = package(&original, &folder.path().join("old"));
    let new = package(&changed, &folder.path().join("new"));

    let init = "17\narch_type=1\nactivation=0\nhidden_dim=256\nintermediate_dim=768\nnum_layers=8\n\
        num_heads=4\nnum_kv_heads=2\nvocab_size=1728\nhead_dim=64\nmax_position_embeddings=512\n\
        norm_eps=1e-05\nrope_theta=10000.0\ntie_word_embeddings=1\nhas_qkv_bias=0\n\
        has_attn_sub_norm=1\nhas_ffn_sub_norm=1\neos_tokens=1,2\n";
    let request = "4\ntokens=693,443,260,394\ntemperature=0\nrepetition_penalty=1\nmax_tokens=12\n";
    let lines = |model: &str, blocks: &[&str]| -> Vec<String> {
        let input = [init, &blocks.concat(), "0\n"].concat();
        let output = talk(&[model], input.as_bytes());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    };
    let (before, after) = (lines(&old, &[request]), lines(&new, &[request]));
    assert_ne!(before, after);

    let swap = format!("1\nswap={new}\n");
    let replies = lines(&old, &[request, &swap, request]);
    let (first, rest) = replies.split_at(before.len());
    assert_eq!(first, before);
    assert_eq!(rest[0], "1");
    let words: Vec<&str> = rest[1].split(' ').collect();
    assert_eq!(words[..3], ["layer.3", "1.0.0", "1.0.0"]);
    assert!(
        words[3].len() == 64 && words[4].len() == 64 && words[3] != words[4],
        "{words:?}"
    );
    assert_eq!(rest[2..], after);

    // What fails changes nothing; a group by name, there and back.
    let fails = format!("2\nswap={new}\ngroups=layer.8\n");
    let same = format!("1\nswap={old}\n");
    let named = format!("2\nswap={new}\ngroups=layer.3,head\n");
    let replies = lines(
        &old,
        &[&fails, &same, "1\nswap=/none\n", request, &named, request],
    );
    for (reply, says) in
        replies
            .iter()
            .zip(["`layer.8`: expected one of", "found the same", "/none"])
    {
        assert!(
            reply.starts_with("error: ") && reply.contains(says),
            "{reply}"
        );
    }
    assert_eq!(replies[3..3 + before.len()], before);
    let rest = &replies[3 + before.len()..];
    assert_eq!(rest[0], "2");
    assert_eq!(rest[3..], after);
}

#[test]
fn the_version_of_the_protocol_is_told_and_checked() {
    let output = worker(&["--protocol-version"]).output().unwrap();
    assert_eq!(output.stdout, b"1\n");
    let output = talk(&["builtin"], b"1\nprotocol_version=2\n");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: first block: `protocol_version`: expected 1, found `2`\n"
    );
}
