//! Many at once, who is let in, and what hostile clients send.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::{Running, adapter, model, open, read, send, shared, start, start_with, states};
use serde_json::{Value, json};
use sterna_server::{EngineOptions, Hosts, Keys, Settings};

fn chat(prompt: &str, more: Value) -> Value {
    let mut body = json!({"model": "builtin", "messages": [{"role": "user", "content": prompt}]});
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body
}

fn said(answer: &Value) -> String {
    let content = &answer["choices"][0]["message"]["content"];
    content
        .as_str()
        .unwrap_or_else(|| panic!("{answer}"))
        .to_owned()
}

/// Requests that differ in all that may differ, with prompts that share beginnings; each with its path.
fn mixed(i: u64) -> (&'static str, Value) {
    let names = ["Ruby", "Max", "Stella", "Otto"];
    let adapted = ["builtin:a1", "builtin:a2"];
    let prompt = format!(
        "Tell me a story about a fox named {}.",
        names[i as usize % 4]
    );
    let more = match i % 9 {
        0 => json!({"temperature": 0}),
        1 => json!({"temperature": 1.2}),
        2 => json!({"top_k": 5, "frequency_penalty": 0.5}),
        3 => json!({"logprobs": true, "top_logprobs": 1}),
        4 => json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {
            "type": "object", "properties": {"n": {"type": "integer", "maximum": 99999}}, "required": ["n"], "additionalProperties": false,
        }}}}),
        5 => json!({"min_p": 0.1, "presence_penalty": 0.8}),
        6 => json!({"n": 3}),
        7 => json!({"model": adapted[i as usize % 2]}),
        _ => {
            let body = json!({"model": "states", "prompt": prompt, "seed": i, "max_tokens": 24});
            return ("/v1/completions", body);
        }
    };
    let mut body = chat(&prompt, json!({"seed": i, "max_tokens": 24}));
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    ("/v1/chat/completions", body)
}

/// A server of the built-in model with adapters, and of a model whose layers have states.
fn start_mixed(engine: EngineOptions) -> Running {
    let mut builtin = model("builtin", 4096);
    for salt in [1, 2] {
        let path = adapter(salt).to_str().unwrap().to_owned();
        let open = move || Ok(open(&path).unwrap());
        builtin = builtin.with_adapter(&format!("a{salt}"), 1.0, open);
    }
    let settings = Settings {
        engine,
        ..Settings::default()
    };
    start_with(vec![builtin, states("states")], settings)
}

#[test]
fn sixty_four_at_once_are_sixty_four_alone() {
    const N: u64 = 64;
    let server = start_mixed(EngineOptions {
        parallel: N as usize,
        queue: 64,
        ..Settings::default().engine
    });
    let at_once = Barrier::new(N as usize);
    let together: Vec<Value> = thread::scope(|scope| {
        let all = (0..N).map(|i| {
            let (server, at_once) = (&server, &at_once);
            scope.spawn(move || {
                at_once.wait();
                if i % 8 == 0 {
                    // A neighbour that goes away in the middle: its first tokens have come.
                    begun(server, &endless());
                }
                let (path, body) = mixed(i);
                server.ok(path, &body)
            })
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    wait_for(&server, "sterna_cancelled_answers_total 8");
    let alone = start_mixed(EngineOptions {
        parallel: 1,
        // Nothing is kept.
        cache_bytes: 0,
        ..Settings::default().engine
    });
    for (i, together) in together.iter().enumerate() {
        let (path, body) = mixed(i as u64);
        let answer = alone.ok(path, &body);
        assert_eq!(answer["choices"], together["choices"], "request {i}");
        let details = &answer["usage"]["prompt_tokens_details"];
        assert_eq!(details["cached_tokens"], 0);
    }
}

/// An answer that takes its time: the tokens that would end it are banned.
fn endless() -> Value {
    json!({
        "model": "builtin", "prompt": "Once", "max_tokens": 4000, "stream": true,
        "logit_bias": {"1": -100, "2": -100},
    })
}

/// Asks for a stream of completions, and reads its first tokens.
fn begun(server: &Running, body: &Value) -> TcpStream {
    let mut stream = server.connect();
    let headers = [("Content-Type", "application/json")];
    let body = body.to_string();
    send(
        &mut stream,
        "POST /v1/completions",
        &headers,
        body.as_bytes(),
    );
    // The head, and more.
    stream.read_exact(&mut [0; 600]).unwrap();
    stream
}

/// Waits until the metrics have this line.
fn wait_for(server: &Running, line: &str) {
    let has_it = || {
        let metrics = server.get("/metrics", &[]);
        metrics.text().lines().any(|found| found == line)
    };
    while !has_it() {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn who_goes_away_frees_the_place() {
    let server = start(Settings {
        engine: EngineOptions {
            parallel: 1,
            queue: 4,
            ..Settings::default().engine
        },
        ..Settings::default()
    });
    drop(begun(&server, &endless()));
    // The only place is free again.
    let answer = server.ok(
        "/v1/chat/completions",
        &chat("Hello", json!({"max_tokens": 2})),
    );
    assert!(!said(&answer).is_empty());
    let metrics = server.get("/metrics", &[]);
    assert!(
        metrics.text().contains("sterna_cancelled_answers_total 1"),
        "{}",
        metrics.text()
    );
}

#[test]
fn what_was_computed_for_who_went_away_is_kept() {
    let server = start(Settings::default());
    let tale =
        "The fox and the hen went into the forest, and there they saw a big tree. ".repeat(8);
    let mut body = endless();
    body["prompt"] = tale.trim_end().into();
    drop(begun(&server, &body));
    wait_for(&server, "sterna_cancelled_answers_total 1");
    let ask = |prompt: &str| {
        let body = json!({"model": "builtin", "prompt": prompt, "max_tokens": 1, "temperature": 0});
        let answer = server.ok("/v1/completions", &body);
        let usage = &answer["usage"];
        let cached = &usage["prompt_tokens_details"]["cached_tokens"];
        (
            cached.as_u64().unwrap(),
            usage["prompt_tokens"].as_u64().unwrap(),
        )
    };
    let (n_cached, n_prompt) = ask(&format!("{tale}It was an old one."));
    let (_, n_tale) = ask(tale.trim_end());
    assert!(n_cached >= n_tale && n_tale > 100, "{n_cached} of {n_tale}");
    assert!(n_cached < n_prompt);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = start(Settings {
        engine: EngineOptions {
            parallel: 1,
            queue: 1,
            ..Settings::default().engine
        },
        ..Settings::default()
    });
    let long = endless();
    let headers = [("Content-Type", "application/json")];
    // One is answered and one waits, each taken before the next request is sent: who waits behind them would wait for
    // their end.
    let waiting: Vec<_> = [
        "sterna_requests_running{engine=\"0\"} 1",
        "sterna_requests_waiting 1",
    ]
    .into_iter()
    .map(|taken| {
        let mut stream = server.connect();
        send(
            &mut stream,
            "POST /v1/completions",
            &headers,
            long.to_string().as_bytes(),
        );
        while !server.get("/metrics", &[]).text().contains(taken) {
            thread::sleep(Duration::from_millis(5));
        }
        stream
    })
    .collect();
    let mut one = long.clone();
    one["stream"] = false.into();
    one["max_tokens"] = 1.into();
    let refused = server.post("/v1/completions", &one);
    assert_eq!(refused.status, 429);
    assert!(
        refused
            .header("retry-after")
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= 1
    );
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    let many = json!({"model": "builtin", "prompt": "x", "n": 3});
    assert_eq!(server.post("/v1/completions", &many).status, 400);
    drop(waiting);
}

#[test]
fn only_who_has_a_key_is_answered() {
    let mut keys = Keys::none();
    keys.add("ann", "a long enough key").unwrap();
    let records = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&records);
    let server = start(Settings {
        keys,
        cors: vec!["https://example.org".to_owned()],
        log: Arc::new(move |record| kept.lock().unwrap().push(Value::Object(record.clone()))),
        ..Settings::default()
    });
    let body = chat("A secret question", json!({"max_tokens": 2}));
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!(refused.status, 401);
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    let refused = server.post("/v1/messages", &body);
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
    assert_eq!(server.get("/metrics", &[]).status, 401);
    assert_eq!(
        server
            .get("/v1/models", &[("x-api-key", "a long enough kex")])
            .status,
        401
    );
    assert_eq!(server.get("/health", &[]).status, 200);
    let headers = [
        ("Authorization", "Bearer a long enough key"),
        ("X-Request-Id", "mine-1"),
        ("Origin", "https://example.org"),
    ];
    let answer = server.post_with("/v1/chat/completions", &body, &headers);
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://example.org")
    );
    // The log knows the request, and not a word of it.
    let of_mine = |record: &Value| record["request_id"] == "mine-1";
    let has_all = || {
        let records = records.lock().unwrap();
        records.iter().filter(|record| of_mine(record)).count() == 2
    };
    while !has_all() {
        thread::sleep(Duration::from_millis(5));
    }
    let records = records.lock().unwrap();
    let mine: Vec<&Value> = records.iter().filter(|record| of_mine(record)).collect();
    for record in &mine {
        assert_eq!(record["key"], "ann");
    }
    let answered = mine
        .iter()
        .find(|record| record["event"] == "answer")
        .unwrap();
    assert_eq!(answered["n_generated"], 2);
    assert!(!format!("{records:?}").contains("secret"));
}

#[test]
fn hostile_requests_are_refused_and_the_server_lives() {
    let server = start(Settings {
        max_body: 100_000,
        ..Settings::default()
    });
    let json_type = [("Content-Type", "application/json")];
    let post = |body: &[u8]| server.raw("POST /v1/chat/completions", &json_type, body);
    let huge = vec![b' '; 200_000];
    assert_eq!(post(&huge).status, 413);
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000 - 1));
    assert_eq!(post(&deep.as_bytes()[..90_000]).status, 400);
    let deep = format!("{{\"model\": {}1{}}}", "[".repeat(2_000), "]".repeat(2_000));
    let refused = post(deep.as_bytes());
    assert!(
        refused.text().contains("recursion limit"),
        "{}",
        refused.text()
    );
    assert_eq!(post(b"{\"model\": \"\xff\xfe\"}").status, 400);
    assert_eq!(post(b"").status, 400);
    assert_eq!(post(b"[]").status, 400);
    assert_eq!(post(b"{").status, 400);
    let form = [("Content-Type", "text/plain")];
    let body = chat("x", json!({})).to_string();
    let refused = server.raw("POST /v1/chat/completions", &form, body.as_bytes());
    assert_eq!(refused.status, 415);
    assert_eq!(server.get("/v1/chat/completions", &[]).status, 405);
    assert_eq!(server.get("/v1/../etc/passwd", &[]).status, 404);
    assert_eq!(server.get("/v1/frobnicate", &[]).status, 404);
    for more in [json!({"stop": vec!["x"; 100]}), json!({"n": 1_000_000})] {
        let refused = server.post("/v1/chat/completions", &chat("x", more.clone()));
        assert_eq!(refused.status, 400, "{more}: {}", refused.text());
    }
    // Answers that nobody could give at once, before anything is made of them.
    let many = json!({"model": "builtin", "prompt": vec!["x"; 9_000], "regex": "a"});
    let refused = server.post("/v1/completions", &many);
    assert_eq!(refused.status, 400);
    assert!(
        refused
            .text()
            .contains("expected at most 72 answers at once"),
        "{}",
        refused.text()
    );
    // A request that never ends, beside others.
    let mut slow = server.connect();
    slow.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{")
        .unwrap();
    let answer = server.ok(
        "/v1/chat/completions",
        &chat("Hello", json!({"max_tokens": 2})),
    );
    assert!(!said(&answer).is_empty());
    drop(slow);
    assert_eq!(server.get("/health", &[]).json()["status"], "ok");
}

/// What may be answered or not is known of each: that the server lives isn't enough.
#[test]
fn grammars_that_explode_are_refused() {
    let server = shared();
    let ask = |more: &Value| {
        let mut body = chat("x", more.clone());
        body["max_tokens"] = 3.into();
        server.post("/v1/chat/completions", &body)
    };
    let arrays = |n: usize| {
        let array = |inner, _| json!({"type": "array", "items": inner, "minItems": 5});
        (0..n).fold(json!({"type": "string"}), array)
    };
    let rules = |n: usize| {
        let rules = (0..n).map(|i| format!("a{i}: a{}\n", i + 1));
        format!("start: a0\n{}a{n}: \"a\"", rules.collect::<String>())
    };
    // Each leads to the next one, twice.
    let chain = |n: usize| {
        let next = |i: usize| json!({"$ref": format!("#/$defs/a{}", i + 1)});
        let link = |i: usize| (format!("a{i}"), json!({"allOf": [next(i), next(i)]}));
        let links = (0..n).map(link).chain([(format!("a{n}"), json!({}))]);
        let links: serde_json::Map<String, Value> = links.collect();
        json!({"$ref": "#/$defs/a0", "$defs": links})
    };
    let both = "start: A\nA: /(.*a.{20}){1,20}/ & /(.*b.{19}){1,21}/ & ~/(.*c.{18}){3,22}/";
    for (more, message) in [
        (json!({"guided_json": arrays(300)}), "recursion limit"),
        (json!({"guided_json": chain(3_000)}), "at most 8000 schemas"),
        (json!({"regex": "(".repeat(200)}), "at most 64 brackets"),
        (
            json!({"regex": "a".repeat(2 << 20)}),
            "at most 1048576 bytes",
        ),
        (json!({"grammar": rules(50_000)}), "at most 8000 rules"),
        (json!({"grammar": both}), "too many expressions"),
        (
            json!({"grammar": "start: start"}),
            "found one that none does",
        ),
    ] {
        let refused = ask(&more);
        let text = refused.text();
        assert_eq!(refused.status, 400, "{message}: {text}");
        assert!(text.contains(message), "{message}: {text}");
        assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
    }
    // What looks like these and is never spelled out.
    for more in [
        json!({"guided_json": arrays(30)}),
        json!({"guided_json": chain(25)}),
        json!({"guided_json": {"type": "array", "minItems": 1_000_000_000}}),
        json!({"guided_json": {"type": "string", "minLength": 1_000_000_000}}),
        json!({"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"}),
        json!({"regex": "(.*a.{1,2000}){1,500}"}),
        json!({"grammar": rules(1_000)}),
        json!({"grammar": "start: \"a\" start"}),
        json!({"grammar": "start: start start | \"a\" | \"\""}),
    ] {
        let answer = ask(&more);
        assert_eq!(answer.status, 200, "{more}: {}", answer.text());
    }
}

/// A request whose grammar is large, and made for each of its prompts: many seconds of work.
fn slow_grammar() -> Value {
    json!({"model": "builtin", "prompt": vec!["x"; 60], "regex": "a|bc|".repeat(1 << 17), "max_tokens": 1})
}

#[test]
fn slow_grammars_hold_up_no_other_requests() {
    let server = start(Settings {
        grammar_timeout: Duration::from_secs(600),
        ..Settings::default()
    });
    // As many as could be prepared at once, and one more.
    let n = thread::available_parallelism().map_or(1, |n| n.get()) + 1;
    let slow = slow_grammar().to_string();
    let hostile: Vec<TcpStream> = (0..n)
        .map(|_| {
            let mut stream = server.connect();
            let headers = [("Content-Type", "application/json")];
            let head = "POST /v1/completions";
            send(&mut stream, head, &headers, slow.as_bytes());
            stream
        })
        .collect();
    for _ in 0..2 {
        let body = chat("Hello", json!({"max_tokens": 2}));
        assert!(!said(&server.ok("/v1/chat/completions", &body)).is_empty());
    }
    for stream in hostile {
        stream.set_nonblocking(true).unwrap();
        let kind = stream.peek(&mut [0]).map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::WouldBlock), "its answer takes longer");
    }
}

#[test]
fn a_grammar_that_takes_too_long_is_refused() {
    let server = start(Settings {
        grammar_timeout: Duration::from_millis(1),
        ..Settings::default()
    });
    let refused = server.post("/v1/completions", &slow_grammar());
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["code"], "grammar_too_slow");
    let body = chat("Hello", json!({"max_tokens": 2}));
    server.ok("/v1/chat/completions", &body);
}

#[test]
fn a_body_that_stalls_is_given_up() {
    let server = start(Settings {
        body_timeout: Duration::from_millis(300),
        ..Settings::default()
    });
    for (path, kind) in [
        ("/v1/chat/completions", "invalid_request_error"),
        ("/v1/messages", "invalid_request_error"),
    ] {
        let mut stream = server.connect();
        let head = format!("POST {path}");
        let headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", "5000"),
        ];
        send(&mut stream, &head, &headers, b"");
        stream.write_all(b"{").unwrap();
        let answer = read(stream);
        assert_eq!(answer.status, 408, "{path}");
        assert_eq!(answer.json()["error"]["type"], kind, "{path}");
    }
}

#[test]
fn other_names_than_its_own_are_refused() {
    let server = start(Settings {
        hosts: Hosts::local(vec!["sterna.example".to_owned()]),
        ..Settings::default()
    });
    let ask = |path: &str, host: &str| {
        let mut stream = server.connect();
        let head = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        read(stream)
    };
    let port = server.address.port();
    for host in ["127.0.0.1", "localhost", "[::1]", "sterna.example"] {
        let host = format!("{host}:{port}");
        assert_eq!(ask("/v1/models", &host).status, 200, "{host}");
    }
    for path in ["/v1/models", "/v1/messages", "/metrics", "/health"] {
        let refused = ask(path, "example.org");
        assert_eq!(refused.status, 403, "{path}");
        assert_eq!(refused.json()["error"]["type"], "permission_error");
    }
    let refused = ask("/v1/models", "example.org");
    assert_eq!(refused.json()["error"]["code"], "host_not_allowed");
}

#[test]
fn who_reads_slowly_stalls_nobody() {
    let server = shared();
    let slow: Vec<_> = (0..4)
        .map(|i| {
            let mut stream = server.connect();
            let body = chat("Tell me a story.", json!({"stream": true, "seed": i})).to_string();
            let headers = [("Content-Type", "application/json")];
            send(
                &mut stream,
                "POST /v1/chat/completions",
                &headers,
                body.as_bytes(),
            );
            stream
        })
        .collect();
    for seed in 0..4 {
        let body = chat("Hello", json!({"max_tokens": 8, "seed": seed}));
        server.ok("/v1/chat/completions", &body);
    }
    // They get their answers all the same.
    for stream in slow {
        let answer = read(stream);
        assert_eq!(answer.events().pop().unwrap().1, "[DONE]");
    }
}

#[test]
fn metrics_are_read_without_a_key_if_they_may_be() {
    let mut keys = Keys::none();
    keys.add("ann", "a long enough key").unwrap();
    let server = start(Settings {
        keys,
        public_metrics: true,
        ..Settings::default()
    });
    let metrics = server.get("/metrics", &[]);
    assert_eq!(metrics.status, 200);
    assert!(
        metrics
            .text()
            .contains(r#"sterna_requests_running{engine="0"} 0"#)
    );
    assert_eq!(server.get("/v1/models", &[]).status, 401);
    let document = server.get("/openapi.json", &[("x-api-key", "a long enough key")]);
    let paths = &document.json()["paths"];
    assert_eq!(paths["/metrics"]["get"]["security"], json!([]));
    assert!(paths["/v1/models"]["get"]["security"].is_null());
}

#[test]
fn gateways_read_their_metrics() {
    let server = shared();
    server.ok(
        "/v1/chat/completions",
        &chat("Hello", json!({"max_tokens": 2})),
    );
    let metrics = server.get("/metrics", &[]);
    let text = metrics.text();
    for name in [
        "sterna_requests_total{dialect=\"openai\",status=\"200\"}",
        "sterna_generated_tokens_total",
        "sterna_time_to_first_token_seconds_bucket",
        "sterna_cache_bytes",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info{max_lora=\"64\"",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert!(!text.contains("NaN") && text.ends_with("# EOF\n"));
}

#[test]
fn metrics_have_other_names_only_if_they_may() {
    let server = start(Settings {
        gateway_metrics: false,
        ..Settings::default()
    });
    let metrics = server.get("/metrics", &[]);
    let text = metrics.text();
    assert!(
        text.contains("sterna_requests_waiting 0") && !text.contains("vllm:"),
        "{text}"
    );
}

#[test]
fn a_server_that_stops_takes_nothing_more() {
    let server = start(Settings::default());
    server.server.drain();
    let refused = server.post("/v1/chat/completions", &chat("x", json!({})));
    assert_eq!(refused.status, 503);
    assert_eq!(server.get("/health", &[]).json()["status"], "stopping");
}

#[test]
fn clients_may_be_kept_from_giving_grammars() {
    let server = start(Settings {
        grammars: false,
        ..Settings::default()
    });
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for more in [
        json!({"regex": "a"}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"tools": tools, "tool_choice": "required"}),
        json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}),
    ] {
        assert_eq!(
            server.post("/v1/chat/completions", &chat("x", more)).status,
            400
        );
    }
}

#[test]
fn models_are_answered_for_by_their_names() {
    let models = vec![model("short", 40), model("long", 400)];
    let server = start_with(models, Settings::default());
    let ask = |name: &str| {
        let mut body = chat("Tell me a story.", json!({"temperature": 0}));
        body["model"] = name.into();
        server.ok("/v1/chat/completions", &body)
    };
    let (short, long) = thread::scope(|scope| {
        let short = scope.spawn(|| ask("short"));
        let long = ask("long");
        (short.join().unwrap(), long)
    });
    // The same model but for its context, in which nothing of the other's is kept.
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert!(said(&long).starts_with(&said(&short)) && said(&long).len() > said(&short).len());
    for answer in [&short, &long] {
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }
    let list = server.get("/v1/models", &[]).json();
    let names: Vec<&str> = (list["data"].as_array().unwrap().iter())
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["short", "long"]);
}

#[test]
fn keys_use_what_they_may() {
    let mut keys = Keys::none();
    let mut line = |name: &str, rest: &str| {
        let (key, line) = Keys::make(name).unwrap();
        keys.add_list(&format!("{line} {rest}")).unwrap();
        key
    };
    let (ann, bob, eve) = (line("ann", "rpm=2"), line("bob", "tpm=40"), line("eve", ""));
    let server = start(Settings {
        keys,
        ..Settings::default()
    });
    let ask = |path: &str, key: &str| {
        let headers = [("Authorization", format!("Bearer {key}"))];
        let headers = headers
            .each_ref()
            .map(|(name, value)| (*name, value.as_str()));
        let body = chat("Hello", json!({"max_tokens": 4}));
        server.post_with(path, &body, &headers)
    };
    let chat_path = "/v1/chat/completions";
    for left in ["1", "0"] {
        let answer = ask(chat_path, &ann);
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("2"));
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), Some(left));
        assert!(
            answer
                .header("x-ratelimit-reset-requests")
                .unwrap()
                .ends_with('s')
        );
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), None);
    }
    let refused = ask(chat_path, &ann);
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((20..=30).contains(&wait), "{wait}");
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("rate_limit_error"), &json!("rate_limit_exceeded"))
    );
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .starts_with("the key `ann` may send 2 requests a minute")
    );
    let refused = ask("/v1/messages", &ann);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(
        refused.header("anthropic-ratelimit-requests-remaining"),
        Some("0")
    );
    assert!(
        refused
            .header("anthropic-ratelimit-requests-reset")
            .unwrap()
            .ends_with('Z')
    );
    // What is only looked at isn't counted.
    assert_eq!(server.get("/v1/models", &[("x-api-key", &ann)]).status, 200);
    // The tokens of prompts and answers: the second request owes some, the third waits.
    let mut n_answered = 0;
    let refused = loop {
        let answer = ask(chat_path, &bob);
        match answer.status {
            200 => n_answered += 1,
            _ => break answer,
        }
        assert!(n_answered < 40);
    };
    assert!(n_answered >= 1);
    assert_eq!(refused.status, 429);
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), Some("0"));
    let message = refused.json()["error"]["message"].clone();
    assert!(
        message
            .as_str()
            .unwrap()
            .contains("may use 40 tokens a minute"),
        "{message}"
    );
    for _ in 0..4 {
        assert_eq!(ask(chat_path, &eve).status, 200);
    }
    let metrics = server.get("/metrics", &[("x-api-key", &eve)]);
    for name in [
        "sterna_limited_requests_total{key=\"ann\",limit=\"requests\"} 2",
        "sterna_limited_requests_total{key=\"bob\",limit=\"tokens\"} 1",
        "sterna_key_tokens_total{key=\"eve\",kind=\"generated\"} 16",
        "sterna_key_tokens_total{key=\"eve\",kind=\"prompt\"}",
    ] {
        assert!(metrics.text().contains(name), "{name}: {}", metrics.text());
    }
}
