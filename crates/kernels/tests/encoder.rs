//! Matrices through the encoder: the same bytes whatever it runs on, and ternary weights without
//! loss whatever they were stored as.

use proptest::prelude::*;
use sterna_format::DType;
use sterna_kernels::quant::ternary::{
    I2sLayout, Layout, Source, abs_sums, absmean_multiplier, i2_s_trailer, round_to_trits,
};
use sterna_kernels::quant::{
    Encoder, QuantError, TernaryScales, decode_row, decode_rows, encode_row,
};
use sterna_kernels::{Exec, Isa, requantize};

const SEARCHED: [DType; 6] = [
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q4_0,
];

const DIRECT: [DType; 7] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q5_1,
    DType::TQ1_0,
    DType::TQ2_0,
];

fn execs() -> Vec<Exec> {
    Isa::available()
        .flat_map(|isa| [Exec::new(1, isa), Exec::new(3, isa)])
        .collect()
}

/// The same numbers everywhere, between −1 and 1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Something like a bell.
fn bell(n: usize, seed: u64) -> Vec<f32> {
    let sums = noise(n, seed).into_iter().zip(noise(n, seed + 1));
    sums.zip(noise(n, seed + 2))
        .map(|((a, b), c)| a + b + c)
        .collect()
}

/// Rows of 512 of every kind that has its own way through a search.
fn rows() -> Vec<f32> {
    let bell = bell(512, 3);
    let scaled = |by: f32| bell.iter().map(move |v| v * by);
    let spikes = |every: usize, height: f32| {
        let lift = move |(i, v): (usize, &f32)| if i % every == 7 { height } else { *v };
        bell.iter().enumerate().map(lift)
    };
    let mut rows: Vec<f32> = Vec::new();
    rows.extend(scaled(0.02));
    rows.extend(scaled(1e4));
    rows.extend(scaled(1e-6));
    rows.extend(scaled(1e-20));
    rows.extend(scaled(1e-42));
    rows.extend(scaled(0.0));
    rows.extend(bell.iter().map(|v| v + 5.0));
    rows.extend(bell.iter().map(|v| v - 5.0));
    rows.extend(spikes(64, 300.0));
    rows.extend(spikes(256, -65504.0));
    rows.extend([1.5; 256].iter().chain(&[-1.5; 256]));
    rows.extend([-0.0; 256].iter().chain(&[65504.0; 256]));
    rows.extend(
        bell.iter()
            .map(|v| v.signum() * f32::from(u8::from(v.abs() > 0.4))),
    );
    rows.extend((0..512).map(|i| if i == 300 { -1e-3 } else { 0.0 }));
    rows.extend((0..512).map(|i| i as f32));
    rows.extend(noise(512, 9).iter().map(|v| v * v * v));
    // An odd number of super-blocks in all.
    rows.extend(&bell[..256]);
    rows
}

fn encode(exec: &Exec, encoder: &Encoder, rows: &[f32]) -> Result<Vec<u8>, QuantError> {
    let mut out = vec![0xaa; encoder.bytes_of(rows.len())?];
    encoder.encode(exec, 0, rows, &mut out)?;
    Ok(out)
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode_row(dtype, bytes, &mut out).unwrap();
    out
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    pairs
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum()
}

mod matrices {
    use super::*;

    #[test]
    fn threads_instructions_and_cuts_do_not_matter() {
        let rows = [rows(), bell(50 * 256, 5)].concat();
        for dtype in SEARCHED.into_iter().chain(DIRECT) {
            for encoder in [Encoder::quick(dtype, 256), Encoder::new(dtype, 256)] {
                let encoder = encoder.unwrap();
                let want = encode(&Exec::new(1, Isa::SCALAR), &encoder, &rows).unwrap();
                let cut = rows.len() / 512 * 256;
                for exec in execs() {
                    let got = encode(&exec, &encoder, &rows).unwrap();
                    assert!(got == want, "{encoder:?} {exec:?}");
                    let got = [&rows[..cut], &rows[cut..]]
                        .map(|rows| encode(&exec, &encoder, rows).unwrap());
                    assert!(got.concat() == want, "{encoder:?} {exec:?} in two");
                }
            }
        }
    }

    #[test]
    fn rows_alone_are_encoded_alike() {
        let rows = rows();
        let exec = Exec::new(1, Isa::detect());
        for dtype in SEARCHED.into_iter().chain(DIRECT) {
            // A single row of Q4_0 is that of the reference.
            let encoder = if dtype == DType::Q4_0 {
                Encoder::quick(dtype, 256).unwrap()
            } else {
                Encoder::new(dtype, 256).unwrap()
            };
            let all = encode(&exec, &encoder, &rows).unwrap();
            let size = all.len() / (rows.len() / 256);
            for (row, bytes) in rows.chunks(256).zip(all.chunks(size)) {
                let mut alone = vec![0; size];
                encode_row(dtype, row, &mut alone).unwrap();
                assert!(alone == bytes, "{dtype}");
            }
        }
    }

    #[test]
    fn decoding_in_bulk_gives_what_rows_give() {
        let rows = [rows(), bell(50 * 256, 5)].concat();
        for dtype in SEARCHED.into_iter().chain(DIRECT) {
            let encoder = Encoder::quick(dtype, 256).unwrap();
            let bytes = encode(&Exec::new(1, Isa::SCALAR), &encoder, &rows).unwrap();
            let want = decode(dtype, &bytes);
            for exec in execs() {
                let mut got = vec![f32::NAN; rows.len()];
                decode_rows(&exec, dtype, &bytes, &mut got).unwrap();
                assert!(
                    got.iter()
                        .zip(&want)
                        .all(|(a, b)| a.to_bits() == b.to_bits())
                );
            }
        }
    }

    #[test]
    fn transcoding_is_decoding_and_encoding() {
        let values = bell(50 * 256, 5);
        for from in [DType::BF16, DType::F16, DType::Q8_0, DType::Q6_K] {
            let encoder = Encoder::quick(from, 256).unwrap();
            let bytes = encode(&Exec::new(1, Isa::detect()), &encoder, &values).unwrap();
            let encoder = Encoder::new(DType::Q4_K, 256).unwrap();
            for exec in execs() {
                let want = encode(&exec, &encoder, &decode(from, &bytes)).unwrap();
                let mut got = vec![0; want.len()];
                encoder.transcode(&exec, 0, from, &bytes, &mut got).unwrap();
                assert!(got == want, "{from} {exec:?}");
            }
        }
    }

    #[test]
    fn a_search_is_closer_than_one_pass() {
        let values = bell(64 * 256, 1);
        let exec = Exec::new(1, Isa::detect());
        for dtype in SEARCHED {
            let [quick, search] =
                [Encoder::quick(dtype, 256), Encoder::new(dtype, 256)].map(|encoder| {
                    let encoder = encoder.unwrap();
                    squared_error(
                        &values,
                        &decode(dtype, &encode(&exec, &encoder, &values).unwrap()),
                    )
                });
            assert!(search < quick, "{dtype}: {search}, one pass {quick}");
        }
    }

    #[test]
    fn extreme_rows_stay_close() {
        let rows = rows();
        let exec = Exec::new(1, Isa::detect());
        for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q4_0] {
            let encoder = Encoder::new(dtype, 256).unwrap();
            let back = decode(dtype, &encode(&exec, &encoder, &rows).unwrap());
            for (row, back) in rows.chunks(256).zip(back.chunks(256)) {
                let top = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                for (a, b) in row.iter().zip(back) {
                    // Scales in f16 have no steps below 2^-24.
                    let close = 0.15 * top.max(2e-5);
                    assert!((a - b).abs() <= close, "{dtype}: {a}, not {b} of {top}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_a_type_survive_it() {
        // Values that Q4_0 holds exactly, whatever the largest code.
        let values: Vec<f32> = (0..256)
            .map(|i| ((i * 7 % 15) as f32 - 7.0) * 0.125)
            .collect();
        let exec = Exec::new(1, Isa::detect());
        let encoder = Encoder::new(DType::Q4_0, 256).unwrap();
        let bytes = encode(&exec, &encoder, &values).unwrap();
        assert_eq!(decode(DType::Q4_0, &bytes), values);
    }
}

mod trouble {
    use super::*;

    #[test]
    fn values_are_named_by_row_and_column() {
        let mut rows = vec![0.5; 40 * 512];
        for exec in execs() {
            for (value, dtype) in [
                (f32::NAN, DType::Q4_K),
                (f32::NEG_INFINITY, DType::BF16),
                (1e5, DType::Q6_K),
                (1e5, DType::F16),
            ] {
                let encoder = Encoder::new(dtype, 512).unwrap();
                let mut out = vec![0; encoder.bytes_of(rows.len()).unwrap()];
                (rows[35 * 512 + 300], rows[37 * 512]) = (value, value);
                let error = encoder.encode(&exec, 100, &rows, &mut out).unwrap_err();
                let QuantError::InRow { row, source } = &error else {
                    panic!("{error}");
                };
                let index = match **source {
                    QuantError::NotFinite { index, .. } | QuantError::TooLarge { index, .. } => {
                        index
                    }
                    _ => panic!("{source}"),
                };
                assert_eq!((*row, index), (135, 300));
                assert!(
                    error.to_string().starts_with("row 135: value 300 is "),
                    "{error}"
                );
            }
            (rows[35 * 512 + 300], rows[37 * 512]) = (0.25, 0.5);
            let mut out = vec![0; rows.len() / 4];
            let error = Encoder::i2_s(512, 0.5)
                .encode(&exec, 100, &rows, &mut out)
                .unwrap_err();
            let place = QuantError::NotTernary {
                row: 135,
                col: 300,
                value: 0.25,
                scale: 0.5,
            };
            assert_eq!(error, place);
        }
    }

    #[test]
    fn shapes_that_do_not_fit() {
        let exec = Exec::new(2, Isa::detect());
        for (dtype, k) in [(DType::Q4_K, 128), (DType::Q8_0, 33), (DType::TQ2_0, 384)] {
            let error = Encoder::new(dtype, k).unwrap_err();
            assert!(matches!(error, QuantError::PartialBlock { .. }), "{error}");
        }
        for dtype in [DType::I2_S, DType::I32, DType::F64] {
            let error = Encoder::new(dtype, 256).unwrap_err();
            assert!(matches!(error, QuantError::Unsupported { .. }), "{error}");
        }
        let encoder = Encoder::new(DType::Q4_K, 512).unwrap();
        assert!(encoder.bytes_of(256).is_err(), "half a row");
        assert!(
            encoder
                .encode(&exec, 0, &[0.0; 512], &mut [0; 287])
                .is_err()
        );
        assert!(
            encoder
                .transcode(&exec, 0, DType::Q8_0, &[0; 33], &mut [0; 288])
                .is_err()
        );
        assert!(
            encoder
                .transcode(&exec, 0, DType::I32, &[0; 2048], &mut [0; 288])
                .is_err()
        );
        assert!(Encoder::i2_s(64, 1.0).bytes_of(64).is_err(), "half a block");
        assert_eq!(Encoder::i2_s(64, 1.0).bytes_of(128), Ok(32));
        assert!(decode_rows(&exec, DType::Q8_0, &[0; 34], &mut [0.0; 31]).is_err());
        assert!(decode_rows(&exec, DType::Bool, &[0; 4], &mut [0.0; 4]).is_err());
        assert!(TernaryScales::of_rows(&exec, 3, &[0.0; 4]).is_err());
        let none = Encoder::new(DType::Q4_K, 0).unwrap();
        assert_eq!(none.encode(&exec, 0, &[], &mut []), Ok(()));
    }
}

mod ternary {
    use super::*;

    const N: usize = 20;
    const K: usize = 512;
    /// What f16 and bf16 hold.
    const SCALE: f32 = 0.375;

    fn trits() -> Vec<f32> {
        let mut trits: Vec<f32> = noise(N * K, 4)
            .iter()
            .map(|v| f32::from(i8::from(*v > 0.4) - i8::from(*v < -0.3)))
            .collect();
        // A block of zeros, and rows that begin with either sign.
        trits[256..512].fill(0.0);
        (trits[0], trits[K]) = (-1.0, 1.0);
        trits
    }

    fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
        encode_row(dtype, values, &mut bytes).unwrap();
        bytes
    }

    /// Hugging Face's packing, which interleaves quarters of the rows.
    fn hugging_face(trits: &[f32]) -> Vec<u8> {
        let mut packed = vec![0; N / 4 * K];
        for (i, trit) in trits.iter().enumerate() {
            let (row, col) = (i / K, i % K);
            packed[row % (N / 4) * K + col] |= ((*trit + 1.0) as u8) << (row / (N / 4) * 2);
        }
        packed
    }

    /// I2_S whose blocks have a quarter of `quarter` elements.
    fn i2_s(trits: &[f32], quarter: usize) -> Vec<u8> {
        let mut packed = vec![0; N * K / 4];
        for (i, trit) in trits.iter().enumerate() {
            let (block, at) = (i / (4 * quarter), i % (4 * quarter));
            packed[block * quarter + at % quarter] |=
                ((*trit + 1.0) as u8) << (6 - 2 * (at / quarter));
        }
        packed
    }

    /// Every stored form of the same weights, as rows of numbers.
    fn forms(exec: &Exec) -> Vec<(&'static str, Vec<f32>)> {
        let trits = trits();
        let values: Vec<f32> = trits.iter().map(|t| t * SCALE).collect();
        let mut forms = Vec::new();
        for (name, dtype) in [
            ("F32", DType::F32),
            ("F16", DType::F16),
            ("BF16", DType::BF16),
            ("TQ1_0", DType::TQ1_0),
            ("TQ2_0", DType::TQ2_0),
            ("Q2_0", DType::Q2_0_G128),
        ] {
            let mut rows = vec![0.0; N * K];
            decode_rows(exec, dtype, &stored(dtype, &values), &mut rows).unwrap();
            forms.push((name, rows));
        }
        for (name, layout, bytes) in [
            (
                "block128",
                Layout::I2S(I2sLayout::Block128),
                i2_s(&trits, 32),
            ),
            ("block64", Layout::I2S(I2sLayout::Block64), i2_s(&trits, 16)),
            ("packed", Layout::HuggingFace, hugging_face(&trits)),
        ] {
            let source = Source::new(layout, N, K, &bytes).unwrap();
            let mut rows = vec![0.0; N * K];
            let (first, second) = rows.split_at_mut(7 * K);
            source.decode_rows(0..7, SCALE, first).unwrap();
            source.decode_rows(7..N, SCALE, second).unwrap();
            forms.push((name, rows));
        }
        // The same weights with every sign turned twice: in the codes and in the scale.
        let mut turned = stored(DType::TQ2_0, &values.iter().map(|v| -v).collect::<Vec<_>>());
        turned
            .chunks_exact_mut(66)
            .for_each(|block| block[65] ^= 0x80);
        forms.push(("turned", decode(DType::TQ2_0, &turned)));
        forms
    }

    #[test]
    fn every_form_of_the_same_weights_gives_the_same_bytes() {
        for exec in execs() {
            for (name, rows) in forms(&exec) {
                let scales = TernaryScales::of_rows(&exec, K, &rows).unwrap();
                assert_eq!(scales.one(), Some(SCALE), "{name}");
                assert!(
                    [DType::I2_S, DType::TQ1_0, DType::TQ2_0].map(|d| scales.fit(d)) == [true; 3]
                );
                let codes = encode(&exec, &Encoder::i2_s(K, SCALE), &rows).unwrap();
                assert!(codes == i2_s(&trits(), 32), "{name}");
                for dtype in [DType::TQ1_0, DType::TQ2_0] {
                    let encoder = Encoder::new(dtype, K).unwrap();
                    let blocks = encode(&exec, &encoder, &rows).unwrap();
                    let values: Vec<f32> = trits().iter().map(|t| t * SCALE).collect();
                    assert!(blocks == stored(dtype, &values), "{name} {dtype}");
                    assert_eq!(decode(dtype, &blocks), values, "{name} {dtype}");
                }
            }
        }
    }

    #[test]
    fn masters_are_rounded_by_one_rule() {
        let exec = Exec::new(2, Isa::detect());
        let masters = bell(N * K, 8);
        let bytes = stored(DType::F32, &masters);
        let mut sums = [0.0; N];
        abs_sums(DType::F32, N, K, &bytes, 0..N, &mut sums).unwrap();
        let multiplier = absmean_multiplier(&sums, K);
        let layout = Layout::Masters {
            dtype: DType::F32,
            multiplier,
        };
        let source = Source::new(layout, N, K, &bytes).unwrap();
        let mut want = vec![0.0; N * K];
        source
            .decode_rows(0..N, 1.0 / multiplier, &mut want)
            .unwrap();
        for isa in Isa::available() {
            let mut rows = masters.clone();
            round_to_trits(isa, &mut rows, multiplier);
            assert_eq!(rows, want);
        }
        let scales = TernaryScales::of_rows(&exec, K, &want).unwrap();
        assert_eq!(scales.one(), Some(1.0 / multiplier));
        // An f16 doesn't hold that scale.
        assert!(!scales.fit(DType::TQ2_0));
        assert!(encode(&exec, &Encoder::i2_s(K, 1.0 / multiplier), &want).is_ok());
    }

    #[test]
    fn what_is_ternary_and_what_is_not() {
        for exec in execs() {
            let scales = |rows: &[f32], k| TernaryScales::of_rows(&exec, k, rows).unwrap();
            let fit = |scales: TernaryScales| [DType::I2_S, DType::TQ2_0].map(|d| scales.fit(d));

            let mut rows: Vec<f32> = trits().iter().map(|t| t * SCALE).collect();
            rows[K..2 * K].iter_mut().for_each(|v| *v *= 2.0);
            assert_eq!(scales(&rows, K).one(), None);
            assert_eq!(fit(scales(&rows, K)), [false, true], "a scale a row");
            assert_eq!(fit(scales(&rows, 64)), [false, false], "no whole blocks");
            let halves = scales(&rows[..K], K).and(scales(&rows[K..], K));
            assert_eq!(halves, scales(&rows, K));
            rows[N * K - 1] = 0.1;
            rows[N * K - 2] = 0.2;
            assert_eq!(
                fit(scales(&rows, K)),
                [false, false],
                "two magnitudes in a block"
            );

            assert_eq!(scales(&[0.0; K], K).one(), Some(0.0));
            assert_eq!(scales(&[-0.0; K], K).one(), Some(0.0));
            assert_eq!(scales(&[], K), TernaryScales::NONE);
            let one_third = [1.0 / 3.0; K];
            assert_eq!(fit(scales(&one_third, K)), [true, false], "no f16");
            for value in [f32::NAN, f32::INFINITY] {
                assert_eq!(fit(scales(&[value; K], K)), [false, false], "{value}");
            }
        }
    }

    #[test]
    fn rows_need_not_be_whole_blocks_of_i2_s() {
        let rows: Vec<f32> = noise(4 * 96, 2).iter().map(|v| v.signum()).collect();
        let exec = Exec::new(1, Isa::detect());
        let codes = encode(&exec, &Encoder::i2_s(96, 1.0), &rows).unwrap();
        let source = Source::new(Layout::I2S(I2sLayout::Block128), 4, 96, &codes).unwrap();
        let mut back = vec![0.0; 4 * 96];
        source.decode_rows(0..4, 1.0, &mut back).unwrap();
        assert_eq!(back, rows);
        assert_eq!(i2_s_trailer(1.0)[..5], [0, 0, 0x80, 0x3f, 0]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_bits_give_the_same_result_everywhere(seed in any::<u64>(), mask in any::<u32>()) {
        // All exponents, or with some bits cleared.
        let rows: Vec<f32> = noise(512, seed)
            .iter()
            .zip(noise(512, seed ^ 1))
            .map(|(a, b)| f32::from_bits((a.to_bits() << 7 ^ b.to_bits()) & mask))
            .map(|v| if v.abs() <= 65504.0 { v } else { 1.0 })
            .collect();
        for dtype in SEARCHED.into_iter().chain(DIRECT) {
            let encoder = Encoder::new(dtype, 256).unwrap();
            let want = encode(&Exec::new(1, Isa::SCALAR), &encoder, &rows).unwrap();
            for isa in Isa::available() {
                let got = encode(&Exec::new(1, isa), &encoder, &rows).unwrap();
                prop_assert!(got == want, "{} {}", dtype, isa);
            }
        }
    }
}

#[test]
fn requantizing_is_quick_transcoding() {
    let values = bell(8 * 256, 2);
    let exec = Exec::new(2, Isa::detect());
    let encoder = Encoder::quick(DType::Q8_0, 256).unwrap();
    let bytes = encode(&exec, &encoder, &values).unwrap();
    let encoder = Encoder::quick(DType::Q6_K, 256).unwrap();
    let want = encode(&exec, &encoder, &decode(DType::Q8_0, &bytes)).unwrap();
    assert!(requantize(&exec, 8, 256, DType::Q8_0, &bytes, DType::Q6_K).unwrap() == want);
}
