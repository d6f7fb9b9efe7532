//! Files made to hurt: each is refused within a second and 64 MiB, with a message that says why.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Display;
use std::time::{Duration, Instant};

use sterna_format::gguf::{Gguf, Metadata, Model, Value, Writer};
use sterna_format::hf::{Config, TokenizerConfig, parse_json};
use sterna_format::safetensors::{Index, SafeTensors};
use sterna_format::{DType, gguf, safetensors};

const MIB: usize = 1 << 20;

/// Counts the bytes that the current thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(old: usize, new: usize) {
    // Memory may be freed while a thread ends, after its counters are gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get().saturating_sub(old) + new);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is handed on to the system allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        count(0, new_size);
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How long this thread has computed, on systems that say so.
fn computed() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanos: u64 = stat.split(' ').next()?.parse().ok()?;
    (nanos > 0).then(|| Duration::from_nanos(nanos))
}

/// Runs `f`; the result, and the memory it took beyond what was held before.
fn measured<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let (start, computed) = (Instant::now(), computed());
    let before = HELD.get();
    PEAK.set(before);
    let result = f();
    let (elapsed, memory) = (start.elapsed(), PEAK.get() - before);
    // Where other programs run, too, some of the time is theirs.
    let time = match (computed, self::computed()) {
        (Some(before), Some(after)) => after - before,
        _ => elapsed,
    };
    println!("{what}: {time:?}, {} KiB", memory / 1024);
    assert!(time < Duration::from_secs(1), "{what}: {time:?}");
    assert!(memory < 64 * MIB, "{what}: {memory} bytes");
    result
}

#[track_caller]
fn refused<T, E: Display>(result: Result<T, E>, message: &str) {
    match result {
        Ok(_) => panic!("accepted, expected: {message}"),
        Err(e) => assert!(e.to_string().contains(message), "{e}\nexpected: {message}"),
    }
}

#[track_caller]
fn gguf_refused(bytes: &[u8], file_len: u64, message: &str) {
    refused(measured(message, || Gguf::parse(bytes, file_len)), message);
}

/// Builds GGUF headers that no writer would.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(n_tensors: u64, n_entries: u64) -> Raw {
        let raw = Raw(b"GGUF\x03\0\0\0".to_vec());
        raw.u64(n_tensors).u64(n_entries)
    }

    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Raw {
        self.0.extend(bytes);
        self
    }

    fn str(self, s: impl AsRef<[u8]>) -> Raw {
        self.u64(s.as_ref().len() as u64).bytes(s.as_ref())
    }

    fn tensor(self, name: &str, dims: &[u64], id: u32, offset: u64) -> Raw {
        let raw = self.str(name).u32(dims.len() as u32);
        let raw = dims.iter().fold(raw, |raw, &d| raw.u64(d));
        raw.u32(id).u64(offset)
    }

    /// Header, padding, and `data_len` bytes of data.
    fn with_data(mut self, data_len: usize) -> Vec<u8> {
        let len = self.0.len().next_multiple_of(32) + data_len;
        self.0.resize(len, 0);
        self.0
    }

    #[track_caller]
    fn refused(self, message: &str) {
        gguf_refused(&self.0, self.0.len() as u64, message);
    }
}

const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

#[test]
fn not_the_format_or_not_the_version() {
    gguf_refused(
        b"",
        0,
        "the file ends in the first 24 bytes: 4 bytes needed, 0 left",
    );
    gguf_refused(b"GGUF\x03\0", 6, "the file ends in the first 24 bytes");
    gguf_refused(
        b"ggml\x01\0\0\0",
        100,
        "not a GGUF file: it starts with [67, 67, 6d, 6c]",
    );
    gguf_refused(b"GGUF\x01\0\0\0", 100, "GGUF version 1 isn't supported");
    gguf_refused(b"GGUF\x04\0\0\0", 100, "GGUF version 4 isn't supported");
    gguf_refused(
        b"GGUF\0\0\0\x03",
        100,
        "big-endian GGUF files aren't supported",
    );
}

#[test]
fn huge_counts() {
    for n in [1 << 30, u64::MAX / 13, u64::MAX] {
        let entries = format!("the list of {n} metadata entries: ");
        Raw::new(0, n).bytes(&[0; 4096]).refused(&entries);
        let tensors = format!("the list of {n} tensors: ");
        Raw::new(n, 0).bytes(&[0; 4096]).refused(&tensors);
        for element in 0..13 {
            let raw = Raw::new(0, 1).str("k").u32(TYPE_ARRAY).u32(element).u64(n);
            raw.bytes(&[0; 4096])
                .refused("the file ends in metadata key `k`: ");
        }
        let name = Raw::new(1, 0).u64(n).bytes(&[0; 4096]);
        name.refused("the name of tensor 0: a name of");
    }
}

#[test]
fn claims_of_ten_gigabytes() {
    let ten_gb = 10_u64 << 30;
    // In a small file.
    let string = Raw::new(0, 1).str("k").u32(TYPE_STRING).u64(ten_gb);
    string
        .clone()
        .bytes(&[0; 100])
        .refused("the file ends in metadata key `k`: 10737418240 bytes");
    let tensor = Raw::new(1, 0).tensor("t", &[ten_gb], 24, 0);
    let bytes = tensor.clone().with_data(1000);
    gguf_refused(
        &bytes,
        bytes.len() as u64,
        "tensor `t`: needs 10737418240 bytes at offset 64",
    );
    // In a file that claims the size, of which a prefix is at hand.
    gguf_refused(
        &string.0,
        ten_gb * 2,
        "metadata key `k`: the header would reach 10737418285 bytes",
    );
    let entries = Raw::new(0, 1 << 29);
    gguf_refused(
        &entries.0,
        ten_gb,
        "metadata entries: the header would reach 7516192792 bytes",
    );
    let gguf = Gguf::parse(&tensor.with_data(0), ten_gb + 64).unwrap();
    assert_eq!(gguf.tensors()[0].len, ten_gb);

    let mut header = (ten_gb).to_le_bytes().to_vec();
    header.extend(b"{}");
    let parse = |len| measured("safetensors", || SafeTensors::parse(&header, len));
    refused(
        parse(ten_gb * 2),
        "a header of 10737418240 bytes, the limit is 18874368",
    );
    refused(
        parse(10),
        "a header of 10737418240 bytes, the limit is 18874368",
    );
}

#[test]
fn strings_that_are_not_utf8() {
    let bad = b"ab\xffcd";
    Raw::new(0, 1)
        .str(bad)
        .u32(0)
        .bytes(&[1])
        .refused("the name of metadata entry 0: the string isn't UTF-8 (first bad byte at 2 of 5)");
    Raw::new(0, 1)
        .str("general.name")
        .u32(TYPE_STRING)
        .str(bad)
        .refused("metadata key `general.name`: the string isn't UTF-8");
    Raw::new(0, 1)
        .str("tokens")
        .u32(TYPE_ARRAY)
        .u32(TYPE_STRING)
        .u64(2)
        .str("ok")
        .str(bad)
        .refused("metadata key `tokens`: the string isn't UTF-8");
    Raw::new(1, 0)
        .str(bad)
        .u32(1)
        .bytes(&[0; 32])
        .refused("the name of tensor 0: the string isn't UTF-8");
}

#[test]
fn terminators_of_c_strings() {
    let raw = Raw::new(0, 2).str("general.architecture").u32(TYPE_STRING);
    let raw = raw.str("llama\0\0").str("tokens").u32(TYPE_ARRAY);
    let raw = raw.u32(TYPE_STRING).u64(1).str("\0");
    let gguf = Gguf::parse(&raw.0, raw.0.len() as u64).unwrap();
    assert_eq!(gguf.metadata().architecture(), Ok(Some("llama")));
    // A token may be a zero byte.
    let tokens = gguf.metadata().get_strings("tokens").unwrap().unwrap();
    assert_eq!(tokens.get(0), Some("\0"));
}

#[test]
fn values_that_are_nothing() {
    let entry = || Raw::new(0, 1).str("k");
    entry()
        .u32(13)
        .bytes(&[0; 8])
        .refused("metadata key `k`: value type 13 isn't one of 0 to 12");
    entry()
        .u32(7)
        .bytes(&[2])
        .refused("metadata key `k`: a boolean of 2, expected 0 or 1");
    entry()
        .u32(TYPE_ARRAY)
        .u32(7)
        .u64(2)
        .bytes(&[1, 9])
        .refused("metadata key `k`: a boolean of 9");
    let deep = (0..10_000).fold(entry().u32(TYPE_ARRAY), |raw, _| raw.u32(TYPE_ARRAY).u64(1));
    deep.refused("metadata key `k`: arrays nested deeper than 4");
    Raw::new(0, 2)
        .str("k")
        .u32(0)
        .bytes(&[1])
        .str("k")
        .u32(0)
        .bytes(&[1])
        .refused("metadata key `k` occurs twice");
    for alignment in [0_u32, 24, 1 << 30] {
        Raw::new(0, 1)
            .str("general.alignment")
            .u32(4)
            .u32(alignment)
            .refused(&format!(
                "`general.alignment`: {alignment} isn't a power of two"
            ));
    }
}

#[test]
fn tensors_that_cannot_be() {
    let f32 = 0;
    for (tensors, message) in [
        (
            Raw::new(1, 0).str("t").u32(5).bytes(&[0; 64]),
            "tensor `t`: 5 dimensions, the limit is 4",
        ),
        (
            Raw::new(1, 0).tensor("t", &[1 << 32, 1 << 32], f32, 0),
            "tensor `t`: the size of shape [4294967296, 4294967296] overflows",
        ),
        (
            Raw::new(1, 0).tensor("t", &[0, 1 << 40, 1 << 40], f32, 0),
            "tensor `t`: the size of shape [1099511627776, 1099511627776, 0] overflows",
        ),
        (
            Raw::new(1, 0).tensor("t", &[1 << 62], f32, 0),
            "tensor `t`: the size of shape [4611686018427387904] overflows",
        ),
        (
            Raw::new(1, 0).tensor("t", &[8], f32, u64::MAX - 31),
            "tensor `t`: needs 32 bytes at offset 18446744073709551584",
        ),
        (
            Raw::new(1, 0).tensor("t", &[8], f32, 8),
            "tensor `t`: offset 8 isn't a multiple of the alignment 32",
        ),
        (
            Raw::new(1, 0).tensor("t", &[8], 99, 0),
            "tensor `t`: unknown type id 99",
        ),
        (
            Raw::new(1, 0).tensor("t", &[48, 2], 8, 0),
            "tensor `t`: 48 elements in a row don't fill Q8_0 blocks of 32",
        ),
        (
            Raw::new(1, 0).tensor("t", &[64], 36, 0),
            "tensor `t`: 64 elements in the tensor don't fill I2_S blocks of 128",
        ),
        (
            Raw::new(2, 0)
                .tensor("a", &[16], f32, 0)
                .tensor("b", &[16], f32, 32),
            "tensors `a` and `b` overlap: one ends at byte",
        ),
        (
            Raw::new(2, 0)
                .tensor("a", &[16], f32, 0)
                .tensor("b", &[16], f32, 0),
            "overlap",
        ),
        (
            Raw::new(2, 0)
                .tensor("a", &[8], f32, 0)
                .tensor("a", &[8], f32, 32),
            "tensor `a` occurs twice",
        ),
    ] {
        let bytes = tensors.with_data(256);
        gguf_refused(&bytes, bytes.len() as u64, message);
    }
}

/// A small valid file with a bit of everything, as a byte vector.
fn good_file() -> Vec<u8> {
    let mut metadata = Metadata::new();
    let tokens = ["a", "b", "ç"].iter().collect();
    for (key, value) in [
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", Value::U32(1)),
        ("tokens", Value::Array(gguf::Array::String(tokens))),
    ] {
        metadata.insert(key, value).unwrap();
    }
    let mut writer = Writer::new(metadata).unwrap();
    writer.tensor("q", DType::I2_S, &[4, 128]).unwrap();
    writer.tensor("n", DType::F32, &[4]).unwrap();
    let layout = writer.finish();
    let mut bytes = layout.header;
    bytes.resize(usize::try_from(layout.file_len).unwrap(), 0);
    bytes
}

#[test]
fn truncated_anywhere() {
    let bytes = good_file();
    let last = bytes.len() - 16;
    for n in 0..last {
        assert!(Gguf::parse(&bytes[..n], n as u64).is_err(), "{n}");
    }
    // Only the padding after the last tensor may be missing.
    assert!(Gguf::parse(&bytes[..last], last as u64).is_ok());
}

#[test]
fn flipped_anywhere() {
    let good = good_file();
    let header = 300.min(good.len());
    measured("every bit of a header", || {
        for bit in 0..header * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Either outcome is right, as long as there is one.
            if let Ok(gguf) = Gguf::parse(&bytes, bytes.len() as u64) {
                let _ = Model::from_parts(vec![gguf]);
            }
        }
    });
}

#[test]
fn cyclic_splits() {
    let part = |no: u16, count: u16| {
        let mut metadata = Metadata::new();
        metadata.insert("split.no", Value::U16(no)).unwrap();
        metadata.insert("split.count", Value::U16(count)).unwrap();
        let layout = Writer::new(metadata).unwrap().finish();
        Gguf::parse(&layout.header, layout.file_len).unwrap()
    };
    let merge = |parts| measured("split", || Model::from_parts(parts));
    let again = vec![part(0, 3), part(1, 3), part(0, 3)];
    refused(
        merge(again),
        "part 3 of the split set: `split.no` should be 2, found 0",
    );
    let swapped = vec![part(1, 2), part(0, 2)];
    refused(
        merge(swapped),
        "part 1 of the split set: `split.no` should be 0, found 1",
    );
    let endless = vec![part(0, u16::MAX)];
    refused(merge(endless), "`split.count` should be 1, found 65535");
    refused(
        gguf::split_names("x-00001-of-99999.gguf"),
        "a set of 99999 parts",
    );
}

/// Zeros are valid pieces of many kinds, and a file system stores any number of them in no space.
#[test]
fn sparse_files_of_ten_gigabytes() {
    let ten_gb = 10_u64 << 30;
    let array = |n_entries: u64, element: u32, n: u64| {
        let raw = Raw::new(0, n_entries).str("k").u32(TYPE_ARRAY);
        raw.u32(element).u64(n)
    };
    let too_long = "the header would reach";
    let memory = "bytes of memory, the limit is 25165824";
    for (raw, message) in [
        (Raw::new(5_500_000, 0), too_long),
        (Raw::new(1_000_000, 0), memory),
        (Raw::new(40_000, 0), "the name of tensor 0 is empty"),
        (Raw::new(0, 10_000_000), too_long),
        (Raw::new(0, 2_000_000), memory),
        (Raw::new(0, 60_000), "the name of metadata entry 0 is empty"),
        (array(1, TYPE_ARRAY, 11_000_000), too_long),
        (array(1, TYPE_ARRAY, 2_000_000), memory),
        (array(1, TYPE_STRING, 16_000_000), too_long),
        // As many strings as fit are read, then what follows them isn't an entry.
        (
            array(2, TYPE_STRING, 4_000_000),
            "the name of metadata entry 1 is empty",
        ),
        // Each of two arrays is within the limits.
        (
            array(2, 0, 13 << 20)
                .bytes(&vec![0; 13 << 20])
                .str("j")
                .u32(TYPE_ARRAY)
                .u32(0)
                .u64(13 << 20),
            memory,
        ),
        (array(1, 7, 30 << 20), memory),
        (array(1, 0, 30 << 20), memory),
        (array(1, 12, 4 << 20), too_long),
        (
            Raw::new(0, 1).str("k").u32(TYPE_STRING).u64(30 << 20),
            memory,
        ),
    ] {
        let mut bytes = raw.0;
        // As far as any reader may look.
        bytes.resize(128 * MIB, 0);
        gguf_refused(&bytes, ten_gb, message);
    }
}

/// As many different pieces as the limits allow, which takes a file of their size.
#[test]
fn the_most_that_a_gguf_header_may_hold() {
    let n = 48_000;
    let mut tensors = Raw::new(n, 0);
    for i in 0..n {
        tensors = tensors.tensor(&format!("{i:x}"), &[1, 1, 1, 1], 24, 32 * i);
    }
    let joined = measured("tensors", || {
        Model::from_parts(vec![Gguf::parse(&tensors.0, 1 << 40).unwrap()])
    });
    assert_eq!(joined.unwrap().tensors().len() as u64, n);

    let n = 63_000;
    let mut entries = Raw::new(0, n);
    for i in 0..n {
        entries = entries.str(format!("{i:x}")).u32(0).bytes(&[0]);
    }
    let joined = measured("entries", || {
        Model::from_parts(vec![Gguf::parse(&entries.0, 1 << 40).unwrap()])
    });
    assert_eq!(joined.unwrap().metadata().len() as u64, n);

    let long = "x".repeat(65_535);
    let mut names = Raw::new(190, 0);
    for i in 0..190 {
        names = names.tensor(&format!("{i:03}{}", &long[3..]), &[], 24, 32 * i);
    }
    let parse = || Gguf::parse(&names.0, 1 << 40);
    assert!(measured("long names", parse).is_ok());
}

/// A vocabulary as large as Gemma's, with scores, types and merges, passes and leaves room.
#[test]
fn the_largest_vocabularies_pass() {
    let (n_tokens, n_merges) = (262_144_u64, 514_906);
    let strings = |raw: Raw, key: &str, n: u64, text: &str| {
        let raw = raw.str(key).u32(TYPE_ARRAY).u32(TYPE_STRING).u64(n);
        (0..n).fold(raw, |raw, _| raw.str(text))
    };
    let raw = Raw::new(0, 4);
    let raw = strings(raw, "tokenizer.ggml.tokens", n_tokens, "\u{2581}token");
    let raw = strings(raw, "tokenizer.ggml.merges", n_merges, "\u{2581}tok en");
    let numbers = vec![0; 4 * n_tokens as usize];
    let raw = raw.str("tokenizer.ggml.scores").u32(TYPE_ARRAY).u32(6);
    let raw = raw.u64(n_tokens).bytes(&numbers);
    let raw = raw.str("tokenizer.ggml.token_type").u32(TYPE_ARRAY).u32(5);
    let raw = raw.u64(n_tokens).bytes(&numbers);
    // Two thirds of the limit of 32 MiB.
    assert!(raw.0.len() < 21 * MIB, "{}", raw.0.len());
    let parse = || Gguf::parse(&raw.0, raw.0.len() as u64);
    let gguf = measured("a large vocabulary", parse).unwrap();
    assert_eq!(gguf.metadata().len(), 4);
}

/// A safetensors file with this header and no data.
fn safetensors_bytes(json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes
}

fn empty_tensors(n: usize, name: impl Fn(usize) -> String) -> String {
    let tensors = (0..n).map(|i| {
        let name = name(i);
        format!(r#""{name}":{{"dtype":"F8_E4M3","shape":[0,7168],"data_offsets":[0,0]}}"#)
    });
    format!("{{{}}}", tensors.collect::<Vec<_>>().join(","))
}

/// A hundred thousand tensors, as the largest mixtures of experts have in all their files.
#[test]
fn the_largest_checkpoints_pass() {
    let name = |i| {
        format!(
            "model.layers.{}.mlp.experts.{i}.down_proj.weight_scale_inv",
            i % 61
        )
    };
    let bytes = safetensors_bytes(&empty_tensors(100_000, name));
    let parse = || SafeTensors::parse(&bytes, bytes.len() as u64);
    let file = measured("100,000 tensors", parse).unwrap();
    assert_eq!(file.tensors().len(), 100_000);

    let map = (0..140_000).map(|i| {
        format!(
            r#""{}":"model-{:05}-of-00163.safetensors""#,
            name(i),
            i % 163
        )
    });
    let json = format!(
        r#"{{"weight_map":{{{}}}}}"#,
        map.collect::<Vec<_>>().join(",")
    );
    let index = measured("an index of 140,000", || Index::parse(json.as_bytes()));
    assert_eq!(index.unwrap().files().len(), 163);
}

#[test]
fn safetensors_of_the_smallest_pieces() {
    let size = 18 * MIB;
    let refuse = |json: &str, message: &str| {
        assert!(json.len() <= size, "{}", json.len());
        let bytes = safetensors_bytes(json);
        let parse = || SafeTensors::parse(&bytes, bytes.len() as u64);
        refused(measured(message, parse), message);
    };
    let memory = "bytes of memory are needed, the limit is 33554432";
    refuse(&empty_tensors(size / 70, |i| format!("{i:x}")), memory);
    let strings = |n: usize, value: &str| {
        let entries = (0..n).map(|i| format!(r#""{i:x}":{value}"#));
        format!(
            r#"{{"__metadata__":{{{}}}}}"#,
            entries.collect::<Vec<_>>().join(",")
        )
    };
    refuse(&strings(size / 13, r#""""#), memory);
    let long = "x".repeat(size - 100);
    refuse(&strings(1, &format!(r#""\n{long}""#)), memory);
    let escapes = strings(1, &format!(r#""{}""#, "\\n".repeat(size / 4)));
    let bytes = safetensors_bytes(&escapes);
    let parse = || SafeTensors::parse(&bytes, bytes.len() as u64);
    assert!(measured("escapes", parse).is_ok());
    refuse(
        &empty_tensors(1, |_| long.clone()),
        "the name of a tensor takes",
    );
    refuse(
        &empty_tensors(2, |_| "a".to_owned()),
        "tensor `a` occurs twice",
    );
    refuse(
        &format!(r#"{{"a":{{"dtype":"\n{long}""#),
        "isn't as expected",
    );
    let sparse = (100_000_000_u64).to_le_bytes();
    let parse = || SafeTensors::parse(&sparse, 10 << 30);
    refused(
        measured("a sparse file", parse),
        "a header of 100000000 bytes",
    );

    let size = 16 * MIB;
    for entry in [r#"":"x""#, r#"":"{}.x""#] {
        let map =
            (0..size / 18).map(|i| format!(r#""{i:x}{}"#, entry.replace("{}", &format!("{i:x}"))));
        let json = format!(
            r#"{{"weight_map":{{{}}}}}"#,
            map.collect::<Vec<_>>().join(",")
        );
        assert!(json.len() <= size);
        refused(measured("index", || Index::parse(json.as_bytes())), memory);
    }
}

#[test]
fn large_configurations_of_the_smallest_pieces() {
    let size = 8 * MIB - 1;
    for json in [
        "[".repeat(size),
        format!("[{}0]", "0,".repeat(size / 2)),
        format!("[{}0]", "{},".repeat(size / 3)),
        format!("[{}0]", r#"{"":0},"#.repeat(size / 7)),
        format!("[{}0]", "NaN,".repeat(size / 4)),
        format!("\"{}", "\\u0000".repeat(size / 6)),
        "9".repeat(size),
    ] {
        assert!(measured("config", || Config::parse(json.as_bytes())).is_err());
        assert!(measured("json", || parse_json(json.as_bytes())).is_err());
        assert!(measured("tokenizer", || TokenizerConfig::parse(json.as_bytes())).is_err());
        assert!(measured("index", || Index::parse(json.as_bytes())).is_err());
    }
}

#[test]
fn json_to_show() {
    let value = parse_json(br#"{"b":NaN,"a":[1,-2.5,null,true,"x"]}"#).unwrap();
    assert_eq!(
        value.to_string().len(),
        r#"{"b":{"__float__":"NaN"},"a":[1,-2.5,null,true,"x"]}"#.len()
    );
    assert_eq!(value["b"]["__float__"], "NaN");
    assert_eq!(value["a"][1], -2.5);
    for item in [r#"{"":0}"#, "{}", "[0]", "0"] {
        let n = if item.len() > 2 { 24_000 } else { 49_000 };
        let json = format!("[{}]", vec![item; n].join(","));
        let value = measured("json", || parse_json(json.as_bytes()));
        assert_eq!(value.unwrap().as_array().map(Vec::len), Some(n));
    }
}

#[test]
fn configurations_of_long_lists() {
    let n = 80_000;
    let ids = vec!["7"; n].join(",");
    let tokens: Vec<_> = (0..n)
        .map(|i| format!(r#""{i}":{{"content":"x"}}"#))
        .collect();
    let templates = vec![r#"{"name":"","template":""}"#; n].join(",");
    let members: Vec<_> = (0..n).map(|i| format!(r#""{i}":{{"factor":1}}"#)).collect();
    for json in [
        format!(r#"{{"eos_token_id":[{ids}],"no_rope_layers":[{ids}]}}"#),
        format!(r#"{{"rope_scaling":{{{}}}}}"#, members.join(",")),
        format!(r#"{{"added_tokens_decoder":{{{}}}}}"#, tokens.join(",")),
        format!(r#"{{"chat_template":[{templates}]}}"#),
    ] {
        // Most of these say nothing wrong, only too much of it.
        let _ = measured("config", || Config::parse(json.as_bytes()));
        let _ = measured("tokenizer", || TokenizerConfig::parse(json.as_bytes()));
    }
}

#[test]
fn safetensors_that_lie() {
    let file = |json: &str, data_len: u64| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        let file_len = bytes.len() as u64 + data_len;
        measured("safetensors", || SafeTensors::parse(&bytes, file_len))
    };
    let one = |shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    refused(
        file(&one("[4294967296,4294967296]", "[0,8]"), 8),
        "tensor `t`: F32 of shape [4294967296, 4294967296] doesn't take 8 bytes",
    );
    refused(
        file(&one("[2684354560]", "[0,10737418240]"), 8),
        "tensor `t`: bytes 0 to 10737418240 of the data section, which has 8 bytes",
    );
    refused(
        file(
            &one("[1]", "[18446744073709551612,18446744073709551615]"),
            8,
        ),
        "tensor `t`: bytes 18446744073709551612 to 18446744073709551615",
    );
    refused(
        file(&one("[1]", "[0,18446744073709551616]"), 8),
        "isn't as expected",
    );
    let deep = format!(r#"{{"t":{}"#, "[".repeat(100_000));
    refused(file(&deep, 8), "isn't as expected");

    let mut writer = safetensors::Writer::new([("k".to_owned(), "v".to_owned())].into());
    writer.tensor("a", DType::BF16, &[2, 3]).unwrap();
    writer.tensor("b", DType::F32, &[1]).unwrap();
    let layout = writer.finish();
    let bytes = &layout.header;
    for n in 0..bytes.len() {
        assert!(SafeTensors::parse(&bytes[..n], n as u64).is_err(), "{n}");
    }
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Either outcome is right, as long as there is one.
        let _ = SafeTensors::parse(&bytes, layout.file_len);
    }
}
