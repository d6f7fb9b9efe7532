//! Trained models by others, in every form they come in, against another implementation's figures.

use std::fs;

use crate::common::{best, ids, json, logits, sterna, testdata, testdata_json};
use serde_json::Value;

/// The forms of a model in the test data, and how far its figures may be off in each.
struct Form {
    model: &'static str,
    file: &'static str,
    /// Bound on the mean negative log-likelihood's error, in nats.
    nll: f64,
    /// Least margin at which the best token must be the same.
    margin: f64,
}

/// Float weights as they are: only the order of sums differs from the reference.
const EXACT: f64 = 1e-4;
/// Ternary layers round activations to int8, and a last bit can flip a rounding.
const TERNARY: f64 = 0.005;

const FORMS: [Form; 8] = [
    Form {
        model: "stories260K",
        file: "hf",
        nll: EXACT,
        margin: 0.01,
    },
    Form {
        model: "stories260K",
        file: "stories260K-f32.gguf",
        nll: EXACT,
        margin: 0.01,
    },
    // Weights are rounded in these two, the reference's are not.
    Form {
        model: "stories260K",
        file: "stories260K-f16.gguf",
        nll: 0.001,
        margin: 0.1,
    },
    Form {
        model: "stories260K",
        file: "stories260K-q8_0.gguf",
        nll: 0.01,
        margin: 0.5,
    },
    Form {
        model: "bitllama-3M",
        file: "hf-packed",
        nll: TERNARY,
        margin: 0.5,
    },
    Form {
        model: "bitllama-3M",
        file: "bitllama-3M-f16.gguf",
        nll: TERNARY,
        margin: 0.5,
    },
    Form {
        model: "bitllama-3M",
        file: "bitllama-3M-tq1_0.gguf",
        nll: TERNARY,
        margin: 0.5,
    },
    Form {
        model: "bitllama-3M",
        file: "bitllama-3M-tq2_0.gguf",
        nll: TERNARY,
        margin: 0.5,
    },
];

impl Form {
    fn path(&self) -> String {
        testdata(&format!("{}/{}", self.model, self.file))
            .to_str()
            .unwrap()
            .to_owned()
    }

    fn expected(&self, file: &str) -> Value {
        testdata_json(&format!("{}/expected/{file}", self.model))
    }
}

/// The text of `ids`, by the tokenizer in the model's Hugging Face folder.
fn decode(form: &Form, ids: &[u32]) -> String {
    let folder = if form.model == "stories260K" {
        "hf"
    } else {
        "hf-packed"
    };
    let json = fs::read(testdata(&format!("{}/{folder}/tokenizer.json", form.model))).unwrap();
    let tokenizer = sterna_text::Tokenizer::from_hf_json(&json, None).unwrap();
    tokenizer.decode(ids, sterna_text::Decode { skip_special: true })
}

#[test]
fn perplexity_is_the_expected_one() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    for form in &FORMS {
        let path = form.path();
        let (mut sum, mut expected_sum, mut n_tokens) = (0.0, 0.0, 0);
        for window in form.expected("perplexity.json")["windows"]
            .as_array()
            .unwrap()
        {
            let ids = ids(&window["text_ids"]);
            fs::write(&text, decode(form, &ids[1..])).unwrap();
            let file = text.to_str().unwrap();
            let report = json(&["perplexity", &path, "--file", file, "--json"]);
            assert_eq!(report["n_tokens"], window["n"], "{path}");
            sum += report["nll"].as_f64().unwrap() * window["n"].as_f64().unwrap();
            expected_sum += window["sum_nll"].as_f64().unwrap();
            n_tokens += window["n"].as_u64().unwrap();
            let perplexity = report["perplexity"].as_f64().unwrap();
            assert!((perplexity.ln() - report["nll"].as_f64().unwrap()).abs() < 1e-9);
        }
        let error = (sum - expected_sum).abs() / n_tokens as f64;
        assert!(
            error < form.nll,
            "{path}: mean negative log-likelihood is off by {error}"
        );
    }
}

#[test]
fn best_tokens_are_the_expected_ones() {
    for form in &FORMS {
        for greedy in form.expected("greedy.json")["greedy"].as_array().unwrap() {
            let (prompt, generated) = (ids(&greedy["prompt_ids"]), ids(&greedy["generated_ids"]));
            let all = [&prompt[..], &generated[..generated.len() - 1]].concat();
            let rows = logits(&form.path(), &all, &[]);
            let margins = greedy["top1_minus_top2"].as_array().unwrap();
            for (i, (&expected, margin)) in generated.iter().zip(margins).enumerate() {
                if margin.as_f64().unwrap() > form.margin {
                    let found = best(&rows[prompt.len() - 1 + i]);
                    assert_eq!(
                        found,
                        expected,
                        "{}: token {i} after {prompt:?}",
                        form.path()
                    );
                }
            }
        }
    }
}

#[test]
fn prompts_have_the_expected_ids() {
    for form in &FORMS {
        for greedy in form.expected("greedy.json")["greedy"].as_array().unwrap() {
            let prompt = greedy["prompt"].as_str().unwrap();
            let report = json(&["tokenize", &form.path(), "--text", prompt, "--json"]);
            assert_eq!(
                ids(&report["ids"]),
                ids(&greedy["prompt_ids"]),
                "{}: {prompt}",
                form.path()
            );
        }
    }
}

#[test]
fn logits_are_the_expected_ones() {
    for form in FORMS.iter().filter(|form| form.nll == EXACT) {
        let ids = ids(&form.expected("logits.json")["ids"]);
        let npy = fs::read(testdata(&format!("{}/expected/logits.npy", form.model))).unwrap();
        // The header's length stands at byte 8, the values follow the header.
        let start = 10 + usize::from(u16::from_le_bytes([npy[8], npy[9]]));
        let expected = npy[start..]
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| f32::from_le_bytes(b));
        let found = logits(&form.path(), &ids, &["--chunk", "7"]).concat();
        for (i, (found, expected)) in found.into_iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() < 1e-3,
                "{}: logit {i}: {found}, {expected}",
                form.path()
            );
        }
    }
}

#[test]
fn an_f16_cache_changes_little() {
    let ids = ids(&FORMS[0].expected("logits.json")["ids"]);
    let (f32, f16) = (
        logits(&FORMS[0].path(), &ids, &[]),
        logits(&FORMS[0].path(), &ids, &["--cache", "f16"]),
    );
    assert_ne!(f32, f16);
    for (a, b) in f32.concat().iter().zip(f16.concat()) {
        assert!((a - b).abs() < 0.05, "{a}, {b}");
    }
}

#[test]
fn split_files_are_found_by_the_first() {
    let folder = testdata("reference-gguf/llama-split");
    let mut parts: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        })
        .collect();
    parts.sort();
    assert!(parts.len() > 1);
    let ids = [1, 2, 3];
    // The folder holds no other model, so it stands for the first part.
    let whole = logits(folder.to_str().unwrap(), &ids, &[]);
    assert_eq!(logits(parts[0].to_str().unwrap(), &ids, &[]), whole);
    let output = sterna(&["inspect", parts[1].to_str().unwrap()]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("part 2 of a split set, give the first one"),
        "{stderr}"
    );
}

#[test]
fn windows_begin_alike_in_every_form_of_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    fs::write(
        &text,
        "Once upon a time, there was a little girl. ".repeat(20),
    )
    .unwrap();
    let measure = |path: &str| {
        let file = text.to_str().unwrap();
        json(&[
            "perplexity",
            path,
            "--file",
            file,
            "--window",
            "32",
            "--json",
        ])
    };
    for model in ["stories260K", "bitllama-3M"] {
        let of_model = FORMS.iter().filter(|form| form.model == model);
        let reports: Vec<Value> = of_model.map(|form| measure(&form.path())).collect();
        for report in &reports {
            assert_eq!(report["n_tokens"], reports[0]["n_tokens"], "{model}");
            let (a, b) = (report["nll"].as_f64(), reports[0]["nll"].as_f64());
            assert!(
                (a.unwrap() - b.unwrap()).abs() < 0.01,
                "{model}: {a:?}, {b:?}"
            );
        }
    }
}

#[test]
fn a_sentencepiece_file_will_do_for_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("stories260K/hf");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    let tokenizer = testdata("stories260K/tok512.model");
    fs::copy(tokenizer, dir.path().join("tokenizer.model")).unwrap();
    for text in ["Once upon a time", "Zoë's 3 cats\n"] {
        let tokenize = |model: &std::path::Path| {
            json(&[
                "tokenize",
                model.to_str().unwrap(),
                "--text",
                text,
                "--json",
            ])
        };
        assert_eq!(tokenize(dir.path()), tokenize(&source), "{text}");
    }
}

#[test]
fn rows_of_no_token_are_odd() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("reference-logits/llama");
    let file = "model.safetensors";
    fs::copy(source.join(file), dir.path().join(file)).unwrap();
    let mut config = testdata_json("reference-logits/llama/config.json");
    let model = dir.path().to_str().unwrap();
    let out = dir.path().join("x.safetensors");
    let args = ["logits", model, "--ids", "1", "-o", out.to_str().unwrap()];
    let mut told = |n_vocab: u64| {
        config["vocab_size"] = n_vocab.into();
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let output = sterna(&args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let expected = "vocab_size: expected 384, the rows of the embedding table, found 380";
    assert!(told(380).contains(expected));
    assert!(!told(384).contains("vocab_size"));
}

#[test]
fn vectors_of_texts_are_printed_and_written() {
    let dir = tempfile::tempdir().unwrap();
    let texts = ["A fox named Ruby", "A red ball", "A fox named Ruby"];
    let file = dir.path().join("texts.txt");
    fs::write(&file, texts.join("\n")).unwrap();
    let file = file.to_str().unwrap();
    let out = sterna(&["embed", "builtin", "--file", file, "--pooling", "mean"]);
    assert!(out.status.success(), "{out:?}");
    let lines: Vec<Value> = String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let vectors: Vec<Vec<f64>> = (lines.iter().enumerate())
        .map(|(i, line)| {
            assert_eq!(line["index"], i);
            let values = line["embedding"].as_array().unwrap();
            values.iter().map(|value| value.as_f64().unwrap()).collect()
        })
        .collect();
    assert_eq!(vectors.len(), texts.len());
    for vector in &vectors {
        let length: f64 = vector.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    assert_eq!(vectors[0], vectors[2]);
    assert!(vectors[0] != vectors[1]);

    let written = dir.path().join("out.safetensors");
    let written = written.to_str().unwrap();
    let mut call = vec![
        "embed",
        "builtin",
        "--pooling",
        "mean",
        "--json",
        "-o",
        written,
    ];
    call.extend(texts.iter().flat_map(|text| ["--text", *text]));
    let report = json(&call);
    assert_eq!(report["shape"], serde_json::json!([3, vectors[0].len()]));
    let bytes = fs::read(written).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let values = bytes[8 + header..].as_chunks().0.iter();
    let values: Vec<f32> = values.map(|b| f32::from_le_bytes(*b)).collect();
    let printed: Vec<f32> = vectors.iter().flatten().map(|&x| x as f32).collect();
    assert_eq!(values, printed);

    for (call, expected) in [
        (
            &["embed", "builtin", "--text", "A"][..],
            "it doesn't say how its vectors are pooled",
        ),
        (
            &["embed", "builtin", "--text", "A", "--pooling", "max"],
            "expected last, cls or mean, found `max`",
        ),
        (&["embed", "builtin"], "--text"),
    ] {
        let out = sterna(call);
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && error.contains(expected), "{error}");
    }
}

/// The program's backend is another than that of the engine's own tests.
#[test]
fn layers_with_states_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits.safetensors");
    let out = out.to_str().unwrap();
    for (model, ids) in [
        ("hf/lfm2", "1,2,3"),
        ("hf/qwen3.5-moe", "1,2,3"),
        ("hf/granite-hybrid", "1,2,3"),
        ("hf/jamba", "1,2,3"),
        ("hf/falcon-h1", "1,2,3"),
        ("../reference-mixtures/hf/deepseek-v3", "1,2,3"),
        ("../reference-mixtures/hf/gpt-oss-mxfp4", "1,2,3"),
        ("../reference-layers/hf/gemma4-sharing", "1,2,3"),
        ("gguf/bonsai2-ptq1_0/model.gguf", "1,2,3"),
    ] {
        let model = testdata(&format!("reference-states/{model}"));
        let model = model.display().to_string();
        let call = ["logits", &model, "--ids", ids, "--last", "-o", out];
        let made = sterna(&call);
        assert!(made.status.success(), "{model}: {made:?}");
        let bytes = fs::read(out).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let values = bytes[8 + header..].as_chunks().0.iter();
        assert!(values.map(|b| f32::from_le_bytes(*b)).all(f32::is_finite));
    }
}
