//! Mixtures of experts against the CPU.

use crate::common::{
    Random, device, devices, emulated, floats, nmse, run, scalar, spread, spread_rows,
};
use sterna_format::DType;
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::Activation;
use sterna_gpu::kernels::experts::{self as experts_on_gpu, Routes, add_bias, combine, route};
use sterna_gpu::kernels::linear::{
    Choice, Epilogue, Form, Input, Linear, Stack, WeightKind, can_choose, choose_and_multiply,
    multiply_routed,
};
use sterna_gpu::kernels::norm::rms_norm;
use sterna_gpu::kernels::quantize::{QuantizedRows, quantize};
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::{Device, DeviceOptions, GpuError, Recorder};
use sterna_kernels::activation;
use sterna_kernels::experts::{self, ExpertGroups, Gating, Routing};
use sterna_kernels::gemm::{BlockMatrix, Matrix, Rounding, Scratch, TernaryMatrix, linear};
use sterna_kernels::quant::{encode_row, ternary};

/// Room for the routes of `m` rows.
fn buffers(device: &Device, m: usize, n_used: usize) -> (Buffer, Buffer) {
    let bytes = (m * n_used * 4) as u64;
    let experts = device.buffer("experts", bytes).unwrap();
    (experts, device.buffer("weights", bytes).unwrap())
}

/// The experts of a row and their weights, ascending by expert, as the CPU chooses them.
fn chosen(routing: &Routing, scores: &[f32], bias: Option<&[f32]>) -> Vec<(u32, f32)> {
    let mut routes = experts::Routes::default();
    routes.choose(routing, scores, bias).unwrap();
    // Of each route a unit vector: their sum is all weights, in the order of routes.
    let n = routing.n_used;
    let units: Vec<f32> = (0..n * n).map(|i| f32::from(i % n == i / n)).collect();
    let mut weights = vec![0.0; n];
    (routes.combine(&scalar(), n, &units, &mut weights)).unwrap();
    let experts = routes.experts().map(|(expert, _)| expert as u32);
    experts.zip(weights).collect()
}

/// As kernels take it.
fn on_gpu(routing: &Routing) -> experts_on_gpu::Routing {
    experts_on_gpu::Routing {
        is_sigmoid: routing.gating == Gating::Sigmoid,
        renormalised: routing.renormalised,
        groups: routing
            .groups
            .map(|groups| (groups.n_groups, groups.n_used)),
        scale: routing.scale,
    }
}

fn check_route(device: &Device, routing: &Routing, scores: &[f32], bias: Option<&[f32]>) {
    let Routing {
        n_experts, n_used, ..
    } = *routing;
    let m = scores.len() / n_experts;
    let (offset, stride) = (3, n_experts + 2);
    let buffer = spread(device, scores, n_experts, offset, stride);
    let (ids, weights) = buffers(device, m, n_used);
    let of_experts = bias.map(|bias| device.upload(bias).unwrap());
    let routes = Routes {
        experts: &ids,
        weights: &weights,
        n_rows: m,
        n_used,
    };
    let weights = run(device, &weights, m * n_used, |r| {
        let scores = spread_rows(&buffer, m, n_experts, offset, stride);
        route(r, scores, of_experts.as_ref(), &on_gpu(routing), routes)
    });
    let ids: Vec<u32> = device.read(&ids, 0..m * n_used).unwrap();
    for (t, row) in scores.chunks(n_experts).enumerate() {
        let own = t * n_used..(t + 1) * n_used;
        let got = ids[own.clone()].iter().zip(&weights[own]);
        let got: Vec<(u32, f32)> = got.map(|(id, weight)| (*id, *weight)).collect();
        let what = format!("{routing:?} {:?} {row:?}", device.features().names());
        // Best first; of equal scores the lower expert. Zeros have signs.
        let by_scores = bias.is_none() && routing.groups.is_none();
        for pair in got.windows(2).filter(|_| by_scores) {
            let [a, b] = [pair[0].0, pair[1].0].map(|id| row[id as usize]);
            if !a.is_nan() && !b.is_nan() {
                let order = b.total_cmp(&a).then(pair[0].0.cmp(&pair[1].0));
                assert!(order.is_lt(), "{what}: {got:?}");
            }
        }
        let mut got = got;
        got.sort_by_key(|(id, _)| *id);
        let want = chosen(routing, row, bias);
        let ids = |routes: &[(u32, f32)]| routes.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!(ids(&got), ids(&want), "{what}");
        for ((_, got), (_, want)) in got.iter().zip(&want) {
            let close = (got - want).abs() <= 4e-6 * want.abs();
            assert!(
                close || got.is_nan() && want.is_nan(),
                "{what}: {got} {want}"
            );
        }
    }
}

#[test]
fn biases_are_those_of_each_routes_expert() {
    for device in devices() {
        let (m, n_experts, n_used, width) = (5, 4, 2, 70);
        let chosen: Vec<u32> = (0..m * n_used)
            .map(|r| (r * 3 % n_experts) as u32)
            .collect();
        let (_, weights) = buffers(device, m, n_used);
        let routes = Routes {
            experts: &device.upload(&chosen).unwrap(),
            weights: &weights,
            n_rows: m,
            n_used,
        };
        let (x, bias) = (floats(m * n_used * width, 1), floats(n_experts * width, 2));
        let given = spread(device, &x, width, 3, width + 1);
        let of_experts = device.upload(&bias).unwrap();
        let rows = spread_rows(&given, m * n_used, width, 3, width + 1);
        let got = run(device, &given, 3 + m * n_used * (width + 1), |r| {
            add_bias(r, routes, rows, &of_experts)
        });
        for (r, &expert) in chosen.iter().enumerate() {
            for i in 0..width {
                let want = x[r * width + i] + bias[expert as usize * width + i];
                assert_eq!(got[3 + r * (width + 1) + i], want);
            }
        }
        let mut recorder = Recorder::new(device);
        let fewer = Rows { n_rows: 1, ..rows };
        assert!(add_bias(&mut recorder, routes, fewer, &of_experts).is_err());
        let short = device.upload(&bias[..width - 8]).unwrap();
        assert!(add_bias(&mut recorder, routes, rows, &short).is_err());
    }
}

#[test]
fn the_experts_are_those_of_the_cpu() {
    for device in devices() {
        for (m, n_experts, n_used) in [
            (1, 1, 1),
            (3, 4, 4),
            (5, 8, 2),
            (2, 60, 4),
            (7, 128, 8),
            (2, 300, 17),
            (1, 512, 10),
        ] {
            for renormalised in [true, false] {
                let routing = Routing {
                    gating: Gating::Softmax,
                    n_experts,
                    n_used,
                    renormalised,
                    groups: None,
                    scale: 1.0,
                };
                let mut scores = floats(m * n_experts, 3);
                check_route(device, &routing, &scores, None);
                // Larger ones, and many ties.
                scores
                    .iter_mut()
                    .for_each(|s| *s = (*s * 4.0).round() * 3.0);
                check_route(device, &routing, &scores, None);
            }
        }
    }
}

#[test]
fn groups_sigmoids_and_biases_choose_the_same() {
    for device in devices() {
        for (m, n_experts, n_used, groups) in [
            (3, 8, 2, None),
            (5, 32, 4, Some((4, 2))),
            (2, 256, 8, Some((8, 4))),
            (4, 6, 2, Some((6, 3))),
        ] {
            for (gating, has_bias) in [
                (Gating::Softmax, false),
                (Gating::Sigmoid, false),
                (Gating::Sigmoid, true),
            ] {
                for (renormalised, scale) in [(true, 2.5), (false, 1.0)] {
                    let routing = Routing {
                        gating,
                        n_experts,
                        n_used,
                        renormalised,
                        groups: groups.map(|(n_groups, n_used)| ExpertGroups { n_groups, n_used }),
                        scale,
                    };
                    let scores = floats(m * n_experts, 3);
                    let scores: Vec<f32> = scores.iter().map(|score| 4.0 * score).collect();
                    let bias = floats(n_experts, 4);
                    check_route(device, &routing, &scores, has_bias.then_some(&bias));
                }
            }
        }
    }
}

#[test]
fn odd_scores_choose_the_same() {
    for device in devices() {
        let routing = Routing {
            gating: Gating::Softmax,
            n_experts: 4,
            n_used: 2,
            renormalised: true,
            groups: None,
            scale: 1.0,
        };
        let (nan, infinite) = (f32::NAN, f32::INFINITY);
        let scores = [
            [nan, -5.0, 0.0, -infinite],
            [0.0, -0.0, -0.0, 0.0],
            [-0.0, 0.0, -1.0, nan],
            [-infinite, nan, -1e30, 1.0],
            [1e-45, 0.0, 2e-45, -1e-45],
            [90.0, -90.0, 89.0, 0.0],
        ];
        check_route(device, &routing, scores.as_flattened(), None);
    }
}

#[test]
fn outputs_are_weighted_sums() {
    for device in devices() {
        for (m, n_experts, n_used, width) in [(1, 4, 2, 7), (5, 8, 3, 300), (0, 4, 2, 8)] {
            let routing = Routing {
                gating: Gating::Softmax,
                n_experts,
                n_used,
                renormalised: true,
                groups: None,
                scale: 1.0,
            };
            let scores = floats(m * n_experts, 4);
            let y = floats(m * n_used * width, 5);
            let before = floats(m * width, 6);
            let (ids, weights) = buffers(device, m, n_used);
            let routes = Routes {
                experts: &ids,
                weights: &weights,
                n_rows: m,
                n_used,
            };
            let of_scores = device.upload(&scores).unwrap();
            let given = spread(device, &y, width, 1, width + 2);
            for adds in [false, true] {
                let out = spread(device, &before, width, 3, width + 1);
                let got = run(device, &out, 3 + m * (width + 1), |r| {
                    let scores = Rows::new(&of_scores, m, n_experts);
                    route(r, scores, None, &on_gpu(&routing), routes)?;
                    let given = spread_rows(&given, m * n_used, width, 1, width + 2);
                    let out = spread_rows(&out, m, width, 3, width + 1);
                    combine(r, routes, given, adds, out)
                });
                let ids: Vec<u32> = device.read(&ids, 0..m * n_used).unwrap();
                for t in 0..m {
                    // The CPU's routes are ordered by expert.
                    let mut order: Vec<usize> = (t * n_used..(t + 1) * n_used).collect();
                    order.sort_by_key(|route| ids[*route]);
                    let rows = order.iter().flat_map(|r| &y[r * width..(r + 1) * width]);
                    let rows: Vec<f32> = rows.copied().collect();
                    let mut cpu = experts::Routes::default();
                    let scores = &scores[t * n_experts..][..n_experts];
                    cpu.choose(&routing, scores, None).unwrap();
                    let mut want = vec![0.0; width];
                    cpu.combine(&scalar(), width, &rows, &mut want).unwrap();
                    if adds {
                        let before = &before[t * width..][..width];
                        want.iter_mut().zip(before).for_each(|(w, b)| *w += b);
                    }
                    let got = &got[3 + t * (width + 1)..][..width + 1];
                    assert!(nmse(&got[..width], &want) < 1e-12);
                    assert_eq!(got[width], 7.5);
                }
            }
        }
    }
}

/// Weights of one expert.
struct Weights {
    kind: WeightKind,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl Weights {
    fn new(kind: WeightKind, n: usize, k: usize, seed: u64) -> Weights {
        let mut bytes = vec![0u8; n * kind.row_bytes(k)];
        let mut scales = Vec::new();
        match kind {
            WeightKind::Ternary => {
                let mut random = Random::new(seed);
                for row in bytes.chunks_mut(ternary::row_bytes(k)) {
                    for j in 0..k.next_multiple_of(128) {
                        let code = if j < k { random.below(3) as u8 } else { 1 };
                        row[j / 128 * 32 + j % 32] |= code << (6 - 2 * (j % 128 / 32));
                    }
                }
                scales = vec![0.5 + seed as f32; n];
            }
            WeightKind::Blocks(dtype) => {
                encode_row(dtype, &floats(n * k, seed), &mut bytes).unwrap();
            }
        }
        Weights {
            kind,
            n,
            k,
            bytes,
            scales,
        }
    }

    fn upload(&self, device: &Device) -> Linear {
        let mut upload = Upload::new(device, 1 << 14, 2).unwrap();
        let (size, scales) = ((self.n, self.k), &self.scales);
        Linear::upload(device, &mut upload, self.kind, size, scales, &self.bytes).unwrap()
    }

    /// The CPU's product with one row.
    fn times(&self, x: &[f32]) -> Vec<f32> {
        let (n, k, bytes) = (self.n, self.k, &self.bytes[..]);
        let matrix = match self.kind {
            WeightKind::Ternary => {
                Matrix::Ternary(TernaryMatrix::new(n, k, self.scales[0], bytes).unwrap())
            }
            WeightKind::Blocks(dtype) => {
                Matrix::Blocks(BlockMatrix::new(dtype, n, k, Rounding::Blocks, bytes).unwrap())
            }
        };
        let mut out = vec![0.0; n];
        let outputs = &mut [(matrix, &mut out[..])];
        linear(&scalar(), x, k, &mut Scratch::default(), outputs).unwrap();
        out
    }
}

const KINDS: [WeightKind; 12] = [
    WeightKind::Ternary,
    WeightKind::Blocks(DType::Q8_0),
    WeightKind::Blocks(DType::Q4_0),
    WeightKind::Blocks(DType::Q4_K),
    WeightKind::Blocks(DType::Q6_K),
    WeightKind::Blocks(DType::Q1_0),
    WeightKind::Blocks(DType::Q2_0),
    WeightKind::Blocks(DType::Q2_0_G128),
    WeightKind::Blocks(DType::PQ2_0),
    WeightKind::Blocks(DType::F32),
    WeightKind::Blocks(DType::F16),
    WeightKind::Blocks(DType::BF16),
];

struct Case {
    kind: WeightKind,
    n: usize,
    k: usize,
    n_experts: usize,
    n_rows: usize,
    n_used: usize,
    /// Whether the routes of a row share an input.
    shared: bool,
    gated: bool,
}

/// Returns the number of pieces.
fn check(device: &Device, case: &Case) -> usize {
    let Case {
        kind,
        n,
        k,
        n_experts,
        n_rows,
        n_used,
        shared,
        gated,
    } = *case;
    let of_set = |set: u64| -> Vec<Weights> {
        let seeds = (0..n_experts as u64).map(|expert| 2 * expert + set);
        seeds.map(|seed| Weights::new(kind, n, k, seed)).collect()
    };
    let (gate, up) = (of_set(0), of_set(1));
    let upload =
        |set: &[Weights]| -> Vec<Linear> { set.iter().map(|w| w.upload(device)).collect() };
    let (own, other) = (upload(&gate), upload(&up));
    let (own, other): (Vec<_>, Vec<_>) = (own.iter().collect(), other.iter().collect());
    let stacks = Stack::join(device, &[&own, &other]).unwrap();
    let n_routes = n_rows * n_used;
    // Each row has experts of its own, each once.
    let of_route = |r: usize| (r / n_used * 3 + r % n_used) % n_experts;
    let ids: Vec<u32> = (0..n_routes).map(|r| of_route(r) as u32).collect();
    let ids = device.upload(&ids).unwrap();
    let weights = device.upload(&vec![1.0f32; n_routes]).unwrap();
    let routes = Routes {
        experts: &ids,
        weights: &weights,
        n_rows,
        n_used,
    };
    let (m, per_row) = match shared {
        true => (n_rows, n_used),
        false => (n_routes, 1),
    };
    let x = floats(m * k, 9);
    // Vectors of floats, and others.
    let (x_offset, x_stride) = if n_rows == 3 {
        (1, k + 3)
    } else {
        (4, k + 4 - k % 4)
    };
    let buffer = spread(device, &x, k, x_offset, x_stride);
    let x_rows = spread_rows(&buffer, m, k, x_offset, x_stride);
    let rounded = QuantizedRows::new(device, m, k).unwrap();
    // Many routes are grouped by their expert, and go by matrix units, which round as in `blocks.rs`: of single rows the
    // errors, by chance, are up to twice those of many together.
    let by_units = device.has_matrix_units()
        && matches!(kind.form(), Form::Int8(_))
        && n_rows > 8
        && n_routes >= 2 * n_experts;
    for (stack, set) in stacks.iter().zip([&gate, &up]) {
        let product = |w: &Stack, epilogue: Epilogue| {
            let width = epilogue.width(w.n());
            let (offset, stride) = (2, width + 3);
            let out = spread(device, &vec![0.0; n_routes * width], width, offset, stride);
            let got = run(device, &out, offset + n_routes * stride, |r| {
                let input = match kind.form() {
                    Form::Int8(scaling) => {
                        quantize(r, x_rows, None, scaling, &rounded)?;
                        Input::Int8(&rounded)
                    }
                    Form::Float => Input::Float(x_rows),
                };
                let out = spread_rows(&out, n_routes, width, offset, stride);
                multiply_routed(r, w, input, routes, per_row, epilogue, out)
            });
            let rows = (0..n_routes).map(|r| {
                let row = &got[offset + r * stride..][..stride];
                assert_eq!(row[width..], [7.5; 3]);
                row[..width].to_vec()
            });
            rows.collect::<Vec<_>>()
        };
        let got = match gated {
            false => product(stack, Epilogue::Store),
            true => product(
                &stacks[0].with(&stacks[1]).unwrap(),
                Epilogue::Gate(Activation::Relu),
            ),
        };
        for (r, got) in got.iter().enumerate() {
            let x = &x[r / per_row * k..][..k];
            let mut want = set[of_route(r)].times(x);
            if gated {
                want = gate[of_route(r)].times(x);
                let up = up[of_route(r)].times(x);
                activation::gate(&scalar(), Activation::Relu, &mut want, &up).unwrap();
            }
            let what = format!("{kind:?} {n}x{k} route {r} {:?}", device.features().names());
            if kind == WeightKind::Ternary {
                assert_eq!(*got, want, "{what}");
            }
            // As `blocks.rs` bounds them.
            let power: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
            let usual = (n * k) as f64 / 9.0;
            let error = nmse(got, &want)
                * if power > 0.0 {
                    power / power.max(usual)
                } else {
                    1.0
                };
            let bound = match kind {
                _ if by_units => 1e-6,
                WeightKind::Blocks(DType::F16) => 2e-8,
                WeightKind::Blocks(DType::BF16) => 1e-10,
                _ => 1e-11,
            };
            let bound = if gated { 100.0 * bound } else { bound };
            assert!(error < bound, "{what}: {error:e}");
        }
    }
    // Rows that products prepare themselves, as they are and normalised, and prepared beforehand.
    let weight = device.upload(&floats(k, 11)).unwrap();
    let normed = device.buffer("normed", (m * k * 4) as u64).unwrap();
    let out = device.buffer("out", (n_routes * n * 4) as u64).unwrap();
    for norm in [None, Some((&weight, 1e-5))] {
        let product = |itself: bool| {
            run(device, &out, n_routes * n, |r| {
                let input = match (kind.form(), itself, norm) {
                    (Form::Int8(_), true, _) => Input::Round {
                        x: x_rows,
                        norm,
                        scratch: &rounded,
                    },
                    (Form::Int8(scaling), false, _) => {
                        quantize(r, x_rows, norm, scaling, &rounded)?;
                        Input::Int8(&rounded)
                    }
                    (Form::Float, true, Some(norm)) => Input::Normed(x_rows, norm),
                    (Form::Float, false, Some((weight, eps))) => {
                        rms_norm(r, x_rows, weight, eps, Rows::new(&normed, m, k))?;
                        Input::Float(Rows::new(&normed, m, k))
                    }
                    (Form::Float, _, None) => Input::Float(x_rows),
                };
                let out = Rows::new(&out, n_routes, n);
                multiply_routed(r, &stacks[0], input, routes, per_row, Epilogue::Store, out)
            })
        };
        let (got, want) = (product(true), product(false));
        // A code may differ after a norm.
        let bound = match (kind.form(), norm) {
            (Form::Int8(_), Some(_)) => 1e-6,
            _ if by_units => 1e-6,
            _ => 1e-11,
        };
        let error = nmse(&got, &want);
        let what = format!("{kind:?} {n}x{k} {n_rows} {:?}", device.features().names());
        assert!(error < bound, "{what}, itself: {error:e}");
    }
    stacks[0].n_pieces()
}

#[test]
fn every_type_is_multiplied_as_on_the_cpu() {
    for device in devices() {
        for kind in KINDS {
            let block = match kind {
                WeightKind::Ternary => 128,
                WeightKind::Blocks(dtype) => dtype.block_len().max(32),
            };
            for (n, blocks, n_experts, n_rows, n_used, shared, gated) in [
                (2, 2, 2, 1, 1, true, false),
                (34, 3, 5, 1, 3, true, true),
                (64, 2, 4, 3, 2, false, false),
                (70, 5, 8, 17, 4, true, false),
                (130, 3, 3, 70, 2, true, true),
                (66, 2, 6, 90, 1, false, false),
            ] {
                let case = Case {
                    kind,
                    n,
                    k: blocks * block,
                    n_experts,
                    n_rows,
                    n_used,
                    shared,
                    gated,
                };
                assert_eq!(check(device, &case), 1);
            }
        }
    }
}

#[test]
fn emulated_matrix_units_agree_with_the_cpu() {
    let Some(device) = emulated() else { return };
    let kinds = [DType::Q8_0, DType::Q4_K, DType::Q6_K].map(WeightKind::Blocks);
    for kind in [WeightKind::Ternary].into_iter().chain(kinds) {
        for (n_experts, n_rows, n_used, shared) in [(8, 17, 4, true), (6, 90, 1, false)] {
            let case = Case {
                kind,
                n: 70,
                k: 512,
                n_experts,
                n_rows,
                n_used,
                shared,
                gated: shared,
            };
            assert_eq!(check(&device, &case), 1);
        }
    }
}

#[test]
fn experts_beyond_the_limit_of_a_binding_are_in_several_pieces() {
    if device().is_none() {
        return;
    }
    let options = DeviceOptions {
        max_binding_bytes: Some(1 << 13),
        ..DeviceOptions::default()
    };
    let device = Device::open(&options).unwrap();
    for (kind, n, pieces) in [
        (WeightKind::Ternary, 16, 2),
        (WeightKind::Blocks(DType::Q8_0), 16, 7),
        (WeightKind::Blocks(DType::F16), 8, 7),
    ] {
        for (gated, n_rows) in [(false, 5), (true, 5), (true, 20)] {
            let case = Case {
                kind,
                n,
                k: 256,
                n_experts: 7,
                n_rows,
                n_used: 3,
                shared: true,
                gated,
            };
            assert_eq!(check(&device, &case), pieces, "{kind:?}");
        }
    }
    // One is too large.
    let weights = Weights::new(WeightKind::Blocks(DType::F16), 12, 256, 1);
    let own = weights.upload(&device);
    let refused = Stack::join(&device, &[&[&own], &[&own]]).unwrap_err();
    assert!(refused.to_string().contains("can bind"), "{refused}");
    assert!(Stack::join(&device, &[&[&own]]).is_ok());
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(device) = device() else { return };
    let f32s = |n, k| Weights::new(WeightKind::Blocks(DType::F32), n, k, 1).upload(device);
    let (a, b, c) = (f32s(8, 64), f32s(8, 32), f32s(6, 64));
    let half = Weights::new(WeightKind::Blocks(DType::F16), 8, 64, 1).upload(device);
    for other in [&b, &c, &half] {
        assert!(Stack::join(device, &[&[&a, other]]).is_err());
    }
    assert!(Stack::join(device, &[&[&a, &a], &[&a]]).is_err());
    assert!(Stack::join(device, &[]).unwrap().is_empty());
    let stack = &Stack::join(device, &[&[&a, &a]]).unwrap()[0];
    assert_eq!((stack.n(), stack.k(), stack.n_experts()), (8, 64, 2));
    let (ids, weights) = buffers(device, 2, 2);
    let routes = |n_rows| Routes {
        experts: &ids,
        weights: &weights,
        n_rows,
        n_used: 2,
    };
    let x = device.buffer("x", 2 * 64 * 4).unwrap();
    let out = device.buffer("out", 4 * 8 * 4).unwrap();
    let mut recorder = Recorder::new(device);
    let mut attempt = |n_rows, x: Rows<'_>, epilogue, out: Rows<'_>| {
        let (x, routes) = (Input::Float(x), routes(n_rows));
        multiply_routed(&mut recorder, stack, x, routes, 2, epilogue, out)
    };
    let (rows, fits) = (Rows::new(&x, 2, 64), Rows::new(&out, 4, 8));
    assert!(attempt(2, rows, Epilogue::Store, fits).is_ok());
    assert!(attempt(2, rows, Epilogue::Add, fits).is_err());
    assert!(attempt(3, rows, Epilogue::Store, fits).is_err());
    assert!(attempt(2, rows, Epilogue::Store, Rows::new(&out, 3, 8)).is_err());
    assert!(attempt(2, Rows::new(&x, 1, 64), Epilogue::Store, fits).is_err());
    let scores = Rows::new(&x, 2, 64);
    let routing = |groups| experts_on_gpu::Routing {
        is_sigmoid: false,
        renormalised: true,
        groups,
        scale: 1.0,
    };
    let mut chosen = |scores, groups, routes| {
        route(&mut recorder, scores, None, &routing(groups), routes).is_ok()
    };
    assert!(chosen(scores, None, routes(2)));
    assert!(!chosen(Rows::new(&x, 2, 1), None, routes(2)));
    assert!(!chosen(Rows::new(&x, 1, 64), None, routes(2)));
    let many = Rows::new(&x, 2, experts_on_gpu::MAX_EXPERTS + 1);
    assert!(!chosen(many, None, routes(2)));
    assert!(chosen(scores, Some((2, 1)), routes(2)));
    assert!(
        !chosen(scores, Some((3, 1)), routes(2)),
        "groups of one size"
    );
    assert!(!chosen(scores, Some((2, 3)), routes(2)));
    assert!(!chosen(scores, Some((0, 0)), routes(2)));
    assert!(combine(&mut recorder, routes(2), fits, false, fits).is_err());
}

/// One row whose experts a product chooses, and the choice before it.
#[test]
fn products_choose_the_experts_of_a_row() {
    for device in devices() {
        for kind in KINDS {
            for (n_experts, n_used, is_sigmoid, renormalised) in [
                (7, 3, false, true),
                (40, 8, false, false),
                (5, 5, true, true),
            ] {
                // One is enough of types that differ in their blocks alone.
                if n_experts != 7 && kind != WeightKind::Ternary {
                    continue;
                }
                let routing = experts_on_gpu::Routing {
                    is_sigmoid,
                    renormalised,
                    groups: None,
                    scale: 1.5,
                };
                check_choice(device, kind, (n_experts, n_used), &routing);
            }
        }
    }
}

fn check_choice(
    device: &Device,
    kind: WeightKind,
    (n_experts, n_used): (usize, usize),
    routing: &experts_on_gpu::Routing,
) {
    let (n, k) = (70, 512);
    let seeds = 0..n_experts as u64;
    let own: Vec<Linear> = seeds
        .map(|seed| Weights::new(kind, n, k, seed).upload(device))
        .collect();
    let stack = &Stack::join(device, &[&own.iter().collect::<Vec<_>>()]).unwrap()[0];
    let x = device.upload(&floats(k, 3)).unwrap();
    let x = Rows::new(&x, 1, k);
    let weight = device.upload(&floats(k, 4)).unwrap();
    // Some of them the same.
    let values: Vec<f32> = (floats(n_experts, 5).iter().enumerate())
        .map(|(i, score)| if i % 4 == 3 { 0.25 } else { 3.0 * score })
        .collect();
    let scores = spread(device, &values, n_experts, 3, n_experts);
    let scores = spread_rows(&scores, 1, n_experts, 3, n_experts);
    let rounded = QuantizedRows::new(device, 1, k).unwrap();
    let out = device.buffer("out", (n_used * n * 4) as u64).unwrap();
    let rows = Rows::new(&out, n_used, n);
    let choice = Choice { scores, routing };
    let recorder = &mut Recorder::new(device);
    let is_float = kind.form() == Form::Float;
    assert_eq!(
        can_choose(recorder, stack, x, routing),
        !is_float,
        "{kind:?}"
    );
    let grouped = experts_on_gpu::Routing {
        groups: Some((1, 1)),
        ..*routing
    };
    assert!(!can_choose(recorder, stack, x, &grouped));
    for norm in [None, Some((&weight, 1e-5))] {
        let all = [(); 2].map(|()| buffers(device, 1, n_used));
        let of = |i: usize| Routes {
            experts: &all[i].0,
            weights: &all[i].1,
            n_rows: 1,
            n_used,
        };
        if is_float {
            let how = (Epilogue::Store, &rounded);
            let refused = choose_and_multiply(recorder, stack, (x, norm), choice, of(0), how, rows);
            assert!(matches!(refused, Err(GpuError::Unsupported { .. })));
            return;
        }
        let got = run(device, &out, n_used * n, |r| {
            let how = (Epilogue::Store, &rounded);
            choose_and_multiply(r, stack, (x, norm), choice, of(0), how, rows)
        });
        let want = run(device, &out, n_used * n, |r| {
            route(r, scores, None, routing, of(1))?;
            let input = Input::Round {
                x,
                norm,
                scratch: &rounded,
            };
            multiply_routed(r, stack, input, of(1), n_used, Epilogue::Store, rows)
        });
        let what = format!("{kind:?} {routing:?} {:?}", device.features().names());
        assert_eq!(got, want, "{what}");
        let [own, before] = [0, 1].map(|i: usize| {
            let ids: Vec<u32> = device.read(&all[i].0, 0..n_used).unwrap();
            let weights: Vec<f32> = device.read(&all[i].1, 0..n_used).unwrap();
            (ids, weights)
        });
        assert_eq!(own.0, before.0, "{what}");
        for (got, want) in own.1.iter().zip(&before.1) {
            assert!(
                (got - want).abs() <= 4e-6 * want.abs(),
                "{what}: {got} {want}"
            );
        }
    }
}
