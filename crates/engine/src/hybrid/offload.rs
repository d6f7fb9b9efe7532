//! Which groups of a model's weights lie on the GPU, and which on the CPU.

use std::collections::BTreeMap;

use sterna_gpu::GpuError;

use crate::backend::CacheShape;
use crate::gpu::{Gpu, Reserve};
use crate::plan::ModelPlan;
use crate::session::SessionOptions;
use crate::weights::Group;

/// One of the two places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Side {
    #[default]
    Cpu,
    Gpu,
}

/// What a GPU is to take of a model: groups in the order of execution, as long as there is device memory
/// for them, for one session's cache, and for its activations.
///
/// The memory there is, is what the device's budget says
/// ([`DeviceOptions::memory_budget`](sterna_gpu::DeviceOptions::memory_budget)), or what its driver gives.
#[derive(Debug, Clone, Copy)]
pub struct OffloadPlan {
    most_layers: usize,
    cache: CacheShape,
    ctx_len: usize,
    /// Bytes of what a step computes.
    activations: u64,
}

/// Activations grow from those of a token to those of a chunk, and both are there for a moment.
const GROWTH: u64 = 2;

impl OffloadPlan {
    /// All that there is room for beside a session with these `options`.
    pub fn new(plan: &ModelPlan, options: &SessionOptions) -> OffloadPlan {
        let c = plan.config();
        let cache = CacheShape {
            n_layers: c.n_layers,
            n_kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            dtype: options.cache,
        };
        let (heads, kv) = (c.n_heads * c.head_dim, 2 * c.n_kv_heads * c.head_dim);
        let widest = c.model_dim.max(c.ffn_dim).max(heads);
        // Residual, block input and what came from elsewhere; queries, keys and values, and a copy of
        // them; what attention gives; both halves of the feed-forward block; a normed input; rounded rows
        // with their scales.
        let row = 4 * c.model_dim + 2 * (heads + kv) + heads + 2 * c.ffn_dim + 2 * widest;
        let rows = options.chunk.clamp(1, options.ctx_len.max(1)) as u64;
        // Spans of a few rows over the whole context, and rotations of all positions.
        let context = (options.ctx_len as u64).next_power_of_two();
        let splits = context.div_ceil(128) * 8 * (heads + 2 * c.n_heads) as u64;
        let turns = context * c.head_dim as u64 * c.ropes.len().max(1) as u64;
        let words = GROWTH * (rows * row as u64 + splits + turns) + rows * c.n_vocab as u64;
        OffloadPlan {
            most_layers: usize::MAX,
            cache,
            ctx_len: options.ctx_len,
            activations: 4 * words,
        }
    }

    /// The same with at most so many layers.
    pub fn with_layers(self, most_layers: usize) -> OffloadPlan {
        OffloadPlan {
            most_layers,
            ..self
        }
    }
}

/// What lies where. A group stays on the side on which it was loaded first.
#[derive(Debug)]
pub(super) struct Placement {
    share: OffloadPlan,
    sides: BTreeMap<Group, Side>,
    /// The GPU takes no more groups.
    full: bool,
    /// Kept for the first session.
    reserve: Reserve,
}

impl Placement {
    pub(super) fn new(share: OffloadPlan) -> Placement {
        Placement {
            share,
            sides: BTreeMap::new(),
            full: share.most_layers == 0,
            reserve: Reserve::default(),
        }
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

    /// Decides where the weights of `group` are to be loaded, and keeps what they will need besides.
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

    /// Keeps what a session needs for `group`. The error is why the GPU can't have it.
    fn keep(&mut self, gpu: &Gpu, group: Group) -> Result<(), GpuError> {
        if self.sides.is_empty() {
            self.reserve.keep(gpu, self.share.activations)?;
            // A layer that grows has its old and its new memory for a moment.
            let half = self.share.ctx_len / 2;
            self.reserve.keep_layer(gpu, &self.share.cache, half)?;
        }
        if let Group::Layer(_) = group {
            if self.n_layers() == self.share.most_layers {
                self.full = true;
                return Ok(());
            }
            let (cache, ctx_len) = (&self.share.cache, self.share.ctx_len);
            self.reserve.keep_layer(gpu, cache, ctx_len)?;
        }
        Ok(())
    }

    /// Takes note that the GPU had no room for the weights of `group`, which was to have them for the
    /// first time.
    pub(super) fn refused(&mut self, group: Group) {
        self.full = true;
        self.sides.insert(group, Side::Cpu);
        if let Group::Layer(_) = group {
            self.reserve.release_layer();
        }
    }

    /// Leaves the memory that was kept to a session.
    pub(super) fn release(&mut self) {
        self.reserve = Reserve::default();
    }
}
