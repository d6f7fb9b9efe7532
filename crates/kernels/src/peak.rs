//! The peak rates at which this machine can multiply and add, and read: what products of weights are measured
//! against.
//!
//! For multiplication, operands are in registers and a few lines of the nearest cache, in the pattern of the
//! inner loop of a matrix product, and sums are never widened, stored or scaled. Nothing that computes a
//! result can be faster with the same instructions.

mod memory;

pub use memory::{ReadAhead, read};

use crate::{Exec, Isa};

/// Multiply-adds per task, some tens of microseconds: few enough that threads end together.
const PER_TASK: u64 = 1 << 22;

/// Integers that the inner loop reads repeatedly.
const OPERANDS: usize = 4096;

/// Multiplies and adds at least `n` times on all threads of `exec`, by the widest instruction that kernels
/// use at its level; returns the number of multiply-adds.
///
/// The products are of bytes, summed in 16 bits where only `maddubs` exists and in 32 bits where dot
/// products of bytes do; at the portable level they are of 16-bit integers, by `pmaddwd` or what the
/// compiler makes of a plain loop. The caller takes the time.
pub fn multiply_adds(exec: &Exec, n: u64) -> u64 {
    let n_tasks = n.div_ceil(PER_TASK).max(1);
    let per_pass = pass_size(exec.isa);
    let passes = PER_TASK.div_ceil(per_pass);
    let n_tasks = usize::try_from(n_tasks).unwrap_or(usize::MAX);
    exec.pool.for_ranges(n_tasks, 1, |tasks| {
        for _ in tasks {
            work(exec.isa, passes);
        }
    });
    n_tasks as u64 * passes * per_pass
}

/// Multiply-adds of one pass over the operands.
fn pass_size(isa: Isa) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::isa::Level;
        match isa.level() {
            Level::Baseline | Level::Avx2 => (OPERANDS * x86::CODES) as u64,
            Level::AvxVnni | Level::Avx512 => (OPERANDS * x86::SUMS) as u64,
            Level::Amx => crate::amx::PASS,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        (OPERANDS * portable::ROWS) as u64
    }
}

fn work(isa: Isa, passes: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::isa::Level;
        match isa.level() {
            Level::Baseline => x86::sse2(passes),
            // SAFETY: these levels exist only where `Level::is_here` saw these features.
            Level::Avx2 => unsafe { x86::avx2(passes) },
            // SAFETY: as above.
            Level::AvxVnni => unsafe { x86::avxvnni(passes) },
            // SAFETY: as above.
            Level::Avx512 => unsafe { x86::avx512(passes) },
            // SAFETY: as above.
            Level::Amx => unsafe { crate::amx::multiply_adds(passes) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        portable::work(passes);
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod portable {
    use std::hint::black_box;

    use super::OPERANDS;

    /// Codes per activation.
    pub(super) const ROWS: usize = 4;

    /// Widened beforehand: every machine multiplies 16-bit integers, and few multiply bytes.
    pub(super) fn work(passes: u64) {
        let operands = [1i16; OPERANDS];
        let codes = [[1i16; OPERANDS / ROWS]; ROWS];
        let mut sums = [0i32; ROWS];
        for _ in 0..passes {
            for x in black_box(&operands).as_chunks::<{ OPERANDS / ROWS }>().0 {
                for (sum, codes) in sums.iter_mut().zip(black_box(&codes)) {
                    for (&x, &code) in x.iter().zip(codes) {
                        *sum = sum.wrapping_add(i32::from(x) * i32::from(code));
                    }
                }
            }
        }
        black_box(sums);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::OPERANDS;

    /// Registers of codes per register of activations where products and their sums are separate
    /// instructions: as many as the registers of AVX2 hold along with the sums.
    pub(super) const CODES: usize = 6;

    /// Accumulators where one instruction multiplies and adds: enough to hide its latency of five cycles at
    /// two per cycle.
    pub(super) const SUMS: usize = 12;

    pub(super) fn sse2(passes: u64) {
        let operands = [[1i16; 8]; OPERANDS / 8];
        // SAFETY: every machine of this architecture has SSE2.
        let codes: [__m128i; CODES] = black_box(unsafe { [_mm_set1_epi16(1); CODES] });
        // SAFETY: as above.
        let mut sums = unsafe { [_mm_setzero_si128(); CODES] };
        for _ in 0..passes {
            for x in black_box(&operands) {
                // SAFETY: as above; `x` has 16 bytes.
                let x = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
                for (sum, &code) in sums.iter_mut().zip(&codes) {
                    // SAFETY: as above.
                    *sum = unsafe { _mm_add_epi32(*sum, _mm_madd_epi16(code, x)) };
                }
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(passes: u64) {
        let operands = [[1i8; 32]; OPERANDS / 32];
        let codes: [__m256i; CODES] = black_box([_mm256_set1_epi8(1); CODES]);
        let mut sums = [_mm256_setzero_si256(); CODES];
        for _ in 0..passes {
            for x in black_box(&operands) {
                // SAFETY: `x` has 32 bytes.
                let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
                for (sum, &code) in sums.iter_mut().zip(&codes) {
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(code, x));
                }
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The machine has AVX2 and AVX-VNNI.
    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) unsafe fn avxvnni(passes: u64) {
        let operands = [[1i8; 32]; OPERANDS / 32];
        let codes = black_box(_mm256_set1_epi8(1));
        let mut sums: [__m256i; SUMS] = std::array::from_fn(|i| _mm256_set1_epi32(i as i32));
        for _ in 0..passes {
            for x in black_box(&operands) {
                // SAFETY: `x` has 32 bytes.
                let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
                for sum in &mut sums {
                    *sum = _mm256_dpbusd_avx_epi32(*sum, codes, x);
                }
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The machine has AVX-512 F and VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn avx512(passes: u64) {
        let operands = [[1i8; 64]; OPERANDS / 64];
        let codes = black_box(_mm512_set1_epi8(1));
        let mut sums: [__m512i; SUMS] = std::array::from_fn(|i| _mm512_set1_epi32(i as i32));
        for _ in 0..passes {
            for x in black_box(&operands) {
                // SAFETY: `x` has 64 bytes.
                let x = unsafe { _mm512_loadu_si512(x.as_ptr().cast()) };
                for sum in &mut sums {
                    *sum = _mm512_dpbusd_epi32(*sum, codes, x);
                }
            }
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn as_much_is_done_as_asked_for() {
        for isa in Isa::available() {
            let exec = Exec::new(2, isa);
            for n in [0, 1, PER_TASK, 3 * PER_TASK + 1] {
                let done = multiply_adds(&exec, n);
                assert!(
                    done >= n && done < n + 2 * PER_TASK,
                    "{isa}: {done} for {n}"
                );
            }
        }
    }

    /// Widest last: if the compiler optimised the loop away, rates would be implausible.
    #[test]
    fn rates_are_plausible() {
        for isa in Isa::available() {
            #[cfg(target_arch = "x86_64")]
            if isa.name() == "amx" && crate::amx::emulated::is_on() {
                println!("skipped: no AMX");
                continue;
            }
            let exec = Exec::new(1, isa);
            multiply_adds(&exec, 1);
            let start = Instant::now();
            let done = multiply_adds(&exec, 1 << 28);
            let rate = done as f64 / start.elapsed().as_secs_f64();
            // Two registers of 64 bytes a cycle, at 8 GHz, would be a thousand; a tile of AMX in sixteen cycles eight
            // thousand.
            let most = if isa.name() == "amx" { 16e12 } else { 2e12 };
            assert!((1e8..most).contains(&rate), "{isa}: {rate:e}");
        }
    }
}
