//! Tensor type ids: which encoding a number in a file means.
//!
//! Three ids are used for more than one encoding by different writers (39, 40, 42), so the space a
//! tensor has up to the next one takes part in the decision.

use crate::DType;

use super::GgufError;

/// The id a writer gives `dtype`; `None` if GGUF has none.
pub(crate) fn type_id(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q5_0 => 6,
        DType::Q5_1 => 7,
        DType::Q8_0 => 8,
        DType::Q2_K => 10,
        DType::Q3_K => 11,
        DType::Q4_K => 12,
        DType::Q5_K => 13,
        DType::Q6_K => 14,
        DType::I8 => 24,
        DType::I16 => 25,
        DType::I32 => 26,
        DType::I64 => 27,
        DType::F64 => 28,
        DType::BF16 => 30,
        DType::TQ1_0 => 34,
        DType::TQ2_0 => 35,
        DType::I2_S => 36,
        DType::MXFP4 => MXFP4_OR_TL2,
        DType::Q1_0 => 41,
        DType::Q2_0 | DType::Q2_0_G128 => Q2_0,
        DType::PQ2_0 => 142,
        DType::PTQ1_0 => 143,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::Bool | DType::C64 => return None,
        DType::F8_E4M3 | DType::F8_E5M2 | DType::F8_E8M0 => return None,
        DType::F6_E2M3 | DType::F6_E3M2 | DType::F4 => return None,
    })
}

const MXFP4_OR_TL2: u32 = 39;
const NVFP4_OR_OLD_Q1_0: u32 = 40;
const Q2_0: u32 = 42;

/// Known encodings that aren't read, with what to tell the user.
const REFUSED: [(u32, &str, &str); 20] = [
    (4, "Q4_2", LONG_GONE),
    (5, "Q4_3", LONG_GONE),
    (
        9,
        "Q8_1",
        "it is an intermediate type that no model file should hold",
    ),
    (
        15,
        "Q8_K",
        "it is an intermediate type that no model file should hold",
    ),
    (16, "IQ2_XXS", OTHER_QUANT),
    (17, "IQ2_XS", OTHER_QUANT),
    (18, "IQ3_XXS", OTHER_QUANT),
    (19, "IQ1_S", OTHER_QUANT),
    (20, "IQ4_NL", OTHER_QUANT),
    (21, "IQ3_S", OTHER_QUANT),
    (22, "IQ2_S", OTHER_QUANT),
    (23, "IQ4_XS", OTHER_QUANT),
    (29, "IQ1_M", OTHER_QUANT),
    (31, "Q4_0_4_4", REPACKED),
    (32, "Q4_0_4_8", REPACKED),
    (33, "Q4_0_8_8", REPACKED),
    (37, "I8_S", "it is an intermediate type of the BitNet fork"),
    (38, "TL1", FETCH_I2_S),
    (NVFP4_OR_OLD_Q1_0, "NVFP4", OTHER_QUANT),
    (MXFP4_OR_TL2, "TL2", FETCH_I2_S),
];

const OTHER_QUANT: &str = "fetch a file of the model in another quantization, such as Q4_K or Q8_0";
const LONG_GONE: &str = "it was removed from GGML in 2023; convert the model again";
const REPACKED: &str = "it was removed from GGML; fetch the Q4_0 file of the model instead";
const FETCH_I2_S: &str = "its tiling depends on constants that aren't in the file; \
     fetch the I2_S file of the model instead";
const OLD_Q1_0: &str = "it is Q1_0 in the early 32-element blocks; fetch a newer file of the model, \
     which has Q1_0 under id 41";

/// What is known about a tensor when its type is resolved.
pub(super) struct Site<'a> {
    pub(super) name: &'a str,
    pub(super) id: u32,
    pub(super) n_elements: u64,
    /// Elements of a row.
    pub(super) k: u64,
    /// Bytes up to the next tensor, or to the end of the file.
    pub(super) space: u64,
    pub(super) alignment: u64,
}

impl Site<'_> {
    /// True if a tensor of `bytes` fills the space, padded or (before the end of the file) not.
    fn filled_by(&self, bytes: Option<u64>) -> bool {
        bytes.is_some_and(|b| {
            b == self.space || b.checked_next_multiple_of(self.alignment) == Some(self.space)
        })
    }

    fn filled_by_type(&self, dtype: DType) -> bool {
        self.k.is_multiple_of(dtype.block_len() as u64)
            && self.filled_by(dtype.tensor_bytes(self.n_elements))
    }

    fn refused(&self, kind: &'static str, advice: &'static str) -> GgufError {
        GgufError::RefusedTensorType {
            name: self.name.to_owned(),
            id: self.id,
            kind,
            advice,
        }
    }
}

/// The groups of Q2_0 that a file holds: 64 elements unless more of its tensors fit 128.
pub(super) fn q2_0_of_file<'a>(sites: impl Iterator<Item = Site<'a>>) -> DType {
    let (mut g64, mut g128) = (0_usize, 0_usize);
    for site in sites.filter(|site| site.id == Q2_0) {
        match (
            site.filled_by_type(DType::Q2_0),
            site.filled_by_type(DType::Q2_0_G128),
        ) {
            (true, false) => g64 += 1,
            (false, true) => g128 += 1,
            _ => {}
        }
    }
    if g128 > g64 {
        DType::Q2_0_G128
    } else {
        DType::Q2_0
    }
}

/// The encoding of the tensor at `site`.
///
/// `architecture` is the file's, if it says; `q2_0` is what [`q2_0_of_file`] found.
pub(super) fn resolve(
    site: &Site<'_>,
    architecture: Option<&str>,
    q2_0: DType,
) -> Result<DType, GgufError> {
    match site.id {
        Q2_0 => Ok(
            match (
                site.filled_by_type(DType::Q2_0),
                site.filled_by_type(DType::Q2_0_G128),
            ) {
                (true, false) => DType::Q2_0,
                (false, true) => DType::Q2_0_G128,
                _ => q2_0,
            },
        ),
        MXFP4_OR_TL2 => {
            let bitnet = architecture.is_some_and(|a| a.starts_with("bitnet"));
            let tl2 = site.filled_by(tl2_bytes(site.n_elements, site.k));
            if !site.filled_by_type(DType::MXFP4) && (bitnet || tl2) {
                return Err(site.refused("TL2", FETCH_I2_S));
            }
            Ok(DType::MXFP4)
        }
        NVFP4_OR_OLD_Q1_0 if site.filled_by(old_q1_0_bytes(site.n_elements)) => {
            Err(site.refused("Q1_0", OLD_Q1_0))
        }
        id => {
            if let Some(dtype) = DType::ALL.into_iter().find(|&d| type_id(d) == Some(id)) {
                return Ok(dtype);
            }
            match REFUSED.iter().find(|&&(refused, ..)| refused == id) {
                Some(&(_, kind, advice)) => Err(site.refused(kind, advice)),
                None => Err(GgufError::UnknownTensorType {
                    name: site.name.to_owned(),
                    id,
                }),
            }
        }
    }
}

/// Size of a TL2 tensor: 256 columns as pairs of 4 bits, the others as triples of 5 bits, rounded
/// up to 32 bytes, and 32 bytes of scale.
fn tl2_bytes(n_elements: u64, k: u64) -> Option<u64> {
    let rows = n_elements.checked_div(k)?;
    let triples = k.checked_sub(256)?.checked_mul(rows)? / 3;
    let pairs = rows.checked_mul(128)?;
    let bits = triples.checked_mul(5)?.checked_add(pairs.checked_mul(4)?)?;
    (bits / 8).checked_next_multiple_of(32)?.checked_add(32)
}

/// Size of a tensor in the Q1_0 of early PrismML files: an f16 and 32 sign bits a block.
fn old_q1_0_bytes(n_elements: u64) -> Option<u64> {
    if !n_elements.is_multiple_of(32) {
        return None;
    }
    (n_elements / 32).checked_mul(6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(id: u32, k: u64, rows: u64, space: u64) -> Site<'static> {
        Site {
            name: "t",
            id,
            n_elements: k * rows,
            k,
            space,
            alignment: 32,
        }
    }

    #[test]
    fn ids_and_types_agree() {
        for dtype in DType::ALL {
            let Some(id) = type_id(dtype) else { continue };
            if dtype == DType::Q2_0_G128 {
                continue;
            }
            let n = 1 << 12;
            let space = dtype.tensor_bytes(n).unwrap();
            assert_eq!(
                resolve(&site(id, n, 1, space), None, DType::Q2_0),
                Ok(dtype),
                "{dtype}"
            );
        }
    }

    #[test]
    fn q2_0_groups_show_in_the_space() {
        // 2048 elements: 576 bytes in groups of 64, 544 in groups of 128.
        for (space, expected) in [(576, DType::Q2_0), (544, DType::Q2_0_G128)] {
            let site = site(42, 2048, 1, space);
            assert_eq!(resolve(&site, None, DType::Q2_0), Ok(expected));
        }
        // 128 elements: 36 or 34 bytes, both padded to 64, so the rest of the file decides.
        for q2_0 in [DType::Q2_0, DType::Q2_0_G128] {
            assert_eq!(resolve(&site(42, 128, 1, 64), None, q2_0), Ok(q2_0));
        }
        let file =
            |spaces: [u64; 3]| q2_0_of_file(spaces.into_iter().map(|s| site(42, 2048, 1, s)));
        assert_eq!(file([544, 544, 4096]), DType::Q2_0_G128);
        assert_eq!(file([576, 544, 4096]), DType::Q2_0);
        assert_eq!(
            q2_0_of_file([site(42, 128, 1, 64)].into_iter()),
            DType::Q2_0
        );
    }

    #[test]
    fn id_39_is_mxfp4_unless_the_file_says_otherwise() {
        let mxfp4 = DType::MXFP4.tensor_bytes(1024 * 64).unwrap();
        let tl2 = tl2_bytes(1024 * 64, 1024).unwrap();
        assert_eq!(tl2, ((1024 - 256) * 64 / 3 * 5 + 128 * 64 * 4) / 8 + 32);
        for (space, architecture, refused) in [
            (mxfp4, Some("gpt-oss"), false),
            (mxfp4, Some("bitnet-b1.58"), false),
            (mxfp4, None, false),
            (tl2, Some("bitnet-b1.58"), true),
            (tl2, Some("llama"), true),
            (tl2, None, true),
            (mxfp4 + 4096, Some("llama"), false),
            (mxfp4 + 4096, Some("bitnet"), true),
        ] {
            let result = resolve(&site(39, 1024, 64, space), architecture, DType::Q2_0);
            assert_eq!(result.is_err(), refused, "{space} {architecture:?}");
            if let Err(e) = result {
                assert!(e.to_string().contains("fetch the I2_S file"), "{e}");
            }
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (id, space, message) in [
            (
                38,
                64,
                "tensor `t`: type TL1 (id 38) isn't supported; its tiling depends on constants that aren't in the file; fetch the I2_S file of the model instead",
            ),
            (
                40,
                1024 / 32 * 6,
                "tensor `t`: type Q1_0 (id 40) isn't supported; it is Q1_0 in the early 32-element blocks; fetch a newer file of the model, which has Q1_0 under id 41",
            ),
            (
                40,
                576,
                "tensor `t`: type NVFP4 (id 40) isn't supported; fetch a file of the model in another quantization, such as Q4_K or Q8_0",
            ),
            (144, 576, "tensor `t`: unknown type id 144"),
        ] {
            let error = resolve(&site(id, 1024, 1, space), None, DType::Q2_0).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
