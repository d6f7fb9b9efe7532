//! A radix tree over tokens.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::{Near, n_common};

/// Sequences of tokens by their ids, found by what a prompt has in common with them. What several begin with is there
/// once.
///
/// Nodes refer to each other by place, and nothing recurses: requests decide how deep it is.
pub(super) struct Tree<Id> {
    nodes: Vec<Node<Id>>,
    /// Places of `nodes` without one.
    free: Vec<usize>,
    /// The nodes where sequences end.
    ends: HashMap<Id, usize>,
}

/// Where sequences end, or go on differently.
struct Node<Id> {
    /// The tokens that lead here from the parent: some, unless it is the root.
    edge: Vec<u32>,
    /// All tokens that lead here.
    len: usize,
    /// `None` of the root.
    parent: Option<usize>,
    /// By the first token of their edges.
    children: BTreeMap<u32, usize>,
    /// The sequences that end here.
    ids: Vec<Id>,
    /// The best of those that end here or below.
    best: Option<Rank<Id>>,
}

/// Of sequences that have as much in common with a prompt, the shortest is the best, and of these the last. The least
/// rank is the best.
type Rank<Id> = (usize, Reverse<Id>);

const ROOT: usize = 0;

impl<Id> Node<Id> {
    fn new(edge: &[u32], len: usize, parent: Option<usize>) -> Node<Id> {
        Node {
            edge: edge.to_vec(),
            len,
            parent,
            children: BTreeMap::new(),
            ids: Vec::new(),
            best: None,
        }
    }
}

impl<Id> Default for Tree<Id> {
    fn default() -> Tree<Id> {
        Tree {
            nodes: vec![Node::new(&[], 0, None)],
            free: Vec::new(),
            ends: HashMap::new(),
        }
    }
}

impl<Id: Copy + Ord + Hash> Tree<Id> {
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Adds the sequence `id` of `ids`, in place of what had that id.
    pub(super) fn insert(&mut self, id: Id, ids: &[u32]) {
        self.remove(id);
        let node = self.reach(ROOT, ids);
        self.add(id, node);
    }

    /// The sequence `id`, which may be new, is `ids` now: what it was, and what has followed since. That takes as long as
    /// what followed is; one that became shorter is added anew.
    pub(super) fn grow(&mut self, id: Id, ids: &[u32]) {
        let end = self.ends.get(&id).map(|&node| (node, self.nodes[node].len));
        let Some((node, more)) = end.and_then(|(node, len)| Some((node, ids.get(len..)?))) else {
            return self.insert(id, ids);
        };
        if more.is_empty() {
            return;
        }
        let own = &mut self.nodes[node];
        let before = (own.len, Reverse(id));
        if own.parent.is_some() && own.children.is_empty() && own.ids.len() == 1 {
            own.edge.extend(more);
            own.len += more.len();
            self.worsen(node, before);
            return;
        }
        let end = self.reach(node, more);
        self.nodes[node].ids.retain(|other| *other != id);
        self.add(id, end);
        self.worsen(node, before);
        self.tidy(node);
    }

    /// Removes the sequence `id`, if there is one.
    pub(super) fn remove(&mut self, id: Id) {
        let Some(node) = self.ends.remove(&id) else {
            return;
        };
        let own = &mut self.nodes[node];
        own.ids.retain(|other| *other != id);
        let rank = (own.len, Reverse(id));
        self.worsen(node, rank);
        self.tidy(node);
    }

    /// The sequence that has most in common with `prompt`; of equals the shortest, and of these the last.
    pub(super) fn nearest(&self, prompt: &[u32]) -> Option<Near<Id>> {
        let (node, n_common) = self.follow(prompt);
        let (len, Reverse(id)) = self.nodes[node].best?;
        Some(Near { id, len, n_common })
    }

    /// The sequences that `prompt` begins with, the longest first.
    pub(super) fn beginnings(&self, prompt: &[u32]) -> impl Iterator<Item = Near<Id>> {
        let (node, n_common) = self.follow(prompt);
        let mut at = Some(node);
        if self.nodes[node].len > n_common {
            at = self.nodes[node].parent;
        }
        let up = std::iter::successors(at, |&node| self.nodes[node].parent);
        up.flat_map(|node| {
            let Node { len, ids, .. } = &self.nodes[node];
            ids.iter().map(|&id| Near {
                id,
                len: *len,
                n_common: *len,
            })
        })
    }

    /// The last node on the way that `prompt` leads, of whose edge it may have a part only, and how many tokens of it lead
    /// there.
    fn follow(&self, prompt: &[u32]) -> (usize, usize) {
        let (mut node, mut n) = (ROOT, 0);
        while n == self.nodes[node].len
            && let Some(next) = prompt.get(n)
            && let Some(&child) = self.nodes[node].children.get(next)
        {
            n += n_common(&self.nodes[child].edge, &prompt[n..]);
            node = child;
        }
        (node, n)
    }

    /// The node to which `ids` lead from `node`, made if there is none.
    fn reach(&mut self, mut node: usize, mut ids: &[u32]) -> usize {
        while let Some(first) = ids.first() {
            let Some(&child) = self.nodes[node].children.get(first) else {
                let len = self.nodes[node].len + ids.len();
                return self.hang(node, Node::new(ids, len, Some(node)));
            };
            let n = n_common(&self.nodes[child].edge, ids);
            node = match n == self.nodes[child].edge.len() {
                true => child,
                false => self.split(node, child, n),
            };
            ids = &ids[n..];
        }
        node
    }

    /// Adds `new` below `parent`, in place of what begins with the same token, and returns its place.
    fn hang(&mut self, parent: usize, new: Node<Id>) -> usize {
        let first = new.edge[0];
        let place = match self.free.pop() {
            Some(place) => {
                self.nodes[place] = new;
                place
            }
            None => {
                self.nodes.push(new);
                self.nodes.len() - 1
            }
        };
        self.nodes[parent].children.insert(first, place);
        place
    }

    /// Makes a node of the first `n` tokens of the edge from `parent` to `child`, neither none nor all, and returns its
    /// place.
    fn split(&mut self, parent: usize, child: usize, n: usize) -> usize {
        let lower = &mut self.nodes[child];
        let mut upper = Node::new(&lower.edge[..n], 0, Some(parent));
        lower.edge = lower.edge.split_off(n);
        upper.len = lower.len - lower.edge.len();
        upper.best = lower.best;
        upper.children.insert(lower.edge[0], child);
        let upper = self.hang(parent, upper);
        self.nodes[child].parent = Some(upper);
        upper
    }

    /// Records that the sequence `id` ends at `node`.
    fn add(&mut self, id: Id, node: usize) {
        self.ends.insert(id, node);
        self.nodes[node].ids.push(id);
        let rank = (self.nodes[node].len, Reverse(id));
        let mut at = Some(node);
        while let Some(node) = at {
            let node = &mut self.nodes[node];
            if node.best.is_some_and(|best| best < rank) {
                return;
            }
            node.best = Some(rank);
            at = node.parent;
        }
    }

    /// Finds out what is best at `node`, and above, once `rank` is there no more.
    fn worsen(&mut self, node: usize, rank: Rank<Id>) {
        let mut at = Some(node);
        while let Some(place) = at {
            let node = &self.nodes[place];
            if node.best != Some(rank) {
                return;
            }
            let own = node.ids.iter().map(|&id| (node.len, Reverse(id)));
            let children = node.children.values();
            let below = children.filter_map(|&child| self.nodes[child].best);
            let best = own.chain(below).min();
            at = node.parent;
            self.nodes[place].best = best;
        }
    }

    /// Removes `node` if nothing ends or parts there any more.
    fn tidy(&mut self, node: usize) {
        let mut at = node;
        loop {
            let own = &self.nodes[at];
            let Some(parent) = own.parent.filter(|_| own.ids.is_empty()) else {
                return;
            };
            let mut children = own.children.values();
            match (children.next(), children.next()) {
                (None, _) => {
                    let gone = self.take(at);
                    self.nodes[parent].children.remove(&gone.edge[0]);
                    at = parent;
                }
                (Some(&child), None) => {
                    let mut gone = self.take(at);
                    self.nodes[parent].children.insert(gone.edge[0], child);
                    let child = &mut self.nodes[child];
                    child.parent = Some(parent);
                    gone.edge.append(&mut child.edge);
                    gone.edge.shrink_to_fit();
                    child.edge = gone.edge;
                    return;
                }
                _ => return,
            }
        }
    }

    /// Takes a node out of its place.
    fn take(&mut self, place: usize) -> Node<Id> {
        self.free.push(place);
        std::mem::replace(&mut self.nodes[place], Node::new(&[], 0, None))
    }

    /// How many nodes there are, and tokens in them.
    #[cfg(test)]
    pub(super) fn size(&self) -> (usize, usize) {
        let n_tokens = self.nodes.iter().map(|node| node.edge.len()).sum();
        (self.nodes.len() - self.free.len(), n_tokens)
    }
}
