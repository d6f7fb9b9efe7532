//! How long the kernels of a GPU take.

use serde::Serialize;

use crate::device::KernelTime;

/// The kernels of a test on a GPU.
#[derive(Debug, Serialize)]
pub(super) struct Kernels {
    /// Kernels started for a token, or for the prompt.
    dispatches: f64,
    /// Microseconds that they take together, by the device's clock.
    us: f64,
    kernels: Vec<Kernel>,
}

/// All dispatches of a kernel over grids of the same size.
#[derive(Debug, Serialize)]
struct Kernel {
    name: &'static str,
    /// Workgroups of each dispatch.
    workgroups: u64,
    /// Dispatches for a token, or for the prompt.
    dispatches: f64,
    /// Microseconds of all of them together.
    us: f64,
}

impl Kernels {
    /// Sums `times`, the longest first, and divides by `n`: tokens that were decoded, or one prompt.
    pub(super) fn new(n: usize, times: &[KernelTime]) -> Kernels {
        let n = n as f64;
        let mut kernels: Vec<Kernel> = Vec::new();
        for time in times {
            let same = |k: &&mut Kernel| (k.name, k.workgroups) == (time.name, time.workgroups);
            if let Some(kernel) = kernels.iter_mut().find(same) {
                kernel.dispatches += 1.0 / n;
                kernel.us += time.us / n;
            } else {
                kernels.push(Kernel {
                    name: time.name,
                    workgroups: time.workgroups,
                    dispatches: 1.0 / n,
                    us: time.us / n,
                });
            }
        }
        kernels.sort_by(|a, b| b.us.total_cmp(&a.us));
        Kernels {
            dispatches: times.len() as f64 / n,
            us: times.iter().map(|time| time.us).sum::<f64>() / n,
            kernels,
        }
    }

    /// A line for the whole, and one for each kernel.
    pub(super) fn text(&self, of: &str) -> String {
        let mut text = format!(
            "\n    {:.0} dispatches of {:.0} µs together for {of}:",
            self.dispatches, self.us
        );
        for kernel in &self.kernels {
            text += &format!(
                "\n    {:>9.1} µs {:>3.0} %  {:>6.1} × {:>8.2} µs  {} over {} workgroups",
                kernel.us,
                kernel.us / self.us * 100.0,
                kernel.dispatches,
                kernel.us / kernel.dispatches,
                kernel.name,
                kernel.workgroups,
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatches_are_summed_up_by_kernel_and_size() {
        let time = |name, workgroups, us| KernelTime {
            name,
            workgroups,
            us,
        };
        let times = [
            time("norm", 1, 1.0),
            time("gemv", 8, 2.0),
            time("gemv", 8, 6.0),
            time("gemv", 4, 3.0),
        ];
        let kernels = Kernels::new(2, &times);
        assert_eq!((kernels.dispatches, kernels.us), (2.0, 6.0));
        let found: Vec<_> = (kernels.kernels.iter())
            .map(|k| (k.name, k.workgroups, k.dispatches, k.us))
            .collect();
        let expected = [
            ("gemv", 8, 1.0, 4.0),
            ("gemv", 4, 0.5, 1.5),
            ("norm", 1, 0.5, 0.5),
        ];
        assert_eq!(found, expected);
        assert!(kernels.text("a token").contains("gemv over 8 workgroups"));
    }
}
