//! `runtimeOptimizations`: what a package asks of the program that runs it. How they are resolved is
//! up to the program.

use serde_json::{Map, Value, json};

use super::fields::{self, Fields};
use super::problem::{Notes, Path, Problems};
use crate::json::{Json, quoted};

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
    /// Hints that aren't as they should be.
    pub malformed: Vec<MalformedHint>,
}

/// A hint that isn't as it should be: ignored, and written again where it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct MalformedHint {
    /// Where in the hints it is; nothing of hints that are no object.
    place: Place,
    /// What it is.
    value: Value,
    /// What was expected there.
    pub expected: &'static str,
}

#[derive(Debug, Clone, PartialEq)]
enum Place {
    Whole,
    Member(&'static str),
    Key(&'static str, String),
    Item(&'static str),
}

impl MalformedHint {
    /// Its name in the file, such as `preferredKernels.matmul`; empty for hints that are no object.
    pub fn name(&self) -> String {
        match &self.place {
            Place::Whole => String::new(),
            Place::Member(member) | Place::Item(member) => (*member).to_owned(),
            Place::Key(member, key) => format!("{member}.{key}"),
        }
    }

    /// What was found, as messages call it.
    pub fn found(&self) -> String {
        match &self.value {
            Value::String(text) => quoted(text),
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "an object".to_owned(),
            other => other.to_string(),
        }
    }
}

/// The name of the hints in a manifest.
pub(super) const HINTS: &str = "runtimeOptimizations";

const BOOL: &str = "true or false";
const STRING: &str = "a string";

impl RuntimeOptimizations {
    /// Parses hints that stand alone, as they are in a manifest.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with them: whoever gives them wants them followed.
    pub fn parse(bytes: &[u8]) -> Result<RuntimeOptimizations, Problems> {
        let mut notes = Notes::new();
        let json = fields::parse(bytes, &mut notes);
        let hints = json.and_then(|json| RuntimeOptimizations::of(&json, Path::Root, &mut notes));
        let hints = hints.unwrap_or_default();
        for wrong in &hints.malformed {
            let name = wrong.name();
            let path = match name.as_str() {
                "" => Path::Root,
                name => Path::Raw(name),
            };
            notes.add(path, wrong.expected, wrong.found());
        }
        notes.or(hints)
    }

    /// The hints of a manifest.
    pub(super) fn read(fields: &mut Fields<'_>) -> Option<RuntimeOptimizations> {
        let json = fields.take(HINTS)?;
        RuntimeOptimizations::of(json, Path::Key(&fields.path, HINTS), fields.notes)
    }

    /// Reads hints. One that isn't as it should be is kept apart: no hint makes a package invalid.
    fn of(json: &Json<'_>, path: Path<'_>, notes: &mut Notes) -> Option<RuntimeOptimizations> {
        let mut hints = RuntimeOptimizations::default();
        if !matches!(json, Json::Object(_)) {
            let value = json.to_value(&mut notes.unknown_left)?;
            hints.malformed.push(MalformedHint {
                place: Place::Whole,
                value,
                expected: "an object",
            });
            return Some(hints);
        }
        let mut fields = Fields::of(json, path, notes)?;
        let f = &mut fields;
        let mut reader = Reader {
            hints: &mut hints,
            f,
        };
        reader.members(
            "preferredKernels",
            "the name of a kernel variant",
            |h, key, json| {
                let variant = fields::string(json)?;
                h.preferred_kernels.push((key.to_owned(), variant));
                Some(())
            },
        );
        reader.members(
            "workgroupOverrides",
            "three whole numbers above 0",
            |h, key, json| {
                let size = workgroup(json)?;
                h.workgroup_overrides.push((key.to_owned(), size));
                Some(())
            },
        );
        reader.features();
        reader.hints.force_f32_accumulation =
            reader.value("forceF32Accumulation", BOOL, fields::bool);
        reader.hints.attention_tier = reader.value("attentionTier", STRING, fields::string);
        reader.hints.target_device = reader.value("targetDevice", STRING, fields::string);
        hints.extra = fields.rest();
        Some(hints)
    }

    /// These hints, where `over` doesn't say otherwise: its lists of features, and its entries for the same
    /// operation or kernel, take the place of these.
    #[must_use]
    pub fn overridden_by(&self, over: &RuntimeOptimizations) -> RuntimeOptimizations {
        fn merged<T: Clone>(own: &[(String, T)], over: &[(String, T)]) -> Vec<(String, T)> {
            let is_over = |key: &String| over.iter().any(|(other, _)| other == key);
            let rest = own.iter().filter(|(key, _)| !is_over(key));
            over.iter().chain(rest).cloned().collect()
        }
        let mut extra = self.extra.clone();
        extra.extend(over.extra.clone());
        RuntimeOptimizations {
            preferred_kernels: merged(&self.preferred_kernels, &over.preferred_kernels),
            workgroup_overrides: merged(&self.workgroup_overrides, &over.workgroup_overrides),
            disable_features: match over.disable_features.is_empty() {
                true => self.disable_features.clone(),
                false => over.disable_features.clone(),
            },
            force_f32_accumulation: over.force_f32_accumulation.or(self.force_f32_accumulation),
            attention_tier: over.attention_tier.clone().or(self.attention_tier.clone()),
            target_device: over.target_device.clone().or(self.target_device.clone()),
            extra,
            malformed: [&self.malformed[..], &over.malformed].concat(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        *self == RuntimeOptimizations::default()
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
            .chain(self.malformed.iter().map(Hint::Malformed))
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
        for wrong in &self.malformed {
            let value = wrong.value.clone();
            match &wrong.place {
                Place::Whole => return value,
                Place::Member(member) => {
                    out.insert((*member).to_owned(), value);
                }
                Place::Key(member, key) => {
                    let object = out.entry(*member).or_insert_with(|| json!({}));
                    object[key.as_str()] = value;
                }
                Place::Item(member) => {
                    if let Value::Array(list) = out.entry(*member).or_insert_with(|| json!([])) {
                        list.push(value);
                    }
                }
            }
        }
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
    /// One that isn't as it should be.
    Malformed(&'a MalformedHint),
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
            Hint::Malformed(wrong) => match wrong.name().as_str() {
                "" => HINTS.to_owned(),
                name => name.to_owned(),
            },
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
            Hint::Malformed(wrong) => wrong.found(),
        }
    }
}

/// Reads hints one member after another.
struct Reader<'r, 'f> {
    hints: &'r mut RuntimeOptimizations,
    f: &'r mut Fields<'f>,
}

impl Reader<'_, '_> {
    /// A single value.
    fn value<T>(
        &mut self,
        member: &'static str,
        expected: &'static str,
        read: impl Fn(&Json<'_>) -> Option<T>,
    ) -> Option<T> {
        let json = self.f.take(member)?;
        let value = read(json);
        if value.is_none() {
            self.wrong(Place::Member(member), json, expected);
        }
        value
    }

    /// The members of an object.
    fn members(
        &mut self,
        member: &'static str,
        expected: &'static str,
        mut read: impl FnMut(&mut RuntimeOptimizations, &str, &Json<'_>) -> Option<()>,
    ) {
        match self.f.take(member) {
            None => {}
            Some(Json::Object(members)) if members.len() <= MAX_HINTS => {
                for (key, json) in members {
                    if read(self.hints, key, json).is_none() {
                        let place = Place::Key(member, key.as_ref().to_owned());
                        self.wrong(place, json, expected);
                    }
                }
            }
            Some(json) => {
                let expected = "an object of at most 256 members";
                self.wrong(Place::Member(member), json, expected);
            }
        }
    }

    fn features(&mut self) {
        const MEMBER: &str = "disableFeatures";
        match self.f.take(MEMBER) {
            None => {}
            Some(Json::Array(items)) if items.len() <= MAX_HINTS => {
                for json in items {
                    match fields::string(json) {
                        Some(feature) => self.hints.disable_features.push(feature),
                        None => self.wrong(Place::Item(MEMBER), json, "the name of a feature"),
                    }
                }
            }
            Some(json) => {
                let expected = "a list of at most 256 names";
                self.wrong(Place::Member(MEMBER), json, expected);
            }
        }
    }

    fn wrong(&mut self, place: Place, json: &Json<'_>, expected: &'static str) {
        if let Some(value) = self.f.keep(HINTS, json) {
            self.hints.malformed.push(MalformedHint {
                place,
                value,
                expected,
            });
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

    /// As in a manifest, where nothing is refused.
    fn read(json: &str) -> RuntimeOptimizations {
        let mut notes = Notes::new();
        let tree = fields::parse(json.as_bytes(), &mut notes).unwrap();
        let hints = RuntimeOptimizations::of(&tree, Path::Root, &mut notes).unwrap();
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

    #[test]
    fn malformed_hints_are_ignored_and_kept() {
        for (json, name, found) in [
            (r#""fast""#, "", "`fast`"),
            (
                r#"{"preferredKernels":["f16"]}"#,
                "preferredKernels",
                "a list",
            ),
            (
                r#"{"preferredKernels":{"matmul":16}}"#,
                "preferredKernels.matmul",
                "16",
            ),
            (
                r#"{"workgroupOverrides":{"gemv":[0,1,1]}}"#,
                "workgroupOverrides.gemv",
                "a list",
            ),
            (
                r#"{"workgroupOverrides":{"gemv":[64,1]}}"#,
                "workgroupOverrides.gemv",
                "a list",
            ),
            (
                r#"{"disableFeatures":"subgroups"}"#,
                "disableFeatures",
                "`subgroups`",
            ),
            (
                r#"{"disableFeatures":[7,"subgroups"]}"#,
                "disableFeatures",
                "7",
            ),
            (
                r#"{"forceF32Accumulation":"yes"}"#,
                "forceF32Accumulation",
                "`yes`",
            ),
            (r#"{"attentionTier":5}"#, "attentionTier", "5"),
            (r#"{"targetDevice":{}}"#, "targetDevice", "an object"),
        ] {
            let hints = read(json);
            let [wrong] = &hints.malformed[..] else {
                panic!("{json}: {hints:?}");
            };
            assert_eq!((&*wrong.name(), &*wrong.found()), (name, found), "{json}");
            let text = serde_json::to_string(&hints.to_json()).unwrap();
            assert_eq!(read(&text), hints, "{json}");
            let problems = RuntimeOptimizations::parse(json.as_bytes()).unwrap_err();
            let problem = problems.iter().next().unwrap();
            assert_eq!((&*problem.path, &*problem.found), (name, found), "{json}");
            let Some(Hint::Malformed(_)) = hints.iter().last() else {
                panic!("{json}");
            };
        }
        assert_eq!(
            RuntimeOptimizations::parse(EVERY.as_bytes()).unwrap(),
            read(EVERY)
        );
    }

    #[test]
    fn hints_take_the_place_of_others() {
        let own = read(
            r#"{"preferredKernels":{"matmul":"f16","softmax":"f32"},"disableFeatures":["dot4"],
                "attentionTier":"basic","targetDevice":"m1"}"#,
        );
        let over = read(r#"{"preferredKernels":{"matmul":"f32"},"attentionTier":"tiled","x":1}"#);
        let both = read(
            r#"{"preferredKernels":{"matmul":"f32","softmax":"f32"},"disableFeatures":["dot4"],
                "attentionTier":"tiled","targetDevice":"m1","x":1}"#,
        );
        assert_eq!(own.overridden_by(&over), both);
        assert_eq!(own.overridden_by(&RuntimeOptimizations::default()), own);
        assert!(RuntimeOptimizations::default().is_empty() && !own.is_empty());
    }
}
