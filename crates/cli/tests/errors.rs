//! Files that are missing, damaged or something else: a message that says so, and no more.

use std::fs;
use std::path::Path;
#[cfg(unix)]
use std::process::{Command, Stdio};

use crate::common::{self, refusal, sterna, testdata};
use sterna_format::safetensors::SafeTensors;

/// What `sterna inspect path` says in refusal.
fn inspect(path: &Path) -> String {
    refusal(&["inspect", path.to_str().unwrap()])
}

#[test]
fn what_is_no_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.gguf");
    fs::write(&empty, "").unwrap();
    let text = dir.path().join("model.bin");
    fs::write(&text, "hello").unwrap();
    for (path, messages) in [
        (
            Path::new("no/such/file.gguf"),
            ["no/such/file.gguf: cannot open: ", ""],
        ),
        (
            dir.path().join("none").as_path(),
            ["none: cannot open: ", ""],
        ),
        (
            &empty,
            ["empty.gguf: expected a GGUF file", "found 0 bytes"],
        ),
        (
            &text,
            [
                "model.bin: expected a GGUF file",
                "found 5 bytes that begin with `hell`",
            ],
        ),
        (
            &testdata("tokenizers"),
            [
                "expected model.safetensors, model.safetensors.index.json, manifest.json, qmodel.tensors or a .gguf file",
                "found none of them",
            ],
        ),
        #[cfg(unix)]
        (
            Path::new("/dev/null"),
            [
                "/dev/null: expected a regular file, found a pipe, socket or device",
                "",
            ],
        ),
    ] {
        let found = inspect(path);
        assert!(
            found.starts_with("error: ") && found.lines().count() == 1,
            "{found}"
        );
        for message in messages {
            assert!(
                found.contains(message),
                "`{found}` does not say `{message}`"
            );
        }
    }
}

#[test]
fn truncated_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (file, lengths) in [
        ("stories260K/stories260K-q8_0.gguf", [4, 20, 5_000, 300_000]),
        (
            "stories260K/hf/model.safetensors",
            [4, 20, 2_000, 1_000_000],
        ),
    ] {
        let bytes = fs::read(testdata(file)).unwrap();
        let path = dir.path().join(Path::new(file).file_name().unwrap());
        for len in lengths {
            fs::write(&path, &bytes[..len]).unwrap();
            let found = failure(&["inspect", path.to_str().unwrap()]);
            assert!(
                found.contains(path.to_str().unwrap()),
                "{len} bytes: {found}"
            );
        }
    }
}

/// What `sterna` says on standard error when it fails with `args`.
fn failure(args: &[&str]) -> String {
    let output = sterna(args);
    assert_eq!(output.status.code(), Some(1), "sterna {args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_header_of_a_truncated_file_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let whole = testdata("stories260K/stories260K-q8_0.gguf");
    let bytes = fs::read(&whole).unwrap();
    let path = dir.path().join("cut.gguf");
    fs::write(&path, &bytes[..300_000]).unwrap();
    let described = |path: &Path| -> serde_json::Value {
        let output = sterna(&["inspect", path.to_str().unwrap(), "--json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (found, expected) = (described(&path), described(&whole));
    for key in [
        "format",
        "architecture",
        "metadata",
        "tensors",
        "n_parameters",
        "types",
    ] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    let args = ["inspect", path.to_str().unwrap()];
    let shown = String::from_utf8(sterna(&args).stdout).unwrap();
    assert!(shown.contains("can't run"), "{shown}");
    let error = failure(&args);
    assert!(
        error.starts_with("error: ") && error.contains("cut.gguf"),
        "{error}"
    );
    // Nothing can be said of half a header.
    fs::write(&path, &bytes[..5_000]).unwrap();
    inspect(&path);
}

#[test]
fn damaged_json_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let model = dir.path().to_str().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(testdata("stories260K/hf").join(name), path(name)).unwrap();
    }
    let tokenize = ["tokenize", model, "--text", "x"];
    let run = ["run", model, "--raw", "-p", "x"];
    for (name, content, args, message) in [
        ("tokenizer.json", "{", &tokenize[..], "tokenizer.json: "),
        (
            "config.json",
            r#"{"hidden_size": "many"}"#,
            &run,
            "config.json: `hidden_size`: expected ",
        ),
        (
            "generation_config.json",
            "[]",
            &run,
            "generation_config.json: ",
        ),
    ] {
        let before = fs::read(path(name)).ok();
        fs::write(path(name), content).unwrap();
        let found = refusal(args);
        assert!(
            found.contains(message),
            "{name}: `{found}` does not say `{message}`"
        );
        match before {
            Some(before) => fs::write(path(name), before).unwrap(),
            None => fs::remove_file(path(name)).unwrap(),
        }
    }
}

#[test]
fn wrong_messages_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("messages.json");
    for (content, message) in [
        ("{", "messages.json: expected a JSON array of messages: "),
        (
            r#"{"role": "user"}"#,
            "messages.json: expected a JSON array of messages: ",
        ),
    ] {
        fs::write(&path, content).unwrap();
        let found = refusal(&["template", "builtin", "--messages", path.to_str().unwrap()]);
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
    }
}

#[test]
fn wrong_ids_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let out = out.to_str().unwrap();
    for (ids, message) in [
        ("0,1728", "id 1: expected a token id below 1728, found 1728"),
        ("0,-1", "--ids: id 1: expected a token id, found `-1`"),
        ("", "--ids: expected at least one token id, found none"),
        ("[0, x]", "--ids: id 1: expected a token id, found `x`"),
    ] {
        let found = refusal(&["logits", "builtin", "--ids", ids, "-o", out]);
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
        assert!(!Path::new(out).exists());
    }
    let found = refusal(&[
        "logits", "builtin", "--ids", "0,1,2", "--ctx", "2", "-o", out,
    ]);
    assert!(
        found.contains("expected at most 2 tokens, the size of the context (--ctx), found 3"),
        "{found}"
    );
}

#[test]
fn a_model_without_a_tokenizer_is_refused_only_where_text_is_needed() {
    let model = testdata("reference-logits/llama");
    let model = model.to_str().unwrap();
    let file = testdata("reference-logits/llama/config.json");
    for args in [
        &["tokenize", model, "--text", "x"][..],
        &["run", model, "-p", "x"],
        &["perplexity", model, "--file", file.to_str().unwrap()],
    ] {
        let found = refusal(args);
        assert!(
            found.contains(
                "text needs tokenizer.json, tokenizer.model or rwkv_vocab_v20230424.txt beside the weights, found none"
            ),
            "{found}"
        );
    }
    assert_eq!(common::logits(model, &[1, 2, 3], &[]).len(), 3);
}

#[test]
fn an_index_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let source = testdata("stories260K/hf/model.safetensors");
    fs::copy(source, dir.path().join("a.safetensors")).unwrap();
    for (weight_map, message) in [
        (r#"{"x": "../a"}"#, "model.safetensors.index.json: "),
        (r#"{"x": "b.safetensors"}"#, "b.safetensors: cannot open: "),
    ] {
        fs::write(&index, format!(r#"{{"weight_map": {weight_map}}}"#)).unwrap();
        let found = inspect(dir.path());
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
    }
}

#[test]
fn folders_without_a_model_of_ours_say_what_they_hold() {
    for (files, message) in [
        (
            &["pytorch_model.bin", "config.json"][..],
            "found pytorch_model.bin; PyTorch's own files can run code",
        ),
        (
            &["consolidated.safetensors", "consolidated.00.pth"],
            "found consolidated.safetensors; give the path of one of them, or if it is in the layout",
        ),
        (
            &["a.gguf", "b.gguf"],
            "expected one GGUF model in the folder, found a.gguf, b.gguf; give the path",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            fs::write(dir.path().join(file), "").unwrap();
        }
        let found = inspect(dir.path());
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
    }
}

#[test]
fn more_threads_than_any_machine_has_are_refused() {
    for args in [
        &["run", "-p", "x", "--threads", "100000"][..],
        &["bench", "-t", "1,99999999999999"],
    ] {
        let output = common::sterna(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("expected a number of threads from 1 to 1024"),
            "{stderr}"
        );
    }
}

#[test]
fn results_that_are_no_numbers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("stories260K/hf");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    let mut weights = fs::read(source.join("model.safetensors")).unwrap();
    let header = SafeTensors::parse(&weights, weights.len() as u64).unwrap();
    let mut tensors = header.tensors().iter();
    let norm = tensors
        .find(|t| t.name == "model.embed_tokens.weight")
        .unwrap();
    let range = norm.offset as usize..(norm.offset + norm.len) as usize;
    for value in weights[range].chunks_exact_mut(4) {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    let model = dir.path().to_str().unwrap();
    let found = refusal(&["run", model, "--raw", "-p", "Once upon a time"]);
    assert!(
        found.contains("expected logits, found none that is finite"),
        "{found}"
    );
    let text = dir.path().join("text.txt");
    fs::write(&text, "Once upon a time").unwrap();
    let found = refusal(&[
        "perplexity",
        model,
        "--file",
        text.to_str().unwrap(),
        "--json",
    ]);
    assert!(
        found.contains("text.txt: window 0: position 1: expected a finite negative log-likelihood"),
        "{found}"
    );
}

/// What is no file must never be replaced by one.
#[cfg(unix)]
#[test]
fn logits_replace_files_and_nothing_else() {
    use std::os::unix::fs::{FileTypeExt, symlink};

    let dir = tempfile::tempdir().unwrap();
    let logits = |out: &Path| {
        let out = out.to_str().unwrap();
        sterna(&["logits", "builtin", "--ids", "1,2", "-o", out])
    };
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    std::fs::write(&target, "old").unwrap();
    symlink(&target, &link).unwrap();
    assert!(logits(&link).status.success());
    assert!(link.is_symlink());
    assert_ne!(std::fs::read(&target).unwrap(), b"old");

    // A socket stands for every kind of special file; it can't be written, and stays what it is.
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(!logits(&socket).status.success());
    assert!(socket.metadata().unwrap().file_type().is_socket());
    // Nothing is left behind.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
#[cfg(unix)]
fn a_pipe_that_breaks_is_an_error_unless_it_is_stdout() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("logits.fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    // Reads a byte of what is more than a pipe holds, and leaves.
    let mut reader = Command::new("head")
        .args(["-c", "1"])
        .arg(&fifo)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ids = ["5"; 200].join(",");
    let message = refusal(&[
        "logits",
        "builtin",
        "--ids",
        &ids,
        "-o",
        fifo.to_str().unwrap(),
    ]);
    // It waits for a writer, if there was none.
    reader.kill().unwrap();
    reader.wait().unwrap();
    assert!(
        message.contains("logits.fifo: cannot write: ") && message.contains("pipe"),
        "{message}"
    );
}

#[test]
fn what_is_no_name_or_no_package_is_said_to_be_that() {
    for (args, message) in [
        (
            &["run", ""][..],
            "error: expected a model, found an empty name",
        ),
        (
            &["serve", ""],
            "error: expected a package, found an empty name",
        ),
        (
            &["diff", "builtin", "builtin"],
            "error: builtin: expected a package, found the model inside this program; `sterna convert builtin",
        ),
        (
            &["verify", "builtin"],
            "error: builtin: expected a package, found the model inside this program",
        ),
        (
            &["pull", "builtin"],
            "error: builtin: expected a model from elsewhere, found the one inside this program",
        ),
    ] {
        let found = refusal(args);
        assert!(
            found.starts_with(message),
            "`{found}` does not say `{message}`"
        );
    }
}

#[test]
fn what_is_not_there_is_said_to_be_missing_and_what_was_meant_is_named() {
    let nowhere = "no such file or folder, and no model of that name in the store, which ";
    for (args, message) in [
        (&["pull", "nope"][..], format!("nope: {nowhere}")),
        (&["verify", "nope"], format!("nope: {nowhere}")),
        (&["run", "nope", "-p", "x"], format!("nope: {nowhere}")),
        (
            &["run", "-p", "x", "--lora", "nope"],
            format!("adapter nope: {nowhere}"),
        ),
        (
            &["run", "-p", "x", "--lora", "dir=x"],
            "adapter dir=x: no folder of that name; if dir is the adapter, expected a number as its scale, \
             found `x`"
                .to_owned(),
        ),
        (
            &["convert", "builtin", "no/such/out"],
            "no/such/out: expected a folder to write it into, found none at no/such".to_owned(),
        ),
        (
            &["convert", "builtin", "no/such/out.gguf"],
            "no/such/out.gguf: expected a folder to write it into, found none at no/such".to_owned(),
        ),
        (
            &["run", "owner/repo-GGUF", "-p", "x"],
            "if an address was meant, it is https://huggingface.co/owner/repo-GGUF".to_owned(),
        ),
        (
            &["pull", "hf://owner/repo"],
            "if an address was meant, it is https://huggingface.co/owner/repo".to_owned(),
        ),
        (
            &["tokenize", "example.org/x.gguf", "--text", "x"],
            "if an address was meant, it is https://example.org/x.gguf".to_owned(),
        ),
        (
            &["serve", "https://example.org/x", "--port", "0"],
            "found an address; `sterna pull https://example.org/x` fetches it".to_owned(),
        ),
    ] {
        let found = refusal(args);
        assert!(found.contains(&message), "`{found}` does not say `{message}`");
        assert!(!found.contains("os error"), "{found}");
    }
}

#[test]
fn a_family_that_is_not_supported_is_said_first() {
    let dir = tempfile::tempdir().unwrap();
    let weights = testdata("stories260K/hf/model.safetensors");
    fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
    let config = fs::read_to_string(testdata("stories260K/hf/config.json")).unwrap();
    let config = config.replace("LlamaForCausalLM", "OtherForCausalLM");
    let config = config.replace("\"llama\"", "\"other\"");
    fs::write(dir.path().join("config.json"), config).unwrap();
    let model = dir.path().to_str().unwrap();
    let found = refusal(&["run", model, "-p", "x"]);
    assert!(
        found.contains("isn't supported")
            && !found.contains("tokenizer")
            && !found.contains("base model"),
        "{found}"
    );
    assert_eq!(found.matches(model).count(), 1, "{found}");
}

#[test]
fn messages_are_cut_whatever_names_are_in_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let name = "x".repeat(60_000);
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 4]);
    fs::write(&path, bytes).unwrap();
    let found = inspect(&path);
    assert!(found.len() < 5000, "{}", found.len());
    assert!(
        found.starts_with("error: ") && found.contains("bytes left out"),
        "{found}"
    );
    let long = "y".repeat(100_000);
    for args in [&["run", &long][..], &["run", "--seed", &long]] {
        let output = sterna(args);
        assert!(!output.status.success());
        assert!(output.stderr.len() < 5000, "{}", output.stderr.len());
    }
}

#[test]
fn a_worker_needs_a_model() {
    for args in [
        &["worker", "no such model"][..],
        &["worker", "no/such/file.gguf"],
    ] {
        let found = refusal(args);
        assert!(found.contains(args[1]), "{found}");
    }
    // A driver that ends before it says anything is no error.
    assert!(sterna(&["worker", "builtin"]).status.success());
}
