//! What files say about weights that are stored in a rotated basis (PrismML's Bonsai 2).
//!
//! Nothing else in such a file shows it: the shapes are those of the model, and what it would compute without its
//! rotation looks like an answer. So whoever reads a key of these refuses what it doesn't know.

use std::collections::BTreeSet;

use serde_json::{Value as JsonValue, json};

use crate::gguf::{Array, GgufError, Metadata, Value};
use crate::hf::ConfigError;
use crate::hf::node::Node;

/// What the keys begin with in GGUF files.
const PREFIX: &str = "prism.hadamard.";
/// The member of `config.json`, of packages that were made of such files.
pub(crate) const MEMBER: &str = "prism_hadamard";

const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
const AXIS: &str = "input-last-dimension";
const EXPLICIT: &str = "explicit";
const IDENTITY: &str = "identity";
/// The only tensor whose rows may be looked up.
const EMBEDDINGS: &str = "token_embd.weight";

/// Which matrices are rotated and how: `prism.hadamard.*` of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hadamard {
    /// 1, or 2 if the embedding table is the output head as well.
    version: u32,
    block_size: usize,
    /// Rows of each width have signs of their own, one after another in `sign_values`; none have any if the list is
    /// empty.
    sign_widths: Vec<usize>,
    sign_values: Vec<i8>,
    /// GGUF names of tensors whose inputs are rotated.
    weight_names: BTreeSet<String>,
    /// Of those whose rows are looked up.
    inverse_weight_names: BTreeSet<String>,
    /// The columns of `ssm_out` are in the order of key heads, whatever the order of values elsewhere.
    gdn_v_grouped: bool,
    tied_output: bool,
}

/// A statement about a rotation that isn't one of those that are known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: expected {expected}, found {found}")]
pub struct HadamardError {
    /// The key.
    pub key: String,
    /// What was expected.
    pub expected: String,
    /// What it says.
    pub found: String,
}

fn wrong(key: &str, expected: impl Into<String>, found: impl ToString) -> HadamardError {
    HadamardError {
        key: format!("{PREFIX}{key}"),
        expected: expected.into(),
        found: found.to_string(),
    }
}

/// Why the keys of a GGUF file were refused.
#[derive(Debug, thiserror::Error)]
pub enum ReadHadamardError {
    /// A value of another type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A value that isn't known.
    #[error(transparent)]
    Unknown(#[from] HadamardError),
}

/// The values as files have them.
#[derive(Default)]
struct Stated {
    version: Option<u64>,
    block_size: Option<u64>,
    transform: Option<String>,
    axis: Option<String>,
    sign_mode: Option<String>,
    sign_widths: Vec<i64>,
    sign_values: Vec<i64>,
    weight_names: Vec<String>,
    inverse_weight_names: Vec<String>,
    gdn_v_grouped: bool,
    tied_output: Option<bool>,
}

/// The keys that are known.
const KEYS: [&str; 11] = [
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
    "tied_output",
];

impl Hadamard {
    /// What a GGUF file says; `None` if its weights aren't rotated.
    ///
    /// # Errors
    ///
    /// [`ReadHadamardError`] names the key whose value isn't known.
    pub fn of_gguf(metadata: &Metadata) -> Result<Option<Hadamard>, ReadHadamardError> {
        let mut found = metadata
            .iter()
            .filter_map(|(key, _)| key.strip_prefix(PREFIX));
        let Some(first) = found.next() else {
            return Ok(None);
        };
        if let Some(key) = [first].into_iter().chain(found).find(|k| !KEYS.contains(k)) {
            let expected = "a key that is known";
            return Err(wrong(key, expected, "another").into());
        }
        let key = |name: &str| format!("{PREFIX}{name}");
        let string = |name| -> Result<Option<String>, GgufError> {
            Ok(metadata.get_str(&key(name))?.map(str::to_owned))
        };
        let integers = |name| -> Result<Vec<i64>, GgufError> {
            let list = metadata.get_i32s(&key(name))?.unwrap_or_default();
            Ok(list.iter().map(|&n| i64::from(n)).collect())
        };
        let strings = |name| -> Result<Vec<String>, GgufError> {
            let list = metadata.get_strings(&key(name))?;
            Ok(list.map_or_else(Vec::new, |list| list.iter().map(str::to_owned).collect()))
        };
        let stated = Stated {
            version: metadata.get_u64(&key("version"))?,
            block_size: metadata.get_u64(&key("block_size"))?,
            transform: string("transform")?,
            axis: string("axis")?,
            sign_mode: string("sign_mode")?,
            sign_widths: integers("sign_widths")?,
            sign_values: integers("sign_values")?,
            weight_names: strings("weight_names")?,
            inverse_weight_names: strings("inverse_weight_names")?,
            gdn_v_grouped: metadata.get_bool(&key("gdn_v_grouped"))?.unwrap_or(false),
            tied_output: metadata.get_bool(&key("tied_output"))?,
        };
        Ok(Some(stated.checked()?))
    }

    /// The same of a member of `config.json`.
    pub(crate) fn read(node: &Node<'_>) -> Result<Hadamard, ConfigError> {
        for (key, _) in node.members()? {
            if !KEYS.contains(&key) {
                return node.refuse("keys that are known", format!("`{key}`"));
            }
        }
        let count = |key: &str| node.get(key).map(|n| n.count()).transpose();
        let string = |key: &str| node.get(key).map(|n| n.str()).transpose();
        let bool = |key: &str| node.get(key).map(|n| n.bool()).transpose();
        let integers = |key: &str| -> Result<Vec<i64>, ConfigError> {
            let list = node.get(key).map(|n| n.list(|n| Ok(n.f64()? as i64)));
            Ok(list.transpose()?.unwrap_or_default())
        };
        let strings = |key: &str| -> Result<Vec<String>, ConfigError> {
            let list = node.get(key).map(|n| n.list(Node::str));
            Ok(list.transpose()?.unwrap_or_default())
        };
        let stated = Stated {
            version: count("version")?.map(|n| n as u64),
            block_size: count("block_size")?.map(|n| n as u64),
            transform: string("transform")?,
            axis: string("axis")?,
            sign_mode: string("sign_mode")?,
            sign_widths: integers("sign_widths")?,
            sign_values: integers("sign_values")?,
            weight_names: strings("weight_names")?,
            inverse_weight_names: strings("inverse_weight_names")?,
            gdn_v_grouped: bool("gdn_v_grouped")?.unwrap_or(false),
            tied_output: bool("tied_output")?,
        };
        match stated.checked() {
            Ok(hadamard) => Ok(hadamard),
            Err(error) => node.refuse("a rotation that is known", error.to_string()),
        }
    }

    /// Writes it to the metadata of a GGUF file.
    ///
    /// # Errors
    ///
    /// [`GgufError`] if a key is there already.
    pub fn put(&self, metadata: &mut Metadata) -> Result<(), GgufError> {
        let text = |text: &str| Value::String(text.to_owned());
        let strings = |names: &BTreeSet<String>| {
            Value::Array(Array::String(names.iter().map(String::as_str).collect()))
        };
        let widths = self.sign_widths.iter().map(|&n| n as i32);
        let values = self.sign_values.iter().map(|&n| i32::from(n));
        let mut all = vec![
            ("version", Value::U32(self.version)),
            ("block_size", Value::U32(self.block_size as u32)),
            ("transform", text(TRANSFORM)),
            ("axis", text(AXIS)),
            ("sign_mode", text(self.sign_mode())),
            ("sign_widths", Value::Array(Array::I32(widths.collect()))),
            ("sign_values", Value::Array(Array::I32(values.collect()))),
            ("weight_names", strings(&self.weight_names)),
            ("inverse_weight_names", strings(&self.inverse_weight_names)),
            ("gdn_v_grouped", Value::Bool(self.gdn_v_grouped)),
        ];
        if self.version == 2 {
            all.push(("tied_output", Value::Bool(self.tied_output)));
        }
        for (key, value) in all {
            metadata.insert(format!("{PREFIX}{key}"), value)?;
        }
        Ok(())
    }

    /// The member of `config.json`, and its name there.
    pub fn to_json(&self) -> (&'static str, JsonValue) {
        let mut member = json!({
            "version": self.version,
            "block_size": self.block_size,
            "transform": TRANSFORM,
            "axis": AXIS,
            "sign_mode": self.sign_mode(),
            "sign_widths": self.sign_widths,
            "sign_values": self.sign_values,
            "weight_names": self.weight_names,
            "inverse_weight_names": self.inverse_weight_names,
            "gdn_v_grouped": self.gdn_v_grouped,
        });
        if self.version == 2 {
            member["tied_output"] = json!(self.tied_output);
        }
        (MEMBER, member)
    }

    fn sign_mode(&self) -> &'static str {
        match self.sign_widths.is_empty() {
            true => IDENTITY,
            false => EXPLICIT,
        }
    }

    /// Elements that are rotated together, a power of two.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The signs of rows of `width` elements, each 1 or −1; `None` if it has none for such rows.
    pub fn signs(&self, width: usize) -> Option<Vec<f32>> {
        if self.sign_widths.is_empty() {
            return width
                .is_multiple_of(self.block_size)
                .then(|| vec![1.0; width]);
        }
        let at = self.sign_widths.iter().position(|&of| of == width)?;
        let first = self.sign_widths[..at].iter().sum();
        let values = self.sign_values.iter().skip(first).take(width);
        Some(values.map(|&sign| f32::from(sign)).collect())
    }

    /// Whether the tensor with the GGUF name `name` is stored rotated.
    pub fn is_rotated(&self, name: &str) -> bool {
        self.weight_names.contains(name) || self.inverse_weight_names.contains(name)
    }

    /// GGUF names of the tensors that are stored rotated.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let all = self.weight_names.union(&self.inverse_weight_names);
        all.map(String::as_str)
    }

    /// Whether the columns of `ssm_out` are in the order of key heads.
    pub fn has_grouped_values(&self) -> bool {
        self.gdn_v_grouped
    }

    /// Whether the embedding table is the output head as well.
    pub fn is_tied(&self) -> bool {
        self.tied_output
    }
}

impl Stated {
    fn checked(self) -> Result<Hadamard, HadamardError> {
        let nothing = || "nothing".to_owned();
        let version = match self.version {
            Some(version @ (1 | 2)) => version as u32,
            found => {
                let found = found.map_or_else(nothing, |n| n.to_string());
                return Err(wrong("version", "1 or 2", found));
            }
        };
        for (key, stated, expected) in [
            ("transform", &self.transform, TRANSFORM),
            ("axis", &self.axis, AXIS),
        ] {
            if stated.as_deref() != Some(expected) {
                let found = stated.clone().unwrap_or_else(nothing);
                return Err(wrong(key, format!("`{expected}`"), found));
            }
        }
        let block_size = match self.block_size {
            Some(n) if n.is_power_of_two() && n <= 1 << 20 => n as usize,
            found => {
                let found = found.map_or_else(nothing, |n| n.to_string());
                return Err(wrong("block_size", "a power of two up to 2^20", found));
            }
        };
        let explicit = match self.sign_mode.as_deref() {
            Some(EXPLICIT) => true,
            Some(IDENTITY) => false,
            found => {
                let expected = format!("`{EXPLICIT}` or `{IDENTITY}`");
                return Err(wrong("sign_mode", expected, found.unwrap_or("nothing")));
            }
        };
        let (mut sign_widths, mut total) = (Vec::new(), 0_usize);
        for &width in self.sign_widths.iter().filter(|_| explicit) {
            let fits = usize::try_from(width).ok();
            let fits = fits.filter(|n| *n > 0 && n.is_multiple_of(block_size));
            let Some(width) = fits.filter(|n| !sign_widths.contains(n)) else {
                let expected = format!("multiples of {block_size}, each once");
                return Err(wrong("sign_widths", expected, width));
            };
            sign_widths.push(width);
            total = total.saturating_add(width);
        }
        if explicit && sign_widths.is_empty() {
            return Err(wrong("sign_widths", "a width at least", "nothing"));
        }
        let stated = self.sign_values.len();
        if explicit && stated != total {
            return Err(wrong("sign_values", format!("{total} of them"), stated));
        }
        let mut sign_values = Vec::with_capacity(total);
        for &value in self.sign_values.iter().filter(|_| explicit) {
            match value {
                1 => sign_values.push(1),
                -1 => sign_values.push(-1),
                other => return Err(wrong("sign_values", "1 or -1", other)),
            }
        }
        let weight_names = unique("weight_names", self.weight_names)?;
        if let Some(name) = weight_names.iter().find(|name| !can_be_rotated(name)) {
            let expected = "matrices whose inputs can be rotated";
            return Err(wrong("weight_names", expected, format!("`{name}`")));
        }
        if weight_names.is_empty() {
            return Err(wrong("weight_names", "a name at least", "nothing"));
        }
        let inverse_weight_names = unique("inverse_weight_names", self.inverse_weight_names)?;
        if let Some(name) = inverse_weight_names.iter().find(|name| *name != EMBEDDINGS) {
            let expected = format!("`{EMBEDDINGS}`");
            return Err(wrong("inverse_weight_names", expected, format!("`{name}`")));
        }
        if version == 1 && self.tied_output == Some(true) {
            return Err(wrong("tied_output", "version 2", 1));
        }
        Ok(Hadamard {
            version,
            block_size,
            sign_widths,
            sign_values,
            weight_names,
            inverse_weight_names,
            gdn_v_grouped: self.gdn_v_grouped,
            tied_output: self.tied_output == Some(true),
        })
    }
}

fn unique(key: &str, names: Vec<String>) -> Result<BTreeSet<String>, HadamardError> {
    let mut all = BTreeSet::new();
    for name in names {
        if all.contains(&name) {
            let found = format!("`{name}` twice");
            return Err(wrong(key, "every name once", found));
        }
        all.insert(name);
    }
    Ok(all)
}

/// Whether the tensor with this GGUF name may be one whose input is rotated.
fn can_be_rotated(name: &str) -> bool {
    const PARTS: [&str; 9] = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_gate",
        "attn_output",
        "ffn_gate_up_exps",
        "ssm_out",
        "nextn.eh_proj",
    ];
    const NETWORK: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
    let Some(module) = name.strip_suffix(".weight") else {
        return false;
    };
    if module == "output" {
        return true;
    }
    let Some((_, part)) = module.strip_prefix("blk.").and_then(|m| m.split_once('.')) else {
        return false;
    };
    let of_network = ["_exps", "_shexp", ""]
        .iter()
        .find_map(|end| part.strip_suffix(end));
    PARTS.contains(&part) || of_network.is_some_and(|part| NETWORK.contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stated() -> Stated {
        Stated {
            version: Some(1),
            block_size: Some(2),
            transform: Some(TRANSFORM.into()),
            axis: Some(AXIS.into()),
            sign_mode: Some(EXPLICIT.into()),
            sign_widths: vec![4, 2],
            sign_values: vec![1, -1, 1, 1, -1, -1],
            weight_names: vec!["blk.0.attn_q.weight".into(), "output.weight".into()],
            inverse_weight_names: vec![EMBEDDINGS.into()],
            ..Stated::default()
        }
    }

    #[test]
    fn statements_survive_both_kinds_of_files() {
        let hadamard = stated().checked().unwrap();
        assert_eq!(hadamard.signs(4), Some(vec![1.0, -1.0, 1.0, 1.0]));
        assert_eq!(hadamard.signs(2), Some(vec![-1.0, -1.0]));
        assert_eq!(hadamard.signs(6), None);
        assert!(hadamard.is_rotated("output.weight") && hadamard.is_rotated(EMBEDDINGS));
        assert!(!hadamard.is_rotated("blk.0.attn_k.weight"));
        let mut metadata = Metadata::new();
        hadamard.put(&mut metadata).unwrap();
        assert_eq!(
            Hadamard::of_gguf(&metadata).unwrap(),
            Some(hadamard.clone())
        );
        assert_eq!(Hadamard::of_gguf(&Metadata::new()).unwrap(), None);
        let (name, member) = hadamard.to_json();
        let config = json!({ name: member }).to_string();
        let config = crate::hf::Config::parse(config.as_bytes()).unwrap();
        assert_eq!(config.prism_hadamard, Some(hadamard));
    }

    #[test]
    fn without_signs_every_width_of_whole_runs_has_ones() {
        let hadamard = Stated {
            sign_mode: Some(IDENTITY.into()),
            ..stated()
        };
        let hadamard = hadamard.checked().unwrap();
        assert_eq!(hadamard.signs(6), Some(vec![1.0; 6]));
        assert_eq!(hadamard.signs(5), None);
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        type Spoil = fn(&mut Stated);
        let spoils: [(&str, Spoil); 15] = [
            ("version", |s| s.version = Some(3)),
            ("version", |s| s.version = None),
            ("block_size", |s| s.block_size = Some(3)),
            ("block_size", |s| s.block_size = Some(0)),
            ("block_size", |s| s.block_size = Some(1 << 40)),
            ("transform", |s| s.transform = Some("dct".into())),
            ("axis", |s| s.axis = None),
            ("sign_mode", |s| s.sign_mode = Some("random".into())),
            ("sign_widths", |s| s.sign_widths = vec![3]),
            ("sign_widths", |s| s.sign_widths = vec![]),
            ("sign_values", |s| s.sign_values[2] = 0),
            ("sign_values", |s| s.sign_values.truncate(5)),
            ("weight_names", |s| {
                s.weight_names[0] = "blk.0.ssm_alpha.weight".into()
            }),
            ("weight_names", |s| {
                s.weight_names[0] = s.weight_names[1].clone()
            }),
            ("inverse_weight_names", |s| {
                s.inverse_weight_names[0] = "output.weight".into()
            }),
        ];
        for (key, spoil) in spoils {
            let mut stated = stated();
            spoil(&mut stated);
            let error = stated.checked().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{PREFIX}{key}: ")), "{error}");
        }
        let mut metadata = Metadata::new();
        let key = format!("{PREFIX}twist");
        metadata.insert(key.clone(), Value::Bool(true)).unwrap();
        let error = Hadamard::of_gguf(&metadata).unwrap_err().to_string();
        assert!(error.starts_with(&key), "{error}");
    }
}
