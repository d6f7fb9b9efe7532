//! The three `unsafe` promises that `wgpu` asks for: experimental features, shaders without some run-time
//! checks, and compiled pipelines from disk.

#![allow(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]

use wgpu::{ExperimentalFeatures, PipelineCache, PipelineCacheDescriptor, ShaderModule};
use wgpu::{ShaderModuleDescriptor, ShaderRuntimeChecks};

/// Opts in to features whose bugs may not surface as validation errors: cooperative matrices.
pub(super) fn experimental_features() -> ExperimentalFeatures {
    // SAFETY: the only experimental feature requested is cooperative matrices, used by a few shaders of
    // this crate, whose loads and stores stay within their workgroups' memory.
    unsafe { ExperimentalFeatures::enabled() }
}

/// Compiles one of this crate's shaders without loop counters and bounds checks, which cost a twentieth of a
/// decoded token. That includes bounds checks on buffers: Vulkan and DX12 may check those by themselves,
/// Metal doesn't.
pub(super) fn shader_module(
    device: &wgpu::Device,
    descriptor: ShaderModuleDescriptor<'_>,
) -> ShaderModule {
    let mut checks = ShaderRuntimeChecks::checked();
    checks.force_loop_bounding = false;
    checks.bounds_checks = false;
    // SAFETY: without the checks, an endless loop is undefined behaviour, and so is an index out of bounds.
    // Every loop of this crate's shaders counts up to, or halves down from, a number that is fixed before it
    // begins. Indices follow from invocation ids and from shapes that the functions of `kernels` check
    // against the sizes of buffers before they record a dispatch. Values in buffers that become indices are
    // bounded by capacities that come with the parameters: positions are clamped to the table of angles
    // (`heads.wgsl`, `attention_split_kv.wgsl`) and to the tokens (`penalize.wgsl`), compared with the
    // cache's capacity before anything is stored or read (`heads.wgsl`, `attention*.wgsl`) and with that of
    // the tokens (`sample.wgsl`); ids are compared with the rows of the table (`embed.wgsl`) and with the
    // vocabulary (`penalize.wgsl`, `log_probability.wgsl`). Rows, pages and places of sequences, also those that are
    // sampled for (`samplers.wgsl`), are those of a table that the engine fills from what it has allocated
    // (`Sequences`), and that it doesn't sample from once it has filled it for others (`engine::gpu::cache::Current`).
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}

/// A pipeline cache initialised with `data`, from an earlier run on the same adapter and driver.
pub(super) fn pipeline_cache(device: &wgpu::Device, data: Option<&[u8]>) -> PipelineCache {
    let descriptor = PipelineCacheDescriptor {
        label: None,
        data,
        // Data that doesn't fit this driver is dropped.
        fallback: true,
    };
    // SAFETY: `data` was returned by `PipelineCache::get_data` and written by this crate: it comes from the
    // caller's own cache folder, and its checksum was verified. `wgpu` compares the adapter and the driver's
    // version itself.
    unsafe { device.create_pipeline_cache(&descriptor) }
}
