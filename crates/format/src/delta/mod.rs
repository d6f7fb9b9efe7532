//! Deltas: what a component group of a package is, for those who have an earlier one.
//!
//! For updates that take fewer bytes than the groups that changed. A model that is trained a little further has a
//! few other trits and somewhat other numbers: a delta says which, in a range coder's bytes. Not for finding the
//! bytes of groups, nor for hashing: whoever applies a delta compares what comes out with the digest of the group
//! in the manifest ([`Delta::target`] is only what the delta says of itself). See `docs/formats/rdrr.md`.
//!
//! ```
//! use sterna_format::delta::{Delta, DeltaError, DeltaWriter};
//! use sterna_format::digest::{Algorithm, Digest};
//! use sterna_format::{DType, rdrr::TensorType};
//!
//! let hash = |hex: &str| Digest::from_hex(Algorithm::Sha256, &hex.repeat(32));
//! let (base, target) = (hash("0a")?, hash("0b")?);
//! let mut writer = DeltaWriter::new(base, target);
//! writer.tensor(&TensorType::Known(DType::F16), &[0, 60, 0, 61], &[1, 60, 0, 61])?;
//! let bytes = writer.finish();
//!
//! let delta = Delta::parse(&bytes)?;
//! delta.check_base(&base, 4)?;
//! let (mut old, mut new) = (&[0_u8, 60, 0, 61][..], Vec::new());
//! delta.apply(
//!     |bytes| {
//!         let (next, rest) = old.split_at(bytes.len());
//!         (old, _) = (rest, bytes.copy_from_slice(next));
//!         Ok::<(), DeltaError>(())
//!     },
//!     |bytes| Ok(new.extend_from_slice(bytes)),
//! )?;
//! assert_eq!(new, [1, 60, 0, 61]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod coder;
mod list;
mod model;

use crate::DType;
use crate::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::rdrr::TensorType;

use self::coder::{Coder, Decoder, Encoder, Ended};
use self::model::{Blocks, Codes, MAX_TAIL, Numbers, Wrong};

pub use self::list::{DELTAS_FILE, DeltaList, DeltaListError, ListedDelta, MAX_LIST_BYTES};

/// Maximum size of a delta: it is in memory while it is applied, the groups aren't.
pub const MAX_DELTA_BYTES: u64 = 64 << 20;

/// Most parts that a delta has, one for each tensor: each takes time, whatever its size.
pub const MAX_PARTS: u32 = 1 << 16;

/// The first bytes of a delta, the last of which is the version.
const MAGIC: [u8; 8] = *b"STDELTA\x01";
/// Bytes of a digest with its algorithm.
const DIGEST: usize = 1 + DIGEST_BYTES;
const HEADER: usize = MAGIC.len() + 2 * DIGEST + 8 + 4;
/// Bytes of the description of a part: how it is coded, two numbers of that, its size, and its bytes here.
const PART: usize = 1 + 4 * 8;
/// Bytes that are coded at a time: whole numbers, of any width.
const PIECE: usize = 64 << 10;

/// Why bytes are no delta, or none of what there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// It ends early.
    #[error("delta: expected {expected} bytes, found {found}")]
    TooShort {
        /// Bytes that it needs at least.
        expected: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// It is no delta, or of another version.
    #[error("delta: expected the first bytes {MAGIC:02x?}, found {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 8],
    },
    /// A member of the header has a value that it can't have.
    #[error("delta: {what}: expected {expected}, found {found}")]
    Header {
        /// The member.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        found: u64,
    },
    /// A part that is coded in no known way.
    #[error("delta: part {part}: {what}: expected {expected}, found {found}")]
    Part {
        /// Which of the parts.
        part: usize,
        /// What is wrong with it.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        found: u64,
    },
    /// It is of another group.
    #[error("delta: expected the group {} {expected} to apply it to, found {} {found}", expected.algorithm(), found.algorithm())]
    OtherBase {
        /// The group that it is of.
        expected: Digest,
        /// The one that there is.
        found: Digest,
    },
    /// It makes another group.
    #[error("delta: expected the group {} {expected} to come out, found {} {found}", expected.algorithm(), found.algorithm())]
    OtherTarget {
        /// The group that is wanted.
        expected: Digest,
        /// The one that it makes.
        found: Digest,
    },
    /// Two tensors that differ in more than their bytes.
    #[error("delta: tensor {tensor}: expected as many bytes as before, {expected}, found {found}")]
    OtherSize {
        /// Which of the tensors of the group.
        tensor: usize,
        /// Bytes of the old one.
        expected: u64,
        /// Bytes of the new one.
        found: u64,
    },
}

/// How the bytes of a part are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Coding {
    /// They are those of the base.
    Same,
    /// They are here as they are.
    Stored,
    /// Blocks of so many bytes with codes, and so many without.
    Blocks(Codes, u64, u64),
    /// Numbers of so many bytes.
    Numbers(usize),
}

impl Coding {
    /// How bytes of a tensor of this type are coded best.
    fn of(dtype: &TensorType, size: u64) -> Coding {
        let trailing = |dtype: DType| dtype.trailer_bytes() as u64;
        match dtype {
            TensorType::Known(dtype @ DType::I2_S) if size > trailing(*dtype) => {
                let n_tail = trailing(*dtype);
                Coding::Blocks(Codes::Four, size - n_tail, n_tail)
            }
            TensorType::Known(DType::TQ2_0) => Coding::Blocks(Codes::Four, 64, 2),
            TensorType::Known(DType::TQ1_0) => Coding::Blocks(Codes::Five, 52, 2),
            TensorType::Known(DType::F32) => Coding::Numbers(4),
            TensorType::Known(DType::F16 | DType::BF16) => Coding::Numbers(2),
            _ => Coding::Numbers(1),
        }
    }

    /// As it is written: the kind, and two numbers.
    fn numbers(self) -> (u8, u64, u64) {
        match self {
            Coding::Same => (0, 0, 0),
            Coding::Stored => (1, 0, 0),
            Coding::Blocks(Codes::Four, codes, tail) => (2, codes, tail),
            Coding::Blocks(Codes::Five, codes, tail) => (3, codes, tail),
            Coding::Numbers(width) => (4, width as u64, 0),
        }
    }

    /// Codes pieces of a part of `size` bytes: each of the old bytes, which become new ones.
    fn code<C: Coder, E>(
        self,
        coder: &mut C,
        size: u64,
        mut each: impl FnMut(
            usize,
            &mut dyn FnMut(&mut [u8], &[u8]) -> Result<(), Wrong>,
        ) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut blocks = match self {
            Coding::Blocks(codes, n_codes, n_tail) => Some(Blocks::new(codes, n_codes, n_tail)),
            _ => None,
        };
        let mut numbers = match self {
            Coding::Numbers(width) => Some(Numbers::new(width)),
            _ => None,
        };
        let mut at = 0;
        while at < size {
            // At most a piece.
            let n = (size - at).min(PIECE as u64) as usize;
            each(n, &mut |old, new| {
                let new = |i: usize| new.get(i).copied().unwrap_or_default();
                match (&mut blocks, &mut numbers) {
                    (Some(blocks), _) => blocks.code(coder, old, new),
                    (_, Some(numbers)) => numbers.code(coder, old, new),
                    _ => Ok(()),
                }
            })?;
            at += n as u64;
        }
        Ok(())
    }
}

/// A part of a group, in the order of its bytes.
#[derive(Debug, Clone)]
struct Part<'a> {
    coding: Coding,
    /// Bytes of the group.
    size: u64,
    bytes: &'a [u8],
}

/// The header of a delta, and where its parts are.
#[derive(Debug, Clone)]
pub struct Delta<'a> {
    base: Digest,
    target: Digest,
    size: u64,
    parts: Vec<Part<'a>>,
}

impl<'a> Delta<'a> {
    /// Reads the header of a delta.
    ///
    /// # Errors
    ///
    /// [`DeltaError`] for what is no delta: sizes that don't add up, and codings that aren't known.
    pub fn parse(bytes: &'a [u8]) -> Result<Delta<'a>, DeltaError> {
        let short = |expected: usize| DeltaError::TooShort {
            expected: expected as u64,
            found: bytes.len() as u64,
        };
        let (magic, rest) = bytes.split_first_chunk().ok_or_else(|| short(HEADER))?;
        if *magic != MAGIC {
            return Err(DeltaError::Magic { found: *magic });
        }
        let mut rest = Reader(rest);
        let header = |rest: &mut Reader<'a>| -> Option<_> {
            Some((rest.digest()?, rest.digest()?, rest.number()?, rest.u32()?))
        };
        let (base, target, size, n_parts) = header(&mut rest).ok_or_else(|| short(HEADER))?;
        let (base, target) = (digest("base", base)?, digest("target", target)?);
        check_n_parts(n_parts)?;
        let n_parts = n_parts as usize;
        let room = rest.0.len() / PART;
        if n_parts > room {
            return Err(short(HEADER + n_parts * PART));
        }
        let mut parts = Vec::with_capacity(n_parts);
        let mut lens = Vec::with_capacity(n_parts);
        let mut sum = 0_u64;
        for part in 0..n_parts {
            let numbers = |rest: &mut Reader<'a>| -> Option<_> {
                let [kind] = rest.array()?;
                Some((
                    kind,
                    rest.number()?,
                    rest.number()?,
                    rest.number()?,
                    rest.number()?,
                ))
            };
            let (kind, a, b, n_bytes, len) = numbers(&mut rest).ok_or_else(|| short(HEADER))?;
            let coding = coding(part, kind, a, b, n_bytes)?;
            sum = sum.checked_add(n_bytes).ok_or_else(|| DeltaError::Part {
                part,
                what: "size",
                expected: format!("at most {}", u64::MAX - sum),
                found: n_bytes,
            })?;
            lens.push(len);
            parts.push(Part {
                coding,
                size: n_bytes,
                bytes: &[],
            });
        }
        if sum != size {
            return Err(DeltaError::Header {
                what: "size",
                expected: format!("{sum}, the sum of its parts"),
                found: size,
            });
        }
        for (i, (part, len)) in parts.iter_mut().zip(lens).enumerate() {
            let wrong = |expected: String| DeltaError::Part {
                part: i,
                what: "bytes of the delta",
                expected,
                found: len,
            };
            match part.coding {
                Coding::Same if len != 0 => return Err(wrong("0".to_owned())),
                Coding::Stored if len != part.size => return Err(wrong(part.size.to_string())),
                _ => {}
            }
            let left = rest.0.len();
            let taken = usize::try_from(len).ok().and_then(|len| rest.take(len));
            part.bytes = taken.ok_or_else(|| wrong(format!("at most {left}")))?;
        }
        match rest.0.len() {
            0 => Ok(Delta {
                base,
                target,
                size,
                parts,
            }),
            left => Err(DeltaError::Header {
                what: "bytes behind the last part",
                expected: "0".to_owned(),
                found: left as u64,
            }),
        }
    }

    /// The digest of the group that it is to be applied to.
    pub fn base(&self) -> Digest {
        self.base
    }

    /// The digest of the group that comes out, as the delta says.
    pub fn target(&self) -> Digest {
        self.target
    }

    /// Bytes of either group.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Checks that it is to be applied to the group `found`, of `size` bytes.
    ///
    /// # Errors
    ///
    /// [`DeltaError::OtherBase`]; [`DeltaError::Header`] if that group has another size.
    pub fn check_base(&self, found: &Digest, size: u64) -> Result<(), DeltaError> {
        if self.base != *found {
            return Err(DeltaError::OtherBase {
                expected: self.base,
                found: *found,
            });
        }
        self.check_size(size)
    }

    /// Checks that the group `expected`, of `size` bytes, comes out, as the delta says.
    ///
    /// # Errors
    ///
    /// [`DeltaError::OtherTarget`]; [`DeltaError::Header`] if that group has another size.
    pub fn check_target(&self, expected: &Digest, size: u64) -> Result<(), DeltaError> {
        if self.target != *expected {
            return Err(DeltaError::OtherTarget {
                expected: *expected,
                found: self.target,
            });
        }
        self.check_size(size)
    }

    fn check_size(&self, size: u64) -> Result<(), DeltaError> {
        match self.size == size {
            true => Ok(()),
            false => Err(DeltaError::Header {
                what: "size",
                expected: format!("{size}, that of the group"),
                found: self.size,
            }),
        }
    }

    /// Makes the new group: `read` fills its argument with the next bytes of the old one, `write` takes the next of
    /// the new one. Both are called for at most 64 KiB at a time, together for [`size`](Self::size) bytes.
    ///
    /// # Errors
    ///
    /// Those of `read` and `write`; [`DeltaError`] for parts that end early, or don't end where they should. What
    /// was written then is of no use.
    pub fn apply<E: From<DeltaError>>(
        &self,
        mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = vec![0; PIECE];
        for (i, part) in self.parts.iter().enumerate() {
            let wrong = |what, expected: &str, found: u64| DeltaError::Part {
                part: i,
                what,
                expected: expected.to_owned(),
                found,
            };
            let ends = || wrong("its bytes", "more", part.bytes.len() as u64);
            let mut stored = Reader(part.bytes);
            let mut step = |n: usize, change: &mut dyn FnMut(&mut [u8]) -> Result<(), Wrong>| {
                let piece = &mut buffer[..n];
                read(piece)?;
                change(piece).map_err(|problem| match problem {
                    Wrong::Ended => ends(),
                    Wrong::Code => wrong("a code", "at most 2", 3),
                })?;
                write(piece)
            };
            match part.coding {
                Coding::Same | Coding::Stored => {
                    let mut nothing = NoCoder;
                    part.coding.code(&mut nothing, part.size, |n, _| {
                        step(n, &mut |piece| {
                            if part.coding == Coding::Stored {
                                piece.copy_from_slice(stored.take(n).ok_or(Wrong::Ended)?);
                            }
                            Ok(())
                        })
                    })?;
                }
                Coding::Blocks(..) | Coding::Numbers(_) => {
                    let mut decoder = Decoder::new(part.bytes).map_err(|Ended| ends())?;
                    part.coding.code(&mut decoder, part.size, |n, code| {
                        step(n, &mut |piece| code(piece, &[]))
                    })?;
                    if decoder.left() > 0 {
                        let left = decoder.left() as u64;
                        return Err(wrong("bytes that nothing needs", "0", left).into());
                    }
                }
            }
        }
        Ok(())
    }
}

/// The coder of parts that aren't coded.
struct NoCoder;

impl Coder for NoCoder {
    fn bit(&mut self, _: &mut coder::Bit, bit: bool) -> Result<bool, Ended> {
        Ok(bit)
    }
}

fn coding(part: usize, kind: u8, a: u64, b: u64, size: u64) -> Result<Coding, DeltaError> {
    let wrong = |what, expected: &str, found| DeltaError::Part {
        part,
        what,
        expected: expected.to_owned(),
        found,
    };
    let blocks = |codes| match (a, b) {
        (0, _) => Err(wrong("bytes of codes", "at least 1", a)),
        (_, b) if b > MAX_TAIL => Err(wrong("bytes beside codes", "at most 64", b)),
        (a, _) if a > size => Err(wrong("bytes of codes", &format!("at most {size}"), a)),
        (a, b) if a.checked_add(b).is_none() => {
            let most = u64::MAX - b;
            Err(wrong("bytes of codes", &format!("at most {most}"), a))
        }
        (a, b) => Ok(Coding::Blocks(codes, a, b)),
    };
    match kind {
        0 => Ok(Coding::Same),
        1 => Ok(Coding::Stored),
        2 => blocks(Codes::Four),
        3 => blocks(Codes::Five),
        4 => match a {
            // Nothing empty changes.
            1 | 2 | 4 if size == 0 => Err(wrong("size", "at least 1", size)),
            1 | 2 | 4 if size.is_multiple_of(a) => Ok(Coding::Numbers(a as usize)),
            1 | 2 | 4 => Err(wrong("size", &format!("a multiple of {a}"), size)),
            _ => Err(wrong("bytes of a number", "1, 2 or 4", a)),
        },
        _ => Err(wrong("coding", "at most 4", kind.into())),
    }
}

/// Bytes that are read from the front.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    fn digest(&mut self) -> Option<(u8, [u8; DIGEST_BYTES])> {
        let [algorithm] = self.array()?;
        Some((algorithm, self.array()?))
    }
}

fn check_n_parts(found: u32) -> Result<(), DeltaError> {
    match found <= MAX_PARTS {
        true => Ok(()),
        false => Err(DeltaError::Header {
            what: "number of parts",
            expected: format!("at most {MAX_PARTS}"),
            found: found.into(),
        }),
    }
}

fn digest(
    what: &'static str,
    (algorithm, bytes): (u8, [u8; DIGEST_BYTES]),
) -> Result<Digest, DeltaError> {
    let algorithm =
        Algorithm::ALL
            .get(usize::from(algorithm))
            .ok_or_else(|| DeltaError::Header {
                what,
                expected: "hash algorithm 0 or 1".to_owned(),
                found: algorithm.into(),
            })?;
    Ok(Digest::new(*algorithm, bytes))
}

/// A delta that is being made, tensor by tensor.
#[derive(Debug)]
pub struct DeltaWriter {
    base: Digest,
    target: Digest,
    size: u64,
    parts: Vec<u8>,
    n_parts: u32,
    bytes: Vec<u8>,
}

impl DeltaWriter {
    /// A delta from the group `base` to `target`.
    pub fn new(base: Digest, target: Digest) -> DeltaWriter {
        DeltaWriter {
            base,
            target,
            size: 0,
            parts: Vec::new(),
            n_parts: 0,
            bytes: Vec::new(),
        }
    }

    /// Adds the next tensor, of this type in both groups.
    ///
    /// # Errors
    ///
    /// [`DeltaError::OtherSize`] if they differ in size; [`DeltaError::Header`] if it is one more than
    /// [`MAX_PARTS`].
    pub fn tensor(&mut self, dtype: &TensorType, old: &[u8], new: &[u8]) -> Result<(), DeltaError> {
        if old.len() != new.len() {
            return Err(DeltaError::OtherSize {
                tensor: self.n_parts as usize,
                expected: old.len() as u64,
                found: new.len() as u64,
            });
        }
        check_n_parts(self.n_parts + 1)?;
        let size = new.len() as u64;
        let (coding, coded) = match old == new {
            true => (Coding::Same, Vec::new()),
            false => best(Coding::of(dtype, size), old, new),
        };
        let bytes = match coding {
            Coding::Stored => new,
            _ => &coded,
        };
        let (kind, a, b) = coding.numbers();
        self.parts.push(kind);
        for number in [a, b, size, bytes.len() as u64] {
            self.parts.extend(number.to_le_bytes());
        }
        self.bytes.extend_from_slice(bytes);
        self.n_parts += 1;
        self.size += size;
        Ok(())
    }

    /// The bytes of the delta.
    pub fn finish(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.parts.len() + self.bytes.len());
        bytes.extend(MAGIC);
        for digest in [self.base, self.target] {
            let algorithm = Algorithm::ALL
                .iter()
                .position(|one| *one == digest.algorithm());
            bytes.push(algorithm.expect("all algorithms are there") as u8);
            bytes.extend(digest.as_bytes());
        }
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(self.n_parts.to_le_bytes());
        bytes.extend(self.parts);
        bytes.extend(self.bytes);
        bytes
    }
}

/// The coding to use rather than this one if that doesn't fit or saves nothing, and the coded bytes.
fn best(coding: Coding, old: &[u8], new: &[u8]) -> (Coding, Vec<u8>) {
    let size = new.len() as u64;
    let fits = match coding {
        // Bytes that aren't changed are never written again, so only the new ones matter.
        Coding::Blocks(codes, n_codes, n_tail) if n_codes <= size => new
            .chunks((n_codes + n_tail) as usize)
            .flat_map(|block| &block[..block.len().min(n_codes as usize)])
            .all(|byte| codes.is_usual(*byte)),
        Coding::Numbers(width) => size.is_multiple_of(width as u64),
        _ => false,
    };
    if !fits {
        return match coding {
            Coding::Numbers(1) | Coding::Same | Coding::Stored => (Coding::Stored, Vec::new()),
            _ => best(Coding::Numbers(1), old, new),
        };
    }
    let mut encoder = Encoder::new();
    let mut at = 0;
    let coded = coding.code(&mut encoder, size, |n, code| {
        let mut piece = old[at..at + n].to_vec();
        code(&mut piece, &new[at..at + n])?;
        debug_assert_eq!(piece, new[at..at + n]);
        at += n;
        Ok::<(), Wrong>(())
    });
    let bytes = encoder.finish();
    match coded.is_ok() && bytes.len() < new.len() {
        true => (coding, bytes),
        false => (Coding::Stored, Vec::new()),
    }
}

#[cfg(test)]
mod tests;
