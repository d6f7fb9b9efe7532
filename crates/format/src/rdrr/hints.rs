//! `runtimeOptimizations`: what a package asks of the program that runs it. How they are resolved is
//! up to the program.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::json::Json;

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

    /// Each hint, in the order of the format's description.
    pub fn iter(&self) -> impl Iterator<Item = Hint<'_>> {
        let kernels = self.preferred_kernels.iter();
        let sizes = self.workgroup_overrides.iter();
        let unknown = self.extra.iter();
        kernels
            .map(|(operation, variant)| Hint::Kernel { operation, variant })
            .chain(sizes.map(|(kernel, size)| Hint::Workgroup {
                kernel,
                size: *size,
            }))
            .chain(
                self.disable_features
                    .iter()
                    .map(|f| Hint::WithoutFeature(f)),
            )
            .chain(self.force_f32_accumulation.map(Hint::F32Sums))
            .chain(self.attention_tier.as_deref().map(Hint::AttentionTier))
            .chain(self.target_device.as_deref().map(Hint::TargetDevice))
            .chain(unknown.map(|(key, value)| Hint::Unknown(key, value)))
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

/// One of [`RuntimeOptimizations`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Hint<'a> {
    /// The kernel variant preferred for an operation.
    Kernel {
        /// The operation, such as `matmul`.
        operation: &'a str,
        /// The variant, such as `q4_fused`.
        variant: &'a str,
    },
    /// The size of a kernel's workgroups.
    Workgroup {
        /// The kernel.
        kernel: &'a str,
        /// Its workgroups.
        size: [u32; 3],
    },
    /// A GPU feature to do without.
    WithoutFeature(&'a str),
    /// Whether sums are to be f32 where f16 would do.
    F32Sums(bool),
    /// Which attention to use.
    AttentionTier(&'a str),
    /// The device that the hints were made for.
    TargetDevice(&'a str),
    /// A member of unknown meaning.
    Unknown(&'a str, &'a Value),
}

impl Hint<'_> {
    /// Its name in the file, such as `preferredKernels.matmul`.
    pub fn name(&self) -> String {
        match self {
            Hint::Kernel { operation, .. } => format!("preferredKernels.{operation}"),
            Hint::Workgroup { kernel, .. } => format!("workgroupOverrides.{kernel}"),
            Hint::WithoutFeature(_) => "disableFeatures".into(),
            Hint::F32Sums(_) => "forceF32Accumulation".into(),
            Hint::AttentionTier(_) => "attentionTier".into(),
            Hint::TargetDevice(_) => "targetDevice".into(),
            Hint::Unknown(key, _) => (*key).to_owned(),
        }
    }

    /// What it asks for.
    pub fn value(&self) -> String {
        match self {
            Hint::Kernel { variant: text, .. }
            | Hint::WithoutFeature(text)
            | Hint::AttentionTier(text)
            | Hint::TargetDevice(text) => (*text).to_owned(),
            Hint::Workgroup { size, .. } => format!("{size:?}"),
            Hint::F32Sums(force) => force.to_string(),
            Hint::Unknown(_, value) => value.to_string(),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdrr::fields;
    use crate::rdrr::problem::{Notes, Path};

    fn read(json: &str) -> RuntimeOptimizations {
        let mut notes = Notes::new();
        let tree = fields::parse(json.as_bytes(), &mut notes).unwrap();
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

    #[test]
    fn hints_are_written_as_they_are_read() {
        let hints = read(EVERY);
        let text = serde_json::to_string(&hints.to_json()).unwrap();
        assert_eq!(read(&text), hints);
        let names: Vec<_> = hints.iter().map(|hint| hint.name()).collect();
        assert_eq!(names.len(), 14);
        assert_eq!(names[0], "preferredKernels.matmul");
        assert_eq!(names[13], "later");
        let values: Vec<_> = hints.iter().map(|hint| hint.value()).collect();
        assert_eq!(values[5], "[128, 1, 1]");
        assert_eq!(values[13], r#"{"x":1}"#);
    }
}
