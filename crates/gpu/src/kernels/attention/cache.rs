//! Keys and values of a layer in device memory.

use std::ops::Range;

use sterna_format::model::CacheType;

use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::{Device, GpuError, ReadRange};

/// The largest head dimension that kernels support.
pub const MAX_HEAD_DIM: usize = 1024;

/// Elements that share a scale in [`CacheType::Q8_0`].
const BLOCK: usize = CacheType::BLOCK_LEN;

/// Keys and values of one layer, up to a fixed number of positions.
///
/// Memory: `[n_kv_heads, capacity]` rows padded to 16 bytes, for keys and for values.
#[derive(Debug, Clone)]
pub struct CacheLayer {
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: CacheType,
    capacity: usize,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
}

impl CacheLayer {
    /// Allocates `capacity` positions, or a few more.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] if heads are larger than
    /// [`MAX_HEAD_DIM`], or the keys exceed the device's binding size.
    pub fn new(
        device: &Device,
        n_kv_heads: usize,
        head_dim: usize,
        dtype: CacheType,
        capacity: usize,
    ) -> Result<CacheLayer, GpuError> {
        let dtype = dtype.of_heads(head_dim);
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(GpuError::Unsupported {
                what: format!("heads of {head_dim} elements"),
                reason: format!("kernels take 1 to {MAX_HEAD_DIM}"),
            });
        }
        // The scales of a key-value head begin at a vector boundary, so that no two heads write to one
        // vector.
        let capacity = match dtype {
            CacheType::Q8_0 => capacity.checked_next_multiple_of(4).unwrap_or(capacity),
            _ => capacity,
        };
        let rows = n_kv_heads.saturating_mul(capacity);
        let (vectors, scales) = row_shape(dtype, head_dim);
        let bytes = (rows as u64).saturating_mul(vectors as u64 * 16 + scales as u64 * 4);
        let limits = device.limits();
        if bytes > limits.binding_bytes {
            return Err(GpuError::Unsupported {
                what: format!("a cache of {capacity} positions"),
                reason: format!("its {bytes} bytes exceed {}", limits.binding_bytes),
            });
        }
        Ok(CacheLayer {
            n_kv_heads,
            head_dim,
            dtype,
            capacity,
            keys: device.buffer("cached keys", bytes)?,
            values: device.buffer("cached values", bytes)?,
        })
    }

    /// Allocated positions.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.keys.bytes() + self.values.bytes()
    }

    /// Copies the first `len` positions to another cache of the same shape and any capacity: to grow, or to
    /// fork.
    ///
    /// Errors: [`GpuError::Shape`] if they don't fit, or the shapes differ.
    pub fn copy_to(&self, device: &Device, to: &CacheLayer, len: usize) -> Result<(), GpuError> {
        expect("copying a cache: heads", self.n_kv_heads, to.n_kv_heads)?;
        expect(
            "copying a cache: elements of a head",
            self.head_dim,
            to.head_dim,
        )?;
        expect(
            "copying a cache: type",
            self.dtype as usize,
            to.dtype as usize,
        )?;
        expect_most(
            "copying a cache: positions",
            self.capacity.min(to.capacity),
            len,
        )?;
        if len == 0 {
            return Ok(());
        }
        for (own, other) in self.spans(len).into_iter().zip(to.spans(len)) {
            let bytes = own.bytes.end - own.bytes.start;
            let (from, to) = (own.bytes.start, other.bytes.start);
            device.copy((own.buffer, from), (other.buffer, to), bytes)?;
        }
        Ok(())
    }

    /// Where the first `len` positions are: for every head those of keys and of values, and of their scales.
    fn spans(&self, len: usize) -> Vec<Span<'_>> {
        let (vectors, scales) = row_shape(self.dtype, self.head_dim);
        let mut spans = Vec::new();
        for head in 0..self.n_kv_heads {
            for buffer in [&self.keys, &self.values] {
                for (at, row) in [(0, vectors * 16), (self.scales_at() * 4, scales * 4)] {
                    let first = (at + head * self.capacity * row) as u64;
                    let bytes = first..first + (len * row) as u64;
                    if !bytes.is_empty() {
                        spans.push(Span { buffer, bytes });
                    }
                }
            }
        }
        spans
    }

    /// Bytes of [`CacheLayer::read`] for `len` positions.
    pub fn saved_bytes(&self, len: usize) -> usize {
        let spans = self.spans(len).into_iter();
        spans
            .map(|span| (span.bytes.end - span.bytes.start) as usize)
            .sum()
    }

    /// The first `len` positions, as [`CacheLayer::write`] takes them for a cache of the same shape and any capacity.
    ///
    /// Errors: [`GpuError::Shape`] if there are fewer; [`GpuError::Lost`].
    pub fn read(&self, device: &Device, len: usize) -> Result<Vec<u8>, GpuError> {
        expect_most("reading a cache: positions", self.capacity, len)?;
        let ranges = self.spans(len).into_iter().map(|Span { buffer, bytes }| {
            ReadRange::of::<u32>(buffer, bytes.start as usize / 4..bytes.end as usize / 4)
        });
        let ranges: Vec<ReadRange> = ranges.collect();
        Ok(device.submit(&[], &ranges)?.wait()?.concat())
    }

    /// Writes `len` positions, which [`CacheLayer::read`] gave, before anything submitted later.
    ///
    /// Errors: [`GpuError::Shape`] if they are not as many, or don't fit.
    pub fn write(&self, device: &Device, len: usize, saved: &[u8]) -> Result<(), GpuError> {
        expect_most("writing a cache: positions", self.capacity, len)?;
        expect("writing a cache: bytes", self.saved_bytes(len), saved.len())?;
        let mut rest = saved;
        for Span { buffer, bytes } in self.spans(len) {
            let (own, others) = rest.split_at((bytes.end - bytes.start) as usize);
            device.write(buffer, bytes.start, own)?;
            rest = others;
        }
        Ok(())
    }

    /// The word at which scales begin.
    pub(super) fn scales_at(&self) -> usize {
        self.n_kv_heads * self.capacity * row_shape(self.dtype, self.head_dim).0 * 4
    }
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
