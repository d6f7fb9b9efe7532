//! Adapters that requests name, loaded and unloaded while the server runs.

use std::io::Read;
use std::thread;

use crate::common::{self, Running, adapter, model, open, send, start_with};
use serde_json::{Value, json};
use sterna_server::{EngineOptions, Keys, Settings};

const ADMIN: &str = "the key of an operator";
const CLIENT: &str = "the key of a client";

fn settings() -> Settings {
    let mut keys = Keys::none();
    let digest = |key: &str| blake3::hash(key.as_bytes()).to_hex();
    let list = format!("ops {} admin\nann {}", digest(ADMIN), digest(CLIENT));
    keys.add_list(&list).unwrap();
    Settings {
        keys,
        ..Settings::default()
    }
}

fn post(server: &Running, path: &str, key: &str, body: &Value) -> common::Answer {
    server.post_with(path, body, &[("x-api-key", key)])
}

fn ask(server: &Running, model: &str, seed: u64) -> Value {
    let body = json!({
        "model": model, "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "seed": seed, "max_tokens": 20,
    });
    let answer = post(server, "/v1/chat/completions", CLIENT, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["model"], model);
    answer
}

fn load(server: &Running, name: &str, salt: u32) -> common::Answer {
    let body = json!({"lora_name": name, "lora_path": adapter(salt)});
    post(server, "/v1/load_lora_adapter", ADMIN, &body)
}

#[test]
fn requests_are_answered_by_the_adapter_that_they_name() {
    let served = |salts: &[u32]| {
        let mut served = model("builtin", 400).with_adapters(open);
        for salt in salts {
            let path = adapter(*salt).to_str().unwrap().to_owned();
            let open = move || Ok(open(&path).unwrap());
            served = served.with_adapter(&format!("a{salt}"), 1.0, open);
        }
        served
    };
    let together = start_with(vec![served(&[1, 2])], settings());
    let names = ["builtin", "builtin:a1", "builtin:a2"];
    let all: Vec<Value> = thread::scope(|scope| {
        let all = (0..12).map(|i| {
            let together = &together;
            scope.spawn(move || ask(together, names[i % 3], i as u64))
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    // Alone, without others and without what is kept.
    let alone = |salts: &[u32]| {
        let engine = EngineOptions {
            parallel: 1,
            cache_bytes: 0,
            ..settings().engine
        };
        start_with(
            vec![served(salts)],
            Settings {
                engine,
                ..settings()
            },
        )
    };
    let alone = [alone(&[]), alone(&[1]), alone(&[2])];
    for (i, found) in all.iter().enumerate() {
        let expected = ask(&alone[i % 3], names[i % 3], i as u64);
        assert_eq!(found["choices"], expected["choices"], "{i}");
    }
    let said = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    let of_base = ask(&together, "builtin", 1);
    assert_ne!(said(&of_base), said(&ask(&together, "builtin:a1", 1)));
    // By its name alone, as vLLM's clients say it; what it computed is there.
    let short = ask(&together, "a1", 1);
    assert_eq!(said(&short), said(&ask(&together, "builtin:a1", 1)));
    let cached = &short["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(cached.as_u64().unwrap() > 5, "{short}");
}

#[test]
fn adapters_come_and_go_while_others_are_answered() {
    let server = start_with(vec![model("builtin", 4096).with_adapters(open)], settings());
    let body = json!({"lora_name": "red", "lora_path": adapter(3)});
    for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] {
        let refused = post(&server, path, CLIENT, &body);
        assert_eq!(refused.status, 403);
        assert_eq!(refused.json()["error"]["type"], "permission_error");
    }
    let ids = || -> Vec<String> {
        let list = server.get("/v1/models", &[("x-api-key", CLIENT)]).json();
        let models = list["data"].as_array().unwrap().iter();
        models
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(ids(), ["builtin"]);
    let loaded = load(&server, "red", 3);
    assert_eq!(loaded.status, 200, "{}", loaded.text());
    assert_eq!(loaded.json()["id"], "builtin:red");
    assert_eq!(loaded.json()["parent"], "builtin");
    assert_eq!(ids(), ["builtin", "builtin:red"]);
    let red = ask(&server, "red", 1);
    // The names are taken, the path has to be one, and so has the adapter.
    let refused = load(&server, "red", 4);
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("lora_name"))
    );
    let none = json!({"lora_name": "none", "lora_path": "/nowhere/at/all"});
    let refused = post(&server, "/v1/load_lora_adapter", ADMIN, &none);
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("lora_path"))
    );
    // An answer in progress ends as it began, though its adapter is replaced and then gone.
    let endless = json!({
        "model": "red", "prompt": "Once", "max_tokens": 600, "stream": true, "temperature": 0,
        "logit_bias": {"1": -100, "2": -100},
    });
    let streamed = |endless: &Value, act: &dyn Fn()| {
        let mut stream = server.connect();
        let headers = [("Content-Type", "application/json"), ("x-api-key", CLIENT)];
        send(
            &mut stream,
            "POST /v1/completions",
            &headers,
            endless.to_string().as_bytes(),
        );
        let mut begun = vec![0; 600];
        stream.read_exact(&mut begun).unwrap();
        act();
        stream.read_to_end(&mut begun).unwrap();
        let text = String::from_utf8(begun).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let chunks = lines.map(|line| serde_json::from_str::<Value>(&format!("{{{line}")).unwrap());
        let texts = chunks.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned());
        texts.collect::<String>()
    };
    let undisturbed = streamed(&endless, &|| {});
    let disturbed = streamed(&endless, &|| {
        let mut body = json!({"lora_name": "red", "lora_path": adapter(4), "load_inplace": true});
        let replaced = post(&server, "/v1/load_lora_adapter", ADMIN, &body);
        assert_eq!(replaced.status, 200, "{}", replaced.text());
        body = json!({"lora_name": "red"});
        let gone = post(&server, "/v1/unload_lora_adapter", ADMIN, &body);
        assert_eq!(gone.json()["deleted"], true);
    });
    assert_eq!(disturbed, undisturbed);
    assert_eq!(ids(), ["builtin"]);
    let refused = post(&server, "/v1/completions", CLIENT, &endless);
    assert_eq!(refused.status, 404);
    let refused = post(
        &server,
        "/v1/unload_lora_adapter",
        ADMIN,
        &json!({"lora_name": "red"}),
    );
    assert_eq!(refused.status, 404);
    // Another of the name is another one, of which nothing is kept.
    assert_eq!(load(&server, "red", 4).status, 200);
    let other = ask(&server, "red", 1);
    assert_ne!(other["choices"], red["choices"]);
    assert_eq!(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let metrics = server.get("/metrics", &[("x-api-key", CLIENT)]);
    assert!(
        metrics
            .text()
            .contains("vllm:lora_requests_info{max_lora=\"64\"")
    );
}

#[test]
fn servers_that_load_none_say_so() {
    let server = start_with(vec![model("builtin", 400)], settings());
    let refused = load(&server, "red", 5);
    assert_eq!(refused.status, 400);
    assert!(
        refused.text().contains("loads no adapters"),
        "{}",
        refused.text()
    );
}
