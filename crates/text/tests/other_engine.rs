//! Every template of the test data, with conversations made up at random, as minijinja renders it.

#[path = "minijinja/mod.rs"]
mod minijinja;

use crate::common;
use proptest::prelude::*;
use serde_json::{Value, json};
use sterna_text::{ChatInput, ChatTemplate, SpecialTokens};

/// The templates of the test data and those that we have built in.
fn templates() -> Vec<(String, String)> {
    let cases: Vec<Value> =
        serde_json::from_slice(&common::bytes("chat-templates/huggingface-jinja-e2e.json"))
            .unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut templates: Vec<(String, String)> = cases
        .iter()
        .map(|case| (text(&case["name"]), text(&case["chat_template"])))
        .collect();
    for folder in [
        "chat-templates/llama.cpp-templates",
        "../crates/text/src/template/builtin",
    ] {
        for file in std::fs::read_dir(common::path(folder)).unwrap() {
            let path = file.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "jinja")
            {
                let source = std::fs::read_to_string(&path).unwrap();
                templates.push((path.display().to_string(), source));
            }
        }
    }
    templates
}

fn content() -> impl Strategy<Value = Value> {
    let text = "(\\PC|[ \n'\"<>{}%|\\\\]|<think>|</think>|[a-z ]{3}|\n\n){0,20}";
    prop_oneof![
        6 => text.prop_map(Value::from),
        1 => text.prop_map(|text| json!([{ "type": "text", "text": text }])),
        1 => Just(Value::Null),
    ]
}

fn message() -> impl Strategy<Value = Value> {
    let role = prop_oneof![
        Just("system"),
        Just("user"),
        Just("user"),
        Just("assistant"),
        Just("assistant"),
        Just("tool"),
        Just("ipython"),
    ];
    let call = json!([{ "type": "function", "id": "abcdefghi", "function": {
        "name": "get", "arguments": { "a": "x'\"é", "b": [1, 2.5, null, true] }
    } }]);
    (role, content(), any::<bool>(), any::<bool>()).prop_map(move |(role, content, calls, id)| {
        let mut message = json!({ "role": role, "content": content });
        if calls && role == "assistant" {
            message["tool_calls"] = call.clone();
        }
        if id && role == "tool" {
            message["tool_call_id"] = "abcdefghi".into();
            message["name"] = "get".into();
        }
        message
    })
}

fn tools() -> Vec<Value> {
    vec![json!({ "type": "function", "function": {
        "name": "get", "description": "Gets \"it\" — é.", "parameters": {
            "type": "object", "required": ["a"], "properties": {
                "a": { "type": "string", "description": "A\nname", "enum": ["x", "y"] },
                "b": { "type": "array", "items": { "type": "number" } },
                "c": { "type": ["string", "null"], "default": null },
                "d": { "type": "object", "properties": { "e": { "type": "integer" } } },
            },
        },
    } })]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn as_minijinja_renders_them(
        messages in prop::collection::vec(message(), 0..6),
        // Conversations as they should be: most templates refuse others.
        turns in prop::collection::vec(content(), 1..6),
        regular: bool,
        with_tools: bool,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) {
        let mut input = ChatInput {
            messages: match regular {
                false => messages,
                true => turns.into_iter().enumerate().map(|(at, content)| {
                    let role = if at % 2 == 0 { "user" } else { "assistant" };
                    json!({ "role": role, "content": content })
                }).collect(),
            },
            tools: with_tools.then(tools),
            add_generation_prompt,
            enable_thinking,
            ..ChatInput::default()
        };
        input.extra.insert("bos_token".into(), "<s>".into());
        input.extra.insert("eos_token".into(), "</s>".into());
        for (name, source) in templates() {
            // The other engine has no clock.
            let source = format!("{{% macro strftime_now(f) %}}{{{{ f }}}}{{% endmacro %}}{source}");
            let ours = ChatTemplate::new(&source, &SpecialTokens::default())
                .and_then(|template| template.render(&input));
            let other = minijinja::render(&source, &input);
            match (&ours, &other) {
                (Ok(ours), Ok(other)) => prop_assert_eq!(ours, other, "{}", name),
                (Err(_), Err(_)) => {}
                _ => prop_assert!(false, "{}\nours  {:?}\nother {:?}", name, ours, other),
            }
        }
    }
}
