//! Layers with a state at the shapes of 1.5B and 2B models, one position and many, on every instruction set. Bytes are
//! those of the state, once for each position.

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use sterna_kernels::delta::{DeltaShape, DeltaWeights, HeadOrder, Projections, delta_net};
use sterna_kernels::rwkv::{
    Decay, Finish, Generation, Part, Rkv, RwkvShape, Wkv7Inputs, wkv4, wkv6, wkv7,
};
use sterna_kernels::{Exec, Isa, State};

/// Values within ±1, the same every time.
fn floats(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// Times `run` on every instruction set.
fn on_every_machine(
    c: &mut Criterion,
    name: &str,
    (m, state): (usize, usize),
    mut run: impl FnMut(&Exec),
) {
    let mut group: BenchmarkGroup<'_, WallTime> = c.benchmark_group(format!("{name}-m{m}"));
    let bytes = 4 * (m * state) as u64;
    group.sample_size(10).throughput(Throughput::Bytes(bytes));
    for isa in Isa::available() {
        let exec = Exec::new(1, isa);
        let id = BenchmarkId::from_parameter(format!("{isa:?}"));
        group.bench_function(id, |b| b.iter(|| run(&exec)));
    }
    group.finish();
}

fn rwkv(c: &mut Criterion) {
    use Generation::{V4, V6, V7};
    for (generation, name) in [(V4, "rwkv4"), (V6, "rwkv6"), (V7, "rwkv7")] {
        let shape = RwkvShape {
            generation,
            n_heads: 32,
            head_dim: 64,
        };
        let n = shape.inner();
        let factors = floats(n);
        for m in [1, 64] {
            let rows = floats(m * n);
            let before = floats(shape.part(Part::Memory).len());
            let mut after = before.clone();
            let mut out = vec![0.0; m * n];
            let mut scratch = [rows.clone(), rows.clone(), rows.clone(), rows.clone()];
            on_every_machine(c, name, (m, before.len()), |exec| {
                let finish = Finish {
                    weight: &factors,
                    bias: &factors,
                    eps: 64e-5,
                    gate: &rows,
                };
                let rkv = Rkv {
                    r: &rows,
                    k: &rows,
                    v: &rows,
                };
                for rows_of in &mut scratch {
                    rows_of.copy_from_slice(&rows);
                }
                let [decay, rate, k, forgotten] = &mut scratch;
                let (before, after) = (&before[..], &mut after[..]);
                let state = State::Copied(before, after);
                match generation {
                    V4 => wkv4(
                        exec,
                        &rkv,
                        (&factors, &factors),
                        state.copied(&mut Vec::new()),
                        &mut out,
                    ),
                    V7 => {
                        let inputs = Wkv7Inputs {
                            decay,
                            rate,
                            k,
                            forgotten,
                            r: &rows,
                            v: &rows,
                            k_k: &factors,
                            k_a: &factors,
                            r_k: &factors,
                        };
                        wkv7(exec, &shape, inputs, &finish, state, &mut out)
                    }
                    _ => {
                        let decay = (Decay::Given(decay), &factors[..]);
                        wkv6(exec, &shape, &rkv, decay, &finish, state, &mut out)
                    }
                }
                .expect("the shapes are right");
                black_box(&out);
            });
        }
    }
}

fn delta(c: &mut Criterion) {
    let shape = DeltaShape {
        n_key_heads: 16,
        n_value_heads: 16,
        key_dim: 128,
        value_dim: 128,
        order: HeadOrder::Tiled,
    };
    const N_TAPS: usize = 4;
    let heads = floats(shape.n_value_heads);
    let (taps, norm) = (floats(shape.channels() * N_TAPS), floats(shape.value_dim));
    let weights = DeltaWeights {
        taps: &taps,
        a: &heads,
        dt_bias: &heads,
        norm: &norm,
        eps: 1e-5,
    };
    for m in [1, 64] {
        let gates = floats(m * shape.n_value_heads);
        let inputs = Projections {
            qkv: &floats(m * shape.channels()),
            gate: &floats(m * shape.values()),
            alpha: &gates,
            beta: &gates,
        };
        let n_state = (N_TAPS - 1) * shape.channels() + shape.state();
        let mut out = vec![0.0; m * shape.values()];
        // One, in the caches; and as many as a model has layers, whose weights pass through the caches in between.
        for (name, n_states, is_in_place) in [
            ("delta", 2, false),
            ("delta-memory", 96, false),
            ("delta-memory-in-place", 96, true),
        ] {
            let mut states = vec![floats(n_state); n_states];
            on_every_machine(c, name, (m, shape.state()), |exec| {
                states.rotate_left(2);
                let [before, after, ..] = &mut states[..] else {
                    unreachable!("there are two");
                };
                let state = match is_in_place {
                    true => State::InPlace(before),
                    false => State::Copied(before, after),
                };
                delta_net(exec, &shape, &weights, &inputs, state, &mut out)
                    .expect("the shapes are right");
                black_box(&out);
            });
        }
    }
}

criterion_group!(benches, rwkv, delta);
criterion_main!(benches);
