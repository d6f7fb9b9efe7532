//! The program under other names: drivers of a subprocess engine start it by a file name, without a verb.

use std::env;
use std::ffi::OsString;
use std::path::Path;

/// Names of the program, without an extension, and the verbs that they stand for.
const NAMES: [(&str, &str); 4] = [
    ("trillim-quantize", "quantize"),
    ("quantize", "quantize"),
    ("trillim-inference", "worker"),
    ("inference", "worker"),
];

/// The arguments of the process, the program's name first, with the verb that the name stands for.
pub(crate) fn args() -> Vec<OsString> {
    with_verb(env::args_os().collect())
}

fn with_verb(mut args: Vec<OsString>) -> Vec<OsString> {
    let stem = args
        .first()
        .and_then(|program| Path::new(program).file_stem());
    let verb = NAMES
        .iter()
        .find(|(name, _)| stem.is_some_and(|stem| stem == *name));
    if let Some((_, verb)) = verb {
        args.insert(1, verb.into());
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_a_verb() {
        let verb = |args: &[&str]| {
            let args = with_verb(args.iter().map(OsString::from).collect());
            args.into_iter().nth(1)
        };
        for (program, expected) in [
            ("/a/_bin/trillim-quantize", "quantize"),
            ("trillim-inference.exe", "worker"),
            ("./inference", "worker"),
            ("quantize", "quantize"),
            ("sterna", "--help"),
            ("/quantize/sterna", "--help"),
        ] {
            assert_eq!(verb(&[program, "--help"]).unwrap(), expected, "{program}");
        }
        assert_eq!(verb(&[]), None);
    }
}
