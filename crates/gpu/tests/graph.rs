//! Operations that are recorded together, beside the same one by one.

use sterna_format::DType;
use sterna_gpu::Device;
use sterna_gpu::graph::{
    HeadInputs, Matrix, Op, Output, RopeTable, SequencesRef, Shared, SharedGraph, View,
};
use sterna_gpu::kernels::attention::{
    AttentionShape, CacheLayer, CacheType, CachedValues, RopeLayout,
};
use sterna_gpu::kernels::linear::{Epilogue, Linear};
use sterna_gpu::kernels::{SequenceRows, sequence_table};

use crate::common::{emulated, floats, spread};
use crate::{blocks, ternary};

/// The rows after a product is added to them, and what the next products give, with the number of dispatches.
fn both(device: &Device, weights: &[Linear; 3], m: usize, together: bool) -> (Vec<Vec<u32>>, u64) {
    let [w, second, third] = weights;
    let rows = |width: usize, seed| {
        let buffer = spread(device, &floats(m * width, seed), width, 0, width);
        View::new(&buffer, m, width)
    };
    let norm = |width: usize, seed| (rows(width, seed).buffer, 1e-5);
    let (x, sum) = (rows(w.k(), 1), rows(w.n(), 2));
    let outs = [rows(second.n(), 3), rows(third.n(), 4)];
    let output = |w: &Linear, out: &View, epilogue| Output {
        w: Matrix::new(w.clone()),
        out: out.clone(),
        epilogue,
    };
    let ops = [
        Op::Linear {
            x: x.clone(),
            norm: Some(norm(w.k(), 5)),
            outputs: vec![output(w, &sum, Epilogue::Add)],
        },
        Op::Linear {
            x: sum.clone(),
            norm: Some(norm(w.n(), 6)),
            outputs: vec![
                output(second, &outs[0], Epilogue::Store),
                output(third, &outs[1], Epilogue::Store),
            ],
        },
    ];
    let graph = SharedGraph::new(device);
    let mut graph = graph.lock();
    for op in ops {
        graph.push(op);
        if !together {
            graph.flush().unwrap();
        }
    }
    graph.flush().unwrap();
    let results = [&sum, &outs[0], &outs[1]]
        .map(|view| device.read::<u32>(&view.buffer, 0..m * view.width).unwrap());
    (results.into(), graph.work().n_dispatches)
}

#[test]
fn parts_of_a_product_are_added_as_the_next_quantizes() {
    let Some(device) = emulated() else { return };
    let trits = |n, k| ternary::upload(&device, n, k, &vec![0.7; n], &ternary::codes(n, k, 8));
    let of = |dtype, n, k| blocks::upload(&device, dtype, n, k, &blocks::encoded(dtype, n, k));
    // Rows of whole blocks, and of blocks that are padded.
    let cases = [
        ([trits(516, 1024), trits(40, 516), trits(72, 516)], 9),
        ([trits(260, 768), trits(8, 260), trits(8, 260)], 40),
        (
            [
                of(DType::Q4_K, 512, 1024),
                of(DType::Q4_K, 40, 512),
                of(DType::Q6_K, 72, 512),
            ],
            33,
        ),
        (
            [
                of(DType::Q8_0, 512, 1024),
                of(DType::Q4_K, 40, 512),
                of(DType::Q4_K, 72, 512),
            ],
            9,
        ),
    ];
    for (weights, m) in cases {
        let (one_by_one, most) = both(&device, &weights, m, false);
        let (together, n_dispatches) = both(&device, &weights, m, true);
        let kind = weights[0].kind();
        assert_eq!(together, one_by_one, "{kind:?} {m}");
        assert_eq!(n_dispatches, most - 1, "{kind:?} {m}");
    }
}

#[test]
fn trits_before_blocks_are_added_by_themselves() {
    let Some(device) = emulated() else { return };
    let bytes = blocks::encoded(DType::Q4_K, 40, 512);
    let next = blocks::upload(&device, DType::Q4_K, 40, 512, &bytes);
    let w = ternary::upload(
        &device,
        512,
        1024,
        &vec![0.7; 512],
        &ternary::codes(512, 1024, 8),
    );
    let weights = [w, next.clone(), next];
    let (one_by_one, n_dispatches) = both(&device, &weights, 9, false);
    assert_eq!(both(&device, &weights, 9, true), (one_by_one, n_dispatches));
}

/// Attention of one new row of each sequence, whose queries, keys and values are a product by trits, in a cache of this type:
/// twice, so that what the first has cached is read; with the number of dispatches.
fn attended(
    device: &Device,
    dtype: CacheType,
    is_read_later: bool,
    together: bool,
) -> (Vec<u32>, u64) {
    let (n_heads, n_kv_heads, d, n) = (6, 2, 40, 9);
    let (k, q_width, width) = (768, n_heads * d, (n_heads + 2 * n_kv_heads) * d);
    let codes = ternary::codes(width, k, 8);
    let scales: Vec<f32> = (0..width).map(|i| 0.5 + (i / 240) as f32 / 8.0).collect();
    let w = Matrix::new(ternary::upload(device, width, k, &scales, &codes));
    let layer = CacheLayer::new(device, n_kv_heads, d, dtype, CachedValues::Own, n).unwrap();
    let angles: Vec<[f32; 2]> = (0..70 * d / 2)
        .map(|i| [(i as f32).cos(), (i as f32).sin()])
        .collect();
    let angles = device.upload(&angles).unwrap();
    let pages: Vec<u32> = (0..n as u32).rev().collect();
    let table = |step: usize| {
        let own = |i: usize| SequenceRows {
            position: 5 * i + step,
            first_row: n - 1 - i,
            n_rows: 1,
            first_angle: 5 * i + step,
            pages: &pages[i..=i],
            place: 0,
        };
        let rows: Vec<_> = (0..n).map(own).collect();
        device.upload(&sequence_table(&rows, 1)).unwrap()
    };
    let rows = |width: usize, seed| {
        let buffer = spread(device, &floats(n * width, seed), width, 0, width);
        View::new(&buffer, n, width)
    };
    let (qkv, out) = (rows(width, 2), rows(q_width, 3));
    let cache = Shared::new(layer);
    let product = |seed| Op::Linear {
        x: rows(k, seed),
        norm: None,
        outputs: vec![Output {
            w: w.clone(),
            out: qkv.clone(),
            epilogue: Epilogue::Store,
        }],
    };
    let graph = SharedGraph::new(device);
    let mut graph = graph.lock();
    let mut results = Vec::new();
    for step in 0..2 {
        let sequences = SequencesRef {
            table: table(step),
            n_all: n,
            page_stride: 1,
            first: 0,
            n,
            n_rows: 1,
        };
        graph.push(product(4 + step as u64));
        if !together {
            graph.flush().unwrap();
        }
        graph.push(Op::Heads {
            heads: HeadInputs {
                qkv: qkv.clone(),
                has_keys: true,
                n_heads,
                whole_norms: false,
                q_norm: None,
                k_norm: None,
                rope: Some(RopeTable {
                    table: angles.clone(),
                    pairs: d / 2,
                    layout: RopeLayout::Halves,
                }),
                sequences: sequences.clone(),
            },
            cache: cache.clone(),
        });
        graph.push(Op::Attention {
            shape: AttentionShape {
                n_heads,
                n_kv_heads,
                head_dim: d,
                scale: 0.2,
                softcap: None,
                window: None,
            },
            sinks: None,
            q: qkv.columns(0, q_width),
            sequences,
            cache: cache.clone(),
            most_len: Some(64),
            is_causal: true,
            out: out.clone(),
        });
        // Either reads what the product gives, or is seen to replace it.
        match is_read_later {
            true => graph.push(Op::Copy {
                x: out.clone(),
                y: qkv.columns(0, q_width),
            }),
            false => graph.push(product(9)),
        }
        graph.flush().unwrap();
        results.extend(device.read::<u32>(&out.buffer, 0..n * q_width).unwrap());
    }
    (results, graph.work().n_dispatches)
}

#[test]
fn parts_of_a_product_are_added_as_attention_reads_them() {
    let Some(device) = emulated() else { return };
    for dtype in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
        let (one_by_one, most) = attended(&device, dtype, false, false);
        let (together, n_dispatches) = attended(&device, dtype, false, true);
        assert_eq!(together, one_by_one, "{dtype:?}");
        assert_eq!(n_dispatches, most - 2, "{dtype:?}");
    }
}

#[test]
fn a_product_that_is_read_after_attention_is_stored() {
    let Some(device) = emulated() else { return };
    let apart = attended(&device, CacheType::F32, true, false);
    assert_eq!(attended(&device, CacheType::F32, true, true), apart);
}
