//! Element and block types of stored tensors.

use std::fmt;
use std::str::FromStr;

/// How the values of a stored tensor are encoded.
///
/// Names are the spellings that GGML and safetensors files use. A *block* is the smallest group of
/// elements that can be decoded independently; scalar types are blocks of one. Some types are only
/// named and measured here, so that a file which holds them can be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
// The names are the documentation: those of the formats.
#[allow(non_camel_case_types, missing_docs)]
#[non_exhaustive]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
    U64,
    U32,
    U16,
    /// A complex number of two f32.
    C64,
    F8_E4M3,
    F8_E5M2,
    /// A power of two, as the scale of a block.
    F8_E8M0,
    F6_E2M3,
    F6_E3M2,
    /// E2M1, two in a byte.
    F4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    TQ1_0,
    TQ2_0,
    /// Ternary codes in 128-element interleaved blocks, one f32 scale after the whole tensor.
    I2_S,
    /// One sign bit an element, groups of 128.
    Q1_0,
    /// Two bits an element, groups of 64.
    Q2_0,
    /// Two bits an element, groups of 128; shares its GGUF type id with [`DType::Q2_0`].
    Q2_0_G128,
    /// The same block as [`DType::Q2_0_G128`], under a type id of its own.
    PQ2_0,
    /// Trits in base 3, groups of 128.
    PTQ1_0,
    MXFP4,
}

impl DType {
    /// Every type, for tests and tables.
    pub const ALL: [DType; 39] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U8,
        DType::Bool,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::C64,
        DType::F8_E4M3,
        DType::F8_E5M2,
        DType::F8_E8M0,
        DType::F6_E2M3,
        DType::F6_E3M2,
        DType::F4,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::TQ1_0,
        DType::TQ2_0,
        DType::I2_S,
        DType::Q1_0,
        DType::Q2_0,
        DType::Q2_0_G128,
        DType::PQ2_0,
        DType::PTQ1_0,
        DType::MXFP4,
    ];

    /// Elements and bytes of one block.
    const fn block(self) -> (usize, usize) {
        match self {
            DType::F64 | DType::I64 | DType::U64 | DType::C64 => (1, 8),
            DType::F32 | DType::I32 | DType::U32 => (1, 4),
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => (1, 2),
            DType::I8 | DType::U8 | DType::Bool => (1, 1),
            DType::F8_E4M3 | DType::F8_E5M2 | DType::F8_E8M0 => (1, 1),
            DType::F6_E2M3 | DType::F6_E3M2 => (4, 3),
            DType::F4 => (2, 1),
            DType::Q4_0 => (32, 18),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q8_0 => (32, 34),
            DType::Q2_K => (256, 84),
            DType::Q3_K => (256, 110),
            DType::Q4_K => (256, 144),
            DType::Q5_K => (256, 176),
            DType::Q6_K => (256, 210),
            DType::TQ1_0 => (256, 54),
            DType::TQ2_0 => (256, 66),
            DType::I2_S => (128, 32),
            DType::Q1_0 => (128, 18),
            DType::Q2_0 => (64, 18),
            DType::Q2_0_G128 | DType::PQ2_0 => (128, 34),
            DType::PTQ1_0 => (128, 28),
            DType::MXFP4 => (32, 17),
        }
    }

    /// Elements in one block.
    pub const fn block_len(self) -> usize {
        self.block().0
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.block().1
    }

    /// Bytes after the blocks that belong to the tensor as a whole: the scale and padding of I2_S.
    pub const fn trailer_bytes(self) -> usize {
        match self {
            DType::I2_S => 32,
            _ => 0,
        }
    }

    /// Bytes of a tensor with `n_elements` elements, trailer included.
    ///
    /// `None` if the elements don't fill whole blocks or the size overflows.
    pub fn tensor_bytes(self, n_elements: u64) -> Option<u64> {
        let (len, bytes) = self.block();
        if !n_elements.is_multiple_of(len as u64) {
            return None;
        }
        (n_elements / len as u64)
            .checked_mul(bytes as u64)?
            .checked_add(self.trailer_bytes() as u64)
    }

    /// The spelling used in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::I16 => "I16",
            DType::I8 => "I8",
            DType::U8 => "U8",
            DType::Bool => "BOOL",
            DType::U64 => "U64",
            DType::U32 => "U32",
            DType::U16 => "U16",
            DType::C64 => "C64",
            DType::F8_E4M3 => "F8_E4M3",
            DType::F8_E5M2 => "F8_E5M2",
            DType::F8_E8M0 => "F8_E8M0",
            DType::F6_E2M3 => "F6_E2M3",
            DType::F6_E3M2 => "F6_E3M2",
            DType::F4 => "F4",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q8_0 => "Q8_0",
            DType::Q2_K => "Q2_K",
            DType::Q3_K => "Q3_K",
            DType::Q4_K => "Q4_K",
            DType::Q5_K => "Q5_K",
            DType::Q6_K => "Q6_K",
            DType::TQ1_0 => "TQ1_0",
            DType::TQ2_0 => "TQ2_0",
            DType::I2_S => "I2_S",
            DType::Q1_0 => "Q1_0",
            DType::Q2_0 => "Q2_0",
            DType::Q2_0_G128 => "Q2_0_G128",
            DType::PQ2_0 => "PQ2_0",
            DType::PTQ1_0 => "PTQ1_0",
            DType::MXFP4 => "MXFP4",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The forms of [`DType::I2_S`] on disk; nothing in a GGUF file tells them apart.
///
/// Published files are all [`I2sLayout::Block128`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum I2sLayout {
    /// 128 elements in 32 bytes, over the flattened tensor.
    #[default]
    Block128,
    /// 64 elements in 16 bytes, over the flattened tensor: what Arm builds of the reference
    /// implementation have written since November 2025.
    Block64,
    /// Four rows to a byte, row `4i` at bits 7:6; byte `i·k + c` for column `c`.
    Rows4,
    /// 128 elements in 32 bytes, each row padded with zeros to whole blocks: the layout that kernels
    /// work on, as engine bundles have it. No file names it.
    PaddedRows,
}

impl I2sLayout {
    /// The names that files and command lines have for layouts.
    pub const NAMES: [&str; 3] = ["block128", "block64", "rows4"];

    /// Its name among these, if it has one.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            I2sLayout::Block128 => Some("block128"),
            I2sLayout::Block64 => Some("block64"),
            I2sLayout::Rows4 => Some("rows4"),
            I2sLayout::PaddedRows => None,
        }
    }
}

/// A name that isn't a layout of I2_S.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected block128, block64 or rows4, found `{found}`")]
pub struct UnknownI2sLayout {
    /// The name.
    pub found: String,
}

impl FromStr for I2sLayout {
    type Err = UnknownI2sLayout;

    /// Reads one of [`I2sLayout::NAMES`].
    fn from_str(name: &str) -> Result<I2sLayout, UnknownI2sLayout> {
        match name {
            "block128" => Ok(I2sLayout::Block128),
            "block64" => Ok(I2sLayout::Block64),
            "rows4" => Ok(I2sLayout::Rows4),
            _ => Err(UnknownI2sLayout {
                found: name.chars().take(80).collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_bytes_counts_blocks_and_trailer() {
        for (dtype, n, bytes) in [
            (DType::F32, 3, Some(12)),
            (DType::Q8_0, 64, Some(68)),
            (DType::Q8_0, 33, None),
            (DType::I2_S, 256, Some(64 + 32)),
            (DType::Q2_K, 0, Some(0)),
            (DType::F8_E4M3, 5, Some(5)),
            (DType::F6_E2M3, 8, Some(6)),
            (DType::F4, 6, Some(3)),
            (DType::F4, 5, None),
            (DType::C64, 2, Some(16)),
            (DType::F64, u64::MAX, None),
        ] {
            assert_eq!(dtype.tensor_bytes(n), bytes, "{dtype} × {n}");
        }
    }

    #[test]
    fn layouts_by_name() {
        let layouts: [I2sLayout; 3] = I2sLayout::NAMES.map(|name| name.parse().unwrap());
        assert_eq!(layouts.map(I2sLayout::name), I2sLayout::NAMES.map(Some));
        let named = [I2sLayout::Block128, I2sLayout::Block64, I2sLayout::Rows4];
        assert_eq!(layouts, named);
        assert_eq!(
            "Block128".parse::<I2sLayout>().unwrap_err().to_string(),
            "expected block128, block64 or rows4, found `Block128`"
        );
    }
}
