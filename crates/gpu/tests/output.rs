//! From logits to tokens.

use std::ops::Range;

use crate::common::{Random, device, devices, floats, run};
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::attention::Position;
use sterna_gpu::kernels::output::{
    Draw, Penalties, STATE_LEN, Samplers, TopK, Weights, log_probability, mask, mask_len, penalize,
    perturb, sample, sample_of_all, top_k, weigh,
};
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, Recorder};

/// Runs `record`.
fn run_all(
    device: &Device,
    record: impl FnOnce(&mut Recorder) -> Result<(), sterna_gpu::GpuError>,
) {
    let nothing = device.buffer("nothing", 16).unwrap();
    run(device, &nothing, 0, record);
}

/// The state of a sequence at a position, whose last token is 5.
fn state(position: u32, row: u32, seed: u64) -> [u32; STATE_LEN] {
    let mut state = [77; STATE_LEN];
    state[..3].copy_from_slice(&[position, 5, row]);
    state[6..].copy_from_slice(&[seed as u32, (seed >> 32) as u32]);
    state
}

/// The one row of logits, sampled for one sequence.
fn one<'a>(logits: &'a Buffer, width: usize, states: &'a Buffer) -> Samplers<'a> {
    Samplers {
        logits: Rows::new(logits, 1, width),
        states,
        first: 0,
        n: 1,
    }
}

fn best_of(device: &Device, logits: &[f32], k: usize) -> Vec<(f32, u32)> {
    let buffer = device.upload(logits).unwrap();
    let states = device.upload(&state(0, 0, 0)).unwrap();
    let room = TopK::new(device, logits.len(), k, 1).unwrap();
    run_all(device, |r| {
        top_k(r, one(&buffer, logits.len(), &states), &room)
    });
    let pairs: Vec<[u32; 2]> = device.read(room.best(), 0..k).unwrap();
    pairs
        .into_iter()
        .map(|[bits, id]| (f32::from_bits(bits), id))
        .collect()
}

/// By a full sort.
fn expected(logits: &[f32], k: usize) -> Vec<(f32, u32)> {
    let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let value = |v: f32| {
        if v.is_nan() {
            f32::NEG_INFINITY
        } else {
            v + 0.0
        }
    };
    all.sort_by(|a, b| {
        let nan = a.0.is_nan().cmp(&b.0.is_nan());
        nan.then(value(b.0).total_cmp(&value(a.0)))
            .then(a.1.cmp(&b.1))
    });
    all.resize(k.max(all.len()), (f32::NEG_INFINITY, u32::MAX));
    all[..k].iter().map(|(v, id)| (value(*v), *id)).collect()
}

#[test]
fn the_best_are_found_in_order() {
    for device in devices().iter().take(2) {
        for (n, k) in [
            (1, 1),
            (5, 8),
            (1023, 40),
            (1025, 256),
            (32_000, 1),
            (128_256, 40),
            (151_936, 256),
        ] {
            // Many equal values.
            let mut random = Random::new(n as u64);
            let mut logits: Vec<f32> = (0..n).map(|_| random.below(5000) as f32 - 2500.0).collect();
            logits[n / 2] = f32::NAN;
            logits[n / 3] = -0.0;
            assert_eq!(best_of(device, &logits, k), expected(&logits, k), "{n} {k}");
        }
        let none = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY];
        assert_eq!(best_of(device, &none, 4), expected(&none, 4));
    }
}

/// Rows of logits that are read in another order, by states behind others.
#[test]
fn masks_and_log_probabilities_are_those_of_the_definition() {
    for device in devices().iter().take(2) {
        for (n_vocab, stride) in [(1, 4), (33, 36), (1025, 1028), (5000, 5003)] {
            let mut rows = floats(3 * stride, n_vocab as u64);
            rows.iter_mut().for_each(|logit| *logit *= 20.0);
            rows[stride + n_vocab / 2] = f32::NEG_INFINITY;
            rows[2 * stride] = f32::NAN;
            // Of each state the row, and the token that was drawn; nothing is read of the first.
            let members = [
                (9, 0),
                (2, n_vocab as u32 - 1),
                (0, n_vocab as u32 / 3),
                (1, 0),
            ];
            let states = members.map(|(row, token)| {
                let mut state = state(7, row, 3);
                state[1] = token;
                state
            });
            let states = device.upload(states.as_flattened()).unwrap();
            let logits = device.upload(&rows).unwrap();
            let samplers = Samplers {
                logits: Rows {
                    stride,
                    ..Rows::new(&logits, 3, n_vocab)
                },
                states: &states,
                first: 1,
                n: 3,
            };
            let weights = Weights::new(device, n_vocab, 3).unwrap();
            let out = device.buffer("out", 24).unwrap();
            run_all(device, |r| {
                weigh(r, samplers, 1.0, &weights)?;
                log_probability(r, samplers, &weights, &out)
            });
            let found: Vec<[f32; 2]> = device.read(&out, 0..3).unwrap();
            for ((row, token), [logit, log_total]) in members[1..].iter().zip(found) {
                let own = &rows[*row as usize * stride..][..n_vocab];
                assert_eq!(logit.to_bits(), own[*token as usize].to_bits());
                let numbers = own.iter().filter(|logit| logit.is_finite());
                let numbers: Vec<f64> = numbers.map(|logit| f64::from(*logit)).collect();
                let most = numbers.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
                let total: f64 = numbers.iter().map(|logit| (logit - most).exp()).sum();
                // Without a number there is nothing to tell: who reads it has the largest logit.
                if !numbers.is_empty() {
                    let want = total.ln();
                    assert!(
                        (f64::from(log_total) - want).abs() < 1e-5,
                        "{log_total} {want}"
                    );
                }
            }

            let n_words = mask_len(n_vocab);
            let mut random = Random::new(n_vocab as u64);
            let words: Vec<u32> = (0..4 * n_words)
                .map(|_| random.next() << 1 ^ random.next())
                .collect();
            let masks = device.upload(&words).unwrap();
            run_all(device, |r| mask(r, samplers, &masks));
            let masked: Vec<f32> = device.read(&logits, 0..rows.len()).unwrap();
            for (member, (row, _)) in members.iter().enumerate().skip(1) {
                for i in 0..n_vocab {
                    let at = *row as usize * stride + i;
                    let is_allowed = words[member * n_words + i / 32] >> (i % 32) & 1 == 1;
                    let want = if is_allowed {
                        rows[at]
                    } else {
                        f32::NEG_INFINITY
                    };
                    assert_eq!(masked[at].to_bits(), want.to_bits(), "{member} {i}");
                }
                // What is between rows stays.
                let between = *row as usize * stride + n_vocab..(*row as usize + 1) * stride;
                assert_eq!(masked[between.clone()], rows[between]);
            }
            let few = device.upload(&words[..3 * n_words]).unwrap();
            let mut recorder = Recorder::new(device);
            if few.bytes() < 16 * n_words as u64 {
                assert!(mask(&mut recorder, samplers, &few).is_err());
            }
        }
    }
}

#[test]
fn penalties_are_those_of_the_definition() {
    for device in devices().iter().take(2) {
        let n = 100;
        let logits = floats(n, 3);
        let tokens = [7u32, 7, 5, 99, 7, 3, 3, 1000, 42];
        let biases = [(5u32, 0.25f32), (50, -1.0)];
        for (position, window) in [(8u32, 64), (6, 4), (0, 1), (7, 0)] {
            let buffer = device.upload(&logits).unwrap();
            let ids = device.upload(&tokens).unwrap();
            let words: Vec<u32> = biases
                .iter()
                .flat_map(|(id, b)| [*id, b.to_bits()])
                .collect();
            let bias_buffer = device.upload(&words).unwrap();
            let state = device.upload(&[0, position]).unwrap();
            let penalties = Penalties {
                repeat: 1.5,
                frequency: 0.1,
                presence: 0.2,
                window,
                biases: Some(&bias_buffer),
            };
            let position_of = Position {
                buffer: &state,
                index: 1,
            };
            run_all(device, |r| {
                penalize(r, Rows::new(&buffer, 1, n), &penalties, &ids, position_of)
            });
            let got: Vec<f32> = device.read(&buffer, 0..n).unwrap();
            let mut want = logits.clone();
            for (id, bias) in biases {
                want[id as usize] += bias;
            }
            let end = position as usize + 1;
            let seen = &tokens[end.saturating_sub(window)..end];
            for (id, logit) in want.iter_mut().enumerate() {
                let count = seen.iter().filter(|t| **t as usize == id).count();
                if count > 0 {
                    *logit = if *logit > 0.0 {
                        *logit / 1.5
                    } else {
                        *logit * 1.5
                    };
                    *logit -= count as f32 * 0.1 + 0.2;
                }
            }
            for (id, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!((got - want).abs() < 1e-6, "{id}: {got} {want}");
            }
        }
    }
}

#[test]
fn a_position_behind_the_tokens_is_taken_for_the_last() {
    for device in devices().iter().take(2) {
        let tokens = device.upload(&[0u32, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let penalties = Penalties {
            repeat: 2.0,
            frequency: 0.0,
            presence: 0.0,
            window: 3,
            biases: None,
        };
        for position in [7u32, 8, 1000, u32::MAX] {
            let logits = device.upload(&[1.0f32; 12]).unwrap();
            let state = device.upload(&[position]).unwrap();
            let position = Position {
                buffer: &state,
                index: 0,
            };
            run_all(device, |r| {
                penalize(r, Rows::new(&logits, 1, 12), &penalties, &tokens, position)
            });
            let got: Vec<f32> = device.read(&logits, 0..12).unwrap();
            let want: Vec<f32> = (0..12)
                .map(|id| if (5..8).contains(&id) { 0.5 } else { 1.0 })
                .collect();
            assert_eq!(got, want);
        }
    }
}

/// Draws `n` tokens, each from the same logits.
fn draws(
    device: &Device,
    logits: &[f32],
    k: usize,
    (draw, seed): (&Draw, u64),
    n: usize,
) -> Vec<u32> {
    let buffer = device.upload(logits).unwrap();
    let room = TopK::new(device, logits.len(), k, 1).unwrap();
    let before = state(0, 0, seed);
    let states = device.upload(&before).unwrap();
    let tokens = device.upload(&vec![u32::MAX; n + 4]).unwrap();
    let samplers = one(&buffer, logits.len(), &states);
    let mut recorder = Recorder::new(device);
    top_k(&mut recorder, samplers, &room).unwrap();
    sample(&mut recorder, samplers, &room, draw, Some(&tokens)).unwrap();
    let commands = recorder.finish().unwrap();
    let many = vec![&commands; n];
    device.submit(&many, &[]).unwrap().wait().unwrap();
    let drawn: Vec<u32> = device.read(&tokens, 0..n + 4).unwrap();
    // Positions count from 1, as 0 is that of the previous token.
    assert_eq!((drawn[0], drawn[n + 1]), (u32::MAX, u32::MAX));
    let state: Vec<u32> = device.read(&states, 0..STATE_LEN).unwrap();
    assert_eq!(state[..2], [n as u32, drawn[n]]);
    assert_eq!(state[2..], before[2..]);
    drawn[1..=n].to_vec()
}

const DRAW: Draw = Draw {
    temperature: 1.0,
    top_p: 1.0,
    min_p: 0.0,
};

#[test]
fn tokens_are_drawn_by_their_weights() {
    let Some(device) = device() else { return };
    let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
    let n = 1000;
    let shares = |draw: Draw, k: usize| -> [f64; 4] {
        let drawn = draws(device, &logits, k, (&draw, 1 << 40), n);
        let count = |id: u32| drawn.iter().filter(|d| **d == id).count() as f64 / n as f64;
        std::array::from_fn(|id| count(id as u32))
    };
    // Four standard deviations of 1000 draws are 0.064 at most.
    let near = |got: [f64; 4], want: [f64; 4]| {
        let all = got
            .iter()
            .zip(want)
            .all(|(g, w)| (g - w).abs() < 0.064 && (w > 0.0 || *g == 0.0));
        assert!(all, "{got:?}, not {want:?}");
    };
    near(shares(DRAW, 4), [0.5, 0.3, 0.15, 0.05]);
    near(shares(DRAW, 2), [0.625, 0.375, 0.0, 0.0]);
    near(
        shares(
            Draw {
                top_p: 0.75,
                ..DRAW
            },
            4,
        ),
        [0.625, 0.375, 0.0, 0.0],
    );
    near(
        shares(
            Draw {
                top_p: 0.85,
                ..DRAW
            },
            4,
        ),
        [0.526, 0.316, 0.158, 0.0],
    );
    near(
        shares(Draw { min_p: 0.2, ..DRAW }, 4),
        [0.526, 0.316, 0.158, 0.0],
    );
    near(
        shares(
            Draw {
                top_p: 1e-6,
                ..DRAW
            },
            4,
        ),
        [1.0, 0.0, 0.0, 0.0],
    );
    // At half the temperature probabilities are squared.
    near(
        shares(
            Draw {
                temperature: 0.5,
                ..DRAW
            },
            4,
        ),
        [0.685, 0.247, 0.062, 0.007],
    );
    near(
        shares(
            Draw {
                temperature: 0.0,
                ..DRAW
            },
            4,
        ),
        [1.0, 0.0, 0.0, 0.0],
    );
}

#[test]
fn seeds_decide() {
    let Some(device) = device() else { return };
    let logits = floats(500, 2);
    let of = |seed| draws(device, &logits, 100, (&DRAW, seed), 40);
    assert_eq!(of(3), of(3));
    assert_ne!(of(3), of(4));
    assert_ne!(of(3), of(3 + (1 << 32)));
}

#[test]
fn logits_that_are_no_numbers() {
    let Some(device) = device() else { return };
    let one = |logits: &[f32]| drawn(device, logits, 3, Method::These, &DRAW);
    assert_eq!(one(&[f32::NEG_INFINITY; 5]), None);
    assert_eq!(one(&[f32::NAN; 5]), None);
    assert_eq!(one(&[0.0, f32::INFINITY, f32::NAN]), None);
    assert_eq!(one(&[f32::NAN, f32::NEG_INFINITY, -3.0]), Some(2));
    let noise = |logits: &[f32]| drawn(device, logits, 1, Method::Noise, &DRAW);
    assert_eq!(noise(&[f32::NAN; 5]), None);
    assert_eq!(noise(&[f32::NEG_INFINITY, f32::INFINITY]), None);
    assert_eq!(noise(&[f32::NAN, f32::NEG_INFINITY, -3.0]), Some(2));
}

/// How a token is drawn.
#[derive(Clone, Copy)]
enum Method {
    /// From the top tokens.
    These,
    /// From all, given the top ones.
    All,
    /// By Gumbel-max.
    Noise,
}

/// The token drawn at a position; `None` if the sequence stays where it is.
fn drawn_at(
    device: &Device,
    logits: &[f32],
    k: usize,
    method: Method,
    draw: &Draw,
    (position, seed): (u32, u64),
) -> Option<u32> {
    let buffer = device.upload(logits).unwrap();
    let room = TopK::new(device, logits.len(), k, 1).unwrap();
    let weights = Weights::new(device, logits.len(), 1).unwrap();
    let states = device.upload(&state(position, 0, seed)).unwrap();
    let tokens = device.upload(&[7u32; 4]).unwrap();
    let samplers = one(&buffer, logits.len(), &states);
    let rooms = (&room, &weights);
    run_all(device, |r| {
        record(r, samplers, method, draw, rooms, Some(&tokens))
    });
    let state: Vec<u32> = device.read(&states, 0..2).unwrap();
    let tokens: Vec<u32> = device.read(&tokens, 0..4).unwrap();
    if state == [position, 5] {
        assert_eq!(tokens, [7; 4]);
        return None;
    }
    assert_eq!(state[0], position + 1);
    if let Some(token) = tokens.get(state[0] as usize) {
        assert_eq!(*token, state[1]);
    }
    Some(state[1])
}

fn record(
    r: &mut Recorder,
    samplers: Samplers<'_>,
    method: Method,
    draw: &Draw,
    (room, weights): (&TopK, &Weights),
    tokens: Option<&Buffer>,
) -> Result<(), sterna_gpu::GpuError> {
    match method {
        Method::These => {
            top_k(r, samplers, room)?;
            sample(r, samplers, room, draw, tokens)
        }
        Method::All => {
            top_k(r, samplers, room)?;
            let share = draw.top_p < 1.0;
            if share {
                weigh(r, samplers, draw.temperature, weights)?;
            }
            let weights = share.then_some(weights);
            sample_of_all(r, samplers, room, weights, draw, tokens)
        }
        Method::Noise => {
            perturb(r, samplers, draw.temperature)?;
            top_k(r, samplers, room)?;
            let best = Draw {
                temperature: 0.0,
                ..*draw
            };
            sample(r, samplers, room, &best, tokens)
        }
    }
}

/// Some of several rows of logits, in another order, each with a position and a seed of its own.
#[test]
fn sequences_are_sampled_together_as_each_alone() {
    for device in devices().iter().take(2) {
        let (n_vocab, stride) = (2500, 2503);
        let mut rows = floats(6 * stride, 4);
        rows[3 * stride..4 * stride].fill(f32::NAN);
        let members = [
            (4u32, 9, 3),
            (0, 9, 4),
            (3, 2, 5),
            (5, 100, 3),
            (1, 0, 1 << 33),
        ];
        let draw = Draw {
            top_p: 0.98,
            min_p: 0.3,
            ..DRAW
        };
        for (method, k) in [
            (Method::These, 1),
            (Method::These, 40),
            (Method::All, 256),
            (Method::Noise, 1),
        ] {
            let logits = device.upload(&rows).unwrap();
            let states = members.map(|(row, position, seed)| state(position, row, seed));
            let memory = device.upload(states.as_flattened()).unwrap();
            let samplers = |members: Range<usize>| Samplers {
                logits: Rows {
                    stride,
                    ..Rows::new(&logits, 6, n_vocab)
                },
                states: &memory,
                first: members.start,
                n: members.len(),
            };
            // There may be room for more.
            let room = TopK::new(device, n_vocab, k, 7).unwrap();
            let weights = Weights::new(device, n_vocab, 6).unwrap();
            // Those behind others have the same room after them.
            let ends: &[usize] = if k == 40 { &[5] } else { &[2, 5] };
            run_all(device, |r| {
                let mut first = 0;
                ends.iter().try_for_each(|&end| {
                    let part = samplers(first..end);
                    first = end;
                    record(r, part, method, &draw, (&room, &weights), None)
                })
            });
            let after: Vec<u32> = device
                .read(&memory, 0..states.as_flattened().len())
                .unwrap();
            for (i, (row, position, seed)) in members.into_iter().enumerate() {
                let own = &rows[row as usize * stride..][..n_vocab];
                let at = (position, seed);
                let mut want = states[i];
                if let Some(id) = drawn_at(device, own, k, method, &draw, at) {
                    want[..2].copy_from_slice(&[position + 1, id]);
                }
                assert_eq!(after[i * STATE_LEN..][..STATE_LEN], want, "{k}: {i}");
            }
        }
    }
}

fn drawn(device: &Device, logits: &[f32], k: usize, method: Method, draw: &Draw) -> Option<u32> {
    drawn_at(device, logits, k, method, draw, (0, 1))
}

#[test]
fn what_is_kept_may_reach_beyond_the_best() {
    let Some(device) = device() else { return };
    // Halving weights: a share of 1 - 2^-n takes n tokens.
    let logits: Vec<f32> = (0..3000).map(|i| -(i as f32) * 2f32.ln()).collect();
    let share = |top_p, k| {
        let draw = Draw { top_p, ..DRAW };
        drawn(device, &logits, k, Method::All, &draw).is_some()
    };
    assert!(share(0.9, 4) && !share(0.9, 3));
    assert!(share(0.999, 10) && !share(0.999, 9));
    // Beyond the last nothing is drawn.
    assert!(share(1.0, 64) && !share(1.0, 20));
    let at_least = |min_p, k| {
        let draw = Draw { min_p, ..DRAW };
        drawn(device, &logits, k, Method::All, &draw).is_some()
    };
    assert!(at_least(0.1, 5) && !at_least(0.1, 4));
    // Uniform probabilities: the share of 256 tokens of 3000 is small.
    let even = vec![0.5; 3000];
    let even = |top_p| drawn(device, &even, 256, Method::All, &Draw { top_p, ..DRAW });
    assert!(even(0.084).is_some() && even(0.087).is_none() && even(0.5).is_none());
    // Where all are candidates, all that is kept is.
    let few = vec![1.0; 200];
    assert!(drawn(device, &few, 256, Method::All, &DRAW).is_some());
}

#[test]
fn noise_draws_by_weights() {
    let Some(device) = device() else { return };
    let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
    for (temperature, want) in [
        (1.0, [0.5, 0.3, 0.15, 0.05]),
        (0.5, [0.685, 0.247, 0.062, 0.007]),
    ] {
        let draw = Draw {
            temperature,
            ..DRAW
        };
        let n = 1000;
        let mut counts = [0.0; 4];
        for position in 0..n {
            let id = drawn_at(device, &logits, 1, Method::Noise, &draw, (position, 1));
            counts[id.unwrap() as usize] += 1.0 / f64::from(n);
        }
        // Four standard deviations.
        let near = counts.iter().zip(want).all(|(c, w)| (c - w).abs() < 0.064);
        assert!(near, "{counts:?}, not {want:?}");
    }
    let of = |seed| {
        let logits = floats(5000, 2);
        let one = |position| drawn_at(device, &logits, 1, Method::Noise, &DRAW, (position, seed));
        (0..20).map(one).collect::<Vec<_>>()
    };
    assert_eq!(of(3), of(3));
    assert_ne!(of(3), of(4));
    assert_ne!(of(3), of(3 + (1 << 32)));
}
