//! Operations that are recorded together, beside the same one by one.

use sterna_format::DType;
use sterna_gpu::Device;
use sterna_gpu::graph::{Matrix, Op, Output, SharedGraph, View};
use sterna_gpu::kernels::linear::{Epilogue, Linear};

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
