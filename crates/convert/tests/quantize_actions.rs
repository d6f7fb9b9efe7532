//! Quantize manifests: every action on every type that it takes, shapes that are no whole blocks, scales,
//! and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use sterna_convert::{AdapterOutput, QuantizeSettings, QuantizeSummary, Warning, quantize};
use sterna_format::DType;
use sterna_format::bundle::{ModelFacts, RopeFile};
use sterna_kernels::quant::{decode_row, encode_row};

#[path = "common/engine_files.rs"]
mod engine_files;

use crate::common::{self, exec, message, warned};
use engine_files::{Entry, Stored, manifest, read_tensors, type_code, write_safetensors};

/// A folder with a shard, in which manifests are tried.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    /// With a shard of these bytes.
    fn new(shard: &[u8]) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("shard"), shard).unwrap();
        Bench { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What is asked of a manifest for `arch` of a model 128 wide, to be written to `out`.
    fn settings(&self, arch: &str) -> QuantizeSettings {
        QuantizeSettings {
            model: ModelFacts {
                arch: arch.parse().unwrap(),
                tied_embeddings: false,
                hidden_dim: 128,
                intermediate_dim: 128,
                hidden_dim_orig: 128,
                intermediate_dim_orig: 128,
                norm_eps: 1e-6,
            },
            head_dim: None,
            output: Some(self.path("out")),
            rope: None,
            adapter: None,
        }
    }

    /// What comes of `manifest`, on `n_threads` threads.
    fn run_on(
        &self,
        n_threads: usize,
        manifest: &[u8],
        settings: &QuantizeSettings,
    ) -> sterna::Result<QuantizeSummary> {
        let path = self.path("manifest");
        fs::write(&path, manifest).unwrap();
        quantize(&path, settings, &exec(n_threads), &|_| {})
    }

    /// What comes of `entries`, whose shards are all the one.
    fn quantize(&self, arch: &str, entries: &[Entry]) -> Vec<Stored> {
        let manifest = manifest(&[self.path("shard")], entries);
        self.run_on(2, &manifest, &self.settings(arch)).unwrap();
        self.check_names(&["manifest", "out", "shard"]);
        read_tensors(&self.path("out"))
    }

    /// The message with which a manifest is refused; nothing is left behind.
    fn refuse(&self, manifest: &[u8]) -> String {
        self.refuse_as(manifest, &self.settings("llama"))
    }

    /// The same, of what `settings` ask.
    fn refuse_as(&self, manifest: &[u8], settings: &QuantizeSettings) -> String {
        let message = message(self.run_on(2, manifest, settings));
        self.check_names(&["manifest", "shard"]);
        message
    }

    /// Checks that there are no other files than these, but for a configuration.
    fn check_names(&self, expected: &[&str]) {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "config.json").collect();
        names.sort();
        assert_eq!(names, expected);
    }
}

/// Values of no pattern, none of them 0.
fn values(n: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.3) / 300.0;
    (0..n).map(value).collect()
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; values.len() * dtype.block_bytes()];
    encode_row(dtype, values, &mut out).unwrap();
    out
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode_row(dtype, bytes, &mut out).unwrap();
    out
}

/// An entry over all of a shard.
fn entry(action: u8, dtype: DType, rows: usize, cols: usize) -> Entry {
    let (rows, cols) = (rows as u32, cols as u32);
    let size = u64::from(rows) * u64::from(cols) * dtype.block_bytes() as u64;
    Entry {
        action,
        dtype: type_code(dtype),
        rows,
        cols,
        padded: (rows, cols),
        data: (0, 0, size),
        scale: None,
    }
}

/// A rotary embedding of heads of four elements.
fn rope() -> RopeFile {
    RopeFile {
        rope_theta: 1e4,
        head_dim: 4,
        rope_dim: 4,
        max_position_embeddings: 9,
        rope_scaling: None,
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn floats_are_copied() {
    for dtype in FLOATS {
        let bytes = encoded(dtype, &values(6 * 100));
        let made = Bench::new(&bytes).quantize("llama", &[entry(0, dtype, 6, 100)]);
        let id = [0, 1, 30][usize::from(type_code(dtype))];
        assert_eq!((made[0].action, made[0].type_id), (0, id));
        assert_eq!(made[0].data, bytes);
    }
}

#[test]
fn floats_become_blocks_of_padded_rows() {
    for (action, arch, id, to) in [
        (2, "bitnet", 8, DType::Q8_0),
        (4, "bonsai", 41, DType::Q1_0),
        (5, "bonsai_ternary", 142, DType::PQ2_0),
        (6, "bonsai_image", 2, DType::Q4_0),
        (6, "qwen3", 8, DType::Q8_0),
        (7, "qwen3", 8, DType::Q8_0),
    ] {
        for dtype in FLOATS {
            for k in [100, 128, 129] {
                let n = 3;
                let bytes = encoded(dtype, &values(n * k));
                let source = decoded(dtype, &bytes);
                let made = Bench::new(&bytes).quantize(arch, &[entry(action, dtype, n, k)]);
                assert_eq!((made[0].type_id, made[0].rows, made[0].cols), (id, n, k));
                let padded = k.next_multiple_of(to.block_len());
                let rows = decoded(to, &made[0].data);
                assert_eq!(rows.len(), n * padded);
                for (row, source) in rows.chunks(padded).zip(source.chunks(k)) {
                    if to != DType::Q1_0 {
                        let mut wide = source.to_vec();
                        wide.resize(padded, 0.0);
                        assert!(row[k..].iter().all(|&v| v == 0.0), "{to} {k}");
                    }
                    for (v, s) in row.iter().zip(source) {
                        let bound = match to {
                            DType::Q8_0 => 0.008,
                            DType::Q4_0 => 0.22,
                            // Signs, and the nearest of three.
                            DType::Q1_0 => 1.3,
                            _ => 0.85,
                        };
                        assert!((v - s).abs() <= bound, "{to} {k}: {v} for {s}");
                    }
                }
            }
        }
    }
}

#[test]
fn whole_blocks_are_those_of_the_encoder() {
    let source = values(2 * 256);
    let bytes = encoded(DType::F32, &source);
    for (action, to) in [(2, DType::Q8_0), (4, DType::Q1_0), (5, DType::PQ2_0)] {
        let made = Bench::new(&bytes).quantize("1", &[entry(action, DType::F32, 2, 256)]);
        let mut blocks = vec![0; source.len() / to.block_len() * to.block_bytes()];
        encode_row(to, &source, &mut blocks).unwrap();
        assert_eq!(made[0].data, blocks);
    }
}

#[test]
fn padding_doesnt_lower_the_magnitude_of_one_bit() {
    let source: Vec<f32> = (0..130)
        .map(|i| if i % 3 == 0 { -0.5 } else { 0.5 })
        .collect();
    let bytes = encoded(DType::BF16, &source);
    let made = Bench::new(&bytes).quantize("bonsai", &[entry(4, DType::BF16, 1, 130)]);
    assert_eq!(decoded(DType::Q1_0, &made[0].data)[..130], source);
}

/// The rule for masters, as the text of the format has it.
fn rounded(values: &[f32]) -> (Vec<i8>, f32) {
    let mean = values.iter().map(|v| f64::from(v.abs())).sum::<f64>() / values.len() as f64;
    let multiplier = 1.0 / (mean as f32).max(1e-5);
    let trit = |v: &f32| (v * multiplier).round_ties_even().clamp(-1.0, 1.0) as i8;
    (values.iter().map(trit).collect(), 1.0 / multiplier)
}

#[test]
fn masters_become_trits() {
    for dtype in FLOATS {
        for k in [100, 128, 300] {
            let bytes = encoded(dtype, &values(5 * k));
            let made = Bench::new(&bytes).quantize("bitnet", &[entry(1, dtype, 5, k)]);
            let (trits, scale) = made[0].trits();
            let expected = rounded(&decoded(dtype, &bytes));
            assert_eq!(trits, expected.0);
            assert!((scale / expected.1 - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn floats_that_are_trits_keep_their_scale() {
    let trits: Vec<i8> = (0..300).map(|i| (i % 7 % 3) as i8 - 1).collect();
    let floats: Vec<f32> = trits.iter().map(|&t| f32::from(t) * 0.375).collect();
    let bytes = encoded(DType::F16, &floats);
    let made = Bench::new(&bytes).quantize("bitnet", &[entry(1, DType::F16, 3, 100)]);
    assert_eq!(made[0].trits(), (trits, 0.375));
}

/// Trits of a matrix of `n` rows, and the bytes of four of them each.
fn packed(n: usize, k: usize) -> (Vec<i8>, Vec<u8>) {
    let trits: Vec<i8> = (0..n * k).map(|i| (i * 5 % 11 % 3) as i8 - 1).collect();
    let quarter = n.div_ceil(4);
    let mut bytes = vec![0; quarter * k];
    for (i, trit) in trits.iter().enumerate() {
        let (row, col) = (i / k, i % k);
        bytes[row % quarter * k + col] |= ((trit + 1) as u8) << (row / quarter * 2);
    }
    (trits, bytes)
}

#[test]
fn stored_trits_are_laid_out_anew() {
    for k in [60, 128, 131] {
        let (trits, bytes) = packed(8, k);
        for dtype in [DType::U8, DType::I8] {
            let made = Bench::new(&bytes).quantize("bitnet", &[entry(3, dtype, 2, k)]);
            assert_eq!((made[0].rows, made[0].padded.0), (8, 8));
            assert_eq!(made[0].trits(), (trits.clone(), 1.0), "{dtype} {k}");
        }
        let bytes: Vec<u8> = trits.iter().map(|&trit| trit as u8).collect();
        let made = Bench::new(&bytes).quantize("bitnet", &[entry(3, DType::I8, 8, k)]);
        assert_eq!((made[0].rows, made[0].trits()), (8, (trits, 1.0)));
    }
}

#[test]
fn a_code_that_is_no_trit_is_refused() {
    let (_, mut bytes) = packed(8, 60);
    bytes[70] |= 0b1100;
    let bench = Bench::new(&bytes);
    let entries = [entry(3, DType::U8, 2, 60)];
    let message = bench.refuse(&manifest(&[bench.path("shard")], &entries));
    assert!(message.contains("tensor 0: "), "{message}");
    assert!(message.contains("row 3"), "{message}");
}

/// Trits with a scale of `scale_bytes` behind them, beside a configuration or none; what the scale is.
fn scale(config: Option<&str>, scale_bytes: &[u8]) -> f32 {
    let (_, mut bytes) = packed(4, 32);
    bytes.extend(scale_bytes);
    let bench = Bench::new(&bytes);
    if let Some(config) = config {
        fs::write(bench.path("config.json"), config).unwrap();
    }
    let mut entry = entry(3, DType::U8, 1, 32);
    entry.scale = Some((0, 32, scale_bytes.len() as u64));
    bench.quantize("bitnet", &[entry])[0].trits().1
}

#[test]
fn configurations_say_whether_scales_divide() {
    let class = |class: &str| {
        format!(
            r#"{{"architectures":["BitNetForCausalLM"],"model_type":"bitnet",
            "quantization_config":{{"quant_method":"bitnet",{class}"quantization_mode":"offline"}}}}"#
        )
    };
    let auto = class(r#""linear_class":"autobitlinear","#);
    let plain = class(r#""linear_class":"bitlinear","#);
    let silent = class("");
    let [small, large] = [0.25_f32.to_le_bytes(), 4.0_f32.to_le_bytes()];
    for (config, bytes, expected) in [
        (Some(&auto), &small[..], 0.25),
        (Some(&auto), &large, 4.0),
        (Some(&plain), &small, 4.0),
        (Some(&plain), &large, 0.25),
        (Some(&silent), &large, 0.25),
        (None, &small, 0.25),
        (None, &large, 0.25),
        // BF16 unless the file says otherwise.
        (None, &[0x80, 0x3e], 0.25),
        (None, &[0x80, 0x40], 0.25),
    ] {
        assert_eq!(scale(config.map(String::as_str), bytes), expected);
    }
    // Of a family that nothing is known of, it says nothing.
    let strange = r#"{"architectures":["X"],"model_type":"x"}"#;
    assert_eq!(scale(Some(strange), &large), 0.25);
}

#[test]
fn a_configuration_that_means_nothing_is_told_of_once() {
    let (_, mut bytes) = packed(4, 32);
    bytes.extend(4.0_f32.to_le_bytes());
    let bench = Bench::new(&bytes);
    fs::write(bench.path("config.json"), "{").unwrap();
    let mut entry = entry(3, DType::U8, 1, 32);
    entry.scale = Some((0, 32, 4));
    let path = bench.path("manifest");
    fs::write(&path, manifest(&[bench.path("shard")], &[entry, entry])).unwrap();
    let settings = bench.settings("bitnet");
    let (made, warnings) = warned(|notify| quantize(&path, &settings, &exec(1), notify));
    made.unwrap();
    let [warning @ Warning::UnknownConfig { reason }] = &warnings[..] else {
        panic!("one warning, found {warnings:?}");
    };
    assert!(
        warning.is_warning() && reason.contains("config.json"),
        "{reason}"
    );
}

#[test]
fn a_scale_of_two_bytes_has_the_type_that_its_file_says() {
    let bench = Bench::new(&[]);
    let (trits, bytes) = packed(4, 32);
    for (dtype, half) in [(DType::F16, [0, 0x34]), (DType::BF16, [0x80, 0x3e])] {
        let tensors = [
            ("w".to_owned(), DType::U8, vec![1, 32], bytes.clone()),
            ("w_scale".to_owned(), dtype, vec![1], half.to_vec()),
        ];
        write_safetensors(&bench.path("shard"), &tensors);
        let len = fs::metadata(bench.path("shard")).unwrap().len();
        let mut entry = entry(3, DType::U8, 1, 32);
        entry.data.1 = len - 34;
        entry.scale = Some((0, len - 2, 2));
        let made = bench.quantize("bitnet", &[entry]);
        assert_eq!(made[0].trits(), (trits.clone(), 0.25), "{dtype}");
    }
}

#[test]
fn threads_change_nothing() {
    let bytes = encoded(DType::F32, &values(300 * 200));
    let bench = Bench::new(&bytes);
    let entries = [1, 2, 4, 5].map(|action| entry(action, DType::F32, 300, 200));
    let manifest = manifest(&[bench.path("shard")], &entries);
    let run = |n_threads| {
        let summary = bench.run_on(n_threads, &manifest, &bench.settings("llama"));
        let summary = summary.unwrap();
        assert_eq!((summary.n_tensors, summary.lora), (4, None));
        let bytes = fs::read(bench.path("out")).unwrap();
        assert_eq!(summary.size, bytes.len() as u64);
        bytes
    };
    let [one, two] = [1, 2].map(run);
    assert!(one == two);
}

#[test]
fn bad_manifests_and_shards_are_refused() {
    let bench = Bench::new(&[0; 100]);
    let shard = bench.path("shard");
    let one = |entry| manifest(std::slice::from_ref(&shard), &[entry]);
    let good = entry(0, DType::BF16, 5, 10);
    let missing = bench.path("missing");
    let folder = bench.dir.path().to_owned();
    let mut past = good;
    past.data.1 = 1;
    let mut scale_past = entry(3, DType::U8, 5, 10);
    scale_past.scale = Some((0, 98, 4));
    let mut wide = good;
    wide.cols = 11;
    for (bytes, message) in [
        (
            vec![],
            "the file ends in the header: 2 bytes needed, 0 left",
        ),
        (one(past), "tensor 0: "),
        (
            one(past),
            "wanted 100 bytes at offset 1, but the file has 100",
        ),
        (
            one(scale_past),
            "wanted 4 bytes at offset 98, but the file has 100",
        ),
        (
            one(wide),
            "tensor 0: data: expected 110 bytes for 5 times 11 of BF16, found 100",
        ),
        (manifest(&[missing], &[good]), "shard 0 of the manifest: "),
        (
            manifest(&[folder], &[good]),
            "expected a regular file, found a directory",
        ),
        (
            one(entry(3, DType::BF16, 5, 10)),
            "tensor 0: element type: expected I8 or U8, with action REPACK_TERNARY, found BF16",
        ),
        (
            [one(good), vec![0, 0, 0, 0, 1]].concat(),
            "after the tensors, read with a table of sections",
        ),
    ] {
        let refused = bench.refuse(&bytes);
        assert!(refused.contains(message), "{refused}");
    }
    let settings = bench.settings("llama");
    let mut with_adapter = settings.clone();
    with_adapter.adapter = Some(AdapterOutput {
        path: "x".into(),
        rank: None,
        n_heads: None,
        n_kv_heads: None,
    });
    let mut too_narrow = settings.clone();
    too_narrow.model.hidden_dim_orig = 129;
    for (settings, message) in [
        (
            with_adapter,
            "expected a manifest with an adapter, found one without",
        ),
        (
            too_narrow,
            "the header: hidden dimension: expected at least the model's own, 129, found 128",
        ),
    ] {
        let refused = bench.refuse_as(&one(good), &settings);
        assert!(refused.contains(message), "{refused}");
    }
    let mut same_place = settings;
    same_place.rope = Some((bench.path("out"), rope()));
    let message = "expected another file for each output";
    let refused = bench.refuse_as(&one(good), &same_place);
    assert!(refused.contains(message), "{refused}");
    // Weights that are no numbers are found while they are encoded.
    let nan = Bench::new(&f32::NAN.to_le_bytes().repeat(64));
    let bytes = manifest(&[nan.path("shard")], &[entry(1, DType::F32, 2, 32)]);
    assert!(nan.refuse(&bytes).contains("tensor 0: "));
}

#[test]
fn outputs_take_the_place_of_no_input() {
    let bytes = encoded(DType::F32, &values(64));
    let bench = Bench::new(&bytes);
    let manifest = manifest(&[bench.path("shard")], &[entry(1, DType::F32, 2, 32)]);
    let sub = bench.path("sub");
    fs::create_dir(&sub).unwrap();
    let with_output = |output: &Path| {
        let mut settings = bench.settings("llama");
        settings.output = Some(output.to_owned());
        message(bench.run_on(2, &manifest, &settings))
    };
    let message = "expected another file to write than one that is read";
    for output in ["../shard", "../manifest"] {
        assert!(with_output(&sub.join(output)).contains(message), "{output}");
    }
    let message = "expected a file to write, found a folder";
    assert!(with_output(&sub).contains(message));
    #[cfg(unix)]
    {
        let message = "expected a file to write, found a pipe, socket or device";
        assert!(with_output(Path::new("/dev/null")).contains(message));
        std::os::unix::fs::symlink(&sub, bench.path("link")).unwrap();
        let message = "expected a file to write, found a folder";
        let link = bench.path("link");
        assert!(with_output(&link).contains(message));
        let message = "expected another file to write than one that is read";
        let linked = link.join("../shard");
        assert!(with_output(&linked).contains(message));
    }
    // Another name for the same output.
    let mut settings = bench.settings("llama");
    settings.rope = Some((sub.join("../out"), rope()));
    let refused = common::message(bench.run_on(2, &manifest, &settings));
    assert!(refused.contains("expected another file for each output"));
    assert_eq!(fs::read(bench.path("shard")).unwrap(), bytes);
    assert_eq!(fs::read(bench.path("manifest")).unwrap(), manifest);
    assert!(!bench.path("out").exists());
}

/// A shard may be called what a partial output was called once.
#[test]
fn a_shard_whose_name_ends_in_tmp_is_read() {
    let bytes = encoded(DType::F32, &values(64));
    let bench = Bench::new(&bytes);
    let shard = bench.path("out.tmp");
    fs::write(&shard, &bytes).unwrap();
    let manifest = manifest(std::slice::from_ref(&shard), &[entry(0, DType::F32, 2, 32)]);
    let settings = bench.settings("llama");
    bench.run_on(2, &manifest, &settings).unwrap();
    assert_eq!(fs::read(&shard).unwrap(), bytes);
    assert_eq!(read_tensors(&bench.path("out"))[0].data, bytes);
}

#[cfg(unix)]
#[test]
fn a_manifest_that_is_no_file_is_refused() {
    let bench = Bench::new(&[]);
    let settings = bench.settings("llama");
    let message = message(quantize(
        Path::new("/dev/zero"),
        &settings,
        &exec(1),
        &|_| {},
    ));
    assert!(
        message.contains("/dev/zero: expected a regular file"),
        "{message}"
    );
}
