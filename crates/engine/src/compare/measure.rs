//! The error between two backends' results, and its bounds.

use sterna_format::DType;

use crate::backend::{CacheType, Rounding, WeightData};
use crate::stage::Stage;

/// The results of a stage on both backends.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The stage.
    pub stage: Stage,
    /// Rows that were compared.
    pub n_rows: usize,
    /// Values of a row.
    pub width: usize,
    /// Euclidean norm of the differences over that of the reference's values; 0 if both are.
    pub relative_error: f64,
    /// The bound on `relative_error`; infinite if there is none.
    pub bound: f64,
    /// The largest difference; `None` if there is none.
    pub largest: Option<Difference>,
    /// Values of the reference that are not finite.
    pub n_not_finite: usize,
    /// Values of the tested backend that are not finite where the reference's are: these are counted only
    /// here.
    pub n_lost: usize,
    /// Whether rows agree on their argmax.
    pub agreement: Agreement,
}

/// A value that differs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Its row: a token of the batch.
    pub row: usize,
    /// Its index in the row.
    pub column: usize,
    /// The expected value.
    pub reference: f32,
    /// The value found.
    pub tested: f32,
}

/// Rows with the same argmax; of logits, tokens for which greedy sampling agrees.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Agreement {
    /// How many rows have the same argmax.
    pub n_same: usize,
    /// Of the others, by how much the reference's largest value exceeds its value at the tested backend's
    /// argmax: the maximum.
    pub margin: f32,
}

impl Measured {
    pub(super) fn new(
        stage: Stage,
        want: &[f32],
        got: &[f32],
        width: usize,
        bound: f64,
    ) -> Measured {
        let mut measured = Measured {
            stage,
            n_rows: want.len().checked_div(width).unwrap_or(0),
            width,
            relative_error: 0.0,
            bound,
            largest: None,
            n_not_finite: 0,
            n_lost: want.len().abs_diff(got.len()),
            agreement: Agreement::default(),
        };
        let (mut errors, mut squares, mut largest) = (0.0f64, 0.0f64, 0.0f64);
        for (i, (&reference, &tested)) in want.iter().zip(got).enumerate() {
            match (reference.is_finite(), tested.is_finite()) {
                (false, _) => measured.n_not_finite += 1,
                (true, false) => measured.n_lost += 1,
                (true, true) => {
                    let difference = f64::from(tested) - f64::from(reference);
                    errors += difference * difference;
                    squares += f64::from(reference) * f64::from(reference);
                    if difference.abs() > largest {
                        largest = difference.abs();
                        measured.largest = Some(Difference {
                            row: i / width,
                            column: i % width,
                            reference,
                            tested,
                        });
                    }
                }
            }
        }
        if errors > 0.0 {
            measured.relative_error = (errors / squares).sqrt();
        }
        if width > 0 {
            let rows = want.chunks_exact(width).zip(got.chunks_exact(width));
            for (want, got) in rows {
                let (best, chosen) = (place_of_largest(want), place_of_largest(got));
                let margin = want[best] - want[chosen];
                match best == chosen {
                    true => measured.agreement.n_same += 1,
                    false => measured.agreement.margin = measured.agreement.margin.max(margin),
                }
            }
        }
        measured
    }

    /// Whether the two agree within the bounds.
    pub fn is_within(&self) -> bool {
        self.n_lost == 0 && self.relative_error <= self.bound
    }
}

/// The first of the largest of `row`, which is not empty.
fn place_of_largest(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    best
}

/// Kinds of computation, by how far apart two correct results may be, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Work {
    /// Element-wise, or a norm: the last places.
    #[default]
    Elements,
    /// Rows of a table.
    Lookup,
    /// Sums of floats in another order.
    Floats,
    /// With f16 or bf16 weights, with which activations lose bits.
    Halves,
    /// Attention to keys and values quantized to int8.
    RoundedCache,
    /// Activations quantized to int8 in blocks as the weights are, with integer sums.
    Blocks,
    /// Activations quantized to int8 by row, times trits.
    Ternary,
    /// Blocks that a backend may store as another type, without quantizing activations for them.
    Held,
}

impl Work {
    /// Of a product with `weights`.
    pub(super) fn product(weights: &WeightData) -> Work {
        match weights {
            WeightData::Ternary { .. } => Work::Ternary,
            WeightData::Blocks {
                rounding: Rounding::Row,
                ..
            } => Work::Ternary,
            WeightData::Blocks { dtype, .. } => Work::blocks(*dtype),
        }
    }

    /// Of a product with blocks of this type.
    pub(super) fn blocks(dtype: DType) -> Work {
        match dtype {
            DType::F32 | DType::F64 => Work::Floats,
            DType::F16 | DType::BF16 => Work::Halves,
            DType::Q4_0
            | DType::Q8_0
            | DType::Q4_K
            | DType::Q6_K
            | DType::Q1_0
            | DType::Q2_0
            | DType::Q2_0_G128
            | DType::PQ2_0 => Work::Blocks,
            _ => Work::Held,
        }
    }

    /// Of attention with a cache of `dtype`.
    pub(super) fn attention(dtype: CacheType) -> Work {
        match dtype {
            CacheType::F32 => Work::Floats,
            CacheType::F16 => Work::Halves,
            CacheType::Q8_0 => Work::RoundedCache,
        }
    }

    /// The largest relative error of one operation on equal input.
    ///
    /// Roots of the squared errors in docs/gpu.md, with some margin for other devices.
    pub(super) fn alone(self) -> f64 {
        match self {
            Work::Elements => 1e-5,
            // F16 instead of the stored type: half of 2^-11.
            Work::Lookup => 5e-4,
            Work::Floats => 1e-5,
            Work::Halves => 5e-4,
            Work::RoundedCache => 5e-3,
            // Cooperative matrices take both sides as f16, which sums that nearly cancel amplify.
            Work::Blocks => 3e-3,
            Work::Ternary => 1e-5,
            Work::Held => 3e-2,
        }
    }

    /// The same for a layer, or for the output norm and head: a norm and the quantization after it are one
    /// kernel there, and a code may differ by one where a value is close to a half. The narrowest models,
    /// which are the most sensitive to that, stay below half of this.
    pub(super) fn in_layer(self) -> f64 {
        match self {
            Work::Elements | Work::Lookup | Work::Floats => 1e-4,
            Work::Halves => 2e-3,
            Work::RoundedCache => 1e-2,
            Work::Blocks | Work::Ternary => 5e-2,
            Work::Held => 1e-1,
        }
    }

    /// The same for a model's logits, where errors of all layers accumulate.
    pub(super) fn in_model(self) -> f64 {
        match self {
            Work::Elements | Work::Lookup | Work::Floats | Work::Halves => 5e-3,
            Work::RoundedCache => 2e-2,
            Work::Blocks | Work::Ternary => 1e-1,
            Work::Held => 2e-1,
        }
    }
}
