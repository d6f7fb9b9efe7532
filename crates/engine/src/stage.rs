//! Which operation of a forward pass is which.

use std::fmt;

/// Where in a forward pass an operation is.
///
/// Results don't depend on it: it is for backends that measure or report what they compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stage {
    /// The transformer block, from 0; `None` before the first and after the last.
    pub layer: Option<usize>,
    /// The operation.
    pub operation: Operation,
}

/// What is computed at a [`Stage`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// The embedding lookup.
    Embedding,
    /// What encoders add to embeddings.
    Positions,
    /// The norm of embeddings.
    EmbedNorm,
    /// The norm before attention.
    AttnNorm,
    /// The norm of the input of one linear layer.
    InputNorm(LinearLayer),
    /// The product of a linear layer.
    Product(LinearLayer),
    /// The update of an adapter to a product.
    Adapter(LinearLayer),
    /// The bias added to a product.
    Bias(LinearLayer),
    /// The factor on a product.
    Scale(LinearLayer),
    /// The norm of all queries or all keys of a position together.
    WholeNorm(LinearLayer),
    /// Attention, with the norms and rotations of its heads.
    Attention,
    /// Queries and keys of latent attention.
    LatentQueries,
    /// The values that heads of latent attention give.
    LatentValues,
    /// A short convolution, with its gates.
    Convolution,
    /// A gated delta net, with its convolution, norms and gates.
    DeltaNet,
    /// A selective state space, with its convolution, norm and gates.
    Ssm,
    /// Time mixing of RWKV, with its norm and gates.
    TimeMix,
    /// What is made of the input of a linear layer of RWKV.
    Shift(LinearLayer),
    /// The norm before the output projection.
    AttnSubNorm,
    /// The norm of the output of attention, before the residual.
    PostAttnNorm,
    /// The factor on the output of attention, before the residual.
    AttnScale,
    /// The residual after attention.
    AttnResidual,
    /// The norm before the feed-forward network.
    FfnNorm,
    /// The activation of the gate, times up.
    Activation,
    /// The norm before the down projection.
    FfnSubNorm,
    /// The sum of what chosen experts give and the shared one.
    SharedExpert,
    /// The norm of the output of the feed-forward network, before the residual.
    PostFfnNorm,
    /// The factor on the output of the feed-forward network, before the residual.
    FfnScale,
    /// The residual after the feed-forward network, which ends a block.
    FfnResidual,
    /// What every layer is given besides the residual stream.
    LayerInputs,
    /// What a layer makes of its own input.
    LayerInput,
    /// The residual after that.
    LayerInputResidual,
    /// The factor on what leaves a block.
    LayerScale,
    /// The norms of the heads of values.
    ValueNorm,
    /// A whole block.
    Layer,
    /// The norm before the output head.
    OutputNorm,
    /// The factor on logits.
    LogitScale,
    /// The soft cap on logits.
    LogitSoftcap,
}

/// The linear layers of a model: seven in each transformer block, others for those of attention where a convolution
/// or a delta net takes its place, the router of its experts where it has some, and the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The names of GGUF.
pub enum LinearLayer {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    /// What queries of latent attention follow from.
    QDown,
    /// The latent vector that keys and values follow from.
    Latent,
    /// The input of a convolution and its gates.
    ConvIn,
    /// The output projection of a convolution.
    ConvOut,
    /// Queries, keys and values of a delta net.
    DeltaQkv,
    /// The gates of what a delta net gives.
    DeltaGate,
    /// What the decays of a delta net follow from.
    DeltaAlpha,
    /// How far a delta net moves its state.
    DeltaBeta,
    /// The output projection of a delta net.
    DeltaOut,
    /// The gates of what a state space gives.
    SsmGate,
    /// Inputs of a state space, with `B` and `C`.
    SsmIn,
    /// What the time steps of a state space follow from.
    SsmDt,
    /// The output projection of a state space.
    SsmOut,
    /// `B` of a state space of the first Mamba.
    SsmB,
    /// `C` of it.
    SsmC,
    /// What the low rank of its time steps becomes.
    SsmDtUp,
    /// Receptances of time mixing.
    TimeR,
    /// Its keys.
    TimeK,
    /// Its values.
    TimeV,
    /// Its gates.
    TimeGate,
    /// Its decays.
    TimeDecay,
    /// How much of what its keys hold is taken away.
    TimeRate,
    /// How far its values are those of the first layer.
    TimeResidual,
    /// What is added to the factors of its mixes.
    TimeShares,
    /// Its output projection.
    TimeOut,
    /// Of the expert of every row.
    SharedGate,
    SharedUp,
    SharedDown,
    /// How much the expert of every row counts.
    SharedScore,
    /// What all layers' own inputs follow from.
    LayerInputs,
    /// The gates of a layer's own input.
    LayerInputGate,
    /// What the gated input gives.
    LayerInputOut,
    /// The router, which computes the scores of experts.
    Router,
    /// The output head, which computes logits.
    Head,
}

impl LinearLayer {
    fn name(self) -> &'static str {
        match self {
            LinearLayer::Q => "q",
            LinearLayer::K => "k",
            LinearLayer::V => "v",
            LinearLayer::O => "o",
            LinearLayer::Gate => "gate",
            LinearLayer::Up => "up",
            LinearLayer::Down => "down",
            LinearLayer::QDown => "q_down",
            LinearLayer::Latent => "latent",
            LinearLayer::ConvIn => "conv_in",
            LinearLayer::ConvOut => "conv_out",
            LinearLayer::DeltaQkv => "delta_qkv",
            LinearLayer::DeltaGate => "delta_gate",
            LinearLayer::DeltaAlpha => "delta_alpha",
            LinearLayer::DeltaBeta => "delta_beta",
            LinearLayer::DeltaOut => "delta_out",
            LinearLayer::SsmGate => "ssm_gate",
            LinearLayer::SsmIn => "ssm_in",
            LinearLayer::SsmDt => "ssm_dt",
            LinearLayer::SsmOut => "ssm_out",
            LinearLayer::SsmB => "ssm_b",
            LinearLayer::SsmC => "ssm_c",
            LinearLayer::SsmDtUp => "ssm_dt_up",
            LinearLayer::TimeR => "time_r",
            LinearLayer::TimeK => "time_k",
            LinearLayer::TimeV => "time_v",
            LinearLayer::TimeGate => "time_gate",
            LinearLayer::TimeDecay => "time_decay",
            LinearLayer::TimeRate => "time_rate",
            LinearLayer::TimeResidual => "time_residual",
            LinearLayer::TimeShares => "time_shares",
            LinearLayer::TimeOut => "time_out",
            LinearLayer::SharedGate => "shared_gate",
            LinearLayer::SharedUp => "shared_up",
            LinearLayer::SharedDown => "shared_down",
            LinearLayer::SharedScore => "shared_score",
            LinearLayer::LayerInputs => "layer_inputs",
            LinearLayer::LayerInputGate => "layer_input_gate",
            LinearLayer::LayerInputOut => "layer_input_out",
            LinearLayer::Router => "router",
            LinearLayer::Head => "logits",
        }
    }
}

impl Operation {
    /// Whether it computes logits.
    pub fn is_logits(self) -> bool {
        use Operation::{Adapter, Bias, LogitScale, LogitSoftcap, Product};
        matches!(
            self,
            Product(LinearLayer::Head)
                | Bias(LinearLayer::Head)
                | Adapter(LinearLayer::Head)
                | LogitScale
                | LogitSoftcap
        )
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, suffix) = match self {
            Operation::Embedding => ("embedding", ""),
            Operation::Positions => ("positions", ""),
            Operation::EmbedNorm => ("embedding_norm", ""),
            Operation::AttnNorm => ("attn_norm", ""),
            Operation::InputNorm(linear) => (linear.name(), "_input_norm"),
            Operation::Product(linear) => (linear.name(), ""),
            Operation::Adapter(linear) => (linear.name(), "_adapter"),
            Operation::Bias(linear) => (linear.name(), "_bias"),
            Operation::Scale(linear) => (linear.name(), "_scale"),
            Operation::WholeNorm(linear) => (linear.name(), "_norm"),
            Operation::Attention => ("attention", ""),
            Operation::LatentQueries => ("latent_queries", ""),
            Operation::LatentValues => ("latent_values", ""),
            Operation::Convolution => ("convolution", ""),
            Operation::DeltaNet => ("delta_net", ""),
            Operation::Ssm => ("ssm", ""),
            Operation::TimeMix => ("time_mix", ""),
            Operation::Shift(linear) => (linear.name(), "_shift"),
            Operation::AttnScale => ("attn_scale", ""),
            Operation::FfnScale => ("ffn_scale", ""),
            Operation::LogitScale => ("logits_scale", ""),
            Operation::AttnSubNorm => ("attn_sub_norm", ""),
            Operation::PostAttnNorm => ("post_attn_norm", ""),
            Operation::AttnResidual => ("attn_residual", ""),
            Operation::FfnNorm => ("ffn_norm", ""),
            Operation::Activation => ("activation", ""),
            Operation::FfnSubNorm => ("ffn_sub_norm", ""),
            Operation::SharedExpert => ("shared_expert", ""),
            Operation::PostFfnNorm => ("post_ffn_norm", ""),
            Operation::FfnResidual => ("ffn_residual", ""),
            Operation::LayerInputs => ("layer_inputs", ""),
            Operation::LayerInput => ("layer_input", ""),
            Operation::LayerInputResidual => ("layer_input_residual", ""),
            Operation::LayerScale => ("layer_scale", ""),
            Operation::ValueNorm => ("value_norm", ""),
            Operation::Layer => ("layer", ""),
            Operation::OutputNorm => ("output_norm", ""),
            Operation::LogitSoftcap => ("logits_softcap", ""),
        };
        write!(f, "{name}{suffix}")
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) if self.operation == Operation::Layer => write!(f, "layer {layer}"),
            Some(layer) => write!(f, "layer {layer}, {}", self.operation),
            None => write!(f, "{}", self.operation),
        }
    }
}
