//! Checking an adapter's matrices against a model, and converting them to the engine's layout.

use std::collections::HashSet;

use bytes::Bytes;
use sterna_format::DType;
use sterna_kernels::quant::decode_row;
use sterna_kernels::{Exec, requantize};

use super::{AdapterError, LoraMatrix, LoraPair, Module, Orientation};
use crate::backend::{LinearSource, Rounding, WeightData};
use crate::config::{MixerKind, ModelConfig};

/// An update of one linear layer of the engine. There is at most one for each.
pub(super) struct Checked {
    pub(super) layer: usize,
    /// One of the seven that aren't fused.
    pub(super) module: Module,
    pub(super) factors: Factors,
}

/// The matrices of an update.
pub(super) struct Factors {
    /// `[rank, in]`.
    pub(super) a: Factor,
    /// `[out, rank]`.
    pub(super) b: Factor,
    pub(super) scaling: f32,
}

/// The longest blocks for which the rank is rounded up. With longer ones, the padding would take more memory
/// than the matrices.
const MAX_PADDED_BLOCK: usize = 32;

impl Factors {
    /// Converts both to blocks of type `dtype`, where rows are whole blocks. The rank is padded first: rows
    /// of zeros are added to A and columns of zeros to B, whose product stays the same.
    pub(super) fn encode(&mut self, host: &Exec, dtype: DType) -> Result<(), AdapterError> {
        let Factors { a, b, .. } = self;
        if dtype.block_len() <= MAX_PADDED_BLOCK {
            let rank = b.k.next_multiple_of(dtype.block_len());
            a.pad(rank, a.k);
            b.pad(b.n, rank);
        }
        a.encode(host, dtype)?;
        b.encode(host, dtype)
    }
}

/// A matrix as passed to a backend.
#[derive(Clone)]
pub(super) struct Factor {
    /// Its name in the file.
    tensor: String,
    dtype: DType,
    bytes: Bytes,
    n: usize,
    k: usize,
}

impl Factor {
    /// Pads it with rows and columns of zeros, up to `n` rows of `k`; it has floats.
    fn pad(&mut self, n: usize, k: usize) {
        if (n, k) == (self.n, self.k) {
            return;
        }
        let row_bytes = |k: usize| k * self.dtype.block_bytes();
        let mut bytes = vec![0; n * row_bytes(k)];
        let rows = self.bytes.chunks_exact(row_bytes(self.k));
        for (row, padded) in rows.zip(bytes.chunks_exact_mut(row_bytes(k))) {
            padded[..row.len()].copy_from_slice(row);
        }
        (self.n, self.k, self.bytes) = (n, k, bytes.into());
    }

    /// Converts it to blocks of type `dtype`, if its rows are whole ones.
    fn encode(&mut self, host: &Exec, dtype: DType) -> Result<(), AdapterError> {
        if dtype == self.dtype || !self.k.is_multiple_of(dtype.block_len()) {
            return Ok(());
        }
        let blocks = requantize(host, self.n, self.k, self.dtype, &self.bytes, dtype);
        self.bytes = blocks
            .map_err(|source| AdapterError::Encode {
                tensor: self.tensor.clone(),
                dtype,
                source,
            })?
            .into();
        self.dtype = dtype;
        Ok(())
    }

    pub(super) fn into_source(self) -> LinearSource {
        LinearSource {
            n: self.n,
            k: self.k,
            weights: WeightData::Blocks {
                dtype: self.dtype,
                bytes: self.bytes,
                rounding: Rounding::Blocks,
            },
            rotation: None,
        }
    }
}

/// The updates that `pairs` make to a model of `config`.
pub(super) fn check(
    config: &ModelConfig,
    orientation: Orientation,
    pairs: Vec<LoraPair>,
) -> Result<Vec<Checked>, AdapterError> {
    if pairs.is_empty() {
        return Err(AdapterError::Empty);
    }
    let mut taken = HashSet::new();
    let mut out = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let LoraPair {
            layer,
            module,
            scaling,
            a,
            b,
        } = pair;
        if layer >= config.n_layers {
            return Err(AdapterError::UnknownLayer {
                tensor: a.name,
                n_layers: config.n_layers,
                found: layer,
            });
        }
        let settings = &config.layers[layer];
        let is_absent = match module {
            Module::Gate | Module::Up | Module::Down | Module::GateUp => settings.has_experts,
            Module::Q | Module::K | Module::V | Module::O | Module::Qkv => {
                settings.mixer != MixerKind::Attention
            }
        };
        if is_absent {
            return Err(AdapterError::NoModule {
                tensor: a.name,
                module: module.name(),
                layer,
            });
        }
        if !scaling.is_finite() {
            return Err(AdapterError::Scaling {
                tensor: a.name,
                found: scaling,
            });
        }
        for matrix in [&a, &b] {
            check_matrix(matrix)?;
        }
        let shape = Shape::of(config, layer, module);
        let (rank, orientation) = shape.orient(orientation, &a, &b)?;
        let a_factor = factor(rank, shape.n_in, &a, orientation, |row| row);
        let mut first = 0;
        for &part in module.parts() {
            if !taken.insert((layer, part)) {
                return Err(AdapterError::Twice {
                    tensor: a.name,
                    module: part.name(),
                    layer,
                });
            }
            let n_out = Shape::of(config, layer, part).n_out;
            let rotated = matches!(part, Module::Q | Module::K);
            let order = |row| match rotated {
                true => config.checkpoint_row(row),
                false => row,
            };
            let b_factor = factor(n_out, rank, &b, orientation, |row| first + order(row));
            first += n_out;
            out.push(Checked {
                layer,
                module: part,
                factors: Factors {
                    a: a_factor.clone(),
                    b: b_factor,
                    scaling,
                },
            });
        }
    }
    Ok(out)
}

/// Inputs and outputs of a linear layer.
struct Shape {
    module: &'static str,
    n_in: usize,
    n_out: usize,
}

impl Shape {
    fn of(config: &ModelConfig, layer: usize, module: Module) -> Shape {
        let (model_dim, ffn_dim) = (config.model_dim, config.ffn_dim_of(layer));
        let (q_dim, kv_dim) = (config.q_dim(layer), config.kv_dim(layer));
        let q_rows = config.q_rows(layer);
        let (n_in, n_out) = match module {
            Module::Q => (model_dim, q_rows),
            Module::K | Module::V => (model_dim, kv_dim),
            Module::O => (q_dim, model_dim),
            Module::Gate | Module::Up => (model_dim, ffn_dim),
            Module::Down => (ffn_dim, model_dim),
            Module::Qkv => (model_dim, q_rows + 2 * kv_dim),
            Module::GateUp => (model_dim, 2 * ffn_dim),
        };
        let module = module.name();
        Shape {
            module,
            n_in,
            n_out,
        }
    }

    /// The rank and the orientation of `a` and `b`: `declared` if their shapes allow both.
    fn orient(
        &self,
        declared: Orientation,
        a: &LoraMatrix,
        b: &LoraMatrix,
    ) -> Result<(usize, Orientation), AdapterError> {
        let other = match declared {
            Orientation::RankFirst => Orientation::RankLast,
            Orientation::RankLast => Orientation::RankFirst,
        };
        let found = self.rank(declared, a, b);
        match (found, self.rank(other, a, b)) {
            (Ok(rank), _) => Ok((rank, declared)),
            (Err(_), Ok(rank)) => Ok((rank, other)),
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// The rank, if the matrices have this orientation.
    fn rank(
        &self,
        orientation: Orientation,
        a: &LoraMatrix,
        b: &LoraMatrix,
    ) -> Result<usize, AdapterError> {
        let wrong = |matrix: &LoraMatrix, expected: [String; 2]| {
            let [rows, columns] = match orientation {
                Orientation::RankFirst => expected,
                Orientation::RankLast => {
                    let [rows, columns] = expected;
                    [columns, rows]
                }
            };
            Err(AdapterError::Shape {
                tensor: matrix.name.clone(),
                module: self.module,
                expected: format!("[{rows}, {columns}]"),
                found: matrix.shape.clone(),
            })
        };
        // As `RankFirst` has them.
        let turned = |matrix: &LoraMatrix| match (orientation, &matrix.shape[..]) {
            (Orientation::RankFirst, &[rows, columns]) => Some([rows, columns]),
            (Orientation::RankLast, &[rows, columns]) => Some([columns, rows]),
            _ => None,
        };
        let rank = match turned(a) {
            Some([rank, n_in]) if n_in == self.n_in && rank > 0 => rank,
            _ => return wrong(a, ["rank".to_owned(), self.n_in.to_string()]),
        };
        if turned(b) != Some([self.n_out, rank]) {
            return wrong(b, [self.n_out.to_string(), rank.to_string()]);
        }
        Ok(rank)
    }
}

/// Checks the type, the size and the values of a matrix.
fn check_matrix(matrix: &LoraMatrix) -> Result<(), AdapterError> {
    let tensor = || matrix.name.clone();
    if !matches!(matrix.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(AdapterError::Type {
            tensor: tensor(),
            found: matrix.dtype,
        });
    }
    // An overflowing product equals no length.
    let expected = (matrix.shape.iter()).fold(matrix.dtype.block_bytes(), |product, &dim| {
        product.saturating_mul(dim)
    });
    if matrix.bytes.len() != expected {
        return Err(AdapterError::Size {
            tensor: tensor(),
            expected,
            found: matrix.bytes.len(),
        });
    }
    let mut values = [0.0; 256];
    let chunk_bytes = values.len() * matrix.dtype.block_bytes();
    for (i, bytes) in matrix.bytes.chunks(chunk_bytes).enumerate() {
        let values = &mut values[..bytes.len() / matrix.dtype.block_bytes()];
        decode_row(matrix.dtype, bytes, values).expect("floats of this length can be decoded");
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(AdapterError::NotFinite {
                tensor: tensor(),
                index: i * chunk_bytes / matrix.dtype.block_bytes() + at,
                found: values[at],
            });
        }
    }
    Ok(())
}

/// `n` rows of `k` columns of `stored`, which has this orientation: row `i` is row `row(i)` of the matrix as
/// [`Orientation::RankFirst`] has it.
fn factor(
    n: usize,
    k: usize,
    stored: &LoraMatrix,
    orientation: Orientation,
    row: impl Fn(usize) -> usize,
) -> Factor {
    let size = stored.dtype.block_bytes();
    // Stored rows are as long as the requested rows, or as long as the matrix has rows.
    let stride = stored.shape[1];
    let mut bytes = Vec::with_capacity(n * k * size);
    for i in (0..n).map(row) {
        match orientation {
            Orientation::RankFirst => {
                bytes.extend_from_slice(&stored.bytes[i * k * size..(i + 1) * k * size]);
            }
            Orientation::RankLast => {
                for j in 0..k {
                    let at = (j * stride + i) * size;
                    bytes.extend_from_slice(&stored.bytes[at..at + size]);
                }
            }
        }
    }
    Factor {
        tensor: stored.name.clone(),
        dtype: stored.dtype,
        bytes: Bytes::from(bytes),
        n,
        k,
    }
}
