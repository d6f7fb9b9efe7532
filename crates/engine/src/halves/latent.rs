//! Latent attention.

use super::Half;
use crate::backend::{Backend, BackendError, LatentInputs};
use crate::config::LatentConfig;
use crate::stage::Stage;

pub(crate) fn latent_queries<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    inputs: &LatentInputs<'_, P>,
    [q, k]: [&mut P::Buffer; 2],
) -> Result<(), BackendError> {
    let inputs = LatentInputs {
        shape: inputs.shape,
        q: &*H::on(parent, inputs.q)?,
        k_rope: &*H::on(parent, inputs.k_rope)?,
        latent: &*H::on(parent, inputs.latent)?,
        w: &matrices::<P, H>(inputs.w)?,
    };
    H::backend(parent)?.latent_queries(stage, inputs, H::fill(q), H::fill(k))
}

pub(crate) fn latent_values<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    shape: &LatentConfig,
    (x, w): (&P::Buffer, &[&P::Linear]),
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let (x, w) = (&*H::on(parent, x)?, matrices::<P, H>(w)?);
    H::backend(parent)?.latent_values(stage, shape, x, &w, H::fill(out))
}

type Matrices<'a, B> = Vec<&'a <B as Backend>::Linear>;

fn matrices<'a, P: Backend, H: Half<P>>(
    w: &[&'a P::Linear],
) -> Result<Matrices<'a, H::On>, BackendError> {
    w.iter().map(|w| H::linear(w)).collect()
}
