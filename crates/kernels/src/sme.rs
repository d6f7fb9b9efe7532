//! SME: outer products of bytes in tiles of sixteen rows and columns.
//!
//! Rust has no stable functions for it, so instructions are written out. They run in a mode of their own, which a block of
//! them enters and leaves: entering clears all vector registers, and the compiler's code runs outside of it.

use std::arch::asm;

/// Rows and columns of a tile of 32-bit integers, in vectors of [`VECTOR_BYTES`].
pub(crate) const ROWS: usize = 16;

/// Bytes of a vector: what processors with SME have.
const VECTOR_BYTES: u64 = 64;

/// Whether the processor adds outer products of bytes to tiles, in vectors of that length, and gets them right.
pub(crate) fn is_available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        // SAFETY: the instructions are there, and then the vectors are.
        has_instructions() && unsafe { begin() && is_right() }
    })
}

/// Whether an outer product is what it should be: QEMU 7.2 has the instruction, and computes something else.
///
/// # Safety
/// As [`one_by_one`].
unsafe fn is_right() -> bool {
    let acts: [[i8; 4]; ROWS] = std::array::from_fn(|t| [t as i8 - 9, 1, -3, 7 * t as i8]);
    let codes: [[u8; 4]; ROWS] = std::array::from_fn(|r| [2 * r as u8, 5, r as u8, 1]);
    let mut sums: [[i32; ROWS]; ROWS] = [[1; ROWS]; ROWS];
    // SAFETY: the caller's promise; a tile of each is there.
    unsafe {
        one_by_one(
            acts.as_ptr().cast(),
            0,
            codes.as_ptr().cast(),
            1,
            sums.as_mut_ptr(),
        )
    };
    let is_sum = |t: usize, r: usize| {
        let products = acts[t].into_iter().zip(codes[r]);
        1 + products
            .map(|(a, c)| i32::from(a) * i32::from(c))
            .sum::<i32>()
            == sums[t][r]
    };
    (0..ROWS * ROWS).all(|i| is_sum(i / ROWS, i % ROWS))
}

/// Whether the processor and the system have SME with products of bytes.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn has_instructions() -> bool {
    use std::ffi::c_ulong;
    const AT_HWCAP2: c_ulong = 26;
    const HWCAP2_SME: c_ulong = 1 << 23;
    const HWCAP2_SME_I8I32: c_ulong = 1 << 26;
    unsafe extern "C" {
        safe fn getauxval(kind: c_ulong) -> c_ulong;
    }
    let features = getauxval(AT_HWCAP2);
    features & HWCAP2_SME != 0 && features & HWCAP2_SME_I8I32 != 0
}

/// Whether the processor and the system have SME with products of bytes.
#[cfg(target_vendor = "apple")]
fn has_instructions() -> bool {
    use std::ffi::{CStr, c_char, c_int, c_void};
    unsafe extern "C" {
        fn sysctlbyname(
            name: *const c_char,
            value: *mut c_void,
            len: *mut usize,
            new: *const c_void,
            new_len: usize,
        ) -> c_int;
    }
    let is_set = |name: &CStr| {
        let (mut value, mut len) = (0i32, size_of::<i32>());
        // SAFETY: the name ends with a zero, and the value has the length that is given.
        let result = unsafe {
            let to = (&raw mut value).cast();
            sysctlbyname(name.as_ptr(), to, &mut len, std::ptr::null(), 0)
        };
        result == 0 && value == 1
    };
    is_set(c"hw.optional.arm.FEAT_SME") && is_set(c"hw.optional.arm.SME_I8I32")
}

/// Other systems aren't asked.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn has_instructions() -> bool {
    false
}

/// Bytes of this thread's vectors.
///
/// # Safety
/// The machine has SME.
unsafe fn vector_bytes() -> u64 {
    let bytes;
    // SAFETY: the caller's promise; the instruction reads nothing else.
    unsafe {
        asm!(
            ".arch_extension sme",
            "rdsvl {bytes}, #1",
            bytes = out(reg) bytes,
            options(nomem, nostack, preserves_flags),
        );
    }
    bytes
}

/// Makes this thread's vectors [`VECTOR_BYTES`] long, and says whether they are. Linux begins with half of that; threads that
/// this one starts have the same length, and so they stay.
///
/// # Safety
/// The machine has SME, and no code that called this one uses its tiles: Rust has no functions that do.
pub(crate) unsafe fn begin() -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if vector_bytes() != VECTOR_BYTES {
            use std::ffi::{c_int, c_ulong};
            const PR_SME_SET_VL: c_int = 63;
            unsafe extern "C" {
                fn prctl(option: c_int, ...) -> c_int;
            }
            // What it returns says less than the length does.
            prctl(PR_SME_SET_VL, VECTOR_BYTES as c_ulong);
        }
        vector_bytes() == VECTOR_BYTES
    }
}

/// Defines a function that adds the outer products of `n` times four columns of `codes` with those of some tiles of
/// activations, `[n][ROWS][4]` each, to the sums of these tiles, `[ROWS][ROWS]` each, which follow one another. Tiles of
/// activations are `stride` bytes apart.
macro_rules! outer_products {
    ($(#[$meta:meta])* $name:ident: $($tile:literal $x:literal $acts:literal $sums:literal),*) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The machine has SME, and this thread's vectors have their length; operands are there, `n` isn't 0.
        pub(crate) unsafe fn $name(
            acts: *const i8,
            stride: usize,
            codes: *const u8,
            n: usize,
            sums: *mut [i32; ROWS],
        ) {
            // SAFETY: the caller's promise. All vectors and predicates are lost, and the mode is left again.
            unsafe {
                asm!(
                    ".arch_extension sme",
                    "smstart",
                    "ptrue p0.b",
                    "mov w12, wzr",
                    "2:",
                    $(concat!("ld1w {{", $tile, "h.s[w12, 0]}}, p0/z, ", $sums),)*
                    "add {sums}, {sums}, #64",
                    "add w12, w12, #1",
                    "cmp w12, #16",
                    "b.ne 2b",
                    "sub {sums}, {sums}, #1024",
                    "3:",
                    "ld1b {{z4.b}}, p0/z, [{codes}]",
                    $(concat!("ld1b {{", $x, ".b}}, p0/z, ", $acts),)*
                    $(concat!("smopa ", $tile, ".s, p0/m, p0/m, ", $x, ".b, z4.b"),)*
                    "add {codes}, {codes}, #64",
                    "add {acts}, {acts}, #64",
                    "subs {n}, {n}, #1",
                    "b.ne 3b",
                    "mov w12, wzr",
                    "4:",
                    $(concat!("st1w {{", $tile, "h.s[w12, 0]}}, p0, ", $sums),)*
                    "add {sums}, {sums}, #64",
                    "add w12, w12, #1",
                    "cmp w12, #16",
                    "b.ne 4b",
                    "smstop",
                    "/* {second} {third} {fourth} {to_second} {to_third} {to_fourth} */",
                    acts = inout(reg) acts => _,
                    codes = inout(reg) codes => _,
                    n = inout(reg) n => _,
                    sums = inout(reg) sums => _,
                    second = in(reg) stride,
                    third = in(reg) 2 * stride,
                    fourth = in(reg) 3 * stride,
                    to_second = in(reg) ROWS * ROWS,
                    to_third = in(reg) 2 * ROWS * ROWS,
                    to_fourth = in(reg) 3 * ROWS * ROWS,
                    out("x12") _,
                    out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _,
                    out("v6") _, out("v7") _, out("v8") _, out("v9") _, out("v10") _, out("v11") _,
                    out("v12") _, out("v13") _, out("v14") _, out("v15") _, out("v16") _, out("v17") _,
                    out("v18") _, out("v19") _, out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                    out("v24") _, out("v25") _, out("v26") _, out("v27") _, out("v28") _, out("v29") _,
                    out("v30") _, out("v31") _,
                    out("p0") _, out("p1") _, out("p2") _, out("p3") _, out("p4") _, out("p5") _,
                    out("p6") _, out("p7") _, out("p8") _, out("p9") _, out("p10") _, out("p11") _,
                    out("p12") _, out("p13") _, out("p14") _, out("p15") _, out("ffr") _,
                    options(nostack),
                );
            }
        }
    };
}

outer_products!(
    /// Of one tile.
    one_by_one:
    "za0" "z0" "[{acts}]" "[{sums}]"
);
outer_products!(
    /// Of four tiles, which share the loads of codes.
    four_by_one:
    "za0" "z0" "[{acts}]" "[{sums}]",
    "za1" "z1" "[{acts}, {second}]" "[{sums}, {to_second}, lsl #2]",
    "za2" "z2" "[{acts}, {third}]" "[{sums}, {to_third}, lsl #2]",
    "za3" "z3" "[{acts}, {fourth}]" "[{sums}, {to_fourth}, lsl #2]"
);
