//! What this machine is and how fast its memory reads.

use std::hint::black_box;
use std::num::NonZero;
use std::thread;
use std::time::Instant;

use serde::Serialize;
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

/// Bytes a second that `n_threads` threads read from memory together: the best of several passes
/// over a buffer of a GiB, or of a quarter of the free memory if that is less.
pub(crate) fn read_bandwidth(n_threads: usize, free_memory_bytes: u64) -> f64 {
    const PASSES: usize = 5;
    let n_bytes = (free_memory_bytes / 4).clamp(64 << 20, 1 << 30) as usize;
    let chunk_len = (n_bytes / 8).div_ceil(n_threads.max(1));
    // Written, not only allocated: untouched pages all map to the same zeros.
    let buffer: Vec<u64> = (0..n_bytes as u64 / 8).collect();
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for chunk in buffer.chunks(chunk_len) {
                scope.spawn(move || {
                    black_box(chunk.iter().fold(0u64, |sum, &word| sum.wrapping_add(word)))
                });
            }
        });
        start.elapsed().as_secs_f64()
    };
    let best = (0..PASSES).map(|_| pass()).fold(f64::INFINITY, f64::min);
    (buffer.len() * 8) as f64 / best
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
    fn bandwidth_is_positive() {
        assert!(read_bandwidth(2, 0) > 0.0);
    }
}
