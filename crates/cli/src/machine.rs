//! What this machine is and how fast it computes.

mod bandwidth;

use std::num::NonZero;
use std::ops::AddAssign;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use sterna_kernels::{Exec, Isa, peak};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

pub(crate) use self::bandwidth::{MemoryReaders, Pages, Reading, read_bandwidth, readable_bytes};

/// What the machine offers this process.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    /// Operating system and processor architecture, such as `linux x86_64`.
    pub(crate) system: String,
    /// The processor's name.
    pub(crate) cpu: String,
    /// Physical cores, if the system tells.
    pub(crate) physical_cores: Option<usize>,
    /// Hardware threads this process may use, affinity and quotas considered.
    pub(crate) available_threads: usize,
    /// Memory of the machine, or of the container this process runs in; 0 if the system doesn't tell.
    pub(crate) memory_bytes: u64,
    /// Memory not in use; 0 if the system doesn't tell.
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
        let read = (system.total_memory(), system.available_memory());
        let (memory_bytes, free_memory_bytes) = memory(read, || {
            let limits = system.cgroup_limits()?;
            Some((limits.total_memory, limits.free_memory))
        });
        let cpu = system.cpus().first().map_or("", |cpu| cpu.brand()).trim();
        Machine {
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: if cpu.is_empty() { "unknown" } else { cpu }.to_owned(),
            physical_cores: System::physical_core_count(),
            available_threads: available_threads(),
            memory_bytes,
            free_memory_bytes,
        }
    }
}

/// All and free memory, by what the system says of the machine and of this container. Where `/proc` isn't
/// mounted it says nothing, and may not be asked for limits.
fn memory((total, free): (u64, u64), limits: impl FnOnce() -> Option<(u64, u64)>) -> (u64, u64) {
    if total == 0 {
        return (0, 0);
    }
    let (most, most_free) = limits().unwrap_or((u64::MAX, u64::MAX));
    (total.min(most), free.min(most_free))
}

/// Hardware threads this process may use, affinity and quotas considered.
pub(crate) fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Default number of threads: one for each physical core that this process may use.
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
    let features = features.into_iter().filter(|f| f.1).map(|f| f.0);
    // There is no stable macro for these, and the system has a say.
    let others = [("amx", "amx-int8"), ("sme", "sme-i8i32")];
    let others = others
        .into_iter()
        .filter(|(level, _)| Isa::limited_to(level).is_some());
    features.chain(others.map(|(_, name)| name)).collect()
}

/// Peak memory of this process in bytes; `None` where the system doesn't report it.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Measures wall-clock time and CPU time of this thread.
pub(crate) struct Stopwatch {
    wall: Instant,
    cpu: Option<Duration>,
}

/// The reading of a [`Stopwatch`], or of several together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Elapsed {
    pub(crate) wall: Duration,
    /// CPU time of this thread: whatever else the machine did is not included. `None` where the system
    /// doesn't report it.
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

/// CPU time of the calling thread.
#[cfg(any(target_os = "linux", target_os = "macos"))]
fn thread_cpu_time() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanos = u32::try_from(time.tv_nsec).ok()?;
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, nanos))
}

/// CPU time of the calling thread.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn thread_cpu_time() -> Option<Duration> {
    None
}

/// Multiply-adds per second that the threads of `exec` do together in registers; see [`peak`].
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

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[test]
    fn the_machine_is_described() {
        let machine = Machine::detect();
        assert!(machine.memory_bytes > 0 && machine.free_memory_bytes <= machine.memory_bytes);
        assert!((1..=machine.available_threads).contains(&default_threads()));
    }

    #[test]
    fn memory_is_limited_by_the_container_if_the_system_tells() {
        assert_eq!(memory((0, 0), || panic!("asked for limits")), (0, 0));
        assert_eq!(memory((9, 5), || None), (9, 5));
        assert_eq!(memory((9, 5), || Some((7, 6))), (7, 5));
        assert_eq!(memory((9, 5), || Some((u64::MAX, 2))), (9, 2));
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
        assert!(multiply_add_rate(&Exec::new(2, Isa::detect())) > 1e6);
        let elapsed = watch.elapsed();
        assert!(elapsed.wall >= Duration::from_millis(40));
        assert!(
            elapsed
                .cpu
                .is_none_or(|cpu| cpu > Duration::ZERO && cpu <= elapsed.wall * 2)
        );
    }
}
