//! Pipelines: made once for each shader and set of constants, and cached on disk where that helps.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Device;
use super::disk_cache::DiskCache;
use crate::shader::{Access, Shader, Target};
use crate::{DeviceOptions, Features, GpuError, wgpu};

/// The shader compiler in use.
const TARGET: Target = match cfg!(target_arch = "wasm32") {
    true => Target::Browser,
    false => Target::Native,
};

#[cfg(not(target_arch = "wasm32"))]
use super::trusted::shader_module;

/// A browser compiles with checks of its own.
#[cfg(target_arch = "wasm32")]
fn shader_module(
    device: &wgpu::Device,
    descriptor: wgpu::ShaderModuleDescriptor<'_>,
) -> wgpu::ShaderModule {
    device.create_shader_module(descriptor)
}

/// A compiled shader with its bind group layout.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) wgpu: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
    /// Whether its parameters are immediates.
    pub(crate) has_immediates: bool,
}

/// A shader by name, and its constants by name and bits.
type Key = (&'static str, Vec<(&'static str, u64)>);

#[derive(Debug)]
pub(super) struct Pipelines {
    features: Features,
    /// Parameters of at most so many bytes are immediates.
    immediate_bytes: u32,
    made: Mutex<HashMap<Key, Arc<Pipeline>>>,
    modules: Mutex<HashMap<&'static str, wgpu::ShaderModule>>,
    /// The layout of parameters in a buffer.
    params_layout: wgpu::BindGroupLayout,
    cache: Option<DiskCache>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held left the map consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pipelines {
    pub(super) fn new(
        device: &wgpu::Device,
        adapter: &wgpu::Adapter,
        features: Features,
        immediate_bytes: u32,
        options: &DeviceOptions,
    ) -> Pipelines {
        let cache = match &options.pipeline_cache {
            Some(folder) if features.pipeline_cache => DiskCache::open(device, adapter, folder),
            _ => None,
        };
        let params_layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some("params"),
            entries: &[wgpu::BindGroupLayoutEntry {
                binding: 0,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Uniform,
                    has_dynamic_offset: true,
                    min_binding_size: None,
                },
                count: None,
            }],
        });
        Pipelines {
            features,
            immediate_bytes,
            made: Mutex::default(),
            modules: Mutex::default(),
            params_layout,
            cache,
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.made).len()
    }

    pub(super) fn params_layout(&self) -> &wgpu::BindGroupLayout {
        &self.params_layout
    }

    pub(super) fn get(
        &self,
        device: &Device,
        shader: &'static Shader,
        constants: &[(&'static str, f64)],
    ) -> Result<Arc<Pipeline>, GpuError> {
        let bits = constants
            .iter()
            .map(|(name, value)| (*name, value.to_bits()));
        let key = (shader.name, bits.collect());
        if let Some(pipeline) = lock(&self.made).get(&key) {
            return Ok(pipeline.clone());
        }
        let what = format!("kernel `{}`", shader.name);
        if !shader.runs_with(self.features) {
            return Err(GpuError::Unsupported {
                what,
                reason: format!("it needs {:?}", shader.needs),
            });
        }
        let pipeline = device.checked(&what, || self.make(device.wgpu(), shader, constants))?;
        let pipeline = Arc::new(pipeline);
        Ok(lock(&self.made).entry(key).or_insert(pipeline).clone())
    }

    fn make(
        &self,
        device: &wgpu::Device,
        shader: &'static Shader,
        constants: &[(&'static str, f64)],
    ) -> Pipeline {
        let has_immediates =
            self.features.immediates && shader.params_bytes() <= self.immediate_bytes;
        let features = Features {
            immediates: has_immediates,
            ..self.features
        };
        let mut modules = lock(&self.modules);
        let module = modules.entry(shader.name).or_insert_with(|| {
            let text = shader.assemble(TARGET, features);
            let descriptor = wgpu::ShaderModuleDescriptor {
                label: Some(shader.name),
                source: wgpu::ShaderSource::Wgsl(text.into()),
            };
            shader_module(device, descriptor)
        });
        let entries: Vec<_> = (0..)
            .zip(shader.bindings)
            .map(|(binding, access)| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage {
                        read_only: *access == Access::Read,
                    },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(shader.name),
            entries: &entries,
        });
        let params = (!has_immediates).then_some(Some(&self.params_layout));
        let groups: Vec<_> = [Some(&layout)].into_iter().chain(params).collect();
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(shader.name),
            bind_group_layouts: &groups,
            immediate_size: if has_immediates {
                shader.params_bytes()
            } else {
                0
            },
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(shader.name),
            layout: Some(&pipeline_layout),
            module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants,
                // Kernels write shared memory before they read it.
                zero_initialize_workgroup_memory: false,
            },
            cache: self.cache.as_ref().map(DiskCache::wgpu),
        });
        Pipeline {
            wgpu: pipeline,
            layout,
            has_immediates,
        }
    }

    /// Writes the compiled pipelines, if there is a file for them and anything is new; returns whether it
    /// did.
    pub(super) fn save(&self) -> std::io::Result<bool> {
        match &self.cache {
            Some(cache) if self.len() > 0 => cache.save(),
            _ => Ok(false),
        }
    }
}
