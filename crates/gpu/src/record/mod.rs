//! Recorded commands: dispatches recorded once and run any number of times.

#[cfg(not(target_arch = "wasm32"))]
mod timing;

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytemuck::Pod;

use crate::device::{Arrivals, Awaited, OpenScope, Pipeline};
use crate::error::expect;
use crate::memory::{Buffer, parallel};
use crate::shader::{Params as ShaderParams, Shader};
use crate::{Device, GpuError, Tuning, wgpu};

/// Records dispatches.
///
/// Functions of [`crate::kernels`] add them; they take effect in the order they were added.
#[derive(Debug)]
pub struct Recorder {
    device: Device,
    tuning: Tuning,
    dispatches: Vec<Dispatch>,
    params: Vec<u8>,
}

#[derive(Debug)]
struct Dispatch {
    #[cfg_attr(target_arch = "wasm32", allow(dead_code))] // of timings
    name: &'static str,
    pipeline: Arc<Pipeline>,
    buffers: wgpu::BindGroup,
    /// Bytes of the parameters.
    params: Range<usize>,
    grid: [u32; 2],
}

/// A range of a buffer bound to a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding<'a> {
    pub(crate) buffer: &'a Buffer,
    /// In bytes, a multiple of [`Limits::binding_align`](crate::Limits::binding_align).
    pub(crate) offset: u64,
    /// In bytes; `None` for the rest of the buffer.
    pub(crate) bytes: Option<u64>,
}

impl<'a> From<&'a Buffer> for Binding<'a> {
    fn from(buffer: &'a Buffer) -> Binding<'a> {
        Binding {
            buffer,
            offset: 0,
            bytes: None,
        }
    }
}

/// Alignment of parameters in a buffer: the largest that any device requires.
const PARAMS_ALIGN: usize = 256;

/// Maximum bytes of parameters of a kernel.
const MAX_PARAMS: u64 = 128;

impl Recorder {
    /// An empty recorder.
    pub fn new(device: &Device) -> Recorder {
        Recorder {
            device: device.clone(),
            tuning: device.tuning().clone(),
            dispatches: Vec::new(),
            params: Vec::new(),
        }
    }

    /// The device that commands are recorded for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The launch configurations of products from here on.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Dispatches so far.
    pub fn len(&self) -> usize {
        self.dispatches.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.dispatches.is_empty()
    }

    /// Adds a dispatch of `shader` over a grid of workgroups; an empty grid adds nothing.
    pub(crate) fn dispatch<P: ShaderParams>(
        &mut self,
        shader: &'static Shader,
        constants: &[(&'static str, f64)],
        bindings: &[Binding<'_>],
        params: &P,
        grid: [u32; 2],
    ) -> Result<(), GpuError> {
        expect(
            "bindings of a kernel",
            shader.bindings.len(),
            bindings.len(),
        )?;
        debug_assert_eq!(shader.params, P::FIELDS, "{}", shader.name);
        let params = bytemuck::bytes_of(params);
        if grid.contains(&0) {
            return Ok(());
        }
        let pipeline = self.device.pipeline(shader, constants)?;
        let entries: Vec<_> = (0..)
            .zip(bindings)
            .map(|(binding, piece)| wgpu::BindGroupEntry {
                binding,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: piece.buffer.wgpu(),
                    offset: piece.offset,
                    size: piece.bytes.and_then(std::num::NonZero::new),
                }),
            })
            .collect();
        let buffers = self.device.noted(shader.name, || {
            self.device
                .wgpu()
                .create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some(shader.name),
                    layout: &pipeline.layout,
                    entries: &entries,
                })
        })?;
        if !pipeline.has_immediates {
            self.params
                .resize(self.params.len().next_multiple_of(PARAMS_ALIGN), 0);
        }
        let start = self.params.len();
        self.params.extend_from_slice(params);
        self.dispatches.push(Dispatch {
            name: shader.name,
            pipeline,
            buffers,
            params: start..start + params.len(),
            grid,
        });
        Ok(())
    }

    /// The recorded commands, ready to run.
    ///
    /// Errors: [`GpuError::OutOfMemory`], where parameters need a buffer.
    pub fn finish(self) -> Result<Commands, GpuError> {
        let Recorder {
            device,
            dispatches,
            params,
            ..
        } = self;
        let in_buffer = !dispatches.iter().all(|it| it.pipeline.has_immediates);
        let group = in_buffer.then(|| params_group(&device, &params));
        Ok(Commands {
            dispatches,
            params,
            group: group.transpose()?,
        })
    }
}

/// Puts parameters into a buffer, to be bound from where those of a dispatch begin.
fn params_group(device: &Device, params: &[u8]) -> Result<wgpu::BindGroup, GpuError> {
    let buffer = device.checked("parameters", || {
        device.wgpu().create_buffer(&wgpu::BufferDescriptor {
            label: Some("params"),
            // A binding extends as far beyond the last offset as beyond the first.
            size: params.len() as u64 + MAX_PARAMS,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })?;
    device.queue().write_buffer(&buffer, 0, params);
    device.noted("parameters", || {
        device.wgpu().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("params"),
            layout: device.params_layout(),
            entries: &[wgpu::BindGroupEntry {
                binding: 0,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &buffer,
                    offset: 0,
                    size: std::num::NonZero::new(MAX_PARAMS),
                }),
            }],
        })
    })
}

/// Dispatches with all that they use. [`Device::submit`] runs them without allocating.
#[derive(Debug)]
pub struct Commands {
    dispatches: Vec<Dispatch>,
    /// Of all dispatches, for those that have them as immediates.
    params: Vec<u8>,
    /// The same on the device, if any dispatch has its own in a buffer.
    group: Option<wgpu::BindGroup>,
}

/// Timing of one dispatch on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// The kernel.
    pub name: &'static str,
    /// Workgroups, in both dimensions.
    pub grid: [u32; 2],
    /// From the end of the previous dispatch to its own end, in microseconds.
    pub us: f64,
}

impl Commands {
    /// Number of dispatches.
    pub fn len(&self) -> usize {
        self.dispatches.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.dispatches.is_empty()
    }

    /// Encodes some of the dispatches in a pass, with what `after` each adds to it, given its number from 1 on.
    fn encode(
        &self,
        dispatches: Range<usize>,
        pass: &mut wgpu::ComputePass<'_>,
        after: impl Fn(&mut wgpu::ComputePass<'_>, u32),
    ) {
        let mut last: Option<&Arc<Pipeline>> = None;
        for (i, dispatch) in (1..).zip(&self.dispatches[dispatches]) {
            if !last.is_some_and(|last| Arc::ptr_eq(last, &dispatch.pipeline)) {
                pass.set_pipeline(&dispatch.pipeline.wgpu);
                last = Some(&dispatch.pipeline);
            }
            pass.set_bind_group(0, &dispatch.buffers, &[]);
            match &self.group {
                Some(group) if !dispatch.pipeline.has_immediates => {
                    pass.set_bind_group(1, group, &[dispatch.params.start as u32]);
                }
                _ => pass.set_immediates(0, &self.params[dispatch.params.clone()]),
            }
            let [x, y] = dispatch.grid;
            pass.dispatch_workgroups(x, y, 1);
            after(pass, i);
        }
    }
}

/// A range of a buffer to read back.
#[derive(Debug, Clone)]
pub struct ReadRange {
    buffer: Buffer,
    /// In bytes.
    bytes: Range<u64>,
}

impl ReadRange {
    /// The elements `range` of a buffer of `T`.
    pub fn of<T: Pod>(buffer: &Buffer, range: Range<usize>) -> ReadRange {
        let size = size_of::<T>() as u64;
        ReadRange {
            buffer: buffer.clone(),
            bytes: range.start as u64 * size..range.end as u64 * size,
        }
    }
}

/// Submitted commands, and what will be read back when they are done: a future, ready once they are.
///
/// Natively the device has to be polled, as [`Submission::wait`] and [`Device::block_on`] do.
#[derive(Debug)]
#[must_use = "errors show in waiting"]
pub struct Submission {
    device: Device,
    index: wgpu::SubmissionIndex,
    reads: Vec<Read>,
    arrivals: Arrivals,
    /// Errors that a browser reports later.
    scopes: Vec<OpenScope>,
    /// The submission has been waited for.
    was_awaited: bool,
    /// When a browser's device is given up; natively those who wait have the time limit.
    #[cfg(target_arch = "wasm32")]
    timer: wgpu::Timer,
}

#[derive(Debug)]
struct Read {
    /// `None` for nothing to read.
    staging: Option<wgpu::Buffer>,
    /// Where the requested bytes begin, and how many they are.
    skip: usize,
    bytes: usize,
}

impl Submission {
    /// Whether everything is done, so that [`Submission::wait`] returns immediately.
    ///
    /// Errors: [`GpuError::Lost`].
    pub fn is_done(&mut self) -> Result<bool, GpuError> {
        self.device.poll()?;
        Ok(self.arrivals.are_complete())
    }

    /// Waits, and returns the bytes of each requested range.
    ///
    /// Errors: [`GpuError::Lost`], [`GpuError::Timeout`], [`GpuError::Refused`];
    /// [`GpuError::Unsupported`] in a browser.
    pub fn wait(self) -> Result<Vec<Vec<u8>>, GpuError> {
        let device = self.device.clone();
        device.block_on(self)?
    }

    /// The bytes that were read, which are mapped.
    fn bytes(&mut self) -> Result<Vec<Vec<u8>>, GpuError> {
        let reads: Vec<Read> = self.reads.drain(..).collect();
        let view = |read: &Read| {
            let view = read
                .staging
                .as_ref()
                .map(|staging| staging.get_mapped_range(..));
            view.transpose().map_err(|error| refused(error.to_string()))
        };
        let views: Vec<_> = reads.iter().map(view).collect::<Result<_, _>>()?;
        let parts = reads.iter().zip(&views).map(|(read, view)| match view {
            Some(view) => &view[read.skip..][..read.bytes],
            None => &[],
        });
        let copies = parallel::copied(&parts.collect::<Vec<_>>());
        drop(views);
        for staging in reads.into_iter().filter_map(|read| read.staging) {
            staging.unmap();
            self.device.staging().give(staging);
        }
        Ok(copies)
    }
}

impl Drop for Submission {
    /// What went wrong in one that nobody waited for, the next one reports.
    fn drop(&mut self) {
        self.device.give_scopes(&mut self.scopes);
    }
}

impl Future for Submission {
    /// The bytes of each requested range.
    type Output = Result<Vec<Vec<u8>>, GpuError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        #[cfg(target_arch = "wasm32")]
        if Pin::new(&mut this.timer).poll(cx).is_ready() {
            this.device.time_out();
        }
        this.device.check("waiting")?;
        while let Some(scope) = this.scopes.last_mut() {
            let Poll::Ready(reported) = scope.poll(&this.device, cx) else {
                return Poll::Pending;
            };
            // It may not be polled again, whatever it reported.
            this.scopes.pop();
            reported?;
        }
        match this.arrivals.poll(cx) {
            Poll::Ready(true) => Poll::Ready(this.bytes()),
            Poll::Ready(false) => {
                this.device.check("reading back")?;
                Poll::Ready(Err(refused("the buffer could not be mapped".into())))
            }
            Poll::Pending => {
                let awaited = match std::mem::replace(&mut this.was_awaited, true) {
                    false => Awaited::Submission(this.index.clone()),
                    true => Awaited::All,
                };
                awaited.tell();
                Poll::Pending
            }
        }
    }
}

fn refused(reason: String) -> GpuError {
    GpuError::Refused {
        what: "reading back".into(),
        reason,
    }
}

/// What timing gives without timestamps.
fn untimed() -> GpuError {
    GpuError::Unsupported {
        what: "timing dispatches".into(),
        reason: "the device has no timestamps".into(),
    }
}

impl Device {
    /// Runs commands, one after the other in one pass, then copies the ranges to read back.
    ///
    /// Errors: [`GpuError::Lost`]; [`GpuError::Shape`] if a range is outside its buffer;
    /// [`GpuError::Refused`] if the device's validation fails.
    pub fn submit(
        &self,
        commands: &[&Commands],
        reads: &[ReadRange],
    ) -> Result<Submission, GpuError> {
        for read in reads {
            let end = read.bytes.end.max(read.bytes.start);
            let most = read.buffer.bytes();
            crate::error::expect_most("end of what is read", most as usize, end as usize)?;
        }
        let reads = reads.iter().map(|read| (read.buffer.wgpu(), &read.bytes));
        self.submit_with(reads, |encoder| {
            if commands.iter().any(|commands| !commands.is_empty()) {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                for commands in commands {
                    commands.encode(0..commands.len(), &mut pass, |_, _| {});
                }
            }
        })
    }

    /// Submits what `encode` records in an encoder, followed by copies of these ranges of buffers.
    fn submit_with<'a>(
        &self,
        reads: impl ExactSizeIterator<Item = (&'a wgpu::Buffer, &'a Range<u64>)>,
        encode: impl FnOnce(&mut wgpu::CommandEncoder),
    ) -> Result<Submission, GpuError> {
        let mut staged = Vec::with_capacity(reads.len());
        for (buffer, bytes) in reads {
            // Copies are in whole words.
            let words = bytes.start / 4 * 4..bytes.end.next_multiple_of(4);
            let staging = self.staging().take(self, words.end - words.start)?;
            staged.push((buffer, bytes, words, staging));
        }
        let index = self.checked("submitting", || {
            let mut encoder = self.wgpu().create_command_encoder(&Default::default());
            encode(&mut encoder);
            for (buffer, _, words, staging) in &staged {
                if let Some(staging) = staging {
                    let n_bytes = words.end - words.start;
                    encoder.copy_buffer_to_buffer(buffer, words.start, staging, 0, n_bytes);
                }
            }
            self.queue().submit([encoder.finish()])
        })?;
        let n_mapped = staged.iter().filter(|(.., staging)| staging.is_some());
        let arrivals = Arrivals::new(n_mapped.count().max(1));
        let mut reads = Vec::with_capacity(staged.len());
        let mut is_told = false;
        for (_, bytes, words, staging) in staged {
            if let Some(staging) = &staging {
                let arrivals = arrivals.clone();
                is_told = true;
                staging.map_async(wgpu::MapMode::Read, .., move |result| {
                    arrivals.arrive(result.is_ok());
                });
            }
            reads.push(Read {
                staging,
                skip: (bytes.start - words.start) as usize,
                bytes: (bytes.end - bytes.start) as usize,
            });
        }
        if !is_told {
            let arrivals = arrivals.clone();
            (self.queue()).on_submitted_work_done(move || arrivals.arrive(true));
        }
        Ok(Submission {
            device: self.clone(),
            index,
            reads,
            arrivals,
            scopes: self.take_scopes(),
            was_awaited: false,
            #[cfg(target_arch = "wasm32")]
            timer: wgpu::Timer::new(self.timeout()),
        })
    }
}

#[cfg(target_arch = "wasm32")]
impl Device {
    /// Errors: browsers can't time dispatches.
    pub fn time(&self, _: &[&Commands]) -> Result<Vec<Timing>, GpuError> {
        Err(untimed())
    }

    /// Errors: as [`Device::time`].
    pub fn time_together(&self, _: &[&Commands]) -> Result<f64, GpuError> {
        Err(untimed())
    }
}
