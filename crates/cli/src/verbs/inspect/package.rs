//! What `inspect` shows of a package besides its tensors.

use serde::Serialize;
use sterna::PackageHeader;
use sterna_format::rdrr::QuantizationInfo;

use crate::device::HintReport;
use crate::output::{self, Bytes};

/// What a package says about itself, and how it is interpreted.
#[derive(Debug, Serialize)]
pub(super) struct PackageReport {
    id: String,
    model_type: String,
    quantization: String,
    variant: Option<String>,
    hash_algorithm: &'static str,
    base_model: Option<String>,
    tokenizer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<LoraReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertsReport>,
    precisions: PrecisionsReport,
    groups: Vec<GroupReport>,
    shards: Vec<ShardReport>,
    hints: Vec<HintReport>,
    warnings: Vec<String>,
}

/// Shape and strength of an adapter, as its package states them.
#[derive(Debug, Serialize)]
struct LoraReport {
    rank: u64,
    alpha: f64,
    rank_stabilized: bool,
    targets: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ExpertsReport {
    n_experts: u64,
    n_experts_per_token: u64,
    n_shared_experts: Option<u64>,
}

/// The words of a package for what isn't stored in it.
#[derive(Debug, Default, Serialize)]
struct PrecisionsReport {
    kv_cache: Option<String>,
    activations: Option<String>,
    compute: Option<String>,
}

impl PrecisionsReport {
    fn new(info: &QuantizationInfo) -> PrecisionsReport {
        PrecisionsReport {
            kv_cache: info.kv_cache.clone(),
            activations: info.activations.clone(),
            compute: info.compute.clone(),
        }
    }

    fn text(&self) -> String {
        let named = [
            ("cache", &self.kv_cache),
            ("activations", &self.activations),
            ("compute", &self.compute),
        ];
        let words = named.into_iter().filter_map(|(name, word)| {
            let word = word.as_ref()?;
            Some(format!("{name} {}", word.escape_debug()))
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

#[derive(Debug, Serialize)]
struct GroupReport {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    version: String,
    n_tensors: usize,
    bytes: u64,
    shards: Vec<usize>,
    hash: String,
}

#[derive(Debug, Serialize)]
struct ShardReport {
    file: String,
    bytes: u64,
    hash: String,
}

impl PackageReport {
    /// `hints` are the resolved hints of the package.
    pub(super) fn new(header: &PackageHeader, hints: Vec<HintReport>) -> PackageReport {
        let package = &header.package;
        let manifest = package.manifest();
        let info = manifest.quantization_info.as_ref();
        let groups = manifest.groups.iter().map(|group| GroupReport {
            id: group.id.clone(),
            kind: group.kind.name().to_owned(),
            version: group.version.clone(),
            n_tensors: group.tensors.len(),
            bytes: package.group_tensors(group).map(|tensor| tensor.size).sum(),
            shards: group.shards.clone(),
            hash: group.hash.to_string(),
        });
        let shards = manifest.shards.iter().map(|shard| ShardReport {
            file: shard.file_name.clone(),
            bytes: shard.size,
            hash: shard.hash.to_string(),
        });
        PackageReport {
            id: manifest.model_id.clone(),
            model_type: manifest.model_type.clone(),
            quantization: manifest.quantization.clone(),
            variant: info.and_then(|info| info.variant_tag.clone()),
            hash_algorithm: manifest.hash_algorithm.name(),
            base_model: manifest.base_model.clone(),
            tokenizer: manifest.tokenizer.as_ref().map(|entry| entry.kind.clone()),
            adapter: manifest.lora_config.as_ref().map(|lora| LoraReport {
                rank: lora.rank,
                alpha: lora.alpha,
                rank_stabilized: lora.rank_stabilized,
                targets: lora.target_modules.clone(),
            }),
            experts: manifest.moe_config.as_ref().map(|moe| ExpertsReport {
                n_experts: moe.n_experts,
                n_experts_per_token: moe.n_experts_per_token,
                n_shared_experts: moe.n_shared_experts,
            }),
            precisions: info.map(PrecisionsReport::new).unwrap_or_default(),
            groups: groups.collect(),
            shards: shards.collect(),
            hints,
            warnings: header.warnings(),
        }
    }

    /// Rows for the table at the top.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![
            ("package", format!("{} ({})", self.id, self.model_type)),
            (
                "quantization",
                match &self.variant {
                    Some(variant) => format!("{}, variant {variant}", self.quantization),
                    None => self.quantization.clone(),
                },
            ),
            (
                "shards",
                format!("{}, hashed by {}", self.shards.len(), self.hash_algorithm),
            ),
        ];
        if let Some(base) = &self.base_model {
            rows.push(("base model", base.clone()));
        }
        if let Some(lora) = &self.adapter {
            let targets: Vec<String> = lora
                .targets
                .iter()
                .map(|t| t.escape_debug().to_string())
                .collect();
            let stabilized = if lora.rank_stabilized {
                " over the root of the rank"
            } else {
                ""
            };
            rows.push((
                "adapter",
                format!(
                    "rank {}, alpha {}{stabilized}, for {}",
                    lora.rank,
                    lora.alpha,
                    targets.join(", ")
                ),
            ));
        }
        if let Some(moe) = &self.experts {
            let shared = moe
                .n_shared_experts
                .map_or(String::new(), |n| format!(", {n} shared"));
            rows.push((
                "experts",
                format!(
                    "{}, {} for each token{shared}",
                    moe.n_experts, moe.n_experts_per_token
                ),
            ));
        }
        let precisions = self.precisions.text();
        if !precisions.is_empty() {
            rows.push(("asks for", precisions));
        }
        if let Some(tokenizer) = &self.tokenizer {
            rows.push(("tokenizer", tokenizer.clone()));
        }
        for warning in &self.warnings {
            rows.push(("warning", warning.clone()));
        }
        rows
    }

    /// Sections below the table: a title and its rows.
    pub(super) fn sections(&self) -> Vec<(&'static str, String)> {
        let groups = self.groups.iter().map(|group| {
            let shards: Vec<_> = group.shards.iter().map(usize::to_string).collect();
            let text = format!(
                "{:6} {}  {:>10}  {} tensors in shards {}",
                group.kind,
                group.version,
                Bytes(group.bytes),
                group.n_tensors,
                shards.join(", ")
            );
            (group.id.as_str(), text)
        });
        let shards = self.shards.iter().map(|shard| {
            let text = format!("{:>10}  {}", Bytes(shard.bytes), shard.hash);
            (shard.file.as_str(), text)
        });
        let hints = self.hints.iter().map(|hint| {
            let text = format!("{}: {} ({})", hint.value, hint.outcome, hint.reason);
            (hint.hint.as_str(), text)
        });
        let sections: [(_, Vec<(&str, String)>); 3] = [
            ("groups", groups.collect()),
            ("shards", shards.collect()),
            ("hints", hints.collect()),
        ];
        sections
            .into_iter()
            .filter(|(_, rows)| !rows.is_empty())
            .map(|(title, rows)| (title, output::table(&rows)))
            .collect()
    }
}
