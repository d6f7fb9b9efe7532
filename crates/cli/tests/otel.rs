//! `sterna serve --otlp-endpoint`: a collector gets a trace of each request, as it went.
#![cfg(all(unix, feature = "otel"))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::Serving;

const PATIENCE: Duration = Duration::from_secs(120);

/// A request that came to the collector: its head and its body.
type Sent = (String, Value);

/// A collector of traces: its address, and what comes.
fn collector() -> (String, Receiver<Sent>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, sent) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut reader = BufReader::new(stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
            }
            let head = head.to_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            let mut body = vec![0; length.expect("a length").parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            let answer = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            let body = serde_json::from_slice(&body).unwrap();
            // Before the answer, after which the server may end, and the test look at what came.
            if sender.send((head, body)).is_err() {
                return;
            }
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, sent)
}

fn start(endpoint: &str) -> Serving {
    Serving::start(
        Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["serve", "builtin", "--no-files", "--port", "0"])
            .args(["--otlp-endpoint", endpoint])
            .env(
                "OTEL_EXPORTER_OTLP_HEADERS",
                "x-tenant=terns%2Cgulls, x-more=1",
            )
            .env("OTEL_SERVICE_NAME", "tales"),
    )
}

/// The attribute of `span`, whatever its type.
fn attribute<'a>(span: &'a Value, name: &str) -> Option<&'a Value> {
    let all = span["attributes"].as_array()?.iter();
    let mut found = all.filter(|attribute| attribute["key"] == name);
    found.next()?["value"].as_object()?.values().next()
}

fn whole(span: &Value, name: &str) -> u64 {
    let value = attribute(span, name).unwrap_or_else(|| panic!("no {name} in {span}"));
    value.as_str().unwrap().parse().unwrap()
}

fn time(span: &Value, name: &str) -> u128 {
    span[name].as_str().unwrap().parse().unwrap()
}

#[test]
fn requests_are_traced_from_the_queue_to_the_last_token() {
    let (endpoint, sent) = collector();
    let server = start(&endpoint);
    let chat = |more: Value| {
        let message = json!({"role": "user", "content": "Tell me a secret story."});
        let mut body =
            json!({"model": "builtin", "messages": [message], "max_tokens": 5, "seed": 1});
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        body
    };
    let path = "POST /v1/chat/completions";
    let answer = server.ask(path, "", &chat(json!({"n": 2})).to_string());
    let (_, answer) = answer.split_once("\r\n\r\n").unwrap();
    let usage = serde_json::from_str::<Value>(answer).unwrap()["usage"].clone();
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let context = |flags: &str| format!("traceparent: 00-{trace}-{parent}-{flags}\r\n");
    let streamed = chat(json!({"stream": true})).to_string();
    assert!(
        server
            .ask(path, &context("01"), &streamed)
            .contains("[DONE]")
    );
    // Not to be kept, not of interest, and wrong.
    server.ask(path, &context("00"), &streamed);
    server.ask("GET /health", "", "");
    server.ask("GET /metrics", "", "");
    let refused = server.ask(path, "", &chat(json!({"temperature": -1})).to_string());
    assert!(refused.starts_with("HTTP/1.1 400"));
    server.stop();

    let sent: Vec<Sent> = sent.try_iter().collect();
    let mut spans = Vec::new();
    for (head, body) in &sent {
        assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
        assert!(head.contains("content-type: application/json"), "{head}");
        assert!(
            head.contains("x-tenant: terns,gulls") && head.contains("x-more: 1"),
            "{head}"
        );
        assert!(!body.to_string().contains("secret"), "{body}");
        let resource = &body["resourceSpans"][0];
        assert_eq!(
            attribute(&resource["resource"], "service.name"),
            Some(&json!("tales"))
        );
        spans.extend(
            resource["scopeSpans"][0]["spans"]
                .as_array()
                .unwrap()
                .clone(),
        );
    }
    let requests: Vec<&Value> = spans.iter().filter(|span| span["kind"] == 2).collect();
    let [plural, streamed, refused] = requests[..] else {
        panic!("{requests:?}");
    };
    let within = |request: &Value, name: &str| -> Vec<Value> {
        let inner = spans.iter().filter(|span| {
            span["traceId"] == request["traceId"]
                && span["parentSpanId"] == request["spanId"]
                && span["name"] == name
        });
        inner.cloned().collect()
    };
    for (request, n, n_prompt) in [
        (plural, 2, &usage["prompt_tokens"]),
        (streamed, 1, &usage["prompt_tokens"]),
    ] {
        assert_eq!(request["name"], "POST /v1/chat/completions");
        assert_eq!(whole(request, "http.response.status_code"), 200);
        let model = attribute(request, "gen_ai.request.model");
        assert_eq!(model, Some(&json!("builtin")));
        let [queue, prefill, decode] =
            ["queue", "prefill", "decode"].map(|name| within(request, name));
        assert_eq!(
            [queue.len(), prefill.len(), decode.len()],
            [n; 3],
            "{request}"
        );
        for ((queue, prefill), decode) in queue.iter().zip(&prefill).zip(&decode) {
            // One after the other, within the request.
            let times = [
                time(request, "startTimeUnixNano"),
                time(queue, "startTimeUnixNano"),
                time(queue, "endTimeUnixNano"),
                time(prefill, "endTimeUnixNano"),
                time(decode, "endTimeUnixNano"),
                time(request, "endTimeUnixNano"),
            ];
            assert!(times.is_sorted(), "{times:?}");
            assert_eq!(
                time(queue, "endTimeUnixNano"),
                time(prefill, "startTimeUnixNano")
            );
            assert_eq!(
                time(prefill, "endTimeUnixNano"),
                time(decode, "startTimeUnixNano")
            );
            assert_eq!(
                json!(whole(prefill, "gen_ai.usage.input_tokens")),
                *n_prompt
            );
            assert_eq!(whole(decode, "gen_ai.usage.output_tokens"), 5);
            let reasons = attribute(decode, "gen_ai.response.finish_reasons").unwrap();
            assert_eq!(reasons["values"], json!([{"stringValue": "length"}]));
        }
    }
    // The other's prompt was there.
    let prefill = &within(streamed, "prefill")[0];
    assert!(
        whole(prefill, "sterna.usage.cached_tokens") > 0,
        "{prefill}"
    );
    assert_eq!(
        (&streamed["traceId"], &streamed["parentSpanId"]),
        (&json!(trace), &json!(parent))
    );
    assert!(plural["parentSpanId"].is_null() && plural["traceId"] != trace);
    assert_eq!(whole(refused, "http.response.status_code"), 400);
    assert_eq!(refused["status"], json!({}));
    assert_eq!(spans.len(), 3 + 3 * 3);
}

#[test]
fn a_collector_that_is_not_there_disturbs_nobody() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let server = start(&address);
    let body = json!({"model": "builtin", "prompt": "Once", "max_tokens": 2});
    for _ in 0..3 {
        let answer = server.ask("POST /v1/completions", "", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    server.stop();
}

#[test]
fn an_endpoint_has_to_be_an_address() {
    let output = Command::new(env!("CARGO_BIN_EXE_sterna"))
        .args([
            "serve",
            "builtin",
            "--check",
            "--otlp-endpoint",
            "localhost:4318",
        ])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let expected = "otlp-endpoint: expected an address such as http://127.0.0.1:4318, found \"localhost:4318\"";
    assert!(stderr.contains(expected), "{stderr}");
}
