//! Convolutions, scans and time mixing against the CPU, in calls of several lengths: what a state remembers comes from the slots.

use crate::common::{devices, floats, nmse, scalar, spread, spread_rows};
use sterna_gpu::kernels::recurrent::{
    Convolution, Gates, MAX_ROWS, MAX_TAPS, Mamba, Scan, ScanShape, Shift, State, StateLayer, Step,
    StepVectors, StepWeights, Wkv, Wkv4, WkvFinish, WkvInputs, WkvShape, can_step, convolve, mamba,
    previous, scan, scan_prepare, step, token_shift, wkv, wkv_finish, wkv_prepare, wkv4,
};
use sterna_gpu::kernels::{Rows, SequenceRows, Sequences, elementwise, sequence_table};
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, GpuError, Recorder};
use sterna_kernels::activation::{self, Activation};
use sterna_kernels::conv;
use sterna_kernels::delta::{self, DeltaInputs, DeltaShape, HeadOrder};
use sterna_kernels::mamba::{self as cpu_mamba, MambaInputs, MambaShape};
use sterna_kernels::rwkv::{
    self, Decay, Finish, Generation, Part, Rkv, RwkvShape, Shift as CpuShift, Wkv7Inputs,
};
use sterna_kernels::ssm::{self, SsmInputs, SsmShape};
use sterna_kernels::{State as CpuState, norm};

/// Calls of these many rows: one and several, some of which read and write the same slot.
const CHUNKS: [&[usize]; 3] = [&[13], &[1, 4, 1, 1, 5, 1], &[2, 8, 3]];
const M: usize = 13;
/// Rows of both sequences.
const BOTH: usize = 2 * M;
/// Values of the layer's state before the tested part, and after it.
const AROUND: usize = 3;

/// Rows of two sequences with the same.
fn twice(rows: &[f32]) -> Vec<f32> {
    rows.repeat(2)
}

/// Runs `record` for each of `chunks`, at positions from zero on, of two sequences: one has the first half of all rows, and
/// the other, which is a call behind, the second. Returns the state of both.
fn in_chunks(
    device: &Device,
    chunks: &[usize],
    n_state: usize,
    mut record: impl FnMut(&mut Recorder, State<'_>) -> Result<(), GpuError>,
) -> Vec<u8> {
    /// Places of the two, of three.
    const PLACES: [u32; 2] = [2, 0];
    let n_all = n_state + 2 * AROUND;
    let layer = StateLayer::new(device, n_all, 3).unwrap();
    let begins: Vec<usize> = (0..=chunks.len())
        .map(|i| chunks[..i].iter().sum())
        .collect();
    for call in 0..=chunks.len() {
        let own = |i: usize| {
            let chunk = call.checked_sub(i).filter(|chunk| *chunk < chunks.len())?;
            Some(SequenceRows {
                position: begins[chunk],
                first_row: i * M + begins[chunk],
                n_rows: chunks[chunk],
                first_angle: 0,
                pages: &[9],
                place: PLACES[i],
            })
        };
        let own: Vec<_> = [0, 1].into_iter().filter_map(own).collect();
        let other = SequenceRows {
            position: 77,
            place: 1,
            ..own[0]
        };
        let all = [&[other][..], &own].concat();
        let table = device.upload(&sequence_table(&all, 1)).unwrap();
        let state = State {
            layer: &layer,
            first: AROUND,
            sequences: Sequences {
                table: &table,
                n_all: all.len(),
                page_stride: 1,
                first: 1,
                n: own.len(),
                n_rows: own.iter().map(|own| own.n_rows).max().unwrap(),
            },
        };
        let mut recorder = Recorder::new(device);
        record(&mut recorder, state).unwrap();
        let commands = recorder.finish().unwrap();
        device.submit(&[&commands], &[]).unwrap().wait().unwrap();
    }
    let states = PLACES.map(|place| layer.read(device, place, M).unwrap());
    assert_eq!(states[0], states[1], "{chunks:?}");
    // What was kept at the end is that of another layer too, and so is what is copied to other places.
    let kept = layer.keep(device, PLACES[0], M).unwrap();
    let other = StateLayer::new(device, n_all, 4).unwrap();
    other.put_back(device, 3, M + 2, &kept).unwrap();
    assert_eq!(states[0], other.read(device, 3, M + 2).unwrap());
    let copy = layer.copy(&other, [1, 0], 2).unwrap();
    device.copy_all(&[copy]).unwrap();
    assert_eq!(states[0], other.read(device, 1, M).unwrap());
    assert!(layer.copy(&other, [2, 0], 2).is_err());
    states.into_iter().next().unwrap()
}

/// The rows of one sequence, of what both have alike.
fn of_one(device: &Device, rows: &Buffer, width: usize) -> Vec<f32> {
    let mut all: Vec<f32> = device.read(rows, 0..BOTH * width).unwrap();
    let second = all.split_off(M * width);
    assert_eq!(all, second);
    all
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    let error = nmse(got, want);
    assert!(error < 1e-10, "{what}: {error}");
}

#[test]
fn convolutions() {
    for device in devices() {
        for (dim, n_taps) in [(70, 3), (64, 4), (5, 1), (33, MAX_TAPS)] {
            for (is_gated, has_bias) in [(true, false), (false, false), (false, true)] {
                check_convolution(device, dim, n_taps, is_gated, has_bias);
            }
        }
    }
}

fn check_convolution(device: &Device, dim: usize, n_taps: usize, is_gated: bool, has_bias: bool) {
    let width = if is_gated { 3 * dim } else { dim };
    let (x, taps, bias) = (
        floats(M * width, 1),
        floats(dim * n_taps, 2),
        floats(dim, 3),
    );
    let n_state = (n_taps - 1) * dim;
    let (zeros, mut after, mut want) = (vec![0.0; n_state], vec![0.0; n_state], vec![0.0; M * dim]);
    let state = (&zeros[..], &mut after[..]);
    if is_gated {
        conv::gated(&scalar(), dim, &taps, &x, state, &mut want).unwrap();
    } else {
        let weights = (&taps[..], has_bias.then_some(&bias[..]));
        conv::silu(&scalar(), dim, weights, &x, state, &mut want).unwrap();
    }
    let (offset, stride) = (2, width + 5);
    let x = spread(device, &twice(&x), width, offset, stride);
    let x = spread_rows(&x, BOTH, width, offset, stride);
    let (taps, bias) = (device.upload(&taps).unwrap(), device.upload(&bias).unwrap());
    let convolution = Convolution {
        taps: &taps,
        n_taps,
        bias: has_bias.then_some(&bias),
        is_gated,
    };
    let mut all = Vec::new();
    for chunks in CHUNKS {
        let out = device.buffer("out", (BOTH * dim * 4) as u64).unwrap();
        let state = in_chunks(device, chunks, n_state, |recorder, state| {
            let out = Rows::new(&out, BOTH, dim);
            convolve(recorder, &convolution, x, state, out)
        });
        let out = of_one(device, &out, dim);
        let what = format!("{dim} x {n_taps} {is_gated} {has_bias} {chunks:?}");
        close(&what, &out, &want);
        close(&what, &floats_of(&state)[AROUND..AROUND + n_state], &after);
        all.push(out);
    }
    assert!(all.iter().all(|out| *out == all[0]), "{dim} x {n_taps}");
}

#[test]
fn delta_rules_and_state_spaces() {
    let shape = |n_heads, n_key_heads, key_dim, value_dim, is_tiled| ScanShape {
        n_heads,
        n_key_heads,
        key_dim,
        value_dim,
        is_tiled,
        is_delta: true,
    };
    for device in devices() {
        for shape in [
            shape(4, 2, 16, 24, false),
            shape(4, 2, 128, 16, true),
            shape(3, 3, 20, 9, false),
            shape(6, 3, MAX_ROWS, 8, true),
        ] {
            check_delta(device, &shape);
            let shape = ScanShape {
                is_delta: false,
                is_tiled: false,
                ..shape
            };
            check_ssm(device, &shape);
        }
    }
}

fn check_delta(device: &Device, shape: &ScanShape) {
    let cpu = DeltaShape {
        n_key_heads: shape.n_key_heads,
        n_value_heads: shape.n_heads,
        key_dim: shape.key_dim,
        value_dim: shape.value_dim,
        order: if shape.is_tiled {
            HeadOrder::Tiled
        } else {
            HeadOrder::Grouped
        },
    };
    let n = shape.n_heads;
    let (x, alpha, beta) = (
        floats(M * shape.channels(), 1),
        floats(M * n, 2),
        floats(M * n, 3),
    );
    let a: Vec<f32> = floats(n, 4).iter().map(|a| -a.abs()).collect();
    let dt_bias = floats(n, 5);
    let mut want = vec![0.0; M * cpu.values()];
    let mut state = vec![0.0; cpu.state()];
    let inputs = DeltaInputs {
        qkv: &mut x.clone(),
        alpha: &mut alpha.clone(),
        beta: &mut beta.clone(),
        a: &a,
        dt_bias: &dt_bias,
    };
    let state = CpuState::InPlace(&mut state);
    delta::delta_rule(&scalar(), &cpu, inputs, state, &mut want).unwrap();
    let beta = spread(device, &twice(&beta), n, 1, n + 2);
    let beta = spread_rows(&beta, BOTH, n, 1, n + 2);
    let given = (&alpha[..], Some(beta));
    check_scan(device, shape, &x, given, (&a, &dt_bias), None, &want);
}

fn check_ssm(device: &Device, shape: &ScanShape) {
    let cpu = SsmShape {
        n_heads: shape.n_heads,
        head_dim: shape.value_dim,
        state_dim: shape.key_dim,
        n_groups: shape.n_key_heads,
    };
    let n = shape.n_heads;
    let (x, dt) = (floats(M * shape.channels(), 1), floats(M * n, 2));
    let a: Vec<f32> = floats(n, 4).iter().map(|a| -a.abs()).collect();
    // The smallest time steps and those that are what is given, too.
    let dt_bias: Vec<f32> = (0..n).map(|i| [0.5, -9.0, 25.0, -30.0][i % 4]).collect();
    let d = floats(n, 6);
    let mut want = vec![0.0; M * cpu.inner()];
    let mut state = vec![0.0; cpu.state()];
    let inputs = SsmInputs {
        xbc: &x,
        dt: &mut dt.clone(),
        a: &a,
        d: &d,
        dt_bias: &dt_bias,
    };
    let state = CpuState::InPlace(&mut state);
    ssm::scan(&scalar(), &cpu, inputs, state, &mut want).unwrap();
    let d = device.upload(&d).unwrap();
    let given = (&dt[..], None);
    check_scan(device, shape, &x, given, (&a, &dt_bias), Some(&d), &want);
}

fn check_scan(
    device: &Device,
    shape: &ScanShape,
    x: &[f32],
    (steps, beta): (&[f32], Option<Rows<'_>>),
    (a, dt_bias): (&[f32], &[f32]),
    d: Option<&Buffer>,
    want: &[f32],
) {
    let (n, channels) = (shape.n_heads, shape.channels());
    let width = want.len() / M;
    let (a, dt_bias) = (device.upload(a).unwrap(), device.upload(dt_bias).unwrap());
    let steps = spread(device, &twice(steps), n, 2, n + 1);
    let given = Gates {
        steps: spread_rows(&steps, BOTH, n, 2, n + 1),
        beta,
        a: &a,
        dt_bias: &dt_bias,
    };
    let given_x = twice(x);
    let mut all = Vec::new();
    // Rows that are read as vectors, and others.
    for stride in [channels + 3, channels.next_multiple_of(4)] {
        let x = spread(device, &given_x, channels, 4, stride);
        let x = spread_rows(&x, BOTH, channels, 4, stride);
        let gates = device.buffer("gates", (BOTH * n * 16) as u64).unwrap();
        let mut recorder = Recorder::new(device);
        scan_prepare(&mut recorder, shape, x, &given, &gates).unwrap();
        let commands = recorder.finish().unwrap();
        device.submit(&[&commands], &[]).unwrap().wait().unwrap();
        for chunks in CHUNKS {
            let out = device.buffer("out", (BOTH * width * 4) as u64).unwrap();
            let state = in_chunks(device, chunks, shape.state(), |recorder, state| {
                let inputs = Scan {
                    x,
                    gates: &gates,
                    d,
                };
                scan(
                    recorder,
                    shape,
                    &inputs,
                    state,
                    Rows::new(&out, BOTH, width),
                )
            });
            let out = of_one(device, &out, width);
            close(&format!("{shape:?} {chunks:?}"), &out, want);
            all.push((out, state));
        }
    }
    let same = |(out, state): &(Vec<f32>, Vec<u8>)| (out, state) == (&all[0].0, &all[0].1);
    assert!(all.iter().all(same), "{shape:?}");
}

/// Positions one by one, from zero on, each in one dispatch, as a whole layer with a scan on the CPU.
#[test]
fn steps_of_layers_with_scans() {
    let shape = |n_heads, n_key_heads, key_dim, value_dim, is_tiled| ScanShape {
        n_heads,
        n_key_heads,
        key_dim,
        value_dim,
        is_tiled,
        is_delta: true,
    };
    for device in devices() {
        for (shape, n_taps) in [
            (shape(4, 2, 16, 24, false), 4),
            (shape(4, 2, 128, 128, true), 4),
            (shape(3, 3, 20, 9, false), 1),
            (shape(2, 1, 64, 150, false), 3),
            (shape(6, 3, MAX_ROWS, 8, true), MAX_TAPS),
        ] {
            check_step(device, &shape, n_taps, false);
            for has_bias in [false, true] {
                let shape = ScanShape {
                    is_delta: false,
                    is_tiled: false,
                    ..shape
                };
                check_step(device, &shape, n_taps, has_bias);
            }
        }
    }
}

fn check_step(device: &Device, shape: &ScanShape, n_taps: usize, has_bias: bool) {
    const EPS: f32 = 1e-5;
    let (n, channels) = (shape.n_heads, shape.channels());
    let values = n * shape.value_dim;
    let decays = |n| floats(n, 4).iter().map(|a| -a.abs()).collect::<Vec<f32>>();
    let (x, gate) = (floats(M * channels, 1), floats(M * values, 2));
    let (steps, betas) = (floats(M * n, 3), floats(M * n, 5));
    let (taps, bias) = (floats(channels * n_taps, 6), floats(channels, 7));
    let (a, dt_bias) = (decays(n), floats(n, 8));
    let last = floats(if shape.is_delta { shape.value_dim } else { n }, 9);
    let n_window = (n_taps - 1) * channels;
    // On the CPU.
    let (zeros, mut after) = (vec![0.0; n_window], vec![0.0; n_window]);
    let mut convolved = vec![0.0; M * channels];
    let state = (&zeros[..], &mut after[..]);
    let weights = (&taps[..], has_bias.then_some(&bias[..]));
    conv::silu(&scalar(), channels, weights, &x, state, &mut convolved).unwrap();
    let zeros = vec![0.0; shape.state()];
    let mut matrices = zeros.clone();
    let mut want = vec![0.0; M * values];
    let state = CpuState::Copied(&zeros, &mut matrices);
    let mut given = steps.clone();
    if shape.is_delta {
        let cpu = DeltaShape {
            n_key_heads: shape.n_key_heads,
            n_value_heads: n,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            order: match shape.is_tiled {
                true => HeadOrder::Tiled,
                false => HeadOrder::Grouped,
            },
        };
        let inputs = DeltaInputs {
            qkv: &mut convolved,
            alpha: &mut given,
            beta: &mut betas.clone(),
            a: &a,
            dt_bias: &dt_bias,
        };
        delta::delta_rule(&scalar(), &cpu, inputs, state, &mut want).unwrap();
        norm::rms_norm(&scalar(), &mut want, &last, EPS).unwrap();
    } else {
        let cpu = SsmShape {
            n_heads: n,
            head_dim: shape.value_dim,
            state_dim: shape.key_dim,
            n_groups: shape.n_key_heads,
        };
        let inputs = SsmInputs {
            xbc: &convolved,
            dt: &mut given,
            a: &a,
            d: &last,
            dt_bias: &dt_bias,
        };
        ssm::scan(&scalar(), &cpu, inputs, state, &mut want).unwrap();
    }
    let mut gated = gate.clone();
    activation::gate(&scalar(), Activation::Silu, &mut gated, &want).unwrap();
    // On the device: inputs in one buffer, as a joined projection gives them.
    let width = channels + values + 2 * n;
    let rows: Vec<f32> = (0..M)
        .flat_map(|t| {
            let parts = [(&x, channels), (&gate, values), (&steps, n), (&betas, n)];
            parts.map(|(part, width)| part[t * width..(t + 1) * width].to_vec())
        })
        .flatten()
        .collect();
    let rows = spread(device, &twice(&rows), width, 4, width + 3);
    let rows = spread_rows(&rows, BOTH, width, 4, width + 3);
    let uploaded = [&taps, &bias, &a, &dt_bias, &last].map(|v| device.upload(v).unwrap());
    let [taps, bias, a, dt_bias, last] = &uploaded;
    let vectors = StepVectors {
        taps,
        n_taps,
        bias: has_bias.then_some(bias),
        a,
        dt_bias,
        last,
    };
    assert!(can_step(device.limits(), shape));
    let weights = StepWeights::new(device, shape, &vectors).unwrap();
    let out = device.buffer("out", (BOTH * values * 4) as u64).unwrap();
    let state = in_chunks(device, &[1; M], n_window + shape.state(), |r, state| {
        let inputs = Step {
            x: rows.columns(0, channels),
            gate: rows.columns(channels, values),
            steps: rows.columns(channels + values, n),
            beta: shape
                .is_delta
                .then(|| rows.columns(channels + values + n, n)),
            eps: EPS,
        };
        step(r, &weights, &inputs, state, Rows::new(&out, BOTH, values))
    });
    let what = format!("{shape:?} {n_taps} {has_bias}");
    let out = of_one(device, &out, values);
    close(&what, &out, &gated);
    let state = floats_of(&state);
    let (window, own) = state[AROUND..AROUND + n_window + shape.state()].split_at(n_window);
    assert_eq!(window, after, "{what}");
    // The matrices have another order here.
    let sum = |values: &[f32]| values.iter().map(|v| f64::from(*v).abs()).sum::<f64>();
    let (got, want) = (sum(own), sum(&matrices));
    assert!((got - want).abs() <= 1e-5 * want, "{what}: {got} {want}");
}

#[test]
fn scans_of_channels() {
    for device in devices() {
        for (inner, state_dim) in [(70, 16), (8, 5), (33, 64)] {
            check_mamba(device, inner, state_dim);
        }
    }
}

fn check_mamba(device: &Device, inner: usize, state_dim: usize) {
    let shape = MambaShape {
        inner,
        state_dim,
        dt_rank: 1,
    };
    let (x, dt) = (floats(M * inner, 1), floats(M * inner, 2));
    let (b, c) = (floats(M * state_dim, 3), floats(M * state_dim, 4));
    let a: Vec<f32> = (floats(shape.state(), 5).iter())
        .map(|a| -a.abs())
        .collect();
    let d = floats(inner, 6);
    let mut after = vec![0.0; shape.state()];
    let mut want = vec![0.0; M * inner];
    let inputs = MambaInputs {
        x: &x,
        dt: &dt,
        b: &b,
        c: &c,
        a: &a,
        d: &d,
    };
    let state = CpuState::InPlace(&mut after);
    cpu_mamba::scan(&scalar(), &shape, &inputs, state, &mut want).unwrap();
    let buffers = [
        spread(device, &twice(&x), inner, 1, inner + 2),
        spread(device, &twice(&dt), inner, 1, inner + 2),
        spread(device, &twice(&b), state_dim, 1, state_dim + 2),
        spread(device, &twice(&c), state_dim, 1, state_dim + 2),
    ];
    let (a, d) = (device.upload(&a).unwrap(), device.upload(&d).unwrap());
    let of = |i: usize, width| spread_rows(&buffers[i], BOTH, width, 1, width + 2);
    let inputs = Mamba {
        dt: of(1, inner),
        b: of(2, state_dim),
        c: of(3, state_dim),
        a: &a,
        d: &d,
    };
    let mut all = Vec::new();
    for chunks in CHUNKS {
        let out = device.buffer("out", (BOTH * inner * 4) as u64).unwrap();
        let mut recorder = Recorder::new(device);
        let rows = Rows::new(&out, BOTH, inner);
        elementwise::copy(&mut recorder, rows, of(0, inner)).unwrap();
        let commands = recorder.finish().unwrap();
        device.submit(&[&commands], &[]).unwrap().wait().unwrap();
        let state = in_chunks(device, chunks, shape.state(), |recorder, state| {
            mamba(recorder, &inputs, state, rows)
        });
        let out = of_one(device, &out, inner);
        let what = format!("{inner} x {state_dim} {chunks:?}");
        close(&what, &out, &want);
        close(
            &what,
            &floats_of(&state)[AROUND..AROUND + shape.state()],
            &after,
        );
        all.push(out);
    }
    assert!(
        all.iter().all(|out| *out == all[0]),
        "{inner} x {state_dim}"
    );
}

/// Mixes of several factors read the same position before, though the first of them replaces it.
#[test]
fn positions_are_mixed_with_those_before() {
    for device in devices() {
        for (width, of_itself, is_added) in
            [(70, false, false), (64, true, false), (5, false, true)]
        {
            let (x, added) = (floats(M * width, 1), floats(M * width, 2));
            let factors = [floats(width, 3), floats(width, 4)];
            let want = [0, 1].map(|i| {
                let (zeros, mut after) = (vec![0.0; width], vec![0.0; width]);
                let mut out = vec![0.0; M * width];
                let shift = CpuShift {
                    factors: &factors[i],
                    added: is_added.then_some(&added[..]),
                    of_itself,
                };
                rwkv::token_shift(&scalar(), &shift, &x, (&zeros, &mut after), &mut out).unwrap();
                out
            });
            let last = x[(M - 1) * width..].to_vec();
            let x = spread(device, &twice(&x), width, 2, width + 5);
            let x_rows = spread_rows(&x, BOTH, width, 2, width + 5);
            let added = spread(device, &twice(&added), width, 1, width + 1);
            let added = spread_rows(&added, BOTH, width, 1, width + 1);
            let factors = factors
                .each_ref()
                .map(|factors| device.upload(factors).unwrap());
            for chunks in CHUNKS {
                let bytes = (BOTH * width * 4) as u64;
                let outs = [0, 1].map(|_| device.buffer("out", bytes).unwrap());
                let before = device.buffer("before", bytes).unwrap();
                let state = in_chunks(device, chunks, width, |recorder, state| {
                    previous(recorder, x_rows, state, &before)?;
                    for (factors, out) in factors.iter().zip(&outs) {
                        let shift = Shift {
                            sequences: state.sequences,
                            previous: &before,
                            factors,
                            added: is_added.then_some(added),
                            of_itself,
                        };
                        token_shift(recorder, &shift, x_rows, Rows::new(out, BOTH, width))?;
                    }
                    Ok(())
                });
                for (out, want) in outs.iter().zip(&want) {
                    let out = of_one(device, out, width);
                    close(&format!("{width} {chunks:?}"), &out, want);
                }
                assert_eq!(floats_of(&state)[AROUND..AROUND + width], last);
            }
        }
    }
}

#[test]
fn time_mixing_of_every_generation() {
    use Generation::{V4, V5, V6, V7};
    for device in devices() {
        for (n_heads, head_dim) in [(2, 64), (3, 20), (1, MAX_ROWS), (2, 1)] {
            for generation in [V4, V5, V6, V7] {
                check_time_mixing(
                    device,
                    &RwkvShape {
                        generation,
                        n_heads,
                        head_dim,
                    },
                );
            }
        }
    }
}

/// Inputs of time mixing, `[M, inner]`, and its parameters, `[inner]`.
struct TimeMixing {
    r: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
    decay: Vec<f32>,
    rate: Vec<f32>,
    factors: [Vec<f32>; 5],
}

const EPS: f32 = 0.1;

/// What the CPU computes, and the state after it.
fn expected_mixing(shape: &RwkvShape, inputs: &TimeMixing) -> (Vec<f32>, Vec<f32>) {
    let n = shape.part(Part::Memory).len();
    let mut after = vec![0.0; n];
    let mut out = vec![0.0; M * shape.inner()];
    let [a, b, c, d, e] = &inputs.factors;
    let rkv = Rkv {
        r: &inputs.r,
        k: &inputs.k,
        v: &inputs.v,
    };
    let finish = Finish {
        weight: a,
        bias: b,
        eps: EPS,
        gate: &inputs.gate,
    };
    let state = CpuState::InPlace(&mut after);
    let mut decay = inputs.decay.clone();
    let exec = scalar();
    match shape.generation {
        Generation::V4 => {
            let mut copy = Vec::new();
            rwkv::wkv4(&exec, &rkv, (c, d), state.copied(&mut copy), &mut out)
        }
        Generation::V5 => {
            let factors = (Decay::Fixed(c), &d[..]);
            rwkv::wkv6(&exec, shape, &rkv, factors, &finish, state, &mut out)
        }
        Generation::V6 => {
            let factors = (Decay::Given(&mut decay), &d[..]);
            rwkv::wkv6(&exec, shape, &rkv, factors, &finish, state, &mut out)
        }
        Generation::V7 => {
            let inputs = Wkv7Inputs {
                decay: &mut decay,
                rate: &mut inputs.rate.clone(),
                k: &mut inputs.k.clone(),
                forgotten: &mut vec![0.0; out.len()],
                r: &inputs.r,
                v: &inputs.v,
                k_k: c,
                k_a: d,
                r_k: e,
            };
            rwkv::wkv7(&exec, shape, inputs, &finish, state, &mut out)
        }
    }
    .unwrap();
    (out, after)
}

fn check_time_mixing(device: &Device, shape: &RwkvShape) {
    let inner = shape.inner();
    let rows = |seed| floats(M * inner, seed);
    let mut inputs = TimeMixing {
        r: rows(1),
        k: rows(2),
        v: rows(3),
        gate: rows(4),
        decay: rows(5),
        rate: rows(6),
        factors: [7, 8, 9, 10, 11].map(|seed| floats(inner, seed)),
    };
    // Exponentials overflow there.
    (inputs.decay[0], inputs.decay[inner], inputs.rate[0]) = (100.0, -100.0, -100.0);
    (inputs.gate[0], inputs.factors[2][0]) = (-100.0, 100.0);
    let (want, after) = expected_mixing(shape, &inputs);
    let TimeMixing {
        r,
        k,
        v,
        gate,
        decay,
        rate,
        factors,
    } = &inputs;
    let [r, k, v, gate, decay, rate] =
        [r, k, v, gate, decay, rate].map(|x| spread(device, &twice(x), inner, 3, inner + 2));
    let [a, b, c, d, e] = factors.each_ref().map(|x| device.upload(x).unwrap());
    let is_fourth = shape.generation == Generation::V4;
    let heads = WkvShape {
        n_heads: shape.n_heads,
        head_dim: shape.head_dim,
        is_seventh: shape.generation == Generation::V7,
    };
    let mut all = Vec::new();
    for chunks in CHUNKS {
        let bytes = (BOTH * inner * 4) as u64;
        let [out, given] = [0, 1].map(|_| device.buffer("out", bytes).unwrap());
        let prepared = device.buffer("prepared", 4 * bytes).unwrap();
        let state = in_chunks(device, chunks, after.len(), |recorder, state| {
            let of = |x| spread_rows(x, BOTH, inner, 3, inner + 2);
            let rows = |buffer| Rows::new(buffer, BOTH, inner);
            if is_fourth {
                let inputs = Wkv4 {
                    r: of(&r),
                    k: of(&k),
                    v: of(&v),
                    decay: &c,
                    first: &d,
                };
                return wkv4(recorder, &inputs, state, rows(&out));
            }
            let factors = match shape.generation {
                Generation::V5 => WkvInputs::Fixed(&c, &d),
                Generation::V6 => WkvInputs::Given(of(&decay), &d),
                _ => WkvInputs::Seventh {
                    decay: of(&decay),
                    rate: of(&rate),
                    k_k: &c,
                    k_a: &d,
                },
            };
            let inputs = Wkv {
                r: of(&r),
                prepared: Rows::new(&prepared, BOTH, 4 * inner),
                v: of(&v),
            };
            wkv_prepare(recorder, &heads, of(&k), &factors, inputs.prepared)?;
            wkv(recorder, &heads, &inputs, state, rows(&given))?;
            // Those of other calls are finished anew.
            elementwise::copy(recorder, rows(&out), rows(&given))?;
            let finish = WkvFinish {
                weight: &a,
                bias: &b,
                eps: EPS,
                gate: of(&gate),
                r_k: heads.is_seventh.then_some(&e),
            };
            wkv_finish(recorder, &heads, &inputs, &finish, rows(&out))
        });
        let out = of_one(device, &out, inner);
        let what = format!("{shape:?} {chunks:?}");
        close(&what, &out, &want);
        // The values are those of the CPU's state, of matrices in another order.
        let (mut state, mut after) = (
            floats_of(&state)[AROUND..AROUND + after.len()].to_vec(),
            after.clone(),
        );
        if !is_fourth {
            state.sort_by(f32::total_cmp);
            after.sort_by(f32::total_cmp);
        }
        close(&what, &state, &after);
        all.push((out, state));
    }
    assert!(all.iter().all(|one| *one == all[0]), "{shape:?}");
}

/// e^−200 is no f32, and the mean of values that it weighs is.
#[test]
fn a_mean_of_tiny_weights_is_one() {
    for device in devices() {
        let [r, k, v] = [[100.0f32; 2], [-200.0, -201.0], [3.0, 5.0]];
        let rows = |x: [f32; 2]| [&x[..], &[0.0; M - 2]].concat();
        let [r, k, v] = [r, k, v].map(|x| device.upload(&twice(&rows(x))).unwrap());
        let (decay, first) = (device.upload(&[-50.0f32]), device.upload(&[0.0f32]));
        let (decay, first) = (decay.unwrap(), first.unwrap());
        let out = device.buffer("out", BOTH as u64 * 4).unwrap();
        in_chunks(device, &[2, M - 2], 3, |recorder, state| {
            let inputs = Wkv4 {
                r: Rows::new(&r, BOTH, 1),
                k: Rows::new(&k, BOTH, 1),
                v: Rows::new(&v, BOTH, 1),
                decay: &decay,
                first: &first,
            };
            wkv4(recorder, &inputs, state, Rows::new(&out, BOTH, 1))
        });
        let out: Vec<f32> = device.read(&out, 0..2).unwrap();
        let second = (3.0 + 5.0 * f32::exp(-1.0)) / (1.0 + f32::exp(-1.0));
        close("tiny", &out, &[3.0, second]);
    }
}

/// One sequence of `n_rows`, whose table is `table`.
fn one(table: &Buffer, n_rows: usize) -> Sequences<'_> {
    Sequences {
        table,
        n_all: 1,
        page_stride: 1,
        first: 0,
        n: 1,
        n_rows,
    }
}

#[test]
fn time_mixing_that_doesnt_fit_is_refused() {
    let Some(device) = devices().first() else {
        return;
    };
    let [a, b, c] = [0, 1, 2].map(|_| device.buffer("rows", 1 << 20).unwrap());
    let layer = StateLayer::new(device, 2048, 1).unwrap();
    let sequences = one(&b, 2);
    let at = |first| State {
        layer: &layer,
        first,
        sequences,
    };
    let small = device.buffer("small", 64).unwrap();
    let mut recorder = Recorder::new(device);
    let (x, out) = (Rows::new(&a, 2, 64), Rows::new(&c, 2, 64));
    let expect = |name: &str, result: Result<(), GpuError>| {
        let found = result.map_or_else(|error| format!("{error:?}"), |()| String::new());
        assert!(found.starts_with(name), "{name}: {found}");
        assert_eq!(found.is_empty(), name.is_empty(), "{name}: {found}");
    };
    expect("", previous(&mut recorder, x, at(0), &b));
    expect("Shape", previous(&mut recorder, x, at(2048 - 63), &b));
    expect("Shape", previous(&mut recorder, x, at(0), &small));
    let too_many = State {
        sequences: one(&b, 3),
        ..at(0)
    };
    expect("Shape", previous(&mut recorder, x, too_many, &b));
    let shift = |factors, added| Shift {
        sequences,
        previous: &b,
        factors,
        added,
        of_itself: false,
    };
    let narrow = Rows::new(&b, 2, 63);
    for (name, factors, added) in [
        ("", &b, None),
        ("Shape", &small, None),
        ("Shape", &b, Some(narrow)),
    ] {
        let result = token_shift(&mut recorder, &shift(factors, added), x, out);
        expect(name, result);
    }
    for (name, v, first) in [("", x, 0), ("Shape", narrow, 0), ("Shape", x, 2000)] {
        let inputs = Wkv4 {
            r: x,
            k: x,
            v,
            decay: &b,
            first: &b,
        };
        expect(name, wkv4(&mut recorder, &inputs, at(first), out));
    }
    let shape = |head_dim, is_seventh| WkvShape {
        n_heads: 64 / head_dim,
        head_dim,
        is_seventh,
    };
    let prepared = Rows::new(&b, 2, 256);
    let k = Rows::new(&a, 2, 64);
    let fixed = WkvInputs::Fixed(&a, &a);
    for (name, is_seventh, prepared) in [
        ("", false, prepared),
        ("Shape", true, prepared),
        ("Shape", false, Rows::new(&b, 2, 64)),
        ("Shape", false, prepared.columns(1, 256)),
    ] {
        let shape = shape(32, is_seventh);
        let result = wkv_prepare(&mut recorder, &shape, k, &fixed, prepared);
        expect(name, result);
    }
    let wide = WkvShape {
        n_heads: 1,
        head_dim: MAX_ROWS + 1,
        is_seventh: false,
    };
    for (name, shape, first) in [
        ("", shape(32, false), 0),
        ("Unsupported", wide, 0),
        ("Shape", shape(64, false), 0),
        ("Shape", shape(32, false), 1),
    ] {
        let inputs = Wkv {
            r: x,
            prepared,
            v: x,
        };
        expect(name, wkv(&mut recorder, &shape, &inputs, at(first), out));
    }
    let finish = |gate, r_k| WkvFinish {
        weight: &a,
        bias: &a,
        eps: EPS,
        gate,
        r_k,
    };
    for (name, is_seventh, gate, r_k) in [
        ("", true, x, Some(&a)),
        ("Shape", true, x, None),
        ("Shape", false, narrow, None),
    ] {
        let (shape, inputs) = (
            shape(32, is_seventh),
            Wkv {
                r: x,
                prepared,
                v: x,
            },
        );
        let result = wkv_finish(&mut recorder, &shape, &inputs, &finish(gate, r_k), out);
        expect(name, result);
    }
}

#[test]
fn shapes_that_dont_fit_are_refused() {
    let Some(device) = devices().first() else {
        return;
    };
    let buffer = device.buffer("rows", 1 << 16).unwrap();
    let layer = StateLayer::new(device, 64, 1).unwrap();
    let most = StateLayer::most_places(device, 64);
    let error = StateLayer::new(device, 64, most + 1).unwrap_err();
    assert!(matches!(error, GpuError::Unsupported { .. }), "{error:?}");
    let state = State {
        layer: &layer,
        first: 0,
        sequences: one(&buffer, 2),
    };
    let out = device.buffer("out", 1 << 16).unwrap();
    let mut recorder = Recorder::new(device);
    let convolution = |n_taps| Convolution {
        taps: &buffer,
        n_taps,
        bias: None,
        is_gated: false,
    };
    let (x, out) = (Rows::new(&buffer, 2, 32), Rows::new(&out, 2, 32));
    for (n_taps, name) in [(0, "Unsupported"), (9, "Unsupported"), (4, "Shape")] {
        let error = convolve(&mut recorder, &convolution(n_taps), x, state, out).unwrap_err();
        assert!(
            format!("{error:?}").starts_with(name),
            "{n_taps}: {error:?}"
        );
    }
    convolve(&mut recorder, &convolution(3), x, state, out).unwrap();
    let shape = |key_dim| ScanShape {
        n_heads: 1,
        n_key_heads: 1,
        key_dim,
        value_dim: 32,
        is_tiled: false,
        is_delta: false,
    };
    for (key_dim, name) in [(MAX_ROWS + 1, "Unsupported"), (3, "Shape"), (2, "")] {
        let shape = shape(key_dim);
        let inputs = Scan {
            x: Rows::new(&buffer, 2, shape.channels()),
            gates: out.buffer,
            d: Some(&buffer),
        };
        let result = scan(&mut recorder, &shape, &inputs, state, out);
        let found = result.map_or_else(|error| format!("{error:?}"), |()| String::new());
        assert!(found.starts_with(name), "{key_dim}: {found}");
        assert_eq!(found.is_empty(), name.is_empty(), "{key_dim}: {found}");
    }
    let (shape, x_rows) = (shape(2), Rows::new(&buffer, 2, 36));
    let gates = |width, beta| Gates {
        steps: Rows::new(&buffer, 2, width),
        beta,
        a: &buffer,
        dt_bias: &buffer,
    };
    for (name, gates) in [
        ("", gates(1, None)),
        ("Shape", gates(2, None)),
        ("Shape", gates(1, Some(x))),
    ] {
        let result = scan_prepare(&mut recorder, &shape, x_rows, &gates, out.buffer);
        let found = result.map_or_else(|error| format!("{error:?}"), |()| String::new());
        assert!(found.starts_with(name), "{found}");
        assert_eq!(found.is_empty(), name.is_empty(), "{found}");
    }
    let inputs = Mamba {
        dt: Rows::new(&buffer, 2, 32),
        b: Rows::new(&buffer, 2, 3),
        c: Rows::new(&buffer, 2, 3),
        a: &buffer,
        d: &buffer,
    };
    let error = mamba(&mut recorder, &inputs, state, out).unwrap_err();
    assert!(matches!(error, GpuError::Shape { .. }), "{error:?}");
}
