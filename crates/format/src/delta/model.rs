//! What is known of the bytes of a new tensor where those of the old one are: in which bits a byte is said.
//!
//! Everything here works in both directions: the encoder passes the new bytes, the decoder zeros, and both get
//! the new bytes back.

use super::coder::{Bit, Coder, Ended, Tree};

/// Largest number of bytes between the codes of two blocks.
pub(super) const MAX_TAIL: u64 = 64;
/// Codes of a byte, at most.
const MAX_CODES: usize = 5;
/// What an average magnitude is told apart by.
const N_SIZES: usize = 9;

/// A byte with a code that none has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    Ended,
    Code,
}

impl From<Ended> for Wrong {
    fn from(_: Ended) -> Wrong {
        Wrong::Ended
    }
}

/// How bytes hold codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// Four of two bits.
    Four,
    /// Five trits, as in TQ1_0.
    Five,
}

impl Codes {
    fn unpack(self, byte: u8) -> ([u8; MAX_CODES], usize) {
        let mut codes = [0; MAX_CODES];
        match self {
            Codes::Four => {
                for (place, code) in codes[..4].iter_mut().enumerate() {
                    *code = byte >> (2 * place) & 3;
                }
                (codes, 4)
            }
            Codes::Five => {
                let mut rest = byte;
                for code in &mut codes {
                    *code = ((u16::from(rest) * 3) >> 8) as u8;
                    rest = rest.wrapping_mul(3);
                }
                (codes, 5)
            }
        }
    }

    fn pack(self, codes: [u8; MAX_CODES]) -> Result<u8, Wrong> {
        match self {
            Codes::Four => Ok((0..4).fold(0, |byte, place| byte | codes[place] << (2 * place))),
            Codes::Five if codes.iter().all(|code| *code < 3) => {
                let value = codes
                    .iter()
                    .fold(0_u16, |value, code| value * 3 + u16::from(*code));
                Ok((value * 256).div_ceil(243) as u8)
            }
            Codes::Five => Err(Wrong::Code),
        }
    }

    /// Whether `byte` is how its codes are written.
    pub(super) fn is_usual(self, byte: u8) -> bool {
        self.pack(self.unpack(byte).0) == Ok(byte)
    }
}

/// Blocks of bytes with codes and of a few other bytes, such as a scale.
#[derive(Debug)]
pub(super) struct Blocks {
    codes: Codes,
    /// Bytes of each block with codes, and without.
    n_codes: u64,
    n_tail: u64,
    /// Bytes of the block that came.
    at: u64,
    /// Zeros in an old byte; whether the two before it changed.
    byte: [[Bit; 4]; MAX_CODES + 1],
    n_zeros: [u8; 256],
    before: usize,
    /// Old code, its place, whether one before it in the byte changed.
    code: [[[Bit; 2]; MAX_CODES]; 4],
    /// Old code.
    value: [Tree<4>; 4],
    /// What the tail of the last block differs by.
    tail: Vec<u8>,
    is_like_last: Bit,
    other: Box<Tree<256>>,
}

impl Blocks {
    pub(super) fn new(codes: Codes, n_codes: u64, n_tail: u64) -> Blocks {
        let n_zeros = std::array::from_fn(|byte| {
            let (unpacked, n) = codes.unpack(byte as u8);
            unpacked[..n].iter().filter(|code| **code == 1).count() as u8
        });
        Blocks {
            codes,
            n_codes,
            n_tail,
            at: 0,
            byte: Default::default(),
            n_zeros,
            before: 0,
            code: Default::default(),
            value: Default::default(),
            tail: vec![0; n_tail as usize],
            is_like_last: Bit::default(),
            other: Box::default(),
        }
    }

    fn packed(&mut self, coder: &mut impl Coder, old: u8, new: u8) -> Result<u8, Wrong> {
        let kind = &mut self.byte[usize::from(self.n_zeros[usize::from(old)])][self.before];
        let is_changed = coder.bit(kind, old != new)?;
        self.before = self.before << 1 & 2 | usize::from(is_changed);
        if !is_changed {
            return Ok(old);
        }
        let (mut codes, n) = self.codes.unpack(old);
        let (new, _) = self.codes.unpack(new);
        let mut one_has = false;
        for place in 0..n {
            let was = usize::from(codes[place]);
            // One of them has, so the last if no other.
            let is_other = if place + 1 == n && !one_has {
                true
            } else {
                let kind = &mut self.code[was][place][usize::from(one_has)];
                coder.bit(kind, codes[place] != new[place])?
            };
            if is_other {
                one_has = true;
                codes[place] = self.value[was].code(coder, usize::from(new[place]))? as u8;
            }
        }
        self.codes.pack(codes)
    }

    fn beside(&mut self, coder: &mut impl Coder, old: u8, new: u8) -> Result<u8, Wrong> {
        let last = &mut self.tail[(self.at - self.n_codes) as usize];
        if !coder.bit(&mut self.is_like_last, old ^ new == *last)? {
            *last = self.other.code(coder, usize::from(old ^ new))? as u8;
        }
        Ok(old ^ *last)
    }

    /// Codes the next bytes: `old` becomes the new ones.
    pub(super) fn code(
        &mut self,
        coder: &mut impl Coder,
        old: &mut [u8],
        new: impl Fn(usize) -> u8,
    ) -> Result<(), Wrong> {
        for (i, byte) in old.iter_mut().enumerate() {
            *byte = match self.at < self.n_codes {
                true => self.packed(coder, *byte, new(i))?,
                false => self.beside(coder, *byte, new(i))?,
            };
            self.at += 1;
            if self.at == self.n_codes + self.n_tail {
                self.at = 0;
            }
        }
        Ok(())
    }
}

/// Numbers of `width` bytes whose order is that of their bytes, but for a sign: floats, or single bytes.
#[derive(Debug)]
pub(super) struct Numbers {
    width: usize,
    /// Place of the byte from the top, and how large the difference before it was, or what is known of this one.
    bytes: Vec<[Tree<256>; N_SIZES + 1]>,
    /// Bits of the last difference.
    last: u32,
}

impl Numbers {
    pub(super) fn new(width: usize) -> Numbers {
        Numbers {
            width,
            bytes: vec![Default::default(); width],
            last: 0,
        }
    }

    /// The number as one whose differences are small where those of the floats are.
    fn ordered(&self, value: u32) -> u32 {
        let top = 1 << (8 * self.width - 1);
        match self.width > 1 && value & top != 0 {
            true => value ^ (top - 1),
            false => value,
        }
    }

    fn mask(&self) -> u32 {
        u32::MAX >> (32 - 8 * self.width)
    }

    /// The difference, with its sign in the lowest bit.
    fn difference(&self, old: u32, new: u32) -> u32 {
        let shift = 32 - 8 * self.width;
        let signed = (self
            .ordered(new)
            .wrapping_sub(self.ordered(old))
            .wrapping_shl(shift as u32)) as i32
            >> shift;
        (signed << 1 ^ signed >> 31) as u32 & self.mask()
    }

    fn with_difference(&self, old: u32, difference: u32) -> u32 {
        let signed = difference >> 1 ^ (difference & 1).wrapping_neg();
        self.ordered(self.ordered(old).wrapping_add(signed) & self.mask())
    }

    /// Codes the next bytes, whole numbers: `old` becomes the new ones.
    pub(super) fn code(
        &mut self,
        coder: &mut impl Coder,
        old: &mut [u8],
        new: impl Fn(usize) -> u8,
    ) -> Result<(), Wrong> {
        let read = |bytes: &dyn Fn(usize) -> u8| {
            (0..self.width).fold(0, |value, i| value | u32::from(bytes(i)) << (8 * i))
        };
        for (i, number) in old.chunks_exact_mut(self.width).enumerate() {
            let was = read(&|at| number[at]);
            let known = self.difference(was, read(&|at| new(i * self.width + at)));
            let mut difference = 0;
            for (place, trees) in self.bytes.iter_mut().enumerate() {
                let shift = 8 * (self.width - 1 - place);
                let kind = match difference {
                    0 => (self.last.div_ceil(4) as usize).min(N_SIZES - 1),
                    _ => N_SIZES,
                };
                let byte = trees[kind].code(coder, (known >> shift & 0xff) as usize)?;
                difference |= (byte as u32) << shift;
            }
            self.last = u32::BITS - difference.leading_zeros();
            let value = self.with_difference(was, difference);
            for (at, byte) in number.iter_mut().enumerate() {
                *byte = (value >> (8 * at)) as u8;
            }
        }
        Ok(())
    }
}
