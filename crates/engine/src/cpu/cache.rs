//! The key-value cache in memory: pages that sequences with a common prefix share.

use std::sync::Arc;

use sterna_kernels::attention::{KvPage, PAGE_LEN};
use sterna_kernels::{Exec, ShapeError};

use crate::backend::{CacheShape, KvCache};

/// Keys and values of one sequence.
///
/// Pages are allocated as the sequence grows. A fork shares the pages of its prefix; a page is
/// copied when one of its owners writes to it.
#[derive(Debug)]
pub struct CpuCache {
    shape: CacheShape,
    len: usize,
    /// Pages of each layer.
    layers: Vec<Vec<Arc<KvPage>>>,
}

impl CpuCache {
    pub(super) fn new(shape: &CacheShape) -> CpuCache {
        CpuCache {
            shape: *shape,
            len: 0,
            layers: vec![Vec::new(); shape.n_layers],
        }
    }

    /// Stores `k` and `v`, `[m, n_kv_heads, head_dim]`, at positions starting at the cache's length.
    pub(super) fn append(
        &mut self,
        exec: &Exec,
        layer: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), ShapeError> {
        let CacheShape {
            n_kv_heads,
            head_dim,
            dtype,
            ..
        } = self.shape;
        let width = n_kv_heads * head_dim;
        let pages = &mut self.layers[layer];
        let (mut at, end) = (self.len, self.len + k.len() / width);
        while at < end {
            let (page, first) = (at / PAGE_LEN, at % PAGE_LEN);
            let n = (PAGE_LEN - first).min(end - at);
            if page == pages.len() {
                pages.push(Arc::new(KvPage::new(dtype, n_kv_heads, head_dim)));
            }
            let rows = (at - self.len) * width..(at - self.len + n) * width;
            let page = Arc::make_mut(&mut pages[page]);
            page.store(exec, first, &k[rows.clone()], &v[rows])?;
            at += n;
        }
        Ok(())
    }

    /// The pages of a layer, which hold all that was appended.
    pub(super) fn pages(&self, layer: usize) -> &[Arc<KvPage>] {
        &self.layers[layer]
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
        // A layer whose attention is computed elsewhere has none.
        let shared = |pages: &Vec<Arc<KvPage>>| {
            let n_pages = len.div_ceil(PAGE_LEN).min(pages.len());
            pages[..n_pages].to_vec()
        };
        CpuCache {
            shape: self.shape,
            len,
            layers: self.layers.iter().map(shared).collect(),
        }
    }
}
