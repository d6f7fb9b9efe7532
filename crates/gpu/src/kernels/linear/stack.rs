//! The matrices of a mixture's experts, and their products with the rows that are sent to them.

use sterna_format::DType;

use super::dispatch::{
    COOP_FEW_TILE, GemvShape, LinearParams, Source, by_matrix_units, can_round_rows, constants_of,
    in_vectors, linear_params, pays_to_round_for_experts, rounding, unsupported,
};
use super::planes::Planes;
use super::{Epilogue, Form, Input, Linear, WeightKind, check_norm, most_bytes};
use crate::error::{expect, expect_most};
use crate::kernels::Rows;
use crate::kernels::experts::{MAX_EXPERTS, Routes, Routing};
use crate::kernels::quantize::{QuantizedRows, quantize};
use crate::memory::Buffer;
use crate::record::Binding;
use crate::shader::{self, Shader, params};
use crate::tuning::RowClass;
use crate::{Device, GpuError, Recorder};

/// Matrices `[n, k]` of one kind, one for each expert. Two stacks are equal if they are the same memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Stack {
    n: usize,
    k: usize,
    kind: WeightKind,
    n_experts: usize,
    /// Rows before the matrix of a piece's first expert.
    begin: usize,
    /// Rows from the matrix of one expert to that of the next.
    stride: usize,
    /// Some experts each: one, unless a kernel's binding would exceed the device's limit.
    pieces: Vec<Piece>,
}

/// The matrices of some experts.
#[derive(Debug, Clone, PartialEq)]
struct Piece {
    first: usize,
    n_experts: usize,
    /// In one piece.
    rows: Linear,
}

impl Stack {
    /// Copies `sets`, each of one matrix for every expert, to common memory, those of an expert next to one
    /// another. Returns a stack for each set, which all have the same pieces.
    ///
    /// Errors: [`GpuError::OutOfMemory`], as both copies exist for a moment; [`GpuError::Shape`] if the sets
    /// differ in their number of experts, or a set in its shapes; [`GpuError::Unsupported`] if kinds or widths
    /// differ, the matrices of one expert exceed the device's binding size, or a matrix isn't whole words.
    pub fn join(device: &Device, sets: &[&[&Linear]]) -> Result<Vec<Stack>, GpuError> {
        let refuse = |reason: &str| {
            Err(GpuError::Unsupported {
                what: "matrices of experts".into(),
                reason: reason.into(),
            })
        };
        let Some(&&Linear { k, kind, .. }) = sets.first().and_then(|set| set.first()) else {
            return Ok(Vec::new());
        };
        let n_experts = sets[0].len();
        let mut heights = Vec::with_capacity(sets.len());
        for set in sets {
            expect("experts: matrices", n_experts, set.len())?;
            let n = set[0].n;
            for matrix in *set {
                expect("experts: rows of a matrix", n, matrix.n)?;
                if (matrix.k, matrix.kind) != (k, kind) {
                    return refuse("expected the same type and width for all experts");
                }
            }
            heights.push(n);
        }
        let stride: usize = heights.iter().sum();
        let Some(planes) = Planes::of(kind) else {
            return refuse("there are no kernels for their type");
        };
        let bytes = (stride * planes.row_bytes(k)).max(1);
        let at_once = most_bytes(device) / bytes;
        if at_once == 0 {
            return refuse("those of one expert exceed what a kernel can bind");
        }
        let mut pieces = Vec::with_capacity(n_experts.div_ceil(at_once));
        for first in (0..n_experts).step_by(at_once) {
            let n_experts = at_once.min(n_experts - first);
            let parts: Vec<&Linear> = (first..first + n_experts)
                .flat_map(|expert| sets.iter().map(move |set| set[expert]))
                .collect();
            let Some(rows) = Linear::join(device, &parts)? else {
                return refuse("expected matrices in one piece, of whole words");
            };
            pieces.push(Piece {
                first,
                n_experts,
                rows,
            });
        }
        let mut begin = 0;
        let stack = |n| {
            let stack = Stack {
                n,
                k,
                kind,
                n_experts,
                begin,
                stride,
                pieces: pieces.clone(),
            };
            begin += n;
            stack
        };
        Ok(heights.into_iter().map(stack).collect())
    }

    /// Those of this stack and of `next` as one, if they are adjacent.
    pub fn with(&self, next: &Stack) -> Option<Stack> {
        let adjacent = self.begin + self.n == next.begin && self.pieces == next.pieces;
        adjacent.then(|| Stack {
            n: self.n + next.n,
            ..self.clone()
        })
    }

    /// The matrix of `expert`, in the same memory.
    pub fn matrix(&self, expert: usize) -> Option<Linear> {
        let holds = |piece: &&Piece| (piece.first..piece.first + piece.n_experts).contains(&expert);
        let piece = self.pieces.iter().find(holds)?;
        let first = self.begin + (expert - piece.first) * self.stride;
        piece.rows.rows(first..first + self.n)
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The kind of the weights.
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// Experts.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// The number of pieces: dispatches per product.
    pub fn n_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// The shape of the matrix of one expert, without its memory: products are launched as of one row with that.
    fn one(&self) -> Linear {
        Linear {
            n: self.n,
            k: self.k,
            kind: self.kind,
            pieces: Vec::new(),
        }
    }

    /// Parameters of all products, but those of their input and of a piece.
    fn params(&self, out: Rows<'_>) -> LinearParams {
        LinearParams {
            n: self.n as u32,
            m: out.n_rows as u32,
            out_offset: out.offset as u32,
            out_stride: out.stride as u32,
            ..linear_params(&self.one())
        }
    }

    /// Constants of all products, but those of a piece. `per_row` routes share a row of the input.
    fn constants(&self, epilogue: Epilogue, per_row: usize) -> Vec<(&'static str, f64)> {
        let mut constants = epilogue.constants().to_vec();
        constants.extend(constants_of(self.kind));
        constants.extend([
            ("ROUTES_PER_ROW", per_row.max(1) as f64),
            ("EXPERT_STRIDE", self.stride as f64),
        ]);
        constants
    }

    /// The rows of each piece, how many of them come before the matrix of its first expert, and its constants.
    fn pieces(&self) -> impl Iterator<Item = (&super::Piece, u32, [(&'static str, f64); 2])> {
        self.pieces.iter().filter_map(|piece| {
            let of_piece = [
                ("EXPERTS", piece.n_experts as f64),
                ("FIRST_EXPERT", piece.first as f64),
            ];
            // Stacks are in one piece each.
            let rows = piece.rows.pieces.first()?;
            Some((rows, (rows.begin + self.begin) as u32, of_piece))
        })
    }

    /// Whether workgroups quantize the rows `x` that they read: if their layout and the device's memory permit, with
    /// `others` bytes besides, and if it pays.
    fn rounds_itself(&self, recorder: &Recorder, x: &Rows<'_>, others: usize) -> bool {
        let one = self.one();
        let config = recorder.tuning().config(&one.product(1));
        pays_to_round_for_experts(config, &one) && can_round_rows(recorder, self.k, x, 1, others)
    }
}

/// The kernels for routes: of inputs that are quantized or stay floats; those that quantize it themselves; those that also
/// choose the experts of their row. All are the same for floats.
fn kernels(kind: WeightKind, source: &Source<'_>) -> Result<[&'static Shader; 3], GpuError> {
    let floats = |vectors, elements| match in_vectors(source) {
        true => [vectors; 3],
        false => [elements; 3],
    };
    Ok(match kind {
        WeightKind::Ternary => [
            &shader::EXPERTS_TERNARY,
            &shader::EXPERTS_TERNARY_ROUNDING,
            &shader::EXPERTS_TERNARY_CHOOSING,
        ],
        WeightKind::Blocks(dtype) => match dtype {
            DType::Q8_0 => [
                &shader::EXPERTS_Q8_0,
                &shader::EXPERTS_Q8_0_ROUNDING,
                &shader::EXPERTS_Q8_0_CHOOSING,
            ],
            DType::Q4_0 => [
                &shader::EXPERTS_Q4_0,
                &shader::EXPERTS_Q4_0_ROUNDING,
                &shader::EXPERTS_Q4_0_CHOOSING,
            ],
            DType::Q4_K => [
                &shader::EXPERTS_Q4_K,
                &shader::EXPERTS_Q4_K_ROUNDING,
                &shader::EXPERTS_Q4_K_CHOOSING,
            ],
            DType::Q6_K => [
                &shader::EXPERTS_Q6_K,
                &shader::EXPERTS_Q6_K_ROUNDING,
                &shader::EXPERTS_Q6_K_CHOOSING,
            ],
            DType::Q1_0 => [
                &shader::EXPERTS_Q1_0,
                &shader::EXPERTS_Q1_0_ROUNDING,
                &shader::EXPERTS_Q1_0_CHOOSING,
            ],
            DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => [
                &shader::EXPERTS_Q2_0,
                &shader::EXPERTS_Q2_0_ROUNDING,
                &shader::EXPERTS_Q2_0_CHOOSING,
            ],
            DType::F32 => floats(&shader::EXPERTS_F32, &shader::EXPERTS_F32_ELEMENTS),
            DType::F16 => floats(&shader::EXPERTS_F16, &shader::EXPERTS_F16_ELEMENTS),
            DType::BF16 => floats(&shader::EXPERTS_BF16, &shader::EXPERTS_BF16_ELEMENTS),
            _ => return Err(unsupported(dtype)),
        },
    })
}

/// `out[r] ← x[r] · wᵀ` for every route `r`, with the matrix `w` of its expert, or what `epilogue` says, which
/// isn't a sum.
///
/// `x` has a row for each route, or `per_row` routes share one: those of a row of a batch. Few routes read the matrix each
/// for itself, like a single row of [`multiply`](super::multiply); many are grouped by their expert, where there are matrix
/// units. The output of a route to an expert that isn't in the stack is unchanged.
///
/// Rows of [`Input::Round`] are quantized by every workgroup that reads them, where that pays, and are few.
///
/// Errors: as [`multiply`](super::multiply), and [`GpuError::Unsupported`] for [`Epilogue::Add`].
/// Exactness: that of [`multiply`](super::multiply).
pub fn multiply_routed(
    recorder: &mut Recorder,
    w: &Stack,
    x: Input<'_>,
    routes: Routes<'_>,
    per_row: usize,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    record(recorder, w, x, (routes, None), per_row, epilogue, out)
}

/// Scores of the experts of one row, `[n_experts]`, and how they are chosen by them.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// The scores.
    pub scores: Rows<'a>,
    /// What becomes of them.
    pub routing: &'a Routing,
}

/// Whether [`choose_and_multiply`] can: for one row, scores alone, and weights whose kernels quantize the row.
pub fn can_choose(recorder: &Recorder, w: &Stack, x: Rows<'_>, routing: &Routing) -> bool {
    let is_rounded = matches!(w.kind.form(), Form::Int8(_));
    let is_plain = routing.groups.is_none() && w.n_experts <= MAX_CHOSEN;
    let words = 2 * w.n_experts + 2;
    x.n_rows == 1 && is_rounded && is_plain && w.rounds_itself(recorder, &x, 4 * words)
}

/// The most experts that products choose from: each workgroup compares all.
const MAX_CHOSEN: usize = 256;

/// [`route`](crate::kernels::experts::route) of one row and [`multiply_routed`] for its routes: each workgroup finds its
/// expert for itself, and `routes` are stored for what comes later.
///
/// Errors: those of both; [`GpuError::Unsupported`] if not [`can_choose`].
/// Exactness: that of both.
pub fn choose_and_multiply(
    recorder: &mut Recorder,
    w: &Stack,
    (x, norm): (Rows<'_>, Option<(&Buffer, f32)>),
    choice: Choice<'_>,
    routes: Routes<'_>,
    (epilogue, scratch): (Epilogue, &QuantizedRows),
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Choice { scores, routing } = choice;
    if !can_choose(recorder, w, x, routing) {
        return Err(GpuError::Unsupported {
            what: "a product that chooses experts".into(),
            reason: "it takes one row that it can quantize, and scores alone".into(),
        });
    }
    scores.check("experts: scores")?;
    expect("experts: scores", w.n_experts, scores.width)?;
    expect("experts: rows of scores", 1, scores.n_rows)?;
    expect("experts: rows of routes", 1, routes.n_rows)?;
    expect_most("experts: experts of a row", w.n_experts, routes.n_used)?;
    let input = Input::Round { x, norm, scratch };
    let routes = (routes, Some(choice));
    record(recorder, w, input, routes, routes.0.n_used, epilogue, out)
}

fn record(
    recorder: &mut Recorder,
    w: &Stack,
    x: Input<'_>,
    (routes, choice): (Routes<'_>, Option<Choice<'_>>),
    per_row: usize,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    routes.check()?;
    out.check("experts: output")?;
    expect("experts: rows of the output", routes.len(), out.n_rows)?;
    expect(
        "experts: width of the output",
        epilogue.width(w.n),
        out.width,
    )?;
    if let Epilogue::Gate(_) = epilogue {
        expect("gated experts: rows", w.n.next_multiple_of(2), w.n)?;
    }
    let n_rows = out.n_rows.div_ceil(per_row.max(1));
    let check = |x: &Rows<'_>| {
        x.check("experts: input")?;
        expect("experts: width of the input", w.k, x.width)?;
        expect("experts: rows of the input", n_rows, x.n_rows)
    };
    let source = match (w.kind.form(), x) {
        (Form::Int8(_), Input::Int8(x)) => {
            x.expect_room(n_rows, w.k)?;
            Source::Stored(x)
        }
        (Form::Float, Input::Float(x) | Input::Half { x, .. }) => {
            check(&x)?;
            Source::Floats(x, None)
        }
        (Form::Float, Input::Normed(x, norm)) => {
            check(&x)?;
            check_norm(norm, w.k)?;
            Source::Floats(x, Some(norm))
        }
        (Form::Int8(scaling), Input::Round { x, norm, scratch }) => {
            check(&x)?;
            if let Some(norm) = norm {
                check_norm(norm, w.k)?;
            }
            if w.rounds_itself(recorder, &x, 0) {
                Source::Own { x, norm, scaling }
            } else {
                quantize(recorder, x, norm, scaling, scratch)?;
                Source::Stored(scratch)
            }
        }
        (form, _) => {
            return Err(GpuError::Unsupported {
                what: format!("{:?} weights with activations of another form", w.kind),
                reason: format!("they take {form:?}"),
            });
        }
    };
    if epilogue == Epilogue::Add {
        return Err(GpuError::Unsupported {
            what: "products of experts that are added".into(),
            reason: "their outputs have weights".into(),
        });
    }
    if let Source::Stored(x) = source
        && let Some(grouping) = Grouping::of(recorder, w, routes, x)
    {
        return grouping.record(recorder, w, (x, per_row), routes, epilogue, out);
    }
    let own = matches!(source, Source::Own { .. });
    let [stored, rounds, chooses] = kernels(w.kind, &source)?;
    let shader = match (own, choice) {
        (true, Some(_)) => chooses,
        (true, None) => rounds,
        (false, _) => stored,
    };
    let one = w.one();
    let config = recorder.tuning().config(&one.product(1));
    let limits = recorder.device().limits();
    // Those that quantize their input are as few for all routes as they would be for one product.
    let all = Linear {
        n: if own { w.n * out.n_rows } else { w.n },
        ..one.clone()
    };
    let shape = GemvShape::of(limits, config, &all, 1, own);
    let (grid, most) = (w.n.div_ceil(shape.rows()), limits.grid as usize);
    expect_most("experts: workgroups of a matrix", most, grid)?;
    let mut params = w.params(out);
    let nothing = recorder.device().nothing()?;
    let mut constants = w.constants(epilogue, per_row);
    let mut inputs: Vec<Binding<'_>> = Vec::with_capacity(2);
    let mut norms: Option<Binding<'_>> = None;
    match source {
        Source::Stored(x) => inputs.extend([Binding::from(&x.q), Binding::from(&x.steps)]),
        Source::Halves(_) => unreachable!("experts' rows of floats are read as they are"),
        Source::Floats(x, norm) | Source::Own { x, norm, .. } => {
            (params.x_offset, params.x_stride) = (x.offset as u32, x.stride as u32);
            params.eps = norm.map_or(0.0, |(_, eps)| eps);
            let weight = Binding::from(norm.map_or(&nothing, |(weight, _)| weight));
            inputs.push(x.buffer.into());
            if let Source::Own { scaling, .. } = source {
                inputs.push(weight);
                constants.extend(rounding(scaling, norm.is_some(), w.k, 1, shape));
            } else {
                norms = Some(weight);
                constants.push(("NORM", f64::from(u8::from(norm.is_some()))));
            }
        }
    }
    constants.extend([
        ("TOKENS", 1.0),
        ("WG", f64::from(shape.workgroup)),
        ("LANES", f64::from(shape.lanes)),
    ]);
    if let Some(Choice { scores, routing }) = choice {
        constants.extend([
            ("N_EXPERTS", w.n_experts as f64),
            ("SCORES_AT", scores.offset as f64),
            ("SIGMOID", f64::from(u8::from(routing.is_sigmoid))),
            ("RENORMALISED", f64::from(u8::from(routing.renormalised))),
            ("ROUTE_SCALE", f64::from(routing.scale)),
        ]);
    }
    for (rows, begin, of_piece) in w.pieces() {
        let constants = [&constants[..], &of_piece].concat();
        params.begin = begin;
        let mut bindings = vec![(&rows.codes).into(), (&rows.scales).into()];
        bindings.extend_from_slice(&inputs);
        bindings.push(out.buffer.into());
        bindings.extend(norms);
        bindings.extend(choice.map(|choice| Binding::from(choice.scores.buffer)));
        bindings.push(routes.experts.into());
        bindings.extend(choice.map(|_| Binding::from(routes.weights)));
        for first in (0..out.n_rows).step_by(most) {
            params.token = first as u32;
            let grid = [grid as u32, most.min(out.n_rows - first) as u32];
            recorder.dispatch(shader, &constants, &bindings, &params, grid)?;
        }
    }
    Ok(())
}

params! {
    GroupRoutesParams {
        n_routes: u32,
        n_experts: u32,
        n_tiles: u32,
    }
}

/// How products are computed by cooperative matrices: each matrix by all rows that its expert is sent.
struct Grouping {
    shader: &'static Shader,
    /// Routes of a tile.
    tokens: usize,
    /// Tiles at most: the routes to an expert fill all but one of its own.
    n_tiles: usize,
}

impl Grouping {
    /// `None` where they can't be used, or experts are sent too few rows for it to pay.
    fn of(
        recorder: &Recorder,
        w: &Stack,
        routes: Routes<'_>,
        x: &QuantizedRows,
    ) -> Option<Grouping> {
        let one = w.one();
        let device = recorder.device();
        let config = recorder.tuning().config(&one.product(routes.n_rows));
        let n_routes = routes.len();
        let many = RowClass::of(routes.n_rows) == RowClass::Many && n_routes >= 2 * w.n_experts;
        if !many || !by_matrix_units(device, config, &one) {
            return None;
        }
        let shader = match w.kind {
            WeightKind::Ternary => &shader::EXPERTS_TERNARY_COOP,
            WeightKind::Blocks(dtype) => match dtype {
                DType::Q8_0 => &shader::EXPERTS_Q8_0_COOP,
                DType::Q4_0 => &shader::EXPERTS_Q4_0_COOP,
                DType::Q4_K => &shader::EXPERTS_Q4_K_COOP,
                DType::Q6_K => &shader::EXPERTS_Q6_K_COOP,
                DType::Q1_0 => &shader::EXPERTS_Q1_0_COOP,
                DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => &shader::EXPERTS_Q2_0_COOP,
                _ => return None,
            },
        };
        let tokens = match n_routes / w.n_experts.max(1) {
            ..=40 => COOP_FEW_TILE / 2,
            _ => COOP_FEW_TILE,
        };
        let n_tiles = n_routes / tokens + w.n_experts.min(n_routes);
        let bytes = 4 * (3 * n_tiles + n_routes) as u64;
        let fits = w.n_experts <= MAX_EXPERTS
            && n_tiles <= device.limits().grid as usize
            && bytes <= x.scratch.bytes();
        fits.then_some(Grouping {
            shader,
            tokens,
            n_tiles,
        })
    }

    /// Records the grouping and the products. `per_row` routes share a row of `x`.
    fn record(
        &self,
        recorder: &mut Recorder,
        w: &Stack,
        (x, per_row): (&QuantizedRows, usize),
        routes: Routes<'_>,
        epilogue: Epilogue,
        out: Rows<'_>,
    ) -> Result<(), GpuError> {
        let tokens = ("TOKENS", self.tokens as f64);
        let groups = Binding::from(&x.scratch);
        let params = GroupRoutesParams {
            n_routes: routes.len() as u32,
            n_experts: w.n_experts as u32,
            n_tiles: self.n_tiles as u32,
        };
        let bindings = [routes.experts.into(), groups];
        recorder.dispatch(&shader::GROUP_ROUTES, &[tokens], &bindings, &params, [1, 1])?;
        let mut params = LinearParams {
            parts: self.n_tiles as u32,
            ..w.params(out)
        };
        let mut constants = w.constants(epilogue, per_row);
        constants.push(tokens);
        for (rows, begin, of_piece) in w.pieces() {
            params.begin = begin;
            let bindings = [
                (&rows.codes).into(),
                (&rows.scales).into(),
                (&x.halves).into(),
                (&x.steps).into(),
                out.buffer.into(),
                groups,
            ];
            let grid = [w.n.div_ceil(COOP_FEW_TILE) as u32, self.n_tiles as u32];
            let constants = [&constants[..], &of_piece].concat();
            recorder.dispatch(self.shader, &constants, &bindings, &params, grid)?;
        }
        Ok(())
    }
}
