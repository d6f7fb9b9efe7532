//! Replays what fuzzing found, and its corpora, against the same checks.

#[path = "../../../fuzz/checks/bundle_lora.rs"]
mod bundle_lora;
#[path = "../../../fuzz/checks/bundle_manifest.rs"]
mod bundle_manifest;
#[path = "../../../fuzz/checks/bundle_tensors.rs"]
mod bundle_tensors;
#[path = "../../../fuzz/checks/delta.rs"]
mod delta;
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

use sterna_testing::fuzz::replay;

#[test]
fn delta_inputs() {
    replay("delta", delta::check);
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
