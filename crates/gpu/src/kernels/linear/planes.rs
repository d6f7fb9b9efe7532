//! The layout of weights on the device: codes in whole vectors of 16 bytes, and scales stored separately
//! where a block with its scale isn't a multiple of four bytes.

use std::ops::Range;

use sterna_format::DType;

use super::{ROW_GRAIN, WeightKind};
use crate::GpuError;
use crate::memory::{Buffer, Upload};

/// Rows of floats are padded with zeros to a multiple of this many elements.
pub(super) const FLOAT_PADDING: usize = 32;

/// What the plane of scales contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scales {
    /// Nothing: scales are stored next to codes.
    Within,
    /// A float for each row, which is passed separately from the rows.
    OfRows,
    /// The f16 at this offset of each block.
    OfBlocks(usize),
}

/// How each block of a row is divided.
#[derive(Debug, Clone)]
pub(super) struct Planes {
    block_len: usize,
    block_bytes: usize,
    /// The bytes of a block that go to the plane of codes.
    codes: Range<usize>,
    scales: Scales,
    /// Rows are padded to a multiple of this many bytes.
    row_padding: usize,
}

impl Planes {
    /// `None` for kinds without kernels.
    pub(super) fn of(kind: WeightKind) -> Option<Planes> {
        let whole = |block_len, block_bytes| Planes {
            block_len,
            block_bytes,
            codes: 0..block_bytes,
            scales: Scales::Within,
            row_padding: 1,
        };
        let dtype = match kind {
            WeightKind::Ternary => {
                return Some(Planes {
                    scales: Scales::OfRows,
                    ..whole(128, 32)
                });
            }
            WeightKind::Blocks(dtype) => dtype,
        };
        let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
        let blocks = whole(len, bytes);
        Some(match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Planes {
                row_padding: bytes * FLOAT_PADDING,
                ..blocks
            },
            DType::Q4_K => blocks,
            DType::Q6_K => Planes {
                codes: 0..208,
                scales: Scales::OfBlocks(208),
                ..blocks
            },
            DType::Q8_0
            | DType::Q4_0
            | DType::Q1_0
            | DType::Q2_0
            | DType::Q2_0_G128
            | DType::PQ2_0 => Planes {
                codes: 2..bytes,
                scales: Scales::OfBlocks(0),
                ..blocks
            },
            _ => return None,
        })
    }

    fn blocks(&self, k: usize) -> usize {
        k.div_ceil(self.block_len)
    }

    /// Bytes of the codes of a row.
    pub(super) fn row_bytes(&self, k: usize) -> usize {
        (self.blocks(k) * self.codes.len()).next_multiple_of(self.row_padding)
    }

    /// Bytes of the scales of `n` rows.
    pub(super) fn scale_bytes(&self, n: usize, k: usize) -> usize {
        match self.scales {
            Scales::Within => 0,
            Scales::OfRows => n * 4,
            Scales::OfBlocks(_) => n * self.blocks(k) * 2,
        }
    }

    /// Uploads the rows `range`, from a multiple of [`ROW_GRAIN`] on, to the planes of codes and, where scales are in
    /// the rows, of scales.
    pub(super) fn upload<E: From<GpuError>>(
        &self,
        upload: &mut Upload,
        k: usize,
        range: Range<usize>,
        [codes, scales]: [&Buffer; 2],
        mut rows: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let stored = self.blocks(k) * self.block_bytes;
        let row_bytes = self.row_bytes(k);
        let fits = row_bytes <= upload.slot_bytes();
        let scale = match self.scales {
            Scales::OfBlocks(at) => Some(at),
            Scales::Within | Scales::OfRows => None,
        };
        if stored == row_bytes && scale.is_none() && fits {
            let (at, len) = (range.start * row_bytes, range.len() * row_bytes);
            return upload.write_with(codes, at as u64, len, row_bytes, |start, out| {
                let first = range.start + start / row_bytes;
                rows(first..first + out.len() / row_bytes, out)
            });
        }
        let at_once = (upload.slot_bytes() / row_bytes.max(1) / ROW_GRAIN).max(1) * ROW_GRAIN;
        let (mut raw, mut of_codes, mut of_scales) = (Vec::new(), Vec::new(), Vec::new());
        for first in range.clone().step_by(at_once) {
            let run = first..range.end.min(first + at_once);
            raw.resize(run.len() * stored, 0);
            rows(run, &mut raw)?;
            of_codes.clear();
            of_scales.clear();
            for row in raw.chunks_exact(stored.max(1)) {
                let end = of_codes.len() + row_bytes;
                for block in row.chunks_exact(self.block_bytes) {
                    of_codes.extend_from_slice(&block[self.codes.clone()]);
                    if let Some(at) = scale {
                        of_scales.extend_from_slice(&block[at..at + 2]);
                    }
                }
                of_codes.resize(end, 0);
            }
            upload.write(codes, (first * row_bytes) as u64, &of_codes)?;
            if scale.is_some() {
                upload.write(scales, self.scale_bytes(first, k) as u64, &of_scales)?;
            }
        }
        Ok(())
    }
}
