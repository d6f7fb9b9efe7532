//! Models that are loaded when they are asked for, by request, and make room for others.

use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::{
    self, Answer, Running, adapter, loaded, model, open, send, start_with, unloaded,
};
use serde_json::{Value, json};
use sterna::native::{BUILTIN, LocalModel, builtin};
use sterna::{Error, ErrorCode};
use sterna_engine::plan::{HeadOptions, HeadScreen, PlanOptions};
use sterna_engine::{Cpu, SessionOptions};
use sterna_format::DType;
use sterna_server::{EngineOptions, Keys, Models, Served, Server, Settings};

const ADMIN: &str = "the key of an operator";
const CLIENT: &str = "the key of a client";

/// Records of the log.
type Log = Arc<Mutex<Vec<Value>>>;

/// A server of `models`, for which there is memory for `n_models` of the size of the built-in one.
fn serve(models: impl Into<Models<Cpu>>, n_models: Option<u64>) -> (Running, Log) {
    serve_on(1, models, n_models)
}

/// The same with so many engines.
fn serve_on(
    n_engines: usize,
    models: impl Into<Models<Cpu>>,
    n_models: Option<u64>,
) -> (Running, Log) {
    let mut keys = Keys::none();
    let digest = |key: &str| blake3::hash(key.as_bytes()).to_hex();
    let list = format!("ops {} admin\nann {}", digest(ADMIN), digest(CLIENT));
    keys.add_list(&list).unwrap();
    let log = Log::default();
    let written = Arc::clone(&log);
    let settings = Settings {
        keys,
        devices: vec!["CPU".to_owned(); n_engines],
        engine: EngineOptions {
            models_bytes: n_models.map(|n| n * model("x", 16).n_bytes()),
            ..Settings::default().engine
        },
        log: Arc::new(move |record| written.lock().unwrap().push(record.clone().into())),
        ..Settings::default()
    };
    (start_with(models, settings), log)
}

/// The built-in model under this name, loaded when it is asked for.
fn lazy(name: &str) -> Served<Cpu> {
    unloaded(name, |engines| Ok(loaded(engines.len())))
}

fn post(server: &Running, path: &str, key: &str, body: &Value) -> Answer {
    server.post_with(path, body, &[("x-api-key", key)])
}

fn question(model: &str, n: usize) -> Value {
    json!({"model": model, "prompt": "Once upon a time", "seed": 7, "max_tokens": n, "ignore_eos": true})
}

/// What the model says, or why it says nothing.
fn ask_for(server: &Running, model: &str, n: usize) -> Result<String, (u16, String)> {
    let answer = post(server, "/v1/completions", CLIENT, &question(model, n));
    match answer.status {
        200 => Ok(answer.json()["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned()),
        status => Err((status, answer.json()["error"]["message"].to_string())),
    }
}

fn ask(server: &Running, model: &str) -> String {
    ask_for(server, model, 12).unwrap()
}

/// Names of the models, each with what there is of it.
fn stages(server: &Running) -> Vec<(String, String)> {
    let list = server.get("/v1/models", &[("x-api-key", CLIENT)]).json();
    let models = list["data"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    models
        .map(|model| (text(&model["id"]), text(&model["status"]["value"])))
        .collect()
}

/// The names of those that are loaded.
fn names(server: &Running) -> Vec<String> {
    let loaded = stages(server).into_iter();
    let loaded = loaded.filter(|(_, stage)| stage == "loaded");
    loaded.map(|(name, _)| name).collect()
}

fn metrics(server: &Running) -> String {
    let answer = server.get("/metrics", &[("x-api-key", CLIENT)]);
    answer.text().to_owned()
}

fn has_figures(server: &Running, figures: &[&str]) {
    let text = metrics(server);
    for figure in figures {
        assert!(text.contains(figure), "{figure}: {text}");
    }
}

/// What the log says of models: the actions, each with the name.
fn actions(log: &Log) -> Vec<(String, String)> {
    let log = log.lock().unwrap();
    let own = log.iter().filter(|record| record["event"] == "model");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    own.map(|record| (text(&record["action"]), text(&record["model"])))
        .collect()
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    let pair = |(a, b): &(&str, &str)| ((*a).to_owned(), (*b).to_owned());
    all.iter().map(pair).collect()
}

#[test]
fn a_model_is_loaded_when_a_request_names_it() {
    for n_engines in [1, 2] {
        let there = common::model_on(n_engines, "there", 4096);
        let (server, log) = serve_on(n_engines, vec![there, lazy("lazy")], None);
        let before = pairs(&[("there", "loaded"), ("lazy", "unloaded")]);
        assert_eq!(stages(&server), before);
        has_figures(&server, &[r#"sterna_model_loaded{model="lazy"} 0"#]);
        let expected = ask(&server, "there");
        assert_eq!(ask(&server, "lazy"), expected);
        assert_eq!(names(&server), ["there", "lazy"]);
        assert_eq!(actions(&log), pairs(&[("load", "lazy")]));
        // It stays.
        assert_eq!(ask(&server, "lazy"), expected);
        has_figures(
            &server,
            &[
                r#"sterna_model_loads_total{model="lazy",result="ok"} 1"#,
                r#"sterna_model_loaded{model="lazy"} 1"#,
            ],
        );
    }
}

#[test]
fn others_are_answered_while_a_model_is_loaded() {
    let (go, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let slow = unloaded("slow", move |engines| {
        gate.lock().unwrap().recv().unwrap();
        Ok(loaded(engines.len()))
    });
    let (server, _) = serve(vec![model("quick", 4096), slow], None);
    let expected = ask(&server, "quick");
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| ask(&server, "slow")))
            .collect();
        let loading = || stages(&server)[1].1 == "loading";
        while !loading() {
            thread::yield_now();
        }
        for _ in 0..3 {
            assert_eq!(ask(&server, "quick"), expected);
        }
        assert!(loading() && waiting.iter().all(|one| !one.is_finished()));
        go.send(()).unwrap();
        for one in waiting {
            assert_eq!(one.join().unwrap(), expected);
        }
    });
    has_figures(
        &server,
        &[r#"sterna_model_loads_total{model="slow",result="ok"} 1"#],
    );
}

#[test]
fn whoever_waits_for_a_model_gets_the_error_of_loading_it() {
    let n_tried = AtomicUsize::new(0);
    let broken = unloaded("broken", move |engines| {
        match n_tried.fetch_add(1, Ordering::SeqCst) {
            0 => Err(Error::new(ErrorCode::OutOfMemory, "no memory today")),
            1 => panic!("on purpose"),
            _ => Ok(loaded(engines.len())),
        }
    });
    let (server, log) = serve(vec![model("other", 4096), broken], None);
    let (status, message) = ask_for(&server, "broken", 5).unwrap_err();
    assert_eq!(status, 503);
    assert!(
        message.contains("loading broken: no memory today"),
        "{message}"
    );
    let (status, message) = ask_for(&server, "broken", 5).unwrap_err();
    assert_eq!(status, 500);
    assert!(message.contains("panicked"), "{message}");
    assert_eq!(names(&server), ["other"]);
    assert_eq!(ask(&server, "broken"), ask(&server, "other"));
    let said = [
        ("load_failed", "broken"),
        ("load_failed", "broken"),
        ("load", "broken"),
    ];
    assert_eq!(actions(&log), pairs(&said));
    has_figures(
        &server,
        &[r#"sterna_model_loads_total{model="broken",result="failed"} 2"#],
    );
}

#[test]
fn the_least_recently_used_makes_room_unless_it_is_pinned() {
    let (server, log) = serve(Vec::from(["a", "b", "c", "d"].map(lazy)), Some(2));
    let expected = ask(&server, "a");
    assert_eq!(ask(&server, "b"), expected);
    assert_eq!(names(&server), ["a", "b"]);
    ask(&server, "a");
    assert_eq!(ask(&server, "c"), expected);
    assert_eq!(names(&server), ["a", "c"]);
    let pin = |model: &str, pin: bool| {
        let body = json!({"model": model, "pin": pin});
        let answer = post(&server, "/v1/models/load", ADMIN, &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        assert_eq!(
            (&answer["status"]["value"], &answer["pinned"]),
            (&json!("loaded"), &json!(pin))
        );
    };
    pin("a", true);
    assert_eq!(ask(&server, "b"), expected);
    assert_eq!(names(&server), ["a", "b"]);
    pin("b", true);
    // All that is there has to stay.
    let (status, message) = ask_for(&server, "d", 5).unwrap_err();
    assert_eq!(status, 503);
    assert!(message.contains("the model d has"), "{message}");
    pin("a", false);
    assert_eq!(ask(&server, "d"), expected);
    assert_eq!(names(&server), ["b", "d"]);
    let said = [
        ("load", "a"),
        ("load", "b"),
        ("evict", "b"),
        ("load", "c"),
        ("evict", "c"),
        ("load", "b"),
        ("evict", "a"),
        ("load", "d"),
    ];
    assert_eq!(actions(&log), pairs(&said));
    has_figures(
        &server,
        &[
            r#"sterna_model_unloads_total{model="b",reason="memory"} 1"#,
            r#"sterna_model_loaded{model="a"} 0"#,
        ],
    );
}

#[test]
fn models_that_are_in_use_take_turns() {
    for n_engines in [1, 2] {
        let (server, _) = serve_on(n_engines, Vec::from(["a", "b", "c"].map(lazy)), Some(1));
        let expected = ask_for(&server, "a", 60).unwrap();
        thread::scope(|scope| {
            let server = &server;
            let asks: Vec<_> = (0..12)
                .map(|i| scope.spawn(move || ask_for(server, ["a", "b", "c"][i % 3], 60)))
                .collect();
            for answer in asks {
                assert_eq!(answer.join().unwrap().unwrap(), expected);
            }
        });
        assert_eq!(names(&server).len(), 1);
    }
}

#[test]
fn an_answer_ends_with_the_model_that_it_began_with() {
    let (server, log) = serve(vec![lazy("a")], Some(1));
    let expected = ask_for(&server, "a", 200).unwrap();
    let mut stream = server.connect();
    let mut body = question("a", 200);
    body["stream"] = true.into();
    let body = body.to_string();
    let headers = [("Content-Type", "application/json"), ("x-api-key", CLIENT)];
    send(
        &mut stream,
        "POST /v1/completions",
        &headers,
        body.as_bytes(),
    );
    // Once it has begun.
    stream.read_exact(&mut [0; 400]).unwrap();
    let answer = post(&server, "/v1/models/unload", ADMIN, &json!({"model": "a"}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["status"]["value"], "unloaded");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    // A request loads it again, once the memory is free.
    assert_eq!(ask_for(&server, "a", 200).unwrap(), expected);
    assert_eq!(
        actions(&log),
        pairs(&[("load", "a"), ("unload", "a"), ("load", "a")])
    );
    has_figures(
        &server,
        &[r#"sterna_model_unloads_total{model="a",reason="request"} 1"#],
    );
}

#[test]
fn operators_load_models_that_the_server_did_not_begin_with() {
    let models = Models::from(vec![model("fixed", 4096)]).with_others(|name| match name {
        "/models/new.gguf" => Ok(lazy("new")),
        "/models/fixed.gguf" => Ok(lazy("fixed")),
        other => Err(format!("{other}: no such file")),
    });
    let (server, log) = serve(models, None);
    let load = |key: &str, body: Value| {
        let answer = post(&server, "/v1/models/load", key, &body);
        (answer.status, answer.json())
    };
    let new = json!({"model": "/models/new.gguf"});
    assert_eq!(load(CLIENT, new.clone()).0, 403);
    let (status, answer) = load(ADMIN, new.clone());
    assert_eq!((status, &answer["id"]), (200, &json!("new")), "{answer}");
    assert_eq!(answer["pinned"], false);
    assert_eq!(names(&server), ["fixed", "new"]);
    assert_eq!(ask(&server, "new"), ask(&server, "fixed"));
    for (name, message) in [
        ("/models/new.gguf", "there is a model `new`"),
        ("/models/fixed.gguf", "there is a model `fixed`"),
        ("/no/such.gguf", "/no/such.gguf: no such file"),
    ] {
        let (status, answer) = load(ADMIN, json!({"model": name}));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")));
        assert!(
            answer["error"]["message"]
                .as_str()
                .unwrap()
                .contains(message),
            "{answer}"
        );
    }
    let unload = |key: &str, name: &str| {
        let answer = post(&server, "/v1/models/unload", key, &json!({"model": name}));
        (answer.status, answer.json())
    };
    assert_eq!(unload(CLIENT, "new").0, 403);
    assert_eq!(unload(ADMIN, "none").0, 404);
    let (status, answer) = unload(ADMIN, "fixed");
    assert_eq!(status, 400);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("there to stay")
    );
    for _ in 0..2 {
        let (status, answer) = unload(ADMIN, "new");
        assert_eq!(
            (status, &answer["status"]["value"]),
            (200, &json!("unloaded"))
        );
    }
    assert_eq!(names(&server), ["fixed"]);
    // By its name now.
    assert_eq!(load(ADMIN, json!({"model": "new"})).0, 200);
    assert_eq!(
        actions(&log),
        pairs(&[("load", "new"), ("unload", "new"), ("load", "new")])
    );
    let log = log.lock().unwrap();
    let by_whom = log
        .iter()
        .find(|record| record["event"] == "models")
        .unwrap();
    assert_eq!(
        (&by_whom["key"], &by_whom["action"]),
        (&json!("ops"), &json!("load"))
    );
}

#[test]
fn a_model_that_is_there_is_loaded_again_by_its_path() {
    let models = Models::from(vec![model("fixed", 4096)]).with_others(|name| match name {
        "/models/new.gguf" | "/models/../models/new.gguf" => {
            Ok(lazy("new").with_origin("/models/new.gguf".to_owned()))
        }
        other => Ok(lazy("new").with_origin(other.to_owned())),
    });
    let (server, log) = serve(models, None);
    for (name, pin) in [
        ("/models/new.gguf", false),
        ("/models/new.gguf", true),
        ("/models/../models/new.gguf", true),
        ("new", true),
    ] {
        let body = match pin {
            true => json!({"model": name, "pin": true}),
            false => json!({"model": name}),
        };
        let answer = post(&server, "/v1/models/load", ADMIN, &body);
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
        let answer = answer.json();
        assert_eq!(
            (&answer["id"], &answer["pinned"]),
            (&json!("new"), &json!(pin))
        );
    }
    assert_eq!(names(&server), ["fixed", "new"]);
    assert_eq!(actions(&log), pairs(&[("load", "new")]));
    // Another one that is called so isn't that one.
    let body = json!({"model": "/elsewhere/new.gguf"});
    let answer = post(&server, "/v1/models/load", ADMIN, &body);
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("there is a model `new`"));
}

#[test]
fn a_model_that_there_is_no_room_for_takes_no_place() {
    let mut keys = Keys::none();
    let digest = blake3::hash(ADMIN.as_bytes()).to_hex();
    keys.add_list(&format!("ops {digest} admin")).unwrap();
    let need = model("x", 16).n_bytes();
    let settings = |models_bytes| Settings {
        keys: keys.clone(),
        engine: EngineOptions {
            models_bytes: Some(models_bytes),
            ..Settings::default().engine
        },
        ..Settings::default()
    };
    // Nor does a server begin with one.
    let refused = Server::start(vec![lazy("a")], settings(need - 1));
    let message = format!(
        "the model a has {need} bytes: expected at most {}",
        need - 1
    );
    assert_eq!(refused.err().unwrap().to_string(), message);
    let large = |name: &str| {
        let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
        let plan = files.plan(&PlanOptions::default()).unwrap();
        let head = HeadOptions {
            dtype: Some(DType::F32),
            screen: HeadScreen::Off,
        };
        let plan = plan.with_head(head).unwrap();
        let session = SessionOptions::new(64);
        let served = Served::new(name, &files, plan, session, &mut Vec::new()).unwrap();
        served.with_loader(|engines| Ok(loaded(engines.len())))
    };
    assert!(large("large").n_bytes() > need);
    let models = Models::from(Vec::from(["a", "b"].map(lazy)));
    let models = models.with_others(move |name| match name.strip_prefix("/large/") {
        Some(name) => Ok(large(name)),
        None => Ok(lazy(name.trim_start_matches('/'))),
    });
    let server = start_with(models, settings(need));
    let load = |name: String| {
        let answer = post(&server, "/v1/models/load", ADMIN, &json!({"model": name}));
        (answer.status, answer.text().to_owned())
    };
    for i in 0..64 {
        let (status, text) = load(format!("/large/l{i}"));
        assert_eq!(status, 503, "{text}");
        assert!(text.contains(&format!("the model l{i} has")), "{text}");
    }
    let list = server.get("/v1/models", &[("x-api-key", ADMIN)]).json();
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
    let (status, text) = load("/c".to_owned());
    assert_eq!(status, 200, "{text}");
    let answer = post(&server, "/v1/completions", ADMIN, &question("c", 5));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn a_model_that_nobody_uses_is_unloaded_after_a_while() {
    let (sender, records) = mpsc::channel();
    let sender = Mutex::new(sender);
    let mut keys = Keys::none();
    let digest = blake3::hash(ADMIN.as_bytes()).to_hex();
    keys.add_list(&format!("ops {digest} admin")).unwrap();
    let settings = Settings {
        keys,
        engine: EngineOptions {
            models_idle: Some(Duration::from_millis(200)),
            ..Settings::default().engine
        },
        log: Arc::new(move |record| {
            // Once the test has ended nobody reads.
            let _ = sender.lock().unwrap().send(Value::from(record.clone()));
        }),
        ..Settings::default()
    };
    let models = vec![model("fixed", 4096), lazy("a"), lazy("pinned")];
    let server = start_with(models, settings);
    let next = |action: &str| loop {
        let record = records.recv_timeout(Duration::from_secs(120)).unwrap();
        if record["event"] == "model" {
            assert_eq!(record["action"], action, "{record}");
            return record["model"].as_str().unwrap().to_owned();
        }
    };
    let body = json!({"model": "pinned", "pin": true});
    let answer = post(&server, "/v1/models/load", ADMIN, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(next("load"), "pinned");
    let ask = |n| {
        let answer = post(&server, "/v1/completions", ADMIN, &question("a", n));
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0]["text"].clone()
    };
    let expected = ask(20);
    for _ in 0..2 {
        assert_eq!(next("load"), "a");
        assert_eq!(next("idle"), "a");
        // A request loads it again.
        assert_eq!(ask(20), expected);
    }
    assert_eq!(next("load"), "a");
    assert_eq!(next("idle"), "a");
    let list = server.get("/v1/models", &[("x-api-key", ADMIN)]).json();
    let stages: Vec<_> = (0..3)
        .map(|i| list["data"][i]["status"]["value"].clone())
        .collect();
    assert_eq!(stages, ["loaded", "unloaded", "loaded"]);
    let figures = server.get("/metrics", &[("x-api-key", ADMIN)]);
    let figure = r#"sterna_model_unloads_total{model="a",reason="idle"} 3"#;
    assert!(figures.text().contains(figure), "{}", figures.text());
    // Without the pin it goes, too.
    let body = json!({"model": "pinned", "pin": false});
    assert_eq!(post(&server, "/v1/models/load", ADMIN, &body).status, 200);
    assert_eq!(next("idle"), "pinned");
}

#[test]
fn a_server_has_no_other_models_unless_it_opens_them() {
    let (server, _) = serve(vec![lazy("a")], None);
    let answer = post(
        &server,
        "/v1/models/load",
        ADMIN,
        &json!({"model": "/etc/passwd"}),
    );
    assert_eq!(answer.status, 400);
    assert!(
        answer
            .text()
            .contains("no models but those that it began with")
    );
}

#[test]
fn adapters_come_and_go_with_their_model() {
    let path = adapter(1).to_str().unwrap().to_owned();
    let own = lazy("a")
        .with_adapters(open)
        .with_adapter("own", 1.0, move || Ok(open(&path).unwrap()));
    let (server, _) = serve(vec![own, lazy("b")], Some(1));
    let adapted = ask(&server, "a:own");
    let expected = ask(&server, "a");
    assert_ne!(adapted, expected);
    let load = || {
        let body = json!({"lora_name": "more", "lora_path": adapter(2), "model": "a"});
        post(&server, "/v1/load_lora_adapter", ADMIN, &body)
    };
    assert_eq!(load().status, 200);
    let more = ask(&server, "a:more");
    assert!(more != adapted && more != expected);
    // What was loaded by request would be lost.
    let (status, _) = ask_for(&server, "b", 5).unwrap_err();
    assert_eq!(status, 503);
    let body = json!({"lora_name": "more", "model": "a"});
    assert_eq!(
        post(&server, "/v1/unload_lora_adapter", ADMIN, &body).status,
        200
    );
    assert_eq!(ask(&server, "b"), expected);
    assert_eq!(names(&server), ["b"]);
    let refused = load();
    assert_eq!(refused.status, 400);
    assert!(
        refused.text().contains("isn't loaded"),
        "{}",
        refused.text()
    );
    // Its own comes back with it.
    assert_eq!(ask(&server, "a:own"), adapted);
    assert_eq!(load().status, 200);
    let body = json!({"model": "a"});
    assert_eq!(post(&server, "/v1/models/unload", ADMIN, &body).status, 200);
    assert_eq!(ask_for(&server, "a:more", 5).unwrap_err().0, 404);
    assert_eq!(ask(&server, "a:own"), adapted);
}
