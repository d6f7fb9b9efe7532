//! The weights of a model, generic over what represents one: an index in a plan, or a loaded matrix.

/// Weights that are replaced together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Group {
    /// The embedding table; with it the output head, where both are one matrix.
    Embedding,
    /// A transformer block, from 0.
    Layer(usize),
    /// The norm before the output head; with it the head, where that is a separate matrix.
    Head,
}

/// All weights. `L` represents a matrix, `V` a vector.
#[derive(Debug, Clone)]
pub(crate) struct Weights<L, V> {
    /// `[n_vocab, model_dim]`.
    pub(crate) token_embd: L,
    pub(crate) layers: Vec<Layer<L, V>>,
    /// `[model_dim]`.
    pub(crate) output_norm: V,
    /// `[n_vocab, model_dim]`; the embedding table if `None`.
    pub(crate) output: Option<Projection<L, V>>,
}

/// One transformer block.
#[derive(Debug, Clone)]
pub(crate) struct Layer<L, V> {
    pub(crate) attn_norm: V,
    pub(crate) mixer: Mixer<L, V>,
    /// On the output of the mixer.
    pub(crate) post_attn_norm: Option<V>,
    pub(crate) ffn_norm: V,
    pub(crate) ffn: FeedForward<L, V>,
    /// On the output of the feed-forward block.
    pub(crate) post_ffn_norm: Option<V>,
}

/// What mixes the positions of a sequence in a block.
#[derive(Debug, Clone)]
pub(crate) enum Mixer<L, V> {
    /// Attention to all positions before, or to a window.
    Attention(Attention<L, V>),
    /// A short convolution over the latest positions.
    Convolution(Convolution<L, V>),
}

/// Attention.
#[derive(Debug, Clone)]
pub(crate) struct Attention<L, V> {
    pub(crate) q: Projection<L, V>,
    pub(crate) k: Projection<L, V>,
    pub(crate) v: Projection<L, V>,
    /// `[head_dim]`, or of all heads together.
    pub(crate) q_norm: Option<V>,
    /// The same.
    pub(crate) k_norm: Option<V>,
    /// Before the output projection.
    pub(crate) sub_norm: Option<V>,
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

/// The feed-forward network of a block.
#[derive(Debug, Clone)]
pub(crate) enum FeedForward<L, V> {
    /// One network for every row.
    Dense(Dense<L, V>),
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
}

/// A linear layer: `y = norm(x) · wᵀ + bias`, with optional norm and bias.
#[derive(Debug, Clone)]
pub(crate) struct Projection<L, V> {
    pub(crate) input_norm: Option<V>,
    pub(crate) weight: L,
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
    /// Its linear layers, but for experts.
    pub(crate) fn projections(&self) -> impl Iterator<Item = &Projection<L, V>> {
        let (ffn, router) = match &self.ffn {
            FeedForward::Dense(Dense { gate, up, down, .. }) => (Some([gate, up, down]), None),
            FeedForward::Experts(experts) => (None, Some(&experts.router)),
        };
        let (attention, convolution) = match &self.mixer {
            Mixer::Attention(Attention { q, k, v, o, .. }) => (Some([q, k, v, o]), None),
            Mixer::Convolution(Convolution { input, output, .. }) => (None, Some([input, output])),
        };
        let mixer = attention
            .into_iter()
            .flatten()
            .chain(convolution.into_iter().flatten());
        mixer.chain(ffn.into_iter().flatten()).chain(router)
    }

    /// The attention, if the block has one.
    pub(crate) fn attention(&self) -> Option<&Attention<L, V>> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Convolution(_) => None,
        }
    }

    /// The mixture of experts, if the block has one.
    pub(crate) fn experts(&self) -> Option<&Experts<L, V>> {
        match &self.ffn {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> Layer<C::Linear, C::Vector> {
        Layer {
            attn_norm: c.vector(self.attn_norm),
            mixer: match self.mixer {
                Mixer::Attention(attention) => Mixer::Attention(Attention {
                    q: attention.q.convert(c),
                    k: attention.k.convert(c),
                    v: attention.v.convert(c),
                    q_norm: attention.q_norm.map(|v| c.vector(v)),
                    k_norm: attention.k_norm.map(|v| c.vector(v)),
                    sub_norm: attention.sub_norm.map(|v| c.vector(v)),
                    o: attention.o.convert(c),
                }),
                Mixer::Convolution(convolution) => Mixer::Convolution(Convolution {
                    input: convolution.input.convert(c),
                    taps: c.vector(convolution.taps),
                    output: convolution.output.convert(c),
                }),
            },
            post_attn_norm: self.post_attn_norm.map(|v| c.vector(v)),
            ffn_norm: c.vector(self.ffn_norm),
            ffn: match self.ffn {
                FeedForward::Dense(dense) => FeedForward::Dense(Dense {
                    gate: dense.gate.convert(c),
                    up: dense.up.convert(c),
                    sub_norm: dense.sub_norm.map(|v| c.vector(v)),
                    down: dense.down.convert(c),
                }),
                FeedForward::Experts(experts) => FeedForward::Experts(experts.convert(c)),
            },
            post_ffn_norm: self.post_ffn_norm.map(|v| c.vector(v)),
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
        }
    }
}

impl<L, V> Projection<L, V> {
    pub(crate) fn convert<C: Convert<L, V>>(self, c: &mut C) -> Projection<C::Linear, C::Vector> {
        Projection {
            input_norm: self.input_norm.map(|v| c.vector(v)),
            weight: c.linear(self.weight),
            bias: self.bias.map(|v| c.vector(v)),
        }
    }
}
