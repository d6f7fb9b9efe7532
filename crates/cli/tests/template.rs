//! `sterna template`: prompts for conversations with tools, as Transformers renders them.

use std::fs;
use std::path::Path;

use crate::common::{refusal, stdout, sterna, testdata, testdata_json};

/// A model whose chat template knows tools.
fn model(dir: &Path) {
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let from = testdata("stories260K/hf").join(name);
        if from.exists() {
            fs::copy(from, dir.join(name)).unwrap();
        }
    }
    let template = "chat-templates/llama.cpp-templates/Qwen-Qwen2.5-7B-Instruct.jinja";
    fs::copy(testdata(template), dir.join("chat_template.jinja")).unwrap();
}

#[test]
fn tools_are_given_as_json_or_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    let expected = testdata_json("chat-templates/expected.json");
    let conversation = &expected["conversations"]["tools"];
    let cases = expected["llama_cpp"].as_array().unwrap();
    let case = cases.iter().find(|case| {
        let template = case["template"].as_str().unwrap();
        template.contains("Qwen2.5") && case["case"] == "tools"
    });
    let expected = case.unwrap()["text"].as_str().unwrap();
    let write = |name: &str, value: &serde_json::Value| {
        let path = dir.path().join(name);
        fs::write(&path, value.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let messages = write("messages.json", &conversation["messages"]);
    let file = write("tools.json", &conversation["tools"]);
    let text = conversation["tools"].to_string();
    let begins = conversation["add_generation_prompt"] == true;
    for tools in [&file, &text] {
        let model = dir.path().to_str().unwrap();
        let mut args = vec!["template", model, "--messages", &messages, "--tools", tools];
        if !begins {
            args.push("--no-generation-prompt");
        }
        assert_eq!(stdout(&args), expected);
    }
}

#[test]
fn the_answer_is_begun_unless_that_is_not_wanted() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    let template = "{{ documents | tojson }}{{ '|>' if add_generation_prompt }}";
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let messages = dir.path().join("messages.json");
    fs::write(&messages, "[]").unwrap();
    let model = dir.path().to_str().unwrap();
    let args = ["template", model, "--messages", messages.to_str().unwrap()];
    assert_eq!(stdout(&args), "null|>");
    let documents = [&args[..], &["--documents", r#"[{"text": "é"}]"#]].concat();
    assert_eq!(stdout(&documents), r#"[{"text": "é"}]|>"#);
    let ended = [&documents[..], &["--no-generation-prompt"]].concat();
    assert_eq!(stdout(&ended), r#"[{"text": "é"}]"#);
}

#[test]
fn a_template_for_tools_is_taken_where_there_are_some() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    let templates = r#"{"chat_template": [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"}
    ]}"#;
    fs::write(dir.path().join("chat_template.json"), templates).unwrap();
    let messages = dir.path().join("messages.json");
    fs::write(&messages, "[]").unwrap();
    let model = dir.path().to_str().unwrap();
    let args = ["template", model, "--messages", messages.to_str().unwrap()];
    assert_eq!(stdout(&args), "plain");
    let tools = [&args[..], &["--tools", r#"["a"]"#]].concat();
    assert_eq!(stdout(&tools), r#"["a"]"#);
}

#[test]
fn tools_without_effect_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let messages = dir.path().join("messages.json");
    fs::write(
        &messages,
        "\u{feff}[{\"role\": \"user\", \"content\": \"Hello!\"}]",
    )
    .unwrap();
    let told = |model: &str| {
        let messages = messages.to_str().unwrap();
        let args = [
            "template",
            model,
            "--messages",
            messages,
            "--tools",
            r#"["a"]"#,
        ];
        let output = sterna(&args);
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let warning = "warning: --tools: the chat template of builtin makes no use of them";
    assert!(told("builtin").contains(warning));
    model(dir.path());
    assert!(!told(dir.path().to_str().unwrap()).contains("--tools"));
}

#[test]
fn wrong_tools_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let messages = dir.path().join("messages.json");
    fs::write(&messages, "[]").unwrap();
    let args = [
        "template",
        "builtin",
        "--messages",
        messages.to_str().unwrap(),
    ];
    for (tools, message) in [
        ("{\"a\": 1}", "--tools: expected a JSON array"),
        ("[1", "--tools: expected a JSON array"),
        ("nowhere.json", "nowhere.json: cannot read"),
    ] {
        let found = refusal(&[&args[..], &["--tools", tools]].concat());
        assert!(
            found.contains(message),
            "`{found}` does not say `{message}`"
        );
    }
}
