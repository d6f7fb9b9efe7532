//! Products of bytes in plain Rust: the reference, and what the compiler makes of it.

use super::Lanes;
use super::dots::{Acts, Dots};
use crate::simd::{Array, Portable};

impl Dots for Portable {
    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    fn add_pairs(self, sum: Array<i32>, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Array<i32> {
        let pair = pair.map(i32::from);
        Array::new(|l| {
            let [first, second] = weights[l].map(i32::from);
            sum.0[l] + first * pair[0] + second * pair[1]
        })
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Array<i32>; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        for (quad, codes) in codes.iter().enumerate() {
            for (t, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                let act = unsafe { *acts.quad(quad, t).cast::<[i8; 4]>() }.map(i32::from);
                for (sum, code) in sums.0.iter_mut().zip(codes) {
                    for (code, act) in code.iter().zip(act) {
                        *sum += i32::from(*code) * act;
                    }
                }
            }
        }
    }
}
