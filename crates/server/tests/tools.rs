//! Calls of tools by models with the templates of others.

use std::path::Path;

use serde_json::{Value, json};
use sterna_server::Settings;

use crate::common::{Running, model_with_template, shared, start_with};

/// Templates of `testdata` by which calls are written in different forms.
const TEMPLATES: [&str; 8] = [
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3-0.6B",
    "deepseek-ai/DeepSeek-R1",
    "ai21labs/AI21-Jamba-Large-1.6",
    "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)",
    "zai-org/GLM-5.1",
    "moonshotai/Kimi-K2-Thinking",
    "openbmb/MiniCPM3-4B",
];

fn server() -> Running {
    let path = "../../testdata/chat-templates/huggingface-jinja-e2e.json";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let recorded: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let models = TEMPLATES.map(|name| {
        let case = recorded.iter().find(|case| case["name"] == name).unwrap();
        model_with_template(name, 4096, case["chat_template"].as_str().unwrap())
    });
    start_with(Vec::from(models), Settings::default())
}

/// The call of a streamed answer.
fn streamed(server: &Running, body: &Value) -> Value {
    let answer = server.post("/v1/chat/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (mut call, mut arguments) = (Value::Null, String::new());
    let mut finishes = Vec::new();
    for (_, chunk) in answer.events() {
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str();
        assert_eq!(text.unwrap_or_default(), "");
        if let Some(piece) = choice["delta"]["tool_calls"].get(0) {
            if !piece["id"].is_null() {
                assert!(call.is_null(), "one call");
                call = piece.clone();
            }
            arguments += piece["function"]["arguments"].as_str().unwrap();
        }
        finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    assert_eq!(finishes, ["tool_calls"]);
    call["function"]["arguments"] = arguments.into();
    call
}

#[test]
fn calls_are_made_and_answered_in_the_form_of_each_template() {
    let server = server();
    let tool = json!({"type": "function", "function": {"name": "get_weather", "strict": true, "parameters": {
        "type": "object",
        "properties": {
            "place": {"enum": ["Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
        },
        "required": ["place", "days", "exact"],
        "additionalProperties": false,
    }}});
    for name in TEMPLATES {
        let mut body = json!({
            "model": name, "seed": 7, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false,
            "messages": [{"role": "user", "content": "How is the weather?"}],
            "chat_template_kwargs": {"enable_thinking": false},
        });
        let answer = server.ok("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{name}: {choice}");
        assert!(choice["message"]["content"].is_null());
        let call = choice["message"]["tool_calls"][0].clone();
        let function = &call["function"];
        assert_eq!(function["name"], "get_weather");
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap()));
        assert!(
            arguments["days"].is_u64() && arguments["exact"].is_boolean(),
            "{name}: {arguments}"
        );
        body["stream"] = true.into();
        assert_eq!(streamed(&server, &body)["function"], *function, "{name}");

        // The second turn has the call in its prompt, and may call again.
        let id = "abcdefghi";
        let mut message = choice["message"].clone();
        message["tool_calls"][0]["id"] = id.into();
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(message);
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": "21"}));
        for (field, value) in [
            ("stream", json!(false)),
            ("tool_choice", json!("auto")),
            ("max_tokens", json!(4)),
        ] {
            body[field] = value;
        }
        let mut n_prompt = |place: &str| {
            let arguments = json!({"place": place, "days": 1, "exact": true}).to_string();
            body["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments.into();
            let answer = server.ok("/v1/chat/completions", &body);
            answer["usage"]["prompt_tokens"].as_u64().unwrap()
        };
        let (short, long) = (n_prompt("Rome"), n_prompt(&"Rome and Oslo, ".repeat(9)));
        assert!(long > short + 18, "{name}: {short}, {long}");
    }
}

#[test]
fn one_call_at_most_ends_an_answer_that_may_have_none() {
    let server = shared();
    let call = "<tool_call><function=look></function></tool_call>";
    let text = format!("So {call} {call} and more");
    // Whatever the model likes: it is told that it writes this text.
    let schema = json!({"const": text});
    let function = json!({"name": "look", "parameters": {"type": "object", "properties": {}}});
    let messages = json!([{"role": "user", "content": "Look!"}]);
    let chat = |parallel: bool| {
        json!({
            "model": "builtin", "messages": messages, "parallel_tool_calls": parallel,
            "tools": [{"type": "function", "function": function}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}},
        })
    };
    let response = |parallel: bool| {
        let mut tool = function.clone();
        tool["type"] = "function".into();
        json!({
            "model": "builtin", "input": messages, "parallel_tool_calls": parallel, "tools": [tool],
            "text": {"format": {"type": "json_schema", "name": "text", "schema": schema}},
        })
    };
    let message = |parallel: bool| {
        json!({
            "model": "builtin", "messages": messages, "max_tokens": 1000,
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": !parallel},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        })
    };
    let n_generated = |body: &Value| {
        let usage = &body["usage"];
        let n = usage
            .get("completion_tokens")
            .unwrap_or(&usage["output_tokens"]);
        n.as_u64().unwrap()
    };
    for (path, body, calls, finish) in [
        (
            "/v1/chat/completions",
            &chat as &dyn Fn(bool) -> Value,
            ("/choices/0/message/tool_calls", "function"),
            ("/choices/0/finish_reason", "tool_calls"),
        ),
        (
            "/v1/responses",
            &response,
            ("/output", "function_call"),
            ("/status", "completed"),
        ),
        (
            "/v1/messages",
            &message,
            ("/content", "tool_use"),
            ("/stop_reason", "tool_use"),
        ),
    ] {
        let answer = |parallel| {
            let answer = server.ok(path, &body(parallel));
            let all = answer.pointer(calls.0).and_then(Value::as_array).unwrap();
            let n = all.iter().filter(|item| item["type"] == calls.1).count();
            assert_eq!(answer.pointer(finish.0).unwrap(), finish.1, "{answer}");
            (n, n_generated(&answer), answer.to_string())
        };
        let ((two, all, long), (one, few, short)) = (answer(true), answer(false));
        assert_eq!((two, one), (2, 1), "{path}: {short}");
        assert!(few < all, "{path}: {few} of {all} tokens");
        // Some dialects repeat what was asked for.
        let n_more = |text: &str| text.matches("and more").count();
        assert_eq!(n_more(&long), n_more(&short) + 1, "{path}: {short}");

        let mut streamed = body(false);
        streamed["stream"] = true.into();
        let answer = server.post(path, &streamed);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let (text, name) = (answer.text(), "\"name\":\"look\"");
        for (_, data) in answer.events() {
            let said = [&data["delta"], &data["choices"]].map(Value::to_string);
            assert_eq!(n_more(&said.concat()), 0, "{text}");
        }
        let begins = ["response.output_item.added", "content_block_start"];
        let begun = answer.events().into_iter().filter(|(event, data)| {
            let begins = event
                .as_ref()
                .is_none_or(|event| begins.contains(&&**event));
            begins && data.to_string().contains(name)
        });
        assert_eq!(begun.count(), 1, "{text}");
    }
}

#[test]
fn thoughts_of_each_family_are_reasoning_in_every_dialect() {
    let families = [
        ("think", "<think>\n", "</think>"),
        ("command", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("minicpm", "<|thought_start|>\n", "<|thought_end|>"),
        ("gemma", "<|channel>thought\n", "<channel|>"),
    ];
    // None of these marks is a token here: the template tells of them beside tools, and opens a thought.
    let models = families.map(|(name, begin, end)| {
        let template = format!(
            "{{% if tools %}}{{{{ tools }}}} Think up to {end}{{% endif %}}\
             {{% for message in messages %}}{{{{ message.content }}}}\n{{% endfor %}}{{{{ {begin:?} }}}}"
        );
        model_with_template(name, 4096, &template)
    });
    let server = start_with(Vec::from(models), Settings::default());
    for (name, ..) in families {
        let messages = json!([{"role": "user", "content": "What is 3 plus 4?"}]);
        let body = json!({"model": name, "messages": messages, "max_tokens": 6, "temperature": 0});
        let answer = server.ok("/v1/chat/completions", &body);
        let message = &answer["choices"][0]["message"];
        let thought = message["reasoning_content"].as_str().unwrap_or_default();
        assert!(!thought.is_empty(), "{name}: {answer}");
        assert_eq!(
            message["content"].as_str().unwrap_or_default(),
            "",
            "{name}"
        );
        let answer = server.ok("/v1/messages", &body);
        let block = json!({"type": "thinking", "thinking": thought, "signature": ""});
        assert_eq!(answer["content"][0], block, "{name}");
        let input = json!({"model": name, "input": "What is 3 plus 4?", "max_output_tokens": 6, "temperature": 0});
        let answer = server.ok("/v1/responses", &input);
        assert_eq!(answer["output"][0]["type"], "reasoning", "{name}: {answer}");
        // What follows a thought that is over is said.
        let mut body = body;
        let begun = json!({"role": "assistant", "reasoning_content": "hm", "content": "The"});
        body["messages"].as_array_mut().unwrap().push(begun);
        let answer = server.ok("/v1/chat/completions", &body);
        let message = &answer["choices"][0]["message"];
        assert!(message["reasoning_content"].is_null(), "{name}: {answer}");
        assert_ne!(message["content"], "", "{name}");
    }
}
