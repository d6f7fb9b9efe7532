use std::collections::HashSet;

use proptest::prelude::*;

use super::tree::Tree;
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

type Sequences = Vec<(u64, Vec<u32>)>;

/// What is nearest by comparing with each.
fn nearest(all: &Sequences, prompt: &[u32]) -> Option<Near<u64>> {
    let near = all.iter().map(|(id, ids)| Near {
        id: *id,
        len: ids.len(),
        n_common: n_common(ids, prompt),
    });
    near.max_by_key(|near| (near.n_common, usize::MAX - near.len, near.id))
}

/// What `prompt` begins with by comparing with each.
fn beginnings(all: &Sequences, prompt: &[u32]) -> Vec<(usize, u64)> {
    let own = all.iter().filter(|(_, ids)| prompt.starts_with(ids));
    let mut own: Vec<_> = own.map(|(id, ids)| (ids.len(), *id)).collect();
    own.sort_unstable();
    own
}

fn check(tree: &Tree<u64>, all: &Sequences, prompts: &[Vec<u32>]) {
    // What several begin with is there once.
    let distinct: HashSet<&[u32]> = all
        .iter()
        .flat_map(|(_, ids)| (1..=ids.len()).map(|n| &ids[..n]))
        .collect();
    let (n_nodes, n_tokens) = tree.size();
    assert_eq!(n_tokens, distinct.len());
    assert!(n_nodes <= 2 * all.len() + 1, "{n_nodes} nodes");
    assert_eq!(tree.is_empty(), all.is_empty());
    for prompt in all.iter().map(|(_, ids)| ids).chain(prompts) {
        assert_eq!(tree.nearest(prompt), nearest(all, prompt), "{prompt:?}");
        let found = tree.beginnings(prompt).collect::<Vec<_>>();
        assert!(found.is_sorted_by_key(|near| usize::MAX - near.len));
        assert!(found.iter().all(|near| near.n_common == near.len));
        let mut found: Vec<_> = found.iter().map(|near| (near.len, near.id)).collect();
        found.sort_unstable();
        assert_eq!(found, beginnings(all, prompt), "{prompt:?}");
    }
}

/// Tokens of which many sequences have some in common; ids of tokens may be any.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![Just(0u32), Just(1), Just(u32::MAX)];
    prop::collection::vec(token, 0..9)
}

#[derive(Debug, Clone)]
enum Change {
    Insert(Vec<u32>),
    /// Like another, as far as that, and then so.
    Branch(usize, usize, Vec<u32>),
    Grow(usize, Vec<u32>),
    /// To be as long as that.
    Shrink(usize, usize),
    Remove(usize),
}

fn change() -> impl Strategy<Value = Change> {
    let at = || 0usize..100;
    prop_oneof![
        tokens().prop_map(Change::Insert),
        (at(), at(), tokens()).prop_map(|(of, len, ids)| Change::Branch(of, len, ids)),
        (at(), tokens()).prop_map(|(of, ids)| Change::Grow(of, ids)),
        (at(), at()).prop_map(|(of, len)| Change::Shrink(of, len)),
        at().prop_map(Change::Remove),
    ]
}

proptest! {
    /// Whatever came, grew and went.
    #[test]
    fn the_tree_finds_what_comparing_finds(
        changes in prop::collection::vec(change(), 1..40),
        prompts in prop::collection::vec(tokens(), 1..9),
    ) {
        let mut tree = Tree::default();
        let mut all = Sequences::new();
        for (at, change) in changes.into_iter().enumerate() {
            let id = at as u64;
            // Those that change are any of those that are there.
            let n = all.len().max(1);
            match change {
                Change::Insert(ids) => {
                    tree.insert(id, &ids);
                    all.push((id, ids));
                }
                Change::Branch(of, len, more) => {
                    let of = all.get(of % n).map_or(&[][..], |(_, ids)| ids);
                    let ids = [&of[..len.min(of.len())], &more].concat();
                    tree.grow(id, &ids);
                    all.push((id, ids));
                }
                Change::Grow(of, more) => if let Some((id, ids)) = all.get_mut(of % n) {
                    ids.extend(more);
                    tree.grow(*id, ids);
                }
                Change::Shrink(of, len) => if let Some((id, ids)) = all.get_mut(of % n) {
                    ids.truncate(len % 9);
                    tree.grow(*id, ids);
                }
                Change::Remove(of) => {
                    if !all.is_empty() {
                        tree.remove(all.remove(of % n).0);
                    }
                    // Nothing is called so.
                    tree.remove(u64::MAX);
                }
            }
            check(&tree, &all, &prompts);
        }
        for (id, _) in all {
            tree.remove(id);
        }
        prop_assert_eq!(tree.size(), (1, 0));
    }

    /// The choice is the one among all sequences, idle ones in the order in which they were used, and busy ones after
    /// them.
    #[test]
    fn the_nearest_of_each_kind_are_enough_to_choose(
        idle in prop::collection::vec(long(), 0..9),
        busy in prop::collection::vec(long(), 0..5),
        prompt in long(),
    ) {
        let mut trees = [Prefixes::default(), Prefixes::default()];
        let mut all = Vec::new();
        let kinds = idle.iter().map(|ids| (ids, false)).chain(busy.iter().map(|ids| (ids, true)));
        for (id, (ids, is_busy)) in kinds.enumerate() {
            trees[usize::from(is_busy)].insert((), id, ids);
            let near = Near { id, len: ids.len(), n_common: n_common(ids, &prompt) };
            all.push(candidate(near, is_busy));
        }
        let nearest = [false, true].into_iter().filter_map(|is_busy| {
            let near = trees[usize::from(is_busy)].nearest(&(), &prompt)?;
            Some(candidate(near, is_busy))
        });
        prop_assert_eq!(choose(nearest), choose(all.into_iter()));
    }
}

fn candidate(Near { id, len, n_common }: Near<usize>, is_busy: bool) -> Candidate<usize> {
    Candidate {
        id,
        len,
        n_common,
        is_busy,
    }
}

/// Tokens of which more may be in common than are worth keeping.
fn long() -> impl Strategy<Value = Vec<u32>> {
    let part = prop_oneof![Just([1; 7]), Just([2; 7])];
    (prop::collection::vec(part, 0..4), tokens()).prop_map(|(parts, rest)| {
        let parts: Vec<u32> = parts.concat();
        [parts, rest].concat()
    })
}

#[test]
fn what_computed_a_sequence_tells_it_from_others() {
    let mut all = Prefixes::default();
    for key in 0..3 {
        all.insert(key, 10 + key, &[1, 2, key]);
    }
    let near = |id, n_common| Near {
        id,
        len: 3,
        n_common,
    };
    assert_eq!(all.nearest(&1, &[1, 2, 2]), Some(near(11, 2)));
    assert_eq!(all.nearest(&2, &[1, 2, 2]), Some(near(12, 3)));
    assert_eq!(all.nearest(&3, &[1, 2, 2]), None);
    assert_eq!(all.beginnings(&1, &[1, 2, 2]).next(), None);
    assert_eq!(all.beginnings(&2, &[1, 2, 2]).next(), Some(near(12, 3)));
    all.remove(&2, 12);
    assert_eq!(all.nearest(&2, &[1, 2, 2]), None);
    assert_eq!(all.keys().count(), 2);
}

/// Each of these sequences begins with the one before: whoever asks for that decides how deep the tree is.
#[test]
fn depth_takes_no_stack() {
    const DEPTH: u32 = 4_000;
    let deep = || {
        let ids: Vec<u32> = (0..DEPTH).collect();
        let mut tree = Tree::default();
        for len in 0..=ids.len() {
            tree.insert(len, &ids[..len]);
        }
        assert_eq!(tree.beginnings(&ids).count(), ids.len() + 1);
        for len in (0..ids.len()).step_by(2) {
            tree.remove(len);
        }
        let near = tree.nearest(&ids[..101]).unwrap();
        assert_eq!((near.id, near.n_common), (101, 101));
        assert_eq!(tree.size().1, ids.len());
    };
    let thread = std::thread::Builder::new().stack_size(128 << 10);
    thread.spawn(deep).unwrap().join().unwrap();
}

/// Prints what docs/benchmarks-history.md has.
#[test]
#[ignore = "a measurement"]
fn what_finding_takes() {
    let mut state = 0u64;
    let mut random = |n: usize| -> Vec<u32> {
        let mut next = || {
            // The numbers of Knuth's MMIX.
            state = state.wrapping_mul(6_364_136_223_846_793_005);
            state = state.wrapping_add(1_442_695_040_888_963_407);
            (state >> 48) as u32
        };
        (0..n).map(|_| next()).collect()
    };
    let instructions = random(2_000);
    for n in [1_000, 10_000] {
        let mut tree = Tree::default();
        let mut all = Sequences::new();
        for id in 0..n {
            all.push((id, [&instructions[..], &random(2_000)].concat()));
        }
        let own = all.iter();
        let inserts = median(own.map(|(id, ids)| timed(|| tree.insert(*id, ids)).1));
        println!("{n} sequences of {} tokens:", tree.size().1);
        let turns = (0..20).map(|at| {
            let (_, ids) = &all[at * all.len() / 20];
            [&ids[..], &random(50)].concat()
        });
        let turns: Vec<Vec<u32>> = turns.collect();
        let others = (0..20).map(|_| [&instructions[..], &random(2_000)].concat());
        let others: Vec<Vec<u32>> = others.collect();
        for (name, prompts) in [("next turns", turns), ("other conversations", others)] {
            let times = prompts.iter().map(|prompt| {
                let (expected, by_each) = timed(|| nearest(&all, prompt));
                // What comparing has read isn't near any more where it is looked for.
                let (found, by_tree) = timed(|| tree.nearest(prompt));
                assert_eq!(found, expected);
                (by_each, by_tree)
            });
            let (by_each, by_tree): (Vec<_>, Vec<_>) = times.unzip();
            let (by_each, by_tree) = (median(by_each.into_iter()), median(by_tree.into_iter()));
            println!("  {name}: {by_each:.1} µs by comparing, {by_tree:.1} µs by the tree");
        }
        let grows = median(all.iter_mut().map(|(id, ids)| {
            ids.push(1);
            timed(|| tree.grow(*id, ids)).1
        }));
        let removes = median(all.iter().map(|(id, _)| timed(|| tree.remove(*id)).1));
        println!("  insert {inserts:.2} µs, a token more {grows:.2} µs, remove {removes:.2} µs");
    }
}

/// What `run` returns, and how many microseconds it took.
fn timed<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let begun = std::time::Instant::now();
    let out = std::hint::black_box(run());
    (out, begun.elapsed().as_secs_f64() * 1e6)
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}
