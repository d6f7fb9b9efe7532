//! Overrides of the default launch configuration, requested by the user or measured to be faster on this very
//! device.
//!
//! The heuristics, in `kernels::linear`, know the device's limits and the product's shape, and were found on
//! a few devices. A [`Tuning`] has a [`LaunchConfig`] for each [`Product`] that was measured, and one for all
//! others. A configuration is a request: it is brought within the device's limits, so that a tuning from
//! elsewhere may be slow and is never wrong. `Tuner` makes one, from a model's own matrices.

pub mod hints;
mod measure;

use std::collections::HashMap;
use std::sync::Arc;

use crate::WeightKind;

pub use measure::{Effort, Measured, Sample, Tuner};

/// How many rows of activations a product has, as far as kernels differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowClass {
    /// One: a token that is decoded.
    One,
    /// Two to eight: several sequences, or drafts.
    Few,
    /// More: a prompt.
    Many,
}

impl RowClass {
    /// All of them.
    pub const ALL: [RowClass; 3] = [RowClass::One, RowClass::Few, RowClass::Many];

    /// The class of `n_rows`.
    pub const fn of(n_rows: usize) -> RowClass {
        match n_rows {
            0 | 1 => RowClass::One,
            2..=8 => RowClass::Few,
            _ => RowClass::Many,
        }
    }

    /// Its name: `one`, `few` or `many`.
    pub const fn name(self) -> &'static str {
        match self {
            RowClass::One => "one",
            RowClass::Few => "few",
            RowClass::Many => "many",
        }
    }
}

/// A product, as far as its configuration depends on it: weights `[n, k]`, and rows of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Product {
    /// The kind of the weights.
    pub weights: WeightKind,
    /// Rows of weights.
    pub n: usize,
    /// Columns of weights.
    pub k: usize,
    /// Rows of activations.
    pub rows: RowClass,
}

/// How a product is launched. What is `None` is left to heuristics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LaunchConfig {
    /// Invocations that share two rows of weights, up to eight rows of activations: a power of two from 8
    /// on, at most the smallest subgroup.
    pub lanes: Option<u32>,
    /// Invocations of a workgroup there: a power of two from 64 to 1024.
    pub workgroup: Option<u32>,
    /// Whether every workgroup quantizes a single row for itself, or a separate dispatch does for all.
    pub rounds_itself: Option<bool>,
    /// Whether many rows are multiplied by cooperative matrices.
    pub matrix_units: Option<bool>,
}

/// The launch configurations of products on a device. Clones share their table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tuning {
    products: Arc<HashMap<Product, LaunchConfig>>,
    others: LaunchConfig,
}

impl Tuning {
    /// All products use `config`.
    pub fn all(config: LaunchConfig) -> Tuning {
        Tuning {
            products: Arc::default(),
            others: config,
        }
    }

    /// The same, except for `products`, each of which has a configuration of its own.
    #[must_use]
    pub fn with(self, products: impl IntoIterator<Item = (Product, LaunchConfig)>) -> Tuning {
        let mut table = Arc::unwrap_or_clone(self.products);
        table.extend(products);
        Tuning {
            products: Arc::new(table),
            ..self
        }
    }

    /// The same, with another configuration for all products that have none of their own.
    #[must_use]
    pub fn with_others(self, config: LaunchConfig) -> Tuning {
        Tuning {
            others: config,
            ..self
        }
    }

    /// The configuration of `product`.
    pub fn config(&self, product: &Product) -> LaunchConfig {
        self.products.get(product).copied().unwrap_or(self.others)
    }

    /// How many products have a configuration of their own.
    pub fn n_products(&self) -> usize {
        self.products.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_counts_more_than_what_is_asked_of_all() {
        let product = Product {
            weights: WeightKind::Ternary,
            n: 8,
            k: 128,
            rows: RowClass::One,
        };
        let other = Product {
            rows: RowClass::Few,
            ..product
        };
        let asked = LaunchConfig {
            workgroup: Some(64),
            matrix_units: Some(false),
            ..LaunchConfig::default()
        };
        let measured = LaunchConfig {
            lanes: Some(16),
            ..LaunchConfig::default()
        };
        let tuning = Tuning::all(asked).with([(product, measured)]);
        // The whole configuration, not just what it sets.
        assert_eq!(tuning.config(&product), measured);
        assert_eq!(tuning.config(&other), asked);
        assert_eq!(Tuning::default().config(&product), LaunchConfig::default());
        let again = tuning.clone().with([(product, asked)]);
        assert_eq!((again.config(&product), again.n_products()), (asked, 1));
        assert_eq!(tuning.config(&product), measured);
    }

    #[test]
    fn names_lead_back() {
        for kind in [
            WeightKind::Ternary,
            WeightKind::Blocks(sterna_format::DType::Q4_K),
        ] {
            assert_eq!(WeightKind::named(kind.name()), Some(kind));
        }
        assert_eq!(WeightKind::named("Ternary"), None);
        let classes = [0, 1, 2, 8, 9, 512].map(|n| RowClass::of(n).name());
        assert_eq!(classes, ["one", "one", "few", "few", "many", "many"]);
    }
}
