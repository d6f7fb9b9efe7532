//! Tests of all forms.

use serde_json::json;
use sterna::constraint::{Constraint, Grammar, Vocabulary};
use sterna_text::{ChatInput, ChatTemplate, SpecialTokens};

use super::*;

/// The calls in `text`, cut into pieces of `n` characters; arguments joined.
fn read(format: ToolFormat, text: &str, n: usize) -> (Vec<CallEvent>, Option<String>) {
    let weather = json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let tools: Arc<[Tool]> = [Tool::new("weather", Some(&weather))].into();
    let mut reader = CallReader::new(format, &tools);
    let (mut events, mut rest) = (Vec::new(), None::<String>);
    let chars: Vec<char> = text.chars().collect();
    for piece in chars.chunks(n) {
        let piece: String = piece.iter().collect();
        match &mut rest {
            Some(rest) => rest.push_str(&piece),
            None => rest = reader.push(&piece, &mut events),
        }
    }
    if rest.is_none() {
        reader.finish(&mut events);
    }
    let mut joined: Vec<CallEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(CallEvent::Arguments(said)), CallEvent::Arguments(more)) => *said += &more,
            (_, event) => joined.push(event),
        }
    }
    (joined, rest)
}

fn call(name: &str, arguments: &str) -> Vec<CallEvent> {
    vec![
        CallEvent::Begun {
            name: name.to_owned(),
        },
        CallEvent::Arguments(arguments.to_owned()),
        CallEvent::Ended,
    ]
}

#[test]
fn calls_are_read_however_they_are_cut() {
    use ToolFormat::{
        Actions, Bare, DeepSeek, DeepSeekPlain, FunctionGemma, Functions, Gemma, Kimi, List, Named,
        Pairs, Parameters, Python, PythonBlock, Tagged, TaggedList,
    };
    let text = |text: &str| vec![CallEvent::Text(text.to_owned())];
    for (format, input, expected, rest) in [
        (
            Tagged,
            "\n{\"name\": \"a\", \"arguments\": {\"x\": [1, \"}\\\"\"]}}\n</tool_call>\nyes",
            call("a", "{\"x\": [1, \"}\\\"\"]}"),
            Some("\nyes"),
        ),
        // The other way round, with more, and without arguments.
        (
            Tagged,
            "{\"arguments\":{\"x\":1},\"id\":\"7\",\"name\":\"a\"}</tool_call>",
            call("a", "{\"x\":1}"),
            Some(""),
        ),
        (
            Tagged,
            "{\"name\": \"a\"}</tool_call>",
            call("a", "{}"),
            Some(""),
        ),
        // Arguments in a string.
        (
            Tagged,
            "{\"name\": \"a\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>",
            call("a", "{\"x\": 1}"),
            Some(""),
        ),
        // Cut off.
        (
            Tagged,
            "{\"name\": \"a\", \"arguments\": {\"x\": ",
            call("a", "{\"x\": "),
            None,
        ),
        // No calls.
        (
            Tagged,
            "nonsense</tool_call>",
            text("<tool_call>n"),
            Some("onsense</tool_call>"),
        ),
        (
            Tagged,
            "{\"x\": 1} no",
            text("<tool_call>{\"x\": 1}"),
            Some(" no"),
        ),
        (
            List,
            "[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": {\"y\": 2}}]",
            [call("a", "{}"), call("b", "{\"y\": 2}")].concat(),
            Some(""),
        ),
        (
            Bare,
            "{\"name\": \"a\", \"parameters\": {\"x\": 1}}",
            call("a", "{\"x\": 1}"),
            Some(""),
        ),
        (Bare, "{\"x\": 1}", text("{\"x\": 1}"), Some("")),
        (
            Bare,
            "{\"tool_name\": \"hammer\"}",
            text("{\"tool_name\": \"hammer\"}"),
            Some(""),
        ),
        (
            Named,
            "a[ARGS]{\"x\": {\"y\": \"}\"}}[TOOL_CALLS]b[ARGS]{}",
            call("a", "{\"x\": {\"y\": \"}\"}}"),
            Some("[TOOL_CALLS]b[ARGS]{}"),
        ),
        (
            Named,
            " a[CALL_ID]123[ARGS]{\"x\": 1}</s>",
            call("a", "{\"x\": 1}"),
            Some("</s>"),
        ),
        (Named, "a[ARGS]", call("a", "{}"), None),
        (
            Named,
            "a[ARGS][TOOL_CALLS]b",
            call("a", "{}"),
            Some("[TOOL_CALLS]b"),
        ),
        (Named, "a[ARGS]{\"x\": ", call("a", "{\"x\": "), None),
        (Named, "a", text("[TOOL_CALLS]a"), None),
        (Named, "no name {", text("[TOOL_CALLS]"), Some("no name {")),
        (
            Named,
            "[{\"name\": \"a\", \"arguments\": {}}]",
            call("a", "{}"),
            Some(""),
        ),
        (
            TaggedList,
            "[\n    {\"name\": \"a\", \"arguments\": {\"x\": 1}},\n    {\"name\": \"b\"}\n]</tool_calls>yes",
            [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
            Some("yes"),
        ),
        (
            DeepSeek,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": {\"y\": \"}\"}}\n```<｜tool▁call▁end｜>\n\
             <｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>yes",
            [call("a", "{\"x\": {\"y\": \"}\"}}"), call("b", "{}")].concat(),
            Some("yes"),
        ),
        (
            DeepSeekPlain,
            "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>b<｜tool▁sep｜>\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
            Some(""),
        ),
        // Without the end of a call, then cut off.
        (
            DeepSeek,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": 1}\n<｜tool▁call▁begin｜>function\
             <｜tool▁sep｜>b\n```json\n{\"y\": ",
            [call("a", "{\"x\": 1}"), call("b", "{\"y\": ")].concat(),
            None,
        ),
        (
            DeepSeek,
            "<｜tool▁call▁begin｜>func",
            text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>func"),
            None,
        ),
        (DeepSeek, "no", text("<｜tool▁calls▁begin｜>"), Some("no")),
        (
            Python,
            "[a(x=1, y='it\\'s \"x\"'), b(), c(z=[True, None, {'k': (1.5, -2)}], w=\"\\n\\u00e9\\x41\")]<|tool_call_end|>yes",
            [
                call("a", "{\"x\": 1, \"y\": \"it's \\\"x\\\"\"}"),
                call("b", "{}"),
                call(
                    "c",
                    "{\"z\": [true, null, {\"k\": [1.5, -2]}], \"w\": \"\\né\u{41}\"}",
                ),
            ]
            .concat(),
            Some("yes"),
        ),
        // A quote inside that nobody escaped, a word without quotes, and no end of the list.
        (
            Python,
            "[a(x='it's' , y=word)",
            call("a", "{\"x\": \"it's\", \"y\": \"word\"}"),
            None,
        ),
        // JSON, alone and in a list.
        (
            Python,
            "[{\"name\": \"a\", \"arguments\": {\"x\": 1}}, {\"name\": \"b\"}]<|tool_call_end|>",
            [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
            Some(""),
        ),
        (
            Python,
            "{\"name\": \"a\", \"arguments\": {}}<|tool_call_end|>",
            call("a", "{}"),
            Some(""),
        ),
        // Cut off.
        // What isn't quoted, isn't there, or isn't in a list.
        (
            Python,
            "[a(x=New York , y=, z=[1, b])]<|tool_call_end|>!",
            call("a", "{\"x\": \"New York\", \"y\": null, \"z\": [1, \"b\"]}"),
            Some("!"),
        ),
        (
            Python,
            "a(x=1)<|tool_call_end|>!",
            call("a", "{\"x\": 1}"),
            Some("!"),
        ),
        (Python, "[a(x='b c", call("a", "{\"x\": \"b c"), None),
        (Python, "[a(x=12", call("a", "{\"x\": 12"), None),
        (Python, "[a(x='b'", call("a", "{\"x\": \"b\""), None),
        (Python, "[a", text("<|tool_call_start|>[a"), None),
        (Python, "[", text("<|tool_call_start|>["), None),
        (Python, "[a!b]", text("<|tool_call_start|>[a!"), Some("b]")),
        (
            PythonBlock,
            "\n```python\na(x=1,y=\"b\")\nb()\n```\n<|tool_call_end|>\nyes",
            [call("a", "{\"x\": 1, \"y\": \"b\"}"), call("b", "{}")].concat(),
            Some("\nyes"),
        ),
        // Without the block, as a list, and cut off.
        (
            PythonBlock,
            "\na(x=true)\n<|tool_call_end|>",
            call("a", "{\"x\": true}"),
            Some(""),
        ),
        (
            PythonBlock,
            "[a(), b()]<|tool_call_end|>",
            [call("a", "{}"), call("b", "{}")].concat(),
            Some(""),
        ),
        (
            PythonBlock,
            "\n```python\na(x=\"b",
            call("a", "{\"x\": \"b"),
            None,
        ),
        (
            PythonBlock,
            "\n```python\n# no",
            text("<|tool_call_start|>\n```python\n#"),
            Some(" no"),
        ),
        (
            Kimi,
            "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{\"x\": {\"y\": \"}\"}}<|tool_call_end|>\
             <|tool_call_begin|>functions.b.c:12<|tool_call_argument_begin|>{}<|tool_call_end|>\
             <|tool_calls_section_end|>yes",
            [call("a", "{\"x\": {\"y\": \"}\"}}"), call("b.c", "{}")].concat(),
            Some("yes"),
        ),
        // On lines of their own, without what is around the name, and without arguments.
        (
            Kimi,
            "\n<|tool_call_begin|>\na\n<|tool_call_argument_begin|>\n{}\n<|tool_call_end|>\n<|tool_call_begin|>\
             functions.b:x<|tool_call_argument_begin|><|tool_call_end|>\n<|tool_calls_section_end|>",
            [call("a", "{}"), call("b:x", "{}")].concat(),
            Some(""),
        ),
        (
            Kimi,
            "<|tool_call_begin|>functions.a:0",
            text("<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0"),
            None,
        ),
        (
            Actions,
            "[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"a\", \"parameters\": {\"x\": 1}},\n    \
             {\"tool_call_id\": \"1\", \"tool_name\": \"b\", \"parameters\": {}}\n]<|END_ACTION|>yes",
            [call("a", "{\"x\": 1}"), call("b", "{}")].concat(),
            Some("yes"),
        ),
        (
            Actions,
            "[{\"tool_call_id\": \"0\", \"parameters\": {\"x\": 1}",
            text("<|START_ACTION|>[{\"tool_call_id\": \"0\", \"parameters\": {\"x\": 1}"),
            None,
        ),
        (
            Functions,
            "a>{\"x\": {\"y\": \"}</function>\"}}</function><function=b>{}</function>",
            call("a", "{\"x\": {\"y\": \"}</function>\"}}"),
            Some("<function=b>{}</function>"),
        ),
        (Functions, "a></function>!", call("a", "{}"), Some("!")),
        // Without an end, and cut off.
        (Functions, "a>{} yes", call("a", "{}"), Some(" yes")),
        (Functions, "a>{}</func", call("a", "{}"), None),
        (Functions, "a>{\"x\": ", call("a", "{\"x\": "), None),
        (Functions, "a>", call("a", "{}"), None),
        (Functions, "a", text("<function=a"), None),
        // What is between a name and an object, or an end, is text, and so are all of them.
        (
            Functions,
            "a>, like this: {x} end",
            text("<function="),
            Some("a>, like this: {x} end"),
        ),
        (
            Functions,
            "foo>some words</function>",
            text("<function="),
            Some("foo>some words</function>"),
        ),
        (Functions, "a>\n {}\n</function>", call("a", "{}"), Some("")),
        (
            Functions,
            "no name {",
            text("<function="),
            Some("no name {"),
        ),
        (
            Pairs,
            "weather\n<arg_key>city</arg_key>\n<arg_value>New\n\n\"York\"</arg_value>\n<arg_key>days</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>\nyes",
            call(
                "weather",
                "{\"city\": \"New\\n\\n\\\"York\\\"\", \"days\": 3}",
            ),
            Some("\nyes"),
        ),
        // On one line, with tags in a value.
        (
            Pairs,
            "weather<arg_key>city</arg_key><arg_value>\n</arg_key>< </arg_value><arg_key>x</arg_key><arg_value>[1]\
             </arg_value></tool_call>",
            call("weather", "{\"city\": \"\\n</arg_key>< \", \"x\": [1]}"),
            Some(""),
        ),
        (
            Pairs,
            "weather\n</tool_call>",
            call("weather", "{}"),
            Some(""),
        ),
        (
            Pairs,
            "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            call("weather", "{\"days\": 3}"),
            Some(""),
        ),
        (
            Pairs,
            "\n{\"name\": \"a\", \"arguments\": {}}\n</tool_call>",
            call("a", "{}"),
            Some(""),
        ),
        // Cut off.
        (
            Pairs,
            "weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_",
            call("weather", "{\"city\": \"Rome"),
            None,
        ),
        (
            Pairs,
            "weather\n<arg_key>city</arg_key>\n<arg_va",
            call("weather", "{"),
            None,
        ),
        (Pairs, "weather", text("<tool_call>weather"), None),
        // No calls.
        (
            Pairs,
            "the weather</tool_call>",
            text("<tool_call>"),
            Some("the weather</tool_call>"),
        ),
        (
            Gemma,
            "call:a{k:<|\"|>it's\n\"x\" <|} <|\"|>,m:{n:[1,-2.5,[],{o:null}],p:{}},q:true}<tool_call|><|tool_call>call:b{}",
            call(
                "a",
                "{\"k\": \"it's\\n\\\"x\\\" <|} \", \"m\": {\"n\": [1, -2.5, [], {\"o\": null}], \"p\": {}}, \"q\": true}",
            ),
            Some("<|tool_call>call:b{}"),
        ),
        (
            FunctionGemma,
            "call:a{k:<escape>b<escape>, l:[<escape>c<escape>, <escape><escape>]}<end_function_call>!",
            call("a", "{\"k\": \"b\", \"l\": [\"c\", \"\"]}"),
            Some("!"),
        ),
        (Gemma, "call:a{}<tool_call|>", call("a", "{}"), Some("")),
        // Keys in quotes, words without, what isn't there, and no ends.
        (
            Gemma,
            "call:a{<|\"|>k<|\"|>:New York,l:None,m:,n:[1<tool_call|>!",
            call(
                "a",
                "{\"k\": \"New York\", \"l\": null, \"m\": null, \"n\": [1]}",
            ),
            Some("!"),
        ),
        (Gemma, "call:a{k:1}!", call("a", "{\"k\": 1}"), Some("!")),
        (Gemma, "call:a{k", call("a", "{"), None),
        (Gemma, "call:a{k:<|\"|>b<|", call("a", "{\"k\": \"b"), None),
        (Gemma, "call:a{k:12", call("a", "{\"k\": 12"), None),
        (Gemma, "call:a{k:[1,", call("a", "{\"k\": [1"), None),
        (Gemma, "call:a", text("<|tool_call>call:a"), None),
        (
            Gemma,
            "call:a b{}",
            text("<|tool_call>"),
            Some("call:a b{}"),
        ),
        (Gemma, "no", text("<|tool_call>"), Some("no")),
        // Cut off after a call.
        (
            List,
            "[{\"name\": \"a\", \"arguments\": {}}, ",
            call("a", "{}"),
            None,
        ),
        (
            Parameters,
            "\n<function=weather>\n<parameter=city>\nNew\n\n\"York\"\n</parameter>\n<parameter=days>\n3\n\
             </parameter>\n</function>\n</tool_call>\nyes",
            call(
                "weather",
                "{\"city\": \"New\\n\\n\\\"York\\\"\", \"days\": 3}",
            ),
            Some("\nyes"),
        ),
        (
            Parameters,
            "<function=weather></function></tool_call>",
            call("weather", "{}"),
            Some(""),
        ),
        // On one line, with tags in a value, text between parameters, and no end of the function.
        (
            Parameters,
            "<function=weather><parameter=city></p><</parameter> and <b> <parameter=days>x</parameter></tool_call>",
            call("weather", "{\"city\": \"</p><\", \"days\": \"x\"}"),
            Some(""),
        ),
        // Nobody knows these.
        (
            Parameters,
            "<function=other>\n<parameter=a>\n[1]\n</parameter>\n<parameter=b>\n\n</parameter>\n</function>",
            call("other", "{\"a\": [1], \"b\": \"\"}"),
            None,
        ),
        // The tags of the other form.
        (
            Parameters,
            "\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>",
            call("a", "{\"x\": 1}"),
            Some(""),
        ),
        (
            Tagged,
            "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
            call("weather", "{\"city\": \"Rome\"}"),
            Some(""),
        ),
        // Cut off.
        (
            Parameters,
            "<function=weather>\n<parameter=city>\nRome\n</param",
            call("weather", "{\"city\": \"Rome"),
            None,
        ),
        (
            Parameters,
            "<function=weather>\n<parameter=days>\n1",
            call("weather", "{\"days\": 1"),
            None,
        ),
        (
            Parameters,
            "<function=weather>\n<parameter=da",
            call("weather", "{"),
            None,
        ),
        (
            Parameters,
            "<function=wea",
            text("<tool_call><function=wea"),
            None,
        ),
        // No calls.
        (
            Parameters,
            "<b>no</b></tool_call>",
            text("<tool_call>"),
            Some("<b>no</b></tool_call>"),
        ),
        (
            Parameters,
            "<function=a\nb></tool_call>",
            text("<tool_call>"),
            Some("<function=a\nb></tool_call>"),
        ),
    ] {
        for n in 1..=input.chars().count() {
            let found = read(format, input, n);
            assert_eq!(found.0, expected, "{input} by {n}");
            assert_eq!(found.1.as_deref(), rest, "{input} by {n}");
        }
    }
}

#[test]
fn formats_are_told_by_what_a_template_writes() {
    let probe = |text: &str| CallStyle::probe(|_| Some(format!("{text} probe_key"))).format;
    for (text, format) in [
        (
            "<tool_call>\n{\"name\": \"probe_call\"",
            Some(ToolFormat::Tagged),
        ),
        (
            "<tool_call>\n<function=probe_call>",
            Some(ToolFormat::Parameters),
        ),
        (
            "[TOOL_CALLS][{\"name\": \"probe_call\"",
            Some(ToolFormat::List),
        ),
        (
            "{\"name\": \"probe_call\", \"parameters\": {}",
            Some(ToolFormat::Bare),
        ),
        (
            "<|tool_call_start|>[probe_call(probe_key=1)]<|tool_call_end|>",
            Some(ToolFormat::Python),
        ),
        (
            "<|tool_call_start|>[{\"name\": \"probe_call\"",
            Some(ToolFormat::Python),
        ),
        (
            "List of tools: <|tool_list_start|>[",
            Some(ToolFormat::Python),
        ),
        (
            "<|tool_call_start|>\n```python\nprobe_call(probe_key=1)\n```\n<|tool_call_end|>",
            Some(ToolFormat::PythonBlock),
        ),
        (
            "<tool_call>probe_call\n<arg_key>probe_key</arg_key>",
            Some(ToolFormat::Pairs),
        ),
        ("<tool_call>probe_call", None),
        (
            "<|tool_call_begin|>functions.probe_call:0<|tool_call_argument_begin|>{",
            Some(ToolFormat::Kimi),
        ),
        (
            "<|START_ACTION|> and <|END_ACTION|> <|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"probe_call\"",
            Some(ToolFormat::Actions),
        ),
        (
            "<function=NAME>{} <function=probe_call>{\"probe_key\": 1}</function>",
            Some(ToolFormat::Functions),
        ),
        (
            "<|tool_call>call:probe_call{probe_key:1}<tool_call|>",
            Some(ToolFormat::Gemma),
        ),
        (
            "<start_function_call>call:probe_call{probe_key:1}<end_function_call>",
            Some(ToolFormat::FunctionGemma),
        ),
        // Instructions in one form, calls in another.
        (
            "<tool_call>\n{\"name\": NAME}\n</tool_call> >>>probe_call",
            None,
        ),
        ("probe_call", None),
        ("", None),
    ] {
        assert_eq!(probe(text), format, "{text}");
    }
}

/// Each template of `testdata/chat-templates`, by name.
pub(in crate::answer) fn templates() -> Vec<(String, String)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/chat-templates");
    let recorded = std::fs::read(format!("{folder}/huggingface-jinja-e2e.json")).unwrap();
    let recorded: Vec<Value> = serde_json::from_slice(&recorded).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut templates: Vec<_> = recorded
        .iter()
        .map(|case| (text(&case["name"]), text(&case["chat_template"])))
        .collect();
    let files = std::fs::read_dir(format!("{folder}/llama.cpp-templates")).unwrap();
    for path in files.map(|file| file.unwrap().path()) {
        if path.extension().is_some_and(|ending| ending == "jinja") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            templates.push((name, std::fs::read_to_string(path).unwrap()));
        }
    }
    templates.sort();
    templates
}

#[test]
fn ids_say_what_was_called_where_that_is_all_there_is() {
    let style = CallStyle {
        ids: true,
        ..CallStyle::default()
    };
    let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name}});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id});
    let mut messages = vec![
        json!({"role": "assistant", "tool_calls": [call("x", "a"), call("y", "b")]}),
        result("y"),
        result("z"),
        json!({"role": "assistant", "tool_calls": [call("x", "a")]}),
        result("x"),
    ];
    style.apply(&mut messages);
    let ids = |message: &Value| match message["tool_calls"].as_array() {
        Some(calls) => calls.iter().map(|call| call["id"].clone()).collect(),
        None => vec![message["tool_call_id"].clone()],
    };
    let ids: Vec<Value> = messages.iter().flat_map(ids).collect();
    let expected = [
        "functions.a:0",
        "functions.b:1",
        "functions.b:1",
        "z",
        "functions.a:2",
        "functions.a:2",
    ];
    assert_eq!(ids, expected);
}

#[test]
fn what_is_said_beside_calls_is_written() {
    let call = json!({"id": "abcdefghi", "type": "function", "function": {
        "name": "look", "arguments": {"at": "sea"},
    }});
    let (said, calls) = ("Let me look.", json!([call]));
    let turns = [
        json!({"role": "user", "content": "Is it blue?"}),
        json!({"role": "assistant", "content": said, "tool_calls": calls}),
        json!({"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "blue"}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ];
    let mut n_split = 0;
    for (name, source) in templates() {
        let mut specials = SpecialTokens::default();
        specials.bos = Some("<s>".to_owned());
        specials.eos = Some("</s>".to_owned());
        let template = ChatTemplate::new(&source, &specials).unwrap();
        let style = CallStyle::probe(|input| template.render(input).ok());
        if style.format.is_none() || !style.no_content {
            continue;
        }
        let mut messages = turns.to_vec();
        style.apply(&mut messages);
        // Where nothing was said, there is no message more.
        assert_eq!(messages.len(), turns.len() + 1, "{name}");
        let input = ChatInput {
            messages,
            ..ChatInput::default()
        };
        let text = template.render(&input).unwrap();
        let (said, looked) = (text.find(said).unwrap(), text.find("look\n").unwrap());
        assert!(said < looked, "{name}: {text}");
        n_split += 1;
    }
    assert!(n_split > 0);
}

#[test]
fn calls_of_real_templates_are_in_these_formats() {
    use ToolFormat::{
        DeepSeek, Functions, Kimi, List, Pairs, Parameters, PythonBlock, Recipients, Tagged,
        TaggedList,
    };
    let mut found = Vec::new();
    for (name, source) in templates() {
        let mut specials = SpecialTokens::default();
        specials.bos = Some("<s>".to_owned());
        specials.eos = Some("</s>".to_owned());
        let template = ChatTemplate::new(&source, &specials).unwrap();
        let is_written = std::cell::Cell::new(false);
        let style = CallStyle::probe(|input| {
            let text = template.render(input).ok()?;
            is_written.set(is_written.get() || text.contains(PROBE));
            Some(text)
        });
        let wants = match (style.text_arguments, style.no_content, style.ids) {
            (false, false, false) => "",
            (true, false, false) => "text",
            (false, true, false) => "no content",
            (true, true, false) => "text, no content",
            (_, _, true) => "ids",
        };
        if is_written.get() {
            found.push((name, style.format, wants));
        }
    }
    let expected = [
        ("CISCai/Mistral-7B-Instruct-v0.3-SOTA-GGUF", Some(List), ""),
        (
            "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            Some(Tagged),
            "",
        ),
        (
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            Some(Tagged),
            "",
        ),
        (
            "NousResearch/Hermes-2-Pro-Llama-3-8B (JSON Schema)",
            Some(Tagged),
            "",
        ),
        ("Qwen-Qwen2.5-7B-Instruct", Some(Tagged), ""),
        ("Qwen/Qwen3-0.6B", Some(Tagged), ""),
        ("Qwen/Qwen3.5-4B", Some(Parameters), ""),
        ("ai21labs/AI21-Jamba-Large-1.6", Some(TaggedList), ""),
        (
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            Some(DeepSeek),
            "text, no content",
        ),
        (
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            Some(DeepSeek),
            "text, no content",
        ),
        ("deepseek-ai/DeepSeek-R1", Some(DeepSeek), "text"),
        ("llama-cpp-deepseek-r1", Some(DeepSeek), "text, no content"),
        ("meetkai-functionary-medium-v3.1", Some(Functions), "text"),
        ("meetkai-functionary-medium-v3.2", Some(Recipients), "text"),
        ("mistralai-Mistral-Nemo-Instruct-2407", Some(List), ""),
        (
            "mistralai/Mistral-7B-Instruct-v0.3 (JSON Schema)",
            Some(List),
            "",
        ),
        ("moonshotai/Kimi-K2-Thinking", Some(Kimi), "ids"),
        ("openbmb/MiniCPM3-4B", Some(PythonBlock), ""),
        ("zai-org/GLM-5.1", Some(Pairs), ""),
    ];
    // Those that write no calls aren't here; those without a format write calls that are read as text.
    let expected = expected.map(|(name, format, wants)| (name.to_owned(), format, wants));
    assert_eq!(found, expected);
}

/// The grammar of a call of `f` with arguments of `schema`, in Gemma's notation.
fn gemma_grammar(schema: &Value) -> String {
    // Every byte is a token.
    const TOKENIZER: &[u8] = br#"{"model": {"type": "BPE", "merges": [], "vocab": {"a": 0}}}"#;
    let tokenizer = Tokenizer::from_hf_json(TOKENIZER, None).unwrap();
    let tools = [Tool::new("f", Some(schema))];
    let rules = ToolFormat::Gemma.grammar(&tools, false, &tokenizer);
    format!("start: calls\n{rules}")
}

fn compiled(grammar: &str) -> Result<Constraint, String> {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let vocabulary = Vocabulary::new(bytes).unwrap();
    let grammar = Grammar::Lark(grammar.to_owned());
    Constraint::new(&vocabulary, &grammar).map_err(|error| error.to_string())
}

/// Whether `grammar` lets a call of `f` through whose arguments are written so.
fn lets_through(grammar: &str, arguments: &str) -> bool {
    let mut constraint = compiled(grammar).unwrap();
    let text = format!("<|tool_call>call:f{{{arguments}}}<tool_call|>");
    let is_let_through = text.bytes().all(|byte| {
        let allowed = constraint.allowed().unwrap().tokens;
        let is_allowed = allowed[usize::from(byte) / 32] & (1 << (byte % 32)) != 0;
        is_allowed && constraint.accept(u32::from(byte)).is_ok()
    });
    is_let_through && constraint.allowed().unwrap().end
}

#[test]
fn schemas_too_large_for_gemmas_notation_are_refused_at_once() {
    // Without limits, they'd take gigabytes.
    let kinds: Vec<&str> = ["integer", "string", "object"].repeat(3000);
    let mut chain = serde_json::Map::new();
    for index in 0..300 {
        let next = json!({"properties": {"value": {"$ref": format!("#/$defs/{}", index + 1)}}});
        chain.insert(index.to_string(), next);
    }
    let many = |n: u32| -> Value {
        let all = (0..n).map(|index| (format!("p{index}"), json!({"type": "string"})));
        json!({"properties": all.collect::<serde_json::Map<_, _>>()})
    };
    chain.insert("300".to_owned(), many(20_000));
    let long = json!({"properties": {"a": {"enum": ["x".repeat(1 << 20)]}, "b": {}}});
    for (schema, why) in [
        (
            json!({"properties": {"value": {"$ref": "#/$defs/0"}}, "$defs": chain}),
            "expected at most 100 schemas inside one another",
        ),
        (many(20_000), "expected at most 1000 schemas"),
        (long, "expected at most 1048576 bytes of rules"),
    ] {
        let grammar = gemma_grammar(&schema);
        assert!(grammar.len() < 4096, "{}", grammar.len());
        let error = compiled(&grammar).err().unwrap();
        assert!(error.contains(why), "{error}");
    }
    // A kind that is named again is the same.
    let mut schema = many(100);
    schema["properties"]["k"] = json!({"type": kinds, "properties": many(100)["properties"]});
    let grammar = gemma_grammar(&schema);
    assert!(grammar.len() < 1 << 17, "{}", grammar.len());
    compiled(&grammar).unwrap();
}

#[test]
fn what_gemmas_notation_cannot_hold_is_refused() {
    let name = "expected a name of less than 512 bytes without `:`";
    let string = json!({"type": "string"});
    for (a, why) in [
        (json!({"properties": {"xml:lang": string}}), name),
        (json!({"properties": {"filter[status]": string}}), name),
        (json!({"properties": {"a<|\"|>": string}}), name),
        (json!({"properties": {" a": string}}), name),
        (json!({"const": {"a}": 1}}), name),
        (json!({"enum": ["a<|\"|>"]}), "expected a text without"),
        (
            json!({"type": "array", "minItems": 3, "maxItems": 2}),
            "`minItems` is more than `maxItems`",
        ),
        (
            json!({"prefixItems": [{}], "items": false, "minItems": 2}),
            "`minItems` is more than the items that there may be",
        ),
        (json!(false), "`false` matches nothing"),
        (json!(1), "expected a schema"),
        (
            json!({"type": "text"}),
            "expected a kind of value, found \"text\"",
        ),
        (json!({"type": "string", "enum": [1]}), "is of its type"),
        (
            json!({"type": "object", "required": ["b"], "additionalProperties": false}),
            "`false` matches nothing",
        ),
        (
            json!({"allOf": [string, string]}),
            "expected one schema, found several",
        ),
        (
            json!({"anyOf": [string, {"required": []}], "properties": {}}),
            "expected `anyOf` or `properties`, found both",
        ),
        (json!({"not": string}), "can't be held to `not`"),
        (
            json!({"$ref": "#/$defs/none"}),
            "expected what is in the schema",
        ),
        (
            json!({"type": "object", "minProperties": 2}),
            "`minProperties`: expected at most 1",
        ),
    ] {
        let grammar = gemma_grammar(&json!({"properties": {"a": a}, "required": ["a"]}));
        let error = compiled(&grammar).err().unwrap();
        assert!(error.contains(why), "{error}");
        assert!(error.contains("the schema of tool"), "{error}");
    }
}

#[test]
fn what_gemmas_grammar_lets_through_is_read_as_it_was_meant() {
    let string = json!({"type": "string"});
    let schema = json!({
        "properties": {
            "a b": {"allOf": [{"$ref": "#/$defs/unit"}], "description": "one"},
            "c,d": {"type": "object", "additionalProperties": {"type": "integer"}},
            "é.<$>": {"type": "array", "prefixItems": [string, {"type": "boolean"}], "items": false, "minItems": 1},
            "f(x)='1'": {"items": {"type": "number"}},
            "never": false,
            "nulls": {"type": ["null", "number"], "enum": [null, 1.5, "x"]},
            "old": {"type": "array", "items": [{"const": 1}], "additionalItems": string, "maxItems": 3},
            "some": {"type": "array", "items": false},
            "ways": {
                "properties": {"x": {"type": "integer"}, "y": {}, "z": false},
                "anyOf": [{"required": ["x"]}, {"required": ["y"]}, {"required": ["z"]}],
            },
            "why": {"type": "object", "minProperties": 1},
        },
        "required": ["there"],
        "additionalProperties": string,
        "$defs": {"unit": {"enum": ["}],:", "<tool_call|>", "\"\\\n"]}},
    });
    let grammar = gemma_grammar(&schema);
    let text = |text: &str| format!("<|\"|>{text}<|\"|>");
    let there = format!("there:{}", text(""));
    for (arguments, expected) in [
        (there.clone(), Some(json!({"there": ""}))),
        (
            format!("a b:{},{there}", text("}],:")),
            Some(json!({"a b": "}],:", "there": ""})),
        ),
        (
            format!("a b:{},{there}", text("<tool_call|>")),
            Some(json!({"a b": "<tool_call|>", "there": ""})),
        ),
        (
            format!("a b:{},c,d:{{x:1,y-z:-2}},{there}", text("\"\\\n")),
            Some(json!({"a b": "\"\\\n", "c,d": {"x": 1, "y-z": -2}, "there": ""})),
        ),
        (
            format!("c,d:{{}},f(x)='1':[1e3,-0.5],{there}"),
            Some(json!({"c,d": {}, "f(x)='1'": [1e3, -0.5], "there": ""})),
        ),
        (
            format!(
                "nulls:null,old:[1,{0},{0}],some:[],{there},é.<$>:[{0},true]",
                text(" <|")
            ),
            Some(json!({
                "nulls": null, "old": [1, " <|", " <|"], "some": [], "there": "", "é.<$>": [" <|", true],
            })),
        ),
        (
            format!(
                "nulls:1.5,old:[],{there},why:{{_:[{{}},{}]}},é.<$>:[{0}]",
                text("{")
            ),
            Some(json!({
                "nulls": 1.5, "old": [], "there": "", "why": {"_": [{}, "{"]}, "é.<$>": ["{"],
            })),
        ),
        (
            format!("{there},ways:{{y:[]}}"),
            Some(json!({"there": "", "ways": {"y": []}})),
        ),
        (
            format!("{there},ways:{{x:1,y:2}}"),
            Some(json!({"there": "", "ways": {"x": 1, "y": 2}})),
        ),
        (format!("{there},ways:{{}}"), None),
        (String::new(), None),
        ("there:1".to_owned(), None),
        (format!("a b:{},{there}", text("x")), None),
        (format!("a b:1,{there}"), None),
        (format!("c,d:{{x:true}},{there}"), None),
        (format!("{there},é.<$>:[]"), None),
        (format!("{there},é.<$>:[{},true,1]", text("")), None),
        (format!("{there},é.<$>:[true]"), None),
        (format!("never:1,{there}"), None),
        (format!("nulls:{},{there}", text("x")), None),
        (format!("old:[2],{there}"), None),
        (format!("old:[1,2],{there}"), None),
        (format!("some:[1],{there}"), None),
        (format!("{there},why:{{}}"), None),
    ] {
        assert_eq!(
            lets_through(&grammar, &arguments),
            expected.is_some(),
            "{arguments}"
        );
        let Some(expected) = expected else { continue };
        let call = format!("call:f{{{arguments}}}<tool_call|>");
        for n in [1, 3, call.len()] {
            let (events, rest) = read(ToolFormat::Gemma, &call, n);
            let [
                CallEvent::Begun { .. },
                CallEvent::Arguments(said),
                CallEvent::Ended,
            ] = &events[..]
            else {
                panic!("{events:?}");
            };
            let said: Value = serde_json::from_str(said).unwrap();
            assert_eq!(
                (said, rest.as_deref()),
                (expected.clone(), Some("")),
                "{arguments}"
            );
        }
    }
}

#[test]
fn long_values_in_gemmas_notation_are_read_once() {
    // Were all looked at again for each, this would take minutes.
    let digits = "1".repeat(100_000);
    for value in [digits.clone(), format!("é{digits}<|")] {
        let (events, _) = read(ToolFormat::Gemma, &format!("call:a{{k:{value}"), 1);
        let [
            CallEvent::Begun { .. },
            CallEvent::Arguments(said),
            CallEvent::Ended,
        ] = &events[..]
        else {
            panic!("{} events", events.len());
        };
        assert!(said.len() > digits.len());
        let (events, rest) = read(
            ToolFormat::Gemma,
            &format!("call:a{{k:{value}<tool_call|>"),
            1,
        );
        assert_eq!((events.len(), rest.as_deref()), (3, Some("")));
    }
}
