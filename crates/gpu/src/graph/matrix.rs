//! Weight matrices on the device, alone or joined with others that read the same input.

use super::op::Shared;
use crate::kernels::linear::{Linear, Stack, WeightKind};
use crate::{Device, GpuError};

/// A weight matrix: some rows of a matrix on the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    whole: Shared<Linear>,
    first: usize,
    n: usize,
}

impl Matrix {
    /// All of `linear`.
    pub fn new(linear: Linear) -> Matrix {
        Matrix {
            first: 0,
            n: linear.n(),
            whole: Shared::new(linear),
        }
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.whole.k()
    }

    /// The format the weights are stored in.
    pub fn kind(&self) -> WeightKind {
        self.whole.kind()
    }

    /// This matrix and `next` as one, if they are adjacent.
    pub(super) fn with(&self, next: &Matrix) -> Option<Matrix> {
        let fits = self.whole == next.whole && self.first + self.n == next.first;
        fits.then(|| Matrix {
            n: self.n + next.n,
            ..self.clone()
        })
    }

    /// As kernel arguments.
    pub fn linear(&self) -> Linear {
        let rows = self.whole.rows(self.first..self.first + self.n);
        // Only matrices in one piece were joined, and all others are whole.
        rows.unwrap_or_else(|| Linear::clone(&self.whole))
    }
}

/// Stores matrices that read the same input next to one another, where possible: those that can't be joined,
/// or for which memory is short, stay as they are.
///
/// Errors: those of the device, except for running out of memory.
pub fn join(device: &Device, parts: &mut [&mut Matrix]) -> Result<(), GpuError> {
    // Runs of the same type: types may change from one to the next.
    for run in parts.chunk_by_mut(|a, b| a.kind() == b.kind()) {
        if run.len() < 2 || run.iter().any(|part| part.n != part.whole.n()) {
            continue;
        }
        let wholes: Vec<&Linear> = run.iter().map(|part| &*part.whole).collect();
        let joined = match Linear::join(device, &wholes) {
            // Both copies exist for a moment, for which memory may be short.
            Ok(None) | Err(GpuError::OutOfMemory { .. }) => continue,
            Ok(Some(joined)) => Shared::new(joined),
            Err(error) => return Err(error),
        };
        let mut first = 0;
        for part in run {
            let n = part.n;
            **part = Matrix {
                whole: joined.clone(),
                first,
                n,
            };
            first += n;
        }
    }
    Ok(())
}

/// Stores the matrices of experts in common memory, which products with routes need. Each of `sets` has one for
/// every expert, and the matrices of an expert are next to one another where types and memory permit. Returns
/// a stack for each set.
///
/// Errors: as [`Stack::join`].
pub fn stack(device: &Device, sets: &mut [Vec<&mut Matrix>]) -> Result<Vec<Stack>, GpuError> {
    let linears: Vec<Vec<Linear>> = sets
        .iter()
        .map(|set| set.iter().map(|matrix| matrix.linear()).collect())
        .collect();
    let linears: Vec<Vec<&Linear>> = linears.iter().map(|set| set.iter().collect()).collect();
    let of = |sets: &[Vec<&Linear>]| {
        let sets: Vec<&[&Linear]> = sets.iter().map(|set| &set[..]).collect();
        Stack::join(device, &sets)
    };
    let stacks = match of(&linears) {
        // Types may differ from set to set, and a set be small enough.
        Err(GpuError::Unsupported { .. }) if linears.len() > 1 => {
            let mut stacks = Vec::with_capacity(linears.len());
            for set in &linears {
                stacks.extend(of(std::slice::from_ref(set))?);
            }
            stacks
        }
        stacks => stacks?,
    };
    for (set, stack) in sets.iter_mut().zip(&stacks) {
        for (expert, matrix) in set.iter_mut().enumerate() {
            if let Some(own) = stack.matrix(expert) {
                **matrix = Matrix::new(own);
            }
        }
    }
    Ok(stacks)
}
