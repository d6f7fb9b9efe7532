//! Models into packages and packages into the store.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::common::{json, logit_bytes, models, stdout, sterna, testdata, text};
use serde_json::Value;

/// All files of a folder.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    };
    fs::read_dir(dir).unwrap().map(entry).collect()
}

#[test]
fn packages_give_the_logits_of_their_source_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut n = 0;
    for model in models() {
        let package = dir.path().join("package");
        let args = [
            "convert",
            text(&model),
            text(&package),
            "--shard-size",
            "64K",
        ];
        stdout(&args);
        let same = logit_bytes(text(&model), dir.path()) == logit_bytes(text(&package), dir.path());
        assert!(same, "{}", model.display());
        let findings = json(&["verify", text(&package), "--json"]);
        assert_eq!(findings["ok"], true, "{}: {findings}", model.display());
        fs::remove_dir_all(&package).unwrap();
        n += 1;
    }
    assert!(n > 120, "{n}");
}

#[test]
fn the_same_bytes_come_of_any_threads_and_of_an_interrupted_run() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("bitllama-3M/bitllama-3M-f16.gguf");
    let convert = |name: &str, jobs: &str| {
        let out = dir.path().join(name);
        let args = [
            "convert",
            text(&model),
            text(&out),
            "--shard-size",
            "16K",
            "--jobs",
            jobs,
        ];
        (out.clone(), args.map(str::to_owned))
    };
    let run = |args: &[String]| stdout(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let (one, args) = convert("one", "1");
    run(&args);
    let (two, args) = convert("two", "2");
    run(&args);
    let expected = contents(&one);
    assert!(expected == contents(&two));
    let mut resumed = 0;
    for delay in [5, 20, 40, 60, 80, 120, 160, 250] {
        let (out, args) = convert(&format!("killed-{delay}"), "2");
        let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(&args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        if !out.exists() {
            let mut args = args.to_vec();
            args.push("--json".to_owned());
            let summary: Value = serde_json::from_str(&run(&args)).unwrap();
            resumed += u64::from(summary["n_resumed"].as_u64().unwrap() > 0);
        }
        assert!(expected == contents(&out), "killed after {delay} ms");
    }
    println!("{resumed} runs went on with shards of another");
}

#[test]
fn types_are_chosen_by_part_and_the_rest_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("stories260K");
    let model = fs::read_dir(model)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|e| e == "gguf"))
        .unwrap();
    let out = dir.path().join("out");
    let args = [
        "convert",
        text(&model),
        text(&out),
        "--quantize",
        "q8_0",
        "--embeddings",
        "f16",
    ];
    stdout(&args);
    let manifest: Value =
        serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["quantization"], "Q8_0");
    assert_eq!(manifest["quantizationInfo"]["embeddings"], "f16");
    for args in [
        ["convert", text(&model), text(&out), "--quantize", "q8_0"],
        ["convert", text(&model), "other", "--quantize", "q9"],
        ["convert", text(&model), "other", "--shard-size", "5"],
    ] {
        assert!(!sterna(&args).status.success(), "{args:?}");
    }
}

#[test]
fn a_folder_gives_the_same_bytes_however_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("tiny");
    fs::create_dir(&model).unwrap();
    for (name, bytes) in contents(&testdata("reference-logits/llama")) {
        fs::write(model.join(name), bytes).unwrap();
    }
    let convert = |from: &Path, typed: &str, out: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .current_dir(from)
            .args(["convert", typed, out])
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{typed}: {stderr}");
    };
    convert(dir.path(), "tiny", "a");
    convert(dir.path(), "tiny/", "b");
    convert(&model, ".", "../c");
    convert(&model, "../tiny/../tiny", "../d");
    let expected = contents(&dir.path().join("a"));
    let manifest = String::from_utf8_lossy(&expected["manifest.json"]);
    assert!(manifest.contains("\"modelId\": \"tiny-w"), "{manifest}");
    for other in ["b", "c", "d"] {
        assert!(contents(&dir.path().join(other)) == expected, "{other}");
    }
}

#[test]
fn a_type_for_the_head_of_a_tied_model_is_for_its_table() {
    let dir = tempfile::tempdir().unwrap();
    // Its embedding table is its output head too.
    let model = testdata("stories260K/hf");
    for (i, (more, table, said)) in [
        (
            &["--head", "q8_0"][..],
            "q8_0",
            "note: the model has no separate output head",
        ),
        (
            &["--head", "q8_0", "--embeddings", "f16"],
            "f16",
            "--head is ignored",
        ),
        (&["--embeddings", "f16"], "f16", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let out = dir.path().join(i.to_string());
        let args = [&["convert", text(&model), text(&out)], more].concat();
        let output = sterna(&args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && stderr.contains(said), "{stderr}");
        assert_eq!(
            stderr.contains("no separate output head"),
            !said.is_empty(),
            "{stderr}"
        );
        let manifest = fs::read(out.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(manifest["quantizationInfo"]["embeddings"], table);
    }
}

#[test]
fn damage_is_found_and_never_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let model = testdata("reference-logits/llama");
    stdout(&["convert", text(&model), text(&out), "--shard-size", "64K"]);
    let shard = out.join("shard_00001.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[1000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let output = sterna(&["verify", text(&out)]);
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        !output.status.success() && found.contains("shard_00001.bin: expected sha256"),
        "{found}"
    );
    assert!(found.contains("block 0"), "{found}");
    let output = sterna(&[
        "logits",
        text(&out),
        "--ids",
        "1,2",
        "-o",
        text(&dir.path().join("x")),
    ]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && error.contains("shard_00001.bin"),
        "{error}"
    );
}

#[test]
fn wrong_bytes_get_no_right_hashes_and_no_files_are_lost() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    stdout(&["convert", "builtin", text(&out)]);
    let refused = |args: &[&str], what: &str| {
        let output = sterna(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && error.contains(what),
            "{args:?}: {error}"
        );
    };
    let again = dir.path().join("again");
    // A file other than a shard that doesn't match the manifest.
    let config = out.join("tokenizer_config.json");
    let good = fs::read(&config).unwrap();
    fs::write(&config, b"{}").unwrap();
    let run = ["run", text(&out), "-p", "hi", "--max-tokens", "1"];
    refused(&run, "tokenizer_config.json");
    refused(
        &["convert", text(&out), text(&again)],
        "tokenizer_config.json",
    );
    fs::write(&config, good).unwrap();
    // One that the manifest doesn't know counts for nothing.
    let template = out.join("chat_template.jinja");
    fs::write(&template, "{{ raise_exception('read') }}").unwrap();
    stdout(&run);
    fs::remove_file(template).unwrap();
    let shard = out.join("shard_00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[5000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    refused(&["convert", text(&out), text(&again)], "shard_00000.bin");
    // Folders from elsewhere.
    let partial = dir.path().join("mine.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("notes.txt"), "keep").unwrap();
    let mine = dir.path().join("mine");
    refused(&["convert", "builtin", text(&mine)], "other files");
    assert_eq!(fs::read(partial.join("notes.txt")).unwrap(), b"keep");
}

/// Runs with a store of its own.
fn with_store(home: &Path, args: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(args)
        .env("STERNA_HOME", home)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn a_tensor_map_that_no_manifest_names_is_pulled_too() {
    let dir = tempfile::tempdir().unwrap();
    let (package, home) = (dir.path().join("tiny"), dir.path().join("home"));
    let model = testdata("reference-logits/llama");
    stdout(&["convert", text(&model), text(&package)]);
    let path = package.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for member in ["tensorsFile", "tensors", "integrityExtensions"] {
        manifest.as_object_mut().unwrap().remove(member).unwrap();
    }
    fs::write(&path, manifest.to_string()).unwrap();
    for args in [
        &["verify", text(&package)][..],
        &["pull", text(&package), "tiny"],
        &["inspect", "tiny"],
    ] {
        let (ok, _, stderr) = with_store(&home, args);
        assert!(ok, "{args:?}: {stderr}");
    }
}

#[test]
fn the_second_revision_moves_only_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let model = testdata("reference-logits/llama");
    // Shards that hold a tensor or a few each.
    let convert = |source: &Path, name: &str| {
        let out = dir.path().join(name);
        stdout(&[
            "convert",
            text(source),
            text(&out),
            "--shard-size",
            "32K",
            "--id",
            "tiny",
        ]);
        out
    };
    let first = convert(&model, "first");
    let changed = changed_layer(&model, &dir.path().join("changed"));
    let second = convert(&changed, "second");
    let pull = |from: &Path, name: &str| -> Value {
        let (ok, out, error) = with_store(&home, &["pull", text(from), name, "--json"]);
        assert!(ok, "{error}");
        serde_json::from_str(&out).unwrap()
    };
    let whole = pull(&first, "tiny");
    let size = whole["size"].as_u64().unwrap();
    assert!(whole["received"].as_u64().unwrap() > size / 2);
    let again = pull(&first, "tiny");
    assert_eq!(again["received"], 0);
    let update = pull(&second, "tiny-2");
    let moved = update["received"].as_u64().unwrap();
    let manifest: Value =
        serde_json::from_slice(&fs::read(second.join("manifest.json")).unwrap()).unwrap();
    let of_layer: u64 = manifest["groups"]["layer.1"]["shards"]
        .as_array()
        .unwrap()
        .iter()
        .map(|i| {
            manifest["shards"][i.as_u64().unwrap() as usize]["size"]
                .as_u64()
                .unwrap()
        })
        .sum();
    assert!(
        moved <= of_layer + 65_536 && moved < size,
        "{moved} of {size}, {of_layer}"
    );
    let (ok, list, error) = with_store(&home, &["list", "--json"]);
    assert!(ok, "{error}");
    let list: Value = serde_json::from_str(&list).unwrap();
    for row in list.as_array().unwrap() {
        assert!(
            row["own"].as_u64().unwrap() < row["size"].as_u64().unwrap(),
            "{row}"
        );
    }
    // From the store, under its name.
    let out = dir.path().join("stored.safetensors");
    let args = [
        "logits",
        "tiny-2",
        "--ids",
        "5,42,79,116,3,40,77,114",
        "-o",
        text(&out),
    ];
    let (ok, _, error) = with_store(&home, &args);
    assert!(ok, "{error}");
    assert!(fs::read(&out).unwrap() == logit_bytes(text(&changed), dir.path()));
    let (ok, _, error) = with_store(&home, &["remove", "tiny"]);
    assert!(ok, "{error}");
    let (ok, ..) = with_store(&home, &args);
    assert!(ok, "what two models shared stays for the other");
    let (ok, _, error) = with_store(&home, &["logits", "tiny", "--ids", "1", "-o", text(&out)]);
    assert!(!ok && error.contains("tiny"), "{error}");
}

/// A copy of a model in one safetensors file, with one value of layer 1 changed.
fn changed_layer(model: &Path, to: &Path) -> PathBuf {
    fs::create_dir(to).unwrap();
    for (name, mut bytes) in contents(model) {
        if name == "model.safetensors" {
            let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
            let tensor = &header["model.layers.1.mlp.up_proj.weight"];
            let begin = tensor["data_offsets"][0].as_u64().unwrap() as usize;
            bytes[8 + n + begin + 10] ^= 1;
        }
        if name != "reference.safetensors" {
            fs::write(to.join(name), bytes).unwrap();
        }
    }
    to.to_owned()
}

#[test]
fn a_served_package_is_pulled_whole() {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("package");
    let model = testdata("stories260K/stories260K-f16.gguf");
    stdout(&[
        "convert",
        text(&model),
        text(&package),
        "--shard-size",
        "64K",
    ]);
    let mut server = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["serve", text(&package), "--port", "0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut url = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut url)
        .unwrap();
    let url = url.trim();
    let home = dir.path().join("home");
    let pulled = with_store(&home, &["pull", url, "tiny"]);
    let prompt = [
        "--raw",
        "-p",
        "Once upon",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
    ];
    let told = |model: &str| with_store(&home, &[&["run", model][..], &prompt].concat());
    let (from_store, from_file) = (told("tiny"), told(text(&model)));
    // Into an empty store, loading while it arrives.
    let run = [&["run", url][..], &prompt].concat();
    let from_url = with_store(&dir.path().join("other-home"), &run);
    let again = told(url);
    server.kill().unwrap();
    server.wait().unwrap();
    // Once it has been fetched, it is there without the server.
    let offline = told(url);
    assert!(pulled.0, "{}", pulled.2);
    for (ok, out, error) in [&from_store, &from_url, &again, &offline] {
        assert!(ok, "{error}");
        assert_eq!(*out, from_file.1);
    }
    assert!(offline.2.contains("as it is in the store"), "{}", offline.2);
}
