//! The `sterna` command.
fn main() {}
