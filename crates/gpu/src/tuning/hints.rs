//! How the hints of a package are resolved: `runtimeOptimizations` of RDRR.
//!
//! Device capabilities take precedence, then measurements, then hints, then heuristics.

use sterna_format::rdrr::RuntimeOptimizations;
use sterna_format::rdrr::hints::Hint;

use crate::{AdapterCaps, Features};

/// What a GPU reports for resolving hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name.
    pub name: String,
    /// Its features, under the names used in hints: see [`FEATURES`].
    pub features: Vec<&'static str>,
    /// Whether products with many rows use cooperative matrices, which take f16.
    pub matrix_units: bool,
    /// Maximum invocations of a workgroup.
    pub max_invocations: u32,
    /// What determines workgroup sizes.
    pub sizing: Sizing,
}

impl Capabilities {
    /// Those of the adapter of `offer`.
    pub fn new(offer: &AdapterCaps, sizing: Sizing) -> Capabilities {
        let has = |name: &&str| feature(name).is_some_and(|f| offer.features.and(f) == f);
        Capabilities {
            name: offer.info.name.clone(),
            features: FEATURES.into_iter().filter(has).collect(),
            matrix_units: offer.has_matrix_units(),
            max_invocations: offer.limits.workgroup_len,
            sizing,
        }
    }
}

/// The feature that hints call `name`, if there is one: `shader-f16` is the format's word, the others are our
/// own.
pub fn feature(name: &str) -> Option<Features> {
    Features::named(match name {
        "shader-f16" => "f16",
        name => name,
    })
}

/// What determines workgroup sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizing {
    /// Hints, if there are any, and else heuristics.
    Hints,
    /// Measurements on the machine, where available, and else hints.
    Measured,
    /// Heuristics, because the user asked for it.
    Rules,
}

/// The resolved requests of hints to a GPU, without those that were overruled.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Choices {
    /// Features to disable: some of [`FEATURES`].
    pub without: Vec<&'static str>,
    /// Workgroup size for products with few rows that were not measured.
    pub gemv_workgroup: Option<u32>,
}

impl Choices {
    /// `features` without those to disable.
    pub fn mask(&self, features: Features) -> Features {
        let masked = self.without.iter().filter_map(|name| feature(name));
        masked.fold(features, Features::without)
    }
}

/// Hints, resolved.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resolved {
    /// The resolution of each hint, in the order of the format's description.
    pub decisions: Vec<Decision>,
    /// The resulting requests.
    pub choices: Choices,
}

/// The resolution of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is followed.
    Taken,
    /// Something of higher precedence contradicts it.
    Overruled,
    /// It does not apply here.
    Ignored,
}

impl Outcome {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Taken => "taken",
            Outcome::Overruled => "overruled",
            Outcome::Ignored => "ignored",
        }
    }
}

/// A hint and its resolution.
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

/// Features that hints may disable: those that the format names, and our own.
pub const FEATURES: [&str; 5] = [
    "shader-f16",
    "subgroups",
    MATRIX_UNITS,
    "dot4",
    "immediates",
];
const MATRIX_UNITS: &str = "cooperative-matrix";

const TIERS: [&str; 3] = ["tiled", "streaming", "basic"];

/// Resolves each hint on `gpu`; `None` where the CPU runs the model.
///
/// Device capabilities take precedence over any hint, measured sizes over given ones, and an attention tier
/// over an attention kernel, because it is forced and a kernel only preferred. Unknown words are ignored, and
/// so are hints where there is no choice.
pub fn resolve(hints: &RuntimeOptimizations, gpu: Option<&Capabilities>) -> Resolved {
    let mut choices = Choices::default();
    let sizes = Sizes::new(hints, gpu);
    choices.gemv_workgroup = sizes.chosen.map(|(_, n)| n);
    let decide = |hint: Hint<'_>| {
        let (outcome, reason) = match hint {
            Hint::Kernel { operation, variant } => {
                let decision = kernel(operation, variant, hints, gpu);
                // The only effect of preferring floats: nothing but cooperative matrices, of products and of
                // attention, would round them further.
                if decision.0 == Outcome::Taken
                    && (operation, variant) == ("matmul", "f32")
                    && gpu.is_some_and(|gpu| gpu.matrix_units)
                {
                    choices.without.push(MATRIX_UNITS);
                }
                decision
            }
            Hint::Workgroup { kernel, size } => sizes.decide(kernel, size),
            Hint::WithoutFeature(feature) => {
                let known = FEATURES.into_iter().find(|known| *known == feature);
                match (gpu, known) {
                    (_, None) => ignored(list("no feature that is known", &FEATURES)),
                    (None, _) => ignored("a feature of GPUs; the CPU runs the model"),
                    (Some(gpu), Some(known)) if !gpu.has(known) => {
                        ignored(format!("{} doesn't have it", gpu.name))
                    }
                    (Some(_), Some(known)) => {
                        if !choices.without.contains(&known) {
                            choices.without.push(known);
                        }
                        taken("kernels that need it are not used")
                    }
                }
            }
            Hint::F32Sums(true) => taken("sums are f32 or exact integers in any case"),
            Hint::F32Sums(false) => ignored("how exact sums are is not a model's to lower"),
            Hint::AttentionTier(_) => match (tier(hints), gpu) {
                (None, _) => ignored(list("no tier that is known", &TIERS)),
                (Some(_), None) => {
                    ignored("the CPU has one attention, in tiles with an online softmax")
                }
                (Some("tiled"), Some(_)) => taken("prompts are attended to in tiles in any case"),
                (Some(_), Some(_)) => ignored(ONE_ATTENTION),
            },
            Hint::TargetDevice(device) => match gpu {
                None => ignored("the CPU runs the model"),
                Some(gpu) if gpu.is_called(device) => taken(format!("this is {}", gpu.name)),
                Some(gpu) => ignored(format!("this is {}", gpu.name)),
            },
            Hint::Unknown(..) => ignored("no hint that is known"),
            Hint::Malformed(wrong) => ignored(format!("expected {}", wrong.expected)),
        };
        Decision {
            hint: hint.name(),
            value: hint.value(),
            outcome,
            reason,
        }
    };
    let decisions = hints.iter().map(decide).collect();
    Resolved { decisions, choices }
}

/// The requested attention tier, if it is one.
fn tier(hints: &RuntimeOptimizations) -> Option<&str> {
    let tier = hints.attention_tier.as_deref();
    tier.filter(|tier| TIERS.contains(tier))
}

const ONE_ATTENTION: &str =
    "prompts use tiled attention and single tokens split-KV; there is no other choice";

impl Capabilities {
    fn has(&self, feature: &str) -> bool {
        self.features.contains(&feature)
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
    hints: &RuntimeOptimizations,
    gpu: Option<&Capabilities>,
) -> (Outcome, String) {
    let disabled = |feature: &str| hints.disable_features.iter().any(|f| f == feature);
    let Some((_, variants)) = KERNELS.iter().find(|(name, _)| *name == operation) else {
        return ignored(list(
            "no operation that is known",
            &KERNELS.map(|(name, _)| name),
        ));
    };
    if !variants.contains(&variant) {
        return ignored(list("no variant that is known", variants));
    }
    let Some(gpu) = gpu else {
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
        && let Some(tier) = tier(hints)
        && !variant.starts_with(tier)
    {
        return overruled(format!("attentionTier is {tier}"));
    }
    match (operation, variant) {
        ("matmul", "f32") => taken("kernels that round activations to f16 are not used"),
        ("matmul", "f16") if !gpu.matrix_units => ignored(format!(
            "products in f16 need cooperative matrices, which {} doesn't have",
            gpu.name
        )),
        ("matmul", "f16") if disabled(MATRIX_UNITS) => {
            overruled(format!("disableFeatures has {MATRIX_UNITS}"))
        }
        ("matmul", "f16") => taken("cooperative matrices multiply many rows"),
        ("matmul", _) => taken("weights are multiplied as they are stored, in any case"),
        ("attention", "tiled_f16") => taken("prompts are attended to in tiles in any case"),
        ("attention", _) => ignored(ONE_ATTENTION),
        ("rmsnorm" | "softmax", "f32") => taken("it is computed in f32 in any case"),
        ("rmsnorm" | "softmax", _) => ignored("it is computed in f32"),
        _ => ignored("weights are multiplied as they are stored"),
    }
}

/// Workgroup sizes, and the one that is used.
struct Sizes<'a> {
    gpu: Option<&'a Capabilities>,
    target: Option<&'a str>,
    /// The kernel whose size is used, and its invocations.
    chosen: Option<(&'a str, u32)>,
}

impl<'a> Sizes<'a> {
    fn new(hints: &'a RuntimeOptimizations, gpu: Option<&'a Capabilities>) -> Sizes<'a> {
        let mut sizes = Sizes {
            gpu,
            target: hints.target_device.as_deref(),
            chosen: None,
        };
        if sizes.sizing() == Sizing::Rules {
            return sizes;
        }
        // A size for these very kernels takes precedence over one for products in general.
        for of_kernels in [is_gemv, is_product] {
            for (name, size) in &hints.workgroup_overrides {
                if sizes.chosen.is_none()
                    && of_kernels(name)
                    && sizes.refusal(name, *size).is_none()
                {
                    sizes.chosen = Some((name, invocations(*size) as u32));
                }
            }
        }
        sizes
    }

    fn sizing(&self) -> Sizing {
        self.gpu.map_or(Sizing::Hints, |gpu| gpu.sizing)
    }

    /// Why a size can't be used, regardless of others.
    fn refusal(&self, kernel: &str, size: [u32; 3]) -> Option<(Outcome, String)> {
        let operation = kernel.split('_').next().unwrap_or_default();
        let is_operation = KERNELS.iter().any(|(name, _)| *name == operation);
        if !is_operation && !is_gemv(kernel) && !KERNELS[0].1.contains(&kernel) {
            return Some(ignored("no kernel that is known"));
        }
        let Some(gpu) = self.gpu else {
            return Some(ignored("a size of GPU workgroups; the CPU runs the model"));
        };
        let n = invocations(size);
        if n > u64::from(gpu.max_invocations) {
            return Some(overruled(format!(
                "{n} invocations, and {} runs at most {} together",
                gpu.name, gpu.max_invocations
            )));
        }
        if let Some(target) = self.target.filter(|target| !gpu.is_called(target)) {
            return Some(ignored(format!("for {target}; this is {}", gpu.name)));
        }
        if !is_gemv(kernel) && !is_product(kernel) {
            return Some(ignored("workgroups of these kernels have one size"));
        }
        None
    }

    fn decide(&self, kernel: &str, size: [u32; 3]) -> (Outcome, String) {
        if let Some(refusal) = self.refusal(kernel, size) {
            return refusal;
        }
        match (self.chosen, self.sizing()) {
            (_, Sizing::Rules) => overruled("the user asked for default sizes"),
            (Some((chosen, _)), _) if chosen != kernel => {
                overruled(format!("{chosen} takes precedence"))
            }
            (_, Sizing::Measured) => overruled(
                "sizes measured on this machine take precedence; other products with few rows use it",
            ),
            (_, Sizing::Hints) => {
                taken("the workgroup size of products with few rows, or the nearest supported")
            }
        }
    }
}

fn invocations(size: [u32; 3]) -> u64 {
    let sizes = size.into_iter().map(u64::from);
    sizes.fold(1, u64::saturating_mul)
}

/// Whether a kernel is one for products with few rows.
fn is_gemv(kernel: &str) -> bool {
    let kernel = kernel.strip_prefix("matmul_").unwrap_or(kernel);
    kernel == "q4_fused" || kernel.split('_').next() == Some("gemv")
}

/// Whether a kernel is one for products in general.
fn is_product(kernel: &str) -> bool {
    kernel.split('_').next() == Some("matmul") && !kernel.contains("batched")
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
    use sterna_format::rdrr::Manifest;

    use super::*;

    /// The hints of a package whose manifest says nothing else, and an adapter.
    fn read(json: &str) -> RuntimeOptimizations {
        let hash = "00".repeat(32);
        let manifest = format!(
            r#"{{"version": 1, "modelId": "x", "modelType": "lora", "tensorsFile": "tensors.json",
                "shards": [{{"fileName": "x.bin", "size": 1, "hash": "{hash}"}}],
                "runtimeOptimizations": {json}}}"#
        );
        let manifest = Manifest::parse(manifest.as_bytes()).unwrap();
        manifest.runtime_optimizations.unwrap()
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
        gpu: Option<&Capabilities>,
    ) -> Vec<(String, &'static str)> {
        let Resolved { decisions, .. } = resolve(hints, gpu);
        assert!(decisions.iter().all(|d| !d.reason.is_empty()));
        decisions
            .into_iter()
            .map(|d| (format!("{}={}", d.hint, d.value), d.outcome.name()))
            .collect()
    }

    #[test]
    fn the_cpu_has_no_use_for_hints_about_gpus() {
        let decisions = outcomes(&read(EVERY), None);
        let taken: Vec<_> = decisions
            .iter()
            .filter(|(_, outcome)| *outcome != "ignored")
            .collect();
        assert_eq!(taken, [&("forceF32Accumulation=true".to_owned(), "taken")]);
        assert_eq!(decisions.len(), 14);
    }

    #[test]
    fn abilities_then_measurements_then_hints() {
        let gpu = Capabilities {
            name: "Apple M1".into(),
            features: FEATURES.to_vec(),
            matrix_units: true,
            max_invocations: 256,
            sizing: Sizing::Hints,
        };
        let find = |decisions: &[(String, &'static str)], hint: &str| {
            let row = decisions.iter().find(|(name, _)| name.starts_with(hint));
            row.map(|(_, outcome)| *outcome)
        };
        let decisions = outcomes(&read(EVERY), Some(&gpu));
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
            ("forceF32Accumulation", "taken"),
            // There is one attention.
            ("attentionTier", "ignored"),
            ("targetDevice", "taken"),
            ("later", "ignored"),
        ] {
            assert_eq!(find(&decisions, hint), Some(outcome), "{hint}");
        }
        let tuned = Capabilities {
            sizing: Sizing::Measured,
            features: vec!["subgroups"],
            matrix_units: false,
            ..gpu
        };
        let f16 = read(
            r#"{"preferredKernels":{"matmul":"f16"},"workgroupOverrides":{"matmul_f16":[64,4,1]}}"#,
        );
        let decisions = outcomes(&f16, Some(&tuned));
        assert_eq!(find(&decisions, "preferredKernels"), Some("overruled"));
        assert_eq!(find(&decisions, "workgroupOverrides"), Some("overruled"));
    }

    #[test]
    fn what_is_taken_is_what_is_chosen() {
        let gpu = |sizing, max_invocations| Capabilities {
            name: "Apple M1".into(),
            features: FEATURES.to_vec(),
            matrix_units: true,
            max_invocations,
            sizing,
        };
        let chosen = |json: &str, gpu: Option<&Capabilities>| {
            let Choices {
                without,
                gemv_workgroup,
            } = resolve(&read(json), gpu).choices;
            (without, gemv_workgroup)
        };
        let plain = gpu(Sizing::Hints, 1024);
        assert_eq!(chosen(EVERY, Some(&plain)), (vec!["subgroups"], Some(128)));
        assert_eq!(chosen(EVERY, None), (Vec::new(), None));
        for (json, without, workgroup) in [
            // Kernels for few rows take precedence, in whatever order.
            (
                r#"{"workgroupOverrides": {"matmul_f16": [64, 1, 1], "gemv_f16": [8, 4, 1], "q4_fused": [256, 1, 1]}}"#,
                vec![],
                Some(32),
            ),
            (
                r#"{"workgroupOverrides": {"q4_fused_batched": [64, 1, 1], "softmax": [64, 1, 1]}}"#,
                vec![],
                None,
            ),
            // More than the device supports per workgroup, or than fits the type.
            (
                r#"{"workgroupOverrides": {"gemv_f16": [2048, 1, 1], "matmul": [4294967295, 4294967295, 4294967295]}}"#,
                vec![],
                None,
            ),
            (
                r#"{"workgroupOverrides": {"gemv": [64, 2, 1]}, "targetDevice": "nvidia-rtx"}"#,
                vec![],
                None,
            ),
            (
                r#"{"preferredKernels": {"matmul": "f32"}, "disableFeatures": ["cooperative-matrix", "shader-f16"]}"#,
                vec!["cooperative-matrix", "shader-f16"],
                None,
            ),
            (r#"{"preferredKernels": {"matmul": "f16"}}"#, vec![], None),
        ] {
            assert_eq!(chosen(json, Some(&plain)), (without, workgroup), "{json}");
        }
        // Products that were not measured still use the size.
        let sizes = r#"{"workgroupOverrides": {"gemv": [64, 2, 1]}}"#;
        assert_eq!(
            chosen(sizes, Some(&gpu(Sizing::Measured, 1024))),
            (Vec::new(), Some(128))
        );
        let tuned = outcomes(&read(sizes), Some(&gpu(Sizing::Measured, 1024)));
        assert_eq!(tuned[0].1, "overruled");
        let rules = gpu(Sizing::Rules, 1024);
        assert_eq!(chosen(sizes, Some(&rules)), (Vec::new(), None));
        assert_eq!(outcomes(&read(sizes), Some(&rules))[0].1, "overruled");
    }
}
