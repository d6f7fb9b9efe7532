//! The memory layout of keys and values.

use half::f16;
use half::slice::HalfFloatSliceExt;
use sterna_format::model::{CacheType, CachedValues};

use crate::Exec;
use crate::isa::multiversion;
use crate::shape::{self, ShapeError, expect_len};

/// Positions of a page. Small enough that a short answer wastes little, large enough that the
/// kernels run over long stretches.
pub const PAGE_LEN: usize = 64;

/// Keys that are interleaved, one per lane.
pub(super) use crate::simd::LANES;

/// Elements that share a scale in [`CacheType::Q8_0`]; the last block of a head may be shorter.
pub(super) const BLOCK: usize = CacheType::BLOCK_LEN;

/// Keys and values of [`PAGE_LEN`] consecutive positions of one layer.
///
/// Keys are computed with one position per lane, values with one element per lane:
/// - keys are `[n_kv_heads, PAGE_LEN / 16, head_dim, 16]`, so that one element of 16 positions is
///   one load. Q8_0 codes are in pairs of elements, `[n_kv_heads, PAGE_LEN / 16, head_dim / 2, 16, 2]`,
///   and their scales are `[n_kv_heads, PAGE_LEN / 16, head_dim / 32, 16]`;
/// - values are `[n_kv_heads, PAGE_LEN, head_dim]`, the scales of Q8_0 `[n_kv_heads, head_dim / 32,
///   PAGE_LEN]`; there are none where the keys are the values.
#[derive(Debug, Clone)]
pub struct KvPage {
    dtype: CacheType,
    cached: CachedValues,
    n_kv_heads: usize,
    head_dim: usize,
    keys: Box<[Line]>,
    values: Box<[Line]>,
}

/// A cache line, so that loads of 16 lanes never straddle two.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Types for which every bit pattern is a valid value.
trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for f16 {}
impl Plain for i8 {}
impl Plain for u8 {}

fn view<T: Plain>(lines: &[Line]) -> &[T] {
    // SAFETY: lines are initialised, aligned beyond what `T` needs, and a whole number of `T`; any
    // bytes are a `T`.
    unsafe {
        std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines) / size_of::<T>())
    }
}

fn view_mut<T: Plain>(lines: &mut [Line]) -> &mut [T] {
    let len = size_of_val(lines) / size_of::<T>();
    // SAFETY: as in `view`; any `T` is bytes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// The part of `head` in `[n_heads, …]`.
fn part<T>(all: &[T], n_heads: usize, head: usize) -> &[T] {
    let len = all.len() / n_heads;
    &all[head * len..][..len]
}

fn part_mut<T>(all: &mut [T], n_heads: usize, head: usize) -> &mut [T] {
    let len = all.len() / n_heads;
    &mut all[head * len..][..len]
}

impl KvPage {
    /// A page of zeros.
    pub fn new(
        dtype: CacheType,
        cached: CachedValues,
        n_kv_heads: usize,
        head_dim: usize,
    ) -> KvPage {
        let bytes = n_kv_heads * PAGE_LEN * dtype.head_bytes(head_dim);
        // `PAGE_LEN` bytes are a whole line.
        let zeros = vec![Line([0; 64]); bytes / size_of::<Line>()].into_boxed_slice();
        let values = match cached {
            CachedValues::Own => zeros.clone(),
            CachedValues::Keys => Box::default(),
        };
        KvPage {
            dtype: dtype.of_heads(head_dim),
            cached,
            n_kv_heads,
            head_dim,
            keys: zeros,
            values,
        }
    }

    /// The memory of the keys, and of the values, empty if it has none of its own: for saving them, on a machine with
    /// the same byte order.
    pub fn as_bytes(&self) -> [&[u8]; 2] {
        [view(&self.keys), view(&self.values)]
    }

    /// The same, for restoring what was saved of a page of the same shape and type. Any bytes are a page.
    pub fn as_bytes_mut(&mut self) -> [&mut [u8]; 2] {
        [view_mut(&mut self.keys), view_mut(&mut self.values)]
    }

    /// Data type of the keys and values.
    pub(super) fn dtype(&self) -> CacheType {
        self.dtype
    }

    /// Where the values are.
    pub(super) fn cached(&self) -> CachedValues {
        self.cached
    }

    /// Key and value heads.
    pub(super) fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Elements of a head.
    pub(super) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements of a position's keys, or values.
    fn width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Stores `k` and `v`, `[m, n_kv_heads, head_dim]`, at the positions from `first`; `v` is empty where the keys are
    /// the values.
    ///
    /// Errors: [`ShapeError`] if `k` isn't whole positions, `v` differs in length, or they don't fit
    /// the page.
    pub fn store(
        &mut self,
        exec: &Exec,
        first: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), ShapeError> {
        let m = shape::rows("cache: keys", k.len(), self.width())?;
        let n_values = match self.cached {
            CachedValues::Own => k.len(),
            CachedValues::Keys => 0,
        };
        expect_len("cache: values", n_values, v.len())?;
        let fits = PAGE_LEN.saturating_sub(first).min(m);
        expect_len("cache: positions of a page", m, fits)?;
        let d = self.head_dim;
        let n = self.n_kv_heads;
        let at = |i: usize| (i % n, first + i / n);
        for (i, k) in k.chunks_exact(d).enumerate() {
            self.store_key(exec, at(i), k);
        }
        for (i, v) in v.chunks_exact(d).enumerate() {
            self.store_value(exec, at(i), v);
        }
        Ok(())
    }

    fn store_key(&mut self, exec: &Exec, (head, position): (usize, usize), k: &[f32]) {
        let n = self.n_kv_heads;
        match self.dtype {
            CacheType::F32 => {
                let keys = part_mut(view_mut(&mut self.keys), n, head);
                store_columns(keys, position, 0, k);
            }
            CacheType::F16 => {
                let keys = part_mut(view_mut(&mut self.keys), n, head);
                for (i, k) in k.chunks(BLOCK).enumerate() {
                    let mut halves = [f16::ZERO; BLOCK];
                    halves[..k.len()].convert_from_f32_slice(k);
                    store_columns(keys, position, i * BLOCK, &halves[..k.len()]);
                }
            }
            CacheType::Q8_0 => self.store_byte_key(exec, head, position, k),
        }
    }

    fn store_byte_key(&mut self, exec: &Exec, head: usize, position: usize, k: &[f32]) {
        let n = self.n_kv_heads;
        let mut codes = [0; BLOCK];
        let [tile, lane] = [position / LANES, position % LANES];
        let (pairs, scales) = split_mut(&mut self.keys, n, self.head_dim);
        let pairs = part_mut(part_mut(pairs, n, head), PAGE_LEN / LANES, tile);
        let scales = part_mut(part_mut(scales, n, head), PAGE_LEN / LANES, tile);
        for (i, k) in k.chunks(BLOCK).enumerate() {
            scales[i * LANES + lane] = quantize(exec.isa, k, &mut codes);
            let pairs = &mut pairs[i * BLOCK * LANES..];
            for (pairs, codes) in pairs
                .chunks_exact_mut(2 * LANES)
                .zip(codes[..k.len()].chunks(2))
            {
                pairs[2 * lane..][..codes.len()].copy_from_slice(codes);
            }
        }
    }

    fn store_value(&mut self, exec: &Exec, (head, position): (usize, usize), v: &[f32]) {
        let n = self.n_kv_heads;
        match self.dtype {
            CacheType::F32 => {
                let values: &mut [f32] = part_mut(view_mut(&mut self.values), n, head);
                values[position * v.len()..][..v.len()].copy_from_slice(v);
            }
            CacheType::F16 => {
                let values: &mut [f16] = part_mut(view_mut(&mut self.values), n, head);
                values[position * v.len()..][..v.len()].convert_from_f32_slice(v);
            }
            CacheType::Q8_0 => {
                let mut codes = [0; BLOCK];
                let (rows, scales) = split_mut(&mut self.values, n, self.head_dim);
                let row = part_mut(part_mut(rows, n, head), PAGE_LEN, position);
                let scales = part_mut(scales, n, head);
                for (i, v) in v.chunks(BLOCK).enumerate() {
                    scales[i * PAGE_LEN + position] = quantize(exec.isa, v, &mut codes);
                    row[i * BLOCK..][..v.len()].copy_from_slice(&codes[..v.len()]);
                }
            }
        }
    }

    /// Keys of a head in f32, `[PAGE_LEN / 16, head_dim, 16]`.
    pub(super) fn float_keys(&self, head: usize) -> &[f32] {
        part(view(&self.keys), self.n_kv_heads, head)
    }

    /// Keys of a head in f16, `[PAGE_LEN / 16, head_dim, 16]`.
    pub(super) fn half_keys(&self, head: usize) -> &[f16] {
        part(view(&self.keys), self.n_kv_heads, head)
    }

    /// Keys of a head in Q8_0: codes, `[PAGE_LEN / 16, ⌈head_dim / 2⌉, 16, 2]`, and scales,
    /// `[PAGE_LEN / 16, ⌈head_dim / 32⌉, 16]`.
    pub(super) fn byte_keys(&self, head: usize) -> (&[i8], &[f16]) {
        split(&self.keys, self.n_kv_heads, self.head_dim, head)
    }

    /// Values of a head in f32, `[PAGE_LEN, head_dim]`.
    pub(super) fn float_values(&self, head: usize) -> &[f32] {
        part(view(&self.values), self.n_kv_heads, head)
    }

    /// Values of a head in f16, `[PAGE_LEN, head_dim]`.
    pub(super) fn half_values(&self, head: usize) -> &[f16] {
        part(view(&self.values), self.n_kv_heads, head)
    }

    /// Values of a head in Q8_0: codes, `[PAGE_LEN, head_dim]` in rows of an even length, and
    /// scales, `[⌈head_dim / 32⌉, PAGE_LEN]`.
    pub(super) fn byte_values(&self, head: usize) -> (&[i8], &[f16]) {
        split(&self.values, self.n_kv_heads, self.head_dim, head)
    }
}

/// Writes elements of a key, from `first`, to its lane of `[PAGE_LEN / 16, head_dim, 16]`.
fn store_columns<T: Copy>(keys: &mut [T], position: usize, first: usize, key: &[T]) {
    let tile = part_mut(keys, PAGE_LEN / LANES, position / LANES);
    for (column, &k) in tile[first * LANES..].chunks_exact_mut(LANES).zip(key) {
        column[position % LANES] = k;
    }
}

/// Lines of Q8_0 that hold codes; those of scales follow.
fn code_lines(n_kv_heads: usize, head_dim: usize) -> usize {
    n_kv_heads * PAGE_LEN * head_dim.next_multiple_of(2) / size_of::<Line>()
}

fn split(lines: &[Line], n_kv_heads: usize, head_dim: usize, head: usize) -> (&[i8], &[f16]) {
    let (codes, scales) = lines.split_at(code_lines(n_kv_heads, head_dim));
    (
        part(view(codes), n_kv_heads, head),
        part(view(scales), n_kv_heads, head),
    )
}

fn split_mut(lines: &mut [Line], n_kv_heads: usize, head_dim: usize) -> (&mut [i8], &mut [f16]) {
    let (codes, scales) = lines.split_at_mut(code_lines(n_kv_heads, head_dim));
    (view_mut(codes), view_mut(scales))
}

multiversion! {
    /// Quantizes a block of at most [`BLOCK`] values to `codes` times the returned scale, which is `max|x| /
    /// 127` in f16.
    ///
    /// A block with a value that isn't finite has a scale that isn't either, and codes of 0: whatever reads
    /// it becomes NaN. Finite values beyond f16's range are clamped.
    fn quantize(x: &[f32], codes: &mut [i8; BLOCK]) -> f16 {
        let mut block = [0.0f32; BLOCK];
        block[..x.len()].copy_from_slice(x);
        // Magnitudes compare like their bits, NaN last.
        let max = block.iter().fold(0, |max, x| max.max(x.to_bits() << 1)) >> 1;
        let max = f32::from_bits(max);
        if !max.is_finite() {
            *codes = [0; BLOCK];
            return f16::INFINITY;
        }
        let scale = f16::from_f32((max / 127.0).min(f16::MAX.to_f32()));
        let inverse = if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
        for (code, x) in codes.iter_mut().zip(&block) {
            // The f16 may be a little less than the exact scale.
            let x = (x * inverse).clamp(-127.0, 127.0);
            // Between 2^23 and 2^24, f32 has steps of one.
            *code = ((x + 12_582_912.0).to_bits() as i32 - 12_582_912.0f32.to_bits() as i32) as i8;
        }
        scale
    }
}
