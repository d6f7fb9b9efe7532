use std::time::{Duration, Instant};

use super::*;

/// Every byte is a token, and some words.
fn vocabulary() -> Vocabulary {
    let bytes = (0..=255).map(|byte| vec![byte]);
    let words = ["true", "false", "null", "\": ", "\", \"", "name", "    "];
    let words = words.map(|word| word.as_bytes().to_vec());
    Vocabulary::new(bytes.chain(words).collect()).unwrap()
}

/// Whether `text`, byte by byte, is allowed, and may end there.
fn matches(grammar: &Grammar, text: &str) -> bool {
    let mut constraint = Constraint::new(&vocabulary(), grammar).unwrap();
    for byte in text.bytes() {
        let allowed = constraint.allowed().unwrap();
        let bit = allowed.tokens[usize::from(byte) / 32] >> (byte % 32) & 1;
        let accepted = constraint.accept(u32::from(byte)).is_ok();
        assert_eq!(accepted, bit == 1, "{text}: {byte}");
        if !accepted {
            return false;
        }
    }
    constraint.allowed().unwrap().end
}

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema(text.into())
}

#[test]
fn grammars_allow_what_they_describe() {
    let person = r#"{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
        "additionalProperties": false}"#;
    let list = r##"{"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items":
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/list"}]}}}}"##;
    let lark = "start: \"(\" start \")\" | \"x\"";
    for (grammar, right, wrong) in [
        (schema(person), r#"{"name": "ö"}"#, r#"{"age": 1}"#),
        (schema(person), "{\n  \"name\": \"\"\n}", "{}"),
        (schema(list), "[1, [[], 2]]", "[1, 2.5]"),
        (schema("true"), "[]", "[,"),
        (Grammar::JsonObject, r#"{"a": [1, null]}"#, "[1]"),
        (Grammar::Regex("[a-c]{2}|d+".into()), "ddd", "abc"),
        (Grammar::Regex("ä?".into()), "", "a"),
        (Grammar::Lark(lark.into()), "((x))", "((x)"),
    ] {
        assert!(matches(&grammar, right), "{grammar:?}: {right}");
        assert!(!matches(&grammar, wrong), "{grammar:?}: {wrong}");
    }
}

#[test]
fn one_of_several_that_exclude_one_another() {
    let pets = r##"{"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
        "$defs": {
            "Cat": {"type": "object", "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"type": "integer"}},
                "required": ["kind", "lives"], "additionalProperties": false},
            "Dog": {"type": "object", "properties": {"kind": {"const": "dog", "type": "string"}},
                "required": ["kind"], "additionalProperties": false}}}"##;
    let kinds = r#"{"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}}"#;
    for (text, right, wrong) in [
        (
            pets,
            r#"{"kind": "cat", "lives": 9}"#,
            r#"{"kind": "dog", "lives": 9}"#,
        ),
        (pets, r#"{"kind": "dog"}"#, r#"{"kind": "cat"}"#),
        (kinds, r#"[1, "a", null]"#, "[true]"),
        (r#"{"oneOf": [{"const": 1}, {"enum": [2, "x"]}]}"#, "2", "3"),
    ] {
        assert!(matches(&schema(text), right), "{right}");
        assert!(!matches(&schema(text), wrong), "{wrong}");
    }
    // What may match two isn't let through where one is asked for.
    for text in [
        r#"{"oneOf": [{"type": "integer"}, {"type": "number"}]}"#,
        r#"{"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}"#,
        r#"{"oneOf": [{"const": [1]}, {"const": [1.0]}]}"#,
        r#"{"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}"#,
        r##"{"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}"##,
    ] {
        let error = Constraint::new(&vocabulary(), &schema(text)).err().unwrap();
        assert!(error.to_string().contains("`oneOf`"), "{text}: {error}");
    }
}

#[test]
fn white_space_ends() {
    let mut constraint = Constraint::new(&vocabulary(), &Grammar::JsonObject).unwrap();
    constraint.accept(u32::from(b'{')).unwrap();
    constraint.accept(u32::from(b'\n')).unwrap();
    let spaces = vec![u32::from(b' '); 99];
    assert_eq!(constraint.n_allowed(&spaces), 20);
}

#[test]
fn what_is_certain_is_forced() {
    let text = r#"{"type": "object", "properties": {"name": {"const": true}}, "required": ["name"],
        "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}"#;
    let mut constraint = Constraint::new(&vocabulary(), &schema(text)).unwrap();
    let forced = constraint.forced();
    assert_eq!(constraint.n_allowed(&forced), forced.len());
    let quote = u32::from(b'"');
    let (name, yes) = (261, 256);
    let colon = u32::from(b':');
    assert_eq!(forced[..5], [u32::from(b'{'), quote, name, quote, colon]);
    assert!(forced.contains(&yes));
    // Looking ahead changes nothing.
    constraint.accept(u32::from(b'{')).unwrap();
    assert_eq!(constraint.n_allowed(&[quote, u32::from(b'n')]), 2);
}

#[test]
fn control_tokens_are_no_text() {
    let control = [&[Vocabulary::CONTROL], &b"<|im_end|>"[..]].concat();
    let tokens = vec![b"a".to_vec(), control, Vec::new(), b"<|im_end|>".to_vec()];
    let vocabulary = Vocabulary::new(tokens).unwrap();
    let mut any = Constraint::new(&vocabulary, &Grammar::Regex(".*".into())).unwrap();
    assert_eq!(any.allowed().unwrap().tokens, [0b1001]);
    let named = Grammar::Lark("start: \"a\" <|im_end|>".into());
    let mut named = Constraint::new(&vocabulary, &named).unwrap();
    named.accept(0).unwrap();
    assert_eq!(named.allowed().unwrap().tokens, [0b0010]);
    assert!(named.accept(9).is_err());
}

#[test]
fn what_is_no_grammar_is_refused() {
    for (grammar, message) in [
        (schema("{"), "JSON schema: expected JSON, found none: EOF"),
        (
            schema("[]"),
            "expected an object, true or false, found an array",
        ),
        (
            schema("false"),
            "JSON schema: expected one that some value matches",
        ),
        (
            schema(r#"{"type": "objekt"}"#),
            "schema: /type: Invalid type: objekt",
        ),
        (
            schema(r#"{"properties": {"a": {"items": {"if": {}}}}}"#),
            "schema: /properties/a/items/if: Unimplemented keys: [\"if\"]",
        ),
        (
            schema(r##"{"$ref": "#/$defs/x"}"##),
            "schema: Reference segment",
        ),
        (
            schema(r#"{"type": "integer", "minimum": 3, "maximum": 2}"#),
            "/minimum: Unsatisfiable schema: minimum (3) is greater than maximum (2)",
        ),
        (Grammar::Regex("(".into()), "regular expression: "),
        (Grammar::Regex("a(?=b)".into()), "regular expression: "),
        (Grammar::Lark("start: b".into()), "Lark grammar: "),
        (Grammar::Lark("".into()), "Lark grammar: "),
        (Grammar::Lark("start: \"".into()), "Lark grammar: "),
    ] {
        let error = Constraint::new(&vocabulary(), &grammar)
            .unwrap_err()
            .to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

/// Neither time, memory nor the stack is the grammar's choice.
#[test]
fn hostile_grammars_are_bounded() {
    let deep = |n: usize| format!("{}x{}", "(".repeat(n), ")".repeat(n));
    let nested = (0..100_000).fold(String::new(), |text, _| text + r#"{"items":"#);
    let rules = |n: usize| {
        let rules = (0..n).map(|i| format!("a{i}: a{}\n", i + 1));
        format!("start: a0\n{}a{n}: \"a\"", rules.collect::<String>())
    };
    let words: Vec<String> = (0..50_000).map(|i| format!("\"w{i}\"")).collect();
    let words = words.join(",");
    let chain = |n: usize| {
        let links = (0..n).map(|i| format!(r##""a{i}": {{"$ref": "#/$defs/a{}"}}"##, i + 1));
        let links: Vec<String> = links.collect();
        let links = links.join(",");
        format!(r##"{{"$ref": "#/$defs/a0", "$defs": {{{links}, "a{n}": {{}}}}}}"##)
    };
    let all_of = (0..25).map(|i| {
        let next = format!(r##"{{"$ref": "#/$defs/a{}"}}"##, i + 1);
        format!(r#""a{i}": {{"allOf": [{next}, {next}]}}"#)
    });
    let all_of: Vec<String> = all_of.collect();
    let all_of = format!(
        r##"{{"$ref": "#/$defs/a0", "$defs": {{{}, "a25": {{}}}}}}"##,
        all_of.join(",")
    );
    // Whose properties lead to one another, so that comparing any takes comparing all.
    let alike = |reference: &str| {
        let all: Vec<String> = (0..300)
            .map(|i| format!(r##""p{i}": {{"$ref": "#/$defs/{reference}"}}"##))
            .collect();
        let names: Vec<String> = (0..300).map(|i| format!("\"p{i}\"")).collect();
        let (all, names) = (all.join(","), names.join(","));
        format!(r#"{{"type": "object", "properties": {{{all}}}, "required": [{names}]}}"#)
    };
    let (a, b) = (alike("A"), alike("B"));
    let alike = format!(r#"{{"oneOf": [{a}, {b}], "$defs": {{"A": {a}, "B": {b}}}}}"#);
    for (name, grammar) in [
        ("one of many alike", schema(&alike)),
        ("parentheses", Grammar::Regex(deep(100_000))),
        ("groups", Grammar::Lark(format!("start: {}", deep(100_000)))),
        ("long", Grammar::Regex("a".repeat(2 << 20))),
        (
            "repeats",
            Grammar::Regex("(((a{1,1000}){1,1000}){1,1000}b?){1,1000}".into()),
        ),
        ("classes", Grammar::Regex("(.*a.{1,200}){1,50}".into())),
        ("depth", schema(&nested)),
        ("chain", schema(&chain(9_000))),
        ("shorter chain", schema(&chain(2_600))),
        ("rules", Grammar::Lark(rules(50_000))),
        ("fewer rules", Grammar::Lark(rules(7_900))),
        ("letters", Grammar::Regex("ab".repeat(1 << 19))),
        ("alternatives", Grammar::Regex("a|bc|".repeat(1 << 17))),
        ("words", schema(&format!(r#"{{"enum": [{words}]}}"#))),
        ("cycle", schema(r##"{"$ref": "#"}"##)),
        ("allOf", schema(&all_of)),
        (
            "items",
            schema(r#"{"type": "array", "minItems": 1000000000}"#),
        ),
        (
            "length",
            schema(r#"{"type": "string", "minLength": 1000000000}"#),
        ),
        (
            "left",
            Grammar::Lark("start: start start | \"a\" | \"\"".into()),
        ),
        ("cycle", Grammar::Lark("start: a\na: start".into())),
    ] {
        let begun = Instant::now();
        let made = Constraint::new(&vocabulary(), &grammar);
        let mut outcome = made.as_ref().err().map(ToString::to_string);
        if let Ok(mut constraint) = made {
            for _ in 0..200 {
                match constraint.allowed() {
                    Ok(allowed) => {
                        let words = allowed.tokens.iter().zip(0u32..);
                        let id = words.filter(|(bits, _)| **bits != 0);
                        let id = id
                            .map(|(bits, word)| word * 32 + bits.trailing_zeros())
                            .next();
                        let Some(id) = id else { break };
                        if let Err(error) = constraint.accept(id) {
                            outcome = Some(error.to_string());
                            break;
                        }
                    }
                    Err(error) => {
                        outcome = Some(error.to_string());
                        break;
                    }
                }
            }
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(20), "{name}: {took:?}");
        assert!(outcome.is_none_or(|error| error.len() < 1000), "{name}");
    }
}
