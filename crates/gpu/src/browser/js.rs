//! The objects of WebGPU, with what this crate calls of them.
//!
//! Described in <https://www.w3.org/TR/webgpu/>. What is passed as a descriptor is made by [`object`].

use js_sys::{Array, Object, Promise, Reflect, Uint8Array};
use wasm_bindgen::prelude::*;

#[wasm_bindgen]
extern "C" {
    #[derive(Debug, Clone)]
    pub(super) type Gpu;
    #[wasm_bindgen(method, js_name = requestAdapter)]
    pub(super) fn request_adapter(this: &Gpu, options: &Object) -> Promise;
    #[wasm_bindgen(method, getter, js_name = wgslLanguageFeatures)]
    pub(super) fn wgsl_language_features(this: &Gpu) -> Option<Names>;

    /// A set of strings.
    #[derive(Debug, Clone)]
    pub(super) type Names;
    #[wasm_bindgen(method)]
    pub(super) fn has(this: &Names, name: &str) -> bool;

    #[derive(Debug, Clone)]
    pub(super) type Adapter;
    #[wasm_bindgen(method, getter)]
    pub(super) fn features(this: &Adapter) -> Names;
    #[wasm_bindgen(method, getter)]
    pub(super) fn limits(this: &Adapter) -> JsValue;
    #[wasm_bindgen(method, getter)]
    pub(super) fn info(this: &Adapter) -> JsValue;
    #[wasm_bindgen(method, js_name = requestDevice)]
    pub(super) fn request_device(this: &Adapter, descriptor: &Object) -> Promise;

    #[derive(Debug, Clone)]
    pub(super) type Device;
    #[wasm_bindgen(method, getter)]
    pub(super) fn queue(this: &Device) -> Queue;
    #[wasm_bindgen(method, getter)]
    pub(super) fn lost(this: &Device) -> Promise;
    #[wasm_bindgen(method, setter, js_name = onuncapturederror)]
    pub(super) fn set_onuncapturederror(this: &Device, handler: &JsValue);
    #[wasm_bindgen(method)]
    pub(super) fn destroy(this: &Device);
    #[wasm_bindgen(method, js_name = pushErrorScope)]
    pub(super) fn push_error_scope(this: &Device, filter: &str);
    #[wasm_bindgen(method, js_name = popErrorScope)]
    pub(super) fn pop_error_scope(this: &Device) -> Promise;
    #[wasm_bindgen(method, js_name = createBuffer)]
    pub(super) fn create_buffer(this: &Device, descriptor: &Object) -> Buffer;
    #[wasm_bindgen(method, js_name = createBindGroupLayout)]
    pub(super) fn create_bind_group_layout(this: &Device, descriptor: &Object) -> JsValue;
    #[wasm_bindgen(method, js_name = createPipelineLayout)]
    pub(super) fn create_pipeline_layout(this: &Device, descriptor: &Object) -> JsValue;
    #[wasm_bindgen(method, js_name = createShaderModule)]
    pub(super) fn create_shader_module(this: &Device, descriptor: &Object) -> JsValue;
    #[wasm_bindgen(method, js_name = createComputePipeline)]
    pub(super) fn create_compute_pipeline(this: &Device, descriptor: &Object) -> JsValue;
    #[wasm_bindgen(method, js_name = createBindGroup)]
    pub(super) fn create_bind_group(this: &Device, descriptor: &Object) -> JsValue;
    #[wasm_bindgen(method, js_name = createCommandEncoder)]
    pub(super) fn create_command_encoder(this: &Device) -> CommandEncoder;

    #[derive(Debug, Clone)]
    pub(super) type Queue;
    #[wasm_bindgen(method, js_name = writeBuffer)]
    pub(super) fn write_buffer(this: &Queue, buffer: &Buffer, offset: f64, data: &[u8]);
    #[wasm_bindgen(method)]
    pub(super) fn submit(this: &Queue, commands: &Array);
    #[wasm_bindgen(method, js_name = onSubmittedWorkDone)]
    pub(super) fn on_submitted_work_done(this: &Queue) -> Promise;

    #[derive(Debug, Clone)]
    pub(super) type Buffer;
    #[wasm_bindgen(method, js_name = mapAsync)]
    pub(super) fn map_async(this: &Buffer, mode: u32) -> Promise;
    #[wasm_bindgen(method, catch, js_name = getMappedRange)]
    pub(super) fn mapped_range(this: &Buffer) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method)]
    pub(super) fn unmap(this: &Buffer);
    #[wasm_bindgen(method, js_name = destroy)]
    pub(super) fn destroy_buffer(this: &Buffer);

    #[derive(Debug, Clone)]
    pub(super) type CommandEncoder;
    #[wasm_bindgen(method, js_name = beginComputePass)]
    pub(super) fn begin_compute_pass(this: &CommandEncoder) -> ComputePass;
    #[wasm_bindgen(method, js_name = copyBufferToBuffer)]
    pub(super) fn copy_buffer_to_buffer(
        this: &CommandEncoder,
        from: &Buffer,
        from_offset: f64,
        to: &Buffer,
        to_offset: f64,
        bytes: f64,
    );
    #[wasm_bindgen(method)]
    pub(super) fn finish(this: &CommandEncoder) -> JsValue;

    #[derive(Debug, Clone)]
    pub(super) type ComputePass;
    #[wasm_bindgen(method, js_name = setPipeline)]
    pub(super) fn set_pipeline(this: &ComputePass, pipeline: &JsValue);
    #[wasm_bindgen(method, js_name = setBindGroup)]
    pub(super) fn set_bind_group(this: &ComputePass, index: u32, group: &JsValue);
    #[wasm_bindgen(method, js_name = setBindGroup)]
    pub(super) fn set_bind_group_at(
        this: &ComputePass,
        index: u32,
        group: &JsValue,
        offsets: &[u32],
        start: u32,
        len: u32,
    );
    #[wasm_bindgen(method, js_name = setImmediates)]
    pub(super) fn set_immediates(this: &ComputePass, offset: u32, data: &[u8]);
    #[wasm_bindgen(method, js_name = dispatchWorkgroups)]
    pub(super) fn dispatch_workgroups(this: &ComputePass, x: u32, y: u32, z: u32);
    #[wasm_bindgen(method)]
    pub(super) fn end(this: &ComputePass);
}

/// An object with these members.
pub(super) fn object<const N: usize>(members: [(&str, JsValue); N]) -> Object {
    let object = Object::new();
    for (name, value) in members {
        set(&object, name, &value);
    }
    object
}

/// Sets a member of an object made here.
pub(super) fn set(object: &Object, name: &str, value: &JsValue) {
    // Only of frozen objects and proxies can this fail.
    let _ = Reflect::set(object, &name.into(), value);
}

/// A member of any object; `undefined` where there is none.
pub(super) fn member(of: &JsValue, name: &str) -> JsValue {
    Reflect::get(of, &name.into()).unwrap_or_default()
}

/// A member that is a number; 0 where there is none.
pub(super) fn number(of: &JsValue, name: &str) -> f64 {
    member(of, name).as_f64().unwrap_or_default()
}

/// A member that is a string; empty where there is none.
pub(super) fn text(of: &JsValue, name: &str) -> String {
    member(of, name).as_string().unwrap_or_default()
}

/// The bytes of an `ArrayBuffer`, which is copied.
pub(super) fn bytes(buffer: &JsValue) -> Vec<u8> {
    Uint8Array::new(buffer).to_vec()
}

/// `navigator.gpu`, of a page or a Worker; none where there is no WebGPU.
pub(super) fn gpu() -> Option<Gpu> {
    let gpu = member(&member(&js_sys::global(), "navigator"), "gpu");
    gpu.is_object().then(|| gpu.unchecked_into())
}
