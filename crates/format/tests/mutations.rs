//! Properties: what is written is read back, and no mutation of a valid file makes a parser panic.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sterna_format::gguf::{Array, Gguf, GgufError, Metadata, Model, Value, Writer};
use sterna_format::hf::{Config, GenerationConfig, TokenizerConfig};
use sterna_format::safetensors::{self, Index, SafeTensors, SafeTensorsError};
use sterna_format::{DType, FileLayout};

fn array() -> impl Strategy<Value = Array> {
    let leaf = prop_oneof![
        any::<Vec<u8>>().prop_map(Array::U8),
        any::<Vec<i8>>().prop_map(Array::I8),
        any::<Vec<u16>>().prop_map(Array::U16),
        any::<Vec<i16>>().prop_map(Array::I16),
        any::<Vec<u32>>().prop_map(Array::U32),
        any::<Vec<i32>>().prop_map(Array::I32),
        any::<Vec<u64>>().prop_map(Array::U64),
        any::<Vec<i64>>().prop_map(Array::I64),
        any::<Vec<f32>>().prop_map(Array::F32),
        any::<Vec<f64>>().prop_map(Array::F64),
        any::<Vec<bool>>().prop_map(Array::Bool),
        any::<Vec<String>>().prop_map(|s| Array::String(s.iter().collect())),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        proptest::collection::vec(inner, 0..4).prop_map(Array::Array)
    })
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f32>().prop_map(Value::F32),
        any::<f64>().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        any::<String>().prop_map(|s| {
            // Readers drop the terminator of a C string.
            Value::String(s.trim_end_matches('\0').to_owned())
        }),
        array().prop_map(Value::Array),
    ]
}

/// Types, blocks of a row, and the dimensions outside of the row.
fn tensor() -> impl Strategy<Value = (DType, usize, Vec<usize>)> {
    let outer = proptest::collection::vec(0..5_usize, 0..4);
    (
        proptest::sample::select(DType::ALL.to_vec()),
        0..9_usize,
        outer,
    )
}

type Tensors = BTreeMap<String, (DType, usize, Vec<usize>)>;

fn tensors() -> impl Strategy<Value = Tensors> {
    proptest::collection::btree_map(".{1,12}", tensor(), 0..8)
}

fn gguf_file() -> impl Strategy<Value = FileLayout> {
    let metadata = proptest::collection::btree_map(".{1,12}", value(), 0..8);
    let alignment = proptest::option::of(0..12_u32);
    (metadata, alignment, tensors()).prop_map(|(entries, alignment, tensors)| {
        let mut metadata = Metadata::new();
        for (key, value) in entries {
            metadata.insert(key, value).unwrap();
        }
        if let Some(log2) = alignment {
            let value = Value::U32(1 << log2);
            metadata.insert("general.alignment", value).unwrap();
        }
        let mut writer = Writer::new(metadata).unwrap();
        for (name, (dtype, blocks, mut shape)) in tensors {
            shape.push(blocks * dtype.block_len());
            match writer.tensor(name, dtype, &shape) {
                // A type of safetensors files.
                Err(GgufError::UnwritableType { .. }) => {}
                written => written.unwrap(),
            }
        }
        writer.finish()
    })
}

fn safetensors_file() -> impl Strategy<Value = FileLayout> {
    let metadata = proptest::collection::btree_map(".{0,12}", ".{0,12}", 0..4);
    (metadata, tensors()).prop_map(|(metadata, tensors)| {
        let mut writer = safetensors::Writer::new(metadata);
        for (name, (dtype, blocks, mut shape)) in tensors {
            if dtype.block_len() > 1 || name == "__metadata__" {
                continue;
            }
            shape.push(blocks);
            writer.tensor(name, dtype, &shape).unwrap();
        }
        writer.finish()
    })
}

#[derive(Debug, Clone)]
enum Mutation {
    Flip(prop::sample::Index, u8),
    Truncate(prop::sample::Index),
    /// Copies a piece of the file over another place.
    Splice(prop::sample::Index, prop::sample::Index, usize),
    /// Inserts a piece of the file at another place.
    Insert(prop::sample::Index, prop::sample::Index, usize),
    Word(prop::sample::Index, u64),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>;
    let word = prop_oneof![any::<u64>(), 0..300_u64, Just(u64::MAX), Just(1 << 63)];
    prop_oneof![
        (at(), 0..8_u8).prop_map(|(i, bit)| Mutation::Flip(i, 1 << bit)),
        at().prop_map(Mutation::Truncate),
        (at(), at(), 1..64_usize).prop_map(|(a, b, n)| Mutation::Splice(a, b, n)),
        (at(), at(), 1..64_usize).prop_map(|(a, b, n)| Mutation::Insert(a, b, n)),
        (at(), word).prop_map(|(i, w)| Mutation::Word(i, w)),
    ]
}

fn mutate(bytes: &mut Vec<u8>, mutations: &[Mutation]) {
    for mutation in mutations {
        if bytes.is_empty() {
            return;
        }
        let len = bytes.len();
        match mutation {
            Mutation::Flip(i, mask) => bytes[i.index(len)] ^= mask,
            Mutation::Truncate(i) => bytes.truncate(i.index(len)),
            Mutation::Splice(from, to, n) => {
                let (from, to) = (from.index(len), to.index(len));
                let n = *n.min(&(len - from)).min(&(len - to));
                bytes.copy_within(from..from + n, to);
            }
            Mutation::Insert(from, to, n) => {
                let (from, to) = (from.index(len), to.index(len));
                let piece = bytes[from..len.min(from + n)].to_vec();
                bytes.splice(to..to, piece);
            }
            Mutation::Word(i, word) => {
                let i = i.index(len);
                let n = (len - i).min(8);
                bytes[i..i + n].copy_from_slice(&word.to_le_bytes()[..n]);
            }
        }
    }
}

fn parse_gguf(bytes: &[u8], file_len: u64) {
    match Gguf::parse(bytes, file_len) {
        Ok(gguf) => {
            for t in gguf.tensors() {
                assert!(t.offset + t.len <= file_len);
            }
            let _ = Model::from_parts(vec![gguf]);
        }
        Err(GgufError::NeedMore { at_least }) => {
            assert!(at_least > bytes.len() as u64 && at_least <= file_len);
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

fn parse_safetensors(bytes: &[u8], file_len: u64) {
    match SafeTensors::parse(bytes, file_len) {
        Ok(file) => {
            let end = file.tensors().iter().map(|t| t.offset + t.len).max();
            assert!(end.is_none_or(|end| end == file_len));
        }
        Err(SafeTensorsError::NeedMore { at_least }) => {
            assert!(at_least > bytes.len() as u64 && at_least <= file_len);
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

const CONFIG: &str = r#"{"model_type":"gemma3","eos_token_id":[1,106],"bos_token":{"content":"<s>"},
    "text_config":{"hidden_size":2560,"rms_norm_eps":1e-06,"layer_types":["full_attention"],
    "rope_parameters":{"full_attention":{"rope_theta":1e6,"factor":8.0}}},"temperature":Infinity,
    "chat_template":[{"name":"default","template":"{{ x }}"}],"added_tokens_decoder":{"7":{"content":"é"}},
    "quantization_config":{"quant_method":"bitnet"},"weight_map":{"a":"b.safetensors"}}"#;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn gguf_written_is_gguf_read(layout in gguf_file()) {
        let gguf = Gguf::parse(&layout.header, layout.file_len).unwrap();
        prop_assert_eq!(gguf.tensors(), layout.tensors);
        // Equal bytes, rather than equal values, because of NaN.
        let mut writer = Writer::new(gguf.metadata().clone()).unwrap();
        for t in gguf.tensors() {
            writer.tensor(t.name.clone(), t.dtype, &t.shape).unwrap();
        }
        prop_assert_eq!(writer.finish().header, layout.header);
    }

    #[test]
    fn safetensors_written_is_safetensors_read(layout in safetensors_file()) {
        let file = SafeTensors::parse(&layout.header, layout.file_len).unwrap();
        prop_assert_eq!(file.tensors(), layout.tensors);
        prop_assert_eq!(file.data_offset() % 8, 0);
    }

    #[test]
    fn any_prefix_asks_for_more(layout in gguf_file(), at in any::<prop::sample::Index>()) {
        let prefix = &layout.header[..at.index(layout.header.len() + 1)];
        parse_gguf(prefix, layout.file_len);
        parse_gguf(prefix, prefix.len() as u64);
    }

    #[test]
    fn mutated_gguf(
        layout in gguf_file(),
        mutations in proptest::collection::vec(mutation(), 1..6),
    ) {
        let mut bytes = layout.header;
        mutate(&mut bytes, &mutations);
        parse_gguf(&bytes, bytes.len() as u64);
        parse_gguf(&bytes, layout.file_len.max(bytes.len() as u64));
    }

    #[test]
    fn mutated_safetensors(
        layout in safetensors_file(),
        mutations in proptest::collection::vec(mutation(), 1..6),
    ) {
        let mut bytes = layout.header;
        mutate(&mut bytes, &mutations);
        parse_safetensors(&bytes, bytes.len() as u64);
        parse_safetensors(&bytes, layout.file_len.max(bytes.len() as u64));
    }

    #[test]
    fn mutated_json(mutations in proptest::collection::vec(mutation(), 0..6)) {
        let mut bytes = CONFIG.as_bytes().to_vec();
        mutate(&mut bytes, &mutations);
        if let Ok(config) = Config::parse(&bytes) {
            config.rope("full_attention");
        }
        let _ = GenerationConfig::parse(&bytes);
        let _ = TokenizerConfig::parse(&bytes);
        let _ = Index::parse(&bytes);
    }
}
