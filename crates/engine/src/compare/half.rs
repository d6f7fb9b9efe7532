//! The backends of a [`Compare`], for operations that are the same on both.

use std::ops::Deref;

use super::{Both, Buffer, Compare, Linear};
use crate::backend::{Backend, BackendError};
use crate::halves::Half;

pub(super) struct Reference;
pub(super) struct Tested;

macro_rules! half {
    ($half:ident, $backend:ident, $field:ident) => {
        impl<R: Backend, T: Backend> Half<Compare<R, T>> for $half {
            type On = $backend;
            fn backend(compare: &Compare<R, T>) -> Result<&$backend, BackendError> {
                Ok(&compare.$field)
            }

            fn linear(linear: &Linear<R, T>) -> Result<&$backend::Linear, BackendError> {
                Ok(&linear.both.$field)
            }

            fn vector(
                vector: &Both<R::Vector, T::Vector>,
            ) -> Result<&$backend::Vector, BackendError> {
                Ok(&vector.$field)
            }

            fn cache(
                cache: &mut Both<R::Cache, T::Cache>,
            ) -> Result<&mut $backend::Cache, BackendError> {
                Ok(&mut cache.$field)
            }

            fn on(
                _: &Compare<R, T>,
                x: &Buffer<R, T>,
            ) -> Result<impl Deref<Target = $backend::Buffer>, BackendError> {
                Ok(&x.both.$field)
            }

            fn change<'a>(
                _: &Compare<R, T>,
                x: &'a mut Buffer<R, T>,
            ) -> Result<&'a mut $backend::Buffer, BackendError> {
                Ok(&mut x.both.$field)
            }

            fn fill(x: &mut Buffer<R, T>) -> &mut $backend::Buffer {
                &mut x.both.$field
            }
        }
    };
}

half!(Reference, R, reference);
half!(Tested, T, tested);
