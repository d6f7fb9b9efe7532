//! What becomes of the output head while a model is loaded.
//!
//! The head is the largest matrix of most models, and decoding reads all of it for every token, so it
//! may be held in fewer bits than it is stored in.

use sterna_format::DType;

use crate::PlanError;
use crate::plan::{LinearId, LinearRecipe, ModelPlan, Recipe, Stored};

/// Choices about the output head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeadOptions {
    /// The type it is held as; as it is stored if `None`. The embedding table stays as it is, even
    /// where both are one tensor.
    pub dtype: Option<DType>,
}

/// Decided for a plan.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Head {
    /// The type to encode the head as, if it is another than that it is stored in.
    pub(crate) dtype: Option<DType>,
}

impl ModelPlan {
    /// The plan with other choices about the output head.
    ///
    /// Errors: [`PlanError::Config`] if the head is ternary, or its width isn't whole blocks of a type
    /// asked for.
    pub fn with_head(mut self, options: HeadOptions) -> Result<ModelPlan, PlanError> {
        self.head = Head::default();
        if options == HeadOptions::default() {
            return Ok(self);
        }
        let recipe = self.head_recipe();
        let Stored::Blocks(stored) = recipe.stored else {
            return Err(PlanError::config(
                "output head in another type",
                "weights that are floats or blocks",
                "trits",
            ));
        };
        let whole_blocks = |dtype: DType| {
            if recipe.k.is_multiple_of(dtype.block_len()) {
                return Ok(dtype);
            }
            Err(PlanError::config(
                format!("output head as {dtype}"),
                format!("a width that is a multiple of {}", dtype.block_len()),
                recipe.k,
            ))
        };
        let dtype = options.dtype.filter(|dtype| *dtype != stored);
        let dtype = dtype.map(whole_blocks).transpose()?;
        self.head = Head { dtype };
        Ok(self)
    }

    /// The matrix that logits come from: the embedding table if there is no other.
    pub(crate) fn head_id(&self) -> LinearId {
        let output = self.weights.output.as_ref();
        output.map_or(self.weights.token_embd, |head| head.weight)
    }

    fn head_recipe(&self) -> &LinearRecipe {
        match &self.specs[self.head_id().0].recipe {
            Recipe::Linear(recipe) => recipe,
            _ => unreachable!("the planner gave this id to a matrix"),
        }
    }

    /// Bytes of the weights that loading makes beside those it finds in the files: an output head in
    /// another type ([`ModelPlan::with_head`]).
    pub fn made_bytes(&self) -> u64 {
        let recipe = self.head_recipe();
        self.head.dtype.map_or(0, |dtype| {
            let row_bytes = recipe.k / dtype.block_len() * dtype.block_bytes();
            recipe.n as u64 * row_bytes as u64
        })
    }
}
