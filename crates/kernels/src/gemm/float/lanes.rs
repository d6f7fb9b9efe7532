//! The loops of a float product, written once for all instruction sets.
//!
//! A sum is taken in [`LANES`] partial sums, in `P` registers: one of 512 bits, two of 256, four of 128. An
//! implementation of [`Registers`] provides these registers and their instructions; [`kernel`](super::kernel)
//! compiles the loops for it.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

pub(super) use crate::dot::LANES;

/// Adjacent values that go into the partial sums, aligned to be loaded at once.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct Group(pub(super) [f32; LANES]);

/// Rows of weights that are computed together, and interleaved in a panel.
pub(super) const ROWS: usize = 4;

/// Bytes of a group of two-byte weights.
const HALVES: usize = 2 * LANES;

/// Bytes of a group of f32 weights.
const SINGLES: usize = 4 * LANES;

/// Weights that are multiplied as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    F16,
    BF16,
    F32,
}

impl Stored {
    /// Bytes of a group.
    pub(super) const fn group_bytes(self) -> usize {
        match self {
            Stored::F16 | Stored::BF16 => HALVES,
            Stored::F32 => SINGLES,
        }
    }

    /// True if all products with rounded activations are exact, so that fusing them with the addition
    /// changes nothing.
    pub(super) const fn fused(self) -> bool {
        !matches!(self, Stored::F32)
    }
}

/// [`Stored`], known when a kernel is compiled.
pub(super) trait Element {
    const STORED: Stored;

    /// One group of weights as f32.
    ///
    /// # Safety
    /// The machine has the instructions of `G`; a group of bytes is at `bytes`.
    unsafe fn load<G: Registers<P>, const P: usize>(bytes: *const u8) -> [G::Part; P];
}

pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct F32;

impl Element for F16 {
    const STORED: Stored = Stored::F16;

    #[inline(always)]
    unsafe fn load<G: Registers<P>, const P: usize>(bytes: *const u8) -> [G::Part; P] {
        // SAFETY: the caller's promise.
        unsafe { G::f16(&*bytes.cast()) }
    }
}

impl Element for BF16 {
    const STORED: Stored = Stored::BF16;

    #[inline(always)]
    unsafe fn load<G: Registers<P>, const P: usize>(bytes: *const u8) -> [G::Part; P] {
        // SAFETY: the caller's promise.
        unsafe { G::bf16(&*bytes.cast()) }
    }
}

impl Element for F32 {
    const STORED: Stored = Stored::F32;

    #[inline(always)]
    unsafe fn load<G: Registers<P>, const P: usize>(bytes: *const u8) -> [G::Part; P] {
        // SAFETY: the caller's promise.
        unsafe { G::f32(&*bytes.cast()) }
    }
}

/// `P` registers of one instruction set that hold a group.
///
/// # Safety
/// Callers of any method must know that the machine has the instructions.
pub(super) trait Registers<const P: usize> {
    /// One register.
    type Part: Copy;

    unsafe fn zero() -> Self::Part;

    /// Register `part` of the group.
    unsafe fn load(group: &Group, part: usize) -> Self::Part;

    /// Writes register `part` of the group.
    unsafe fn store(value: Self::Part, group: &mut Group, part: usize);

    unsafe fn f32(bytes: &[u8; SINGLES]) -> [Self::Part; P];

    unsafe fn f16(bytes: &[u8; HALVES]) -> [Self::Part; P];

    /// Weights below [`MIN_BF16`](super::rounding::MIN_BF16) become zeros.
    unsafe fn bf16(bytes: &[u8; HALVES]) -> [Self::Part; P];

    /// `acc + w · x`, fused where the machine can: the product is exact.
    unsafe fn add_exact(acc: Self::Part, w: Self::Part, x: Self::Part) -> Self::Part;

    /// `acc + w · x`, both operations rounded.
    unsafe fn add_rounded(acc: Self::Part, w: Self::Part, x: Self::Part) -> Self::Part;

    /// The sum of a group, in the order of [`crate::dot::sum_lanes`].
    unsafe fn sum(group: [Self::Part; P]) -> f32;
}

/// `acc + w · x` of one register.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn add<G: Registers<P>, const P: usize, const FUSED: bool>(
    acc: G::Part,
    w: G::Part,
    x: G::Part,
) -> G::Part {
    // SAFETY: the caller's promise.
    unsafe {
        if FUSED {
            G::add_exact(acc, w, x)
        } else {
            G::add_rounded(acc, w, x)
        }
    }
}

/// `acc[r, t] += w[r] · x[t]`, lane by lane, for [`ROWS`] rows of a panel; `acc` is `[ROWS, T]`. If this is
/// the `first` panel, previous contents are ignored.
///
/// A register's worth of lanes is summed over the whole panel before the next one is, which leaves
/// registers for larger tiles.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
pub(super) unsafe fn tile<G: Registers<P>, const P: usize, const T: usize, const FUSED: bool>(
    w: &[[Group; ROWS]],
    x: &[&[Group]],
    acc: &mut [Group],
    first: bool,
) {
    let n = w.len();
    let mut rows = [x[0]; T];
    for t in 0..T {
        rows[t] = &x[t][..n];
    }
    let acc = &mut acc[..ROWS * T];
    // SAFETY: the caller's promise.
    unsafe {
        for part in 0..P {
            let mut sums = [[G::zero(); T]; ROWS];
            if !first {
                for r in 0..ROWS {
                    for t in 0..T {
                        sums[r][t] = G::load(&acc[r * T + t], part);
                    }
                }
            }
            for i in 0..n {
                let mut x = [G::zero(); T];
                for t in 0..T {
                    x[t] = G::load(&rows[t][i], part);
                }
                for r in 0..ROWS {
                    let w = G::load(&w[i][r], part);
                    for t in 0..T {
                        sums[r][t] = add::<G, P, FUSED>(sums[r][t], w, x[t]);
                    }
                }
            }
            for r in 0..ROWS {
                for t in 0..T {
                    G::store(sums[r][t], &mut acc[r * T + t], part);
                }
            }
        }
    }
}

/// `sums[i, t] = Σ_j w[i, j] · x[t, j]` straight from stored rows, `R` at a time; `sums` is
/// `[n_rows, T]`.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
pub(super) unsafe fn direct<
    G: Registers<P>,
    E: Element,
    const P: usize,
    const R: usize,
    const T: usize,
>(
    w: &[u8],
    row_bytes: usize,
    x: &[&[Group]],
    sums: &mut [f32],
) {
    let n_rows = sums.len() / T;
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + R <= n_rows {
            direct_rows::<G, E, P, R, T>(&w[i * row_bytes..], row_bytes, x, &mut sums[i * T..]);
            i += R;
        }
        while i < n_rows {
            direct_rows::<G, E, P, 1, T>(&w[i * row_bytes..], row_bytes, x, &mut sums[i * T..]);
            i += 1;
        }
    }
}

/// Bytes from those that are multiplied to those that are prefetched.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const AHEAD: usize = 32 << 10;

/// Prefetches `n` bytes behind `at`. Rows that are multiplied together are shared out evenly over their groups: they, and
/// what follows, are one piece.
#[inline(always)]
fn prefetch_behind(at: *const u8, n: usize) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        use crate::gemm::prefetch::{Level, lines};
        lines(Level::Second, at.wrapping_add(AHEAD), n);
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (at, n);
}

/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn direct_rows<
    G: Registers<P>,
    E: Element,
    const P: usize,
    const R: usize,
    const T: usize,
>(
    w: &[u8],
    row_bytes: usize,
    x: &[&[Group]],
    sums: &mut [f32],
) {
    let fused = const { E::STORED.fused() };
    let group_bytes = const { E::STORED.group_bytes() };
    let n = row_bytes / group_bytes;
    let rest = row_bytes % group_bytes;
    let w = &w[..R * row_bytes];
    let mut rows = [x[0]; T];
    for t in 0..T {
        rows[t] = &x[t][..row_bytes.div_ceil(group_bytes)];
    }
    // SAFETY: the caller's promise; `i < n` groups of each of the `R` rows are there.
    unsafe {
        let mut acc = [[[G::zero(); P]; T]; R];
        for i in 0..n {
            prefetch_behind(
                w.as_ptr().wrapping_add(i * R * group_bytes),
                R * group_bytes,
            );
            for r in 0..R {
                let w = E::load::<G, P>(w.as_ptr().add(r * row_bytes + i * group_bytes));
                for t in 0..T {
                    for p in 0..P {
                        let x = G::load(&rows[t][i], p);
                        acc[r][t][p] = if fused {
                            G::add_exact(acc[r][t][p], w[p], x)
                        } else {
                            G::add_rounded(acc[r][t][p], w[p], x)
                        };
                    }
                }
            }
        }
        if rest > 0 {
            for r in 0..R {
                // Zeros add nothing to sums that began with +0.
                let mut bytes = [0; SINGLES];
                bytes[..rest].copy_from_slice(&w[r * row_bytes + n * group_bytes..][..rest]);
                let w = E::load::<G, P>(bytes.as_ptr());
                for t in 0..T {
                    for p in 0..P {
                        let x = G::load(&rows[t][n], p);
                        acc[r][t][p] = if fused {
                            G::add_exact(acc[r][t][p], w[p], x)
                        } else {
                            G::add_rounded(acc[r][t][p], w[p], x)
                        };
                    }
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                sums[r * T + t] = G::sum(acc[r][t]);
            }
        }
    }
}

/// Decodes columns of [`ROWS`] stored rows into a panel, padded with zeros.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
pub(super) unsafe fn unpack<G: Registers<P>, E: Element, const P: usize>(
    rows: [&[u8]; ROWS],
    panel: &mut [[Group; ROWS]],
) {
    let group_bytes = const { E::STORED.group_bytes() };
    let n = rows[0].len() / group_bytes;
    let rest = rows[0].len() % group_bytes;
    for row in rows {
        assert!(row.len() == rows[0].len());
    }
    let (whole, last) = panel.split_at_mut(n);
    // SAFETY: the caller's promise; `i < n` whole groups of bytes are there.
    unsafe {
        for (i, groups) in whole.iter_mut().enumerate() {
            for r in 0..ROWS {
                let parts = E::load::<G, P>(rows[r].as_ptr().add(i * group_bytes));
                for p in 0..P {
                    G::store(parts[p], &mut groups[r], p);
                }
            }
        }
        if rest > 0 {
            for r in 0..ROWS {
                let mut bytes = [0; SINGLES];
                bytes[..rest].copy_from_slice(&rows[r][n * group_bytes..]);
                let parts = E::load::<G, P>(bytes.as_ptr());
                for p in 0..P {
                    G::store(parts[p], &mut last[0][r], p);
                }
            }
        }
    }
}

/// The sum of each group.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
pub(super) unsafe fn sums<G: Registers<P>, const P: usize>(groups: &[Group], out: &mut [f32]) {
    for (group, out) in groups.iter().zip(out) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut parts = [G::zero(); P];
            for p in 0..P {
                parts[p] = G::load(group, p);
            }
            *out = G::sum(parts);
        }
    }
}

/// The loops, compiled for one instruction set.
pub(super) struct Kernel {
    /// The maximum activation rows of [`Kernel::tile`]; the minimum is one.
    pub(super) tokens: usize,
    /// The maximum activation rows of [`Kernel::direct`]; the minimum is one.
    pub(super) direct_tokens: usize,
    /// More activation rows than this are multiplied faster with weights that are decoded into panels first.
    pub(super) most_direct: usize,
    /// [`direct`].
    pub(super) direct: Direct,
    /// [`unpack`].
    pub(super) unpack: Unpack,
    /// [`tile`], fused if the flag is set.
    pub(super) tile: Tile,
    /// [`sums`].
    pub(super) sums: unsafe fn(groups: &[Group], out: &mut [f32]),
}

pub(super) type Unpack = unsafe fn(Stored, rows: [&[u8]; ROWS], panel: &mut [[Group; ROWS]]);

pub(super) type Tile =
    unsafe fn(bool, w: &[[Group; ROWS]], x: &[&[Group]], acc: &mut [Group], first: bool);

pub(super) type Direct =
    unsafe fn(Stored, w: &[u8], row_bytes: usize, x: &[&[Group]], sums: &mut [f32]);

/// Compiles the loops for registers and the instructions they need, as `KERNEL`.
///
/// The activation rows of a tile are followed by the pairs of activation rows and weight rows that a direct
/// product takes at a time, and by the most activation rows for which direct products are the faster ones.
macro_rules! kernel {
    (
        $(#[$features:meta])*
        $registers:ty, $parts:literal,
        tile: [$($tile_tokens:literal),*],
        direct: [$($tokens:literal => $rows:literal),*],
        most_direct: $most_direct:expr,
    ) => {
        use $crate::gemm::float::lanes;

        /// The loops for these registers.
        pub(in $crate::gemm::float) const KERNEL: lanes::Kernel = lanes::Kernel {
            tokens: {
                let tokens = [$($tile_tokens),*];
                tokens[tokens.len() - 1]
            },
            direct_tokens: {
                let tokens = [$($tokens),*];
                tokens[tokens.len() - 1]
            },
            most_direct: $most_direct,
            direct,
            unpack,
            tile,
            sums,
        };

        /// # Safety
        /// The machine has the features named on this function.
        $(#[$features])*
        unsafe fn direct(
            stored: lanes::Stored,
            w: &[u8],
            row_bytes: usize,
            x: &[&[lanes::Group]],
            sums: &mut [f32],
        ) {
            /// # Safety
            /// The machine has the features named on this function.
            $(#[$features])*
            unsafe fn typed<E: lanes::Element>(
                w: &[u8],
                row_bytes: usize,
                x: &[&[lanes::Group]],
                sums: &mut [f32],
            ) {
                match x.len() {
                    $(
                        // SAFETY: the caller's promise.
                        $tokens => unsafe {
                            lanes::direct::<$registers, E, $parts, $rows, $tokens>(
                                w, row_bytes, x, sums,
                            );
                        },
                    )*
                    n => unreachable!("a kernel was asked for {n} activation rows"),
                }
            }
            // SAFETY: the caller's promise.
            unsafe {
                match stored {
                    lanes::Stored::F16 => typed::<lanes::F16>(w, row_bytes, x, sums),
                    lanes::Stored::BF16 => typed::<lanes::BF16>(w, row_bytes, x, sums),
                    lanes::Stored::F32 => typed::<lanes::F32>(w, row_bytes, x, sums),
                }
            }
        }

        /// # Safety
        /// The machine has the features named on this function.
        $(#[$features])*
        unsafe fn unpack(
            stored: lanes::Stored,
            rows: [&[u8]; lanes::ROWS],
            panel: &mut [[lanes::Group; lanes::ROWS]],
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match stored {
                    lanes::Stored::F16 => {
                        lanes::unpack::<$registers, lanes::F16, $parts>(rows, panel);
                    }
                    lanes::Stored::BF16 => {
                        lanes::unpack::<$registers, lanes::BF16, $parts>(rows, panel);
                    }
                    lanes::Stored::F32 => {
                        lanes::unpack::<$registers, lanes::F32, $parts>(rows, panel);
                    }
                }
            }
        }

        /// # Safety
        /// The machine has the features named on this function.
        $(#[$features])*
        unsafe fn tile(
            fused: bool,
            w: &[[lanes::Group; lanes::ROWS]],
            x: &[&[lanes::Group]],
            acc: &mut [lanes::Group],
            first: bool,
        ) {
            match (x.len(), fused) {
                $(
                    // SAFETY: the caller's promise.
                    ($tile_tokens, true) => unsafe {
                        lanes::tile::<$registers, $parts, $tile_tokens, true>(w, x, acc, first);
                    },
                    // SAFETY: the caller's promise.
                    ($tile_tokens, false) => unsafe {
                        lanes::tile::<$registers, $parts, $tile_tokens, false>(w, x, acc, first);
                    },
                )*
                (n, _) => unreachable!("a kernel was asked for {n} activation rows"),
            }
        }

        /// # Safety
        /// The machine has the features named on this function.
        $(#[$features])*
        unsafe fn sums(groups: &[lanes::Group], out: &mut [f32]) {
            // SAFETY: the caller's promise.
            unsafe { lanes::sums::<$registers, $parts>(groups, out) }
        }
    };
}
pub(super) use kernel;
