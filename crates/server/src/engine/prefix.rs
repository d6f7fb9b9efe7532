//! Which sequence a prompt continues.

/// Tokens that are worth keeping: with fewer in common a sequence isn't forked, and with more that a prompt
/// doesn't continue it isn't taken away from its conversation.
pub(super) const WORTH: usize = 8;

/// A sequence that a prompt may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate<Id> {
    pub(super) id: Id,
    /// Its tokens.
    pub(super) len: usize,
    /// Those that the prompt begins with.
    pub(super) n_common: usize,
    /// It answers another request.
    pub(super) is_busy: bool,
}

/// What to begin an answer on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice<Id> {
    /// This sequence, which nobody else needs as it is.
    Take(Id),
    /// A fork of this one, of so many tokens.
    Fork(Id, usize),
    /// An empty one.
    New,
}

/// The choice among `candidates`; of equals, the last.
pub(super) fn choose<Id: Copy>(candidates: impl Iterator<Item = Candidate<Id>>) -> Choice<Id> {
    // What would be lost by taking one counts against it.
    let best = candidates.max_by_key(|c| (c.n_common, !c.is_busy, usize::MAX - c.len));
    match best {
        Some(c) if !c.is_busy && c.len - c.n_common <= WORTH => Choice::Take(c.id),
        Some(c) if c.n_common > WORTH => Choice::Fork(c.id, c.n_common),
        _ => Choice::New,
    }
}

/// The length of the common prefix of `a` and `b`.
pub(super) fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_wins_and_no_conversation_is_lost() {
        let candidate = |id, len, n_common, is_busy| Candidate {
            id,
            len,
            n_common,
            is_busy,
        };
        for (candidates, expected) in [
            (vec![], Choice::New),
            // The next turn of a conversation.
            (vec![candidate(0, 100, 100, false)], Choice::Take(0)),
            (vec![candidate(0, 105, 100, false)], Choice::Take(0)),
            // Another conversation with the same instructions.
            (vec![candidate(0, 400, 100, false)], Choice::Fork(0, 100)),
            (vec![candidate(0, 100, 100, true)], Choice::Fork(0, 100)),
            // The token that all texts begin with.
            (vec![candidate(0, 400, 1, false)], Choice::New),
            (vec![candidate(0, 400, 1, true)], Choice::New),
            (vec![candidate(0, 0, 0, false)], Choice::Take(0)),
            // Of equals, one that is free, and the one of which least is lost.
            (
                vec![candidate(0, 95, 90, true), candidate(1, 95, 90, false)],
                Choice::Take(1),
            ),
            (
                vec![candidate(0, 95, 90, false), candidate(1, 400, 90, false)],
                Choice::Take(0),
            ),
            (
                vec![candidate(0, 90, 90, false), candidate(1, 200, 150, true)],
                Choice::Fork(1, 150),
            ),
        ] {
            assert_eq!(
                choose(candidates.iter().copied()),
                expected,
                "{candidates:?}"
            );
        }
    }

    #[test]
    fn prefixes_end_where_texts_differ() {
        assert_eq!(n_common(&[1, 2, 3], &[1, 2, 4, 3]), 2);
        assert_eq!(n_common(&[], &[1]), 0);
    }
}
