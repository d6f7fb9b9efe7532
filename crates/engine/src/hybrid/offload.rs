//! Which groups of a model's weights are on the GPU, and which on the CPU.

use std::collections::BTreeMap;

use sterna_gpu::GpuError;

use crate::backend::{CacheType, KvHeads};
use crate::gpu::{Gpu, LayerNeeds, Reserve};
use crate::plan::ModelPlan;
use crate::session::SessionOptions;
use crate::weights::Group;

/// One of the two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Side {
    #[default]
    Cpu,
    Gpu,
}

/// What to offload to a GPU: groups in the order of execution, as long as there is device memory for them,
/// for one session's cache, and for its activations.
///
/// Available memory is the device's budget
/// ([`DeviceOptions::memory_budget`](sterna_gpu::DeviceOptions::memory_budget)), or what its driver provides.
#[derive(Debug, Clone)]
pub struct OffloadPlan {
    most_layers: usize,
    layers: Vec<LayerNeeds>,
    cache: CacheType,
    ctx_len: usize,
    /// Bytes of a step's activations.
    activations: u64,
}

/// Activations grow from those of a token to those of a chunk, and both exist for a moment.
const GROWTH: u64 = 2;

impl OffloadPlan {
    /// As much as fits next to a session on `gpu` with these `options`.
    pub fn new(plan: &ModelPlan, options: &SessionOptions, gpu: &Gpu) -> OffloadPlan {
        let c = plan.config();
        let needs = (c.layers.iter().enumerate()).map(|(i, layer)| LayerNeeds {
            heads: (layer.mixer.attends() && c.shared_layer(i).is_none()).then(|| c.heads_of(i)),
            state: c.layer_state(layer),
        });
        let of_layers = |width: &dyn Fn(usize) -> usize| (0..c.n_layers).map(width).max();
        let head_dim = of_layers(&|i| c.heads_of(i).head_dim).unwrap_or(0);
        let kv = 2 * of_layers(&|i| c.kv_dim(i)).unwrap_or(0);
        let ffn_dim = of_layers(&|i| c.ffn_dim_of(i)).unwrap_or(0);
        let heads = c.n_heads * head_dim;
        let widest = c.model_dim.max(ffn_dim).max(heads);
        // Residual, block input and data copied from the other side; queries, keys and values, and a copy of
        // them; the output of attention; both halves of the feed-forward block; a normed input; quantized
        // rows with their scales.
        let row = 4 * c.model_dim + 2 * (heads + kv) + heads + 2 * ffn_dim + 2 * widest;
        // Inputs of all layers, what is added to them, and that of one.
        let of_inputs = c
            .layer_input_dim
            .map_or(0, |dim| (2 * c.n_layers + 1) * dim);
        // Of experts, for each of those that a token is sent to, both halves, what they give, and quantized
        // rows; and their scores.
        let of_experts = c.experts.as_ref().map_or(0, |experts| {
            let widest = widest.max(experts.ffn_dim);
            let route = 2 * experts.ffn_dim + c.model_dim + widest + 2;
            experts.routing.n_used * route + experts.routing.n_experts
        });
        // Of layers with states, what goes into a convolution and what comes out of it; outputs with their gates; and gates
        // of heads.
        let of_delta = c.delta.as_ref().map_or(0, |delta| {
            2 * delta.channels() + 2 * delta.values() + 6 * delta.n_value_heads
        });
        let of_ssm = c.ssm.as_ref().map_or(0, |ssm| {
            2 * ssm.channels() + 2 * ssm.inner() + 5 * ssm.n_heads
        });
        let of_mamba = c.mamba.as_ref().map_or(0, |mamba| {
            5 * mamba.inner + 2 * mamba.state_dim + mamba.dt_rank
        });
        let of_convolution = c.conv_taps.map_or(0, |_| 3 * c.model_dim);
        // Of time mixing also decays, rates, shares, values of the first layer, and four values for each channel.
        let of_rwkv = c.rwkv.as_ref().map_or(0, |rwkv| 10 * rwkv.shape.inner());
        let of_states = [of_delta, of_ssm, of_mamba, of_convolution, of_rwkv];
        let of_states = of_states.into_iter().max().unwrap_or(0);
        let row = row + of_inputs + of_experts + of_states;
        let rows = options.chunk.clamp(1, options.ctx_len.max(1)) as u64;
        // Split-KV states of a few rows over the whole context, and rotations of all positions.
        let context = (options.ctx_len as u64).next_power_of_two();
        let splits = context.div_ceil(128) * 8 * (heads + 2 * c.n_heads) as u64;
        let turns = context * head_dim as u64 * c.ropes.len().max(1) as u64;
        let words = GROWTH * (rows * row as u64 + splits + turns) + rows * c.n_vocab as u64;
        OffloadPlan {
            most_layers: usize::MAX,
            layers: needs.collect(),
            cache: options.cache_on(gpu),
            ctx_len: options.ctx_len,
            activations: 4 * words,
        }
    }

    /// The same with at most this many layers.
    pub fn with_layers(self, most_layers: usize) -> OffloadPlan {
        OffloadPlan {
            most_layers,
            ..self
        }
    }
}

/// Where each group is. A group stays on the side on which it was loaded first.
#[derive(Debug)]
pub(super) struct Placement {
    share: OffloadPlan,
    sides: BTreeMap<Group, Side>,
    /// The GPU is full.
    full: bool,
    /// Reserved for the first session.
    reserve: Reserve,
}

impl Placement {
    pub(super) fn new(share: OffloadPlan) -> Placement {
        Placement {
            sides: BTreeMap::new(),
            full: share.most_layers == 0,
            share,
            reserve: Reserve::default(),
        }
    }

    /// Whether all layers are to be on the GPU, if they fit.
    pub(super) fn is_for_all(&self) -> bool {
        self.share.most_layers >= self.share.layers.len()
    }

    pub(super) fn side(&self, group: Group) -> Option<Side> {
        self.sides.get(&group).copied()
    }

    /// Whether the GPU has all that was loaded.
    pub(super) fn is_whole(&self) -> bool {
        self.sides.values().all(|side| *side == Side::Gpu)
    }

    pub(super) fn n_layers(&self) -> usize {
        let layers = self.sides.iter();
        let on_gpu = |(group, side): &(&Group, &Side)| {
            matches!(group, Group::Layer(_)) && **side == Side::Gpu
        };
        layers.filter(on_gpu).count()
    }

    /// Decides where the weights of `group` will be loaded, and reserves what they need besides.
    pub(super) fn decide(&mut self, gpu: &Gpu, group: Group) -> Side {
        if let Some(side) = self.side(group) {
            return side;
        }
        if !self.full && self.keep(gpu, group).is_err() {
            self.full = true;
        }
        let side = if self.full { Side::Cpu } else { Side::Gpu };
        self.sides.insert(group, side);
        side
    }

    /// Reserves what a session needs for `group`. The error is why the GPU can't have it.
    fn keep(&mut self, gpu: &Gpu, group: Group) -> Result<(), GpuError> {
        if self.sides.is_empty() {
            self.reserve.keep(gpu, self.share.activations)?;
            // A growing layer has its old and its new memory for a moment, and grows by less than half in the end.
            let most = self.share.ctx_len;
            let attention = self.share.layers.iter().filter_map(|layer| layer.heads);
            let growing = LayerNeeds {
                heads: attention.max_by_key(KvHeads::width),
                state: 0,
            };
            self.reserve
                .keep_layer(gpu, &growing, self.share.cache, most)?;
        }
        if let Group::Layer(i) = group {
            if self.n_layers() == self.share.most_layers {
                self.full = true;
                return Ok(());
            }
            let (cache, ctx_len) = (self.share.cache, self.share.ctx_len);
            if let Some(needs) = self.share.layers.get(i) {
                self.reserve.keep_layer(gpu, needs, cache, ctx_len)?;
            }
        }
        Ok(())
    }

    /// Records that the GPU was out of memory for the weights of `group`, which was loaded to it for the
    /// first time.
    pub(super) fn refused(&mut self, group: Group) {
        self.full = true;
        self.sides.insert(group, Side::Cpu);
        if let Group::Layer(_) = group {
            self.reserve.release_layer();
        }
    }

    /// Releases the reserved memory to a session.
    pub(super) fn release(&mut self) {
        self.reserve = Reserve::default();
    }
}
