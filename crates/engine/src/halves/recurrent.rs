//! Layers with states.

use super::Half;
use crate::backend::{
    Backend, BackendError, CausalConvolution, DeltaNet, HeadNorm, Recurrence, SelectiveScan,
    Sequence, Ssm, TimeMix, TokenShift,
};
use crate::stage::Stage;

pub(crate) fn convolution<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    (taps, input): (&P::Vector, &P::Buffer),
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let (taps, input) = (H::vector(taps)?, &*H::on(parent, input)?);
    H::backend(parent)?.convolution(stage, taps, input, own, H::fill(out))
}

pub(crate) fn delta_net<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    net: &mut DeltaNet<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let net = DeltaNet {
        shape: net.shape,
        taps: H::vector(net.taps)?,
        a: H::vector(net.a)?,
        dt_bias: H::vector(net.dt_bias)?,
        norm: H::vector(net.norm)?,
        eps: net.eps,
        qkv: H::change(parent, net.qkv)?,
        gate: H::change(parent, net.gate)?,
        alpha: H::change(parent, net.alpha)?,
        beta: H::change(parent, net.beta)?,
    };
    H::backend(parent)?.delta_net(stage, net, own, H::fill(out))
}

pub(crate) fn ssm<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    ssm: &mut Ssm<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let ssm = Ssm {
        shape: ssm.shape,
        taps: H::vector(ssm.taps)?,
        conv_bias: ssm.conv_bias.map(H::vector).transpose()?,
        a: H::vector(ssm.a)?,
        d: H::vector(ssm.d)?,
        dt_bias: H::vector(ssm.dt_bias)?,
        norm: ssm.norm.map(H::vector).transpose()?,
        eps: ssm.eps,
        gate: H::change(parent, ssm.gate)?,
        xbc: H::change(parent, ssm.xbc)?,
        dt: H::change(parent, ssm.dt)?,
    };
    H::backend(parent)?.ssm(stage, ssm, own, H::fill(out))
}

pub(crate) fn causal_convolution<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    convolution: &CausalConvolution<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let convolution = CausalConvolution {
        shape: convolution.shape,
        taps: H::vector(convolution.taps)?,
        bias: convolution.bias.map(H::vector).transpose()?,
        input: &*H::on(parent, convolution.input)?,
    };
    H::backend(parent)?.causal_convolution(stage, convolution, own, H::fill(out))
}

pub(crate) fn selective_scan<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    scan: &mut SelectiveScan<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let scan = SelectiveScan {
        shape: scan.shape,
        n_taps: scan.n_taps,
        a: H::vector(scan.a)?,
        d: H::vector(scan.d)?,
        x: &*H::on(parent, scan.x)?,
        dt: &*H::on(parent, scan.dt)?,
        b: &*H::on(parent, scan.b)?,
        c: &*H::on(parent, scan.c)?,
        gate: H::change(parent, scan.gate)?,
    };
    H::backend(parent)?.selective_scan(stage, scan, own, H::fill(out))
}

pub(crate) fn token_shift<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    shift: &TokenShift<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let added = shift.added.map(|added| H::on(parent, added)).transpose()?;
    let shift = TokenShift {
        shape: shift.shape,
        part: shift.part,
        x: &*H::on(parent, shift.x)?,
        factors: H::vector(shift.factors)?,
        added: added.as_deref(),
    };
    H::backend(parent)?.token_shift(stage, shift, own, H::fill(out))
}

pub(crate) fn time_mix<P: Backend, H: Half<P>>(
    parent: &P,
    stage: Stage,
    mix: &mut TimeMix<'_, P>,
    sequences: &mut [Sequence<'_, P::Cache>],
    out: &mut P::Buffer,
) -> Result<(), BackendError> {
    let own = &mut H::caches(sequences)?[..];
    let finish = mix.finish.as_ref();
    let gate = finish
        .map(|finish| H::on(parent, finish.gate))
        .transpose()?;
    let finish = match (finish, gate.as_deref()) {
        (Some(finish), Some(gate)) => Some(HeadNorm {
            weight: H::vector(finish.weight)?,
            bias: H::vector(finish.bias)?,
            eps: finish.eps,
            gate,
        }),
        _ => None,
    };
    let values;
    let recurrence = match &mut mix.recurrence {
        Recurrence::Fixed { decay, first } => Recurrence::Fixed {
            decay: H::vector(decay)?,
            first: H::vector(first)?,
        },
        Recurrence::Six { decay, first } => Recurrence::Six {
            decay: H::change(parent, decay)?,
            first: H::vector(first)?,
        },
        Recurrence::Seven {
            decay,
            rate,
            residual,
            k_k,
            k_a,
            r_k,
        } => Recurrence::Seven {
            decay: H::change(parent, decay)?,
            rate: H::change(parent, rate)?,
            residual: match residual {
                Some((first, share)) => {
                    values = (H::on(parent, first)?, H::on(parent, share)?);
                    Some((&*values.0, &*values.1))
                }
                None => None,
            },
            k_k: H::vector(k_k)?,
            k_a: H::vector(k_a)?,
            r_k: H::vector(r_k)?,
        },
    };
    let mix = TimeMix {
        shape: mix.shape,
        r: &*H::on(parent, mix.r)?,
        k: H::change(parent, mix.k)?,
        v: H::change(parent, mix.v)?,
        recurrence,
        finish,
    };
    H::backend(parent)?.time_mix(stage, mix, own, H::fill(out))
}
