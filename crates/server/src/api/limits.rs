//! What each key may use in a minute: requests and tokens.
//!
//! What was used comes back evenly: a key that may send 60 requests a minute has another one after a second. A request
//! is let in while its key has tokens left; those of its answer are counted as they are made, so that a key may owe
//! some, and waits the longer.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a key may use in a minute; what isn't limited is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) requests: Option<NonZero<u64>>,
    pub(crate) tokens: Option<NonZero<u64>>,
}

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limited {
    Requests,
    Tokens,
}

impl Limited {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Limited::Requests => "requests",
            Limited::Tokens => "tokens",
        }
    }
}

/// Why a request isn't let in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spent {
    pub(crate) what: Limited,
    pub(crate) limit: u64,
    /// When there is some again.
    pub(crate) retry_after: Duration,
}

/// How much is left of something.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Left {
    pub(crate) what: Limited,
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    /// When all of it is there again.
    pub(crate) reset: Duration,
}

/// Something that comes back evenly.
#[derive(Debug)]
struct Bucket {
    what: Limited,
    limit: u64,
    left: f64,
    /// When `left` was so.
    at: Duration,
}

impl Bucket {
    fn full(what: Limited, limit: NonZero<u64>) -> Bucket {
        Bucket {
            what,
            limit: limit.get(),
            left: limit.get() as f64,
            at: Duration::ZERO,
        }
    }

    /// What comes back in a second.
    fn rate(&self) -> f64 {
        self.limit as f64 / 60.0
    }

    /// What is left at `now`.
    fn left(&mut self, now: Duration) -> f64 {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.left = (self.left + passed * self.rate()).min(self.limit as f64);
        self.at = now.max(self.at);
        self.left
    }

    fn spend(&mut self, n: u64, now: Duration) {
        self.left(now);
        self.left -= n as f64;
    }

    /// How long it takes until `wanted` are left.
    fn until(&mut self, wanted: f64, now: Duration) -> Duration {
        let missing = wanted - self.left(now);
        Duration::from_secs_f64((missing / self.rate()).clamp(0.0, 1e9))
    }
}

/// What is left of each key.
pub(crate) struct Limits {
    begun: Instant,
    /// By the number of the key.
    keys: Vec<Mutex<Vec<Bucket>>>,
}

impl Limits {
    /// Of keys with these quotas, in order. Others have none.
    pub(crate) fn new(quotas: impl Iterator<Item = Quota>) -> Limits {
        let buckets = |quota: Quota| {
            let requests = quota.requests.map(|n| Bucket::full(Limited::Requests, n));
            let tokens = quota.tokens.map(|n| Bucket::full(Limited::Tokens, n));
            Mutex::new(requests.into_iter().chain(tokens).collect())
        };
        Limits {
            begun: Instant::now(),
            keys: quotas.map(buckets).collect(),
        }
    }

    /// Lets a request of `key` in.
    pub(crate) fn admit(&self, key: usize) -> Result<(), Spent> {
        self.admit_at(key, self.begun.elapsed())
    }

    fn admit_at(&self, key: usize, now: Duration) -> Result<(), Spent> {
        self.with(key, |buckets| {
            for bucket in buckets.iter_mut() {
                if bucket.left(now) < 1.0 {
                    return Err(Spent {
                        what: bucket.what,
                        limit: bucket.limit,
                        retry_after: bucket.until(1.0, now),
                    });
                }
            }
            let requests = buckets.iter_mut().find(|b| b.what == Limited::Requests);
            if let Some(requests) = requests {
                requests.spend(1, now);
            }
            Ok(())
        })
        .unwrap_or(Ok(()))
    }

    /// Takes `n` tokens from what `key` has left.
    pub(crate) fn spend(&self, key: usize, n: usize) {
        self.spend_at(key, n, self.begun.elapsed());
    }

    fn spend_at(&self, key: usize, n: usize, now: Duration) {
        self.with(key, |buckets| {
            let tokens = buckets.iter_mut().find(|b| b.what == Limited::Tokens);
            if let Some(tokens) = tokens {
                tokens.spend(n as u64, now);
            }
        });
    }

    /// What `key` has left of what is limited.
    pub(crate) fn left(&self, key: usize) -> Vec<Left> {
        let now = self.begun.elapsed();
        let left = |bucket: &mut Bucket| Left {
            what: bucket.what,
            limit: bucket.limit,
            remaining: bucket.left(now).max(0.0) as u64,
            reset: bucket.until(bucket.limit as f64, now),
        };
        let all = self.with(key, |buckets| buckets.iter_mut().map(left).collect());
        all.unwrap_or_default()
    }

    fn with<T>(&self, key: usize, act: impl FnOnce(&mut Vec<Bucket>) -> T) -> Option<T> {
        let buckets = self.keys.get(key)?;
        Some(act(&mut buckets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(requests: u64, tokens: u64) -> Quota {
        Quota {
            requests: NonZero::new(requests),
            tokens: NonZero::new(tokens),
        }
    }

    #[test]
    fn what_is_spent_comes_back_evenly() {
        let limits = Limits::new([quota(2, 0), Quota::default()].into_iter());
        let at = Duration::from_secs;
        assert_eq!(limits.admit_at(0, at(0)), Ok(()));
        assert_eq!(limits.admit_at(0, at(0)), Ok(()));
        let spent = limits.admit_at(0, at(10)).unwrap_err();
        assert_eq!((spent.what, spent.limit), (Limited::Requests, 2));
        assert!(
            (spent.retry_after.as_secs_f64() - 20.0).abs() < 1e-6,
            "{spent:?}"
        );
        assert_eq!(limits.admit_at(0, at(31)), Ok(()));
        assert!(limits.admit_at(0, at(32)).is_err());
        // Not more than a minute's after an hour.
        for is_in in [true, true, false] {
            assert_eq!(limits.admit_at(0, at(3600)).is_ok(), is_in);
        }
        // Others are not limited, known or not.
        for key in [1, 2] {
            assert_eq!(limits.admit_at(key, at(0)), Ok(()));
            assert_eq!(limits.left(key), []);
        }
    }

    #[test]
    fn keys_may_owe_tokens_and_wait() {
        let limits = Limits::new([quota(0, 600)].into_iter());
        let at = Duration::from_secs;
        limits.spend_at(0, 550, at(0));
        assert_eq!(limits.admit_at(0, at(0)), Ok(()));
        limits.spend_at(0, 150, at(0));
        let spent = limits.admit_at(0, at(0)).unwrap_err();
        assert_eq!(spent.what, Limited::Tokens);
        assert!((spent.retry_after.as_secs_f64() - 10.1).abs() < 1e-6);
        assert_eq!(limits.admit_at(0, at(11)), Ok(()));
    }
}
