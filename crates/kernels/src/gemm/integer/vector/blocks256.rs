//! K types: four rows at a time, superblock by superblock.

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector};

/// Elements of a superblock, sums of activations that belong to it, and registers of its codes.
const LEN: usize = 256;
const N_SUMS: usize = 16;
const N_REGISTERS: usize = LEN / 16;

/// How a type stores its superblocks.
///
/// # Safety
/// Methods take a pointer to [`Self::BYTES`], and need the instruction set of `V`.
pub(super) trait SuperBlock {
    const BYTES: usize;
    /// The offset of `d`, followed by `dmin` if there are minimums.
    const D: usize;
    /// Codes are stored 2^`BIAS` too large; if it is 0, there are minimums.
    const BIAS: u32;
    /// Registers of codes that share a scale: 1 or 2.
    const REGISTERS_A_SCALE: usize;

    /// The codes as stored, in order.
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS];

    /// The scales, signed, and the minimums if there are any, else zeros.
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2];
}

/// As [`super::multiply`].
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn gemv<V: Vector, B: SuperBlock>(
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / B::BYTES;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * B::BYTES);
    assert!(x.q.len() >= n_blocks * LEN && x.scales.len() >= n_blocks);
    assert!(x.sums.len() >= n_blocks * N_SUMS);
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        // Missing rows are replaced by the last one.
        let last = i * ROWS + out.len() - 1;
        let mut blocks = [0, 1, 2, 3].map(|r| rows[last.min(i * ROWS + r) * row_bytes..].as_ptr());
        let next = blocks[0].wrapping_add(ROWS * row_bytes);
        // SAFETY: the instructions by the caller's promise. Every row has `n_blocks` blocks and the
        // activations of that many are there: checked above.
        let sums = unsafe {
            let mut acc = V::splat(0.0);
            for b in 0..n_blocks {
                let next = next.wrapping_add(b * ROWS * B::BYTES);
                V::prefetch(next, ROWS * B::BYTES);
                let q = x.q.as_ptr().add(b * LEN);
                let sums = x.sums.as_ptr().add(b * N_SUMS);
                let dx = V::splat(*x.scales.get_unchecked(b));
                acc = V::add(acc, products::<V, B>(blocks, q, sums, dx));
                blocks = blocks.map(|block| block.wrapping_add(B::BYTES));
            }
            V::store(acc)
        };
        out.copy_from_slice(&sums[..out.len()]);
    }
}

/// What one superblock of each of four rows adds to its sum.
///
/// # Safety
/// The instructions of `V`; each block has [`SuperBlock::BYTES`], `q` [`LEN`] and `sums` [`N_SUMS`]
/// elements.
#[inline(always)]
unsafe fn products<V: Vector, B: SuperBlock>(
    blocks: [*const u8; ROWS],
    q: *const i8,
    sums: *const i16,
    dx: V::Floats,
) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut dots, mut offsets) = ([V::zero(); ROWS], [V::zero(); ROWS]);
        for (r, block) in blocks.into_iter().enumerate() {
            let [scales, mins] = B::scales(block);
            let scales = V::load(scales.as_ptr());
            dots[r] = scaled_dots::<V, B>(B::codes::<V>(block), q, V::widen(scales));
            // Scales of 32 elements have their biases in minimums.
            let weights = if B::BIAS > 0 {
                scales
            } else {
                V::load(mins.as_ptr())
            };
            offsets[r] = V::dot_i16(weights, sums);
        }
        let (dots, offsets) = (V::sums(dots), V::sums(offsets));
        let scale = V::mul(V::halves(blocks.map(|block| block.add(B::D))), dx);
        if B::BIAS > 0 {
            let biased = shifted::<V, B>(offsets);
            V::mul(V::to_f(V::sub_i(dots, biased)), scale)
        } else {
            let offset = V::mul(V::halves(blocks.map(|block| block.add(B::D + 2))), dx);
            let product = V::mul(V::to_f(dots), scale);
            V::sub(product, V::mul(V::to_f(offsets), offset))
        }
    }
}

/// `v · 2^BIAS`.
///
/// # Safety
/// The instructions of `V`.
#[inline(always)]
unsafe fn shifted<V: Vector, B: SuperBlock>(v: V::Ints) -> V::Ints {
    // SAFETY: the caller's promise.
    unsafe {
        match B::BIAS {
            2 => V::shift_left::<2>(v),
            5 => V::shift_left::<5>(v),
            _ => unreachable!("no type has another bias"),
        }
    }
}

/// Partial sums of `Σ_s scale_s · Σ_j code_j · q_j`.
///
/// # Safety
/// The instructions of `V`; `q` has [`LEN`] elements.
#[inline(always)]
unsafe fn scaled_dots<V: Vector, B: SuperBlock>(
    codes: [V::Bytes; N_REGISTERS],
    q: *const i8,
    scales: [V::Ints; 4],
) -> V::Ints {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = V::zero();
        let mut at = 0;
        while at < N_REGISTERS {
            let first = at;
            let mut dots = [V::zero(); 4];
            for dots in &mut dots {
                for _ in 0..B::REGISTERS_A_SCALE {
                    let q = V::load(q.add(16 * at).cast());
                    *dots = V::add_dot(*dots, codes[at], q);
                    at += 1;
                }
            }
            let scales = scales[first / (4 * B::REGISTERS_A_SCALE)];
            sums = V::add_product(sums, V::sums(dots), scales);
        }
        sums
    }
}

/// Both halves of `2 · 16` bytes, and their high nibbles: 64 codes in order.
///
/// # Safety
/// The instructions of `V`; 32 bytes.
#[inline(always)]
unsafe fn nibbles<V: Vector>(bytes: *const u8) -> [V::Bytes; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (V::load(bytes), V::load(bytes.add(16)));
        [
            V::and(a, 15),
            V::and(b, 15),
            V::right::<4>(a, 15),
            V::right::<4>(b, 15),
        ]
    }
}

/// Bits 1:0, 3:2, 5:4 and 7:6 of 32 bytes: 128 codes in order.
///
/// # Safety
/// The instructions of `V`; 32 bytes.
#[inline(always)]
unsafe fn crumbs<V: Vector>(bytes: *const u8) -> [V::Bytes; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (V::load(bytes), V::load(bytes.add(16)));
        [
            V::and(a, 3),
            V::and(b, 3),
            V::right::<2>(a, 3),
            V::right::<2>(b, 3),
            V::right::<4>(a, 3),
            V::right::<4>(b, 3),
            V::right::<6>(a, 3),
            V::right::<6>(b, 3),
        ]
    }
}

/// The eight scales and the eight minimums, twice each, that Q4_K and Q5_K pack into twelve bytes: see
/// [`crate::quant`].
///
/// # Safety
/// Twelve bytes are there.
#[inline(always)]
unsafe fn unpack_scales(packed: *const u8) -> [[u8; N_REGISTERS]; 2] {
    // SAFETY: the caller's promise.
    let [a, b, c] = unsafe { packed.cast::<[u32; 3]>().read_unaligned() }.map(u32::from_le);
    let high = (c & 0x0f0f_0f0f) | (a >> 2 & 0x3030_3030);
    let scales = u64::from(a & 0x3f3f_3f3f) | u64::from(high) << 32;
    let high = (c >> 4 & 0x0f0f_0f0f) | (b >> 2 & 0x3030_3030);
    let mins = u64::from(b & 0x3f3f_3f3f) | u64::from(high) << 32;
    let mut unpacked = [[0; N_REGISTERS]; 2];
    unpacked[0][..8].copy_from_slice(&scales.to_le_bytes());
    for (twice, min) in unpacked[1]
        .as_chunks_mut()
        .0
        .iter_mut()
        .zip(mins.to_le_bytes())
    {
        *twice = [min; 2];
    }
    unpacked
}

pub(super) struct Q4K;

impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let codes = block.add(16);
            join_four([
                nibbles::<V>(codes),
                nibbles::<V>(codes.add(32)),
                nibbles::<V>(codes.add(64)),
                nibbles::<V>(codes.add(96)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2] {
        // SAFETY: the caller's promise.
        unsafe { unpack_scales(block.add(4)) }
    }
}

/// Four times four registers.
#[inline(always)]
fn join_four<T: Copy>([a, b, c, d]: [[T; 4]; 4]) -> [T; N_REGISTERS] {
    [
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2],
        d[3],
    ]
}

/// Two times eight registers.
#[inline(always)]
fn join_two<T: Copy>([a, b]: [[T; 8]; 2]) -> [T; N_REGISTERS] {
    [
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], b[4], b[5], b[6],
        b[7],
    ]
}

pub(super) struct Q5K;

impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let codes = block.add(48);
            let [c0, c1, c2, c3] = [
                nibbles::<V>(codes),
                nibbles::<V>(codes.add(32)),
                nibbles::<V>(codes.add(64)),
                nibbles::<V>(codes.add(96)),
            ];
            let (a, b) = (V::load(block.add(16)), V::load(block.add(32)));
            // Bit s becomes bit 4 of sub-block s.
            [
                V::or(c0[0], V::left::<4>(a, 16)),
                V::or(c0[1], V::left::<4>(b, 16)),
                V::or(c0[2], V::left::<3>(a, 16)),
                V::or(c0[3], V::left::<3>(b, 16)),
                V::or(c1[0], V::left::<2>(a, 16)),
                V::or(c1[1], V::left::<2>(b, 16)),
                V::or(c1[2], V::left::<1>(a, 16)),
                V::or(c1[3], V::left::<1>(b, 16)),
                V::or(c2[0], V::and(a, 16)),
                V::or(c2[1], V::and(b, 16)),
                V::or(c2[2], V::right::<1>(a, 16)),
                V::or(c2[3], V::right::<1>(b, 16)),
                V::or(c3[0], V::right::<2>(a, 16)),
                V::or(c3[1], V::right::<2>(b, 16)),
                V::or(c3[2], V::right::<3>(a, 16)),
                V::or(c3[3], V::right::<3>(b, 16)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2] {
        // SAFETY: the caller's promise.
        unsafe { unpack_scales(block.add(4)) }
    }
}

pub(super) struct Q6K;

/// The codes of half a block, of 64 bytes of low and 32 of high bits.
///
/// # Safety
/// The instructions of `V`; the bytes.
#[inline(always)]
unsafe fn q6_k_half<V: Vector>(low: *const u8, high: *const u8) -> [V::Bytes; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let (first, second) = (nibbles::<V>(low), nibbles::<V>(low.add(32)));
        let (a, b) = (V::load(high), V::load(high.add(16)));
        [
            V::or(first[0], V::left::<4>(a, 0x30)),
            V::or(first[1], V::left::<4>(b, 0x30)),
            V::or(second[0], V::left::<2>(a, 0x30)),
            V::or(second[1], V::left::<2>(b, 0x30)),
            V::or(first[2], V::and(a, 0x30)),
            V::or(first[3], V::and(b, 0x30)),
            V::or(second[2], V::right::<2>(a, 0x30)),
            V::or(second[3], V::right::<2>(b, 0x30)),
        ]
    }
}

impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const D: usize = 208;
    const BIAS: u32 = 5;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            join_two([
                q6_k_half::<V>(block, block.add(128)),
                q6_k_half::<V>(block.add(64), block.add(160)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2] {
        // SAFETY: the caller's promise.
        let scales = unsafe { block.add(192).cast::<[u8; N_REGISTERS]>().read() };
        [scales, [0; N_REGISTERS]]
    }
}

pub(super) struct Q2K;

impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const D: usize = 80;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe { join_two([crumbs::<V>(block.add(16)), crumbs::<V>(block.add(48))]) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2] {
        // SAFETY: the caller's promise.
        let packed = unsafe { block.cast::<[u8; N_REGISTERS]>().read() };
        [
            packed.map(|packed| packed & 15),
            packed.map(|packed| packed >> 4),
        ]
    }
}

pub(super) struct Q3K;

impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const D: usize = 108;
    const BIAS: u32 = 2;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let (c0, c1) = (crumbs::<V>(block.add(32)), crumbs::<V>(block.add(64)));
            let (a, b) = (V::load(block), V::load(block.add(16)));
            // Bit s becomes bit 2 of the codes of each 32 elements.
            [
                V::or(c0[0], V::left::<2>(a, 4)),
                V::or(c0[1], V::left::<2>(b, 4)),
                V::or(c0[2], V::left::<1>(a, 4)),
                V::or(c0[3], V::left::<1>(b, 4)),
                V::or(c0[4], V::and(a, 4)),
                V::or(c0[5], V::and(b, 4)),
                V::or(c0[6], V::right::<1>(a, 4)),
                V::or(c0[7], V::right::<1>(b, 4)),
                V::or(c1[0], V::right::<2>(a, 4)),
                V::or(c1[1], V::right::<2>(b, 4)),
                V::or(c1[2], V::right::<3>(a, 4)),
                V::or(c1[3], V::right::<3>(b, 4)),
                V::or(c1[4], V::right::<4>(a, 4)),
                V::or(c1[5], V::right::<4>(b, 4)),
                V::or(c1[6], V::right::<5>(a, 4)),
                V::or(c1[7], V::right::<5>(b, 4)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> [[u8; N_REGISTERS]; 2] {
        // Six bits each, plus 32: the low four of scales 0 to 7 and 8 to 15 in the nibbles of eight
        // bytes, the upper two in four more.
        // SAFETY: the caller's promise.
        let [low, low_rest, high] =
            unsafe { block.add(96).cast::<[u32; 3]>().read_unaligned() }.map(u32::from_le);
        let (nibbles, upper) = (0x0f0f_0f0f, 0x3030_3030);
        let scales = [
            low & nibbles | high << 4 & upper,
            low_rest & nibbles | high << 2 & upper,
            low >> 4 & nibbles | high & upper,
            low_rest >> 4 & nibbles | high >> 2 & upper,
        ];
        let mut bytes = [0; N_REGISTERS];
        for (bytes, scales) in bytes.as_chunks_mut().0.iter_mut().zip(scales) {
            *bytes = scales.to_le_bytes();
        }
        [bytes.map(|scale| scale.wrapping_sub(32)), [0; N_REGISTERS]]
    }
}
