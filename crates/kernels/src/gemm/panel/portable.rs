//! Sixteen lanes in plain Rust: the reference, and what the compiler makes of it.

use super::lanes::{Acts, Lanes};
use super::{Lanes as Array, ROWS};

#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn map<A: Copy, B: Copy, C>(a: Array<A>, b: Array<B>, f: impl Fn(A, B) -> C) -> Array<C> {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Portable {
    type I = Array<i32>;
    type F = Array<f32>;

    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    unsafe fn zero() -> Self::I {
        [0; ROWS]
    }

    #[inline(always)]
    unsafe fn load_i(from: *const Array<i32>) -> Self::I {
        // SAFETY: the caller's promise.
        unsafe { *from }
    }

    #[inline(always)]
    unsafe fn store_i(to: *mut Array<i32>, v: Self::I) {
        // SAFETY: the caller's promise.
        unsafe { *to = v }
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        for quad in 0..n_quads {
            // SAFETY: the caller's promise.
            let codes = unsafe { &*codes.add(quad) };
            for (t, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let act = unsafe { *acts.quad(quad, t).cast::<[i8; 4]>() }.map(i32::from);
                for (sum, code) in sums.iter_mut().zip(codes) {
                    for (code, act) in code.iter().zip(act) {
                        *sum += i32::from(*code) * act;
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        let mut dots = [[0; ROWS]; T];
        // SAFETY: the caller's promise.
        let scales = unsafe {
            Self::add_dots::<T, MAX>(&mut dots, codes, acts, n_quads);
            *scales
        };
        for (sums, dots) in sums.iter_mut().zip(dots) {
            *sums = map(*sums, map(dots, scales, |a, b| a * b), |a, b| a + b);
        }
    }

    #[inline(always)]
    unsafe fn add_pairs(sum: Self::I, weights: *const Array<[i16; 2]>, pair: [i16; 2]) -> Self::I {
        let pair = pair.map(i32::from);
        // SAFETY: the caller's promise.
        map(sum, unsafe { *weights }, |sum, w| {
            sum + i32::from(w[0]) * pair[0] + i32::from(w[1]) * pair[1]
        })
    }

    #[inline(always)]
    unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, |a, b| a - (b << SHIFT))
    }

    #[inline(always)]
    unsafe fn to_f(v: Self::I) -> Self::F {
        v.map(|v| v as f32)
    }

    #[inline(always)]
    unsafe fn load_f(from: *const Array<f32>) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { *from }
    }

    #[inline(always)]
    unsafe fn store_f(to: *mut Array<f32>, v: Self::F) {
        // SAFETY: the caller's promise.
        unsafe { *to = v }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        [v; ROWS]
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a * b)
    }
}
