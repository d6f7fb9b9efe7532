//! The block types and the rotation of Bonsai 2 against vectors of another implementation (`testdata/bonsai2`).

use std::path::Path;

use sterna_format::DType;
use sterna_kernels::hadamard::{Regroup, Rotation};
use sterna_kernels::quant::{decode_row, encode_row};
use sterna_kernels::{Exec, Isa};

fn data(name: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/bonsai2");
    std::fs::read(root.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn floats(name: &str) -> Vec<f32> {
    let bytes = data(name);
    let floats = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
    floats.collect()
}

#[test]
fn blocks_have_the_values_of_the_reference() {
    for (dtype, name) in [(DType::PQ2_0, "pq2_0"), (DType::PTQ1_0, "ptq1_0")] {
        let want = floats(&format!("{name}.f32"));
        let mut got = vec![f32::NAN; want.len()];
        decode_row(dtype, &data(&format!("{name}.bin")), &mut got).unwrap();
        assert_eq!(got, want, "{dtype}");
    }
}

#[test]
fn values_become_the_blocks_of_the_reference() {
    let values = floats("encode.f32");
    for (dtype, name) in [
        (DType::PQ2_0, "encode-pq2_0.bin"),
        (DType::PTQ1_0, "encode-ptq1_0.bin"),
    ] {
        let want = data(name);
        let mut got = vec![0; want.len()];
        encode_row(dtype, &values, &mut got).unwrap();
        assert_eq!(got, want, "{dtype}");
    }
}

#[test]
fn rotations_are_those_of_the_reference() {
    let exec = Exec::new(2, Isa::detect());
    for block in [4, 256, 1024] {
        let of = |what: &str| floats(&format!("rotate-{block}.{what}.f32"));
        let x = of("x");
        let rotation = Rotation::new(block, of("signs"), None).unwrap();
        let mut forward = vec![f32::NAN; x.len()];
        rotation.rotate(&exec, &x, &mut forward).unwrap();
        let mut undone = x.clone();
        for row in undone.chunks_mut(rotation.width()) {
            rotation.undo(&exec, row).unwrap();
        }
        for (got, want) in [(forward, of("forward")), (undone, of("inverse_of_x"))] {
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-5, "{block}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn heads_are_regrouped_as_in_the_reference() {
    let exec = Exec::new(1, Isa::detect());
    let regroup = Regroup {
        n_groups: 4,
        n_each: 3,
        head_dim: 4,
    };
    let (tiled, grouped) = (floats("tiled.f32"), floats("grouped.f32"));
    let rotation = Rotation::new(1, vec![1.0; tiled.len()], Some(regroup)).unwrap();
    let mut got = vec![f32::NAN; tiled.len()];
    rotation.rotate(&exec, &tiled, &mut got).unwrap();
    assert_eq!(got, grouped);
    rotation.undo(&exec, &mut got).unwrap();
    assert_eq!(got, tiled);
}
