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
