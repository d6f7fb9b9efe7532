//! The numbers that engine files give architectures, activation functions, actions and types.

use std::fmt;
use std::str::FromStr;

use crate::DType;
use crate::names::module;

/// Architectures by their number in the files and on the command lines of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ArchType {
    /// Nothing is said.
    Unknown,
    /// BitNet: ternary weights, norms before the output projections of attention and FFN.
    BitNet,
    /// Llama and what is built like it.
    Llama,
    /// Qwen3.5, of which nothing but the name is known here.
    Qwen35,
    /// Qwen3 with weights of one bit.
    Bonsai,
    /// Qwen3 with ternary weights in groups.
    BonsaiTernary,
    /// Qwen3.
    Qwen3,
    /// An image model, of which nothing but the name is known here.
    BonsaiImage,
}

impl ArchType {
    /// Every architecture; its place here is its number.
    pub const ALL: [ArchType; 8] = [
        ArchType::Unknown,
        ArchType::BitNet,
        ArchType::Llama,
        ArchType::Qwen35,
        ArchType::Bonsai,
        ArchType::BonsaiTernary,
        ArchType::Qwen3,
        ArchType::BonsaiImage,
    ];

    /// Its number.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The architecture with the number `code`.
    pub fn from_code(code: u32) -> Option<ArchType> {
        ArchType::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// The class of Transformers that has such models, and the `model_type` of their configuration.
    ///
    /// Bonsai's are those of Qwen3.
    pub const fn class(self) -> Option<(&'static str, &'static str)> {
        match self {
            ArchType::Unknown | ArchType::BonsaiImage => None,
            ArchType::BitNet => Some(("BitNetForCausalLM", "bitnet")),
            ArchType::Llama => Some(("LlamaForCausalLM", "llama")),
            ArchType::Qwen35 => Some(("Qwen3_5ForCausalLM", "qwen3_5_text")),
            ArchType::Bonsai | ArchType::BonsaiTernary | ArchType::Qwen3 => {
                Some(("Qwen3ForCausalLM", "qwen3"))
            }
        }
    }

    /// The architecture of models of this class of Transformers, in any case; Qwen3 of its own. Qwen2 and
    /// Mistral have the layers of Llama, with biases where they have some.
    pub fn from_class(class: &str) -> Option<ArchType> {
        // As an older checkpoint calls it.
        if class.eq_ignore_ascii_case("BitnetBPEForCausalLM") {
            return Some(ArchType::BitNet);
        }
        let as_llama = ["Qwen2ForCausalLM", "MistralForCausalLM"];
        if as_llama.iter().any(|own| own.eq_ignore_ascii_case(class)) {
            return Some(ArchType::Llama);
        }
        let plain = [
            ArchType::BitNet,
            ArchType::Llama,
            ArchType::Qwen35,
            ArchType::Qwen3,
        ];
        let is_it = |arch: &ArchType| {
            let own = arch.class();
            own.is_some_and(|(own, _)| own.eq_ignore_ascii_case(class))
        };
        plain.into_iter().find(is_it)
    }

    /// Its name in lower case, such as `bonsai_ternary`.
    pub const fn name(self) -> &'static str {
        match self {
            ArchType::Unknown => "unknown",
            ArchType::BitNet => "bitnet",
            ArchType::Llama => "llama",
            ArchType::Qwen35 => "qwen35",
            ArchType::Bonsai => "bonsai",
            ArchType::BonsaiTernary => "bonsai_ternary",
            ArchType::Qwen3 => "qwen3",
            ArchType::BonsaiImage => "bonsai_image",
        }
    }
}

impl fmt::Display for ArchType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word is no architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected an architecture as a number from 0 to 7 or by its name, such as bitnet or llama")]
pub struct UnknownArch;

impl FromStr for ArchType {
    type Err = UnknownArch;

    /// Reads a number or, in any case, a name.
    fn from_str(word: &str) -> Result<ArchType, UnknownArch> {
        let by_name = || {
            let named = |arch: &ArchType| arch.name().eq_ignore_ascii_case(word);
            ArchType::ALL.into_iter().find(named)
        };
        let by_code = word.parse().ok().and_then(ArchType::from_code);
        by_code.or_else(by_name).ok_or(UnknownArch)
    }
}

/// Activation functions of an FFN by their number on the command lines of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationType {
    /// The square of what is above zero.
    ReluSquared,
    /// `x · sigmoid(x)`.
    Silu,
}

impl ActivationType {
    /// Every function; its place here is its number.
    pub const ALL: [ActivationType; 2] = [ActivationType::ReluSquared, ActivationType::Silu];

    /// Its number.
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// Element types of the tensors that a quantize manifest lists, by their number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
// The names are the documentation.
#[allow(missing_docs)]
pub enum SourceType {
    F32,
    F16,
    BF16,
    I8,
    U8,
}

impl SourceType {
    /// Every type; its place here is its number.
    pub const ALL: [SourceType; 5] = [
        SourceType::F32,
        SourceType::F16,
        SourceType::BF16,
        SourceType::I8,
        SourceType::U8,
    ];

    /// Its number.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The type with the number `code`.
    pub fn from_code(code: u8) -> Option<SourceType> {
        SourceType::ALL.get(usize::from(code)).copied()
    }

    /// The type of the same name.
    pub const fn dtype(self) -> DType {
        match self {
            SourceType::F32 => DType::F32,
            SourceType::F16 => DType::F16,
            SourceType::BF16 => DType::BF16,
            SourceType::I8 => DType::I8,
            SourceType::U8 => DType::U8,
        }
    }

    /// The type of the same name, if manifests have a number for it.
    pub fn from_dtype(dtype: DType) -> Option<SourceType> {
        let same = |source: &SourceType| source.dtype() == dtype;
        SourceType::ALL.into_iter().find(same)
    }

    /// Whether elements are floats.
    pub const fn is_float(self) -> bool {
        matches!(self, SourceType::F32 | SourceType::F16 | SourceType::BF16)
    }
}

/// What is to be done with a tensor on its way into an engine's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Copied in the float type that it has.
    Raw,
    /// Floats are made into trits with one scale.
    TernaryQuantize,
    /// An embedding table is made into int8.
    EmbeddingI8,
    /// Stored trits are laid out anew.
    RepackTernary,
    /// Made into one bit an element, in groups of 128.
    Q1_0,
    /// Made into trits with a scale for each group of 128.
    GroupedTernary,
    /// Made into blocks of 32 of four bits; in image models.
    Q4_0,
    /// Made into blocks of 32 of int8.
    Q8_0,
    /// The same, for engines that interleave 32 rows.
    Q8_0Blocked,
}

impl Action {
    /// Every action.
    pub const ALL: [Action; 9] = [
        Action::Raw,
        Action::TernaryQuantize,
        Action::EmbeddingI8,
        Action::RepackTernary,
        Action::Q1_0,
        Action::GroupedTernary,
        Action::Q4_0,
        Action::Q8_0,
        Action::Q8_0Blocked,
    ];

    /// Its number in files of `arch`: 6 means one thing for image models and another elsewhere.
    /// `None` if those have no number for it.
    pub fn code(self, arch: ArchType) -> Option<u8> {
        let image = arch == ArchType::BonsaiImage;
        match self {
            Action::Raw => Some(0),
            Action::TernaryQuantize => Some(1),
            Action::EmbeddingI8 => Some(2),
            Action::RepackTernary => Some(3),
            Action::Q1_0 => Some(4),
            Action::GroupedTernary => Some(5),
            Action::Q4_0 => image.then_some(6),
            Action::Q8_0 => (!image).then_some(6),
            Action::Q8_0Blocked => Some(7),
        }
    }

    /// What `code` means in files of `arch`.
    pub fn from_code(code: u8, arch: ArchType) -> Option<Action> {
        let meant = |action: &Action| action.code(arch) == Some(code);
        Action::ALL.into_iter().find(meant)
    }

    /// The type that elements of `source` are stored in; `None` if the action doesn't take them.
    pub const fn stored_type(self, source: SourceType) -> Option<DType> {
        match (self, source.is_float()) {
            (Action::Raw, true) => Some(source.dtype()),
            (Action::TernaryQuantize, true) | (Action::RepackTernary, false) => Some(DType::I2_S),
            (Action::EmbeddingI8 | Action::Q8_0 | Action::Q8_0Blocked, true) => Some(DType::Q8_0),
            (Action::Q1_0, true) => Some(DType::Q1_0),
            (Action::GroupedTernary, true) => Some(DType::PQ2_0),
            (Action::Q4_0, true) => Some(DType::Q4_0),
            (Action::RepackTernary, true) | (_, false) => None,
        }
    }

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Raw => "BF16_RAW",
            Action::TernaryQuantize => "TERNARY_QUANTIZE",
            Action::EmbeddingI8 => "EMBEDDING_I8",
            Action::RepackTernary => "REPACK_TERNARY",
            Action::Q1_0 => "Q1_0_128",
            Action::GroupedTernary => "GROUPED_TERNARY_128",
            Action::Q4_0 => "Q4_0",
            Action::Q8_0 => "Q8_0",
            Action::Q8_0Blocked => "Q8_0_BLOCKED_32",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Projections that an adapter may change, in the order of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
// The names are the documentation.
#[allow(missing_docs)]
pub enum LoraTarget {
    K,
    V,
    Q,
    O,
    Gate,
    Up,
    Down,
}

impl LoraTarget {
    /// Every projection; its place here is its place in a layer of the files.
    pub const ALL: [LoraTarget; 7] = [
        LoraTarget::K,
        LoraTarget::V,
        LoraTarget::Q,
        LoraTarget::O,
        LoraTarget::Gate,
        LoraTarget::Up,
        LoraTarget::Down,
    ];

    /// The module's path in a layer of a Hugging Face checkpoint, such as `self_attn.k_proj`.
    pub const fn module(self) -> &'static str {
        match self {
            LoraTarget::K => module::K,
            LoraTarget::V => module::V,
            LoraTarget::Q => module::Q,
            LoraTarget::O => module::O,
            LoraTarget::Gate => module::GATE,
            LoraTarget::Up => module::UP,
            LoraTarget::Down => module::DOWN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_lead_back() {
        for (i, arch) in ArchType::ALL.into_iter().enumerate() {
            assert_eq!(arch.code() as usize, i);
            assert_eq!(ArchType::from_code(arch.code()), Some(arch));
            assert_eq!(arch.name().to_uppercase().parse(), Ok(arch));
            assert_eq!(i.to_string().parse(), Ok(arch));
            for action in Action::ALL {
                if let Some(code) = action.code(arch) {
                    assert_eq!(Action::from_code(code, arch), Some(action));
                }
            }
            assert_eq!(Action::from_code(8, arch), None);
        }
        for (i, source) in SourceType::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(source.code()), i);
            assert_eq!(SourceType::from_code(source.code()), Some(source));
            assert_eq!(SourceType::from_dtype(source.dtype()), Some(source));
        }
        for (i, target) in LoraTarget::ALL.into_iter().enumerate() {
            assert_eq!(target as usize, i);
        }
        for word in ["8", "-1", "", "bit net"] {
            assert_eq!(word.parse::<ArchType>(), Err(UnknownArch));
        }
        for (i, activation) in ActivationType::ALL.into_iter().enumerate() {
            assert_eq!(activation.code() as usize, i);
        }
    }

    #[test]
    fn code_6_depends_on_the_architecture() {
        assert_eq!(
            Action::from_code(6, ArchType::BonsaiImage),
            Some(Action::Q4_0)
        );
        assert_eq!(Action::from_code(6, ArchType::Qwen3), Some(Action::Q8_0));
    }
}
