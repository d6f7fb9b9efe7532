//! Anthropic's dialect over real connections.

use crate::common::{Running, shared};
use serde_json::{Value, json};

const STORY: &str = "Tell me a story about a fox named Ruby.";

fn message(more: Value) -> Value {
    let mut body = json!({
        "model": "builtin",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": STORY}],
        "temperature": 0,
    });
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body
}

fn streamed(server: &Running, body: &Value) -> Vec<(String, Value)> {
    let answer = server.post("/v1/messages", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let events = answer.events().into_iter();
    events
        .map(|(name, data)| {
            let name = name.expect("every event has a name");
            assert_eq!(data["type"], name.as_str());
            (name, data)
        })
        .collect()
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    names
}

#[test]
fn messages_are_answered_whole_and_streamed() {
    let server = shared();
    let answer = server.ok("/v1/messages", &message(json!({})));
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&answer["type"], &answer["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(answer["stop_reason"], "end_turn");
    assert!(answer["stop_sequence"].is_null());
    let text = answer["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Ruby"));
    // Clients that check types take an array, and no null.
    assert_eq!(answer["content"][0]["citations"], json!([]));
    let events = streamed(server, &message(json!({"stream": true})));
    let start = events
        .iter()
        .find(|(name, _)| name == "content_block_start");
    assert_eq!(start.unwrap().1["content_block"]["citations"], json!([]));
    assert_eq!(
        names(&events),
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let deltas = events
        .iter()
        .filter_map(|(_, data)| data["delta"]["text"].as_str());
    assert_eq!(deltas.collect::<String>(), text);
    let usage = &events[0].1["message"]["usage"];
    // All but the prompt's last token was there.
    assert_eq!(usage["input_tokens"], 1);
    let n_prompt = usage["cache_read_input_tokens"].as_u64().unwrap() + 1;
    let counted = server.ok("/v1/messages/count_tokens", &message(json!({})));
    assert_eq!(counted["input_tokens"], n_prompt);
    let (_, end) = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "end_turn");
    assert_eq!(
        end["usage"]["output_tokens"],
        answer["usage"]["output_tokens"]
    );
}

#[test]
fn limits_and_stop_sequences_are_told() {
    let server = shared();
    let cut = server.ok("/v1/messages", &message(json!({"max_tokens": 3})));
    assert_eq!(cut["stop_reason"], "max_tokens");
    let stopped = server.ok(
        "/v1/messages",
        &message(json!({"stop_sequences": ["@", "Ruby"]})),
    );
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], "Ruby");
}

#[test]
fn blocks_of_all_kinds_are_read_and_tools_are_called() {
    let server = shared();
    let tools = json!([
        {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"enum": ["sun", "sea"]}}, "required": ["at"], "additionalProperties": false}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]);
    for choice in [
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "look"}),
    ] {
        let body = message(json!({"tools": tools, "tool_choice": choice}));
        let answer = server.ok("/v1/messages", &body);
        assert_eq!(answer["stop_reason"], "tool_use");
        let block = &answer["content"][0];
        assert_eq!(
            (&block["type"], &block["name"]),
            (&json!("tool_use"), &json!("look"))
        );
        let at = block["input"]["at"].as_str().unwrap();
        assert!(["sun", "sea"].contains(&at));
        let mut body = body.clone();
        body["stream"] = true.into();
        let events = streamed(server, &body);
        let pieces = events
            .iter()
            .filter_map(|(_, data)| data["delta"]["partial_json"].as_str());
        let input: Value = serde_json::from_str(&pieces.collect::<String>()).unwrap();
        assert_eq!(input, block["input"]);
        let turns = json!([
            {"role": "user", "content": [{"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "see"}, block]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "blue"}]},
                {"type": "text", "text": "so?"},
            ]},
        ]);
        let body = message(
            json!({"messages": turns, "tools": tools, "max_tokens": 2, "system": [{"type": "text", "text": "be kind"}]}),
        );
        server.ok("/v1/messages", &body);
    }
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}}}});
    let answer = server.ok("/v1/messages", &message(format));
    let value: Value =
        serde_json::from_str(answer["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(value["ok"].is_boolean());
}

#[test]
fn answers_are_continued() {
    let server = shared();
    let text = |messages: Value| {
        let body = message(json!({"messages": messages, "temperature": 0, "max_tokens": 40}));
        let answer = server.ok("/v1/messages", &body);
        answer["content"][0]["text"].as_str().unwrap().to_owned()
    };
    let user = json!({"role": "user", "content": "Tell me a story about a fox."});
    let whole = text(json!([user]));
    let at = whole.match_indices(' ').nth(5).unwrap().0;
    let begun = json!([{"type": "text", "text": &whole[..at]}]);
    let rest = text(json!([user, {"role": "assistant", "content": begun}]));
    assert!(
        format!("{}{rest}", &whole[..at]).starts_with(&whole),
        "{rest}"
    );
}

#[test]
fn errors_have_the_shape_of_the_dialect() {
    let server = shared();
    let mut body = message(json!({}));
    body.as_object_mut().unwrap().remove("max_tokens");
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    for (body, status, kind, message) in [
        (
            body,
            400,
            "invalid_request_error",
            "max_tokens: expected a whole number",
        ),
        (
            message(json!({"model": "claude"})),
            404,
            "not_found_error",
            "the model `claude`",
        ),
        (
            message(json!({"messages": image})),
            400,
            "invalid_request_error",
            "messages[0].content[0].type: expected text",
        ),
        (
            message(json!({"messages": []})),
            400,
            "invalid_request_error",
            "messages: expected an array of messages, 1 at least, found",
        ),
        (
            message(json!({"tool_choice": {"type": "any"}})),
            400,
            "invalid_request_error",
            "tool_choice: a call",
        ),
    ] {
        let answer = server.post("/v1/messages", &body);
        assert_eq!(answer.status, status);
        assert!(answer.header("request-id").unwrap().starts_with("req_"));
        let error = answer.json();
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!(kind))
        );
        let found = error["error"]["message"].as_str().unwrap();
        assert!(found.starts_with(message), "{found}");
    }
}
