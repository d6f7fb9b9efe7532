//! Feeds [`check::check`].
#![no_main]

#[path = "../checks/bundled_tokenizer.rs"]
mod check;

use sterna::fuzzing::{is_bundled, tokenizer};

libfuzzer_sys::fuzz_target!(|data: &[u8]| check::check(data));
