//! Options that JavaScript passes, and what it is told: the objects of `engine.d.ts`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sterna::receipt::Checked;
use sterna::sampling::SamplingOptions;

/// How to load a model.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModelOptions {
    pub(crate) name: String,
    pub(crate) entry: Option<String>,
    #[serde(default)]
    pub(crate) backend: BackendChoice,
    #[serde(default = "one")]
    pub(crate) threads: usize,
    #[serde(default)]
    pub(crate) device: DevicePreference,
    /// Milliseconds after which a GPU that doesn't answer is given up.
    pub(crate) gpu_timeout: Option<f64>,
    /// What the first session begins with.
    pub(crate) prefill: Option<Prefill>,
    /// Tokens of context of that session.
    pub(crate) context_length: Option<usize>,
}

/// The beginning of a prompt, computed while weights arrive.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prefill {
    Text(String),
    Messages(Vec<Value>),
}

fn one() -> usize {
    1
}

/// Which GPU, where there are two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DevicePreference {
    #[default]
    HighPerformance,
    LowPower,
}

/// Where a model is to be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BackendChoice {
    #[default]
    Auto,
    Cpu,
    Gpu,
}

/// Why a model isn't computed on the GPU.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Reason {
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

/// What is known of a loaded model.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModelInfo {
    pub(crate) architecture: String,
    pub(crate) parameters: u64,
    pub(crate) max_context: usize,
    pub(crate) vocabulary: usize,
    pub(crate) has_template: bool,
    pub(crate) backend: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backend_reason: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) adapter: Option<String>,
    pub(crate) weight_bytes: u64,
    pub(crate) cache_bytes_per_token: u64,
    pub(crate) warnings: Vec<String>,
}

/// How to answer.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct GenerateOptions {
    pub(crate) max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    pub(crate) logprobs: Option<usize>,
    logit_bias: BTreeMap<u32, f32>,
}

impl GenerateOptions {
    pub(crate) fn sampling(&self) -> SamplingOptions {
        SamplingOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: None,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self
                .logit_bias
                .iter()
                .map(|(&id, &bias)| (id, bias))
                .collect(),
            seed: self.seed,
        }
    }
}

/// How to render messages.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PromptOptions {
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) enable_thinking: Option<bool>,
}

/// An adapter of a session.
#[derive(Debug, Deserialize)]
pub(crate) struct AdapterUse {
    pub(crate) name: String,
    pub(crate) scale: Option<f32>,
}

/// An event of an answer.
#[derive(Debug, Serialize)]
pub(crate) struct SessionEvent {
    pub(crate) session: u32,
    #[serde(flatten)]
    pub(crate) event: EventKind,
}

#[derive(Debug, Serialize)]
#[serde(
    tag = "type",
    rename_all = "snake_case",
    rename_all_fields = "camelCase"
)]
pub(crate) enum EventKind {
    Token {
        id: u32,
        text: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        top: Option<Vec<TopToken>>,
    },
    End {
        text: String,
        reason: &'static str,
        prompt_tokens: usize,
        cached_tokens: usize,
        completion_tokens: usize,
    },
    Failed {
        code: &'static str,
        message: String,
    },
    DeviceLost {
        message: String,
    },
}

/// A token that could have come.
#[derive(Debug, Serialize)]
pub(crate) struct TopToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) logprob: f32,
}

/// What came of checking a receipt.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReceiptCheck {
    ok: bool,
    /// Of an answer of a GPU, how many tokens aren't the best, but within the margin.
    #[serde(skip_serializing_if = "Option::is_none")]
    within_margin: Option<usize>,
    /// What differs first.
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<String>,
    /// The place in the answer of the token that does.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

impl ReceiptCheck {
    pub(crate) fn of(checked: Checked) -> ReceiptCheck {
        let (within_margin, difference) = match checked {
            Checked::Same => (None, None),
            Checked::WithinMargin { n_others } => (Some(n_others), None),
            Checked::Differs(difference) => (None, Some(difference)),
        };
        ReceiptCheck {
            ok: difference.is_none(),
            within_margin,
            index: difference
                .as_ref()
                .and_then(|difference| difference.index()),
            difference: difference.map(|difference| difference.to_string()),
        }
    }
}

/// A group that was replaced.
#[derive(Debug, Serialize)]
pub(crate) struct Swapped {
    pub(crate) group: String,
    pub(crate) from: Revision,
    pub(crate) to: Revision,
}

/// A revision of a group.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Revision {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hash: Option<String>,
}

/// How to fetch.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DownloadOptions {
    pub(crate) parallel: Option<usize>,
    pub(crate) bytes_per_second: Option<u64>,
    pub(crate) file: Option<String>,
    pub(crate) seed: u64,
    /// Keys that packages may be signed with.
    pub(crate) trust: Vec<Trusted>,
}

/// A key that packages may be signed with.
#[derive(Debug, Deserialize)]
pub(crate) struct Trusted {
    pub(crate) name: String,
    pub(crate) key: String,
}

/// A file of a model.
#[derive(Debug, Serialize)]
pub(crate) struct ListedFile<'a> {
    pub(crate) name: &'a str,
    pub(crate) size: u64,
    pub(crate) here: bool,
}

/// The progress of a download.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DownloadProgress {
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) sources: Vec<SourceBytes>,
}

/// What a source sent.
#[derive(Debug, Serialize)]
pub(crate) struct SourceBytes {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// How to convert a model to a package.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConversionOptions {
    /// What messages call the model, and the package is called after.
    pub(crate) name: String,
    pub(crate) entry: Option<String>,
    /// Name of the package.
    pub(crate) id: Option<String>,
}

/// A package that was made.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Converted {
    pub(crate) id: String,
    pub(crate) files: Vec<ConvertedFile>,
    pub(crate) warnings: Vec<String>,
}

/// A file of a package that was made.
#[derive(Debug, Serialize)]
pub(crate) struct ConvertedFile {
    pub(crate) name: String,
    pub(crate) size: u64,
}
