//! `sterna run`: what ends an answer, what comes from where, and that seeds repeat.

use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};

use crate::common::{json, on_gpu, refusal, stdout, sterna, sterna_with_input, success, testdata};
use serde_json::Value;

const STORY: &str = "Tell me a story about a fox named Ruby.";

#[test]
fn the_same_seed_tells_the_same_tale() {
    let tell = |seed: &str, threads: &str| {
        stdout(&[
            "run",
            "-p",
            STORY,
            "--temperature",
            "1",
            "--seed",
            seed,
            "--threads",
            threads,
        ])
    };
    assert_eq!(tell("5", "1"), tell("5", "2"));
    assert_ne!(tell("5", "1"), tell("6", "1"));
}

/// On whatever GPU there is, a software one too; without one it is refused.
#[test]
fn a_gpu_tells_the_same_tale() {
    let tell = ["run", "-p", STORY, "--temperature", "0", "--cache", "f32"];
    let args = |backend| [&tell[..], &["--max-tokens", "40", "--backend", backend]].concat();
    if let Some(on_gpu) = on_gpu(&args("gpu")) {
        assert_eq!(on_gpu.stdout, sterna(&args("cpu")).stdout);
    }
}

/// Drawn on the GPU, too.
#[test]
fn a_seed_repeats_on_a_gpu() {
    let tell = |seed| {
        let flags = ["--temperature", "1", "--seed", seed, "--max-tokens", "40"];
        let output = on_gpu(&[&["run", "-p", STORY, "--backend", "gpu"], &flags[..]].concat());
        output.map(|output| output.stdout)
    };
    if let Some(first) = tell("5") {
        assert_eq!(tell("5").as_ref(), Some(&first));
        assert_ne!(tell("6").as_ref(), Some(&first));
    }
}

#[test]
fn layers_are_shared_between_a_gpu_and_the_cpu() {
    let args = |flags: &[&'static str]| {
        let story = ["run", "-p", STORY, "--temperature", "0", "--json"];
        [&story[..], &["--max-tokens", "20", "--cache", "f32"], flags].concat()
    };
    let tell = |flags: &[&'static str]| sterna(&args(flags));
    let ids = |out: &Output| {
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        (report["ids"].clone(), report["n_gpu_layers"].clone())
    };
    let on_cpu = tell(&["--backend", "cpu"]);
    let unasked = tell(&[]);
    // The model is too small for a GPU to be opened.
    assert_eq!(ids(&unasked), ids(&on_cpu));
    assert!(unasked.stderr.is_empty());
    for (flags, n_gpu_layers) in [(["--gpu-layers", "2"], 2), (["--gpu-memory", "4KiB"], 0)] {
        let Some(split) = on_gpu(&args(&[&["--backend", "gpu"], &flags[..]].concat())) else {
            break;
        };
        let message = String::from_utf8_lossy(&split.stderr);
        assert_eq!(ids(&split), (ids(&on_cpu).0, n_gpu_layers.into()));
        assert!(
            message.contains(&format!("{n_gpu_layers} of 8 layers")),
            "{message}"
        );
    }
    let none = tell(&["--backend", "gpu", "--gpu-layers", "0"]);
    assert_eq!(ids(&none), ids(&on_cpu));
    for (flags, expected) in [
        (["--gpu", "no such GPU"], "--gpu no such GPU: no GPU"),
        (
            ["--backend=cpu", "--gpu=x"],
            "--gpu: expected --backend gpu or auto",
        ),
    ] {
        let refused = tell(&flags);
        let message = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn answers_end_for_a_reason() {
    let answer = |more: &[&str]| {
        json(&[&["run", "-p", STORY, "--temperature", "0", "--json"], more].concat())
    };
    let whole = answer(&[]);
    let text = whole["text"].as_str().unwrap();
    assert_eq!(whole["stop"], "stop_token");
    assert!(
        text.starts_with(" Once upon a time") && text.ends_with('.'),
        "{text}"
    );

    let limited = answer(&["--max-tokens", "5"]);
    assert_eq!(
        (&limited["stop"], &limited["n_generated"]),
        (&"max_tokens".into(), &5.into())
    );
    assert!(text.starts_with(limited["text"].as_str().unwrap()));

    // Cut through the middle of words, so that the stop string spans several tokens.
    let stop = &text[40..60];
    let stopped = answer(&["--stop", "no such text", "--stop", stop]);
    assert_eq!(stopped["stop"], "stop_string");
    assert_eq!(stopped["text"], text[..40]);

    let full = answer(&["--ctx", "40"]);
    assert_eq!(full["stop"], "context_full");
    // The last token is given out, though it doesn't fit the context itself.
    assert_eq!(
        full["n_prompt"].as_u64().unwrap() + full["n_generated"].as_u64().unwrap(),
        41
    );

    let nothing = answer(&["--max-tokens", "0"]);
    assert_eq!(
        (&nothing["stop"], &nothing["text"]),
        (&"max_tokens".into(), &"".into())
    );
}

#[test]
fn text_goes_to_stdout_and_timings_to_stderr() {
    let output = sterna(&[
        "run",
        "-p",
        "What is 3 plus 4?",
        "--temperature",
        "0",
        "--seed",
        "9",
    ]);
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "3 plus 4 is 7.\n"
    );
    let stderr = String::from_utf8(output.stderr).unwrap();
    for part in [
        "prompt 14 tokens",
        "answer 9 tokens",
        "stopped at the end of the answer",
        "seed 9",
    ] {
        assert!(stderr.contains(part), "`{stderr}` does not say `{part}`");
    }
}

#[test]
fn a_prompt_may_come_from_a_pipe() {
    let args = ["run", "--temperature", "0"];
    let text = success(&args, sterna_with_input(&args, "What is 3 plus 4?\n"));
    assert_eq!(text, "3 plus 4 is 7.\n");
}

#[test]
fn raw_prompts_are_continued() {
    let prompt = "<|begin_of_text|>Once upon a time";
    let text = stdout(&[
        "run",
        "--raw",
        "-p",
        prompt,
        "--temperature",
        "0",
        "--max-tokens",
        "1",
    ]);
    assert_eq!(text, ",\n");
}

#[test]
fn the_models_recommendations_are_defaults() {
    // Transformers' defaults for the folder: greedy, as nothing is said about sampling.
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(testdata("stories260K/hf").join(name), dir.path().join(name)).unwrap();
    }
    let recommended = r#"{"do_sample": false, "max_new_tokens": 3}"#;
    std::fs::write(dir.path().join("generation_config.json"), recommended).unwrap();
    let model = dir.path().to_str().unwrap();
    let answer = json(&["run", model, "--raw", "-p", "Once upon a time", "--json"]);
    assert_eq!(
        (&answer["stop"], &answer["n_generated"]),
        (&"max_tokens".into(), &3.into())
    );
    let greedy = [
        "run",
        model,
        "--raw",
        "-p",
        "Once upon a time",
        "--temperature",
        "0",
    ];
    assert_eq!(
        stdout(&greedy),
        format!("{}\n", answer["text"].as_str().unwrap())
    );
}

#[test]
fn a_base_model_continues_text_and_says_so() {
    let model = testdata("stories260K/hf");
    let args = [
        "run",
        model.to_str().unwrap(),
        "-p",
        "Once upon a time",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    ];
    let output = sterna(&args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("base model"), "{stderr}");
    assert_eq!(success(&args, output), ", there was a little girl\n");
    let message = refusal(&[&args[..], &["--system", "Be brief."]].concat());
    assert!(
        message.contains("--system: expected a model with a chat template"),
        "{message}"
    );
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args(["run", "-p", STORY])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn settings_out_of_range_are_refused() {
    for (flags, message) in [
        (
            &["--temperature", "-1"][..],
            "expected temperature of at least 0, found -1",
        ),
        (
            &["--top-p", "2"],
            "expected top_p above 0 and at most 1, found 2",
        ),
        (
            &["--ctx", "8"],
            "the prompt has 16 tokens, but the context holds 8",
        ),
    ] {
        let found = refusal(&[&["run", "-p", STORY], flags].concat());
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
    }
}

#[test]
fn odd_recommendations_are_ignored_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(testdata("stories260K/hf").join(name), dir.path().join(name)).unwrap();
    }
    let recommended = r#"{"do_sample": true, "top_p": 0.0, "max_new_tokens": 3}"#;
    std::fs::write(dir.path().join("generation_config.json"), recommended).unwrap();
    let model = dir.path().to_str().unwrap();
    let args = ["run", model, "--raw", "-p", "Once upon a time"];
    let output = sterna(&args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        stderr.contains("generation_config.json: `top_p`: expected a number above 0"),
        "{stderr}"
    );
    success(&args, output);
    // A flag is an order.
    let found = refusal(&[&args[..], &["--top-p", "0"]].concat());
    assert!(found.contains("expected top_p above 0"), "{found}");
}

#[test]
fn json_has_the_text_of_the_ids() {
    let args = ["run", "-p", "What is 3 plus 4?", "--temperature", "0"];
    let answer = json(&[&args[..], &["--json"]].concat());
    assert_eq!(answer["text"], " 3 plus 4 is 7.");
    assert_eq!(stdout(&args), "3 plus 4 is 7.\n");
}

#[test]
fn what_might_have_become_a_stop_text_is_given_out_at_the_end() {
    let args = ["run", "-p", "What is 3 plus 4?", "--temperature", "0"];
    let held = [&args[..], &["--stop", "7.And so on"]].concat();
    assert_eq!(stdout(&held), stdout(&args));
}

#[test]
fn speculation_changes_timings_only() {
    let args = ["run", "-p", STORY, "--temperature", "0", "--json"];
    let plain = json(&args);
    assert_eq!(plain["n_drafted"], 0);
    for flag in ["--speculate", "--speculate=3"] {
        let drafting = json(&[&args[..], &[flag]].concat());
        for key in ["ids", "text", "stop", "n_generated", "n_decoded"] {
            assert_eq!(drafting[key], plain[key], "{flag}: {key}");
        }
        assert!(drafting["n_drafted"].as_u64() > Some(0));
        assert!(drafting["n_accepted"].as_u64() <= drafting["n_drafted"].as_u64());
    }
    let output = sterna(&["run", "-p", STORY, "--speculate=65"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("expected a number of tokens from 1 to 64"),
        "{stderr}"
    );
}

#[test]
fn a_prompt_may_come_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "What is 3 plus 4?\r\n").unwrap();
    let file = file.to_str().unwrap();
    let args = ["run", "-f", file, "--temp", "0"];
    assert_eq!(stdout(&args), "3 plus 4 is 7.\n");
    // As some editors begin it.
    let ids = |args: &[&str]| json(args)["ids"].clone();
    let expected = ids(&["run", "-p", "What is 3 plus 4?", "--temp", "0", "--json"]);
    std::fs::write(file, "\u{feff}What is 3 plus 4?\n").unwrap();
    let with_mark = ["run", "-f", file, "--temp", "0", "--json"];
    assert_eq!(ids(&with_mark), expected);
    let args = ["run", "--file", "-", "--temp", "0"];
    let text = success(&args, sterna_with_input(&args, "What is 3 plus 4?"));
    assert_eq!(text, "3 plus 4 is 7.\n");
    let message = refusal(&["run", "-f", "no/such/file"]);
    assert!(message.contains("no/such/file: cannot read: "), "{message}");
    let both = sterna(&["run", "-f", file, "-p", "x"]);
    assert_eq!(both.status.code(), Some(2));
}

#[test]
fn short_flags_stand_for_long_ones() {
    let long = [
        "--max-tokens",
        "20",
        "--ctx",
        "64",
        "--threads",
        "1",
        "--temperature",
        "1",
        "--seed",
        "5",
    ];
    let short = ["-n", "20", "-c", "64", "-t", "1", "--temp", "1", "-s", "5"];
    let tell =
        |flags: &[&str]| json(&[&["run", "-p", STORY, "--json"], flags].concat())["ids"].clone();
    assert_eq!(tell(&short), tell(&long));
    let others = [
        "--n-predict",
        "20",
        "--ctx-size",
        "64",
        "-t",
        "1",
        "--temp",
        "1",
        "-s",
        "5",
    ];
    assert_eq!(tell(&others), tell(&long));
}

#[test]
fn quiet_leaves_text_warnings_and_errors() {
    let base = testdata("stories260K/hf");
    let base = base.to_str().unwrap();
    for args in [
        &["run", "-q", "-p", "What is 3 plus 4?"][..],
        &["--quiet", "run", base, "-p", "Once", "-n", "3"],
    ] {
        let output = sterna(args);
        assert_eq!(String::from_utf8(output.stderr.clone()).unwrap(), "");
        assert!(!success(args, output).is_empty());
    }
    let args = ["run", base, "-q", "-p", "Once", "-n", "1", "-c", "600"];
    let output = sterna(&args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.starts_with("warning: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
    let message = refusal(&["run", "-q", "no such model"]);
    assert!(message.starts_with("error: no such model: "), "{message}");
}

#[test]
fn numbers_are_refused_by_what_they_may_be() {
    for (args, message) in [
        (
            &["run", "--seed", "-1"][..],
            "'-1' for '--seed <N>': expected a whole number from 0 to 18446744073709551615; without",
        ),
        (
            &["run", "-n", "-1"],
            "'--max-tokens <N>': expected a whole number from 0 to 18446744073709551615; without a maximum, the answer",
        ),
        (&["run", "--top-k", "-2"], "expected a whole number from 0"),
        (
            &["run", "--temp", "hot"],
            "'hot' for '--temperature <T>': expected a number",
        ),
        (
            &["run", "-c", "0"],
            "'--ctx <N>': expected a whole number from 1",
        ),
        (
            &["run", "-t", "-4"],
            "expected a number of threads from 1 to 1024",
        ),
        (
            &["run", "--gpu-layers", "-1"],
            "expected a whole number from 0",
        ),
        (
            &["logits", "builtin", "--chunk", "-1"],
            "invalid value '-1' for '--chunk",
        ),
        (
            &["serve", "x", "--port", "-1"],
            "invalid value '-1' for '--port",
        ),
        (
            &["run", "--stop", ""],
            "expected text that ends the answer, found none",
        ),
    ] {
        let output = sterna(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(
            stderr.contains(message) && !stderr.contains("tip:"),
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn a_prompt_without_text_is_refused_by_a_chat_model_only() {
    for prompt in ["", " \n"] {
        let message = refusal(&["run", "-p", prompt]);
        assert!(message.contains("the prompt is empty"), "{message}");
    }
    let args = ["run"];
    let output = sterna_with_input(&args, "\n");
    assert_eq!(output.status.code(), Some(1));
    // A text may begin with nothing, if the tokenizer adds a token.
    let message = refusal(&["run", "--raw", "-p", ""]);
    assert!(message.contains("the prompt has no tokens"), "{message}");
    let base = testdata("stories260K/hf");
    let args = ["run", base.to_str().unwrap(), "-p", "", "-n", "5"];
    assert!(stdout(&args).len() > 5);
}

#[test]
fn answers_match_what_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let schema = folder.path().join("schema.json");
    let person = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["name", "age"],
        "additionalProperties": false}"#;
    fs::write(&schema, person).unwrap();
    let grammar = folder.path().join("steps.lark");
    fs::write(
        &grammar,
        "start: step{2}\nstep: \"- \" /[a-z ]{3,12}/ \"\\n\"",
    )
    .unwrap();
    let (schema, grammar) = (schema.to_str().unwrap(), grammar.to_str().unwrap());
    let is_person = |text: &str| {
        let person: Value = serde_json::from_str(text).unwrap();
        person["name"].is_string() && person["age"].is_u64()
    };
    let is_list = |text: &str| text.lines().count() == 2 && text.starts_with("- ");
    let is_object = |text: &str| serde_json::from_str::<Value>(text).unwrap().is_object();
    let is_number = |text: &str| text.parse::<u8>().is_ok();
    type Case<'a> = (&'a [&'a str], fn(&str) -> bool);
    let cases: [Case<'_>; 5] = [
        (&["--json-schema", schema], is_person),
        (&["-j", person], is_person),
        (&["--json-object", "--repeat-penalty", "1.5"], is_object),
        (&["--regex", "[1-9][0-9]?"], is_number),
        (&["--grammar", grammar], is_list),
    ];
    for (flags, holds) in cases {
        for sampling in [&["--temperature", "0"][..], &["--seed", "4"]] {
            let asked = ["run", "-p", STORY, "--json", "--speculate"];
            let report = json(&[&asked[..], flags, sampling].concat());
            let text = report["text"].as_str().unwrap();
            assert!(holds(text), "{flags:?}: {text}");
            let stop = report["stop"].as_str().unwrap();
            assert!(
                ["complete", "stop_token"].contains(&stop),
                "{flags:?}: {stop}"
            );
        }
    }
    // A space that is asked for is shown.
    assert_eq!(stdout(&["run", "-p", STORY, "--regex", "  fox"]), "  fox\n");
}

#[test]
fn what_no_answer_can_match_is_refused() {
    for (flags, message) in [
        (&["-j", "{"][..], "JSON schema: expected JSON, found none"),
        (&["-j", "no-such.json"], "no-such.json"),
        (
            &["-j", r#"{"type": "objekt"}"#],
            "JSON schema: /type: Invalid type: objekt",
        ),
        (
            &["--regex", "("],
            "regular expression: regex parse error: unclosed group",
        ),
    ] {
        let said = refusal(&[&["run", "-p", STORY], flags].concat());
        assert!(said.contains(message), "{flags:?}: {said}");
    }
}
