//! The key-value cache in memory: pages that sequences with a common beginning share.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;
use sterna_kernels::attention::{KvPage, KvRows};

use crate::backend::{CacheShape, CacheType, KvCache};

/// Positions of a page. Small enough that a short answer wastes little, large enough that the
/// attention kernel runs over long stretches.
pub(super) const PAGE_LEN: usize = 64;

/// Keys and values of one sequence.
///
/// Pages are allocated as the sequence grows. A fork shares the pages of its prefix; a page is
/// copied when one of its owners writes to it.
#[derive(Debug)]
pub struct CpuCache {
    shape: CacheShape,
    len: usize,
    /// Pages of each layer.
    layers: Vec<Vec<Arc<Page>>>,
}

/// [`PAGE_LEN`] positions of one layer.
#[derive(Debug, Clone)]
struct Page {
    k: Rows,
    v: Rows,
}

/// `[n_kv_heads, PAGE_LEN, head_dim]`.
#[derive(Debug, Clone)]
enum Rows {
    F32(Box<[f32]>),
    F16(Box<[f16]>),
}

impl Rows {
    fn zeros(shape: &CacheShape) -> Rows {
        let len = shape.n_kv_heads * PAGE_LEN * shape.head_dim;
        match shape.dtype {
            CacheType::F32 => Rows::F32(vec![0.0; len].into()),
            CacheType::F16 => Rows::F16(vec![f16::ZERO; len].into()),
        }
    }

    /// Stores one position's heads, `[n_kv_heads, head_dim]`.
    fn store(&mut self, position: usize, row: &[f32], head_dim: usize) {
        for (head, values) in row.chunks_exact(head_dim).enumerate() {
            let at = (head * PAGE_LEN + position) * head_dim;
            match self {
                Rows::F32(rows) => rows[at..at + head_dim].copy_from_slice(values),
                Rows::F16(rows) => rows[at..at + head_dim].convert_from_f32_slice(values),
            }
        }
    }

    fn view(&self) -> KvRows<'_> {
        match self {
            Rows::F32(rows) => KvRows::F32(rows),
            Rows::F16(rows) => KvRows::F16(rows),
        }
    }
}

impl CpuCache {
    pub(super) fn new(shape: &CacheShape) -> CpuCache {
        CpuCache {
            shape: *shape,
            len: 0,
            layers: vec![Vec::new(); shape.n_layers],
        }
    }

    /// Stores `k` and `v`, `[m, n_kv_heads, head_dim]`, at the positions from the cache's length.
    pub(super) fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) {
        let head_dim = self.shape.head_dim;
        let width = self.shape.n_kv_heads * head_dim;
        let pages = &mut self.layers[layer];
        for (t, (k, v)) in k.chunks_exact(width).zip(v.chunks_exact(width)).enumerate() {
            let (page, position) = ((self.len + t) / PAGE_LEN, (self.len + t) % PAGE_LEN);
            if page == pages.len() {
                pages.push(Arc::new(Page {
                    k: Rows::zeros(&self.shape),
                    v: Rows::zeros(&self.shape),
                }));
            }
            let page = Arc::make_mut(&mut pages[page]);
            page.k.store(position, k, head_dim);
            page.v.store(position, v, head_dim);
        }
    }

    pub(super) fn pages(&self, layer: usize) -> Vec<KvPage<'_>> {
        self.layers[layer]
            .iter()
            .map(|page| KvPage {
                k: page.k.view(),
                v: page.v.view(),
            })
            .collect()
    }
}

impl KvCache for CpuCache {
    fn len(&self) -> usize {
        self.len
    }

    fn advance(&mut self, n: usize) {
        self.len += n;
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for pages in &mut self.layers {
            pages.truncate(self.len.div_ceil(PAGE_LEN));
        }
    }

    fn fork(&self, len: usize) -> CpuCache {
        let len = len.min(self.len);
        let shared = |pages: &Vec<Arc<Page>>| pages[..len.div_ceil(PAGE_LEN)].to_vec();
        CpuCache {
            shape: self.shape,
            len,
            layers: self.layers.iter().map(shared).collect(),
        }
    }
}
