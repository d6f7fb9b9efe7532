//! Feeds [`check::check`].
#![no_main]

#[path = "../checks/worker_protocol.rs"]
mod check;
#[allow(dead_code)]
#[path = "../../crates/cli/src/worker/protocol.rs"]
mod protocol;

libfuzzer_sys::fuzz_target!(|data: &[u8]| check::check(data));
