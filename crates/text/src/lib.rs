//! Strings to ids and back, and conversations to prompts.
//!
//! For tokenizers in all the forms in which language models ship them, and for their chat templates.
//! Not for files, tensors or clocks: callers hand over bytes, and the time where a template asks
//! for it.
//!
//! ```
//! use sterna_text::{ChatFormat, ChatInput, ChatTemplate, Decode, Encode, Tokenizer};
//!
//! let json = br#"{"model": {"type": "WordLevel", "vocab": {"Hello": 0, "world": 1}},
//!     "added_tokens": [{"id": 2, "content": "<|im_end|>", "special": true, "normalized": false}],
//!     "pre_tokenizer": {"type": "WhitespaceSplit"}}"#;
//! let tokenizer = Tokenizer::from_hf_json(json, None)?;
//! let ids = tokenizer.encode("Hello world <|im_end|>", Encode::TEMPLATE)?;
//! assert_eq!(ids, [0, 1, 2]);
//! assert_eq!(tokenizer.decode(&ids, Decode { skip_special: true }), "Hello world");
//! assert_eq!(tokenizer.end_ids(), [2]);
//!
//! let template = ChatTemplate::of_format(ChatFormat::ChatMl, tokenizer.special_tokens());
//! let prompt = template.render(&ChatInput::conversation([("user", "Hello")]))?;
//! assert_eq!(prompt, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod prompt;
mod template;
mod tokenizer;

pub use prompt::Prompt;
pub use template::{ChatFormat, ChatInput, ChatTemplate, DateTime, TemplateError};
pub use tokenizer::{
    Decode, Encode, GgufTokenizer, SpecialTokens, StreamDecoder, TiktokenEncoding, Tokenizer,
    TokenizerError,
};
