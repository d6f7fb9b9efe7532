//! Weights that are blocks of integers, or floats, against the CPU.

use crate::common::{device, devices, emulated, floats, nmse, run, scalar, spread, spread_rows};
use sterna_format::DType;
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::Activation;
use sterna_gpu::kernels::linear::{
    Epilogue, Form, Ids, Input, Linear, ROW_GRAIN, WeightKind, embed, multiply, multiply_beside,
};
use sterna_gpu::kernels::norm::rms_norm;
use sterna_gpu::kernels::quantize::{QuantizedRows, Rounded, Scaling, quantize};
use sterna_gpu::memory::Upload;
use sterna_gpu::tuning::{LaunchConfig, Tuning};
use sterna_gpu::{Device, DeviceOptions, GpuError, Recorder};
use sterna_kernels::gemm::{BlockMatrix, Matrix, Rounding, Scratch, linear};
use sterna_kernels::quant::{decode_row, encode_row};

const TYPES: [DType; 11] = [
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_K,
    DType::Q6_K,
    DType::Q1_0,
    DType::Q2_0,
    DType::Q2_0_G128,
    DType::PQ2_0,
    DType::F32,
    DType::F16,
    DType::BF16,
];

pub(crate) fn encoded(dtype: DType, n: usize, k: usize) -> Vec<u8> {
    let mut bytes = vec![0; n * k / dtype.block_len() * dtype.block_bytes()];
    encode_row(dtype, &floats(n * k, 3), &mut bytes).unwrap();
    bytes
}

pub(crate) fn upload(device: &Device, dtype: DType, n: usize, k: usize, bytes: &[u8]) -> Linear {
    // Slots smaller than a matrix, and than some rows.
    let mut upload = Upload::new(device, 1 << 12, 3).unwrap();
    let kind = WeightKind::Blocks(dtype);
    let row_bytes = kind.row_bytes(k);
    // In two parts, as of a matrix that arrives.
    let linear = Linear::new(device, kind, (n, k), &[]).unwrap();
    let half = n / 2 / ROW_GRAIN * ROW_GRAIN;
    for part in [0..half, half..n] {
        let rows = &bytes[part.start * row_bytes..part.end * row_bytes];
        linear.write(&mut upload, part, rows).unwrap();
    }
    linear
}

#[test]
fn rows_are_written_where_words_begin() {
    let Some(device) = device() else { return };
    let linear = Linear::new(device, WeightKind::Blocks(DType::F16), (32, 32), &[]).unwrap();
    let mut upload = Upload::new(device, 1 << 12, 3).unwrap();
    for (range, n_bytes) in [(4..12, 512), (24..40, 1024), (40..48, 512), (8..16, 511)] {
        let error = linear
            .write(&mut upload, range, &vec![0; n_bytes])
            .unwrap_err();
        assert!(matches!(error, GpuError::Shape { .. }), "{error}");
    }
}

fn check(device: &Device, dtype: DType, (n, k, m): (usize, usize, usize), epilogue: Epilogue) {
    let bytes = encoded(dtype, n, k);
    let w = upload(device, dtype, n, k, &bytes);
    let x = floats(m * k, 5);
    let (x_offset, x_stride) = if m == 3 {
        (1, k + 3)
    } else {
        (4, k + 4 - k % 4)
    };
    let x_buffer = spread(device, &x, k, x_offset, x_stride);
    let x_rows = spread_rows(&x_buffer, m, k, x_offset, x_stride);
    let rounded = QuantizedRows::new(device, m, k).unwrap();
    let width = epilogue.width(n);
    let (offset, stride) = (1, width + 2);
    let before = floats(m * width, 6);
    let out = spread(device, &before, width, offset, stride);
    let len = if width == 0 { 0 } else { offset + m * stride };
    let got = run(device, &out, len, |r| {
        let out = spread_rows(&out, m, width, offset, stride);
        let input = match w.kind().form() {
            Form::Int8(scaling) => {
                quantize(r, x_rows, None, scaling, &rounded)?;
                Input::Int8(&rounded)
            }
            Form::Float => Input::Half {
                x: x_rows,
                scratch: &rounded,
            },
        };
        multiply(r, &w, input, epilogue, out)
    });
    if width == 0 {
        return;
    }
    let matrix = BlockMatrix::new(dtype, n, k, Rounding::Blocks, &bytes).unwrap();
    let mut want = vec![0.0; m * n];
    let outputs = &mut [(Matrix::Blocks(matrix), &mut want[..])];
    linear(&scalar(), &x, k, &mut Scratch::default(), outputs).unwrap();
    match epilogue {
        Epilogue::Store => {}
        Epilogue::Add => want.iter_mut().zip(&before).for_each(|(w, b)| *w += b),
        Epilogue::Gate(_) => {
            let gated = want.chunks(n).flat_map(|row| {
                let (gate, up) = row.split_at(n / 2);
                let pairs = gate.iter().zip(up);
                pairs.map(|(g, u)| g.max(0.0) * g.max(0.0) * u)
            });
            want = gated.collect();
        }
    }
    let own: Vec<f32> = (0..m)
        .flat_map(|t| got[offset + t * stride..][..width].to_vec())
        .collect();
    // Sums of few terms may be small; then what matters is the usual size of sums of so many products, both
    // uniform in ±1.
    let power: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
    let usual = (m * n * k) as f64 / 9.0;
    let error = nmse(&own, &want)
        * if power > 0.0 {
            power / power.max(usual)
        } else {
            1.0
        };
    let what = format!(
        "{dtype} {n}x{k} m {m} {epilogue:?} {:?}",
        device.features().names()
    );
    // Integers are the same; sums of floats in another order differ by about 1e-7 of the largest, 1e-13 in
    // squares. With F16 the CPU keeps 13 bits of activations: errors of at most 2^-13, 2^-26 / 3 in squares,
    // and less or more by chance; with BF16 16 bits. Matrix units round both sides to 11 bits, and scales.
    let can = dtype == DType::F16 && n >= 65_536 || matches!(w.kind().form(), Form::Int8(_));
    let by_units = m > 8 && device.has_matrix_units() && can;
    let bound = match dtype {
        _ if by_units => 5e-7,
        DType::F16 => 2e-8,
        DType::BF16 => 1e-10,
        _ => 1e-11,
    };
    // A gate is squared, and so adds three such errors.
    let bound = if matches!(epilogue, Epilogue::Gate(_)) {
        9.0 * bound
    } else {
        bound
    };
    assert!(error < bound, "{what}: {error:e}");
    for t in 0..m {
        assert_eq!(got[offset + t * stride + width..][..2], [7.5; 2], "{what}");
    }
}

#[test]
fn every_type_and_variant_agrees_with_the_cpu() {
    for device in devices() {
        for dtype in TYPES {
            let block = dtype.block_len().max(32);
            for (n, blocks, m) in [(1, 1, 1), (5, 3, 2), (64, 2, 3), (67, 5, 9), (129, 1, 66)] {
                check(device, dtype, (n, blocks * block, m), Epilogue::Store);
            }
            check(device, dtype, (34, 2 * block, 2), Epilogue::Add);
            check(device, dtype, (34, 2 * block, 10), Epilogue::Add);
            check(
                device,
                dtype,
                (34, 2 * block, 1),
                Epilogue::Gate(Activation::Relu2),
            );
            check(
                device,
                dtype,
                (66, 2 * block, 33),
                Epilogue::Gate(Activation::Relu2),
            );
            check(device, dtype, (0, block, 2), Epilogue::Store);
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (n, k, m) in [(3, 1, 1), (9, 33, 2), (17, 100, 3), (40, 65, 12)] {
                check(device, dtype, (n, k, m), Epilogue::Store);
            }
        }
    }
}

#[test]
fn a_product_that_rounds_agrees_with_one_that_is_given_rounded() {
    for device in devices() {
        for dtype in TYPES.into_iter().filter(|t| t.block_len() > 1) {
            let (n, k) = (37, 5 * dtype.block_len().max(128));
            let w = upload(device, dtype, n, k, &encoded(dtype, n, k));
            let Form::Int8(scaling) = w.kind().form() else {
                unreachable!("integers")
            };
            let norm = device.upload(&floats(k, 5)).unwrap();
            let few = [1, 2, 5, 8].into_iter();
            for (m, norm) in few.flat_map(|m| [(m, None), (m, Some((&norm, 1e-5)))]) {
                let x = spread(device, &floats(m * k, 4), k, 4, k + 8);
                let x = spread_rows(&x, m, k, 4, k + 8);
                let out = device.buffer("out", (m * n * 4) as u64).unwrap();
                let rows = Rows::new(&out, m, n);
                let scratch = QuantizedRows::new(device, m, k).unwrap();
                let stored = run(device, &out, m * n, |r| {
                    quantize(r, x, norm, scaling, &scratch)?;
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
                // The same integers, unless a value is close to a half; another number of invocations adds in
                // another order.
                let bound = if norm.is_some() { 1e-7 } else { 1e-12 };
                assert!(
                    nmse(&own, &stored) < bound,
                    "{dtype} m {m}: {}",
                    nmse(&own, &stored)
                );
            }
        }
    }
}

/// Two products of a row in one dispatch give the bits of two that are divided alike.
#[test]
fn products_side_by_side_are_as_each_alone() {
    let alike = Tuning::all(LaunchConfig {
        lanes: Some(8),
        workgroup: Some(64),
        ..LaunchConfig::default()
    });
    for device in devices() {
        let matrix = |dtype, n, k| upload(device, dtype, n, k, &encoded(dtype, n, k));
        // Of what quantizes for itself, and of what takes a row that is quantized; the last workgroups have few rows.
        for (n, second_n, k) in [(70, 34, 768), (16, 3, 256), (3, 100, 4608)] {
            let w = matrix(DType::Q4_K, n, k);
            let second = matrix(DType::Q6_K, second_n, k);
            let norm = device.upload(&floats(k, 5)).unwrap();
            let x = spread(device, &floats(k, 4), k, 4, k);
            let x = spread_rows(&x, 1, k, 4, k);
            let width = n + second_n + 7;
            let out = device.upload(&vec![-1.0f32; width]).unwrap();
            let row = Rows::new(&out, 1, width);
            let outs = [row.columns(3, n), row.columns(5 + n, second_n)];
            let scratch = QuantizedRows::new(device, 1, k).unwrap();
            let inputs = [
                Input::Int8(&scratch),
                Input::Round {
                    x,
                    norm: Some((&norm, 1e-5)),
                    scratch: &scratch,
                },
            ];
            for (input, epilogue) in inputs
                .map(|it| (it, Epilogue::Store))
                .into_iter()
                .chain([(inputs[0], Epilogue::Add)])
            {
                let result = |is_beside: bool| {
                    device.write(&out, 0, &vec![-1.0f32; width]).unwrap();
                    run(device, &out, width, |r| {
                        r.set_tuning(alike.clone());
                        quantize(r, x, Some((&norm, 1e-5)), Scaling::Blocks256, &scratch)?;
                        let before = r.len();
                        let [first_out, second_out] = outs;
                        if is_beside {
                            let both = [(&w, first_out), (&second, second_out)];
                            let rounds = k < 4096 || matches!(input, Input::Int8(_));
                            assert_eq!(multiply_beside(r, both, input, epilogue)?, rounds);
                            assert_eq!(r.len() - before, usize::from(rounds));
                            if rounds {
                                return Ok(());
                            }
                        }
                        multiply(r, &w, input, epilogue, first_out)?;
                        multiply(r, &second, input, epilogue, second_out)
                    })
                };
                assert_eq!(
                    result(true),
                    result(false),
                    "{n} {second_n} {k} {epilogue:?}"
                );
            }
            // What there is no kernel for.
            let other = device.buffer("other", second_n as u64 * 4).unwrap();
            let elsewhere = Rows::new(&other, 1, second_n);
            let r = &mut Recorder::new(device);
            for both in [
                [(&second, outs[1]), (&w, outs[0])],
                [(&w, outs[0]), (&w, outs[0])],
                [(&w, outs[0]), (&second, elsewhere)],
            ] {
                assert!(!multiply_beside(r, both, inputs[0], Epilogue::Store).unwrap());
            }
            let wrong = [(&w, outs[1]), (&second, outs[1])];
            assert!(
                n == second_n || multiply_beside(r, wrong, inputs[0], Epilogue::Store).is_err()
            );
            assert!(r.is_empty());
        }
    }
}

/// Few rows of floats that are normalised by the product, and beforehand.
#[test]
fn a_product_of_floats_normalises_few_rows() {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (n, k, m) in [
                (5, 64, 1),
                (37, 260, 3),
                (16, 33, 6),
                (70, 1, 2),
                (9, 4100, 8),
            ] {
                let w = upload(device, dtype, n, k, &encoded(dtype, n, k));
                let x = spread(device, &floats(m * k, 4), k, 4, k + 4 - k % 4);
                let x = spread_rows(&x, m, k, 4, k + 4 - k % 4);
                let weight = device.upload(&floats(k, 5)).unwrap();
                let normed = device.buffer("normed", (m * k * 4) as u64).unwrap();
                let normed = Rows::new(&normed, m, k);
                let out = device.buffer("out", (m * n * 4) as u64).unwrap();
                let rows = Rows::new(&out, m, n);
                let want = run(device, &out, m * n, |r| {
                    rms_norm(r, x, &weight, 1e-5, normed)?;
                    multiply(r, &w, Input::Float(normed), Epilogue::Store, rows)
                });
                let got = run(device, &out, m * n, |r| {
                    let input = Input::Normed(x, (&weight, 1e-5));
                    multiply(r, &w, input, Epilogue::Store, rows)
                });
                let error = nmse(&got, &want);
                assert!(error < 1e-11, "{dtype} {n}x{k} m {m}: {error:e}");
            }
            let w = upload(device, dtype, 8, 32, &encoded(dtype, 8, 32));
            let x = device.upload(&floats(9 * 32, 4)).unwrap();
            let weight = device.upload(&floats(32, 5)).unwrap();
            let out = device.buffer("out", 9 * 8 * 4).unwrap();
            let input = Input::Normed(Rows::new(&x, 9, 32), (&weight, 1e-5));
            let (r, out) = (&mut Recorder::new(device), Rows::new(&out, 9, 8));
            let refused = multiply(r, &w, input, Epilogue::Store, out);
            assert!(matches!(refused, Err(GpuError::Unsupported { .. })));
        }
    }
}

#[test]
fn shapes_of_real_models() {
    let Some(device) = device() else { return };
    for dtype in [DType::Q4_K, DType::Q6_K, DType::F16] {
        check(device, dtype, (2048, 2048, 1), Epilogue::Store);
        check(device, dtype, (256, 8192, 1), Epilogue::Add);
        check(device, dtype, (512, 2048, 65), Epilogue::Store);
    }
    // Wide tiles of matrix units, the last of them in part; and parts of the columns.
    if device.has_matrix_units() {
        for dtype in TYPES {
            check(device, dtype, (1400, 256, 1100), Epilogue::Store);
            check(device, dtype, (300, 4096, 40), Epilogue::Add);
        }
        // A head's rows, which are many.
        for m in [9, 33, 65] {
            check(device, DType::F16, (65_601, 96, m), Epilogue::Store);
        }
    }
    // Several iterations of all lanes, the last of them for some.
    for dtype in [DType::Q4_0, DType::Q1_0, DType::Q2_0, DType::PQ2_0] {
        for m in [1, 3] {
            check(device, dtype, (64, 71 * 128, m), Epilogue::Store);
        }
    }
}

#[test]
fn emulated_matrix_units_agree_with_the_cpu() {
    let Some(device) = emulated() else { return };
    for dtype in TYPES {
        let block = dtype.block_len().max(32);
        check(&device, dtype, (67, 5 * block, 9), Epilogue::Store);
        check(&device, dtype, (34, 2 * block, 10), Epilogue::Add);
    }
    let gate = Epilogue::Gate(Activation::Relu2);
    check(&device, DType::Q4_K, (66, 512, 33), gate);
    // Wide tiles, the last of them in part; and parts of the columns.
    for dtype in [DType::Q4_K, DType::Q6_K] {
        check(&device, dtype, (1290, 256, 1030), Epilogue::Store);
        check(&device, dtype, (300, 4096, 40), Epilogue::Add);
    }
}

#[test]
fn rounding_blocks_gives_the_bits_of_the_definition() {
    for device in devices() {
        for (scaling, len) in [(Scaling::Blocks256, 256), (Scaling::Blocks32, 32)] {
            for (m, width) in [(1, 32), (2, 256), (1, 300), (3, 1280), (3, 2048), (1, 8192)] {
                let mut x = floats(m * width, 4);
                x[..32.min(width)].fill(0.0);
                let buffer = device.upload(&x).unwrap();
                let out = QuantizedRows::new(device, m, width).unwrap();
                let rows = Rows::new(&buffer, m, width);
                run(device, &buffer, 0, |r| {
                    quantize(r, rows, None, scaling, &out)
                });
                let Rounded { codes: q, steps } = out.read(device, m, width, scaling).unwrap();
                let padded = width.next_multiple_of(256);
                for t in 0..m {
                    for (b, block) in x[t * width..(t + 1) * width].chunks(len).enumerate() {
                        let absmax = block.iter().fold(1e-20f32, |top, x| top.max(x.abs()));
                        let inverse = (1.0 / absmax) * 127.0;
                        for (run, x) in block.chunks(32).enumerate() {
                            let at = t * padded + b * len + run * 32;
                            let want = x.iter().map(|x| (x * inverse).round_ties_even() as i8);
                            let want: Vec<i8> = want.collect();
                            assert_eq!(q[at..][..want.len()], want);
                            let sum: i32 = want.iter().map(|q| i32::from(*q)).sum();
                            assert_eq!(steps[at / 32].1, sum);
                            assert_eq!(steps[at / 32].0.to_bits(), (1.0 / inverse).to_bits());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_embedded() {
    for device in devices() {
        for dtype in TYPES {
            let k = if dtype.block_len() == 1 {
                75
            } else {
                2 * dtype.block_len().max(64)
            };
            let n = 40;
            let bytes = encoded(dtype, n, k);
            let table = upload(device, dtype, n, k, &bytes);
            let ids = [9u32, 39, 0, 17, 40, 5];
            // With others in between.
            let apart: Vec<u32> = ids.iter().flat_map(|id| [*id, 1, 2]).collect();
            let ids_apart = Ids {
                buffer: device.upload(&apart).unwrap(),
                offset: 3,
                stride: 3,
            };
            let out = spread(device, &vec![-1.0; 5 * k], k, 3, k + 1);
            let got = run(device, &out, 3 + 5 * (k + 1), |r| {
                let rows = spread_rows(&out, 5, k, 3, k + 1);
                embed(r, &table, &ids_apart, 0.5, rows)
            });
            let mut decoded = vec![0.0; n * k];
            decode_row(dtype, &bytes, &mut decoded).unwrap();
            for (t, id) in ids[1..].iter().enumerate() {
                let got = &got[3 + t * (k + 1)..][..k];
                if *id as usize >= n {
                    assert_eq!(got, vec![-1.0; k], "a row that isn't there");
                    continue;
                }
                for (got, want) in got.iter().zip(&decoded[*id as usize * k..][..k]) {
                    // A difference that is fused isn't rounded before it is taken.
                    assert!((got - 0.5 * want).abs() <= 1e-7, "{dtype}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn matrices_beyond_the_limit_of_a_binding_are_cut() {
    if device().is_none() {
        return;
    }
    let options = DeviceOptions {
        max_binding_bytes: Some(16 << 10),
        ..DeviceOptions::default()
    };
    let device = Device::open(&options).unwrap();
    for dtype in TYPES {
        let (n, k) = (122, 512);
        let bytes = encoded(dtype, n, k);
        let w = upload(&device, dtype, n, k, &bytes);
        if bytes.len() > 20 << 10 {
            assert!(w.n_pieces() > 1, "{dtype}");
        }
        for (m, epilogue) in [(1, Epilogue::Store), (10, Epilogue::Add)] {
            check(&device, dtype, (n, k, m), epilogue);
        }
        let ids = Ids {
            buffer: device.upload(&[121u32, 0, 60]).unwrap(),
            offset: 0,
            stride: 1,
        };
        let out = device.buffer("out", 3 * 512 * 4).unwrap();
        let got = run(&device, &out, 3 * k, |r| {
            embed(r, &w, &ids, 1.0, Rows::new(&out, 3, k))
        });
        let mut decoded = vec![0.0; n * k];
        decode_row(dtype, &bytes, &mut decoded).unwrap();
        let want: Vec<f32> = [121, 0, 60]
            .iter()
            .flat_map(|id| decoded[id * k..][..k].to_vec())
            .collect();
        assert!(nmse(&got, &want) < 1e-13, "{dtype}");
    }
}
