//! Operations that a backend of two others leaves to one of them, written once for either.

mod latent;
mod recurrent;

use std::ops::Deref;

use crate::backend::{Backend, BackendError, KvCache, Sequence};
use crate::stage::Stage;

pub(crate) use latent::{latent_queries, latent_values};
pub(crate) use recurrent::{
    causal_convolution, convolution, delta_net, selective_scan, ssm, time_mix, token_shift,
};

type Caches<'a, B> = Vec<Sequence<'a, <B as Backend>::Cache>>;

/// One of the two backends that `P` consists of. Errors of its functions: those of `P` where something is on the other
/// and can't be copied.
pub(crate) trait Half<P: Backend> {
    /// The backend.
    type On: Backend;

    fn backend(parent: &P) -> Result<&Self::On, BackendError>;

    fn linear(linear: &P::Linear) -> Result<&<Self::On as Backend>::Linear, BackendError>;

    fn vector(vector: &P::Vector) -> Result<&<Self::On as Backend>::Vector, BackendError>;

    /// Its own cache of a sequence.
    fn cache(cache: &mut P::Cache) -> Result<&mut <Self::On as Backend>::Cache, BackendError>;

    /// For reading.
    fn on(
        parent: &P,
        x: &P::Buffer,
    ) -> Result<impl Deref<Target = <Self::On as Backend>::Buffer>, BackendError>;

    /// For modifying.
    fn change<'a>(
        parent: &P,
        x: &'a mut P::Buffer,
    ) -> Result<&'a mut <Self::On as Backend>::Buffer, BackendError>;

    /// For writing.
    fn fill(x: &mut P::Buffer) -> &mut <Self::On as Backend>::Buffer;

    /// Its own caches of sequences.
    fn caches<'a>(
        sequences: &'a mut [Sequence<'_, P::Cache>],
    ) -> Result<Caches<'a, Self::On>, BackendError> {
        let own = sequences.iter_mut().map(|sequence| {
            Ok(Sequence {
                cache: Self::cache(sequence.cache)?,
                n_rows: sequence.n_rows,
                n_angles: sequence.n_angles,
            })
        });
        own.collect()
    }
}

pub(crate) fn layer_norm<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    x: &P::Buffer,
    (weight, bias): (&P::Vector, &P::Vector),
    eps: f32,
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let weights = (H::vector(weight)?, H::vector(bias)?);
    let x = &*H::on(parent, x)?;
    H::backend(parent)?.layer_norm(stage, x, weights, eps, H::fill(out))
}

/// How many tokens truncating both caches of a sequence to its first `len` leaves.
pub(crate) fn len_within(first: &impl KvCache, second: &impl KvCache, len: usize) -> usize {
    let mut len = first.len_within(len);
    loop {
        let both = first.len_within(second.len_within(len));
        if both == len {
            return len;
        }
        len = both;
    }
}

/// Truncates both caches of a sequence to its first `len` tokens, or to as many fewer as both remember states of.
pub(crate) fn truncate(first: &mut impl KvCache, second: &mut impl KvCache, len: usize) {
    first.truncate(len);
    while second.len() != first.len() {
        second.truncate(first.len());
        first.truncate(second.len());
    }
}
