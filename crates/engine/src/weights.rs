//! The weights of a model, generic over what represents one: an index in a plan, or a loaded matrix.

/// Weights that are replaced together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Group {
    /// The embedding table; with it the output head, where both are one matrix.
    Embedding,
    /// A transformer block, from 0.
    Layer(usize),
    /// One expert of a block that is a mixture: its matrices, not its row of the router.
    Expert {
        /// The block.
        layer: usize,
        /// The expert, from 0.
        expert: usize,
    },
    /// The norm before the output head; with it the head, where that is a separate matrix.
    Head,
}

impl Group {
    /// Whether all weights of `other` are of this group.
    pub fn includes(self, other: Group) -> bool {
        self == other || self == other.whole()
    }

    /// This group, or of an expert the block.
    pub(crate) fn whole(self) -> Group {
        match self {
            Group::Expert { layer, .. } => Group::Layer(layer),
            group => group,
        }
    }
}

/// All weights. `L` represents a matrix, `V` a vector.
#[derive(Debug, Clone)]
pub(crate) struct Weights<L, V> {
    /// `[n_vocab, model_dim]`.
    pub(crate) token_embd: L,
    pub(crate) layer_inputs: Option<LayerInputs<L, V>>,
    pub(crate) positions: Option<Positions<L, V>>,
    pub(crate) layers: Vec<Layer<L, V>>,
    /// `None` if each block has a norm at its end.
    pub(crate) output_norm: Option<Norm<V>>,
    /// `[n_vocab, model_dim]`; the embedding table if `None`.
    pub(crate) output: Option<Projection<L, V>>,
}

/// A norm of the residual stream.
#[derive(Debug, Clone)]
pub(crate) struct Norm<V> {
    /// `[model_dim]`.
    pub(crate) weight: V,
    /// `[model_dim]`: with one, mean and variance are normalised, without one the root mean square.
    pub(crate) bias: Option<V>,
}

/// What encoders add to embeddings of tokens.
#[derive(Debug, Clone)]
pub(crate) struct Positions<L, V> {
    /// `[max_ctx, model_dim]`.
    pub(crate) table: L,
    /// The type of all tokens, `[model_dim]`.
    pub(crate) token_type: V,
}

/// What each layer is given besides the residual stream: of a token, the sum of a row of a table and of what follows
/// from its embedding.
#[derive(Debug, Clone)]
pub(crate) struct LayerInputs<L, V> {
    /// `[n_vocab, n_layers · layer_input_dim]`.
    pub(crate) table: L,
    /// `[n_layers · layer_input_dim, model_dim]`.
    pub(crate) projection: Projection<L, V>,
    /// Of what that gives for each layer, `[layer_input_dim]`.
    pub(crate) norm: V,
}

/// One transformer block.
#[derive(Debug, Clone)]
pub(crate) struct Layer<L, V> {
    /// Of what enters the first block, in families that have one there.
    pub(crate) embed_norm: Option<Norm<V>>,
    /// Of what the mixer reads; of the residual stream after it, in encoders.
    pub(crate) attn_norm: Norm<V>,
    pub(crate) mixer: Mixer<L, V>,
    /// On the output of the mixer.
    pub(crate) post_attn_norm: Option<V>,
    /// What follows the mixer, if something does.
    pub(crate) ffn: Option<FeedForwardBlock<L, V>>,
    /// What follows that, if the layer has an input of its own.
    pub(crate) input: Option<LayerInput<L, V>>,
    /// Factor on what leaves the block, `[1]`.
    pub(crate) scale: Option<V>,
}

/// How a layer takes its own input in.
#[derive(Debug, Clone)]
pub(crate) struct LayerInput<L, V> {
    /// `[layer_input_dim, model_dim]`: gates of the input.
    pub(crate) gate: Projection<L, V>,
    /// `[model_dim, layer_input_dim]`.
    pub(crate) output: Projection<L, V>,
    /// On what that gives.
    pub(crate) norm: V,
}

/// A feed-forward network, and the norms around it.
#[derive(Debug, Clone)]
pub(crate) struct FeedForwardBlock<L, V> {
    /// Of what the network reads; of the residual stream after it, in encoders.
    pub(crate) norm: Norm<V>,
    pub(crate) network: FeedForward<L, V>,
    /// On the output.
    pub(crate) post_norm: Option<V>,
}

/// What mixes the positions of a sequence in a block.
#[derive(Debug, Clone)]
pub(crate) enum Mixer<L, V> {
    /// Attention to all positions before, or to a window.
    Attention(Attention<L, V>),
    /// Attention whose keys and values follow from a latent vector.
    Latent(LatentAttention<L, V>),
    /// A short convolution over the latest positions.
    Convolution(Convolution<L, V>),
    /// Linear attention with a state.
    DeltaNet(DeltaNet<L, V>),
    /// A selective state space.
    Ssm(Ssm<L, V>),
    /// The same of the first Mamba.
    Mamba(Mamba<L, V>),
    /// Attention and a state space, whose outputs are added.
    Both(Attention<L, V>, Ssm<L, V>),
    /// Time mixing of RWKV.
    Time(TimeMix<L, V>),
}

/// Attention.
#[derive(Debug, Clone)]
pub(crate) struct Attention<L, V> {
    /// Each query may be followed by a gate of what attention gives for it.
    pub(crate) q: Projection<L, V>,
    /// `None` where keys and values are those of an earlier layer.
    pub(crate) k: Option<Projection<L, V>>,
    /// `None` there, and where values are keys before their norm.
    pub(crate) v: Option<Projection<L, V>>,
    /// `[head_dim]`, or of all heads together.
    pub(crate) q_norm: Option<V>,
    /// The same.
    pub(crate) k_norm: Option<V>,
    /// Of each head, the score of what gives nothing, `[n_heads]`.
    pub(crate) sinks: Option<V>,
    /// Before the output projection.
    pub(crate) sub_norm: Option<V>,
    pub(crate) o: Projection<L, V>,
}

/// Latent attention.
#[derive(Debug, Clone)]
pub(crate) struct LatentAttention<L, V> {
    /// `[q_rank, model_dim]`, and the norm of what it gives.
    pub(crate) q_down: Option<(Projection<L, V>, V)>,
    /// `[n_heads · (nope_dim + rope_dim), q_rank or model_dim]`.
    pub(crate) q: Projection<L, V>,
    /// `[rope_dim, model_dim]`: the rotated part of the keys of all heads.
    pub(crate) k_rope: Projection<L, V>,
    /// `[kv_rank, model_dim]`.
    pub(crate) latent: Projection<L, V>,
    /// `[kv_rank]`.
    pub(crate) latent_norm: V,
    /// Of each head, `[kv_rank, nope_dim]`: what queries are multiplied with instead of expanding keys.
    pub(crate) k_up: Vec<L>,
    /// Of each head, `[value_dim, kv_rank]`.
    pub(crate) v_up: Vec<L>,
    /// `[model_dim, n_heads · value_dim]`.
    pub(crate) o: Projection<L, V>,
}

/// A gated short convolution.
#[derive(Debug, Clone)]
pub(crate) struct Convolution<L, V> {
    /// `[3 · model_dim, model_dim]`: two gates and the input.
    pub(crate) input: Projection<L, V>,
    /// `[model_dim, taps]`.
    pub(crate) taps: V,
    pub(crate) output: Projection<L, V>,
}

/// A gated delta net ([`sterna_kernels::delta`]).
#[derive(Debug, Clone)]
pub(crate) struct DeltaNet<L, V> {
    /// `[channels, model_dim]`: queries, keys and values.
    pub(crate) qkv: Projection<L, V>,
    /// `[values, model_dim]`: gates of the output.
    pub(crate) gate: Projection<L, V>,
    /// `[n_value_heads, model_dim]`: what decays follow from.
    pub(crate) alpha: Projection<L, V>,
    /// `[n_value_heads, model_dim]`.
    pub(crate) beta: Projection<L, V>,
    /// `[channels, taps]`.
    pub(crate) taps: V,
    /// `[n_value_heads]`.
    pub(crate) a: V,
    /// `[n_value_heads]`.
    pub(crate) dt_bias: V,
    /// Of the output of each head, `[value_dim]`.
    pub(crate) norm: V,
    pub(crate) output: Projection<L, V>,
}

/// A selective state space ([`sterna_kernels::ssm`]).
#[derive(Debug, Clone)]
pub(crate) struct Ssm<L, V> {
    /// `[inner, model_dim]`: gates of the output.
    pub(crate) gate: Projection<L, V>,
    /// `[channels, model_dim]`: inputs, `B` and `C`.
    pub(crate) xbc: Projection<L, V>,
    /// `[n_heads, model_dim]`: what time steps follow from.
    pub(crate) dt: Projection<L, V>,
    /// `[channels, taps]`.
    pub(crate) taps: V,
    /// `[channels]`.
    pub(crate) conv_bias: Option<V>,
    /// `[n_heads]`.
    pub(crate) a: V,
    /// `[n_heads]`.
    pub(crate) d: V,
    /// `[n_heads]`.
    pub(crate) dt_bias: V,
    /// Of the gated output, each group by itself, `[inner]`.
    pub(crate) norm: Option<V>,
    pub(crate) output: Projection<L, V>,
}

/// A selective state space of the first kind ([`sterna_kernels::mamba`]).
#[derive(Debug, Clone)]
pub(crate) struct Mamba<L, V> {
    /// `[inner, model_dim]`.
    pub(crate) input: Projection<L, V>,
    /// `[inner, model_dim]`: gates of the output.
    pub(crate) gate: Projection<L, V>,
    /// `[inner, taps]`.
    pub(crate) taps: V,
    /// `[inner]`.
    pub(crate) conv_bias: Option<V>,
    /// `[dt_rank, inner]`: what time steps follow from, of the input after its convolution.
    pub(crate) dt_in: Projection<L, V>,
    /// `[state_dim, inner]`, likewise.
    pub(crate) b: Projection<L, V>,
    /// `[state_dim, inner]`, likewise.
    pub(crate) c: Projection<L, V>,
    /// Of what the three give.
    pub(crate) dt_norm: Option<V>,
    pub(crate) b_norm: Option<V>,
    pub(crate) c_norm: Option<V>,
    /// `[inner, dt_rank]`.
    pub(crate) dt: Projection<L, V>,
    /// `[inner, state_dim]`.
    pub(crate) a: V,
    /// `[inner]`.
    pub(crate) d: V,
    pub(crate) output: Projection<L, V>,
}

/// Time mixing of RWKV ([`sterna_kernels::rwkv`]).
#[derive(Debug, Clone)]
pub(crate) struct TimeMix<L, V> {
    /// Receptances, `[inner, model_dim]`.
    pub(crate) r: Shifted<L, V>,
    /// Keys, `[inner, model_dim]`.
    pub(crate) k: Shifted<L, V>,
    /// Values, `[inner, model_dim]`.
    pub(crate) v: Shifted<L, V>,
    /// What the generation has besides.
    pub(crate) recurrence: Recurrence<L, V>,
    /// Of what each head gives, and the gates of that, `[inner, model_dim]`.
    pub(crate) finish: Option<(Norm<V>, Shifted<L, V>)>,
    pub(crate) output: Projection<L, V>,
}

/// A linear layer that reads a mix of a position and the one before.
#[derive(Debug, Clone)]
pub(crate) struct Shifted<L, V> {
    /// `[model_dim]`.
    pub(crate) factors: V,
    /// The first of two layers of low rank.
    pub(crate) down: Option<Projection<L, V>>,
    pub(crate) projection: Projection<L, V>,
}

/// What generations of RWKV differ in.
#[derive(Debug, Clone)]
pub(crate) enum Recurrence<L, V> {
    /// The fourth and fifth.
    Fixed {
        /// `[inner]`.
        decay: V,
        /// `[inner]`.
        first: V,
    },
    /// The sixth.
    Six {
        /// What is added to the factors of mixes.
        shares: Shares<L, V>,
        decay: Shifted<L, V>,
        /// `[inner]`.
        first: V,
    },
    /// The seventh.
    Seven {
        decay: Shifted<L, V>,
        rate: Shifted<L, V>,
        /// How far values are those of the first layer, by two layers of low rank that read the mix of values; `None`
        /// there.
        residual: Option<[Projection<L, V>; 2]>,
        /// `[inner]`.
        k_k: V,
        /// `[inner]`.
        k_a: V,
        /// `[inner]`.
        r_k: V,
    },
}

/// Parts of the factors of mixes, which follow from the positions themselves.
#[derive(Debug, Clone)]
pub(crate) struct Shares<L, V> {
    /// Of the mix that they follow from, `[model_dim]`.
    pub(crate) factors: V,
    /// `[5 · rank, model_dim]`.
    pub(crate) down: Projection<L, V>,
    /// `[model_dim, rank]` each: of decays, keys, values, receptances and gates.
    pub(crate) up: Vec<L>,
}

/// Channel mixing of RWKV.
#[derive(Debug, Clone)]
pub(crate) struct ChannelMix<L, V> {
    /// `[ffn_dim, model_dim]`.
    pub(crate) key: Shifted<L, V>,
    /// `[model_dim, model_dim]`: gates of the output.
    pub(crate) receptance: Option<Shifted<L, V>>,
    /// `[model_dim, ffn_dim]`.
    pub(crate) value: Projection<L, V>,
}

/// The feed-forward network of a block.
#[derive(Debug, Clone)]
pub(crate) enum FeedForward<L, V> {
    /// Channel mixing.
    Channel(ChannelMix<L, V>),
    /// One network for every row.
    Dense(Dense<L, V>),
    /// The same without gates.
    Plain(Plain<L, V>),
    /// Several, of which a router chooses some for each row.
    Experts(Experts<L, V>),
}

/// A gated network.
#[derive(Debug, Clone)]
pub(crate) struct Dense<L, V> {
    pub(crate) gate: Projection<L, V>,
    pub(crate) up: Projection<L, V>,
    /// Before the down projection.
    pub(crate) sub_norm: Option<V>,
    pub(crate) down: Projection<L, V>,
}

/// A network of two layers.
#[derive(Debug, Clone)]
pub(crate) struct Plain<L, V> {
    /// `[ffn_dim, model_dim]`.
    pub(crate) up: Projection<L, V>,
    /// `[model_dim, ffn_dim]`.
    pub(crate) down: Projection<L, V>,
}

/// A mixture of experts: gated networks of one shape, one matrix for each in each list.
#[derive(Debug, Clone)]
pub(crate) struct Experts<L, V> {
    /// Gives each row a score for every expert.
    pub(crate) router: Projection<L, V>,
    /// Added to probabilities where experts are chosen, and not to what their outputs are weighted with.
    pub(crate) bias: Option<V>,
    pub(crate) gate: Vec<L>,
    pub(crate) up: Vec<L>,
    pub(crate) down: Vec<L>,
    pub(crate) biases: Option<ExpertBiases<V>>,
    /// What every row is sent to as well.
    pub(crate) shared: Option<SharedExpert<L, V>>,
}

/// Biases of the matrices of all experts.
#[derive(Debug, Clone)]
pub(crate) struct ExpertBiases<V> {
    /// `[n_experts, ffn_dim]`.
    pub(crate) gate: V,
    /// `[n_experts, ffn_dim]`.
    pub(crate) up: V,
    /// `[n_experts, model_dim]`.
    pub(crate) down: V,
}

/// The expert of every row.
#[derive(Debug, Clone)]
pub(crate) struct SharedExpert<L, V> {
    pub(crate) network: Dense<L, V>,
    /// `[1, model_dim]`: the output is multiplied by the sigmoid of what it gives.
    pub(crate) gate: Option<Projection<L, V>>,
}

/// A linear layer: `y = scale · norm(x) · wᵀ + bias`, with optional norm and bias.
#[derive(Debug, Clone)]
pub(crate) struct Projection<L, V> {
    pub(crate) input_norm: Option<V>,
    pub(crate) weight: L,
    /// 1 but for models whose configuration has such factors.
    pub(crate) scale: f32,
    pub(crate) bias: Option<V>,
}

/// Maps each weight.
pub(crate) trait Convert<L, V> {
    type Linear;
    type Vector;
    fn linear(&mut self, from: L) -> Self::Linear;
    fn vector(&mut self, from: V) -> Self::Vector;
}

impl<L, V> Layer<L, V> {
    /// Its linear layers, but for those of experts that rows are chosen for.
    pub(crate) fn projections(&self) -> impl Iterator<Item = &Projection<L, V>> {
        let mut all = match &self.mixer {
            Mixer::Attention(attention) => attention.projections(),
            Mixer::Latent(latent) => {
                let LatentAttention {
                    q_down,
                    q,
                    k_rope,
                    latent,
                    o,
                    ..
                } = latent;
                let down = q_down.iter().map(|(down, _)| down);
                down.chain([q, k_rope, latent, o]).collect()
            }
            Mixer::Convolution(Convolution { input, output, .. }) => vec![input, output],
            Mixer::DeltaNet(DeltaNet {
                qkv,
                gate,
                alpha,
                beta,
                output,
                ..
            }) => vec![qkv, gate, alpha, beta, output],
            Mixer::Ssm(ssm) => ssm.projections().to_vec(),
            Mixer::Mamba(Mamba {
                input,
                gate,
                dt_in,
                b,
                c,
                dt,
                output,
                ..
            }) => vec![input, gate, dt_in, b, c, dt, output],
            Mixer::Both(attention, ssm) => {
                [attention.projections(), ssm.projections().to_vec()].concat()
            }
            Mixer::Time(time) => time.projections(),
        };
        match self.network() {
            None => {}
            Some(FeedForward::Channel(ChannelMix {
                key,
                receptance,
                value,
            })) => {
                let shifted = [Some(key), receptance.as_ref()].into_iter().flatten();
                all.extend(shifted.flat_map(Shifted::projections).chain([value]));
            }
            Some(FeedForward::Dense(Dense { gate, up, down, .. })) => all.extend([gate, up, down]),
            Some(FeedForward::Plain(Plain { up, down })) => all.extend([up, down]),
            Some(FeedForward::Experts(Experts { router, shared, .. })) => {
                all.push(router);
                if let Some(SharedExpert { network, gate }) = shared {
                    all.extend([&network.gate, &network.up, &network.down]);
                    all.extend(gate);
                }
            }
        }
        if let Some(LayerInput { gate, output, .. }) = &self.input {
            all.extend([gate, output]);
        }
        all.into_iter()
    }

    /// The attention, if the block has one.
    pub(crate) fn attention(&self) -> Option<&Attention<L, V>> {
        match &self.mixer {
            Mixer::Attention(attention) | Mixer::Both(attention, _) => Some(attention),
            Mixer::Latent(_)
            | Mixer::Convolution(_)
            | Mixer::DeltaNet(_)
            | Mixer::Ssm(_)
            | Mixer::Mamba(_)
            | Mixer::Time(_) => None,
        }
    }

    /// The feed-forward network, if the block has one.
    pub(crate) fn network(&self) -> Option<&FeedForward<L, V>> {
        self.ffn.as_ref().map(|block| &block.network)
    }

    /// The mixture of experts, if the block has one.
    pub(crate) fn experts(&self) -> Option<&Experts<L, V>> {
        match self.network()? {
            FeedForward::Dense(_) | FeedForward::Plain(_) | FeedForward::Channel(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    /// The same, to be changed.
    pub(crate) fn experts_mut(&mut self) -> Option<&mut Experts<L, V>> {
        match &mut self.ffn.as_mut()?.network {
            FeedForward::Dense(_) | FeedForward::Plain(_) | FeedForward::Channel(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> Layer<C::Linear, C::Vector> {
        Layer {
            embed_norm: self.embed_norm.map(|norm| norm.convert(c)),
            attn_norm: self.attn_norm.convert(c),
            mixer: match self.mixer {
                Mixer::Attention(attention) => Mixer::Attention(attention.convert(c)),
                Mixer::Latent(latent) => Mixer::Latent(LatentAttention {
                    q_down: latent
                        .q_down
                        .map(|(down, norm)| (down.convert(c), c.vector(norm))),
                    q: latent.q.convert(c),
                    k_rope: latent.k_rope.convert(c),
                    latent: latent.latent.convert(c),
                    latent_norm: c.vector(latent.latent_norm),
                    k_up: latent.k_up.into_iter().map(|l| c.linear(l)).collect(),
                    v_up: latent.v_up.into_iter().map(|l| c.linear(l)).collect(),
                    o: latent.o.convert(c),
                }),
                Mixer::Convolution(convolution) => Mixer::Convolution(Convolution {
                    input: convolution.input.convert(c),
                    taps: c.vector(convolution.taps),
                    output: convolution.output.convert(c),
                }),
                Mixer::DeltaNet(net) => Mixer::DeltaNet(DeltaNet {
                    qkv: net.qkv.convert(c),
                    gate: net.gate.convert(c),
                    alpha: net.alpha.convert(c),
                    beta: net.beta.convert(c),
                    taps: c.vector(net.taps),
                    a: c.vector(net.a),
                    dt_bias: c.vector(net.dt_bias),
                    norm: c.vector(net.norm),
                    output: net.output.convert(c),
                }),
                Mixer::Ssm(ssm) => Mixer::Ssm(ssm.convert(c)),
                Mixer::Mamba(mamba) => Mixer::Mamba(Mamba {
                    input: mamba.input.convert(c),
                    gate: mamba.gate.convert(c),
                    taps: c.vector(mamba.taps),
                    conv_bias: mamba.conv_bias.map(|v| c.vector(v)),
                    dt_in: mamba.dt_in.convert(c),
                    b: mamba.b.convert(c),
                    c: mamba.c.convert(c),
                    dt_norm: mamba.dt_norm.map(|v| c.vector(v)),
                    b_norm: mamba.b_norm.map(|v| c.vector(v)),
                    c_norm: mamba.c_norm.map(|v| c.vector(v)),
                    dt: mamba.dt.convert(c),
                    a: c.vector(mamba.a),
                    d: c.vector(mamba.d),
                    output: mamba.output.convert(c),
                }),
                Mixer::Both(attention, ssm) => Mixer::Both(attention.convert(c), ssm.convert(c)),
                Mixer::Time(time) => Mixer::Time(time.convert(c)),
            },
            post_attn_norm: self.post_attn_norm.map(|v| c.vector(v)),
            ffn: self.ffn.map(|block| FeedForwardBlock {
                norm: block.norm.convert(c),
                network: match block.network {
                    FeedForward::Channel(mix) => FeedForward::Channel(ChannelMix {
                        key: mix.key.convert(c),
                        receptance: mix.receptance.map(|receptance| receptance.convert(c)),
                        value: mix.value.convert(c),
                    }),
                    FeedForward::Dense(dense) => FeedForward::Dense(dense.convert(c)),
                    FeedForward::Plain(Plain { up, down }) => FeedForward::Plain(Plain {
                        up: up.convert(c),
                        down: down.convert(c),
                    }),
                    FeedForward::Experts(experts) => FeedForward::Experts(experts.convert(c)),
                },
                post_norm: block.post_norm.map(|v| c.vector(v)),
            }),
            input: self.input.map(|input| LayerInput {
                gate: input.gate.convert(c),
                output: input.output.convert(c),
                norm: c.vector(input.norm),
            }),
            scale: self.scale.map(|v| c.vector(v)),
        }
    }
}

impl<V> Norm<V> {
    pub(crate) fn convert<L, C: Convert<L, V>>(self, c: &mut C) -> Norm<C::Vector> {
        Norm {
            weight: c.vector(self.weight),
            bias: self.bias.map(|bias| c.vector(bias)),
        }
    }
}

impl<L, V> TimeMix<L, V> {
    fn projections(&self) -> Vec<&Projection<L, V>> {
        let TimeMix {
            r,
            k,
            v,
            recurrence,
            finish,
            output,
        } = self;
        let (own, others) = match recurrence {
            Recurrence::Fixed { .. } => ([None, None], vec![]),
            Recurrence::Six { shares, decay, .. } => ([Some(decay), None], vec![&shares.down]),
            Recurrence::Seven {
                decay,
                rate,
                residual,
                ..
            } => (
                [Some(decay), Some(rate)],
                residual.iter().flatten().collect(),
            ),
        };
        let gate = finish.as_ref().map(|(_, gate)| gate);
        let shifted = [r, k, v].into_iter().chain(gate);
        let shifted = shifted.chain(own.into_iter().flatten());
        let all = shifted.flat_map(Shifted::projections).chain(others);
        all.chain([output]).collect()
    }

    fn convert<C: Convert<L, V>>(self, c: &mut C) -> TimeMix<C::Linear, C::Vector> {
        TimeMix {
            r: self.r.convert(c),
            k: self.k.convert(c),
            v: self.v.convert(c),
            recurrence: match self.recurrence {
                Recurrence::Fixed { decay, first } => Recurrence::Fixed {
                    decay: c.vector(decay),
                    first: c.vector(first),
                },
                Recurrence::Six {
                    shares,
                    decay,
                    first,
                } => Recurrence::Six {
                    shares: Shares {
                        factors: c.vector(shares.factors),
                        down: shares.down.convert(c),
                        up: shares.up.into_iter().map(|l| c.linear(l)).collect(),
                    },
                    decay: decay.convert(c),
                    first: c.vector(first),
                },
                Recurrence::Seven {
                    decay,
                    rate,
                    residual,
                    k_k,
                    k_a,
                    r_k,
                } => Recurrence::Seven {
                    decay: decay.convert(c),
                    rate: rate.convert(c),
                    residual: residual.map(|pair| pair.map(|layer| layer.convert(c))),
                    k_k: c.vector(k_k),
                    k_a: c.vector(k_a),
                    r_k: c.vector(r_k),
                },
            },
            finish: self
                .finish
                .map(|(norm, gate)| (norm.convert(c), gate.convert(c))),
            output: self.output.convert(c),
        }
    }
}

impl<L, V> Shifted<L, V> {
    fn projections(&self) -> impl Iterator<Item = &Projection<L, V>> {
        self.down.iter().chain([&self.projection])
    }

    fn convert<C: Convert<L, V>>(self, c: &mut C) -> Shifted<C::Linear, C::Vector> {
        Shifted {
            factors: c.vector(self.factors),
            down: self.down.map(|down| down.convert(c)),
            projection: self.projection.convert(c),
        }
    }
}

impl<L, V> LayerInputs<L, V> {
    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> LayerInputs<C::Linear, C::Vector> {
        LayerInputs {
            table: c.linear(self.table),
            projection: self.projection.convert(c),
            norm: c.vector(self.norm),
        }
    }
}

impl<L, V> Positions<L, V> {
    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> Positions<C::Linear, C::Vector> {
        Positions {
            table: c.linear(self.table),
            token_type: c.vector(self.token_type),
        }
    }
}

impl<L, V> Attention<L, V> {
    fn projections(&self) -> Vec<&Projection<L, V>> {
        let Attention { q, k, v, o, .. } = self;
        let all = [Some(q), k.as_ref(), v.as_ref(), Some(o)];
        all.into_iter().flatten().collect()
    }

    fn convert<C: Convert<L, V>>(self, c: &mut C) -> Attention<C::Linear, C::Vector> {
        Attention {
            q: self.q.convert(c),
            k: self.k.map(|k| k.convert(c)),
            v: self.v.map(|v| v.convert(c)),
            q_norm: self.q_norm.map(|v| c.vector(v)),
            k_norm: self.k_norm.map(|v| c.vector(v)),
            sinks: self.sinks.map(|v| c.vector(v)),
            sub_norm: self.sub_norm.map(|v| c.vector(v)),
            o: self.o.convert(c),
        }
    }
}

impl<L, V> Ssm<L, V> {
    fn projections(&self) -> [&Projection<L, V>; 4] {
        [&self.gate, &self.xbc, &self.dt, &self.output]
    }

    fn convert<C: Convert<L, V>>(self, c: &mut C) -> Ssm<C::Linear, C::Vector> {
        Ssm {
            gate: self.gate.convert(c),
            xbc: self.xbc.convert(c),
            dt: self.dt.convert(c),
            taps: c.vector(self.taps),
            conv_bias: self.conv_bias.map(|v| c.vector(v)),
            a: c.vector(self.a),
            d: c.vector(self.d),
            dt_bias: c.vector(self.dt_bias),
            norm: self.norm.map(|v| c.vector(v)),
            output: self.output.convert(c),
        }
    }
}

impl<L, V> Dense<L, V> {
    fn convert<C: Convert<L, V>>(self, c: &mut C) -> Dense<C::Linear, C::Vector> {
        Dense {
            gate: self.gate.convert(c),
            up: self.up.convert(c),
            sub_norm: self.sub_norm.map(|v| c.vector(v)),
            down: self.down.convert(c),
        }
    }
}

impl<L, V> Experts<L, V> {
    fn convert<C: Convert<L, V>>(self, c: &mut C) -> Experts<C::Linear, C::Vector> {
        let mut all = |matrices: Vec<L>| matrices.into_iter().map(|l| c.linear(l)).collect();
        let (gate, up, down) = (all(self.gate), all(self.up), all(self.down));
        Experts {
            router: self.router.convert(c),
            bias: self.bias.map(|v| c.vector(v)),
            gate,
            up,
            down,
            biases: self.biases.map(|biases| ExpertBiases {
                gate: c.vector(biases.gate),
                up: c.vector(biases.up),
                down: c.vector(biases.down),
            }),
            shared: self.shared.map(|shared| SharedExpert {
                network: shared.network.convert(c),
                gate: shared.gate.map(|gate| gate.convert(c)),
            }),
        }
    }
}

impl<L, V> Projection<L, V> {
    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> Projection<C::Linear, C::Vector> {
        Projection {
            input_norm: self.input_norm.map(|v| c.vector(v)),
            weight: c.linear(self.weight),
            scale: self.scale,
            bias: self.bias.map(|v| c.vector(v)),
        }
    }
}
