//! Generates on a GPU for as long as asked, and watches memory: what is used after a while must not grow.
//!
//! `gpu-soak MINUTES MODEL.gguf…` takes the models in turn, each on the same device: prompts and answers of
//! all lengths, sequences that fork, go back and run together, and now and then a model that is loaded anew.
//! Every ten seconds it prints device memory and, where the system tells, memory of the process. It fails if
//! either is more in the last quarter of the time than in the second, beyond a margin.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sterna_engine::{
    CacheType, Gpu, Loader, Logits, Model, ModelPlan, PlanOptions, Sampler, SamplerConfig, Session,
    SessionOptions, Step,
};
use sterna_format::gguf::{self, Gguf};
use sterna_gpu::{Device, DeviceOptions};
use sterna_kernels::Isa;

type Failure = Box<dyn Error>;

/// How far the largest device memory of two spans of time may be apart. Sequences are drawn at random, so
/// their longest differ; a leak of one buffer a sequence is a multiple of this within minutes.
const DEVICE_MARGIN: f64 = 0.05;
/// The same for memory of the process, which its allocator gives back as it likes.
const PROCESS_MARGIN: f64 = 0.10;
/// Bytes that memory of the process may grow by in any case: one more arena of the allocator.
const PROCESS_SLACK: u64 = 24 << 20;

/// Tokens that a sequence has at most.
const CTX_LEN: usize = 640;
/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);
/// Rounds on a model before it is dropped, and the next is loaded.
const ROUNDS: usize = 6;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args
        .split_first()
        .map(|(minutes, models)| (minutes.parse::<f64>(), models))
    {
        Some((Ok(minutes), models)) if minutes > 0.0 && !models.is_empty() => {
            let models: Vec<PathBuf> = models.iter().map(PathBuf::from).collect();
            match soak(minutes, &models) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("error: {error}");
                    ExitCode::FAILURE
                }
            }
        }
        _ => {
            eprintln!("usage: gpu-soak MINUTES MODEL.gguf…");
            ExitCode::from(2)
        }
    }
}

fn soak(minutes: f64, models: &[PathBuf]) -> Result<(), Failure> {
    let device = Device::open(&DeviceOptions {
        timeout: Duration::from_secs(600),
        ..DeviceOptions::default()
    })?;
    println!(
        "{}: {} models for {minutes} minutes",
        device.info().name,
        models.len()
    );
    let mut watch = Watch::new(&device, Duration::from_secs_f64(minutes * 60.0));
    let mut random = Random(0x5eed_0f50_a4b1_e5e5);
    for path in models.iter().cycle() {
        let gpu = Gpu::new(device.clone(), 2, Isa::detect());
        let model = load(path, gpu)?;
        for _ in 0..ROUNDS {
            round(&model, &mut random, &mut watch)?;
            if watch.is_over() {
                drop(model);
                return watch.verdict();
            }
        }
        watch.n_models += 1;
    }
    Err("expected a model".into())
}

fn load(path: &Path, gpu: Gpu) -> Result<Arc<Model<Gpu>>, Failure> {
    let file = Bytes::from(std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?);
    let header = Gguf::parse(&file, file.len() as u64)?;
    let parts = gguf::Model::from_parts(vec![header])?;
    let plan = ModelPlan::from_gguf(parts.metadata(), parts.tensors(), &PlanOptions::default())?;
    let mut loader = Loader::new(plan, gpu);
    while let Some(want) = loader.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        loader.feed(file.slice(range))?;
    }
    Ok(loader.finish()?)
}

/// A sequence of any length, forks of it, and some that run together.
fn round(model: &Arc<Model<Gpu>>, random: &mut Random, watch: &mut Watch) -> Result<(), Failure> {
    let n_vocab = model.config().n_vocab;
    let options = SessionOptions {
        cache: [CacheType::F32, CacheType::F16, CacheType::Q8_0][random.below(3)],
        chunk: 1 + random.below(256),
        ..SessionOptions::new(CTX_LEN)
    };
    let mut ids = |n: usize| -> Vec<u32> { (0..n).map(|_| random.below(n_vocab) as u32).collect() };
    let prompt = ids(300);
    let other = ids(40);
    let mut first = Session::new(Arc::clone(model), options)?;
    let n_prompt = 1 + random.below(prompt.len() - 1);
    generate(
        &mut first,
        &prompt[..n_prompt],
        random.below(120),
        random,
        watch,
    )?;

    let mut fork = first.fork(random.below(first.len()));
    generate(&mut fork, &other, random.below(30), random, watch)?;
    first.truncate(random.below(first.len()));
    generate(&mut first, &other[..3], random.below(30), random, watch)?;

    let mut third = Session::new(Arc::clone(model), options)?;
    third.forward(&prompt[..1 + random.below(20)], Logits::None)?;
    for _ in 0..random.below(12) {
        let mut steps: Vec<Step<'_, Gpu>> = [&mut first, &mut fork, &mut third]
            .into_iter()
            .map(|session| Step {
                session,
                ids: &other[..1],
                logits: Logits::Last,
            })
            .collect();
        watch.n_tokens += steps.len() as u64;
        finite(&Session::forward_together(&mut steps)?.concat())?;
        watch.look();
    }
    Ok(())
}

/// Appends `ids` and `n` tokens after them.
fn generate(
    session: &mut Session<Gpu>,
    ids: &[u32],
    n: usize,
    random: &mut Random,
    watch: &mut Watch,
) -> Result<(), Failure> {
    let config = SamplerConfig {
        temperature: 0.9,
        seed: random.next(),
        ..SamplerConfig::default()
    };
    let mut sampler = Sampler::new(config, session.model().config().n_vocab)?;
    let mut logits = session.forward(ids, Logits::Last)?;
    watch.n_tokens += ids.len() as u64;
    for _ in 0..n.min(CTX_LEN - session.len()) {
        finite(&logits)?;
        let id = sampler.sample(&logits);
        logits = session.forward(&[id], Logits::Last)?;
        watch.n_tokens += 1;
        watch.look();
    }
    finite(&logits)
}

fn finite(logits: &[f32]) -> Result<(), Failure> {
    match logits.iter().all(|logit| logit.is_finite()) {
        true => Ok(()),
        false => Err("expected finite logits, found others".into()),
    }
}

/// Memory at a time.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    at: Duration,
    device: u64,
    /// 0 where the system doesn't tell.
    process: u64,
}

/// Looks at memory every now and then.
struct Watch {
    device: Device,
    start: Instant,
    length: Duration,
    /// The most that was seen since the last line.
    most: Sample,
    samples: Vec<Sample>,
    n_tokens: u64,
    n_models: u64,
}

impl Watch {
    fn new(device: &Device, length: Duration) -> Watch {
        Watch {
            device: device.clone(),
            start: Instant::now(),
            length,
            most: Sample::default(),
            samples: Vec::new(),
            n_tokens: 0,
            n_models: 0,
        }
    }

    fn is_over(&self) -> bool {
        self.start.elapsed() >= self.length
    }

    fn look(&mut self) {
        let at = self.start.elapsed();
        self.most.at = at;
        self.most.device = self.most.device.max(self.device.memory().used);
        let before = self
            .samples
            .last()
            .map_or(Duration::ZERO, |sample| sample.at);
        if at - before < INTERVAL.min(self.length / 40) {
            return;
        }
        self.most.process = process_bytes();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "{:6.0} s: {} tokens, {} models; device memory {:.1} MiB (at most {:.1}), process {:.1} MiB",
            at.as_secs_f64(),
            self.n_tokens,
            self.n_models + 1,
            mib(self.most.device),
            mib(self.device.memory().peak),
            mib(self.most.process),
        );
        self.samples.push(std::mem::take(&mut self.most));
    }

    /// The last quarter against the second: the first is for warming up.
    fn verdict(&self) -> Result<(), Failure> {
        let most = |from: f64, to: f64, of: fn(&Sample) -> u64| {
            let within = |sample: &&Sample| {
                let share = sample.at.as_secs_f64() / self.length.as_secs_f64();
                (from..to).contains(&share)
            };
            self.samples
                .iter()
                .filter(within)
                .map(of)
                .max()
                .unwrap_or(0)
        };
        let device = |from, to| most(from, to, |sample| sample.device);
        let process = |from, to| most(from, to, |sample| sample.process);
        let (early, late) = (device(0.25, 0.5), device(0.75, f64::INFINITY));
        let limit = (early as f64 * (1.0 + DEVICE_MARGIN)) as u64;
        if late > limit {
            return Err(
                format!("device memory: expected at most {limit} bytes, found {late}").into(),
            );
        }
        let (early, late) = (process(0.25, 0.5), process(0.75, f64::INFINITY));
        let limit = (early as f64 * (1.0 + PROCESS_MARGIN)) as u64 + PROCESS_SLACK;
        if late > limit {
            return Err(
                format!("process memory: expected at most {limit} bytes, found {late}").into(),
            );
        }
        println!(
            "flat: {} tokens in {:.0} s",
            self.n_tokens,
            self.start.elapsed().as_secs_f64()
        );
        Ok(())
    }
}

/// Resident memory of this process; 0 where the system doesn't tell.
fn process_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Numbers that look random and are the same every time (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `n`; 0 if that is 0.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}
