//! Tokenizers and templates, against recordings of others.

mod chat_templates;
mod common;
mod other_engine;
mod properties;
mod reference_ids;
mod reference_packages;
mod regressions;
mod to_gguf;
