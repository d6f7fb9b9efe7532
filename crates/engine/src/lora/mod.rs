//! Low-rank adapters (LoRA): updates to the linear layers of a model, applied in addition to its weights.
//!
//! A layer `y = W x` with an adapter gives `y = W x + scale · scaling · B (A x)`. Nothing is merged into
//! `W`, so an adapter works over any type of weights, several may be active at once, and those of a
//! session are changed without touching the model or other sessions.

mod check;

use std::ops::Range;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use sterna_format::DType;
use sterna_format::names::module;
use sterna_kernels::quant::QuantError;

use crate::backend::{Backend, BackendError, LowRank};
use crate::forward::ForwardPass;
use crate::model::Model;
use crate::stage::{LinearLayer, Operation, Stage};
use crate::weights::Group;

use check::{Checked, Factors};

/// A linear layer of a transformer block that an adapter changes, by its name in Hugging Face
/// checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
// The order of the first seven is that of `LinearLayer`, and of `BlockUpdates`.
pub enum Module {
    /// `q_proj`: queries.
    Q,
    /// `k_proj`: keys.
    K,
    /// `v_proj`: values.
    V,
    /// `o_proj`: the output projection of attention.
    O,
    /// `gate_proj`: the gate projection of the feed-forward block.
    Gate,
    /// `up_proj`: the up projection.
    Up,
    /// `down_proj`: the down projection.
    Down,
    /// `qkv_proj`: queries, keys and values in one matrix, in this order.
    Qkv,
    /// `gate_up_proj`: gate and up in one matrix, the gate first.
    GateUp,
}

impl Module {
    /// Every module there is.
    pub const ALL: [Module; 9] = [
        Module::Q,
        Module::K,
        Module::V,
        Module::O,
        Module::Gate,
        Module::Up,
        Module::Down,
        Module::Qkv,
        Module::GateUp,
    ];

    /// Its name in Hugging Face checkpoints.
    pub fn name(self) -> &'static str {
        module::name(match self {
            Module::Q => module::Q,
            Module::K => module::K,
            Module::V => module::V,
            Module::O => module::O,
            Module::Gate => module::GATE,
            Module::Up => module::UP,
            Module::Down => module::DOWN,
            Module::Qkv => module::QKV,
            Module::GateUp => module::GATE_UP,
        })
    }

    /// The module with this name in Hugging Face checkpoints.
    pub fn from_name(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|module| module.name() == name)
    }

    /// The layers of the engine that it stands for, in the order of its rows.
    fn parts(self) -> &'static [Module] {
        match self {
            Module::Q => &[Module::Q],
            Module::K => &[Module::K],
            Module::V => &[Module::V],
            Module::O => &[Module::O],
            Module::Gate => &[Module::Gate],
            Module::Up => &[Module::Up],
            Module::Down => &[Module::Down],
            Module::Qkv => &[Module::Q, Module::K, Module::V],
            Module::GateUp => &[Module::Gate, Module::Up],
        }
    }
}

/// An adapter as described by its files, whatever their format. Rows of query and key matrices are in the
/// order of Hugging Face checkpoints.
#[derive(Debug, Clone)]
pub struct AdapterSource {
    /// Its name in messages.
    pub name: String,
    /// The orientation of its matrices, for shapes that would allow both.
    pub orientation: Orientation,
    /// The updates of single layers.
    pub pairs: Vec<LoraPair>,
}

/// How to store an adapter in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AdapterOptions {
    /// The type to encode matrices as; `None` keeps them as they are stored. The rank is padded with zeros to
    /// whole blocks of up to 32 elements. Matrices are kept where rows still aren't whole blocks: B where
    /// blocks are longer than the rank, and any with a width that is no multiple.
    pub dtype: Option<DType>,
}

/// The orientation of an adapter's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// A is `[rank, in]` and B is `[out, rank]`, as PEFT writes them.
    RankFirst,
    /// A is `[in, rank]` and B is `[rank, out]`, as RDRR packages have them.
    RankLast,
}

/// What an adapter adds to one linear layer: `scaling · B (A x)`.
#[derive(Debug, Clone)]
pub struct LoraPair {
    /// The transformer block, from 0.
    pub layer: usize,
    /// The linear layer in it.
    pub module: Module,
    /// Usually `alpha / rank`, or `alpha / √rank` if the adapter is rank-stabilised.
    pub scaling: f32,
    /// The down-projection to `rank` values.
    pub a: LoraMatrix,
    /// The up-projection to the layer's outputs.
    pub b: LoraMatrix,
}

/// A matrix of a [`LoraPair`].
#[derive(Debug, Clone)]
pub struct LoraMatrix {
    /// Its name in the file, for messages.
    pub name: String,
    /// Rows and columns.
    pub shape: Vec<usize>,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// The values, row by row.
    pub bytes: Bytes,
}

/// Why an adapter does not fit a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// An adapter that changes nothing.
    #[error("expected tensors that change linear layers, found none")]
    Empty,
    /// A block that the model doesn't have.
    #[error("tensor `{tensor}`: expected a layer below {n_layers}, found {found}")]
    UnknownLayer {
        /// Name in the file.
        tensor: String,
        /// Blocks of the model.
        n_layers: usize,
        /// The block the tensor is for.
        found: usize,
    },
    /// A change of a module that the layer doesn't have: of a feed-forward network where there are experts, of
    /// attention where there is a convolution.
    #[error(
        "tensor `{tensor}`: expected a module of layer {layer}, found {module}, which it lacks"
    )]
    NoModule {
        /// Name in the file.
        tensor: String,
        /// Name of the module, such as `q_proj`.
        module: &'static str,
        /// The block the tensor is for.
        layer: usize,
    },
    /// A matrix whose shape doesn't match the model's layer.
    #[error(
        "tensor `{tensor}`: expected shape {expected} by the {module} of the base model, found {found:?}"
    )]
    Shape {
        /// Name in the file.
        tensor: String,
        /// Name of the layer, such as `q_proj`.
        module: &'static str,
        /// The expected shape.
        expected: String,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// Values of a type that isn't supported for adapters.
    #[error("tensor `{tensor}`: expected type F32, F16 or BF16, found {found}")]
    Type {
        /// Name in the file.
        tensor: String,
        /// Its type.
        found: DType,
    },
    /// The wrong number of bytes for the shape.
    #[error("tensor `{tensor}`: expected {expected} bytes by its shape, found {found}")]
    Size {
        /// Name in the file.
        tensor: String,
        /// Bytes by shape and type.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A value that is NaN or infinite.
    #[error("tensor `{tensor}`: expected numbers, found {found} at index {index}")]
    NotFinite {
        /// Name in the file.
        tensor: String,
        /// Index of the value.
        index: usize,
        /// The value.
        found: f32,
    },
    /// A scaling that is NaN or infinite.
    #[error("tensor `{tensor}`: expected a finite scaling, found {found}")]
    Scaling {
        /// Name of the A matrix in the file.
        tensor: String,
        /// The scaling.
        found: f32,
    },
    /// Two updates of one layer in one adapter.
    #[error(
        "tensor `{tensor}`: expected one change of the {module} of layer {layer}, found another"
    )]
    Twice {
        /// Name in the file of the second one's A matrix.
        tensor: String,
        /// Name of the layer in its block.
        module: &'static str,
        /// The block.
        layer: usize,
    },
    /// Values that can't be encoded as the requested type.
    #[error("tensor `{tensor}` as {dtype}")]
    Encode {
        /// Name in the file.
        tensor: String,
        /// The requested type.
        dtype: DType,
        /// Why not.
        source: QuantError,
    },
    /// The backend refused a matrix.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// An adapter whose matrices are on the backend of a model, checked against it. Shared by the sessions it is
/// active in; see [`Model::load_adapter`].
pub struct Adapter<B: Backend> {
    name: String,
    /// That of its model.
    backend: Weak<B>,
    /// `[n_layers]`.
    layers: Vec<BlockUpdates<B::Linear>>,
}

/// The updates of each linear layer of a block, in the order of [`LinearLayer`].
type BlockUpdates<L> = [Option<Update<L>>; 7];

/// `y ← y + scaling · B (A x)`.
struct Update<L> {
    /// `[rank, in]`.
    a: L,
    /// `[out, rank]`.
    b: L,
    scaling: f32,
}

/// An active adapter and its scale.
pub struct ActiveAdapter<B: Backend> {
    /// The adapter.
    pub adapter: Arc<Adapter<B>>,
    /// Scale of its updates; 1 is as trained.
    pub scale: f32,
}

impl<B: Backend> Clone for ActiveAdapter<B> {
    fn clone(&self) -> ActiveAdapter<B> {
        ActiveAdapter {
            adapter: Arc::clone(&self.adapter),
            scale: self.scale,
        }
    }
}

impl<B: Backend> PartialEq for ActiveAdapter<B> {
    fn eq(&self, other: &ActiveAdapter<B>) -> bool {
        Arc::ptr_eq(&self.adapter, &other.adapter) && self.scale == other.scale
    }
}

impl<B: Backend> Adapter<B> {
    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it was loaded for `model`, or for one that has the same backend: a fork.
    pub(crate) fn is_for(&self, model: &Model<B>) -> bool {
        std::ptr::eq(self.backend.as_ptr(), Arc::as_ptr(&model.backend))
    }
}

impl<B: Backend> Model<B> {
    /// Checks an adapter against this model and loads its matrices onto the model's backend. The model's own
    /// weights are neither read nor changed; the adapter is active in the sessions that it is set for
    /// ([`Session::set_adapters`](crate::Session::set_adapters)).
    ///
    /// Errors: [`AdapterError`] names the tensor at fault, what was expected and what was found.
    pub fn load_adapter(
        self: &Arc<Self>,
        source: AdapterSource,
        options: AdapterOptions,
    ) -> Result<Arc<Adapter<B>>, AdapterError> {
        let mut layers: Vec<BlockUpdates<B::Linear>> = Vec::new();
        layers.resize_with(self.config.n_layers, Default::default);
        for Checked {
            layer,
            module,
            mut factors,
        } in check::check(&self.config, source.orientation, source.pairs)?
        {
            if let Some(dtype) = options.dtype {
                factors.encode(self.backend.host(), dtype)?;
            }
            let Factors { a, b, scaling } = factors;
            let (a, b) = (a.into_source(), b.into_source());
            let load = |backend: &B| {
                Ok(Update {
                    a: backend.load_linear(a.clone())?,
                    b: backend.load_linear(b.clone())?,
                    scaling,
                })
            };
            // Next to the matrices that they update.
            let update = self.backend.load_group(Group::Layer(layer), load)?;
            layers[layer][module as usize] = Some(update);
        }
        Ok(Arc::new(Adapter {
            name: source.name,
            backend: Arc::downgrade(&self.backend),
            layers,
        }))
    }
}

impl<B: Backend> ForwardPass<'_, B> {
    /// Adds the updates of the `adapters` of each range of rows to the outputs of linear layers of block
    /// `layer`, which all read `x`.
    pub(crate) fn adapt(
        &self,
        adapters: &[(Range<usize>, &[ActiveAdapter<B>])],
        layer: usize,
        x: &B::Buffer,
        outputs: &mut [(LinearLayer, &mut B::Buffer)],
    ) -> Result<(), BackendError> {
        for (rows, adapters) in adapters {
            for ActiveAdapter { adapter, scale } in adapters.iter() {
                let updates = &adapter.layers[layer];
                let mut low_rank: Vec<LowRank<'_, B>> = Vec::with_capacity(outputs.len());
                for (linear, out) in outputs.iter_mut() {
                    let Some(Update { a, b, scaling }) = &updates[*linear as usize] else {
                        continue;
                    };
                    let scale = scale * scaling;
                    // Not even the sign of a zero changes.
                    if scale != 0.0 {
                        let stage = Stage {
                            layer: Some(layer),
                            operation: Operation::Adapter(*linear),
                        };
                        low_rank.push(LowRank {
                            stage,
                            a,
                            b,
                            scale,
                            out,
                        });
                    }
                }
                if !low_rank.is_empty() {
                    self.backend.add_low_rank(x, rows.clone(), &mut low_rank)?;
                }
            }
        }
        Ok(())
    }
}
