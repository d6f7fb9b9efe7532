//! The layout of weights on the device: codes in whole vectors of 16 bytes, and scales stored separately
//! where a block with its scale isn't a multiple of four bytes.

use std::ops::Range;

use sterna_format::DType;

use super::{ROW_GRAIN, WeightKind};
use crate::GpuError;
use crate::memory::{Buffer, Upload, parallel};

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

    /// Uploads `rows`, which are those of `range`, from a multiple of [`ROW_GRAIN`](super::ROW_GRAIN) on, to the planes of
    /// codes and, where scales are in the rows, of scales.
    pub(super) fn upload(
        &self,
        upload: &mut Upload,
        k: usize,
        range: Range<usize>,
        [codes, scales]: [&Buffer; 2],
        rows: &[u8],
    ) -> Result<(), GpuError> {
        let (stored, row_bytes) = (self.blocks(k) * self.block_bytes, self.row_bytes(k));
        let scale_bytes = match self.scales {
            // They aren't in the rows.
            Scales::OfRows => 0,
            Scales::Within | Scales::OfBlocks(_) => self.scale_bytes(1, k),
        };
        if stored == row_bytes && scale_bytes == 0 || rows.is_empty() {
            return upload.write(codes, (range.start * row_bytes) as u64, rows);
        }
        let at_once = (upload.slot_bytes() / row_bytes / ROW_GRAIN).max(1) * ROW_GRAIN;
        let (mut of_codes, mut of_scales) = (Vec::new(), Vec::new());
        for (i, run) in rows.chunks(at_once * stored).enumerate() {
            let (first, n) = (range.start + i * at_once, run.len() / stored);
            of_codes.resize(n * row_bytes, 0);
            of_scales.resize(n * scale_bytes, 0);
            let n_parts = parallel::n_parts(run.len());
            let share = n.div_ceil(n_parts);
            let parts = run.chunks(share * stored);
            let codes_of = of_codes.chunks_mut(share * row_bytes);
            let mut scales_of = of_scales.chunks_mut((share * scale_bytes).max(1));
            let parts = parts.zip(codes_of).map(|(rows, codes)| {
                let scales = scales_of.next().unwrap_or_default();
                (rows, codes, scales)
            });
            parallel::for_each(n_parts, parts.collect(), |(rows, codes, scales)| {
                self.divide(stored, row_bytes, rows, codes, scales);
            });
            upload.write(codes, (first * row_bytes) as u64, &of_codes)?;
            if scale_bytes > 0 {
                upload.write(scales, (first * scale_bytes) as u64, &of_scales)?;
            }
        }
        Ok(())
    }

    /// Divides rows of `stored` bytes into codes, `row_bytes` of each row, and scales.
    fn divide(
        &self,
        stored: usize,
        row_bytes: usize,
        rows: &[u8],
        codes: &mut [u8],
        scales: &mut [u8],
    ) {
        let n = self.codes.len();
        let mut scales = scales.chunks_exact_mut(2);
        for (row, codes) in rows
            .chunks_exact(stored)
            .zip(codes.chunks_exact_mut(row_bytes))
        {
            for (block, codes) in row
                .chunks_exact(self.block_bytes)
                .zip(codes.chunks_exact_mut(n))
            {
                codes.copy_from_slice(&block[self.codes.clone()]);
                if let (Scales::OfBlocks(at), Some(scale)) = (self.scales, scales.next()) {
                    scale.copy_from_slice(&block[at..at + 2]);
                }
            }
        }
    }
}
