//! Large matrices of blocks, loaded by rows as these arrive, by backends that take them so: a few MiB of a table of
//! any size are in memory.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::{LoadError, recipe};
use crate::backend::{Backend, BlockMatrix, ROW_GRAIN};
use crate::plan::{
    Every, LinearRecipe, ModelPlan, Recipe, Spec, Stored, TensorRequest, multiplied_as,
};

/// About how much of a matrix is requested at once; smaller ones are requested as a whole.
const PIECE_BYTES: u64 = 8 << 20;

/// A matrix of a plan that is being loaded by rows.
pub(super) struct ByRows<L> {
    recipe: LinearRecipe,
    shape: BlockMatrix,
    /// Where all of it lies.
    whole: TensorRequest,
    /// Bytes of a row.
    stride: u64,
    /// Rows of a piece.
    at_once: usize,
    /// The next of them, and where they lie.
    next: Range<usize>,
    request: TensorRequest,
    /// What the backend makes of those so far.
    linear: Option<L>,
}

impl<L> ByRows<L> {
    /// `None` for weights that are loaded as a whole: small ones, and those of which a row isn't made of the bytes of
    /// one row.
    pub(super) fn of(plan: &ModelPlan, spec: &Spec) -> Option<ByRows<L>> {
        let (Recipe::Linear(recipe), [whole]) = (&spec.recipe, &spec.parts[..]) else {
            return None;
        };
        let LinearRecipe {
            n,
            k,
            first_row: 0,
            n_stored,
            stored: Stored::Blocks(dtype),
            scale: None,
            n_runs: 1,
            transposed: false,
            every: Every::ONE,
            split_scales: false,
            rotation,
            precise: _,
        } = *recipe
        else {
            return None;
        };
        let stride = whole.len.checked_div(n as u64)?;
        let rows = PIECE_BYTES.checked_div(stride)? as usize;
        let at_once = rows / ROW_GRAIN * ROW_GRAIN;
        let is_all = n_stored == n && stride * n as u64 == whole.len;
        if !is_all || at_once == 0 || n <= at_once {
            return None;
        }
        let mut by_rows = ByRows {
            recipe: *recipe,
            shape: BlockMatrix {
                n,
                k,
                dtype: multiplied_as(dtype),
                rotation: rotation.map(|i| Arc::clone(&plan.rotations[i])),
            },
            whole: whole.clone(),
            stride,
            at_once,
            next: 0..0,
            request: whole.clone(),
            linear: None,
        };
        by_rows.go_on();
        Some(by_rows)
    }

    /// The next rows.
    pub(super) fn wanted(&self) -> &TensorRequest {
        &self.request
    }

    fn go_on(&mut self) {
        let start = self.next.end;
        self.next = start..self.recipe.n.min(start + self.at_once);
        self.request.offset = self.whole.offset + start as u64 * self.stride;
        self.request.len = self.next.len() as u64 * self.stride;
    }

    /// Loads the wanted rows, checked for NaN and infinity if `thorough`; the matrix, if they were the last.
    pub(super) fn feed<B: Backend<Linear = L>>(
        &mut self,
        backend: &B,
        bytes: Bytes,
        thorough: bool,
    ) -> Result<Option<L>, LoadError> {
        let recipe = LinearRecipe {
            n: self.next.len(),
            n_stored: self.next.len(),
            ..self.recipe
        };
        let (host, name) = (backend.host(), self.whole.name_in_file());
        let weights = recipe::linear(
            host,
            &recipe,
            std::slice::from_ref(&self.whole),
            vec![bytes],
        )?;
        if thorough {
            let before = self.next.start * self.recipe.k;
            let checked = recipe::check_finite(host, &recipe, name, &weights);
            checked.map_err(|error| match error {
                LoadError::NotFinite { name, index, found } => LoadError::NotFinite {
                    name,
                    index: before + index,
                    found,
                },
                error => error,
            })?;
        }
        let weights = recipe::unpacked(host, &recipe, weights)
            .map_err(|source| super::feed::weights_error(name, source))?;
        let linear = match &mut self.linear {
            Some(linear) => linear,
            None => {
                let begun = backend.begin_linear(self.shape.clone())?;
                self.linear.insert(begun)
            }
        };
        backend.load_rows(linear, self.next.clone(), &weights)?;
        self.go_on();
        Ok(match self.next.is_empty() {
            true => self.linear.take(),
            false => None,
        })
    }
}
