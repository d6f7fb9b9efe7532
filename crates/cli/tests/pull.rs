//! `sterna pull` from servers that lie or are counted, and what other verbs do with names in the store.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::{outcome, testdata, text};
use serde_json::{Value, json};

const SAMPLE: &str = "rdrr-samples/v1-gemma3-q4k";

/// Runs `sterna` with its own folders in `home`: whether it succeeded, and what it printed.
pub(crate) fn sterna(home: &Path, args: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    outcome(command.args(args).env("STERNA_HOME", home))
}

pub(crate) fn json_of(home: &Path, args: &[&str]) -> Value {
    let (ok, out, error) = sterna(home, args);
    assert!(ok, "{args:?}: {error}");
    serde_json::from_str(&out).unwrap()
}

fn refusal(home: &Path, args: &[&str]) -> String {
    let (ok, out, error) = sterna(home, args);
    assert!(!ok, "{args:?} should fail: {out}");
    error
}

/// A copy of the folder `name` of the test data.
fn copy_of(name: &str, to: PathBuf) -> PathBuf {
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(testdata(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

fn manifest_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap()
}

/// A web server for the files in a folder, which counts what it is asked for.
pub(crate) struct Server {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Server {
    pub(crate) fn start(folder: &Path) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/m", listener.local_addr().unwrap());
        let asked: Arc<Mutex<Vec<(String, usize)>>> = Arc::default();
        let (folder, log) = (folder.to_owned(), Arc::clone(&asked));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (folder, log) = (folder.clone(), Arc::clone(&log));
                thread::spawn(move || answer(&stream.unwrap(), &folder, &log));
            }
        });
        Server { url, asked }
    }

    /// How often the file called `name` was asked for.
    fn count(&self, name: &str) -> usize {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|(asked, _)| asked == name).count()
    }

    /// Bytes of the files whose names begin like this that were sent.
    pub(crate) fn sent(&self, names: &str) -> usize {
        let asked = self.asked.lock().unwrap();
        let asked = asked.iter().filter(|(asked, _)| asked.starts_with(names));
        asked.map(|(_, n_bytes)| n_bytes).sum()
    }
}

fn answer(mut stream: &TcpStream, folder: &Path, log: &Mutex<Vec<(String, usize)>>) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else {
        return;
    };
    let range = lines
        .by_ref()
        .take_while(|line| !line.is_empty())
        .find_map(|line| {
            let line = line.to_lowercase();
            let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
    let name = first.split(' ').nth(1).unwrap().trim_start_matches("/m/");
    let asked = |n_bytes| log.lock().unwrap().push((name.to_owned(), n_bytes));
    let head = "Connection: close\r\nContent-Length:";
    let Ok(bytes) = fs::read(folder.join(name)) else {
        asked(0);
        let _ = write!(stream, "HTTP/1.1 404 None\r\n{head} 0\r\n\r\n");
        return;
    };
    let (status, part, range) = match range {
        None => (200, &bytes[..], String::new()),
        Some((first, last)) => {
            let range = format!("Content-Range: bytes {first}-{last}/{}\r\n", bytes.len());
            (206, &bytes[first..=last], range)
        }
    };
    asked(part.len());
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\n{range}{head} {}\r\n\r\n",
        part.len()
    );
    let _ = stream.write_all(part);
}

#[test]
fn a_tensor_map_without_a_hash_comes_once_and_must_not_contradict_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    let server = Server::start(&folder);
    let (ok, _, error) = sterna(&home, &["pull", &server.url, "tiny"]);
    assert!(ok, "{error}");
    assert!(error.contains("no hashes for tensors.json"), "{error}");
    for name in ["manifest.json", "manifest.json.minisig", "tensors.json"] {
        assert_eq!(server.count(name), 1, "{name}");
    }
    // Inline too: the same is believed, something else isn't.
    let mut manifest = manifest_of(&folder);
    let tensors: Value =
        serde_json::from_slice(&fs::read(folder.join("tensors.json")).unwrap()).unwrap();
    manifest["tensors"] = tensors.get("tensors").unwrap_or(&tensors).clone();
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    let (ok, _, error) = sterna(&home, &["pull", &server.url, "both"]);
    assert!(ok, "{error}");
    let name = manifest["tensors"].as_object().unwrap().keys().next();
    let name = name.unwrap().clone();
    let shape = manifest["tensors"][&name]["shape"].as_array_mut().unwrap();
    shape.reverse();
    shape.insert(0, json!(1));
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    let error = refusal(&home, &["pull", &server.url, "contradiction"]);
    assert!(
        error.contains(&name) && error.contains("external map"),
        "{error}"
    );
}

#[test]
fn a_source_that_lies_first_is_named_and_the_next_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let good = Server::start(&copy_of(SAMPLE, dir.path().join("good")));
    let garbage = dir.path().join("garbage");
    fs::create_dir(&garbage).unwrap();
    fs::write(garbage.join("manifest.json"), "not a manifest").unwrap();
    let garbage = Server::start(&garbage);
    let other = copy_of(SAMPLE, dir.path().join("other"));
    let mut manifest = manifest_of(&other);
    manifest["modelId"] = json!("another");
    fs::write(other.join("manifest.json"), manifest.to_string()).unwrap();
    let other = Server::start(&other);
    let args = [
        "pull",
        &garbage.url,
        "tiny",
        "--mirror",
        &good.url,
        "--mirror",
        &other.url,
        "--json",
    ];
    let pulled = json_of(&home, &args);
    let dropped: Vec<_> = pulled["dropped"].as_array().unwrap().iter().collect();
    assert_eq!(dropped.len(), 2, "{dropped:?}");
    assert_eq!(dropped[0][0], garbage.url);
    assert_eq!(dropped[1][0], other.url);
    let why = dropped[1][1].as_str().unwrap();
    assert!(
        why.contains("is not that of") && why.contains(&good.url),
        "{why}"
    );
    assert_eq!(
        other.count("shard_00000.bin") + garbage.count("shard_00000.bin"),
        0
    );
    let (_, _, error) = sterna(&home, &args);
    assert!(
        error.contains(&format!("warning: {}: not used", garbage.url)),
        "{error}"
    );
    // No source has one.
    let error = refusal(
        &home,
        &["pull", &garbage.url, "none", "--mirror", &garbage.url],
    );
    assert!(error.contains("no source has a package"), "{error}");
}

#[test]
fn damage_in_the_store_is_noticed_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    let pulled = json_of(&home, &["pull", text(&folder), "tiny", "--json"]);
    assert!(pulled["received"].as_u64().unwrap() > 0);
    let shard = &manifest_of(&folder)["shards"][3];
    let (hash, size) = (shard["hash"].as_str().unwrap(), &shard["size"]);
    let blob = home.join("store/blobs/sha256").join(&hash[..2]).join(hash);
    let bytes = fs::read(&blob).unwrap();
    let mut wrong = bytes.clone();
    wrong[1000] ^= 1;
    // By the name that it has.
    fs::write(&blob, &wrong).unwrap();
    let pulled = json_of(&home, &["pull", "tiny", "--json"]);
    let received = pulled["received"].as_u64().unwrap();
    // All of the shard but zeros between tensors.
    let size = size.as_u64().unwrap();
    assert!(
        (size / 2..=size).contains(&received),
        "{received} of {size}"
    );
    assert!(fs::read(&blob).unwrap() == bytes);
    let logits = ["logits", "tiny", "--ids", "1", "-o", "/dev/null"];
    fs::write(&blob, &wrong).unwrap();
    let error = refusal(&home, &logits);
    assert!(
        error.contains("`sterna pull tiny`") && error.contains("shard_00003.bin"),
        "{error}"
    );
    // A change that hides is found by hashing everything.
    json_of(&home, &["pull", "tiny", "--json"]);
    let date = fs::metadata(&blob).unwrap().modified().unwrap();
    fs::write(&blob, &wrong).unwrap();
    let file = fs::File::options().write(true).open(&blob).unwrap();
    file.set_modified(date).unwrap();
    let error = refusal(&home, &["verify", "tiny"]);
    assert!(error.contains("`sterna pull tiny`"), "{error}");
    json_of(&home, &["pull", "tiny", "--json"]);
    assert!(sterna(&home, &["verify", "tiny"]).0);
}

#[test]
fn bytes_that_are_used_are_those_that_were_verified() {
    let dir = tempfile::tempdir().unwrap();
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    let out = dir.path().join("out");
    let home = dir.path();
    for how in ["map", "read"] {
        let args = [
            "logits",
            text(&folder),
            "--ids",
            "1,2",
            "--weights",
            how,
            "-o",
            text(&out),
        ];
        let shard = folder.join("shard_00007.bin");
        let good = fs::read(&shard).unwrap();
        assert!(sterna(home, &args).0);
        let mut wrong = good.clone();
        *wrong.last_mut().unwrap() ^= 1;
        fs::write(&shard, wrong).unwrap();
        let error = refusal(home, &args);
        assert!(
            error.contains("shard_00007.bin: expected sha256"),
            "{error}"
        );
        fs::write(&shard, good).unwrap();
    }
}

/// A package of many shards opens, and an update of it is fetched, where few files may be open.
#[cfg(unix)]
#[test]
fn a_package_of_many_shards_needs_few_open_files() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let package = dir.path().join("package");
    let model = testdata("reference-logits/llama");
    let convert = [
        "convert",
        text(&model),
        text(&package),
        "--shard-size",
        "4K",
    ];
    let (ok, _, error) = sterna(&home, &convert);
    assert!(ok, "{error}");
    let n_shards = manifest_of(&package)["shards"].as_array().unwrap().len();
    assert!(n_shards > 100, "{n_shards} shards");
    let limited = |args: &[&str]| {
        let output = Command::new("sh")
            .args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_sterna"))
            .args(args)
            .env("STERNA_HOME", &home)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {error}");
    };
    let out = dir.path().join("out");
    for how in ["map", "read"] {
        limited(&[
            "logits",
            text(&package),
            "--ids",
            "1",
            "--weights",
            how,
            "-o",
            text(&out),
        ]);
    }
    limited(&["pull", text(&package), "tiny"]);
    limited(&["logits", "tiny", "--ids", "1", "-o", text(&out)]);
}

#[test]
fn names_in_the_store_stand_for_packages() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let error = refusal(&home, &["run", "tinny", "-p", "x"]);
    assert!(
        error.contains("tinny: no such file or folder") && error.contains("is empty"),
        "{error}"
    );
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    json_of(&home, &["pull", text(&folder), "tiny", "--json"]);
    json_of(&home, &["pull", text(&folder), "large", "--json"]);
    for verb in ["run", "diff", "sign"] {
        let args: &[&str] = match verb {
            "run" => &["run", "tinny", "-p", "x"],
            "diff" => &["diff", "tiny", "tinny"],
            _ => &["sign", "tinny", "--key", "none"],
        };
        let error = refusal(&home, args);
        assert!(error.contains("which has tiny, large"), "{verb}: {error}");
    }
    let server = Server::start(&folder);
    for b in ["large", &server.url, text(&folder)] {
        let report = json_of(&home, &["diff", "tiny", b, "--json"]);
        assert_eq!(report["fetch_bytes"], 0);
        assert_eq!(report["shards"]["same"], 10);
    }
    // Signed in the store, and said so.
    let key = dir.path().join("k");
    let list = json_of(&home, &["list", "--json"]);
    assert_eq!(list[0]["signer"], Value::Null);
    json_of(
        &home,
        &[
            "sign",
            "--generate",
            "--no-password",
            "--key",
            text(&key),
            "--json",
        ],
    );
    let public = format!("{}.pub", text(&key));
    assert!(sterna(&home, &["trust", "me", &public]).0);
    json_of(&home, &["sign", "tiny", "--key", text(&key), "--json"]);
    let list = json_of(&home, &["list", "--json"]);
    let signers: Vec<_> = (list.as_array().unwrap().iter())
        .map(|model| model["signer"].as_str())
        .collect();
    assert_eq!(signers, [None, Some("me")]);
    let (_, out, _) = sterna(&home, &["list"]);
    assert!(out.contains("signed by me"), "{out}");
    let (ok, _, error) = sterna(&home, &["inspect", "tiny"]);
    assert!(ok, "{error}");
    for args in [["trust", "", &public], ["trust", "you", ""]] {
        refusal(&home, &args);
    }
}

#[test]
fn adapters_are_had_by_name_and_are_no_models() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let peft = testdata("adapters/llama/all");
    let base = testdata("reference-logits/llama");
    let error = refusal(&home, &["run", text(&peft), "-p", "x"]);
    assert!(
        error.contains("found a LoRA adapter") && error.contains("--lora"),
        "{error}"
    );
    let package = dir.path().join("package");
    assert!(sterna(&home, &["convert", text(&peft), text(&package)]).0);
    json_of(&home, &["pull", text(&package), "adapter", "--json"]);
    let error = refusal(&home, &["logits", "adapter", "--ids", "1", "-o", "x"]);
    assert!(error.contains("--lora adapter"), "{error}");
    let server = Server::start(&package);
    let mut outs = Vec::new();
    for lora in [text(&package), "adapter=1", &server.url] {
        let out = dir.path().join("out");
        let args = [
            "logits",
            text(&base),
            "--ids",
            "1,2",
            "--lora",
            lora,
            "-o",
            text(&out),
        ];
        let (ok, _, error) = sterna(&home, &args);
        assert!(ok, "{error}");
        outs.push(fs::read(out).unwrap());
    }
    assert!(outs[0] == outs[1] && outs[0] == outs[2]);
}

#[test]
fn a_server_of_pages_has_no_package_and_one_that_is_silent_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let pages = dir.path().join("pages");
    fs::create_dir(&pages).unwrap();
    for name in ["manifest.json", "manifest.json.minisig"] {
        fs::write(pages.join(name), "<html>hello</html>").unwrap();
    }
    let server = Server::start(&pages);
    let error = refusal(&home, &["pull", &server.url]);
    assert!(
        error.contains("no package") && !error.contains("signature"),
        "{error}"
    );

    // No server listens where one was.
    let gone = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let gone = format!("http://{gone}/m");
    let package = copy_of(SAMPLE, dir.path().join("package"));
    let args = [
        "pull",
        text(&package),
        "m",
        "--mirror",
        &gone,
        "--rate",
        "20MiB",
    ];
    let (ok, _, error) = sterna(&home, &args);
    assert!(ok && error.contains("is asked again"), "{error}");
    let error = refusal(&home, &["pull", text(&package), "--rate", "20MB"]);
    assert!(error.contains("20MiB"), "{error}");
}

#[test]
fn interrupted_pulls_are_named_until_they_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let package = copy_of(SAMPLE, home.join("package"));
    // What is left of a package without its shard.
    fs::remove_file(package.join("shard_00000.bin")).unwrap();
    refusal(home, &["pull", text(&package), "m"]);
    let (_, _, error) = sterna(home, &["list"]);
    assert!(error.contains("interrupted pull of `m`"), "{error}");
    assert!(sterna(home, &["gc", "--interrupted"]).0);
    let (_, _, error) = sterna(home, &["list"]);
    assert!(!error.contains("interrupted pull"), "{error}");
}

#[test]
fn a_pull_that_ends_early_says_that_its_progress_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let package = copy_of(SAMPLE, home.join("package"));
    fs::remove_file(package.join("shard_00000.bin")).unwrap();
    let error = refusal(home, &["pull", text(&package), "m"]);
    assert!(
        error.contains("what has arrived is kept (") && error.contains("the same command"),
        "{error}"
    );
    // Nothing has arrived of what isn't there.
    let error = refusal(home, &["pull", text(&home.join("home")), "n"]);
    assert!(!error.contains("is kept"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_pull_that_is_interrupted_says_that_its_progress_is_kept() {
    use std::io::Read;
    let dir = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/m", silent.local_addr().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["pull", &url])
        .env("STERNA_HOME", dir.path())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let _asked = silent.accept().unwrap();
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let mut error = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut error)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{error}");
    assert!(
        error.contains("interrupted; what has arrived is kept"),
        "{error}"
    );
}

#[test]
fn names_that_are_taken_are_not_given_to_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    let other = copy_of(SAMPLE, dir.path().join("builtin"));
    for args in [
        &["pull", text(&folder), "builtin"][..],
        &["pull", text(&folder), "BuiltIn"],
        &["pull", text(&other)],
    ] {
        let error = refusal(&home, args);
        assert!(
            error.contains("stands for another model; `sterna pull")
                && error.to_lowercase().contains(" builtin-2` fetches"),
            "{error}"
        );
    }
    json_of(&home, &["pull", text(&folder), "m", "--json"]);
    let error = refusal(&home, &["pull", text(&other), "m"]);
    for part in [text(&folder), text(&other), "--replace`", " m-2` fetches"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(
        json_of(&home, &["list", "--json"])[0]["source"],
        text(&folder)
    );
    let again = ["pull", &format!("{}/", text(&folder)), "m", "--json"];
    json_of(&home, &again);
    json_of(&home, &["pull", text(&other), "m", "--replace", "--json"]);
    assert_eq!(
        json_of(&home, &["list", "--json"])[0]["source"],
        text(&other)
    );
}

#[test]
fn a_folder_without_a_manifest_is_said_to_be_no_package() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("reference-logits/llama");
    let error = refusal(dir.path(), &["pull", text(&model), "m"]);
    assert!(
        error.contains("expected a package, found no manifest.json")
            && error.contains("sterna convert"),
        "{error}"
    );
}

#[test]
fn verifying_a_name_and_a_folder_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    json_of(&home, &["pull", text(&folder), "good", "--json"]);
    let by = |name: &str| {
        let (ok, out, _) = sterna(&home, &["verify", name, "--json"]);
        (ok, serde_json::from_str::<Value>(&out).unwrap())
    };
    assert_eq!(by("good"), by(text(&folder)));
    let (_, out, _) = sterna(&home, &["verify", "good"]);
    assert!(out.contains("in 10 shards"), "{out}");

    let mut manifest = manifest_of(&folder);
    let wrong = "0".repeat(64);
    let groups = manifest["groups"].as_object_mut().unwrap();
    let id = groups.keys().next().unwrap().clone();
    groups[&id]["hash"] = json!(wrong);
    manifest["blake3Full"] = json!(wrong);
    fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    json_of(&home, &["pull", text(&folder), "bad", "--json"]);
    let (ok, found) = by("bad");
    assert_eq!((ok, &found), (false, &by(text(&folder)).1));
    let problems = found["problems"].as_array().unwrap();
    assert_eq!(problems.len(), 2, "{problems:?}");
    let error = refusal(&home, &["verify", "bad"]);
    // The source has the same.
    assert!(
        error.contains("2 problems") && !error.contains("sterna pull"),
        "{error}"
    );
}

#[test]
fn damage_to_one_model_harms_no_other_and_messages_say_what_mends_it() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    for name in ["bad", "good"] {
        json_of(&home, &["pull", text(&folder), name, "--json"]);
    }
    let models = home.join("store/models");
    for stray in [models.join(".DS_Store"), models.join("bad/Thumbs.db")] {
        fs::write(stray, "mine").unwrap();
    }
    let listed = |name: &str| {
        let list = json_of(&home, &["list", "--json"]);
        let mut rows = list.as_array().unwrap().clone().into_iter();
        rows.find(|row| row["name"] == name).unwrap()
    };
    assert_eq!(listed("bad")["damage"], Value::Null);
    fs::write(models.join("bad/current"), "").unwrap();
    assert_eq!(listed("good")["damage"], Value::Null);
    assert_eq!(listed("bad")["source"], text(&folder));
    let (ok, out, _) = sterna(&home, &["list"]);
    assert!(
        ok && out.contains("damaged: ") && out.contains("`sterna pull bad`"),
        "{out}"
    );
    assert!(sterna(&home, &["verify", "good"]).0);
    let key = dir.path().join("k");
    sterna(
        &home,
        &["sign", "--generate", "--no-password", "--key", text(&key)],
    );
    let met_by = |command: &str| {
        for args in [
            &["inspect", "bad"][..],
            &["verify", "bad"],
            &["run", "bad", "-p", "x"],
            &["sign", "bad", "--key", text(&key)],
            &["diff", "bad", "good"],
        ] {
            let error = refusal(&home, args);
            assert!(error.contains(command), "{args:?}: {error}");
            assert!(error.contains("`sterna remove bad`"), "{args:?}: {error}");
        }
    };
    met_by("`sterna pull bad`");
    json_of(&home, &["pull", "bad", "--json"]);
    assert!(sterna(&home, &["verify", "bad"]).0);

    // Nothing says where it came from.
    for entry in fs::read_dir(models.join("bad")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            fs::remove_file(path).unwrap();
        }
    }
    met_by("`sterna pull SOURCE bad`");
    assert_eq!(listed("bad")["size"], Value::Null);
    let error = refusal(&home, &["pull", "bad"]);
    assert!(error.contains("`sterna pull SOURCE bad`"), "{error}");
    let (ok, _, error) = sterna(&home, &["gc"]);
    assert!(
        ok && error.contains("the index of `bad` is damaged"),
        "{error}"
    );
    assert!(
        error.contains("models/.DS_Store") && error.contains("Thumbs.db"),
        "{error}"
    );
    json_of(&home, &["pull", text(&folder), "bad", "--json"]);
    assert!(sterna(&home, &["verify", "bad"]).0);
    fs::write(models.join("bad/current"), "?").unwrap();
    let (ok, _, error) = sterna(&home, &["remove", "bad"]);
    assert!(ok && sterna(&home, &["verify", "good"]).0, "{error}");
    assert_eq!(
        json_of(&home, &["list", "--json"])
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

/// Another user may read the store, and is told why no more.
#[cfg(unix)]
#[test]
fn the_store_of_another_user_can_be_read() {
    use std::os::unix::{fs::PermissionsExt, process::CommandExt};
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let home = dir.path().join("home");
    let folder = copy_of(SAMPLE, dir.path().join("package"));
    json_of(&home, &["pull", text(&folder), "m", "--json"]);
    fs::remove_file(home.join("store/lock")).unwrap();
    let mut folders = vec![home.clone()];
    let mut next = 0;
    while let Some(folder) = folders.get(next).cloned() {
        next += 1;
        let entries = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        folders.extend(entries.filter(|path| path.is_dir()));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
    }
    let probe = home.join("probe");
    let is_root = fs::write(&probe, "").is_ok();
    let _ = fs::remove_file(&probe);
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command
            .args(args)
            .env("STERNA_HOME", &home)
            .current_dir("/");
        if is_root {
            command.uid(65534).gid(65534);
        }
        command.output()
    };
    if run(&["--version"]).is_err() {
        eprintln!("not tried: the program lies where other users can't get");
        return;
    }
    for args in [&["list"][..], &["inspect", "m"], &["verify", "m"]] {
        let output = run(args).unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
    for args in [&["pull", "m"][..], &["remove", "m"], &["gc"]] {
        let output = run(args).unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{args:?}");
        assert!(
            error.contains("can be read but not written") && error.contains("ermission denied"),
            "{args:?}: {error}"
        );
    }
    for folder in folders {
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn the_address_of_a_gguf_file_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = dir.path().join("files");
    fs::create_dir(&folder).unwrap();
    let file = testdata("stories260K/stories260K-q8_0.gguf");
    fs::copy(&file, folder.join("stories.gguf")).unwrap();
    let server = Server::start(&folder);
    let address = format!("{}/stories.gguf", server.url);
    let prompt = ["-p", "Once upon a time", "--temperature", "0", "-n", "8"];
    let run = |model: &str| sterna(&home, &[&["run", model], &prompt[..]].concat());
    let (ok, here, error) = run(text(&file));
    assert!(ok && !here.is_empty(), "{error}");
    let (ok, there, error) = run(&address);
    assert!(ok, "{error}");
    assert_eq!(there, here);
    assert!(error.contains("nothing vouches for its bytes"), "{error}");
    // It is here: asked for its length, and not fetched again.
    let asked = server.count("stories.gguf");
    let (ok, _, error) = sterna(&home, &["tokenize", &address, "--text", "Once"]);
    assert!(ok, "{error}");
    assert_eq!(server.count("stories.gguf"), asked + 1);
    let inspected = json_of(&home, &["inspect", &address, "--json"]);
    let expected = json_of(&home, &["inspect", text(&file), "--json"]);
    assert_eq!(inspected["architecture"], expected["architecture"]);
    let package = dir.path().join("package");
    let (ok, _, error) = sterna(&home, &["convert", &address, text(&package)]);
    assert!(ok && package.join("manifest.json").is_file(), "{error}");
    let listed = json_of(&home, &["list", "--json"]);
    assert!(listed.to_string().contains(&address), "{listed}");
    // Its name in the store is served as a package that is made of it.
    let mut serving = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", "stories", "--port", "0"])
        .env("STERNA_HOME", &home)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(serving.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    serving.kill().unwrap();
    let told = serving.wait_with_output().unwrap();
    assert!(line.starts_with("http://"), "{told:?}");
    let listed = json_of(&home, &["list", "--json"]).to_string();
    assert!(
        listed.contains("stories-rdrr") && listed.contains("convert:stories#"),
        "{listed}"
    );
    let (_, listed, _) = sterna(&home, &["list"]);
    assert!(
        listed.contains("converted from stories") && !listed.contains('#'),
        "{listed}"
    );
    // A server that is gone is no reason not to answer.
    let gone = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let (ok, _, error) = sterna(&home, &["pull", &format!("http://{gone}/m/other.gguf")]);
    assert!(!ok && error.contains("other.gguf"), "{error}");
    let error = refusal(&home, &["pull", &address, "--mirror", &server.url]);
    assert!(error.contains("expected no mirrors"), "{error}");
}

#[test]
fn what_a_clash_of_names_advises_works() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let files = dir.path().join("files");
    let file = testdata("stories260K/stories260K-q8_0.gguf");
    for folder in ["a", "b"] {
        fs::create_dir_all(files.join(folder)).unwrap();
        fs::copy(&file, files.join(folder).join("model.gguf")).unwrap();
    }
    let server = Server::start(&files);
    let address = |folder: &str| format!("{}/{folder}/model.gguf", server.url);
    let read = |model: &str| sterna(&home, &["tokenize", model, "--text", "Once"]);
    assert!(read(&address("a")).0);
    let (ok, _, error) = read(&address("b"));
    let advice = format!("`sterna pull {} model-2` fetches", address("b"));
    assert!(!ok && error.contains(&advice), "{error}");
    assert!(sterna(&home, &["pull", &address("b"), "model-2"]).0);
    assert!(read(&address("b")).0 && read("model-2").0);
    // Which of two is meant isn't known, and no further one would help.
    assert!(sterna(&home, &["cp", "model-2", "model-3"]).0);
    let error = refusal(&home, &["tokenize", &address("b"), "--text", "Once"]);
    assert!(
        error.contains("the store has it as model-2 and model-3"),
        "{error}"
    );
}

#[test]
fn the_address_of_a_manifest_stands_for_its_package() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let package = copy_of(SAMPLE, dir.path().join("package"));
    let server = Server::start(&package);
    let pull = |address: &str, more: &[&str]| {
        let args = [&["pull", address], more, &["--json"]].concat();
        json_of(&home, &args)["source"].as_str().unwrap().to_owned()
    };
    let address = format!("{}/manifest.json", server.url);
    assert_eq!(pull(&address, &["m"]), server.url);
    let manifest = package.join("manifest.json");
    assert_eq!(pull(text(&manifest), &["n"]), text(&package));
    let error = refusal(&home, &["pull", &server.url, "m", "--file", "Q4_0"]);
    assert!(
        error.contains("expected a repository to choose the file `Q4_0` of"),
        "{error}"
    );
}

/// Bytes of the largest file in `folder` and the folders in it.
#[cfg(unix)]
fn largest_file(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.path() {
        path if path.is_dir() => largest_file(&path),
        path => path.metadata().map_or(0, |metadata| metadata.len()),
    });
    sizes.max().unwrap_or(0)
}

#[cfg(unix)]
#[test]
fn an_interrupted_pull_of_a_small_file_is_named() {
    const LEN: usize = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/tiny.gguf", listener.local_addr().unwrap());
    // Its length, and then half of it.
    let serving = thread::spawn(move || {
        let mut kept = Vec::new();
        for len in [1, LEN] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            lines.find(|line| line.is_empty());
            let range = format!("bytes 0-{}/{LEN}", len - 1);
            let head = format!("Content-Range: {range}\r\nContent-Length: {len}\r\nETag: \"x\"");
            let head = format!("HTTP/1.1 206 X\r\nConnection: close\r\n{head}\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(&vec![b'G'; len.div_ceil(2)]).unwrap();
            kept.push(stream);
        }
        kept
    });
    let child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["run", &address, "-p", "x"])
        .env("STERNA_HOME", dir.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _open = serving.join().unwrap();
    while largest_file(dir.path()) < LEN as u64 / 2 {
        thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    let killed = Command::new("kill").args(["-INT", &pid]).status();
    assert!(killed.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert!(
        error.contains("what has arrived is kept") && !error.contains("error:"),
        "{error}"
    );
    let (_, _, error) = sterna(dir.path(), &["list"]);
    assert!(
        error.contains("interrupted pull of `tiny` left 48.8 KiB"),
        "{error}"
    );
}

#[test]
fn an_address_updates_the_model_of_its_name_and_no_copy() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let folder = dir.path().join("files");
    fs::create_dir(&folder).unwrap();
    let revision = |file: &str| {
        let file = testdata("stories260K").join(file);
        fs::copy(&file, folder.join("stories.gguf")).unwrap()
    };
    let server = Server::start(&folder);
    let address = format!("{}/stories.gguf", server.url);
    let succeed = |args: &[&str]| {
        let (ok, _, error) = sterna(&home, args);
        assert!(ok, "{args:?}: {error}");
    };
    let read = || succeed(&["tokenize", &address, "--text", "Once"]);
    // Names and sizes.
    let has = |expected: &[(&str, u64)]| {
        let listed = json_of(&home, &["list", "--json"]);
        let rows = listed.as_array().unwrap().iter();
        let found: Vec<_> = rows
            .map(|row| (row["name"].as_str().unwrap(), row["size"].as_u64().unwrap()))
            .collect();
        assert_eq!(found, expected);
    };
    let q8_0 = revision("stories260K-q8_0.gguf");
    read();
    succeed(&["cp", "stories", "a-copy"]);
    succeed(&["cp", "stories", "b-copy"]);
    let f16 = revision("stories260K-f16.gguf");
    read();
    has(&[("a-copy", q8_0), ("b-copy", q8_0), ("stories", f16)]);
    // Which of two copies would be meant isn't known.
    succeed(&["remove", "stories"]);
    read();
    has(&[("a-copy", q8_0), ("b-copy", q8_0), ("stories", f16)]);
    // A single one was renamed.
    succeed(&["remove", "stories"]);
    succeed(&["remove", "b-copy"]);
    read();
    has(&[("a-copy", f16)]);
}
