//! The worked examples in `docs/formats` are files that read and write as the text says.

use std::fs;
use std::path::Path;

use sterna_format::DType;
use sterna_format::bundle::{
    self, Action, ArchType, LoraFile, LoraTarget, RopeFile, SourceType, TensorFile,
};
use sterna_format::delta::DeltaList;
use sterna_format::gguf::{self, Array, Gguf, Metadata, Model, Value};
use sterna_format::rdrr::{Manifest, Package};
use sterna_format::safetensors::{self, SafeTensors};

/// The bytes of the first hex dump in a page.
fn example(page: &str) -> Vec<u8> {
    examples(page).swap_remove(0)
}

/// The bytes of the hex dumps in a page.
fn examples(page: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/formats")
        .join(page);
    let text = fs::read_to_string(path).unwrap();
    let dumps = text.split("```text\n").skip(1);
    dumps
        .map(|rest| bytes_of(rest.split_once("```").unwrap().0))
        .collect()
}

/// The bytes of a hex dump: an offset, up to 16 bytes, and a remark in each line.
fn bytes_of(dump: &str) -> Vec<u8> {
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
    let example = |below: &str| {
        let (_, text) = text.split_once(&format!("\n## {below}\n")).unwrap();
        let (_, json) = text.split_once("```json\n").unwrap();
        json.split_once("```").unwrap().0.to_owned()
    };
    let json = example("Deltas");
    let list = DeltaList::parse(json.as_bytes()).unwrap();
    assert_eq!(String::from_utf8(list.to_json()).unwrap(), json);
    let json = example("An example");
    let manifest = Manifest::parse(json.as_bytes()).unwrap();
    assert_eq!(String::from_utf8(manifest.to_json()).unwrap(), json);
    let package = Package::new(manifest, None).unwrap();
    let embeddings = package.tensors().get("model.embed_tokens.weight").unwrap();
    assert_eq!(embeddings.pieces().len(), 2);
    assert_eq!(package.group_of(&embeddings.name).unwrap().id, "embed");
}

#[test]
fn engine_bundle_examples() {
    let examples = examples("engine-bundle.md");
    let [manifest, tensors, rope, lora] = &examples[..] else {
        panic!("{} examples", examples.len());
    };

    let read = bundle::Manifest::parse(manifest, ArchType::BitNet).unwrap();
    assert_eq!(read.shards, ["m"]);
    assert_eq!(read.sections.as_ref().unwrap()[0].len, 2);
    let [norm, trits] = &read.tensors[..] else {
        panic!("{read:?}");
    };
    assert_eq!((norm.action, norm.dtype), (Action::Raw, SourceType::F32));
    assert_eq!((norm.rows, norm.cols, norm.data.offset), (2, 1, 80));
    assert_eq!(trits.action, Action::RepackTernary);
    assert_eq!(trits.scale.unwrap().offset, 91);
    assert_eq!(read.to_bytes(ArchType::BitNet).unwrap(), *manifest);

    let len = tensors.len() as u64;
    let file = TensorFile::parse(tensors, len).unwrap();
    assert_eq!(file.file_len(), len);
    assert_eq!(
        (file.model.hidden_dim, file.model.hidden_dim_orig),
        (128, 3)
    );
    assert_eq!(
        (file.model.norm_eps, file.model.tied_embeddings),
        (1e-5, true)
    );
    let forms: Vec<_> = file.tensors.iter().map(|tensor| tensor.form).collect();
    assert_eq!((forms[1].rows, forms[1].cols), (4, 3));
    assert_eq!((forms[1].dtype, forms[1].row_bytes()), (DType::I2_S, 32));
    assert_eq!(TensorFile::layout(file.model, &forms).unwrap(), file);
    let header = file.header();
    assert_eq!(header, tensors[..header.len()]);
    let at = |i: usize| {
        let start = file.tensors[i].offset as usize;
        &tensors[start..start + file.tensors[i].size as usize]
    };
    assert_eq!(at(0)[4..], 0.5_f32.to_le_bytes());
    assert_eq!(at(1)[128..132], 0.25_f32.to_le_bytes());
    // The first two bits of the first three bytes are the first row: +1, 0, -1.
    assert_eq!([0, 1, 2].map(|p| at(1)[p] >> 6), [2, 1, 0]);

    let file = RopeFile::parse(rope).unwrap();
    assert_eq!((file.rope_theta, file.rope_dim), (500_000.0, 32));
    assert_eq!(file.to_bytes().unwrap(), *rope);

    let file = LoraFile::parse(lora, lora.len() as u64).unwrap();
    let [pair] = file.pairs[..] else {
        panic!("{file:?}");
    };
    assert_eq!((pair.layer, pair.target), (0, LoraTarget::Q));
    assert_eq!((pair.a.dtype, pair.b.rows), (DType::BF16, 3));
    assert_eq!(file.file_len(), lora.len() as u64);
    assert_eq!(LoraFile::layout(1, 0.5, file.pairs.clone()).unwrap(), file);
    let header = file.header();
    assert_eq!(header, lora[..header.len()]);
    assert_eq!(lora[576..580], 0.5_f32.to_le_bytes());
}
