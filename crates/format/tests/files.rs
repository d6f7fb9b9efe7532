//! Real files, written by other implementations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sterna_format::gguf::{Gguf, GgufError, Model, Writer};
use sterna_format::hf::{Config, GenerationConfig, TokenizerConfig};
use sterna_format::names::{Name, translate, translate_catalog};
use sterna_format::safetensors::{SafeTensors, SafeTensorsError, merge};
use sterna_format::{DType, TensorCatalog};

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

fn read(path: &str) -> Vec<u8> {
    fs::read(testdata().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every file below the test data whose name ends in `ending`.
fn all(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![testdata()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_str().unwrap().ends_with(ending) {
                found.push(path);
            }
        }
    }
    found
}

fn gguf(path: &str) -> Model {
    let bytes = read(path);
    let header = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    Model::from_parts(vec![header]).unwrap()
}

fn safetensors(path: &str) -> TensorCatalog {
    let bytes = read(path);
    let header = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    merge(vec![(path, header)], None).unwrap()
}

/// Tensors by name, with type and shape.
fn shapes(catalog: &TensorCatalog) -> BTreeMap<&str, (DType, &[usize])> {
    catalog
        .iter()
        .map(|t| (t.name.as_str(), (t.dtype, t.shape.as_slice())))
        .collect()
}

#[test]
fn stories260k_in_four_forms() {
    let hf = safetensors("stories260K/hf/model.safetensors");
    let hf = translate_catalog("llama", &hf).unwrap();
    for (file, matrices) in [
        ("f32", DType::F32),
        ("f16", DType::F16),
        ("q8_0", DType::Q8_0),
    ] {
        let model = gguf(&format!("stories260K/stories260K-{file}.gguf"));
        let metadata = model.metadata();
        assert_eq!(metadata.architecture(), Ok(Some("llama")));
        assert_eq!(metadata.require_u64("llama.embedding_length"), Ok(64));
        assert_eq!(metadata.get_u64("llama.block_count"), Ok(Some(5)));
        let eps = metadata.require_f32("llama.attention.layer_norm_rms_epsilon");
        assert_eq!(eps, Ok(1e-5));
        let tokens = metadata.require_strings("tokenizer.ggml.tokens").unwrap();
        assert_eq!(tokens.len(), 512);
        assert_eq!(tokens.get(1), Some("<s>"));
        let scores = metadata.get_f32s("tokenizer.ggml.scores").unwrap();
        assert_eq!(scores.unwrap().len(), 512);

        let (gguf, hf) = (shapes(model.tensors()), shapes(&hf));
        assert!(gguf.keys().eq(hf.keys()), "names differ: {gguf:?} {hf:?}");
        for (name, (dtype, shape)) in gguf {
            assert_eq!(shape, hf[name].1, "{name}");
            let expected = match shape {
                [_] => DType::F32,
                // 172 isn't a multiple of a Q8_0 block.
                [_, 172] if file == "q8_0" => DType::F16,
                _ => matrices,
            };
            assert_eq!(dtype, expected, "{name}");
        }
    }
}

#[test]
fn bitllama_in_four_forms() {
    let hf = safetensors("bitllama-3M/hf-packed/model.safetensors");
    let hf = translate_catalog("bitnet", &hf).unwrap();
    let q = hf.get("blk.7.attn_q.weight").unwrap();
    assert_eq!((q.dtype, q.shape.as_slice()), (DType::U8, &[64, 256][..]));
    let scale = hf.get("blk.7.attn_q.weight_scale").unwrap();
    assert_eq!(scale.shape, [1]);
    for (file, dtype) in [
        ("f16", DType::F16),
        ("tq1_0", DType::TQ1_0),
        ("tq2_0", DType::TQ2_0),
    ] {
        let model = gguf(&format!("bitllama-3M/bitllama-3M-{file}.gguf"));
        assert_eq!(model.metadata().architecture(), Ok(Some("bitnet")));
        let q = model.tensors().get("blk.7.attn_q.weight").unwrap();
        assert_eq!((q.dtype, q.shape.as_slice()), (dtype, &[256, 256][..]));
        for t in model.tensors().iter() {
            assert!(hf.get(&t.name).is_some(), "{}", t.name);
        }
    }
}

#[test]
fn a_file_without_architecture() {
    let model = gguf("fixtures/ratchet-dummy.gguf");
    assert_eq!(model.metadata().architecture(), Ok(None));
    assert_eq!(model.tensors().len(), 10);
    assert!(model.tensors().iter().all(|t| t.dtype == DType::F32));
}

#[test]
fn every_gguf_is_written_back_byte_for_byte() {
    let files = all(".gguf");
    assert!(files.len() >= 7);
    for path in files {
        let bytes = fs::read(&path).unwrap();
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        if gguf.tensors().iter().any(|t| t.dtype == DType::Q2_0_G128) {
            // Written under the id of PQ2_0, which only that type has.
            continue;
        }
        let mut writer = Writer::new(gguf.metadata().clone()).unwrap();
        for t in gguf.tensors() {
            writer.tensor(t.name.clone(), t.dtype, &t.shape).unwrap();
        }
        let layout = writer.finish();
        assert_eq!(layout.tensors, gguf.tensors(), "{}", path.display());
        // The version may differ, and a file without tensors may end without padding.
        let len = bytes.len().min(layout.header.len());
        assert_eq!(layout.header[..4], bytes[..4]);
        assert!(layout.header[8..len] == bytes[8..len], "{}", path.display());
        assert!(layout.header[len..].iter().all(|&b| b == 0));
    }
}

#[test]
fn headers_are_read_from_growing_prefixes() {
    let bytes = read("stories260K/stories260K-q8_0.gguf");
    let mut have = 0;
    let mut steps = 0;
    let gguf = loop {
        match Gguf::parse(&bytes[..have], bytes.len() as u64) {
            Ok(gguf) => break gguf,
            Err(GgufError::NeedMore { at_least }) => {
                assert!(at_least > have as u64 && at_least <= bytes.len() as u64);
                have = usize::try_from(at_least).unwrap();
                steps += 1;
            }
            Err(e) => panic!("{e}"),
        }
    };
    assert!(have as u64 <= gguf.data_offset());
    assert!(steps > 10);

    let bytes = read("stories260K/hf/model.safetensors");
    let len = bytes.len() as u64;
    assert!(matches!(
        SafeTensors::parse(&bytes[..3], len),
        Err(SafeTensorsError::NeedMore { at_least: 8 })
    ));
    let Err(SafeTensorsError::NeedMore { at_least }) = SafeTensors::parse(&bytes[..8], len) else {
        panic!("a header of 8 bytes");
    };
    let prefix = &bytes[..usize::try_from(at_least).unwrap()];
    assert_eq!(SafeTensors::parse(prefix, len).unwrap().tensors().len(), 47);
}

#[test]
fn every_safetensors_file_parses_and_its_names_are_known() {
    let mut n = 0;
    for path in all("/model.safetensors") {
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
        let config = fs::read(path.with_file_name("config.json")).unwrap();
        let config = Config::parse(&config).unwrap();
        let family = config.model_type.unwrap();
        for t in file.tensors() {
            let name = translate(&family, &t.name);
            assert_ne!(name, Name::Unknown, "{family} {}", t.name);
        }
        n += 1;
    }
    assert!(n >= 14, "{n}");
    let lora = safetensors("fixtures/discollama-lora-mlx-adapters.safetensors");
    assert_eq!(lora.len(), 8);
    assert_eq!(
        safetensors("fixtures/minicpm3-4b-dummy.safetensors").len(),
        15
    );
}

#[test]
fn every_configuration_parses() {
    for path in all("config.json") {
        let json = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let place = path.display();
        match name {
            "config.json" => {
                let config = Config::parse(&json).unwrap_or_else(|e| panic!("{place}: {e}"));
                assert!(config.model_type.is_some(), "{place}");
                assert!(config.hidden_size.is_some(), "{place}");
            }
            "generation_config.json" => {
                GenerationConfig::parse(&json).unwrap_or_else(|e| panic!("{place}: {e}"));
            }
            "tokenizer_config.json" => {
                TokenizerConfig::parse(&json).unwrap_or_else(|e| panic!("{place}: {e}"));
            }
            _ => {}
        }
    }
}
