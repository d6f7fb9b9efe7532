//! Splitting bytes into the bit fields of several elements.
//!
//! The shifts are constants: a loop over bytes with a constant shift vectorises on every target,
//! one with a shift that is only known at run time does not.

/// Bits `SHIFT..SHIFT + WIDTH` of each byte.
#[inline(always)]
fn field<const SHIFT: u32, const WIDTH: u32, const N: usize>(bytes: &[u8; N]) -> [u8; N] {
    let mut fields = [0; N];
    for (field, byte) in fields.iter_mut().zip(bytes) {
        *field = byte >> SHIFT & (u8::MAX >> (8 - WIDTH));
    }
    fields
}

/// The low nibbles of all bytes, then the high ones.
#[inline(always)]
pub(super) fn nibbles<const N: usize>(bytes: &[u8; N]) -> [[u8; N]; 2] {
    [field::<0, 4, N>(bytes), field::<4, 4, N>(bytes)]
}

/// Bits 1:0 of all bytes, then 3:2, 5:4 and 7:6.
#[inline(always)]
pub(super) fn crumbs<const N: usize>(bytes: &[u8; N]) -> [[u8; N]; 4] {
    [
        field::<0, 2, N>(bytes),
        field::<2, 2, N>(bytes),
        field::<4, 2, N>(bytes),
        field::<6, 2, N>(bytes),
    ]
}

/// Bits 0 of all bytes, then bits 1, and so on.
#[inline(always)]
pub(super) fn bit_planes<const N: usize>(bytes: &[u8; N]) -> [[u8; N]; 8] {
    [
        field::<0, 1, N>(bytes),
        field::<1, 1, N>(bytes),
        field::<2, 1, N>(bytes),
        field::<3, 1, N>(bytes),
        field::<4, 1, N>(bytes),
        field::<5, 1, N>(bytes),
        field::<6, 1, N>(bytes),
        field::<7, 1, N>(bytes),
    ]
}

/// `low | high << SHIFT`, element by element.
#[inline(always)]
pub(super) fn join<const SHIFT: u32>(low: &mut [u8], high: &[u8]) {
    for (low, high) in low.iter_mut().zip(high) {
        *low |= high << SHIFT;
    }
}

/// `codes[i] = fields[i] − bias`. No field may exceed 127.
#[inline(always)]
pub(super) fn signed(fields: &[u8], bias: i8, codes: &mut [i8]) {
    for (code, &field) in codes.iter_mut().zip(fields) {
        *code = (field as i8).wrapping_sub(bias);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_cut_lowest_first() {
        let bytes = [0b11_10_01_00, 0x5a];
        assert_eq!(nibbles(&bytes), [[0b0100, 0xa], [0b1110, 5]]);
        assert_eq!(crumbs(&bytes), [[0, 2], [1, 2], [2, 1], [3, 1]]);
        let planes = bit_planes(&bytes);
        assert_eq!(planes.map(|p| p[0]), [0, 0, 1, 0, 0, 1, 1, 1]);
        let mut low = planes[0];
        for (i, plane) in planes.iter().enumerate().skip(1) {
            match i {
                1 => join::<1>(&mut low, plane),
                2 => join::<2>(&mut low, plane),
                _ => {}
            }
        }
        assert_eq!(low, [4, 2]);
    }
}
