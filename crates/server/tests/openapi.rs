//! The OpenAPI document, and that it says what is so.

use crate::common::{Running, shared};
use serde_json::{Map, Value, json};

fn document(server: &Running) -> Value {
    let answer = server.get("/openapi.json", &[]);
    assert_eq!(answer.status, 200);
    answer.json()
}

/// The paths with their operations.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let all = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().unwrap().iter();
        methods.map(|(method, operation)| (path.clone(), method.clone(), operation.clone()))
    });
    all.collect()
}

/// Every `$ref` of `value` has what it names.
fn check_references(document: &Value, value: &Value) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(name)) = members.get("$ref") {
                let found = document.pointer(name.trim_start_matches('#'));
                assert!(found.is_some(), "{name}");
            }
            members.values().for_each(|v| check_references(document, v));
        }
        Value::Array(items) => items.iter().for_each(|v| check_references(document, v)),
        _ => {}
    }
}

#[test]
fn every_route_is_in_the_document_and_there() {
    let server = shared();
    let document = document(server);
    assert_eq!(document["openapi"], "3.1.0");
    check_references(&document, &document);
    let all = operations(&document);
    let mut paths: Vec<&str> = all.iter().map(|(path, ..)| path.as_str()).collect();
    paths.sort_unstable();
    assert_eq!(
        paths,
        [
            "/detokenize",
            "/health",
            "/health/live",
            "/metrics",
            "/openapi.json",
            "/rerank",
            "/tokenize",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/load_lora_adapter",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models",
            "/v1/models/load",
            "/v1/models/swap",
            "/v1/models/unload",
            "/v1/models/{name}",
            "/v1/rerank",
            "/v1/responses",
            "/v1/unload_lora_adapter",
        ]
    );
    for (path, method, operation) in &all {
        let path = path.replace("{name}", "builtin");
        let status = match method.as_str() {
            "get" => server.get(&path, &[]).status,
            _ => server.post(&path, &json!({})).status,
        };
        let expected = if method == "get" { 200 } else { 400 };
        assert_eq!(status, expected, "{path}");
        assert!(operation["responses"][status.to_string()].is_object());
        let other = match method.as_str() {
            "get" => server.post(&path, &json!({})).status,
            _ => server.get(&path, &[]).status,
        };
        assert_eq!(other, 405, "{path}");
    }
}

/// A value that `schema` doesn't have; none if it has all.
fn wrong(schema: &Value) -> Option<Value> {
    // Of no kind that a field has: fields are no arrays of arrays of flags.
    let candidates = [
        json!([[true]]),
        json!(true),
        json!({"a": [[true]]}),
        json!("?"),
    ];
    candidates.into_iter().find(|value| !allows(schema, value))
}

fn allows(schema: &Value, value: &Value) -> bool {
    if let Some(all) = schema["anyOf"].as_array() {
        return all.iter().any(|schema| allows(schema, value));
    }
    let kind = match value {
        Value::Array(_) => "array",
        Value::Object(_) => "object",
        Value::Bool(_) => "boolean",
        _ => "string",
    };
    let of_kind = match &schema["type"] {
        Value::Null => return true,
        Value::Array(kinds) => kinds.iter().any(|own| own == kind),
        own => own == kind,
    };
    of_kind
        && match value {
            Value::Array(items) => items.iter().all(|item| allows(&schema["items"], item)),
            Value::String(_) => schema["enum"].is_null(),
            _ => true,
        }
}

/// A body that has what `schema` needs.
fn least(schema: &Value) -> Map<String, Value> {
    let schema = schema["anyOf"].get(0).unwrap_or(schema);
    let needed = schema["required"].as_array().into_iter().flatten();
    let of = |name: &Value| {
        let name = name.as_str().unwrap();
        let value = match name {
            "model" => json!("builtin"),
            "messages" => json!([{"role": "user", "content": "x"}]),
            "max_tokens" => json!(1),
            "documents" => json!(["x"]),
            "tokens" => json!([5]),
            _ => json!("x"),
        };
        (name.to_owned(), value)
    };
    needed.map(of).collect()
}

#[test]
fn every_field_of_the_document_is_checked() {
    let server = shared();
    let mut n = 0;
    for (path, _, operation) in operations(&document(server)) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let alternatives = schema["anyOf"].as_array();
        for schema in alternatives.map_or(std::slice::from_ref(schema), Vec::as_slice) {
            for (name, field) in schema["properties"].as_object().unwrap() {
                let Some(value) = wrong(field) else { continue };
                let mut body = least(schema);
                body.insert(name.clone(), value);
                let answer = server.post(&path, &body.clone().into());
                assert_eq!(answer.status, 400, "{path}: {body:?}: {}", answer.text());
                let text = answer.text();
                assert!(
                    text.contains(&format!("\"{name}")),
                    "{path}: {name}: {text}"
                );
                n += 1;
            }
        }
    }
    assert!(n > 100, "{n}");
}
