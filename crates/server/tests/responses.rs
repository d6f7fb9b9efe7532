//! The Responses API over real connections.

use crate::common::shared;
use serde_json::{Value, json};

fn ask(more: Value) -> Value {
    let mut body = json!({
        "model": "builtin",
        "input": "Tell me a story about a fox named Ruby.",
        "temperature": 0,
    });
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    body
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"]
        .as_str()
        .unwrap()
}

#[test]
fn responses_say_what_they_were_sampled_with() {
    let server = shared();
    let mut asked = ask(json!({"top_p": 0.5, "max_output_tokens": 1}));
    asked.as_object_mut().unwrap().remove("temperature");
    let answer = server.ok("/v1/responses", &asked);
    // The built-in model recommends no more than that answers are drawn by chance.
    let said = ["temperature", "top_p", "frequency_penalty"].map(|name| answer[name].clone());
    assert_eq!(said, [json!(0.7), json!(0.5), json!(0.0)]);
}

#[test]
fn responses_are_whole_streamed_and_continued() {
    let server = shared();
    let answer = server.ok("/v1/responses", &ask(json!({"instructions": "Be brief."})));
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(answer["status"], "completed");
    assert_eq!(answer["instructions"], "Be brief.");
    assert_eq!(answer["output"][0]["type"], "message");
    assert!(text(&answer).len() > 10);
    let streamed = server.post(
        "/v1/responses",
        &ask(json!({"instructions": "Be brief.", "stream": true})),
    );
    let events = streamed.events();
    let mut names: Vec<&str> = events
        .iter()
        .map(|(name, _)| name.as_deref().unwrap())
        .collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
        assert_eq!(data["type"], name.as_deref().unwrap());
    }
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(text(last), text(&answer));
    let deltas = events.iter().filter_map(|(_, data)| data["delta"].as_str());
    assert_eq!(deltas.collect::<String>(), text(&answer));
    // The next turn computes only what is new: the first one is there.
    let next = ask(
        json!({"input": "And then?", "previous_response_id": answer["id"], "max_output_tokens": 2}),
    );
    let next = server.ok("/v1/responses", &next);
    assert_eq!(
        (&next["status"], &next["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let turns = json!([
        {"role": "user", "content": "Tell me a story about a fox named Ruby."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text(&answer)}]},
        {"role": "user", "content": "And then?"},
    ]);
    let same = server.ok(
        "/v1/responses",
        &ask(json!({"input": turns, "max_output_tokens": 2})),
    );
    assert_eq!(text(&same), text(&next));
    assert_eq!(same["usage"]["input_tokens"], next["usage"]["input_tokens"]);
}

#[test]
fn codex_is_understood() {
    let server = shared();
    let tools = json!([
        {"type": "function", "name": "shell", "description": "", "strict": false, "parameters": {
            "type": "object", "properties": {"cmd": {"enum": ["ls", "pwd"]}}, "required": ["cmd"], "additionalProperties": false,
        }},
        {"type": "namespace", "name": "x"}, {"type": "web_search"}, {"type": "custom", "name": "apply"}, {"type": "image_generation"},
    ]);
    let probe = json!({
        "input": [], "max_output_tokens": 1, "tools": tools, "tool_choice": "auto", "store": false,
        "client_metadata": {}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "parallel_tool_calls": false, "reasoning": {"effort": "low", "summary": "auto"}, "instructions": "You are Codex.",
    });
    server.ok("/v1/responses", &ask(probe));
    let forced = ask(
        json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "stream": true}),
    );
    let events = server.post("/v1/responses", &forced).events();
    let (_, done) = &events[events.len() - 1];
    let call = &done["response"]["output"][0];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("shell"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["ls", "pwd"].contains(&arguments["cmd"].as_str().unwrap()));
    let deltas = events
        .iter()
        .filter(|(name, _)| name.as_deref() == Some("response.function_call_arguments.delta"));
    let said: String = deltas
        .map(|(_, data)| data["delta"].as_str().unwrap())
        .collect();
    assert_eq!(said, call["arguments"].as_str().unwrap());
    let turn = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": null},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "/home"},
    ]);
    server.ok(
        "/v1/responses",
        &ask(json!({"input": turn, "tools": tools, "max_output_tokens": 2})),
    );
}

#[test]
fn what_is_wrong_is_told() {
    let server = shared();
    for (body, status, message) in [
        (
            ask(json!({"previous_response_id": "resp_none"})),
            400,
            "previous_response_id: there is no response",
        ),
        (
            ask(json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})),
            400,
            "input[0].content[0].type",
        ),
        (
            ask(json!({"model": null})),
            400,
            "model: expected text, found nothing",
        ),
        (
            ask(json!({"text": {"format": {"type": "xml"}}})),
            400,
            "text.format.type: expected text",
        ),
    ] {
        let answer = server.post("/v1/responses", &body);
        assert_eq!(answer.status, status);
        let error = answer.json();
        let found = error["error"]["message"].as_str().unwrap();
        assert!(found.starts_with(message), "{found}");
    }
}
