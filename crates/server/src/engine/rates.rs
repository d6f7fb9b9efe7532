//! What is quicker: to compute tokens, or to copy what was computed for them.

use std::time::Duration;

use crate::metrics::Tier;

/// Of tokens that nothing is known of, as many have to be saved for a sequence to be copied, also those that are this
/// share of it: computing few is quicker than copying many.
const WORTH_COPYING: usize = 32;
const WORTH_SHARE: usize = 8;

/// Prompts of fewer tokens say little of how quickly tokens are computed.
const TELLING: usize = 256;

/// Measurements that a rate is believed from.
const ENOUGH: u32 = 2;

/// How quickly tokens of a model are computed on an engine, and copied from each tier.
#[derive(Debug, Default)]
pub(super) struct Rates {
    /// Tokens per second.
    computed: Rate,
    /// Bytes per second.
    host: Rate,
    disk: Rate,
}

/// A mean of which the newest measurement is a quarter.
#[derive(Debug, Default)]
struct Rate {
    n_measured: u32,
    per_second: f64,
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
            self.computed.add(n_tokens as f64, took);
        }
    }

    /// Records that so many bytes were copied from `tier` to the engine.
    pub(super) fn copied(&mut self, tier: Tier, n_bytes: u64, took: Duration) {
        if let Some(rate) = self.of(tier) {
            rate.add(n_bytes as f64, took);
        }
    }

    /// Whether a sequence is to be copied. Each that isn't makes it a little likelier that the next one is: what is never
    /// copied isn't measured any more.
    pub(super) fn pays(&mut self, copied: Copied) -> bool {
        let Copied {
            tier,
            n_bytes,
            n_tokens,
            n_saved,
        } = copied;
        if n_saved < WORTH_COPYING {
            return false;
        }
        let to_compute = self.computed.seconds(n_saved as f64);
        let Some(rate) = self.of(tier) else {
            return true;
        };
        match (to_compute, rate.seconds(n_bytes as f64)) {
            (Some(to_compute), Some(to_copy)) if to_copy > to_compute => {
                rate.per_second *= 1.0 + 1.0 / 32.0;
                false
            }
            (Some(_), Some(_)) => true,
            _ => n_saved >= n_tokens / WORTH_SHARE,
        }
    }

    /// The rate of `tier`; none for an engine's own memory.
    fn of(&mut self, tier: Tier) -> Option<&mut Rate> {
        match tier {
            Tier::Engine => None,
            Tier::Host => Some(&mut self.host),
            Tier::Disk => Some(&mut self.disk),
        }
    }
}

impl Rate {
    fn add(&mut self, n: f64, took: Duration) {
        let measured = n / took.as_secs_f64().max(1e-6);
        self.per_second = match self.n_measured {
            0 => measured,
            _ => self.per_second + (measured - self.per_second) / 4.0,
        };
        self.n_measured += 1;
    }

    /// How long `n` take, once that is known.
    fn seconds(&self, n: f64) -> Option<f64> {
        (self.n_measured >= ENOUGH).then(|| n / self.per_second)
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
        assert!(rates.pays(copied(Tier::Engine, 40)));
    }

    #[test]
    fn what_was_slow_is_tried_again() {
        let mut rates = Rates::default();
        for _ in 0..2 {
            rates.computed(10_000, Duration::from_secs(1));
            rates.copied(Tier::Disk, 100 * MIB, Duration::from_secs(1));
        }
        let refused = (0..1000).take_while(|_| !rates.pays(copied(Tier::Disk, 4000)));
        let n_refused = refused.count();
        assert!((20..40).contains(&n_refused), "{n_refused}");
        // A measurement that is as bad makes it wait again.
        rates.copied(Tier::Disk, 100 * MIB, Duration::from_secs(1));
        assert!(!rates.pays(copied(Tier::Disk, 4000)));
    }
}
