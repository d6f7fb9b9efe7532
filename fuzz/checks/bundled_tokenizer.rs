//! A `tokenizer.json` as the JavaScript converter writes it.

use sterna_text::{Decode, Encode};

use super::{is_bundled, tokenizer};

const TEXT: &str = "Hello  world\n don't <s>[CLS] 123 \u{e9}\u{4e2d}\u{1f600}\u{301}\0 aaab";

/// Panics if a promise of the tokenizer is broken.
pub(crate) fn check(data: &[u8]) {
    let _ = is_bundled(data);
    for architecture in ["llama", "qwen3", "gemma3"] {
        let Ok(tokenizer) = tokenizer(data, architecture) else {
            continue;
        };
        for options in [Encode::TEXT, Encode::TEMPLATE, Encode::PLAIN] {
            let Ok(ids) = tokenizer.encode(TEXT, options) else {
                continue;
            };
            let mut stream = tokenizer.stream(Decode::default());
            let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
            text.push_str(&stream.finish());
            assert_eq!(
                text,
                tokenizer.decode(&ids, Decode::default()),
                "a stream says what the whole says"
            );
        }
        tokenizer.decode(&[0, 1, 2, 3, 500, u32::MAX], Decode { skip_special: true });
        assert!(tokenizer.piece(u32::MAX).is_none());
    }
}
