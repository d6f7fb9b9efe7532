//! Reading what clients send, which was checked: fields by name, in their tables; errors with their path.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use sterna::constraint::Grammar;

use super::error::ApiError;
use super::shape::{self, Shape};
use crate::answer::Asked;

/// The body of a request, which has its shape.
pub(crate) struct Checked {
    value: Value,
    shape: Shape,
}

impl Checked {
    /// `value`, if it has the shape `shape`.
    ///
    /// Errors: what is wrong, and where.
    pub(crate) fn new(value: Value, shape: Shape) -> Result<Checked, ApiError> {
        match shape.fits(&value) {
            true => Ok(Checked { value, shape }),
            false => Err(shape.error(&value, "")),
        }
    }

    /// All of it.
    pub(crate) fn at(&self) -> At<'_> {
        At::new(&self.value, String::new(), self.shape)
    }
}

/// A value, and where it is.
#[derive(Debug, Clone)]
pub(crate) struct At<'a> {
    value: &'a Value,
    path: String,
    /// What it may be.
    shape: Shape,
    /// What it is of that.
    found: Shape,
}

impl<'a> At<'a> {
    fn new(value: &'a Value, path: String, shape: Shape) -> At<'a> {
        let found = shape.found(value);
        At {
            value,
            path,
            shape,
            found,
        }
    }

    /// The field called `name`; null if there is none.
    pub(crate) fn get(&self, name: &str) -> At<'a> {
        const NULL: &Value = &Value::Null;
        let shape = self.found.field(name).or_else(|| self.shape.field(name));
        debug_assert!(shape.is_some(), "{}.{name} is in no table", self.path);
        At::new(
            self.value.get(name).unwrap_or(NULL),
            shape::join(&self.path, name),
            shape.unwrap_or(Shape::Any),
        )
    }

    /// The first of the fields called `names` that is there.
    pub(crate) fn get_any(&self, names: &[&str]) -> At<'a> {
        let there = names.iter().find(|name| !self.get(name).is_absent());
        self.get(there.or(names.first()).unwrap_or(&""))
    }

    /// The value.
    pub(crate) fn value(&self) -> &'a Value {
        self.value
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// That the answer has to match `grammar`, which is asked for here.
    pub(crate) fn asks(&self, grammar: Grammar) -> Asked {
        Asked {
            grammar,
            at: self.path.clone(),
        }
    }

    /// Whether it isn't there, or null.
    pub(crate) fn is_absent(&self) -> bool {
        self.value.is_null()
    }

    /// What is wrong with it.
    pub(crate) fn wrong(&self, expected: &str) -> ApiError {
        shape::wrong(self.value, &self.path, expected)
    }

    /// The error `message`, of this place.
    pub(crate) fn refused(&self, message: impl std::fmt::Display) -> ApiError {
        shape::refused(&self.path, message)
    }

    /// Reads it as what it may be by its table.
    fn assert(&self, is: fn(Shape) -> bool) {
        debug_assert!(
            self.shape.may_be(is),
            "{}: the table has {:?}",
            self.path,
            self.shape
        );
    }

    pub(crate) fn text(&self) -> Option<&'a str> {
        self.assert(|shape| {
            use Shape::{Model, Name, OtherThan, Text, Word};
            matches!(shape, Text(..) | Name | Word(..) | OtherThan(_) | Model)
        });
        self.value.as_str()
    }

    /// Text that has to be there.
    pub(crate) fn required_text(&self) -> Result<&'a str, ApiError> {
        self.text().ok_or_else(|| self.wrong("text"))
    }

    pub(crate) fn flag(&self) -> Option<bool> {
        self.assert(|shape| matches!(shape, Shape::Flag));
        self.value.as_bool()
    }

    pub(crate) fn number(&self) -> Option<f32> {
        self.assert(|shape| matches!(shape, Shape::Number(..)));
        self.value.as_f64().map(|number| number as f32)
    }

    /// A whole number; one below 0 is 0 here.
    pub(crate) fn whole(&self) -> Option<usize> {
        self.assert(|shape| matches!(shape, Shape::Whole(..) | Shape::Id));
        let whole = shape::whole(self.value)?.max(0);
        Some(usize::try_from(whole).unwrap_or(usize::MAX))
    }

    /// The same, which has to be in `range`.
    pub(crate) fn whole_in(&self, range: RangeInclusive<usize>) -> Result<usize, ApiError> {
        let found = self.whole().filter(|whole| range.contains(whole));
        found.ok_or_else(|| {
            let (min, max) = (range.start(), range.end());
            self.wrong(&format!("a whole number from {min} to {max}"))
        })
    }

    /// A seed: any whole number.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.assert(|shape| matches!(shape, Shape::Whole(..)));
        shape::whole(self.value).map(|whole| whole as u64)
    }

    pub(crate) fn object(&self) -> Option<&'a Map<String, Value>> {
        self.assert(|shape| matches!(shape, Shape::Object(_) | Shape::ById(_)));
        self.value.as_object()
    }

    /// The elements of an array; none if it isn't there.
    pub(crate) fn items(&self) -> Vec<At<'a>> {
        let shape = self.found.item().or_else(|| self.shape.item());
        debug_assert!(shape.is_some(), "{} is no array by its table", self.path);
        let shape = shape.unwrap_or(Shape::Any);
        let items = self.value.as_array();
        let items = items.map(Vec::as_slice).unwrap_or_default();
        let item = |(index, value)| At::new(value, format!("{}[{index}]", self.path), shape);
        items.iter().enumerate().map(item).collect()
    }

    /// Ids of tokens, each below `n_vocab`; none if they aren't there.
    pub(crate) fn ids(&self, n_vocab: usize) -> Result<Vec<u32>, ApiError> {
        let items = self.value.as_array();
        let items = items.map(Vec::as_slice).unwrap_or_default();
        let ids = items.iter().enumerate().map(|(index, value)| {
            let id = shape::whole(value).and_then(|id| u32::try_from(id).ok());
            id.filter(|&id| (id as usize) < n_vocab).ok_or_else(|| {
                let expected = format!("an id below {n_vocab}, the size of the vocabulary");
                shape::wrong(value, &format!("{}[{index}]", self.path), &expected)
            })
        });
        ids.collect()
    }

    /// A text, or an array of them.
    pub(crate) fn texts(&self) -> Vec<String> {
        match self.value {
            Value::String(text) => vec![text.clone()],
            Value::Array(items) => items
                .iter()
                .filter_map(|item| item.as_str().map(str::to_owned))
                .collect(),
            _ => Vec::new(),
        }
    }
}
