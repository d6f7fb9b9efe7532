//! The worked examples in `docs/formats` are files that read and write as the text says.

use std::fs;
use std::path::Path;

use sterna_format::DType;
use sterna_format::gguf::{self, Array, Gguf, Metadata, Model, Value};
use sterna_format::rdrr::{Manifest, Package};
use sterna_format::safetensors::{self, SafeTensors};

/// The bytes of the hex dump in a page: an offset, up to 16 bytes, and a remark in each line.
fn example(page: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/formats")
        .join(page);
    let text = fs::read_to_string(path).unwrap();
    let (_, dump) = text.split_once("```text\n").unwrap();
    let (dump, _) = dump.split_once("```").unwrap();
    let mut bytes = Vec::new();
    for line in dump.lines() {
        let (offset, rest) = line.split_once("  ").unwrap();
        assert_eq!(
            usize::from_str_radix(offset, 16).unwrap(),
            bytes.len(),
            "{line}"
        );
        // The column is ASCII and 47 characters wide at most.
        let column = rest.get(..48).unwrap_or(rest);
        for byte in column.split_whitespace() {
            bytes.push(u8::from_str_radix(byte, 16).unwrap());
        }
    }
    bytes
}

#[test]
fn gguf_example() {
    let bytes = example("gguf.md");
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    assert_eq!((gguf.version(), gguf.data_offset()), (3, 0x120));
    let model = Model::from_parts(vec![gguf.clone()]).unwrap();
    let norm = model.tensors().get("output_norm.weight").unwrap();
    assert_eq!((norm.dtype, norm.shape.as_slice()), (DType::F32, &[2][..]));
    let at = usize::try_from(norm.offset).unwrap();
    assert_eq!(bytes[at..at + 4], 1.0_f32.to_le_bytes());
    let embd = model.tensors().get("token_embd.weight").unwrap();
    assert_eq!(
        (embd.dtype, embd.shape.as_slice()),
        (DType::Q8_0, &[2, 32][..])
    );
    assert_eq!((embd.offset, embd.len), (0x120 + 32, 68));

    let mut metadata = Metadata::new();
    let tokens = Value::Array(Array::String(["a", "ç"].iter().collect()));
    for (key, value) in [
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", Value::U32(1)),
        ("tokenizer.ggml.tokens", tokens),
    ] {
        metadata.insert(key, value).unwrap();
    }
    assert_eq!(*gguf.metadata(), metadata);
    let mut writer = gguf::Writer::new(metadata).unwrap();
    writer
        .tensor("output_norm.weight", DType::F32, &[2])
        .unwrap();
    writer
        .tensor("token_embd.weight", DType::Q8_0, &[2, 32])
        .unwrap();
    let layout = writer.finish();
    assert_eq!(layout.header, bytes[..layout.header.len()]);
    assert_eq!(layout.file_len, bytes.len() as u64);
}

#[test]
fn safetensors_example() {
    let bytes = example("safetensors.md");
    let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    assert_eq!(file.metadata()["format"], "pt");
    let a = &file.tensors()[1];
    assert_eq!(
        (&*a.name, a.dtype, a.shape.as_slice()),
        ("a", DType::U8, &[3, 1][..])
    );
    let at = usize::try_from(a.offset).unwrap();
    assert_eq!(bytes[at..], [1, 2, 3]);

    let mut writer = safetensors::Writer::new(file.metadata().clone());
    writer.tensor("b", DType::F32, &[2]).unwrap();
    writer.tensor("a", DType::U8, &[3, 1]).unwrap();
    let layout = writer.finish();
    assert_eq!(layout.header, bytes[..layout.header.len()]);
    assert_eq!(layout.file_len, bytes.len() as u64);
}

#[test]
fn rdrr_example() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/rdrr.md");
    let text = fs::read_to_string(path).unwrap();
    let (_, json) = text.split_once("```json\n").unwrap();
    let (json, _) = json.split_once("```").unwrap();
    let manifest = Manifest::parse(json.as_bytes()).unwrap();
    assert_eq!(String::from_utf8(manifest.to_json()).unwrap(), json);
    let package = Package::new(manifest, None).unwrap();
    let embeddings = package.tensors().get("model.embed_tokens.weight").unwrap();
    assert_eq!(embeddings.pieces().len(), 2);
    assert_eq!(package.group_of(&embeddings.name).unwrap().id, "embed");
}
