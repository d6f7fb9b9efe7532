//! What grammars let through is what is read, and nothing else is let through.

use serde_json::json;
use sterna::constraint::{Constraint, Vocabulary};
use sterna_text::Tokenizer;

use super::split::{Expected, Part, Splitter};
use super::tools::{Tool, ToolFormat};
use super::*;

/// Every byte is a token.
const TOKENIZER: &[u8] = br#"{"model": {"type": "BPE", "merges": [], "vocab": {"a": 0}}}"#;

fn matches(grammar: &Grammar, text: &str) -> bool {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let vocabulary = Vocabulary::new(bytes).unwrap();
    let mut constraint = Constraint::new(&vocabulary, grammar).unwrap();
    let is_let_through = text.bytes().all(|byte| {
        let allowed = constraint.allowed().unwrap().tokens;
        let is_allowed = allowed[usize::from(byte) / 32] & (1 << (byte % 32)) != 0;
        is_allowed && constraint.accept(u32::from(byte)).is_ok()
    });
    is_let_through && constraint.allowed().unwrap().end
}

fn tools() -> Vec<Tool> {
    let place = json!({"$ref": "#/$defs/place"});
    let weather = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"place": place},
        "required": ["place"],
        "$defs": {"place": {"type": "string"}},
    });
    vec![
        Tool::new("weather", Some(&weather)),
        Tool::new("stop", None),
    ]
}

#[test]
fn calls_that_have_to_be_made_are_read() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    for (format, good, n_calls, bad) in [
        (
            ToolFormat::Parameters,
            "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n\n<b>\n</parameter>\n</function>\n</tool_call>\n\
             <tool_call>\n<function=stop>\n<parameter=now>\n1\n</parameter>\n</function>\n</tool_call>",
            2,
            "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
        ),
        (
            ToolFormat::Tagged,
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"</tool_call>\"}}\n</tool_call>\n\
             <tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
            2,
            "<tool_call>\n{\"name\": \"other\", \"arguments\": {}}\n</tool_call>",
        ),
        (
            ToolFormat::Bare,
            "{\"name\": \"weather\", \"parameters\": {\"place\": \"Rome\"}}",
            1,
            "{\"name\": \"weather\", \"parameters\": {\"place\": \"Rome\", \"more\": 1}}",
        ),
        (
            ToolFormat::List,
            "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}, {\"name\": \"stop\", \"arguments\": {}}]",
            2,
            "[TOOL_CALLS]{\"name\": \"stop\"}",
        ),
    ] {
        for opens_thinking in [false, true] {
            let ask = |parallel| Calls::Must {
                tools: tools(),
                parallel,
            };
            let grammar = |parallel| {
                let calls = ask(parallel);
                grammar(format, &tokenizer, &calls, None, opens_thinking)
                    .unwrap()
                    .unwrap()
            };
            let before = if opens_thinking {
                "hm {\n</think>\n\n"
            } else {
                ""
            };
            let [good, bad] = [good, bad].map(|text| format!("{before}{text}"));
            assert!(matches(&grammar(true), &good), "{good}");
            assert_eq!(matches(&grammar(false), &good), n_calls == 1, "{good}");
            assert!(!matches(&grammar(true), &bad), "{bad}");
            let mut splitter = Splitter::new(Expected {
                opens_thinking,
                may_think: opens_thinking,
                calls: Some(format),
                tools: tools().into(),
                trims: false,
            });
            let mut parts = splitter.push(&good);
            parts.extend(splitter.finish());
            let is_begun = |part: &&Part| matches!(part, Part::CallBegun { .. });
            assert_eq!(parts.iter().filter(is_begun).count(), n_calls, "{parts:?}");
            assert!(!parts.iter().any(|part| matches!(part, Part::Text(_))));
        }
    }
}

#[test]
fn what_a_model_thinks_first_matches_nothing() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let schema =
        json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    for (asked, good, bad) in [
        (
            Grammar::JsonSchema(schema.to_string()),
            "{\"x\": 1}",
            "{\"x\": \"1\"}",
        ),
        (Grammar::JsonObject, "{\"a\": [1, null]}", "[1]"),
        (
            Grammar::Regex("[a-c]/(yes|no)".to_owned()),
            "b/no",
            "b/maybe",
        ),
        // With names of rules that the grammar around it has too, and a bracket in a text.
        (
            Grammar::Lark(
                "start: thought \"}\" body\n%ignore \" \"\nthought: \"yes\" | \"no\"\nbody: /[0-9]+/ // digits"
                    .to_owned(),
            ),
            "no } 17",
            "no } x",
        ),
    ] {
        for opens_thinking in [false, true] {
            let format = ToolFormat::default();
            let found = grammar(
                format,
                &tokenizer,
                &Calls::None,
                Some(&asked),
                opens_thinking,
            );
            let found = found.unwrap().unwrap();
            let before = if opens_thinking {
                "so {\"x\": \"\n</think>\n\n"
            } else {
                ""
            };
            assert!(matches(&found, &format!("{before}{good}")), "{good}");
            assert!(!matches(&found, &format!("{before}{bad}")), "{bad}");
            assert!(!matches(&found, before));
        }
    }
}

#[test]
fn parameters_match_their_schemas() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let schema = json!({
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["C", "F", null]},
            "count": {"type": "integer"},
            "spot": {"$ref": "#/$defs/spot"},
            "free": {},
        },
        "required": ["text", "spot"],
        "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    });
    let tools = vec![
        Tool::new("find", Some(&schema)),
        Tool::new("none", Some(&json!({"properties": {}}))),
    ];
    let calls = Calls::Must {
        tools: tools.clone(),
        parallel: false,
    };
    let format = ToolFormat::Parameters;
    let grammar = grammar(format, &tokenizer, &calls, None, false)
        .unwrap()
        .unwrap();
    let parameter =
        |name: &str, value: &str| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let call = |name: &str, parameters: &[(&str, &str)]| {
        let parameters = parameters
            .iter()
            .map(|(name, value)| parameter(name, value));
        let parameters: String = parameters.collect();
        format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    };
    let spot = ("spot", "{\"x\": 1.5}");
    for (text, arguments) in [
        (
            call("find", &[("text", "<p>\n\"1\"\n</p>"), spot]),
            Some(json!({"text": "<p>\n\"1\"\n</p>", "spot": {"x": 1.5}})),
        ),
        (
            call(
                "find",
                &[
                    ("text", ""),
                    ("unit", "null"),
                    ("count", "12"),
                    spot,
                    ("free", "true"),
                ],
            ),
            Some(json!({"text": "", "unit": null, "count": 12, "spot": {"x": 1.5}, "free": true})),
        ),
        (
            call(
                "find",
                &[("text", "null"), ("unit", "F"), spot, ("free", "a b")],
            ),
            Some(json!({"text": "null", "unit": "F", "spot": {"x": 1.5}, "free": "a b"})),
        ),
        (call("none", &[]), Some(json!({}))),
        (call("none", &[("text", "a")]), None),
        (call("find", &[("text", "a")]), None),
        (call("find", &[spot, ("text", "a")]), None),
        (call("find", &[("text", "a"), ("unit", "K"), spot]), None),
        (
            call("find", &[("text", "a"), ("count", "many"), spot]),
            None,
        ),
        (
            call("find", &[("text", "a"), ("spot", "{\"x\": \"y\"}")]),
            None,
        ),
        (call("find", &[("text", "a"), spot, ("other", "b")]), None),
        (call("other", &[]), None),
    ] {
        assert_eq!(matches(&grammar, &text), arguments.is_some(), "{text}");
        let Some(arguments) = arguments else { continue };
        let mut splitter = Splitter::new(Expected {
            calls: Some(format),
            tools: tools.clone().into(),
            ..Expected::default()
        });
        let mut parts = splitter.push(&text);
        parts.extend(splitter.finish());
        let said = parts.iter().filter_map(|part| match part {
            Part::CallArguments { text, .. } => Some(text.as_str()),
            _ => None,
        });
        let said: String = said.collect();
        assert_eq!(
            serde_json::from_str::<Value>(&said).unwrap(),
            arguments,
            "{said}"
        );
    }
}
