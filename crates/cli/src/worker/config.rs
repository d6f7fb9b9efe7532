//! The configuration passed to a worker: among the arguments of the process in version 1 of the protocol, as
//! a block of lines in the keyed form.

use std::fmt;
use std::path::PathBuf;

use serde_json::{Value, json};
use sterna_engine::{ModelConfig, ModelPlan};
use sterna_format::DType;
use sterna_format::bundle::{ActivationType, ArchType};
use sterna_kernels::activation::Activation;

use super::protocol::{PROTOCOL_VERSION, Pairs, ProtocolError, number, quoted};
use crate::args;

/// The model as described by its driver, and how to run it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WorkerConfig {
    arch: ArchType,
    activation: ActivationType,
    /// Possibly rounded up to a multiple of [`PADDING`], as are those of the feed-forward block.
    hidden_dim: usize,
    intermediate_dim: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    vocab_size: usize,
    head_dim: usize,
    max_position_embeddings: usize,
    norm_eps: f64,
    rope_theta: f64,
    tie_word_embeddings: bool,
    has_qkv_bias: bool,
    has_attn_sub_norm: bool,
    has_ffn_sub_norm: bool,
    /// 0 for as many as suit the machine.
    num_threads: usize,
    eos_ids: Vec<u32>,
    lora_dir: Option<PathBuf>,
    lora_quant: Quant,
    unembed_quant: Quant,
}

/// The kind of a model of the family that messages call `name`.
fn arch_of_family(name: &str) -> ArchType {
    match name {
        "bitnet" | "bitnet (SiLU)" => ArchType::BitNet,
        "llama" | "mistral" | "qwen2" => ArchType::Llama,
        "qwen3" => ArchType::Qwen3,
        _ => ArchType::Unknown,
    }
}

/// Its name in Hugging Face configurations.
const fn hf_activation(activation: ActivationType) -> &'static str {
    match activation {
        ActivationType::ReluSquared => "relu2",
        ActivationType::Silu => "silu",
    }
}

/// The number that version 1 has for an activation, if it has one.
fn numbered(activation: Activation) -> Option<ActivationType> {
    match activation {
        Activation::Relu2 => Some(ActivationType::ReluSquared),
        Activation::Silu => Some(ActivationType::Silu),
        Activation::Relu
        | Activation::GeluTanh
        | Activation::GeluErf
        | Activation::ClampedSwiglu => None,
    }
}

/// Types that weights may be converted to, with several spellings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Quant {
    /// Unchanged.
    #[default]
    Keep,
    /// As blocks or floats of this type.
    As(DType),
}

impl Quant {
    fn parse(place: impl fmt::Display, text: &str) -> Result<Quant, ProtocolError> {
        let dtype = match text.trim().to_ascii_lowercase().as_str() {
            "none" => return Ok(Quant::Keep),
            "q8" | "q8_0" | "int8" | "i8" => DType::Q8_0,
            "q6_k" => DType::Q6_K,
            "q5_0" => DType::Q5_0,
            "q4" | "q4_0" | "int4" | "i4" => DType::Q4_0,
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => {
                let expected = "q8_0, q6_k, q5_0, q4_0, f32, f16, bf16 or none";
                return Err(ProtocolError::new(place, expected, quoted(text.as_bytes())));
            }
        };
        Ok(Quant::As(dtype))
    }

    /// The type, if it is another than the stored one.
    pub(crate) fn dtype(self) -> Option<DType> {
        match self {
            Quant::Keep => None,
            Quant::As(dtype) => Some(dtype),
        }
    }
}

/// Drivers round widths up to a multiple of this.
const PADDING: usize = 128;
/// Maximum EOS ids in version 1.
const MAX_EOS_IDS: usize = 8;

/// Largest accepted count or width, as in the engine.
const MAX_COUNT: usize = 1 << 28;

/// The arguments of version 1 that come before the EOS ids, in order.
const ARGUMENTS: [&str; 18] = [
    "arch_type",
    "activation",
    "hidden_dim",
    "intermediate_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
    "norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "has_qkv_bias",
    "has_attn_sub_norm",
    "has_ffn_sub_norm",
    "num_threads",
    "num_eos_tokens",
];

/// Settings by name, with their place in messages.
struct Settings<'a> {
    /// What they are part of.
    place: &'static str,
    get: &'a dyn Fn(&str) -> Option<&'a str>,
}

impl Settings<'_> {
    fn place(&self, key: &str) -> String {
        format!("{}: `{key}`", self.place)
    }

    fn required(&self, key: &str) -> Result<&str, ProtocolError> {
        (self.get)(key)
            .ok_or_else(|| ProtocolError::new(self.place, format_args!("key `{key}`"), "none"))
    }

    /// A count or a width.
    fn count(&self, key: &str) -> Result<usize, ProtocolError> {
        let expected = format!("1 to {MAX_COUNT}");
        let text = self.required(key)?.as_bytes();
        number(self.place(key), text, &expected, |n| {
            (1..=MAX_COUNT).contains(n)
        })
    }

    fn positive(&self, key: &str) -> Result<f64, ProtocolError> {
        let text = self.required(key)?.as_bytes();
        number(self.place(key), text, "a number above 0", |x: &f64| {
            *x > 0.0 && x.is_finite()
        })
    }

    fn flag(&self, key: &str) -> Result<bool, ProtocolError> {
        let text = self.required(key)?.as_bytes();
        let flag: u8 = number(self.place(key), text, "0 or 1", |flag| *flag <= 1)?;
        Ok(flag == 1)
    }

    /// One of `all`, by its index.
    fn one_of<T: Copy>(&self, key: &str, all: &[T]) -> Result<T, ProtocolError> {
        let expected = format!("0 to {}", all.len() - 1);
        let text = self.required(key)?.as_bytes();
        let i: usize = number(self.place(key), text, &expected, |i| *i < all.len())?;
        Ok(all[i])
    }

    fn threads(&self) -> Result<usize, ProtocolError> {
        let (key, max) = ("num_threads", args::MAX_THREADS);
        let text = (self.get)(key).unwrap_or("0").as_bytes();
        number(self.place(key), text, &format!("0 to {max}"), |n| *n <= max)
    }

    fn quant(&self, key: &str) -> Result<Quant, ProtocolError> {
        match (self.get)(key) {
            Some(text) => Quant::parse(self.place(key), text),
            None => Ok(Quant::Keep),
        }
    }

    /// What both forms share, with `eos_ids`.
    fn read(&self, eos_ids: Vec<u32>) -> Result<WorkerConfig, ProtocolError> {
        Ok(WorkerConfig {
            arch: self.one_of("arch_type", &ArchType::ALL)?,
            activation: self.one_of("activation", &ActivationType::ALL)?,
            hidden_dim: self.count("hidden_dim")?,
            intermediate_dim: self.count("intermediate_dim")?,
            num_layers: self.count("num_layers")?,
            num_heads: self.count("num_heads")?,
            num_kv_heads: self.count("num_kv_heads")?,
            vocab_size: self.count("vocab_size")?,
            head_dim: self.count("head_dim")?,
            max_position_embeddings: self.count("max_position_embeddings")?,
            norm_eps: self.positive("norm_eps")?,
            rope_theta: self.positive("rope_theta")?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
            has_qkv_bias: self.flag("has_qkv_bias")?,
            has_attn_sub_norm: self.flag("has_attn_sub_norm")?,
            has_ffn_sub_norm: self.flag("has_ffn_sub_norm")?,
            num_threads: self.threads()?,
            eos_ids,
            lora_dir: (self.get)("lora_dir").map(PathBuf::from),
            lora_quant: self.quant("lora_quant")?,
            unembed_quant: self.quant("unembed_quant")?,
        })
    }
}

impl WorkerConfig {
    /// Parses the arguments after `--config`, in the order of version 1.
    pub(crate) fn from_args(args: &[String]) -> Result<WorkerConfig, ProtocolError> {
        let place = "--config";
        let (named, eos_ids) = args.split_at_checked(ARGUMENTS.len()).ok_or_else(|| {
            let expected = format!("{} arguments, then the EOS ids", ARGUMENTS.len());
            ProtocolError::new(place, expected, args.len())
        })?;
        let get = |key: &str| {
            let i = ARGUMENTS.iter().position(|name| *name == key)?;
            Some(named[i].as_str())
        };
        let settings = Settings { place, get: &get };
        let (key, max) = ("num_eos_tokens", MAX_EOS_IDS);
        let text = settings.required(key)?.as_bytes();
        let n_eos: usize = number(settings.place(key), text, &format!("0 to {max}"), |n| {
            *n <= max
        })?;
        if eos_ids.len() != n_eos {
            let expected = format!("{n_eos} EOS ids behind `{key}`");
            return Err(ProtocolError::new(place, expected, eos_ids.len()));
        }
        let ids = eos_ids.iter().map(String::as_bytes);
        settings.read(parse_eos_ids(place, ids)?)
    }

    /// Parses the block that begins the keyed form.
    pub(crate) fn from_pairs(pairs: &Pairs) -> Result<WorkerConfig, ProtocolError> {
        let get = |key: &str| pairs.get(key);
        let settings = Settings {
            place: "first block",
            get: &get,
        };
        let key = "protocol_version";
        if let Some(text) = get(key) {
            let expected = PROTOCOL_VERSION.to_string();
            number(
                settings.place(key),
                text.as_bytes(),
                &expected,
                |version: &u32| *version == PROTOCOL_VERSION,
            )?;
        }
        let key = "eos_tokens";
        // A reply ends with one of them, so there must be one.
        let ids = settings.required(key)?.as_bytes();
        let ids = ids.split(|&byte| byte == b',');
        settings.read(parse_eos_ids(&settings.place(key), ids)?)
    }

    /// The version 1 description of the model of `plan`, whose texts end with one of `eos_ids`, of which it
    /// takes the first eight.
    ///
    /// Fails if version 1 has no number for its activation.
    pub(crate) fn of_model(
        plan: &ModelPlan,
        eos_ids: &[u32],
    ) -> Result<WorkerConfig, ProtocolError> {
        let config = plan.config();
        let activation = numbered(config.activation).ok_or_else(|| {
            let found = format!("{:?}", config.activation);
            ProtocolError::new("activation", "one that version 1 has a number for", found)
        })?;
        let has = |name: &str| plan.requests().any(|tensor| tensor.name == name);
        // The shortest decimal that rounds to the same f32.
        let norm_eps = config.norm_eps.to_string().parse();
        Ok(WorkerConfig {
            arch: arch_of_family(config.family.name),
            activation,
            hidden_dim: config.model_dim,
            intermediate_dim: config.ffn_dim,
            num_layers: config.n_layers,
            num_heads: config.n_heads,
            num_kv_heads: config.n_kv_heads,
            vocab_size: config.n_vocab,
            head_dim: config.head_dim,
            max_position_embeddings: config.max_ctx,
            norm_eps: norm_eps.unwrap_or(f64::from(config.norm_eps)),
            rope_theta: config.ropes[0].base,
            tie_word_embeddings: !has("output.weight"),
            has_qkv_bias: has("blk.0.attn_q.bias"),
            has_attn_sub_norm: has("blk.0.attn_sub_norm.weight"),
            has_ffn_sub_norm: has("blk.0.ffn_sub_norm.weight"),
            num_threads: 0,
            eos_ids: eos_ids.iter().copied().take(MAX_EOS_IDS).collect(),
            lora_dir: None,
            lora_quant: Quant::Keep,
            unembed_quant: Quant::Keep,
        })
    }

    /// The equivalent arguments of version 1, separated by spaces.
    pub(crate) fn to_args(&self) -> String {
        let flag = |flag: bool| u8::from(flag).to_string();
        let mut args = vec![
            self.arch.code().to_string(),
            self.activation.code().to_string(),
            self.hidden_dim.to_string(),
            self.intermediate_dim.to_string(),
            self.num_layers.to_string(),
            self.num_heads.to_string(),
            self.num_kv_heads.to_string(),
            self.vocab_size.to_string(),
            self.head_dim.to_string(),
            self.max_position_embeddings.to_string(),
            self.norm_eps.to_string(),
            self.rope_theta.to_string(),
            flag(self.tie_word_embeddings),
            flag(self.has_qkv_bias),
            flag(self.has_attn_sub_norm),
            flag(self.has_ffn_sub_norm),
            self.num_threads.to_string(),
            self.eos_ids.len().to_string(),
        ];
        args.extend(self.eos_ids.iter().map(u32::to_string));
        args.join(" ")
    }

    /// An equivalent `config.json` of a Hugging Face checkpoint, for a model whose files have none. Widths
    /// are as given, possibly rounded up.
    pub(crate) fn hf_config(&self) -> Value {
        let names = self.arch.class();
        json!({
            "architectures": names.map(|(class, _)| class).as_slice(),
            "model_type": names.map(|(_, model_type)| model_type),
            "hidden_size": self.hidden_dim,
            "intermediate_size": self.intermediate_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.has_qkv_bias,
            "hidden_act": hf_activation(self.activation),
            "eos_token_id": self.eos_ids,
        })
    }

    /// Checks that it describes a model like `model`, as described by its files.
    ///
    /// Shapes and the activation are compared. For other values, those of the files take precedence: drivers
    /// fill in defaults of their own for what a file leaves out.
    /// Errors: [`ProtocolError`] names the first setting that differs.
    pub(crate) fn check(&self, model: &ModelConfig) -> Result<(), ProtocolError> {
        for (key, given, found, multiple) in [
            ("hidden_dim", self.hidden_dim, model.model_dim, PADDING),
            (
                "intermediate_dim",
                self.intermediate_dim,
                model.ffn_dim,
                PADDING,
            ),
            ("num_layers", self.num_layers, model.n_layers, 1),
            ("num_heads", self.num_heads, model.n_heads, 1),
            ("num_kv_heads", self.num_kv_heads, model.n_kv_heads, 1),
            ("vocab_size", self.vocab_size, model.n_vocab, 1),
            ("head_dim", self.head_dim, model.head_dim, 1),
        ] {
            if given != found && given != found.next_multiple_of(multiple) {
                return Err(contradiction(key, found, given));
            }
        }
        match numbered(model.activation) {
            Some(found) if found != self.activation => {
                let [found, given] =
                    [found, self.activation].map(|activation| activation.code() as usize);
                Err(contradiction("activation", found, given))
            }
            _ => Ok(()),
        }
    }

    /// Ids that end a reply.
    pub(crate) fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Context length of the model.
    pub(crate) fn max_ctx(&self) -> usize {
        self.max_position_embeddings
    }

    /// Threads to compute with on a machine with `n_available`, at most: two are left to others unless a
    /// number was given.
    pub(crate) fn n_threads(&self, n_available: usize) -> usize {
        match self.num_threads {
            0 => n_available.saturating_sub(2).max(1),
            // More would wait for each other.
            n => n.min(n_available),
        }
    }

    /// The folder of an adapter to apply, and the type to convert it to.
    pub(crate) fn lora(&self) -> Option<(&PathBuf, Quant)> {
        self.lora_dir.as_ref().map(|dir| (dir, self.lora_quant))
    }

    /// The type to convert the output head to.
    pub(crate) fn unembed_quant(&self) -> Quant {
        self.unembed_quant
    }
}

fn contradiction(key: &str, expected: usize, found: usize) -> ProtocolError {
    let place = format!("configuration: `{key}`");
    ProtocolError::new(
        place,
        format_args!("{expected} by the model's files"),
        found,
    )
}

fn parse_eos_ids<'a>(
    place: &str,
    ids: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<u32>, ProtocolError> {
    let parse = |(i, text)| {
        number(
            format_args!("{place}: EOS id {i}"),
            text,
            "a token id",
            |_| true,
        )
    };
    ids.enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_as_many_as_the_machine_runs() {
        let line = "1 0 256 768 8 4 2 1728 64 512 0.00001 10000 1 0 1 1 N 0";
        for (given, n_available, expected) in [
            (0, 1, 1),
            (0, 2, 1),
            (0, 8, 6),
            (1, 2, 1),
            (2, 2, 2),
            (1024, 2, 2),
        ] {
            let line = line.replace('N', &given.to_string());
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let config = WorkerConfig::from_args(&args).unwrap();
            assert_eq!(config.n_threads(n_available), expected, "{given}");
        }
    }

    #[test]
    fn types_have_their_usual_names() {
        for (name, dtype) in [
            ("none", None),
            ("int8", Some(DType::Q8_0)),
            ("Q8_0", Some(DType::Q8_0)),
            ("q6_k", Some(DType::Q6_K)),
            ("q5_0", Some(DType::Q5_0)),
            ("q4_0", Some(DType::Q4_0)),
            ("f32", Some(DType::F32)),
        ] {
            assert_eq!(Quant::parse("here", name).unwrap().dtype(), dtype, "{name}");
        }
    }
}
