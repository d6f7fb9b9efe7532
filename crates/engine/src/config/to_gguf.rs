//! Writing a configuration as GGUF metadata.

use std::fmt::Display;

use sterna_format::gguf::{Array, Metadata, Value};
use sterna_kernels::activation::Activation;
use sterna_kernels::delta::{DeltaShape, HeadOrder};
use sterna_kernels::experts::Gating;
use sterna_kernels::rwkv::Generation;

use super::gguf::{self, YARN_LOG_MULTIPLIER};
use super::{
    ExpertsConfig, LatentConfig, LayerConfig, ModelConfig, Multipliers, RwkvConfig, RwkvRanks,
    yarn_magnitude,
};
use crate::error::PlanError;
use crate::family::{Family, SsmFamily, WindowPattern};
use crate::plan::RopeFactors;
use crate::rope::RopeScaling;

/// The format's name in messages.
const FORMAT: &str = "GGUF";

/// Tolerance for comparing rotations: divisors and bases are f32 in GGUF.
const TOLERANCE: f32 = 1e-6;

/// YaRN's default ramp, which needs no key.
const BETAS: (f64, f64) = (32.0, 1.0);

/// What a GGUF file says about a model besides its weights.
pub(crate) struct GgufConfig {
    pub(crate) metadata: Metadata,
    /// Tensors that belong to the configuration: names and values.
    pub(crate) tensors: Vec<(&'static str, Vec<f32>)>,
    /// Where llama.cpp interprets the file differently from Sterna.
    pub(crate) remarks: Vec<String>,
}

impl ModelConfig {
    /// This configuration with a GGUF file's weights, whose rows are in the family's order there.
    pub(crate) fn in_gguf(&self) -> ModelConfig {
        let mut config = self.clone();
        for rope in &mut config.ropes {
            rope.layout = self.family.gguf_rope;
        }
        config
    }

    /// What a GGUF file of this model says. `stored` are divisors of rotary frequencies that are already
    /// tensors of the model; others that it needs are in the result.
    ///
    /// The result is read back and compared, to ensure that it describes the same model.
    /// Errors: [`PlanError::Inexpressible`] if GGUF can't express a value.
    pub(crate) fn to_gguf(&self, stored: Option<RopeFactors>) -> Result<GgufConfig, PlanError> {
        // The first BitNet models differ from the others in this, and have an architecture of their own.
        let named = match self.family.bit_linear && self.activation == Activation::Silu {
            true => Family::first_bitnet(),
            false => self.family,
        };
        let architecture = named.gguf_name();
        let is_headless = self.family.is_headless();
        if self.rwkv.is_some() && self.family.gguf.is_empty() {
            let found = format!("a {} model", self.family.name);
            return Err(inexpressible("architecture", found));
        }
        // llama.cpp multiplies weights with them, which wouldn't keep their bits.
        if self.multipliers != Multipliers::default() {
            let found = format!("factors of a {} model", self.family.name);
            return Err(inexpressible("multipliers", found));
        }
        if self.family.ssm == Some(SsmFamily::FalconH1)
            && (self.embed_scale != 1.0 || self.logit_scale != 1.0)
        {
            let found = format!("factors of a {} model", self.family.name);
            return Err(inexpressible("multipliers", found));
        }
        let is_alone = self.family.ssm.is_some_and(SsmFamily::is_alone);
        let unless = |is_absent: bool, count| if is_absent { 0 } else { count };
        let mut out = Keys {
            architecture,
            config: GgufConfig {
                metadata: Metadata::new(),
                tensors: Vec::new(),
                remarks: Vec::new(),
            },
        };
        let name = Value::String(architecture.to_owned());
        out.config.metadata.insert("general.architecture", name)?;
        for (key, count) in [
            ("vocab_size", self.n_vocab),
            ("context_length", self.max_ctx),
            ("embedding_length", self.model_dim),
            ("block_count", self.n_layers),
        ] {
            out.count(key, count)?;
        }
        const WIDTH: &str = "feed_forward_length";
        match self.wide_networks {
            true => {
                let widths = (0..self.n_layers).map(|i| self.ffn_dim_of(i) as u32);
                out.put(WIDTH, Value::Array(Array::U32(widths.collect())))?;
            }
            false => out.count(WIDTH, unless(is_alone, self.ffn_dim))?,
        }
        out.count("attention.head_count", unless(is_headless, self.n_heads))?;
        self.put_kv_heads(&mut out)?;
        if !is_headless {
            let value_dim = self.latent.map_or(self.head_dim, |latent| latent.kv_rank);
            let (key_dim, value_dim) = match self.wide_heads {
                Some(wide) => (wide.head_dim, wide.head_dim),
                None => (self.head_dim, value_dim),
            };
            for (key, count) in [
                ("attention.key_length", key_dim),
                ("attention.value_length", value_dim),
                ("rope.dimension_count", self.ropes[0].dim),
            ] {
                out.count(key, count)?;
            }
        }
        if let Some(latent) = &self.latent {
            for (key, count) in [
                ("attention.kv_lora_rank", latent.kv_rank),
                ("attention.key_length_mla", latent.query_dim()),
                ("attention.value_length_mla", latent.value_dim),
            ] {
                out.count(key, count)?;
            }
            if let Some(rank) = latent.q_rank {
                out.count("attention.q_lora_rank", rank)?;
            }
        }
        if self.family.gemma4 {
            self.put_gemma4(&mut out)?;
        }
        match &self.rwkv {
            Some(rwkv) => self.put_rwkv(&mut out, rwkv)?,
            None if self.family.encoder => {
                out.float("attention.layer_norm_epsilon", self.norm_eps)?;
                out.put("attention.causal", Value::Bool(false))?;
            }
            None => out.float("attention.layer_norm_rms_epsilon", self.norm_eps)?,
        }
        self.put_experts(&mut out)?;
        if let Some(hadamard) = &self.hadamard {
            if self.delta.map(|delta| delta.order) != self.family.delta {
                let found = "values in another order than the matrices that are rotated";
                return Err(inexpressible("rotation", found));
            }
            hadamard.put(&mut out.config.metadata)?;
        }
        self.put_softcaps(&mut out)?;
        self.put_what_others_do_not_read(&mut out, named)?;
        self.put_windows(&mut out)?;
        self.put_ropes(&mut out, stored)?;
        self.check_gguf(&out.config, stored)?;
        Ok(out.config)
    }

    fn put_rwkv(&self, out: &mut Keys, rwkv: &RwkvConfig) -> Result<(), PlanError> {
        let RwkvRanks {
            decay,
            shares,
            rate,
            residual,
            gate,
        } = rwkv.ranks;
        out.float("attention.layer_norm_epsilon", self.norm_eps)?;
        out.count("wkv.head_size", rwkv.shape.head_dim)?;
        let ranks: &[_] = match rwkv.shape.generation {
            Generation::V7 => &[
                ("attention.decay_lora_rank", decay),
                ("attention.iclr_lora_rank", rate),
                ("attention.value_residual_mix_lora_rank", residual),
                ("attention.gate_lora_rank", gate),
            ],
            _ => &[
                ("time_decay_extra_dim", decay),
                ("time_mix_extra_dim", shares),
                ("rescale_every_n_layers", rwkv.halved_every),
            ],
        };
        ranks
            .iter()
            .try_for_each(|&(key, rank)| out.count(key, rank))
    }

    /// What is said of Gemma 4 besides.
    fn put_gemma4(&self, out: &mut Keys) -> Result<(), PlanError> {
        let windowed_dim = self.ropes.get(1).map_or(self.head_dim, |rope| rope.dim);
        for (key, count) in [
            ("attention.key_length_swa", self.head_dim),
            ("attention.value_length_swa", self.head_dim),
            ("rope.dimension_count_swa", windowed_dim),
            ("attention.shared_kv_layers", self.n_sharing),
            (
                "embedding_length_per_layer_input",
                self.layer_input_dim.unwrap_or(0),
            ),
        ] {
            out.count(key, count)?;
        }
        let windowed = self.layers.iter().map(|layer| layer.window.is_some());
        let windowed = Value::Array(Array::Bool(windowed.collect()));
        out.put("attention.sliding_window_pattern", windowed)
    }

    fn put_kv_heads(&self, out: &mut Keys) -> Result<(), PlanError> {
        const HEADS: &str = "attention.head_count_kv";
        if self.rwkv.is_some() {
            return Ok(());
        }
        if self
            .wide_heads
            .is_some_and(|wide| wide.n_kv_heads != self.n_kv_heads)
        {
            let heads = (0..self.n_layers).map(|i| self.heads_of(i).n_kv_heads as u32);
            return out.put(HEADS, Value::Array(Array::U32(heads.collect())));
        }
        if let (Some(n_taps), Some(family)) = (self.conv_taps, self.family.ssm) {
            self.put_ssm(out, n_taps)?;
            return match family {
                SsmFamily::Mamba | SsmFamily::Mamba2 => Ok(()),
                SsmFamily::FalconH1 => out.count(HEADS, self.n_kv_heads),
                SsmFamily::Granite | SsmFamily::Jamba => self.put_kv_heads_of_layers(out, HEADS),
            };
        }
        let n_taps = match (self.conv_taps, self.delta) {
            (Some(n_taps), None) => n_taps,
            (n_taps, delta) => {
                out.count(HEADS, self.n_kv_heads)?;
                return match (n_taps, delta) {
                    (Some(n_taps), Some(delta)) => self.put_delta(out, n_taps, &delta),
                    _ => Ok(()),
                };
            }
        };
        self.put_kv_heads_of_layers(out, HEADS)?;
        out.count("shortconv.l_cache", n_taps)
    }

    /// Heads of each layer, 0 of those with a state.
    fn put_kv_heads_of_layers(&self, out: &mut Keys, key: &str) -> Result<(), PlanError> {
        let n_kv_heads =
            i32::try_from(self.n_kv_heads).map_err(|_| inexpressible(key, self.n_kv_heads))?;
        let heads = self
            .layers
            .iter()
            .map(|layer| match layer.mixer.has_state() {
                true => 0,
                false => n_kv_heads,
            });
        out.put(key, Value::Array(Array::I32(heads.collect())))
    }

    fn put_ssm(&self, out: &mut Keys, n_taps: usize) -> Result<(), PlanError> {
        out.count("ssm.conv_kernel", n_taps)?;
        let sizes = match (&self.ssm, &self.mamba) {
            (Some(ssm), _) => {
                out.count("ssm.group_count", ssm.n_groups)?;
                [ssm.state_dim, ssm.n_heads, ssm.inner()]
            }
            (None, Some(mamba)) => [mamba.state_dim, mamba.dt_rank, mamba.inner],
            (None, None) => return Ok(()),
        };
        let keys = ["ssm.state_size", "ssm.time_step_rank", "ssm.inner_size"];
        for (key, count) in keys.into_iter().zip(sizes) {
            out.count(key, count)?;
        }
        if self.family.ssm != Some(SsmFamily::Granite) {
            return Ok(());
        }
        for (key, factor) in [
            ("embedding_scale", self.embed_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", (1.0 / f64::from(self.logit_scale)) as f32),
        ] {
            out.float(key, factor)?;
        }
        let is_rotated = (0..self.n_layers).any(|i| self.angles(i, 1).is_some());
        out.put("rope.scaling.finetuned", Value::Bool(is_rotated))
    }

    fn put_delta(
        &self,
        out: &mut Keys,
        n_taps: usize,
        delta: &DeltaShape,
    ) -> Result<(), PlanError> {
        for (key, count) in [
            ("ssm.conv_kernel", n_taps),
            ("ssm.state_size", delta.key_dim),
            ("ssm.group_count", delta.n_key_heads),
            ("ssm.time_step_rank", delta.n_value_heads),
            ("ssm.inner_size", delta.values()),
        ] {
            out.count(key, count)?;
        }
        let recurrent = self.layers.iter().map(|layer| layer.mixer.has_state());
        let recurrent = Value::Array(Array::Bool(recurrent.collect()));
        out.put("attention.recurrent_layers", recurrent)?;
        let attends = |i: &usize| !self.layers[*i].mixer.has_state();
        if let Some(first) = (0..self.n_layers).find(attends) {
            out.count("full_attention_interval", first + 1)?;
        }
        // The rotation of text doesn't depend on them, and llama.cpp expects them.
        if self.family.delta == Some(HeadOrder::Tiled) {
            let pairs = i32::try_from(self.ropes[0].pairs())
                .map_err(|_| inexpressible("rope.dimension_sections", self.ropes[0].pairs()))?;
            let third = pairs / 3;
            let sections = vec![pairs - 2 * third, third, third, 0];
            let sections = Value::Array(Array::I32(sections));
            out.put("rope.dimension_sections", sections)?;
        }
        Ok(())
    }

    fn put_experts(&self, out: &mut Keys) -> Result<(), PlanError> {
        let (Some(experts), Some(mixture)) = (self.experts, self.family.mixture) else {
            return Ok(());
        };
        let ExpertsConfig {
            routing,
            ffn_dim,
            shared_ffn_dim,
        } = experts;
        match shared_ffn_dim {
            Some(dim) if self.family.latent && dim.is_multiple_of(ffn_dim) => {
                out.count("expert_shared_count", dim / ffn_dim)?;
            }
            Some(dim) => out.count("expert_shared_feed_forward_length", dim)?,
            None => {}
        }
        if let Some(groups) = routing.groups {
            out.count("expert_group_count", groups.n_groups)?;
            out.count("expert_group_used_count", groups.n_used)?;
        }
        if self.family.latent {
            out.float("expert_weights_scale", routing.scale)?;
        }
        out.count("expert_count", routing.n_experts)?;
        out.count("expert_used_count", routing.n_used)?;
        let dense = self.layers.iter().take_while(|layer| !layer.has_experts);
        let n_dense = dense.count();
        if n_dense > 0 && self.family.ssm != Some(SsmFamily::Jamba) {
            out.count("leading_dense_block_count", n_dense)?;
        }
        if routing.gating == Gating::Sigmoid {
            out.count("expert_gating_func", 2)?;
        }
        if ffn_dim != self.ffn_dim {
            out.count("expert_feed_forward_length", ffn_dim)?;
        }
        if self.family.latent {
            out.put("expert_weights_norm", Value::Bool(routing.renormalised))?;
        } else if routing.renormalised != mixture.gguf_renormalised {
            out.put("expert_weights_norm", Value::Bool(routing.renormalised))?;
            out.remark("expert_weights_norm", "uses the family's default");
        }
        Ok(())
    }

    fn put_softcaps(&self, out: &mut Keys) -> Result<(), PlanError> {
        let defaults = self.family.gguf_softcaps.unzip();
        for (key, cap, default) in [
            ("attn_logit_softcapping", self.attn_softcap, defaults.0),
            ("final_logit_softcapping", self.logit_softcap, defaults.1),
        ] {
            match (cap, default) {
                (Some(cap), _) => out.float(key, cap)?,
                (None, Some(_)) => {
                    let model = format!("that a {} model has no bound", self.family.name);
                    return Err(inexpressible(key, model));
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    fn put_what_others_do_not_read(&self, out: &mut Keys, named: &Family) -> Result<(), PlanError> {
        let (n_layers, model_dim) = (self.n_layers, self.model_dim);
        let (scale, is_said) = match &self.latent {
            Some(latent) => self.put_latent_scale(out, latent)?,
            None => {
                let scale =
                    (self.family).attn_scale(n_layers, model_dim, self.n_heads, self.head_dim);
                (scale, false)
            }
        };
        if self.attn_scale != scale {
            out.float("attention.scale", self.attn_scale)?;
            if !is_said {
                out.remark("attention.scale", "uses the family's default scale");
            }
        }
        if self.activation != named.activation {
            let name = match self.activation {
                Activation::Silu => "silu",
                Activation::Relu2 => "relu2",
                Activation::Relu => "relu",
                Activation::GeluTanh => "gelu_pytorch_tanh",
                Activation::GeluErf => "gelu",
                Activation::ClampedSwiglu => {
                    let found = "that of a gpt-oss model";
                    return Err(inexpressible("activation", found));
                }
            };
            out.put("hidden_act", Value::String(name.to_owned()))?;
            out.remark("hidden_act", "uses the family's default activation");
        }
        Ok(())
    }

    /// Says how YaRN sharpens latent attention. Returns the scale that this comes to, which rounding may set apart from
    /// that of the model, and whether something was said.
    fn put_latent_scale(
        &self,
        out: &mut Keys,
        latent: &LatentConfig,
    ) -> Result<(f32, bool), PlanError> {
        let RopeScaling::Yarn { factor, .. } = self.ropes[0].scaling else {
            return Ok((latent.attn_scale(1.0), false));
        };
        let factor = f64::from(factor as f32);
        if factor <= 1.0 || self.attn_scale == latent.attn_scale(1.0) {
            return Ok((latent.attn_scale(1.0), false));
        }
        let stretch = f64::from(self.attn_scale) * (latent.query_dim() as f64).sqrt();
        let strength = ((stretch.sqrt() - 1.0) / libm::log(factor)) as f32;
        out.float(YARN_LOG_MULTIPLIER, strength)?;
        let stretch = yarn_magnitude(factor, 10.0 * f64::from(strength));
        Ok((latent.attn_scale(stretch), true))
    }

    fn put_windows(&self, out: &mut Keys) -> Result<(), PlanError> {
        const WINDOW: &str = "attention.sliding_window";
        let window = self.layers.iter().find_map(|layer| layer.window);
        match (window, self.family.gguf_window) {
            (Some(window), _) => out.count(WINDOW, window)?,
            (None, Some(_)) => out.count(WINDOW, 0)?,
            (None, None) => {}
        }
        let by_family = match self.family.windows {
            WindowPattern::AllButEvery(n) => Some(n),
            _ => None,
        };
        if window.is_some_and(|window| window < self.max_ctx) && by_family.is_none() {
            out.remark(WINDOW, "applies no window");
        }
        // Windowed layers may have a rotary embedding of their own, even if their window has no effect.
        let is_windowed = |layer: &LayerConfig| match self.family.local_rope_base {
            Some(_) => layer.rope == Some(1),
            None => layer.window.is_some(),
        };
        let windowed: Vec<bool> = self.layers.iter().map(is_windowed).collect();
        if window.is_none() && self.family.local_rope_base.is_none() {
            return Ok(());
        }
        if self.family.gemma4 {
            // Written layer by layer.
            return Ok(());
        }
        let is_every = |n: usize| {
            let expected = (1..=self.n_layers).map(|i| !i.is_multiple_of(n));
            expected.eq(windowed.iter().copied())
        };
        if is_every(by_family.unwrap_or(usize::MAX)) {
            return Ok(());
        }
        let key = "attention.sliding_window_pattern";
        match (2..=self.n_layers).find(|&n| is_every(n)) {
            Some(n) => out.count(key, n)?,
            None => out.put(key, Value::Array(Array::Bool(windowed)))?,
        }
        out.remark(key, "may only know the default pattern");
        Ok(())
    }

    fn put_ropes(&self, out: &mut Keys, stored: Option<RopeFactors>) -> Result<(), PlanError> {
        let rope = &self.ropes[0];
        out.float("rope.freq_base", rope.base as f32)?;
        if self.family.local_rope_base.is_some()
            && let Some(local) = self.ropes.get(1)
        {
            out.float("rope.freq_base_swa", local.base as f32)?;
        }
        match stored {
            Some(RopeFactors::One(_)) => return Ok(()),
            Some(RopeFactors::ShortAndLong {
                original_ctx,
                attention_factor,
                ..
            }) => return self.put_long_rope(out, original_ctx, attention_factor),
            None => {}
        }
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                out.scaling("linear")?;
                out.float("rope.scaling.factor", *factor as f32)?;
            }
            RopeScaling::Dynamic { .. } => {
                return Err(inexpressible("rope scaling", "`dynamic`"));
            }
            RopeScaling::Yarn {
                truncate,
                original_ctx,
                attention_factor,
                ..
            } if *truncate != self.family.gguf_yarn_truncates => {
                let divisors = rope.divisors();
                self.put_long_rope(out, *original_ctx, *attention_factor)?;
                out.factors(divisors.clone(), divisors);
            }
            RopeScaling::Yarn {
                factor,
                original_ctx,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                out.scaling("yarn")?;
                out.float("rope.scaling.factor", *factor as f32)?;
                out.count("rope.scaling.original_context_length", *original_ctx)?;
                if (*beta_fast, *beta_slow) != BETAS {
                    out.float("rope.scaling.yarn_beta_fast", *beta_fast as f32)?;
                    out.float("rope.scaling.yarn_beta_slow", *beta_slow as f32)?;
                    out.remark("rope.scaling.yarn_beta_fast", "may use 32 and 1");
                }
                let usual = yarn_magnitude(f64::from(*factor as f32), 1.0);
                if self.latent.is_some() {
                    out.float("rope.scaling.attn_factor", *attention_factor as f32)?;
                } else if attention_factor != &usual {
                    let extra = attention_factor / usual;
                    out.float("rope.scaling.attn_factor", extra as f32)?;
                }
            }
            // Divisors that are the same for every context, and no other scaling.
            RopeScaling::LongRope {
                short,
                long,
                attention_factor,
                ..
            } if short == long && *attention_factor == 1.0 => out.divisors(short.clone()),
            RopeScaling::LongRope {
                short,
                long,
                original_ctx,
                attention_factor,
            } => {
                self.put_long_rope(out, *original_ctx, *attention_factor)?;
                out.factors(short.clone(), long.clone());
            }
            RopeScaling::Llama3 { .. } => out.divisors(rope.divisors()),
            RopeScaling::Factors(factors) => out.divisors(factors.clone()),
        }
        Ok(())
    }

    fn put_long_rope(
        &self,
        out: &mut Keys,
        original_ctx: usize,
        attention_factor: f64,
    ) -> Result<(), PlanError> {
        // Other readers expect no scaling type in a model of this family.
        if self.family.name != "phi3" {
            out.scaling(gguf::LONG_ROPE)?;
        }
        out.count("rope.scaling.original_context_length", original_ctx)?;
        out.float("rope.scaling.attn_factor", attention_factor as f32)
    }

    /// Checks that `gguf` describes this model.
    fn check_gguf(&self, gguf: &GgufConfig, stored: Option<RopeFactors>) -> Result<(), PlanError> {
        let mut read = ModelConfig::from_gguf(&gguf.metadata, self.n_vocab)?;
        let factors = |name: &str| {
            let found = gguf.tensors.iter().find(|(of, _)| *of == name);
            found.map(|(_, factors)| factors.clone())
        };
        if let Some(factors) = factors(DIVISORS) {
            read.ropes[0].scaling = RopeScaling::Factors(factors);
        } else if let (Some(short), Some(long)) = (factors(SHORT), factors(LONG)) {
            let (original_ctx, attention_factor) = gguf::long_rope(&gguf.metadata, &read)?;
            read.ropes[0].scaling = RopeScaling::LongRope {
                short,
                long,
                original_ctx,
                attention_factor,
            };
        }
        // Tensors say so.
        if let (Some(read), Some(own)) = (&mut read.wide_heads, self.wide_heads) {
            read.values_are_keys = own.values_are_keys;
        }
        let read = read.validated()?;
        let ctx_lens = [1, self.max_ctx, self.max_ctx.saturating_mul(2)];
        for i in 0..self.n_layers {
            let layer = format!("that of layer {i} of a {} model", self.family.name);
            if self.layers[i].window != read.layers[i].window {
                return Err(inexpressible("attention window", layer));
            }
            if self.layers[i].mixer != read.layers[i].mixer {
                return Err(inexpressible("attention or its place", layer));
            }
            // Tensors say so of Jamba's layers.
            let is_told = self.family.ssm != Some(SsmFamily::Jamba);
            if is_told && self.layers[i].has_experts != read.layers[i].has_experts {
                return Err(inexpressible("experts", layer));
            }
            let turns_alike = ctx_lens.iter().all(|&ctx_len| {
                let (ours, theirs) = (self.angles(i, ctx_len), read.angles(i, ctx_len));
                match (ours, theirs) {
                    (Some(ours), Some(theirs)) => {
                        ours.0 == theirs.0 && near(&ours.1, &theirs.1) && near(&ours.2, &theirs.2)
                    }
                    (ours, theirs) => ours.is_none() && theirs.is_none(),
                }
            });
            // Divisors stored as tensors of the model aren't known yet, on either side.
            if !turns_alike && stored.is_none() {
                return Err(inexpressible("rotary embedding", layer));
            }
        }
        let rest = |config: &ModelConfig| ModelConfig {
            family: read.family,
            // Only relevant for models that have such norms, which only their weights show.
            input_norm_eps: read.input_norm_eps,
            layers: Vec::new(),
            ropes: Vec::new(),
            // Heads are written in the order of the family.
            delta: (config.delta.zip(self.family.delta))
                .map(|(delta, order)| DeltaShape { order, ..delta }),
            ..config.clone()
        };
        let (ours, theirs) = (rest(self), rest(&read));
        if ours == theirs {
            Ok(())
        } else {
            let found = format!("{ours:?}, which would be read as {theirs:?}");
            Err(inexpressible("model", found))
        }
    }
}

/// Names of the tensors of divisors.
pub(crate) const DIVISORS: &str = "rope_freqs.weight";
pub(crate) const SHORT: &str = "rope_factors_short.weight";
pub(crate) const LONG: &str = "rope_factors_long.weight";

/// Metadata under construction.
struct Keys {
    architecture: &'static str,
    config: GgufConfig,
}

impl Keys {
    fn put(&mut self, key: &str, value: Value) -> Result<(), PlanError> {
        let key = format!("{}.{key}", self.architecture);
        self.config.metadata.insert(key, value).map_err(Into::into)
    }

    fn count(&mut self, key: &str, count: usize) -> Result<(), PlanError> {
        let count = u32::try_from(count).map_err(|_| inexpressible(key, count))?;
        self.put(key, Value::U32(count))
    }

    fn float(&mut self, key: &str, value: f32) -> Result<(), PlanError> {
        self.put(key, Value::F32(value))
    }

    fn scaling(&mut self, kind: &str) -> Result<(), PlanError> {
        self.put("rope.scaling.type", Value::String(kind.to_owned()))
    }

    /// Divisors for every context; `None` if they have no effect.
    fn divisors(&mut self, divisors: Vec<f32>) {
        if divisors.iter().any(|&by| by != 1.0) {
            self.config.tensors.push((DIVISORS, divisors));
        }
    }

    fn factors(&mut self, short: Vec<f32>, long: Vec<f32>) {
        self.config.tensors.extend([(SHORT, short), (LONG, long)]);
    }

    /// Notes what llama.cpp does, as it doesn't read `key`.
    fn remark(&mut self, key: &str, otherwise: &str) {
        let architecture = self.architecture;
        let remark = format!("{architecture}.{key}: llama.cpp {otherwise}");
        self.config.remarks.push(remark);
    }
}

fn inexpressible(what: &str, found: impl Display) -> PlanError {
    PlanError::inexpressible(what, FORMAT, found)
}

fn near(a: &[f32], b: &[f32]) -> bool {
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE * a.abs().max(b.abs());
    a.len() == b.len() && a.iter().zip(b).all(is_near)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::model;
    use serde_json::json;

    #[test]
    fn every_family_and_scaling_is_said_so_that_it_is_read_back() {
        for family in [
            json!({"model_type": "llama"}),
            json!({"model_type": "llama", "weight_bits": 1}),
            json!({"model_type": "bitnet"}),
            json!({"model_type": "bitnet", "hidden_act": "silu"}),
            json!({"model_type": "bitnet", "hidden_act": "relu"}),
            json!({"model_type": "mistral", "sliding_window": 64}),
            json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 32,
                   "max_window_layers": 2}),
            json!({"model_type": "qwen3"}),
            json!({"model_type": "gemma2", "query_pre_attn_scalar": 24,
                   "attn_logit_softcapping": 50.0, "final_logit_softcapping": 7.0}),
            json!({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}),
            json!({"model_type": "gemma3_text", "layer_types": ["full_attention",
                   "sliding_attention", "full_attention", "full_attention"]}),
            json!({"model_type": "phi3"}),
            json!({"model_type": "smollm3"}),
            json!({"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
            json!({"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 96, "norm_topk_prob": true}),
            json!({"model_type": "lfm2", "num_key_value_heads": 2, "conv_L_cache": 3,
                   "full_attn_idxs": [1], "block_auto_adjust_ff_dim": true}),
            json!({"model_type": "lfm2_moe", "num_key_value_heads": 2, "conv_L_cache": 3,
                   "full_attn_idxs": [1], "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 96, "num_dense_layers": 1}),
            json!({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}),
        ] {
            for rope in [
                json!({}),
                json!({"rope_theta": 123_456.789}),
                json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false,
                    "attention_factor": 0.9, "beta_fast": 20}}),
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 2,
                    "attention_factor": 0.9}}),
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 32.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128}}),
                json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1],
                    "long_factor": [1.1, 1.7, 2.5, 9.25], "partial_rotary_factor": 0.5,
                    "original_max_position_embeddings": 128}}),
            ] {
                let is = |name: &str| family["model_type"] == name;
                let scaling = &rope["rope_scaling"];
                // Phi's configurations use this word differently, and in GGUF all layers of a Gemma rotate as
                // many elements.
                if (is("phi3") && scaling["rope_type"] == "yarn")
                    || (is("gemma3_text") && scaling["partial_rotary_factor"] == 0.5)
                {
                    continue;
                }
                let mut json = family.clone();
                let rope = rope.as_object().unwrap().clone();
                json.as_object_mut().unwrap().extend(rope);
                let gguf = model(&json).to_gguf(None);
                assert!(gguf.is_ok(), "{json}: {}", gguf.err().unwrap());
            }
        }
    }

    #[test]
    fn what_other_readers_do_not_take_is_said() {
        let remarks = |json| model(&json).to_gguf(None).unwrap().remarks;
        assert_eq!(remarks(json!({"model_type": "llama"})), [""; 0]);
        assert_eq!(
            remarks(json!({"model_type": "mistral", "sliding_window": 64})),
            ["llama.attention.sliding_window: llama.cpp applies no window"]
        );
        assert_eq!(
            remarks(json!({"model_type": "bitnet", "hidden_act": "relu"})),
            ["bitnet-b1.58.hidden_act: llama.cpp uses the family's default activation"]
        );
        let silu = json!({"model_type": "bitnet", "hidden_act": "silu"});
        assert_eq!(remarks(silu), [""; 0]);
        // As long as the context: no position is outside.
        let wide = json!({"model_type": "mistral", "sliding_window": 512});
        assert_eq!(remarks(wide), [""; 0]);
    }

    #[test]
    fn llama3_scaling_becomes_divisors_that_give_the_same_frequencies() {
        let config = model(
            &json!({"model_type": "llama", "head_dim": 64, "rope_theta": 500_000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
        );
        let gguf = config.to_gguf(None).unwrap();
        let [(DIVISORS, divisors)] = &gguf.tensors[..] else {
            panic!("{} tensors", gguf.tensors.len());
        };
        assert_eq!((divisors[0], divisors[31]), (1.0, 32.0));
        let mut read = config.clone();
        read.ropes[0].scaling = RopeScaling::Factors(divisors.clone());
        let (ours, theirs) = (config.angles(0, 1).unwrap(), read.angles(0, 1).unwrap());
        let same = ours.2.iter().zip(&theirs.2).filter(|(a, b)| a == b).count();
        assert!(same >= 31, "{same} of 32");
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        for (json, expected) in [
            (
                json!({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2}}),
                "rope scaling: GGUF can't express `dynamic`",
            ),
            (
                json!({"model_type": "smollm3", "no_rope_layer_interval": 2}),
                "rotary embedding: GGUF can't express that of layer 1 of a smollm3 model",
            ),
            (
                json!({"model_type": "gemma2"}),
                "attn_logit_softcapping: GGUF can't express that a gemma2 model has no bound",
            ),
        ] {
            let Err(error) = model(&json).to_gguf(None) else {
                panic!("{json}");
            };
            assert_eq!(error.to_string(), expected);
        }
    }
}
