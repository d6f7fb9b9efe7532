//! AMX: products of matrices of bytes in tile registers of sixteen rows of 64 bytes.
//!
//! Rust has no stable intrinsics for it, so instructions are written out, by [`tiles`]. The compiler never touches the tile
//! registers of its own accord, so what one block of them leaves there the next one finds.
//! In tests of this crate, machines with AVX-512 but without AMX emulate it.

#[cfg(test)]
pub(crate) mod emulated;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Whether the processor multiplies tiles of bytes, and the system lets this process do so.
///
/// Linux gives a process the memory that tiles take in its signal frames only if it asks, for all of its threads.
/// Other systems aren't asked.
pub(crate) fn is_available() -> bool {
    is_offered() || cfg!(test)
}

/// The same, without what tests emulate.
fn is_offered() -> bool {
    static OFFERED: OnceLock<bool> = OnceLock::new();
    *OFFERED.get_or_init(|| has_instructions() && saves_tiles() && is_permitted())
}

/// Whether the processor has tiles, and products of bytes in them.
fn has_instructions() -> bool {
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const FEATURES: u32 = 7;
    if __cpuid(0).eax < FEATURES {
        return false;
    }
    let features = __cpuid_count(FEATURES, 0).edx;
    features & AMX_TILE != 0 && features & AMX_INT8 != 0
}

/// Whether the system saves tiles when threads take turns.
fn saves_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILES: u32 = 0b11 << 17;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let enabled: u32;
    // SAFETY: the instruction exists where OSXSAVE is set, and reads a register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    enabled & TILES == TILES
}

/// Asks for this process's tiles.
fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        let result: i64;
        // SAFETY: this system call reads and writes no memory of the process; system calls change `rcx` and `r11`.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Writes out instructions on tiles, with the pointers that they name: `tiles!(from = pointer; "tileloadd " => "tmm0, [{from}
/// + {row}]")`. Rows are [`ROW_BYTES`] apart.
///
/// Safety: the machine has AMX, the tiles have shapes, and what is read and written is there.
macro_rules! tiles {
    ($($name:ident = $pointer:expr),*; $($instruction:expr => $operands:literal),+) => {{
        #[cfg(test)]
        let is_emulated = $crate::amx::emulated::is_on();
        #[cfg(not(test))]
        let is_emulated = false;
        if is_emulated {
            #[cfg(test)]
            {
                let pointers: &[(&str, *const u8)] = &[$((stringify!($name), ($pointer).cast::<u8>())),*];
                $($crate::amx::emulated::run($instruction, $operands, pointers);)+
            }
        } else {
            ::std::arch::asm!(
                $(concat!($instruction, $operands),)+
                "/* {row} */",
                $($name = in(reg) $pointer,)*
                row = in(reg) $crate::amx::ROW_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags),
            );
        }
    }};
}

pub(crate) use tiles;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;

/// Bytes of a row of a tile.
pub(crate) const ROW_BYTES: usize = 64;

/// Shapes of the tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Shapes the tile registers for products over `K` columns, 64 or 32: registers 0 to 3 hold sums, 16 rows of sixteen
/// 32-bit integers; 4 and 5 16 rows of `K` bytes; 6 and 7 `K / 4` rows of sixteen times four bytes. All are zero.
///
/// # Safety
/// The machine has AMX.
pub(crate) unsafe fn begin<const K: usize>() {
    const { assert!(K == 64 || K == 32) };
    let mut shapes = Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    for i in 0..8 {
        let (rows, row_bytes) = match i {
            0..=3 => (ROWS, ROW_BYTES),
            4..=5 => (ROWS, K),
            _ => (K / 4, ROW_BYTES),
        };
        (shapes.rows[i], shapes.row_bytes[i]) = (rows as u8, row_bytes as u16);
    }
    #[cfg(test)]
    if emulated::is_on() {
        let shapes = shapes.rows.into_iter().zip(shapes.row_bytes);
        emulated::shape(shapes.map(|(rows, bytes)| (usize::from(rows), usize::from(bytes))));
        return;
    }
    // SAFETY: the caller's promise; 64 bytes are read.
    unsafe {
        asm!(
            "ldtilecfg [{}]", in(reg) &raw const shapes,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags),
        );
    }
}

/// Gives the tile registers back, so that the system needn't save them.
///
/// # Safety
/// The machine has AMX.
pub(crate) unsafe fn end() {
    #[cfg(test)]
    if emulated::is_on() {
        emulated::release();
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack, preserves_flags),
        );
    }
}

/// Sets the registers for sums to zero.
///
/// # Safety
/// The machine has AMX, and tiles have shapes.
#[inline]
pub(crate) unsafe fn clear() {
    // SAFETY: the caller's promise.
    unsafe {
        tiles!(;
            "tilezero " => "tmm0",
            "tilezero " => "tmm1",
            "tilezero " => "tmm2",
            "tilezero " => "tmm3"
        );
    }
}

/// Writes the registers for sums to four tiles of 1,024 bytes, which follow one another from `sums` on.
///
/// # Safety
/// As [`clear`]; the tiles are there.
#[inline]
pub(crate) unsafe fn store<T>(sums: *mut T) {
    // SAFETY: the caller's promise.
    unsafe {
        tiles!(
            sums = sums;
            "tilestored " => "[{sums} + {row}], tmm0",
            "tilestored " => "[{sums} + {row} + 1024], tmm1",
            "tilestored " => "[{sums} + {row} + 2048], tmm2",
            "tilestored " => "[{sums} + {row} + 3072], tmm3"
        );
    }
}

/// Multiply-adds of a pass of [`multiply_adds`].
pub(crate) const PASS: u64 = 4 * (ROWS * ROW_BYTES * ROWS) as u64;

/// Multiplies tiles that are in registers, four a pass.
///
/// # Safety
/// The machine has AMX.
pub(crate) unsafe fn multiply_adds(passes: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        begin::<64>();
        for _ in 0..passes {
            tiles!(;
                "tdpbusd " => "tmm0, tmm4, tmm6",
                "tdpbusd " => "tmm1, tmm4, tmm6",
                "tdpbusd " => "tmm2, tmm5, tmm7",
                "tdpbusd " => "tmm3, tmm5, tmm7"
            );
        }
        end();
    }
}
