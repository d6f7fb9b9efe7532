//! Replays what fuzzing found, and its corpora, against the same checks.

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/checks/bundle_lora.rs"]
mod bundle_lora;
#[path = "../../../fuzz/checks/bundle_manifest.rs"]
mod bundle_manifest;
#[path = "../../../fuzz/checks/bundle_tensors.rs"]
mod bundle_tensors;
#[path = "../../../fuzz/checks/gguf.rs"]
mod gguf;
#[path = "../../../fuzz/checks/hf_config.rs"]
mod hf_config;
#[path = "../../../fuzz/checks/rdrr_manifest.rs"]
mod rdrr_manifest;
#[path = "../../../fuzz/checks/rdrr_tensors.rs"]
mod rdrr_tensors;
#[path = "../../../fuzz/checks/safetensors.rs"]
mod safetensors;

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
fn gguf_inputs() {
    replay("gguf", gguf::check);
}

#[test]
fn safetensors_inputs() {
    replay("safetensors", safetensors::check);
}

#[test]
fn hf_config_inputs() {
    replay("hf_config", hf_config::check);
}

#[test]
fn rdrr_manifest_inputs() {
    replay("rdrr_manifest", rdrr_manifest::check);
}

#[test]
fn rdrr_tensors_inputs() {
    replay("rdrr_tensors", rdrr_tensors::check);
}

#[test]
fn bundle_manifest_inputs() {
    replay("bundle_manifest", bundle_manifest::check);
}

#[test]
fn bundle_tensors_inputs() {
    replay("bundle_tensors", bundle_tensors::check);
}

#[test]
fn bundle_lora_inputs() {
    replay("bundle_lora", bundle_lora::check);
}
