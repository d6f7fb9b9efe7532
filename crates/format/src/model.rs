//! What models are made of: the words that the CPU's kernels, the GPU's and the engine share.

/// The non-linearity on the gate of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · σ(x)`.
    Silu,
    /// `max(x, 0)²`.
    Relu2,
    /// `max(x, 0)`.
    Relu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    GeluTanh,
    /// `x / 2 · (1 + erf(x / √2))`.
    GeluErf,
    /// `g · σ(1.702 g)` with `g = min(x, 7)`, and times `u + 1` with `u` between -7 and 7, instead of what the gate is
    /// multiplied with.
    ClampedSwiglu,
}

impl Activation {
    /// The bound of [`Activation::ClampedSwiglu`].
    pub const CLAMP: f32 = 7.0;
    /// The factor in its logistic function.
    pub const CLAMPED_SLOPE: f32 = 1.702;
}

/// Which elements of a head rotary position embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// `i` with `i + rope_dim / 2`: Hugging Face weights, GGUF's NeoX type.
    Halves,
    /// `2 i` with `2 i + 1`: GGUF's `llama` weights, whose rows were permuted for it. Rotated
    /// elements are stored as halves.
    Pairs,
}

/// Number format of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CacheType {
    /// As computed.
    #[default]
    F32,
    /// Half precision: half the memory, about three digits.
    F16,
    /// Bytes with an f16 scale for each block of 32 elements of a head: a quarter of the memory,
    /// about two digits. The last block of a head is shorter where 32 doesn't divide its length; heads
    /// shorter than a block, of which the scales would be a large part, are held as F16.
    Q8_0,
}

impl CacheType {
    /// Elements that share a scale in [`CacheType::Q8_0`].
    pub const BLOCK_LEN: usize = 32;

    /// Its name, as flags and reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Q8_0 => "q8_0",
        }
    }

    /// The type that heads of `head_dim` elements are held as.
    pub const fn of_heads(self, head_dim: usize) -> CacheType {
        match self {
            CacheType::Q8_0 if head_dim < CacheType::BLOCK_LEN => CacheType::F16,
            dtype => dtype,
        }
    }

    /// Bytes of one key or value of `head_dim` elements; codes of Q8_0 come in pairs.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        match self.of_heads(head_dim) {
            CacheType::F32 => 4 * head_dim,
            CacheType::F16 => 2 * head_dim,
            CacheType::Q8_0 => {
                head_dim.next_multiple_of(2) + 2 * head_dim.div_ceil(CacheType::BLOCK_LEN)
            }
        }
    }
}

/// Where a cache has the values of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CachedValues {
    /// Beside the keys.
    #[default]
    Own,
    /// The keys are the values, as in latent attention.
    Keys,
}

impl CachedValues {
    /// What a head has for each position: a key, and a value of its own if there is one.
    pub const fn per_head(self) -> usize {
        match self {
            CachedValues::Own => 2,
            CachedValues::Keys => 1,
        }
    }
}

/// What the attention of one layer looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads in a row.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on query-key products.
    pub scale: f32,
    /// Bound on scores, applied as `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// How many positions a query sees, its own counted; all before it if `None`.
    pub window: Option<usize>,
}
