//! Replays what fuzzing found, and its corpora, against the same checks.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/checks/template.rs"]
mod template;
#[path = "../../../fuzz/checks/tokenizer_json.rs"]
mod tokenizer_json;

fn replay(target: &str, check: fn(&[u8])) {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let mut n = 0;
    for folder in ["regressions", "corpus"] {
        // A target without regressions has no folder for them.
        let Ok(files) = fs::read_dir(fuzz.join(folder).join(target)) else {
            continue;
        };
        for file in files {
            let path = file.unwrap().path();
            println!("{}", path.display());
            check(&fs::read(path).unwrap());
            n += 1;
        }
    }
    assert!(n > 0, "no inputs for {target}");
}

#[test]
fn tokenizer_inputs() {
    replay("tokenizer_json", tokenizer_json::check);
}

#[test]
fn template_inputs() {
    replay("template", template::check);
}
