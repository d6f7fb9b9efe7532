//! The form of receipts: JSON of a version, read strictly.

use std::env::consts;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
#[cfg(not(target_family = "wasm"))]
use sterna_delivery::sign::SecretKey;
use sterna_delivery::sign::{SignatureError, TrustList, Verdict};
use sterna_engine::{Activations, CacheType, ModelPlan, SamplerConfig, SessionOptions};
use sterna_format::digest::{Algorithm, DIGEST_BYTES, Digest, parse_hex};

use super::Device;
use crate::error::{Error, ErrorCode, Result, bail};
use crate::generate::StopReason;

/// The version of the form that is written and read.
const VERSION: u32 = 1;
/// The largest receipt that is read, in bytes: of about half a million tokens.
pub const MAX_RECEIPT_BYTES: usize = 32 << 20;
/// The longest name in a receipt, in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// What computed an answer, what was asked, and what came of it. Its [JSON](Receipt::to_json) is in
/// `docs/receipts.md`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    #[serde(rename = "receipt")]
    version: u32,
    /// The program that wrote it.
    program: String,
    pub(super) machine: Machine,
    pub(super) model: ModelId,
    pub(super) adapters: Vec<AdapterId>,
    pub(super) settings: Settings,
    pub(super) sampling: Sampling,
    pub(super) max_tokens: Option<u64>,
    pub(super) stop_ids: Vec<u32>,
    pub(super) prompt: Vec<u32>,
    pub(super) answer: Vec<u32>,
    pub(super) end: End,
    pub(super) logits: Logits,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
}

/// Where an answer was computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The operating system.
    pub os: String,
    /// The architecture of the processor.
    pub arch: String,
    device: DeviceKind,
    /// The instruction set, or the name of the GPU.
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DeviceKind {
    Cpu,
    Gpu,
}

impl Machine {
    pub(super) fn of(device: Device) -> Machine {
        let (device, name) = match device {
            Device::Cpu(name) => (DeviceKind::Cpu, name),
            Device::Gpu(name) => (DeviceKind::Gpu, name),
        };
        Machine {
            os: consts::OS.to_owned(),
            arch: consts::ARCH.to_owned(),
            device,
            name,
        }
    }

    /// Whether a GPU computed some of the answer, or all.
    pub fn is_gpu(&self) -> bool {
        self.device == DeviceKind::Gpu
    }
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelId {
    /// What it is called.
    pub name: String,
    /// The digest of its files ([`ModelFiles::digest`](crate::ModelFiles::digest)).
    pub blake3: Hex<DIGEST_BYTES>,
}

/// An adapter that is applied to a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterId {
    /// What it is called.
    pub name: String,
    /// The digest of its matrices ([`AdapterFiles::digest`](crate::AdapterFiles::digest)).
    pub blake3: Hex<DIGEST_BYTES>,
    /// What its updates are scaled by.
    pub scale: f32,
    /// The type that its matrices are converted to; `None` if to none.
    pub dtype: Option<String>,
}

/// Settings that change the bits of logits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The maximum number of tokens of a sequence.
    pub context: u64,
    cache: Cache,
    activations: ActivationsName,
    /// The type that the output head is converted to; `None` if to none.
    pub head: Option<String>,
    /// How I2_S weights are read, of a model that has any.
    pub i2s_layout: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Cache {
    F32,
    F16,
    #[serde(rename = "q8_0")]
    Q8_0,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ActivationsName {
    Int8,
    F32,
}

impl Settings {
    pub(super) fn of(
        plan: &ModelPlan,
        activations: Activations,
        ctx_len: usize,
        cache: CacheType,
    ) -> Settings {
        Settings {
            context: ctx_len as u64,
            cache: match cache {
                CacheType::F32 => Cache::F32,
                CacheType::F16 => Cache::F16,
                CacheType::Q8_0 => Cache::Q8_0,
            },
            activations: match activations {
                Activations::Int8 => ActivationsName::Int8,
                Activations::F32 => ActivationsName::F32,
            },
            head: plan.head_dtype().map(|dtype| dtype.name().to_owned()),
            i2s_layout: plan
                .i2s_layout()
                .and_then(|layout| Some(layout.name()?.to_owned())),
        }
    }

    /// The settings of sessions.
    pub fn session(&self) -> SessionOptions {
        SessionOptions {
            cache: Some(match self.cache {
                Cache::F32 => CacheType::F32,
                Cache::F16 => CacheType::F16,
                Cache::Q8_0 => CacheType::Q8_0,
            }),
            // More than fits into memory holds as many tokens as are needed.
            ..SessionOptions::new(usize::try_from(self.context).unwrap_or(usize::MAX))
        }
    }

    /// What weights stored as blocks of integers are multiplied with.
    pub fn activations(&self) -> Activations {
        match self.activations {
            ActivationsName::Int8 => Activations::Int8,
            ActivationsName::F32 => Activations::F32,
        }
    }
}

impl std::fmt::Display for Settings {
    /// As JSON.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&serde_json::to_string(self).expect("texts and numbers are JSON"))
    }
}

/// How tokens were sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sampling {
    temperature: f32,
    top_k: u64,
    top_p: f32,
    min_p: f32,
    repeat_penalty: f32,
    /// `None` for all tokens.
    repeat_last_n: Option<u64>,
    frequency_penalty: f32,
    presence_penalty: f32,
    /// `None` bans a token.
    logit_bias: Vec<(u32, Option<f32>)>,
    /// Text: not every reader of JSON has whole numbers of 64 bits.
    #[serde(with = "decimal")]
    seed: u64,
}

impl Sampling {
    pub(super) fn of(config: &SamplerConfig) -> Sampling {
        let bias = |&(id, bias): &(u32, f32)| (id, bias.is_finite().then_some(bias));
        Sampling {
            temperature: config.temperature,
            top_k: config.top_k as u64,
            top_p: config.top_p,
            min_p: config.min_p,
            repeat_penalty: config.repeat_penalty,
            repeat_last_n: limited(config.repeat_last_n),
            frequency_penalty: config.frequency_penalty,
            presence_penalty: config.presence_penalty,
            logit_bias: config.logit_bias.iter().map(bias).collect(),
            seed: config.seed,
        }
    }

    pub(super) fn config(&self) -> SamplerConfig {
        let whole = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let bias = |&(id, bias): &(u32, Option<f32>)| (id, bias.unwrap_or(f32::NEG_INFINITY));
        SamplerConfig {
            temperature: self.temperature,
            top_k: whole(self.top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            repeat_last_n: self.repeat_last_n.map_or(usize::MAX, whole),
            logit_bias: self.logit_bias.iter().map(bias).collect(),
            seed: self.seed,
        }
    }
}

/// `n`, unless that stands for no limit.
pub(super) fn limited(n: usize) -> Option<u64> {
    (n != usize::MAX).then_some(n as u64)
}

mod decimal {
    use super::*;

    pub(super) fn serialize<S: Serializer>(n: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(n)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit());
        let n = text.parse().ok().filter(|_| is_decimal);
        n.ok_or_else(|| D::Error::custom("expected a whole number below 2^64 as text, found other"))
    }
}

/// Why the answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum End {
    /// This token ended it, and isn't part of it.
    StopToken { id: u32 },
    /// A stop string appeared.
    StopString,
    /// There are as many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    ContextFull,
}

impl End {
    /// `None` of an answer that matches something.
    pub(super) fn of(reason: StopReason, stop_id: Option<u32>) -> Option<End> {
        match (reason, stop_id) {
            (StopReason::StopToken, Some(id)) => Some(End::StopToken { id }),
            (StopReason::StopString, _) => Some(End::StopString),
            (StopReason::MaxTokens, _) => Some(End::MaxTokens),
            (StopReason::ContextFull, _) => Some(End::ContextFull),
            (StopReason::Complete | StopReason::StopToken, _) => None,
        }
    }

    /// The token that ended it.
    pub(super) fn stop_id(self) -> Option<u32> {
        match self {
            End::StopToken { id } => Some(id),
            _ => None,
        }
    }
}

/// Digests of logits: each is one of the digest before, of a token, and of the logits that it was sampled from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Logits {
    /// The digest of what was asked, before the first token.
    pub(super) begin: Hex<DIGEST_BYTES>,
    /// The first bytes of the digest after each token, that which ended the answer included.
    pub(super) steps: Vec<Hex<STEP_BYTES>>,
    /// The last digest.
    pub(super) end: Hex<DIGEST_BYTES>,
}

/// Bytes of a digest that are kept of each step, to say where an answer differs; the last digest has all.
pub(super) const STEP_BYTES: usize = 8;

/// Bytes, in JSON as hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hex<const N: usize>(pub [u8; N]);

impl From<Digest> for Hex<DIGEST_BYTES> {
    fn from(digest: Digest) -> Self {
        Hex(*digest.as_bytes())
    }
}

impl<const N: usize> std::fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl<const N: usize> Serialize for Hex<N> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Hex<N> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(from)?;
        let bytes = parse_hex(&text).map_err(D::Error::custom)?;
        // One spelling, so that what is signed is what is read.
        match text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Err(D::Error::custom(
                "expected hexadecimal digits in lower case, found upper case",
            )),
            false => Ok(Hex(bytes)),
        }
    }
}

/// What was asked, and of what: all that a receipt's first digest is made of.
#[derive(Serialize)]
pub(super) struct Asked<'a> {
    receipt: u32,
    device: DeviceKind,
    model: &'a Hex<DIGEST_BYTES>,
    adapters: Vec<(&'a Hex<DIGEST_BYTES>, f32, &'a Option<String>)>,
    settings: &'a Settings,
    sampling: &'a Sampling,
    max_tokens: Option<u64>,
    stop_ids: &'a [u32],
    prompt: &'a [u32],
}

impl Asked<'_> {
    /// Its digest.
    pub(super) fn digest(&self) -> [u8; DIGEST_BYTES] {
        let json = serde_json::to_vec(self).expect("texts and numbers are JSON");
        *sterna_delivery::hash::digest_of(Algorithm::Blake3, &json).as_bytes()
    }
}

/// The parts of a receipt that are known before the answer.
pub(super) struct Beginning<'a> {
    pub(super) machine: &'a Machine,
    pub(super) model: &'a ModelId,
    pub(super) adapters: &'a [AdapterId],
    pub(super) settings: &'a Settings,
    pub(super) sampling: &'a Sampling,
    pub(super) max_tokens: Option<u64>,
    pub(super) stop_ids: &'a [u32],
    pub(super) prompt: &'a [u32],
}

impl<'a> Beginning<'a> {
    pub(super) fn asked(&self) -> Asked<'a> {
        // Names change nothing.
        let adapters = self.adapters.iter();
        let adapters = adapters.map(|adapter| (&adapter.blake3, adapter.scale, &adapter.dtype));
        Asked {
            receipt: VERSION,
            device: self.machine.device,
            model: &self.model.blake3,
            adapters: adapters.collect(),
            settings: self.settings,
            sampling: self.sampling,
            max_tokens: self.max_tokens,
            stop_ids: self.stop_ids,
            prompt: self.prompt,
        }
    }

    /// The receipt of an answer to it.
    pub(super) fn receipt(&self, answer: &[u32], end: End, logits: Logits) -> Receipt {
        Receipt {
            version: VERSION,
            program: concat!("sterna ", env!("CARGO_PKG_VERSION")).to_owned(),
            machine: self.machine.clone(),
            model: self.model.clone(),
            adapters: self.adapters.to_vec(),
            settings: self.settings.clone(),
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            stop_ids: self.stop_ids.to_vec(),
            prompt: self.prompt.to_vec(),
            answer: answer.to_vec(),
            end,
            logits,
            signature: None,
        }
    }
}

impl Receipt {
    /// Reads a receipt.
    ///
    /// Errors: it is larger than [`MAX_RECEIPT_BYTES`], of another version, or no receipt; the message says where, what
    /// was expected there, and what was found.
    pub fn parse(json: &[u8]) -> Result<Receipt> {
        /// What every version has.
        #[derive(Deserialize)]
        struct Versioned {
            receipt: u64,
        }
        if json.len() > MAX_RECEIPT_BYTES {
            bail!(
                InvalidFile,
                "receipt: expected at most {MAX_RECEIPT_BYTES} bytes, found {}",
                json.len()
            );
        }
        let invalid = |error: serde_json::Error| {
            Error::new(ErrorCode::InvalidFile, format!("receipt: {error}"))
        };
        let versioned: Versioned = serde_json::from_slice(json).map_err(invalid)?;
        if versioned.receipt != u64::from(VERSION) {
            bail!(
                Unsupported,
                "receipt: expected version {VERSION}, found {}",
                versioned.receipt
            );
        }
        let receipt: Receipt = serde_json::from_slice(json).map_err(invalid)?;
        receipt.expect_whole()?;
        Ok(receipt)
    }

    /// Refuses what no answer is like.
    fn expect_whole(&self) -> Result<()> {
        let names = [&self.program, &self.machine.os, &self.machine.arch];
        let names = names
            .into_iter()
            .chain([&self.machine.name, &self.model.name]);
        let names = names.chain(self.adapters.iter().map(|adapter| &adapter.name));
        for name in names {
            if name.len() > MAX_NAME_BYTES {
                bail!(
                    InvalidFile,
                    "receipt: expected names of at most {MAX_NAME_BYTES} bytes, found one of {}",
                    name.len()
                );
            }
        }
        if self.prompt.is_empty() {
            bail!(InvalidFile, "receipt: prompt: expected tokens, found none");
        }
        // The newest token needn't be in the context.
        let n_tokens = (self.prompt.len() + self.answer.len()) as u64;
        if n_tokens > self.settings.context.saturating_add(1) {
            bail!(
                InvalidFile,
                "receipt: expected at most {} tokens, one more than its context, found {n_tokens}",
                self.settings.context.saturating_add(1)
            );
        }
        let n_steps = self.answer.len() + usize::from(self.end.stop_id().is_some());
        if self.logits.steps.len() != n_steps {
            bail!(
                InvalidFile,
                "receipt: logits.steps: expected {n_steps}, one for each token, found {}",
                self.logits.steps.len()
            );
        }
        if self.machine.is_gpu() && self.sampling.temperature != 0.0 {
            bail!(
                InvalidFile,
                "receipt: of an answer of a GPU: expected temperature 0, found {}",
                self.sampling.temperature
            );
        }
        Ok(())
    }

    /// The receipt as JSON, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("texts and numbers are JSON")
    }

    /// Signs it, in place of a signature that it has.
    ///
    /// Errors: the key can't sign.
    #[cfg(not(target_family = "wasm"))]
    pub fn sign(&mut self, key: &SecretKey) -> Result<(), SignatureError> {
        let signature = key.sign(self.signed().as_bytes(), "sterna receipt")?;
        self.signature = Some(signature);
        Ok(())
    }

    /// Who of `trust` has signed it.
    ///
    /// Errors: a signature that isn't one of what the receipt says, or by a key that isn't on the list.
    pub fn signer(&self, trust: &TrustList) -> Result<Verdict, SignatureError> {
        trust.check(self.signed().as_bytes(), self.signature.as_deref())
    }

    /// What a signature is of: the JSON without one.
    fn signed(&self) -> String {
        let unsigned = Receipt {
            signature: None,
            ..self.clone()
        };
        unsigned.to_json()
    }

    /// The program that wrote it, with its version.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// Where the answer was computed.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The model.
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// The adapters, in the order in which they are applied.
    pub fn adapters(&self) -> &[AdapterId] {
        &self.adapters
    }

    /// Settings that change the bits of logits.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The tokens of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// The tokens of the answer.
    pub fn answer(&self) -> &[u32] {
        &self.answer
    }

    pub(super) fn beginning(&self) -> Beginning<'_> {
        Beginning {
            machine: &self.machine,
            model: &self.model,
            adapters: &self.adapters,
            settings: &self.settings,
            sampling: &self.sampling,
            max_tokens: self.max_tokens,
            stop_ids: &self.stop_ids,
            prompt: &self.prompt,
        }
    }
}
