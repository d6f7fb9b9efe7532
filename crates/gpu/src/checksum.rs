//! FNV-1a: tells different contents apart, and detects accidents, not malice.

/// What a sum begins with.
pub(crate) const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// `sum` continued with `bytes`.
pub(crate) fn fnv1a(sum: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(sum, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
