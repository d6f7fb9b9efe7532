//! Names of quantizations, and the tag that distinguishes variants of a model.
//!
//! The words of three generations of writers are understood; written are those of the format's
//! description: `q4_k_m`, `f16`, and GGML's names in lower case for what it doesn't name.

use super::manifest::QuantizationInfo;
use super::tensors::TensorType;
use crate::DType;

/// The type that a word of `quantizationInfo` or `quantization` means; `None` if it means none
/// that is known here.
///
/// ```
/// use sterna_format::DType;
/// use sterna_format::rdrr::naming::dtype_of;
///
/// for word in ["q4_k_m", "Q4_K_M", "q4k", "Q4_K", "q4"] {
///     assert_eq!(dtype_of(word), Some(DType::Q4_K));
/// }
/// assert_eq!(dtype_of("fp8e4"), Some(DType::F8_E4M3));
/// assert_eq!(dtype_of("w4a16"), None);
/// ```
pub fn dtype_of(word: &str) -> Option<DType> {
    let word = word.to_ascii_lowercase().replace('-', "_");
    let dtype = match word.as_str() {
        "q4" | "q4k" | "q4_k" | "q4_k_m" => DType::Q4_K,
        "q5k" => DType::Q5_K,
        "q6k" => DType::Q6_K,
        "q8" => DType::Q8_0,
        "fp16" | "float16" | "half" => DType::F16,
        "fp32" | "float32" | "float" => DType::F32,
        "bfloat16" => DType::BF16,
        "fp8e4" | "fp8_e4m3" => DType::F8_E4M3,
        "fp8e5" | "fp8_e5m2" => DType::F8_E5M2,
        "i8" | "int8" => DType::I8,
        "i2s" => DType::I2_S,
        "tq1" => DType::TQ1_0,
        "tq2" => DType::TQ2_0,
        word => TensorType::parse(word).known()?,
    };
    Some(dtype)
}

/// The word of `quantizationInfo` for `dtype`, such as `q4_k_m`.
pub fn word_of(dtype: DType) -> String {
    TensorType::from(dtype).to_string().to_ascii_lowercase()
}

/// The word of `quantization` for a model whose weights have type `dtype`, such as `Q4_K_M`.
pub fn quantization_of(dtype: DType) -> String {
    TensorType::from(dtype).to_string()
}

/// Whether two words mean the same.
pub fn same(a: &str, b: &str) -> bool {
    match (dtype_of(a), dtype_of(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a.eq_ignore_ascii_case(b),
    }
}

/// Types of the three parts of a model that are distinguished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// The matrices of the layers.
    pub weights: DType,
    /// The embedding table.
    pub embeddings: DType,
    /// The output head; of a model without a head of its own, the type of the table.
    pub head: DType,
}

impl Variant {
    /// The tag that is appended to a model's name: `wq4_k_m-embf16`, and `-headq6_k` after it where
    /// the head has another type than the embedding table.
    pub fn tag(&self) -> String {
        let (weights, embeddings) = (word_of(self.weights), word_of(self.embeddings));
        match self.head == self.embeddings {
            true => format!("w{weights}-emb{embeddings}"),
            false => format!("w{weights}-emb{embeddings}-head{}", word_of(self.head)),
        }
    }

    /// The `quantizationInfo` of a package of this variant.
    pub fn info(&self) -> QuantizationInfo {
        let has_i2s = [self.weights, self.embeddings, self.head].contains(&DType::I2_S);
        QuantizationInfo {
            weights: word_of(self.weights),
            embeddings: Some(word_of(self.embeddings)),
            lm_head: Some(word_of(self.head)),
            i2s_layout: has_i2s.then(|| "block128".to_owned()),
            variant_tag: Some(self.tag()),
            ..QuantizationInfo::default()
        }
    }

    /// The variant that `info` describes; `None` if a word of it means nothing here.
    pub fn of(info: &QuantizationInfo) -> Option<Variant> {
        let weights = dtype_of(&info.weights)?;
        let embeddings = match &info.embeddings {
            Some(word) => dtype_of(word)?,
            None => weights,
        };
        let head = match &info.lm_head {
            Some(word) => dtype_of(word)?,
            None => embeddings,
        };
        Some(Variant {
            weights,
            embeddings,
            head,
        })
    }

    /// The variant that a tag describes, in the spelling of any writer.
    ///
    /// ```
    /// use sterna_format::rdrr::naming::Variant;
    ///
    /// let ours = Variant::parse_tag("wq4_k_m-embf16").unwrap();
    /// assert_eq!(ours.tag(), "wq4_k_m-embf16");
    /// // January 2026: what equals the part before it is left out.
    /// assert_eq!(Variant::parse_tag("wq4k-ef16"), Some(ours));
    /// // August 2026: letters of the parts that share a type; `a` is for activations.
    /// assert_eq!(Variant::parse_tag("q4k-ehf16-af32"), Some(ours));
    /// assert_eq!(Variant::parse_tag("f16-af32").unwrap().tag(), "wf16-embf16");
    /// ```
    pub fn parse_tag(tag: &str) -> Option<Variant> {
        let tag = tag.to_ascii_lowercase();
        let mut parts = tag.split('-').filter(|part| *part != "col");
        let first = parts.next()?;
        let weights = dtype_of(first).or_else(|| dtype_of(first.strip_prefix('w')?))?;
        let (mut embeddings, mut head) = (None, None);
        for part in parts {
            if let Some(word) = part.strip_prefix("emb") {
                embeddings = Some(dtype_of(word)?);
            } else if let Some(word) = part.strip_prefix("head") {
                head = Some(dtype_of(word)?);
            } else {
                let (letters, dtype) = lettered(part)?;
                if letters.contains('e') {
                    embeddings = Some(dtype);
                }
                if letters.contains('h') {
                    head = Some(dtype);
                }
            }
        }
        let embeddings = embeddings.unwrap_or(weights);
        Some(Variant {
            weights,
            embeddings,
            head: head.unwrap_or(embeddings),
        })
    }
}

/// Letters of parts of a model and the type they share, as in `ehf16`.
fn lettered(part: &str) -> Option<(&str, DType)> {
    const LETTERS: &str = "ehaxvtpc";
    let letters = part.len() - part.trim_start_matches(|c| LETTERS.contains(c)).len();
    (1..=letters)
        .rev()
        .find_map(|n| Some((&part[..n], dtype_of(&part[n..])?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_means_its_type() {
        for dtype in DType::ALL {
            assert_eq!(dtype_of(&word_of(dtype)), Some(dtype), "{dtype}");
            assert_eq!(dtype_of(&quantization_of(dtype)), Some(dtype), "{dtype}");
        }
        assert!(same("Q4_K_M", "q4k") && same("weird", "WEIRD") && !same("f16", "bf16"));
    }

    #[test]
    fn tags_are_read_as_they_are_written() {
        let types = [
            DType::Q4_K,
            DType::F16,
            DType::I2_S,
            DType::Q6_K,
            DType::BF16,
        ];
        for weights in types {
            for embeddings in types {
                for head in types {
                    let variant = Variant {
                        weights,
                        embeddings,
                        head,
                    };
                    let tag = variant.tag();
                    assert_eq!(Variant::parse_tag(&tag), Some(variant), "{tag}");
                    assert_eq!(Variant::of(&variant.info()), Some(variant), "{tag}");
                }
            }
        }
        for tag in ["", "w", "x-y", "wq4k-zf16", "wq4k-e"] {
            assert_eq!(Variant::parse_tag(tag), None, "{tag}");
        }
    }

    #[test]
    fn i2s_packages_name_their_layout() {
        let variant = Variant::parse_tag("wi2_s-embq6_k-headq8_0").unwrap();
        let info = variant.info();
        assert_eq!(info.i2s_layout.as_deref(), Some("block128"));
        assert_eq!(info.variant_tag.as_deref(), Some("wi2_s-embq6_k-headq8_0"));
    }
}
