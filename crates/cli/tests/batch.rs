//! `sterna run --batch`: each prompt of a file is answered as it is alone.

use std::process::Output;

use crate::common::{json, sterna_with_input};
use serde_json::{Value, json};

const STORY: &str = "Tell me a story about a fox named Ruby.";

/// What `sterna run --batch -` prints for `prompts`.
fn batch(prompts: &str, flags: &[&str]) -> (Vec<Value>, Output) {
    let args = [&["run", "--batch", "-"], flags].concat();
    let output = sterna_with_input(&args, prompts);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let lines = text.lines();
    let results = lines.map(|line| serde_json::from_str(line).unwrap());
    (results.collect(), output)
}

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

#[test]
fn each_prompt_is_answered_as_it_is_alone() {
    let user = |text: &str| json!([{ "role": "user", "content": text }]);
    let prompts = [
        json!({ "prompt": STORY }),
        json!({ "prompt": "What is 3 plus 4?", "id": "sum" }),
        json!({ "prompt": STORY, "temperature": 1, "seed": 5, "max_tokens": 20 }),
        json!({ "messages": user("Who are you?") }),
        json!({ "prompt": STORY, "stop": ["no such text", "Ruby"] }),
        json!({ "prompt": STORY, "temperature": 0.7, "top_k": 5, "seed": 6 }),
        json!({ "prompt": STORY, "regex": "[a-z]{5}( fox)?" }),
        json!({ "prompt": STORY, "json_schema": { "enum": ["red", 7] } }),
    ];
    let alone = |prompt: &str, flags: &[&str]| {
        json(&[&["run", "-p", prompt, "--json", "--temp", "0"], flags].concat())
    };
    let expected = [
        alone(STORY, &[]),
        alone("What is 3 plus 4?", &[]),
        json(&[
            "run", "-p", STORY, "--json", "--temp", "1", "-s", "5", "-n", "20",
        ]),
        alone("Who are you?", &[]),
        alone(STORY, &["--stop", "Ruby"]),
        json(&[
            "run", "-p", STORY, "--json", "--temp", "0.7", "--top-k", "5", "-s", "6",
        ]),
        alone(STORY, &["--regex", "[a-z]{5}( fox)?"]),
        alone(STORY, &["-j", r#"{"enum": ["red", 7]}"#]),
    ];
    for parallel in ["1", "3", "8"] {
        let (results, output) = batch(&lines(&prompts), &["--temp", "0", "--parallel", parallel]);
        assert!(output.status.success());
        assert_eq!(results.len(), expected.len());
        for (i, (found, expected)) in results.iter().zip(&expected).enumerate() {
            assert_eq!(found["index"], i);
            for key in ["text", "ids", "stop", "n_prompt", "n_generated"] {
                assert_eq!(found[key], expected[key], "{parallel}, {i}: {key}");
            }
        }
        assert_eq!(
            (&results[1]["id"], &results[0]["id"]),
            (&json!("sum"), &Value::Null)
        );
        assert_eq!(results[2]["seed"], 5);
    }
}

#[test]
fn lines_of_text_are_prompts() {
    let prompts = "What is 3 plus 4?\n\nWho are you?\n";
    let (results, output) = batch(
        prompts,
        &["--temp", "0", "-n", "4", "--system", "Be brief."],
    );
    assert!(output.status.success());
    for (prompt, found) in ["What is 3 plus 4?", "Who are you?"].iter().zip(&results) {
        let args = [
            "run",
            "-p",
            prompt,
            "--json",
            "--temp",
            "0",
            "-n",
            "4",
            "--system",
            "Be brief.",
        ];
        let alone = json(&args);
        assert_eq!(
            (&found["text"], &found["ids"]),
            (&alone["text"], &alone["ids"])
        );
    }
    assert_eq!(results.len(), 2);
    // Without a template, each is continued.
    let (results, _) = batch("Once upon a time", &["--raw", "--temp", "0", "-n", "1"]);
    assert_eq!(results[0]["text"], ",");
}

#[test]
fn a_prompt_that_fails_leaves_the_others() {
    let prompts = [
        json!({ "prompt": " " }),
        json!({ "prompt": "What is 3 plus 4?" }),
        json!({ "prompt": "and ".repeat(600), "id": 7 }),
        json!({ "prompt": "x", "temperature": -1 }),
    ];
    let (results, output) = batch(&lines(&prompts), &["--temp", "0"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("3 of 4 prompts failed"), "{stderr}");
    assert_eq!(results.len(), 4);
    assert_eq!(results[1]["text"], " 3 plus 4 is 7.");
    for (i, message) in [
        (0, "the prompt is empty"),
        (2, "but the context holds 512"),
        (3, "expected temperature of at least 0, found -1"),
    ] {
        let error = results[i]["error"].as_str().unwrap();
        assert!(error.contains(message), "{error}");
    }
    assert_eq!(results[2]["id"], 7);
}

#[test]
fn a_line_that_is_no_prompt_leaves_the_others() {
    let prompts = "\u{feff}{\"prompt\": \"What is 3 plus 4?\"}\n\nnonsense\n{\"prompt\": 1, \"id\": \"a\"}\n\
                   {\"id\": \"b\"}\n{\"prompt\": \"Who are you?\", \"max_tokens\": 2}\n";
    let (results, output) = batch(prompts, &["--temp", "0"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("3 of 5 prompts failed"), "{stderr}");
    assert_eq!(results[0]["text"], " 3 plus 4 is 7.");
    for (i, id, message) in [
        (
            1,
            Value::Null,
            "line 3: expected a JSON object, found text that is no JSON at column 2",
        ),
        (
            2,
            json!("a"),
            "line 4: `prompt`: expected text, found the number 1",
        ),
        (
            3,
            json!("b"),
            "line 5: expected `prompt` or `messages`, found neither",
        ),
    ] {
        assert_eq!(results[i]["index"], i);
        assert_eq!(
            (&results[i]["id"], &results[i]["error"]),
            (&id, &json!(message))
        );
    }
    assert_eq!(results[4]["text"], " I am");
    assert_eq!(results.len(), 5);
}

#[test]
fn an_empty_batch_is_refused() {
    for prompts in ["", "\u{feff}", " \n\n"] {
        let (results, output) = batch(prompts, &[]);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let message = "-: expected a prompt on each line, found none";
        assert!(results.is_empty() && stderr.contains(message), "{stderr}");
    }
}
