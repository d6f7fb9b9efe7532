//! Model configuration from GGUF metadata.

use std::sync::Arc;

use sterna_format::gguf::{GgufError, Metadata, Value};
use sterna_format::hadamard::{Hadamard, HadamardError, ReadHadamardError};
use sterna_kernels::activation::Activation;
use sterna_kernels::delta::DeltaShape;
use sterna_kernels::experts::{ExpertGroups, Gating, Routing};
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::rwkv::{Generation, RwkvShape};
use sterna_kernels::ssm::SsmShape;

use super::hf::FULL_ATTENTION_INTERVAL;
use super::{
    ExpertsConfig, HEADLESS, LatentConfig, LayerConfig, MAX_COUNT, MAX_LAYERS, MixerKind,
    ModelConfig, Multipliers, RWKV_CTX, RwkvConfig, RwkvRanks, WideHeads, yarn_magnitude,
};
use crate::error::PlanError;
use crate::family::{Family, SsmFamily, WindowPattern};
use crate::rope::{RopeConfig, RopeScaling};

/// Epsilon of norms that belong to a single projection; no key specifies it.
pub(crate) const INPUT_NORM_EPS: f32 = 1e-6;

/// Epsilon of the norm of what each head of time mixing gives; no key specifies it.
const RWKV_HEAD_EPS: f32 = 64e-5;

/// What `expert_gating_func` is where experts are chosen by sigmoids.
const SIGMOID: usize = 2;

/// How much YaRN sharpens attention.
pub(super) const YARN_LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// The scaling type of models with divisors for short and long contexts.
pub(super) const LONG_ROPE: &str = "longrope";

/// Rope scaling and windows are read here; divisors of rotary frequencies, which GGUF stores in tensors, are
/// filled in when those are loaded.
impl ModelConfig {
    /// The configuration in `metadata`, for a model with `n_vocab` embeddings.
    pub(crate) fn from_gguf(metadata: &Metadata, n_vocab: usize) -> Result<Self, PlanError> {
        let (architecture, family) = family(metadata)?;
        let keys = Keys {
            metadata,
            architecture,
        };
        let n_blocks = keys.required("block_count")?;
        let n_layers = n_blocks.saturating_sub(keys.n_predicting()?);
        if n_blocks > MAX_LAYERS {
            return Err(PlanError::config(
                "layers",
                format!("at most {MAX_LAYERS}"),
                n_blocks,
            ));
        }
        let model_dim = keys.required("embedding_length")?;
        let is_granite = family.ssm == Some(SsmFamily::Granite);
        let is_alone = family.ssm.is_some_and(SsmFamily::is_alone);
        let rwkv = keys.rwkv(family, model_dim)?;
        let is_headless = family.is_headless();
        let (n_heads, head_dim) = match is_headless {
            true => (HEADLESS.0, HEADLESS.2),
            false => {
                let n_heads = keys.required("attention.head_count")?;
                let each = model_dim.checked_div(n_heads).unwrap_or(0);
                (n_heads, keys.count("attention.key_length")?.unwrap_or(each))
            }
        };
        // The key is that of layers without a window.
        let full_dim = head_dim;
        let head_dim = match keys.count("attention.key_length_swa")? {
            Some(dim) if family.gemma4 => dim,
            _ => head_dim,
        };
        let latent = keys.latent(family, head_dim)?;
        let value_dim = match family.gemma4 {
            true => keys.count("attention.value_length_swa")?,
            false => keys.count("attention.value_length")?,
        };
        let head_dim = latent.map_or(head_dim, |latent| latent.head_dim());
        if let Some(value_dim) = value_dim.filter(|_| latent.is_none())
            && value_dim != head_dim
        {
            return Err(PlanError::config(
                "attention.value_length",
                format!("the key length, {head_dim}"),
                value_dim,
            ));
        }
        let max_ctx = match rwkv {
            Some(_) => RWKV_CTX,
            None => keys.required("context_length")?,
        };
        let mut kv_heads = match is_headless || latent.is_some() {
            true => vec![1; n_blocks],
            false => keys.kv_heads(family, n_blocks, n_heads)?,
        };
        kv_heads.truncate(n_layers);
        let wide_heads = keys.wide_heads(family, &mut kv_heads, full_dim)?;
        let (layers, ropes) = keys.layers(family, &kv_heads, [full_dim, head_dim], max_ctx)?;
        let (attn_cap, logit_cap) = family.gguf_softcaps.unzip();
        let experts = keys.experts(family)?;
        let (ssm, mamba) = (keys.ssm(family)?, keys.mamba(family)?);
        let (ffn_dim, wide_networks) = keys.networks(family)?;
        let ffn_dim = match (ffn_dim, &experts) {
            _ if is_alone => keys.required("ssm.inner_size")?,
            (Some(dim), _) => dim,
            (None, Some(experts)) => experts.ffn_dim,
            (None, None) => keys.required("feed_forward_length")?,
        };
        ModelConfig {
            family,
            n_layers,
            model_dim,
            n_heads,
            n_kv_heads: kv_heads.iter().copied().max().unwrap_or(n_heads),
            head_dim,
            wide_heads,
            n_sharing: match keys.count("attention.shared_kv_layers")? {
                Some(n) if family.gemma4 => n,
                _ => 0,
            },
            layer_input_dim: (keys.count("embedding_length_per_layer_input")?)
                .filter(|&dim| family.gemma4 && dim > 0),
            wide_networks,
            ffn_dim,
            n_vocab,
            max_ctx,
            norm_eps: match family.has_layer_norms() {
                true => keys.float("attention.layer_norm_epsilon")?,
                false => keys.float("attention.layer_norm_rms_epsilon")?,
            }
            .unwrap_or(1e-5),
            input_norm_eps: INPUT_NORM_EPS,
            embed_scale: match keys.float("embedding_scale")?.filter(|_| is_granite) {
                Some(scale) => scale,
                None => family.embed_scale(model_dim),
            },
            residual_scale: keys
                .float("residual_scale")?
                .filter(|_| is_granite)
                .unwrap_or(1.0),
            // A divisor there.
            logit_scale: match keys.float("logit_scale")?.filter(|_| is_granite) {
                Some(divisor) => (1.0 / f64::from(divisor)) as f32,
                None => 1.0,
            },
            ssm,
            mamba,
            rwkv,
            multipliers: Multipliers::default(),
            latent,
            activation: keys.activation()?.unwrap_or(family.activation),
            attn_scale: match keys.float("attention.scale")? {
                Some(scale) if scale != 0.0 => scale,
                _ => match &latent {
                    Some(latent) => keys.latent_scale(latent)?,
                    None => family.attn_scale(n_layers, model_dim, n_heads, head_dim),
                },
            },
            attn_softcap: keys.float("attn_logit_softcapping")?.or(attn_cap),
            logit_softcap: keys.float("final_logit_softcapping")?.or(logit_cap),
            experts,
            conv_taps: match keys.count("shortconv.l_cache")? {
                None => keys.count("ssm.conv_kernel")?,
                taps => taps,
            },
            delta: keys.delta(family)?,
            hadamard: hadamard(metadata)?.map(Arc::new),
            layers,
            ropes,
        }
        .validated()
    }
}

/// Fails if `metadata` says that there are more tokens than `n_vocab`, the rows of the embedding table; fewer are
/// odd.
pub(crate) fn check_vocab(
    metadata: &Metadata,
    n_vocab: usize,
) -> Result<Option<String>, PlanError> {
    let keys = Keys::of(metadata)?;
    let said = keys.count("vocab_size")?;
    super::check_vocab(&keys.key("vocab_size"), said, n_vocab)
}

/// Which matrices are stored rotated.
fn hadamard(metadata: &Metadata) -> Result<Option<Hadamard>, PlanError> {
    Hadamard::of_gguf(metadata).map_err(|error| match error {
        ReadHadamardError::Gguf(error) => error.into(),
        ReadHadamardError::Unknown(HadamardError {
            key,
            expected,
            found,
        }) => PlanError::config(key, expected, found),
    })
}

/// The blocks in the file: those of the model, and what may follow them.
pub(crate) fn n_blocks(metadata: &Metadata) -> Result<usize, PlanError> {
    Keys::of(metadata)?.required("block_count")
}

/// The architecture of a model, and its family.
pub(crate) fn family(metadata: &Metadata) -> Result<(&str, &'static Family), PlanError> {
    let architecture = metadata
        .architecture()?
        .ok_or_else(|| PlanError::config("general.architecture", "a string", "nothing"))?;
    let family = Family::of_gguf(architecture).ok_or_else(|| PlanError::UnknownFamily {
        found: architecture.to_owned(),
        expected: Family::gguf_architectures(),
    })?;
    let keys = Keys {
        metadata,
        architecture,
    };
    // Mixtral's models are Llama's with experts there.
    let family = match (keys.count("expert_count")?, family.name) {
        (Some(1..), "llama") => Family::mixtral(),
        (_, "deepseek-v2") if keys.count("expert_gating_func")? == Some(SIGMOID) => {
            Family::deepseek_v3()
        }
        _ => family,
    };
    Ok((architecture, family))
}

/// Metadata keys of one architecture, without its prefix.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn of(metadata: &'a Metadata) -> Result<Keys<'a>, PlanError> {
        let (architecture, _) = family(metadata)?;
        Ok(Keys {
            metadata,
            architecture,
        })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn count(&self, name: &str) -> Result<Option<usize>, PlanError> {
        let key = self.key(name);
        match self.metadata.get_u64(&key)? {
            Some(value) if value > MAX_COUNT => Err(PlanError::config(
                key,
                format!("at most {MAX_COUNT}"),
                value,
            )),
            value => Ok(value.map(|v| v as usize)),
        }
    }

    fn required(&self, name: &str) -> Result<usize, PlanError> {
        self.count(name)?
            .ok_or_else(|| PlanError::config(self.key(name), "a count", "nothing"))
    }

    fn float(&self, name: &str) -> Result<Option<f32>, GgufError> {
        self.metadata.get_f32(&self.key(name))
    }

    fn string(&self, name: &str) -> Result<Option<&str>, GgufError> {
        self.metadata.get_str(&self.key(name))
    }

    fn activation(&self) -> Result<Option<Activation>, PlanError> {
        let names = ["hidden_activation", "hidden_act"];
        for name in names {
            if let Some(found) = self.string(name)? {
                return super::activation(found)
                    .map(Some)
                    .ok_or_else(|| super::unknown_activation(self.key(name), found));
            }
        }
        Ok(None)
    }

    /// Key and value heads of each layer: 0 of those with a convolution, as many as heads if the file doesn't say.
    fn kv_heads(
        &self,
        family: &Family,
        n_layers: usize,
        n_heads: usize,
    ) -> Result<Vec<usize>, PlanError> {
        let key = self.key("attention.head_count_kv");
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            let n = self.count("attention.head_count_kv")?.unwrap_or(n_heads);
            return Ok(vec![n; n_layers]);
        }
        let heads: Vec<usize> = match self.metadata.get_i32s(&key) {
            Ok(heads) => heads
                .unwrap_or_default()
                .iter()
                .map(|&n| n.max(0) as usize)
                .collect(),
            Err(_) => {
                let heads = self.metadata.get_u32s(&key)?.unwrap_or_default();
                heads.iter().map(|&n| n as usize).collect()
            }
        };
        let attends = heads.iter().copied().filter(|&n| n > 0);
        let alike = family.gemma4 || attends.clone().min() == attends.max();
        if heads.len() != n_layers || !alike {
            let expected = format!("{n_layers} times 0 or the same number");
            return Err(PlanError::config(key, expected, format!("{heads:?}")));
        }
        Ok(heads)
    }

    /// The heads of layers without a window; those of all become those of layers with one.
    fn wide_heads(
        &self,
        family: &Family,
        kv_heads: &mut [usize],
        head_dim: usize,
    ) -> Result<Option<WideHeads>, PlanError> {
        if !family.gemma4 {
            return Ok(None);
        }
        let windowed = self.windowed_layers(family, kv_heads.len())?;
        let of = |kv_heads: &[usize], with: bool| {
            let layers = kv_heads.iter().zip(&windowed);
            let own: Vec<usize> = layers
                .filter(|(_, windowed)| **windowed == with)
                .map(|(heads, _)| *heads)
                .collect();
            let alike = own.windows(2).all(|pair| pair[0] == pair[1]);
            (own.first().copied(), alike)
        };
        let ((full, full_alike), (others, others_alike)) =
            (of(kv_heads, false), of(kv_heads, true));
        let Some(most) = others.or(full).filter(|_| full_alike && others_alike) else {
            return Err(PlanError::config(
                self.key("attention.head_count_kv"),
                "one number for layers with a window, and one for others",
                format!("{kv_heads:?}"),
            ));
        };
        kv_heads.fill(most);
        Ok(Some(WideHeads {
            n_kv_heads: full.unwrap_or(most),
            head_dim,
            values_are_keys: false,
        }))
    }

    /// The width of networks, and whether the last ones are twice as wide, where the key is a list.
    fn networks(&self, family: &Family) -> Result<(Option<usize>, bool), PlanError> {
        const KEY: &str = "feed_forward_length";
        let key = self.key(KEY);
        if !family.gemma4 || !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return Ok((self.count(KEY)?, false));
        }
        let widths = match self.metadata.get_u32s(&key) {
            Ok(widths) => widths.unwrap_or_default(),
            Err(_) => {
                let widths = self.metadata.get_i32s(&key)?.unwrap_or_default();
                widths.iter().map(|&n| n.max(0) as u32).collect()
            }
        };
        let n_sharing = self.count("attention.shared_kv_layers")?.unwrap_or(0);
        let first = widths.first().copied().unwrap_or(0);
        let n_plain = widths.len().saturating_sub(n_sharing);
        let (plain, last) = widths.split_at(n_plain);
        let is_wide = !last.is_empty() && last.iter().all(|&n| Some(n) == first.checked_mul(2));
        let fits =
            plain.iter().all(|&n| n == first) && (is_wide || last.iter().all(|&n| n == first));
        if first as u64 > MAX_COUNT || !fits {
            let expected = "one number, or twice as much in layers that share keys and values";
            return Err(PlanError::config(key, expected, format!("{widths:?}")));
        }
        Ok((Some(first as usize), is_wide))
    }

    /// The mixture of experts.
    fn experts(&self, family: &Family) -> Result<Option<ExpertsConfig>, PlanError> {
        // A Jamba of one expert has networks.
        let is_none = |n: usize| n == 0 || n == 1 && family.ssm == Some(SsmFamily::Jamba);
        let n_experts = self.count("expert_count")?.filter(|&n| !is_none(n));
        let (Some(n_experts), Some(mixture)) = (n_experts, family.mixture) else {
            return match n_experts {
                None => Ok(None),
                Some(n) => Err(PlanError::config(
                    self.key("expert_count"),
                    format!("a {} model without experts", family.name),
                    n,
                )),
            };
        };
        let renormalised = self.metadata.get_bool(&self.key("expert_weights_norm"))?;
        let ffn_dim = match self.count("expert_feed_forward_length")? {
            Some(dim) => dim,
            None => self.required("feed_forward_length")?,
        };
        Ok(Some(ExpertsConfig {
            routing: Routing {
                n_experts,
                n_used: self.required("expert_used_count")?,
                gating: mixture.gating,
                renormalised: renormalised.unwrap_or(mixture.gguf_renormalised),
                groups: self.expert_groups(family, mixture.gating)?,
                scale: match self.float("expert_weights_scale")? {
                    Some(scale) if family.latent && scale != 0.0 => scale,
                    _ => 1.0,
                },
            },
            ffn_dim,
            shared_ffn_dim: match self.count("expert_shared_feed_forward_length")? {
                None => (self.count("expert_shared_count")?).map(|n| n.saturating_mul(ffn_dim)),
                dim => dim,
            }
            .filter(|&dim| dim > 0),
        }))
    }

    /// Groups of experts.
    fn expert_groups(
        &self,
        family: &Family,
        gating: Gating,
    ) -> Result<Option<ExpertGroups>, PlanError> {
        if !family.latent {
            return Ok(None);
        }
        let expected = if gating == Gating::Sigmoid {
            SIGMOID
        } else {
            1
        };
        if let Some(found) = self.count("expert_gating_func")?.filter(|n| *n != expected) {
            let key = self.key("expert_gating_func");
            return Err(PlanError::config(key, "1 (softmax) or 2 (sigmoid)", found));
        }
        let n_groups = self.count("expert_group_count")?.filter(|&n| n > 1);
        let n_used = self.count("expert_group_used_count")?;
        Ok((n_groups.zip(n_used)).map(|(n_groups, n_used)| ExpertGroups { n_groups, n_used }))
    }

    /// The parts of latent attention, whose heads the file says to have `key_dim` elements.
    fn latent(&self, family: &Family, key_dim: usize) -> Result<Option<LatentConfig>, PlanError> {
        if !family.latent {
            return Ok(None);
        }
        let rope_dim = self.required("rope.dimension_count")?;
        // Older files have only the heads that keys and values are expanded to.
        let query_dim = self.count("attention.key_length_mla")?.unwrap_or(key_dim);
        let value_dim = match self.count("attention.value_length_mla")? {
            Some(dim) => dim,
            None => self.required("attention.value_length")?,
        };
        Ok(Some(LatentConfig {
            q_rank: self
                .count("attention.q_lora_rank")?
                .filter(|&rank| rank > 0),
            kv_rank: self.required("attention.kv_lora_rank")?,
            nope_dim: query_dim.saturating_sub(rope_dim),
            rope_dim,
            value_dim,
        }))
    }

    /// The scale of its query-key products, which depends on how far the context is stretched.
    fn latent_scale(&self, latent: &LatentConfig) -> Result<f32, PlanError> {
        let stretch = match self.float(YARN_LOG_MULTIPLIER)? {
            // A tenth of what configurations call `mscale_all_dim`.
            Some(strength) => {
                let factor = self.float("rope.scaling.factor")?.unwrap_or(1.0);
                yarn_magnitude(f64::from(factor), 10.0 * f64::from(strength))
            }
            None => 1.0,
        };
        Ok(latent.attn_scale(stretch))
    }

    /// The heads of gated delta nets.
    fn delta(&self, family: &Family) -> Result<Option<DeltaShape>, PlanError> {
        let Some(order) = family.delta else {
            return Ok(None);
        };
        let n_value_heads = self.required("ssm.time_step_rank")?;
        let inner = self.required("ssm.inner_size")?;
        if inner.checked_rem(n_value_heads) != Some(0) {
            return Err(PlanError::config(
                self.key("ssm.inner_size"),
                format!("a multiple of {n_value_heads} heads"),
                inner,
            ));
        }
        Ok(Some(DeltaShape {
            n_key_heads: self.required("ssm.group_count")?,
            n_value_heads,
            key_dim: self.required("ssm.state_size")?,
            value_dim: inner / n_value_heads,
            order,
        }))
    }

    /// The heads of state spaces.
    fn ssm(&self, family: &Family) -> Result<Option<SsmShape>, PlanError> {
        if family.ssm.is_none_or(SsmFamily::is_first) {
            return Ok(None);
        }
        let (inner, n_heads) = (
            self.required("ssm.inner_size")?,
            self.required("ssm.time_step_rank")?,
        );
        if inner.checked_rem(n_heads) != Some(0) {
            return Err(PlanError::config(
                self.key("ssm.inner_size"),
                format!("a multiple of {n_heads} heads"),
                inner,
            ));
        }
        Ok(Some(SsmShape {
            n_heads,
            head_dim: inner / n_heads,
            state_dim: self.required("ssm.state_size")?,
            n_groups: self.required("ssm.group_count")?,
        }))
    }

    /// The channels of state spaces of the first Mamba.
    fn mamba(&self, family: &Family) -> Result<Option<MambaShape>, PlanError> {
        if !family.ssm.is_some_and(SsmFamily::is_first) {
            return Ok(None);
        }
        let key = self.key("ssm.dt_b_c_rms");
        if self.metadata.get_bool(&key)? == Some(true) {
            return Err(PlanError::config(key, "false", "true"));
        }
        Ok(Some(MambaShape {
            inner: self.required("ssm.inner_size")?,
            state_dim: self.required("ssm.state_size")?,
            dt_rank: self.required("ssm.time_step_rank")?,
        }))
    }

    /// Heads and ranks of time mixing.
    fn rwkv(&self, family: &Family, model_dim: usize) -> Result<Option<RwkvConfig>, PlanError> {
        let Some(generation) = family.rwkv else {
            return Ok(None);
        };
        let head_dim = self.required("wkv.head_size")?;
        let rank = |key: &str| Ok::<_, PlanError>(self.count(key)?.unwrap_or(0));
        Ok(Some(RwkvConfig {
            shape: RwkvShape {
                generation,
                n_heads: model_dim.checked_div(head_dim).unwrap_or(0),
                head_dim,
            },
            head_eps: RWKV_HEAD_EPS,
            ranks: match generation {
                Generation::V7 => RwkvRanks {
                    decay: rank("attention.decay_lora_rank")?,
                    rate: rank("attention.iclr_lora_rank")?,
                    residual: rank("attention.value_residual_mix_lora_rank")?,
                    gate: rank("attention.gate_lora_rank")?,
                    shares: 0,
                },
                _ => RwkvRanks {
                    decay: rank("time_decay_extra_dim")?,
                    shares: rank("time_mix_extra_dim")?,
                    ..RwkvRanks::default()
                },
            },
            halved_every: match generation {
                Generation::V6 => rank("rescale_every_n_layers")?,
                _ => 0,
            },
        }))
    }

    /// Blocks that predict several tokens at once, after those of the model.
    fn n_predicting(&self) -> Result<usize, PlanError> {
        Ok(self.count("nextn_predict_layers")?.unwrap_or(0))
    }

    /// What mixes positions in each layer.
    fn mixers(&self, family: &Family, kv_heads: &[usize]) -> Result<Vec<MixerKind>, PlanError> {
        let n_layers = kv_heads.len();
        let of = |has_state: bool, kind| match has_state {
            true => kind,
            false => MixerKind::Attention,
        };
        if family.delta.is_none() {
            let of_ssm = family.ssm.map(SsmFamily::mixer);
            if family.latent {
                return Ok(vec![MixerKind::LatentAttention; n_layers]);
            }
            if family.rwkv.is_some() {
                return Ok(vec![MixerKind::TimeMix; n_layers]);
            }
            let kind = of_ssm.unwrap_or(MixerKind::Convolution);
            let everywhere =
                kind == MixerKind::AttentionAndSsm || family.ssm.is_some_and(SsmFamily::is_alone);
            let mixer = |&n| of(everywhere || n == 0, kind);
            return Ok(kv_heads.iter().map(mixer).collect());
        }
        let key = self.key("attention.recurrent_layers");
        if let Some(listed) = self.metadata.get_bools(&key)? {
            if listed.len() < n_layers {
                let expected = format!("{n_layers} entries");
                return Err(PlanError::config(key, expected, listed.len()));
            }
            let listed = listed[..n_layers].iter();
            return Ok(listed.map(|&has| of(has, MixerKind::DeltaNet)).collect());
        }
        let interval = self.count("full_attention_interval")?;
        let interval = interval.unwrap_or(FULL_ATTENTION_INTERVAL);
        let mixer = |i: usize| {
            let attends = interval > 0 && i.is_multiple_of(interval);
            of(!attends, MixerKind::DeltaNet)
        };
        Ok((1..=n_layers).map(mixer).collect())
    }

    /// Each layer's window and rotary embedding.
    fn layers(
        &self,
        family: &Family,
        kv_heads: &[usize],
        [full_dim, head_dim]: [usize; 2],
        max_ctx: usize,
    ) -> Result<(Vec<LayerConfig>, Vec<RopeConfig>), PlanError> {
        let rope = RopeConfig {
            dim: self.count("rope.dimension_count")?.unwrap_or(full_dim),
            base: self.float("rope.freq_base")?.map_or(10_000.0, f64::from),
            layout: family.gguf_rope,
            scaling: self.rope_scaling(family, max_ctx)?,
        };
        let local_base = match (family.local_rope_base, self.float("rope.freq_base_swa")?) {
            (Some(_), Some(base)) => Some(f64::from(base)),
            (default, _) => default,
        };
        let mut ropes = vec![rope];
        if let Some(base) = local_base {
            let dim = match self.count("rope.dimension_count_swa")? {
                Some(dim) if family.gemma4 => dim,
                _ if family.gemma4 => head_dim,
                _ => ropes[0].dim,
            };
            ropes.push(RopeConfig {
                dim,
                base,
                scaling: RopeScaling::None,
                ..ropes[0].clone()
            });
        }
        let default = family.gguf_window;
        // Heads that aren't rotated get a rotation with frequency 0, which puts their elements in the order
        // of the other layers'.
        let no_rope = family.no_rope_interval;
        let is_granite = family.ssm == Some(SsmFamily::Granite);
        let has_still = no_rope.is_some() || is_granite;
        let still = (has_still && family.gguf_rope == RopeLayout::Pairs).then(|| {
            ropes.push(RopeConfig {
                scaling: RopeScaling::Linear { factor: f64::MAX },
                ..ropes[0].clone()
            });
            ropes.len() - 1
        });
        let window = self
            .count("attention.sliding_window")?
            .or(default)
            .filter(|&w| w > 0);
        let n_layers = kv_heads.len();
        let windowed = self.windowed_layers(family, n_layers)?;
        let mixers = self.mixers(family, kv_heads)?;
        let n_dense = self.count("leading_dense_block_count")?.unwrap_or(0);
        let has_experts = self.experts(family)?.is_some();
        // Granite 4 has no positions.
        let finetuned = self
            .metadata
            .get_bool(&self.key("rope.scaling.finetuned"))?;
        let unrotated = match family.ssm {
            None => family.rwkv.is_some() || family.encoder,
            Some(SsmFamily::FalconH1) => false,
            Some(SsmFamily::Granite) => finetuned == Some(false),
            Some(SsmFamily::Mamba | SsmFamily::Mamba2 | SsmFamily::Jamba) => true,
        };
        let layers = (0..n_layers)
            .map(|i| {
                let windowed = windowed[i];
                let rotated = !unrotated && no_rope.is_none_or(|n| !(i + 1).is_multiple_of(n));
                LayerConfig {
                    window: window.filter(|_| windowed),
                    rope: match rotated {
                        true => Some(usize::from(windowed && local_base.is_some())),
                        false => still,
                    },
                    mixer: mixers[i],
                    has_experts: has_experts && i >= n_dense,
                }
            })
            .collect();
        Ok((layers, ropes))
    }

    /// Which layers are windowed: listed, all but every n-th, or the family's default.
    fn windowed_layers(&self, family: &Family, n_layers: usize) -> Result<Vec<bool>, PlanError> {
        let key = self.key("attention.sliding_window_pattern");
        let mut full_every = match family.windows {
            WindowPattern::AllButEvery(n) => n,
            // GGUF has no window key for models of these families that have none.
            _ => usize::MAX,
        };
        if let Some(Value::Array(_)) = self.metadata.get(&key) {
            let listed = self.metadata.get_bools(&key)?.unwrap_or_default();
            if listed.len() < n_layers {
                return Err(PlanError::config(
                    key,
                    format!("{n_layers} entries"),
                    listed.len(),
                ));
            }
            return Ok(listed[..n_layers].to_vec());
        }
        if let Some(n @ 1..) = self.count("attention.sliding_window_pattern")? {
            full_every = n;
        }
        Ok((1..=n_layers)
            .map(|i| !i.is_multiple_of(full_every))
            .collect())
    }

    fn rope_scaling(&self, family: &Family, max_ctx: usize) -> Result<RopeScaling, PlanError> {
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.float("rope.scale_linear")?,
        }
        .map(f64::from)
        .filter(|&f| f != 0.0);
        let original_ctx = self.original_ctx(max_ctx)?;
        let kind = self.string("rope.scaling.type")?;
        Ok(match (kind, factor) {
            (Some("none") | None, None) | (Some("none"), _) => RopeScaling::None,
            (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor },
            (Some("yarn"), Some(factor)) => {
                let extra = match self.float("rope.scaling.yarn_attn_factor")? {
                    Some(factor) => factor,
                    None => self.float("rope.scaling.attn_factor")?.unwrap_or(1.0),
                };
                let damping = match self.float(YARN_LOG_MULTIPLIER)? {
                    Some(strength) if strength != 0.0 => {
                        yarn_magnitude(factor, f64::from(strength))
                    }
                    _ => 1.0,
                };
                let beta = |name, default| -> Result<f64, GgufError> {
                    Ok(self.float(name)?.map_or(default, f64::from))
                };
                RopeScaling::Yarn {
                    factor,
                    original_ctx,
                    beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
                    attention_factor: match self.architecture {
                        // Its scale of query-key products has it all.
                        "deepseek2" => f64::from(extra),
                        _ => f64::from(extra) * yarn_magnitude(factor, 1.0) / damping,
                    },
                    truncate: family.gguf_yarn_truncates,
                }
            }
            // The divisors are tensors; they are filled in when those are loaded.
            (Some(LONG_ROPE), _) => RopeScaling::None,
            (Some(kind), None) => {
                return Err(PlanError::config(
                    self.key("rope.scaling.factor"),
                    format!("a number, with scaling of type `{kind}`"),
                    "nothing",
                ));
            }
            (Some(kind), Some(_)) => {
                return Err(PlanError::config(
                    self.key("rope.scaling.type"),
                    "none, linear, yarn or longrope",
                    kind,
                ));
            }
        })
    }

    /// Context length of the original training.
    fn original_ctx(&self, max_ctx: usize) -> Result<usize, PlanError> {
        let stored = self.count("rope.scaling.original_context_length")?;
        Ok(stored.unwrap_or(max_ctx))
    }

    /// Context length and attention factor of LongRoPE, whose divisors are tensors.
    fn long_rope(&self, max_ctx: usize) -> Result<(usize, f64), PlanError> {
        let original_ctx = self.original_ctx(max_ctx)?;
        let magnitude = match self.float("rope.scaling.attn_factor")? {
            Some(factor) => f64::from(factor),
            None => super::long_rope_magnitude(max_ctx as f64 / original_ctx as f64, original_ctx),
        };
        Ok((original_ctx, magnitude))
    }
}

/// Whether the file says that its divisors are those of LongRoPE.
pub(crate) fn says_long_rope(metadata: &Metadata) -> Result<bool, PlanError> {
    Ok(Keys::of(metadata)?.string("rope.scaling.type")? == Some(LONG_ROPE))
}

/// Original context length and attention factor for a GGUF model with LongRoPE divisors.
pub(crate) fn long_rope(
    metadata: &Metadata,
    config: &ModelConfig,
) -> Result<(usize, f64), PlanError> {
    Keys::of(metadata)?.long_rope(config.max_ctx)
}
