//! Generates on a GPU for as long as asked, and watches memory: what is used after a while must not grow.
//!
//! `gpu-soak MINUTES MODEL.gguf…` goes through the models lap by lap, on one device: each is loaded, works
//! on prompts and answers of all lengths, on sequences that fork, go back and run together, and is dropped.
//! Every lap does the same, so that the later ones must take what the second took. Every ten seconds a
//! line tells device memory and, where the system tells, memory of the process.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sterna_engine::plan::PlanOptions;
use sterna_engine::{
    CacheType, Decoded, Gpu, Loader, Logits, Model, ModelPlan, Sampler, SamplerConfig, Session,
    SessionOptions, Step,
};
use sterna_format::gguf::{self, Gguf};
use sterna_gpu::{Device, DeviceOptions};
use sterna_kernels::Isa;

type Failure = Box<dyn Error>;

/// How much more device memory a later lap may take: commands under way hold memory for a moment longer.
const DEVICE_MARGIN: f64 = 0.01;
/// The same for memory of the process, which its allocator and the driver give back as they like.
const PROCESS_MARGIN: f64 = 0.10;
/// Bytes that memory of the process may grow by in any case: one more arena of the allocator.
const PROCESS_SLACK: u64 = 24 << 20;

/// Tokens that a sequence has at most.
const CTX_LEN: usize = 640;
/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);
/// Rounds on a model in a lap.
const ROUNDS: usize = 3;

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
    let mut watch = Watch::new(&device);
    let length = Duration::from_secs_f64(minutes * 60.0);
    while watch.start.elapsed() < length {
        let mut random = Random(0x5eed_0f50_a4b1_e5e5);
        for path in models {
            let model = load(path, Gpu::new(device.clone(), 2, Isa::detect()))?;
            for _ in 0..ROUNDS {
                round(&model, &mut random, &mut watch)?;
            }
        }
        watch.end_lap();
    }
    watch.verdict()
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
        cache: Some([CacheType::F32, CacheType::F16, CacheType::Q8_0][random.below(3)]),
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

/// Appends `ids` and `n` tokens after them, chosen on the device where it can; more may be on their way.
fn generate(
    session: &mut Session<Gpu>,
    ids: &[u32],
    n: usize,
    random: &mut Random,
    watch: &mut Watch,
) -> Result<(), Failure> {
    let n_vocab = session.model().config().n_vocab;
    let mut sampler = Sampler::new(sampling(random), n_vocab)?;
    ids.iter().for_each(|id| sampler.accept(*id));
    // And one for the last step.
    let n = n.min(CTX_LEN.saturating_sub(session.len() + ids.len() + 1));
    let Some((mut last, before)) = ids.split_last().map(|(last, before)| (*last, before)) else {
        return Ok(());
    };
    if !before.is_empty() {
        session.forward(before, Logits::None)?;
    }
    let wanted = n + random.below(8);
    for i in 0..n {
        last = match session.decode(&[last], sampler.sampling(), wanted - i)? {
            Decoded::Token(chosen) => chosen.id,
            Decoded::Logits(logits) => {
                finite(&logits)?;
                sampler.sample(&logits)
            }
        };
        sampler.accept(last);
        watch.look();
    }
    watch.n_tokens += (ids.len() + n) as u64;
    finite(&session.forward(&[last], Logits::Last)?)
}

/// One of the ways to choose tokens.
fn sampling(random: &mut Random) -> SamplerConfig {
    let seed = random.next();
    let with = |temperature, top_k, top_p, repeat_penalty| SamplerConfig {
        temperature,
        top_k,
        top_p,
        repeat_penalty,
        seed,
        ..SamplerConfig::default()
    };
    match random.below(5) {
        0 => with(0.0, 0, 1.0, 1.0),
        1 => with(0.9, 40, 1.0, 1.0),
        2 => with(0.8, 40, 0.9, 1.1),
        3 => with(0.7, 0, 0.9, 1.0),
        _ => with(1.0, 0, 1.0, 1.0),
    }
}

fn finite(logits: &[f32]) -> Result<(), Failure> {
    match logits.iter().all(|logit| logit.is_finite()) {
        true => Ok(()),
        false => Err("expected finite logits, found others".into()),
    }
}

/// Bytes in use.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    /// The most on the device at once.
    device: u64,
    /// On the device when nothing is loaded.
    at_rest: u64,
    /// Of the process, at the end; 0 where the system doesn't tell.
    process: u64,
}

/// Looks at memory every now and then.
struct Watch {
    device: Device,
    start: Instant,
    told: Instant,
    /// What the lap has taken so far.
    lap: Memory,
    laps: Vec<Memory>,
    n_tokens: u64,
}

impl Watch {
    fn new(device: &Device) -> Watch {
        Watch {
            device: device.clone(),
            start: Instant::now(),
            told: Instant::now(),
            lap: Memory::default(),
            laps: Vec::new(),
            n_tokens: 0,
        }
    }

    fn look(&mut self) {
        let used = self.device.memory().used;
        self.lap.device = self.lap.device.max(used);
        if self.told.elapsed() >= INTERVAL {
            self.told = Instant::now();
            self.tell(&format!("device memory {}", MiB(used)));
        }
    }

    fn tell(&self, what: &str) {
        println!(
            "{:5.0} s, lap {}, {} tokens: {what}, at most {}; process {}",
            self.start.elapsed().as_secs_f64(),
            self.laps.len() + 1,
            self.n_tokens,
            MiB(self.device.memory().peak),
            MiB(process_bytes()),
        );
    }

    /// A lap is over, and all its models are dropped.
    fn end_lap(&mut self) {
        self.lap.at_rest = self.device.memory().used;
        self.lap.process = process_bytes();
        let Memory {
            device, at_rest, ..
        } = self.lap;
        self.tell(&format!(
            "lap over, {} at once, {} at rest",
            MiB(device),
            MiB(at_rest)
        ));
        self.laps.push(std::mem::take(&mut self.lap));
    }

    /// The last lap against the second: in the first, pipelines and workspaces are made.
    fn verdict(&self) -> Result<(), Failure> {
        let [_, second, .., last] = &self.laps[..] else {
            let n = self.laps.len();
            return Err(
                format!("expected three laps, found time for {n}: ask for more minutes").into(),
            );
        };
        let checks = [
            (
                "device memory at once",
                second.device,
                last.device,
                DEVICE_MARGIN,
                0,
            ),
            (
                "device memory at rest",
                second.at_rest,
                last.at_rest,
                0.0,
                0,
            ),
            (
                "process memory",
                second.process,
                last.process,
                PROCESS_MARGIN,
                PROCESS_SLACK,
            ),
        ];
        for (what, early, late, margin, slack) in checks {
            let limit = (early as f64 * (1.0 + margin)) as u64 + slack;
            if late > limit {
                return Err(format!(
                    "{what}: {early} bytes in the second lap, expected at most {limit} in the last, found {late}"
                )
                .into());
            }
        }
        println!(
            "flat: {} laps, {} tokens, {:.0} s",
            self.laps.len(),
            self.n_tokens,
            self.start.elapsed().as_secs_f64()
        );
        Ok(())
    }
}

/// Bytes, written in MiB.
struct MiB(u64);

impl std::fmt::Display for MiB {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1 << 20))
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
