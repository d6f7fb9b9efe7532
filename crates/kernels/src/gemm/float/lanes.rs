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

    /// A group.
    type Bytes;

    /// The whole groups of a row, and what is left.
    fn groups(row: &[u8]) -> (&[Self::Bytes], &[u8]);

    /// What is left of a row, and zeros.
    fn padded(rest: &[u8]) -> Self::Bytes;

    /// One group of weights as f32.
    fn load<G: Registers<P>, const P: usize>(simd: G, bytes: &Self::Bytes) -> [G::Part; P];
}

macro_rules! element {
    ($type:ident, $bytes:ident, $load:ident) => {
        pub(super) struct $type;

        impl Element for $type {
            const STORED: Stored = Stored::$type;

            type Bytes = [u8; $bytes];

            #[inline(always)]
            fn groups(row: &[u8]) -> (&[[u8; $bytes]], &[u8]) {
                row.as_chunks()
            }

            #[inline(always)]
            fn padded(rest: &[u8]) -> [u8; $bytes] {
                let mut bytes = [0; $bytes];
                bytes[..rest.len()].copy_from_slice(rest);
                bytes
            }

            #[inline(always)]
            fn load<G: Registers<P>, const P: usize>(
                simd: G,
                bytes: &[u8; $bytes],
            ) -> [G::Part; P] {
                simd.$load(bytes)
            }
        }
    };
}
element!(F16, HALVES, f16);
element!(BF16, HALVES, bf16);
element!(F32, SINGLES, f32);

/// `P` registers of one instruction set that hold a group: what a token of [`simd`](crate::simd) has besides, for sums that
/// take the registers one by one.
pub(super) trait Registers<const P: usize>: Copy {
    /// One register.
    type Part: Copy;

    fn zero(self) -> Self::Part;

    /// Register `part` of the group.
    fn load(self, group: &Group, part: usize) -> Self::Part;

    /// Writes register `part` of the group.
    fn store(self, value: Self::Part, group: &mut Group, part: usize);

    fn f32(self, bytes: &[u8; SINGLES]) -> [Self::Part; P];

    fn f16(self, bytes: &[u8; HALVES]) -> [Self::Part; P];

    /// Weights below [`MIN_BF16`](super::rounding::MIN_BF16) become zeros.
    fn bf16(self, bytes: &[u8; HALVES]) -> [Self::Part; P];

    /// `acc + w · x`, fused where the machine can: the product is exact.
    fn add_exact(self, acc: Self::Part, w: Self::Part, x: Self::Part) -> Self::Part;

    /// `acc + w · x`, both operations rounded.
    fn add_rounded(self, acc: Self::Part, w: Self::Part, x: Self::Part) -> Self::Part;

    /// The sum of a group, in the order of [`crate::dot::sum_lanes`].
    fn sum(self, group: [Self::Part; P]) -> f32;

    /// `acc + w · x` of one register; `fused` is known when the kernel is compiled.
    #[inline(always)]
    fn add(self, fused: bool, acc: Self::Part, w: Self::Part, x: Self::Part) -> Self::Part {
        match fused {
            true => self.add_exact(acc, w, x),
            false => self.add_rounded(acc, w, x),
        }
    }
}

/// `acc[r, t] += w[r] · x[t]`, lane by lane, for [`ROWS`] rows of a panel; `acc` is `[ROWS, T]`. If this is
/// the `first` panel, previous contents are ignored.
///
/// A register's worth of lanes is summed over the whole panel before the next one is, which leaves
/// registers for larger tiles.
#[inline(always)]
pub(super) fn tile<G: Registers<P>, const P: usize, const T: usize, const FUSED: bool>(
    simd: G,
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
    for part in 0..P {
        let mut sums = [[simd.zero(); T]; ROWS];
        if !first {
            for r in 0..ROWS {
                for t in 0..T {
                    sums[r][t] = simd.load(&acc[r * T + t], part);
                }
            }
        }
        for i in 0..n {
            let mut x = [simd.zero(); T];
            for t in 0..T {
                x[t] = simd.load(&rows[t][i], part);
            }
            for r in 0..ROWS {
                let w = simd.load(&w[i][r], part);
                for t in 0..T {
                    sums[r][t] = simd.add(FUSED, sums[r][t], w, x[t]);
                }
            }
        }
        for r in 0..ROWS {
            for t in 0..T {
                simd.store(sums[r][t], &mut acc[r * T + t], part);
            }
        }
    }
}

/// `sums[i, t] = Σ_j w[i, j] · x[t, j]` straight from stored rows, `R` at a time; `sums` is
/// `[n_rows, T]`.
#[inline(always)]
pub(super) fn direct<
    G: Registers<P>,
    E: Element,
    const P: usize,
    const R: usize,
    const T: usize,
>(
    simd: G,
    w: &[u8],
    row_bytes: usize,
    x: &[&[Group]],
    sums: &mut [f32],
) {
    let n_rows = sums.len() / T;
    let mut i = 0;
    while i + R <= n_rows {
        let (w, sums) = (&w[i * row_bytes..], &mut sums[i * T..]);
        direct_rows::<G, E, P, R, T>(simd, w, row_bytes, x, sums);
        i += R;
    }
    while i < n_rows {
        let (w, sums) = (&w[i * row_bytes..], &mut sums[i * T..]);
        direct_rows::<G, E, P, 1, T>(simd, w, row_bytes, x, sums);
        i += 1;
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

/// [`Element::groups`] of rows of `row_bytes` each: as many groups of all.
#[inline(always)]
fn groups_of_rows<E: Element, const R: usize>(
    rows: [&[u8]; R],
    row_bytes: usize,
) -> ([&[E::Bytes]; R], [&[u8]; R]) {
    let n = row_bytes / const { E::STORED.group_bytes() };
    let mut groups: [&[E::Bytes]; R] = [&[]; R];
    let mut rest: [&[u8]; R] = [&[]; R];
    for r in 0..R {
        assert!(rows[r].len() == row_bytes);
        (groups[r], rest[r]) = E::groups(rows[r]);
        groups[r] = &groups[r][..n];
    }
    (groups, rest)
}

#[inline(always)]
fn direct_rows<G: Registers<P>, E: Element, const P: usize, const R: usize, const T: usize>(
    simd: G,
    w: &[u8],
    row_bytes: usize,
    x: &[&[Group]],
    sums: &mut [f32],
) {
    let group_bytes = const { E::STORED.group_bytes() };
    let n = row_bytes / group_bytes;
    let n_all = row_bytes.div_ceil(group_bytes);
    let mut of_rows: [&[u8]; R] = [&[]; R];
    for r in 0..R {
        of_rows[r] = &w[r * row_bytes..][..row_bytes];
    }
    let (groups, rest) = groups_of_rows::<E, R>(of_rows, row_bytes);
    let mut rows = [x[0]; T];
    for t in 0..T {
        rows[t] = &x[t][..n_all];
    }
    let mut acc = [[[simd.zero(); P]; T]; R];
    for i in 0..n {
        let at = w.as_ptr().wrapping_add(i * R * group_bytes);
        prefetch_behind(at, R * group_bytes);
        for r in 0..R {
            let w = E::load(simd, &groups[r][i]);
            for t in 0..T {
                add_group::<G, E, P>(simd, &mut acc[r][t], w, &rows[t][i]);
            }
        }
    }
    if n < n_all {
        for r in 0..R {
            // Zeros add nothing to sums that began with +0.
            let w = E::load(simd, &E::padded(rest[r]));
            for t in 0..T {
                add_group::<G, E, P>(simd, &mut acc[r][t], w, &rows[t][n]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            sums[r * T + t] = simd.sum(acc[r][t]);
        }
    }
}

/// `acc += w · x` of a group.
#[inline(always)]
fn add_group<G: Registers<P>, E: Element, const P: usize>(
    simd: G,
    acc: &mut [G::Part; P],
    w: [G::Part; P],
    x: &Group,
) {
    for p in 0..P {
        let x = simd.load(x, p);
        acc[p] = simd.add(const { E::STORED.fused() }, acc[p], w[p], x);
    }
}

/// Decodes columns of [`ROWS`] stored rows into a panel, padded with zeros.
#[inline(always)]
pub(super) fn unpack<G: Registers<P>, E: Element, const P: usize>(
    simd: G,
    rows: [&[u8]; ROWS],
    panel: &mut [[Group; ROWS]],
) {
    let (groups, rest) = groups_of_rows::<E, ROWS>(rows, rows[0].len());
    let (whole, last) = panel.split_at_mut(groups[0].len());
    for (i, to) in whole.iter_mut().enumerate() {
        for r in 0..ROWS {
            store_group(simd, E::load(simd, &groups[r][i]), &mut to[r]);
        }
    }
    if !rest[0].is_empty() {
        for r in 0..ROWS {
            store_group(simd, E::load(simd, &E::padded(rest[r])), &mut last[0][r]);
        }
    }
}

#[inline(always)]
fn store_group<G: Registers<P>, const P: usize>(simd: G, parts: [G::Part; P], to: &mut Group) {
    for p in 0..P {
        simd.store(parts[p], to, p);
    }
}

/// The sum of each group.
#[inline(always)]
pub(super) fn sums<G: Registers<P>, const P: usize>(simd: G, groups: &[Group], out: &mut [f32]) {
    for (group, out) in groups.iter().zip(out) {
        let mut parts = [simd.zero(); P];
        for p in 0..P {
            parts[p] = simd.load(group, p);
        }
        *out = simd.sum(parts);
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

/// Compiles the loops for a token, which is made in functions with the instructions that it stands for, as `KERNEL`.
///
/// The activation rows of a tile are followed by the pairs of activation rows and weight rows that a direct
/// product takes at a time, and by the most activation rows for which direct products are the faster ones.
macro_rules! kernel {
    (
        $(#[$features:meta])*
        token: $token:expr, parts: $parts:literal,
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
                        $tokens => lanes::direct::<_, E, $parts, $rows, $tokens>(
                            $token, w, row_bytes, x, sums,
                        ),
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
            match stored {
                lanes::Stored::F16 => lanes::unpack::<_, lanes::F16, $parts>($token, rows, panel),
                lanes::Stored::BF16 => lanes::unpack::<_, lanes::BF16, $parts>($token, rows, panel),
                lanes::Stored::F32 => lanes::unpack::<_, lanes::F32, $parts>($token, rows, panel),
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
                    ($tile_tokens, true) => {
                        lanes::tile::<_, $parts, $tile_tokens, true>($token, w, x, acc, first);
                    }
                    ($tile_tokens, false) => {
                        lanes::tile::<_, $parts, $tile_tokens, false>($token, w, x, acc, first);
                    }
                )*
                (n, _) => unreachable!("a kernel was asked for {n} activation rows"),
            }
        }

        /// # Safety
        /// The machine has the features named on this function.
        $(#[$features])*
        unsafe fn sums(groups: &[lanes::Group], out: &mut [f32]) {
            lanes::sums::<_, $parts>($token, groups, out);
        }
    };
}
pub(super) use kernel;
