//! What this machine is and how fast its memory reads.

use std::hint::black_box;
use std::num::NonZero;
use std::ops::AddAssign;
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use sterna_kernels::{Exec, peak};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// What the machine offers this process.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    /// Operating system and processor architecture, such as `linux x86_64`.
    pub(crate) system: String,
    /// The processor's name for itself.
    pub(crate) cpu: String,
    /// Physical cores, if the system tells.
    pub(crate) physical_cores: Option<usize>,
    /// Hardware threads this process may use, affinity and quotas considered.
    pub(crate) available_threads: usize,
    /// Memory of the machine, or of the container this process runs in.
    pub(crate) memory_bytes: u64,
    /// Memory not in use.
    pub(crate) free_memory_bytes: u64,
}

impl Machine {
    /// Asks the system.
    pub(crate) fn detect() -> Machine {
        let system = System::new_with_specifics(
            RefreshKind::nothing()
                .with_cpu(CpuRefreshKind::nothing())
                .with_memory(MemoryRefreshKind::nothing().with_ram()),
        );
        let (mut total, mut free) = (system.total_memory(), system.available_memory());
        if let Some(limits) = system.cgroup_limits() {
            total = total.min(limits.total_memory);
            free = free.min(limits.free_memory);
        }
        let cpu = system.cpus().first().map_or("", |cpu| cpu.brand()).trim();
        Machine {
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: if cpu.is_empty() { "unknown" } else { cpu }.to_owned(),
            physical_cores: System::physical_core_count(),
            available_threads: available_threads(),
            memory_bytes: total,
            free_memory_bytes: free,
        }
    }
}

fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Threads to compute with if nobody says: one for each physical core that this process may use.
///
/// The second hardware thread of a core adds nothing to arithmetic that keeps the first one busy.
pub(crate) fn default_threads() -> usize {
    let available = available_threads();
    System::physical_core_count().map_or(available, |cores| available.min(cores.max(1)))
}

/// The instruction set extensions of this processor that arithmetic on weights can use.
pub(crate) fn cpu_features() -> Vec<&'static str> {
    macro_rules! detected {
        ($detect:ident: $($feature:tt)*) => {
            [$(($feature, std::arch::$detect!($feature))),*]
        };
    }
    #[cfg(target_arch = "x86_64")]
    let features = detected!(is_x86_feature_detected:
        "sse4.1" "avx" "avx2" "fma" "f16c" "avxvnni" "avx512f" "avx512bw" "avx512dq" "avx512vl"
        "avx512vnni" "avx512bf16" "avx512fp16");
    #[cfg(target_arch = "aarch64")]
    let features = detected!(is_aarch64_feature_detected:
        "neon" "dotprod" "i8mm" "fp16" "bf16" "sve" "sve2");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let features: [(&str, bool); 0] = [];
    features.into_iter().filter(|f| f.1).map(|f| f.0).collect()
}

/// The most memory this process has held at once, in bytes; `None` where the system doesn't tell.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Measures time, by the clock on the wall and by what this thread has computed.
pub(crate) struct Stopwatch {
    wall: Instant,
    cpu: Option<Duration>,
}

/// What a [`Stopwatch`] shows, or several show together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elapsed {
    pub(crate) wall: Duration,
    /// Time in which this thread computed: whatever else the machine did does not count. `None` where
    /// the system doesn't tell.
    pub(crate) cpu: Option<Duration>,
}

impl Default for Elapsed {
    /// No time.
    fn default() -> Elapsed {
        Elapsed {
            wall: Duration::ZERO,
            cpu: Some(Duration::ZERO),
        }
    }
}

impl AddAssign for Elapsed {
    fn add_assign(&mut self, more: Elapsed) {
        self.wall += more.wall;
        self.cpu = self.cpu.zip(more.cpu).map(|(sum, more)| sum + more);
    }
}

impl Stopwatch {
    pub(crate) fn start() -> Stopwatch {
        Stopwatch {
            cpu: thread_cpu_time(),
            wall: Instant::now(),
        }
    }

    pub(crate) fn elapsed(&self) -> Elapsed {
        Elapsed {
            wall: self.wall.elapsed(),
            cpu: (self.cpu.zip(thread_cpu_time())).map(|(start, now)| now.saturating_sub(start)),
        }
    }
}

/// How long the calling thread has computed.
#[cfg(any(target_os = "linux", target_os = "macos"))]
fn thread_cpu_time() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanos = u32::try_from(time.tv_nsec).ok()?;
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, nanos))
}

/// How long the calling thread has computed.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn thread_cpu_time() -> Option<Duration> {
    None
}

/// Multiply-adds a second that the threads of `exec` do together in registers; see [`peak`].
pub(crate) fn multiply_add_rate(exec: &Exec) -> f64 {
    /// Long enough to outlast a change of the clock rate.
    const TIME: Duration = Duration::from_millis(40);
    const STEP: u64 = 1 << 27;
    let start = Instant::now();
    let mut done = 0;
    loop {
        done += peak::multiply_adds(exec, STEP);
        let elapsed = start.elapsed();
        if elapsed >= TIME {
            return done as f64 / elapsed.as_secs_f64();
        }
    }
}

/// Threads that read memory, each its own part of a buffer, to measure how fast that goes.
///
/// They live as long as this does, so that starting them is not measured, and fill their parts
/// themselves, so that the system puts the pages near them.
pub(crate) struct MemoryReaders {
    n_bytes: u64,
    readers: Vec<Reader>,
}

/// One of the threads: it begins a pass when told to, and ends when `begin` is dropped.
struct Reader {
    begin: mpsc::Sender<()>,
    /// When each pass began and ended.
    passes: mpsc::Receiver<(Instant, Instant)>,
}

impl MemoryReaders {
    /// Starts `n_threads` threads that share about `n_bytes` of memory, but at least 64 MiB.
    pub(crate) fn start(n_threads: usize, n_bytes: u64) -> Result<MemoryReaders> {
        let n_words = n_bytes.max(64 << 20).div_ceil(8 * n_threads as u64);
        let together = Arc::new(Barrier::new(n_threads));
        let start = |_| {
            let together = together.clone();
            let (begin, orders) = mpsc::channel();
            let (results, passes) = mpsc::channel();
            let work = move || {
                // Written, not only allocated: untouched pages all map to the same zeros.
                let words: Vec<u64> = (0..n_words).collect();
                // Both ends are dropped at the same time, which ends the thread.
                while orders.recv().is_ok() {
                    together.wait();
                    let start = Instant::now();
                    black_box(words.iter().fold(0u64, |sum, &word| sum.wrapping_add(word)));
                    if results.send((start, Instant::now())).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .spawn(work)
                .context("cannot start a thread to measure memory with")?;
            Ok(Reader { begin, passes })
        };
        let readers = (0..n_threads).map(start).collect::<Result<_>>()?;
        let readers = MemoryReaders {
            n_bytes: n_words * 8 * n_threads as u64,
            readers,
        };
        // Waits until every part is filled.
        readers.pass()?;
        Ok(readers)
    }

    /// Bytes of memory that they hold.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Reads all of it once: bytes per second, of all threads together.
    pub(crate) fn pass(&self) -> Result<f64> {
        let gone = "a thread that measures memory ended early";
        for reader in &self.readers {
            reader.begin.send(()).context(gone)?;
        }
        let mut times = Vec::with_capacity(self.readers.len());
        for reader in &self.readers {
            times.push(reader.passes.recv().context(gone)?);
        }
        let start = times.iter().map(|time| time.0).min();
        let end = times.iter().map(|time| time.1).max();
        let (start, end) = start.zip(end).context("expected at least one thread")?;
        Ok(self.n_bytes as f64 / (end - start).as_secs_f64())
    }
}

/// Bytes to measure `n` sets of [`MemoryReaders`] with, for each: a GiB, but all together not more
/// than a quarter of the free memory.
pub(crate) fn readable_bytes(n: usize, free_memory_bytes: u64) -> u64 {
    (free_memory_bytes / 4 / n.max(1) as u64).min(1 << 30)
}

/// Bytes a second that `n_threads` threads read from memory together: the median of five passes.
pub(crate) fn read_bandwidth(n_threads: usize, free_memory_bytes: u64) -> Result<f64> {
    let readers = MemoryReaders::start(n_threads, readable_bytes(1, free_memory_bytes))?;
    let mut rates = [0.0; 5];
    for rate in &mut rates {
        *rate = readers.pass()?;
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described() {
        let machine = Machine::detect();
        assert!(machine.memory_bytes > 0 && machine.free_memory_bytes <= machine.memory_bytes);
        assert!((1..=machine.available_threads).contains(&default_threads()));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn peak_memory_covers_what_was_used() {
        let used = black_box(vec![1u8; 64 << 20]);
        assert!(peak_memory_bytes().unwrap() >= used.len() as u64);
    }

    #[test]
    fn rates_of_arithmetic_and_time_are_positive() {
        let watch = Stopwatch::start();
        assert!(multiply_add_rate(&Exec::new(2, sterna_kernels::Isa::detect())) > 1e6);
        let elapsed = watch.elapsed();
        assert!(elapsed.wall >= Duration::from_millis(40));
        assert!(
            elapsed
                .cpu
                .is_none_or(|cpu| cpu > Duration::ZERO && cpu <= elapsed.wall * 2)
        );
    }

    #[test]
    fn bandwidth_is_positive() {
        assert!(read_bandwidth(2, 0).unwrap() > 0.0);
        let readers = MemoryReaders::start(3, 0).unwrap();
        assert!(readers.n_bytes() >= 64 << 20);
        assert!(readers.pass().unwrap() > 0.0);
        assert_eq!(readable_bytes(2, 8 << 30), 1 << 30);
        assert_eq!(readable_bytes(4, 8 << 30), 1 << 29);
    }
}
