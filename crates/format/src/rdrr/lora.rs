//! Names of the tensors of LoRA adapters.

pub use crate::hf::LoraFactor;

/// The place of a LoRA matrix in the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoraName {
    /// The layer.
    pub layer: u32,
    /// The module under its usual name, such as `q_proj`.
    pub module: String,
    /// Which of the two matrices; in packages A is `[in, rank]` and B `[rank, out]`.
    pub matrix: LoraFactor,
}

impl LoraName {
    /// The name of the tensor in a package: `layers.0.q_proj.lora_a`.
    pub fn to_tensor_name(&self) -> String {
        let LoraName {
            layer,
            module,
            matrix,
        } = self;
        let matrix = match matrix {
            LoraFactor::A => "a",
            LoraFactor::B => "b",
        };
        format!("layers.{layer}.{module}.lora_{matrix}")
    }
}

/// Aliases of modules and what they mean.
const MODULES: [(&str, &str); 23] = [
    ("q_proj", "q_proj"),
    ("k_proj", "k_proj"),
    ("v_proj", "v_proj"),
    ("o_proj", "o_proj"),
    ("q", "q_proj"),
    ("k", "k_proj"),
    ("v", "v_proj"),
    ("o", "o_proj"),
    ("gate_proj", "gate_proj"),
    ("up_proj", "up_proj"),
    ("down_proj", "down_proj"),
    ("gate", "gate_proj"),
    ("up", "up_proj"),
    ("down", "down_proj"),
    ("gate_up_proj", "gate_up_proj"),
    ("gate_up", "gate_up_proj"),
    ("gateup", "gate_up_proj"),
    ("qkv_proj", "qkv_proj"),
    ("in_proj_qkv", "in_proj_qkv"),
    ("in_proj_z", "in_proj_z"),
    ("in_proj_a", "in_proj_a"),
    ("in_proj_b", "in_proj_b"),
    ("out_proj", "out_proj"),
];

/// The usual name of the module that adapters call `name`, in any case; `None` if it isn't one.
///
/// ```
/// use sterna_format::rdrr::lora::module_of;
///
/// assert_eq!(module_of("GateUp"), Some("gate_up_proj"));
/// assert_eq!(module_of("embed_tokens"), None);
/// ```
pub fn module_of(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let row = MODULES.iter().find(|(alias, _)| *alias == name);
    row.map(|&(_, module)| module)
}

/// Reads the name of an adapter's tensor: `layers`, a number, a module, `lora_a` or `lora_b`, in any
/// case, with whatever stands before `layers` and between number and module.
///
/// PEFT's spelling is one of them: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
///
/// ```
/// use sterna_format::rdrr::lora::{LoraFactor, LoraName, parse_name};
///
/// let name = parse_name("layers.3.q_proj.lora_b").unwrap();
/// assert_eq!((name.layer, &*name.module, name.matrix), (3, "q_proj", LoraFactor::B));
/// ```
pub fn parse_name(name: &str) -> Option<LoraName> {
    let name = name.to_ascii_lowercase();
    let mut parts: Vec<&str> = name.split('.').collect();
    for suffix in ["weight", "default"] {
        // PEFT puts the adapter's name, `default` unless another was chosen, before `weight`.
        parts.pop_if(|last| *last == suffix);
    }
    let matrix = match parts.pop()? {
        "lora_a" => LoraFactor::A,
        "lora_b" => LoraFactor::B,
        _ => return None,
    };
    let module = module_of(parts.pop()?)?.to_owned();
    // `layers.0`, `layer.0`, `layer0`; the last such part, as prefixes may have layers too.
    let layer = parts.iter().enumerate().rev().find_map(|(i, part)| {
        let rest = part.strip_prefix("layer")?;
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        let digits = match rest {
            "" => parts.get(i + 1)?,
            attached => attached,
        };
        digits
            .bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| digits.parse().ok())?
    })?;
    Some(LoraName {
        layer,
        module,
        matrix,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_every_spelling() {
        use LoraFactor::{A, B};
        for (name, layer, module, matrix) in [
            ("layers.0.q_proj.lora_a", 0, "q_proj", A),
            ("layer.12.v.lora_b", 12, "v_proj", B),
            ("layers12.gateup.LoRA_A", 12, "gate_up_proj", A),
            ("layer3.down.lora_B", 3, "down_proj", B),
            ("model.layers.7.mlp.up_proj.lora_a.weight", 7, "up_proj", A),
            (
                "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight",
                0,
                "o_proj",
                B,
            ),
            (
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
                0,
                "q_proj",
                A,
            ),
            ("model.layers.31.self_attn.q_proj.lora_a", 31, "q_proj", A),
        ] {
            let expected = LoraName {
                layer,
                module: module.into(),
                matrix,
            };
            assert_eq!(parse_name(name), Some(expected.clone()), "{name}");
            assert_eq!(parse_name(&expected.to_tensor_name()), Some(expected));
        }
    }

    #[test]
    fn names_of_other_tensors() {
        for name in [
            "",
            "lora_a",
            "layers.0.lora_a",
            "layers.0.q_proj",
            "layers.0.q_proj.weight",
            "layers.x.q_proj.lora_a",
            "layers.-1.q_proj.lora_a",
            "layers.99999999999.q_proj.lora_a",
            "layers.0.embed_tokens.lora_a",
            "q_proj.lora_a",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }
}
