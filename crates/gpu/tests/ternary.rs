//! Quantizing to int8, and ternary linear layers: the same bits as on the CPU.

use crate::common::{
    Random, device, devices, emulated, floats, nmse, run, scalar, spread, spread_rows,
};
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::Activation;
use sterna_gpu::kernels::linear::{Epilogue, Input, Linear, WeightKind, multiply};
use sterna_gpu::kernels::quantize::{QuantizedRows, Rounded, Scaling, dequantize, quantize};
use sterna_gpu::memory::Upload;
use sterna_gpu::{Device, DeviceOptions, Recorder};
use sterna_kernels::gemm::{Matrix, Scratch, TernaryMatrix, linear};
use sterna_kernels::quant::{q8, ternary};
use sterna_kernels::{activation, norm};

#[test]
fn rounding_a_row_gives_the_bits_of_the_cpu() {
    for device in devices() {
        for (m, width) in [
            (1, 1),
            (1, 255),
            (3, 256),
            (2, 257),
            (5, 2560),
            (1, 6912),
            // More than stays in registers.
            (2, 40_000),
            // Many rows.
            (257, 512),
            (0, 64),
        ] {
            let mut x = floats(m * width, 3);
            // A row of zeros, and halves under a scale of 1.
            if m > 1 {
                x[..width].fill(0.0);
                x[width..width + 4].copy_from_slice(&[127.0, 0.5, -1.5, 2.5]);
            }
            // In vectors, where the width permits, and not.
            for (offset, stride) in [(4, width + 4), (3, width + 5)] {
                let buffer = spread(device, &x, width, offset, stride);
                let rows = spread_rows(&buffer, m, width, offset, stride);
                let out = QuantizedRows::new(device, m.max(1), width).unwrap();
                run(device, &buffer, 0, |r| {
                    quantize(r, rows, None, Scaling::Row, &out)
                });
                let Rounded { codes: q, steps } = out.read(device, m, width, Scaling::Row).unwrap();
                let padded = width.next_multiple_of(256);
                for (t, row) in x.chunks(width).enumerate() {
                    let mut want = vec![0; padded];
                    let (scale, sum) = q8::quantize_row(row, &mut want);
                    let what = format!("{m}x{width} row {t} {:?}", device.features().names());
                    assert_eq!(
                        steps[t].0.to_bits(),
                        scale.to_bits(),
                        "{what}: {} {scale}",
                        steps[t].0
                    );
                    assert_eq!(steps[t].1, sum, "{what}");
                    assert!(q[t * padded..][..padded] == want, "{what}");
                }
            }
        }
    }
}

#[test]
fn scales_are_divided_as_on_the_cpu() {
    // Magnitudes over the range of activations, and mantissas of every kind.
    for device in devices() {
        let x: Vec<f32> = (0..4096u32)
            .map(|i| f32::from_bits((100 + i % 50) << 23 | i.wrapping_mul(0x9E37_79B1) >> 9))
            .collect();
        let buffer = device.upload(&x).unwrap();
        let rows = Rows::new(&buffer, x.len(), 1);
        let out = QuantizedRows::new(device, x.len(), 1).unwrap();
        run(device, &buffer, 0, |r| {
            quantize(r, rows, None, Scaling::Row, &out)
        });
        let Rounded { steps, .. } = out.read(device, x.len(), 1, Scaling::Row).unwrap();
        for (x, (scale, _)) in x.iter().zip(steps) {
            let want = (1.0 / x.max(1e-5)) * 127.0;
            assert_eq!(scale.to_bits(), want.to_bits(), "{x}");
        }
    }
}

#[test]
fn rounded_rows_become_the_floats_of_the_cpu() {
    for device in devices() {
        for (m, width) in [(1, 1), (3, 255), (2, 2560)] {
            let x = floats(m * width, 3);
            let buffer = device.upload(&x).unwrap();
            let rounded = QuantizedRows::new(device, m, width).unwrap();
            let (offset, stride) = (1, width + 2);
            let out = spread(device, &x, width, offset, stride);
            let got = run(device, &out, offset + m * stride, |r| {
                quantize(
                    r,
                    Rows::new(&buffer, m, width),
                    None,
                    Scaling::Row,
                    &rounded,
                )?;
                dequantize(r, &rounded, spread_rows(&out, m, width, offset, stride))
            });
            for (t, row) in x.chunks(width).enumerate() {
                let mut q = vec![0; width];
                let (scale, _) = q8::quantize_row(row, &mut q);
                let got = &got[offset + t * stride..];
                for (got, q) in got.iter().zip(q) {
                    assert_eq!(*got, f32::from(q) / scale);
                }
                assert_eq!(got[width..stride], [7.5; 2]);
            }
        }
    }
}

#[test]
fn normalised_rows_differ_by_one_unit_at_most() {
    for device in devices() {
        for (m, width) in [(1, 64), (2, 2560), (1, 6912), (1, 301), (1, 40_000)] {
            let (x, weight) = (floats(m * width, 5), floats(width, 6));
            let (buffer, w) = (device.upload(&x).unwrap(), device.upload(&weight).unwrap());
            let out = QuantizedRows::new(device, m, width).unwrap();
            let rows = Rows::new(&buffer, m, width);
            run(device, &buffer, 0, |r| {
                quantize(r, rows, Some((&w, 1e-5)), Scaling::Row, &out)
            });
            let Rounded { codes: q, .. } = out.read(device, m, width, Scaling::Row).unwrap();
            let mut normed = vec![0.0; x.len()];
            norm::rms_norm_into(&scalar(), &x, &weight, 1e-5, &mut normed).unwrap();
            let mut n_other = 0;
            for (t, row) in normed.chunks(width).enumerate() {
                let mut want = vec![0; width];
                q8::quantize_row(row, &mut want);
                for (got, want) in q[t * width.next_multiple_of(256)..].iter().zip(want) {
                    assert!((i32::from(*got) - i32::from(want)).abs() <= 1);
                    n_other += usize::from(*got != want);
                }
            }
            // A value differs by a few units in its last place, 2^-22 of it, so one in some 2^14 codes
            // may have been that close to a half.
            assert!(n_other <= 2 + m * width / 4096, "{n_other}");
        }
    }
}

/// Packed rows of random trits.
pub(crate) fn codes(n: usize, k: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut codes = vec![0u8; n * ternary::row_bytes(k)];
    for (i, row) in codes.chunks_mut(ternary::row_bytes(k).max(1)).enumerate() {
        for j in 0..k.next_multiple_of(128) {
            let code = if j < k { random.below(3) as u8 } else { 1 };
            // Some rows of one value, for the largest sums.
            let code = if i % 7 == 3 && j < k { 2 } else { code };
            row[j / 128 * 32 + j % 32] |= code << (6 - 2 * (j % 128 / 32));
        }
    }
    codes
}

pub(crate) fn upload(device: &Device, n: usize, k: usize, scales: &[f32], codes: &[u8]) -> Linear {
    let mut upload = Upload::new(device, 1 << 16, 2).unwrap();
    Linear::upload(
        device,
        &mut upload,
        WeightKind::Ternary,
        (n, k),
        scales,
        codes,
    )
    .unwrap()
}

/// The CPU's product, with a scale for each row.
fn expected(n: usize, k: usize, scales: &[f32], codes: &[u8], x: &[f32]) -> Vec<f32> {
    let row_bytes = ternary::row_bytes(k);
    let m = x.len() / k;
    let mut out = vec![0.0; m * n];
    for (i, scale) in scales.iter().enumerate() {
        let row = &codes[i * row_bytes..][..row_bytes];
        let w = TernaryMatrix::new(1, k, *scale, row).unwrap();
        let mut column = vec![0.0; m];
        let outputs = &mut [(Matrix::Ternary(w), &mut column[..])];
        linear(&scalar(), x, k, &mut Scratch::default(), outputs).unwrap();
        for (t, value) in column.into_iter().enumerate() {
            out[t * n + i] = value;
        }
    }
    out
}

fn check(device: &Device, n: usize, k: usize, m: usize, epilogue: Epilogue) {
    let codes = codes(n, k, (n + k) as u64);
    let scales: Vec<f32> = floats(n, 8).iter().map(|s| s.abs() + 0.01).collect();
    let w = upload(device, n, k, &scales, &codes);
    let x = floats(m * k, 9);
    let buffer = device.upload(&x).unwrap();
    let rounded = QuantizedRows::new(device, m, k).unwrap();
    let width = epilogue.width(n);
    let (offset, stride) = (2, width + 3);
    let before = floats(m * width, 10);
    let out = spread(device, &before, width, offset, stride);
    let len = if width == 0 { 0 } else { offset + m * stride };
    let got = run(device, &out, len, |r| {
        quantize(r, Rows::new(&buffer, m, k), None, Scaling::Row, &rounded)?;
        let out = spread_rows(&out, m, width, offset, stride);
        multiply(r, &w, Input::Int8(&rounded), epilogue, out)
    });
    if width == 0 {
        return;
    }
    let mut want = expected(n, k, &scales, &codes, &x);
    let products = want.clone();
    match epilogue {
        Epilogue::Store => {}
        Epilogue::Add => want.iter_mut().zip(&before).for_each(|(w, b)| *w += b),
        Epilogue::Gate(activation) => {
            let (mut gate, mut up) = (Vec::new(), Vec::new());
            for row in want.chunks(n) {
                gate.extend_from_slice(&row[..n / 2]);
                up.extend_from_slice(&row[n / 2..]);
            }
            activation::gate(&scalar(), activation, &mut gate, &up).unwrap();
            want = gate;
        }
    }
    let what = format!("{n}x{k} m {m} {epilogue:?} {:?}", device.features().names());
    for (t, want) in want.chunks(width.max(1)).enumerate() {
        let got = &got[offset + t * stride..];
        let is_exact = |activation| matches!(activation, Activation::Relu | Activation::Relu2);
        if matches!(epilogue, Epilogue::Gate(activation) if !is_exact(activation)) {
            // Exponentials differ in a few last places.
            assert!(nmse(&got[..width], want) < 1e-11, "{what}");
            continue;
        }
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            // Compilers may add the last product of an exact sum and its scale without rounding it first.
            let unrounded = match epilogue {
                Epilogue::Add => (products[t * width + i].abs() + want.abs()) * f32::EPSILON,
                Epilogue::Store | Epilogue::Gate(_) => 0.0,
            };
            let is_same = got.to_bits() == want.to_bits() || (got - want).abs() <= unrounded;
            assert!(is_same, "{what} [{t}, {i}]: {got}, not {want}");
        }
        // Nothing else was written.
        assert_eq!(got[width..stride], vec![7.5; stride - width], "{what}");
    }
}

#[test]
fn every_variant_gives_the_bits_of_the_cpu() {
    for device in devices() {
        for k in [1, 100, 128, 129, 384, 1000] {
            for (n, m) in [(1, 1), (2, 4), (37, 3), (64, 5), (65, 9), (130, 65)] {
                check(device, n, k, m, Epilogue::Store);
            }
        }
        for (n, m) in [(2, 1), (38, 3), (66, 17), (128, 70)] {
            check(device, n, 256, m, Epilogue::Add);
            check(device, n, 256, m, Epilogue::Gate(Activation::Relu2));
        }
        for activation in [
            Activation::Silu,
            Activation::Relu,
            Activation::GeluTanh,
            Activation::GeluErf,
            Activation::ClampedSwiglu,
        ] {
            check(device, 34, 300, 2, Epilogue::Gate(activation));
        }
    }
}

#[test]
fn a_product_that_rounds_gives_the_bits_of_one_that_is_given_rounded() {
    for device in devices() {
        for (n, k, m) in [
            (5, 64, 1),
            (34, 2560, 1),
            (70, 6912, 1),
            (9, 130, 1),
            (9, 256, 2),
            (37, 1000, 5),
            (70, 2560, 8),
        ] {
            let codes = codes(n, k, 3);
            let w = upload(device, n, k, &vec![0.5; n], &codes);
            let x = device.upload(&floats(m * k, 4)).unwrap();
            let norm = device.upload(&floats(k, 5)).unwrap();
            let x = Rows::new(&x, m, k);
            let out = device.buffer("out", (m * n * 4) as u64).unwrap();
            let rows = Rows::new(&out, m, n);
            let scratch = QuantizedRows::new(device, m, k).unwrap();
            for norm in [None, Some((&norm, 1e-5))] {
                let stored = run(device, &out, m * n, |r| {
                    quantize(r, x, norm, Scaling::Row, &scratch)?;
                    multiply(r, &w, Input::Int8(&scratch), Epilogue::Store, rows)
                });
                let own = run(device, &out, m * n, |r| {
                    let input = Input::Round {
                        x,
                        norm,
                        scratch: &scratch,
                    };
                    multiply(r, &w, input, Epilogue::Store, rows)
                });
                if norm.is_none() {
                    assert_eq!(own, stored, "{n}x{k} {:?}", device.features().names());
                } else {
                    // The largest magnitude is normalised in another order, and a code may differ by one.
                    assert!(
                        nmse(&own, &stored) < 1e-7,
                        "{n}x{k}: {}",
                        nmse(&own, &stored)
                    );
                }
            }
        }
    }
}

#[test]
fn shapes_of_real_models() {
    let Some(device) = device() else { return };
    check(device, 3840, 2560, 1, Epilogue::Store);
    check(device, 2 * 6912, 2560, 1, Epilogue::Gate(Activation::Relu2));
    check(device, 2560, 6912, 1, Epilogue::Add);
    check(device, 640, 6912, 33, Epilogue::Store);
    // Wide tiles of matrix units, the last of them in part; and parts of the columns.
    if device.has_matrix_units() {
        check(device, 1400, 130, 1100, Epilogue::Store);
        check(device, 300, 4100, 40, Epilogue::Add);
    }
}

#[test]
fn emulated_matrix_units_give_the_bits_of_the_cpu() {
    let Some(device) = emulated() else { return };
    let gate = Epilogue::Gate(Activation::Relu2);
    for (n, k, m, epilogue) in [
        (65, 1000, 9, Epilogue::Store),
        (66, 256, 17, Epilogue::Add),
        (128, 256, 70, gate),
        // Five rows.
        (38, 384, 5, Epilogue::Store),
        // Wide tiles, the last of them in part; and parts of the columns.
        (1290, 130, 1030, Epilogue::Store),
        (300, 4100, 40, Epilogue::Add),
    ] {
        check(&device, n, k, m, epilogue);
    }
}

#[test]
fn nothing_times_something_is_nothing() {
    for device in devices() {
        check(device, 0, 64, 2, Epilogue::Store);
        check(device, 5, 64, 0, Epilogue::Store);
    }
}

#[test]
fn a_matrix_beyond_the_limit_of_a_binding_is_cut() {
    if device().is_none() {
        return;
    }
    let options = DeviceOptions {
        max_binding_bytes: Some(4096),
        ..DeviceOptions::default()
    };
    let device = Device::open(&options).unwrap();
    let codes_of = codes(150, 700, 1);
    let w = upload(&device, 150, 700, &[1.0; 150], &codes_of);
    assert_eq!(w.n_pieces(), 150usize.div_ceil(4096 / 192 / 8 * 8));
    for (m, epilogue) in [
        (1, Epilogue::Store),
        (9, Epilogue::Store),
        (3, Epilogue::Add),
    ] {
        check(&device, 150, 700, m, epilogue);
    }
    // A gate and its partner might be in different pieces.
    let out = device.buffer("out", 75 * 4).unwrap();
    let rounded = QuantizedRows::new(&device, 1, 700).unwrap();
    let refused = multiply(
        &mut Recorder::new(&device),
        &w,
        Input::Int8(&rounded),
        Epilogue::Gate(Activation::Relu2),
        Rows::new(&out, 1, 75),
    );
    assert!(refused.is_err());
    let parts = [&w, &w];
    assert!(Linear::join(&device, &parts).unwrap().is_none());
}

#[test]
fn joined_matrices_give_what_their_parts_give() {
    let Some(device) = device() else { return };
    let (k, sizes) = (300, [40, 8, 24]);
    let x = device.upload(&floats(11 * k, 9)).unwrap();
    let product = |w: &Linear, m: usize, epilogue: Epilogue| {
        let width = epilogue.width(w.n());
        let out = device.buffer("out", (m * width * 4) as u64).unwrap();
        let rounded = QuantizedRows::new(device, m, k).unwrap();
        run(device, &out, m * width, |r| {
            quantize(r, Rows::new(&x, m, k), None, Scaling::Row, &rounded)?;
            let rows = Rows::new(&out, m, width);
            multiply(r, w, Input::Int8(&rounded), epilogue, rows)
        })
    };
    let parts = sizes.map(|n| upload(device, n, k, &floats(n, n as u64), &codes(n, k, n as u64)));
    let whole = Linear::join(device, &parts.each_ref()).unwrap().unwrap();
    assert_eq!((whole.n(), whole.n_pieces()), (72, 1));
    for m in [1, 11] {
        let all = product(&whole, m, Epilogue::Store);
        let mut first = 0;
        for part in &parts {
            let alone = product(part, m, Epilogue::Store);
            let rows = whole.rows(first..first + part.n()).unwrap();
            assert_eq!(product(&rows, m, Epilogue::Store), alone);
            for (all, alone) in all.chunks(72).zip(alone.chunks(part.n())) {
                assert_eq!(all[first..first + part.n()], *alone);
            }
            first += part.n();
        }
        // The same rows as gates and partners, and a slice of them.
        let relu = Epilogue::Gate(Activation::Relu);
        let gated = product(&whole.rows(8..72).unwrap(), m, relu);
        let want = all.chunks(72).flat_map(|row| {
            let pairs = row[8..40].iter().zip(&row[40..72]);
            pairs.map(|(gate, up)| gate.max(0.0) * up)
        });
        assert_eq!(gated, want.collect::<Vec<f32>>());
    }
    assert!(whole.rows(70..73).is_none());
    let other = upload(device, 4, 64, &[1.0; 4], &codes(4, 64, 1));
    assert!(Linear::join(device, &[&whole, &other]).unwrap().is_none());
}

#[test]
fn wrong_shapes_are_refused() {
    let Some(device) = device() else { return };
    let w = upload(device, 4, 128, &[1.0; 4], &codes(4, 128, 1));
    let rounded = QuantizedRows::new(device, 2, 128).unwrap();
    let out = device.buffer("out", 4 * 4 * 4).unwrap();
    let mut recorder = Recorder::new(device);
    let mut attempt = |epilogue, rows: Rows<'_>| {
        multiply(&mut recorder, &w, Input::Int8(&rounded), epilogue, rows)
    };
    assert!(attempt(Epilogue::Store, Rows::new(&out, 2, 4)).is_ok());
    assert!(attempt(Epilogue::Store, Rows::new(&out, 2, 3)).is_err());
    assert!(attempt(Epilogue::Store, Rows::new(&out, 3, 4)).is_err());
    assert!(attempt(Epilogue::Store, Rows::new(&out, 5, 4)).is_err());
    assert!(attempt(Epilogue::Gate(Activation::Relu), Rows::new(&out, 2, 4)).is_err());
}
