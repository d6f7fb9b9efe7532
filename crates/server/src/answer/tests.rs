//! What grammars let through is what is read, and nothing else is let through.

use serde_json::json;
use sterna::constraint::{Constraint, Constraints, Vocabulary};
use sterna_text::{ChatInput, ChatTemplate, SpecialTokens, Tokenizer};

use super::split::{Expected, Part, Splitter};
use super::thoughts::{ALL, GEMMA, MINICPM, THINK};
use super::tools::{CallStyle, Tool, ToolFormat};
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
        (
            ToolFormat::Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
             {\"place\": \"Rome\"}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}\
             <|tool_call_end|><|tool_calls_section_end|>",
            2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}\
             <|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            ToolFormat::Actions,
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": \
             {\"place\": \"Rome\"}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"stop\", \"parameters\": {}}\n]\
             <|END_ACTION|>",
            2,
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {}}\n]\
             <|END_ACTION|>",
        ),
        (
            ToolFormat::Functions,
            "<function=weather>{\"place\": \"</function>\"}</function><function=stop>{}</function>",
            2,
            "<function=weather>{}</function>",
        ),
        (
            ToolFormat::PythonBlock,
            "<|tool_call_start|>\n```python\nweather(place=\"Rome\")\nstop(now=true,why=[1, \")\"])\n```\n\
             <|tool_call_end|>",
            2,
            "<|tool_call_start|>\n```python\nweather()\n```\n<|tool_call_end|>",
        ),
        (
            ToolFormat::Gemma,
            "<|tool_call>call:weather{place:<|\"|>Rome\n} <|\"|>}<tool_call|>\
             <|tool_call>call:stop{now:true,why:[1,{a:<|\"|><|\"|>}]}<tool_call|>",
            2,
            "<|tool_call>call:weather{}<tool_call|>",
        ),
        (
            ToolFormat::FunctionGemma,
            "<start_function_call>call:weather{place:<escape>Rome<escape>}<end_function_call>",
            1,
            "<start_function_call>call:weather{place:1}<end_function_call>",
        ),
        (
            ToolFormat::Pairs,
            "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome\n\n<b></arg_value>\n</tool_call>\n\
             <tool_call>stop<arg_key>now</arg_key><arg_value>1</arg_value></tool_call>",
            2,
            "<tool_call>weather\n</tool_call>",
        ),
    ] {
        // Where tools are strict, the same is let through from the mark on.
        if let Some(mark) = format.mark() {
            let mut strict = tools();
            strict.iter_mut().for_each(|tool| tool.strict = true);
            let strict = strict_grammar(format, &strict, &tokenizer);
            let after = |text: &'static str| text.split_once(mark).unwrap().1;
            assert_ne!(let_through_of(&strict, after(good)), "", "{good}");
            assert_eq!(let_through_of(&strict, after(bad)), "", "{bad}");
        }
        for opens_thinking in [false, true] {
            let ask = |parallel| Calls::Must {
                tools: tools(),
                parallel,
            };
            let grammar = |parallel| {
                let calls = ask(parallel);
                grammar(
                    format,
                    (&tokenizer, &THINK),
                    &calls,
                    None,
                    beginning(opens_thinking),
                )
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

/// How much of `text` `grammar` lets through up to a place where the answer may end.
fn let_through_of<'a>(grammar: &Grammar, text: &'a str) -> &'a str {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let vocabulary = Vocabulary::new(bytes).unwrap();
    let mut constraint = Constraint::new(&vocabulary, grammar).unwrap();
    let mut end = 0;
    for at in 0..=text.len() {
        let allowed = constraint.allowed().unwrap();
        end = if allowed.end { at } else { end };
        let Some(byte) = text.as_bytes().get(at) else {
            break;
        };
        if allowed.tokens[usize::from(*byte) / 32] & (1 << (byte % 32)) == 0 {
            break;
        }
        constraint.accept(u32::from(*byte)).unwrap();
    }
    &text[..end]
}

#[test]
fn calls_as_templates_write_them_are_let_through_and_read() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let call = |id: &str, name: &str, arguments: Value| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let calls = [
        call("abcdefghi", "weather", json!({"place": "Rome"})),
        call("abcdefghj", "stop", json!({"now": true, "why": "so"})),
    ];
    let mut formats = Vec::new();
    for (name, source) in tools::tests::templates() {
        let mut specials = SpecialTokens::default();
        specials.bos = Some("<s>".to_owned());
        specials.eos = Some("</s>".to_owned());
        let template = ChatTemplate::new(&source, &specials).unwrap();
        let style = CallStyle::probe(|input| template.render(input).ok());
        let Some(format) = style.format else { continue };
        // Mistral's have ids, which no answer needs; of these one has the name last, the others no end of all calls.
        let others = ["Hermes-2-Pro-Llama-3-8B (JSON", "DeepSeek-R1-Distill"];
        if format == ToolFormat::List || others.iter().any(|other| name.contains(other)) {
            continue;
        }
        for n in 1..=calls.len() {
            let result = |call: &Value| json!({"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": "1"});
            let mut messages = vec![
                json!({"role": "user", "content": "x"}),
                json!({"role": "assistant", "content": "", "tool_calls": calls[..n]}),
            ];
            messages.extend(calls[..n].iter().map(result));
            style.apply(&mut messages);
            let input = ChatInput {
                messages,
                ..ChatInput::default()
            };
            // Some write one call at most.
            let text = match template.render(&input) {
                Ok(text) => text,
                Err(error) if n == 1 => panic!("{name}: {error}"),
                Err(_) => continue,
            };
            let begin = text.find("weather").unwrap();
            // What is before the first recipient is the prompt's.
            let begin = match format {
                ToolFormat::Recipients => begin,
                _ => text[..begin].rfind(format.mark().unwrap_or("{")).unwrap(),
            };
            let must = Calls::Must {
                tools: tools(),
                parallel: true,
            };
            let grammar = grammar(format, (&tokenizer, &THINK), &must, None, Beginning::Answer);
            let through = let_through_of(&grammar.unwrap().unwrap(), &text[begin..]);
            let mut splitter = Splitter::new(Expected {
                calls: Some(format),
                tools: tools().into(),
                messages: format.messages(),
                ..Expected::default()
            });
            let mut parts = splitter.push(through);
            parts.extend(splitter.finish());
            let mut found: Vec<(String, String)> = Vec::new();
            for part in parts {
                match (part, found.last_mut()) {
                    (Part::CallBegun { name, .. }, _) => found.push((name, String::new())),
                    (Part::CallArguments { text, .. }, Some((_, said))) => *said += &text,
                    (Part::CallEnded { .. }, _) => {}
                    (part, _) => panic!("{name}: {part:?} in {through}"),
                }
            }
            assert_eq!(
                found.len(),
                n,
                "{name}: {through:?} of {:?}",
                &text[begin..]
            );
            for ((name, arguments), call) in found.iter().zip(&calls) {
                let function = &call["function"];
                assert_eq!(*name, function["name"]);
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert_eq!(arguments, function["arguments"], "{name}: {through}");
            }
            formats.push(format);
        }
    }
    for format in [
        ToolFormat::Functions,
        ToolFormat::Kimi,
        ToolFormat::Pairs,
        ToolFormat::PythonBlock,
        ToolFormat::Recipients,
    ] {
        assert!(formats.contains(&format), "{format:?}");
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
                (&tokenizer, &THINK),
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
        (&tokenizer, &THINK),
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
fn calls_in_gemmas_notation_match_their_schemas() {
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let schema = json!({
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["C", 7, null, ["x", {"y": true}]]},
            "count": {"type": ["integer", "string"]},
            "Days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            "spot": {"$ref": "#/$defs/spot"},
            "free": {},
            "loop": {"$ref": "#/properties/loop"},
        },
        "required": ["text", "Days"],
        "$defs": {"spot": {"anyOf": [{"type": "null"}, {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/spot"}},
            "required": ["x"],
        }]}},
    });
    let tools = vec![Tool::new("f", Some(&schema))];
    let calls = Calls::Must {
        tools: tools.clone(),
        parallel: false,
    };
    let format = ToolFormat::Gemma;
    let grammar = grammar(
        format,
        (&tokenizer, &THINK),
        &calls,
        None,
        Beginning::Answer,
    )
    .unwrap()
    .unwrap();
    for (arguments, expected) in [
        (
            "Days:[1],text:<|\"|><|\"|>",
            Some(json!({"Days": [1], "text": ""})),
        ),
        (
            "count:3,Days:[1,2],free:{a:[true]},spot:{next:{x:1},x:2.5},text:<|\"|>a\"}<|\"|>,unit:[<|\"|>x<|\"|>,{y:true}]",
            Some(json!({
                "count": 3, "Days": [1, 2], "free": {"a": [true]}, "spot": {"next": {"x": 1}, "x": 2.5},
                "text": "a\"}", "unit": ["x", {"y": true}],
            })),
        ),
        (
            "count:<|\"|>3<|\"|>,Days:[1],loop:1,spot:null,text:<|\"|>b<|\"|>,unit:null",
            Some(json!({
                "count": "3", "Days": [1], "loop": 1, "spot": null, "text": "b", "unit": null,
            })),
        ),
        ("Days:[1]", None),
        ("Days:[],text:<|\"|><|\"|>", None),
        ("Days:[1,2,3],text:<|\"|><|\"|>", None),
        ("Days:[1.5],text:<|\"|><|\"|>", None),
        ("Days:[1],text:1", None),
        ("Days:[1],spot:{},text:<|\"|><|\"|>", None),
        ("Days:[1],text:<|\"|><|\"|>,unit:<|\"|>K<|\"|>", None),
        ("Days:[1],text:<|\"|><|\"|>,other:1", None),
    ] {
        let text = format!("<|tool_call>call:f{{{arguments}}}<tool_call|>");
        assert_eq!(matches(&grammar, &text), expected.is_some(), "{text}");
        let Some(expected) = expected else { continue };
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
        let said: Value = serde_json::from_str(&said.collect::<String>()).unwrap();
        assert_eq!(said, expected);
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
    let grammar = grammar(
        format,
        (&tokenizer, &THINK),
        &calls,
        None,
        Beginning::Answer,
    )
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
                    (&THINK, (may_think, opens_thinking)),
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

/// The marks of each family, with a tokenizer that has none of them, and with one whose control tokens they are.
fn with_marks() -> Vec<(&'static Thoughts, Tokenizer)> {
    let all = ALL.into_iter().flat_map(|thoughts| {
        let marks = [thoughts.begin_mark().0, thoughts.end].into_iter();
        let marks: Vec<_> = marks.chain(thoughts.said.into_iter().flatten()).collect();
        [
            (thoughts, byte_tokenizer(&[])),
            (thoughts, byte_tokenizer(&marks)),
        ]
    });
    all.collect()
}

#[test]
fn thoughts_are_known_by_tokens_or_by_templates() {
    for (thoughts, tokenizer) in with_marks() {
        let is_token = tokenizer.token_id(thoughts.end).is_some();
        let found = Thoughts::of(&tokenizer, "");
        assert_eq!(found, is_token.then_some(thoughts));
        assert_eq!(
            Thoughts::of(&tokenizer, thoughts.written[1]),
            Some(thoughts)
        );
        let ids = thoughts
            .ids(&tokenizer)
            .map(|(begin, end, _)| (begin.is_some(), end));
        assert_eq!(ids, tokenizer.token_id(thoughts.end).map(|end| (true, end)));
        assert!(thoughts.are_opened_by(&format!("model\n{}\n", thoughts.begin)));
        assert!(!thoughts.are_opened_by(&format!("{}{}", thoughts.begin, thoughts.end)));
    }
    let tokenizer = byte_tokenizer(&["<|channel>", "<channel|>"]);
    assert_eq!(GEMMA.ids(&tokenizer).unwrap().2, "thought\n");
    // MiniCPM3 has no tokens, but is told to think.
    let templates = tools::tests::templates();
    let (_, source) = (templates.iter().find(|(name, _)| name.contains("MiniCPM3"))).unwrap();
    let template = ChatTemplate::new(source, &SpecialTokens::default()).unwrap();
    let told = crate::model::probe_tools(&template);
    assert_eq!(Thoughts::of(&byte_tokenizer(&[]), &told), Some(&MINICPM));
}

#[test]
fn thoughts_of_each_family_are_told_apart() {
    for (thoughts, tokenizer) in with_marks() {
        let [begin, between] = thoughts.written;
        let end = thoughts.said.map_or("", |[_, end]| end);
        for (opens_thinking, text) in [
            (false, format!("{begin}so {{{between}Yes{end}")),
            (true, format!("so {{{between}Yes{end}")),
        ] {
            let mut splitter = Splitter::new(Expected {
                opens_thinking,
                may_think: true,
                thoughts,
                ..Expected::default()
            });
            let marks = thoughts.tokens(&tokenizer);
            let mut decoder = tokenizer.stream(Decode { skip_special: true });
            let (mut thought, mut said, mut n_thought) = (String::new(), String::new(), 0);
            let ids = (tokenizer.encode(&text, sterna_text::Encode::TEMPLATE)).unwrap();
            let texts = ids
                .iter()
                .map(|id| with_mark(decoder.push(*id), *id, &marks));
            let mut parts = Vec::new();
            for text in texts {
                n_thought += usize::from(splitter.is_reasoning());
                parts.extend(splitter.push(&text));
            }
            parts.extend(splitter.finish());
            for part in parts {
                match part {
                    Part::Reasoning(text) => thought += &text,
                    Part::Text(text) => said += &text,
                    part => panic!("{part:?}"),
                }
            }
            assert_eq!((&*thought, &*said), ("so {", "Yes"), "{text}");
            assert!(n_thought >= 4, "{text}");
        }
    }
}

#[test]
fn what_comes_after_thoughts_of_each_family_matches() {
    let call =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Rome\"}}\n</tool_call>";
    let other = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"more\": 1}}\n</tool_call>";
    let mut tools = tools();
    tools[0].strict = true;
    let must = Calls::Must {
        tools: tools.clone(),
        parallel: false,
    };
    let asked = Grammar::Regex("[0-9]+".to_owned());
    let format = ToolFormat::Tagged;
    for (thoughts, tokenizer) in with_marks() {
        let constraints = Constraints::new(tokenizer.clone());
        let ([begin, between], end) = (thoughts.written, thoughts.end);
        for (calls, asked, good, bad) in [
            (
                &Calls::None,
                Some(&asked),
                format!("12{between}17"),
                format!("12{between}x"),
            ),
            (
                &Calls::None,
                Some(&asked),
                format!("12{end}17"),
                format!("12{end} x"),
            ),
            (
                &must,
                None,
                format!("{call}{end}{call}"),
                format!("{call}{end}{other}"),
            ),
        ] {
            let grammar = grammar(
                format,
                (&tokenizer, thoughts),
                calls,
                asked,
                Beginning::Thought,
            );
            let constraint = constraints.of(&grammar.unwrap().unwrap()).unwrap();
            let through = |text: &str| let_through(&mut *constraint.clone(), &tokenizer, text);
            assert_eq!(through(&good), (good.clone(), true));
            assert_ne!(through(&bad).0, bad);
        }
        let grammar = strict_grammar(format, &tools, &tokenizer);
        let strict = StrictCalls::new(
            &tokenizer,
            "<tool_call>",
            constraints.of(&grammar).unwrap(),
            (thoughts, (true, false)),
        );
        let through = |text: &str| let_through(&mut strict.clone(), &tokenizer, text);
        let good = format!("{begin}{other}{between}So: {call}");
        assert_eq!(through(&good), (good.clone(), true));
        let bad = format!("{begin}{other}{between}So: {other}");
        assert_ne!(through(&bad).0, bad);
    }
}

#[test]
fn calls_match_where_marks_are_control_tokens() {
    for (format, control, good, bad) in [
        (
            ToolFormat::Pairs,
            &[
                "<tool_call>",
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ][..],
            "<tool_call>weather<arg_key>place</arg_key><arg_value>Rome </arg_</arg_value></tool_call>\n\
             <tool_call>stop\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [
                "<tool_call>weather<arg_key>p",
                "<tool_call>weather<arg_key>pu",
            ],
        ),
        (
            ToolFormat::Kimi,
            &[
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                "<|tool_call_argument_begin|>",
            ],
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>\
             {\"place\": \"Rome\"}<|tool_call_end|><|tool_calls_section_end|>",
            [
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.other",
            ],
        ),
        (
            ToolFormat::Gemma,
            &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            "<|tool_call>call:weather{place:<|\"|>\"Rome\" <|<|\"|>}<tool_call|>",
            [
                "<|tool_call>call:weather{place:",
                "<|tool_call>call:weather{place:1",
            ],
        ),
        (
            ToolFormat::Actions,
            &["<|START_ACTION|>", "<|END_ACTION|>"],
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": \
             {\"place\": \"Rome\"}}\n]<|END_ACTION|>",
            [
                "<|START_ACTION|>[\n    {\"tool_call_id\": \"",
                "<|START_ACTION|>[\n    {\"tool_call_id\": \"x",
            ],
        ),
    ] {
        let tokenizer = byte_tokenizer(control);
        let constraints = Constraints::new(tokenizer.clone());
        let calls = Calls::Must {
            tools: tools(),
            parallel: true,
        };
        let grammar = grammar(
            format,
            (&tokenizer, &THINK),
            &calls,
            None,
            Beginning::Answer,
        );
        let call = constraints.of(&grammar.unwrap().unwrap()).unwrap();
        let through = |text: &str| let_through(&mut *call.clone(), &tokenizer, text);
        assert_eq!(through(good), (good.to_owned(), true));
        let [fits, deviates] = bad;
        assert_eq!(through(deviates), (fits.to_owned(), false));
        // They are in no text, and are read by what they mean.
        let marks = format.tokens(&tokenizer);
        let is_mark = |name: &&str| marks.iter().any(|(_, mark)| mark == name);
        assert!(control.iter().all(is_mark));
        let mut splitter = Splitter::new(Expected {
            calls: Some(format),
            tools: tools().into(),
            ..Expected::default()
        });
        let mut decoder = tokenizer.stream(Decode { skip_special: true });
        let mut parts = Vec::new();
        for id in tokenizer
            .encode(good, sterna_text::Encode::TEMPLATE)
            .unwrap()
        {
            let text = with_mark(decoder.push(id), id, &marks);
            parts.extend(splitter.push(&text));
        }
        parts.extend(splitter.finish());
        let name = |part: &Part| match part {
            Part::CallBegun { name, .. } => Some(name.clone()),
            Part::Text(text) => panic!("{text}"),
            _ => None,
        };
        let names: Vec<String> = parts.iter().filter_map(name).collect();
        assert_eq!(names[0], "weather", "{parts:?}");
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
        let strict = StrictCalls::new(&tokenizer, "<tool_call>", strict, (&THINK, (true, false)));
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
            let grammar = grammar(format, (&tokenizer, &THINK), calls, asked, beginning)
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

#[test]
fn what_is_said_to_recipients_matches_behind_their_names() {
    let tokenizer = byte_tokenizer(&[]);
    let constraints = Constraints::new(tokenizer.clone());
    let format = ToolFormat::Recipients;
    let must = |parallel| Calls::Must {
        tools: tools(),
        parallel,
    };
    let asked = Grammar::Regex("[0-9]+".to_owned());
    let call = "weather\n{\"place\": \"Rome\"}";
    let two = format!("{call}>>>{call}");
    for (calls, asked, good, bad) in [
        (&must(true), None, &*two, "all\n"),
        (&must(false), None, call, &*format!("{call}>")),
        (&must(true), None, call, "other\n"),
        (&Calls::None, Some(&asked), "all\n17", "all\nx"),
    ] {
        let grammar = grammar(
            format,
            (&tokenizer, &THINK),
            calls,
            asked,
            Beginning::Recipient,
        )
        .unwrap()
        .unwrap();
        let through =
            |text: &str| let_through(&mut *constraints.of(&grammar).unwrap(), &tokenizer, text);
        assert_eq!(through(good), (good.to_owned(), true));
        assert_ne!(through(bad).0, bad);
    }
    // Behind what was said another recipient has a mark.
    let calls = must(false);
    let begun = grammar(format, (&tokenizer, &THINK), &calls, None, Beginning::Said);
    let begun = begun.unwrap().unwrap();
    let through = |text: &str| let_through(&mut *constraints.of(&begun).unwrap(), &tokenizer, text);
    let text = format!(">>>{call}");
    assert_eq!(through(&text), (text.clone(), true));
    assert_eq!(through(call).0, "");
    // Code of a tool that isn't strict may come as it is.
    let python = [Tool::new("python", None), Tool::new("x", None)];
    let rules = strict_rules(format, &python, &tokenizer);
    let code = Grammar::Lark(recipients::strict_grammar(&rules, &python, false));
    let text = "python\nprint(1)\n>>>x\n{}";
    let through = let_through(&mut *constraints.of(&code).unwrap(), &tokenizer, text);
    assert_eq!(through, (text.to_owned(), true));
    // Where the model may call strict tools, all of the answer is messages.
    let mut strict = tools();
    strict.iter_mut().for_each(|tool| tool.strict = true);
    let rules = strict_rules(format, &strict, &tokenizer);
    for (is_begun, good, bad) in [
        (false, "all\nIs 3 >> 2 > 1?\n>", "all\nx>>>y"),
        (false, call, "weather\n{\"place\": 1"),
        (
            false,
            &*format!("all\nI look.\n>>>{two}>>>all\nSo."),
            "other\n",
        ),
        (true, &*format!("and >> so >>>{call}"), "and >>>or"),
        (true, " so.", "so.>>>other"),
        (true, &*format!("is it >>>>>{call}"), "so.>>>python\n"),
    ] {
        let grammar = Grammar::Lark(recipients::strict_grammar(&rules, &strict, is_begun));
        let through =
            |text: &str| let_through(&mut *constraints.of(&grammar).unwrap(), &tokenizer, text);
        assert_eq!(through(good), (good.to_owned(), true));
        assert_ne!(through(bad).0, bad);
    }
}
