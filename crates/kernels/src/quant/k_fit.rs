//! Fits of a K-quant super-block: the numbers that a block packs.
//!
//! A super-block of 256 values is cut into sub-blocks with small integer scales (and minimums),
//! which f16 factors of the super-block multiply.

/// Values of a super-block.
pub(super) const SUPER: usize = 256;

/// Blocks with a smaller range than this are stored as constant: f16 scales could not represent it.
pub(super) const MIN_EXTENT: f32 = 1e-12;

/// A super-block of `x = d·scales[s]·code − dmin·mins[s]`, `s` being the sub-block of `code`.
pub(super) struct Affine {
    pub(super) d: f32,
    pub(super) dmin: f32,
    /// One per sub-block; those beyond the last are zero.
    pub(super) scales: [u8; 16],
    pub(super) mins: [u8; 16],
    pub(super) codes: [u8; SUPER],
}

/// A super-block of `x = d·scales[s]·code`, `s` being the sub-block of 16 of `code`.
pub(super) struct Symmetric {
    pub(super) d: f32,
    pub(super) scales: [i8; 16],
    pub(super) codes: [i8; SUPER],
}
