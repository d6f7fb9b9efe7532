//! Real chat templates against their recorded renderings.

use crate::common;
use serde_json::{Map, Value};
use sterna_text::{ChatInput, ChatTemplate, DateTime, SpecialTokens};

/// The moment at which the renderings were recorded: 2025-07-10T12:00Z.
const RECORDED: i64 = 1_752_148_800;

/// Templates whose recorded rendering is not what Transformers gives, and why.
///
/// The recordings were made by Hugging Face's JavaScript engine. For these two, `expected.json` holds what Jinja2 gives.
const WRONGLY_RECORDED: [(&str, &str); 2] = [
    (
        "MadeAgents/Hammer2.1",
        "prints the list of tools without `tojson`: Jinja2 writes Python's form, the recording has JSON",
    ),
    (
        "ai21labs/AI21-Jamba-Large-1.6",
        "asks whether `add_generation_prompt` is defined: in Transformers it always is",
    ),
];

/// Where we differ from Jinja2 on purpose or cannot follow it: the beginning of the template's name or source, and why.
const DIFFERENCES: [(&str, &str); 7] = [
    (
        "llama.cpp-templates/NousResearch-Hermes",
        "a loop over `None` is empty instead of an error",
    ),
    (
        "llama.cpp-templates/llama-cpp-deepseek-r1.jinja tools",
        "`map` gives a list, which `tojson` can write",
    ),
    (
        "llama.cpp-templates/meetkai-functionary-medium-v3.1.jinja tools",
        "marks a string as safe HTML, upon which Jinja2 escapes what is joined to it, JSON included",
    ),
    (
        "{% for x in nothing %}",
        "a loop over `None` is empty instead of an error",
    ),
    (
        "{{ '{} and {name}'.format",
        "`%` on strings is not supported; the `format` method and filter are",
    ),
    ("{{ loop }}|{{ self", "`self` is not defined"),
    ("{{ lipsum is defined", "there is no test `callable`"),
];

fn is_known_difference(name: &str) -> bool {
    DIFFERENCES.iter().any(|(start, _)| name.starts_with(start))
}

/// Splits the variables of a case into what [`ChatInput`] names and the rest.
fn input(data: &Map<String, Value>) -> ChatInput {
    let mut data = data.clone();
    let list = |value: Option<Value>| value.and_then(|value| value.as_array().cloned());
    ChatInput {
        messages: list(data.remove("messages")).unwrap_or_default(),
        tools: list(data.remove("tools")),
        documents: list(data.remove("documents")),
        add_generation_prompt: data.remove("add_generation_prompt") == Some(Value::Bool(true)),
        enable_thinking: data
            .remove("enable_thinking")
            .and_then(|value| value.as_bool()),
        extra: data,
        now: Some(DateTime::from_unix(RECORDED, 0)),
    }
}

#[test]
fn templates_of_real_models() {
    let cases: Vec<Value> =
        serde_json::from_slice(&common::bytes("chat-templates/huggingface-jinja-e2e.json"))
            .unwrap();
    assert_eq!(cases.len(), 36);
    let by_jinja2 = expected();
    let mut failures = Vec::new();
    for (case, by_jinja2) in cases.iter().zip(by_jinja2["recorded"].as_array().unwrap()) {
        let name = case["name"].as_str().unwrap();
        let wrong = WRONGLY_RECORDED.iter().any(|(wrong, _)| *wrong == name);
        let expected = if wrong {
            &by_jinja2["text"]
        } else {
            &case["target"]
        };
        assert!(
            !wrong || case["target"] != *expected,
            "{name}: the note is out of date"
        );
        let template = ChatTemplate::new(
            case["chat_template"].as_str().unwrap(),
            &SpecialTokens::default(),
        );
        let rendered = template
            .and_then(|template| template.render(&input(case["data"].as_object().unwrap())));
        if rendered.as_deref().ok() != expected.as_str() {
            failures.push(format!(
                "{name}\n found    {rendered:?}\n expected {expected}"
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What Jinja2 makes of templates, written by `testdata/chat-templates/make.py`.
fn expected() -> Value {
    serde_json::from_slice(&common::bytes("chat-templates/expected.json")).unwrap()
}

/// The name of the case, and how what we found differs from what Jinja2 said; an error on both sides is agreement.
fn difference(
    name: &str,
    source: &str,
    specials: &SpecialTokens,
    data: &Value,
    case: &Value,
) -> Option<String> {
    let rendered = ChatTemplate::new(source, specials)
        .and_then(|template| template.render(&input(data.as_object().unwrap())));
    match (rendered, case["text"].as_str(), case["error"].as_str()) {
        (Ok(found), Some(text), _) if found == text => None,
        (Err(_), None, Some(_)) => None,
        _ if is_known_difference(name) => None,
        (found, text, error) => Some(format!(
            "{name}\n found    {found:?}\n expected {:?}",
            text.or(error)
        )),
    }
}

fn specials(expected: &Value) -> SpecialTokens {
    let mut specials = SpecialTokens::default();
    specials.bos = expected["specials"]["bos_token"].as_str().map(String::from);
    specials.eos = expected["specials"]["eos_token"].as_str().map(String::from);
    specials
}

#[test]
fn more_templates_as_jinja2_renders_them() {
    let expected = expected();
    let specials = specials(&expected);
    let mut differences = Vec::new();
    for (group, folder) in [
        ("llama_cpp", "chat-templates"),
        ("builtin", "../crates/text/src/template/builtin"),
    ] {
        for case in expected[group].as_array().unwrap() {
            let (file, name) = (
                case["template"].as_str().unwrap(),
                case["case"].as_str().unwrap(),
            );
            let source = common::text(&format!("{folder}/{file}"));
            let data = &expected["conversations"][name];
            differences.extend(difference(
                &format!("{file} {name}"),
                &source,
                &specials,
                data,
                case,
            ));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn features_of_jinja_as_jinja2_has_them() {
    let expected = expected();
    let mut differences = Vec::new();
    for case in expected["features"].as_array().unwrap() {
        let source = case["source"].as_str().unwrap();
        differences.extend(difference(
            source,
            source,
            &SpecialTokens::default(),
            &expected["data"],
            case,
        ));
    }
    assert!(
        differences.is_empty(),
        "{} differ\n{}",
        differences.len(),
        differences.join("\n")
    );
}
