//! Writing a configuration as Hugging Face's `config.json`.

use serde_json::{Map, Value, json};
use sterna_format::hf::Config;
use sterna_kernels::activation::Activation;
use sterna_kernels::delta::HeadOrder;
use sterna_kernels::experts::Gating;
use sterna_kernels::rwkv::Generation;

use super::hf::STILL;
use super::{ExpertsConfig, MixerKind, ModelConfig, Multipliers, RwkvConfig};
use crate::error::PlanError;
use crate::family::{Family, SsmFamily, WindowPattern};
use crate::rope::{Rope, RopeConfig, RopeScaling};

/// The format's name in messages.
const FORMAT: &str = "`config.json`";

impl ModelConfig {
    /// The `config.json` of this model, whose embedding table is also its output head if it is `tied`.
    ///
    /// The result is read back and compared, to ensure that it describes the same model, except for rotary
    /// layouts: the weights that belong to it rotate halves.
    /// Errors: [`PlanError::Inexpressible`] if `config.json` can't express a value.
    pub fn to_hf(&self, tied: bool) -> Result<Map<String, Value>, PlanError> {
        // In GGUF files, Mistral's models are Llama's with a window.
        if self.family.windows == WindowPattern::None
            && self.layers.iter().all(|layer| layer.window.is_some())
            && self.family.name == "llama"
            && let Some(mistral) = Family::of_hf("mistral")
        {
            let config = ModelConfig {
                family: mistral,
                ..self.clone()
            };
            return config.to_hf(tied);
        }
        let mut hf = Map::new();
        let mut set = |key: &str, value: Value| {
            hf.insert(key.to_owned(), value);
        };
        set("model_type", json!(self.family.hf_name()));
        if self.family.name == Family::first_bitnet().name {
            set("weight_bits", json!(1));
        }
        set("vocab_size", json!(self.n_vocab));
        set("hidden_size", json!(self.model_dim));
        set("intermediate_size", json!(self.ffn_dim));
        set("num_hidden_layers", json!(self.n_layers));
        if let Some(latent) = &self.latent {
            set("num_attention_heads", json!(self.n_heads));
            set("num_key_value_heads", json!(self.n_heads));
            set("q_lora_rank", json!(latent.q_rank));
            set("kv_lora_rank", json!(latent.kv_rank));
            set("qk_nope_head_dim", json!(latent.nope_dim));
            set("qk_rope_head_dim", json!(latent.rope_dim));
            set("v_head_dim", json!(latent.value_dim));
            set("attention_multiplier", json!(shortest(self.attn_scale)));
        } else if !self.family.is_headless() {
            set("num_attention_heads", json!(self.n_heads));
            set("num_key_value_heads", json!(self.n_kv_heads));
            set("head_dim", json!(self.head_dim));
        }
        set("max_position_embeddings", json!(self.max_ctx));
        if let Some(ExpertsConfig {
            routing,
            ffn_dim,
            shared_ffn_dim,
        }) = self.experts
        {
            let count = match self.family.hf_name() {
                "mixtral" | "gpt_oss" => "num_local_experts",
                _ if self.family.latent => "n_routed_experts",
                _ => "num_experts",
            };
            set(count, json!(routing.n_experts));
            set("num_experts_per_tok", json!(routing.n_used));
            set("moe_intermediate_size", json!(ffn_dim));
            set("norm_topk_prob", json!(routing.renormalised));
            if self.family.latent {
                set("routed_scaling_factor", json!(shortest(routing.scale)));
                let groups = routing
                    .groups
                    .map(|groups| (groups.n_groups, groups.n_used));
                let (n_groups, n_used) = groups.unwrap_or((1, 1));
                set("n_group", json!(n_groups));
                set("topk_group", json!(n_used));
                if routing.gating == Gating::Softmax {
                    let method = match groups {
                        Some(_) => "group_limited_greedy",
                        None => "greedy",
                    };
                    set("topk_method", json!(method));
                }
                if let Some(dim) = shared_ffn_dim.filter(|dim| dim.is_multiple_of(ffn_dim)) {
                    set("n_shared_experts", json!(dim / ffn_dim));
                }
            }
            if let Some(dim) = shared_ffn_dim {
                let key = match self.family.ssm {
                    Some(_) => "shared_intermediate_size",
                    None => "shared_expert_intermediate_size",
                };
                set(key, json!(dim));
            }
            let dense = (0..self.n_layers).filter(|&i| !self.layers[i].has_experts);
            let dense: Vec<_> = dense.collect();
            // Configurations say which are dense in one way or the other.
            let has_convolutions =
                (self.layers.iter()).any(|layer| layer.mixer == MixerKind::Convolution);
            match has_convolutions {
                true => set("num_dense_layers", json!(dense.len())),
                false if self.family.latent => set("first_k_dense_replace", json!(dense.len())),
                false => set("mlp_only_layers", json!(dense)),
            }
        }
        if let Some(rwkv) = &self.rwkv {
            self.set_rwkv(rwkv, &mut set);
        } else if let Some(family) = self.family.ssm
            && family != SsmFamily::Granite
        {
            self.set_ssm(family, &mut set);
        } else if let (Some(n_taps), Some(ssm)) = (self.conv_taps, &self.ssm) {
            set("mamba_d_conv", json!(n_taps));
            set("mamba_n_heads", json!(ssm.n_heads));
            set("mamba_d_head", json!(ssm.head_dim));
            set("mamba_d_state", json!(ssm.state_dim));
            set("mamba_n_groups", json!(ssm.n_groups));
            set("embedding_multiplier", json!(shortest(self.embed_scale)));
            set("residual_multiplier", json!(shortest(self.residual_scale)));
            set("attention_multiplier", json!(shortest(self.attn_scale)));
            set("logits_scaling", json!(1.0 / f64::from(self.logit_scale)));
            let is_rotated = (0..self.n_layers).any(|i| self.angles(i, 1).is_some());
            let positions = if is_rotated { "rope" } else { "nope" };
            set("position_embedding_type", json!(positions));
            if self.experts.is_none() {
                set("num_local_experts", json!(0));
            }
        } else if let (Some(n_taps), Some(delta)) = (self.conv_taps, &self.delta) {
            set("linear_conv_kernel_dim", json!(n_taps));
            set("linear_num_key_heads", json!(delta.n_key_heads));
            set("linear_num_value_heads", json!(delta.n_value_heads));
            set("linear_key_head_dim", json!(delta.key_dim));
            set("linear_value_head_dim", json!(delta.value_dim));
            if delta.order == HeadOrder::Tiled {
                set("linear_value_head_order", json!("tiled"));
            }
        } else if let Some(n_taps) = self.conv_taps {
            set("conv_L_cache", json!(n_taps));
            set("conv_bias", json!(false));
            set("block_auto_adjust_ff_dim", json!(false));
            set("norm_eps", json!(shortest(self.norm_eps)));
        }
        let says_kinds = !matches!(
            self.family.ssm,
            Some(SsmFamily::FalconH1 | SsmFamily::Mamba | SsmFamily::Mamba2)
        );
        if self.has_states() && says_kinds && self.rwkv.is_none() {
            let kinds = self.layers.iter().map(|layer| match layer.mixer {
                MixerKind::Attention | MixerKind::LatentAttention => "full_attention",
                MixerKind::Convolution => "conv",
                MixerKind::DeltaNet => "linear_attention",
                MixerKind::Ssm | MixerKind::Mamba | MixerKind::AttentionAndSsm => "mamba",
                MixerKind::TimeMix => "rwkv",
            });
            set("layer_types", json!(kinds.collect::<Vec<_>>()));
        }
        if let Some(hadamard) = &self.hadamard {
            let (name, member) = hadamard.to_json();
            set(name, member);
        }
        if self.family.encoder {
            set("layer_norm_eps", json!(shortest(self.norm_eps)));
            set("type_vocab_size", json!(1));
        } else if self.rwkv.is_none() {
            set("rms_norm_eps", json!(shortest(self.norm_eps)));
        }
        set("tie_word_embeddings", json!(tied));
        let activation = match self.activation {
            Activation::Silu => "silu",
            Activation::Relu2 => "relu2",
            Activation::Relu => "relu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::GeluErf => "gelu",
            // Its family says the rest.
            Activation::ClampedSwiglu => "silu",
        };
        let key = match self.family.gemma {
            true => "hidden_activation",
            false => "hidden_act",
        };
        set(key, json!(activation));
        if self.family.gemma4 {
            self.set_gemma4(&mut set);
        } else if self.family.gemma {
            set("query_pre_attn_scalar", self.query_scalar());
        }
        if self.family.gemma {
            set(
                "attn_logit_softcapping",
                json!(self.attn_softcap.map(shortest)),
            );
            set(
                "final_logit_softcapping",
                json!(self.logit_softcap.map(shortest)),
            );
        }
        self.set_windows(&mut set);
        self.set_ropes(&mut set);
        self.check(&hf)?;
        Ok(hf)
    }

    /// What is said of time mixing.
    fn set_rwkv(&self, rwkv: &RwkvConfig, set: &mut impl FnMut(&str, Value)) {
        let RwkvConfig {
            shape,
            head_eps,
            ranks,
            halved_every,
        } = rwkv;
        match shape.generation {
            Generation::V7 => {
                set("norm_eps", json!(shortest(self.norm_eps)));
                set("head_dim", json!(shape.head_dim));
                set("a_low_rank_dim", json!(ranks.rate));
                set("v_low_rank_dim", json!(ranks.residual));
                set("gate_low_rank_dim", json!(ranks.gate));
            }
            _ => {
                set("layer_norm_epsilon", json!(shortest(self.norm_eps)));
                set("attention_hidden_size", json!(self.model_dim));
            }
        }
        if let Generation::V5 | Generation::V6 = shape.generation {
            let divisor = (f64::from(*head_eps) / 1e-5).sqrt().round();
            set("head_size", json!(shape.head_dim));
            set("head_size_divisor", json!(divisor as usize));
            set("shares_low_rank_dim", json!(ranks.shares));
        }
        set("decay_low_rank_dim", json!(ranks.decay));
        set("stored_halved_every", json!(halved_every));
    }

    /// What is said of Gemma 4 besides.
    fn set_gemma4(&self, set: &mut impl FnMut(&str, Value)) {
        if let Some(wide) = self.wide_heads {
            set("global_head_dim", json!(wide.head_dim));
            set("num_global_key_value_heads", json!(wide.n_kv_heads));
            set("attention_k_eq_v", json!(wide.values_are_keys));
        }
        set("num_kv_shared_layers", json!(self.n_sharing));
        set("use_double_wide_mlp", json!(self.wide_networks));
        let input_dim = self.layer_input_dim.unwrap_or(0);
        set("hidden_size_per_layer_input", json!(input_dim));
        set("vocab_size_per_layer_input", json!(self.n_vocab));
        set("enable_moe_block", json!(false));
    }

    /// What is said of state spaces in families other than Granite's.
    fn set_ssm(&self, family: SsmFamily, set: &mut impl FnMut(&str, Value)) {
        let n_taps = self.conv_taps.unwrap_or(0);
        match (family, &self.ssm, &self.mamba) {
            (SsmFamily::Mamba2, Some(ssm), _) => {
                set("conv_kernel", json!(n_taps));
                set("num_heads", json!(ssm.n_heads));
                set("head_dim", json!(ssm.head_dim));
                set("state_size", json!(ssm.state_dim));
                set("n_groups", json!(ssm.n_groups));
                set("expand", json!(ssm.inner() / self.model_dim));
            }
            (SsmFamily::Mamba, _, Some(mamba)) => {
                set("conv_kernel", json!(n_taps));
                set("state_size", json!(mamba.state_dim));
                set("time_step_rank", json!(mamba.dt_rank));
            }
            (_, _, Some(mamba)) => {
                set("mamba_d_conv", json!(n_taps));
                set("mamba_d_state", json!(mamba.state_dim));
                set("mamba_dt_rank", json!(mamba.dt_rank));
                set("mamba_expand", json!(mamba.inner / self.model_dim));
                if self.experts.is_none() {
                    set("num_experts", json!(1));
                }
            }
            (_, Some(ssm), _) => {
                let Multipliers {
                    attention_in,
                    key,
                    attention_out,
                    ssm_in,
                    ssm: parts,
                    ssm_out,
                    gate,
                    down,
                } = self.multipliers;
                set("mamba_d_conv", json!(n_taps));
                set("mamba_n_heads", json!(ssm.n_heads));
                set("mamba_d_head", json!(ssm.head_dim));
                set("mamba_d_ssm", json!(ssm.inner()));
                set("mamba_d_state", json!(ssm.state_dim));
                set("mamba_n_groups", json!(ssm.n_groups));
                set("mlp_multipliers", json!([gate, down].map(shortest)));
                set("ssm_multipliers", json!(parts.map(shortest)));
                for (name, factor) in [
                    ("embedding_multiplier", self.embed_scale),
                    ("lm_head_multiplier", self.logit_scale),
                    ("attention_in_multiplier", attention_in),
                    ("attention_out_multiplier", attention_out),
                    ("key_multiplier", key),
                    ("ssm_in_multiplier", ssm_in),
                    ("ssm_out_multiplier", ssm_out),
                ] {
                    set(name, json!(shortest(factor)));
                }
            }
            (_, None, None) => {}
        }
    }

    /// The number whose root divides attention scores (`query_pre_attn_scalar`), as JSON writes it: an
    /// integer where one gives exactly this model's scale, as is usual, else a float that does.
    pub fn query_scalar(&self) -> Value {
        let scale = f64::from(self.attn_scale);
        let scalar = 1.0 / (scale * scale);
        let whole = scalar.round();
        match (1.0 / whole.sqrt()) as f32 == self.attn_scale {
            true => json!(whole as u64),
            false => json!(scalar),
        }
    }

    fn set_windows(&self, set: &mut impl FnMut(&str, Value)) {
        let window = self.layers.iter().find_map(|layer| layer.window);
        if self.family.windows == WindowPattern::None {
            return;
        }
        set("sliding_window", json!(window));
        set("use_sliding_window", json!(window.is_some()));
        let types: Vec<_> = (self.layers.iter())
            .map(|layer| match layer.window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            })
            .collect();
        set("layer_types", json!(types));
    }

    fn set_ropes(&self, set: &mut impl FnMut(&str, Value)) {
        let full = &self.ropes[0];
        set("rope_theta", json!(full.base));
        match still_part(full).filter(|_| self.family.gemma4) {
            Some(part) => set(
                "rope_scaling",
                json!({"rope_type": "proportional", "partial_rotary_factor": part}),
            ),
            None => set("rope_scaling", self.rope_scaling(full)),
        }
        if self.family.hf_defaults.partial_rotary.is_some() {
            let part = full.dim as f64 / self.head_dim as f64;
            set("partial_rotary_factor", json!(part));
        }
        if self.family.local_rope_base.is_some() {
            set("rope_local_base_freq", json!(self.ropes[1].base));
        }
        if self.family.no_rope_interval.is_some() {
            let rotated = (0..self.n_layers).map(|i| u8::from(self.angles(i, 1).is_some()));
            set("no_rope_layers", json!(rotated.collect::<Vec<_>>()));
        }
    }

    fn rope_scaling(&self, rope: &RopeConfig) -> Value {
        // Divisors of one only say which part of a head is rotated.
        let ones = || vec![1.0; rope.pairs()];
        let list = |factors: &[f32], original_ctx, attention_factor: f64| {
            let factors: Vec<_> = factors.iter().map(|&f| f64::from(f)).collect();
            json!({
                "rope_type": "longrope",
                "short_factor": &factors,
                "long_factor": factors,
                "original_max_position_embeddings": original_ctx,
                "attention_factor": attention_factor,
            })
        };
        let mut scaling = match &rope.scaling {
            RopeScaling::None
                if rope.dim == self.head_dim
                    || self.family.hf_defaults.partial_rotary.is_some() =>
            {
                return Value::Null;
            }
            RopeScaling::None => list(&ones(), self.max_ctx, 1.0),
            RopeScaling::Factors(factors) => list(factors, self.max_ctx, 1.0),
            RopeScaling::LongRope {
                short,
                long,
                original_ctx,
                attention_factor,
            } => {
                let mut scaling = list(long, *original_ctx, *attention_factor);
                let short: Vec<_> = short.iter().map(|&f| f64::from(f)).collect();
                scaling["short_factor"] = json!(short);
                scaling
            }
            RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
            RopeScaling::Dynamic { factor, .. } => {
                json!({ "rope_type": "dynamic", "factor": factor })
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_ctx,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_ctx,
            }),
            RopeScaling::Yarn {
                factor,
                original_ctx,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_ctx,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "truncate": truncate,
            }),
        };
        if rope.dim != self.head_dim {
            scaling["partial_rotary_factor"] = json!(rope.dim as f64 / self.head_dim as f64);
        }
        scaling
    }

    /// Checks that `hf` describes this model.
    fn check(&self, hf: &Map<String, Value>) -> Result<(), PlanError> {
        let text = Value::Object(hf.clone()).to_string();
        let read = Config::parse(text.as_bytes())
            .map_err(|error| PlanError::inexpressible("configuration", FORMAT, error))?;
        let read = ModelConfig::from_hf(&read, self.n_vocab)?;
        for i in 0..self.n_layers {
            let same_window = self.layers[i].window == read.layers[i].window;
            let same_angles = [1, self.max_ctx, self.max_ctx.saturating_mul(2)]
                .iter()
                .all(|&ctx_len| self.angles(i, ctx_len) == read.angles(i, ctx_len));
            if !same_window || !same_angles {
                let what = match same_window {
                    true => "rotary embedding",
                    false => "attention window",
                };
                return Err(PlanError::inexpressible(
                    what,
                    FORMAT,
                    format!("that of layer {i} of a {} model", self.family.name),
                ));
            }
        }
        let rest = |config: &ModelConfig| ModelConfig {
            layers: Vec::new(),
            ropes: Vec::new(),
            ..config.clone()
        };
        let (ours, theirs) = (rest(self), rest(&read));
        if ours == theirs {
            Ok(())
        } else {
            Err(PlanError::inexpressible(
                "model",
                FORMAT,
                format!("{ours:?} would be read as {theirs:?}"),
            ))
        }
    }

    /// The rotation of layer `i` in a session of `ctx_len` positions: elements of a head, and the angles of
    /// the second position. `None` if nothing is rotated.
    pub(super) fn angles(&self, i: usize, ctx_len: usize) -> Option<(usize, Vec<f32>, Vec<f32>)> {
        let rope = &self.ropes[self.layers[i].rope?];
        let angles = Rope::new(rope, ctx_len).angles(1, 1);
        let turns = angles.sin.iter().any(|&sin| sin != 0.0);
        turns.then_some((angles.dim, angles.cos, angles.sin))
    }
}

/// The shortest decimal that rounds to `value`.
fn shortest(value: f32) -> f64 {
    let decimal = value.to_string();
    decimal.parse().expect("a float is written as a number")
}

/// The part of a head that is rotated, if the frequencies of the rest are divided away.
fn still_part(rope: &RopeConfig) -> Option<f64> {
    let RopeScaling::Factors(factors) = &rope.scaling else {
        return None;
    };
    let n_rotated = factors.iter().take_while(|&&factor| factor == 1.0).count();
    let are_still = factors[n_rotated..].iter().all(|&factor| factor == STILL);
    are_still.then(|| n_rotated as f64 / factors.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::model;
    use sterna_kernels::rope::RopeLayout;

    #[test]
    fn every_family_and_scaling_is_said_so_that_it_is_read_back() {
        for family in [
            json!({"model_type": "llama"}),
            json!({"model_type": "llama", "weight_bits": 1}),
            json!({"model_type": "bitnet"}),
            json!({"model_type": "mistral", "sliding_window": 64}),
            json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 32,
                   "max_window_layers": 2}),
            json!({"model_type": "qwen3"}),
            json!({"model_type": "gemma2", "query_pre_attn_scalar": 24,
                   "attn_logit_softcapping": 50.0}),
            json!({"model_type": "gemma3_text", "sliding_window": 16}),
            json!({"model_type": "phi3"}),
            json!({"model_type": "smollm3"}),
        ] {
            for rope in [
                json!({}),
                json!({"rope_theta": 123456.789}),
                json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
                json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}),
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false}}),
                json!({"rope_scaling": {"rope_type": "llama3", "factor": 32.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128}}),
                json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 1],
                    "long_factor": [1.1, 1.7, 2.5, 9.25], "partial_rotary_factor": 0.5,
                    "original_max_position_embeddings": 128}}),
            ] {
                // Phi's configurations use this word differently.
                let phi = family["model_type"] == "phi3";
                if phi && rope["rope_scaling"]["rope_type"] == "yarn" {
                    continue;
                }
                let mut json = family.clone();
                json.as_object_mut()
                    .unwrap()
                    .extend(rope.as_object().unwrap().clone());
                let config = model(&json);
                config.to_hf(false).unwrap();
            }
        }
    }

    #[test]
    fn whole_scalars_of_queries_are_said_as_such() {
        for scalar in [24, 168, 256] {
            let config = model(&json!({"model_type": "gemma2", "query_pre_attn_scalar": scalar}));
            let hf = config.to_hf(true).unwrap();
            assert_eq!(hf["query_pre_attn_scalar"], json!(scalar));
        }
        let config = model(&json!({"model_type": "gemma2", "query_pre_attn_scalar": 10.7}));
        let scalar = config.query_scalar().as_f64().unwrap();
        assert_eq!((1.0 / scalar.sqrt()) as f32, config.attn_scale);
    }

    #[test]
    fn divisors_and_layers_that_stand_still_are_said_in_other_words() {
        let mut config = model(&json!({"model_type": "llama"}));
        config.ropes[0].scaling =
            RopeScaling::Factors(vec![1.0, 1.5, 2.0, 3.3, 5.0, 7.0, 8.0, 32.0]);
        config.ropes[0].layout = RopeLayout::Pairs;
        let hf = config.to_hf(true).unwrap();
        assert_eq!(
            hf["rope_scaling"]["long_factor"][3],
            json!(3.299_999_952_316_284)
        );
        assert_eq!(hf["tie_word_embeddings"], json!(true));
        config.ropes[0].dim = 8;
        config.ropes[0].scaling = RopeScaling::None;
        assert_eq!(
            config.to_hf(true).unwrap()["rope_scaling"]["partial_rotary_factor"],
            json!(0.5)
        );

        let mut config = model(&json!({"model_type": "smollm3"}));
        config.ropes.push(RopeConfig {
            scaling: RopeScaling::Linear { factor: f64::MAX },
            ..config.ropes[0].clone()
        });
        config.layers[3].rope = Some(1);
        let hf = config.to_hf(true).unwrap();
        assert_eq!(hf["no_rope_layers"], json!([1, 1, 1, 0]));
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        let mut config = model(&json!({"model_type": "llama"}));
        config.layers[2].window = Some(7);
        let message = config.to_hf(false).unwrap_err().to_string();
        assert!(message.contains("attention window"), "{message}");
        let mut config = model(&json!({"model_type": "llama"}));
        config.attn_scale *= 2.0;
        assert!(config.to_hf(false).is_err());
    }
}
