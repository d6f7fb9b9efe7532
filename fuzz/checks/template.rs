//! A chat template, and after a zero byte the JSON of the messages.

use sterna_text::{ChatInput, ChatTemplate, DateTime, SpecialTokens};

/// Panics if a promise of the templates is broken.
pub(crate) fn check(data: &[u8]) {
    let (source, messages) = match data.iter().position(|byte| *byte == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &data[..0]),
    };
    let Ok(source) = std::str::from_utf8(source) else {
        return;
    };
    let mut input = ChatInput::conversation([
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
    ]);
    if let Ok(messages) = serde_json::from_slice(messages) {
        input.messages = messages;
    }
    input.now = Some(DateTime::from_unix(1_752_148_800, 0));
    if let Ok(template) = ChatTemplate::new(source, &SpecialTokens::default()) {
        let _ = template.render(&input);
    }
}
