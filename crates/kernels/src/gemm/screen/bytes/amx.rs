//! Bytes in tiles of AMX.

use std::mem::MaybeUninit;

use super::{COLUMNS, Kernel, LINES, LINES_PER_STEP, Line, Sums, WeightTile};
use crate::amx::{self, tiles};
use crate::gemm::ROWS;
use crate::gemm::prefetch::{self, Level};

const _: () = assert!(LINES == amx::ROWS && ROWS == amx::ROWS && COLUMNS == amx::ROW_BYTES);

/// Bytes from weights that are multiplied to those that are prefetched.
const AHEAD: usize = 8 << 10;

pub(super) const KERNEL: Kernel = Kernel {
    begin: amx::begin::<64>,
    end: amx::end,
    multiply,
};

/// # Safety
/// As [`Multiply`](super::Multiply).
unsafe fn multiply([one, other]: [&[WeightTile]; 2], acts: &[Line]) -> Sums {
    assert!(one.len() == other.len() && acts.len() == one.len() * LINES_PER_STEP);
    let mut sums = MaybeUninit::<Sums>::uninit();
    // SAFETY: the caller's promise; there are activations for each tile of weights, and four tiles of sums are written.
    unsafe {
        amx::clear();
        for (i, (one, other)) in one.iter().zip(other).enumerate() {
            for tile in [one, other] {
                let next = std::ptr::from_ref(tile).cast::<u8>().wrapping_add(AHEAD);
                prefetch::lines(Level::Second, next, size_of::<WeightTile>());
            }
            tiles!(
                acts = acts.as_ptr().add(i * LINES_PER_STEP),
                one = std::ptr::from_ref(one),
                other = std::ptr::from_ref(other);
                "tileloadd " => "tmm4, [{acts} + {row}]",
                "tileloadd " => "tmm6, [{one} + {row}]",
                "tdpbssd " => "tmm0, tmm4, tmm6",
                "tileloadd " => "tmm7, [{other} + {row}]",
                "tdpbssd " => "tmm2, tmm4, tmm7",
                "tileloadd " => "tmm5, [{acts} + {row} + 1024]",
                "tdpbssd " => "tmm1, tmm5, tmm6",
                "tdpbssd " => "tmm3, tmm5, tmm7"
            );
        }
        amx::store(sums.as_mut_ptr());
        sums.assume_init()
    }
}
