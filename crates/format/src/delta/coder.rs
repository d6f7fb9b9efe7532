//! A binary range coder, and probabilities that follow what they see.
//!
//! What is said of bits is written once for both directions: a [`Coder`] is told each bit, and an [`Encoder`]
//! writes it, whereas a [`Decoder`] says what it really is.

/// Bits of a probability that an interval is divided with.
const PRECISION: u32 = 16;
/// Bits of a probability as it is kept.
const KEPT: u32 = 24;
/// Bits after which a probability follows the last few hundred, not all.
const MEMORY: u16 = 400;
/// An interval smaller than this is widened by a byte.
const SMALL: u32 = 1 << 24;
/// Bytes that the decoder holds at a time, and one that is always zero.
const HELD: usize = 5;

/// The probability that a bit of one kind is set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bit {
    p: u32,
    seen: u16,
}

impl Default for Bit {
    fn default() -> Bit {
        Bit {
            p: 1 << (KEPT - 1),
            seen: 0,
        }
    }
}

impl Bit {
    /// The part of `range` that stands for a set bit: not all of it, and not nothing.
    fn share(self, range: u32) -> u32 {
        let p = (self.p >> (KEPT - PRECISION)).clamp(1, (1 << PRECISION) - 1);
        (range >> PRECISION) * p
    }

    fn learn(&mut self, bit: bool) {
        let n = u32::from(self.seen) + 2;
        match bit {
            true => self.p += ((1 << KEPT) - self.p) / n,
            false => self.p -= self.p / n,
        }
        self.seen = (self.seen + 1).min(MEMORY);
    }
}

/// The bytes ended before all bits were known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended;

/// One of the two directions.
pub(super) trait Coder {
    /// Codes a bit of the kind that `probability` is of: `bit` where that is known, and returns what it is.
    fn bit(&mut self, probability: &mut Bit, bit: bool) -> Result<bool, Ended>;
}

/// Bits to bytes.
#[derive(Debug)]
pub(super) struct Encoder {
    low: u64,
    range: u32,
    /// The last byte that a carry may change, and the bytes of ones behind it that it would go through.
    waiting: u8,
    n_ones: u64,
    is_first: bool,
    bytes: Vec<u8>,
}

impl Encoder {
    pub(super) fn new() -> Encoder {
        Encoder {
            low: 0,
            range: u32::MAX,
            waiting: 0,
            n_ones: 0,
            is_first: true,
            bytes: Vec::new(),
        }
    }

    fn shift(&mut self) {
        let carry = (self.low >> 32) as u8;
        if carry == 1 || self.low < 0xff00_0000 {
            // The first byte is always zero, and left out.
            if !self.is_first {
                self.bytes.push(self.waiting.wrapping_add(carry));
            }
            for _ in 0..std::mem::take(&mut self.n_ones) {
                self.bytes.push(0xff_u8.wrapping_add(carry));
            }
            self.is_first = false;
            self.waiting = (self.low >> 24) as u8;
        } else {
            self.n_ones += 1;
        }
        self.low = (self.low << 8) & 0xffff_ffff;
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        for _ in 0..HELD {
            self.shift();
        }
        self.bytes
    }
}

impl Coder for Encoder {
    fn bit(&mut self, probability: &mut Bit, bit: bool) -> Result<bool, Ended> {
        let share = probability.share(self.range);
        match bit {
            true => self.range = share,
            false => {
                self.low += u64::from(share);
                self.range -= share;
            }
        }
        while self.range < SMALL {
            self.range <<= 8;
            self.shift();
        }
        probability.learn(bit);
        Ok(bit)
    }
}

/// Bytes to bits.
#[derive(Debug)]
pub(super) struct Decoder<'a> {
    code: u32,
    range: u32,
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Result<Decoder<'a>, Ended> {
        let (first, bytes) = bytes.split_first_chunk().ok_or(Ended)?;
        Ok(Decoder {
            code: u32::from_be_bytes(*first),
            range: u32::MAX,
            bytes,
        })
    }

    /// Bytes that no bit needed.
    pub(super) fn left(&self) -> usize {
        self.bytes.len()
    }
}

impl Coder for Decoder<'_> {
    fn bit(&mut self, probability: &mut Bit, _: bool) -> Result<bool, Ended> {
        let share = probability.share(self.range);
        let bit = self.code < share;
        match bit {
            true => self.range = share,
            false => {
                self.code -= share;
                self.range -= share;
            }
        }
        while self.range < SMALL {
            let (first, rest) = self.bytes.split_first().ok_or(Ended)?;
            self.code = (self.code << 8) | u32::from(*first);
            self.range <<= 8;
            self.bytes = rest;
        }
        probability.learn(bit);
        Ok(bit)
    }
}

/// A number of `BITS` bits, each of which depends on those above it.
#[derive(Debug, Clone)]
pub(super) struct Tree<const NODES: usize>([Bit; NODES]);

impl<const NODES: usize> Default for Tree<NODES> {
    fn default() -> Self {
        Tree([Bit::default(); NODES])
    }
}

impl<const NODES: usize> Tree<NODES> {
    /// Codes a number less than `NODES`, a power of two.
    pub(super) fn code(&mut self, coder: &mut impl Coder, value: usize) -> Result<usize, Ended> {
        let n_bits = NODES.trailing_zeros();
        let mut node = 1;
        for place in (0..n_bits).rev() {
            let bit = coder.bit(&mut self.0[node], value >> place & 1 == 1)?;
            node = node << 1 | usize::from(bit);
        }
        Ok(node - NODES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coded(bits: &[bool]) -> Vec<u8> {
        let (mut encoder, mut probability) = (Encoder::new(), Bit::default());
        for bit in bits {
            encoder.bit(&mut probability, *bit).unwrap();
        }
        encoder.finish()
    }

    proptest! {
        #[test]
        fn bits_come_back(bits in (0.0..1.0f64).prop_flat_map(|p| prop::collection::vec(prop::bool::weighted(p), 0..3000))) {
            let bytes = coded(&bits);
            let (mut decoder, mut probability) = (Decoder::new(&bytes).unwrap(), Bit::default());
            for bit in &bits {
                prop_assert_eq!(decoder.bit(&mut probability, false), Ok(*bit));
            }
            prop_assert_eq!(decoder.left(), 0);
        }
    }

    #[test]
    fn rare_bits_take_few_bytes() {
        let bits: Vec<bool> = (0..1_000_000).map(|i| i % 1000 == 0).collect();
        // The entropy of one bit in a thousand is 0.0114 bits: 1,426 bytes.
        assert!(coded(&bits).len() < 1750, "{}", coded(&bits).len());
        assert!(coded(&vec![false; 1_000_000]).len() < 40);
    }

    #[test]
    fn carries_go_through() {
        // Bits that are nearly certain and don't come, one after the other.
        for seed in 0..200_u32 {
            let bits: Vec<bool> = (0..400).map(|i| (i * seed / 7) % 13 < 1).collect();
            let bytes = coded(&bits);
            let (mut decoder, mut probability) = (Decoder::new(&bytes).unwrap(), Bit::default());
            for bit in bits {
                assert_eq!(decoder.bit(&mut probability, false), Ok(bit));
            }
        }
    }
}
