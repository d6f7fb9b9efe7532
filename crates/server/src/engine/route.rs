//! Which engine a job goes to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::prefix::{Near, Prefixes, WORTH, n_common};
use super::tiers::Identity;
use super::{AdapterKey, Job, Work};

/// What a sequence is computed by: only one that is computed by the same may go on with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Held {
    pub(super) model: usize,
    /// The number of the adapter.
    pub(super) adapter: Option<usize>,
}

impl Held {
    pub(super) fn new(model: usize, adapter: Option<&AdapterKey>) -> Held {
        Held {
            model,
            adapter: adapter.map(|key| key.id),
        }
    }
}

/// What tells sequences of an engine apart: one is continued only by what computed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) of: Held,
    pub(super) identity: Identity,
    /// The address of the copy of the model, which its sequences hold: there is no other.
    pub(super) copy: usize,
}

/// The sequences that an engine keeps for prompts to come, by when they were used last. The engine changes them, and
/// jobs are routed by them as they are.
#[derive(Clone, Default)]
pub(super) struct Kept(Arc<Mutex<Prefixes<Key, Part>>>);

/// The first tokens, so many, of the sequence that was used last at that time: all, unless its model has states.
pub(super) type Part = (u64, usize);

impl Kept {
    fn all(&self) -> MutexGuard<'_, Prefixes<Key, Part>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the sequence of `ids` that was used last at `used`, which can be gone on with from `parts`.
    pub(super) fn insert(&self, key: Key, used: u64, ids: &[u32], parts: &[usize]) {
        let mut all = self.all();
        for &len in parts {
            all.insert(key, (used, len), &ids[..len]);
        }
    }

    /// Removes what was added so.
    pub(super) fn remove(&self, key: &Key, used: u64, parts: &[usize]) {
        let mut all = self.all();
        for &len in parts {
            all.remove(key, (used, len));
        }
    }

    /// Those from which most of `prompt` can be taken.
    pub(super) fn nearest(&self, key: &Key, prompt: &[u32]) -> Vec<Near<Part>> {
        let all = self.all();
        all.continued(key, prompt, key.identity.is_whole).collect()
    }

    /// How many tokens of `prompt` can be taken of one that was computed by `of`.
    pub(super) fn n_common(&self, of: Held, prompt: &[u32]) -> usize {
        let all = self.all();
        let keys = all.keys().filter(|key| key.of == of);
        let near = keys.flat_map(|key| all.continued(key, prompt, key.identity.is_whole));
        near.map(|near| near.n_common).max().unwrap_or(0)
    }
}

/// Work that an engine has.
#[derive(Debug, Clone)]
pub(super) struct Busy {
    /// No other work has or had it.
    pub(super) id: u64,
    pub(super) of: Held,
    /// What others may continue, once it is computed: the prompt of an answer.
    pub(super) prompt: Arc<[u32]>,
    /// Tokens to be computed before the first one of an answer, or before the end of other work.
    pub(super) n_left: usize,
}

impl Busy {
    /// `job`, of which nothing is computed.
    pub(super) fn new(job: &Job) -> Busy {
        let (prompt, n_left): (&[u32], usize) = match &job.work {
            Work::Generate(request) => (&request.prompt, request.prompt.len()),
            Work::Continue(continued) => {
                let generator = &continued.generator;
                (generator.tokens(), generator.n_held())
            }
            Work::Score { ids, .. } => (&[], ids.len()),
            Work::Embed { texts, .. } => (&[], texts.iter().map(Vec::len).sum()),
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Busy {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            of: Held::new(job.model, job.adapter.as_deref()),
            prompt: prompt.into(),
            n_left,
        }
    }

    /// How many tokens of the prompt are computed.
    fn n_held(&self) -> usize {
        self.prompt.len().saturating_sub(self.n_left)
    }
}

/// An answer in progress delays others as if so many tokens of a prompt were to be computed: half of an answer of
/// usual length is still to come.
const ANSWER: usize = 128;

/// An engine that has room for a job, and what it has.
pub(super) struct Offer<'a> {
    pub(super) kept: &'a Kept,
    /// Jobs that are done, and aren't kept yet.
    pub(super) done: &'a [Busy],
    pub(super) busy: Vec<&'a Busy>,
}

/// Where a job goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// To the engine with this number.
    To(usize),
    /// To none yet.
    Later,
}

/// The route of `job`, which nothing is computed of, among `offers` of engines with these numbers.
///
/// It goes where the fewest tokens are to be computed before its first one: those of prompts that the engine has left,
/// and those of its own that the engine doesn't hold, an answer in progress counting as [`ANSWER`]; of equals, to the
/// first. So it goes to the engine that holds the longest prefix of it, unless that has more to do than the others by
/// more than the prefix saves; and to the one that has least to do, if none holds anything.
///
/// Where a prompt that begins with the same is being computed there, it waits for that, and would otherwise only
/// compute the same again.
pub(super) fn route<'a>(job: &Busy, offers: impl Iterator<Item = (usize, Offer<'a>)>) -> Route {
    let mut best: Option<(usize, Route)> = None;
    for (number, offer) in offers {
        let Prefix { now, soon } = offer.prefix_of(job);
        let pending: usize = offer.busy.iter().map(|busy| busy.n_left + ANSWER).sum();
        let cost = pending + job.n_left.saturating_sub(now.max(soon));
        let pays_to_wait = soon > now + WORTH;
        let route = match pays_to_wait {
            true => Route::Later,
            false => Route::To(number),
        };
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, route));
        }
    }
    best.map_or(Route::Later, |(_, route)| route)
}

/// How many tokens of a prompt an engine has.
struct Prefix {
    now: usize,
    /// Once prompts are computed that it computes now.
    soon: usize,
}

impl Offer<'_> {
    fn prefix_of(&self, job: &Busy) -> Prefix {
        let mut prefix = Prefix {
            now: self.kept.n_common(job.of, &job.prompt),
            soon: 0,
        };
        for done in self.done.iter().filter(|done| done.of == job.of) {
            prefix.now = prefix.now.max(n_common(&done.prompt, &job.prompt));
        }
        for busy in self.busy.iter().filter(|busy| busy.of == job.of) {
            let common = n_common(&busy.prompt, &job.prompt);
            prefix.now = prefix.now.max(common.min(busy.n_held()));
            if busy.n_left > 0 {
                prefix.soon = prefix.soon.max(common);
            }
        }
        prefix
    }
}

#[cfg(test)]
mod tests {
    use super::super::tiers::Computing;
    use super::*;

    const OF: Held = Held {
        model: 0,
        adapter: None,
    };

    /// An idle sequence of the first `n` tokens.
    fn kept(n: u32) -> Busy {
        busy(n, 0)
    }

    /// An answer to the first `n` tokens, of which `n_left` are to be computed.
    fn busy(n: u32, n_left: usize) -> Busy {
        Busy {
            id: 0,
            of: OF,
            prompt: (0..n).collect(),
            n_left,
        }
    }

    /// An answer to something else.
    fn other(n_left: usize) -> Busy {
        Busy {
            id: 0,
            of: OF,
            prompt: vec![9_999; n_left].into(),
            n_left,
        }
    }

    fn key(of: Held) -> Key {
        let identity = Identity::of(&Computing {
            model: None,
            number: of.model,
            generation: 0,
            settings: "",
            device: "",
            has_states: false,
        });
        Key {
            of,
            identity,
            copy: 0,
        }
    }

    fn routed(job: &Busy, engines: &[(&[Busy], &[Busy])]) -> Route {
        let all = engines.iter().map(|(sequences, _)| {
            let kept = Kept::default();
            for (id, sequence) in (0..).zip(*sequences) {
                let ids = &sequence.prompt;
                kept.insert(key(sequence.of), id, ids, &[ids.len()]);
            }
            kept
        });
        let all: Vec<Kept> = all.collect();
        let offers = all.iter().zip(engines).map(|(kept, (_, busy))| Offer {
            kept,
            done: &[],
            busy: busy.iter().collect(),
        });
        route(job, offers.enumerate())
    }

    #[test]
    fn a_job_goes_where_the_least_is_to_be_computed_before_it() {
        use Route::{Later, To};
        let job = busy(600, 600);
        assert_eq!(route(&job, std::iter::empty()), Later);
        for (name, engines, expected) in [
            ("nothing held", [(vec![], vec![]), (vec![], vec![])], To(0)),
            (
                "less to do",
                [(vec![], vec![other(0)]), (vec![], vec![])],
                To(1),
            ),
            (
                "a shorter prompt to do",
                [(vec![], vec![other(300)]), (vec![], vec![other(200)])],
                To(1),
            ),
            (
                "a prefix",
                [(vec![], vec![]), (vec![kept(500)], vec![])],
                To(1),
            ),
            (
                "the longer prefix",
                [(vec![kept(590)], vec![]), (vec![kept(500)], vec![])],
                To(0),
            ),
            (
                "a prefix that saves more than is to do there",
                [
                    (vec![], vec![]),
                    (vec![kept(500)], vec![other(0), other(0), other(0)]),
                ],
                To(1),
            ),
            (
                "a prefix that saves less",
                [
                    (vec![], vec![]),
                    (vec![kept(500)], vec![other(200), other(100)]),
                ],
                To(0),
            ),
            (
                "a prompt that is computed now",
                [(vec![], vec![busy(500, 200)]), (vec![], vec![])],
                Later,
            ),
            (
                "the same, behind so much that it is computed sooner elsewhere",
                [(vec![], vec![busy(500, 200), other(300)]), (vec![], vec![])],
                To(1),
            ),
            (
                "a prompt that has been computed",
                [(vec![], vec![busy(500, 0)]), (vec![], vec![])],
                To(0),
            ),
        ] {
            let engines: Vec<(&[Busy], &[Busy])> = (engines.iter())
                .map(|(kept, busy)| (&kept[..], &busy[..]))
                .collect();
            assert_eq!(routed(&job, &engines), expected, "{name}");
        }
    }

    #[test]
    fn what_is_done_and_not_kept_yet_counts_as_kept() {
        let (job, kept) = (busy(600, 600), Kept::default());
        let offers = [(vec![], vec![]), (vec![busy(500, 0)], vec![])];
        let offers = offers
            .each_ref()
            .map(|(done, busy): &(Vec<Busy>, Vec<_>)| Offer {
                kept: &kept,
                done,
                busy: busy.clone(),
            });
        assert_eq!(route(&job, offers.into_iter().enumerate()), Route::To(1));
    }

    #[test]
    fn what_another_model_or_adapter_computed_counts_for_nothing() {
        let job = busy(600, 600);
        for of in [
            Held { model: 1, ..OF },
            Held {
                adapter: Some(3),
                ..OF
            },
        ] {
            let kept = Busy { of, ..kept(600) };
            let computed = Busy {
                of,
                ..busy(600, 100)
            };
            assert_eq!(
                routed(&job, &[(&[], &[]), (&[kept], &[])]),
                Route::To(0),
                "{of:?}"
            );
            assert_eq!(
                routed(&job, &[(&[], &[computed]), (&[], &[])]),
                Route::To(1),
                "{of:?}"
            );
        }
    }
}
