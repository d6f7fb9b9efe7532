//! Norms and element-wise operations against the CPU.

use crate::common::{device, devices, floats, nmse, run, scalar, spread, spread_rows};
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::{
    self, Activation, Function, add_gated, blend, gate_by, gate_heads, multiply,
};
use sterna_gpu::kernels::norm::{layer_norm, normalize, rms_norm, rms_norm_groups};
use sterna_gpu::kernels::rotate::{MAX_BLOCK, Rotation, rotate};
use sterna_gpu::{GpuError, Recorder};
use sterna_kernels::hadamard::{self, Regroup};
use sterna_kernels::{activation, norm, vector};

const SHAPES: [(usize, usize); 7] = [
    (1, 1),
    (3, 5),
    (1, 255),
    (2, 256),
    (7, 257),
    (1, 6912),
    (40, 64),
];

#[test]
fn norms_agree_with_the_cpu() {
    for device in devices() {
        for (m, width) in SHAPES {
            let (x, weight) = (floats(m * width, 1), floats(width, 2));
            let mut want = x.clone();
            norm::rms_norm(&scalar(), &mut want, &weight, 1e-5).unwrap();
            let weight = device.upload(&weight).unwrap();
            let (offset, stride) = (3, width + 2);
            let from = spread(device, &x, width, offset, stride);
            let to = device.buffer("out", (m * width * 4) as u64).unwrap();
            let rows = spread_rows(&from, m, width, offset, stride);
            let got = run(device, &to, m * width, |r| {
                rms_norm(r, rows, &weight, 1e-5, Rows::new(&to, m, width))
            });
            // A mean that is off by a few units in its last place.
            assert!(
                nmse(&got, &want) < 1e-12,
                "{m}x{width} {:?}",
                device.features().names()
            );
            let all = run(device, &from, offset + m * stride, |r| {
                rms_norm(r, rows, &weight, 1e-5, rows)
            });
            for (t, want) in got.chunks(width).enumerate() {
                assert_eq!(&all[offset + t * stride..][..width], want, "in place");
                assert_eq!(all[offset + t * stride + width..][..2], [7.5; 2]);
            }
        }
    }
}

#[test]
fn layer_norms_agree_with_the_cpu() {
    for device in devices() {
        for (m, width) in SHAPES {
            // Far from zero, so that the mean matters.
            let x: Vec<f32> = floats(m * width, 1).iter().map(|x| x + 2.0).collect();
            let (weight, bias) = (floats(width, 2), floats(width, 3));
            let mut want = x.clone();
            norm::layer_norm_groups(&scalar(), &mut want, (&weight, &bias), 1, 1e-5).unwrap();
            let [weight, bias] = [weight, bias].map(|vector| device.upload(&vector).unwrap());
            let (offset, stride) = (3, width + 2);
            let from = spread(device, &x, width, offset, stride);
            let rows = spread_rows(&from, m, width, offset, stride);
            let to = device.buffer("out", (m * width * 4) as u64).unwrap();
            let out = Rows::new(&to, m, width);
            let got = run(device, &to, m * width, |r| {
                layer_norm(r, rows, (&weight, &bias), 1e-5, out)
            });
            assert!(nmse(&got, &want) < 1e-12, "{m}x{width}");
            let mut recorder = Recorder::new(device);
            for x in [out, Rows::new(&from, m, width + 1)] {
                assert!(layer_norm(&mut recorder, x, (&weight, &bias), 1e-5, out).is_err());
            }
            if width > 16 {
                let short = device.upload(&[0.0f32; 16]).unwrap();
                assert!(layer_norm(&mut recorder, rows, (&weight, &short), 1e-5, out).is_err());
            }
        }
    }
}

#[test]
fn functions_products_and_blends_agree_with_the_cpu() {
    let exec = scalar();
    for device in devices() {
        for (m, width) in SHAPES {
            let mut x: Vec<f32> = floats(m * width, 1).iter().map(|x| 9.0 * x).collect();
            // Exponentials overflow there.
            x[m * width / 2] = -100.0;
            let (y, shares) = (floats(m * width, 2), floats(m * width, 3));
            let (offset, stride) = (1, width + 3);
            let [other, by] = [&y, &shares].map(|x| spread(device, x, width, 2, width + 1));
            let [other, by] = [&other, &by].map(|x| spread_rows(x, m, width, 2, width + 1));
            let functions = [
                (Function::Tanh, activation::Function::Tanh),
                (Function::Sigmoid, activation::Function::Sigmoid),
            ];
            let activations = [
                Activation::Relu2,
                Activation::GeluTanh,
                Activation::GeluErf,
                Activation::ClampedSwiglu,
            ];
            let activations = activations.map(|activation| {
                (
                    Function::Activation(activation),
                    activation::Function::Activation(activation),
                )
            });
            let check =
                |what: &str,
                 want: &[f32],
                 record: &dyn Fn(&mut Recorder, Rows<'_>) -> Result<(), GpuError>| {
                    let to = spread(device, &x, width, offset, stride);
                    let rows = spread_rows(&to, m, width, offset, stride);
                    let all = run(device, &to, offset + m * stride, |r| record(r, rows));
                    let rows = all[offset..].chunks(stride).map(|row| &row[..width]);
                    let got: Vec<f32> = rows.flatten().copied().collect();
                    assert!(nmse(&got, want) < 1e-12, "{what} {m}x{width}");
                };
            for (on_gpu, on_cpu) in functions.into_iter().chain(activations) {
                let mut want = x.clone();
                activation::apply(&exec, on_cpu, &mut want);
                check(&format!("{on_gpu:?}"), &want, &|r, rows| {
                    elementwise::function(r, on_gpu, rows)
                });
            }
            let mut want = x.clone();
            vector::multiply(&exec, &mut want, &y).unwrap();
            check("product", &want, &|r, rows| multiply(r, rows, other));
            let mut want = x.clone();
            vector::blend(&exec, &mut want, &y, &shares).unwrap();
            check("blend", &want, &|r, rows| blend(r, rows, other, by));
            let mut recorder = Recorder::new(device);
            let narrow = other.columns(0, width - 1);
            assert!(multiply(&mut recorder, by, narrow).is_err());
            assert!(blend(&mut recorder, by, narrow, other).is_err());
            assert!(blend(&mut recorder, by, other, narrow).is_err());
        }
    }
}

#[test]
fn sums_products_and_bounds_agree_with_the_cpu() {
    for device in devices() {
        for (m, width) in SHAPES {
            let (x, y) = (floats(m * width, 1), floats(m * width, 2));
            let exec = scalar();
            type Op<'a> = (&'a str, f64, Box<dyn Fn(&mut Vec<f32>) + 'a>);
            let cases: [Op<'_>; 5] = [
                ("add", 0.0, Box::new(|x| vector::add(&exec, x, &y).unwrap())),
                (
                    "bias",
                    0.0,
                    Box::new(|x| vector::add_bias(&exec, x, &y[..width]).unwrap()),
                ),
                ("scale", 0.0, Box::new(|x| vector::scale(&exec, x, 0.37))),
                // An exponential and a quotient, within a few units in the last place of 1.
                (
                    "softcap",
                    1e-12,
                    Box::new(|x| vector::softcap(&exec, x, 0.5)),
                ),
                ("copy", 0.0, Box::new(|x| x.copy_from_slice(&y))),
            ];
            for (name, bound, on_cpu) in cases {
                let mut want = x.clone();
                on_cpu(&mut want);
                let (offset, stride) = (1, width + 3);
                let buffer = spread(device, &x, width, offset, stride);
                let rows = spread_rows(&buffer, m, width, offset, stride);
                let other = device.upload(&y).unwrap();
                let others = Rows::new(&other, m, width);
                let all = run(device, &buffer, offset + m * stride, |r| match name {
                    "add" => elementwise::add(r, rows, others),
                    "bias" => elementwise::add_bias(r, rows, &other),
                    "scale" => elementwise::scale(r, rows, 0.37),
                    "softcap" => elementwise::softcap(r, rows, 0.5),
                    _ => elementwise::copy(r, rows, others),
                });
                let got: Vec<f32> = (0..m)
                    .flat_map(|t| all[offset + t * stride..][..width].to_vec())
                    .collect();
                assert!(
                    nmse(&got, &want) <= bound,
                    "{name} {m}x{width}: {}",
                    nmse(&got, &want)
                );
                assert_eq!(all[0], 7.5);
                assert_eq!(all[offset + width..][..3], [7.5; 3]);
            }
        }
    }
}

#[test]
fn gates_agree_with_the_cpu() {
    let activations = [
        Activation::Silu,
        Activation::Relu2,
        Activation::Relu,
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::ClampedSwiglu,
    ];
    for device in devices() {
        for activation in activations {
            let mut x: Vec<f32> = floats(1000, 3).iter().map(|x| 6.0 * x).collect();
            x[..4].copy_from_slice(&[-1e4, 1e4, 0.0, -200.0]);
            let up = floats(1000, 4);
            let (gate, up_buffer) = (device.upload(&x).unwrap(), device.upload(&up).unwrap());
            let got = run(device, &gate, 1000, |r| {
                elementwise::gate(
                    r,
                    activation,
                    Rows::new(&gate, 1, 1000),
                    Rows::new(&up_buffer, 1, 1000),
                )
            });
            activation::gate(&scalar(), activation, &mut x, &up).unwrap();
            assert_eq!(got[..4], x[..4], "{activation:?}");
            // Exponentials within a few units in the last place.
            assert!(
                nmse(&got[4..], &x[4..]) < 1e-12,
                "{activation:?}: {}",
                nmse(&got[4..], &x[4..])
            );
        }
    }
}

#[test]
fn gates_of_rows_and_of_heads_agree_with_the_cpu() {
    for device in devices() {
        let (m, n_heads, d) = (5, 3, 20);
        let width = n_heads * d;
        let (x, y, gates) = (floats(m * width, 1), floats(m * width, 2), floats(m, 3));
        let mut want = x.clone();
        vector::add_gated(&scalar(), &mut want, &y, &gates).unwrap();
        let (of_x, of_y) = (device.upload(&x).unwrap(), device.upload(&y).unwrap());
        let of_gates = spread(device, &gates, 1, 2, 3);
        let got = run(device, &of_x, m * width, |r| {
            let gates = spread_rows(&of_gates, m, 1, 2, 3);
            add_gated(
                r,
                Rows::new(&of_x, m, width),
                Rows::new(&of_y, m, width),
                gates,
            )
        });
        assert!(nmse(&got, &want) < 1e-12);

        let q = floats(m * 2 * width, 4);
        let gates: Vec<f32> = q
            .chunks(2 * d)
            .flat_map(|head| &head[d..])
            .copied()
            .collect();
        let mut want = x.clone();
        vector::gate(&scalar(), &mut want, &gates).unwrap();
        let of_x = device.upload(&x).unwrap();
        let of_q = spread(device, &q, 2 * width, 3, 2 * width + 4);
        let got = run(device, &of_x, m * width, |r| {
            let q = spread_rows(&of_q, m, 2 * width, 3, 2 * width + 4);
            gate_heads(r, Rows::new(&of_x, m, width), q, d)
        });
        assert!(nmse(&got, &want) < 1e-12);
        let mut recorder = Recorder::new(device);
        let rows = Rows::new(&of_x, m, width);
        assert!(gate_heads(&mut recorder, rows, Rows::new(&of_q, m, width), d).is_err());
        assert!(add_gated(&mut recorder, rows, rows, Rows::new(&of_gates, m, 1)).is_err());
        assert!(add_gated(&mut recorder, rows, Rows::new(&of_y, m, width), rows).is_err());
    }
}

#[test]
fn norms_of_parts_and_gates_of_other_rows_agree_with_the_cpu() {
    for device in devices() {
        let (m, n_groups, width) = (4, 3, 30);
        let (x, weight) = (floats(m * width, 1), floats(width, 2));
        let mut want = x.clone();
        norm::rms_norm_groups(&scalar(), &mut want, &weight, n_groups, 1e-5).unwrap();
        let (of_x, weight) = (device.upload(&x).unwrap(), device.upload(&weight).unwrap());
        let rows = Rows::new(&of_x, m, width);
        let got = run(device, &of_x, m * width, |r| {
            rms_norm_groups(r, rows, &weight, n_groups, 1e-5, rows)
        });
        assert!(nmse(&got, &want) < 1e-12);
        let mut recorder = Recorder::new(device);
        for n_groups in [0, 4] {
            assert!(rms_norm_groups(&mut recorder, rows, &weight, n_groups, 1e-5, rows).is_err());
            assert!(normalize(&mut recorder, rows, n_groups, 1e-5).is_err());
        }
        // Without weights, of columns of wider rows.
        let (offset, stride) = (5, width + 7);
        let mut want = x.clone();
        let ones = vec![1.0; width / n_groups];
        norm::rms_norm(&scalar(), &mut want, &ones, 1e-5).unwrap();
        let of_x = spread(device, &x, width, offset, stride);
        let got = run(device, &of_x, offset + m * stride, |r| {
            let rows = spread_rows(&of_x, m, width, offset, stride);
            normalize(r, rows, n_groups, 1e-5)
        });
        let rows = got[offset..].chunks(stride);
        let got: Vec<f32> = rows.flat_map(|row| row[..width].to_vec()).collect();
        assert!(nmse(&got, &want) < 1e-12);

        let gate = floats(m * width, 3);
        let mut want = gate.clone();
        activation::gate(&scalar(), Activation::Silu, &mut want, &x).unwrap();
        let (of_x, of_gate) = (device.upload(&x).unwrap(), device.upload(&gate).unwrap());
        let got = run(device, &of_x, m * width, |r| {
            let gate = Rows::new(&of_gate, m, width);
            gate_by(r, Activation::Silu, Rows::new(&of_x, m, width), gate)
        });
        assert!(nmse(&got, &want) < 1e-12);
    }
}

#[test]
fn rotations_are_those_of_the_cpu() {
    let regroup = Regroup {
        n_groups: 2,
        n_each: 3,
        head_dim: 16,
    };
    for device in devices() {
        for (m, width, block, regroup) in [
            (1, 3, 1, None),
            (5, 64, 4, None),
            (2, 2048, 1024, None),
            (1, MAX_BLOCK, MAX_BLOCK, None),
            (3, 96, 32, Some(regroup)),
        ] {
            let signs: Vec<f32> = floats(width, 7).iter().map(|x| x.signum()).collect();
            let cpu = hadamard::Rotation::new(block, signs.clone(), regroup).unwrap();
            let rotation = Rotation {
                signs: device.upload(&signs).unwrap(),
                width,
                block,
                regroup: regroup.map(|heads| [heads.n_groups, heads.n_each, heads.head_dim]),
            };
            let x = floats(m * width, 1);
            let mut want = vec![0.0; x.len()];
            cpu.rotate(&scalar(), &x, &mut want).unwrap();
            let (of_x, out) = (
                spread(device, &x, width, 3, width + 2),
                device.buffer("out", (m * width * 4) as u64).unwrap(),
            );
            let rows = Rows::new(&out, m, width);
            let got = run(device, &out, m * width, |r| {
                rotate(
                    r,
                    &rotation,
                    false,
                    spread_rows(&of_x, m, width, 3, width + 2),
                    rows,
                )
            });
            assert_eq!(got, want, "{width}, {block}");
            let back = Recorder::new(device);
            let undone = rotate(&mut { back }, &rotation, true, rows, rows);
            if regroup.is_some() {
                assert!(undone.is_err());
                continue;
            }
            let got = run(device, &out, m * width, |r| {
                rotate(r, &rotation, true, rows, rows)
            });
            assert!(nmse(&got, &x) < 1e-12, "{width}, {block}");
            let long = Rotation {
                block: 2 * MAX_BLOCK,
                ..rotation
            };
            assert!(rotate(&mut Recorder::new(device), &long, false, rows, rows).is_err());
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let Some(device) = device() else { return };
    let (a, b) = (
        device.buffer("a", 64).unwrap(),
        device.buffer("b", 64).unwrap(),
    );
    let mut r = Recorder::new(device);
    let rows = |buffer, m, width| Rows::new(buffer, m, width);
    assert!(elementwise::add(&mut r, rows(&a, 2, 8), rows(&b, 2, 8)).is_ok());
    assert!(elementwise::add(&mut r, rows(&a, 2, 9), rows(&b, 2, 9)).is_err());
    assert!(elementwise::add(&mut r, rows(&a, 2, 4), rows(&b, 1, 4)).is_err());
    assert!(elementwise::add(&mut r, rows(&a, 1, 4), rows(&b, 1, 5)).is_err());
    assert!(elementwise::add(&mut r, rows(&a, 1, 4), rows(&a, 1, 4)).is_err());
    let overlapping = Rows {
        stride: 3,
        ..rows(&a, 2, 4)
    };
    assert!(elementwise::scale(&mut r, overlapping, 2.0).is_err());
    let huge = Rows {
        stride: usize::MAX,
        ..rows(&a, 2, 4)
    };
    assert!(elementwise::scale(&mut r, huge, 2.0).is_err());
    assert!(elementwise::add_bias(&mut r, rows(&a, 1, 16), &b).is_ok());
    assert!(rms_norm(&mut r, rows(&a, 1, 16), &b, 1e-5, rows(&a, 1, 15)).is_err());
    assert!(
        rms_norm(
            &mut r,
            rows(&a, 1, 4),
            &b,
            1e-5,
            rows(&a, 1, 4).columns(4, 4)
        )
        .is_err()
    );
}
