//! What this crate uses of `wgpu`'s interface, over the WebGPU of a browser, or of Dawn in Node.js.
//!
//! `wgpu` has a backend of its own for browsers, which can neither ask for subgroups nor set immediates, and
//! which brings the whole of WebGPU along. Here names and meanings are `wgpu`'s, as far as they are used, so
//! that one source serves both; only what is asked of an adapter differs, in `device::adapter`.

#![allow(dead_code)] // what only `wgpu` reads of its descriptors

mod js;
mod timer;

pub(crate) use timer::Timer;

use std::borrow::Cow;
use std::fmt;
use std::future::poll_fn;
use std::num::NonZero;
use std::ops::{BitOr, Deref, RangeFull};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use js_sys::{Array, Object, Promise};
use wasm_bindgen::prelude::Closure;
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::{JsFuture, spawn_local};

use js::{bytes, member, number, object, set, text};

/// An adapter, with the features of the language that comes with it.
#[derive(Debug, Clone)]
pub(crate) struct Adapter {
    js: js::Adapter,
    language: Option<js::Names>,
}

impl Adapter {
    /// The adapter that the browser chooses for computing; none where there is no WebGPU.
    pub(crate) async fn request(low_power: bool) -> Option<Adapter> {
        let gpu = js::gpu()?;
        let preference = match low_power {
            true => "low-power",
            false => "high-performance",
        };
        let options = object([("powerPreference", preference.into())]);
        let found = JsFuture::from(gpu.request_adapter(&options)).await.ok()?;
        found.is_object().then(|| Adapter {
            js: found.unchecked_into(),
            language: gpu.wgsl_language_features(),
        })
    }

    /// Whether it has an optional feature, by WebGPU's name.
    pub(crate) fn has(&self, feature: &str) -> bool {
        self.js.features().has(feature)
    }

    /// Whether its WGSL has an optional feature, by the language's name.
    pub(crate) fn speaks(&self, feature: &str) -> bool {
        self.language
            .as_ref()
            .is_some_and(|names| names.has(feature))
    }

    /// A limit, by WebGPU's name; 0 where it is unknown.
    pub(crate) fn limit(&self, name: &str) -> u64 {
        number(&self.js.limits(), name) as u64
    }

    /// A number of its description; 0 where there is none.
    pub(crate) fn info_number(&self, name: &str) -> u32 {
        number(&self.js.info(), name) as u32
    }

    /// A text of its description; empty where there is none.
    pub(crate) fn info_text(&self, name: &str) -> String {
        text(&self.js.info(), name)
    }

    /// Whether it computes in software.
    pub(crate) fn is_fallback(&self) -> bool {
        member(&self.js.info(), "isFallbackAdapter").is_truthy()
    }

    /// Opens a device with these features and limits.
    ///
    /// Errors: the browser's message.
    pub(crate) async fn open(
        &self,
        features: &[&str],
        limits: &[(&str, u64)],
    ) -> Result<(Device, Queue), String> {
        let wanted = Object::new();
        for (name, limit) in limits {
            set(&wanted, name, &(*limit as f64).into());
        }
        let features: Array = features.iter().map(|name| JsValue::from(*name)).collect();
        let descriptor = object([
            ("label", "sterna".into()),
            ("requiredFeatures", features.into()),
            ("requiredLimits", wanted.into()),
        ]);
        let device = JsFuture::from(self.js.request_device(&descriptor)).await;
        let device: js::Device = device.map_err(|error| message(&error))?.unchecked_into();
        let queue = device.queue();
        Ok((Device { js: device }, Queue { js: queue }))
    }
}

/// The message of what JavaScript has thrown.
fn message(thrown: &JsValue) -> String {
    match text(thrown, "message") {
        empty if empty.is_empty() => format!("{thrown:?}"),
        message => message,
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Device {
    js: js::Device,
}

/// Why a device is lost.
#[derive(Debug)]
pub(crate) enum DeviceLostReason {
    Destroyed,
    Unknown,
}

/// An error that a device reports.
#[derive(Debug)]
pub(crate) enum Error {
    OutOfMemory {},
    /// With the browser's message.
    Refused(String),
}

impl Error {
    fn of(error: &JsValue) -> Error {
        let class = text(&member(error, "constructor"), "name");
        match class.as_str() {
            "GPUOutOfMemoryError" => Error::OutOfMemory {},
            _ => Error::Refused(message(error)),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::OutOfMemory {} => f.write_str("out of memory"),
            Error::Refused(message) => f.write_str(message),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum ErrorFilter {
    Internal,
    OutOfMemory,
    Validation,
}

/// An open error scope.
#[derive(Debug)]
pub(crate) struct ErrorScopeGuard {
    device: js::Device,
}

impl ErrorScopeGuard {
    /// Closes the scope now; the future is what it caught.
    pub(crate) fn pop(self) -> impl Future<Output = Option<Error>> {
        let caught = JsFuture::from(self.device.pop_error_scope());
        async move {
            // A lost device rejects, and its loss is told elsewhere.
            let error = caught.await.unwrap_or_default();
            error.is_object().then(|| Error::of(&error))
        }
    }
}

impl Device {
    pub(crate) fn set_device_lost_callback(
        &self,
        callback: impl FnOnce(DeviceLostReason, String) + 'static,
    ) {
        let lost = JsFuture::from(self.js.lost());
        spawn_local(async move {
            let info = lost.await.unwrap_or_default();
            let reason = match text(&info, "reason").as_str() {
                "destroyed" => DeviceLostReason::Destroyed,
                _ => DeviceLostReason::Unknown,
            };
            callback(reason, text(&info, "message"));
        });
    }

    pub(crate) fn on_uncaptured_error(&self, handler: Arc<dyn Fn(Error)>) {
        let handler = Closure::<dyn Fn(JsValue)>::new(move |event: JsValue| {
            handler(Error::of(&member(&event, "error")));
        });
        self.js.set_onuncapturederror(&handler.into_js_value());
    }

    pub(crate) fn push_error_scope(&self, filter: ErrorFilter) -> ErrorScopeGuard {
        self.js.push_error_scope(match filter {
            ErrorFilter::Internal => "internal",
            ErrorFilter::OutOfMemory => "out-of-memory",
            ErrorFilter::Validation => "validation",
        });
        ErrorScopeGuard {
            device: self.js.clone(),
        }
    }

    pub(crate) fn destroy(&self) {
        self.js.destroy();
    }

    pub(crate) fn create_buffer(&self, descriptor: &BufferDescriptor<'_>) -> Buffer {
        let js = self.js.create_buffer(&object([
            ("label", label(descriptor.label)),
            ("size", (descriptor.size as f64).into()),
            ("usage", descriptor.usage.0.into()),
        ]));
        Buffer(Arc::new(OwnedBuffer {
            js,
            size: descriptor.size,
            lost: self.js.lost(),
        }))
    }

    pub(crate) fn create_bind_group_layout(
        &self,
        descriptor: &BindGroupLayoutDescriptor<'_>,
    ) -> BindGroupLayout {
        let entry = |entry: &BindGroupLayoutEntry| {
            let BindingType::Buffer {
                ty,
                has_dynamic_offset,
                ..
            } = entry.ty;
            let ty = match ty {
                BufferBindingType::Uniform => "uniform",
                BufferBindingType::Storage { read_only: true } => "read-only-storage",
                BufferBindingType::Storage { read_only: false } => "storage",
            };
            let buffer = object([
                ("type", ty.into()),
                ("hasDynamicOffset", has_dynamic_offset.into()),
            ]);
            object([
                ("binding", entry.binding.into()),
                ("visibility", entry.visibility.0.into()),
                ("buffer", buffer.into()),
            ])
        };
        let entries: Array = descriptor.entries.iter().map(entry).collect();
        BindGroupLayout(self.js.create_bind_group_layout(&object([
            ("label", label(descriptor.label)),
            ("entries", entries.into()),
        ])))
    }

    pub(crate) fn create_pipeline_layout(
        &self,
        descriptor: &PipelineLayoutDescriptor<'_>,
    ) -> PipelineLayout {
        let layouts = descriptor.bind_group_layouts.iter();
        let layouts: Array = layouts
            .map(|layout| layout.map_or(JsValue::NULL, |layout| layout.0.clone()))
            .collect();
        let described = object([
            ("label", label(descriptor.label)),
            ("bindGroupLayouts", layouts.into()),
        ]);
        if descriptor.immediate_size > 0 {
            set(
                &described,
                "immediateSize",
                &descriptor.immediate_size.into(),
            );
        }
        PipelineLayout(self.js.create_pipeline_layout(&described))
    }

    pub(crate) fn create_shader_module(
        &self,
        descriptor: ShaderModuleDescriptor<'_>,
    ) -> ShaderModule {
        let ShaderSource::Wgsl(code) = descriptor.source;
        ShaderModule(self.js.create_shader_module(&object([
            ("label", label(descriptor.label)),
            ("code", (*code).into()),
        ])))
    }

    pub(crate) fn create_compute_pipeline(
        &self,
        descriptor: &ComputePipelineDescriptor<'_>,
    ) -> ComputePipeline {
        let constants = Object::new();
        for (name, value) in descriptor.compilation_options.constants {
            set(&constants, name, &(*value).into());
        }
        let compute = object([
            ("module", descriptor.module.0.clone()),
            ("entryPoint", label(descriptor.entry_point)),
            ("constants", constants.into()),
        ]);
        let layout = descriptor.layout.map(|layout| layout.0.clone());
        ComputePipeline(self.js.create_compute_pipeline(&object([
            ("label", label(descriptor.label)),
            ("layout", layout.unwrap_or_else(|| "auto".into())),
            ("compute", compute.into()),
        ])))
    }

    pub(crate) fn create_bind_group(&self, descriptor: &BindGroupDescriptor<'_>) -> BindGroup {
        let mut buffers = Vec::with_capacity(descriptor.entries.len());
        let entry = |entry: &BindGroupEntry<'_>| {
            let BindingResource::Buffer(binding) = &entry.resource;
            buffers.push(binding.buffer.clone());
            let resource = object([
                ("buffer", binding.buffer.0.js.clone().into()),
                ("offset", (binding.offset as f64).into()),
            ]);
            if let Some(size) = binding.size {
                set(&resource, "size", &(size.get() as f64).into());
            }
            object([
                ("binding", entry.binding.into()),
                ("resource", resource.into()),
            ])
        };
        let entries: Array = descriptor.entries.iter().map(entry).collect();
        let js = self.js.create_bind_group(&object([
            ("label", label(descriptor.label)),
            ("layout", descriptor.layout.0.clone()),
            ("entries", entries.into()),
        ]));
        BindGroup {
            js,
            _buffers: buffers,
        }
    }

    pub(crate) fn create_command_encoder(&self, _: &CommandEncoderDescriptor) -> CommandEncoder {
        CommandEncoder(self.js.create_command_encoder())
    }
}

fn label(label: Option<&str>) -> JsValue {
    label.unwrap_or_default().into()
}

#[derive(Debug, Clone)]
pub(crate) struct Queue {
    js: js::Queue,
}

/// A browser doesn't number submissions: nothing can wait for one.
#[derive(Debug, Clone)]
pub(crate) struct SubmissionIndex;

impl Queue {
    pub(crate) fn write_buffer(&self, buffer: &Buffer, offset: u64, data: &[u8]) {
        self.js.write_buffer(&buffer.0.js, offset as f64, data);
    }

    pub(crate) fn submit<const N: usize>(&self, commands: [CommandBuffer; N]) -> SubmissionIndex {
        let commands: Array = commands.into_iter().map(|commands| commands.0).collect();
        self.js.submit(&commands);
        SubmissionIndex
    }

    pub(crate) fn on_submitted_work_done(&self, callback: impl FnOnce() + 'static) {
        let done = JsFuture::from(self.js.on_submitted_work_done());
        spawn_local(async move {
            // A lost device rejects, and its loss is told elsewhere.
            let _ = done.await;
            callback();
        });
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BufferUsages(u32);

impl BufferUsages {
    pub(crate) const MAP_READ: BufferUsages = BufferUsages(0x1);
    pub(crate) const COPY_SRC: BufferUsages = BufferUsages(0x4);
    pub(crate) const COPY_DST: BufferUsages = BufferUsages(0x8);
    pub(crate) const UNIFORM: BufferUsages = BufferUsages(0x40);
    pub(crate) const STORAGE: BufferUsages = BufferUsages(0x80);
}

impl BitOr for BufferUsages {
    type Output = BufferUsages;

    fn bitor(self, other: BufferUsages) -> BufferUsages {
        BufferUsages(self.0 | other.0)
    }
}

#[derive(Debug)]
pub(crate) struct BufferDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) size: u64,
    pub(crate) usage: BufferUsages,
    pub(crate) mapped_at_creation: bool,
}

/// A buffer; its memory is given back with the last clone, not when JavaScript happens to collect it.
#[derive(Debug, Clone)]
pub(crate) struct Buffer(Arc<OwnedBuffer>);

#[derive(Debug)]
struct OwnedBuffer {
    js: js::Buffer,
    size: u64,
    /// Resolves once its device is lost.
    lost: Promise,
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        self.js.destroy_buffer();
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum MapMode {
    Read,
}

/// How long the news of a loss may take.
const NEWS_OF_LOSS: Duration = Duration::from_secs(1);

/// A copy of a mapped range.
#[derive(Debug)]
pub(crate) struct BufferView(Vec<u8>);

impl Deref for BufferView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Buffer {
    pub(crate) fn size(&self) -> u64 {
        self.0.size
    }

    pub(crate) fn map_async(
        &self,
        mode: MapMode,
        _: RangeFull,
        callback: impl FnOnce(Result<(), JsValue>) + 'static,
    ) {
        let mode = match mode {
            MapMode::Read => 1,
        };
        let mapped = JsFuture::from(self.0.js.map_async(mode));
        let mut lost = JsFuture::from(self.0.lost.clone());
        spawn_local(async move {
            let mapped = mapped.await.map(|_| ());
            if mapped.is_err() {
                // Browsers tell of a loss after what it spoils.
                let mut timer = Timer::new(NEWS_OF_LOSS);
                poll_fn(|cx| match Pin::new(&mut lost).poll(cx) {
                    Poll::Ready(_) => Poll::Ready(()),
                    Poll::Pending => Pin::new(&mut timer).poll(cx),
                })
                .await;
            }
            callback(mapped);
        });
    }

    pub(crate) fn get_mapped_range(&self, _: RangeFull) -> Result<BufferView, Error> {
        let mapped = self.0.js.mapped_range();
        let mapped = mapped.map_err(|error| Error::Refused(message(&error)))?;
        Ok(BufferView(bytes(&mapped)))
    }

    pub(crate) fn unmap(&self) {
        self.0.js.unmap();
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ShaderStages(u32);

impl ShaderStages {
    pub(crate) const COMPUTE: ShaderStages = ShaderStages(0x4);
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum BufferBindingType {
    Uniform,
    Storage { read_only: bool },
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum BindingType {
    Buffer {
        ty: BufferBindingType,
        has_dynamic_offset: bool,
        min_binding_size: Option<NonZero<u64>>,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct BindGroupLayoutEntry {
    pub(crate) binding: u32,
    pub(crate) visibility: ShaderStages,
    pub(crate) ty: BindingType,
    pub(crate) count: Option<NonZero<u32>>,
}

#[derive(Debug)]
pub(crate) struct BindGroupLayoutDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) entries: &'a [BindGroupLayoutEntry],
}

#[derive(Debug)]
pub(crate) struct BindGroupLayout(JsValue);

#[derive(Debug)]
pub(crate) struct PipelineLayoutDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) bind_group_layouts: &'a [Option<&'a BindGroupLayout>],
    pub(crate) immediate_size: u32,
}

#[derive(Debug)]
pub(crate) struct PipelineLayout(JsValue);

#[derive(Debug)]
pub(crate) enum ShaderSource<'a> {
    Wgsl(Cow<'a, str>),
}

#[derive(Debug)]
pub(crate) struct ShaderModuleDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) source: ShaderSource<'a>,
}

#[derive(Debug)]
pub(crate) struct ShaderModule(JsValue);

/// Browsers keep compiled pipelines by themselves.
#[derive(Debug)]
pub(crate) enum PipelineCache {}

#[derive(Debug)]
pub(crate) struct PipelineCompilationOptions<'a> {
    pub(crate) constants: &'a [(&'a str, f64)],
    /// Browsers always do.
    pub(crate) zero_initialize_workgroup_memory: bool,
}

#[derive(Debug)]
pub(crate) struct ComputePipelineDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) layout: Option<&'a PipelineLayout>,
    pub(crate) module: &'a ShaderModule,
    pub(crate) entry_point: Option<&'a str>,
    pub(crate) compilation_options: PipelineCompilationOptions<'a>,
    pub(crate) cache: Option<&'a PipelineCache>,
}

#[derive(Debug)]
pub(crate) struct ComputePipeline(JsValue);

#[derive(Debug)]
pub(crate) struct BufferBinding<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) offset: u64,
    pub(crate) size: Option<NonZero<u64>>,
}

#[derive(Debug)]
pub(crate) enum BindingResource<'a> {
    Buffer(BufferBinding<'a>),
}

#[derive(Debug)]
pub(crate) struct BindGroupEntry<'a> {
    pub(crate) binding: u32,
    pub(crate) resource: BindingResource<'a>,
}

#[derive(Debug)]
pub(crate) struct BindGroupDescriptor<'a> {
    pub(crate) label: Option<&'a str>,
    pub(crate) layout: &'a BindGroupLayout,
    pub(crate) entries: &'a [BindGroupEntry<'a>],
}

/// What is bound together, kept as long as commands may use it.
#[derive(Debug)]
pub(crate) struct BindGroup {
    js: JsValue,
    _buffers: Vec<Buffer>,
}

#[derive(Debug, Default)]
pub(crate) struct CommandEncoderDescriptor;

#[derive(Debug)]
pub(crate) struct CommandEncoder(js::CommandEncoder);

#[derive(Debug)]
pub(crate) struct CommandBuffer(JsValue);

#[derive(Debug, Default)]
pub(crate) struct ComputePassDescriptor;

impl CommandEncoder {
    /// The pass ends where it is dropped.
    pub(crate) fn begin_compute_pass(&mut self, _: &ComputePassDescriptor) -> ComputePass<'_> {
        ComputePass {
            js: self.0.begin_compute_pass(),
            _encoder: self,
        }
    }

    pub(crate) fn copy_buffer_to_buffer(
        &mut self,
        from: &Buffer,
        from_offset: u64,
        to: &Buffer,
        to_offset: u64,
        bytes: u64,
    ) {
        let (from_offset, to_offset, bytes) = (from_offset as f64, to_offset as f64, bytes as f64);
        (self.0).copy_buffer_to_buffer(&from.0.js, from_offset, &to.0.js, to_offset, bytes);
    }

    pub(crate) fn finish(self) -> CommandBuffer {
        CommandBuffer(self.0.finish())
    }
}

#[derive(Debug)]
pub(crate) struct ComputePass<'a> {
    js: js::ComputePass,
    _encoder: &'a mut CommandEncoder,
}

impl ComputePass<'_> {
    pub(crate) fn set_pipeline(&mut self, pipeline: &ComputePipeline) {
        self.js.set_pipeline(&pipeline.0);
    }

    pub(crate) fn set_bind_group(&mut self, index: u32, group: &BindGroup, offsets: &[u32]) {
        match offsets {
            [] => self.js.set_bind_group(index, &group.js),
            _ => (self.js).set_bind_group_at(index, &group.js, offsets, 0, offsets.len() as u32),
        }
    }

    pub(crate) fn set_immediates(&mut self, offset: u32, data: &[u8]) {
        self.js.set_immediates(offset, data);
    }

    pub(crate) fn dispatch_workgroups(&mut self, x: u32, y: u32, z: u32) {
        self.js.dispatch_workgroups(x, y, z);
    }
}

impl Drop for ComputePass<'_> {
    fn drop(&mut self) {
        self.js.end();
    }
}
