//! Rate limiting.

use std::time::Duration;

/// Computes waits so that bytes arrive at no more than a given rate, over all requests.
///
/// Time is an argument, as a duration since any fixed moment.
#[derive(Debug, Clone)]
pub struct RateLimit {
    bytes_per_second: u64,
    /// When everything taken so far will have been paid for.
    paid_until: Duration,
}

/// Unused time that may be caught up.
const BURST: Duration = Duration::from_millis(250);

impl RateLimit {
    /// At most `bytes_per_second`, and at least one byte.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            paid_until: Duration::ZERO,
        }
    }

    /// Takes `n` bytes at the time `now`; returns how long to wait before taking more.
    pub fn take(&mut self, n: usize, now: Duration) -> Duration {
        let nanos = n as u128 * 1_000_000_000 / u128::from(self.bytes_per_second);
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let from = self.paid_until.max(now.saturating_sub(BURST));
        self.paid_until = from.saturating_add(cost);
        self.paid_until.saturating_sub(now)
    }

    /// Bytes to take at once so that waits stay short.
    pub fn piece(&self) -> usize {
        usize::try_from(self.bytes_per_second / 16).map_or(usize::MAX, |piece| piece.max(256))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_at_the_rate_and_a_pause_is_made_up_for_in_part() {
        let mut rate_limit = RateLimit::new(1000);
        let mut now = Duration::from_secs(100);
        let start = now;
        for _ in 0..100 {
            now += rate_limit.take(100, now);
        }
        let took = (now - start).as_secs_f64();
        assert!((9.5..=10.0).contains(&took), "{took}");
        now += Duration::from_secs(60);
        assert_eq!(rate_limit.take(250, now), Duration::ZERO);
        assert_eq!(rate_limit.take(100, now), Duration::from_millis(100));
        assert!(RateLimit::new(0).take(usize::MAX, now).as_secs() > 1 << 30);
    }
}
