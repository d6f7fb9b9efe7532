//! Feeds [`check::check`].
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/cli/src/model/bundled.rs"]
mod bundled;
#[path = "../checks/bundled_tokenizer.rs"]
mod check;

use bundled::{is_bundled, tokenizer};

libfuzzer_sys::fuzz_target!(|data: &[u8]| check::check(data));
