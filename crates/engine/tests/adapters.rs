//! Low-rank adapters: their logits are those of the merged models, and they leave no trace behind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{
    self, load, load_gguf, load_hf, max_difference, nll, plan_gguf, plan_hf, read, testdata,
};
use bytes::Bytes;
use sterna_engine::backend::{
    LinearSource, LowRank, OutputLayout, Product, Rounding, TernaryPacking, WeightData,
};
use sterna_engine::lora::{
    ActiveAdapter, AdapterError, AdapterOptions, AdapterSource, LoraMatrix, LoraPair, Module,
    Orientation,
};
use sterna_engine::stage::{LinearLayer, Operation, Stage};
use sterna_engine::{
    Activations, Backend, Cpu, EngineError, Logits, Model, ModelPlan, Session, SessionOptions, Step,
};
use sterna_format::DType;
use sterna_format::hf::{AdapterConfig, AdapterTensor, LoraFactor};
use sterna_format::safetensors::SafeTensors;
use sterna_kernels::quant::decode_row;
use sterna_kernels::{Exec, Isa, requantize};

/// An adapter that PEFT saved.
fn peft(dir: &Path) -> AdapterSource {
    let config = AdapterConfig::parse(&read(&dir.join("adapter_config.json"))).unwrap();
    let file = read(&dir.join("adapter_model.safetensors"));
    let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
    let mut halves: BTreeMap<String, (usize, Module, BTreeMap<LoraFactor, LoraMatrix>)> =
        BTreeMap::new();
    for entry in header.tensors() {
        let tensor = AdapterTensor::parse(&entry.name).unwrap();
        let module = Module::from_name(&tensor.module).unwrap();
        let (_, _, matrices) =
            (halves.entry(tensor.path)).or_insert((tensor.layer, module, BTreeMap::new()));
        let matrix = LoraMatrix {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            dtype: entry.dtype,
            bytes: file.slice(entry.offset as usize..(entry.offset + entry.len) as usize),
        };
        matrices.insert(tensor.matrix, matrix);
    }
    let pairs = halves
        .into_iter()
        .map(|(path, (layer, module, mut matrices))| {
            let mut take = |factor| matrices.remove(&factor).unwrap();
            let a = take(LoraFactor::A);
            assert_eq!(a.shape[0], config.rank(&path));
            LoraPair {
                layer,
                module,
                scaling: config.scaling(&path) as f32,
                a,
                b: take(LoraFactor::B),
            }
        });
    AdapterSource {
        name: dir.file_name().unwrap().to_string_lossy().into_owned(),
        orientation: Orientation::RankFirst,
        pairs: pairs.collect(),
    }
}

fn adapters() -> PathBuf {
    testdata().join("adapters")
}

/// The tensors of a reference file as floats, and the ids.
fn reference(base: &str) -> (Vec<u32>, BTreeMap<String, Vec<f32>>) {
    let file = read(&adapters().join(base).join("reference.safetensors"));
    let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
    let mut ids = Vec::new();
    let mut logits = BTreeMap::new();
    for t in header.tensors() {
        let bytes = &file[t.offset as usize..(t.offset + t.len) as usize];
        match t.name.strip_prefix("logits.") {
            Some(name) => {
                let mut values = vec![0.0; bytes.len() / 4];
                decode_row(DType::F32, bytes, &mut values).unwrap();
                logits.insert(name.to_owned(), values);
            }
            None => {
                let chunks = bytes.as_chunks::<4>().0.iter();
                ids = chunks.map(|b| u32::from_le_bytes(*b)).collect();
            }
        }
    }
    (ids, logits)
}

fn session(model: &Arc<Model<Cpu>>) -> Session<Cpu> {
    Session::new(Arc::clone(model), SessionOptions::new(64)).unwrap()
}

/// Logits of all `ids`, in pieces of `chunk` tokens.
fn run(
    model: &Arc<Model<Cpu>>,
    active: &[ActiveAdapter<Cpu>],
    ids: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let mut session = session(model);
    session.set_adapters(active.to_vec()).unwrap();
    let pieces = ids.chunks(chunk);
    pieces
        .flat_map(|ids| session.forward(ids, Logits::All).unwrap())
        .collect()
}

fn active(model: &Arc<Model<Cpu>>, source: &AdapterSource, scale: f32) -> ActiveAdapter<Cpu> {
    let adapter = model
        .load_adapter(source.clone(), AdapterOptions::default())
        .unwrap();
    ActiveAdapter { adapter, scale }
}

/// Checks both adapters of `base`, alone and together, with `same(name, got, want, ids)`.
fn check(
    base: &str,
    model: &Arc<Model<Cpu>>,
    [first, second]: [&str; 2],
    same: impl Fn(&str, &[f32], &[f32], &[u32]),
) {
    let (ids, logits) = reference(base);
    let source = |name: &str| peft(&adapters().join(base).join(name));
    let scaled = |name: &str, scale| active(model, &source(name), scale);
    for (name, active) in [
        (first, vec![scaled(first, 1.0)]),
        (second, vec![scaled(second, 1.0)]),
        ("together", vec![scaled(first, 0.5), scaled(second, -1.5)]),
    ] {
        let got = run(model, &active, &ids, 1000);
        same(name, &got, &logits[name], &ids);
        for chunk in [1, 3] {
            assert!(
                got == run(model, &active, &ids, chunk),
                "{base}/{name}, chunks of {chunk}"
            );
        }
    }
}

/// Differences from the merged model in f64, for adapters of f32 and of fewer bits, or over weights of
/// F16: activations that meet such are rounded to as many bits.
const MAX_DIFFERENCE: f32 = 1e-3;
const MAX_DIFFERENCE_HALF: f32 = 5e-3;

fn check_float(base: &str, model: &Arc<Model<Cpu>>, names: [&str; 2], f32_only: Option<&str>) {
    check(base, model, names, |name, got, want, _| {
        let bound = if f32_only == Some(name) {
            MAX_DIFFERENCE
        } else {
            MAX_DIFFERENCE_HALF
        };
        let difference = max_difference(got, want);
        println!("{base}/{name}: {difference:.1e}");
        assert!(difference < bound, "{base}/{name}: {difference}");
    });
}

#[test]
fn llama() {
    let model = load_hf(&testdata().join("reference-logits/llama"));
    check_float("llama", &model, ["all", "stabilised"], Some("all"));
}

#[test]
fn gemma3() {
    let model = load_hf(&testdata().join("reference-logits/gemma3"));
    check_float("gemma3", &model, ["all", "stabilised"], Some("stabilised"));
}

#[test]
fn fused_modules() {
    let model = load_hf(&testdata().join("reference-logits/phi3"));
    check_float("phi3", &model, ["fused", "few"], Some("few"));
}

/// The base's rows of queries and keys are in another order than the adapter's.
#[test]
fn permuted_base() {
    let model = load_gguf(&testdata().join("reference-gguf/llama/model.gguf"));
    check_float("llama-gguf", &model, ["all", "stabilised"], None);
}

/// As in `reference_logits`: a flipped rounding of activations moves single logits. The adapters move
/// them by 36 and 39.
const MAX_NLL_DIFFERENCE: f64 = 0.02;
const MAX_DIFFERENCE_TERNARY: f32 = 1.0;

#[test]
fn ternary_base() {
    let model = load_hf(&testdata().join("reference-logits/bitnet-packed"));
    let n_vocab = model.config().n_vocab;
    check(
        "bitnet",
        &model,
        ["all", "stabilised"],
        |name, got, want, ids| {
            let (got_nll, want_nll) = (nll(got, ids, n_vocab), nll(want, ids, n_vocab));
            let difference = max_difference(got, want);
            println!("bitnet/{name}: {got_nll} and {want_nll}, {difference:.1e}");
            assert!(difference < MAX_DIFFERENCE_TERNARY, "{name}: {difference}");
            assert!(
                (got_nll - want_nll).abs() < MAX_NLL_DIFFERENCE,
                "{name}: {got_nll}, not {want_nll}"
            );
        },
    );
}

/// Numbers from −1 to 1 that look random.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn f32_bytes(values: &[f32]) -> Bytes {
    values
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect::<Vec<u8>>()
        .into()
}

fn floats(n: usize, k: usize, values: &[f32]) -> LinearSource {
    LinearSource {
        rotation: None,
        n,
        k,
        weights: WeightData::Blocks {
            dtype: DType::F32,
            bytes: f32_bytes(values),
            rounding: Rounding::Blocks,
        },
    }
}

/// Over trits, whose activations are rounded, the adapter reads the floats.
#[test]
fn ternary_linear_with_an_adapter_is_the_scalar_sum() {
    const N: usize = 40;
    const K: usize = 256;
    const RANK: usize = 5;
    const M: usize = 7;
    const SCALE: f32 = 0.75;
    let (x, a, b) = (noise(M * K, 1), noise(RANK * K, 2), noise(N * RANK, 3));
    // In each byte of 32, trits of four groups of 32 columns; here all are +1, 0, 0 and −1.
    let codes = vec![0b10_01_01_00_u8; N * K / 4];
    for isa in Isa::available() {
        let cpu = Cpu::new(2, isa);
        let table = cpu.load_linear(floats(M, K, &x)).unwrap();
        let w = LinearSource {
            rotation: None,
            n: N,
            k: K,
            weights: WeightData::Ternary {
                codes: codes.clone().into(),
                packing: TernaryPacking::I2s,
                scale: 0.5,
            },
        };
        let w = cpu.load_linear(w).unwrap();
        let (a_matrix, b_matrix) = (
            cpu.load_linear(floats(RANK, K, &a)).unwrap(),
            cpu.load_linear(floats(N, RANK, &b)).unwrap(),
        );
        let ids: Vec<u32> = (0..M as u32).collect();
        let (mut input, mut plain, mut out) = (cpu.buffer(), cpu.buffer(), cpu.buffer());
        cpu.embed(&table, &ids, 1.0, &mut input).unwrap();
        let stage = |operation| Stage {
            layer: Some(0),
            operation,
        };
        for out in [&mut plain, &mut out] {
            let product = Product {
                stage: stage(Operation::Product(LinearLayer::Q)),
                w: &w,
                out,
            };
            (cpu.linear(&input, OutputLayout::Separate, &mut [product])).unwrap();
        }
        let mut updates = [LowRank {
            stage: stage(Operation::Adapter(LinearLayer::Q)),
            a: &a_matrix,
            b: &b_matrix,
            scale: SCALE,
            out: &mut out,
        }];
        cpu.add_low_rank(&input, 2..6, &mut updates).unwrap();
        let (plain, out) = (cpu.read(&mut plain).unwrap(), cpu.read(&mut out).unwrap());
        for t in 0..M {
            for i in 0..N {
                let mut want = f64::from(plain[t * N + i]);
                if (2..6).contains(&t) {
                    for r in 0..RANK {
                        let inner: f64 = (0..K)
                            .map(|j| f64::from(x[t * K + j]) * f64::from(a[r * K + j]))
                            .sum();
                        want += f64::from(SCALE) * f64::from(b[i * RANK + r]) * inner;
                    }
                }
                let got = f64::from(out[t * N + i]);
                assert!(
                    (got - want).abs() < 1e-4,
                    "{isa}, [{t}, {i}]: {got}, not {want}"
                );
            }
        }
    }
}

#[test]
fn threads_and_instruction_sets_change_no_bit() {
    for base in ["llama", "bitnet"] {
        let folder = if base == "llama" {
            "llama"
        } else {
            "bitnet-packed"
        };
        let (ids, _) = reference(base);
        let sources = ["all", "stabilised"].map(|name| peft(&adapters().join(base).join(name)));
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            for n_threads in 1..=3 {
                let (plan, files) = plan_hf(&testdata().join("reference-logits").join(folder));
                let model = load(plan, &files, Cpu::new(n_threads, isa)).unwrap();
                let set = [
                    active(&model, &sources[0], 0.7),
                    active(&model, &sources[1], 1.0),
                ];
                let got = run(&model, &set, &ids, 1000);
                let same = *first.get_or_insert_with(|| got.clone()) == got;
                assert!(same, "{base}, {isa}, {n_threads} threads");
            }
        }
    }
}

#[test]
fn without_an_effect_no_bit_changes() {
    for (base, folder) in [("llama", "llama"), ("bitnet", "bitnet-packed")] {
        let model = load_hf(&testdata().join("reference-logits").join(folder));
        let (ids, _) = reference(base);
        let source = peft(&adapters().join(base).join("all"));
        let plain = run(&model, &[], &ids, 1000);
        assert!(plain == run(&model, &[active(&model, &source, 0.0)], &ids, 1000));
        let mut nothing = source.clone();
        nothing.pairs.iter_mut().for_each(|pair| pair.scaling = 0.0);
        assert!(plain == run(&model, &[active(&model, &nothing, 1.0)], &ids, 1000));
        // Taken away again, it leaves nothing behind.
        let mut session = session(&model);
        session
            .set_adapters(vec![active(&model, &source, 1.0)])
            .unwrap();
        assert!(plain != session.forward(&ids, Logits::All).unwrap());
        session.truncate(0);
        session.set_adapters(Vec::new()).unwrap();
        assert!(plain == session.forward(&ids, Logits::All).unwrap());
    }
}

#[test]
fn sessions_of_a_batch_have_adapters_of_their_own() {
    for (base, folder) in [("llama", "llama"), ("bitnet", "bitnet-packed")] {
        let model = load_hf(&testdata().join("reference-logits").join(folder));
        let (ids, _) = reference(base);
        let source = |name: &str| peft(&adapters().join(base).join(name));
        let all = active(&model, &source("all"), 1.0);
        let stabilised = active(&model, &source("stabilised"), 0.5);
        let sets = [
            vec![all.clone()],
            vec![all.clone()],
            vec![],
            vec![stabilised.clone(), all.clone()],
            vec![stabilised],
            vec![ActiveAdapter { scale: 2.0, ..all }],
        ];
        let lens = [5, 1, 9, 1, 1, 16];
        let new = |set: &Vec<_>| {
            let mut session = session(&model);
            session.set_adapters(set.clone()).unwrap();
            session
        };
        let mut alone: Vec<_> = sets.iter().map(new).collect();
        let mut together: Vec<_> = sets.iter().map(new).collect();
        for _ in 0..2 {
            let mut steps: Vec<_> = (together.iter_mut().zip(lens))
                .map(|(session, n)| Step {
                    session,
                    ids: &ids[..n],
                    logits: Logits::All,
                })
                .collect();
            let found = Session::forward_together(&mut steps).unwrap();
            for (i, (session, n)) in alone.iter_mut().zip(lens).enumerate() {
                let expected = session.forward(&ids[..n], Logits::All).unwrap();
                assert!(found[i] == expected, "{base}, session {i}");
            }
        }
        // A fork keeps its adapters.
        let mut fork = alone[3].fork(4);
        assert_eq!(fork.adapters().len(), 2);
        fork.truncate(0);
        let got = fork.forward(&ids, Logits::Last).unwrap();
        assert!(got == new(&sets[3]).forward(&ids, Logits::Last).unwrap());
    }
}

/// The matrix with rows and columns exchanged.
fn transposed(matrix: &LoraMatrix) -> LoraMatrix {
    let [rows, columns] = matrix.shape[..] else {
        unreachable!("matrices have two dimensions")
    };
    let size = matrix.dtype.block_bytes();
    let mut bytes = Vec::new();
    for j in 0..columns {
        for i in 0..rows {
            let at = (i * columns + j) * size;
            bytes.extend_from_slice(&matrix.bytes[at..at + size]);
        }
    }
    LoraMatrix {
        shape: vec![columns, rows],
        bytes: bytes.into(),
        ..matrix.clone()
    }
}

#[test]
fn orientation_is_told_by_shape() {
    for (base, folder, name) in [("llama", "llama", "all"), ("phi3", "phi3", "fused")] {
        let model = load_hf(&testdata().join("reference-logits").join(folder));
        let (ids, _) = reference(base);
        let source = peft(&adapters().join(base).join(name));
        let want = run(&model, &[active(&model, &source, 1.0)], &ids, 1000);
        let mut turned = source.clone();
        for pair in &mut turned.pairs {
            (pair.a, pair.b) = (transposed(&pair.a), transposed(&pair.b));
        }
        for orientation in [Orientation::RankFirst, Orientation::RankLast] {
            for source in [&source, &turned] {
                let source = AdapterSource {
                    orientation,
                    ..source.clone()
                };
                let got = run(&model, &[active(&model, &source, 1.0)], &ids, 1000);
                assert!(got == want, "{base}, {orientation:?}");
            }
        }
    }
}

/// An adapter held in another type is the adapter whose matrices have the values of that type, whatever the
/// rank; with long blocks, rows that aren't whole ones stay as they are.
#[test]
fn encoded_matrices() {
    let (plan, files) = plan_hf(&testdata().join("reference-logits/llama"));
    // Activations are left alone, so that only the values of the matrices count.
    let cpu = Cpu::new(2, Isa::detect()).with_activations(Activations::F32);
    let model = load(plan, &files, cpu).unwrap();
    let (ids, _) = reference("llama");
    let source = peft(&adapters().join("llama/all"));
    for dtype in [
        DType::Q8_0,
        DType::Q5_0,
        DType::Q4_0,
        DType::F16,
        DType::Q6_K,
    ] {
        let options = AdapterOptions { dtype: Some(dtype) };
        let mut rounded = source.clone();
        let mut n_kept = 0;
        for pair in &mut rounded.pairs {
            for matrix in [&mut pair.a, &mut pair.b] {
                let (n, k) = (matrix.shape[0], matrix.shape[1]);
                let padded = k.next_multiple_of(dtype.block_len());
                if padded > k && dtype.block_len() > 32 {
                    n_kept += 1;
                    continue;
                }
                let mut values = vec![0.0; n * k];
                decode_row(matrix.dtype, &matrix.bytes, &mut values).unwrap();
                let mut wide: Vec<f32> = Vec::new();
                for row in values.chunks(k) {
                    wide.extend(row);
                    wide.resize(wide.len() + padded - k, 0.0);
                }
                let exec = Exec::new(1, Isa::detect());
                let bytes = f32_bytes(&wide);
                let blocks = requantize(&exec, n, padded, DType::F32, &bytes, dtype).unwrap();
                decode_row(dtype, &blocks, &mut wide).unwrap();
                let rows = wide.chunks(padded);
                let values: Vec<f32> = rows.flat_map(|row| row[..k].to_vec()).collect();
                matrix.bytes = f32_bytes(&values);
                matrix.dtype = DType::F32;
            }
        }
        assert_eq!(n_kept > 0, dtype.block_len() > 32, "{dtype}");
        let adapter = model.load_adapter(source.clone(), options).unwrap();
        let encoded = ActiveAdapter {
            adapter,
            scale: 1.0,
        };
        let got = run(&model, &[encoded], &ids, 1000);
        let want = run(&model, &[active(&model, &rounded, 1.0)], &ids, 1000);
        let difference = max_difference(&got, &want);
        println!("{dtype}: {difference:.1e}");
        assert!(difference < MAX_DIFFERENCE, "{dtype}: {difference}");
    }
}

/// With as high a rank as the layer is wide, only the declaration tells.
#[test]
fn square_matrices_lie_as_declared() {
    let model = load_hf(&testdata().join("reference-logits/llama"));
    let (ids, _) = reference("llama");
    let dim = model.config().model_dim;
    let matrix = |name: &str, seed| LoraMatrix {
        name: name.to_owned(),
        shape: vec![dim, dim],
        dtype: DType::F32,
        bytes: f32_bytes(&noise(dim * dim, seed)),
    };
    let source = |orientation, turn: bool| {
        let (a, b) = (matrix("a", 1), matrix("b", 2));
        let (a, b) = if turn {
            (transposed(&a), transposed(&b))
        } else {
            (a, b)
        };
        AdapterSource {
            name: "square".to_owned(),
            orientation,
            pairs: vec![LoraPair {
                layer: 1,
                module: Module::O,
                scaling: 0.1,
                a,
                b,
            }],
        }
    };
    let run = |source| run(&model, &[active(&model, &source, 1.0)], &ids, 1000);
    let first = run(source(Orientation::RankFirst, false));
    assert!(first == run(source(Orientation::RankLast, true)));
    assert!(first != run(source(Orientation::RankLast, false)));
}

#[test]
fn modules_that_a_layer_lacks_are_named() {
    let source = peft(&adapters().join("llama/all"));
    for (dir, module) in [
        ("reference-mixtures/hf/mixtral", Module::Up),
        ("reference-states/hf/lfm2", Module::Q),
    ] {
        let model = load_hf(&testdata().join(dir));
        let mut one = source.clone();
        one.pairs
            .retain(|pair| pair.module == module && pair.layer == 0);
        let error = model.load_adapter(one, AdapterOptions::default()).err();
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        let name = match module {
            Module::Up => "up_proj",
            _ => "q_proj",
        };
        let expected = format!("expected a module of layer 0, found {name}, which it lacks");
        assert!(error.ends_with(&expected), "{dir}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let model = load_hf(&testdata().join("reference-logits/llama"));
    let source = peft(&adapters().join("llama/all"));
    let at = (source.pairs.iter())
        .position(|pair| pair.module == Module::K)
        .unwrap();
    let name = |part: &str| {
        format!("tensor `base_model.model.model.layers.0.self_attn.k_proj.lora_{part}.weight`: ")
    };
    let fails = |change: &dyn Fn(&mut LoraPair)| {
        let mut source = source.clone();
        change(&mut source.pairs[at]);
        let result = model.load_adapter(source, AdapterOptions::default());
        result.err().map(|e| e.to_string()).unwrap_or_default()
    };
    let shape = |part, expected: &str, found: &str| {
        name(part)
            + &format!("expected shape {expected} by the k_proj of the base model, found {found}")
    };
    assert_eq!(
        fails(&|pair| pair.layer = 3),
        name("A") + "expected a layer below 3, found 3"
    );
    assert_eq!(
        fails(&|pair| pair.scaling = f32::INFINITY),
        name("A") + "expected a finite scaling, found inf"
    );
    assert_eq!(
        fails(&|pair| pair.module = Module::Q),
        "tensor `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight`: expected shape \
         [128, 4] by the q_proj of the base model, found [64, 4]"
    );
    assert_eq!(
        fails(&|pair| pair.a.shape = vec![4, 64, 2]),
        shape("A", "[rank, 128]", "[4, 64, 2]")
    );
    assert_eq!(
        fails(&|pair| pair.b.shape = vec![128, 2]),
        shape("B", "[64, 4]", "[128, 2]")
    );
    assert_eq!(
        fails(&|pair| pair.a.shape = vec![4, 127]),
        name("A") + "expected 2032 bytes by its shape, found 2048"
    );
    assert_eq!(
        fails(&|pair| pair.a.shape = vec![usize::MAX, usize::MAX]),
        name("A") + &format!("expected {} bytes by its shape, found 2048", usize::MAX)
    );
    assert_eq!(
        fails(&|pair| pair.b.dtype = DType::F64),
        name("B") + "expected type F32, F16 or BF16, found F64"
    );
    assert_eq!(
        fails(&|pair| {
            let mut bytes = pair.b.bytes.to_vec();
            bytes[4 * 200..4 * 201].copy_from_slice(&f32::NAN.to_le_bytes());
            pair.b.bytes = bytes.into();
        }),
        name("B") + "expected numbers, found NaN at index 200"
    );
    let twice = AdapterSource {
        pairs: vec![source.pairs[at].clone(), source.pairs[at].clone()],
        ..source.clone()
    };
    assert!(matches!(
        model.load_adapter(twice, AdapterOptions::default()),
        Err(AdapterError::Twice {
            module: "k_proj",
            layer: 0,
            ..
        })
    ));
    let empty = AdapterSource {
        pairs: Vec::new(),
        ..source.clone()
    };
    assert!(matches!(
        model.load_adapter(empty, AdapterOptions::default()),
        Err(AdapterError::Empty)
    ));

    let other = load_hf(&testdata().join("reference-logits/llama"));
    let mut session = session(&model);
    assert!(matches!(
        session.set_adapters(vec![active(&other, &source, 1.0)]),
        Err(EngineError::OtherAdapter { name }) if name == "all"
    ));
    assert!(matches!(
        session.set_adapters(vec![active(&model, &source, f32::NAN)]),
        Err(EngineError::AdapterScale { .. })
    ));
    assert!(session.adapters().is_empty());
}

/// Block types with their own rounding of activations meet adapters as well: what the adapter adds is
/// what it adds to the same model in another type.
#[test]
fn quantised_bases() {
    for name in ["llama-q4-k-m", "llama-q8-0"] {
        let dir = testdata().join("reference-gguf").join(name);
        let (plan, files): (ModelPlan, _) = plan_gguf(&common::files(&dir, "gguf"));
        let model = load(plan, &files, common::cpu()).unwrap();
        let (dim, ffn_dim) = (model.config().model_dim, model.config().ffn_dim);
        let matrix = |n, k, seed| LoraMatrix {
            name: "m".to_owned(),
            shape: vec![n, k],
            dtype: DType::F32,
            bytes: f32_bytes(&noise(n * k, seed)),
        };
        let source = AdapterSource {
            name: name.to_owned(),
            orientation: Orientation::RankFirst,
            pairs: vec![LoraPair {
                layer: 0,
                module: Module::Down,
                scaling: 0.05,
                a: matrix(2, ffn_dim, 1),
                b: matrix(dim, 2, 2),
            }],
        };
        let ids: Vec<u32> = (3..20).collect();
        let set = [active(&model, &source, 1.0)];
        let whole = run(&model, &set, &ids, 1000);
        assert!(whole == run(&model, &set, &ids, 1), "{name}");
        assert!(
            max_difference(&whole, &run(&model, &[], &ids, 1000)) > 0.01,
            "{name}"
        );
    }
}
