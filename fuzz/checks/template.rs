//! A chat template, and after a zero byte the JSON of the messages.

use std::time::Duration;

use sterna_text::{ChatInput, ChatTemplate, DateTime, SpecialTokens};

#[path = "counting.rs"]
mod counting;

const STACK: usize = 512 << 10;
const MEMORY: usize = 64 << 20;
const TIME: Duration = Duration::from_secs(1);

/// Panics if a promise of the templates is broken: they take less than a second, 64 MiB and 512 KiB of stack.
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
    let render = || {
        let template = ChatTemplate::new(source, &SpecialTokens::default())?;
        template.render(&input).map(|prompt| prompt.len())
    };
    let (mut time, memory) = counting::on_stack(STACK, || {
        let (_, time, memory) = counting::cost(render);
        (time, memory)
    });
    // Another process may have had the processor.
    for _ in 0..3 {
        if time > TIME {
            time = time.min(counting::cost(render).1);
        }
    }
    assert!(time <= TIME, "{time:?}");
    assert!(memory <= MEMORY, "{memory} bytes");
}
