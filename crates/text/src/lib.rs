//! Strings to ids and back, and conversations to prompts.
//!
//! For tokenizers in all the forms in which language models ship them, and for their chat templates. Not for files,
//! tensors or clocks: callers hand over bytes, and the time where a template asks for it.
#![forbid(unsafe_code)]

mod template;
mod tokenizer;

pub use template::{ChatFormat, ChatInput, ChatTemplate, DateTime, TemplateError};
pub use tokenizer::{
    Decode, Encode, SpecialTokens, StreamDecoder, TiktokenEncoding, Tokenizer, TokenizerError,
};
