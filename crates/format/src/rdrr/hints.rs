//! `runtimeOptimizations`: what a package would like of whoever runs it.

use serde_json::{Map, Value, json};

use super::json::{Fields, Json};

/// The most entries of a list of hints.
const MAX_HINTS: usize = 256;

/// Hints for running a model. They are advice: no hint makes a package invalid, and none overrules
/// what a machine can do.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RuntimeOptimizations {
    /// Operation and the kernel variant preferred for it.
    pub preferred_kernels: Vec<(String, String)>,
    /// Kernel and the size of its workgroups.
    pub workgroup_overrides: Vec<(String, [u32; 3])>,
    /// GPU features to do without, such as `subgroups` and `shader-f16`.
    pub disable_features: Vec<String>,
    /// Sums in f32, where f16 would do.
    pub force_f32_accumulation: Option<bool>,
    /// `tiled`, `streaming` or `basic`.
    pub attention_tier: Option<String>,
    /// Device that the hints were made for, such as `apple-m1`.
    pub target_device: Option<String>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

impl RuntimeOptimizations {
    pub(super) fn read(fields: &mut Fields<'_>) -> RuntimeOptimizations {
        let kernels = fields.members("preferredKernels", MAX_HINTS, |key, json, path, notes| {
            let Json::String(variant) = json else {
                notes.add(path, "the name of a kernel variant", json.shown());
                return None;
            };
            Some((key.to_owned(), variant.as_ref().to_owned()))
        });
        let workgroups =
            fields.members("workgroupOverrides", MAX_HINTS, |key, json, path, notes| {
                let size = workgroup(json);
                if size.is_none() {
                    notes.add(path, "three whole numbers above 0", json.shown());
                }
                Some((key.to_owned(), size?))
            });
        RuntimeOptimizations {
            preferred_kernels: kernels.unwrap_or_default(),
            workgroup_overrides: workgroups.unwrap_or_default(),
            disable_features: fields
                .strings("disableFeatures", MAX_HINTS)
                .unwrap_or_default(),
            force_f32_accumulation: fields.bool("forceF32Accumulation"),
            attention_tier: fields.string("attentionTier"),
            target_device: fields.string("targetDevice"),
            extra: fields.rest(),
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let mut out = Map::new();
        let mut put = |key: &str, value: Value| {
            out.insert(key.to_owned(), value);
        };
        if !self.preferred_kernels.is_empty() {
            let kernels = self.preferred_kernels.iter();
            put(
                "preferredKernels",
                kernels
                    .map(|(k, v)| (k.clone(), json!(v)))
                    .collect::<Map<_, _>>()
                    .into(),
            );
        }
        if !self.workgroup_overrides.is_empty() {
            let sizes = self.workgroup_overrides.iter();
            put(
                "workgroupOverrides",
                sizes
                    .map(|(k, v)| (k.clone(), json!(v)))
                    .collect::<Map<_, _>>()
                    .into(),
            );
        }
        if !self.disable_features.is_empty() {
            put("disableFeatures", json!(self.disable_features));
        }
        if let Some(force) = self.force_f32_accumulation {
            put("forceF32Accumulation", json!(force));
        }
        if let Some(tier) = &self.attention_tier {
            put("attentionTier", json!(tier));
        }
        if let Some(device) = &self.target_device {
            put("targetDevice", json!(device));
        }
        out.extend(self.extra.clone());
        Value::Object(out)
    }
}

fn workgroup(json: &Json<'_>) -> Option<[u32; 3]> {
    let Json::Array(items) = json else {
        return None;
    };
    let size = |json: &Json<'_>| {
        let n = json.u64().and_then(|n| u32::try_from(n).ok());
        n.filter(|&n| n > 0)
    };
    let sizes: Option<Vec<u32>> = items.iter().map(size).collect();
    sizes?.try_into().ok()
}

/// What a machine offers to a model's hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The GPU that runs the model; `None` where the CPU does.
    pub gpu: Option<Gpu>,
}

/// A GPU, as far as hints are concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Arithmetic in f16: the feature `shader-f16`.
    pub shader_f16: bool,
    /// Exchange within subgroups: the feature `subgroups`.
    pub subgroups: bool,
    /// The most invocations of a workgroup.
    pub max_invocations: u32,
    /// Sizes of workgroups have been measured on it.
    pub is_tuned: bool,
}

/// What became of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is followed.
    Taken,
    /// Something that counts more stands against it.
    Overruled,
    /// It says nothing here.
    Ignored,
}

impl Outcome {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Taken => "taken",
            Outcome::Overruled => "overruled",
            Outcome::Ignored => "ignored",
        }
    }
}

/// A hint and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The hint, such as `preferredKernels.matmul`.
    pub hint: String,
    /// What it asks for.
    pub value: String,
    /// What became of it.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
}

/// Operations, and the kernel variants that the format names for each.
const KERNELS: [(&str, &[&str]); 5] = [
    (
        "matmul",
        &["f32", "f16", "gemv_f16", "q4_fused", "q4_fused_batched"],
    ),
    ("attention", &["tiled_f16", "streaming_f16", "basic_f32"]),
    ("rmsnorm", &["f32", "f16", "f16_subgroup"]),
    ("dequant", &["q4k", "q8", "f16_passthrough"]),
    ("softmax", &["f32", "f16_online"]),
];

const FEATURES: [&str; 2] = ["shader-f16", "subgroups"];
const TIERS: [&str; 3] = ["tiled", "streaming", "basic"];

/// What becomes of each hint on a machine, in the order of the format's description.
///
/// A machine's abilities count more than any hint, measured sizes more than given ones, and a tier
/// of attention more than a kernel for it, because it is forced and a kernel only preferred. Words
/// that the format doesn't know are ignored.
pub fn resolve(hints: &RuntimeOptimizations, machine: &Capabilities) -> Vec<Decision> {
    let mut out = Vec::new();
    let mut decide = |hint: String, value: String, (outcome, reason): (Outcome, String)| {
        out.push(Decision {
            hint,
            value,
            outcome,
            reason,
        });
    };
    let disabled = |feature: &str| hints.disable_features.iter().any(|f| f == feature);
    let tier = hints
        .attention_tier
        .as_deref()
        .filter(|tier| TIERS.contains(tier));
    for (operation, variant) in &hints.preferred_kernels {
        let decision = kernel(operation, variant, machine, tier, &disabled);
        decide(
            format!("preferredKernels.{operation}"),
            variant.clone(),
            decision,
        );
    }
    for (name, size) in &hints.workgroup_overrides {
        let decision = workgroup_size(name, *size, machine);
        decide(
            format!("workgroupOverrides.{name}"),
            format!("{size:?}"),
            decision,
        );
    }
    for feature in &hints.disable_features {
        let decision = match &machine.gpu {
            _ if !FEATURES.contains(&feature.as_str()) => {
                ignored(list("no feature that is known", &FEATURES))
            }
            None => ignored("a feature of GPUs; the CPU runs the model"),
            Some(gpu) if !gpu.has(feature) => ignored(format!("{} hasn't got it", gpu.name)),
            Some(_) => taken("kernels that need it are not used"),
        };
        decide("disableFeatures".into(), feature.clone(), decision);
    }
    if let Some(force) = hints.force_f32_accumulation {
        let decision = match (force, &machine.gpu) {
            (true, None) => taken("the CPU's sums are f32 or exact integers in any case"),
            (true, Some(_)) => taken("sums are f32"),
            (false, _) => ignored("how exact sums are is not a model's to lower"),
        };
        decide("forceF32Accumulation".into(), force.to_string(), decision);
    }
    if let Some(named) = &hints.attention_tier {
        let decision = match (tier, &machine.gpu) {
            (None, _) => ignored(list("no tier that is known", &TIERS)),
            (Some(_), None) => {
                ignored("the CPU has one attention, in tiles with an online softmax")
            }
            (Some(_), Some(_)) => taken("attention of this tier is used"),
        };
        decide("attentionTier".into(), named.clone(), decision);
    }
    if let Some(device) = &hints.target_device {
        let decision = match &machine.gpu {
            None => ignored("the CPU runs the model"),
            Some(gpu) if gpu.is_called(device) => taken(format!("this is {}", gpu.name)),
            Some(gpu) => ignored(format!("this is {}", gpu.name)),
        };
        decide("targetDevice".into(), device.clone(), decision);
    }
    for (key, value) in &hints.extra {
        decide(
            key.clone(),
            value.to_string(),
            ignored("no hint that is known"),
        );
    }
    out
}

impl Gpu {
    fn has(&self, feature: &str) -> bool {
        match feature {
            "shader-f16" => self.shader_f16,
            "subgroups" => self.subgroups,
            _ => false,
        }
    }

    /// Whether every word of `hint` is in the name.
    fn is_called(&self, hint: &str) -> bool {
        let name = self.name.to_ascii_lowercase();
        let hint = hint.to_ascii_lowercase();
        hint.split(['-', '_', ' ']).all(|word| name.contains(word))
    }
}

fn kernel(
    operation: &str,
    variant: &str,
    machine: &Capabilities,
    tier: Option<&str>,
    disabled: &dyn Fn(&str) -> bool,
) -> (Outcome, String) {
    let Some((_, variants)) = KERNELS.iter().find(|(name, _)| *name == operation) else {
        return ignored(list(
            "no operation that is known",
            &KERNELS.map(|(name, _)| name),
        ));
    };
    if !variants.contains(&variant) {
        return ignored(list("no variant that is known", variants));
    }
    let Some(gpu) = &machine.gpu else {
        return ignored("a choice among GPU kernels; the CPU runs the model");
    };
    for (feature, needed) in [
        (
            "shader-f16",
            variant.contains("f16") && variant != "f16_passthrough",
        ),
        ("subgroups", variant.contains("subgroup")),
    ] {
        if needed && !gpu.has(feature) {
            return overruled(format!("{} has no {feature}", gpu.name));
        }
        if needed && disabled(feature) {
            return overruled(format!("disableFeatures has {feature}"));
        }
    }
    if operation == "attention"
        && let Some(tier) = tier
        && !variant.starts_with(tier)
    {
        return overruled(format!("attentionTier is {tier}"));
    }
    taken("the kernel is used where shapes and types allow")
}

fn workgroup_size(kernel: &str, size: [u32; 3], machine: &Capabilities) -> (Outcome, String) {
    let operation = kernel.split('_').next().unwrap_or_default();
    if !KERNELS.iter().any(|(name, _)| *name == operation) {
        return ignored("no kernel that is known");
    }
    let Some(gpu) = &machine.gpu else {
        return ignored("a size of GPU workgroups; the CPU runs the model");
    };
    let n = size.iter().map(|&n| u64::from(n)).product::<u64>();
    if n > u64::from(gpu.max_invocations) {
        return overruled(format!(
            "{n} invocations, and {} runs at most {} together",
            gpu.name, gpu.max_invocations
        ));
    }
    if gpu.is_tuned {
        return overruled("sizes were measured on this machine");
    }
    taken("the size is used")
}

fn taken(reason: impl Into<String>) -> (Outcome, String) {
    (Outcome::Taken, reason.into())
}

fn overruled(reason: impl Into<String>) -> (Outcome, String) {
    (Outcome::Overruled, reason.into())
}

fn ignored(reason: impl Into<String>) -> (Outcome, String) {
    (Outcome::Ignored, reason.into())
}

fn list(what: &str, known: &[&str]) -> String {
    format!("{what}: {}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdrr::json::Path;
    use crate::rdrr::problem::Notes;

    fn read(json: &str) -> RuntimeOptimizations {
        let mut notes = Notes::new();
        let tree = Json::parse(json.as_bytes(), &mut notes).unwrap();
        let mut fields = Fields::of(&tree, Path::Root, &mut notes).unwrap();
        let hints = RuntimeOptimizations::read(&mut fields);
        notes.or(hints).unwrap()
    }

    const EVERY: &str = r#"{
        "preferredKernels": {"matmul": "q4_fused", "attention": "tiled_f16", "rmsnorm": "f16_subgroup",
            "softmax": "f64", "conv": "f32"},
        "workgroupOverrides": {"matmul_f16": [128, 1, 1], "rmsnorm": [1024, 1, 1], "warp": [1, 1, 1]},
        "disableFeatures": ["subgroups", "magic"],
        "forceF32Accumulation": true, "attentionTier": "streaming", "targetDevice": "apple-m1",
        "later": {"x": 1}
    }"#;

    fn outcomes(
        hints: &RuntimeOptimizations,
        machine: &Capabilities,
    ) -> Vec<(String, &'static str)> {
        let decisions = resolve(hints, machine);
        assert!(decisions.iter().all(|d| !d.reason.is_empty()));
        decisions
            .into_iter()
            .map(|d| (format!("{}={}", d.hint, d.value), d.outcome.name()))
            .collect()
    }

    #[test]
    fn hints_are_written_as_they_are_read() {
        let hints = read(EVERY);
        let text = serde_json::to_string(&hints.to_json()).unwrap();
        assert_eq!(read(&text), hints);
    }

    #[test]
    fn the_cpu_has_no_use_for_hints_about_gpus() {
        let decisions = outcomes(&read(EVERY), &Capabilities { gpu: None });
        let taken: Vec<_> = decisions
            .iter()
            .filter(|(_, outcome)| *outcome != "ignored")
            .collect();
        assert_eq!(taken, [&("forceF32Accumulation=true".to_owned(), "taken")]);
        assert_eq!(decisions.len(), 14);
    }

    #[test]
    fn abilities_then_measurements_then_hints() {
        let gpu = Gpu {
            name: "Apple M1".into(),
            shader_f16: true,
            subgroups: true,
            max_invocations: 256,
            is_tuned: false,
        };
        let machine = |gpu: &Gpu| Capabilities {
            gpu: Some(gpu.clone()),
        };
        let find = |decisions: &[(String, &'static str)], hint: &str| {
            let row = decisions.iter().find(|(name, _)| name.starts_with(hint));
            row.map(|(_, outcome)| *outcome)
        };
        let decisions = outcomes(&read(EVERY), &machine(&gpu));
        for (hint, outcome) in [
            ("preferredKernels.matmul", "taken"),
            // The tier is forced, the kernel preferred.
            ("preferredKernels.attention", "overruled"),
            // Subgroups are disabled by another hint.
            ("preferredKernels.rmsnorm", "overruled"),
            ("preferredKernels.softmax", "ignored"),
            ("preferredKernels.conv", "ignored"),
            ("workgroupOverrides.matmul_f16", "taken"),
            ("workgroupOverrides.rmsnorm", "overruled"),
            ("workgroupOverrides.warp", "ignored"),
            ("disableFeatures=subgroups", "taken"),
            ("disableFeatures=magic", "ignored"),
            ("attentionTier", "taken"),
            ("targetDevice", "taken"),
            ("later", "ignored"),
        ] {
            assert_eq!(find(&decisions, hint), Some(outcome), "{hint}");
        }
        let tuned = Gpu {
            is_tuned: true,
            shader_f16: false,
            ..gpu
        };
        let f16 = read(
            r#"{"preferredKernels":{"matmul":"f16"},"workgroupOverrides":{"matmul_f16":[64,4,1]}}"#,
        );
        let decisions = outcomes(&f16, &machine(&tuned));
        assert_eq!(find(&decisions, "preferredKernels"), Some("overruled"));
        assert_eq!(find(&decisions, "workgroupOverrides"), Some("overruled"));
    }
}
