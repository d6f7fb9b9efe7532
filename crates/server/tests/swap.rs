//! Groups of a model's weights are replaced while it is served.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::{Answer, Running, adapter, loaded, model_on, open, send, start_with};
use serde_json::{Value, json};
use sterna::native::{BUILTIN, LocalModel, Located, builtin};
use sterna::swap::{Revisions, SwappedGroup};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Cpu, Model};
use sterna_server::{EngineOptions, Keys, Served, Settings};

const ADMIN: &str = "the key of an operator";
const CLIENT: &str = "the key of a client";

/// A folder with the built-in model, in which the rows of a matrix of these layers come one place later.
fn revision(name: &str, layers: &[usize]) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(from.join(file), folder.join(file)).unwrap();
    }
    let mut file = std::fs::read(from.join("model.safetensors")).unwrap();
    let begin = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..begin]).unwrap();
    for layer in layers {
        let tensor = &header[format!("model.layers.{layer}.self_attn.v_proj.weight")];
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let offsets = &tensor["data_offsets"];
        let data = begin + number(&offsets[0])..begin + number(&offsets[1]);
        file[data].rotate_right(number(&tensor["shape"][1]));
    }
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    folder
}

/// Replaces groups of all `models` by those in the folder `path`.
fn swap(
    running: &Mutex<Revisions>,
    models: &[Arc<Model<Cpu>>],
    path: &str,
    ids: &[String],
) -> sterna::Result<Vec<SwappedGroup>> {
    let files = LocalModel::open(path, Located::at(Path::new(path))?, None, None)?;
    let plan = files.plan(&PlanOptions::default())?;
    let revision = Revisions::of(&files, &plan);
    let mut running = running.lock().unwrap();
    let groups = running.choose(&revision, ids)?;
    for model in models {
        files.swap_into(model, plan.clone(), &groups)?;
    }
    Ok(running.replace(&revision, &groups))
}

/// The built-in model under this name, for so many engines, whose weights may be replaced.
fn swappable(n_engines: usize, name: &str) -> Served<Cpu> {
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let running = Mutex::new(Revisions::of(&files, &plan));
    model_on(n_engines, name, 4096)
        .with_loader(|engines| Ok(loaded(engines.len())))
        .with_adapters(open)
        .with_hash(Some("abc".to_owned()))
        .with_revisions(move |models, path, ids| swap(&running, models, path, ids))
}

fn serve(n_engines: usize, models: Vec<Served<Cpu>>, n_models: Option<u64>) -> Running {
    let mut keys = Keys::none();
    let digest = |key: &str| blake3::hash(key.as_bytes()).to_hex();
    let list = format!("ops {} admin\nann {}", digest(ADMIN), digest(CLIENT));
    keys.add_list(&list).unwrap();
    let n_bytes = models[0].n_bytes();
    let settings = Settings {
        keys,
        devices: vec!["CPU".to_owned(); n_engines],
        engine: EngineOptions {
            models_bytes: n_models.map(|n| n * n_bytes),
            ..Settings::default().engine
        },
        ..Settings::default()
    };
    start_with(models, settings)
}

fn post(server: &Running, path: &str, key: &str, body: &Value) -> Answer {
    server.post_with(path, body, &[("x-api-key", key)])
}

fn question(model: &str, n: usize) -> Value {
    // Long enough for what was computed of it to be kept.
    let prompt = "Once upon a time there was a little fox named Ruby. She lived in a small house. "
        .repeat(4);
    json!({"model": model, "prompt": prompt, "seed": 7, "max_tokens": n, "ignore_eos": true})
}

/// What the model says, and how much of the prompt was not computed again.
fn ask(server: &Running, model: &str, n: usize) -> (String, u64) {
    let answer = post(server, "/v1/completions", CLIENT, &question(model, n));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let n_cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text, n_cached.as_u64().unwrap())
}

fn replace(server: &Running, key: &str, body: Value) -> (u16, Value) {
    let answer = post(server, "/v1/models/swap", key, &body);
    (answer.status, answer.json())
}

/// The texts of a streamed answer.
fn text_of(stream: &str) -> String {
    let events = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let texts = events.map(|event| {
        let text = event["choices"][0]["text"].as_str();
        text.unwrap_or_default().to_owned()
    });
    texts.collect()
}

#[test]
fn an_answer_ends_with_the_weights_that_it_began_with() {
    const N: usize = 200;
    for n_engines in [1, 2] {
        let server = serve(n_engines, vec![swappable(n_engines, "a")], None);
        let path = revision(&format!("revision-of-{n_engines}"), &[3]);
        let (before, _) = ask(&server, "a", N);
        assert!(ask(&server, "a", N).1 > 0);
        thread::scope(|scope| {
            let (go, begun) = std::sync::mpsc::channel();
            let server = &server;
            let readers: Vec<_> = (0..2 * n_engines)
                .map(|_| {
                    let go = go.clone();
                    scope.spawn(move || {
                        let mut stream = server.connect();
                        let mut body = question("a", N);
                        body["stream"] = true.into();
                        let headers = [("Content-Type", "application/json"), ("x-api-key", CLIENT)];
                        let body = body.to_string();
                        send(
                            &mut stream,
                            "POST /v1/completions",
                            &headers,
                            body.as_bytes(),
                        );
                        // Its head, and the beginning of the answer.
                        let mut text = vec![0; 900];
                        stream.read_exact(&mut text).unwrap();
                        go.send(()).unwrap();
                        stream.read_to_end(&mut text).unwrap();
                        String::from_utf8(text).unwrap()
                    })
                })
                .collect();
            for _ in &readers {
                begun.recv().unwrap();
            }
            let body = json!({"model": "a", "revision": path, "groups": ["layer.3"]});
            let (status, answer) = replace(server, ADMIN, body);
            assert_eq!(status, 200, "{answer}");
            assert_eq!(answer["swapped"].as_array().unwrap().len(), 1);
            assert_eq!(answer["swapped"][0]["group"], "layer.3");
            assert_eq!(
                (&answer["generation"], &answer["hash"]),
                (&json!(1), &json!(null))
            );
            // What begins has the new ones, and nothing that the old ones computed.
            let (after, n_cached) = ask(server, "a", N);
            assert_eq!(n_cached, 0);
            assert_ne!(after, before);
            for reader in readers {
                let text = reader.join().unwrap();
                assert!(text.contains("data: [DONE]"), "{text}");
                assert_eq!(text_of(&text), before);
            }
            let (again, n_cached) = ask(server, "a", N);
            assert_eq!(again, after);
            assert!(n_cached > 0);
        });
        // Back, by all that differs: of a folder nobody knows what that is.
        let first = revision(&format!("first-of-{n_engines}"), &[]);
        let (status, answer) = replace(&server, ADMIN, json!({"model": "a", "revision": first}));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["generation"], 2);
        assert_eq!(ask(&server, "a", N).0, before);
        let metrics = server.get("/metrics", &[("x-api-key", CLIENT)]);
        let figure = r#"sterna_model_swaps_total{model="a"} 2"#;
        assert!(metrics.text().contains(figure), "{}", metrics.text());
    }
}

#[test]
fn adapters_stay_when_weights_are_replaced() {
    let server = serve(1, vec![swappable(1, "a")], None);
    let load = |name: &str| {
        let body = json!({"lora_name": name, "lora_path": adapter(11)});
        let answer = post(&server, "/v1/load_lora_adapter", ADMIN, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    load("early");
    let (before, _) = ask(&server, "a:early", 30);
    let path = revision("revision-adapted", &[3]);
    let (status, answer) = replace(&server, ADMIN, json!({"model": "a", "revision": path}));
    assert_eq!(status, 200, "{answer}");
    let (after, _) = ask(&server, "a:early", 30);
    assert!(after != before && after != ask(&server, "a", 30).0);
    // One that comes later is the same.
    load("late");
    assert_eq!(ask(&server, "a:late", 30).0, after);
}

#[test]
fn a_model_has_its_own_weights_once_it_is_loaded_again() {
    let models = vec![swappable(1, "a"), swappable(1, "b")];
    let server = serve(1, models, Some(2));
    let (before, _) = ask(&server, "a", 30);
    let path = revision("revision-unloaded", &[3]);
    let body = json!({"model": "a", "revision": path});
    assert_eq!(replace(&server, ADMIN, body.clone()).0, 200);
    assert_ne!(ask(&server, "a", 30).0, before);
    // The other one has its own.
    assert_eq!(ask(&server, "b", 30).0, before);
    let name = json!({"model": "a"});
    assert_eq!(post(&server, "/v1/models/unload", ADMIN, &name).status, 200);
    let (status, answer) = replace(&server, ADMIN, body);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")));
    assert!(answer.to_string().contains("isn't loaded"), "{answer}");
    let loaded = post(&server, "/v1/models/load", ADMIN, &name).json();
    assert_eq!(
        (&loaded["generation"], &loaded["hash"]),
        (&json!(0), &json!("abc"))
    );
    assert_eq!(ask(&server, "a", 30).0, before);
}

#[test]
fn what_can_not_be_replaced_stays() {
    let models = vec![swappable(1, "a"), model_on(1, "fixed", 400)];
    let server = serve(1, models, None);
    let path = revision("revision-refused", &[3]);
    let before = ask(&server, "a", 20).0;
    let body = |model: &str, revision: &Path, groups: &[&str]| json!({"model": model, "revision": revision, "groups": groups});
    let (status, answer) = replace(&server, CLIENT, body("a", &path, &[]));
    assert_eq!(status, 403, "{answer}");
    let (status, answer) = replace(&server, ADMIN, body("none", &path, &[]));
    assert_eq!((status, &answer["error"]["param"]), (404, &json!("model")));
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let other = testdata.join("reference-logits/llama");
    for (model, revision, groups, param, says) in [
        ("fixed", &path, &[][..], "model", "stay as they are"),
        (
            "a",
            &path,
            &["layer.99"],
            "revision",
            "group `layer.99`: expected one of",
        ),
        ("a", &other, &[], "revision", "as in the running model"),
        ("a", &path.join("none"), &[], "revision", "none"),
    ] {
        let (status, answer) = replace(&server, ADMIN, body(model, revision, groups));
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{answer}");
        assert!(
            error["message"].as_str().unwrap().contains(says),
            "{answer}"
        );
    }
    let (status, answer) = replace(&server, ADMIN, json!({"model": "a"}));
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("revision"))
    );
    assert_eq!(ask(&server, "a", 20).0, before);
    let model = server.get("/v1/models/a", &[("x-api-key", CLIENT)]).json();
    assert_eq!(model["generation"], 0);
}
