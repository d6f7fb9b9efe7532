//! Block formats against reference vectors, the examples of their documentation, and themselves.
//!
//! The vectors are in `testdata/blocks`; its `make.py` says where they come from.

use std::path::PathBuf;

use proptest::prelude::*;
use sterna_format::DType;
use sterna_kernels::quant::ternary::{
    self, I2sLayout, Layout, Source, abs_sums, absmean_multiplier, check_codes, common_block_scale,
    common_value_scale, row_bytes, unpack_row,
};
use sterna_kernels::quant::{QuantError, decode_row, encode_row, q8};

/// Types with a decoder.
const DECODED: [DType; 21] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::I2_S,
    DType::Q1_0,
    DType::Q2_0,
    DType::Q2_0_G128,
    DType::MXFP4,
];

/// Types whose encoder gives the bytes of the reference.
const EXACT: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::Q1_0,
    DType::Q2_0,
    DType::Q2_0_G128,
    DType::MXFP4,
];

/// Types whose encoder searches.
const SEARCHED: [DType; 5] = [
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn data(name: &str) -> Vec<u8> {
    let path = repository("testdata/blocks").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

fn trits(bytes: &[u8]) -> Vec<i8> {
    bytes.iter().map(|&b| b as i8).collect()
}

fn encoded_len(dtype: DType, elements: usize) -> usize {
    elements / dtype.block_len() * dtype.block_bytes()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode_row(dtype, bytes, &mut out).unwrap();
    out
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; encoded_len(dtype, values.len())];
    encode_row(dtype, values, &mut out).unwrap();
    out
}

/// Repacks in two ranges, so that ranges are tested throughout, and unpacks.
fn repack(layout: Layout, n: usize, k: usize, bytes: &[u8]) -> Result<Vec<Vec<i8>>, QuantError> {
    let source = Source::new(layout, n, k, bytes)?;
    let stride = row_bytes(k);
    let mut codes = vec![0; n * stride];
    let (first, second) = codes.split_at_mut(n / 2 * stride);
    source.repack_rows(0..n / 2, first)?;
    source.repack_rows(n / 2..n, second)?;
    check_codes(k, 0, &codes)?;
    let rows = (0..n).map(|row| {
        let codes = &codes[row * stride..][..stride];
        let mut padded = vec![0; k.next_multiple_of(ternary::BLOCK)];
        unpack_row(codes, &mut padded).unwrap();
        assert!(padded[k..].iter().all(|&t| t == 0), "padding of row {row}");
        padded.truncate(k);
        padded
    });
    Ok(rows.collect())
}

fn rmse(a: &[f32], b: &[f32]) -> f64 {
    let sum: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum();
    (sum / a.len() as f64).sqrt()
}

mod reference {
    use super::*;

    #[test]
    fn decoders_give_the_same_bits() {
        for dtype in DECODED {
            let expected = f32s(&data(&format!("{dtype}.f32")));
            let found = decode(dtype, &data(&format!("{dtype}.bin")));
            assert_eq!(found.len(), expected.len(), "{dtype}");
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    found.to_bits(),
                    expected.to_bits(),
                    "{dtype} element {i}: {found} for {expected}"
                );
            }
        }
    }

    #[test]
    fn simple_encoders_give_the_same_bytes() {
        let input = f32s(&data("input.f32"));
        for dtype in EXACT {
            let found = encode(dtype, &input);
            let expected = &data(&format!("{dtype}.bin"))[..found.len()];
            let pairs = found
                .chunks(dtype.block_bytes())
                .zip(expected.chunks(dtype.block_bytes()));
            for (block, (found, expected)) in pairs.enumerate() {
                assert_eq!(found, expected, "{dtype} block {block}");
            }
        }
    }

    #[test]
    fn searching_encoders_are_as_close() {
        let input = f32s(&data("input.f32"));
        for dtype in SEARCHED {
            let bytes = encode(dtype, &input);
            let theirs = &data(&format!("{dtype}.bin"))[..bytes.len()];
            let (ours, theirs) = (decode(dtype, &bytes), decode(dtype, theirs));
            for (row, input) in input.chunks(256).enumerate() {
                let at = row * 256..(row + 1) * 256;
                let (our_error, their_error) =
                    (rmse(&ours[at.clone()], input), rmse(&theirs[at], input));
                println!("{dtype} row {row}: {our_error:.3e}, reference {their_error:.3e}");
                assert!(
                    our_error <= their_error * 1.01,
                    "{dtype} row {row}: error {our_error:e}, the reference has {their_error:e}"
                );
            }
        }
    }

    #[test]
    fn activations_are_torchs() {
        let x = f32s(&data("activations-9x200.f32"));
        let expected = trits(&data("activations-9x200.i8"));
        let scales = f32s(&data("activations-9x200.scale.f32"));
        for (row, x) in x.chunks(200).enumerate() {
            let mut q = vec![0; 200];
            let (scale, sum) = q8::quantize_row(x, &mut q);
            assert_eq!(scale, scales[row], "row {row}");
            assert_eq!(q, expected[row * 200..][..200], "row {row}");
            assert_eq!(
                sum,
                q.iter().map(|&q| i32::from(q)).sum::<i32>(),
                "row {row}"
            );
        }
    }

    #[test]
    fn hugging_face_trits() {
        let rows = repack(Layout::HuggingFace, 10, 96, &data("hf-10x96.bin")).unwrap();
        assert_eq!(rows.concat(), trits(&data("hf-10x96.i8")));
    }

    #[test]
    fn masters_are_ternarised_as_torch_does() {
        let bytes = data("masters-24x256.bf16");
        let (n, k, dtype) = (24, 256, DType::BF16);
        let mut sums = [0.0; 24];
        let (first, second) = sums.split_at_mut(7);
        abs_sums(dtype, n, k, &bytes, 0..7, first).unwrap();
        abs_sums(dtype, n, k, &bytes, 7..24, second).unwrap();
        let multiplier = absmean_multiplier(&sums, k);
        let expected = f32s(&data("masters-24x256.scale.f32"))[0];
        assert!(
            (multiplier.recip() / expected - 1.0).abs() < 3e-7,
            "{multiplier}, {expected}"
        );
        let rows = repack(Layout::Masters { dtype, multiplier }, n, k, &bytes).unwrap();
        assert_eq!(rows.concat(), trits(&data("masters-24x256.i8")));
    }
}

mod documentation {
    use super::*;

    /// A fenced example: its info string and its lines.
    struct Example {
        page: String,
        info: Vec<String>,
        bytes: Vec<u8>,
        /// Row, first element, one past the last, and the values given for them.
        expected: Vec<(usize, usize, usize, Vec<f32>)>,
    }

    fn examples() -> Vec<Example> {
        let mut examples = Vec::new();
        for page in ["blocks.md", "k-quants.md", "i2_s.md", "ternary.md"] {
            let text = std::fs::read_to_string(repository("docs/formats").join(page)).unwrap();
            for fence in text.split("```").skip(1).step_by(2) {
                let (info, lines) = fence.split_once('\n').unwrap();
                let info: Vec<String> = info.split_whitespace().map(str::to_owned).collect();
                if info
                    .first()
                    .is_some_and(|kind| kind == "block" || kind == "rows")
                {
                    examples.push(parse(page, info, lines));
                }
            }
        }
        examples
    }

    fn parse(page: &str, info: Vec<String>, lines: &str) -> Example {
        let mut example = Example {
            page: page.to_owned(),
            info,
            bytes: Vec::new(),
            expected: Vec::new(),
        };
        for line in lines.lines() {
            let (what, list) = line.split_once(':').unwrap();
            if what == "bytes" {
                for token in list.split_whitespace() {
                    let (byte, times) = token.split_once('*').unwrap_or((token, "1"));
                    let byte = u8::from_str_radix(byte, 16).unwrap();
                    example.bytes.extend(vec![byte; times.parse().unwrap()]);
                }
                continue;
            }
            let words: Vec<&str> = what.split_whitespace().collect();
            let (row, range) = match words[..] {
                ["values", range] => (0, range),
                ["row", row, range] => (row.parse().unwrap(), range),
                _ => panic!("{page}: {line}"),
            };
            let (from, to) = range.split_once("..").unwrap();
            let values = list
                .split_whitespace()
                .map(|v| v.parse().unwrap())
                .collect();
            example
                .expected
                .push((row, from.parse().unwrap(), to.parse().unwrap(), values));
        }
        example
    }

    fn compare(example: &Example, rows: &[Vec<f32>]) {
        let mut covered = 0;
        for (row, from, to, values) in &example.expected {
            assert!(
                values.len() == 1 || values.len() == to - from,
                "{:?}",
                example.info
            );
            for i in *from..*to {
                let expected = if values.len() == 1 {
                    values[0]
                } else {
                    values[i - from]
                };
                let found = rows[*row][i];
                let Example { page, info, .. } = example;
                assert_eq!(found, expected, "{page} {info:?} row {row} element {i}");
                covered += 1;
            }
        }
        assert_eq!(
            covered,
            rows.iter().map(Vec::len).sum::<usize>(),
            "{:?}",
            example.info
        );
    }

    #[test]
    fn examples_are_true() {
        let mut seen = Vec::new();
        for example in examples() {
            let name = example.info[1].as_str();
            seen.push(name.to_owned());
            if example.info[0] == "block" {
                let dtype = DType::ALL.into_iter().find(|d| d.name() == name).unwrap();
                assert_eq!(example.bytes.len(), dtype.block_bytes(), "{name}");
                compare(&example, &[decode(dtype, &example.bytes)]);
            } else {
                let layout = match name {
                    "i2s-block128" => Layout::I2S(I2sLayout::Block128),
                    "i2s-block64" => Layout::I2S(I2sLayout::Block64),
                    "i2s-rows4" => Layout::I2S(I2sLayout::Rows4),
                    "hf" => Layout::HuggingFace,
                    other => panic!("{other}"),
                };
                let (n, k) = (
                    example.info[2].parse().unwrap(),
                    example.info[3].parse().unwrap(),
                );
                let rows = repack(layout, n, k, &example.bytes).unwrap();
                let rows: Vec<Vec<f32>> = rows
                    .iter()
                    .map(|r| r.iter().map(|&t| f32::from(t)).collect())
                    .collect();
                compare(&example, &rows);
            }
        }
        for dtype in DECODED
            .into_iter()
            .filter(|d| !matches!(d, DType::F64 | DType::F32))
        {
            assert!(
                seen.contains(&dtype.name().to_owned()),
                "{dtype} has no example"
            );
        }
    }
}

mod trouble {
    use super::*;

    #[test]
    fn lengths_that_do_not_fit() {
        for dtype in DECODED {
            let (len, size) = (dtype.block_len(), dtype.block_bytes());
            let cases = [
                (0, 0, true),
                (len, size, true),
                (3 * len, 3 * size, true),
                (len, size - 1, false),
                (len, size + 1, false),
                (len + 1, size + 1, false),
                (len, 0, false),
                (0, size, false),
            ];
            for (elements, bytes, fits) in cases {
                let result = decode_row(dtype, &vec![0; bytes], &mut vec![0.0; elements]);
                assert_eq!(
                    result.is_ok(),
                    fits,
                    "{dtype}: {elements} elements in {bytes} bytes"
                );
                if !matches!(dtype, DType::F64 | DType::I2_S) {
                    let result = encode_row(dtype, &vec![0.0; elements], &mut vec![0; bytes]);
                    assert_eq!(
                        result.is_ok(),
                        fits,
                        "{dtype}: {elements} into {bytes} bytes"
                    );
                }
            }
        }
    }

    #[test]
    fn types_without_a_codec() {
        for dtype in [
            DType::I64,
            DType::I32,
            DType::I16,
            DType::I8,
            DType::U8,
            DType::Bool,
        ] {
            let size = dtype.block_bytes();
            assert_eq!(
                decode_row(dtype, &vec![0; size], &mut [0.0]),
                Err(QuantError::Unsupported {
                    op: "decode",
                    dtype
                })
            );
            assert_eq!(
                encode_row(dtype, &[0.0], &mut vec![0; size]),
                Err(QuantError::Unsupported {
                    op: "encode",
                    dtype
                })
            );
        }
    }

    #[test]
    fn values_that_cannot_be_encoded() {
        for dtype in EXACT.into_iter().chain(SEARCHED) {
            let mut values = vec![1.0; 512];
            let mut out = vec![7; encoded_len(dtype, 512)];
            values[300] = f32::NEG_INFINITY;
            let error = encode_row(dtype, &values, &mut out).unwrap_err();
            assert!(
                matches!(error, QuantError::NotFinite { index: 300, .. }),
                "{dtype}: {error}"
            );
            values[299] = f32::NAN;
            let error = encode_row(dtype, &values, &mut out).unwrap_err();
            assert!(
                matches!(error, QuantError::NotFinite { index: 299, .. }),
                "{dtype}: {error}"
            );
            assert!(
                out.iter().all(|&b| b == 7),
                "{dtype}: written in spite of the error"
            );
            if !matches!(dtype, DType::F32 | DType::BF16 | DType::MXFP4) {
                let error = encode_row(dtype, &[1e5; 256], &mut out[..encoded_len(dtype, 256)]);
                assert!(
                    matches!(error, Err(QuantError::TooLarge { index: 0, .. })),
                    "{dtype}"
                );
            }
        }
    }

    #[test]
    fn extreme_values_round_trip_without_nan() {
        let rows: [fn(usize) -> f32; 6] = [
            |_| 65504.0,
            |i| if i % 2 == 0 { 65504.0 } else { -65504.0 },
            |i| if i == 77 { -65504.0 } else { 1e-8 },
            |_| f32::MIN_POSITIVE / 8.0,
            |i| if i % 3 == 0 { 1e-40 } else { -1e-39 },
            |_| -0.0,
        ];
        for dtype in EXACT.into_iter().chain(SEARCHED) {
            for (case, value) in rows.iter().enumerate() {
                let values: Vec<f32> = (0..256).map(value).collect();
                let back = decode(dtype, &encode(dtype, &values));
                assert!(back.iter().all(|v| v.is_finite()), "{dtype} case {case}");
            }
        }
    }

    #[test]
    fn shapes_that_a_layout_cannot_hold() {
        let i2s = |form| Layout::I2S(form);
        for (layout, n, k, bytes, fits) in [
            (i2s(I2sLayout::Block128), 2, 64, 32, true),
            (i2s(I2sLayout::Block128), 2, 64, 31, false),
            (i2s(I2sLayout::Block128), 2, 65, 33, false),
            (i2s(I2sLayout::Block64), 1, 64, 16, false),
            (i2s(I2sLayout::Rows4), 4, 32, 32, true),
            (i2s(I2sLayout::Rows4), 2, 64, 32, false),
            (i2s(I2sLayout::PaddedRows), 2, 65, 64, true),
            (i2s(I2sLayout::PaddedRows), 2, 65, 33, false),
            (i2s(I2sLayout::PaddedRows), usize::MAX, 2, 0, false),
            (i2s(I2sLayout::Block128), 0, 7, 0, true),
            (i2s(I2sLayout::Block128), usize::MAX, 2, 0, false),
            (Layout::HuggingFace, 5, 3, 6, true),
            (Layout::HuggingFace, 5, 3, 7, false),
            (Layout::HuggingFace, usize::MAX, usize::MAX, 0, false),
            (Layout::Blocks(DType::TQ2_0), 2, 256, 132, true),
            (Layout::Blocks(DType::TQ2_0), 4, 128, 132, false),
            (
                Layout::Blocks(DType::TQ1_0),
                usize::MAX / 256,
                256,
                0,
                false,
            ),
            (Layout::Blocks(DType::Q4_0), 1, 32, 18, false),
            (
                Layout::Values {
                    dtype: DType::I8,
                    scale: 1.0,
                },
                1,
                1,
                1,
                false,
            ),
            (
                Layout::Values {
                    dtype: DType::F32,
                    scale: 1.0,
                },
                usize::MAX / 2,
                2,
                0,
                false,
            ),
            (
                Layout::Masters {
                    dtype: DType::F16,
                    multiplier: 1.0,
                },
                3,
                5,
                30,
                true,
            ),
        ] {
            let zeros = vec![0; bytes];
            let source = Source::new(layout, n, k, &zeros);
            assert_eq!(
                source.is_ok(),
                fits,
                "{layout:?} [{n}, {k}] in {bytes} bytes"
            );
        }
    }

    #[test]
    fn an_empty_tensor_with_a_huge_row_reserves_nothing() {
        let source = Source::new(Layout::HuggingFace, 0, usize::MAX / 2, &[]).unwrap();
        source.repack_rows(0..0, &mut []).unwrap();
        abs_sums(DType::F32, 0, usize::MAX / 2, &[], 0..0, &mut []).unwrap();
    }

    #[test]
    fn rows_that_are_not_there() {
        let bytes = [0x55; 64];
        let source = Source::new(Layout::I2S(I2sLayout::Block128), 2, 128, &bytes).unwrap();
        let mut out = [0; 64];
        let backwards = std::ops::Range { start: 2, end: 1 };
        for rows in [0..3, 3..3, backwards] {
            let error = source.repack_rows(rows.clone(), &mut out).unwrap_err();
            assert!(
                matches!(error, QuantError::Rows { .. }),
                "{rows:?}: {error}"
            );
        }
        assert!(
            source.repack_rows(0..1, &mut out).is_err(),
            "out is too long"
        );
        assert!(source.repack_rows(2..2, &mut []).is_ok());
    }

    #[test]
    fn code_3_is_named() {
        let zeros = 0x55;
        // Row 2, column 64 + 5 of a [3, 128] tensor stored in whole blocks.
        let mut bytes = [zeros; 96];
        bytes[64 + 5] = 0b01_01_11_01;
        let expected = Err(QuantError::InvalidCode { row: 2, col: 69 });
        assert_eq!(check_codes(128, 0, &bytes), expected);
        let layout = Layout::I2S(I2sLayout::Block128);
        assert_eq!(repack(layout, 3, 128, &bytes).map(drop), expected);
        // The same bytes as [6, 64]: blocks straddle rows.
        let expected = Err(QuantError::InvalidCode { row: 5, col: 5 });
        assert_eq!(repack(layout, 6, 64, &bytes).map(drop), expected);

        // Hugging Face: byte (1, 2) of [7, 3], second row of its byte; the eighth doesn't count.
        let mut bytes = [zeros; 6];
        bytes[3 + 2] = 0b11_01_11_01;
        let expected = Err(QuantError::InvalidCode { row: 3, col: 2 });
        assert_eq!(
            repack(Layout::HuggingFace, 7, 3, &bytes).map(drop),
            expected
        );
        bytes[3 + 2] = 0b11_01_01_01;
        assert!(repack(Layout::HuggingFace, 7, 3, &bytes).is_ok());

        let mut bytes = vec![zeros; 132];
        (bytes[64], bytes[65], bytes[130], bytes[131]) = (0, 0x38, 0, 0x38);
        bytes[66 + 40] = 0b01_01_01_11;
        let expected = Err(QuantError::InvalidCode { row: 1, col: 136 });
        assert_eq!(
            repack(Layout::Blocks(DType::TQ2_0), 2, 256, &bytes).map(drop),
            expected
        );
    }

    #[test]
    fn scales_that_differ_or_are_no_numbers() {
        for (dtype, size) in [(DType::TQ1_0, 54), (DType::TQ2_0, 66)] {
            let with = |scales: &[f32]| {
                let mut bytes = vec![0x80; scales.len() * size];
                for (block, scale) in bytes.chunks_mut(size).zip(scales) {
                    let f16 = encode(DType::F16, &[*scale]);
                    block[size - 2..].copy_from_slice(&f16);
                }
                bytes
            };
            assert_eq!(common_block_scale(dtype, &with(&[])), Ok(Some(0.0)));
            assert_eq!(
                common_block_scale(dtype, &with(&[0.0, 0.5, 0.0, 0.5])),
                Ok(Some(0.5))
            );
            assert_eq!(common_block_scale(dtype, &with(&[0.5, 0.25])), Ok(None));
            let mut bytes = with(&[0.5, 0.5]);
            bytes[2 * size - 1] = 0x7c;
            let scale = f32::INFINITY;
            let bad = QuantError::BadScale {
                row: 0,
                block: 1,
                scale,
            };
            assert_eq!(common_block_scale(dtype, &bytes), Err(bad.clone()));
            assert_eq!(repack(Layout::Blocks(dtype), 1, 512, &bytes), Err(bad));
            assert!(common_block_scale(dtype, &bytes[1..]).is_err());
        }
        assert!(common_block_scale(DType::Q4_0, &[]).is_err());
    }

    #[test]
    fn blocks_of_scale_zero_are_zeros() {
        // Codes of +1, −1 and 3 after a scale of 0.
        let mut bytes = [0b11_10_00_10; 66];
        (bytes[64], bytes[65]) = (0, 0);
        let rows = repack(Layout::Blocks(DType::TQ2_0), 1, 256, &bytes).unwrap();
        assert_eq!(rows, [vec![0; 256]]);
    }

    #[test]
    fn values_that_are_not_ternary() {
        let bytes = |values: &[f32]| encode(DType::F32, values);
        let scale = |values: &[f32]| common_value_scale(DType::F32, &bytes(values)).unwrap();
        assert_eq!(scale(&[]), Some(0.0));
        assert_eq!(scale(&[0.0, -0.0]), Some(0.0));
        assert_eq!(scale(&[0.0, -0.3, 0.3]), Some(0.3));
        assert_eq!(scale(&[0.3, 0.3000001]), None);
        let long: Vec<f32> = (0..5000)
            .map(|i| if i == 4999 { 2.0 } else { 1.0 })
            .collect();
        assert_eq!(scale(&long), None);
        for bits in [f32::NAN, f32::INFINITY] {
            let bytes = bits.to_le_bytes();
            assert_eq!(common_value_scale(DType::F32, &bytes), Ok(None));
        }

        let layout = Layout::Values {
            dtype: DType::F32,
            scale: 0.5,
        };
        let rows = repack(layout, 2, 2, &bytes(&[0.5, -0.0, -0.5, 0.5])).unwrap();
        assert_eq!(rows, [[1, 0], [-1, 1]]);
        assert_eq!(
            repack(layout, 2, 2, &bytes(&[0.5, -0.0, -0.5, 0.25])).map(drop),
            Err(QuantError::NotTernary {
                row: 1,
                col: 1,
                value: 0.25,
                scale: 0.5
            })
        );
    }

    #[test]
    fn masters_that_are_no_numbers() {
        let mut bytes = encode(DType::F32, &[1.0; 6]);
        bytes[16..20].copy_from_slice(&f32::NAN.to_le_bytes());
        let error = abs_sums(DType::F32, 2, 3, &bytes, 0..2, &mut [0.0; 2]).unwrap_err();
        assert!(
            matches!(error, QuantError::NotFinite { index: 4, .. }),
            "{error}"
        );
    }

    #[test]
    fn masters_round_half_to_even() {
        let bytes = encode(
            DType::F32,
            &[0.5, -0.5, 0.50000006, -0.50000006, 1.5, -7.0, 0.0, -0.0],
        );
        let layout = Layout::Masters {
            dtype: DType::F32,
            multiplier: 1.0,
        };
        assert_eq!(
            repack(layout, 1, 8, &bytes).unwrap(),
            [[0, 0, 1, -1, 1, -1, 0, 0]]
        );
    }
}

mod properties {
    use super::*;

    /// Values over many orders of magnitude, blocks of zeros among them.
    fn values(blocks: usize) -> impl Strategy<Value = Vec<f32>> {
        let block = (
            -12i32..8,
            prop::collection::vec(-1.0f32..1.0, 256),
            prop::bool::weighted(0.9),
        )
            .prop_map(|(e, v, keep)| {
                let scale = if keep { 2f32.powi(e) } else { 0.0 };
                v.into_iter().map(|x| x * scale).collect::<Vec<_>>()
            });
        prop::collection::vec(block, 1..=blocks).prop_map(|blocks| blocks.concat())
    }

    /// The largest error of a block as a share of its largest magnitude.
    fn bound(dtype: DType) -> f32 {
        match dtype {
            DType::F32 => 0.0,
            DType::F16 => 1.0 / 2048.0,
            DType::BF16 => 1.0 / 256.0,
            // One step where the far end is clipped, half a step elsewhere.
            DType::Q4_0 => 1.0 / 8.0,
            DType::Q4_1 => 1.0 / 15.0,
            DType::Q5_0 => 1.0 / 16.0,
            DType::Q5_1 => 1.0 / 31.0,
            DType::Q8_0 => 0.5 / 127.0,
            // 7 and 8 steps are both stored as 6.
            DType::MXFP4 => 0.25,
            DType::Q1_0 => 1.0,
            _ => 0.5,
        }
    }

    fn trit_rows() -> impl Strategy<Value = (usize, usize, Vec<i8>)> {
        // Row lengths around the block sizes, n·k a multiple of 128 and n of 4.
        let shapes = prop::sample::select(vec![
            (4, 32),
            (128, 1),
            (128, 3),
            (4, 96),
            (128, 127),
            (128, 129),
            (4, 128),
            (8, 256),
            (4, 864),
            (32, 260),
        ]);
        shapes.prop_flat_map(|(n, k)| {
            prop::collection::vec(-1i8..=1, n * k).prop_map(move |trits| (n, k, trits))
        })
    }

    /// Two bits at `shift` of byte `at`.
    fn put(bytes: &mut [u8], at: usize, shift: usize, trit: i8) {
        bytes[at] |= ((trit + 1) as u8) << shift;
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn encode_then_decode_stays_close(values in values(3)) {
            for dtype in EXACT {
                let back = decode(dtype, &encode(dtype, &values));
                let len = dtype.block_len().max(32);
                for (x, y) in values.chunks(len).zip(back.chunks(len)) {
                    let absmax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    // f16 scales round by 2^-11, and below 2^-14 by 2^-25 a step.
                    let slack = absmax * 1e-3 + 127.0 * 2f32.powi(-25);
                    for (x, y) in x.iter().zip(y) {
                        let allowed = bound(dtype) * absmax + slack;
                        prop_assert!((x - y).abs() <= allowed, "{dtype}: {y} for {x} of {absmax}");
                    }
                }
            }
        }

        #[test]
        fn searching_encoders_stay_close_on_average(values in values(1)) {
            let rms = rmse(&values, &vec![0.0; values.len()]);
            // Uniform values; twice the rounding noise of that many bits over a sub-block.
            let shares = [0.35, 0.2, 0.07, 0.035, 0.02];
            for (dtype, share) in SEARCHED.into_iter().zip(shares) {
                let back = decode(dtype, &encode(dtype, &values));
                let error = rmse(&values, &back);
                // Factors below the smallest f16 are lost.
                prop_assert!(error <= share * rms + 1e-5, "{dtype}: {error} of {rms}");
            }
        }

        #[test]
        fn encoding_again_changes_nothing_for_exact_ternary(
            trits in prop::collection::vec(-1i8..=1, 256),
            exponent in -6i32..6,
        ) {
            let scale = 1.5 * 2f32.powi(exponent);
            let values: Vec<f32> = trits.iter().map(|&t| f32::from(t) * scale).collect();
            for dtype in [DType::TQ1_0, DType::TQ2_0, DType::Q2_0, DType::PQ2_0] {
                prop_assert_eq!(&decode(dtype, &encode(dtype, &values)), &values, "{}", dtype);
            }
        }

        #[test]
        fn any_bytes_decode(bytes in prop::collection::vec(any::<u8>(), 0..700), len in 0usize..600) {
            for dtype in DType::ALL {
                let mut out = vec![0.0; len];
                let _ = decode_row(dtype, &bytes, &mut out);
                let blocks = bytes.len() / dtype.block_bytes();
                let mut out = vec![0.0; blocks * dtype.block_len()];
                let _ = decode_row(dtype, &bytes[..blocks * dtype.block_bytes()], &mut out);
                let _ = common_value_scale(dtype, &bytes);
                let _ = common_block_scale(dtype, &bytes);
            }
        }

        #[test]
        fn any_source_repacks_or_is_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..700),
            n in 0usize..40,
            k in 0usize..300,
        ) {
            let dtype = DType::F32;
            for layout in [
                Layout::I2S(I2sLayout::Block128),
                Layout::I2S(I2sLayout::Block64),
                Layout::I2S(I2sLayout::Rows4),
                Layout::I2S(I2sLayout::PaddedRows),
                Layout::HuggingFace,
                Layout::Blocks(DType::TQ1_0),
                Layout::Blocks(DType::TQ2_0),
                Layout::Values { dtype, scale: 1.0 },
                Layout::Masters { dtype, multiplier: f32::NAN },
            ] {
                let _ = repack(layout, n, k, &bytes);
            }
            let _ = unpack_row(&bytes, &mut vec![0; k]);
            let _ = check_codes(k, 0, &bytes);
        }

        #[test]
        fn activations_stay_in_range(x in prop::collection::vec(any::<f32>(), 0..100)) {
            let mut q = vec![0; x.len()];
            let (scale, sum) = q8::quantize_row(&x, &mut q);
            prop_assert!(!scale.is_nan());
            prop_assert_eq!(sum, q.iter().map(|&q| i32::from(q)).sum::<i32>());
        }

        #[test]
        fn trits_survive_every_source((n, k, trits) in trit_rows()) {
            let expected: Vec<Vec<i8>> = trits.chunks(k).map(<[i8]>::to_vec).collect();

            // Each layout is written here element by element, straight from its definition.
            for (form, width) in [(I2sLayout::Block128, 32), (I2sLayout::Block64, 16)] {
                let mut bytes = vec![0; n * k / 4];
                for (e, &trit) in trits.iter().enumerate() {
                    let (block, in_block) = (e / (4 * width), e % (4 * width));
                    let at = block * width + in_block % width;
                    put(&mut bytes, at, 6 - 2 * (in_block / width), trit);
                }
                prop_assert_eq!(&repack(Layout::I2S(form), n, k, &bytes).unwrap(), &expected);
            }

            let mut rows4 = vec![0; n * k / 4];
            let mut hf = vec![0; n * k / 4];
            for (e, &trit) in trits.iter().enumerate() {
                let (row, col) = (e / k, e % k);
                put(&mut rows4, row / 4 * k + col, 6 - 2 * (row % 4), trit);
                put(&mut hf, row % (n / 4) * k + col, row / (n / 4) * 2, trit);
            }
            prop_assert_eq!(&repack(Layout::I2S(I2sLayout::Rows4), n, k, &rows4).unwrap(), &expected);
            let padded = Source::new(Layout::HuggingFace, n, k, &hf).unwrap();
            let mut rows = vec![0; n * row_bytes(k)];
            padded.repack_rows(0..n, &mut rows).unwrap();
            let padded = Layout::I2S(I2sLayout::PaddedRows);
            prop_assert_eq!(&repack(padded, n, k, &rows).unwrap(), &expected);
            prop_assert_eq!(&repack(Layout::HuggingFace, n, k, &hf).unwrap(), &expected);

            let scale = 0.375;
            let values: Vec<f32> = trits.iter().map(|&t| f32::from(t) * scale).collect();
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let bytes = encode(dtype, &values);
                prop_assert!(
                    [Some(scale), Some(0.0)].contains(&common_value_scale(dtype, &bytes).unwrap())
                );
                let layout = Layout::Values { dtype, scale };
                prop_assert_eq!(&repack(layout, n, k, &bytes).unwrap(), &expected);
                let layout = Layout::Masters { dtype, multiplier: scale.recip() };
                prop_assert_eq!(&repack(layout, n, k, &bytes).unwrap(), &expected);
            }
            if k.is_multiple_of(256) {
                for dtype in [DType::TQ1_0, DType::TQ2_0] {
                    let bytes = encode(dtype, &values);
                    prop_assert_eq!(&repack(Layout::Blocks(dtype), n, k, &bytes).unwrap(), &expected);
                }
            }
        }
    }
}
