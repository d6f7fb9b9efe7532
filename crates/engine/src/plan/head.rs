//! How the output head is loaded.
//!
//! The head is the largest matrix of most models, and decoding reads all of it for every token, so it may be
//! stored in fewer bits than in the file, or be given a screen (see `crate::screening`).

use sterna_format::DType;

use super::{LinearId, LinearRecipe, ModelPlan, Recipe, Stored};
use crate::error::PlanError;

/// Options for the output head.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeadOptions {
    /// The type it is converted to; unchanged if `None`. The embedding table stays as it is, even where both
    /// are one tensor.
    pub dtype: Option<DType>,
    /// Whether a copy in fewer bits rules out rows where only the largest logits are needed.
    pub screen: HeadScreen,
}

/// The copy of the output head that is read first where only the largest logits are needed
/// ([`Logits::Top`](crate::Logits::Top)): it rules out rows that can't be among them, so that little of the
/// head itself is read. No token depends on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HeadScreen {
    /// There is none.
    #[default]
    Off,
    /// Q8_0, if the head is of floats and so large that reading half as much pays for making it, and it can have one;
    /// else none. There is none on a GPU.
    Auto,
    /// One of this type.
    As(DType),
}

/// The type of [`HeadScreen::Auto`]: with random weights of 2,560 columns, it separates the 40 largest logits of 128,256
/// from all but a hundred of the others, and two threads make it in 0.4 s.
const AUTO_SCREEN: DType = DType::Q8_0;

/// Bytes of a head of floats from which [`HeadScreen::Auto`] makes one; smaller ones are read in no time.
const AUTO_FROM: u64 = 64 << 20;

/// Resolved for a plan.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Head {
    /// The type to convert the head to, if it differs from the stored type.
    pub(crate) dtype: Option<DType>,
    /// The type of its screen.
    pub(crate) screen: Option<DType>,
    /// The model goes without a screen that can't be made.
    pub(crate) screen_may_fail: bool,
}

/// The type of screen that pays for a head that is loaded as `dtype`, in so many bytes.
fn auto_screen(dtype: Option<DType>, bytes: u64) -> Option<DType> {
    let is_float = matches!(dtype, Some(DType::F16 | DType::BF16 | DType::F32));
    (is_float && bytes >= AUTO_FROM).then_some(AUTO_SCREEN)
}

impl ModelPlan {
    /// The plan with other options for the output head.
    ///
    /// Errors: [`PlanError::Config`] if the head is ternary, its width isn't whole blocks of a requested
    /// type, or a screen is requested that has no fewer bits than the head, or where logits are more than a
    /// product with the head.
    pub fn with_head(mut self, options: HeadOptions) -> Result<ModelPlan, PlanError> {
        self.head = Head::default();
        if let Some(dtype) = options.dtype {
            let what = "output head in another type";
            let stored = self.stored_blocks(what)?;
            self.whole_blocks(what, dtype)?;
            self.head.dtype = Some(dtype).filter(|dtype| *dtype != stored);
        }
        self.head.screen_may_fail = options.screen == HeadScreen::Auto;
        self.head.screen = match options.screen {
            HeadScreen::Off => None,
            HeadScreen::Auto => auto_screen(self.loaded_type(), self.head_bytes())
                .filter(|dtype| self.check_screen(*dtype).is_ok()),
            HeadScreen::As(dtype) => {
                self.check_screen(dtype)?;
                Some(dtype)
            }
        };
        Ok(self)
    }

    /// The type that the head is converted to, if it differs from the one it is stored in.
    pub fn head_dtype(&self) -> Option<DType> {
        self.head.dtype
    }

    /// The type that the head is loaded as; `None` if it is ternary.
    fn loaded_type(&self) -> Option<DType> {
        self.head.dtype.or(self.stored_type())
    }

    /// The type that it is stored in; `None` if it is ternary.
    fn stored_type(&self) -> Option<DType> {
        match self.head_recipe().stored {
            Stored::Blocks(stored) => Some(stored),
            _ => None,
        }
    }

    /// Fails if the head can't have a screen of type `dtype`.
    fn check_screen(&self, dtype: DType) -> Result<(), PlanError> {
        let what = "screen of the output head";
        self.stored_blocks(what)?;
        let projection = self.weights.output.as_ref();
        let more = if self.config.logit_softcap.is_some() {
            Some("a cap")
        } else if self.config.logit_scale != 1.0 {
            Some("a scale")
        } else if projection.is_some_and(|head| head.bias.is_some()) {
            Some("a bias")
        } else if projection.is_some_and(|head| head.input_norm.is_some()) {
            Some("a norm before the head")
        } else {
            None
        };
        if let Some(found) = more {
            let expected = "logits that are the product with the head alone";
            return Err(PlanError::config(what, expected, found));
        }
        self.whole_blocks(what, dtype)?;
        if self.head_bytes_as(dtype) >= self.head_bytes() {
            let bits = |bytes: u64| 8.0 * bytes as f64 / self.head_elements() as f64;
            return Err(PlanError::config(
                format!("{what} as {dtype}"),
                format!("fewer bits a weight than {}", bits(self.head_bytes())),
                bits(self.head_bytes_as(dtype)),
            ));
        }
        Ok(())
    }

    /// The type that the head is stored in; an error unless it is one of blocks.
    fn stored_blocks(&self, what: &str) -> Result<DType, PlanError> {
        let expected = "weights that are floats or blocks";
        (self.stored_type()).ok_or_else(|| PlanError::config(what, expected, "trits"))
    }

    /// Fails if rows of the head aren't whole blocks of `dtype`.
    fn whole_blocks(&self, what: &str, dtype: DType) -> Result<(), PlanError> {
        let k = self.head_recipe().k;
        if k.is_multiple_of(dtype.block_len()) {
            return Ok(());
        }
        Err(PlanError::config(
            format!("{what}, {dtype}"),
            format!("a width that is a multiple of {}", dtype.block_len()),
            k,
        ))
    }

    /// The matrix that computes logits: the embedding table if there is no other.
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

    fn head_elements(&self) -> u64 {
        let recipe = self.head_recipe();
        recipe.n as u64 * recipe.k as u64
    }

    /// Bytes of the head in the type it is loaded as.
    pub(crate) fn head_bytes(&self) -> u64 {
        match self.head.dtype {
            Some(dtype) => self.head_bytes_as(dtype),
            None => self.specs[self.head_id().0].memory_bytes(),
        }
    }

    fn head_bytes_as(&self, dtype: DType) -> u64 {
        self.head_elements() / dtype.block_len() as u64 * dtype.block_bytes() as u64
    }

    /// Bytes of the head's screen, with two bounds for each row.
    pub(crate) fn screen_bytes(&self) -> Option<u64> {
        let bounds = self.head_recipe().n as u64 * 2 * size_of::<f32>() as u64;
        self.head
            .screen
            .map(|dtype| self.head_bytes_as(dtype) + bounds)
    }

    /// Bytes of the weights that loading creates in addition to those in the files: an output head in another
    /// type, and its screen ([`ModelPlan::with_head`]).
    pub fn made_bytes(&self) -> u64 {
        let head = self.head.dtype.map_or(0, |dtype| self.head_bytes_as(dtype));
        head + self.screen_bytes().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_heads_of_floats_have_a_screen() {
        for (dtype, bytes, expected) in [
            (Some(DType::F16), 656_670_720, Some(DType::Q8_0)),
            (Some(DType::BF16), AUTO_FROM, Some(DType::Q8_0)),
            (Some(DType::F32), AUTO_FROM - 1, None),
            (Some(DType::Q6_K), 656_670_720, None),
            (None, 656_670_720, None),
        ] {
            assert_eq!(auto_screen(dtype, bytes), expected, "{dtype:?} {bytes}");
        }
    }
}
