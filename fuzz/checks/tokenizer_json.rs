//! A tokenizer file, tried as `tokenizer.json`, as a SentencePiece model and as a tiktoken file.

use sterna_text::{Decode, Encode, TiktokenEncoding, Tokenizer};

const TEXT: &str = "Hello  world\n don't <s>[CLS] 123 \u{e9}\u{4e2d}\u{1f600}\u{301}\0 aaab";

/// Panics if a promise of the tokenizer is broken.
pub(crate) fn check(data: &[u8]) {
    let tokenizers = [
        Tokenizer::from_hf_json(data, None),
        Tokenizer::from_sentencepiece(data, None),
        Tokenizer::from_tiktoken(data, Some(TiktokenEncoding::R50k), None),
    ];
    for tokenizer in tokenizers.into_iter().flatten() {
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
