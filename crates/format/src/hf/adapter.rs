//! Adapters as PEFT saves them: `adapter_config.json` and the names of the tensors.

use regex_lite::{Regex, RegexBuilder};

use super::ConfigError;
use super::node::{self, Node};
use crate::names::{self, Name};

/// A low-rank adapter, as its `adapter_config.json` describes it.
///
/// What can't be applied by adding `scaling · B (A x)` to the outputs of linear layers is refused when
/// the file is parsed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AdapterConfig {
    /// `base_model_name_or_path`: the model the adapter was trained on, as its maker called it.
    pub base_model: Option<String>,
    /// `target_modules`, where they are a list of names.
    pub target_modules: Vec<String>,
    rank: usize,
    alpha: f64,
    rank_stabilised: bool,
    ranks: Vec<Exception<usize>>,
    alphas: Vec<Exception<f64>>,
}

/// An entry of `rank_pattern` or `alpha_pattern`.
#[derive(Debug, Clone)]
struct Exception<T> {
    /// Matches the whole path of a module.
    modules: Regex,
    value: T,
}

/// Most entries of a pattern that are taken.
const MAX_EXCEPTIONS: usize = 4096;
/// Memory that a compiled entry may take.
const MAX_PATTERN_BYTES: usize = 16 << 10;

/// Largest rank and alpha taken, far beyond any in use.
const MAX_RANK: usize = 1 << 16;

/// Fields that must be absent, null, false or empty, and what they would ask for.
const UNSUPPORTED: [(&str, &str); 15] = [
    ("use_dora", "no weight decomposition (DoRA)"),
    ("modules_to_save", "no module that is replaced as a whole"),
    ("lora_bias", "no bias in the adapter"),
    (
        "trainable_token_indices",
        "no change of the embedding table",
    ),
    ("layer_replication", "no repeated layers"),
    ("target_parameters", "no change of single parameters"),
    ("alora_invocation_tokens", "an adapter for all tokens"),
    ("use_qalora", "no grouped inputs (QALoRA)"),
    ("use_bdlora", "no block-diagonal matrices"),
    ("arrow_config", "no routing between adapters"),
    ("kasa_config", "no singular values (KaSA)"),
    ("velora_config", "no compressed activations (VeLoRA)"),
    ("monteclora_config", "no sampled adapter (MonteCLoRA)"),
    ("lora_ga_config", "a base model that is used as it is"),
    ("megatron_config", "layers of one process"),
];

/// Initialisation methods that change the weights of the base model.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl AdapterConfig {
    /// Parses `adapter_config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the field that isn't what it should be, or that asks for what isn't
    /// supported: another kind than LoRA, DoRA, biases, modules that are replaced as a whole, and
    /// others.
    pub fn parse(json: &[u8]) -> Result<AdapterConfig, ConfigError> {
        let json = node::parse(json)?;
        let root = Node::root(&json);
        root.expect_object()?;
        let string = |key: &str| root.get(key).map(|n| n.str()).transpose();
        let number = |key: &'static str| match root.get(key) {
            Some(node) => positive(&node),
            None => root.missing(key),
        };

        match root.get("peft_type") {
            Some(node) if !node.str()?.eq_ignore_ascii_case("lora") => {
                return node.refuse("`LORA`", format!("`{}`", node.str()?));
            }
            _ => {}
        }
        for (key, expected) in UNSUPPORTED {
            match root.get(key) {
                Some(node) if !node.is_off() => {
                    return node.refuse(expected, node.summary());
                }
                _ => {}
            }
        }
        if let Some(bias) = root.get("bias")
            && bias.str()? != "none"
        {
            return bias.refuse("`none`", format!("`{}`", bias.str()?));
        }
        if let Some(init) = root.get("init_lora_weights")
            && init.is_string()
        {
            let init_name = init.str()?;
            if CHANGES_BASE.iter().any(|way| init_name.starts_with(way)) {
                const EXPECTED: &str = "an adapter of the base model as it is";
                return init.refuse(EXPECTED, format!("`{init_name}`, which changes the base"));
            }
        }
        // `fan_in_fan_out` says how the base stores its weights; the adapter's have the same layout either way.
        let rank_stabilised = root.get("use_rslora").map(|n| n.bool()).transpose()?;
        let target_modules = match root.get("target_modules") {
            Some(node) if node.is_list() => node.list(|item| item.str())?,
            _ => Vec::new(),
        };
        Ok(AdapterConfig {
            base_model: string("base_model_name_or_path")?,
            target_modules,
            rank: match root.get("r") {
                Some(node) => rank(&node)?,
                None => return root.missing("r"),
            },
            alpha: number("lora_alpha")?,
            rank_stabilised: rank_stabilised.unwrap_or(false),
            ranks: exceptions(&root, "rank_pattern", rank)?,
            alphas: exceptions(&root, "alpha_pattern", positive)?,
        })
    }

    /// The rank that the file gives for a module, by its path in the base model, such as
    /// `model.layers.7.self_attn.q_proj`.
    pub fn rank(&self, module: &str) -> usize {
        lookup(&self.ranks, module).unwrap_or(self.rank)
    }

    /// What the product of a module's matrices is multiplied with: `alpha / rank`, or `alpha / √rank` if
    /// the adapter is rank-stabilised.
    pub fn scaling(&self, module: &str) -> f64 {
        let alpha = lookup(&self.alphas, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        match self.rank_stabilised {
            true => alpha / rank.sqrt(),
            false => alpha / rank,
        }
    }
}

fn rank(node: &Node<'_>) -> Result<usize, ConfigError> {
    match node.count()? {
        n if (1..=MAX_RANK).contains(&n) => Ok(n),
        n => node.refuse("a rank from 1 to 65536", n.to_string()),
    }
}

fn positive(node: &Node<'_>) -> Result<f64, ConfigError> {
    match node.f64()? {
        x if x > 0.0 => Ok(x),
        x => node.refuse("a number above 0", x.to_string()),
    }
}

fn exceptions<T>(
    root: &Node<'_>,
    key: &str,
    value: impl Fn(&Node<'_>) -> Result<T, ConfigError>,
) -> Result<Vec<Exception<T>>, ConfigError> {
    let Some(node) = root.get(key) else {
        return Ok(Vec::new());
    };
    let mut out = Vec::new();
    for (pattern, node) in node.members()? {
        if out.len() == MAX_EXCEPTIONS {
            return node.refuse("at most 4096 entries", "more".to_owned());
        }
        // A pattern names the end of a path, or matches the whole of it; PEFT builds the same expression.
        let modules = RegexBuilder::new(&format!(r"^(?:.*\.)?(?:{pattern})$"))
            .size_limit(MAX_PATTERN_BYTES)
            .build();
        match modules {
            Ok(modules) => out.push(Exception {
                modules,
                value: value(&node)?,
            }),
            Err(_) => {
                const EXPECTED: &str = "a name, or a regular expression without look-around";
                return node.refuse(EXPECTED, format!("`{pattern}`"));
            }
        }
    }
    Ok(out)
}

/// The value of the first pattern that matches, as in PEFT.
fn lookup<T: Copy>(exceptions: &[Exception<T>], module: &str) -> Option<T> {
    let found = exceptions.iter().find(|e| e.modules.is_match(module));
    found.map(|e| e.value)
}

/// What a tensor in an adapter's safetensors file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterTensor {
    /// The module it changes, by its path in the base model, such as
    /// `model.layers.7.self_attn.q_proj`.
    pub path: String,
    /// Layer of the base model.
    pub layer: usize,
    /// Last part of the path, such as `q_proj`.
    pub module: String,
    /// Which of the two matrices it is.
    pub matrix: LoraFactor,
}

/// One of the two matrices of a low-rank product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraFactor {
    /// Inputs to `rank` values.
    A,
    /// `rank` values to outputs.
    B,
}

/// Why a tensor of an adapter was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor `{tensor}`: expected {expected}, found {found}")]
pub struct AdapterNameError {
    /// Its name in the file.
    pub tensor: String,
    /// What can be applied.
    pub expected: &'static str,
    /// What the name says it is.
    pub found: String,
}

impl AdapterTensor {
    /// What the tensor called `name` is.
    ///
    /// ```
    /// use sterna_format::hf::{AdapterTensor, LoraFactor};
    ///
    /// let name = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight";
    /// let tensor = AdapterTensor::parse(name)?;
    /// assert_eq!((tensor.layer, tensor.module.as_str()), (7, "q_proj"));
    /// assert_eq!(tensor.matrix, LoraFactor::A);
    /// # Ok::<(), sterna_format::hf::AdapterNameError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AdapterNameError`] says what the tensor is instead, if it isn't a matrix for a linear layer
    /// of a transformer block.
    pub fn parse(name: &str) -> Result<AdapterTensor, AdapterNameError> {
        let refuse = |expected, found: &str| {
            Err(AdapterNameError {
                tensor: name.to_owned(),
                expected,
                found: found.to_owned(),
            })
        };
        const MATRIX: &str = "a matrix `lora_A` or `lora_B` of a linear layer";
        for (part, found) in [
            (".lora_embedding_", "an adapter of the embedding table"),
            (".lora_magnitude_vector", "a magnitude vector (DoRA)"),
            (".modules_to_save.", "a module that is replaced as a whole"),
            (".token_adapter.", "changed rows of the embedding table"),
        ] {
            if name.contains(part) {
                return refuse(MATRIX, found);
            }
        }
        let path = name.strip_prefix("base_model.model.").unwrap_or(name);
        let split = [(".lora_A", LoraFactor::A), (".lora_B", LoraFactor::B)]
            .into_iter()
            .find_map(|(part, matrix)| {
                let (path, rest) = path.split_once(part)?;
                Some((path, matrix, rest))
            });
        let Some((path, matrix, rest)) = split else {
            return refuse(MATRIX, "something else");
        };
        // The name of the adapter comes before `weight` in files that weren't saved by PEFT itself.
        match rest.strip_suffix(".weight") {
            Some("") => {}
            Some(adapter) if adapter.starts_with('.') && !adapter[1..].contains('.') => {}
            _ if rest.ends_with(".bias") => return refuse(MATRIX, "a bias"),
            _ => return refuse(MATRIX, "something else"),
        }
        const LINEAR: &str = "a linear layer of attention or the feed-forward block";
        let module = path.rsplit('.').next().unwrap_or(path);
        // Families differ in the names of their norms alone.
        let known = names::translate("", &format!("{path}.weight"));
        let gguf = match known {
            Name::Known(gguf) if module.ends_with("_proj") => gguf,
            _ => return refuse(LINEAR, &format!("`{path}`")),
        };
        let layer = gguf.split('.').nth(1).and_then(|layer| layer.parse().ok());
        let Some(layer) = layer else {
            return refuse(LINEAR, &format!("`{path}`"));
        };
        Ok(AdapterTensor {
            path: path.to_owned(),
            layer,
            module: module.to_owned(),
            matrix,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = r#""peft_type": "LORA", "r": 8, "lora_alpha": 16"#;

    fn parse(members: &str) -> Result<AdapterConfig, ConfigError> {
        AdapterConfig::parse(format!("{{{members}}}").as_bytes())
    }

    #[test]
    fn scaling_follows_rank_and_alpha() {
        let q = "model.layers.1.self_attn.q_proj";
        let config = parse(PLAIN).unwrap();
        assert_eq!((config.rank(q), config.scaling(q)), (8, 2.0));
        let config = parse(&format!(r#"{PLAIN}, "use_rslora": true"#)).unwrap();
        assert_eq!(config.scaling(q), 16.0 / 8f64.sqrt());
        let config = parse(&format!(
            r#"{PLAIN}, "rank_pattern": {{"^model.layers.1.self_attn.q_proj": 2, "q_proj": 4}},
                "alpha_pattern": {{"layers.1.self_attn.q_proj": 6, "layers\\.[23]\\..*_proj": 3}}"#
        ))
        .unwrap();
        assert_eq!((config.rank(q), config.scaling(q)), (2, 3.0));
        assert_eq!(config.scaling("model.layers.2.self_attn.q_proj"), 0.75);
        assert_eq!(config.scaling("model.layers.2.mlp.up_proj"), 0.375);
        // The end of a name isn't the name.
        assert_eq!(config.scaling("model.layers.0.self_attn.xq_proj"), 2.0);
    }

    #[test]
    fn what_cannot_be_applied_is_named() {
        for (member, message) in [
            (
                r#""peft_type": "LOHA""#,
                "`peft_type`: expected `LORA`, found `LOHA`",
            ),
            (
                r#""use_dora": true"#,
                "`use_dora`: expected no weight decomposition (DoRA), found true",
            ),
            (
                r#""bias": "lora_only""#,
                "`bias`: expected `none`, found `lora_only`",
            ),
            (
                r#""modules_to_save": ["lm_head", "embed_tokens"]"#,
                "`modules_to_save`: expected no module that is replaced as a whole, found \
                 [`lm_head`, ...]",
            ),
            (
                r#""trainable_token_indices": [3]"#,
                "`trainable_token_indices`: expected no change of the embedding table, found a list",
            ),
            (
                r#""init_lora_weights": "pissa_niter_16""#,
                "`init_lora_weights`: expected an adapter of the base model as it is, found \
                 `pissa_niter_16`, which changes the base",
            ),
            (r#""r": 0"#, "`r`: expected a rank from 1 to 65536, found 0"),
            (
                r#""lora_alpha": -1"#,
                "`lora_alpha`: expected a number above 0, found -1",
            ),
            (
                r#""rank_pattern": {"(?=x)": 1}"#,
                "`rank_pattern.(?=x)`: expected a name, or a regular expression without look-around, \
                 found `(?=x)`",
            ),
        ] {
            let error = parse(&format!("{PLAIN}, {member}")).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        let error = parse(r#""r": 8"#).unwrap_err().to_string();
        assert_eq!(
            error,
            "the file: expected an object, found one without `lora_alpha`"
        );
    }

    #[test]
    fn what_changes_nothing_is_accepted() {
        let config = parse(&format!(
            r#"{PLAIN}, "fan_in_fan_out": true, "init_lora_weights": "gaussian", "modules_to_save": [],
                "loftq_config": {{}}, "bias": "none", "use_dora": false, "megatron_core": "megatron.core",
                "lora_dropout": 0.1, "target_modules": ["q_proj"], "base_model_name_or_path": "a/b""#
        ))
        .unwrap();
        assert_eq!(config.base_model.as_deref(), Some("a/b"));
        assert_eq!(config.target_modules, ["q_proj"]);
        let config = parse(&format!(r#"{PLAIN}, "target_modules": ".*_proj""#)).unwrap();
        assert_eq!(config.target_modules, [""; 0]);
    }

    #[test]
    fn names_say_layer_module_and_matrix() {
        for (name, layer, module, matrix) in [
            (
                "base_model.model.model.layers.12.mlp.down_proj.lora_B.weight",
                12,
                "down_proj",
                LoraFactor::B,
            ),
            (
                "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.default.weight",
                0,
                "qkv_proj",
                LoraFactor::A,
            ),
            (
                "base_model.model.language_model.model.layers.3.self_attn.o_proj.lora_A.weight",
                3,
                "o_proj",
                LoraFactor::A,
            ),
            (
                "model.layers.3.mlp.gate_proj.lora_A.weight",
                3,
                "gate_proj",
                LoraFactor::A,
            ),
        ] {
            let tensor = AdapterTensor::parse(name).unwrap();
            assert_eq!(
                (tensor.layer, tensor.module.as_str(), tensor.matrix),
                (layer, module, matrix)
            );
        }
        for (name, found) in [
            ("base_model.model.lm_head.lora_A.weight", "`lm_head`"),
            (
                "base_model.model.model.embed_tokens.lora_embedding_A",
                "an adapter of the embedding table",
            ),
            (
                "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
                "a magnitude vector (DoRA)",
            ),
            (
                "base_model.model.model.layers.0.self_attn.query_key_value.lora_A.weight",
                "`model.layers.0.self_attn.query_key_value`",
            ),
            (
                "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
                "`vision_tower.layers.0.self_attn.q_proj`",
            ),
            (
                "base_model.model.model.layers.0.mlp.up_proj.lora_B.bias",
                "a bias",
            ),
            (
                "base_model.model.model.layers.0.mlp.up_proj.weight",
                "something else",
            ),
            (
                "base_model.model.model.layers.0.mlp.up_proj.lora_A.a.b.weight",
                "something else",
            ),
        ] {
            let error = AdapterTensor::parse(name).unwrap_err();
            assert_eq!(error.found, found, "{name}");
        }
    }
}
