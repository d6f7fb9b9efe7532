//! Keys and values of a layer in device memory, in pages.

use std::ops::Range;

use sterna_format::model::{CacheType, CachedValues};

use crate::error::{expect, expect_most};
use crate::memory::{Buffer, BufferCopy};
use crate::{Device, GpuError, ReadRange};

/// The largest head dimension that kernels support.
pub const MAX_HEAD_DIM: usize = 1024;

/// Elements that share a scale in [`CacheType::Q8_0`].
const BLOCK: usize = CacheType::BLOCK_LEN;

/// Positions of a page. Kernels read 32 at a time, which are in one page.
pub const PAGE_LEN: usize = 64;

/// Keys and values of one layer, in pages of [`PAGE_LEN`] positions. Which pages are a sequence's, and in what order,
/// is in a table ([`sequence_table`](crate::kernels::sequence_table)): several sequences may share a layer, and pages.
///
/// Memory: for keys, and for values of their own, `[n_pages, n_kv_heads, PAGE_LEN]` rows padded to 16 bytes; of
/// [`CacheType::Q8_0`], the scales of all rows follow.
#[derive(Debug, Clone)]
pub struct CacheLayer {
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: CacheType,
    pub(super) cached: CachedValues,
    n_pages: usize,
    pub(super) keys: Buffer,
    /// A few unused bytes where the keys are the values: kernels have a place for values, which may not be that of keys.
    pub(super) values: Buffer,
}

/// Bytes in the place of values where there are none.
const NO_VALUES: u64 = 16;

impl CacheLayer {
    /// Allocates `n_pages`.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] if heads are larger than
    /// [`MAX_HEAD_DIM`], or there are more pages than [`CacheLayer::most_pages`].
    pub fn new(
        device: &Device,
        n_kv_heads: usize,
        head_dim: usize,
        dtype: CacheType,
        cached: CachedValues,
        n_pages: usize,
    ) -> Result<CacheLayer, GpuError> {
        let dtype = dtype.of_heads(head_dim);
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(GpuError::Unsupported {
                what: format!("heads of {head_dim} elements"),
                reason: format!("kernels take 1 to {MAX_HEAD_DIM}"),
            });
        }
        let most = CacheLayer::most_pages(device, n_kv_heads, head_dim, dtype);
        if n_pages > most {
            return Err(GpuError::Unsupported {
                what: format!("a cache of {} positions", n_pages.saturating_mul(PAGE_LEN)),
                reason: format!("a buffer of the device holds {}", most * PAGE_LEN),
            });
        }
        let bytes = n_pages as u64 * page_bytes(n_kv_heads, head_dim, dtype);
        let of_values = match cached {
            CachedValues::Own => bytes,
            CachedValues::Keys => NO_VALUES,
        };
        Ok(CacheLayer {
            n_kv_heads,
            head_dim,
            dtype,
            cached,
            n_pages,
            keys: device.buffer("cached keys", bytes)?,
            values: device.buffer("cached values", of_values)?,
        })
    }

    /// The most pages of such a layer that the device has room for in a buffer.
    pub fn most_pages(
        device: &Device,
        n_kv_heads: usize,
        head_dim: usize,
        dtype: CacheType,
    ) -> usize {
        let limits = device.limits();
        let most = limits.binding_bytes.min(limits.buffer_bytes);
        let bytes = page_bytes(n_kv_heads, head_dim, dtype.of_heads(head_dim));
        // Kernels number words by 32 bits.
        (most.min(1 << 34) / bytes.max(1)) as usize
    }

    /// Allocated pages.
    pub fn n_pages(&self) -> usize {
        self.n_pages
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.keys.bytes() + self.values.bytes()
    }

    /// The memory of keys, and of values of their own.
    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let both = [&self.keys, &self.values];
        both.into_iter().take(self.cached.per_head())
    }

    /// Keys, and values of their own, of a position.
    pub(crate) fn n_vectors(&self) -> usize {
        self.cached.per_head() * self.n_kv_heads
    }

    /// The constant that says whether there are values.
    pub(super) fn constant(&self) -> (&'static str, f64) {
        ("VALUES", (self.cached.per_head() - 1) as f64)
    }

    /// What copies pages, `[from, to]` each, to another layer of the same shape, in other memory.
    ///
    /// Errors: [`GpuError::Shape`] if there are no such pages, or the shapes differ.
    pub fn copies<'a>(
        &'a self,
        to: &'a CacheLayer,
        pages: &[[u32; 2]],
    ) -> Result<Vec<BufferCopy<'a>>, GpuError> {
        expect("copying a cache: heads", self.n_kv_heads, to.n_kv_heads)?;
        let dims = (self.head_dim, to.head_dim);
        expect("copying a cache: elements of a head", dims.0, dims.1)?;
        let dtypes = (self.dtype as usize, to.dtype as usize);
        expect("copying a cache: type", dtypes.0, dtypes.1)?;
        let vectors = (self.n_vectors(), to.n_vectors());
        expect("copying a cache: keys and values", vectors.0, vectors.1)?;
        let mut copies = Vec::new();
        // Pages that follow one another are copied at once.
        for run in pages.chunk_by(|a, b| a[0] + 1 == b[0] && a[1] + 1 == b[1]) {
            let [from, into] = run[0].map(|page| page as usize);
            self.expect_page(from + run.len())?;
            to.expect_page(into + run.len())?;
            let own = self.spans(from..from + run.len());
            let others = to.spans(into..into + run.len());
            copies.extend(own.into_iter().zip(others).map(|(own, other)| BufferCopy {
                bytes: own.bytes.end - own.bytes.start,
                from: (own.buffer, own.bytes.start),
                to: (other.buffer, other.bytes.start),
            }));
        }
        Ok(copies)
    }

    fn expect_page(&self, end: usize) -> Result<(), GpuError> {
        expect_most("pages of a cache", self.n_pages, end)
    }

    /// Where pages are: those of keys and of values, and of their scales.
    fn spans(&self, pages: Range<usize>) -> Vec<Span<'_>> {
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        let n_rows = self.n_kv_heads * PAGE_LEN;
        let mut spans = Vec::new();
        for buffer in self.buffers() {
            for (first, row) in [(0, vectors * 16), (self.scales_at() * 4, scales * 4)] {
                let at = |page: usize| (first + page * n_rows * row) as u64;
                let bytes = at(pages.start)..at(pages.end);
                if !bytes.is_empty() {
                    spans.push(Span { buffer, bytes });
                }
            }
        }
        spans
    }

    /// Bytes of [`CacheLayer::read`] for `len` positions.
    pub fn saved_bytes(&self, len: usize) -> usize {
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        self.n_vectors() * len * (vectors * 16 + scales * 4)
    }

    /// The first `len` positions of a sequence that has `pages`: for every head the rows of keys, their scales, the rows
    /// of values of their own, and their scales, whatever pages they are in.
    ///
    /// Errors: [`GpuError::Shape`] if pages have fewer positions, or there are no such pages; [`GpuError::Lost`].
    pub fn read(&self, device: &Device, pages: &[u32], len: usize) -> Result<Vec<u8>, GpuError> {
        let pages = self.pages_of(pages, len)?;
        if pages.is_empty() {
            return Ok(Vec::new());
        }
        // They are collected where one read gets them all.
        let all = CacheLayer::new(
            device,
            self.n_kv_heads,
            self.head_dim,
            self.dtype,
            self.cached,
            pages.len(),
        )?;
        let numbered: Vec<[u32; 2]> = (0..).zip(pages).map(|(to, &from)| [from, to]).collect();
        device.copy_all(&self.copies(&all, &numbered)?)?;
        let words = 0..pages.len() * (self.page_bytes() / 4) as usize;
        let reads = all.buffers();
        let reads: Vec<_> = reads
            .map(|buffer| ReadRange::of::<u32>(buffer, words.clone()))
            .collect();
        let read = device.submit(&[], &reads)?.wait()?;
        let mut saved = Vec::with_capacity(self.saved_bytes(len));
        for (i, rows) in all.rows(len) {
            saved.extend_from_slice(&read[i][rows]);
        }
        Ok(saved)
    }

    /// Writes `len` positions, which [`CacheLayer::read`] gave, to the pages of a sequence, before anything submitted
    /// later. The rest of the last page is unspecified.
    ///
    /// Errors: [`GpuError::Shape`] if they are not as many, or don't fit, or there are no such pages.
    pub fn write(
        &self,
        device: &Device,
        pages: &[u32],
        len: usize,
        saved: &[u8],
    ) -> Result<(), GpuError> {
        let pages = self.pages_of(pages, len)?;
        expect("writing a cache: bytes", self.saved_bytes(len), saved.len())?;
        // As if they were all, one after the other.
        let all = CacheLayer {
            n_pages: pages.len(),
            ..self.clone()
        };
        let bytes = vec![0; pages.len() * self.page_bytes() as usize];
        let mut both = vec![bytes; self.cached.per_head()];
        let mut rest = saved;
        for (i, rows) in all.rows(len) {
            let (own, others) = rest.split_at(rows.len());
            both[i][rows].copy_from_slice(own);
            rest = others;
        }
        for (i, &page) in pages.iter().enumerate() {
            let from = all.spans(i..i + 1);
            let to = self.spans(page as usize..page as usize + 1);
            for (own, other) in from.iter().zip(to) {
                let values = usize::from(*own.buffer == self.values);
                let bytes = own.bytes.start as usize..own.bytes.end as usize;
                device.write(other.buffer, other.bytes.start, &both[values][bytes])?;
            }
        }
        Ok(())
    }

    /// Of a sequence's pages those with the first `len` positions.
    fn pages_of<'a>(&self, pages: &'a [u32], len: usize) -> Result<&'a [u32], GpuError> {
        let n_pages = len.div_ceil(PAGE_LEN);
        expect_most("pages of a sequence", pages.len(), n_pages)?;
        let pages = &pages[..n_pages];
        for &page in pages {
            self.expect_page(page as usize + 1)?;
        }
        Ok(pages)
    }

    /// Where in keys (0) and values of their own (1) the first `len` positions are, if pages are in order, as
    /// [`CacheLayer::read`] orders them.
    fn rows(&self, len: usize) -> Vec<(usize, Range<usize>)> {
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        let mut rows = Vec::new();
        for head in 0..self.n_kv_heads {
            for of in 0..self.cached.per_head() {
                for (first, row) in [(0, vectors * 16), (self.scales_at() * 4, scales * 4)] {
                    for begin in (0..len).step_by(PAGE_LEN) {
                        let n = PAGE_LEN.min(len - begin);
                        let at = begin * self.n_kv_heads + head * PAGE_LEN;
                        let at = first + at * row;
                        rows.push((of, at..at + n * row));
                    }
                }
            }
        }
        rows
    }

    fn page_bytes(&self) -> u64 {
        page_bytes(self.n_kv_heads, self.head_dim, self.dtype)
    }

    /// The word at which scales begin.
    pub(super) fn scales_at(&self) -> usize {
        let n_rows = self.n_pages * self.n_kv_heads * PAGE_LEN;
        n_rows * row_shape(self.dtype, self.head_dim).0 * 4
    }
}

/// Bytes of a page of keys, or of values.
fn page_bytes(n_kv_heads: usize, head_dim: usize, dtype: CacheType) -> u64 {
    let (vectors, scales) = row_shape(dtype, head_dim);
    let rows = (n_kv_heads as u64).saturating_mul(PAGE_LEN as u64);
    rows.saturating_mul(vectors as u64 * 16 + scales as u64 * 4)
}

/// A part of a buffer.
struct Span<'a> {
    buffer: &'a Buffer,
    bytes: Range<u64>,
}

/// Vectors of 16 bytes per cached head, and scales.
pub(super) fn row_shape(dtype: CacheType, head_dim: usize) -> (usize, usize) {
    // Keys are read eight elements at a time.
    match dtype {
        CacheType::F32 => (head_dim.next_multiple_of(8) / 4, 0),
        CacheType::F16 => (head_dim.div_ceil(8), 0),
        CacheType::Q8_0 => (head_dim.div_ceil(16), head_dim.div_ceil(BLOCK)),
    }
}
