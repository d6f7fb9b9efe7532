//! What grammars let through is what is read, and nothing else is let through.

use serde_json::json;
use sterna::constraint::{Constraint, Constraints, Vocabulary};
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

fn beginning(opens_thinking: bool) -> Beginning {
    match opens_thinking {
        true => Beginning::Thought,
        false => Beginning::Answer,
    }
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
        (
            ToolFormat::Named,
            "[TOOL_CALLS]weather[ARGS]{\"place\": \"Rome\"}[TOOL_CALLS]stop[ARGS]{}",
            2,
            "[TOOL_CALLS]weather[ARGS]{}",
        ),
        (
            ToolFormat::Python,
            "<|tool_call_start|>[weather(place=\"Rome\"), stop(now=true, why=[1, \"]\"])]<|tool_call_end|>",
            2,
            "<|tool_call_start|>[weather()]<|tool_call_end|>",
        ),
        (
            ToolFormat::TaggedList,
            "<tool_calls>[\n    {\"name\": \"stop\", \"arguments\": {}},\n    \
             {\"name\": \"stop\", \"arguments\": {}}\n]</tool_calls>",
            2,
            "<tool_calls>[\n    {\"name\": \"weather\", \"arguments\": {}}\n]</tool_calls>",
        ),
        (
            ToolFormat::DeepSeek,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"Rome\"}\n```\
             <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
            2,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
        ),
        (
            ToolFormat::DeepSeekPlain,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": \"Rome\"}<｜tool▁call▁end｜>\
             <｜tool▁calls▁end｜>",
            1,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ] {
        for opens_thinking in [false, true] {
            let ask = |parallel| Calls::Must {
                tools: tools(),
                parallel,
            };
            let grammar = |parallel| {
                let calls = ask(parallel);
                grammar(format, &tokenizer, &calls, None, beginning(opens_thinking))
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
                ..Expected::default()
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
                beginning(opens_thinking),
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
fn calls_in_python_match_their_schemas() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let schema = json!({
        "properties": {
            "a": {"type": "boolean"}, "b": {"type": "string"}, "c": {"enum": ["x", null]}, "d": {"type": "null"},
        },
        "required": ["b"],
    });
    let calls = Calls::Must {
        tools: vec![Tool::new("f", Some(&schema))],
        parallel: false,
    };
    let grammar = grammar(
        ToolFormat::Python,
        &tokenizer,
        &calls,
        None,
        Beginning::Answer,
    );
    let grammar = grammar.unwrap().unwrap();
    for (arguments, is_good) in [
        ("b=\"\\n)\"", true),
        ("a=True, b=\"\"", true),
        ("a=False, b=\"\", c=\"x\", d=None", true),
        ("b=\"\", d=None", true),
        ("", false),
        ("a=True", false),
        ("a=1, b=\"\"", false),
        (", b=\"\"", false),
        ("b=\"\", c=\"y\"", false),
        ("b=\"\", a=True", false),
    ] {
        let text = format!("<|tool_call_start|>[f({arguments})]<|tool_call_end|>");
        assert_eq!(matches(&grammar, &text), is_good, "{text}");
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
            "level": {"anyOf": [{"enum": ["low", "high"]}, {"type": "integer"}]},
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
    let grammar = grammar(format, &tokenizer, &calls, None, Beginning::Answer)
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
        (
            call("find", &[("text", "a"), ("level", "low"), spot]),
            Some(json!({"text": "a", "level": "low", "spot": {"x": 1.5}})),
        ),
        (
            call("find", &[("text", "a"), ("level", "7"), spot]),
            Some(json!({"text": "a", "level": 7, "spot": {"x": 1.5}})),
        ),
        (
            call("find", &[("text", "a"), ("level", "lower"), spot]),
            None,
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

/// A tokenizer with a token for each byte, one for the end of a tag with a line break, and these control tokens.
fn byte_tokenizer(control: &[&str]) -> Tokenizer {
    // As GPT-2 writes bytes: those that can't be printed are moved.
    let printed = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut moved = 256..;
    let names = (0..256).map(|byte| match printed(byte) {
        true => byte,
        false => moved.next().unwrap(),
    });
    let names = names.map(|name| char::from_u32(name).unwrap().to_string());
    let names = names.chain([">\u{10a}".to_owned()]);
    let vocab: Map<String, Value> = names.zip((0..).map(Value::from)).collect();
    let added = control.iter().zip(vocab.len()..).map(|(name, id)| {
        json!({"id": id, "content": name, "special": true, "normalized": false, "lstrip": false,
               "rstrip": false, "single_word": false})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    let tokenizer = json!({
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "merges": [[">", "\u{10a}"]], "vocab": vocab},
    });
    Tokenizer::from_hf_json(tokenizer.to_string().as_bytes(), None).unwrap()
}

/// How much of `text` a constraint lets through, and whether the answer may end there.
fn let_through(
    constraint: &mut dyn TokenConstraint,
    tokenizer: &Tokenizer,
    text: &str,
) -> (String, bool) {
    let ids = tokenizer
        .encode(text, sterna_text::Encode::TEMPLATE)
        .unwrap();
    let n_drafts = constraint.boxed().n_allowed(&ids);
    let may_come = |constraint: &mut dyn TokenConstraint, id: u32| {
        let allowed = constraint.allowed().unwrap();
        let bits = allowed.tokens[id as usize / 32];
        assert!(!constraint.is_free() || (allowed.end && bits & (1 << (id % 32)) != 0));
        bits & (1 << (id % 32)) != 0
    };
    let mut n = 0;
    while let Some(&id) = ids.get(n).filter(|id| may_come(constraint, **id)) {
        constraint.accept(id).unwrap();
        n += 1;
    }
    assert!(n_drafts <= n, "{text}: {n_drafts} drafts, {n} tokens");
    let options = Decode {
        skip_special: false,
    };
    (
        tokenizer.decode(&ids[..n], options),
        constraint.allowed().unwrap().end,
    )
}

#[test]
fn calls_of_strict_tools_match_and_nothing_else_has_to() {
    for control in [&[][..], &["<tool_call>", "</tool_call>"]] {
        let tokenizer = byte_tokenizer(control);
        let constraints = Constraints::new(tokenizer.clone());
        let mut tools = tools();
        tools[0].strict = true;
        for (format, good, deviates) in [
            (
                ToolFormat::Tagged,
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Rome\"}}\n</tool_call>",
                [
                    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"",
                    "more\": 1}}",
                ],
            ),
            (
                ToolFormat::Parameters,
                "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>\n</tool_call>",
                [
                    "<tool_call>\n<function=weather>\n<",
                    "/function>\n</tool_call>",
                ],
            ),
        ] {
            // Any parameters will do for the other one.
            let other = match format {
                ToolFormat::Parameters => {
                    "<tool_call>\n<function=stop>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
                }
                _ => "<tool_call>\n{\"name\": \"stop\", \"arguments\": {\"x\": [1]}}\n</tool_call>",
            };
            let call = constraints
                .of(&strict_grammar(format, &tools, &tokenizer))
                .unwrap();
            let strict = |may_think, opens_thinking| {
                StrictCalls::new(
                    &tokenizer,
                    "<tool_call>",
                    call.clone(),
                    (may_think, opens_thinking),
                )
            };
            for (mut strict, before) in [
                (strict(false, false), "Look: <tool"),
                (
                    strict(true, false),
                    " <think>\n<tool_call> or not</think>\n",
                ),
                (strict(true, false), "<thing> "),
                (strict(false, true), "<tool_call> or not</think>"),
            ] {
                // No token goes beyond a call.
                let good = format!("{before}{good} and {other} {good} so");
                assert_eq!(let_through(&mut strict, &tokenizer, &good), (good, true));
                // The same once more, after text.
                let [fits, deviates] = deviates;
                let text = format!("{fits}{deviates}");
                let (through, may_end) = let_through(&mut strict, &tokenizer, &text);
                assert_eq!((through.as_str(), may_end), (fits, false));
            }
            assert!(strict(true, true).is_free());
        }
    }
}

#[test]
fn an_answer_with_one_call_at_most_ends_behind_it() {
    let call = "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}";
    for control in [&[][..], &["<tool_call>", "</tool_call>"]] {
        let tokenizer = byte_tokenizer(control);
        let format = ToolFormat::Tagged;
        let expected = Expected {
            may_think: true,
            calls: Some(format),
            is_single: true,
            ..Expected::default()
        };
        let constraints = Constraints::new(tokenizer.clone());
        let strict = constraints
            .of(&strict_grammar(format, &tools(), &tokenizer))
            .unwrap();
        let strict = StrictCalls::new(&tokenizer, "<tool_call>", strict, (true, false));
        let strict: Box<dyn TokenConstraint> = Box::new(strict);
        for inner in [None, Some(strict)] {
            let marks = format.tokens(&tokenizer);
            let splitter = Splitter::new(expected.clone());
            let single = SingleCall::new(&tokenizer, &marks, splitter, inner);
            let through = |text: &str| let_through(&mut single.clone(), &tokenizer, text);
            let before = format!("<think>{call}</think>Look: ");
            let end = "\n</tool_call>";
            let text = format!("{before}{call}{end}\n{call}{end}");
            assert_eq!(through(&text), (format!("{before}{call}"), true));
            // What is no call ends nothing.
            let text = format!("{before}<tool> {{}}");
            assert_eq!(through(&text), (text, true));
            assert!(single.is_free());
        }
    }
}

#[test]
fn what_is_said_on_channels_matches_after_what_is_thought() {
    let tokenizer = byte_tokenizer(&channels::MARKS);
    assert!(channels::has(&tokenizer) && !channels::has(&byte_tokenizer(&[])));
    let constraints = Constraints::new(tokenizer.clone());
    let format = ToolFormat::Channels;
    let must = Calls::Must {
        tools: tools(),
        parallel: true,
    };
    let asked = Grammar::Regex("[0-9]+".to_owned());
    let thought = "<|channel|>analysis<|message|>12 or {\n";
    let after = "<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"place\": \"Rome\"}";
    for (calls, asked, good, bad) in [
        (
            &must,
            None,
            call,
            "<|channel|>commentary to=functions.other",
        ),
        (&must, None, call, "<|channel|>final"),
        (
            &Calls::None,
            Some(&asked),
            "<|channel|>final<|message|>17",
            "<|channel|>final<|message|>x",
        ),
    ] {
        for (beginning, before) in [
            (Beginning::Message, ""),
            (Beginning::Message, &*format!("{thought}{after}")),
            (Beginning::Analysis, &*format!("so{after}")),
        ] {
            let grammar = grammar(format, &tokenizer, calls, asked, beginning)
                .unwrap()
                .unwrap();
            let through =
                |text: &str| let_through(&mut *constraints.of(&grammar).unwrap(), &tokenizer, text);
            let text = format!("{before}{good}");
            assert_eq!(through(&text), (text, true));
            let text = format!("{before}{bad}");
            assert_ne!(through(&text).0, text);
        }
    }
}
