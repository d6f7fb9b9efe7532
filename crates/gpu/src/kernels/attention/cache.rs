//! Keys and values of a layer in device memory, in pages.

use std::collections::VecDeque;
use std::ops::Range;

use sterna_format::model::{CacheType, CachedValues};

use crate::error::{expect, expect_most};
use crate::memory::{Buffer, BufferCopy, Upload, UploadPart};
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

/// A part of a sequence's keys, or of its values, as [`CacheLayer::read`] gives it.
#[derive(Debug, Clone)]
pub struct CachePiece {
    /// Keys (0) or values (1).
    buffer: usize,
    /// Pages of the sequence.
    pages: Range<usize>,
    bytes: usize,
}

impl CachePiece {
    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Pages that follow one another in a layer's memory, or their scales.
struct Run<'a> {
    buffer: &'a Buffer,
    /// Where they are there, in bytes.
    own: Range<u64>,
    /// And where in the piece.
    within: Range<u64>,
}

/// Bytes of a piece at most, unless a page has more: read while the one before is copied, in buffers that are kept for the
/// next. What was saved with another number can't be written.
const PIECE_BYTES: u64 = 8 << 20;

/// Pieces that are being read besides the one that is waited for.
const PIECES_AHEAD: usize = 1;

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
            for (buffer, other) in self.buffers().zip(to.buffers()) {
                let own = self.spans(self.n_pages, from..from + run.len());
                let others = to.spans(to.n_pages, into..into + run.len());
                copies.extend(own.zip(others).map(|(own, into)| BufferCopy {
                    bytes: own.end - own.start,
                    from: (buffer, own.start),
                    to: (other, into.start),
                }));
            }
        }
        Ok(copies)
    }

    fn expect_page(&self, end: usize) -> Result<(), GpuError> {
        expect_most("pages of a cache", self.n_pages, end)
    }

    /// Where `pages` are in the memory of keys, or of values, that has `n_pages`: they, and their scales.
    fn spans(
        &self,
        n_pages: usize,
        pages: Range<usize>,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        let n_rows = self.n_kv_heads * PAGE_LEN;
        let first_scale = n_pages * n_rows * vectors * 16;
        let spans = [(0, vectors * 16), (first_scale, scales * 4)].map(|(first, row)| {
            let at = |page: usize| (first + page * n_rows * row) as u64;
            at(pages.start)..at(pages.end)
        });
        spans.into_iter().filter(|bytes| !bytes.is_empty())
    }

    /// The pieces in which the first `len` positions of a sequence are saved, in order.
    pub fn pieces(&self, len: usize) -> Vec<CachePiece> {
        let n_pages = len.div_ceil(PAGE_LEN);
        let most = (PIECE_BYTES / self.page_bytes()).max(1) as usize;
        let mut pieces = Vec::new();
        for first in (0..n_pages).step_by(most) {
            let pages = first..n_pages.min(first + most);
            for buffer in 0..self.cached.per_head() {
                let pages = pages.clone();
                let bytes = pages.len() * self.page_bytes() as usize;
                pieces.push(CachePiece {
                    buffer,
                    pages,
                    bytes,
                });
            }
        }
        pieces
    }

    /// The [pieces](CacheLayer::pieces) of a sequence that has `pages`: each is pages one after the other, as they are in
    /// memory, and their scales behind all of them. Positions behind the last are zeros.
    ///
    /// Errors: [`GpuError::Shape`] if pages have fewer positions, or there are no such pages; [`GpuError::Lost`].
    pub fn read(
        &self,
        device: &Device,
        pages: &[u32],
        len: usize,
    ) -> Result<Vec<Vec<u8>>, GpuError> {
        let pieces = self.pieces(len);
        let mut read = Vec::with_capacity(pieces.len());
        let Some(longest) = pieces.iter().map(|piece| piece.bytes).max() else {
            return Ok(read);
        };
        // Pages are collected where one read gets them all; while they are copied from there, others are.
        let all = device.buffer("pages to be read", longest as u64)?;
        let mut submitted = VecDeque::new();
        for piece in &pieces {
            let runs = self.runs(pages, piece)?;
            let copies = runs.iter().map(|run| BufferCopy {
                from: (run.buffer, run.own.start),
                to: (&all, run.within.start),
                bytes: run.own.end - run.own.start,
            });
            device.copy_all(&copies.collect::<Vec<_>>())?;
            let range = ReadRange::of::<u8>(&all, 0..piece.bytes);
            submitted.push_back(device.submit(&[], &[range])?);
            if submitted.len() > PIECES_AHEAD
                && let Some(first) = submitted.pop_front()
            {
                read.extend(first.wait()?);
            }
        }
        for rest in submitted {
            read.extend(rest.wait()?);
        }
        let n_last = len % PAGE_LEN;
        if n_last > 0 {
            for (piece, bytes) in pieces.iter().zip(&mut read) {
                if piece.pages.end * PAGE_LEN > len {
                    self.clear_rows(bytes, piece.pages.len(), n_last);
                }
            }
        }
        Ok(read)
    }

    /// Clears what is behind the first `n_rows` rows of each head in the last of `n_pages` pages.
    fn clear_rows(&self, bytes: &mut [u8], n_pages: usize, n_rows: usize) {
        for span in self.spans(n_pages, n_pages - 1..n_pages) {
            let page = &mut bytes[span.start as usize..span.end as usize];
            let row = page.len() / (self.n_kv_heads * PAGE_LEN);
            for head in page.chunks_exact_mut(PAGE_LEN * row) {
                head[n_rows * row..].fill(0);
            }
        }
    }

    /// Writes `piece`, as [`CacheLayer::read`] gave it, to the pages of a sequence, before anything submitted later.
    ///
    /// Errors: [`GpuError::Shape`] if it has another length, or there are no such pages; [`GpuError::Lost`].
    pub fn write(
        &self,
        upload: &mut Upload,
        pages: &[u32],
        piece: &CachePiece,
        saved: &[u8],
    ) -> Result<(), GpuError> {
        let n_bytes = piece.pages.len() * self.page_bytes() as usize;
        expect("writing a cache: bytes", n_bytes, saved.len())?;
        let runs = self.runs(pages, piece)?;
        let parts = runs.iter().map(|run| UploadPart {
            bytes: &saved[run.within.start as usize..run.within.end as usize],
            to: run.buffer,
            offset: run.own.start,
        });
        upload.write_all(parts)
    }

    /// The runs of `piece` that are one range in memory.
    fn runs(&self, pages: &[u32], piece: &CachePiece) -> Result<Vec<Run<'_>>, GpuError> {
        expect_most("pages of a sequence", pages.len(), piece.pages.end)?;
        let Some(buffer) = self.buffers().nth(piece.buffer) else {
            return Err(GpuError::Shape {
                what: "a piece of a cache: values of their own",
                expected: self.cached.per_head() as u64 - 1,
                found: piece.buffer as u64,
            });
        };
        let n_pages = piece.pages.len();
        let (mut at, mut runs) = (0, Vec::new());
        for pages in pages[piece.pages.clone()].chunk_by(|a, b| a + 1 == *b) {
            let first = pages[0] as usize;
            self.expect_page(first + pages.len())?;
            let own = self.spans(self.n_pages, first..first + pages.len());
            let within = self.spans(n_pages, at..at + pages.len());
            runs.extend(own.zip(within).map(|(own, within)| Run {
                buffer,
                own,
                within,
            }));
            at += pages.len();
        }
        Ok(runs)
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

/// Vectors of 16 bytes per cached head, and scales.
pub(super) fn row_shape(dtype: CacheType, head_dim: usize) -> (usize, usize) {
    // Keys are read eight elements at a time.
    match dtype {
        CacheType::F32 => (head_dim.next_multiple_of(8) / 4, 0),
        CacheType::F16 => (head_dim.div_ceil(8), 0),
        CacheType::Q8_0 => (head_dim.div_ceil(16), head_dim.div_ceil(BLOCK)),
    }
}
