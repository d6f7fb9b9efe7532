//! What is quicker: to compute tokens, or to copy what was computed for them.

use std::time::{Duration, Instant};

use crate::metrics::Tier;

/// Of tokens that nothing is known of, as many have to be saved for a sequence to be copied, also those that are this
/// share of it: computing few is quicker than copying many.
const WORTH_COPYING: usize = 32;
const WORTH_SHARE: usize = 8;

/// Prompts of fewer tokens say little of how quickly tokens are computed.
const TELLING: usize = 256;

/// Measurements that a rate is believed from, and for how long after the last: what was slow is tried again then.
const ENOUGH: u32 = 2;
const FRESH: Duration = Duration::from_secs(600);

/// The newest measurement counts as much as this many before it.
const REMEMBERED: u32 = 4;

/// How quickly tokens of a model are computed on an engine, and copied from each tier.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Tokens per second.
    computed: Rate,
    /// Bytes per second.
    host: Rate,
    disk: Rate,
}

/// A mean of measurements, the newest of which count most.
#[derive(Debug, Default)]
struct Rate {
    n_measured: u32,
    per_second: f64,
    last: Option<Instant>,
}

/// A sequence that may be copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copied {
    pub(super) tier: Tier,
    pub(super) n_bytes: u64,
    /// All its tokens, and those that needn't be computed then.
    pub(super) n_tokens: usize,
    pub(super) n_saved: usize,
}

impl Rates {
    /// Records that nothing but `n_tokens` of a prompt was computed for as long.
    pub(super) fn computed(&mut self, n_tokens: usize, took: Duration) {
        if n_tokens >= TELLING {
            self.computed.add(n_tokens as f64, took, Instant::now());
        }
    }

    /// Records that so many bytes were copied from `tier` to the engine.
    pub(super) fn copied(&mut self, tier: Tier, n_bytes: u64, took: Duration) {
        let rate = match tier {
            Tier::Engine => return,
            Tier::Host => &mut self.host,
            Tier::Disk => &mut self.disk,
        };
        rate.add(n_bytes as f64, took, Instant::now());
    }

    /// Whether a sequence is to be copied.
    pub(super) fn pays(&self, copied: Copied) -> bool {
        self.pays_at(copied, Instant::now())
    }

    fn pays_at(&self, copied: Copied, now: Instant) -> bool {
        let Copied {
            tier,
            n_bytes,
            n_tokens,
            n_saved,
        } = copied;
        if n_saved < WORTH_COPYING {
            return false;
        }
        let to_compute = self.computed.seconds(n_saved as f64, now);
        let rate = match tier {
            Tier::Engine => None,
            Tier::Host => Some(&self.host),
            Tier::Disk => Some(&self.disk),
        };
        let to_copy = rate.and_then(|rate| rate.seconds(n_bytes as f64, now));
        match (to_compute, to_copy) {
            (Some(to_compute), Some(to_copy)) => to_copy <= to_compute,
            _ => n_saved >= n_tokens / WORTH_SHARE,
        }
    }
}

impl Rate {
    fn add(&mut self, n: f64, took: Duration, now: Instant) {
        if !self.is_fresh(now) {
            self.n_measured = 0;
        }
        let measured = n / took.as_secs_f64().max(1e-6);
        self.n_measured += 1;
        let weight = 1.0 / f64::from(self.n_measured.min(REMEMBERED));
        self.per_second += (measured - self.per_second) * weight;
        self.last = Some(now);
    }

    fn is_fresh(&self, now: Instant) -> bool {
        let age = self.last.map(|last| now.saturating_duration_since(last));
        age.is_some_and(|age| age < FRESH)
    }

    /// How long `n` take, as long as that is known.
    fn seconds(&self, n: f64, now: Instant) -> Option<f64> {
        let is_known = self.n_measured >= ENOUGH && self.is_fresh(now);
        is_known.then(|| n / self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn copied(tier: Tier, n_saved: usize) -> Copied {
        Copied {
            tier,
            n_bytes: 100 * MIB,
            n_tokens: 4000,
            n_saved,
        }
    }

    #[test]
    fn the_quicker_of_both_is_done() {
        let mut rates = Rates::default();
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            // By shares, as long as one of the rates isn't known.
            assert!(rates.pays(copied(Tier::Host, 500)));
            assert!(!rates.pays(copied(Tier::Host, 499)));
            assert!(!rates.pays(copied(Tier::Host, 31)));
            rates.computed(10_000, second);
            rates.computed(TELLING - 1, 100 * second);
        }
        for _ in 0..2 {
            rates.copied(Tier::Host, 1000 * MIB, second);
            rates.copied(Tier::Disk, 200 * MIB, second);
        }
        // 0.1 and 0.5 s.
        assert!(rates.pays(copied(Tier::Host, 1001)));
        assert!(!rates.pays(copied(Tier::Host, 999)));
        assert!(!rates.pays(copied(Tier::Disk, 4000)));
        // What was slow is tried again after a while.
        let later = Instant::now() + FRESH;
        assert!(rates.pays_at(copied(Tier::Disk, 4000), later));
    }

    #[test]
    fn newer_measurements_count_more() {
        let now = Instant::now();
        let mut rate = Rate::default();
        // The first is of a device that isn't warm.
        for (took, expected) in [
            (10.0, None),
            (1.0, Some(0.55)),
            (1.0, Some(0.7)),
            (1.0, Some(0.775)),
        ] {
            rate.add(1.0, Duration::from_secs_f64(took), now);
            let per_second = rate.seconds(1.0, now).map(|seconds| 1.0 / seconds);
            let is_near = per_second
                .zip(expected)
                .is_none_or(|(a, b): (f64, f64)| (a - b).abs() < 1e-9);
            assert!(
                is_near && per_second.is_some() == expected.is_some(),
                "{per_second:?}"
            );
        }
    }
}
