//! Weights of the next product, fetched by threads that wait for it.
//!
//! Between two products of one row the memory would rest: one thread norms, rounds and rotates what the next one
//! reads, for some microseconds, while the others wait. Which matrices come next follows from those that came after
//! these the last time, as the products of one token are those of the token before. A thread fetches what it reads first,
//! its [own](own_items) tasks: what another core has fetched comes no sooner than from memory. A wrong guess costs some
//! bandwidth, and can't be told from a right one by what is computed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(not(target_arch = "wasm32"))]
use super::prefetch;
use crate::pool::{Idle, own_items};

/// Matrices of a product that are looked at; what has more is mostly in the first ones.
const MATRICES: usize = 4;
/// Products that are remembered at most, before all are learned again: of several models, some of which are gone.
const PRODUCTS: usize = 1 << 14;
/// Bytes for each thread at most: a part of its own cache.
const BYTES: usize = 128 << 10;
/// Bytes between two looks whether the wait is over.
const STRIDE: usize = 512;

/// The matrices of a product, in the order in which they are read.
type Product = [Part; MATRICES];

/// The bytes of a matrix, and how many of them a task reads. Not a slice, as nothing keeps a matrix where it was;
/// prefetches of memory that is gone do nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Part {
    pub address: usize,
    pub len: usize,
    pub per_task: usize,
}

/// What threads fetch while they wait.
#[derive(Debug)]
pub(crate) struct Lookahead {
    /// Whether anything is fetched, and so worth learning.
    is_on: bool,
    /// What comes next, as far as is known.
    next: [[AtomicUsize; 3]; MATRICES],
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
            is_on: n_threads > 1,
            next: Default::default(),
            learned: Mutex::default(),
        }
    }

    /// A product with these matrices begins.
    pub(super) fn begin(&self, matrices: impl Iterator<Item = Part>) {
        if !self.is_on {
            return;
        }
        let mut product = Product::default();
        for (to, matrix) in product.iter_mut().zip(matrices) {
            *to = matrix;
        }
        let address = product[0].address;
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

    /// What was announced.
    fn expected(&self) -> Product {
        std::array::from_fn(|i| {
            let [address, len, per_task] =
                std::array::from_fn(|field| self.next[i][field].load(Ordering::Relaxed));
            Part {
                address,
                len,
                per_task,
            }
        })
    }

    fn announce(&self, product: Product) {
        for (to, part) in self.next.iter().zip(product) {
            // What is read while it is replaced is a wrong guess.
            for (to, value) in to.iter().zip([part.address, part.len, part.per_task]) {
                to.store(value, Ordering::Relaxed);
            }
        }
    }
}

impl Idle for Arc<Lookahead> {
    /// Fetches what the thread will probably read first.
    fn idle(&self, index: usize, n_threads: usize, is_over: &dyn Fn() -> bool) {
        if !self.is_on {
            return;
        }
        for (address, len) in share(&self.expected(), index, n_threads) {
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

/// The bytes that a thread reads first, an address and how many each time: those of its own tasks.
fn share(
    product: &Product,
    index: usize,
    n_threads: usize,
) -> impl Iterator<Item = (usize, usize)> + use<'_> {
    let n_tasks = |part: &Part| part.len.div_ceil(part.per_task.max(1));
    let own = own_items(product.iter().map(n_tasks).sum(), index, n_threads);
    let (mut first, mut left) = (0, BYTES);
    product.iter().filter_map(move |part| {
        let within = |task: usize| part.len.min((task.saturating_sub(first)) * part.per_task);
        let (from, to) = (within(own.start), within(own.end));
        first += n_tasks(part);
        let n = (to - from).min(left);
        left -= n;
        (n > 0).then(|| (part.address.wrapping_add(from), n))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(address: usize, len: usize, per_task: usize) -> Part {
        Part {
            address,
            len,
            per_task,
        }
    }

    fn expected(lookahead: &Lookahead) -> Vec<Part> {
        let mut parts = lookahead.expected().to_vec();
        parts.retain(|part| part.len > 0);
        parts
    }

    #[test]
    fn what_came_after_a_product_is_expected_again() {
        let lookahead = Lookahead::new(2);
        let products = [
            vec![part(100, 5, 5), part(200, 6, 2)],
            vec![part(300, 7, 2)],
            vec![part(400, 8, 2)],
        ];
        for pass in 0..3 {
            for (i, product) in products.iter().enumerate() {
                lookahead.begin(product.iter().copied());
                let next = if pass > 0 {
                    &products[(i + 1) % 3][..]
                } else {
                    &[]
                };
                assert_eq!(expected(&lookahead), next, "{pass} {i}");
            }
        }
        // Nothing is learned across what was skipped, and what is new replaces what was known.
        lookahead.skip();
        assert_eq!(expected(&lookahead), []);
        lookahead.begin([part(300, 7, 2)].into_iter());
        lookahead.begin([part(900, 9, 2)].into_iter());
        lookahead.begin([part(300, 7, 2)].into_iter());
        assert_eq!(expected(&lookahead), [part(900, 9, 2)]);
    }

    #[test]
    fn products_that_are_remembered_are_bounded() {
        let lookahead = Lookahead::new(2);
        for i in 0..3 * PRODUCTS {
            lookahead.begin([part(i + 1, 1, 1)].into_iter());
        }
        assert!(lookahead.learned.lock().unwrap().after.len() <= PRODUCTS);
    }

    #[test]
    fn shares_are_the_bytes_of_a_threads_own_tasks() {
        // Tasks 0 to 2 of 100 bytes and one of 50, one of 100, none, and 1,024 of 1,000 bytes, the last of 24.
        let product = [
            part(1000, 350, 100),
            part(5000, 100, 100),
            Part::default(),
            part(9000, 1_023_024, 1000),
        ];
        let n_tasks = 4 + 1 + 1024;
        let bytes_of = |task: usize| match task {
            0..3 => (1000 + 100 * task, 100),
            3 => (1300, 50),
            4 => (5000, 100),
            1028 => (9000 + 1_023_000, 24),
            _ => (9000 + 1000 * (task - 5), 1000),
        };
        for n_threads in [2, 7, 16, 300, 2000] {
            for index in 0..n_threads {
                let own = own_items(n_tasks, index, n_threads);
                let want = own.map(bytes_of).flat_map(|(at, n)| at..at + n).take(BYTES);
                let got = share(&product, index, n_threads).flat_map(|(at, n)| at..at + n);
                assert!(got.eq(want), "{index} of {n_threads}");
            }
        }
        assert_eq!(share(&Product::default(), 3, 8).count(), 0);
    }

    #[test]
    fn fetching_ends_when_the_wait_does() {
        let weights = vec![0u8; 1 << 16];
        let lookahead = Arc::new(Lookahead::new(2));
        let product = part(weights.as_ptr().addr(), weights.len(), 1 << 12);
        lookahead.begin([product].into_iter());
        lookahead.begin([product].into_iter());
        let looks = std::cell::Cell::new(0);
        lookahead.idle(1, 2, &|| {
            looks.set(looks.get() + 1);
            looks.get() == 3
        });
        assert_eq!(looks.get(), 3);
        // The second of two threads has a quarter for its own.
        looks.set(0);
        lookahead.idle(1, 2, &|| {
            looks.set(looks.get() + 1);
            false
        });
        assert_eq!(looks.get(), weights.len() / 4 / STRIDE);
    }
}
