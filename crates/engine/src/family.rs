//! The model families: what is specific to each, as data.
//!
//! Everything else is shared. Whether a model has biases, query-key norms, sub-norms or a separate output
//! head follows from its tensors; `docs/families.md` has the sources.

use sterna_kernels::activation::Activation;
use sterna_kernels::delta::HeadOrder;
use sterna_kernels::experts::Gating;
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::rwkv::Generation;

use crate::config::MixerKind;

/// What distinguishes a family of models that share a graph.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// Name used in messages.
    pub name: &'static str,
    /// GGUF `general.architecture` values.
    pub(crate) gguf: &'static [&'static str],
    /// Hugging Face `model_type` values.
    pub(crate) hf: &'static [&'static str],
    /// Default activation.
    pub(crate) activation: Activation,
    /// Rotary layout of GGUF files; Hugging Face weights always rotate halves.
    pub(crate) gguf_rope: RopeLayout,
    /// GGUF files have queries, keys and values in one tensor, and gate and up in another.
    pub(crate) gguf_fused: bool,
    /// Tensors that every layer must have besides the common ones.
    pub(crate) parts: Parts,
    /// Gemma's conventions: embeddings times the square root of the width; in Hugging Face files, the attention
    /// scale in `query_pre_attn_scalar`.
    pub(crate) gemma: bool,
    /// Gemma 4's: layers without a window may have wider heads, the last layers may share keys and values, each layer may
    /// have an input of its own, and scores aren't scaled.
    pub(crate) gemma4: bool,
    /// Norm weights in Hugging Face files are stored less one.
    pub(crate) norms_less_one: bool,
    /// Every linear layer is a BitLinear, however it is stored.
    pub(crate) bit_linear: bool,
    /// Which layers are windowed, where the file has a window but no pattern.
    pub(crate) windows: WindowPattern,
    /// Defaults of a Hugging Face configuration.
    pub(crate) hf_defaults: HfDefaults,
    /// Whether the ends of YaRN's ramp are rounded to whole dimensions, which GGUF files don't say.
    pub(crate) gguf_yarn_truncates: bool,
    /// Default soft caps on attention scores and logits for GGUF files.
    pub(crate) gguf_softcaps: Option<(f32, f32)>,
    /// Default window for GGUF files.
    pub(crate) gguf_window: Option<usize>,
    /// Rotary base of windowed layers, where it differs from the others'.
    pub(crate) local_rope_base: Option<f64>,
    /// Every n-th layer has no rotary embedding.
    pub(crate) no_rope_interval: Option<usize>,
    /// Number of layers of the one size whose attention scale follows from width over heads, not from the
    /// head dimension.
    pub(crate) wide_scale_layers: Option<usize>,
    /// The norm before the output head in GGUF files.
    pub(crate) gguf_output_norm: &'static str,
    /// What the norm before the feed-forward block is called in GGUF files.
    pub(crate) ffn_norm: &'static str,
    /// Blocks have experts, all or some.
    pub(crate) mixture: Option<Mixture>,
    /// Blocks have a gated delta net, all or some: the order of its value heads in GGUF files.
    pub(crate) delta: Option<HeadOrder>,
    /// Blocks have a selective state space, all or some.
    pub(crate) ssm: Option<SsmFamily>,
    /// Blocks have time mixing and channel mixing, and nothing else.
    pub(crate) rwkv: Option<Generation>,
    /// Attention is latent.
    pub(crate) latent: bool,
    /// Positions are learned, all positions of a text attend to all, norms come after blocks, networks have no gates, and
    /// no head continues a text.
    pub(crate) encoder: bool,
}

/// What families with selective state spaces differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SsmFamily {
    /// Mamba-2's in most layers, attention in others, networks in all; factors on many things.
    Granite,
    /// Mamba-2's and attention side by side in all layers, networks in all; factors on many things.
    FalconH1,
    /// Mamba-2's, and nothing else.
    Mamba2,
    /// The first Mamba's, and nothing else.
    Mamba,
    /// The first Mamba's in most layers, attention in others, networks or experts in all.
    Jamba,
}

impl SsmFamily {
    /// Whether there is nothing else: no attention, and no networks.
    pub(crate) fn is_alone(self) -> bool {
        matches!(self, SsmFamily::Mamba | SsmFamily::Mamba2)
    }

    /// Whether state spaces are those of the first Mamba.
    pub(crate) fn is_first(self) -> bool {
        matches!(self, SsmFamily::Mamba | SsmFamily::Jamba)
    }

    /// What mixes positions where attention doesn't alone.
    pub(crate) fn mixer(self) -> MixerKind {
        match self {
            SsmFamily::Granite | SsmFamily::Mamba2 => MixerKind::Ssm,
            SsmFamily::Mamba | SsmFamily::Jamba => MixerKind::Mamba,
            SsmFamily::FalconH1 => MixerKind::AttentionAndSsm,
        }
    }
}

/// Tensors beyond attention and feed-forward projections and their input norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Norms of queries and keys.
    pub(crate) qk_norms: QkNorms,
    /// Norms before the output projection and the down projection.
    pub(crate) sub_norms: bool,
    /// Norms of the outputs of attention and feed-forward, before the residual.
    pub(crate) post_norms: bool,
    /// Biases of the query, key and value projections.
    pub(crate) qkv_biases: bool,
    /// Every query is followed by a gate of what attention gives for it.
    pub(crate) output_gates: bool,
    /// Each head has the score of what gives nothing.
    pub(crate) sinks: bool,
    /// Each head of values is normalised, without weights.
    pub(crate) value_norms: bool,
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorms {
    /// None that a family must have.
    None,
    /// Of each head.
    Heads,
    /// Of all heads of a position together.
    Whole,
}

/// What is specific to the mixtures of experts of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mixture {
    /// Whether the probabilities of a row's experts add up to 1, in GGUF files, which don't say so.
    pub(crate) gguf_renormalised: bool,
    /// The default of `norm_topk_prob`; `None` if they do, whatever the configuration says.
    pub(crate) hf_renormalised: Option<bool>,
    /// What makes probabilities of scores.
    pub(crate) gating: Gating,
    /// Checkpoints have matrices of all experts in tensors whose rows are inputs, with gates and ups in turn, or MXFP4.
    pub(crate) hf_input_rows: bool,
}

/// Which layers are windowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowPattern {
    /// None, whatever a configuration says.
    None,
    /// All of them.
    All,
    /// All but every n-th.
    AllButEvery(usize),
    /// Those from `max_window_layers` on, if the configuration enables windows.
    Last,
    /// Those without rotary embedding, if the configuration enables windows.
    Unrotated,
}

/// Values that Transformers fills in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HfDefaults {
    pub(crate) norm_eps: f64,
    pub(crate) rope_base: f64,
    pub(crate) n_heads: Option<usize>,
    /// As many as heads if `None`.
    pub(crate) n_kv_heads: Option<usize>,
    pub(crate) window: Option<usize>,
    /// Width over heads if `None`.
    pub(crate) head_dim: Option<usize>,
    /// The part of a head that is rotated; all of it, whatever a configuration says, if `None`.
    pub(crate) partial_rotary: Option<f64>,
    pub(crate) max_ctx: usize,
    /// Whether the embedding table is also the output head.
    pub(crate) tied: bool,
}

const PLAIN: Parts = Parts {
    qk_norms: QkNorms::None,
    sub_norms: false,
    post_norms: false,
    qkv_biases: false,
    output_gates: false,
    sinks: false,
    value_norms: false,
};

const HF_DEFAULTS: HfDefaults = HfDefaults {
    norm_eps: 1e-6,
    rope_base: 10_000.0,
    n_heads: None,
    n_kv_heads: None,
    window: None,
    head_dim: None,
    partial_rotary: None,
    max_ctx: 2048,
    tied: false,
};

const LLAMA: Family = Family {
    name: "llama",
    gguf: &["llama"],
    hf: &["llama"],
    activation: Activation::Silu,
    gguf_rope: RopeLayout::Pairs,
    gguf_fused: false,
    parts: PLAIN,
    gemma: false,
    gemma4: false,
    norms_less_one: false,
    bit_linear: false,
    windows: WindowPattern::None,
    hf_defaults: HF_DEFAULTS,
    gguf_yarn_truncates: true,
    gguf_softcaps: None,
    gguf_window: None,
    local_rope_base: None,
    no_rope_interval: None,
    wide_scale_layers: None,
    gguf_output_norm: "output_norm",
    ffn_norm: "ffn_norm",
    mixture: None,
    delta: None,
    ssm: None,
    rwkv: None,
    latent: false,
    encoder: false,
};

/// Encoders of whole texts.
const BERT: Family = Family {
    name: "bert",
    gguf: &["bert"],
    hf: &["bert"],
    activation: Activation::GeluErf,
    gguf_rope: RopeLayout::Halves,
    parts: Parts {
        qkv_biases: true,
        ..PLAIN
    },
    ffn_norm: "layer_output_norm",
    hf_defaults: HfDefaults {
        norm_eps: 1e-12,
        max_ctx: 512,
        tied: true,
        ..HF_DEFAULTS
    },
    encoder: true,
    ..LLAMA
};

/// Time mixing and channel mixing.
const RWKV: Family = Family {
    name: "rwkv-4",
    // None reads the fourth and the fifth.
    gguf: &[],
    hf: &["rwkv"],
    rwkv: Some(Generation::V4),
    activation: Activation::Relu2,
    gguf_rope: RopeLayout::Halves,
    ffn_norm: "attn_norm_2",
    hf_defaults: HfDefaults {
        norm_eps: 1e-5,
        ..HF_DEFAULTS
    },
    ..LLAMA
};

/// Short convolutions in most layers.
const LFM2: Family = Family {
    name: "lfm2",
    gguf: &["lfm2"],
    hf: &["lfm2"],
    gguf_rope: RopeLayout::Halves,
    gguf_output_norm: "token_embd_norm",
    hf_defaults: HfDefaults {
        norm_eps: 1e-5,
        rope_base: 1_000_000.0,
        n_heads: Some(32),
        n_kv_heads: Some(8),
        max_ctx: 128_000,
        tied: true,
        ..HF_DEFAULTS
    },
    parts: Parts {
        qk_norms: QkNorms::Heads,
        ..PLAIN
    },
    ..LLAMA
};

const QWEN3: Family = Family {
    name: "qwen3",
    gguf: &["qwen3"],
    hf: &["qwen3"],
    gguf_rope: RopeLayout::Halves,
    windows: WindowPattern::Last,
    hf_defaults: HfDefaults {
        head_dim: Some(128),
        max_ctx: 32_768,
        ..HF_DEFAULTS
    },
    parts: Parts {
        qk_norms: QkNorms::Heads,
        ..PLAIN
    },
    ..LLAMA
};

/// Gated delta nets in three layers of four.
const QWEN35: Family = Family {
    name: "qwen3.5",
    gguf: &["qwen35"],
    hf: &["qwen3_5_text", "qwen3_5"],
    windows: WindowPattern::None,
    norms_less_one: true,
    ffn_norm: "post_attention_norm",
    hf_defaults: HfDefaults {
        head_dim: Some(256),
        partial_rotary: Some(0.25),
        n_kv_heads: Some(2),
        max_ctx: 32_768,
        ..HF_DEFAULTS
    },
    parts: Parts {
        qk_norms: QkNorms::Heads,
        output_gates: true,
        ..PLAIN
    },
    delta: Some(HeadOrder::Tiled),
    ..QWEN3
};

/// BitNet b1.58: sub-norms, every projection ternary.
const BITNET: Family = Family {
    name: "bitnet",
    gguf: &["bitnet-b1.58", "bitnet-25"],
    hf: &["bitnet"],
    activation: Activation::Relu2,
    gguf_rope: RopeLayout::Halves,
    parts: Parts {
        sub_norms: true,
        ..PLAIN
    },
    bit_linear: true,
    hf_defaults: HfDefaults {
        norm_eps: 1e-5,
        rope_base: 500_000.0,
        ..HF_DEFAULTS
    },
    ..LLAMA
};

const GEMMA2: Family = Family {
    name: "gemma2",
    gguf: &["gemma2"],
    hf: &["gemma2"],
    activation: Activation::GeluTanh,
    gguf_rope: RopeLayout::Halves,
    parts: Parts {
        post_norms: true,
        ..PLAIN
    },
    gemma: true,
    norms_less_one: true,
    windows: WindowPattern::AllButEvery(2),
    hf_defaults: HfDefaults {
        head_dim: Some(256),
        n_heads: Some(8),
        n_kv_heads: Some(4),
        window: Some(4096),
        max_ctx: 8192,
        tied: true,
        ..HF_DEFAULTS
    },
    gguf_softcaps: Some((50.0, 30.0)),
    gguf_window: Some(4096),
    wide_scale_layers: Some(46),
    ..LLAMA
};

const GEMMA4: Family = Family {
    name: "gemma4",
    gguf: &["gemma4"],
    hf: &["gemma4_text", "gemma4"],
    parts: Parts {
        qk_norms: QkNorms::Heads,
        post_norms: true,
        value_norms: true,
        ..PLAIN
    },
    gemma4: true,
    norms_less_one: false,
    windows: WindowPattern::AllButEvery(6),
    local_rope_base: Some(10_000.0),
    hf_defaults: HfDefaults {
        rope_base: 1_000_000.0,
        window: Some(512),
        max_ctx: 131_072,
        ..GEMMA2.hf_defaults
    },
    gguf_softcaps: None,
    gguf_window: None,
    wide_scale_layers: None,
    ..GEMMA2
};

/// Nothing but state spaces.
const MAMBA: Family = Family {
    name: "mamba",
    gguf: &["mamba"],
    hf: &["mamba"],
    ssm: Some(SsmFamily::Mamba),
    gguf_rope: RopeLayout::Halves,
    hf_defaults: HfDefaults {
        norm_eps: 1e-5,
        max_ctx: 1 << 20,
        tied: true,
        ..HF_DEFAULTS
    },
    ..LLAMA
};

/// Latent attention, and experts in all but the first layers.
const DEEPSEEK_V2: Family = Family {
    name: "deepseek-v2",
    gguf: &["deepseek2"],
    hf: &["deepseek_v2"],
    latent: true,
    hf_defaults: HfDefaults {
        n_heads: Some(32),
        ..HF_DEFAULTS
    },
    mixture: Some(Mixture {
        gguf_renormalised: false,
        hf_renormalised: Some(false),
        gating: Gating::Softmax,
        hf_input_rows: false,
    }),
    ..LLAMA
};

/// Experts with biases, heads with sinks, a window in every other layer.
const GPT_OSS: Family = Family {
    name: "gpt-oss",
    gguf: &["gpt-oss"],
    hf: &["gpt_oss"],
    activation: Activation::ClampedSwiglu,
    gguf_rope: RopeLayout::Halves,
    parts: Parts {
        qkv_biases: true,
        sinks: true,
        ..PLAIN
    },
    windows: WindowPattern::AllButEvery(2),
    ffn_norm: "post_attention_norm",
    gguf_yarn_truncates: false,
    hf_defaults: HfDefaults {
        norm_eps: 1e-5,
        rope_base: 150_000.0,
        n_heads: Some(64),
        n_kv_heads: Some(8),
        window: Some(128),
        head_dim: Some(64),
        max_ctx: 131_072,
        ..HF_DEFAULTS
    },
    mixture: Some(Mixture {
        gguf_renormalised: true,
        hf_renormalised: None,
        gating: Gating::Softmax,
        hf_input_rows: true,
    }),
    ..LLAMA
};

static FAMILIES: [Family; 32] = [
    LLAMA,
    BERT,
    GPT_OSS,
    GEMMA4,
    BITNET,
    // The community's first BitNet models (0.7B, 3B) have the same graph with another activation.
    Family {
        name: "bitnet (SiLU)",
        gguf: &["bitnet"],
        hf: &[],
        activation: Activation::Silu,
        ..BITNET
    },
    Family {
        name: "mistral",
        gguf: &[],
        hf: &["mistral"],
        windows: WindowPattern::All,
        hf_defaults: HfDefaults {
            max_ctx: 131_072,
            ..HF_DEFAULTS
        },
        ..LLAMA
    },
    Family {
        name: "qwen2",
        gguf: &["qwen2"],
        hf: &["qwen2"],
        parts: Parts {
            qkv_biases: true,
            ..PLAIN
        },
        gguf_rope: RopeLayout::Halves,
        windows: WindowPattern::Last,
        hf_defaults: HfDefaults {
            max_ctx: 32_768,
            ..HF_DEFAULTS
        },
        ..LLAMA
    },
    QWEN3,
    LFM2,
    Family {
        name: "lfm2-moe",
        gguf: &["lfm2moe"],
        hf: &["lfm2_moe"],
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: Some(true),
            gating: Gating::Sigmoid,
            hf_input_rows: false,
        }),
        ..LFM2
    },
    Family {
        name: "qwen3-moe",
        gguf: &["qwen3moe"],
        hf: &["qwen3_moe"],
        hf_defaults: HfDefaults {
            head_dim: None,
            max_ctx: 32_768,
            n_kv_heads: Some(4),
            ..HF_DEFAULTS
        },
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: Some(false),
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..QWEN3
    },
    Family {
        name: "mixtral",
        // Called llama there.
        gguf: &[],
        hf: &["mixtral"],
        windows: WindowPattern::All,
        hf_defaults: HfDefaults {
            norm_eps: 1e-5,
            rope_base: 1_000_000.0,
            n_kv_heads: Some(8),
            max_ctx: 131_072,
            ..HF_DEFAULTS
        },
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: None,
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..LLAMA
    },
    Family {
        name: "olmoe",
        gguf: &["olmoe"],
        hf: &["olmoe"],
        gguf_rope: RopeLayout::Halves,
        hf_defaults: HfDefaults {
            norm_eps: 1e-5,
            max_ctx: 4096,
            ..HF_DEFAULTS
        },
        parts: Parts {
            qk_norms: QkNorms::Whole,
            ..PLAIN
        },
        mixture: Some(Mixture {
            gguf_renormalised: false,
            hf_renormalised: Some(false),
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..LLAMA
    },
    // Granite 4: state spaces in most layers, a network for every row, and experts in some models.
    Family {
        name: "granite-hybrid",
        gguf: &["granitehybrid"],
        hf: &["granitemoehybrid"],
        ssm: Some(SsmFamily::Granite),
        hf_defaults: HfDefaults {
            n_heads: Some(32),
            max_ctx: 2048,
            ..HF_DEFAULTS
        },
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: None,
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..LLAMA
    },
    RWKV,
    Family {
        name: "rwkv-5",
        hf: &["rwkv5"],
        rwkv: Some(Generation::V5),
        ..RWKV
    },
    Family {
        name: "rwkv-6",
        gguf: &["rwkv6"],
        hf: &["rwkv6"],
        rwkv: Some(Generation::V6),
        ..RWKV
    },
    Family {
        name: "rwkv-7",
        gguf: &["rwkv7"],
        hf: &["rwkv7"],
        rwkv: Some(Generation::V7),
        ..RWKV
    },
    DEEPSEEK_V2,
    Family {
        name: "deepseek-v3",
        // Called as the second there.
        gguf: &[],
        hf: &["deepseek_v3"],
        hf_defaults: HfDefaults {
            n_heads: Some(128),
            max_ctx: 4096,
            ..HF_DEFAULTS
        },
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: Some(true),
            gating: Gating::Sigmoid,
            hf_input_rows: false,
        }),
        ..DEEPSEEK_V2
    },
    MAMBA,
    Family {
        name: "mamba2",
        gguf: &["mamba2"],
        hf: &["mamba2"],
        ssm: Some(SsmFamily::Mamba2),
        hf_defaults: HfDefaults {
            tied: false,
            ..MAMBA.hf_defaults
        },
        ..MAMBA
    },
    Family {
        name: "jamba",
        gguf: &["jamba"],
        hf: &["jamba"],
        ssm: Some(SsmFamily::Jamba),
        gguf_rope: RopeLayout::Halves,
        hf_defaults: HfDefaults {
            n_heads: Some(32),
            n_kv_heads: Some(8),
            max_ctx: 262_144,
            ..HF_DEFAULTS
        },
        mixture: Some(Mixture {
            gguf_renormalised: false,
            hf_renormalised: Some(false),
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..LLAMA
    },
    Family {
        name: "falcon-h1",
        gguf: &["falcon-h1"],
        hf: &["falcon_h1"],
        ssm: Some(SsmFamily::FalconH1),
        gguf_rope: RopeLayout::Halves,
        hf_defaults: HfDefaults {
            norm_eps: 1e-5,
            rope_base: 100_000.0,
            n_heads: Some(32),
            n_kv_heads: Some(8),
            max_ctx: 8192,
            ..HF_DEFAULTS
        },
        ..LLAMA
    },
    QWEN35,
    Family {
        name: "qwen3.5-moe",
        gguf: &["qwen35moe"],
        hf: &["qwen3_5_moe_text", "qwen3_5_moe"],
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: None,
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        ..QWEN35
    },
    Family {
        name: "qwen3-next",
        gguf: &["qwen3next"],
        hf: &["qwen3_next"],
        mixture: Some(Mixture {
            gguf_renormalised: true,
            hf_renormalised: Some(true),
            gating: Gating::Softmax,
            hf_input_rows: false,
        }),
        delta: Some(HeadOrder::Grouped),
        ..QWEN35
    },
    GEMMA2,
    Family {
        name: "gemma3",
        gguf: &["gemma3"],
        hf: &["gemma3_text", "gemma3"],
        parts: Parts {
            qk_norms: QkNorms::Heads,
            post_norms: true,
            ..PLAIN
        },
        windows: WindowPattern::AllButEvery(6),
        hf_defaults: HfDefaults {
            rope_base: 1_000_000.0,
            max_ctx: 131_072,
            ..GEMMA2.hf_defaults
        },
        gguf_softcaps: None,
        gguf_window: None,
        local_rope_base: Some(10_000.0),
        wide_scale_layers: Some(62),
        ..GEMMA2
    },
    Family {
        name: "phi3",
        gguf: &["phi3"],
        hf: &["phi3"],
        windows: WindowPattern::All,
        gguf_rope: RopeLayout::Halves,
        gguf_fused: true,
        hf_defaults: HfDefaults {
            norm_eps: 1e-5,
            max_ctx: 4096,
            ..HF_DEFAULTS
        },
        ..LLAMA
    },
    Family {
        name: "smollm3",
        gguf: &["smollm3"],
        hf: &["smollm3"],
        windows: WindowPattern::Unrotated,
        hf_defaults: HfDefaults {
            rope_base: 2_000_000.0,
            max_ctx: 32_768,
            tied: true,
            ..HF_DEFAULTS
        },
        no_rope_interval: Some(4),
        ..LLAMA
    },
];

impl Family {
    /// Whether no block has attention.
    pub(crate) fn is_headless(&self) -> bool {
        self.rwkv.is_some() || self.ssm.is_some_and(SsmFamily::is_alone)
    }

    /// Whether norms of the residual stream subtract the mean and have biases.
    pub(crate) fn has_layer_norms(&self) -> bool {
        self.rwkv.is_some() || self.encoder
    }

    /// The family of a GGUF architecture.
    pub(crate) fn of_gguf(architecture: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|f| f.gguf.contains(&architecture))
    }

    /// The family of a Hugging Face model type.
    pub(crate) fn of_hf(model_type: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|f| f.hf.contains(&model_type))
    }

    /// The Hugging Face `model_type` of its checkpoints.
    pub(crate) fn hf_name(&self) -> &'static str {
        // The first BitNet models are declared as llama.
        self.hf.first().copied().unwrap_or("llama")
    }

    /// The GGUF architecture in files of its models.
    pub(crate) fn gguf_name(&self) -> &'static str {
        // Mistral's models are Llama's there.
        if self.latent {
            return DEEPSEEK_V2.gguf[0];
        }
        self.gguf.first().copied().unwrap_or("llama")
    }

    /// The family of Llama-like GGUF files with experts.
    pub(crate) fn mixtral() -> &'static Family {
        Family::of_hf("mixtral").expect("it is in the table")
    }

    /// The family of DeepSeek's GGUF files whose experts are chosen by sigmoids.
    pub(crate) fn deepseek_v3() -> &'static Family {
        Family::of_hf("deepseek_v3").expect("it is in the table")
    }

    /// The community's first BitNet models.
    pub(crate) fn first_bitnet() -> &'static Family {
        Family::of_gguf("bitnet").expect("it is in the table")
    }

    /// Every supported GGUF architecture, for messages.
    pub(crate) fn gguf_architectures() -> String {
        list(FAMILIES.iter().flat_map(|f| f.gguf))
    }

    /// Every supported Hugging Face model type, for messages.
    pub(crate) fn hf_model_types() -> String {
        list(FAMILIES.iter().flat_map(|f| f.hf))
    }
}

fn list<'a>(names: impl Iterator<Item = &'a &'static str>) -> String {
    names.copied().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_belongs_to_one_family() {
        let mut names: Vec<_> = FAMILIES.iter().flat_map(|f| f.gguf).collect();
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        let mut names: Vec<_> = FAMILIES.iter().flat_map(|f| f.hf).collect();
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
