//! Feeds [`check::check`].
#![no_main]

#[path = "../checks/delta.rs"]
mod check;

libfuzzer_sys::fuzz_target!(|data: &[u8]| check::check(data));
