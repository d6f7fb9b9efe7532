//! The sequences of a batch, as kernels that read caches or states take them together.

use super::Rows;
use super::attention::PAGE_LEN;
use crate::error::expect_most;
use crate::memory::Buffer;
use crate::{GpuError, Recorder};

/// Words that a table has for a sequence, besides its pages.
const HEADER: usize = 8;

/// One of the sequences of a batch.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows<'a> {
    /// The position of its first row.
    pub position: usize,
    /// The number of that row in the batch.
    pub first_row: usize,
    /// How many it has.
    pub n_rows: usize,
    /// The row of [`Angles`](super::attention::Angles) for the first row; those of later rows follow.
    pub first_angle: usize,
    /// Its pages of a [`CacheLayer`](super::attention::CacheLayer), in order.
    pub pages: &'a [u32],
    /// Its place in a [`StateLayer`](super::recurrent::StateLayer).
    pub place: u32,
}

/// The table of `sequences`, with room for `page_stride` pages of each: what [`Sequences::table`] has.
///
/// Of a sequence, element 8 · i is the position, so that commands can be replayed as it grows, and the next may be its
/// token, as [`sample`](crate::kernels::output::sample) leaves both; places of states follow the pages. What doesn't fit in 32 bits is no position of a
/// sequence, and taken for the last.
pub fn sequence_table(sequences: &[SequenceRows<'_>], page_stride: usize) -> Vec<u32> {
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let mut words = Vec::with_capacity(sequences.len() * Sequences::words(page_stride));
    for sequence in sequences {
        let n_pages = sequence.pages.len().min(page_stride);
        words.extend([
            word(sequence.position),
            0,
            word(sequence.first_row),
            word(sequence.n_rows),
            word(n_pages * PAGE_LEN),
            word(sequence.first_angle).wrapping_sub(word(sequence.position)),
            0,
            0,
        ]);
    }
    for sequence in sequences {
        let pages = sequence.pages.iter().copied().chain(std::iter::repeat(0));
        words.extend(pages.take(page_stride));
    }
    words.extend(sequences.iter().map(|sequence| sequence.place));
    words
}

/// Sequences whose rows a kernel processes together. Kernels trust the table: rows are those of the batch, a sequence has one
/// at least where states are read, and pages and places are within their layers.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// What [`sequence_table`] gives, for `n_all` sequences.
    pub table: &'a Buffer,
    /// Sequences in the table.
    pub n_all: usize,
    /// Room for the pages of each.
    pub page_stride: usize,
    /// The first of those processed.
    pub first: usize,
    /// How many they are.
    pub n: usize,
    /// The most rows that one of them has.
    pub n_rows: usize,
}

impl<'a> Sequences<'a> {
    /// In runs that a dispatch takes, with a workgroup for each of `n_heads` heads of a row in one dimension.
    pub(super) fn runs(
        self,
        recorder: &Recorder,
        n_heads: usize,
    ) -> impl Iterator<Item = Sequences<'a>> + use<'a> {
        let grid = recorder.device().limits().grid as usize;
        let most = (grid / (self.n_rows * n_heads).max(1)).max(1);
        (0..self.n).step_by(most).map(move |first| Sequences {
            first: self.first + first,
            n: most.min(self.n - first),
            ..self
        })
    }

    /// Which they are of those in the table: the first, and the one after the last.
    pub(super) fn in_table(&self) -> (usize, usize) {
        (self.first, self.first + self.n)
    }

    /// Words of a table for each of its sequences.
    pub(crate) fn words(page_stride: usize) -> usize {
        // The last is its place.
        page_stride.saturating_add(HEADER + 1)
    }

    /// Errors if the table is too small, or rows are fewer than a sequence's.
    pub(super) fn check(&self, rows: &Rows<'_>) -> Result<(), GpuError> {
        expect_most("sequences: of the table", self.n_all, self.first + self.n)?;
        expect_most("sequences: rows of one", rows.n_rows, self.n_rows)?;
        let need = self
            .n_all
            .saturating_mul(Sequences::words(self.page_stride));
        let words = (self.table.bytes() / 4) as usize;
        expect_most("sequences: words of the table", words, need)
    }

    /// Rows, where every sequence has as many as the one with the most.
    pub(super) fn all_rows(&self) -> usize {
        self.n * self.n_rows
    }

    /// Positions that pages of a sequence may hold.
    pub(super) fn capacity(&self) -> usize {
        self.page_stride * PAGE_LEN
    }

    /// The element with the position of the first sequence.
    pub(super) fn header(&self) -> u32 {
        (self.first * HEADER) as u32
    }

    /// The element with its first page.
    pub(super) fn pages(&self) -> u32 {
        (self.n_all * HEADER + self.first * self.page_stride) as u32
    }

    /// The element with its place.
    pub(super) fn places(&self) -> u32 {
        (self.n_all * (HEADER + self.page_stride) + self.first) as u32
    }
}
