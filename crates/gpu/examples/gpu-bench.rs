//! Benchmarks a GPU with this crate's kernels: overheads, and the products of two real models, each checked
//! against the CPU before it is timed. Kernels of layers with states are only timed: tests check them.
//!
//!     cargo run --release -p sterna-gpu --example gpu-bench [-- SECTION...]
//!
//! Sections are overheads, products, variants, attention, states, step and sweep; all of them by default.
//! `STERNA_GPU` in the environment is part of the adapter's name.
//!
//! Times are medians of repeated submissions, by the clock of the host, of chains in which each dispatch
//! depends on the one before and weights are larger than caches; kernels of `step`, and of attention, by
//! the device's timestamps too.

use std::error::Error;
use std::time::{Duration, Instant};

use sterna_format::DType;
use sterna_gpu::kernels::attention::{
    Angles, AttentionShape, CacheLayer, CacheType, CachedValues, HeadNorms, Heads, PAGE_LEN,
    RopeLayout, Split, SplitKv, SplitKvStates, attention, decode, prepare_heads,
};
use sterna_gpu::kernels::elementwise::{self, Activation};
use sterna_gpu::kernels::linear::{
    Epilogue, Form, Ids, Input, Linear, WeightKind, embed, multiply,
};
use sterna_gpu::kernels::norm::rms_norm;
use sterna_gpu::kernels::output::{Draw, Samplers, TopK, sample, top_k};
use sterna_gpu::kernels::quantize::{QuantizedRows, Scaling, quantize};
use sterna_gpu::kernels::recurrent::{
    Convolution, Mamba, Scan, ScanShape, State, StateLayer, Step, StepVectors, StepWeights, Wkv,
    WkvShape, convolve, mamba, scan, step, wkv,
};
use sterna_gpu::kernels::{Rows, SequenceRows, Sequences, sequence_table};
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::tuning::{Effort, LaunchConfig, Sample, Tuner};
use sterna_gpu::{Commands, Device, DeviceOptions, Features, GpuError, Recorder, Timing};
use sterna_kernels::attention as cpu;
use sterna_kernels::gemm::{BlockMatrix, Matrix, Rounding, Scratch, TernaryMatrix, linear};
use sterna_kernels::{Exec, Isa};

/// Bytes of a chain's weights together, so that no cache holds them.
const CHAIN_BYTES: usize = 256 << 20;

/// Rows of a result that the CPU computes too.
const CHECKED_ROWS: usize = 48;

fn main() -> Result<(), Box<dyn Error>> {
    let options = DeviceOptions {
        adapter: std::env::var("STERNA_GPU").ok(),
        ..DeviceOptions::default()
    };
    let device = Device::open(&options)?;
    println!("{:?}", device.info());
    println!("features {:?}", device.features().names());
    println!("{:?}", device.limits());
    // A software adapter shows that all of this works; its times mean nothing.
    let small = device.info().kind == sterna_gpu::AdapterKind::Software;
    let sections: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |name: &str| sections.is_empty() || sections.iter().any(|s| s == name);
    if wanted("overheads") {
        overheads(&device)?;
        bandwidth(&device, small)?;
    }
    if wanted("products") {
        products(&device, small)?;
    }
    if wanted("variants") {
        variants(&options, small)?;
    }
    if wanted("attention") {
        attention_alone(&device, small)?;
    }
    if wanted("states") {
        states_alone(&device, small)?;
    }
    if wanted("step") {
        for ctx in [128, 512, 2048] {
            decode_step(&device, small, ctx, false)?;
        }
    }
    if wanted("sweep") {
        decode_step(&device, small, 512, true)?;
    }
    Ok(())
}

/// Smaller sizes for a software adapter.
fn shrink(small: bool) -> usize {
    if small { 16 } else { 1 }
}

/// The products of two real models.
fn products(device: &Device, small: bool) -> Result<(), Box<dyn Error>> {
    let trits = WeightKind::Ternary;
    let blocks = WeightKind::Blocks;
    println!(
        "\n{:<34}{:>5}{:>11}{:>10}{:>10}  check",
        "product", "rows", "µs", "GB/s", "TOP/s"
    );
    for (name, kind, n, k) in [
        ("2B-4T qkv", trits, 3840, 2560),
        ("2B-4T o", trits, 2560, 2560),
        ("2B-4T gate+up", trits, 13_824, 2560),
        ("2B-4T down", trits, 2560, 6912),
        ("2B-4T head F16", blocks(DType::F16), 128_256, 2560),
        ("Llama-1B qkv Q4_K", blocks(DType::Q4_K), 3072, 2048),
        ("Llama-1B o Q4_K", blocks(DType::Q4_K), 2048, 2048),
        ("Llama-1B gate+up Q4_K", blocks(DType::Q4_K), 16_384, 2048),
        ("Llama-1B down Q6_K", blocks(DType::Q6_K), 2048, 8192),
        ("Llama-1B head Q6_K", blocks(DType::Q6_K), 128_256, 2048),
        ("Q8_0 2048x2048", blocks(DType::Q8_0), 2048, 2048),
        ("Q4_0 2048x2048", blocks(DType::Q4_0), 2048, 2048),
    ] {
        let product = Product::new(device, name, kind, n / shrink(small) / 2 * 2, k, small)?;
        for m in [1, 4, 16, 32, 64, 512] {
            let head = name.contains("head");
            if !((head || small) && m > 64) {
                product.measure(m)?;
            }
        }
    }
    Ok(())
}

/// One product without features that kernels have variants for.
fn variants(options: &DeviceOptions, small: bool) -> Result<(), Box<dyn Error>> {
    let without = |mask: fn(&mut Features)| {
        let mut features = Features::ALL;
        mask(&mut features);
        features
    };
    for (title, features) in [
        (
            "without cooperative matrices",
            without(|f| f.cooperative_matrix = false),
        ),
        ("without subgroups", without(|f| f.subgroups = false)),
        (
            "without cooperative matrices and dot4",
            without(|f| (f.cooperative_matrix, f.dot4) = (false, false)),
        ),
    ] {
        println!("\n{title}");
        let masked = Device::open(&DeviceOptions {
            features,
            ..options.clone()
        })?;
        let (n, k) = (13_824 / shrink(small), 2560);
        let product = Product::new(&masked, "2B-4T gate+up", WeightKind::Ternary, n, k, small)?;
        for m in [1, 512 / shrink(small)] {
            product.measure(m)?;
        }
    }
    Ok(())
}

/// The median time of `n` runs of `f`, in microseconds, after one that warms up.
fn median(n: usize, mut f: impl FnMut() -> Result<(), GpuError>) -> Result<f64, GpuError> {
    f()?;
    let mut times = Vec::with_capacity(n);
    for _ in 0..n {
        let start = Instant::now();
        f()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[n / 2])
}

fn run(device: &Device, commands: &[&Commands]) -> Result<(), GpuError> {
    device.submit(commands, &[])?.wait().map(|_| ())
}

/// Time of `commands` on the device, in microseconds: they are submitted again and again, so that the
/// host records the next while the device runs these.
fn device_time(device: &Device, commands: &Commands) -> Result<f64, GpuError> {
    const AT_ONCE: usize = 6;
    let all = median(5, || {
        let mut last = None;
        for _ in 0..AT_ONCE {
            last = Some(device.submit(&[commands], &[])?);
        }
        last.map_or(Ok(()), |last| last.wait().map(|_| ()))
    })?;
    Ok(all / AT_ONCE as f64)
}

fn overheads(device: &Device) -> Result<(), GpuError> {
    let (x, y) = (
        device.upload(&[0.0f32; 256])?,
        device.upload(&[1.0f32; 256])?,
    );
    let chain = |n: usize| -> Result<Commands, GpuError> {
        let mut recorder = Recorder::new(device);
        for _ in 0..n {
            elementwise::add(&mut recorder, Rows::new(&x, 1, 256), Rows::new(&y, 1, 256))?;
        }
        recorder.finish()
    };
    let (one, many) = (chain(1)?, chain(1000)?);
    let single = median(50, || run(device, &[&one]))?;
    let all = median(10, || run(device, &[&many]))?;
    println!("\nsubmit and wait                   {single:>8.1} µs");
    println!(
        "dependent dispatch, by the host   {:>8.2} µs",
        (all - single) / 999.0
    );
    if device.features().timestamps {
        // Times of dispatches include what a timestamp costs.
        let times = device.time(&[&many])?;
        let sum: f64 = times.iter().map(|t| t.us).sum();
        println!(
            "dependent dispatch, with timestamps {:>6.2} µs",
            sum / 1000.0
        );
    }
    let read = median(50, || device.read::<f32>(&x, 0..4).map(|_| ()))?;
    println!("read back 16 bytes                {read:>8.1} µs");
    Ok(())
}

fn bandwidth(device: &Device, small: bool) -> Result<(), GpuError> {
    let (n, k) = if small {
        (4096, 4096)
    } else {
        (65_536, 65_536)
    };
    let start = Instant::now();
    let (w, _) = weights(device, &mut ring(device)?, WeightKind::Ternary, n, k)?;
    device.read::<f32>(&device.upload(&[0.0f32])?, 0..1)?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = w.bytes() as f64;
    println!(
        "upload                            {:>8.2} GB/s",
        bytes / seconds / 1e9
    );
    let x = device.upload(&vec![1.0f32; k])?;
    let out = device.buffer("out", n as u64 * 4)?;
    let rounded = QuantizedRows::new(device, 1, k)?;
    let mut recorder = Recorder::new(device);
    quantize(
        &mut recorder,
        Rows::new(&x, 1, k),
        None,
        Scaling::Row,
        &rounded,
    )?;
    multiply(
        &mut recorder,
        &w,
        Input::Int8(&rounded),
        Epilogue::Store,
        Rows::new(&out, 1, n),
    )?;
    let commands = recorder.finish()?;
    let us = median(10, || run(device, &[&commands]))?;
    println!(
        "GEMV of {:>5.0} MB of trits         {:>8.1} GB/s",
        bytes / 1e6,
        bytes / us / 1e3
    );
    Ok(())
}

/// Room for uploads.
fn ring(device: &Device) -> Result<Upload, GpuError> {
    Upload::new(device, 16 << 20, 4)
}

/// Random-looking weights, a repeated megabyte of them, and the first rows' bytes.
fn weights(
    device: &Device,
    upload: &mut Upload,
    kind: WeightKind,
    n: usize,
    k: usize,
) -> Result<(Linear, Vec<u8>), GpuError> {
    let row_bytes = kind.row_bytes(k);
    let mut seed = 1u64;
    let mut next = || {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as u32
    };
    let period = (1 << 20) / row_bytes + 1;
    let mut pattern: Vec<u8> = (0..period * row_bytes)
        .map(|_| match kind {
            // Codes 0 to 2.
            WeightKind::Ternary => (0..4).fold(0, |byte, i| byte | (next() % 3) << (2 * i)) as u8,
            WeightKind::Blocks(_) => next() as u8,
        })
        .collect();
    if let WeightKind::Blocks(dtype) = kind {
        // Scales that are numbers: the f16 are about 2^-7.
        let (len, at): (usize, &[usize]) = match dtype {
            DType::Q4_K => (144, &[0, 2]),
            DType::Q6_K => (210, &[208]),
            DType::F16 => (2, &[0]),
            _ => (dtype.block_bytes(), &[0]),
        };
        for block in pattern.chunks_exact_mut(len) {
            for at in at {
                block[at + 1] = block[at + 1] & 0x80 | 0x20;
            }
        }
    }
    let scales = if kind == WeightKind::Ternary {
        vec![0.5; n]
    } else {
        Vec::new()
    };
    let mut rows = pattern.repeat(n.div_ceil(period));
    rows.truncate(n * row_bytes);
    let linear = Linear::upload(device, upload, kind, (n, k), &scales, &rows)?;
    rows.truncate(CHECKED_ROWS.min(n) * row_bytes);
    Ok((linear, rows))
}

/// A weight matrix several times over.
struct Product<'a> {
    device: &'a Device,
    name: &'a str,
    copies: Vec<Linear>,
    first_rows: Vec<u8>,
}

impl<'a> Product<'a> {
    fn new(
        device: &'a Device,
        name: &'a str,
        kind: WeightKind,
        n: usize,
        k: usize,
        small: bool,
    ) -> Result<Product<'a>, GpuError> {
        let mut upload = ring(device)?;
        let (first, first_rows) = weights(device, &mut upload, kind, n, k)?;
        let most = if small { 2 } else { 120 };
        let n_copies = (CHAIN_BYTES / (first.bytes() as usize).max(1)).clamp(1, most);
        let mut copies = vec![first];
        for _ in 1..n_copies {
            copies.push(weights(device, &mut upload, kind, n, k)?.0);
        }
        Ok(Product {
            device,
            name,
            copies,
            first_rows,
        })
    }

    /// Checks and times products of `m` rows of activations.
    fn measure(&self, m: usize) -> Result<(), GpuError> {
        let device = self.device;
        let w = &self.copies[0];
        let (n, k) = (w.n(), w.k());
        let x: Vec<f32> = (0..m * k)
            .map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.0 - 1.0)
            .collect();
        let x_buffer = device.upload(&x)?;
        let rows = Rows::new(&x_buffer, m, k);
        let out = device.buffer("out", (m * n) as u64 * 4)?;
        let to = Rows::new(&out, m, n);
        let rounded = QuantizedRows::new(device, m, k)?;
        let mut prepare = Recorder::new(device);
        let input = match w.kind().form() {
            Form::Int8(scaling) => {
                quantize(&mut prepare, rows, None, scaling, &rounded)?;
                Input::Int8(&rounded)
            }
            Form::Float => Input::Half {
                x: rows,
                scratch: &rounded,
            },
        };
        let prepare = prepare.finish()?;
        let chain = |times: usize| -> Result<Commands, GpuError> {
            let mut recorder = Recorder::new(device);
            for i in 0..times {
                let w = &self.copies[i % self.copies.len()];
                multiply(&mut recorder, w, input, Epilogue::Store, to)?;
            }
            recorder.finish()
        };
        let once = chain(1)?;
        run(device, &[&prepare, &once])?;
        let got: Vec<f32> = device.read(&out, 0..m * n)?;
        let check = self.check(&got, &x, m);
        let times = if self.copies.len() == 1 {
            4
        } else {
            self.copies.len().max(20)
        };
        let us = device_time(device, &chain(times)?)? / times as f64;
        let bytes = w.bytes() as f64;
        let ops = 2.0 * (m * n * k) as f64;
        println!(
            "{:<34}{m:>5}{us:>11.2}{:>10.0}{:>10.2}  {check}",
            self.name,
            bytes / us / 1e3,
            ops / us / 1e6
        );
        if m == 1 && matches!(w.kind().form(), Form::Int8(_)) {
            let norm = device.upload(&vec![1.0f32; k])?;
            let rounding = Input::Round {
                x: rows,
                norm: Some((&norm, 1e-5)),
                scratch: &rounded,
            };
            let mut recorder = Recorder::new(device);
            for i in 0..times {
                let w = &self.copies[i % self.copies.len()];
                multiply(&mut recorder, w, rounding, Epilogue::Store, to)?;
            }
            let us = device_time(device, &recorder.finish()?)? / times as f64;
            let name = "  with norm and rounding";
            println!("{name:<34}{m:>5}{us:>11.2}{:>10.0}", bytes / us / 1e3);
        }
        Ok(())
    }

    /// The first rows against the CPU.
    fn check(&self, got: &[f32], x: &[f32], m: usize) -> String {
        let w = &self.copies[0];
        let (n, k) = (w.n(), w.k());
        let rows = CHECKED_ROWS.min(n);
        let matrix = match w.kind() {
            WeightKind::Ternary => TernaryMatrix::new(rows, k, 0.5, &self.first_rows)
                .map(Matrix::Ternary)
                .map_err(|error| error.to_string()),
            WeightKind::Blocks(dtype) => {
                BlockMatrix::new(dtype, rows, k, Rounding::Blocks, &self.first_rows)
                    .map(Matrix::Blocks)
                    .map_err(|error| error.to_string())
            }
        };
        let exec = Exec::new(1, Isa::detect());
        let mut want = vec![0.0; m * rows];
        let computed = matrix.and_then(|matrix| {
            let outputs = &mut [(matrix, &mut want[..])];
            linear(&exec, x, k, &mut Scratch::default(), outputs).map_err(|error| error.to_string())
        });
        if let Err(error) = computed {
            return format!("CPU: {error}");
        }
        let (mut error, mut power, mut same) = (0.0, 0.0, true);
        for (t, want) in want.chunks(rows).enumerate() {
            for (got, want) in got[t * n..].iter().zip(want) {
                same &= got.to_bits() == want.to_bits();
                error += (f64::from(*got) - f64::from(*want)).powi(2);
                power += f64::from(*want).powi(2);
            }
        }
        match (same, error / power < 5e-7) {
            (true, _) => "same bits".into(),
            (false, true) => format!("error {:.0e}", error / power),
            (false, false) => format!("WRONG {:.1e}", error / power),
        }
    }
}

/// Attention of a layer of the 2B-4T shape, f16 cache: one new row at each context, then prompts.
fn attention_alone(device: &Device, small: bool) -> Result<(), Box<dyn Error>> {
    println!(
        "\n{:<34}{:>5}{:>11}{:>10}{:>10}  check",
        "attention", "rows", "µs", "GB/s", "TFLOP/s"
    );
    let (contexts, prompts): (&[usize], &[usize]) = if small {
        (&[128, 512], &[64])
    } else {
        (&[128, 512, 2048, 8192], &[512, 2048])
    };
    for (m, len) in (contexts.iter().map(|len| (1, *len))).chain(prompts.iter().map(|m| (*m, *m))) {
        let layer = Layer::new(device, len)?;
        let check = layer.check(m)?;
        let (one, many) = (layer.commands(m, 1)?, layer.commands(m, 21)?);
        let alone = median(15, || run(device, &[&one]))?;
        let us = (median(9, || run(device, &[&many]))? - alone) / 20.0;
        // Keys and values once; products with both, of the visible positions.
        let bytes = (2 * Layer::N_KV_HEADS * Layer::D * 2 * len) as f64;
        let seen = (m * (2 * len - m + 1) / 2) as f64;
        let flops = 4.0 * (Layer::N_HEADS * Layer::D) as f64 * seen;
        println!(
            "{:<34}{m:>5}{us:>11.2}{:>10.0}{:>10.2}  {check}",
            format!("context {len}"),
            bytes / us / 1e3,
            flops / us / 1e6
        );
        if device.features().timestamps {
            for timing in device.time(&[&one])? {
                println!("    {:<30}{:>16.2}", timing.name, timing.us);
            }
        }
    }
    Ok(())
}

/// Kernels of layers with states, in shapes of real models: prompts, and single positions, of one sequence and of several.
fn states_alone(device: &Device, small: bool) -> Result<(), Box<dyn Error>> {
    println!(
        "\n{:<34}{:>10}{:>6}{:>11}{:>13}",
        "layers with states", "sequences", "rows", "µs", "µs a row"
    );
    let heads = |n_heads, n_key_heads, value_dim, is_delta| ScanShape {
        n_heads: n_heads / shrink(small),
        n_key_heads,
        key_dim: 128,
        value_dim,
        is_tiled: false,
        is_delta,
    };
    let mamba2 = heads(64, 1, 64, false);
    let qwen = heads(16, if small { 1 } else { 16 }, 128, true);
    let prompt = 512 / shrink(small);
    for (n, m) in [(1, prompt), (8, prompt), (1, 1), (8, 1), (32, 1)] {
        let batch = Batch::new(device, (n, m), (540 << 10) / shrink(small))?;
        for (model, shape) in [("Mamba2-1.3B", &mamba2), ("Qwen3.5-2B", &qwen)] {
            if m == 1 {
                batch.time(&format!("{model} step"), |batch, r| batch.step(r, shape))?;
            } else {
                batch.time(&format!("{model} convolution"), |batch, r| {
                    batch.convolve(r, shape.channels())
                })?;
                batch.time(&format!("{model} scan"), |batch, r| batch.scan(r, shape))?;
            }
        }
        let (inner, n_heads) = (5120 / shrink(small), 32 / shrink(small));
        batch.time("Mamba-2.8B scan", |batch, r| batch.mamba(r, inner))?;
        batch.time("RWKV7-1.5B heads", |batch, r| batch.wkv(r, n_heads, 64))?;
    }
    Ok(())
}

/// Sequences with as many rows each, behind a position, and memory for what kernels of layers with states read and write.
struct Batch<'a> {
    device: &'a Device,
    n: usize,
    m: usize,
    n_state: usize,
    table: Buffer,
    given: Buffer,
    out: Buffer,
}

impl<'a> Batch<'a> {
    /// Of a row at most.
    const WIDTH: usize = 8192;

    /// With states of `n_state` values.
    fn new(
        device: &'a Device,
        (n, m): (usize, usize),
        n_state: usize,
    ) -> Result<Batch<'a>, GpuError> {
        let rows: Vec<SequenceRows<'_>> = (0..n)
            .map(|i| SequenceRows {
                position: 7,
                first_row: i * m,
                n_rows: m,
                first_angle: 0,
                pages: &[],
                place: i as u32,
            })
            .collect();
        // Weights of a layer, too.
        let len = (n * m * Self::WIDTH).max(1 << 18);
        let given: Vec<f32> = (0..len)
            .map(|i| ((i % 1013) as f32 - 506.0) / 4096.0)
            .collect();
        Ok(Batch {
            device,
            n,
            m,
            n_state,
            table: device.upload(&sequence_table(&rows, 0))?,
            given: device.upload(&given)?,
            out: device.buffer("out", len as u64 * 4)?,
        })
    }

    /// Times what `record` adds, with states of its own.
    fn time(
        &self,
        name: &str,
        record: impl Fn(&Batch<'_>, (&mut Recorder, &StateLayer)) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        const CHAIN: usize = 20;
        let layer = StateLayer::new(self.device, self.n_state, self.n)?;
        let commands = |n| {
            let mut recorder = Recorder::new(self.device);
            (0..n).try_for_each(|_| record(self, (&mut recorder, &layer)))?;
            recorder.finish()
        };
        let (one, many) = (commands(1)?, commands(CHAIN + 1)?);
        let us =
            (device_time(self.device, &many)? - device_time(self.device, &one)?) / CHAIN as f64;
        println!(
            "{name:<34}{:>10}{:>6}{us:>11.2}{:>13.3}",
            self.n,
            self.m,
            us / (self.n * self.m) as f64
        );
        Ok(())
    }

    fn rows(&self, width: usize) -> Rows<'_> {
        Rows::new(&self.given, self.n * self.m, width)
    }

    fn out(&self, width: usize) -> Rows<'_> {
        Rows::new(&self.out, self.n * self.m, width)
    }

    fn state<'b>(&'b self, layer: &'b StateLayer, first: usize) -> State<'b> {
        State {
            layer,
            first,
            sequences: Sequences {
                table: &self.table,
                n_all: self.n,
                page_stride: 0,
                first: 0,
                n: self.n,
                n_rows: self.m,
            },
        }
    }

    fn convolve(
        &self,
        (recorder, layer): (&mut Recorder, &StateLayer),
        dim: usize,
    ) -> Result<(), GpuError> {
        let convolution = Convolution {
            taps: &self.given,
            n_taps: 4,
            bias: None,
            is_gated: false,
        };
        let (x, out) = (self.rows(dim), self.out(dim));
        convolve(recorder, &convolution, x, self.state(layer, 0), out)
    }

    fn scan(
        &self,
        (recorder, layer): (&mut Recorder, &StateLayer),
        shape: &ScanShape,
    ) -> Result<(), GpuError> {
        let inputs = Scan {
            x: self.rows(shape.channels()),
            gates: &self.given,
            d: (!shape.is_delta).then_some(&self.given),
        };
        let out = self.out(shape.n_heads * shape.value_dim);
        scan(recorder, shape, &inputs, self.state(layer, 0), out)
    }

    fn step(
        &self,
        (recorder, layer): (&mut Recorder, &StateLayer),
        shape: &ScanShape,
    ) -> Result<(), GpuError> {
        let vectors = StepVectors {
            taps: &self.given,
            n_taps: 4,
            bias: None,
            a: &self.given,
            dt_bias: &self.given,
            last: &self.given,
        };
        let weights = StepWeights::new(self.device, shape, &vectors)?;
        let values = shape.n_heads * shape.value_dim;
        let inputs = Step {
            x: self.rows(shape.channels()),
            gate: self.rows(values),
            steps: self.rows(shape.n_heads),
            beta: shape.is_delta.then(|| self.rows(shape.n_heads)),
            eps: 1e-6,
        };
        let (state, out) = (self.state(layer, 0), self.out(values));
        step(recorder, &weights, &inputs, state, out)
    }

    fn mamba(
        &self,
        (recorder, layer): (&mut Recorder, &StateLayer),
        inner: usize,
    ) -> Result<(), GpuError> {
        let inputs = Mamba {
            dt: self.rows(inner),
            b: self.rows(16),
            c: self.rows(16),
            a: &self.given,
            d: &self.given,
        };
        mamba(recorder, &inputs, self.state(layer, 0), self.out(inner))
    }

    fn wkv(
        &self,
        (recorder, layer): (&mut Recorder, &StateLayer),
        n_heads: usize,
        head_dim: usize,
    ) -> Result<(), GpuError> {
        let shape = WkvShape {
            n_heads,
            head_dim,
            is_seventh: true,
        };
        let inner = shape.inner();
        let inputs = Wkv {
            r: self.rows(inner),
            prepared: self.rows(4 * inner),
            v: self.rows(inner),
        };
        wkv(
            recorder,
            &shape,
            &inputs,
            self.state(layer, 0),
            self.out(inner),
        )
    }
}

/// The table of one sequence of `m` rows from `position` on, whose pages hold `len` positions and are the first of a
/// cache, in order.
fn table_of_one(position: usize, m: usize, len: usize) -> Vec<u32> {
    let pages: Vec<u32> = (0..len.div_ceil(PAGE_LEN) as u32).collect();
    let sequence = SequenceRows {
        position,
        first_row: 0,
        n_rows: m,
        first_angle: position,
        pages: &pages,
        place: 0,
    };
    sequence_table(&[sequence], pages.len())
}

/// The sequence of such a table.
fn one(table: &Buffer, m: usize, len: usize) -> Sequences<'_> {
    Sequences {
        table,
        n_all: 1,
        page_stride: len.div_ceil(PAGE_LEN),
        first: 0,
        n: 1,
        n_rows: m,
    }
}

/// Room for one row in contexts of up to `most_len`.
fn states(
    device: &Device,
    n_heads: usize,
    head_dim: usize,
    most_len: usize,
) -> Result<SplitKvStates, GpuError> {
    SplitKvStates::new(
        device,
        SplitKvStates::len((1, 1), (n_heads, head_dim), most_len),
    )
}

/// Attention of a layer whose cache is full of earlier results.
struct Layer<'a> {
    device: &'a Device,
    len: usize,
    /// Rows of queries, keys and values, as projections would have computed them.
    rows: Vec<f32>,
    qkv: Buffer,
    cache: CacheLayer,
    angles: Buffer,
    states: SplitKvStates,
    table: Buffer,
    out: Buffer,
}

impl<'a> Layer<'a> {
    const N_HEADS: usize = 20;
    const N_KV_HEADS: usize = 5;
    const D: usize = 128;
    const WIDTH: usize = (Self::N_HEADS + 2 * Self::N_KV_HEADS) * Self::D;
    const SHAPE: AttentionShape = AttentionShape {
        n_heads: Self::N_HEADS,
        n_kv_heads: Self::N_KV_HEADS,
        head_dim: Self::D,
        scale: 0.2,
        softcap: None,
        window: None,
    };

    fn new(device: &'a Device, len: usize) -> Result<Layer<'a>, GpuError> {
        let rows: Vec<f32> = (0..len * Self::WIDTH)
            .map(|i| (i as u32).wrapping_mul(2_654_435_761) as f32 / 2f32.powi(31) - 1.0)
            .collect();
        let layer = Layer {
            device,
            len,
            qkv: device.upload(&rows)?,
            rows,
            cache: CacheLayer::new(
                device,
                Self::N_KV_HEADS,
                Self::D,
                CacheType::F16,
                CachedValues::Own,
                len.div_ceil(PAGE_LEN),
            )?,
            angles: device.upload(&vec![[1.0f32, 0.0]; len * Self::D / 2])?,
            states: states(device, Self::N_HEADS, Self::D, len)?,
            table: device.upload(&table_of_one(0, len, len))?,
            out: device.buffer("out", (len * Self::N_HEADS * Self::D * 4) as u64)?,
        };
        let mut recorder = Recorder::new(device);
        prepare_heads(
            &mut recorder,
            &layer.heads(0, len),
            Self::N_HEADS,
            &layer.cache,
        )?;
        run(device, &[&recorder.finish()?])?;
        Ok(layer)
    }

    /// `m` rows from position `first` on.
    fn heads(&self, first: usize, m: usize) -> Heads<'_> {
        Heads {
            qkv: Rows::new(&self.qkv, self.len, Self::WIDTH).rows(first, m),
            has_keys: true,
            norms: HeadNorms::default(),
            angles: Angles {
                table: &self.angles,
                pairs: Self::D / 2,
                layout: RopeLayout::Halves,
            },
            sequences: one(&self.table, m, self.len),
        }
    }

    /// Attention of the last `m` rows, several times.
    fn commands(&self, m: usize, times: usize) -> Result<Commands, GpuError> {
        let first = self.len - m;
        let words = table_of_one(first, m, self.len);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.device.write(&self.table, 0, &bytes)?;
        let heads = self.heads(first, m);
        let width = Self::N_HEADS * Self::D;
        let out = Rows::new(&self.out, m, width);
        let mut r = Recorder::new(self.device);
        for _ in 0..times {
            if m == 1 {
                let split_kv = SplitKv {
                    states: &self.states,
                    most_len: self.len,
                };
                decode(&mut r, &Self::SHAPE, &heads, &self.cache, split_kv, out)?;
            } else {
                let q = heads.qkv.columns(0, width);
                let (sequences, split) = (heads.sequences, Split::Queries);
                attention(&mut r, &Self::SHAPE, q, sequences, &self.cache, split, out)?;
            }
        }
        r.finish()
    }

    /// The last rows against the CPU.
    fn check(&self, m: usize) -> Result<String, Box<dyn Error>> {
        run(self.device, &[&self.commands(m, 1)?])?;
        let width = Self::N_HEADS * Self::D;
        let checked = m.min(CHECKED_ROWS);
        let range = (m - checked) * width..m * width;
        let got: Vec<f32> = self.device.read(&self.out, range)?;
        let exec = Exec::new(1, Isa::detect());
        let mut pages = Vec::new();
        for (pos, row) in self.rows.chunks(Self::WIDTH).enumerate() {
            if pos % cpu::PAGE_LEN == 0 {
                let page =
                    cpu::KvPage::new(CacheType::F16, CachedValues::Own, Self::N_KV_HEADS, Self::D);
                pages.push(page);
            }
            let (k, v) = row[width..].split_at(Self::N_KV_HEADS * Self::D);
            pages[pos / cpu::PAGE_LEN].store(&exec, pos % cpu::PAGE_LEN, k, v)?;
        }
        let first = self.len - checked;
        let rows = self.rows.chunks(Self::WIDTH).skip(first);
        let q: Vec<f32> = rows.flat_map(|row| row[..width].to_vec()).collect();
        let mut want = vec![0.0; checked * width];
        let scratch = &mut cpu::Scratch::default();
        let queries = cpu::Queries {
            shape: &Self::SHAPE,
            q: &q,
            pos: first,
            sinks: None,
            is_causal: true,
        };
        cpu::attention(&exec, &queries, &pages, scratch, &mut want)?;
        let (mut error, mut power) = (0.0, 0.0);
        for (got, want) in got.iter().zip(&want) {
            error += (f64::from(*got) - f64::from(*want)).powi(2);
            power += f64::from(*want).powi(2);
        }
        let verdict = if error / power < 1e-6 {
            "error"
        } else {
            "WRONG"
        };
        Ok(format!("{verdict} {:.0e}", error / power))
    }
}

/// A token of a model of the 2B-4T shape: everything from embedding to sampling, in one pass.
fn decode_step(device: &Device, small: bool, ctx: usize, sweep: bool) -> Result<(), GpuError> {
    let (n_layers, n_vocab) = if small { (2, 4096) } else { (30, 128_256) };
    let (dim, ffn, n_heads, n_kv_heads, d) = (2560, 6912, 20, 5, 128);
    let width = (n_heads + 2 * n_kv_heads) * d;
    let mut upload = ring(device)?;
    let f16 = WeightKind::Blocks(DType::F16);
    let (table, _) = weights(device, &mut upload, f16, n_vocab, dim)?;
    let mut matrix = |n, k| weights(device, &mut upload, WeightKind::Ternary, n, k).map(|(w, _)| w);
    let room = |len: usize| device.buffer("activations", len as u64 * 4);
    let (x, h, qkv) = (room(dim)?, room(dim)?, room(width)?);
    let (a, gate, logits) = (room(n_heads * d)?, room(ffn)?, room(n_vocab)?);
    let ones = device.upload(&vec![1.0f32; ffn])?;
    let angles = device.upload(&vec![[1.0f32, 0.0]; (ctx + 64) * d / 2])?;
    // Its first elements are position and token.
    let state = device.upload(&table_of_one(ctx - 1, 1, ctx + 64))?;
    device.write(&state, 4, &1u32.to_ne_bytes())?;
    let tokens = device.buffer("tokens", (ctx as u64 + 64) * 4)?;
    let states = states(device, n_heads, d, ctx + 64)?;
    let scratch = QuantizedRows::new(device, 1, ffn)?;
    let best = TopK::new(device, n_vocab, 40, 1)?;
    let mut bytes = table.bytes();
    let mut layers = Vec::new();
    for _ in 0..n_layers {
        let w = [
            matrix(width, dim)?,
            matrix(dim, dim)?,
            matrix(2 * ffn, dim)?,
            matrix(dim, ffn)?,
        ];
        bytes += w.iter().map(Linear::bytes).sum::<u64>();
        let n_pages = (ctx + 64).div_ceil(PAGE_LEN);
        let cache = CacheLayer::new(
            device,
            n_kv_heads,
            d,
            CacheType::F16,
            CachedValues::Own,
            n_pages,
        )?;
        bytes += cache.bytes();
        layers.push((w, cache));
    }
    if sweep {
        let samples = layers.iter().flat_map(|(w, _)| {
            let epilogues = [
                Epilogue::Store,
                Epilogue::Add,
                Epilogue::Gate(Activation::Relu2),
                Epilogue::Add,
            ];
            w.iter().zip(epilogues).map(|(w, epilogue)| Sample {
                weights: w.clone(),
                n_rows: 1,
                is_normed: true,
                epilogue,
                is_alone: true,
            })
        });
        return sweep_step(device, samples.collect());
    }
    let ids = Ids {
        buffer: state.clone(),
        offset: 1,
        stride: 1,
    };
    let record = || -> Result<Commands, GpuError> {
        let mut r = Recorder::new(device);
        embed(&mut r, &table, &ids, 1.0, Rows::new(&x, 1, dim))?;
        let round = |x: Rows<'_>,
                     r: &mut Recorder,
                     w: &[Linear; 4],
                     i: usize,
                     e: Epilogue,
                     out: Rows<'_>| {
            multiply(
                r,
                &w[i],
                Input::Round {
                    x,
                    norm: Some((&ones, 1e-5)),
                    scratch: &scratch,
                },
                e,
                out,
            )
        };
        for (w, cache) in &layers {
            let qkv_rows = Rows::new(&qkv, 1, width);
            round(
                Rows::new(&x, 1, dim),
                &mut r,
                w,
                0,
                Epilogue::Store,
                qkv_rows,
            )?;
            let angles = Angles {
                table: &angles,
                pairs: d / 2,
                layout: RopeLayout::Halves,
            };
            let raw = Heads {
                qkv: qkv_rows,
                has_keys: true,
                norms: HeadNorms::default(),
                angles,
                sequences: one(&state, 1, ctx + 64),
            };
            let shape = AttentionShape {
                n_heads,
                n_kv_heads,
                head_dim: d,
                scale: 0.09,
                softcap: None,
                window: None,
            };
            let split_kv = SplitKv {
                states: &states,
                most_len: ctx + 64,
            };
            let heads = Rows::new(&a, 1, n_heads * d);
            decode(&mut r, &shape, &raw, cache, split_kv, heads)?;
            round(heads, &mut r, w, 1, Epilogue::Add, Rows::new(&x, 1, dim))?;
            let gated = Rows::new(&gate, 1, ffn);
            round(
                Rows::new(&x, 1, dim),
                &mut r,
                w,
                2,
                Epilogue::Gate(Activation::Relu2),
                gated,
            )?;
            round(gated, &mut r, w, 3, Epilogue::Add, Rows::new(&x, 1, dim))?;
        }
        rms_norm(
            &mut r,
            Rows::new(&x, 1, dim),
            &ones,
            1e-5,
            Rows::new(&h, 1, dim),
        )?;
        let to = Rows::new(&logits, 1, n_vocab);
        multiply(
            &mut r,
            &table,
            Input::Float(Rows::new(&h, 1, dim)),
            Epilogue::Store,
            to,
        )?;
        let samplers = Samplers {
            first: 0,
            logits: to,
            states: &state,
            n: 1,
        };
        top_k(&mut r, samplers, &best)?;
        let draw = Draw {
            temperature: 0.8,
            top_p: 0.95,
            min_p: 0.0,
        };
        sample(&mut r, samplers, &best, &draw, Some(&tokens))?;
        r.finish()
    };
    let back = || device.write(&state, 0, bytemuck::bytes_of(&[ctx as u32 - 1, 1]));
    // Tokens in flight while the host records the next ones, as in decoding.
    let at_once = if small { 2 } else { 32 };
    let time = |commands: &Commands| -> Result<f64, GpuError> {
        let all = median(7, || {
            back()?;
            let mut last = None;
            for _ in 0..at_once {
                last = Some(device.submit(&[commands], &[])?);
            }
            last.map_or(Ok(()), |last| last.wait().map(|_| ()))
        })?;
        Ok(all / at_once as f64)
    };
    let commands = record()?;
    let us = time(&commands)?;
    println!(
        "\ndecode step, 2B-4T shape, context {ctx}: {} dispatches, {us:.0} µs, {:.0} tokens/s, {:.0} GB/s",
        commands.len(),
        1e6 / us,
        bytes as f64 / us / 1e3
    );
    if device.features().timestamps {
        back()?;
        let mut times = device.time(&[&commands])?;
        times.sort_by_key(|t| t.name);
        let total: f64 = times.iter().map(|t| t.us).sum();
        for of_kernel in times.chunk_by(|a: &Timing, b| a.name == b.name) {
            let sum: f64 = of_kernel.iter().map(|t| t.us).sum();
            println!(
                "  {:<26}{:>4} times {:>8.2} µs each {:>8.0} µs {:>4.0} %",
                of_kernel[0].name,
                of_kernel.len(),
                sum / of_kernel.len() as f64,
                sum,
                100.0 * sum / total
            );
        }
    }
    Ok(())
}

/// Every configuration of the step's four products, measured as `sterna tune` does.
fn sweep_step(device: &Device, samples: Vec<Sample>) -> Result<(), GpuError> {
    let shown = |config: LaunchConfig| {
        let own = config.rounds_itself == Some(true);
        format!(
            "{}x{}{}",
            config.lanes.unwrap_or(0),
            config.workgroup.unwrap_or(0),
            if own { ", fused quantization" } else { "" }
        )
    };
    let tuner = Tuner::new(device, samples)?;
    let effort = Effort {
        rounds: 15,
        limit: Duration::from_secs(20),
    };
    for product in tuner.products() {
        let [n, k] = [product.n, product.k];
        match tuner.measure(product, effort)? {
            None => println!("step, {n}x{k}: no time"),
            Some(found) => println!(
                "step, {n}x{k}: default {} {:.1} µs a step, best of {} {} {:.1} µs{}",
                shown(found.rule),
                found.rule_us,
                found.n_configs,
                shown(found.best),
                found.best_us,
                match found.wrong.len() {
                    0 => String::new(),
                    n => format!(", {n} WRONG"),
                }
            ),
        }
    }
    Ok(())
}
