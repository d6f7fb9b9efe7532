//! Pages of keys and values, which the sequences of a model share, and places for states beside them.
//!
//! A page has one number in all layers, whose memory has as many. It grows by copying, all layers at once, as long as
//! a buffer of the device may be that large; what doesn't fit goes to another pool.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sterna_gpu::graph::{Graph, Shared};
use sterna_gpu::kernels::attention::{CacheLayer, PAGE_LEN};
use sterna_gpu::{Device, GpuError};

use super::numbers::{FreeNumbers, Number};
use super::places::Places;
use crate::backend::{CacheShape, CacheType, KvHeads};

/// Initially allocated pages.
const FIRST_PAGES: usize = 4;

/// Up to so many pages, memory doubles as it grows; beyond that by a quarter of a power of two.
const DOUBLED_PAGES: usize = 64;

/// Memory of a layer for pages of at least `n_positions`.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn memory(
    device: &Device,
    heads: KvHeads,
    dtype: CacheType,
    n_positions: usize,
) -> Result<CacheLayer, GpuError> {
    let n_pages = n_positions.div_ceil(PAGE_LEN);
    let most = most_pages(device, heads, dtype).max(n_pages);
    layer(device, heads, dtype, with_reserve(n_pages, most))
}

fn layer(
    device: &Device,
    KvHeads {
        n_kv_heads,
        head_dim,
        values,
    }: KvHeads,
    dtype: CacheType,
    n_pages: usize,
) -> Result<CacheLayer, GpuError> {
    CacheLayer::new(device, n_kv_heads, head_dim, dtype, values, n_pages)
}

fn most_pages(device: &Device, heads: KvHeads, dtype: CacheType) -> usize {
    CacheLayer::most_pages(device, heads.n_kv_heads, heads.head_dim, dtype)
}

/// How many pages to allocate where `need` are needed and there is room for `most`.
fn with_reserve(need: usize, most: usize) -> usize {
    let step = match need.next_power_of_two() {
        power if power <= DOUBLED_PAGES => power,
        power => power / 8,
    };
    need.next_multiple_of(step).max(FIRST_PAGES).min(most)
}

/// The pools there are, by the shape of their caches. Clones share them; a pool lives as long as a sequence is in it.
#[derive(Debug, Clone, Default)]
pub(super) struct PagePools(Arc<Mutex<Vec<Weak<PagePool>>>>);

impl PagePools {
    /// A pool for caches of `shape`: the newest there is, or a new one.
    pub(super) fn get(&self, shape: &CacheShape) -> Arc<PagePool> {
        let mut pools = lock(&self.0);
        pools.retain(|pool| pool.strong_count() > 0);
        let mut known = pools.iter().rev().filter_map(Weak::upgrade);
        let known = known.find(|pool| pool.shape == *shape);
        known.unwrap_or_else(|| add(&mut pools, shape))
    }

    /// Another one.
    fn add(&self, shape: &CacheShape) -> Arc<PagePool> {
        add(&mut lock(&self.0), shape)
    }
}

fn add(pools: &mut Vec<Weak<PagePool>>, shape: &CacheShape) -> Arc<PagePool> {
    let new = PagePool::new(shape);
    pools.push(Arc::downgrade(&new));
    new
}

/// Memory that sequences have their pages in, and their states.
#[derive(Debug)]
pub(super) struct PagePool {
    shape: CacheShape,
    pub(super) places: Places,
    /// Counts how often memory has become other memory.
    n_moves: Arc<AtomicU64>,
    free: FreeNumbers,
    memory: Mutex<Memory>,
}

#[derive(Debug)]
struct Memory {
    n_pages: usize,
    /// Of at least as many pages; `None` before the layer's first token. Those of layers without keys and values, or
    /// which are computed elsewhere, stay so.
    layers: Vec<Option<Shared<CacheLayer>>>,
    /// Where pages are copied to, on their way to others of the same layer.
    between: Vec<Option<CacheLayer>>,
}

/// Whether the memory of a pool is other memory than when it was asked.
#[derive(Debug)]
pub(super) struct Moves {
    n_moves: Arc<AtomicU64>,
    seen: u64,
}

impl Moves {
    /// While the graph is locked, the answer stays the same.
    pub(super) fn are_there(&self) -> bool {
        self.n_moves.load(Ordering::Relaxed) != self.seen
    }
}

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PagePool {
    fn new(shape: &CacheShape) -> Arc<PagePool> {
        let n_moves = Arc::default();
        Arc::new(PagePool {
            shape: shape.clone(),
            places: Places::new(shape.layers.len(), &n_moves),
            n_moves,
            free: FreeNumbers::default(),
            memory: Mutex::new(Memory {
                n_pages: 0,
                layers: vec![None; shape.layers.len()],
                between: vec![None; shape.layers.len()],
            }),
        })
    }

    /// `n` pages with unspecified contents.
    ///
    /// Errors: those of [`CacheLayer::new`], after which there are as many as before.
    pub(super) fn take(
        &self,
        device: &Device,
        graph: &mut Graph,
        n: usize,
    ) -> Result<Vec<Arc<Number>>, GpuError> {
        let mut memory = lock(&self.memory);
        let n_free = self.free.len();
        if n_free < n {
            self.grow(device, graph, &mut memory, n - n_free)?;
        }
        Ok(self.free.take(n))
    }

    /// `n` pages, or as many as are free.
    pub(super) fn take_free(&self, n: usize) -> Vec<Arc<Number>> {
        // Whoever takes a number of them has the lock meanwhile.
        let _memory = lock(&self.memory);
        self.free.take(n)
    }

    fn grow(
        &self,
        device: &Device,
        graph: &mut Graph,
        memory: &mut Memory,
        more: usize,
    ) -> Result<(), GpuError> {
        let heads = self.shape.layers.iter();
        let most = heads.map(|heads| most_pages(device, *heads, self.shape.dtype));
        let most = most.min().unwrap_or(usize::MAX);
        let need = memory.n_pages + more;
        if need > most {
            return Err(GpuError::Unsupported {
                what: format!("caches of {} positions together", need * PAGE_LEN),
                reason: format!("a buffer of the device holds {}", most * PAGE_LEN),
            });
        }
        let n_pages = with_reserve(need, most);
        if memory.layers.iter().any(Option::is_some) {
            // What is copied may not have been computed yet, and recorded commands would keep the old memory alive.
            // Whoever repeats steps on the old memory stops: the graph is locked.
            graph.flush()?;
            graph.forget();
            self.n_moves.fetch_add(1, Ordering::Relaxed);
        }
        for (of, heads) in memory.layers.iter_mut().zip(&*self.shape.layers) {
            let Some(old) = of else { continue };
            if old.n_pages() < n_pages {
                let new = layer(device, *heads, self.shape.dtype, n_pages)?;
                let pages = (0..old.n_pages() as u32).map(|page| [page; 2]);
                device.copy_all(&old.copies(&new, &pages.collect::<Vec<_>>())?)?;
                *of = Some(Shared::new(new));
            }
        }
        self.free.add(memory.n_pages as u32..n_pages as u32);
        memory.n_pages = n_pages;
        Ok(())
    }

    /// The memory of `layer`.
    pub(super) fn layer(
        &self,
        device: &Device,
        layer: usize,
    ) -> Result<Shared<CacheLayer>, GpuError> {
        let mut memory = lock(&self.memory);
        let n_pages = memory.n_pages;
        if let Some(known) = &memory.layers[layer] {
            return Ok(known.clone());
        }
        let new = self::layer(device, self.shape.layers[layer], self.shape.dtype, n_pages)?;
        Ok(memory.layers[layer].insert(Shared::new(new)).clone())
    }

    /// How to learn that commands of layers have to be recorded anew, for other memory.
    pub(super) fn moves(&self) -> Moves {
        Moves {
            seen: self.n_moves.load(Ordering::Relaxed),
            n_moves: Arc::clone(&self.n_moves),
        }
    }

    /// The memory of `layer`, if there is any yet.
    pub(super) fn known_layer(&self, layer: usize) -> Option<Shared<CacheLayer>> {
        lock(&self.memory).layers[layer].clone()
    }

    /// Copies `page` of every layer to another one.
    pub(super) fn copy(&self, device: &Device, page: &Number, to: &Number) -> Result<(), GpuError> {
        let mut memory = lock(&self.memory);
        let Memory {
            layers, between, ..
        } = &mut *memory;
        for ((of, between), heads) in layers.iter().zip(&mut *between).zip(&*self.shape.layers) {
            if of.is_some() && between.is_none() {
                *between = Some(layer(device, *heads, self.shape.dtype, 1)?);
            }
        }
        // A device doesn't copy within a buffer.
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for (of, between) in layers.iter().zip(&*between) {
            if let (Some(of), Some(between)) = (of, between) {
                out.extend(of.copies(between, &[[page.get(), 0]])?);
                back.extend(between.copies(of, &[[0, to.get()]])?);
            }
        }
        out.extend(back);
        device.copy_all(&out)
    }

    /// A new pool with `pages` of this one, and `more`.
    pub(super) fn split(
        &self,
        device: &Device,
        graph: &mut Graph,
        pools: &PagePools,
        pages: &[Arc<Number>],
        more: usize,
    ) -> Result<(Arc<PagePool>, Vec<Arc<Number>>), GpuError> {
        let new = pools.add(&self.shape);
        let taken = new.take(device, graph, pages.len() + more)?;
        // What is copied may not have been computed yet.
        graph.flush()?;
        let numbers: Vec<[u32; 2]> = (pages.iter().zip(&taken))
            .map(|(from, to)| [from.get(), to.get()])
            .collect();
        for i in 0..self.shape.layers.len() {
            if let Some(layer) = self.known_layer(i) {
                let to = new.layer(device, i)?;
                device.copy_all(&layer.copies(&to, &numbers)?)?;
            }
        }
        Ok((new, taken))
    }
}
