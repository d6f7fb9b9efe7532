//! Replays what fuzzing found, and its corpora, against the same checks.

#[path = "../../../fuzz/checks/template.rs"]
mod template;
#[path = "../../../fuzz/checks/tokenizer_json.rs"]
mod tokenizer_json;

use sterna_testing::fuzz::replay;

#[test]
fn tokenizer_inputs() {
    replay("tokenizer_json", tokenizer_json::check);
}

#[test]
fn template_inputs() {
    replay("template", template::check);
}
