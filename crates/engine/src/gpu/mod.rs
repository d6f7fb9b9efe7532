//! GPUs as a backend: `sterna-gpu` behind the seam.
//!
//! Operations are collected and handed over together, when something is read or the next step begins.
//! A step that consists of the same operations as one before is not recorded again: what differs from
//! token to token (ids, positions, rotations) lies in buffers that are written before it is run.

mod buffer;
mod cache;
mod decode;
mod fuse;
mod matrix;
mod op;
mod part;
mod tape;
mod tune;
mod weights;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use sterna_format::DType;
use sterna_gpu::kernels::linear::Epilogue;
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::{Device, GpuError, ReadRange, Timing};
use sterna_kernels::activation::Activation;
use sterna_kernels::attention::AttentionShape;
use sterna_kernels::{Exec, Isa};

use crate::ahead::Decoding;
use crate::backend::{
    Backend, BackendError, CacheShape, Continued, KvCache, LinearSource, LowRank, ScreenedRows,
    Sequence,
};
use crate::cpu::Activations;
use crate::rope::Angles;
use crate::sampler::Sampler;

pub use buffer::GpuBuffer;
pub use cache::GpuCache;
use decode::Steps;
use matrix::Matrix;
use op::{Op, Output, RawHeads, View};
pub(crate) use part::Reserve;
pub use tape::GpuWork;
use tape::SharedTape;

/// Runs models on a GPU. Clones are the same.
///
/// Ternary layers have the sums that [`Cpu`](crate::Cpu) has for equal activations; what else is computed
/// differs in the last places.
#[derive(Clone)]
pub struct Gpu {
    device: Device,
    host: Arc<Exec>,
    activations: Activations,
    tape: SharedTape,
    /// Through which weights are uploaded, while they are.
    upload: Arc<Mutex<Option<Upload>>>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("adapter", &self.device.info())
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// `device`; `n_threads` threads of this machine, counting the caller, use `isa` to repack weights.
    pub fn new(device: Device, n_threads: usize, isa: Isa) -> Gpu {
        Gpu {
            tape: SharedTape::new(&device),
            device,
            host: Arc::new(Exec::new(n_threads, isa)),
            activations: Activations::default(),
            upload: Arc::default(),
        }
    }

    /// The same with other activations. Matrices keep the kind they were loaded with.
    pub fn with_activations(self, activations: Activations) -> Gpu {
        Gpu {
            activations,
            ..self
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How much was done on the device so far.
    pub fn work(&self) -> GpuWork {
        self.tape.lock().work()
    }

    /// Does `run`, and says how long each dispatch on the device took, in order; of whatever clones of this
    /// do meanwhile for others, too. Nothing overlaps: the whole takes longer than it would otherwise.
    ///
    /// Errors: those of `run`; [`GpuError::Unsupported`], of operations within too, where the device has no
    /// timestamps; [`GpuError::Lost`] and the like of operations before that nobody waited for.
    pub fn timed<T, E: From<GpuError>>(
        &self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Vec<Timing>), E> {
        let timed = self.tape.time()?;
        let done = run()?;
        Ok((done, timed.timings()?))
    }
}

/// A weight matrix on the device.
#[derive(Debug)]
pub struct GpuLinear(Matrix);

/// A vector of weights on the device.
#[derive(Debug)]
pub struct GpuVector {
    buffer: Buffer,
    len: usize,
}

/// There are no screens on GPUs: the output head is read whole.
#[derive(Debug)]
pub enum GpuScreen {}

/// Rows up to which contexts are cut in spans, that all of the device has something to do.
const MAX_SPAN_ROWS: usize = 8;

impl Backend for Gpu {
    type Linear = GpuLinear;
    type Vector = GpuVector;
    type Screen = GpuScreen;
    type Buffer = GpuBuffer;
    type Cache = GpuCache;

    fn host(&self) -> &Exec {
        &self.host
    }

    fn load_linear(&self, source: LinearSource) -> Result<GpuLinear, BackendError> {
        let mut upload = self.upload.lock().unwrap_or_else(PoisonError::into_inner);
        let (device, host) = (&self.device, &*self.host);
        let linear = weights::load(device, host, &mut upload, &source, self.activations)?;
        Ok(GpuLinear(Matrix::new(linear)))
    }

    fn join(&self, matrices: &mut [&mut GpuLinear]) -> Result<(), BackendError> {
        let mut parts: Vec<&mut Matrix> = matrices.iter_mut().map(|m| &mut m.0).collect();
        matrix::join(&self.device, &mut parts)?;
        Ok(())
    }

    fn load_vector(&self, values: Vec<f32>) -> Result<GpuVector, BackendError> {
        Ok(GpuVector {
            len: values.len(),
            buffer: self.device.upload(&values)?,
        })
    }

    fn load_screen(&self, _: &GpuLinear, _: DType) -> Result<GpuScreen, BackendError> {
        Err(BackendError::Gpu(GpuError::Unsupported {
            what: "a screen of the output head".into(),
            reason: "the head is read whole".into(),
        }))
    }

    fn buffer(&self) -> GpuBuffer {
        GpuBuffer::default()
    }

    fn cache(&self, shape: &CacheShape) -> Result<GpuCache, BackendError> {
        // Weights come before sessions: the staging buffers have done their work.
        *self.upload.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(GpuCache::new(shape, &self.tape))
    }

    fn embed(
        &self,
        table: &GpuLinear,
        ids: &[u32],
        scale: f32,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let mut tape = self.tape.lock();
        tape.begin_step()?;
        let ids = out.write_ids(&self.device, ids)?;
        let out = out.shape(&self.device, ids.n, table.0.k())?;
        tape.push(Op::Embed {
            table: table.0.clone(),
            ids: (ids.buffer, 0),
            factor: scale,
            out,
        });
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &GpuBuffer,
        weight: &GpuVector,
        eps: f32,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let x = x.plain()?;
        let out = out.shape(&self.device, x.n_rows, x.width)?;
        let norm = (weight.buffer.clone(), eps);
        self.tape.lock().push(Op::RmsNorm { x, norm, out });
        Ok(())
    }

    fn rms_norm_in_place(
        &self,
        x: &mut GpuBuffer,
        weight: &GpuVector,
        eps: f32,
    ) -> Result<(), BackendError> {
        let rows = x.plain()?;
        let norm = (weight.buffer.clone(), eps);
        if weight.len == rows.width {
            self.tape.lock().push(Op::RmsNorm {
                x: rows.clone(),
                norm,
                out: rows,
            });
        } else {
            // Attention normalises heads as it takes them.
            x.heads.norm = Some(norm);
        }
        Ok(())
    }

    fn linear(
        &self,
        x: &GpuBuffer,
        outputs: &mut [(&GpuLinear, &mut GpuBuffer)],
    ) -> Result<(), BackendError> {
        let x = x.plain()?;
        let mut products = Vec::with_capacity(outputs.len());
        let epilogue = Epilogue::Store;
        if let [(q, q_out), (k, k_out), (v, v_out)] = outputs {
            // Queries, keys and values, which attention takes side by side.
            let width = q.0.n() + k.0.n() + v.0.n();
            let all = q_out.shape(&self.device, x.n_rows, width)?;
            let mut first = 0;
            for (w, out) in [(q, q_out), (k, k_out), (v, v_out)] {
                let own = all.columns(first, w.0.n());
                first += w.0.n();
                out.set(own.clone());
                let w = w.0.clone();
                let out = own;
                products.push(Output { w, out, epilogue });
            }
        } else {
            for (w, out) in outputs {
                let out = out.shape(&self.device, x.n_rows, w.0.n())?;
                let w = w.0.clone();
                products.push(Output { w, out, epilogue });
            }
        }
        if !products.is_empty() {
            self.tape.lock().push(Op::Linear {
                x,
                norm: None,
                outputs: products,
            });
        }
        Ok(())
    }

    fn linear_top(
        &self,
        _: &GpuBuffer,
        _: &GpuLinear,
        screen: &GpuScreen,
        _: usize,
        _: &mut GpuBuffer,
    ) -> Result<ScreenedRows, BackendError> {
        match *screen {}
    }

    fn add_low_rank(
        &self,
        x: &GpuBuffer,
        rows: Range<usize>,
        updates: &mut [LowRank<'_, Gpu>],
    ) -> Result<(), BackendError> {
        let x = x.plain()?.rows(rows.start, rows.len());
        let mut tape = self.tape.lock();
        for LowRank { a, b, scale, out } in updates {
            let out = out.plain()?.rows(rows.start, rows.len());
            let inner = tape.inner(rows.len() * a.0.n())?;
            let inner = View::new(&inner, rows.len(), a.0.n());
            let product = |x: View, w: &GpuLinear, out: View, epilogue| Op::Linear {
                x,
                norm: None,
                outputs: vec![Output {
                    w: w.0.clone(),
                    out,
                    epilogue,
                }],
            };
            tape.push(product(x.clone(), a, inner.clone(), Epilogue::Store));
            tape.push(Op::Scale {
                x: inner.clone(),
                factor: *scale,
            });
            tape.push(product(inner, b, out, Epilogue::Add));
        }
        Ok(())
    }

    fn add_bias(&self, x: &mut GpuBuffer, bias: &GpuVector) -> Result<(), BackendError> {
        let x = x.plain()?;
        let bias = bias.buffer.clone();
        self.tape.lock().push(Op::AddBias { x, bias });
        Ok(())
    }

    /// Attention rotates heads as it takes them: nothing else can be done with `x` after this.
    fn rope(&self, x: &mut GpuBuffer, _: usize, angles: &Angles) -> Result<(), BackendError> {
        x.heads.angles = Some(self.tape.lock().angles(angles));
        Ok(())
    }

    fn attention(
        &self,
        sequences: &mut [Sequence<'_, GpuCache>],
        layer: usize,
        shape: &AttentionShape,
        q: &GpuBuffer,
        k: &GpuBuffer,
        v: &GpuBuffer,
        out: &mut GpuBuffer,
    ) -> Result<(), BackendError> {
        let mut tape = self.tape.lock();
        let device = &self.device;
        let qkv = out.side_by_side(device, &mut tape, [q, k, v])?;
        let (q_width, n_rows) = (q.view()?.width, qkv.n_rows);
        let out = out.shape(device, n_rows, q_width)?;
        if q.heads.angles.as_ref().map(Arc::as_ptr) != k.heads.angles.as_ref().map(Arc::as_ptr) {
            return Err(buffer::unfit(
                "queries and keys rotated by different angles",
            ));
        }
        let mut first = 0;
        for Sequence { cache, n_rows } in sequences {
            let rows = first..first + *n_rows;
            first = rows.end;
            let is_one = rows.len() == qkv.n_rows;
            let memory = cache.layer(device, &mut tape, layer, *n_rows)?;
            let position = cache.position(device)?;
            let turn = match &q.heads.angles {
                Some(angles) => {
                    // For one sequence, those of positions to come may follow.
                    let all = angles.cos.len() / (angles.dim / 2).max(1);
                    let rows = rows.start..if is_one { all.max(rows.end) } else { rows.end };
                    Some(cache.turn(device, &tape, angles, rows)?)
                }
                None => None,
            };
            let qkv = qkv.rows(rows.start, *n_rows);
            tape.push(Op::Heads {
                heads: RawHeads {
                    qkv: qkv.clone(),
                    n_heads: shape.n_heads,
                    q_norm: q.heads.norm.clone(),
                    k_norm: k.heads.norm.clone(),
                    turn,
                    position: position.clone(),
                },
                cache: memory.clone(),
            });
            let len = cache::most_len(cache.len() + *n_rows);
            tape.push(Op::Attention {
                shape: *shape,
                q: qkv.columns(0, q_width),
                position,
                cache: memory,
                most_len: (*n_rows <= MAX_SPAN_ROWS).then_some(len),
                out: out.rows(rows.start, *n_rows),
            });
        }
        Ok(())
    }

    fn gate(
        &self,
        activation: Activation,
        gate: &mut GpuBuffer,
        up: &GpuBuffer,
    ) -> Result<(), BackendError> {
        let (gate, up) = (gate.plain()?, up.plain()?);
        self.tape.lock().push(Op::Gate {
            activation,
            gate,
            up,
        });
        Ok(())
    }

    fn add(&self, x: &mut GpuBuffer, y: &GpuBuffer) -> Result<(), BackendError> {
        let (x, y) = (x.plain()?, y.plain()?);
        self.tape.lock().push(Op::Add { x, y });
        Ok(())
    }

    fn softcap(&self, x: &mut GpuBuffer, cap: f32) -> Result<(), BackendError> {
        let x = x.plain()?;
        self.tape.lock().push(Op::Softcap { x, cap });
        Ok(())
    }

    fn keep_rows(&self, x: &mut GpuBuffer, rows: &[usize]) -> Result<(), BackendError> {
        x.keep_rows(&self.device, &mut self.tape.lock(), rows)
    }

    fn read(&self, x: &mut GpuBuffer) -> Result<Vec<f32>, BackendError> {
        let mut tape = self.tape.lock();
        let rows = x.dense(&self.device, &mut tape)?;
        let range = rows.offset..rows.offset + rows.n_rows * rows.width;
        let submission = tape.submit(&[ReadRange::of::<f32>(&rows.buffer, range)])?;
        drop(tape);
        let read = submission.wait()?;
        let bytes = read.first().map_or(&[][..], |bytes| &bytes[..]);
        let values = bytes.as_chunks::<4>().0.iter();
        Ok(values.map(|bytes| f32::from_ne_bytes(*bytes)).collect())
    }

    fn write(&self, values: &[f32], width: usize, x: &mut GpuBuffer) -> Result<(), BackendError> {
        // Operations before this one read what is there now.
        self.tape.lock().flush()?;
        x.overwrite(&self.device, values, width)
    }

    fn steps_ahead(&self, cache: &mut GpuCache, sampler: &Sampler) -> Result<usize, BackendError> {
        let n_steps = decode::steps_from(cache.len(), sampler);
        if n_steps == 0 {
            return Ok(0);
        }
        // What is copied as memory grows would cut the step in two.
        let room = cache.n_steps(&self.device, &mut self.tape.lock())?;
        Ok(n_steps.min(room))
    }

    fn decode(
        &self,
        logits: &mut GpuBuffer,
        Continued {
            cache,
            last,
            n_steps,
        }: Continued<'_, GpuCache>,
        sampler: &Sampler,
    ) -> Result<Option<Box<dyn Decoding>>, BackendError> {
        let mut tape = self.tape.lock();
        let logits = logits.plain()?;
        let Some((state, choice)) = cache.go_on(&self.device, last, logits, sampler)? else {
            return Ok(None);
        };
        let positions = (cache.len(), cache.len() + n_steps);
        let commands = tape.repeatable(&state, choice)?;
        let steps = commands.map(|commands| Steps::new(&self.tape, commands, state, positions));
        Ok(steps.map(|steps| Box::new(steps) as Box<dyn Decoding>))
    }
}
