//! The key-value cache in memory: pages that sequences with a common prefix share.

use std::ops::Range;
use std::sync::Arc;

use sterna_kernels::State;
use sterna_kernels::attention::{KvPage, PAGE_LEN};

use super::states::States;
use crate::backend::{
    CacheShape, CachedValues, KvCache, KvHeads, LayerContents, SnapshotError, SnapshotSink,
    SnapshotSource, share, take_form, take_saved,
};

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
    /// States of layers that have those, once one was asked for.
    states: Option<States>,
}

/// How a layer is saved: as pages, and the values of a state.
fn form(heads: KvHeads) -> &'static [u8; 4] {
    match heads.values {
        CachedValues::Own => b"page",
        CachedValues::Keys => b"kpag",
    }
}

impl CpuCache {
    pub(super) fn new(shape: &CacheShape) -> CpuCache {
        CpuCache {
            shape: shape.clone(),
            len: 0,
            layers: vec![Vec::new(); shape.layers.len()],
            states: None,
        }
    }

    /// The state of a layer, `n` values, which are zeros at the beginning, for the next positions; in place only if
    /// `may_be`, as all operations of the layer have to say: one token follows, and they read each value once.
    pub(super) fn state(&mut self, layer: usize, n: usize, may_be: bool) -> State<'_> {
        let n_layers = self.shape.layers.len();
        let states = self.states.get_or_insert_with(|| States::new(n_layers));
        states.next(layer, n, may_be)
    }

    /// How many pages have to be [added](Self::add) for the next `n_rows` positions.
    pub(super) fn n_missing(&self, layer: usize, n_rows: usize) -> usize {
        let n_pages = (self.len + n_rows).div_ceil(PAGE_LEN);
        n_pages.saturating_sub(self.layers[layer].len())
    }

    /// Adds a [page](Self::page).
    pub(super) fn add(&mut self, layer: usize, page: KvPage) {
        self.layers[layer].push(Arc::new(page));
    }

    /// A page of zeros for a layer.
    pub(super) fn page(&self, layer: usize) -> KvPage {
        let KvHeads {
            n_kv_heads,
            head_dim,
            values,
        } = self.shape.layers[layer];
        KvPage::new(self.shape.dtype, values, n_kv_heads, head_dim)
    }

    /// The pages of the next `n_rows` positions, of which none [is missing](Self::n_missing), each with the first of its
    /// positions and the rows that go there, from 0 on. They are copied if others have them, too.
    pub(super) fn room(
        &mut self,
        layer: usize,
        n_rows: usize,
    ) -> impl Iterator<Item = (&mut KvPage, usize, Range<usize>)> {
        let (start, end) = (self.len, self.len + n_rows);
        let pages = &mut self.layers[layer];
        assert!(pages.len() * PAGE_LEN >= end, "positions without a page");
        let numbers = start / PAGE_LEN..end.div_ceil(PAGE_LEN);
        let pages = pages.iter_mut().enumerate();
        let pages = pages.skip(numbers.start).take(numbers.len());
        pages.map(move |(number, page)| {
            let begin = number * PAGE_LEN;
            let (at, until) = (start.max(begin), end.min(begin + PAGE_LEN));
            (Arc::make_mut(page), at - begin, at - start..until - start)
        })
    }

    /// Writes the pages of `layer`, and its state.
    pub(super) fn save(
        &self,
        layer: usize,
        to: &mut dyn SnapshotSink,
    ) -> Result<(), SnapshotError> {
        to.put(form(self.shape.layers[layer]).to_vec())?;
        for page in &self.layers[layer] {
            to.put(page.as_bytes().concat())?;
        }
        let state = self.states.as_ref().and_then(|states| states.last(layer));
        let state = state.unwrap_or_default();
        Ok(to.put(state.iter().flat_map(|x| x.to_ne_bytes()).collect())?)
    }

    /// Reads what was saved.
    pub(super) fn restore(
        &mut self,
        layer: usize,
        LayerContents { n_keys, n_state }: LayerContents,
        from: &mut dyn SnapshotSource,
    ) -> Result<(), SnapshotError> {
        take_form(from, form(self.shape.layers[layer]))?;
        for _ in 0..n_keys.div_ceil(PAGE_LEN) {
            let mut page = self.page(layer);
            for bytes in page.as_bytes_mut() {
                bytes.copy_from_slice(&take_saved(from, bytes.len())?);
            }
            self.layers[layer].push(Arc::new(page));
        }
        if n_state > 0 {
            let bytes = take_saved(from, 4 * n_state)?;
            let (values, _) = bytes.as_chunks();
            let mut unused = Vec::new();
            let (_, state) = self.state(layer, n_state, false).copied(&mut unused);
            for (value, bytes) in state.iter_mut().zip(values) {
                *value = f32::from_ne_bytes(*bytes);
            }
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

    fn share(&self) -> usize {
        // Layers share alike.
        match self.layers.iter().find(|pages| !pages.is_empty()) {
            Some(pages) => share(self.len, PAGE_LEN, pages.iter().map(Arc::strong_count)),
            None => self.len,
        }
    }

    fn advance(&mut self, n: usize) {
        if let Some(states) = &mut self.states {
            states.advance(n, self.len + n);
        }
        self.len += n;
    }

    fn pin(&mut self) {
        if let Some(states) = &mut self.states {
            states.pin();
        }
    }

    fn len_within(&self, len: usize) -> usize {
        let len = len.min(self.len);
        let states = self.states.as_ref();
        states.map_or(len, |states| states.len_within(len))
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        if let Some(states) = &mut self.states {
            self.len = states.truncate(self.len);
        }
        for pages in &mut self.layers {
            pages.truncate(self.len.div_ceil(PAGE_LEN));
        }
    }

    fn fork(&self, len: usize) -> CpuCache {
        let mut states = self.states.as_ref().map(States::fork);
        let len = len.min(self.len);
        let len = states.as_mut().map_or(len, |states| states.truncate(len));
        // A layer whose attention is computed elsewhere has none.
        let shared = |pages: &Vec<Arc<KvPage>>| {
            let n_pages = len.div_ceil(PAGE_LEN).min(pages.len());
            pages[..n_pages].to_vec()
        };
        CpuCache {
            shape: self.shape.clone(),
            len,
            layers: self.layers.iter().map(shared).collect(),
            states,
        }
    }
}
