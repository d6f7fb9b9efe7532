//! The built-in model, against the answers of another implementation (`expected.json`).

use crate::common::{best, ids, join, json, logits, stdout, tales};

/// Least margin, in logits, at which the best token must be the same: rounding activations to int8
/// makes logits move by a few hundredths when a sum is taken in another order.
const MARGIN: f64 = 0.5;

#[test]
fn best_tokens_are_the_expected_ones() {
    for tale in tales() {
        let (prompt, greedy) = (ids(&tale["prompt_ids"]), ids(&tale["greedy_ids"]));
        let all = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
        let rows = logits("builtin", &all, &["--decode"]);
        let mut n_compared = 0;
        for (i, (&expected, margin)) in greedy
            .iter()
            .zip(tale["margins"].as_array().unwrap())
            .enumerate()
        {
            if margin.as_f64().unwrap() > MARGIN {
                let found = best(&rows[prompt.len() - 1 + i]);
                assert_eq!(
                    found, expected,
                    "{}, token {i}, margin {margin}",
                    tale["prompt"]
                );
                n_compared += 1;
            }
        }
        assert!(n_compared > 0);
    }
}

#[test]
fn logits_do_not_depend_on_how_the_prompt_is_cut() {
    let tale = &tales()[4];
    let ids = [ids(&tale["prompt_ids"]), ids(&tale["greedy_ids"])].concat();
    let at_once = logits("builtin", &ids, &[]);
    assert_eq!(logits("builtin", &ids, &["--chunk", "7"]), at_once);
    assert_eq!(logits("builtin", &ids, &["--decode"]), at_once);
    assert_eq!(logits("builtin", &ids, &["--threads", "1"]), at_once);
    assert_eq!(
        logits("builtin", &ids, &["--last"]),
        at_once[ids.len() - 1..]
    );
    assert_eq!(
        logits("builtin", &ids, &["--chunk", "7", "--last"]),
        at_once[ids.len() - 1..]
    );
}

#[test]
fn prompts_become_the_expected_ids() {
    for tale in tales() {
        let text = tale["text"].as_str().unwrap();
        let tokens = json(&["tokenize", "builtin", "--text", text, "--json"]);
        assert_eq!(ids(&tokens["ids"]), ids(&tale["prompt_ids"]), "{text}");
        let line = stdout(&["tokenize", "builtin", "--text", text]);
        assert_eq!(
            line.trim_end().replace(' ', ","),
            join(&ids(&tale["prompt_ids"]))
        );
    }
}

#[test]
fn chat_prompts_are_rendered_as_expected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("messages.json");
    for tale in tales().iter().filter(|tale| tale["kind"] == "chat") {
        let messages = serde_json::json!([{ "role": "user", "content": tale["prompt"] }]);
        std::fs::write(&path, messages.to_string()).unwrap();
        let prompt = stdout(&["template", "builtin", "--messages", path.to_str().unwrap()]);
        assert_eq!(prompt, tale["text"].as_str().unwrap());
    }
}

#[test]
fn it_answers() {
    let sum = stdout(&["run", "-p", "What is 3 plus 4?", "--temperature", "0"]);
    assert_eq!(sum, "3 plus 4 is 7.\n");
    let tale = stdout(&[
        "run",
        "-p",
        "Tell me a story about a fox named Ruby.",
        "--seed",
        "1",
    ]);
    assert!(
        tale.contains("Ruby") && tale.contains("fox") && tale.len() > 200,
        "{tale}"
    );
}

#[test]
fn a_tale_is_summed_up() {
    let summary = tales()
        .into_iter()
        .find(|t| t["prompt"].as_str().unwrap().starts_with("Summarize"))
        .unwrap();
    let found = stdout(&[
        "run",
        "-p",
        summary["prompt"].as_str().unwrap(),
        "--temperature",
        "0",
    ]);
    for word in ["Noah", "otter", "silver key", "Stella"] {
        assert!(found.contains(word), "`{found}` does not mention {word}");
    }
}
