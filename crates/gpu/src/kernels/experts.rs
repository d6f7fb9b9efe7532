//! Mixtures of experts: which experts a row is sent to, and what their outputs come to. Their products are
//! [`linear::multiply_routed`](super::linear::multiply_routed).

use super::{Rows, fold};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{COMBINE, EXPERT_BIAS, ROUTE, params};
use crate::{GpuError, Recorder};

/// The experts of each row, best first. A *route* is a row and one of its experts: number `t · n_used + j` is
/// that of row `t` to its expert `j`.
#[derive(Debug, Clone, Copy)]
pub struct Routes<'a> {
    /// The expert of each route, as `u32`.
    pub experts: &'a Buffer,
    /// The weight of what it gives.
    pub weights: &'a Buffer,
    /// Rows.
    pub n_rows: usize,
    /// Experts of a row.
    pub n_used: usize,
}

impl Routes<'_> {
    /// The number of routes.
    pub fn len(&self) -> usize {
        self.n_rows * self.n_used
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Errors unless the buffers have room for all routes, which 32-bit indices reach.
    pub(super) fn check(&self) -> Result<(), GpuError> {
        let len = self.n_rows.saturating_mul(self.n_used);
        for buffer in [self.experts, self.weights] {
            let most = (buffer.bytes() / 4).min(u64::from(u32::MAX));
            expect_most("routes", most as usize, len)?;
        }
        Ok(())
    }
}

params! {
    RouteParams {
        n_rows: u32,
        n_experts: u32,
        n_used: u32,
        renormalised: u32,
        scores_offset: u32,
        scores_stride: u32,
        n_groups: u32,
        n_used_groups: u32,
        scale: f32,
    }
}

/// The most experts that kernels choose from.
pub const MAX_EXPERTS: usize = 1024;

/// How experts are chosen and their weights made, as `sterna_kernels::experts::Routing`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Whether weights are sigmoids of scores, not their softmax.
    pub is_sigmoid: bool,
    /// Whether the weights of chosen experts are divided by their sum.
    pub renormalised: bool,
    /// Groups of adjacent experts, and how many of them a row is sent to.
    pub groups: Option<(usize, usize)>,
    /// Factor on the weights.
    pub scale: f32,
}

/// Chooses the experts of each row of `scores`, `[n_rows, n_experts]`, and by `bias`, `[n_experts]`, which sigmoids are
/// added to for that.
///
/// Errors: [`GpuError::Shape`] if there are fewer experts than a row is sent to, other numbers of rows, or groups that
/// don't divide the experts; [`GpuError::Unsupported`] beyond [`MAX_EXPERTS`].
/// Exactness: the experts of `sterna_kernels::experts`, but for sigmoids and sums that differ in the last places; their
/// weights differ in a few last places.
pub fn route(
    recorder: &mut Recorder,
    scores: Rows<'_>,
    bias: Option<&Buffer>,
    routing: &Routing,
    routes: Routes<'_>,
) -> Result<(), GpuError> {
    if scores.width > MAX_EXPERTS {
        return Err(GpuError::Unsupported {
            what: format!("{} experts", scores.width),
            reason: format!("kernels take at most {MAX_EXPERTS}"),
        });
    }
    let (n_groups, n_used_groups) = routing.groups.unwrap_or((1, 1));
    let in_groups = scores.width / n_groups.max(1) * n_groups;
    expect("routes: experts in groups", scores.width, in_groups)?;
    expect_most("routes: groups of a row", n_groups, n_used_groups)?;
    if let Some(bias) = bias {
        expect_most("routes: bias", (bias.bytes() / 4) as usize, scores.width)?;
    }
    scores.check("routes: scores")?;
    routes.check()?;
    expect("routes: rows of scores", routes.n_rows, scores.n_rows)?;
    expect_most("routes: experts of a row", scores.width, routes.n_used)?;
    let most = recorder.device().limits().workgroup_len.clamp(64, 256);
    let workgroup = scores.width.next_power_of_two().clamp(64, most as usize);
    let params = RouteParams {
        n_rows: scores.n_rows as u32,
        n_experts: scores.width as u32,
        n_used: routes.n_used as u32,
        renormalised: u32::from(routing.renormalised),
        scores_offset: scores.offset as u32,
        scores_stride: scores.stride as u32,
        n_groups: n_groups as u32,
        n_used_groups: n_used_groups as u32,
        scale: routing.scale,
    };
    let constants = [
        ("WG", workgroup as f64),
        ("LANES", 8.0),
        ("SIGMOID", f64::from(u8::from(routing.is_sigmoid))),
        ("BIAS", f64::from(u8::from(bias.is_some()))),
    ];
    let nothing = recorder.device().nothing()?;
    let bindings = [
        scores.buffer.into(),
        bias.unwrap_or(&nothing).into(),
        routes.experts.into(),
        routes.weights.into(),
    ];
    let grid = fold(scores.n_rows);
    recorder.dispatch(&ROUTE, &constants, &bindings, &params, grid)
}

params! {
    CombineExpertsParams {
        width: u32,
        len: u32,
        n_used: u32,
        y_offset: u32,
        y_stride: u32,
        out_offset: u32,
        out_stride: u32,
    }
}

/// `out[t] ← Σ weight(r) · y[r]` over the routes `r` of row `t`; added to `out[t]` if it `adds`. `y` has a row
/// for each route.
///
/// Errors: [`GpuError::Shape`] if shapes don't match, or `y` and `out` are in one buffer.
/// Exactness: that of `sterna_kernels::experts`, except for products that a device fuses with sums.
pub fn combine(
    recorder: &mut Recorder,
    routes: Routes<'_>,
    y: Rows<'_>,
    adds: bool,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    routes.check()?;
    y.check("combine: what experts give")?;
    out.check("combine: output")?;
    expect("combine: rows of experts", routes.len(), y.n_rows)?;
    expect("combine: rows", routes.n_rows, out.n_rows)?;
    expect("combine: width", y.width, out.width)?;
    expect(
        "combine: operands that are one buffer",
        0,
        usize::from(y.buffer == out.buffer),
    )?;
    let len = out.n_rows * out.width;
    let params = CombineExpertsParams {
        width: out.width as u32,
        len: len as u32,
        n_used: routes.n_used as u32,
        y_offset: y.offset as u32,
        y_stride: y.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
    };
    let bindings = [y.buffer.into(), routes.weights.into(), out.buffer.into()];
    let grid = fold(len.div_ceil(256));
    let constants = [("ADD", f64::from(u8::from(adds)))];
    recorder.dispatch(&COMBINE, &constants, &bindings, &params, grid)
}

params! {
    ExpertBiasParams {
        width: u32,
        len: u32,
        x_offset: u32,
        x_stride: u32,
    }
}

/// `x[r] ← x[r] + bias[expert(r)]` for every route `r`. `bias` is `[n_experts, width]`.
///
/// Errors: [`GpuError::Shape`] if `x` hasn't a row for each route, or not even one expert's
/// biases are there.
/// Exactness: that of `sterna_kernels::experts`.
pub fn add_bias(
    recorder: &mut Recorder,
    routes: Routes<'_>,
    x: Rows<'_>,
    bias: &Buffer,
) -> Result<(), GpuError> {
    routes.check()?;
    x.check("expert bias: what experts give")?;
    expect("expert bias: rows of experts", routes.len(), x.n_rows)?;
    let n_biases = (bias.bytes() / 4) as usize;
    expect_most("expert bias: width", n_biases, x.width)?;
    let len = x.n_rows * x.width;
    let params = ExpertBiasParams {
        width: x.width as u32,
        len: len as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
    };
    let bindings = [x.buffer.into(), routes.experts.into(), bias.into()];
    let grid = fold(len.div_ceil(256));
    recorder.dispatch(&EXPERT_BIAS, &[], &bindings, &params, grid)
}
