//! The Hugging Face configuration of a package: its own, or what its other fields amount to.
//!
//! Packages of the JavaScript runtime carry no `config.json`; they say in `architecture` and
//! `inference` how their model is computed. What those fields say and no family here computes is
//! an error that names the field, never left out.

use serde_json::{Map, Value, json};

use super::groups::model_type_of;
use super::manifest::{Architecture, Manifest, ModelShape};
use super::package::Package;
use super::problem::{Notes, Path, Problems};
use super::tensors::TensorMap;
use crate::hf::{Config, ConfigError};
use crate::json::quoted;

/// A configuration, and what was made of a manifest on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct HfConfig {
    /// The members of `config.json`.
    pub config: Map<String, Value>,
    /// What the manifest says and was not followed, and why.
    pub warnings: Vec<String>,
}

impl HfConfig {
    /// What the members say.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if one isn't what its key demands.
    pub fn parsed(&self) -> Result<Config, ConfigError> {
        Config::read(&(&self.config).into())
    }
}

/// The members of `config.json` for the model of `manifest`.
///
/// # Errors
///
/// Every field that is needed and isn't there, or says something that no known family does.
pub fn hf_config(manifest: &Manifest) -> Result<HfConfig, Problems> {
    config_of(manifest, None, None)
}

impl Package {
    /// The members of `config.json` for the model. `beside` are those of a file of that name in the package,
    /// which count where the manifest has neither `config` nor `inference`; without either, what the tensors
    /// tell is taken from them.
    ///
    /// # Errors
    ///
    /// Every field that is needed and isn't there, or says something that no known family does.
    pub fn hf_config(&self, beside: Option<&Map<String, Value>>) -> Result<HfConfig, Problems> {
        config_of(self.manifest(), Some(self.tensors()), beside)
    }
}

fn config_of(
    manifest: &Manifest,
    tensors: Option<&TensorMap>,
    beside: Option<&Map<String, Value>>,
) -> Result<HfConfig, Problems> {
    let mut notes = Notes::new();
    let mut warnings = Vec::new();
    let beside = beside.filter(|_| manifest.inference.is_none());
    let mut config = match (manifest.config.as_ref().or(beside), &manifest.architecture) {
        (Some(config), _) => {
            warnings.extend(contradictions(manifest, config));
            config.clone()
        }
        (None, Some(Architecture::Shape(shape))) => {
            let mut reader = Reader {
                manifest,
                tensors,
                shape,
                notes: &mut notes,
                warnings: &mut warnings,
            };
            reader.config().unwrap_or_default()
        }
        (None, _) => {
            let expected = "the configuration of the model, or its shape in `architecture`";
            notes.add(Path::Key(&Path::Root, "config"), expected, "nothing");
            Map::new()
        }
    };
    if !manifest.eos_token_id.is_empty() {
        let ids = || json!(manifest.eos_token_id);
        config.entry("eos_token_id").or_insert_with(ids);
    }
    if let Some(Architecture::Class(class)) = &manifest.architecture {
        config
            .entry("architectures")
            .or_insert_with(|| json!([class]));
    }
    notes.or(HfConfig { config, warnings })
}

/// What `manifest` says of the kind of model that its configuration contradicts.
fn contradictions(manifest: &Manifest, config: &Map<String, Value>) -> Vec<String> {
    const KINDS: [&str; 5] = ["mamba", "rwkv", "mixtral", "deepseek", "jamba"];
    let mut found = Vec::new();
    let (said, kind) = (manifest.model_type.as_str(), model_type_of(config));
    if KINDS.contains(&said) && said != kind {
        found.push(format!(
            "modelType: expected `{kind}`, as the configuration has it, found `{said}`"
        ));
    }
    let moe = manifest.moe_config.as_ref();
    if kind == "transformer" && moe.is_some_and(|moe| moe.n_experts > 1) {
        found.push(
            "moeConfig: expected nothing, as the configuration has no experts, found an object; ignored"
                .to_owned(),
        );
    }
    found
}

/// Model types of Hugging Face that a manifest may name instead of `transformer`.
const MODEL_TYPES: [&str; 8] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi3",
];

struct Reader<'a> {
    manifest: &'a Manifest,
    /// The tensors, which tell of some flags where `inference` doesn't.
    tensors: Option<&'a TensorMap>,
    shape: &'a ModelShape,
    notes: &'a mut Notes,
    warnings: &'a mut Vec<String>,
}

impl Reader<'_> {
    /// The member `key` of `section` of `inference`; absent and null are the same.
    fn get(&self, section: &str, key: &str) -> Option<&Value> {
        let section = self.manifest.inference.as_ref()?.get(section)?;
        section.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&mut self, section: &str, key: &str, expected: &str) {
        let found = self.get(section, key).map_or_else(
            || "nothing".to_owned(),
            |value| match value {
                Value::String(text) => quoted(text),
                Value::Array(_) => "a list".to_owned(),
                Value::Object(_) => "an object".to_owned(),
                other => other.to_string(),
            },
        );
        let inference = Path::Key(&Path::Root, "inference");
        let section = Path::Key(&inference, section);
        self.notes.add(Path::Key(&section, key), expected, found);
    }

    fn bool(&mut self, section: &str, key: &str) -> Option<bool> {
        let value = match self.get(section, key) {
            Some(value) => value.as_bool(),
            None => self.told_by_tensors(key),
        };
        if value.is_none() {
            self.wrong(section, key, "true or false");
        }
        value
    }

    /// A flag of `inference` that isn't given, by the names of the tensors.
    fn told_by_tensors(&self, key: &str) -> Option<bool> {
        let tensors = self.tensors?;
        let has = |end: &str| tensors.iter().any(|tensor| tensor.name.ends_with(end));
        match key {
            "queryKeyNorm" => Some(has("self_attn.q_norm.weight")),
            "attentionBias" => Some(has("q_proj.bias") || has("qkv_proj.bias")),
            "tieWordEmbeddings" => Some(!has("lm_head.weight")),
            // Of the families here, only Gemma has norms around the feed-forward part, and it has the rest too.
            "preFeedforwardNorm"
            | "postFeedforwardNorm"
            | "rmsNormWeightOffset"
            | "scaleEmbeddings" => Some(has("pre_feedforward_layernorm.weight")),
            _ => None,
        }
    }

    /// A number of `inference` that isn't given, by `architecture`.
    fn told_by_shape(&self, key: &str, is_gemma: bool) -> Option<f64> {
        self.tensors?;
        match key {
            "ropeTheta" => self.shape.rope_theta,
            "queryPreAttnScalar" if !is_gemma => Some(self.shape.head_dim as f64),
            _ => None,
        }
    }

    /// A number that must be there.
    fn number(&mut self, section: &str, key: &str) -> Option<f64> {
        let value = self.get(section, key).and_then(Value::as_f64);
        if value.is_none() {
            self.wrong(section, key, "a number");
        }
        value
    }

    /// A number that may be absent; `None` also after it turned out to be something else.
    fn maybe_number(&mut self, section: &str, key: &str) -> Option<f64> {
        self.get(section, key)?;
        self.number(section, key)
    }

    fn text(&self, section: &str, key: &str) -> Option<&str> {
        self.get(section, key).and_then(Value::as_str)
    }

    /// Notes what is neither absent nor `neutral`: no family here computes anything else.
    fn only(&mut self, section: &str, key: &str, neutral: &[Value]) {
        let same = |value: &Value| {
            neutral.contains(value)
                || neutral
                    .iter()
                    .any(|n| n.is_number() && n.as_f64() == value.as_f64())
        };
        if self.get(section, key).is_some_and(|value| !same(value)) {
            let neutral: Vec<String> = neutral.iter().map(Value::to_string).collect();
            let expected = match neutral.is_empty() {
                true => "nothing: no family here has it".to_owned(),
                false => format!("{}: no family here has anything else", neutral.join(" or ")),
            };
            self.wrong(section, key, &expected);
        }
    }

    fn config(&mut self) -> Option<Map<String, Value>> {
        if self.manifest.inference.is_none() && self.tensors.is_none() {
            let expected = "how the model is computed, or its configuration in `config`";
            let path = Path::Key(&Path::Root, "inference");
            self.notes.add(path, expected, "nothing");
            return None;
        }
        self.refuse_unknown();
        let model_type = self.model_type()?;
        let is_gemma = model_type.starts_with("gemma");
        let shape = self.shape;
        let mut out = Map::new();
        let mut put = |key: &str, value: Value| {
            out.insert(key.to_owned(), value);
        };
        put("model_type", json!(model_type));
        put("num_hidden_layers", json!(shape.n_layers));
        put("hidden_size", json!(shape.model_dim));
        put("intermediate_size", json!(shape.ffn_dim));
        put("num_attention_heads", json!(shape.n_heads));
        put("num_key_value_heads", json!(shape.n_kv_heads));
        put("head_dim", json!(shape.head_dim));
        put("vocab_size", json!(shape.n_vocab));
        put("max_position_embeddings", json!(shape.max_ctx));
        put(
            "rms_norm_eps",
            json!(self.number("normalization", "rmsNormEps")),
        );
        put(
            "tie_word_embeddings",
            json!(self.bool("output", "tieWordEmbeddings")),
        );
        put(
            "attention_bias",
            json!(self.bool("attention", "attentionBias")),
        );
        let activation = match self.text("ffn", "activation") {
            Some("silu" | "swish") if !is_gemma => Some("silu"),
            Some("relu2" | "relu_squared") if !is_gemma => Some("relu2"),
            Some("gelu" | "gelu_tanh" | "gelu_pytorch_tanh") if is_gemma => {
                Some("gelu_pytorch_tanh")
            }
            _ => {
                self.wrong("ffn", "activation", "silu or relu2, and gelu for Gemma");
                None
            }
        };
        let key = if is_gemma {
            "hidden_activation"
        } else {
            "hidden_act"
        };
        put(key, json!(activation));
        let scalar = match self.get("attention", "queryPreAttnScalar") {
            None => self.told_by_shape("queryPreAttnScalar", is_gemma),
            Some(_) => None,
        };
        let scalar = scalar.or_else(|| self.number("attention", "queryPreAttnScalar"));
        if is_gemma {
            put("query_pre_attn_scalar", json!(scalar));
            let cap = self.maybe_number("output", "finalLogitSoftcapping");
            put("final_logit_softcapping", json!(cap));
        } else {
            if scalar.is_some_and(|scalar| scalar != shape.head_dim as f64) {
                let expected = format!("{}, the width of a head", shape.head_dim);
                self.wrong("attention", "queryPreAttnScalar", &expected);
            }
            self.only("output", "finalLogitSoftcapping", &[]);
        }
        if model_type == "gemma2" {
            let cap = self.maybe_number("attention", "attnLogitSoftcapping");
            put("attn_logit_softcapping", json!(cap));
        } else {
            self.only("attention", "attnLogitSoftcapping", &[]);
        }
        for (key, value) in self.windows(model_type) {
            put(key, value);
        }
        for (key, value) in self.rope(model_type) {
            put(key, value);
        }
        Some(out)
    }

    /// Notes what the model has and no family here knows.
    fn refuse_unknown(&mut self) {
        for (section, key, neutral) in [
            ("attention", "causal", json!(true)),
            ("attention", "valueNorm", json!(false)),
            ("attention", "attentionOutputGate", json!(false)),
            ("attention", "queryKeyNormType", json!("rmsnorm")),
            ("attention", "queryKeyNormAxis", json!("head")),
            ("ffn", "gatedActivation", json!(true)),
            ("ffn", "useDoubleWideMlp", json!(false)),
            ("rope", "mropeInterleaved", json!(false)),
            ("rope", "ropeLocalScalingFactor", json!(1)),
            ("output", "embeddingTranspose", json!(false)),
            ("output", "embeddingVocabSize", json!(self.shape.n_vocab)),
        ] {
            self.only(section, key, &[neutral]);
        }
        self.only("ffn", "branchMode", &[json!("auto"), json!("dense")]);
        for (section, key) in [
            ("ffn", "swigluLimit"),
            ("rope", "mropeSection"),
            ("rope", "ropeFrequencyBaseDim"),
            ("rope", "ropeLocalFrequencyBaseDim"),
            ("rope", "ropeLocalPartialRotaryFactor"),
            ("rope", "ropeLocalScalingType"),
        ] {
            self.only(section, key, &[]);
        }
        if self.get("output", "embeddingPostprocessor").is_some() {
            // The JavaScript converter writes it for tied Qwen3 models, which it takes for embedding models.
            self.warnings.push(
                "inference.output.embeddingPostprocessor: how embeddings of texts are made of hidden states; \
                 logits are computed without it"
                    .to_owned(),
            );
        }
        let extra = self
            .shape
            .extra
            .iter()
            .filter(|(_, value)| !value.is_null());
        let architecture = Path::Key(&Path::Root, "architecture");
        for (key, value) in extra {
            let expected = "nothing: no family here has it";
            self.notes
                .add(Path::Key(&architecture, key), expected, value);
        }
        if self.manifest.moe_config.is_some() {
            let path = Path::Key(&Path::Root, "moeConfig");
            let expected = "nothing, without the `config` of the mixture";
            self.notes.add(path, expected, "an object");
        }
        if self.is_anothers() {
            self.warnings.push(
                "`inference` has scales and LongRoPE factors of another model: they are for a context \
                 longer than this model's; ignored"
                    .to_owned(),
            );
        } else {
            self.only("output", "embeddingScale", &[json!(1)]);
            self.only("output", "logitInputScale", &[json!(1)]);
            self.only("layerPattern", "residualBranchScale", &[json!(1)]);
        }
    }

    /// Whether `inference` has the scales and factors of another model.
    ///
    /// The JavaScript converter chooses settings by a table of model kinds, and where it mistakes a
    /// model for another, the numbers of the latter are in the manifest. Factors that extend a
    /// context which is already longer than their target are a sure sign.
    fn is_anothers(&self) -> bool {
        let original = self
            .get("rope", "longropeOriginalMaxPos")
            .and_then(Value::as_u64);
        self.text("rope", "ropeScalingType") == Some("longrope")
            && original.is_some_and(|original| original > self.shape.max_ctx)
    }

    /// The Hugging Face family: the one that the manifest names, or the one whose conventions the model follows.
    fn model_type(&mut self) -> Option<&'static str> {
        let offset = self.bool("normalization", "rmsNormWeightOffset")?;
        let pre = self.bool("normalization", "preFeedforwardNorm")?;
        let post = self.bool("normalization", "postFeedforwardNorm")?;
        let scaled = self.bool("output", "scaleEmbeddings")?;
        let qk_norms = self.bool("attention", "queryKeyNorm")?;
        let biases = self.bool("attention", "attentionBias")?;
        let has_window = self.get("attention", "slidingWindow").is_some();
        let known = MODEL_TYPES.into_iter();
        let named = known
            .into_iter()
            .find(|name| *name == self.manifest.model_type);
        let found = match named {
            Some(named) => named,
            None if offset && qk_norms => "gemma3_text",
            None if offset => "gemma2",
            None if qk_norms => "qwen3",
            None if biases => "qwen2",
            None if has_window => "mistral",
            None => "llama",
        };
        // What all of Gemma has and no other: the rest of the flags must say the same.
        let is_gemma = found.starts_with("gemma");
        for (section, key, value) in [
            ("normalization", "rmsNormWeightOffset", offset),
            ("normalization", "preFeedforwardNorm", pre),
            ("normalization", "postFeedforwardNorm", post),
            ("output", "scaleEmbeddings", scaled),
        ] {
            if value != is_gemma {
                self.wrong(
                    section,
                    key,
                    &format!("{is_gemma}, of a model like {found}"),
                );
            }
        }
        let may_have_qk_norms = matches!(found, "qwen3" | "gemma3" | "gemma3_text");
        if qk_norms != may_have_qk_norms {
            let expected = format!("{may_have_qk_norms}, of a model like {found}");
            self.wrong("attention", "queryKeyNorm", &expected);
        }
        Some(found)
    }

    /// The window and which layers have it.
    fn windows(&mut self, model_type: &str) -> Vec<(&'static str, Value)> {
        let Some(window) = self.maybe_number("attention", "slidingWindow") else {
            return Vec::new();
        };
        if matches!(model_type, "llama") {
            self.wrong(
                "attention",
                "slidingWindow",
                "nothing, of a model like llama",
            );
            return Vec::new();
        }
        let n_layers = usize::try_from(self.shape.n_layers).unwrap_or(usize::MAX);
        // The engine's own limit is far below; a list of so many is refused there.
        let n_layers = n_layers.min(100_000);
        let count = |value: Option<&Value>| value.and_then(Value::as_u64);
        let period = count(self.get("layerPattern", "period")).filter(|&n| n > 0);
        let offset = count(self.get("layerPattern", "offset"));
        let listed = self.get("layerPattern", "layerTypes").cloned();
        let kind = self
            .text("layerPattern", "type")
            .unwrap_or("uniform")
            .to_owned();
        let global = self
            .text("layerPattern", "globalPattern")
            .map(str::to_owned);
        let is_full: Box<dyn Fn(usize) -> bool> = match (kind.as_str(), global.as_deref()) {
            _ if listed.is_some() => {
                let listed = listed.unwrap_or_default();
                return vec![
                    ("sliding_window", json!(window)),
                    ("use_sliding_window", json!(true)),
                    ("layer_types", listed),
                ];
            }
            ("uniform", _) => Box::new(|_| false),
            ("alternating", Some("odd")) => Box::new(|i| i % 2 == 1),
            ("alternating", Some("even")) => Box::new(|i| i % 2 == 0),
            ("every_n", _) => match (period, offset) {
                (Some(period), Some(offset)) => {
                    Box::new(move |i| i as u64 % period == offset % period)
                }
                _ => {
                    self.wrong(
                        "layerPattern",
                        "period",
                        "a whole number above 0, and `offset`",
                    );
                    return Vec::new();
                }
            },
            _ => {
                let expected =
                    "uniform, every_n or alternating with a global pattern of odd or even";
                self.wrong("layerPattern", "type", expected);
                return Vec::new();
            }
        };
        let kinds = (0..n_layers).map(|i| match is_full(i) {
            true => json!("full_attention"),
            false => json!("sliding_attention"),
        });
        vec![
            ("sliding_window", json!(window)),
            ("use_sliding_window", json!(true)),
            ("layer_types", kinds.collect()),
        ]
    }

    /// How positions rotate, in the spelling of Transformers 4.
    fn rope(&mut self, model_type: &str) -> Vec<(&'static str, Value)> {
        let theta = match self.get("rope", "ropeTheta") {
            None => self.told_by_shape("ropeTheta", false),
            Some(_) => None,
        };
        let Some(theta) = theta.or_else(|| self.number("rope", "ropeTheta")) else {
            return Vec::new();
        };
        let mut out = vec![("rope_theta", json!(theta))];
        let local = self.maybe_number("rope", "ropeLocalTheta");
        if matches!(model_type, "gemma3" | "gemma3_text") {
            out.push(("rope_local_base_freq", json!(local.unwrap_or(theta))));
        } else if local.is_some_and(|local| local != theta) {
            let expected = format!("nothing, of a model like {model_type}");
            self.wrong("rope", "ropeLocalTheta", &expected);
        }
        if let Some(part) = self.maybe_number("rope", "partialRotaryFactor")
            && part != 1.0
        {
            match model_type {
                "phi3" => out.push(("partial_rotary_factor", json!(part))),
                _ => self.wrong(
                    "rope",
                    "partialRotaryFactor",
                    "1: heads of the family turn whole",
                ),
            }
        }
        if self.is_anothers() {
            return out;
        }
        let factor = self.maybe_number("rope", "ropeScalingFactor");
        let scaling = match self
            .text("rope", "ropeScalingType")
            .map(str::to_owned)
            .as_deref()
        {
            None | Some("default" | "none") => {
                if factor.is_some_and(|factor| factor != 1.0) {
                    self.wrong("rope", "ropeScalingFactor", "1, without `ropeScalingType`");
                }
                return out;
            }
            Some(kind @ ("linear" | "dynamic")) => json!({ "rope_type": kind, "factor": factor }),
            Some("yarn") => json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": self.maybe_number("rope", "yarnBetaFast"),
                "beta_slow": self.maybe_number("rope", "yarnBetaSlow"),
                "original_max_position_embeddings": self.number("rope", "yarnOriginalMaxPos"),
            }),
            Some("longrope") => json!({
                "rope_type": "longrope",
                "short_factor": self.get("rope", "longropeShortFactor"),
                "long_factor": self.get("rope", "longropeLongFactor"),
                "original_max_position_embeddings": self.number("rope", "longropeOriginalMaxPos"),
            }),
            Some(_) => {
                let expected = "linear, dynamic, yarn or longrope, whose factors manifests carry";
                self.wrong("rope", "ropeScalingType", expected);
                return out;
            }
        };
        out.push(("rope_scaling", scaling));
        out
    }
}
