// What gemm_coop*.wgsl read and write.

@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
