//! Weights of the next product, fetched by threads that wait for it.
//!
//! Between two products of one row the memory would rest: one thread norms, rounds and rotates what the next one
//! reads, for some microseconds, while the others wait. Which matrices come next follows from those that came after
//! these the last time, as the products of one token are those of the token before. A wrong guess costs some bandwidth,
//! and can't be told from a right one by what is computed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(not(target_arch = "wasm32"))]
use super::prefetch;
use crate::pool::Idle;

/// Threads at most. Of more it isn't known which comes first, and takes the first part: what another one fetched is no
/// sooner there than from memory. On 16 threads a model of trits was 7 % slower so.
const THREADS: usize = 2;
/// Matrices of a product that are looked at; what has more is mostly in the first ones.
const MATRICES: usize = 4;
/// Products that are remembered at most, before all are learned again: of several models, some of which are gone.
const PRODUCTS: usize = 1 << 14;
/// Bytes for each thread at most: a part of its own cache.
const BYTES: usize = 128 << 10;
/// Bytes between two looks whether the wait is over.
const STRIDE: usize = 512;

/// The bytes of the matrices of a product, in the order in which they are read: an address, and how many. Not slices,
/// as nothing keeps a matrix where it was; prefetches of memory that is gone do nothing.
type Product = [(usize, usize); MATRICES];

/// What threads fetch while they wait.
#[derive(Debug)]
pub(crate) struct Lookahead {
    /// Whether anything is fetched, and so worth learning.
    is_on: bool,
    /// What comes next, as far as is known.
    next: [(AtomicUsize, AtomicUsize); MATRICES],
    learned: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    last: Option<usize>,
    /// The product that came after the one whose first matrix is at an address.
    after: HashMap<usize, Product>,
}

impl Lookahead {
    /// For a pool of `n_threads`, counting the caller.
    pub(crate) fn new(n_threads: usize) -> Lookahead {
        Lookahead {
            is_on: (2..=THREADS).contains(&n_threads),
            next: Default::default(),
            learned: Mutex::default(),
        }
    }

    /// A product with these matrices begins.
    pub(super) fn begin(&self, matrices: impl Iterator<Item = (usize, usize)>) {
        if !self.is_on {
            return;
        }
        let mut product = Product::default();
        for (to, matrix) in product.iter_mut().zip(matrices) {
            *to = matrix;
        }
        let address = product[0].0;
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        let Learned { last, after } = &mut *learned;
        if let Some(last) = last.replace(address) {
            if after.len() >= PRODUCTS {
                after.clear();
            }
            after.insert(last, product);
        }
        self.announce(after.get(&address).copied().unwrap_or_default());
    }

    /// A product begins whose successor can't be learned, or for which that wouldn't pay.
    pub(super) fn skip(&self) {
        if !self.is_on {
            return;
        }
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.last = None;
        self.announce(Product::default());
    }

    fn announce(&self, product: Product) {
        for ((address, len), of) in self.next.iter().zip(product) {
            // What is read while it is replaced is a wrong guess.
            address.store(of.0, Ordering::Relaxed);
            len.store(of.1, Ordering::Relaxed);
        }
    }
}

impl Idle for Arc<Lookahead> {
    /// Fetches what the thread will probably read first.
    fn idle(&self, index: usize, n_threads: usize, is_over: &dyn Fn() -> bool) {
        if !self.is_on {
            return;
        }
        let load = |x: &AtomicUsize| x.load(Ordering::Relaxed);
        let product: Product = std::array::from_fn(|i| {
            let (address, len) = &self.next[i];
            (load(address), load(len))
        });
        for (address, len) in share(&product, index, n_threads) {
            for at in (0..len).step_by(STRIDE) {
                if is_over() {
                    return;
                }
                let from = (address as *const u8).wrapping_add(at);
                #[cfg(not(target_arch = "wasm32"))]
                prefetch::lines(prefetch::Level::Second, from, STRIDE.min(len - at));
                #[cfg(target_arch = "wasm32")]
                let _ = from;
            }
        }
    }
}

/// The parts of matrices that come first for a thread: threads take a share of half of what is left, one after the
/// other.
fn share(
    product: &Product,
    index: usize,
    n_threads: usize,
) -> impl Iterator<Item = (usize, usize)> + use<'_> {
    let all = product
        .iter()
        .fold(0, |sum: usize, (_, len)| sum.saturating_add(*len));
    let stays = 1.0 - 0.5 / n_threads.max(1) as f64;
    let taken = |n: usize| (all as f64 * (1.0 - stays.powf(n as f64))) as usize;
    let from = taken(index);
    let to = taken(index + 1).min(from.saturating_add(BYTES));
    let mut first = 0usize;
    product.iter().filter_map(move |&(address, len)| {
        let own = from.max(first)..to.min(first.saturating_add(len));
        let at = own.start.wrapping_sub(first);
        first = first.saturating_add(len);
        (!own.is_empty()).then(|| (address.wrapping_add(at), own.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(lookahead: &Lookahead) -> Vec<(usize, usize)> {
        let all = lookahead.next.iter();
        let all = all.map(|(at, n)| (at.load(Ordering::Relaxed), n.load(Ordering::Relaxed)));
        all.filter(|(_, n)| *n > 0).collect()
    }

    #[test]
    fn what_came_after_a_product_is_expected_again() {
        let lookahead = Lookahead::new(2);
        let products = [vec![(100, 5), (200, 6)], vec![(300, 7)], vec![(400, 8)]];
        for pass in 0..3 {
            for (i, product) in products.iter().enumerate() {
                lookahead.begin(product.iter().copied());
                let expected = if pass > 0 {
                    &products[(i + 1) % 3][..]
                } else {
                    &[]
                };
                assert_eq!(next(&lookahead), expected, "{pass} {i}");
            }
        }
        // Nothing is learned across what was skipped, and what is new replaces what was known.
        lookahead.skip();
        assert_eq!(next(&lookahead), []);
        lookahead.begin([(300, 7)].into_iter());
        lookahead.begin([(900, 9)].into_iter());
        lookahead.begin([(300, 7)].into_iter());
        assert_eq!(next(&lookahead), [(900, 9)]);
    }

    #[test]
    fn products_that_are_remembered_are_bounded() {
        let lookahead = Lookahead::new(2);
        for i in 0..3 * PRODUCTS {
            lookahead.begin([(i + 1, 1)].into_iter());
        }
        assert!(lookahead.learned.lock().unwrap().after.len() <= PRODUCTS);
    }

    #[test]
    fn shares_are_apart_and_within_the_matrices() {
        let product = [(1000, 300), (5000, 100), (0, 0), (9000, 1 << 20)];
        let mut bytes = Vec::new();
        for index in 0..8 {
            let own: Vec<_> = share(&product, index, 8).collect();
            assert!(own.iter().map(|(_, n)| n).sum::<usize>() <= BYTES);
            assert!(!own.is_empty());
            for (at, n) in own {
                let within =
                    |&(address, len): &(usize, usize)| at >= address && at + n <= address + len;
                assert!(product.iter().any(within), "{at} {n}");
                bytes.extend(at..at + n);
            }
        }
        let n = bytes.len();
        bytes.sort_unstable();
        bytes.dedup();
        assert_eq!(bytes.len(), n);
        assert_eq!(share(&Product::default(), 3, 8).count(), 0);
    }

    #[test]
    fn fetching_ends_when_the_wait_does() {
        let weights = vec![0u8; 1 << 16];
        let lookahead = Arc::new(Lookahead::new(2));
        let product = (weights.as_ptr() as usize, weights.len());
        lookahead.begin([product].into_iter());
        lookahead.begin([product].into_iter());
        let looks = std::cell::Cell::new(0);
        lookahead.idle(1, 2, &|| {
            looks.set(looks.get() + 1);
            looks.get() == 3
        });
        assert_eq!(looks.get(), 3);
        // The second of two threads takes a quarter of what the first one leaves, three quarters.
        looks.set(0);
        lookahead.idle(1, 2, &|| {
            looks.set(looks.get() + 1);
            false
        });
        assert_eq!(looks.get(), (weights.len() * 3 / 16).div_ceil(STRIDE));
    }
}
